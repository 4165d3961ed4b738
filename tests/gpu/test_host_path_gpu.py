"""The host's part of a call of hopper, its decoding and hopper_cuda: its time, and that nothing waits or mixes calls.

``pytest -m gpu -s tests/gpu/test_host_path_gpu.py`` (``-s`` shows the times and where they go).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnscope import driver
from attnscope.device import Device, find_device
from attnscope.implementation import find
from attnscope.inputs import Inputs, make_inputs
from attnscope.timers import make_timer
from attnscope.workload import Workload
from card_contract import run_in_threads

pytestmark = pytest.mark.gpu

LIMIT_US = 15.0
ROUNDS, CALLS, PAUSE_S = 20, 200, 0.1  # the best round counts: what else the machine does is not the call's
CASES = [
    ("hopper", "B1,H2,L128,D128,bf16"),
    ("hopper", "B2,H4/2,L500,D64,fp16,causal,layout=blhd"),
    ("hopper", "B2,H4/2,L300,D64,bf16,lengths=300/7,sinks,alibi"),
    ("hopper", "B8,H32/8,L1,S500,D128,bf16"),
    ("hopper", "B1,H32/8,L1,S8000,D128,bf16"),
    ("hopper_cuda", "B1,H2,L128,D128,bf16"),
    ("hopper_cuda", "B2,H4/2,L500,D64,fp16,causal,layout=blhd"),
]
every_case = pytest.mark.parametrize(("name", "text"), CASES, ids=[f"{name}-{text}" for name, text in CASES])


@pytest.fixture(autouse=True)
def on_hopper(gpu: Device) -> None:
    if gpu.capability != (9, 0):
        pytest.skip("needs compute capability 9.0")


def prepared_and_inputs(name: str, text: str, gpu: Device, seed: int = 0) -> tuple[Any, Inputs]:
    workload = Workload.parse(text)
    return find(name).prepare(workload, gpu), make_inputs(workload, gpu, seed)


@pytest.mark.serial
@every_case
def test_a_call_takes_the_host_at_most_fifteen_microseconds(name: str, text: str, gpu: Device) -> None:
    prepared, inputs = prepared_and_inputs(name, text, gpu)
    output = prepared.forward(inputs)
    ((_, key),) = prepared.launches._kept  # of that call, whose outputs are still there
    parts: dict[str, Callable[[], object]] = {
        "the call": lambda: prepared.forward(inputs),
        "its launches": lambda: prepared.launches.replay(key),
        "its outputs": prepared.fresh,
        "its key": lambda: driver.launch_key(inputs.q, inputs.k, inputs.v, output.out, output.lse),
        "as many tensors by torch": lambda: (torch.empty_like(output.out), torch.empty_like(output.lse)),
        "nothing": lambda: None,
    }
    timer = make_timer(gpu)
    took = dict.fromkeys(parts, float("inf"))
    for _ in range(ROUNDS):
        for part, call in parts.items():
            took[part] = min(took[part], timer.host_us(call, CALLS))
        time.sleep(PAUSE_S)
    shown = ", ".join(f"{part} {us:.1f} us" for part, us in took.items())
    print(f"\n{name} on {text}: {shown}")
    assert took["the call"] <= LIMIT_US, f"best of {ROUNDS} medians of {CALLS} calls: {shown}"


@every_case
def test_a_call_allocates_its_outputs_alone_and_waits_for_nothing(name: str, text: str, gpu: Device) -> None:
    prepared, inputs = prepared_and_inputs(name, text, gpu)
    prepared.forward(inputs)  # the first may load the kernel
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # some 0.2 s
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    start = time.perf_counter()
    outputs = [prepared.forward(inputs) for _ in range(10)]
    queued_s = time.perf_counter() - start
    done = torch.cuda.Event()
    done.record()
    assert not done.query() and queued_s < 0.1, f"queueing ten calls took {queued_s * 1e3:.1f} ms"
    made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert made == len(outputs) * 2
    torch.cuda.synchronize()
    assert all(torch.equal(output.out, outputs[0].out) for output in outputs)


@every_case
def test_a_first_call_may_be_captured(name: str, text: str, gpu: Device) -> None:
    prepared, inputs = prepared_and_inputs(name, text, gpu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [prepared.forward(inputs) for _ in range(2)]
    expected = prepared.forward(inputs)
    for output in captured:
        output.out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for output in captured:
        assert torch.equal(output.out, expected.out) and torch.equal(output.lse, expected.lse)


@every_case
def test_other_strides_at_the_same_address(name: str, text: str, gpu: Device) -> None:
    """As where a tensor was freed and another one lies where it lay."""
    prepared, inputs = prepared_and_inputs(name, text, gpu)
    apart = prepared_and_inputs(name, text, gpu)[0]
    for tensor in ("q", "k", "v"):
        first = getattr(inputs, tensor)
        _, heads, length, dim = first.shape
        rows_first = (heads * length * dim, dim, heads * dim, 1)
        heads_first = (heads * length * dim, length * dim, dim, 1)
        for strides in (heads_first, rows_first, heads_first):
            view = first.as_strided(first.shape, strides)
            found = prepared.forward(replace(inputs, **{tensor: view}))
            expected = apart.forward(replace(inputs, **{tensor: view.clone(memory_format=torch.contiguous_format)}))
            assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse), (tensor, strides)


@every_case
def test_threads_and_streams_share_a_prepared_workload(name: str, text: str, gpu: Device) -> None:
    """Threads that have not used CUDA before, on streams of their own and on the default one."""
    prepared, _ = prepared_and_inputs(name, text, gpu)
    own = [make_inputs(Workload.parse(text), gpu, seed) for seed in range(4)]
    expected = [prepared.forward(inputs) for inputs in own]
    torch.cuda.synchronize()

    def work(index: int) -> None:
        stream = torch.cuda.default_stream() if index == 0 else torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(50):
                output = prepared.forward(own[index])
                assert torch.equal(output.out, expected[index].out) and torch.equal(output.lse, expected[index].lse)

    run_in_threads(len(own), work)


@pytest.mark.parametrize("name", ["hopper", "hopper_cuda"])
def test_a_thread_that_has_not_used_cuda(name: str, gpu: Device) -> None:
    """Its first call is a forward whose memory the allocator already has, so that nothing else makes a context."""
    prepared, inputs = prepared_and_inputs(name, "B1,H2,L128,D128,bf16", gpu)
    expected = prepared.forward(inputs)
    prepared.forward(inputs)
    torch.cuda.synchronize()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(prepared.forward(inputs)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert len(found) == 1 and torch.equal(found[0].out, expected.out)


@every_case
def test_another_device_than_the_current_one(name: str, text: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    prepared, inputs = prepared_and_inputs(name, text, find_device("cuda", 1))
    expected, own = prepared_and_inputs(name, text, find_device("cuda", 0))
    with torch.cuda.device(0):
        output = prepared.forward(inputs)
    assert output.out.device.index == 1
    torch.cuda.synchronize(1)
    assert torch.equal(output.out.cpu(), expected.forward(own).out.cpu())
