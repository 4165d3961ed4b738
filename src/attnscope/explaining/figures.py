"""Stage 6: a profile's figures: per call and over all active steps, and its table of ops and kernels.

Reads a Call, writes a Profile's numbers. Pure; imports neither torch nor an implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnscope.explaining.call import COMPILED_GRAPH, Call
from attnscope.records import OpTime, Profile
from attnscope.trace.events import Op, Step

TABLE_ROWS = 15


def make_profile(call: Call, expected: tuple[str, ...], surprises: tuple[str, ...], trace_name: str | None) -> Profile:
    """The record of one profiled direction. Memsets are timed but not counted as kernels: cuBLAS and cuDNN add them."""
    steps = len(call.steps)
    if call.on_gpu:
        kernels = sum(1 for s in call.steps for e in s.device_events if e.kind != "memset") / steps
    else:
        kernels = float(len(call.seen))
    gpu_total = sum(step.device_us for step in call.steps) if call.on_gpu else None
    return Profile(
        direction=call.direction,
        label=call.label,
        steps=steps,
        kernels_per_call=kernels,
        cpu_ops_per_call=sum(1 for s in call.steps for op in s.ops if not op.is_annotation) / steps,
        gpu_us_per_call=call.gpu_us,
        cpu_us_per_call=call.host_us,
        self_gpu_us_total=gpu_total,
        self_cpu_us_total=sum(step.duration_us for step in call.steps),
        spilled_kernels=len(call.trace.spilled()),
        table=_table(call),
        expected=expected,
        surprises=surprises,
        trace=trace_name,
    )


@dataclass
class _Row:
    calls: int = 0
    self_cpu_ns: int = 0
    cpu_ns: int = 0
    self_gpu_ns: int = 0
    gpu_ns: int = 0


def _table(call: Call) -> tuple[OpTime, ...]:
    """Rows over all active steps, by GPU time (on a CPU by self CPU time), the largest first.

    An op's GPU time is that of what it and the ops inside it launched; an op inside one of the same name counts once.
    """
    rows: dict[str, _Row] = {}
    for step in call.steps:
        _add_ops(step, rows)
        _add_device_events(step, rows)
    on_gpu = call.on_gpu
    ordered = sorted(
        rows.items(), key=lambda item: (item[1].gpu_ns if on_gpu else item[1].self_cpu_ns, item[1].cpu_ns), reverse=True
    )
    return tuple(
        OpTime(
            name=name,
            calls=row.calls,
            self_cpu_us=row.self_cpu_ns / 1e3,
            cpu_us=row.cpu_ns / 1e3,
            self_gpu_us=row.self_gpu_ns / 1e3,
            gpu_us=row.gpu_ns / 1e3,
        )
        for name, row in ordered[:TABLE_ROWS]
    )


def _add_ops(step: Step, rows: dict[str, _Row]) -> None:
    for op in step.ops:
        row = rows.setdefault(_shown(op), _Row())
        row.calls += 1
        row.self_cpu_ns += op.self_ns
        if not _within_same(op):
            row.cpu_ns += op.duration_ns


def _add_device_events(step: Step, rows: dict[str, _Row]) -> None:
    for event in step.device_events:
        row = rows.setdefault(event.name, _Row())
        row.calls += 1
        row.self_gpu_ns += event.duration_ns
        row.gpu_ns += event.duration_ns
        around = [op for op in event.op.ancestors() if op.start_ns >= step.start_ns] if event.op is not None else []
        around = [op for op in around if op.name != step.name]
        if around:
            rows.setdefault(_shown(around[0]), _Row()).self_gpu_ns += event.duration_ns
        for name in {_shown(op) for op in around}:
            rows.setdefault(name, _Row()).gpu_ns += event.duration_ns


def _within_same(op: Op) -> bool:
    return op.parent is not None and any(around.name == op.name for around in op.parent.ancestors())


def _shown(op: Op) -> str:
    """Inductor puts a hash into its graph's name; it says nothing to a reader."""
    return COMPILED_GRAPH if op.is_annotation and COMPILED_GRAPH in op.name else op.name
