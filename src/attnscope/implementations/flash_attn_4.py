"""Stage 2: FlashAttention-4, the CuTe DSL kernels of package ``flash-attn-4`` (``flash_attn.cute``).

Reads Inputs, writes Output and Gradients. Must not import another implementation or a later stage. What the sheet says
was read in flash-attn-4 4.0.0b36, flash_attn/cute/interface.py, utils.py and cache_utils.py. Each combination of
options is compiled at its first call, which ``prepare`` makes; the library keeps what it compiled on disk only where
the environment sets FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
from attnscope.implementations.library import Library, compile_by_running
from attnscope.inputs import Inputs, Tensor
from attnscope.workload import Workload

LIBRARY = Library("flash-attn-4", "flash_attn.cute", ("flash_attn_func", "flash_attn_varlen_func"))
BLACKWELL = (10, 11)  # major compute capabilities whose kernels take fewer head dims
BLACKWELL_UNEQUAL = {(192, 128), (256, 256)}  # the head dims above 128 that they take


class FlashAttn4(SheetImplementation):
    """``flash_attn_func``, and ``flash_attn_varlen_func`` where lengths differ."""

    name = "flash_attn_4"
    summary = "FlashAttention-4, CuTe DSL kernels compiled when they are first called: sinks, unequal head dims"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16"}),
        features=frozenset(
            {
                "gqa", "cross", "unequal_head_dims", "causal_top_left", "causal_bottom_right", "window", "softcap",
                "scale", "sinks", "lengths", "packed",
            }
        ),
        devices=frozenset({"cuda"}),
        max_head_dim=256,
        head_dim_multiple=8,
        min_capability=(8, 0),
        packages=("torch", LIBRARY.requirement),
        kernels={"cuda": (r"flash_attncute|FlashAttention(Forward|Backward)",)},
        lse=True,
        coarse_tanh=True,
        kept_on_disk=os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") == "1",
    )  # fmt: skip

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """What differs by card and direction; where positions count from, empty tensors, scales."""
        anchor = anchor_reason(workload)
        found = [*shape_reasons(workload), *([anchor] if anchor else [])]
        if device.kind == "cuda" and device.capability is not None:
            found += _card_reasons(workload, device, device.capability[0], direction)
        return found

    def prepare(self, workload: Workload, device: Device) -> PreparedFlashAttn4:
        """Imports the library and compiles, by running once. Raises PrepareFailed where the library is broken."""
        prepared = PreparedFlashAttn4(LIBRARY.load(self.name), workload, device)
        compile_by_running(self, prepared, workload, device)
        return prepared


def _card_reasons(w: Workload, device: Device, major: int, direction: str) -> Iterator[str]:
    if direction == "backward" and major < 9:
        yield f"has a backward from compute capability 9.0 on, which {device.name} is below"
    if direction == "backward" and w.sinks and major == 12:
        yield "has no backward with attention sinks on compute capability 12.x"
    if direction == "backward" and w.softcap and major == 12:
        yield "has no backward with a softcap on compute capability 12.x"
    if direction == "backward" and w.group > 1 and w.D != w.D_v:
        yield f"has no backward for grouped-query heads with unequal head dims, D = {w.D}, D_v = {w.D_v}"
    if major in BLACKWELL and max(w.D, w.D_v) > 128 and (w.D, w.D_v) not in BLACKWELL_UNEQUAL:
        yield f"takes D and D_v up to 128, or 192 and 128, or 256 and 256 on {device.name}, not {w.D} and {w.D_v}"
    if major not in (8, 9, 10, 11, 12):
        yield f"knows compute capabilities 8.x to 12.x, {device.name} has {major}.x"


class PreparedFlashAttn4(PreparedHeadsLast):
    """The library's calls. Its windows are None where unlimited."""

    def __init__(self, library: Any, workload: Workload, device: Device) -> None:
        super().__init__(workload, device)
        self.library = library
        self.options = {
            "softmax_scale": workload.effective_scale,
            "causal": workload.causal is not None,
            "window_size": window_of(workload, unlimited=None),
            "softcap": workload.softcap or 0.0,
            "return_lse": True,
        }

    def options_of(self, inputs: Inputs, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """The sinks, which may want a gradient; determinism as torch is asked for it."""
        import torch

        return {
            **self.options,
            "learnable_sink": leaves.get("sinks", inputs.sinks),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }

    def dense(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """``flash_attn_func``."""
        out, lse = self.library.flash_attn_func(q, k, v, **options)
        return out, lse

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """``flash_attn_varlen_func``."""
        out, lse = self.library.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=packing.cu_queries,
            cu_seqlens_k=packing.cu_keys,
            max_seqlen_q=packing.longest_query,
            max_seqlen_k=packing.longest_key,
            **options,
        )
        return out, lse
