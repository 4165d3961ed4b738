"""Named suites of workloads, as data: what ``attnscope compare NAME`` runs. Part of stage 1, imports no torch."""

from __future__ import annotations

from attnscope.errors import UnknownName, WorkloadError
from attnscope.workload import Workload

TOKENS = 16384  # per batch: the FlashAttention-3 paper's grid


def _grid() -> list[str]:
    lengths = (512, 2048, 4096, 8192, 16384)
    names = [
        f"B{TOKENS // L},H{H},L{L},D{D},bf16{mask}"
        for D, H, sizes in ((64, 32, lengths), (128, 16, lengths), (256, 8, (2048, 8192)))
        for mask in ("", ",causal")
        for L in sizes
    ]
    grouped = ("H32/8", "D128"), ("H16", "D192,Dv128")  # grouped heads; multi-head latent attention's prefill
    return names + [
        f"B{TOKENS // L},{heads},L{L},{dims},bf16{mask}"
        for heads, dims in grouped
        for mask in ("", ",causal")
        for L in (2048, 8192)
    ]


def _masks() -> list[str]:
    """Shapes of the grid: plain, with a bool mask and with biases that one head or one batch entry holds for all."""
    return [
        f"B{TOKENS // L},H{H},L{L},D{D},bf16{option}"
        for D, H in ((64, 32), (128, 16))
        for L in (2048, 4096)
        for option in ("", ",mask=bool", ",bias=bf16:Bx1xLxS", ",bias=bf16:1xHxLxS")
    ]


def _fp16() -> list[str]:
    """Shapes of the grid in both 16-bit dtypes."""
    shapes = ((64, 32, 4096, ""), (64, 32, 8192, ",causal"), (128, 16, 4096, ""), (128, 16, 8192, ",causal"),
              (256, 8, 8192, ",causal"))  # fmt: skip
    return [f"B{TOKENS // L},H{H},L{L},D{D},{dtype}{mask}" for D, H, L, mask in shapes for dtype in ("bf16", "fp16")]


_SPELLED: dict[str, list[str]] = {
    "blog": ["B8,H16,L1024,D64,bf16,causal"],
    "gpt2-forward": ["B8,H12,L1024,D64,fp32,causal,layout=qkv"],
    "gpt2-backward": ["B4,H12,L1024,D64,fp32,causal,layout=qkv"],
    "grid": _grid(),
    "decode": [
        "B8,H32/8,L1,S8192,D128,bf16",
        "B64,H32/8,L1,S4096,D128,bf16",
        "B1,H32/8,L1,S32768,D128,bf16",
        "B1,H32/8,L1,S4096,D128,bf16",
        "B256,H32/8,L1,S2048,D128,bf16",
    ],
    "short": [
        "B1,H32,L128,D128,bf16,causal",
        "B1,H32,L512,D128,bf16,causal",
        "B64,H16,L256,D64,bf16,causal",
        "B32,H12,L512,D64,bf16",
        "B128,H12,L128,D64,bf16",
        "B16,H32/8,L512,D128,bf16,causal",
    ],
    "ragged": [
        "B4,H16,L1024,D64,bf16,lengths=1024/700/65/0",
        "B4,H16,L1024,D64,bf16,causal,lengths=1024/700/65/1",
        "H16,D64,bf16,causal,packed=300/212/0/512/1024",
        "H16/4,D128,bf16,packed=2048/65/127/1808",
        "B2,H16,L127,S704,D64,bf16,causal=bottom_right",
        "B2,H16,L704,S127,D64,bf16,causal",
        "B2,H16,L65,S704,D80,bf16",
        "B2,H16,L704,D64,bf16,causal",
        "B2,H16,L1024,D80,bf16,causal",
        "B2,H16,L1024,D96,bf16,causal",
        "B2,H16,L1,S65,D64,bf16",
        "B2,H16,L65,S1,D64,bf16",
    ],
    "masks": _masks(),
    "fp16": _fp16(),
    "blog-small": ["B1,H4,L256,D64,bf16,causal"],
    "gpt2-small": ["B1,H4,L256,D64,fp32,causal,layout=qkv"],
}

SUITES: dict[str, tuple[Workload, ...]] = {
    name: tuple(Workload.parse(text) for text in texts) for name, texts in _SPELLED.items()
}
CPU_DEFAULT = ("blog-small", "gpt2-small")
GPU_DEFAULT = ("blog",)


def find_workloads(names: list[str]) -> list[Workload]:
    """The workloads that suite names and spellings stand for, in order, each once.

    Raises:
        WorkloadError: a name is neither a suite nor a workload's spelling.
    """
    found: dict[Workload, None] = {}
    for name in names:
        if name in SUITES:
            found.update(dict.fromkeys(SUITES[name]))
        elif "," not in name:  # no workload can be spelled in one word: it names at least H, L and D
            raise WorkloadError(f"{UnknownName('suite', name, SUITES)} (a workload reads like {SUITES['blog'][0]})")
        else:
            found[Workload.parse(name)] = None
    return list(found)
