"""Stage 6: a trace file as blocks of bytes, unpacked where it is gzipped, within bounds.

Reads a file, writes bytes. Imports neither torch nor an implementation.
"""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from attnscope.errors import TraceError

GZIP_MAGIC = b"\x1f\x8b"
BLOCK_BYTES = 1 << 16  # a processor's cache holds it and the events in it
PACKED_BLOCK_BYTES = 1 << 18
BLOCKS_AHEAD = 4
# Traces pack to a tenth or a thirtieth; what unpacks to more than this many times its size is not one.
MOST_RATIO = 400
RATIO_COUNTS_FROM_BYTES = 64 << 20
# How files of other kinds begin -> what they are.
KINDS = (
    (b"SQLite format 3\x00", "an SQLite database (Nsight Systems exports those)"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x80\x02", "a Python pickle (torch's memory snapshots are)"),
    (b"\x80\x04", "a Python pickle (torch's memory snapshots are)"),
    (b"\x80\x05", "a Python pickle (torch's memory snapshots are)"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\x7fELF", "an executable"),
    (b"<", "HTML or XML"),
)


class Blocks:
    """The unpacked blocks of a file, or of its bytes from ``start`` to ``end`` where it is not packed.

    Can be gone through again. ``damage`` says afterwards what was wrong with the packing, if anything.
    """

    def __init__(self, path: Path, start: int = 0, end: int | None = None) -> None:
        self.path = path
        self.start = start
        self.end = end
        self.damage: str | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                if file.read(2) == GZIP_MAGIC:
                    file.seek(0)
                    yield from ahead(block for block, _ in self._inflated(file))
                    return
                file.seek(self.start)
                left = self.end - self.start if self.end is not None else sys.maxsize
                while block := file.read(min(BLOCK_BYTES, left)):
                    left -= len(block)
                    yield block
        except OSError as error:
            raise self._unreadable(error) from None

    def inflated(self) -> Iterator[tuple[bytes, int]]:
        """The blocks of an archive, each with how much of the file had been read for it; by the calling thread."""
        try:
            with self.path.open("rb") as file:
                yield from self._inflated(file)
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> TraceError:
        return TraceError(f"cannot read trace {self.path}: {error.strerror or error}")

    def _inflated(self, file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
        """Every member of the archive, a block at a time; what is whole before a damage is still given."""
        packed, unpacked, data = 0, 0, b""
        member = zlib.decompressobj(31)
        while True:
            if not data:
                data = file.read(PACKED_BLOCK_BYTES)
                packed += len(data)
            if not data:
                if not member.eof and (unpacked or packed):
                    self.damage = "it ends too early"
                return
            try:
                block = member.decompress(data, BLOCK_BYTES)
            except zlib.error as error:
                self.damage = str(error)
                return
            unpacked += len(block)
            if unpacked > RATIO_COUNTS_FROM_BYTES and unpacked > MOST_RATIO * packed:
                raise TraceError(
                    f"{self.path} must unpack to a trace, and unpacks to more than {MOST_RATIO} times its size\n"
                    "hint: such a file is made to fill memory; record the trace again"
                )
            if block:
                yield block, packed
            data = member.unconsumed_tail
            if member.eof:
                data = member.unused_data
                if not data.rstrip(b"\x00"):
                    data = file.read(PACKED_BLOCK_BYTES).rstrip(b"\x00")
                    packed += len(data)
                if not data:
                    return
                member = zlib.decompressobj(31)


class Slices:
    """A document in memory as blocks."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self.data), BLOCK_BYTES):
            yield self.data[start : start + BLOCK_BYTES]


def ahead(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The same blocks, made by a second thread while the first is busy: zlib leaves the interpreter to others."""
    from concurrent.futures import ThreadPoolExecutor  # a trace that is not packed does not wait for this import

    with ThreadPoolExecutor(1) as pool:
        coming = deque(pool.submit(next, blocks, None) for _ in range(BLOCKS_AHEAD))
        while (block := coming.popleft().result()) is not None:
            coming.append(pool.submit(next, blocks, None))
            yield block


def lines_until(blocks: Iterable[bytes], offset: int | None) -> int:
    """Line breaks before a byte of the document; before its end without an offset."""
    lines, passed = 0, 0
    for block in blocks:
        here = len(block) if offset is None else min(len(block), offset - passed)
        lines += block.count(b"\n", 0, here)
        passed += len(block)
        if offset is not None and passed >= offset:
            break
    return lines


def kind_of(start: bytes) -> str | None:
    """What a file that begins like this is, where it is none of JSON."""
    if start[:1] == b"\x0a" and b"{" not in start[:4] and b"[" not in start[:4]:
        return "a Perfetto trace (.pftrace); export_chrome_trace writes the JSON that is read here"
    return next((kind for magic, kind in KINDS if start.startswith(magic)), None)


def json_kind(buffer: bytes) -> str | None:
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
