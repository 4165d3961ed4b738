"""Each cell of the feature table: what a sheet claims runs and is right, what it does not claim is refused.

The features themselves stand in test_contract; here is the rest of the table, and sheets that lie about it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnscope.device import Device, find_device
from attnscope.implementation import (
    Gradients,
    Implementation,
    Output,
    Prepared,
    Sheet,
    SheetImplementation,
    find,
    names,
)
from attnscope.inputs import Inputs, make_inputs
from attnscope.workload import DIRECTIONS, LAYOUTS, Workload
from test_contract import DEVICES, FEATURE_CASES, problem, run_case

ALL = [name for name in names("all") if not find(name).sheet.compiled]
# A compiler is slow: what naive_compiled claims waits for make test-long; what flex claims is test_peers's.
WITH_COMPILED = [*ALL, pytest.param("naive_compiled", marks=pytest.mark.long)]
DTYPES = ("bf16", "fp16", "fp32", "fp64")
LARGEST = 512  # head dim that is tried where a sheet names no largest
OTHER = {"cpu": Device("cuda", "a card", capability=(9, 0)), "cuda": Device("cpu", "a processor")}


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return find_device(request.param)


def plain(implementation: Implementation, **changes: Any) -> Workload:
    """A workload that is refused for no other cause than the one that ``changes`` name."""
    sheet = implementation.sheet
    dtype = next(dtype for dtype in ("fp32", "bf16", "fp16") if dtype in sheet.dtypes)
    return Workload(**{"B": 2, "H": 2, "L": 64, "D": 64, "dtype": dtype} | changes)


def cells(column: str, values: tuple[str, ...]) -> list[Any]:
    """(name, value) of a column of the table."""
    found = []
    for name, value in itertools.product(names("all"), values):
        sheet = find(name).sheet
        is_slow = sheet.compiled and value in getattr(sheet, column)
        if name != "flex" or not is_slow:
            found.append(pytest.param(name, value, marks=pytest.mark.long if is_slow else ()))
    return found


def holds(implementation: Implementation, workload: Workload, device: Device) -> None:
    """It runs here and is right; what the machine lacks is a skip."""
    if reasons := implementation.reasons_unsupported(workload, device):
        pytest.skip("; ".join(reasons))
    run_case(implementation, *problem(workload, device), device)


def is_refused(implementation: Implementation, workload: Workload, device: Device, why: str, direction: str) -> None:
    reasons = implementation.reasons_unsupported(workload, device, direction)
    assert any(why in reason for reason in reasons), (why, reasons)


@pytest.mark.parametrize(("name", "dtype"), cells("dtypes", DTYPES))
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_dtypes(name: str, dtype: str, device: Device) -> None:
    implementation = find(name)
    workload = plain(implementation, dtype=dtype)
    if dtype in implementation.sheet.dtypes:
        holds(implementation, workload, device)
    else:
        is_refused(implementation, workload, device, f"not {dtype}", "forward")


@pytest.mark.parametrize(("name", "layout"), cells("layouts", LAYOUTS))
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_layouts(name: str, layout: str, device: Device) -> None:
    implementation = find(name)
    workload = plain(implementation, layout=layout)
    if layout in implementation.sheet.layouts:
        holds(implementation, workload, device)
    else:
        is_refused(implementation, workload, device, f"not {layout}", "forward")


@pytest.mark.parametrize("name", WITH_COMPILED)
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_the_largest_head_dim_runs_and_what_does_not_fit_is_refused(name: str, device: Device) -> None:
    implementation, sheet = find(name), find(name).sheet
    if sheet.max_head_dim is not None:
        beyond = sheet.max_head_dim + sheet.head_dim_multiple
        is_refused(implementation, plain(implementation, D=beyond), device, f"not {beyond}", "forward")
    least = sheet.min_head_dim.get(device.kind, 1)
    if least > 1:
        is_refused(implementation, plain(implementation, D=least // 2), device, f"not {least // 2}", "forward")
        holds(implementation, plain(implementation, D=least, L=32, H=1), device)
    if sheet.head_dim_multiple > 1:
        is_refused(implementation, plain(implementation, D=60 + 1), device, "not 61", "forward")
    for choice in sheet.head_dim_choices:
        is_refused(implementation, plain(implementation, D=choice + 8), device, f"not {choice + 8}", "forward")
    largest = max(sheet.head_dim_choices, default=sheet.max_head_dim or LARGEST)
    holds(implementation, plain(implementation, D=largest, L=32, H=1), device)


@pytest.mark.parametrize("name", names("all"))
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_devices_and_directions(name: str, device: Device) -> None:
    implementation, sheet = find(name), find(name).sheet
    workload = plain(implementation)
    for one in (device, OTHER[device.kind]):
        if one.kind not in sheet.devices:
            is_refused(implementation, workload, one, f"not on {one.kind}", "forward")
    if sheet.min_capability is not None:
        old = Device("cuda", "an old card", capability=(3, 5))
        is_refused(implementation, workload, old, "an old card has 3.5", "forward")
    if sheet.below_capability is not None:
        new = Device("cuda", "a new card", capability=sheet.below_capability)
        is_refused(implementation, workload, new, "a new card has ", "forward")
    for direction in set(DIRECTIONS) - sheet.directions:
        is_refused(implementation, workload, device, f"has no {direction}", direction)


@pytest.mark.parametrize("name", [name for name in names("all") if find(name).sheet.forward_only])
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_what_is_forward_only_has_no_backward(name: str, device: Device) -> None:
    implementation = find(name)
    for word in implementation.sheet.forward_only:
        workload = Workload.parse(FEATURE_CASES[word]).replace(dtype=plain(implementation).dtype, D=64, D_v=64)
        sentence = "no gradient for the bias" if word == "bias" else "has no backward with"
        is_refused(implementation, workload, device, sentence, "backward")
        assert not any(sentence in reason for reason in implementation.reasons_unsupported(workload, device))


@pytest.mark.parametrize("name", [name for name in names("all") if find(name).sheet.traceable])
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_what_is_traceable_is_traced_whole(name: str, device: Device) -> None:
    implementation = find(name)
    workload = plain(implementation, causal="top_left")
    if reasons := implementation.reasons_unsupported(workload, device):
        pytest.skip("; ".join(reasons))
    run_traced(implementation, workload, device)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*(name for name in ALL if find(name).sheet.cuda_graph), "naive_compiled"])
def test_what_can_be_captured_is_captured(name: str, gpu: Device) -> None:
    implementation = find(name)
    workload = plain(implementation, L=128, causal="top_left")
    if reasons := implementation.reasons_unsupported(workload, gpu):
        pytest.skip("; ".join(reasons))
    run_captured(implementation, workload, gpu)


def run_traced(implementation: Implementation, workload: Workload, device: Device) -> None:
    inputs = make_inputs(workload, device)
    prepared = implementation.prepare(workload, device)
    expected = prepared.forward(inputs).out
    torch._dynamo.reset()
    whole = torch.compile(lambda: prepared.forward(inputs).out, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(), expected)


def run_captured(implementation: Implementation, workload: Workload, device: Device) -> None:
    inputs = make_inputs(workload, device)
    prepared = implementation.prepare(workload, device)
    expected = prepared.forward(inputs).out.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        prepared.forward(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prepared.forward(inputs).out
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


# --- sheets that lie --------------------------------------------------------------------------------------------------


class Liar(SheetImplementation):
    """Right on what it really takes; ``lie`` spoils one thing."""

    name, summary = "liar", "claims more than it does"
    sheet = Sheet(
        dtypes=frozenset({"fp32"}), features=frozenset(), directions=frozenset({"forward"}), traceable=True,
        layouts=frozenset({"bhld"}),
    )  # fmt: skip

    def __init__(self, lie: str, **claims: Any) -> None:
        self.lie, self.sheet, self.calls = lie, replace(type(self).sheet, **claims), 0

    def prepare(self, workload: Workload, device: Device) -> Prepared:
        return self  # type: ignore[return-value]

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        q, k, v = inputs.q, inputs.k, inputs.v
        if self.lie == "layout":  # reads memory as if heads came first
            q, k, v = (torch.as_strided(t, t.shape, t.shape and make_strides(t.shape)) for t in (q, k, v))
        if self.lie == "head dim":
            q, k = q[..., :64], k[..., :64]
        out = (q @ k.transpose(-1, -2) * inputs.workload.effective_scale).softmax(-1) @ v
        if self.lie == "dtype":
            out = out.float()
        self.calls += 1
        if self.lie == "deterministic":
            out = out + 1e-6 * self.calls
        if self.lie == "traceable" and out.sum().item() > 1e9:
            out = -out
        return Output(out)


def make_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


CPU = find_device("cpu")
LIES = {
    "dtype": (Liar("dtype", dtypes=frozenset({"fp32", "bf16"})), {"dtype": "bf16"}),
    "layout": (Liar("layout", layouts=frozenset({"bhld", "blhd"})), {"layout": "blhd"}),
    "head dim": (Liar("head dim", max_head_dim=128), {"D": 128}),
    "deterministic": (Liar("deterministic", deterministic=True), {}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_sheet_that_lies_fails(lie: str) -> None:
    liar, changes = LIES[lie]
    honest = Liar("nothing")
    run_case(honest, *problem(plain(honest), CPU), CPU)
    with pytest.raises(AssertionError):
        holds(liar, plain(liar, **changes), CPU)


def test_a_sheet_that_lies_about_tracing_fails() -> None:
    run_traced(Liar("nothing"), plain(Liar("nothing")), CPU)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        run_traced(Liar("traceable"), plain(Liar("traceable")), CPU)


class HalfBackward(Liar):
    """Has a backward; ``lie`` leaves out the bias's gradient, or the one of v, or changes a bit of dq each time."""

    def __init__(self, lie: str) -> None:
        super().__init__(lie, features=frozenset({"bias"}), directions=frozenset(DIRECTIONS), deterministic=True)

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v", "bias")}
        q, k, v, bias = leaves.values()
        with torch.enable_grad():
            out = (q @ k.transpose(-1, -2) * inputs.workload.effective_scale + bias).softmax(-1) @ v
        return Output(out.detach(), saved=(out, leaves))

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        out, leaves = saved
        dq, dk, dv, dbias = torch.autograd.grad(out, tuple(leaves.values()), inputs.grad_out, retain_graph=True)
        if self.lie == "v":
            dv = torch.zeros_like(dv)
        if self.lie == "equal bits":
            self.calls += 1
            dq = dq * (1 + self.calls * 2.0**-22)
        return Gradients(dq, dk, dv, None if self.lie == "bias" else dbias)


def test_a_sheet_that_lies_about_a_gradient_fails() -> None:
    workload = plain(HalfBackward("nothing"), bias="fp32")
    run_case(HalfBackward("nothing"), *problem(workload, CPU), CPU)
    for lie, says in (("bias", "dbias"), ("v", "dv of"), ("equal bits", "dq of equal calls must have equal bits")):
        with pytest.raises(AssertionError, match=says):
            run_case(HalfBackward(lie), *problem(workload, CPU), CPU)
    with pytest.raises(AttributeError, match="backward"):
        run_case(Liar("backward", directions=frozenset(DIRECTIONS)), *problem(plain(Liar("")), CPU), CPU)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_a_sheet_that_lies_about_capture_fails(gpu: Device) -> None:
    honest, liar = Liar("nothing"), Liar("traceable")  # it asks the device for a number in its call
    run_captured(honest, plain(honest, L=128), gpu)
    generator = torch.cuda.default_generators[gpu.index]
    state = generator.clone_state()
    with pytest.raises(RuntimeError, match="captur"):
        run_captured(liar, plain(liar, L=128), gpu)
    generator.graphsafe_set_state(state)  # a capture that broke leaves it waiting for the end
    torch.cuda.synchronize()


def test_a_sheet_that_claims_less_than_it_refuses_is_found_out() -> None:
    """A claim that is not made must be refused: a liar by silence refuses nothing."""

    class Silent(Liar):
        def reasons_unsupported(self, workload: Workload, device: Device, direction: str = "forward") -> list[str]:
            return []

    with pytest.raises(AssertionError):
        is_refused(Silent("nothing"), plain(Silent("nothing"), dtype="bf16"), CPU, "not bf16", "forward")
