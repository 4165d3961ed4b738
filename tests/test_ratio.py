"""``attnscope report --ratio``: one implementation against the best of its rivals of the same run, and its twins."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnscope.cli import app
from attnscope.errors import UsageError
from attnscope.records import Run, read_runs, write_run
from attnscope.reporting.ratio import geometric_mean, ratios_of
from attnscope.reporting.ratio_suites import suites_of
from attnscope.reporting.ratio_text import render_evidence
from attnscope.reporting.twins import twin_of, twins_of
from attnscope.suites import SUITES
from attnscope.workload import Workload
from rival_runs import rival_run

RECORDS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "nvidia-h200.jsonl"
GRID = SUITES["grid"]
LATER = "2026-12-01T00:00:00+00:00"


@pytest.fixture(scope="module")
def run() -> Run:
    return read_runs(RECORDS)[0]


def text_of(*runs: Run, name: str = "hopper") -> str:
    found = ratios_of(runs, name)
    return render_evidence(found, suites_of(found), twins_of(runs, name))


def suite_of(*runs: Run, suite: str = "grid"):
    return {made.suite: made for made in suites_of(ratios_of(runs, "hopper"))}[suite]


# --- a run ------------------------------------------------------------------------------------------------------------


def test_each_row_is_the_fastest_rival_s_time_over_its_own(run: Run) -> None:
    (ratios,) = ratios_of([run], "sdpa_cudnn")
    assert ratios.rows and ratios.without and ratios.untimed == ("reference_cpu",)
    for row in ratios.rows:
        times = {
            r.implementation: m.time_ms_median
            for r in run.for_workload(row.workload)
            if r.status == "ok" and r.comparable and (m := r.measurement(row.direction)) is not None
        }
        own = times.pop("sdpa_cudnn")
        assert row.ratio == min(times.values()) / own and times[row.rival] == min(times.values())
        assert row.ratio_low is None or row.ratio_low <= row.ratio_high
        assert row.host_us is not None
    assert math.isclose(geometric_mean([2.0, 8.0]) or 0, 4.0) and geometric_mean([]) is None


def test_our_other_kernels_are_no_rivals_and_runs_are_never_mixed() -> None:
    one = rival_run(GRID[:2], {"hopper": 1.0, "hopper_cuda": 0.5, "sdpa_cudnn": 1.1})
    alone = rival_run(GRID[:2], {"hopper": 9.0}, created=LATER)
    ratios, lonely = ratios_of([one, alone], "hopper")
    assert not lonely.rows and {left.reason for left in lonely.without} == {"no rival was timed"}
    assert ratios.rivals == ("sdpa_cudnn",) and [row.ratio for row in ratios.rows] == pytest.approx([1.1, 1.1])
    other = rival_run(GRID[:2], {"hopper": 1.0, "sdpa_cudnn": 3.0}, created=LATER)
    assert [row.ratio for ratios in ratios_of([one, other], "hopper") for row in ratios.rows] == pytest.approx(
        [1.1, 1.1, 3.0, 3.0]
    )


def test_what_has_no_time_is_told(run: Run) -> None:
    text = text_of(run, name="sdpa_cudnn")
    assert "no ratio: B8,H12,L1024,D64,fp32,causal,layout=qkv forward: skipped: takes bf16 or fp16, not fp32" in text
    assert "gpt2-forward, forward: 0 of 1 shapes" in text and "never timed: reference_cpu" in text
    with pytest.raises(UsageError, match="did you mean sdpa_cudnn"):
        ratios_of([run], "sdpa_cudn")
    alone = replace(run, results=tuple(r for r in run.results if r.implementation == "naive"))
    assert not ratios_of([alone], "naive")[0].rows


# --- suites -----------------------------------------------------------------------------------------------------------


def test_a_suite_has_its_means_its_worst_shapes_and_its_joules() -> None:
    def cudnn(w: Workload) -> float:
        return 0.9 if w == GRID[3] else 1.2

    suite = suite_of(rival_run(GRID, {"hopper": 1.0, "sdpa_cudnn": cudnn, "flash_attn_4": 1.3}))
    expected = math.exp((31 * math.log(1.2) + math.log(0.9)) / 32)
    for figure in (suite.isolated, suite.sustained, suite.energy):
        assert figure.geometric_mean == pytest.approx(expected) and figure.worst == pytest.approx(0.9)
        assert (figure.count, figure.below_one, figure.worst_rival) == (32, 1, "sdpa_cudnn")
        assert figure.worst_workload == str(GRID[3])
    assert (suite.shapes, suite.workloads, suite.missing, suite.without) == (32, 32, (), {})
    assert suite.verdicts == {"faster": 31, "slower": 1} and suite.slower == (f"{GRID[3]} against sdpa_cudnn",)
    assert suite.host_us_median == suite.host_us_most == 12.0


def test_the_share_of_the_limit_is_told_by_what_binds() -> None:
    run = rival_run(GRID[:3], {"hopper": lambda w: 1.0 if w.L == 512 else 0.6, "sdpa_cudnn": 1.0})
    read = replace(run.results[-2].forward, limit_term="bandwidth", vs_limit=0.97)
    run = replace(run, results=(*run.results[:-2], run.results[-2].with_changes(forward=read), run.results[-1]))
    matrix, bandwidth = suite_of(run).limits
    assert (matrix.term, matrix.count, matrix.lowest_workload) == ("matrix", 2, str(GRID[0]))
    assert matrix.lowest == pytest.approx(0.5) and matrix.geometric_mean == pytest.approx((0.5 * 0.5 / 0.6) ** 0.5)
    assert (bandwidth.count, bandwidth.lowest, bandwidth.lowest_workload) == (1, 0.97, str(GRID[2]))
    assert f"  of limit  read bandwidth: geometric mean 0.97, lowest 0.97 of 1, {GRID[2]}" in text_of(run)


def test_the_best_isolated_sustained_and_in_joules_may_be_three() -> None:
    w = GRID[0]
    run = rival_run([w], {"hopper": 1.0, "a": 1.1, "b": 1.2, "c": 1.3})
    changed = {"b": {"sustained_ms_median": 0.001}, "c": {"joules_per_call": 0.001}}
    results = tuple(
        r.with_changes(forward=replace(r.forward, **changed.get(r.implementation, {}))) for r in run.results
    )
    (row,) = ratios_of([replace(run, results=results)], "hopper")[0].rows
    assert (row.rival, row.sustained_rival, row.energy_rival) == ("a", "b", "c")
    assert row.sustained_ratio < 0.1 and row.energy_ratio < 0.1 and row.ratio > 1
    line = text_of(replace(run, results=results)).splitlines()[4]
    assert "(b)" in line and "(c)" in line and "(a)" not in line


def test_where_a_rival_is_missing_the_best_of_the_others_counts_and_the_gap_is_told() -> None:
    def only_small(w: Workload) -> float | None:
        return 0.5 if w.D < 256 and w.D == w.D_v else None

    run = rival_run(GRID, {"hopper": 1.0, "sdpa_cudnn": 1.2, "flash_attn_3": only_small})
    suite = suite_of(run)
    by_workload = {row.workload: row for row in suite.rows}
    big = [str(w) for w in GRID if only_small(w) is None]
    assert all(by_workload[w].ratio == pytest.approx(1.2) and by_workload[w].rival == "sdpa_cudnn" for w in big)
    assert suite.absent == {"flash_attn_3: skipped: takes another head dim": tuple(big)}
    assert suite.isolated.count == 32 and suite.isolated.below_one == 32 - len(big)
    assert f"without   flash_attn_3: skipped: takes another head dim: {len(big)} of 32: " in text_of(run)


def test_rivals_that_ran_out_of_memory_are_told_in_one_line_whatever_was_free() -> None:
    run = rival_run(GRID, {"hopper": 1.0, "sdpa_cudnn": 1.2, "naive": 3.0})
    full = "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 139.80 GiB"
    errors = iter(
        [f"ran out of memory: {full.format(4)}", f"passed its check, then OutOfMemoryError: {full.format(16)}"]
    )
    lost = [str(w) for w in GRID[:2]]
    results = tuple(
        r.with_changes(status="failed", forward=None, error=next(errors))
        if r.implementation == "naive" and r.workload in lost
        else r
        for r in run.results
    )
    assert suite_of(replace(run, results=results)).absent == {"naive: failed: ran out of memory": tuple(lost)}


def test_a_figure_that_some_shapes_lack_says_so() -> None:
    run = rival_run(GRID)
    results = tuple(
        r.with_changes(forward=replace(r.forward, sustained_ms_median=None)) if r.workload == str(GRID[0]) else r
        for r in run.results
    )
    suite = suite_of(replace(run, results=results))
    assert suite.sustained.count == 31 and suite.isolated.count == 32
    assert "(1 shapes have none)" in text_of(replace(run, results=results))
    none = tuple(r.with_changes(forward=replace(r.forward, joules_per_call=None)) for r in run.results)
    assert suite_of(replace(run, results=none)).energy is None


def test_a_suite_over_several_runs_is_one_and_the_newest_run_of_a_shape_counts() -> None:
    first, second = rival_run(GRID[:20]), rival_run(GRID[18:30], {"hopper": 1.0, "sdpa_cudnn": 2.0}, created=LATER)
    suite = suite_of(second, first)
    assert (suite.shapes, len(suite.runs)) == (30, 2) and suite.missing == tuple(map(str, GRID[30:]))
    assert [round(row.ratio, 2) for row in suite.rows] == [1.05] * 18 + [2.0] * 12
    text = text_of(first, second)
    assert "grid, forward: 30 of 32 shapes, 2 runs" in text and "not run   2 of 32: B8," in text
    elsewhere = replace(second, device=replace(second.device, name="NVIDIA H100"))
    found = suites_of(ratios_of([first, elsewhere], "hopper"))
    assert [(s.device, s.shapes) for s in found] == [("NVIDIA H200", 20), ("NVIDIA H100", 12)]


def test_a_newer_run_without_sustained_load_leaves_the_older_one_that_has_it() -> None:
    first, second = rival_run(GRID[:2]), rival_run(GRID[:1], {"hopper": 1.0, "sdpa_cudnn": 2.0}, created=LATER)
    without = tuple(
        r.with_changes(forward=replace(r.forward, sustained_ms_median=None, joules_per_call=None))
        for r in second.results
    )
    before, suite = suite_of(first), suite_of(first, replace(second, results=without))
    assert [round(row.ratio, 2) for row in suite.rows] == [2.0, 1.05]
    assert suite.sustained == before.sustained and suite.energy == before.energy
    assert suite_of(first, second).sustained != before.sustained


@pytest.mark.parametrize(
    ("present", "shown"),
    [
        (GRID, {"grid"}),
        (GRID[:20], {"grid"}),
        (SUITES["fp16"], {"fp16"}),
        (SUITES["masks"], {"masks"}),
        ((*GRID, *SUITES["fp16"]), {"grid", "fp16"}),
        ((*SUITES["decode"], Workload(H=2, L=7, D=64)), {"decode", "other workloads"}),
    ],
)
def test_workloads_of_several_suites_are_told_of_those_that_were_meant(present, shown) -> None:
    found = suites_of(ratios_of([rival_run(list(dict.fromkeys(present)))], "hopper"))
    assert {made.suite for made in found} == shown
    assert not any(made.missing for made in found if made.suite != "grid")


# --- twins ------------------------------------------------------------------------------------------------------------


def test_masks_and_fp16_stand_beside_their_twins() -> None:
    def slow(w: Workload) -> float:
        return 1.3 if w.mask else 1.2 if w.bias_shape == "Bx1xLxS" else 1.1 if w.bias else 1.02 if w.D == 256 else 1.0

    def half(w: Workload) -> float:
        return 1.04 if w.dtype == "fp16" and w.D == 64 else 1.0

    masks = rival_run(SUITES["masks"], {"hopper": slow, "sdpa_cudnn": 1.5})
    fp16 = rival_run(SUITES["fp16"], {"hopper": half}, created=LATER)
    found = {twins.what: twins for twins in twins_of([masks, fp16], "hopper")}
    assert {what: (len(t.rows), round(t.worst, 3), round(t.worst_sustained, 3)) for what, t in found.items()} == {
        "mask=bool:Bx1xLxS": (4, 1.3, 1.3),
        "bias=bf16:Bx1xLxS": (4, 1.2, 1.2),
        "bias=bf16:1xHxLxS": (4, 1.1, 1.1),
        "fp16": (5, 1.04, 1.04),
    }
    assert found["fp16"].geometric_mean == pytest.approx(1.04 ** (2 / 5))
    text = text_of(masks, fp16)
    assert "hopper beside itself (time / its twin's: above 1 it takes longer)" in text
    assert "mask=bool:Bx1xLxS over its twin without, forward, 4 shapes, NVIDIA H200: geometric mean 1.300" in text
    assert "fp16 over its twin in bf16, forward, 5 shapes" in text


def test_a_twin_is_of_the_same_run() -> None:
    masked, plain = Workload.parse("B1,H2,L64,D64,bf16,mask=bool"), Workload.parse("B1,H2,L64,D64,bf16")
    runs = [rival_run([masked]), rival_run([plain], created=LATER)]
    assert twins_of(runs, "hopper") == [] and "beside itself" not in text_of(*runs)
    assert len(twins_of([rival_run([plain, masked])], "hopper")) == 1
    assert twin_of(plain) is None and twin_of(masked) == ("mask=bool:Bx1xLxS", plain)
    both = Workload.parse("B1,H2,L64,D64,fp16,mask=bool,bias=fp16:1x1xLxS")
    assert twin_of(both) == ("mask=bool:Bx1xLxS,bias=fp16:1x1xLxS", Workload.parse("B1,H2,L64,D64,fp16"))


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_no_page(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(RECORDS), "--ratio", "sdpa_flash", "--json"])
    assert done.exit_code == 0 and set(json.loads(done.stdout)) == {"runs", "suites", "twins"}
    assert not RECORDS.with_name("report.html").exists()
    path = tmp_path / "run.jsonl"
    write_run(rival_run(SUITES["fp16"]), path)
    done = CliRunner().invoke(app, ["report", str(path), "--ratio", "hopper"])
    assert done.exit_code == 0 and "fp16, forward: 10 of 10 shapes, 1 run, NVIDIA H200" in done.stdout
    assert '"slower"  0' in done.stdout and "geometric mean 1.050, worst 1.050 against flash_attn_4" in done.stdout
