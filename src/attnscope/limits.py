"""Stage 4: what the device can do, measured in this run, and the time that no implementation of a workload can beat.

Reads a Workload and a Device, writes Limits. Imports torch only inside functions, and no later stage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attnscope.device import Device, available_memory_bytes
from attnscope.inputs import Tensor
from attnscope.pacing import MeasureOptions
from attnscope.power import Conditions, Sampler, nvml_reader
from attnscope.records import Limits
from attnscope.timers import Call, Timer, cache_bytes, make_timer
from attnscope.units import DTYPE_BYTES, GIB, MIB, median
from attnscope.workload import Workload

MATRIX_SIZES = {"cuda": (4096, 8192), "cpu": (256, 512, 1024)}
READ_BYTES = {"cuda": 4 * GIB, "cpu": 128 * MIB}  # or four times the last level cache, where that is more
EXP_ELEMENTS = 128 * 1024  # half a MiB in and as much out: stays in cache
FLOOR_SPIN_US = 100.0
MATRIX_CALL_MAX_MS = {"cuda": 300.0, "cpu": 100.0}  # a product that would take longer is not tried
CALLS_ALONE, REST_S = 8, 0.02  # of products on a GPU that is not at its power limit, and how long it rests before each

# Results of the multi-function unit per clock and multiprocessor: CUDA C++ Programming Guide, table "Throughput of
# Native Arithmetic Instructions", row "32-bit floating-point reciprocal, ..., base 2 exponential (ex2.approx)".
EX2_PER_CLOCK = 16
EX2_SOURCE = "multiprocessors × 16 ex2 per clock (CUDA C++ Programming Guide) × SM clock {clock}"


def limit_of(
    workload: Workload, direction: str, limits: Limits, visible_pairs: int, compute: str | None = None
) -> tuple[float | None, str | None]:
    """(limit_ms, the term that binds): the largest of four times that this card needs at least.

    matrix: useful FLOPs over the rate of products (:func:`matrix_rate`). exponentials: one a visible pair and head;
    left out for fp64, whose exponentials do not run on the unit that was counted. bandwidth: unique bytes over the
    read rate. launch: the smallest kernel. (None, None) where a rate that matters is unknown, since a limit without it
    would flatter.

    A workload whose bytes all fit in the last level cache still has to fetch its inputs, which the isolated
    measurement evicts, but its outputs may stay in the cache past the end of the call: there only what is read counts.
    """
    rate = matrix_rate(limits, workload.dtype, compute)
    if rate is None or limits.read_gb_per_s is None:
        return None, None
    terms = {
        "matrix": workload.flops(direction, visible_pairs) / (rate * 1e12),
        "bandwidth": bytes_from_memory(workload, direction, limits) / (limits.read_gb_per_s * 1e9),
    }
    if limits.exponentials_t_per_s is not None and workload.dtype != "fp64":
        terms["exponentials"] = workload.exponentials(direction, visible_pairs) / (limits.exponentials_t_per_s * 1e12)
    if limits.launch_floor_us is not None:
        terms["launch"] = limits.launch_floor_us / 1e6
    term = max(terms, key=lambda name: terms[name])
    return (terms[term] * 1e3, term) if terms[term] > 0 else (None, None)


def matrix_rate(limits: Limits, dtype: str, compute: str | None = None) -> float | None:
    """The rate of products that counts for inputs of ``dtype``, in 1e12 FLOP/s; None where it was not measured.

    The dtype's own; for fp32 inputs of an implementation that computes in tf32, bf16 or fp16, that one's; for 16-bit
    inputs fp32's where that is faster, as on a CPU without 16-bit products, since they may be widened.
    """
    rates = limits.matrix_tflop_per_s
    rate = rates.get(compute if dtype == "fp32" and compute in ("tf32", "bf16", "fp16") else dtype)
    if rate is not None and dtype in ("bf16", "fp16"):
        return max(rate, rates.get("fp32", 0.0))
    return rate


def fits_in_cache(workload: Workload, direction: str, limits: Limits) -> bool:
    """Whether all unique bytes fit in the last level cache, so that a share of memory bandwidth would mean nothing."""
    return limits.cache_bytes is not None and workload.min_bytes(direction) <= limits.cache_bytes


def bytes_from_memory(workload: Workload, direction: str, limits: Limits) -> int:
    """Bytes that must cross the memory bus: all unique ones, or only those read where all fit in the cache."""
    total = workload.min_bytes(direction)
    if not fits_in_cache(workload, direction, limits):
        return total
    w, size = workload, DTYPE_BYTES[workload.dtype]
    out = w.B * w.H * w.L * w.D_v * size
    if direction == "forward":
        return total - out
    # backward writes a gradient for each of q, k, v and bias; what it reads besides is out, dO, lse and the mask
    mask_and_lse = 4 * w.B * w.H * w.L + (_elements(w, w.mask) if w.mask else 0)
    return total - (total - 2 * out - mask_and_lse) // 2


def _elements(w: Workload, pattern: str) -> int:
    b, h, rows, columns = w.broadcast_shape(pattern)
    return b * h * rows * columns


def measure_limits(
    device: Device,
    options: MeasureOptions | None = None,
    *,
    dtypes: Sequence[str] = tuple(DTYPE_BYTES),
    timer: Timer | None = None,
    sampler: Sampler | None = None,
) -> Limits:
    """Matrix rate per dtype (on a GPU tf32 beside fp32), read and copy bandwidth, exponentials and floors.

    Products of random matrices, the best of several sizes, back to back and, on a GPU, alone after a rest as well: its
    power limit slows what goes on, but not the single calls that limits are held against. A sum over a buffer far
    larger than the cache; a copy, its bytes counted twice. On a GPU exponentials are counted from the chip, on a CPU
    measured.
    """
    plan = (options or MeasureOptions()).plan(device)
    timer = timer or make_timer(device)
    sampler = sampler or Sampler(nvml_reader(device))
    begin = timer.now_s()
    with sampler:
        rates = _matrix_rates(device, dtypes, timer, plan.limit_s)
    clock = _sm_clock_mhz(device, timer, sampler.conditions([(begin, timer.now_s())]))
    read, copy = _bandwidths(device, timer, plan.limit_s)
    exponentials, source = _exponentials(device, timer, plan.limit_s, _clock_alone_mhz(device, timer, clock))
    launch, event = _floors(device, timer)
    return Limits(
        device=device.name,
        matrix_tflop_per_s=rates,
        read_gb_per_s=read,
        copy_gb_per_s=copy,
        exponentials_t_per_s=exponentials,
        launch_floor_us=launch,
        event_floor_us=event,
        cache_bytes=cache_bytes(device),
        sm_clock_mhz=clock,
        threads=device.threads,
        exponentials_source=source,
    )


def _matrix_rates(device: Device, dtypes: Sequence[str], timer: Timer, seconds: float) -> dict[str, float]:
    import torch

    rates = {}
    for dtype in dtypes:
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[dtype]
        if dtype == "fp32" and device.kind == "cuda":
            for name, precision in (("fp32", "ieee"), ("tf32", "tf32")):
                with _fp32_products(precision):
                    rates[name] = _matrix_rate(device, kind, timer, seconds)
        else:
            rates[dtype] = _matrix_rate(device, kind, timer, seconds)
    return rates


def _matrix_rate(device: Device, kind: Any, timer: Timer, seconds: float) -> float:
    """Best rate over the sizes, from small to large; a size that would take far longer than its share is left out."""
    import torch

    best = 0.0
    for size in MATRIX_SIZES[device.kind]:
        flops = 2 * size**3
        if best and flops / best / 1e9 > MATRIX_CALL_MAX_MS[device.kind]:
            break
        a, b = (torch.randn(size, size, device=device.torch_name).to(kind) for _ in range(2))
        product = _product(a, b, torch.empty_like(a))
        times = [timer.steady_ms(product, seconds)]
        if device.kind == "cuda":
            times += _times_alone(product, timer)
        best = max(best, flops / min(times) / 1e9)
    return best


def _times_alone(call: Call, timer: Timer) -> list[float]:
    """Times in ms of single calls, each after a rest."""
    times = []
    for _ in range(CALLS_ALONE):
        time.sleep(REST_S)
        times.append(timer.time_call(call, FLOOR_SPIN_US, evict=False).ms)
    return times


def _product(a: Any, b: Any, out: Any) -> Call:
    import torch

    return lambda: torch.mm(a, b, out=out)


@contextmanager
def _fp32_products(precision: str) -> Iterator[None]:
    """float32 products in ``ieee`` or ``tf32`` within; puts back what was set."""
    import torch

    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _bandwidths(device: Device, timer: Timer, seconds: float) -> tuple[float, float]:
    """(read, copy) in 1e9 bytes/s: the better of two ways to sum a buffer, and a copy of one half to the other."""
    import torch

    wanted = max(READ_BYTES[device.kind], 4 * cache_bytes(device))
    size = min(wanted, available_memory_bytes(device) // 4) // (8 * MIB) * 8 * MIB
    buffer = torch.rand(max(size, 8 * MIB) // 4, device=device.torch_name)
    read_ms = min(timer.steady_ms(way, seconds) for way in read_ways(buffer))
    half = buffer.nbytes // 2
    source, target = buffer[: len(buffer) // 2], buffer[len(buffer) // 2 :]
    copy_ms = timer.steady_ms(lambda: target.copy_(source), seconds)
    return buffer.nbytes / read_ms / 1e6, 2 * half / copy_ms / 1e6


def read_ways(buffer: Tensor) -> list[Call]:
    """Two ways to sum a float32 buffer of a multiple of 8192 elements, which read all of it once."""
    import torch

    total, rows = buffer.new_empty(()), buffer.new_empty(len(buffer) // 8192)
    return [lambda: torch.sum(buffer, dim=0, out=total), lambda: torch.sum(buffer.view(-1, 8192), dim=1, out=rows)]


def _sm_clock_mhz(device: Device, timer: Timer, seen: Conditions) -> float | None:
    """The clock under load: NVML's, else counted by a kernel that spins for a number of cycles right behind load."""
    if device.kind != "cuda" or seen.sm_clock_mhz is not None:
        return seen.sm_clock_mhz
    return _counted_clock_mhz(timer)


def _clock_alone_mhz(device: Device, timer: Timer, under_load: float | None) -> float | None:
    """The clock of a call alone after a rest, at least that under load."""
    if device.kind != "cuda" or under_load is None:
        return under_load
    time.sleep(REST_S)
    return max(under_load, _counted_clock_mhz(timer))


def _counted_clock_mhz(timer: Timer) -> float:
    import torch

    cycles = 1_000_000
    return cycles / (timer.time_call(lambda: torch.cuda._sleep(cycles), FLOOR_SPIN_US, evict=False).ms * 1e3)


def _exponentials(
    device: Device, timer: Timer, seconds: float, clock_mhz: float | None
) -> tuple[float | None, str | None]:
    if device.kind == "cuda":
        if clock_mhz is None or device.multiprocessors is None:
            return None, None
        rate = device.multiprocessors * EX2_PER_CLOCK * clock_mhz / 1e6
        return rate, EX2_SOURCE.format(clock=f"{clock_mhz:.0f} MHz")
    import torch

    values = torch.randn(EXP_ELEMENTS)
    out = torch.empty_like(values)
    rate = EXP_ELEMENTS / timer.steady_ms(lambda: torch.exp(values, out=out), 3 * seconds) / 1e9
    return rate, "torch.exp in float32 on values in cache, measured in this run"


def _floors(device: Device, timer: Timer) -> tuple[float, float | None]:
    """(launch, event) floors in microseconds: the smallest kernel or op, and on a GPU an empty pair of events."""
    import torch

    if device.kind == "cuda":
        smallest: Call = lambda: torch.cuda._sleep(0)  # noqa: E731
        launch, event = (
            median([timer.time_call(call, FLOOR_SPIN_US, evict=False).ms for _ in range(50)][5:]) * 1e3
            for call in (smallest, lambda: None)
        )
        return launch, event
    one = torch.zeros(1)
    return timer.steady_ms(lambda: one.add_(1.0), 0.005) * 1e3, None
