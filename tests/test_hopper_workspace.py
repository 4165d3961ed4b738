"""The memory that calls of hopper's decoding share: whose it is, when it grows, what stands in it; on a CPU."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from attnscope import driver
from attnscope.device import Device
from attnscope.implementations.hopper import decode
from attnscope.implementations.hopper.workspace import Workspace, Workspaces
from attnscope.inputs import make_inputs
from attnscope.workload import Workload
from driver_stand_in import Driver, Launched, stand_in
from prepared_on_stand_in import prepare

CPU = Device("cpu", "CPU")


def test_calls_of_a_stream_share_one_and_others_have_their_own() -> None:
    made = Workspaces("cpu")
    first = made.take(7, None, 10, 100)
    assert made.take(7, None, 4, 128) is first
    assert (first.arrived.dtype, first.parts.dtype) == (torch.int32, torch.float32)
    assert first.arrived.numel() >= 10 and first.parts.numel() >= 100 and not first.arrived.any()
    assert are_apart([first, made.take(8, None, 10, 100), made.take(7, 1, 10, 100), made.take(8, 1, 10, 100)])


def are_apart(workspaces: list[Workspace]) -> bool:
    """Whether no two share a tensor."""
    return len({t.data_ptr() for w in workspaces for t in (w.arrived, w.parts)}) == 2 * len(workspaces)


def test_it_grows_and_what_launches_still_pass_is_kept() -> None:
    made = Workspaces("cpu")
    small = made.take(7, None, 10, 100)
    held = [weakref.ref(small.arrived), weakref.ref(small.parts)]
    larger = made.take(7, None, 10, 1000)
    assert larger.parts.numel() >= 1000 and larger.arrived is small.arrived and made.take(7, None, 1, 1) is larger
    largest = made.take(7, None, 500, 1)
    assert largest.arrived.numel() >= 500 and not largest.arrived.any() and largest.parts is larger.parts
    del small
    gc.collect()
    assert all(tensor() is not None for tensor in held)


def test_all_that_was_outgrown_is_no_more_than_what_is_in_use() -> None:
    made = Workspaces("cpu")
    for elements in range(1, 5000, 7):
        last = made.take(7, None, 1, elements)
    outgrown = {w.parts.data_ptr(): w.parts.numel() for w in made._outgrown}
    assert sum(outgrown.values()) <= last.parts.numel()


def test_a_capture_has_its_own_until_it_is_over() -> None:
    made = Workspaces("cpu")
    eager, first = made.take(7, None, 10, 100), made.take(7, 1, 10, 100)
    assert made.take(7, 1, 10, 100) is first and are_apart([eager, first])
    gone = weakref.ref(first.parts)
    second = made.take(7, 2, 10, 100)
    assert are_apart([eager, first, second])
    del first
    gc.collect()
    assert gone() is None and made.take(7, None, 10, 100) is eager
    again = made.take(7, 2, 10, 100)  # a number that came again after an eager call would be another capture
    assert again is not second


def test_a_capture_s_may_grow() -> None:
    made = Workspaces("cpu")
    small = made.take(7, 1, 10, 100)
    larger = made.take(7, 1, 20, 1000)
    assert larger.arrived.numel() >= 20 and not larger.arrived.any() and made.take(7, 1, 10, 100) is larger
    assert are_apart([small, larger]) and not made._outgrown


def test_threads_get_the_same_one() -> None:
    made, found = Workspaces("cpu"), []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for turn in range(200):
            found.append((number % 2, made.take(number % 2, None, 8, 8)))
            made.take(number % 2, turn, 8, 8)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1600 and len({(stream, id(workspace)) for stream, workspace in found}) == 2


def test_the_stream_of_each_thread_has_its_own_though_all_have_one_number() -> None:
    made = Workspaces("cpu")
    found = [made.take(driver.PER_THREAD_STREAM, None, 8, 8)]
    other = threading.Thread(target=lambda: found.append(made.take(driver.PER_THREAD_STREAM, None, 8, 8)))
    other.start()
    other.join()
    assert are_apart(found) and made.take(driver.PER_THREAD_STREAM, None, 8, 8) is found[0]


# --- what calls pass ----------------------------------------------------------------------------------------------


WORKLOAD, LARGER = Workload.parse("B1,H4/2,L8,S64,D64,bf16"), Workload.parse("B9,H4/2,L8,S64,D64,bf16")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(decode, "of_device", Workspaces)
    return stand_in(monkeypatch)


def workspace_of(launch: Launched) -> tuple[int, int]:
    """Addresses of the parts and the counters that a launch passes: q, k, v, out and lse come before."""
    return launch.values[5].value, launch.values[6].value


def passed(kernel: decode.DecodeKernel, cuda: Driver, workload: Workload) -> list[tuple[int, int]]:
    """What two equal calls pass; the second has the first one's addresses."""
    cuda.same, inputs = {}, make_inputs(workload, CPU)
    cuda.launched.clear()
    kernel.forward(inputs)
    kernel.forward(inputs)
    return [workspace_of(launch) for launch in cuda.launched]


def test_a_call_takes_one_launch(cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = prepare("decode", cuda, monkeypatch, WORKLOAD)
    assert kernel.joined and kernel.splits > 1
    first, second = passed(kernel, cuda, WORKLOAD)
    assert first == second and 0 not in first


def test_a_captured_call_passes_its_graph_s_workspace_and_is_not_kept(
    cuda: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = prepare("decode", cuda, monkeypatch, WORKLOAD)
    inputs = make_inputs(WORKLOAD, CPU)
    cuda.same = {}  # as where a graph's memory lies where eager calls' lay before
    seen = []
    for capture in (None, 1, 1, None, 2, None):
        cuda.capture = capture
        cuda.launched.clear()
        kernel.forward(inputs)
        seen.append(workspace_of(cuda.launched[0]))
    eager, first, again, eager_again, second, eager_at_last = seen
    assert eager == eager_again == eager_at_last and first == again
    assert not {*eager} & {*first} and not {*eager} & {*second}
    assert len(kernel.launches) == 1


def test_kernels_of_all_workloads_share_a_stream_s(cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Workspaces("cpu")
    monkeypatch.setattr(decode, "of_device", lambda place: shared)
    small, large = (prepare("decode", cuda, monkeypatch, workload) for workload in (WORKLOAD, LARGER))
    before = passed(small, cuda, WORKLOAD)
    grown = passed(large, cuda, LARGER)
    assert passed(small, cuda, WORKLOAD) != before  # inputs lie elsewhere: packed anew
    assert passed(small, cuda, WORKLOAD)[0] == grown[0]
    assert shared._outgrown[0].parts.data_ptr() == before[0][0]
    cuda.stream = 70
    assert not {*passed(small, cuda, WORKLOAD)[0]} & {*grown[0]}


def test_many_rows_are_added_up_by_a_second_kernel(cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload.parse("B1,H64/1,L1,S32768,D128,bf16")
    prepare("decode", cuda, monkeypatch, WORKLOAD)  # the stand-in's kernels
    kernel = decode.DecodeKernel(workload, Device("cuda", "H200", capability=(9, 0), multiprocessors=132))
    assert kernel.splits > 16 and not kernel.joined
