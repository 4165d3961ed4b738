"""Views of the CUDA ladder's records: text, the README's table, the picture. Pure functions of LadderRun and data.

Reads LadderRun and ``benchmarks/data/article_ladder.toml``; imports no torch. Other people's figures are always named
with their card, and never enter a ratio with ours, but for the published programs on the same kind of card.
"""

from __future__ import annotations

import io
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope.ladder import CompiledKernel, LadderRow, LadderRun
from attnscope.records import to_builtins
from attnscope.units import MISSING, format_ms, format_number

ARTICLE_FILE = Path(__file__).parents[2] / "benchmarks" / "data" / "article_ladder.toml"
MARKER_BEGIN, MARKER_END = "<!-- ladder {} begin -->", "<!-- ladder {} end -->"


@dataclass(frozen=True)
class Article:
    """One source's best time of each rung, in ms."""

    card: str
    title: str
    best_ms: dict[str, float]


def read_article(direction: str, path: Path = ARTICLE_FILE) -> list[Article]:
    """Every source that has figures for a direction; empty where the file did not come along (an installed wheel)."""
    if not path.exists():
        return []
    data = tomllib.loads(path.read_text())
    return [
        Article(source["card"], source["title"], {rung: min(times) for rung, times in data[direction][key].items()})
        for key, source in data["sources"].items()
        if key in data[direction]
    ]


def to_json(run: LadderRun) -> dict[str, Any]:
    """The whole run as dicts and lists, the article's figures beside it."""
    return {
        "record": "ladder",
        "schema_version": 1,
        **to_builtins(run),
        "others": [to_builtins(article) for article in read_article(run.direction)],
    }


def render_ladder(run: LadderRun, width: int = 120) -> str:
    """The table for a terminal: each rung's best block size, its steps, its limits, other cards, then parts."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=width, record=True, file=io.StringIO())
    articles, best = read_article(run.direction), run.best()
    table = Table(title=f"{run.direction} ladder · {run.workload} · {run.device}", title_justify="left")
    for name in ("rung", "best block", "time", "step", "over first", "vs limit", "binds", "softmax alone", "of copy"):
        table.add_column(name, justify="left" if name in ("rung", "binds") else "right")
    for article in articles:
        table.add_column(article.card.removeprefix("NVIDIA "), justify="right", style="dim")
    for cells in _cells(run, best, articles):
        table.add_row(*cells)
    console.print(table)
    for row in run.rows:
        if row.reasons:
            console.print(f"{row.rung}{_at_block(row)}: {'; '.join(row.reasons)}", markup=False)
    console.print(_parts_text(best), markup=False)
    console.print(_sentences(run, best), markup=False)
    return console.export_text()


def markdown_table(run: LadderRun) -> str:
    """The README's table: one line a rung."""
    articles, best = read_article(run.direction), run.best()
    heads = ["rung", "best block", "time", "step", "over first", "vs limit", "binds", "softmax alone", "of copy"]
    heads += [article.card for article in articles]
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    lines += ["| " + " | ".join(cells) + " |" for cells in _cells(run, best, articles)]
    named = f"{run.direction}, `{run.workload}`, {run.device}; other cards' columns are other people's figures."
    untimed = [f"`{row.rung}`{_at_block(row)}: {'; '.join(row.reasons)}." for row in run.rows if row.reasons]
    return "\n".join([*lines, "", " ".join([named, *untimed])])


def write_table(run: LadderRun, path: Path) -> None:
    """Put the table between its markers in ``path``, which must hold them. Raises UsageError."""
    path.write_text(with_table(run, path.read_text(), path.name))


def with_table(run: LadderRun, text: str, name: str) -> str:
    """``text`` with the table between its markers, which it must hold. Raises UsageError."""
    from attnscope.errors import UsageError

    begin, end = MARKER_BEGIN.format(run.direction), MARKER_END.format(run.direction)
    if begin not in text or end not in text:
        raise UsageError(f"{name} must hold {begin} and {end}\nhint: put the two lines where the table belongs")
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{markdown_table(run)}\n{end}{tail}"


def draw(runs: Sequence[LadderRun], path: Path) -> None:
    """Both ladders on a logarithmic scale, ours beside other cards; the suffix of ``path`` chooses the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(runs), figsize=(7 * len(runs), 4.5), squeeze=False)
    for axis, run in zip(axes[0], runs, strict=True):
        best = run.best()
        order = list(dict.fromkeys([row.rung for row in run.rows]))
        times = [_ms(best[rung]) if rung in best else None for rung in order]
        bars = [(place, ms) for place, ms in enumerate(times) if ms is not None]
        axis.bar([place for place, _ in bars], [ms for _, ms in bars], width=0.85, label=f"attnscope, {run.device}")
        for place, ms in bars:
            inside = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom", "color": "white"}
            axis.annotate(format_ms(ms), (place, 0.02), fontsize=7, **inside)
        for article, mark in zip(read_article(run.direction), "ox^sd", strict=False):
            points = [(order.index(rung), ms) for rung, ms in article.best_ms.items() if rung in order]
            label = f"{article.title[:40]}, {article.card}"
            axis.plot([x for x, _ in points], [ms for _, ms in points], mark, linestyle="none", label=label)
        axis.set_yscale("log")
        axis.set_xticks(range(len(order)), order, rotation=30, ha="right")
        axis.set_ylabel("ms a call")
        axis.set_title(f"{run.direction} · {run.workload}", fontsize=9)
        axis.legend(fontsize=7)
        axis.set_ylim(bottom=min(ms for _, ms in bars) / 4 if bars else None)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def render_compiled(kernels: Sequence[CompiledKernel]) -> str:
    """Registers, spills, stack and shared memory of each kernel."""
    heads = ("rung", "kernel", "registers", "spills", "stack", "shared", "compiled with")
    rows = [
        (
            k.rung,
            k.kernel,
            str(k.registers),
            f"{k.spill_bytes} B",
            f"{k.stack_bytes} B",
            f"{k.shared_bytes} B",
            k.defines,
        )
        for k in kernels
    ]
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)
    )


def _ms(row: LadderRow) -> float:
    assert row.timing is not None
    return row.timing.time_ms_median


def _cells(run: LadderRun, best: dict[str, LadderRow], articles: Sequence[Article]) -> list[list[str]]:
    lines, before = [], None
    first = next(iter(best.values()), None)
    for rung in dict.fromkeys(row.rung for row in run.rows):
        others = [format_ms(article.best_ms.get(rung)) for article in articles]
        row = best.get(rung)
        if row is None:
            lines.append([rung, *[MISSING] * 8, *others])
            continue
        softmax = next((row.parts[name] for name in ("softmax", "softmax backward") if name in row.parts), None)
        lines.append(
            [
                rung,
                str(row.block_size or "its own"),
                format_ms(_ms(row)),
                MISSING if before is None else f"{format_number(before / _ms(row))} ×",
                MISSING if first is None else f"{format_number(_ms(first) / _ms(row))} ×",
                format_number(row.vs_limit),
                row.limit_term or MISSING,
                format_ms(softmax.time_ms_median if softmax else None),
                MISSING if row.softmax_vs_copy is None else f"{row.softmax_vs_copy:.0%}",
                *others,
            ]
        )
        before = _ms(row)
    return lines


def _parts_text(best: dict[str, LadderRow]) -> str:
    lines = ["parts, each alone and cold (they may add up to more than the whole):"]
    for rung, row in best.items():
        parts = ", ".join(f"{name} {format_ms(timing.time_ms_median)}" for name, timing in row.parts.items())
        lines.append(f"  {rung}{_at_block(row)} ({row.workload}): {parts}")
    return "\n".join(lines)


def _sentences(run: LadderRun, best: dict[str, LadderRow]) -> str:
    """Totals over V1, V1-fixed and V2, what the upper triangle costs, which block sizes won."""
    lines = []
    fastest = min(best.values(), key=_ms, default=None)
    if fastest is None:
        return "nothing was timed"
    for rung in ("v1", "v1_fixed", "v2"):
        if rung in best:
            lines.append(f"{fastest.rung} over {rung}: {format_number(_ms(best[rung]) / _ms(fastest))} ×")
    if run.upper_triangle_ms is not None:
        lines.append(
            f"writing zeros above the diagonal at each call would cost {format_ms(run.upper_triangle_ms)} a matrix"
        )
    lines.append(
        "best block sizes: " + ", ".join(f"{rung} {row.block_size}" for rung, row in best.items() if row.block_size)
    )
    return "\n".join(lines)


def read_run(path: Path) -> LadderRun:
    """The run that ``attnscope ladder --out`` wrote. Raises RecordError."""
    import msgspec

    from attnscope.errors import RecordError
    from attnscope.records import from_builtins

    try:
        body = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise RecordError(f"cannot read {path}: {error}\nhint: it is written by attnscope ladder --out") from None
    return from_builtins(body, LadderRun, str(path))


def _at_block(row: LadderRow) -> str:
    """``@256``; nothing where a library chooses."""
    return f"@{row.block_size}" if row.block_size else ""
