"""The ``attnscope why`` command; :mod:`attnscope.cli` registers it. Imports stages only when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from attnscope.why_record import Why


def why(
    workload: Annotated[
        str | None,
        typer.Argument(help="A spelling such as B8,H16,L1024,D64,bf16,causal, or a suite.", show_default=False),
    ] = None,
    only: Annotated[
        str | None, typer.Option("--for", help="Only this implementation, e.g. sdpa_flash.", show_default=False)
    ] = None,
    mode: Annotated[str, typer.Option(help="forward, or backward: with tensors that want gradients.")] = "forward",
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda. Default: the GPU if there is one.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of text.")] = False,
) -> None:
    """Which implementation PyTorch's SDPA takes here, and all reasons against every other one."""
    from attnscope.errors import UnknownImplementation
    from attnscope.implementation import names
    from attnscope.selecting import why_workload

    known = [name for name in (*names("all"), *names("ladder")) if name != "sdpa_auto"]
    if only is not None and only not in known:
        raise UnknownImplementation(only, known)
    found = why_workload(workload, device, mode)
    typer.echo(_json(found, only) if json else _text(found, only), nl=json)


def _text(found: list[Why], only: str | None) -> str:
    from attnscope.reporting.why_views import render_why

    return "\n".join(render_why(one, only=only) for one in found)


def _json(found: list[Why], only: str | None) -> str:
    from dataclasses import replace

    import msgspec

    from attnscope.records import SCHEMA_VERSION, to_builtins

    kept = [one if only is None else replace(one, implementations=(one.of(only),)) for one in found]
    document = {"schema_version": SCHEMA_VERSION, "calls": [to_builtins(one) for one in kept]}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
