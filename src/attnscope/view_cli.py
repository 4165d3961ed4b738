"""The ``attnscope view`` command; :mod:`attnscope.cli` registers it. Imports stages only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def view(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace: .json, .json.gz.", show_default=False)],
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Another than 9001 only for a Perfetto of your own.")
    ] = 9001,
    ui: Annotated[str, typer.Option("--ui", help="Where the Perfetto is that shows it.")] = "https://ui.perfetto.dev",
) -> None:
    """Show one trace in Perfetto, served from this machine to this machine; ends when it was fetched, or on Ctrl-C."""
    from urllib.parse import urlsplit

    from attnscope.errors import UsageError
    from attnscope.view import view_trace

    where = urlsplit(ui)
    if where.scheme not in ("http", "https") or not where.netloc:
        raise UsageError(f"--ui must be an address such as http://localhost:10000, got {ui}")

    def tell(page: str) -> None:
        typer.echo(page)
        typer.echo("waiting until the page has fetched it; Ctrl-C ends it before", err=True)
        if open_page:
            import webbrowser

            webbrowser.open(page)

    try:
        view_trace(trace, tell, port=port, origin=f"{where.scheme}://{where.netloc}")
    except KeyboardInterrupt:
        typer.echo("ended before it was fetched", err=True)
        raise typer.Exit(130) from None
