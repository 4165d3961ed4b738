"""Predicted savings on the recorded run that ships with the package: what PyTorch's own choice took in the same run is
what taking a fused kernel really saves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import attnscope
from attnscope.explaining import explain_trace
from attnscope.records import Result, Run, read_runs
from attnscope.trace import read_trace

DEMO = Path(attnscope.__file__).parent / "demo"
REMEDIED = {  # implementation -> (finding, the implementation that its remedy leads to)
    "naive": (("unfused-attention", "sdpa_auto"), ("masked-fill-copy", "naive_inplace")),
    "sdpa_math": (("math-path", "sdpa_auto"),),
    "sdpa_efficient": (("better-implementation", "sdpa_auto"),),
    "sdpa_flash": (("better-implementation", "sdpa_auto"),),
}
LEAST_US = 50.0  # of a call: below, launches decide, which a trace of one call does not show


def pairs() -> Iterator[tuple[str, float, float]]:
    """(what, predicted, saved) in µs a call."""
    for run in read_runs(DEMO / "run.jsonl"):
        for result in run.results:
            for profile in result.profiles:
                if result.implementation in REMEDIED and profile.trace and (profile.gpu_us_per_call or 0) > LEAST_US:
                    yield from pairs_of(run, result, profile.direction, DEMO / profile.trace, profile.steps)


def pairs_of(run: Run, result: Result, direction: str, trace: Path, steps: int) -> Iterator[tuple[str, float, float]]:
    found = {finding.id: finding for finding in explain_trace(read_trace(trace)).findings}
    before = result.measurement(direction)
    for finding, better in REMEDIED[result.implementation]:
        others = (one for one in run.for_workload(result.workload) if one.implementation == better)
        after = next((one.measurement(direction) for one in others), None)
        if before is not None and after is not None and finding in found:
            saved = 1e3 * (before.time_ms_median - after.time_ms_median)
            what = f"{finding} {result.implementation} {direction} {result.workload}"
            yield what, (found[finding].saving_us or 0.0) / steps, saved


@pytest.mark.slow
def test_four_of_five_predictions_lie_within_a_quarter() -> None:
    found = list(pairs())
    far = [f"{what}: {predicted:.1f} of {saved:.1f}" for what, predicted, saved in found
           if abs(predicted / saved - 1) > 0.25]  # fmt: skip
    assert len(found) >= 30
    assert len(far) <= 0.2 * len(found), "\n".join(far)
