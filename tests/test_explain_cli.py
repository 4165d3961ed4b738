"""``attnscope explain``: what it prints, writes and returns; every id has a page; true statements on foreign traces."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import trace_builder as tb
from attnscope.cli import app
from attnscope.explaining import explain_trace
from attnscope.explaining.explanation import CallSite, Explanation
from attnscope.explaining.trace_rules import FINDING_IDS
from attnscope.reporting.explanation_text import render_explanation
from attnscope.trace import read_trace
from trace_builder import TraceBuilder

ROOT = Path(__file__).resolve().parents[1]
FOREIGN = ROOT.parent / "shared" / "traces"


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return saved(tmp_path / "before.json", tb.naive)


@pytest.fixture
def after(tmp_path: Path) -> Path:
    return saved(tmp_path / "after.json", flash)


def flash(b: TraceBuilder) -> None:
    with b.op("aten::scaled_dot_product_attention", *[tb.Q] * 3):
        tb.sdpa_flash(b)


def saved(path: Path, build: Any) -> Path:
    b = TraceBuilder()
    build(b)
    path.write_bytes(b.bytes())
    return path


def explain(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def test_text_fits_eighty_columns(before: Path) -> None:
    result = explain(before)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    for wanted in (
        "NVIDIA H200",
        "union of intervals",
        "unfused",
        "unfused-attention: up to",
        "remedy:",
        "confidence:",
    ):
        assert wanted in result.stdout


def test_top_shows_the_first_findings(before: Path) -> None:
    shown = explain(before, "--top", 1).stdout
    assert "unfused-attention" in shown and "masked-fill-copy" not in shown and "more (without --top)" in shown


def test_json_is_one_document(before: Path, after: Path) -> None:
    document = json.loads(explain(before, after, "--json").stdout)
    assert document["schema_version"] and len(document["traces"]) == 2
    first = document["traces"][0]
    assert first["window"]["card"] == "NVIDIA H200" and first["sites"][0]["problem"] == "B8,H16,L1024,D64,bf16"
    assert {finding["id"] for finding in first["findings"]} >= {"unfused-attention", "masked-fill-copy"}


def test_a_difference(before: Path, after: Path) -> None:
    text = explain(before, after, "--diff").stdout
    assert "before.json -> after.json" in text and "unfused -> SDPA flash" in text
    assert re.search(r"findings gone .*unfused-attention", text)
    changes = json.loads(explain(before, after, "--diff", "--json").stdout)["changes"]
    assert changes[0]["before"]["calls"] == changes[0]["after"]["calls"] == 1 and changes[0]["ratio"] < 0.2
    one = explain(before, "--diff")
    assert one.exit_code != 0 and "--diff must have two traces, got 1" in str(one.exception)


def test_a_gate(before: Path, after: Path) -> None:
    failed = explain(before, "--fail-on", "math-path, unfused-attention")
    assert failed.exit_code == 1 and "unfused-attention" in failed.stderr
    assert explain(after, "--fail-on", "unfused-attention").exit_code == 0
    assert explain(before, after, "--diff", "--fail-on", "unfused-attention").exit_code == 0
    unknown = explain(before, "--fail-on", "unfused-atention")
    assert unknown.exit_code != 0 and "did you mean unfused-attention" in str(unknown.exception)


def test_a_page(before: Path, after: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert explain(before, after, "--diff", "--html", page).exit_code == 0
    text = page.read_text()
    assert "unfused-attention" in text and "Before and after" in text
    assert not re.search(r"<script|https?://|<link|<img", text)
    bad = explain(before, "--html", tmp_path / "none" / "page.html")
    assert bad.exit_code != 0 and "cannot write" in str(bad.exception)


def test_errors_are_sentences_and_exit_codes(tmp_path: Path, before: Path) -> None:
    (tmp_path / "other.json").write_text('{"profiles": [], "frames": []}')
    for arguments, code, says in (
        (["explain", str(tmp_path / "none.json")], 2, "cannot read trace"),
        (["explain", str(tmp_path / "other.json")], 2, "speedscope"),
        (["explain", str(before), "--fail-on", "unfused-attention"], 1, "found"),
    ):
        run = subprocess.run([sys.executable, "-m", "attnscope", *arguments], capture_output=True, text=True)
        assert run.returncode == code and says in run.stderr and "Traceback" not in run.stderr


def test_every_finding_has_a_section() -> None:
    page = (ROOT / "docs" / "reference" / "findings.md").read_text()
    sections = re.findall(r"^## (\S+)$", page, re.M)
    folder = ROOT / "src" / "attnscope" / "explaining"
    written = {one for path in folder.glob("*.py") for one in re.findall(r'\bid="([a-z0-9-]+)"', path.read_text())}
    assert sections == sorted(written) and set(FINDING_IDS) <= written


# --- traces of other people -------------------------------------------------------------------------------------------


def foreign(shared: Path, name: str) -> Explanation:
    return explain_trace(read_trace(shared / "traces" / f"{name}.json.gz"), name)


def ids(explanation: Explanation) -> set[str]:
    return {finding.id for finding in explanation.findings}


def facts(site: CallSite) -> tuple[str, str, int, float]:
    return site.implementation, site.problem, site.calls, site.kernels_per_call


def test_a_causal_language_model_on_an_h100(shared: Path) -> None:
    told = foreign(shared, "h100-qwen1.5-0.5b")
    calls, spilled = told.sites
    assert facts(calls) == ("SDPA flash", "B16,H16,L559,D64,bf16,causal", 24, 1)
    assert calls.module == "Qwen2Model.Qwen2DecoderLayer.Qwen2Attention"
    assert spilled.inferred and spilled.calls == 10
    assert told.window.kernels == 1465 and 0.25 < told.window.unattributed_us / told.window.sum_us < 0.35
    assert ids(told) == {
        "better-implementation", "layout-copies", "occupancy-estimator", "occupancy-low", "launched-before-window",
    }  # fmt: skip
    assert "96 ×" in next(f for f in told.findings if f.id == "layout-copies").evidence[0]


def test_a_small_model_that_waits_for_the_host(shared: Path) -> None:
    told = foreign(shared, "h100-bert-small")
    assert [facts(site) for site in told.sites] == [("SDPA flash", "B1,H8,L141,D64,bf16", 4, 1)]
    assert ids(told) >= {"launch-bound", "too-few-blocks"}
    few = next(f for f in told.findings if f.id == "too-few-blocks")
    assert "16 blocks on a card of 132 multiprocessors" in few.sentence
    assert not ids(told) & {"unfused-attention", "launched-before-window", "mask-keeps-flash-away"}


def test_unfused_attention_with_an_odd_length(shared: Path) -> None:
    told = foreign(shared, "h100-timesformer")
    assert [facts(site)[:3] for site in told.sites] == [
        ("unfused", "B8,H12,L3137,D64,bf16", 12),
        ("unfused", "B3136,H12,L8,D64,bf16", 12),
    ]
    assert ids(told) >= {"unfused-attention", "misaligned-gemm", "layout-copies", "pageable-copies"}
    assert told.window.attention_us > 0.8 * told.window.sum_us
    assert not ids(told) & {"dropout-at-inference", "tf32-off", "matmul-off-tensor-cores"}


def test_the_same_model_on_an_mi300(shared: Path) -> None:
    told = foreign(shared, "mi300-qwen1.5-0.5b")
    assert facts(told.sites[0]) == ("SDPA flash (AOTriton)", "B16,H16,L559,D64,bf16,causal", 24, 2)
    assert ids(told) == {"layout-copies", "launched-before-window"}


def test_long_sequences_on_an_mi300(shared: Path) -> None:
    told = foreign(shared, "mi300-sdpa-long")
    (site,) = told.sites
    assert facts(site) == ("SDPA flash (AOTriton)", "B1,H32,L32768,D128,bf16", 10, 1)
    assert site.slowest_us > 1.5 * site.median_us and ids(told) == {"uneven-calls"}
    assert told.window.unattributed_us == 0


def test_a_replayed_decode(shared: Path) -> None:
    told = foreign(shared, "mi300-vllm-decode-graph")
    (site,) = told.sites
    assert site.inferred and site.implementation == "serving attention" and site.name == "in a replayed graph"
    assert ids(told) == {"graph-replay"}
    assert told.window.unattributed_us > 0.85 * told.window.sum_us
    assert told.window.card == "unnamed card (capability 9.4, 304 multiprocessors)"


def test_the_fast_path_in_fp32(shared: Path) -> None:
    told = foreign(shared, "h100-mha-fastpath")
    (site,) = told.sites
    assert facts(site) == ("MultiheadAttention fast path, unfused", "B16,H8,L128,D64,fp32", 3, 3)
    assert ids(told) >= {"unfused-attention", "launch-bound"} and "tf32-off" not in ids(told)


def test_autocast(shared: Path) -> None:
    told = foreign(shared, "a100-particle-transformer-b256")
    assert sum(site.calls for site in told.sites) == 10
    assert all(site.implementation == "unfused" and site.name == "baddbmm, softmax, bmm" for site in told.sites)
    assert ids(told) >= {"unfused-attention", "dtype-casts"}
    assert "fp32 to fp16" in next(f for f in told.findings if f.id == "dtype-casts").sentence


def test_no_attention_in_2021(shared: Path) -> None:
    told = foreign(shared, "v100-resnet50-2021")
    assert not told.sites and told.window.attention_us == 0 and told.window.card is None
    assert ids(told) == {"pageable-copies", "matmul-off-tensor-cores", "launched-before-window"}


@pytest.mark.skipif(not FOREIGN.is_dir(), reason="the foreign traces are not beside this checkout")
@pytest.mark.parametrize("path", sorted(FOREIGN.glob("*.json.gz")), ids=lambda path: path.name)
def test_the_text_of_a_foreign_trace_fits(path: Path) -> None:
    text = render_explanation(explain_trace(read_trace(path), path.name))
    assert max(map(len, text.splitlines())) <= 80
    assert "nan" not in text and "None" not in text
