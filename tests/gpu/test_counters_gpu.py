"""Nsight Compute's counters on a card: the metrics that the table shows are there."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from attnscope.device import Device

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import counters

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_every_column_of_a_call(gpu: Device) -> None:
    if not (shutil.which("ncu") or Path("/usr/local/cuda/bin/ncu").is_file()):
        pytest.skip("needs ncu")
    if gpu.capability != (9, 0):
        pytest.skip("needs compute capability 9.0")
    found = counters.record({"B2,H8,L2048,D64,bf16": ["hopper"]})
    (kernel,) = found["rows"][0]["kernels"]
    assert re.match(r"hopper_(attention|cuda)_forward", kernel["name"]), "the engine that the table names"
    shown = {column: counters.value(kernel["metrics"], column) for column in counters.COLUMNS}
    assert None not in shown.values(), (shown, sorted(kernel["metrics"]))
    assert 20 < (shown["tensor cores, %"] or 0) <= 100 and 20 < (shown["exponentials, %"] or 0) <= 100, shown
    assert 500 < (shown["clock, MHz"] or 0) < 3000
    assert counters.table(found).count("\n") == 5
    assert found["reads"] and all(0.3 < read["share"] <= 1.05 for read in found["reads"]), found["reads"]
