# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Stage 2: the kernel of ``hopper``, in Gluon, which is imported by :func:`load`, never before.

**Idea** A block of threads owns tiles of query rows, one after the other. One warp loads tiles of Q, K and V by TMA
through a ring; two or three groups of 128 threads multiply by wgmma, each 64 rows, and compute softmax while the tensor
cores work on the previous tile's P V or on another group's products.
**Grid** One dimension: as many blocks as multiprocessors, or one a tile. Where tiles differ in length a persistent grid
reads which block works on which from a table (``schedules.py``), or blocks claim tiles from a queue. Else a tile's
place follows from its number alone: under a causal mask the longest come first, heads in sections whose K and V fit the
L2 cache.
**Memory** Rank-4 descriptors over (B, heads, rows, D) with the tensors' own strides: rows beyond a head read as zeros
and are not written. K and V share one ring, in the order K0 K1 V0 K2 V1 ... in which they are read.
**Bound** Tensor cores at D 128 and 256, exponentials beside them at D 64.
**Masks** Every geometric mask is one interval of keys per row. Tiles of keys at its ends are masked and walked first,
those between need no mask and hold no code for one. A bool mask is packed beforehand (``mask_kernels.py``), geometry
with it, into a list of the tiles of keys that a tile of rows sees, and a bit a score.
**Bias** Tiles of it come by TMA through a ring of each group; one that has no rows, or no columns, is read in place.
Scores then are natural ones: times log2(e) a bias near fp32's end would overflow.
**Fixed maxima** With FIXED only a row's first tile of keys is online softmax; the others are computed with its maximum
as it is: no maximum, no exchange between lanes, no rescaling. Weights may pass 1, which fp32 and bf16 do not mind. A
group marks the tiles of rows where sums then left the range of numbers; the block computes those again by online
softmax, after all others.

Functions marked ``_device`` become Gluon's when :func:`load` is called; until then they are plain text. Scores are kept
in units in which an exponential is one exp2. Barriers: ``full`` is completed by TMA's bytes, ``empty`` by one arrival a
group; a slot's phase flips each time the ring wraps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnscope.implementations.hopper import gluon_shim

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language import thread_barrier
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
    from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as multiply
    from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as multiplied
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_load as load_tile
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_store as store_tile
    from triton.experimental.gluon.language.nvidia.hopper.tma import store_wait as stored

SCALARS = ("H", "group", "L", "S", "row_tiles", "tiles", "section", "window", "scale", "cap")
MASK_SCALARS = ("list_batch", "list_head", "list_step", "words_step")
BIAS_SCALARS = ("bias_batch", "bias_head", "bias_step")
_DEVICE_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def _device(function: Callable[..., Any]) -> Any:
    """Marks what :func:`load` hands to Gluon."""
    _DEVICE_FUNCTIONS[function.__name__] = function
    return function


def load() -> Any:
    """This module with its kernels made by ``gluon.jit``. Raises what importing triton raises."""
    module = sys.modules[__name__]
    if "gl" not in vars(module):
        scalars = SCALARS + MASK_SCALARS + BIAS_SCALARS
        made = {
            name: gluon_shim.jit(f, scalars if name == "hopper_attention_forward" else ())
            for name, f in _DEVICE_FUNCTIONS.items()
        }
        vars(module).update(made, **gluon_shim.names())
    return module


# --- which tile -------------------------------------------------------------------------------------------------------


@_device
def _tiles_of_block(tiles, order):
    """How many tiles this block works on."""
    blocks = gl.num_programs(0)
    place = gl.program_id(0)
    if order is not None:
        count = gl.load(order + place)
    else:
        whole = tiles // blocks
        count = whole + gl.where(place < tiles - whole * blocks, 1, 0)
    return count


@_device
def _tile_number(turn, order):
    """The number of this block's tile in its ``turn``: the schedule's, else every so many-th."""
    blocks = gl.num_programs(0)
    place = gl.program_id(0)
    if order is not None:  # noqa: SIM108  the compiler drops a branch, not an operand
        number = gl.load(order + (turn + 1) * blocks + place)
    else:
        number = turn * blocks + place
    return number


@_device
def _place_of_tile(number, H, row_tiles, tiles, section, LONGEST_FIRST: gl.constexpr, BATCH_FIRST: gl.constexpr):
    """(head counted over the batch, tile of rows) of a tile: a bijection.

    LONGEST_FIRST walks sections of heads, a tile of rows of each before the next; BATCH_FIRST counts a head of all
    batch entries before the next head.
    """
    if LONGEST_FIRST:
        heads = tiles // row_tiles
        first = number // (section * row_tiles) * section
        inside = number - first * row_tiles
        width = gl.minimum(section, heads - first)
        head = first + inside % width
        tile = row_tiles - 1 - inside // width
    else:
        head = number // row_tiles
        tile = number - head * row_tiles
    if BATCH_FIRST:
        batch = tiles // row_tiles // H
        head = head % batch * H + head // batch
    return head, tile


# --- a queue of tiles -------------------------------------------------------------------------------------------------


@_device
def _claim(queue):
    """The number of a tile that no block has yet, for the loading warp; the last tile's or more: none is left.

    A block's first tile is its own number; ``queue`` counts what was claimed after those.
    """
    return gl.num_programs(0) + gl.atomic_add(queue, 1, sem="relaxed", scope="gpu")


@_device
def _announce(told, turn, number):
    """Leave the number of the block's next tile to the groups, who read it behind the barrier of this turn's last V.

    What the loading warp tells lies in two slots without a barrier of their own: who writes in turn t has waited for
    the groups to leave Q's slot of turn t - 2 or a later one, and they had read by then what was told in that turn.
    """
    numbers, _lists = told
    _tell(numbers, turn, gl.full([32], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@_device
def _start_of_list(listed, length):
    """The first words of a list, one a lane of the loading warp. The groups read them behind the barrier of Q."""
    place = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.load(listed + place, mask=place < length, other=0)


@_device
def _tell(slots, turn, words):
    """Each lane of the loading warp writes one word; then one thread may arrive for all."""
    slots.index(turn & 1).store(words)
    thread_barrier()


@_device
def _heard(slots, turn, PLACE: gl.constexpr):
    """A word of what was told in this turn, for a group."""
    word = slots.index(turn & 1).slice(PLACE, 1).load(gl.BlockedLayout([1], [32], [4], [0]))
    return gl.sum(word, 0)


# --- which keys -------------------------------------------------------------------------------------------------------


@_device
def _batch_geometry(b, lengths, L, S, BOTTOM_RIGHT: gl.constexpr):
    """How many keys are real, and where query 0 stands among them."""
    length = S
    if lengths is not None:
        length = gl.load(lengths + b)
    offset = 0
    if BOTTOM_RIGHT:
        offset = length - L
    return length, offset


@_device
def _interval(row, length, offset, starts, ends, window, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr):
    """Row ``row`` sees keys low <= j < high (Workload.row_interval); neither end falls from one row to the next."""
    low = row * 0
    high = low + length
    if starts is not None:
        low = gl.load(starts + row)
        high = gl.minimum(high, gl.load(ends + row))
    if CAUSAL:
        high = gl.minimum(high, row + offset + 1)
    if WINDOWED:
        low = gl.maximum(low, row + offset - window + 1)
        high = gl.minimum(high, row + offset + window)
    return low, high


@_device
def _walk(
    row, length, offset, starts, ends, L, S, window, ROWS: gl.constexpr, KEYS: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """(count, masked, upper, last, whole, tail) of the tiles of keys that rows from ``row`` on see.

    The first ``masked`` of ``count`` need a mask: ``upper`` of them from ``last`` - 1 down, the others from ``whole``
    - 1 down; the rest, from ``tail`` - 1 down, do not. There is always one, be it hidden to the last key.
    """
    if MASKED:
        end = gl.minimum(row + ROWS, L) - 1
        low, high_first = _interval(row, length, offset, starts, ends, window, CAUSAL, WINDOWED)
        low_last, high = _interval(end, length, offset, starts, ends, window, CAUSAL, WINDOWED)
        first = gl.maximum(low, 0) // KEYS
        last = (gl.maximum(high, 0) + KEYS - 1) // KEYS
        nothing = last <= first
        first = gl.where(nothing, 0, first)
        last = gl.where(nothing, 1, last)
        whole = gl.minimum((gl.maximum(low_last, 0) + KEYS - 1) // KEYS, last)
        tail = gl.minimum(gl.maximum(high_first, 0) // KEYS, last)
        split = (whole < tail) & (first < tail)
        whole = gl.where(split, gl.maximum(whole, first), first)
        tail = gl.where(split, tail, first)
        upper = last - tail
        masked = upper + whole - first
        count = last - first
    else:
        last = S // KEYS
        count = last
        whole = 0
        tail = last
        upper = 0
        masked = 0
    return count, masked, upper, last, whole, tail


@_device
def _key_tile(j, masked, upper, last, whole, tail):
    """The ``j``-th tile of keys of a walk."""
    return gl.where(j < upper, last - 1 - j, gl.where(j < masked, whole - 1 - (j - upper), tail - 1 - (j - masked)))


@_device
def _visit(j, entry, walk):
    """(first key of the ``j``-th tile of a walk, whether it needs a mask); of a list, ``entry`` says both."""
    masked, upper, last, whole, tail = walk
    if entry is not None:
        tile = entry >> 1
        needs = (entry & 1) != 0
    else:
        tile = _key_tile(j, masked, upper, last, whole, tail)
        needs = j < masked
    return tile, needs


@_device
def _list_of(lists, b, h, tile, mask_sizes):
    """(number of a tile of rows' list, where it begins): how many tiles of keys, then each."""
    list_batch, list_head, list_step, _words_step = mask_sizes
    number = b * list_batch + h * list_head + tile
    listed = gl.inline_asm_elementwise(  # else addresses beside it are kept in registers for good
        "mov.b64 $0, $1;", "=l,l", [lists + gl.cast(number, gl.int64) * list_step], dtype=lists.dtype, is_pure=False,
        pack=1,
    )  # fmt: skip
    return number, listed


@_device
def _next_slot(slot, phase, SLOTS: gl.constexpr):
    """The ring's next slot, and the phase that its barriers are waited for in."""
    wraps = slot == SLOTS - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


# --- named barriers: groups take turns at the tensor cores ------------------------------------------------------------


@_device
def _wait_turn(W: gl.constexpr):
    """Wait until it is group W's turn: the group before has queued its products. Numbers below 8 are Triton's."""
    if W == 0:
        gl.inline_asm_elementwise(
            "{ bar.sync 8, 256; mov.u32 $0, 0; }", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    elif W == 1:
        gl.inline_asm_elementwise(
            "{ bar.sync 9, 256; mov.u32 $0, 0; }", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "{ bar.sync 10, 256; mov.u32 $0, 0; }", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@_device
def _give_turn(W: gl.constexpr):
    """Make it group W's turn; this does not wait."""
    if W == 0:
        gl.inline_asm_elementwise(
            "{ bar.arrive 8, 256; mov.u32 $0, 0; }", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    elif W == 1:
        gl.inline_asm_elementwise(
            "{ bar.arrive 9, 256; mov.u32 $0, 0; }", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "{ bar.arrive 10, 256; mov.u32 $0, 0; }", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


# --- loading ----------------------------------------------------------------------------------------------------------


@_device
def _load_keys(desc, ring, full, empty, slot, phase, b, kv, tile, SLOTS: gl.constexpr):
    """Queue the load of one tile of K or V into the ring's next slot, once all groups have left it."""
    KEYS: gl.constexpr = desc.block_type.shape[2]
    mbarrier.wait(empty.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    load_tile(desc, [b, kv, tile * KEYS, 0], full.index(slot), ring.index(slot))
    return _next_slot(slot, phase, SLOTS)


@_device
def _load_bias(desc, ring, visits, b, h, row, tile, GROUPS: gl.constexpr, SLOTS: gl.constexpr):
    """Queue the loads of one tile of the bias for each group, into its own ring's slot of this visit."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    KEYS: gl.constexpr = desc.block_type.shape[3]
    slots, full, empty = ring
    for w in gl.static_range(GROUPS):
        place = w * SLOTS + visits % SLOTS
        mbarrier.wait(empty.index(place), (visits // SLOTS & 1) ^ 1)
        mbarrier.expect(full.index(place), desc.block_type.nbytes)
        load_tile(desc, [b, h, row + w * ROWS, tile * KEYS], full.index(place), slots.index(place))


@_device
def _load_rows(
    head, tile, turn, slot, phase, q_slot, q_phase, visits,
    q_desc, k_desc, v_desc, bias_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring, queue_told,
    sizes, pointers, mask_sizes, bias_sizes,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr, BIAS_SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, WINDOWED: gl.constexpr, MASKED: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Queue all that one tile of rows needs; returns the rings' state, and, of a queue, the number of the next tile."""
    H, group, L, S, _row_tiles, _tiles, _section, window = sizes
    lengths, starts, ends, _slopes, _sinks, _order, _words, lists, _bias = pointers
    queue, told = queue_told
    bias_batch, bias_head, _bias_step = bias_sizes
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    b = head // H
    h = head - b * H
    kv = h // group
    row = tile * (ROWS * GROUPS)
    length, offset = _batch_geometry(b, lengths, L, S, BOTTOM_RIGHT)
    count, masked, upper, last, whole, tail = _walk(
        row, length, offset, starts, ends, L, S, window, ROWS * GROUPS, KEYS, CAUSAL, WINDOWED, MASKED
    )
    if lists is not None:
        _number, listed = _list_of(lists, b, h, tile, mask_sizes)
        count = gl.load(listed)
        before = gl.load(listed + 1) >> 1
        if queue is not None:
            begins = _start_of_list(listed, mask_sizes[2])
    else:
        before = _key_tile(0, masked, upper, last, whole, tail)
    slot, phase = _load_keys(k_desc, ring, full, empty, slot, phase, b, kv, before, SLOTS)
    if queue is not None:
        for w in gl.static_range(GROUPS):
            mbarrier.wait(q_empty.index(w * Q_SLOTS + q_slot), q_phase ^ 1)
        _numbers, handed_over = told
        _tell(handed_over, turn, begins)
    for w in gl.static_range(GROUPS):
        place = w * Q_SLOTS + q_slot
        if queue is None:
            mbarrier.wait(q_empty.index(place), q_phase ^ 1)
        mbarrier.expect(q_full.index(place), q_desc.block_type.nbytes)
        load_tile(q_desc, [b, h, row + w * ROWS, 0], q_full.index(place), q_s.index(place))
    q_slot, q_phase = _next_slot(q_slot, q_phase, Q_SLOTS)
    if bias_desc is not None:
        bias_b = b * bias_batch
        bias_h = h * bias_head
        _load_bias(bias_desc, bias_ring, visits, bias_b, bias_h, row, before, GROUPS, BIAS_SLOTS)
        visits += 1
    for j in range(1, count):
        if lists is not None:  # noqa: SIM108  the compiler drops a branch, not an operand
            key_tile = gl.load(listed + 1 + j) >> 1
        else:
            key_tile = _key_tile(j, masked, upper, last, whole, tail)
        if OVERLAP:
            slot, phase = _load_keys(k_desc, ring, full, empty, slot, phase, b, kv, key_tile, SLOTS)
            slot, phase = _load_keys(v_desc, ring, full, empty, slot, phase, b, kv, before, SLOTS)
        else:
            slot, phase = _load_keys(v_desc, ring, full, empty, slot, phase, b, kv, before, SLOTS)
            slot, phase = _load_keys(k_desc, ring, full, empty, slot, phase, b, kv, key_tile, SLOTS)
        if bias_desc is not None:
            _load_bias(bias_desc, bias_ring, visits, bias_b, bias_h, row, key_tile, GROUPS, BIAS_SLOTS)
            visits += 1
        before = key_tile
    coming = 0
    if queue is not None:
        coming = _claim(queue)
        _announce(told, turn, coming)
    slot, phase = _load_keys(v_desc, ring, full, empty, slot, phase, b, kv, before, SLOTS)
    return slot, phase, q_slot, q_phase, visits, coming


@_device
def _producer(
    q_desc, k_desc, v_desc, bias_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring, queue_told, again,
    sizes, pointers, mask_sizes, bias_sizes,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr, BIAS_SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, WINDOWED: gl.constexpr, MASKED: gl.constexpr,
    LONGEST_FIRST: gl.constexpr, BATCH_FIRST: gl.constexpr, OVERLAP: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """One warp: loads what the groups will read, in the order in which they read it."""
    H, _group, _L, _S, row_tiles, tiles, section, _window = sizes
    _lengths, _starts, _ends, _slopes, _sinks, order, _words, _lists, _bias = pointers
    queue, _told = queue_told
    slot = 0
    phase = 0
    q_slot = 0
    q_phase = 0
    visits = 0
    coming = _tile_number(0, order)
    if queue is not None:
        turn = 0
        while coming < tiles:
            head, tile = _place_of_tile(coming, H, row_tiles, tiles, section, LONGEST_FIRST, BATCH_FIRST)
            slot, phase, q_slot, q_phase, visits, coming = _load_rows(
                head, tile, turn, slot, phase, q_slot, q_phase, visits,
                q_desc, k_desc, v_desc, bias_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring, queue_told,
                sizes, pointers, mask_sizes, bias_sizes,
                GROUPS, SLOTS, Q_SLOTS, BIAS_SLOTS, CAUSAL, BOTTOM_RIGHT, WINDOWED, MASKED, OVERLAP,
            )  # fmt: skip
            turn += 1
    elif FIXED:
        doubts, computed = again
        marks = -1
        for _ in range(2):  # all tiles, then those in doubt
            for turn in range(_tiles_of_block(tiles, order)):
                if _marked(marks, turn):
                    number = _tile_number(turn, order)
                    head, tile = _place_of_tile(number, H, row_tiles, tiles, section, LONGEST_FIRST, BATCH_FIRST)
                    slot, phase, q_slot, q_phase, visits, _coming = _load_rows(
                        head, tile, turn, slot, phase, q_slot, q_phase, visits,
                        q_desc, k_desc, v_desc, bias_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring,
                        queue_told, sizes, pointers, mask_sizes, bias_sizes,
                        GROUPS, SLOTS, Q_SLOTS, BIAS_SLOTS, CAUSAL, BOTTOM_RIGHT, WINDOWED, MASKED, OVERLAP,
                    )  # fmt: skip
            mbarrier.wait(computed.index(0), 0)
            marks = _all_marks(doubts, GROUPS, 1)
    else:
        for turn in range(_tiles_of_block(tiles, order)):
            head, tile = _place_of_tile(coming, H, row_tiles, tiles, section, LONGEST_FIRST, BATCH_FIRST)
            coming = _tile_number(turn + 1, order)  # early: nobody waits for it
            slot, phase, q_slot, q_phase, visits, _coming = _load_rows(
                head, tile, turn, slot, phase, q_slot, q_phase, visits,
                q_desc, k_desc, v_desc, bias_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring, queue_told,
                sizes, pointers, mask_sizes, bias_sizes,
                GROUPS, SLOTS, Q_SLOTS, BIAS_SLOTS, CAUSAL, BOTTOM_RIGHT, WINDOWED, MASKED, OVERLAP,
            )  # fmt: skip


# --- softmax ----------------------------------------------------------------------------------------------------------


@_device
def _scores(s, key, rows, low, high, words, bias, S, offset, slope, scale, cap, masked, BIAS: gl.constexpr,
            CAPPED: gl.constexpr, PRESCALED: gl.constexpr, SLOPED: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """What the online softmax sees: products, capped, biased, -inf where hidden; ``scale`` times them is in log2.

    With a bias they are natural. Only tiles for which ``masked`` holds run the mask's instructions.
    """
    KEYS: gl.constexpr = s.shape[1]
    columns = gl.arange(0, KEYS, gl.SliceLayout(0, s.type.layout))
    if CAPPED:
        s = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [s * cap], dtype=gl.float32, is_pure=True, pack=1
        )
    if BIAS == 0:
        if PRESCALED:
            s = s * scale
    else:
        s = s * scale + _bias(s, bias, key, S, BIAS)
    if SLOPED:
        distance = gl.expand_dims(rows + (offset - key), 1) - gl.expand_dims(columns, 0)
        s = s - slope * gl.abs(distance).to(gl.float32)
    if MASKED:  # noqa: SIM102, for one is known to the compiler, the other on the card
        if masked:
            before = None
            if low is not None:
                before = low - key
            s = _hide_by_words(s, _words_between(before, high - key, s))
    if words is not None:  # noqa: SIM102
        if masked:
            s = _hide_by_words(s, words)
    return s


@_device
def _bias(s, bias, key, S, BIAS: gl.constexpr):
    """What is added to the tile ``s`` of scores from key ``key`` on, natural.

    That is a tile of the group's ring (BIAS 1), of shape (64, KEYS), which was read, a row of the bias (2), (1, KEYS),
    or a column of it (3), (64, 1), which is at hand.
    """
    KEYS: gl.constexpr = s.shape[1]
    LAYOUT: gl.constexpr = s.type.layout
    if BIAS == 1:
        found = _widened(bias)
    elif BIAS == 2:
        first, step = bias
        keys = key + gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [4], [0]))  # each key is one thread's
        values = gl.load(first + keys.to(gl.int64) * step, mask=keys < S, other=0.0)
        found = gl.expand_dims(gl.convert_layout(values, gl.SliceLayout(0, LAYOUT)).to(gl.float32), 0)
    else:
        found = gl.expand_dims(bias, 1)
    return found


@_device
def _await_bias(bias, visits, W: gl.constexpr, BIAS_SLOTS: gl.constexpr):
    """Wait for this visit's tile of the bias; products run meanwhile."""
    _ring, full, _empty = bias
    mbarrier.wait(full.index(_bias_place(visits, W, BIAS_SLOTS)), visits // BIAS_SLOTS & 1)


@_device
def _read_bias(s, bias, visits, W: gl.constexpr, BIAS_SLOTS: gl.constexpr):
    """The tile that was waited for, as a thread holds the scores ``s``; its slot is given back."""
    ring, _full, empty = bias
    place = _bias_place(visits, W, BIAS_SLOTS)
    found = _matrix(ring.index(place)).load(s.type.layout)
    # A barrier of threads orders their reads before each other's writes, not before TMA's: of that a fence is told.
    fence_async_shared()
    thread_barrier()  # all four warps have read it
    mbarrier.arrive(empty.index(place), count=1)
    return found


@_device
def _bias_place(visits, W: gl.constexpr, BIAS_SLOTS: gl.constexpr):
    """The place of a visit's tile in the rings of all groups."""
    slot = visits % BIAS_SLOTS
    if BIAS_SLOTS > 1:  # else each of a thread's addresses is kept in a register from one tile to the next
        slot = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [slot], dtype=gl.int32, is_pure=False, pack=1)
    return W * BIAS_SLOTS + slot


@_device
def _widened(tile):
    """A tile as fp32. Triton takes three instructions for two bf16 in one register; these are two, one for each."""
    if tile.dtype == gl.bfloat16:
        found = gl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }", "=f,=f,r", [tile], dtype=gl.float32, is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        found = tile.to(gl.float32)
    return found


@_device
def _words_of(words, entry, zero):
    """The bits, (4, 8, 4) int32 of rows 0 to 7 and of rows 8 to 15 of each warp, of the tile of keys that ``entry``
    names, of the group's ``words``; None: no mask."""
    found = None
    if words is not None:
        upper, _lower = _halves(zero)
        layout: gl.constexpr = _lanes(upper).type.layout
        without_e: gl.constexpr = gl.SliceLayout(4, layout)
        of_lane: gl.constexpr = gl.SliceLayout(2, without_e)
        warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, of_lane)))
        row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, of_lane)))
        lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, of_lane)))
        places = gl.expand_dims(gl.expand_dims(warp, 1), 2) * 64 + gl.expand_dims(gl.expand_dims(row, 0), 2) * 4
        places = words + gl.cast(entry >> 1, gl.int64) * 256 + (places + gl.expand_dims(gl.expand_dims(lane, 0), 0))
        found = (gl.load(places), gl.load(places + 32))
    return found


@_device
def _halves(s):
    """Rows 0 to 7 and rows 8 to 15 of each warp's 16, each of shape (4, 8, KEYS): the two rows that a thread holds."""
    KEYS: gl.constexpr = s.shape[1]
    return gl.split(s.reshape([4, 2, 8, KEYS]).permute((0, 2, 3, 1)))


@_device
def _lanes(half):
    """(4, 8, KEYS) as (4, 8, KEYS / 8, 4, 2): a thread holds columns 8 i + 2 lane + e."""
    KEYS: gl.constexpr = half.shape[2]
    return half.reshape([4, 8, KEYS // 8, 4, 2])


@_device
def _hide_by_words(s, words):
    """Scores, -inf where the bit of a column is 0."""
    ROWS: gl.constexpr = s.shape[0]
    KEYS: gl.constexpr = s.shape[1]
    upper, lower = _halves(s)
    upper_words, lower_words = words
    upper = _hide_by_word(_lanes(upper), upper_words).reshape([4, 8, KEYS])
    lower = _hide_by_word(_lanes(lower), lower_words).reshape([4, 8, KEYS])
    s_layout: gl.constexpr = s.type.layout
    return gl.convert_layout(gl.join(upper, lower).permute((0, 3, 1, 2)).reshape([ROWS, KEYS]), s_layout)


@_device
def _hide_by_word(parts, words):
    """``parts``, (4, 8, i, 4, 2), -inf where bit 2 i + e of the word of a row and lane is 0."""
    COUNT: gl.constexpr = parts.shape[2]
    layout: gl.constexpr = parts.type.layout
    of_e: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, layout))))
    of_i: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, gl.SliceLayout(4, layout))))
    e = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 2, of_e), 0), 0), 0), 0)
    i = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, COUNT, of_i), 0), 0), 3), 4)
    word = gl.expand_dims(gl.expand_dims(words, 2), 4)
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .pred p; and.b32 t, $2, $3; setp.ne.s32 p, t, 0; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [parts, word, 1 << (2 * i + e)], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@_device
def _words_between(low, high, zero):
    """The same bits of the columns from ``low`` of the row, unless that is None, to below ``high``."""
    upper, lower = _words_below(high, zero)
    if low is not None:
        upper_before, lower_before = _words_below(low, zero)
        upper = upper & ~upper_before
        lower = lower & ~lower_before
    return upper, lower


@_device
def _words_below(limit, zero):
    """Bits of the columns below ``limit``, a number for each of 64 rows."""
    upper, lower = gl.split(limit.reshape([4, 2, 8]).permute((0, 2, 1)))
    return _word_below(upper, zero), _word_below(lower, zero)


@_device
def _word_below(limit, zero):
    """(4, 8, 4) words of (4, 8) limits: bit 2 i + e is set where 8 i + 2 lane + e is below the limit."""
    parts, _ = _halves(zero)
    layout: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, _lanes(parts).type.layout))
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    limit = gl.expand_dims(gl.convert_layout(limit, gl.SliceLayout(2, layout)), 2)
    limit = limit - 2 * gl.expand_dims(gl.expand_dims(lane, 0), 0)
    count = (limit >> 3) * 2 + gl.minimum(limit & 7, 2)
    return gl.inline_asm_elementwise(  # a shift by 32 leaves nothing, which no operator promises
        "{ .reg .b32 t; mov.b32 t, -1; shr.u32 $0, t, $1; }", "=r,r", [32 - gl.minimum(gl.maximum(count, 0), 32)],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@_device
def _softmax(
    s, top, total, scale, GUARDED: gl.constexpr, NATURAL: gl.constexpr, LAZY_SUM: gl.constexpr, FIXED: gl.constexpr
):  # fmt: skip
    """(P, maximum, sum, what earlier sums shrink by) after one more tile of scores; ``scale`` times them is in log2.

    With FIXED the maximum stays ``top``, which is no infinity, and nothing shrinks.

    With NATURAL neither scores nor maximum are. What weights are relative to is then the maximum in log2 as rounded,
    the same for all of a row. Where rounding would make weights too large for fp16, scores are 16 apart or more, and
    the unit is 2, whose products are exact, or a half near the end of numbers.
    With LAZY_SUM each of the four lanes that hold a row sums what it holds; they are added up after the last tile.
    """
    if FIXED:
        peak = top
        base = top
    elif NATURAL:
        peak = gl.maximum(top, gl.max(s, 1))
        base = gl.where(peak == float("-inf"), 0.0, peak)
    else:
        peak = gl.maximum(top, gl.max(s, 1) * scale)
        base = peak
        if GUARDED:  # -inf less -inf is no number
            base = gl.where(peak == float("-inf"), 0.0, peak)
    if NATURAL:
        exact = gl.where(gl.abs(base) < 1e38, 2.0, 0.5)
        unit = gl.where(gl.abs(base) < 1.8e8, 1.4426950408889634, exact)
        rounded = _rounded(base * unit)
        p = gl.exp2(gl.fma(s, gl.expand_dims(unit, 1), -gl.expand_dims(rounded, 1)))
    else:
        p = gl.exp2(s * scale - gl.expand_dims(base, 1))
    shrink = 1.0
    if not FIXED:
        if NATURAL:  # noqa: SIM108
            shrink = gl.exp2(_rounded(top * unit) - rounded)
        else:
            shrink = gl.exp2(top - base)
    if LAZY_SUM:
        parts = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
        more = gl.sum(gl.sum(parts, 3), 1)
        if FIXED:
            total = total + more
        else:
            total = total * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, more.type.layout)), 1) + more
    elif FIXED:
        total = total + gl.sum(p, 1)
    else:
        total = total * shrink + gl.sum(p, 1)
    return p, peak, total, shrink


@_device
def _rounded(product):
    """A product as a number, which the compiler cannot take into a sum unrounded."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [product], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@_device
def _one_more_tile(
    key, masked, words, bias, visits, S, q, ring, full, empty, slot, phase, acc, p, top, total, zero,
    rows, low, high, offset, slope, scale, unit, cap,
    SLOTS: gl.constexpr, GROUPS: gl.constexpr, W: gl.constexpr, PINGPONG: gl.constexpr, OVERLAP: gl.constexpr,
    LAZY_SUM: gl.constexpr, BIAS: gl.constexpr, BIAS_SLOTS: gl.constexpr, GUARDED: gl.constexpr,
    CAPPED: gl.constexpr, PRESCALED: gl.constexpr, SLOPED: gl.constexpr, MASKED: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Scores of the tile from ``key`` on, and P V of the tile before it beside them (OVERLAP) or ahead of them."""
    o_layout: gl.constexpr = acc.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    if OVERLAP:
        v_slot, v_phase = _next_slot(slot, phase, SLOTS)
        next_slot, next_phase = _next_slot(v_slot, v_phase, SLOTS)
        mbarrier.wait(full.index(slot), phase)
        if PINGPONG:
            _wait_turn(W)
        products = multiply(q, _matrix(ring.index(slot)).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(full.index(v_slot), v_phase)
        sums = multiply(p, _matrix(ring.index(v_slot)), acc, is_async=True)
        if PINGPONG:
            _give_turn((W + 1) % GROUPS)
        if BIAS == 1:
            _await_bias(bias, visits, W, BIAS_SLOTS)
        s = multiplied(1, deps=(products,))
        added = bias
        if BIAS == 1:
            added = _read_bias(s, bias, visits, W, BIAS_SLOTS)
        mbarrier.arrive(empty.index(slot), count=1)
        s = _scores(
            s, key, rows, low, high, words, added, S, offset, slope, scale, cap, masked,
            BIAS, CAPPED, PRESCALED, SLOPED, MASKED,
        )  # fmt: skip
        p32, top, total, shrink = _softmax(s, top, total, unit, GUARDED, BIAS != 0, LAZY_SUM, FIXED)
        acc = multiplied(0, deps=(sums,))
        mbarrier.arrive(empty.index(v_slot), count=1)
    else:
        v_slot = slot
        k_slot, k_phase = _next_slot(slot, phase, SLOTS)
        next_slot, next_phase = _next_slot(k_slot, k_phase, SLOTS)
        mbarrier.wait(full.index(slot), phase)
        sums = multiply(p, _matrix(ring.index(slot)), acc, is_async=True)
        mbarrier.wait(full.index(k_slot), k_phase)
        products = multiply(q, _matrix(ring.index(k_slot)).permute((1, 0)), zero, use_acc=False, is_async=True)
        if BIAS == 1:
            _await_bias(bias, visits, W, BIAS_SLOTS)
        acc, s = multiplied(0, deps=(sums, products))
        added = bias
        if BIAS == 1:
            added = _read_bias(s, bias, visits, W, BIAS_SLOTS)
        mbarrier.arrive(empty.index(slot), count=1)
        mbarrier.arrive(empty.index(k_slot), count=1)
        if PINGPONG:
            _wait_turn(W)
        s = _scores(
            s, key, rows, low, high, words, added, S, offset, slope, scale, cap, masked,
            BIAS, CAPPED, PRESCALED, SLOPED, MASKED,
        )  # fmt: skip
        p32, top, total, shrink = _softmax(s, top, total, unit, GUARDED, BIAS != 0, LAZY_SUM, FIXED)
        if PINGPONG:
            _give_turn((W + 1) % GROUPS)
    if not FIXED:
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, o_layout)), 1)
    p = gl.convert_layout(p32.to(q.dtype), p_layout)
    return next_slot, next_phase, acc, p, top, total


@_device
def _in_doubt(acc, top, total, S, HALF: gl.constexpr):
    """Rows whose sums left the range in which they say what softmax is: 1, else 0; before a sink is added.

    ``acc`` may overflow where sums do not; fp16's weights have no less than 2^-24, so a sum should not be small, least
    of all where 0 was put in for a maximum: it may be of many weights, none of them near 1.
    """
    least = 1e-18
    if HALF:
        least = gl.where(top == 0.0, gl.maximum(0.5, S / 8192), 0.5)
    zero = gl.convert_layout(gl.sum(acc * 0.0, 1), total.type.layout)
    return gl.where((total >= least) & (total <= 1e18) & (zero == 0.0), 0, 1)  # 1 of a NaN


@_device
def _log2(x):
    """Of a positive number, not denormal. Below 2 the hardware errs by 2^-22, above by as much of the result."""
    bits = x.to(gl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(gl.float32, bitcast=True)
    found = ((bits >> 23) - 127).to(gl.float32) + gl.log2(mantissa)
    return gl.where(x < float("inf"), found, x)  # what is infinite or none stays so


@_device
def _mark(doubts, W: gl.constexpr, turn, doubt):
    """Each row of group W keeps in a word of its own whether it was in doubt in this turn; turns share 32 bits.

    Where two turns share one, both tiles are computed again, which is right. Rows meet after all tiles: a reduction
    over warps in the loop over tiles keeps a register of its own for good.
    """
    own = doubts.index(W)
    own.store(own.load(doubt.type.layout) | (doubt << (turn & 31)))


@_device
def _all_marks(doubts, GROUPS: gl.constexpr, WARPS: gl.constexpr):
    """The words of all rows of all groups as one, once all have computed their tiles; for a partition of WARPS."""
    in_each_warp: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0]))
    marks = doubts.index(0).load(in_each_warp)
    for w in gl.static_range(1, GROUPS):
        marks = marks | doubts.index(w).load(in_each_warp)
    return gl.reduce(marks, 0, _or)


@_device
def _or(a, b):
    return a | b


@_device
def _marked(marks, turn):
    """Whether some group marked the tile of this turn."""
    return (marks >> (turn & 31) & 1) != 0


@_device
def _written():
    """Wait until outputs are written: what this thread stores afterwards comes later. ``stored`` waits for reads."""
    gl.inline_asm_elementwise(
        "{ cp.async.bulk.wait_group 0; mov.u32 $0, 0; }", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@_device
def _matrix(tile):
    """A tile of one head, of shape (1, 1, rows, columns), as (rows, columns)."""
    return tile.reshape((tile.shape[2], tile.shape[3]))


@_device
def _attend(
    head, tile, turn, slot, phase, q_slot, q_phase, visits, zero,
    o_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring, queue_told, doubts, lse,
    sizes, pointers, mask_sizes, bias_sizes, scale, cap, W: gl.constexpr,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr, BIAS: gl.constexpr, BIAS_SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, WINDOWED: gl.constexpr, MASKED: gl.constexpr,
    GUARDED: gl.constexpr, CAPPED: gl.constexpr, PRESCALED: gl.constexpr, PINGPONG: gl.constexpr,
    OVERLAP: gl.constexpr, LAZY_SUM: gl.constexpr, FIXED: gl.constexpr, BLOCK_DV: gl.constexpr,
):  # fmt: skip
    """A group's 64 rows of one tile; returns the rings' state, and, of a queue, the number of the block's next tile.

    With FIXED, marks the turn in ``doubts`` where the tile must be computed again without.
    """
    H, _group, L, S, _row_tiles, _tiles, _section, window = sizes
    lengths, starts, ends, slopes, sinks, _order, words, lists, bias_pointer = pointers
    queue, told = queue_told
    bias_batch, bias_head, bias_step = bias_sizes
    ROWS: gl.constexpr = zero.shape[0]
    KEYS: gl.constexpr = zero.shape[1]
    SLOPED: gl.constexpr = slopes is not None
    s_layout: gl.constexpr = zero.type.layout
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_DV, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    b = head // H
    h = head - b * H
    first_row = tile * (ROWS * GROUPS)
    length, offset = _batch_geometry(b, lengths, L, S, BOTTOM_RIGHT)
    count, masked, upper, last, whole, tail = _walk(
        first_row, length, offset, starts, ends, L, S, window, ROWS * GROUPS, KEYS, CAUSAL, WINDOWED, MASKED
    )
    walk = (masked, upper, last, whole, tail)
    rows = first_row + W * ROWS + gl.arange(0, ROWS, row_layout)
    low = None
    high = None
    if MASKED:
        if BIAS:  # else comparisons are kept in registers from one tile to the next, and those are short
            length = gl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [length], dtype=gl.int32, is_pure=False, pack=1
            )
        lower, high = _interval(gl.minimum(rows, L - 1), length, offset, starts, ends, window, CAUSAL, WINDOWED)
        if WINDOWED or starts is not None:
            low = lower
    unit = scale
    if PRESCALED:
        unit = 1.0
    slope = 0.0
    if SLOPED:
        slope = gl.load(slopes + h) * (1.0 if BIAS else 1.4426950408889634)
    entry = None
    bits = None
    if lists is not None:
        number, listed = _list_of(lists, b, h, tile, mask_sizes)
        if queue is None:
            count = gl.load(listed)
            entry = gl.load(listed + 1)
            after = gl.load(listed + gl.minimum(count, 2))
        bits = words + gl.cast(number * GROUPS + W, gl.int64) * mask_sizes[3]
    bias = bias_ring
    if BIAS > 1:
        bias = bias_pointer + gl.cast(b, gl.int64) * bias_batch + gl.cast(h, gl.int64) * bias_head
        if BIAS == 2:
            bias = (bias, bias_step)
        else:
            bias = gl.load(bias + gl.minimum(rows, L - 1).to(gl.int64) * bias_step).to(gl.float32)
    place = W * Q_SLOTS + q_slot
    q = _matrix(q_s.index(place))

    mbarrier.wait(full.index(slot), phase)
    mbarrier.wait(q_full.index(place), q_phase)
    if queue is not None:
        _numbers, handed_over = told
        count = _heard(handed_over, turn, 0)
        entry = _heard(handed_over, turn, 1)
        after = _heard(handed_over, turn, 2)
    products = multiply(q, _matrix(ring.index(slot)).permute((1, 0)), zero, use_acc=False, is_async=True)
    if BIAS == 1:
        _await_bias(bias, visits, W, BIAS_SLOTS)
    s = multiplied(0, deps=(products,))
    added = bias
    if BIAS == 1:
        added = _read_bias(s, bias, visits, W, BIAS_SLOTS)
        visits += 1
    mbarrier.arrive(empty.index(slot), count=1)
    slot, phase = _next_slot(slot, phase, SLOTS)
    # With two slots the output of the tile before lies in the one that the next tile's Q waits for.
    if Q_SLOTS > 1:  # noqa: SIM102
        if turn > 0:
            stored(0)
            mbarrier.arrive(q_empty.index(W * Q_SLOTS + 1 - q_slot), count=1)
    key_tile, needs = _visit(0, entry, walk)
    s = _scores(
        s, key_tile * KEYS, rows, low, high, _words_of(bits, entry, zero), added, S,
        offset, slope, scale, cap, needs, BIAS, CAPPED, PRESCALED, SLOPED, MASKED,
    )  # fmt: skip
    top = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    p32, top, total, _ = _softmax(s, top, 0.0, unit, GUARDED, BIAS != 0, LAZY_SUM, False)
    if FIXED:
        several = count > 1
        top = gl.where((top == float("-inf")) & several, 0.0, top)  # a row without a key in the first tile
    p = gl.convert_layout(p32.to(q.dtype), p_layout)
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, o_layout)
    for j in range(1, count):
        if lists is not None:  # a tile ahead: products are not queued before its entry is known
            entry = after
            after = gl.load(listed + gl.minimum(j + 2, count))
        key_tile, needs = _visit(j, entry, walk)
        slot, phase, acc, p, top, total = _one_more_tile(
            key_tile * KEYS, needs, _words_of(bits, entry, zero), bias, visits, S,
            q, ring, full, empty, slot, phase, acc, p, top, total, zero,
            rows, low, high, offset, slope, scale, unit, cap,
            SLOTS, GROUPS, W, PINGPONG, OVERLAP, LAZY_SUM, BIAS, BIAS_SLOTS, GUARDED,
            CAPPED, PRESCALED, SLOPED, MASKED, FIXED,
        )  # fmt: skip
        if BIAS == 1:
            visits += 1

    mbarrier.wait(full.index(slot), phase)
    coming = 0
    if queue is not None:
        numbers, _lists = told
        coming = _heard(numbers, turn, 0)
    sums = multiply(p, _matrix(ring.index(slot)), acc, is_async=True)
    acc = multiplied(0, deps=(sums,))
    mbarrier.arrive(empty.index(slot), count=1)
    slot, phase = _next_slot(slot, phase, SLOTS)

    weight = 1.0
    if LAZY_SUM:
        total = gl.convert_layout(gl.sum(total, 1), row_layout)
    if FIXED:
        doubt = _in_doubt(acc, top, total, S, q.dtype == gl.float16)
        _mark(doubts, W, turn, gl.where((rows < L) & several, doubt, 0))
    peak = top
    if sinks is not None:  # one more score, without a value
        sink = gl.load(sinks + h) * (1.0 if BIAS else 1.4426950408889634)
        peak = gl.maximum(top, sink)
        base = gl.where(peak == float("-inf"), 0.0, peak)
        weight = gl.exp2((top - base) * (1.4426950408889634 if BIAS else 1.0))
        total = total * weight + gl.exp2((sink - base) * (1.4426950408889634 if BIAS else 1.0))
    seen = total != 0.0  # a NaN stays one
    safe = gl.where(seen, total, 1.0)
    inverse = gl.where(seen, weight / safe, 0.0)
    if FIXED:  # noqa: SIM108  where sums may be large
        exponent = _log2(safe)
    else:
        exponent = gl.log2(safe)
    if BIAS:  # noqa: SIM108
        natural = peak + exponent * 0.6931471805599453
    else:
        natural = (peak + exponent) * 0.6931471805599453
    natural = gl.where(seen, natural, float("-inf"))
    inverse = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, o_layout)), 1)
    if GUARDED:  # noqa: SIM108
        acc = gl.where(inverse != 0.0, acc * inverse, 0.0)  # what no row sees may be NaN
    else:
        acc = acc * inverse
    thread_barrier()  # all four warps have read Q: the output takes its place
    q.store(acc.to(q.dtype))
    fence_async_shared()
    store_tile(o_desc, [b, h, first_row + W * ROWS, 0], q_s.index(place))
    gl.store(lse + gl.cast(head, gl.int64) * L + rows, natural, mask=rows < L)
    if Q_SLOTS == 1:
        stored(0)
        mbarrier.arrive(q_empty.index(place), count=1)
    q_slot, q_phase = _next_slot(q_slot, q_phase, Q_SLOTS)
    return slot, phase, q_slot, q_phase, visits, coming


@_device
def _consumer(
    o_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring, queue_told, again, lse,
    sizes, pointers, mask_sizes, bias_sizes, scale, cap, W: gl.constexpr,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr, BIAS: gl.constexpr, BIAS_SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, WINDOWED: gl.constexpr, MASKED: gl.constexpr,
    GUARDED: gl.constexpr, CAPPED: gl.constexpr, PRESCALED: gl.constexpr, LONGEST_FIRST: gl.constexpr,
    BATCH_FIRST: gl.constexpr, PINGPONG: gl.constexpr, OVERLAP: gl.constexpr, LAZY_SUM: gl.constexpr,
    FIXED: gl.constexpr, KEYS: gl.constexpr, BLOCK_DV: gl.constexpr,
):  # fmt: skip
    """One group of 128 threads: 64 rows of each tile."""
    H, _group, _L, _S, row_tiles, tiles, section, _window = sizes
    _lengths, _starts, _ends, _slopes, _sinks, order, _words, _lists, _bias = pointers
    queue, _told = queue_told
    doubts, computed = again
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    ROWS: gl.constexpr = q_s.shape[3]
    zero = gl.zeros([ROWS, KEYS], gl.float32, s_layout)
    slot = 0
    phase = 0
    q_slot = 0
    q_phase = 0
    visits = 0
    if PINGPONG and W == GROUPS - 1:
        _give_turn(0)
    if FIXED:
        doubts.index(W).store(gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, s_layout)))
    coming = _tile_number(0, order)
    if queue is not None:
        turn = 0
        while coming < tiles:
            head, tile = _place_of_tile(coming, H, row_tiles, tiles, section, LONGEST_FIRST, BATCH_FIRST)
            slot, phase, q_slot, q_phase, visits, coming = _attend(
                head, tile, turn, slot, phase, q_slot, q_phase, visits, zero,
                o_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring, queue_told, doubts, lse,
                sizes, pointers, mask_sizes, bias_sizes, scale, cap, W,
                GROUPS, SLOTS, Q_SLOTS, BIAS, BIAS_SLOTS, CAUSAL, BOTTOM_RIGHT, WINDOWED, MASKED, GUARDED, CAPPED,
                PRESCALED, PINGPONG, OVERLAP, LAZY_SUM, FIXED, BLOCK_DV,
            )  # fmt: skip
            turn += 1
    else:
        count = _tiles_of_block(tiles, order)
        if FIXED:
            count = gl.maximum(count, 1)
        for turn in range(count):
            head, tile = _place_of_tile(coming, H, row_tiles, tiles, section, LONGEST_FIRST, BATCH_FIRST)
            coming = _tile_number(turn + 1, order)  # early: nobody waits for it
            slot, phase, q_slot, q_phase, visits, _coming = _attend(
                head, tile, turn, slot, phase, q_slot, q_phase, visits, zero,
                o_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring, queue_told, doubts, lse,
                sizes, pointers, mask_sizes, bias_sizes, scale, cap, W,
                GROUPS, SLOTS, Q_SLOTS, BIAS, BIAS_SLOTS, CAUSAL, BOTTOM_RIGHT, WINDOWED, MASKED, GUARDED, CAPPED,
                PRESCALED, PINGPONG, OVERLAP, LAZY_SUM, FIXED, BLOCK_DV,
            )  # fmt: skip
    if FIXED:
        _written()
        thread_barrier()  # all four warps have written the group's marks
        mbarrier.arrive(computed.index(0), count=1)
        mbarrier.wait(computed.index(0), 0)
        marks = _all_marks(doubts, GROUPS, 4)
        for turn in range(gl.where(marks != 0, count, 0)):
            if _marked(marks, turn):
                number = _tile_number(turn, order)
                head, tile = _place_of_tile(number, H, row_tiles, tiles, section, LONGEST_FIRST, BATCH_FIRST)
                slot, phase, q_slot, q_phase, visits, _coming = _attend(
                    head, tile, 1, slot, phase, q_slot, q_phase, visits, zero,
                    o_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring, queue_told, doubts, lse,
                    sizes, pointers, mask_sizes, bias_sizes, scale, cap, W,
                    GROUPS, SLOTS, Q_SLOTS, BIAS, BIAS_SLOTS, CAUSAL, BOTTOM_RIGHT, WINDOWED, MASKED, GUARDED, CAPPED,
                    PRESCALED, PINGPONG, OVERLAP, LAZY_SUM, False, BLOCK_DV,
                )  # fmt: skip
    stored(0)
    if PINGPONG and W == 0:
        _wait_turn(0)


# --- the kernel -------------------------------------------------------------------------------------------------------


@_device
def hopper_attention_forward(
    q_desc, k_desc, v_desc, o_desc, bias_desc, lse,
    lengths, starts, ends, slopes, sinks, order, words, lists, queue, bias,
    H, group, L, S, row_tiles, tiles, section, window, scale, cap,
    list_batch, list_head, list_step, words_step, bias_batch, bias_head, bias_step,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr, BIAS: gl.constexpr, BIAS_SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, WINDOWED: gl.constexpr, MASKED: gl.constexpr,
    GUARDED: gl.constexpr, CAPPED: gl.constexpr, PRESCALED: gl.constexpr, LONGEST_FIRST: gl.constexpr,
    BATCH_FIRST: gl.constexpr, PINGPONG: gl.constexpr, OVERLAP: gl.constexpr, LAZY_SUM: gl.constexpr,
    FIXED: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attention of all tiles; see the module's docstring."""
    dtype: gl.constexpr = q_desc.dtype
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_DV: gl.constexpr = v_desc.block_type.shape[3]
    q_s = gl.allocate_shared_memory(dtype, [GROUPS * Q_SLOTS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    ring = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, KEYS, BLOCK_D], k_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS * Q_SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS * Q_SLOTS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(GROUPS * Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    if bias_desc is not None:
        bias_s = gl.allocate_shared_memory(bias_desc.dtype, [GROUPS * BIAS_SLOTS, 1, 1, ROWS, KEYS], bias_desc.layout)
        bias_full = gl.allocate_shared_memory(gl.int64, [GROUPS * BIAS_SLOTS, 1], mbarrier.MBarrierLayout())
        bias_empty = gl.allocate_shared_memory(gl.int64, [GROUPS * BIAS_SLOTS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(GROUPS * BIAS_SLOTS):
            mbarrier.init(bias_full.index(i), count=1)
            mbarrier.init(bias_empty.index(i), count=1)
        bias_ring = (bias_s, bias_full, bias_empty)
    else:
        bias_ring = (bias_desc, bias_desc, bias_desc)  # None
    if queue is not None:
        words_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        numbers = gl.allocate_shared_memory(gl.int32, [2, 32], words_layout)
        queue_told = (queue, (numbers, gl.allocate_shared_memory(gl.int32, [2, 32], words_layout)))
    else:
        queue_told = (queue, (queue, queue))  # None
    if FIXED:
        marks_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        computed = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(computed.index(0), count=GROUPS)
        again = (gl.allocate_shared_memory(gl.int32, [GROUPS, ROWS], marks_layout), computed)
    else:
        again = (None, None)
    sizes = (H, group, L, S, row_tiles, tiles, section, window)
    pointers = (lengths, starts, ends, slopes, sinks, order, words, lists, bias)
    mask_sizes = (list_batch, list_head, list_step, words_step)
    bias_sizes = (bias_batch, bias_head, bias_step)
    # fmt: off
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consumer, (
                    o_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring, queue_told, again, lse,
                    sizes, pointers, mask_sizes, bias_sizes, scale, cap, gl.constexpr(0),
                    GROUPS, SLOTS, Q_SLOTS, BIAS, BIAS_SLOTS, CAUSAL, BOTTOM_RIGHT, WINDOWED, MASKED, GUARDED, CAPPED,
                    PRESCALED, LONGEST_FIRST, BATCH_FIRST, PINGPONG, OVERLAP, LAZY_SUM, FIXED, KEYS, BLOCK_DV,
                )),
                (_consumer, (
                    o_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring, queue_told, again, lse,
                    sizes, pointers, mask_sizes, bias_sizes, scale, cap, gl.constexpr(1),
                    GROUPS, SLOTS, Q_SLOTS, BIAS, BIAS_SLOTS, CAUSAL, BOTTOM_RIGHT, WINDOWED, MASKED, GUARDED, CAPPED,
                    PRESCALED, LONGEST_FIRST, BATCH_FIRST, PINGPONG, OVERLAP, LAZY_SUM, FIXED, KEYS, BLOCK_DV,
                )),
                (_producer, (
                    q_desc, k_desc, v_desc, bias_desc, q_s, ring, q_full, q_empty, full, empty,
                    bias_ring, queue_told, again, sizes, pointers, mask_sizes, bias_sizes,
                    GROUPS, SLOTS, Q_SLOTS, BIAS_SLOTS, CAUSAL, BOTTOM_RIGHT, WINDOWED, MASKED, LONGEST_FIRST,
                    BATCH_FIRST, OVERLAP, FIXED,
                )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    o_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring, queue_told, again, lse,
                    sizes, pointers, mask_sizes, bias_sizes, scale, cap, gl.constexpr(0),
                    GROUPS, SLOTS, Q_SLOTS, BIAS, BIAS_SLOTS, CAUSAL, BOTTOM_RIGHT, WINDOWED, MASKED, GUARDED, CAPPED,
                    PRESCALED, LONGEST_FIRST, BATCH_FIRST, PINGPONG, OVERLAP, LAZY_SUM, FIXED, KEYS, BLOCK_DV,
                )),
                (_consumer, (
                    o_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring, queue_told, again, lse,
                    sizes, pointers, mask_sizes, bias_sizes, scale, cap, gl.constexpr(1),
                    GROUPS, SLOTS, Q_SLOTS, BIAS, BIAS_SLOTS, CAUSAL, BOTTOM_RIGHT, WINDOWED, MASKED, GUARDED, CAPPED,
                    PRESCALED, LONGEST_FIRST, BATCH_FIRST, PINGPONG, OVERLAP, LAZY_SUM, FIXED, KEYS, BLOCK_DV,
                )),
                (_consumer, (
                    o_desc, q_s, ring, q_full, q_empty, full, empty, bias_ring, queue_told, again, lse,
                    sizes, pointers, mask_sizes, bias_sizes, scale, cap, gl.constexpr(2),
                    GROUPS, SLOTS, Q_SLOTS, BIAS, BIAS_SLOTS, CAUSAL, BOTTOM_RIGHT, WINDOWED, MASKED, GUARDED, CAPPED,
                    PRESCALED, LONGEST_FIRST, BATCH_FIRST, PINGPONG, OVERLAP, LAZY_SUM, FIXED, KEYS, BLOCK_DV,
                )),
                (_producer, (
                    q_desc, k_desc, v_desc, bias_desc, q_s, ring, q_full, q_empty, full, empty,
                    bias_ring, queue_told, again, sizes, pointers, mask_sizes, bias_sizes,
                    GROUPS, SLOTS, Q_SLOTS, BIAS_SLOTS, CAUSAL, BOTTOM_RIGHT, WINDOWED, MASKED, LONGEST_FIRST,
                    BATCH_FIRST, OVERLAP, FIXED,
                )),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    # fmt: on
