"""How hopper_cuda's kernel may be compiled: configurations, what they take of a multiprocessor, and which is the usual.

Reads a Workload and a Device, writes Configurations. Imports neither torch nor another implementation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from attnscope.device import Device
from attnscope.workload import Workload

SHARED_LIMIT_BYTES = 227 * 1024
ALIGNMENT_BYTES = 1024  # of a swizzled tile
BARRIER_BYTES = 8
GROUP_ROWS = 64  # rows of a warpgroup's product
PANEL_COLUMNS = 64  # 16-bit numbers of a row of 128 bytes, the widest that the hardware swizzles
REGISTERS = {2: (24, 240), 3: (32, 160)}  # of the copying warpgroup and of each multiplying one; together 64 Ki
SHORT, MEDIUM = 1024, 4096  # longest S of a length class
C_TYPES = {"bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Configuration:
    """What the kernel is compiled and launched with beside the workload.

    ``groups`` of 64 rows a block, ``keys`` a tile, ``stages`` of keys and as many of values. ``ping_pong``: groups
    begin products in turn. ``snake``: every other round of tiles runs backwards over the blocks. ``slack``: sums are
    rescaled only where a maximum rose by more than so many powers of two; 0 rescales always. ``persistent``: a block a
    multiprocessor walks over tiles; otherwise a block a tile.
    """

    groups: int
    keys: int
    stages: int
    ping_pong: bool = True
    snake: bool = True
    slack: int = 0
    persistent: bool = True

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return GROUP_ROWS * self.groups

    @property
    def threads(self) -> int:
        """Of a block: a warpgroup that copies, then the groups."""
        return 128 * (self.groups + 1)

    def shared_bytes(self, head_dim: int) -> int:
        """Dynamic shared memory of a block."""
        panels = ceil_div(head_dim, PANEL_COLUMNS)
        tiles = (self.rows + 2 * self.stages * self.keys) * panels * PANEL_COLUMNS * 2
        return ALIGNMENT_BYTES + tiles + (2 + 4 * self.stages) * BARRIER_BYTES

    def result_registers(self, head_dim: int) -> int:
        """Registers a thread for sums, scores and the weights of the tile before, which live at once."""
        return padded_head_dim(head_dim) // 2 + self.keys // 2 + self.keys // 4

    def fits(self, head_dim: int) -> bool:
        """Whether shared memory and registers suffice; 20 are kept for everything else."""
        enough = self.result_registers(head_dim) + 20 <= REGISTERS[self.groups][1]
        return enough and self.shared_bytes(head_dim) <= SHARED_LIMIT_BYTES

    def defines(self, workload: Workload) -> dict[str, str | int]:
        """Macros for forward.cu."""
        copying, multiplying = REGISTERS[self.groups]
        return {
            "T16": C_TYPES[workload.dtype], "DIMS": workload.D, "HEAD_DIM": padded_head_dim(workload.D),
            "GROUPS": self.groups, "KEYS": self.keys, "STAGES": self.stages, "REGISTERS_COPY": copying,
            "REGISTERS_GROUP": multiplying, "PING_PONG": int(self.ping_pong), "SNAKE": int(self.snake),
            "SLACK": self.slack, "DIAGONAL": int(has_upper_bound(workload)), "WINDOW": int(workload.window is not None),
        }  # fmt: skip


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def padded_head_dim(head_dim: int) -> int:
    """The multiple of 16, a product's depth, that the copies fill up to with zeros."""
    return ceil_div(head_dim, 16) * 16


def has_upper_bound(workload: Workload) -> bool:
    """Whether the last key that a row sees depends on the row."""
    return workload.causal is not None or workload.window is not None


def tuning_class(workload: Workload) -> str:
    """The class of workloads that share a tuned configuration: width of the head, mask, dtype, length."""
    width = next(limit for limit in (64, 128, 192, 256) if workload.D <= limit)
    mask = "window" if workload.window is not None else "causal" if workload.causal else "full"
    length = "short" if workload.S <= SHORT else "medium" if workload.S <= MEDIUM else "long"
    return f"d{width} {mask} {workload.dtype} {length}"


# The usual configuration by (largest head dim, whether rows end at different keys), as FlashAttention-3 tiles them
# where it fits: the first entry that holds the head dim.
USUAL: dict[tuple[int, bool], Configuration] = {
    (64, False): Configuration(3, 128, 4),
    (64, True): Configuration(3, 128, 4),
    (128, False): Configuration(2, 176, 2),
    (128, True): Configuration(2, 128, 3),
    (192, False): Configuration(2, 112, 2),
    (192, True): Configuration(2, 112, 2),
    (256, False): Configuration(2, 80, 2, ping_pong=False),
    (256, True): Configuration(2, 80, 2, ping_pong=False),
}


def usual(workload: Workload) -> Configuration:
    """The configuration that is taken where nobody tuned."""
    bounded = has_upper_bound(workload)
    return next(found for (limit, kind), found in USUAL.items() if workload.D <= limit and kind == bounded)


TILES: dict[int, tuple[tuple[int, int, int], ...]] = {  # (groups, keys, stages) worth timing, by largest head dim
    64: ((3, 128, 3), (3, 128, 4), (3, 128, 5), (3, 112, 4), (3, 96, 5), (2, 176, 3), (2, 192, 3), (2, 128, 5)),
    128: ((2, 176, 2), (2, 160, 2), (2, 144, 2), (2, 128, 3), (2, 128, 2), (2, 112, 3), (2, 96, 4)),
    192: ((2, 112, 2), (2, 96, 2), (2, 80, 3), (2, 64, 3)),
    256: ((2, 80, 2), (2, 64, 2), (2, 48, 3)),
}


def candidates(workload: Workload, device: Device) -> list[Configuration]:
    """Configurations worth timing for this workload, the usual one first; each fits."""
    del device
    width = next(limit for limit in TILES if workload.D <= limit)
    first = usual(workload)
    found = dict.fromkeys([first, *_variants(first)])
    found.update(dict.fromkeys(dataclasses.replace(first, groups=g, keys=k, stages=s) for g, k, s in TILES[width]))
    return [one for one in found if one.fits(workload.D)]


def _variants(first: Configuration) -> Iterator[Configuration]:
    """The usual one with each switch turned."""
    yield dataclasses.replace(first, ping_pong=not first.ping_pong)
    yield dataclasses.replace(first, slack=8)
    yield dataclasses.replace(first, slack=8, ping_pong=not first.ping_pong)
    yield dataclasses.replace(first, snake=False)
    yield dataclasses.replace(first, persistent=False)
