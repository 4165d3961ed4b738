"""The records that every stage hands to the next, and their JSON Lines file.

Everyone may import this module; it imports no stage. A records file holds one ``run`` line, then one line per
``limits`` and ``result``; every line carries ``record`` and ``schema_version``. Units are suffixes; missing is None.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from attnscope.device import Device, Environment
from attnscope.errors import RecordError

SCHEMA_VERSION = 1
STATUSES = ("ok", "approximate", "skipped", "check_failed", "failed")
GRADES = ("tight", "loose", "approximate", "failed")
MEASURED_STATUSES = ("ok", "approximate")
VERDICT_WORDS = ("faster", "slower", "same", "too close to call")
LIMIT_TERMS = ("matrix", "exponentials", "bandwidth", "launch")


@dataclass(frozen=True)
class TensorCheck:
    """One tensor of one input kind against float64.

    ``row_rel_error_max`` is the largest row error on its condition scale, ``error_budget`` what that row was allowed;
    ``slope`` is |<x,r>/<r,r> - 1|; ``rms_ratio`` the RMS error over the twin's. ``worst`` names the worst row.
    """

    tensor: str
    kind: str
    passed: bool
    row_rel_error_max: float | None
    error_budget: float | None
    slope: float | None = None
    rms_ratio: float | None = None
    worst: str | None = None
    message: str = ""


@dataclass(frozen=True)
class CheckResult:
    """Whether an implementation is right on a workload, and by how much.

    ``row_rel_error_max`` and ``error_budget`` are those of the tensor nearest its budget (``factor`` is their ratio). A
    loose or approximate one is told against the tight budget here, so that its factor may exceed 1.
    ``heads_checked`` of ``heads_total`` (batch, head) pairs were compared, all their rows, on some kind of inputs.
    """

    passed: bool
    grade: str
    row_rel_error_max: float | None
    error_budget: float | None
    factor: float | None
    tensors: tuple[TensorCheck, ...]
    directions: tuple[str, ...]
    seed: int
    heads_checked: int
    heads_total: int
    message: str = ""
    deterministic: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.grade in GRADES, f"grade must be one of {', '.join(GRADES)}, got {self.grade!r}")
        _require(self.passed == (self.grade != "failed"), f"grade {self.grade!r} contradicts passed={self.passed}")
        _require(self.passed <= all(t.passed for t in self.tensors), "a check cannot pass with a tensor that failed")
        _require(not self.passed or bool(self.tensors), "a check that compared no tensor cannot pass")


@dataclass(frozen=True)
class Measurement:
    """How fast one direction of one implementation is, and how noisy.

    ``time_ms_*`` is isolated: on a GPU the time between events around one call, L2 evicted, host gaps hidden; on a CPU
    wall time. ``sustained_ms_median`` is the mean call time of one-second blocks. ``limit_ms`` is the largest term of
    the limits measured in the same run, ``vs_limit`` = limit_ms / time_ms_median. ``noise_fraction`` is half the way
    from p20 to p80 over the median. ``first_call_ms`` is the first in the process that checks, where an implementation
    before it may have started a library or built a plan that it shares. ``workspace_mib`` is scratch memory that the
    implementation holds from ``prepare`` on, beyond ``peak_memory_mib`` of a call; None where it names none.
    ``wall_us_median`` is the host's time for one call of what ``prepare`` returned, on a GPU alone: it is not waited
    for, and its queue is never full. ``notes`` say what a reader of a number must know, or why one is missing.
    """

    direction: str
    time_ms_median: float
    time_ms_p20: float
    time_ms_p80: float
    noise_fraction: float
    samples: int
    sustained_ms_median: float | None = None
    sustained_samples: int | None = None
    joules_per_call: float | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    wall_us_median: float | None = None
    graph_ms_median: float | None = None
    graph_is_warm: bool | None = None
    first_call_ms: float | None = None
    prepare_s: float | None = None
    peak_memory_mib: float | None = None
    workspace_mib: float | None = None
    tflop_per_s: float | None = None
    gb_per_s: float | None = None
    limit_ms: float | None = None
    limit_term: str | None = None
    vs_limit: float | None = None
    threads: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(
            self.direction in ("forward", "backward"), f"direction must be forward or backward, got {self.direction!r}"
        )
        _require(self.time_ms_median > 0, f"time_ms_median must be above 0, got {self.time_ms_median}")
        ordered = self.time_ms_p20 <= self.time_ms_median <= self.time_ms_p80
        _require(ordered, "times must be ordered p20 <= median <= p80")
        _require(self.samples > 0, f"samples must be above 0, got {self.samples}")
        for name, value in vars(self).items():  # JSON has no NaN and no infinity: they would be read back as missing
            finite = not isinstance(value, float) or math.isfinite(value)
            _require(finite, f"{name} must be finite, or None where it is missing, got {value}")
        _require(
            self.limit_term in (None, *LIMIT_TERMS), f"limit_term must be one of {LIMIT_TERMS}, got {self.limit_term!r}"
        )


@dataclass(frozen=True)
class Verdict:
    """One implementation against another on paired samples of one run; ``ratio`` is time / rival's time.

    ``word`` is faster, slower, same (the interval lies within ± 1 %), or ``too close to call``; both figures
    (isolated, sustained) must agree where both exist.
    """

    direction: str
    implementation: str
    rival: str
    word: str
    ratio: float
    ratio_low: float
    ratio_high: float
    sustained_ratio: float | None = None

    def __post_init__(self) -> None:
        _require(self.word in VERDICT_WORDS, f"verdict must be one of {', '.join(VERDICT_WORDS)}, got {self.word!r}")


@dataclass(frozen=True)
class KernelEvent:
    """One GPU kernel, copy or fill of one call (on a CPU: one op), in order.

    ``start_us`` counts from the call's first event. ``unit`` is tensor core, CUDA core, memory or unknown,
    ``unit_rule`` what decided it. ``op`` is the torch op that launched it. Occupancies are percent of the resident
    warps that a multiprocessor holds: as the trace shows it, and recomputed with the opt-in limit of shared memory.
    """

    direction: str
    name: str
    start_us: float
    duration_us: float
    role: str
    op: str | None = None
    family: str | None = None
    dtype: str | None = None
    tile: str | None = None
    architecture: str | None = None
    unit: str = "unknown"
    unit_rule: str = ""
    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    registers: int | None = None
    shared_memory_bytes: int | None = None
    occupancy_shown: float | None = None
    occupancy: float | None = None


@dataclass(frozen=True)
class OpTime:
    """One row of the profiler's table: an op or kernel name with its times over the active steps."""

    name: str
    calls: int
    self_cpu_us: float
    cpu_us: float
    self_gpu_us: float
    gpu_us: float


@dataclass(frozen=True)
class Profile:
    """What the profiler saw of one direction: figures per call, over ``steps`` active steps.

    ``spilled_kernels`` counts kernels of the warm-up that ended inside the window and are left out.
    """

    direction: str
    label: str
    steps: int
    kernels_per_call: float
    cpu_ops_per_call: float
    gpu_us_per_call: float | None
    cpu_us_per_call: float
    self_gpu_us_total: float | None
    self_cpu_us_total: float
    spilled_kernels: int
    table: tuple[OpTime, ...]
    expected: tuple[str, ...] = ()
    surprises: tuple[str, ...] = ()
    trace: str | None = None


@dataclass(frozen=True)
class Finding:
    """One explained observation: stable id, one sentence, evidence, saving with arithmetic, remedy, confidence."""

    id: str
    sentence: str
    evidence: tuple[str, ...] = ()
    saving_us: float | None = None
    arithmetic: str = ""
    remedy: str = ""
    confidence: str = "high"
    implementation: str | None = None
    workload: str | None = None
    direction: str | None = None


@dataclass(frozen=True)
class Limits:
    """What this card can do, measured in this run. Rates in 1e12 FLOP/s, 1e9 bytes/s, 1e12 exponentials/s.

    ``event_floor_us`` is what an empty pair of events reads, ``launch_floor_us`` the smallest kernel between two; both
    are part of every GPU time and are never subtracted. ``cache_bytes`` is the last level cache, ``sm_clock_mhz`` the
    clock under a matrix product.
    """

    device: str
    matrix_tflop_per_s: dict[str, float] = field(default_factory=dict)
    read_gb_per_s: float | None = None
    copy_gb_per_s: float | None = None
    exponentials_t_per_s: float | None = None
    launch_floor_us: float | None = None
    event_floor_us: float | None = None
    cache_bytes: int | None = None
    sm_clock_mhz: float | None = None
    threads: int | None = None
    source: str = "measured in this run"
    exponentials_source: str | None = None


@dataclass(frozen=True)
class Result:
    """Everything about one implementation on one workload.

    ``status``: ok; approximate (a quantised one, its error on record); skipped (``reasons`` per direction);
    check_failed; failed (``error``). Only ok and approximate may carry a time: a wrong result has no speed.
    ``check_kernels`` names the kernels (on a CPU the ops) seen while checking, ``kernels`` those of the profile.
    ``seconds`` says where the run's time went for this row: prepare, first_call, reference (truth and budgets, on the
    row that was the first to need them), check, kernels; then, of the process that measures, prepare_ahead (during the
    checks), measure_prepare, warm_up, isolated, graph, sustained, compare (results before and after); profile.
    """

    workload: str
    implementation: str
    status: str
    reasons: dict[str, tuple[str, ...]] = field(default_factory=dict)
    check: CheckResult | None = None
    forward: Measurement | None = None
    backward: Measurement | None = None
    check_kernels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    kernels: tuple[KernelEvent, ...] = ()
    profiles: tuple[Profile, ...] = ()
    findings: tuple[Finding, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    error: str | None = None
    note: str | None = None
    ours: bool = False
    comparable: bool = True
    ran: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.status in STATUSES, f"status must be one of {', '.join(STATUSES)}, got {self.status!r}")
        timed = self.forward is not None or self.backward is not None
        passed = self.check is not None and self.check.passed
        _require(not timed or passed, f"{self.implementation}: a time without a passed check cannot be recorded")
        _require(
            not timed or self.status in MEASURED_STATUSES, f"{self.implementation}: status {self.status} carries a time"
        )
        _require(
            self.status not in MEASURED_STATUSES or passed, f"{self.implementation}: {self.status} needs a passed check"
        )
        _require(
            self.status != "skipped" or any(self.reasons.values()), f"{self.implementation}: skipped without a reason"
        )
        _require(self.status != "failed" or bool(self.error), f"{self.implementation}: failed without an error")
        refuted = self.check is not None and not self.check.passed
        _require(
            self.status != "check_failed" or refuted, f"{self.implementation}: check_failed without a check that failed"
        )
        for direction in ("forward", "backward"):
            measured: Measurement | None = getattr(self, direction)
            _require(measured is None or measured.direction == direction, f"{direction} holds another direction's time")
            told = any(verdict.direction == direction for verdict in self.verdicts)
            _require(not told or measured is not None, f"{self.implementation}: a {direction} verdict without a time")
            covered = self.check is not None and direction in self.check.directions
            _require(measured is None or covered, f"{self.implementation}: {direction} is timed but was not checked")

    def measurement(self, direction: str) -> Measurement | None:
        """The measurement of ``forward`` or ``backward``."""
        return self.forward if direction == "forward" else self.backward

    def with_changes(self, **changes: Any) -> Result:
        """A copy with some fields changed, validated anew."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Run:
    """One run of the main job: what ran where, its limits, its results in order."""

    device: Device
    environment: Environment
    created: str
    command: str
    seed: int
    workloads: tuple[str, ...]
    modes: tuple[str, ...] = ("forward", "backward")
    quick: bool = False
    interrupted: bool = False
    limits: Limits | None = None
    results: tuple[Result, ...] = ()

    def for_workload(self, workload: str) -> list[Result]:
        """This run's results of one workload, in order."""
        return [result for result in self.results if result.workload == workload]

    def _repr_html_(self) -> str:
        from attnscope.reporting.notebook import run_html

        return run_html(self)

    def __str__(self) -> str:
        from attnscope.reporting.text import render_run

        return render_run(self)


R = TypeVar("R")


def write_run(run: Run, path: Path) -> None:
    """Write a run as JSON Lines, atomically: a reader sees the old file or the whole new one.

    Raises:
        RecordError: the file cannot be written (full disk, no permission).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            for line in run_lines(run):
                file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror or error}\nhint: free some space, or --out another folder"
        ) from None
    finally:  # also after Ctrl-C; gone already where the write went well
        with contextlib.suppress(OSError):
            temporary.unlink()


def run_lines(run: Run) -> Iterator[bytes]:
    """The run's lines: the run itself, its limits, its results."""
    yield _line("run", replace(run, limits=None, results=()))
    if run.limits is not None:
        yield _line("limits", run.limits)
    for result in run.results:
        yield _line("result", result)


def read_runs(path: Path) -> list[Run]:
    """Every run of a records file, each line validated.

    Raises:
        RecordError: with file and line number, where a line is not what it must be.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RecordError(
            f"cannot read {path}: {error.strerror or error}\nhint: a run.jsonl is written by attnscope compare"
        ) from None
    return parse_runs(lines, str(path))


def parse_runs(lines: Iterable[bytes], where: str) -> list[Run]:
    """Every run in JSON Lines; ``where`` names them in errors. Raises RecordError."""
    runs: list[Run] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        kind, body = _open(line, f"{where}:{number}")
        if kind == "run":
            runs.append(_convert(body, Run, f"{where}:{number}"))
            continue
        if not runs:
            raise RecordError(
                f"{where}:{number}: a {kind} line stands before any run line\nhint: the file's first line is missing"
            )
        if kind == "limits":
            runs[-1] = replace(runs[-1], limits=_convert(body, Limits, f"{where}:{number}"))
        else:
            result = _convert(body, Result, f"{where}:{number}")
            runs[-1] = replace(runs[-1], results=(*runs[-1].results, result))
    if not runs:
        raise RecordError(f"{where} holds no run\nhint: a run.jsonl is written by attnscope compare")
    return runs


def to_builtins(record: Any) -> Any:
    """A record as dicts, lists, numbers and strings."""
    return msgspec.to_builtins(record)


def from_builtins(body: Any, kind: type[R], where: str = "record") -> R:
    """The record that ``body`` (dicts and lists) describes, validated. Raises RecordError."""
    return _convert(body, kind, where)


def _line(kind: str, record: Any) -> bytes:
    return msgspec.json.encode({"record": kind, "schema_version": SCHEMA_VERSION, **msgspec.to_builtins(record)})


def _open(line: bytes, where: str) -> tuple[str, dict[str, Any]]:
    try:
        body = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordError(f"{where}: not JSON: {error}\nhint: a line that breaks off was cut; remove it") from None
    if not isinstance(body, dict) or "record" not in body:
        raise RecordError(
            f"{where}: a line must be a record, an object with record and schema_version\n"
            "hint: a run.jsonl is written by attnscope compare"
        )
    version = body.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise RecordError(f"{where}: schema_version must be {SCHEMA_VERSION}, got {version!r}\nhint: update attnscope")
    if body["record"] not in ("run", "limits", "result"):
        raise RecordError(
            f"{where}: record must be run, limits or result, got {body['record']!r}\nhint: remove the line"
        )
    return body.pop("record"), body


def _convert(body: Any, kind: type[R], where: str) -> R:
    try:
        return msgspec.convert(body, kind)
    except (msgspec.ValidationError, RecordError) as error:
        raise RecordError(f"{where}: {error}\nhint: the line was edited or cut; run attnscope compare again") from None


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise RecordError(sentence)
