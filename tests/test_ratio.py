"""``attnscope report --ratio``: one implementation against the best of its rivals of the same run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnscope.cli import app
from attnscope.errors import UsageError
from attnscope.records import Run, read_runs
from attnscope.reporting.ratio import geometric_mean, ratios_of, render_ratios

RECORDS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "nvidia-h200.jsonl"


@pytest.fixture(scope="module")
def run() -> Run:
    return read_runs(RECORDS)[0]


def test_each_row_is_the_fastest_rival_s_time_over_its_own(run: Run) -> None:
    (ratios,) = ratios_of([run], "sdpa_cudnn")
    assert ratios.rows and ratios.without
    for row in ratios.rows:
        times = {
            r.implementation: m.time_ms_median
            for r in run.for_workload(row.workload)
            if r.status == "ok" and r.comparable and (m := r.measurement(row.direction)) is not None
        }
        own = times.pop("sdpa_cudnn")
        assert row.ratio == min(times.values()) / own and times[row.rival] == min(times.values())
        assert row.ratio_low is None or row.ratio_low <= row.ratio_high
    assert ratios.geometric_mean == geometric_mean([row.ratio for row in ratios.rows])
    assert sum(ratios.verdicts.values()) == len(ratios.rows)
    assert math.isclose(geometric_mean([2.0, 8.0]) or 0, 4.0) and geometric_mean([]) is None


def test_our_other_kernels_are_no_rivals_and_runs_are_never_mixed(run: Run) -> None:
    ours = {"sdpa_cudnn", "sdpa_auto"}
    marked = replace(run, results=tuple(r.with_changes(ours=r.implementation in ours) for r in run.results))
    other = replace(run, results=tuple(r for r in run.results if r.implementation not in ours))
    (ratios,) = ratios_of([marked, other], "sdpa_cudnn")
    assert "sdpa_auto" not in ratios.rivals and ratios.rows
    assert "no rival was timed" not in render_ratios(ratios) and len(ratios_of([run, run], "sdpa_cudnn")) == 2


def test_what_has_no_time_is_told(run: Run) -> None:
    text = render_ratios(ratios_of([run], "sdpa_cudnn")[0])
    assert "no ratio: B8,H12,L1024,D64,fp32,causal,layout=qkv forward: skipped: takes bf16 or fp16, not fp32" in text
    assert "geometric mean of" in text and "worst isolated:" in text and '"slower": ' in text
    with pytest.raises(UsageError, match="did you mean sdpa_cudnn"):
        ratios_of([run], "sdpa_cudn")
    alone = replace(run, results=tuple(r for r in run.results if r.implementation == "naive"))
    assert not ratios_of([alone], "naive")[0].rows


def test_the_command_writes_no_page() -> None:
    done = CliRunner().invoke(app, ["report", str(RECORDS), "--ratio", "sdpa_flash", "--json"])
    assert done.exit_code == 0 and '"geometric_mean_sustained"' in done.stdout
    assert not RECORDS.with_name("report.html").exists()
