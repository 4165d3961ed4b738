"""Stage 7: what random cases found, as text for a terminal.

Reads a FuzzReport, writes text. Must import neither torch nor an implementation.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnscope.fuzz_cases import Failure, FuzzReport
from attnscope.reporting.words import clean

REASONS_SHOWN = 5
ALIKE_SHOWN = 8


def render_fuzz(report: FuzzReport) -> str:
    """The failures, each with the line that shows it again, then what ran, what was refused and what was covered."""
    lines = [line for failure in report.failures for line in (*_failure(failure), "")]
    return "\n".join([*lines, *_coverage(report), *_refused(report), *_summary(report)]) + "\n"


def _failure(failure: Failure) -> Iterator[str]:
    number = "the case" if failure.case.index is None else f"case {failure.case.index}"
    yield f"{number} {failure.outcome.status}: {clean(failure.shrunk_outcome.message.splitlines()[0])}"
    if failure.case.workload:
        yield f"  drawn as  {failure.case}"
    if failure.shrunk != failure.case:
        yield f"  simplest  {failure.shrunk}"
    if failure.note:
        yield f"  {failure.note}"
    yield f"  again     {failure.command}"
    if failure.alike:
        shown = ", ".join(map(str, failure.alike[:ALIKE_SHOWN]))
        more = len(failure.alike) - ALIKE_SHOWN
        yield f"  alike     {shown}" + (f" and {more} more" if more > 0 else "")


def _coverage(report: FuzzReport) -> Iterator[str]:
    if report.coverage:
        yield "covered: " + ", ".join(f"{word} {count}" for word, count in report.coverage.items())


def _refused(report: FuzzReport) -> Iterator[str]:
    if not report.refused:
        return
    yield f"refused: {report.refused} of {report.drawn} workloads that were drawn"
    reasons = list(report.reasons.items())
    yield from (f"  {count} × {clean(reason)}" for reason, count in reasons[:REASONS_SHOWN])
    if len(reasons) > REASONS_SHOWN:
        yield f"  and {len(reasons) - REASONS_SHOWN} more reasons"
    if report.without_workload:
        yield f"  {report.without_workload} cases found no workload that is not refused"


def _summary(report: FuzzReport) -> Iterator[str]:
    if report.interrupted:
        yield "interrupted: what was finished is above"
    rate = f", {report.cases / report.seconds * 60:.0f} a minute" if report.seconds > 0 else ""
    yield (
        f"{clean(report.implementation)} on {clean(str(report.device))}, seed {report.seed}: {report.cases} cases, "
        f"{report.failed} failed, {report.refused} refused, {report.seconds:.1f} s{rate}"
    )
    if not report.cases and not report.interrupted:
        yield "nothing ran, so nothing is shown: every workload that was drawn was refused"
