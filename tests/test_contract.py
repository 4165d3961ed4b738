"""Every implementation of the registry on workloads that cover the axes; a reason becomes a skip.

Tolerances are loose here (the check proper is attnscope.checking): they catch what is wrong, not what is inaccurate.
"""

import functools
import re
from dataclasses import replace

import pytest
import torch

from attnscope.budgets import Expectation
from attnscope.checking import check_implementation
from attnscope.device import Device, find_device
from attnscope.implementation import (
    FEATURE_SENTENCES,
    FEATURES,
    Implementation,
    Output,
    Prepared,
    Sheet,
    SheetImplementation,
    find,
    names,
)
from attnscope.inputs import Inputs, make_inputs
from attnscope.judging import judge_grossly
from attnscope.records import TensorCheck
from attnscope.reference import Attention, compute_attention
from attnscope.workload import DIRECTIONS, Workload

# Error allowed per element, as a part of its row's largest condition scale.
TOLERANCE = {"fp64": 1e-5, "fp32": 2e-5, "fp16": 8e-3, "bf16": 6e-2}

CASES = [
    *(f"B2,H4,L{L},D32,fp32,causal" for L in (1, 63, 64, 65, 127, 129)),
    *(f"B1,H1,L{L},D16,fp32" for L in (1, 65, 500)),
    "B1,H1,L1024,D32,fp32,causal",
    "B1,H2,L1,S129,D32,fp32",
    "B1,H2,L129,S1,D32,fp32",
    "B1,H2,L129,S65,D32,fp32,causal",
    "B1,H2,L65,S129,D32,fp32,causal=bottom_right",
    "B1,H2,L129,S65,D32,fp32,causal=bottom_right",
    "B2,H8/2,L65,D32,fp32,causal",
    "B2,H8/1,L65,S64,D32,fp32",
    "B1,H4,L64,D48,Dv16,fp32,causal",
    "B1,H3,L33,D7,fp32",
    "B1,H2,L127,D64,fp16,causal",
    "B1,H2,L127,D80,bf16",
    "B1,H2,L64,D16,fp64,causal",
    "B2,H4,L65,D32,fp32,causal,layout=blhd",
    "B2,H4,L65,D32,bf16,causal,layout=qkv",
    "B2,H8/4,L65,S33,D32,Dv24,fp32,layout=blhd",
    "B0,H2,L65,D32,fp32,causal",
    "B2,H2,L0,D32,fp32",
    "B2,H2,L0,S65,D32,fp32",
    "B2,H2,L65,S0,D32,fp32",
    "B3,H2,L65,S64,D32,fp32,lengths=64/7/0",
    "B2,H2,L64,D32,fp32,causal,lengths=64/33",
    "B2,H2,L64,D32,fp32,causal=bottom_right,lengths=64/33",
    "H2,D32,fp32,causal,packed=30/21/0/51",
    "H4/2,D32,fp32,packed=64/1/65",
    "B1,H2,L65,D32,fp32,window=9,causal",
    "B1,H2,L65,S129,D32,fp32,window=9",
    "B1,H2,L65,D32,fp32,mask=bool,causal",
    "B2,H2,L65,D32,fp32,mask=bool:1x1x1xS",
    "B2,H4/2,L65,S33,D32,fp32,bias=fp32:BxHxLxS",
    "B2,H4/2,L65,D32,fp32,bias=fp32:1xHx1xS,causal",
    "B2,H2,L65,D32,fp32,bias=fp32:Bx1xLx1",
    "B1,H2,L65,D32,bf16,bias=bf16,mask=bool",
    "B1,H2,L65,D32,bf16,bias=fp32:1x1xLxS,causal",
    "B1,H12,L65,D32,fp32,alibi,causal",
    "B1,H2,L33,S65,D32,fp32,alibi,causal=bottom_right,mask=bool",
    "B1,H2,L65,D32,fp32,softcap=2.5,scale=0.7,causal",
    "B1,H2,L65,D32,fp32,scale=-0.2",
    "B1,H2,L65,D32,fp32,scale=-0.2,causal,mask=bool",
    "B2,H4/2,L65,D32,fp32,sinks,causal",
    "B2,H2,L33,S65,D32,fp32,sinks,lengths=65/0,causal=bottom_right",
    "B1,H2,L65,D32,fp32,dropout=0.3,causal",
    "B2,H4/2,L65,S70,D16,Dv8,fp32,causal=bottom_right,softcap=3,alibi,sinks,mask=bool,bias=fp32:1xHx1xS,dropout=0.2",
]

# One workload for each feature, as little else as possible, and no row that sees no key.
FEATURE_CASES = {
    "gqa": "B2,H8/2,L65,D32",
    "cross": "B1,H2,L65,S129,D32",
    "unequal_head_dims": "B1,H2,L65,D32,Dv16",
    "causal_top_left": "B1,H2,L65,D32,causal",
    "causal_bottom_right": "B1,H2,L65,D32,causal=bottom_right",
    "window": "B1,H2,L65,D32,window=9",
    "softcap": "B1,H2,L65,D32,softcap=2.0",
    "scale": "B1,H2,L65,D32,scale=0.05",
    "alibi": "B1,H2,L65,D32,alibi",
    "sinks": "B1,H2,L65,D32,sinks",
    "mask": "B1,H2,L65,D32,mask=bool",
    "bias": "B1,H2,L65,D32,bias=fp32:1xHxLxS",
    "lengths": "B2,H2,L65,D32,lengths=65/31",
    "packed": "H2,D32,packed=40/25",
    "dropout": "B1,H2,L65,D32,dropout=0.3",
}
COMPILED = {name for name in names("all") if find(name).sheet.compiled}
COMPILED_CASES = {"B2,H4,L65,D32,fp32,causal", CASES[-1]}
# What these two do not hold of naive_compiled's features; flex's are tried in test_peers.
LONG_CASES = {
    "B1,H2,L65,D32,fp32,window=9,causal",
    "B2,H2,L64,D32,fp32,causal,lengths=64/33",
    "H4/2,D32,fp32,packed=64/1/65",
    "B1,H2,L65,D32,fp32,softcap=2.5,scale=0.7,causal",
}

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def cases_of(workloads: list[str]) -> list[object]:
    """(name, workload) pairs; a compiler is slow, so it gets a few."""
    return [
        pytest.param(
            name,
            text,
            marks=()
            if name not in COMPILED
            else pytest.mark.long
            if name == "flex" or text in LONG_CASES
            else pytest.mark.slow,
        )
        for name in names("all")
        for text in workloads
        if name not in COMPILED or text in COMPILED_CASES or (name != "flex" and text in LONG_CASES)
    ]


def test_naive_compiled_is_tried_with_every_feature() -> None:
    tried = [Workload.parse(text) for text in COMPILED_CASES | LONG_CASES]
    assert LONG_CASES < set(CASES)
    assert frozenset().union(*(w.features for w in tried)) == find("naive_compiled").sheet.features


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return find_device(request.param)


@pytest.mark.parametrize(("name", "text"), cases_of(CASES))
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_implementation_on_workload(name: str, text: str, device: Device) -> None:
    implementation, workload = find(name), Workload.parse(text)
    skip_with_reasons(implementation, workload, device)
    run_case(implementation, *problem(workload, device), device)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", [name for name in names("all") if name not in COMPILED])
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_feature_claimed_runs_and_feature_not_claimed_is_refused(name: str, feature: str, device: Device) -> None:
    implementation = find(name)
    workload = feature_workload(implementation, feature)
    assert workload.features == {feature}
    if feature == "dropout" and implementation.sheet.draws_dropout:
        skip_with_reasons(implementation, workload, device)
        directions = [d for d in DIRECTIONS if not implementation.reasons_unsupported(workload, device, d)]
        result = check_implementation(implementation, workload, device, directions=directions, quick=True)
        assert result.passed, result.message
        return
    if feature not in implementation.sheet.features:
        for direction in DIRECTIONS:
            reasons = implementation.reasons_unsupported(workload, device, direction)
            assert any(FEATURE_SENTENCES[feature] in reason for reason in reasons)
        return
    skip_with_reasons(implementation, workload, device)
    run_case(implementation, *problem(workload, device), device)


@pytest.mark.parametrize("kind", ["strided", "expanded"])
@pytest.mark.parametrize(("name", "text"), cases_of(["B2,H4,L65,D32,fp32,causal", "B2,H4/2,L65,D32,bf16,mask=bool"]))
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_strided_and_expanded_inputs(name: str, text: str, kind: str, device: Device) -> None:
    implementation, workload = find(name), Workload.parse(text)
    skip_with_reasons(implementation, workload, device)
    if kind == "expanded" and name in COMPILED and device.kind == "cpu":
        pytest.skip("compiles for ten seconds, and strides of any kind are one to a compiler")
    inputs = make_inputs(workload, device)
    if kind == "strided":
        inputs.q, inputs.k, inputs.v = (every_other(t) for t in (inputs.q, inputs.k, inputs.v))
        inputs.grad_out = inputs.grad_out.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        inputs.k, inputs.v = (t[:1, :1].expand_as(t) for t in (inputs.k, inputs.v))
        inputs.grad_out = inputs.grad_out[..., :1, :1].expand_as(inputs.grad_out)
    run_case(implementation, inputs, compute_attention(inputs), device)


@pytest.mark.parametrize(("name", "text"), cases_of(["B2,H4,L65,D32,fp32,causal", "B1,H2,L128,D64,bf16,causal"]))
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_what_runs_is_of_the_family_that_the_sheet_claims(name: str, text: str, device: Device) -> None:
    implementation, workload = find(name), Workload.parse(text)
    skip_with_reasons(implementation, workload, device)
    prepared, inputs = implementation.prepare(workload, device), make_inputs(workload, device)
    for direction in DIRECTIONS:
        if implementation.reasons_unsupported(workload, device, direction):
            continue
        seen = names_that_ran(prepared, inputs, direction, device)
        assert seen
        for pattern in implementation.sheet.kernels.get(device.kind, ()):
            assert any(re.search(pattern, name) for name in seen), (direction, pattern, seen)
        for pattern in implementation.sheet.kernels_absent.get(device.kind, ()):
            assert not any(re.search(pattern, name) for name in seen), (direction, pattern, seen)


def test_a_sheet_that_lies_about_a_feature_is_caught() -> None:
    device = find_device("cpu")
    workload = Workload.parse("B1,H2,L65,D32,fp32,window=9")
    run_case(Liar(), *problem(workload.replace(window=None), device), device)
    with pytest.raises(AssertionError, match="out"):
        run_case(Liar(), *problem(workload, device), device)


def test_a_sheet_that_lies_about_lse_is_caught() -> None:
    device = find_device("cpu")
    liar = Liar()
    liar.sheet = replace(liar.sheet, lse=True)
    with pytest.raises(AssertionError, match="lse"):
        run_case(liar, *problem(Workload.parse("B1,H2,L65,D32,fp32"), device), device)


class Liar(SheetImplementation):
    """Claims windows, looks at no mask."""

    name, summary = "liar", "ignores the window that it claims"
    sheet = Sheet(dtypes=frozenset({"fp32"}), features=frozenset({"window"}), directions=frozenset({"forward"}))

    def prepare(self, workload: Workload, device: Device) -> Prepared:
        return self  # type: ignore[return-value]

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        scores = inputs.q @ inputs.k.transpose(-1, -2) * inputs.workload.effective_scale
        return Output(scores.softmax(-1) @ inputs.v)


# --- what all tests here share ----------------------------------------------------------------------------------------


def feature_workload(implementation: Implementation, feature: str) -> Workload:
    dtype = next(dtype for dtype in ("fp32", "bf16", "fp16") if dtype in implementation.sheet.dtypes)
    return Workload.parse(FEATURE_CASES[feature]).replace(dtype=dtype)


def skip_with_reasons(implementation: Implementation, workload: Workload, device: Device) -> None:
    if reasons := implementation.reasons_unsupported(workload, device, "forward"):
        pytest.skip("; ".join(reasons))
    if implementation.name == "sdpa_auto" and device.kind == "cuda" and workload.lengths and 0 in workload.lengths:
        pytest.skip("PyTorch may take cuDNN, which is wrong on rows that see no key: the check says so, no reason does")


@functools.cache
def problem(workload: Workload, device: Device) -> tuple[Inputs, Attention]:
    """Inputs and their truth, shared by all implementations, none of which may change them."""
    inputs = make_inputs(workload, device)
    return inputs, compute_attention(inputs)


def run_case(implementation: Implementation, inputs: Inputs, truth: Attention, device: Device) -> None:
    """Both directions against float64, with what the contract promises of shapes, dtypes, inputs and repetition."""
    workload = inputs.workload
    if workload.dropout and implementation.sheet.draws_dropout:
        pytest.skip("it draws its own dropout, which is checked by statistics")
    before = {name: tensor.clone() for name, tensor in inputs.tensors().items()}
    prepared = implementation.prepare(workload, device)
    output = prepared.forward(inputs)
    assert output.out.dtype == inputs.q.dtype
    assert (output.lse is not None) == implementation.sheet.lse, "lse must be there exactly where the sheet claims it"
    if implementation.sheet.approximate:
        assert_not_grossly_wrong(output.out, truth)
    else:
        assert_close("out", output.out, truth.out, truth.scales["out"], workload)
    if output.lse is not None:
        torch.testing.assert_close(output.lse.double(), truth.lse, atol=1e-4, rtol=1e-5)
    if implementation.sheet.deterministic:
        again = prepared.forward(inputs)
        assert torch.equal(again.out, output.out), "out of equal calls must have equal bits"
        assert output.lse is None or torch.equal(again.lse, output.lse), "lse of equal calls must have equal bits"
    if not implementation.reasons_unsupported(workload, device, "backward"):
        check_backward(prepared, inputs, truth, deterministic=implementation.sheet.deterministic)
    for name, tensor in inputs.tensors().items():
        assert torch.equal(tensor, before[name]), f"{name} was changed"


def check_backward(prepared: Prepared, inputs: Inputs, truth: Attention, *, deterministic: bool = False) -> None:
    saved_output = prepared.forward(inputs, save=True)
    assert_close("out", saved_output.out, truth.out, truth.scales["out"], inputs.workload)
    first = {name: t.clone() for name, t in prepared.backward(inputs, saved_output.saved).tensors().items()}
    gradients = prepared.backward(inputs, saved_output.saved).tensors()
    for name in first if deterministic else ():
        assert torch.equal(gradients[name], first[name]), f"{name} of equal calls must have equal bits"
    wanted = {name for name in truth.tensors() if name.startswith("d")}
    assert set(gradients) == wanted
    for name, gradient in gradients.items():
        source = getattr(inputs, name[1:])
        assert gradient.dtype == source.dtype, name
        assert_close(name, gradient, truth.tensors()[name], truth.scales[name], inputs.workload)


def assert_close(name: str, got: torch.Tensor, true: torch.Tensor, scale: torch.Tensor, workload: Workload) -> None:
    assert got.shape == true.shape, f"{name} must have shape {tuple(true.shape)}, got {tuple(got.shape)}"
    if got.numel() == 0:
        return
    assert torch.isfinite(got).all(), f"{name} is not finite"
    error = (got.double() - true).abs()
    allowed = TOLERANCE[workload.dtype] * scale.amax(-1, keepdim=True) + 1e-12
    worst = (error / allowed).max().item()
    assert worst <= 1, f"{name} of {workload} is wrong: {worst:.3g} times what is allowed"
    if name == "out":
        dead = truth_is_zero(true)
        assert (got[dead] == 0).all(), "out must be exactly 0 on rows that see no key"


def assert_not_grossly_wrong(out: torch.Tensor, truth: Attention) -> None:
    """What a check asks of an implementation whose sheet says that it is approximate."""
    told = judge_grossly(TensorCheck("out", "plain", True, 1.0, 1.0), {"out": out}, Expectation({"out": truth.out}))
    assert told.passed, told.message


def truth_is_zero(true: torch.Tensor) -> torch.Tensor:
    return (true == 0).all(-1)


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at stride 2 in the last dimension."""
    wide = tensor.new_full((*tensor.shape, 2), float("nan"))
    wide[..., 0] = tensor
    return wide[..., 0]


def names_that_ran(prepared: Prepared, inputs: Inputs, direction: str, device: Device) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    saved = prepared.forward(inputs, save=True).saved if direction == "backward" else None
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.kind == "cuda")
    with profile(activities=activities, acc_events=True) as profiler:
        if direction == "backward":
            prepared.backward(inputs, saved)
        else:
            prepared.forward(inputs)
        if device.kind == "cuda":
            torch.cuda.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if device.kind == "cuda" else torch.autograd.DeviceType.CPU
    return [event.name for event in profiler.events() if event.device_type == wanted]


def test_an_approximate_implementation_is_held_to_what_its_check_asks(cpu):
    _, truth = problem(Workload.parse("B2,H2,L64,D64,fp32"), cpu)
    noise = truth.out.std() * torch.randn(truth.out.shape, generator=torch.Generator().manual_seed(0))
    assert_not_grossly_wrong((truth.out + 0.05 * noise).float(), truth)
    for wrong in (truth.out * 1.1, truth.out.roll(1, 1), truth.out + noise):
        with pytest.raises(AssertionError, match=r"cosine with the truth|off by a factor"):
            assert_not_grossly_wrong(wrong.float(), truth)
