"""Units: their suffixes are on every number's name, and here is how a person sees them.

Missing is ``None`` and is shown as ``MISSING``; it is never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MISSING = "–"
MIB = 2**20
GIB = 2**30

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def format_ms(value: float | None) -> str:
    """A time in milliseconds, shown with three significant digits in the unit that suits it."""
    if value is None:
        return MISSING
    if abs(value) < 0.9995:  # what three digits round up to 1 belongs to the next unit
        return f"{significant(value * 1e3)} µs"
    return f"{significant(value)} ms" if abs(value) < 999.5 else f"{significant(value / 1e3)} s"


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
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    rounded = f"{value:.{digits - 1}e}"
    exponent = int(rounded.partition("e")[2])
    return rounded if not -3 <= exponent < 6 else f"{value:,.{max(digits - 1 - exponent, 0)}f}"


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
