"""What tests on a card share, without a card: it lets right ones pass and finds each spoilt copy."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from attnscope.device import Device
from attnscope.implementation import SheetImplementation
from attnscope.inputs import make_inputs
from attnscope.reference import compute_attention
from attnscope.workload import Workload
from card_contract import (
    SPOILS,
    Spoilt,
    allocated_by,
    checked,
    complaints,
    differing,
    filled,
    is_claimed,
    last_rows,
    misjudged,
    output_bytes,
    refill,
    run_in_threads,
    told_of_each,
    unmasked_attention,
)
from saboteurs import Tiled

SMALL = Workload.parse("B1,H4/2,L33,S40,D16,bf16")
SIGHTED = frozenset({"gqa", "cross"})


@pytest.mark.parametrize("way", [way for way in SPOILS if "stream" not in way])
def test_each_spoilt_copy_is_found_out(way: str, cpu: Device) -> None:
    result = checked(Spoilt(Tiled(), way), SMALL, cpu, repeat=way == "not deterministic")
    assert not result.passed


def test_right_ones_pass_and_wrong_ones_are_told_one_by_one(cpu: Device) -> None:
    assert complaints(Tiled(), [SMALL, SMALL.replace(causal="bottom_right")], cpu, repeat=True) == []
    wrong = Spoilt(Tiled(), "another head's keys")
    (one, other) = complaints(wrong, [SMALL, SMALL.replace(dtype="fp16")], cpu)
    assert one.startswith(f"{SMALL}: failed, out on ") and "fp16" in other

    class Raises(Tiled):
        def prepare(self, workload, device):
            raise OSError("no card")

    assert complaints(Raises(), [SMALL], cpu) == [f"{SMALL}: raised OSError: no card"]


def test_each_implementation_has_one_line_with_its_figures(cpu: Device) -> None:
    class Raises(Tiled):
        def prepare(self, workload, device):
            raise OSError("no\ncard")

    lost = Spoilt(Tiled(directions=frozenset({"forward"})), "scale off by a fiftieth")
    refuses = Tiled(features=frozenset(), name="refuses")
    passed, failed = told_of_each([Tiled(), lost, refuses, Raises(name="raises")], SMALL, cpu)
    assert len(passed) == 1 and re.match(r"tiled forward\+backward: tight, factor 0\.\d+, nothing wrong \(", passed[0])
    assert re.match(
        r"tiled, scale off .*: failed, factor [\d.,]+, .*out on plain row [\d.]+ of [\d.]+, rms x", failed[0]
    )
    assert failed[1] == "raises forward+backward: raised OSError: no card" and "\n" not in "".join(passed + failed)


def test_a_claim_decides_what_runs(cpu: Device) -> None:
    some = Tiled(features=SIGHTED)
    assert is_claimed(some, SMALL, cpu) and not is_claimed(some, SMALL.replace(window=3), cpu)
    with pytest.raises(pytest.skip.Exception, match="tiled claims none of B1"):
        complaints(some, [SMALL.replace(window=3)], cpu)

    class Contrary(SheetImplementation):
        name, summary, sheet = "contrary", "", some.sheet

        def reasons_unsupported(self, workload, device, direction="forward"):
            return [] if workload.window else ["does not feel like it"]

    with pytest.raises(AssertionError, match="claimed, but refused: does not feel like it"):
        is_claimed(Contrary(), SMALL, cpu)
    with pytest.raises(AssertionError, match="window not claimed, and not refused either"):
        is_claimed(Contrary(), SMALL.replace(window=3), cpu)


def test_one_forward_is_judged_on_these_very_tensors(cpu: Device) -> None:
    inputs, tiled = make_inputs(SMALL, cpu), Tiled()
    assert misjudged(tiled, tiled.prepare(SMALL, cpu), inputs, cpu) == []
    assert misjudged(tiled, Spoilt(tiled, "lse of base 2").prepare(SMALL, cpu), inputs, cpu)[0].startswith("lse ")
    assert misjudged(tiled, Spoilt(tiled, "q changed").prepare(SMALL, cpu), inputs, cpu)[-1] == "q was changed"


def test_allocations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = dict.fromkeys(("allocation", "requested_bytes", "segment"), 5)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {f"{n}.all.allocated": c for n, c in counts.items()})

    def call() -> None:
        counts.update(allocation=7, requested_bytes=105)

    assert allocated_by(call) == (2, 100, 0)
    workload = SMALL.replace(D_v=24)
    output = Tiled().prepare(workload, Device("cpu", "")).forward(make_inputs(workload, Device("cpu", "")))
    assert output_bytes(workload) == output.out.nbytes + output.lse.nbytes


def test_threads_begin_together_and_raise() -> None:
    assert run_in_threads(3, lambda number: number * number) == [0, 1, 4]
    with pytest.raises(ZeroDivisionError):
        run_in_threads(2, lambda number: 1 // number)


def test_contents_are_put_where_tensors_lie_and_differences_are_named(cpu: Device) -> None:
    one, other = (make_inputs(Workload.parse("B1,H2,L9,D16,bf16,sinks,layout=qkv"), cpu, seed) for seed in (0, 1))
    prepared = Tiled().prepare(one.workload, cpu)
    expected, places = prepared.forward(other), one.q.data_ptr()
    assert differing(prepared.forward(one), expected) == ["out", "lse"]
    refill(one, other)
    assert differing(prepared.forward(one), expected) == [] and one.q.data_ptr() == places
    assert differing(replace(expected, lse=expected.lse + 1), expected) == ["lse"]


def test_the_plain_attention_of_many_heads_is_attention(cpu: Device) -> None:
    inputs = make_inputs(SMALL, cpu)
    truth, (out, lse) = compute_attention(inputs, backward=False), unmasked_attention(inputs)
    assert torch.allclose(out.double(), truth.out, atol=1e-5) and torch.allclose(lse.double(), truth.lse, atol=1e-5)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_the_last_rows_of_large_tensors_are_a_problem_of_their_own(layout: str, cpu: Device) -> None:
    inputs = filled(Workload.parse(f"B2,H3,L40,D16,bf16,window=8,causal,layout={layout}"), cpu)
    assert inputs.q.transpose(1, 2).is_contiguous() == (layout == "blhd") and inputs.q.std() > 0.5
    whole, cut = compute_attention(inputs, backward=False), compute_attention(last_rows(inputs, 20), backward=False)
    assert torch.allclose(cut.out[0, 0, 8:], whole.out[-1, -1, -12:])
    assert torch.allclose(cut.lse[0, 0, 8:], whole.lse[-1, -1, -12:])
