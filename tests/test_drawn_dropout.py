"""Dropout that an implementation draws itself: right draws pass, every way to draw wrongly is found out."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnscope.checking import check_implementation
from attnscope.device import find_device
from attnscope.drawn_dropout import check_draws, expected_variance, without_dropout
from attnscope.errors import WorkloadError
from attnscope.implementation import Gradients, Output, Sheet, SheetImplementation, find
from attnscope.inputs import make_inputs
from attnscope.reference import compute_attention
from attnscope.workload import Workload

CPU = find_device("cpu")
TEXT = "B2,H4/2,L48,D16,fp32,causal,dropout=0.2"


class Draws(SheetImplementation):
    """The reference under a mask of its own; each option is one way to get it wrong."""

    name, summary = "draws", "draws its own dropout"
    sheet = Sheet(
        dtypes=frozenset({"fp32", "bf16"}), features=frozenset({"causal_top_left", "gqa"}), draws_dropout=True
    )

    def __init__(self, probability=None, scale=None, seed=None, other_mask=False, spoil=None):
        self.probability, self.scale, self.seed = probability, scale, seed
        self.other_mask, self.spoil = other_mask, spoil

    def prepare(self, workload, device):
        return self

    def _with_mask(self, inputs):
        p = inputs.workload.dropout if self.probability is None else self.probability
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        w = inputs.workload
        keep = torch.rand(w.B, w.H, w.L, w.S, generator=generator) >= p
        return dataclasses.replace(inputs, dropout_keep=keep)

    def forward(self, inputs, *, save=False):
        drawn = self._with_mask(inputs) if inputs.workload.dropout else inputs
        truth = compute_attention(drawn, backward=save)
        out = truth.out * (1 if self.scale is None or not inputs.workload.dropout else self.scale)
        return Output(out.to(inputs.q.dtype), saved=truth)

    def backward(self, inputs, saved):
        if self.other_mask and inputs.workload.dropout:
            saved = compute_attention(self._with_mask(inputs))
        dq, dk, dv = (t.to(inputs.q.dtype) for t in (saved.dq, saved.dk, saved.dv))
        if self.spoil and inputs.workload.dropout:
            dq = dq * self.spoil
        return Gradients(dq, dk, dv)


def checked(implementation, text=TEXT, directions=("forward", "backward")):
    return check_implementation(implementation, Workload.parse(text), CPU, kinds=("plain",), directions=directions)


@pytest.mark.parametrize("text", [TEXT, "B2,H2,L48,D16,bf16,dropout=0.05", "B1,H2,L64,D16,fp32,dropout=0.9"])
def test_right_draws_pass(text):
    result = checked(Draws(), text)
    assert result.passed and result.grade == "tight", result.message
    assert "dropout" in {check.kind for check in result.tensors} and "without dropout" in result.message


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"scale": 0.8}, "averages to"),  # the kept are not scaled by 1 / (1 - p)
        ({"probability": 0.3}, "averages to"),
        ({"probability": 0.3, "scale": 0.8 / 0.7}, "spreads"),
        ({"probability": 0.0, "scale": 0.8}, "spreads"),  # nothing is dropped
        ({"seed": 1}, "spreads|averages|the same for two seeds"),
        ({"other_mask": True}, "dv does not follow from the mask that made out"),
        ({"spoil": 0.8}, "dq over"),
    ],
)
def test_wrong_draws_are_found_out(wrong, says):
    both = "other_mask" in wrong or "spoil" in wrong
    result = checked(Draws(**wrong), directions=("forward", "backward") if both else ("forward",))
    assert not result.passed and result.grade == "failed"
    assert any(word in result.message for word in says.split("|")), result.message


def test_what_is_wrong_without_dropout_fails_first():
    class WrongAtZero(Draws):
        def forward(self, inputs, *, save=False):
            output = super().forward(inputs, save=save)
            return dataclasses.replace(output, out=output.out * (1 if inputs.workload.dropout else 1.1))

    assert "scaled by 1.1" in checked(WrongAtZero()).message


def test_the_expected_variance_is_the_sum_over_keys():
    inputs = make_inputs(Workload.parse("B1,H2,L9,S12,D8,fp64,mask=bool,alibi,bias=fp32,dropout=0.25"), CPU)
    truth = compute_attention(without_dropout(inputs), backward=False)
    scores = inputs.q @ inputs.k.transpose(-1, -2) * inputs.workload.effective_scale + inputs.bias + inputs.alibi_bias()
    weights = scores.masked_fill(~inputs.visible(), -torch.inf).softmax(-1)
    by_hand = 0.25 / 0.75 * weights.square() @ inputs.v.square()
    torch.testing.assert_close(expected_variance(inputs, truth), by_hand)


@pytest.mark.parametrize(
    "text", ["B2,H4/2,L48,D16,bf16,causal,dropout=0.1", "B2,H2,L33,S40,D16,fp32,mask=bool,dropout=0.5"]
)
def test_pytorchs_own_dropout_passes(text):
    inputs = make_inputs(Workload.parse(text), CPU)
    prepared = find("sdpa_math").prepare(inputs.workload, CPU)
    failed = [check.message for check in check_draws(prepared, inputs, backward=True) if not check.passed]
    assert not failed


@pytest.mark.parametrize("p", ["1", "-0.1", "1.5", "nan"])
def test_a_probability_outside_0_to_1_is_refused(p):
    with pytest.raises(WorkloadError, match="dropout must"):
        Workload.parse(f"B1,H2,L8,D8,dropout={p}")
