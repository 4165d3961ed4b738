"""Stage 2: how the Gluon kernel of ``hopper`` is compiled, as data, and which workloads share a choice.

Reads a Workload, writes Configurations. Imports no torch. Must not import another implementation or a later stage.
Which one a workload gets stands in a table (``entries.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnscope.tables import Settings
from attnscope.workload import Workload

GROUP_ROWS = 64  # query rows of a group of 128 threads
LEAST_KEYS = 64  # keys of a tile, at the least
SHARED_LIMIT_BYTES = 232_448  # a block's largest on compute capability 9.0
GEOMETRY = frozenset({"causal_top_left", "causal_bottom_right", "window", "lengths", "packed"})
MULTIPROCESSORS = 132  # of Hopper's largest cards
TUNED_MASKS = (  # of a class's workload; {} is a quarter of L
    "", ",causal", ",causal,window={}", ",mask=bool:1x1xLxS", ",bias=bf16:1xHxLxS", ",bias=fp32:1xHxLxS",
    ",softcap=20,bias=bf16:1xHxLxS",
)  # fmt: skip
SHORT = 1024  # keys
LENGTHS = (("tiny", 256), ("short", SHORT), ("middle", 4096), ("long", None))  # classes of S, each up to so many keys


@dataclass(frozen=True)
class Configuration(Settings, owner="hopper"):
    """What the kernel is compiled with; each switch is an idea of docs/concepts/hopper.md.

    ``keys`` a tile; ``slots`` of the ring that K and V share; ``q_slots`` of Q, 2 load the next tile's Q early and let
    the output drain late; ``groups`` of 64 rows; registers of a thread of the loading warp and of the groups;
    ``persistent``: one block a multiprocessor, else one a tile; ``balanced``: where tiles differ in length, a table
    gives each block of a persistent grid as much to do (``schedules.py``); ``pingpong``: groups take turns at the
    tensor cores (without ``overlap``: at the exponentials); ``overlap``: P V beside the next tile's scores;
    ``lazy_sum``: a row's four lanes add up their sums after the last tile; ``bias_slots``: tiles of a bias that each
    group has in shared memory; ``queued``: under a bool mask blocks of a persistent grid take tiles from a queue, and
    from no table; without one it says nothing. ``fixed_max``: a row's maximum is that of its first tile of keys, and
    what leaves the range of numbers is computed again by online softmax; where tiles come from a queue, sequences are
    packed, or a bias meets geometry or keys that fill no tile, it says nothing.
    """

    keys: int = 128
    slots: int = 5
    q_slots: int = 1
    groups: int = 2
    producer_registers: int = 24
    consumer_registers: int = 240
    persistent: bool = True
    balanced: bool = True
    pingpong: bool = True
    overlap: bool = True
    lazy_sum: bool = True
    bias_slots: int = 1
    queued: bool = False
    fixed_max: bool = False

    def __str__(self) -> str:
        words = [f"{self.groups}x{GROUP_ROWS}", f"keys {self.keys}", f"slots {self.slots}/{self.q_slots}"]
        words += [f"regs {self.producer_registers}/{self.consumer_registers}"]
        names = ("persistent", "balanced", "queued", "pingpong", "overlap", "lazy_sum", "fixed_max")
        return " ".join(words + [name for name in names if getattr(self, name)])

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return self.groups * GROUP_ROWS


def block_of(workload: Workload) -> int:
    """Columns in which the kernel holds both head dims: 64, 128 or 256."""
    return next(size for size in (64, 128, 256) if max(workload.D, workload.D_v) <= size)


def widest(workload: Workload) -> tuple[int, int]:
    """The largest (D, D_v) of the workload's class: (64, 64), (128, 128), (192, 128), (192, 192) or (256, 256)."""
    w = workload
    if 128 < w.D <= 192 and w.D_v <= 128:  # multi-head latent attention
        return 192, 128
    width = next(size for size in (64, 128, 192, 256) if max(w.D, w.D_v) <= size)
    return width, width


def tuning_class(workload: Workload) -> str:
    """Workloads that share a configuration: ``D128,causal,bf16,long``."""
    w = workload
    dim, value_dim = widest(w)
    width = f"D{dim}" if dim == value_dim else f"D{dim}/{value_dim}"
    return f"{width},{mask_of(w)},{w.dtype},{length_of(w)}"


def length_of(w: Workload) -> str:
    """The word of a class for how many keys are seen, and by how many tiles of rows.

    ``few``: tiles of one group are no more than multiprocessors, so that each should have something to do, however many
    keys there are. ``some``: keys are few and tiles of two groups make two rounds at most, so that beginning counts as
    much as going on.
    """
    if w.B * w.H * -(-w.L // GROUP_ROWS) <= MULTIPROCESSORS:
        return "few"
    if w.S <= SHORT and w.B * w.H * -(-w.L // (2 * GROUP_ROWS)) <= 2 * MULTIPROCESSORS:
        return "some"
    return next(name for name, most in LENGTHS if most is None or w.S <= most)


def mask_of(w: Workload) -> str:
    """The word of a class: a bias's size, a bool mask, one of them beside what needs registers too, or geometry."""
    more = w.alibi or w.sinks or w.softcap is not None
    if w.bias is not None:
        alone = w.mask is None and not more and not w.features & GEOMETRY
        return "mixed" if not alone else "bias32" if w.bias == "fp32" else "bias16"
    if w.mask is not None:
        return "mixed" if more else "mask"
    return "window" if w.window is not None else "causal" if w.causal is not None else "full"


def tuning_workloads() -> list[Workload]:
    """One workload for each class, of about 16,384 tokens and 2,048 columns over all heads, or of fewer rows."""
    return [
        Workload.parse(f"B{batch},H{heads or 2048 // dim},L{length},{dims},{dtype}{mask.format(length // 4)}")
        for dim, dims in ((64, "D64"), (128, "D128"), (192, "D192"), (192, "D192,Dv128"), (256, "D256"))
        for mask in TUNED_MASKS
        for dtype in ("bf16", "fp16")
        for batch, heads, length in (
            (1, 16, 512),
            (4, 16, 512),
            (64, None, 256),
            (32, None, 512),
            (8, None, 2048),
            (2, None, 8192),
        )
    ]


def candidates(workload: Workload) -> list[Configuration]:
    """What is worth measuring for the workload, most promising first; all of it compiles without spills."""
    mask = mask_of(workload)
    mask = "uneven" if mask in ("window", "causal") else mask
    return [Configuration(**values) for values in _CANDIDATES[mask][block_of(workload)]]


_THREE = {"slots": 8, "q_slots": 2, "groups": 3, "producer_registers": 32, "consumer_registers": 160}
_TWO = {"slots": 8, "q_slots": 2}
_USUAL = {"slots": 5, "q_slots": 2}
_WIDE = {"slots": 5, "keys": 64, "pingpong": False}
_ALONE = {"persistent": False, "balanced": False}  # the card deals tiles: nobody knows what a bool mask leaves of one
_QUEUED = {"queued": True, "balanced": False}  # so do blocks themselves, and load the next while they work on one
_FIXED = {"fixed_max": True}  # never first: a table says where it won
_CANDIDATES: dict[str, dict[int, list[dict[str, Any]]]] = {
    "full": {
        64: [_THREE, _TWO, _THREE | {"pingpong": False}, _THREE | {"pingpong": False, "overlap": False}],
        128: [
            _USUAL,
            {"slots": 6},
            _USUAL | {"pingpong": False},
            _USUAL | _FIXED,
            _USUAL | {"pingpong": False} | _FIXED,
        ],
        256: [_WIDE, _WIDE | {"pingpong": True}],
    },
    "uneven": {
        64: [
            _TWO,
            _THREE,
            _TWO | {"balanced": False},
            _THREE | {"balanced": False},
            _TWO | {"pingpong": False},
            _THREE | {"pingpong": False},
        ],
        128: [
            _USUAL,
            _USUAL | {"pingpong": False},
            _USUAL | {"balanced": False},
            {"slots": 6, "persistent": False, "balanced": False},
            {"slots": 6},
            _USUAL | _FIXED,
        ],
        256: [
            _WIDE,
            _WIDE | {"pingpong": True},
            _WIDE | {"balanced": False},
            _WIDE | {"persistent": False, "balanced": False},
        ],
    },
    "mask": {
        64: [
            _THREE | _ALONE | {"q_slots": 1},
            _TWO | _ALONE | {"q_slots": 1},
            _THREE | _ALONE | {"q_slots": 1} | _FIXED,
            _TWO | _ALONE | {"q_slots": 1} | _FIXED,
            _THREE | _QUEUED,
            _TWO | _QUEUED,
        ],
        128: [
            _ALONE | {"slots": 6},
            _ALONE | {"slots": 6, "pingpong": False},
            _ALONE | {"slots": 6} | _FIXED,
            _ALONE | {"slots": 6, "pingpong": False} | _FIXED,
            _USUAL | _QUEUED,
            _USUAL | _QUEUED | {"pingpong": False},
            _QUEUED | {"slots": 6},
        ],
        256: [_WIDE | _ALONE, _WIDE | _ALONE | _FIXED, _WIDE | _QUEUED],
    },
    "mixed": {
        64: [_TWO | {"slots": 6}, _TWO | {"slots": 6, "pingpong": False}],
        128: [{"slots": 4}, {"slots": 4, "pingpong": False}],
        256: [_WIDE | {"slots": 4}],
    },
    "bias16": {
        64: [
            _THREE | {"slots": 6, "q_slots": 1},
            _THREE | {"slots": 6, "q_slots": 1, "pingpong": False},
            _THREE | {"q_slots": 1, "keys": 64, "bias_slots": 2},
            _TWO | {"slots": 6, "bias_slots": 2},
            _THREE | {"slots": 6, "q_slots": 1} | _FIXED,
            _THREE | {"slots": 6, "q_slots": 1, "pingpong": False} | _FIXED,
        ],
        128: [
            {"slots": 4, "bias_slots": 2},
            _USUAL | {"slots": 4},
            {"slots": 4, "bias_slots": 2, "pingpong": False},
            {"slots": 4, "bias_slots": 2} | _FIXED,
            _USUAL | {"slots": 4} | _FIXED,
        ],
        256: [_WIDE | {"slots": 4, "bias_slots": 2}, _WIDE | {"slots": 4}],
    },
    "bias32": {
        64: [
            _THREE | {"keys": 64, "bias_slots": 2},
            _TWO | {"keys": 64, "bias_slots": 2},
            _THREE | {"keys": 64, "bias_slots": 2} | _FIXED,
            _TWO | {"keys": 64, "bias_slots": 2} | _FIXED,
        ],
        128: [
            _USUAL | {"keys": 64, "slots": 6, "bias_slots": 2},
            {"slots": 4},
            _USUAL | {"keys": 64, "slots": 6, "bias_slots": 2} | _FIXED,
            {"slots": 4} | _FIXED,
        ],
        256: [_WIDE | {"slots": 4}],
    },
}
