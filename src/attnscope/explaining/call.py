"""Stage 6: one profiled call taken out of a trace, ready for the rules that explain it.

Reads a Trace and a Workload; writes nothing. Imports neither torch nor an implementation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from attnscope.errors import TraceError
from attnscope.explaining.occupancy import occupancy_percent
from attnscope.explaining.roles import give_roles, operands
from attnscope.records import KernelEvent
from attnscope.trace.events import DeviceEvent, Op, Step, Trace
from attnscope.trace.names import UNKNOWN, explain_name
from attnscope.workload import Workload

CPU_RULE = "a CPU op: no GPU unit works on it"
COMPILED_GRAPH = "CompiledFxGraph"
# Ops that move no data: views, allocations, scalars, and bookkeeping.
NO_WORK = re.compile(
    r"^aten::(view|_unsafe_view|reshape|_reshape_alias|expand|expand_as|transpose|t|permute|as_strided|select|slice|"
    r"narrow|unsqueeze|squeeze|flatten|unflatten|unbind|split|chunk|detach|alias|contiguous|to|lift_fresh|"
    r"empty|empty_like|empty_strided|new_empty|resize_|set_|resolve_conj|resolve_neg|scalar_tensor|item|"
    r"_local_scalar_dense|is_nonzero|result_type|broadcast_tensors|unsafe_split|movedim|swapaxes|numel|size|matmul|"
    r"linear|numpy_T|mT|_nnpack_available|stride|view_as|unfold|_has_compatible_shallow_copy_type|ones|zeros|full|softmax|"
    r"scaled_dot_product_attention|_scaled_dot_product_attention_math|_fused_sdp_choice|record_stream)$"
)
# Ops that are one piece of work even though ops run inside them.
ONE_PIECE = re.compile(
    r"^aten::_(scaled_dot_product_(flash|efficient|cudnn|fused|overrideable)|flash_attention|efficient_attention|"
    r"cudnn_attention|fused_sdp_choice)|^aten::(all|any|sum|mean|amax|amin|max|min|argmax|logsumexp|cumsum|norm|"
    r"_softmax|_softmax_backward_data|bmm|mm|baddbmm|addmm|bernoulli_?|repeat_interleave\.self_int)$|flex_attention"
)
# Elementwise ops that may cast an operand first, as a small op inside their own work.
MAY_CAST_FIRST = re.compile(r"^aten::(add|sub|mul|div|where|maximum|minimum)_?$")


@dataclass
class Seen:
    """One thing that ran in a call: its event for the record, and the ops around it, innermost first."""

    event: KernelEvent
    ops: tuple[Op, ...]
    kind: str = "op"
    bytes_moved: int | None = None

    @property
    def us(self) -> float:
        """How long it ran."""
        return self.event.duration_us

    @property
    def role(self) -> str:
        """What it did."""
        return self.event.role

    def inside(self, *names: str) -> bool:
        """Whether an op of one of these names launched it or encloses it."""
        return any(op.name in names for op in self.ops)


@dataclass
class Call:
    """What the rules read: the steps of one label, the middle one in detail, and whose call it was.

    ``host_us`` and ``gpu_us`` are means over the steps (``gpu_us`` None without a GPU in the trace). The profiler slows
    the host several times; ``measured_host_us`` is the host time of a call without it, where one was measured.
    """

    trace: Trace
    workload: Workload
    implementation: str
    direction: str
    label: str
    steps: list[Step]
    step: Step
    seen: list[Seen]
    measured_host_us: float | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether device events were recorded."""
        return any(step.device_events for step in self.steps)

    @cached_property
    def host_us(self) -> float:
        """Mean host time of the label, the profiler's own cost included."""
        return sum(step.duration_us for step in self.steps) / len(self.steps)

    @cached_property
    def gpu_us(self) -> float | None:
        """Mean sum of device times of one call."""
        return sum(step.device_us for step in self.steps) / len(self.steps) if self.on_gpu else None

    def with_role(self, *roles: str) -> list[Seen]:
        """What did one of these roles, in order."""
        return [seen for seen in self.seen if seen.role in roles]

    def where(self, holds: Callable[[Seen], bool]) -> list[Seen]:
        """What ``holds`` says yes to, in order."""
        return [seen for seen in self.seen if holds(seen)]


def find_call(trace: Trace, workload: Workload, implementation: str, direction: str, label: str | None = None) -> Call:
    """The call that the trace's steps hold.

    ``label`` defaults to the one label of ours in the trace. The step shown in detail is the middle one by GPU time
    (on a CPU by host time).

    Raises:
        TraceError: the trace holds no step of that label.
    """
    if label is None:
        label = next(iter(trace.labels), None)
    steps = trace.steps(label) if label else []
    if label is None or not steps:
        names = ", ".join(dict.fromkeys(a.name for a in trace.annotations)) or "none"
        wanted = f"named {label!r}" if label else "of attnscope"
        raise TraceError(
            f"the trace must hold a step {wanted}, and has none (its annotations: {names})\n"
            "hint: attnscope profile records traces with labelled steps"
        )
    on_gpu = any(step.device_events for step in steps)
    ordered = sorted(steps, key=lambda s: s.device_us if on_gpu else s.duration_us)
    step = ordered[(len(ordered) - 1) // 2]
    seen = _device_seen(trace, step, direction) if on_gpu else cpu_seen(step, direction)
    return Call(trace, workload, implementation, direction, label, steps, step, give_roles(seen, workload, direction))


def _device_seen(trace: Trace, step: Step, direction: str) -> list[Seen]:
    first = step.device_events[0].start_ns if step.device_events else 0
    return [_from_device(trace, event, first, direction) for event in step.device_events]


def _from_device(trace: Trace, event: DeviceEvent, first_ns: int, direction: str) -> Seen:
    meaning = explain_name(event.name)
    ops = tuple(event.op.ancestors()) if event.op is not None else ()
    op = next((o.name for o in ops if not o.is_annotation), None)
    occupancy = occupancy_percent(event, trace.device(event.device)) if event.kind == "kernel" else None
    record = KernelEvent(
        direction=direction,
        name=event.name,
        start_us=(event.start_ns - first_ns) / 1e3,
        duration_us=event.duration_us,
        role=meaning.role or UNKNOWN,
        op=op,
        family=meaning.family,
        dtype=meaning.dtype,
        tile=meaning.tile,
        architecture=meaning.architecture,
        unit=meaning.unit,
        unit_rule=meaning.unit_rule,
        grid=event.grid,
        block=event.block,
        registers=event.registers,
        shared_memory_bytes=event.shared_memory_bytes,
        occupancy_shown=event.occupancy_shown,
        occupancy=None if occupancy is None else round(occupancy, 2),
    )
    return Seen(record, ops, event.kind, event.bytes_moved)


def cpu_seen(step: Step, direction: str) -> list[Seen]:
    """The ops that do work, each with its own time: of nested ops the innermost, except where one is one piece, or
    works beyond what is inside it."""
    found: list[Seen] = []
    for op in step.ops:
        if op.parent is not None and any(ONE_PIECE.search(o.name) for o in op.parent.ancestors()):
            continue
        if op.is_annotation:
            if COMPILED_GRAPH in op.name:
                found.append(_from_op(op, step, direction, "generated C++ code", op.self_ns))
        elif ONE_PIECE.search(op.name) or (_works(op) and not any(_works_within(child) for child in op.children)):
            found.append(_from_op(op, step, direction, op.name, op.duration_ns))
        elif MAY_CAST_FIRST.match(op.name) and _works(op) and not _contains(op, op.name):
            inside = sum(child.duration_ns for child in op.children if _works_within(child))
            found.append(_from_op(op, step, direction, op.name, op.duration_ns - inside))
    return found


def _works(op: Op) -> bool:
    return op.name.startswith(("aten::", "attnscope::", "torch_attn", "quantized::", "mkldnn::")) and not (
        NO_WORK.match(op.name) or _takes_only_scalars(op)
    )


def _works_within(op: Op) -> bool:
    return _works(op) or any(_works_within(child) for child in op.children)


def _contains(op: Op, name: str) -> bool:
    return any(child.name == name or _contains(child, name) for child in op.children)


def _takes_only_scalars(op: Op) -> bool:
    """Whether every tensor it takes has no dimension, as in the cast of a Python number."""
    shapes = [shape for _, shape, _ in operands(op)]
    return bool(shapes) and not any(shapes)


def _from_op(op: Op, step: Step, direction: str, name: str, duration_ns: int) -> Seen:
    dtype = next((short_dtype(d) for d in op.dtypes if short_dtype(d)), None)
    record = KernelEvent(
        direction=direction,
        name=name,
        start_us=(op.start_ns - step.start_ns) / 1e3,
        duration_us=duration_ns / 1e3,
        role=UNKNOWN,
        op=op.name if not op.is_annotation else COMPILED_GRAPH,
        family="ATen on the CPU" if not op.is_annotation else "inductor C++",
        dtype=dtype,
        unit_rule=CPU_RULE,
    )
    return Seen(record, tuple(op.ancestors()))


def short_dtype(name: str) -> str | None:
    """torch's spelling of a tensor dtype in ours; None for what is no floating point tensor."""
    return {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64"}.get(name)
