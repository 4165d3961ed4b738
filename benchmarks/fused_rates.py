"""Fit what fused kernels reach on a card to the recorded runs, for the explainer's estimates.

    python benchmarks/fused_rates.py

Reads benchmarks/results/*.jsonl (full runs of a GPU whose rates are in the table of data sheets), writes
src/attnscope/explaining/fused_rates.json: for each kernel, direction, dtype class and head dim the share of the data
sheet's rate and the tiles that filling and draining a block's pipeline costs, with the largest relative error of the
fit. ``--check`` writes nothing and exits 1 where the file is not what this would write.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnscope.explaining import fused_times
from attnscope.explaining.fused_times import Card, Rate, kernel_us
from attnscope.explaining.peaks import find_peaks
from attnscope.explaining.shapes import Problem
from attnscope.records import Run, read_runs
from attnscope.workload import Workload

ROOT = Path(__file__).resolve().parents[1]
KERNELS = {"sdpa_cudnn": "cuDNN", "sdpa_flash": "flash", "sdpa_efficient": "efficient"}
SHARES = [n / 100 for n in range(4, 96)]
STRIDE = 6  # first every so many shares, then those around the best
RAMPS = [n / 4 for n in range(33)]
FEW, USUAL_RAMP = 4, 1.0  # so few points cannot tell a ramp from a share


@dataclass(frozen=True)
class Point:
    """One recorded time of one kernel."""

    card: Card
    kernel: str
    direction: str
    problem: Problem
    us: float

    @property
    def group(self) -> tuple[str, str, str, str, int]:
        kind = "half" if self.problem.dtype in fused_times.HALF else "fp32"
        return self.card.name, self.kernel, self.direction, kind, self.problem.D or 0


def points_of(runs: Iterable[Run]) -> list[Point]:
    """Every profiled call of a fused kernel; what a mask or a layout copy makes different is left out."""
    found = []
    for run in runs:
        peaks = find_peaks(run.device.name)
        if peaks is None or run.quick or not run.device.multiprocessors:
            continue
        card = Card(run.device.name, peaks, run.device.multiprocessors, (run.device.capability or (0,))[0])
        for result in run.results:
            problem = problem_of(Workload.parse(result.workload))
            if result.implementation not in KERNELS or problem is None:
                continue
            for profile in result.profiles:
                if profile.gpu_us_per_call:
                    kernel = KERNELS[result.implementation]
                    found.append(Point(card, kernel, profile.direction, problem, profile.gpu_us_per_call))
    return found


def problem_of(w: Workload) -> Problem | None:
    """The workload as a trace would show it; None with what a fused call without a mask tensor cannot say."""
    plain = (w.window, w.softcap, w.mask, w.bias, w.lengths, w.packed)
    if any(one is not None for one in plain) or w.alibi or w.sinks or w.causal == "bottom_right":
        return None
    return Problem(w.B, w.H, w.H_kv, w.L, w.S, w.D, w.D_v, dtype=w.dtype, causal=w.causal is not None)


def fit(points: Sequence[Point]) -> list[Rate]:
    """One rate for each group, the ramp shared by the head dims of a kernel, by least relative squares."""
    families: dict[tuple[str, str, str, str], dict[int, list[Point]]] = {}
    for point in points:
        *family, head_dim = point.group
        families.setdefault(tuple(family), {}).setdefault(head_dim, []).append(point)  # type: ignore[arg-type]
    found = []
    for family, by_head_dim in sorted(families.items()):
        best: tuple[float, list[Rate]] | None = None
        many = sum(map(len, by_head_dim.values())) >= FEW
        for ramp in RAMPS if many else [USUAL_RAMP]:
            fitted = [_best_share(family, head_dim, ramp, ones) for head_dim, ones in sorted(by_head_dim.items())]
            cost = sum(one for one, _ in fitted)
            if best is None or cost < best[0]:
                best = cost, [rate for _, rate in fitted]
        found += best[1] if best else []
    return found


def _best_share(
    family: tuple[str, str, str, str], head_dim: int, ramp: float, points: Sequence[Point]
) -> tuple[float, Rate]:
    card, kernel, direction, kind = family

    def errors(share: float) -> list[float]:
        rate = Rate(card, kernel, direction, kind, head_dim, share, ramp, 0.0)
        return [_time(point, rate) / point.us - 1 for point in points]

    def cost(share: float) -> float:
        return sum(error * error for error in errors(share))

    near = SHARES.index(min(SHARES[::STRIDE], key=cost))
    share = min(SHARES[max(near - STRIDE, 0) : near + STRIDE + 1], key=cost)
    largest = round(max(abs(error) for error in errors(share)), 2)
    return cost(share), Rate(card, kernel, direction, kind, head_dim, share, ramp, largest)


def _time(point: Point, rate: Rate) -> float:
    us = kernel_us(point.problem, point.direction, point.card, point.kernel, rate=rate)
    assert us is not None
    return us


def make_text(root: Path = ROOT) -> str:
    """The file's text."""
    folder = root / "benchmarks" / "results"
    runs = [run for path in sorted(folder.glob("*.jsonl")) for run in read_runs(path)]
    rows = [
        {field: getattr(rate, field) for field in Rate.__struct_fields__}
        for rate in fit(points_of(runs))
    ]  # fmt: skip
    return "[\n" + ",\n".join(" " + json.dumps(row) for row in rows) + "\n]\n"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Exit status: 0 done or up to date, 1 with ``--check`` where the file is not."""
    parser = argparse.ArgumentParser(description="Fit what fused kernels reach to the recorded runs.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the file is out of date")
    check = parser.parse_args(arguments).check
    path = root / "src" / "attnscope" / "explaining" / fused_times.RATES_FILE.name
    text = make_text(root)
    if path.is_file() and path.read_text() == text:
        return 0
    print(f"{path.name} is out of date, run python benchmarks/fused_rates.py" if check else f"wrote {path}")
    if not check:
        path.write_text(text)
    return int(check)


if __name__ == "__main__":
    sys.exit(main())
