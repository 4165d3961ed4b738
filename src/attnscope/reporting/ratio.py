"""Stage 7: one implementation against the best of its rivals, workload by workload, of one run.

Reads Run, writes Ratios and their text. Must import neither torch nor a stage. Only times of the same run are divided
by each other. A ratio is the rival's figure over the implementation's: above 1 the implementation is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from attnscope.errors import UnknownName, UsageError
from attnscope.records import Measurement, Result, Run
from attnscope.reporting import words
from attnscope.units import MISSING, format_ms

WORDS = {"faster": "faster", "slower": "slower", "same": "same", "too close to call": "too close"}


@dataclass(frozen=True)
class RatioRow:
    """One workload and direction.

    ``rival`` is the fastest by isolated time, ``ratio_low`` and ``ratio_high`` the verdict's interval, where a verdict
    between the two is recorded; ``noise_fraction`` the larger of both. ``sustained_rival`` and ``energy_rival`` are
    the best by those figures, which may be others.
    """

    workload: str
    direction: str
    time_ms: float
    rival: str
    rival_time_ms: float
    ratio: float
    noise_fraction: float
    verdict: str | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    sustained_rival: str | None = None
    sustained_ratio: float | None = None
    energy_rival: str | None = None
    energy_ratio: float | None = None


@dataclass(frozen=True)
class NoRatio:
    """A workload and direction that rivals ran and the implementation did not, or the other way round, and why."""

    workload: str
    direction: str
    reason: str


@dataclass(frozen=True)
class Ratios:
    """All of one run. ``geometric_mean`` is of the isolated ratios; the others of what is recorded, else None."""

    implementation: str
    device: str
    created: str
    rivals: tuple[str, ...]
    rows: tuple[RatioRow, ...]
    without: tuple[NoRatio, ...]
    geometric_mean: float | None
    geometric_mean_sustained: float | None
    geometric_mean_energy: float | None
    verdicts: dict[str, int]

    @property
    def worst(self) -> RatioRow | None:
        """The row of the lowest isolated ratio."""
        return min(self.rows, key=lambda row: row.ratio, default=None)

    @property
    def worst_sustained(self) -> RatioRow | None:
        """The row of the lowest sustained ratio."""
        told = [row for row in self.rows if row.sustained_ratio is not None]
        return min(told, key=lambda row: row.sustained_ratio or 0.0, default=None)


def ratios_of(runs: Sequence[Run], name: str) -> list[Ratios]:
    """One Ratios for each run in which ``name`` stands beside a rival.

    Where ``name`` is ours, our other kernels are no rivals. Approximate, wrong and incomparable ones never are.

    Raises:
        UsageError: no run holds ``name``, or none a rival of it.
    """
    known = sorted({result.implementation for run in runs for result in run.results})
    if name not in known:
        raise UsageError(str(UnknownName("implementation of these runs", name, known)))
    found = [ratios for run in runs if (ratios := _of_run(run, name)).rows or ratios.without]
    if not found:
        raise UsageError(
            f"no run holds {name} beside a rival that was timed on the same workload\n"
            f"hint: attnscope compare WORKLOAD --implementations {name},all"
        )
    return found


def _of_run(run: Run, name: str) -> Ratios:
    rows, without = [], []
    for workload in run.workloads:
        results = run.for_workload(workload)
        mine = next((result for result in results if result.implementation == name), None)
        for direction in run.modes if mine is not None else ():
            assert mine is not None
            row = _row(results, mine, direction)
            if isinstance(row, RatioRow):
                rows.append(row)
            elif row:
                without.append(NoRatio(workload, direction, row))
    said = [row.verdict or "not recorded" for row in rows]
    return Ratios(
        implementation=name,
        device=str(run.device),
        created=run.created,
        rivals=tuple(dict.fromkeys(row.rival for row in sorted(rows, key=lambda row: row.rival))),
        rows=tuple(rows),
        without=tuple(without),
        geometric_mean=geometric_mean([row.ratio for row in rows]),
        geometric_mean_sustained=geometric_mean([r.sustained_ratio for r in rows if r.sustained_ratio is not None]),
        geometric_mean_energy=geometric_mean([r.energy_ratio for r in rows if r.energy_ratio is not None]),
        verdicts={word: said.count(word) for word in (*WORDS, "not recorded") if word in said},
    )


def _row(results: list[Result], mine: Result, direction: str) -> RatioRow | str:
    """The row; or a sentence why there is none, empty where the direction is nobody's business."""
    rivals = [
        result
        for result in words.ranked(results, direction)
        if result.implementation != mine.implementation and not (mine.ours and result.ours)
    ]
    m = mine.measurement(direction)
    if m is None:
        return _why_no_time(mine, direction) if rivals else ""
    if not rivals:
        return "no rival was timed"
    rival = rivals[0]
    best = rival.measurement(direction)
    assert best is not None
    verdict = words.verdict_between(results, direction, mine.implementation, rival.implementation)
    sustained_rival, sustained = _best(rivals, direction, lambda seen: seen.sustained_ms_median)
    energy_rival, energy = _best(rivals, direction, lambda seen: seen.joules_per_call)
    mine_sustained, mine_energy = m.sustained_ms_median, m.joules_per_call
    return RatioRow(
        workload=mine.workload,
        direction=direction,
        time_ms=m.time_ms_median,
        rival=rival.implementation,
        rival_time_ms=best.time_ms_median,
        ratio=best.time_ms_median / m.time_ms_median,
        noise_fraction=max(m.noise_fraction, best.noise_fraction),
        verdict=None if verdict is None else verdict.word,
        ratio_low=None if verdict is None else 1 / verdict.ratio_high,
        ratio_high=None if verdict is None else 1 / verdict.ratio_low,
        sustained_rival=sustained_rival if mine_sustained else None,
        sustained_ratio=sustained / mine_sustained if sustained and mine_sustained else None,
        energy_rival=energy_rival if mine_energy else None,
        energy_ratio=energy / mine_energy if energy and mine_energy else None,
    )


def _best(
    rivals: list[Result], direction: str, figure: Callable[[Measurement], float | None]
) -> tuple[str | None, float | None]:
    """Name and figure of the rival whose figure is lowest; (None, None) where none has it."""
    told = [
        (value, rival.implementation)
        for rival in rivals
        if (m := rival.measurement(direction)) is not None and (value := figure(m)) is not None
    ]
    value, name = min(told, default=(None, None))
    return name, value


def _why_no_time(mine: Result, direction: str) -> str:
    if mine.reasons.get(direction):
        return "skipped: " + "; ".join(mine.reasons[direction])
    if mine.status == "check_failed":
        return "wrong"
    return f"failed: {mine.error.splitlines()[0]}" if mine.error else "not timed"


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """exp of the mean of the logarithms; None of nothing."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


# --- as text ----------------------------------------------------------------------------------------------------------


def render_ratios(ratios: Ratios) -> str:
    """A line a workload, then means, the worst shape, and the verdicts, as plain text."""
    lines = [
        f"{words.clean(ratios.implementation)} against its best rival of the same run, "
        f"on {words.clean(ratios.device)}, {_when(ratios)}",
        "(rival's figure / its own: above 1 it is better)",
        "",
    ]
    head = ("", "time", "best rival", "ratio", "noise", "verdict", "sustained", "energy")
    table = [head, *(_cells(row) for row in ratios.rows)]
    if ratios.rows:
        widths = [max(len(line[place]) for line in table) for place in range(len(head))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
        ]
    lines += ["", *_totals(ratios)]
    return "\n".join(lines) + "\n"


def _when(ratios: Ratios) -> str:
    """The day and the time of the run."""
    return words.clean(ratios.created[:16].replace("T", " "))


def _cells(row: RatioRow) -> tuple[str, ...]:
    return (
        f"{row.workload} {row.direction}",
        format_ms(row.time_ms),
        row.rival,
        _ratio(row.ratio),
        words.format_noise(row.noise_fraction),
        MISSING if row.verdict is None else WORDS[row.verdict],
        _ratio(row.sustained_ratio, row.sustained_rival, row.rival),
        _ratio(row.energy_ratio, row.energy_rival, row.rival),
    )


def _ratio(value: float | None, against: str | None = None, rival: str | None = None) -> str:
    """``1.05``; with the rival's name where it is another than the row's."""
    if value is None:
        return MISSING
    return f"{value:.3f}" + (f" ({against})" if against != rival else "")


def _totals(ratios: Ratios) -> Iterator[str]:
    means = [
        f"{_ratio(mean)} {word}"
        for mean, word in (
            (ratios.geometric_mean, "isolated"),
            (ratios.geometric_mean_sustained, "sustained"),
            (ratios.geometric_mean_energy, "energy"),
        )
        if mean is not None
    ]
    if ratios.rows:
        yield f"geometric mean of {len(ratios.rows)}: {', '.join(means)}"
    for worst, word in ((ratios.worst, "isolated"), (ratios.worst_sustained, "sustained")):
        if worst is not None:
            value, rival = (
                (worst.ratio, worst.rival) if word == "isolated" else (worst.sustained_ratio, worst.sustained_rival)
            )
            yield f"worst {word}: {_ratio(value)} against {rival}, {worst.workload} {worst.direction}"
    if ratios.verdicts:
        yield "verdicts: " + ", ".join(f"{count} {word}" for word, count in ratios.verdicts.items())
        yield f'"slower": {ratios.verdicts.get("slower", 0)}'
    for left in ratios.without:
        yield f"no ratio: {left.workload} {left.direction}: {words.clean(left.reason)}"
