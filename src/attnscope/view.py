"""Serve one trace on loopback, so that ui.perfetto.dev shows it without anything leaving the machine.

Reads a trace file, writes HTTP. The page's own rules (its Content-Security-Policy) let it fetch from one local address,
127.0.0.1:9001, and the browser hands it the answer only where that allows the page's origin (CORS). Imports no stage.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from attnscope.errors import AttnscopeError, TraceError

HOST, PORT = "127.0.0.1", 9001
ORIGIN = "https://ui.perfetto.dev"


class PortTaken(AttnscopeError):
    """Something else listens on the port that the page may fetch from."""


def view_trace(path: Path, tell: Callable[[str], None], *, port: int = PORT, origin: str = ORIGIN) -> None:
    """Serve ``path`` until it was fetched once, whole; ``tell`` gets the address to open, once the server listens.

    Raises:
        TraceError: there is no such file, or it cannot be read.
        PortTaken: the port is not free.
    """
    _require_readable(path)
    try:
        server = TraceServer(path, port, origin)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortTaken(
            f"port {port} must be free, something else listens on it: another `attnscope view`, or trace_processor\n"
            f"hint: end that one; {ORIGIN} fetches from no other port"
        ) from None
    with server:
        tell(server.page)
        server.serve_until_fetched()
    if server.failed:
        raise TraceError(f"{path} could not be sent whole: {server.failed}")


def _require_readable(path: Path) -> None:
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError("it is no regular file")
        with open(path, "rb"):
            pass
    except OSError as error:
        raise TraceError(
            f"cannot read {path}: {error.strerror or error}\nhint: a trace is a file that torch.profiler exported"
        ) from None


class TraceServer(ThreadingHTTPServer):
    """One file under one name; a second request at the same time is answered too."""

    daemon_threads = True  # a browser may hold a connection open on which it never asks

    def __init__(self, path: Path, port: int, origin: str) -> None:
        self.path, self.origin = path, origin
        self.name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name)  # the page decodes the address once more than it should
        self.failed = ""
        self._sending, self._changed, self._fetched = 0, threading.Condition(), False
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        """Where the trace itself is."""
        return f"http://{HOST}:{self.server_port}/{self.name}"

    @property
    def page(self) -> str:
        """The page that shows it."""
        return f"{self.origin}/#!/?url={self.address}"

    def serve_until_fetched(self) -> None:
        """Answer requests until the file was sent once, and let what is being sent end."""
        thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: (self._fetched or self.failed) and not self._sending)
        finally:
            self.shutdown()
            thread.join()

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser drops connections as it likes; what went wrong with the file itself is in ``failed``."""

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Around one answer with the file; left without an exception, it was fetched."""
        with self._changed:
            self._sending += 1
        fetched, failed = False, ""
        try:
            yield
            fetched = True
        except ConnectionError:  # the reader went away; it may come again
            pass
        except OSError as error:
            failed = error.strerror or str(error)
        finally:
            with self._changed:
                self._sending -= 1
                self._fetched |= fetched
                self.failed = self.failed or failed
                self._changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    server: TraceServer

    def do_GET(self) -> None:
        """The trace under its name, nothing else."""
        if not self._is_asked_for():
            return
        with self.server.sending(), open(self.server.path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            self._headers(200, {"Content-Type": "application/octet-stream", "Content-Length": str(size)})
            shutil.copyfileobj(file, self.wfile, 1 << 20)
            self.wfile.flush()

    def do_HEAD(self) -> None:
        """What a GET would say of it."""
        if self._is_asked_for():
            size = str(self.server.path.stat().st_size)
            self._headers(200, {"Content-Type": "application/octet-stream", "Content-Length": size})

    def do_OPTIONS(self) -> None:
        """Before it fetches from a local address, a browser may ask whether the page may."""
        allowed = {"Access-Control-Allow-Methods": "GET, HEAD", "Access-Control-Allow-Headers": "*"}
        self._headers(204, allowed | {"Access-Control-Allow-Private-Network": "true", "Content-Length": "0"})

    def do_POST(self) -> None:
        """The page first asks whether a trace processor listens here; none does."""
        self._headers(404, {"Content-Length": "0"})

    def _is_asked_for(self) -> bool:
        host = self.headers.get("Host", "")
        if host not in (f"{HOST}:{self.server.server_port}", f"localhost:{self.server.server_port}"):
            self._headers(403, {"Content-Length": "0"})  # a foreign name that was made to lead here
            return False
        if self.headers.get("Origin", self.server.origin) != self.server.origin:
            self._headers(403, {"Content-Length": "0"})  # another page, which could not read it but would end this
            return False
        if self.path.partition("?")[0] != f"/{self.server.name}":
            self._headers(404, {"Content-Length": "0"})
            return False
        return True

    def _headers(self, status: int, more: dict[str, str]) -> None:
        self.send_response(status)
        shared = {"Access-Control-Allow-Origin": self.server.origin, "Vary": "Origin", "Cache-Control": "no-cache"}
        shared["Accept-Ranges"] = "none"  # the page reads a trace whole
        for name, value in (shared | more).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: stderr is for what the user must know."""
