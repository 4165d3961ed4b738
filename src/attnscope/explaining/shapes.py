"""Stage 6: what an attention op's arguments say: shapes, dtype, causal, mask, dropout; and the FLOPs that follow.

Reads Ops, writes Problem. Pure; imports neither torch nor an implementation. Argument positions are those of torch's
native functions; nothing is evaluated, and what does not fit a signature stays unknown.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

from attnscope.explaining.call import short_dtype
from attnscope.trace.events import Op, read_arguments


@dataclass(frozen=True)
class Signature:
    """Where an op takes q (k and v follow), its mask, dropout and causal flag; ``blhd`` is the layout of q.

    ``starts`` is the tensor that tells where packed sequences begin; without one the call is not packed. ``window`` is
    where the keys to the left that a row sees are given, those to the right follow. ``bottom_right`` marks kernels that
    align a causal mask and a window to the last key; the others align to the first.
    """

    q: int = 0
    mask: int | None = None
    dropout: int | None = None
    causal: int | None = None
    blhd: bool = False
    starts: int | None = None
    window: int | None = None
    bottom_right: bool = False


def _packages(**positions: int) -> Signature:
    """FlashAttention's own kernels, in whatever package."""
    return Signature(blhd=True, bottom_right=True, **positions)


SIGNATURES = {
    "aten::scaled_dot_product_attention": Signature(mask=3, dropout=4, causal=5),
    "aten::_scaled_dot_product_attention_math": Signature(mask=3, dropout=4, causal=5),
    "aten::_scaled_dot_product_flash_attention": Signature(dropout=3, causal=4, bottom_right=True),
    "aten::_scaled_dot_product_flash_attention_for_cpu": Signature(dropout=3, causal=4, mask=6),
    "aten::_scaled_dot_product_efficient_attention": Signature(mask=3, dropout=5, causal=6),
    "aten::_scaled_dot_product_cudnn_attention": Signature(mask=3, dropout=5, causal=6),
    "aten::_scaled_dot_product_flash_attention_backward": Signature(q=1, dropout=10, causal=11, bottom_right=True),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": Signature(q=1, dropout=6, causal=7, mask=8),
    "aten::_scaled_dot_product_efficient_attention_backward": Signature(q=1, mask=4, dropout=9, causal=11),
    "aten::_scaled_dot_product_cudnn_attention_backward": Signature(q=1, mask=8, dropout=13, causal=14),
    "aten::_flash_attention_forward": _packages(dropout=7, causal=8, starts=3, window=11),
    "aten::_flash_attention_backward": _packages(q=1, dropout=10, causal=11, starts=6, window=15),
    "flash_attn::_flash_attn_forward": _packages(dropout=3, causal=5, window=6),
    "flash_attn::_flash_attn_backward": _packages(q=1, dropout=9, causal=11, window=12),
    "flash_attn::_flash_attn_varlen_forward": _packages(dropout=7, causal=9, starts=3, window=10),
    "flash_attn::_flash_attn_varlen_backward": _packages(q=1, dropout=13, causal=15, starts=9, window=16),
    "FlashAttnFunc": _packages(dropout=3, causal=5, window=6),
    "FlashAttnVarlenFunc": _packages(dropout=7, causal=9, starts=3, window=10),
    "aiter::mha_fwd": _packages(dropout=3, causal=5, window=6),
    "aiter::fmha_v3_fwd": _packages(dropout=3, causal=5, window=6),
    "aiter::_flash_attn_forward": _packages(dropout=3, causal=5, window=6),
}


@dataclass(frozen=True)
class Problem:
    """An attention problem as far as a trace shows it. None is unknown. ``mask`` is a dtype and a shape, as text.

    ``bottom_right`` aligns ``causal`` and ``window`` to the last key, set only where that differs; ``window`` is how
    many keys a row sees to the left and to the right of its own, -1 for all. ``tokens`` are the queries of B packed
    sequences together; how they are divided is in a tensor, not in a trace.
    """

    B: int | None = None
    H: int | None = None
    H_kv: int | None = None
    L: int | None = None
    S: int | None = None
    D: int | None = None
    D_v: int | None = None
    dtype: str | None = None
    causal: bool | None = None
    mask: str | None = None
    dropout: float | None = None
    tokens: int | None = None
    bottom_right: bool = False
    window: tuple[int, int] | None = None

    @property
    def shaped(self) -> bool:
        """Whether all sizes are known."""
        return None not in (self.B, self.H, self.L, self.S, self.D)

    @property
    def folded(self) -> tuple[int, int, int, int] | None:
        """(B·H, L, S, D): the same whether heads are folded into the batch or not."""
        if self.B is None or self.H is None or self.L is None or self.S is None or self.D is None:
            return None
        return self.B * self.H, self.L, self.S, self.D

    @property
    def pairs(self) -> int | None:
        """Query-key pairs that the causal flag (taken as False where it is unknown) and the window leave, over all
        heads."""
        if not self.shaped:
            return None
        B, H, L, S = self.B or 0, self.H or 0, self.L or 0, self.S or 0
        left, right = self.window or (-1, -1)
        right = 0 if self.causal else right
        own = S - L if self.bottom_right else 0  # the key that the first row calls its own
        until = _keys_up_to(own + right, L, S) if right >= 0 else L * S
        return B * H * (until - (_keys_up_to(own - left - 1, L, S) if left >= 0 else 0))

    def flops(self, direction: str) -> int | None:
        """2 (D + D_v) for each pair forward; backward 2.5 times that, with the recomputation (five products of two)."""
        pairs = self.pairs
        if pairs is None:
            return None
        forward = 2 * pairs * ((self.D or 0) + (self.D_v or self.D or 0))
        return forward * 5 // 2 if direction == "backward" else forward

    def least_bytes(self) -> int | None:
        """q, k, v read and the output written, once."""
        if not self.shaped or self.dtype not in ITEM_BYTES:
            return None
        B, H, L, S, D = self.B or 0, self.H or 0, self.L or 0, self.S or 0, self.D or 0
        D_v, H_kv = self.D_v or D, self.H_kv or H
        return ITEM_BYTES[self.dtype] * B * (H * L * (D + D_v) + H_kv * S * (D + D_v))

    def __str__(self) -> str:
        """The workload spelling, as far as it is known; ? for what is not."""
        if not self.shaped and self.tokens is None:
            return UNSHAPED
        heads = f"H{self.H}/{self.H_kv}" if self.H_kv not in (None, self.H) else f"H{self.H}"
        parts = [f"B{self.B}", heads]
        parts += [f"L{self.L}"] if self.tokens is None else [f"{self.tokens} tokens packed"]
        parts += [f"S{self.S}"] if self.S != self.L else []
        parts += [f"D{self.D}"]
        parts += [f"Dv{self.D_v}"] if self.D_v not in (None, self.D) else []
        parts += [self.dtype] if self.dtype else []
        parts += [f"causal{'=bottom_right' if self.bottom_right else ''}"] if self.causal else []
        parts += [self._window_text()] if self.window else []
        parts += [f"mask {self.mask}"] if self.mask else []
        parts += [f"dropout={self.dropout:g}"] if self.dropout else []
        return ",".join(parts)

    def _window_text(self) -> str:
        left, right = self.window or (-1, -1)
        if left >= 0 and (self.causal or left == right):
            return f"window={left + 1}"
        return f"window of {left if left >= 0 else 'all'} keys left, {right if right >= 0 else 'all'} right"


UNSHAPED = "shapes not recorded"
ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def problem_of(op: Op) -> Problem | None:
    """The problem of an attention op; None where the signature is not known or no shapes were recorded."""
    signature = SIGNATURES.get(op.name)
    return _problem(signature, op.raw_args) if signature is not None else None


@functools.lru_cache(maxsize=4096)
def _problem(signature: Signature, raw_args: bytes) -> Problem | None:
    shapes, dtypes, values = read_arguments(raw_args)
    if shapes is None or len(shapes) < signature.q + 3:
        return None
    if signature.starts is not None and signature.starts < len(shapes) and len(shapes[signature.starts]) == 1:
        return _packed(signature, shapes, dtypes, values)
    q, k, v = (_four(shape) for shape in shapes[signature.q : signature.q + 3])
    if q is None or k is None or v is None:
        return None
    if signature.blhd:
        q, k, v = (_swapped(one) for one in (q, k, v))
    mask = None
    if signature.mask is not None and signature.mask < len(shapes) and shapes[signature.mask]:
        sizes = shapes[signature.mask]
        kind = _at(dtypes, signature.mask) or ""
        mask = f"{short_dtype(kind) or kind}:{'x'.join(map(str, sizes))}"
    window = _window(values, signature, shapes)
    return Problem(
        q[0], q[1], k[1], q[2], k[2], q[3], v[3],
        dtype=short_dtype(_at(dtypes, signature.q) or ""),
        causal=_flag(_at(values, signature.causal)),
        mask=mask,
        dropout=_decimal(_at(values, signature.dropout)),
        bottom_right=signature.bottom_right and q[2] != k[2] and (window is not None or _is_causal(values, signature)),
        window=window,
    )  # fmt: skip


def _packed(signature: Signature, shapes: list[list[int]], dtypes: list[str], values: list[str]) -> Problem | None:
    """Of (tokens, H, D) tensors whose sequences begin where a tensor of B + 1 numbers says."""
    q, k, v = shapes[signature.q : signature.q + 3]
    starts = shapes[signature.starts or 0]
    if any(len(one) != 3 or not _sizes(one) for one in (q, k, v)) or not _sizes(starts) or not starts[0]:
        return None
    return Problem(
        starts[0] - 1, q[1], k[1], None, None, q[2], v[2],
        dtype=short_dtype(_at(dtypes, signature.q) or ""),
        causal=_flag(_at(values, signature.causal)),
        dropout=_decimal(_at(values, signature.dropout)),
        tokens=q[0],
        window=_window(values, signature, shapes),
    )  # fmt: skip


def _is_causal(values: list[str], signature: Signature) -> bool:
    return _flag(_at(values, signature.causal)) is True


def _window(values: list[str], signature: Signature, shapes: list[list[int]]) -> tuple[int, int] | None:
    """Keys to the left and right that a row sees, given as two numbers or as one pair; None where it sees all."""
    if signature.window is None or signature.window >= len(shapes):
        return None
    found = [int(one) for one in re.findall(r"-?\d{1,12}", " ".join(values[signature.window : signature.window + 2]))][
        :2
    ]
    if len(found) < 2:
        return None
    left, right = (max(one, -1) for one in found)
    if _is_causal(values, signature):
        right = -1  # causal says it
    return (left, right) if (left, right) != (-1, -1) else None


@functools.lru_cache(maxsize=4096)
def _keys_up_to(last: int, L: int, S: int) -> int:
    """Query-key pairs of ``L`` rows, where row i sees the keys up to ``last + i`` of ``S``."""
    first_full = min(max(S - 1 - last, 0), L)  # from this row on all keys are seen
    first_any = min(max(-last, 0), first_full)
    rows = first_full - first_any
    return rows * (last + 1 + first_any) + rows * (rows - 1) // 2 + (L - first_full) * S


def product_sizes(op: Op) -> tuple[int, int, int, int] | None:
    """(batch, rows, inner, columns) of a batched product; None where no such shapes were recorded."""
    shapes = op.shapes
    if shapes is None:
        return None
    first = 1 if op.name.startswith(("aten::baddbmm", "aten::addmm")) else 0
    pair = shapes[first : first + 2]
    if op.name in ("aten::mm", "aten::addmm"):
        pair = [[1, *one] if _sizes(one) and len(one) == 2 else one for one in pair]
    if len(pair) < 2 or not all(_sizes(one) and len(one) == 3 for one in pair):
        return None
    (n, rows, inner), (_, _, columns) = pair
    return n, rows, inner, columns


def first_shape(op: Op | None) -> list[int] | None:
    """The sizes of the first tensor that an op takes."""
    shapes = op.shapes if op is not None else None
    return next((one for one in shapes or [] if one and _sizes(one)), None)


def operand_sizes(problem: Problem) -> set[int]:
    """Elements of q, k, v, of k and v repeated for their groups, of the three packed into one, and of the output."""
    if not problem.shaped:
        return set()
    B, H, L, S, D = problem.B or 0, problem.H or 0, problem.L or 0, problem.S or 0, problem.D or 0
    H_kv, D_v = problem.H_kv or H, problem.D_v or D
    return {B * H * L * D, B * H * L * D_v, B * H_kv * S * D, B * H_kv * S * D_v, B * H * S * D, B * H * S * D_v,
            3 * B * H * L * D}  # fmt: skip


def tensor_dtypes(op: Op | None) -> list[str]:
    """Our spelling of the dtypes of an op's floating point tensors, in order."""
    return [short for one in (op.dtypes if op is not None else []) if (short := short_dtype(one))]


def count(shape: list[int]) -> int:
    """Elements of a tensor."""
    return math.prod(shape)


def _four(shape: list[int]) -> list[int] | None:
    """Sizes as (B, H, L, D): what has fewer dimensions has one head or one batch, what has more is folded."""
    if not _sizes(shape) or len(shape) < 2:
        return None
    if len(shape) > 4:
        return [math.prod(shape[:-3]), *shape[-3:]]
    return [1] * (4 - len(shape)) + shape if len(shape) != 3 else [shape[0], 1, *shape[1:]]


def _swapped(shape: list[int]) -> list[int]:
    return [shape[0], shape[2], shape[1], shape[3]]


def _sizes(shape: list[int]) -> bool:
    return all(isinstance(n, int) and 0 <= n < 1 << 40 for n in shape)


def _at(values: list[str], index: int | None) -> str | None:
    return values[index] if index is not None and index < len(values) else None


def _flag(text: str | None) -> bool | None:
    return {"True": True, "False": False}.get(text or "")


def _decimal(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value <= 1 else None
