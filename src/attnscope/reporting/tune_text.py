"""Stage 7: what tuning found, as text that fits 80 columns.

Reads a TuneReport, writes text. Must import neither torch nor an implementation.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from attnscope.reporting.words import clean
from attnscope.tuning_records import TunedClass, TuneReport
from attnscope.units import MISSING, significant

WIDTH = 80
CLASS_WIDTH = 34
LEFT_SHOWN = 6


def render_tune(report: TuneReport) -> str:
    """A line a class with the choice where it is another one, then what is at fault, what was left out, and where the
    choices were written."""
    lines = [*_table(report), *_faults(report), *_not_tuned(report), *_summary(report)]
    return "\n".join(lines) + "\n"


def _table(report: TuneReport) -> Iterator[str]:
    if not report.classes:
        return
    yield f"{'class':<{CLASS_WIDTH}}{'right of tried':>15}{'time / shipped':>17}{'':2}choice"
    for found in report.classes:
        right = sum(one.status == "measured" for one in found.tried)
        counted = f"{right} of {len(found.tried)}"
        yield f"{clean(found.name):<{CLASS_WIDTH}}{counted:>15}{_ratio(found):>17}{'':2}{_choice(found)}"
        if found.is_changed and found.chosen is not None:
            yield from _wrapped(found.tried[found.chosen].label, "  ")


def _ratio(found: TunedClass) -> str:
    best = found.tried[found.chosen] if found.chosen is not None else None
    if best is None or best.ratio is None:
        return MISSING
    if best.ratio_low is None or best.ratio_high is None or not found.is_changed:
        return significant(best.ratio, 4)
    return f"{best.ratio:.3f} ± {(best.ratio_high - best.ratio_low) / 2:.3f}"


def _choice(found: TunedClass) -> str:
    return "none" if found.chosen is None else "another" if found.is_changed else "as shipped"


def _faults(report: TuneReport) -> Iterator[str]:
    """Candidates that are wrong or failed: one that is so in several classes once, by what it said first."""
    told: dict[tuple[str, str], list[str]] = {}
    for one in (one for found in report.classes for one in found.tried if one.status != "measured"):
        told.setdefault((one.status, one.label), []).append(one.message)
    for (status, label), messages in told.items():
        classes = f" ({len(messages)} classes)" if len(messages) > 1 else ""
        yield from _wrapped(f"{status}, never chosen{classes}: {label}", "")
        yield from _wrapped(_first(messages[0]), "  ")


def _not_tuned(report: TuneReport) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for workload, reason in report.not_tuned.items():
        by_reason.setdefault(reason, []).append(workload)
    for reason, workloads in by_reason.items():
        yield from _wrapped(f"not tuned: {_listed(workloads)}: {reason}", "", "  ")


def _summary(report: TuneReport) -> Iterator[str]:
    if report.interrupted:
        yield "interrupted: what was finished is above, and kept"
    if report.left:
        again = "--missing goes on with them"
        yield from _wrapped(f"left to do: {len(report.left)} classes, {_listed(report.left)}; {again}", "", "  ")
    changed = sum(found.is_changed for found in report.classes)
    yield from _wrapped(
        f"{report.implementation} on {report.device}: {len(report.classes)} classes tuned, {changed} with another "
        f"choice, {report.seconds:.0f} s",
        "",
        "  ",
    )
    yield "nothing was written" if report.table is None else f"table: {clean(report.table)}"


def _listed(names: list[str] | tuple[str, ...]) -> str:
    more = len(names) - LEFT_SHOWN
    return ", ".join(names[:LEFT_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _first(message: str) -> str:
    return (message.splitlines() or [""])[0]


def _wrapped(text: str, first: str, rest: str | None = None) -> list[str]:
    """Lines of at most 80 columns; a word that is longer stands alone."""
    return textwrap.wrap(
        clean(text), WIDTH, initial_indent=first, subsequent_indent=first if rest is None else rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
