# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Stage 2: the decode kernels of ``hopper``, in plain Triton, which is imported by :func:`load`, never before.

Reads pointers, strides and sizes, writes out and lse. Must not import another implementation or a later stage.

**Idea.** With few query rows attention is a single read of K and V, so what counts is bytes in flight on every
multiprocessor. The query heads that share a key/value head are packed into the rows of one tile (row = query * GROUP +
head of the group), so K and V are read once for all of them, and the keys of a head are split over ``splits`` programs.
**Grid.** (split, or tile of rows where keys are not split; key/value head; batch). **Memory.** Tiles of KEYS keys go to
shared memory by 16-byte asynchronous copies, several tiles ahead of the products; strides come in units of 8 elements,
which is how Triton knows that they are that wide. **Bound.** Read bandwidth; tensor cores are busy a tenth of the time.

One loop, in which every tile is masked: a second loop for boundary tiles would let the copies run dry between the two.
Where the keys are split, a part is its normalised out and its log2-sum-exp in float32. The last program of a head adds
the head's parts up, in the order of the keys; ``arrived`` counts the programs, and is left at zero. Where that would be
much for one program, a second kernel on the same stream adds them up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnscope.implementations.common import jit_module

if TYPE_CHECKING:
    import triton.language as tl

# Numbers whose being 1 or a multiple of 16 shall not make Triton compile anew, and tensors of a caller that need not
# begin at a multiple of 16 bytes: the others are looked at (decode.is_readable) or made here.
UNSPECIALIZED = (
    "lengths", "slopes", "sinks",
    "L", "S", "window", "splits",
    "q_b", "q_h", "q_l", "k_b", "k_h", "k_s", "v_b", "v_h", "v_s", "out_b", "out_h", "out_l",
)  # fmt: skip
_DEVICE_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def _device(function: Callable[..., Any]) -> Any:
    """Marks what :func:`load` hands to ``triton.jit``."""
    _DEVICE_FUNCTIONS[function.__name__] = function
    return function


def load() -> Any:
    """This module with its kernels made by ``triton.jit``. Raises what importing triton raises."""
    return jit_module(__name__, _DEVICE_FUNCTIONS, UNSPECIALIZED)


@_device
def _seen_by(
    query, b, lengths, L, S, window, CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, WINDOWED: tl.constexpr
):  # fmt: skip
    """Each row sees keys low <= j < high (Workload.row_interval); also where each row stands among the keys."""
    length = S
    if lengths is not None:
        length = tl.load(lengths + b)
    position = query
    if BOTTOM_RIGHT:
        position += length - L
    low = query * 0
    high = low + length
    if CAUSAL:
        high = tl.minimum(high, position + 1)
    if WINDOWED:
        low = tl.maximum(low, position - window + 1)
        high = tl.minimum(high, position + window)
    return low, high, position


@_device
def _share(first, last, split, splits, KEYS: tl.constexpr):
    """start, stop: this split's run of the keys [first, last); runs differ by one tile at most."""
    last = tl.maximum(last, first)
    tiles = tl.cdiv(last - first, KEYS)
    each = tiles // splits
    longer = tiles - each * splits
    start = first + (split * each + tl.minimum(split, longer)) * KEYS
    count = each + (split < longer).to(tl.int32)
    return start, tl.minimum(start + count * KEYS, last)


@_device
def _tanh(x):
    """tanh to a few units in the last place: a series near 0, where 1 - e would cancel."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)  # exp(-2|x|)
    far = (1.0 - e) / (1.0 + e)
    y = x * x
    near = x * (1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@_device
def _key_tile(base, stride, key, stop, KEYS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """(KEYS, BLOCK) from row ``key`` on; 0 in rows from ``stop`` on, whatever lies there, and in columns of padding."""
    rows = tl.arange(0, KEYS)
    columns = tl.arange(0, BLOCK)
    inside = (key + rows < stop)[:, None]
    if BLOCK != COLUMNS:
        inside = inside & (columns < COLUMNS)[None, :]
    places = base + tl.cast(key, tl.int64) * stride * 8 + (rows[:, None] * (stride * 8) + columns[None, :])
    return tl.load(places, mask=inside, other=0.0)


@_device
def _announce(base, stride, start, stop, COUNT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Brings COUNT rows from ``start`` on, those below ``stop``, into the L2 cache, a line of 128 bytes at a time."""
    rows = tl.minimum(start + tl.arange(0, COUNT), stop - 1).to(tl.int64)
    columns = tl.minimum(tl.arange(0, (BLOCK + 63) // 64) * 64, COLUMNS - 1)
    places = base + (rows[:, None] * (stride * 8) + columns[None, :])
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@_device
def _sums(parts, rows, splits, D_V: tl.constexpr):
    """Where the log2-sum-exps begin: behind the sums of all parts."""
    heads = tl.cast(tl.num_programs(2), tl.int64) * tl.num_programs(1)
    return parts + heads * splits * rows * D_V


@_device
def _add_parts(
    parts, out, lse, sinks, first_row, b, kv, L, splits, out_b, out_h, out_l,
    GROUP: tl.constexpr, D_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr, PARTS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """ROWS_AT_ONCE packed rows, from ``first_row`` on, of out and lse from their parts, PARTS_AT_ONCE at a time and in
    the order of the keys, whichever came first."""
    rows = L * GROUP
    row = first_row + tl.arange(0, ROWS_AT_ONCE)
    real = row < rows
    query = row // GROUP
    h = kv * GROUP + row - query * GROUP
    first = (tl.cast(b, tl.int64) * tl.num_programs(1) + kv) * splits * rows
    sums = _sums(parts, rows, splits, D_V) + first
    parts += first * D_V
    dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([ROWS_AT_ONCE, BLOCK_DV], tl.float32)
    top = tl.full([ROWS_AT_ONCE], -float("inf"), tl.float32)
    total = tl.zeros([ROWS_AT_ONCE], tl.float32)
    if sinks is not None:  # one more score, without a value
        top = tl.load(sinks + h, mask=real, other=-float("inf")) * 1.4426950408889634  # log2(e)
        total = (top > -float("inf")).to(tl.float32)
    for at in range(0, splits, PARTS_AT_ONCE):
        split = at + tl.arange(0, PARTS_AT_ONCE)
        there = real[:, None] & (split < splits)[None, :]
        number = split[None, :] * rows + row[:, None]
        sum2 = tl.load(sums + number, mask=there, other=-float("inf"), cache_modifier=".cg")
        part = tl.load(
            parts + (number[:, :, None] * D_V + dv[None, None, :]),
            mask=there[:, :, None] & (dv < D_V)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(sum2, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(sum2 - shift[:, None])
        rescale = tl.exp2(top - shift)
        acc = acc * rescale[:, None] + tl.sum(part * weights[:, :, None], 1)
        total = total * rescale + tl.sum(weights, 1)
        top = higher
    seen = total != 0  # also where it is NaN
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    natural = (top + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453  # ln 2; -inf where no key was seen
    place = (tl.cast(b, tl.int64) * out_b + h.to(tl.int64) * out_h + query.to(tl.int64) * out_l) * 8
    tl.store(out + place[:, None] + dv, acc.to(out.dtype.element_ty), mask=real[:, None] & (dv < D_V)[None, :])
    tl.store(lse + (tl.cast(b, tl.int64) * (tl.num_programs(1) * GROUP) + h) * L + query, natural, mask=real)


@_device
def hopper_attention_decode(
    q, k, v, out, lse, parts, arrived, lengths, slopes, sinks, L, S, window, splits, scale, softcap,
    q_b, q_h, q_l, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_l,
    GROUP: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    WINDOWED: tl.constexpr, SPLIT: tl.constexpr, JOINED: tl.constexpr, AHEAD: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr, PARTS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """ROWS packed rows of one key/value head against one split of its keys: out and lse, or a part of them.

    AHEAD keys are announced to the L2 cache at once: the copies of K and V begin only when the query tile has arrived.
    ``scale`` is that of the scores, times log2(e) where nothing is done to them before the exponential. ``parts`` holds
    (B * H_kv, splits, rows, D_V) normalised sums, then as many log2-sum-exps without D_V; ``arrived`` (B * H_kv) zeros.
    """
    b = tl.program_id(2)
    kv = tl.program_id(1)
    if SPLIT:  # one tile then holds all rows
        split = tl.program_id(0)
        tile = 0
    else:
        split = 0
        tile = tl.num_programs(0) - 1 - tl.program_id(0)  # under a causal mask the longest first
    row = tile * ROWS + tl.arange(0, ROWS)
    query = row // GROUP
    h = kv * GROUP + row % GROUP
    real = query < L
    low, high, position = _seen_by(
        tl.minimum(query, L - 1), b, lengths, L, S, window, CAUSAL, BOTTOM_RIGHT, WINDOWED
    )  # fmt: skip
    # Both ends of what a row sees never fall from row to row, so the first and the last row say what any of them sees.
    first, _, _ = _seen_by(tile * ROWS // GROUP, b, lengths, L, S, window, CAUSAL, BOTTOM_RIGHT, WINDOWED)
    last_query = tl.minimum((tile * ROWS + ROWS - 1) // GROUP, L - 1)
    _, last, _ = _seen_by(last_query, b, lengths, L, S, window, CAUSAL, BOTTOM_RIGHT, WINDOWED)
    start, stop = _share(tl.maximum(first, 0), last, split, splits, KEYS)

    k_head = k + (tl.cast(b, tl.int64) * k_b + tl.cast(kv, tl.int64) * k_h) * 8
    v_head = v + (tl.cast(b, tl.int64) * v_b + tl.cast(kv, tl.int64) * v_h) * 8
    if AHEAD > 0 and start < stop:
        _announce(k_head, k_s, start, stop, AHEAD, D, BLOCK_D)
        _announce(v_head, v_s, start, stop, AHEAD, D_V, BLOCK_DV)
    d = tl.arange(0, BLOCK_D)[None, :]
    q_row = tl.cast(b, tl.int64) * q_b + h.to(tl.int64) * q_h + query.to(tl.int64) * q_l
    q_tile = tl.load(q + q_row[:, None] * 8 + d, mask=real[:, None] & (d < D), other=0.0)
    if slopes is not None:
        slope = tl.load(slopes + h, mask=real, other=0.0)

    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for key in range(start, stop, KEYS):
        k_tile = _key_tile(k_head, k_s, key, stop, KEYS, BLOCK_D, D)
        keys = key + tl.arange(0, KEYS)[None, :]
        scores = tl.dot(q_tile, tl.trans(k_tile)) * scale
        if softcap is not None:
            scores = _tanh(scores / softcap) * softcap
        if slopes is not None:
            scores -= slope[:, None] * tl.abs(position[:, None] - keys).to(tl.float32)
        if softcap is not None or slopes is not None:
            scores *= 1.4426950408889634  # log2(e)
        scores = tl.where((keys >= low[:, None]) & (keys < high[:, None]), scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(weights, 1)
        top = higher
        v_tile = _key_tile(v_head, v_s, key, stop, KEYS, BLOCK_DV, D_V)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * rescale[:, None])

    dv = tl.arange(0, BLOCK_DV)[None, :]
    if SPLIT:
        seen = total != 0  # also where it is NaN
        rows = L * GROUP
        head = tl.cast(b, tl.int64) * tl.num_programs(1) + kv
        first_row = (head * splits + split) * rows
        acc = acc / tl.where(seen, total, 1.0)[:, None]
        sum2 = top + tl.log2(tl.where(seen, total, 1.0))  # -inf where no key was seen
        tl.store(parts + first_row * D_V + (row[:, None] * D_V + dv), acc, mask=real[:, None] & (dv < D_V))
        tl.store(_sums(parts, rows, splits, D_V) + first_row + row, sum2, mask=real)
        if JOINED:
            # Each thread's stores come before the barrier, the barrier before one thread's release; the last program
            # acquires what all released, and its loads (.cg) pass by the first-level cache, which may hold old lines.
            tl.debug_barrier()
            if tl.atomic_add(arrived + head, 1, sem="acq_rel", scope="gpu") == splits - 1:
                for at in range(0, rows, ROWS_AT_ONCE):
                    _add_parts(
                        parts, out, lse, sinks, at, b, kv, L, splits, out_b, out_h, out_l,
                        GROUP, D_V, BLOCK_DV, ROWS_AT_ONCE, PARTS_AT_ONCE,
                    )  # fmt: skip
                tl.store(arrived + head, 0)  # for the next call; kernels of a stream follow one another
    else:
        if sinks is not None:  # one more score, without a value
            sink = tl.load(sinks + h, mask=real, other=-float("inf")) * 1.4426950408889634
            higher = tl.maximum(top, sink)
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            rescale = tl.exp2(top - shift)
            acc = acc * rescale[:, None]
            total = total * rescale + tl.exp2(sink - shift)
            top = higher
        seen = total != 0  # also where it is NaN
        acc = acc / tl.where(seen, total, 1.0)[:, None]
        natural = (top + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453  # ln 2
        out_row = tl.cast(b, tl.int64) * out_b + h.to(tl.int64) * out_h + query.to(tl.int64) * out_l
        tl.store(out + out_row[:, None] * 8 + dv, acc.to(out.dtype.element_ty), mask=real[:, None] & (dv < D_V))
        heads = tl.cast(b, tl.int64) * (tl.num_programs(1) * GROUP) + h
        tl.store(lse + heads * L + query, natural, mask=real)


@_device
def hopper_attention_decode_combine(
    parts, out, lse, sinks, L, splits, out_b, out_h, out_l,
    GROUP: tl.constexpr, D_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr, PARTS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """ROWS_AT_ONCE rows of out and lse from their parts: program (packed rows, key/value head, batch)."""
    _add_parts(
        parts, out, lse, sinks, tl.program_id(0) * ROWS_AT_ONCE, tl.program_id(2), tl.program_id(1), L, splits,
        out_b, out_h, out_l, GROUP, D_V, BLOCK_DV, ROWS_AT_ONCE, PARTS_AT_ONCE,
    )  # fmt: skip
