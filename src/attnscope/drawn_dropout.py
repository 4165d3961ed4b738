"""Stage 3: is dropout that an implementation draws itself what the workload says, by statistics over many draws.

Reads a Prepared and a Workload, writes TensorChecks. Must not import an implementation or a later stage.

Out and every gradient are linear in the mask, so over many draws each must average to what it is without dropout, and
its spread must be that of the workload's probability p: an element of out has the variance p / (1 - p) * sum P^2 v^2.
One draw must be one mask in both directions: with W = P * M / (1 - p), out = W V and dV = W^T dO, so per key/value
head and feature the sums of out * dO and of dV * V agree but for rounding. Libraries compare a random byte with p, so
a probability may be off by 1/256.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from attnscope.implementation import Prepared
from attnscope.inputs import Inputs, Tensor
from attnscope.records import TensorCheck
from attnscope.reference import Attention, compute_attention
from attnscope.units import significant
from attnscope.workload import Workload

DRAWS = {"cpu": 24, "cuda": 64}
BYTE = 1 / 256  # how far off a probability may be that is compared with a random byte
SIGMAS = 6.0
SPREAD = 0.10  # how far off the variance may be, in parts of it, besides what a byte does
UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-14, "fp64": 2.0**-30}
KIND = "dropout"
LEAST_SCORES = 2048  # visible to all heads: of fewer, most draws may be alike by chance


def enough_scores(workload: Workload) -> bool:
    """Whether ``workload`` has scores enough for statistics over its dropout."""
    return workload.H * workload.visible_pairs() >= LEAST_SCORES


def without_dropout(inputs: Inputs) -> Inputs:
    """The same tensors as a workload without dropout."""
    return dataclasses.replace(inputs, workload=inputs.workload.replace(dropout=0.0), dropout_keep=None)


def check_draws(prepared: Prepared, inputs: Inputs, *, backward: bool, quick: bool = False) -> list[TensorCheck]:
    """Draw often, then judge mean, spread, and that both directions used one mask."""
    import torch

    truth = compute_attention(without_dropout(inputs), backward=backward)
    wanted = {name: t for name, t in truth.tensors().items() if name != "lse" and bool(t.ne(0).any())}
    slopes: dict[str, list[Tensor]] = {name: [] for name in wanted}
    variance, squared, disagree, outs = expected_variance(inputs, truth), [], [], []
    for draw in range(DRAWS[inputs.q.device.type] // (2 if quick else 1)):
        torch.manual_seed(inputs.seed + draw)
        output = prepared.forward(inputs, save=backward)
        got = {"out": output.out.double()}
        if backward:
            got |= {name: t.double() for name, t in prepared.backward(inputs, output.saved).tensors().items()}
            disagree.append(disagreement(got["out"], got["dv"], inputs))
        for name, true in wanted.items():
            slopes[name].append((got[name] * true).sum() / true.square().sum())
        squared.append((got["out"] - truth.out).square().sum() / variance.sum())
        outs.append(got["out"])
    found = [_mean(name, torch.stack(values)) for name, values in slopes.items()]
    found += [*_spread(torch.stack(squared), inputs.workload.dropout), *_varied(outs)]
    return found + ([_one_mask(torch.stack(disagree), inputs.workload.dtype)] if backward else [])


def expected_variance(inputs: Inputs, truth: Attention) -> Tensor:
    """p / (1 - p) * sum_j P^2 v^2 for each element of out, float64.

    P^2 is a softmax of doubled scores, times exp(lse of those - 2 lse); so the reference itself computes the sum.
    """
    p = inputs.workload.dropout
    plain = without_dropout(inputs)
    doubled = dataclasses.replace(
        plain,
        q=plain.q.double() * 2,
        v=plain.v.double().square(),
        bias=None if plain.bias is None else plain.bias.double() * 2,
        alibi_slopes=None if plain.alibi_slopes is None else plain.alibi_slopes * 2,
    )
    squares = compute_attention(doubled, backward=False)
    shrink = (squares.lse - 2 * truth.lse).exp().nan_to_num(0.0)
    return p / (1 - p) * squares.out * shrink[..., None]


def disagreement(out: Tensor, dv: Tensor, inputs: Inputs) -> Tensor:
    """Sums of out * dO against those of dV * V, by batch, key/value head and feature, in parts of their terms' norm."""
    w = inputs.workload
    forward = (out * inputs.grad_out.double()).unflatten(1, (w.H_kv, w.group))
    backward = dv * inputs.v.double()
    norm = forward.square().sum((2, 3)).sqrt() + backward.square().sum(2).sqrt()
    return ((forward.sum((2, 3)) - backward.sum(2)).abs() / norm).nan_to_num(0.0).amax()


def _mean(name: str, slopes: Tensor) -> TensorCheck:
    """Each draw's slope against the truth without dropout: their mean must be 1."""
    off = (slopes.mean() - 1).abs().item()
    allowed = BYTE + SIGMAS * (slopes.std() / len(slopes) ** 0.5).item()
    message = (
        f"{name} over {len(slopes)} draws of dropout averages to {slopes.mean().item():.4f} times what it is without, "
        f"1 ± {significant(allowed)} is allowed"
    )
    return TensorCheck(name, KIND, off <= allowed, None, None, slope=off, message="" if off <= allowed else message)


def _spread(ratios: Tensor, p: float) -> Iterator[TensorCheck]:
    """Squared distance from the mean over the variance of probability p: 1."""
    off = (ratios.mean() - 1).abs().item()
    allowed = SPREAD + BYTE / p + SIGMAS * (ratios.std() / len(ratios) ** 0.5).item()
    message = (
        f"out over {len(ratios)} draws of dropout spreads {ratios.mean().item():.3f} times as far as with the "
        f"probability {p:g}, 1 ± {significant(allowed)} is allowed"
    )
    yield TensorCheck("out", KIND, off <= allowed, None, None, message="" if off <= allowed else message)


def _varied(outs: list[Tensor]) -> Iterator[TensorCheck]:
    """Other seeds, other masks."""
    same = any(bool((a == b).all()) for a, b in itertools.pairwise(outs)) and bool(outs[0].numel())
    yield TensorCheck("out", KIND, not same, None, None, message="out is the same for two seeds" if same else "")


def _one_mask(disagree: Tensor, dtype: str) -> TensorCheck:
    """The backward's mask is the forward's."""
    worst, allowed = disagree.max().item(), 16 * UNIT_ROUNDOFF[dtype]
    message = (
        f"dv does not follow from the mask that made out: they disagree by {significant(worst)}, "
        f"{significant(allowed)} is allowed"
    )
    return TensorCheck("dv", KIND, worst <= allowed, None, None, message="" if worst <= allowed else message)
