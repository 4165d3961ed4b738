"""The ``attnscope ladder`` command; :mod:`attnscope.cli` registers it. Imports stages only when it runs."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import typer

from attnscope.errors import UsageError


def ladder(
    direction: Annotated[
        str | None,
        typer.Argument(help="forward or backward; with --compile-only it may be left out.", show_default=False),
    ] = None,
    rungs: Annotated[str | None, typer.Option(help="Rungs separated by commas, e.g. v1,v7; default all.")] = None,
    block_sizes: Annotated[
        str | None, typer.Option(help="From 32,64,128,256,512,1024; default all that each rung takes.")
    ] = None,
    workload: Annotated[str | None, typer.Option(help="A causal workload; default the article's.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cuda; the rungs run on nothing else.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples.")] = False,
    claims: Annotated[
        bool, typer.Option("--claims", help="Also the variants that settle what the article claims (backward).")
    ] = False,
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile every rung and show registers and spills; needs no GPU.")
    ] = False,
    arch: Annotated[
        str, typer.Option(help="For --compile-only: sm_75, sm_80, sm_89, sm_90, sm_100, sm_120.")
    ] = "sm_90",
    out: Annotated[Path | None, typer.Option("--out", help="Also write the records as JSON to this file.")] = None,
    readme: Annotated[Path | None, typer.Option("--readme", help="Write the table between its markers here.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw the ladder here (.svg, .png).")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of tables.")] = False,
) -> None:
    """The CUDA ladder: each rung checked and timed, whole and in parts, at each block size."""
    from attnscope import ladder as stage
    from attnscope import ladder_views as views
    from attnscope.records import to_builtins

    if compile_only:
        kernels = stage.compile_ladder(arch, direction, rungs)
        typer.echo(json_module.dumps(to_builtins(kernels)) if json else views.render_compiled(kernels))
        return
    if direction is None:
        raise UsageError("direction must be forward or backward, got nothing\nhint: attnscope ladder forward")
    run = stage.run_ladder(
        direction,
        rungs=rungs,
        block_sizes=block_sizes,
        workload=workload,
        device=device,
        quick=quick,
        claims=claims,
        progress=lambda message: print(message, file=sys.stderr, flush=True),
    )
    if out is not None:
        out.write_text(json_module.dumps(views.to_json(run)) + "\n")
    if readme is not None:
        views.write_table(run, readme)
    if picture is not None:
        views.draw([run], picture)
    typer.echo(json_module.dumps(views.to_json(run)) if json else views.render_ladder(run))
    if any(row.check and not row.passed for row in run.rows):
        raise typer.Exit(1)
