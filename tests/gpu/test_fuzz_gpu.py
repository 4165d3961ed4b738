"""``attnscope fuzz`` on a GPU: quick enough for thousands of cases, and a lost device costs one case."""

from __future__ import annotations

from typing import Any

import pytest

from attnscope.device import Device
from attnscope.fuzzing import execute_fuzz, make_fuzz_plan
from attnscope.implementation import Output, Sheet, SheetImplementation
from attnscope.workload import Workload
from bad_implementations import GoodPrepared

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
LEAST_A_MINUTE = 1000  # ten thousand cases within ten minutes


class Faults(SheetImplementation):
    """Right until a workload has more than 64 rows: then a kernel writes where nothing is, and the GPU is lost."""

    name, summary = "faults", "an illegal address beyond 64 rows"
    sheet = Sheet(
        frozenset({"fp32"}), frozenset({"cross", "gqa"}), frozenset({"cuda"}), frozenset({"forward"}), lse=True
    )

    def prepare(self, workload: Workload, device: Device) -> Any:
        class Prepared(GoodPrepared):
            def forward(self, inputs: Any, *, save: bool = False) -> Output:
                import torch

                if workload.L > 64:
                    far = torch.full((1,), 2**40, device=inputs.q.device)
                    torch.zeros(4, device=inputs.q.device)[far]  # a device-side assertion
                    torch.cuda.synchronize()
                return super().forward(inputs, save=save)

        return Prepared()


def test_math_passes_random_workloads_at_a_good_rate(gpu: Device) -> None:
    report = execute_fuzz(make_fuzz_plan("sdpa_math", cases=1000, seed=0, device="cuda"))
    assert report.cases == 1000 and not report.failed, report.failures
    assert report.cases / report.seconds * 60 > LEAST_A_MINUTE, f"{report.cases} cases in {report.seconds} s"
    assert report.coverage["backward"] > 900 and report.workers > 1


def test_a_lost_gpu_costs_one_case_and_is_made_simple(gpu: Device) -> None:
    report = execute_fuzz(make_fuzz_plan(f"{__name__}:Faults", cases=8, seed=0, device="cuda", workers=1))
    assert report.failed and report.passed and report.cases == 8
    failure = report.failures[0]
    assert failure.outcome.status == "crashed"
    w = Workload.parse(failure.shrunk.workload)
    assert w.L == 65 and w.H == 1 and failure.command.startswith("attnscope check ")
