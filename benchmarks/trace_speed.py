"""Write large synthetic traces, measure how fast and in how much memory attnscope explains them, tell it in the docs.

    python benchmarks/trace_speed.py            # measures the sizes of SIZES, writes the figures and the docs' table
    python benchmarks/trace_speed.py --events 1600000      # only the traces of that size; other figures stay
    python benchmarks/trace_speed.py --check    # measures nothing: exits 1 where the docs do not show the figures
    python benchmarks/trace_speed.py --trace my.json      # measures one file, writes nothing

The files are like kineto's: indented, with Python functions, ops, launches, kernels and flows. What is measured is the
whole command, from the start of the interpreter to the end of its output; its memory is that of both its processes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "benchmarks" / "data" / "trace_speed.json"
PAGE = ROOT / "docs" / "guide" / "explain.md"
BEGIN, END = "<!-- generated: trace speed -->\n", "<!-- end generated -->"
SIZES = ((13_300, False), (1_600_000, False), (1_600_000, True), (10_700_000, False))  # events; packed or not
SAMPLED_EVERY_S = 0.05
H100 = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85018279936, "computeMajor": 9, "computeMinor": 0,
        "maxThreadsPerMultiprocessor": 2048, "regsPerMultiprocessor": 65536, "warpSize": 32, "numSms": 132,
        "sharedMemPerBlock": 49152, "sharedMemPerBlockOptin": 232448, "sharedMemPerMultiprocessor": 233472}  # fmt: skip
FLASH = ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
         "cutlass::bfloat16_t, pytorch_flash::Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, false, "
         "true, false, false, false, true, false, false>(pytorch_flash::Flash_fwd_params)")  # fmt: skip
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel"
CALLED = (
    "torch/nn/modules/module.py(1527): _call_impl",
    "transformers/models/qwen2/modeling_qwen2.py(@a): forward",
    "torch/nn/modules/module.py(1527): _call_impl",
    "transformers/models/qwen2/modeling_qwen2.py(@b): forward",
)
# In these @ marks what changes from event to event.
EVENT = """  {
    "ph": "X", "cat": "%s", "name": %s, "pid": %d, "tid": %d,
    "ts": @t, "dur": %.3f,
    "args": {
      %s
    }
  }"""
FLOW = """  {
    "ph": "%s", "id": @n, "pid": %d, "tid": %d, "ts": @t,
    "cat": "ac2g", "name": "ac2g"%s
  }"""
OP_ARGS = ('"External id": @n,"Record function id": 0, "Sequence number": @n, "Fwd thread id": 0, '
           '"Concrete Inputs": ["", "", "", "", "0.", "True", "", "False"], '
           '"Input type": ["c10::BFloat16", "c10::BFloat16", "c10::BFloat16", "", "Scalar", "Scalar", "", "Scalar"], '
           '"Input Strides": [[1048576, 65536, 64, 1], [1048576, 65536, 64, 1], [1048576, 65536, 64, 1], [], [], [], '
           '[], []], "Input Dims": [[8, 16, 1024, 64], [8, 16, 1024, 64], [8, 16, 1024, 64], [], [], [], [], []], '
           '"Ev Idx": @n')  # fmt: skip
KERNEL_ARGS = ('"External id": @n, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": @n,'
               '"registers per thread": 168, "shared memory": 49152, "blocks per SM": 3.878788, '
               '"warps per SM": 15.515152, "grid": [8, 16, 4], "block": [128, 1, 1], '
               '"est. achieved occupancy %": 13')  # fmt: skip
CALL_ARGS = '"External id": @n, "cbid": 211, "correlation": @n'
PYTHON_ARGS = '"Python parent id": @n, "Python id": @n, "Python thread": 0, "Ev Idx": @n'
HOST, START_US, ROUND_US = 1_419_392, 1_419_247_333_291.708, 31


def write_trace(path: Path, events: int) -> None:
    """About ``events`` events: per round 4 Python functions, 3 ops, a launch, a kernel and the flow between both."""
    now, others, attention = START_US, _round(attention=False), _round(attention=True)
    with path.open("w") as file:
        file.write(f'{{"schemaVersion": 1, "deviceProperties": [{json.dumps(H100)}], "traceEvents": [\n')
        for n in range(1, events // 11 + 1):
            text, offsets = others if n % 8 else attention
            file.write(text % {"n": n, "a": n % 97, "b": n % 89, **{f"t{i}": now + t for i, t in enumerate(offsets)}})
            now += ROUND_US
        last, _ = _template([(_event("Trace", "PyTorch Profiler (0)", 0, 0, 1, PYTHON_ARGS), 0)])
        file.write(last % {"n": 0, "t0": now} + "\n]}\n")


def _round(*, attention: bool) -> tuple[str, list[float]]:
    """Eleven events to be filled in, and when each begins after the round does."""
    name = "aten::scaled_dot_product_attention" if attention else "aten::linear"
    inner = "aten::_flash_attention_forward" if attention else "aten::addmm"
    text, offsets = _template([
        *((_event("python_function", one, HOST, HOST, 30 - i, PYTHON_ARGS), i / 10) for i, one in enumerate(CALLED)),
        (_event("cpu_op", name, HOST, HOST, 20, OP_ARGS), 1),
        (_event("cpu_op", inner, HOST, HOST, 15, OP_ARGS), 2),
        (_event("cpu_op", "aten::empty", HOST, HOST, 2, OP_ARGS), 3),
        (_event("cuda_runtime", "cudaLaunchKernel", HOST, HOST, 4, CALL_ARGS), 8),
        (_event("kernel", FLASH if attention else GEMM, 0, 7, 25, KERNEL_ARGS), 20),
        (FLOW % ("s", HOST, HOST, ""), 8),
        (FLOW % ("f", 0, 7, ', "bp": "e"'), 20),
    ])  # fmt: skip
    return text + ",\n", offsets


def _event(cat: str, name: str, pid: int, tid: int, dur: float, args: str) -> str:
    return EVENT % (cat, json.dumps(name), pid, tid, dur, args)


def _template(rows: list[tuple[str, float]]) -> tuple[str, list[float]]:
    texts = [text.replace("%", "%%").replace("@t", f"%(t{i}).3f") for i, (text, _) in enumerate(rows)]
    text = re.sub("@([nab])", r"%(\1)d", ",\n".join(texts))
    return text, [offset for _, offset in rows]


@dataclass(frozen=True)
class Row:
    """One trace, explained. ``cpu_s``: the time both processes computed; ``load``: the load average before."""

    events: int
    packed: bool
    size_mb: float
    wall_s: float
    cpu_s: float
    peak_gib: float
    load: float


def measure(path: Path, events: int) -> Row:
    """Explain a trace and watch the command from outside. Needs Linux."""
    load = os.getloadavg()[0]
    before, start, peak = os.times(), time.perf_counter(), 0
    with subprocess.Popen(
        [sys.executable, "-m", "attnscope", "explain", str(path), "--json"], stdout=subprocess.DEVNULL
    ) as process:
        while process.poll() is None:
            peak = max(peak, _resident_bytes(process.pid))
            time.sleep(SAMPLED_EVERY_S)
    wall, after = time.perf_counter() - start, os.times()
    if process.returncode:
        raise SystemExit(process.returncode)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Row(events, path.suffix == ".gz", round(path.stat().st_size / 1e6, 1), round(wall, 2), round(cpu, 2),
               round(peak / 2**30, 2), round(load, 1))  # fmt: skip


def _resident_bytes(pid: int) -> int:
    """Of a process and its children; 0 for one that is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(_resident_bytes(int(child)) for child in children)


def measure_size(events: int, packed: bool) -> Row:
    """Write a trace into a folder for temporary files, explain it, remove it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(path, events)
        if packed:
            with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb", compresslevel=6) as file:
                shutil.copyfileobj(plain, file, 1 << 20)
            path.unlink()
            path = path.with_suffix(".json.gz")
        return measure(path, events)


def table(figures: dict[str, Any]) -> str:
    """The docs' block."""
    lines = ["| trace | events | time | processor time | memory |", "| --- | ---: | ---: | ---: | ---: |"]
    for one in figures["rows"]:
        row = Row(**one)
        size = f"{row.size_mb / 1000:.1f} GB" if row.size_mb >= 1000 else f"{row.size_mb:.0f} MB"
        lines.append(
            f"| {size}{' gzipped' if row.packed else ''} | {row.events:,} | {row.wall_s:.1f} s | {row.cpu_s:.1f} s | "
            f"{row.peak_gib:.2f} GiB |"
        )
    said = f"On {figures['cores']} cores with Python {figures['python']}."
    load = max(row["load"] for row in figures["rows"])
    if load > figures["cores"] / 2:
        said += f" Other work shared the cores (load average up to {load:.0f}), so that alone it takes less time."
    return "\n".join([*lines, "", said, ""])


def page(figures: dict[str, Any]) -> str:
    """The guide with the block written anew."""
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return head + BEGIN + table(figures) + END + rest.split(END, 1)[1]


def main() -> None:
    """Measure and write, or check what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="measure this file instead, and write nothing")
    parser.add_argument("--events", type=int, help="measure the traces of this size only")
    parser.add_argument("--check", action="store_true", help="measure nothing, compare the docs with the figures")
    options = parser.parse_args()
    if options.trace is not None:
        print(measure(options.trace, 0))
        return
    if options.check:
        if page(json.loads(FIGURES.read_text())) != PAGE.read_text(encoding="utf-8"):
            sys.exit(f"{PAGE.name} does not show the figures of {FIGURES.name}: run benchmarks/trace_speed.py")
        return
    known = json.loads(FIGURES.read_text())["rows"] if FIGURES.exists() else []
    rows = {(row["events"], row["packed"]): row for row in known}
    for size in SIZES:
        if options.events in (None, size[0]):
            rows[size] = asdict(measure_size(*size))
            print(rows[size], file=sys.stderr)
    figures = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "rows": [rows[size] for size in SIZES if size in rows],
    }
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(page(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
