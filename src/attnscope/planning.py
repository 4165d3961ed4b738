"""The main job's plan: what one run is to do, validated. Reads words and numbers, writes a Plan; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope import implementation as registry
from attnscope.errors import UsageError
from attnscope.records import Run
from attnscope.resuming import remaining
from attnscope.suites import CPU_DEFAULT, GPU_DEFAULT, find_workloads
from attnscope.worker import printable
from attnscope.workload import DIRECTIONS, Workload

RUN, SO_FAR = "run.jsonl", "so-far.jsonl"  # of a run's folder: the whole, and what is finished while it goes on
MODES = {"forward": ("forward",), "backward": ("backward",), "both": DIRECTIONS}


@dataclass(frozen=True)
class Plan:
    """What one run is to do. ``named`` are the implementations that were asked for by name; ``stages`` are those after
    the check: measure, profile."""

    workloads: tuple[Workload, ...]
    implementations: tuple[str, ...]
    named: frozenset[str] = frozenset()
    modes: tuple[str, ...] = DIRECTIONS
    device: str | None = None
    stages: tuple[str, ...] = ("measure", "profile")
    quick: bool = False
    seed: int = 0
    out: Path | None = None
    wait: int = 1
    warmup: int = 1
    active: int = 3
    compile: bool = False
    sustained_s: float | None = None
    time_limit_s: float | None = None
    budget_s: float | None = None
    after: tuple[Run, ...] = ()
    warm: int = 0


def make_plan(
    workloads: Sequence[Workload | str],
    implementations: str | Sequence[str],
    mode: str,
    device: str | None,
    stages: tuple[str, ...],
    *,
    out: str | Path | None = None,
    **more: Any,
) -> Plan:
    """A validated plan. Raises UsageError (also WorkloadError, UnknownImplementation)."""
    if mode not in MODES:
        raise UsageError(f"mode must be forward, backward or both, got {mode!r}")
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"device must be cpu or cuda, got {device!r}")
    chosen = implementations if isinstance(implementations, str) else ",".join(implementations)
    found: dict[Workload, None] = {}
    for workload in workloads:
        if not isinstance(workload, (str, Workload)):
            raise UsageError(f"a workload must be a Workload or its spelling, got {workload!r:.120}")
        found.update(dict.fromkeys([workload] if isinstance(workload, Workload) else find_workloads([workload])))
    _validate_settings(more)
    folder = prepare_folder(Path(out)) if out is not None else None
    selected, named = registry.select_named(chosen)
    return Plan(tuple(found), tuple(selected), named, MODES[mode], device, stages, out=folder, **more)


def _validate_settings(settings: dict[str, Any]) -> None:
    """Numbers in their ranges. Raises UsageError."""
    ranges = {
        "seed": (0, 2**63 - 1), "wait": (0, 1000), "warmup": (0, 1000), "active": (1, 1000), "warm": (0, 256),
        "sustained_s": (0.0, 3600.0), "time_limit_s": (0.001, 1e6), "budget_s": (0.001, 1e6),
    }  # fmt: skip
    for name, (least, most) in ranges.items():
        value = settings.get(name)
        if value is None:
            continue
        whole = isinstance(least, int)
        fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not fits or not math.isfinite(value) or not least <= value <= most:
            kind = "a whole number" if whole else "a number"
            raise UsageError(f"{name} must be {kind} from {least:g} to {most:g}, got {value!r}")


def prepare_folder(folder: Path) -> Path:
    """Make an output folder that holds no earlier run. Raises UsageError."""
    if str(folder) in ("", ".") or printable(str(folder)) != str(folder):
        raise UsageError(f"--out must be a folder of its own with a UTF-8 name, got {printable(str(folder))!r}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".attnscope-probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"--out must be a folder that can be written, got {folder}: {error.strerror or error}"
        ) from None
    for name in (RUN, SO_FAR, "report.html"):
        if (folder / name).exists():
            raise UsageError(f"{folder} already holds {name}, which is never overwritten\nhint: --out another folder")
    return folder


def asked_workloads(plan: Plan, kind: str) -> tuple[Workload, ...]:
    """The plan's workloads, or the default suite of that kind of device."""
    return plan.workloads or tuple(find_workloads(list(CPU_DEFAULT if kind == "cpu" else GPU_DEFAULT)))


def left_over(plan: Plan, run: Run) -> tuple[Workload, ...]:
    """What of the plan neither earlier runs nor this one finished."""
    return remaining(asked_workloads(plan, run.device.kind), plan.implementations, (*plan.after, run))
