"""cuDNN's graphs on a real card: every option against float64, threads, streams, CUDA graphs, workspaces.

``pytest -m gpu tests/gpu/test_cudnn_graph_gpu.py``; skipped where ``nvidia-cudnn-frontend`` is not installed.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from attnscope import cudnn_plans  # noqa: E402
from attnscope.checking import check_implementation  # noqa: E402
from attnscope.implementations.cuda_ladder import LIBRARY_RUNGS  # noqa: E402
from attnscope.implementations.cudnn_graph import CudnnGraph, Settings  # noqa: E402
from attnscope.inputs import make_inputs  # noqa: E402
from attnscope.ladder import run_ladder, workload_for  # noqa: E402
from attnscope.reference import compute_attention  # noqa: E402
from attnscope.workload import Workload  # noqa: E402
from test_contract import names_that_ran, run_case  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend"),
]
MIB = 2**20

WORKLOADS = [
    "B2,H4,L256,D64,bf16",
    "B2,H4,L256,D128,fp16,causal",
    "B2,H4,L129,D64,bf16,causal,layout=blhd",
    "B2,H4,L192,D64,bf16,causal,layout=qkv",
    "B2,H8/2,L65,S129,D64,bf16,causal",
    "B1,H8/1,L129,S65,D128,bf16,causal",
    "B1,H4,L65,S200,D64,bf16,causal=bottom_right",
    "B1,H4,L128,D64,bf16,causal=bottom_right",
    "B2,H4,L128,D192,Dv128,bf16,causal",
    "B1,H4,L200,D64,bf16,window=9,causal",
    "B1,H4,L200,D64,bf16,window=33",
    "B1,H4,L65,S200,D64,bf16,window=40,causal=bottom_right",
    "B3,H4,L64,S200,D64,bf16,lengths=200/65/1",
    "B2,H4/2,L200,D64,bf16,causal,lengths=200/77",
    "B2,H4,L64,S200,D64,bf16,causal=bottom_right,lengths=200/65",
    "B1,H12,L200,D64,bf16,alibi,causal",
    "B2,H4,L128,S192,D64,bf16,bias=bf16:BxHxLxS",
    "B2,H4/2,L192,D64,bf16,causal,bias=bf16:1xHxLxS",
    "B2,H4,L65,S70,D64,bf16,bias=bf16:1x1xLxS",
    "B1,H4,L192,D64,bf16,bias=fp32",
    "B1,H4,L192,D64,bf16,causal,scale=0.3",
    "B2,H8/2,L1,S500,D128,bf16",
]
# A bias that is broadcast along rows or keys: cuDNN plans them; whether it computes them is what these tests ask.
BROADCAST = ["B2,H4,L64,D64,bf16,bias=bf16:1xHx1xS,causal", "B2,H4,L64,D64,bf16,bias=bf16:Bx1xLx1"]


def both(prepared, inputs):
    """Clones of everything that forward and backward return."""
    output = prepared.forward(inputs, save=True)
    tensors = {"out": output.out, "lse": output.lse} | prepared.backward(inputs, output.saved).tensors()
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_same(got, expected, what=""):
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=2e-2, rtol=2e-2, msg=lambda m, n=name: f"{what} {n}: {m}")


def refused(workload, gpu):
    if reasons := CudnnGraph().reasons_unsupported(workload, gpu):
        pytest.fail(f"{workload} is refused: {'; '.join(reasons)}")


@pytest.mark.parametrize("text", WORKLOADS + BROADCAST)
def test_every_option_by_the_contract(gpu, text):
    workload = Workload.parse(text)
    refused(workload, gpu)
    inputs = make_inputs(workload, gpu)
    run_case(CudnnGraph(), inputs, compute_attention(inputs), gpu)


@pytest.mark.parametrize("text", WORKLOADS)
def test_every_option_by_the_projects_own_check(gpu, text):
    workload = Workload.parse(text)
    directions = [d for d in ("forward", "backward") if not CudnnGraph().reasons_unsupported(workload, gpu, d)]
    assert directions
    result = check_implementation(CudnnGraph(), workload, gpu, directions=directions, quick=True)
    assert result.passed, result.message


@pytest.mark.parametrize("text", ["B2,H4,L256,D64,bf16,causal,layout=qkv", "B1,H4,L128,D64,bf16,bias=bf16"])
def test_it_is_cudnn_that_runs(gpu, text):
    workload = Workload.parse(text)
    prepared, inputs = CudnnGraph().prepare(workload, gpu), make_inputs(workload, gpu)
    prepared.backward(inputs, prepared.forward(inputs, save=True).saved)
    for direction in ("forward", "backward"):
        names = names_that_ran(prepared, inputs, direction, gpu)
        assert any("cudnn_generated" in name for name in names), names
        if workload.layout == "qkv":
            assert not any("copy" in name.lower() or "elementwise" in name for name in names), names


def test_the_scale_as_a_tensor(gpu):
    for text in ("B1,H2,L128,D64,bf16,causal,scale=0.3", "B1,H2,L128,D64,bf16,causal"):
        workload = Workload.parse(text)
        inputs = make_inputs(workload, gpu)
        plain, tensor = (CudnnGraph().prepare(workload, gpu, s) for s in (None, Settings(scale_as_tensor=True)))
        assert_same(both(tensor, inputs), both(plain, inputs), text)


def test_inference_writes_the_same_without_statistics(gpu):
    workload = Workload.parse("B2,H4,L200,D64,bf16,causal")
    inputs = make_inputs(workload, gpu)
    output = CudnnGraph().prepare(workload, gpu, Settings(stats=False)).forward(inputs)
    assert output.lse is None
    assert_same({"out": output.out}, {"out": CudnnGraph().prepare(workload, gpu).forward(inputs).out})


@pytest.mark.parametrize("text", ["B2,H4,L512,D64,bf16,causal", "B2,H8/2,L300,D128,bf16"])
def test_the_deterministic_backward_is_that(gpu, text):
    workload = Workload.parse(text)
    prepared, inputs = CudnnGraph().prepare(workload, gpu, Settings(deterministic=True)), make_inputs(workload, gpu)
    assert_same(both(prepared, inputs), both(CudnnGraph().prepare(workload, gpu), inputs))
    saved = prepared.forward(inputs, save=True).saved
    first = {name: t.clone() for name, t in prepared.backward(inputs, saved).tensors().items()}
    beside = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    for _ in range(30):
        with torch.cuda.stream(beside):
            noise = noise @ noise * 1e-3
        again = prepared.backward(inputs, saved).tensors()
        assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


# --- dropout ----------------------------------------------------------------------------------------------------------


def dropped(workload, gpu, settings, inputs):
    return CudnnGraph().prepare(workload, gpu, settings).forward(inputs).out


def keep_mask(workload, gpu, settings):
    """The mask that the seed makes, read off: equal weights, and values that tell the keys apart (S = D_v)."""
    inputs = make_inputs(workload, gpu)
    inputs.q.zero_()
    inputs.v.copy_(torch.eye(workload.S, device="cuda", dtype=inputs.v.dtype).expand_as(inputs.v))
    return dropped(workload, gpu, settings, inputs) > 0


@pytest.mark.parametrize("probability", [0.125, 0.25, 0.5])
def test_dropout_by_statistics_over_seeds(gpu, probability):
    """Seeds are what is independent: the masks within a call are not, see fault A2 of ``attnscope faults``."""
    workload, seeds = Workload.parse("B2,H4,L128,S64,D64,bf16"), 48
    masks = [keep_mask(workload, gpu, Settings(dropout=probability, seed=seed)) for seed in range(seeds)]
    rates = torch.stack([mask.double().mean((0, 1, 2)) for mask in masks])  # of each key, by seed
    deviation = rates.std(0)
    off = (rates.mean(0) - (1 - probability)).abs() / (deviation / seeds**0.5)
    assert off.max() < 6, f"a key is kept at a rate {off.max().item():.1f} standard errors off"
    fair = (probability * (1 - probability) / (masks[0].numel() / workload.S)) ** 0.5
    assert 0.5 * fair < deviation.mean() < 5 * fair, f"rates spread {deviation.mean().item() / fair:.1f} times as far"
    total = rates.mean(1)
    assert (total.mean() - (1 - probability)).abs() < 6 * total.std() / seeds**0.5
    assert len({tuple(mask.flatten()[:256].tolist()) for mask in masks}) == seeds, "two seeds made one mask"
    other = keep_mask(workload, gpu, Settings(dropout=probability, seed=0, offset=4096))
    assert not torch.equal(other, masks[0]), "the offset changes nothing"


def test_dropout_of_one_seed_is_the_same_in_both_directions(gpu):
    workload, settings = Workload.parse("B2,H4,L128,S64,D64,bf16"), Settings(dropout=0.25, seed=11, offset=3)
    inputs = make_inputs(workload, gpu)
    inputs.dropout_keep = keep_mask(workload, gpu, settings)
    truth = compute_attention(replace(inputs, workload=workload.replace(dropout=0.25)))
    got = both(CudnnGraph().prepare(workload, gpu, settings), inputs)
    for name in ("out", "dq", "dk", "dv"):
        error = (got[name].double() - getattr(truth, name)).abs()
        worst = (error / (6e-2 * truth.scales[name].amax(-1, keepdim=True) + 1e-12)).max().item()
        assert worst <= 1, f"{name} is wrong: {worst:.3g} times what is allowed"


def test_no_dropout_is_exactly_none(gpu):
    workload = Workload.parse("B2,H4,L128,D64,bf16,causal")
    inputs = make_inputs(workload, gpu)
    plain = CudnnGraph().prepare(workload, gpu).forward(inputs).out
    assert torch.equal(dropped(workload, gpu, Settings(dropout=0.0, seed=5), inputs), plain)


# --- keeping and running ----------------------------------------------------------------------------------------------


def test_threads_on_streams_of_their_own_share_plans(gpu):
    workloads = [Workload.parse(f"B2,H4,L{length},D64,bf16,causal") for length in (64, 128, 200)]
    inputs = [make_inputs(workload, gpu) for workload in workloads]
    expected = [
        both(CudnnGraph().prepare(workload, gpu), given) for workload, given in zip(workloads, inputs, strict=True)
    ]
    torch.cuda.synchronize()
    cudnn_plans.PLANS.clear()

    def work(thread):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for turn in range(30):
                which = (thread + turn) % len(workloads)
                got = both(CudnnGraph().prepare(workloads[which], gpu), inputs[which])
                stream.synchronize()
                assert_same(got, expected[which], f"thread {thread}, turn {turn}")
        return thread

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(work, range(6))) == list(range(6))
    statistics = cudnn_plans.PLANS.statistics()
    print(statistics, f"hit rate {statistics.hit_rate:.4f}")
    assert (statistics.misses, statistics.size, statistics.evictions) == (6, 6, 0)


@pytest.mark.parametrize(
    "text",
    [
        "B2,H4,L256,D64,bf16,causal,layout=qkv",
        "B1,H12,L200,D64,bf16,alibi,causal",
        "B2,H4,L200,D64,bf16,causal,lengths=200/77",
        "B1,H4,L128,D64,bf16,bias=bf16",
        "B1,H4,L1,S300,D64,bf16",
    ],
)
def test_a_cuda_graph_replays_on_new_inputs_after_the_workspace_has_grown(gpu, text):
    workload = Workload.parse(text)
    prepared, inputs, others = CudnnGraph().prepare(workload, gpu), *(make_inputs(workload, gpu, s) for s in (1, 2))
    expected = both(prepared, others)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            both(prepared, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = prepared.forward(inputs, save=True)
        captured = {"out": output.out, "lse": output.lse} | prepared.backward(inputs, output.saved).tensors()
    large = Workload.parse("B4,H8,L1024,D128,bf16,causal")
    with torch.cuda.stream(stream):
        both(CudnnGraph().prepare(large, gpu), make_inputs(large, gpu))
    torch.cuda.synchronize()
    for name, tensor in inputs.tensors().items():
        tensor.copy_(others.tensors()[name])
    for tensor in captured.values():
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_same(captured, expected, "replayed")


def test_workspaces_are_what_they_say(gpu):
    """A forward needs next to nothing, a backward float32 dq, grouped heads dk and dv, determinism or dbias dP."""
    workload = Workload.parse("B1,H8,L4096,D64,bf16,causal")
    scores = 2 * workload.B * workload.H * workload.L * workload.S
    dq = 4 * workload.B * workload.H * workload.L * workload.D
    sizes = {
        "default": CudnnGraph().prepare(workload, gpu).workspace_bytes,
        "deterministic": CudnnGraph().prepare(workload, gpu, Settings(deterministic=True)).workspace_bytes,
        "bias": CudnnGraph().prepare(
            Workload.parse("B1,H8,L4096,D64,bf16,bias=bf16:1xHxLxS"), gpu
        ).workspace_bytes,
    }  # fmt: skip
    print({name: {way: f"{size / MIB:.3f} MiB" for way, size in found.items()} for name, found in sizes.items()})
    grouped = Workload.parse("B2,H8/2,L256,S2048,D128,bf16")
    sizes["grouped"] = CudnnGraph().prepare(grouped, gpu).workspace_bytes
    by_head = 2 * grouped.B * grouped.H * grouped.S * (grouped.D + grouped.D_v)
    least = 4 * grouped.B * grouped.H * grouped.L * grouped.D + by_head
    assert least <= sizes["grouped"]["backward"] < 1.05 * least + MIB
    assert all(found["forward"] < MIB for found in sizes.values())
    assert dq <= sizes["default"]["backward"] < 1.5 * dq
    for name in ("deterministic", "bias"):
        assert scores <= sizes[name]["backward"] < 1.5 * scores


def test_one_workspace_a_stream(gpu):
    workload = Workload.parse("B2,H4,L512,D64,bf16,causal")
    inputs = make_inputs(workload, gpu)
    prepared = CudnnGraph().prepare(workload, gpu)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    expected = both(prepared, inputs)
    with torch.cuda.stream(stream):
        beside = both(prepared, inputs)
    torch.cuda.synchronize()
    assert_same(beside, expected)
    sizes = cudnn_plans.workspace_sizes()
    streams = {torch.cuda.current_stream().cuda_stream, stream.cuda_stream}
    assert {key for key in sizes if key[1] in streams} == {(0, address) for address in streams}
    assert all(sizes[0, address] >= prepared.workspace_bytes["backward"] for address in streams)


def test_views_that_no_layout_makes(gpu):
    workload = Workload.parse("B2,H4,L70,D64,bf16,causal")
    inputs = make_inputs(workload, gpu)
    inputs.k = inputs.k[:, :1].expand_as(inputs.k)
    inputs.v = inputs.v.transpose(2, 3).contiguous().transpose(2, 3)
    odd = torch.empty(inputs.q.numel() + 1, dtype=inputs.q.dtype, device="cuda")[1:].view(inputs.q.shape)
    inputs.q = odd.copy_(inputs.q)
    inputs.grad_out = inputs.grad_out[..., :1, :1].expand_as(inputs.grad_out)
    run_case(CudnnGraph(), inputs, compute_attention(inputs), gpu)


# --- the ladder's last rungs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhld", "blhd", "qkv"])
@pytest.mark.parametrize("rung", LIBRARY_RUNGS["forward"], ids=lambda rung: rung.name)
def test_the_ladders_last_rungs(gpu, rung, layout):
    workload = workload_for(rung(), Workload.parse(f"B2,H3,L129,D64,fp32,causal,layout={layout}"), gpu)
    prepared, inputs = rung().prepare(workload, gpu), make_inputs(workload, gpu)
    result = check_implementation(rung(), workload, gpu, directions=("forward",), quick=True, prepared=prepared)
    assert result.passed, result.message
    whole = prepared.forward(inputs).out.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        prepared.forward(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = prepared.new_output(inputs)
        for step in prepared.steps(inputs, output):
            step.run()
    output.out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(output.out, whole)


def test_the_ladder_command_times_them_whole_and_in_parts(gpu):
    run = run_ladder("forward", rungs="v10,v11", workload="B2,H4,L512,D64,fp32,causal,layout=qkv", quick=True)
    parts = {row.rung: list(row.parts) for row in run.rows}
    assert parts == {"v10": ["cuDNN"], "v11": ["round", "cuDNN", "widen"]}, [row.reasons for row in run.rows]
    assert all(row.passed and row.timing is not None for row in run.rows)


def test_a_record_holds_the_workspace(gpu):
    from attnscope import measure

    run = measure("B1,H2,L256,D64,bf16", implementations="cudnn_graph", quick=True)
    row = run.results[0]
    assert row.backward.workspace_mib * MIB >= 4 * 2 * 256 * 64 > row.forward.workspace_mib * MIB - MIB
