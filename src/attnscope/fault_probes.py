"""Stage 3: faults that were reported in public, as probes that show whether they are there.

Reads an Implementation and a Device, writes what was seen; :mod:`attnscope.faults` keeps it. Must not import a later
stage, nor torch at import time. A probe runs the report's recipe through the contract and judges what comes back as
a check does; what a report says about other software is not repeated here, only what to try.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attnscope.budgets import expect
from attnscope.device import Device
from attnscope.errors import AttnscopeError
from attnscope.implementation import Implementation, safe_reasons
from attnscope.inputs import Inputs, Tensor, make_inputs
from attnscope.judging import judge
from attnscope.workload import Workload

OUTCOMES = ("observed", "absent", "skipped")
EQUAL_RUNS = 30
FUSED = ("sdpa_efficient", "sdpa_flash", "sdpa_cudnn", "sdpa_auto")


@dataclass(frozen=True)
class Seen:
    """What a probe saw: ``outcome`` is observed, absent or skipped, ``detail`` one line that says of what."""

    outcome: str
    detail: str


Probe = Callable[[Implementation, Device], Seen]


@dataclass(frozen=True)
class Fault:
    """One reported fault: where it was reported, for which workloads, what goes wrong, and how to try it.

    ``range`` says in words what ``applies`` decides. ``implementations`` are those that could have it (None: all);
    ``devices`` are the kinds of device.
    """

    id: str
    source: str
    range: str
    wrong: str
    applies: Callable[[Workload], bool]
    probe: Probe
    implementations: tuple[str, ...] | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")

    def try_on(self, implementation: Implementation, device: Device) -> Seen:
        """Run the recipe. Whatever torch raises in it is seen, not raised."""
        if device.kind not in self.devices:
            return Seen("skipped", f"its recipe needs {' or '.join(self.devices)}, this is {device.kind}")
        return self.probe(implementation, device)


@dataclass(frozen=True)
class Case:
    """One workload of a recipe; ``change`` turns its inputs into the report's."""

    workload: str
    change: Callable[[Inputs], None] | None = None
    kind: str = "plain"


def judged(*cases: Case, despite_reasons: bool = False) -> Probe:
    """A probe that runs each case, forward and backward, and looks for the first tensor that is wrong.

    Args:
        cases: the recipe's workloads.
        despite_reasons: on a CPU, also run what the implementation declares unsupported because of this very fault, so
            that the reason can go when the fault has gone. On a GPU a reason is always heeded.
    """

    def probe(implementation: Implementation, device: Device) -> Seen:
        reasons, ran = [], 0
        for case in cases:
            workload = _in_a_dtype_it_takes(implementation, Workload.parse(case.workload), device)
            blocked = safe_reasons(implementation, workload, device, "forward")
            ignorable = despite_reasons and device.kind == "cpu" and not _never_runs(implementation, workload, device)
            if blocked and not ignorable:
                reasons += blocked
                continue
            inputs = make_inputs(workload, device, kind=case.kind)
            if case.change is not None:
                case.change(inputs)
            backward = not safe_reasons(implementation, workload, device, "backward") or (
                despite_reasons and device.kind == "cpu" and "backward" in implementation.sheet.directions
            )
            if wrong := _first_wrong(implementation, inputs, device, backward=backward):
                return Seen("observed", f"{workload}: {wrong}")
            ran += 1
        if not ran:
            return Seen("skipped", "; ".join(dict.fromkeys(reasons)))
        return Seen("absent", f"{ran} of {len(cases)} recipes ran and were right")

    return probe


def _in_a_dtype_it_takes(implementation: Implementation, workload: Workload, device: Device) -> Workload:
    """``workload``, in bf16 where that is what its implementation takes."""
    half = workload.replace(dtype="bf16") if workload.dtype == "fp32" else workload
    refused = [bool(safe_reasons(implementation, w, device, "forward")) for w in (workload, half)]
    return half if refused == [True, False] else workload


def _never_runs(implementation: Implementation, workload: Workload, device: Device) -> bool:
    """Whether the sheet itself rules the workload out, whatever the fault."""
    return bool(implementation.sheet.reasons(workload, device, "forward"))


def _first_wrong(implementation: Implementation, inputs: Inputs, device: Device, *, backward: bool) -> str | None:
    """The first sentence of a judge who does not like what came back; None where all is right."""
    compute = implementation.sheet.compute_precision(inputs.workload.dtype)
    expected = expect(inputs, compute if compute in ("fp32", "tf32", "fp64") else "fp32", backward=backward)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of each kernel that it does not take
            tensors = _run(implementation, inputs, device, backward=backward)
    except (RuntimeError, ValueError, AttnscopeError) as error:
        return f"raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return next((check.message for check in judge(tensors, expected, inputs.kind) if not check.passed), None)


def _run(implementation: Implementation, inputs: Inputs, device: Device, *, backward: bool) -> dict[str, Tensor]:
    prepared = implementation.prepare(inputs.workload, device)
    output = prepared.forward(inputs, save=backward)
    tensors = {"out": output.out} | ({"lse": output.lse} if output.lse is not None else {})
    return tensors | (prepared.backward(inputs, output.saved).tensors() if backward else {})


def _equal_runs(implementation: Implementation, device: Device) -> Seen:
    """Thirty equal backwards, bitwise."""
    import torch

    workload = Workload.parse("B2,H4,L256,D64,bf16,causal" if device.kind == "cuda" else "B1,H2,L128,D32,fp32,causal")
    if reasons := safe_reasons(implementation, workload, device, "backward"):
        return Seen("skipped", "; ".join(reasons))
    inputs = make_inputs(workload, device)
    prepared = implementation.prepare(workload, device)
    saved = prepared.forward(inputs, save=True).saved
    first: dict[str, Tensor] = {}
    for run in range(EQUAL_RUNS):
        tensors = prepared.backward(inputs, saved).tensors()
        first = first or {name: tensor.clone() for name, tensor in tensors.items()}
        if differs := [name for name, tensor in tensors.items() if not torch.equal(tensor, first[name])]:
            return Seen("observed", f"{workload}: {' and '.join(differs)} of run {run + 1} differ from the first's")
    return Seen("absent", f"{workload}: {EQUAL_RUNS} equal runs gave equal bits")


# --- what the reports do to inputs ------------------------------------------------------------------------------------


def _hide_a_row(inputs: Inputs) -> None:
    inputs.mask[..., 3, :] = False  # type: ignore[index]


def _stride_two(inputs: Inputs) -> None:
    """q, k, v (and bias, mask) with a last dim that is not contiguous."""
    import torch

    for name in ("q", "k", "v", "bias", "mask"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            setattr(inputs, name, torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2])


def _expand_grad_out(inputs: Inputs) -> None:
    """What ``out.sum().backward()`` hands over: one number for all."""
    inputs.grad_out = inputs.grad_out.new_ones(()).expand(inputs.grad_out.shape)


def _transpose_grad_out(inputs: Inputs) -> None:
    inputs.grad_out = inputs.grad_out.transpose(1, 2).contiguous().transpose(1, 2)


def _same_row_grad_out(inputs: Inputs) -> None:
    """Stride 0 over the rows."""
    inputs.grad_out = inputs.grad_out[:, :, :1].expand(inputs.grad_out.shape)


def _has_mask_tensor(w: Workload) -> bool:
    return bool(w.features & {"mask", "bias", "alibi", "window", "lengths", "packed"})


def _pytorch(*numbers: int) -> str:
    return " ".join(f"https://github.com/pytorch/pytorch/issues/{number}" for number in numbers)


def _of_flash_attention(*numbers: int) -> str:
    return " ".join(f"https://github.com/Dao-AILab/flash-attention/issues/{number}" for number in numbers)


def _alignments() -> Iterator[Case]:
    for L, S in ((1, 16), (2, 5), (5, 2)):
        for alignment in ("top_left", "bottom_right"):
            yield Case(f"B1,H2,L{L},S{S},D16,fp32,causal={alignment}")


FAULTS: tuple[Fault, ...] = (
    Fault(
        id="W1",
        source=_pytorch(103963, 41508),
        range="a mask that hides every key from some row",
        wrong="the row and its gradients are NaN; right are zeros",
        applies=lambda w: w.mask is not None,
        probe=judged(Case("B1,H2,L8,D16,fp32,mask=bool:1x1xLxS", _hide_a_row)),
    ),
    Fault(
        id="W3",
        source=f"{_pytorch(108108)} {_of_flash_attention(1778)}",
        range="a causal mask with L != S",
        wrong="the mask is aligned to the other corner",
        applies=lambda w: w.causal is not None and w.L != w.S,
        probe=judged(*_alignments()),
    ),
    Fault(
        id="W4",
        source=_pytorch(196678),
        range="backward, an explicit mask, L % 128 = 64, logits far below 0",
        wrong="NaN in dq",
        applies=lambda w: _has_mask_tensor(w) and w.L % 128 == 64 and w.dtype in ("bf16", "fp16"),
        probe=judged(Case("B1,H1,L704,D64,bf16,mask=bool:1x1xLxS", kind="shifted")),
        implementations=("sdpa_cudnn", "sdpa_auto"),
        devices=("cuda",),
    ),
    Fault(
        id="W6",
        source="https://github.com/pytorch/pytorch/pull/191612",
        range="an additive float32 bias with 16-bit q, k, v",
        wrong="most of the output is NaN",
        applies=lambda w: w.bias == "fp32" and w.dtype in ("bf16", "fp16"),
        probe=judged(Case("B1,H2,L128,D64,fp16,bias=fp32:1x1xLxS")),
        implementations=FUSED,
        devices=("cuda",),
    ),
    Fault(
        id="W8",
        source=_pytorch(142228, 146704),
        range="B or H above 65535",
        wrong="the launch fails, or part of the output is wrong",
        applies=lambda w: max(w.B, w.H) > 65535,
        probe=judged(Case("B65536,H1,L8,D64,fp16"), Case("B1,H65536,L8,D64,fp16")),
        implementations=FUSED,
        devices=("cuda",),
    ),
    Fault(
        id="W11",
        source="https://github.com/pytorch/pytorch/pull/187506",
        range="q, k, v, bias or mask whose last dim is not contiguous",
        wrong="another result than with .contiguous()",
        applies=lambda w: True,
        probe=judged(
            Case("B1,H2,L33,D16,fp32,causal", _stride_two),
            Case("B1,H2,L33,D16,fp32,mask=bool", _stride_two),
            Case("B1,H2,L33,D16,fp32,bias=fp32", _stride_two),
        ),
    ),
    Fault(
        id="W14",
        source=_of_flash_attention(1537),
        range="S = 0, L = 0, B = 0, or an empty sequence of a packed batch",
        wrong="an error, or anything but zeros of the right shape",
        applies=lambda w: 0 in (w.B, w.L, w.S, *(w.packed or ())),
        probe=judged(
            Case("B2,H2,L8,S0,D16,fp32"),
            Case("B2,H2,L0,S8,D16,fp32"),
            Case("B0,H2,L8,D16,fp32"),
            Case("H2,D16,fp32,packed=3/0/5"),
        ),
    ),
    Fault(
        id="W22",
        source=_of_flash_attention(2244, 414),
        range="any backward",
        wrong="gradients of equal calls differ in their last bits: not deterministic, which is not wrong",
        applies=lambda w: True,
        probe=_equal_runs,
    ),
    Fault(
        id="W23",
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
        range="a mask and causal both",
        wrong="one of them is dropped, or an error; both must apply",
        applies=lambda w: w.mask is not None and w.causal is not None,
        probe=judged(Case("B1,H2,L33,D16,fp32,causal,mask=bool"), Case("B1,H2,L33,D16,fp32,causal,bias=fp32")),
    ),
    Fault(
        id="W27",
        source="https://github.com/huggingface/transformers/pull/35984",
        range="a head dim that is padded to a multiple of 8",
        wrong="the scale is taken from the padded head dim",
        applies=lambda w: w.scale is None and w.D % 8 != 0,
        probe=judged(Case("B1,H2,L64,D36,fp32,causal"), Case("B1,H2,L64,D36,fp32")),
    ),
    Fault(
        id="W28",
        source="https://github.com/onnx/onnx/pull/7274",
        range="grouped-query heads",
        wrong="key/value heads are mapped as by repeat, not as by repeat_interleave",
        applies=lambda w: w.H != w.H_kv,
        probe=judged(Case("B1,H8/2,L33,D16,fp32,causal")),
    ),
    Fault(
        id="W29",
        source=_pytorch(133671, 138340),
        range="backward with dO expanded, transposed or of stride 0",
        wrong="another gradient than with a contiguous dO",
        applies=lambda w: True,
        probe=judged(
            Case("B2,H2,L33,D16,fp32,causal", _expand_grad_out),
            Case("B2,H2,L33,D16,fp32,causal", _transpose_grad_out),
            Case("B2,H2,L33,D16,fp32,causal", _same_row_grad_out),
        ),
    ),
    Fault(
        id="W30",
        source="https://github.com/pytorch/pytorch/pull/188302",
        range="backward with a bias that wants a gradient",
        wrong="the bias gets no gradient",
        applies=lambda w: w.bias is not None,
        probe=judged(Case("B1,H2,L33,D16,fp32,bias=fp32:1xHxLxS"), despite_reasons=True),
    ),
    Fault(
        id="A1",
        source="https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cpu/FlashAttentionKernel.cpp",
        range="a scale of 0 or below, with a causal mask",
        wrong="NaN: scores are masked before they are scaled, so -inf becomes inf",
        applies=lambda w: w.effective_scale <= 0 and w.causal is not None,
        probe=judged(Case("B1,H2,L33,D16,fp32,causal,scale=-0.2"), despite_reasons=True),
    ),
)


def find_fault(fault_id: str) -> Fault | None:
    """The fault of that id."""
    return next((fault for fault in FAULTS if fault.id == fault_id), None)
