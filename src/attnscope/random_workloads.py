"""Stage 1: random workloads, the same for the same random numbers; imports neither torch nor a later stage.

Reads a Space (what may be drawn) and a random generator, writes a Workload. The options (dtype, head dims, masks,
grouping) and the sizes are drawn apart, so that a kernel compiled for some options can be tried on several sizes.
``attnscope fuzz`` draws from :func:`space_of_device`; tests draw from small spaces of their own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from attnscope.workload import LAYOUTS, Workload

FEATURES = frozenset({
    "gqa", "cross", "unequal_head_dims", "causal_top_left", "causal_bottom_right", "window", "softcap", "scale",
    "alibi", "sinks", "mask", "bias", "lengths", "packed", "dropout",
})  # fmt: skip
PATTERNS = tuple(f"{b}x{h}x{rows}x{columns}" for b in "B1" for h in "H1" for rows in "L1" for columns in "S1")
BIAS_DTYPES = ("fp32", "bf16", "fp16")
DROPOUTS = (0.1, 0.3, 0.5)
# On both sides of the tiles that kernels have, and what is odd
EDGES = (
    1, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 77, 79, 80, 81, 95, 96, 97, 127, 128, 129, 160, 175,
    176, 177, 191, 192, 193, 255, 256, 257,
)  # fmt: skip
LONG_EDGES = (319, 320, 321, 383, 384, 385, 500, 511, 512, 513, 704, 1000, 1023, 1024, 1025, 2047, 2048, 2049)
DIMS = (16, 32, 64, 64, 64, 128, 128, 128, 8, 24, 40, 48, 56, 72, 80, 96, 104, 112, 120, 1, 7, 33)
LARGE_DIMS = (136, 160, 192, 192, 224, 248, 256, 256, 264, 320, 512)
MORE_THAN_A_GRID = 65_537  # (batch, head) pairs: one grid axis of CUDA holds 65,535 blocks
HEADS = (1, 1, 1, 2, 2, 3, 4, 5, 8, 16)
GROUPS = (2, 2, 3, 4, 4, 7, 8, 16)
BATCHES = (1, 1, 1, 1, 2, 2, 3, 4, 7, 16)


@dataclass(frozen=True)
class Space:
    """What random workloads are drawn from: a value stands as often as it is to be drawn.

    ``lengths`` are L and S; one in four is any number up to ``longest`` instead, one in twenty is 0. With ``rows`` L is
    one of those instead and S is drawn apart from it, as few new queries meet many keys in decoding. ``max_pairs``
    bounds B * H * L * S, ``max_elements`` the largest tensor. ``many_heads`` draws now and then more (batch, head)
    pairs than a grid axis of CUDA holds.
    """

    lengths: tuple[int, ...] = EDGES
    longest: int = 257
    rows: tuple[int, ...] = ()
    dims: tuple[int, ...] = DIMS
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32", "fp64")
    bias_dtypes: tuple[str, ...] = BIAS_DTYPES
    layouts: tuple[str, ...] = LAYOUTS
    features: frozenset[str] = FEATURES
    max_pairs: int = 2**15
    max_elements: int = 2**17
    heads: tuple[int, ...] = HEADS
    groups: tuple[int, ...] = GROUPS
    batches: tuple[int, ...] = BATCHES
    many_heads: bool = False


def space_of_device(kind: str) -> Space:
    """What is drawn on a ``cpu`` or a ``cuda`` device: as large as hundreds of checks a minute allow."""
    if kind == "cpu":
        return Space()
    return Space(
        lengths=(*EDGES, *LONG_EDGES),
        longest=2100,
        dims=(*DIMS, *DIMS, *LARGE_DIMS),
        dtypes=("bf16", "bf16", "bf16", "fp16", "fp16", "fp16", "fp32", "fp64"),
        max_pairs=2**21,
        max_elements=2**23,
        heads=(*HEADS, 12, 32),
        groups=(*GROUPS, 32),
        batches=(*BATCHES, 64, 500),
        many_heads=True,
    )


def draw_workload(chance: random.Random, space: Space) -> Workload:
    """A workload of ``space``: its options, then its sizes."""
    return draw_sizes(chance, space, draw_options(chance, space))


def draw_options(chance: random.Random, space: Space) -> dict[str, Any]:
    """Fields of a Workload that are no sizes, and ``ragged``: "lengths", "packed" or None.

    A quarter have no option besides a causal mask; the others have each with a probability of a sixth.
    """
    has = _Chooser(chance, space.features, 0.0 if chance.random() < 0.25 else 1 / 6)
    D = chance.choice(space.dims)
    group = chance.choice(space.groups) if has("gqa", 0.3) else 1
    D_v = chance.choice(space.dims) if has("unequal_head_dims") else D
    dtype = chance.choice(space.dtypes)
    fields: dict[str, Any] = {"D": D, "D_v": D_v, "dtype": dtype, "group": group, "cross": has("cross", 0.5)}
    fields["causal"] = chance.choice([None, *(a for a in ("top_left", "bottom_right") if has(f"causal_{a}", 1.0))])
    fields["softcap"] = round(chance.uniform(0.5, 50.0), 2) if has("softcap") else None
    fields["scale"] = _scale(chance, D) if has("scale") else None
    fields |= {"alibi": has("alibi"), "sinks": has("sinks"), "has_window": has("window")}
    fields["mask"] = chance.choice(PATTERNS) if has("mask") else None
    if has("bias"):
        own = [dtype] if dtype in space.bias_dtypes else []
        fields |= {"bias": chance.choice([*own, *space.bias_dtypes]), "bias_shape": chance.choice(PATTERNS)}
    fields["dropout"] = chance.choice(DROPOUTS) if has("dropout", has.probability / 2) else 0.0
    ragged = [word for word in ("lengths", "packed") if has(word)]
    fields["ragged"] = chance.choice(ragged) if ragged else None
    layouts = [word for word in space.layouts if word != "qkv" or (group == 1 and D == D_v)]
    fields["layout"] = chance.choice(layouts or list(space.layouts))
    return fields


class _Chooser:
    """Whether an option that the space allows is taken."""

    def __init__(self, chance: random.Random, allowed: frozenset[str], probability: float) -> None:
        self.chance, self.allowed, self.probability = chance, allowed, probability

    def __call__(self, word: str, probability: float | None = None) -> bool:
        drawn = self.chance.random() < (self.probability if probability is None else probability)
        return drawn and word in self.allowed


def _scale(chance: random.Random, D: int) -> float:
    return chance.choice([round(D**-0.5 * chance.uniform(0.3, 2.0), 4), 0.1, 1.0, -0.2, 0.0])


def draw_sizes(chance: random.Random, space: Space, options: dict[str, Any]) -> Workload:
    """A workload with those options: B, H, L, S, and lengths, packed and window where the options ask for them."""
    fields = dict(options)
    group, cross, ragged, has_window = (fields.pop(name) for name in ("group", "cross", "ragged", "has_window"))
    if space.many_heads and chance.random() < 0.01 and ragged is fields["mask"] is None and not has_window:
        rows = chance.choice((1, 2))
        B, H_kv = chance.choice(((MORE_THAN_A_GRID, 1), (1, MORE_THAN_A_GRID)))
        return Workload(B=B, H=H_kv * group, H_kv=H_kv, L=rows, S=rows, **fields | {"D": 8, "D_v": 8})
    L = chance.choice(space.rows) if space.rows else _length(chance, space)
    S = _length(chance, space) if (cross or space.rows) and fields["layout"] != "qkv" else L
    if ragged == "packed":
        packed = _packed(chance, space, group * max(fields["D"], fields["D_v"]), group)
        L = S = sum(packed)
        fields["packed"] = packed
    L, S = _fitting_lengths(L, S, group, max(fields["D"], fields["D_v"]), space)
    B, H_kv = _batch_and_heads(chance, space, fields, L, S, group, packed=ragged == "packed")
    if ragged == "lengths" and B:
        fields["lengths"] = tuple(chance.choice([S, chance.randint(0, S), chance.randint(0, S)]) for _ in range(B))
    if has_window:
        most = max(L, S, 1)
        fields["window"] = chance.choice([chance.randint(1, most + 2), min(chance.choice(space.lengths) or 1, most)])
    return Workload(B=B, H=H_kv * group, H_kv=H_kv, L=L, S=S, **fields)


def _length(chance: random.Random, space: Space) -> int:
    drawn, any_number, usual = chance.random(), chance.randint(1, space.longest), chance.choice(space.lengths)
    return 0 if drawn < 0.05 else any_number if drawn < 0.3 else usual


def _packed(chance: random.Random, space: Space, width: int, group: int) -> tuple[int, ...]:
    """One to six sequences that fit into the space together; the longest is halved until they do."""
    found = [_length(chance, space) for _ in range(chance.randint(1, 6))]
    while sum(found) ** 2 * group > space.max_pairs or sum(found) * width > space.max_elements:
        longest = found.index(max(found))
        found[longest] //= 2
    return tuple(found)


def _fitting_lengths(L: int, S: int, group: int, widest: int, space: Space) -> tuple[int, int]:
    """Lengths of which one group of heads fits into the space; the longer one is halved until it does."""
    while L * S * group > space.max_pairs or max(L * group, S) * widest > space.max_elements:
        equal = L == S
        L, S = (L // 2, S) if L >= S else (L, S // 2)
        S = L if equal else S
    return L, S


def _batch_and_heads(
    chance: random.Random, space: Space, fields: dict[str, Any], L: int, S: int, group: int, *, packed: bool
) -> tuple[int, int]:
    """B and H_kv such that B * H * L * S and the largest tensor fit."""
    B, H_kv = chance.choice(space.batches), chance.choice(space.heads)
    widest = max(fields["D"], fields["D_v"])
    room = min(
        space.max_pairs // max(L * S * group, 1), space.max_elements // max(max(L * group, S) * widest, 1),
    )  # fmt: skip
    B = 1 if packed else 0 if chance.random() > 0.98 else min(B, max(room, 1))
    return B, max(1, min(H_kv, room // max(B, 1)))


def narrowed(space: Space, **changes: Any) -> Space:
    """``space`` with fewer values: an empty one among ``changes`` leaves what was there."""
    return replace(space, **{name: value for name, value in changes.items() if value})
