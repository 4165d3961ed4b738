"""Explain the traces of a run anew: after a rule has changed, its profiles, kernels and findings follow.

    python benchmarks/reexplain.py results/run.jsonl

Each profile's trace is looked for beside the file, as the record names it. Checks and measurements stay as they are; so
does a direction whose profile names no trace. The file is rewritten whole or not at all.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attnscope.device import Device
from attnscope.errors import AttnscopeError, RecordError
from attnscope.explaining import explain_profile
from attnscope.records import Finding, Profile, Result, Run, read_runs, run_lines
from attnscope.trace import read_trace
from attnscope.workload import Workload


def reexplain(path: Path) -> tuple[int, int, int]:
    """Rewrite a records file; how many profiles were read, and how many findings went and came.

    A finding whose text changed counts as one that went and one that came.

    Raises:
        RecordError: the file cannot be read or written.
        TraceError: a trace is missing or broken; nothing is written then.
    """
    old = read_runs(path)
    new = [explained(run, path.parent) for run in old]
    read = sum(profile.trace is not None for run in old for result in run.results for profile in result.profiles)
    before, after = _said(old), _said(new)
    _write(new, path)
    return read, len(before - after), len(after - before)


def _said(runs: Sequence[Run]) -> set[Finding]:
    """What is said, without the savings' last digits, which depend on how Python adds."""
    return {replace(f, saving_us=None) for run in runs for result in run.results for f in result.findings}


def explained(run: Run, folder: Path) -> Run:
    """The run, each profile read anew from its trace in ``folder``. Raises TraceError."""
    return replace(run, results=tuple(_explained(result, run.device, folder) for result in run.results))


def _explained(result: Result, device: Device, folder: Path) -> Result:
    anew = {profile.direction for profile in result.profiles if profile.trace is not None}
    kernels = [kernel for kernel in result.kernels if kernel.direction not in anew]
    findings = [finding for finding in result.findings if finding.direction not in anew]
    profiles: list[Profile] = []
    for old in result.profiles:
        if old.trace is None:
            profiles.append(old)
            continue
        measurement = result.measurement(old.direction)
        profile, seen, found = explain_profile(
            read_trace(folder / old.trace),
            workload=Workload.parse(result.workload),
            implementation=result.implementation,
            direction=old.direction,
            device=device,
            label=old.label,
            trace_name=old.trace,
            host_us=measurement.wall_us_median if measurement is not None else None,
        )
        profiles.append(profile)
        kernels += seen
        findings += found
    return result.with_changes(profiles=tuple(profiles), kernels=tuple(kernels), findings=tuple(findings))


def _write(runs: Sequence[Run], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(b"".join(line + b"\n" for run in runs for line in run_lines(run)))
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, else the error's own."""
    parser = argparse.ArgumentParser(description="Explain the traces of a run anew.")
    parser.add_argument("run", type=Path, help="a run.jsonl, with its traces beside it")
    path = parser.parse_args(arguments).run
    try:
        read, gone, come = reexplain(path)
    except AttnscopeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{path}: {read} profiles read anew, {gone} findings gone or changed, {come} new or changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
