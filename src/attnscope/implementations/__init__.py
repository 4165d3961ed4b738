"""Every implementation that comes with attnscope, in listing order: name -> ``"module:Class"``. Nothing heavy here.

Adding one is one file and one line.
"""

IMPLEMENTATIONS: tuple[tuple[str, str], ...] = (
    ("reference_cpu", "attnscope.implementations.reference_cpu:ReferenceCpu"),
    ("naive", "attnscope.implementations.naive:Naive"),
    ("naive_inplace", "attnscope.implementations.naive:NaiveInplace"),
    ("naive_compiled", "attnscope.implementations.naive:NaiveCompiled"),
    ("sdpa_math", "attnscope.implementations.sdpa:SdpaMath"),
    ("sdpa_efficient", "attnscope.implementations.sdpa:SdpaEfficient"),
    ("sdpa_flash", "attnscope.implementations.sdpa:SdpaFlash"),
    ("sdpa_cudnn", "attnscope.implementations.sdpa:SdpaCudnn"),
    ("sdpa_auto", "attnscope.implementations.sdpa:SdpaAuto"),
)
