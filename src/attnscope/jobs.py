"""What a worker process does for the sweep: survey, try, check, limits, measure, profile. Each returns plain records.

Called by :mod:`attnscope.sweeping` through :mod:`attnscope.worker`; reads workloads and names, writes records. State
that several calls share (references, inputs of the current workload) lives in this module, once a process.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnscope import implementation as registry
from attnscope.checking import ReferenceCache, check_implementation
from attnscope.device import Device, Environment, available_memory_bytes, find_device, read_environment
from attnscope.errors import CheckFailed
from attnscope.implementation import Implementation, Prepared, safe_reasons
from attnscope.inputs import Inputs, make_inputs, refuse_too_large
from attnscope.measuring import (
    Contestant,
    MeasureFailed,
    MeasureOptions,
    measure_limits,
    measure_rivals,
    rotation_count,
)
from attnscope.profiling import kernel_names, profile_call
from attnscope.records import CheckResult, Limits, Measurement, Verdict
from attnscope.spending import Ledger
from attnscope.units import format_bytes
from attnscope.workload import DIRECTIONS, Workload

Report = Callable[[Any], None]
SCORE_COPIES = {"forward": 4, "backward": 6}  # score-sized tensors that an unfused implementation holds at its peak


@dataclass(frozen=True)
class Ask:
    """What one workload's sweep asks of a worker. ``references`` maps names to ``module:Class`` (None: in process)."""

    workload: Workload
    device: Device
    seed: int
    directions: tuple[str, ...]
    references: dict[str, str | None]
    named: frozenset[str] = frozenset()
    quick: bool = False


@dataclass(frozen=True)
class Tried:
    """What preparing one implementation and its first call in each direction took."""

    prepare_s: float
    first_call_ms: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Checked:
    """What checking one implementation brought."""

    check: CheckResult
    kernels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    mismatch: str | None = None
    ran: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What measuring the survivors of one workload and direction brought."""

    measurements: dict[str, Measurement] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    visible_pairs: int = 0


def start(kind: str | None, *, report: Report) -> tuple[Device, Environment]:
    """The device and environment as this process sees them."""
    del report
    device = find_device(kind)
    if device.kind == "cuda":
        import torch

        torch.backends.cudnn.version()  # loads the library, so that its path can be named
    return device, read_environment()


def survey(ask: Ask, *, report: Report) -> dict[str, dict[str, list[str]]]:
    """name -> direction -> reasons why it cannot run.

    Raises:
        DeviceError: the workload's tensors do not fit in memory at all.
    """
    del report
    _forget()
    refuse_too_large(ask.workload, ask.device, factor=2.0)
    return {name: reasons_of(find_asked(ask, name), ask) for name in ask.references}


def first_calls(ask: Ask, name: str, directions: tuple[str, ...], *, report: Report) -> Tried:
    """Prepare and call once in each direction, both timed, while nothing else uses the device. Kept for the check."""
    report(("prepare", name))
    ledger = Ledger()
    inputs = inputs_of(ask)
    with global_state_kept():
        ledger.begin(name, "prepare")
        started = time.perf_counter()
        prepared = find_asked(ask, name).prepare(ask.workload, ask.device)
        prepare_s = time.perf_counter() - started
        ledger.begin(name, "first_call")
        first = {direction: _first_call_ms(prepared, inputs, direction, ask.device) for direction in directions}
        ledger.end()
    _state.setdefault("tried", {})[name] = prepared
    return Tried(prepare_s, first, ledger.seconds[name])


def check(ask: Ask, name: str, directions: tuple[str, ...], *, report: Report) -> Checked:
    """Check against float64, and name the kernels that ran."""
    report(("check", name))
    with global_state_kept():
        return _check(ask, name, directions)


def forget(*, report: Report) -> None:
    """Give back all memory that the last workload held, so that the other process finds it free."""
    del report
    _forget()


@contextlib.contextmanager
def global_state_kept() -> Iterator[None]:
    """What an implementation sets for all of torch must not fall on the next one."""
    import torch

    kept = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(kept[0])
        torch.set_num_threads(kept[1])
        torch.set_grad_enabled(kept[2])
        torch.set_float32_matmul_precision(precision)
        if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it imports torch's compiler
            torch.use_deterministic_algorithms(deterministic)


def _check(ask: Ask, name: str, directions: tuple[str, ...]) -> Checked:
    implementation, inputs = find_asked(ask, name), inputs_of(ask)
    ledger, cache = Ledger(), _state.setdefault("cache", ReferenceCache())
    ledger.begin(name, "check")
    prepared, spent_s = prepared_for(ask, name, "tried"), cache.spent_s
    result = check_implementation(
        implementation,
        ask.workload,
        ask.device,
        seed=ask.seed,
        directions=directions,
        quick=ask.quick,
        prepared=prepared,
        cache=cache,
    )
    ledger.begin(name, "kernels")
    kernels = {direction: kernel_names(prepared, inputs, direction) for direction in directions}
    ledger.end()
    ledger.add(name, "reference", cache.spent_s - spent_s)
    ledger.add(name, "check", spent_s - cache.spent_s)
    seen = kernels.get("forward") or next(iter(kernels.values()), ())
    ran = implementation.ran(seen) if hasattr(implementation, "ran") else None
    return Checked(result, kernels, _family_mismatch(implementation, kernels, ask), ran, ledger.seconds[name])


def limits(device: Device, options: MeasureOptions, *, report: Report) -> Limits:
    """What the device can do, measured now."""
    del report
    _forget()
    return measure_limits(device, options)


def measure(
    ask: Ask,
    names: Sequence[str],
    direction: str,
    card: Limits,
    options: MeasureOptions,
    first: dict[str, tuple[float | None, float | None]],
    *,
    report: Report,
) -> Measured:
    """Interleave ``names`` in this process. ``first`` holds (prepare_s, first_call_ms) by name.

    Raises:
        MeasureFailed: names the culprit, which the caller leaves out of the next try.
    """
    inputs = inputs_of(ask)
    contestants = []
    for name in names:
        report(("prepare", name))
        try:
            contestants.append(_contestant(ask, name, direction, inputs, *first[name]))
        except Exception as error:
            raise MeasureFailed(name, error) from error
    with grad_mode(direction):
        before = {contestant.name: seeded_result(contestant.call, ask.seed) for contestant in contestants}
        measurements, verdicts = measure_rivals(
            contestants,
            ask.workload,
            ask.device,
            direction,
            card,
            options,
            visible_pairs=inputs.visible_pairs,
            progress=lambda name, stage: report((stage, name)),
            warm=(inputs.q,) if ask.workload.L == 1 else (),  # decode: the keys are cold, the query was just made
        )
        for contestant in contestants:
            report(("compare", contestant.name))
            if not same_results(before[contestant.name], seeded_result(contestant.call, ask.seed)):
                cause = CheckFailed("its result is no longer what it was before it was timed")
                raise MeasureFailed(contestant.name, cause)
    measurements = {name: _remarked(found, prepared_for(ask, name)) for name, found in measurements.items()}
    return Measured(measurements, tuple(verdicts), inputs.visible_pairs)


def _remarked(found: Measurement, prepared: Prepared) -> Measurement:
    """The measurement with what its implementation says of it."""
    remarks = getattr(prepared, "remarks", None)
    return replace(found, notes=(*found.notes, *remarks())) if callable(remarks) else found


def seeded_result(call: Callable[[], Any], seed: int) -> list[Any]:
    """Copies of what a call returns; one that draws dropout draws the same one each time."""
    import torch

    torch.manual_seed(seed)
    return _tensors(call())


def _tensors(result: Any) -> list[Any]:
    """Copies of what a call returned: out, or the gradients."""
    return [tensor.clone() for tensor in (result.tensors().values() if hasattr(result, "tensors") else [result])]


def same_results(before: list[Any], after: list[Any]) -> bool:
    """Alike within 1 % of their norm: sums in another order may differ, a result that was swapped does."""
    return all(
        bool(((b.float() - a.float()).norm() <= 0.01 * b.float().norm()).item())
        for b, a in zip(before, after, strict=True)
    )


def profile(
    ask: Ask, name: str, direction: str, path: str, steps: tuple[int, int, int], compile_: bool, *, report: Report
) -> None:
    """Write the Chrome trace of a few calls to ``path``; ``steps`` are those of wait, warm-up and active."""
    report(("profile", name))
    prepared = prepared_for(ask, name)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    label = f"attnscope/{name}/{direction}"
    profile_call(
        prepared,
        inputs_of(ask),
        direction,
        label=label,
        trace_path=Path(path),
        wait=steps[0],
        warmup=steps[1],
        active=steps[2],
        compile=compile_,
    )


# --- shared by the calls of one process ----------------------------------------------------------------------------

_state: dict[str, Any] = {}


def _forget() -> None:
    """Give back what the last workload held, also what torch's allocator keeps for later."""
    _state.clear()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def inputs_of(ask: Ask) -> Inputs:
    """The inputs of the workload at hand, made once; a new workload drops all that the last one held."""
    key = (ask.workload, ask.device, ask.seed)
    if _state.get("inputs_key") != key:
        _forget()
        _state.update(inputs=make_inputs(ask.workload, ask.device, ask.seed), inputs_key=key)
    return _state["inputs"]


def find_asked(ask: Ask, name: str) -> Implementation:
    """The implementation of that name."""
    reference = ask.references[name]
    return registry.find(name) if reference is None else registry.load_reference(reference)


def prepared_for(ask: Ask, name: str, shelf: str = "prepared") -> Prepared:
    """Prepared once for both directions and the profile: compiling again would cost seconds and change nothing.

    ``shelf`` is ``tried`` in the process that checks, whose objects were timed as they were made.
    """
    inputs_of(ask)  # first, since a new workload's inputs drop what was prepared for the last one
    held: dict[str, Prepared] = _state.setdefault(shelf, {})
    if name not in held:
        held[name] = find_asked(ask, name).prepare(ask.workload, ask.device)
    return held[name]


def reasons_of(implementation: Implementation, ask: Ask) -> dict[str, list[str]]:
    """direction -> why it cannot run, its memory and the patience that ``all`` has with it included."""
    found = {}
    for direction in ask.directions:
        reasons = safe_reasons(implementation, ask.workload, ask.device, direction)
        if not reasons and ask.device.kind in implementation.sheet.by_name and implementation.name not in ask.named:
            reasons = [
                f"takes long to compile on a {ask.device.kind}, so `all` leaves it out there: "
                f"--implementations {implementation.name} runs it"
            ]
        if not reasons and implementation.sheet.materialises_scores:
            need = ask.workload.score_bytes() * SCORE_COPIES[direction]
            free = available_memory_bytes(ask.device)
            if need > free:
                reasons = [f"its score matrices would need about {format_bytes(need)}, {format_bytes(free)} are free"]
        found[direction] = reasons
    return found


def _first_call_ms(prepared: Prepared, inputs: Inputs, direction: str, device: Device) -> float:
    call = direction_call(prepared, inputs, direction)
    synchronise(device)
    with grad_mode(direction):
        started = time.perf_counter()
        call()
        synchronise(device)
        return (time.perf_counter() - started) * 1e3


def direction_call(prepared: Prepared, inputs: Inputs, direction: str) -> Callable[[], object]:
    """The closure that is timed: a forward, or a backward of a forward done before; to be called in ``grad_mode``."""
    if direction == DIRECTIONS[0]:
        return lambda: prepared.forward(inputs).out
    saved = prepared.forward(inputs, save=True).saved
    return lambda: prepared.backward(inputs, saved)


@contextlib.contextmanager
def grad_mode(direction: str) -> Iterator[None]:
    """Where a direction is timed: a forward without gradients.

    It is entered around all calls, not in each one: that would take the host some microseconds, which are not the
    implementation's.
    """
    import torch

    with torch.set_grad_enabled(direction != DIRECTIONS[0]):
        yield


def _contestant(
    ask: Ask, name: str, direction: str, inputs: Inputs, prepare_s: float | None, first_call_ms: float | None
) -> Contestant:
    implementation, prepared = find_asked(ask, name), prepared_for(ask, name)
    return Contestant(
        name=name,
        call=direction_call(prepared, inputs, direction),
        # made when they are needed: a backward's saved tensors are large, and a capture wants its forward on its stream
        rotating_calls=lambda: [direction_call(prepared, copy, direction) for copy in _rotation(ask, inputs)],
        capturable=implementation.sheet.cuda_graph,
        compute=implementation.sheet.compute_precision(ask.workload.dtype),
        prepare_s=prepare_s,
        first_call_ms=first_call_ms,
        workspace_bytes=workspace_bytes(prepared, direction),
        ours=implementation.sheet.ours,
    )


def workspace_bytes(prepared: Prepared, direction: str) -> int | None:
    """What it holds for ``direction`` as its optional ``workspace_bytes`` says: a number, or a mapping by direction."""
    held = getattr(prepared, "workspace_bytes", None)
    found = held.get(direction) if isinstance(held, Mapping) else held
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _rotation(ask: Ask, inputs: Inputs) -> list[Inputs]:
    """Enough copies of the inputs to exceed the cache when calls go through them in turn."""
    key = (_state["inputs_key"], "rotation")
    if _state.get("rotation_key") != key:
        count = rotation_count(ask.workload, ask.device)
        _state.update(rotation=[inputs, *(inputs.clone() for _ in range(count - 1))], rotation_key=key)
    return _state["rotation"]


def synchronise(device: Device) -> None:
    """Wait for a GPU; a CPU call is done when it returns."""
    if device.kind == "cuda":
        import torch

        torch.cuda.synchronize(device.index)


def _family_mismatch(implementation: Implementation, kernels: dict[str, tuple[str, ...]], ask: Ask) -> str | None:
    """A sentence where what ran is not of the family that the sheet claims; without a score nothing need run."""
    sheet, device_kind = implementation.sheet, ask.device.kind
    if not ask.workload.visible_pairs():
        return None
    for direction, seen in kernels.items():
        if not seen:
            continue
        shown = ", ".join(dict.fromkeys(name[:80] for name in seen[:6]))
        for pattern in sheet.kernels.get(device_kind, ()):
            if not any(re.search(pattern, name) for name in seen):
                return f"{direction} is not what it claims: nothing that ran matches {pattern!r}; ran: {shown}"
        for pattern in sheet.kernels_absent.get(device_kind, ()):
            if bad := [name for name in seen if re.search(pattern, name)]:
                return f"{direction} is not what it claims: {bad[0][:80]!r} ran, which it must not"
    return None
