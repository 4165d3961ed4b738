"""The blocks and the picture of figures.py about one implementation of ours and its rivals, from every full GPU run.

A suite may be spread over runs; each ratio is of one run, and the newest run of a workload counts. A block is Markdown,
or None where no record holds what it needs: then nothing is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from guide_blocks import origin, table

from attnscope.errors import UnknownName, UsageError
from attnscope.records import Result, Run
from attnscope.reporting import words
from attnscope.reporting.ratio import RatioRow, geometric_mean, ratios_of
from attnscope.reporting.ratio_suites import SuiteRatios, suites_of
from attnscope.reporting.ratio_text import counted, figure_sentence, limit_sentence, ratio
from attnscope.reporting.twins import Twins, twins_of
from attnscope.suites import SUITES
from attnscope.units import MISSING, format_ms, format_us
from attnscope.workload import Workload

OURS, SUITE = "hopper", "grid"  # whose picture is drawn, over which suite
PICTURE = "hopper-grid.svg"
MOST_RIVALS = 5
RIVAL_COLORS = ("#3b78b5", "#44aa99", "#8a63c9", "#999933", "#b06a8c")
LIMIT_COLOR = "#d6417e"
USAGES = ("rivals SUITE IMPLEMENTATION DIRECTION [head]", "twins IMPLEMENTATION DIRECTION")


def published(runs: Sequence[Run]) -> list[Run]:
    """Full runs of a GPU: a quick or interrupted one is never shown."""
    return [run for run in runs if run.device.kind == "cuda" and not run.quick and not run.interrupted]


# --- blocks -----------------------------------------------------------------------------------------------------------


def rivals(runs: Sequence[Run], suite: str, name: str, direction: str, *, head: bool) -> str | None:
    """The suite's table and what it comes to; with ``head`` a heading, the picture and what it comes to."""
    found = suite_ratios(runs, suite, name, direction)
    if found is None:
        return None
    if head:
        return _head(runs, found)
    columns = [
        "workload",
        f"`{name}`",
        "best rival",
        "its time",
        "ratio",
        "sustained",
        "energy",
        "verdict",
        "host",
        "of limit",
    ]
    rows = [_cells(row) for row in found.rows]
    shapes = f"Suite `{suite}`, {direction}, {found.shapes} of {found.workloads} shapes."
    told = "Ratios are the best rival's figure over its own: above 1 it is better."
    return "\n".join([table(columns, rows), "", f"{shapes} {told} {_origins(runs, found)}", "", *_totals(found)])


def _cells(row: RatioRow) -> list[str]:
    return [
        f"`{row.workload}`", format_ms(row.time_ms), f"`{row.rival}`", format_ms(row.rival_time_ms), ratio(row.ratio),
        ratio(row.sustained_ratio, row.sustained_rival, row.rival),
        ratio(row.energy_ratio, row.energy_rival, row.rival),
        row.verdict or "not recorded", format_us(row.host_us), words.format_ratio(row.vs_limit),
    ]  # fmt: skip


def _totals(found: SuiteRatios) -> list[str]:
    lines = [
        f"- {word}: {figure_sentence(figure, found.shapes)}"
        for word, figure in (("isolated", found.isolated), ("sustained", found.sustained), ("energy", found.energy))
    ]
    lines.append("- verdicts: " + ", ".join(f"{count} {word}" for word, count in found.verdicts.items()))
    lines += [f"- of the limit, bound by {limit_sentence(share)}" for share in found.limits]
    lines += [f"- slower: {'; '.join(found.slower)}"] if found.slower else []
    lines += [f"- host: median {format_us(found.host_us_median)}, at most {format_us(found.host_us_most)}"] * bool(
        found.host_us_median
    )
    lines += [f"- without {words.clean(who)}: {counted(where, found.shapes)}" for who, where in found.absent.items()]
    lines += [f"- no ratio: {workload}: {words.clean(why)}" for workload, why in found.without.items()]
    return lines + ([f"- not run: {counted(found.missing, found.workloads)}"] if found.missing else [])


def _head(runs: Sequence[Run], found: SuiteRatios) -> str:
    """What the README shows of the suite."""
    lines = [f"## `{found.implementation}`: our attention beside its rivals", ""]
    if (found.implementation, found.suite, found.direction) == (OURS, SUITE, "forward"):
        told = "useful TFLOP/s over the sequence length, by head dim and mask, with the limit"
        lines += [f"![{told}](docs/pictures/{PICTURE})", ""]
    lines += [_by_length(found), ""]
    figures = [
        f"{ratio(figure.geometric_mean)} {word} (worst {ratio(figure.worst)}, against `{figure.worst_rival}` on "
        f"`{figure.worst_workload}`)"
        for word, figure in (("isolated", found.isolated), ("sustained", found.sustained), ("joules", found.energy))
        if figure is not None
    ]
    return "\n".join([
        *lines,
        f"Against the best rival on {found.shapes} shapes (suite `{found.suite}`, {found.direction}), geometric "
        f"means of the rival's figure over its own: {', '.join(figures)}. {_origins(runs, found)}",
    ])  # fmt: skip


def _by_length(found: SuiteRatios) -> str:
    """A line a head dim and mask, a column a length: the isolated and the sustained ratio."""
    rows = {Workload.parse(row.workload): row for row in found.rows}
    lengths = sorted({w.S for w in rows})
    cells: dict[str, dict[int, str]] = {}
    for w, row in rows.items():
        mask = "full" if w.causal is None else "causal"
        cells.setdefault(f"{_column(w)}, {mask}", {})[w.S] = f"{row.ratio:.2f} / {_short(row.sustained_ratio)}"
    head = ["isolated / sustained", *map(_length, lengths)]
    return table(head, [[title, *(at.get(length, MISSING) for length in lengths)] for title, at in cells.items()])


def _short(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def twins(runs: Sequence[Run], name: str, direction: str) -> str | None:
    """What masks and biases add to a workload's time, and fp16 beside bf16."""
    found = [made for made in twins_of(published(runs), name) if made.direction == direction]
    if not found:
        return None
    rows = [
        [f"`{row.workload}`", format_ms(row.time_ms), format_ms(row.twin_time_ms), ratio(row.ratio),
         ratio(row.sustained_ratio)]
        for made in found for row in made.rows
    ]  # fmt: skip
    head = ["workload", f"`{name}`", "its twin", "ratio", "sustained"]
    lines = [
        table(head, rows),
        "",
        "A twin is the same without mask or bias, of an fp16 workload the same in bf16.",
        "",
    ]
    return "\n".join([*lines, *map(_twins_line, found)])


def _twins_line(made: Twins) -> str:
    return (
        f"- `{made.what}`, {made.device}: geometric mean {ratio(made.geometric_mean)} "
        f"(sustained {ratio(made.geometric_mean_sustained)}), at most {ratio(made.worst)} "
        f"(sustained {ratio(made.worst_sustained)})"
    )


def suite_ratios(runs: Sequence[Run], suite: str, name: str, direction: str) -> SuiteRatios | None:
    """The suite's ratios on the card of the newest run that holds any; None without.

    Raises:
        UnknownName: there is no such suite.
        UsageError: there is no such direction.
    """
    if suite not in SUITES:
        raise UnknownName("suite", suite, SUITES)
    if direction not in words.DIRECTIONS:
        raise UsageError(f"direction must be forward or backward, got {direction!r}")
    full = [run for run in published(runs) if any(result.implementation == name for result in run.results)]
    found = suites_of(ratios_of(full, name)) if full else []
    held = [made for made in found if (made.suite, made.direction) == (suite, direction) and made.shapes]
    return max(held, key=lambda made: made.runs[-1], default=None)


def _origins(runs: Sequence[Run], found: SuiteRatios) -> str:
    """One sentence a run: card, date and the versions of what stood beside each other."""
    used = [run for run in published(runs) if run.created in found.runs and str(run.device) == found.device]
    return " ".join(dict.fromkeys(f"{origin(run)[:-1]}{_versions(run)}." for run in used))


def _versions(run: Run) -> str:
    told = [f"cuDNN {run.environment.cudnn_loaded}"] if run.environment.cudnn_loaded else []
    packages = run.environment.packages.items()
    told += [f"{name} {version}" for name, version in packages if name.startswith(("triton", "flash"))]
    return "".join(f", {one}" for one in told)


# --- the picture ------------------------------------------------------------------------------------------------------


def picture_data(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Panels by heads and head dims (columns) and mask (rows), in each a line an implementation over the length."""
    if (found := suite_ratios(runs, SUITE, OURS, "forward")) is None:
        return None
    newest = sorted(published(runs), key=lambda run: run.created, reverse=True)
    told = {row.workload for row in found.rows}
    by_workload: dict[Workload, list[Result]] = {}
    for workload in (w for w in SUITES[SUITE] if str(w) in told):
        run = next(r for r in newest if str(r.device) == found.device and _holds(r, str(workload)))
        by_workload[workload] = run.for_workload(str(workload))
    names = _names(by_workload)
    panels: dict[str, Any] = {}
    for workload, results in by_workload.items():
        panel = panels.setdefault(_column(workload), {"full": {}, "causal": {}})
        lines = panel["causal" if workload.causal else "full"]
        for result in words.ranked(results, "forward"):
            rate = result.forward.tflop_per_s if result.forward else None
            if result.implementation in names and rate is not None:
                lines.setdefault(result.implementation, []).append([workload.L, rate])
        limit = words.limit_of(results, "forward")
        if limit is not None:
            lines.setdefault("limit", []).append([workload.L, workload.flops("forward") / limit[0] / 1e9])
    return {"device": found.device, "names": names, "panels": panels}


def _holds(run: Run, workload: str) -> bool:
    """Whether the run has the workload's ratio: ours and a rival, both with a time."""
    ranked = words.ranked(run.for_workload(workload), "forward")
    return any(r.implementation == OURS for r in ranked) and any(not r.ours for r in ranked)


def _names(by_workload: dict[Workload, list[Result]]) -> list[str]:
    """Ours, then the rivals that come nearest to each workload's fastest, most of them first."""
    behind: dict[str, list[float]] = {}
    for results in by_workload.values():
        ranked = [r for r in words.ranked(results, "forward") if not r.ours]
        best = ranked[0].forward.time_ms_median if ranked and ranked[0].forward else 1.0
        for result in ranked:
            if result.forward is not None:
                behind.setdefault(result.implementation, []).append(result.forward.time_ms_median / best)
    rank = sorted(behind, key=lambda name: (geometric_mean(behind[name]) or 0.0, name))
    return [OURS, *rank[:MOST_RIVALS]]


def _column(w: Workload) -> str:
    dims = f"D {w.D}" if w.D == w.D_v else f"D {w.D}/{w.D_v}"
    return dims if w.H == w.H_kv else f"{dims}, {w.H}/{w.H_kv} heads"


def draw_grid(figure: Any, data: dict[str, Any], ours_color: str, ink: str) -> None:
    """A row of panels a mask, a column a head dim, one scale of TFLOP/s."""
    panels = data["panels"]
    lengths = {title: sorted({at for lines in panel.values() for line in lines.values() for at, _ in line})
               for title, panel in panels.items()}  # fmt: skip
    widths = [max(1.6, len(lengths[title])) for title in panels]
    axes = figure.subplots(2, len(panels), sharey=True, squeeze=False, width_ratios=widths)
    colors = dict(zip(data["names"], (ours_color, *RIVAL_COLORS), strict=False))
    handles: dict[str, Any] = {}
    for column, (title, panel) in enumerate(panels.items()):
        for row, mask in enumerate(("full", "causal")):
            place = axes[row][column]
            for name in reversed([*data["names"], "limit"]):
                line = sorted(panel[mask].get(name, ()))
                if line:
                    handles[name] = _draw_line(place, name, line, colors)
            place.set_xscale("log", base=2)
            place.set_xlim(lengths[title][0] * 0.75, lengths[title][-1] / 0.75)
            place.set_xticks(lengths[title], [_length(at) for at in lengths[title]] if row else [])
            place.minorticks_off()
            place.grid(axis="y", color=ink, alpha=0.25, lw=0.6)
            if not row:
                place.set_title(title, fontsize=10, color=ink)
        axes[1][column].set_xlabel("L = S")
    for row, mask in enumerate(("full", "causal")):
        axes[row][0].set_ylabel(f"{mask}, TFLOP/s")
    axes[0][0].set_ylim(bottom=0)
    shown = [name for name in (*data["names"], "limit") if name in handles]
    figure.legend(
        [handles[name] for name in shown], [f"{name} (ours)" if name == OURS else name for name in shown],
        loc="outside upper center", ncols=len(shown), frameon=False, labelcolor=ink, fontsize=9.5,
    )  # fmt: skip


def _draw_line(axes: Any, name: str, line: list[list[float]], colors: dict[str, str]) -> Any:
    x, y = zip(*line, strict=True)
    if name == "limit":
        return axes.plot(x, y, ":", color=LIMIT_COLOR, lw=1.6)[0]
    width, size = (2.6, 5) if name == OURS else (1.4, 3.5)
    return axes.plot(x, y, "-o", color=colors[name], lw=width, ms=size)[0]


def _length(at: int) -> str:
    return f"{at // 1024}k" if at >= 1024 else str(at)
