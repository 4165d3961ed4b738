"""hopper_cuda on a Hopper card: the whole check, every candidate, strides, streams, graphs, sizes.

``pytest -m gpu tests/gpu/test_hopper_cuda_gpu.py``. A kernel that hangs is ended by pytest's timeout.
"""

from __future__ import annotations

import pytest
import torch

from attnscope.checking import check_implementation
from attnscope.device import Device
from attnscope.implementation import find
from attnscope.implementations.hopper_cuda import HopperCuda
from attnscope.implementations.hopper_cuda.configurations import Configuration
from attnscope.inputs import make_inputs
from attnscope.reference import compute_attention
from attnscope.workload import Workload
from test_contract import names_that_ran

pytestmark = pytest.mark.gpu

WORKLOADS = [
    "B2,H16,L1024,D128,bf16",
    "B2,H16,L1000,D128,fp16,causal",
    "B2,H8,L1024,D64,bf16,causal",
    "B2,H8,L777,D64,fp16",
    "B2,H4,L700,D256,bf16",
    "B2,H4,L700,D256,fp16,causal",
    "B2,H8/2,L129,S500,D64,bf16,causal=bottom_right",
    "B2,H4,L300,S100,D128,bf16,causal=bottom_right",
    "B4,H12,L512,D64,bf16,causal,layout=qkv",
    "B2,H8/4,L333,D96,bf16,window=100,causal,layout=blhd",
    "B1,H4,L500,D128,bf16,window=64",
    "B2,H6/3,L257,D192,bf16,causal",
    "B1,H3,L33,D8,bf16,scale=0.2",
    "B3,H4,L1,S1,D72,fp16",
    "B8,H32/8,L1,S4096,D128,bf16",
    "B1,H32,L128,D128,bf16,causal",  # few tiles: blocks of one group
    "B2,H4/2,L33,S2000,D256,fp16,causal=bottom_right",
    "B2,H8,L1024,D192,Dv128,bf16",
    "B2,H8/2,L1000,D192,Dv128,fp16,causal,layout=blhd",
    "B1,H4,L300,S700,D192,Dv128,bf16,causal=bottom_right",
    "B1,H4,L500,D192,Dv128,bf16,causal,window=64",
    "B1,H3,L257,S300,D64,Dv128,bf16,window=50",
    "B2,H3,L200,S333,D128,Dv64,fp16,causal=bottom_right",
    "B1,H2,L130,D72,Dv40,bf16,causal",
    "B1,H2,L200,D256,Dv64,bf16",
    "B1,H2,L200,D8,Dv256,fp16,causal",
]


@pytest.fixture(autouse=True)
def on_hopper(gpu: Device) -> None:
    if HopperCuda.sheet.device_reasons(gpu):
        pytest.skip("needs a Hopper card")


@pytest.mark.parametrize("text", WORKLOADS)
def test_the_whole_check(text: str, gpu: Device) -> None:
    implementation, workload = find("hopper_cuda"), Workload.parse(text)
    assert implementation.reasons_unsupported(workload, gpu) == []
    result = check_implementation(implementation, workload, gpu, directions=("forward",), quick=True)
    assert result.grade == "tight", result.message
    assert result.deterministic == {"forward": True}


@pytest.mark.parametrize("mask", ["", ",causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, "192,Dv128"])
def test_every_candidate_agrees(head_dim: int, mask: str, gpu: Device) -> None:
    failures = []
    for heads, length in (("B4,H8/2", 1100), ("B1,H8/2", 1000)):  # many tiles, and few
        workload = Workload.parse(f"{heads},L{length},D{head_dim},bf16{mask},layout=blhd")
        inputs = make_inputs(workload, gpu, 2)
        truth = compute_attention(inputs)
        for configuration in HopperCuda().candidates(workload, gpu):
            output = HopperCuda().prepare_as(workload, gpu, configuration).forward(inputs)
            error = ((output.out.double() - truth.out).abs() / truth.scales["out"]).max().item()
            lse_error = (output.lse.double() - truth.lse).abs().max().item()
            if not (error < 1e-2 and lse_error < 1e-4):
                failures.append(f"{workload}, {configuration}: out {error:.1e}, lse {lse_error:.1e}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("mask", ["", ",causal", ",causal,window=300"])
def test_two_blocks_that_share_keys_give_the_same_each_time(mask: str, gpu: Device) -> None:
    workload = Workload.parse(f"B2,H16/4,L2111,D128,bf16{mask}")  # 17 tiles of rows, an odd number
    inputs = make_inputs(workload, gpu, 3)
    alone, shared = (
        HopperCuda().prepare_as(workload, gpu, Configuration(2, 128, 2, schedule="table", cluster=cluster))
        for cluster in (1, 2)
    )
    expected = alone.forward(inputs)
    for _ in range(100):
        output = shared.forward(inputs)
        assert torch.equal(output.out, expected.out) and torch.equal(output.lse, expected.lse)


def test_its_kernel_is_what_runs(gpu: Device) -> None:
    workload = Workload.parse("B2,H4,L200,D64,bf16,causal")
    prepared, inputs = find("hopper_cuda").prepare(workload, gpu), make_inputs(workload, gpu)
    prepared.forward(inputs)
    seen = [name for name in names_that_ran(prepared, inputs, "forward", gpu) if "Mem" not in name]
    assert seen == ["hopper_cuda_forward"]


def test_expanded_and_strided_inputs(gpu: Device) -> None:
    workload = Workload.parse("B2,H3,L70,D64,bf16,causal")
    inputs = make_inputs(workload, gpu, 4)
    inputs.k = inputs.k[:, :1].expand(2, 3, 70, 64)
    inputs.v = inputs.v.transpose(2, 3).contiguous().transpose(2, 3)
    wide = torch.randn(2, 3, 70, 128, device="cuda").to(torch.bfloat16)
    inputs.q = wide[..., 64:]
    output, truth = find("hopper_cuda").prepare(workload, gpu).forward(inputs), compute_attention(inputs)
    assert ((output.out.double() - truth.out).abs() / truth.scales["out"]).max().item() < 1e-2


def test_another_stream_and_a_graph(gpu: Device) -> None:
    workload = Workload.parse("B1,H8,L513,D128,bf16,causal")
    prepared, inputs = find("hopper_cuda").prepare(workload, gpu), make_inputs(workload, gpu, 5)
    expected = prepared.forward(inputs).out.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = prepared.forward(inputs).out
    torch.cuda.synchronize()
    assert torch.equal(beside, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = prepared.forward(inputs).out
    captured.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)


def test_offsets_beyond_32_bits(gpu: Device) -> None:
    workload = Workload.parse("B4,H32,L262144,D64,bf16,window=8,causal")  # 2**31 numbers a tensor
    if gpu.memory_bytes < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    inputs = make_inputs(workload, gpu)
    output = find("hopper_cuda").prepare(workload, gpu).forward(inputs)
    last = workload.replace(B=1, H=1, L=256)
    q, k, v = (t[-1:, -1:, -256:] for t in (inputs.q, inputs.k, inputs.v))
    small = make_inputs(last, gpu)
    small.q, small.k, small.v = q, k, v
    truth = compute_attention(small)
    rows = slice(16, None)  # the first rows of the cut miss keys before it
    error = (output.out[-1:, -1:, -256:].double() - truth.out)[:, :, rows].abs() / truth.scales["out"][:, :, rows]
    assert error.max().item() < 1e-2


def test_more_heads_than_a_grids_y(gpu: Device) -> None:
    workload = Workload.parse("B4096,H20,L3,D16,fp16,causal")
    assert check_implementation(
        find("hopper_cuda"), workload, gpu, kinds=("plain",), directions=("forward",), quick=True
    ).passed
