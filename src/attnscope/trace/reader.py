"""Stage 6: read a Chrome trace file into tidy, linked events.

Reads a file, writes a :class:`~attnscope.trace.events.Trace`. Imports neither torch nor an implementation. Takes both
roots (an object with ``traceEvents`` or a bare list), gzip by its magic bytes, the category names of every age,
timestamps as whole numbers, decimals or text. What is damaged is left out and said.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from attnscope.errors import TraceError
from attnscope.trace.blocks import Blocks, slices
from attnscope.trace.container import Container, RawEvent
from attnscope.trace.events import DeviceEvent, DeviceProperties, Interval, Op, RuntimeCall, Trace

MODULE = "nn.Module: "
MOST_NAME = 4096
MOST_DEPTH = 200  # of nesting; what is deeper belongs to the op at this depth
MOST_US = 1e17  # of a time or duration: three thousand years
# What the root of a trace says about versions; of the rest nothing is kept.
KEPT_META = frozenset((
    "schemaVersion", "cuda_runtime_version", "cuda_driver_version", "cupti_version", "hip_runtime_version",
    "hip_driver_version", "roctracer_version", "rocprofiler-sdk_version", "record_shapes", "with_stack",
    "with_modules", "profile_memory", "baseTimeNanoseconds", "torch_version", "pytorch_version", "PYTORCH_VERSION",
))  # fmt: skip

# Category, in lower case, of every age and vendor -> what such an event is.
CATEGORIES = {
    "cpu_op": "op",
    "operator": "op",
    "user_annotation": "annotation",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "hip_runtime": "runtime",
    "hip_driver": "runtime",
    "runtime": "runtime",
    "driver": "runtime",
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "concurrent_kernel": "kernel",
    "xpu_runtime": "runtime",
    "mtia_runtime": "runtime",
    "python_function": "python",
}


class _CallArgs(msgspec.Struct, gc=False):
    correlation: Any = None


class _DeviceArgs(msgspec.Struct, gc=False):
    correlation: Any = None
    device: Any = None
    stream: Any = None
    grid: Any = None
    block: Any = None
    registers: Any = msgspec.field(default=None, name="registers per thread")
    shared: Any = msgspec.field(default=None, name="shared memory")
    occupancy: Any = msgspec.field(default=None, name="est. achieved occupancy %")
    bytes: Any = None
    graph_id: Any = msgspec.field(default=None, name="graph id")
    copy_kind: Any = msgspec.field(default=None, name="copy kind")
    src_kind: Any = msgspec.field(default=None, name="src kind")
    dst_kind: Any = msgspec.field(default=None, name="dst kind")


_CALL_ARGS = msgspec.json.Decoder(_CallArgs)
_DEVICE_ARGS = msgspec.json.Decoder(_DeviceArgs)


def read_trace(path: Path | str) -> Trace:
    """The trace in a file, gzipped or not.

    Raises:
        TraceError: the file cannot be read, holds no whole event, or is no Chrome trace.
    """
    path = Path(path)
    blocks = Blocks(path)
    try:
        trace = _read(blocks, str(path))
    except TraceError:
        if blocks.damage:
            raise TraceError(f"{path} is a damaged gzip file: {blocks.damage}\nhint: copy or record it again") from None
        raise
    if blocks.damage:
        if not (trace.ops or trace.runtime_calls or trace.device_events):
            raise TraceError(f"{path} is a damaged gzip file: {blocks.damage}\nhint: copy or record it again")
        trace.problems.insert(0, f"the gzip file is damaged: {blocks.damage}")
    return trace


def parse_trace(data: bytes, where: str = "trace") -> Trace:
    """The trace in a JSON document; ``where`` names it in errors. Raises TraceError."""
    return _read(slices(data), where)


def _read(blocks: Iterable[bytes], where: str) -> Trace:
    """Python's collector of cycles is off meanwhile: it would look through millions of events again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return _assemble(Container(blocks, where))
    finally:
        if collects:
            gc.enable()


def _assemble(container: Container) -> Trace:
    trace = Trace()
    collector = _Collector(trace)
    for batch in container.batches():
        for event in batch:
            collector.add(event)
        batch.clear()
    if container.whole + container.damaged and not collector.kinds:
        raise TraceError(
            f"{container.where} is no Chrome trace that can be read: none of its events has a start, a length and a "
            "category\nhint: torch.profiler's export_chrome_trace writes such events"
        )
    collector.finish()
    trace.problems[:0] = container.problems
    trace.devices = _device_properties(container.meta.get("deviceProperties"))
    trace.meta = {k: v for k, v in container.meta.items() if isinstance(v, str | int | float) and k in KEPT_META}
    trace.has_environment = container.environment
    for events in (trace.ops, trace.runtime_calls, trace.device_events, trace.modules):
        events.sort(key=_by_start)
    _nest([*trace.ops, *trace.modules] if trace.modules else trace.ops, trace.runtime_calls)
    _link(trace)
    return trace


def _by_start(event: Interval) -> tuple[int, int]:
    return event.start_ns, -event.duration_ns


def _device_properties(found: object) -> list[DeviceProperties]:
    devices = []
    for one in found if isinstance(found, list) else []:
        try:
            devices.append(msgspec.convert(one, DeviceProperties))
        except msgspec.ValidationError:
            continue
    return devices


class _Collector:
    """Sorts events into the trace's lists and counts what cannot be placed in time.

    A double holds a time of 100 days to a quarter nanosecond; subtracting a whole number of microseconds from it is
    exact, scaling is not. So the difference to the first event is scaled, and rounding gives the very nanosecond that
    the writer meant.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.base_us: int | None = None
        self.earliest_ns = 0
        self.unplaced = 0
        self.threads: dict[tuple[object, object], tuple[str, str]] = {}
        self.names: dict[object, str] = {}
        self.kinds: dict[str, str | None] = {}

    def add(self, event: RawEvent) -> None:
        """One event, if it is of a kind that counts."""
        cat = event.cat
        if event.ph != "X" or not cat:
            return
        kind = self.kinds.get(cat, "")
        if kind == "":
            kind = self.kinds[cat] = CATEGORIES.get(cat.lower())
        if kind is None:
            return
        if kind == "python" and not (isinstance(event.name, str) and event.name.startswith(MODULE)):
            return
        start, duration = self._ns(event.ts), self._duration(event.dur)
        if start is None or duration is None:
            self.unplaced += 1
            return
        if start < self.earliest_ns:
            self.earliest_ns = start
        key = (event.pid, event.tid)
        thread = self.threads.get(key)
        if thread is None:
            thread = self.threads[key] = (str(event.pid), str(event.tid).lstrip("-"))
        name = self.names.get(event.name)
        if name is None:
            name = self.names[event.name] = str(event.name)[:MOST_NAME]
        trace = self.trace
        if kind == "op" or kind == "annotation":
            trace.ops.append(
                Op(
                    name=name, start_ns=start, duration_ns=duration, thread=thread,
                    is_annotation=kind == "annotation", raw_args=bytes(event.args), children=[],
                )
            )  # fmt: skip
        elif kind == "runtime":
            trace.runtime_calls.append(
                RuntimeCall(
                    name=name, start_ns=start, duration_ns=duration, thread=thread,
                    correlation=_whole(_args(_CALL_ARGS, event.args).correlation),
                )
            )  # fmt: skip
        elif kind == "python":
            trace.modules.append(
                Op(name=name[len(MODULE) :], start_ns=start, duration_ns=duration, thread=thread, is_annotation=True,
                   is_module=True, children=[])
            )  # fmt: skip
        else:
            trace.device_events.append(_device_event(kind, name, start, duration, thread, event.args))

    def finish(self) -> None:
        """Count from the earliest event, and say what was left out."""
        if self.earliest_ns < 0:
            trace, shift = self.trace, -(self.earliest_ns // 1000) * 1000
            for event in (*trace.ops, *trace.modules, *trace.runtime_calls, *trace.device_events):
                event.start_ns += shift
        if self.unplaced:
            self.trace.problems.append(f"{self.unplaced} events without a usable time or duration are left out")

    def _ns(self, value: int | float | str | None) -> int | None:
        number = value if value.__class__ is float else _number(value)
        if number is None or not -MOST_US < number < MOST_US:
            return None
        if self.base_us is None:
            self.base_us = math.floor(number)
        return round((number - self.base_us) * 1000)

    @staticmethod
    def _duration(value: int | float | str | None) -> int | None:
        number = value if value.__class__ is float else _number(value)
        return round(number * 1000) if number is not None and 0 <= number < MOST_US else None


def _number(value: int | float | str | None) -> int | float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _args(decoder: Any, raw: msgspec.Raw) -> Any:
    """The args by that decoder; those of no event where they are not an object."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return decoder.decode(b"{}")


def _device_event(
    kind: str, name: str, start: int, duration: int, thread: tuple[str, str], raw: msgspec.Raw
) -> DeviceEvent:
    args: _DeviceArgs = _args(_DEVICE_ARGS, raw)
    if kind == "memcpy" and isinstance(args.src_kind, str) and isinstance(args.dst_kind, str) and "(" not in name:
        name = f"Memcpy ({args.src_kind} -> {args.dst_kind})"  # one writer puts both only here
    return DeviceEvent(
        name=name,
        start_ns=start,
        duration_ns=duration,
        thread=thread,
        kind=kind,
        correlation=_whole(args.correlation),
        device=_whole(args.device),
        stream=_whole(args.stream),
        grid=_sizes(args.grid),
        block=_sizes(args.block),
        registers=_whole(args.registers),
        shared_memory_bytes=_whole(args.shared),
        occupancy_shown=_percent(args.occupancy),
        bytes_moved=_whole(args.bytes),
        graph_id=_whole(args.graph_id) or None,
    )


def _sizes(value: object) -> tuple[int, ...] | None:
    """A grid or block; None where it is missing or all zeros, as some AMD writers leave it."""
    if not isinstance(value, list) or len(value) != 3 or not any(value):
        return None
    if not all(isinstance(n, int) and 0 <= n < 1 << 32 for n in value):
        return None
    return tuple(value)


def _percent(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None


def _nest(ops: list[Op], calls: list[RuntimeCall]) -> None:
    """Give every op the op around it and every runtime call its op, thread by thread, by one sweep over starts."""
    threads: dict[tuple[str, str], list[Op | RuntimeCall]] = {}
    events: list[Op | RuntimeCall] = [*ops, *calls]
    for event in events:
        threads.setdefault(event.thread, []).append(event)
    for events in threads.values():
        # at equal starts the longer one is outside, and an op is outside its runtime call
        events.sort(key=lambda e: (e.start_ns, -e.duration_ns, isinstance(e, RuntimeCall)))
        stack: list[Op] = []
        for event in events:
            end = event.start_ns + (event.duration_ns or 1)
            while stack and stack[-1].start_ns + stack[-1].duration_ns < end:
                stack.pop()
            around = stack[-1] if stack else None
            if isinstance(event, RuntimeCall):
                event.op = around
                continue
            if around is not None:
                event.parent = around
                around.children_ns += event.duration_ns
                around.children.append(event)
            if len(stack) < MOST_DEPTH:
                stack.append(event)


def _link(trace: Trace) -> None:
    """Give every device event its launch, by correlation."""
    by_correlation: dict[int, RuntimeCall] = {}
    for call in trace.runtime_calls:
        if call.correlation and (call.launches or call.correlation not in by_correlation):
            by_correlation[call.correlation] = call
    for event in trace.device_events:
        if event.correlation:
            event.launch = by_correlation.get(event.correlation)
    orphans = sum(1 for e in trace.device_events if e.launch is None)
    if orphans:
        trace.problems.append(f"{orphans} of {len(trace.device_events)} device events were launched before the trace")
