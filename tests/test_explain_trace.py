"""The explanation of whole traces: each finding with a case in which it is true and a look-alike that stays silent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import trace_builder as tb
from attnscope.explaining import (
    attention_rules,
    card_rules,
    choice_rules,
    compare_traces,
    explain_trace,
    mask_rules,
    window_rules,
)  # fmt: skip
from attnscope.explaining.trace_rules import FINDING_IDS
from attnscope.trace import parse_trace
from trace_builder import TraceBuilder
from trace_calls import (
    ALIGN1,
    ALIGN8,
    ATTN_FWD,
    CIJK,
    LOG_SOFTMAX,
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


def test_unfused_attention_is_one_site_with_its_problem_and_its_saving() -> None:
    explanation = explained(*[tb.naive] * 3)
    (site,) = explanation.sites
    assert (site.implementation, site.calls, site.kernels_per_call) == ("unfused", 3, 6)
    assert site.problem == "B8,H16,L1024,D64,bf16"
    assert site.time_us == pytest.approx(3 * (84 + 128 + 126 + 359 + 283 + 83 + 2 * 0.7))
    found = finding(explanation, "unfused-attention")
    assert found.saving_us is not None and 0.8 * site.time_us < found.saving_us < site.time_us
    assert "scaled_dot_product_attention" in found.remedy
    assert explanation.window.attention_us == pytest.approx(explanation.window.sum_us)


@pytest.mark.parametrize("spelling", ["bmm", "matmul", "einsum", "baddbmm"])
def test_every_spelling_of_unfused_attention(spelling: str) -> None:
    def build(b: TraceBuilder) -> None:
        q, k, scores = [128, 256, 64], [128, 64, 256], [128, 256, 256]
        outer = b.op(f"aten::{spelling}", ("bf16", [128, 256, 64]))
        if spelling == "baddbmm":
            with b.op("aten::baddbmm", ("bf16", scores), ("bf16", q), ("bf16", k)):
                b.kernel(tb.S16816, 80)
        elif spelling == "bmm":
            bmm(b, q, k)
        else:
            with outer:
                bmm(b, q, k)
        softmax(b, scores)
        bmm(b, scores, [128, 256, 64])

    (site,) = explained(build).sites
    assert site.problem == "B128,H1,L256,D64,bf16"
    assert site.name == f"{spelling}, softmax, bmm"


def test_what_only_looks_like_attention_is_none() -> None:
    def router(b: TraceBuilder) -> None:
        linear(b)
        softmax(b, [8192, 8])
        linear(b)

    def other_sizes(b: TraceBuilder) -> None:
        bmm(b, [128, 256, 64], [128, 64, 256])
        softmax(b, [64, 1000])
        bmm(b, [128, 256, 256], [128, 256, 64])

    def separated(b: TraceBuilder) -> None:
        bmm(b, [128, 256, 64], [128, 64, 256])
        linear(b)
        softmax(b, [128, 256, 256])
        bmm(b, [128, 256, 256], [128, 256, 64])

    def loss(b: TraceBuilder) -> None:
        bmm(b, [128, 256, 64], [128, 64, 256])
        with b.op("aten::_log_softmax", ("fp32", [128, 256, 256])):
            b.kernel(LOG_SOFTMAX, 50)
        bmm(b, [128, 256, 256], [128, 256, 64])

    for build in (router, other_sizes, separated, loss, linear):
        explanation = explained(build)
        assert not explanation.sites and "unfused-attention" not in ids(explanation)
        assert explanation.window.attention_us == 0


def test_autocast_s_nested_duplicates_count_once() -> None:
    scores = [128, 256, 256]

    def build(b: TraceBuilder) -> None:
        with b.op("aten::baddbmm", ("fp32", scores), ("bf16", [128, 256, 64]), ("bf16", [128, 64, 256])):
            tb.cast(b, "bf16", "fp32", scores, 40)
            with b.op("aten::baddbmm", ("bf16", scores), ("bf16", [128, 256, 64]), ("bf16", [128, 64, 256])):
                b.kernel(tb.S16816, 80)
        with b.op("aten::softmax", ("bf16", scores)):
            softmax(b, scores)
        with b.op("aten::bmm", ("fp32", scores), ("bf16", [128, 256, 64])):
            tb.cast(b, "bf16", "fp32", scores, 40)
            bmm(b, scores, [128, 256, 64])

    explanation = explained(build)
    (site,) = explanation.sites
    assert (site.calls, site.kernels_per_call) == (1, 5)
    assert finding(explanation, "dtype-casts").saving_us == pytest.approx(80)
    assert "fp32 to bf16" in finding(explanation, "dtype-casts").sentence


def test_the_fast_path_of_multihead_attention() -> None:
    def build(b: TraceBuilder) -> None:
        with b.op("aten::_native_multi_head_attention", ("bf16", [16, 128, 512])):
            linear(b)
            bmm(b, [128, 128, 64], [128, 64, 128])
            softmax(b, [16, 8, 128, 128])
            bmm(b, [128, 128, 128], [128, 128, 64])
            linear(b)

    explanation = explained(build)
    (site,) = explanation.sites
    assert site.implementation == "MultiheadAttention fast path, unfused"
    assert (site.problem, site.kernels_per_call) == ("B16,H8,L128,D64,bf16", 3)
    assert explanation.window.attention_us == pytest.approx(80 + 280 + 80)
    found = finding(explanation, "unfused-attention")
    assert found.saving_us > 0 and found.confidence == "low" and "copies the projections" in found.arithmetic


def test_fused_calls_are_named_and_rated() -> None:
    explanation = explained(flash, flash, efficient, tb.sdpa_cudnn)
    names = {site.implementation: site for site in explanation.sites}
    assert set(names) == {"SDPA flash", "SDPA efficient"}  # tb.sdpa_cudnn goes through the flash op
    flops = 4 * 8 * 16 * 1024 * 1024 * 64
    assert names["SDPA efficient"].tflop_per_s == pytest.approx(flops / 100e-6 / 1e12)
    assert names["SDPA efficient"].peak_fraction == pytest.approx(flops / 100e-6 / 989e12)
    assert not ids(explanation) & {"unfused-attention", "math-path", "mask-keeps-flash-away"}


def test_the_math_path_and_what_is_in_it() -> None:
    explanation = explained(*[tb.sdpa_math] * 2)
    (site,) = explanation.sites
    assert (site.implementation, site.kernels_per_call) == ("SDPA math", 20)
    assert ids(explanation) >= {"math-path", "safe-softmax", "mask-rebuilt-per-call", "dtype-casts", "tf32-off"}
    assert "unfused-attention" not in ids(explanation)  # the same thing once


def test_masked_fill_copies_only_out_of_place() -> None:
    assert "masked-fill-copy" in ids(explained(tb.naive))
    assert "masked-fill-copy" not in ids(explained(lambda b: tb.naive(b, in_place=True)))


def test_a_mask_built_once_is_not_built_again_and_again() -> None:
    def mask(b: TraceBuilder) -> None:
        with b.op("aten::triu", tb.HIDDEN):
            b.kernel(tb.TRIL, 5)

    again = explained(mask, tb.naive, mask, tb.naive)
    assert finding(again, "mask-rebuilt-per-call").saving_us == pytest.approx(10)
    assert "mask-rebuilt-per-call" not in ids(explained(mask, tb.naive, tb.naive))


@pytest.mark.parametrize(("mask", "kind"), [([8, 1, 1, 1024], "padding"), ([1024, 1024], "does not show")])
def test_a_mask_tensor_keeps_flash_away(mask: list[int], kind: str) -> None:
    found = finding(explained(lambda b: efficient(b, mask)), "mask-keeps-flash-away")
    assert any(kind in line for line in found.evidence)


def test_no_mask_or_flash_anyway_is_no_mask_finding() -> None:
    assert "mask-keeps-flash-away" not in ids(explained(efficient, flash))


def test_layout_copies_are_those_of_operands() -> None:
    operand, other = [8, 16, 1024, 64], [77, 13]
    explanation = explained(lambda b: [copy(b, operand) for _ in range(3)], flash)
    assert finding(explanation, "layout-copies").saving_us == pytest.approx(90)
    assert "layout-copies" not in ids(explained(lambda b: copy(b, other), flash))
    assert "layout-copies" not in ids(explained(lambda b: copy(b, operand), linear, flash))


def test_repeated_heads() -> None:
    def repeat(b: TraceBuilder) -> None:
        five = [8, 4, 4, 1024, 64]
        strides = [tb._contiguous(five), [262144, 65536, 0, 64, 1]]
        copied = ("bf16", five)
        with b.op("aten::reshape", copied), b.op("aten::copy_", copied, copied, strides=strides):
            b.kernel(tb.COPY, 30)

    explanation = explained(repeat, repeat, flash)
    assert finding(explanation, "gqa-materialised").saving_us == pytest.approx(60)
    assert "layout-copies" not in ids(explanation)
    assert "gqa-materialised" not in ids(explained(lambda b: copy(b, [8, 16, 1024, 64]), flash))


def test_products_on_cuda_cores() -> None:
    single = explained(lambda b: linear(b, tb.FFMA, dtype="fp32"))
    assert "tf32-off" in ids(single) and "matmul-off-tensor-cores" not in ids(single)
    assert "tf32-off" not in ids(explained(lambda b: linear(b, tb.TF32, dtype="fp32")))
    assert "tf32-off" not in ids(explained(lambda b: linear(b, SGEMV, dtype="fp32")))
    half = explained(lambda b: linear(b, "ampere_fp16_sgemm_fp16_32x128_tn", dtype="fp16"))
    assert "matmul-off-tensor-cores" in ids(half) and "tf32-off" not in ids(half)
    assert "matmul-off-tensor-cores" not in ids(explained(lambda b: linear(b, "some_kernel_of_nobody", dtype="bf16")))


def test_misaligned_products() -> None:
    def build(kernel: str) -> Build:
        return lambda b: bmm(b, [96, 3137, 64], [96, 64, 3137], kernel, 1900)

    found = finding(explained(build(ALIGN1)), "misaligned-gemm")
    assert any("3137" in line for line in found.evidence) and found.saving_us > 0
    assert "misaligned-gemm" not in ids(explained(build(ALIGN8)))


def test_too_few_blocks() -> None:
    def build(blocks: int) -> Build:
        return lambda b: sdpa(b, "aten::_scaled_dot_product_flash_attention", tb.FLASH, grid=(blocks, 1, 1))

    assert "16 blocks on a card of 132" in finding(explained(build(16)), "too-few-blocks").sentence
    assert "too-few-blocks" not in ids(explained(build(132)))


def test_dropout_at_inference_only() -> None:
    def drops(b: TraceBuilder) -> None:
        efficient(b, dropout="0.1")

    def backward(b: TraceBuilder) -> None:
        with b.op("autograd::engine::evaluate_function: MmBackward0"):
            linear(b)

    assert "dropout-at-inference" in ids(explained(drops))
    assert "dropout-at-inference" not in ids(explained(drops, backward))
    assert "dropout-at-inference" not in ids(explained(efficient))


def test_zero_percent_occupancy_is_recomputed() -> None:
    found = finding(explained(tb.sdpa_cudnn), "occupancy-estimator")
    assert "162 KiB, 18.8 %" in found.evidence[0]
    assert "occupancy-estimator" not in ids(explained(tb.sdpa_flash))


def test_pageable_copies() -> None:
    def copies(name: str) -> Build:
        return lambda b: b.kernel(name, 900, cat="gpu_memcpy", launch="cudaMemcpyAsync")

    assert "pageable-copies" in ids(explained(copies("Memcpy HtoD (Pageable -> Device)")))
    assert "pageable-copies" not in ids(explained(copies("Memcpy HtoD (Pinned -> Device)")))


def test_launch_bound_is_neither_a_busy_card_nor_one_long_pause() -> None:
    def small(b: TraceBuilder) -> None:
        for _ in range(40):
            linear(b, us=2)
            b.wait(50)

    def busy(b: TraceBuilder) -> None:
        for _ in range(40):
            linear(b, us=200)

    def pause(b: TraceBuilder) -> None:
        busy(b)
        b.wait(50_000)
        busy(b)

    found = finding(explained(small), "launch-bound")
    assert found.saving_us > 1000
    assert found.confidence == "low" and "the profiler slows" in found.sentence + found.arithmetic
    assert "launch-bound" not in ids(explained(busy)) | ids(explained(pause))


def test_building_inside_the_window() -> None:
    def builds(name: str) -> Build:
        def build(b: TraceBuilder) -> None:
            with b.annotation(name):
                b.wait(300_000)

        return build

    assert "built-in-window" in ids(explained(builds("entire_frame_compile (dynamo_timed)"), flash))
    assert "built-in-window" not in ids(explained(builds("TorchDynamo Cache Lookup"), flash))
    assert "built-in-window" not in ids(explained(builds("Torch-Compiled Region: 0/0"), flash))


def test_windows_that_do_not_show_all() -> None:
    def lost(b: TraceBuilder) -> None:
        for n in range(9):
            b._add("cudaLaunchKernel", "cuda_runtime", b.now_ns, 1000, b.thread, {"correlation": 5000 + n})

    def capture(b: TraceBuilder) -> None:
        b._add("cudaStreamBeginCapture", "cuda_runtime", b.now_ns, 1000, b.thread, {"correlation": 4000})
        lost(b)

    before = explained(lambda b: b.kernel("spilled", 30, launch=None), flash)
    assert "1 of 2 device events were launched before" in finding(before, "launched-before-window").sentence
    assert before.window.unattributed_us == pytest.approx(30)
    assert ids(explained(lost, flash)) >= {"lost-kernels"}
    captured = ids(explained(capture, flash))
    assert "graph-capture" in captured and "lost-kernels" not in captured
    assert not ids(explained(flash)) & {"launched-before-window", "lost-kernels", "graph-capture", "graph-replay"}


def test_a_replayed_graph_keeps_its_kernels_to_itself() -> None:
    def replay(b: TraceBuilder) -> None:
        with b.op("aten::mm"):
            b.kernel(tb.FLASH, 50, launch="cudaGraphLaunch")
            correlation = b.correlation
            for _ in range(3):
                b.kernel(tb.NVJET, 20, launch=None)
                b.events[-1]["args"]["correlation"] = correlation

    explanation = explained(replay)
    assert "4 kernels and copies were replayed by 1 graph launch;" in finding(explanation, "graph-replay").sentence
    (site,) = explanation.sites
    assert site.inferred and site.name == "in a replayed graph"
    assert explanation.window.attention_us == explanation.window.inferred_us == pytest.approx(50)
    assert explanation.window.unattributed_us == pytest.approx(60)


def test_uneven_calls() -> None:
    def of(us: float) -> Build:
        return lambda b: sdpa(b, "aten::_scaled_dot_product_flash_attention", tb.FLASH, us)

    assert "uneven-calls" in ids(explained(*[of(100)] * 8, of(400)))
    assert "uneven-calls" not in ids(explained(*[of(100)] * 8, of(110)))


def test_busy_is_a_union_and_the_sum_is_beside_it() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": stream, "ts": ts, "dur": 10,
         "args": {"device": 0, "stream": stream, "correlation": n}}
        for n, (stream, ts) in enumerate([(7, 100), (8, 105), (7, 130)], 1)
    ]  # fmt: skip
    window = explain_trace(parse_trace(json.dumps(events).encode())).window
    assert (window.busy_us, window.sum_us, window.span_us) == (25, 30, 40)


def test_an_amd_trace() -> None:
    card = {"id": 0, "name": "AMD Instinct MI300X", "computeMajor": 9, "computeMinor": 4, "numSms": 304, "warpSize": 64}

    def build(b: TraceBuilder) -> None:
        outer = b.op("aten::scaled_dot_product_attention", tb.Q, tb.Q, tb.Q, values=["", "0.", "False", "", "False"])
        with outer, b.op("aten::_scaled_dot_product_flash_attention", tb.Q, tb.Q, tb.Q):
            b.kernel(ATTN_FWD, 100, launch="hipModuleLaunchKernel", grid=(0, 0, 0), block=(0, 0, 0))
        with b.op("aten::mm", ("bf16", [8192, 1024]), ("bf16", [1024, 1024])):
            b.kernel(CIJK, 50, launch="hipExtModuleLaunchKernel", grid=(0, 0, 0))

    explanation = explained(build, device=card)
    (site,) = explanation.sites
    assert site.implementation == "SDPA flash (AOTriton)"
    assert site.peak_fraction is not None and "MI300X" in (site.peak_source or "")
    assert not ids(explanation)


def test_a_trace_of_2021() -> None:
    def event(cat: str, name: str, ts: int, dur: int, tid: str = "1890023232", **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": "5", "args": args}

    events = [
        event("Operator", "aten::bmm", 100, 50, **{"Input dims": [[8, 64, 32], [8, 32, 64]]}),
        event("Runtime", "cudaLaunchKernel", 110, 5, correlation=3),
        event("Operator", "aten::_softmax", 160, 20, **{"Input dims": [[8, 64, 64], [], []]}),
        event("Runtime", "cudaLaunchKernel", 165, 5, correlation=4),
        event("Operator", "aten::bmm", 200, 50, **{"Input dims": [[8, 64, 64], [8, 64, 32]]}),
        event("Runtime", "cudaLaunchKernel", 210, 5, correlation=5),
        event("Kernel", "volta_sgemm_64x64_tn", 300, 40, "stream 7", correlation=3),
        event("Kernel", tb.SOFTMAX, 350, 40, "stream 7", correlation=4),
        event("Kernel", "volta_sgemm_64x64_nn", 400, 40, "stream 7", correlation=5),
    ]
    explanation = explain_trace(parse_trace(json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()))
    (site,) = explanation.sites
    assert site.problem == "B8,H1,L64,D32" and site.tflop_per_s is not None and site.peak_fraction is None
    assert explanation.window.card is None
    assert ids(explanation) == {"unfused-attention", "matmul-off-tensor-cores"}
    assert finding(explanation, "unfused-attention").saving_us is None


def test_a_trace_without_shapes_is_explained_with_less_confidence() -> None:
    b = TraceBuilder()
    tb.naive(b)
    document = b.document()
    for event in document["traceEvents"]:
        for key in ("Input Dims", "Input type", "Input Strides"):
            event["args"].pop(key, None)
    explanation = explain_trace(parse_trace(json.dumps(document).encode()))
    (site,) = explanation.sites
    assert site.inferred and site.problem == "shapes not recorded"
    assert finding(explanation, "unfused-attention").confidence == "low"
    assert any("record_shapes=True" in sentence for sentence in explanation.window.lost)


def test_a_cpu_trace_is_explained_by_its_ops() -> None:
    def build(b: TraceBuilder) -> None:
        outer = b.op("aten::scaled_dot_product_attention", tb.Q, tb.Q, tb.Q)
        with outer, b.op("aten::_scaled_dot_product_flash_attention_for_cpu", tb.Q, tb.Q, tb.Q):
            b.wait(500)
        with b.op("aten::mm", ("bf16", [8, 8]), ("bf16", [8, 8])):
            b.wait(100)

    explanation = explained(build)
    (site,) = explanation.sites
    assert site.implementation == "SDPA flash on the CPU" and site.peak_fraction is None
    assert not explanation.window.on_gpu and 0.7 < explanation.window.attention_us / explanation.window.sum_us < 0.9
    assert not explanation.findings


def test_two_traces_side_by_side() -> None:
    difference = compare_traces(explained(tb.naive, linear), explained(flash, linear))
    (change,) = difference.changes
    assert change.before is not None and change.after is not None
    assert change.before.implementation == "unfused" and change.after.implementation == "SDPA flash"
    assert change.ratio == pytest.approx(100 / (84 + 128 + 126 + 359 + 283 + 83 + 1.4))
    assert "unfused-attention" in difference.gone


def test_modules_name_a_site_without_their_numbers() -> None:
    b = TraceBuilder()
    for layer in range(3):
        with (
            b._scope("nn.Module: Model_0", "python_function", {}),
            b._scope(f"nn.Module: Layer_{layer}", "python_function", {}),
        ):
            flash(b)
    (site,) = explain_trace(b.trace()).sites
    assert (site.module, site.calls) == ("Model.Layer", 3)


def test_the_ids_are_those_that_the_rules_can_find() -> None:
    written = {
        one
        for module in (attention_rules, card_rules, choice_rules, mask_rules, window_rules)
        for one in re.findall(r'id="([a-z0-9-]+)"', Path(module.__file__).read_text())
    }
    assert written == set(FINDING_IDS)


def test_an_empty_trace_says_so() -> None:
    explanation = explain_trace(parse_trace(b'{"traceEvents": []}'))
    assert not explanation.sites and not explanation.findings and explanation.window.span_us == 0


def test_a_generated_softmax_between_products_with_shapes() -> None:
    def build(b: TraceBuilder) -> None:
        bmm(b, [128, 256, 64], [128, 64, 256])
        b.kernel("triton_per_fused__softmax_masked_fill_mul_0", 90, launch="cuLaunchKernel")
        bmm(b, [128, 256, 256], [128, 256, 64])

    (site,) = explained(build).sites
    assert (site.implementation, site.problem) == ("unfused, compiled", "B128,H1,L256,D64,bf16")


def test_what_an_attention_op_copies_itself_is_no_copy_of_the_users() -> None:
    def build(b: TraceBuilder) -> None:
        with b.op("aten::_scaled_dot_product_flash_attention_backward", *[tb.Q] * 4):
            copy(b, tb.Q[1])
            for kernel in tb.FLASH_BACKWARD:
                b.kernel(kernel, 50)
        copy(b, tb.Q[1])

    explanation = explained(build)
    assert explanation.sites[0].direction == "backward" and "layout-copies" not in ids(explanation)


def test_a_backward_s_masked_fill_is_not_the_users_either() -> None:
    scores = [128, 256, 256]

    def build(b: TraceBuilder) -> None:
        for _ in range(2):
            bmm(b, [128, 256, 64], [128, 64, 256])
        with b.op("aten::_softmax_backward_data", ("bf16", scores), ("bf16", scores)):
            b.kernel(tb.SOFTMAX.replace("forward", "backward"), 50)
        with b.op("aten::masked_fill", ("bf16", scores)):
            copy(b, scores)
        for _ in range(2):
            bmm(b, scores, [128, 256, 64])

    explanation = explained(build)
    (site,) = explanation.sites
    assert (site.direction, site.problem, site.kernels_per_call) == ("backward", "B128,H1,L256,D64,bf16", 6)
    assert "masked-fill-copy" not in ids(explanation)


def test_the_python_exporter_s_misplaced_number_of_multiprocessors() -> None:
    card = {"id": 0, "name": "NVIDIA H100", "computeMajor": 9, "computeMinor": 0, "maxThreadsPerMultiprocessor": 132}
    b = TraceBuilder(card)
    flash(b)
    (device,) = b.trace().devices
    assert (device.num_sms, device.max_threads_per_multiprocessor) == (132, None)
