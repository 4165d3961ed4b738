"""The generator of large traces, the figures in the guide, and that speed and memory do not get lost."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from attnscope.explaining import explain_trace
from attnscope.trace import read_trace

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("trace_speed", ROOT / "benchmarks" / "trace_speed.py")
assert SPEC is not None and SPEC.loader is not None
trace_speed = importlib.util.module_from_spec(SPEC)
sys.modules["trace_speed"] = trace_speed
SPEC.loader.exec_module(trace_speed)
LIMITS = {  # held today: (events, gzipped) -> seconds on two cores, GiB. Asked: 10 s for 1.6 million, 1.5 s for 5 MB
    (13_300, False): (1.5, 6), (1_600_000, False): (10, 3), (1_600_000, True): (10, 3),
    (10_700_000, False): (float("inf"), 6),
}  # fmt: skip


def test_the_generated_trace_is_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace_speed.write_trace(path, 1100)
    assert len(json.loads(path.read_text())["traceEvents"]) == 1101
    trace = read_trace(path)
    assert trace.problems == [] and len(trace.device_events) == 100 and len(trace.ops) == 300
    assert sum(site.calls for site in explain_trace(trace).sites) == 12


def test_the_guide_shows_the_figures() -> None:
    figures = json.loads(trace_speed.FIGURES.read_text())
    assert trace_speed.page(figures) == trace_speed.PAGE.read_text(encoding="utf-8")
    assert [(row["events"], row["packed"]) for row in figures["rows"]] == list(trace_speed.SIZES)


def test_the_figures_keep_the_limits() -> None:
    """Where other work shared the cores, the time says nothing: then what both processes computed, halved, is held."""
    figures = json.loads(trace_speed.FIGURES.read_text())
    for row in figures["rows"]:
        seconds, gib = LIMITS[row["events"], row["packed"]]
        alone = row["load"] <= figures["cores"] / 2
        assert (row["wall_s"] if alone else row["cpu_s"] / figures["cores"]) < seconds and row["peak_gib"] < gib


@pytest.mark.serial
def test_a_trace_of_five_megabytes_and_one_of_forty(tmp_path: Path) -> None:
    """A third of the speed that the figures show, in time of the processors, still passes: machines differ."""
    rows = []
    for events in (13_300, 106_400):
        path = tmp_path / f"{events}.json"
        trace_speed.write_trace(path, events)
        rows.append(trace_speed.measure(path, events))
    small, large = rows
    assert 4.5 < small.size_mb < 5.5 and small.cpu_s < 3
    assert (large.cpu_s - small.cpu_s) / (large.size_mb - small.size_mb) < 3 * 15 / 600
    assert large.peak_gib < 0.25
