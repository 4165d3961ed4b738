"""``attnscope tune``: the faster candidate wins, a wrong one never, noise keeps what ships, and what is done is kept.

A stopwatch of our own says how long each candidate takes; all but one test stay in this process.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnscope import implementation as registry
from attnscope.cli import app
from attnscope.device import Device, Environment
from attnscope.errors import RecordError, UnsupportedWorkload, UsageError
from attnscope.implementations.hopper import Hopper
from attnscope.implementations.hopper_cuda import HopperCuda
from attnscope.reporting.tune_text import render_tune
from attnscope.resuming import Budget
from attnscope.tables import Table, table_text
from attnscope.timers import Sample
from attnscope.tunable import Tables, Tunable
from attnscope.tuning import execute_tune, make_tune_plan
from attnscope.tuning_records import Tried, TunedClass, TuneReport, fastest_first, is_faster, measured
from attnscope.workload import Workload
from tunable_implementations import LAST, Choice, Fake

EIGHT = "B1,H1,L9,D8,fp32"


@dataclass
class Stopwatch:
    """Says ``ms`` of what ran last, give or take ``noise``; ``before`` sees each call."""

    ms: dict[int, float]
    noise: float = 0.01  # a call that is long and quiet leaves early
    before: Callable[[Choice], None] = lambda choice: None
    now: float = 0.0
    order: list[int] = field(default_factory=list)
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def now_s(self) -> float:
        return self.now

    def synchronize(self) -> None:
        pass

    def time_call(self, call: Callable[[], object], spin_us: float, **_: Any) -> Sample:
        call()
        (choice,) = LAST
        self.before(choice)
        self.order.append(choice.number)
        ms = self.ms[choice.number] * math.exp(self.chance.gauss(0, self.noise))
        self.now += ms / 1e3
        return Sample(ms)


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Tune ``Fake`` in this process with a stopwatch; the user's cache and what ships are folders of the test's own."""
    monkeypatch.setenv("ATTNSCOPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "reference_of", lambda name: None)
    monkeypatch.setattr("attnscope.measuring.gc.collect", lambda: 0)  # a real one takes longer than all the rest
    registry.register(Fake())

    def run(*workloads: str, clock: Stopwatch | None = None, **options: Any) -> TuneReport:
        monkeypatch.setattr("attnscope.measuring.make_timer", lambda device: clock or Stopwatch({0: 3, 1: 2, 2: 4}))
        return execute_tune(make_tune_plan("fake", workloads, device="cpu", **{"quick": True} | options))

    return run


def offer(monkeypatch: pytest.MonkeyPatch, *choices: Choice, folder: Path | None = None) -> None:
    monkeypatch.setattr(Fake, "offered", choices)
    monkeypatch.setattr(Fake, "tables", Tables("fake", Choice.from_dict, folder))


def chosen(report: TuneReport) -> dict[str, Any]:
    return {one.name: one.entry.get("number") for one in report.classes}


def table(report: TuneReport) -> Table[Choice]:
    found = Fake.tables.load(Path(report.table or "").expanduser(), report.device)
    assert found is not None
    return found


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_faster_candidate_wins_and_prepare_takes_it(tune: Any) -> None:
    report = tune()
    assert chosen(report) == {"D8": 1, "D16": 1} and not report.has_faults
    best = report.classes[0].tried[1]
    assert best.ratio == pytest.approx(2 / 3, rel=0.01) and best.ratio_low < best.ratio < best.ratio_high
    assert table(report).classes == {"D8": Choice(1), "D16": Choice(1)}
    prepared = Fake().prepare(Workload.parse(EIGHT), report.device)
    assert prepared.choice == Choice(1)


def test_the_table_says_what_the_choice_rests_on(tune: Any) -> None:
    report = tune(EIGHT)
    facts = table(report).measured["D8"]
    assert facts["workloads"] == [EIGHT] and facts["candidates"] == 3 and not facts["is_shipped_choice"]
    assert facts["ratio"] == pytest.approx(report.classes[0].tried[1].ratio, abs=1e-5)
    assert facts["ratio_low"] < facts["ratio"] < facts["ratio_high"] and facts["noise_fraction"] > 0
    assert facts["torch"] == report.environment.packages["torch"] and facts["created"] == report.created
    assert facts["attnscope"] and "triton" not in facts and facts["quick"]


def test_candidates_are_timed_in_turn(tune: Any) -> None:
    clock = Stopwatch({0: 3, 1: 2, 2: 4})
    tune(EIGHT, clock=clock, quick=False)
    together = 1 + max(place for place, number in enumerate(clock.order) if number == 2)
    rounds = [clock.order[start : start + 3] for start in range(0, together - 2, 3)]
    assert len(rounds) > 3 and all(sorted(one) == [0, 1, 2] for one in rounds)
    assert len(set(map(tuple, rounds))) > 1
    assert set(clock.order[together + 3 :]) == {0, 1}, "the fastest once more, beside what ships"


@pytest.mark.parametrize("fault", ["wrong", "raises", "late"])
def test_a_candidate_at_fault_is_told_and_never_chosen(fault: str, tune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Choice(0), Choice(1, fault), Choice(2))
    report = tune(EIGHT, clock=Stopwatch({0: 3, 1: 1, 2: 2}))
    assert chosen(report) == {"D8": 2} and report.has_faults
    bad = report.classes[0].tried[1]
    assert bad.status == ("wrong" if fault == "wrong" else "failed") and not bad.time_ms and bad.ratio is None
    assert {"wrong": "times its budget", "raises": "does not compile", "late": "out of breath"}[fault] in bad.message
    assert f"{bad.status}, never chosen: number 1, fault {fault}" in render_tune(report)


def test_a_shipped_choice_that_is_wrong_is_replaced(tune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Choice(0, "wrong"), Choice(1), Choice(2))
    report = tune(EIGHT)
    assert chosen(report) == {"D8": 1} and report.classes[0].tried[1].ratio is None
    assert "ratio" not in table(report).measured["D8"]


def test_where_nothing_is_right_nothing_is_chosen(tune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Choice(0, "wrong"), Choice(1, "raises"))
    report = tune(EIGHT)
    assert report.classes[0].chosen is None and report.table is None and "none" in render_tune(report)
    assert not Fake.tables.user_path(report.device).exists()


@pytest.mark.parametrize(("ms", "noise"), [({0: 3, 1: 2.99, 2: 4}, 0.0001), ({0: 3, 1: 2.9, 2: 4}, 0.3)])
def test_within_noise_or_a_hundredth_the_shipped_choice_stays(ms: dict[int, float], noise: float, tune: Any) -> None:
    report = tune(EIGHT, clock=Stopwatch(ms, noise))
    assert chosen(report) == {"D8": 0} and not report.classes[0].is_changed
    assert table(report).classes == {} and table(report).measured["D8"]["is_shipped_choice"]
    assert "as shipped" in render_tune(report)


def test_a_candidate_that_is_fast_by_chance_is_found_out(tune: Any) -> None:
    clock = Stopwatch({0: 3, 1: 2, 2: 4})

    def lucky_at_first(choice: Choice) -> None:
        clock.ms[1] = 2 if clock.order.count(2) + clock.order.count(1) < 16 else 3.001

    clock.before = lucky_at_first
    report = tune(EIGHT, clock=clock)
    assert chosen(report) == {"D8": 0} and set(clock.order[-16:]) == {0, 1}
    assert report.classes[0].tried[1].ratio == pytest.approx(1, rel=0.01)


def test_a_class_that_is_as_shipped_again_leaves_the_users_table(tune: Any) -> None:
    tune()
    report = tune(EIGHT, clock=Stopwatch({0: 1, 1: 2, 2: 4}))
    assert table(report).classes == {"D16": Choice(1)} and set(table(report).measured) == {"D8", "D16"}


def test_a_class_is_judged_by_all_of_its_workloads(tune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Stopwatch({0: 3, 1: 2, 2: 4})

    def slower_when_long(choice: Choice) -> None:
        clock.ms = {0: 3, 1: 2, 2: 2.5} if clock.order.count(0) < 9 else {0: 3, 1: 6, 2: 2.5}

    clock.before = slower_when_long
    report = tune(EIGHT, "B1,H1,L30,D8,fp32", clock=clock)
    assert len(report.classes) == 1 and chosen(report) == {"D8": 2}
    assert set(report.classes[0].tried[2].time_ms) == {EIGHT, "B1,H1,L30,D8,fp32"}


def test_the_users_own_entry_is_tried_too(tune: Any) -> None:
    report = tune(EIGHT, clock=Stopwatch({0: 3, 1: 4, 2: 4}))
    path = Fake.tables.user_path(report.device)
    path.write_text(table_text(Table("fake", report.device.name, {"D8": Choice(7)})))
    assert chosen(tune(EIGHT, clock=Stopwatch({0: 3, 1: 2, 2: 4, 7: 1}))) == {"D8": 7}


def rounds(ms: float, count: int = 9) -> dict[str, dict[int, float]]:
    return {"w": {turn: ms * (1 + turn % 3 / 1000) for turn in range(count)}}


def test_one_round_is_no_evidence() -> None:
    shipped = measured("shipped", {}, rounds(2, 1), rounds(2, 1))
    once, often = measured("once", {}, rounds(1, 1), rounds(2, 1)), measured("often", {}, rounds(1), rounds(2))
    assert fastest_first([shipped, once]) == [1, 0]
    assert (is_faster(once), is_faster(often), is_faster(shipped)) == (False, True, False)


def test_a_record_of_a_wrong_candidate_holds_no_time() -> None:
    with pytest.raises(RecordError, match="a configuration that is wrong has no time"):
        Tried("x", {}, "wrong", time_ms={"w": 1.0})
    with pytest.raises(RecordError, match="status must be one of measured, wrong, failed"):
        Tried("x", {}, "good")


# --- what is written, and when ----------------------------------------------------------------------------------------


def test_an_interrupted_run_keeps_the_classes_that_are_finished(tune: Any) -> None:
    clock = Stopwatch({0: 3, 1: 2, 2: 4})

    def interrupt(choice: Choice) -> None:
        if len(clock.order) > 50:
            raise KeyboardInterrupt

    clock.before = interrupt
    report = tune(clock=clock)
    assert report.interrupted and report.left == ("D16",) and [one.name for one in report.classes] == ["D8"]
    assert table(report).classes == {"D8": Choice(1)}
    assert "interrupted: what was finished is above, and kept" in render_tune(report)
    rest = tune(missing=True)
    assert [one.name for one in rest.classes] == ["D16"] and set(table(rest).classes) == {"D8", "D16"}
    assert tune(missing=True).classes == ()


def test_a_budget_begins_no_class_that_may_not_end(tune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter((0.0, 0.0, 60.0))
    monkeypatch.setattr("attnscope.tuning.Budget", lambda seconds: Budget(seconds, now_s=lambda: next(ticks)))
    report = tune(budget_s=100)
    assert [one.name for one in report.classes] == ["D8"] and report.left == ("D16",) and not report.interrupted
    assert "left to do: 1 classes, D16; --missing goes on with them" in render_tune(report)


def test_a_dry_run_writes_nothing(tune: Any, tmp_path: Path) -> None:
    report = tune(dry_run=True)
    assert chosen(report) == {"D8": 1, "D16": 1} and report.table is None
    assert "nothing was written" in render_tune(report) and not (tmp_path / "cache").exists()


def test_the_record_names_no_home_folder(tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    report = tune(EIGHT)
    assert (report.table or "").startswith("~/cache/tuned/fake/") and table(report).classes == {"D8": Choice(1)}


def test_a_table_that_is_none_is_refused_before_any_work(tune: Any) -> None:
    path = Fake.tables.user_path(tune(EIGHT).device)
    path.write_text("format = 3")
    with pytest.raises(RecordError, match="must be of format 1, got 3"):
        tune(EIGHT, clock=Stopwatch({}))


def test_the_table_that_ships_can_be_written(tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Choice(0), Choice(1), folder=tmp_path)
    report = tune(shipped=True, quick=False, clock=Stopwatch({0: 3, 1: 2}))
    assert report.table == str(tmp_path / "configurations.toml")
    assert table(report).classes == {"D8": Choice(1), "D16": Choice(1)}
    assert Fake.tables.shipped("D8", report.device) == Choice(1)
    again = tune(EIGHT, shipped=True, quick=False, clock=Stopwatch({0: 2, 1: 2}))
    assert chosen(again) == {"D8": 1} and table(again).classes["D8"] == Choice(1)
    assert not Fake.tables.user_path(report.device).exists()


def test_what_ships_for_another_card_is_left_alone(tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configurations.toml").write_text(table_text(Table("fake", "another card", {"D8": Choice(2)})))
    offer(monkeypatch, Choice(0), Choice(1), folder=tmp_path)
    report = tune(EIGHT, shipped=True, quick=False, clock=Stopwatch({0: 2, 1: 3, 2: 4}))
    assert [one.label for one in report.classes[0].tried] == ["number 2", "number 0", "number 1"]
    assert (report.table or "").startswith(str(tmp_path / "configurations-")) and table(report).classes == {
        "D8": Choice(0)
    }


# --- what is refused, and the command ---------------------------------------------------------------------------------


def test_what_is_not_tuned_is_named_with_its_reason(tune: Any) -> None:
    report = tune(EIGHT, "B1,H1,L1,D8,fp32", "B1,H1,L9,D8,fp64")
    assert report.not_tuned == {
        "B1,H1,L1,D8,fp32": "a single row has nothing to choose",
        "B1,H1,L9,D8,fp64": "takes bf16 or fp16 or fp32, not fp64",
    }
    assert "not tuned: B1,H1,L1,D8,fp32: a single row has nothing to choose" in render_tune(report)
    with pytest.raises(UnsupportedWorkload, match="fake cannot run this workload: a single row"):
        tune("B1,H1,L1,D8,fp32")


def test_what_cannot_be_tuned_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"naive has no configurations .*\nhint: attnscope tune takes hopper, hopper_cuda"
    ):
        make_tune_plan("naive")
    with pytest.raises(UsageError, match="tune takes one implementation, got hopper, hopper_cuda"):
        make_tune_plan("hopper,hopper_cuda")
    with pytest.raises(UsageError, match="--shipped must not rest on few samples"):
        make_tune_plan("hopper", shipped=True, quick=True)
    with pytest.raises(UsageError, match="--workers must be a whole number from 1 on, got 0"):
        make_tune_plan("hopper", workers=0)
    with pytest.raises(UsageError, match="--budget must be above 0"):
        make_tune_plan("hopper", budget_s=0)


@pytest.mark.parametrize("kind", [Hopper, HopperCuda])
def test_our_own_are_tunable_and_name_a_workload_of_each_class(kind: Any) -> None:
    own, card = kind(), Device("cuda", "NVIDIA H200", capability=(9, 0))
    assert isinstance(own, Tunable)
    workloads = own.tuning_workloads()
    assert len({own.tuning_class(workload) for workload in workloads}) == len(workloads)
    for workload in workloads[:9]:
        found = own.candidates(workload, card)
        assert len(found) > 1
        assert all(own.tables.read(one.as_dict()) == one for one in found)


def test_the_command_fits_80_columns(tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 30
    offer(monkeypatch, Choice(0), Choice(1), Choice(2, "wrong"), Choice(3, f"{long} {long} {long}"))
    monkeypatch.setattr("attnscope.measuring.make_timer", lambda device: Stopwatch({0: 3, 1: 2, 2: 4, 3: 1}, 0.0001))
    command = ["tune", "fake", EIGHT, "B1,H1,L1,D8,fp32", "--quick", "--device", "cpu", "--out"]
    command.append(str(tmp_path / "record.json"))
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1, done.output
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 or line.startswith("table: ") for line in lines), done.stdout
    assert lines[1].split() == ["D8", "3", "of", "4", "0.333", "±", lines[1].split()[6], "another"]
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["classes"][0]["tried"][3]["ratio"] == pytest.approx(1 / 3, rel=0.01)
    assert record["device"]["kind"] == "cpu" and record["environment"]["packages"]["torch"]
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, UsageError) and "must be a new file" in str(again.exception)


def test_a_report_without_faults_ends_well(tune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscope.measuring.make_timer", lambda device: Stopwatch({0: 3, 1: 2, 2: 4}))
    done = CliRunner().invoke(app, ["tune", "fake", EIGHT, "--device", "cpu", "--quick", "--dry-run", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["classes"][0]["chosen"] == 1


def test_facts_leave_out_what_is_missing() -> None:
    found = TunedClass("D8", ("w",), (measured("a", {}, rounds(1), None),), 0, {}, 1.0)
    facts = found.facts(Environment("3.12", "Linux", {"torch": "2"}), "now")
    assert "ratio" not in facts and "driver" not in facts and facts["torch"] == "2" and None not in facts.values()


@pytest.mark.long
def test_a_candidate_that_crashes_costs_itself_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNSCOPE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(registry, "_registered", {})
    report = execute_tune(
        make_tune_plan("tunable_implementations:Crashing", [EIGHT], device="cpu", workers=2, quick=True, dry_run=True)
    )
    assert [one.status for one in report.classes[0].tried] == ["measured", "failed", "wrong"]
    assert "SIGSEGV" in report.classes[0].tried[1].message
    assert report.classes[0].chosen == 0
