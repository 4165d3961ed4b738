"""Stage 6: a large file read by two processes, each its half of the events.

Reads a file, writes what :mod:`attnscope.trace.reader` makes the trace from. Imports neither torch nor an
implementation. The second process runs this module: it reads the file from an event near the middle on, and leaves its
events, typed and packed, in a file without a name that the first takes up when it is through with its own half.
Whatever does not fit this (one core, an archive, a list of events that ends early) is left to one process.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import IO

import msgspec

from attnscope.errors import TraceError
from attnscope.trace.blocks import GZIP_MAGIC, Blocks
from attnscope.trace.collector import Collector
from attnscope.trace.container import BOUNDARY, Container, Outcome
from attnscope.trace.events import DeviceEvent, Interval, Op, RuntimeCall

SMALLEST_BYTES = 96 << 20  # below, starting a process costs what it saves
OWN_SHARE = 0.53  # of the file: the second process starts later and packs what it read
SEARCHED_BYTES = 1 << 20
EVENTS_SENT = 50_000
LENGTH_BYTES = 8
SECOND = "from attnscope.trace.halves import read_second; read_second()"  # the second process's program


class _Part(msgspec.Struct, array_like=True):
    """Some of the second process's events. The last part tells what its half came to."""

    base_us: int | None
    ops: list[Op]
    modules: list[Op]
    runtime_calls: list[RuntimeCall]
    device_events: list[DeviceEvent]
    earliest_ns: int = 0
    unplaced: int = 0
    kinds: dict[str, str | None] = {}
    outcome: Outcome | None = None


def read_in_halves(path: Path) -> tuple[Collector, Outcome] | None:
    """The events of a large file and what reading came to; None where one process should read it."""
    middle = _middle(path) if _cores() > 1 else None
    if middle is None:
        return None
    import subprocess
    import tempfile

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(one or os.getcwd() for one in sys.path)}
    command = [sys.executable, "-c", SECOND, str(path), str(middle)]
    with (
        tempfile.TemporaryFile() as answer,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=answer, stderr=subprocess.DEVNULL, env=environment
        ) as second,
    ):
        collector, outcome = Collector(), None
        try:
            container = Container(Blocks(path, 0, middle), str(path))
            collector.add_all(container.batches())
            outcome = None if container.outcome.ended else container.outcome
        except TraceError:
            return None  # one process will say what it is
        finally:
            if outcome is None:
                second.kill()
        if outcome is None or second.wait() != 0:
            return None
        answer.seek(0)
        return collector, _joined(collector, outcome, answer)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _middle(path: Path) -> int | None:
    """Where the second half's first event begins; None for a file that is small, packed or not readable."""
    try:
        size = path.stat().st_size
        if size < SMALLEST_BYTES:
            return None
        with path.open("rb") as file:
            if file.read(2) == GZIP_MAGIC:
                return None
            start = int(size * OWN_SHARE)
            file.seek(start)
            found = BOUNDARY.search(file.read(SEARCHED_BYTES))
    except OSError:
        return None
    return start + found.end() if found else None


def _joined(collector: Collector, outcome: Outcome, answer: IO[bytes]) -> Outcome:
    """Both halves. The second half's texts become those of the first where they are equal."""
    decoder = msgspec.msgpack.Decoder(_Part)
    trace, shift = collector.trace, 0
    while length := int.from_bytes(answer.read(LENGTH_BYTES), "little"):
        part = decoder.decode(answer.read(length))
        if part.base_us is not None:
            collector.base_us = part.base_us if collector.base_us is None else collector.base_us
            shift = (part.base_us - collector.base_us) * 1000
        _shared(collector, part, shift)
        trace.ops += part.ops
        trace.modules += part.modules
        trace.runtime_calls += part.runtime_calls
        trace.device_events += part.device_events
        if part.outcome is not None:
            collector.earliest_ns = min(collector.earliest_ns, part.earliest_ns + shift)
            collector.unplaced += part.unplaced
            collector.kinds |= part.kinds
            outcome.add(part.outcome)
    return outcome


def _shared(collector: Collector, part: _Part, shift_ns: int) -> None:
    names: dict[object, str] = collector.names
    threads: dict[tuple[str, str], tuple[str, str]] = {}
    kinds: tuple[list[Op] | list[RuntimeCall] | list[DeviceEvent], ...] = (
        part.ops, part.modules, part.runtime_calls, part.device_events
    )  # fmt: skip
    for events in kinds:
        event: Interval
        for event in events:
            event.start_ns += shift_ns
            event.name = names.setdefault(event.name, event.name)
            event.thread = threads.setdefault(event.thread, event.thread)
    args = collector.op_args
    for op in part.ops:
        op.raw_args = args.setdefault(op.raw_args, op.raw_args)


def read_second() -> None:
    """The second process: read the file of its first argument from the byte of its second argument on."""
    gc.disable()
    path, start, answer = Path(sys.argv[1]), int(sys.argv[2]), sys.stdout.buffer
    container, collector = Container(Blocks(path, start), str(path), inside=start), Collector()
    for batch in container.batches():
        collector.add(batch)
        batch.clear()
        if len(collector.trace.ops) + len(collector.trace.device_events) > EVENTS_SENT:
            _send(collector, None, answer)
    container.outcome.environment |= collector.environment
    _send(collector, container.outcome, answer)


def _send(collector: Collector, outcome: Outcome | None, answer: IO[bytes]) -> None:
    trace = collector.trace
    lists = (trace.ops, trace.modules, trace.runtime_calls, trace.device_events)
    part = _Part(collector.base_us, *lists, collector.earliest_ns, collector.unplaced, collector.kinds, outcome)
    packed = msgspec.msgpack.encode(part)
    answer.write(len(packed).to_bytes(LENGTH_BYTES, "little"))
    answer.write(packed)
    for events in lists:
        events.clear()
