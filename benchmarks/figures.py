"""Write the README's and the documentation's tables and pictures from benchmarks/results/*.jsonl.

Tables stand between ``<!-- generated: NAME -->`` and ``<!-- end generated -->``, where NAME is

* ``article``: the article's table, with the article's own figures from benchmarks/data/article_a100.toml beside ours;
* ``times SUITE DIRECTION``: a suite's median times, the fastest of each workload in bold;
* ``findings SUITE``: what the explanations found; ``limits`` and ``environment``: of the newest GPU run;
* ``terminal SUITE``: what ``attnscope compare SUITE`` printed, ``terminal SUITE head`` without its notes;
* ``rivals SUITE IMPLEMENTATION DIRECTION [head]``, ``twins IMPLEMENTATION DIRECTION``: rival_figures.py;
* ``counters``: what Nsight Compute counted, from counters-*.json: counters.py;
* one of guide_blocks.py, about the article's workload.

Blocks of another command (``checking``: tests/checking_numbers.py) are left as they are.

``--check`` writes nothing and exits 1 where a file is not what this would write. Running it twice changes nothing: a
picture is drawn anew only when the numbers in it, whose digest it carries, have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeError, UnknownName, UsageError
from attnscope.records import Result, Run, read_runs
from attnscope.reporting import charts, facts, words
from attnscope.suites import SUITES
from attnscope.units import MISSING, format_ms, format_us, significant

sys.path.insert(0, str(Path(__file__).parent))  # a test loads this file by its path
import counters
import guide_blocks
import rival_figures
from guide_blocks import Source, cell, origin
from guide_blocks import table as markdown_table

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = ("checking", "ladder", "savings", "trace")  # blocks that other commands write
BLOCK = re.compile(r"(<!-- generated: ([^>]+?) -->\n)(.*?)(<!-- end generated -->)", re.DOTALL)
INK = "#7d8590"  # reads on white and on black: the pictures' ground is transparent
OURS_COLOR, RIVAL_COLOR, ARTICLE_COLOR = "#d1701f", "#3b78b5", "#b8bec6"
ROLE_INKS = {
    "--role-fused": "#44aa99", "--role-scores": "#5a4fcf", "--role-values": "#88bbee", "--role-matmul": "#5f6fc4",
    "--role-softmax": "#ddaa33", "--role-scale": "#2f8f4f", "--role-mask": "#cc6677", "--role-copy": "#aa3377",
    "--role-cast": "#999933", "--role-reduction": "#aa66bb", "--role-other": "#9aa1aa",
    "--role-softmax-2": "#e3c98a", "--role-mask-2": "#e0a5ae", "--role-copy-2": "#c48bb0", "--role-scale-2": "#8fc7a0",
}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A picture: its file's name, the numbers in it, and how to draw them onto a figure."""

    name: str
    data: Any
    draw: Callable[[Any, Any], None]
    height: float
    width: float = 8

    @property
    def digest(self) -> str:
        """Changes with the numbers, not with the drawing library's version."""
        return hashlib.sha256(json.dumps(self.data, sort_keys=True).encode()).hexdigest()[:16]


# --- records ----------------------------------------------------------------------------------------------------------


def load_runs(folder: Path) -> list[Run]:
    """Every recorded run, newest first."""
    runs = [run for path in sorted(folder.glob("*.jsonl")) for run in read_runs(path)]
    return sorted(runs, key=lambda run: run.created, reverse=True)


def load_article(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "benchmarks" / "data" / "article_a100.toml").read_text())


def find_run(runs: Sequence[Run], workload: str, direction: str = "forward") -> Run | None:
    """The newest full GPU run that timed the workload; a quick or interrupted one is never published.

    One that profiled it comes before any that did not, so that times and kernels told beside each other are of one run.
    """
    full = [run for run in runs if run.device.kind == "cuda" and not run.quick and not run.interrupted]
    timed = [run for run in full if any(r.measurement(direction) for r in run.for_workload(workload))]
    return next((run for run in timed if any(r.profiles for r in run.for_workload(workload))), next(iter(timed), None))


# --- tables -----------------------------------------------------------------------------------------------------------


def make_block(name: str, runs: Sequence[Run], article: dict[str, Any], root: Path = ROOT) -> str | None:
    """The Markdown of a block, or None where no record holds what it needs. Raises UsageError for an unknown name."""
    kind, *arguments = name.split()
    if kind == "article" and not arguments:
        return article_table(runs, article)
    if kind == "times" and len(arguments) == 2:
        return times_table(runs, suite_workloads(arguments[0]), arguments[1])
    if kind == "findings" and len(arguments) == 1:
        return findings_list(runs, suite_workloads(arguments[0]))
    if kind in ("limits", "environment") and not arguments:
        return facts_table(runs, kind, article["workload"])
    if kind == "terminal" and arguments[1:] in ([], ["head"]) and arguments:
        return terminal_block(runs, article, arguments[0], head=len(arguments) == 2)
    if kind == "rivals" and len(arguments) in (3, 4) and arguments[3:] in ([], ["head"]):
        return rival_figures.rivals(runs, *arguments[:3], head=len(arguments) == 4)
    if kind == "twins" and len(arguments) == 2:
        return rival_figures.twins(runs, *arguments)
    if kind == "counters" and not arguments:
        return counters.block(root / "benchmarks" / "results")
    if kind in guide_blocks.BLOCKS:
        return guide_blocks.make(kind, arguments, make_source(runs, article["workload"], article, root))
    known = (
        "article", "times SUITE DIRECTION", "findings SUITE", "limits", "environment", "terminal SUITE [head]",
        "counters",
        *rival_figures.USAGES, *guide_blocks.USAGES,
    )  # fmt: skip
    raise UsageError(f"a generated block must be one of {', '.join(known)}, got {name!r}")


def make_source(runs: Sequence[Run], workload: str, article: dict[str, Any], root: Path) -> Source | None:
    """The newest full GPU run of the workload; with its traces where it is the one that ships as the demo."""
    run = find_run(runs, workload)
    if run is None:
        return None
    demo = root / "src" / "attnscope" / "demo"
    shipped = read_runs(demo / "run.jsonl") if (demo / "run.jsonl").is_file() else []
    return Source(run, workload, article, demo if any(r.created == run.created for r in shipped) else None)


def terminal_block(runs: Sequence[Run], article: dict[str, Any], suite: str, *, head: bool) -> str | None:
    workloads = suite_workloads(suite)
    run = find_run(runs, workloads[0])
    if run is None or not all(run.for_workload(w) for w in workloads):
        return None
    return guide_blocks.terminal(Source(run, workloads[0], article), workloads, suite, head=head)


def suite_workloads(suite: str) -> list[str]:
    if suite not in SUITES:
        raise UnknownName("suite", suite, SUITES)
    return [str(workload) for workload in SUITES[suite]]


def article_table(runs: Sequence[Run], article: dict[str, Any]) -> str | None:
    run = find_run(runs, article["workload"])
    if run is None:
        return None
    head = ["implementation", "kernels", "GPU µs", "host µs", "TFLOP/s", "vs limit"]
    theirs = ["A100: kernels", "A100: GPU µs", "A100: host µs"]
    rows = []
    for r in (r for r in run.for_workload(article["workload"]) if r.forward is not None):
        m = r.forward
        stated = article["implementations"].get(r.implementation, {})
        rows.append([
            f"`{r.implementation}`" + (" (ours)" if r.ours else ""),
            words.format_count(words.kernels_per_call(r, "forward")),
            significant(m.time_ms_median * 1e3),
            MISSING if m.wall_us_median is None else significant(m.wall_us_median),
            MISSING if m.tflop_per_s is None else significant(m.tflop_per_s),
            words.format_ratio(m.vs_limit),
            *(MISSING if name not in stated else f"{stated[name]:g}" for name in ("kernels", "gpu_us", "host_us")),
        ])  # fmt: skip
    return "\n".join([
        markdown_table(head + theirs, rows),
        "",
        f"`{article['workload']}`, forward. {origin(run)} Columns A100 are another card, {article['device']}, "
        f"as stated by *{article['title']}* ({article['publisher']}; {article['method']}).",
    ])  # fmt: skip


def times_table(runs: Sequence[Run], workloads: Sequence[str], direction: str) -> str | None:
    """Workloads down, implementations across; each workload from the newest run that timed it."""
    if direction not in words.DIRECTIONS:
        raise UsageError(f"direction must be forward or backward, got {direction!r}")
    found = [(w, run) for w in workloads if (run := find_run(runs, w, direction))]
    if not found:
        return None
    timed = {w: [r for r in run.for_workload(w) if r.measurement(direction)] for w, run in found}
    names = list(dict.fromkeys((r.implementation, r.ours) for results in timed.values() for r in results))
    rows = []
    for workload, results in timed.items():
        best = next(iter(words.ranked(results, direction)), None)
        cells = {r.implementation: format_ms(m.time_ms_median) for r in results if (m := r.measurement(direction))}
        if best is not None:
            cells[best.implementation] = f"**{cells[best.implementation]}**"
        limit = words.limit_of(results, direction)
        bound = f"{format_ms(limit[0])}, {limit[1]}" if limit else MISSING
        rows.append([f"`{workload}`", *(cells.get(name, MISSING) for name, _ in names), bound])
    head = ["workload", *(f"{name} (ours)" if ours else name for name, ours in names), "limit"]
    origins = dict.fromkeys(origin(run) for _, run in found)
    return "\n".join([markdown_table(head, rows), "", f"Median times, {direction}. " + " ".join(origins)])


def findings_list(runs: Sequence[Run], workloads: Sequence[str]) -> str | None:
    results = [r for w in workloads if (run := find_run(runs, w)) for r in run.for_workload(w)]
    lines = []
    for f in words.findings_of(results):
        arithmetic = f" Arithmetic: {words.clean(f.arithmetic)}." if f.arithmetic else ""
        remedy = f" Remedy: `{words.clean(f.remedy)}`" if f.remedy else ""
        lines.append(f"- {words.finding_sentence(f)}{arithmetic}{remedy}")
    return "\n".join(lines) or None


def facts_table(runs: Sequence[Run], kind: str, workload: str) -> str | None:
    run = find_run(runs, workload)
    if run is None or (kind == "limits" and run.limits is None):
        return None
    found = facts.limits_facts(run.limits) if kind == "limits" and run.limits else facts.environment_facts(run)
    return markdown_table(["what", "value"], [[name, cell(value)] for name, value in found])


# --- pictures ---------------------------------------------------------------------------------------------------------


def make_pictures(runs: Sequence[Run], article: dict[str, Any]) -> list[Picture]:
    """Every picture that the records have numbers for."""
    pictures = []
    for direction in words.DIRECTIONS:
        run = find_run(runs, article["workload"], direction)
        if run is None:
            continue
        results = run.for_workload(article["workload"])
        rows = [_bar(r, direction, article) for r in results if r.measurement(direction)]
        limit = words.limit_of(results, direction)
        data = {"rows": rows, "limit_us": limit[0] * 1e3 if limit else None, "device": run.device.name}
        pictures.append(Picture(f"article-{direction}.svg", data, on_axes(draw_bars), 0.9 + 0.42 * len(rows)))
        lanes = [_lane(r, direction) for r in results if words.kernels_of(r, direction)]
        if lanes:
            pictures.append(
                Picture(f"timeline-{direction}.svg", {"lanes": lanes}, on_axes(draw_timeline), 1.3 + 0.36 * len(lanes))
            )
    if (grid := rival_figures.picture_data(runs)) is not None:
        draw = rival_figures.draw_grid
        pictures.append(
            Picture(rival_figures.PICTURE, grid, lambda f, data: draw(f, data, OURS_COLOR, INK), 5.0, width=10.5)
        )
    return pictures


def on_axes(draw: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Draws onto the one pair of axes of a figure."""
    return lambda figure, data: draw(figure.subplots(), data)


def _bar(result: Result, direction: str, article: dict[str, Any]) -> dict[str, Any]:
    m = result.measurement(direction)
    stated = article["implementations"].get(result.implementation, {}) if direction == "forward" else {}
    return {
        "name": words.display_name(result),
        "ours": result.ours,
        "us": m.time_ms_median * 1e3 if m else None,
        "article_us": stated.get("gpu_us"),
    }


def _lane(result: Result, direction: str) -> dict[str, Any]:
    events = [[k.start_us, k.duration_us, k.role] for k in words.kernels_of(result, direction)]
    return {"name": words.display_name(result), "events": events}


def draw_bars(axes: Any, data: dict[str, Any]) -> None:
    """Times on a log axis, the article's beside them, and the limit as a line."""
    rows = data["rows"]
    stated = any(row["article_us"] for row in rows)
    size = 0.36 if stated else 0.6
    for at, row in enumerate(rows):
        here = at - (size / 2 if row["article_us"] else 0)
        axes.barh(here, row["us"], size, color=OURS_COLOR if row["ours"] else RIVAL_COLOR)
        axes.annotate(format_us(row["us"]), (row["us"], here), (4, 0), textcoords="offset points", va="center")
        if row["article_us"]:
            axes.barh(at + size / 2, row["article_us"], size, color=ARTICLE_COLOR)
            axes.annotate(
                format_us(row["article_us"]), (row["article_us"], at + size / 2), (4, 0), textcoords="offset points",
                va="center", alpha=0.8,
            )  # fmt: skip
    times = [t for row in rows for t in (row["us"], row["article_us"]) if t]
    low = min([*times, data["limit_us"] or times[0]])
    axes.set_xscale("log")
    axes.set_xlim(low * 0.6, max(times) * 2.2)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("µs per call")
    handles = [axes.barh(0, 0, color=RIVAL_COLOR, label=data["device"])]
    if any(row["ours"] for row in rows):
        handles.append(axes.barh(0, 0, color=OURS_COLOR, label="ours"))
    if stated:
        handles.append(axes.barh(0, 0, color=ARTICLE_COLOR, label="the article's A100"))
    if data["limit_us"]:
        label = f"limit, {format_us(data['limit_us'])}"
        handles.append(axes.axvline(data["limit_us"], color="#d6417e", ls=":", lw=1.6, label=label))
    _legend(axes, handles)


def draw_timeline(axes: Any, data: dict[str, Any]) -> None:
    """The kernels of one call each, to one scale."""
    used: dict[str, Any] = {}
    for at, lane in enumerate(data["lanes"]):
        for start, duration, role in lane["events"]:
            bar = axes.barh(at, duration, 0.62, left=start, color=ROLE_INKS[charts.role_color(role)])
            used.setdefault(role, bar).set_label(role)
        total = sum(duration for _, duration, _ in lane["events"])
        end = lane["events"][-1][0] + lane["events"][-1][1]
        axes.annotate(format_us(total), (end, at), (4, 0), textcoords="offset points", va="center")
    end = max(lane["events"][-1][0] + lane["events"][-1][1] for lane in data["lanes"])
    axes.set_xlim(0, end * 1.1)
    axes.set_yticks(range(len(data["lanes"])), [lane["name"] for lane in data["lanes"]])
    axes.set_ylim(len(data["lanes"]) - 0.5, -0.5)
    axes.set_xlabel("µs from the call's first event")
    _legend(axes, list(used.values()))


def _legend(axes: Any, handles: list[Any]) -> None:
    axes.legend(
        handles=handles, loc="lower center", bbox_to_anchor=(0.42, 1.0), ncols=4, frameon=False, labelcolor=INK,
        fontsize=9, columnspacing=1.2, handlelength=1.2,
    )  # fmt: skip


def save_picture(picture: Picture, path: Path) -> None:
    """Draw onto a transparent ground, in an ink that reads on light and dark."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style = {
        "svg.hashsalt": picture.name, "font.size": 10, "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK,
        "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with pyplot.rc_context(style):
        figure = pyplot.figure(figsize=(picture.width, picture.height + 0.5), layout="constrained")
        picture.draw(figure, picture.data)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Description": f"data {picture.digest}"}
        figure.savefig(path, format="svg", transparent=True, metadata=metadata)
        pyplot.close(figure)


def is_current(picture: Picture, path: Path) -> bool:
    return path.is_file() and f"data {picture.digest}" in path.read_text()


# --- the command ------------------------------------------------------------------------------------------------------


def documents(root: Path) -> Iterator[Path]:
    yield from (path for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if path.is_file())


def rewrite(text: str, make: Callable[[str], str | None], missing: list[str]) -> str:
    """``text`` with its blocks made anew; a block that cannot be made stays, and its name goes to ``missing``."""

    def block(match: re.Match[str]) -> str:
        if match[2].split()[0] in ELSEWHERE:
            return match[0]
        made = make(match[2])
        if made is None:
            missing.append(match[2])
            return match[0]
        return f"{match[1]}{made}\n{match[4]}"

    return BLOCK.sub(block, text)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Exit status: 0 done or up to date, 1 with ``--check`` where something is not, 2 for a block of unknown name."""
    parser = argparse.ArgumentParser(description="Write the documentation's tables and pictures from the records.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is out of date")
    check = parser.parse_args(arguments).check
    runs = load_runs(root / "benchmarks" / "results")
    if not runs:
        print("benchmarks/results holds no records yet: every table and picture stays as it is")
        return 0
    article = load_article(root)
    try:
        stale = [*update_documents(root, runs, article, check), *update_pictures(root, runs, article, check)]
    except AttnscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for name in stale:
        print(f"{name} is out of date, run python benchmarks/figures.py" if check else f"wrote {name}")
    return 1 if check and stale else 0


def update_documents(root: Path, runs: Sequence[Run], article: dict[str, Any], check: bool) -> Iterator[str]:
    """Names of the documents that differ from what they should be; written unless ``check``."""
    for path in documents(root):
        name = path.relative_to(root).as_posix()
        missing: list[str] = []
        old = path.read_text()
        new = rewrite(old, lambda block: make_block(block, runs, article, root), missing)
        for block in missing:
            print(f"{name}: no record holds what the block {block!r} needs, it stays as it is")
        if new != old:
            if not check:
                path.write_text(new)
            yield name


def update_pictures(root: Path, runs: Sequence[Run], article: dict[str, Any], check: bool) -> Iterator[str]:
    """Names of the pictures whose numbers changed; drawn unless ``check``."""
    for picture in make_pictures(runs, article):
        path = root / "docs" / "pictures" / picture.name
        if not is_current(picture, path):
            if not check:
                save_picture(picture, path)
            yield path.relative_to(root).as_posix()


if __name__ == "__main__":
    sys.exit(main())
