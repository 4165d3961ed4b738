"""``attnscope tune`` and hopper's two engines on a card of 9.0.

``pytest -m gpu tests/gpu/test_tuning_gpu.py`` takes about three minutes, most of it compiling.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from attnscope.checking import check_implementation
from attnscope.device import Device
from attnscope.implementation import find
from attnscope.implementations.hopper import Hopper
from attnscope.implementations.hopper.entries import Entry
from attnscope.implementations.hopper_cuda import HopperCuda
from attnscope.inputs import make_inputs
from attnscope.jobs import Ask, check, forget
from attnscope.tables import Table, table_text
from attnscope.tuning import execute_tune, make_tune_plan
from attnscope.workload import Workload
from test_contract import names_that_ran

pytestmark = pytest.mark.gpu
TEXT = "B8,H16,L1024,D64,bf16,causal"


@pytest.fixture(autouse=True)
def on_hopper(gpu: Device) -> None:
    for kind in (Hopper, HopperCuda):
        if reasons := kind().reasons_unsupported(Workload.parse(TEXT), gpu):
            pytest.skip("; ".join(reasons))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNSCOPE_CACHE_DIR", str(tmp_path))
    return tmp_path


def put(gpu: Device, text: str, *, cuda: bool) -> Entry:
    """The user's table with an entry of that engine for the workload's class."""
    workload = Workload.parse(text)
    entry = next(one for one in Hopper().candidates(workload, gpu) if (one.cuda is not None) == cuda)
    path = Hopper.tables.user_path(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table_text(Table("hopper", gpu.name, {Hopper().tuning_class(workload): entry})))
    return entry


@pytest.mark.parametrize(("cuda", "ran"), [(True, "hopper_cuda"), (False, "hopper")])
def test_the_engine_of_the_users_table_runs_and_the_record_says_so(
    cuda: bool, ran: str, gpu: Device, own_cache: Path
) -> None:
    put(gpu, TEXT, cuda=cuda)
    ask = Ask(Workload.parse(TEXT), gpu, 0, ("forward",), {"hopper": None}, frozenset(), True)
    forget(report=lambda message: None)  # a process keeps what it prepared, and the table is another one now
    found = check(ask, "hopper", ("forward",), report=lambda message: None)
    assert found.check.passed and found.mismatch is None and found.ran == ran
    kernel = "hopper_cuda_forward" if cuda else "hopper_attention_forward"
    assert kernel in found.kernels["forward"]


@pytest.mark.parametrize("more", ["softcap=20", "sinks", "alibi", "lengths=1024/7/0/1/2/3/4/5"])
def test_what_the_cuda_engine_refuses_runs_in_gluon(more: str, gpu: Device, own_cache: Path) -> None:
    put(gpu, TEXT, cuda=True)
    workload = Workload.parse(f"{TEXT},{more}")
    implementation = find("hopper")
    prepared = implementation.prepare(workload, gpu)
    result = check_implementation(implementation, workload, gpu, directions=("forward",), quick=True, prepared=prepared)
    assert result.passed, result.message
    names = names_that_ran(prepared, make_inputs(workload, gpu), "forward", gpu)
    assert "hopper_attention_forward" in names and "hopper_cuda_forward" not in names


@pytest.mark.parametrize(
    "text", ["B2,H8,L2048,D256,bf16", "B2,H8,L8192,D256,fp16,causal", "B2,H32,L8192,D64,bf16,causal"]
)
def test_what_ships_runs_the_engine_that_it_names(text: str, gpu: Device, own_cache: Path) -> None:
    workload = Workload.parse(text)
    entry = Hopper().chosen(workload, gpu)
    prepared, inputs = find("hopper").prepare(workload, gpu), make_inputs(workload, gpu)
    kernel = "hopper_cuda_forward" if entry.cuda is not None else "hopper_attention_forward"
    assert kernel in names_that_ran(prepared, inputs, "forward", gpu)
    stream, expected = torch.cuda.Stream(), prepared.forward(inputs).out.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = prepared.forward(inputs).out
    captured.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)


@pytest.mark.timeout(600)
def test_tuning_a_class_finds_every_candidate_right(gpu: Device, own_cache: Path) -> None:
    report = execute_tune(make_tune_plan("hopper", [TEXT], quick=True))
    (found,) = report.classes
    assert not report.has_faults, [(one.label, one.message) for one in found.tried if one.status != "measured"]
    assert {one.configuration["engine"] for one in found.tried} == {"gluon", "cuda"}
    assert all(0.2 < (one.ratio or 0) < 5 for one in found.tried) and found.tried[0].ratio == pytest.approx(1)
    table = Hopper.tables.user_table(gpu)
    assert table is not None and table.measured[found.name]["driver"]
    chosen = Hopper().chosen(Workload.parse(TEXT), gpu)
    assert chosen.as_dict() == (found.entry if found.is_changed else found.tried[0].configuration)


@pytest.mark.timeout(600)
def test_a_choice_that_is_slow_on_purpose_is_replaced(
    gpu: Device, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload.parse(TEXT)
    usual = HopperCuda().candidates(workload, gpu)[0]
    slow = dataclasses.replace(usual, groups=2, keys=16, stages=2, persistent=False, schedule="arithmetic")
    monkeypatch.setattr(HopperCuda.tables, "shipped", lambda key, device: slow)
    report = execute_tune(make_tune_plan("hopper_cuda", [TEXT], quick=True))
    assert report.classes[0].is_changed and not report.has_faults
    assert (report.classes[0].tried[report.classes[0].chosen or 0].ratio or 1) < 0.9
