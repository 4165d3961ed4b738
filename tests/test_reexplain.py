"""The command that explains a run's traces anew: only what the traces say may change."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import factories
import trace_builder as built
from attnscope.records import Finding, Profile, Run, read_runs, run_lines
from trace_builder import TraceBuilder

PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "reexplain.py"
LABEL = "attnscope/naive/forward"


@pytest.fixture(scope="module")
def reexplain():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("reexplain", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reexplain"] = module
    spec.loader.exec_module(module)
    return module


def stale(trace: str | None) -> Profile:
    return Profile(direction="forward", label=LABEL, steps=3, kernels_per_call=99, cpu_ops_per_call=1,
                   gpu_us_per_call=1, cpu_us_per_call=1, self_gpu_us_total=3, self_cpu_us_total=3, spilled_kernels=0,
                   table=(), trace=trace)  # fmt: skip


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two runs in one file: one with a trace of six kernels and a host time of 5 ms, one without."""
    b = TraceBuilder()
    for _ in range(3):
        with b.step(LABEL):
            built.naive(b)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "naive-forward.json").write_bytes(b.bytes())
    old = Finding(id="of-old", sentence="Said by a rule of old.", implementation="naive", direction="forward")
    result = factories.result("naive")
    assert result.forward is not None
    result = result.with_changes(findings=(old,), forward=replace(result.forward, wall_us_median=5000.0))
    runs = [
        replace(factories.blog_run(), results=(result.with_changes(profiles=(stale(trace),)),))
        for trace in ("traces/naive-forward.json", None)
    ]
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(line + b"\n" for run in runs for line in run_lines(run)))
    return path


def unexplained(run: Run) -> Run:
    results = tuple(result.with_changes(profiles=(), kernels=(), findings=()) for result in run.results)
    return replace(run, results=results)


def test_profiles_kernels_and_findings_follow_the_trace(reexplain, recorded, capsys) -> None:  # type: ignore[no-untyped-def]
    before = read_runs(recorded)
    assert reexplain.main([str(recorded)]) == 0
    assert "1 profiles read anew" in capsys.readouterr().out
    after = read_runs(recorded)
    assert [unexplained(run) for run in after] == [unexplained(run) for run in before]
    assert after[1] == before[1]  # it names no trace
    (result,) = after[0].results
    (profile,) = result.profiles
    assert (profile.trace, profile.label, profile.kernels_per_call) == ("traces/naive-forward.json", LABEL, 6)
    found = {finding.id: finding for finding in result.findings}
    assert set(found) == {"launch-bound", "masked-fill-copy", "occupancy-estimator"}
    assert found["launch-bound"].saving_us == pytest.approx(5000 - profile.gpu_us_per_call)
    assert "softmax" in [kernel.role for kernel in result.kernels]
    assert [path.name for path in recorded.parent.iterdir() if path.name.startswith(".")] == []
    assert reexplain.reexplain(recorded) == (1, 0, 0)


def test_a_missing_trace_leaves_the_file_as_it_was(reexplain, recorded, capsys) -> None:  # type: ignore[no-untyped-def]
    (recorded.parent / "traces" / "naive-forward.json").unlink()
    before = recorded.read_bytes()
    assert reexplain.main([str(recorded)]) != 0
    assert "naive-forward.json" in capsys.readouterr().err
    assert recorded.read_bytes() == before
