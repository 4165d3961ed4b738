"""The recorded run that ships with attnscope, readable anywhere: ``run.jsonl``, ``report.html``, ``traces/``."""

from __future__ import annotations

from pathlib import Path

from attnscope.records import Run, read_runs

FOLDER = Path(__file__).resolve().parent


def runs() -> list[Run]:
    """The recorded runs. Raises RecordError where the package lacks them."""
    return read_runs(FOLDER / "run.jsonl")


def report_path() -> Path:
    """The page made from them."""
    return FOLDER / "report.html"


def traces_path() -> Path:
    """The folder of their Chrome traces, which Perfetto opens."""
    return FOLDER / "traces"
