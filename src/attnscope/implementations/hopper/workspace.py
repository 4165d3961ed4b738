"""Stage 2: memory that outlives calls of ``hopper``'s decoding: counters that are zero between kernels, room for parts.

Reads a stream and the capture that it belongs to, writes tensors. Must not import another implementation or a later
stage. Imports torch only inside functions.

Kernels of one stream follow one another, so all calls on it share one workspace: each leaves the counters at zero, as
it found them. A graph is replayed on any stream, beside anything, so the calls that one capture sees on one stream have
a workspace of their own; it comes from the graph's memory, and setting its counters to zero is a part of the graph.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable
from dataclasses import dataclass

from attnscope.driver import PER_THREAD_STREAM
from attnscope.implementations.common import power_of_2
from attnscope.inputs import Tensor


@dataclass(frozen=True)
class Workspace:
    """``arrived``: int32, all zero between kernels; ``parts``: float32, written by a kernel before it reads them."""

    arrived: Tensor
    parts: Tensor


class Workspaces:
    """Those of one device, by stream and capture. Thread-safe; waits for nothing."""

    def __init__(self, place: str) -> None:
        """``place`` is torch's name of the device."""
        self._place, self._lock = place, threading.Lock()
        self._eager: dict[Hashable, Workspace] = {}
        self._captured: dict[Hashable, tuple[int, Workspace]] = {}
        self._outgrown: list[Workspace] = []

    def take(self, stream: int, capture: int | None, counters: int, elements: int) -> Workspace:
        """One with at least so many counters and elements of parts, for kernels that are queued on torch's current
        stream: this ``stream``, which ``capture`` records, where it is one.

        What grew too small is kept, since launches that pass it are: sizes are powers of 2, so all of that is no more
        than what is in use. What was captured is let go when the next call finds that capture over: then the memory is
        its graph's alone, and each replay sets the counters to zero before it counts.
        """
        owner = (stream, threading.get_ident()) if stream == PER_THREAD_STREAM else stream
        with self._lock:
            known = self._captured.get(owner)
            if known is not None and known[0] != capture:
                del self._captured[owner]
                known = None
            before = self._eager.get(owner) if capture is None else known and known[1]
            taken = self._at_least(before, counters, elements)
            if capture is not None:
                self._captured[owner] = capture, taken
            elif taken is not before:
                self._outgrown += [before] if before is not None else []
                self._eager[owner] = taken
            return taken

    def _at_least(self, before: Workspace | None, counters: int, elements: int) -> Workspace:
        """``before`` where it is large enough, else one that shares with it what is."""
        import torch

        arrived, parts = (None, None) if before is None else (before.arrived, before.parts)
        if arrived is None or arrived.numel() < counters:
            arrived = torch.zeros(power_of_2(counters), dtype=torch.int32, device=self._place)
        if parts is None or parts.numel() < elements:
            parts = torch.empty(power_of_2(elements), dtype=torch.float32, device=self._place)
        same = before is not None and arrived is before.arrived and parts is before.parts
        return before if before is not None and same else Workspace(arrived, parts)


@functools.cache
def of_device(place: str) -> Workspaces:
    """The workspaces of the device that torch calls ``place``."""
    return Workspaces(place)
