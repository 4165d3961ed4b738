"""Stage 4: the stopwatches, one for the GPU and one for the CPU, behind one protocol.

Reads closures, writes plain times; knows nothing of rivals, records or limits. Imports torch only inside functions.

What a GPU time is: the time between two CUDA events around one call that was queued whole while a spin kernel held the
stream, so that no host gap lies inside. Nothing is subtracted. An empty pair of events reads about one or two
microseconds, but that time overlaps the start of a kernel, so taking it off would make short kernels faster than the
profiler sees them; nvbench subtracts nothing either. The empty pair and the smallest kernel are published among the
limits (``event_floor_us``, ``launch_floor_us``): a time near them is the floor, not the kernel.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from attnscope.device import Device
from attnscope.errors import AttnscopeError
from attnscope.units import MIB, median

Call = Callable[[], object]
EVICT_FACTOR = 3  # times L2: lines kept by an evict-last hint survive a single pass
CPU_CACHE_BYTES = 64 * MIB  # where the machine does not say
CPU_EVICT_MAX_BYTES = 512 * MIB
BATCH_MS = 8.0
MAX_BATCH = 400  # calls: two batches in flight must fit the launch queue (1,024 entries), else queueing one waits
HOST_BATCH = 10  # calls between two waits: their launches must fit the queue, too
STARVED_FRACTION = 0.1
LEAST_STEADY = 4


class CaptureFailed(AttnscopeError):
    """A call could not be captured in a CUDA graph; the process goes on without that number."""


@dataclass(frozen=True)
class Sample:
    """One timed call. ``held`` is False where the spin kernel ended before the call was queued whole."""

    ms: float
    held: bool = True


@dataclass(frozen=True)
class Block:
    """The measured part of a sustained block: mean call times of its batches, and its window on the host's clock.

    ``starved`` is True where the GPU waited for the host in more than a tenth of the batches: then the times are the
    host's, not the GPU's.
    """

    ms_per_call: tuple[float, ...]
    begin_s: float
    end_s: float
    starved: bool = False


class Replay(Protocol):
    """A captured graph of ``calls`` calls over as many sets of inputs."""

    calls: int

    def replay(self) -> None:
        """Launch it once."""

    def close(self) -> None:
        """Free its memory."""


class Timer(Protocol):
    """What measuring needs from a stopwatch. Times are of the device, but where a name says host."""

    def now_s(self) -> float:
        """The host's performance counter."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def time_call(self, call: Call, spin_us: float, *, evict: bool = True, warm: Sequence[Any] = ()) -> Sample:
        """Time one call, caches evicted and then ``warm`` tensors read; on a GPU queued behind ``spin_us`` of spin."""

    def host_us(self, call: Call, repeats: int) -> float:
        """Median time of the host's part of one call; never waits for the device inside."""

    def steady_ms(self, call: Call, seconds: float) -> float:
        """Time of a call that runs back to back for about ``seconds``, its warm-up left out: what a limit is."""

    def run_block(
        self, calls: Sequence[Call], calls_per_launch: int, seconds: float, drop_s: float, ms_per_call: float
    ) -> Block:
        """``calls`` in turn for ``seconds``, the first ``drop_s`` thrown away; each launches ``calls_per_launch``."""

    def peak_memory_mib(self, call: Call) -> float | None:
        """Memory that one call allocates at its peak, beyond what was there before it."""

    def capture(self, make_calls: Callable[[], Sequence[Call]]) -> Replay:
        """One graph of all calls. Raises CaptureFailed; the process is usable afterwards."""


def make_timer(device: Device) -> Timer:
    """The stopwatch for ``device``."""
    return CudaTimer(device) if device.kind == "cuda" else CpuTimer()


def cache_bytes(device: Device) -> int:
    """Size of the last level cache: L2 on a GPU; on a CPU the largest that Linux names, else 64 MiB."""
    if device.kind == "cuda":
        return device.l2_bytes or CPU_CACHE_BYTES
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 1024, "M": MIB}.get(text[-1:])
        if unit and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes, default=CPU_CACHE_BYTES)


class CpuTimer:
    """Wall time by ``time.perf_counter_ns``; caches are evicted by reading more than the last level holds."""

    def __init__(self, evict_bytes: int | None = None) -> None:
        import torch

        size = evict_bytes or min(cache_bytes(Device("cpu", "")) * 3 // 2, CPU_EVICT_MAX_BYTES)
        self._buffer = torch.ones(size // 4)
        self._sink = torch.empty(())

    def now_s(self) -> float:
        """The host's performance counter."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """A CPU call is done when it returns."""

    def time_call(self, call: Call, spin_us: float, *, evict: bool = True, warm: Sequence[Any] = ()) -> Sample:
        """Wall time of one call."""
        import torch

        del spin_us
        if evict:
            torch.sum(self._buffer, dim=0, out=self._sink)
        for tensor in warm:
            tensor.sum()
        begin = time.perf_counter_ns()
        call()
        return Sample((time.perf_counter_ns() - begin) / 1e6)

    def host_us(self, call: Call, repeats: int) -> float:
        """Wall time, which on a CPU is the host's."""
        return median([self.time_call(call, 0.0, evict=False).ms for _ in range(repeats)]) * 1e3

    def steady_ms(self, call: Call, seconds: float) -> float:
        """The least of the wall times, for other processes take their share of a CPU."""
        end = self.now_s() + seconds
        call()
        times: list[float] = []
        while len(times) < LEAST_STEADY or self.now_s() < end:
            times.append(self.time_call(call, 0.0, evict=False).ms)
        return min(times)

    def run_block(
        self, calls: Sequence[Call], calls_per_launch: int, seconds: float, drop_s: float, ms_per_call: float
    ) -> Block:
        """Calls back to back; every one is a sample."""
        del ms_per_call
        times: list[float] = []
        begin = last = time.perf_counter()
        window = begin
        for call in itertools.cycle(calls):
            call()
            now = time.perf_counter()
            if last - begin >= drop_s:
                times.append((now - last) * 1e3 / calls_per_launch)
            else:
                window = now
            last = now
            if now - begin >= seconds and times:
                break
        return Block(tuple(times), window, last)

    def peak_memory_mib(self, call: Call) -> float | None:
        """None: torch keeps no account of memory on a CPU."""
        del call
        return None

    def capture(self, make_calls: Callable[[], Sequence[Call]]) -> Replay:
        """Raises CaptureFailed: a CPU has no graphs."""
        del make_calls
        raise CaptureFailed("a CPU has no CUDA graphs")


class CudaTimer:
    """CUDA events behind a spin kernel, on torch's current stream of the device."""

    def __init__(self, device: Device, evict_bytes: int | None = None) -> None:
        import torch

        torch.cuda.set_device(device.index)
        self._torch = torch
        self._index = device.index
        # never zeros: a card runs faster and cooler on them
        self._buffer = torch.rand((evict_bytes or EVICT_FACTOR * cache_bytes(device)) // 4, device=device.torch_name)
        self._sink = torch.empty((), device=device.torch_name)
        self._side = torch.cuda.Stream(device.index)
        self.evict()
        self._cycles_per_us = self._calibrate()

    def now_s(self) -> float:
        """The host's performance counter."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Wait for every stream of the device."""
        self._torch.cuda.synchronize(self._index)

    def evict(self) -> None:
        """Drop everything from L2 by reading three times its size; a write would leave dirty lines to be paid for."""
        self._torch.sum(self._buffer, dim=0, out=self._sink)

    def spin(self, microseconds: float) -> None:
        """Hold the current stream by a kernel that counts clock cycles (``torch.cuda._sleep``: private, but old)."""
        self._torch.cuda._sleep(int(microseconds * self._cycles_per_us))

    def time_call(self, call: Call, spin_us: float, *, evict: bool = True, warm: Sequence[Any] = ()) -> Sample:
        """Time between events around one call; waits for its end, so that a fault is this call's."""
        if evict:
            self.evict()
        for tensor in warm:
            tensor.sum()
        start, end = self._event(), self._event()
        self.spin(spin_us)
        start.record()
        call()
        end.record()
        held = not start.query()  # the stream still stands at the spin: nothing waited for the host
        end.synchronize()
        return Sample(start.elapsed_time(end), held)

    def host_us(self, call: Call, repeats: int) -> float:
        """Median host time of a call whose launches do not block: a few at a time, so that the queue is never full,
        and between these a wait that is not timed."""
        times = []
        for index in range(repeats):
            if index % HOST_BATCH == 0:
                self.synchronize()
            begin = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - begin) / 1e3)
        self.synchronize()
        return median(times)

    def steady_ms(self, call: Call, seconds: float) -> float:
        """Mean time of calls queued back to back, by one pair of events: the rate that power and heat let stand."""
        call()
        call()
        repeats = _repeats(seconds, self._elapsed_ms(call, 1) / 1e3)
        return self._elapsed_ms(call, repeats) / repeats

    def run_block(
        self, calls: Sequence[Call], calls_per_launch: int, seconds: float, drop_s: float, ms_per_call: float
    ) -> Block:
        """Batches of about 8 ms, one running while the next is queued; events between them leave no time out."""
        turn = itertools.cycle(calls)
        wanted = round(BATCH_MS / max(ms_per_call * calls_per_launch, 1e-3))
        batch = max(1, min(MAX_BATCH // calls_per_launch, wanted))
        pending: deque[tuple[Any, Any, bool]] = deque()
        times: list[float] = []
        starved = 0
        self.synchronize()
        begin = window = self.now_s()
        previous = self._event()
        previous.record()
        while True:
            for _ in range(batch):
                next(turn)()
            # the batch before was done before this one was queued whole: the device waited for the host
            late = bool(previous.query())
            end = self._event()
            end.record()
            pending.append((previous, end, late))
            previous = end
            if len(pending) == 1:
                continue
            start, done, was_late = pending.popleft()
            done.synchronize()
            now = self.now_s()
            if window - begin >= drop_s:
                times.append(start.elapsed_time(done) / (batch * calls_per_launch))
                starved += was_late
                if now - begin >= seconds:
                    break
            else:
                window = now
        self.synchronize()
        return Block(tuple(times), window, now, starved > STARVED_FRACTION * len(times))

    def peak_memory_mib(self, call: Call) -> float | None:
        """What torch's allocator handed out at the peak of one call, beyond what lived before it."""
        cuda = self._torch.cuda
        self.synchronize()
        before = cuda.memory_allocated(self._index)
        cuda.reset_peak_memory_stats(self._index)
        call()
        self.synchronize()
        return float(cuda.max_memory_allocated(self._index) - before) / MIB

    def capture(self, make_calls: Callable[[], Sequence[Call]]) -> Replay:
        """Make the calls and run them on a side stream, then capture all of them in one graph."""
        torch = self._torch
        generator = torch.cuda.default_generators[self._index]
        state = generator.clone_state()
        try:
            return self._captured(make_calls)
        except CaptureFailed as failed:
            why = str(failed)
        except Exception as error:  # someone else's code; not being capturable is no fault
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            # a capture that broke leaves torch's generator waiting for its end
            generator.graphsafe_set_state(state)
            self.synchronize()
        # only here, where the error and the calls and graph in its frames are gone: their memory is free again
        raise CaptureFailed(why)

    def _captured(self, make_calls: Callable[[], Sequence[Call]]) -> Replay:
        """The calls are made on the side stream because autograd runs a backward on the stream of its forward: a
        forward of the default stream would pull that stream into the capture and break it."""
        torch = self._torch
        self._side.wait_stream(torch.cuda.current_stream(self._index))
        with torch.cuda.stream(self._side):
            calls = list(make_calls())
            for call in (calls[0], *calls):
                call()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(record=True) as caught, torch.cuda.stream(self._side):
            warnings.simplefilter("always")
            with torch.cuda.graph(graph, stream=self._side, capture_error_mode="thread_local"):
                for call in calls:
                    call()
        graph.replay()
        self.synchronize()
        if any("Graph is empty" in str(warning.message) for warning in caught):
            raise CaptureFailed("its work ran on another stream than torch's current one")
        return _CudaReplay(graph, calls)

    def _calibrate(self) -> float:
        cycles = 1_000_000
        self.synchronize()
        for _ in range(3):
            start, end = self._event(), self._event()
            start.record()
            self._torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
        return float(cycles / (start.elapsed_time(end) * 1e3))

    def _elapsed_ms(self, call: Call, repeats: int) -> float:
        start, end = self._event(), self._event()
        self.synchronize()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def _event(self) -> Any:
        return self._torch.cuda.Event(enable_timing=True)


class _CudaReplay:
    """Holds the calls as well as the graph: the graph reads the tensors that their closures keep alive."""

    def __init__(self, graph: Any, calls: list[Call]) -> None:
        self._graph = graph
        self._held = calls
        self.calls = len(calls)

    def replay(self) -> None:
        """Launch it once."""
        self._graph.replay()

    def close(self) -> None:
        """Free its memory."""
        self._graph.reset()
        self._held = []


def _repeats(seconds: float, once_s: float) -> int:
    return max(1, min(100_000, round(seconds / max(once_s, 1e-7))))
