"""FlexAttention and the attention libraries on a card: the check, the kernels that ran, graphs, compiled once.

What is not installed, or does not import, is skipped with its sentence.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch

from attnscope.checking import ReferenceCache, check_implementation
from attnscope.device import Device
from attnscope.errors import PrepareFailed
from attnscope.implementation import Prepared, find
from attnscope.inputs import make_inputs
from attnscope.workload import DIRECTIONS, Workload
from test_contract import names_that_ran, run_case
from test_contract import problem as problem_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # some compile for tens of seconds
    pytest.mark.filterwarnings("ignore"),  # what other libraries have to say
]
PEERS = ("flex", "varlen", "flash_attn_2", "flash_attn_3", "flash_attn_4", "xformers", "sage")
BLOG = "B2,H8,L1024,D64,bf16,causal"
WORKLOADS = [
    BLOG,
    "B2,H8/2,L512,D128,bf16,causal,layout=blhd",
    "B1,H8,L300,S1000,D128,fp16,causal=bottom_right",
    "B2,H8,L512,D64,bf16,causal,window=100",
    "B2,H8,L500,D64,bf16,window=100",
    "H8/2,D64,bf16,causal,packed=320/192/512",
    "B3,H8,L256,S320,D128,bf16,lengths=320/100/7",
    "B8,H8/2,L1,S2048,D128,bf16",
    "B2,H8,L512,D64,bf16,layout=qkv",
]
OPTIONS = [
    "B2,H8,L512,D64,bf16,causal,softcap=30",
    "B2,H8,L500,D64,bf16,causal,alibi",
    "B2,H8,L500,D64,bf16,alibi",
    "B2,H8/2,L512,D64,bf16,causal,sinks",
    "B2,H8,L256,D128,Dv64,bf16,causal",
    "B2,H8,L300,D64,bf16,mask=bool",
    "B2,H8,L300,D64,bf16,bias=bf16:1xHxLxS,causal",
    "B2,H8,L300,D64,fp32,causal",
    "H8,D64,bf16,causal,packed=300/212/0/512",
    "B3,H8,L256,D128,bf16,lengths=256/100/0",
    "B1,H8,L1000,S300,D64,bf16,causal=bottom_right",
    "B1,H4,L256,D256,bf16,causal",
    "B2,H8,L512,D64,bf16,causal,dropout=0.1",
    "B2,H8,L300,D64,bf16,mask=bool,dropout=0.2",
]
LEAST_OF_THE_COMMON = {"sage": 3, "varlen": 6}  # of WORKLOADS; others all


def skip_unless_installed(name: str, text: str, device: Device, direction: str = "forward") -> None:
    if reasons := find(name).reasons_unsupported(Workload.parse(text), device, direction):
        pytest.skip("; ".join(reasons))


@functools.cache
def prepared_for(name: str, text: str, device: Device) -> Prepared:
    try:
        return find(name).prepare(Workload.parse(text), device)
    except PrepareFailed as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.mark.parametrize("text", [*WORKLOADS, *OPTIONS])
@pytest.mark.parametrize("name", PEERS)
def test_the_check_passes(name, text, gpu):
    skip_unless_installed(name, text, gpu)
    implementation, workload = find(name), Workload.parse(text)
    directions = tuple(d for d in DIRECTIONS if not implementation.reasons_unsupported(workload, gpu, d))
    prepared = prepared_for(name, text, gpu)
    result = check_implementation(
        implementation, workload, gpu, directions=directions, quick=True, prepared=prepared, cache=ReferenceCache()
    )
    assert result.passed, result.message
    if name == "flex":
        assert prepared.recompiles == 0


@pytest.mark.parametrize("name", PEERS)
def test_an_installed_library_refuses_little_of_what_is_common(name, gpu):
    skip_unless_installed(name, BLOG, gpu)
    refused = {
        text: reasons
        for text in WORKLOADS
        if (reasons := find(name).reasons_unsupported(Workload.parse(text), gpu, "forward"))
    }
    assert len(WORKLOADS) - len(refused) >= LEAST_OF_THE_COMMON.get(name, len(WORKLOADS)), refused


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", PEERS)
def test_the_kernels_are_of_the_family_that_the_sheet_claims(name, direction, gpu):
    skip_unless_installed(name, BLOG, gpu, direction)
    workload, sheet = Workload.parse(BLOG), find(name).sheet
    prepared, inputs = prepared_for(name, BLOG, gpu), make_inputs(workload, gpu)
    seen = names_that_ran(prepared, inputs, direction, gpu)
    for pattern in sheet.kernels["cuda"]:
        assert any(re.search(pattern, kernel) for kernel in seen), (pattern, seen)
    for pattern in sheet.kernels_absent.get("cuda", ()):
        assert not any(re.search(pattern, kernel) for kernel in seen), (pattern, seen)


@pytest.mark.parametrize("kind", ["strided", "expanded"])
@pytest.mark.parametrize("name", PEERS)
def test_tensors_of_other_strides(name, kind, gpu):
    text = "B2,H8,L128,D64,bf16,causal"
    skip_unless_installed(name, text, gpu)
    workload = Workload.parse(text)
    prepared_for(name, text, gpu)
    inputs = make_inputs(workload, gpu)
    if kind == "strided":
        inputs.q, inputs.k, inputs.v = (torch.stack([t, t], -1)[..., 0] for t in (inputs.q, inputs.k, inputs.v))
    else:
        inputs.grad_out = inputs.grad_out[..., :1, :1].expand_as(inputs.grad_out)
    _, truth = problem_of(workload, gpu)
    if kind == "expanded":
        from attnscope.reference import compute_attention

        truth = compute_attention(inputs)
    if find(name).sheet.approximate:
        out = find(name).prepare(workload, gpu).forward(inputs).out
        assert torch.nn.functional.cosine_similarity(out.double().flatten(), truth.out.flatten(), dim=0) > 0.98
    else:
        run_case(find(name), inputs, truth, gpu)


@pytest.mark.parametrize("name", PEERS)
def test_what_claims_it_can_be_captured_in_a_graph(name, gpu):
    skip_unless_installed(name, BLOG, gpu)
    assert find(name).sheet.cuda_graph
    workload = Workload.parse(BLOG)
    prepared, inputs = prepared_for(name, BLOG, gpu), make_inputs(workload, gpu)
    expected = prepared.forward(inputs).out.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        prepared.forward(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prepared.forward(inputs).out
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


def test_flex_times_its_block_mask_apart(gpu):
    prepared = prepared_for("flex", BLOG, gpu)
    assert 0 < prepared.block_mask_s < 60
    inputs = make_inputs(Workload.parse(BLOG), gpu)
    for _ in range(3):
        prepared.backward(inputs, prepared.forward(inputs, save=True).saved)
    assert prepared.compilations >= 1 and prepared.recompiles == 0
    assert len(prepared.remarks()) == 1 and "BlockMask" in prepared.remarks()[0]
