"""The ``attnscope explain`` command; :mod:`attnscope.cli` registers it. Imports stages only when it runs."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.errors import RecordError, UnknownName, UsageError

if TYPE_CHECKING:
    from attnscope.explaining.explanation import Difference, Explanation
    from attnscope.explaining.trial import Trial


def explain(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...", help="Chrome traces of torch.profiler: .json, .json.gz.", show_default=False
        ),
    ],
    html: Annotated[Path | None, typer.Option("--html", help="Also write one self-contained page here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of text.")] = False,
    fail_on: Annotated[
        str | None,
        typer.Option("--fail-on", help="Finding ids separated by commas: exit 1 if one is found.", show_default=False),
    ] = None,
    top: Annotated[int | None, typer.Option("--top", min=1, help="Show that many findings; default all.")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Two traces: before -> after for each call site.")] = False,
    try_: Annotated[
        bool,
        typer.Option("--try", help="Measure the trace's attention on this machine: what would be faster. Needs torch."),
    ] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="For --try: cpu or cuda. Default: the GPU if there is one.")
    ] = None,
    implementations: Annotated[
        str,
        typer.Option("--implementations", help="For --try: names separated by commas, or all (without the ladder)."),
    ] = "all",
) -> None:
    """What any profiler trace says about its attention, in plain sentences. Needs neither torch nor a GPU."""
    from attnscope.reporting.explanation_text import render_difference, render_explanation

    gc.disable()  # millions of objects that live to the end of the process: looking for cycles would double the time
    wanted = _finding_ids(fail_on)
    if diff and len(traces) != 2:
        raise UsageError(
            f"--diff must have two traces, got {len(traces)}\nhint: attnscope explain before.json after.json --diff"
        )
    if try_ and (diff or len(traces) != 1):
        raise UsageError("--try must have one trace\nhint: attnscope explain trace.json --try")
    if (device is not None or implementations != "all") and not try_:
        raise UsageError("--device and --implementations belong to --try\nhint: attnscope explain trace.json --try")
    explanations = [_explained(path) for path in traces]
    difference = _compared(*explanations) if diff else None
    if try_ and not json:  # measuring takes minutes: what is known already is shown first
        typer.echo(render_explanation(explanations[0], top=top))
    trial = _tried(explanations[0], device, implementations) if try_ else None
    if html is not None:
        _write_page(explanations, difference, html, trial)
    if json:
        from attnscope.reporting.explanation_json import explanations_json

        typer.echo(explanations_json(explanations, difference, trial))
    elif trial is not None:
        from attnscope.reporting.trial_text import render_trial

        typer.echo(render_trial(trial), nl=False)
    elif difference is not None:
        typer.echo(render_difference(difference), nl=False)
    else:
        typer.echo("\n".join(render_explanation(one, top=top) for one in explanations), nl=False)
    _gate(explanations[1:] if diff else explanations, wanted)
    if trial is not None and trial.interrupted:
        raise typer.Exit(130)


def _tried(explanation: Explanation, device: str | None, implementations: str) -> Trial:
    from attnscope.cli import progress
    from attnscope.trying import try_explanation

    with progress() as watcher:
        return try_explanation(explanation, device, implementations=implementations, watcher=watcher)


def _explained(path: Path) -> Explanation:
    from attnscope.explaining import explain_trace
    from attnscope.trace import read_trace

    explanation = explain_trace(read_trace(path), str(path))
    gc.freeze()  # nor shall the interpreter look for cycles when it ends
    return explanation


def _compared(before: Explanation, after: Explanation) -> Difference:
    from attnscope.explaining import compare_traces

    return compare_traces(before, after)


def _finding_ids(text: str | None) -> list[str]:
    """The ids of ``--fail-on``, each of which must exist: a gate on a misspelt id would never close."""
    from attnscope.explaining.trace_rules import FINDING_IDS

    ids = [one.strip() for one in (text or "").split(",") if one.strip()]
    for one in ids:
        if one not in FINDING_IDS:
            raise UnknownName("finding", one, FINDING_IDS)
    return ids


def _gate(explanations: list[Explanation], wanted: list[str]) -> None:
    failed = [f"{one.trace}: {finding.id}" for one in explanations for finding in one.findings if finding.id in wanted]
    for line in failed:
        typer.echo(f"found {line}", err=True)
    if failed:
        sys.exit(1)


def _write_page(
    explanations: list[Explanation], difference: Difference | None, path: Path, trial: Trial | None
) -> None:
    from attnscope.reporting.explanation_html import explanations_page

    try:
        path.write_text(explanations_page(explanations, difference, trial), encoding="utf-8")
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from None
    typer.echo(f"page: {path}", err=True)
