"""Stage 6: the lines of code that remedies name: the same attention, asked of a fused kernel.

Reads a Workload, or a Problem that a trace shows; writes text. Pure; imports neither torch nor an implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnscope.explaining.shapes import Problem
from attnscope.workload import Workload

SDPA = "torch.nn.functional.scaled_dot_product_attention"
FLEX = "torch.nn.attention.flex_attention, compiled"
KEEP_16_BIT = "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)"
UNPIN = "leave PyTorch its choice (no sdpa_kernel(SDPBackend.MATH))"
HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class _Asked:
    """What a call must say to compute the same. ``unsaid`` names what SDPA has no word for."""

    dtype: str | None
    causal: bool
    mask: bool
    group: int
    scale: float | None = None
    dropout: float = 0.0
    unsaid: tuple[str, ...] = ()

    def line(self) -> str:
        if self.unsaid:
            return f"{FLEX}: SDPA has no {' and no '.join(self.unsaid)}"
        options = [
            "attn_mask=mask" if self.mask else "is_causal=True" if self.causal else "",
            f"dropout_p={self.dropout:g}" if self.dropout else "",
            f"scale={self.scale!r}" if self.scale is not None else "",
            "enable_gqa=True" if self.group > 1 else "",
        ]
        return f"{SDPA}({', '.join(['q, k, v', *filter(None, options)])})"


def sdpa_line(what: Workload | Problem) -> str:
    """The call of SDPA that computes the same attention; in words, what can, where SDPA cannot say it.

    ``is_causal`` only where a causal mask aligned to the top left is all the masking there is; ``mask`` stands for the
    tensor that says everything else.
    """
    return _asked(what).line()


def fused_line(what: Workload | Problem, *, on_gpu: bool = True) -> str:
    """:func:`sdpa_line` as a fused kernel takes it: on a GPU none takes grouped heads in fp32, nor anything in fp64."""
    asked = _asked(what)
    if not on_gpu or asked.unsaid or asked.dtype in HALF or asked.dtype is None:
        return asked.line()
    if asked.dtype == "fp64":
        return f"in fp32, bf16 or fp16 (no fused kernel takes fp64): {asked.line()}"
    if asked.group > 1:
        return (
            f"repeat k and v first, t.repeat_interleave({asked.group}, dim=1) (no fused kernel takes fp32 with grouped "
            f"heads; the efficient one takes them repeated): {replace(asked, group=1).line()}"
        )
    return asked.line()


def grouped_line(what: Workload | Problem, *, on_gpu: bool = True) -> str:
    """The call that repeats no key/value heads, and the dtypes in which a fused kernel takes it."""
    asked = _asked(what)
    asked = replace(asked, group=max(asked.group, 2))  # a trace of repeated heads no longer shows the groups
    if asked.unsaid or not on_gpu:
        return asked.line()
    if asked.dtype in HALF:
        return f"{asked.line()}  # a fused kernel reads each head where it lies"
    return f"in bf16 or fp16 (no fused kernel takes grouped heads in {asked.dtype or 'fp32'}): {asked.line()}"


def _asked(what: Workload | Problem) -> _Asked:
    return _of_workload(what) if isinstance(what, Workload) else _of_problem(what)


def _of_workload(w: Workload) -> _Asked:
    top_left = w.causal == "top_left" or (w.causal == "bottom_right" and w.L == w.S and w.lengths is None)
    geometry = w.window is not None or w.lengths is not None or w.packed is not None
    given = w.mask is not None or w.bias is not None
    unsaid = (("softcap", w.softcap is not None), ("sinks", w.sinks), ("ALiBi but as a whole tensor", w.alibi))
    return _Asked(
        dtype=w.dtype,
        causal=top_left,
        mask=geometry or given or (w.causal is not None and not top_left),
        group=w.group,
        scale=w.scale,
        dropout=w.dropout,
        unsaid=tuple(name for name, wanted in unsaid if wanted),
    )


def _of_problem(problem: Problem) -> _Asked:
    heads = problem.H or 1
    return _Asked(
        dtype=problem.dtype,
        causal=bool(problem.causal),
        mask=problem.mask is not None,
        group=heads // (problem.H_kv or heads),
        dropout=problem.dropout or 0.0,
    )
