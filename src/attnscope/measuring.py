"""Stage 4: how fast the rivals are on one workload, and how sure that is.

Reads closures that are ready to run, a Workload and Limits; writes Measurement and Verdict. Must not import an
implementation nor a later stage. The stopwatches are in :mod:`attnscope.timers`, the plan in :mod:`attnscope.pacing`,
the words in :mod:`attnscope.verdicts`, the card's limits in :mod:`attnscope.limits`, NVML in :mod:`attnscope.power`.

Two figures are published. *Isolated*: rivals take turns call by call in Williams-square order, each call behind an
evicted cache and, on a GPU, behind a spin kernel that hides the host. *Sustained*: blocks of one rival back to back,
there and back again, the beginning thrown away; on a GPU by graph replays where the host could not keep up, which go
over several sets of inputs that together exceed the cache, like the calls queued one by one elsewhere.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from attnscope.device import Device
from attnscope.errors import AttnscopeError
from attnscope.limits import fits_in_cache, limit_of, measure_limits
from attnscope.pacing import MeasureOptions, Plan, estimated_seconds, mirrored_blocks, rival_orders
from attnscope.power import Conditions, Sampler, nvml_reader
from attnscope.records import Limits, Measurement, Verdict
from attnscope.timers import Call, CaptureFailed, Replay, Timer, cache_bytes, make_timer
from attnscope.units import DTYPE_BYTES, MIB, median, quantile
from attnscope.verdicts import noise_fraction, verdicts_of
from attnscope.workload import Workload

SPIN_FACTOR, SPIN_MARGIN_US, SPIN_MAX_US = 2.0, 50.0, 200_000.0
ATTEMPTS = 6
ROTATION_FACTOR = 3
MAX_ROTATION = 256
QUIET_MS, QUIET = 2.0, 0.001  # a long call whose samples agree so well, noise / sqrt(samples), needs no more of them
REPEATS_S = 0.2  # for what repeats one rival alone: the host's part, graph replays
HOST_BOUND = 0.5  # a host part above this share of the device's time risks a queue that runs dry

Progress = Callable[[str, str], None]


class MeasureFailed(AttnscopeError):
    """An implementation raised while it was measured; ``name`` is the culprit, ``stage`` what it was doing.

    The process may be unusable afterwards (a CUDA fault outlives its call), so the caller starts another without it.
    """

    def __init__(self, name: str, cause: BaseException | str, stage: str = "measuring") -> None:
        self.name, self.cause, self.stage = name, cause, stage
        kind = f"{type(cause).__name__}: " if isinstance(cause, BaseException) else ""
        super().__init__(f"{name} failed in {stage}: {kind}{cause}")


@dataclass
class Contestant:
    """One rival, prepared. ``call`` is exactly what is timed.

    ``rotating_calls`` are the same call over :func:`rotation_count` sets of inputs, or what makes them; for a backward
    through autograd it must be a function, since the forward has to run on the stream that is captured. Without it
    graph replays are warm. ``capturable`` False leaves graphs out. ``compute`` is the sheet's compute precision.
    ``workspace_bytes`` is scratch memory that it holds for this direction, where it says so. ``ours`` is the sheet's.
    """

    name: str
    call: Call
    rotating_calls: Sequence[Call] | Callable[[], Sequence[Call]] = ()
    capturable: bool = True
    compute: str | None = None
    first_call_ms: float | None = None
    prepare_s: float | None = None
    workspace_bytes: int | None = None
    ours: bool = False


@dataclass
class _Rival:
    """A contestant and what was found out about it so far. Times are in ms by round or block."""

    contestant: Contestant
    isolated: dict[int, float] = field(default_factory=dict)
    sustained: dict[int, float] = field(default_factory=dict)
    sustained_samples: int = 0
    windows: list[tuple[float, float]] = field(default_factory=list)
    warm_s: float = 0.0
    spent_s: float = 0.0
    spin_us: float = 0.0
    unqueueable: bool = False
    wall_us: float | None = None
    peak_memory_mib: float | None = None
    graph_ms: float | None = None
    graph_is_warm: bool | None = None
    replay: Replay | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.contestant.name

    @property
    def isolated_ms(self) -> float:
        return median(list(self.isolated.values()))

    def make_rotating_calls(self) -> Sequence[Call]:
        made = self.contestant.rotating_calls
        return (made() if callable(made) else made) or [self.contestant.call]


@dataclass
class _Bench:
    """What the stages of one measurement share."""

    timer: Timer
    plan: Plan
    progress: Progress
    warm: Sequence[Any]
    cold_calls: int  # so many sets of inputs exceed the cache three times over

    @contextmanager
    def blaming(self, rival: _Rival, stage: str) -> Iterator[None]:
        """Whatever is raised within is ``rival``'s. Says so beforehand, for the case that the process dies."""
        self.progress(rival.name, stage)
        try:
            yield
        except MeasureFailed:
            raise
        except Exception as error:  # foreign code may raise anything; it goes on as what it is
            raise MeasureFailed(rival.name, error, stage) from error


def rotation_count(workload: Workload, device: Device) -> int:
    """How many sets of inputs exceed three times the L2 cache, so that a replay finds none of its own in it.

    At most 256; 1 on a CPU, where nothing is replayed, and for inputs that exceed it alone.
    """
    if device.kind != "cuda":
        return 1
    return min(MAX_ROTATION, _cold_calls(workload, device))


def _cold_calls(workload: Workload, device: Device) -> int:
    return max(1, -(-ROTATION_FACTOR * cache_bytes(device) // max(_input_bytes(workload), 1)))


def measure_rivals(
    contestants: Sequence[Contestant],
    workload: Workload,
    device: Device,
    direction: str,
    limits: Limits,
    options: MeasureOptions | None = None,
    *,
    visible_pairs: int,
    progress: Progress = lambda name, stage: None,
    warm: Sequence[Any] = (),
    timer: Timer | None = None,
    sampler: Sampler | None = None,
) -> tuple[dict[str, Measurement], list[Verdict]]:
    """Measure one direction of ``contestants`` against each other, in this process.

    Args:
        contestants: what was checked and prepared; ``call`` must not wait for the device.
        limits: of :func:`measure_limits`, from the same run.
        visible_pairs: of the inputs (``Inputs.visible_pairs``).
        progress: told (name, stage) before each call, so that its last word names the culprit of a crash or a hang.
        warm: tensors that are read again after the caches were evicted (decoding: q).

    Raises:
        MeasureFailed: names the rival that raised; what the others had so far is lost with it.
    """
    options = options or MeasureOptions()
    plan = options.plan(device)
    sampler = sampler or Sampler(nvml_reader(device))
    bench = _Bench(timer or make_timer(device), plan, progress, warm, _cold_calls(workload, device))
    rivals = [_Rival(contestant) for contestant in contestants]
    with _own_garbage_collection(), sampler:
        for rival in rivals:
            _warm_up(bench, rival, device)
        begin_s = bench.timer.now_s()
        _isolated(bench, rivals, random.Random(options.seed))
        whole = [(begin_s, bench.timer.now_s())]
        if device.kind == "cuda":
            for rival in rivals:
                _graph(bench, rival)
        _sustained(bench, rivals)
    measured = {}
    for rival in rivals:
        seen = sampler.conditions(rival.windows or whole)
        measured[rival.name] = _measurement(rival, workload, device, direction, limits, visible_pairs, seen)
        if rival.replay is not None:
            rival.replay.close()
    isolated = {rival.name: rival.isolated for rival in rivals}
    sustained = {rival.name: rival.sustained for rival in rivals}
    ours = {contestant.name for contestant in contestants if contestant.ours}
    return measured, verdicts_of(direction, isolated, sustained, ours)


def time_in_turn(
    contestants: Sequence[Contestant],
    device: Device,
    options: MeasureOptions | None = None,
    *,
    progress: Progress = lambda name, stage: None,
    warm: Sequence[Any] = (),
) -> dict[str, dict[int, float]]:
    """Isolated times in ms by name and round, nothing else; times of one round may be paired.

    Raises:
        MeasureFailed: names the rival that raised.
    """
    options = options or MeasureOptions()
    bench = _Bench(make_timer(device), options.plan(device), progress, warm, cold_calls=0)
    rivals = [_Rival(contestant) for contestant in contestants]
    with _own_garbage_collection():
        for rival in rivals:
            _warm_up(bench, rival, device)
        _isolated(bench, rivals, random.Random(options.seed))
    return {rival.name: rival.isolated for rival in rivals}


def _warm_up(bench: _Bench, rival: _Rival, device: Device) -> None:
    """Call once, then take what single calls tell: memory, and the host's time, which sizes the spin."""
    call, timer = rival.contestant.call, bench.timer
    with bench.blaming(rival, "warm-up"):
        begin_s = timer.now_s()
        call()
        timer.synchronize()
        rival.warm_s = timer.now_s() - begin_s
        if device.kind != "cuda":
            return
        begin_s = timer.now_s()
        rival.peak_memory_mib = timer.peak_memory_mib(call)
        rival.wall_us = timer.host_us(call, _fitting(bench.plan.host_calls, timer.now_s() - begin_s))
        rival.spin_us = min(SPIN_FACTOR * rival.wall_us + SPIN_MARGIN_US, SPIN_MAX_US)


def _fitting(repeats: int, once_s: float) -> int:
    """So many repeats as fit in :data:`REPEATS_S`, three at least."""
    return max(3, min(repeats, int(REPEATS_S / max(once_s, 1e-6))))


def _isolated(bench: _Bench, rivals: list[_Rival], chance: random.Random) -> None:
    """Rounds in which each rival has one call. A rival leaves when its samples or its share of the time are used up, or
    it is long and quiet; the orders of those that stay are drawn anew. The first rounds are dropped; a rival whose one
    call uses up its share sits them out, since its warm-up was call enough."""
    plan = bench.plan
    share_s = plan.isolated_s / max(len(rivals), 1)
    active = list(rivals)
    orders = rival_orders(len(active), chance)
    for turn in range(plan.dropped + plan.max_samples):
        for index in next(orders):
            rival = active[index]
            if turn < plan.dropped and rival.warm_s > share_s:
                continue
            begin_s = bench.timer.now_s()
            with bench.blaming(rival, "isolated"):
                ms = _one_sample(bench, rival)
            rival.spent_s += bench.timer.now_s() - begin_s
            if turn >= plan.dropped:
                rival.isolated[turn] = ms
        gc.collect()
        staying = [
            r for r in active if len(r.isolated) < plan.min_samples or (r.spent_s < share_s and not _is_quiet(r))
        ]
        if len(staying) < len(active):
            active = staying
            orders = rival_orders(len(active), chance)
        if not active:
            return


def _is_quiet(rival: _Rival) -> bool:
    times = list(rival.isolated.values())
    return median(times) >= QUIET_MS and noise_fraction(times) <= QUIET * len(times) ** 0.5


def _one_sample(bench: _Bench, rival: _Rival) -> float:
    """A time whose call was queued whole behind the spin; else the sample is discarded and the spin doubled.

    A call that waits for the device inside, or launches more than the queue holds, can never be queued ahead: after
    six tries its time is taken as it is, host gaps and all, and a note says so.
    """
    while True:
        for _ in range(ATTEMPTS):
            sample = bench.timer.time_call(rival.contestant.call, rival.spin_us, warm=bench.warm)
            if sample.held or rival.unqueueable:
                return sample.ms
            rival.spin_us = min(2 * rival.spin_us, SPIN_MAX_US)
        rival.unqueueable = True
        rival.spin_us = SPIN_MARGIN_US
        rival.notes.append(
            "waits for the device inside its call, or launches more than its queue holds: its time includes host gaps"
        )


def _graph(bench: _Bench, rival: _Rival) -> None:
    """Replay time per call; keeps the graph only where sustained blocks will need it."""
    plan, contestant = bench.plan, rival.contestant
    if not plan.graph_replays:
        return
    if not contestant.capturable:
        rival.notes.append("no graph time: it does not run in a CUDA graph")
        return
    with bench.blaming(rival, "graph"):
        try:
            replay = bench.timer.capture(rival.make_rotating_calls)
        except CaptureFailed as failed:
            rival.notes.append(f"no graph time: capture failed with {failed}")
            contestant.call()  # if the failed capture broke something, let it show here, under this name
            bench.timer.synchronize()
            return
        repeats = _fitting(plan.graph_replays, rival.isolated_ms * replay.calls / 1e3)
        spin_us = 4 * SPIN_MARGIN_US
        samples = [bench.timer.time_call(replay.replay, spin_us, evict=False) for _ in range(repeats + 1)]
    rival.graph_ms = median([sample.ms for sample in samples[1:]]) / replay.calls
    rival.graph_is_warm = replay.calls < bench.cold_calls
    if plan.blocks and _is_host_bound(rival):
        rival.replay = replay
    else:
        replay.close()


def _is_host_bound(rival: _Rival) -> bool:
    return rival.wall_us is not None and rival.wall_us > HOST_BOUND * rival.isolated_ms * 1e3


def _sustained(bench: _Bench, rivals: list[_Rival]) -> None:
    """Blocks of one rival back to back. A rival whose every call lasts as long as a block has none: its isolated time
    is sustained already. One whose blocks starve has none either: those times would be the host's."""
    plan = bench.plan
    by_name = {rival.name: rival for rival in rivals if rival.isolated_ms < 1e3 * plan.block_s}
    starved: set[str] = set()
    for block, name in mirrored_blocks(list(by_name), plan.blocks):
        rival = by_name[name]
        if name in starved:
            continue
        with bench.blaming(rival, "sustained"):
            replay = rival.replay
            calls = [replay.replay] if replay else rival.make_rotating_calls()
            bench.timer.synchronize()
            gc.collect()
            done = bench.timer.run_block(
                calls, replay.calls if replay else 1, plan.block_s, plan.block_drop_s, rival.isolated_ms
            )
        if done.starved:
            starved.add(name)
            rival.sustained.clear()
            rival.windows.clear()
            rival.sustained_samples = 0
            rival.notes.append("no sustained time: the host cannot queue calls as fast as the device runs them")
            continue
        rival.sustained[block] = median(done.ms_per_call)
        rival.sustained_samples += len(done.ms_per_call)
        rival.windows.append((done.begin_s, done.end_s))


def _measurement(
    rival: _Rival,
    workload: Workload,
    device: Device,
    direction: str,
    limits: Limits,
    visible_pairs: int,
    seen: Conditions,
) -> Measurement:
    contestant, times = rival.contestant, list(rival.isolated.values())
    time_ms = median(times)
    limit_ms, term = limit_of(workload, direction, limits, visible_pairs, contestant.compute)
    flops = workload.flops(direction, visible_pairs)
    sustained_ms = median(list(rival.sustained.values())) if rival.sustained else None
    joules = None
    if sustained_ms is not None and seen.power_from_energy and seen.power_w is not None:
        joules = seen.power_w * sustained_ms / 1e3
    return Measurement(
        direction=direction,
        time_ms_median=time_ms,
        time_ms_p20=quantile(times, 0.2),
        time_ms_p80=quantile(times, 0.8),
        noise_fraction=noise_fraction(times),
        samples=len(times),
        sustained_ms_median=sustained_ms,
        sustained_samples=rival.sustained_samples or None,
        joules_per_call=joules,
        power_w=seen.power_w if rival.sustained else None,
        sm_clock_mhz=seen.sm_clock_mhz,
        temperature_c=seen.temperature_c,
        throttle_reasons=seen.throttle_reasons,
        wall_us_median=time_ms * 1e3 if device.kind == "cpu" else rival.wall_us,
        graph_ms_median=rival.graph_ms,
        graph_is_warm=rival.graph_is_warm,
        first_call_ms=contestant.first_call_ms,
        prepare_s=contestant.prepare_s,
        peak_memory_mib=rival.peak_memory_mib,
        workspace_mib=None if contestant.workspace_bytes is None else contestant.workspace_bytes / MIB,
        tflop_per_s=flops / time_ms / 1e9 if flops else None,
        gb_per_s=None if fits_in_cache(workload, direction, limits) else workload.min_bytes(direction) / time_ms / 1e6,
        limit_ms=limit_ms,
        limit_term=term,
        vs_limit=None if limit_ms is None else limit_ms / time_ms,
        threads=device.threads,
        notes=tuple(rival.notes),
    )


def _input_bytes(workload: Workload) -> int:
    w = workload
    return (w.B * w.H * w.L * w.D + w.B * w.H_kv * w.S * (w.D + w.D_v)) * DTYPE_BYTES[w.dtype]


@contextmanager
def _own_garbage_collection() -> Iterator[None]:
    """Collections happen between calls only; what lives now is left out of them, which makes them quick."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


__all__ = [
    "Contestant", "MeasureFailed", "MeasureOptions", "estimated_seconds", "limit_of", "measure_limits",
    "measure_rivals", "rotation_count", "time_in_turn",
]  # fmt: skip
