"""Stage 6: findings on the host and on the window: who waits for whom, what was built in it, what it lacks.

Each rule is a pure function from TraceFacts to at most one Finding. Imports neither torch nor an implementation.
"""

from __future__ import annotations

import re
from collections import Counter

from attnscope.explaining.captured import has_capture
from attnscope.explaining.trace_facts import TraceFacts, evidence, percent, total
from attnscope.explaining.window import busy_ns, captures, launched_before, lost_launches
from attnscope.records import Finding
from attnscope.trace.events import DeviceEvent, Interval
from attnscope.units import format_us, median

FEWEST_KERNELS = 20
BUSY_ENOUGH = 1 / 3  # the profiler slows the host several times: less than three times as long says nothing
SOON_US = 40.0  # a kernel that starts this soon after its launch did not wait for the card
LARGE_GAPS = 3
# What recording costs the host, about: an op with its shapes, an op without, a call into the runtime.
SHAPED_OP_US, PLAIN_OP_US, RUNTIME_CALL_US = 4.0, 1.5, 3.0
BUILDS = re.compile(
    r"^(entire_frame_compile|_compile\b|compile_inner|backend_compile|inductor_compile|compile_fx|async_compile|"
    r"CachingAutotuner|PyCodeCache|cudagraphify|GraphLowering)|_compile\.|autotun|benchmark_all_configs|nvrtcCompile|"
    r"hiprtcCompile|cuLinkComplete|(cu|hip)ModuleLoad|(cu|cuda)LibraryLoad"
)
LEAST_BUILD_US = 1000.0
PLAN_OP = re.compile(r"_scaled_dot_product_cudnn_attention|_cudnn_attention_")
LEAST_PLAN_US = 20_000.0


def launch_bound(facts: TraceFacts) -> Finding | None:
    """The card waits for the host's launches."""
    events = [event for event in facts.trace.device_events if event.launch is not None]
    kernels = [event for event in events if event.kind == "kernel" and not event.replayed]
    if len(kernels) < FEWEST_KERNELS:
        return None
    start, end = min(e.start_ns for e in events), max(e.start_ns + e.duration_ns for e in events)
    everything = len(events) == len(facts.trace.device_events)
    busy, span = round(facts.window.busy_us * 1e3) if everything else busy_ns(events), end - start
    if not span or busy > BUSY_ENOUGH * span:
        return None
    delays = [max(e.start_ns - e.launch.end_ns, 0) / 1e3 for e in kernels if e.launch is not None]
    if median(delays) > SOON_US or _few_large_gaps(events):
        return None
    saving, arithmetic = _idle_without_profiler(facts, start, end, (span - busy) / 1e3, format_us(busy / 1e3))
    return Finding(
        id="launch-bound",
        sentence=f"The GPU works only {percent(busy, span)} of the time between its first and last kernel: it waits "
        "for the CPU to launch the next one, which the profiler slows.",
        evidence=(
            f"{len(kernels):,} kernels of {format_us(sum(e.duration_us for e in kernels) / len(kernels))} on average",
            f"half of them start within {format_us(median(delays))} of their launch: nothing was queued",
            f"GPU busy {format_us(busy / 1e3)} of {format_us(span / 1e3)}",
        ),
        saving_us=saving,
        arithmetic=arithmetic,
        remedy='torch.compile(model, mode="reduce-overhead"), a torch.cuda.CUDAGraph, or more work in each call',
        confidence="low",
    )


def _idle_without_profiler(
    facts: TraceFacts, start_ns: int, end_ns: int, idle_us: float, busy: str
) -> tuple[float | None, str]:
    """The idle time less what recording itself took of the host; None where that is all of it."""
    ops = sum(1 for op in facts.trace.ops if start_ns <= op.start_ns <= end_ns)
    calls = sum(1 for call in facts.trace.runtime_calls if start_ns <= call.start_ns <= end_ns)
    shaped = any(op.shapes is not None for op in facts.trace.ops[:200])
    each = SHAPED_OP_US if shaped else PLAIN_OP_US
    cost = ops * each + calls * RUNTIME_CALL_US
    said = (
        f"at most {format_us((end_ns - start_ns) / 1e3)} - {busy}, less about {format_us(cost)} that the profiler took "
        f"of the host ({ops:,} ops × {each:g} µs, {calls:,} runtime calls × {RUNTIME_CALL_US:g} µs); it slows the host "
        "several times, so measure without it"
    )
    return (idle_us - cost, said) if idle_us > cost else (None, f"not estimated: {said}")


def _few_large_gaps(events: list[DeviceEvent]) -> bool:
    """Whether a few long pauses (data loading, a synchronise) are most of the idle time."""
    reached, gaps = events[0].start_ns, []
    for event in events:
        if event.start_ns > reached:
            gaps.append(event.start_ns - reached)
        reached = max(reached, event.end_ns)
    gaps.sort(reverse=True)
    return sum(gaps[:LARGE_GAPS]) > 0.6 * sum(gaps)


def built_in_window(facts: TraceFacts) -> Finding | None:
    """Compiling, autotuning or planning happened while the trace was recorded."""
    found: list[Interval] = []
    for events in (facts.trace.ops, facts.trace.runtime_calls):
        names = {name for name in {event.name for event in events} if BUILDS.search(name)}
        reached: dict[tuple[str, str], int] = {}
        for event in events if names else ():
            if event.name in names and event.start_ns >= reached.get(event.thread, -1):
                found.append(event)
                reached[event.thread] = event.end_ns
    plans = [op for op in facts.trace.ops if op.duration_ns > LEAST_PLAN_US * 1e3 and PLAN_OP.search(op.name)]
    found += [op for op in plans if op.parent is None or not PLAN_OP.search(op.parent.name)]
    time = sum(event.duration_us for event in found)
    if time < LEAST_BUILD_US:
        return None
    longest = sorted(found, key=lambda event: -event.duration_ns)[:4]
    times = Counter(event.name for event in found)
    return Finding(
        id="built-in-window",
        sentence="Something was compiled, tuned or planned inside the profiled window: the first call's price, not "
        "that of a step.",
        evidence=tuple(
            dict.fromkeys(f"{times[e.name]} × {e.name[:60]}: up to {format_us(e.duration_us)}" for e in longest)
        ),
        saving_us=time,
        arithmetic=f"{format_us(time)} of host time, once instead of in the window",
        remedy="call the code three times before the profiler starts; keep shapes few, or mark them dynamic",
        confidence="medium",
    )


def launched_before_window(facts: TraceFacts) -> Finding | None:
    """Kernels of the step before are in the trace."""
    orphans = launched_before(facts.trace)
    if not orphans:
        return None
    before = {id(event) for event in orphans}
    works = [work for work in facts.works if work.event is not None and id(work.event) in before]
    return Finding(
        id="launched-before-window",
        sentence=f"{len(orphans):,} of {len(facts.trace.device_events):,} device events were launched before the "
        "window opened: they belong to the step before, and sums over all kernels count too much.",
        evidence=(f"{format_us(total(works))} of {format_us(facts.window.sum_us)} GPU time", *evidence(works)[:3]),
        remedy="torch.cuda.synchronize() before the profiler starts; schedule(wait=1, warmup=1, active=3)",
    )


def lost_kernels(facts: TraceFacts) -> Finding | None:
    """Launches that no kernel answers."""
    lost = lost_launches(facts.trace)
    launches = facts.window.launches
    if captures(facts.trace) or not lost or (lost < 5 and lost < 0.02 * launches):
        return None
    return Finding(
        id="lost-kernels",
        sentence=f"{lost:,} of {launches:,} kernel launches have no kernel in the trace: GPU records were lost, or the "
        "window closed first. The GPU was not idle.",
        evidence=(f"{facts.window.kernels:,} kernels in the trace",),
        remedy="torch.cuda.synchronize() inside the last profiled step; shorter windows lose less",
    )


def graph_capture(facts: TraceFacts) -> Finding | None:
    """A graph was captured inside the window."""
    captured = captures(facts.trace)
    if not captured or has_capture(facts.trace):  # a watch is meant to see the capture
        return None
    return Finding(
        id="graph-capture",
        sentence="A CUDA graph was captured inside the window: ops and launches of the capture recorded work without "
        "running it.",
        evidence=(f"{captured} captures began", f"{lost_launches(facts.trace):,} launches without a kernel"),
        remedy="capture before the profiler starts, and profile replays",
    )


def graph_replay(facts: TraceFacts) -> Finding | None:
    """Work was replayed, so that no op is known."""
    works = [work for work in facts.works if work.replayed]
    if not works:
        return None
    graphs = len({work.event.correlation for work in works if work.event is not None})
    return Finding(
        id="graph-replay",
        sentence=f"{len(works):,} kernels and copies were replayed by {graphs} graph "
        f"launch{'es' if graphs != 1 else ''}; "
        "which op each was for is not in the trace, so attention in them is known by kernel names only.",
        evidence=(f"{format_us(total(works))} of {format_us(facts.window.sum_us)} GPU time", *evidence(works)[:3]),
        remedy="profile the same step once without graphs, or begin attnscope.watch() before the capture",
    )


RULES = (
    launch_bound, built_in_window, launched_before_window, lost_kernels, graph_capture, graph_replay,
)  # fmt: skip
