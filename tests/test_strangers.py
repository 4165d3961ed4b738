"""Traces that nobody here recorded: names of other libraries, look-alikes of attention, other cards, other programs."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

import kernel_names
import trace_builder as tb
from attnscope.errors import TraceError
from attnscope.explaining import compare_traces, explain_trace
from attnscope.explaining.attention_ops import is_backward, names_attention
from attnscope.explaining.explanation import Explanation
from attnscope.explaining.peaks import PEAKS, find_peaks
from attnscope.explaining.shapes import Problem
from attnscope.reporting.explanation_text import render_difference, render_explanation
from attnscope.trace import explain_name, parse_trace
from attnscope.trace.names import MEMORY, TENSOR_CORE
from trace_builder import TraceBuilder
from trace_calls import Build, bmm, explained, finding, flash, ids, linear, sdpa, softmax

TOPK = "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(X)"
ROUTER = "void vllm::moe::topkGatingSoftmax<4, 64, 4, 16, int>(float const*, bool const*, float*, int)"
ARGMAX = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float> > >(X)"
LOG_SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*, int)"
MEGATRON = "void scaled_upper_triang_masked_softmax_warp_forward<c10::Half, c10::Half, float, 11>(c10::Half*, int)"
SHAPES = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")


def replayed(b: TraceBuilder, *names: str, us: float = 50) -> None:
    """One graph launch and its kernels."""
    b.correlation += 1
    args = {"correlation": b.correlation}
    b._add("cudaGraphLaunch", "cuda_runtime", b.now_ns, 10_000, b.thread, args)
    for name in names:
        start = max(b.device_free_ns, b.now_ns + 12_000)
        b._add(name, "kernel", start, round(us * 1000), 7, args | {"device": 0, "stream": 7}, pid=0)
        b.device_free_ns = start + round(us * 1000) + 500


def without_shapes(*builds: Build) -> Explanation:
    b = TraceBuilder(tb.A100)
    for build in builds:
        build(b)
    document = b.document()
    for event in document["traceEvents"]:
        for key in SHAPES:
            event["args"].pop(key, None)
    return explain_trace(parse_trace(json.dumps(document).encode()), "t")


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (kernel_names.FORWARD, {"fused attention"}),
        (kernel_names.BACKWARD, {"fused attention backward"}),
        (kernel_names.CONVOLUTIONS, {"convolution"}),
    ],
)
def test_kernels_of_other_libraries_are_known(names: tuple[str, ...], roles: set[str]) -> None:
    wrong = {name: explain_name(name).role for name in names if explain_name(name).role not in roles}
    assert not wrong


def test_what_sounds_like_attention_is_none() -> None:
    said = {name: explain_name(name).role or "" for name in kernel_names.OTHERS}
    assert not {name: role for name, role in said.items() if "attention" in role and role != "linear attention"}
    assert not {name: role for name, role in said.items() if role.startswith("softmax")}


def test_a_kernel_that_only_combines_is_not_said_to_multiply() -> None:
    parts = ("combine", "reduce", "dot_do_o", "mergestates", "merge_attn")
    names = (*kernel_names.FORWARD, *kernel_names.BACKWARD)
    helpers = [name for name in names if any(part in name.lower() for part in parts)]
    assert len(helpers) >= 8
    assert {explain_name(name).unit for name in helpers if "ck_tile::FmhaBwd" not in name} == {MEMORY}


def test_the_unit_follows_from_the_name_only() -> None:
    assert explain_name(
        "cudnn_generated_fort_native_sdpa_sm80_flash_fprop_f16_knob_3_64x64x128_4x1x1_kernel0_0"
    ).unit == (TENSOR_CORE)
    assert "rocBLAS" in explain_name("rocblas_gemvt_kernel").unit_rule


@pytest.mark.parametrize(
    ("name", "attention", "backward"),
    [
        ("flash_attn::_flash_attn_varlen_forward", True, False),
        ("flash_attn_3::bwd", True, True),
        ("aiter::mha_bwd", True, True),
        ("aiter::wrapper_fmha_v3_fwd", True, False),
        ("FusedAttnFuncBackward", True, True),
        ("transformer_engine_torch::fused_attn_fwd", True, False),
        ("xformers_flash::flash_bwd", True, True),
        ("autograd::engine::evaluate_function: _fMHABackward", True, True),
        ("vllm::unified_mla_attention_with_output", True, False),
        ("_vllm_fa2_C::fwd_kvcache", True, False),
        ("flashinfer::paged_run", True, False),
        ("EvoformerAttention", True, False),
        ("npu::npu_fusion_attention", True, False),
        ("flashinfer::rmsnorm", False, False),
        ("flashinfer::apply_rope_pos_ids_cos_sin_cache", False, False),
        ("flashinfer::append_paged_kv_cache", False, False),
        ("flashinfer::trtllm_fp4_block_scale_moe", False, False),
        ("flashinfer::gdn_prefill", False, False),
        ("vllm::linear_attention", False, False),
        ("_C_cache_ops::reshape_and_cache_flash", False, False),
        ("aten::_fused_sdp_choice", False, False),
        ("aten::linear", False, False),
    ],
)
def test_ops_of_other_libraries(name: str, attention: bool, backward: bool) -> None:
    assert (names_attention(name), is_backward(name)) == (attention, backward)


# --- look-alikes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernels",
    [
        (tb.S16816, tb.SOFTMAX, TOPK, "fused_moe_kernel", tb.S16816),
        (tb.S16816, ROUTER, "fused_moe_kernel", tb.S16816),
        (tb.S16816, tb.CAST, tb.SOFTMAX, ARGMAX, tb.S16816),
        (tb.S16816, LOG_SOFTMAX, tb.S16816),
        (tb.S16816, "void flashinfer::sampling::OnlineSoftmaxMapKernel<256u, 4u>(float*)", tb.S16816),
    ],
    ids=["router", "fused router", "sampler", "log softmax", "sampling"],
)
def test_a_softmax_in_a_replay_that_is_none_of_attention_s(kernels: tuple[str, ...]) -> None:
    explanation = explained(lambda b: replayed(b, *kernels))
    assert not explanation.sites and "unfused-attention" not in ids(explanation)
    window = explanation.window
    assert window.unattributed_us == pytest.approx(window.sum_us)  # and never counted as not attention


def test_attention_in_a_replay_is_still_found_but_only_inferred() -> None:
    (site,) = explained(lambda b: replayed(b, tb.S16816, tb.MUL, tb.ADD, tb.SOFTMAX, tb.S16816)).sites
    assert (site.implementation, site.inferred) == ("unfused", True)


def router(b: TraceBuilder) -> None:
    bmm(b, [1, 4096, 1024], [1, 1024, 8])
    softmax(b, [1, 4096, 8])
    with b.op("aten::topk", ("bf16", [1, 4096, 8])):
        b.kernel(TOPK, 8)
    bmm(b, [8, 1024, 1024], [8, 1024, 4096])


def linear_attention(b: TraceBuilder) -> None:
    for _ in range(2):
        softmax(b, [4, 8, 1024, 64])
        softmax(b, [4, 8, 64, 1024])
        bmm(b, [32, 64, 1024], [32, 1024, 64])
        bmm(b, [32, 1024, 64], [32, 64, 64])
        with b.op("aten::cudnn_convolution", ("bf16", [4, 512, 32, 32])):
            b.kernel(kernel_names.CONVOLUTIONS[0], 40)


@pytest.mark.parametrize("build", [router, linear_attention])
def test_a_softmax_between_other_products_is_no_attention(build: Build) -> None:
    for explanation in (explained(build), without_shapes(build)):
        assert not explanation.sites and explanation.window.attention_us == 0


def test_megatron_s_fused_softmax_is_causal() -> None:
    def build(b: TraceBuilder) -> None:
        scores = ("fp16", [64, 2048, 2048])
        with b.op("aten::baddbmm", scores, ("fp16", [64, 2048, 128]), ("fp16", [64, 128, 2048])):
            b.kernel(tb.S16816, 400)
        with b.op("ScaledUpperTriangMaskedSoftmax", scores):
            b.kernel(MEGATRON, 600)
        with b.op("aten::bmm", scores, ("fp16", [64, 2048, 128])):
            b.kernel(tb.S16816, 400)

    explanation = explained(build, device=tb.A100)
    (site,) = explanation.sites
    assert (site.implementation, site.problem) == ("unfused", "B64,H1,L2048,D128,fp16")
    found = finding(explanation, "unfused-attention")
    assert found.sentence.startswith("1 attention call runs") and "causal" in found.arithmetic


def test_a_serving_step_with_its_helpers() -> None:
    prefill = "void flashinfer::BatchPrefillWithPagedKVCacheKernel<X>(X)"
    merge = "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u>(X)"

    def build(b: TraceBuilder) -> None:
        for op, kernel in (
            ("flashinfer::rmsnorm", "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(X)"),
            ("flashinfer::append_paged_kv_cache", "void flashinfer::AppendPagedKVCacheKernel<X>"),
        ):
            with b.op(op):
                b.kernel(kernel, 10)
        for kernel in (prefill, merge) * 2:
            b.kernel(kernel, 100)
        with b.op("mylib::magic"):
            b.kernel("magic_kernel", 77)
        with b.op("sgl_kernel::silu_and_mul"):
            b.kernel("act_and_mul_kernel", 7)

    explanation = explained(build)
    (site,) = explanation.sites
    assert (site.implementation, site.calls, site.kernels_per_call) == ("FlashInfer", 2, 2)
    assert explanation.window.attention_us == pytest.approx(400)
    assert explanation.window.unattributed_us == pytest.approx(77)  # its op and its name are strangers


def test_a_compiled_template_without_a_name_may_be_attention() -> None:
    def build(b: TraceBuilder) -> None:
        for name in ("triton_tem_fused_0", "triton_tem_fused_addmm_1"):
            with b.op(name):
                b.kernel(name, 100)

    window = explained(build).window
    assert (window.attention_us, window.unattributed_us) == (0, pytest.approx(100))


# --- figures ----------------------------------------------------------------------------------------------------------


def visible(L: int, S: int, causal: bool, bottom_right: bool, window: tuple[int, int] | None) -> int:
    left, right = window or (-1, -1)
    pairs = 0
    for row, key in product(range(L), range(S)):
        ahead = key - row - (S - L if bottom_right else 0)
        pairs += (ahead <= 0 if causal else right < 0 or ahead <= right) and (left < 0 or -ahead <= left)
    return pairs


def test_visible_pairs_are_counted_one_by_one() -> None:
    windows = (None, (0, -1), (2, -1), (1, 3), (-1, 2), (100, 100))
    for L, S, causal, right, window in product((1, 2, 5, 8), (1, 2, 5, 9), (True, False), (True, False), windows):
        problem = Problem(1, 1, 1, L, S, 4, 4, causal=causal, bottom_right=right, window=window)
        assert problem.pairs == visible(L, S, causal, right, window), problem


@pytest.mark.parametrize(
    ("causal", "left", "said", "keys"),
    [
        ("True", "-1", "causal=bottom_right", 8192 - 512 + 0.5),
        ("True", "127", "causal=bottom_right,window=128", 128),
        ("False", "-1", "bf16", 8192),
    ],
)
def test_flash_attention_s_own_ops_align_to_the_last_key(causal: str, left: str, said: str, keys: float) -> None:
    q, k = ("bf16", [2, 1024, 16, 64]), ("bf16", [2, 8192, 4, 64])

    def build(b: TraceBuilder) -> None:
        values = ["0.", "0.125", causal, left, "-1" if causal == "False" else "0", "0.", "", "False"]
        with b.op("flash_attn::_flash_attn_forward", q, k, k, values=values):
            b.kernel(tb.FLASH.replace("pytorch_flash", "flash"), 200)

    (site,) = explained(build).sites
    assert site.problem.startswith("B2,H16/4,L1024,S8192,D64,bf16") and site.problem.endswith(said)
    assert site.tflop_per_s == pytest.approx(2 * 16 * 1024 * keys * 4 * 64 / 200 / 1e6, rel=1e-3)


def test_without_its_causal_flag_a_fused_call_has_no_rate() -> None:
    def build(b: TraceBuilder) -> None:  # PyTorch before 2.1 records shapes, but no values
        with b.op("aten::_scaled_dot_product_flash_attention", tb.Q, tb.Q, tb.Q):
            b.kernel(tb.FLASH, 100)

    (site,) = explained(build).sites
    assert site.tflop_per_s is None and site.peak_fraction is None and "L1024" in site.problem


@pytest.mark.parametrize(
    ("name", "half", "gb_per_s"),
    [
        ("NVIDIA GH200 480GB", 990, 4000),
        ("NVIDIA H100 NVL", 836, 3938),
        ("NVIDIA H20", 148, 4000),
        ("NVIDIA A100 80GB PCIe", 312, 1935),
        ("NVIDIA A800-SXM4-80GB", 312, 2039),
        ("Tesla V100-PCIE-16GB", 112, 900),
        ("Tesla T4", 65, 320),
        ("NVIDIA L40S", 362, 864),
        ("NVIDIA L4", 121, 300),
        ("NVIDIA GeForce RTX 4090", 165.2, 1008),
        ("AMD Instinct MI325X", 1307.4, 6000),
    ],
)
def test_a_variant_has_its_own_rates(name: str, half: float, gb_per_s: float) -> None:
    peaks = find_peaks(name)
    assert peaks is not None and (peaks.half_tflop_per_s, peaks.gb_per_s) == (half, gb_per_s)
    assert all(one.fp32_tflop_per_s <= one.tf32_tflop_per_s <= one.half_tflop_per_s for _, one in PEAKS)


@pytest.mark.parametrize(
    "name",
    ["NVIDIA RTX A1000 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA H20-3e", "NVIDIA A10G",
     "GRID V100D-32Q", "NVIDIA GeForce RTX 4090 D", "AMD Radeon RX 7900 XTX", ""],
)  # fmt: skip
def test_a_card_that_only_sounds_like_one_has_no_rates(name: str) -> None:
    assert find_peaks(name) is None


# --- what a trace lacks -----------------------------------------------------------------------------------------------


def test_a_launch_that_was_not_recorded_is_not_one_from_before() -> None:
    """PyTorch before 2.1 recorded no driver calls, by which Triton launches: its kernels come among the others."""

    def build(b: TraceBuilder) -> None:
        b.kernel("old_kernel", 20, launch=None)
        for _ in range(3):
            linear(b)
            b.kernel("triton_poi_fused_add_mul_0", 20, launch=None)

    explanation = explained(build)
    found = finding(explanation, "launched-before-window")
    assert found.sentence.startswith("1 of 7 device events")
    assert any(line.startswith("3 of 7 device events") and "not recorded" in line for line in explanation.window.lost)


def test_a_trace_of_kernels_alone() -> None:
    explanation = explained(lambda b: b.kernel(tb.FLASH, 100, launch=None))
    assert ids(explanation) == set()
    assert any("holds no launches" in line for line in explanation.window.lost)
    assert "launched before" not in render_explanation(explanation)


def test_launches_of_an_intel_gpu_are_counted() -> None:
    def build(b: TraceBuilder) -> None:
        inner = b.op("aten::_scaled_dot_product_fused_attention_overrideable", tb.Q, tb.Q, tb.Q)
        with b.op("aten::scaled_dot_product_attention", tb.Q, tb.Q, tb.Q), inner:
            b.kernel("micro_sdpa", 100, launch="urEnqueueKernelLaunch")

    explanation = explained(build, device=None)
    (site,) = explanation.sites
    assert explanation.window.launches == 1 and site.implementation == "SDPA of another device"


def test_an_amd_trace_without_its_device_is_known_by_its_launches() -> None:
    def build(b: TraceBuilder) -> None:
        linear(b, kernel="Cijk_Ailk_Bljk_SB_MT64x64x16_MI0_SN", dtype="fp32")
        b.events[-2]["name"] = "hipModuleLaunchKernel"
        b.events[-2]["cat"] = "cuda_runtime"

    assert "tf32-off" not in ids(explained(build, device=None))


def test_an_amd_card_has_matrix_cores() -> None:
    card = {"id": 0, "name": "AMD Instinct MI300X", "computeMajor": 9, "computeMinor": 4, "numSms": 304, "warpSize": 64}
    said = explained(lambda b: linear(b, kernel="Cijk_Ailk_Bljk_SB_MT64x64x16_MI0_SN", dtype="fp32"), device=card)
    found = finding(said, "matmul-off-tensor-cores")
    assert "matrix cores" in found.sentence and not any(w in found.sentence + found.remedy for w in ("CUDA", "TF32"))


@pytest.mark.parametrize(("bias", "kernel"), [([1, 4, 49, 49], "efficient"), (None, "flash")])
def test_a_bias_on_the_scores_is_not_promised_to_flash(bias: list[int] | None, kernel: str) -> None:
    """Swin's windows, with and without the table of relative positions."""
    scores = ("fp16", [1024, 4, 49, 49])

    def build(b: TraceBuilder) -> None:
        bmm(b, [4096, 49, 32], [4096, 32, 49], us=800)
        if bias:
            with b.op("aten::add", scores, ("fp16", bias)):
                b.kernel(tb.ADD, 60)
        softmax(b, scores[1])
        bmm(b, [4096, 49, 49], [4096, 49, 32], us=800)

    found = finding(explained(build, device=tb.A100), "unfused-attention")
    assert f"the {kernel} kernel takes" in found.arithmetic


def test_apple_s_own_attention_is_not_the_math_path() -> None:
    op = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "args": {}}
    events = [
        op | {"name": "aten::scaled_dot_product_attention", "ts": 0, "dur": 100},
        op | {"name": "aten::_scaled_dot_product_attention_math_for_mps", "ts": 1, "dur": 90},
    ]
    (site,) = explain_trace(parse_trace(json.dumps({"traceEvents": events}).encode())).sites
    assert site.implementation == "SDPA of MPS"


def test_two_cards_of_one_process_are_not_busy_twice_the_span() -> None:
    def build(b: TraceBuilder) -> None:
        for device in (0, 1):
            b.device_free_ns = 0
            flash(b)
            b.events[-1]["args"]["device"] = device
            b.events[-1]["ts"] = b.events[0]["ts"]

    explanation = explained(build)
    window = explanation.window
    assert window.gpus == 2 and window.busy_us == pytest.approx(200)
    text = " ".join(render_explanation(explanation).split())
    assert "of the span on average of 2 GPUs" in text and "200 %" not in text


def test_a_repeat_of_something_else_is_no_repeated_key() -> None:
    def repeat(b: TraceBuilder) -> None:
        small = ("int64", [8, 4, 1024])
        with b.op("aten::repeat_interleave", small), b.op("aten::copy_", small, small):
            b.kernel(tb.COPY, 30)

    assert "gqa-materialised" not in ids(explained(repeat, flash))


def test_a_difference_of_many_call_sites_is_bounded() -> None:
    def generation(b: TraceBuilder) -> None:
        for length in range(100, 180):
            q, k = ("bf16", [1, 8, 1, 64]), ("bf16", [1, 8, length, 64])
            with b.op("aten::_scaled_dot_product_flash_attention", q, k, k, values=["0.", "False", "False"]):
                b.kernel(tb.FLASH, 5)

    one = explained(generation)
    text = render_difference(compare_traces(one, one))
    assert len(one.sites) == 80 and "and 50 more" in text and len(text.splitlines()) < 200


# --- other programs ---------------------------------------------------------------------------------------------------


def event(cat: str | None, **more: Any) -> dict[str, Any]:
    found = {"ph": "X", "name": "n", "pid": 1, "tid": 1, "ts": 1, "dur": 5, "args": {}}
    return found | ({"cat": cat} if cat is not None else {}) | more


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ([event("cuda"), event("nvtx")], r"another program: none of its categories \(cuda, nvtx\)"),
        ({"traceEvents": [event("devtools.timeline")], "metadata": {}}, "another program"),
        ({"traceEvents": [event("FEE")], "viztracer_metadata": {}}, "another program"),
        ([event("Session"), event("Node")], "another program"),
        ([event(None, pid="CPU functions"), event(None, pid="CUDA functions")], "list of events"),
        ([event("a\x1b[31m\n")], r"categories \(a\[31m\)"),
    ],
)
def test_traces_of_other_programs_are_refused_by_what_they_hold(document: object, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        parse_trace(json.dumps(document).encode())


@pytest.mark.parametrize(
    "document",
    [
        {"schemaVersion": 1, "traceEvents": [event("my_backend")]},
        [event("cuda"), event("cpu_op")],
        [event("overhead")],
    ],
)
def test_a_trace_of_pytorch_s_with_little_in_it_is_read(document: object) -> None:
    assert parse_trace(json.dumps(document).encode()) is not None


def test_every_explanation_fits_a_terminal() -> None:
    builds: tuple[Build, ...] = (router, linear_attention, flash, lambda b: sdpa(b, "aten::x", kernel_names.FORWARD[0]))
    for build in builds:
        assert all(len(line) <= 80 for line in render_explanation(explained(build)).splitlines())
