"""hopper's decode kernels on a card of 9.0: right on random workloads, in graphs, on two streams, beyond 32 bits.

``pytest -m gpu -s tests/gpu/test_hopper_decode_gpu.py`` (``-s`` shows the times). Compiling takes about a second for
each new combination of options, once: Triton keeps kernels on disk.
"""

from __future__ import annotations

import random

import pytest
import torch

from attnscope.budgets import expect
from attnscope.device import Device
from attnscope.guards import poisoned_memory
from attnscope.implementation import find
from attnscope.implementations.hopper.decode import DecodeKernel, fits, taken_features
from attnscope.inputs import INPUT_KINDS, Inputs, make_inputs
from attnscope.judging import judge
from attnscope.random_workloads import Space, draw_workload
from attnscope.records import TensorCheck
from attnscope.suites import SUITES
from attnscope.timers import make_timer
from attnscope.workload import Workload

pytestmark = pytest.mark.gpu
WORKLOADS, CHUNK = 48, 12


@pytest.fixture(scope="module", autouse=True)
def hopper_card(gpu: Device) -> None:
    if gpu.capability != (9, 0):
        pytest.skip("needs compute capability 9.0")


def failures(kernel: DecodeKernel, inputs: Inputs) -> list[TensorCheck]:
    """What the project's judge says against out and lse of one forward."""
    with poisoned_memory(inputs):
        output = kernel.forward(inputs)
    expected = expect(inputs, "fp32")
    return [c for c in judge({"out": output.out, "lse": output.lse}, expected, inputs.kind) if not c.passed]


# Few rows against up to some thousand keys, every option that the kernel takes.
SPACE = Space(
    lengths=(1, 63, 64, 65, 127, 500, 1000, 2049, 4000),
    longest=4000,
    rows=(1, 1, 1, 2, 5, 16, 33),
    dims=(64, 128, 128, 256, 8, 72, 80),
    dtypes=("bf16", "bf16", "fp16"),
    layouts=("bhld", "blhd"),
    features=taken_features(),
    heads=(1, 2, 2, 4, 8),
    groups=(4, 4, 16, 64),
    batches=(1, 2, 3),
    max_pairs=2**21,
    max_elements=2**23,
)


def random_workload(seed: int, gpu: Device) -> Workload:
    """The first that is drawn of which a tile holds all rows of a group; an empty batch is not for these kernels."""
    chance = random.Random(seed)
    return next(w for w in (draw_workload(chance, SPACE) for _ in range(1000)) if w.B and fits(w, gpu))


@pytest.mark.parametrize("first", range(0, WORKLOADS, CHUNK))
def test_random_workloads(first: int, gpu: Device) -> None:
    found = []
    for seed in range(first, first + CHUNK):
        workload, splits = random_workload(seed, gpu), (None, 1, 2, 7)[seed % 4]
        kernel = DecodeKernel(workload, gpu, splits=splits)
        kernel.compile()
        inputs = make_inputs(workload, gpu, seed, INPUT_KINDS[seed % len(INPUT_KINDS)])
        found += [f"{workload} (seed {seed}, {splits} splits): {c.message}" for c in failures(kernel, inputs)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["B8,H32/8,L1,S8192,D128,bf16", "B1,H32/8,L1,S32768,D128,bf16",
                                  "B2,H8,L16,D64,bf16,causal,layout=qkv"])  # fmt: skip
def test_a_call_compiles_nothing_and_repeats_bit_for_bit(
    text: str, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.jit import JITFunction

    workload = Workload.parse(text)
    kernel, inputs = DecodeKernel(workload, gpu), make_inputs(workload, gpu)
    kernel.compile()
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *_, **__: pytest.fail("compiled in a call"))
    first = kernel.forward(inputs)
    for _ in range(100):
        again = kernel.forward(inputs)
        assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)


def test_a_graph_replays_it_a_hundred_times(gpu: Device) -> None:
    workload = Workload.parse("B2,H32/8,L1,S5000,D128,bf16")
    kernel, inputs = DecodeKernel(workload, gpu), make_inputs(workload, gpu)
    assert kernel.splits > 1
    expected = kernel.forward(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [kernel.forward(inputs) for _ in range(3)]
    for _ in range(100):
        for output in outputs:
            output.out.fill_(float("nan"))
            output.lse.fill_(float("nan"))
        graph.replay()
        for output in outputs:
            assert torch.equal(output.out, expected.out) and torch.equal(output.lse, expected.lse)


def test_two_streams_and_two_graphs_at_once(gpu: Device) -> None:
    workload = Workload.parse("B2,H32/8,L1,S5000,D128,bf16")
    kernel = DecodeKernel(workload, gpu)
    inputs = [make_inputs(workload, gpu, seed) for seed in (0, 1)]
    expected = [kernel.forward(one) for one in inputs]
    graphs, captured = [], []
    torch.cuda.synchronize()
    for one in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.append(kernel.forward(one))
        graphs.append(graph)
    streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
    torch.cuda.synchronize()
    for _ in range(50):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                graphs[n].replay()
                found.append((n, captured[n].out.clone(), captured[n].lse.clone()))
                output = kernel.forward(inputs[1 - n])
                found.append((1 - n, output.out, output.lse))
    torch.cuda.synchronize()
    for n, out, lse in found:
        assert torch.equal(out, expected[n].out) and torch.equal(lse, expected[n].lse)


def test_as_many_batch_entries_as_a_grid_takes(gpu: Device) -> None:
    workload = Workload.parse("B65535,H2,L1,S3,D16,fp16")
    kernel, inputs = DecodeKernel(workload, gpu), make_inputs(workload, gpu)
    output = kernel.forward(inputs)
    few = workload.replace(B=3)
    last = make_inputs(few, gpu)
    for name in ("q", "k", "v"):
        getattr(last, name).copy_(getattr(inputs, name)[-3:])
    assert torch.equal(output.out[-3:], DecodeKernel(few, gpu, splits=kernel.splits).forward(last).out)


def test_offsets_beyond_32_bits(gpu: Device) -> None:
    """The last key/value head begins more than 2**31 elements in: 4.6 GB of bf16 each for k and v."""
    workload = Workload.parse("B2,H32/8,L1,S1100000,D128,bf16")
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB free")
    assert workload.B * workload.H_kv * workload.S * workload.D > 2**31
    inputs, alone = make_inputs(workload, gpu), workload.replace(B=1, H=4, H_kv=1)
    last = make_inputs(alone, gpu)
    for name, heads in (("q", 4), ("k", 1), ("v", 1)):
        getattr(last, name).copy_(getattr(inputs, name)[-1:, -heads:])
    found = DecodeKernel(workload, gpu, splits=16).forward(inputs)
    expected = DecodeKernel(alone, gpu, splits=16).forward(last)
    assert torch.equal(found.out[-1:, -4:], expected.out) and torch.equal(found.lse[-1:, -4:], expected.lse)


@pytest.mark.parametrize("workload", SUITES["decode"], ids=str)
def test_time_beside_cudnn(workload: Workload, gpu: Device) -> None:
    """Right; times are printed, since a verdict needs ``attnscope compare``."""
    kernel, rival, inputs = DecodeKernel(workload, gpu), find("sdpa_cudnn"), make_inputs(workload, gpu)
    timer, prepared = make_timer(gpu), rival.prepare(workload, gpu)
    expected, found = prepared.forward(inputs).out, kernel.forward(inputs).out
    assert (found - expected).abs().max() < 0.02
    times = {}
    for name, call in (("hopper", lambda: kernel.forward(inputs)), ("sdpa_cudnn", lambda: prepared.forward(inputs))):
        call()
        timer.synchronize()
        times[name] = sorted(timer.time_call(call, 200.0).ms * 1e3 for _ in range(21))[10], timer.host_us(call, 200)
    shown = ", ".join(f"{name} {us:.1f} us, host {host:.1f} us" for name, (us, host) in times.items())
    print(f"\n{workload}: {kernel.splits} splits, {shown}")
