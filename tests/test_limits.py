"""The limits' arithmetic, the way they are measured on a fake device, and a real quick run on the CPU."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from attnscope import limits as limits_module
from attnscope.device import Device, find_device
from attnscope.limits import bytes_from_memory, fits_in_cache, limit_of, matrix_rate, measure_limits
from attnscope.pacing import MeasureOptions
from attnscope.power import Conditions, Reading, Sampler
from attnscope.records import Limits
from attnscope.timers import CpuTimer, Sample
from attnscope.workload import Workload

BLOG = Workload.parse("B8,H16,L1024,D64,bf16,causal")
MIB = 2**20
CARD = Limits(
    "H200",
    {"bf16": 700.0, "fp32": 50.0, "tf32": 400.0, "fp64": 60.0},
    read_gb_per_s=4000.0,
    exponentials_t_per_s=3.7,
    launch_floor_us=2.0,
    cache_bytes=50 * MIB,
)


def limit(text: str, direction: str = "forward", card: Limits = CARD, compute: str | None = None):
    workload = Workload.parse(text)
    return limit_of(workload, direction, card, workload.visible_pairs(), compute)


@pytest.mark.parametrize(("D", "term"), [(32, "exponentials"), (128, "matrix")])
def test_exponentials_bind_before_the_tensor_cores_where_heads_are_small(D, term):
    workload = Workload.parse(f"B8,H16,L1024,D{D},bf16,causal")
    pairs = 8 * 1024 * 1025 // 2
    times = {"exponentials": 16 * pairs / 3.7e12 * 1e3, "matrix": 4 * D * 16 * pairs / 700e12 * 1e3}
    assert limit_of(workload, "forward", CARD, pairs) == (pytest.approx(times[term]), term)


@pytest.mark.parametrize(
    ("text", "direction", "term", "ms"),
    [
        ("B1,H16,L8192,D128,bf16", "forward", "matrix", 4 * 128 * 16 * 8192**2 / 700e12 * 1e3),
        ("B1,H16,L8192,D128,bf16", "backward", "matrix", 10 * 128 * 16 * 8192**2 / 700e12 * 1e3),
        ("B8,H32/8,L1,S8192,D128,bf16", "forward", "bandwidth", None),
        ("B1,H1,L8,D16,bf16", "forward", "launch", 0.002),
        ("B8,H12,L1024,D64,fp32", "forward", "matrix", 4 * 64 * 8 * 12 * 1024**2 / 50e12 * 1e3),
    ],
)
def test_the_largest_term_binds(text, direction, term, ms):
    found_ms, found_term = limit(text, direction)
    assert found_term == term
    if ms is None:
        ms = Workload.parse(text).min_bytes(direction) / 4000e9 * 1e3
    assert found_ms == pytest.approx(ms)


def test_a_thinned_mask_counts_its_own_pairs():
    workload = Workload.parse("B1,H16,L8192,D128,bf16")
    full, _ = limit_of(workload, "forward", CARD, workload.visible_pairs())
    half, _ = limit_of(workload, "forward", CARD, workload.visible_pairs() // 2)
    assert half == pytest.approx(full / 2, rel=1e-3)


def test_the_matrix_rate_is_that_of_what_is_computed():
    assert matrix_rate(CARD, "fp32") == 50.0
    assert matrix_rate(CARD, "fp32", "tf32") == 400.0
    assert matrix_rate(CARD, "fp32", "fp32") == 50.0
    assert matrix_rate(CARD, "bf16", "fp32") == 700.0, "sums in fp32 do not slow the product of bf16"
    assert matrix_rate(CARD, "fp16") is None
    slow = Limits("cpu", {"bf16": 0.001, "fp32": 0.1})
    assert matrix_rate(slow, "bf16") == 0.1, "16-bit inputs may be widened"


def test_a_limit_without_a_rate_that_matters_is_no_limit():
    assert limit("B1,H1,L64,D64,fp16") == (None, None)
    assert limit_of(BLOG, "forward", Limits("x", {"bf16": 1.0}), 10) == (None, None)
    no_exponentials = Limits("x", {"bf16": 700.0}, read_gb_per_s=4000.0)
    assert limit_of(BLOG, "forward", no_exponentials, BLOG.visible_pairs())[1] in ("matrix", "bandwidth")


def test_fp64_counts_no_exponentials():
    slow_exponentials = Limits("x", {"fp64": 60.0}, read_gb_per_s=4000.0, exponentials_t_per_s=1e-6)
    assert limit("B1,H1,L64,D64,fp64", card=slow_exponentials)[1] in ("matrix", "bandwidth")


def test_what_fits_in_the_cache_must_still_be_read_but_need_not_be_written():
    inside = Workload.parse("B1,H8,L512,D64,bf16")
    tensor = 8 * 512 * 64 * 2
    assert fits_in_cache(inside, "forward", CARD) and not fits_in_cache(BLOG, "forward", CARD)
    assert bytes_from_memory(inside, "forward", CARD) == 3 * tensor
    assert bytes_from_memory(inside, "backward", CARD) == 5 * tensor + 4 * 8 * 512
    assert bytes_from_memory(BLOG, "forward", CARD) == BLOG.min_bytes("forward")
    masked = Workload.parse("B1,H8,L512,D64,bf16,mask=bool,bias=bf16:1xHxLxS")
    read = 5 * tensor + 4 * 8 * 512 + 512 * 512 + 2 * 8 * 512 * 512
    assert bytes_from_memory(masked, "backward", CARD) == read


def test_an_empty_workload_is_limited_by_the_launch():
    assert limit("B0,H1,L8,D16,bf16") == (0.002, "launch")
    assert limit("B0,H1,L8,D16,bf16", card=Limits("x", {"bf16": 1.0}, read_gb_per_s=1.0)) == (None, None)


def test_exponentials_of_a_gpu_are_counted_from_its_chip():
    gpu = Device("cuda", "H200", multiprocessors=132)
    rate, source = limits_module._exponentials(gpu, CpuTimer(1024), 0.1, 1755.0)
    assert rate == pytest.approx(132 * 16 * 1755e6 / 1e12)
    assert "1755 MHz" in source and "16 ex2" in source
    assert limits_module._exponentials(gpu, CpuTimer(1024), 0.1, None) == (None, None)


def test_the_clock_is_nvmls_or_counted_by_a_spinning_kernel(monkeypatch):
    gpu = Device("cuda", "H200")
    fake = SimpleNamespace(time_call=lambda call, spin_us, evict: SimpleNamespace(ms=0.5))
    assert limits_module._sm_clock_mhz(gpu, fake, Conditions(sm_clock_mhz=1700.0)) == 1700.0
    assert limits_module._sm_clock_mhz(gpu, fake, Conditions()) == pytest.approx(2000.0)
    assert limits_module._sm_clock_mhz(Device("cpu", "c"), fake, Conditions()) is None
    alone = [limits_module._clock_alone_mhz(gpu, fake, load) for load in (1400.0, 2100.0, None)]
    assert alone == [pytest.approx(2000.0), 2100.0, None], "a call alone is not slowed by the power limit"
    assert limits_module._clock_alone_mhz(Device("cpu", "c"), fake, None) is None


def test_fp32_precision_is_put_back():
    import torch

    before = torch.backends.cuda.matmul.fp32_precision
    with limits_module._fp32_products("tf32"):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert torch.get_float32_matmul_precision() == "highest"


class FakeTimer(CpuTimer):
    """Counts what is asked, and answers at once: each call takes one millisecond, each larger size eight times more."""

    def __init__(self) -> None:
        super().__init__(evict_bytes=1024)
        self.asked = 0

    def steady_ms(self, call, seconds):
        self.asked += 1
        call()
        return 1.0


def test_rates_are_computed_from_times_and_the_best_size_wins(monkeypatch):
    monkeypatch.setitem(limits_module.MATRIX_SIZES, "cpu", (16, 32))
    monkeypatch.setitem(limits_module.READ_BYTES, "cpu", 8 * MIB)
    monkeypatch.setattr(limits_module, "cache_bytes", lambda device: MIB)
    timer = FakeTimer()
    sampler = Sampler(None)
    sampler.readings = [Reading(0.0)]
    found = measure_limits(Device("cpu", "c", threads=3), dtypes=("fp32", "bf16"), timer=timer, sampler=sampler)
    rate = 2 * 32**3 / 1e-3 / 1e12
    assert found.matrix_tflop_per_s == {"fp32": pytest.approx(rate), "bf16": pytest.approx(rate)}
    assert found.read_gb_per_s == pytest.approx(8 * MIB / 1e-3 / 1e9)
    assert found.copy_gb_per_s == found.read_gb_per_s, "a copy moves each byte twice, of half the buffer"
    assert found.launch_floor_us == pytest.approx(1e3)
    assert (found.cache_bytes, found.threads, found.event_floor_us, found.sm_clock_mhz) == (MIB, 3, None, None)


def test_a_card_at_its_power_limit_is_no_limit_of_a_call_alone(monkeypatch):
    """Back to back a product takes 1 ms on the fake card, alone half of that: a kernel may be that fast, too."""
    import torch

    monkeypatch.setitem(limits_module.MATRIX_SIZES, "cuda", (16,))
    monkeypatch.setattr(limits_module, "REST_S", 0.0)
    monkeypatch.setattr(Device, "torch_name", "cpu")
    timer, rests = FakeTimer(), []
    monkeypatch.setattr(
        timer, "time_call", lambda call, spin_us, *, evict: rests.append(evict) or Sample(0.5), raising=False
    )
    rate = limits_module._matrix_rate(Device("cuda", "c"), torch.float32, timer, seconds=0.01)
    assert rate == pytest.approx(2 * 16**3 / 0.5e-3 / 1e12)
    assert rests == [False] * limits_module.CALLS_ALONE


def test_a_product_that_would_take_too_long_is_left_out(monkeypatch):
    monkeypatch.setitem(limits_module.MATRIX_SIZES, "cpu", (16, 32, 256))
    import torch

    timer = FakeTimer()
    limits_module._matrix_rate(Device("cpu", "c"), torch.float32, timer, seconds=0.01)
    assert timer.asked == 2, "512 times the work of a 32 x 32 product of 1 ms is more than 100 ms"


def test_a_real_cpu_yields_every_limit_quickly():
    device = find_device("cpu")
    begin = time.process_time()
    found = measure_limits(device, MeasureOptions(quick=True))
    assert time.process_time() - begin < 6
    assert set(found.matrix_tflop_per_s) == {"fp64", "fp32", "bf16", "fp16"}
    rates = [*found.matrix_tflop_per_s.values(), found.read_gb_per_s, found.copy_gb_per_s, found.exponentials_t_per_s]
    assert all(rate is not None and rate > 0 for rate in rates)
    assert limit_of(BLOG, "forward", found, BLOG.visible_pairs())[0] > 0
