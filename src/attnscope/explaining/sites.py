"""Stage 6: the attention calls of a trace, and the call sites they make.

Reads Work, writes AttentionCall and Site. Pure; imports neither torch nor an implementation. A call is found in one of
three ways: by an op that is attention; by a kernel whose name says so; by a batched product, a softmax, and a batched
product whose sizes fit each other (without sizes: with nothing but elementwise work between them).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from attnscope.explaining.attention_ops import is_backward, names_attention, own_name
from attnscope.explaining.flex_calls import join_helpers
from attnscope.explaining.roles import FUSED, FUSED_BACKWARD
from attnscope.explaining.shapes import Problem, count, first_shape, problem_of, product_sizes, tensor_dtypes
from attnscope.explaining.works import BATCHED_OPS, MATMUL_OPS, Sequence, Work
from attnscope.trace.events import Op
from attnscope.trace.names import MEMORY

FAST_PATH = "aten::_native_multi_head_attention"
REACH = 60  # works between a product and its softmax
# What stands between attention's products and its softmax. Where sizes tell nothing, anything else there says that the
# softmax is another's: a router's is followed by a top-k, a sampler's by a draw.
BETWEEN = frozenset((
    "scale", "add", "mask", "select", "mask building", "elementwise", "fused elementwise", "comparison", "copy",
    "layout copy", "fill", "dropout", "matmul",
))  # fmt: skip
BETWEEN_REDUCTION = re.compile(r"splitK|ReduceOp<bool|and_kernel")
NEVER_BETWEEN = ("convolution", "communication", "normalisation", "routing", "expert matmul", "sampling", "loss")
WRAPPERS = MATMUL_OPS | {"aten::softmax"}
# A batched product that torch.compile generated: its scope names the operations fused into it, and no aten op.
GENERATED_BMM = re.compile(r"^triton_tem_fused_\w*bmm")


@dataclass(eq=False)
class AttentionCall:
    """One call: what worked in it, and what is known of its problem. ``inferred`` marks names as the only witness."""

    how: str  # op, kernel, unfused
    name: str
    direction: str
    implementation: str
    works: list[Work]
    problem: Problem
    module: str | None = None
    inferred: bool = False
    op: Op | None = None

    @property
    def us(self) -> float:
        """GPU time (on a CPU its time)."""
        return sum(work.us for work in self.works)


@dataclass(eq=False)
class Site:
    """Calls that are alike: same op or module, direction, problem and implementation."""

    calls: list[AttentionCall] = field(default_factory=list)

    @property
    def first(self) -> AttentionCall:
        """One of its calls, for what is the same in all."""
        return self.calls[0]

    @property
    def us(self) -> float:
        """Time of all calls together."""
        return sum(call.us for call in self.calls)

    @property
    def works(self) -> list[Work]:
        """What worked in all calls."""
        return [work for call in self.calls for work in call.works]

    @property
    def kernels_per_call(self) -> float:
        """Kernels and copies of a call; the runtime's fills are left out, since cuBLAS and cuDNN add them."""
        counted = sum(work.event is None or work.event.kind != "memset" for work in self.works)
        return counted / len(self.calls)


def find_sites(sequences: Iterable[Sequence]) -> list[Site]:
    """Every attention call site of the trace, the one that takes longest first. Marks the works it takes."""
    sites: dict[tuple[object, ...], Site] = {}
    for sequence in sequences:
        for call in _calls(sequence):
            for work in call.works:
                work.in_attention = True
            key = (call.name, call.module, call.direction, call.implementation, call.problem, call.inferred)
            sites.setdefault(key, Site()).calls.append(call)
    return sorted(sites.values(), key=lambda site: -site.us)


def _calls(sequence: Sequence) -> list[AttentionCall]:
    by_op: dict[int, list[Work]] = {}
    tops: dict[int, Op] = {}
    memo: dict[int, Op | None] = {}
    rest: Sequence = []
    for work in sequence:
        top = None
        if work.ops and not work.replayed:
            innermost = id(work.ops[0])
            if innermost not in memo:
                memo[innermost] = _attention_op(work)
            top = memo[innermost]
        if top is not None:
            by_op.setdefault(id(top), []).append(work)
            tops[id(top)] = top
        else:
            rest.append(work)
    calls = join_helpers([_call_of_op(tops[key], works) for key, works in by_op.items()], sequence)
    calls += _calls_by_kernel(rest)
    taken = {id(work) for call in calls for work in call.works}
    return calls + _unfused_calls([work for work in rest if id(work) not in taken])


def _attention_op(work: Work) -> Op | None:
    """The outermost op around it that is attention. MultiheadAttention's fast path holds its projections too, and runs
    either an attention op within or products and a softmax, which are found as such."""
    for op in reversed(work.ops):
        if names_attention(op.name) and op.name != FAST_PATH:
            return op
    return None


def _call_of_op(op: Op, works: list[Work]) -> AttentionCall:
    chain = dict.fromkeys(one for work in works for one in work.ops if names_attention(one.name))
    problem = next((p for p in (problem_of(one) for one in (op, *chain)) if p is not None), Problem())
    backward = is_backward(op.name) or any(work.role == FUSED_BACKWARD for work in works)
    return AttentionCall(
        "op", op.name, "backward" if backward else "forward", _implementation(tuple(one.name for one in chain), works),
        works, problem, works[0].module, op=op,
    )  # fmt: skip


def _implementation(names: tuple[str, ...], works: list[Work]) -> str:
    own = own_name(names)
    family = next((w.meaning.family for w in works if w.role in (FUSED, FUSED_BACKWARD) and w.meaning.family), None)
    if own and family == "aotriton":
        return f"{own} (AOTriton)"
    return own or family or "fused, kernel not recognised"


def _calls_by_kernel(works: Sequence) -> list[AttentionCall]:
    """Fused kernels that no attention op launched: by name alone. A name that comes again begins the next call."""
    calls: list[AttentionCall] = []
    for work in works:
        if work.role not in (FUSED, FUSED_BACKWARD) or work.inside(FAST_PATH):
            continue
        direction = "backward" if work.role == FUSED_BACKWARD else "forward"
        last = calls[-1] if calls else None
        family = work.meaning.family or "fused attention"
        if last and (last.direction, last.implementation) == (direction, family) and _continues(last, work):
            last.works.append(work)
            continue
        if work.attributed:
            name = work.ops[0].name
        elif work.replayed:
            name = "in a replayed graph"
        elif work.event is not None and work.event.launch is None:
            name = "launch not in the trace"
        else:
            name = "no op recorded"
        calls.append(AttentionCall("kernel", name, direction, family, [work], Problem(), work.module, inferred=True))
    return calls


def _continues(last: AttentionCall, work: Work) -> bool:
    """A fused forward ends with a combining kernel; a backward has helpers before and after its main kernel."""
    before = last.works[-1]
    if any(work.name == one.name for one in last.works):
        return False
    if before.ops[:1] != work.ops[:1]:
        return False
    return last.direction == "backward" or work.meaning.unit == MEMORY


# --- product, softmax, product ---------------------------------------------------------------------------------------


def _unfused_calls(sequence: Sequence) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    end = 0  # calls do not overlap
    for index, work in enumerate(sequence):
        if index < end or work.role not in ("softmax", "softmax backward"):
            continue
        backward = work.role == "softmax backward"
        wanted = 2 if backward else 1
        for shape in _softmax_shapes(work):
            first = _product(sequence, index, -1, shape, end, wanted)
            last = _product(sequence, index, +1, shape, end, wanted)
            if (
                first is not None
                and last is not None
                and (shape is not None or backward or _agree(sequence[first], sequence[last]))
            ):
                break
        else:
            continue
        first, last = _widened(sequence, first, last, end)
        end = last + 1
        calls.append(_unfused(sequence[first:end], work, shape, sequence[first:index], backward))
    return calls


def _softmax_shapes(work: Work) -> Iterator[list[int] | None]:
    """Sizes that the softmax may have. Generated code takes several tensors, its first one may be another: None, which
    fits any product, is then the last guess."""
    if work.replayed:
        yield None
        return
    op = _softmax_op(work)
    if op is not None or not work.name.startswith("triton_"):
        yield first_shape(op)
        return
    yield from [shape for shape in [first_shape(work.op)] if shape is not None and len(shape) == 4]
    yield None


def _softmax_op(work: Work) -> Op | None:
    return next((op for op in work.ops if op.name.startswith(("aten::_softmax", "aten::softmax"))), None)


def _product(sequence: Sequence, index: int, step: int, shape: list[int] | None, least: int, wanted: int) -> int | None:
    """The farthest of the ``wanted`` nearest batched products on one side of a softmax whose sizes fit; or None."""
    found, best, strange = 0, None, False
    position = index + step
    while least <= position < len(sequence) and abs(position - index) <= REACH:
        work = sequence[position]
        if work.role.startswith("softmax") or work.in_attention or work.role in NEVER_BETWEEN:
            break
        strange = strange or (shape is None and not _may_stand_between(work))
        if work.role == "matmul":
            fits = _fits(work, shape, after=step > 0, gradient=wanted > 1)
            if strange and _batched_sizes(work) is None:
                break  # nothing but the order of kernels speaks for it, and that is not enough
            if fits:
                best, found = position, found + 1
                if found == wanted:
                    break
            elif not _is_batched(work):
                break  # a Linear in between: this softmax is not between two products of one attention
            elif wanted == 1 and step > 0:
                break
        position += step
    return best


def _may_stand_between(work: Work) -> bool:
    return work.role in BETWEEN or (work.role == "reduction" and BETWEEN_REDUCTION.search(work.name) is not None)


def _is_batched(work: Work) -> bool:
    if not work.ops or work.replayed:
        return True
    return any(op.name in BATCHED_OPS or GENERATED_BMM.match(op.name) for op in work.ops)


def _fits(work: Work, shape: list[int] | None, *, after: bool, gradient: bool) -> bool:
    """Whether a product makes (before the softmax) or takes (after it) a matrix of the softmax's size."""
    if work.replayed or not work.ops:
        return shape is None
    op = next((one for one in work.ops if one.name in BATCHED_OPS), None)
    if op is None:
        return _is_batched(work)
    sizes = product_sizes(op)
    if sizes is None or shape is None:
        return True
    n, rows, inner, columns = sizes
    keys, total = shape[-1], count(shape)
    makes = n * rows * columns == total and keys in (rows, columns)
    takes = (n * rows * inner == total and keys in (rows, inner)) or (
        n * inner * columns == total and keys in (inner, columns)
    )
    if gradient:
        return makes or takes
    return takes if after else makes


def _batched_sizes(work: Work) -> tuple[int, int, int, int] | None:
    op = None if work.replayed else next((one for one in work.ops if one.name in BATCHED_OPS), None)
    return product_sizes(op) if op is not None else None


def _agree(first: Work, last: Work) -> bool:
    """Whether the second product takes a matrix of the sizes that the first one makes; True where sizes are unknown."""
    made, taking = _batched_sizes(first), _batched_sizes(last)
    if made is None or taking is None:
        return True
    (n, rows, _, columns), (batch, left, inner, right) = made, taking
    return n == batch and sorted((rows, columns)) in (sorted((left, inner)), sorted((inner, right)))


def _outer(work: Work) -> Op | None:
    """The outermost op around it that only wraps a product."""
    return next((op for op in reversed(work.ops) if op.name in WRAPPERS), None) if not work.replayed else None


def _widened(sequence: Sequence, first: int, last: int, least: int) -> tuple[int, int]:
    """With what the same matmul or einsum does around its product: casts, copies."""
    outer = _outer(sequence[first])
    while outer is not None and first > least and outer in sequence[first - 1].ops:
        first -= 1
    outer = _outer(sequence[last])
    while outer is not None and last + 1 < len(sequence) and outer in sequence[last + 1].ops:
        last += 1
    return first, last


def _unfused(
    works: list[Work], softmax: Work, shape: list[int] | None, before: list[Work], backward: bool
) -> AttentionCall:
    products = [work for work in works if work.role == "matmul"]
    replayed = softmax.replayed
    compiled = softmax.name.startswith("triton_")
    name = "product, softmax, product"
    implementation = "unfused"
    if any(work.inside(FAST_PATH) for work in works):
        name, implementation = FAST_PATH, "MultiheadAttention fast path, unfused"
    elif compiled:
        implementation = "unfused, compiled"
    elif not replayed:
        names = (next((o.name for o in reversed(w.ops) if o.name in MATMUL_OPS), "aten::bmm") for w in products)
        spelled = [one.removeprefix("aten::") for one in names]
        name = f"{spelled[0]}, softmax, {spelled[-1]}"
    problem = Problem() if replayed else _unfused_problem(before, products, shape, softmax, backward)
    return AttentionCall(
        "unfused", name, "backward" if backward else "forward", implementation, works, problem, softmax.module,
        inferred=replayed or not problem.shaped,
    )  # fmt: skip


def _unfused_problem(
    before: list[Work], products: list[Work], shape: list[int] | None, softmax: Work, backward: bool
) -> Problem:
    op = next((o for w in before if w.role == "matmul" for o in w.ops if o.name in BATCHED_OPS), None)
    last = next((o for w in reversed(products) for o in w.ops if o.name in BATCHED_OPS), None)
    sizes = product_sizes(op) if op is not None else None
    dtype = next(iter(tensor_dtypes(op)), None)
    value_sizes = product_sizes(last) if last is not None else None
    if shape is None and sizes is not None and value_sizes is not None and not backward:
        n, rows, _, columns = sizes
        if value_sizes[:3] == (n, rows, columns):
            shape = [n, rows, columns]  # a generated softmax has no shapes, but the products around it have
    if sizes is None or shape is None or backward:
        known = Problem(dtype=dtype)
        if shape is not None and len(shape) >= 3 and sizes is not None:
            n, rows, inner, columns = sizes
            B, H = _batch_and_heads(shape, count(shape) // max(shape[-1] * shape[-2], 1))
            sides = {rows, inner, columns} - {shape[-1], shape[-2]}
            if len(sides) <= 1:  # none: the head dim is as large as the rows or the keys, which then are the same
                head_dim = sides.pop() if sides else columns
                known = Problem(B, H, H, shape[-2], shape[-1], head_dim, head_dim, dtype)
        return known
    n, rows, inner, columns = sizes
    B, H = _batch_and_heads(shape, n)
    problem = Problem(B, H, H, rows, columns, inner, value_sizes[3] if value_sizes else None, dtype=dtype)
    return replace(problem, L=columns, S=rows) if shape[-1] == rows != columns else problem


def _batch_and_heads(shape: list[int], n: int) -> tuple[int, int]:
    """Batch and heads, where the softmax keeps them apart; else all in the batch."""
    if len(shape) == 4 and shape[0] * shape[1] == n:
        return shape[0], shape[1]
    return n, 1
