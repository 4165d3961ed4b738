"""Stage 7: the ratios of one implementation as plain text: a line a workload, then a paragraph a suite, then its twins.

Reads Ratios, SuiteRatios, Twins; writes text. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnscope.reporting import words
from attnscope.reporting.ratio import RatioRow, Ratios
from attnscope.reporting.ratio_suites import Figure, LimitShare, SuiteRatios
from attnscope.reporting.twins import Twin, Twins
from attnscope.units import MISSING, format_ms, format_us

SHORT = {"too close to call": "too close"}
NAMED = 3  # workloads that a line names before it counts


def render_evidence(found: Sequence[Ratios], suites: Sequence[SuiteRatios], twins: Sequence[Twins]) -> str:
    """Everything: each run's lines, then each suite, then the twins."""
    parts = ["\n".join(_of_run(ratios)) for ratios in found]
    parts += ["\n".join(_of_suite(suite)) for suite in suites]
    parts += ["\n".join(_of_twins(twins))] if twins else []
    return "\n\n".join(parts) + "\n"


# --- a run ------------------------------------------------------------------------------------------------------------


def _of_run(ratios: Ratios) -> Iterator[str]:
    yield (
        f"{words.clean(ratios.implementation)} against its best rival of the same run, "
        f"on {words.clean(ratios.device)}, {when(ratios.created)}"
    )
    yield "(rival's figure / its own: above 1 it is better)"
    yield ""
    head = ("", "time", "best rival", "ratio", "noise", "verdict", "sustained", "energy", "host", "of limit")
    if ratios.rows:
        yield from columns([head, *(_cells(row) for row in ratios.rows)])
    for left in ratios.without:
        yield f"no ratio: {left.workload} {left.direction}: {words.clean(left.reason)}"
    if ratios.untimed:
        yield f"never timed: {', '.join(map(words.clean, ratios.untimed))}"


def when(created: str) -> str:
    """The day and the time of a run."""
    return words.clean(created[:16].replace("T", " "))


def columns(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with their cells below each other."""
    widths = [max(len(line[place]) for line in table) for place in range(len(table[0]))]
    for line in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _cells(row: RatioRow) -> tuple[str, ...]:
    return (
        f"{row.workload} {row.direction}",
        format_ms(row.time_ms),
        words.clean(row.rival),
        ratio(row.ratio),
        words.format_noise(row.noise_fraction),
        MISSING if row.verdict is None else SHORT.get(row.verdict, row.verdict),
        ratio(row.sustained_ratio, row.sustained_rival, row.rival),
        ratio(row.energy_ratio, row.energy_rival, row.rival),
        format_us(row.host_us),
        words.format_ratio(row.vs_limit) + (f" {row.limit_term}" if row.limit_term else ""),
    )


def ratio(value: float | None, against: str | None = None, rival: str | None = None) -> str:
    """``1.050``; with the name of whom it is against where that is another than the row's rival."""
    if value is None:
        return MISSING
    return f"{value:.3f}" + (f" ({words.clean(against or '')})" if against != rival else "")


# --- a suite ----------------------------------------------------------------------------------------------------------


def _of_suite(suite: SuiteRatios) -> Iterator[str]:
    runs = "1 run" if len(suite.runs) == 1 else f"{len(suite.runs)} runs"
    yield (
        f"{suite.suite}, {suite.direction}: {suite.shapes} of {suite.workloads} shapes, {runs}, "
        f"{words.clean(suite.device)}"
    )
    if suite.shapes:
        yield from _figures(suite)
    for workload, reason in suite.without.items():
        yield f"  no ratio  {workload}: {words.clean(reason)}"
    for who, where in suite.absent.items():
        yield f"  without   {words.clean(who)}: {counted(where, suite.shapes)}"
    if suite.missing:
        yield f"  not run   {counted(suite.missing, suite.workloads)}"


def _figures(suite: SuiteRatios) -> Iterator[str]:
    for word, figure in (("isolated", suite.isolated), ("sustained", suite.sustained), ("energy", suite.energy)):
        yield f"  {word:<10}{figure_sentence(figure, suite.shapes)}"
    for share in suite.limits:
        yield f"  of limit  {limit_sentence(share)}"
    if suite.host_us_median is not None:
        yield (
            f"  host      median {format_us(suite.host_us_median)}, at most {format_us(suite.host_us_most)}, "
            f"{suite.host_workload}"
        )
    yield "  verdicts  " + ", ".join(f"{count} {word}" for word, count in suite.verdicts.items())
    yield f'  "slower"  {len(suite.slower)}{": " if suite.slower else ""}{"; ".join(map(words.clean, suite.slower))}'


def figure_sentence(figure: Figure | None, shapes: int) -> str:
    """``geometric mean 1.061, worst 0.982 against sdpa_cudnn, B8,...; below 1 on 2 of 32``."""
    if figure is None:
        return "not recorded"
    return (
        f"geometric mean {ratio(figure.geometric_mean)}, worst {ratio(figure.worst)} against "
        f"{words.clean(figure.worst_rival)}, {figure.worst_workload}; below 1 on {figure.below_one} of {figure.count}"
        + ("" if figure.count == shapes else f" ({shapes - figure.count} shapes have none)")
    )


def limit_sentence(share: LimitShare) -> str:
    """``read bandwidth: geometric mean 0.96, lowest 0.93 of 5, B1,...``."""
    return (
        f"{words.TERM_PHRASES[share.term]}: geometric mean {words.format_ratio(share.geometric_mean)}, lowest "
        f"{words.format_ratio(share.lowest)} of {share.count}, {share.lowest_workload}"
    )


def counted(workloads: Sequence[str], of: int) -> str:
    """``2 of 32: B8,...; B4,...``."""
    named = "; ".join(workloads[:NAMED]) + ("; …" if len(workloads) > NAMED else "")
    return f"{len(workloads)} of {of}: {named}"


# --- twins ------------------------------------------------------------------------------------------------------------


def _of_twins(found: Sequence[Twins]) -> Iterator[str]:
    yield f"{words.clean(found[0].implementation)} beside itself (time / its twin's: above 1 it takes longer)"
    yield ""
    head = ("", "time", "twin's", "ratio", "noise", "sustained")
    yield from columns([head, *(_twin_cells(row) for twins in found for row in twins.rows)])
    for twins in found:
        yield twins_sentence(twins)


def twins_sentence(twins: Twins) -> str:
    """``fp16 over its twin in bf16, forward: geometric mean 1.004 (sustained 1.002), at most 1.020 ...``."""
    than = "in bf16" if twins.what == "fp16" else "without"
    return (
        f"{twins.what} over its twin {than}, {twins.direction}, {len(twins.rows)} shapes, {words.clean(twins.device)}: "
        f"geometric mean {ratio(twins.geometric_mean)} (sustained {ratio(twins.geometric_mean_sustained)}), at most "
        f"{ratio(twins.worst)} (sustained {ratio(twins.worst_sustained)}), {twins.worst_workload}"
    )


def _twin_cells(row: Twin) -> tuple[str, ...]:
    return (
        f"{row.workload} {row.direction}", format_ms(row.time_ms), format_ms(row.twin_time_ms), ratio(row.ratio),
        words.format_noise(row.noise_fraction), ratio(row.sustained_ratio),
    )  # fmt: skip
