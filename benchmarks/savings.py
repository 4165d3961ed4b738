"""Let predicted savings come true: record a call, take attnscope's estimate from its trace, apply the remedy, measure.

    python benchmarks/savings.py                    # all scenarios on this machine's GPU, under two minutes
    python benchmarks/savings.py --list
    python benchmarks/savings.py --only unfused,tf32
    python benchmarks/savings.py --device cpu --out folder
    python benchmarks/savings.py --table [--check]  # write the table of docs/guide/explain.md from the records

Each scenario (saving_scenarios.py) is recorded by torch.profiler before its remedy is applied; the estimate is that of
``attnscope explain`` on this trace, for one call. Then the call before and the call after take turns (before, after,
after, before) under attnscope's own stopwatch, and the medians' difference is what was really saved. A scenario that
fails is written down as failed; the others go on. Records lie in benchmarks/results/savings/DEVICE.jsonl; ``--only``
replaces the records of its scenarios and keeps the rest.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # a test loads this file by its path
from recording import record, synchronise
from saving_scenarios import SCENARIOS, Scenario

from attnscope.device import Device, find_device, read_environment
from attnscope.errors import AttnscopeError, UnknownName, UsageError
from attnscope.explaining import explain_trace
from attnscope.records import Finding
from attnscope.timers import Call, Timer, make_timer
from attnscope.trace import parse_trace
from attnscope.units import MISSING, format_us, median, quantile

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("benchmarks") / "results" / "savings"
PAGE = Path("docs") / "guide" / "explain.md"
BLOCK = re.compile(r"(<!-- generated: savings -->\n).*?(<!-- end generated -->)", re.DOTALL)
NOTHING_YET = "No GPU has recorded savings yet; `python benchmarks/savings.py` does.\n"
WITHIN = 0.25  # of what was saved
SECONDS, ROUNDS, FEW_ROUNDS = 0.7, (5, 60), 2
SPIN_FACTOR, SPIN_MARGIN_US, SPIN_MAX_US = 2.0, 100.0, 200_000.0
ATTEMPTS = 4
LARGEST_DIFFERENCE = 0.05  # of two ways to round in 16 bit
WALL_CALLS = 5  # in a row, for one wall time


@dataclass(frozen=True)
class Saving:
    """One scenario's record. Times are of one call in µs. ``status``: measured, not found, not estimated, failed."""

    scenario: str
    finding: str
    change: str
    status: str
    device: str
    clock: str
    created: str
    torch: str
    cudnn: str | None = None
    predicted_us: float | None = None
    before_us: float | None = None
    after_us: float | None = None
    noise_us: float | None = None
    rounds: int = 0
    arithmetic: str = ""
    window_us: float | None = None
    others: tuple[str, ...] = ()
    error: str = ""

    @property
    def saved_us(self) -> float | None:
        """What applying the remedy saved."""
        if self.before_us is None or self.after_us is None:
            return None
        return self.before_us - self.after_us

    @property
    def ratio(self) -> float | None:
        """Predicted over saved."""
        saved = self.saved_us
        return self.predicted_us / saved if self.predicted_us and saved and saved > 0 else None

    @property
    def came_true(self) -> bool:
        """Whether the prediction lies within a quarter of what was saved."""
        return self.ratio is not None and abs(self.ratio - 1) <= WITHIN


# --- one scenario -----------------------------------------------------------------------------------------------------


def run_scenario(scenario: Scenario, device: Device, timer: Timer) -> Saving:
    """Record, predict, apply, measure. Whatever goes wrong becomes the record's status."""
    versions = read_environment()
    saving = Saving(
        scenario.name, scenario.finding, scenario.change, "failed", device.name, scenario.clock,
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), versions.packages.get("torch", ""),
        versions.cudnn_loaded,
    )  # fmt: skip
    try:
        before, after = scenario.make(device.kind)
        saving = predicted(saving, scenario, before, device)
        return measured(saving, scenario, before, after, timer)
    except Exception as error:  # a scenario's own failure costs that scenario only
        return replace(saving, status="failed", error=f"{type(error).__name__}: {str(error).strip()[:300]}")


def predicted(saving: Saving, scenario: Scenario, before: Call, device: Device) -> Saving:
    """With the estimate that the trace of ``before`` gives."""
    warm = 1 if scenario.each_once else 3
    trace = record(before, device.kind, steps=scenario.steps, warm_calls=warm, ops=scenario.ops)
    explanation = explain_trace(parse_trace(trace))
    found = {finding.id: finding for finding in explanation.findings}
    finding: Finding | None = found.get(scenario.finding)
    saving = replace(
        saving, others=tuple(one for one in found if one != scenario.finding),
        window_us=explanation.window.busy_us / scenario.steps,
    )  # fmt: skip
    if finding is None:
        return replace(saving, status="not found")
    if finding.saving_us is None:
        return replace(saving, status="not estimated", arithmetic=finding.arithmetic)
    return replace(
        saving, status="measured", predicted_us=finding.saving_us / scenario.steps, arithmetic=finding.arithmetic
    )


def measured(saving: Saving, scenario: Scenario, before: Call, after: Call, timer: Timer) -> Saving:
    """With the times of both calls, taken in turns; also where nothing was predicted: one sees what was missed."""
    stopwatch = wall_us if scenario.clock == "wall" else gpu_us
    one = 1 if scenario.each_once else WALL_CALLS
    if scenario.same and (error := difference(before(), after())) > LARGEST_DIFFERENCE:
        raise AttnscopeError(f"the remedy computes something else: its results differ by {100 * error:.0f} %")
    spins = [0.0, 0.0]
    for index, call in enumerate((before, after)):
        call()
        timer.synchronize()
        if not scenario.each_once:
            spins[index] = SPIN_FACTOR * timer.host_us(call, 3) + SPIN_MARGIN_US
    times: tuple[list[float], list[float]] = ([], [])
    least, most = (FEW_ROUNDS, FEW_ROUNDS) if scenario.each_once else ROUNDS
    end = time.perf_counter() + SECONDS
    rounds = 0
    while rounds < least or (rounds < most and time.perf_counter() < end):
        for index in (0, 1, 1, 0):
            times[index].append(stopwatch(timer, (before, after)[index], spins, index, one))
        rounds += 1
    spread = sum(quantile(one, 0.8) - quantile(one, 0.2) for one in times)
    return replace(
        saving, before_us=median(times[0]), after_us=median(times[1]), noise_us=spread, rounds=2 * rounds
    )  # fmt: skip


def difference(before: object, after: object) -> float:
    """Relative difference of what two calls returned, by its norm; of several tensors the largest; 0 for no tensors."""
    if isinstance(before, tuple) and isinstance(after, tuple):
        return max((difference(one, other) for one, other in zip(before, after, strict=False)), default=0.0)
    if not hasattr(before, "detach") or not hasattr(after, "detach"):
        return 0.0
    one, other = before.detach().float(), after.detach().float()
    return float((one - other).norm() / one.norm().clamp(min=1e-30))


Stopwatch = Callable[[Timer, Call, list[float], int, int], float]


def gpu_us(timer: Timer, call: Call, spins: list[float], index: int, calls: int) -> float:
    """Device time of a call queued whole behind a spin; the caches stay as the call before left them, as in a trace."""
    del calls
    for _ in range(ATTEMPTS):
        sample = timer.time_call(call, spins[index], evict=False)
        if sample.held:
            break
        spins[index] = min(2 * spins[index], SPIN_MAX_US)
    return sample.ms * 1e3


def wall_us(timer: Timer, call: Call, spins: list[float], index: int, calls: int) -> float:
    """The clock's time of a call among ``calls`` in a row, the device's included."""
    del spins, index
    timer.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    timer.synchronize()
    return (time.perf_counter() - begin) * 1e6 / calls


# --- records ----------------------------------------------------------------------------------------------------------


def read_savings(path: Path) -> list[Saving]:
    """The records of a file; none where there is no file."""
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    return [Saving(**(row | {"others": tuple(row["others"])})) for row in rows]


def write_savings(path: Path, savings: Sequence[Saving]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(asdict(saving), ensure_ascii=False) + "\n" for saving in savings))
    temporary.replace(path)


def slug(name: str) -> str:
    """A device's name as a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def merged(old: Sequence[Saving], new: Sequence[Saving]) -> list[Saving]:
    """Old records but for the scenarios that are new, in the scenarios' order."""
    by_name = {saving.scenario: saving for saving in (*old, *new)}
    order = [scenario.name for scenario in SCENARIOS]
    return sorted(by_name.values(), key=lambda s: order.index(s.scenario) if s.scenario in order else len(order))


# --- the table --------------------------------------------------------------------------------------------------------


def make_table(savings: Sequence[Saving], source: str) -> str:
    """The Markdown of the block: a sentence that counts and names the record, and a row for each scenario."""
    shown = [saving for saving in savings if saving.status == "measured"]
    if not shown:
        return NOTHING_YET
    true = sum(saving.came_true for saving in shown)
    first = shown[0]
    cudnn = f", cuDNN {first.cudnn}" if first.cudnn else ""
    lines = [
        f"On {first.device} with torch {first.torch}{cudnn}, {true} of {len(shown)} predictions lie within "
        f"{100 * WITHIN:.0f} % of what the remedy saved (record `{source}`, {recorded_on(shown)}).",
        "",
        "| finding | what was changed | before | after | predicted | saved | predicted / saved |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for saving in shown:
        ratio = f"{saving.ratio:.2f}" if saving.ratio is not None else MISSING
        cells = [format_us(us) if us is not None else MISSING
                 for us in (saving.before_us, saving.after_us, saving.predicted_us, saving.saved_us)]  # fmt: skip
        name = f"[`{saving.finding}`](../reference/findings.md#{saving.finding})"
        lines.append(f"| {name} | {saving.change} | {' | '.join(cells)} | {ratio} |")
    missed = [f"{saving.scenario} ({saving.status})" for saving in savings if saving.status != "measured"]
    if missed:
        lines += ["", f"Without a prediction: {', '.join(missed)}."]
    return "\n".join(lines) + "\n"


def recorded_on(savings: Sequence[Saving]) -> str:
    """The day of the records, or the first and the last."""
    days = sorted({saving.created[:10] for saving in savings})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def update_page(root: Path, *, check: bool) -> bool:
    """Whether the page differs from what the records say; written unless ``check``."""
    files = sorted((root / FOLDER).glob("*.jsonl"))
    savings, source = (read_savings(files[0]), (FOLDER / files[0].name).as_posix()) if files else ([], "")
    path = root / PAGE
    old = path.read_text()
    new = BLOCK.sub(lambda match: match[1] + make_table(savings, source) + match[2], old)
    if new != old and not check:
        path.write_text(new)
    return new != old


# --- the command ------------------------------------------------------------------------------------------------------


def choose(names: str | None, device: str) -> list[Scenario]:
    """The scenarios asked for that the device can run. Raises UnknownName, UsageError."""
    known = {scenario.name: scenario for scenario in SCENARIOS}
    wanted = [name.strip() for name in names.split(",")] if names else list(known)
    for name in wanted:
        if name not in known:
            raise UnknownName("scenario", name, known)
    chosen = [known[name] for name in wanted if device == "cuda" or known[name].cpu]
    if not chosen:
        raise UsageError(f"a scenario must be one that runs on {device}, got {names}\nhint: --list names them")
    return chosen


def told(saving: Saving) -> str:
    """A line for the terminal."""
    if saving.status == "failed":
        return f"{saving.scenario:26} failed: {saving.error}"
    times = [format_us(us) if us is not None else MISSING
             for us in (saving.predicted_us, saving.saved_us, saving.before_us, saving.after_us)]  # fmt: skip
    ratio = f"{saving.ratio:.2f}" if saving.ratio is not None else saving.status
    return f"{saving.scenario:26} predicted {times[0]:>9}, saved {times[1]:>9} ({times[2]} -> {times[3]}): {ratio}"


def run_all(chosen: Sequence[Scenario], device: Device, out: Path) -> list[Saving]:
    """Run, print and write one after the other: what was done stays if the process ends."""
    import torch

    timer = make_timer(device)
    path = out / f"{slug(device.name)}.jsonl"
    old, done = read_savings(path), []
    for scenario in chosen:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on what the scenario does on purpose
            done.append(run_scenario(scenario, device, timer))
        print(told(done[-1]), flush=True)
        write_savings(path, merged(old, done))
        gc.collect()
        if device.kind == "cuda" and done[-1].status != "failed":
            synchronise(device.kind)
            torch.cuda.empty_cache()
    true = sum(saving.came_true for saving in done)
    print(f"{true} of {len(done)} within {100 * WITHIN:.0f} % of what was saved; wrote {path}")
    return done


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Exit status: 0 done; 1 a scenario failed, or with ``--table --check`` the page is out of date; 2 usage."""
    parser = argparse.ArgumentParser(description="Let predicted savings come true, and measure them.")
    parser.add_argument("--list", action="store_true", help="name the scenarios and end")
    parser.add_argument("--only", metavar="NAMES", help="only these scenarios, with commas between them")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one, else the CPU")
    parser.add_argument("--out", type=Path, help="folder of the records (default: benchmarks/results/savings)")
    parser.add_argument("--table", action="store_true", help="write the table of the guide from the records and end")
    parser.add_argument("--check", action="store_true", help="with --table: write nothing, exit 1 where it differs")
    options = parser.parse_args(arguments)
    if options.list:
        for scenario in SCENARIOS:
            print(f"{scenario.name:26} {scenario.finding:24} {'cpu, ' if scenario.cpu else ''}cuda")
        return 0
    if options.table:
        stale = update_page(root, check=options.check)
        if stale:
            print(
                f"{PAGE} is out of date, run python benchmarks/savings.py --table" if options.check else f"wrote {PAGE}"
            )
        return int(stale and options.check)
    try:
        device = find_device(options.device)
        chosen = choose(options.only, device.kind)
    except AttnscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if device.kind == "cpu" and options.out is None:
        print("error: records of a CPU must not lie among those of GPUs\nhint: --out FOLDER", file=sys.stderr)
        return 2
    done = run_all(chosen, device, options.out or root / FOLDER)
    return int(any(saving.status == "failed" for saving in done))


if __name__ == "__main__":
    sys.exit(main())
