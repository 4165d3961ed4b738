"""triton_fused on a card: the whole check on workloads over every option, and what an interpreter cannot show.

``pytest -m gpu tests/gpu/test_triton_fused_gpu.py``. Compiling the kernels of a workload takes seconds, once: Triton
keeps them on disk.
"""

from __future__ import annotations

import pytest
import torch

from attnscope.checking import check_implementation
from attnscope.device import Device
from attnscope.implementation import find
from attnscope.implementations import triton_fused
from attnscope.inputs import make_inputs
from attnscope.workload import Workload
from test_contract import names_that_ran

pytestmark = pytest.mark.gpu

WORKLOADS = [
    "B8,H16,L1024,D64,bf16,causal",
    "B2,H8,L1000,D128,fp16,causal",
    "B2,H4,L300,D256,bf16",
    "B2,H4,L257,D64,fp32,causal",
    "B1,H2,L300,D128,fp32",
    "B1,H2,L130,D256,fp32,causal",
    "B2,H8/2,L129,S500,D64,bf16,causal=bottom_right",
    "B2,H4,L200,D80,Dv40,fp16,softcap=20",
    "B4,H12,L512,D64,bf16,causal,layout=qkv",
    "B2,H8/4,L333,D96,bf16,window=100,causal,layout=blhd,sinks",
    "B3,H4,L200,S190,D64,bf16,lengths=190/7/0,causal=bottom_right,sinks",
    "H4/2,D128,bf16,causal,packed=300/212/0/1/512",
    "B2,H4,L300,D64,bf16,alibi,bias=bf16:1xHxLxS",
    "B2,H4,L150,S270,D64,fp16,mask=bool:BxHxLxS,bias=fp32:Bx1x1xS,dropout=0.1",
    "B8,H32/8,L1,S4096,D128,bf16",
    "B1,H3,L33,D7,bf16,scale=-0.2",
]


@pytest.mark.parametrize("text", WORKLOADS)
def test_the_whole_check(text: str, gpu: Device) -> None:
    implementation, workload = find("triton_fused"), Workload.parse(text)
    for direction in ("forward", "backward"):
        assert implementation.reasons_unsupported(workload, gpu, direction) == []
    result = check_implementation(implementation, workload, gpu, quick=True)
    assert result.grade == "tight", result.message
    assert result.deterministic == {"forward": True, "backward": True}


def test_prepare_compiles_what_calls_launch(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    workload = Workload.parse("B2,H4/2,L200,D64,bf16,causal,bias=bf16:1xHxLxS,layout=blhd")
    prepared = find("triton_fused").prepare(workload, gpu)
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *_, **__: pytest.fail("compiled in a call"))
    inputs = make_inputs(workload, gpu)
    prepared.backward(inputs, prepared.forward(inputs, save=True).saved)
    torch.cuda.synchronize()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_its_kernels_are_what_runs(direction: str, gpu: Device) -> None:
    workload = Workload.parse("B2,H4,L200,D64,bf16,causal")
    prepared, inputs = find("triton_fused").prepare(workload, gpu), make_inputs(workload, gpu)
    prepared.forward(inputs)
    seen = [name for name in names_that_ran(prepared, inputs, direction, gpu) if "Mem" not in name]
    wanted = {"forward": ["forward"], "backward": ["backward_delta", "backward_dkdv", "backward_dq"]}[direction]
    assert sorted({name for name in seen if name.startswith("triton_")}) == [
        f"triton_fused_attention_{name}" for name in wanted
    ]


def test_more_heads_than_a_grids_y(gpu: Device) -> None:
    workload = Workload.parse("B4096,H20,L3,D16,fp16,causal")  # B * H = 81,920
    assert check_implementation(find("triton_fused"), workload, gpu, kinds=("plain",), quick=True).passed


def test_offsets_beyond_32_bits(gpu: Device) -> None:
    """The last head of q, k and v begins more than 2**31 elements in: 8.6 GB of bf16 each for q, k, v, out."""
    workload = Workload.parse("B2,H2100,L8192,D64,bf16,window=16,causal")
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB free")
    assert workload.B * workload.H * workload.L * workload.D > 2**31
    prepared, inputs = find("triton_fused").prepare(workload, gpu), make_inputs(workload, gpu)
    small = Workload.parse("B1,H1,L8192,D64,bf16,window=16,causal")
    last = make_inputs(small, gpu)
    for name in ("q", "k", "v", "grad_out"):
        getattr(last, name).copy_(getattr(inputs, name)[-1:, -1:])
    alone = find("triton_fused").prepare(small, gpu)
    output, expected = prepared.forward(inputs), alone.forward(last)
    assert torch.equal(output.out[-1:, -1:], expected.out) and torch.equal(output.lse[-1:, -1:], expected.lse)


def test_a_cuda_graph_replays_it(gpu: Device) -> None:
    workload = Workload.parse("B2,H4,L200,D64,bf16,causal")
    prepared, inputs = find("triton_fused").prepare(workload, gpu), make_inputs(workload, gpu)
    expected = prepared.forward(inputs, save=True)
    gradients = prepared.backward(inputs, expected.saved)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = prepared.forward(inputs, save=True)
        again = prepared.backward(inputs, output.saved)
    for tensor in (output.out, *again.tensors().values()):
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output.out, expected.out)
    assert all(torch.equal(now, gradients.tensors()[name]) for name, now in again.tensors().items())


def test_tiles_beyond_32_bits_are_right(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_fused, "is_wide", lambda *_: True)
    workload = Workload.parse("B2,H4,L200,D64,bf16,causal")
    assert check_implementation(find("triton_fused"), workload, gpu, kinds=("plain",), quick=True).passed
