"""Stage 6: written events become the trace's lists, their times whole nanoseconds.

Reads RawEvent lists, writes Op, RuntimeCall and DeviceEvent. Imports neither torch nor an implementation. What is said
of shapes, dtypes and values is kept once for all ops of which the same is said: a large trace repeats it endlessly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated

import msgspec

from attnscope.trace.container import Container, RawEvent, holds_environment
from attnscope.trace.events import DeviceEvent, Op, RuntimeCall, Trace, decode_args
from attnscope.trace.linking import Flows

MODULE = "nn.Module: "
MOST_NAME = 4096
MOST_SIZE = 1 << 32  # of a grid or block
MOST_US = 4e15  # of a time or duration: a hundred years, so that nanoseconds fit 64 bits
MOST_WHOLE = 1 << 63
MOST_PERCENT = 1e9
MOST_SHARED = 100_000  # kinds of inputs that are kept apart
FLOW_CATEGORIES = ("ac2g", "async", "async_gpu", "async_cpu_to_gpu")
UNNAMED = "unnamed"
EVENT_LIST_PIDS = ("CPU functions", "CUDA functions")
UNSEEN = ""  # a category that was not looked up yet
Thread = tuple[str, str]  # pid, tid

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
# What PyTorch writes besides, of which nothing is kept.
OTHER_CATEGORIES = frozenset((
    "gpu_user_annotation", "trace", "overhead", "cuda_sync", "cuda_event", "cuda_profiler_range", "collective_comm",
    "cpu_instant_event", "privateuse1_runtime", "privateuse1_driver", "mtia_ccp_events", "mtia_insight", "hpu_op",
    "xpu_driver", "fwdbwd", *FLOW_CATEGORIES,
))  # fmt: skip
Whole = Annotated[int, msgspec.Meta(ge=-MOST_WHOLE, le=MOST_WHOLE - 1)]
Percent = Annotated[float, msgspec.Meta(ge=0, lt=MOST_PERCENT)]


class _CallArgs(msgspec.Struct, gc=False):
    correlation: Whole | None = None


class _DeviceArgs(msgspec.Struct, gc=False):
    """As writers mean them; args that are otherwise are read key by key."""

    correlation: Whole | None = None
    device: Whole | None = None
    stream: Whole | None = None
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: Whole | None = msgspec.field(default=None, name="registers per thread")
    shared: Whole | None = msgspec.field(default=None, name="shared memory")
    occupancy: Percent | None = msgspec.field(default=None, name="est. achieved occupancy %")
    bytes: Whole | None = None
    graph_id: Whole | None = msgspec.field(default=None, name="graph id")
    src_kind: str | None = msgspec.field(default=None, name="src kind")
    dst_kind: str | None = msgspec.field(default=None, name="dst kind")


_CALL_ARGS = msgspec.json.Decoder(_CallArgs)
_DEVICE_ARGS = msgspec.json.Decoder(_DeviceArgs)


class Collector:
    """Sorts events into the trace's lists and counts what cannot be placed in time.

    A double holds a time of 100 days to a quarter nanosecond; subtracting a whole number of microseconds from it is
    exact, scaling is not. So the difference to the first event is scaled, and rounding gives the very nanosecond that
    the writer meant.
    """

    def __init__(self) -> None:
        self.trace = Trace()
        self.base_us: int | None = None
        self.earliest_ns = 0
        self.unplaced = 0
        self.event_list = False  # whether an event is of torch.autograd.profiler's own list, which has no categories
        self.environment = False  # whether an event that describes the process carries environment variables
        self.threads: dict[tuple[object, object], tuple[str, str]] = {}
        self.names: dict[object, str] = {}
        self.kinds: dict[str, str | None] = {}
        self.op_args: dict[bytes, bytes] = {}

    def add_all(self, batches: Iterable[list[RawEvent]]) -> None:
        """Batch by batch, each let go of at once."""
        for batch in batches:
            self.add(batch)
            batch.clear()

    def add(self, events: list[RawEvent]) -> None:
        """Those of the events that are of a kind that counts."""
        kinds, names, threads, keep = self.kinds, self.names, self.threads, self._keep
        base = self.base_us
        for event in events:
            cat = event.cat
            kind = kinds.get(cat, UNSEEN)  # type: ignore[arg-type]  # nothing is kept under None
            if kind is None:
                continue
            if event.ph != "X":
                if event.ph == "M" and not self.environment:
                    self.environment = holds_environment(bytes(event.args))
                continue
            if kind is UNSEEN:
                if not cat:
                    self.event_list = self.event_list or event.pid in EVENT_LIST_PIDS
                    continue
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
            start = round((ts - base) * 1000)
            if start < self.earliest_ns:
                self.earliest_ns = start
            lane = (event.pid, event.tid)
            thread = threads.get(lane)
            if thread is None:
                thread = threads[lane] = (str(event.pid), str(event.tid).lstrip("-"))
            name = names.get(written)
            if name is None:
                name = names[written] = UNNAMED if written is None else str(written)[:MOST_NAME]
            keep(kind, name, start, round(dur * 1000), thread, event.args)

    def strange(self, meta: dict[str, object]) -> bool:
        """Whether all categories are another program's; a root with PyTorch's keys is believed."""
        if not self.kinds or "schemaVersion" in meta or "deviceProperties" in meta:
            return False
        return not any(kind is not None or cat.lower() in OTHER_CATEGORIES for cat, kind in self.kinds.items())

    def flows(self, blocks: Iterable[bytes]) -> Flows:
        """The arrows between calls and device events, read in a second run; places count as the trace's do."""
        flows, base = Flows(), self.base_us or 0
        for batch in Container(blocks, "").batches():
            for event in batch:
                number, ts = event.id, _number(event.ts)
                if event.cat not in FLOW_CATEGORIES or number.__class__ is not int or ts is None:
                    continue
                if not -MOST_US < ts < MOST_US:
                    continue
                thread = (str(event.pid), str(event.tid).lstrip("-"))
                place = (thread, round((ts - base) * 1000) + self.shift_ns)
                if event.ph == "s":
                    flows.begins.setdefault(number, place)
                elif event.ph == "f":
                    flows.ends.setdefault(place, number)
        return flows

    def _keep(
        self, kind: str, name: str, start: int, duration: int, thread: tuple[str, str], args: msgspec.Raw
    ) -> None:
        trace = self.trace
        if kind == "op" or kind == "annotation":
            trace.ops.append(Op(name, start, duration, thread, kind == "annotation", False, self._shared(args)))
        elif kind == "runtime":
            trace.runtime_calls.append(RuntimeCall(name, start, duration, thread, _call_correlation(args)))
        elif kind == "python":
            trace.modules.append(Op(name[len(MODULE) :], start, duration, thread, True, True))
        else:
            trace.device_events.append(_device_event(kind, name, start, duration, thread, args))

    def _shared(self, raw: msgspec.Raw) -> bytes:
        """An op's args without the numbers that are its own; the very same object where another op's are equal."""
        written = bytes(raw)
        values = written.find(b'"Concrete Inputs"')
        begin = written.find(b'"Input ', 0, values if values >= 0 else None)
        if begin < 0:
            begin = values
        if begin < 0:
            return written
        key = written[begin : written.rfind(b'"Ev Idx"')]  # without it: but for the closing brace
        found = self.op_args.get(key)
        if found is None:
            found = b"{" + key.rstrip(b", \r\n\t}") + b"}"
            if len(self.op_args) >= MOST_SHARED or not decode_args(found):
                return written
            self.op_args[key] = found
        return found

    @property
    def shift_ns(self) -> int:
        """By how much later everything starts in the finished trace, so that nothing starts before zero."""
        return -(self.earliest_ns // 1000) * 1000 if self.earliest_ns < 0 else 0

    def finish(self) -> Trace:
        """The trace, counted from its earliest event, and what was left out of it."""
        if self.earliest_ns < 0:
            for event in self.trace.events():
                event.start_ns += self.shift_ns
        if self.unplaced:
            self.trace.problems.append(f"{self.unplaced} events without a usable time or duration are left out")
        return self.trace


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
    usable = isinstance(value, int) and not isinstance(value, bool) and -MOST_WHOLE <= value < MOST_WHOLE
    return value if usable else None  # type: ignore[return-value]


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
        name, start, duration, thread, kind, args.correlation, args.device, args.stream, None, _usable(args.grid),
        _usable(args.block), args.registers, args.shared, args.occupancy, args.bytes, args.graph_id or None,
    )  # fmt: skip


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
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST_PERCENT
    return float(value) if usable else None  # type: ignore[arg-type]
