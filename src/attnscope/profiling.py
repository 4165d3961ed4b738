"""Stage 5: run one call under torch.profiler and write a Chrome trace; name the kernels that a call really ran.

Reads a Prepared and its Inputs, writes a trace file (gzipped JSON that Perfetto opens, without paths, host names or
environment). Must not import a later stage. torch is imported only inside functions.

The schedule is the profiling articles' one: warm calls and a synchronise, then steps that wait, warm up and record,
each under one label. A synchronise before recording starts keeps the warm-up's kernels out of the window.
"""

from __future__ import annotations

import gzip
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.errors import PrepareFailed, TraceError, UsageError
from attnscope.scrubbing import scrub

if TYPE_CHECKING:
    from attnscope.implementation import Prepared
    from attnscope.inputs import Inputs

LABEL_PREFIX = "attnscope/"


def step_label(implementation: str, direction: str) -> str:
    """The label of each step of that implementation and direction."""
    return f"{LABEL_PREFIX}{implementation}/{direction}"


def profile_call(
    prepared: Prepared,
    inputs: Inputs,
    direction: str,
    *,
    label: str,
    trace_path: Path,
    wait: int = 1,
    warmup: int = 1,
    active: int = 3,
    warm_calls: int = 3,
    compile: bool = False,
) -> Path:
    """Profile one direction and write its trace, gzipped, to ``trace_path``, which is returned.

    A forward runs under no_grad. A backward runs alone: its forward ran before. With ``compile`` the call goes through
    ``torch.compile`` first.

    Args:
        prepared: what an implementation's ``prepare`` returned.
        inputs: the tensors to call it with.
        direction: ``forward`` or ``backward``.
        label: name of the record_function around each call; see :func:`step_label`.
        trace_path: where the trace goes; a name that ends in ``.json.gz``.
        wait: steps that the profiler ignores.
        warmup: steps that it traces and throws away.
        active: steps that it records.
        warm_calls: calls before the profiler starts.
        compile: whether to profile the compiled call.

    Raises:
        UsageError: a number is out of range or the label is not one of ours.
        TraceError: another profiler is recording, or the file cannot be written.
        PrepareFailed: the compiler failed.
    """
    from torch.profiler import profile, record_function, schedule

    _check(direction, label, wait=wait, warmup=warmup, active=active, warm_calls=warm_calls)
    _make_folder(trace_path)
    call = _compiled_call(prepared, inputs, direction) if compile else _call(prepared, inputs, direction)
    synchronise = _synchroniser(inputs)
    for _ in range(warm_calls):
        call()
    synchronise()
    steps = wait + warmup + active
    with only_profiler():
        plan = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        with profile(activities=_activities(inputs), schedule=plan, record_shapes=True, acc_events=True) as profiler:
            for step in range(steps):
                with record_function(label):
                    call()
                if step == wait + warmup - 1 or step == steps - 1:
                    synchronise()  # nothing of the warm-up is in flight when recording starts, nor of us when it ends
                profiler.step()
        export_trace(profiler, trace_path)
    return trace_path


def kernel_names(prepared: Prepared, inputs: Inputs, direction: str) -> tuple[str, ...]:
    """Names of the GPU kernels, copies and fills that one call runs, each once, in order; on a CPU those of its ops.

    Raises:
        TraceError: another profiler is recording.
    """
    from torch.autograd import DeviceType
    from torch.profiler import profile

    call = _call(prepared, inputs, direction)
    synchronise = _synchroniser(inputs)
    call()
    synchronise()
    with only_profiler(), profile(activities=_activities(inputs), acc_events=True) as profiler:
        call()
        synchronise()
    wanted = DeviceType.CUDA if inputs.q.is_cuda else DeviceType.CPU
    events = [e for e in profiler.events() if e.device_type == wanted and not e.is_user_annotation]
    events.sort(key=lambda e: e.time_range.start)
    return tuple(dict.fromkeys(e.name for e in events))


def compiled(prepared: Prepared) -> Prepared:
    """The same call through ``torch.compile``; a backward then uses what the compiled forward saved."""
    return _Compiled(prepared)


class _Compiled:
    def __init__(self, prepared: Prepared) -> None:
        import torch

        self.forward = torch.compile(prepared.forward, dynamic=False)
        self.backward = prepared.backward


def _call(prepared: Prepared, inputs: Inputs, direction: str) -> Callable[[], Any]:
    """One call of a direction without arguments."""
    import torch

    if direction == "backward":
        saved = prepared.forward(inputs, save=True).saved
        return lambda: prepared.backward(inputs, saved)

    def forward() -> Any:
        with torch.no_grad():
            return prepared.forward(inputs)

    return forward


def _compiled_call(prepared: Prepared, inputs: Inputs, direction: str) -> Callable[[], Any]:
    """The same through ``torch.compile``, compiled already. Raises PrepareFailed."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's advice is for whoever wrote the call
            call = _call(compiled(prepared), inputs, direction)
            call()
    except TorchDynamoException as error:
        lines = str(error).strip().splitlines()
        raise PrepareFailed("torch.compile failed", "\n".join(lines[-12:])) from error
    return call


def _make_folder(trace_path: Path) -> None:
    try:
        trace_path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TraceError(
            f"cannot write trace {trace_path}: {error.strerror or error}\nhint: --out another folder"
        ) from None


def _check(direction: str, label: str, **counts: int) -> None:
    if direction not in ("forward", "backward"):
        raise UsageError(f"direction must be forward or backward, got {direction!r}")
    if not label.startswith(LABEL_PREFIX):
        raise UsageError(f"a step's label must start with {LABEL_PREFIX!r}, got {label!r}\nhint: use step_label()")
    for name, count in counts.items():
        least = 1 if name == "active" else 0
        if count < least:
            raise UsageError(f"{name} must be {least} or more, got {count}")


def _activities(inputs: Inputs) -> list[Any]:
    from torch.profiler import ProfilerActivity

    cpu = [ProfilerActivity.CPU]
    return [*cpu, ProfilerActivity.CUDA] if inputs.q.is_cuda else cpu


def _synchroniser(inputs: Inputs) -> Callable[[], None]:
    import torch

    device = inputs.q.device
    return (lambda: torch.cuda.synchronize(device)) if inputs.q.is_cuda else (lambda: None)


@contextmanager
def only_profiler() -> Iterator[None]:
    """torch records for one profiler at a time, and with a second one ends in an internal error.

    The first flag is of this thread, the second of the process.
    """
    import torch

    if torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled:
        raise TraceError(
            "attnscope must be the only profiler of this process, and another torch profiler is recording\n"
            "hint: leave its with-block, or run attnscope outside it"
        )
    yield


def export_trace(profiler: Any, trace_path: Path) -> None:
    """Write the profiler's trace, gzipped, without what it says of the user's machine, whole or not at all.

    Raises:
        TraceError: the file cannot be written, or torch wrote no JSON.
    """
    raw = trace_path.with_name(f".{trace_path.name}.{os.getpid()}.json")
    packed = raw.with_suffix(".gz")
    try:
        profiler.export_chrome_trace(str(raw))
        with open(raw, encoding="utf-8") as file:
            trace = scrub(json.load(file))
        with open(packed, "wb") as target, gzip.GzipFile("", "wb", 6, target, mtime=0) as file:
            file.write(json.dumps(trace, separators=(",", ":")).encode())
        os.replace(packed, trace_path)
    except OSError as error:
        raise TraceError(
            f"cannot write trace {trace_path}: {error.strerror or error}\n"
            "hint: free some space, or --out another folder"
        ) from None
    except ValueError as error:
        raise TraceError(f"torch wrote a trace that is not JSON: {error}") from None
    finally:
        for leftover in (raw, packed):
            leftover.unlink(missing_ok=True)
