"""Hold attnscope's GPU stopwatch against torch's profiler and NVIDIA's cuda-bench on ten calls of one kernel each.

``python benchmarks/harness_agreement.py OUT.json`` writes the rows as JSON. Every call runs well above 150
microseconds: a pair of events reads one or two more than the kernel takes (see ``attnscope.timers``), which on short
kernels would be more than the 2 % that is asked for here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnscope.device import Device, find_device, read_environment
from attnscope.timers import CudaTimer
from attnscope.units import median

SAMPLES = 30
DROPPED = 5
SPIN_US = 400.0

# kind, then sizes: products of square matrices, a sum of two vectors of so many MiB, attention as B H L D causal
CASES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("matmul bf16", (6144,)),
    ("matmul bf16", (8192,)),
    ("matmul fp32", (4096,)),
    ("add bf16", (2048,)),
    ("flash", (8, 16, 2048, 64, 1)),
    ("flash", (8, 16, 2048, 64, 0)),
    ("flash", (4, 16, 4096, 128, 1)),
    ("flash", (2, 16, 8192, 128, 0)),
    ("efficient", (8, 16, 2048, 64, 0)),
    ("efficient", (4, 16, 4096, 128, 1)),
)


@dataclass(frozen=True)
class Row:
    """Median times of one call by three stopwatches, in microseconds."""

    shape: str
    ours_us: float
    profiler_us: float
    cuda_bench_us: float | None
    kernels: tuple[str, ...]


def case_name(index: int) -> str:
    kind, sizes = CASES[index]
    return f"{kind} {'x'.join(map(str, sizes))}"


def make_case(index: int, device: Device) -> Callable[[], object]:
    """A closure that launches the case's one kernel; random data, never zeros."""
    import torch

    kind, sizes = CASES[index]
    where = device.torch_name
    if kind.startswith("matmul"):
        dtype = torch.bfloat16 if kind.endswith("bf16") else torch.float32
        a, b = (torch.randn(sizes[0], sizes[0], device=where, dtype=dtype) for _ in range(2))
        product = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=product)
    if kind.startswith("add"):
        x, y = (torch.randn(sizes[0] * 2**20 // 2, device=where, dtype=torch.bfloat16) for _ in range(2))
        total = torch.empty_like(x)
        return lambda: torch.add(x, y, out=total)
    return _attention(kind, sizes, where)


def _attention(kind: str, sizes: tuple[int, ...], where: str) -> Callable[[], object]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    B, H, L, D, causal = sizes
    q, k, v = (torch.randn(B, H, L, D, device=where, dtype=torch.bfloat16) for _ in range(3))
    chosen = SDPBackend.FLASH_ATTENTION if kind == "flash" else SDPBackend.EFFICIENT_ATTENTION

    def call() -> object:
        with torch.no_grad(), sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal))

    return call


def ours_us(timer: CudaTimer, call: Callable[[], object], samples: int = SAMPLES) -> list[float]:
    """Times of attnscope's stopwatch, held samples only."""
    taken = [timer.time_call(call, SPIN_US) for _ in range(samples + DROPPED)][DROPPED:]
    return [sample.ms * 1e3 for sample in taken if sample.held]


def profiler_us(
    timer: CudaTimer, call: Callable[[], object], samples: int = SAMPLES
) -> tuple[list[float], tuple[str, ...]]:
    """(spans from the call's first kernel to its last, their names) as torch's profiler saw the same loop.

    What the loop itself launches (eviction, spin) is known from a run of it around an empty call.
    """
    own = {name for name, _, _ in _profiled(timer, lambda: None, 3)}
    spans: list[float] = []
    names: dict[str, None] = {}
    first = last = None
    for name, begin, end in [*_profiled(timer, call, samples + DROPPED), (next(iter(own)), 0.0, 0.0)]:
        if name in own:
            if first is not None and last is not None:
                spans.append(last - first)
            first = last = None
        else:
            names[name] = None
            first, last = begin if first is None else first, end
    return spans[DROPPED:], tuple(names)


def _profiled(timer: CudaTimer, call: Callable[[], object], samples: int) -> list[tuple[str, float, float]]:
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(samples):
            timer.time_call(call, SPIN_US)
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == DeviceType.CUDA]
    return sorted(((e.name, e.time_range.start, e.time_range.end) for e in events), key=lambda event: event[1])


def harness_agreement(device: Device) -> list[Row]:
    """The ten rows; ``cuda_bench_us`` is None where cuda-bench is not installed.

    cuda-bench runs before and after and its two medians are averaged: the card's clock drifts with its heat by more
    than the stopwatches differ.
    """
    import torch

    timer = CudaTimer(device)
    before = cuda_bench_us()
    taken = []
    for index in range(len(CASES)):
        call = make_case(index, device)
        call()
        ours = ours_us(timer, call)
        profiled, kernels = profiler_us(timer, call)
        taken.append((median(ours), median(profiled), kernels))
        del call
    torch.cuda.empty_cache()
    after = cuda_bench_us()
    return [
        Row(case_name(index), ours, profiled, (before[index] + after[index]) / 2 if before else None, kernels)
        for index, (ours, profiled, kernels) in enumerate(taken)
    ]


def cuda_bench_us() -> dict[int, float]:
    """Median isolated GPU time by case, of cuda-bench in a process of its own: it resets the device at its end."""
    if not cuda_bench_is_there():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cuda_bench.json"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, __file__, "--cuda-bench", str(out)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
        if done.returncode or not out.exists():
            raise RuntimeError(f"cuda-bench ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
        return {int(index): us for index, us in json.loads(out.read_text()).items()}


def cuda_bench_is_there() -> bool:
    """Whether ``cuda.bench`` can be imported; ``cuda`` is a namespace that other packages share."""
    try:
        return importlib.util.find_spec("cuda.bench") is not None
    except ModuleNotFoundError:
        return False


def _run_cuda_bench(out: Path) -> None:
    import cuda.bench as bench
    import torch
    from cuda.bench.results import BenchmarkResult

    device = find_device("cuda")

    def attnscope_case(state: Any) -> None:
        stream = torch.cuda.ExternalStream(state.get_stream().addressof(), device=device.torch_name)
        call = make_case(state.get_int64("case"), device)
        torch.cuda.synchronize()

        def launch(launched: Any) -> None:
            del launched
            call()

        with torch.cuda.stream(stream):
            call()  # the allocator's memory for this stream: an allocation behind a held stream would never end
            torch.cuda.synchronize()
            state.exec(launch, batched=False)

    registered = bench.register(attnscope_case)
    registered.add_int64_axis("case", list(range(len(CASES))))
    registered.set_stopping_criterion("sample-count")
    registered.set_criterion_param_int64("target-samples", SAMPLES)
    registered.set_timeout(5.0)
    raw = out.with_suffix(".raw.json")
    bench.run_all_benchmarks([sys.argv[0], "--devices", "0", "--jsonbin", str(raw)])
    times = {}
    for benchmark in BenchmarkResult.from_json(raw).values():
        for state in benchmark.states:
            if state.samples:
                times[int(state.axis_values[0]["value"])] = median(list(state.samples)) * 1e6
    out.write_text(json.dumps(times))


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "--cuda-bench":
        _run_cuda_bench(Path(arguments[1]))
        return 0
    if len(arguments) != 1:
        print("usage: harness_agreement.py OUT.json", file=sys.stderr)
        return 2
    device = find_device("cuda")
    rows = harness_agreement(device)
    for row in rows:
        theirs = "-" if row.cuda_bench_us is None else f"{row.ours_us / row.cuda_bench_us - 1:+.2%}"
        print(
            f"{row.shape:32} ours {row.ours_us:9.2f} us  profiler {row.profiler_us:9.2f} us"
            f" ({row.ours_us / row.profiler_us - 1:+.2%})  cuda-bench {row.cuda_bench_us or 0:9.2f} us ({theirs})"
        )
    environment = read_environment()
    record = {"device": asdict(device), "environment": asdict(environment), "rows": [asdict(row) for row in rows]}
    Path(arguments[0]).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
