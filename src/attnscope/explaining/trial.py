"""Stage 6: what trying a trace's attention on this machine says. Frozen, plain data, ready for JSON.

Written by ``attnscope.trying``, read by reporting. Imports neither torch nor an implementation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TriedSite:
    """Call sites of one workload and one implementation, their forward and backward together.

    ``calls`` are those in the trace by direction, ``trace_us`` what they took there. ``fastest`` is the implementation
    that passed its check and costs least for these calls; ``fastest_ms`` its time of a call by direction, here.
    ``same_here`` is ours that runs what the trace ran, ``same_ms`` its times here, None where nothing does.
    ``ratio`` is fastest over same, weighted by the calls. ``after_us`` is what the calls would take, only where the
    trace's card is the one here; ``arithmetic`` says how both came about.
    """

    workload: str
    sites: tuple[str, ...]
    ran: str
    calls: dict[str, int]
    trace_us: float
    fastest: str | None
    fastest_ms: dict[str, float]
    same_here: str | None
    same_ms: dict[str, float]
    ratio: float | None
    after_us: float | None
    arithmetic: str
    assumed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotTried:
    """A call site that was not measured, and why."""

    site: str
    problem: str
    direction: str
    time_us: float
    reason: str


@dataclass(frozen=True)
class Trial:
    """The whole: where it was measured, site by site, and what all of it would take.

    ``before_us`` and ``after_us`` are the GPU time of all that was traced (``steps`` profiler steps); None where the
    trace's card is not the one here, or nothing could be tried. Then ``ratio`` is what remains: that of the attention
    tried, weighted by its time in the trace.
    """

    trace: str
    card: str | None
    here: str
    torch: str | None
    same_card: bool
    card_sentence: str
    steps: int
    attention_us: float
    before_us: float | None
    after_us: float | None
    ratio: float | None
    arithmetic: str
    tried: tuple[TriedSite, ...]
    not_tried: tuple[NotTried, ...]
    interrupted: bool = False
