"""Stage 6: read a Chrome trace file into tidy, linked events.

Reads a file, writes a :class:`~attnscope.trace.events.Trace`. Imports neither torch nor an implementation. Takes both
roots (an object with ``traceEvents`` or a bare list), gzip by its magic bytes, the category names of every age,
timestamps as whole numbers, decimals or text.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import msgspec

from attnscope.errors import TraceError
from attnscope.trace.events import DeviceEvent, DeviceProperties, Op, RuntimeCall, Trace, decode_args

GZIP_MAGIC = b"\x1f\x8b"
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
}


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: int | float | str | None = None
    dur: int | float | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Root(msgspec.Struct, rename="camel"):
    trace_events: list[_Event] | msgspec.UnsetType = msgspec.UNSET
    device_properties: msgspec.Raw = msgspec.Raw(b"[]")


def read_trace(path: Path | str) -> Trace:
    """The trace in a file, gzipped or not.

    Raises:
        TraceError: the file cannot be read, is damaged, or is no Chrome trace.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if data[:2] == GZIP_MAGIC:
            data = gzip.decompress(data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path} is a damaged gzip file: {error}\nhint: copy or record it again") from None
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror or error}") from None
    return parse_trace(data, str(path))


def parse_trace(data: bytes, where: str = "trace") -> Trace:
    """The trace in a JSON document; ``where`` names it in errors. Raises TraceError."""
    root = _decode(data, where)
    if root.trace_events is msgspec.UNSET:
        raise TraceError(
            f"{where} must be a Chrome trace with a list traceEvents, and has none\n"
            "hint: torch.profiler's export_chrome_trace writes one"
        )
    trace = Trace(devices=_device_properties(root.device_properties))
    _collect(root.trace_events, trace)
    for events in (trace.ops, trace.runtime_calls, trace.device_events):
        events.sort(key=lambda e: (e.start_ns, -e.duration_ns))
    _nest(trace.ops, trace.runtime_calls)
    _link(trace)
    return trace


def _decode(data: bytes, where: str) -> _Root:
    try:
        if data.lstrip()[:1] == b"[":
            return _Root(trace_events=msgspec.json.decode(data, type=list[_Event]))
        return msgspec.json.decode(data, type=_Root)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{where} is no Chrome trace that can be read: {error}") from None


def _device_properties(raw: msgspec.Raw) -> list[DeviceProperties]:
    try:
        return msgspec.json.decode(raw, type=list[DeviceProperties])
    except msgspec.DecodeError:
        return []


def _collect(events: list[_Event], trace: Trace) -> None:
    """Sort events into the trace's lists; count what cannot be placed in time."""
    base_us = _base_us(events)
    unplaced = 0
    for event in events:
        kind = CATEGORIES.get(event.cat.lower()) if event.ph == "X" else None
        if kind is None:
            continue
        start, duration = _ns(event.ts, base_us), _ns(event.dur, 0)
        if start is None or duration is None or duration < 0:
            unplaced += 1
            continue
        thread = (str(event.pid), str(event.tid).lstrip("-"))
        common: dict[str, Any] = {
            "name": event.name, "start_ns": start, "duration_ns": duration, "thread": thread
        }  # fmt: skip
        if kind in ("op", "annotation"):
            op = Op(**common, is_annotation=kind == "annotation", raw_args=bytes(event.args), children=[])
            trace.ops.append(op)
        elif kind == "runtime":
            correlation = decode_args(bytes(event.args)).get("correlation")
            trace.runtime_calls.append(RuntimeCall(**common, correlation=_whole(correlation)))
        else:
            trace.device_events.append(_device_event(kind, common, decode_args(bytes(event.args))))
    if unplaced:
        trace.problems.append(f"{unplaced} events without a usable time or duration are left out")


def _base_us(events: list[_Event]) -> int:
    """Whole microseconds to subtract before scaling.

    A double holds a time of 100 days to a quarter nanosecond; subtracting a whole number from it is exact, scaling is
    not. So the difference is scaled, and rounding gives the very nanosecond that the writer meant.
    """
    times = (_number(event.ts) for event in events if event.ph == "X")
    return math.floor(min((t for t in times if t is not None), default=0.0))


def _ns(value: int | float | str | None, base_us: int) -> int | None:
    number = _number(value)
    return None if number is None else round((number - base_us) * 1000)


def _number(value: int | float | str | None) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if value is None or not math.isfinite(value):
        return None
    return value


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _device_event(kind: str, common: dict[str, Any], args: dict[str, Any]) -> DeviceEvent:
    return DeviceEvent(
        **common,
        kind=kind,
        correlation=_whole(args.get("correlation")),
        device=_whole(args.get("device")),
        stream=_whole(args.get("stream")),
        grid=_sizes(args.get("grid")),
        block=_sizes(args.get("block")),
        registers=_whole(args.get("registers per thread")),
        shared_memory_bytes=_whole(args.get("shared memory")),
        occupancy_shown=_percent(args.get("est. achieved occupancy %")),
        bytes_moved=_whole(args.get("bytes")),
        graph_id=_whole(args.get("graph id")),
    )


def _sizes(value: object) -> tuple[int, ...] | None:
    """A grid or block; None where it is missing or all zeros, as some AMD writers leave it."""
    if not isinstance(value, list) or not all(isinstance(n, int) for n in value) or not any(value):
        return None
    return tuple(value)


def _percent(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


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
            while stack and stack[-1].end_ns < max(event.end_ns, event.start_ns + 1):
                stack.pop()
            around = stack[-1] if stack else None
            if isinstance(event, RuntimeCall):
                event.op = around
                continue
            if around is not None:
                event.parent = around
                around.children_ns += event.duration_ns
                around.children.append(event)
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
