"""A run in several commands: what is left out, what must be alike, when no further workload begins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnscope.errors import UsageError
from attnscope.planning import left_over, make_plan
from attnscope.records import Run, read_runs
from attnscope.resuming import Budget, refuse_unlike, remaining
from attnscope.sweeping import execute, save
from attnscope.worker import InProcess
from attnscope.workload import Workload
from factories import blog_run, skipped

A, B = Workload.parse("B1,H1,L8,D8,fp32"), Workload.parse("B1,H1,L16,D8,fp32")


def ran(*rows: tuple[Workload, str], interrupted: bool = False) -> Run:
    results = tuple(skipped(name, workload=str(workload)) for workload, name in rows)
    return replace(blog_run(), results=results, interrupted=interrupted)


def test_a_workload_is_done_where_every_implementation_has_a_row():
    run = ran((A, "naive"), (A, "sdpa_math"), (B, "naive"))
    assert remaining((A, B), ("naive", "sdpa_math"), [run]) == (B,)
    assert remaining((A, B), ("naive",), [run]) == ()
    assert remaining((A, B), ("naive",), []) == (A, B)


def test_the_workload_at_which_a_run_was_interrupted_is_not_done():
    assert remaining((A, B), ("naive",), [ran((A, "naive"), (B, "naive"), interrupted=True)]) == (B,)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda run: replace(run, seed=7), "seed"),
        (lambda run: replace(run, quick=not run.quick), "quick"),
        (lambda run: replace(run, device=replace(run.device, name="another")), "device"),
        (lambda run: replace(run, environment=replace(run.environment, git_commit="0" * 40)), "git_commit"),
        (lambda run: replace(run, environment=replace(run.environment, packages={"torch": "1"})), "packages"),
    ],
)
def test_runs_that_differ_are_refused(change, what):
    run = blog_run()
    refuse_unlike([run], run)
    with pytest.raises(UsageError, match=f"--after must name runs like this one, whose .*{what}"):
        refuse_unlike([change(run)], run)


def test_no_workload_begins_that_may_not_end_in_time():
    clock = iter([0.0, 0.0, 10.0, 30.0, 61.0])
    budget = Budget(70.0, now_s=lambda: next(clock))
    assert [budget.allows_another() for _ in range(4)] == [True, True, True, False]  # 61 s and one of 31 s
    endless = Budget(None)
    assert all(endless.allows_another() for _ in range(5))


def test_what_was_finished_outlives_a_run_that_was_killed(monkeypatch, tmp_path):
    monkeypatch.setattr("attnscope.sweeping.Worker", lambda *a, **k: InProcess())
    kept = []

    def rows(sweep, workload, device):
        if workload == B:
            kept.extend(read_runs(tmp_path / "so-far.jsonl"))  # all there is, were it killed now
        return [skipped("sdpa_math", workload=str(workload))]

    monkeypatch.setattr("attnscope.sweeping._Sweep._run_workload", rows)
    plan = make_plan([str(A), str(B)], "sdpa_math", "forward", "cpu", (), quick=True, out=tmp_path)
    run = execute(plan)
    (killed,) = kept
    assert killed.workloads == (str(A),) and not killed.interrupted and left_over(plan, killed) == (B,)
    assert read_runs(save(run, tmp_path)) == [run]
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


def test_two_commands_do_the_work_of_one(monkeypatch):
    texts, names = [str(A), str(B)], "sdpa_math"
    monkeypatch.setattr("attnscope.sweeping.Worker", lambda *a, **k: InProcess())
    rows = lambda sweep, workload, device: [skipped("sdpa_math", workload=str(workload))]  # noqa: E731
    monkeypatch.setattr("attnscope.sweeping._Sweep._run_workload", rows)
    monkeypatch.setattr("attnscope.resuming.MARGIN", 1e9)
    plan = make_plan(texts, names, "forward", "cpu", (), quick=True, budget_s=0.001)
    first = execute(plan)
    assert first.workloads == (str(A),) and not first.interrupted and left_over(plan, first) == (B,)
    again = make_plan(texts, names, "forward", "cpu", (), quick=True, after=(first,))
    second = execute(again)
    assert second.workloads == (str(B),) and left_over(again, second) == ()
    with pytest.raises(UsageError, match="whose seed is 3"):
        execute(make_plan(texts, names, "forward", "cpu", (), quick=True, seed=3, after=(first,)))
