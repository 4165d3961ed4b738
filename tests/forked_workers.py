"""Worker processes for tests, forked from one that has imported torch: a start costs milliseconds, not seconds.

Each is what ``python -m attnscope.worker`` is right after its imports: a process and a session of its own, with the
environment, folder and search path of whoever asked. tests/test_worker.py and the command line's tests start the real
one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from attnscope import worker

ASK_AGAIN_S = 0.005


class Nursery:
    """The process that forks, from our side: one request, one answer."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._busy = threading.Lock()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        command = [sys.executable, "-m", "forked_workers", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True, stdin=subprocess.DEVNULL
        )
        theirs.close()

    def start_child(self, connection: int, log: int, environment: Mapping[str, str]) -> Forked:
        """As :func:`attnscope.worker.start_child`, which it stands in for."""
        with self._busy:
            self._connection.send(("fork", os.getcwd(), dict(environment)))
            for handle in (connection, log):
                send_handle(self._connection, handle, self._process.pid)
            return Forked(self, self._connection.recv())

    def exit_code(self, pid: int) -> int | None:
        """Of a child that it forked; None while that one runs."""
        with self._busy:
            self._connection.send(("ended", pid))
            return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


class Forked:
    """A forked worker as :class:`attnscope.worker.Child`; only the process that forked it can wait for it."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._nursery.exit_code(self.pid)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
            time.sleep(ASK_AGAIN_S)
        return code


# --- in the process that forks ----------------------------------------------------------------------------------------


def rear(connection: Connection[Any, Any]) -> None:
    """Fork when asked, say who ended, until the pipe closes. No thread may run here: a fork would lose it."""
    import torch._inductor  # noqa: F401 - torch.profiler imports it at its first use

    from attnscope import explaining, jobs, warming  # noqa: F401

    gc.freeze()  # so that collecting garbage in a fork neither walks through all of torch nor copies its pages
    codes: dict[int, int] = {}
    while True:
        try:
            what, *rest = connection.recv()
        except EOFError:
            return
        if what == "fork":
            handles = [recv_handle(connection) for _ in range(2)]
            if os.fork() == 0:
                _live(connection, *handles, *rest)
            for handle in handles:
                os.close(handle)
        else:
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
            connection.send(codes.get(rest[0]))


def _live(nursery: Connection[Any, Any], connection: int, log: int, folder: str, environment: dict[str, str]) -> None:
    """In the fork: become what was asked for, say so, serve, end."""
    code = 1
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = [folder, *environment["PYTHONPATH"].split(os.pathsep)]
        nursery.send(os.getpid())
        nursery.close()
        worker.main(connection)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    rear(Connection(int(sys.argv[1])))
