"""Stages 3 and 4 for the CUDA ladder: every rung at every block size checked, then timed whole and part by part.

Reads workloads, writes LadderRun (JSON). Uses the project's own check and stopwatch; what is shown of it is in
:mod:`attnscope.ladder_views`. Imports torch only inside functions.

Rungs differ by factors of thousands, so they do not take turns as rivals of a comparison do: each is timed on its own,
isolated (caches evicted, host hidden), and its parts in the same way. A part alone finds nothing in the cache that the
part before it left there, so parts may add up to more than the whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnscope.device import Device, Environment, find_device, read_environment
from attnscope.errors import UnknownName, UsageError
from attnscope.records import Limits
from attnscope.suites import SUITES
from attnscope.units import DTYPE_BYTES, median, quantile
from attnscope.workload import Workload

if TYPE_CHECKING:
    from attnscope.cuda import KernelResources
    from attnscope.implementations.cuda_ladder import LadderImplementation
    from attnscope.timers import Timer

ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
DEFAULT_SUITE = {"forward": "gpt2-forward", "backward": "gpt2-backward"}
TIMED_S, MIN_SAMPLES, MAX_SAMPLES = 0.08, 5, 50  # of one thing at one block size
SLOW_MS = 500.0  # a call that takes longer is checked on plain inputs only, and timed at its usual block size only
VERY_SLOW_S = 3.0  # a first call, which also loads libraries
SLOW_SAMPLES = 2
SPIN_US = 300.0
SOFTMAX_PARTS = ("softmax", "softmax backward")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """Isolated times of one thing."""

    time_ms_median: float
    time_ms_p20: float
    time_ms_p80: float
    samples: int


@dataclass(frozen=True)
class LadderRow:
    """One rung at one block size. ``timing`` is None where the check failed or the rung cannot run: then ``reasons``.

    ``block_size`` is 0 where a library chooses its own.
    ``softmax_gb_per_s`` counts what the softmax kernel must move: scores read and weights written over the visible
    triangle (backward: two reads, one write); ``softmax_vs_copy`` is that over the measured copy bandwidth.
    ``workspace_bytes`` is what a library's plan asked for beside inputs and outputs; None where there is no such plan.
    """

    rung: str
    implementation: str
    block_size: int
    workload: str
    check: str = ""
    passed: bool = False
    reasons: tuple[str, ...] = ()
    timing: Timing | None = None
    parts: dict[str, Timing] = field(default_factory=dict)
    prepare_s: float | None = None
    limit_ms: float | None = None
    limit_term: str | None = None
    vs_limit: float | None = None
    softmax_gb_per_s: float | None = None
    softmax_vs_copy: float | None = None
    workspace_bytes: int | None = None
    note: str = ""


@dataclass(frozen=True)
class LadderRun:
    """One direction of the ladder on one card."""

    direction: str
    workload: str
    device: Device
    environment: Environment
    limits: Limits
    rows: tuple[LadderRow, ...]
    upper_triangle_ms: float | None = None

    def best(self) -> dict[str, LadderRow]:
        """The fastest block size of each rung that was timed, in the ladder's order."""
        found: dict[str, LadderRow] = {}
        for row in self.rows:
            kept = found.get(row.rung)
            if row.timing is None:
                continue
            if kept is None or kept.timing is None or row.timing.time_ms_median < kept.timing.time_ms_median:
                found[row.rung] = row
        return found


@dataclass(frozen=True)
class CompiledKernel:
    """What ``attnscope ladder --compile-only`` tells of one kernel."""

    rung: str
    source: str
    defines: str
    architecture: str
    kernel: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def find_rungs(direction: str, selection: str | None, *, claims: bool = False) -> list[LadderImplementation]:
    """The rungs that a comma-separated selection (``v1,v7``) names, in the ladder's order; all without one.

    With ``claims``, backward also holds the variants that settle what the article claims of V3 and V4.

    Raises:
        UnknownName: a name is no rung of that direction.
        UsageError: the direction is neither forward nor backward.
    """
    from attnscope.implementations.cuda_ladder import RUNGS, all_rungs, claim_variants

    if direction not in RUNGS:
        raise UsageError(f"direction must be forward or backward, got {direction!r}\nhint: attnscope ladder forward")
    rungs = [rung() for rung in all_rungs(direction)]
    if claims and direction == "backward":
        rungs += claim_variants()
    if selection is None:
        return rungs
    known = {rung.rung: rung for rung in rungs} | {rung.name: rung for rung in rungs}
    wanted = [part.strip() for part in selection.split(",") if part.strip()]
    for name in wanted:
        if name not in known:
            raise UnknownName("rung", name, [rung.rung for rung in rungs])
    chosen = {known[name].name for name in wanted}
    return [rung for rung in rungs if rung.name in chosen]


def parse_block_sizes(text: str | None) -> tuple[int, ...] | None:
    """``"32,64"`` as numbers; None for all. Raises UsageError."""
    from attnscope.implementations.cuda_ladder import BLOCK_SIZES

    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or any(not part.isdigit() or int(part) not in BLOCK_SIZES for part in parts):
        allowed = ", ".join(map(str, BLOCK_SIZES))
        raise UsageError(f"block sizes must be among {allowed}, got {text!r}\nhint: e.g. --block-sizes 64,256")
    return tuple(int(part) for part in parts)


def workload_for(rung: LadderImplementation, workload: Workload, device: Device) -> Workload:
    """The workload as that rung can take it: 16-bit rungs get bf16 (fp16 on older cards), V6 heads' order."""
    changes: dict[str, object] = {}
    if workload.dtype not in rung.sheet.dtypes:
        old = device.capability is not None and device.capability < (8, 0)
        changes["dtype"] = "fp16" if old else "bf16"
    if workload.layout not in rung.sheet.layouts:
        changes["layout"] = sorted(rung.sheet.layouts)[0]
    return workload.replace(**changes) if changes else workload


def run_ladder(
    direction: str,
    *,
    rungs: str | None = None,
    block_sizes: str | None = None,
    workload: str | None = None,
    device: str | None = None,
    quick: bool = False,
    claims: bool = False,
    progress: Progress = lambda message: None,
) -> LadderRun:
    """Check and time rungs on this machine's card.

    Raises:
        UsageError: an argument is not what it must be.
        DeviceError: there is no such device.
    """
    chosen, sizes = find_rungs(direction, rungs, claims=claims), parse_block_sizes(block_sizes)
    problem = Workload.parse(workload) if workload else SUITES[DEFAULT_SUITE[direction]][0]
    found = find_device(device)
    session = _Session(direction, found, quick, progress)
    rows: list[LadderRow] = []
    for rung in chosen:
        rows += session.rung_rows(rung, problem, sizes)
    return LadderRun(
        direction,
        str(problem),
        found,
        read_environment(),
        session.limits,
        tuple(rows),
        session.upper_triangle_ms(problem) if found.kind == "cuda" else None,
    )


def compile_ladder(
    architecture: str, direction: str | None = None, rungs: str | None = None, head_dim: int = 64
) -> list[CompiledKernel]:
    """Compile every kernel of every rung, or of some of one direction, for one architecture; needs no GPU.

    Kernels that stand elsewhere (cuDNN's, and the last rung's) are left out.
    Rungs that need a newer architecture than that, or another, are left out, as their reasons say.

    Raises:
        UsageError: rungs are named without their direction.
        UnknownName: a name is no rung of that direction.
        PrepareFailed: one does not compile, or NVRTC is missing.
    """
    from attnscope import cuda
    from attnscope.implementations.cuda_ladder import FOLDER, RUNGS

    if rungs is not None and direction is None:
        raise UsageError("--rungs needs a direction, got none\nhint: attnscope ladder forward --rungs v1")
    number = int("".join(c for c in architecture if c.isdigit()) or 0)
    card = Device("cuda", architecture, capability=(number // 10, number % 10))
    found = []
    for way in (direction,) if direction else tuple(RUNGS):
        for rung in find_rungs(way, rungs):
            if rung.sheet.device_reasons(card):
                continue
            exact = architecture + "a" if rung.sheet.below_capability else architecture
            for source, defines in rung.kernel_sources(head_dim, rung.default_block_size):
                cubin = cuda.compile_source(FOLDER / source, exact, defines)
                shown = " ".join(f"{name}={value}" for name, value in sorted(defines.items()))
                found += [_compiled(rung, source, shown, exact, one) for one in cubin.resources]
    return found


def _compiled(
    rung: LadderImplementation, source: str, defines: str, architecture: str, one: KernelResources
) -> CompiledKernel:
    spilled = one.spill_store_bytes + one.spill_load_bytes
    return CompiledKernel(
        rung.name, source, defines, architecture, one.name, one.registers, spilled, one.stack_bytes, one.shared_bytes
    )


class _Session:
    """One run's shared things: limits, stopwatch, references; a rung at a time, so that its buffers can go."""

    def __init__(self, direction: str, device: Device, quick: bool, progress: Progress) -> None:
        from attnscope.checking import ReferenceCache
        from attnscope.limits import measure_limits
        from attnscope.pacing import MeasureOptions
        from attnscope.timers import make_timer

        self.direction, self.device, self.quick, self.progress = direction, device, quick, progress
        self.cache = ReferenceCache()
        progress("limits of the card")
        self.limits = measure_limits(device, MeasureOptions(quick=quick))
        self.timer: Timer = make_timer(device)

    def rung_rows(
        self, rung: LadderImplementation, problem: Workload, sizes: Sequence[int] | None
    ) -> Iterable[LadderRow]:
        """A rung at each block size; a slow one only at its usual, unless sizes were asked for."""
        from attnscope.implementations.cuda_ladder import OWN_BLOCK_SIZE

        workload = workload_for(rung, problem, self.device)
        reasons = rung.reasons_unsupported(workload, self.device, self.direction)
        if reasons:
            return [LadderRow(rung.rung, rung.name, rung.default_block_size, str(workload), reasons=tuple(reasons))]
        usual = rung.default_block_size
        if usual == OWN_BLOCK_SIZE:
            sizes = None
        wanted = [size for size in sizes or rung.block_sizes if size in rung.block_sizes]
        if sizes is None:  # the usual one first: it tells whether the rung is slow
            wanted = [usual, *(size for size in wanted if size != usual)]
        rows: list[LadderRow] = []
        for size in wanted:
            row = self._row(rung, workload, size)
            rows.append(row)
            self._release()
            if sizes is None and row.timing is not None and row.timing.time_ms_median > SLOW_MS:
                break
        return sorted(rows, key=lambda row: row.block_size)

    def upper_triangle_ms(self, problem: Workload) -> float | None:
        """What writing the zeros above the diagonal costs each time: one float matrix of the workload's heads."""
        from attnscope.implementations.cuda_ladder import zero_above_diagonal

        self._release()
        return self._time(zero_above_diagonal(problem, self.device)).time_ms_median

    def _row(self, rung: LadderImplementation, workload: Workload, block: int) -> LadderRow:
        from attnscope.checking import check_implementation
        from attnscope.inputs import make_inputs

        self.progress(f"{rung.name}, block size {block}")
        started = time.perf_counter()
        prepared = rung.prepare(workload, self.device, block_size=block)
        prepare_s = time.perf_counter() - started
        inputs = make_inputs(workload, self.device)
        whole, parts = self._calls(prepared, inputs)
        first = self._first_ms(whole)
        slow = first > SLOW_MS
        result = check_implementation(
            rung,
            workload,
            self.device,
            directions=(self.direction,),
            kinds=("plain",) if slow else ("plain", "needles", "large"),
            quick=True,
            repeat=not slow,
            prepared=prepared,
            cache=self.cache,
        )
        common: dict[str, Any] = {
            "rung": rung.rung,
            "implementation": rung.name,
            "block_size": block,
            "workload": str(workload),
            "check": f"{result.grade}: {result.message}",
            "passed": result.passed,
            "prepare_s": prepare_s,
            "workspace_bytes": getattr(prepared, "workspace_bytes", None),
        }
        if not result.passed:
            return LadderRow(**common, reasons=(f"its check failed: {result.message}",))
        note = "slow: checked on plain inputs and not for equal runs, few samples" if slow else ""
        timing = self._time(whole, known_ms=first)
        timed = {name: self._time(call, known_ms=first if slow and name in SOFTMAX_PARTS else None)
                 for name, call in parts.items()}  # fmt: skip
        return LadderRow(
            **common, timing=timing, parts=timed, note=note, **self._against(rung, workload, inputs, timing, timed)
        )

    def _first_ms(self, call: Callable[[], object]) -> float:
        """How long a call takes, roughly: one that takes seconds is not called again to know it better."""
        started = time.perf_counter()
        call()
        self.timer.synchronize()
        seconds = time.perf_counter() - started
        return seconds * 1e3 if seconds > VERY_SLOW_S else self.timer.time_call(call, SPIN_US).ms

    def _calls(self, prepared: Any, inputs: Any) -> tuple[Callable[[], object], dict[str, Callable[[], object]]]:
        """The whole operation, and each of its parts on buffers of their own."""
        from attnscope.implementations.cuda_ladder import empty_gradients

        if self.direction == "forward":
            steps = prepared.steps(inputs, prepared.new_output(inputs))
            return (lambda: prepared.forward(inputs)), {step.name: step.run for step in steps}
        saved = prepared.forward(inputs, save=True).saved
        steps = prepared.steps(inputs, saved, empty_gradients(inputs))
        return (lambda: prepared.backward(inputs, saved)), {step.name: step.run for step in steps}

    def _against(
        self,
        rung: LadderImplementation,
        workload: Workload,
        inputs: Any,
        timing: Timing,
        parts: dict[str, Timing],
    ) -> dict[str, Any]:
        from attnscope.limits import limit_of

        compute = rung.sheet.compute_precision(workload.dtype)
        limit_ms, term = limit_of(workload, self.direction, self.limits, inputs.visible_pairs, compute)
        found: dict[str, Any] = {"limit_ms": limit_ms, "limit_term": term}
        if limit_ms is not None:
            found["vs_limit"] = limit_ms / timing.time_ms_median
        softmax = next((parts[name] for name in SOFTMAX_PARTS if name in parts), None)
        if softmax is not None:
            rate = softmax_bytes(workload, self.direction, compute) / softmax.time_ms_median / 1e6
            found["softmax_gb_per_s"] = rate
            if self.limits.copy_gb_per_s:
                found["softmax_vs_copy"] = rate / self.limits.copy_gb_per_s
        return found

    def _time(self, call: Callable[[], object], known_ms: float | None = None) -> Timing:
        """Isolated times of ``call``. Where one call is known to be slow, there is no warm-up and few samples."""
        if known_ms is None:
            call()
            known_ms = self.timer.time_call(call, SPIN_US).ms
        if known_ms > SLOW_MS:
            count = SLOW_SAMPLES
        else:
            budget_ms = TIMED_S * 1e3 / (3 if self.quick else 1)
            count = int(min(max(budget_ms / max(known_ms, 1e-3), MIN_SAMPLES), MAX_SAMPLES))
        times = [self.timer.time_call(call, SPIN_US).ms for _ in range(count)]
        return Timing(median(times), quantile(times, 0.2), quantile(times, 0.8), count)

    def _release(self) -> None:
        if self.device.kind == "cuda":
            import torch

            torch.cuda.empty_cache()


def softmax_bytes(workload: Workload, direction: str, compute: str) -> int:
    """What a softmax kernel between two products must move: the visible triangle, once in and once out; backward twice
    in and once out. Scores are 16-bit where the rung computes in bf16 or fp16, else fp32."""
    size = DTYPE_BYTES["bf16"] if compute in ("bf16", "fp16") else DTYPE_BYTES["fp32"]
    return (2 if direction == "forward" else 3) * size * workload.H * workload.visible_pairs()
