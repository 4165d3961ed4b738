"""What is compiled before it is timed: by other processes, in the one that measures; and where seconds are booked."""

from __future__ import annotations

import pytest

from attnscope.device import find_device
from attnscope.implementation import _registered, reference_of, register
from attnscope.jobs import Ask
from attnscope.planning import make_plan
from attnscope.records import Result, read_runs, write_run
from attnscope.spending import Ledger, added, spent_sentence
from attnscope.sweeping import execute
from attnscope.warming import ahead, warm_tasks
from attnscope.worker import InProcess, Worker
from attnscope.workload import Workload

pytestmark = pytest.mark.usefixtures("forked_workers")
TINY = "B1,H2,L32,D16,fp32,causal"
OTHER = "B1,H2,L48,D16,fp32"
SPENT = {"prepare", "first_call", "reference", "check", "kernels"}
MEASURED = {"measure_prepare", "warm_up", "isolated", "sustained", "compare"}


@pytest.fixture(autouse=True)
def clean_registry():
    before = dict(_registered)
    yield
    _registered.clear()
    _registered.update(before)


def tasks_of(*names):
    for name in names:
        register(f"bad_implementations:{name}")
    references = {name: reference_of(name) for name in _registered}
    return [Ask(Workload.parse(text), find_device("cpu"), 0, ("forward",), references) for text in (TINY, OTHER)]


@pytest.mark.slow
def test_warming_prepares_everything_in_processes_of_its_own_before_the_checks(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNSCOPE_TEST_MARKER", str(tmp_path / "prepared"))
    said = []
    names = "bad_implementations:Compiles,bad_implementations:Good,bad_implementations:CrashesWarm"
    plan = make_plan([TINY, OTHER], names, "forward", "cpu", ("measure",), quick=True, warm=2, out=tmp_path / "out")
    run = execute(plan, lambda step: said.append(step.what))
    lines = [line.split(" ") for line in (tmp_path / "prepared").read_text().splitlines()]
    warm = [line for line in lines if line[2] == "1"]
    assert sorted(line[1] for line in warm) == sorted([str(Workload.parse(TINY)), str(Workload.parse(OTHER))])
    assert lines[: len(warm)] == warm, "all of it comes before the first check"
    per_workload = {text: sum(line[1] == text for line in lines[len(warm) :]) for text in run.workloads}
    assert set(per_workload.values()) == {4}, "two implementations, once in the process that checks, once in the other"
    assert not {line[0] for line in warm} & {line[0] for line in lines[len(warm) :]}
    assert {row.status for row in run.results} == {"ok"}, "what crashed while warming is right where it counts"
    warmed = [what for what in said if what.startswith("warm ")]
    assert len(warmed) == 4 and not any("good" in what for what in warmed), "only what a compiler keeps on disk"
    for row in run.results:
        assert set(row.seconds) == SPENT | MEASURED - {"sustained"} | {"prepare_ahead"}
        assert all(seconds >= 0 for seconds in row.seconds.values())
    write_run(run, tmp_path / "run.jsonl")
    assert read_runs(tmp_path / "run.jsonl")[0].results == run.results
    assert spent_sentence(run.results).startswith("rows took ")


def test_only_what_is_kept_on_disk_and_another_process_can_import_is_warmed():
    first, second = tasks_of("Compiles", "Good")
    keeps = {"compiles": True, "good": False}
    assert list(warm_tasks([first, second], keeps)) == [(first, "compiles"), (second, "compiles")]
    many = [Ask(first.workload, first.device, seed, ("forward",), first.references) for seed in range(7)]
    assert [ask.seed for ask, _ in warm_tasks(many, {"compiles": True})] == [0, 5, 1, 6, 2, 3, 4]
    here = Ask(first.workload, first.device, 0, first.directions, {"compiles": None, "good": None})
    assert list(warm_tasks([here], keeps)) == []


@pytest.mark.slow
def test_what_is_prepared_ahead_may_raise_or_crash_and_costs_nothing():
    ask, _ = tasks_of("Good", "Raises", "Crashes")
    worker = Worker(warm_up=("attnscope.jobs:start", "cpu"))
    try:
        with ahead(worker, ask, ["raises", "good"], 60.0) as took:
            assert took == {}, "known once the block is over"
        assert took.keys() == {"raises", "good"}
        with ahead(worker, ask, ["good", "crashes"], 60.0) as took:
            pass
        assert took == {}, "the process died, and says nothing"
        with pytest.raises(KeyboardInterrupt), ahead(worker, ask, ["good"], 60.0):
            raise KeyboardInterrupt
    finally:
        worker.close()


def test_this_very_process_prepares_nothing_ahead():
    with ahead(InProcess(), object(), ["x"], 1.0) as took:
        pass
    assert took == {}


def test_a_ledger_books_what_passes_between_two_beginnings():
    times = iter([1.0, 3.0, 3.0, 4.0, 4.0, 9.0])
    ledger = Ledger(lambda: next(times))
    ledger.begin("a", "check")
    ledger.begin("b", "check")
    ledger.begin("a", "check")
    ledger.end()
    ledger.end()
    ledger.add("b", "graph", 0.5)
    assert ledger.seconds == {"a": {"check": 7.0}, "b": {"check": 1.0, "graph": 0.5}}


def test_seconds_of_rows_add_up_in_one_sentence():
    row = Result(TINY, "a", "skipped", reasons={"forward": ("no",)})
    assert spent_sentence([row]) == ""
    rows = [added(row, {"check": 1.0, "graph": 0.25}), added(added(row, {"check": 2.0}), {"check": 0.5})]
    assert spent_sentence(rows) == "rows took 3.8 s: check 3.5, graph 0.2"
