"""Stage 2: xFormers' ``memory_efficient_attention``, which picks FlashAttention or CUTLASS kernels by itself.

Reads Inputs, writes Output and Gradients. Must not import another implementation or a later stage. What the sheet says
was read in xformers 0.0.35: ops/fmha/__init__.py, dispatch.py, flash.py, cutlass.py, attn_bias.py. A mask that
geometry makes is one of its bias classes; a bool mask or an additive bias is one dense tensor, as its users pass it,
whose rows start at multiples of 16 bytes. Grouped heads are its five-dimensional form, which has no backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnscope.device import Device
from attnscope.errors import PrepareFailed, first_line
from attnscope.implementation import Sheet, SheetImplementation, module_is_there
from attnscope.implementations.common import PerInputs, both_visible, may_hide_whole_rows
from attnscope.implementations.heads_last import Packing, PreparedHeadsLast, needs_packing, shape_reasons
from attnscope.implementations.library import Library, root_cause
from attnscope.inputs import Inputs, Tensor, torch_dtype, visible_by_geometry
from attnscope.workload import Workload

FUNCTIONS = ("memory_efficient_attention", "BlockDiagonalMask", "LowerTriangularMask", "attn_bias")
CUTLASS_NEWEST = (9, 0)  # CUDA_MAXIMUM_COMPUTE_CAPABILITY of cutlass.FwOp


def needs_tensor(w: Workload) -> bool:
    """Whether the mask must be a dense tensor."""
    return w.mask is not None or w.bias is not None


def flash_reason(w: Workload) -> str | None:
    """Why its FlashAttention kernels cannot take this, so that CUTLASS must; None where they can."""
    if w.dtype == "fp32":
        return "fp32"
    if needs_tensor(w):
        return "a mask or bias tensor"
    if w.D != w.D_v or w.D > 256:
        return f"D = {w.D}, D_v = {w.D_v}"
    if w.causal == "top_left" and any(n != w.L for n in _key_lengths(w)):
        return "a top-left causal mask with L != S"
    return None


class Xformers(SheetImplementation):
    """``memory_efficient_attention`` with the bias class, or the dense tensor, that the workload's mask is."""

    name = "xformers"
    summary = "xFormers' memory_efficient_attention: FlashAttention or CUTLASS, as it picks; any mask as a tensor"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16", "fp32"}),
        features=frozenset(
            {
                "gqa", "cross", "unequal_head_dims", "causal_top_left", "causal_bottom_right", "window", "scale",
                "mask", "bias", "lengths", "packed",
            }
        ),
        forward_only=frozenset({"gqa"}),
        devices=frozenset({"cuda"}),
        min_capability=(8, 0),
        packages=("torch", "xformers"),
        draws_dropout=True,
        rounds={"cuda": frozenset({"bias"})},
        kernels={"cuda": (r"fmha_cutlass|flash_(fwd|bwd)|FlashAttn(Fwd|Bwd)|[sS]plit_?[kK]",)},
    )  # fmt: skip

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """What no kernel or no bias class of it covers."""
        found = [*shape_reasons(workload), *_dim_reasons(workload), *_mask_reasons(workload, direction)]
        cause = flash_reason(workload)
        if cause and device.kind == "cuda" and device.capability is not None and device.capability > CUTLASS_NEWEST:
            found.append(f"computes {cause} by CUTLASS, up to compute capability 9.0, {device.name} is newer")
        return found

    def prepare(self, workload: Workload, device: Device) -> PreparedXformers:
        """Imports the library and makes the bias. Raises PrepareFailed where the library or its extension is broken."""
        # xformers takes any package called flash_attn for FlashAttention-2, also the one that flash-attn-4 installs
        hidden = None if module_is_there("flash_attn.flash_attn_interface") else "flash_attn"
        library = Library("xformers", "xformers.ops.fmha", FUNCTIONS, hidden)
        fmha = library.load(self.name)
        broken = getattr(
            Library("xformers", "xformers._cpp_lib", ()).load(self.name), "_cpp_library_load_exception", None
        )
        if broken is not None:
            raise PrepareFailed(
                f"{self.name}: package xformers {library.version()} is installed, but its extension does not load: "
                f"{first_line(root_cause(broken))}",
                str(broken),
            )
        return PreparedXformers(fmha, workload, device)


def _key_lengths(w: Workload) -> list[int]:
    if w.packed is not None:
        return [w.L]  # as many keys as rows, sequence by sequence
    return list(w.lengths) if w.lengths is not None else [w.S]


def _dim_reasons(w: Workload) -> Iterator[str]:
    multiple = 4 if w.dtype == "fp32" else 8
    for letter, size in (("D", w.D), ("D_v", w.D_v)) if w.D != w.D_v else (("D", w.D),):
        if size % multiple:
            yield f"needs {letter} to be a multiple of {multiple} for {w.dtype}, not {size}"
    cause = flash_reason(w)
    if w.group > 1 and cause:
        yield f"takes grouped-query heads by its FlashAttention kernels, which do not take {cause}"


def _mask_reasons(w: Workload, direction: str) -> Iterator[str]:
    if needs_tensor(w):
        return
    cause, lengths = flash_reason(w), _key_lengths(w)
    if w.window is not None and w.causal is None and needs_packing(w):
        yield "has no window to both sides for sequences of differing lengths"
    if w.window is not None and w.causal != "bottom_right" and not needs_packing(w) and w.L != w.S:
        yield f"aligns its windows to the bottom right, so it needs L = S, not L = {w.L}, S = {w.S}"
    if w.window is not None and w.causal is None and cause:
        yield f"has a window to both sides in its FlashAttention kernels, which do not take {cause}"
    if w.lengths is not None and w.window is not None and w.causal == "top_left" and any(n != w.L for n in lengths):
        yield "has no causal window aligned to the top left for fewer keys than rows"
    if w.lengths is not None and w.causal == "bottom_right" and min(lengths) < w.L:
        yield f"needs as many keys as rows for a bottom-right causal mask with key lengths, not {min(lengths)}"
    if cause and may_hide_whole_rows(w):
        yield f"computes {cause} by CUTLASS, which is not known to be 0 on rows that see no key"
    if direction == "backward" and cause and w.window is not None and w.causal:
        yield f"computes {cause} by CUTLASS, which has no backward of a causal window"


class PreparedXformers(PreparedHeadsLast):
    """The library's call. Bias classes are made here, dense tensors once per inputs unless they want a gradient."""

    def __init__(self, fmha: Any, workload: Workload, device: Device) -> None:
        super().__init__(workload, device)
        self.fmha = fmha
        if needs_tensor(workload):
            self.packing = None
        self.device, self.dtype = device, torch_dtype(workload.dtype)
        self.visible_by_geometry = visible_by_geometry(workload, device.torch_name) if needs_tensor(workload) else None
        self.fixed_tensor = PerInputs(lambda inputs: self._tensor(inputs, inputs.bias))
        self.geometry = None if needs_tensor(workload) else self._bias_class()

    def options_of(self, inputs: Inputs, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """The mask, the scale and the probability of dropout."""
        bias = self.geometry
        if needs_tensor(self.workload):
            bias = self._tensor(inputs, leaves["bias"]) if "bias" in leaves else self.fixed_tensor(inputs)
        return {"attn_bias": bias, "scale": self.workload.effective_scale, "p": self.workload.dropout}

    def dense(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """``memory_efficient_attention``; with grouped heads in five dimensions, keys and values expanded."""
        w = self.workload
        if w.group == 1:
            return self.fmha.memory_efficient_attention(q, k, v, **options), None
        q = q.unflatten(2, (w.H_kv, w.group))
        k, v = (t[:, :, :, None].expand(-1, -1, -1, w.group, -1) for t in (k, v))
        return self.fmha.memory_efficient_attention(q, k, v, **options).flatten(2, 3), None

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """The same call: a block-diagonal bias says where sequences begin."""
        del packing
        return self.dense(q[None], k[None], v[None], options)[0][0], None

    def _bias_class(self) -> Any:
        """What the library calls the mask that geometry makes; None where there is none."""
        w, known = self.workload, self.fmha.attn_bias
        if self.packing is not None:
            return self._block_diagonal(known)
        if w.window is not None and w.causal:
            return known.LowerTriangularFromBottomRightLocalAttentionMask(w.window)
        if w.window is not None:
            return known.LocalAttentionFromBottomRightMask(window_left=w.window - 1, window_right=w.window - 1)
        if w.causal == "bottom_right" and w.L != w.S:
            return known.LowerTriangularFromBottomRightMask()
        return known.LowerTriangularMask() if w.causal else None

    def _block_diagonal(self, known: Any) -> Any:
        import torch

        w = self.workload
        queries = list(w.packed) if w.packed is not None else [w.L] * w.B
        keys = list(w.packed) if w.packed is not None else [w.key_length(b) for b in range(w.B)]
        mask = known.BlockDiagonalMask.from_seqlens(queries, keys, device=torch.device(self.device.torch_name))
        if not w.causal:
            return mask
        bottom_right = w.causal == "bottom_right" and queries != keys
        if w.window is not None:
            return (mask.make_local_attention_from_bottomright if bottom_right else mask.make_local_attention)(w.window)
        return mask.make_causal_from_bottomright() if bottom_right else mask.make_causal()

    def _tensor(self, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Everything that hides and what is added, (B, H, L, S) in the inputs' dtype, rows 16 bytes apart or more."""
        import torch

        w = self.workload
        visible = both_visible(self.visible_by_geometry, inputs.mask)
        added = torch.zeros((1, 1, 1, 1), dtype=self.dtype, device=inputs.q.device) if bias is None else bias
        added = added.to(self.dtype).expand(*added.shape[:2], w.L, w.S)
        if visible is not None:
            added = added.masked_fill(~visible, -torch.inf)
        multiple = 16 // added.element_size()
        padded = torch.nn.functional.pad(added, (0, -w.S % multiple))
        return padded[..., : w.S].expand(w.B, w.H, w.L, w.S)
