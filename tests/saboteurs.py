"""A correct tiled attention with a hook at every step, and a mutant for every way to be wrong or to cheat.

:class:`Tiled` is online softmax over key tiles and the matching backward, float32 on rounded operands, as fused kernels
do it; :class:`Style` holds the ways in which right kernels differ. A :class:`Mutant` is a workload and some functions,
each of which changes one value on its way.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from attnscope.implementation import FEATURES, Gradients, Output, Sheet, SheetImplementation
from attnscope.inputs import row_bounds, torch_dtype
from attnscope.workload import Workload

LOG2E = math.log2(math.e)
Hook = Callable[..., Any]


@dataclass(frozen=True)
class Style:
    """What right kernels choose freely."""

    rows: int = 64
    keys: int = 64
    backwards: bool = False  # key tiles from the last to the first
    splits: int = 1  # split-K: parts that are combined at the end
    exp2: bool = False  # log2(e) folded into the scale
    kahan: bool = False  # compensated sum of the output
    normalised: bool = False  # P divided by its sum before it is rounded
    shuffled: int | None = None  # seed of the order in which backward tiles add up, as atomics do
    exact_delta: bool = False  # delta from the output before it was rounded
    per_head: bool = False  # dk and dv of each query head rounded before the group is summed


class Tiled(SheetImplementation):
    """The implementation; ``hooks`` maps a step's name to a function of its value (and context) that replaces it."""

    summary = "tiles of keys with a running maximum"

    def __init__(self, style: Style = Style(), hooks: dict[str, Hook] | None = None, name: str = "tiled", **sheet: Any):
        self.name, self.style, self.hooks = name, style, hooks or {}
        features = frozenset(FEATURES)
        self.sheet = Sheet(
            **{"dtypes": frozenset({"bf16", "fp16", "fp32"}), "features": features, "lse": True, "deterministic": True}
            | sheet
        )

    def prepare(self, workload, device):
        return PreparedTiled(workload, self.style, dict(self.hooks))


@dataclass
class Saved:
    out: torch.Tensor
    lse: torch.Tensor


class PreparedTiled:
    def __init__(self, workload: Workload, style: Style, hooks: dict[str, Hook]) -> None:
        self.w, self.style, self.hooks = workload, style, hooks
        self.storage = torch_dtype(workload.dtype)

    def hook(self, step: str, value: Any, **context: Any) -> Any:
        return self.hooks[step](value, **context) if step in self.hooks else value

    def forward(self, inputs, *, save=False):
        self.load(inputs)
        tiles = self.tiles(self.w.S, self.style.keys)
        if self.style.backwards:
            tiles = tiles[::-1]
        tiles = self.hook("key_tiles", tiles)
        if self.style.normalised:
            return self.finish(inputs, *self.normalised(tiles))
        parts = [self.online(tiles[part :: self.style.splits]) for part in range(self.style.splits)]
        return self.finish(inputs, *self.with_sink(*self.combine(parts)))

    def load(self, inputs) -> None:
        """Operands in float32, keys and values repeated for their group, everything that masks or adds as one."""
        w, self.inputs = self.w, inputs
        expand = self.hook("expand", lambda t: t.repeat_interleave(w.group, 1))
        self.q, self.grad_out = inputs.q.float(), inputs.grad_out.float()
        self.k, self.v = expand(inputs.k.float()), expand(inputs.v.float())
        self.scale = self.hook("scale", w.effective_scale)
        low, high = row_bounds(self.hook("geometry", w), str(self.q.device))
        keys = torch.arange(w.S, device=self.q.device)
        visible = ((keys >= low[..., None]) & (keys < high[..., None]))[:, None].expand(w.B, w.H, w.L, w.S)
        if inputs.mask is not None:
            visible = visible & self.hook("mask", inputs.mask)
        self.visible = self.hook("visible", visible.clone())
        self.added = self.q.new_zeros(1, 1, 1, 1)
        if inputs.bias is not None:
            self.added = self.added + self.hook("bias", inputs.bias.float())
        if inputs.alibi_slopes is not None:
            self.added = self.added + self.hook("alibi", inputs.alibi_bias())
        self.added = self.added.expand(w.B, w.H, w.L, w.S)
        self.sinks = None if inputs.sinks is None else self.hook("sinks", inputs.sinks.float())
        keep = None if inputs.dropout_keep is None else inputs.dropout_keep.float() / (1 - w.dropout)
        self.keep = self.hook("keep", keep)

    def tiles(self, size: int, step: int) -> list[tuple[int, int]]:
        return [(i, min(i + step, size)) for i in range(0, size, step)]

    def scores(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Masked scores and softcap's derivative."""
        cap = None
        scores = (self.q[:, :, rows] @ self.k[:, :, columns].transpose(-1, -2)) * self.scale
        if self.w.softcap:
            squashed = torch.tanh(scores / self.w.softcap)
            scores, cap = squashed * self.w.softcap, 1 - squashed**2
        scores = self.hook("scores", scores + self.added[:, :, rows, columns], columns=columns)
        return scores.masked_fill(~self.visible[:, :, rows, columns], -torch.inf), cap

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp2(x * LOG2E) if self.style.exp2 else torch.exp(x)

    def online(self, tiles: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Running maximum, sum and unnormalised output over some key tiles."""
        w, every = self.w, slice(0, self.w.L)
        top = self.q.new_full((w.B, w.H, w.L, 1), -torch.inf)
        total, out = torch.zeros_like(top), self.q.new_zeros(w.B, w.H, w.L, w.D_v)
        lost = torch.zeros_like(out)
        for index, (start, stop) in enumerate(tiles):
            columns = slice(start, stop)
            scores, _ = self.scores(every, columns)
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            shift = self.hook("shift", new.masked_fill(new == -torch.inf, 0))
            alpha = self.hook("alpha", self.exp(top - shift), index=index)
            p = self.exp(scores - shift)
            rounded = self.rounded_p(p if self.keep is None else p * self.keep[..., columns], columns)
            total = total * alpha + self.hook("summed", p).sum(-1, keepdim=True)
            update = rounded @ self.v[:, :, columns]
            if self.style.kahan:
                update, out, lost = update - lost * alpha, out * alpha, lost
                sums = out + update
                lost, out = (sums - out) - update, sums
            else:
                out = self.hook("accumulator", out * alpha + update)
            top = new
        return top, total, out

    def combine(self, parts):
        top = torch.stack([part[0] for part in parts]).amax(0)
        safe = top.masked_fill(top == -torch.inf, 0)
        factors = [self.exp(part[0] - safe) for part in parts]
        total = sum(part[1] * factor for part, factor in zip(parts, factors, strict=True))
        return top, total, sum(part[2] * factor for part, factor in zip(parts, factors, strict=True))

    def normalised(self, tiles):
        """Two passes: P is divided by its sum, then rounded."""
        top, total, out = self.with_sink(*self.online(tiles))
        safe, divisor = top.masked_fill(top == -torch.inf, 0), total.masked_fill(total == 0, 1)
        out = torch.zeros_like(out)
        for start, stop in tiles:
            columns = slice(start, stop)
            p = self.exp(self.scores(slice(0, self.w.L), columns)[0] - safe) / divisor
            out += self.round(p if self.keep is None else p * self.keep[..., columns]) @ self.v[:, :, columns]
        return top, total, out * divisor

    def with_sink(self, top, total, out):
        if self.sinks is None:
            return top, total, out
        sinks = self.sinks[None, :, None, None]
        new = torch.maximum(top, sinks)
        return new, total * self.exp(top - new) + self.exp(sinks - new), out * self.exp(top - new)

    def finish(self, inputs, top, total, out):
        safe = top.masked_fill(top == -torch.inf, 0)
        total = self.hook("total", total)
        divisor = total.masked_fill(total == 0, 1)
        exact = self.hook("exact_out", out / divisor, total=divisor)
        lse = self.hook("lse", (torch.log(total) + safe).squeeze(-1), top=safe.squeeze(-1), total=total.squeeze(-1))
        rounded = exact.to(self.storage)
        output = Output(rounded, lse, Saved(exact if self.style.exact_delta else rounded.float(), lse))
        return self.hook("output", output, inputs=inputs)

    def round(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.storage).float()

    def rounded_p(self, p, columns):
        return self.round(self.hook("p", p, columns=columns))

    def backward(self, inputs, saved):
        self.load(inputs)
        w = self.w
        self.scale = self.hook("backward_scale", self.scale)
        lse = self.hook("saved_lse", saved.lse)[..., None]
        delta = self.hook("delta", (self.grad_out * saved.out).sum(-1, keepdim=True))
        grads = {name: torch.zeros_like(t) for name, t in (("dq", self.q), ("dk", self.k), ("dv", self.v))}
        dense_bias = self.q.new_zeros(w.B, w.H, w.L, w.S)
        pairs = [(r, c) for c in self.tiles(w.S, self.style.keys) for r in self.tiles(w.L, self.style.rows)]
        if self.style.shuffled is not None:
            random.Random(self.style.shuffled).shuffle(pairs)
        for row_tile, key_tile in self.hook("pairs", pairs):
            self.backward_tile(slice(*row_tile), slice(*key_tile), lse, delta, grads, dense_bias)
        for name in ("dk", "dv"):
            heads = grads[name].unflatten(1, (w.H_kv, w.group))
            grads[name] = self.hook(f"{name}_group", (self.round(heads) if self.style.per_head else heads).sum(2))
        extra: dict[str, Any] = {"dbias": None, "dsinks": None}
        if inputs.bias is not None:
            axes = [axis for axis in range(4) if inputs.bias.shape[axis] == 1]
            reduced = dense_bias.sum(axes, keepdim=True) if axes else dense_bias
            extra["dbias"] = self.hook("dbias", reduced, dense=dense_bias).to(inputs.bias.dtype)
        if self.sinks is not None:
            share = self.exp(self.sinks[None, :, None, None] - lse)
            extra["dsinks"] = self.hook("dsinks", -(share * delta).sum((0, 2, 3)))
        done = {name: self.hook(name, grad).to(self.storage) for name, grad in grads.items()}
        return self.hook("gradients", Gradients(**done, **extra), inputs=inputs)

    def backward_tile(self, rows, columns, lse, delta, grads, dense_bias):
        scores, cap = self.scores(rows, columns)
        part = lse[:, :, rows]
        p = self.hook("p_backward", self.exp(scores - part.masked_fill(part == -torch.inf, 0)), columns=columns)
        keep = None if self.keep is None else self.keep[:, :, rows, columns]
        grad = self.grad_out[:, :, rows]
        weights = self.hook("weights_backward", p if keep is None else p * keep)
        grad_p = grad @ self.v[:, :, columns].transpose(-1, -2)
        ds = p * ((grad_p if keep is None else grad_p * keep) - delta[:, :, rows])
        dense_bias[:, :, rows, columns] += ds
        cap = self.hook("cap", cap)
        rounded = self.round(self.hook("ds", ds if cap is None else ds * cap))
        scale = self.scale
        grads["dv"][:, :, columns] = self.hook(
            "sum", grads["dv"][:, :, columns] + self.round(weights).transpose(-1, -2) @ grad
        )
        grads["dk"][:, :, columns] = self.hook(
            "sum", grads["dk"][:, :, columns] + (rounded.transpose(-1, -2) @ self.q[:, :, rows]) * scale
        )
        grads["dq"][:, :, rows] = self.hook("sum", grads["dq"][:, :, rows] + (rounded @ self.k[:, :, columns]) * scale)


# --- right kernels ----------------------------------------------------------------------------------------------------

STYLES = {
    "tiles of 16": Style(rows=16, keys=16),
    "tiles of 32 from the end": Style(rows=32, keys=32, backwards=True),
    "tiles of 128": Style(rows=128, keys=128),
    "tiles of 256": Style(rows=256, keys=256),
    "odd tiles": Style(rows=48, keys=80),
    "split-K": Style(keys=32, splits=3),
    "exp2": Style(exp2=True),
    "compensated": Style(keys=16, kahan=True),
    "normalised P": Style(normalised=True),
    "atomics in any order": Style(rows=16, keys=32, shuffled=7),
    "delta before rounding": Style(exact_delta=True),
    "one dk a head": Style(per_head=True, exp2=True),
}


# --- mutants ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """``hooks`` is called for a fresh set, since some mutants keep a state. ``sheet`` overrides what is claimed."""

    name: str
    workload: str
    hooks: Callable[[Workload], dict[str, Hook]]
    sheet: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} @ {self.workload}"

    def implementation(self) -> Tiled:
        return Tiled(Style(), self.hooks(Workload.parse(self.workload)), name="mutant", **self.sheet)


PLAIN = "B1,H2,L160,D64,bf16,causal"
FULL = "B1,H2,L130,S200,D32,bf16"
HALF = "B2,H2,L97,D64,fp16,causal"
SINGLE = "B1,H2,L129,D32,fp32,causal"
GROUPED = "B1,H4/2,L100,S150,D64,bf16,causal=bottom_right"
LONG = "B1,H1,L64,S1000,D64,bf16"
WINDOW = "B1,H2,L160,D32,bf16,causal,window=48"
LENGTHS = "B2,H2,L100,S130,D32,bf16,lengths=130/77"
PACKED = "H2,D32,bf16,causal,packed=60/0/70"
CAPPED = "B1,H2,L130,D32,bf16,softcap=5"
BIASED = "B2,H2,L100,D32,bf16,bias=bf16:1xHxLxS"
BIAS_ROW = "B2,H2,L100,D32,bf16,bias=fp32:Bx1x1xS"
SINKS = "B1,H2,L100,D32,bf16,causal,sinks"
ALIBI = "B1,H2,L100,D32,bf16,causal,alibi"
DROPPED = "B1,H2,L100,D32,bf16,dropout=0.1"
MASKED = "B2,H2,L100,D32,bf16,mask=bool"
PADDED = "B1,H2,L130,D36,bf16"
DEAD = "B1,H2,L100,S60,D32,bf16,causal=bottom_right"
GENERAL = (PLAIN, FULL, HALF, SINGLE, GROUPED)


def constant(**hooks: Hook) -> Callable[[Workload], dict[str, Hook]]:
    return lambda w: dict(hooks)


def geometry(**changes: Any) -> Callable[[Workload], dict[str, Hook]]:
    return lambda w: {"geometry": lambda old, **_: w.replace(**changes)}


def everywhere(name: str, workloads: tuple[str, ...], **hooks: Hook) -> Iterator[Mutant]:
    yield from (Mutant(name, workload, constant(**hooks)) for workload in workloads)


def all_mutants() -> list[Mutant]:
    """More than 200, in a fixed order."""
    families = (
        scales, masks, lost_keys, tiles_wrong, roundings, groups, memory, cheats, deltas, statistics, gradients, options
    )  # fmt: skip
    return [mutant for family in families for mutant in family()]


def scales() -> Iterator[Mutant]:
    for factor in (0.98, 0.99, 1.01, 1.02):
        for workload in GENERAL:
            hooks = constant(scale=lambda s, f=factor, **_: s * f)
            yield Mutant(f"scale x {factor}", workload, hooks)
        for name in ("dq", "dk", "dv"):
            yield Mutant(f"{name} x {factor}", PLAIN, constant(**{name: lambda g, f=factor, **_: g * f}))
        yield Mutant(f"out x {factor}", FULL, constant(exact_out=lambda o, f=factor, **_: o * f))
        yield Mutant(f"backward's scale x {factor}", GROUPED, constant(backward_scale=lambda s, f=factor, **_: s * f))
    yield Mutant("scale of the padded head dim", PADDED, constant(scale=lambda s, **_: 40**-0.5))
    yield from everywhere("scale forgotten", GENERAL, scale=lambda s, **_: 1.0)
    yield from everywhere("scale 1/D", (PLAIN, HALF), scale=lambda s, **_: s * s)


def masks() -> Iterator[Mutant]:
    for workload in (PLAIN, HALF, SINGLE):
        shifted = {"mask one key short": -1, "mask one key long": 1}
        for name, by in shifted.items():
            hooks = constant(visible=lambda v, by=by, **_: torch.ones_like(v).tril(by))
            yield Mutant(name, workload, hooks)
        yield Mutant("causal on the wrong side", workload, constant(visible=lambda v, **_: torch.ones_like(v).triu()))
        yield Mutant("causal forgotten", workload, geometry(causal=None))
        for row in (0, 63, 64, -1):
            yield Mutant(f"row {row} sees one key too few", workload, constant(visible=one_key_less(row)))
        for row in (0, 63, 64):
            yield Mutant(f"row {row} sees one key too many", workload, constant(visible=one_key_more(row)))
    yield Mutant("aligned to the top left", GROUPED, geometry(causal="top_left"))
    yield Mutant("aligned to the top left", DEAD, geometry(causal="top_left"))
    yield Mutant("aligned to the bottom right", "B1,H2,L100,S130,D32,bf16,causal", geometry(causal="bottom_right"))
    for window in (47, 49):
        yield Mutant(f"window {window}", WINDOW, geometry(window=window))
    yield Mutant("window forgotten", WINDOW, geometry(window=None))
    yield Mutant("lengths ignored", LENGTHS, geometry(lengths=None))
    yield Mutant("lengths one short", LENGTHS, geometry(lengths=(129, 76)))
    yield Mutant("lengths of the neighbour", LENGTHS, geometry(lengths=(77, 130)))
    yield Mutant("sequences run together", PACKED, geometry(packed=None))
    yield Mutant("sequence border one late", PACKED, geometry(packed=(61, 0, 69)))
    yield Mutant("mask ignored", MASKED, constant(mask=lambda m, **_: torch.ones_like(m)))
    yield Mutant("mask inverted", MASKED, constant(mask=lambda m, **_: ~m))
    yield Mutant("mask of the first batch entry", MASKED, constant(mask=lambda m, **_: m[:1].expand_as(m)))


def one_key_less(row: int) -> Hook:
    def change(visible, **_):
        last = int(visible[0, 0, row].nonzero().max())
        visible[..., row, last] = False
        return visible

    return change


def one_key_more(row: int) -> Hook:
    def change(visible, **_):
        last = int(visible[0, 0, row].nonzero().max())
        visible[..., row, last + 1] = True
        return visible

    return change


def lost_keys() -> Iterator[Mutant]:
    """One key that no row sees, forward and backward."""
    for workload in (*GENERAL, LONG):
        size = Workload.parse(workload).S
        for key in sorted({0, 1, 15, 31, 63, 64, 65, 95, size // 2, size - 2} - {size - 1}):
            if key < size:
                yield Mutant(f"key {key} lost", workload, constant(visible=blind_to(slice(key, key + 1))))
    for key in (127, 128, 511, 512, 777, 999):
        yield Mutant(f"key {key} lost", LONG, constant(visible=blind_to(slice(key, key + 1))))
    yield Mutant("the last key lost", FULL, constant(visible=blind_to(slice(199, 200))))
    for key in (3, 64, 128):
        yield Mutant(f"key {key} lost in head 1 only", PLAIN, constant(visible=blind_to(slice(key, key + 1), head=1)))
        yield Mutant(f"key {key} lost in the forward only", PLAIN, lambda w, key=key: forward_only(key))
    for key in (0, 64):
        hooks = constant(p_backward=lambda p, columns, key=key, **_: zeroed(p, columns, key))
        yield Mutant(f"key {key} lost in the backward only", PLAIN, hooks)


def blind_to(keys: slice, head: int | slice = slice(None)) -> Hook:
    def change(visible, **_):
        visible[:, head, :, keys] = False
        return visible

    return change


def zeroed(tensor, columns, key):
    if columns.start <= key < columns.stop:
        tensor = tensor.clone()
        tensor[..., key - columns.start] = 0
    return tensor


def forward_only(key: int) -> dict[str, Hook]:
    return {"scores": lambda s, columns, **_: s, "p": lambda p, columns, **_: zeroed(p, columns, key)}


def tiles_wrong() -> Iterator[Mutant]:
    for workload in (PLAIN, FULL, HALF, LONG):
        yield Mutant("a tile twice", workload, constant(key_tiles=lambda tiles, **_: [*tiles, tiles[0]]))
        yield Mutant("the last tile twice", workload, constant(key_tiles=lambda tiles, **_: [*tiles, tiles[-1]]))
        yield Mutant("the last tile lost", workload, constant(key_tiles=lambda tiles, **_: tiles[:-1]))
        yield Mutant("the first tile lost", workload, constant(key_tiles=lambda tiles, **_: tiles[1:]))
        for index in (1, 2) if workload != HALF else (1,):
            hooks = constant(alpha=lambda a, index, at=index, **_: torch.ones_like(a) if index == at else a)
            yield Mutant(f"rescale {index} lost", workload, hooks)
        yield Mutant("tails padded with key 0", workload, constant(key_tiles=pad_tail))
        yield Mutant("a backward tile lost", workload, constant(pairs=lambda pairs, **_: pairs[:-1]))
        yield Mutant("a backward tile twice", workload, constant(pairs=lambda pairs, **_: [*pairs, pairs[0]]))
    yield from everywhere("maximum not subtracted", (PLAIN, HALF, FULL), shift=lambda s, **_: torch.zeros_like(s))


def pad_tail(tiles, **_):
    return [*tiles, (0, 1)]


def roundings() -> Iterator[Mutant]:
    for workload in (PLAIN, FULL, HALF, GROUPED):
        yield Mutant("P rounded to 4 bits", workload, constant(p=lambda p, **_: keep_bits(p, 4)))
        yield Mutant("P rounded to 6 bits", workload, constant(p=lambda p, **_: keep_bits(p, 6)))
        yield Mutant("dS rounded to 6 bits", workload, constant(ds=lambda p, **_: keep_bits(p, 6)))
        yield Mutant("scores rounded to bf16", workload, constant(scores=lambda s, **_: s.bfloat16().float()))
        yield Mutant("P truncated", workload, constant(p=lambda p, **_: keep_bits(p, 7, truncate=True)))
    yield Mutant("P rounded to bf16", HALF, constant(p=lambda p, **_: p.bfloat16().float()))
    yield Mutant("out rounded to bf16 first", HALF, constant(exact_out=lambda o, **_: o.bfloat16().float()))
    yield Mutant("bf16 accumulators", LONG, constant(accumulator=lambda o, **_: o.bfloat16().float()))
    yield Mutant("bf16 accumulators", FULL, constant(accumulator=lambda o, **_: o.bfloat16().float()))
    yield Mutant("fp16 accumulators", SINGLE, constant(accumulator=lambda o, **_: o.half().float()))
    yield Mutant("bf16 sums in the backward", "B1,H1,L600,D32,bf16", constant(sum=lambda o, **_: o.bfloat16().float()))
    yield Mutant("tf32 products", SINGLE, constant(scores=lambda s, **_: keep_bits(s, 11)))
    yield Mutant("bf16 P in float32", SINGLE, constant(p=lambda p, **_: p.bfloat16().float()))


def keep_bits(tensor: torch.Tensor, bits: int, truncate: bool = False) -> torch.Tensor:
    """Rounded to ``bits`` significant bits."""
    mantissa, exponent = torch.frexp(tensor)
    scaled = mantissa * 2**bits
    return torch.ldexp((torch.trunc(scaled) if truncate else torch.round(scaled)) / 2**bits, exponent)


def groups() -> Iterator[Mutant]:
    for workload in (GROUPED, "B1,H8/2,L90,D32,bf16,causal", "B2,H4/1,L80,D32,fp16"):
        group = Workload.parse(workload).group
        if Workload.parse(workload).H_kv > 1:
            yield Mutant(
                "group by repeat", workload, constant(expand=lambda e, g=group, **_: lambda t: t.repeat(1, g, 1, 1))
            )
        for name in ("dk", "dv"):
            hooks = constant(**{f"{name}_group": lambda t, g=group, **_: t / g})
            yield Mutant(f"{name} averaged over the group", workload, hooks)
            if Workload.parse(workload).H_kv > 1:
                yield Mutant(
                    f"{name} of the next head", workload, constant(**{f"{name}_group": lambda t, **_: t.roll(1, 1)})
                )


def memory() -> Iterator[Mutant]:
    for workload in (PLAIN, FULL, HALF, SINGLE):
        for row in (0, 63, -1):
            yield Mutant(f"row {row} unwritten", workload, constant(output=unwritten("out", row)))
        yield Mutant("row 5 NaN", workload, constant(output=replaced("out", 5, torch.nan)))
        yield Mutant("row 5 infinite", workload, constant(output=replaced("out", 5, torch.inf)))
        yield Mutant("row 5 zero", workload, constant(output=replaced("out", 5, 0.0)))
        yield Mutant("lse of row 5 NaN", workload, constant(output=replaced("lse", 5, torch.nan)))
        yield Mutant("dk of key 7 unwritten", workload, constant(gradients=unwritten("dk", 7)))
        yield Mutant("dv of the last key unwritten", workload, constant(gradients=unwritten("dv", -1)))
        yield Mutant("dq of row 64 NaN", workload, constant(gradients=replaced("dq", 64, torch.nan)))


def unwritten(name: str, row: int) -> Hook:
    """A fresh tensor into which every row but one is copied."""

    def change(result, **_):
        right = getattr(result, name)
        fresh = torch.empty_like(right)
        for i in range(right.shape[2]):
            if i != row % right.shape[2]:
                fresh[:, :, i] = right[:, :, i]
        return dataclasses.replace(result, **{name: fresh})

    return change


def replaced(name: str, row: int, value: float) -> Hook:
    def change(result, **_):
        wrong = getattr(result, name).clone()
        wrong[:, :, row] = value
        return dataclasses.replace(result, **{name: wrong})

    return change


def cheats() -> Iterator[Mutant]:
    for workload in (PLAIN, FULL, HALF):
        yield Mutant("the first call's output", workload, lambda w: {"output": first_of_all()})
        yield Mutant("the last call's output", workload, lambda w: {"output": the_one_before()})
        yield Mutant("outputs kept by address", workload, lambda w: {"output": by_address()})
        yield Mutant("gradients of the first call", workload, lambda w: {"gradients": first_of_all()})
        yield Mutant("zeros", workload, constant(exact_out=lambda o, **_: torch.zeros_like(o)))
        yield Mutant("mean of V", workload, constant(scores=lambda s, **_: torch.zeros_like(s)))
        yield Mutant("q changed", workload, constant(output=spoil("q")))
        yield Mutant("v changed", workload, constant(output=spoil("v")))
        yield Mutant("grad_out changed", workload, constant(gradients=spoil("grad_out")))
        yield Mutant("gradients add up over calls", workload, lambda w: {"gradients": adding_up()})
        yield Mutant("now and then otherwise", workload, lambda w: {"output": every_other_call()})
    yield Mutant("mask changed", MASKED, constant(output=spoil("mask")))
    yield Mutant("the truth of another seed", PLAIN, constant(output=of_another_seed))
    yield Mutant("right only when it saves", PLAIN, lambda w: {"output": wrong_unless_saved()})
    yield Mutant("out in float32", PLAIN, constant(output=lambda o, **_: dataclasses.replace(o, out=o.out.float())))
    transposed = constant(output=lambda o, **_: dataclasses.replace(o, out=o.out.transpose(1, 2)))
    yield Mutant("out in another layout", PLAIN, transposed)
    yield Mutant("lse missing", PLAIN, constant(output=lambda o, **_: dataclasses.replace(o, lse=None)))
    yield Mutant("dv missing", PLAIN, constant(gradients=lambda g, **_: dataclasses.replace(g, dv=None)))
    yield Mutant("dbias missing", BIASED, constant(gradients=lambda g, **_: dataclasses.replace(g, dbias=None)))
    yield Mutant("dsinks missing", SINKS, constant(gradients=lambda g, **_: dataclasses.replace(g, dsinks=None)))


def first_of_all() -> Hook:
    kept: list[Any] = []

    def change(result, **_):
        kept.append(result)
        return kept[0]

    return change


def the_one_before() -> Hook:
    kept: list[Any] = []

    def change(result, **_):
        kept.append(result)
        return kept[-2] if len(kept) > 1 else result

    return change


def by_address() -> Hook:
    kept: dict[Any, Any] = {}

    def change(result, inputs, **_):
        return kept.setdefault((inputs.q.data_ptr(), inputs.k.data_ptr()), result)

    return change


def adding_up() -> Hook:
    sums: list[Any] = []

    def change(result, **_):
        sums.append(result.dq)
        return dataclasses.replace(result, dq=sum(sums[1:], sums[0]).to(result.dq.dtype))

    return change


def every_other_call() -> Hook:
    """The smallest change of one number, every other time: right each time, but not deterministic as claimed."""
    calls: list[int] = []

    def change(result, **_):
        calls.append(1)
        if len(calls) % 2:
            return result
        changed = result.out.clone()
        changed[0, 0, 0, 0] *= 1 + torch.finfo(changed.dtype).eps
        return dataclasses.replace(result, out=changed)

    return change


def spoil(name: str) -> Hook:
    def change(result, inputs, **_):
        tensor = getattr(inputs, name)
        place = (0, 0, 1, 1)
        tensor[place] = ~tensor[place] if tensor.dtype == torch.bool else tensor[place] * 2 + 1
        return result

    return change


def of_another_seed(result, inputs, **_):
    from attnscope.device import find_device
    from attnscope.inputs import make_inputs
    from attnscope.reference import compute_attention

    other = make_inputs(inputs.workload, find_device("cpu"), inputs.seed + 1000, inputs.kind)
    return dataclasses.replace(result, out=compute_attention(other, backward=False).out.to(result.out.dtype))


def wrong_unless_saved() -> Hook:
    calls: list[int] = []

    def change(result, **_):  # the checker calls the forward alone first, then the one that saves
        calls.append(1)
        return dataclasses.replace(result, out=result.out * 0.9) if len(calls) % 2 else result

    return change


def deltas() -> Iterator[Mutant]:
    for workload in (*GENERAL, SINKS, DROPPED):
        yield Mutant("delta missing", workload, constant(delta=lambda d, **_: torch.zeros_like(d)))
    yield Mutant("delta twice", PLAIN, constant(delta=lambda d, **_: 2 * d))
    yield Mutant("delta of the next row", PLAIN, constant(delta=lambda d, **_: d.roll(1, 2)))
    yield Mutant("delta of the next head", PLAIN, constant(delta=lambda d, **_: d.roll(1, 1)))


def statistics() -> Iterator[Mutant]:
    for workload in GENERAL:
        yield Mutant("lse in base 2", workload, constant(lse=lambda x, **_: x * LOG2E))
        yield Mutant("lse without the maximum", workload, constant(lse=lambda x, top, total, **_: torch.log(total)))
        if workload != SINGLE:
            storage = torch_dtype(Workload.parse(workload).dtype)
            hooks = constant(summed=lambda p, storage=storage, **_: p.to(storage).float())
            yield Mutant("lse from P as it was rounded", workload, hooks)
        yield Mutant("lse is the maximum", workload, constant(lse=lambda x, top, **_: top))
    yield Mutant("lse 0 for dead rows", DEAD, constant(lse=lambda x, **_: x.clamp_min(-1e30).where(x > -1e30, 0)))
    yield Mutant("lse NaN for dead rows", DEAD, constant(lse=lambda x, **_: x.where(x > -1e30, torch.nan)))
    yield Mutant("dead rows get the mean of V", DEAD, constant(exact_out=mean_for_dead))
    yield Mutant("dead rows NaN", DEAD, constant(exact_out=lambda o, **_: o.where(o.any(-1, keepdim=True), torch.nan)))
    yield Mutant("dead rows tiny", DEAD, constant(exact_out=lambda o, **_: o.where(o.any(-1, keepdim=True), 1e-20)))
    yield Mutant("dead rows' dq tiny", DEAD, constant(dq=lambda g, **_: g.where(g.any(-1, keepdim=True), 1e-20)))
    yield Mutant("sum one too large", FULL, constant(total=lambda t, **_: t + 1))


def mean_for_dead(out, **_):
    return out.where(out.any(-1, keepdim=True), 0.1)


def gradients() -> Iterator[Mutant]:
    for workload in (PLAIN, FULL, HALF, SINGLE, GROUPED):
        scale = Workload.parse(workload).effective_scale
        for name in ("dq", "dk"):
            yield Mutant(f"{name} without the scale", workload, constant(**{name: lambda g, s=scale, **_: g / s}))
        yield Mutant("dq negative", workload, constant(dq=lambda g, **_: -g))
        yield Mutant("dk is zero", workload, constant(dk=lambda g, **_: torch.zeros_like(g)))
        yield Mutant("dv from P that is not normalised", workload, constant(weights_backward=lambda p, **_: p * 1.5))
        yield Mutant("dv and dk of the neighbouring key", workload, constant(dv=lambda g, **_: g.roll(1, 2)))
        yield Mutant("lse one bit of bf16 off", workload, constant(saved_lse=lambda x, **_: x.bfloat16().float()))


def options() -> Iterator[Mutant]:
    yield Mutant("softcap's derivative forgotten", CAPPED, constant(cap=lambda c, **_: None))
    yield Mutant(
        "softcap ignored", CAPPED, constant(scores=lambda s, **_: 5 * torch.atanh((s / 5).clamp(-0.999, 0.999)))
    )
    yield Mutant("dbias not reduced over the batch", BIASED, constant(dbias=lambda b, dense, **_: dense[:1]))
    yield Mutant("dbias averaged over the batch", BIASED, constant(dbias=lambda b, **_: b / 2))
    yield Mutant("dbias of one head", BIAS_ROW, constant(dbias=lambda b, dense, **_: dense[:, :1].sum(2, keepdim=True)))
    yield Mutant(
        "dbias of one row", BIAS_ROW, constant(dbias=lambda b, dense, **_: dense.sum(1, keepdim=True)[:, :, :1])
    )
    yield Mutant("dbias with the scale", BIASED, constant(dbias=lambda b, **_: b * 32**-0.5))
    yield Mutant("bias ignored", BIASED, constant(bias=lambda b, **_: torch.zeros_like(b)))
    yield Mutant("bias scaled", BIASED, constant(bias=lambda b, **_: b * 32**-0.5))
    yield Mutant("bias of the next head", BIASED, constant(bias=lambda b, **_: b.roll(1, 1)))
    yield Mutant("sinks ignored", SINKS, constant(sinks=lambda s, **_: s - 1e4))
    yield Mutant("sink of the next head", SINKS, constant(sinks=lambda s, **_: s.roll(1, 0)))
    yield Mutant("dsinks negative", SINKS, constant(dsinks=lambda s, **_: -s))
    yield Mutant("dsinks averaged", SINKS, constant(dsinks=lambda s, **_: s / 100))
    yield Mutant("ALiBi ignored", ALIBI, constant(alibi=lambda a, **_: torch.zeros_like(a)))
    yield Mutant("ALiBi's slopes of the next head", ALIBI, constant(alibi=lambda a, **_: a.roll(1, 1)))
    yield Mutant("ALiBi off by one head's power", ALIBI, constant(alibi=lambda a, **_: a / 2))
    yield Mutant("dropout's scale forgotten", DROPPED, constant(keep=lambda k, **_: (k > 0).float()))
    yield Mutant("dropout ignored", DROPPED, constant(keep=lambda k, **_: None))
    yield Mutant("dropout's other half", DROPPED, constant(keep=lambda k, **_: (k == 0).float() / 0.1))
