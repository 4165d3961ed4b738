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
    ("triton_fused", "attnscope.implementations.triton_fused:TritonFused"),
    ("forward_v1", "attnscope.implementations.cuda_ladder:ForwardV1"),
    ("forward_v2", "attnscope.implementations.cuda_ladder:ForwardV2"),
    ("forward_v3", "attnscope.implementations.cuda_ladder:ForwardV3"),
    ("forward_v4", "attnscope.implementations.cuda_ladder:ForwardV4"),
    ("forward_v5", "attnscope.implementations.cuda_ladder:ForwardV5"),
    ("forward_v6", "attnscope.implementations.cuda_ladder:ForwardV6"),
    ("forward_v7_mma", "attnscope.implementations.cuda_ladder:ForwardV7Mma"),
    ("forward_v8_async", "attnscope.implementations.cuda_ladder:ForwardV8Async"),
    ("backward_v1", "attnscope.implementations.cuda_ladder:BackwardV1"),
    ("backward_v1_fixed", "attnscope.implementations.cuda_ladder:BackwardV1Fixed"),
    ("backward_v2", "attnscope.implementations.cuda_ladder:BackwardV2"),
    ("backward_v3", "attnscope.implementations.cuda_ladder:BackwardV3"),
    ("backward_v4", "attnscope.implementations.cuda_ladder:BackwardV4"),
    ("backward_v5", "attnscope.implementations.cuda_ladder:BackwardV5"),
    ("backward_v6", "attnscope.implementations.cuda_ladder:BackwardV6"),
    ("backward_v7", "attnscope.implementations.cuda_ladder:BackwardV7"),
    ("backward_v8", "attnscope.implementations.cuda_ladder:BackwardV8"),
    ("backward_v9_fused", "attnscope.implementations.cuda_ladder:BackwardV9Fused"),
)
