# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Stage 2: what runs in front of ``hopper``'s kernel where there is a bool mask, in Gluon, made by :func:`load`.

**Idea** A score's fate is one bit. The first kernel reads each byte of the mask once, adds what geometry hides, and
writes a bit a score in the order in which a thread of the attention kernel holds its scores, so that a tile of 64 x 128
costs two registers; and of each tile whether all, some or none of it is seen. The second lists, for each tile of rows,
the tiles of keys that are not empty, and sets the queue of tiles of rows to its start. **Grid** One block a tile of
rows and keys; one a tile of rows. **Memory** Any strides of the mask, expanded ones too, where rows are whole words of
four keys.
**Bound** Reading the mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnscope.implementations.hopper import gluon_shim, kernels

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl

    from attnscope.implementations.hopper.kernels import _batch_geometry, _interval

WORDS_SCALARS = ("mask_b", "mask_h", "mask_l", "heads", "L", "S", "row_tiles", "key_tiles", "window")
LIST_SCALARS = ("key_tiles",)
EMPTY, MIXED, WHOLE = 0, 1, 2  # kinds of tiles
_DEVICE_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def _device(function: Callable[..., Any]) -> Any:
    """Marks what :func:`load` hands to Gluon."""
    _DEVICE_FUNCTIONS[function.__name__] = function
    return function


def load() -> Any:
    """This module with its kernels made by ``gluon.jit``. Raises what importing triton raises."""
    module = sys.modules[__name__]
    if "gl" not in vars(module):
        main = kernels.load()
        made = {
            name: gluon_shim.jit(f, tuple(dict.fromkeys(WORDS_SCALARS + LIST_SCALARS)))
            for name, f in _DEVICE_FUNCTIONS.items()
        }
        shared = {name: getattr(main, name) for name in ("_batch_geometry", "_interval")}
        vars(module).update(made, **shared, **gluon_shim.names())
    return module


@_device
def hopper_attention_mask_words(
    mask, words, kinds, lengths, starts, ends,
    mask_b, mask_h, mask_l, heads, L, S, row_tiles, key_tiles, window,
    GROUPS: gl.constexpr, KEYS: gl.constexpr, STEP: gl.constexpr, CAUSAL: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """Words and kind of one tile of GROUPS x 64 rows and KEYS keys: see ``kernels._hide_by_words``.

    Four keys are read at a time, strides count them; or, STEP 0, one byte that holds for all keys of a row.
    """
    ROWS: gl.constexpr = 64
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])  # eight lanes read 32 bytes of a row
    stored: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    number = gl.program_id(0)
    place = number // key_tiles
    key_tile = number - place * key_tiles
    head = place // row_tiles
    tile = place - head * row_tiles
    b = head // heads
    h = head - b * heads
    length, offset = _batch_geometry(b, lengths, L, S, BOTTOM_RIGHT)
    four = gl.arange(0, KEYS // 4, gl.SliceLayout(0, layout))
    key = gl.expand_dims(key_tile * KEYS + 4 * four, 0)
    shift = gl.expand_dims(
        four // 2 * 2, 0
    )  # four 2 i + p holds both columns 8 i + 2 lane + e of lanes 2 p and 2 p + 1
    first = mask + gl.cast(b, gl.int64) * mask_b + gl.cast(h, gl.int64) * mask_h + key_tile * (KEYS // 4 * STEP)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, stored)), 1)
    lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, stored)), 0)
    ones = gl.zeros([ROWS, 4], gl.int32, stored)
    for w in gl.static_range(GROUPS):
        rows = (tile * GROUPS + w) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        low, high = _interval(gl.minimum(rows, L - 1), length, offset, starts, ends, window, CAUSAL, WINDOWED)
        rows = gl.expand_dims(rows, 1)
        before = gl.minimum(gl.maximum(gl.expand_dims(low, 1) - key, 0), 4)
        within = gl.minimum(gl.maximum(gl.expand_dims(high, 1) - key, 0), 4)
        inside = (rows < L) & (before < within)
        places = first + rows.to(gl.int64) * mask_l + gl.expand_dims(four, 0) * STEP
        found = gl.load(places, mask=inside, other=0)
        if STEP == 0:  # a byte that holds for every key
            found = gl.where(found != 0, 0x01010101, 0)
        # A byte that is not 0 sets its highest bit; one product gathers the four in the uppermost. Outside all are 0.
        found = (((found & 0x7F7F7F7F) + 0x7F7F7F7F) | found) & -0x7F7F7F80
        bits = (found * 0x204081) >> 28 & ((1 << within) - (1 << before))
        parts = gl.join((bits & 3) << shift, (bits >> 2) << shift).reshape([ROWS, KEYS // 8, 4])
        made = gl.convert_layout(gl.sum(parts, 1), stored)
        where = ((gl.cast(place, gl.int64) * GROUPS + w) * key_tiles + key_tile) * (ROWS * 4)
        gl.store(words + where + (row * 4 + lane), made)
        ones += gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [made], dtype=gl.int32, is_pure=True, pack=1)
    seen = gl.sum(gl.sum(ones, 1), 0)
    whole = gl.minimum(L - tile * (GROUPS * ROWS), GROUPS * ROWS) * KEYS
    gl.store(kinds + number, gl.where(seen == 0, 0, gl.where(seen == whole, 2, 1)))


@_device
def hopper_attention_mask_lists(kinds, lists, queue, key_tiles, CHUNK: gl.constexpr):
    """The list of one tile of rows: how many tiles of keys, then each times 2, plus 1 where it needs the words.

    There is always one, be it hidden to the last key. Of a ``queue`` nothing is claimed yet.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, CHUNK // 4], [8, 4], [4, 1], [1, 0])
    place = gl.program_id(0)
    kinds += gl.cast(place, gl.int64) * key_tiles
    lists += gl.cast(place, gl.int64) * (key_tiles + 1)
    tile = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    other = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    count = 0
    for first in range(0, key_tiles, CHUNK):
        kind = gl.load(kinds + (first + tile), mask=first + tile < key_tiles, other=0)
        beside = gl.load(kinds + (first + other), mask=first + other < key_tiles, other=0)
        before = gl.expand_dims(beside != 0, 0) & (gl.expand_dims(other, 0) < gl.expand_dims(tile, 1))
        rank = count + gl.sum(before.to(gl.int32), 1)
        entry = (first + tile) * 2 + (kind == 1).to(gl.int32)
        gl.store(lists + 1 + rank, entry, mask=kind != 0)
        count += gl.sum((kind != 0).to(gl.int32), 0)
    gl.store(lists + 1, 1, mask=count == 0)
    gl.store(lists, gl.maximum(count, 1))
    if queue is not None:
        gl.store(queue, 0, mask=place == 0)
