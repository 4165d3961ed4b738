"""Stage 6: read a Chrome trace file into tidy, linked events.

Reads a file, writes a :class:`~attnscope.trace.events.Trace`. Imports neither torch nor an implementation. Takes both
roots (an object with ``traceEvents`` or a bare list), gzip by its magic bytes, the category names of every age,
timestamps as whole numbers, decimals or text. What is damaged is left out and said.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from attnscope.errors import TraceError
from attnscope.trace.blocks import Blocks, Slices, lines_until
from attnscope.trace.collector import Collector
from attnscope.trace.container import Container, Outcome
from attnscope.trace.events import DeviceProperties, Trace
from attnscope.trace.halves import read_in_halves
from attnscope.trace.linking import START, link, link_by_flows, needs_flows, nest, say_unlinked

STRANGE_NAMED = 4  # categories of another program that are shown
FEWEST_THREADS = 1024  # that a multiprocessor of any card holds
# What the root of a trace says about versions; of the rest nothing is kept.
KEPT_META = frozenset((
    "schemaVersion", "cuda_runtime_version", "cuda_driver_version", "cupti_version", "hip_runtime_version",
    "hip_driver_version", "roctracer_version", "rocprofiler-sdk_version", "record_shapes", "with_stack",
    "with_modules", "profile_memory", "baseTimeNanoseconds", "torch_version", "pytorch_version", "PYTORCH_VERSION",
))  # fmt: skip


def read_trace(path: Path | str) -> Trace:
    """The trace in a file, gzipped or not. A large one that is not packed is read by two processes.

    Raises:
        TraceError: the file cannot be read, holds no whole event, or is no Chrome trace.
    """
    path = Path(path)
    blocks = Blocks(path)
    try:
        with _no_collection():
            collector, outcome = read_in_halves(path) or _read(blocks, str(path))
            trace = _assemble(collector, outcome, blocks, str(path))
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
    blocks = Slices(data)
    with _no_collection():
        return _assemble(*_read(blocks, where), blocks, where)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector of cycles is off meanwhile: it would look through millions of events again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _read(blocks: Iterable[bytes], where: str) -> tuple[Collector, Outcome]:
    container, collector = Container(blocks, where), Collector()
    collector.add_all(container.batches())
    return collector, container.outcome


def _assemble(collector: Collector, outcome: Outcome, blocks: Iterable[bytes], where: str) -> Trace:
    """The whole trace from its events. ``blocks`` are gone through again where a damage's line is asked for."""
    if not outcome.ended and not outcome.whole and not outcome.damaged:
        raise TraceError(
            f"{where} is no Chrome trace that can be read: it ends before its first whole event\n"
            "hint: copy or record it again"
        )
    if collector.event_list and not collector.kinds:
        raise TraceError(
            f"{where} is an export of torch.autograd.profiler's list of events, which names neither kernels nor "
            "launches\nhint: record it with torch.profiler, whose export_chrome_trace does"
        )
    if collector.strange(outcome.meta):
        shown = sorted("".join(filter(str.isprintable, one[:40])) for one in collector.kinds)
        named = ", ".join(shown[:STRANGE_NAMED])
        raise TraceError(
            f"{where} is a Chrome trace of another program: none of its categories ({named}) is one that PyTorch's "
            "profiler writes\nhint: torch.profiler's export_chrome_trace writes cpu_op, kernel and others"
        )
    if outcome.whole + outcome.damaged and not collector.kinds:
        raise TraceError(
            f"{where} is no Chrome trace that can be read: none of its events has a start, a length and a "
            "category\nhint: torch.profiler's export_chrome_trace writes such events"
        )
    trace = collector.finish()
    trace.problems[:0] = outcome.problems(lambda offset: lines_until(blocks, offset))
    trace.devices = _device_properties(outcome.meta.get("deviceProperties"))
    trace.meta = {k: v for k, v in outcome.meta.items() if isinstance(v, str | int | float) and k in KEPT_META}
    trace.has_environment = outcome.environment or collector.environment
    for events in (trace.ops, trace.runtime_calls, trace.device_events, trace.modules):
        _sort(events)
    scopes = trace.ops
    if trace.modules:
        scopes = [*trace.modules, *trace.ops]
        _sort(scopes)
    nest(scopes, trace.runtime_calls)
    link(trace)
    if needs_flows(trace):
        link_by_flows(trace, collector.flows(blocks))
    say_unlinked(trace)
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
