"""Stage 2: ``torch.nn.functional.scaled_dot_product_attention``, pinned to one SDPBackend each, and left to choose.

Reads Inputs, writes Output and Gradients. Must not import another implementation or a later stage. The only file that
speaks of PyTorch's SDPA backends by that name.

``is_causal`` is passed where a causal mask is all there is; every other mask becomes one dense ``attn_mask``, bool
where it only hides, else additive in the inputs' dtype. PyTorch documents an error for ``is_causal`` with
``attn_mask``; a workload may have both, and here both apply, in the one mask. A mask is made once per inputs, as a
careful user would; one that holds a bias wanting a gradient is made in the call, as it must be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from attnscope.device import Device
from attnscope.implementation import FEATURE_SENTENCES, Gradients, Output, Sheet, SheetImplementation
from attnscope.implementations.common import (
    ANY_FUSED,
    FUSED_NAMES,
    PerInputs,
    Saved,
    autograd_backward,
    both_visible,
    differentiable,
    fused_implementation,
    leaves_of,
    may_hide_whole_rows,
)
from attnscope.inputs import Inputs, Tensor, torch_dtype, visible_by_geometry
from attnscope.workload import Workload

# Not softcap, not sinks; dropout it draws itself, cuDNN with probabilities of 1/16 steps only.
FEATURES = frozenset(
    {
        "gqa", "cross", "unequal_head_dims", "causal_top_left", "causal_bottom_right", "window", "scale",
        "alibi", "mask", "bias", "lengths", "packed",
    }
)  # fmt: skip
MASKING_FEATURES = ("causal_bottom_right", "window", "alibi", "mask", "bias", "lengths", "packed")
MAX_GRID = 65535  # largest y and z of a CUDA grid, where flash and efficient put heads and batch (pytorch#142228)
# A bias or ALiBi is passed as attn_mask in the inputs' dtype; and the CPU flash kernel's backward adds what each tile
# gives to dq, dk, dv in that dtype (cpu_flash_attention_backward in aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
ROUNDS = {"cpu": frozenset({"bias"}), "cuda": frozenset({"bias"})}
FLASH_ROUNDS = ROUNDS | {"cpu": frozenset({"bias", "sums"})}
OTHER_KERNELS = {
    name: "|".join(pattern for other, pattern in FUSED_NAMES.items() if other != name) for name in FUSED_NAMES
}


def uses_is_causal(workload: Workload) -> bool:
    """Whether a causal mask aligned like ``is_causal``'s, to the top left, is all the masking there is."""
    aligned = workload.causal == "top_left" or (workload.causal == "bottom_right" and workload.L == workload.S)
    return aligned and not (workload.features & (frozenset(MASKING_FEATURES) - {"causal_bottom_right"}))


def needs_mask(workload: Workload) -> bool:
    """Whether a dense ``attn_mask`` must be passed."""
    return not uses_is_causal(workload) and bool(workload.features & frozenset((*MASKING_FEATURES, "causal_top_left")))


class _Sdpa(SheetImplementation):
    backend: str | None  # a member of torch.nn.attention.SDPBackend; None leaves the choice to PyTorch

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        found = list(self.own_reasons(workload, device, direction))
        if found or self.sheet.reasons(workload, device, direction):
            return found
        return self.torch_reasons(workload, device, direction)

    def own_reasons(self, workload: Workload, device: Device, direction: str) -> Iterator[str]:
        """Reasons of this one that no sheet can express."""
        del workload, device, direction
        yield from ()

    def torch_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """What PyTorch's own selection says, where it says more than we know."""
        del workload, device, direction
        return []

    def prepare(self, workload: Workload, device: Device) -> PreparedSdpa:
        """Builds what of the mask is known before the tensors."""
        return PreparedSdpa(workload, device, self.backend)


class SdpaMath(_Sdpa):
    """Plain matmuls and a softmax that gives 0 on rows that see no key; 16-bit inputs are computed in float32.

    (``_scaled_dot_product_attention_math`` upcasts unless ``allow_fp16_bf16_reduction_math_sdp``.)
    """

    name = "sdpa_math"
    summary = "PyTorch's SDPA, math: separate matmuls and softmax, 16-bit inputs upcast to fp32; runs everywhere"
    backend = "MATH"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16", "fp32", "fp64"}),
        features=FEATURES,
        rounds=ROUNDS,
        kernels={"cpu": (r"(?i)softmax",), "cuda": (r"(?i)softmax",)},
        kernels_absent={"cpu": (ANY_FUSED,), "cuda": (ANY_FUSED,)},
        materialises_scores=True,
        draws_dropout=True,
        traceable=True,
    )


class _Fused(_Sdpa):
    backend: str

    def own_reasons(self, workload: Workload, device: Device, direction: str) -> Iterator[str]:
        w = workload
        if w.L == 0 or w.S == 0:
            yield f"takes no empty sequences, this workload has L = {w.L}, S = {w.S}"
        if device.kind == "cuda":
            yield from self.gpu_reasons(w, direction)

    def gpu_reasons(self, workload: Workload, direction: str) -> Iterator[str]:
        """Reasons on a GPU."""
        del direction
        if workload.B == 0:
            yield "takes no empty batch"
        if max(workload.B, workload.H) > MAX_GRID:
            yield f"takes B and H up to {MAX_GRID}, not {max(workload.B, workload.H)}"

    def torch_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """One sentence where PyTorch refuses, naming the cause whose absence would change its mind."""
        accepts = _selection(self.backend, device)
        if accepts is None or accepts(workload, direction):
            return []
        for easier, easier_direction, sentence in _easier(workload, direction):
            if accepts(easier, easier_direction):
                return [f"PyTorch {_versions(self.backend)} {sentence}"]
        return ["PyTorch's own selection refuses these tensors"]


class SdpaEfficient(_Fused):
    """The CUTLASS kernel that came from xFormers.

    For float32 on compute capability 8.0 and above its products are 3xTF32, near float32 in accuracy (operator
    OpMultiplyAddFastF32 in mem_eff_attention/gemm_kernel_utils.h), so its compute precision is fp32.
    """

    name = "sdpa_efficient"
    summary = "PyTorch's SDPA, memory-efficient: one CUTLASS kernel, any mask, any card"
    backend = "EFFICIENT_ATTENTION"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16", "fp32"}),
        features=FEATURES,
        devices=frozenset({"cuda"}),
        min_capability=(5, 0),
        rounds=ROUNDS,
        kernels={"cuda": (r"fmha_cutlass",)},
        kernels_absent={"cuda": (OTHER_KERNELS["sdpa_efficient"],)},
        draws_dropout=True,
        traceable=True,
    )

    def own_reasons(self, workload: Workload, device: Device, direction: str) -> Iterator[str]:
        """Alignment, bf16 on old cards, masks beyond 32-bit indices, scales that turn the order of scores."""
        w = workload
        yield from super().own_reasons(w, device, direction)
        if not needs_mask(w) and w.effective_scale <= 0:  # iterative_softmax in mem_eff_attention/kernel_forward.h
            yield _scale_reason(w)
        multiple = 4 if w.dtype == "fp32" else 8
        for letter, size in (("D", w.D), ("D_v", w.D_v)) if w.D != w.D_v else (("D", w.D),):
            if size % multiple:
                yield f"needs {letter} to be a multiple of {multiple} for {w.dtype}, not {size}"
        if w.dtype == "bf16" and device.capability is not None and device.capability < (8, 0):
            yield f"takes bf16 from compute capability 8.0 on, which {device.name} is below"
        if needs_mask(w) and w.L * w.S >= 2**32:  # pytorch#162588, pytorch#187227
            yield f"indexes its mask with 32 bits: L * S must stay below 2**32, not {w.L * w.S}"


class SdpaFlash(_Fused):
    """FlashAttention-2 as PyTorch vendors it; on a CPU a kernel of the same kind, which also takes masks."""

    name = "sdpa_flash"
    summary = "PyTorch's SDPA, flash: FlashAttention-2 on a GPU (no mask but causal), a CPU kernel elsewhere"
    backend = "FLASH_ATTENTION"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16", "fp32", "fp64"}),
        features=FEATURES - {"unequal_head_dims"},
        min_capability=(8, 0),
        forward_only=frozenset({"bias"}),
        rounds=FLASH_ROUNDS,
        kernels={"cpu": (r"_scaled_dot_product_flash_attention_for_cpu",), "cuda": (r"pytorch_flash|flash_(fwd|bwd)",)},
        kernels_absent={"cuda": (OTHER_KERNELS["sdpa_flash"],)},
        draws_dropout=True,
        traceable=True,
    )

    def own_reasons(self, workload: Workload, device: Device, direction: str) -> Iterator[str]:
        """No scale that turns the order of scores."""
        yield from super().own_reasons(workload, device, direction)
        # On a CPU seen with torch 2.13 (NaN); on a GPU scale_apply_exp2 in FlashAttention-2's softmax.h.
        if workload.effective_scale <= 0 and (device.kind == "cuda" or uses_is_causal(workload)):
            yield _scale_reason(workload)

    def gpu_reasons(self, workload: Workload, direction: str) -> Iterator[str]:
        """What FlashAttention-2 takes."""
        w = workload
        yield from super().gpu_reasons(w, direction)
        if w.dtype not in ("bf16", "fp16"):
            yield f"takes bf16 or fp16 on a GPU, not {w.dtype}"
        if w.D > 256:
            yield f"takes D up to 256 on a GPU, not {w.D}"
        if needs_mask(w):
            yield f"takes no attn_mask on a GPU, which {_masking_cause(w)} needs"
        elif w.causal and w.L != w.S:
            yield f"takes is_causal on a GPU only where L = S, not L = {w.L}, S = {w.S}"


class SdpaCudnn(_Fused):
    """cuDNN's fused attention graph."""

    name = "sdpa_cudnn"
    summary = "PyTorch's SDPA, cuDNN: a fused kernel that cuDNN picks, one plan per new shape"
    backend = "CUDNN_ATTENTION"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16"}),
        features=FEATURES,
        devices=frozenset({"cuda"}),
        min_capability=(8, 0),
        head_dim_multiple=8,
        forward_only=frozenset({"bias"}),
        rounds=ROUNDS,
        kernels={"cuda": (r"cudnn.*(sdpa|flash|fort|mha)",)},
        kernels_absent={"cuda": (OTHER_KERNELS["sdpa_cudnn"],)},
        traceable=True,
    )

    def own_reasons(self, workload: Workload, device: Device, direction: str) -> Iterator[str]:
        """One key, rows that see none, determinism."""
        w = workload
        yield from super().own_reasons(w, device, direction)
        if w.S == 1:
            yield "takes S of 2 or more, not 1"
        # convert_boolean_attn_mask_cudnn in aten/src/ATen/native/transformers/attention.cpp: -65504 stands for -inf.
        if needs_mask(w) and may_hide_whole_rows(w):
            yield "masks with a finite number, so a row that sees no key (which this workload may have) is not 0"
        if _deterministic_only():
            yield "is not deterministic, and torch.use_deterministic_algorithms is on"


class SdpaAuto(_Sdpa):
    """No pin: what a user gets who just calls it. ``ran`` says what PyTorch took."""

    name = "sdpa_auto"
    summary = "PyTorch's SDPA as PyTorch chooses; the row says what ran"
    backend = None
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16", "fp32", "fp64"}),
        features=FEATURES,
        rounds=FLASH_ROUNDS,
        draws_dropout=True,
        traceable=True,
    )

    def ran(self, names: Iterable[str]) -> str | None:
        """The implementation that PyTorch took, by the kernels and ops that ran; None where they do not tell."""
        names = list(names)
        fused = fused_implementation(names)
        if fused is None and any("softmax" in name.lower() for name in names):
            return "sdpa_math"
        return fused


class PreparedSdpa:
    """One call of ``scaled_dot_product_attention`` with its mask, inside its ``sdpa_kernel`` context."""

    def __init__(self, workload: Workload, device: Device, backend: str | None) -> None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self.pin: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if backend is not None:
            chosen = getattr(SDPBackend, backend)
            self.pin = lambda: sdpa_kernel(chosen)
        self.needs_unit_stride = backend not in (None, "MATH")  # the others fall back to math by themselves
        self.dtype = torch_dtype(workload.dtype)
        self.is_causal, self.needs_mask = uses_is_causal(workload), needs_mask(workload)
        self.options: dict[str, Any] = {
            "scale": workload.scale,
            "enable_gqa": workload.group > 1,
            "dropout_p": workload.dropout,
        }
        self.visible_by_geometry = visible_by_geometry(workload, device.torch_name) if self.needs_mask else None
        self.fixed_parts = PerInputs(self._fixed_parts)
        self.attn_mask = PerInputs(lambda inputs: self._attn_mask(inputs, inputs.bias))

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out; SDPA gives no lse."""
        import torch

        if not save:
            with torch.no_grad():
                return Output(self._call(**differentiable(inputs), attn_mask=self.attn_mask(inputs)))
        leaves = leaves_of(inputs)
        with torch.enable_grad():
            bias = leaves.get("bias")
            attn_mask = self.attn_mask(inputs) if bias is None else self._attn_mask(inputs, bias)
            out = self._call(**leaves, attn_mask=attn_mask)
        return Output(out.detach(), saved=Saved(out, leaves))

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """Through autograd."""
        return autograd_backward(inputs, saved)

    def _call(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, **_: Tensor | None) -> Tensor:
        from torch.nn.functional import scaled_dot_product_attention

        if self.needs_unit_stride:
            q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        with self.pin():
            return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=self.is_causal, **self.options)

    def _fixed_parts(self, inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
        """What is seen (with a bias or ALiBi: what is hidden), and ALiBi in the inputs' dtype."""
        visible, alibi = both_visible(self.visible_by_geometry, inputs.mask), inputs.alibi_bias()
        if visible is not None and (alibi is not None or inputs.bias is not None):
            visible = ~visible
        return visible, None if alibi is None else alibi.to(self.dtype)

    def _attn_mask(self, inputs: Inputs, bias: Tensor | None) -> Tensor | None:
        """What hides as bool; with a bias or ALiBi their sum in the inputs' dtype, -inf where hidden."""
        import torch

        if not self.needs_mask:
            return None
        seen_or_hidden, alibi = self.fixed_parts(inputs)
        parts = [part.to(self.dtype) for part in (bias, alibi) if part is not None]
        if not parts:
            return seen_or_hidden
        added = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        if added.shape[-1] != inputs.workload.S:  # the CUDA kernels refuse a last dim of stride 0
            added = added.expand(*added.shape[:-1], inputs.workload.S).contiguous()
        return added if seen_or_hidden is None else added.masked_fill(seen_or_hidden, -torch.inf)


# --- asking PyTorch ---------------------------------------------------------------------------------------------------


def _torch_on(device: Device) -> Any:
    """torch, where it imports and has such a device; else None: then there is nobody to ask."""
    try:
        import torch
    except ImportError:
        return None
    return torch if device.kind == "cpu" or torch.cuda.is_available() else None


def _deterministic_only() -> bool:
    torch = _torch_on(Device("cpu", ""))
    if torch is None:
        return False
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _selection(backend: str, device: Device) -> Callable[[Workload, str], bool] | None:
    """A question to PyTorch: would it let ``backend`` run this workload in this direction? None: nobody to ask.

    It is asked with tensors of the workload's shapes that hold one row of memory each (expanded).
    """
    torch = _torch_on(device)
    if torch is None:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    pin = getattr(SDPBackend, backend)
    fits = {
        "FLASH_ATTENTION": torch.backends.cuda.can_use_flash_attention,
        "EFFICIENT_ATTENTION": torch.backends.cuda.can_use_efficient_attention,
        "CUDNN_ATTENTION": torch.backends.cuda.can_use_cudnn_attention,
    }[backend]

    def accepts(workload: Workload, direction: str) -> bool:
        with torch.set_grad_enabled(direction == "backward"):
            tensors = _stand_ins(torch, workload, device)
            asked = (*tensors, workload.dropout, uses_is_causal(workload), workload.group > 1)
            if device.kind == "cuda":
                with sdpa_kernel(pin):
                    return fits(torch.backends.cuda.SDPAParams(*asked), False)
            with sdpa_kernel([pin, SDPBackend.MATH]):  # can_use_* answer for CUDA only
                return torch._fused_sdp_choice(*asked[:-1], enable_gqa=asked[-1]) == int(pin)

    return accepts


def _stand_ins(torch: Any, w: Workload, device: Device) -> tuple[Any, Any, Any, Any]:
    def stand_in(*shape: int, dtype: Any, wants_gradient: bool = True) -> Tensor:
        row = torch.empty((1, 1, 1, shape[-1]), dtype=dtype, device=device.torch_name)
        return row.requires_grad_(wants_gradient and torch.is_grad_enabled()).expand(shape)

    dtype = torch_dtype(w.dtype)
    q = stand_in(w.B, w.H, w.L, w.D, dtype=dtype)
    k, v = stand_in(w.B, w.H_kv, w.S, w.D, dtype=dtype), stand_in(w.B, w.H_kv, w.S, w.D_v, dtype=dtype)
    mask = None
    if needs_mask(w):
        additive = w.alibi or w.bias is not None
        mask = stand_in(w.B, w.H, w.L, w.S, dtype=dtype if additive else torch.bool, wants_gradient=w.bias is not None)
    return q, k, v, mask


def _easier(w: Workload, direction: str) -> Iterator[tuple[Workload, str, str]]:
    """Workloads with one hurdle less, and what it says about the hurdle if PyTorch takes them."""
    if direction == "backward":
        yield w, "forward", "has no backward of this kernel here"
    if w.group > 1:
        yield w.replace(H_kv=w.H), direction, f"does not take grouped-query heads (enable_gqa) here, H{w.H}/{w.H_kv}"
    if w.dropout:
        yield w.replace(dropout=0.0), direction, "does not take dropout here"
    plain = w.replace(
        causal=None, window=None, alibi=False, mask=None, bias=None, bias_shape=None, lengths=None, packed=None
    )
    if needs_mask(w):
        yield plain, direction, f"does not take the attn_mask here that {_masking_cause(w)} needs"
    elif w.causal:
        yield plain, direction, f"does not take is_causal here with L = {w.L}, S = {w.S}"
    dims = f"D = {w.D}" + (f", D_v = {w.D_v}" if w.D_v != w.D else "")
    yield w.replace(D=64, D_v=64), direction, f"does not take {dims} here"
    yield w.replace(dtype="fp16"), direction, f"does not take {w.dtype} here"


def _scale_reason(w: Workload) -> str:
    return f"masks and takes the row's maximum before it scales, so it needs a scale above 0, not {w.effective_scale:g}"


def _masking_cause(w: Workload) -> str:
    words = [word for word in MASKING_FEATURES if word in w.features and (word != "causal_bottom_right" or w.L != w.S)]
    return " with ".join(FEATURE_SENTENCES[word] for word in words)


def _versions(backend: str) -> str:
    """torch's version, and that of cuDNN where it is cuDNN that refuses."""
    import torch

    cudnn = torch.backends.cudnn.version() if backend == "CUDNN_ATTENTION" else None
    return f"{torch.__version__}" + (f" with cuDNN {cudnn}" if cudnn else "")
