"""Runs of one card in which ``hopper`` stands beside rivals, as plain as their times: for ratios and their pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import factories
from attnscope.records import Result, Run, Verdict
from attnscope.workload import Workload

LIMIT_TFLOP_PER_S = 700.0
Slowness = Mapping[str, float | Callable[[Workload], float | None]]
RIVALS: Slowness = {"hopper": 1.0, "sdpa_cudnn": 1.1, "flash_attn_4": 1.05}


def timed(workload: Workload, name: str, ms: float, **changes: Any) -> Result:
    """An ok forward of so many milliseconds; sustained 1.1 times that, a joule for each of them."""
    limit_ms = workload.flops("forward") / LIMIT_TFLOP_PER_S / 1e9
    m = factories.measurement("forward", ms * 1e3, 12.0)
    m = replace(
        m, sustained_ms_median=1.1 * ms, joules_per_call=ms, tflop_per_s=workload.flops("forward") / ms / 1e9,
        limit_ms=limit_ms, limit_term="matrix", vs_limit=limit_ms / ms,
        **{key: value for key, value in changes.items() if key not in ("verdicts",)},
    )  # fmt: skip
    return Result(
        str(workload), name, "ok", check=factories.check(backward=False), forward=m, ours=name.startswith("hopper"),
        verdicts=changes.get("verdicts", ()),
    )  # fmt: skip


def rival_run(workloads: Sequence[Workload], slowness: Slowness = RIVALS, **changes: Any) -> Run:
    """Each workload at half the limit, times each one's slowness; None skips it there.

    ``hopper`` has a verdict against the best rival that is not ours.
    """
    results = []
    for workload in workloads:
        half = 2 * workload.flops("forward") / LIMIT_TFLOP_PER_S / 1e9
        times = {}
        for name, slow in slowness.items():
            factor = slow(workload) if callable(slow) else slow
            if factor is None:
                reasons = {"forward": ("takes another head dim",)}
                results.append(Result(str(workload), name, "skipped", reasons=reasons))
            else:
                times[name] = half * factor
        rivals = {name: ms for name, ms in times.items() if not name.startswith("hopper")}
        best = min(rivals, key=lambda name: rivals[name], default=None)
        for name, ms in times.items():
            verdicts = (_verdict(ms / rivals[best], best),) if name == "hopper" and best else ()
            results.append(timed(workload, name, ms, verdicts=verdicts))
    made = factories.blog_run(
        workloads=tuple(str(workload) for workload in workloads), results=tuple(results), modes=("forward",),
        command="attnscope compare grid",
    )  # fmt: skip
    return replace(made, **changes)


def _verdict(ratio: float, rival: str) -> Verdict:
    word = "same" if 0.99 < ratio < 1.01 else "faster" if ratio < 1 else "slower"
    return Verdict("forward", "hopper", rival, word, ratio, ratio * 0.99, ratio * 1.01, ratio)
