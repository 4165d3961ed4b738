"""Stage 7: a run as the terminal's tables, and a profile as the article's table.

Reads Run and Profile, writes text. Must import neither torch nor a stage. Eighty columns hold the default table; text
from records is cleaned of control characters and never read as markup.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from attnscope.records import Finding, KernelEvent, Profile, Result, Run
from attnscope.reporting import facts, words
from attnscope.units import MISSING, format_ms, format_us, significant

DEFAULT_WIDTH = 80
MOST_WIDTH = 120  # longer lines read badly
PROFILE_WIDTH = 120
WIDE_WIDTH = 400  # room for all columns; a terminal may wrap or scroll them
FINDINGS_SHOWN = 4
TABLE_ROWS = 15
STATUS_STYLES = {"wrong": "bold red", "failed": "bold red", "ok": "green"}


def render_run(run: Run, *, wide: bool = False, width: int | None = None, color: bool = False) -> str:
    """The run as text: per workload a table of at most six columns, or of all with ``wide``, and what to know of it.

    ``width`` is the most characters a line may have: 80 where None (with ``wide`` as many as it takes).
    """
    return _rendered(_run_parts(run, wide), width or (WIDE_WIDTH if wide else DEFAULT_WIDTH), color)


def print_run(run: Run, console: Console, wide: bool = False) -> None:
    """Print the run as wide as the terminal; a wide table keeps its columns whatever the terminal's width."""
    width = None if wide else min(console.width, MOST_WIDTH)
    styled = console.is_terminal and not console.no_color
    console.out(render_run(run, wide=wide, width=width, color=styled), end="", highlight=False)


def render_profile(
    profile: Profile, kernels: Sequence[KernelEvent], *, width: int | None = None, color: bool = False
) -> str:
    """A profile as text: its figures, 15 rows by GPU time, the kernels in order, the expected beside the seen.

    ``kernels`` may hold both directions; those of the profile's direction are shown.
    """
    width = width or PROFILE_WIDTH
    return _rendered(_profile_parts(profile, kernels, width), width, color)


def print_profile(profile: Profile, kernels: Sequence[KernelEvent], console: Console) -> None:
    """Print what :func:`render_profile` says, as wide as the terminal."""
    styled = console.is_terminal and not console.no_color
    console.out(render_profile(profile, kernels, width=console.width, color=styled), end="", highlight=False)


def print_profiles(run: Run, console: Console) -> None:
    """Print every profile of the run, each with its kernels."""
    for result in run.results:
        for profile in result.profiles:
            console.out("")
            print_profile(profile, result.kernels, console)


def _rendered(parts: Iterable[RenderableType], width: int, color: bool) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        no_color=not color,
        highlight=False,
        legacy_windows=False,
        color_system="standard" if color else None,
        _environ={},
    )
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


# --- a run ------------------------------------------------------------------------------------------------------------


def _run_parts(run: Run, wide: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(facts.device_line(run), style="bold"), Text(facts.run_line(run), style="dim")]
    for workload in run.workloads:
        results = run.for_workload(workload)
        parts += [Text(""), Text(words.clean(workload), style="bold")]
        if any(map(words.was_run, results)):
            parts += _tables(run, results, wide)
        else:
            parts.append(Text("nothing ran on this workload"))
        parts.append(_notes(run, results))
    return parts


def _tables(run: Run, results: list[Result], wide: bool) -> list[RenderableType]:
    if not any(r.measurement(d) for r in results for d in words.DIRECTIONS):
        return [_check_table(results)]
    return _wide_tables(run, results) if wide else [_table(run, results)]


def _check_table(results: list[Result]) -> Table:
    """What there is to say where nothing was measured: the errors."""
    titles = ("error", "budget", "nearest", "heads")
    table = _bare_table(
        Column("implementation", overflow="fold"),
        Column("check", no_wrap=True),
        *[Column(title, justify="right", no_wrap=True) for title in titles],
    )
    for r in filter(words.was_run, results):
        word = words.status_word(r)
        table.add_row(
            Text(words.display_name(r), style="cyan" if r.ours else ""),
            Text(word, style=STATUS_STYLES.get(word, "yellow")),
            words.format_error(r.check.row_rel_error_max if r.check else None),
            words.format_error(r.check.error_budget if r.check else None),
            Text(words.nearest_tensor(r.check)) if r.check else MISSING,
            f"{r.check.heads_checked} of {r.check.heads_total}" if r.check else MISSING,
        )
    return table


def _table(run: Run, results: list[Result]) -> Table:
    directions = [d for d in words.DIRECTIONS if d in run.modes]
    counted = words.KERNEL_WORDS.get(run.device.kind, "kernels")
    profiled = any(words.kernels_per_call(r, d) is not None for r in results for d in directions)
    table = _bare_table(
        Column("implementation", overflow="fold", min_width=min(14, _longest(results))),
        Column("check", no_wrap=True),
        *[Column(d, justify="right", no_wrap=True) for d in directions],
        Column("vs limit", justify="right", no_wrap=True),
        *([Column(counted, justify="right", no_wrap=True)] if profiled else []),
    )
    best = {d: order[0] for d in directions if (order := words.ranked(results, d))}
    for r in filter(words.was_run, results):
        word = words.status_word(r)
        style = STATUS_STYLES.get(word, "yellow")
        limits = [m.vs_limit if (m := r.measurement(d)) else None for d in directions]
        counts = [words.kernels_per_call(r, d) for d in directions]
        table.add_row(
            Text(words.display_name(r), style="cyan" if r.ours else ""),
            Text(word, style=style),
            *[Text(_time_cell(r, d), style="bold green" if best.get(d) is r else "") for d in directions],
            _joined([words.format_ratio(value) for value in limits]),
            *([_joined([words.format_count(value) for value in counts])] if profiled else []),
        )
    return table


def _time_cell(result: Result, direction: str) -> str:
    m = result.measurement(direction)
    return MISSING if m is None else f"{format_ms(m.time_ms_median)} {words.format_noise(m.noise_fraction)}"


def _joined(cells: list[str]) -> str:
    """``forward/backward``, or one sign where both are missing."""
    return MISSING if all(cell == MISSING for cell in cells) else "/".join(cells)


def _wide_tables(run: Run, results: list[Result]) -> list[RenderableType]:
    tables: list[RenderableType] = []
    for direction in (d for d in words.DIRECTIONS if d in run.modes):
        columns = words.columns_of(results, direction)
        heads = [Column(column.title, justify="right", no_wrap=True) for column in columns]
        table = _bare_table(
            Column(direction, no_wrap=True),
            Column("check", no_wrap=True),
            Column("error", justify="right", no_wrap=True),
            Column("budget", justify="right", no_wrap=True),
            *heads,
            Column(words.KERNEL_WORDS.get(run.device.kind, "kernels"), justify="right", no_wrap=True),
        )
        for r in filter(words.was_run, results):
            m = r.measurement(direction)
            table.add_row(
                Text(words.display_name(r), style="cyan" if r.ours else ""),
                Text(words.status_word(r)),
                words.format_error(r.check.row_rel_error_max if r.check else None),
                words.format_error(r.check.error_budget if r.check else None),
                *[Text(column.cell(m)) if m else MISSING for column in columns],
                words.format_count(words.kernels_per_call(r, direction)),
            )
        tables.append(table)
    return tables


def _notes(run: Run, results: list[Result]) -> Table:
    """What stands under a table: limit, fastest, wrong and failed, findings, what did not run."""
    notes = Table.grid(Column(no_wrap=True, style="dim", min_width=8), Column(overflow="fold"), padding=(0, 2, 0, 0))
    directions = [d for d in words.DIRECTIONS if d in run.modes]
    limits = [said for d in directions if (said := words.limit_sentence(results, d))]
    fastest = [(d, said) for d in directions if (said := words.fastest_sentence(results, d))]
    found = words.findings_of(results)
    findings = [_finding(finding) for finding in words.top_findings(results, FINDINGS_SHOWN)]
    if overlap := words.overlap_sentence(found):
        findings.append(Text(overlap, style="dim"))
    if len(found) > FINDINGS_SHOWN:
        findings.append(Text(f"and {len(found) - FINDINGS_SHOWN} more in the report", style="dim"))
    for title, lines in (
        ("limit", [Text("; ".join(limits))] if limits else []),
        ("fastest", [Text.assemble(f"{direction}: ", (said, "bold")) for direction, said in fastest]),
        ("wrong", _told(words.wrong_lines(results), "red")),
        ("failed", _told(words.failed_lines(results), "red")),
        ("note", _told(words.note_lines(results))),
        ("findings", findings),
        ("skipped", _told(words.skipped_lines(results))),
    ):
        for number, line in enumerate(lines):
            notes.add_row(title if number == 0 else "", line)
    return notes


def _told(lines: list[tuple[str, str]], style: str = "") -> list[Text]:
    return [Text.assemble((who, style), f": {what}") for who, what in lines]


def _finding(finding: Finding) -> Text:
    said = Text(words.finding_sentence(finding))
    return said.append(f" Remedy: {words.clean(finding.remedy)}", style="dim") if finding.remedy else said


def _longest(results: list[Result]) -> int:
    return max((len(words.display_name(r)) for r in results if words.was_run(r)), default=0)


def _bare_table(*columns: Column) -> Table:
    return Table(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)


# --- a profile --------------------------------------------------------------------------------------------------------


def _profile_parts(profile: Profile, kernels: Sequence[KernelEvent], width: int) -> list[RenderableType]:
    events = [event for event in kernels if event.direction == profile.direction]
    figures = " · ".join(f"{name} {value}" for name, value in facts.profile_facts(profile))
    parts: list[RenderableType] = [
        Text(words.clean(profile.label), style="bold"),
        Text(figures),
        Text(""),
        _op_table(profile, max(width - 54, 16)),
    ]
    if events:
        parts += [Text(""), Text("one call, in order", style="bold"), _kernel_table(events, max(width - 50, 16))]
    if profile.expected:
        parts += [Text(""), Text("expected beside seen", style="bold"), _beside_table(profile, events)]
    parts += [Text(f"! {words.clean(said)}", style="yellow") for said in profile.surprises]
    if profile.trace:
        parts.append(Text(f"trace: {words.clean(profile.trace)}", style="dim"))
    return parts


def _op_table(profile: Profile, name_width: int) -> Table:
    table = _bare_table(
        Column("name", no_wrap=True),
        *[
            Column(title, justify="right", no_wrap=True)
            for title in ("self CPU", "CPU avg", "self GPU", "GPU avg", "calls")
        ],
    )
    for row in sorted(profile.table, key=words.by_gpu_time)[:TABLE_ROWS]:
        calls = max(row.calls, 1)
        gpu = profile.gpu_us_per_call is not None
        table.add_row(
            Text(words.kernel_title(row.name, name_width)),
            format_us(row.self_cpu_us),
            format_us(row.cpu_us / calls),
            format_us(row.self_gpu_us) if gpu else MISSING,
            format_us(row.gpu_us / calls) if gpu else MISSING,
            str(row.calls),
        )
    return table


def _kernel_table(events: list[KernelEvent], name_width: int) -> Table:
    total = sum(event.duration_us for event in events)
    table = _bare_table(
        Column("#", justify="right", no_wrap=True),
        Column("time", justify="right", no_wrap=True),
        Column("share", justify="right", no_wrap=True),
        Column("role", no_wrap=True),
        Column("unit", no_wrap=True),
        Column("op: kernel", no_wrap=True),
    )
    for number, event in enumerate(events, 1):
        share = f"{significant(100 * event.duration_us / total, 2)} %" if total else MISSING
        launched_by = "" if event.op in (None, event.name) else f"{words.clean(event.op or '')}: "
        name = launched_by + words.kernel_title(event.name, max(name_width - len(launched_by), 12))
        table.add_row(
            str(number),
            format_us(event.duration_us),
            share,
            words.clean(event.role),
            event.unit,
            words.shorten(name, name_width),
        )
    return table


def _beside_table(profile: Profile, events: list[KernelEvent]) -> Table:
    table = _bare_table(
        Column("", no_wrap=True),
        Column("expected", overflow="fold"),
        Column("seen", no_wrap=True),
        Column("time", justify="right", no_wrap=True),
    )
    for row in facts.beside(profile, events):
        mark = Text("!" if row.differs else "", style="yellow")
        table.add_row(mark, Text(row.expected), Text(row.seen), format_us(row.us) if row.us is not None else "")
    return table
