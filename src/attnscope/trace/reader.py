"""Stage 6: read a Chrome trace file into tidy, linked events.

Reads a file, writes a :class:`~attnscope.trace.events.Trace`. Imports neither torch nor an implementation. Takes both
roots (an object with ``traceEvents`` or a bare list), gzip by its magic bytes, the category names of every age,
timestamps as whole numbers, decimals or text. What is damaged is left out and said.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from attnscope.errors import TraceError
from attnscope.trace.blocks import Blocks, slices
from attnscope.trace.container import Container, RawEvent
from attnscope.trace.events import DeviceEvent, DeviceProperties, Op, RuntimeCall, Trace, decode_args

START = attrgetter("start_ns")
MODULE = "nn.Module: "
MOST_NAME = 4096
FEWEST_THREADS = 1024  # that a multiprocessor of any card holds
MOST_SIZE = 1 << 32  # of a grid or block
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
    correlation: int | None = None


class _DeviceArgs(msgspec.Struct, gc=False):
    """As writers mean them; args that are otherwise are read key by key."""

    correlation: int | None = None
    device: int | None = None
    stream: int | None = None
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int | None = msgspec.field(default=None, name="registers per thread")
    shared: int | None = msgspec.field(default=None, name="shared memory")
    occupancy: float | None = msgspec.field(default=None, name="est. achieved occupancy %")
    bytes: int | None = None
    graph_id: int | None = msgspec.field(default=None, name="graph id")
    src_kind: str | None = msgspec.field(default=None, name="src kind")
    dst_kind: str | None = msgspec.field(default=None, name="dst kind")


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
        collector.add(batch)
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
        _sort(events)
    scopes = trace.ops
    if trace.modules:
        scopes = [*trace.modules, *trace.ops]
        _sort(scopes)
    _nest(scopes, trace.runtime_calls)
    _link(trace)
    return trace


def _sort(events: list[Any]) -> None:
    """By start; at equal starts the longer first. Ties are rare, and a key of two numbers costs three times as much."""
    events.sort(key=START)
    if any(a.start_ns == b.start_ns and a.duration_ns < b.duration_ns for a, b in pairwise(events)):
        events.sort(key=lambda event: (event.start_ns, -event.duration_ns))


def _device_properties(found: object) -> list[DeviceProperties]:
    devices = []
    for one in found if isinstance(found, list) else []:
        try:
            device = msgspec.convert(one, DeviceProperties)
        except msgspec.ValidationError:
            continue
        if device.num_sms is None and 0 < (device.max_threads_per_multiprocessor or 0) < FEWEST_THREADS:
            # torch's Python exporter puts the number of multiprocessors here
            device.num_sms, device.max_threads_per_multiprocessor = device.max_threads_per_multiprocessor, None
        devices.append(device)
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

    def add(self, events: list[RawEvent]) -> None:
        """Those of the events that are of a kind that counts."""
        kinds, names, threads, keep = self.kinds, self.names, self.threads, self._keep
        base = self.base_us
        for event in events:
            cat = event.cat
            if event.ph != "X" or not cat:
                continue
            kind = kinds.get(cat, "")
            if kind == "":
                kind = kinds[cat] = CATEGORIES.get(cat.lower())
            if kind is None:
                continue
            written = event.name
            if kind == "python" and not (written.__class__ is str and written.startswith(MODULE)):
                continue
            ts, dur = event.ts, event.dur
            if ts.__class__ is not float or dur.__class__ is not float:
                ts, dur = _number(ts), _number(dur)
            if ts is None or dur is None or not (-MOST_US < ts < MOST_US and 0 <= dur < MOST_US):
                self.unplaced += 1
                continue
            if base is None:
                base = self.base_us = math.floor(ts)
            start, duration = round((ts - base) * 1000), round(dur * 1000)
            if start < self.earliest_ns:
                self.earliest_ns = start
            lane = (event.pid, event.tid)
            thread = threads.get(lane)
            if thread is None:
                thread = threads[lane] = (str(event.pid), str(event.tid).lstrip("-"))
            name = names.get(written)
            if name is None:
                name = names[written] = str(written)[:MOST_NAME]
            keep(kind, name, start, duration, thread, event.args)

    def _keep(
        self, kind: str, name: str, start: int, duration: int, thread: tuple[str, str], args: msgspec.Raw
    ) -> None:
        trace = self.trace
        if kind == "op" or kind == "annotation":
            trace.ops.append(
                Op(name=name, start_ns=start, duration_ns=duration, thread=thread, is_annotation=kind == "annotation",
                   raw_args=bytes(args), children=[])
            )  # fmt: skip
        elif kind == "runtime":
            correlation = _call_correlation(args)
            trace.runtime_calls.append(
                RuntimeCall(name=name, start_ns=start, duration_ns=duration, thread=thread, correlation=correlation)
            )
        elif kind == "python":
            trace.modules.append(
                Op(name=name[len(MODULE) :], start_ns=start, duration_ns=duration, thread=thread, is_annotation=True,
                   is_module=True, children=[])
            )  # fmt: skip
        else:
            trace.device_events.append(_device_event(kind, name, start, duration, thread, args))

    def finish(self) -> None:
        """Count from the earliest event, and say what was left out."""
        if self.earliest_ns < 0:
            trace, shift = self.trace, -(self.earliest_ns // 1000) * 1000
            for event in (*trace.ops, *trace.modules, *trace.runtime_calls, *trace.device_events):
                event.start_ns += shift
        if self.unplaced:
            self.trace.problems.append(f"{self.unplaced} events without a usable time or duration are left out")


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


def _call_correlation(raw: msgspec.Raw) -> int | None:
    try:
        return _CALL_ARGS.decode(raw).correlation
    except (msgspec.DecodeError, RecursionError):
        return _whole(decode_args(bytes(raw)).get("correlation"))


def _device_args(raw: msgspec.Raw) -> _DeviceArgs:
    try:
        return _DEVICE_ARGS.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        found = decode_args(bytes(raw))
    texts = {key: found[key] for key in ("src kind", "dst kind") if isinstance(found.get(key), str)}
    return _DeviceArgs(
        correlation=_whole(found.get("correlation")),
        device=_whole(found.get("device")),
        stream=_whole(found.get("stream")),
        grid=_sizes(found.get("grid")),
        block=_sizes(found.get("block")),
        registers=_whole(found.get("registers per thread")),
        shared=_whole(found.get("shared memory")),
        occupancy=_percent(found.get("est. achieved occupancy %")),
        bytes=_whole(found.get("bytes")),
        graph_id=_whole(found.get("graph id")),
        src_kind=texts.get("src kind"),
        dst_kind=texts.get("dst kind"),
    )


def _device_event(
    kind: str, name: str, start: int, duration: int, thread: tuple[str, str], raw: msgspec.Raw
) -> DeviceEvent:
    args = _device_args(raw)
    if args.src_kind and args.dst_kind and kind == "memcpy" and "(" not in name:
        name = f"Memcpy ({args.src_kind} -> {args.dst_kind})"  # one writer puts both only here
    return DeviceEvent(
        name=name,
        start_ns=start,
        duration_ns=duration,
        thread=thread,
        kind=kind,
        correlation=args.correlation,
        device=args.device,
        stream=args.stream,
        grid=_usable(args.grid),
        block=_usable(args.block),
        registers=args.registers,
        shared_memory_bytes=args.shared,
        occupancy_shown=args.occupancy,
        bytes_moved=args.bytes,
        graph_id=args.graph_id or None,
    )


def _usable(sizes: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
    """A grid or block; None where it is all zeros, as some AMD writers leave it, or no size at all."""
    if sizes is None:
        return None
    x, y, z = sizes
    return sizes if 0 <= x < MOST_SIZE and 0 <= y < MOST_SIZE and 0 <= z < MOST_SIZE and (x or y or z) else None


def _sizes(value: object) -> tuple[int, int, int] | None:
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(n, int) for n in value):
        return None
    return value[0], value[1], value[2]


def _percent(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None


def _nest(ops: list[Op], calls: list[RuntimeCall]) -> None:
    """Give every op the op around it and every runtime call its op, thread by thread, by one sweep over starts."""
    threads: dict[tuple[str, str], list[Op | RuntimeCall]] = {}
    everything: list[Op | RuntimeCall] = [*ops, *calls]
    for event in everything:
        found = threads.get(event.thread)
        if found is None:
            found = threads[event.thread] = []
        found.append(event)
    for events in threads.values():
        events.sort(key=START)  # stable: at equal starts the longer op stays outside, and ops outside runtime calls
        stack: list[Op] = []
        ends: list[int] = []
        for event in events:
            start, duration = event.start_ns, event.duration_ns
            end = start + (duration or 1)
            while ends and ends[-1] < end:
                ends.pop()
                stack.pop()
            if event.__class__ is RuntimeCall:
                event.op = stack[-1] if stack else None
                continue
            op: Op = event  # type: ignore[assignment]
            if stack:
                around = op.parent = stack[-1]
                around.children_ns += duration
                around.children.append(op)
            if len(stack) < MOST_DEPTH:
                stack.append(op)
                ends.append(start + duration)


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
