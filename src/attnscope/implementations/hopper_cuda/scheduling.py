"""Which block computes which tile of hopper_cuda: sections of heads, and a table that balances what blocks do.

Reads a Workload and a Configuration, writes plain lists. Imports neither torch nor another implementation.

A causal row's keys grow with its position, so tiles that are dealt in turn leave some blocks with more to do than
others. The table gives each tile, the longest of a section of heads first, to the block that has the least so far.
"""

from __future__ import annotations

import math

from attnscope.device import Device
from attnscope.implementations.common import deal_tiles, turns_of
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
