"""Stage 2: cuDNN's attention graphs: described, planned, kept, run on torch's current stream.

Reads GraphSpec (shapes, strides, options), writes what cuDNN computes into the caller's tensors. Must not import an
implementation or a later stage; imports torch and ``cudnn`` (package ``nvidia-cudnn-frontend``) only inside functions.

A plan is built once per spec and kept in a bounded cache that threads may share. A plan needs scratch memory: there is
one buffer for each device and stream, which grows to the largest plan that ran there.
"""

from __future__ import annotations

import re
import threading
import time
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attnscope.errors import PrepareFailed

PACKAGE = "nvidia-cudnn-frontend"
MIN_FRONTEND = "1.16"
MIN_BACKEND = 91002  # 9.10.2: windows without a causal mask; 9.10.0 and 9.10.1 are refused by the frontend itself
NEEDED = ("pygraph", "create_handle", "set_stream", "data_type", "heur_mode", "diagonal_alignment")
CAPACITY = 256  # plans; cuDNN keeps a compiled kernel for each
DATA_TYPES = {"bf16": "BFLOAT16", "fp16": "HALF", "fp32": "FLOAT", "int32": "INT32", "int64": "INT64"}
NUMBER_TYPES = {
    "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32",
    "torch.int32": "int32", "torch.int64": "int64",
}  # fmt: skip
INPUTS = (
    "q", "k", "v", "scale", "bias", "seq_len_q", "seq_len_kv", "seed", "offset", "o", "stats", "do",
)  # fmt: skip
UIDS = {name: uid for uid, name in enumerate((*INPUTS, "dq", "dk", "dv", "dbias", "keep"), start=1)}
HOST_TENSORS = ("scale",)  # passed by value: one number in host memory
REASONS_SHOWN = 3

STATUS_SENTENCES = {
    "NOT_SUPPORTED_ARCH_MISMATCH": "its kernels for this are for another architecture",
    "NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING": "a library that it compiles kernels with (NVRTC, the driver) is missing",
    "NOT_SUPPORTED_GRAPH_PATTERN": "none of its engines matches this combination of options",
    "NOT_SUPPORTED_SHAPE": "none of its engines takes these shapes",
    "NOT_SUPPORTED_LAYOUT": "none of its engines takes these strides",
    "NOT_SUPPORTED_DATA_TYPE": "none of its engines takes these number types",
    "NOT_SUPPORTED_INSUFFICIENT_DRIVER": "the driver is too old for it",
    "SUBLIBRARY_VERSION_MISMATCH": "parts of two cuDNN versions are loaded",
    "SUBLIBRARY_LOADING_FAILED": "a part of cuDNN does not load",
    "NOT_INITIALIZED": "cuDNN could not start on this device",
    "ALLOC_FAILED": "it ran out of memory",
    "EXECUTION_FAILED": "a kernel did not run",
    "BAD_PARAM": "it does not accept a parameter",
    "INTERNAL_ERROR": "it failed inside",
    "NOT_SUPPORTED": "none of its engines takes this graph",
}  # the longer names first, since the first that is found is said


@dataclass(frozen=True)
class TensorSpec:
    """One operand: its name (a key of ``UIDS``), dims and strides in numbers, and number type."""

    name: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Options:
    """What is computed. ``scale`` None: it comes as a tensor. ``left``/``right``: how far beside the diagonal a query
    sees, as cuDNN counts (a key j of row p is seen where p - left < j <= p + right); None: without bound."""

    scale: float | None
    alignment: str = "TOP_LEFT"
    left: int | None = None
    right: int | None = None
    alibi: bool = False
    padding: bool = False
    dropout: float = 0.0
    stats: bool = True
    deterministic: bool = False


@dataclass(frozen=True)
class GraphSpec:
    """A graph, hashable: ``direction``, the 16-bit type of q, every operand in and out, options, device index."""

    direction: str
    dtype: str
    tensors: tuple[TensorSpec, ...]
    options: Options
    device_index: int = 0


# --- the library ------------------------------------------------------------------------------------------------------


def load_frontend() -> Any:
    """The frontend module. torch goes first, so that both use the cuDNN that torch loads.

    Raises:
        PrepareFailed: it does not import, lacks what is needed, or finds no cuDNN, or one that is too old.
    """
    try:
        import cudnn
        import torch  # noqa: F401
    except Exception as error:  # someone else's package, which may fail in any way when it is imported
        raise PrepareFailed(f"{PACKAGE} does not import: {first_line(error)}") from error
    if lacking := [name for name in NEEDED if not hasattr(cudnn, name)]:
        raise PrepareFailed(f"{PACKAGE} lacks {', '.join(lacking)}: another package may be named cudnn here")
    try:
        version = int(cudnn.backend_version())
    except Exception as error:
        raise PrepareFailed(f"{PACKAGE} finds no cuDNN: {first_line(error)}") from error
    if version < MIN_BACKEND:
        raise PrepareFailed(f"needs cuDNN {show_version(MIN_BACKEND)} or newer, {show_version(version)} is loaded")
    return cudnn


def broken_install() -> str | None:
    """One sentence where the installed frontend cannot be used, else None. Imports it."""
    try:
        load_frontend()
    except PrepareFailed as error:
        return first_line(error, with_type=False)
    return None


def show_version(number: int) -> str:
    """``91901`` as ``9.19.1``."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def first_line(error: BaseException, *, with_type: bool = True) -> str:
    """The first line of what an exception says, behind its type."""
    said = str(error).strip().partition("\n")[0].strip()
    return f"{type(error).__name__}: {said}".rstrip(": ") if with_type else said


def sentence_of(error: BaseException) -> str:
    """What the frontend raised, as one sentence: its status in words, then what its engines say."""
    text = str(error)
    if declined := re.search(r"the backend declined: (.+?)(?:; python engines|\)?$)", text):
        text = declined.group(1)  # the frontend's own engines, which are passed over, are not asked
    status = next((words for name, words in STATUS_SENTENCES.items() if f"CUDNN_STATUS_{name}" in text), None)
    engines = re.findall(r"Reason: (.+)", text)
    said = [reason.strip() for reason in engines if " " in reason.strip() and "status" not in reason and "::" not in reason]
    if said:
        common = [reason for reason, _ in Counter(said).most_common(REASONS_SHOWN)]
        return f"{status or 'it has no plan for this graph'} (its engines say: {'; '.join(common)})"
    first = text.strip().partition("\n")[0].strip()
    return f"{status} ({first})" if status else first or type(error).__name__


def spec_of(direction: str, tensors: Mapping[str, Any], options: Options, device_index: int) -> GraphSpec:
    """The spec of a call on these tensors, in and out, by name; ``meta`` tensors will do."""
    specs = tuple(
        TensorSpec(name, tuple(t.shape), tuple(t.stride()), NUMBER_TYPES[str(t.dtype)]) for name, t in tensors.items()
    )
    return GraphSpec(direction, NUMBER_TYPES[str(tensors["q"].dtype)], specs, options, device_index)


# --- describing and planning ------------------------------------------------------------------------------------------


def describe(cudnn: Any, spec: GraphSpec, **settings: Any) -> Any:
    """The frontend's graph of ``spec``, not yet validated. ``settings`` go to ``cudnn.pygraph``."""
    number = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=getattr(number, DATA_TYPES[spec.dtype]),
        intermediate_data_type=number.FLOAT,
        compute_data_type=number.FLOAT,
        **settings,
    )
    specs = {t.name: t for t in spec.tensors}
    results = ("o", "stats") if spec.direction == "forward" else ("dq", "dk", "dv")
    given = {
        name: graph.tensor(
            dim=list(t.dims),
            stride=list(t.strides),
            data_type=getattr(number, DATA_TYPES[t.dtype]),
            is_pass_by_value=name in HOST_TENSORS,
            name=name,
            uid=UIDS[name],
        )
        for name, t in specs.items()
        if name not in results
    }
    call = _forward if spec.direction == "forward" else _backward
    for name, tensor in zip(results, call(cudnn, graph, given, spec.options), strict=True):
        if name in specs:
            t = specs[name]
            tensor.set_output(True).set_dim(list(t.dims)).set_stride(list(t.strides))
            tensor.set_data_type(getattr(number, DATA_TYPES[t.dtype])).set_uid(UIDS[name])
    return graph


def _forward(cudnn: Any, graph: Any, given: Mapping[str, Any], options: Options) -> Iterable[Any]:
    return graph.sdpa(name="sdpa", generate_stats=options.stats, **_common(cudnn, given, options))


def _backward(cudnn: Any, graph: Any, given: Mapping[str, Any], options: Options) -> Iterable[Any]:
    return graph.sdpa_backward(
        name="sdpa_backward",
        o=given["o"],
        dO=given["do"],
        stats=given["stats"],
        dBias=given.get("dbias"),
        use_deterministic_algorithm=options.deterministic,
        **_common(cudnn, given, options),
    )


def _common(cudnn: Any, given: Mapping[str, Any], options: Options) -> dict[str, Any]:
    dropout = (options.dropout, given["seed"], given["offset"]) if options.dropout else None
    return {
        "q": given["q"],
        "k": given["k"],
        "v": given["v"],
        "attn_scale": given["scale"] if options.scale is None else options.scale,
        "bias": given.get("bias"),
        "use_alibi_mask": options.alibi,
        "use_padding_mask": options.padding,
        "seq_len_q": given.get("seq_len_q"),
        "seq_len_kv": given.get("seq_len_kv"),
        "diagonal_alignment": getattr(cudnn.diagonal_alignment, options.alignment),
        "diagonal_band_left_bound": options.left,
        "diagonal_band_right_bound": options.right,
        "dropout": dropout,
        "rng_dump": given.get("keep"),
    }


def plan_graph(cudnn: Any, graph: Any) -> None:
    """Plan with cuDNN's own kernels.

    Newer frontends also hold engines of their own, which need not be cuDNN; those are passed over, so that the name of
    the implementation says what runs.
    """
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    if not hasattr(graph, "select_plan"):
        graph.check_support()
        graph.build_plans()
        return
    declined: Exception | None = None
    for index in range(graph.get_execution_plan_count()):
        graph.select_plan(index)
        if graph.selected_engine is not None:
            continue
        try:
            graph.check_support()
            graph.build_plans()
            return
        except cudnn.cudnnGraphNotSupportedError as error:
            declined = error
    raise declined or cudnn.cudnnGraphNotSupportedError("cuDNN proposed no plan for this graph")


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
        raise PrepareFailed(
            f"cuDNN {show_version(int(cudnn.backend_version()))} cannot plan this {spec.direction}: {sentence_of(error)}"
        ) from error
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
        """The workspace of torch's current stream, large enough for ``plan``; None where it needs none.

        A captured call gets memory of the graph that captures it: the shared buffer may be given back when it grows,
        and a replay would write to it still.
        """
        if plan.workspace_bytes == 0:
            return None
        index = plan.spec.device_index
        if capturing():
            return scratch(plan.workspace_bytes, index)
        key = (index, current_stream(index))
        if key not in self._held:
            with _workspaces_lock:
                self._held[key] = _workspaces.setdefault(key, Workspace())
        return self._held[key].at_least(plan.workspace_bytes, index)
