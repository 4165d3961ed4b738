# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Stage 2: the kernels of ``triton_fused``, in plain Triton, which is imported by :func:`load`, never before.

Reads pointers, strides and sizes, writes out, lse and gradients. Must not import another implementation or a later
stage. Functions marked ``_device`` become Triton's when :func:`load` is called; until then they are plain text.

Every geometric mask is one interval of keys per row (of rows per key, seen from a key), so a tile of scores is one of
three: hidden, and skipped; seen whole, and not masked; at a boundary, and masked. Each row of tiles is walked twice:
what is seen whole, then both boundaries. Scores are kept times log2(e), so that an exponential is one exp2. Sums are
float32 and no two programs write the same place, so results do not depend on the order in which programs run.

What a tensor's strides name is (B, H, rows, columns). ``Geometry`` arguments, always in this order: ``lengths`` (B,)
or None, ``starts`` and ``ends`` (L,) of each row's packed sequence or None, L, S, ``window``. ``Scores`` arguments:
``scale``, ``softcap`` or None, ``slopes`` (H,) or None, then pointer and strides of ``bias``, ``mask`` and ``keep``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnscope.implementations.common import jit_module

if TYPE_CHECKING:
    import triton.language as tl

# Numbers whose being 1 or a multiple of 16 shall not make Triton compile anew; strides are not among them.
SIZES = ("L", "S", "window", "B", "H", "GROUP", "B_OUT", "H_OUT")
_DEVICE_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def _device(function: Callable[..., Any]) -> Any:
    """Marks what :func:`load` hands to ``triton.jit``."""
    _DEVICE_FUNCTIONS[function.__name__] = function
    return function


def load() -> Any:
    """This module with its kernels made by ``triton.jit``. Raises what importing triton raises."""
    return jit_module(__name__, _DEVICE_FUNCTIONS, SIZES)


# --- geometry ---------------------------------------------------------------------------------------------------------


@_device
def _batch_geometry(b, lengths, L, S, BOTTOM_RIGHT: tl.constexpr):
    """How many keys are real, and where query 0 stands among them."""
    length = S
    if lengths is not None:
        length = tl.load(lengths + b)
    offset = 0
    if BOTTOM_RIGHT:
        offset = length - L
    return length, offset


@_device
def _keys_of_rows(
    rows, length, offset, starts, ends, L, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr
):  # fmt: skip
    """Each row sees keys low <= j < high (Workload.row_interval). Rows beyond L see what the last one does."""
    rows = tl.minimum(rows, L - 1)
    low = rows * 0
    high = low + length
    if starts is not None:
        low = tl.load(starts + rows)
        high = tl.minimum(high, tl.load(ends + rows))
    if CAUSAL:
        high = tl.minimum(high, rows + offset + 1)
    if WINDOWED:
        low = tl.maximum(low, rows + offset - window + 1)
        high = tl.minimum(high, rows + offset + window)
    return low, high


@_device
def _rows_of_keys(
    keys, length, offset, starts, ends, L, S, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr
):  # fmt: skip
    """Each key is seen by rows low <= i < high: the same intervals, seen from the key. No row sees one that is padding.

    Those of a tile that lie beyond S are padding too: they hold zeros, whose probability may overflow.
    """
    low = keys * 0
    high = low + L
    if starts is not None:
        low = tl.load(starts + tl.minimum(keys, S - 1))
        high = tl.load(ends + tl.minimum(keys, S - 1))
    high = tl.where(keys < length, high, 0)
    if CAUSAL:
        low = tl.maximum(low, keys - offset)
    if WINDOWED:
        low = tl.maximum(low, keys - offset - window + 1)
        high = tl.minimum(high, keys - offset + window)
    return low, high


@_device
def _stretches(low, high, limit, TILE: tl.constexpr):
    """first, whole, tail, last: [first, whole) and [tail, last) need a mask, [whole, tail) does not.

    The two that need it are walked as one, with a gap.

    All but ``last`` are multiples of TILE.
    """
    last = tl.minimum(tl.max(high, 0), limit)
    first = tl.maximum(tl.min(low, 0), 0) // TILE * TILE
    whole = (tl.maximum(tl.max(low, 0), 0) + TILE - 1) // TILE * TILE
    tail = tl.maximum(tl.minimum(tl.min(high, 0), limit), 0) // TILE * TILE
    if whole >= tail:
        whole = first
        tail = first
    return first, whole, tail, last


@_device
def _behind_gap(place, gap_at, gap, MASKED: tl.constexpr):
    """The place in a walk that leaves out ``gap`` at ``gap_at``; only the walk over boundary tiles has a gap."""
    if MASKED:
        place = tl.where(place < gap_at, place, place + gap)
    return place


# --- tiles ------------------------------------------------------------------------------------------------------------


@_device
def _places(base, strides, row, TILE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Pointers to TILE rows from ``row`` on, BLOCK columns. Inside a tile 32 bits do, unless WIDE."""
    r = tl.arange(0, TILE)
    c = tl.arange(0, BLOCK)
    if WIDE:
        r = r.to(tl.int64)
        c = c.to(tl.int64)
    return base + tl.cast(row, tl.int64) * strides[2] + (r[:, None] * strides[2] + c[None, :] * strides[3])


@_device
def _load(
    base, strides, row, limit, TILE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    CHECKED: tl.constexpr,
):  # fmt: skip
    """A tile (TILE, BLOCK): 0 in columns from COLUMNS on and, if CHECKED, in rows from ``limit`` on."""
    places = _places(base, strides, row, TILE, BLOCK, WIDE)
    if CHECKED:
        inside = (row + tl.arange(0, TILE) < limit)[:, None]
        if BLOCK != COLUMNS:
            inside = inside & (tl.arange(0, BLOCK) < COLUMNS)[None, :]
        tile = tl.load(places, mask=inside, other=0.0)
    elif BLOCK != COLUMNS:
        tile = tl.load(places, mask=(tl.arange(0, BLOCK) < COLUMNS)[None, :], other=0.0)
    else:
        tile = tl.load(places)
    return tile


@_device
def _store(
    base, strides, row, limit, tile, TILE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The counterpart of ``_load``, always checked."""
    places = _places(base, strides, row, TILE, BLOCK, WIDE)
    inside = (row + tl.arange(0, TILE) < limit)[:, None] & (tl.arange(0, BLOCK) < COLUMNS)[None, :]
    tl.store(places, tile.to(base.dtype.element_ty), mask=inside)


@_device
def _head(base, strides, b, h):
    """Where head (b, h) begins."""
    return base + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]


@_device
def _elements(base, strides, b, h, rows, keys, L, S, other: tl.constexpr):
    """What a tensor that broadcasts to (B, H, L, S) holds for head (b, h) at ``rows`` x ``keys``; ``other`` outside."""
    places = _head(base, strides, b, h) + (rows.to(tl.int64) * strides[2] + keys.to(tl.int64) * strides[3])
    return tl.load(places, mask=(rows < L) & (keys < S), other=other)


# --- scores -----------------------------------------------------------------------------------------------------------


@_device
def _tanh(x):
    """tanh to a few units in the last place: a series near 0, where 1 - e would cancel."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)  # exp(-2|x|)
    far = (1.0 - e) / (1.0 + e)
    y = x * x
    near = x * (1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@_device
def _scores(
    raw, b, h, rows, keys, low, high, index, offset, L, S,
    scale, softcap, slopes, bias, bias_strides, mask, mask_strides, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores times log2(e), -inf where hidden, and softcap's derivative (1 without softcap).

    ``rows`` and ``keys`` broadcast to the tile; ``index`` is the one of them that must lie in [low, high).
    """
    slope_of_cap = 1.0
    scores = raw * scale
    if softcap is not None:
        squashed = _tanh(scores / softcap)
        scores = squashed * softcap
        slope_of_cap = 1.0 - squashed * squashed
    if bias is not None:
        scores += _elements(bias, bias_strides, b, h, rows, keys, L, S, 0.0).to(tl.float32)
    if slopes is not None:
        scores -= tl.load(slopes + h) * tl.abs(rows + offset - keys).to(tl.float32)
    scores *= 1.4426950408889634  # log2(e)
    if MASKED:
        scores = tl.where((index >= low) & (index < high), scores, -float("inf"))
    if mask is not None:
        scores = tl.where(_elements(mask, mask_strides, b, h, rows, keys, L, S, 0) != 0, scores, -float("inf"))
    return scores, slope_of_cap


@_device
def _kept(tile, keep, keep_strides, b, h, rows, keys, L, S):
    """``tile`` after the given dropout, not made up for: a scaled probability of 1 would round the same way everywhere.

    Sums of it are multiplied by ``keep_scale`` instead.
    """
    if keep is not None:
        tile = tl.where(_elements(keep, keep_strides, b, h, rows, keys, L, S, 0) != 0, tile, 0.0)
    return tile


@_device
def _made_up(sums, keep, keep_scale):
    """What was dropped made up for, after summing."""
    if keep is not None:
        sums = sums * keep_scale
    return sums


@_device
def _log2_lse(lse, rows, inside):
    """lse times log2(e); +inf for rows that see nothing or do not exist, so that their probabilities are 0."""
    value = tl.load(lse + rows, mask=inside, other=float("inf"))
    return tl.where(value == -float("inf"), float("inf"), value * 1.4426950408889634)


# --- forward ----------------------------------------------------------------------------------------------------------


@_device
def _attend(
    acc, top, total, q, k, k_strides, v, v_strides, start, stop, gap_at, gap, b, h, rows, low, high, offset, L, S,
    scale, softcap, slopes, bias, bias_strides, mask, mask_strides, keep, keep_strides, keep_scale,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, KEYS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [start, stop) by tiles: adds to ``acc`` and ``total``, raises ``top``."""
    for place in range(start, stop, KEYS):
        key = _behind_gap(place, gap_at, gap, MASKED)
        keys = key + tl.arange(0, KEYS)[None, :]
        k_tile = _load(k, k_strides, key, S, KEYS, BLOCK_D, D, WIDE, MASKED)
        raw = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        scores, _ = _scores(
            raw, b, h, rows[:, None], keys, low[:, None], high[:, None], keys, offset, L, S,
            scale, softcap, slopes, bias, bias_strides, mask, mask_strides, MASKED,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(weights, 1)
        top = higher
        weights = _kept(weights, keep, keep_strides, b, h, rows[:, None], keys, L, S)
        v_tile = _load(v, v_strides, key, S, KEYS, BLOCK_DV, D_V, WIDE, MASKED)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
    return acc, top, total


@_device
def triton_fused_attention_forward(
    q, q_strides, k, k_strides, v, v_strides, out, out_strides, lse, sinks,
    lengths, starts, ends, L, S, window,
    scale, softcap, slopes, bias, bias_strides, mask, mask_strides, keep, keep_strides, keep_scale, H, GROUP,
    CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, WINDOWED: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of ROWS rows of one head: program (head, tile of rows), rows that see most first."""
    tiles = tl.cdiv(L, ROWS)
    head = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS
    if CAUSAL:
        row = (tiles - 1) * ROWS - row
    b = head // H
    h = head % H
    rows = row + tl.arange(0, ROWS)
    length, offset = _batch_geometry(b, lengths, L, S, BOTTOM_RIGHT)
    low, high = _keys_of_rows(rows, length, offset, starts, ends, L, window, CAUSAL, WINDOWED)
    first, whole, tail, last = _stretches(low, high, length, KEYS)

    k = _head(k, k_strides, b, h // GROUP)
    v = _head(v, v_strides, b, h // GROUP)
    q_tile = _load(_head(q, q_strides, b, h), q_strides, row, L, ROWS, BLOCK_D, D, WIDE, True)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:  # one more score, without a value
        sink = tl.load(sinks + h) * 1.4426950408889634
        top = tl.maximum(top, sink)
        total = tl.where(top > -float("inf"), 1.0, total)
    acc, top, total = _attend(
        acc, top, total, q_tile, k, k_strides, v, v_strides, whole, tail, 0, 0, b, h, rows, low, high, offset, L, S,
        scale, softcap, slopes, bias, bias_strides, mask, mask_strides, keep, keep_strides, keep_scale,
        D, D_V, BLOCK_D, BLOCK_DV, KEYS, WIDE, PRECISION, False,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q_tile, k, k_strides, v, v_strides, first, last - (tail - whole), whole, tail - whole,
        b, h, rows, low, high, offset, L, S,
        scale, softcap, slopes, bias, bias_strides, mask, mask_strides, keep, keep_strides, keep_scale,
        D, D_V, BLOCK_D, BLOCK_DV, KEYS, WIDE, PRECISION, True,
    )  # fmt: skip

    seen = total > 0
    acc = _made_up(acc / tl.where(seen, total, 1.0)[:, None], keep, keep_scale)
    natural = (top + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453  # ln 2
    _store(_head(out, out_strides, b, h), out_strides, row, L, acc, ROWS, BLOCK_DV, D_V, WIDE)
    tl.store(lse + head.to(tl.int64) * L + rows, tl.where(seen, natural, -float("inf")), mask=rows < L)


# --- backward ---------------------------------------------------------------------------------------------------------


@_device
def triton_fused_attention_backward_delta(
    out, out_strides, grad, grad_strides, delta, L, H,
    D_V: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) of ROWS rows of one head."""
    tiles = tl.cdiv(L, ROWS)
    head = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS
    b = head // H
    h = head % H
    out_tile = _load(_head(out, out_strides, b, h), out_strides, row, L, ROWS, BLOCK_DV, D_V, WIDE, True)
    grad_tile = _load(_head(grad, grad_strides, b, h), grad_strides, row, L, ROWS, BLOCK_DV, D_V, WIDE, True)
    rows = row + tl.arange(0, ROWS)
    products = out_tile.to(tl.float32) * grad_tile.to(tl.float32)
    tl.store(delta + head.to(tl.int64) * L + rows, tl.sum(products, 1), mask=rows < L)


@_device
def _add_dq(
    acc, q, grad, lse, delta, k, k_strides, v, v_strides, start, stop, gap_at, gap, b, h, rows, low, high, offset, L, S,
    scale, softcap, slopes, bias, bias_strides, mask, mask_strides, keep, keep_strides, keep_scale,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, KEYS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds dS K of keys [start, stop) to ``acc`` (ROWS, BLOCK_D)."""
    for place in range(start, stop, KEYS):
        key = _behind_gap(place, gap_at, gap, MASKED)
        keys = key + tl.arange(0, KEYS)[None, :]
        k_tile = _load(k, k_strides, key, S, KEYS, BLOCK_D, D, WIDE, MASKED)
        v_tile = _load(v, v_strides, key, S, KEYS, BLOCK_DV, D_V, WIDE, MASKED)
        raw = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        scores, slope_of_cap = _scores(
            raw, b, h, rows[:, None], keys, low[:, None], high[:, None], keys, offset, L, S,
            scale, softcap, slopes, bias, bias_strides, mask, mask_strides, MASKED,
        )  # fmt: skip
        grad_p = tl.dot(grad, tl.trans(v_tile), input_precision=PRECISION)
        grad_p = _made_up(_kept(grad_p, keep, keep_strides, b, h, rows[:, None], keys, L, S), keep, keep_scale)
        grad_s = tl.exp2(scores - lse[:, None]) * (grad_p - delta[:, None]) * slope_of_cap
        acc = tl.dot(grad_s.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    return acc


@_device
def triton_fused_attention_backward_dq(
    q, q_strides, k, k_strides, v, v_strides, grad, grad_strides, lse, delta, dq, dq_strides,
    lengths, starts, ends, L, S, window,
    scale, softcap, slopes, bias, bias_strides, mask, mask_strides, keep, keep_strides, keep_scale, H, GROUP,
    CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, WINDOWED: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of ROWS rows of one head, walking the keys as the forward does."""
    tiles = tl.cdiv(L, ROWS)
    head = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS
    if CAUSAL:
        row = (tiles - 1) * ROWS - row
    b = head // H
    h = head % H
    rows = row + tl.arange(0, ROWS)
    length, offset = _batch_geometry(b, lengths, L, S, BOTTOM_RIGHT)
    low, high = _keys_of_rows(rows, length, offset, starts, ends, L, window, CAUSAL, WINDOWED)
    first, whole, tail, last = _stretches(low, high, length, KEYS)

    k = _head(k, k_strides, b, h // GROUP)
    v = _head(v, v_strides, b, h // GROUP)
    q_tile = _load(_head(q, q_strides, b, h), q_strides, row, L, ROWS, BLOCK_D, D, WIDE, True)
    grad_tile = _load(_head(grad, grad_strides, b, h), grad_strides, row, L, ROWS, BLOCK_DV, D_V, WIDE, True)
    lse_row = _log2_lse(lse + head.to(tl.int64) * L, rows, rows < L)
    delta_row = tl.load(delta + head.to(tl.int64) * L + rows, mask=rows < L, other=0.0)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    acc = _add_dq(
        acc, q_tile, grad_tile, lse_row, delta_row, k, k_strides, v, v_strides, whole, tail, 0, 0,
        b, h, rows, low, high, offset, L, S,
        scale, softcap, slopes, bias, bias_strides, mask, mask_strides, keep, keep_strides, keep_scale,
        D, D_V, BLOCK_D, BLOCK_DV, KEYS, WIDE, PRECISION, False,
    )  # fmt: skip
    acc = _add_dq(
        acc, q_tile, grad_tile, lse_row, delta_row, k, k_strides, v, v_strides, first, last - (tail - whole),
        whole, tail - whole, b, h, rows, low, high, offset, L, S,
        scale, softcap, slopes, bias, bias_strides, mask, mask_strides, keep, keep_strides, keep_scale,
        D, D_V, BLOCK_D, BLOCK_DV, KEYS, WIDE, PRECISION, True,
    )  # fmt: skip
    _store(_head(dq, dq_strides, b, h), dq_strides, row, L, acc * scale, ROWS, BLOCK_D, D, WIDE)


@_device
def _add_dkdv(
    dk, dv, k, v, q, q_strides, grad, grad_strides, lse, delta, start, stop, gap_at, gap, b, h, keys, low, high,
    offset, L, S,
    scale, softcap, slopes, bias, bias_strides, mask, mask_strides, keep, keep_strides, keep_scale,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds dS^T Q and W^T dO of rows [start, stop) of one query head; tiles of scores lie transposed (KEYS, ROWS)."""
    for place in range(start, stop, ROWS):
        row = _behind_gap(place, gap_at, gap, MASKED)
        rows = row + tl.arange(0, ROWS)
        q_tile = _load(q, q_strides, row, L, ROWS, BLOCK_D, D, WIDE, MASKED)
        grad_tile = _load(grad, grad_strides, row, L, ROWS, BLOCK_DV, D_V, WIDE, MASKED)
        lse_row = _log2_lse(lse, rows, rows < L)
        delta_row = tl.load(delta + rows, mask=rows < L, other=0.0)
        raw = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
        scores, slope_of_cap = _scores(
            raw, b, h, rows[None, :], keys[:, None], low[:, None], high[:, None], rows[None, :], offset, L, S,
            scale, softcap, slopes, bias, bias_strides, mask, mask_strides, MASKED,
        )  # fmt: skip
        probabilities = tl.exp2(scores - lse_row[None, :])
        weights = _kept(probabilities, keep, keep_strides, b, h, rows[None, :], keys[:, None], L, S)
        dv = tl.dot(weights.to(grad_tile.dtype), grad_tile, dv, input_precision=PRECISION)
        grad_p = tl.dot(v, tl.trans(grad_tile), input_precision=PRECISION)
        grad_p = _made_up(_kept(grad_p, keep, keep_strides, b, h, rows[None, :], keys[:, None], L, S), keep, keep_scale)
        grad_s = probabilities * (grad_p - delta_row[None, :]) * slope_of_cap
        dk = tl.dot(grad_s.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@_device
def triton_fused_attention_backward_dkdv(
    q, q_strides, k, k_strides, v, v_strides, grad, grad_strides, lse, delta, dk, dk_strides, dv, dv_strides,
    lengths, starts, ends, L, S, window,
    scale, softcap, slopes, bias, bias_strides, mask, mask_strides, keep, keep_strides, keep_scale, H, GROUP,
    CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, WINDOWED: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of KEYS keys of one key/value head, summed over its group of query heads here: no atomics."""
    tiles = tl.cdiv(S, KEYS)
    kv_head = tl.program_id(0) // tiles
    key = tl.program_id(0) % tiles * KEYS
    kv_heads = H // GROUP
    b = kv_head // kv_heads
    kv = kv_head % kv_heads
    keys = key + tl.arange(0, KEYS)
    length, offset = _batch_geometry(b, lengths, L, S, BOTTOM_RIGHT)
    low, high = _rows_of_keys(keys, length, offset, starts, ends, L, S, window, CAUSAL, WINDOWED)
    first, whole, tail, last = _stretches(low, high, L, ROWS)

    k_tile = _load(_head(k, k_strides, b, kv), k_strides, key, S, KEYS, BLOCK_D, D, WIDE, True)
    v_tile = _load(_head(v, v_strides, b, kv), v_strides, key, S, KEYS, BLOCK_DV, D_V, WIDE, True)
    dk_acc = tl.zeros([KEYS, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([KEYS, BLOCK_DV], tl.float32)
    for h in range(kv * GROUP, kv * GROUP + GROUP):
        q_head = _head(q, q_strides, b, h)
        grad_head = _head(grad, grad_strides, b, h)
        row_base = (tl.cast(b, tl.int64) * H + h) * L
        dk_acc, dv_acc = _add_dkdv(
            dk_acc, dv_acc, k_tile, v_tile, q_head, q_strides, grad_head, grad_strides, lse + row_base,
            delta + row_base, whole, tail, 0, 0, b, h, keys, low, high, offset, L, S,
            scale, softcap, slopes, bias, bias_strides, mask, mask_strides, keep, keep_strides, keep_scale,
            D, D_V, BLOCK_D, BLOCK_DV, ROWS, WIDE, PRECISION, False,
        )  # fmt: skip
        dk_acc, dv_acc = _add_dkdv(
            dk_acc, dv_acc, k_tile, v_tile, q_head, q_strides, grad_head, grad_strides, lse + row_base,
            delta + row_base, first, last - (tail - whole), whole, tail - whole, b, h, keys, low, high, offset, L, S,
            scale, softcap, slopes, bias, bias_strides, mask, mask_strides, keep, keep_strides, keep_scale,
            D, D_V, BLOCK_D, BLOCK_DV, ROWS, WIDE, PRECISION, True,
        )  # fmt: skip
    _store(_head(dk, dk_strides, b, kv), dk_strides, key, S, dk_acc * scale, KEYS, BLOCK_D, D, WIDE)
    dv_acc = _made_up(dv_acc, keep, keep_scale)
    _store(_head(dv, dv_strides, b, kv), dv_strides, key, S, dv_acc, KEYS, BLOCK_DV, D_V, WIDE)


@_device
def triton_fused_attention_backward_dbias(
    q, q_strides, k, k_strides, v, v_strides, grad, grad_strides, lse, delta, dbias, dbias_strides,
    lengths, starts, ends, L, S, window,
    scale, softcap, slopes, bias, bias_strides, mask, mask_strides, keep, keep_strides, keep_scale, H, GROUP,
    B, B_OUT, H_OUT, SUM_ROWS: tl.constexpr, SUM_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, WINDOWED: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of dbias, computed anew, summed over the batch entries and heads that share it.

    Where the bias has one row (or column), the tile's sum goes to the place of its tile; the caller adds those up.
    """
    row_tiles = tl.cdiv(L, ROWS)
    key_tiles = tl.cdiv(S, KEYS)
    key_tile = tl.program_id(0) % key_tiles
    row_tile = tl.program_id(0) // key_tiles % row_tiles
    plane = tl.program_id(0) // key_tiles // row_tiles
    b_out = plane // H_OUT
    h_out = plane % H_OUT
    row = row_tile * ROWS
    key = key_tile * KEYS
    rows = row + tl.arange(0, ROWS)
    keys = key + tl.arange(0, KEYS)
    acc = tl.zeros([ROWS, KEYS], tl.float32)
    for b in range(b_out, b_out + B // B_OUT):
        length, offset = _batch_geometry(b, lengths, L, S, BOTTOM_RIGHT)
        low, high = _keys_of_rows(rows, length, offset, starts, ends, L, window, CAUSAL, WINDOWED)
        if (key < tl.max(high, 0)) & (key + KEYS > tl.min(low, 0)):
            for h in range(h_out, h_out + H // H_OUT):
                q_tile = _load(_head(q, q_strides, b, h), q_strides, row, L, ROWS, BLOCK_D, D, WIDE, True)
                k_tile = _load(_head(k, k_strides, b, h // GROUP), k_strides, key, S, KEYS, BLOCK_D, D, WIDE, True)
                raw = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                scores, _ = _scores(
                    raw, b, h, rows[:, None], keys[None, :], low[:, None], high[:, None], keys[None, :], offset, L, S,
                    scale, softcap, slopes, bias, bias_strides, mask, mask_strides, True,
                )  # fmt: skip
                grad_tile = _load(
                    _head(grad, grad_strides, b, h), grad_strides, row, L, ROWS, BLOCK_DV, D_V, WIDE, True
                )
                v_tile = _load(_head(v, v_strides, b, h // GROUP), v_strides, key, S, KEYS, BLOCK_DV, D_V, WIDE, True)
                grad_p = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
                grad_p = _kept(grad_p, keep, keep_strides, b, h, rows[:, None], keys[None, :], L, S)
                grad_p = _made_up(grad_p, keep, keep_scale)
                base = (tl.cast(b, tl.int64) * H + h) * L
                lse_row = _log2_lse(lse + base, rows, rows < L)
                delta_row = tl.load(delta + base + rows, mask=rows < L, other=0.0)
                acc += tl.exp2(scores - lse_row[:, None]) * (grad_p - delta_row[:, None])
    places = _head(dbias, dbias_strides, b_out, h_out)
    if SUM_ROWS and SUM_KEYS:
        tl.store(places + row_tile * dbias_strides[2] + key_tile * dbias_strides[3], tl.sum(tl.sum(acc, 1), 0))
    elif SUM_ROWS:
        places += tl.cast(row_tile, tl.int64) * dbias_strides[2] + keys * dbias_strides[3]
        tl.store(places, tl.sum(acc, 0), mask=keys < S)
    elif SUM_KEYS:
        places += rows.to(tl.int64) * dbias_strides[2] + key_tile * dbias_strides[3]
        tl.store(places, tl.sum(acc, 1), mask=rows < L)
    else:
        places += rows.to(tl.int64)[:, None] * dbias_strides[2] + keys[None, :] * dbias_strides[3]
        inside = (rows < L)[:, None] & (keys < S)[None, :]
        tl.store(places, acc.to(dbias.dtype.element_ty), mask=inside)
