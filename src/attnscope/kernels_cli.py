"""The ``attnscope kernels`` commands; :mod:`attnscope.cli` registers them. Imports stages only when one runs."""

from __future__ import annotations

from typing import Annotated

import typer

kernels_app = typer.Typer(help="Pin kernels of the Hugging Face Hub.", no_args_is_help=True, rich_markup_mode=None)


@kernels_app.callback()
def kernels() -> None:
    """Pin kernels of the Hugging Face Hub, so that `hub:OWNER/NAME@REVISION` always means the same files."""


@kernels_app.command("lock")
def lock(
    kernels: Annotated[list[str], typer.Argument(metavar="OWNER/NAME@REVISION...", show_default=False)],
    moving: Annotated[bool, typer.Option("--moving", help="Also a branch or tag, as it is now.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Also of a publisher that the kernels library does not trust.")
    ] = False,
) -> None:
    """Resolve versions to commits, and keep these and a hash of every file in attnscope-kernels.lock."""
    from attnscope.implementations.hub.trust import lock_kernel, lock_path

    for kernel in kernels:
        commit = lock_kernel(kernel, moving=moving, trust_remote_code=trust_remote_code)
        typer.echo(f"{kernel} is {commit}")
    typer.echo(f"lock file: {lock_path()}", err=True)
