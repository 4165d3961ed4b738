"""Stage 7: what a run shows of itself in a notebook.

Reads Run, writes an HTML fragment without scripts, whose styles touch nothing outside it. Must import neither torch nor
a stage. Colours follow the notebook's own text, so that it reads in light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from attnscope.records import Result, Run
from attnscope.reporting import facts, words
from attnscope.units import format_ms

FINDINGS_SHOWN = 3


def run_html(run: Run) -> str:
    """The run as an HTML fragment: per workload a small table, who is fastest, findings, what did not run."""
    environment = Environment(
        loader=PackageLoader("attnscope.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    modes = [mode for mode in words.DIRECTIONS if mode in run.modes]
    return environment.get_template("notebook.html.j2").render(
        device_line=facts.device_line(run),
        run_line=facts.run_line(run),
        modes=modes,
        workloads=[_workload(workload, run.for_workload(workload), modes) for workload in run.workloads],
    )


def _workload(workload: str, results: Sequence[Result], modes: Sequence[str]) -> dict[str, object]:
    best = {mode: order[0].implementation for mode in modes if (order := words.ranked(results, mode))}
    rows = [
        {
            "name": words.display_name(r),
            "status": words.status_word(r),
            "bad": r.status in ("check_failed", "failed"),
            "times": [
                {
                    "text": format_ms(m.time_ms_median if m else None),
                    "noise": words.format_noise(m.noise_fraction) if m else "",
                    "vs_limit": words.format_ratio(m.vs_limit if m else None),
                    "best": best.get(mode) == r.implementation,
                }
                for mode, m in ((mode, r.measurement(mode)) for mode in modes)
            ],
        }
        for r in results
        if words.was_run(r)
    ]
    sentences = [f"{mode}: {said}" for mode in modes if (said := words.fastest_sentence(results, mode))]
    limits = [said for mode in modes if (said := words.limit_sentence(results, mode))]
    return {
        "workload": workload,
        "rows": rows,
        "fastest": sentences,
        "limit": "; ".join(limits),
        "findings": [words.finding_sentence(f) for f in words.top_findings(results, FINDINGS_SHOWN)],
        "told": [
            *words.wrong_lines(results), *words.failed_lines(results), *words.note_lines(results),
            *words.skipped_lines(results),
        ],
    }  # fmt: skip
