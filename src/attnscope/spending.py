"""Where a run's time went: seconds by row and stage. Used by the main job; pure, imports no stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from attnscope.records import Result


class Ledger:
    """Books the time from one ``begin`` to the next on the name and stage that began."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._open: tuple[str, str, float] | None = None
        self.seconds: dict[str, dict[str, float]] = {}

    def begin(self, name: str, stage: str) -> None:
        """``name`` is at ``stage`` from now on; what was open ends."""
        self.end()
        self._open = name, stage, self._now_s()

    def end(self) -> None:
        """Close what is open."""
        if self._open is not None:
            name, stage, began_s = self._open
            self.add(name, stage, self._now_s() - began_s)
        self._open = None

    def add(self, name: str, stage: str, seconds: float) -> None:
        """Book ``seconds`` that were measured elsewhere."""
        stages = self.seconds.setdefault(name, {})
        stages[stage] = stages.get(stage, 0.0) + seconds


def added(row: Result, more: Mapping[str, float]) -> Result:
    """The row with ``more`` seconds by stage."""
    stages = dict(row.seconds)
    for stage, seconds in more.items():
        stages[stage] = stages.get(stage, 0.0) + seconds
    return row.with_changes(seconds=stages)


def spent_sentence(results: Iterable[Result]) -> str:
    """``rows took 92 s: check 40, isolated 31, ...``, the longest stage first; empty where no row holds seconds."""
    stages: dict[str, float] = {}
    for result in results:
        for stage, seconds in result.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    if not stages:
        return ""
    parts = (f"{stage} {stages[stage]:.1f}" for stage in sorted(stages, key=lambda name: -stages[name]))
    return f"rows took {sum(stages.values()):.1f} s: {', '.join(parts)}"
