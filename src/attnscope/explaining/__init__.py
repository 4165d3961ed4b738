"""Stage 6, explaining: pure functions from a trace's events to what they say.

``explain_profile`` explains one profiled call of ours: reads a Trace and a Workload, writes Profile, KernelEvent and
Finding records. ``explain_trace`` explains a whole trace, whoever recorded it: writes an Explanation. Imports
neither torch nor an implementation.
"""

from __future__ import annotations

from dataclasses import replace

from attnscope.device import Device
from attnscope.explaining.call import find_call
from attnscope.explaining.expected import expected_sentences, expected_steps, surprises
from attnscope.explaining.figures import make_profile
from attnscope.explaining.rules import find_all
from attnscope.explaining.whole import compare_traces, explain_trace
from attnscope.records import Finding, KernelEvent, Profile
from attnscope.trace.events import Trace
from attnscope.workload import Workload

__all__ = ["compare_traces", "explain_profile", "explain_trace"]


def explain_profile(
    trace: Trace,
    *,
    workload: Workload,
    implementation: str,
    direction: str,
    device: Device | None = None,
    label: str | None = None,
    trace_name: str | None = None,
    host_us: float | None = None,
) -> tuple[Profile, tuple[KernelEvent, ...], tuple[Finding, ...]]:
    """What one profiled direction did: its figures, the kernels (on a CPU the ops) of one call in order, its findings.

    Args:
        trace: a trace that ``attnscope.profiling`` recorded.
        workload: the workload that ran.
        implementation: its name; what one expects of it goes by this name.
        direction: ``forward`` or ``backward``.
        device: the device, for its name; the trace's own is used where this is None.
        label: the steps' label; by default the one of ours in the trace.
        trace_name: what ``Profile.trace`` shall say.
        host_us: host time of one call in µs, measured without the profiler, which slows the host several times; without
            it nothing is said of who waits for whom.

    Raises:
        TraceError: the trace holds no labelled step.
    """
    call = replace(find_call(trace, workload, implementation, direction, label), measured_host_us=host_us)
    steps = expected_steps(workload, implementation, direction)
    profile = make_profile(call, expected_sentences(steps), surprises(call, steps), trace_name)
    return profile, tuple(seen.event for seen in call.seen), find_all(call, device)
