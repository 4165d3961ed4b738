"""Stage 7: an implementation beside itself: what a mask or a bias adds to a workload's time, and what fp16 does.

Reads Run, writes Twins. Must not import torch. Both times are of the same run, and so is their ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnscope.records import Measurement, Result, Run
from attnscope.reporting.ratio import geometric_mean
from attnscope.workload import Workload


@dataclass(frozen=True)
class Twin:
    """A workload beside its twin: the same without mask and bias, or, of an fp16 one, the same in bf16.

    ``what`` is what the twin lacks: ``mask=bool:Bx1xLxS``, ``bias=bf16:1xHxLxS``, ``fp16``. Ratios are the workload's
    time over the twin's: above 1 it takes longer.
    """

    what: str
    workload: str
    twin: str
    direction: str
    time_ms: float
    twin_time_ms: float
    ratio: float
    sustained_ratio: float | None
    noise_fraction: float


@dataclass(frozen=True)
class Twins:
    """All of one kind on one card. ``worst`` and ``worst_sustained`` are the largest ratios."""

    implementation: str
    what: str
    direction: str
    device: str
    geometric_mean: float
    geometric_mean_sustained: float | None
    worst: float
    worst_sustained: float | None
    worst_workload: str
    rows: tuple[Twin, ...]


def twin_of(workload: Workload) -> tuple[str, Workload] | None:
    """(what the twin lacks, the twin); None for a workload of neither kind."""
    w = workload
    if w.mask or w.bias:
        told = [f"mask=bool:{w.mask}"] * bool(w.mask) + [f"bias={w.bias}:{w.bias_shape}"] * bool(w.bias)
        return ",".join(told), w.replace(mask=None, bias=None)
    return ("fp16", w.replace(dtype="bf16")) if w.dtype == "fp16" else None


def twins_of(runs: Sequence[Run], name: str) -> list[Twins]:
    """One Twins for each card, direction and kind; of a workload in several runs the newest counts."""
    found: dict[tuple[str, str, str], dict[str, Twin]] = {}
    for run in sorted(runs, key=lambda run: run.created):
        mine = {result.workload: result for result in run.results if result.implementation == name}
        for result in mine.values():
            told = twin_of(Workload.parse(result.workload))
            other = None if told is None else mine.get(str(told[1]))
            for direction in run.modes if told is not None and other is not None else ():
                assert told is not None and other is not None
                twin = _twin(told[0], result, other, direction)
                if twin is not None:
                    found.setdefault((str(run.device), direction, told[0]), {})[result.workload] = twin
    return [_summary(name, *key, tuple(twins.values())) for key, twins in found.items()]


def _twin(what: str, result: Result, other: Result, direction: str) -> Twin | None:
    m, plain = result.measurement(direction), other.measurement(direction)
    if m is None or plain is None:
        return None
    return Twin(
        what, result.workload, other.workload, direction, m.time_ms_median, plain.time_ms_median,
        m.time_ms_median / plain.time_ms_median, _sustained(m, plain), max(m.noise_fraction, plain.noise_fraction),
    )  # fmt: skip


def _sustained(m: Measurement, plain: Measurement) -> float | None:
    if m.sustained_ms_median is None or plain.sustained_ms_median is None:
        return None
    return m.sustained_ms_median / plain.sustained_ms_median


def _summary(name: str, device: str, direction: str, what: str, rows: tuple[Twin, ...]) -> Twins:
    sustained = [row.sustained_ratio for row in rows if row.sustained_ratio is not None]
    worst = max(rows, key=lambda row: row.ratio)
    return Twins(
        name, what, direction, device, geometric_mean([row.ratio for row in rows]) or 1.0, geometric_mean(sustained),
        worst.ratio, max(sustained, default=None), worst.workload, rows,
    )  # fmt: skip
