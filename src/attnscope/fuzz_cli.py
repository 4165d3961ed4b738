"""The ``attnscope fuzz`` command; :mod:`attnscope.cli` registers it. Imports stages only when it runs."""

from __future__ import annotations

import json as json_module
import sys
from typing import Annotated

import typer


def fuzz(
    name: Annotated[str, typer.Argument(help="One implementation: a name, module:Class, hub:OWNER/NAME@REVISION.")],
    cases: Annotated[
        int | None, typer.Option("--cases", help="How many; default 1000.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the cases: the same seed, the same cases.")] = 0,
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="Stop after that time with what was done.", show_default=False)
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(
            "--case", help="Only the case of this number, a range such as 32..63, or a spelled case.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda. Default: the GPU if there is one.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", help="Processes; default on a GPU one a core, sixteen at most, else one.",
            show_default=False,
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", help="Seconds that one case may take; default 120.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of text.")] = False,
) -> None:  # fmt: skip
    """Check an implementation on random workloads that it does not refuse; make what fails as simple as can be."""
    from attnscope.cli import progress
    from attnscope.fuzzing import execute_fuzz, make_fuzz_plan
    from attnscope.records import to_builtins
    from attnscope.reporting.fuzz_text import render_fuzz

    if ":" in name:
        sys.path.insert(0, "")  # so that module:Class finds the user's own file, as `python -m` would
    plan = make_fuzz_plan(
        name, cases=cases, seed=seed, minutes=minutes, case=case, device=device, workers=workers,
        time_limit_s=time_limit,
    )  # fmt: skip
    with progress() as watcher:
        report = execute_fuzz(plan, watcher)
    typer.echo(json_module.dumps(to_builtins(report), indent=2) if json else render_fuzz(report), nl=json)
    if report.interrupted:
        raise typer.Exit(130)
    if not report.is_green:
        raise typer.Exit(1)
