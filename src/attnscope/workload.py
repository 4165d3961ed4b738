"""Stage 1: a workload is a concrete attention problem, spelled the same everywhere.

Reads nothing, writes nothing; imports neither torch nor a later stage, so that a laptop can count the FLOPs of a
stranger's record. :mod:`attnscope.inputs` makes its tensors, :mod:`attnscope.reference` its truth.

Spelling: ``B8,H32/8,L1024,S2048,D64,Dv128,bf16,causal=bottom_right,window=512,softcap=30,scale=0.1,alibi,sinks,
mask=bool,bias=bf16:1xHxLxS,lengths=7/5/0,packed=300/212/0/512,dropout=0.1,layout=blhd``.

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
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from attnscope.errors import UnknownName, WorkloadError
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
        _validate(self)

    @classmethod
    def parse(cls, text: str) -> Workload:
        """The workload that ``text`` spells. Raises WorkloadError with what was wrong and a hint."""
        return cls(**_parse_fields(text))  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The canonical spelling; ``Workload.parse(str(w)) == w``."""
        return ",".join(_spell(self))

    @property
    def slug(self) -> str:
        """The spelling as a file name."""
        return re.sub(r"[^A-Za-z0-9.,_-]", "-", str(self))[:180]

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

        Forward: q, k, v, bias, mask in; out. Backward: q, k, v, bias, mask, out, dO, lse in; dq, dk, dv, dbias out.
        Keys beyond ``lengths`` are not counted.
        """
        size = DTYPE_BYTES[self.dtype]
        keys = sum(self.key_length(b) for b in range(self.B)) if self.lengths is not None else self.B * self.S
        q = self.B * self.H * self.L * self.D * size
        out = self.B * self.H * self.L * self.D_v * size
        k, v = keys * self.H_kv * self.D * size, keys * self.H_kv * self.D_v * size
        mask = math.prod(self.broadcast_shape(self.mask)) if self.mask else 0
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
    alike = workload.lengths is None
    batches = range(1) if alike else range(workload.B)
    if workload.packed is not None:
        # sequences are independent problems
        return sum(_visible_pairs(workload.replace(L=n, S=n, packed=None)) for n in workload.packed if n)
    if alike and workload.B == 0:
        return 0
    total = sum(high - low for b in batches for low, high in (workload.row_interval(b, i) for i in range(workload.L)))
    return total * workload.B if alike else total


def _validate(w: Workload) -> None:
    for name in ("B", "H", "H_kv", "L", "S", "D", "D_v"):
        size, least = getattr(w, name), 1 if name in ("H", "H_kv", "D", "D_v") else 0
        if isinstance(size, bool) or not isinstance(size, int) or not least <= size <= MAX_SIZE:
            raise WorkloadError(f"{name} must be a whole number from {least} to 2**31 - 1, got {size!r}")
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
        raise WorkloadError(f"bias_shape needs bias = a dtype, got bias_shape={w.bias_shape!r} alone")
    _validate_numbers(w)
    _validate_ragged(w)
    if w.layout == "qkv" and (w.H != w.H_kv or w.L != w.S or w.D != w.D_v):
        raise WorkloadError(f"layout=qkv packs q, k and v of one shape: it needs H = H_kv, L = S, D = D_v, got {w}")


def _validate_numbers(w: Workload) -> None:
    if w.window is not None and (not isinstance(w.window, int) or w.window < 1):
        raise WorkloadError(f"window must be a whole number of keys, at least 1, got {w.window!r}")
    for name in ("softcap", "scale"):
        value = getattr(w, name)
        if value is not None and not math.isfinite(value):
            raise WorkloadError(f"{name} must be finite, got {value!r}")
    if w.softcap is not None and w.softcap <= 0:
        raise WorkloadError(f"softcap must be above 0, got {w.softcap!r}")
    if not 0 <= w.dropout < 1:
        raise WorkloadError(f"dropout must lie in [0, 1), got {w.dropout!r}")


def _validate_ragged(w: Workload) -> None:
    if w.lengths is not None:
        if len(w.lengths) != w.B:
            raise WorkloadError(f"lengths must name one key length per batch entry, B = {w.B}, got {len(w.lengths)}")
        if any(not 0 <= n <= w.S for n in w.lengths):
            raise WorkloadError(f"lengths must lie in 0..S = {w.S}, got {'/'.join(map(str, w.lengths))}")
    if w.packed is not None:
        if w.lengths is not None:
            raise WorkloadError("packed and lengths exclude each other: packed sequences carry no padding")
        if any(n < 0 for n in w.packed):
            raise WorkloadError(f"packed lengths must be 0 or more, got {'/'.join(map(str, w.packed))}")
        total = sum(w.packed)
        if w.B != 1 or w.L != total or w.S != total:
            raise WorkloadError(
                f"packed sequences lie end to end in one batch entry: B must be 1 and L = S = {total}, "
                f"got B{w.B}, L{w.L}, S{w.S}\nhint: leave B, L and S out"
            )


def _one_of(what: str, value: str, known: Iterable[str]) -> None:
    known = tuple(known)
    if value not in known:
        raise WorkloadError(str(UnknownName(what, str(value), known)))


def _check_pattern(name: str, pattern: str) -> None:
    letters = pattern.split("x")
    if len(letters) != 4 or any(letter not in axis for letter, axis in zip(letters, BROADCAST_AXES, strict=True)):
        raise WorkloadError(
            f"{name} must broadcast to (B, H, L, S): four letters or ones such as 1xHxLxS, got {pattern!r}"
        )


_SIZE = re.compile(r"(B|H|L|S|Dv|D)(\d+)(?:/(\d+))?")
_WORDS = (
    "causal",
    "window",
    "softcap",
    "scale",
    "alibi",
    "sinks",
    "mask",
    "bias",
    "lengths",
    "packed",
    "dropout",
    "layout",
)


def _parse_fields(text: str) -> dict[str, object]:
    fields: dict[str, object] = {}
    for token in (part.strip() for part in text.split(",")):
        if not token:
            raise WorkloadError(f"workload has an empty part: {text!r}\nhint: parts are separated by single commas")
        for name, value in _parse_token(token, text):
            if name in fields:
                raise WorkloadError(f"workload names {name} twice: {text!r}")
            fields[name] = value
    if isinstance(fields.get("packed"), tuple):
        total = sum(fields["packed"])  # type: ignore[call-overload]
        fields = {"B": 1, "L": total, "S": total} | fields
    if "lengths" in fields and "B" not in fields:
        fields["B"] = len(fields["lengths"])  # type: ignore[arg-type]
    for name in ("H", "L", "D"):
        if name not in fields:
            raise WorkloadError(f"workload must name {name}, got {text!r}\nhint: e.g. B8,H16,L1024,D64,bf16,causal")
    return fields


def _parse_token(token: str, text: str) -> Iterator[tuple[str, object]]:
    if size := _SIZE.fullmatch(token):
        letter, number, kv = size.groups()
        if kv is not None and letter != "H":
            raise WorkloadError(f"only H takes a second number (H32/8), got {token!r}")
        yield ("D_v" if letter == "Dv" else letter), int(number)
        if kv is not None:
            yield "H_kv", int(kv)
        return
    if token in DTYPE_BYTES:
        yield "dtype", token
        return
    word, _, value = token.partition("=")
    if word not in _WORDS:
        raise WorkloadError(
            str(UnknownName("workload field", token, (*_WORDS, *DTYPE_BYTES, "B8", "H16", "L1024", "D64")))
        )
    yield from _parse_word(word, value, token)


def _parse_word(word: str, value: str, token: str) -> Iterator[tuple[str, object]]:
    bare = {"causal": "top_left", "alibi": True, "sinks": True, "mask": "Bx1xLxS"}
    if not value:
        if word not in bare or "=" in token:
            raise WorkloadError(f"{word} needs a value, got {token!r}\nhint: e.g. {_EXAMPLES[word]}")
        yield word, bare[word]
    elif word in ("alibi", "sinks"):
        raise WorkloadError(f"{word} takes no value, got {token!r}")
    elif word == "bias":
        dtype, _, shape = value.partition(":")
        yield "bias", dtype
        yield "bias_shape", shape or "1xHxLxS"
    elif word == "mask":
        kind, _, shape = value.partition(":")
        if kind != "bool":
            raise WorkloadError(f"mask must be bool (a float mask is a bias), got {token!r}\nhint: bias=bf16:1xHxLxS")
        yield "mask", shape or "Bx1xLxS"
    else:
        yield word, _convert(word, value, token)


_EXAMPLES = {
    "window": "window=512", "softcap": "softcap=30", "scale": "scale=0.1", "bias": "bias=bf16:1xHxLxS",
    "lengths": "lengths=7/5/0", "packed": "packed=300/212/512", "dropout": "dropout=0.1", "layout": "layout=blhd",
    "mask": "mask=bool", "causal": "causal=bottom_right", "alibi": "alibi", "sinks": "sinks",
}  # fmt: skip


def _convert(word: str, value: str, token: str) -> object:
    try:
        if word == "window":
            return int(value)
        if word in ("softcap", "scale", "dropout"):
            return float(value)
        if word in ("lengths", "packed"):
            return tuple(int(part) for part in value.split("/"))
    except ValueError:
        raise WorkloadError(f"{token!r} does not read as a value of {word}\nhint: e.g. {_EXAMPLES[word]}") from None
    return value


def _spell(w: Workload) -> Iterator[str]:
    yield f"B{w.B}"
    yield f"H{w.H}" + (f"/{w.H_kv}" if w.H_kv != w.H else "")
    yield f"L{w.L}"
    if w.S != w.L:
        yield f"S{w.S}"
    yield f"D{w.D}"
    if w.D_v != w.D:
        yield f"Dv{w.D_v}"
    yield w.dtype
    if w.causal:
        yield "causal" if w.causal == "top_left" else f"causal={w.causal}"
    for name in ("window", "softcap", "scale"):
        if getattr(w, name) is not None:
            yield f"{name}={getattr(w, name)!r}"
    yield from (name for name in ("alibi", "sinks") if getattr(w, name))
    if w.mask:
        yield "mask=bool" if w.mask == "Bx1xLxS" else f"mask=bool:{w.mask}"
    if w.bias:
        yield f"bias={w.bias}:{w.bias_shape}"
    for name in ("lengths", "packed"):
        if getattr(w, name) is not None:
            yield f"{name}={'/'.join(map(str, getattr(w, name)))}"
    if w.dropout:
        yield f"dropout={w.dropout!r}"
    if w.layout != "bhld":
        yield f"layout={w.layout}"
