"""The GPU stopwatch on a GPU: against cuda-bench and torch's profiler, its eviction, its queue, its graphs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from attnscope.device import Device, find_device
from attnscope.limits import limit_of, measure_limits
from attnscope.measuring import Contestant, MeasureFailed, MeasureOptions, measure_rivals
from attnscope.power import Sampler, nvml_reader
from attnscope.timers import CaptureFailed, CudaTimer, cache_bytes
from attnscope.units import MIB, median
from attnscope.workload import Workload

pytestmark = pytest.mark.gpu

AGREEMENT = Path(__file__).parents[2] / "benchmarks" / "harness_agreement.py"
WORKLOAD = Workload.parse("B4,H16,L1024,D64,bf16,causal")


@pytest.fixture(scope="module")
def device() -> Device:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA card")
    return find_device("cuda")


@pytest.fixture(scope="module")
def timer(device) -> CudaTimer:
    return CudaTimer(device)


@pytest.fixture(scope="module")
def agreement(device):
    spec = importlib.util.spec_from_file_location("harness_agreement", AGREEMENT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module, module.harness_agreement(device)


def test_the_stopwatch_agrees_with_the_profiler_within_two_percent_on_ten_shapes(agreement):
    _, rows = agreement
    assert len(rows) == 10
    assert all(row.kernels for row in rows), rows
    far = {row.shape: row.ours_us / row.profiler_us - 1 for row in rows}
    assert max(map(abs, far.values())) < 0.02, far


def test_the_stopwatch_agrees_with_cuda_bench_within_two_percent_on_ten_shapes(agreement):
    module, rows = agreement
    if not module.cuda_bench_is_there():
        pytest.skip("cuda-bench is not installed")
    far = {row.shape: row.ours_us / row.cuda_bench_us - 1 for row in rows}
    assert len(far) == 10
    assert max(map(abs, far.values())) < 0.02, far


def copies(device, mib: int, index: int = 0):
    """A call that reads and writes ``mib`` MiB: bound by memory, or by L2 where it fits."""
    import torch

    source = torch.randn(mib * MIB // 8, device=device.torch_name)
    target = torch.empty_like(source)
    return lambda: torch.add(source, 1.0, out=target)


def times_us(timer, call, samples: int = 30, **how) -> float:
    return median([timer.time_call(call, 200.0, **how).ms for _ in range(samples)][5:]) * 1e3


def test_reading_evicts_the_cache_and_leaves_no_dirty_lines(device, timer):
    import torch

    call = copies(device, cache_bytes(device) // MIB // 2)
    warm, cold = times_us(timer, call, evict=False), times_us(timer, call)
    assert cold > 1.05 * warm, "after eviction the call must fetch its input from memory"
    dirt = torch.empty(2 * cache_bytes(device), dtype=torch.uint8, device=device.torch_name)

    def after_a_write() -> float:
        dirt.fill_(1)
        return timer.time_call(call, 200.0, evict=False).ms

    written = median([after_a_write() for _ in range(30)][5:]) * 1e3
    assert written > 0.97 * cold, "dirty lines are written back at the call's expense; reading leaves none"


def test_tensors_named_warm_are_in_the_cache_again(device, timer):
    import torch

    source = torch.randn(cache_bytes(device) // 16, device=device.torch_name)
    target = torch.empty((), device=device.torch_name)

    def read() -> object:
        return torch.sum(source, dim=0, out=target)

    assert times_us(timer, read, warm=(source,)) < 0.97 * times_us(timer, read)


def test_the_queue_stays_behind_the_spin_and_a_drained_one_is_told(device, timer):
    call = copies(device, 8)
    assert all(timer.time_call(call, 1000.0).held for _ in range(20))
    assert not any(timer.time_call(lambda: (call(), timer.synchronize()), 100.0).held for _ in range(5))
    assert sum(timer.time_call(lambda: [call() for _ in range(50)], 0.0).held for _ in range(5)) <= 1


def test_a_spin_lasts_as_long_as_it_was_asked_to(timer):
    spun = times_us(timer, lambda: timer.spin(500.0), evict=False)
    assert spun == pytest.approx(500.0, rel=0.25)


def test_host_gaps_stay_out_of_the_time(device, timer):
    import time

    call = copies(device, 64)

    def with_a_pause() -> None:
        call()
        time.sleep(0.0005)
        call()

    two = median([timer.time_call(with_a_pause, 3000.0).ms for _ in range(20)])
    assert two < 2.3 * median([timer.time_call(call, 500.0).ms for _ in range(20)])


def test_zeros_are_a_trap(device, timer):
    """A product of zeros draws less power and runs faster: why limits and inputs are random."""
    import torch

    size = 8192
    a, b, out = (torch.randn(size, size, device=device.torch_name).bfloat16() for _ in range(3))
    zero = torch.zeros_like(a)
    random_ms = timer.steady_ms(lambda: torch.mm(a, b, out=out), 0.5)
    zero_ms = timer.steady_ms(lambda: torch.mm(zero, zero, out=out), 0.5)
    assert zero_ms < random_ms
    rate = 2 * size**3 / random_ms / 1e9
    measured = measure_limits(device, MeasureOptions(quick=True), dtypes=("bf16",), timer=timer)
    assert measured.matrix_tflop_per_s["bf16"] == pytest.approx(rate, rel=0.2)


def test_limits_of_a_card_are_plausible(device, timer):
    found = measure_limits(device, MeasureOptions(quick=True), timer=timer)
    rates = found.matrix_tflop_per_s
    assert set(rates) == {"bf16", "fp16", "fp32", "tf32", "fp64"}
    assert rates["bf16"] > rates["tf32"] > rates["fp32"]
    assert 0.5 < found.copy_gb_per_s / found.read_gb_per_s < 1.5
    assert 0 < found.event_floor_us < 20 and 0 < found.launch_floor_us < 20
    assert found.event_floor_us <= found.launch_floor_us + 0.5
    assert found.exponentials_t_per_s == pytest.approx(device.multiprocessors * 16 * found.sm_clock_mhz / 1e6)
    assert limit_of(WORKLOAD, "forward", found, WORKLOAD.visible_pairs())[0] > 0


def attention(device, seed: int = 0, grad: bool = False):
    import torch

    generator = torch.Generator(device.torch_name).manual_seed(seed)
    shape = (WORKLOAD.B, WORKLOAD.H, WORKLOAD.L, WORKLOAD.D)
    q, k, v = (
        torch.randn(shape, generator=generator, device=device.torch_name).bfloat16().requires_grad_(grad)
        for _ in range(3)
    )
    return q, k, v


def forward_call(device, seed: int = 0):
    import torch

    q, k, v = attention(device, seed)

    def call() -> object:
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return call


def backward_call(device, seed: int = 0):
    import torch

    q, k, v = attention(device, seed, grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad_out = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)


def measure(device, timer, contestants, **options):
    limits = measure_limits(device, MeasureOptions(quick=True), dtypes=("bf16",), timer=timer)
    return measure_rivals(
        contestants, WORKLOAD, device, "forward", limits, MeasureOptions(**options),
        visible_pairs=WORKLOAD.visible_pairs(), timer=timer,
    )  # fmt: skip


def test_a_full_measurement_of_two_rivals(device, timer):
    calls = [forward_call(device, seed) for seed in range(8)]

    def twice() -> None:
        calls[0]()
        calls[1]()

    rivals = [Contestant("once", calls[0], lambda: calls), Contestant("twice", twice)]
    measured, verdicts = measure(device, timer, rivals, isolated_s=0.5, sustained_s=1.0)
    once = measured["once"]
    assert {v.implementation: v.word for v in verdicts} == {"once": "faster", "twice": "slower"}
    assert once.graph_is_warm is False and measured["twice"].graph_is_warm is True
    assert once.graph_ms_median == pytest.approx(once.time_ms_median, rel=0.3)
    assert once.sustained_ms_median == pytest.approx(once.time_ms_median, rel=0.4)
    assert once.peak_memory_mib >= WORKLOAD.B * WORKLOAD.H * WORKLOAD.L * WORKLOAD.D * 2 / MIB
    assert once.vs_limit is not None and 0 < once.vs_limit < 2
    if nvml_reader(device) is not None:
        assert once.sm_clock_mhz is not None and once.sm_clock_mhz > 300
        assert once.joules_per_call is None or 0 < once.joules_per_call < 1


@pytest.mark.parametrize("lazily", [True, False])
def test_a_backward_is_captured_where_its_forward_ran_on_the_captured_stream(device, timer, lazily):
    made = [backward_call(device)]
    make = (lambda: [backward_call(device, seed) for seed in range(2)]) if lazily else (lambda: made)
    try:
        replay = timer.capture(make)
    except CaptureFailed:
        assert not lazily, "a forward that ran on the side stream must be capturable"
    else:
        assert replay.calls == (2 if lazily else 1)
        assert timer.time_call(replay.replay, 300.0, evict=False).ms > 0.01
        replay.close()
    import torch

    torch.randn(4, device=device.torch_name)  # torch's generator is not left waiting for a capture's end
    made[0]()
    timer.synchronize()


def test_a_failed_capture_leaves_the_process_usable(device, timer):
    import torch

    x = torch.randn(1024, device=device.torch_name)
    with pytest.raises(CaptureFailed):
        timer.capture(lambda: [lambda: x.sum().item()])
    assert torch.randn(8, device=device.torch_name).isfinite().all()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    replay = timer.capture(lambda: [lambda: x.mul(2.0)])
    assert timer.time_call(replay.replay, 100.0, evict=False).ms > 0
    replay.close()


def test_work_on_another_stream_is_no_capture(device, timer):
    import torch

    other = torch.cuda.Stream()
    x = torch.randn(1024, device=device.torch_name)

    def elsewhere() -> None:
        with torch.cuda.stream(other):
            x.mul_(1.0)

    with pytest.raises(CaptureFailed):
        timer.capture(lambda: [elsewhere])


def test_a_rival_that_raises_on_the_gpu_is_named(device, timer):
    import torch

    x, y = torch.randn(8, 9, device=device.torch_name), torch.randn(8, 9, device=device.torch_name)
    rivals = [Contestant("good", forward_call(device)), Contestant("bad", lambda: torch.mm(x, y))]
    with pytest.raises(MeasureFailed, match=r"^bad failed in warm-up: RuntimeError"):
        measure(device, timer, rivals, quick=True)


def test_nvml_tells_power_while_a_product_runs(device, timer):
    import torch

    reader = nvml_reader(device)
    if reader is None:
        pytest.skip("no NVML here")
    a = torch.randn(8192, 8192, device=device.torch_name).bfloat16()
    with Sampler(reader) as sampler:
        block = timer.run_block([lambda: torch.mm(a, a)], 1, 1.2, 0.5, 1.5)
    seen = sampler.conditions([(block.begin_s, block.end_s)])
    assert not block.starved
    assert len(sampler.readings) > 10
    assert seen.sm_clock_mhz is None or 300 < seen.sm_clock_mhz < 3000
    assert seen.power_w is None or 50 < seen.power_w < 1500


def test_a_host_that_cannot_keep_up_is_noticed(device, timer):
    import time

    call = copies(device, 1)

    def slow_host() -> None:
        time.sleep(0.0005)
        call()

    assert timer.run_block([slow_host], 1, 0.3, 0.1, 1.0).starved
