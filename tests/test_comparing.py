"""The sweep with implementations that go wrong in every way: each costs its own row only."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

import attnscope
from attnscope import jobs, planning
from attnscope.device import find_device
from attnscope.errors import UnknownImplementation, UsageError, WorkloadError
from attnscope.implementation import Output, _registered, reference_of, select_named
from attnscope.inputs import make_inputs
from attnscope.planning import Plan, make_plan, prepare_folder
from attnscope.records import read_runs, write_run
from attnscope.sweeping import execute
from attnscope.workload import Workload
from bad_implementations import Good

pytestmark = pytest.mark.usefixtures("forked_workers")
TINY = "B1,H2,L32,D16,fp32,causal"


@contextlib.contextmanager
def registry_kept():
    before = dict(_registered)
    yield
    _registered.clear()
    _registered.update(before)


@pytest.fixture(autouse=True)
def clean_registry():
    with registry_kept():
        yield


def bad(*names):
    return ",".join(f"bad_implementations:{name}" for name in names)


def sweep(*names, stages=(), **options):
    plan = make_plan([TINY], bad(*names), options.pop("mode", "both"), "cpu", stages, quick=True, **options)
    return {row.implementation: row for row in execute(plan).results}


def test_a_good_one_is_ok_and_a_wrong_one_has_no_time():
    rows = sweep("Good", "Wrong", stages=("measure",))
    assert rows["good"].status == "ok"
    assert rows["good"].forward.time_ms_median > 0
    assert rows["good"].backward.time_ms_median > 0
    assert rows["wrong"].status == "check_failed"
    assert rows["wrong"].forward is None
    assert not rows["wrong"].check.passed


@pytest.mark.parametrize("ours", [True, False])
def test_a_contestant_knows_whether_it_is_ours(ours, monkeypatch, cpu):
    good = Good()
    good.sheet = dataclasses.replace(Good.sheet, ours=ours)
    monkeypatch.setattr(jobs, "find_asked", lambda ask, name: good)
    monkeypatch.setattr(jobs, "prepared_for", lambda ask, name: good.prepare(None, cpu))
    workload = Workload.parse(TINY)
    made = jobs._contestant(
        SimpleNamespace(workload=workload), "good", "forward", make_inputs(workload, cpu), None, None
    )
    assert made.ours == ours and made.compute == "fp32"


CULPRITS = {
    "raises": "RuntimeError: no kernel for this moon phase",
    "crashes": "killed by SIGSEGV",
    "out_of_memory": "emory",
    "killed_for_memory": "out of memory, most likely",
    "impostor": "not what it claims",
    "hangs": "limit of 8 s",
}


@pytest.fixture(scope="module")
def among_culprits():
    """One sweep through all of them, good ones between and after."""
    names = ("Good", "Raises", "Crashes", "OutOfMemory", "KilledForMemory", "Impostor", "Hangs", "Also")
    with registry_kept():
        return sweep(*names, time_limit_s=8.0, mode="forward")


@pytest.mark.slow
@pytest.mark.parametrize("name", CULPRITS)
def test_a_culprit_costs_its_own_row(among_culprits, name):
    assert among_culprits[name].status == "failed"
    assert CULPRITS[name] in among_culprits[name].error


@pytest.mark.slow
def test_the_rows_beside_culprits_are_whole(among_culprits):
    assert among_culprits["good"].status == among_culprits["also_good"].status == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CrashesLater", "RaisesLater"])
def test_rivals_are_measured_again_without_the_one_that_fails_in_measuring(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNSCOPE_TEST_MARKER", str(tmp_path / "marker"))
    rows = sweep("Good", name, "Also", stages=("measure",), mode="forward")
    culprit = next(row for key, row in rows.items() if key.endswith("_later"))
    assert culprit.status == "failed"
    assert "passed its check, then failed in measuring forward" in culprit.error
    assert culprit.forward is None
    assert rows["good"].forward is not None
    assert rows["also_good"].forward is not None


@pytest.mark.slow
def test_reasons_that_raise_are_reasons():
    row = sweep("RudeReasons")["rude_reasons"]
    assert row.status == "skipped"
    assert "KeyError" in row.reasons["forward"][0]


@pytest.mark.slow
def test_what_takes_long_to_prepare_runs_where_it_is_named(tmp_path):
    """``all`` leaves FlexAttention out on a CPU, where it compiles for tens of seconds, and says how to run it."""
    for named in (frozenset(), frozenset({"flex"})):
        ask = jobs.Ask(Workload.parse(TINY), find_device("cpu"), 0, ("forward",), {"flex": reference_of("flex")}, named)
        reasons = jobs.survey(ask, report=print)["flex"]["forward"]
        assert any("--implementations flex" in reason for reason in reasons) == (not named)
    assert select_named("all,flex")[1] == {"flex"} and not select_named("all")[1]
    assert make_plan([TINY], "flex,naive", "forward", "cpu", (), out=tmp_path / "out").named == {"flex", "naive"}


@pytest.mark.slow
def test_a_broken_install_is_one_row_with_the_cause_and_a_remark_is_on_record(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins" / "broken"))
    rows = sweep("Broken", "Remarks", stages=("measure",), mode="forward")
    assert rows["broken"].status == "failed"
    first = rows["broken"].error.splitlines()[0]
    assert first.endswith("does not import: ImportError: libcudart.so.12: cannot open shared object file"), first
    assert rows["remarks"].status == "ok" and rows["remarks"].forward.notes[-1] == "the moon was full"


def test_one_direction_alone_still_runs():
    row = sweep("ForwardOnly", stages=("measure",))["forward_only"]
    assert row.status == "ok"
    assert row.forward is not None
    assert row.backward is None
    assert row.reasons == {"backward": ("has no backward",)}


def test_an_object_no_other_process_can_import_runs_here_and_says_so():
    from bad_implementations import Good

    class Local(Good):
        name = "local"

    attnscope.register(Local())
    run = attnscope.check(TINY, implementations="local", device="cpu", quick=True)
    assert run.results[0].status == "ok"
    assert "own process" in run.results[0].note


@pytest.mark.slow
def test_register_of_an_outside_implementation_by_object_uses_a_child():
    from bad_implementations import Good

    attnscope.register(Good())
    run = attnscope.check(TINY, implementations="good", device="cpu", quick=True)
    assert run.results[0].status == "ok"
    assert run.results[0].note is None


@pytest.mark.slow
def test_ctrl_c_keeps_finished_rows():
    def watcher(step):
        if step.what == "check also_good":
            raise KeyboardInterrupt

    run = execute(
        make_plan([TINY, "B1,H1,L16,D8,fp32"], bad("Good", "Also"), "forward", "cpu", (), quick=True), watcher
    )
    assert run.interrupted
    assert [row.implementation for row in run.results] == ["good"]


def test_ctrl_c_before_anything_ran_is_just_that():
    def watcher(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(make_plan([TINY], bad("Good"), "forward", "cpu", (), quick=True), watcher)


def test_traces_and_their_paths(tmp_path):
    plan = make_plan([TINY], bad("Good"), "both", "cpu", ("profile",), out=tmp_path / "out", quick=True)
    run = execute(plan)
    (row,) = run.results
    assert {profile.direction for profile in row.profiles} == {"forward", "backward"}
    for profile in row.profiles:
        assert (tmp_path / "out" / profile.trace).exists()
    assert row.kernels
    write_run(run, tmp_path / "out" / "run.jsonl")
    assert read_runs(tmp_path / "out" / "run.jsonl") == [run]


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_is_a_note(tmp_path):
    out = tmp_path / "out"
    plan = make_plan([TINY], bad("Good"), "forward", "cpu", ("profile",), out=out, quick=True)
    (out / "traces").write_text("a file where a folder should be")
    (row,) = execute(plan).results
    assert row.status == "ok"
    assert "could not be profiled" in row.note


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    (tmp_path / "run.jsonl").touch()
    with pytest.raises(UsageError, match="never overwritten"):
        prepare_folder(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--out must be a folder"):
        prepare_folder(tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ((["nonsense"], "all", "both", "cpu", ()), WorkloadError, "unknown suite"),
        (([TINY], "nave", "both", "cpu", ()), UnknownImplementation, "did you mean"),
        (([TINY], "all", "sideways", "cpu", ()), UsageError, "mode must be"),
        (([TINY], "all", "both", "tpu", ()), UsageError, "device must be"),
        (([TINY], "no_such_module:Thing", "both", "cpu", ()), UsageError, "cannot be loaded"),
    ],
)
def test_bad_arguments_are_sentences(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        make_plan(*arguments)


def test_unknown_option_of_the_python_api():
    with pytest.raises(UsageError, match="unknown option profil"):
        attnscope.check(TINY, profil=True)


def test_too_little_memory_is_a_sentence_not_a_row():
    huge = Workload.parse("B1024,H128,L65536,D128,fp32")
    with pytest.raises(UsageError, match=r"needs .* has .* free"):
        execute(make_plan([huge], bad("Good"), "forward", "cpu", (), quick=True))


@pytest.mark.slow
def test_a_workload_too_large_among_others_costs_its_own_rows_only():
    plan = make_plan([TINY, "B1024,H128,L65536,D128,fp32", "B1,H1,L16,D8,fp32"], bad("Good"), "forward", "cpu", ())
    statuses = [row.status for row in execute(plan).results]
    assert statuses == ["ok", "skipped", "ok"]


def test_score_matrices_beyond_memory_are_a_reason(monkeypatch):
    from bad_implementations import SHEET, Good

    class Greedy(Good):
        name = "greedy"
        sheet = dataclasses.replace(SHEET, materialises_scores=True)

    monkeypatch.setattr(jobs, "available_memory_bytes", lambda device: 1000)
    attnscope.register(Greedy())
    run = attnscope.check(TINY, implementations="greedy", device="cpu", mode="forward")
    assert run.results[0].status == "skipped"
    assert "score matrices would need" in run.results[0].reasons["forward"][0]


def test_defaults_follow_the_device():
    plan = Plan((), ("good",))
    assert plan.workloads == ()
    assert planning.CPU_DEFAULT == ("blog-small", "gpt2-small")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"active": 0}, "active must be a whole number from 1"),
        ({"seed": 2**64}, "seed must be a whole number from 0"),
        ({"seed": -1}, "seed must be"),
        ({"time_limit_s": -1.0}, "time_limit_s must be a number from"),
        ({"sustained_s": float("nan")}, "sustained_s must be a number from 0"),
    ],
)
def test_settings_out_of_range_are_sentences(settings, sentence):
    with pytest.raises(UsageError, match=sentence):
        attnscope.compare(TINY, device="cpu", **settings)


@pytest.mark.slow
def test_the_python_api_writes_what_the_command_line_writes(tmp_path):
    options = {"implementations": bad("Good"), "device": "cpu", "mode": "forward", "quick": True}
    run = attnscope.compare(TINY, out=tmp_path / "out", active=2, **options)
    assert read_runs(tmp_path / "out" / "run.jsonl") == [run]
    assert (tmp_path / "out" / "report.html").exists()
    assert run.quick and run.results[0].profiles[0].steps == 2
    assert run.results[0].forward.sustained_ms_median is None, "a quick run has no sustained blocks"


@pytest.mark.slow
def test_ctrl_c_while_backward_is_measured_keeps_the_forward_times():
    def watcher(step):
        if "backward" in step.what and "good" in step.what:
            raise KeyboardInterrupt

    run = execute(make_plan([TINY], bad("Good"), "both", "cpu", ("measure",), quick=True), watcher)
    assert run.interrupted
    assert run.results[0].forward is not None
    assert run.results[0].backward is None


@pytest.mark.slow
def test_what_one_sets_for_all_of_torch_does_not_fall_on_the_next():
    rows = sweep("LeavesItsMark", "Good", "Surrogate", mode="both")
    assert rows["leaves_its_mark"].status == rows["good"].status == "ok"
    assert "is no text" in rows["surrogate"].error


@pytest.mark.slow
def test_a_result_that_changes_while_it_is_timed_has_no_time():
    rows = sweep("TiresOfIt", "Good", stages=("measure",), mode="forward")
    assert rows["tires_of_it"].status == "failed"
    assert "no longer what it was" in rows["tires_of_it"].error
    assert rows["tires_of_it"].forward is None
    assert rows["good"].forward is not None


@pytest.mark.slow
@pytest.mark.parametrize("text", ["B0,H1,L4,D8,fp32", "B1,H1,L4,S0,D8,fp32"])
def test_a_workload_without_scores_is_no_mismatch(text):
    run = execute(make_plan([text], "sdpa_math,naive", "both", "cpu", (), quick=True))
    assert {row.status for row in run.results} <= {"ok", "skipped"}, [row.error for row in run.results]


@pytest.mark.parametrize("folder", ["", "."])
def test_an_output_folder_must_be_one_of_its_own(folder):
    with pytest.raises(UsageError, match="folder of its own"):
        prepare_folder(Path(folder))


def test_a_report_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(UsageError, match=r"already holds report\.html"):
        prepare_folder(tmp_path)


@pytest.mark.parametrize(
    ("held", "forward"), [({"forward": 7, "backward": 9}, 7), (5, 5), ({"backward": 9}, None), ("much", None)]
)
def test_a_workspace_is_what_the_prepared_one_says(held, forward):
    class Prepared:
        workspace_bytes = held

    assert jobs.workspace_bytes(Prepared(), "forward") == forward
    assert jobs.workspace_bytes(object(), "forward") is None


def test_a_forward_is_timed_without_gradients_and_without_switching_them_off_in_each_call():
    import torch

    seen = []

    class Prepared:
        def forward(self, inputs, *, save=False):
            seen.append((torch.is_grad_enabled(), save))
            return Output("out", saved="saved")

        def backward(self, inputs, saved):
            seen.append((torch.is_grad_enabled(), saved))

    for direction in ("forward", "backward"):
        with jobs.grad_mode(direction):
            call = jobs.direction_call(Prepared(), None, direction)
            call()
    assert seen == [(False, False), (True, True), (True, "saved")]
    assert torch.is_grad_enabled()
    jobs.direction_call(Prepared(), None, "forward")()
    assert seen[-1] == (True, False)  # the call itself is the implementation's alone
