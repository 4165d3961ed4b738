"""Stage 7: the cells and sentences that every view of a run shares.

Reads Run, Result, Measurement, Limits, Profile, KernelEvent, Finding; writes nothing. Must import neither torch nor a
stage, nor rich or jinja2: what is said is decided here, how it looks in the views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from attnscope.records import (
    MEASURED_STATUSES,
    CheckResult,
    Finding,
    KernelEvent,
    Measurement,
    OpTime,
    Result,
    TensorCheck,
    Verdict,
)
from attnscope.units import MISSING, format_ms, format_us, significant

DIRECTIONS = ("forward", "backward")
TERM_PHRASES = {
    "matrix": "matrix products",
    "exponentials": "exponentials",
    "bandwidth": "read bandwidth",
    "launch": "the launch floor",
}
TIES = {"same": "the same as", "too close to call": "too close to call against"}
TIES_NAMED = 3
# A GPU's figures; on a CPU the same column says what is counted there.
KERNEL_WORDS = {"cuda": "kernels", "cpu": "ops"}


@dataclass(frozen=True)
class Column:
    """One column of the full table: its title, what it says, and the cell of a measurement."""

    title: str
    meaning: str
    cell: Callable[[Measurement], str]


def _spread(m: Measurement) -> str:
    return f"{format_ms(m.time_ms_p20)} – {format_ms(m.time_ms_p80)}"


def _unit(name: str, unit: str, factor: float = 1.0, digits: int = 3) -> Callable[[Measurement], str]:
    def cell(m: Measurement) -> str:
        value = getattr(m, name)
        return MISSING if value is None else f"{significant(value * factor, digits)} {unit}".rstrip()

    return cell


def _time(name: str, to_ms: float = 1.0) -> Callable[[Measurement], str]:
    def cell(m: Measurement) -> str:
        value = getattr(m, name)
        return format_ms(None if value is None else value * to_ms)

    return cell


def _graph(m: Measurement) -> str:
    return format_ms(m.graph_ms_median) + (" warm" if m.graph_ms_median is not None and m.graph_is_warm else "")


COLUMNS: tuple[Column, ...] = (
    Column("time", "isolated: median of single calls, cold cache", _time("time_ms_median")),
    Column("noise", "half the spread of the samples over their median", lambda m: format_noise(m.noise_fraction)),
    Column("p20 – p80", "the middle 60 % of the samples", _spread),
    Column("sustained", "mean call time of one-second blocks", _time("sustained_ms_median")),
    Column("vs limit", "limit time / time; 1 is what this device can do", lambda m: format_ratio(m.vs_limit)),
    Column("TFLOP/s", "useful floating-point operations", _unit("tflop_per_s", "")),
    Column("GB/s", "unique bytes read and written", _unit("gb_per_s", "")),
    Column("energy", "joules per call, sustained", _unit("joules_per_call", "mJ", 1e3)),
    Column("power", "mean power, sustained", _unit("power_w", "W")),
    Column("host", "time the host needs to launch one call", _time("wall_us_median", 1e-3)),
    Column("graph", "one replay of a CUDA graph", _graph),
    Column("memory", "peak device memory of one call", _unit("peak_memory_mib", "MiB")),
    Column("workspace", "scratch memory held from preparing on", _unit("workspace_mib", "MiB")),
    Column("first call", "the first call after preparing", _time("first_call_ms")),
    Column("prepare", "compiling, planning, tuning", _time("prepare_s", 1e3)),
    Column("SM clock", "median while measuring", _unit("sm_clock_mhz", "MHz", digits=4)),
    Column("temp.", "temperature while measuring", _unit("temperature_c", "°C")),
    Column("throttled", "why the card slowed itself", lambda m: ", ".join(m.throttle_reasons) or MISSING),
    Column("threads", "CPU threads", lambda m: MISSING if m.threads is None else str(m.threads)),
    Column("samples", "isolated samples", lambda m: str(m.samples)),
)


def columns_of(results: Sequence[Result], direction: str) -> list[Column]:
    """The columns that hold at least one figure for these results."""
    measured = [m for r in results if (m := r.measurement(direction))]
    return [column for column in COLUMNS if any(column.cell(m) != MISSING for m in measured)]


# --- one result -------------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """``text`` on one line without control characters: a kernel's name must not move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def shorten(text: str, width: int) -> str:
    """``text`` with its middle replaced by an ellipsis where it is longer than ``width``."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 6
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def kernel_title(name: str, width: int) -> str:
    """A kernel's name without the namespaces that every name carries, at most ``width`` long."""
    short = clean(name).removeprefix("void ")
    for noise in ("at::native::", "(anonymous namespace)::"):
        short = short.replace(noise, "")
    return shorten(short, width)


def format_noise(fraction: float) -> str:
    """A noise fraction as ``±1%``; below 1 % with one decimal, rounded up, so that it is never shown as none."""
    percent = fraction * 100
    return f"±{math.ceil(percent * 10) / 10:.1f}%" if percent < 0.95 else f"±{significant(percent, 1)}%"


def format_ratio(value: float | None) -> str:
    """A ratio to the limit with two decimals."""
    if value is None:
        return MISSING
    return "<0.01" if 0 < value < 0.005 else f"{value:.2f}"


def format_count(value: float | None) -> str:
    """A count, which per call may be a fraction."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"


def format_error(value: float | None) -> str:
    """A relative error, which may be not finite."""
    if value is None:
        return MISSING
    return f"{value:.1e}" if math.isfinite(value) else "not finite"


def display_name(result: Result) -> str:
    """The implementation's name; ours says so."""
    return clean(result.implementation) + (" (ours)" if result.ours else "")


def status_word(result: Result) -> str:
    """ok, loose ×2.3, approx. ×12, wrong, failed, skipped."""
    if result.status == "check_failed":
        return "wrong"
    if result.status not in MEASURED_STATUSES or result.check is None:
        return result.status
    factor = result.check.factor
    times = f" ×{significant(factor, 2)}" if factor is not None and math.isfinite(factor) else ""
    if result.status == "approximate" or result.check.grade == "approximate":
        return f"approx.{times}"
    return f"loose{times}" if result.check.grade == "loose" else "ok"


def error_ratio(tensor: TensorCheck) -> float | None:
    """Error over budget; None where either is missing or the error is not finite."""
    if tensor.row_rel_error_max is None or not tensor.error_budget or not math.isfinite(tensor.row_rel_error_max):
        return None
    return tensor.row_rel_error_max / tensor.error_budget


def nearest_tensor(check: CheckResult) -> str:
    """The tensor and input kind that stand nearest their budget (or furthest above it)."""
    ratios = [(ratio, t) for t in check.tensors if (ratio := error_ratio(t)) is not None]
    if not ratios:
        return MISSING
    worst = max(ratios, key=lambda pair: pair[0])[1]
    return f"{clean(worst.tensor)}, {clean(worst.kind)}"


def kernels_per_call(result: Result, direction: str) -> float | None:
    """Kernels of one call (on a CPU: ops), as profiled; None where it was not profiled."""
    for profile in result.profiles:
        if profile.direction == direction:
            return profile.kernels_per_call if profile.kernels_per_call else profile.cpu_ops_per_call
    events = kernels_of(result, direction)
    return float(len(events)) if events else None


def by_gpu_time(row: OpTime) -> tuple[float, float]:
    """Sort key of the profiler's table: the largest own GPU time first, then the largest own CPU time."""
    return -row.self_gpu_us, -row.self_cpu_us


def kernels_of(result: Result, direction: str) -> list[KernelEvent]:
    """The profiled kernels of one direction, in order."""
    return [event for event in result.kernels if event.direction == direction]


def overlap_sentence(findings: Iterable[Finding]) -> str | None:
    """What must stand under findings of which two or more name a saving."""
    saving = [finding for finding in findings if finding.saving_us]
    return "Savings overlap: they must not be added." if len(saving) > 1 else None


def finding_sentence(finding: Finding) -> str:
    """Who, what, and the saving, as one sentence."""
    who = " ".join(filter(None, (finding.implementation, finding.direction)))
    saving = "" if finding.saving_us is None else f" (saves {format_us(finding.saving_us)} a call)"
    return clean(f"{who}: {finding.sentence.rstrip('.')}{saving}.")


# --- a workload's results ---------------------------------------------------------------------------------------------


def was_run(result: Result) -> bool:
    """Whether the result belongs into the table (a skipped one is told below it)."""
    return result.status != "skipped"


def limit_of(results: Iterable[Result], direction: str) -> tuple[float, str] | None:
    """The limit time in ms of a workload's direction, and the term that binds."""
    for result in results:
        m = result.measurement(direction)
        if m is not None and m.limit_ms is not None and m.limit_term is not None:
            return m.limit_ms, m.limit_term
    return None


def limit_sentence(results: Sequence[Result], direction: str) -> str | None:
    """What this device could do for the workload, and what binds."""
    found = limit_of(results, direction)
    return found and f"{direction} {format_ms(found[0])}, bound by {TERM_PHRASES[found[1]]}"


def ranked(results: Iterable[Result], direction: str) -> list[Result]:
    """Those that are right, comparable and timed, fastest first. Approximate ones are never ranked."""
    able = [r for r in results if r.status == "ok" and r.comparable and r.measurement(direction)]
    return sorted(able, key=lambda r: _time_ms(r, direction))


def verdict_between(results: Iterable[Result], direction: str, first: str, second: str) -> Verdict | None:
    """The verdict of ``first`` against ``second``, turned round where it was recorded the other way."""
    turned = None
    for verdict in (v for r in results for v in r.verdicts if v.direction == direction):
        if (verdict.implementation, verdict.rival) == (first, second):
            return verdict
        if (verdict.implementation, verdict.rival) == (second, first):
            turned = _turn(verdict)
    return turned


def _turn(v: Verdict) -> Verdict:
    words = {"faster": "slower", "slower": "faster"}
    return replace(
        v,
        implementation=v.rival,
        rival=v.implementation,
        word=words.get(v.word, v.word),
        ratio=1 / v.ratio,
        ratio_low=1 / v.ratio_high,
        ratio_high=1 / v.ratio_low,
        sustained_ratio=None if v.sustained_ratio is None else 1 / v.sustained_ratio,
    )


def fastest_sentence(results: Sequence[Result], direction: str) -> str | None:
    """Who is fastest and right in a direction, how sure that is, and how far from the limit; None if nobody ran."""
    order = ranked(results, direction)
    if not order:
        return None
    best = order[0]
    said = f"{display_name(best)}, {format_ms(_time_ms(best, direction))}"
    tied: dict[str, list[str]] = {}
    beaten = None
    for rival in order[1:]:
        verdict = verdict_between(results, direction, best.implementation, rival.implementation)
        if verdict is not None and verdict.word in TIES:
            named = f"{display_name(rival)} ({format_ms(_time_ms(rival, direction))})"
            tied.setdefault(verdict.word, []).append(named)
        elif beaten is None:
            beaten = (rival, verdict)
    for word, rivals in tied.items():
        more = f" and {len(rivals) - TIES_NAMED} more" if len(rivals) > TIES_NAMED else ""
        said += f"; {TIES[word]} {', '.join(rivals[:TIES_NAMED])}{more}"
    if beaten is not None:
        said += "; " + _against(_time_ms(best, direction), beaten[0], beaten[1], direction)
    vs_limit = _measured(best, direction).vs_limit
    return said + (f"; {format_ratio(vs_limit)} of the limit" if vs_limit is not None else "")


def _against(best_ms: float, rival: Result, verdict: Verdict | None, direction: str) -> str:
    rival_ms = _time_ms(rival, direction)
    if verdict is None:
        return f"next is {display_name(rival)} at {format_ms(rival_ms)} (no verdict)"
    ratio = significant(1 / verdict.ratio if verdict.word == "faster" else verdict.ratio, 3)
    if verdict.word in ("faster", "slower"):
        return f"{verdict.word} than {display_name(rival)} ×{ratio}"
    return f"{verdict.word}: {display_name(rival)} at {significant(rival_ms / best_ms)}×"


def skipped_lines(results: Iterable[Result]) -> list[tuple[str, str]]:
    """(names, reasons) of what did not run, entries with the same reasons in one line.

    A name carries its direction where only one direction did not run.
    """
    grouped: dict[str, list[str]] = {}
    for result in results:
        said = {d: clean("; ".join(reasons)) for d, reasons in result.reasons.items() if reasons}
        whole = result.status == "skipped" and len(set(said.values())) == 1
        for direction, why in list(said.items())[: 1 if whole else None]:
            name = display_name(result) + ("" if whole else f" ({direction})")
            grouped.setdefault(why, []).append(name)
    return [(", ".join(names), why) for why, names in grouped.items()]


def wrong_lines(results: Iterable[Result]) -> list[tuple[str, str]]:
    """(name, what was wrong) of those whose check failed."""
    return [(display_name(r), clean(_check_message(r))) for r in results if r.status == "check_failed"]


def failed_lines(results: Iterable[Result]) -> list[tuple[str, str]]:
    """(name, what went wrong) of those that raised, hung or ran out of memory."""
    return [(display_name(r), clean(r.error or MISSING)) for r in results if r.status == "failed"]


def _check_message(result: Result) -> str:
    if result.check is None:
        return result.error or "its check failed"
    if result.check.message:
        return result.check.message
    wrong = next((t for t in result.check.tensors if not t.passed), None)
    if wrong is None:
        return result.error or "its check failed"
    return wrong.message or (
        f"{wrong.tensor} on {wrong.kind} inputs: error {format_error(wrong.row_rel_error_max)}, "
        f"allowed {format_error(wrong.error_budget)}"
    )


def note_lines(results: Iterable[Result]) -> list[tuple[str, str]]:
    """(name, what to know): what really ran behind a name, notes, rows that do other work."""
    lines = []
    for r in results:
        if r.ran and r.ran != r.implementation:
            lines.append((display_name(r), f"ran {clean(r.ran)}"))
        if r.note:
            lines.append((display_name(r), clean(r.note)))
        if not r.comparable:
            lines.append((display_name(r), "not comparable: it leaves out a part of the work"))
    return lines


def findings_of(results: Iterable[Result]) -> list[Finding]:
    """Every finding of these results, the largest saving first; those that name none last. Same sentence, once."""
    found: dict[tuple[str | None, str | None, str], Finding] = {}
    for result in results:
        for finding in result.findings:
            named = replace(finding, implementation=finding.implementation or result.implementation)
            found.setdefault((named.implementation, named.direction, named.sentence), named)
    return sorted(found.values(), key=lambda f: -(f.saving_us or 0.0))


def top_findings(results: Iterable[Result], count: int) -> list[Finding]:
    """The ``count`` findings that matter most, each rule once before any rule comes twice."""
    once: dict[str, Finding] = {}
    again = []
    for finding in findings_of(results):
        if finding.id in once:
            again.append(finding)
        else:
            once[finding.id] = finding
    return [*once.values(), *again][:count]


def _measured(result: Result, direction: str) -> Measurement:
    found = result.measurement(direction)
    if found is None:
        raise ValueError(f"{result.implementation} has no {direction} time")
    return found


def _time_ms(result: Result, direction: str) -> float:
    return _measured(result, direction).time_ms_median
