"""``attnscope tune``: of each class of workloads every candidate checked, the right ones timed in turn, the best kept.

Reads a name and workloads, writes a TuneReport and a table of configurations. Imports no torch itself; workers do. A
class is kept in the table as soon as it is finished, so an interrupted run loses the class that it was at. A candidate
that is wrong, does not compile, crashes or hangs is told and never chosen.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnscope import implementation as registry
from attnscope.device import Device, Environment
from attnscope.errors import DeviceError, UnsupportedWorkload, UsageError
from attnscope.implementation import safe_reasons
from attnscope.progress import Step, Watcher
from attnscope.resuming import Budget
from attnscope.suites import find_workloads
from attnscope.tables import Configuration, Table
from attnscope.tunable import Tunable
from attnscope.tuning_jobs import TuneAsk
from attnscope.tuning_records import Tried, TunedClass, TuneReport, fastest_first, is_faster, measured
from attnscope.worker import START_LIMIT_S, Caller, InProcess, RemoteError, Worker, WorkerFailed
from attnscope.workload import Workload

TIME_LIMIT_S = 300.0  # of preparing and checking one candidate, and of timing one beside the others
MOST_CHECKERS = 8


@dataclass(frozen=True)
class TunePlan:
    """What one run is to do. ``workloads`` empty: those that the implementation names. ``missing``: only classes that
    the table has no measurement of. ``shipped``: the table that ships instead of the user's."""

    name: str
    workloads: tuple[Workload, ...] = ()
    device: str | None = None
    shipped: bool = False
    dry_run: bool = False
    missing: bool = False
    quick: bool = False
    seed: int = 0
    workers: int | None = None
    budget_s: float | None = None
    time_limit_s: float = TIME_LIMIT_S


def make_tune_plan(
    selection: str,
    workloads: Sequence[str] = (),
    *,
    device: str | None = None,
    budget_s: float | None = None,
    time_limit_s: float | None = None,
    workers: int | None = None,
    seed: int = 0,
    **switches: bool,
) -> TunePlan:
    """A validated plan; ``switches`` are TunePlan's.

    Raises:
        UsageError: an argument is not what it must be (also WorkloadError, UnknownImplementation).
    """
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"device must be cpu or cuda, got {device!r}")
    for what, number in (("--budget", budget_s), ("--time-limit", time_limit_s)):
        if number is not None and not 0 < number < 1e6:
            raise UsageError(f"{what} must be above 0 and below a million seconds, got {number:g}")
    for what, whole, least in (("--seed", seed, 0), ("--workers", workers, 1)):
        if whole is not None and not least <= whole < 2**63:
            raise UsageError(f"{what} must be a whole number from {least} on, got {whole}")
    if switches.get("shipped") and switches.get("quick"):
        raise UsageError("--shipped must not rest on few samples\nhint: leave out --quick")
    names = registry.select(selection)
    if len(names) != 1:
        raise UsageError(f"tune takes one implementation, got {', '.join(names)}\nhint: attnscope list names them")
    implementation = registry.find(names[0])
    if not isinstance(implementation, Tunable):
        able = [one for one in registry.builtin_references() if isinstance(registry.find(one), Tunable)]
        raise UsageError(
            f"{names[0]} has no configurations to choose from\nhint: attnscope tune takes {', '.join(able)}, and what "
            "else fulfils attnscope.tunable.Tunable"
        )
    found = tuple(find_workloads(list(workloads)))
    limit_s = TIME_LIMIT_S if time_limit_s is None else time_limit_s
    return TunePlan(
        names[0], found, device, budget_s=budget_s, time_limit_s=limit_s, workers=workers, seed=seed, **switches
    )  # fmt: skip


def execute_tune(plan: TunePlan, watcher: Watcher | None = None) -> TuneReport:
    """Run a plan. On Ctrl-C what is finished is returned with ``interrupted`` set.

    Raises:
        UnsupportedWorkload: no workload is left that could be tuned.
        RecordError: the table that is to be changed is none.
    """
    return _Tuning(plan, watcher or (lambda step: None)).run()


@dataclass
class _Candidate:
    """A configuration, its plain values, what went wrong with it, and its times: workload -> round -> ms."""

    configuration: Configuration
    values: dict[str, Any]
    status: str = "measured"
    message: str = ""
    times: dict[str, dict[int, float]] | None = None

    def blame(self, status: str, message: str) -> None:
        self.status, self.message = status, message


class _Tuning:
    """One run in progress: workers that check, one that times, and the classes so far."""

    def __init__(self, plan: TunePlan, watcher: Watcher) -> None:
        self.plan, self.watcher = plan, watcher
        implementation = registry.find(plan.name)
        assert isinstance(implementation, Tunable)
        self.tunable: Tunable = implementation
        self.reference = registry.reference_of(plan.name)
        self.bench = self._new_worker()
        self.checkers: list[Caller] = []
        self.created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.done = self.total = 0
        self.lock, self.stopped = threading.Lock(), False

    def _new_worker(self) -> Caller:
        if self.reference is None:
            return InProcess()
        hidden = self.plan.name.startswith("hub:")
        return Worker(("attnscope.jobs:start", self.plan.device), hide_secrets=hidden)

    def run(self) -> TuneReport:
        began, found = time.monotonic(), []
        interrupted, budget = False, Budget(self.plan.budget_s)
        try:
            device, environment = self._start()
            self.path = self._table_path(device)
            classes, not_tuned = self._classes(device)
            self.ask = TuneAsk(self.plan.name, self.reference, device, self.plan.seed, self.plan.quick)
            self.checkers = [self._new_worker() for _ in range(self._checker_count(device))]
            self.total = len(classes)
            try:
                for key in classes:
                    if not budget.allows_another():
                        break
                    one = self._tune(key, classes[key], device)
                    self._keep(one, device, environment)
                    found.append(one)
                    self.done += 1
            except KeyboardInterrupt:
                interrupted = True
        finally:
            self._close()
        wrote = not self.plan.dry_run and any(one.chosen is not None for one in found)
        return TuneReport(
            self.plan.name, device, environment, self.created, tuple(found), not_tuned,
            left=tuple(classes)[len(found) :], table=_shown(self.path) if wrote else None,
            quick=self.plan.quick, interrupted=interrupted, seconds=time.monotonic() - began,
        )  # fmt: skip

    def _start(self) -> tuple[Device, Environment]:
        self._say("start")
        try:
            found: tuple[Device, Environment] = self.bench.call(
                "attnscope.jobs:start", self.plan.device, timeout_s=START_LIMIT_S
            )
        except RemoteError as error:
            raise (DeviceError(error.message) if error.kind == "DeviceError" else error) from None
        return found

    def _checker_count(self, device: Device) -> int:
        """On a GPU several: most of preparing and checking is the compiler's time and the host's."""
        if self.reference is None:
            return 1
        usual = max(1, min(MOST_CHECKERS, (os.cpu_count() or 2) // 2)) if device.kind == "cuda" else 1
        return self.plan.workers or usual

    def _close(self) -> None:
        self.stopped = True
        for worker in (self.bench, *self.checkers):
            worker.close()

    def _say(self, what: str) -> None:
        self.watcher(Step(self.done, max(self.total, 1), what))

    # --- what there is to do ---

    def _table_path(self, device: Device) -> Path:
        """The table that is to be changed; it is read now, so that one that is none is refused before any work."""
        tables = self.tunable.tables
        tables.user_table(device)
        return tables.shipped_path(device) if self.plan.shipped else tables.user_path(device)

    def _classes(self, device: Device) -> tuple[dict[str, list[Workload]], dict[str, str]]:
        """(class -> its workloads, workload -> why it is not tuned). Raises UnsupportedWorkload where none is left."""
        found: dict[str, list[Workload]] = {}
        reasons: dict[str, str] = {}
        for workload in self.plan.workloads or self.tunable.tuning_workloads():
            against = safe_reasons(self.tunable, workload, device, "forward")
            if why := "; ".join(against) or self.tunable.reason_untuned(workload):
                reasons[str(workload)] = why
            else:
                found.setdefault(self.tunable.tuning_class(workload), []).append(workload)
        if not found:
            raise UnsupportedWorkload(self.plan.name, dict.fromkeys(reasons.values()))
        if self.plan.missing:
            table = self.tunable.tables.load(self.path, device)
            found = {key: own for key, own in found.items() if table is None or key not in table.measured}
        return found, reasons

    def _candidates(self, key: str, workloads: Sequence[Workload], device: Device) -> list[_Candidate]:
        """The shipped choice, then what the implementation offers for any of the workloads, then the user's own."""
        offered = [one for workload in workloads for one in self.tunable.candidates(workload, device)]
        tables = self.tunable.tables
        own = tables.choose(key, device)
        asked = [tables.shipped(key, device) or offered[0], *offered, *([own] if own is not None else [])]
        found: list[_Candidate] = []
        for configuration in asked:
            values = configuration.as_dict()
            if all(values != one.values for one in found):
                found.append(_Candidate(configuration, values))
        return found

    # --- one class ---

    def _tune(self, key: str, workloads: Sequence[Workload], device: Device) -> TunedClass:
        began = time.monotonic()
        candidates = self._candidates(key, workloads, device)
        self._say(f"{key}: check {len(candidates)} configurations")
        self._check(workloads, candidates)
        for workload in workloads:
            self._time(key, workload, candidates)
        tried = [self._tried(one, candidates[0]) for one in candidates]
        order = self._order(key, workloads, candidates, tried)
        entry = self.tunable.settled([candidates[place].configuration for place in order]) if order else None
        return TunedClass(
            key, tuple(map(str, workloads)), tuple(tried), order[0] if order else None,
            entry.as_dict() if entry is not None else {}, time.monotonic() - began,
        )  # fmt: skip

    def _order(
        self, key: str, workloads: Sequence[Workload], candidates: Sequence[_Candidate], tried: list[Tried]
    ) -> list[int]:
        """Places of what is right, the choice first, then by time.

        The fastest of many is so by chance too. So it is timed once more, beside the shipped choice alone; unless it is
        faster there as well, the shipped choice stays. What that says goes into ``tried``.
        """
        order = fastest_first(tried)
        if not order or order[0] == 0 or 0 not in order:
            return order
        winner = order[0]
        if is_faster(tried[winner]):
            again = [_Candidate(one.configuration, one.values) for one in (candidates[0], candidates[winner])]
            for workload in workloads:
                self._time(key, workload, again)
            tried[winner] = self._tried(again[1], again[0])
            if again[0].status != "measured":
                tried[0] = self._tried(again[0], again[0])
        right = [place for place in order if tried[place].status == "measured"]
        if 0 not in right or (winner in right and is_faster(tried[winner])):
            return right
        return [0, *(place for place in right if place != 0)]

    @staticmethod
    def _tried(one: _Candidate, shipped: _Candidate) -> Tried:
        """What is recorded of a candidate, beside the shipped choice."""
        label = str(one.configuration)
        if one.status != "measured" or one.times is None:
            return Tried(label, one.values, one.status, one.message)
        return measured(label, one.values, one.times, shipped.times if shipped.status == "measured" else None)

    def _check(self, workloads: Sequence[Workload], candidates: Sequence[_Candidate]) -> None:
        """Every candidate on every workload, spread over the workers."""
        tasks = iter([(one, workload) for workload in workloads for one in candidates])
        with ThreadPoolExecutor(len(self.checkers)) as pool:
            try:
                for drained in [pool.submit(self._drain, worker, tasks) for worker in self.checkers]:
                    drained.result()
            except BaseException:
                self._close()
                raise

    def _drain(self, worker: Caller, tasks: Iterator[tuple[_Candidate, Workload]]) -> None:
        """Check what is left until nothing is."""
        while not self.stopped:
            with self.lock:
                candidate, workload = next(tasks, (None, None))
            if candidate is None or workload is None:
                return
            if candidate.status != "measured":
                continue
            try:
                wrong = worker.call(
                    "attnscope.tuning_jobs:check", self.ask, workload, candidate.values,
                    timeout_s=self.plan.time_limit_s,
                )  # fmt: skip
                if wrong:
                    candidate.blame("wrong", f"{workload}: {wrong}")
            except (WorkerFailed, RemoteError) as error:
                candidate.blame("failed", f"{workload}: {error}")
            except OSError:  # the pipe of a worker that an interrupt closed
                if not self.stopped:
                    raise

    def _time(self, key: str, workload: Workload, candidates: Sequence[_Candidate]) -> None:
        """Time what is right; one that fails meanwhile is left out, and the others are timed again."""
        while alive := [one for one in candidates if one.status == "measured"]:
            self._say(f"{key}: time {len(alive)} configurations on {workload}")
            told = [0]
            try:
                times: list[dict[int, float]] = self.bench.call(
                    "attnscope.tuning_jobs:time_candidates", self.ask, workload, [one.values for one in alive],
                    timeout_s=self.plan.time_limit_s * (1 + len(alive)), on_report=told.append,
                )  # fmt: skip
            except (RemoteError, WorkerFailed) as error:
                alive[_culprit(error, told[-1], len(alive))].blame("failed", f"{workload}: {error}")
                self.bench.close()
                continue
            for one, rounds in zip(alive, times, strict=True):
                one.times = {**(one.times or {}), str(workload): rounds}
            return

    # --- the table ---

    def _keep(self, found: TunedClass, device: Device, environment: Environment) -> None:
        """Put the class into the table: in the user's own only what differs from what ships."""
        if self.plan.dry_run or found.chosen is None:
            return
        entry = self.tunable.tables.read(found.entry)
        facts = found.facts(environment, self.created) | ({"quick": True} if self.plan.quick else {})
        written = self.plan.shipped or found.is_changed

        def change(table: Table[Any]) -> Table[Any]:
            others = {key: one for key, one in table.classes.items() if key != found.name}
            classes = others | {found.name: entry} if written else others
            return replace(table, classes=classes, measured=table.measured | {found.name: facts})

        self.tunable.tables.change(self.path, device, change)


def _culprit(error: RemoteError | WorkerFailed, at: int, count: int) -> int:
    """The place of the candidate that failed: the one that the error names, else the last one reported."""
    named = error.message.partition(" failed")[0] if isinstance(error, RemoteError) else ""
    return int(named) if named.isdigit() and int(named) < count else at


def _shown(path: Path) -> str:
    """A path with ~ for the home folder, so that a record that is handed on names nobody."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else os.fspath(path)


def document(report: TuneReport) -> Mapping[str, Any]:
    """The report as plain values, for a file or a program."""
    from attnscope.records import to_builtins

    return to_builtins(report)
