"""Units: their suffixes are on every number's name, and here is how a person sees them.

Missing is ``None`` and is shown as ``MISSING``; it is never 0.
"""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "–"
MIB = 2**20
GIB = 2**30

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def format_ms(value: float | None) -> str:
    """A time in milliseconds, shown with three significant digits in the unit that suits it."""
    if value is None:
        return MISSING
    if value < 1.0:
        return f"{significant(value * 1e3)} µs"
    return f"{significant(value)} ms" if value < 1e3 else f"{significant(value / 1e3)} s"


def format_us(value: float | None) -> str:
    """A time in microseconds, as :func:`format_ms`."""
    return format_ms(None if value is None else value / 1e3)


def format_number(value: float | None, digits: int = 3) -> str:
    """A number with ``digits`` significant digits, or the sign for a missing one."""
    return MISSING if value is None else significant(value, digits)


def format_bytes(value: float | None) -> str:
    """Bytes in KiB, MiB or GiB."""
    if value is None:
        return MISSING
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if value >= size:
            return f"{significant(value / size)} {unit}"
    return f"{value:.0f} B"


def significant(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits and no exponent from 0.001 up to a million."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude < 1e-3 or magnitude >= 1e6:
        return f"{value:.{digits - 1}e}"
    whole = len(str(int(magnitude))) if magnitude >= 1 else 0
    if whole >= digits:
        return f"{value:,.0f}"
    rounded = f"{value:.{digits}g}"
    return f"{float(rounded):.{max(digits - whole, 0)}f}" if whole else rounded


def quantile(values: Sequence[float], q: float) -> float:
    """The ``q`` quantile (0..1) of a non-empty sequence, with linear interpolation (Hyndman-Fan type 7)."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(values: Sequence[float]) -> float:
    """The middle of a non-empty sequence."""
    return quantile(values, 0.5)
