"""How hopper_cuda's kernel may be compiled: configurations, what they take of a multiprocessor, and which is the usual.

Reads a Workload and a Device, writes Configurations. Imports neither torch nor another implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from attnscope.device import Device
from attnscope.tables import Settings
from attnscope.workload import Workload

SHARED_LIMIT_BYTES = 227 * 1024
ALIGNMENT_BYTES = 1024  # of a swizzled tile
BARRIER_BYTES = 8
DOUBT_BYTES = 48  # where tiles of rows are marked that are computed again
GROUP_ROWS = 64  # rows of a warpgroup's product
PANEL_COLUMNS = 64  # 16-bit numbers of a row of 128 bytes, the widest that the hardware swizzles
MULTIPROCESSORS = 132  # where the device does not say
# Of the copying warpgroup and of each multiplying one; together at most what the launch gives all of them alike, 64 Ki
# or a little less. Where one multiplies, none are moved.
REGISTERS = {1: (248, 248), 2: (24, 240), 3: (32, 160), 4: (32, 112)}
OTHER_REGISTERS = 28  # beside results: with these the assembler spills nothing, with 24 it does
SHORT, MEDIUM = 1024, 4096  # longest L or S of a length class
MAX_TABLE_TILES = 2**20  # more take the host about a second to deal, and balance by their number
LEAST_PIECE = 4  # tiles of keys, of those into which a tile's keys are cut
COSTS_A_SPLIT = 8  # in tiles of keys: pieces that begin and end, and the kernel that puts them together
LEAST_GAIN = 0.005  # of all time, for which keys are cut
SCHEDULES = ("arithmetic", "table")
C_TYPES = {"bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Configuration(Settings, owner="hopper_cuda"):
    """What the kernel is compiled and launched with beside the workload.

    ``groups`` of 64 rows a block, ``keys`` a tile, ``stages`` of keys and as many of values. ``ping_pong``: groups
    begin products in turn. ``snake``: every other round of tiles runs backwards over the blocks. ``slack``: sums are
    rescaled only where a maximum rose by more than so many powers of two; 0 rescales always. ``persistent``: a block
    a multiprocessor walks over tiles; otherwise a block a tile. ``schedule``: in which order, where rows end at
    different keys: "arithmetic" deals tiles in turn, "table" gives each to the block that has the least to do.
    ``query_slots``: 2 copies the next tile's queries while this one's are used. ``cluster``: so many neighbouring
    blocks take neighbouring heads of a group, or rows of a head, and copy keys and values once, for all of them.
    ``split``: where rows see all keys and the last round would leave blocks idle, its tiles' keys are dealt to all.
    ``early``: a tile's first scores are computed beside the last values of the tile before.
    ``alternate``: groups change places every tile of rows, since under a causal mask the last rows have more to do.
    ``fixed_max``: tiles of keys without a mask are computed with the maximum of those before; tiles of rows whose sums
    then left the range of numbers are computed again, by online softmax.
    """

    groups: int
    keys: int
    stages: int
    ping_pong: bool = True
    snake: bool = True
    slack: int = 0
    persistent: bool = True
    schedule: str = "arithmetic"
    query_slots: int = 1
    cluster: int = 1
    split: bool = False
    early: bool = False
    alternate: bool = False
    fixed_max: bool = False

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return GROUP_ROWS * self.groups

    def cluster_heads(self, workload: Workload) -> int:
        """Heads of a cluster of blocks: those of a group see the same keys; without groups its blocks share a head."""
        return self.cluster if workload.group % self.cluster == 0 else 1

    def cluster_rows(self, workload: Workload) -> int:
        """Query rows of a cluster of blocks in each of its heads."""
        return self.rows * self.cluster // self.cluster_heads(workload)

    @property
    def threads(self) -> int:
        """Of a block: a warpgroup that copies, then the groups."""
        return 128 * (self.groups + 1)

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """Dynamic shared memory of a block; ``head_dim`` of queries and keys."""
        panels, value_panels = ceil_div(head_dim, PANEL_COLUMNS), ceil_div(value_dim, PANEL_COLUMNS)
        rows = self.query_slots * self.rows * panels + self.stages * self.keys * (panels + value_panels)
        barriers = 2 * self.query_slots + 4 * self.stages
        doubts = DOUBT_BYTES if self.fixed_max else 0
        return ALIGNMENT_BYTES + rows * PANEL_COLUMNS * 2 + barriers * BARRIER_BYTES + doubts

    def result_registers(self, value_dim: int) -> int:
        """Registers a thread for sums, scores and the weights of the tile before, which live at once."""
        return padded_head_dim(value_dim) // 2 + self.keys // 2 + self.keys // 4

    def fits(self, head_dim: int, value_dim: int) -> bool:
        """Whether shared memory and registers suffice."""
        enough = self.result_registers(value_dim) + OTHER_REGISTERS <= REGISTERS[self.groups][1]
        return enough and self.shared_bytes(head_dim, value_dim) <= SHARED_LIMIT_BYTES

    def tiles(self, workload: Workload) -> int:
        """Tiles of rows, those of a cluster counted once."""
        heads = workload.B * workload.H // self.cluster_heads(workload)
        return heads * ceil_div(workload.L, self.cluster_rows(workload))

    def clusters(self, workload: Workload, multiprocessors: int) -> int:
        """How many are launched."""
        tiles = self.tiles(workload)
        if self.splits(workload, multiprocessors):
            return self._clusters_of_pieces(workload, multiprocessors)
        return min(tiles, max(multiprocessors // self.cluster, 1)) if self.persistent else tiles

    def _clusters_of_pieces(self, workload: Workload, multiprocessors: int) -> int:
        pieces = self.tiles(workload) * ceil_div(workload.S, self.keys) // LEAST_PIECE
        return max(1, min(pieces, multiprocessors // self.cluster))

    def splits(self, workload: Workload, multiprocessors: int) -> bool:
        """Whether the keys of the last round's tiles are dealt to all clusters: where that should pay."""
        if not self.split or not self.persistent or has_upper_bound(workload):
            return False
        key_tiles, clusters = ceil_div(workload.S, self.keys), self._clusters_of_pieces(workload, multiprocessors)
        whole_turns, rest = divmod(self.tiles(workload), clusters)
        share = rest * key_tiles / clusters
        gain = key_tiles - share - COSTS_A_SPLIT
        return share >= LEAST_PIECE and gain >= LEAST_GAIN * (whole_turns + 1) * key_tiles

    def starts_early(self, workload: Workload) -> bool:
        """Whether the next tile's first scores are computed beside this one's last values: only where each row sees a
        key and no window hides first ones."""
        sees = workload.causal is None or workload.query_offset(0) >= 0
        return self.early and not self.split and workload.window is None and sees

    def alternates(self, workload: Workload) -> bool:
        """Whether groups change places every tile of rows: only where the last rows see more keys."""
        return self.alternate and self.groups > 1 and workload.causal is not None

    def keeps_maxima(self, workload: Workload) -> bool:
        """Whether tiles without a mask are computed with an earlier maximum: blocks of a cluster would have to agree on
        what is computed again, and first scores that begin early come before the end of the tile before is known."""
        return self.fixed_max and self.cluster == 1 and not self.starts_early(workload)

    def by_table(self, workload: Workload, multiprocessors: int) -> bool:
        """Whether a table says which cluster computes which tile: not where each has one tile at most."""
        helps = self.clusters(workload, multiprocessors) < self.tiles(workload) <= MAX_TABLE_TILES
        return self.schedule == "table" and helps and has_upper_bound(workload)

    def defines(self, workload: Workload, multiprocessors: int = MULTIPROCESSORS) -> dict[str, str | int]:
        """Macros for forward.cu."""
        copying, multiplying = REGISTERS[self.groups]
        return {
            "T16": C_TYPES[workload.dtype], "DIMS": workload.D_v, "HEAD_DIM": padded_head_dim(workload.D),
            "VALUE_DIM": padded_head_dim(workload.D_v),
            "GROUPS": self.groups, "KEYS": self.keys, "STAGES": self.stages, "REGISTERS_COPY": copying,
            "REGISTERS_GROUP": multiplying, "PING_PONG": int(self.ping_pong and self.groups > 1),
            "SNAKE": int(self.snake), "SLACK": self.slack, "TABLE": int(self.by_table(workload, multiprocessors)),
            "QUERY_SLOTS": self.query_slots, "CLUSTER": self.cluster, "CLUSTER_HEADS": self.cluster_heads(workload),
            "SPLIT": int(self.splits(workload, multiprocessors)), "EARLY": int(self.starts_early(workload)),
            "ALTERNATE": int(self.alternates(workload)), "FIXED_MAX": int(self.keeps_maxima(workload)),
            "DIAGONAL": int(has_upper_bound(workload)), "WINDOW": int(workload.window is not None),
        }  # fmt: skip

    def combine_defines(self, workload: Workload) -> dict[str, str | int]:
        """Macros for combine.cu."""
        shared = ("T16", "DIMS", "VALUE_DIM", "CLUSTER", "CLUSTER_HEADS")
        return {name: self.defines(workload)[name] for name in shared} | {"QUERIES": self.rows}


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def tuning_workloads() -> list[Workload]:
    """The first of each class: about 16,384 tokens and 2,048 columns over all heads, then such of few rows."""
    found: dict[str, Workload] = {}
    for limits, mask, dtype in product({key[:-2] for key in CHOICES}, ("", ",causal", ",causal,window={}"), C_TYPES):
        dims = f"D{limits[0]}" + (f",Dv{limits[-1]}" if len(limits) > 1 else "")
        for sizes, length in product((f"H{2048 // limits[0]},B{{}}", "H{1},B1"), (512, 2048, 8192)):
            heads = sizes.format(16384 // length, 8192 // length)
            workload = Workload.parse(f"{heads},L{length},{dims},{dtype}{mask.format(length // 4)}")
            found.setdefault(tuning_class(workload), workload)
    return sorted(found.values(), key=tuning_class)


def padded_head_dim(head_dim: int) -> int:
    """The multiple of 16, a product's depth, that the copies fill up to with zeros."""
    return ceil_div(head_dim, 16) * 16


def has_upper_bound(workload: Workload) -> bool:
    """Whether the last key that a row sees depends on the row."""
    return workload.causal is not None or workload.window is not None


def tuning_class(workload: Workload) -> str:
    """The class of workloads that share a tuned configuration: width of the head, mask, dtype, length, few tiles."""
    width = "v".join(str(limit) for limit in head_limits(workload))
    mask = "window" if workload.window is not None else "causal" if workload.causal else "full"
    longest = max(workload.L, workload.S)
    length = "short" if longest <= SHORT else "medium" if longest <= MEDIUM else "long"
    return f"d{width} {mask} {workload.dtype} {length}" + (" few" if few_tiles(workload) else "")


ONE_A_TILE: dict[str, Any] = {"persistent": False}
TABLE: dict[str, Any] = {"schedule": "table"}
PAIRS: dict[str, Any] = {"cluster": 2}
SPLIT: dict[str, Any] = {"split": True}
EARLY: dict[str, Any] = {"early": True}
ALTERNATE: dict[str, Any] = {"alternate": True}

FIXED: dict[str, Any] = {"fixed_max": True}

# Worth timing by (largest head dim, whether rows end at different keys, whether short), the usual one first: what was
# fastest on an H200, then what was close to it or was not measured. The first entry that holds the head dims counts;
# one with two limits holds queries and keys up to the first, values up to the second.
CHOICES: dict[tuple[int, ...], tuple[Configuration, ...]] = {
    (64, False, True): (
        Configuration(4, 64, 10, False, query_slots=2, **FIXED), Configuration(3, 128, 4, query_slots=2, **FIXED),
        Configuration(2, 128, 4, query_slots=2, **FIXED), Configuration(3, 128, 4, query_slots=2),
    ),
    (64, False, False): (
        Configuration(3, 128, 4, query_slots=2, **FIXED), Configuration(4, 64, 10, False, query_slots=2, **FIXED),
        Configuration(3, 128, 4, query_slots=2, **SPLIT, **FIXED),
        Configuration(4, 64, 10, False, query_slots=2, **SPLIT, **FIXED),
        Configuration(4, 64, 10, query_slots=2, **FIXED), Configuration(3, 128, 4, query_slots=2),
    ),
    (64, True, True): (
        Configuration(4, 64, 10, False, **TABLE, query_slots=2, **FIXED),
        Configuration(4, 64, 10, False, **TABLE, query_slots=2, **ALTERNATE, **FIXED),
        Configuration(3, 128, 4, False, **TABLE, query_slots=2, **FIXED),
        Configuration(2, 128, 4, **TABLE, query_slots=2, **FIXED),
        Configuration(2, 128, 4, **TABLE, query_slots=2, **EARLY),
        Configuration(4, 64, 10, False, **TABLE, query_slots=2, **ALTERNATE, **EARLY),
        Configuration(3, 128, 4, **TABLE, query_slots=2),
    ),
    (64, True, False): (
        Configuration(4, 64, 10, False, **TABLE, query_slots=2, **FIXED),
        Configuration(4, 64, 10, False, **TABLE, query_slots=2, **ALTERNATE, **FIXED),
        Configuration(3, 128, 4, **TABLE, query_slots=2, **FIXED), Configuration(3, 128, 4, **TABLE, query_slots=2),
    ),
    (128, False, True): (
        Configuration(2, 128, 2, query_slots=2, **FIXED), Configuration(2, 128, 2, False, query_slots=2, **FIXED),
        Configuration(3, 80, 4, False, **FIXED), Configuration(2, 128, 2, query_slots=2),
    ),
    (128, False, False): (
        Configuration(2, 128, 2, query_slots=2, **FIXED), Configuration(2, 176, 2, False, slack=8, **FIXED),
        Configuration(2, 176, 2, False, slack=8, **SPLIT, **FIXED), Configuration(3, 80, 4, False, **FIXED),
        Configuration(2, 128, 2, query_slots=2, **SPLIT, **FIXED), Configuration(2, 176, 2, False, slack=8),
    ),
    (128, True, True): (
        Configuration(2, 128, 2, **TABLE, query_slots=2, **FIXED),
        Configuration(2, 128, 2, False, **TABLE, query_slots=2, **FIXED),
        Configuration(2, 128, 2, **TABLE, query_slots=2), Configuration(2, 128, 2, **TABLE, query_slots=2, **EARLY),
        Configuration(2, 64, 5, False, **TABLE, query_slots=2, **ALTERNATE, **FIXED),
    ),
    (128, True, False): (
        Configuration(2, 128, 2, False, **TABLE, slack=8, query_slots=2, **FIXED),
        Configuration(2, 128, 2, **TABLE, query_slots=2, **FIXED), Configuration(3, 80, 4, False, **TABLE, **FIXED),
        Configuration(2, 128, 2, **TABLE, query_slots=2),
    ),
    (192, 128, False, True): (
        Configuration(2, 128, 2, slack=8), Configuration(2, 128, 2, slack=8, **FIXED),
        Configuration(3, 80, 3, slack=8, **FIXED),
    ),
    (192, 128, False, False): (
        Configuration(3, 80, 3, slack=8, **FIXED), Configuration(2, 128, 2, slack=8, **FIXED),
        Configuration(3, 80, 3, slack=8, **SPLIT, **FIXED), Configuration(3, 80, 3, slack=8),
        Configuration(3, 80, 3, slack=8, **SPLIT),
    ),
    (192, 128, True, True): (
        Configuration(2, 128, 2, **TABLE, slack=8), Configuration(2, 128, 2, **TABLE, slack=8, **FIXED),
        Configuration(2, 128, 2, **TABLE),
    ),
    (192, 128, True, False): (
        Configuration(2, 128, 2, **TABLE, slack=8, **FIXED), Configuration(3, 80, 3, **TABLE, slack=8, **FIXED),
        Configuration(2, 128, 2, **TABLE, slack=8), Configuration(3, 80, 3, **TABLE, slack=8),
    ),
    (192, False, True): (
        Configuration(2, 112, 2), Configuration(2, 112, 2, **FIXED), Configuration(2, 64, 2, query_slots=2),
    ),
    (192, False, False): (
        Configuration(2, 112, 2, **FIXED), Configuration(2, 112, 2), Configuration(2, 96, 2, **FIXED),
        Configuration(2, 112, 2, **SPLIT, **FIXED),
    ),
    (192, True, True): (
        Configuration(2, 112, 2, **TABLE), Configuration(2, 112, 2, **TABLE, **FIXED),
        Configuration(2, 64, 2, **TABLE, query_slots=2),
    ),
    (192, True, False): (
        Configuration(2, 112, 2, **TABLE, **FIXED), Configuration(2, 112, 2, **TABLE),
        Configuration(2, 112, 2, **ONE_A_TILE),
    ),
    (256, False, True): (
        Configuration(2, 64, 2, slack=8), Configuration(2, 80, 2, slack=8, **FIXED),
        Configuration(2, 80, 2, slack=8),
    ),
    (256, False, False): (
        Configuration(2, 80, 2, False, slack=8, **FIXED), Configuration(2, 80, 2, False, slack=8, **SPLIT, **FIXED),
        Configuration(2, 80, 2, False, slack=8, **PAIRS), Configuration(2, 80, 2, slack=8, **FIXED),
        Configuration(2, 80, 2, slack=8),
    ),
    (256, True, True): (
        Configuration(2, 80, 2, **TABLE, slack=8), Configuration(2, 80, 2, **TABLE, slack=8, **FIXED),
        Configuration(2, 80, 2, slack=8, **ONE_A_TILE),
    ),
    (256, True, False): (
        Configuration(2, 80, 2, **TABLE, slack=8), Configuration(2, 80, 2, **TABLE, slack=8, **FIXED),
        Configuration(2, 80, 2, **TABLE, slack=8, **PAIRS),
    ),
}  # fmt: skip


# The same where tiles are few, by (largest head dim, whether rows end at different keys): with one group a block, twice
# as many multiprocessors have half as much to do.
FEW: dict[tuple[int, bool], tuple[Configuration, ...]] = {
    (64, False): (
        Configuration(1, 128, 4), Configuration(1, 128, 4, **FIXED), Configuration(1, 192, 3, **FIXED),
        Configuration(2, 128, 4, **FIXED), Configuration(1, 128, 4, **SPLIT, **FIXED),
    ),
    (64, True): (
        Configuration(1, 128, 4), Configuration(1, 128, 4, **FIXED), Configuration(1, 64, 4, **FIXED),
        Configuration(2, 128, 4, **FIXED),
    ),
    (128, False): (
        Configuration(1, 128, 3), Configuration(1, 128, 3, **FIXED), Configuration(1, 176, 2, slack=8, **FIXED),
        Configuration(2, 128, 2, **FIXED), Configuration(1, 128, 3, **SPLIT, **FIXED),
    ),
    (128, True): (
        Configuration(1, 128, 3), Configuration(1, 128, 3, **FIXED), Configuration(1, 64, 3, **FIXED),
        Configuration(2, 128, 2, **FIXED),
    ),
    (192, False): (
        Configuration(1, 112, 2), Configuration(1, 112, 2, **FIXED), Configuration(2, 112, 2, **FIXED),
        Configuration(1, 112, 2, **SPLIT, **FIXED),
    ),
    (192, True): (
        Configuration(1, 112, 2), Configuration(1, 112, 2, **FIXED), Configuration(1, 64, 3, **FIXED),
        Configuration(2, 112, 2, **FIXED),
    ),
    (256, False): (
        Configuration(1, 80, 2), Configuration(1, 80, 2, **FIXED), Configuration(2, 64, 2, slack=8),
        Configuration(1, 80, 2, **SPLIT, **FIXED),
    ),
    (256, True): (
        Configuration(1, 80, 2), Configuration(1, 80, 2, **FIXED), Configuration(1, 64, 3),
        Configuration(2, 80, 2, slack=8),
    ),
}  # fmt: skip


def few_tiles(workload: Workload) -> bool:
    """Whether blocks of one group each have a multiprocessor for themselves."""
    return workload.B * workload.H * ceil_div(workload.L, GROUP_ROWS) <= MULTIPROCESSORS


def head_limits(workload: Workload) -> tuple[int, ...]:
    """What the keys of CHOICES that hold the workload's head dims begin with: one limit, or that of queries and keys
    and that of values."""
    limits = (key[:-2] for key in CHOICES)
    return next(found for found in limits if workload.D <= found[0] and workload.D_v <= found[-1])


def choices(workload: Workload) -> tuple[Configuration, ...]:
    """What is worth timing for the workload's class, the usual one first, whether or not it fits."""
    w, bounded = workload, has_upper_bound(workload)
    if few_tiles(w):
        widest = max(w.D, w.D_v)
        return next(found for (limit, kind), found in FEW.items() if widest <= limit and kind == bounded)
    return CHOICES[(*head_limits(w), bounded, max(w.L, w.S) <= SHORT)]


def usual(workload: Workload) -> Configuration:
    """The configuration that is taken where nobody tuned."""
    return choices(workload)[0]


def candidates(workload: Workload, device: Device) -> list[Configuration]:
    """Configurations worth timing for this workload, the usual one first; each fits, all its blocks have rows, and does
    what it may do: cuts keys, starts early, lets groups change places."""
    w, multiprocessors = workload, device.multiprocessors or MULTIPROCESSORS
    fitting = (one for one in choices(w) if one.fits(w.D, w.D_v))
    in_use = (one for one in fitting if w.L > one.rows or one.cluster == one.cluster_heads(w))
    return [
        one for one in in_use
        if one.split <= one.splits(w, multiprocessors)
        and one.early <= one.starts_early(w)
        and one.alternate <= one.alternates(w)
    ]  # fmt: skip
