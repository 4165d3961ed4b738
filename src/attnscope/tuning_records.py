"""Stage 4: what tuning found of each class of workloads, and which configuration that makes the choice.

Reads plain times, writes Tried, TunedClass and TuneReport. Pure; imports no torch, no implementation, no later stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnscope.device import Device, Environment
from attnscope.errors import RecordError
from attnscope.units import median
from attnscope.verdicts import mean_interval, noise_fraction, word_for

STATUSES = ("measured", "wrong", "failed")
PACKAGES = ("attnscope", "torch", "triton", "cuda-core")

Times = Mapping[str, Mapping[int, float]]  # of one candidate: workload -> round -> ms


@dataclass(frozen=True)
class Tried:
    """One configuration on all workloads of a class.

    ``wrong``: its check failed, ``message`` says how; ``failed``: it did not compile, crashed, hung. ``time_ms`` is its
    median time by workload, ``noise_fraction`` the largest of them. ``ratio`` is its time over the shipped choice's,
    the geometric mean over workloads with its 95 % interval; None where the shipped choice has no time.
    """

    label: str
    configuration: dict[str, Any]
    status: str
    message: str = ""
    time_ms: dict[str, float] = field(default_factory=dict)
    noise_fraction: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise RecordError(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}")
        if self.time_ms and self.status != "measured":
            raise RecordError(f"{self.label}: a configuration that is {self.status} has no time")


@dataclass(frozen=True)
class TunedClass:
    """A class of workloads: what was tried, the shipped choice first, and the place in ``tried`` of what is chosen.

    ``chosen`` is None where nothing is right. ``entry`` is what the table then holds for the class.
    """

    name: str
    workloads: tuple[str, ...]
    tried: tuple[Tried, ...]
    chosen: int | None
    entry: dict[str, Any]
    seconds: float

    @property
    def is_changed(self) -> bool:
        """Whether another configuration than the shipped choice is chosen."""
        return self.chosen not in (None, 0)

    def facts(self, environment: Environment, created: str) -> dict[str, Any]:
        """What the choice rests on, for the table; what is missing is left out."""
        assert self.chosen is not None
        best = self.tried[self.chosen]
        versions = {name: environment.packages.get(name) for name in PACKAGES}
        facts = {
            "workloads": list(self.workloads),
            "candidates": len(self.tried),
            "is_shipped_choice": not self.is_changed,
            "ratio": best.ratio,
            "ratio_low": best.ratio_low,
            "ratio_high": best.ratio_high,
            "noise_fraction": best.noise_fraction,
            "created": created,
            "driver": environment.driver,
            "git_commit": environment.git_commit,
            **{name.replace("-", "_"): version for name, version in versions.items()},
        }
        return {
            name: round(value, 5) if isinstance(value, float) else value
            for name, value in facts.items()
            if value is not None
        }


@dataclass(frozen=True)
class TuneReport:
    """One run of ``attnscope tune``. ``not_tuned``: workload -> why; ``left`` names classes that were not begun;
    ``table`` is the file that was written, None where none was."""

    implementation: str
    device: Device
    environment: Environment
    created: str
    classes: tuple[TunedClass, ...]
    not_tuned: dict[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    table: str | None = None
    quick: bool = False
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def has_faults(self) -> bool:
        """Whether a candidate was wrong or failed."""
        return any(one.status != "measured" for found in self.classes for one in found.tried)


def measured(label: str, configuration: dict[str, Any], times: Times, shipped: Times | None) -> Tried:
    """What the times of a right candidate say, beside those of the shipped choice."""
    ratio, low, high = _ratio(times, shipped) if shipped is not None else (None, None, None)
    return Tried(
        label,
        configuration,
        "measured",
        time_ms={workload: median(list(rounds.values())) for workload, rounds in times.items()},
        noise_fraction=max(noise_fraction(list(rounds.values())) for rounds in times.values()),
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
    )


def _ratio(times: Times, shipped: Times) -> tuple[float | None, float | None, float | None]:
    """(ratio, low, high) over paired rounds; no interval where one workload has fewer than two pairs."""
    intervals = []
    for workload, rounds in times.items():
        both = [turn for turn in rounds if turn in shipped[workload]]
        if not both:
            return None, None, None
        intervals.append(mean_interval([math.log(rounds[turn] / shipped[workload][turn]) for turn in both]))
    count = len(intervals)
    centre = sum(middle for middle, _, _ in intervals) / count
    half = math.sqrt(sum((middle - low) ** 2 for middle, low, _ in intervals)) / count
    if math.isinf(half):
        return math.exp(centre), None, None
    return math.exp(centre), math.exp(centre - half), math.exp(centre + half)


def fastest_first(tried: Sequence[Tried]) -> list[int]:
    """Places in ``tried`` of what is right, by median times, geometric mean over workloads."""
    right = [place for place, one in enumerate(tried) if one.status == "measured"]
    return sorted(right, key=lambda place: sum(math.log(ms) for ms in tried[place].time_ms.values()))


def is_faster(one: Tried) -> bool:
    """Than the shipped choice, beyond noise and by more than a hundredth."""
    if one.status != "measured" or one.ratio_low is None or one.ratio_high is None:
        return False
    return word_for(math.log(one.ratio_low), math.log(one.ratio_high)) == "faster"
