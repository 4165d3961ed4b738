"""The GPU stopwatch on a simulated card: one stream, a host clock and a device clock, and nothing else."""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
import weakref
from typing import Any

import pytest

from attnscope import timers
from attnscope.device import Device
from attnscope.timers import BATCH_MS, CaptureFailed, CudaTimer, cache_bytes
from attnscope.units import MIB

GPU = Device("cuda", "H200", l2_bytes=50 * MIB)
LAUNCH_S, QUERY_S, CLOCK_HZ, EVICT_S, SUM_S = 5e-6, 0.5e-6, 1.98e9, 40e-6, 3e-6


class FakeEvent:
    def __init__(self, card: FakeCard) -> None:
        self.card, self.at_s = card, None

    def record(self) -> None:
        self.card.host += 1e-6
        self.at_s = max(self.card.host, self.card.free)

    def query(self) -> bool:
        self.card.host += QUERY_S
        return self.card.host >= self.at_s

    def synchronize(self) -> None:
        self.card.host = max(self.card.host, self.at_s)

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at_s - self.at_s) * 1e3


class FakeGraph:
    """Records the launches of its capture; replays them as one launch."""

    def __init__(self, card: FakeCard) -> None:
        self.card, self.work, self.was_reset = card, [], False

    def replay(self) -> None:
        self.card.launch(sum(self.work))

    def reset(self) -> None:
        self.was_reset = True


class FakeGenerator:
    def __init__(self) -> None:
        self.restored = 0

    def clone_state(self) -> str:
        return "state"

    def graphsafe_set_state(self, state: str) -> None:
        assert state == "state"
        self.restored += 1


class FakeCard(types.ModuleType):
    """As much of ``torch`` as the stopwatch uses. Launches cost the host 5 us and run one after the other."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.host, self.free, self.capturing = 10.0, 10.0, None
        self.allocated = self.peak = 1000 * MIB
        self.sums: list[Any] = []
        self.generator = FakeGenerator()
        self.cuda = types.SimpleNamespace(
            set_device=lambda index: None,
            Event=lambda enable_timing: FakeEvent(self),
            Stream=lambda index: types.SimpleNamespace(wait_stream=lambda other: None),
            current_stream=lambda index: "current",
            stream=lambda stream: contextlib.nullcontext(),
            synchronize=lambda index: self.wait(),
            memory_allocated=lambda index: self.allocated,
            max_memory_allocated=lambda index: self.peak,
            reset_peak_memory_stats=lambda index: setattr(self, "peak", self.allocated),
            default_generators=[self.generator],
            CUDAGraph=lambda: FakeGraph(self),
            graph=self.graph,
            _sleep=lambda cycles: self.launch(cycles / CLOCK_HZ),
        )

    def rand(self, n: int, device: str) -> str:
        assert device == "cuda:0"
        self.buffer_bytes = 4 * n
        return "evict buffer"

    def empty(self, shape: tuple[()], device: str) -> str:
        return "sink"

    def sum(self, tensor: Any, dim: int, out: Any) -> None:
        self.sums.append(tensor)
        self.launch(EVICT_S)

    def launch(self, seconds: float) -> None:
        self.host += LAUNCH_S
        if self.capturing is not None:
            self.capturing.append(seconds)
        else:
            self.free = max(self.free, self.host) + seconds

    def wait(self) -> None:
        if self.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        self.host = max(self.host, self.free)

    @contextlib.contextmanager
    def graph(self, graph: FakeGraph, stream: Any, capture_error_mode: str):
        assert capture_error_mode == "thread_local"
        self.capturing = graph.work
        try:
            yield
        finally:
            self.capturing = None
        if not graph.work:
            warnings.warn("The CUDA Graph is empty. This usually means ...", stacklevel=1)


@pytest.fixture
def card(monkeypatch) -> FakeCard:
    fake = FakeCard()
    clock = types.SimpleNamespace(perf_counter=lambda: fake.host, perf_counter_ns=lambda: round(fake.host * 1e9))
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(timers, "time", clock)
    return fake


@pytest.fixture
def timer(card) -> CudaTimer:
    return CudaTimer(GPU)


def test_the_evicting_buffer_is_three_times_the_cache_and_is_read(card, timer):
    assert card.buffer_bytes == pytest.approx(3 * 50 * MIB, abs=4)
    card.sums.clear()
    timer.time_call(lambda: card.launch(1e-4), 100.0)
    timer.time_call(lambda: card.launch(1e-4), 100.0, evict=False)
    assert card.sums == ["evict buffer"]


def test_a_spin_is_as_long_as_asked_because_the_clock_was_counted(card, timer):
    assert timer.time_call(lambda: timer.spin(250.0), 50.0, evict=False).ms == pytest.approx(0.25, rel=0.05)


def test_a_call_queued_behind_the_spin_holds_no_host_gap(card, timer):
    def call() -> None:
        for _ in range(10):
            card.launch(20e-6)
            card.host += 30e-6

    held = timer.time_call(call, 500.0)
    assert held.held and held.ms == pytest.approx(0.2)
    drained = timer.time_call(call, 0.0, evict=False)
    assert not drained.held and drained.ms > 0.3


def test_a_call_that_waits_is_never_held(card, timer):
    def call() -> None:
        card.launch(1e-5)
        card.wait()

    assert not timer.time_call(call, 1000.0).held


def test_warm_tensors_are_read_after_the_eviction(card, timer):
    order = []
    tensor = types.SimpleNamespace(sum=lambda: order.append(len(card.sums)))
    before = len(card.sums)
    timer.time_call(lambda: card.launch(1e-5), 100.0, warm=(tensor,))
    assert order == [before + 1]


def test_host_time_is_the_launch_alone(card, timer):
    assert timer.host_us(lambda: card.launch(1e-3), 20) == pytest.approx(LAUNCH_S * 1e6, rel=0.01)


def test_host_time_is_taken_while_the_queue_is_nearly_empty(card, timer):
    queued, deepest, wait = 0, 0, card.wait

    def call() -> None:
        nonlocal queued, deepest
        queued += 1
        deepest = max(deepest, queued)
        card.launch(1e-3)

    def waited() -> None:
        nonlocal queued
        queued = 0
        wait()

    card.wait = waited
    assert timer.host_us(call, 95) == pytest.approx(LAUNCH_S * 1e6, rel=0.01)
    assert deepest == timers.HOST_BATCH and queued == 0


def test_steady_time_is_the_devices_with_a_full_queue(card, timer):
    assert timer.steady_ms(lambda: card.launch(50e-6), 0.1) == pytest.approx(0.05, rel=0.02)


def test_a_block_leaves_no_time_out_and_throws_its_beginning_away(card, timer):
    begin = card.host
    block = timer.run_block([lambda: card.launch(1e-3), lambda: card.launch(3e-3)], 1, 1.0, 0.5, 2.0)
    assert not block.starved
    assert block.ms_per_call == pytest.approx([2.0] * len(block.ms_per_call))
    assert block.begin_s - begin >= 0.5 and 1.0 <= block.end_s - begin < 1.1
    assert len(block.ms_per_call) == round((block.end_s - block.begin_s) * 1e3 / BATCH_MS)


def test_a_launch_of_many_calls_is_divided(card, timer):
    block = timer.run_block([lambda: card.launch(8e-3)], 8, 0.2, 0.1, 1.0)
    assert block.ms_per_call == pytest.approx([1.0] * len(block.ms_per_call))


def test_a_block_of_one_endless_call_still_has_a_sample(card, timer):
    block = timer.run_block([lambda: card.launch(2.0)], 1, 1.0, 0.5, 2000.0)
    assert block.ms_per_call == (pytest.approx(2000.0),)


def test_a_host_that_cannot_keep_up_is_noticed(card, timer):
    def call() -> None:
        card.host += 50e-6
        card.launch(10e-6)

    assert timer.run_block([call], 1, 0.5, 0.1, 0.01).starved


def test_peak_memory_is_what_one_call_adds(card, timer):
    def call() -> None:
        card.peak = max(card.peak, card.allocated + 64 * MIB)

    card.peak = 5000 * MIB
    assert timer.peak_memory_mib(call) == 64.0


def test_a_graph_holds_all_calls_and_lets_go_of_them(card, timer):
    made = [lambda: card.launch(1e-4)] * 3
    replay = timer.capture(lambda: made)
    assert replay.calls == 3
    assert timer.time_call(replay.replay, 100.0, evict=False).ms == pytest.approx(0.3)
    assert card.generator.restored == 0
    replay.close()


def test_a_capture_that_breaks_is_told_in_one_line_and_the_generator_is_put_back(card, timer):
    with pytest.raises(CaptureFailed, match=r"^RuntimeError: operation not permitted when stream is capturing$"):
        timer.capture(lambda: [card.wait])
    assert card.generator.restored == 1
    assert card.capturing is None


def test_a_capture_that_breaks_lets_go_of_all_that_it_held(card, timer):
    class Call:  # of a call's results and saved tensors
        def __call__(self) -> None:
            card.wait()

    def make_calls() -> list[Call]:
        calls = [Call()]
        held.append(weakref.ref(calls[0]))
        return calls

    held: list[weakref.ref[Call]] = []
    try:
        timer.capture(make_calls)
    except CaptureFailed:
        gone = held[0]() is None
    assert gone


def test_an_empty_graph_is_no_capture(card, timer):
    with pytest.raises(CaptureFailed, match="another stream"):
        timer.capture(lambda: [lambda: None])


def test_the_last_level_cache_is_found_or_assumed(tmp_path, monkeypatch):
    assert cache_bytes(GPU) == 50 * MIB
    assert cache_bytes(Device("cuda", "old")) == 64 * MIB
    for index, size in enumerate(("32K", "1M", "48M", "junk")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(timers, "Path", lambda text: tmp_path)
    assert cache_bytes(Device("cpu", "c")) == 48 * MIB
    monkeypatch.setattr(timers, "Path", lambda text: tmp_path / "nothing")
    assert cache_bytes(Device("cpu", "c")) == 64 * MIB
