"""The sweep: workloads through inputs, reasons, check, measure, profile and explain.

Reads a Plan, writes a Run. This is the only place that catches whatever an implementation raises, and turns it into its
row. It imports no torch itself; workers do.
"""

from __future__ import annotations

import contextlib
import datetime
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope import implementation as registry
from attnscope.device import Device, Environment
from attnscope.errors import AttnscopeError, DeviceError, RecordError
from attnscope.planning import RUN, SO_FAR, Plan, asked_workloads
from attnscope.progress import Step, Watcher
from attnscope.records import KernelEvent, Limits, Measurement, Profile, Result, Run, Verdict, write_run
from attnscope.resuming import Budget, refuse_unlike, remaining
from attnscope.spending import Ledger, added
from attnscope.warming import ENVIRONMENT, ahead, meanwhile, warm_caches, warm_tasks
from attnscope.worker import START_LIMIT_S, Caller, InProcess, RemoteError, Worker, WorkerFailed, printable
from attnscope.workload import Workload

if TYPE_CHECKING:
    from attnscope.jobs import Ask, Checked, Tried

STAGE_WORDS = {"prepare": "measure_prepare", "warm-up": "warm_up"}  # of reports, as a row's seconds call them
TIME_LIMIT_S = {"cpu": 120.0, "cuda": 300.0}


def execute(plan: Plan, watcher: Watcher | None = None) -> Run:
    """Run a plan. On Ctrl-C, what is finished is returned with ``interrupted`` set; nothing is lost."""
    return _Sweep(plan, watcher or (lambda step: None)).run()


def save(run: Run, folder: Path) -> Path:
    """Write ``run.jsonl``, which takes the place of what was kept of the run in case it had been killed. Raises
    RecordError."""
    path = folder / RUN
    write_run(run, path)
    (folder / SO_FAR).unlink(missing_ok=True)
    return path


class _Sweep:
    """One run in progress: two workers (one checks, one measures and profiles) and the rows so far."""

    def __init__(self, plan: Plan, watcher: Watcher) -> None:
        self.plan, self.watcher = plan, watcher
        self.references = {name: registry.reference_of(name) for name in plan.implementations}
        self.in_process = any(reference is None for reference in self.references.values())
        self.checker, self.bench = self._new_worker(), self._new_worker()
        self.done = self.total = 0
        self.limits: Limits | None = None
        self._unfinished: tuple[Result, ...] = ()

    def _new_worker(self) -> Caller:
        return InProcess() if self.in_process else self._new_process()

    def _new_process(self, environment: dict[str, str] | None = None) -> Worker:
        from_hub = any(name.startswith("hub:") for name in self.references)  # someone else's code: no tokens for it
        warm_up = ("attnscope.jobs:start", self.plan.device)
        return Worker(warm_up=warm_up, hide_secrets=from_hub, environment=environment)

    def run(self) -> Run:
        rows: list[Result] = []
        run: Run | None = None
        try:
            device, environment = self._start()
            self.limit_s = self.plan.time_limit_s or TIME_LIMIT_S[device.kind]
            asked = asked_workloads(self.plan, device.kind)
            workloads = remaining(asked, self.references, self.plan.after)
            run = self._empty_run(device, environment, workloads)
            refuse_unlike(self.plan.after, run)
            budget = Budget(self.plan.budget_s)
            self.total = len(workloads) * len(self.references) * (2 + len(self.plan.stages)) + 1
            self._warm(workloads, device)
            for number, workload in enumerate(workloads):
                if not budget.allows_another():
                    run = replace(run, workloads=run.workloads[:number])
                    break
                try:
                    rows += self._run_workload(workload, device)
                except AttnscopeError as error:
                    if len(workloads) == 1 and not self._unfinished:
                        raise
                    rows += self._lost(workload, error)  # one workload of many costs its own rows only
                self._keep(replace(run, workloads=run.workloads[: number + 1], results=tuple(rows)))
        except KeyboardInterrupt:
            if run is None:
                raise
            rows += self._unfinished
            run = replace(run, interrupted=True)
        finally:
            self.checker.close()
            self.bench.close()
        assert run is not None
        return replace(run, limits=self.limits, results=tuple(rows))

    def _keep(self, run: Run) -> None:
        """What is finished, in case the process is killed; a disk that is full now is the last write's to report."""
        if self.plan.out is not None:
            with contextlib.suppress(RecordError):
                write_run(replace(run, limits=self.limits), self.plan.out / SO_FAR)

    def _start(self) -> tuple[Device, Environment]:
        self._say("start")
        start = ("attnscope.jobs:start", self.plan.device)
        beside = start if self.plan.stages else None
        with _sentences(), meanwhile(self.bench, beside, START_LIMIT_S, lambda found: None):
            found: tuple[Device, Environment] = self.checker.call(*start, timeout_s=START_LIMIT_S)
        return found

    def _empty_run(self, device: Device, environment: Environment, workloads: Sequence[Workload]) -> Run:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Run(
            device=device,
            environment=environment,
            created=now,
            command=_command(),
            seed=self.plan.seed,
            workloads=tuple(str(workload) for workload in workloads),
            modes=self.plan.modes,
            quick=self.plan.quick,
        )

    def _lost(self, workload: Workload, error: AttnscopeError) -> list[Result]:
        """Rows of a workload that could not go on: those that stand, and a reason or error for the others."""
        rows = {row.implementation: row for row in self._unfinished}
        self._unfinished = ()
        for name in self.references:
            if name not in rows:
                reasons = {mode: (str(error).splitlines()[0],) for mode in self.plan.modes}
                lost = {"status": "skipped", "reasons": reasons} if isinstance(error, DeviceError) else {
                    "status": "failed", "error": str(error)}  # fmt: skip
                rows[name] = Result(workload=str(workload), implementation=name, **lost)
        return list(rows.values())

    def _ask(self, workload: Workload, device: Device) -> Ask:
        from attnscope.jobs import Ask

        plan = self.plan
        return Ask(workload, device, plan.seed, plan.modes, self.references, plan.named, plan.quick)

    def _warm(self, workloads: Sequence[Workload], device: Device) -> None:
        """Compile in ``plan.warm`` processes at once; what fails there will fail again in its row, which says so."""
        if not self.plan.warm or self.in_process:
            return
        keeps = {name: registry.find(name).sheet.kept_on_disk for name in self.references}
        tasks = list(warm_tasks([self._ask(workload, device) for workload in workloads], keeps))
        processes = min(self.plan.warm, len(tasks))
        warm_caches(
            tasks,
            processes,
            lambda: self._new_process(ENVIRONMENT),
            self.limit_s,
            lambda workload, name: self._say(f"warm {name} for {workload}", advance=False),
        )

    def _run_workload(self, workload: Workload, device: Device) -> list[Result]:
        ask = self._ask(workload, device)
        with _sentences():
            reasons = self.checker.call("attnscope.jobs:survey", ask, timeout_s=START_LIMIT_S)
        measuring = "measure" in self.plan.stages
        if measuring and self.limits is None:  # before anything is prepared there, which would have to go
            self._say("measure the device's limits")
            self.limits = self._limits(device)
        rows: dict[str, Result] = {}
        drafts: dict[str, Result] = {}
        firsts: dict[str, Tried] = {}
        for name in self.references:
            self._say(f"prepare {name}")
            row, tried = self._try(ask, name, reasons[name])
            if tried is None:
                rows[name] = row
            else:
                drafts[name], firsts[name] = row, tried
            self._unfinished = tuple(rows.values())
        with ahead(self.bench, ask, list(firsts) if measuring else [], self.limit_s) as prepared_s:
            for name, draft in drafts.items():
                self._say(f"check {name}")
                rows[name] = self._check(ask, draft, reasons[name])
                self._unfinished = tuple(rows.values())
        for name, seconds in prepared_s.items():
            rows[name] = added(rows[name], {"prepare_ahead": seconds})
        rows = {name: rows[name] for name in self.references}
        self._forget(self.checker)
        if measuring:
            self._measure(ask, rows, firsts)
            self._unfinished = tuple(rows.values())
        if "profile" in self.plan.stages:
            for name in list(rows):
                self._say(f"profile {name}")
                rows[name] = self._profile(ask, rows[name])
                self._unfinished = tuple(rows.values())
        if self.plan.stages:
            self._forget(self.bench)
        self._unfinished = ()
        return list(rows.values())

    def _forget(self, caller: Caller) -> None:
        """Its memory is the other process's now. One that died holds none."""
        if not self.in_process:
            with contextlib.suppress(WorkerFailed, RemoteError):
                caller.call("attnscope.jobs:forget", timeout_s=self.limit_s)

    # --- check ---

    def _try(self, ask: Ask, name: str, reasons: dict[str, list[str]]) -> tuple[Result, Tried | None]:
        """A row that stands, where it cannot run or fails; else the draft of one, called failed until it is checked."""
        implementation = registry.find(name)
        row: dict[str, Any] = {
            "workload": str(ask.workload),
            "implementation": name,
            "reasons": {direction: tuple(found) for direction, found in reasons.items() if found},
            "ours": implementation.sheet.ours,
            "comparable": implementation.sheet.comparable,
            "note": "; ".join(self._provenance(implementation)) or None,
        }
        directions = tuple(d for d in ask.directions if not reasons[d])
        if not directions:
            return Result(status="skipped", **row), None
        try:
            tried: Tried = self.checker.call(
                "attnscope.jobs:first_calls", ask, name, directions, timeout_s=self.limit_s
            )
        except (WorkerFailed, RemoteError) as error:
            return Result(status="failed", error=_cause(error), **row), None
        return Result(status="failed", error="was not checked yet", seconds=tried.seconds, **row), tried

    def _check(self, ask: Ask, row: Result, reasons: dict[str, list[str]]) -> Result:
        name, directions = row.implementation, tuple(d for d in ask.directions if not reasons[d])
        started = time.perf_counter()
        try:
            checked: Checked = self.checker.call("attnscope.jobs:check", ask, name, directions, timeout_s=self.limit_s)
        except (WorkerFailed, RemoteError) as error:
            return added(row.with_changes(error=_cause(error)), {"check": time.perf_counter() - started})
        row = added(row, checked.seconds)
        found: dict[str, Any] = {"check": checked.check, "check_kernels": checked.kernels, "ran": checked.ran}
        if not checked.check.passed:
            return row.with_changes(status="check_failed", error=None, **found)
        if checked.mismatch:
            return row.with_changes(error=checked.mismatch, **found)
        status = "approximate" if checked.check.grade == "approximate" else "ok"
        return row.with_changes(status=status, error=None, **found)

    def _provenance(self, implementation: registry.Implementation) -> Iterator[str]:
        """Where it ran and what of, where a record must say so."""
        if self.in_process:
            yield "ran in attnscope's own process: no other can import it"
        if origin := getattr(implementation, "origin", None):
            yield origin

    # --- measure ---

    def _measure(self, ask: Ask, rows: dict[str, Result], firsts: dict[str, Tried]) -> None:
        options = self._options()
        for direction in ask.directions:
            names = [name for name in firsts if rows[name].status in ("ok", "approximate")]
            names = [name for name in names if direction in firsts[name].first_call_ms]
            while names:
                first = {n: (firsts[n].prepare_s, firsts[n].first_call_ms.get(direction)) for n in names}
                culprit, cause = self._measure_once(ask, names, direction, options, first, rows)
                if culprit is None:
                    break
                self._drop(rows, culprit, f"passed its check, then failed in measuring {direction}: {cause}")
                names.remove(culprit)
            self._unfinished = tuple(rows.values())

    @staticmethod
    def _drop(rows: dict[str, Result], culprit: str, error: str) -> None:
        """The culprit loses its times, and everyone the verdicts that compared with them."""
        for name, row in rows.items():
            kept = tuple(v for v in row.verdicts if culprit not in (v.implementation, v.rival))
            rows[name] = row.with_changes(verdicts=kept)
        rows[culprit] = rows[culprit].with_changes(
            status="failed", error=error, forward=None, backward=None, verdicts=()
        )

    def _limits(self, device: Device) -> Limits:
        with _sentences():
            limits: Limits = self.bench.call("attnscope.jobs:limits", device, self._options(), timeout_s=self.limit_s)
        return limits

    def _measure_once(
        self, ask: Ask, names: list[str], direction: str, options: Any, first: dict[str, Any], rows: dict[str, Result]
    ) -> tuple[str | None, str]:
        """Measure all ``names`` into ``rows``; or the name of the one that failed, and how."""
        at, ledger = {"name": names[0]}, Ledger()

        def on_report(message: tuple[str, str]) -> None:
            at["name"] = message[1]
            ledger.begin(message[1], STAGE_WORDS.get(message[0], message[0]))
            self._say(f"{message[0]} {message[1]} {direction}", advance=False)

        limit_s = self.limit_s * (1 + len(names))
        try:
            measured = self.bench.call(
                "attnscope.jobs:measure", ask, names, direction, self.limits, options, first,
                timeout_s=limit_s, on_report=on_report,
            )  # fmt: skip
        except RemoteError as error:
            named = error.message.partition(" failed")[0] if error.kind == "MeasureFailed" else at["name"]
            self.bench.close()
            return (named if named in names else at["name"]), _cause(error)
        except WorkerFailed as error:
            return at["name"], _cause(error)
        finally:
            ledger.end()
            for name, seconds in ledger.seconds.items():
                rows[name] = added(rows[name], seconds)
        for name, measurement in measured.measurements.items():
            rows[name] = self._with_measurement(rows[name], direction, measurement, measured.verdicts)
            self._say(f"measured {name}")
        return None, ""

    @staticmethod
    def _with_measurement(row: Result, direction: str, measurement: Measurement, verdicts: Sequence[Verdict]) -> Result:
        mine = tuple(verdict for verdict in verdicts if verdict.implementation == row.implementation)
        return row.with_changes(**{direction: measurement}, verdicts=(*row.verdicts, *mine))

    def _options(self) -> Any:
        from attnscope.measuring import MeasureOptions

        options = MeasureOptions(quick=self.plan.quick, seed=self.plan.seed)
        return options if self.plan.sustained_s is None else replace(options, sustained_s=self.plan.sustained_s)

    # --- profile and explain ---

    def _profile(self, ask: Ask, row: Result) -> Result:
        if row.status not in ("ok", "approximate"):
            return row
        assert row.check is not None
        started = time.perf_counter()
        for direction in row.check.directions:
            with _trace_path(self.plan.out, ask.workload, row.implementation, direction) as path:
                try:
                    self.bench.call(
                        "attnscope.jobs:profile", ask, row.implementation, direction, str(path),
                        (self.plan.wait, self.plan.warmup, self.plan.active), self.plan.compile, timeout_s=self.limit_s,
                    )  # fmt: skip
                    row = self._explain(row, path, ask, direction)
                except (WorkerFailed, RemoteError, AttnscopeError) as error:
                    note = f"{direction} could not be profiled: {_cause(error)}"
                    row = row.with_changes(note=f"{row.note}; {note}" if row.note else note)
        return added(row, {"profile": time.perf_counter() - started})

    def _explain(self, row: Result, path: Path, ask: Ask, direction: str) -> Result:
        from attnscope.explaining import explain_profile
        from attnscope.trace import read_trace

        profile: Profile
        kernels: tuple[KernelEvent, ...]
        profile, kernels, findings = explain_profile(
            read_trace(path),
            workload=ask.workload,
            implementation=row.implementation,
            direction=direction,
            device=ask.device,
            host_us=(m.wall_us_median if (m := row.measurement(direction)) else None),
        )
        if self.plan.out is not None:
            profile = replace(profile, trace=path.relative_to(self.plan.out).as_posix())
        return row.with_changes(
            profiles=(*row.profiles, profile),
            kernels=(*row.kernels, *kernels),
            findings=(*row.findings, *findings),
        )

    def _say(self, what: str, *, advance: bool = True) -> None:
        self.watcher(Step(self.done, max(self.total, 1), what))
        self.done += advance


@contextlib.contextmanager
def _trace_path(out: Path | None, workload: Workload, name: str, direction: str) -> Iterator[Path]:
    """Where a trace goes: into the run's folder, or a temporary one that is read and removed."""
    import tempfile

    file = f"{name.replace('/', '-').replace(':', '-')}-{direction}.json.gz"
    if out is not None:
        yield out / "traces" / workload.slug / file
        return
    with tempfile.TemporaryDirectory(prefix="attnscope-") as folder:
        yield Path(folder) / file


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    """Errors of the flow itself (no device, too little memory) keep their sentence and their exit code."""
    try:
        yield
    except RemoteError as error:
        if error.kind == "DeviceError":
            raise DeviceError(error.message) from None
        raise AttnscopeError(f"a worker could not go on: {error}") from None


def _cause(error: BaseException) -> str:
    if isinstance(error, RemoteError) and error.kind in ("OutOfMemoryError", "MemoryError"):
        return f"ran out of memory: {error.message.splitlines()[0]}"
    if isinstance(error, RemoteError):
        return f"{error.kind}: {error.message}"
    return str(error)


def _command() -> str:
    """The command line without folders, so that a record names no one's home."""
    program = Path(sys.argv[0]).name if sys.argv else "python"
    words = ["attnscope" if program == "__main__.py" else program or "python", *sys.argv[1:]]
    return shlex.join(_without_folder(printable(word)) for word in words)


def _without_folder(word: str) -> str:
    """A word of the command line; of a path only its last part, of a kernel on the hub all."""
    if "," in word:
        return ",".join(_without_folder(part) if part.startswith("hub:") else part for part in word.split(","))
    if word.startswith("hub:") and not word.startswith(("hub:.", "hub:/", "hub:~")):
        return word
    if word.startswith("hub:"):
        return f"hub:./{Path(word).name}"
    return Path(word).name if "/" in word else word
