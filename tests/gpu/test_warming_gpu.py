"""Compiling on idle cores on a card: what other processes left on disk is found, is right, and saves the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from attnscope.implementation import find
from attnscope.planning import make_plan
from attnscope.sweeping import execute
from attnscope.workload import Workload

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TEXT = "B1,H4,L384,D64,bf16,causal"
KEPT = ("naive_compiled", "flex", "triton_fused", "flash_attn_4")
PREPARE = """
import json, sys, time
from attnscope.checking import check_implementation
from attnscope.device import find_device
from attnscope.implementation import find
from attnscope.workload import Workload
implementation, workload, gpu = find(sys.argv[1]), Workload.parse(sys.argv[2]), find_device("cuda")
find("sdpa_auto").prepare(workload, gpu)
import torch; torch.randn(8, device="cuda").sum().item()
started = time.perf_counter()
prepared = implementation.prepare(workload, gpu)
seconds = time.perf_counter() - started
result = check_implementation(implementation, workload, gpu, quick=True, prepared=prepared)
print(json.dumps([seconds, result.passed, result.message]))
"""


@pytest.mark.parametrize("name", KEPT)
def test_a_second_process_finds_what_the_first_compiled(name, gpu, tmp_path):
    if reasons := find(name).reasons_unsupported(Workload.parse(TEXT), gpu):
        pytest.skip("; ".join(reasons))
    folders = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    environment = os.environ | {folder: str(tmp_path / folder) for folder in folders}
    environment |= {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
    took = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PREPARE, name, TEXT], env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stderr[-2000:]
        seconds, passed, message = json.loads(done.stdout.splitlines()[-1])
        assert passed, message
        took.append(seconds)
    assert took[1] < 0.8 * took[0], f"prepare of {name} took {took[0]:.1f} s, then {took[1]:.1f} s"


def test_a_warmed_run_is_whole_and_says_where_its_seconds_went(gpu):
    names = "naive,naive_compiled,flex,triton_fused,sdpa_cudnn,cudnn_graph"
    said = []
    plan = make_plan([TEXT], names, "both", "cuda", ("measure",), quick=True, warm=2)
    run = execute(plan, lambda step: said.append(step.what))
    assert [what for what in said if what.startswith("warm ")], "nothing was warmed"
    for row in run.results:
        if row.status == "skipped":
            continue
        assert row.status == "ok", (row.implementation, row.error)
        assert {"prepare", "first_call", "check", "kernels", "prepare_ahead", "isolated", "graph"} <= row.seconds.keys()
        assert row.forward is not None and row.backward is not None
