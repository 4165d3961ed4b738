"""Faults that other people met, each report's recipe on a CPU: what is right, what torch does, what we do.

The truth is the float64 reference. What torch does is asserted where it is stable. Recipes through the implementations'
contract, and their file, are in test_faults.py; timing rules in test_measuring.py, trace rules in test_explaining.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as SDPA  # noqa: N812

from attnscope.checking import check_implementation
from attnscope.device import find_device
from attnscope.errors import WorkloadError
from attnscope.implementation import find, names
from attnscope.inputs import INPUT_KINDS, Inputs, make_inputs, non_finite_sentences
from attnscope.reference import compute_attention
from attnscope.suites import SUITES
from attnscope.workload import Workload

CPU = find_device("cpu")
CPU_NAMES = [
    name
    for name in names("all")
    if not find(name).sheet.compiled and not find(name).reasons_unsupported(Workload.parse("H2,L8,D16,fp32"), CPU)
]


def made(text: str, seed: int = 0, kind: str = "plain") -> Inputs:
    return make_inputs(Workload.parse(text), CPU, seed=seed, kind=kind)


def off_by(x: torch.Tensor, truth: torch.Tensor) -> float:
    return (x.double() - truth).abs().max().item()


def contract_output(name: str, x: Inputs) -> torch.Tensor | None:
    """What an implementation makes of these inputs; None where it says that it cannot."""
    implementation = find(name)
    if implementation.reasons_unsupported(x.workload, CPU):
        return None
    return implementation.prepare(x.workload, CPU).forward(x).out


# --- W1, W2: a row that sees no key -----------------------------------------------------------------------------------


@pytest.fixture
def dead_row() -> Inputs:
    x = made("B1,H2,L8,D16,fp32,mask=bool:1x1xLxS")
    x.mask[..., 3, :] = False
    return x


def test_w1_the_row_is_zero_and_gradients_are_finite(dead_row):
    truth = compute_attention(dead_row)
    assert (truth.out[:, :, 3] == 0).all() and (truth.lse[:, :, 3] == -torch.inf).all()
    assert all(t.isfinite().all() for t in (truth.out, truth.dq, truth.dk, truth.dv))


def test_w1_sdpa_is_right(dead_row):
    q, k, v = (t.clone().requires_grad_() for t in (dead_row.q, dead_row.k, dead_row.v))
    out = SDPA(q, k, v, attn_mask=dead_row.mask)
    grads = torch.autograd.grad(out, (q, k, v), dead_row.grad_out)
    truth = compute_attention(dead_row)
    assert off_by(out, truth.out) < 1e-5
    for grad, name in zip(grads, ("dq", "dk", "dv"), strict=True):
        assert off_by(grad, truth.tensors()[name]) < 1e-5


def test_w1_a_plain_softmax_is_nan(dead_row):
    scores = (dead_row.q @ dead_row.k.mT / 4).masked_fill(~dead_row.mask, -torch.inf)
    assert torch.softmax(scores, -1)[:, :, 3].isnan().all()


def test_w1_multi_head_attention_that_returns_weights_is_nan(dead_row):
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(1, 8, 16)
    out, _ = module(x, x, x, attn_mask=~dead_row.mask[0, 0], need_weights=True)
    assert out[:, 3].isnan().all() and out[:, 4].isfinite().all()


def test_w1_the_check_names_the_implementation_that_makes_nan(dead_row):
    """A workload whose geometry hides whole rows: naive must refuse it or fail, and never pass."""
    w = Workload.parse("B1,H2,L9,S5,D16,fp32,causal=bottom_right")
    assert any("see no key" in reason for reason in find("naive").reasons_unsupported(w, CPU))
    result = check_implementation(find("naive"), w, CPU, directions=["forward"], kinds=["plain"])
    assert not result.passed and "not finite" in result.message


def test_w2_the_smallest_number_in_place_of_minus_infinity_is_another_function(dead_row):
    truth = compute_attention(dead_row)
    x = made("B1,H2,L8,D16,fp32,bias=fp32:1x1xLxS")
    x.bias.zero_()
    x.bias[..., 3, :] = torch.finfo(torch.float32).min
    filled = compute_attention(x)
    mean = x.v.double().mean(-2)
    assert off_by(filled.out[:, :, 3], mean) < 1e-12
    assert off_by(SDPA(x.q, x.k, x.v, attn_mask=x.bias)[:, :, 3], mean) < 1e-5
    assert filled.lse[:, :, 3].isfinite().all() and (truth.lse[:, :, 3] == -torch.inf).all()


# --- W3: alignment ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("L", "S"), [(1, 16), (2, 5), (5, 2)])
def test_w3_is_causal_is_top_left_and_the_workload_says_which(L, S):
    outs = {}
    for alignment in ("top_left", "bottom_right"):
        x = made(f"B1,H2,L{L},S{S},D16,fp32,causal={alignment}")
        truth = compute_attention(x).out
        outs[alignment] = truth
        corner = torch.ones(L, S, dtype=torch.bool).tril(0 if alignment == "top_left" else S - L)
        assert torch.equal(x.visible().expand(1, 1, L, S)[0, 0], corner)
        assert off_by(SDPA(x.q, x.k, x.v, attn_mask=corner), truth) < 1e-5
        for name in CPU_NAMES:
            out = contract_output(name, x)
            assert out is None or off_by(out, truth) < 1e-5, name
    x = made(f"B1,H2,L{L},S{S},D16,fp32,causal")
    assert off_by(SDPA(x.q, x.k, x.v, is_causal=True), outs["top_left"]) < 1e-5
    assert off_by(outs["top_left"], outs["bottom_right"]) > 0.1


def test_w3_a_bare_word_is_top_left_and_a_wrong_one_is_a_sentence():
    assert Workload.parse("H2,L2,S5,D16,causal").causal == "top_left"
    with pytest.raises(WorkloadError, match="unknown causal 'lower'"):
        Workload.parse("H2,L2,S5,D16,causal=lower")


# --- W10: what lies in the padding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tensor", "value"), [("k", math.nan), ("v", math.nan), ("k", math.inf), ("v", math.inf)])
def test_w10_non_finite_padding_is_the_inputs_fault(tensor, value):
    x = made("B2,H2,L8,D16,fp32,lengths=8/5")
    assert non_finite_sentences(x) == []
    getattr(x, tensor)[1, :, 5:] = value
    assert non_finite_sentences(x) == [
        f"{tensor} holds {2 * 3 * 16} non-finite values, {2 * 3 * 16} of them at keys that no query sees (padding)"
    ]
    if tensor == "v":  # 0 * NaN: a dense mask cannot keep it out
        visible = x.visible().expand(2, 1, 8, 8)
        assert SDPA(x.q, x.k, x.v, attn_mask=visible)[1].isnan().any()


def test_w10_inputs_of_ours_are_finite_everywhere():
    for kind in INPUT_KINDS:
        assert non_finite_sentences(made("B2,H4/2,L65,D16,fp16,lengths=65/0,bias=fp16,sinks", kind=kind)) == []


# --- W11: strides -----------------------------------------------------------------------------------------------------


def test_w11_a_last_dim_that_is_not_contiguous_is_the_same_tensor():
    x = made("B1,H2,L33,D16,fp32,mask=bool:1x1xLxS")
    truth = compute_attention(x).out
    names_changed = ("q", "k", "v", "mask")
    strided = replace(x, **{n: torch.stack([getattr(x, n)] * 2, -1).flatten(-2)[..., ::2] for n in names_changed})
    assert strided.q.stride(-1) == strided.mask.stride(-1) == 2
    assert off_by(compute_attention(strided).out, truth) == 0
    assert off_by(SDPA(strided.q, strided.k, strided.v, attn_mask=strided.mask), truth) < 1e-5
    for name in CPU_NAMES:
        assert off_by(contract_output(name, strided), truth) < 1e-5, name


# --- W14: nothing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["B2,H2,L8,S0,D16", "B2,H2,L0,S8,D16", "B0,H2,L8,D16", "H2,D16,packed=0/3/0/5"])
def test_w14_empty_is_zeros_or_empty_of_the_right_shape(text):
    x = made(text + ",fp32")
    w = x.workload
    truth = compute_attention(x)
    assert truth.out.shape == (w.B, w.H, w.L, w.D_v) and truth.dk.shape == x.k.shape
    if w.S == 0:
        assert not truth.out.any() and (truth.lse == -torch.inf).all()
        assert not SDPA(x.q, x.k, x.v).any()
    for name in CPU_NAMES:
        out = contract_output(name, x)
        assert out is None or (out.shape == truth.out.shape and (out.numel() == 0 or off_by(out, truth.out) < 1e-5)), (
            name
        )


# --- W23: a mask and causal both --------------------------------------------------------------------------------------


def test_w23_both_apply():
    x = made("B1,H2,L16,D16,fp32,causal,mask=bool:1x1xLxS")
    truth = compute_attention(x).out
    both = x.mask & torch.ones(16, 16, dtype=torch.bool).tril()
    assert off_by(SDPA(x.q, x.k, x.v, attn_mask=both), truth) < 1e-5
    for other in (x.mask, both | ~x.mask):
        assert off_by(SDPA(x.q, x.k, x.v, attn_mask=other), truth) > 0.1
    for name in CPU_NAMES:
        assert off_by(contract_output(name, x), truth) < 1e-5, name


def test_w23_math_documents_an_error_and_raises_it():
    x = made("B1,H2,L16,D16,fp32,mask=bool:1x1xLxS")
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal"):
        SDPA(x.q, x.k, x.v, attn_mask=x.mask, is_causal=True)


# --- W24: large logits ------------------------------------------------------------------------------------------------


def test_w24_a_fixed_tolerance_goes_blind_where_the_budget_does_not():
    """bf16 at S = 512: a dropped key passes 2e-2 on plain inputs, and honest rounding fails it on large ones."""
    plain, large = made("B1,H2,L512,D64,bf16"), made("B1,H2,L512,D64,bf16", kind="large")
    truth = compute_attention(plain)
    hidden = replace(
        plain, workload=plain.workload.replace(mask="1x1x1xS"), mask=torch.ones(1, 1, 1, 512, dtype=torch.bool)
    )
    hidden.mask[..., 200] = False
    dropped = (compute_attention(hidden).out - truth.out).abs()
    assert (dropped < 2e-2).double().mean() > 0.98

    def naive(x: Inputs) -> torch.Tensor:
        return torch.softmax(x.q @ x.k.mT * 0.125, -1) @ x.v

    exact = compute_attention(large).out
    assert off_by(naive(large), exact) > 2e-2 > off_by(SDPA(large.q, large.k, large.v), exact)


@pytest.mark.parametrize("kind", ["plain", "large"])
def test_w24_the_check_judges_by_what_the_precision_must_lose(kind):
    w = Workload.parse("B1,H2,L256,D64,bf16")
    sdpa = check_implementation(find("sdpa_flash"), w, CPU, directions=["forward"], kinds=[kind])
    assert (sdpa.passed, sdpa.grade) == (True, "tight")
    naive = check_implementation(find("naive"), w, CPU, directions=["forward"], kinds=[kind])
    assert naive.passed and naive.factor > sdpa.factor


def test_w24_large_fp16_products_stay_finite_in_float32():
    x = made("B1,H2,L64,D64,fp16")
    x.q.mul_(60)
    x.k.mul_(60)
    truth = compute_attention(x).out
    assert (x.q @ x.k.mT).isinf().any()  # scores beyond fp16
    assert off_by(SDPA(x.q, x.k, x.v), truth) < 0.05


# --- W27, W28: which scale, which head --------------------------------------------------------------------------------


def test_w27_padding_the_head_dim_leaves_the_scale():
    x = made("B1,H2,L64,D36,fp32")
    truth = compute_attention(x).out
    q, k, v = (pad(t, (0, 4)) for t in (x.q, x.k, x.v))
    assert x.workload.effective_scale == 36**-0.5
    assert off_by(SDPA(q, k, v, scale=36**-0.5)[..., :36], truth) < 1e-5
    assert off_by(SDPA(q, k, v)[..., :36], truth) > 0.01
    padded = replace(
        x, workload=x.workload.replace(D=40, scale=36**-0.5), q=q, k=k, v=v, grad_out=pad(x.grad_out, (0, 4))
    )
    assert off_by(compute_attention(padded).out[..., :36], truth) < 1e-12


def test_w28_groups_are_neighbours():
    x = made("B1,H8/2,L33,D16,fp32,causal")
    truth = compute_attention(x).out
    for spread, right in ((lambda t: t.repeat_interleave(4, 1), True), (lambda t: t.repeat(1, 4, 1, 1), False)):
        error = off_by(SDPA(x.q, spread(x.k), spread(x.v), is_causal=True), truth)
        assert error < 1e-5 if right else error > 0.5
    assert off_by(SDPA(x.q, x.k, x.v, is_causal=True, enable_gqa=True), truth) < 1e-5
    for name in CPU_NAMES:
        assert off_by(contract_output(name, x), truth) < 1e-5, name


# --- W29, W30: gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda t: torch.ones(()).expand(t.shape),
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t[:, :, :1].expand(t.shape),
    ],
    ids=["sum().backward()", "transposed", "stride 0"],
)
def test_w29_the_gradient_depends_on_values_not_on_strides(change):
    x = made("B2,H2,L33,D16,fp32,causal")
    x.grad_out = change(x.grad_out)
    plain = replace(x, grad_out=x.grad_out.contiguous())
    truth = compute_attention(plain)
    assert torch.equal(compute_attention(x).dk, truth.dk)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    for grad, name in zip(
        torch.autograd.grad(SDPA(*leaves, is_causal=True), leaves, x.grad_out), ("dq", "dk", "dv"), strict=True
    ):
        assert off_by(grad, truth.tensors()[name]) < 1e-5
    for name in CPU_NAMES:
        implementation = find(name)
        if implementation.reasons_unsupported(x.workload, CPU, "backward"):
            continue
        prepared = implementation.prepare(x.workload, CPU)
        gradients = prepared.backward(x, prepared.forward(x, save=True).saved)
        assert off_by(gradients.dq, truth.dq) < 1e-5 and off_by(gradients.dv, truth.dv) < 1e-5, name


def test_w29_the_check_s_own_d_o_is_made_once_in_logical_order():
    """The same values whatever the layout of q, k, v: only strides differ."""
    for layout in ("bhld", "blhd"):
        x = made(f"B2,H3,L5,D4,fp32,layout={layout}")
        assert x.grad_out.shape == (2, 3, 5, 4) and compute_attention(x).dv.shape == (2, 3, 5, 4)


def test_w30_a_bias_alone_gets_its_gradient():
    x = made("B1,H2,L8,D16,fp32,bias=fp32:1xHxLxS")
    truth = compute_attention(x).dbias
    bias = x.bias.clone().requires_grad_()
    (grad,) = torch.autograd.grad(SDPA(x.q, x.k, x.v, attn_mask=bias), bias, x.grad_out)
    assert off_by(grad, truth) < 1e-5
    ran = 0
    for name in CPU_NAMES:
        implementation = find(name)
        if implementation.reasons_unsupported(x.workload, CPU, "backward"):
            continue
        prepared = implementation.prepare(x.workload, CPU)
        assert off_by(prepared.backward(x, prepared.forward(x, save=True).saved).dbias, truth) < 1e-5, name
        ran += 1
    assert ran >= 3


# --- S2, B4: masks that say nothing, inputs that say nothing ----------------------------------------------------------


def test_s2_masks_that_need_no_tensor_have_a_word_of_their_own():
    """All keys, causal and padding are fields of a workload, so that no implementation is handed a mask for them."""
    full, causal, padded = (Workload.parse(f"B2,H2,L8,D16{more}") for more in ("", ",causal", ",lengths=8/5"))
    assert not full.features and causal.features == {"causal_top_left"} and padded.features == {"lengths"}
    x = made("B2,H2,L8,D16,fp32,mask=bool:1x1xLxS")
    for mask, text in ((torch.ones(8, 8).bool(), ""), (torch.ones(8, 8).bool().tril(), ",causal")):
        masked = replace(x, mask=mask[None, None])
        spelled = replace(x, workload=Workload.parse(f"B2,H2,L8,D16,fp32{text}"), mask=None)
        assert off_by(compute_attention(masked).out, compute_attention(spelled).out) == 0


def test_b4_inputs_are_random_and_never_zeros():
    for text in (
        "B1,H4,L64,D32,bf16,causal",
        "B2,H4/2,L16,D32,fp32,bias=fp32,sinks,layout=blhd",
        "H4,L64,D32,layout=qkv",
    ):
        for kind in INPUT_KINDS:
            x = made(text, kind=kind)
            for name in ("q", "k", "v", "grad_out", "bias", "sinks"):
                t = getattr(x, name)
                if t is not None and name != "sinks":
                    assert (t == 0).float().mean() < 0.01 and t.float().std() > 0.5, (name, kind)
    assert SUITES["blog"]  # what is timed is what is made here: kind "plain"
