"""A child process that runs functions by name, so that a crash, a hang or a full memory costs one row only.

Used by the sweep in :mod:`attnscope.sweeping`. The child is started as ``python -m attnscope.worker`` and not by
``multiprocessing``, which would import the caller's main module a second time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

from attnscope.errors import AttnscopeError

LOG_LINES = 12
START_LIMIT_S = 180.0


class WorkerFailed(AttnscopeError):
    """The child died, hung or could not go on; what it ran last is the caller's to know."""


class RemoteError(AttnscopeError):
    """The function raised in the child. ``kind`` is the exception's class name, ``log`` its traceback."""

    def __init__(self, kind: str, message: str, log: str) -> None:
        self.kind, self.message, self.log = kind, message, log
        super().__init__(f"{kind}: {message}")


class Caller(Protocol):
    """Runs ``module:function`` with arguments; the function's ``report=`` calls arrive at ``on_report``."""

    def call(
        self,
        function: str,
        *args: Any,
        timeout_s: float,
        on_report: Callable[[Any], None] | None = None,
        renew: bool = False,
    ) -> Any:
        """Its return value. Raises WorkerFailed or RemoteError."""

    def close(self) -> None:
        """Let go of the process."""


class Worker:
    """One child process, started at the first call and again after it died.

    ``warm_up`` (a ``module:function`` and its arguments) runs first in every new child, within a limit of its own: the
    seconds that importing torch takes are not the first implementation's. With ``hide_secrets`` the child's environment
    holds no tokens and keeps it off the hub; ``environment`` is added to it.
    """

    def __init__(
        self,
        warm_up: tuple[str, *tuple[Any, ...]] | None = None,
        *,
        hide_secrets: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._warm_up = warm_up
        self._added = dict(environment or {})
        self._hide_secrets = hide_secrets
        self._process: Child | None = None
        self._connection: Connection[Any, Any] | None = None
        self._log: Path | None = None

    def call(
        self,
        function: str,
        *args: Any,
        timeout_s: float,
        on_report: Callable[[Any], None] | None = None,
        renew: bool = False,
    ) -> Any:
        """Run ``module:function(*args, report=...)`` in the child; with ``renew`` each report begins its time anew.

        Raises:
            WorkerFailed: the child died or took longer than ``timeout_s``; it is gone then.
            RemoteError: the function raised; the child lives on, unless its device is lost.
        """
        if not self._is_alive() and self._warm_up is not None and self._warm_up[0] != function:
            self.call(*self._warm_up, timeout_s=START_LIMIT_S)
        connection = self._connect()
        deadline = time.monotonic() + timeout_s
        try:
            connection.send((function, args))
            while True:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    self.kill()
                    raise WorkerFailed(f"took longer than its limit of {timeout_s:g} s and was stopped")
                kind, body = connection.recv()
                if kind == "report":
                    deadline = time.monotonic() + timeout_s if renew else deadline
                    if on_report is not None:
                        on_report(body)
                elif kind == "error":
                    raise RemoteError(*body)
                elif kind == "lost":  # it ends now; whoever asks next must not be told of that end
                    self.kill()
                    raise RemoteError(*body)
                else:
                    return body
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise WorkerFailed(self._obituary()) from None
        except KeyboardInterrupt:
            self.kill()
            raise

    def close(self) -> None:
        """End the child; it has nothing left to save."""
        self.kill()

    def kill(self) -> None:
        """Kill the child and everything it started."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._log is not None:
            self._log.unlink(missing_ok=True)
        self._process = self._connection = self._log = None

    def _is_alive(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            self.kill()
        return self._connection is not None

    def _connect(self) -> Connection[Any, Any]:
        if self._is_alive() and self._connection is not None:
            return self._connection
        ours, theirs = Pipe()
        handle, name = tempfile.mkstemp(prefix="attnscope-worker-", suffix=".log")
        self._log = Path(name)
        environment = os.environ | self._added
        if self._hide_secrets:
            from attnscope.implementations.hub.trust import without_secrets

            environment = without_secrets(environment)
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = start_child(theirs.fileno(), handle, environment)
        os.close(handle)
        theirs.close()
        self._connection = ours
        return ours

    def _obituary(self) -> str:
        process, log = self._process, self._log
        if process is None:
            return "was closed"  # by another thread
        try:
            code = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = 0
        said = log.read_text(errors="replace").splitlines() if log else []
        lines = [line for line in said if not line.startswith("USDT:")][-LOG_LINES:]
        self.kill()
        cause = f"its process ended with exit code {code}"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            cause = f"its process was killed by {name}"
            cause += " (out of memory, most likely)" if name == "SIGKILL" else ""
        return cause + ("\n" + "\n".join(lines) if lines else "")


class Child(Protocol):
    """What a Worker asks of the process it started; :class:`subprocess.Popen` answers it."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The same, once it has ended. Raises subprocess.TimeoutExpired."""


def start_child(connection: int, log: int, environment: Mapping[str, str]) -> Child:
    """A new Python, in a session of its own, that serves file descriptor ``connection`` and writes to ``log``."""
    return subprocess.Popen(
        [sys.executable, "-m", "attnscope.worker", str(connection)],
        pass_fds=[connection],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,
    )


class InProcess:
    """The same calls in this process: for implementations that no other process can import."""

    def call(
        self,
        function: str,
        *args: Any,
        timeout_s: float,
        on_report: Callable[[Any], None] | None = None,
        renew: bool = False,
    ) -> Any:
        """Run it here; there is no protection from crashes and hangs."""
        del timeout_s, renew
        try:
            return load(function)(*args, report=on_report or (lambda body: None))
        except KeyboardInterrupt:
            raise
        except Exception as error:
            raise RemoteError(*describe(error)) from error

    def close(self) -> None:
        """Nothing to let go of."""


def load(function: str) -> Callable[..., Any]:
    """The function that ``module:name`` names."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def describe(error: BaseException) -> tuple[str, str, str]:
    """Class name, first lines of the message, and the traceback's last lines."""
    import traceback

    message = str(error).strip() or "no message"
    log = "".join(traceback.format_exception(error)[-8:])
    return type(error).__name__, printable("\n".join(message.splitlines()[:4])), printable(log)


def printable(text: str) -> str:
    """``text`` with what no UTF-8 can hold written as an escape, so that a record of it can be kept."""
    return text.encode("utf-8", "backslashreplace").decode()


def serve(connection: Connection[Any, Any]) -> None:
    """The child's loop: run what arrives, send back what it returns, until the pipe closes."""
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            body = load(function)(*args, report=lambda message: connection.send(("report", message)))
        except Exception as error:
            lost = _device_is_lost()
            connection.send(("lost" if lost else "error", describe(error)))
            if lost:
                os._exit(75)
        else:
            connection.send(("result", body))


def _device_is_lost() -> bool:
    """After a CUDA fault every later call in this process fails too: then only a new process helps."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.empty(1, device="cuda").fill_(1)
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _prefer_as_victim() -> None:
    """Should memory run out, the kernel is to kill this child, not its parent."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900")


def main(connection: int) -> None:
    """The child's life, from the file descriptor of its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.enable()
    _prefer_as_victim()
    serve(Connection(connection))


if __name__ == "__main__":
    main(int(sys.argv[1]))
