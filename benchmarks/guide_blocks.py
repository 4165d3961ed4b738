"""The blocks of the guide and the README that figures.py writes: each a small view of one recorded run.

All but ``terminal`` are about the article's workload. A block is Markdown, or None where the run lacks what it needs.
Sentences that judge are made here from the numbers, so that they change with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnscope.errors import UsageError
from attnscope.limits import bytes_from_memory, matrix_rate
from attnscope.records import KernelEvent, Profile, Result, Run
from attnscope.reporting import words
from attnscope.reporting.text import render_run
from attnscope.trace import read_trace
from attnscope.units import MISSING, format_bytes, format_ms, format_us, significant
from attnscope.workload import Workload

DEFAULT_SHARED_LIMIT_BYTES = 48 * 1024
NAME_WIDTH = 110
SEEN_PERCENT = 0.5  # what is below shows as 0 % by rounding
HEAD_ENDS = ("findings", "note", "skipped")  # of a terminal's output: what the README leaves to the guide


@dataclass(frozen=True)
class Source:
    """What a block is made from: a run, the workload it is about, the article's figures, the run's traces if here."""

    run: Run
    workload: str
    article: dict[str, Any]
    traces: Path | None = None

    @property
    def results(self) -> list[Result]:
        return self.run.for_workload(self.workload)

    def result(self, name: str) -> Result | None:
        return next((r for r in self.results if r.implementation == name), None)

    def stated(self, name: str) -> dict[str, float]:
        return self.article["implementations"].get(name, {})


# --- what the terminal shows ------------------------------------------------------------------------------------------


def terminal(source: Source, workloads: Sequence[str], suite: str, *, head: bool) -> str:
    """The command and what it printed, in 80 columns; with ``head`` only the table, the limit and the fastest."""
    lines = render_run(replace(source.run, workloads=tuple(workloads)), width=80).splitlines()
    if head:
        end = next((at for at, line in enumerate(lines) if line.startswith(HEAD_ENDS)), len(lines))
        lines = [*lines[:end], "…"]
    return "\n".join(["```text", f"$ attnscope compare {suite}", *lines, "```"])


# --- what was seen ----------------------------------------------------------------------------------------------------


def ran(source: Source) -> str | None:
    """Which implementation PyTorch took by itself."""
    result = source.result("sdpa_auto")
    if result is None or result.ran is None:
        return None
    versions = source.run.environment
    cudnn = f" with cuDNN {versions.cudnn_loaded}" if versions.cudnn_loaded else ""
    return (
        f"On {source.run.device.name}, torch {versions.packages.get('torch', '?')}{cudnn}, `sdpa_auto` ran "
        f"`{result.ran}`."
    )


def kernels(source: Source, name: str, direction: str) -> str | None:
    """One call's kernels in order, then what went beyond the guess."""
    result = source.result(name)
    events = words.kernels_of(result, direction) if result else []
    profile = _profile(result, direction)
    if result is None or profile is None or not events:
        return None
    rows = [
        [str(number), event.role, _code(event.op), _code(_title(event.name)), event.unit,
         significant(event.duration_us)]
        for number, event in enumerate(events, 1)
    ]  # fmt: skip
    total = sum(event.duration_us for event in events)
    lines = [
        table(["#", "role", "launched by", "kernel", "unit", "µs"], rows, left=5),
        "",
        f"{_counted(profile.kernels_per_call)} a call, {format_us(total)} together in the call shown"
        f"{_memset_note(events)}.",
    ]
    if profile.surprises:
        lines += ["", "Beyond the guess:", "", *(f"- {cell(words.clean(said))}" for said in profile.surprises)]
    return "\n".join(lines)


def matmuls(source: Source) -> str | None:
    """The matrix products of the unfused implementations: the name, the unit, and what decided."""
    rows = []
    for name in ("naive", "sdpa_math"):
        result = source.result(name)
        for event in words.kernels_of(result, "forward") if result else []:
            if event.role in ("scores matmul", "values matmul"):
                title = _code(_title(event.name))
                rows.append([f"`{name}`", title, event.unit, event.unit_rule, significant(event.duration_us)])
    return table(["implementation", "kernel", "unit", "what decided", "µs"], rows, left=4) if rows else None


def finding(source: Source, kind: str, name: str, direction: str = "forward") -> str | None:
    """One finding with its evidence, arithmetic and remedy."""
    result = source.result(name)
    found = next((f for f in result.findings if f.id == kind and f.direction == direction), None) if result else None
    if found is None:
        return None
    lines = [f"**{words.finding_sentence(found)}**", ""]
    lines += [f"- {_code(words.clean(said))}" for said in found.evidence]
    lines += [f"- arithmetic: {words.clean(found.arithmetic)}"] if found.arithmetic else []
    lines += [f"- remedy: `{words.clean(found.remedy)}`"] if found.remedy else []
    return "\n".join(lines)


# --- how fast ---------------------------------------------------------------------------------------------------------


def measured(source: Source, direction: str) -> str | None:
    """The article's workload in one direction, implementations down."""
    columns = [c for c in words.COLUMNS if c.title in ("time", "noise", "sustained", "host", "memory", "energy")]
    rows = []
    for r in source.results:
        m = r.measurement(direction)
        if m is not None:
            rows.append([
                f"`{r.implementation}`", words.format_count(words.kernels_per_call(r, direction)),
                *(column.cell(m) for column in columns), words.format_ratio(m.vs_limit),
            ])  # fmt: skip
    head = ["implementation", "kernels", *(column.title for column in columns), "vs limit"]
    return table(head, rows) + f"\n\n`{source.workload}`, {direction}. {origin(source.run)}" if rows else None


def limit_terms(source: Source, direction: str) -> str | None:
    """The terms of the limit time, each amount over its rate."""
    limits, w = source.run.limits, Workload.parse(source.workload)
    rate = matrix_rate(limits, w.dtype) if limits else None
    if limits is None or rate is None or limits.read_gb_per_s is None:
        return None
    flops, moved = w.flops(direction), bytes_from_memory(w, direction, limits)
    amounts = [
        ("matrix", f"{significant(flops / 1e9)} GFLOP", f"{significant(rate)} TFLOP/s, {w.dtype}", flops / rate / 1e6),
        ("bandwidth", f"{significant(moved / 1e6)} MB", f"{significant(limits.read_gb_per_s)} GB/s",
         moved / limits.read_gb_per_s / 1e3),
    ]  # fmt: skip
    if limits.exponentials_t_per_s is not None:
        count = w.exponentials(direction)
        amounts.append(("exponentials", f"{significant(count / 1e6)} million",
                        f"{significant(limits.exponentials_t_per_s)} × 10¹² a second",
                        count / limits.exponentials_t_per_s / 1e6))  # fmt: skip
    if limits.launch_floor_us is not None:
        amounts.append(("launch", "one kernel", "", limits.launch_floor_us))
    most = max(us for *_, us in amounts)
    rows = [
        [term, amount, speed or MISSING, f"**{format_us(us)}**" if us == most else format_us(us)]
        for term, amount, speed, us in amounts
    ]
    told = f"`{source.workload}`, {direction}. {origin(source.run)}"
    return table(["term", "amount", "rate in this run", "time"], rows) + f"\n\n{told}"


# --- the article's disputed claims ------------------------------------------------------------------------------------


def occupancy(source: Source) -> str | None:
    """Occupancy as the trace shows it beside the recomputed one, by shared memory, and whether the rule holds."""
    launches = _launch_calls(source)
    found: dict[tuple[Any, ...], KernelEvent] = {}
    for result in source.results:
        for event in result.kernels:
            if event.shared_memory_bytes is not None and event.occupancy_shown is not None:
                key = (event.name, event.block, event.registers, event.shared_memory_bytes, event.occupancy_shown)
                found.setdefault(key, event)
    if not found:
        return None
    events = sorted(found.values(), key=lambda e: -(e.shared_memory_bytes or 0))
    rows = [
        [_code(_title(e.name, 60)), _code(launches.get(e.name)), _threads(e), str(e.registers),
         format_bytes(e.shared_memory_bytes), f"{e.occupancy_shown:.0f} %",
         MISSING if e.occupancy is None else f"{significant(e.occupancy)} %"]
        for e in events if e.shared_memory_bytes
    ]  # fmt: skip
    head = ["kernel", "launch call", "threads", "registers", "shared memory", "shown", "recomputed"]
    return "\n".join([table(head, rows, left=2), "", _occupancy_verdict(events, launches)])


def _occupancy_verdict(events: Sequence[KernelEvent], launches: dict[str, str]) -> str:
    def zeros(some: Iterable[KernelEvent]) -> list[KernelEvent]:
        return [e for e in some if e.occupancy_shown == 0 and (e.occupancy or 0) >= SEEN_PERCENT]

    above = [e for e in events if (e.shared_memory_bytes or 0) > DEFAULT_SHARED_LIMIT_BYTES]
    below = [e for e in events if (e.shared_memory_bytes or 0) <= DEFAULT_SHARED_LIMIT_BYTES]
    wrong_above, wrong_below = zeros(above), zeros(below)
    said = [
        f"Kernels with more than 48 KiB of shared memory a block: {len(above)}, of which {len(wrong_above)} show 0 % "
        f"although they run. With 48 KiB or less: {len(below)}, of which {len(wrong_below)}."
    ]
    calls = sorted({launches[e.name] for e in wrong_above if e.name in launches})
    if calls:
        said.append(f"Those that show 0 % were launched by {_listed(f'`{call}`' for call in calls)}.")
    holds = above and len(wrong_above) == len(above) and not wrong_below
    return " ".join([*said, "The shared memory decides." if holds else "So shared memory alone does not decide here."])


def first_call(source: Source) -> str | None:
    """First calls beside later ones, in the order of the run, and what that says of a search in each call."""
    timed = [(r, r.forward) for r in source.results if r.forward and r.forward.first_call_ms is not None]
    if not timed:
        return None
    rows = [
        [f"`{r.implementation}`", format_ms(m.first_call_ms), format_ms(m.time_ms_median), format_us(m.wall_us_median)]
        for r, m in timed
    ]
    head = ["implementation, in the run's order", "first call", "later calls, GPU", "later calls, host"]
    lines = [table(head, rows)]
    if said := _plan_verdict(source):
        lines += ["", said]
    return "\n".join(lines)


def _plan_verdict(source: Source) -> str | None:
    pinned, auto = source.result("sdpa_cudnn"), source.result("sdpa_auto")
    m = pinned.forward if pinned else None
    if m is None or not m.first_call_ms or not m.wall_us_median:
        return None
    times = m.first_call_ms * 1e3 / m.wall_us_median
    said = (
        f"cuDNN's first call took {format_ms(m.first_call_ms)}, the host's part of a later one "
        f"{format_us(m.wall_us_median)}, about {float(f'{times:.1e}'):,.0f} times less"
    )
    said += ": no search fits into that." if times > 10 else ": that does not settle it."
    first = auto.forward.first_call_ms if auto and auto.forward else None
    if auto and auto.ran == "sdpa_cudnn" and first is not None:
        said += (
            f" `sdpa_auto` came after it in the same process, took the same kernel, and its very first call needed "
            f"{format_ms(first)}."
        )
    return said


def ratios(source: Source) -> str | None:
    """math over naive in place, by each way to take the ratio, and totals over averages."""
    inplace, math = source.result("naive_inplace"), source.result("sdpa_math")
    a, b = _profile(inplace, "forward"), _profile(math, "forward")
    if inplace is None or math is None or a is None or b is None or not (inplace.forward and math.forward):
        return None
    if not (a.gpu_us_per_call and b.gpu_us_per_call and a.self_gpu_us_total and b.self_gpu_us_total):
        return None
    stated = [source.stated(name) for name in ("naive_inplace", "sdpa_math")]
    card = source.article["device"]
    pairs = [
        (f"the article, CUDA time average ({card})", stated[0]["gpu_us"], stated[1]["gpu_us"]),
        (f"the article, self CUDA total ({card})", stated[0]["self_total_us"], stated[1]["self_total_us"]),
        ("here, profiler, GPU time average", a.gpu_us_per_call, b.gpu_us_per_call),
        ("here, profiler, self GPU total", a.self_gpu_us_total, b.self_gpu_us_total),
        ("here, without the profiler, cold cache", inplace.forward.time_ms_median * 1e3,
         math.forward.time_ms_median * 1e3),
    ]  # fmt: skip
    rows = [[what, format_us(x), format_us(y), f"{y / x:.2f}"] for what, x, y in pairs]
    over = [
        ["the article", *(f"{s['self_total_us'] / s['gpu_us']:.2f}" for s in stated), "3"],
        ["here", *(f"{_total_over_average(p):.2f}" for p in (a, b)), str(a.steps)],
    ]
    return "\n".join([
        table(["by", "`naive_inplace`", "`sdpa_math`", "ratio"], rows),
        "",
        table(["self total / average", "`naive_inplace`", "`sdpa_math`", "recorded steps"], over),
        "",
        f"Kernels of the warm-up that reached into the recorded window here: {a.spilled_kernels + b.spilled_kernels}.",
    ])  # fmt: skip


def host(source: Source) -> str | None:
    """The host's time of a call with and without the profiler, beside the article's."""
    rows = []
    for r in source.results:
        profile, m = _profile(r, "forward"), r.forward
        if profile is None or m is None or m.wall_us_median is None:
            continue
        stated = source.stated(r.implementation).get("host_us")
        rows.append([
            f"`{r.implementation}`", format_us(m.wall_us_median), format_us(profile.cpu_us_per_call),
            f"{profile.cpu_us_per_call / m.wall_us_median:.1f}", words.format_count(profile.cpu_ops_per_call),
            format_ms(m.time_ms_median), MISSING if stated is None else format_us(stated),
        ])  # fmt: skip
    head = [
        "implementation",
        "host",
        "host, profiled",
        "ratio",
        "CPU ops",
        "GPU",
        "the article's host, profiled (A100)",
    ]
    if not rows:
        return None
    return "\n\n".join([table(head, rows), *filter(None, [_cudnn_host(source), _pin_cost(source)])])


def _cudnn_host(source: Source) -> str | None:
    """cuDNN's host time over flash's, here and in the article."""
    cudnn, flash = (_host_us(source, name) for name in ("sdpa_cudnn", "sdpa_flash"))
    if cudnn is None or flash is None:
        return None
    theirs = source.stated("sdpa_cudnn")["host_us"] / source.stated("sdpa_flash")["host_us"]
    return f"cuDNN's host time over flash's: {cudnn / flash:.2f} here, {theirs:.2f} in the article."


def _pin_cost(source: Source) -> str | None:
    """The host's time with and without the context that pins an implementation."""
    auto = source.result("sdpa_auto")
    free, pinned = _host_us(source, "sdpa_auto"), _host_us(source, auto.ran or "") if auto else None
    if auto is None or free is None or pinned is None:
        return None
    return (
        f"`sdpa_auto` and `{auto.ran}` run the same kernel; pinned by `sdpa_kernel` in each call, the latter needs "
        f"{format_us(pinned)} on the host instead of {format_us(free)}."
    )


# --- shared -----------------------------------------------------------------------------------------------------------

BLOCKS: dict[str, tuple[Callable[..., str | None], int, int]] = {
    "ran": (ran, 0, 0),
    "kernels": (kernels, 2, 2),
    "matmuls": (matmuls, 0, 0),
    "finding": (finding, 2, 3),
    "measured": (measured, 1, 1),
    "limit-terms": (limit_terms, 1, 1),
    "occupancy": (occupancy, 0, 0),
    "first-call": (first_call, 0, 0),
    "ratios": (ratios, 0, 0),
    "host": (host, 0, 0),
}
USAGES = (
    "ran", "kernels IMPLEMENTATION DIRECTION", "matmuls", "finding ID IMPLEMENTATION [DIRECTION]",
    "measured DIRECTION", "limit-terms DIRECTION", "occupancy", "first-call", "ratios", "host",
)  # fmt: skip


def make(kind: str, arguments: Sequence[str], source: Source | None) -> str | None:
    """The block ``kind`` of the article's workload. Raises UsageError for a wrong number of arguments or direction."""
    function, least, most = BLOCKS[kind]
    if not least <= len(arguments) <= most:
        usage = next(usage for usage in USAGES if usage.split()[0] == kind)
        raise UsageError(f"a block must read {usage}, got {' '.join([kind, *arguments])}")
    if kind in ("measured", "limit-terms", "kernels") and arguments[-1] not in words.DIRECTIONS:
        raise UsageError(f"direction must be forward or backward, got {arguments[-1]!r}")
    return None if source is None else function(source, *arguments)


def origin(run: Run) -> str:
    """One sentence that names the card and the versions."""
    return f"{run.device.name}, torch {run.environment.packages.get('torch', '?')}, {run.created[:10]}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table; the first ``left`` columns are aligned left, the others right."""
    rule = [*["---"] * left, *["---:"] * (len(head) - left)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def cell(text: str) -> str:
    """Text that cannot end a table's cell."""
    return text.replace("|", "\\|")


def _host_us(source: Source, name: str) -> float | None:
    result = source.result(name)
    return result.forward.wall_us_median if result and result.forward else None


def _profile(result: Result | None, direction: str) -> Profile | None:
    return next((p for p in result.profiles if p.direction == direction), None) if result else None


def _title(name: str, width: int = NAME_WIDTH) -> str:
    """A kernel's name without its template arguments."""
    title = words.kernel_title(name, 10 * NAME_WIDTH)
    return title if title.startswith("Mem") else words.shorten(title.split("<")[0].split("(")[0], width)


def _code(text: str | None) -> str:
    return f"`{cell(text)}`" if text else MISSING


def _counted(kernels_per_call: float) -> str:
    return words.format_count(kernels_per_call) + (" kernel" if kernels_per_call == 1 else " kernels")


def _threads(event: KernelEvent) -> str:
    threads = 1
    for size in event.block or ():
        threads *= size
    return str(threads) if event.block else MISSING


def _memset_note(events: Sequence[KernelEvent]) -> str:
    fills = sum(event.name.startswith("Memset") for event in events)
    return ", a fill of a few bytes that a library adds to its own kernel not counted" if fills == 1 else ""


def _total_over_average(profile: Profile) -> float:
    return (profile.self_gpu_us_total or 0.0) / (profile.gpu_us_per_call or 1.0)


def _launch_calls(source: Source) -> dict[str, str]:
    """Kernel name -> the call that launched it, from the run's traces where they are here."""
    found: dict[str, str] = {}
    for result in source.results if source.traces else ():
        for profile in result.profiles:
            path = source.traces / profile.trace if source.traces and profile.trace else None
            if path is None or not path.is_file():
                continue
            for event in read_trace(path).device_events:
                if event.launch is not None:
                    found.setdefault(event.name, event.launch.name)
    return found


def _listed(items: Iterable[str]) -> str:
    *most, last = items
    return f"{', '.join(most)} and {last}" if most else last
