"""What a worker process does for ``attnscope tune``: checks one configuration, or times several in turn.

Called by :mod:`attnscope.tuning` through :mod:`attnscope.worker`. Configurations come as plain values, which the
implementation's own tables read.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from attnscope import implementation as registry
from attnscope.checking import ReferenceCache, check_implementation
from attnscope.device import Device
from attnscope.errors import CheckFailed
from attnscope.implementation import Prepared
from attnscope.inputs import make_inputs
from attnscope.jobs import Report, direction_call, global_state_kept, same_results, seeded_result
from attnscope.measuring import Contestant, MeasureFailed, MeasureOptions, time_in_turn
from attnscope.tunable import Tunable
from attnscope.workload import Workload

FORWARD = "forward"  # what is tuned


@dataclass(frozen=True)
class TuneAsk:
    """What the jobs of one run share. ``reference`` is ``module:Class``, or None for this process's own registry."""

    name: str
    reference: str | None
    device: Device
    seed: int = 0
    quick: bool = False


def check(ask: TuneAsk, workload: Workload, values: dict[str, Any], *, report: Report) -> str:
    """Prepare a configuration and check it as ``attnscope check --quick`` does; "" where it is right, else how not."""
    del report
    _let_go()
    implementation = _find(ask)
    with global_state_kept():
        result = check_implementation(
            implementation,
            workload,
            ask.device,
            seed=ask.seed,
            directions=(FORWARD,),
            quick=True,
            prepared=_prepared(ask, workload, values),
            cache=_cache,
        )
    return "" if result.passed else result.message


def time_candidates(
    ask: TuneAsk, workload: Workload, candidates: Sequence[dict[str, Any]], *, report: Report
) -> list[dict[int, float]]:
    """Isolated times in ms by round, of each candidate in order. Reports the place of the one that runs.

    Raises:
        MeasureFailed: its ``name`` is the culprit's place.
    """
    _let_go()
    inputs = make_inputs(workload, ask.device, ask.seed)
    contestants = []
    for place, values in enumerate(candidates):
        report(place)
        try:
            prepared = _prepared(ask, workload, values)
            contestants.append(Contestant(str(place), direction_call(prepared, inputs, FORWARD)))
        except Exception as error:  # someone else's code
            raise MeasureFailed(str(place), error) from error
    before = [seeded_result(contestant.call, ask.seed) for contestant in contestants]
    times = time_in_turn(
        contestants,
        ask.device,
        MeasureOptions(quick=ask.quick, seed=ask.seed),
        progress=lambda name, stage: report(int(name)),
        warm=(inputs.q,) if workload.L == 1 else (),
    )
    for contestant, result in zip(contestants, before, strict=True):
        if not same_results(result, seeded_result(contestant.call, ask.seed)):
            raise MeasureFailed(contestant.name, CheckFailed("its result is no longer what it was before it was timed"))
    return [times[contestant.name] for contestant in contestants]


_cache = ReferenceCache()


def _prepared(ask: TuneAsk, workload: Workload, values: dict[str, Any]) -> Prepared:
    implementation = _find(ask)
    return implementation.prepare_as(workload, ask.device, implementation.tables.read(values))


def _find(ask: TuneAsk) -> Tunable:
    found = registry.find(ask.name) if ask.reference is None else registry.load_reference(ask.reference)
    return cast(Tunable, found)


def _let_go() -> None:
    """What the last job left in torch's allocator: several processes share a card."""
    import torch

    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
