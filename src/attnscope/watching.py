"""``with attnscope.watch() as w: model(x)``: profile live code and explain it with the engine of ``attnscope explain``.

Runs whatever the body runs, under torch.profiler on every thread; reads the trace, writes an Explanation. torch is
imported only inside functions. Nothing of the program is changed but one thing, while the watch is open: the three
methods of ``torch.cuda.CUDAGraph`` that capture and replay put a named scope around what they do, because a replayed
kernel carries no other word on where it was captured.
"""

from __future__ import annotations

import functools
import gc
import gzip
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeError, DeviceError, TraceError, UsageError
from attnscope.explaining.captured import CAPTURE, REPLAY, REPLAY_FROM_BEFORE

if TYPE_CHECKING:
    from attnscope.explaining.explanation import Explanation

NAME = "watch"
STEP_COUNT = "ProfilerStep"  # what torch.profiler.profile counts its steps under
_OPEN = threading.Lock()  # held by the one watch of this process that is open


def watch(*, modules: bool = False) -> Watch:
    """Profile what the ``with`` block runs, on CPU and GPU, and explain its attention.

    ``print(w)`` shows the explanation, a notebook shows it by itself, ``w.explanation`` holds it as data and
    ``w.save("trace.json.gz")`` keeps the trace, which ``attnscope explain`` reads again. An exception in the block
    passes through; what ran before it is explained all the same.

    Args:
        modules: also record which ``nn.Module`` each call belongs to. That takes Python stacks, which slow the host.

    Raises:
        TraceError: another profiler of this process is at work, or another watch (when the block is entered, or left).
        UsageError: the watch was used before, or is entered while a CUDA graph is being captured.
        DeviceError: torch is not installed.
    """
    return Watch(modules=modules)


class Watch:
    """What :func:`watch` returns; it records one ``with`` block and then explains it."""

    def __init__(self, *, modules: bool = False) -> None:
        self._modules = modules
        self._state = "new"
        self._profiler: Any = None
        self._labels = GraphLabels()
        self._trace = b""
        self._failure: AttnscopeError | None = None

    def __enter__(self) -> Watch:
        torch = _torch()
        if self._state != "new":
            raise UsageError(
                "a watch records one with-block, and this one was used before\nhint: attnscope.watch() anew"
            )
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "a watch cannot begin while a CUDA graph is being captured\n"
                "hint: begin it before the capture; then the replays are explained too"
            )
        if not _OPEN.acquire(blocking=False):
            raise TraceError(
                "one watch may be open in a process, and another one is\n"
                "hint: leave its with-block first, or put both calls into one block; it sees every thread"
            )
        try:
            self._start(torch)
        except BaseException:
            self._labels.remove()
            _OPEN.release()
            raise
        self._state = "open"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state = "closed"
        try:
            self._stop(_torch(), failed=error is not None)
        except (AttnscopeError, RuntimeError) as own:  # the second is torch's: a device that failed
            self._failure = own if isinstance(own, AttnscopeError) else TraceError(f"the watch kept nothing: {own}")
            if error is None:
                raise

    @functools.cached_property
    def explanation(self) -> Explanation:
        """What was seen. Raises UsageError before the block ended, TraceError where nothing could be recorded."""
        from attnscope.explaining import explain_trace
        from attnscope.trace import parse_trace

        return explain_trace(parse_trace(gzip.decompress(self._recorded()), NAME), NAME)

    def save(self, path: str | Path) -> Path:
        """Write the trace, gzipped where the name ends in ``.gz``, without paths, host names or environment.

        Raises:
            UsageError: the block has not ended yet.
            TraceError: nothing could be recorded, or the file cannot be written.
        """
        path, packed = Path(path), self._recorded()
        try:
            path.write_bytes(packed if path.suffix == ".gz" else gzip.decompress(packed))
        except OSError as error:
            raise TraceError(f"cannot write trace {path}: {error.strerror or error}\nhint: another path") from None
        return path

    def __str__(self) -> str:
        from attnscope.reporting.explanation_text import render_explanation

        return render_explanation(self.explanation) if self._has_recorded else repr(self)

    def __repr__(self) -> str:
        if not self._has_recorded:
            return f"<attnscope watch, {self._failure or self._state}>"
        window = self.explanation.window
        kinds = len(self.explanation.sites)
        return (
            f"<attnscope watch, {kinds} attention call site{'s' if kinds != 1 else ''}, "
            f"{len(self.explanation.findings)} findings{'' if window.on_gpu else ', CPU only'}: print it>"
        )

    def _repr_html_(self) -> str | None:
        """The explanation as a fragment; None, for which a notebook shows the repr, before the block ended."""
        from attnscope.reporting.explanation_html import explanation_fragment

        return explanation_fragment(self.explanation) if self._has_recorded else None

    @property
    def _has_recorded(self) -> bool:
        return self._state == "closed" and self._failure is None

    def _recorded(self) -> bytes:
        if self._failure is not None:
            raise TraceError(str(self._failure))
        if self._state != "closed":
            raise UsageError(
                "a watch explains what its with-block ran, and the block has not ended\nhint: look after it"
            )
        return self._trace

    def _start(self, torch: Any) -> None:
        refuse_other_profilers()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._labels.put_on(torch.cuda.CUDAGraph)
        _synchronise(torch)  # what was launched before belongs to nobody here
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profiler = torch.profiler.profile(
            activities=activities, record_shapes=True, with_stack=self._modules, experimental_config=every_thread,
            acc_events=True,
        )  # fmt: skip
        try:
            self._profiler.__enter__()
        except RuntimeError as error:
            raise TraceError(
                f"torch's profiler does not start: {error}\n"
                "hint: only one tool may profile a process; is it run under Nsight or another profiler?"
            ) from error

    def _stop(self, torch: Any, *, failed: bool) -> None:
        """Close the profiler, whatever the body did to the device, and keep the trace."""
        try:
            self._labels.remove()
            try:
                _synchronise(torch)
            except RuntimeError:  # the device failed: with an exception of the body on its way, that one is told
                if not failed:
                    raise
            finally:
                self._end_profiler(torch)
        finally:
            _OPEN.release()
        with tempfile.TemporaryDirectory(prefix="attnscope-") as folder:
            from attnscope.profiling import export_trace

            path = Path(folder) / "watch.json.gz"
            export_trace(self._profiler, path)
            self._trace = path.read_bytes()
        self._profiler = None

    def _end_profiler(self, torch: Any) -> None:
        """Stop our profiler. One that was started inside the block has taken its records, and perhaps still runs."""
        other_runs = torch.autograd._profiler_enabled()
        if not other_runs and torch.autograd.profiler._is_profiler_enabled:
            self._profiler.__exit__(None, None, None)
            return
        if not other_runs:
            self._profiler.__exit__(None, None, None)  # it has nothing to tell, but shall not hold torch's profiler
        raise TraceError(
            "the watch recorded nothing, because another torch profiler was started inside its block\n"
            "hint: profile in one place; the trace of the other reads with attnscope explain"
        )


class GraphLabels:
    """Scopes around captures and replays of CUDA graphs: the word that links a replayed kernel to its capture.

    A graph gets a number when its capture begins. One that has none at its replay was captured before.
    """

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._capturing: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._count = 0
        self._graph_class: Any = None
        self._originals: dict[str, Any] = {}

    def put_on(self, graph_class: Any) -> None:
        """Wrap ``capture_begin``, ``capture_end`` and ``replay`` of a class of graphs."""
        self._graph_class = graph_class
        for name, wrapper in (("capture_begin", self._begin), ("capture_end", self._end), ("replay", self._replay)):
            self._originals[name] = graph_class.__dict__.get(name)
            setattr(graph_class, name, _method(wrapper, getattr(graph_class, name)))

    def remove(self) -> None:
        """Put everything back as it was."""
        for name, original in self._originals.items():
            if original is None:
                delattr(self._graph_class, name)  # it was inherited
            else:
                setattr(self._graph_class, name, original)
        self._originals.clear()

    def _begin(self, call: Callable[[], Any], graph: Any) -> Any:
        self._count += 1
        scope = _scope(f"{CAPTURE}{self._count}")
        scope.__enter__()
        try:
            done = call()
        except BaseException:
            scope.__exit__(None, None, None)
            raise
        self._numbers[graph], self._capturing[graph] = str(self._count), scope
        return done

    def _end(self, call: Callable[[], Any], graph: Any) -> Any:
        try:
            return call()
        finally:
            scope = self._capturing.pop(graph, None)
            if scope is not None:
                scope.__exit__(None, None, None)

    def _replay(self, call: Callable[[], Any], graph: Any) -> Any:
        number = self._numbers.get(graph)
        with _scope(REPLAY_FROM_BEFORE if number is None else f"{REPLAY}{number}"):
            return call()


def refuse_other_profilers() -> None:
    """Raises TraceError where a torch profiler of this process records, or waits in its schedule to record.

    One that waits shows in no flag, and starting another one makes it end the process when its turn comes; so it is
    looked for among the living objects. A profiler with a schedule holds a scope from its start on, which older torch
    leaves in place at its stop, and counts steps under a name that its end erases.
    """
    from attnscope.profiling import only_profiler

    with only_profiler():
        pass
    if any(True for _ in _scheduled_profilers()):
        raise TraceError(
            "a watch must be the only profiler of this process, and a torch profiler with a schedule is open\n"
            "hint: leave its with-block, or read its trace with attnscope explain"
        )


def _scheduled_profilers() -> Iterator[Any]:
    torch = _torch()
    counted = getattr(torch.autograd.profiler.KinetoStepTracker, "_step_dict", None)
    if counted is not None and STEP_COUNT not in counted:
        return
    for one in gc.get_objects():
        if issubclass(type(one), torch.profiler.profile) and getattr(one, "step_rec_fn", None) is not None:
            yield one


def _method(wrapper: Callable[[Callable[[], Any], Any], Any], original: Any) -> Any:
    @functools.wraps(original)
    def method(graph: Any, *arguments: Any, **named: Any) -> Any:
        return wrapper(lambda: original(graph, *arguments, **named), graph)

    return method


def _scope(name: str) -> Any:
    return _torch().profiler.record_function(name)


def _synchronise(torch: Any) -> None:
    """Wait for the devices that this process works on, so that the window holds what was launched in it, all of it."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return
    current = torch.cuda.current_device()
    for index in range(torch.cuda.device_count()):
        if index == current or torch.cuda.memory_reserved(index):
            torch.cuda.synchronize(index)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise DeviceError(
            "watching a model needs torch, which is not installed\nhint: pip install 'attnscope[torch]'"
        ) from None
    return torch
