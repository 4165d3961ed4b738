"""Stage 2: cuDNN's graph API, through ``nvidia-cudnn-frontend``: the options that PyTorch's SDPA does not pass on.

Reads Inputs, writes Output and Gradients. Must not import another implementation or a later stage. Graphs are
:mod:`attnscope.cudnn`'s, plans and workspaces :mod:`attnscope.cudnn_plans`'s; here stands what a workload means to
cuDNN, and what it cannot mean.

Tensors are read and written where they lie, whatever their strides, and gradients of a packed (B, T, 3, H, D) buffer
go into one like it. Only what cuDNN's 16-byte loads cannot read is copied first, inside the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attnscope import cudnn, cudnn_plans
from attnscope.device import Device
from attnscope.errors import PrepareFailed, UsageError
from attnscope.implementation import Gradients, Output, Sheet, SheetImplementation
from attnscope.implementations.common import FUSED_NAMES, empty_like_inputs, empty_out, may_hide_whole_rows
from attnscope.inputs import Inputs, Tensor, torch_dtype
from attnscope.workload import Workload

FEATURES = frozenset(
    {
        "gqa", "cross", "unequal_head_dims", "causal_top_left", "causal_bottom_right", "window", "scale", "alibi",
        "bias", "lengths",
    }
)  # fmt: skip
BACKWARD_HEAD_DIM, HOPPER_BACKWARD_HEAD_DIM = 128, 256
DROPOUT_STEPS = 16  # cuDNN's random numbers know this many probabilities; PyTorch passes it no others either


@dataclass(frozen=True)
class Settings:
    """What a workload does not say. ``deterministic`` None: as torch.use_deterministic_algorithms says at prepare.

    ``scale_as_tensor``: the scale goes in as a tensor, not as a number of the graph, so that one plan serves all.
    ``stats`` False: a forward alone writes no statistics (cuDNN's ``is_inference``), and returns no lse.
    ``dropout``: the probability of dropping, by cuDNN's own random numbers from ``seed`` and ``offset``.
    """

    scale_as_tensor: bool = False
    stats: bool = True
    deterministic: bool | None = None
    dropout: float = 0.0
    seed: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1 or self.dropout * DROPOUT_STEPS % 1:
            raise UsageError(
                f"dropout must be a multiple of 1/{DROPOUT_STEPS} in [0, 1), got {self.dropout!r}\n"
                "hint: cuDNN's random numbers know no other probability, e.g. 0.125"
            )


class CudnnGraph(SheetImplementation):
    """cuDNN's own kernels for whatever its graph API lets one say."""

    name = "cudnn_graph"
    summary = "cuDNN's graph API: masks, ALiBi, bias gradients and lse in one fused kernel; plans kept by shape"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16"}),
        features=FEATURES,
        devices=frozenset({"cuda"}),
        min_capability=(8, 0),
        head_dim_multiple=8,
        packages=("torch", f"{cudnn.PACKAGE}>={cudnn.MIN_FRONTEND}"),
        kernels={"cuda": (FUSED_NAMES["sdpa_cudnn"],)},
        kernels_absent={"cuda": (FUSED_NAMES["sdpa_flash"], FUSED_NAMES["sdpa_efficient"])},
        lse=True,
    )

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """What cuDNN does not take; where nothing else speaks against it, whether the library can be used at all."""
        found = list(_shape_reasons(workload, device, direction))
        found += _mask_reasons(workload)
        found += _bias_reasons(workload, direction)
        if found or self.sheet.reasons(workload, device, direction):
            return found
        broken = cudnn.broken_install()
        return [broken] if broken else []

    def prepare(self, workload: Workload, device: Device, settings: Settings | None = None) -> PreparedCudnnGraph:
        """Builds the plans of both directions and the workspace. Raises PrepareFailed where cuDNN has no forward."""
        prepared = PreparedCudnnGraph(workload, device, settings or Settings())
        prepared.build(backward=not self.reasons_unsupported(workload, device, "backward"))
        return prepared


def _shape_reasons(w: Workload, device: Device, direction: str) -> Iterator[str]:
    if w.B == 0:
        yield "takes no empty batch"
    if w.L == 0 or w.S == 0:
        yield f"takes no empty sequences, this workload has L = {w.L}, S = {w.S}"
    if direction == "backward" and w.L == w.S == 1:
        yield "has no backward of one query and one key"
    hopper = device.capability is not None and device.capability[0] == 9
    most = HOPPER_BACKWARD_HEAD_DIM if hopper else BACKWARD_HEAD_DIM
    for name, size in (("D", w.D), ("D_v", w.D_v)) if w.D != w.D_v else (("D", w.D),):
        if direction == "backward" and size > most:
            yield f"takes {name} up to {most} in the backward on {device.name or 'this card'}, not {size}"
    if w.effective_scale <= 0:
        yield f"is claimed for a scale above 0 only, not {w.effective_scale:g}: a kernel may take the maximum first"


def _mask_reasons(w: Workload) -> Iterator[str]:
    shifted = diagonal(w)[0] == "BOTTOM_RIGHT"
    if w.alibi and (w.causal is None or shifted):
        yield "takes ALiBi only with a causal mask aligned to the top left"
    if shifted and w.bias is not None:
        yield "takes no bias with a causal mask aligned to the bottom right"
    if w.lengths is None and w.L > w.S and (shifted or w.window is not None):
        what = "a causal mask aligned to the bottom right" if shifted else "a sliding window"
        yield f"takes {what} only where L <= S, not L = {w.L}, S = {w.S}"
    if w.S and may_hide_whole_rows(w):
        yield "does not promise 0 for a row that sees no key, which this workload may have"


def _bias_reasons(w: Workload, direction: str) -> Iterator[str]:
    if w.bias is None:
        return
    # Seen on an H200 with cuDNN 9.19: with one bias row for all queries dq lies far outside its budget.
    if direction == "backward" and w.L > 1 and w.broadcast_shape(w.bias_shape)[2] == 1:
        yield "its gradients are wrong with a bias of one row for all queries"
    if w.bias == w.dtype:
        return
    if direction == "backward":
        yield f"gives the gradient of a bias of the inputs' dtype only: {w.dtype}, not {w.bias}"
    elif w.bias != "fp32":
        yield f"takes a bias in {w.dtype} or fp32, not {w.bias}"


def diagonal(w: Workload) -> tuple[str, int | None, int | None]:
    """(alignment, left bound, right bound) as cuDNN counts them: a query at p sees p - left < j <= p + right."""
    shifted = w.causal == "bottom_right" and (w.L != w.S or w.lengths is not None)
    right = 0 if w.causal else None if w.window is None else w.window - 1
    return "BOTTOM_RIGHT" if shifted else "TOP_LEFT", w.window, right


@dataclass
class Saved:
    """What a backward reads besides the inputs' gradient: the operands as the forward read them, its results."""

    operands: dict[str, Tensor]
    out: Tensor
    stats: Tensor


class PreparedCudnnGraph:
    """One workload's graphs. ``seed`` and ``offset`` (int64, one number) may be written between calls."""

    def __init__(self, workload: Workload, device: Device, settings: Settings) -> None:
        import torch

        w = workload
        self.workload, self.settings, self.index = w, settings, device.index
        self.runner = cudnn_plans.Runner()
        alignment, left, right = diagonal(w)
        deterministic = settings.deterministic
        self.options = cudnn.Options(
            scale=None if settings.scale_as_tensor else w.effective_scale,
            alignment=alignment,
            left=left,
            right=right,
            alibi=w.alibi,
            padding=w.lengths is not None,
            dropout=settings.dropout,
            deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        )
        self.inference_options = self.options._replace(stats=False)
        self.constants = self._constants(device.torch_name)
        self.seed, self.offset = self.constants.get("seed"), self.constants.get("offset")
        self.padded_keys = self._padded_keys(device.torch_name)
        self.plans: dict[str, cudnn_plans.Plan] = {}

    def build(self, *, backward: bool) -> None:
        """Plan both directions for tensors as the workload's layout has them, and make the workspace.

        A backward that cannot be planned does not cost the forward: its own call says why.
        """
        forward, back = self._canonical()
        if backward:
            with contextlib.suppress(PrepareFailed):
                self._plan("backward", back)
                self._plan("forward", forward)
        if not self.settings.stats:
            del forward["stats"]
        self._plan("forward", forward)
        for plan in self.plans.values():
            self.runner.reserve(plan)

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """What the plan of each direction asks for."""
        return {direction: plan.workspace_bytes for direction, plan in self.plans.items()}

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out, and lse unless the settings leave it out."""
        with_stats = save or self.settings.stats
        operands = self._operands(inputs)
        out, stats = empty_results(self.workload, inputs.q.dtype, inputs.q.device)
        results = {"o": out, "stats": stats} if with_stats else {"o": out}
        tensors = operands | results
        self.runner.run(self._plan("forward", tensors), tensors)
        saved = Saved(operands, out, stats) if save else None
        return Output(out, stats.squeeze(-1) if with_stats else None, saved)

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """dq, dk, dv in the workload's layout, and dbias."""
        grads = self._empty_gradients(inputs.q.dtype, inputs.q.device, saved.operands.get("bias"))
        results = {"o": saved.out, "stats": saved.stats, "do": cudnn.readable(inputs.grad_out)}
        tensors = saved.operands | results | grads
        self.runner.run(self._plan("backward", tensors), tensors)
        if self.padded_keys is not None:
            for name in ("dk", "dv"):
                grads[name].masked_fill_(self.padded_keys, 0)
        return Gradients(**grads)

    def _plan(self, direction: str, tensors: dict[str, Tensor]) -> cudnn_plans.Plan:
        options = self.options if "stats" in tensors else self.inference_options
        plan = cudnn_plans.PLANS.get(cudnn.spec_of(direction, tensors, options, self.index))
        self.plans[direction] = plan
        return plan

    def _operands(self, inputs: Inputs) -> dict[str, Tensor]:
        operands = {name: cudnn.readable(getattr(inputs, name)) for name in ("q", "k", "v")} | self.constants
        if inputs.bias is not None:
            operands["bias"] = inputs.bias.contiguous()
        if inputs.lengths is not None:
            operands["seq_len_kv"] = inputs.lengths.view(-1, 1, 1, 1)
        return operands

    def _constants(self, place: str) -> dict[str, Tensor]:
        """Operands that no call changes: scale, query lengths, seed and offset, where the options want them."""
        import torch

        w, found = self.workload, {}
        if self.options.scale is None:
            found["scale"] = torch.full((1, 1, 1, 1), w.effective_scale, dtype=torch.float32)
        if self.options.padding:
            found["seq_len_q"] = torch.full((w.B, 1, 1, 1), w.L, dtype=torch.int32, device=place)
        if self.options.dropout:
            for name in ("seed", "offset"):
                value = getattr(self.settings, name)
                found[name] = torch.full((1, 1, 1, 1), value, dtype=torch.int64, device=place)
        return found

    def _padded_keys(self, place: str) -> Tensor | None:
        """Bool (B, 1, S, 1): keys beyond the lengths, whose gradients cuDNN does not write."""
        import torch

        w = self.workload
        if w.lengths is None or all(n == w.S for n in w.lengths):
            return None
        real = torch.tensor(w.lengths, device=place)[:, None, None, None]
        return torch.arange(w.S, device=place)[None, None, :, None] >= real

    def _canonical(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Operands and results of forward and backward as ``make_inputs`` lays them out, without memory."""
        import torch

        w, dtype = self.workload, torch_dtype(self.workload.dtype)
        operands = dict(zip(("q", "k", "v"), empty_like_inputs(w, dtype, "meta"), strict=True)) | self.constants
        if w.bias is not None:
            operands["bias"] = torch.empty(w.broadcast_shape(w.bias_shape), dtype=torch_dtype(w.bias), device="meta")
        if w.lengths is not None:
            operands["seq_len_kv"] = torch.empty(w.B, 1, 1, 1, dtype=torch.int32, device="meta")
        out, stats = empty_results(w, dtype, "meta")
        results = {"o": out, "stats": stats}
        grads = self._empty_gradients(dtype, "meta", operands.get("bias"))
        return operands | results, operands | results | {"do": out} | grads

    def _empty_gradients(self, dtype: Any, place: Any, bias: Tensor | None) -> dict[str, Tensor]:
        import torch

        grads = dict(zip(("dq", "dk", "dv"), empty_like_inputs(self.workload, dtype, place), strict=True))
        if bias is not None:
            grads["dbias"] = torch.empty_like(bias, device=place)
        return grads


def empty_results(w: Workload, dtype: Any, place: Any) -> tuple[Tensor, Tensor]:
    """Unwritten out in the workload's layout, and stats, float32 (B, H, L, 1)."""
    import torch

    return empty_out(w, dtype, place), torch.empty(w.B, w.H, w.L, 1, dtype=torch.float32, device=place)
