"""Stage 6: which workload a call site is, so that it can be measured; where the trace does not say, why not.

Reads Sites, writes Asked. Pure; imports neither torch nor an implementation. What decides the time and is not in the
trace is never guessed: the site is left out with the reason. What is filled in all the same is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnscope.errors import WorkloadError
from attnscope.explaining.call import short_dtype
from attnscope.explaining.shapes import SIGNATURES, Problem
from attnscope.explaining.sites import FAST_PATH, AttentionCall, Site
from attnscope.explaining.works import Work
from attnscope.trace.events import Op
from attnscope.units import DTYPE_BYTES
from attnscope.workload import Workload

SDPA_OP = re.compile(r"^aten::(scaled_dot_product_attention|_scaled_dot_product_)")
NO_SHAPES = "its shapes are not in the trace (record_shapes=True records them)"
BY_NAME_ONLY = "it is known by kernel names only, so its shapes are not in the trace"
STRANGE_OP = "only PyTorch's SDPA ops and attention that is written out are read as workloads, not {}"
RANDOM_MASK = "the values of its mask are not in the trace: random ones of that shape stand for them"
RANDOM_BIAS = "the values of its additive mask are not in the trace: random ones of that shape stand for them"
NO_CAUSAL = "whether it is causal or drops out is not in the trace: tried without either"
NO_LAYOUT = "its strides are not in the trace: tried with heads before rows, layout bhld"
FOLDED = "batch and heads are folded in the trace: tried with one head a batch entry"
# Between the two products these change neither the problem nor what must be computed.
HARMLESS = frozenset(
    "aten::" + name
    for name in (
        "bmm",
        "baddbmm",
        "mul",
        "mul_",
        "div",
        "div_",
        "_softmax",
        "copy_",
        "clone",
        "fill_",
        "zero_",
        "empty",
    )
)


@dataclass(frozen=True)
class Asked:
    """A site as a workload's spelling with what was filled in, or the reason why it is none."""

    workload: str | None = None
    assumed: tuple[str, ...] = ()
    why_not: str | None = None


def workloads_of(sites: Sequence[Site]) -> list[Asked]:
    """One answer a site, in order. A backward is the workload of the one forward that ran with its sizes."""
    asked = [_forward(site) if site.first.direction == "forward" else None for site in sites]
    return [one or _backward(site, sites, asked) for site, one in zip(sites, asked, strict=True)]


def _forward(site: Site) -> Asked:
    call = site.first
    try:
        return _of_call(call)
    except WorkloadError as error:
        return Asked(why_not=str(error).splitlines()[0])


def _backward(site: Site, sites: Sequence[Site], asked: Sequence[Asked | None]) -> Asked:
    call = site.first
    alike = {
        one
        for other, one in zip(sites, asked, strict=True)
        if one is not None
        and call.problem.folded is not None
        and (other.first.problem.folded, other.first.implementation) == (call.problem.folded, call.implementation)
    }
    if len(alike) == 1:
        return alike.pop()
    if alike:
        return Asked(why_not="several forward problems have its sizes, and which one it belongs to is not in the trace")
    if call.how != "op":
        return Asked(why_not="its forward, which would say what it masks, is not in the trace")
    return _forward(site)


def _of_call(call: AttentionCall) -> Asked:
    problem = call.problem
    why_not = _why_not(call)
    if why_not:
        return Asked(why_not=why_not)
    assumed: list[str] = []
    if call.how == "unfused":
        found = _mask_written_out(call)
        if isinstance(found, str):
            return Asked(why_not=found)
        problem = replace(problem, mask=found.mask, causal=False)
        if problem.H == 1 and (problem.B or 0) > 1:
            assumed.append(FOLDED)
    elif problem.causal is None:
        assumed.append(NO_CAUSAL)
    layout = _layout(call) if call.how == "op" else "bhld"
    if layout is None:
        assumed.append(NO_LAYOUT)
    fields = _mask_fields(problem)
    if isinstance(fields, str):
        return Asked(why_not=fields)
    assumed += [RANDOM_MASK] if "mask" in fields else [RANDOM_BIAS] if "bias" in fields else []
    known: dict[str, Any] = {
        "B": problem.B, "H": problem.H, "H_kv": problem.H_kv or problem.H, "L": problem.L, "S": problem.S,
        "D": problem.D, "D_v": problem.D_v or problem.D, "dtype": problem.dtype, "layout": layout or "bhld",
        "causal": ("bottom_right" if problem.bottom_right else "top_left") if problem.causal else None,
    }  # fmt: skip
    workload = Workload(**known | fields)
    return Asked(str(workload), tuple(assumed))


def _why_not(call: AttentionCall) -> str | None:
    """What the problem itself says against trying it."""
    problem = call.problem
    if not problem.shaped:
        return BY_NAME_ONLY if call.inferred and call.how == "kernel" else NO_SHAPES
    if call.how == "op" and not any(SDPA_OP.match(op.name) for op in _ops(call)):
        return STRANGE_OP.format(call.name)
    if problem.dtype is None or problem.dtype not in DTYPE_BYTES:
        return "its dtype is not in the trace" if problem.dtype is None else f"no workload has dtype {problem.dtype}"
    if problem.dropout:
        return f"dropout={problem.dropout:g} draws random numbers, so that no result can be checked against another"
    if problem.window is not None:
        return "it sees a window of keys, which PyTorch's SDPA has no word for"
    if 0 in (problem.B, problem.L, problem.S):
        return "it is empty"
    return None


def _ops(call: AttentionCall) -> Iterable[Op]:
    if call.op is not None:
        yield call.op
    for work in call.works:
        yield from work.ops


def _layout(call: AttentionCall) -> str | None:
    """How q lies in memory, by the strides of the first op that has the problem's arguments; None where unknown."""
    for op in _ops(call):
        signature = SIGNATURES.get(op.name)
        strides, shapes = op.strides, op.shapes or []
        if signature is None or len(strides) <= signature.q or len(strides[signature.q]) != 4:
            continue
        problem = call.problem
        _, of_head, of_row, _ = strides[signature.q]
        if problem.H == 1 or problem.L == 1 or of_head >= of_row:
            return "bhld"
        packed = of_row == 3 * (problem.H or 0) * (problem.D or 0) and shapes[signature.q] == shapes[signature.q + 1]
        return "qkv" if packed and shapes[signature.q] == shapes[signature.q + 2] else "blhd"
    return None


def _mask_fields(problem: Problem) -> dict[str, str] | str:
    """The workload's fields of a mask; a sentence where it fits none."""
    if problem.mask is None:
        return {}
    kind, _, text = problem.mask.partition(":")
    pattern = _pattern([int(size) for size in text.split("x")], problem)
    if pattern is None:
        return f"its mask {problem.mask} does not broadcast to (B, H, L, S)"
    if kind == "bool":
        return {"mask": pattern}
    if kind in DTYPE_BYTES:
        return {"bias": kind, "bias_shape": pattern}
    return f"its mask is of {kind or 'a dtype that is not in the trace'}"


def _pattern(sizes: list[int], problem: Problem) -> str | None:
    """The broadcast pattern of a mask, such as ``1x1xLxS``."""
    B, H = problem.B or 0, problem.H or 0
    if len(sizes) == 3 and sizes[0] == B * H > 1 and H > 1:
        sizes = [B, H, *sizes[1:]]
    elif len(sizes) == 3 and H == 1 and sizes[0] == B:
        sizes = [B, 1, *sizes[1:]]
    sizes = [1] * (4 - len(sizes)) + sizes
    wanted = (("B", problem.B), ("H", problem.H), ("L", problem.L), ("S", problem.S))
    if len(sizes) != 4 or any(size not in (1, full) for size, (_, full) in zip(sizes, wanted, strict=True)):
        return None
    return "x".join("1" if size == 1 else letter for size, (letter, _) in zip(sizes, wanted, strict=True))


# --- attention that is written out ------------------------------------------------------------------------------------


def _mask_written_out(call: AttentionCall) -> Problem | str:
    """The problem with the mask that its ops between the products apply; a sentence where they do something else."""
    if call.name == FAST_PATH or "compiled" in call.implementation:
        return "what its generated or fused code does to the scores is not in the trace"
    problem, softmax_seen = call.problem, False
    for work in call.works:
        op = _telling_op(work)
        if op is None:
            return "what happens between its products is not in the trace"
        if op.name == "aten::_softmax":
            softmax_seen = True
        if work.role == "dropout" or "dropout" in op.name or "bernoulli" in op.name:
            return "its dropout draws random numbers, so that no result can be checked against another"
        mask = _applied_mask(op)
        if mask is not None:
            if softmax_seen or (problem.mask is not None and problem.mask != mask):
                return "it masks more than once, or behind the softmax"
            problem = replace(problem, mask=mask)
        elif op.name not in HARMLESS:
            return f"it applies {op.name} between its products, which no workload holds"
    return problem


def _telling_op(work: Work) -> Op | None:
    """The op that says what a work did: of a copy or fill inside a mask op, the mask op."""
    masking = next((op for op in work.ops if op.name.startswith(("aten::masked_fill", "aten::where"))), None)
    return masking or work.op


def _applied_mask(op: Op) -> str | None:
    """A mask that an op applies to the scores, as dtype and shape; None where it applies none."""
    shapes, dtypes, values = op.arguments
    shapes = shapes or []

    def at(index: int) -> str:
        kind = dtypes[index] if index < len(dtypes) else ""
        return f"{short_dtype(kind) or kind}:{'x'.join(map(str, shapes[index]))}"

    if op.name.startswith("aten::masked_fill") and len(shapes) > 1 and shapes[1]:
        return at(1)
    if op.name == "aten::where" and shapes and shapes[0]:
        return at(0)
    if op.name in ("aten::add", "aten::add_") and len(shapes) > 1 and shapes[0] and shapes[1]:
        small = min((0, 1), key=lambda index: (len(shapes[index]), _count(shapes[index])))
        return at(1 if shapes[0] == shapes[1] else small)
    if op.name.startswith("aten::baddbmm") and shapes and shapes[0] and (values[3:4] or ["1"])[0] not in ("0", "0."):
        return at(0)
    return None


def _count(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
