"""Stage 6: what the rules on a whole trace read, and how they word evidence and savings.

Reads a Trace, its work and its call sites; writes nothing. Pure; imports neither torch nor an implementation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from attnscope.explaining.expected import short_name
from attnscope.explaining.explanation import Window
from attnscope.explaining.peaks import Peaks
from attnscope.explaining.shapes import tensor_dtypes
from attnscope.explaining.sites import AttentionCall, Site
from attnscope.explaining.works import Sequence, Work
from attnscope.records import Finding
from attnscope.trace.events import DeviceProperties, Trace
from attnscope.trace.names import readable_name
from attnscope.units import format_us, significant

FUSED_SHARE_OF_PEAK = 0.5  # what a good fused kernel reaches of the data sheet's rate, for estimates
SHORTEST_CALL_US = 5.0
EXPONENTIALS_PER_CLOCK = 16  # of one multiprocessor
CLOCK_GHZ = 1.4
EVIDENCE_LINES = 5
BACKWARD = re.compile(r"[bB]ackward|autograd::engine")
AMD_KEYS = ("hip_runtime_version", "roctracer_version", "rocprofiler-sdk_version")


@dataclass
class TraceFacts:
    """The trace, its work in sequences, its call sites, its window, and the card's rates where known."""

    trace: Trace
    sequences: list[Sequence]
    sites: list[Site]
    window: Window
    peaks: Peaks | None

    @cached_property
    def works(self) -> list[Work]:
        """All work."""
        return [work for sequence in self.sequences for work in sequence]

    @cached_property
    def attention(self) -> list[Work]:
        """The work that is attention."""
        return [work for site in self.sites for work in site.works]

    @cached_property
    def has_backward(self) -> bool:
        """Whether gradients were computed in the trace."""
        return any(BACKWARD.search(name) for name in {op.name for op in self.trace.ops})

    @cached_property
    def device(self) -> DeviceProperties | None:
        """The card that worked."""
        index = next((e.device for e in self.trace.device_events if e.device is not None), None)
        return self.trace.device(index)

    @cached_property
    def is_amd(self) -> bool:
        """Whether the trace comes from an AMD card."""
        named = any("AMD" in device.name or device.warp_size == 64 for device in self.trace.devices)
        return named or any(key in self.trace.meta for key in AMD_KEYS)

    @cached_property
    def _places(self) -> dict[int, tuple[Sequence, int]]:
        return {id(work): (sequence, at) for sequence in self.sequences for at, work in enumerate(sequence)}

    def before(self, call: AttentionCall, reach: int) -> list[Work]:
        """What the same thread launched just before a call, the nearest first, up to the next attention."""
        sequence, at = self._places[id(call.works[0])]
        found = []
        for work in reversed(sequence[max(at - reach, 0) : at]):
            if work.in_attention:
                break
            found.append(work)
        return found

    def after(self, call: AttentionCall, reach: int) -> list[Work]:
        """What the same thread launched just after a call, up to the next attention."""
        sequence, at = self._places[id(call.works[-1])]
        found = []
        for work in sequence[at + 1 : at + 1 + reach]:
            if work.in_attention:
                break
            found.append(work)
        return found

    def fused_us(self, call: AttentionCall) -> float | None:
        """About what a good fused kernel would take for a call; None where sizes or rates are not known."""
        problem = call.problem
        flops, moved = problem.flops(call.direction), problem.least_bytes()
        if self.peaks is None or flops is None or moved is None or problem.pairs is None:
            return None
        half = problem.dtype in ("bf16", "fp16")
        rate = self.peaks.half_tflop_per_s if half else self.peaks.fp32_tflop_per_s
        times = [SHORTEST_CALL_US, flops / (FUSED_SHARE_OF_PEAK * rate) / 1e6, moved / self.peaks.gb_per_s / 1e3]
        if self.device is not None and self.device.num_sms:
            times.append(problem.pairs / (self.device.num_sms * EXPONENTIALS_PER_CLOCK * CLOCK_GHZ) / 1e3)
        return max(times)

    def fused_saving(self, sites: Iterable[Site]) -> tuple[float | None, str]:
        """What fusing these sites would save, with its arithmetic."""
        saving, parts = 0.0, []
        for site in sites:
            each = self.fused_us(site.first)
            if each is None:
                continue
            after = each * len(site.calls)
            saving += max(site.us - after, 0.0)
            parts.append(f"{format_us(site.us)} - {len(site.calls)} × {format_us(each)}")
        if not parts:
            missing = "the shapes" if self.peaks else "this card's rates"
            return None, f"not estimated: {missing} are not known"
        if not saving:
            return None, "none: a fused call at half of the data sheet's rate would take as long"
        return saving, (
            f"{'; '.join(parts[:3])}{'; …' if len(parts) > 3 else ''}: a fused call at "
            f"{100 * FUSED_SHARE_OF_PEAK:.0f} % of the data sheet's rate, at least its traffic, its exponentials and "
            f"{format_us(SHORTEST_CALL_US)} ({self.peaks.source if self.peaks else ''})"
        )


TraceRule = Callable[[TraceFacts], Finding | None]


def total(works: Iterable[Work]) -> float:
    """Time of the works together, in microseconds."""
    return sum(work.us for work in works)


def evidence(works: Iterable[Work]) -> tuple[str, ...]:
    """Name by name, the longest first: how often, how long, launched by which op."""
    groups: dict[tuple[str, str | None], list[Work]] = {}
    for work in works:
        groups.setdefault((work.name, work.ops[0].name if work.ops and not work.replayed else None), []).append(work)
    ordered = sorted(groups.items(), key=lambda item: -total(item[1]))
    lines = [
        f"{len(ones)} × {short_name(readable_name(name))}: {format_us(total(ones))}"
        + (f" in {op}" if op and op != name else "")
        for (name, op), ones in ordered[:EVIDENCE_LINES]
    ]
    rest = [work for _, ones in ordered[EVIDENCE_LINES:] for work in ones]
    return (*lines, f"{len(rest)} × others: {format_us(total(rest))}") if rest else tuple(lines)


def site_evidence(sites: Iterable[Site]) -> tuple[str, ...]:
    """Site by site: what, how often, how long."""
    lines = []
    for site in sites:
        first = site.first
        place = f" in {first.module}" if first.module else ""
        lines.append(f"{len(site.calls)} × {first.name} [{first.problem}]{place}: {format_us(site.us)}")
    more = len(lines) - EVIDENCE_LINES
    return (*lines[:EVIDENCE_LINES], f"and {more} call sites more") if more > 0 else tuple(lines)


def sum_text(works: list[Work], what: str) -> str:
    """The arithmetic of a saving that is a plain sum."""
    return f"{len(works)} × on average {format_us(total(works) / len(works))} = {format_us(total(works))}, {what}"


def is_cast(work: Work) -> tuple[str, str] | None:
    """(from, to) where a work copies one floating point dtype into another."""
    if work.role != "copy" or work.replayed:
        return None
    op = next((one for one in work.ops if one.name == "aten::copy_"), None)
    dtypes = tensor_dtypes(op)
    return (dtypes[1], dtypes[0]) if len(dtypes) == 2 and dtypes[0] != dtypes[1] else None


def percent(part: float, whole: float) -> str:
    """A share, for people."""
    return f"{significant(100 * part / whole, 2)} %" if whole > 0 else "0 %"
