"""Stage 7: the ratios of one implementation summed up by suite, over all runs of a card.

Reads Ratios, writes SuiteRatios. Must not import torch. A suite may be spread over several runs (``compare --budget``):
each ratio is of one run, and of a workload in several runs the newest counts that measured it: many runs are without
sustained load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from attnscope.reporting.ratio import NOT_RECORDED, VERDICTS, RatioRow, Ratios, geometric_mean
from attnscope.suites import SUITES
from attnscope.units import median

OTHERS = "other workloads"
Key = tuple[str, str]  # workload, direction


@dataclass(frozen=True)
class Figure:
    """One kind of ratio over a suite: ``count`` rows hold it; the worst one, and how many are below 1."""

    count: int
    geometric_mean: float
    worst: float
    worst_rival: str
    worst_workload: str
    below_one: int


@dataclass(frozen=True)
class LimitShare:
    """The implementation's share of the limit on the shapes where one ``term`` binds: how many, and the lowest."""

    term: str
    count: int
    geometric_mean: float
    lowest: float
    lowest_workload: str


@dataclass(frozen=True)
class SuiteRatios:
    """One suite, direction and card. ``shapes`` of ``workloads`` have a ratio; ``missing`` are in none of the runs.

    ``energy`` is of joules a call. ``host_us_median`` and ``host_us_most`` are the implementation's own, over the
    shapes; ``host_workload`` is where it is most. ``slower`` names the shapes with that verdict, ``without`` the reason
    of each that has no ratio, ``absent`` maps a rival and why it has no time to the workloads where that is so.
    """

    implementation: str
    suite: str
    direction: str
    device: str
    runs: tuple[str, ...]
    workloads: int
    shapes: int
    isolated: Figure | None
    sustained: Figure | None
    energy: Figure | None
    limits: tuple[LimitShare, ...]
    host_us_median: float | None
    host_us_most: float | None
    host_workload: str | None
    verdicts: dict[str, int]
    slower: tuple[str, ...]
    without: dict[str, str]
    absent: dict[str, tuple[str, ...]]
    missing: tuple[str, ...]
    rows: tuple[RatioRow, ...]


def suites_of(found: Sequence[Ratios]) -> list[SuiteRatios]:
    """A summary for each card, suite and direction; what belongs to no suite comes last, as ``other workloads``."""
    made = []
    for device in dict.fromkeys(ratios.device for ratios in found):
        runs = sorted((ratios for ratios in found if ratios.device == device), key=lambda ratios: ratios.created)
        rows: dict[Key, tuple[RatioRow, str]] = {}
        without: dict[Key, str] = {}
        for ratios in runs:
            for row in ratios.rows:
                key = row.workload, row.direction
                rows[key] = _with_load_of(rows[key][0] if key in rows else None, row), ratios.created
            without |= {(left.workload, left.direction): left.reason for left in ratios.without}
        without = {key: reason for key, reason in without.items() if key not in rows}
        for direction in sorted({direction for _, direction in (*rows, *without)}, reverse=True):
            here = {w: row for (w, way), row in rows.items() if way == direction}
            left = {w: reason for (w, way), reason in without.items() if way == direction}
            for suite, texts in _suites_shown((*here, *left)).items():
                made.append(_summary(runs[0].implementation, suite, texts, direction, device, here, left))
    return made


def _with_load_of(older: RatioRow | None, row: RatioRow) -> RatioRow:
    """The row, with an older one's ratios under sustained load where it has none."""
    if older is None or row.sustained_ratio is not None:
        return row
    return replace(
        row, sustained_rival=older.sustained_rival, sustained_ratio=older.sustained_ratio,
        energy_rival=older.energy_rival, energy_ratio=older.energy_ratio,
    )  # fmt: skip


def _suites_shown(present: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Suite -> its workloads: those that are whole, and of the others those that bring what no fuller one holds."""
    here = set(present)
    texts = {name: tuple(str(workload) for workload in suite) for name, suite in SUITES.items()}

    def rank(name: str) -> tuple[bool, int]:
        held = len(here & set(texts[name]))
        return held == len(texts[name]), held

    shown: list[str] = []
    covered: set[str] = set()
    for name in sorted(texts, key=rank, reverse=True):
        if rank(name)[0] or (here & set(texts[name])) - covered:
            shown.append(name)
            covered |= here & set(texts[name])
    found = {name: texts[name] for name in texts if name in shown}
    rest = tuple(text for text in present if text not in covered)
    return found | ({OTHERS: rest} if rest else {})


def _summary(
    implementation: str,
    suite: str,
    texts: tuple[str, ...],
    direction: str,
    device: str,
    here: Mapping[str, tuple[RatioRow, str]],
    left: Mapping[str, str],
) -> SuiteRatios:
    found = [here[text] for text in texts if text in here]
    rows = [row for row, _ in found]
    host = [(row.host_us, row.workload) for row in rows if row.host_us is not None]
    most = max(host, default=(None, None))
    absent: dict[str, list[str]] = {}
    for row in rows:
        for name, why in row.absent:
            absent.setdefault(f"{name}: {why}", []).append(row.workload)
    said = [row.verdict or NOT_RECORDED for row in rows]
    return SuiteRatios(
        implementation, suite, direction, device,
        runs=tuple(sorted({created for _, created in found})),
        workloads=len(texts),
        shapes=len(rows),
        isolated=_figure(rows, lambda row: (row.ratio, row.rival)),
        sustained=_figure(rows, lambda row: (row.sustained_ratio, row.sustained_rival)),
        energy=_figure(rows, lambda row: (row.energy_ratio, row.energy_rival)),
        limits=tuple(_limit_shares(rows)),
        host_us_median=median([us for us, _ in host]) if host else None,
        host_us_most=most[0],
        host_workload=most[1],
        verdicts={word: said.count(word) for word in (*VERDICTS, NOT_RECORDED) if word in said},
        slower=tuple(f"{row.workload} against {row.rival}" for row in rows if row.verdict == "slower"),
        without={text: left[text] for text in texts if text in left},
        absent={who: tuple(where) for who, where in absent.items()},
        missing=tuple(text for text in texts if text not in here and text not in left),
        rows=tuple(rows),
    )  # fmt: skip


def _limit_shares(rows: Sequence[RatioRow]) -> Iterator[LimitShare]:
    for term in dict.fromkeys(row.limit_term for row in rows):
        told = [(row.vs_limit, row.workload) for row in rows if row.limit_term == term and row.vs_limit is not None]
        mean = geometric_mean([share for share, _ in told])
        if term is not None and mean is not None:
            lowest, workload = min(told)
            yield LimitShare(term, len(told), mean, lowest, workload)


def _figure(rows: Sequence[RatioRow], ratio_of: Callable[[RatioRow], tuple[float | None, str | None]]) -> Figure | None:
    """The figure of the rows that hold it; None where none does."""
    told = [(ratio, rival or "", row.workload) for row in rows for ratio, rival in [ratio_of(row)] if ratio is not None]
    mean = geometric_mean([ratio for ratio, _, _ in told])
    if mean is None:
        return None
    worst, rival, workload = min(told)
    return Figure(len(told), mean, worst, rival, workload, sum(ratio < 1 for ratio, _, _ in told))
