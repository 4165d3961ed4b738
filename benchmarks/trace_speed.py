"""Write a large synthetic trace and measure how fast, and in how much memory, attnscope explains it.

    python benchmarks/trace_speed.py --events 1600000

The file is like kineto's: indented, with Python functions, ops, launches, kernels and flows, about 375 bytes an event.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

H100 = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85018279936, "computeMajor": 9, "computeMinor": 0,
        "maxThreadsPerMultiprocessor": 2048, "regsPerMultiprocessor": 65536, "warpSize": 32, "numSms": 132,
        "sharedMemPerBlock": 49152, "sharedMemPerBlockOptin": 232448, "sharedMemPerMultiprocessor": 233472}  # fmt: skip
FLASH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false>>"
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel"
EVENT = """  {{
    "ph": "X", "cat": "{cat}", "name": {name}, "pid": {pid}, "tid": {tid},
    "ts": {ts:.3f}, "dur": {dur:.3f},
    "args": {{
      {args}
    }}
  }}"""
OP_ARGS = ('"External id": {n},"Record function id": 0, "Sequence number": {n}, "Fwd thread id": 0, "Ev Idx": {n},'
           '"Input type": ["c10::BFloat16", "c10::BFloat16", "c10::BFloat16", "Scalar"], '
           '"Input Strides": [[8388608, 65536, 64, 1], [8388608, 65536, 64, 1], [8388608, 65536, 64, 1], []], '
           '"Input Dims": [[8, 16, 1024, 64], [8, 16, 1024, 64], [8, 16, 1024, 64], []], '
           '"Concrete Inputs": ["", "", "", "True"]')  # fmt: skip
KERNEL_ARGS = ('"External id": {n}, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": {n},'
               '"registers per thread": 168, "shared memory": 49152, "blocks per SM": 3.8, "warps per SM": 15.5,'
               '"grid": [8, 16, 4], "block": [128, 1, 1], "est. achieved occupancy %": 13')  # fmt: skip
CALL_ARGS = '"External id": {n}, "cbid": 211, "correlation": {n}'
PYTHON_ARGS = '"Python parent id": {n}, "Python id": {n}, "Python thread": 0'


def write_trace(path: Path, events: int) -> None:
    """About ``events`` events: per round 4 Python functions, 3 ops, a launch, a kernel and the flow between both."""
    now = 5_132_283_180.949
    with path.open("w") as file:
        file.write(f'{{"schemaVersion": 1, "deviceProperties": [{json.dumps(H100)}], "traceEvents": [\n')
        for n in range(1, events // 11 + 1):
            attention = n % 8 == 0
            name = "aten::scaled_dot_product_attention" if attention else "aten::linear"
            inner = "aten::_flash_attention_forward" if attention else "aten::addmm"
            kernel = FLASH if attention else GEMM
            rows = [
                _event("python_function", f"model.py({n % 97}): forward", 77, 77, now + i / 10, 30 - i, PYTHON_ARGS, n)
                for i in range(4)
            ]
            rows += [
                _event("cpu_op", name, 77, 77, now + 1, 20, OP_ARGS, n),
                _event("cpu_op", inner, 77, 77, now + 2, 15, OP_ARGS, n),
                _event("cpu_op", "aten::empty", 77, 77, now + 3, 2, OP_ARGS, n),
                _event("cuda_runtime", "cudaLaunchKernel", 77, 77, now + 8, 4, CALL_ARGS, n),
                _event("kernel", kernel, 0, 7, now + 20, 25, KERNEL_ARGS, n),
                f'  {{"ph": "s", "id": {n}, "pid": 77, "tid": 77, "ts": {now:.3f}, "cat": "ac2g", "name": "ac2g"}}',
                f'  {{"ph": "f", "id": {n}, "pid": 0, "tid": 7, "ts": {now:.3f}, "cat": "ac2g", "name": "ac2g"}}',
            ]
            file.write(",\n".join(rows) + ",\n")
            now += 31
        file.write(_event("Trace", "PyTorch Profiler (0)", 0, 0, now, 1, PYTHON_ARGS, 0) + "\n]}\n")


def _event(cat: str, name: str, pid: int, tid: int, ts: float, dur: float, args: str, n: int) -> str:
    return EVENT.format(cat=cat, name=json.dumps(name), pid=pid, tid=tid, ts=ts, dur=dur, args=args.format(n=n))


def main() -> None:
    """Print one line of figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_600_000)
    parser.add_argument("--trace", type=Path, help="measure this file instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.trace or Path(folder) / "large.json"
        if options.trace is None:
            write_trace(path, options.events)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "attnscope", "explain", str(path), "--json"], check=True, stdout=-3)
        seconds = time.perf_counter() - start
        peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        size_mb = path.stat().st_size / 1e6
    print(f"{size_mb:.0f} MB: {seconds:.1f} s start-up included, peak {peak_mib:.0f} MiB")


if __name__ == "__main__":
    main()
