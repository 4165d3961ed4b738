"""``why`` on a GPU: against the kernels that the profiler sees, and its rules against PyTorch's own selection.

``pytest -m gpu tests/gpu/test_why_gpu.py``. Each test tells all its differences at once, so that one run says
everything. Calls that a kernel does not survive are only asked about, never run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import attnscope
from attnscope.device import Device, read_environment
from attnscope.selecting import why_workload
from attnscope.why_record import Why

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from random_calls import RandomCall, implementation_of, random_call  # noqa: E402

pytestmark = pytest.mark.gpu

CALLS = 100
MOST_TRIED = 140  # some calls are taken by a kernel that then raises: they are told, and others run in their place
ASKED_ONLY = range(1000, 1300)


def kernels_and_ops(run: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """What one call ran on the GPU, and which ops it went through; asked again where GPU records were lost."""
    from torch.profiler import ProfilerActivity, profile

    kernels: list[str] = []
    ops: list[str] = []
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            run()
            torch.cuda.synchronize()
        events = profiler.events()
        kernels = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        ops = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CPU]
        if kernels:
            break
    return kernels, ops


def ran(run: Callable[[], Any]) -> str:
    """The implementation by its kernels; by its ops, and so said, where no kernel has a name that is known."""
    kernels, ops = kernels_and_ops(run)
    found = implementation_of(kernels)
    return found if not found.startswith("unknown") else f"{implementation_of(ops)} by its ops; kernels {found}"


def test_why_names_what_really_runs_on_a_hundred_random_calls(gpu: Device) -> None:
    wrong, raised, taken, count = [], [], [], 0
    for seed in range(MOST_TRIED):
        call = random_call(seed, "cuda")
        with call.state():
            why = attnscope.why(*call.tensors, **call.options)
            try:
                real = ran(lambda call=call: scaled_dot_product_attention(*call.tensors, **call.options))
            except RuntimeError as error:  # the kernel that was taken does not do it after all
                raised.append(f"{call}: {why.taken} raised {str(error).splitlines()[0]}")
                if "CUDA error" in str(error):
                    break
                continue
        count += 1
        taken.append(why.taken)
        if real != why.taken:
            wrong.append(f"{call}: why says {why.taken}, {real} ran")
        if count == CALLS:
            break
    told = "\n".join([*wrong, *raised, f"{count} ran: { {name: taken.count(name) for name in set(taken)} }"])
    print(told)
    assert not wrong, told
    assert count == CALLS, told
    assert {"sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "sdpa_math"} == set(taken), told


def test_the_rules_say_what_pytorch_says_on_calls_that_are_only_asked_about(gpu: Device) -> None:
    different = []
    for seed in ASKED_ONLY:
        call = random_call(seed, "cuda", hazards=True)
        with call.state():
            why = attnscope.why(*call.tensors, **call.options)
        different += [f"{call}: {line}" for line in why.disagreements]
    for name, why in special_calls():
        different += [f"{name}: {line}" for line in why.disagreements]
    assert not different, "\n".join(different)


def special_calls() -> Iterator[tuple[str, Why]]:
    """What chance seldom brings: (name, the answer)."""

    def half(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    q = half(2, 4, 128, 64)
    with deterministic():
        yield "deterministic", attnscope.why(q, q, q)
    many = half(1, 1, 8, 64).expand(70_000, 1, 8, 64)
    yield "batch of 70,000", attnscope.why(many, many, many)
    yield "negative scale", attnscope.why(q, q, q, scale=-1.0)
    for shape in ((0, 4, 8, 64), (2, 4, 0, 64)):
        yield f"empty {shape}", attnscope.why(half(*shape), half(*shape), half(*shape))
    yield "no keys", attnscope.why(q, half(2, 4, 0, 64), half(2, 4, 0, 64))
    eight = half(2, 4, 128, 64).to(torch.float8_e4m3fn)
    yield "fp8", attnscope.why(eight, eight, eight)
    one = half(2, 4, 16, 1)
    yield "D = 1", attnscope.why(one, one, one)
    yield "192 and 128", attnscope.why(half(2, 4, 128, 192), half(2, 4, 128, 192), half(2, 4, 128, 128))
    for size in (136, 192, 248, 256, 264):
        wide = half(1, 2, 64, size).requires_grad_()
        yield f"D = {size}", attnscope.why(wide, wide, wide)
    yield "heads of k and v differ", attnscope.why(q, half(2, 2, 128, 64), half(2, 1, 128, 64), enable_gqa=True)
    yield "one key head, unsaid", attnscope.why(q, half(2, 1, 128, 64), half(2, 1, 128, 64))
    yield "one batch entry of k", attnscope.why(q, q[:1], q[:1])
    yield "dropout in sixteenths", attnscope.why(q, q, q, dropout_p=0.1)
    yield "one query, dropout", attnscope.why(q[:, :, :1], q, q, dropout_p=0.5)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_causal_bias_and_autocast_run_what_why_says(gpu: Device) -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    wrong = []
    for dtype in (torch.bfloat16, torch.float32):
        q, k = (torch.randn(1, 4, n, 64, device="cuda").to(dtype) for n in (64, 128))
        for make in (causal_upper_left, causal_lower_right):
            bias = make(64, 128)
            why = attnscope.why(q, k, k, bias)
            real = ran(lambda q=q, k=k, bias=bias: scaled_dot_product_attention(q, k, k, bias))
            if real != why.taken:
                wrong.append(f"{make.__name__} {dtype}: why says {why.taken}, {real} ran")
        with torch.autocast("cuda", dtype=torch.float16):
            why = attnscope.why(q, k, k)
            real = ran(lambda q=q, k=k: scaled_dot_product_attention(q, k, k))
        if real != why.taken or why.disagreements:
            wrong.append(f"autocast of {dtype}: why says {why.taken}, {real} ran; {why.disagreements}")
    assert not wrong, "\n".join(wrong)


def test_the_loaded_cudnn_is_named_with_its_file(gpu: Device) -> None:
    q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    why = attnscope.why(q, q, q)
    assert why.cudnn == read_environment().cudnn_loaded
    assert why.cudnn_path is not None and Path(why.cudnn_path).expanduser().is_file()
    assert Path(why.cudnn_path).name.startswith("libcudnn.so")


def test_rows_that_see_no_key_are_found_in_the_mask(gpu: Device) -> None:
    q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    mask = torch.ones(64, 64, dtype=torch.bool, device="cuda")
    assert "hidden-rows" not in {fault.rule for fault in attnscope.why(q, q, q, mask).of("sdpa_cudnn").faults}
    mask[3] = False
    assert "hidden-rows" in {fault.rule for fault in attnscope.why(q, q, q, mask).of("sdpa_cudnn").faults}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_workloads_are_answered_as_their_tensors_are(gpu: Device, direction: str) -> None:
    different = []
    for suite in ("blog", "gpt2-forward", "short", "ragged", "decode"):
        for why in why_workload(suite, "cuda", direction):
            different += [f"{why.call} {direction}: {line}" for line in why.disagreements]
    assert not different, "\n".join(different)


def test_a_random_call_is_the_same_again(gpu: Device) -> None:
    first, second = (str(random_call(7, "cuda")) for _ in range(2))
    assert first == second and isinstance(random_call(7, "cuda"), RandomCall)
