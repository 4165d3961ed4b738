"""The command that lets predicted savings come true: records, table, failures; its clocks run on a GPU only."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import trace_builder as tb
from attnscope.device import Device
from attnscope.explaining.trace_rules import FINDING_IDS
from attnscope.timers import Sample
from trace_builder import TraceBuilder

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
H200 = Device("cuda", "NVIDIA H200")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def savings() -> ModuleType:
    return load("savings")


class FakeTimer:
    """Calls return their own time in ms; the first sample of each call was not held by the spin."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def synchronize(self) -> None:
        pass

    def host_us(self, call: Callable[[], float], repeats: int) -> float:
        return 30.0

    def time_call(self, call: Callable[[], float], spin_us: float, *, evict: bool) -> Sample:
        assert spin_us > 30 and not evict
        held = id(call) in self.seen
        self.seen.add(id(call))
        return Sample(call() if held else 99.0, held)


def scenario(savings: ModuleType, name: str = "masked-fill-copy", **more: Any) -> Any:
    calls = (lambda: 1.064, lambda: 0.938)
    one = next(s for s in savings.SCENARIOS if s.name == name)
    return replace(one, **({"make": lambda device: calls, "steps": 3} | more))


def naive_trace(steps: int = 3) -> bytes:
    b = TraceBuilder()
    for _ in range(steps):
        tb.naive(b)
    return b.bytes()


def test_a_prediction_is_the_findings_saving_for_one_call(savings: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savings, "record", lambda call, device, **more: naive_trace(more["steps"]))
    monkeypatch.setattr(savings, "SECONDS", 0.0)
    done = savings.run_scenario(scenario(savings), H200, FakeTimer())
    assert (done.status, done.predicted_us) == ("measured", pytest.approx(126))
    assert (done.before_us, done.after_us) == (pytest.approx(1064), pytest.approx(938))  # what was not held is left out
    assert done.ratio == pytest.approx(1) and done.came_true
    assert "unfused-attention" in done.others and done.rounds == 10
    missing = savings.run_scenario(replace(scenario(savings), finding="tf32-off"), H200, FakeTimer())
    assert missing.predicted_us is None and missing.saved_us == pytest.approx(126) and not missing.came_true


def test_a_scenario_that_fails_loses_nobody(
    savings: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(device: str) -> Any:
        raise RuntimeError("No available kernel.\nsecond line")

    monkeypatch.setattr(savings, "record", lambda call, device, **more: naive_trace(more["steps"]))
    monkeypatch.setattr(savings, "make_timer", lambda device: FakeTimer())
    monkeypatch.setattr(savings, "SECONDS", 0.0)
    chosen = [scenario(savings), scenario(savings, "tf32", make=broken), scenario(savings, "unfused")]
    done = savings.run_all(chosen, replace(H200, kind="cpu"), tmp_path)
    assert [one.status for one in done] == ["measured", "failed", "measured"]
    assert "RuntimeError: No available kernel." in capsys.readouterr().out
    path = tmp_path / "nvidia-h200.jsonl"
    assert savings.read_savings(path) == savings.merged([], done)
    assert len(path.read_text().splitlines()) == 3 and json.loads(path.read_text().splitlines()[0])["finding"]
    again = savings.run_all([scenario(savings, "tf32")], replace(H200, kind="cpu"), tmp_path)
    kept = savings.read_savings(path)
    assert again[0] in kept and len(kept) == 3  # only its own record was replaced


def test_a_remedy_that_computes_something_else_is_no_remedy(
    savings: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(savings, "record", lambda call, device, **more: naive_trace(more["steps"]))
    ones = torch.ones(8, dtype=torch.bfloat16)
    for calls in ((lambda: ones, lambda: 2 * ones), (lambda: (ones, ones), lambda: (ones, -ones))):
        done = savings.run_scenario(scenario(savings, make=lambda device, c=calls: c), H200, FakeTimer())
        assert done.status == "failed" and "computes something else" in done.error
    assert savings.difference(ones, 1.004 * ones) < 0.01 and savings.difference(None, ones) == 0.0


def test_the_table_counts_what_came_true(savings: ModuleType) -> None:
    base = savings.Saving("unfused", "unfused-attention", "x → y", "measured", "NVIDIA H200", "gpu", "2026", "2.11.0",
                          "9.19.0", 800.0, 1000.0, 100.0)  # fmt: skip
    wrong = replace(base, scenario="tf32", finding="tf32-off", predicted_us=100.0, after_us=960.0)
    slower = replace(base, scenario="casts", finding="dtype-casts", after_us=1100.0)
    failed = replace(base, scenario="dropout", status="failed", predicted_us=None)
    table = savings.make_table([base, wrong, slower, failed], "results/a.jsonl")
    assert "(record `results/a.jsonl`, 2026)" in table
    assert savings.recorded_on([base, replace(wrong, created="2027-02-03T04:05")]) == "2026 to 2027-02-03"
    assert "1 of 3 predictions lie within 25 %" in table and "torch 2.11.0, cuDNN 9.19.0" in table
    link = "[`unfused-attention`](../reference/findings.md#unfused-attention)"
    assert f"| {link} | x → y | 1.00 ms | 100 µs | 800 µs |" in table
    assert "0.89 |" in table and "2.50 |" in table and "Without a prediction: dropout (failed)." in table
    assert savings.make_table([failed], "") == savings.make_table([], "") == savings.NOTHING_YET


def test_the_guide_holds_what_the_records_say(savings: ModuleType, tmp_path: Path) -> None:
    assert not savings.update_page(savings.ROOT, check=True), "run python benchmarks/savings.py --table"
    page = tmp_path / savings.PAGE
    page.parent.mkdir(parents=True)
    page.write_text("a\n<!-- generated: savings -->\nold\n<!-- end generated -->\nb\n")
    assert savings.main(["--table", "--check"], tmp_path) == 1 and "old" in page.read_text()
    assert savings.main(["--table"], tmp_path) == 0
    assert page.read_text() == f"a\n<!-- generated: savings -->\n{savings.NOTHING_YET}<!-- end generated -->\nb\n"
    assert savings.main(["--table", "--check"], tmp_path) == 0


def test_scenarios_are_named_once_and_show_findings_that_there_are(
    savings: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [one.name for one in savings.SCENARIOS]
    assert len(set(names)) == len(names) >= 12
    assert {one.finding for one in savings.SCENARIOS} <= set(FINDING_IDS)
    assert len({one.finding for one in savings.SCENARIOS}) >= 12
    assert savings.main(["--list"]) == 0 and all(name in capsys.readouterr().out for name in names[:1])
    assert [one.name for one in savings.choose("tf32,casts", "cuda")] == ["tf32", "casts"]
    assert all(one.cpu for one in savings.choose(None, "cpu"))
    assert savings.main(["--device", "cpu", "--only", "tf33", "--out", str(tmp_path)]) == 2
    assert "tf32" in capsys.readouterr().err
    assert savings.main(["--device", "cpu", "--only", "tf32", "--out", str(tmp_path)]) == 2
    assert savings.main(["--device", "cpu"]) == 2 and "--out" in capsys.readouterr().err


@pytest.mark.slow
def test_one_scenario_on_a_cpu(savings: ModuleType, tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--only", "mask-rebuilt,grouped-heads", "--out", str(tmp_path)]
    assert savings.main(arguments) == 0
    (path,) = tmp_path.glob("*.jsonl")
    assert [one.status for one in savings.read_savings(path)] == ["measured", "measured"]


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_every_scenario_runs_on_a_gpu(savings: ModuleType, tmp_path: Path) -> None:
    savings.main(["--device", "cuda", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.jsonl")
    done = savings.read_savings(path)
    assert not [(one.scenario, one.error) for one in done if one.status == "failed"]
    measured = [one for one in done if one.status == "measured"]
    assert len(measured) >= 12
