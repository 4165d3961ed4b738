"""Stage 6: a large file read by two processes, each its half of the events.

Reads a file, writes what :mod:`attnscope.trace.reader` makes the trace from. Imports neither torch nor an
implementation. The second process runs this module: it reads the file from an event near the middle on, and leaves its
events, typed and packed, in a file without a name that the first takes up when it is through with its own half.
An archive both unpack, the second as far as the middle for nothing, which takes a tenth of what reading events takes.
Whatever does not fit this (one core, a damaged archive, a list of events that ends early) is left to one process.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from attnscope.errors import TraceError
from attnscope.trace.blocks import GZIP_MAGIC, Blocks
from attnscope.trace.collector import MOST_SHARED, Collector, Thread
from attnscope.trace.container import BOUNDARY, Container, Outcome
from attnscope.trace.events import DeviceEvent, Interval, Op, RuntimeCall

SMALLEST_BYTES = 96 << 20  # below, starting a process costs what it saves
SMALLEST_PACKED_BYTES = 4 << 20  # traces pack to a tenth or a thirtieth
OWN_SHARE = 0.53  # of the file: the second process starts later and packs what it read
OWN_SHARE_PACKED = 0.56  # and of an archive it unpacks all
SEARCHED_BYTES = 1 << 20
EVENTS_SENT = 50_000
LENGTH_BYTES = 8
SECOND = "from attnscope.trace.halves import read_second; read_second()"  # the second process's program

T = TypeVar("T")


@dataclass(frozen=True)
class _Middle:
    """The byte at which an event begins, or how much of an archive is read before the second half begins."""

    place: int
    packed: bool


class _Ops(msgspec.Struct, array_like=True):
    """Ops, by columns: most events are ops. Texts, threads and args are places in what was sent of them so far."""

    names: list[int]
    starts_ns: list[int]
    durations_ns: list[int]
    threads: list[int]
    annotations: list[bool]
    args: list[int]


class _Part(msgspec.Struct, array_like=True):
    """Some of the second process's events, and what they name for the first time. The last part tells what its half
    came to."""

    base_us: int | None
    sent_before: tuple[int, int]  # names and args that its places count too; fewer than before where it starts anew
    names: list[str]
    threads: list[Thread]
    args: list[bytes]
    ops: _Ops
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
    command = [sys.executable, "-c", SECOND, str(path), str(middle.place), "packed" if middle.packed else "plain"]
    with (
        tempfile.TemporaryFile() as answer,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=answer, stderr=subprocess.DEVNULL, env=environment
        ) as second,
    ):
        collector, outcome = Collector(), None
        try:
            outcome = _read_first(path, middle, collector)
        except TraceError:
            return None  # one process will say what it is
        finally:
            if outcome is None:
                second.kill()
        if outcome is None or second.wait() != 0:
            return None
        answer.seek(0)
        return collector, _joined(collector, outcome, answer)


def _read_first(path: Path, middle: _Middle, collector: Collector) -> Outcome | None:
    """What reading the first half came to; None where the list of events, or the archive, ends in it."""
    blocks = Blocks(path, 0, None if middle.packed else middle.place)
    container = Container(_Side(blocks, middle.place, behind=False) if middle.packed else blocks, str(path))
    collector.add_all(container.batches())
    return None if container.outcome.ended or blocks.damage else container.outcome


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _middle(path: Path) -> _Middle | None:
    """Where the second half begins; None for a file that is small or not readable."""
    try:
        size = path.stat().st_size
        if size < min(SMALLEST_BYTES, SMALLEST_PACKED_BYTES):
            return None
        with path.open("rb") as file:
            if file.read(2) == GZIP_MAGIC:
                return _Middle(int(size * OWN_SHARE_PACKED), packed=True)
            if size < SMALLEST_BYTES:
                return None
            start = int(size * OWN_SHARE)
            file.seek(start)
            found = BOUNDARY.search(file.read(SEARCHED_BYTES))
    except OSError:
        return None
    return _Middle(start + found.end(), packed=False) if found else None


class _Side:
    """The unpacked blocks of an archive before, or with ``behind`` from, the first event whose block needed more than
    so many packed bytes. Both processes find the same place. ``offset`` is that event's first byte once it is found."""

    def __init__(self, blocks: Blocks, packed_bytes: int, *, behind: bool) -> None:
        self.offset: int | None = None
        self._blocks = blocks
        self._packed_bytes = packed_bytes
        self._behind = behind

    def __iter__(self) -> Iterator[bytes]:
        passed = 0
        for block, packed in self._blocks.inflated():
            found = BOUNDARY.search(block) if self.offset is None and packed > self._packed_bytes else None
            if found is not None:
                self.offset = passed + found.end()
                yield block[found.end() :] if self._behind else block[: found.end()]
                if not self._behind:
                    return
            elif (self.offset is not None) == self._behind:
                yield block
            passed += len(block)


def _joined(collector: Collector, outcome: Outcome, answer: IO[bytes]) -> Outcome:
    """Both halves. The second half's texts become those of the first where they are equal."""
    decoder = msgspec.msgpack.Decoder(_Part)
    trace, shift, shared = collector.trace, 0, _Shared(collector)
    while length := int.from_bytes(answer.read(LENGTH_BYTES), "little"):
        part = decoder.decode(answer.read(length))
        if part.base_us is not None:
            collector.base_us = part.base_us if collector.base_us is None else collector.base_us
            shift = (part.base_us - collector.base_us) * 1000
        trace.ops += shared.ops(part, shift)
        for events in (part.modules, part.runtime_calls, part.device_events):
            shared.take(events, shift)
        trace.modules += part.modules
        trace.runtime_calls += part.runtime_calls
        trace.device_events += part.device_events
        if part.outcome is not None:
            collector.earliest_ns = min(collector.earliest_ns, part.earliest_ns + shift)
            collector.unplaced += part.unplaced
            collector.kinds |= part.kinds
            outcome.add(part.outcome)
    return outcome


class _Shared:
    """Texts, threads and args of the second process, each the first's own object where it has an equal one."""

    def __init__(self, collector: Collector) -> None:
        self._known_names: dict[object, str] = collector.names
        self._known_args = collector.op_args
        self._known_threads = {thread: thread for thread in collector.threads.values()}
        self._names: list[str] = []
        self._threads: list[Thread] = []
        self._args: list[bytes] = []

    def ops(self, part: _Part, shift_ns: int) -> Iterator[Op]:
        """A part's ops; parts come in order."""
        del self._names[part.sent_before[0] :], self._args[part.sent_before[1] :]
        self._names += [self._known_names.setdefault(name, name) for name in part.names]
        self._threads += [self._known_threads.setdefault(thread, thread) for thread in part.threads]
        self._args += [self._known_args.setdefault(args, args) for args in part.args]
        names, threads, args = (each.__getitem__ for each in (self._names, self._threads, self._args))
        ops = part.ops
        starts = [start + shift_ns for start in ops.starts_ns] if shift_ns else ops.starts_ns
        return map(Op, map(names, ops.names), starts, ops.durations_ns, map(threads, ops.threads), ops.annotations,
                   repeat(False), map(args, ops.args))  # fmt: skip

    def take(self, events: Sequence[Interval], shift_ns: int) -> None:
        """Events that were sent whole."""
        names, threads = self._known_names, self._known_threads
        for event in events:
            event.start_ns += shift_ns
            event.name = names.setdefault(event.name, event.name)
            event.thread = threads.setdefault(event.thread, event.thread)


def read_second() -> None:
    """The second process: read the file of its first argument from where its second and third arguments say on."""
    gc.disable()
    path, place, packed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "packed"
    blocks, start = Blocks(path, 0 if packed else place), place
    parts: Iterable[bytes] = blocks
    if packed:
        side = _Side(blocks, place, behind=True)
        following = iter(side)
        parts = chain((next(following, b""),), following)
        if side.offset is None:
            sys.exit("the archive holds no event there")
        start = side.offset
    collector, container = Collector(), Container(parts, str(path), inside=start)
    sender = _Sender(collector, sys.stdout.buffer)
    for batch in container.batches():
        collector.add(batch)
        batch.clear()
        if len(collector.trace.ops) + len(collector.trace.device_events) > EVENTS_SENT:
            sender.send(None)
    if blocks.damage:
        sys.exit(blocks.damage)
    container.outcome.environment |= collector.environment
    sender.send(container.outcome)


class _Sender:
    """Packs the events that were collected since the last time."""

    def __init__(self, collector: Collector, answer: IO[bytes]) -> None:
        self._collector = collector
        self._answer = answer
        self._names: dict[str, int] = {}
        self._threads: dict[Thread, int] = {}
        self._args: dict[bytes, int] = {}

    def send(self, outcome: Outcome | None) -> None:
        """A part; with an outcome the last."""
        collector, trace = self._collector, self._collector.trace
        if len(self._args) > MOST_SHARED or len(self._names) > MOST_SHARED:
            self._names, self._args = {}, {}  # nearly all are new: to keep them would only fill memory
        names, threads, args = len(self._names), len(self._threads), len(self._args)
        ops = _Ops(
            _places(self._names, [op.name for op in trace.ops]),
            [op.start_ns for op in trace.ops],
            [op.duration_ns for op in trace.ops],
            _places(self._threads, [op.thread for op in trace.ops]),
            [op.is_annotation for op in trace.ops],
            _places(self._args, [op.raw_args for op in trace.ops]),
        )
        part = _Part(
            base_us=collector.base_us,
            sent_before=(names, args),
            names=[*islice(self._names, names, None)],
            threads=[*islice(self._threads, threads, None)],
            args=[*islice(self._args, args, None)],
            ops=ops,
            modules=trace.modules,
            runtime_calls=trace.runtime_calls,
            device_events=trace.device_events,
            earliest_ns=collector.earliest_ns,
            unplaced=collector.unplaced,
            kinds=collector.kinds,
            outcome=outcome,
        )
        packed = msgspec.msgpack.encode(part)
        self._answer.write(len(packed).to_bytes(LENGTH_BYTES, "little"))
        self._answer.write(packed)
        for events in (trace.ops, trace.modules, trace.runtime_calls, trace.device_events):
            events.clear()


def _places(known: dict[T, int], values: list[T]) -> list[int]:
    """Where each value stands among those that are known by now."""
    return [known.setdefault(value, len(known)) for value in values]
