"""The error tree: every failure a user can cause or meet is one of these, with a sentence that helps.

A message reads: which thing, what it must be, what it was, and after ``hint:`` what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AttnscopeError(Exception):
    """Root of everything attnscope raises on purpose. ``exit_code`` is what the command line returns."""

    exit_code = 1


class UsageError(AttnscopeError, ValueError):
    """An argument is not what it must be."""

    exit_code = 2


class UnknownName(UsageError):
    """A name that is not in its list, with the nearest names that are."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        known = list(known)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"one of: {', '.join(known)}"
        super().__init__(f"unknown {what} {name!r}\nhint: {hint}")


class UnknownImplementation(UnknownName):
    """No implementation of that name is registered."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__("implementation", name, known)


class WorkloadError(UsageError):
    """A workload's spelling or shape is impossible."""


class UnsupportedWorkload(AttnscopeError):
    """An implementation was forced onto a workload that it cannot run; carries every reason."""

    def __init__(self, name: str, reasons: Iterable[str]) -> None:
        self.reasons = list(reasons)
        super().__init__(f"{name} cannot run this workload: " + "; ".join(self.reasons))


class PrepareFailed(AttnscopeError):
    """Compiling, planning or allocating failed; ``log`` holds the last lines of what was said."""

    def __init__(self, message: str, log: str = "") -> None:
        self.log = log
        super().__init__(message + (f"\n{log}" if log else ""))


class CheckFailed(AttnscopeError):
    """A result is wrong; ``result`` is the CheckResult that says where and by how much."""

    def __init__(self, message: str, result: object = None) -> None:
        self.result = result
        super().__init__(message)


class DeviceError(UsageError):
    """The asked-for device is not there, or has too little memory."""


class TraceError(AttnscopeError):
    """A file is not a trace that can be read."""

    exit_code = 2


class RecordError(AttnscopeError):
    """A record breaks its own rules, or a records file cannot be read."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """``ImportError: libcudart.so.12: cannot open shared object file``: the class and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
