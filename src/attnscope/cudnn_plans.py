"""Stage 2: plans of cuDNN's graphs: built once per spec, kept, run on torch's current stream with their workspace.

Reads GraphSpec, writes what cuDNN computes into the caller's tensors. Must not import an implementation or a later
stage; imports torch only inside functions.

A plan is kept in a bounded cache that threads may share. A plan needs scratch memory: there is one buffer for each
device and stream, which grows to the largest plan that ran there.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attnscope.cudnn import UIDS, GraphSpec, describe, load_frontend, plan_graph, sentence_of, show_version
from attnscope.errors import PrepareFailed

LEAST_BYTES = 16
CAPACITY = 256  # plans; cuDNN keeps a compiled kernel for each


@dataclass
class Plan:
    """A graph that can run. One thread at a time: the frontend keeps state of a call in the graph."""

    graph: Any
    spec: GraphSpec
    workspace_bytes: int
    build_s: float
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)


def build_plan(spec: GraphSpec) -> Plan:
    """Describe, plan and compile ``spec``: tens of milliseconds to seconds.

    Raises:
        PrepareFailed: cuDNN cannot, in one sentence that says why.
    """
    cudnn = load_frontend()
    started = time.perf_counter()
    try:
        with on_device(spec.device_index), _Handle(cudnn, spec.device_index) as handle:
            graph = describe(cudnn, spec, handle=handle)
            plan_graph(cudnn, graph)
            workspace_bytes = int(graph.get_workspace_size())
    except Exception as error:  # the frontend raises ValueError, RuntimeError, its own and more
        version = show_version(int(cudnn.backend_version()))
        raise PrepareFailed(f"cuDNN {version} cannot plan this {spec.direction}: {sentence_of(error)}") from error
    return Plan(graph, spec, workspace_bytes, time.perf_counter() - started)


# --- keeping ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheStatistics:
    """What a cache did since it was made or cleared."""

    hits: int
    misses: int
    evictions: int
    size: int
    capacity: int

    @property
    def hit_rate(self) -> float | None:
        """Hits over lookups; None before the first."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None


class PlanCache:
    """Plans by spec, the least recently used dropped beyond ``capacity``. Threads may share it: a spec is built once,
    builds wait for each other, and hits wait for no build."""

    def __init__(self, build: Callable[[GraphSpec], Plan] = build_plan, capacity: int = CAPACITY) -> None:
        self._build, self._capacity = build, capacity
        self._kept: OrderedDict[GraphSpec, Plan] = OrderedDict()
        self._lock, self._building = threading.Lock(), threading.Lock()
        self._hits = self._misses = self._evictions = 0

    def get(self, spec: GraphSpec) -> Plan:
        """The plan, built now if it is not kept. Raises PrepareFailed; a failure is not kept."""
        if (plan := self._find(spec)) is not None:
            return plan
        with self._building:
            if (plan := self._find(spec)) is not None:  # another thread built it meanwhile
                return plan
            with self._lock:
                self._misses += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the frontend's engines, imported now, warn about themselves
                plan = self._build(spec)
            with self._lock:
                self._kept[spec] = plan
                while len(self._kept) > self._capacity:
                    self._kept.popitem(last=False)
                    self._evictions += 1
        return plan

    def statistics(self) -> CacheStatistics:
        """Counts since the start."""
        with self._lock:
            return CacheStatistics(self._hits, self._misses, self._evictions, len(self._kept), self._capacity)

    def clear(self) -> None:
        """Drop every plan and start the counts anew."""
        with self._lock:
            self._kept.clear()
            self._hits = self._misses = self._evictions = 0

    def _find(self, spec: GraphSpec) -> Plan | None:
        with self._lock:
            plan = self._kept.get(spec)
            if plan is not None:
                self._kept.move_to_end(spec)
                self._hits += 1
            return plan


PLANS = PlanCache()


# --- running ----------------------------------------------------------------------------------------------------------


def on_device(index: int) -> Any:
    """A context in which that card is CUDA's current one."""
    import torch

    return torch.cuda.device(index)


def current_stream(index: int) -> int:
    """Address of torch's current stream there."""
    import torch

    return int(torch.cuda.current_stream(index).cuda_stream)


def capturing() -> bool:
    """Whether a CUDA graph captures the current stream."""
    import torch

    return bool(torch.cuda.is_current_stream_capturing())


def scratch(size: int, index: int) -> Any:
    """Fresh bytes on that card, of the current stream."""
    import torch

    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}")


_free_handles: dict[int, list[Any]] = {}


class _Handle:
    """A cuDNN handle for the length of a call. cuDNN allows one thread a handle; handles are reused, never destroyed,
    since destroying one synchronises the device, which would break a capture."""

    def __init__(self, cudnn: Any, device_index: int) -> None:
        self._cudnn, self._free = cudnn, _free_handles.setdefault(device_index, [])

    def __enter__(self) -> Any:
        try:
            self._held = self._free.pop()
        except IndexError:
            self._held = self._cudnn.create_handle()
        return self._held

    def __exit__(self, *raised: object) -> None:
        self._free.append(self._held)


class Workspace:
    """The scratch memory of one device and stream. Grows, never shrinks; freed with the last runner that holds it."""

    def __init__(self) -> None:
        self.buffer: Any = None

    def at_least(self, size: int, device_index: int) -> Any:
        """A buffer of at least ``size`` bytes. Must be called with its stream current: the allocator orders by it."""
        buffer = self.buffer
        if buffer is None or buffer.numel() < size:
            buffer = self.buffer = scratch(size, device_index)
        return buffer

    @property
    def size_bytes(self) -> int:
        """Bytes held now."""
        return 0 if self.buffer is None else int(self.buffer.numel())


_workspaces: weakref.WeakValueDictionary[tuple[int, int], Workspace] = weakref.WeakValueDictionary()
_workspaces_lock = threading.Lock()


def workspace_sizes() -> dict[tuple[int, int], int]:
    """(device index, stream) -> bytes of every workspace that is held now."""
    with _workspaces_lock:
        return {key: workspace.size_bytes for key, workspace in _workspaces.items()}


class Runner:
    """Runs plans on torch's current stream and holds the workspaces that they used."""

    def __init__(self) -> None:
        self.cudnn = load_frontend()
        self._held: dict[tuple[int, int], Workspace] = {}

    def run(self, plan: Plan, tensors: Mapping[str, Any]) -> None:
        """Queue ``plan``; nothing waits, and a CUDA graph may be capturing.

        Raises:
            PrepareFailed: cuDNN refused the launch.
        """
        index = plan.spec.device_index
        workspace = self.reserve(plan)
        named = {UIDS[name]: tensor for name, tensor in tensors.items()}
        try:
            with plan.lock, on_device(index), _Handle(self.cudnn, index) as handle:
                self.cudnn.set_stream(handle, current_stream(index))
                plan.graph.execute(named, workspace, handle=handle)
        except Exception as error:
            raise PrepareFailed(f"cuDNN did not run this {plan.spec.direction}: {sentence_of(error)}") from error

    def reserve(self, plan: Plan) -> Any:
        """The workspace of torch's current stream, large enough for ``plan``; older frontends want one in any case.

        A captured call gets memory of the graph that captures it: the shared buffer may be given back when it grows,
        and a replay would write to it still.
        """
        index, size = plan.spec.device_index, max(plan.workspace_bytes, LEAST_BYTES)
        if capturing():
            return scratch(size, index)
        key = (index, current_stream(index))
        if key not in self._held:
            with _workspaces_lock:
                self._held[key] = _workspaces.setdefault(key, Workspace())
        return self._held[key].at_least(size, index)
