"""A run in several commands: what earlier ones finished is left out, and no further workload begins near a limit.

Reads Runs and workloads, writes workloads. Each command stays a run of its own with limits of its own, so that no
figure is ever compared across two; what is joined is only the list of what is still to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from attnscope.device import Device, Environment
from attnscope.errors import UsageError
from attnscope.keeping import finished_part
from attnscope.records import Run
from attnscope.workload import Workload

MARGIN = 1.2  # how much longer than the longest so far the next workload may take
ALIKE = ("packages", "driver", "cuda", "cudnn_loaded", "git_commit")


def remaining(workloads: Sequence[Workload], names: Iterable[str], earlier: Iterable[Run]) -> tuple[Workload, ...]:
    """Those of ``workloads`` that no earlier run finished with a row for each of ``names``."""
    wanted = set(names)
    done = set()
    for run in map(finished_part, earlier):
        rows: dict[str, set[str]] = {}
        for result in run.results:
            rows.setdefault(result.workload, set()).add(result.implementation)
        done |= {workload for workload, rivals in rows.items() if rivals >= wanted}
    return tuple(workload for workload in workloads if str(workload) not in done)


def refuse_unlike(earlier: Iterable[Run], now: Run) -> None:
    """Earlier runs must be of the same card, versions, commit and settings.

    Raises:
        UsageError: with what differs.
    """
    for run in earlier:
        for what, was, is_now in _differences(run, now):
            if was != is_now:
                raise UsageError(
                    f"--after must name runs like this one, whose {what} is {is_now}; in that of {run.created} it was "
                    f"{was}\nhint: leave it out, and measure all workloads again"
                )


def _differences(run: Run, now: Run) -> Iterable[tuple[str, object, object]]:
    def card(device: Device) -> tuple[object, ...]:
        return device.kind, device.name, device.capability

    def versions(environment: Environment) -> dict[str, object]:
        return {name: getattr(environment, name) for name in ALIKE}

    yield "device", card(run.device), card(now.device)
    was, is_now = versions(run.environment), versions(now.environment)
    for name in ALIKE:
        yield f"environment's {name}", was[name], is_now[name]
    for name in ("modes", "quick", "seed"):
        yield name, getattr(run, name), getattr(now, name)


@dataclass
class Budget:
    """Says whether another workload may begin, by how long the longest so far took. ``seconds`` None: always."""

    seconds: float | None
    now_s: Callable[[], float] = time.monotonic
    longest_s: float = 0.0
    started_s: float = field(default=0.0, init=False)
    begun_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.started_s = self.now_s()

    def allows_another(self) -> bool:
        """Called before each workload; the first may always begin."""
        now = self.now_s()
        if self.begun_s is not None:
            self.longest_s = max(self.longest_s, now - self.begun_s)
        first, self.begun_s = self.begun_s is None, now
        return first or self.seconds is None or now - self.started_s + MARGIN * self.longest_s <= self.seconds
