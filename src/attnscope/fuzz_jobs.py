"""What a worker process does for ``attnscope fuzz``: draws cases that are not refused, and checks them.

Called by :mod:`attnscope.fuzzing` through :mod:`attnscope.worker`. What makes it quick is left out openly: one kind of
inputs a case where the check takes five, equal runs in one case of sixteen, a shorter spin before each call, and one
process for many cases. Reference, budgets, poisoned memory and the comparison of inputs are those of the check.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from attnscope import implementation as registry
from attnscope.checking import check_implementation
from attnscope.device import Device
from attnscope.fuzz_cases import Case, Outcome, Refusals
from attnscope.guards import SPIN_CYCLES
from attnscope.implementation import Implementation, Sheet, missing_package, safe_reasons
from attnscope.inputs import INPUT_KINDS
from attnscope.jobs import Report, global_state_kept
from attnscope.random_workloads import Space, draw_options, draw_sizes, narrowed, space_of_device
from attnscope.strides import STRIDES
from attnscope.worker import describe
from attnscope.workload import DIRECTIONS, Workload

ATTEMPTS = 300  # workloads that are drawn for one case before it is given up
# A recipe is the options of a workload, for which kernels are compiled; that takes seconds, a check a tenth of one.
SIZES_A_RECIPE = 4  # cases in a row that share a recipe
RECIPES = 1000  # of a seed; those of the first 4000 cases come again, with other sizes
KINDS = (*INPUT_KINDS, "needles")
REPEATED = 1 / 16  # of the cases where determinism is claimed
SHORT_SPIN_CYCLES = SPIN_CYCLES // 10  # about 1 ms; one case in sixteen has the check's own
MOST_CACHED_BYTES = 2**30  # of torch's allocator after a case: what is free there is poisoned before each call
MANY_HEADS = 4096  # of which planting needles would take seconds


@dataclass(frozen=True)
class FuzzAsk:
    """What the cases of one run share. ``reference`` is ``module:Class``, or None for this process's own registry."""

    name: str
    reference: str | None
    device: Device
    seed: int


def reasons_here(ask: FuzzAsk, *, report: Report) -> list[str]:
    """Why the implementation runs no workload at all on this device: a package, or the device itself."""
    del report
    sheet = _find(ask).sheet
    return [reason for reason in map(missing_package, sheet.packages) if reason] + sheet.device_reasons(ask.device)


def run_cases(ask: FuzzAsk, indices: Sequence[int], seconds: float | None, *, report: Report) -> None:
    """Draw and check the cases of those numbers, until ``seconds`` are over.

    Reports ``(index, case or None, refusals)`` before a case and ``(index, outcome)`` after it.
    """
    implementation = _find(ask)
    until = None if seconds is None else monotonic() + seconds
    for index in indices:
        if until is not None and monotonic() > until:
            return
        case, refusals = draw_case(implementation, ask.device, ask.seed, index)
        report((index, case, refusals))
        report((index, Outcome("refused") if case is None else _outcome(implementation, ask.device, case)))
        _let_go(ask.device)


def try_case(ask: FuzzAsk, case: Case, *, report: Report) -> Outcome:
    """Check one case as a run does."""
    del report
    return _outcome(_find(ask), ask.device, case)


def try_whole_check(ask: FuzzAsk, case: Case, *, report: Report) -> Outcome:
    """Check the case's workload and seed as ``attnscope check`` does: every kind of inputs, equal runs."""
    del report
    return _outcome(_find(ask), ask.device, case, whole=True)


def draw_case(implementation: Implementation, device: Device, seed: int, index: int) -> tuple[Case | None, Refusals]:
    """The case of that number, and what was refused on the way to it; None where everything was.

    The first workload is drawn from everything there is, so that refusals tell how much a sheet leaves out; later ones
    from what the sheet claims.
    """
    reasons: Counter[str] = Counter()
    whole = space_of_device(device.kind)
    claimed = claimed_space(whole, implementation.sheet)
    for attempt in range(ATTEMPTS):
        recipe = random.Random(f"{seed}/{index // SIZES_A_RECIPE % RECIPES}/{attempt}")
        sizes = random.Random(f"{seed}/{index}/{attempt}/sizes")
        space = claimed if attempt else whole
        workload = draw_sizes(sizes, space, draw_options(recipe, space))
        against = {d: safe_reasons(implementation, workload, device, d) for d in DIRECTIONS}
        if not all(against.values()):
            return _case_of(workload, sizes, index), Refusals(attempt, dict(reasons))
        reasons.update({_without_numbers(reason): 1 for reason in against[DIRECTIONS[0]]})
    return None, Refusals(ATTEMPTS, dict(reasons))


def claimed_space(space: Space, sheet: Sheet) -> Space:
    """What is left of ``space`` where a sheet's dtypes, head dims, layouts and features are respected."""
    dims = sheet.head_dim_choices or tuple(
        size for size in space.dims if size % sheet.head_dim_multiple == 0 and size <= (sheet.max_head_dim or size)
    )
    features = sheet.features | ({"dropout"} if sheet.draws_dropout else set())
    found = narrowed(
        space,
        dims=dims,
        dtypes=tuple(dtype for dtype in space.dtypes if dtype in sheet.dtypes) or tuple(sorted(sheet.dtypes)),
        layouts=tuple(layout for layout in space.layouts if layout in sheet.layouts),
    )
    return Space(**vars(found) | {"features": features & space.features})


def _case_of(workload: Workload, chance: random.Random, index: int) -> Case:
    kind = chance.choice(KINDS) if workload.B * workload.H <= MANY_HEADS else "plain"
    strides = chance.choice(STRIDES) if chance.random() < 0.5 else "plain"
    return Case(str(workload), chance.randrange(2**16), kind, strides, chance.random() < REPEATED, index)


def _outcome(implementation: Implementation, device: Device, case: Case, *, whole: bool = False) -> Outcome:
    """Check a case; whatever the implementation raises is its outcome."""
    workload = Workload.parse(case.workload)
    directions = tuple(d for d in DIRECTIONS if not safe_reasons(implementation, workload, device, d))
    if not directions:
        return Outcome("refused", "; ".join(safe_reasons(implementation, workload, device, DIRECTIONS[0])))
    draws = workload.dropout > 0 and implementation.sheet.draws_dropout  # then as many draws as the whole check takes
    try:
        with global_state_kept():
            result = check_implementation(
                implementation,
                workload,
                device,
                seed=case.seed,
                directions=directions,
                kinds=INPUT_KINDS if whole else (case.kind,),
                quick=not whole and not draws,
                repeat=whole or case.repeat,
                strides=case.strides,
                spin_cycles=SPIN_CYCLES if whole or case.repeat else SHORT_SPIN_CYCLES,
            )
            _synchronise(device)
    except Exception as error:  # someone else's code
        if _is_lost(device):
            raise
        kind, message, _ = describe(error)
        return Outcome("raised", f"{kind}: {message}", directions)
    return Outcome("passed" if result.passed else "wrong", result.message, directions, result.factor)


def _find(ask: FuzzAsk) -> Implementation:
    return registry.find(ask.name) if ask.reference is None else registry.load_reference(ask.reference)


def _without_numbers(reason: str) -> str:
    return re.sub(r"(?<![A-Za-z\d])\d+(\.\d+)?", "#", reason)


def _synchronise(device: Device) -> None:
    if device.kind == "cuda":
        import torch

        torch.cuda.synchronize(device.index)


def _let_go(device: Device) -> None:
    """Give memory back that the reference of a large case took: other processes share the card."""
    if device.kind == "cuda":
        import torch

        if torch.cuda.memory_reserved(device.index) > MOST_CACHED_BYTES:
            torch.cuda.empty_cache()


def _is_lost(device: Device) -> bool:
    """After a CUDA fault nothing works in this process any more: the parent is to start another."""
    if device.kind != "cuda":
        return False
    try:
        _synchronise(device)
    except RuntimeError:
        return True
    return False
