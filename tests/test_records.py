"""Records: what cannot be said, what survives the file, and what a broken file says."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import fields, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import factories
from attnscope import records
from attnscope.errors import RecordError
from attnscope.records import (
    SCHEMA_VERSION,
    CheckResult,
    Limits,
    Measurement,
    Result,
    Run,
    TensorCheck,
    from_builtins,
    parse_runs,
    read_runs,
    run_lines,
    to_builtins,
    write_run,
)

# --- what cannot be constructed ---------------------------------------------------------------------------------------


def passed_check(**changes):
    return replace(factories.check(0.4), **changes)


def failed_check():
    return factories.check(3.0, grade="failed")


def refused(sentence: str):
    return pytest.raises(RecordError, match=sentence)


@pytest.mark.parametrize("status", ["ok", "approximate", "skipped", "check_failed", "failed"])
@pytest.mark.parametrize("check", [None, failed_check()], ids=["no check", "failed check"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_time_without_a_passed_check(status, check, direction):
    time = {direction: factories.measurement(direction)}
    with refused("a time without a passed check"):
        Result("w", "i", status, check=check, reasons={direction: ("why",)}, error="it broke", **time)


@pytest.mark.parametrize("status", ["skipped", "check_failed", "failed"])
def test_no_time_under_a_status_that_has_none(status):
    with refused(f"status {status} carries a time"):
        Result("w", "i", status, check=passed_check(), forward=factories.measurement(), reasons={"forward": ("why",)})


@pytest.mark.parametrize("status", ["ok", "approximate"])
@pytest.mark.parametrize("check", [None, failed_check()], ids=["no check", "failed check"])
def test_no_success_without_a_passed_check(status, check):
    with refused(f"{status} needs a passed check"):
        Result("w", "i", status, check=check)


@pytest.mark.parametrize("reasons", [{}, {"forward": ()}])
def test_no_skipping_without_a_reason(reasons):
    with refused("skipped without a reason"):
        Result("w", "i", "skipped", reasons=reasons)


@pytest.mark.parametrize("error", [None, ""])
def test_no_failure_without_an_error(error):
    with refused("failed without an error"):
        Result("w", "i", "failed", error=error)


@pytest.mark.parametrize("check", [None, passed_check()], ids=["no check", "passed check"])
def test_no_failed_check_without_one(check):
    with refused("check_failed without a check that failed"):
        Result("w", "i", "check_failed", check=check)


def test_no_unknown_status():
    with refused("status must be one of ok, approximate, skipped, check_failed, failed, got 'fine'"):
        Result("w", "i", "fine")


def test_no_time_of_a_direction_that_was_not_checked():
    check = passed_check(directions=("forward",))
    assert Result("w", "i", "ok", check=check, forward=factories.measurement()).backward is None
    with refused("backward is timed but was not checked"):
        Result("w", "i", "ok", check=check, backward=factories.measurement("backward"))


def test_no_direction_in_the_other_s_place():
    with refused("forward holds another direction's time"):
        Result("w", "i", "ok", check=passed_check(), forward=factories.measurement("backward"))


def test_a_changed_copy_is_validated_anew():
    good = factories.result()
    assert good.with_changes(note="n").note == "n"
    with refused("a time without a passed check"):
        good.with_changes(check=None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"grade": "good"}, "grade must be one of"),
        ({"grade": "failed"}, "contradicts passed=True"),
        ({"passed": False}, "contradicts passed=False"),
        ({"tensors": ()}, "compared no tensor"),
        ({"tensors": (TensorCheck("out", "plain", False, 1.0, 0.1),)}, "a tensor that failed"),
    ],
)
def test_a_check_cannot_contradict_itself(changes, sentence):
    with refused(sentence):
        passed_check(**changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"direction": "sideways"}, "direction must be forward or backward"),
        ({"time_ms_median": 0.0}, "time_ms_median must be above 0"),
        ({"time_ms_median": -1.0}, "time_ms_median must be above 0"),
        ({"time_ms_median": math.nan}, "time_ms_median must be above 0"),
        ({"time_ms_p20": 1e9}, "p20 <= median <= p80"),
        ({"time_ms_p80": 1e-9}, "p20 <= median <= p80"),
        ({"time_ms_p80": math.inf}, "time_ms_p80 must be finite"),
        ({"noise_fraction": math.nan}, "noise_fraction must be finite"),
        ({"vs_limit": math.inf}, "vs_limit must be finite"),
        ({"samples": 0}, "samples must be above 0"),
        ({"limit_term": "hope"}, "limit_term must be one of"),
    ],
)
def test_a_measurement_cannot_be_impossible(changes, sentence):
    with refused(sentence):
        replace(factories.measurement(), **changes)


def test_a_verdict_has_four_words():
    with refused("verdict must be one of faster, slower, same, too close to call, got 'better'"):
        factories.verdict("a", "b", "better", 0.9)


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [factories.blog_run(), factories.cpu_run(), factories.cpu_run(limits=None, results=())])
def test_a_run_round_trips_through_its_file(tmp_path, run):
    path = tmp_path / "run.jsonl"
    write_run(run, path)
    assert read_runs(path) == [run]
    assert os.listdir(tmp_path) == ["run.jsonl"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["record"] for line in lines] == ["run", *["limits"] * bool(run.limits), *["result"] * len(run.results)]
    assert all(line["schema_version"] == SCHEMA_VERSION for line in lines)


finite = st.floats(1e-9, 1e9)
optional = st.none() | finite


@given(st.data())
def test_a_measurement_round_trips_whatever_is_missing(data):
    times = sorted(data.draw(st.lists(finite, min_size=3, max_size=3)))
    floats = [f.name for f in fields(Measurement) if f.type == "float | None"]
    made = Measurement(
        "forward", times[1], times[0], times[2], data.draw(finite), samples=data.draw(st.integers(1, 10**6)),
        **{name: data.draw(optional) for name in floats},
        throttle_reasons=tuple(data.draw(st.lists(st.text(max_size=9), max_size=3))),
        limit_term=data.draw(st.sampled_from([None, *records.LIMIT_TERMS])),
    )  # fmt: skip
    run = factories.cpu_run(results=(Result("w", "i", "ok", check=passed_check(), forward=made),))
    assert parse_runs(run_lines(run), "here") == [run]
    assert from_builtins(to_builtins(made), Measurement) == made


@given(st.text(max_size=60), st.text(max_size=20))
def test_any_text_round_trips(error, name):
    run = factories.cpu_run(command=error, results=(Result(name, name, "failed", error=error or "e"),))
    assert parse_runs(run_lines(run), "here") == [run]
    assert all(b"\n" not in line for line in run_lines(run))


def test_several_runs_share_a_file(tmp_path):
    path = tmp_path / "records.jsonl"
    one, other = factories.blog_run(), factories.cpu_run()
    path.write_bytes(b"\n".join([*run_lines(one), b"", *run_lines(other)]))
    assert read_runs(path) == [one, other]
    assert one.for_workload(factories.BLOG) == list(one.results) and one.for_workload("other") == []


def test_missing_is_null_and_never_zero():
    body = to_builtins(factories.cpu_measurement())
    assert body["joules_per_call"] is None and body["sm_clock_mhz"] is None
    assert 0 not in [value for name, value in body.items() if name.endswith(("_us", "_mhz", "_w", "_c", "_mib"))]


def good_lines() -> list[bytes]:
    return list(run_lines(factories.cpu_run()))


def edited(line: bytes, **changes) -> bytes:
    return msgspec.json.encode(json.loads(line) | changes)


BROKEN = {
    "cut line": (lambda lines: [*lines[:2], lines[2][: len(lines[2]) // 2]], 3, "not JSON"),
    "garbage": (lambda lines: [lines[0], b"\x00\xff\xfe garbage"], 2, "not JSON"),
    "invalid text": (lambda lines: [lines[0], b'{"record": "\xff"}'], 2, "not JSON"),
    "depth": (lambda lines: [lines[0], b"[" * 100_000], 2, "not JSON"),
    "a list": (lambda lines: [lines[0], b"[1, 2]"], 2, "a line must be a record"),
    "no record": (lambda lines: [lines[0], b"{}"], 2, "a line must be a record"),
    "unknown record": (lambda lines: [lines[0], edited(lines[1], record="secret")], 2, "record must be run, limits or"),
    "newer": (lambda lines: [edited(lines[0], schema_version=99)], 1, "schema_version must be 1, got 99"),
    "newer kind": (lambda lines: [lines[0], edited(lines[1], record="new", schema_version=2)], 2, "schema_version"),
    "no version": (lambda lines: [edited(lines[0], schema_version=None)], 1, "schema_version must be 1, got None"),
    "no first line": (lambda lines: lines[1:], 1, "a limits line stands before any run line"),
    "wrong type": (lambda lines: [edited(lines[0], seed="one")], 1, "Expected `int`, got `str` - at `$.seed`"),
    "field gone": (lambda lines: [b'{"record": "run", "schema_version": 1}'], 1, "missing required field"),
    "a lie": (lambda lines: [*lines[:2], edited(lines[2], check=None)], 3, "a time without a passed check"),
    "an empty skip": (
        lambda lines: [*lines[:2], edited(lines[2], status="skipped", forward=None, backward=None)], 3, "without a",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_says_where_and_what(tmp_path, name):
    break_, number, sentence = BROKEN[name]
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"\n".join(break_(good_lines())))
    with pytest.raises(RecordError) as caught:
        read_runs(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{number}: ") and sentence in message and message.count("\nhint: ") == 1
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file_is_a_sentence(tmp_path, content):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with refused(r"holds no run\nhint: "):
        read_runs(path)


def test_no_file_is_a_sentence(tmp_path):
    with refused(r"cannot read .*none.jsonl: No such file or directory\nhint: "):
        read_runs(tmp_path / "none.jsonl")
    with refused(r"cannot read .*: Is a directory\nhint: "):
        read_runs(tmp_path)


# --- a disk that does not take it -------------------------------------------------------------------------------------


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_a_sentence_and_leaves_the_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "run.jsonl"
    write_run(factories.blog_run(), path)
    monkeypatch.setattr(records.os, call, full)
    with refused(r"cannot write .*run.jsonl: No space left on device\nhint: free some space"):
        write_run(factories.cpu_run(), path)
    assert read_runs(path) == [factories.blog_run()]
    assert os.listdir(tmp_path) == ["run.jsonl"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_really_full_disk(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    os.symlink("/dev/full", tmp_path / f".run.jsonl.{os.getpid()}.tmp")
    with refused("No space left on device"):
        write_run(factories.cpu_run(), path)
    assert os.listdir(tmp_path) == []


def test_ctrl_c_while_writing_leaves_no_trash(tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(records.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_run(factories.cpu_run(), tmp_path / "run.jsonl")
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "no" / "run.jsonl", tmp_path / "file" / "run.jsonl", tmp_path / ("x" * 300)):
        with refused(r"cannot write .*\nhint: .*--out another folder"):
            write_run(factories.cpu_run(), place)


# --- beyond files -----------------------------------------------------------------------------------------------------


def test_from_builtins_names_what_is_wrong():
    with refused(r"row 3: .*Expected `float`.*\nhint: "):
        from_builtins({"device": "cpu", "matrix_tflop_per_s": {"fp32": "fast"}}, Limits, "row 3")


def test_records_are_frozen():
    run: Run = factories.cpu_run()
    with pytest.raises(AttributeError):
        run.seed = 3  # type: ignore[misc]
    check: CheckResult = passed_check()
    with pytest.raises(AttributeError):
        check.passed = False  # type: ignore[misc]
