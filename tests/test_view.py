"""One trace over HTTP on loopback, as ui.perfetto.dev's own rules need it."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing, contextmanager, suppress
from urllib.parse import urlsplit

import pytest

from attnscope.errors import TraceError
from attnscope.view import ORIGIN, PORT, PortTaken, TraceServer, view_trace

BODY = bytes(range(256)) * 9000  # more than one block


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "my trace #1.json.gz"
    path.write_bytes(BODY)
    return path


@contextmanager
def viewing(trace, **options):
    """The page's address while the trace is served; ends when it was fetched."""
    pages: list[str] = []
    listening = threading.Event()
    thread = threading.Thread(
        target=view_trace,
        args=(trace, lambda page: (pages.append(page), listening.set())),
        kwargs={"port": 0} | options,
    )
    thread.start()
    try:
        assert listening.wait(10)
        yield pages[0]
    finally:
        there = urlsplit(pages[0].partition("?url=")[2])
        thread.join(0.2)
        if thread.is_alive():  # the test failed before it fetched
            with suppress(OSError):
                ask(there.port, "GET", there.path)
        thread.join(10)
        assert not thread.is_alive()


def ask(port, method, path, **headers):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def test_the_page_may_fetch_it_whole_and_then_it_ends(trace):
    with viewing(trace) as page:
        origin, _, address = page.partition("/#!/?url=")
        there = urlsplit(address)
        assert (origin, there.scheme, there.hostname) == (ORIGIN, "http", "127.0.0.1")
        assert there.path == "/my-trace-1.json.gz"  # nothing in it that a second decoding would change
        status, headers, body = ask(there.port, "GET", there.path, Origin=ORIGIN)
        assert (status, body) == (200, BODY)
        assert headers["Access-Control-Allow-Origin"] == ORIGIN
        assert headers["Content-Length"] == str(len(BODY))
        assert "Content-Encoding" not in headers  # Perfetto unpacks a gzipped trace by itself
        assert headers["Cache-Control"] == "no-cache"
    with pytest.raises(OSError):
        ask(there.port, "GET", there.path)


def test_it_listens_on_loopback_alone(trace):
    with TraceServer(trace, 0, ORIGIN) as server:
        assert server.server_address[0] == "127.0.0.1"


def test_a_range_is_answered_whole_and_said_so(trace):
    with viewing(trace) as page:
        there = urlsplit(page.partition("?url=")[2])
        status, headers, body = ask(there.port, "GET", there.path, Range="bytes=0-9")
        assert (status, body, headers["Accept-Ranges"]) == (200, BODY, "none")


def test_the_default_port_is_the_one_that_the_page_may_reach():
    assert (PORT, ORIGIN) == (9001, "https://ui.perfetto.dev")


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/status", {}, 404),  # the page asks for a trace processor first
        ("GET", "/other.json", {}, 404),
        ("GET", "/../my-trace-1.json.gz", {}, 404),
        ("GET", "/..%2fmy-trace-1.json.gz", {}, 404),
        ("GET", "//etc/passwd", {}, 404),
        ("GET", "/", {}, 404),
        ("GET", "/my-trace-1.json.gz", {"Host": "evil.example:9001"}, 403),
        ("GET", "/my-trace-1.json.gz", {"Origin": "https://evil.example"}, 403),
        ("GET", "/my-trace-1.json.gz", {"Origin": "null"}, 403),
        ("HEAD", "/my-trace-1.json.gz", {"Origin": "https://evil.example"}, 403),
        ("HEAD", "/my-trace-1.json.gz", {}, 200),
        ("OPTIONS", "/my-trace-1.json.gz", {"Access-Control-Request-Private-Network": "true"}, 204),
    ],
)
def test_whatever_else_is_asked_neither_gives_a_file_nor_ends_it(trace, method, path, headers, status):
    with viewing(trace) as page:
        port = urlsplit(page.partition("?url=")[2]).port
        got, found, body = ask(port, method, path, **headers)
        assert (got, body) == (status, b"")
        assert found["Access-Control-Allow-Origin"] == ORIGIN
        assert ("Access-Control-Allow-Private-Network" in found) == (method == "OPTIONS")
        assert ask(port, "GET", "/my-trace-1.json.gz")[2] == BODY


def test_a_reader_that_goes_away_may_come_again(trace):
    trace.write_bytes(bytes(24 << 20))
    with viewing(trace) as page:
        there = urlsplit(page.partition("?url=")[2])
        with socket.create_connection(("127.0.0.1", there.port)) as connection:
            host = f"127.0.0.1:{there.port}"
            connection.sendall(f"GET {there.path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            connection.recv(100)
        assert len(ask(there.port, "GET", there.path)[2]) == 24 << 20


def test_two_readers_at_once_get_both_the_whole(trace):
    with TraceServer(trace, 0, ORIGIN) as server:
        path, port, got = f"/{server.name}", server.server_port, []
        readers = [threading.Thread(target=lambda: got.append(ask(port, "GET", path)[2])) for _ in range(2)]
        with server.sending():  # as if a third were slow: it does not end before all have theirs
            serving = threading.Thread(target=server.serve_until_fetched)
            serving.start()
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join(10)
            assert serving.is_alive()
        serving.join(10)
    assert got == [BODY, BODY]


def test_a_second_view_says_that_the_port_is_taken(trace):
    with TraceServer(trace, 0, ORIGIN) as server, pytest.raises(PortTaken, match=r"port \d+ must be free.*\nhint:"):
        view_trace(trace, print, port=server.server_port)


def pipe(folder):
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


@pytest.mark.parametrize("make", [lambda p: p / "none.json", lambda p: p, pipe])
def test_a_file_that_is_not_there_is_one_sentence(tmp_path, make):
    with pytest.raises(TraceError, match="cannot read"):
        view_trace(make(tmp_path), print, port=0)


def test_ctrl_c_ends_the_command(trace):
    command = [sys.executable, "-m", "attnscope", "view", str(trace), "--no-open", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as process:
        try:
            assert process.stdout.readline().startswith(f"{ORIGIN}/#!/?url=http://127.0.0.1:")
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, "ended before" in said, "Traceback" in said) == (130, True, False)
