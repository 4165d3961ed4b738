"""Stage 2: FlashAttention-3 by its own module, ``flash_attn_interface``.

Reads Inputs, writes Output and Gradients. Must not import another implementation or a later stage. What the sheet says
was read in flash-attention's hopper/flash_attn_interface.py (its main branch of 2026) and hopper/flash_api.cpp.

PyTorch's own way to it, ``torch.nn.attention.activate_flash_attention_impl("FA3")`` of torch 2.11, imports the same
module and then calls its kernels for SDPA without windows and softcap, so it is no second one to pick.
"""

from __future__ import annotations

import inspect
from typing import Any

from attnscope.device import Device
from attnscope.errors import PrepareFailed
from attnscope.implementation import Sheet, SheetImplementation
from attnscope.implementations.heads_last import (
    Packing,
    PreparedHeadsLast,
    anchor_reason,
    shape_reasons,
    window_of,
)
from attnscope.implementations.library import Library
from attnscope.inputs import Inputs, Tensor
from attnscope.workload import Workload

LIBRARY = Library("flash-attn-3", "flash_attn_interface", ("flash_attn_func", "flash_attn_varlen_func"))


class FlashAttn3(SheetImplementation):
    """``flash_attn_func`` of FlashAttention-3, and ``flash_attn_varlen_func`` where lengths differ."""

    name = "flash_attn_3"
    summary = "FlashAttention-3, the Hopper kernels of flash-attention: windows and softcap, no ALiBi"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16"}),
        features=frozenset(
            {
                "gqa", "cross", "causal_top_left", "causal_bottom_right", "window", "softcap", "scale", "lengths",
                "packed",
            }
        ),
        devices=frozenset({"cuda"}),
        max_head_dim=256,
        head_dim_multiple=8,
        min_capability=(9, 0),
        below_capability=(10, 0),
        packages=("torch", LIBRARY.requirement),
        kernels={"cuda": (r"flash::\w*Flash(AttnFwd|AttnBwd)|FlashAttn(Fwd|Bwd)",)},
        lse=True,
        coarse_tanh=True,
    )  # fmt: skip

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """Where positions count from, empty tensors, scales."""
        del device, direction
        anchor = anchor_reason(workload)
        return [*shape_reasons(workload), *([anchor] if anchor else [])]

    def prepare(self, workload: Workload, device: Device) -> PreparedFlashAttn3:
        """Imports the library. Raises PrepareFailed where it is broken, or too old to return lse."""
        library = LIBRARY.load(self.name)
        if "return_attn_probs" not in inspect.signature(library.flash_attn_func).parameters:
            raise PrepareFailed(
                f"{self.name}: the installed flash_attn_interface is too old: its flash_attn_func has no "
                "return_attn_probs, so it gives no lse"
            )
        return PreparedFlashAttn3(library, workload, device)


class PreparedFlashAttn3(PreparedHeadsLast):
    """The library's calls."""

    def __init__(self, library: Any, workload: Workload, device: Device) -> None:
        super().__init__(workload, device)
        self.library = library
        self.options = {
            "softmax_scale": workload.effective_scale,
            "causal": workload.causal is not None,
            "window_size": window_of(workload),
            "softcap": workload.softcap or 0.0,
            "return_attn_probs": True,
        }

    def options_of(self, inputs: Inputs, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """Determinism as torch is asked for it."""
        import torch

        del inputs, leaves
        return {**self.options, "deterministic": torch.are_deterministic_algorithms_enabled()}

    def dense(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """``flash_attn_func``."""
        out, lse = self.library.flash_attn_func(q, k, v, **options)
        return out, lse

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """``flash_attn_varlen_func``."""
        out, lse = self.library.flash_attn_varlen_func(
            q, k, v, packing.cu_queries, packing.cu_keys, packing.longest_query, packing.longest_key, **options
        )
        return out, lse
