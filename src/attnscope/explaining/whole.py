"""Stage 6: the explanation of a whole trace, whoever recorded it.

Reads a Trace, writes an Explanation. Imports neither torch nor an implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnscope.explaining.explanation import CallSite, Difference, Explanation, SiteChange
from attnscope.explaining.peaks import Peaks, find_peaks
from attnscope.explaining.sites import Site, find_sites
from attnscope.explaining.trace_rules import TraceFacts, find_in_trace
from attnscope.explaining.window import card_name, make_window
from attnscope.explaining.workloads import Asked, workloads_of
from attnscope.explaining.works import all_work
from attnscope.trace.events import Trace
from attnscope.trace.names import readable_name
from attnscope.units import median

ENVIRONMENT = (
    "the file carries environment variables of the machine it was recorded on, perhaps with secrets; look before you "
    "share it (nothing of them is shown here)"
)
KERNELS_NAMED = 8


def explain_trace(trace: Trace, name: str = "trace") -> Explanation:
    """What a trace says of its attention. ``name`` is what the explanation calls it."""
    sequences = all_work(trace)
    sites = find_sites(sequences)
    window = make_window(trace, sequences)
    peaks = find_peaks(card_name(trace))
    findings = find_in_trace(TraceFacts(trace, sequences, sites, window, peaks))
    warnings = (ENVIRONMENT,) if trace.has_environment else ()
    told = tuple(call_site(site, peaks, asked) for site, asked in zip(sites, workloads_of(sites), strict=True))
    return Explanation(name, window, told, findings, warnings)


def call_site(site: Site, peaks: Peaks | None, asked: Asked) -> CallSite:
    """A site's figures. Work per second is that of the median call."""
    first, times = site.first, [call.us for call in site.calls]
    middle = median(times)
    unknown = first.how == "op" and first.problem.causal is None  # half of it or all of it: no figure
    flops = None if unknown else first.problem.flops(first.direction)
    rate = flops / middle / 1e6 if flops and middle > 0 else None
    peak = peak_rate(site, peaks)
    return CallSite(
        name=first.name,
        module=first.module,
        direction=first.direction,
        implementation=first.implementation,
        problem=str(first.problem),
        calls=len(site.calls),
        kernels_per_call=site.kernels_per_call,
        time_us=site.us,
        slowest_us=max(times),
        median_us=middle,
        tflop_per_s=rate,
        peak_fraction=rate / peak if rate and peak else None,
        peak_source=peaks.source if peaks and rate and peak else None,
        inferred=first.inferred,
        sizes=first.problem.folded,
        kernels=tuple(dict.fromkeys(readable_name(work.name) for work in first.works))[:KERNELS_NAMED],
        workload=asked.workload,
        assumed=asked.assumed,
        no_workload=asked.why_not,
    )


def peak_rate(site: Site, peaks: Peaks | None) -> float | None:
    """The card's dense rate for the site's dtype, in TFLOP/s."""
    if peaks is None or site.first.works[0].event is None:
        return None
    dtype = site.first.problem.dtype
    if dtype in ("bf16", "fp16"):
        return peaks.half_tflop_per_s
    if dtype == "fp32":
        uses_tf32 = any(work.meaning.unit == "tensor core" for work in site.works)
        return peaks.tf32_tflop_per_s if uses_tf32 else peaks.fp32_tflop_per_s
    return None


def compare_traces(before: Explanation, after: Explanation) -> Difference:
    """Call sites of two traces side by side: those of the same place or problem, then what only one of them has."""
    changes: list[SiteChange] = []
    left = list(after.sites)
    for site in before.sites:
        match = _match(site, left)
        if match is not None:
            left.remove(match)
        changes.append(SiteChange(site.module or site.name, site.problem, site, match))
    changes += [SiteChange(site.module or site.name, site.problem, None, site) for site in left]
    ids_before, ids_after = ({finding.id for finding in one.findings} for one in (before, after))
    return Difference(
        before, after, tuple(changes), tuple(sorted(ids_before - ids_after)), tuple(sorted(ids_after - ids_before))
    )


def _match(site: CallSite, others: Sequence[CallSite]) -> CallSite | None:
    """The same place, or the same problem: what ran there may have changed, so its name says nothing."""
    agreements: tuple[Callable[[CallSite], bool], ...] = (
        lambda one: (one.module, one.problem) == (site.module, site.problem),
        lambda one: one.sizes is not None and one.sizes == site.sizes,
        lambda one: one.module is not None and one.module == site.module,
        lambda one: (one.name, one.implementation, one.problem) == (site.name, site.implementation, site.problem),
    )
    same = [one for one in others if one.direction == site.direction]
    return next((one for agrees in agreements for one in same if agrees(one)), None)
