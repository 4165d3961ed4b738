"""Stage 7: the explanation of a trace as text for a terminal, and of two traces side by side.

Reads Explanation and Difference, writes text of at most 80 columns. Must import neither torch nor a stage before
explaining. Names from a trace are cleaned of control characters and never read as markup.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import PurePath

from attnscope.explaining.explanation import CallSite, Difference, Explanation, Window
from attnscope.explaining.works import KNOWN_BY
from attnscope.records import Finding
from attnscope.reporting.words import clean, shorten
from attnscope.units import format_us, significant

WIDTH = 80
LABEL = 14
SITES_SHOWN = 10
CHANGES_SHOWN = 30
OVERLAP = "sorted by what each could save; savings overlap, so they do not add up"


def render_explanation(explanation: Explanation, *, top: int | None = None) -> str:
    """The whole explanation; ``top`` findings of it, all where None."""
    parts = [_title(explanation.trace), *_window(explanation.window)]
    for warning in explanation.warnings:
        parts += _row("careful", warning)
    parts += ["", *_sites(explanation.sites, explanation.window.on_gpu)]
    parts += ["", *_findings(explanation.findings, explanation.window, top)]
    return "\n".join(parts) + "\n"


def render_difference(difference: Difference) -> str:
    """Two traces: each call site before and after, and which findings went and came."""
    before, after = difference.before, difference.after
    lines = [_title(" -> ".join(PurePath(one.trace).name for one in (before, after)))]
    lines += _row("GPU busy", f"{format_us(before.window.busy_us)} -> {format_us(after.window.busy_us)}")
    lines += _row("attention", f"{format_us(before.window.attention_us)} -> {format_us(after.window.attention_us)}")
    lines += ["", "Attention call sites, time of a call before -> after"]
    for change in difference.changes[:CHANGES_SHOWN]:
        sides = [change.before, change.after]
        times = " -> ".join(format_us(side.median_us) if side else "not there" for side in sides)
        ratio = f"  (× {significant(change.ratio)})" if change.ratio is not None else ""
        names = list(dict.fromkeys(side.implementation for side in sides if side))
        lines += ["", *_wrapped(f"{clean(change.site)} [{clean(change.problem)}]", "  ")]
        lines += _wrapped(f"{times}{ratio}", "    ")
        lines += _wrapped(clean(" -> ".join(names)), "    ")
        calls = " -> ".join(str(side.calls) if side else "0" for side in sides)
        lines += _wrapped(f"calls {calls}", "    ") if len(set(calls.split(" -> "))) > 1 else []
    if len(difference.changes) > CHANGES_SHOWN:
        lines += ["", f"  and {len(difference.changes) - CHANGES_SHOWN} more (--json holds all)"]
    if not difference.changes:
        lines.append("  none in either trace")
    lines.append("")
    lines += _row("findings gone", ", ".join(difference.gone) or "none")
    lines += _row("findings new", ", ".join(difference.new) or "none")
    return "\n".join(lines) + "\n"


def share(part: float, whole: float) -> str:
    """A share in percent with two digits; of nothing there is none."""
    return f"{significant(100 * part / whole, 2)} %" if whole > 0 else "–"


def window_facts(window: Window) -> list[tuple[str, str]]:
    """(what, figure) of a window, in the order in which they are read."""
    unit = "GPU" if window.on_gpu else "CPU"
    named = any(version.startswith("torch ") for version in window.versions)
    card = [clean(window.card or "the trace does not name the card"), *map(clean, window.versions)]
    facts = [("card", " · ".join(card + ([] if named else ["torch version not recorded"])))]
    if not window.on_gpu:
        facts[0] = ("card", "none: no kernel was recorded, so these are CPU times")
    steps = f", {window.steps} profiler step{'s' if window.steps != 1 else ''}" if window.steps else ""
    facts.append(("span", format_us(window.span_us) + steps))
    if window.on_gpu:
        busy = f"{format_us(window.busy_us)}, {share(window.busy_us, window.span_us * window.gpus)} of the span"
        busy += f" on average of {window.gpus} GPUs" if window.gpus > 1 else ""
        facts.append(("GPU busy", f"{busy} (union of intervals; the plain sum is {format_us(window.sum_us)})"))
        facts.append(
            ("work", f"{window.launches:,} launches, {window.kernels:,} kernels, {window.copies:,} copies, "
             f"{window.fills:,} fills, {window.ops:,} CPU ops")
        )  # fmt: skip
    else:
        facts.append(("work", f"{window.ops:,} CPU ops, {format_us(window.sum_us)}"))
    attention = f"{format_us(window.attention_us)}, {share(window.attention_us, window.sum_us)} of {unit} time"
    if window.inferred_us:
        attention += f"; {format_us(window.inferred_us)} of it known by kernel names only"
    facts.append(("attention", attention if window.attention_us else "none recognised"))
    if len(window.attention_by) > 1 or any(word != KNOWN_BY[0] for word, _ in window.attention_by):
        rungs = [f"{share(us, window.attention_us)} by {word}" for word, us in window.attention_by]
        facts.append(("known", " · ".join(rungs)))
    if window.on_gpu or window.unattributed_us:
        unknown = f"{format_us(window.unattributed_us)}, {share(window.unattributed_us, window.sum_us)} of {unit} time"
        facts.append(("unattributed", unknown + (": attention or not" if window.unattributed_us else "")))
    return facts


def site_figures(site: CallSite, on_gpu: bool = True) -> str:
    """A site's figures in one line."""
    unit = "kernel" if on_gpu else "op"
    figures = [
        f"{site.calls:,} call{'s' if site.calls != 1 else ''}",
        f"{significant(site.kernels_per_call)} {unit}{'s' if site.kernels_per_call != 1 else ''} each",
        format_us(site.time_us),
    ]
    if site.tflop_per_s is not None:
        rate = f"{significant(site.tflop_per_s)} TFLOP/s"
        if site.peak_fraction is not None:
            rate += f" ({share(site.peak_fraction, 1.0)} of peak)"
        figures.append(rate)
    return " · ".join(figures)


def saving_text(finding: Finding, window: Window) -> str:
    """What a finding could save, beside the whole; empty where that is not known."""
    if not finding.saving_us:
        return ""
    whole = window.span_us if finding.id in ("launch-bound", "built-in-window") else window.sum_us
    unit = "the span" if whole == window.span_us else "GPU time" if window.on_gpu else "CPU time"
    return f"up to {format_us(finding.saving_us)}, {share(finding.saving_us, whole)} of {unit}"


def _window(window: Window) -> list[str]:
    lines = []
    for name, value in window_facts(window):
        lines += _row(name, value)
    for sentence in window.lost:
        lines += _row("not seen", clean(sentence))
    return lines


def _sites(sites: Iterable[CallSite], on_gpu: bool) -> list[str]:
    sites = list(sites)
    if not sites:
        return ["Attention call sites: none"]
    lines = ["Attention call sites, the longest first"]
    for site in sites[:SITES_SHOWN]:
        inferred = ", inferred from kernel names" if site.inferred else ""
        backward = " backward" if site.direction == "backward" and "backward" not in site.name else ""
        lines.append("")
        lines += _wrapped(f"{clean(site.implementation)}{backward}{inferred}: {site_figures(site, on_gpu)}", "  ")
        lines += _wrapped(f"{clean(site.name)} [{clean(site.problem)}]", "    ")
        lines += _wrapped(f"in {clean(site.module)}", "    ") if site.module else []
    if len(sites) > SITES_SHOWN:
        lines += ["", f"  and {len(sites) - SITES_SHOWN} more (--json holds all)"]
    return lines


def _findings(findings: tuple[Finding, ...], window: Window, top: int | None) -> list[str]:
    if not findings:
        return ["Findings: none"]
    lines = [f"Findings, {OVERLAP}"]
    shown = findings if top is None else findings[:top]
    for finding in shown:
        saving = saving_text(finding, window)
        lines += ["", *_wrapped(f"{finding.id}" + (f": {saving}" if saving else ""), "  ")]
        lines += _wrapped(clean(finding.sentence), "    ")
        for one in finding.evidence:
            lines += _wrapped(f"- {clean(one)}", "    ", hanging="  ")
        if finding.arithmetic:
            lines += _wrapped(f"saving: {clean(finding.arithmetic)}", "    ")
        if finding.remedy:
            lines += _wrapped(f"remedy: {clean(finding.remedy)}", "    ")
        lines += _wrapped(f"confidence: {finding.confidence}", "    ")
    if len(shown) < len(findings):
        lines += ["", f"  and {len(findings) - len(shown)} more (without --top)"]
    return lines


def _title(text: str) -> str:
    return shorten(clean(text), WIDTH)


def _row(name: str, value: str) -> list[str]:
    return textwrap.wrap(
        value, WIDTH, initial_indent=f"  {name:<{LABEL}}", subsequent_indent=" " * (LABEL + 2), break_on_hyphens=False
    )


def _wrapped(text: str, indent: str, hanging: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + hanging, break_on_hyphens=False)
