"""Stage 2: which block of the persistent grid works on which tiles, so that all blocks end together.

Reads a Workload and the sizes of tiles; writes plain numbers. Imports no torch. Must not import another implementation
or a later stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnscope.implementations.common import deal_tiles, turns_of
from attnscope.workload import Workload

MAX_TILES = 2**20  # a table of more would take seconds; such grids keep the arithmetic order
HALF_TILES_AROUND = 3  # what loading Q and storing the output cost, in halves of a tile of keys


def is_uneven(workload: Workload) -> bool:
    """Whether tiles of rows may differ in how many keys they see."""
    w = workload
    return w.causal is not None or w.window is not None or w.lengths is not None or w.packed is not None


def tile_costs(workload: Workload, rows: int, keys: int) -> list[list[int]]:
    """Cost of each tile of ``rows`` query rows, of each batch entry, in halves of a tile of ``keys`` keys."""
    found: dict[int, list[int]] = {}
    for b in range(workload.B):
        length = workload.key_length(b)
        if length not in found:
            starts = range(0, workload.L, rows)
            found[length] = [2 * _visited(workload, b, row, rows, keys) + HALF_TILES_AROUND for row in starts]
    return [found[workload.key_length(b)] for b in range(workload.B)]


def _visited(w: Workload, b: int, row: int, rows: int, keys: int) -> int:
    """Tiles of keys that the kernel walks for the rows from ``row`` on: at least one."""
    low = w.row_interval(b, row)[0]
    high = min(w.row_interval(b, min(row + rows, w.L) - 1)[1], w.key_length(b))
    return max(1, -(-high // keys) - low // keys)


def balance(costs: Sequence[Sequence[int]], heads: int, section: int, blocks: int) -> list[list[int]]:
    """Tiles of each block, in the order in which it walks them.

    ``costs`` are those of the tiles of rows of each batch entry, ``heads`` the query heads of one; a tile's number is
    its head, counted over the batch, times the tiles of rows, plus its own. Sections of ``section`` heads follow one
    another, because their keys and values share the L2 cache. Within one, the longest tile that is left goes to the
    block with the least to do so far, all earlier sections counted; so blocks end within one tile of each other.
    """
    row_tiles, total = len(costs[0]), len(costs) * heads
    sections = (
        sorted(
            (
                (cost, head * row_tiles + tile)
                for head in range(first, min(first + section, total))
                for tile, cost in enumerate(costs[head // heads])
            ),
            key=lambda told: (-told[0], told[1]),
        )
        for first in range(0, total, section)
    )
    return deal_tiles(sections, blocks)


def as_table(tiles: Sequence[Sequence[int]]) -> list[int]:
    """What the kernel reads: each block's count of tiles, then its tiles turn by turn."""
    return [len(own) for own in tiles] + turns_of(tiles)
