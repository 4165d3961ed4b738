"""Stage 3: how a reported fault is tried: a recipe's workloads through the contract, judged as a check judges.

Reads an Implementation and a Device, writes what was seen. Must not import a later stage, nor torch at import time.
What is tried is :mod:`attnscope.fault_probes`'s and, on a card alone, :mod:`attnscope.card_probes`'s.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
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


def judged(*cases: Case, despite_reasons: bool | str = False, of_backward: bool = False) -> Probe:
    """A probe that runs each case, forward and backward, and looks for the first tensor that is wrong.

    Args:
        cases: the recipe's workloads.
        of_backward: the fault is the backward's, so that a forward alone says nothing of it.
        despite_reasons: also run what the implementation declares unsupported because of this very fault, so that the
            reason can go when the fault has gone; True: on a CPU, since such a call may cost the process its card;
            ``everywhere``: on a card too.
    """
    kinds = ("cpu", "cuda") if despite_reasons == "everywhere" else ("cpu",) if despite_reasons else ()

    def probe(implementation: Implementation, device: Device) -> Seen:
        reasons, ran = [], 0
        for case in cases:
            workload = _in_a_dtype_it_takes(implementation, Workload.parse(case.workload), device)
            blocked = safe_reasons(implementation, workload, device, "forward")
            ignorable = device.kind in kinds and not _never_runs(implementation, workload, device)
            if blocked and not ignorable:
                reasons += blocked
                continue
            no_backward = safe_reasons(implementation, workload, device, "backward")
            backward = not no_backward or (device.kind in kinds and "backward" in implementation.sheet.directions)
            if of_backward and not backward:
                reasons += no_backward
                continue
            inputs = make_inputs(workload, device, kind=case.kind)
            if case.change is not None:
                case.change(inputs)
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


def equal_runs(implementation: Implementation, device: Device) -> Seen:
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
