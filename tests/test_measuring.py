"""Measuring with a clock of our own, and a few real sleeps on the CPU."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from attnscope.device import Device
from attnscope.limits import limit_of
from attnscope.measuring import Contestant, MeasureFailed, MeasureOptions, measure_rivals, rotation_count
from attnscope.power import Reading, Sampler
from attnscope.records import Limits
from attnscope.timers import Block, CaptureFailed, CpuTimer, Sample
from attnscope.units import median
from attnscope.workload import Workload

CPU = Device("cpu", "test cpu", threads=2)
GPU = Device("cuda", "H200", multiprocessors=132, l2_bytes=50 * 2**20)
BLOG = Workload.parse("B8,H16,L1024,D64,bf16,causal")
SMALL = Workload.parse("B1,H2,L128,D64,bf16")
LIMITS = Limits("H200", {"bf16": 700.0, "fp32": 50.0}, 4000.0, 4000.0, 3.5, 2.0, cache_bytes=50 * 2**20)


class FakeCall:
    """A call of known length on a fake device. ``sync`` waits for the device inside, so it can never be queued."""

    def __init__(self, timer: FakeTimer, name: str, ms: float, *, host_us: float = 20.0, sync: bool = False) -> None:
        self.timer, self.name, self.ms, self.host, self.sync = timer, name, ms, host_us, sync
        self.fail_at: int | None = None
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        self.timer.log.append(self.name)
        self.timer.now += self.ms / 1e3
        if self.fail_at is not None and self.calls >= self.fail_at:
            raise ValueError("boom")


class FakeReplay:
    def __init__(self, calls: Sequence[Any]) -> None:
        self.inner, self.calls, self.closed = calls, len(calls), False
        self.ms = sum(call.ms for call in calls) * 0.9
        self.host, self.sync, self.name = 3.0, False, "replay"

    def replay(self) -> None:
        self.inner[0].timer.now += self.ms / 1e3

    def close(self) -> None:
        self.closed = True


class FakeTimer:
    """A GPU, or a CPU, whose time passes only when something runs."""

    def __init__(self, kind: str = "cuda") -> None:
        self.kind = kind
        self.now = 100.0
        self.log: list[str] = []
        self.spins: list[tuple[str, float, bool]] = []
        self.warmed: list[Any] = []
        self.blocks: list[tuple[str, float]] = []
        self.replays: list[FakeReplay] = []
        self.capture_error: str | None = None
        self.drift = 0.0

    def call(self, name: str, ms: float, **facts: Any) -> FakeCall:
        return FakeCall(self, name, ms, **facts)

    def now_s(self) -> float:
        return self.now

    def synchronize(self) -> None:
        pass

    def time_call(self, call: Any, spin_us: float, *, evict: bool = True, warm: Sequence[Any] = ()) -> Sample:
        owner = getattr(call, "__self__", call)
        call()
        self.warmed.extend(warm)
        held = self.kind == "cpu" or (spin_us > owner.host and not owner.sync)
        self.spins.append((owner.name, spin_us, held))
        self.drift += 1e-4
        gap = 0.0 if held else owner.host / 1e3
        return Sample(owner.ms * (1 + self.drift) + gap, held)

    def host_us(self, call: Any, repeats: int) -> float:
        return call.host / 10  # an underestimate, so that the first spin can be too short

    def steady_ms(self, call: Any, seconds: float) -> float:
        raise AssertionError("rivals have no steady time")

    def run_block(self, calls, calls_per_launch, seconds, drop_s, ms_per_call) -> Block:
        owner = getattr(calls[0], "__self__", calls[0])
        begin = self.now
        self.now += seconds
        self.blocks.append((owner.name, seconds))
        per_call = owner.ms / calls_per_launch
        starved = owner.host / 1e3 > owner.ms
        return Block((per_call * 1.1,) * 5, begin + drop_s, self.now, starved)

    def peak_memory_mib(self, call: Any) -> float:
        call()
        return 12.5

    def capture(self, make_calls) -> FakeReplay:
        if self.capture_error:
            raise CaptureFailed(self.capture_error)
        self.replays.append(FakeReplay(make_calls()))
        return self.replays[-1]


def measure(contestants, device=GPU, workload=BLOG, timer=None, options=None, limits=LIMITS, **more):
    return measure_rivals(
        contestants,
        workload,
        device,
        "forward",
        limits,
        options or MeasureOptions(),
        visible_pairs=workload.visible_pairs(),
        timer=timer,
        sampler=more.pop("sampler", Sampler(None)),
        **more,
    )


def isolated_log(timer: FakeTimer) -> list[str]:
    return [name for name, _, _ in timer.spins if name != "replay"]


# --- isolated ---


def test_rivals_take_turns_in_balanced_orders_and_the_first_samples_are_dropped():
    timer = FakeTimer()
    rivals = [Contestant(name, timer.call(name, 0.5, host_us=1.0)) for name in "abcd"]
    measured, _ = measure(rivals, timer=timer, options=MeasureOptions(sustained_s=0, graphs=False))
    plan = MeasureOptions().plan(GPU)
    log = isolated_log(timer)
    rounds = [log[start : start + 4] for start in range(0, len(log), 4)]
    assert len(rounds) == plan.dropped + plan.max_samples
    assert all(sorted(order) == list("abcd") for order in rounds)
    behind = Counter(pair for order in rounds[:60] for pair in pairwise(order))
    assert max(behind.values()) == min(behind.values()) == 15
    assert {m.samples for m in measured.values()} == {plan.max_samples}


def test_ours_are_judged_against_the_best_that_is_not_ours_as_well():
    timer = FakeTimer()
    rivals = [
        Contestant(name, timer.call(name, ms), ours=name != "c") for name, ms in (("a", 1.0), ("b", 1.2), ("c", 1.5))
    ]
    _, verdicts = measure(rivals, timer=timer, options=MeasureOptions(sustained_s=0, graphs=False))
    assert {(v.implementation, v.rival) for v in verdicts} == {
        ("a", "b"),
        ("a", "c"),
        ("b", "a"),
        ("b", "c"),
        ("c", "a"),
    }


def test_the_same_seed_gives_the_same_order_and_another_seed_another():
    logs = []
    for seed in (3, 3, 4):
        timer = FakeTimer()
        rivals = [Contestant(name, timer.call(name, 0.5)) for name in "abc"]
        measure(rivals, timer=timer, options=MeasureOptions(seed=seed, quick=True))
        logs.append(isolated_log(timer))
    assert logs[0] == logs[1] != logs[2]


def test_a_slow_rival_leaves_after_its_share_and_the_others_go_on():
    timer = FakeTimer("cpu")
    rivals = [Contestant("slow", timer.call("slow", 900.0)), Contestant("fast", timer.call("fast", 1.0))]
    begin = timer.now
    measured, verdicts = measure(rivals, timer=timer, device=CPU, options=MeasureOptions(sustained_s=0))
    plan = MeasureOptions().plan(CPU)
    assert measured["slow"].samples == plan.min_samples
    assert measured["fast"].samples == plan.max_samples
    assert timer.now - begin < plan.isolated_s / 2 + 0.9 * (plan.min_samples + plan.dropped + 1) + 0.1
    assert {v.implementation: v.word for v in verdicts} == {"slow": "slower", "fast": "faster"}


def test_a_rival_slower_than_its_share_needs_no_dropped_call_beside_its_warm_up():
    timer = FakeTimer("cpu")
    rivals = [Contestant("snail", timer.call("snail", 5000.0)), Contestant("fast", timer.call("fast", 1.0))]
    measured, _ = measure(rivals, timer=timer, device=CPU)
    assert timer.log.count("snail") == 1 + MeasureOptions().plan(CPU).min_samples
    assert measured["snail"].sustained_ms_median is None


@pytest.mark.parametrize(("ms", "jitter", "leaves"), [(4.0, 0.001, True), (4.0, 0.03, False), (1.0, 0.001, False)])
def test_a_long_and_quiet_rival_leaves_early_and_only_such_a_one(ms, jitter, leaves):
    class Wobbling(FakeCall):
        def __call__(self) -> None:
            super().__call__()
            self.ms = ms * (1 + jitter * (self.calls % 5 - 2) / 2)

    timer, plan = FakeTimer("cpu"), MeasureOptions().plan(CPU)
    contestant = Contestant("a", Wobbling(timer, "a", ms))
    measured, _ = measure([contestant], timer=timer, device=CPU, options=MeasureOptions(sustained_s=0))
    found = measured["a"]
    assert (found.samples < plan.max_samples) == leaves and found.samples >= plan.min_samples
    assert found.time_ms_median == pytest.approx(ms, rel=jitter + 0.005)


def test_a_drained_queue_discards_the_sample_and_spins_longer():
    timer = FakeTimer()
    call = timer.call("busy", 0.1, host_us=900.0)
    measured, _ = measure([Contestant("busy", call)], timer=timer, options=MeasureOptions(quick=True))
    held = [entry for entry in timer.spins if entry[0] == "busy" and entry[2]]
    drained = [entry for entry in timer.spins if entry[0] == "busy" and not entry[2]]
    assert [spin for _, spin, _ in drained] == [230.0, 460.0]
    assert {spin for _, spin, _ in held} == {920.0}
    assert measured["busy"].time_ms_p80 < 0.11, "no sample may hold the host gap of 0.9 ms"
    assert not any("waits for the device" in note for note in measured["busy"].notes)


def test_a_call_that_waits_for_the_device_is_measured_and_said_so_once():
    timer = FakeTimer()
    call = timer.call("waiting", 1.0, host_us=500.0, sync=True)
    measured, _ = measure([Contestant("waiting", call)], timer=timer, options=MeasureOptions(quick=True))
    assert measured["waiting"].time_ms_median > 1.5
    assert [note for note in measured["waiting"].notes if "waits for the device" in note] == [
        "waits for the device inside its call, or launches more than its queue holds: its time includes host gaps"
    ]
    first_tries = [spin for _, spin, _ in timer.spins[:6]]
    assert first_tries == [150.0 * 2**power for power in range(6)]


def test_warm_tensors_are_read_before_each_isolated_call():
    timer = FakeTimer()
    measured, _ = measure(
        [Contestant("a", timer.call("a", 1.0))], timer=timer, warm=("q",), options=MeasureOptions(quick=True)
    )
    assert timer.warmed == ["q"] * (measured["a"].samples + MeasureOptions(quick=True).plan(GPU).dropped)


# --- graphs and sustained blocks ---


def test_a_host_bound_rival_is_sustained_by_graph_replays_over_rotating_inputs():
    timer = FakeTimer()
    call = timer.call("short", 0.02, host_us=200.0)
    rotating = [timer.call("short", 0.02, host_us=200.0) for _ in range(rotation_count(BLOG, GPU))]
    measured, _ = measure([Contestant("short", call, lambda: rotating)], timer=timer)
    found = measured["short"]
    assert len(rotating) > 1
    assert found.graph_ms_median == pytest.approx(0.02 * 0.9, rel=0.02)
    assert found.graph_is_warm is False
    assert [name for name, _ in timer.blocks] == ["replay", "replay"]
    assert found.sustained_ms_median == pytest.approx(0.02 * 0.9 * 1.1)
    assert timer.replays[0].closed


def test_without_rotating_inputs_a_replay_is_labelled_warm():
    timer = FakeTimer()
    measured, _ = measure([Contestant("a", timer.call("a", 1.0))], timer=timer)
    assert measured["a"].graph_is_warm is True


def test_a_failed_capture_leaves_a_note_and_a_starved_block_no_time():
    timer = FakeTimer()
    timer.capture_error = "RuntimeError: operation not permitted when stream is capturing"
    measured, _ = measure([Contestant("a", timer.call("a", 0.01, host_us=300.0))], timer=timer)
    found = measured["a"]
    assert found.graph_ms_median is None and found.sustained_ms_median is None and found.joules_per_call is None
    assert any("not permitted when stream is capturing" in note for note in found.notes)
    assert any("the host cannot queue" in note for note in found.notes)
    assert len(timer.blocks) == 1, "a second block would starve as well"


def test_what_cannot_be_captured_is_not_tried():
    timer = FakeTimer()
    timer.capture_error = "must not be asked"
    measured, _ = measure([Contestant("a", timer.call("a", 1.0), capturable=False)], timer=timer)
    assert measured["a"].notes == ("no graph time: it does not run in a CUDA graph",)


def test_a_process_that_a_failed_capture_broke_is_blamed_on_it():
    timer = FakeTimer()
    timer.capture_error = "broke"
    bad = timer.call("bad", 1.0)

    class Breaking(FakeTimer):
        def capture(self, make_calls):
            bad.fail_at = 0
            raise CaptureFailed("broke")

    timer.__class__ = Breaking
    with pytest.raises(MeasureFailed, match="bad failed in graph: ValueError: boom"):
        measure([Contestant("bad", bad)], timer=timer)


def test_sustained_blocks_go_there_and_back_and_their_samples_are_counted():
    timer = FakeTimer()
    rivals = [Contestant(name, timer.call(name, ms)) for name, ms in (("a", 1.0), ("b", 2.0))]
    measured, verdicts = measure(rivals, timer=timer)
    assert timer.blocks == [("a", 1.0), ("b", 1.0), ("b", 1.0), ("a", 1.0)]
    assert measured["a"].sustained_ms_median == pytest.approx(1.1)
    assert measured["a"].sustained_samples == 10
    assert verdicts[0].sustained_ratio == pytest.approx(0.5)


def test_joules_come_from_the_energy_counter_inside_the_blocks():
    timer = FakeTimer()
    readings = [
        Reading(100 + step / 100, energy_mj=int(step // 10 * 0.1 * 600e3), sm_clock_mhz=1500.0, throttle_bits=4)
        for step in range(10_000)
    ]
    sampler = Sampler(None)
    sampler.readings = readings
    measured, _ = measure([Contestant("a", timer.call("a", 2.0))], timer=timer, sampler=sampler)
    found = measured["a"]
    assert found.power_w == pytest.approx(600.0)
    assert found.joules_per_call == pytest.approx(600.0 * 2.2e-3)
    assert (found.sm_clock_mhz, found.throttle_reasons) == (1500.0, ("power cap",))


def test_quick_has_clocks_but_neither_power_nor_sustained_time():
    timer = FakeTimer()
    sampler = Sampler(None)
    sampler.readings = [Reading(100 + s / 1e4, energy_mj=s, power_w=5.0, sm_clock_mhz=1980.0) for s in range(10_000)]
    measured, _ = measure(
        [Contestant("a", timer.call("a", 2.0))], timer=timer, sampler=sampler, options=MeasureOptions(quick=True)
    )
    found = measured["a"]
    assert (found.sm_clock_mhz, found.power_w, found.joules_per_call, found.sustained_ms_median) == (
        1980.0,
        None,
        None,
        None,
    )


# --- failures ---


@pytest.mark.parametrize(("calls", "stage"), [(1, "warm-up"), (3, "isolated"), (9, "isolated")])
def test_whoever_raises_is_named_with_what_it_did(calls, stage):
    timer = FakeTimer()
    rivals = [Contestant(name, timer.call(name, 1.0)) for name in "abc"]
    rivals[1].call.fail_at = calls  # type: ignore[attr-defined]
    with pytest.raises(MeasureFailed) as failed:
        measure(rivals, timer=timer)
    assert (failed.value.name, failed.value.stage) == ("b", stage)
    assert isinstance(failed.value.cause, ValueError)
    assert str(failed.value) == f"b failed in {stage}: ValueError: boom"


def test_progress_names_a_rival_before_its_call_runs():
    timer = FakeTimer()
    seen: list[tuple[str, str]] = []
    rivals = [Contestant(name, timer.call(name, 1.0)) for name in "ab"]
    rivals[1].call.fail_at = 5  # type: ignore[attr-defined]
    with pytest.raises(MeasureFailed):
        measure(rivals, timer=timer, progress=lambda name, stage: seen.append((name, stage)))
    assert seen[0] == ("a", "warm-up")
    assert seen[-1] == ("b", "isolated")


# --- what is recorded ---


def test_a_measurement_holds_the_callers_figures_and_the_limits_arithmetic():
    timer = FakeTimer()
    contestant = Contestant("a", timer.call("a", 0.1), first_call_ms=7.0, prepare_s=0.5, workspace_bytes=3 * 2**20)
    measured, _ = measure([contestant], timer=timer)
    found = measured["a"]
    limit_ms, term = limit_of(BLOG, "forward", LIMITS, BLOG.visible_pairs())
    assert (found.limit_ms, found.limit_term) == (limit_ms, term)
    assert found.vs_limit == pytest.approx(limit_ms / found.time_ms_median)
    assert found.tflop_per_s == pytest.approx(BLOG.flops("forward") / found.time_ms_median / 1e9)
    assert found.gb_per_s == pytest.approx(BLOG.min_bytes("forward") / found.time_ms_median / 1e6)
    assert (found.first_call_ms, found.prepare_s, found.peak_memory_mib) == (7.0, 0.5, 12.5)
    assert found.workspace_mib == 3.0
    assert found.wall_us_median == pytest.approx(2.0)


def test_work_that_lives_in_the_cache_gets_no_share_of_bandwidth():
    timer = FakeTimer()
    measured, _ = measure([Contestant("a", timer.call("a", 0.1))], timer=timer, workload=SMALL)
    assert measured["a"].gb_per_s is None


def test_unknown_limits_are_missing_not_zero():
    timer = FakeTimer()
    measured, _ = measure([Contestant("a", timer.call("a", 0.1))], timer=timer, limits=Limits("H200"))
    assert (measured["a"].limit_ms, measured["a"].limit_term, measured["a"].vs_limit) == (None, None, None)


def test_rotating_inputs_exceed_three_times_the_cache_or_are_capped():
    count = rotation_count(SMALL, GPU)
    assert count == 256
    middle = Workload.parse("B8,H16,L256,D64,bf16")
    input_bytes = 3 * 8 * 16 * 256 * 64 * 2
    assert (rotation_count(middle, GPU) - 1) * input_bytes < 3 * 50 * 2**20 <= rotation_count(middle, GPU) * input_bytes
    assert rotation_count(Workload.parse("B8,H32,L8192,D128,bf16"), GPU) == 1
    assert rotation_count(SMALL, CPU) == 1


# --- a real CPU ---


@pytest.fixture(scope="module")
def cpu_timer() -> CpuTimer:
    return CpuTimer(evict_bytes=2**20)


class Sleep:
    """Sleeps, and keeps its own account of how long that took, since a busy machine wakes late."""

    def __init__(self, ms: float) -> None:
        self.ms = ms
        self.times: list[float] = []

    def __call__(self) -> None:
        begin = time.perf_counter()
        time.sleep(self.ms / 1e3)
        self.times.append((time.perf_counter() - begin) * 1e3)


@pytest.mark.serial
def test_a_sleep_of_known_length_is_measured_right_within_five_percent(cpu_timer):
    sleep = Sleep(20.0)
    options = MeasureOptions(quick=True, isolated_s=0.6)
    measured, _ = measure([Contestant("sleep", sleep)], device=CPU, timer=cpu_timer, options=options)
    found = measured["sleep"]
    assert found.time_ms_median == pytest.approx(median(sleep.times[-found.samples :]), rel=0.05)
    assert found.time_ms_p20 >= 20.0
    assert found.threads == 2


@pytest.mark.serial
def test_twenty_percent_longer_is_slower(cpu_timer):
    rivals = [Contestant("short", Sleep(25.0)), Contestant("long", Sleep(30.0))]
    _, verdicts = measure(rivals, device=CPU, timer=cpu_timer, options=MeasureOptions(sustained_s=0))
    assert {v.implementation: (v.word, v.rival) for v in verdicts} == {
        "short": ("faster", "long"),
        "long": ("slower", "short"),
    }
    assert verdicts[1].ratio == pytest.approx(1.2, rel=0.1)


@pytest.mark.serial
def test_a_cpu_block_drops_its_beginning(cpu_timer):
    sleep = Sleep(10.0)
    block = cpu_timer.run_block([sleep], 1, 0.2, 0.1, 10.0)
    assert len(block.ms_per_call) < len(sleep.times)
    assert block.ms_per_call == pytest.approx(sleep.times[-len(block.ms_per_call) :], rel=0.2)
    assert block.end_s - block.begin_s == pytest.approx(sum(block.ms_per_call) / 1e3, rel=0.01)
    assert not block.starved


@pytest.mark.serial
def test_a_cpu_has_neither_graphs_nor_an_account_of_memory(cpu_timer):
    assert cpu_timer.peak_memory_mib(lambda: None) is None
    with pytest.raises(CaptureFailed, match="CPU"):
        cpu_timer.capture(list)
