"""Compile before anything is timed: the main job's way to use a machine's idle cores.

Two things are done early, both while nothing is measured. *Warming*: with ``compare --warm N``, N processes prepare and
call once, on every workload of the run, each implementation whose compiler keeps what it made on disk; the processes
that check and measure then find it there. *Ahead*: while one process checks a workload, the one that measures prepares
the same workload; so they also start side by side. None of it decides anything: what fails here is tried again where it
counts, and fails there by name.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnscope.worker import Caller, RemoteError, Worker, WorkerFailed
from attnscope.workload import Workload

if TYPE_CHECKING:
    from attnscope.jobs import Ask, Report

# One core a process: torch's compiler would start as many helpers as there are cores in each.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
# Of the free memory: score matrices larger than that are not made beside another process, or by all of them at once.
SCORES_BESIDE, SCORES_TOGETHER = 1 / 16, 1 / 2
STRIDE = 5  # neighbours in a suite often share a kernel, which processes that begin together would compile each
GONE = (WorkerFailed, RemoteError, OSError)  # OSError: the connection of a worker that was closed meanwhile


def warm_caches(
    tasks: Iterable[tuple[Ask, str]],
    processes: int,
    new_worker: Callable[[], Worker],
    limit_s: float,
    said: Callable[[Workload, str], None],
) -> dict[tuple[Workload, str], str]:
    """Prepare each (ask, implementation) once, ``processes`` at a time; returns what failed, and how.

    ``said`` is told what begins, in the caller's thread. All processes are gone when this returns.
    """
    todo: queue.SimpleQueue[tuple[Ask, str]] = queue.SimpleQueue()
    events: queue.SimpleQueue[tuple[Workload, str] | None] = queue.SimpleQueue()
    for task in tasks:
        todo.put(task)
    failed: dict[tuple[Workload, str], str] = {}
    workers = [new_worker() for _ in range(processes)]
    stopping = threading.Event()

    def work(worker: Worker) -> None:
        with contextlib.suppress(queue.Empty):
            while not stopping.is_set():
                ask, name = todo.get_nowait()
                events.put((ask.workload, name))
                try:
                    worker.call("attnscope.warming:run_once", ask, name, processes, timeout_s=limit_s)
                except GONE as error:
                    failed[ask.workload, name] = str(error).splitlines()[0]
        events.put(None)

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        running = len(threads)
        while running:
            event = events.get()
            if event is None:
                running -= 1
            else:
                said(*event)
    finally:  # also after Ctrl-C
        stopping.set()
        for worker in workers:
            worker.close()
        for thread in threads:
            thread.join()
    return failed


def warm_tasks(asks: Sequence[Ask], keeps_on_disk: Mapping[str, bool]) -> Iterator[tuple[Ask, str]]:
    """Every workload with every implementation that another process can import and whose compiler keeps its work."""
    spread = [ask for start in range(STRIDE) for ask in asks[start::STRIDE]]
    for name, keeps in keeps_on_disk.items():
        for ask in spread:
            if keeps and ask.references[name] is not None:
                yield ask, name


@contextlib.contextmanager
def ahead(caller: Caller, ask: Ask, names: Sequence[str], limit_s: float) -> Iterator[dict[str, float]]:
    """While the block runs, ``caller``'s process prepares ``names``; what it took by name is filled in at the end."""
    took: dict[str, float] = {}
    timeout_s = limit_s * (1 + len(names))
    call = ("attnscope.warming:prepare_ahead", ask, tuple(names)) if names else None
    with meanwhile(caller, call, timeout_s, took.update):
        yield took


@contextlib.contextmanager
def meanwhile(
    caller: Caller, call: tuple[Any, ...] | None, timeout_s: float, done: Callable[[Any], object]
) -> Iterator[None]:
    """While the block runs, ``caller``'s process makes ``call``; ``done`` gets what it returns. The block waits for it.

    Only a process of its own can do two things at once: for any other caller, and for no call, nothing happens. What
    goes wrong there is left for the next call to find.
    """
    if not isinstance(caller, Worker) or call is None:
        yield
        return

    def work() -> None:
        with contextlib.suppress(*GONE):
            done(caller.call(*call, timeout_s=timeout_s))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        while thread.is_alive():  # what it is at is not needed any more; it may just be starting its process
            caller.close()
            thread.join(0.2)
        raise
    thread.join()


# --- in the worker ----------------------------------------------------------------------------------------------------


def run_once(ask: Ask, name: str, processes: int, *, report: Report) -> None:
    """Prepare, and call each direction that it can run; nothing is kept but what its compiler wrote to disk."""
    from attnscope import jobs

    del report
    implementation = jobs.find_asked(ask, name)
    reasons = jobs.reasons_of(implementation, ask)
    directions = [direction for direction in ask.directions if not reasons[direction]]
    if not directions or _makes_large_scores(ask, name, SCORES_TOGETHER / processes):
        return
    inputs = jobs.inputs_of(ask)
    with jobs.global_state_kept():
        prepared = implementation.prepare(ask.workload, ask.device)
        for direction in directions:
            jobs.direction_call(prepared, inputs, direction)()


def prepare_ahead(ask: Ask, names: tuple[str, ...], *, report: Report) -> dict[str, float]:
    """Prepare for measuring, and call once; seconds by name. One that raises will raise again where it is measured."""
    from attnscope import jobs
    from attnscope.spending import Ledger

    ledger = Ledger()
    inputs = jobs.inputs_of(ask)
    for name in names:
        report(("prepare", name))
        if _makes_large_scores(ask, name, SCORES_BESIDE):
            continue
        reasons = jobs.reasons_of(jobs.find_asked(ask, name), ask)
        ledger.begin(name, "ahead")
        # what an implementation raises here says nothing yet: it is asked again, alone, where it is measured
        with contextlib.suppress(Exception), jobs.global_state_kept():
            prepared = jobs.prepared_for(ask, name)
            for direction in ask.directions:
                if not reasons[direction]:
                    jobs.direction_call(prepared, inputs, direction)()
        ledger.end()
    jobs.synchronise(ask.device)
    return {name: stages["ahead"] for name, stages in ledger.seconds.items()}


def _makes_large_scores(ask: Ask, name: str, share: float) -> bool:
    from attnscope import jobs
    from attnscope.device import available_memory_bytes

    if not jobs.find_asked(ask, name).sheet.materialises_scores:
        return False
    need: int = ask.workload.score_bytes() * max(jobs.SCORE_COPIES.values())
    return need > share * available_memory_bytes(ask.device)


__all__: list[Any] = ["ahead", "meanwhile", "prepare_ahead", "run_once", "warm_caches", "warm_tasks"]
