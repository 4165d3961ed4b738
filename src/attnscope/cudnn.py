"""Stage 2: cuDNN's attention graphs, described and planned through its frontend; what it says, in sentences.

Reads GraphSpec (shapes, strides, options), writes the frontend's graph. Must not import an implementation or a later
stage; imports torch and ``cudnn`` (package ``nvidia-cudnn-frontend``) only inside functions. Keeping and running plans
is :mod:`attnscope.cudnn_plans`'s.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from attnscope.errors import PrepareFailed, first_line
from attnscope.inputs import torch_dtype

PACKAGE, MODULE = "nvidia-cudnn-frontend", "cudnn"
MIN_FRONTEND = "1.22"
MIN_BACKEND = 91002  # 9.10.2: windows without a causal mask; 9.10.0 and 9.10.1 are refused by the frontend itself
NEEDED = ("pygraph", "create_handle", "set_stream", "data_type", "heur_mode", "diagonal_alignment")
DATA_TYPES = {"bf16": "BFLOAT16", "fp16": "HALF", "fp32": "FLOAT", "int32": "INT32", "int64": "INT64"}
INPUTS = (
    "q", "k", "v", "scale", "bias", "seq_len_q", "seq_len_kv", "seed", "offset", "o", "stats", "do",
)  # fmt: skip
UIDS = {name: uid for uid, name in enumerate((*INPUTS, "dq", "dk", "dv", "dbias"), start=1)}
HOST_TENSORS = ("scale",)  # passed by value: one number in host memory
REASONS_SHOWN = 3
VECTOR_BYTES = 16  # what cuDNN loads at a time

STATUS_SENTENCES = {
    "NOT_SUPPORTED_ARCH_MISMATCH": "its kernels for this are for another architecture",
    "NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING": "a library that it compiles with (NVRTC, the driver) is missing",
    "NOT_SUPPORTED_GRAPH_PATTERN": "none of its engines matches this combination of options",
    "NOT_SUPPORTED_SHAPE": "none of its engines takes these shapes",
    "NOT_SUPPORTED_LAYOUT": "none of its engines takes these strides",
    "NOT_SUPPORTED_DATA_TYPE": "none of its engines takes these number types",
    "NOT_SUPPORTED_INSUFFICIENT_DRIVER": "the driver is too old for it",
    "SUBLIBRARY_VERSION_MISMATCH": "parts of two cuDNN versions are loaded",
    "SUBLIBRARY_LOADING_FAILED": "a part of cuDNN does not load",
    "NOT_INITIALIZED": "cuDNN could not start on this device",
    "ALLOC_FAILED": "it ran out of memory",
    "INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": "it ran out of the card's memory",
    "INTERNAL_ERROR_HOST_ALLOCATION_FAILED": "it ran out of the machine's memory",
    "INTERNAL_ERROR_COMPILATION_FAILED": "a kernel did not compile",
    "EXECUTION_FAILED": "a kernel did not run",
    "BAD_PARAM": "it does not accept a parameter",
    "INTERNAL_ERROR": "it failed inside",
    "NOT_SUPPORTED": "none of its engines takes this graph",
}  # the longer names first, since the first that is found is said


class TensorSpec(NamedTuple):
    """One operand: its name (a key of ``UIDS``), dims and strides in numbers, and number type."""

    name: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class Options(NamedTuple):
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


class GraphSpec(NamedTuple):
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
        import torch  # noqa: F401

        cudnn = sys.modules.get(MODULE) or _first_import()
        lacking = [name for name in NEEDED if not hasattr(cudnn, name)]
    except (Exception, SystemExit) as error:  # someone else's package, which may fail in any way when it is imported
        raise PrepareFailed(f"{PACKAGE} does not import: {first_line(error)}") from error
    if lacking:
        raise PrepareFailed(f"{PACKAGE} lacks {', '.join(lacking)}: another package may be named cudnn here")
    try:
        version = int(cudnn.backend_version())
    except Exception as error:
        raise PrepareFailed(f"{PACKAGE} finds no cuDNN: {first_line(error)}") from error
    if version < MIN_BACKEND:
        raise PrepareFailed(f"needs cuDNN {show_version(MIN_BACKEND)} or newer, {show_version(version)} is loaded")
    return cudnn


def _first_import() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a package that may warn about itself
        return importlib.import_module(MODULE)


def broken_install() -> str | None:
    """One sentence where the installed frontend cannot be used, else None. Imports it."""
    try:
        load_frontend()
    except PrepareFailed as error:
        return str(error).splitlines()[0]
    return None


def show_version(number: int) -> str:
    """``91901`` as ``9.19.1``."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def sentence_of(error: BaseException) -> str:
    """What the frontend raised, as one sentence: its status in words, then what its engines say."""
    text = str(error)
    if declined := re.search(r"the backend declined: (.+?)(?:; python engines|\)?$)", text):
        text = declined.group(1)  # the frontend's own engines, which are passed over, are not asked
    status = _status_in(text)
    engines = [reason.strip() for reason in re.findall(r"Reason: (.+)", text)]
    said = [reason for reason in engines if " " in reason and "status" not in reason and "::" not in reason]
    if said:
        common = [reason for reason, _ in Counter(said).most_common(REASONS_SHOWN)]
        return f"{status or 'it has no plan for this graph'} (its engines say: {'; '.join(common)})"
    first = text.strip().partition("\n")[0].strip()
    return f"{status} ({first})" if status else first or type(error).__name__


def _status_in(text: str) -> str | None:
    """A status of cuDNN that stands in ``text``, in words; None where there is none."""
    for name, words in STATUS_SENTENCES.items():
        if f"CUDNN_STATUS_{name}" in text:
            return words
    other = re.search(r"CUDNN_STATUS_(?!SUCCESS)([A-Z_]+[A-Z])", text)  # newer than this table, or older
    return f"it reports {other.group(1).lower().replace('_', ' ')}" if other else None


def spec_of(direction: str, tensors: Mapping[str, Any], options: Options, device_index: int) -> GraphSpec:
    """The spec of a call on these tensors, in and out, by name; ``meta`` tensors will do."""
    names = _number_names()
    specs = tuple(TensorSpec(name, tuple(t.shape), t.stride(), names[t.dtype]) for name, t in tensors.items())
    return GraphSpec(direction, names[tensors["q"].dtype], specs, options, device_index)


@functools.cache
def _number_names() -> dict[Any, str]:
    """torch's dtypes by the names that ``DATA_TYPES`` knows."""
    import torch

    return {torch_dtype(name): name for name in ("bf16", "fp16", "fp32")} | {torch.int32: "int32", torch.int64: "int64"}


def readable(tensor: Any) -> Any:
    """The (B, H, L, D) tensor where cuDNN can read it, 16 bytes of a row at a time and nothing twice; else a copy."""
    import torch

    step = VECTOR_BYTES // tensor.element_size()
    strides = [stride for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True) if size > 1]
    fits = tensor.stride(3) == 1 and tensor.data_ptr() % VECTOR_BYTES == 0
    if fits and all(stride > 0 and stride % step == 0 for stride in strides):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)  # contiguous() would leave a crooked address as it is


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
