"""What a long job says while it runs: a Step to whoever watches. Pure; used by the main job, fuzz and tune."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """Progress: ``done`` of ``total`` steps, and what begins now."""

    done: int
    total: int
    what: str


Watcher = Callable[[Step], None]
