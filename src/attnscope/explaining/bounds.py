"""Stage 6: an estimated saving never exceeds the time of what it is a saving of.

Reads and writes Finding. Pure; imports neither torch nor an implementation. A profiler slows the host, so what a trace
says of a CPU op includes the profiler's own work; times of overlapping streams add up to more than the clock shows.
"""

from __future__ import annotations

from dataclasses import replace

from attnscope.records import Finding
from attnscope.units import format_us, significant


def bounded(finding: Finding, limit_us: float, what: str) -> Finding:
    """The finding, its saving at most ``limit_us``; ``what`` ends the sentence that says so."""
    if finding.saving_us is None or finding.saving_us <= limit_us:
        return finding
    said = f"{finding.arithmetic}; no more than the {format_us(limit_us)} that {what}"
    return replace(finding, saving_us=limit_us, arithmetic=said)


def without_profiler(finding: Finding, traced_us: float, measured_us: float) -> Finding:
    """The saving of a traced call as a share of the same call measured without the profiler, where that is shorter."""
    if finding.saving_us is None or traced_us <= 0 or measured_us >= traced_us:
        return finding
    share = measured_us / traced_us
    return replace(
        finding,
        saving_us=finding.saving_us * share,
        arithmetic=f"({finding.arithmetic}) × {significant(share, 2)}: the call takes {format_us(measured_us)}, and "
        f"{format_us(traced_us)} under the profiler",
    )
