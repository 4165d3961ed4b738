"""Stage 3: the simplest case that still fails. Pure; reads a Case and a judgement, writes a Case; imports no torch.

Greedy: of the simpler neighbours of a case, tried in a fixed order, the first that still fails is the next case, until
none does or the tries are used up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from attnscope.errors import WorkloadError
from attnscope.fuzz_cases import Case
from attnscope.workload import Workload

PLAIN: dict[str, Any] = {
    "dropout": 0.0, "mask": None, "bias": None, "sinks": False, "alibi": False, "softcap": None, "scale": None,
    "window": None, "lengths": None, "causal": None, "layout": "bhld",
}  # fmt: skip


def shrink(case: Case, fails: Callable[[Case], bool], tries: int) -> Case:
    """The simplest case found that ``fails``, which ``case`` does, with at most ``tries`` calls of it."""
    seen = {case}
    while True:
        for simpler in simpler_cases(case):
            if simpler in seen:
                continue
            if tries <= 0:
                return case
            seen.add(simpler)
            tries -= 1
            if fails(simpler):
                case = simpler
                break
        else:
            return case


def simpler_cases(case: Case) -> Iterator[Case]:
    """The neighbours of ``case`` with an option less or a size made smaller, the boldest steps first."""
    for change in ({"strides": "plain"}, {"kind": "plain"}, {"repeat": False}):
        yield replace(case, **change)
    workload = Workload.parse(case.workload)
    for fields in _simpler_fields(workload):
        try:
            simpler = workload.replace(**fields)
        except WorkloadError:  # lengths without their batch, qkv without equal sizes
            continue
        if simpler != workload:
            yield replace(case, workload=str(simpler))


def _simpler_fields(w: Workload) -> Iterator[dict[str, Any]]:
    yield from ({name: value} for name, value in PLAIN.items())
    if w.packed is not None:
        yield {"packed": None}
        yield from _simpler_packed(w.packed)
    yield {"H_kv": w.H}
    yield {"S": w.L}
    yield {"D_v": w.D}
    if w.causal == "bottom_right":
        yield {"causal": "top_left"}
    for B in _smaller(w.B):
        yield {"B": B, "lengths": None if w.lengths is None else w.lengths[:B]}
        yield {"B": B, "lengths": None if w.lengths is None else w.lengths[-B:]}
    yield from ({"H": w.group * H_kv, "H_kv": H_kv} for H_kv in _smaller(w.H_kv))
    yield from ({"H": w.H_kv * group, "H_kv": w.H_kv} for group in _smaller(w.group))
    if w.packed is None:
        both = w.L == w.S
        for L in _smaller(w.L):
            yield {"L": L, "S": L if both else w.S} | _cut_lengths(w, L if both else w.S)
        for S in () if both else _smaller(w.S):
            yield {"S": S} | _cut_lengths(w, S)
    for D in _smaller(w.D):
        yield {"D": D, "D_v": D if w.D == w.D_v else w.D_v}
    yield from ({"D_v": D_v} for D_v in (_smaller(w.D_v) if w.D != w.D_v else ()))
    yield from ({"window": window} for window in _smaller(w.window or 1))


def _smaller(size: int) -> Iterator[int]:
    """1, a half, and one less, of what is more than 1."""
    yield from dict.fromkeys(number for number in (1, size // 2, size - 1) if 1 <= number < size)


def _cut_lengths(w: Workload, S: int) -> dict[str, Any]:
    return {} if w.lengths is None else {"lengths": tuple(min(length, S) for length in w.lengths)}


def _simpler_packed(packed: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    shorter = [packed[:i] + packed[i + 1 :] for i in range(len(packed))] if len(packed) > 1 else []
    halved = [(*packed[:i], n // 2, *packed[i + 1 :]) for i, n in enumerate(packed) if n > 1]
    for found in (*shorter, *halved):
        yield {"packed": found, "L": sum(found), "S": sum(found)}
