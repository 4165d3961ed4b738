"""``--implementations all`` on a card, through the workers: every row is right and timed, or says why it is not."""

from __future__ import annotations

import pytest

from attnscope.implementation import names
from attnscope.planning import make_plan
from attnscope.records import MEASURED_STATUSES
from attnscope.sweeping import execute

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
OURS = {"naive", "naive_inplace", "naive_compiled", "sdpa_math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn", "flex"}


def test_every_implementation_is_right_and_timed_or_says_why_not(gpu):
    workloads = ["B2,H8,L256,D64,bf16,causal", "B4,H8/2,L1,S512,D128,bf16", "H4,D64,bf16,causal,packed=100/28/128"]
    run = execute(make_plan(workloads, "all", "both", "cuda", ("measure",), quick=True, warm=4))
    assert {row.implementation for row in run.results} == set(names("all"))
    wrong = {
        (row.workload, row.implementation): row.error or (row.check and row.check.message)
        for row in run.results
        if row.status in ("failed", "check_failed")
    }
    assert not wrong, wrong
    ran = {row.implementation for row in run.results if row.workload == run.workloads[0] and row.status != "skipped"}
    assert ran >= OURS
    for row in run.results:
        if row.status not in MEASURED_STATUSES:
            assert any(row.reasons.values()), row.implementation
            continue
        for direction in run.modes:
            assert (row.measurement(direction) is not None) == (not row.reasons.get(direction)), row
        assert row.seconds, row.implementation
