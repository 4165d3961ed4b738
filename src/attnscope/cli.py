"""The command line. Imports each stage when its command runs, so that ``attnscope --help`` answers at once.

stdout carries results only; progress and messages go to stderr. Exit codes: 0 ok, 1 an implementation failed or a gate
failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.explain_cli import explain
from attnscope.fuzz_cli import fuzz
from attnscope.kernels_cli import kernels_app
from attnscope.ladder_cli import ladder
from attnscope.share_cli import share
from attnscope.terminal import never_fail_to_encode
from attnscope.tune_cli import tune
from attnscope.view_cli import view
from attnscope.why_cli import why

if TYPE_CHECKING:
    from attnscope.planning import Plan
    from attnscope.progress import Watcher
    from attnscope.records import Run

app = typer.Typer(
    name="attnscope",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Which attention is running, is it right, how close is it to the card's limit, what should run instead?",
)
records_app = typer.Typer(help="Keep the records of runs.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(records_app, name="records")

Workloads = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[WORKLOAD]...",
        help="Spellings such as B8,H16,L1024,D64,bf16,causal, or suites: blog, gpt2-forward, gpt2-backward, grid, "
        "decode, short, ragged, blog-small, gpt2-small. Default: blog on a GPU, the two small ones on a CPU.",
        show_default=False,
    ),
]
Implementations = Annotated[
    str,
    typer.Option(
        help="Names separated by commas, module:Class, hub:OWNER/NAME@REVISION, all (without the ladder), or ladder."
    ),
]
Mode = Annotated[str, typer.Option(help="forward, backward or both.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda. Default: the GPU if there is one.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer samples, no sustained blocks.")]
Seed = Annotated[int, typer.Option(help="Seed of the inputs.")]
Out = Annotated[
    Path | None, typer.Option("--out", help="Folder for the run; default attnscope-out/<time>. Never overwritten.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of tables.")]
Wide = Annotated[bool, typer.Option("--wide", help="All columns.")]
TimeLimit = Annotated[
    float | None, typer.Option("--time-limit", help="Seconds one implementation may take to prepare and check.")
]
Sustained = Annotated[float | None, typer.Option(help="Seconds of each sustained block (GPU); 0 leaves them out.")]


@app.command()
def compare(
    workloads: Workloads = None,
    implementations: Implementations = "all",
    mode: Mode = "both",
    device: DeviceOption = None,
    quick: Quick = False,
    no_profile: Annotated[bool, typer.Option("--no-profile", help="No traces, no explanation.")] = False,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    wide: Wide = False,
    sustained: Sustained = None,
    time_limit: TimeLimit = None,
    budget: Annotated[
        float | None, typer.Option(help="Begin no workload that may not end within so many seconds.")
    ] = None,
    after: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN.jsonl", help="An earlier run like this, whose finished workloads are left out."),
    ] = None,
    warm: Annotated[int, typer.Option(help="Compile in so many processes at once before anything is timed.")] = 0,
) -> None:
    """Check, measure, profile and explain every implementation on workloads; write a report."""
    from attnscope.records import read_runs

    stages = ("measure",) if no_profile else ("measure", "profile")
    plan = _plan(
        workloads, implementations, mode, device, stages, _default_out(out),
        quick=quick, seed=seed, sustained_s=sustained, time_limit_s=time_limit, budget_s=budget,
        after=tuple(run for path in after or () for run in read_runs(path)), warm=warm,
    )  # fmt: skip
    _run(plan, json=json, wide=wide)


@app.command()
def check(
    workloads: Workloads = None,
    implementations: Implementations = "all",
    mode: Mode = "both",
    device: DeviceOption = None,
    quick: Quick = False,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    wide: Wide = False,
    time_limit: TimeLimit = None,
) -> None:
    """Only check: outputs and gradients against float64."""
    plan = _plan(
        workloads, implementations, mode, device, (), out, quick=quick, seed=seed, time_limit_s=time_limit
    )  # fmt: skip
    _run(plan, json=json, wide=wide)


@app.command()
def measure(
    workloads: Workloads = None,
    implementations: Implementations = "all",
    mode: Mode = "both",
    device: DeviceOption = None,
    quick: Quick = False,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    wide: Wide = False,
    sustained: Sustained = None,
    time_limit: TimeLimit = None,
) -> None:
    """Check, then measure what passed."""
    plan = _plan(
        workloads, implementations, mode, device, ("measure",), out,
        quick=quick, seed=seed, sustained_s=sustained, time_limit_s=time_limit,
    )  # fmt: skip
    _run(plan, json=json, wide=wide)


@app.command()
def profile(
    workloads: Workloads = None,
    implementations: Implementations = "all",
    mode: Mode = "both",
    device: DeviceOption = None,
    wait: Annotated[int, typer.Option(help="Steps that the profiler skips, after 3 warm calls.")] = 1,
    warmup: Annotated[int, typer.Option(help="Steps that it runs through without recording.")] = 1,
    active: Annotated[int, typer.Option(help="Steps that it records.")] = 3,
    compile: Annotated[bool, typer.Option("--compile", help="Profile torch.compile of each call.")] = False,
    seed: Seed = 0,
    out: Out = None,
    json: Json = False,
    time_limit: TimeLimit = None,
) -> None:
    """Check, then profile what passed: a Chrome trace and a 15-row table each, explained."""
    plan = _plan(
        workloads, implementations, mode, device, ("profile",), _default_out(out),
        seed=seed, wait=wait, warmup=warmup, active=active, compile=compile, time_limit_s=time_limit,
    )  # fmt: skip
    _run(plan, json=json, wide=False, profiles=True)


@app.command("list")
def list_command(json: Json = False) -> None:
    """Every implementation: what it takes, and why it cannot run here where it cannot."""
    from attnscope.listing import list_implementations, render_listing

    rows = list_implementations()
    _print_json(rows) if json else typer.echo(render_listing(rows, _console().width))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.jsonl...", help="Records that compare wrote.")],
    html: Annotated[Path | None, typer.Option("--html", help="Where the page goes; default beside the first.")] = None,
    ratio: Annotated[
        str | None,
        typer.Option("--ratio", help="Only this implementation against the best of its rivals, by run and suite."),
    ] = None,
    json: Json = False,
    wide: Wide = False,
) -> None:
    """Tables and the HTML page of earlier runs; needs no torch."""
    from attnscope.records import read_runs

    if html is not None and any(html.resolve() == path.resolve() for path in runs):
        _fail_usage(f"--html must not be one of the records, got {html}")
    found = [run for path in runs for run in read_runs(path)]
    if ratio is not None:
        _show_ratios(found, ratio, json=json)
        if html is not None:
            _write_page(found, html, must=True)
        return
    if json:
        from attnscope.reporting.document import run_document

        documents = [run_document(run) for run in found]
        _print_json(documents[0] if len(documents) == 1 else documents)
    else:
        for run in found:
            _show(run, json=False, wide=wide)
    _write_page(found, html or runs[0].with_name("report.html"), must=True)


@app.command()
def demo(
    open_page: Annotated[bool | None, typer.Option("--open/--no-open", help="Open the report in a browser.")] = None,
    wide: Wide = False,
) -> None:
    """Open the recorded H200 run that ships with attnscope: tables, report and traces, no GPU and no torch needed."""
    from attnscope import demo as recorded

    for run in recorded.runs():
        _show(run, json=False, wide=wide)
    typer.echo(f"report: {recorded.report_path()}\ntraces: {recorded.traces_path()}", err=True)
    if open_page if open_page is not None else sys.stdout.isatty():
        import webbrowser

        webbrowser.open(recorded.report_path().as_uri())


@app.command()
def faults(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Such as W4 A3. Default: all.")] = None,
    device: DeviceOption = None,
    write: Annotated[bool, typer.Option("--write", help="Put what was observed into known_faults.toml.")] = False,
) -> None:
    """Try publicly reported faults on this machine's implementations and say which are there."""
    from attnscope.faults_cli import faults_table

    typer.echo(faults_table(device, write, ids or ()))


@records_app.command("add")
def records_add(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.jsonl...", help="Records that compare wrote.")],
    folder: Annotated[Path, typer.Option(help="Where records are kept, one file per machine.")] = Path(
        "benchmarks/results"
    ),
    finished_only: Annotated[
        bool, typer.Option("--finished-only", help="Keep an interrupted run without the workload it was at.")
    ] = False,
) -> None:
    """Validate runs and append them to the records of their machine."""
    from attnscope.keeping import add_runs

    for path in runs:
        for line in add_runs(path, folder, finished_only=finished_only):
            typer.echo(line)


app.command()(explain)
app.command()(why)
app.command()(ladder)
app.command()(fuzz)
app.command()(tune)
app.command()(view)
app.command()(share)
app.add_typer(kernels_app, name="kernels")


def main() -> None:
    """Entry point: sentences instead of tracebacks."""
    from attnscope.errors import AttnscopeError

    signal.signal(signal.SIGTERM, _interrupt)
    never_fail_to_encode()
    try:
        code = app(standalone_mode=False)  # of a typer.Exit, which it swallows
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except AttnscopeError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:  # `attnscope list | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  what it could not write must not fail again at exit
        typer.echo(f"error: cannot go on: {error.strerror or error}", err=True)
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        typer.echo(f"error: {error.format_message()}\nhint: attnscope --help", err=True)
        sys.exit(2)


def _interrupt(number: int, frame: object) -> None:
    """A polite kill, such as a scheduler's time limit, keeps what is finished, as Ctrl-C does."""
    raise KeyboardInterrupt


def _plan(workloads: list[str] | None, *args: Any, **options: Any) -> Plan:
    from attnscope.planning import make_plan

    if ":" in args[0]:
        sys.path.insert(0, "")  # so that module:Class finds the user's own file, as `python -m` would
    implementations, mode, device, stages, out = args
    return make_plan(workloads or [], implementations, mode, device, stages, out=out, **options)


def _default_out(out: Path | None) -> Path:
    return out or Path("attnscope-out") / datetime.datetime.now().strftime("%Y-%m-%dT%H-%M-%S-%f")[:-3]


def _run(plan: Plan, *, json: bool, wide: bool, profiles: bool = False) -> None:
    from attnscope.planning import left_over
    from attnscope.spending import spent_sentence
    from attnscope.sweeping import execute, save

    with progress() as watcher:
        run = execute(plan, watcher)
    _show(run, json=json, wide=wide, profiles=profiles)
    if plan.out is not None:
        typer.echo(f"run: {save(run, plan.out)}", err=True)
        typer.echo(spent_sentence(run.results), err=True)
        _write_page([run], plan.out / "report.html", must=False)
    if (plan.budget_s or plan.after) and plan.out is not None:
        left = left_over(plan, run)
        again = f"; the same with --after {plan.out / 'run.jsonl'} and another --out goes on"
        typer.echo(f"left to do: {len(left)} workloads{again if left else ''}", err=True)
    if run.interrupted:
        typer.echo("interrupted: what was finished is above", err=True)
        raise typer.Exit(130)
    if any(result.status in ("check_failed", "failed") for result in run.results):
        raise typer.Exit(1)


def _show(run: Run, *, json: bool, wide: bool, profiles: bool = False) -> None:
    if json:
        from attnscope.reporting.document import run_json

        typer.echo(run_json(run))
        return
    from attnscope.reporting.text import print_profiles, print_run

    console = _console()
    print_run(run, console, wide=wide)
    if profiles:
        print_profiles(run, console)


def _show_ratios(runs: list[Run], name: str, *, json: bool) -> None:
    from attnscope.reporting.ratio import ratios_of
    from attnscope.reporting.ratio_suites import suites_of
    from attnscope.reporting.ratio_text import render_evidence
    from attnscope.reporting.twins import twins_of

    found, twins = ratios_of(runs, name), twins_of(runs, name)
    suites = suites_of(found)
    if json:
        _print_json({"runs": found, "suites": suites, "twins": twins})
    else:
        typer.echo(render_evidence(found, suites, twins), nl=False)


def _write_page(runs: list[Run], path: Path, *, must: bool) -> None:
    """Write report.html; without a plotting library a run goes on, and says how to make the page elsewhere."""
    from attnscope.errors import AttnscopeError, RecordError
    from attnscope.reporting.html import write_report

    try:
        write_report(runs, path)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from None
    except AttnscopeError as error:
        if must:
            raise
        typer.echo(f"no report.html: {error}", err=True)
        return
    typer.echo(f"report: {path}", err=True)


def _fail_usage(sentence: str) -> None:
    from attnscope.errors import UsageError

    raise UsageError(sentence)


@contextlib.contextmanager
def progress() -> Iterator[Watcher]:
    """A bar on stderr, and the watcher that moves it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("start", total=None)
        yield lambda step: progress.update(task, completed=step.done, total=step.total, description=step.what)


def _console() -> Any:
    from rich.console import Console

    return Console(soft_wrap=False)


def _print_json(body: object) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(body), indent=2).decode())
