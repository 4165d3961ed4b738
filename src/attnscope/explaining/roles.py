"""Stage 6: what each kernel or op did in an attention call: its role.

An ordered table of rules over the ops around an event and over its name; the first that matches decides. Pure; imports
neither torch nor an implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnscope.trace.events import Op
from attnscope.trace.names import UNKNOWN
from attnscope.workload import Workload

if TYPE_CHECKING:
    from attnscope.explaining.call import Seen

FUSED = "fused attention"
FUSED_BACKWARD = "fused attention backward"
LAYOUT_COPY = "layout copy"
MATMUL_ROLES = ("scores matmul", "values matmul", "gradient matmul", "matmul")
ATTENTION_OPS = (
    "_scaled_dot_product_",
    "_flash_attention",
    "_efficient_attention",
    "_cudnn_attention",
    "flex_attention",
)
GEMM_OPS = {"aten::bmm", "aten::mm", "aten::baddbmm", "aten::addmm", "aten::matmul", "aten::einsum"}
MASK_BUILDERS = {"aten::ones", "aten::tril", "aten::triu", "aten::tril_", "aten::triu_", "aten::arange",
                 "aten::ones_like", "aten::full", "aten::full_like",
                 "aten::lt", "aten::le", "aten::gt", "aten::ge", "aten::logical_not", "aten::bitwise_not",
                 "aten::logical_and", "aten::bitwise_and", "aten::logical_or", "aten::bitwise_or",
                 "aten::scalar_tensor", "aten::where"}  # fmt: skip
MASKING = {"aten::masked_fill_", "aten::masked_fill", "aten::where"}


@dataclass(frozen=True)
class RoleRule:
    """Events for which ``holds`` is true do ``role``."""

    role: str
    holds: Callable[[Seen, Workload], bool]


def give_roles(seen: list[Seen], workload: Workload, direction: str) -> list[Seen]:
    """The same events, each with its role; matrix products are told apart by where they stand."""
    for one in seen:
        one.event = replace(one.event, role=_role(one, workload))
    _tell_products_apart(seen, direction)
    return seen


def operands(op: Op) -> list[tuple[str, list[int], list[int]]]:
    """(dtype, shape, strides) of an op's tensor arguments, where the trace recorded them."""
    shapes, strides = op.shapes or [], op.strides
    strides = strides + [[]] * (len(shapes) - len(strides))
    pairs = zip(op.dtypes, shapes, strides, strict=False)
    return [(dtype, shape, stride) for dtype, shape, stride in pairs if dtype not in ("", "Scalar", "ScalarList")]


def _role(seen: Seen, workload: Workload) -> str:
    rule = next((r for r in RULES if r.holds(seen, workload)), None)
    return rule.role if rule else seen.event.role


def _is_fused(backward: bool) -> Callable[[Seen, Workload], bool]:
    def holds(seen: Seen, _: Workload) -> bool:
        hint = seen.event.role  # from the kernel's name
        if hint in (FUSED, FUSED_BACKWARD):
            return (hint == FUSED_BACKWARD) == backward
        if seen.kind != "op" and hint != UNKNOWN:
            return False
        name = _innermost(seen)
        fused = any(part in name for part in ATTENTION_OPS) and not name.endswith("_math")
        return fused and ("backward" in name) == backward

    return holds


def _innermost_op(seen: Seen) -> Op | None:
    return next((op for op in seen.ops if not op.is_annotation), None)


def _innermost(seen: Seen) -> str:
    op = _innermost_op(seen)
    return op.name if op is not None else ""


def _operands(seen: Seen) -> list[tuple[str, list[int], list[int]]]:
    op = _innermost_op(seen)
    return operands(op) if op is not None else []


def _is_cast(seen: Seen, _: Workload) -> bool:
    """A copy between two dtypes."""
    if _innermost(seen) != "aten::copy_":
        return False
    dtypes = [dtype for dtype, _, _ in _operands(seen)]
    return len(set(dtypes)) > 1 if len(dtypes) >= 2 else seen.inside("aten::_to_copy")


def _is_copy(seen: Seen) -> bool:
    return seen.kind == "memcpy" or _innermost(seen) in ("aten::copy_", "aten::clone", "aten::cat", "aten::repeat")


def _repeats_heads(seen: Seen, workload: Workload) -> bool:
    """A copy that writes each key/value head once per query head of its group."""
    if workload.group == 1:
        return False
    if seen.inside("aten::repeat_interleave"):
        return _is_copy(seen) or _innermost(seen) in ("aten::index_select", "aten::repeat_interleave", "aten::index")
    return _is_copy(seen) and any(
        size == workload.group and stride == 0
        for op in seen.ops[:3]
        for _, shape, strides in operands(op)
        for size, stride in zip(shape, strides, strict=False)
    )


def _is_scores_sized(seen: Seen, workload: Workload) -> bool:
    """Whether its largest operand has the rows, columns and heads of the scores."""
    op = next((o for o in seen.ops if o.shapes is not None), None)
    shapes = [shape for _, shape, _ in operands(op)] if op is not None else []
    heads = workload.B * workload.H
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        if shape[-1:] == [workload.S] and count == heads * workload.L * workload.S:
            return True
    return False


def _has_shapes(seen: Seen) -> bool:
    return any(op.shapes is not None for op in seen.ops)


def _masks_scores(seen: Seen, workload: Workload) -> bool:
    name = _innermost(seen)
    if name in ("aten::add", "aten::add_"):
        return _is_scores_sized(seen, workload) and _adds_other_shape(seen)
    if name not in MASKING and seen.event.role != "mask":
        return False
    if name != "aten::where":
        return True
    return _is_scores_sized(seen, workload) and not seen.inside("aten::_scaled_dot_product_attention_math")


def _adds_other_shape(seen: Seen) -> bool:
    """Adding a mask or bias broadcasts it, or at least takes a second tensor."""
    return len(_operands(seen)) >= 2


def _builds_mask(seen: Seen, workload: Workload) -> bool:
    if seen.event.role == "mask building":
        return True
    if not any(op.name in MASK_BUILDERS for op in seen.ops):
        return False
    # the math path masks by adding; its where, ones and tril only make what it adds
    return seen.inside("aten::_scaled_dot_product_attention_math") or not _is_scores_sized(seen, workload)


def _scales(seen: Seen, _: Workload) -> bool:
    """A product or quotient with a number."""
    if _innermost(seen) not in ("aten::mul", "aten::mul_", "aten::div", "aten::div_"):
        return False
    shapes = [shape for _, shape, _ in _operands(seen)]
    return not _has_shapes(seen) or sum(1 for shape in shapes if shape) <= 1


def _by_op(*names: str) -> Callable[[Seen, Workload], bool]:
    return lambda seen, _: _innermost(seen) in names


RULES: tuple[RoleRule, ...] = (
    RoleRule(FUSED_BACKWARD, _is_fused(backward=True)),
    RoleRule(FUSED, _is_fused(backward=False)),
    RoleRule("fill", lambda seen, _: seen.kind == "memset"),
    RoleRule("reduction", lambda seen, _: seen.event.role == "reduction" and _innermost(seen) in GEMM_OPS),
    RoleRule("matmul", lambda seen, _: seen.event.role == "matmul"
             or (seen.kind == "op" and _innermost(seen) in GEMM_OPS)),
    RoleRule("safe softmax", lambda seen, _: seen.inside("aten::_safe_softmax")
             and not seen.inside("aten::softmax", "aten::_softmax")),
    RoleRule("softmax backward", _by_op("aten::_softmax_backward_data")),
    RoleRule("softmax", _by_op("aten::_softmax", "aten::softmax")),
    RoleRule("KV repeat", _repeats_heads),
    RoleRule("cast", _is_cast),
    RoleRule("copy", lambda seen, _: _is_copy(seen) and seen.inside("aten::masked_fill")),
    RoleRule(LAYOUT_COPY, lambda seen, _: _is_copy(seen)
             and seen.inside("aten::contiguous", "aten::reshape", "aten::clone", "aten::flatten")),
    RoleRule("copy", lambda seen, _: _is_copy(seen)),
    RoleRule("mask", _masks_scores),
    RoleRule("scale", _scales),
    RoleRule("mask building", _builds_mask),
    RoleRule("fill", _by_op("aten::fill_", "aten::zero_")),
    RoleRule("comparison", _by_op("aten::eq", "aten::ne", "aten::isneginf", "aten::isinf", "aten::isnan")),
    RoleRule("add", _by_op("aten::add", "aten::add_", "aten::sub", "aten::sub_")),
    RoleRule("exponential", _by_op("aten::exp", "aten::exp_", "aten::exp2")),
    RoleRule("reduction", _by_op("aten::sum", "aten::amax", "aten::amin", "aten::max", "aten::mean", "aten::all",
                                 "aten::any", "aten::logsumexp", "aten::_logsumexp")),
    RoleRule("elementwise", _by_op("aten::mul", "aten::mul_", "aten::div", "aten::div_", "aten::tanh", "aten::neg",
                                   "aten::abs", "aten::sub", "aten::reciprocal", "aten::log")),
    RoleRule("fused elementwise", lambda seen, _: seen.event.family == "inductor C++"),
)  # fmt: skip


def _tell_products_apart(seen: list[Seen], direction: str) -> None:
    """Forward: the products before the softmax make scores, those after it values. Backward: all make gradients,
    except one that comes before a softmax is recomputed."""
    softmax = next((i for i, one in enumerate(seen) if one.role in ("softmax", "exponential")), None)
    products = [i for i, one in enumerate(seen) if one.role == "matmul"]
    if softmax is None and direction == "forward" and len(products) == 2:
        softmax = products[1]  # it hides in generated code between the two
    for position, one in enumerate(seen):
        if one.role != "matmul":
            continue
        if softmax is not None and position < softmax:
            role = "scores matmul"
        elif direction == "backward":
            role = "gradient matmul"
        else:
            role = "values matmul" if softmax is not None else "matmul"
        one.event = replace(one.event, role=role)
