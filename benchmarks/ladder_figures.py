"""Write the CUDA ladder's tables, picture and settled claims from its records.

``python benchmarks/ladder_figures.py [--check]`` reads ``benchmarks/results/ladder-*.json``, which
``attnscope ladder DIRECTION --claims --out FILE`` wrote on a card, and rewrites the table of each direction in the
ladder's README, ``docs/pictures/ladder.svg`` and the block of claims in ``docs/guide/ladder.md``. With ``--check`` it
writes nothing and ends with 1 where something is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from attnscope import ladder_views as views
from attnscope.implementations.cuda_ladder import all_rungs
from attnscope.ladder import SOFTMAX_PARTS, LadderRow, LadderRun
from attnscope.units import format_bytes, format_ms, format_number

ROOT = Path(__file__).resolve().parents[1]
TABLES = Path("src/attnscope/implementations/cuda_ladder/README.md")
GUIDE = Path("docs/guide/ladder.md")
PICTURE = Path("docs/pictures/ladder.svg")
BLOCK = re.compile(r"(<!-- generated: ladder claims -->\n)(.*?)(<!-- end generated -->)", re.DOTALL)
DIRECTIONS = ("forward", "backward")

Best = dict[str, LadderRow]


def load(root: Path) -> dict[str, LadderRun]:
    """The recorded run of each direction; a later file of the same direction wins."""
    files = sorted((root / "benchmarks" / "results").glob("ladder-*.json"))
    runs = [views.read_run(file) for file in files]
    return {run.direction: run for run in runs}


def registered_only(run: LadderRun) -> LadderRun:
    """Without the variants that only settle claims."""
    known = {rung.rung for rung in all_rungs(run.direction)}
    return replace(run, rows=tuple(row for row in run.rows if row.rung in known))


def with_every_rung(run: LadderRun) -> LadderRun:
    """Without those variants, and with a row that says so for each rung that the record does not have."""
    there = registered_only(run)
    recorded = {row.rung for row in there.rows}
    missing = tuple(
        LadderRow(rung.rung, rung.name, 0, run.workload, reasons=("not recorded",))
        for rung in all_rungs(run.direction)
        if rung.rung not in recorded
    )
    return replace(there, rows=there.rows + missing)


# --- the article's claims ---------------------------------------------------------------------------------------------


def claims(runs: dict[str, LadderRun]) -> str:
    """What each disputed sentence of the article looks like on the recorded card; a line a claim."""
    best = {way: runs[way].best() if way in runs else {} for way in DIRECTIONS}
    lines = [line for make in CLAIMS if (line := make(best))]
    cards = sorted({f"{run.device}, `{run.workload}`" for run in runs.values()})
    return "\n".join(["| claim | measured |", "| --- | --- |", *lines, "", f"{'; '.join(cards)}.", ""])


def _ms(row: LadderRow) -> float:
    assert row.timing is not None
    return row.timing.time_ms_median


def _softmax_ms(row: LadderRow) -> float:
    return next(row.parts[name].time_ms_median for name in SOFTMAX_PARTS if name in row.parts)


def _softmaxes(best: Best, *rungs: str) -> str:
    return ", ".join(f"`{rung}` {format_ms(_softmax_ms(best[rung]))}" for rung in rungs if rung in best)


def _serial(both: dict[str, Best]) -> str | None:
    best = both["backward"]
    if not {"v1", "v1_fixed", "v2"} <= best.keys():
        return None
    v1, fixed, v2 = (_ms(best[rung]) for rung in ("v1", "v1_fixed", "v2"))
    times = f"`v1` {format_ms(v1)}, `v1_fixed` {format_ms(fixed)}, `v2` {format_ms(v2)}"
    return (
        f"| V1 is slow because it is serial | {times}: the grid's redundancy costs {format_number(v1 / fixed)} ×, the "
        f"serial loop {format_number(fixed / v2)} × |"
    )


def _cooperative(both: dict[str, Best]) -> str | None:
    best = both["backward"]
    if not {"v2", "v3", "v3_cooperative_groups"} <= best.keys():
        return None
    ratio = _softmax_ms(best["v3_cooperative_groups"]) / _softmax_ms(best["v3"])
    gain = _softmax_ms(best["v2"]) / _softmax_ms(best["v3"])
    return (
        f"| V3 gains by cooperative groups | softmax alone: {_softmaxes(best, 'v2', 'v3', 'v3_cooperative_groups')}: "
        f"with cooperative groups it takes {format_number(ratio)} of the time without; who reads what brings "
        f"{format_number(gain)} × |"
    )


def _unrolling(both: dict[str, Best]) -> str | None:
    best = both["backward"]
    rungs = ("v4_unroll_1", "v4_unroll_2", "v4_unroll_4", "v4", "v4_unroll_16")
    if not set(rungs) <= best.keys():
        return None
    fastest = min(rungs, key=lambda rung: _softmax_ms(best[rung]))
    return f"| V4 gains by unrolling by 8 | softmax alone: {_softmaxes(best, *rungs)}; the fastest is `{fastest}` |"


def _total(both: dict[str, Best]) -> str | None:
    best = both["backward"]
    if not {"v1", "v2", "v7", "v8"} <= best.keys():
        return None
    fastest = min(("v7", "v8"), key=lambda rung: _ms(best[rung]))
    over = ", ".join(
        f"{format_number(_ms(best[rung]) / _ms(best[fastest]))} × over `{rung}`"
        for rung in ("v1", "v1_fixed", "v2")
        if rung in best
    )
    return f"| a total of 4,000 × | `{fastest}`, whole: {over} |"


def _last_step(both: dict[str, Best]) -> str | None:
    best = both["backward"]
    if not {"v7", "v8"} <= best.keys():
        return None
    shares = ", ".join(
        f"`{rung}` {best[rung].softmax_vs_copy:.0%}" for rung in ("v7", "v8") if best[rung].softmax_vs_copy
    )
    return (
        f"| V8 is level with V7 | whole: `v7` {format_ms(_ms(best['v7']))}, `v8` {format_ms(_ms(best['v8']))}; softmax "
        f"alone: {_softmaxes(best, 'v7', 'v8')}; of the copy bandwidth: {shares} |"
    )


def _blocks(both: dict[str, Best]) -> str | None:
    told = [
        f"{way}: "
        + ", ".join(
            f"`{rung}` {row.block_size}" for rung, row in both[way].items() if row.block_size and "_" not in rung
        )
        for way in DIRECTIONS
        if both[way]
    ]
    return f"| blocks of 256 or 512 threads are best | {'; '.join(told)} |" if told else None


def _workspace(both: dict[str, Best]) -> str | None:
    rows = [best[rung] for best in both.values() for rung in ("v10", "v11") if rung in best]
    told = [f"`{row.rung}` {format_bytes(row.workspace_bytes)}" for row in rows if row.workspace_bytes is not None]
    return f"| cuDNN's workspace takes up to 256 MB | {', '.join(told)} |" if told else None


CLAIMS: tuple[Callable[[dict[str, Best]], str | None], ...] = (
    _serial, _cooperative, _unrolling, _total, _last_step, _blocks, _workspace,
)  # fmt: skip


# --- the command ------------------------------------------------------------------------------------------------------


def texts(runs: dict[str, LadderRun], root: Path) -> dict[Path, str]:
    """What each page ought to be."""
    readme, guide = (root / TABLES).read_text(), (root / GUIDE).read_text()
    for run in runs.values():
        readme = views.with_table(with_every_rung(run), readme, TABLES.name)
    guide = BLOCK.sub(lambda found: found[1] + claims(runs) + found[3], guide)
    return {TABLES: readme, GUIDE: guide}


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Write, or with ``--check`` only compare."""
    runs = load(root)
    if not runs:
        print("no record of the ladder: attnscope ladder DIRECTION --claims --out benchmarks/results/FILE writes one")
        return 0
    stale = [path for path, text in texts(runs, root).items() if (root / path).read_text() != text]
    if not (root / PICTURE).exists():
        stale.append(PICTURE)
    if "--check" in arguments:
        for path in stale:
            print(f"{path} is out of date: run python benchmarks/ladder_figures.py")
        return 1 if stale else 0
    for path, text in texts(runs, root).items():
        (root / path).write_text(text)
    views.draw([registered_only(runs[way]) for way in DIRECTIONS if way in runs], root / PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
