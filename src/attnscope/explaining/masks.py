"""Stage 6: what a mask tensor hides, as far as its shape and the ops that made it tell.

Reads the work before an attention call, writes MaskKind. Pure; imports neither torch nor an implementation. A trace
holds no values: a mask is known by the ops that made it in front of the call (``tril``, comparisons of positions, a
fill with ones), or by a shape that cannot be anything else. What fits nothing stays unknown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnscope.explaining.shapes import Problem
from attnscope.explaining.sites import AttentionCall
from attnscope.explaining.trace_facts import TraceFacts
from attnscope.explaining.works import Work
from attnscope.trace.events import Op

MASK_NEAR = 40  # works before a call in which its mask is made
TRIANGLES = ("aten::tril", "aten::triu", "aten::tril_", "aten::triu_")
COMPARISONS = ("aten::lt", "aten::le", "aten::gt", "aten::ge")
ONES = ("aten::ones", "aten::ones_like", "aten::fill_")
# What else makes or turns a mask of the scores' size; without a triangle or a comparison these may be anything.
MAKERS = frozenset((
    *TRIANGLES, *COMPARISONS, "aten::ones", "aten::ones_like", "aten::full", "aten::full_like", "aten::zeros",
    "aten::arange", "aten::logical_not", "aten::bitwise_not", "aten::logical_and", "aten::bitwise_and",
    "aten::logical_or", "aten::bitwise_or", "aten::__and__", "aten::__or__", "aten::where", "aten::masked_fill",
    "aten::masked_fill_", "aten::sub", "aten::abs",
))  # fmt: skip
JOINS = (
    "aten::logical_and", "aten::bitwise_and", "aten::logical_or", "aten::bitwise_or", "aten::__and__", "aten::__or__",
)  # fmt: skip
ALL_TRUE, CAUSAL, PADDING, WINDOW, UNKNOWN = "all-True", "causal", "padding", "window", "unknown"


@dataclass(frozen=True)
class MaskKind:
    """What a mask is; ``keys`` is a sliding window's width, where the trace shows it. ``why`` says how one knows."""

    word: str
    why: str
    keys: int | None = None


def kind_of_mask(facts: TraceFacts, calls: list[AttentionCall]) -> MaskKind:
    """The kind that the first call tells whose mask was made in sight; the calls of a site share their mask's shape."""
    problem = calls[0].problem
    sizes = mask_sizes(problem)
    if len(sizes) >= 2 and sizes[-2] == 1 and problem.L != 1:
        return MaskKind(PADDING, "it is the same for every query, so it hides padding")
    found = (_kind_by_makers([w for w in facts.before(call, MASK_NEAR) if w.attributed], problem) for call in calls)
    return next((kind for kind in found if kind), MaskKind(UNKNOWN, "the trace does not show what it hides"))


def mask_sizes(problem: Problem) -> list[int]:
    """The sizes of the mask tensor; empty without one."""
    text = (problem.mask or "").partition(":")[2]
    return [int(one) for one in text.split("x") if one.isdigit()]


def made_masks(near: list[Work], problem: Problem) -> list[Work]:
    """The works before a call that make a mask of the scores' size: only where a triangle or a comparison is one."""
    works = [work for work in near if not work.replayed and work.inside_any(MAKERS)]
    makes = [work for work in works if _mask_shape(work, problem)]
    return makes if any(_decides(work, problem) for work in makes) else []


def _decides(work: Work, problem: Problem) -> bool:
    """Whether it is a triangle or a comparison of positions: nothing else in front of attention looks like that."""
    return work.role == "mask building" or work.inside(*TRIANGLES) or any(_positional(op, problem) for op in work.ops)


def _mask_shape(work: Work, problem: Problem) -> bool:
    """Whether it works on (…, L, S) with fewer elements than the scores; True where nothing is known."""
    shapes = [shape for op in work.ops[:2] for shape in op.shapes or [] if shape and _plain(shape)]
    if not shapes or not problem.shaped:
        return work.role == "mask building" or work.inside(*TRIANGLES)
    L, S, heads = problem.L or 0, problem.S or 0, (problem.B or 1) * (problem.H or 1)
    if any(_positional(op, problem) for op in work.ops[:2]):
        return True
    whole = next((shape for shape in shapes if shape[-2:] == [L, S]), None)
    if whole is None:
        return False
    return math.prod(whole[:-2]) < heads or work.inside(*TRIANGLES)


def _kind_by_makers(near: list[Work], problem: Problem) -> MaskKind | None:
    made = made_masks(near, problem)
    lengths = any(_compares_lengths(op, problem) for work in near for op in work.ops[:2])
    if made and lengths:
        return MaskKind(PADDING, "positions and lengths made it just before, so it hides padding and more")
    triangles = _distinct(made, TRIANGLES)
    compared = _distinct(made, COMPARISONS)
    boundaries = len(triangles) + len(compared)
    if made and _combined(made, boundaries, problem):
        return MaskKind(UNKNOWN, "a triangle or a comparison of positions is in it, combined with something else")
    if boundaries >= 2 or (compared and _distinct(made, ("aten::abs",))):
        keys = _width(triangles)
        names = ", ".join(dict.fromkeys(op.name.removeprefix("aten::") for op in (*triangles, *compared)))
        size = f" of {keys} keys" if keys else ""
        return MaskKind(WINDOW, f"{names} made two boundaries just before, so it is a sliding window{size}", keys)
    if triangles:
        name, diagonal = triangles[0].name.removeprefix("aten::").rstrip("_"), _diagonal(triangles[0])
        if diagonal in (None, 0 if name == "tril" else 1):
            return MaskKind(CAUSAL, f"{name} made it just before, so it is causal")
        return MaskKind(UNKNOWN, f"{name} with diagonal {diagonal} made it just before")
    if compared:
        return MaskKind(CAUSAL, "a comparison of positions made it just before, so it is causal")
    if lengths:
        return MaskKind(PADDING, "a comparison with lengths made it just before, so it hides padding")
    return _all_true(near, problem)


def _combined(made: list[Work], boundaries: int, problem: Problem) -> bool:
    """Whether more went into a mask than its boundaries: another operand, or what differs between batch entries."""
    joins = sum(work.inside(*JOINS) for work in made)
    within = [op for work in made for op in work.ops[:2] if not work.inside(*TRIANGLES, *ONES, "aten::full")]
    several = any(
        shape[-2:] == [problem.L, problem.S] and math.prod(shape[:-2]) > 1
        for op in within
        for shape in op.shapes or []
        if _plain(shape)
    )
    return several or joins > max(boundaries - 1, 0)


def _all_true(near: list[Work], problem: Problem) -> MaskKind | None:
    """A bool mask that is filled with ones and touched by nothing else."""
    if not (problem.mask or "").startswith("bool") or problem.L is None or problem.S is None:
        return None
    whole = [w for w in near if any(s[-2:] == [problem.L, problem.S] for op in w.ops[:2] for s in op.shapes or [] if s)]
    if whole and all(work.inside("aten::ones", "aten::ones_like") for work in whole):
        return MaskKind(ALL_TRUE, "ones made it just before and nothing changed it, so all of it is True")
    return None


def _distinct(works: list[Work], names: tuple[str, ...]) -> list[Op]:
    """The ops of these names around the works, each once."""
    found: dict[int, Op] = {}
    for work in works:
        for op in work.ops:
            if op.name in names:
                found.setdefault(id(op), op)
    return list(found.values())


def _positional(op: Op, problem: Problem) -> bool:
    """A comparison or difference of query places with key places: shapes (L, 1) and (S,) or (1, S), in any order; or a
    comparison on a whole (L, S) of them."""
    if op.name not in (*COMPARISONS, "aten::sub") or problem.L is None or problem.S is None:
        return False
    shapes = [shape for shape in op.shapes or [] if shape and _plain(shape)]
    rows = [shape for shape in shapes if len(shape) >= 2 and shape[-2:] == [problem.L, 1]]
    columns = [shape for shape in shapes if shape[-1] == problem.S and (len(shape) == 1 or shape[-2] == 1)]
    if rows and columns and problem.L > 1:
        return True
    integers = all(kind not in ("c10::BFloat16", "c10::Half", "float", "double") for kind in op.dtypes)
    return bool(shapes) and shapes[0] == [problem.L, problem.S] and integers and op.name in COMPARISONS


def _compares_lengths(op: Op, problem: Problem) -> bool:
    """A comparison of key places with a length for each batch entry."""
    if op.name not in COMPARISONS or problem.S is None:
        return False
    shapes = [shape for shape in op.shapes or [] if shape and _plain(shape)]
    columns = [shape for shape in shapes if shape[-1] == problem.S and (len(shape) == 1 or shape[-2] == 1)]
    lengths = [shape for shape in shapes if shape[-1] == 1 and shape[0] == problem.B and len(shape) >= 2]
    return bool(columns and lengths) and not _positional(op, problem)


def _diagonal(op: Op) -> int | None:
    text = op.values[1] if len(op.values) > 1 else ""
    return int(text) if text.lstrip("-").isdigit() else None


def _width(triangles: list[Op]) -> int | None:
    """Keys of a window made by two triangles: kept between them, or hidden on both sides of them."""
    diagonals = sorted(d for op in triangles if (d := _diagonal(op)) is not None)
    if len(diagonals) != 2 or len(triangles) != 2:
        return None
    names = {op.name.rstrip("_") for op in triangles}
    low, high = diagonals
    if names == {"aten::tril"} or names == {"aten::triu"}:
        return high - low or None  # one triangle taken out of another
    lower = next(d for op in triangles if op.name.rstrip("_") == "aten::tril" and (d := _diagonal(op)) is not None)
    return high - low + 1 if lower == high else max(high - low - 1, 0) or None


def _plain(shape: list[int]) -> bool:
    return all(isinstance(size, int) for size in shape)
