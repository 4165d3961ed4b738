"""Stage 7: the report's charts, as Plotly figures in plain dicts.

Reads Result, Measurement, KernelEvent; writes figures that the page's script draws. Must import neither torch nor a
stage, nor plotly: only :mod:`attnscope.reporting.html` needs its script. A colour is the name of a CSS variable,
``var(--accent)``, which the page resolves for its theme. Text from records is escaped, since Plotly reads some HTML.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnscope.records import KernelEvent, Measurement, Result, TensorCheck
from attnscope.reporting import words
from attnscope.units import format_ms, format_us, significant

Figure = dict[str, Any]
ROW_PX = 30
AXIS_PX = 66
VALUE_PX = 7.2  # of a letter in the column of values right of the bars
LABEL_WIDTH = 22
RATIO_FLOOR = 1e-4  # an error of exactly 0 stands here on the log axis
TENSOR_COLORS = {
    "out": "--tone-1", "lse": "--tone-2", "dq": "--tone-3", "dk": "--tone-4", "dv": "--tone-5", "dbias": "--tone-6",
    "dsinks": "--tone-7",
}  # fmt: skip
KIND_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "star")
KIND_SIGNS = dict(zip(KIND_SYMBOLS, "●◆■▲✕★", strict=True))
# First match wins. Roles of one family share a hue; what only moves data is red to purple.
ROLE_COLORS = (
    ("fused attention", "--role-fused"), ("scores matmul", "--role-scores"), ("values matmul", "--role-values"),
    ("matmul", "--role-matmul"), ("safe softmax", "--role-softmax-2"), ("softmax backward", "--role-softmax-2"),
    ("softmax", "--role-softmax"), ("elementwise", "--role-scale-2"), ("scale", "--role-scale"),
    ("mask building", "--role-mask-2"), ("mask", "--role-mask"), ("layout copy", "--role-copy-2"),
    ("KV repeat", "--role-copy-2"), ("copy", "--role-copy"), ("cast", "--role-cast"), ("reduc", "--role-reduction"),
)  # fmt: skip


@dataclass(frozen=True)
class View:
    """One figure of a chart, with the word on its button where a chart has several."""

    label: str
    figure: Figure


@dataclass(frozen=True)
class Key:
    """One entry of a chart's legend: a colour, or a sign, and what it means."""

    meaning: str
    color: str | None = None
    sign: str | None = None


@dataclass(frozen=True)
class Chart:
    """A chart: its title, what to read in it, its views and legend."""

    title: str
    caption: str
    views: tuple[View, ...]
    legend: tuple[Key, ...] = field(default=())


def workload_charts(results: Sequence[Result], modes: Sequence[str]) -> list[Chart]:
    """Every chart of one workload that has something to show, in the page's order."""
    made: list[Chart | None] = [speed_chart(results, mode) for mode in words.DIRECTIONS if mode in modes]
    made += [timeline_chart(results, modes), error_chart(results), memory_chart(results, modes)]
    made.append(energy_chart(results, modes))
    return [chart for chart in made if chart is not None]


def speed_chart(results: Sequence[Result], direction: str) -> Chart | None:
    """Bars of a direction's speed with noise, the sustained figure, and the limit; and the same as times."""
    rows = _measured(results, direction)
    if not rows:
        return None
    views = (View("speed", _speed_figure(rows, direction)), View("time", _time_figure(rows, direction)))
    limit = words.limit_sentence(results, direction)
    keys = [Key("isolated call, whiskers p20 to p80", color="--accent")]
    if any(r.ours for r, _ in rows):
        keys.append(Key("ours", color="--ours"))
    if any(m.sustained_ms_median for _, m in rows):
        keys.append(Key("sustained, one-second blocks", sign="◇"))
    if limit:
        keys.append(Key("limit of this device", sign="┆"))
    caption = f"Limit: {limit}." if limit else "No limit was measured."
    return Chart(f"{direction.capitalize()} speed", caption, views, tuple(keys))


def _speed_figure(rows: list[tuple[Result, Measurement]], direction: str) -> Figure:
    """Work per time: longer is better and the limit is a ceiling. Calls per ms where no FLOPs are named."""
    known = all(m.tflop_per_s for _, m in rows)

    def rate(m: Measurement, ms: float) -> float:
        return (m.tflop_per_s or 0.0) * m.time_ms_median / ms if known else 1.0 / ms

    figure = _rate_figure(rows, rate, "useful TFLOP/s" if known else "calls per ms")
    figure["layout"]["xaxis"]["rangemode"] = "tozero"
    return figure


def _time_figure(rows: list[tuple[Result, Measurement]], direction: str) -> Figure:
    figure = _rate_figure(rows, lambda _, ms: ms * 1e3, "time per call, log scale")
    axis = figure["layout"]["xaxis"]
    shown = [t * 1e3 for _, m in rows for t in (m.time_ms_p20, m.time_ms_p80, m.limit_ms) if t]
    axis.update(type="log", range=_log_range(shown))
    ticks = _log_ticks(*axis["range"])
    axis.update(tickmode="array", tickvals=ticks, ticktext=[_short_time(tick) for tick in ticks])
    for shape, note in zip(figure["layout"]["shapes"], _limit_notes(figure), strict=True):
        note["x"] = math.log10(shape["x0"])
    return figure


def _rate_figure(
    rows: list[tuple[Result, Measurement]], value: Callable[[Measurement, float], float], axis: str
) -> Figure:
    middle = [value(m, m.time_ms_median) for _, m in rows]
    ends = [sorted((value(m, m.time_ms_p20), value(m, m.time_ms_p80))) for _, m in rows]
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": middle,
        "y": list(range(len(rows))),
        "width": 0.62,
        "marker": {"color": [_bar_color(r) for r, _ in rows], "line": {"width": 0}},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - mid for mid, (_, high) in zip(middle, ends, strict=True)],
            "arrayminus": [mid - low for mid, (low, _) in zip(middle, ends, strict=True)],
            "color": "var(--text)",
            "thickness": 1.2,
            "width": 3,
        },
        "hovertext": [_speed_hover(r, m) for r, m in rows],
        "hoverinfo": "text",
    }
    lasting = [(i, value(m, m.sustained_ms_median)) for i, (_, m) in enumerate(rows) if m.sustained_ms_median]
    marks = {
        "type": "scatter",
        "mode": "markers",
        "x": [x for _, x in lasting],
        "y": [i for i, _ in lasting],
        "marker": {
            "symbol": "diamond", "size": 8, "color": "var(--surface)", "line": {"color": "var(--text)", "width": 1.4}
        },
        "hovertext": [f"sustained {format_ms(rows[i][1].sustained_ms_median)}" for i, _ in lasting],
        "hoverinfo": "text",
    }  # fmt: skip
    figure = _row_figure([r for r, _ in rows], [bars, marks] if lasting else [bars], axis)
    _add_values(figure, [format_ms(m.time_ms_median) for _, m in rows])
    limited = next((m for _, m in rows if m.limit_ms), None)
    if limited is not None and limited.limit_ms is not None:
        top = max(middle + [high for _, high in ends])
        _add_limit(figure, value(limited, limited.limit_ms), limited.limit_ms, top, len(rows))
    return figure


def _speed_hover(r: Result, m: Measurement) -> str:
    said = [
        f"<b>{_safe(words.display_name(r))}</b>",
        f"{format_ms(m.time_ms_median)} {words.format_noise(m.noise_fraction)}",
    ]
    said.append(f"p20 {format_ms(m.time_ms_p20)}, p80 {format_ms(m.time_ms_p80)}")
    if m.sustained_ms_median is not None:
        said.append(f"sustained {format_ms(m.sustained_ms_median)}")
    if m.tflop_per_s is not None:
        said.append(f"{significant(m.tflop_per_s)} TFLOP/s")
    if m.vs_limit is not None:
        said.append(f"{words.format_ratio(m.vs_limit)} of the limit")
    return "<br>".join(said)


def error_chart(results: Sequence[Result]) -> Chart | None:
    """Error over budget per tensor and input kind, on a log scale; 1 is what a good kernel may make."""
    rows = [
        r for r in results if r.check is not None and any(words.error_ratio(t) is not None for t in r.check.tensors)
    ]
    if not rows:
        return None
    checks = [(i, t) for i, r in enumerate(rows) for t in (r.check.tensors if r.check else ())]
    names = list(dict.fromkeys(t.tensor for _, t in checks))
    kinds = list(dict.fromkeys(t.kind for _, t in checks))
    symbols = {kind: KIND_SYMBOLS[i % len(KIND_SYMBOLS)] for i, kind in enumerate(kinds)}
    traces = [_error_trace(name, n, len(names), checks, rows, symbols) for n, name in enumerate(names)]
    figure = _row_figure(rows, traces, "error / budget, log scale", row_px=max(ROW_PX, 8 * len(names)))
    axis = figure["layout"]["xaxis"]
    axis.update(type="log", dtick=1)
    axis["range"] = _log_range([1.0] + [x for trace in traces for x in trace["x"]])
    figure["layout"]["shapes"].append(_vertical(1.0, len(rows)))
    figure["layout"]["annotations"].append(_above(0.0, "budget", "center"))
    _add_values(figure, [words.status_word(r) for r in rows])
    keys = [Key(words.clean(name), color=_tensor_color(name)) for name in names]
    keys += [Key(f"{words.clean(kind)} inputs", sign=KIND_SIGNS[symbols[kind]]) for kind in kinds]
    caption = (
        "Each point is the worst row of a tensor, on one kind of input. Left of the line is what a good kernel of the "
        "same precision may make; right of it is ok only with the grade loose or approximate."
    )
    return Chart("Error against its budget", caption, (View("", figure),), tuple(keys))


def _error_trace(
    name: str, n: int, count: int, checks: list[tuple[int, TensorCheck]], rows: list[Result], symbols: dict[str, str]
) -> Figure:
    own = [(i, t, ratio) for i, t in checks if t.tensor == name and (ratio := words.error_ratio(t)) is not None]
    offset = (n - (count - 1) / 2) * 0.66 / max(count, 1)
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [max(ratio, RATIO_FLOOR) for _, _, ratio in own],
        "y": [i + offset for i, _, _ in own],
        "marker": {
            "color": f"var({_tensor_color(name)})",
            "symbol": [symbols[t.kind] for _, t, _ in own],
            "size": 8,
            "line": {"color": "var(--surface)", "width": 0.8},
        },
        "hovertext": [
            f"<b>{_safe(words.display_name(rows[i]))}</b><br>{_safe(t.tensor)} on {_safe(t.kind)} inputs<br>"
            f"error {words.format_error(t.row_rel_error_max)}, budget {words.format_error(t.error_budget)}"
            + (f"<br>worst at {_safe(t.worst)}" if t.worst else "")
            for i, t, _ in own
        ],
        "hoverinfo": "text",
    }


def memory_chart(results: Sequence[Result], modes: Sequence[str]) -> Chart | None:
    """Peak device memory of one call."""
    return _amount_chart(
        results,
        modes,
        "peak_memory_mib",
        1.0,
        "MiB",
        "Peak memory",
        "Device memory at its peak in one call, inputs included.",
    )


def energy_chart(results: Sequence[Result], modes: Sequence[str]) -> Chart | None:
    """Energy of one call while the implementation runs without a pause."""
    return _amount_chart(
        results,
        modes,
        "joules_per_call",
        1e3,
        "mJ per call",
        "Energy",
        "Energy of one call in a sustained block, of the whole card.",
    )


def _amount_chart(
    results: Sequence[Result], modes: Sequence[str], name: str, factor: float, unit: str, title: str, caption: str
) -> Chart | None:
    views = []
    for direction in (d for d in words.DIRECTIONS if d in modes):
        rows = [
            (r, getattr(m, name) * factor) for r, m in _measured(results, direction) if getattr(m, name) is not None
        ]
        if not rows:
            continue
        bars = {
            "type": "bar",
            "orientation": "h",
            "x": [amount for _, amount in rows],
            "y": list(range(len(rows))),
            "width": 0.62,
            "marker": {"color": [_bar_color(r) for r, _ in rows], "line": {"width": 0}},
            "hovertext": [
                f"<b>{_safe(words.display_name(r))}</b><br>{significant(amount)} {unit}" for r, amount in rows
            ],
            "hoverinfo": "text",
        }
        figure = _row_figure([r for r, _ in rows], [bars], unit)
        figure["layout"]["xaxis"]["rangemode"] = "tozero"
        _add_values(figure, [significant(amount) for _, amount in rows])
        views.append(View(direction, figure))
    return Chart(title, caption, tuple(views)) if views else None


def timeline_chart(results: Sequence[Result], modes: Sequence[str]) -> Chart | None:
    """The kernels of one call of each implementation, drawn to one scale, coloured by role."""
    views, roles = [], {}
    for direction in (d for d in words.DIRECTIONS if d in modes):
        rows = [(r, kernels) for r in results if (kernels := words.kernels_of(r, direction))]
        if rows:
            views.append(View(direction, _timeline_figure(rows)))
            roles.update(dict.fromkeys(k.role for _, kernels in rows for k in kernels))
    if not views:
        return None
    keys = sorted(((role_color(role), role) for role in roles), key=lambda pair: _role_rank(pair[1]))
    caption = (
        "One call each, all on the same time axis; right, the sum of its parts. "
        "With a mouse, drag to zoom in and double-click to zoom out."
    )
    return Chart("Timeline of one call", caption, tuple(views), tuple(Key(words.clean(r), color=c) for c, r in keys))


def _timeline_figure(rows: list[tuple[Result, list[KernelEvent]]]) -> Figure:
    events = [(i, kernel) for i, (_, kernels) in enumerate(rows) for kernel in kernels]
    bars = {
        "type": "bar",
        "orientation": "h",
        "base": [round(kernel.start_us, 2) for _, kernel in events],
        "x": [round(kernel.duration_us, 2) for _, kernel in events],
        "y": [i for i, _ in events],
        "width": 0.62,
        "marker": {
            "color": [f"var({role_color(kernel.role)})" for _, kernel in events],
            "line": {"color": "var(--surface)", "width": 0.6},
        },
        "hovertext": [_kernel_hover(kernel) for _, kernel in events],
        "hoverinfo": "text",
    }
    figure = _row_figure([r for r, _ in rows], [bars], "µs from the call's first event")
    end = max(kernel.start_us + kernel.duration_us for _, kernel in events)
    figure["layout"]["xaxis"]["range"] = [-0.005 * end, end * 1.01]
    figure["layout"]["barmode"] = "overlay"
    figure["layout"]["dragmode"] = "zoom"
    _add_values(figure, [format_us(sum(k.duration_us for k in kernels)) for _, kernels in rows])
    return figure


def _kernel_hover(kernel: KernelEvent) -> str:
    said = [f"<b>{_safe(kernel.role)}</b> {format_us(kernel.duration_us)}", _safe(words.kernel_title(kernel.name, 70))]
    if kernel.op and kernel.op != kernel.name:
        said.append(f"launched by {_safe(kernel.op)}")
    said.append(_safe(kernel.unit + (f": {kernel.unit_rule}" if kernel.unit_rule else "")))
    return "<br>".join(said)


# --- parts ------------------------------------------------------------------------------------------------------------


def _measured(results: Iterable[Result], direction: str) -> list[tuple[Result, Measurement]]:
    return [(r, m) for r in results if (m := r.measurement(direction))]


def _row_figure(rows: Sequence[Result], traces: list[Figure], axis: str, row_px: int = ROW_PX) -> Figure:
    """A figure with one row per implementation, the first on top."""
    labels = [_safe(words.shorten(words.clean(r.implementation), LABEL_WIDTH)) + (" ◂" if r.ours else "") for r in rows]
    for trace in traces:
        trace["showlegend"] = False
    layout: Figure = {
        "height": AXIS_PX + row_px * len(rows),
        "margin": {"l": 8, "r": 20, "t": 22, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "var(--text)", "size": 12},
        "hoverlabel": {
            "bgcolor": "var(--surface)", "bordercolor": "var(--muted)", "align": "left",
            "font": {"color": "var(--text)"},
        },
        "xaxis": {
            "title": {"text": axis, "font": {"size": 12, "color": "var(--muted)"}, "standoff": 6},
            "gridcolor": "var(--line)",
            "zerolinecolor": "var(--line)",
            "tickfont": {"color": "var(--muted)"},
            "automargin": True,
            "nticks": 6,
            "tickangle": 0,
        },
        "yaxis": {
            "tickmode": "array",
            "tickvals": list(range(len(rows))),
            "ticktext": labels,
            "range": [len(rows) - 0.5, -0.5],
            "automargin": True,
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "ticklabelstandoff": 4,
        },
        "shapes": [],
        "annotations": [],
        "dragmode": False,
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _add_values(figure: Figure, texts: list[str]) -> None:
    """Add the column of figures right of the bars, where nothing can overlap it."""
    figure["layout"]["margin"]["r"] = 20 + VALUE_PX * max(map(len, texts))
    figure["layout"]["annotations"] += [
        {"x": 1, "xref": "paper", "xanchor": "left", "xshift": 8, "y": i, "yref": "y", "text": _safe(text),
         "showarrow": False, "font": {"size": 12}, "align": "left"}
        for i, text in enumerate(texts)
    ]  # fmt: skip


def _add_limit(figure: Figure, x: float, limit_ms: float, top: float, rows: int) -> None:
    layout = figure["layout"]
    layout["shapes"].append(_vertical(x, rows))
    layout["xaxis"]["range"] = [0, max(top, x) * 1.04]
    side = "right" if x > 0.5 * max(top, x) else "left"
    layout["annotations"].append(_above(x, f"limit {format_ms(limit_ms)}", side) | {"name": "limit"})


def _limit_notes(figure: Figure) -> list[Figure]:
    return [note for note in figure["layout"]["annotations"] if note.get("name") == "limit"]


def _vertical(x: float, rows: int) -> Figure:
    line = {"color": "var(--limit)", "width": 2, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "y0": -0.5, "y1": rows - 0.5, "line": line, "layer": "above"}


def _above(x: float, text: str, side: str) -> Figure:
    return {
        "x": x, "xref": "x", "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": side, "text": text,
        "showarrow": False, "font": {"size": 12, "color": "var(--limit)"},
    }  # fmt: skip


def _log_range(values: list[float]) -> list[float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.06 * (high - low), 0.08)
    return [low - 2 * room, high + room]


def _log_ticks(low: float, high: float) -> list[float]:
    """Ticks for a log axis, so few that their labels fit a phone: 1, 2, 5 or 1, 3 or 1 of each decade."""
    steps = (1, 2, 5) if high - low < 0.8 else (1, 3) if high - low < 1.2 else (1,)
    decades = range(math.floor(low), math.ceil(high) + 1)
    return [step * 10.0**d for d in decades for step in steps if low <= math.log10(step * 10.0**d) <= high]


def _short_time(us: float) -> str:
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= size:
            return f"{us / size:g} {unit}"
    return f"{us:g} µs"


def _bar_color(result: Result) -> str:
    return "var(--ours)" if result.ours else "var(--accent)"


def _tensor_color(name: str) -> str:
    return TENSOR_COLORS.get(name, "--tone-7")


def role_color(role: str) -> str:
    """The CSS variable of a role's colour."""
    return next((color for part, color in ROLE_COLORS if part in role), "--role-other")


def _role_rank(role: str) -> tuple[int, str]:
    return next((i for i, (part, _) in enumerate(ROLE_COLORS) if part in role), len(ROLE_COLORS)), role


def _safe(text: str) -> str:
    return html.escape(words.clean(text), quote=False)
