"""How numbers are shown."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnscope.units import (
    MISSING,
    format_bytes,
    format_ms,
    format_number,
    format_us,
    median,
    quantile,
    significant,
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"), (0.5, "0.500"), (0.0012345, "0.00123"), (1.2345, "1.23"), (12.345, "12.3"), (123.45, "123"),
        (9.996, "10.0"), (99.96, "100"), (999.6, "1,000"), (12345.6, "12,346"), (999999, "1.00e+06"),
        (1.5e6, "1.50e+06"),         (0.0004, "4.00e-04"), (-1.2345, "-1.23"), (math.inf, "inf"), (math.nan, "nan"),
    ],
)  # fmt: skip
def test_significant_digits(value, shown):
    assert significant(value) == shown


@given(st.floats(1e-3, 9.9e5), st.integers(2, 6))
def test_significant_is_within_half_a_digit(value, digits):
    assert float(significant(value, digits).replace(",", "")) == pytest.approx(value, rel=0.5 * 10.0 ** (1 - digits))


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (None, MISSING), (0.0, "0 µs"), (0.0123, "12.3 µs"), (0.99949, "999 µs"), (0.9996, "1.00 ms"), (1.0, "1.00 ms"),
        (12.34, "12.3 ms"), (999.4, "999 ms"), (999.6, "1.00 s"), (61_000.0, "61.0 s"),
    ],
)  # fmt: skip
def test_times(ms, shown):
    assert format_ms(ms) == shown
    assert format_us(None if ms is None else ms * 1e3) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, MISSING), (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**20, "3.00 MiB"), (2**31, "2.00 GiB")],
)
def test_bytes(value, shown):
    assert format_bytes(value) == shown


def test_missing_is_a_sign_and_zero_is_a_number():
    assert format_number(None) == MISSING
    assert format_number(0) == "0"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_quantile_lies_between_and_the_median_splits(values, q):
    assert min(values) <= quantile(values, q) <= max(values) or math.isclose(quantile(values, q), max(values))
    middle = median(values)
    assert sum(v < middle for v in values) <= len(values) / 2
    assert sum(v > middle for v in values) <= len(values) / 2


def test_quantiles_by_hand():
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.2) == pytest.approx(1.6)
    assert median([4.0, 1.0, 3.0]) == 3.0
    assert median([4.0, 1.0]) == 2.5
    assert quantile([7.0], 0.9) == 7.0
