"""Stage 2: FlashAttention-2 by its own package, ``flash-attn``.

Reads Inputs, writes Output and Gradients. Must not import another implementation or a later stage. What the sheet says
was read in flash-attn 2.8.3: flash_attn/flash_attn_interface.py, csrc/flash_attn/flash_api.cpp, src/alibi.h,
src/softmax.h, src/utils.h.
"""

from __future__ import annotations

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
from attnscope.inputs import Inputs, Tensor
from attnscope.workload import Workload

LIBRARY = Library("flash-attn", "flash_attn.flash_attn_interface", ("flash_attn_func", "flash_attn_varlen_func"))


class FlashAttn2(SheetImplementation):
    """``flash_attn_func``, and ``flash_attn_varlen_func`` for packed sequences and key lengths."""

    name = "flash_attn_2"
    summary = "FlashAttention-2 by its own package, flash-attn: ALiBi, windows and softcap beside causal masks"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16"}),
        features=frozenset(
            {
                "gqa", "cross", "causal_top_left", "causal_bottom_right", "window", "softcap", "scale", "alibi",
                "lengths", "packed",
            }
        ),
        devices=frozenset({"cuda"}),
        max_head_dim=256,
        min_capability=(8, 0),
        packages=("torch", LIBRARY.requirement),
        kernels={"cuda": (r"flash_(fwd|bwd)",)},
        kernels_absent={"cuda": (r"pytorch_flash",)},
        traceable=True,
        lse=True,
        draws_dropout=True,
        coarse_tanh=True,
    )  # fmt: skip

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """Where positions count from, empty tensors, scales, softcap with dropout."""
        del device, direction
        anchor = anchor_reason(workload)
        both = ["takes no softcap together with dropout"] if workload.softcap and workload.dropout else []
        return [*([anchor] if anchor else []), *shape_reasons(workload), *both]

    def prepare(self, workload: Workload, device: Device) -> PreparedFlashAttn2:
        """Imports the library. Raises PrepareFailed where it is broken."""
        return PreparedFlashAttn2(LIBRARY.load(self.name), workload, device)


class PreparedFlashAttn2(PreparedHeadsLast):
    """The library's calls.

    ``return_attn_probs`` returns lse; without dropout it writes no probabilities, with dropout it would.
    """

    def __init__(self, library: Any, workload: Workload, device: Device) -> None:
        super().__init__(workload, device)
        self.library = library
        self.options = {
            "softmax_scale": workload.effective_scale,
            "causal": workload.causal is not None,
            "window_size": window_of(workload),
            "softcap": workload.softcap or 0.0,
            "dropout_p": workload.dropout,
            "return_attn_probs": not workload.dropout,
        }
        self.lse_shift = self._lse_shift(device) if workload.alibi and self._is_causal() else None

    def options_of(self, inputs: Inputs, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """ALiBi's slopes."""
        import torch

        del leaves
        deterministic = torch.are_deterministic_algorithms_enabled()
        return {**self.options, "alibi_slopes": inputs.alibi_slopes, "deterministic": deterministic}

    def dense(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """``flash_attn_func``."""
        return _out_and_lse(self.library.flash_attn_func(q, k, v, **options))

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """``flash_attn_varlen_func``."""
        ends = packing.cu_queries, packing.cu_keys, packing.longest_query, packing.longest_key
        return _out_and_lse(self.library.flash_attn_varlen_func(q, k, v, *ends, **options))

    def finish_lse(self, lse: Tensor, inputs: Inputs) -> Tensor:
        """Of a causal ALiBi the library adds ``slope * j`` instead of ``-slope * (p - j)``: lse lacks ``slope * p``."""
        lse = super().finish_lse(lse, inputs)
        if self.lse_shift is None or inputs.alibi_slopes is None:
            return lse
        return lse - inputs.alibi_slopes[:, None] * self.lse_shift[:, None]

    def _is_causal(self) -> bool:
        """As the library has it: a window that reaches as far as the longest sequence of keys is none."""
        w = self.workload
        longest = self.packing.longest_key if self.packing else w.S
        return w.causal is not None and (w.window is None or w.window - 1 >= longest)

    def _lse_shift(self, device: Device) -> Tensor:
        """Each row's place among its keys, float32 (B or 1, L)."""
        import torch

        w = self.workload
        if w.packed is not None:
            return torch.cat([torch.arange(n) for n in w.packed]).float().to(device.torch_name)[None]
        offsets = torch.tensor([w.query_offset(b) for b in range(w.B)])
        return (torch.arange(w.L)[None] + offsets[:, None]).float().to(device.torch_name)


def _out_and_lse(returned: Any) -> tuple[Tensor, Tensor | None]:
    """(out, lse, probabilities), or out alone."""
    return (returned[0], returned[1]) if isinstance(returned, tuple) else (returned, None)
