"""Stage 7: one implementation against the best of its rivals, workload by workload, of one run.

Reads Run, writes Ratios; ratio_suites.py sums them up by suite, ratio_text.py makes them text. Must not import torch.
Only figures of the same run are divided by each other. A ratio is the rival's figure over the implementation's: above 1
the implementation is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnscope.errors import UnknownName, UsageError
from attnscope.records import Measurement, Result, Run
from attnscope.reporting import words

VERDICTS = ("faster", "same", "too close to call", "slower")
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class RatioRow:
    """One workload and direction.

    ``rival`` is the fastest by isolated time, ``ratio_low`` and ``ratio_high`` the verdict's interval, where a verdict
    between the two is recorded; ``noise_fraction`` the larger of both. ``sustained_rival`` and ``energy_rival`` are
    the best by those figures, which may be others. ``host_us``, ``vs_limit`` and
    ``limit_term`` are the implementation's own: time on the host, share of the limit, and the term that binds.
    ``absent`` are (rival, why) of those that the run timed elsewhere and not here: the best may be among them.
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
    host_us: float | None = None
    vs_limit: float | None = None
    limit_term: str | None = None
    absent: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class NoRatio:
    """A workload and direction that rivals ran and the implementation did not, or the other way round, and why."""

    workload: str
    direction: str
    reason: str


@dataclass(frozen=True)
class Ratios:
    """All of one run: ``without`` are workloads that one side did not run, ``untimed`` rivals without any time."""

    implementation: str
    device: str
    created: str
    rivals: tuple[str, ...]
    untimed: tuple[str, ...]
    rows: tuple[RatioRow, ...]
    without: tuple[NoRatio, ...]


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
    timed = {direction: _rivals_timed(run, name, direction) for direction in run.modes}
    for workload in run.workloads:
        results = run.for_workload(workload)
        mine = next((result for result in results if result.implementation == name), None)
        for direction in run.modes if mine is not None else ():
            assert mine is not None
            row = _row(results, mine, direction, timed[direction])
            if isinstance(row, RatioRow):
                rows.append(row)
            elif row:
                without.append(NoRatio(workload, direction, row))
    ours = any(result.ours for result in run.results if result.implementation == name)
    others = dict.fromkeys(r.implementation for r in run.results if not (ours and r.ours) and r.implementation != name)
    seen = {rival for rivals in timed.values() for rival in rivals}
    return Ratios(
        implementation=name,
        device=str(run.device),
        created=run.created,
        rivals=tuple(sorted({row.rival for row in rows})),
        untimed=tuple(other for other in others if other not in seen),
        rows=tuple(rows),
        without=tuple(without),
    )


def _rivals(results: Sequence[Result], mine: str, ours: bool, direction: str) -> list[Result]:
    """Right, comparable, timed, and not ours where the implementation is; fastest first."""
    ranked = words.ranked(results, direction)
    return [result for result in ranked if result.implementation != mine and not (ours and result.ours)]


def _rivals_timed(run: Run, name: str, direction: str) -> tuple[str, ...]:
    """Names of the rivals that have a time on any workload of the run."""
    ours = any(result.ours for result in run.results if result.implementation == name)
    return tuple(dict.fromkeys(r.implementation for r in _rivals(run.results, name, ours, direction)))


def _row(results: list[Result], mine: Result, direction: str, timed: tuple[str, ...]) -> RatioRow | str:
    """The row; or a sentence why there is none, empty where the direction is nobody's business."""
    rivals = _rivals(results, mine.implementation, mine.ours, direction)
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
        host_us=m.wall_us_median,
        vs_limit=m.vs_limit,
        limit_term=m.limit_term,
        absent=_absent(results, rivals, timed, direction),
    )


def _absent(
    results: list[Result], rivals: list[Result], timed: tuple[str, ...], direction: str
) -> tuple[tuple[str, str], ...]:
    """(name, why) of rivals that the run timed on other workloads and not on this one."""
    here = {rival.implementation for rival in rivals}
    by_name = {result.implementation: result for result in results}
    return tuple(
        (name, _why_no_time(by_name[name], direction) if name in by_name else "did not take part")
        for name in timed
        if name not in here
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
    if mine.status == "approximate":
        return "approximate"
    if not mine.error:
        return "not timed"
    # how much was free is another number each time, which would tell one reason as many
    return "failed: ran out of memory" if "out of memory" in mine.error else f"failed: {mine.error.splitlines()[0]}"


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """exp of the mean of the logarithms; None of nothing."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
