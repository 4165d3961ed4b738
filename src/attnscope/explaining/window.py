"""Stage 6: what was profiled: card, span, GPU time as a union and as a sum, and what the trace lacks.

Reads a Trace and its work, writes Window. Pure; imports neither torch nor an implementation.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable

from attnscope.explaining.captured import replays_from_before
from attnscope.explaining.explanation import Window
from attnscope.explaining.works import KNOWN_BY, Sequence, Work
from attnscope.trace.events import STEP_NAME, DeviceEvent, Trace

KERNEL_LAUNCH = re.compile(r"aunchKernel|LaunchCooperativeKernel|ModuleLaunch|KernelLaunch")
VERSIONS = (
    ("torch_version", "torch"), ("pytorch_version", "torch"), ("PYTORCH_VERSION", "torch"),
    ("cuda_runtime_version", "CUDA runtime"), ("cuda_driver_version", "CUDA driver"),
    ("hip_runtime_version", "HIP runtime"), ("roctracer_version", "roctracer"),
    ("rocprofiler-sdk_version", "rocprofiler-sdk"),
)  # fmt: skip


def make_window(trace: Trace, sequences: Iterable[Sequence]) -> Window:
    """The trace's figures. The works must have been marked by ``find_sites``."""
    works = [work for sequence in sequences for work in sequence]
    on_gpu = bool(trace.device_events)
    total = sum([work.duration_ns for work in works])
    attention = [work for work in works if work.in_attention]
    unattributed = [work for work in works if not work.in_attention and (work.replayed or not work.ops or work.untold)]
    kinds = [event.kind for event in trace.device_events]
    annotations = trace.annotations
    calls = Counter([call.name for call in trace.runtime_calls])
    return Window(
        card=card_name(trace),
        versions=_versions(trace),
        span_us=_span_ns(trace) / 1e3,
        busy_us=busy_ns(trace.device_events) / 1e3 if on_gpu else total / 1e3,
        sum_us=total / 1e3,
        on_gpu=on_gpu,
        kernels=kinds.count("kernel"),
        copies=kinds.count("memcpy"),
        fills=kinds.count("memset"),
        launches=sum(count for name, count in calls.items() if _launches_kernel(name)),
        ops=len(trace.ops) - len(annotations),
        steps=sum(op.name.startswith(STEP_NAME) for op in annotations),
        attention_us=sum(work.us for work in attention),
        inferred_us=sum(work.us for work in attention if not work.attributed),
        unattributed_us=sum(work.us for work in unattributed),
        lost=_lost(trace, works),
        attention_by=_known_by(attention),
        gpus=max(len({event.device for event in trace.device_events} - {None}), 1),
    )


def _known_by(works: list[Work]) -> tuple[tuple[str, float], ...]:
    """(what work is known by, its time in microseconds), the surest first."""
    times: dict[str, float] = {}
    for work in works:
        times[work.known_by] = times.get(work.known_by, 0.0) + work.us
    return tuple((word, times[word]) for word in KNOWN_BY if word in times)


def card_name(trace: Trace) -> str | None:
    """The card of the first device that worked, or of the first listed."""
    index = next((event.device for event in trace.device_events if event.device is not None), None)
    device = next((d for d in trace.devices if d.id == index), None) or next(iter(trace.devices), None)
    if device is None:
        return None
    if device.name:
        return device.name
    parts = [f"capability {device.compute_major}.{device.compute_minor}"] if device.compute_major else []
    parts += [f"{device.num_sms} multiprocessors"] if device.num_sms else []
    return f"unnamed card ({', '.join(parts)})" if parts else "unnamed card"


def busy_ns(events: Iterable[DeviceEvent]) -> int:
    """Time in which at least one device event ran, summed over devices."""
    by_device: dict[int | None, list[tuple[int, int]]] = {}
    for event in events:
        by_device.setdefault(event.device, []).append((event.start_ns, event.start_ns + event.duration_ns))
    busy = 0
    for intervals in by_device.values():
        intervals.sort()
        reached = intervals[0][0]
        for start, end in intervals:
            if end > reached:
                busy += end - max(start, reached)
                reached = end
    return busy


def launched_before(trace: Trace) -> list[DeviceEvent]:
    """Device events without a launch that came before all that was launched in the trace: a stream keeps order."""
    unlinked = [event for event in trace.device_events if event.launch is None]
    if not unlinked or not any(call.launches for call in trace.runtime_calls):
        return []
    first: dict[tuple[int | None, int | None], int] = {}
    for event in trace.device_events:
        if event.launch is not None:
            first.setdefault((event.device, event.stream), event.start_ns)
    return [event for event in unlinked if event.start_ns <= first.get((event.device, event.stream), event.start_ns)]


def not_recorded(trace: Trace) -> int:
    """Device events whose launch the trace should hold and does not."""
    return sum(event.launch is None for event in trace.device_events) - len(launched_before(trace))


@functools.lru_cache(maxsize=1024)
def _launches_kernel(name: str) -> bool:
    return KERNEL_LAUNCH.search(name) is not None


def lost_launches(trace: Trace) -> int:
    """Launches of kernels that no kernel answers."""
    answered = {event.correlation for event in trace.device_events}
    return sum(
        1
        for call in trace.runtime_calls
        if call.correlation and call.correlation not in answered and _launches_kernel(call.name)
    )


def captures(trace: Trace) -> int:
    """Graph captures that began in the trace: what is launched then does not run."""
    return sum("StreamBeginCapture" in call.name for call in trace.runtime_calls)


def graph_launches(trace: Trace) -> int:
    """Replays of CUDA or HIP graphs."""
    return sum("raphLaunch" in call.name for call in trace.runtime_calls)


def _replays(trace: Trace, works: list[Work], graphs: int) -> list[str]:
    """What is lost in replays: what no capture in the trace explains."""
    replayed = sum(work.replayed for work in works)
    launches = f"{graphs} graph launch{'es' if graphs != 1 else ''}"
    all_known = any(work.captured for work in works) and not replayed
    said = (
        [] if all_known else [f"{replayed:,} device events were replayed by {launches}: which op each was for is lost"]
    )
    if before := replays_from_before(trace):
        said.append(
            f"{before:,} of the graph launches replayed a CUDA graph that was captured before the watch began, so only "
            "kernel names are known there; begin the watch before the capture (before the compiled model's first calls)"
        )
    return said


def _span_ns(trace: Trace) -> int:
    start, end = None, 0
    for events in (trace.ops, trace.runtime_calls, trace.device_events):
        if events:
            start = events[0].start_ns if start is None else min(start, events[0].start_ns)
            end = max(end, max([event.start_ns + event.duration_ns for event in events]))
    return end - (start or 0)


def _versions(trace: Trace) -> tuple[str, ...]:
    found = [f"{shown} {_version(key, trace.meta[key])}" for key, shown in VERSIONS if key in trace.meta]
    return tuple(dict.fromkeys(found))


def _version(key: str, value: str | int | float) -> str:
    """CUDA writes 12.4 as 12040, HIP 6.4.43483 as 60443483."""
    if key.startswith("hip_") and str(value).isdigit():
        number = int(value)
        return f"{number // 10**7}.{number // 10**5 % 100}.{number % 10**5}"
    if key.startswith("cuda_") and str(value).isdigit():
        return f"{int(value) // 1000}.{int(value) % 1000 // 10}"
    return str(value)[:40]


def _lost(trace: Trace, works: list[Work]) -> tuple[str, ...]:
    said = []
    orphans = launched_before(trace)
    if orphans:
        time = sum(event.duration_ns for event in orphans) / 1e6
        said.append(
            f"{len(orphans):,} of {len(trace.device_events):,} device events have no launch in the trace: they were "
            f"launched before it began ({time:,.3g} ms)"
        )
    launching = any(call.launches for call in trace.runtime_calls)
    if trace.device_events and not launching:
        said.append("the trace holds no launches: what each kernel was for is lost")
    elif unrecorded := not_recorded(trace):
        said.append(
            f"{unrecorded:,} of {len(trace.device_events):,} device events have no launch in the trace though they "
            "came after it began: their launches were not recorded (as those of Triton kernels in old PyTorch), so "
            "what they were for is lost"
        )
    lost, captured = lost_launches(trace), captures(trace)
    if captured:
        said.append(f"{captured} graph captures began in the trace: what was launched then was recorded, not run")
    elif lost:
        said.append(f"{lost:,} kernel launches have no kernel in the trace: GPU records were lost or came too late")
    graphs = graph_launches(trace)
    if graphs:
        said += _replays(trace, works, graphs)
    if not trace.device_events and trace.runtime_calls:
        said.append("the trace holds CUDA or HIP calls and no kernel: the GPU's records are missing, not idle")
    if trace.device_events and not trace.ops:
        said.append("the trace holds no CPU op: GPU work cannot be attributed")
    if trace.ops and trace.device_events and not any(op.shapes is not None for op in trace.ops[:2000]):
        said.append("the trace holds no shapes (record_shapes=True records them): no TFLOP/s")
    said += [one for one in trace.problems if "were launched before the trace" not in one]
    return tuple(said)
