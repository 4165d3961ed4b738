"""Stage 1: a workload is a concrete attention problem, spelled the same everywhere.

Reads nothing, writes nothing; imports neither torch nor a later stage, so that a laptop can count the FLOPs of a
stranger's record. :mod:`attnscope.spelling` reads and writes its words, :mod:`attnscope.inputs` makes
its tensors, :mod:`attnscope.reference` its truth.

Geometry: query ``i`` of batch ``b`` stands at key position ``p = i`` (``top_left``, the default) or
``p = i + S_b - L`` (``bottom_right``; ``S_b`` is ``lengths[b]``, else ``S``). It sees key ``j`` when all of these
hold: ``j < S_b``; causal: ``j <= p``; ``window=W``: ``|p - j| < W``; ``packed``: ``i`` and ``j`` lie in the same
sequence; and what ``mask`` says. So a window of W holds at most W keys under a causal mask, the query's own among them.
Scores are ``softcap * tanh(scale * q.k / softcap)`` (without softcap: ``scale * q.k``), then plus bias, plus
``-slope_h * |p - j|`` (alibi), then masked. A sink is one more score per head, without a value.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from attnscope.errors import UnknownName, WorkloadError
from attnscope.spelling import EXAMPLES, parse_fields, spell
from attnscope.units import DTYPE_BYTES

DIRECTIONS = ("forward", "backward")
CAUSAL_ALIGNMENTS = ("top_left", "bottom_right")
LAYOUTS = ("bhld", "blhd", "qkv")
MAX_SIZE = 2**31 - 1
BROADCAST_AXES = (("B", "1"), ("H", "1"), ("L", "1"), ("S", "1"))


@dataclass(frozen=True)
class Workload:
    """One attention problem: B batch, H query heads, H_kv key/value heads, L queries, S keys, D and D_v head dims.

    ``S``, ``H_kv``, ``D_v`` default to ``L``, ``H``, ``D``. ``mask`` and ``bias_shape`` are broadcast patterns of four
    letters or ones, e.g. ``1xHxLxS``. ``lengths`` are key lengths, one a batch entry; ``packed`` are the lengths of
    sequences laid end to end in one batch entry. ``scale`` defaults to D**-0.5.

    Raises:
        WorkloadError: a size, word or combination is impossible.
    """

    H: int
    L: int
    D: int
    B: int = 1
    S: int = -1
    H_kv: int = -1
    D_v: int = -1
    dtype: str = "bf16"
    causal: str | None = None
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    alibi: bool = False
    sinks: bool = False
    mask: str | None = None
    bias: str | None = None
    bias_shape: str | None = None
    lengths: tuple[int, ...] | None = None
    packed: tuple[int, ...] | None = None
    dropout: float = 0.0
    layout: str = "bhld"

    def __post_init__(self) -> None:
        for name, default in (("S", self.L), ("H_kv", self.H), ("D_v", self.D)):
            if getattr(self, name) == -1:
                object.__setattr__(self, name, default)
        if self.bias is not None and self.bias_shape is None:
            object.__setattr__(self, "bias_shape", "1xHxLxS")
        for name in ("lengths", "packed"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _validate(self)

    @classmethod
    def parse(cls, text: str) -> Workload:
        """The workload that ``text`` spells. Raises WorkloadError with what was wrong and a hint."""
        return cls(**parse_fields(text))  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The canonical spelling; ``Workload.parse(str(w)) == w``."""
        return spell(self)

    @property
    def slug(self) -> str:
        """The spelling as a file name; a long one is cut and ends in a digest, so that no two workloads share it."""
        text = str(self)
        safe = re.sub(r"[^A-Za-z0-9.,_-]", "-", text)
        return safe if len(safe) <= 180 else f"{safe[:167]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def effective_scale(self) -> float:
        """``scale``, or D**-0.5 where none is given."""
        return self.D**-0.5 if self.scale is None else self.scale

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.H // self.H_kv

    @property
    def features(self) -> frozenset[str]:
        """The words that a sheet must claim before an implementation may run this workload."""
        words = {
            "gqa": self.H != self.H_kv,
            "cross": self.L != self.S,
            "unequal_head_dims": self.D != self.D_v,
            "window": self.window is not None,
            "softcap": self.softcap is not None,
            "scale": self.scale is not None,
            "alibi": self.alibi,
            "sinks": self.sinks,
            "mask": self.mask is not None,
            "bias": self.bias is not None,
            "lengths": self.lengths is not None,
            "packed": self.packed is not None,
            "dropout": self.dropout > 0,
        }
        found = {word for word, present in words.items() if present}
        return frozenset(found | ({f"causal_{self.causal}"} if self.causal else set()))

    def key_length(self, b: int) -> int:
        """How many keys of batch entry ``b`` are real."""
        return self.lengths[b] if self.lengths is not None else self.S

    def query_offset(self, b: int) -> int:
        """``p - i``: where query 0 of batch entry ``b`` stands among the keys."""
        return self.key_length(b) - self.L if self.causal == "bottom_right" else 0

    def row_interval(self, b: int, i: int) -> tuple[int, int]:
        """Half-open range of keys that row ``i`` of batch ``b`` sees by geometry alone (empty: low >= high)."""
        low, high = 0, self.key_length(b)
        position = i + self.query_offset(b)
        if self.packed is not None:
            start, end = self._sequence_of(i)
            low, high = max(low, start), min(high, end)
        if self.causal:
            high = min(high, position + 1)
        if self.window is not None:
            low, high = max(low, position - self.window + 1), min(high, position + self.window)
        return low, max(low, high)

    def visible_pairs(self) -> int:
        """(query, key) pairs of one head, summed over the batch, that geometry leaves visible.

        A ``mask`` thins them further; how far is known from the tensors (``Inputs.visible_pairs``).
        """
        return _visible_pairs(self)

    def flops(self, direction: str, pairs: int | None = None) -> int:
        """Useful floating point operations, two a multiply-add, visible pairs only.

        Forward: the products Q.K^T and P.V. Backward: those of dV, dP, dQ, dK and the recomputed Q.K^T, which is
        2.5 times the forward where D == D_v (the convention of the FlashAttention papers).
        """
        pairs = self.visible_pairs() if pairs is None else pairs
        dims = self.D + self.D_v if direction == "forward" else 3 * self.D + 2 * self.D_v
        return 2 * pairs * self.H * dims

    def exponentials(self, direction: str, pairs: int | None = None) -> int:
        """Exponentials that must be computed: one a visible pair and head, in either direction."""
        del direction
        return self.H * (self.visible_pairs() if pairs is None else pairs)

    def min_bytes(self, direction: str) -> int:
        """Bytes that must move if each tensor is read or written once: no scores, no copies.

        Forward: q, k, v, bias, mask, the given dropout mask in; out. Backward: those, out, dO and lse in; dq, dk, dv,
        dbias out. Keys beyond ``lengths`` are not counted.
        """
        size = DTYPE_BYTES[self.dtype]
        keys = sum(self.key_length(b) for b in range(self.B)) if self.lengths is not None else self.B * self.S
        q = self.B * self.H * self.L * self.D * size
        out = self.B * self.H * self.L * self.D_v * size
        k, v = keys * self.H_kv * self.D * size, keys * self.H_kv * self.D_v * size
        mask = math.prod(self.broadcast_shape(self.mask)) if self.mask else 0
        mask += self.B * self.H * self.L * self.S if self.dropout else 0
        bias = math.prod(self.broadcast_shape(self.bias_shape)) * DTYPE_BYTES[self.bias] if self.bias else 0
        if direction == "forward":
            return q + k + v + out + mask + bias
        lse = 4 * self.B * self.H * self.L
        return 2 * (q + k + v + bias) + 2 * out + lse + mask

    def score_bytes(self) -> int:
        """Bytes of one (B, H, L, S) score matrix in the workload's dtype: what an unfused implementation writes."""
        return self.B * self.H * self.L * self.S * DTYPE_BYTES[self.dtype]

    def broadcast_shape(self, pattern: str | None) -> tuple[int, int, int, int]:
        """The shape that a broadcast pattern such as ``1xHxLxS`` names here."""
        sizes = {"B": self.B, "H": self.H, "L": self.L, "S": self.S, "1": 1}
        letters = (pattern or "1x1x1x1").split("x")
        b, h, rows, columns = (sizes[letter] for letter in letters)
        return b, h, rows, columns

    def replace(self, **changes: object) -> Workload:
        """A copy with some fields changed; S, H_kv and D_v follow L, H and D where they were equal before."""
        for name, source in (("S", "L"), ("H_kv", "H"), ("D_v", "D")):
            if source in changes and name not in changes and getattr(self, name) == getattr(self, source):
                changes[name] = changes[source]
        if "bias" in changes and changes["bias"] is None:
            changes.setdefault("bias_shape", None)
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def _sequence_of(self, i: int) -> tuple[int, int]:
        start = 0
        for length in self.packed or ():
            if i < start + length:
                return start, start + length
            start += length
        return start, start


@functools.lru_cache(maxsize=512)
def _visible_pairs(workload: Workload) -> int:
    """The sum of ``row_interval``'s widths, in closed form: both ends of the interval are clamped straight lines."""
    w = workload
    if w.packed is not None:  # sequences are independent problems
        return sum(_visible_pairs(w.replace(L=n, S=n, packed=None)) for n in w.packed)
    if w.lengths is None:
        return w.B * _pairs_of_batch(w, w.S, w.query_offset(0) if w.B else 0)
    return sum(_pairs_of_batch(w, w.key_length(b), w.query_offset(b)) for b in range(w.B))


def _pairs_of_batch(w: Workload, keys: int, offset: int) -> int:
    high = w.L * keys
    if w.causal:
        high = _sum_clamped(offset + 1, w.L, keys)
    elif w.window is not None:
        high = _sum_clamped(offset + w.window, w.L, keys)
    low = 0 if w.window is None else _sum_clamped(offset - w.window + 1, w.L, keys)
    return high - low


def _sum_clamped(first: int, count: int, cap: int) -> int:
    """The sum of ``min(max(x, 0), cap)`` over ``count`` consecutive whole numbers from ``first``."""

    def below(x: int) -> int:  # the same sum over all whole numbers up to x
        inside = max(min(x, cap), 0)
        return inside * (inside + 1) // 2 + max(x - cap, 0) * cap

    return below(first + count - 1) - below(first - 1)


def _validate(w: Workload) -> None:
    for name in ("B", "H", "H_kv", "L", "S", "D", "D_v"):
        size, least = getattr(w, name), 1 if name in ("H", "H_kv", "D", "D_v") else 0
        if not _is_whole(size) or not least <= size <= MAX_SIZE:
            spelled = {"H_kv": "H32/8", "D_v": "Dv64"}.get(name, f"{name}{max(least, 8)}")
            raise WorkloadError(
                f"{name} must be a whole number from {least} to 2**31 - 1, got {_show(size)}\nhint: e.g. {spelled}"
            )
    if w.H % w.H_kv:
        raise WorkloadError(
            f"H must be a multiple of H_kv = {w.H_kv}, got {w.H}\n"
            "hint: write H32/8 for 32 query heads on 8 key/value heads"
        )
    _one_of("dtype", w.dtype, tuple(DTYPE_BYTES))
    _one_of("layout", w.layout, LAYOUTS)
    if w.causal is not None:
        _one_of("causal", w.causal, CAUSAL_ALIGNMENTS)
    if w.bias is not None:
        _one_of("bias dtype", w.bias, tuple(DTYPE_BYTES))
    for name, pattern in (("mask", w.mask), ("bias", w.bias_shape)):
        if pattern is not None:
            _check_pattern(name, pattern)
    if w.bias is None and w.bias_shape is not None:
        raise WorkloadError(
            f"bias_shape needs bias = a dtype, got bias_shape={w.bias_shape!r} alone\nhint: bias=bf16:{w.bias_shape}"
        )
    _validate_numbers(w)
    _validate_ragged(w)
    if w.layout == "qkv" and (w.H != w.H_kv or w.L != w.S or w.D != w.D_v):
        raise WorkloadError(
            f"layout=qkv packs q, k and v of one shape: it needs H = H_kv, L = S, D = D_v, got {w}\n"
            "hint: layout=blhd keeps them apart"
        )


def _validate_numbers(w: Workload) -> None:
    if w.window is not None and (not _is_whole(w.window) or not 1 <= w.window <= MAX_SIZE):
        raise WorkloadError(
            f"window must be a whole number of keys, at least 1, got {_show(w.window)}\nhint: e.g. window=512"
        )
    for name in ("softcap", "scale", "dropout"):
        value = getattr(w, name)
        if value is None and name != "dropout":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise WorkloadError(f"{name} must be a finite number, got {value!r}\nhint: e.g. {EXAMPLES[name]}")
        object.__setattr__(w, name, float(value))
    if w.softcap is not None and w.softcap <= 0:
        raise WorkloadError(f"softcap must be above 0, got {w.softcap!r}\nhint: leave it out for no softcap")
    if not 0 <= w.dropout < 1:
        raise WorkloadError(
            f"dropout must lie in [0, 1), got {w.dropout!r}\nhint: it is the probability of dropping, e.g. dropout=0.1"
        )
    for name in ("alibi", "sinks"):
        if not isinstance(getattr(w, name), bool):
            raise WorkloadError(
                f"{name} must be True or False, got {getattr(w, name)!r}\nhint: its numbers come from the seed"
            )


def _validate_ragged(w: Workload) -> None:
    for name in ("lengths", "packed"):
        value = getattr(w, name)
        if value is not None and (not isinstance(value, tuple) or not value or not all(map(_is_whole, value))):
            raise WorkloadError(
                f"{name} must be one or more whole numbers, got {value!r}\nhint: e.g. {EXAMPLES[name]}, or leave it out"
            )
    if w.lengths is not None:
        if len(w.lengths) != w.B:
            raise WorkloadError(
                f"lengths must name one key length per batch entry, B = {w.B}, got {len(w.lengths)}\n"
                "hint: leave B out and it follows from lengths"
            )
        if any(not 0 <= n <= w.S for n in w.lengths):
            raise WorkloadError(
                f"lengths must lie in 0..S = {w.S}, got {'/'.join(map(str, w.lengths))}\n"
                "hint: S is the padded key length, lengths how many keys of it are real"
            )
    if w.packed is not None:
        if w.lengths is not None:
            raise WorkloadError(
                "packed and lengths exclude each other: packed sequences carry no padding\nhint: drop one of them"
            )
        if any(n < 0 for n in w.packed):
            raise WorkloadError(
                f"packed lengths must be 0 or more, got {'/'.join(map(str, w.packed))}\nhint: 0 is an empty sequence"
            )
        total = sum(w.packed)
        if w.B != 1 or w.L != total or w.S != total:
            raise WorkloadError(
                f"packed sequences lie end to end in one batch entry: B must be 1 and L = S = {total}, "
                f"got B{w.B}, L{w.L}, S{w.S}\nhint: leave B, L and S out"
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: object) -> str:
    """A value as an error shows it; Python refuses to print whole numbers of thousands of digits."""
    return f"a number of {value.bit_length()} bits" if _is_whole(value) and abs(value) > 2**128 else repr(value)  # type: ignore


def _one_of(what: str, value: str, known: Iterable[str]) -> None:
    known = tuple(known)
    if value not in known:
        raise WorkloadError(str(UnknownName(what, str(value), known)))


def _check_pattern(name: str, pattern: str) -> None:
    letters = pattern.split("x") if isinstance(pattern, str) else ()
    if len(letters) != 4 or any(letter not in axis for letter, axis in zip(letters, BROADCAST_AXES, strict=True)):
        raise WorkloadError(
            f"{name} must broadcast to (B, H, L, S): each place its letter or 1, got {pattern!r}\n"
            f"hint: {'mask=bool' if name == 'mask' else 'bias=bf16'}:1xHxLxS, or Bx1x1xS for padding"
        )
