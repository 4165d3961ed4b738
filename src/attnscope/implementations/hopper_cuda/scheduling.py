"""Which block computes which tile of hopper_cuda: sections of heads, and a table that balances what blocks do.

Reads a Workload and a Configuration, writes plain lists. Imports neither torch nor another implementation.

A causal row's keys grow with its position, so tiles that are dealt in turn leave some blocks with more to do than
others. The table gives each tile, the longest of a section of heads first, to the block that has the least so far.
Where all rows see all keys, only the last round leaves blocks idle: the keys of its tiles may be dealt in pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnscope.device import Device
from attnscope.implementations.common import NO_TILE, deal_tiles, turns_of
from attnscope.implementations.hopper_cuda import configurations
from attnscope.implementations.hopper_cuda.configurations import Configuration, ceil_div, has_upper_bound
from attnscope.inputs import torch_dtype
from attnscope.workload import Workload

L2_BYTES = 50 * 2**20
L2_SHARE = 0.6  # of which a section of heads may fill with keys and values
COSTS_A_KEY_TILE, COSTS_A_TILE = 2, 3  # a tile's first scores and its last sums overlap with nothing: 1.5 tiles of keys


def visible_from(workload: Workload) -> tuple[int, int]:
    """(reach, lag): row i sees keys from i + lag on, below i + reach; meant only where there is such a bound."""
    w = workload
    offset = w.query_offset(0)
    reach, lag = offset + 1, 0
    if w.window is not None:
        window = min(w.window, w.L + w.S)  # a wider one hides nothing
        reach, lag = reach if w.causal else window, offset - window + 1
    return reach, lag


def section_heads(workload: Workload, device: Device) -> int:
    """Heads that are walked over together, the longest rows of all first: one where all rows are as long, otherwise as
    many, a power of two, as have their keys and values in the L2 cache at once."""
    w = workload
    if not has_upper_bound(w):
        return 1
    bytes_a_head = w.S * (w.D + w.D_v) * torch_dtype(w.dtype).itemsize / w.group
    most = max(1, int(L2_SHARE * (device.l2_bytes or L2_BYTES) / bytes_a_head))
    return min(int(2 ** int(math.log2(most))), w.B * w.H)


def key_tiles(workload: Workload, configuration: Configuration) -> list[int]:
    """Tiles of keys that any row sees, for each tile of a cluster's rows of a head."""
    w, c = workload, configuration
    reach, lag = visible_from(w)
    found, rows = [], c.cluster_rows(w)
    for first in range(0, w.L, rows):
        high = min(w.S, min(first + rows, w.L) - 1 + reach) if has_upper_bound(w) else w.S
        end = ceil_div(max(high, 0), c.keys)
        begin = min(max(first + lag, 0) // c.keys, end) if w.window is not None else 0
        found.append(end - begin)
    return found


def balanced_order(lengths: list[int], heads: int, section: int, blocks: int) -> list[int]:
    """The table: rows of ``blocks`` entries, each head * len(lengths) + row tile, or NO_TILE; the last
    row is NO_TILE.

    ``lengths``: tiles of keys of each tile of rows, alike in all heads. A block's column is what it does, from above.
    No block gets more than the least loaded one by more than a single tile.
    """
    rows = len(lengths)
    longest_first = sorted(range(rows), key=lambda row: (-lengths[row], -row))
    sections = (
        [
            (COSTS_A_KEY_TILE * lengths[row] + COSTS_A_TILE, head * rows + row)
            for row in longest_first
            for head in range(start, min(start + section, heads))
        ]
        for start in range(0, heads, section)
    )
    return turns_of(deal_tiles(sections, blocks))


@dataclass(frozen=True)
class Pieces:
    """The last round's tiles of rows, cut in pieces of their keys and dealt to clusters, after ``whole_turns``.

    ``order``: three numbers a turn (tile, its first tile of keys, the one after its last), clusters side by side. The
    first row stands for each of the whole turns, in which tiles are dealt in turn and have all keys; then follow
    ``turns`` rows of pieces, then one in which all are through. A piece's number is turn * clusters + cluster.
    ``tiles``: three numbers a cut tile (tile, where its pieces begin in ``pieces``, how many). ``pieces``: their
    numbers, by tile.
    """

    whole_turns: int
    turns: int
    order: list[int]
    tiles: list[int]
    pieces: list[int]


def deal_pieces(tiles: int, key_tiles: int, clusters: int) -> Pieces:
    """What full rounds leave of ``tiles``, each of ``key_tiles``, in even shares of neighbouring tiles of keys.

    A share that would end less than half of LEAST_PIECE from a tile's edge ends there.
    """
    nearest, (whole_turns, rest) = configurations.LEAST_PIECE // 2, divmod(tiles, clusters)

    def cut(share: int) -> int:
        place = share * rest * key_tiles // clusters
        inside = place % key_tiles
        if inside < nearest:
            return place - inside
        return place + key_tiles - inside if key_tiles - inside < nearest else place

    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(clusters)]
    numbers: dict[int, list[int]] = {}
    for cluster, share in enumerate(shares):
        begin, end = cut(cluster), cut(cluster + 1)
        while begin < end:
            rest_tile, inside = divmod(begin, key_tiles)
            tile, keys = whole_turns * clusters + rest_tile, min(end - begin, key_tiles - inside)
            numbers.setdefault(tile, []).append(len(share) * clusters + cluster)
            share.append((tile, inside, inside + keys))
            begin += keys
    turns = max(map(len, shares))
    rows = [[(NO_TILE, 0, key_tiles)] * clusters]
    rows += [[share[turn] if turn < len(share) else (NO_TILE, 0, 0) for share in shares] for turn in range(turns + 1)]
    cut_tiles: list[int] = []
    pieces: list[int] = []
    for tile, own in numbers.items():
        cut_tiles += [tile, len(pieces), len(own)]
        pieces += own
    return Pieces(whole_turns, turns, [number for row in rows for one in row for number in one], cut_tiles, pieces)
