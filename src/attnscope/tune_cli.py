"""The ``attnscope tune`` command; :mod:`attnscope.cli` registers it. Imports stages only when it runs."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import typer


def tune(
    name: Annotated[str, typer.Argument(help="One that has configurations: hopper, hopper_cuda, module:Class.")],
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKLOAD]...",
            help="Spellings or suites: their classes are tuned, each by all of them that are in it. Default: one "
            "workload for each class.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda. Default: the GPU if there is one.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Begin no class that may not end within so many seconds.", show_default=False)
    ] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Only classes that the table has no measurement of.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, and write no table.")] = False,
    shipped: Annotated[
        bool, typer.Option("--shipped", help="Write the table that ships with attnscope, in its checkout.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write the record as JSON to this file. Never overwritten.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", help="Processes that check; default on a GPU half the cores, eight at most, else one.",
            show_default=False,
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", help="Seconds that one configuration may take; default 300.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of text.")] = False,
) -> None:  # fmt: skip
    """Time an implementation's configurations on this card, and keep the fastest right one of each class."""
    from attnscope.cli import progress
    from attnscope.errors import UsageError
    from attnscope.reporting.tune_text import render_tune
    from attnscope.tuning import document, execute_tune, make_tune_plan

    if ":" in name:
        sys.path.insert(0, "")  # so that module:Class finds the user's own file, as `python -m` would
    if out is not None and (out.exists() or not out.absolute().parent.is_dir()):
        raise UsageError(f"--out must be a new file in a folder that is there, got {out}\nhint: --out another file")
    plan = make_tune_plan(
        name, workloads or (), device=device, budget_s=budget, missing=missing, dry_run=dry_run, shipped=shipped,
        quick=quick, seed=seed, workers=workers, time_limit_s=time_limit,
    )  # fmt: skip
    with progress() as watcher:
        report = execute_tune(plan, watcher)
    text = json_module.dumps(document(report), indent=2)
    if out is not None:
        out.write_text(text + "\n")
    typer.echo(text if json else render_tune(report), nl=json)
    if report.interrupted:
        raise typer.Exit(130)
    if report.has_faults:
        raise typer.Exit(1)
