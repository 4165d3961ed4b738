"""What tests of an implementation on a card share: the check without long spins, what a call costs, spoilt copies.

Nothing here needs a card by itself: tests/test_card_contract.py runs all of it on a CPU with stand-ins, so that a test
on a borrowed card fails for what the card does alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
import torch

from attnscope.budgets import expect
from attnscope.checking import ReferenceCache, check_implementation
from attnscope.device import Device
from attnscope.guards import poisoned_memory, same_bits
from attnscope.implementation import Implementation, Output, Prepared, SheetImplementation
from attnscope.inputs import Inputs, make_inputs
from attnscope.judging import judge
from attnscope.records import CheckResult, TensorCheck
from attnscope.reference import compute_attention
from attnscope.strides import own_memory
from attnscope.units import format_number
from attnscope.workload import DIRECTIONS, Workload

SHORT_SPIN_CYCLES = 2_000_000  # about 1 ms: longer than launching takes, which is what the spin is for
KINDS = ("plain", "needles")
LOG2_E = math.log2(math.e)


# --- the check, as often as a test file can afford it -----------------------------------------------------------------


def is_claimed(implementation: Implementation, workload: Workload, device: Device) -> bool:
    """Whether its sheet claims every feature of the workload. What is claimed must run, what is not must be refused."""
    lacking = workload.features - implementation.sheet.features
    reasons = implementation.reasons_unsupported(workload, device)
    if lacking:
        assert reasons, f"{workload}: {', '.join(sorted(lacking))} not claimed, and not refused either"
    else:
        assert not reasons, f"{workload}: claimed, but refused: {'; '.join(reasons)}"
    return not lacking


def checked(
    implementation: Implementation,
    workload: Workload,
    device: Device,
    *,
    kinds: Sequence[str] = KINDS,
    strides: str = "plain",
    repeat: bool = False,
    spin_cycles: int = SHORT_SPIN_CYCLES,
) -> CheckResult:
    """The forward's check, quick and with a short spin."""
    return check_implementation(
        implementation, workload, device, directions=("forward",), kinds=kinds, quick=True, repeat=repeat,
        strides=strides, spin_cycles=spin_cycles,
    )  # fmt: skip


def complaints(
    implementation: Implementation, workloads: Sequence[Workload], device: Device, **options: Any
) -> list[str]:
    """A sentence for each workload that is claimed and does not pass as tightly as its sheet says, or that raises."""
    found, ran = [], 0
    for workload in workloads:
        if not is_claimed(implementation, workload, device):
            continue
        ran += 1
        try:
            result = checked(implementation, workload, device, **options)
        except Exception as error:  # one failure shall not hide the next: a card is borrowed for minutes
            found.append(f"{workload}: raised {type(error).__name__}: {error}")
            continue
        may_be_loose = bool(implementation.sheet.rounded_too(workload, device))
        if not result.passed or (result.grade != "tight" and not may_be_loose):
            found.append(f"{workload}: {result.grade}, {result.message}")
    if not ran:
        pytest.skip(f"{implementation.name} claims none of {', '.join(map(str, workloads))}")
    return found


def told_of_each(
    implementations: Sequence[Implementation], workload: Workload, device: Device
) -> tuple[list[str], list[str]]:
    """(lines of those that passed, lines of those that did not): each its grade, how near its budget, and why."""
    cache, passed, failed = ReferenceCache(), [], []
    for implementation in implementations:
        directions = [d for d in DIRECTIONS if not implementation.reasons_unsupported(workload, device, d)]
        if not directions:
            continue
        start = f"{implementation.name} {'+'.join(directions)}"
        try:
            result = check_implementation(implementation, workload, device, directions=directions, cache=cache)
        except Exception as error:
            failed.append(f"{start}: raised {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        off = [f"{t.tensor} on {t.kind} {figures(t)}" for t in result.tensors if not t.passed] or ["nothing wrong"]
        line = f"{start}: {result.grade}, factor {format_number(result.factor)}, {'; '.join(off)} ({result.message})"
        (passed if result.passed else failed).append(line)
    return passed, failed


def figures(check: TensorCheck) -> str:
    """Error of the worst row over its budget, RMS over the twin's, and slope, where there are such."""
    row = f"row {format_number(check.row_rel_error_max)} of {format_number(check.error_budget)}"
    return f"{row}, rms x{format_number(check.rms_ratio)}, slope {format_number(check.slope)}"


def misjudged(implementation: Implementation, prepared: Prepared, inputs: Inputs, device: Device) -> list[str]:
    """What the judge says against one forward on these very tensors, on poisoned memory; and what was changed."""
    before = {name: tensor.clone() for name, tensor in inputs.tensors().items()}
    with poisoned_memory(inputs):
        output = prepared.forward(inputs)
    rounds = implementation.sheet.rounded_too(inputs.workload, device)
    expected = expect(inputs, "fp32", rounds, backward=False)
    tensors = {"out": output.out} | ({"lse": output.lse} if output.lse is not None else {})
    found = [check.message for check in judge(tensors, expected, inputs.kind) if not check.passed]
    return found + [f"{name} was changed" for name, t in inputs.tensors().items() if not same_bits(t, before[name])]


def unmasked_attention(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in float32 of what has no option, all heads at once: the reference takes them one by one."""
    w = inputs.workload
    k, v = (t.float().repeat_interleave(w.group, 1) for t in (inputs.k, inputs.v))
    scores = inputs.q.float() @ k.mT * w.effective_scale
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


# --- what a call costs ------------------------------------------------------------------------------------------------


def allocated_by(call: Callable[[], Any]) -> tuple[int, int, int]:
    """(allocations, bytes asked for, new segments) of torch's caching allocator in one call."""
    names = ("allocation.all.allocated", "requested_bytes.all.allocated", "segment.all.allocated")
    before = torch.cuda.memory_stats()
    kept = call()
    after = torch.cuda.memory_stats()
    del kept
    return tuple(after[name] - before[name] for name in names)  # type: ignore[return-value]


def output_bytes(workload: Workload) -> int:
    """Bytes of out in 16 bits and of lse."""
    w = workload
    return w.B * w.H * w.L * (2 * w.D_v + 4)


def run_in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work(0)``, ``work(1)``, ... return, each in a thread that begins when all are there; or raises."""
    together = Barrier(count, timeout=60)

    def begin(number: int) -> Any:
        together.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def refill(inputs: Inputs, values: Inputs) -> None:
    """Puts the numbers of ``values`` where those of ``inputs`` lie."""
    for name, tensor in inputs.tensors().items():
        own_memory(tensor).copy_(own_memory(values.tensors()[name]))


def differing(output: Output, expected: Output) -> list[str]:
    """Names of what is not the same bit by bit."""
    pairs = (("out", output.out, expected.out), ("lse", output.lse, expected.lse))
    return [name for name, got, wanted in pairs if not same_bits(got, wanted)]


def gives_bit_for_bit(prepared: Prepared, expecting: Prepared, workload: Workload, device: Device) -> None:
    """What ``expecting`` gives, each of thirty times, and right. Raises AssertionError."""
    for kind in ("plain", "needles"):
        inputs = make_inputs(workload, device, 7, kind)
        truth, expected = compute_attention(inputs, backward=False), expecting.forward(inputs)
        assert ((expected.out.double() - truth.out).abs() / (truth.scales["out"] + 1e-4)).max().item() < 1e-2
        for _ in range(30):
            assert differing(prepared.forward(inputs), expected) == []


def same_on_streams_and_in_a_graph(prepared: Prepared, workload: Workload, device: Device) -> None:
    """Two calls that overlap on streams of their own, and two that one graph replays. Raises AssertionError."""
    own = [make_inputs(workload, device, seed) for seed in range(2)]
    expected = [prepared.forward(inputs) for inputs in own]
    streams = [torch.cuda.Stream() for _ in own]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for inputs, stream in zip(own, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(prepared.forward(inputs))
        torch.cuda.synchronize()
        assert all(differing(output, one) == [] for output, one in zip(found, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [prepared.forward(inputs) for inputs in own]
    for output in captured:
        output.out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(differing(output, one) == [] for output, one in zip(captured, expected, strict=True))


# --- spoilt copies: the tests' own test -------------------------------------------------------------------------------


class Spoilt(SheetImplementation):
    """Another implementation whose forward is spoilt in one of the ways of :data:`SPOILS`."""

    summary = "right until it is spoilt"

    def __init__(self, inner: Implementation, way: str) -> None:
        self.name, self.sheet, self.inner, self.way = f"{inner.name}, {way}", inner.sheet, inner, way

    def prepare(self, workload: Workload, device: Device) -> Prepared:
        """The inner one's, spoilt."""
        inner, spoil, earlier = self.inner.prepare(workload, device), SPOILS[self.way], []

        class PreparedSpoilt:
            def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
                return spoil(inner.forward, inputs, earlier)

        return PreparedSpoilt()  # type: ignore[return-value]


Forward = Callable[[Inputs], Output]


def _row_unwritten(forward: Forward, inputs: Inputs, earlier: list[Any]) -> Output:
    output = forward(inputs)
    fresh = torch.empty_like(output.out)
    fresh[:, :, :-1] = output.out[:, :, :-1]
    return replace(output, out=fresh)


def _scale_off(forward: Forward, inputs: Inputs, earlier: list[Any]) -> Output:
    return forward(replace(inputs, q=inputs.q * 1.02))


def _last_key_lost(forward: Forward, inputs: Inputs, earlier: list[Any]) -> Output:
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, :, -1], v[:, :, -1] = k[:, :, -2], v[:, :, -2]
    return forward(replace(inputs, k=k, v=v))


def _heads_swapped(forward: Forward, inputs: Inputs, earlier: list[Any]) -> Output:
    return forward(replace(inputs, k=inputs.k.flip(1)))


def _earlier_output(forward: Forward, inputs: Inputs, earlier: list[Any]) -> Output:
    earlier.append(forward(inputs))
    return earlier[0]


def _lse_base_2(forward: Forward, inputs: Inputs, earlier: list[Any]) -> Output:
    output = forward(inputs)
    return replace(output, lse=output.lse * LOG2_E)


def _input_changed(forward: Forward, inputs: Inputs, earlier: list[Any]) -> Output:
    output = forward(inputs)
    inputs.q[0, 0, 0, 0] = 3.0
    return output


def _on_its_own_stream(forward: Forward, inputs: Inputs, earlier: list[Any]) -> Output:
    with torch.cuda.stream(torch.cuda.Stream()):
        return forward(inputs)


def _differs_each_time(forward: Forward, inputs: Inputs, earlier: list[Any]) -> Output:
    output = forward(inputs)
    earlier.append(None)
    if len(earlier) % 2:
        output.out[0, 0, 0, 0] += 2.0**-8
    return output


SPOILS: dict[str, Callable[[Forward, Inputs, list[Any]], Output]] = {
    "a row unwritten": _row_unwritten,
    "scale off by a fiftieth": _scale_off,
    "the last key lost": _last_key_lost,
    "another head's keys": _heads_swapped,
    "an earlier output": _earlier_output,
    "lse of base 2": _lse_base_2,
    "q changed": _input_changed,
    "not deterministic": _differs_each_time,
    "a stream of its own": _on_its_own_stream,  # needs a card
}


@contextlib.contextmanager
def no_synchronising() -> Iterator[None]:
    """While it lasts, what torch knows to wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def filled(workload: Workload, device: Device) -> Inputs:
    """Inputs of a workload whose tensors are so large that no float32 copy and no dO shall stand beside them."""
    like = make_inputs(workload.replace(B=1, H=1, H_kv=1, L=1, S=1, packed=None, lengths=None), device)
    generator = torch.Generator(device.torch_name).manual_seed(0)

    def normal(heads: int, rows: int, size: int) -> torch.Tensor:
        w = workload
        first, second = (rows, heads) if w.layout == "blhd" else (heads, rows)
        made = torch.empty(w.B, first, second, size, dtype=like.q.dtype, device=like.q.device)
        made.normal_(generator=generator)
        return made.transpose(1, 2) if w.layout == "blhd" else made

    w = workload
    q, k, v = normal(w.H, w.L, w.D), normal(w.H_kv, w.S, w.D), normal(w.H_kv, w.S, w.D_v)
    grad_out = like.grad_out[:1, :1, :1, :1].expand(w.B, w.H, w.L, w.D_v)
    return Inputs(w, q, k, v, grad_out)


def last_rows(inputs: Inputs, rows: int) -> Inputs:
    """The last ``rows`` rows and keys of the last head, as a problem of its own (L == S, no lengths, no packing)."""
    w = inputs.workload.replace(B=1, H=1, H_kv=1, L=rows, S=rows, layout="bhld")
    q, k, v, grad_out = (t[-1:, -1:, -rows:].contiguous() for t in (inputs.q, inputs.k, inputs.v, inputs.grad_out))
    return Inputs(w, q, k, v, grad_out)
