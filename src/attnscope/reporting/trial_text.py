"""Stage 7: what trying a trace's attention here said, as text for a terminal.

Reads a Trial, writes text of at most 80 columns. Must import neither torch nor a stage before explaining.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from attnscope.explaining.trial import Trial, TriedSite
from attnscope.reporting.explanation_text import WIDTH, share
from attnscope.reporting.words import clean
from attnscope.units import format_ms, format_us, significant

CALLS_ONLY = "GPU time of kernels; where the host is slower than the GPU, the step gains less"


def render_trial(trial: Trial) -> str:
    """The whole trial: where, site by site, what was not tried, what it comes to."""
    torch = f" with torch {trial.torch}" if trial.torch else ""
    lines = _wrapped(f"Tried on {clean(trial.here)}{torch}: {clean(trial.card_sentence)}", "")
    for one in trial.tried:
        lines += ["", *_site(one)]
    if trial.not_tried:
        lines += ["", "Not tried"]
        for left in trial.not_tried:
            where = f"{clean(left.site)} [{clean(left.problem)}] {left.direction}, {format_us(left.time_us)}"
            lines += _wrapped(where, "  ") + _wrapped(clean(left.reason), "    ")
    lines += ["", *(line for said in verdict(trial) for line in _wrapped(said, ""))]
    return "\n".join(lines) + "\n"


def verdict(trial: Trial) -> Iterator[str]:
    """What it comes to, in sentences."""
    if trial.interrupted:
        yield "interrupted: what was measured until then is above"
    tried_us = sum(one.trace_us for one in trial.tried)
    covers = f"{share(tried_us, trial.attention_us)} of the attention time was tried"
    if trial.before_us is not None and trial.after_us is not None:
        what = {0: "what was traced", 1: "this step"}.get(trial.steps, f"these {trial.steps} steps")
        yield f"{what} would take {format_us(trial.before_us)} → {format_us(trial.after_us)}"
        yield f"  {trial.arithmetic}; {covers}; {CALLS_ONLY}"
    elif trial.ratio is not None:
        yield f"the attention tried would take × {significant(trial.ratio)} of its time, here; {covers}"
    elif trial.tried:
        yield f"nothing that the trace ran could be measured here, so there is no ratio; {covers}"
    else:
        yield "nothing was tried"


def _site(one: TriedSite) -> Iterator[str]:
    calls = " + ".join(f"{count} {direction}" for direction, count in one.calls.items())
    yield from _wrapped(clean(one.workload), "  ")
    yield from _wrapped(f"in the trace: {calls} of {clean(one.ran)}, {format_us(one.trace_us)}", "    ")
    if one.fastest is not None:
        times = _times(one.fastest_ms)
        yield from _wrapped(f"fastest that passed its check: {clean(one.fastest)}, {times} a call", "    ")
    if one.same_here is not None and one.same_here != one.fastest:
        yield from _wrapped(f"what the trace ran, here: {one.same_here}, {_times(one.same_ms)} a call", "    ")
    if one.same_here is not None and one.same_here == one.fastest:
        yield from _wrapped("that is what the trace ran: nothing is faster here", "    ")
    else:
        yield from _wrapped(one.arithmetic, "    ")
    for said in one.assumed:
        yield from _wrapped(f"assumed: {clean(said)}", "    ")
    for said in one.left_out:
        yield from _wrapped(f"left out: {clean(said)}", "    ")


def _times(times: dict[str, float]) -> str:
    return ", ".join(f"{direction} {format_ms(ms)}" for direction, ms in times.items())


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )  # fmt: skip
