"""Stage 7: one self-contained HTML page of one or more runs.

Reads Run and everything in it, writes the page. Must import neither torch nor a stage. The page loads nothing: Plotly's
script travels inside it, compressed, and is inflated by the browser; everything it draws also stands in tables.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from attnscope.errors import AttnscopeError, first_line
from attnscope.records import Finding, Profile, Result, Run
from attnscope.reporting import charts, facts, words
from attnscope.units import MISSING, format_us, significant

MAX_PAGE_BYTES = 5_000_000
NAME_WIDTH = 300  # of a kernel's name in a table; the trace holds it whole
OP_ROWS = 15
CARDS_UP_TO = 4  # workloads; more are told in a table
FULL, PACKED, NO_KERNEL_TABLES, NO_PROFILES, BARE = LEVELS = range(5)  # PACKED: as FULL, its figures compressed
LEFT_OUT = {
    NO_KERNEL_TABLES: "To stay below 5 MB this page leaves out the kernels' tables; the timelines hold them.",
    NO_PROFILES: "To stay below 5 MB this page leaves out the profiles; a page of fewer workloads holds them.",
    BARE: "To stay below 5 MB this page leaves out the profiles and charts; a page of fewer workloads holds them.",
}


@dataclass
class _Figures:
    """The figures of the page, by the id of the chart that shows them."""

    by_id: dict[str, list[charts.Figure]] = field(default_factory=dict)

    def add(self, chart: charts.Chart) -> dict[str, Any]:
        name = f"chart-{len(self.by_id)}"
        self.by_id[name] = [view.figure for view in chart.views]
        return {
            "id": name,
            "title": chart.title,
            "caption": chart.caption,
            "labels": [view.label for view in chart.views],
            "legend": chart.legend,
            "height": max(view.figure["layout"]["height"] for view in chart.views),
        }


def write_report(runs: Sequence[Run], path: Path, *, traces_dir: Path | None = None) -> None:
    """Write one page about ``runs`` to ``path``, whole or not at all; at most 5 MB.

    Traces are linked where their files exist: ``Profile.trace`` is looked up below ``traces_dir`` (the folder that
    holds ``traces/``), by default the page's own folder.

    Raises:
        AttnscopeError: plotly is not installed.
        OSError: the file cannot be written.
    """
    page = render_report(runs, traces_from=traces_dir or path.parent, page_dir=path.parent).encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(page)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def render_report(runs: Sequence[Run], *, traces_from: Path | None = None, page_dir: Path = Path()) -> str:
    """The page as text. Where it would exceed 5 MB it says less, and says so. Raises AttnscopeError without plotly."""
    script = plotly_script()
    for level in LEVELS:
        page = _render(runs, script, level, functools.partial(_trace_link, traces_from, page_dir))
        if len(page.encode()) <= MAX_PAGE_BYTES:
            break
    return page


@functools.cache
def plotly_script() -> str:
    """Plotly's script, gzip and base64. Raises AttnscopeError where plotly is not installed or broken."""
    try:
        from plotly.offline import get_plotlyjs
    except Exception as error:  # a broken install raises all kinds
        absent = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("plotly")
        cause = "is not installed" if absent else f"does not import here: {first_line(error)}"
        raise AttnscopeError(
            f"the HTML report draws its charts with plotly, which {cause}\n"
            "hint: pip install 'attnscope[report]', or make the page elsewhere: attnscope report run.jsonl"
        ) from None
    return _packed(get_plotlyjs())


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def script_json(value: object) -> str:
    """JSON that cannot end the script element it stands in, nor hold a number that JSON lacks."""
    text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _render(runs: Sequence[Run], script: str, level: int, link: Any) -> str:
    figures = _Figures()
    body = [_run_view(run, number, level, figures, link) for number, run in enumerate(runs)]
    drawn = script_json(figures.by_id)
    loader = PackageLoader("attnscope.reporting", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        runs=body,
        left_out=LEFT_OUT.get(level),
        figures=Markup(_packed(drawn) if level >= PACKED else drawn),
        packed=level >= PACKED,
        plotly=Markup(script if figures.by_id else ""),
        css=Markup(loader.get_source(environment, "report.css")[0]),
        js=Markup(loader.get_source(environment, "report.js")[0]),
    )


def _run_view(run: Run, number: int, level: int, figures: _Figures, link: Any) -> dict[str, Any]:
    workloads = [
        _workload_view(run, workload, f"w{number}-{i}", level, figures, link)
        for i, workload in enumerate(run.workloads)
    ]
    return {
        "device": str(run.device),
        "device_line": facts.device_line(run),
        "run_line": facts.run_line(run),
        "quick": run.quick,
        "interrupted": run.interrupted,
        "gpu": run.device.kind != "cpu",
        "workloads": workloads,
        "cards": len(workloads) <= CARDS_UP_TO,
        "modes": [mode for mode in words.DIRECTIONS if mode in run.modes],
        "environment": facts.environment_facts(run),
        "limits": facts.limits_facts(run.limits) if run.limits else [],
        "limits_source": run.limits.source if run.limits else "",
    }


def _workload_view(run: Run, workload: str, name: str, level: int, figures: _Figures, link: Any) -> dict[str, Any]:
    results = run.for_workload(workload)
    modes = [mode for mode in words.DIRECTIONS if mode in run.modes]
    drawn = charts.workload_charts(results, modes) if level < BARE else []
    profiles = [view for r in results for view in _profile_views(r, level, link)] if level < NO_PROFILES else []
    return {
        "id": name,
        "workload": workload,
        "headlines": [_headline(results, mode) for mode in modes],
        "charts": [figures.add(chart) for chart in drawn],
        "tables": [_time_table(results, mode) for mode in modes if any(r.measurement(mode) for r in results)],
        "summary": [_summary_row(r) for r in results if words.was_run(r)],
        "errors": [row for r in results for row in _error_rows(r)],
        "findings": [_finding_view(f) for f in words.findings_of(results)],
        "overlap": words.overlap_sentence(words.findings_of(results)),
        "wrong": words.wrong_lines(results),
        "failed": words.failed_lines(results),
        "notes": words.note_lines(results),
        "skipped": words.skipped_lines(results),
        "profiles": profiles,
        "counted": words.KERNEL_WORDS.get(run.device.kind, "kernels"),
    }


def _headline(results: Sequence[Result], direction: str) -> dict[str, Any]:
    order = words.ranked(results, direction)
    sentence = words.fastest_sentence(results, direction)
    best = order[0] if order else None
    return {
        "direction": direction,
        "name": words.display_name(best) if best else MISSING,
        "time": words.COLUMNS[0].cell(m) if best and (m := best.measurement(direction)) else MISSING,
        "more": sentence.split("; ")[1:] if sentence else ["nothing right was timed"],
        "ours": bool(best and best.ours),
    }


def _summary_row(result: Result) -> dict[str, Any]:
    check = result.check
    return {
        "name": words.display_name(result),
        "ours": result.ours,
        "status": words.status_word(result),
        "bad": result.status in ("check_failed", "failed"),
        "error": words.format_error(check.row_rel_error_max if check else None),
        "budget": words.format_error(check.error_budget if check else None),
        "nearest": words.nearest_tensor(check) if check else MISSING,
        "heads": f"{check.heads_checked} of {check.heads_total}" if check else MISSING,
        "deterministic": _deterministic(result),
        "counts": [words.format_count(words.kernels_per_call(result, d)) for d in words.DIRECTIONS],
    }


def _deterministic(result: Result) -> str:
    claimed = result.check.deterministic if result.check else {}
    return ", ".join(f"{name}: {'yes' if holds else 'no'}" for name, holds in claimed.items()) or MISSING


def _time_table(results: Sequence[Result], direction: str) -> dict[str, Any]:
    columns = words.columns_of(results, direction)
    order = words.ranked(results, direction)
    rows = [
        {
            "name": words.display_name(r),
            "ours": r.ours,
            "best": bool(order) and order[0] is r,
            "cells": [column.cell(m) for column in columns],
        }
        for r in results
        if (m := r.measurement(direction))
    ]
    return {"direction": direction, "columns": columns, "rows": rows, "limit": words.limit_sentence(results, direction)}


def _error_rows(result: Result) -> Iterator[dict[str, Any]]:
    for t in result.check.tensors if result.check else ():
        ratio = words.error_ratio(t)
        yield {
            "name": words.display_name(result),
            "tensor": t.tensor,
            "kind": t.kind,
            "error": words.format_error(t.row_rel_error_max),
            "budget": words.format_error(t.error_budget),
            "ratio": significant(ratio, 2) if ratio is not None else MISSING,
            "slope": words.format_error(t.slope),
            "rms": significant(t.rms_ratio, 3) if t.rms_ratio is not None else MISSING,
            "worst": t.worst or MISSING,
            "passed": t.passed,
            "message": t.message,
        }


def _finding_view(finding: Finding) -> dict[str, Any]:
    return {
        "finding": finding,
        "who": " ".join(filter(None, (finding.implementation, finding.direction))),
        "saving": format_us(finding.saving_us) if finding.saving_us is not None else None,
    }


def _profile_views(result: Result, level: int, link: Any) -> Iterator[dict[str, Any]]:
    for profile in result.profiles:
        kernels = words.kernels_of(result, profile.direction)
        shown = kernels if level < NO_KERNEL_TABLES else []
        yield {
            "title": f"{words.display_name(result)}, {profile.direction}",
            "facts": facts.profile_facts(profile),
            "ops": _op_rows(profile),
            "kernels": [
                {
                    "start": format_us(k.start_us),
                    "time": format_us(k.duration_us),
                    "role": k.role,
                    "color": charts.role_color(k.role),
                    "unit": k.unit,
                    "rule": k.unit_rule,
                    "op": k.op if k.op and k.op != k.name else MISSING,
                    "name": words.shorten(words.clean(k.name), NAME_WIDTH),
                }
                for k in shown
            ],
            "beside": [
                {"row": row, "time": format_us(row.us) if row.us is not None else ""}
                for row in facts.beside(profile, kernels)
            ],
            "surprises": profile.surprises,
            "trace": profile.trace,
            "href": link(profile.trace),
        }


def _op_rows(profile: Profile) -> list[dict[str, str]]:
    gpu = profile.gpu_us_per_call is not None
    return [
        {
            "name": words.shorten(words.clean(row.name), NAME_WIDTH),
            "self_cpu": format_us(row.self_cpu_us),
            "cpu": format_us(row.cpu_us / max(row.calls, 1)),
            "self_gpu": format_us(row.self_gpu_us) if gpu else MISSING,
            "gpu": format_us(row.gpu_us / max(row.calls, 1)) if gpu else MISSING,
            "calls": str(row.calls),
        }
        for row in sorted(profile.table, key=words.by_gpu_time)[:OP_ROWS]
    ]


def _trace_link(traces_from: Path | None, page_dir: Path, trace: str | None) -> str | None:
    """The trace's path relative to the page, where the file exists."""
    if trace is None or traces_from is None or not (traces_from / trace).is_file():
        return None
    return quote(Path(os.path.relpath(traces_from / trace, page_dir)).as_posix())
