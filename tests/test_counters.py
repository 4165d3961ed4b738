"""Nsight Compute's counters: what it prints becomes a record, a record a table; what is no record is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import factories
from attnscope.errors import PrepareFailed, RecordError
from attnscope.implementation import names
from attnscope.suites import SUITES
from attnscope.workload import Workload
from test_figures import checkout, figures  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import counters

PRINTED = """==PROF== Connected to process 7
"ID","Kernel Name","Grid Size","gpu__time_duration.sum","sm__cycles_elapsed.max","sm__cycles_elapsed.avg.per_second",\
"sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",\
"sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active","smsp__issue_active.avg.per_cycle","sm__inst_issued.avg.pct_of_peak_sustained_active"
"","","","ns","cycle","cycle/second","%","%","inst/cycle","%"
"0","mask_words","(8, 1, 1)","9,000","16,000","1,700,000,000.0","0","3.5","0.4","41.4"
==PROF== Disconnected
"1","attention<3, (bool)1>","(132, 1, 1)","900,000","1,600,000","1,755,000,000.0","61.25","60.5","0.5","n/a"
"""


def record_of(printed: str = PRINTED) -> dict:
    rows = [{"workload": "B1,H1,L9,D64,bf16", "implementation": "ours", "kernels": counters.read_csv(printed)}]
    environment = {"packages": {"torch": "2.11.0"}}
    reads = [{"bytes": 134_217_728, "us": 36.0, "share": 0.851}]
    found = {"device": "a card", "ncu": "Version 2025.3", "environment": environment, "rows": rows, "reads": reads}
    return {"format": 1} | found


def test_lines_between_are_left_out_and_numbers_read() -> None:
    first, second = counters.read_csv(PRINTED)
    assert first["name"] == "mask_words" and second["name"] == "attention<3, (bool)1>"
    assert second["metrics"]["sm__cycles_elapsed.max"] == 1.6e6
    assert "sm__inst_issued.avg.pct_of_peak_sustained_active" not in second["metrics"], "n/a is no number"
    assert counters.read_csv("==ERROR== no permission\n") == []


def test_the_table_shows_the_kernel_that_took_most_cycles(figures, tmp_path: Path, capsys) -> None:  # noqa: F811
    root = checkout(tmp_path, factories.blog_run())
    (root / "benchmarks" / "results" / "counters-a-card.json").write_text(json.dumps(record_of()))
    page = root / "docs" / "hopper.md"
    page.write_text("before\n<!-- generated: counters -->\nold\n<!-- end generated -->\nafter\n")
    assert figures.main(["--check"], root) == 1 and "old" in page.read_text()
    assert "docs/hopper.md is out of date" in capsys.readouterr().out
    assert figures.main([], root) == 0
    text = page.read_text()
    assert "| `B1,H1,L9,D64,bf16` | `ours` | 61 | 60 | – | – | – | 1755 |" in text
    assert "One call that only reads, alone: 134 MB in 36.0 µs, 0.85 of the bandwidth." in text
    assert "a card; Nsight Compute 2025.3; torch 2.11.0." in text
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert figures.main(["--check"], root) == 0
    (root / "benchmarks" / "results" / "counters-a-card.json").unlink()
    assert figures.main(["--check"], root) == 0 and page.read_text() == text, "without a record it stays as it is"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1}'])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "counters-x.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"counters-x\.json"):
        counters.read_record(path)


def test_without_ncu_it_says_so(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda name: str(tmp_path / "ncu"))
    with pytest.raises(PrepareFailed, match="there is no ncu"):
        counters.record(counters.CASES)
    assert counters.main(["--record", str(tmp_path / "out.json")]) == 2
    assert "hint: Nsight Compute" in capsys.readouterr().err and not (tmp_path / "out.json").exists()


def test_a_call_that_fails_is_told_with_its_last_lines(tmp_path: Path) -> None:
    ncu = tmp_path / "ncu"
    ncu.write_text("#!/bin/sh\necho '==ERROR== The user does not have permission to access counters'\nexit 1\n")
    ncu.chmod(0o755)
    with pytest.raises(PrepareFailed, match=r"exit status 1:\n.*does not have permission"):
        counters.counted(str(ncu), "B1,H1,L9,D64,bf16", "ours")


def test_what_is_looked_at_exists() -> None:
    known = {str(workload) for suite in ("grid", "short", "decode") for workload in SUITES[suite]}
    assert set(counters.CASES) <= known
    assert {name for case in counters.CASES.values() for name in case} <= set(names())
    assert counters.parse_cases([]) == counters.CASES
    assert counters.parse_cases(["B1,H1,L9,D64,bf16,causal=top_left=a+b"]) == {
        "B1,H1,L9,D64,bf16,causal=top_left": ["a", "b"]
    }


def test_what_decoding_reads() -> None:
    assert counters.key_value_bytes(Workload.parse("B2,H8/2,L1,S100,D64,Dv128,bf16")) == 2 * 2 * 100 * (64 + 128) * 2
    assert counters.key_value_bytes(Workload.parse("B2,H8,L9,D64,bf16")) == 0
