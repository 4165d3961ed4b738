"""Stage 1, with torch: the same inputs at other strides, as callers pass them who cut tensors out of larger ones.

Reads Inputs, writes Inputs whose q, k, v and dO hold the same numbers (``expanded``: one head's for all) elsewhere in
memory. A workload's layout already decides the order of the axes; these are ways to be no whole tensor. The last axis
stays contiguous and every row begins at a multiple of 16 bytes where the plain tensor's rows do.
"""

from __future__ import annotations

import dataclasses

from attnscope.errors import UnknownName, UsageError
from attnscope.inputs import Inputs, Tensor

STRIDES = ("plain", "wide", "rows", "heads", "expanded")
PADDING = 64  # features after a row's own
ALIGNED_BYTES = 16


def restride(inputs: Inputs, way: str) -> Inputs:
    """``inputs`` laid out in one of :data:`STRIDES`.

    ``wide``: rows of a wider matrix, as one of several projections made at once; ``rows``: every second row;
    ``heads``: heads of a tensor that has one more, so that the first does not begin its buffer; ``expanded``: one key
    and value head, and one row of dO, seen as all (stride 0). A packed qkv buffer stays as it is.

    Raises:
        UsageError: there is no such way.
    """
    if way not in STRIDES:
        raise UsageError(str(UnknownName("way to lay out inputs", way, STRIDES)))
    if way == "plain" or inputs.qkv is not None or 0 in inputs.q.shape or 0 in inputs.k.shape:
        return inputs
    if way == "expanded":
        k, v = (t[:, :1].expand_as(t) for t in (inputs.k, inputs.v))
        return dataclasses.replace(inputs, k=k, v=v, grad_out=inputs.grad_out[..., :1, :].expand_as(inputs.grad_out))
    moved = {name: _moved(getattr(inputs, name), way, inputs) for name in ("q", "k", "v", "grad_out")}
    return dataclasses.replace(inputs, **moved)


def own_memory(tensor: Tensor) -> Tensor:
    """The part of an expanded tensor that holds its numbers: axes of stride 0 cut to one place."""
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _moved(tensor: Tensor, way: str, inputs: Inputs) -> Tensor:
    """A copy of ``tensor`` cut out of a larger one whose other numbers are NaN, in the order of its layout."""
    import torch

    if tensor.shape[-1] * tensor.element_size() % ALIGNED_BYTES:
        return tensor
    b, h, rows, size = tensor.shape
    extra = {"wide": (0, 0, PADDING), "rows": (0, rows, 0), "heads": (1, 0, 0)}[way]
    heads, length, width = h + extra[0], rows + extra[1], size + extra[2]
    blhd = inputs.workload.layout == "blhd"
    shape = (b, length, heads, width) if blhd else (b, heads, length, width)
    whole = torch.full(shape, torch.nan, dtype=tensor.dtype, device=tensor.device)
    whole = whole.transpose(1, 2) if blhd else whole
    part = whole[:, extra[0] :, :: 2 if extra[1] else 1, :size]
    part.copy_(tensor)
    return part
