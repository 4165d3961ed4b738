"""Stage 3: what kind of wrong a tensor looks like, in words, where that can be told honestly.

Reads a tensor, its truth and its rows' errors over their budgets; writes a sentence. Must not import an implementation
or a later stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnscope.budgets import RowBudget, finite, row_norms
from attnscope.guards import count_poison
from attnscope.inputs import Tensor
from attnscope.units import significant

ROW_AXES = {
    "out": "bhi", "lse": "bhi", "dq": "bhi", "dk": "bhj", "dv": "bhj", "dbias": "bhi", "dsinks": "h",
}  # fmt: skip
AXIS_WORDS = {"b": "b", "h": "h", "i": "row", "j": "key"}


def describe_non_finite(name: str, tensor: Tensor, wrong: Tensor) -> str:
    """``wrong`` marks the elements of ``tensor`` that are not finite though they must be (or the other way round)."""
    count, total = int(wrong.sum()), wrong.numel()
    rows = wrong if name in ("lse", "dsinks") else wrong.any(-1)
    where = place(name, _first(rows))
    unwritten = count_poison(tensor)
    if unwritten:
        # torch's vectorised rounding to bfloat16 on a CPU gives NaN these very bits
        ambiguous = tensor.element_size() == 2 and tensor.device.type == "cpu"
        what = "are NaN, perhaps never written" if ambiguous else "were never written: they still hold the poison"
        return f"{unwritten} of {total} values {what}, first at {where}"
    return f"{count} of {total} values are not finite, first at {where}"


def describe_wrong(name: str, x: Tensor, truth: Tensor, budget: RowBudget, bad: Tensor) -> str:
    """One clause on what is wrong with ``x``; ``bad`` marks the rows over their budget. May be empty."""
    x, truth = finite(x).double(), finite(truth)
    if not bool(x.any()):
        return "all of it is zero"
    scaled = _scaled(name, x, truth, budget)
    if scaled is not None:
        return f"all of it looks scaled by {scaled}"
    return _pattern(name, bad, budget.scale > 0)


def place(name: str, index: tuple[int, ...]) -> str:
    """``b 0, h 3, row 17``."""
    return ", ".join(f"{AXIS_WORDS[axis]} {i}" for axis, i in zip(ROW_AXES[name], index, strict=True))


def index_of(shape: Sequence[int], flat: int) -> tuple[int, ...]:
    """The index of a flat position in a tensor of that shape."""
    found = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        found.append(rest)
    return tuple(reversed(found))


def _first(rows: Tensor) -> tuple[int, ...]:
    return index_of(rows.shape, int(rows.flatten().int().argmax()))


def _scaled(name: str, x: Tensor, truth: Tensor, budget: RowBudget) -> str | None:
    """The factor without which every row is within twice its budget; None where there is none."""
    square = truth.square().sum().item()
    factor = (x * truth).sum().item() / square if square else 1.0
    if abs(factor - 1) < 2e-3 or abs(factor) < 1e-3:
        return None
    explained = row_norms(name, x / factor - truth) <= 2 * budget.allowed
    return significant(factor, 4) if bool(explained.all()) else None


def _pattern(name: str, bad: Tensor, counted: Tensor) -> str:
    """Which rows, heads or batches are wrong, where only some are."""
    count, total = int(bad.sum()), bad.numel()
    if count == 0 or name == "dsinks":
        return ""
    if count == 1:
        return "only that row"
    row_word = "key" if ROW_AXES[name].endswith("j") else "row"
    for axis, word in ((1, "head"), (0, "batch entry")):
        others = tuple(a for a in range(3) if a != axis)
        hit = bad.any(others[1]).any(others[0]).nonzero().flatten().tolist()
        if len(hit) == 1 and bad.shape[axis] > 1:
            return f"only in {word} {hit[0]}, {count} {row_word}s of it"
    rows = bad.any(0).any(0)
    marked = rows.nonzero().flatten()
    first, last = int(marked[0]), int(marked[-1])
    seen = bad[..., first : last + 1].double().sum() / counted[..., first : last + 1].double().sum().clamp_min(1)
    if seen > 0.9 and (first > 0 or last < len(rows) - 1):
        if first == last:
            return f"{row_word} {first} wherever it is"
        return f"{row_word}s {first} to {last}" if last < len(rows) - 1 else f"{row_word}s from {first} on"
    return f"{count} of {total} {row_word}s"
