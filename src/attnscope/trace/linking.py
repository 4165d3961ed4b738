"""Stage 6: what belongs together: op in op, call in op, device event to its launch.

Reads and completes a Trace. Imports neither torch nor an implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from attnscope.trace.events import Op, RuntimeCall, Trace, launches

START = attrgetter("start_ns")
MOST_DEPTH = 200  # of nesting; what is deeper belongs to the op at this depth


@dataclass
class Flows:
    """The arrows that a trace draws from a call to what it launched, by their number: where each begins and ends.

    A place is a thread and a start in nanoseconds, which are those of the call and of the device event.
    """

    begins: dict[int, tuple[tuple[str, str], int]] = field(default_factory=dict)
    ends: dict[tuple[tuple[str, str], int], int] = field(default_factory=dict)


def nest(ops: list[Op], calls: list[RuntimeCall]) -> None:
    """Give every op the op around it and every runtime call its op, thread by thread, by one sweep over starts."""
    threads: dict[tuple[str, str], list[Op | RuntimeCall]] = {}
    everything: list[Op | RuntimeCall] = [*ops, *calls]
    for event in everything:
        found = threads.get(event.thread)
        if found is None:
            found = threads[event.thread] = []
        found.append(event)
    for events in threads.values():
        events.sort(key=START)  # stable: at equal starts the longer op stays outside, and ops outside runtime calls
        stack: list[Op] = []
        ends: list[int] = []
        for event in events:
            start, duration = event.start_ns, event.duration_ns
            end = start + (duration or 1)
            while ends and ends[-1] < end:
                ends.pop()
                stack.pop()
            if event.__class__ is RuntimeCall:
                event.op = stack[-1] if stack else None
                continue
            op: Op = event  # type: ignore[assignment]
            if stack:
                around = op.parent = stack[-1]
                around.children_ns += duration
                children = around.children
                if children:
                    children.append(op)  # type: ignore[attr-defined]  # a tuple is empty
                else:
                    around.children = [op]
            if len(stack) < MOST_DEPTH:
                stack.append(op)
                ends.append(start + duration)


def link(trace: Trace) -> None:
    """Give every device event its launch, by correlation."""
    launching = {name for name in {call.name for call in trace.runtime_calls} if launches(name)}
    by_correlation: dict[int, RuntimeCall] = {}
    for call in trace.runtime_calls:
        if call.correlation and (call.name in launching or call.correlation not in by_correlation):
            by_correlation[call.correlation] = call
    for event in trace.device_events:
        if event.correlation:
            event.launch = by_correlation.get(event.correlation)


def needs_flows(trace: Trace) -> bool:
    """Whether correlations are missing where flow events may stand in: on unlinked device events, or on all calls."""
    unlinked = [event for event in trace.device_events if event.launch is None]
    return any(not event.correlation for event in unlinked) or (
        bool(unlinked) and not any(call.correlation for call in trace.runtime_calls)
    )


def link_by_flows(trace: Trace, flows: Flows) -> None:
    """Give device events without a launch the call from which a flow leads to them."""
    calls = {(call.thread, call.start_ns): call for call in trace.runtime_calls if call.launches}
    for event in trace.device_events:
        if event.launch is None:
            number = flows.ends.get((event.thread, event.start_ns), event.correlation)
            begin = flows.begins.get(number) if number is not None else None
            call = calls.get(begin) if begin is not None else None
            if call is not None and call.start_ns <= event.end_ns:
                event.launch = call


def say_unlinked(trace: Trace) -> None:
    """Tell of device events that have no launch in the trace."""
    orphans = sum(1 for e in trace.device_events if e.launch is None)
    if orphans:
        trace.problems.append(f"{orphans} of {len(trace.device_events)} device events were launched before the trace")
