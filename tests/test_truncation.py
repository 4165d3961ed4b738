"""The check's allowance for tensor cores, which cut off what they add: emulated here, since a CPU has none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnscope import budgets
from attnscope.device import Device
from attnscope.inputs import Inputs, make_inputs
from attnscope.judging import judge
from attnscope.workload import Workload

TERMS, EXTRA_BITS = 8, 2  # of TF32 on Hopper: what a step adds up, and how far below the sum's last bit it goes


def cut(values: torch.Tensor, exponent: torch.Tensor, bits: int) -> torch.Tensor:
    """``values`` towards 0 on a grid of ``bits`` bits below a number of that exponent."""
    grid = torch.exp2(exponent - bits)
    return (values / grid).trunc() * grid


def tensor_core_scores(inputs: Inputs) -> torch.Tensor:
    """q k^T * scale as a tensor core adds it up: 8 products at a time, aligned with the largest and cut off."""
    products = inputs.q.double()[..., :, None, :] * inputs.k.double()[..., None, :, :]
    total = products.new_zeros(products.shape[:-1])
    for terms in products.split(TERMS, -1):
        addends = torch.cat([total[..., None], terms], -1)
        exponent = addends.abs().amax(-1, keepdim=True).clamp_min(1e-30).log2().floor()
        total = cut(addends, exponent, 23 + EXTRA_BITS).sum(-1)
        total = cut(total, total.abs().clamp_min(1e-30).log2().floor(), 23)
    return total * inputs.workload.effective_scale


@pytest.mark.parametrize(("text", "kind"), [("B1,H2,L128,D256,fp32", "shifted"), ("B1,H2,L128,D64,fp32", "plain")])
def test_a_tensor_core_s_lse_is_within_the_budget_of_a_card(
    text: str, kind: str, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(Workload.parse(text), cpu, kind=kind)
    got = {"lse": tensor_core_scores(inputs).logsumexp(-1).float()}
    on_a_cpu = judge(got, budgets.expect(inputs, "fp32", backward=False), kind)
    assert on_a_cpu[0].passed == (kind == "plain"), on_a_cpu[0].message
    of = budgets.Roundoff.of
    monkeypatch.setattr(budgets.Roundoff, "of", lambda *a: replace(of(*a), truncation=budgets.TRUNCATION))
    on_a_card = budgets.expect(inputs, "fp32", backward=False)
    assert judge(got, on_a_card, kind)[0].passed
    off = {"lse": got["lse"] * (1 + 2e-4)}  # no more than that is forgiven
    assert not judge(off, on_a_card, kind)[0].passed
