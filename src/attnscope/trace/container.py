"""Stage 6: the events of a Chrome trace document, batch by batch, and what stands around them.

Reads blocks of bytes, writes RawEvent lists. Imports neither torch nor an implementation. A document is cut between two
events and each piece is decoded by itself, so that memory stays bounded; a piece that is no valid JSON is read event by
event, and what is broken is left out and said. The place between two events is found by their first key. Inside a
valid string that place cannot be, since its quotes would be escaped there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from attnscope.errors import TraceError
from attnscope.trace.blocks import kind_of

_KEYS = r'\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|s|bp|tts|tdur)"\s*:'
BOUNDARY = re.compile(rb"\}\s*,\s*(?=" + _KEYS.encode() + rb")")
BOUNDARY_TEXT = re.compile(r"\}\s*,\s*(?=" + _KEYS + r")")
START = re.compile(rb'"traceEvents"\s*:\s*')
SPACE = re.compile(r"[\s,]*")
MOST_BYTES = 128 << 20  # of a head, a tail or one event
DECODER = json.JSONDecoder(strict=False)
ENVIRONMENT = b"LD_LIBRARY_PATH"  # what a dump of environment variables on a machine with a GPU holds


class RawEvent(msgspec.Struct, gc=False):
    """An event as it is written; ``args`` is its JSON."""

    ph: str | None = ""
    cat: str | None = ""
    name: str | int | float | None = ""
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: int | float | str | None = None
    dur: int | float | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


_EVENTS = msgspec.json.Decoder(list[RawEvent])


class Container:
    """One document. After ``batches`` ran through, ``meta`` and ``problems`` are complete.

    Attributes:
        meta: the root's other keys and values.
        problems: sentences on what was damaged.
        damaged: events left out for that.
        environment: whether the file seems to carry a dump of environment variables.
    """

    def __init__(self, blocks: Iterable[bytes], where: str) -> None:
        self.where = where
        self.meta: dict[str, Any] = {}
        self.problems: list[str] = []
        self.damaged = 0
        self.whole = 0
        self.environment = False
        self._first_damage = 0
        self._blocks = iter(blocks)
        self._line = 1
        self._rest: bytes | None = None  # what follows the list of events, once its end was seen

    def batches(self) -> Iterator[list[RawEvent]]:
        """The whole events, in the order of the file. Raises TraceError where the document is no trace."""
        buffer, is_object = self._open()
        wanted = 1 << 22
        for block in self._blocks:
            buffer += block
            if len(buffer) < wanted:
                continue
            cut = _last_boundary(buffer)
            if cut is None:
                wanted = 2 * len(buffer)
                if wanted > 2 * MOST_BYTES:
                    break
                continue
            wanted = 1 << 22
            yield self._decode(buffer[: cut[0]])
            if self._rest is not None:
                self._rest += buffer[cut[0] :]
                buffer = b""
                break
            self._line += buffer.count(b"\n", cut[0], cut[1])
            buffer = buffer[cut[1] :]
        yield from self._finish(buffer, is_object)

    def _finish(self, buffer: bytes, is_object: bool) -> Iterator[list[RawEvent]]:
        if self._rest is None:
            cut = _last_boundary(buffer)
            if cut is not None:
                yield self._decode(buffer[: cut[0]])
                if self._rest is not None:
                    self._rest += buffer[cut[0] :]
                else:
                    self._line += buffer.count(b"\n", cut[0], cut[1])
                    buffer = buffer[cut[1] :]
        line = self._line + buffer.count(b"\n")
        if self._rest is None:
            yield self._carefully(buffer)
        if self._rest is not None:
            self._read_tail(is_object)
        elif self.whole or self.damaged:
            self.problems.append(f"the file is cut off at line {line}: {self.whole:,} whole events were read")
        else:
            raise TraceError(
                f"{self.where} is no Chrome trace that can be read: it ends before its first whole event\n"
                "hint: copy or record it again"
            )
        if self.damaged:
            self.problems.append(
                f"{self.damaged} {'event is' if self.damaged == 1 else 'events are'} no valid JSON and left out, the "
                f"first at line {self._first_damage}"
            )

    # --- the pieces ---------------------------------------------------------------------------------------------------

    def _decode(self, piece: bytes) -> list[RawEvent]:
        """The events of a piece that ends before the comma behind an event."""
        self._look_for_environment(piece)
        try:
            events = _EVENTS.decode(b"[" + piece + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._carefully(piece)
        self.whole += len(events)
        self._line += piece.count(b"\n")
        return events

    def _carefully(self, piece: bytes) -> list[RawEvent]:
        """Event by event; stops where the list ends, and then keeps what follows it."""
        text = piece.decode("utf-8", "replace")
        events: list[RawEvent] = []
        position, counted = 0, 0
        while True:
            position = SPACE.match(text, position).end()  # type: ignore[union-attr]  # it matches the empty text
            if position == len(text):
                break
            if text[position] == "]":
                self._rest = text[position + 1 :].encode()
                break
            try:
                found, position = DECODER.raw_decode(text, position)
            except (ValueError, RecursionError):
                found = None
                boundary = BOUNDARY_TEXT.search(text, position)
                end = boundary.end() if boundary else len(text)
                if not boundary and self.whole + len(events) and '"ph"' not in text[position:]:
                    break
                if boundary:
                    self.damaged += 1
                    self._first_damage = self._first_damage or self._line + text.count("\n", 0, position)
                position = end
            if isinstance(found, dict):
                events.append(_event_of(found))
            elif found is not None:
                self.damaged += 1
                self._first_damage = self._first_damage or self._line + text.count("\n", 0, position)
        counted = text.count("\n", 0, position)
        self._line += counted
        self.whole += len(events)
        return events

    def _look_for_environment(self, piece: bytes) -> None:
        if not self.environment and ENVIRONMENT in piece:
            self.environment = True

    # --- head and tail ------------------------------------------------------------------------------------------------

    def _open(self) -> tuple[bytes, bool]:
        """What follows the opening bracket of the list of events, and whether an object is around it."""
        buffer = b""
        searched = 0
        for block in self._blocks:
            buffer += block
            start = buffer.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
            if start == b"[":
                opened = buffer.index(b"[") + 1
                if buffer[opened : opened + 4096].lstrip()[:1] not in (b"{", b"]", b""):
                    raise TraceError(
                        f"{self.where} is no Chrome trace: its list must hold events, which are JSON objects, and "
                        "begins with something else\nhint: torch.profiler's export_chrome_trace writes one"
                    )
                return buffer[opened:], False
            if start and start != b"{":
                self._refuse(buffer)
            match = START.search(buffer, max(searched - 64, 0))
            if match:
                return self._after_key(buffer, match)
            searched = len(buffer)
            if searched > MOST_BYTES:
                break
        self._refuse(buffer)
        raise AssertionError  # _refuse always raises

    def _after_key(self, buffer: bytes, match: re.Match[bytes]) -> tuple[bytes, bool]:
        while match.end() >= len(buffer):
            block = next(self._blocks, b"")
            if not block:
                break
            buffer += block
        if buffer[match.end() : match.end() + 1] != b"[":
            raise TraceError(
                f"{self.where} is no Chrome trace: its traceEvents must be a list\n"
                "hint: torch.profiler's export_chrome_trace writes one"
            )
        self._line += buffer.count(b"\n", 0, match.end())
        self._add_meta(buffer[: match.start()] + b'"traceEvents": null}')
        return buffer[match.end() + 1 :], True

    def _read_tail(self, is_object: bool) -> None:
        rest = self._rest or b""
        for block in self._blocks:
            rest += block
            if len(rest) > MOST_BYTES:
                break
        rest = rest.strip().lstrip(b",").lstrip()
        if is_object and rest not in (b"", b"}"):
            self._add_meta(b"{" + rest)
        elif is_object and not rest:
            self.problems.append("the file is cut off behind its events")

    def _add_meta(self, raw: bytes) -> None:
        self._look_for_environment(raw)
        try:
            found, _ = DECODER.raw_decode(raw.decode("utf-8", "replace").lstrip("\ufeff \r\n\t"))
        except (ValueError, RecursionError):
            self.problems.append("what stands around the events is damaged, so the card may be missing")
            return
        try:
            self.meta |= {key: _finite(value) for key, value in found.items() if key != "traceEvents"}
        except RecursionError:
            self.problems.append("what stands around the events is nested too deep, so the card may be missing")
            return
        if _holds_environment(self.meta):
            self.environment = True

    def _refuse(self, buffer: bytes) -> None:
        kind = kind_of(buffer) or _json_kind(buffer)
        if kind:
            raise TraceError(
                f"{self.where} must be a Chrome trace with a list traceEvents, and is {kind}\n"
                "hint: torch.profiler's export_chrome_trace writes one"
            )
        if buffer.lstrip()[:1] == b"{" and _parses(buffer):
            raise TraceError(
                f"{self.where} must be a Chrome trace with a list traceEvents, and has none\n"
                "hint: torch.profiler's export_chrome_trace writes one"
            )
        raise TraceError(
            f"{self.where} is no Chrome trace that can be read: {'it is empty' if not buffer else 'it is no JSON'}\n"
            "hint: torch.profiler's export_chrome_trace writes one"
        )


def _last_boundary(buffer: bytes) -> tuple[int, int] | None:
    """Behind the last event that another follows, and where that one begins."""
    window = 1 << 16
    while True:
        start = max(len(buffer) - window, 0)
        last = None
        for match in BOUNDARY.finditer(buffer, start):
            last = match
        if last is not None:
            return last.start() + 1, last.end()
        if start == 0:
            return None
        window *= 8


def _event_of(found: dict[str, Any]) -> RawEvent:
    """An event whose values may be of any kind."""
    plain = {
        key: _text(value) if isinstance(value, str) else value if isinstance(value, int | float) else None
        for key, value in ((key, found.get(key)) for key in ("name", "pid", "tid", "ts", "dur"))
    }
    args = found.get("args")
    try:
        raw = msgspec.json.encode(_finite(args)) if isinstance(args, dict) else b"{}"
    except (RecursionError, ValueError, OverflowError):  # unpaired surrogates, integers beyond 64 bit
        raw = b"{}"
    ph, cat = found.get("ph"), found.get("cat")
    return RawEvent(
        ph=ph if isinstance(ph, str) else "", cat=cat if isinstance(cat, str) else "", args=msgspec.Raw(raw), **plain
    )


def _text(value: str) -> str:
    """The same without halves of surrogate pairs, which no file can hold."""
    return value.encode("utf-8", "replace").decode()


def _finite(value: Any) -> Any:
    """The same without NaN, infinities and broken text, which are no JSON."""
    if isinstance(value, dict):
        return {_text(str(key)): _finite(one) for key, one in value.items()}
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _holds_environment(meta: dict[str, Any]) -> bool:
    names = {"PATH", "HOME", "PWD", "USER", "SHELL", "LD_LIBRARY_PATH", "PYTHONPATH", "HOSTNAME"}
    return any(
        (isinstance(value, dict) and len(names & value.keys()) >= 2) or "environ" in key.lower()
        for key, value in meta.items()
    )


def _json_kind(buffer: bytes) -> str | None:
    """What a JSON document without trace events is, by the keys of other tools."""
    head = buffer[: 1 << 20]
    if b"speedscope" in head or (b'"profiles"' in head and b'"frames"' in head):
        return "a speedscope profile"
    if b"chakra" in head or (b'"nodes"' in head and b'"schema"' in head):
        return "a PyTorch execution trace, which holds no times"
    if b'"nbformat"' in head:
        return "a Jupyter notebook"
    if b'"schema_version"' in head and b'"implementation"' in head:
        return "a record of attnscope; explain reads the trace that stands beside it"
    if b'"segments"' in head and b'"device_traces"' in head:
        return "a memory snapshot"
    return None


def _parses(buffer: bytes) -> bool:
    try:
        json.loads(buffer)
    except (ValueError, RecursionError):
        return False
    return True
