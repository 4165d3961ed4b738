"""``explain --try`` on a card: what was watched here is measured here, in milliseconds, and the saving comes true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import attnscope
from attnscope.cli import app

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

B, H, L, D, CALLS = 4, 16, 2048, 64, 3
NAMES = "sdpa_math,sdpa_flash,sdpa_cudnn,sdpa_efficient"


def watched(torch: Any, backend: Any) -> Any:
    """Forward calls on one backend."""
    from torch.nn.attention import sdpa_kernel

    torch.manual_seed(0)
    q = torch.randn(B, L, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    with torch.no_grad(), sdpa_kernel(backend):
        for _ in range(3):
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        with attnscope.watch() as w:
            for _ in range(CALLS):
                torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return w


def test_the_math_path_s_saving_comes_true(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend

    before = watched(torch, SDPBackend.MATH)
    trace = before.save(tmp_path / "math.json.gz")
    result = CliRunner().invoke(app, ["explain", str(trace), "--try", "--implementations", NAMES, "--json"])
    assert result.exit_code == 0, result.exception
    document = json.loads(result.stdout)
    trial = document["trial"]
    (one,) = trial["tried"]
    assert one["workload"] == f"B{B},H{H},L{L},D{D},bf16,causal,layout=blhd" and one["assumed"] == []
    assert one["same_here"] == "sdpa_math" and one["calls"] == {"forward": CALLS}
    assert one["fastest"] in ("sdpa_flash", "sdpa_cudnn") and trial["same_card"]
    assert trial["before_us"] == pytest.approx(document["traces"][0]["window"]["sum_us"])
    backend = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}[one["fastest"]]
    after = watched(torch, backend).explanation.window.sum_us
    predicted, real = trial["before_us"] - trial["after_us"], trial["before_us"] - after
    assert predicted == pytest.approx(real, rel=0.25), (trial["before_us"], trial["after_us"], after)


def test_what_is_fastest_already_gains_nothing(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend

    trace = watched(torch, SDPBackend.FLASH_ATTENTION).save(tmp_path / "flash.json.gz")
    names = "sdpa_flash,sdpa_math"
    result = CliRunner().invoke(app, ["explain", str(trace), "--try", "--implementations", names])
    assert result.exit_code == 0, result.exception
    assert "that is what the trace ran: nothing is faster here" in result.stdout
    assert "what was traced would take" in result.stdout
