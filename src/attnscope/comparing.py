"""The main job as functions: compare, check, measure and profile, and what each writes.

Reads workloads and names, writes a Run. Plans are made in :mod:`attnscope.planning` and run in
:mod:`attnscope.sweeping`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeError, UsageError
from attnscope.planning import Plan, make_plan
from attnscope.records import Run
from attnscope.sweeping import execute, save
from attnscope.workload import Workload

SETTINGS = ("sustained_s", "time_limit_s", "budget_s", "after", "wait", "warmup", "active", "compile", "warm")


def compare(
    *workloads: Workload | str,
    implementations: str | Sequence[str] = "all",
    mode: str = "both",
    device: str | None = None,
    quick: bool = False,
    profile: bool = True,
    seed: int = 0,
    out: str | Path | None = None,
    **settings: Any,
) -> Run:
    """Check, measure, profile and explain implementations on workloads; returns the Run, which shows itself.

    Args:
        workloads: spellings, suite names or Workloads; without any, the default suite of the device.
        implementations: names, ``all`` (without the ladder) or ``ladder``.
        mode: ``forward``, ``backward`` or ``both``.
        device: ``cpu`` or ``cuda``; by default the GPU if there is one.
        quick: fewer samples, no sustained blocks, fewer kinds of check inputs.
        profile: also write traces (needs ``out``; without it they go to a temporary folder and are read there).
        seed: of the inputs.
        out: a folder for run.jsonl, report.html and traces; nothing is written without one.
        settings: ``sustained_s`` (seconds of each sustained block), ``time_limit_s`` (for one implementation to prepare
            and check), ``budget_s`` (begin no workload that may not end within so many seconds), ``after`` (earlier
            runs, whose finished workloads are left out), ``wait``, ``warmup``, ``active`` (profiled steps), ``compile``
            (profile torch.compile of it), ``warm`` (processes that first compile everything at once).

    Raises:
        UsageError: an argument is not what it must be.
        DeviceError: no such device, or too little memory.
    """
    stages = ("measure", "profile") if profile else ("measure",)
    options = {"implementations": implementations, "mode": mode, "device": device, "quick": quick, "seed": seed}
    return _execute_and_save(_plan(workloads, stages, options | settings | {"out": out}))


def check(*workloads: Workload | str, **options: Any) -> Run:
    """Only the check: :func:`compare` without times and traces; takes the same options but ``profile``."""
    return _execute_and_save(_plan(workloads, (), options))


def measure(*workloads: Workload | str, **options: Any) -> Run:
    """Check, then measure what passed; takes the options of :func:`compare` but ``profile``."""
    return _execute_and_save(_plan(workloads, ("measure",), options))


def profile(*workloads: Workload | str, **options: Any) -> Run:
    """Check, then profile and explain what passed; takes the options of :func:`compare` but ``profile``."""
    return _execute_and_save(_plan(workloads, ("profile",), options))


def _execute_and_save(plan: Plan) -> Run:
    """Run, and write what the command line writes too. A missing plotting library is a warning: the run is kept."""
    run = execute(plan)
    if plan.out is not None:
        from attnscope.reporting.html import write_report

        save(run, plan.out)
        try:
            write_report([run], plan.out / "report.html")
        except AttnscopeError as error:
            warnings.warn(f"no report.html: {error}", stacklevel=3)
    return run


def _plan(workloads: Sequence[Workload | str], stages: tuple[str, ...], options: dict[str, Any]) -> Plan:
    known = {"implementations", "mode", "device", "quick", "seed", "out", *SETTINGS}
    if unknown := set(options) - known:
        raise UsageError(f"unknown option {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    picked = {"implementations": "all", "mode": "both", "device": None} | options
    implementations, mode, device = (picked.pop(name) for name in ("implementations", "mode", "device"))
    return make_plan(workloads, implementations, mode, device, stages, **picked)
