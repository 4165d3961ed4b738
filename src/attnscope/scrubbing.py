"""Stage 5: what a trace gives away of its machine and its user, and a copy of it that does not.

Reads trace files and their JSON, writes JSON. Must not import a later stage. What is looked for is looked for in the
bytes, whatever the structure; what is taken out is taken out of the decoded strings, and then looked for again.
"""

from __future__ import annotations

import gzip
import re
import socket
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnscope.errors import TraceError
from attnscope.secrecy import SECRET_VALUE

# What a trace says of its machine that explains its numbers; everything else at the top level is left out.
KEPT_KEYS = (
    "schemaVersion", "deviceProperties", "cuda_runtime_version", "cuda_driver_version", "cupti_version",
    "hip_runtime_version", "hip_driver_version", "roctracer_version", "record_shapes", "with_stack", "with_flops",
    "with_modules", "profile_memory", "displayTimeUnit", "baseTimeNanoseconds", "traceEvents",
)  # fmt: skip
DROPPED_KEYS = frozenset(
    {
        "hostname", "host_name", "hostName", "HOSTNAME", "host", "nodename", "node_name", "user", "username",
        "userName", "user_name", "cwd", "env", "environ", "environment", "cmdline", "command_line", "argv",
    }
)  # fmt: skip
NOBODY = frozenset({"root", "user", "users", "ubuntu", "runner", "admin", "work", "data", "home", "shared", "public"})
LEAST_NAME = 3  # letters of a user's name that is also taken out where no path is around it
_ROOTS = r"[A-Za-z]:[\\/]+Users|(?:/[^\s/\\\"':;,|]+)*/(?:home|Users)|/root(?=[\\/]|\s|$)|~(?=[\\/])"
_HOME_PATH = re.compile(rf"(?:file:/{{2}})?({_ROOTS})((?:[\\/]+[^\\/\n\r\t\"':;,|<>]*)*)")
_NETWORK_PATH = re.compile(r"(?<!\S)\\\\[^\\/\s\"']+((?:\\+[^\\/\n\"':;,|]*)+)")
_PATH = re.compile(r"(?<![\w.\\-])(?:[A-Za-z]:)?[\\/](?:[^\\/\s\"']+[\\/])+([^\\/\s\"']*)")
_AT_HOST = re.compile(r"[\w.+-]+@(?:[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}\b|[\w.-]+(?=:[/~\\]))")

_VARIABLE = re.compile(rb'"(PATH|HOME|PWD|USER|SHELL|LD_LIBRARY_PATH|PYTHONPATH|HOSTNAME)\\?"\s*:')
_DUMP = re.compile(rb"\bLD_LIBRARY_PATH\b")
_HOME = re.compile(rb"(?:/home/|/Users/|/root/|[A-Za-z]:(?:\\{1,2}|/)Users(?:\\{1,2}|/))[^\s/\\\"']*")
_HOST = re.compile(rb'"(?:host_?[nN]ame|HOSTNAME|node_?name)\\?"\s*:\s*\\?"[^"\\]|[\w.+-]+@[\w.-]+:[/~]')
_SECRET = re.compile(SECRET_VALUE.pattern.encode())
# torch.profiler.tensorboard_trace_handler names a file after the machine: HOST_PID.TIME.pt.trace.json
_HANDLER_NAME = re.compile(r"(?P<host>.+?)(?P<rest>_\d+\.\d+\.pt\.trace\.json(?:\.gz)?)")
OVERLAP = 4096
TRACE_PACKET, COMPRESSED_PACKETS = 1, 50  # field numbers of Perfetto's trace.proto and trace_packet.proto
LENGTH_DELIMITED = 2
BYTES_OF = {1: 8, 5: 4}  # wire types of a fixed size


@dataclass
class Private:
    """What one trace says of its machine and its user."""

    environment: bool = False
    host: bool = False
    secret: bool = False
    homes: set[str] = field(default_factory=set)

    def sentences(self) -> Iterator[str]:
        """One for each kind."""
        if self.secret:
            yield "holds what looks like an access token or a password"
        if self.environment:
            yield "holds environment variables of the machine it was recorded on, perhaps with secrets"
        if self.homes:
            yield f"holds paths of a user ({', '.join(sorted(self.homes)[:3])})"
        if self.host:
            yield "names the machine it was recorded on"


def look_for_private(path: Path) -> Private:
    """What a trace file gives away, by its bytes and its name, whatever its structure. Raises TraceError."""
    found, variables, tail = Private(host=neutral_name(path.name) != path.name), set(), b""
    own = socket.gethostname().encode()
    here = re.compile(rb"(?<![\w.-])" + re.escape(own) + rb"(?![\w-])") if len(own) > LEAST_NAME else None
    for block in readable_blocks(path):
        piece = tail + block.replace(b"\\/", b"/")
        variables |= {match[1] for match in _VARIABLE.finditer(piece)}
        found.environment |= _DUMP.search(piece) is not None
        found.secret |= _SECRET.search(piece) is not None
        found.host |= _HOST.search(piece) is not None or (here is not None and here.search(piece) is not None)
        if len(found.homes) < 8:
            found.homes |= {match.decode(errors="replace") for match in _HOME.findall(piece)}
        tail = piece[-OVERLAP:]
    found.environment |= len(variables) >= 2
    return found


def neutral_name(name: str) -> str:
    """A file's name without the machine's, where torch's handler put it in front."""
    match = _HANDLER_NAME.fullmatch(name)
    return name if match is None or match["host"] == "trace" else f"trace{match['rest']}"


def blocks_of(path: Path) -> Iterator[bytes]:
    """A file in pieces, unpacked where it is gzipped. Raises TraceError."""
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            while block := file.read(1 << 20):
                yield block
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def readable_blocks(path: Path) -> Iterator[bytes]:
    """The same, and after it what a Perfetto trace holds compressed inside."""
    if ".json" in path.name:
        yield from blocks_of(path)
        return
    whole = b"".join(blocks_of(path))
    yield whole
    for number, packet in _fields(whole):
        if number == TRACE_PACKET:
            yield from (_inflated(body, path) for inner, body in _fields(packet) if inner == COMPRESSED_PACKETS)


def _inflated(body: bytes, path: Path) -> bytes:
    try:
        return zlib.decompress(body)
    except zlib.error as error:
        raise TraceError(f"cannot look into {path}: {error}") from None


def _fields(body: bytes) -> Iterator[tuple[int, bytes]]:
    """(field number, content) of the length-delimited fields of a protobuf message; ends where it is none."""
    place = 0
    while place < len(body):
        tag, place = _varint(body, place)
        kind = tag & 7
        if kind == LENGTH_DELIMITED:
            size, place = _varint(body, place)
            yield tag >> 3, body[place : place + size]
            place += size
        elif kind == 0:
            _, place = _varint(body, place)
        elif kind in BYTES_OF:
            place += BYTES_OF[kind]
        else:
            return


def _varint(body: bytes, place: int) -> tuple[int, int]:
    """(number, where it ends)."""
    number = shift = 0
    while place < len(body):
        byte = body[place]
        place += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return number, place


def scrub(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace without host name, file name and environment; of paths only file names are left, of secrets nothing.

    A user's name, as the paths of homes tell it, is also taken out of the arguments of events.
    """
    users: set[str] = set()
    kept = {key: _cleaned(trace[key], users) for key in KEPT_KEYS if key in trace}
    names = sorted({name for name in users if len(name) >= LEAST_NAME and name.lower() not in NOBODY})
    if not names:
        return kept
    word = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)")
    for event in kept.get("traceEvents", ()):
        if isinstance(event, dict) and "args" in event:
            event["args"] = _without(event["args"], word)
    return kept


def _cleaned(value: Any, users: set[str]) -> Any:
    """Without paths, hosts and secrets; adds the users whose homes it saw."""
    if isinstance(value, dict):
        pairs = value.items()
        return {_clean(key, users): _cleaned(item, users) for key, item in pairs if key not in DROPPED_KEYS}
    if isinstance(value, list):
        return [_cleaned(item, users) for item in value]
    return _clean(value, users) if isinstance(value, str) else value


def _clean(text: str, users: set[str]) -> str:
    if SECRET_VALUE.search(text):
        text = SECRET_VALUE.sub("***", text)
    if "@" in text:
        text = _AT_HOST.sub("***", text)
    if "/" in text or "\\" in text:

        def last_part(match: re.Match[str]) -> str:
            parts = [part for part in re.split(r"[\\/]+", match[2]) if part]
            if match[1][0] != "~" and not match[1].endswith("root"):
                users.update(part for whole in parts[:1] for part in (whole.strip(), *whole.split()[:1]))
                parts = parts[1:]
            return parts[-1] if parts else "~"

        text = _HOME_PATH.sub(last_part, text)
        text = _NETWORK_PATH.sub(lambda match: match[1].rpartition("\\")[2], text)
        text = _PATH.sub(r"\1", text)
    return text


def _without(value: Any, word: re.Pattern[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, word) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, word) for item in value]
    return word.sub("user", value) if isinstance(value, str) else value
