"""Every kind of finding: a trace in which it is true, and traces that only look like it and must stay silent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trace_builder as tb
from attnscope.explaining import explain_profile, explain_trace
from attnscope.explaining.bounds import bounded, without_profiler
from attnscope.explaining.trace_rules import FINDING_IDS, HOST_FINDINGS
from attnscope.records import Finding
from attnscope.workload import Workload
from trace_builder import TraceBuilder
from trace_calls import (
    ALIGN1,
    ALIGN8,
    SGEMV,
    Build,
    bmm,
    copy,
    efficient,
    explained,
    finding,
    flash,
    ids,
    linear,
    sdpa,
    softmax,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[1]
CUDNN_OP = "aten::_scaled_dot_product_cudnn_attention"
FLASH_OP = "aten::_scaled_dot_product_flash_attention"


# --- what the cases are made of ---------------------------------------------------------------------------------------


def times(count: int, *builds: Build) -> Build:
    def build(b: TraceBuilder) -> None:
        for _ in range(count):
            for one in builds:
                one(b)

    return build


def kernel(name: str, us: float, **more: Any) -> Build:
    return lambda b: b.kernel(name, us, **more)


def product(name: str, us: float = 80, dtype: str = "bf16") -> Build:
    def build(b: TraceBuilder) -> None:
        with b.op("aten::bmm", (dtype, [96, 3137, 64]), (dtype, [96, 64, 3137])):
            b.kernel(name, us)

    return build


def triangle(name: str, diagonal: int | None = None, us: float = 5) -> Build:
    """``tril`` or ``triu`` on a mask of the calls' size, with the value of its diagonal where one is given."""

    def build(b: TraceBuilder) -> None:
        args = {"Input Dims": [[1024, 1024], []], "Input type": ["bool", "Scalar"]}
        if diagonal is not None:
            args |= {"Concrete Inputs": ["", str(diagonal)]}
        with b._scope(f"aten::{name}", "cpu_op", args):
            b.kernel(tb.TRIL, us)

    return build


def elementwise(name: str, *tensors: tuple[str, list[int]], inside: str | None = None, us: float = 4) -> Build:
    def build(b: TraceBuilder) -> None:
        with b.op(inside or "aten::outer"), b.op(f"aten::{name}", *tensors):
            b.kernel(tb.WHERE if name == "where" else tb.FILL, us)

    return build


ONES = elementwise("fill_", ("bool", [1024, 1024]), inside="aten::ones")
PLACES = elementwise("le", ("int64", [1, 1024]), ("int64", [1024, 1]))
JOIN = elementwise("bitwise_and", ("bool", [1024, 1024]), ("bool", [1024, 1024]), inside="aten::__and__")
JOIN_BATCH = elementwise("masked_fill_", ("bool", [8, 1, 1024, 1024]), ("bool", [8, 1, 1, 1024]))
LENGTHS = elementwise("lt", ("int64", [1, 1024]), ("int64", [8, 1]))


def masked(mask: Sequence[int] = (1024, 1024), us: float = 300, inner: str | None = None) -> Build:
    """A call with a mask tensor, by the efficient kernel or ``inner``."""
    if inner == CUDNN_OP:
        return lambda b: sdpa(b, CUDNN_OP, tb.CUDNN, us, mask=list(mask))
    return lambda b: efficient(b, list(mask), us=us)


def converted(b: TraceBuilder) -> None:
    """A bool mask that SDPA turns into an additive one before the kernel."""
    with b.op("aten::scaled_dot_product_attention", tb.Q, tb.Q, tb.Q):
        with b.op("aten::where", tb.HIDDEN, ("bf16", []), ("bf16", [])):
            b.kernel(tb.WHERE, 7)
        with b.op("aten::_scaled_dot_product_efficient_attention", tb.Q, tb.Q, tb.Q):
            b.kernel(tb.EFFICIENT, 100)


def converted_by_numbers(b: TraceBuilder) -> None:
    """The same as torch 2.11 records it: ``where`` with numbers calls ``where`` with tensors."""
    with b.op("aten::scaled_dot_product_attention", tb.Q, tb.Q, tb.Q):
        with b.op("aten::where", tb.HIDDEN), b.op("aten::where", tb.HIDDEN, ("bf16", []), ("bf16", [])):
            b.kernel(tb.WHERE, 7)
        with b.op("aten::_scaled_dot_product_efficient_attention", tb.Q, tb.Q, tb.Q):
            b.kernel(tb.EFFICIENT, 100)


def where_before(b: TraceBuilder) -> None:
    """A ``where`` of the user's own, not inside SDPA."""
    with b.op("aten::where", tb.HIDDEN), b.op("aten::where", tb.HIDDEN, ("bf16", []), ("bf16", [])):
        b.kernel(tb.WHERE, 7)
    tb.sdpa_flash(b)


def repeated(strides: list[int]) -> Build:
    def build(b: TraceBuilder) -> None:
        five = [8, 4, 4, 1024, 64]
        with b.op("aten::reshape", ("bf16", five)):
            copied = b.op("aten::copy_", ("bf16", five), ("bf16", five), strides=[tb._contiguous(five), strides])
            with copied:
                b.kernel(tb.COPY, 30)

    return build


def flash_backward(*, deterministic: bool, splits: int = 4, heads: int = 128, fill: bool = False) -> Build:
    """FlashAttention-2's backward as torch launches it; deterministic with an accumulator for each split."""
    grad = ("bf16", [8, 16, 1024, 64])

    def build(b: TraceBuilder) -> None:
        with b.op("aten::_scaled_dot_product_flash_attention_backward", grad, grad, grad, grad):
            if fill:
                with b.op("aten::empty_like", grad), b.op("aten::fill_", grad):
                    b.kernel(tb.FILL, 9)
            if deterministic:
                with b.op("aten::zeros"), b.op("aten::zero_", ("fp32", [splits, 8, 1024, 16, 64])):
                    b.kernel(tb.FILL, 40)
            first, main, last = tb.FLASH_BACKWARD
            b.kernel(first.replace("<true", "<false") if deterministic else first, 20)
            b.kernel(main, 400, grid=(splits if deterministic else 8, 8, heads // 8))
            b.kernel(last, 20)

    return build


def backward(b: TraceBuilder) -> None:
    with b.op("autograd::engine::evaluate_function: MmBackward0"):
        linear(b)


def training_mode(b: TraceBuilder) -> None:
    efficient(b, dropout="0.1")


def softmax_guard(around: str) -> Build:
    def build(b: TraceBuilder) -> None:
        bmm(b, [128, 1024, 64], [128, 64, 1024])
        softmax(b, [8, 16, 1024, 1024])
        with b.op(around, tb.SCORES), b.op("aten::isneginf", tb.SCORES):
            b.kernel(tb.ISNEGINF, 50)
        bmm(b, [128, 1024, 1024], [128, 1024, 64])

    return build


def annotated(name: str, us: float = 300_000) -> Build:
    def build(b: TraceBuilder) -> None:
        with b.annotation(name):
            b.wait(us)

    return build


def planned(us: float) -> Build:
    """A cuDNN call whose op takes so long on the host: long where its plan is built."""

    def build(b: TraceBuilder) -> None:
        with b.op("aten::scaled_dot_product_attention", tb.Q, tb.Q, tb.Q), b.op(CUDNN_OP, tb.Q, tb.Q, tb.Q):
            b.wait(us)
            b.kernel(tb.CUDNN, 60)

    return build


def lost(b: TraceBuilder) -> None:
    for n in range(9):
        b._add("cudaLaunchKernel", "cuda_runtime", b.now_ns, 1000, b.thread, {"correlation": 5000 + n})


def capture(b: TraceBuilder) -> None:
    b._add("cudaStreamBeginCapture", "cuda_runtime", b.now_ns, 1000, b.thread, {"correlation": 4000})
    lost(b)


def replay(b: TraceBuilder) -> None:
    b.kernel(tb.FLASH, 50, launch="cudaGraphLaunch")
    for _ in range(3):
        b.kernel(tb.NVJET, 20, launch=None)
        b.events[-1]["args"]["correlation"] = b.correlation - 1
    b.correlation += 1


def with_grid(blocks: int) -> Build:
    return lambda b: sdpa(b, FLASH_OP, tb.FLASH, grid=(blocks, 1, 1))


def of(us: float) -> Build:
    return lambda b: sdpa(b, FLASH_OP, tb.FLASH, us)


def small_and_slow(b: TraceBuilder) -> None:
    for _ in range(40):
        linear(b, us=2)
        b.wait(50)


def large_and_busy(b: TraceBuilder) -> None:
    for _ in range(40):
        linear(b, us=200)


# id -> (builds in which it is true, look-alikes that must stay silent)
CASES: dict[str, tuple[tuple[Build, ...], tuple[tuple[Build, ...], ...]]] = {
    "better-implementation": ((lambda b: efficient(b, us=200),), (
        (lambda b: efficient(b, us=75),), (masked(),), (lambda b: sdpa(b, CUDNN_OP, tb.CUDNN, 300),),
        (flash_backward(deterministic=True),),
    )),
    "built-in-window": ((planned(300_000), flash), (
        (planned(300), flash), (annotated("TorchDynamo Cache Lookup"), flash),
        (annotated("Torch-Compiled Region: 0/0"), flash),
    )),
    "deterministic-backward": ((flash_backward(deterministic=True),), (
        (flash_backward(deterministic=False),), (elementwise("fill_", tb.Q, inside="aten::zeros"), flash),
        (lambda b: b.kernel("void flash_fwd_kernel<false>(int)", 30),),
    )),
    "dropout-at-inference": ((training_mode,), ((training_mode, backward), (efficient,))),
    "dtype-casts": ((lambda b: tb.cast(b, "bf16", "fp32", [8, 16, 1024, 64], 30), flash), (
        (lambda b: tb.cast(b, "bf16", "bf16", [8, 16, 1024, 64], 30), flash),
        (lambda b: tb.cast(b, "bf16", "fp32", [64], 3), flash),
        (lambda b: tb.cast(b, "bf16", "fp32", [8, 16, 1024, 64], 30), linear, flash),
    )),
    "gqa-materialised": ((repeated([262144, 65536, 0, 64, 1]), flash), (
        (repeated(tb._contiguous([8, 4, 4, 1024, 64])), flash), (repeated([262144, 65536, 0, 64, 1]), linear),
    )),
    "graph-capture": ((capture, flash), ((lost, flash), (replay,))),
    "graph-replay": ((replay,), ((flash, flash),)),
    "launch-bound": ((small_and_slow,), (
        (large_and_busy,), (large_and_busy, lambda b: b.wait(50_000), large_and_busy),
    )),
    "launched-before-window": ((kernel("spilled", 30, launch=None), flash), ((flash, flash),)),
    "layout-copies": ((lambda b: copy(b, [8, 16, 1024, 64]), flash), (
        (lambda b: copy(b, [77, 13]), flash), (lambda b: copy(b, [8, 16, 1024, 64]), linear, flash),
        (repeated([262144, 65536, 0, 64, 1]), flash),
    )),
    "lost-kernels": ((lost, flash), ((capture, flash), (flash,))),
    "mask-keeps-flash-away": ((triangle("tril"), masked()), (
        (efficient,), (flash,), (lambda b: sdpa(b, CUDNN_OP, tb.CUDNN, 60, mask=[1024, 1024]),),
    )),
    "mask-rebuilt-per-call": ((times(2, triangle("triu"), tb.naive),), (
        (triangle("triu"), tb.naive, tb.naive), (elementwise("where", tb.SCORES), tb.naive),
        (times(2, elementwise("fill_", ("bf16", [77, 13])), tb.naive),),
    )),
    "masked-fill-copy": ((tb.naive,), ((lambda b: tb.naive(b, in_place=True),),)),
    "math-path": ((tb.sdpa_math,), ((tb.naive,), (flash,))),
    "matmul-off-tensor-cores": ((product("ampere_fp16_sgemm_fp16_32x128_tn", dtype="fp16"),), (
        (product("some_kernel_of_nobody"),), (product(tb.NVJET),), (product(tb.FFMA, dtype="fp32"),),
        (product(tb.SGEMM, dtype="fp64"),), (product(SGEMV, dtype="fp16"),),
    )),
    "misaligned-gemm": ((product(ALIGN1, 1900),), ((product(ALIGN8, 1900),), (product(ALIGN1, 1900, "fp32"),))),
    "occupancy-estimator": ((tb.sdpa_cudnn,), ((tb.sdpa_flash,), (with_grid(1),))),
    "occupancy-low": ((tb.sdpa_flash,), (
        (kernel("void some_elementwise_kernel(int)", 60, registers=255, occupancy=13),),
        (lambda b: tb.fused(b, tb.FLASH, 90, shared=8192, registers=64, block=128, occupancy=75),), (tb.sdpa_cudnn,),
        (kernel(tb.FLASH_BACKWARD[0], 60, registers=48, occupancy=3),),  # a helper holds no tiles
    )),
    "pageable-copies": (
        (kernel("Memcpy HtoD (Pageable -> Device)", 900, cat="gpu_memcpy", launch="cudaMemcpyAsync"),), (
            (kernel("Memcpy HtoD (Pinned -> Device)", 900, cat="gpu_memcpy", launch="cudaMemcpyAsync"),),
            (kernel("Memcpy HtoD (Pageable -> Device)", 3, cat="gpu_memcpy", launch="cudaMemcpyAsync"),),
    )),
    "safe-softmax": ((softmax_guard("aten::_safe_softmax"),), (
        (softmax_guard("aten::where"),), (elementwise("all", tb.HIDDEN, inside="aten::_safe_softmax"), flash),
        (lambda b: b.kernel(tb.SOFTMAX, 30), flash),
    )),
    "tf32-off": ((product(tb.FFMA, 900, "fp32"),), (
        (product(tb.TF32, 900, "fp32"),), (product(SGEMV, 900, "fp32"),), (product(tb.FFMA, 900, "fp64"),),
    )),
    "too-few-blocks": ((with_grid(16),), ((with_grid(132),), (with_grid(120),))),
    "uneven-calls": ((times(8, of(100)), of(400)), ((times(8, of(100)), of(110)), (of(100), of(400)))),
    "unfused-attention": ((tb.naive,), (
        (flash,), (lambda b: linear(b), lambda b: softmax(b, [8192, 8]), lambda b: linear(b)),
        (lambda b: bmm(b, [128, 256, 64], [128, 64, 256]), lambda b: softmax(b, [64, 1000]),
         lambda b: bmm(b, [128, 256, 256], [128, 256, 64])),
    )),
}  # fmt: skip


def test_every_kind_has_a_true_case_a_look_alike_and_a_section_of_the_reference() -> None:
    assert set(CASES) == set(FINDING_IDS)
    sections = re.findall(r"^## (\S+)$", (ROOT / "docs" / "reference" / "findings.md").read_text(), re.M)
    assert set(FINDING_IDS) <= set(sections) and sections == sorted(sections)


@pytest.mark.parametrize("kind", FINDING_IDS)
def test_found_where_it_is_true(kind: str) -> None:
    found = finding(explained(*CASES[kind][0]), kind)
    assert found.sentence.endswith(".") and (found.evidence or found.arithmetic)


@pytest.mark.parametrize(("kind", "builds"), [(k, one) for k in FINDING_IDS for one in CASES[k][1]])
def test_silent_where_something_only_looks_like_it(kind: str, builds: tuple[Build, ...]) -> None:
    assert kind not in ids(explained(*builds))


# --- what a mask is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("builds", "said", "remedy"),
    [
        ((triangle("tril", 0), masked()), "causal", "is_causal=True"),
        ((triangle("triu", 1), masked()), "causal", "is_causal=True"),
        ((PLACES, masked()), "comparison of positions", "is_causal=True"),
        ((triangle("tril", 0), triangle("triu", -127), masked()), "sliding window of 128 keys", "flex_attention"),
        ((triangle("triu", 1), triangle("tril", -128), masked()), "sliding window of 128 keys", "flex_attention"),
        ((triangle("tril", 0), triangle("tril", -128), masked()), "sliding window of 128 keys", "flex_attention"),
        ((PLACES, PLACES, masked()), "two boundaries", "flex_attention"),
        ((ONES, masked()), "all of it is True", "leave attn_mask out"),
        ((masked((8, 1, 1, 1024)),), "padding", "varlen"),
        ((LENGTHS, masked((8, 1, 1024, 1024))), "padding", "varlen"),
        ((triangle("tril", 0), triangle("triu", -127), JOIN, masked()), "sliding window of 128 keys", "flex_attention"),
        ((triangle("tril", 0), JOIN, masked()), "combined with something else", "pass is_causal=True"),
        ((triangle("tril", 0), JOIN_BATCH, masked((8, 1, 1024, 1024))), "combined with", "pass is_causal=True"),
        ((PLACES, LENGTHS, masked((8, 1, 1024, 1024))), "padding and more", "varlen"),
        ((triangle("tril", -7), masked()), "diagonal -7", "pass is_causal=True for a causal mask"),
        ((ONES, elementwise("bitwise_not", ("bool", [1024, 1024])), masked()), "does not show", "pass is_causal"),
        ((masked(),), "does not show", "pass is_causal"),
    ],
)  # fmt: skip
def test_what_a_mask_hides(builds: tuple[Build, ...], said: str, remedy: str) -> None:
    found = finding(explained(*builds), "mask-keeps-flash-away")
    assert any(said in line for line in found.evidence)
    assert remedy in found.remedy


def test_a_known_mask_has_a_price_and_an_unknown_one_has_none() -> None:
    causal = finding(explained(triangle("tril", 0), masked(us=300)), "mask-keeps-flash-away")
    whole = finding(explained(ONES, masked(us=300)), "mask-keeps-flash-away")
    narrow = finding(explained(triangle("tril", 0), triangle("triu", -127), masked(us=300)), "mask-keeps-flash-away")
    assert 300 > narrow.saving_us > causal.saving_us > whole.saving_us > 0  # the more is hidden, the more is saved
    assert finding(explained(masked()), "mask-keeps-flash-away").saving_us is None


def test_cudnn_with_a_mask_that_needs_no_tensor() -> None:
    found = finding(explained(triangle("tril", 0), masked(us=300, inner=CUDNN_OP)), "mask-keeps-flash-away")
    assert "no tile that it hides is skipped" in found.sentence and found.saving_us > 200


@pytest.mark.parametrize("build", [converted, converted_by_numbers])
def test_a_converted_mask_is_told_apart_from_a_built_one(build: Build) -> None:
    found = finding(explained(build), "mask-rebuilt-per-call")
    assert "additive" in found.sentence and found.saving_us == pytest.approx(7)
    assert "mask-rebuilt-per-call" not in ids(explained(where_before))
    built = finding(explained(times(2, ONES, triangle("tril"), converted)), "mask-rebuilt-per-call")
    assert "anew" in built.sentence and built.saving_us == pytest.approx(2 * (4 + 5 + 7))


# --- choices ----------------------------------------------------------------------------------------------------------


def test_what_determinism_costs() -> None:
    found = finding(explained(flash_backward(deterministic=True, splits=4)), "deterministic-backward")
    # three of four splits' fill and sum; 8 tiles × 128 heads on 132 multiprocessors against 4 waves of 2 tiles
    assert found.saving_us == pytest.approx(0.75 * (40 + 20) + 400 * (1 - 8 * 128 / 132 / 8))
    filled = finding(explained(flash_backward(deterministic=False, fill=True)), "deterministic-backward")
    assert filled.saving_us == pytest.approx(9) and "fill_uninitialized_memory" in filled.remedy
    assert "Uninitialised" in filled.sentence


def test_a_better_implementation_is_named_with_its_line() -> None:
    found = finding(explained(lambda b: efficient(b, us=300)), "better-implementation")
    assert "cuDNN kernel takes the same call" in found.sentence
    assert "SDPBackend.CUDNN_ATTENTION" in found.remedy and 200 < found.saving_us < 260
    ampere = explained(lambda b: efficient(b, us=900), device=tb.A100)
    assert "SDPBackend.FLASH_ATTENTION" in finding(ampere, "better-implementation").remedy
    assert "better-implementation" not in ids(explained(flash, device=tb.A100))  # flash is what that card has


# --- a saving is never more than there is -----------------------------------------------------------------------------

TIMES = st.floats(min_value=0.1, max_value=3000)
BUILDS: tuple[Build, ...] = (
    tb.naive, tb.sdpa_math, flash, efficient, converted, linear, ONES, triangle("tril", 0), masked(),
    flash_backward(deterministic=True), flash_backward(deterministic=False, fill=True), tb.sdpa_cudnn, small_and_slow,
    planned(300_000), product(ALIGN1, 1900), product(tb.FFMA, 900, "fp32"), repeated([262144, 65536, 0, 64, 1]),
)  # fmt: skip


def on_two_streams(b: TraceBuilder, seed: int) -> None:
    """Every other device event runs at the same time as the one before it, so that sums exceed the clock."""
    device = [event for event in b.events if event["pid"] == 0]
    for before, event in zip(device[seed % 2 :: 2], device[seed % 2 + 1 :: 2], strict=False):
        event["ts"], event["args"]["stream"] = before["ts"], 8


@given(chosen=st.lists(st.sampled_from(BUILDS), min_size=1, max_size=5), shrink=TIMES, streams=st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_no_saving_exceeds_the_window(chosen: list[Build], shrink: float, streams: int) -> None:
    b = TraceBuilder()
    for build in chosen:
        build(b)
    for event in b.events:
        if event["pid"] == 0:
            event["dur"] = event["dur"] * shrink / 1000  # from tiny kernels to huge ones
    if streams:
        on_two_streams(b, streams)
    explanation = explain_trace(b.trace())
    window = explanation.window
    for found in explanation.findings:
        limit = window.span_us if found.id in HOST_FINDINGS else window.busy_us
        assert found.saving_us is None or 0 < found.saving_us <= limit * (1 + 1e-9), found


@given(us=st.lists(TIMES, min_size=8, max_size=8), host_us=st.one_of(st.none(), TIMES), direction=st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_saving_on_a_cpu_exceeds_the_call_without_the_profiler(
    us: list[float], host_us: float | None, direction: bool
) -> None:
    """Ops of a tiny call: under the profiler they take longer than the whole call does without it."""
    b, waits = TraceBuilder(None), iter(us)

    def op(name: str, *tensors: tuple[str, list[int]]) -> None:
        with b.op(name, *tensors):
            b.wait(next(waits))

    with b.step("attnscope/naive/forward"):
        op("aten::bmm", ("bf16", [128, 1024, 64]), ("bf16", [128, 64, 1024]))
        with b.op("aten::masked_fill", tb.SCORES, tb.HIDDEN):
            op("aten::copy_", tb.SCORES, tb.SCORES)
            op("aten::masked_fill_", tb.SCORES, tb.HIDDEN)
        with b.op("aten::_to_copy", tb.SCORES):
            op("aten::copy_", tb.SCORES32, tb.SCORES)
        op("aten::triu", tb.HIDDEN)
        with b.op("aten::ones"):
            op("aten::fill_", tb.HIDDEN)
        with b.op("aten::_safe_softmax", tb.SCORES32):
            op("aten::isneginf", tb.SCORES32)
        op("aten::bmm", ("bf16", [128, 1024, 1024]), ("bf16", [128, 1024, 64]))
    profile, _, findings = explain_profile(
        b.trace(), workload=Workload.parse("B8,H16,L1024,D64,bf16,causal"), implementation="naive",
        direction="backward" if direction else "forward", host_us=host_us,
    )  # fmt: skip
    own_us = min(profile.cpu_us_per_call, host_us or profile.cpu_us_per_call)
    assert findings
    assert all(f.saving_us is None or f.saving_us <= own_us * (1 + 1e-9) for f in findings)


def test_a_bounded_saving_says_so() -> None:
    found = Finding(id="x", sentence="X.", saving_us=30.0, arithmetic="30 µs")
    assert bounded(found, 40.0, "the window lasts") is found
    assert (
        bounded(found, 20.0, "the window lasts").arithmetic == "30 µs; no more than the 20.0 µs that the window lasts"
    )
    measured = without_profiler(found, 60.0, 15.0)
    assert measured.saving_us == pytest.approx(7.5) and "× 0.25" in measured.arithmetic
    assert without_profiler(found, 60.0, 90.0) is found


# --- what a fused call is asked for ----------------------------------------------------------------------------------


def unfused_backward(dtype: str = "bf16", mask: Sequence[int] | None = None, L: int = 1024, D: int = 64) -> Build:
    scores = (dtype, [8, 16, L, L])

    def products(b: TraceBuilder) -> None:
        for first, second in (([128, L, L], [128, L, D]), ([128, L, D], [128, D, L])):
            with b.op("aten::bmm", (dtype, first), (dtype, second)):
                b.kernel(tb.S16816, 300)

    def build(b: TraceBuilder) -> None:
        products(b)
        with b.op("aten::_softmax_backward_data", scores, scores):
            b.kernel(tb.SOFTMAX.replace("forward", "backward"), 3000)
        if mask is not None:
            with b.op("aten::masked_fill", scores, ("bool", list(mask))):
                b.kernel(tb.MASK, 300)
        products(b)

    return build


def fused_part(*builds: Build) -> float:
    """What of the unfused calls' time is reckoned to stay."""
    explanation = explained(*builds)
    found = finding(explanation, "unfused-attention")
    return sum(site.time_us for site in explanation.sites if "unfused" in site.implementation) - found.saving_us


def test_one_square_mask_is_taken_as_causal_and_said_so() -> None:
    found = finding(explained(unfused_backward(mask=(1, 1, 1024, 1024))), "unfused-attention")
    assert "taken as causal" in found.arithmetic
    whole = fused_part(unfused_backward())
    assert fused_part(unfused_backward(mask=(1, 1, 1024, 1024))) < 0.7 * whole
    assert fused_part(unfused_backward(mask=(8, 1, 1024, 1024))) == pytest.approx(whole)  # differs by batch entry
    assert fused_part(unfused_backward(mask=(8, 1, 1, 1024))) == pytest.approx(whole)  # padding
    assert "causal" not in explained(unfused_backward(mask=(1024, 1024))).sites[0].problem  # a guess names nothing


def test_a_backward_in_fp32_is_of_its_forward_in_bf16() -> None:
    def forward_by_math(b: TraceBuilder) -> None:
        with b._scope("aten::_scaled_dot_product_attention_math", "cpu_op", {
            "Input Dims": [tb.Q[1]] * 3 + [[]] * 6, "Input type": ["c10::BFloat16"] * 3 + [""] * 6,
            "Concrete Inputs": ["", "", "", "", "0.", "True", "", "", ""],
        }):  # fmt: skip
            b.kernel(tb.FFMA, 2000)

    def cast_around(b: TraceBuilder) -> None:
        tb.cast(b, "fp32", "bf16", [8, 16, 1024, 64], 15)

    alone = fused_part(unfused_backward("fp32"))
    in_half = fused_part(unfused_backward("bf16"))
    assert alone > 5 * in_half
    assert fused_part(cast_around, unfused_backward("fp32")) == pytest.approx(in_half)
    assert fused_part(forward_by_math, unfused_backward("fp32")) < 0.7 * in_half  # and it was causal


def test_a_head_dim_as_large_as_the_rows_is_known() -> None:
    (site,) = explained(unfused_backward(L=128, D=128)).sites
    assert site.problem == "B8,H16,L128,D128,bf16"


def test_generated_code_between_products_tells_the_heads() -> None:
    scores = ("bf16", [8, 16, 1024, 1024])

    def build(first: tuple[str, list[int]]) -> Build:
        def calls(b: TraceBuilder) -> None:
            name = "triton_per_fused__softmax_backward_data_masked_fill_mul_0"
            for _ in range(2):
                bmm(b, [128, 1024, 1024], [128, 1024, 64])
            with b.op(name, first, scores, ("bool", [1, 1, 1024, 1024])):
                b.kernel(name, 190, launch="cuLaunchKernel")
            for _ in range(2):
                bmm(b, [128, 64, 1024], [128, 1024, 1024])

        return calls

    assert explained(build(scores)).sites[0].problem == "B8,H16,L1024,D64,bf16"
    assert explained(build(("fp32", [8, 16, 7, 3]))).sites[0].calls == 1  # another tensor first: still found
