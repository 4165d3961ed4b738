"""Keep the records of runs: validate, then append to the file of their machine. Reads and writes records only."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from attnscope.errors import RecordError
from attnscope.records import Run, read_runs, run_lines


def add_runs(source: Path, folder: Path, *, finished_only: bool = False) -> list[str]:
    """Append the runs of ``source`` to ``folder/<device>.jsonl``; a sentence about each.

    With ``finished_only`` an interrupted run is kept without the workload that it was at.

    Raises:
        RecordError: a run is broken, interrupted, quick, names no commit, or is there already.
    """
    runs = [finished_part(run) if finished_only else run for run in read_runs(source)]
    for run in runs:
        _refuse_unfit(run, source)
    sentences = []
    for run in runs:
        path = folder / f"{machine_name(run)}.jsonl"
        if path.exists() and any(_identity(run) == _identity(old) for old in read_runs(path)):
            raise RecordError(f"{path} already holds the run of {run.created} from {source}")
        _append(run, path)
        sentences.append(f"added {len(run.results)} results of {run.created} to {path}")
    return sentences


def finished_part(run: Run) -> Run:
    """An interrupted run without its last workload, which it left unfinished; any other run as it is.

    Workloads run one after the other, so all before the last are whole.
    """
    if not run.interrupted or not run.results:
        return run
    last = run.results[-1].workload
    done = tuple(result for result in run.results if result.workload != last)
    names = tuple(dict.fromkeys(result.workload for result in done))
    return replace(run, interrupted=False, workloads=names, results=done)


def machine_name(run: Run) -> str:
    """The file name of a run's machine, e.g. ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", run.device.name.lower()).strip("-") or run.device.kind


def _refuse_unfit(run: Run, source: Path) -> None:
    for unfit, why in (
        (run.interrupted, "was interrupted"),
        (run.quick, "was taken with --quick, whose numbers are too noisy to keep"),
        (run.environment.git_commit is None, "names no commit of attnscope, so it cannot be repeated"),
        (not run.results, "holds no result"),
    ):
        if unfit:
            raise RecordError(f"{source}: the run of {run.created} {why}")


def _identity(run: Run) -> tuple[str, str, int]:
    return run.created, run.command, run.seed


def _append(run: Run, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_bytes() if path.exists() else b""
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(old + b"".join(line + b"\n" for line in run_lines(run)))
        os.replace(temporary, path)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from None
