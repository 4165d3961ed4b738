"""``attnscope fuzz``: random workloads on one implementation, in worker processes, each failure made simple.

Reads a name, writes a FuzzReport. Imports no torch itself; workers do. The case of a number depends on the seed alone,
never on the worker or on what ran before, so a run is the same again, and any of its cases runs alone. A crash or a
hang is the outcome of the case that was running; the worker is started anew and goes on behind it.
"""

from __future__ import annotations

import os
import re
import shlex
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from attnscope import implementation as registry
from attnscope.device import Device, Environment
from attnscope.errors import DeviceError, UnsupportedWorkload, UsageError
from attnscope.fuzz_cases import Case, Failure, FuzzReport, Outcome, Refusals, coverage_of, tally
from attnscope.fuzz_jobs import FuzzAsk
from attnscope.progress import Step, Watcher
from attnscope.shrinking import shrink
from attnscope.worker import START_LIMIT_S, Caller, InProcess, RemoteError, Worker, WorkerFailed

BATCH = 32  # cases that a worker takes at a time
MOST_WORKERS = 16  # that share a GPU unless asked otherwise: each holds half a gigabyte of it, and a core
TIME_LIMIT_S = 120.0  # of one case, compiling included
MOST_TOLD = 5  # failures that are made simpler; others are told by their number
TRIES = {"wrong": 200, "raised": 200, "crashed": 30, "hung": 6}  # calls that making one failure simpler may take
MODES = {("forward",): "forward", ("backward",): "backward"}
UNTRIED = "not run again, nor made simpler: the run was interrupted"


@dataclass(frozen=True)
class FuzzPlan:
    """What one run is to do: the cases of ``indices``, or the one ``case`` that was spelled out. ``selection`` is how
    the user spelled the implementation of that ``name``."""

    name: str
    selection: str
    seed: int = 0
    indices: Sequence[int] = range(1000)
    case: Case | None = None
    minutes: float | None = None
    device: str | None = None
    workers: int | None = None
    time_limit_s: float = TIME_LIMIT_S


def make_fuzz_plan(
    selection: str,
    *,
    cases: int | None = None,
    seed: int = 0,
    minutes: float | None = None,
    device: str | None = None,
    case: str | None = None,
    workers: int | None = None,
    time_limit_s: float | None = None,
) -> FuzzPlan:
    """A validated plan. ``case`` is a number, a range such as ``32..63``, or a spelled case.

    Raises:
        UsageError: an argument is not what it must be (also WorkloadError, UnknownImplementation).
    """
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"device must be cpu or cuda, got {device!r}")
    for what, value, least in (("--cases", cases, 1), ("--seed", seed, 0), ("--workers", workers, 1)):
        if value is not None and not least <= value <= 2**63 - 1:
            raise UsageError(f"{what} must be a whole number from {least} on, got {value}")
    for what, number in (("--minutes", minutes), ("--time-limit", time_limit_s)):
        if number is not None and not 0 < number < 1e6:
            raise UsageError(f"{what} must be above 0 and below a million, got {number:g}")
    if case is not None and cases is not None:
        raise UsageError("--case and --cases exclude each other: one case, or many\nhint: leave one of them out")
    names = registry.select(selection)
    if len(names) != 1:
        raise UsageError(f"fuzz takes one implementation, got {', '.join(names)}\nhint: attnscope list names them")
    indices, spelled = _cases_of(case) if case is not None else (range(cases or 1000), None)
    limit_s = TIME_LIMIT_S if time_limit_s is None else time_limit_s
    return FuzzPlan(names[0], selection, seed, indices, spelled, minutes, device, workers, limit_s)


def _cases_of(text: str) -> tuple[Sequence[int], Case | None]:
    if found := re.fullmatch(r"(\d{1,12})(?:\.\.(\d{1,12}))?", text.strip()):
        first, last = int(found[1]), int(found[2] or found[1])
        if first > last:
            raise UsageError(f"--case must name the smaller number first, got {text}\nhint: --case {last}..{first}")
        return range(first, last + 1), None
    return (), Case.parse(text)


def execute_fuzz(plan: FuzzPlan, watcher: Watcher | None = None) -> FuzzReport:
    """Run a plan. On Ctrl-C what is finished is returned with ``interrupted`` set."""
    return _Fuzz(plan, watcher or (lambda step: None)).run()


@dataclass
class _Ran:
    """What came of one number: its case (None: not drawn), what was refused for it, its outcome, its batch's first."""

    first: int
    case: Case | None = None
    refusals: Refusals = field(default_factory=Refusals)
    outcome: Outcome | None = None


class _Fuzz:
    """One run in progress."""

    def __init__(self, plan: FuzzPlan, watcher: Watcher) -> None:
        self.plan, self.watcher = plan, watcher
        self.reference = registry.reference_of(plan.name)
        self.ran: dict[int, _Ran] = {}
        self.lock, self.stopped = threading.Lock(), False
        self.workers: list[Caller] = []
        self.done = 0

    def run(self) -> FuzzReport:
        began = time.monotonic()
        interrupted = False
        try:
            device, environment = self._start()
            self.ask = FuzzAsk(self.plan.name, self.reference, device, self.plan.seed)
            if reasons := self.workers[0].call("attnscope.fuzz_jobs:reasons_here", self.ask, timeout_s=START_LIMIT_S):
                raise UnsupportedWorkload(self.plan.name, reasons)
            count = self._worker_count(device)
            try:
                self._run_cases(count, began)
            except KeyboardInterrupt:
                interrupted = True
                self._close()
            failures = self._failures(interrupted)
        finally:
            self._close()
        return self._report(device, environment, count, time.monotonic() - began, failures, interrupted)

    def _start(self) -> tuple[Device, Environment]:
        self.watcher(Step(0, max(len(self.plan.indices), 1), "start"))
        self.workers.append(self._new_worker())
        try:
            found: tuple[Device, Environment] = self.workers[0].call(
                "attnscope.jobs:start", self.plan.device, timeout_s=START_LIMIT_S
            )
        except RemoteError as error:
            raise (DeviceError(error.message) if error.kind == "DeviceError" else error) from None
        return found

    def _new_worker(self) -> Caller:
        if self.reference is None:
            return InProcess()
        return Worker(("attnscope.jobs:start", self.plan.device), hide_secrets=self.plan.name.startswith("hub:"))

    def _worker_count(self, device: Device) -> int:
        """On a GPU up to sixteen, since most of it is compiling and launching; on a CPU one, which has threads."""
        if self.reference is None:
            return 1
        wanted = self.plan.workers or (min(MOST_WORKERS, os.cpu_count() or 1) if device.kind == "cuda" else 1)
        return max(1, min(wanted, -(-len(self.plan.indices) // BATCH)))

    # --- running cases ---

    def _run_cases(self, count: int, began: float) -> None:
        if self.plan.case is not None:
            self._run_spelled(self.plan.case)
            return
        until = None if self.plan.minutes is None else began + 60 * self.plan.minutes
        numbers = self.plan.indices
        batches = iter([numbers[start : start + BATCH] for start in range(0, len(numbers), BATCH)])
        self.workers += [self._new_worker() for _ in range(count - 1)]
        with ThreadPoolExecutor(count) as pool:
            try:
                for drained in [pool.submit(self._drain, worker, batches, until) for worker in self.workers]:
                    drained.result()
            except BaseException:
                self.stopped = True
                self._close()
                raise

    def _run_spelled(self, case: Case) -> None:
        self.ran[0] = _Ran(0, case, Refusals(), self._try("try_case", case))

    def _drain(self, worker: Caller, batches: Iterator[Sequence[int]], until: float | None) -> None:
        """Take batches until there are none, or the time is over."""
        while not self.stopped and (until is None or time.monotonic() < until):
            with self.lock:
                batch = next(batches, None)
            if batch is None:
                return
            try:
                self._run_batch(worker, batch, until)
            except OSError:  # the pipe of a worker that an interrupt closed
                if not self.stopped:
                    raise

    def _run_batch(self, worker: Caller, batch: Sequence[int], until: float | None) -> None:
        """All cases of a batch; one that ends the worker has its outcome, and the rest goes on in another."""
        left = list(batch)
        while left and not self.stopped:
            seconds = None if until is None else max(until - time.monotonic(), 0.001)
            try:
                worker.call(
                    "attnscope.fuzz_jobs:run_cases", self.ask, left, seconds,
                    timeout_s=self.plan.time_limit_s, on_report=lambda told: self._note(batch[0], *told), renew=True,
                )  # fmt: skip
                return
            except (WorkerFailed, RemoteError) as error:
                if self.stopped:
                    return
                unfinished = [i for i in left if i not in self.ran or self.ran[i].outcome is None]
                if unfinished:
                    self._note(batch[0], unfinished[0], _lost(error))
                left = unfinished[1:]

    def _note(self, first: int, index: int, *told: Any) -> None:
        """Keep a report of a worker: a case and its refusals, or its outcome."""
        with self.lock:
            ran = self.ran.setdefault(index, _Ran(first))
            if len(told) == 2:
                ran.case, ran.refusals = told
                return
            ran.outcome = told[0]
            self.done += 1
            what = f"{self.done} cases" + (f", {bad} failed" if (bad := self._count_failed()) else "")
        self.watcher(Step(self.done, max(len(self.plan.indices), 1), what))

    def _count_failed(self) -> int:
        return sum(1 for ran in self.ran.values() if ran.outcome is not None and ran.outcome.failed)

    # --- failures, made simple ---

    def _failures(self, interrupted: bool) -> tuple[Failure, ...]:
        """Each kind of failure once, by the words of its message: the first five made simpler."""
        groups: dict[Any, list[_Ran]] = {}
        for index in sorted(self.ran):
            ran = self.ran[index]
            if ran.outcome is not None and ran.outcome.failed:
                groups.setdefault(_words_of(ran.outcome), []).append(ran)
        found: list[Failure] = []
        for number, group in enumerate(groups.values()):
            alike = tuple(ran.case.index for ran in group[1:] if ran.case and ran.case.index is not None)
            told = number < MOST_TOLD and not interrupted
            failure = self._failure(group[0]) if told else self._untold(group[0], interrupted)
            same = next(
                (i for i, old in enumerate(found) if told and old.shrunk.workload == failure.shrunk.workload), -1
            )
            if same >= 0:  # two sentences, one cause
                extra = () if failure.case.index is None else (failure.case.index,)
                found[same] = _with_alike(found[same], (*extra, *alike))
            else:
                found.append(_with_alike(failure, alike))
        return tuple(found)

    def _untold(self, ran: _Ran, interrupted: bool) -> Failure:
        assert ran.outcome is not None
        case = ran.case or Case("", index=None)
        note = UNTRIED if interrupted else "not run again, nor made simpler: there are failures enough above"
        return Failure(case, ran.outcome, case, ran.outcome, self._fuzz_command(ran), note)

    def _failure(self, ran: _Ran) -> Failure:
        """Run a case again in a process of its own, make it simpler, and find the line that shows it."""
        assert ran.outcome is not None
        if ran.case is None:  # the worker died while it was drawn
            return Failure(
                Case(""), ran.outcome, Case(""), ran.outcome, self._fuzz_command(ran), "failed before it was drawn"
            )
        self._restart()
        status = ran.outcome.status
        outcomes: dict[Case, Outcome] = {}

        def fails(case: Case) -> bool:
            self.watcher(Step(self.done, max(self.done, 1), f"make case {ran.case.index} simpler"))  # type: ignore[union-attr]
            outcomes[case] = self._try("try_case", case)
            return outcomes[case].status == status

        if not fails(ran.case):
            return self._passes_alone(ran)
        if self.plan.case is not None:
            return Failure(ran.case, ran.outcome, ran.case, outcomes[ran.case], *self._command(ran.case, status))
        shrunk = shrink(ran.case, fails, TRIES[status])
        return Failure(ran.case, ran.outcome, shrunk, outcomes[shrunk], *self._command(shrunk, status))

    def _passes_alone(self, ran: _Ran) -> Failure:
        """Of a case that fails only after others, if at all: the numbers from its batch's first on are run again."""
        assert ran.case is not None and ran.outcome is not None
        note = "passes alone, and did not fail again after the same cases: it depends on chance"
        if ran.case.index is None or ran.case.index == ran.first:
            note = "did not fail again in a fresh process: it depends on chance, or on what its own process ran before"
        elif self._fails_after(ran.first, ran.case.index):
            note = f"passes alone, fails after the cases {ran.first} to {ran.case.index - 1}"
        return Failure(ran.case, ran.outcome, ran.case, ran.outcome, self._fuzz_command(ran), note)

    def _fails_after(self, first: int, index: int) -> bool:
        """Whether the case of that number fails in a fresh process that runs those from ``first`` on before it."""
        self._restart()
        again: dict[int, Outcome] = {}

        def on_report(message: tuple[Any, ...]) -> None:
            if len(message) == 2:
                again[message[0]] = message[1]

        numbers = [i for i in self.plan.indices if first <= i <= index]
        try:
            self.workers[0].call(
                "attnscope.fuzz_jobs:run_cases", self.ask, numbers, None,
                timeout_s=self.plan.time_limit_s, on_report=on_report, renew=True,
            )  # fmt: skip
        except (WorkerFailed, RemoteError):
            return True
        return again[index].failed

    def _command(self, case: Case, status: str) -> tuple[str, str]:
        """``attnscope check`` of the case's workload where that fails too, else ``attnscope fuzz`` of the very case."""
        if case.strides == "plain" and (seen := self._try("try_whole_check", case)).status == status:
            words = ["attnscope", "check", case.workload, "--implementations", self.plan.selection]
            words += ["--mode", MODES[seen.directions]] if seen.directions in MODES else []
            return shlex.join([*words, "--seed", str(case.seed), *self._device_words()]), ""
        return shlex.join(["attnscope", "fuzz", self.plan.selection, "--case", str(case), *self._device_words()]), ""

    def _fuzz_command(self, ran: _Ran) -> str:
        index = ran.case.index if ran.case is not None else None
        which = str(ran.case) if index is None and ran.case is not None else f"{ran.first}..{index or ran.first}"
        words = ["attnscope", "fuzz", self.plan.selection, "--seed", str(self.plan.seed), "--case", which]
        return shlex.join([*words, *self._device_words()])

    def _device_words(self) -> list[str]:
        return ["--device", self.plan.device] if self.plan.device else []

    def _try(self, job: str, case: Case) -> Outcome:
        try:
            outcome: Outcome = self.workers[0].call(
                f"attnscope.fuzz_jobs:{job}", self.ask, case, timeout_s=self.plan.time_limit_s
            )
        except (WorkerFailed, RemoteError) as error:
            return _lost(error)
        return outcome

    def _restart(self) -> None:
        """A fresh process, in which no earlier case has left anything; the others have nothing more to do."""
        self._close()
        self.workers = [self._new_worker()]

    def _close(self) -> None:
        for worker in self.workers:
            worker.close()

    # --- the report ---

    def _report(
        self, device: Device, environment: Environment, workers: int, seconds: float, failures: tuple[Failure, ...],
        interrupted: bool,
    ) -> FuzzReport:  # fmt: skip
        done = [ran for ran in self.ran.values() if ran.outcome is not None]
        ran = [one for one in done if one.outcome is not None and one.outcome.status != "refused"]
        refused = sum(one.refusals.count for one in done) + (len(done) - len(ran) if self.plan.case else 0)
        reasons: Counter[str] = Counter()
        for one in done:
            reasons.update(one.refusals.reasons)
            if self.plan.case and one.outcome is not None and one.outcome.status == "refused":
                reasons.update([one.outcome.message])
        words = [w for one in ran if one.case and one.outcome for w in coverage_of(one.case, one.outcome.directions)]
        failed = sum(1 for one in ran if one.outcome is not None and one.outcome.failed)
        return FuzzReport(
            implementation=self.plan.name,
            device=device,
            environment=environment,
            seed=self.plan.seed,
            cases=len(ran),
            passed=len(ran) - failed,
            failed=failed,
            drawn=refused + len(ran),
            refused=refused,
            without_workload=len(done) - len(ran),
            seconds=round(seconds, 3),
            workers=workers,
            coverage=tally(words),
            reasons=dict(reasons.most_common()),
            failures=failures,
            interrupted=interrupted,
        )


def _lost(error: WorkerFailed | RemoteError) -> Outcome:
    """The outcome of a case that ended its process, or after which the device was lost."""
    if isinstance(error, RemoteError):
        return Outcome("crashed", f"{error.kind}: {error.message}")
    return Outcome("hung" if "took longer" in str(error) else "crashed", str(error))


def _words_of(outcome: Outcome) -> tuple[str, str]:
    """What failures that are alike share: their status and the first words of their sentence, without numbers."""
    words = re.sub(r"[-+]?\d[\d.,e+-]*", "#", outcome.message.split(";")[0]).split()
    return outcome.status, " ".join(words[:8])


def _with_alike(failure: Failure, alike: tuple[int, ...]) -> Failure:
    return replace(failure, alike=tuple(sorted({*failure.alike, *alike})))
