"""Stage 6: what a CUDA graph replays, back to the op that was captured, where the trace holds the capture as well.

Reads a Trace, writes launches. Pure; imports neither torch nor an implementation. A replayed kernel carries no word on
its op, and two graphs of the same model may differ in nothing but sizes, so a replay is linked to a capture only by the
scopes that ``attnscope.watch`` puts around both, which name the graph. Within them the kernels of a replay that ran on
one stream come in the order in which they were captured. Where counts or names do not agree, nothing is linked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from attnscope.trace.events import DeviceEvent, Op, RuntimeCall, Trace
from attnscope.trace.names import explain_name

CAPTURE = "attnscope: capture of CUDA graph "
REPLAY = "attnscope: replay of CUDA graph "
REPLAY_FROM_BEFORE = "attnscope: replay of a CUDA graph captured before the watch"
KERNEL_LAUNCH = re.compile(r"LaunchKernel|LaunchCooperative|ModuleLaunch")
ATTENTION_NAME = re.compile(r"attention|attn|flash|sdpa|mha", re.IGNORECASE)


def captured_launches(trace: Trace) -> dict[int, RuntimeCall]:
    """``id`` of each replayed device event whose capture is known -> the launch that was captured."""
    numbers = {name for op in trace.annotations if (name := op.name).startswith((CAPTURE, REPLAY))}
    if not numbers:
        return {}
    recorded = _recorded(trace)
    found: dict[int, RuntimeCall] = {}
    for number, events in _replays(trace):
        launches = recorded.get(number, [])
        for event, launch in _aligned(events, launches):
            found[id(event)] = launch
    return found


def replays_from_before(trace: Trace) -> int:
    """Replays of graphs that were captured before the watch began."""
    return sum(op.name == REPLAY_FROM_BEFORE for op in trace.annotations)


def has_capture(trace: Trace) -> bool:
    """Whether a watch saw a graph being captured."""
    return any(op.name.startswith(CAPTURE) for op in trace.annotations)


def _recorded(trace: Trace) -> dict[str, list[RuntimeCall]]:
    """Number of a graph -> what was launched into it, in order. What ran at once was not captured."""
    answered = {event.correlation for event in trace.device_events}
    recorded: dict[str, list[RuntimeCall]] = {}
    for call in trace.runtime_calls:
        if call.op is None or _kind(call) is None or call.correlation in answered:
            continue
        number = _number(call.op, CAPTURE)
        if number is not None:
            recorded.setdefault(number, []).append(call)
    return recorded


def _replays(trace: Trace) -> Iterable[tuple[str, list[DeviceEvent]]]:
    """(number of the graph, its events in order) of each labelled replay that ran on one stream."""
    by_launch: dict[int, list[DeviceEvent]] = {}
    for event in trace.device_events:
        if event.replayed and event.launch is not None:
            by_launch.setdefault(id(event.launch), []).append(event)
    for events in by_launch.values():
        launch = events[0].launch
        number = _number(launch.op, REPLAY) if launch is not None and launch.op is not None else None
        if number is not None and len({event.stream for event in events}) == 1:
            yield number, sorted(events, key=lambda event: event.start_ns)


def _number(op: Op, prefix: str) -> str | None:
    """The graph that the nearest such scope around an op names."""
    return next((o.name[len(prefix) :] for o in op.ancestors() if o.is_annotation and o.name.startswith(prefix)), None)


def _kind(call: RuntimeCall) -> str | None:
    """What a captured launch becomes when it is replayed."""
    if KERNEL_LAUNCH.search(call.name):
        return "kernel"
    return "memcpy" if "emcpy" in call.name else "memset" if "emset" in call.name else None


def _aligned(events: list[DeviceEvent], launches: list[RuntimeCall]) -> list[tuple[DeviceEvent, RuntimeCall]]:
    """Each event with its launch: all where kinds agree one by one, else the kernels alone, else none."""
    if [event.kind for event in events] != [_kind(launch) for launch in launches]:
        events = [event for event in events if event.kind == "kernel"]
        launches = [launch for launch in launches if _kind(launch) == "kernel"]
    pairs = list(zip(events, launches, strict=False))
    agree = len(events) == len(launches) and all(_agree(event, launch) for event, launch in pairs)
    return pairs if agree else []


def _agree(event: DeviceEvent, launch: RuntimeCall) -> bool:
    """Whether a kernel's name does not contradict the ops around its launch."""
    names = [op.name for op in launch.op.ancestors() if not op.is_annotation] if launch.op is not None else []
    generated = next((name for name in names if name.startswith("triton_")), None)
    if generated is not None and event.name.startswith("triton_"):
        return generated == event.name
    role = explain_name(event.name).role or ""
    return not role.startswith("fused attention") or any(ATTENTION_NAME.search(name) for name in names)
