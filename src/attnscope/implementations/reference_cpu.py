"""Stage 2: attention on a CPU as the first article's reference computes it, in single precision.

Reads Inputs, writes Output and Gradients. Must not import another implementation or a later stage.

One (batch, head) after the other, a block of query rows at a time; a block of scores is all that is ever held.

Forward: scores, their maximum and sum, weights, weighted sum of values. Backward, in the reverse order:

1. out = W V:            dW = dO V^T,  dV += W^T dO
2. P = softmax(scores):  dscores = P * (dP - rowsum(P * dP)),  a sink's share is one more column without a value
3. scores = scale q.k:   draw = scale * dscores  (softcap: times 1 - tanh^2)
4. raw = Q K^T:          dQ = draw K,  dK += draw^T Q

W is P after dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attnscope.device import Device
from attnscope.implementation import FEATURES, Gradients, Output, Sheet, SheetImplementation
from attnscope.implementations.common import ANY_FUSED
from attnscope.inputs import Inputs, Tensor, row_bounds
from attnscope.workload import Workload

BLOCK_ROWS = 256


class ReferenceCpu(SheetImplementation):
    """The readable one: plain loops over heads, plain products of blocks, every feature of a workload."""

    name = "reference_cpu"
    summary = "readable single-precision loops over heads and row blocks; every mask and option, CPU only"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16", "fp32"}),
        features=frozenset(FEATURES),
        devices=frozenset({"cpu"}),
        kernels_absent={"cpu": (ANY_FUSED,)},
        lse=True,
        deterministic=True,
        cuda_graph=False,
    )

    def prepare(self, workload: Workload, device: Device) -> PreparedReferenceCpu:
        """Which keys each row sees is all that can be known before."""
        del device
        return PreparedReferenceCpu(workload)


@dataclass
class _Rows:
    """Rows ``rows`` of head (b, h): float32 views of what they meet, and their scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    softcap_slope: Tensor | None
    keep: Tensor | None


class PreparedReferenceCpu:
    """The loops. ``saved`` holds each row's maximum and sum, (B, H, L, 1) float32."""

    def __init__(self, workload: Workload) -> None:
        self.intervals = row_bounds(workload, "cpu")

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out in the inputs' dtype, and lse."""
        import torch

        w = inputs.workload
        out = _zeros(w.B, w.H, w.L, w.D_v)
        top, total = _zeros(w.B, w.H, w.L, 1), _zeros(w.B, w.H, w.L, 1)
        with torch.no_grad():
            for b, h, rows in _blocks(w):
                block = _load(inputs, self.intervals, b, h, rows)
                top[b, h, rows], total[b, h, rows] = _maximum_and_sum(block.scores, _sink(inputs, h))
                probabilities = _softmax(block.scores, top[b, h, rows], total[b, h, rows])
                out[b, h, rows] = _dropped(probabilities, block.keep) @ block.v
            lse = (top + total.log()).squeeze(-1)
        return Output(out.to(inputs.q.dtype), lse, (top, total) if save else None)

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """The four passes; gradients in their inputs' dtypes."""
        import torch

        w = inputs.workload
        top, total = saved
        dq, dk, dv = (_zeros(*t.shape) for t in (inputs.q, inputs.k, inputs.v))
        dbias = None if inputs.bias is None else _zeros(*inputs.bias.shape)
        dsinks = None if inputs.sinks is None else _zeros(w.H)
        with torch.no_grad():
            for b, h, rows in _blocks(w):
                block, kv = _load(inputs, self.intervals, b, h, rows), h // w.group
                grad_out = inputs.grad_out[b, h, rows].float()
                probabilities = _softmax(block.scores, top[b, h, rows], total[b, h, rows])

                # 1. out = W V
                dv[b, kv] += _dropped(probabilities, block.keep).T @ grad_out
                grad_probabilities = _dropped(grad_out @ block.v.T, block.keep)

                # 2. softmax, whose rows share their sum
                shared = (probabilities * grad_probabilities).sum(-1, keepdim=True)
                grad_scores = probabilities * (grad_probabilities - shared)
                if dsinks is not None:
                    sink_share = _softmax(_sink(inputs, h), top[b, h, rows], total[b, h, rows])
                    dsinks[h] -= (sink_share * shared).sum()
                if dbias is not None:
                    target = _bias_block(dbias, b, h, rows)
                    target += grad_scores.sum_to_size(target.shape)

                # 3. scale and softcap
                grad_raw = grad_scores if block.softcap_slope is None else grad_scores * block.softcap_slope
                grad_raw = grad_raw * w.effective_scale

                # 4. raw = Q K^T
                dq[b, h, rows] = grad_raw @ block.k
                dk[b, kv] += grad_raw.T @ block.q
        return Gradients(
            dq.to(inputs.q.dtype),
            dk.to(inputs.k.dtype),
            dv.to(inputs.v.dtype),
            None if dbias is None or inputs.bias is None else dbias.to(inputs.bias.dtype),
            dsinks,
        )


def _zeros(*shape: int) -> Tensor:
    import torch

    return torch.zeros(shape, dtype=torch.float32)


def _blocks(w: Workload) -> Iterator[tuple[int, int, slice]]:
    for b in range(w.B):
        for h in range(w.H):
            for start in range(0, w.L, BLOCK_ROWS):
                yield b, h, slice(start, min(start + BLOCK_ROWS, w.L))


def _load(inputs: Inputs, intervals: tuple[Tensor, Tensor], b: int, h: int, rows: slice) -> _Rows:
    """The scores (rows, S) of a block, masked with -inf, and the operands they come from."""
    import torch

    w = inputs.workload
    q = inputs.q[b, h, rows].float()
    k, v = inputs.k[b, h // w.group].float(), inputs.v[b, h // w.group].float()
    scores = (q @ k.T) * w.effective_scale
    slope = None
    if w.softcap is not None:
        squashed = torch.tanh(scores / w.softcap)
        scores, slope = w.softcap * squashed, 1 - squashed**2
    if inputs.bias is not None:
        scores = scores + _bias_block(inputs.bias, b, h, rows).float()
    if inputs.alibi_slopes is not None:
        position = torch.arange(rows.start, rows.stop)[:, None] + w.query_offset(b)
        scores = scores - inputs.alibi_slopes[h] * (position - torch.arange(w.S)).abs()
    scores = scores.masked_fill(_hidden(inputs, intervals, b, h, rows), -torch.inf)
    keep = None
    if inputs.dropout_keep is not None:
        keep = inputs.dropout_keep[b, h, rows] / (1 - w.dropout)
    return _Rows(q, k, v, scores, slope, keep)


def _hidden(inputs: Inputs, intervals: tuple[Tensor, Tensor], b: int, h: int, rows: slice) -> Tensor:
    """Bool (rows, S), True where a key is not seen."""
    import torch

    w = inputs.workload
    low, high = (bound[b, rows, None] for bound in intervals)
    keys = torch.arange(w.S)
    hidden = (keys < low) | (keys >= high)
    if inputs.mask is not None:
        hidden = hidden | ~inputs.mask.expand(w.B, w.H, w.L, w.S)[b, h, rows]
    return hidden


def _bias_block(bias: Tensor, b: int, h: int, rows: slice) -> Tensor:
    """The part of a bias (or of its gradient) that head (b, h) and ``rows`` meet: a view of (rows or 1, S or 1)."""
    plane = bias[b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0]
    return plane[rows] if plane.shape[0] > 1 else plane


def _sink(inputs: Inputs, h: int) -> Tensor:
    """The sink's score as one column (1, 1); -inf without sinks."""
    import torch

    return torch.full((1, 1), -torch.inf) if inputs.sinks is None else inputs.sinks[h].float().view(1, 1)


def _maximum_and_sum(scores: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's maximum and sum of exponentials, the sink's among them, (rows, 1); 0 and 0 where nothing is seen."""
    import torch

    columns = torch.cat([scores, sink.expand(scores.shape[0], 1)], dim=-1)
    top = columns.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    return top, torch.exp(columns - top).sum(-1, keepdim=True)


def _softmax(scores: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """exp(scores - top) / total; 0 in a row that sees nothing."""
    import torch

    return torch.exp(scores - top) / total.masked_fill(total == 0, 1)


def _dropped(weights: Tensor, keep: Tensor | None) -> Tensor:
    return weights if keep is None else weights * keep
