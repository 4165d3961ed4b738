"""Stage 2: PyTorch's own attention for sequences of differing lengths, ``torch.nn.attention.varlen``.

Reads Inputs, writes Output and Gradients. Must not import another implementation or a later stage. What the sheet says
was read in torch 2.11 and 2.13, torch/nn/attention/varlen.py: tensors are (T, H, D), a causal mask is the window
(-1, 0), and PyTorch's FlashAttention-2 computes (or the one that ``activate_flash_attention_impl`` put in its place).
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

from attnscope.device import Device
from attnscope.implementation import Sheet, SheetImplementation
from attnscope.implementations.heads_last import (
    Packing,
    PreparedHeadsLast,
    anchor_reason,
    shape_reasons,
    window_of,
)
from attnscope.implementations.library import Library
from attnscope.inputs import Tensor
from attnscope.workload import Workload

LIBRARY = Library("torch", "torch.nn.attention.varlen", ("varlen_attn", "AuxRequest"))


class Varlen(SheetImplementation):
    """``varlen_attn``. A batch of equal lengths is laid end to end first, which is a copy unless heads come last."""

    name = "varlen"
    summary = "PyTorch's varlen_attn: sequences end to end without padding, computed by FlashAttention-2"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16"}),
        features=frozenset(
            {"gqa", "cross", "causal_top_left", "causal_bottom_right", "window", "scale", "lengths", "packed"}
        ),
        devices=frozenset({"cuda"}),
        max_head_dim=256,
        head_dim_multiple=8,
        min_capability=(8, 0),
        packages=("torch>=2.10",),
        kernels={"cuda": (r"flash_(fwd|bwd)|FlashAttn(Fwd|Bwd)|flash_attncute",)},
        traceable=True,
        lse=True,
    )

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """Grouped heads and windows before they came; where positions count from, empty tensors, scales."""
        anchor = anchor_reason(workload)
        found = [*shape_reasons(workload), *([anchor] if anchor else [])]
        if found or self.sheet.reasons(workload, device, direction) or find_spec("torch") is None:
            return found
        for wanted, parameter, sentence in (
            (workload.group > 1, "enable_gqa", "takes no grouped-query heads"),
            (workload.window is not None, "window_size", "takes no sliding window"),
            (workload.scale is not None, "scale", "takes no scale of its own"),
        ):
            if wanted and parameter not in _parameters():
                found.append(f"{sentence} in the installed torch, whose varlen_attn has no {parameter}")
        return found

    def prepare(self, workload: Workload, device: Device) -> PreparedVarlen:
        """Lays out the cumulative lengths."""
        return PreparedVarlen(LIBRARY.load(self.name), workload, device)


def _parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


class PreparedVarlen(PreparedHeadsLast):
    """``varlen_attn`` with its lse, which is (H, T) as the kernel writes it, whatever its docstring says."""

    def __init__(self, library: Any, workload: Workload, device: Device) -> None:
        super().__init__(workload, device, always_packed=True)
        self.varlen_attn = library.varlen_attn
        known = inspect.signature(library.varlen_attn).parameters
        self.options: dict[str, Any] = {"return_aux": library.AuxRequest(lse=True)}
        if "scale" in known:
            self.options["scale"] = workload.effective_scale
        if "window_size" in known:
            self.options["window_size"] = window_of(workload)
        else:
            self.options["is_causal"] = workload.causal is not None
        if "enable_gqa" in known:
            self.options["enable_gqa"] = workload.group > 1

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """``varlen_attn``."""
        out, lse = self.varlen_attn(
            q,
            k,
            v,
            packing.cu_queries,
            packing.cu_keys,
            packing.longest_query,
            packing.longest_key,
            **self.options,
        )
        return out, lse
