"""Stage 2, with torch: the call of ``scaled_dot_product_attention`` that a workload is, with tensors that hold no data.

Reads a Workload, writes tensors and options. Tensors have its shapes, strides, dtype and gradients; a mask is as large
as ``sdpa_auto`` makes it. Must not import a later stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnscope.device import Device
from attnscope.implementations.common import may_hide_whole_rows
from attnscope.implementations.sdpa import needs_mask, uses_is_causal
from attnscope.inputs import refuse_too_large, torch_dtype, unpack_qkv
from attnscope.workload import Workload

Tensor = Any


@contextmanager
def stand_in_call(
    workload: Workload, device: Device, direction: str
) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Any], list[str]]]:
    """(q, k, v, mask), options and notes; within it gradients are recorded where ``direction`` is backward.

    Raises:
        DeviceError: the device has too little memory for the tensors.
    """
    import torch

    refuse_too_large(workload, device, factor=1.0)
    backward = direction == "backward"
    options = {
        "dropout_p": workload.dropout,
        "is_causal": uses_is_causal(workload),
        "scale": workload.scale,
        "enable_gqa": workload.group > 1,
    }
    with torch.set_grad_enabled(backward):
        q, k, v = (t.requires_grad_(backward) for t in _laid_out(workload, device))
        mask = _mask(workload, device, wants_gradient=backward and workload.bias is not None)
        yield (q, k, v, mask), options, _notes(workload)


def _notes(workload: Workload) -> list[str]:
    unsaid = [
        word for word, wanted in (("softcap", workload.softcap is not None), ("sinks", workload.sinks)) if wanted
    ]  # fmt: skip
    notes = [f"SDPA has no word for {' and '.join(unsaid)}: asked without"] if unsaid else []
    if workload.dropout:
        notes.append("SDPA draws its own dropout, where the workload gives one: asked with dropout_p")
    return notes


def _laid_out(w: Workload, device: Device) -> tuple[Tensor, ...]:
    import torch

    options = {"dtype": torch_dtype(w.dtype), "device": device.torch_name}
    if w.layout == "qkv":
        return tuple(t.detach() for t in unpack_qkv(torch.empty(w.B, w.L, 3, w.H, w.D, **options)))
    shapes = ((w.H, w.L, w.D), (w.H_kv, w.S, w.D), (w.H_kv, w.S, w.D_v))
    if w.layout == "blhd":
        return tuple(torch.empty(w.B, n, h, d, **options).transpose(1, 2).detach() for h, n, d in shapes)
    return tuple(torch.empty(w.B, h, n, d, **options) for h, n, d in shapes)


def _mask(w: Workload, device: Device, *, wants_gradient: bool) -> Tensor | None:
    """As sdpa_auto's: bool where it only hides, else additive in the inputs' dtype. All True, or False where a row may
    see no key, so that what hangs on such rows is told."""
    import torch

    if not needs_mask(w):
        return None
    parts = [(w.B if w.lengths is not None else 1, 1, w.L, w.S)]
    parts += [w.broadcast_shape(pattern) for pattern in (w.mask, w.bias_shape) if pattern]
    parts += [(1, w.H, 1, 1)] if w.alibi else []
    shape = torch.broadcast_shapes(*parts)
    if w.alibi or w.bias is not None:
        return torch.empty(shape, dtype=torch_dtype(w.dtype), device=device.torch_name, requires_grad=wants_gradient)
    return torch.full(shape, not may_hide_whole_rows(w), dtype=torch.bool, device=device.torch_name)
