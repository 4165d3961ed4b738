"""Keeping the records of runs: what is fit is appended once, what is not is refused by sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

import factories
from attnscope.errors import RecordError
from attnscope.keeping import add_runs, finished_part
from attnscope.records import read_runs, write_run


@pytest.fixture
def run():
    made = factories.blog_run()
    return replace(made, environment=replace(made.environment, git_commit="a" * 40), quick=False)


def kept(run, tmp_path, **options):
    write_run(run, tmp_path / "run.jsonl")
    add_runs(tmp_path / "run.jsonl", tmp_path / "results", **options)
    return read_runs(tmp_path / "results" / "nvidia-h200.jsonl")


def test_runs_are_appended_to_the_file_of_their_machine(run, tmp_path):
    later = replace(run, created="2026-12-01T00:00:00+00:00")
    assert kept(run, tmp_path) == [run]
    assert kept(later, tmp_path) == [run, later]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"interrupted": True}, "was interrupted"),
        ({"quick": True}, "too noisy to keep"),
        ({"results": ()}, "holds no result"),
    ],
)
def test_unfit_runs_are_refused_and_nothing_is_written(run, tmp_path, change, sentence):
    with pytest.raises(RecordError, match=sentence):
        kept(replace(run, **change), tmp_path)
    assert not (tmp_path / "results").exists()


def test_a_run_without_a_commit_is_refused(run, tmp_path):
    with pytest.raises(RecordError, match="names no commit"):
        kept(replace(run, environment=replace(run.environment, git_commit=None)), tmp_path)


def test_a_run_is_kept_once(run, tmp_path):
    kept(run, tmp_path)
    with pytest.raises(RecordError, match="already holds the run"):
        kept(run, tmp_path)


def test_an_interrupted_run_is_kept_without_the_workload_it_was_at(run, tmp_path):
    other = tuple(replace(row, workload="B1,H1,L8,D8,bf16") for row in run.results)
    cut = replace(
        run, interrupted=True, workloads=(*run.workloads, "B1,H1,L8,D8,bf16", "never begun"),
        results=(*run.results, *other),
    )  # fmt: skip
    assert kept(cut, tmp_path, finished_only=True) == [run]
    assert finished_part(run) == run
