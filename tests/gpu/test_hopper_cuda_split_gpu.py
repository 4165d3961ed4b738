"""hopper_cuda on a Hopper card where it cuts the last round's keys: right, alike each time, in graphs and on streams.

``pytest -m gpu tests/gpu/test_hopper_cuda_split_gpu.py``. compute-sanitizer's part is in test_hopper_gpu.py.
"""

from __future__ import annotations

import pytest
import torch

from attnscope.device import Device
from attnscope.implementations.hopper_cuda import HopperCuda, PreparedHopperCuda
from attnscope.implementations.hopper_cuda.configurations import Configuration, candidates
from attnscope.inputs import Inputs, make_inputs
from attnscope.reference import compute_attention
from attnscope.workload import Workload
from card_contract import run_in_threads
from test_contract import names_that_ran

pytestmark = pytest.mark.gpu

LONG, WIDE = Configuration(2, 176, 2, False, slack=8, split=True), Configuration(2, 80, 2, False, slack=8, split=True)
PAIRS, WIDE_PAIRS = (
    Configuration(2, keys, 2, False, slack=8, cluster=2, split=True) for keys in (128, 80)
)  # fmt: skip
TINY = Configuration(1, 16, 2, split=True)  # many tiles of keys at small sizes
CASES = [
    ("B1,H5,L4096,D128,bf16", LONG),  # 160 tiles of rows
    ("B1,H5,L4001,S3999,D128,fp16,layout=blhd", LONG),
    ("B2,H9/3,L1111,S5000,D128,bf16", Configuration(2, 128, 2, query_slots=2, split=True)),
    ("B1,H5,L4096,D128,bf16", PAIRS),  # rows of a head
    ("B1,H20/2,L1000,S5003,D128,bf16,layout=blhd", PAIRS),  # heads of a group
    ("B1,H7,L4096,D64,bf16,layout=qkv", Configuration(3, 128, 4, query_slots=2, split=True)),
    ("B1,H3,L6000,S5999,D256,bf16", WIDE),
    ("B1,H6/3,L3000,S5999,D256,fp16", WIDE_PAIRS),
    ("B1,H5,L6000,D192,Dv128,bf16", Configuration(3, 80, 3, slack=8, split=True)),
    ("B1,H3,L6000,S7000,D192,bf16", Configuration(2, 112, 2, split=True)),
    ("B1,H4,L64,S65536,D128,bf16", Configuration(1, 128, 3, split=True)),  # no whole turn
    ("B3,H5/1,L1,S9001,D72,Dv40,bf16", TINY),
    ("B1,H200,L64,S512,D16,fp16,scale=0.7", TINY),
    ("B1,H9,L4097,D64,bf16", Configuration(4, 64, 10, False, query_slots=2, split=True)),
]


@pytest.fixture(autouse=True)
def on_hopper(gpu: Device) -> None:
    if HopperCuda.sheet.device_reasons(gpu):
        pytest.skip("needs a Hopper card")


def prepared_to_cut(text: str, configuration: Configuration, gpu: Device) -> tuple[PreparedHopperCuda, Workload]:
    workload = Workload.parse(text)
    prepared = HopperCuda().prepare_as(workload, gpu, configuration)
    assert prepared.split is not None, "no keys are cut"
    return prepared, workload


@pytest.mark.parametrize(("text", "configuration"), CASES)
def test_pieces_are_right_and_alike_each_time(text: str, configuration: Configuration, gpu: Device) -> None:
    prepared, workload = prepared_to_cut(text, configuration, gpu)
    for kind in ("plain", "needles"):
        inputs = make_inputs(workload, gpu, 6, kind)
        truth = compute_attention(inputs, backward=False)
        first = prepared.forward(inputs)
        assert ((first.out.double() - truth.out).abs() / (truth.scales["out"] + 1e-4)).max().item() < 1e-2
        assert ((first.lse.double() - truth.lse).abs() / (1 + truth.lse.abs())).max().item() < 1e-5
        for _ in range(20):
            again = prepared.forward(inputs)
            assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)


@pytest.mark.parametrize("dims", ["D64", "D128", "D256", "D192,Dv128"])
def test_every_candidate_that_cuts_keys_agrees_with_the_usual_one(dims: str, gpu: Device) -> None:
    workload = Workload.parse(f"B1,H5,L8192,{dims},bf16")
    found, inputs = candidates(workload, gpu), make_inputs(workload, gpu, 2)
    expected = HopperCuda().prepare_as(workload, gpu, found[0]).forward(inputs)
    assert any(one.split for one in found)
    for one in found:
        output = HopperCuda().prepare_as(workload, gpu, one).forward(inputs)
        assert (output.out.float() - expected.out.float()).abs().max().item() < 4e-3, one
        assert (output.lse - expected.lse).abs().max().item() < 1e-4, one


def test_both_kernels_run_and_none_besides(gpu: Device) -> None:
    prepared, workload = prepared_to_cut(*CASES[0], gpu)
    inputs = make_inputs(workload, gpu)
    prepared.forward(inputs)
    seen = [name for name in names_that_ran(prepared, inputs, "forward", gpu) if "Mem" not in name]
    assert sorted(seen) == ["hopper_cuda_combine", "hopper_cuda_forward"]


@pytest.mark.parametrize(("text", "configuration"), [CASES[0], CASES[4], CASES[11]])
def test_threads_streams_and_graphs(text: str, configuration: Configuration, gpu: Device) -> None:
    """Calls that overlap have parts of their own: inputs differ, and each result is that of its own."""
    prepared, workload = prepared_to_cut(text, configuration, gpu)
    own = [make_inputs(workload, gpu, seed) for seed in range(3)]
    expected = [prepared.forward(inputs) for inputs in own]
    torch.cuda.synchronize()

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                output = prepared.forward(own[index])
                assert torch.equal(output.out, expected[index].out), index
                assert torch.equal(output.lse, expected[index].lse), index

    run_in_threads(len(own), work)
    torch.cuda.synchronize()
    check_graph(prepared, own, [output.out for output in expected])


def check_graph(prepared: PreparedHopperCuda, own: list[Inputs], expected: list[torch.Tensor]) -> None:
    """Three calls captured in one graph, whose parts may share memory; replayed twice."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [prepared.forward(inputs).out for inputs in own]
    for _ in range(2):
        for out in captured:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, one) for out, one in zip(captured, expected, strict=True))
