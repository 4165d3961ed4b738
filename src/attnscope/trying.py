"""``attnscope explain --try``: measure the attention of a trace on this machine, and say what it would change.

Reads an Explanation, runs :mod:`attnscope.sweeping` on the workloads of its call sites, writes a Trial. Imports no
torch itself. Times enter only where the trace's card is the one here; elsewhere ratios are all that carries over. An
implementation must have passed its check in every direction that the trace ran, since a forward of one and a backward
of another cannot be combined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from attnscope.explaining.explanation import CallSite, Explanation
from attnscope.explaining.trial import NotTried, Trial, TriedSite
from attnscope.planning import make_plan
from attnscope.progress import Watcher
from attnscope.records import Result, Run
from attnscope.reporting.words import verdict_between
from attnscope.sweeping import execute
from attnscope.units import format_ms, format_us, significant
from attnscope.workload import DIRECTIONS

MOST_TRIED = 8  # workloads, those that take longest
TOO_MANY = f"only the {MOST_TRIED} workloads that take longest are tried"
# What a trace's implementation is called -> ours that runs the same kernels; the first that begins it counts.
SAME = (
    ("SDPA flash on the CPU", "sdpa_flash"),
    ("SDPA flash", "sdpa_flash"),
    ("SDPA efficient", "sdpa_efficient"),
    ("SDPA cuDNN", "sdpa_cudnn"),
    ("SDPA math", "sdpa_math"),
)
STAND_IN = "naive"
NAIVE_STANDS_IN = f"{STAND_IN} stands for the attention that the traced code wrote out, which cannot be run here"


@dataclass
class Group:
    """Call sites of one workload that ran one implementation."""

    workload: str
    ran: str
    sites: list[CallSite] = field(default_factory=list)

    @property
    def calls(self) -> dict[str, int]:
        """Calls in the trace by direction."""
        counted = {d: sum(site.calls for site in self.sites if site.direction == d) for d in DIRECTIONS}
        return {direction: count for direction, count in counted.items() if count}

    @property
    def us(self) -> float:
        """What they took in the trace."""
        return sum(site.time_us for site in self.sites)


def try_explanation(
    explanation: Explanation,
    device: str | None = None,
    *,
    implementations: str = "all",
    quick: bool = True,
    watcher: Watcher | None = None,
) -> Trial:
    """Measure the workloads of an explanation's call sites here, and judge.

    Args:
        explanation: of one trace.
        device: ``cpu`` or ``cuda``; by default the GPU if there is one.
        implementations: names separated by commas, or ``all`` (without the ladder).
        quick: fewer samples and no sustained blocks, as ``attnscope compare --quick``.
        watcher: is told how far it is.

    Raises:
        UsageError: an argument is not what it must be.
        DeviceError: no such device, torch is missing, or a workload does not fit into its memory.
    """
    groups, not_tried = grouped(explanation.sites)
    runs: list[Run] = []
    for mode in ("forward", "both"):
        wanted = dict.fromkeys(g.workload for g in groups if ("backward" in g.calls) == (mode == "both"))
        if wanted and not (runs and runs[-1].interrupted):
            plan = make_plan(list(wanted), implementations, mode, device, ("measure",), quick=quick)
            runs.append(execute(plan, watcher))
    return judge(explanation, groups, not_tried, runs)


def grouped(sites: Iterable[CallSite]) -> tuple[list[Group], list[NotTried]]:
    """What to try, the longest first, and what not with the reason."""
    groups: dict[tuple[str, str], Group] = {}
    left: list[tuple[CallSite, str]] = []
    for site in sites:
        if site.workload is None:
            left.append((site, site.no_workload or "it is no workload"))
        else:
            key = (site.workload, site.implementation)
            groups.setdefault(key, Group(*key)).sites.append(site)
    ordered = sorted(groups.values(), key=lambda group: -group.us)
    tried = set(list(dict.fromkeys(group.workload for group in ordered))[:MOST_TRIED])
    left += [(site, TOO_MANY) for group in ordered if group.workload not in tried for site in group.sites]
    return [group for group in ordered if group.workload in tried], [_not_tried(site, reason) for site, reason in left]


def judge(
    explanation: Explanation, groups: Sequence[Group], not_tried: Sequence[NotTried], runs: Sequence[Run]
) -> Trial:
    """The Trial: pure arithmetic over what was measured."""
    window = explanation.window
    same_card, sentence = _cards(explanation, runs[0] if runs else None)
    tried: list[TriedSite] = []
    left = list(not_tried)
    for group in groups:
        results = [r for run in runs for r in run.results if r.workload == group.workload]
        one = _tried(group, results, same_card, _same_here(group, results, same_card, runs[0], window.on_gpu))
        if one is None:
            reason = "nothing that was run here passed its check in every direction that the trace ran"
            left += [_not_tried(site, f"{reason}{_failures(results)}") for site in group.sites]
        else:
            tried.append(one)
    before = after = None
    arithmetic = ""
    known = [one for one in tried if one.after_us is not None]
    if same_card and known:
        taken, left_us = sum(one.trace_us for one in known), sum(one.after_us or 0.0 for one in known)
        before, after = window.sum_us, window.sum_us - taken + left_us
        arithmetic = f"{format_us(before)} - {format_us(taken)} of the calls tried + {format_us(left_us)}"
    weighed = [one for one in tried if one.ratio is not None]
    weight = sum(one.trace_us for one in weighed)
    return Trial(
        trace=explanation.trace,
        card=window.card if window.on_gpu else None,
        here=str(runs[0].device) if runs else "nothing was measured here",
        torch=runs[0].environment.packages.get("torch") if runs else None,
        same_card=same_card,
        card_sentence=sentence,
        steps=window.steps,
        attention_us=window.attention_us,
        before_us=before,
        after_us=after,
        ratio=sum((one.ratio or 0.0) * one.trace_us for one in weighed) / weight if weight else None,
        arithmetic=arithmetic,
        tried=tuple(tried),
        not_tried=tuple(sorted(left, key=lambda one: -one.time_us)),
        interrupted=any(run.interrupted for run in runs),
    )


def _not_tried(site: CallSite, reason: str) -> NotTried:
    return NotTried(site.module or site.name, site.problem, site.direction, site.time_us, reason)


def _cards(explanation: Explanation, run: Run | None) -> tuple[bool, str]:
    """Whether the trace's card is the one here, and the sentence that says so."""
    window = explanation.window
    if run is None:
        return False, "nothing could be tried"
    here = run.device
    if not window.on_gpu:
        return False, "the trace does not say which CPU it comes from, so ratios are given, not times"
    if here.kind != "cuda":
        return False, (
            f"the trace comes from a GPU ({window.card or 'unnamed'}), this is a CPU, which says nothing of that card"
        )
    if window.card != here.name:
        return False, f"the trace comes from another card ({window.card or 'unnamed'}), so ratios are given, not times"
    recorded = next((one for one in window.versions if one.startswith("torch ")), None)
    torch = run.environment.packages.get("torch")
    other = f", recorded with {recorded}" if recorded not in (None, f"torch {torch}") else ""
    return True, f"the trace comes from such a card{other}"


# --- one group --------------------------------------------------------------------------------------------------------


def _same_here(group: Group, results: Sequence[Result], same_card: bool, run: Run, on_gpu: bool) -> str | None:
    """Ours that runs what the trace ran; None where nothing here does, as on another kind of device."""
    if on_gpu != (run.device.kind == "cuda") or ("AOTriton" in group.ran and not same_card):
        return None
    same = next((ours for begin, ours in SAME if group.ran.startswith(begin)), None)
    if same is None and "unfused" in group.ran and not same_card:
        same = STAND_IN
    return same if any(result.implementation == same for result in results) else None


def _tried(group: Group, results: Sequence[Result], same_card: bool, same: str | None) -> TriedSite | None:
    """The group's row; None where nothing right was measured in all its directions."""
    calls = group.calls
    able = {r.implementation: r for r in results if r.status == "ok" and r.comparable and _costs(r, calls) is not None}
    if not able:
        return None
    assumed = list(dict.fromkeys(said for site in group.sites for said in site.assumed))
    same = same if same in able else None
    if same == STAND_IN:
        assumed.append(NAIVE_STANDS_IN)
    if "forward" not in calls:
        assumed.append("its forward is not in the trace: judged by the backward alone")
    if "backward" in calls and any("bias=" in site.workload for site in group.sites if site.workload):
        assumed.append("its additive mask gets a gradient here")
    best = min(able, key=lambda name: _costs(able[name], calls) or 0.0)
    if same is not None and not _is_faster(results, calls, best, same):
        best = same
    fastest_ms, same_ms = _times(able[best], calls), _times(able[same], calls) if same else {}
    ratio = (_costs(able[best], calls) or 0.0) / (_costs(able[same], calls) or 1.0) if same else None
    row = TriedSite(
        workload=group.workload,
        sites=tuple(dict.fromkeys(site.module or site.name for site in group.sites)),
        ran=group.ran,
        calls=calls,
        trace_us=group.us,
        fastest=best,
        fastest_ms=fastest_ms,
        same_here=same,
        same_ms=same_ms,
        ratio=ratio,
        after_us=None,
        arithmetic="",
        assumed=tuple(assumed),
        left_out=tuple(
            f"{r.implementation}: {_why_left_out(r)}" for r in results if r.status in ("check_failed", "failed")
        ),
    )
    return _with_times(row, _costs(able[best], calls) or 0.0, _costs(able[same], calls) if same else None, same_card)


def _with_times(row: TriedSite, best_ms: float, same_ms: float | None, same_card: bool) -> TriedSite:
    """The row with its arithmetic. Where ours that ran in the trace was measured too, the ratio of the two measured
    alike carries over; else the measured times themselves, which include what a call costs with a cold cache."""
    parts = _parts(row.calls, row.fastest_ms)
    if same_ms is not None:
        if row.fastest == row.same_here:
            return replace(row, after_us=row.trace_us if same_card else None, arithmetic="× 1")
        quotient = f"({parts}) / ({_parts(row.calls, row.same_ms)})"
        if not same_card:
            return replace(row, arithmetic=f"{quotient} = × {significant(best_ms / same_ms)}, here")
        after = row.trace_us * best_ms / same_ms
        return replace(row, after_us=after, arithmetic=f"{format_us(row.trace_us)} × {quotient} = {format_us(after)}")
    if not same_card:
        return replace(row, arithmetic="what the trace ran is not measured here, so there is nothing to set it against")
    after = 1e3 * best_ms
    if after < row.trace_us:
        return replace(row, after_us=after, arithmetic=f"{parts} = {format_us(after)}")
    return replace(
        row, fastest=None, fastest_ms={}, after_us=row.trace_us, ratio=None,
        arithmetic=f"the fastest here, {row.fastest}, takes {parts} = {format_us(after)}: what ran stays",
    )  # fmt: skip


def _parts(calls: dict[str, int], times_ms: dict[str, float]) -> str:
    return " + ".join(f"{calls[direction]} × {format_ms(ms)}" for direction, ms in times_ms.items())


def _times(result: Result, calls: dict[str, int]) -> dict[str, float]:
    return {d: m.time_ms_median for d in calls if (m := result.measurement(d)) is not None}


def _costs(result: Result, calls: dict[str, int]) -> float | None:
    """What the calls would take, in ms; None where a direction was not measured."""
    times = _times(result, calls)
    return sum(calls[d] * ms for d, ms in times.items()) if len(times) == len(calls) else None


def _is_faster(results: Sequence[Result], calls: dict[str, int], best: str, same: str) -> bool:
    """Whether it is beyond doubt in a direction at least; a tie is none."""
    return best != same and any(_is_faster_in(results, direction, best, same) for direction in calls)


def _is_faster_in(results: Sequence[Result], direction: str, best: str, same: str) -> bool:
    """By their verdict; where they were not paired, by samples that hardly overlap."""
    verdict = verdict_between(results, direction, best, same)
    if verdict is not None:
        return verdict.word == "faster"
    first, second = (_by_name(results, name).measurement(direction) for name in (best, same))
    return first is not None and second is not None and first.time_ms_p80 < second.time_ms_p20


def _by_name(results: Sequence[Result], name: str) -> Result:
    return next(result for result in results if result.implementation == name)


def _why_left_out(result: Result) -> str:
    if result.status == "check_failed":
        return "failed its check"
    return (result.error or "failed").splitlines()[0]


def _failures(results: Sequence[Result]) -> str:
    said = [f"{r.implementation}: {_why_left_out(r)}" for r in results if r.status in ("check_failed", "failed")]
    skipped = [reason for r in results if r.status == "skipped" for reasons in r.reasons.values() for reason in reasons]
    return f" ({'; '.join(said[:3] or list(dict.fromkeys(skipped))[:2])})" if said or skipped else ""
