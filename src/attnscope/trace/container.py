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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from attnscope.errors import TraceError
from attnscope.trace.blocks import json_kind, kind_of

_KEYS = r'\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|s|bp|tts|tdur)"\s*:'
BOUNDARY = re.compile(rb"\}\s*,\s*(?=" + _KEYS.encode() + rb")")
BOUNDARY_TEXT = re.compile(r"\}\s*,\s*(?=" + _KEYS + r")")
START = re.compile(rb'"traceEvents"\s*:\s*')
SURE_BOUNDARY_TEXT = re.compile(r'\}\s*,\s*(?=\{\s*"ph"\s*:)')
SPACE = re.compile(r"[\s,]*")
CLOSING = ord("]")
MOST_BYTES = 64 << 20  # of a head, a tail or one event
DECODER = json.JSONDecoder(strict=False)
MOST_BRACKETS = 200  # of a damaged last event that are tried as the end of the list
ENVIRONMENT = b"LD_LIBRARY_PATH"  # what a dump of environment variables on a machine with a GPU holds
VARIABLE = re.compile(rb"\b(PATH|HOME|PWD|USER|SHELL|LD_LIBRARY_PATH|PYTHONPATH|HOSTNAME)(?:\"\s*:|=)")
ENVIRONMENT_KEY = re.compile(rb'"[^"]{0,40}environ[^"]{0,40}"\s*:\s*[{\[]', re.IGNORECASE)


class RawEvent(msgspec.Struct, gc=False):
    """An event as it is written; ``args`` is its JSON."""

    ph: str | None = ""
    cat: str | None = ""
    name: str | int | float | None = None
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: int | float | str | None = None
    dur: int | float | str | None = None
    id: int | float | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


_EVENTS = msgspec.json.Decoder(list[RawEvent])


class Outcome(msgspec.Struct):
    """What reading a document, or a part of one, came to.

    Attributes:
        meta: the root's other keys and values.
        whole: events that were read.
        damaged: events left out because they are no valid JSON.
        first_damage: the byte of the document where the first of those begins.
        ended: whether the end of the list of events was seen.
        environment: whether the file seems to carry a dump of environment variables.
        around: sentences on damage around the events.
    """

    meta: dict[str, Any] = {}
    whole: int = 0
    damaged: int = 0
    first_damage: int | None = None
    ended: bool = False
    environment: bool = False
    around: list[str] = []

    def add(self, later: Outcome) -> None:
        """With what a later part came to."""
        self.meta |= later.meta
        self.whole += later.whole
        self.damaged += later.damaged
        if self.first_damage is None:
            self.first_damage = later.first_damage
        self.ended = later.ended
        self.environment |= later.environment
        self.around += later.around

    def problems(self, lines: Callable[[int | None], int]) -> list[str]:
        """Sentences on what was damaged; ``lines`` counts the line breaks before a byte, or before the end."""
        said = list(self.around)
        if not self.ended:
            said.append(f"the file is cut off at line {lines(None) + 1}: {self.whole:,} whole events were read")
        if self.damaged:
            said.append(
                f"{self.damaged} {'event is' if self.damaged == 1 else 'events are'} no valid JSON and left out, the "
                f"first at line {lines(self.first_damage) + 1}"
            )
        return said


class Container:
    """One document, or with ``inside`` what follows that byte of one, where an event begins.

    ``outcome`` is complete after ``batches`` ran through.
    """

    def __init__(self, blocks: Iterable[bytes], where: str, *, inside: int | None = None) -> None:
        self.where = where
        self.outcome = Outcome()
        self._inside = inside
        self._blocks = iter(blocks)
        self._lost = False  # since a damage: what follows may be objects inside the damaged event
        self._offset = inside or 0  # in the document, of the first byte that is not decoded yet

    def batches(self) -> Iterator[list[RawEvent]]:
        """The whole events, in the order of the file. Raises TraceError where the document is no trace."""
        rest, is_object = (b"", True) if self._inside is not None else self._open()
        held, size, wanted = [rest], len(rest), 0
        for block in self._blocks:
            held.append(block)
            size += len(block)
            if size < wanted:
                continue
            piece = bytearray(b"".join((b"[", *held)))
            cut = _last_boundary(piece)
            if cut is None:
                held, wanted = [bytes(memoryview(piece)[1:])], 2 * size
                if wanted > 2 * MOST_BYTES:
                    break
                continue
            events, after = self._decode(piece, *cut)
            yield events
            held, size = [self._remaining(piece, after)], len(piece) - after
            wanted = 0 if after == cut[1] else 2 * size
            if self.outcome.ended:
                break
        yield from self._finish(b"".join(held), is_object)

    def _finish(self, rest: bytes, is_object: bool) -> Iterator[list[RawEvent]]:
        """What no other event follows, and what stands behind the events."""
        if not self.outcome.ended:
            piece = bytearray(b"[" + rest)
            cut = _last_boundary(piece)
            if cut is not None:
                events, after = self._decode(piece, *cut)
                yield events
                rest = self._remaining(piece, after)
        if not self.outcome.ended:
            events, after = self._carefully(b"[" + rest, last=True)
            yield events
            rest = self._remaining(b"[" + rest, after)
        if self.outcome.ended:
            self._read_tail(rest, is_object)

    # --- the pieces, each behind an opening bracket ------------------------------------------------------------------

    def _remaining(self, piece: bytes | bytearray, after: int) -> bytes:
        self._offset += after - 1
        return bytes(memoryview(piece)[after:])

    def _decode(self, piece: bytearray, end: int, following: int) -> tuple[list[RawEvent], int]:
        """The events before ``end``, where a comma is in reach and another event follows; and where to go on."""
        self._look_for_environment(piece)
        behind, piece[end] = piece[end], CLOSING
        try:
            events = _EVENTS.decode(memoryview(piece)[: end + 1])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            piece[end] = behind
            events, after = self._carefully(bytes(memoryview(piece)[:end]), last=False)
            return events, following if after == end else after
        self.outcome.whole += len(events)
        return events, following

    def _carefully(self, piece: bytes, *, last: bool) -> tuple[list[RawEvent], int]:
        """Event by event, and where that came to: the end, behind the list, or an event that the piece cuts."""
        text = piece.decode("utf-8", "surrogateescape")
        events: list[RawEvent] = []
        at = 1
        while True:
            at = SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty text
            if at == len(text):
                break
            if text[at] == "]":
                more = SURE_BOUNDARY_TEXT.search(text, at) if self._lost else None
                if more is not None:
                    at = more.end()  # it was a list inside the damaged event
                    continue
                end = _end_of_list(text, at) if last and self._lost else None
                at = (at if end is None else end) + 1
                self.outcome.ended = True
                break
            begin = at
            try:
                found, at = DECODER.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                found = None
                if not last and _is_cut(error, text):
                    break
                boundary = BOUNDARY_TEXT.search(text, at)
                if boundary is not None:
                    at = boundary.end()
                elif last:
                    end = None if _is_cut(error, text) else _end_of_list(text, at)
                    if end is None:
                        break  # what a cut file ends with
                    at = end
                else:
                    at = len(text)
            if isinstance(found, dict):
                if "ph" in found:
                    self._lost = False
                if not self._lost:
                    events.append(_event_of(found))
                continue
            self._lost = True
            self.outcome.damaged += 1
            if self.outcome.first_damage is None:
                self.outcome.first_damage = self._offset + _bytes_until(text, begin) - 1
        self.outcome.whole += len(events)
        return events, _bytes_until(text, at)

    def _look_for_environment(self, piece: bytes | bytearray) -> None:
        if not self.outcome.environment and ENVIRONMENT in piece:
            self.outcome.environment = True

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
                self._offset = opened
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
        self._offset = match.end() + 1
        self._add_meta(buffer[: match.start()] + b'"traceEvents": null}')
        return buffer[match.end() + 1 :], True

    def _read_tail(self, rest: bytes, is_object: bool) -> None:
        for block in self._blocks:
            rest += block
            if len(rest) > MOST_BYTES:
                break
        rest = rest.strip().lstrip(b",").lstrip()
        if is_object and rest not in (b"", b"}"):
            self._add_meta(b"{" + rest)
        elif is_object and not rest:
            self.outcome.around.append("the file is cut off behind its events")

    def _add_meta(self, raw: bytes) -> None:
        self._look_for_environment(raw)
        if holds_environment(raw) or ENVIRONMENT_KEY.search(raw):
            self.outcome.environment = True
        around = self.outcome.around
        try:
            found, _ = DECODER.raw_decode(raw.decode("utf-8", "replace").lstrip("\ufeff \r\n\t"))
        except (ValueError, RecursionError):
            around.append("what stands around the events is damaged, so the card may be missing")
            return
        try:
            self.outcome.meta |= finite({key: value for key, value in found.items() if key != "traceEvents"})
        except RecursionError:
            around.append("what stands around the events is nested too deep, so the card may be missing")
            return

    def _refuse(self, buffer: bytes) -> None:
        kind = kind_of(buffer) or json_kind(buffer)
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


def holds_environment(raw: bytes) -> bool:
    """Whether JSON holds a dump of environment variables: two of their usual names."""
    return len(set(VARIABLE.findall(raw))) >= 2


def _last_boundary(buffer: bytes | bytearray) -> tuple[int, int] | None:
    """Behind the last event that another follows, and where that one begins."""
    window = 1 << 12
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


def _is_cut(error: Exception, text: str) -> bool:
    """Whether decoding failed because the text ends too early."""
    return isinstance(error, json.JSONDecodeError) and (
        error.pos >= len(text) or error.msg.startswith("Unterminated string")
    )


def _end_of_list(text: str, at: int) -> int | None:
    """The first bracket that may close the list of events: what follows it closes the document."""
    for _ in range(MOST_BRACKETS):
        at = text.find("]", at)
        if at < 0:
            return None
        rest = text[at + 1 :].strip()
        if not rest:
            return at
        around = "{" + rest.removeprefix(",").lstrip()
        try:
            if DECODER.raw_decode(around)[1] == len(around):
                return at
        except (ValueError, RecursionError):
            pass
        at += 1
    return None


def _bytes_until(text: str, at: int) -> int:
    return len(text[:at].encode("utf-8", "surrogateescape"))


def _event_of(found: dict[str, Any]) -> RawEvent:
    """An event whose values may be of any kind."""
    plain = {
        key: _text(value) if isinstance(value, str) else value if isinstance(value, int | float) else None
        for key, value in ((key, found.get(key)) for key in ("name", "pid", "tid", "ts", "dur", "id"))
    }
    args = found.get("args")
    try:
        raw = msgspec.json.encode(finite(args)) if isinstance(args, dict) else b"{}"
    except RecursionError:
        raw = b"{}"
    ph, cat = found.get("ph"), found.get("cat")
    return RawEvent(
        ph=ph if isinstance(ph, str) else "",
        cat=_text(cat) if isinstance(cat, str) else "",
        args=msgspec.Raw(raw),
        **plain,
    )


def _text(value: str) -> str:
    """The same without halves of surrogate pairs, which no file can hold."""
    return value.encode("utf-8", "replace").decode()


def finite(value: Any) -> Any:
    """The same without NaN, infinities and broken text, which are no JSON, and without whole numbers beyond 64 bits."""
    if isinstance(value, dict):
        return {_text(str(key)): finite(one) for key, one in value.items()}
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return [finite(one) for one in value]
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else None
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parses(buffer: bytes) -> bool:
    try:
        json.loads(buffer)
    except (ValueError, RecursionError):
        return False
    return True
