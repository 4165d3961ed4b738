"""A stand-in for the cuDNN frontend: the part of its API that attnscope calls, computed by torch on the CPU.

Each operand must come with the very strides that its graph was described with, each graph must be built before it runs,
one call at a time, on the stream that its handle was given: what the real one trusts its caller in, this one asserts.
"""

from __future__ import annotations

import threading
import time
from enum import Enum
from typing import Any

import torch


class data_type(Enum):  # noqa: N801
    BFLOAT16, HALF, FLOAT, INT32, INT64 = range(5)


class heur_mode(Enum):  # noqa: N801
    A, FALLBACK = range(2)


class diagonal_alignment(Enum):  # noqa: N801
    TOP_LEFT, BOTTOM_RIGHT = range(2)


class cudnnGraphNotSupportedError(Exception):  # noqa: N801
    pass


TORCH_TYPES = {
    data_type.BFLOAT16: torch.bfloat16, data_type.HALF: torch.float16, data_type.FLOAT: torch.float32,
    data_type.INT32: torch.int32, data_type.INT64: torch.int64,
}  # fmt: skip


class Handle:
    def __init__(self) -> None:
        self.stream: int | None = None
        self.busy = threading.Lock()


class Frontend:
    """One module's worth: ``install`` puts it where ``import cudnn`` finds it. Counts what is done with it."""

    data_type, heur_mode, diagonal_alignment = data_type, heur_mode, diagonal_alignment
    cudnnGraphNotSupportedError = cudnnGraphNotSupportedError  # noqa: N815

    def __init__(self, *, workspace_bytes: int = 0, build_s: float = 0.0, version: int = 91901) -> None:
        self.workspace_bytes, self.build_s, self.version = workspace_bytes, build_s, version
        self.handles: list[Handle] = []
        self.graphs: list[Graph] = []
        self.building = 0
        self.refusal: Exception | None = None
        self.workspaces: list[int] = []

    def backend_version(self) -> int:
        return self.version

    def create_handle(self) -> Handle:
        self.handles.append(Handle())
        return self.handles[-1]

    def set_stream(self, handle: Handle, stream: int) -> None:
        handle.stream = stream

    def pygraph(self, **settings: Any) -> Graph:
        self.graphs.append(Graph(self, settings))
        return self.graphs[-1]


class Operand:
    def __init__(self, name: str, dim: list[int] | None = None, stride: list[int] | None = None, uid: int = -1) -> None:
        self.name, self.dim, self.stride, self.uid = name, dim, stride, uid
        self.data_type: data_type | None = None
        self.by_value = self.output = False

    def set_output(self, value: bool) -> Operand:
        self.output = value
        return self

    def set_dim(self, dim: list[int]) -> Operand:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Operand:
        self.stride = stride
        return self

    def set_data_type(self, kind: data_type) -> Operand:
        self.data_type = kind
        return self

    def set_uid(self, uid: int) -> Operand:
        self.uid = uid
        return self


class Graph:
    def __init__(self, frontend: Frontend, settings: dict[str, Any]) -> None:
        self.frontend, self.settings = frontend, settings
        self.operands: list[Operand] = []
        self.options: dict[str, Any] = {}
        self.done: list[str] = []
        self.selected_engine: object = None
        self.busy = threading.Lock()

    def tensor(self, *, dim: Any, stride: Any, data_type: Any, is_pass_by_value: bool, name: str, uid: int) -> Operand:
        made = Operand(name, dim, stride, uid)
        made.data_type, made.by_value = data_type, is_pass_by_value
        self.operands.append(made)
        return made

    def sdpa(self, *, name: str, generate_stats: bool, **options: Any) -> list[Operand | None]:
        self.options = options
        self.results = [Operand("o"), Operand("stats") if generate_stats else None]
        return list(self.results)

    def sdpa_backward(self, *, name: str, **options: Any) -> list[Operand]:
        self.options = options
        self.results = [Operand("dq"), Operand("dk"), Operand("dv")]
        return list(self.results)

    def validate(self) -> None:
        if self.frontend.refusal is not None:
            raise self.frontend.refusal
        self.done.append("validate")

    def build_operation_graph(self) -> None:
        self.done.append("build_operation_graph")

    def create_execution_plans(self, modes: list[heur_mode]) -> None:
        assert modes == [heur_mode.A, heur_mode.FALLBACK]
        self.done.append("create_execution_plans")

    def get_execution_plan_count(self) -> int:
        return 3

    def select_plan(self, index: int) -> None:
        """The first plan is of an engine of the frontend's own, the second is declined, the third builds."""
        self.index, self.selected_engine = index, "an engine of its own" if index == 0 else None

    def check_support(self) -> None:
        self.done.append("check_support")

    def build_plans(self) -> None:
        assert self.index > 0, "cuDNN's own kernels are wanted"
        if self.index == 1:
            raise cudnnGraphNotSupportedError("declined")
        self.frontend.building += 1
        assert self.frontend.building == 1, "two builds at once"
        time.sleep(self.frontend.build_s)
        self.frontend.building -= 1
        self.done.append("build_plans")

    def get_workspace_size(self) -> int:
        return self.frontend.workspace_bytes

    def execute(self, pack: dict[int, torch.Tensor], workspace: Any, handle: Handle) -> None:
        assert self.done[-1] == "build_plans"
        assert self.busy.acquire(blocking=False), "a graph runs one call at a time"
        assert handle.busy.acquire(blocking=False), "a handle belongs to one thread"
        try:
            assert workspace.numel() >= max(self.frontend.workspace_bytes, 1)
            self.frontend.workspaces.append(workspace.data_ptr())
            found = {made.name: self._bound(made, pack) for made in [*self.operands, *self.results] if made is not None}
            compute(self, found)
        finally:
            handle.busy.release()
            self.busy.release()

    def _bound(self, made: Operand, pack: dict[int, torch.Tensor]) -> torch.Tensor:
        tensor = pack[made.uid]
        assert list(tensor.shape) == made.dim and list(tensor.stride()) == made.stride, (made.name, tensor.stride())
        assert made.data_type is not None and tensor.dtype == TORCH_TYPES[made.data_type], made.name
        if made.name in ("q", "k", "v", "do"):
            assert tensor.data_ptr() % 16 == 0 and tensor.stride(3) == 1, made.name
        return tensor


def compute(graph: Graph, found: dict[str, torch.Tensor]) -> None:
    """out and stats, or the gradients, by the definition that the frontend documents."""
    leaves = {name: found[name].double().requires_grad_() for name in ("q", "k", "v", "bias") if name in found}
    out, stats, real = attend(graph, leaves, found)
    if not graph.results[0] or graph.results[0].name == "o":
        found["o"].copy_(out.detach())
        if "stats" in found:
            found["stats"].copy_(stats.detach())
        return
    torch.testing.assert_close(found["o"].double(), out.detach(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found["stats"].double(), stats.detach(), atol=1e-4, rtol=1e-4)
    grads = torch.autograd.grad(out, list(leaves.values()), found["do"].double())
    for name, grad in zip(leaves, grads, strict=True):
        target = found["dbias" if name == "bias" else f"d{name}"]
        target.copy_(grad)
        if name in ("k", "v") and real is not None:  # the real one leaves padded keys as they were
            target.masked_fill_(~real.transpose(2, 3), float("nan"))


def attend(graph: Graph, leaves: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> Any:
    """(out, stats, which keys are real) in double precision."""
    options, q = graph.options, leaves["q"]
    k, v = (leaves[name].repeat_interleave(q.shape[1] // leaves[name].shape[1], 1) for name in ("k", "v"))
    length, keys = q.shape[2], k.shape[2]
    scale = options["attn_scale"]
    scores = q @ k.transpose(2, 3) * (found["scale"].double() if isinstance(scale, Operand) else scale)
    if "bias" in leaves:
        scores = scores + leaves["bias"]
    row, column = torch.arange(length)[:, None], torch.arange(keys)[None]
    real_keys = found["seq_len_kv"] if options["use_padding_mask"] else torch.tensor(keys).view(1, 1, 1, 1)
    if options["diagonal_alignment"] is diagonal_alignment.BOTTOM_RIGHT:
        rows = found["seq_len_q"] if options["use_padding_mask"] else torch.tensor(length).view(1, 1, 1, 1)
        row = row + real_keys - rows
    if options["use_alibi_mask"]:
        assert options["diagonal_band_right_bound"] == 0
        scores = scores + slopes(q.shape[1])[:, None, None] * (column - row)
    seen = (column < real_keys).expand(q.shape[0], 1, 1, keys)
    if options["diagonal_band_right_bound"] is not None:
        seen = seen & (column <= row + options["diagonal_band_right_bound"])
    if options["diagonal_band_left_bound"] is not None:
        seen = seen & (column > row - options["diagonal_band_left_bound"])
    scores = scores.masked_fill(~seen, -torch.inf)
    real = (column < real_keys) if options["use_padding_mask"] else None
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True), real


def slopes(heads: int) -> torch.Tensor:
    """2**(-8 (h + 1) / n) for the first n = 2**floor(log2 heads) heads, then those of 2 n, every other one."""
    power = 1 << (heads.bit_length() - 1)
    exponents = [-8.0 * (h + 1) / power for h in range(power)]
    exponents += [-8.0 * (h + 1) / (2 * power) for h in range(0, 2 * (heads - power), 2)]
    return 2.0 ** torch.tensor(exponents, dtype=torch.float64)
