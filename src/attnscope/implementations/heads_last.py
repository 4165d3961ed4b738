"""Stage 2: what implementations share whose library takes (B, L, H, D) tensors.

For sequences of differing lengths it takes (T, H, D), laid end to end, with cumulative lengths. Reads Inputs, writes
Output and Gradients. Must not import an implementation or a later stage, nor torch at import.

These libraries count positions from the last key (bottom right): query i stands at key i + S - L. A workload that
counts from the first key can be handed to them where that is the same, see :func:`anchor_reason`. Rows that see no key
come back as 0, with an lse of +inf, -inf or either; here it is -inf.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attnscope.device import Device
from attnscope.implementation import Gradients, Output
from attnscope.implementations.common import Saved, autograd_backward, leaves_of, may_hide_whole_rows
from attnscope.inputs import Inputs, Tensor
from attnscope.workload import Workload


def anchor_reason(w: Workload) -> str | None:
    """A reason where positions count from the first key and that differs from counting from the last; else None."""
    anchored = w.causal == "top_left" or (w.causal is None and (w.window is not None or w.alibi))
    if not anchored or w.packed is not None:
        return None
    keys = sorted({w.key_length(b) for b in range(w.B)}) if w.lengths is not None else [w.S]
    if all(n == w.L for n in keys):
        return None
    cause = "a causal mask" if w.causal else "a sliding window" if w.window is not None else "ALiBi"
    return (
        f"counts positions from the last key, and {cause} aligned to the top left from the first: it needs as many "
        f"keys as rows, not {w.L} rows and {'/'.join(map(str, keys[:4]))} keys"
    )


def shape_reasons(w: Workload) -> Iterator[str]:
    """What fused kernels of this kind refuse everywhere: nothing to compute, a scale that turns the order of scores."""
    if w.B == 0 or w.L == 0 or w.S == 0:
        yield f"takes no empty batch or sequences, this workload has B = {w.B}, L = {w.L}, S = {w.S}"
    if w.effective_scale <= 0:
        yield f"takes the row's maximum before it scales, so it needs a scale above 0, not {w.effective_scale:g}"


def window_of(w: Workload, unlimited: int | None = -1) -> tuple[int | None, int | None]:
    """Keys to the left and right of a row's own that it sees, besides its own; ``unlimited`` where all."""
    reach = unlimited if w.window is None else w.window - 1
    return reach, 0 if w.causal else reach


def addressable(tensor: Tensor) -> Tensor:
    """The tensor itself where neighbours in the last dimension are neighbours in memory and no two places share one."""
    shared = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.contiguous() if shared or tensor.stride(-1) != 1 else tensor


@dataclass
class Packing:
    """Sequences laid end to end: cumulative lengths (n + 1,) int32 on the device, and the longest of each side.

    ``real_keys`` are the places of the real keys in the (B * S) padded ones; None where all are real.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    longest_query: int
    longest_key: int
    real_keys: Tensor | None = None

    @classmethod
    def of(cls, w: Workload, device: Device) -> Packing:
        """Packed sequences as they are; else each batch entry is a sequence, its padding left out."""
        import torch

        queries = list(w.packed) if w.packed is not None else [w.L] * w.B
        keys = list(w.packed) if w.packed is not None else [w.key_length(b) for b in range(w.B)]
        places = None
        if w.lengths is not None:
            starts = torch.arange(w.B).repeat_interleave(torch.tensor(keys)) * w.S
            places = starts + torch.cat([torch.arange(n) for n in keys])
            places = places.to(device.torch_name)

        def cumulative(lengths: list[int]) -> Tensor:
            return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device.torch_name)

        return cls(cumulative(queries), cumulative(keys), max(queries), max(keys), places)

    def queries(self, q: Tensor) -> Tensor:
        """(B, L, H, D) -> (T, H, D); a view where memory allows."""
        return q.reshape(-1, *q.shape[2:])

    def keys(self, k: Tensor) -> Tensor:
        """(B, S, H_kv, D) -> (T, H_kv, D) of the real keys."""
        joined = k.reshape(-1, *k.shape[2:])
        return joined if self.real_keys is None else joined.index_select(0, self.real_keys)


def needs_packing(w: Workload) -> bool:
    """Whether the library's call for sequences of differing lengths must be used."""
    return w.packed is not None or w.lengths is not None


class PreparedHeadsLast:
    """Two calls of a library, ``dense`` and ``ragged``, fed from and returned to the canonical shapes.

    Layout changes and the packing of real keys happen in the call that is timed; gradients go through autograd.
    """

    def __init__(self, workload: Workload, device: Device, *, always_packed: bool = False) -> None:
        self.workload = workload
        self.packing = Packing.of(workload, device) if always_packed or needs_packing(workload) else None
        self.may_hide_rows = may_hide_whole_rows(workload)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """(B, L, H, D), (B, S, H_kv, D), (B, S, H_kv, D_v) -> (B, L, H, D_v), lse (B, H, L) or None."""
        raise NotImplementedError

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """(T, H, D), (T, H_kv, D), (T, H_kv, D_v) -> (T, H, D_v), lse (H, T) or None."""
        raise NotImplementedError

    def options_of(self, inputs: Inputs, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """Tensors besides q, k and v that a call takes, by its own words."""
        del inputs, leaves
        return {}

    def finish_lse(self, lse: Tensor, inputs: Inputs) -> Tensor:
        """lse (B, H, L) as the contract has it: of a row that sees no key -inf."""
        import torch

        del inputs
        return torch.where(lse == torch.inf, -torch.inf, lse) if self.may_hide_rows else lse

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out, and lse where the library gives it."""
        import torch

        leaves = leaves_of(inputs) if save else {"q": inputs.q, "k": inputs.k, "v": inputs.v}
        with torch.set_grad_enabled(save):
            out, lse = self._attend(inputs, leaves)
        lse = None if lse is None else self.finish_lse(lse.detach(), inputs)
        return Output(out.detach(), lse, saved=Saved(out, leaves) if save else None)

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """Through the library's own autograd function."""
        return autograd_backward(inputs, saved, addressable(inputs.grad_out))

    def _attend(self, inputs: Inputs, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        w = self.workload
        q, k, v = (addressable(leaves[name].transpose(1, 2)) for name in ("q", "k", "v"))
        options = self.options_of(inputs, leaves)
        if self.packing is None:
            out, lse = self.dense(q, k, v, options)
        else:
            packing = self.packing
            out, lse = self.ragged(packing.queries(q), packing.keys(k), packing.keys(v), packing, options)
            out = out.view(w.B, w.L, w.H, w.D_v)
            lse = None if lse is None else lse.reshape(w.H, w.B, w.L).transpose(0, 1)
        return out.transpose(1, 2), lse
