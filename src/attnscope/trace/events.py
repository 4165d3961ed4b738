"""Stage 6: what a trace holds, tidy. Times are whole nanoseconds since the trace's first event.

The same types carry our own traces and a stranger's. Links are made by the reader: device event -> runtime call by
correlation, runtime call -> op by thread and nesting; the trace's ``External id`` is not used, because many traces
carry a wrong one (kineto#1001). Imports neither torch nor an implementation.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec

from attnscope.trace.container import finite

OUR_LABEL = "attnscope/"
STEP_NAME = "ProfilerStep#"


class Interval(msgspec.Struct, eq=False, array_like=True):
    """Something with a name, a start and a length, on a thread or stream."""

    name: str
    start_ns: int
    duration_ns: int
    thread: tuple[str, str]

    @property
    def end_ns(self) -> int:
        """Where it ends."""
        return self.start_ns + self.duration_ns

    @property
    def duration_us(self) -> float:
        """Its length in microseconds."""
        return self.duration_ns / 1e3


class Op(Interval, eq=False):
    """A CPU op or, with ``is_annotation``, a record_function scope; ``parent`` encloses it on its thread.

    With ``is_module`` too it is the forward of an ``nn.Module``, which only a trace with Python stacks holds.

    ``raw_args`` is what the event's JSON says of the inputs, decoded when asked for: most events of a large trace never
    are. Ops with the same inputs share it.
    """

    is_annotation: bool = False
    is_module: bool = False
    raw_args: bytes = b"{}"
    parent: Op | None = None
    children_ns: int = 0
    children: Sequence[Op] = ()

    @property
    def self_ns(self) -> int:
        """Its time without that of the ops inside it."""
        return max(self.duration_ns - self.children_ns, 0)

    def ancestors(self) -> Iterator[Op]:
        """This op, then what encloses it, innermost first."""
        op: Op | None = self
        while op is not None:
            yield op
            op = op.parent

    @property
    def args(self) -> dict[str, Any]:
        """What ``raw_args`` holds, shared with other ops: not to be changed. Empty where it is not an object."""
        return _decoded(self.raw_args)

    @property
    def arguments(self) -> tuple[list[list[int]] | None, list[str], list[str]]:
        """Shapes, dtypes and values as below, decoded once."""
        return read_arguments(self.raw_args)

    @property
    def shapes(self) -> list[list[int]] | None:
        """Input shapes in argument order ([] for what is no tensor); None where the trace recorded none."""
        return _shapes(self.args)

    @property
    def dtypes(self) -> list[str]:
        """Input types in argument order, as torch spells them (``c10::BFloat16``, ``float``, ``Scalar``)."""
        return _texts(self.args, "Input type")

    @property
    def strides(self) -> list[list[int]]:
        """Input strides in argument order."""
        found = self.args.get("Input Strides")
        return [_shape(one) for one in found] if isinstance(found, list) else []

    @property
    def values(self) -> list[str]:
        """Scalar arguments as text in argument order. Never evaluate them."""
        return _texts(self.args, "Concrete Inputs")


class RuntimeCall(Interval, eq=False):
    """A call into the CUDA or HIP runtime or driver: a launch, a copy, a synchronise. ``op`` is what made it."""

    correlation: int | None = None
    op: Op | None = None

    @property
    def launches(self) -> bool:
        """Whether it starts work on the device (no list of names: new launch functions keep appearing)."""
        return launches(self.name)


class DeviceEvent(Interval, eq=False):
    """A kernel, copy or fill on the device. ``launch`` is None where it was launched before the trace began."""

    kind: str
    correlation: int | None = None
    device: int | None = None
    stream: int | None = None
    launch: RuntimeCall | None = None
    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    registers: int | None = None
    shared_memory_bytes: int | None = None
    occupancy_shown: float | None = None
    bytes_moved: int | None = None
    graph_id: int | None = None

    @property
    def replayed(self) -> bool:
        """Whether a CUDA or HIP graph launched it: then it belongs to the graph, whatever op launched that."""
        return self.graph_id is not None or (self.launch is not None and "raphLaunch" in self.launch.name)

    @property
    def op(self) -> Op | None:
        """The innermost op or scope that launched it."""
        return self.launch.op if self.launch is not None else None


class DeviceProperties(msgspec.Struct, rename="camel"):
    """A device as the trace describes it; several writers leave fields out."""

    id: int = 0
    name: str = ""
    compute_major: int | None = None
    compute_minor: int | None = None
    num_sms: int | None = None
    warp_size: int = 32
    max_threads_per_multiprocessor: int | None = None
    regs_per_multiprocessor: int | None = None
    shared_mem_per_block: int | None = None
    shared_mem_per_block_optin: int | None = None
    shared_mem_per_multiprocessor: int | None = None
    total_global_mem: int | None = None


@dataclass
class Step:
    """One labelled interval with what ran in it: ops that started in it, device events launched in it, in order."""

    name: str
    start_ns: int
    end_ns: int
    ops: list[Op]
    device_events: list[DeviceEvent]

    @property
    def duration_us(self) -> float:
        """Host time between the label's ends."""
        return (self.end_ns - self.start_ns) / 1e3

    @property
    def device_us(self) -> float:
        """Sum of the device events' times (not the union of their intervals)."""
        return sum(e.duration_ns for e in self.device_events) / 1e3


@dataclass
class Trace:
    """A whole trace. ``ops`` holds annotations too; every list is sorted by start. ``problems`` are sentences.

    ``modules`` are nested around the ops and in no other list. ``meta`` is what the root says besides its events, names
    and numbers only. ``has_environment`` marks a file that carries environment variables, which nothing here repeats.
    """

    ops: list[Op] = field(default_factory=list)
    runtime_calls: list[RuntimeCall] = field(default_factory=list)
    device_events: list[DeviceEvent] = field(default_factory=list)
    devices: list[DeviceProperties] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    modules: list[Op] = field(default_factory=list)
    meta: dict[str, str | int | float] = field(default_factory=dict)
    has_environment: bool = False

    def events(self) -> Iterator[Interval]:
        """Everything that has a time."""
        return chain(self.ops, self.modules, self.runtime_calls, self.device_events)

    @property
    def annotations(self) -> list[Op]:
        """The record_function scopes."""
        return [op for op in self.ops if op.is_annotation]

    @property
    def labels(self) -> list[str]:
        """Names of our own step labels, each once, in order."""
        return list(dict.fromkeys(a.name for a in self.annotations if a.name.startswith(OUR_LABEL)))

    def steps(self, label: str) -> list[Step]:
        """The intervals named ``label`` (``ProfilerStep#`` matches every step number), with what ran in them.

        A device event belongs to the interval in which its launch began, whenever it ran: so kernels of an earlier
        step that are still running when this one opens do not count.
        """
        wanted = [
            a for a in self.annotations if a.name == label or (label == STEP_NAME and a.name.startswith(STEP_NAME))
        ]
        starts = [op.start_ns for op in self.ops]
        launched = sorted((e for e in self.device_events if e.launch is not None), key=_launch_start)
        launch_starts = [_launch_start(e) for e in launched]
        found = []
        for scope in wanted:
            ops = self.ops[bisect_left(starts, scope.start_ns) : bisect_left(starts, scope.end_ns)]
            inside = slice(bisect_left(launch_starts, scope.start_ns), bisect_left(launch_starts, scope.end_ns))
            events = sorted(launched[inside], key=lambda e: e.start_ns)
            around = {id(op) for op in scope.ancestors()}
            found.append(
                Step(scope.name, scope.start_ns, scope.end_ns, [op for op in ops if id(op) not in around], events)
            )
        return found

    def spilled(self) -> list[DeviceEvent]:
        """Device events launched before the trace's first step: the warm-up's, still running when recording began."""
        steps = [a.start_ns for a in self.annotations if a.name.startswith((STEP_NAME, OUR_LABEL))]
        first = min(steps, default=0)
        return [e for e in self.device_events if e.launch is None or e.launch.start_ns < first]

    def device(self, index: int | None) -> DeviceProperties | None:
        """The properties of that device, or of the only one there is."""
        for device in self.devices:
            if device.id == index:
                return device
        return self.devices[0] if len(self.devices) == 1 else None


def read_arguments(raw_args: bytes) -> tuple[list[list[int]] | None, list[str], list[str]]:
    """Shapes, dtypes and values of an op with these args."""
    args = _decoded(raw_args)
    return _shapes(args), _texts(args, "Input type"), _texts(args, "Concrete Inputs")


def launches(name: str) -> bool:
    """Whether a runtime call of this name starts work on the device."""
    return "aunch" in name or "emcpy" in name or "emset" in name


def decode_args(raw: bytes) -> dict[str, Any]:
    """An event's args as a dict, broken text mended; empty where they are missing or no object."""
    try:
        found = msgspec.json.decode(raw) if raw else {}
    except (msgspec.DecodeError, RecursionError):
        try:
            found = finite(json.loads(raw.decode("utf-8", "replace"), strict=False))
        except (ValueError, RecursionError):
            return {}
    return found if isinstance(found, dict) else {}


_decoded = functools.lru_cache(maxsize=4096)(decode_args)


def _shapes(args: dict[str, Any]) -> list[list[int]] | None:
    found = args.get("Input Dims", args.get("Input dims"))
    return [_shape(one) for one in found] if isinstance(found, list) else None


def _texts(args: dict[str, Any], key: str) -> list[str]:
    found = args.get(key)
    return [str(one) for one in found] if isinstance(found, list) else []


def _shape(value: object) -> list[Any]:
    """A tensor's sizes, for a list of tensors the lists of theirs; [] for what is neither."""
    return value if isinstance(value, list) else []


def _launch_start(event: DeviceEvent) -> int:
    return event.launch.start_ns if event.launch is not None else -1
