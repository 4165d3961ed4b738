"""What Nsight Compute counts in one call of an implementation beside its rivals': which unit is busy, at which clock.

``python benchmarks/counters.py --record OUT.json`` runs on a card whose driver lets a user count, and has ``ncu``:
each of ``CASES`` in a process of its own, one call after two that warm it, clocks left alone. The block ``counters`` of
figures.py is written from ``benchmarks/results/counters-*.json``.

Beside them stands what a kernel that only reads gets of the read bandwidth in one call, of as many bytes as the keys
and values of decoding: what start and end cost there, whoever reads.

ncu flushes the caches before each pass over a kernel and passes several times, so its times are not those of the
records; shares of units are per cycle.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from guide_blocks import table as markdown_table

from attnscope.device import Device, find_device, read_environment
from attnscope.errors import AttnscopeError, PrepareFailed, RecordError
from attnscope.limits import READ_BYTES, read_ways
from attnscope.timers import make_timer
from attnscope.units import DTYPE_BYTES, MISSING, format_us, median
from attnscope.workload import Workload

FORMAT = 1
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "SchedulerStats", "LaunchStats")
CASES = {  # workload -> who is looked at
    "B1,H32,L16384,D64,bf16": ("hopper", "hopper_cuda", "flash_attn_4"),
    "B1,H16,L16384,D128,bf16": ("hopper", "hopper_cuda", "flash_attn_4"),
    "B2,H8,L8192,D256,bf16": ("hopper", "flash_attn_4"),
    "B64,H16,L256,D64,bf16,causal": ("hopper", "sdpa_cudnn"),
    "B1,H32,L512,D128,bf16,causal": ("hopper", "flash_attn_4"),
    "B8,H32/8,L1,S8192,D128,bf16": ("hopper", "sdpa_cudnn"),
    "B1,H32/8,L1,S32768,D128,bf16": ("hopper", "sdpa_cudnn"),
}
ACTIVE, ELAPSED = r"\.avg\.pct_of_peak_sustained_active", r"\.avg\.pct_of_peak_sustained_elapsed"
# Column -> the metrics that may stand for it, of which the first that ncu printed counts, and what divides it.
COLUMNS: dict[str, tuple[tuple[str, ...], float]] = {
    "tensor cores, %": (
        (r"sm__pipe_tensor\w*_cycles_active" + ACTIVE, r"sm__inst_executed_pipe_tensor\w*" + ACTIVE),
        1,
    ),
    "exponentials, %": ((r"sm__inst_executed_pipe_xu" + ACTIVE,), 1),
    "issue slots, %": ((r"sm(sp)?__inst_issued" + ACTIVE, r"smsp__issue_active\.avg\.pct\w*"), 1),
    "L2, %": ((r"lts__throughput" + ELAPSED, r"lts__t_sectors" + ELAPSED), 1),
    "memory, %": ((r"gpu__dram_throughput" + ELAPSED, r"dram__throughput" + ELAPSED), 1),
    "clock, MHz": ((r"(sm|smsp|gpc)__cycles_elapsed\.avg\.per_second",), 1e6),
}
KEPT = re.compile(r"pipe_|throughput|issue|cycles_(active|elapsed)|time_duration|registers|grid|block_size")


# --- recording --------------------------------------------------------------------------------------------------------


def record(cases: dict[str, Sequence[str]]) -> dict[str, Any]:
    """The record of ``cases``, one row for each workload and implementation, in their order.

    Raises:
        PrepareFailed: there is no ncu, or it counted nothing; its last lines are the message.
    """
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    if not Path(ncu).is_file():
        raise PrepareFailed("there is no ncu\nhint: Nsight Compute is a part of the CUDA toolkit")
    rows = [
        {"workload": workload, "implementation": name, "kernels": counted(ncu, workload, name)}
        for workload, names in cases.items()
        for name in names
    ]
    device = find_device("cuda")
    version = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    return {
        "format": FORMAT, "device": device.name, "ncu": version, "environment": asdict(read_environment()),
        "rows": rows, "reads": lone_reads(device),
    }  # fmt: skip


def lone_reads(device: Device) -> list[dict[str, float]]:
    """Of each size: time of one call that reads it from memory and does little else, the faster of two, and its share
    of the bandwidth at which 4 GiB are read again and again, of the same minute."""
    import torch

    timer, largest = make_timer(device), torch.rand(READ_BYTES["cuda"] // 4, device=device.torch_name)
    steady_ms = min(timer.steady_ms(way, 0.3) for way in read_ways(largest))
    found = []
    for size in sorted({key_value_bytes(Workload.parse(text)) for text in CASES} - {0}):
        ways = read_ways(largest[: size // 4])
        us = min(median([timer.time_call(way, 100.0).ms for _ in range(30)][5:]) for way in ways) * 1e3
        found.append({"bytes": size, "us": us, "share": size / us / 1e3 / (largest.nbytes / steady_ms / 1e6)})
    return found


def key_value_bytes(w: Workload) -> int:
    """Of keys and values of decoding; 0 of other workloads."""
    return w.B * w.H_kv * w.S * (w.D + w.D_v) * DTYPE_BYTES[w.dtype] if w.L == 1 else 0


def counted(ncu: str, workload: str, name: str) -> list[dict[str, Any]]:
    """Each kernel of one call, with its metrics, in the order in which they ran."""
    sections = [argument for section in SECTIONS for argument in ("--section", section)]
    command = [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--profile-from-start",
        "off", *sections, sys.executable, __file__, "--call", workload, name,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    found = read_csv(done.stdout)
    if done.returncode or not found:
        told = "\n".join([*done.stdout.splitlines()[-6:], *done.stderr.splitlines()[-6:]])
        raise PrepareFailed(f"ncu counted nothing of {name} on {workload}, exit status {done.returncode}:\n{told}")
    return found


def read_csv(printed: str) -> list[dict[str, Any]]:
    """What ``ncu --csv --page raw`` printed: a line of names, one of units, one for each kernel; other lines are
    ncu's or the program's."""
    lines = [line for line in printed.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        return []
    names, _units, *kernels = list(csv.reader(lines))
    return [_kernel(dict(zip(names, kernel, strict=True))) for kernel in kernels]


def _kernel(row: dict[str, str]) -> dict[str, Any]:
    found = {name: _number(text) for name, text in row.items() if "__" in name and KEPT.search(name)}
    metrics = {name: number for name, number in found.items() if number is not None}
    return {"name": row["Kernel Name"], "metrics": metrics}


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def call_once(workload: str, name: str) -> None:
    """What ncu looks at: one forward after two that compile and warm it."""
    import torch

    from attnscope.implementation import find
    from attnscope.inputs import make_inputs

    device, parsed = find_device("cuda"), Workload.parse(workload)
    prepared, inputs = find(name).prepare(parsed, device), make_inputs(parsed, device)
    for _ in range(2):
        prepared.forward(inputs)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    prepared.forward(inputs)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


# --- the table --------------------------------------------------------------------------------------------------------


def read_record(path: Path) -> dict[str, Any]:
    """A record. Raises RecordError where the file is none."""
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise RecordError(f"{path.name} has format {found['format']}, this command reads {FORMAT}")
        return {key: found[key] for key in ("device", "ncu", "environment", "rows", "reads")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path.name} is no record of counters: {error!r}") from error


def value(metrics: dict[str, float], column: str) -> float | None:
    """A column's value, of the first metric that is there; of several that match, the largest. None where none is."""
    patterns, unit = COLUMNS[column]
    for pattern in patterns:
        found = [number for name, number in metrics.items() if re.fullmatch(pattern, name)]
        if found:
            return max(found) / unit
    return None


def block(folder: Path) -> str | None:
    """The Markdown of the newest record in a folder; None where there is none. Raises RecordError."""
    records = sorted(folder.glob("counters-*.json"))
    return table(read_record(records[-1])) if records else None


def table(found: dict[str, Any]) -> str:
    """Of each call the kernel that took most cycles."""
    rows = []
    for row in found["rows"]:
        metrics = max((kernel["metrics"] for kernel in row["kernels"]), key=_cycles)
        cells = [MISSING if (v := value(metrics, column)) is None else f"{v:.0f}" for column in COLUMNS]
        rows.append([f"`{row['workload']}`", f"`{row['implementation']}`", *cells])
    versions = ", ".join(f"{name} {version}" for name, version in sorted(found["environment"]["packages"].items()))
    origin = f"{found['device']}; Nsight Compute {found['ncu'].removeprefix('Version ')}; {versions}."
    reads = [
        f"{r['bytes'] / 1e6:.0f} MB in {format_us(r['us'])}, {r['share']:.2f} of the bandwidth" for r in found["reads"]
    ]
    alone = [f"One call that only reads, alone: {'; '.join(reads)}."] if reads else []
    head = ["workload", "implementation", *COLUMNS]
    return "\n".join([markdown_table(head, rows, left=2), "", *alone, origin])


def _cycles(metrics: dict[str, float]) -> float:
    return metrics.get("sm__cycles_elapsed.max", metrics.get("gpu__time_duration.sum", 0.0))


def parse_cases(spelled: Iterable[str]) -> dict[str, Sequence[str]]:
    """``WORKLOAD=NAME+NAME`` as a case; none given: ``CASES``."""
    return {case.rsplit("=", 1)[0]: case.rsplit("=", 1)[1].split("+") for case in spelled} or dict(CASES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 for what cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", metavar="OUT", type=Path, help="count on this machine's card")
    what.add_argument("--call", nargs=2, metavar=("WORKLOAD", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("cases", nargs="*", metavar="WORKLOAD=NAME+NAME", help="instead of all cases")
    parsed = parser.parse_args(arguments)
    try:
        if parsed.call:
            call_once(*parsed.call)
        else:
            parsed.record.write_text(json.dumps(record(parse_cases(parsed.cases)), indent=1) + "\n")
    except AttnscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
