"""Who watches the check: it must kill every saboteur and spare every right kernel."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from attnscope.checking import ReferenceCache, check_implementation
from attnscope.device import find_device
from attnscope.inputs import INPUT_KINDS
from attnscope.workload import Workload
from saboteurs import (
    ALIBI,
    BIAS_ROW,
    BIASED,
    CAPPED,
    DEAD,
    DROPPED,
    FULL,
    GROUPED,
    HALF,
    LENGTHS,
    LONG,
    MASKED,
    PACKED,
    PADDED,
    PLAIN,
    SINGLE,
    SINKS,
    STYLES,
    WINDOW,
    Mutant,
    Style,
    Tiled,
    all_mutants,
)  # fmt: skip

CPU = find_device("cpu")
WORKLOADS = (
    PLAIN, FULL, HALF, SINGLE, GROUPED, LONG, WINDOW, LENGTHS, PACKED, CAPPED, BIASED, BIAS_ROW, SINKS, ALIBI, DROPPED,
    MASKED, PADDED, DEAD,
)  # fmt: skip
EVERY_NTH = 10
LEAST_KILLED = 0.99


def is_killed(mutant: Mutant, cache: ReferenceCache) -> bool:
    """Most die on one kind of inputs, which is part of the whole check; only who survives it sees them all."""
    workload = Workload.parse(mutant.workload)
    return any(
        not check_implementation(mutant.implementation(), workload, CPU, kinds=kinds, cache=cache, quick=True).passed
        for kinds in (("plain",), INPUT_KINDS)
    )


def survivors(mutants: list[Mutant]) -> list[Mutant]:
    found = []
    ordered = sorted(mutants, key=lambda m: m.workload)
    for _, group in itertools.groupby(ordered, key=lambda m: m.workload):
        cache = ReferenceCache()
        found += [mutant for mutant in group if not is_killed(mutant, cache)]
    return found


def report(mutants: list[Mutant], left: list[Mutant]) -> str:
    killed = len(mutants) - len(left)
    return f"{killed} of {len(mutants)} saboteurs killed, {killed / len(mutants):.1%}" + "".join(
        f"\n  survived: {mutant}" for mutant in left
    )


def test_there_are_more_than_200_saboteurs_of_every_kind():
    mutants = all_mutants()
    assert len(mutants) > 200
    assert len({str(mutant) for mutant in mutants}) == len(mutants)
    assert {m.workload for m in mutants} > set(WORKLOADS)


def test_a_sample_of_the_saboteurs_is_killed(capsys):
    mutants = all_mutants()[::EVERY_NTH]
    left = survivors(mutants)
    with capsys.disabled():
        print(f"\n{report(mutants, left)}")
    assert len(mutants) >= 40 and not left


@pytest.mark.slow
def test_all_saboteurs_are_killed(capsys):
    mutants = all_mutants()
    left = survivors(mutants)
    with capsys.disabled():
        print(f"\n{report(mutants, left)}")
    assert 1 - len(left) / len(mutants) >= LEAST_KILLED


def test_right_kernels_of_every_style_pass():
    cache = ReferenceCache()
    for name, style in STYLES.items():
        result = check_implementation(Tiled(style), Workload.parse(GROUPED), CPU, cache=cache, quick=True)
        assert result.grade == "tight", f"{name}: {result.message}"


@pytest.mark.parametrize("text", WORKLOADS)
def test_a_right_kernel_passes_every_workload(text):
    result = check_implementation(Tiled(Style(keys=48, exp2=True)), Workload.parse(text), CPU, quick=True)
    assert result.grade == "tight", result.message


@pytest.mark.slow
@pytest.mark.parametrize("text", WORKLOADS)
def test_right_kernels_never_fail(text):
    factors = defaultdict(float)
    cache = ReferenceCache()
    for name, style in STYLES.items():
        result = check_implementation(Tiled(style), Workload.parse(text), CPU, seed=1, cache=cache, quick=True)
        assert result.grade == "tight", f"{name}: {result.message}"
        factors[name] = max(factors[name], result.factor)
    assert max(factors.values()) < 1
