"""The ``attnscope share`` command; :mod:`attnscope.cli` registers it. Imports stages only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def share(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the traces are.", show_default=False)],
    bucket: Annotated[str, typer.Option("--bucket", metavar="USER/NAME", help="The bucket on the Hugging Face Hub.")],
    scrub: Annotated[
        bool, typer.Option("--scrub", help="Send copies without environment, host, folders and secrets.")
    ] = False,
    as_is: Annotated[bool, typer.Option("--as-is", help="Send traces although they hold such.")] = False,
    mirror: Annotated[
        bool, typer.Option("--mirror", help="Delete in the bucket what is not in the folder. Never done otherwise.")
    ] = False,
) -> None:
    """Upload the traces of a folder to a bucket and print the links that show them in Perfetto."""
    from attnscope.errors import UsageError
    from attnscope.share import share_traces

    if scrub and as_is:
        raise UsageError("--scrub and --as-is contradict each other\nhint: leave one out")
    shared = share_traces(folder, bucket, scrub=scrub, as_is=as_is, mirror=mirror)
    for name, link in shared.links.items():
        typer.echo(f"{name}\n    {link}")
    typer.echo(f"uploaded through {shared.through}", err=True)
    if shared.left_out:
        typer.echo(f"left out, no traces: {', '.join(shared.left_out)}", err=True)
    if shared.public is False:
        typer.echo(
            "the bucket is private, so Perfetto cannot fetch from it\n"
            "hint: make it public on its page, or attnscope view TRACE shows one from this machine",
            err=True,
        )
