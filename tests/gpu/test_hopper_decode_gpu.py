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
from attnscope.implementation import Output, find
from attnscope.implementations.hopper import decode
from attnscope.implementations.hopper.decode import DecodeKernel, fits, taken_features
from attnscope.implementations.hopper.workspace import Workspaces
from attnscope.inputs import INPUT_KINDS, Inputs, make_inputs
from attnscope.judging import judge
from attnscope.random_workloads import Space, draw_workload
from attnscope.records import TensorCheck
from attnscope.suites import SUITES
from attnscope.timers import make_timer
from attnscope.workload import Workload
from card_contract import run_in_threads

pytestmark = pytest.mark.gpu
WORKLOADS, CHUNK = 48, 12


@pytest.fixture(scope="module", autouse=True)
def hopper_card(gpu: Device) -> None:
    if gpu.capability != (9, 0):
        pytest.skip("needs compute capability 9.0")


def failures(kernel: DecodeKernel, inputs: Inputs) -> list[TensorCheck]:
    """What the project's judge says against out and lse of one forward, whose parts are NaN until they are written."""
    for workspace in kernel.workspaces._eager.values():
        workspace.parts.fill_(float("nan"))
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
        kernel = DecodeKernel(workload, gpu, splits=splits, joined=None if seed % 3 else seed % 2 == 0)
        kernel.compile()
        inputs = make_inputs(workload, gpu, seed, INPUT_KINDS[seed % len(INPUT_KINDS)])
        found += [f"{workload} (seed {seed}, {splits} splits): {c.message}" for c in failures(kernel, inputs)]
        found += [f"{workload} (seed {seed}): a counter is not 0"] * counters(kernel)
    assert not found, "\n".join(found)


def counters(kernel: DecodeKernel) -> bool:
    """Whether a counter is not 0 once all calls are done."""
    torch.cuda.synchronize()
    return any(workspace.arrived.any().item() for workspace in kernel.workspaces._eager.values())


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


SHAPES = (
    "B2,H32/8,L1,S5000,D128,bf16",
    "B1,H8/2,L1,S9000,D64,fp16,sinks",
    "B3,H16/2,L2,S2000,D256,bf16,causal=bottom_right",
)


def split_kernels(gpu: Device) -> list[tuple[DecodeKernel, Inputs]]:
    """Kernels whose last program adds up, of several shapes, each with inputs."""
    made = []
    for number, text in enumerate(SHAPES):
        workload = Workload.parse(text)
        kernel = DecodeKernel(workload, gpu, splits=(8, 16, 3)[number], joined=True)
        kernel.compile()
        made.append((kernel, make_inputs(workload, gpu, number)))
    return made


def differences(output: Output, expected: Output) -> torch.Tensor:
    """How many elements of out and lse are not the same; stays on the card."""
    return (output.out != expected.out).sum() + (output.lse != expected.lse).sum()


def test_thousands_of_calls_in_a_row_give_the_same_bits(gpu: Device) -> None:
    """Nothing waits in between; now and then another stream takes multiprocessors, so programs end in other orders."""
    kernels, other = split_kernels(gpu), torch.cuda.Stream()
    expected = [kernel.forward(inputs) for kernel, inputs in kernels]
    wrong, load = torch.zeros((), dtype=torch.int64, device="cuda"), torch.randn(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    for turn in range(2000):
        if turn % 50 < 10:
            with torch.cuda.stream(other):
                load @ load
        for (kernel, inputs), first in zip(kernels, expected, strict=True):
            wrong += differences(kernel.forward(inputs), first)
    assert wrong.item() == 0 and not any(counters(kernel) for kernel, _ in kernels)


def test_one_kernel_and_two_agree(gpu: Device) -> None:
    for text in (*SHAPES, "B1,H64/1,L1,S9000,D128,bf16"):
        workload = Workload.parse(text)
        inputs = make_inputs(workload, gpu)
        for joined in (True, False):
            assert not failures(DecodeKernel(workload, gpu, splits=7, joined=joined), inputs), (text, joined)


def test_two_threads_on_two_streams_with_shapes_of_their_own(gpu: Device) -> None:
    kernels = split_kernels(gpu)
    expected = [kernel.forward(inputs) for kernel, inputs in kernels]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def work(number: int) -> None:
        with torch.cuda.stream(streams[number % 2]):
            wrong = torch.zeros((), dtype=torch.int64, device="cuda")
            for turn in range(300):
                kernel, inputs = kernels[(number + turn) % len(kernels)]
                wrong += differences(kernel.forward(inputs), expected[(number + turn) % len(kernels)])
            assert wrong.item() == 0

    run_in_threads(4, work)  # two threads a stream
    assert not any(counters(kernel) for kernel, _ in kernels)


def test_graphs_are_replayed_beside_eager_calls_on_the_stream_that_captured_them(gpu: Device) -> None:
    kernels, side, elsewhere = split_kernels(gpu), torch.cuda.Stream(), torch.cuda.Stream()
    expected = [kernel.forward(inputs) for kernel, inputs in kernels]
    torch.cuda.synchronize()
    graphs, captured = [], []
    with torch.cuda.stream(side):
        kernels[0][0].forward(kernels[0][1])
        torch.cuda.synchronize()
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                captured.append([kernel.forward(inputs) for kernel, inputs in kernels])
            graphs.append(graph)
    torch.cuda.synchronize()
    wrong = torch.zeros(3, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(200):
        for number, stream in enumerate((elsewhere, torch.cuda.default_stream())):
            with torch.cuda.stream(stream):
                graphs[number].replay()
                for output, first in zip(captured[number], expected, strict=True):
                    wrong[number] += differences(output, first)
                    output.out.fill_(float("nan"))
        with torch.cuda.stream(side):
            for (kernel, inputs), first in zip(kernels, expected, strict=True):
                wrong[2] += differences(kernel.forward(inputs), first)
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0, 0] and not any(counters(kernel) for kernel, _ in kernels)


def test_a_workspace_grows_while_calls_are_queued(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is seen again passes the smaller one, beside calls that pass the larger."""
    fresh = Workspaces(gpu.torch_name)
    monkeypatch.setattr(decode, "of_device", lambda place: fresh)
    workloads = [Workload.parse(text) for text in ("B1,H4/2,L1,S900,D64,bf16", "B9,H64/8,L1,S900,D128,bf16")]
    pairs = [(DecodeKernel(w, gpu, splits=4, joined=True), make_inputs(w, gpu)) for w in workloads]
    first = [kernel.forward(inputs) for kernel, inputs in pairs]
    assert len(fresh._outgrown) == 1
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(200):
        (kernel, inputs), expected = pairs[turn % 2], first[turn % 2]
        wrong += differences(kernel.forward(inputs), expected)
    assert wrong.item() == 0 and len(pairs[0][0].launches) < 100
    assert not any(failures(kernel, inputs) for kernel, inputs in pairs) and not counters(pairs[0][0])


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
