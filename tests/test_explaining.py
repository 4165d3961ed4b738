from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

import trace_builder as built
from attnscope.errors import TraceError
from attnscope.explaining import explain_profile
from attnscope.explaining.expected import EXPECTED, short_name
from attnscope.explaining.occupancy import occupancy_percent
from attnscope.explaining.peaks import find_peaks
from attnscope.explaining.remedies import fused_line, grouped_line, sdpa_line
from attnscope.explaining.rules import RULES
from attnscope.explaining.shapes import Problem
from attnscope.records import Finding, KernelEvent, Profile
from attnscope.trace.events import DeviceEvent, DeviceProperties
from attnscope.workload import Workload
from trace_builder import TraceBuilder

BLOG = Workload.parse("B8,H16,L1024,D64,bf16,causal")
Call = Callable[[TraceBuilder], None]


def explain(
    call: Call, name: str = "naive", direction: str = "forward", workload: Workload = BLOG, device: object = built.H200,
    steps: int = 3, wait_us: float = 0, host_us: float | None = None,
) -> tuple[Profile, tuple[KernelEvent, ...], dict[str, Finding]]:  # fmt: skip
    b = TraceBuilder(device)  # type: ignore[arg-type]
    for _ in range(steps):
        with b.step(f"attnscope/{name}/{direction}"):
            call(b)
            b.wait(wait_us)
    profile, kernels, findings = explain_profile(
        b.trace(), workload=workload, implementation=name, direction=direction, trace_name="t.json.gz", host_us=host_us
    )
    assert len({f.id for f in findings}) == len(findings)
    return profile, kernels, {f.id: f for f in findings}


# --- the story of the profiling article ------------------------------------------------------------------------------


def test_naive_is_six_kernels_and_the_copy_is_the_surprise() -> None:
    profile, kernels, findings = explain(built.naive)
    assert [k.role for k in kernels if k.family != "memset"] == [
        "scores matmul", "scale", "copy", "mask", "softmax", "values matmul"
    ]  # fmt: skip
    assert profile.kernels_per_call == 6
    assert profile.gpu_us_per_call == pytest.approx(84 + 128 + 126 + 359 + 283 + 83 + 1.4)
    assert profile.self_gpu_us_total == pytest.approx(3 * profile.gpu_us_per_call)
    assert profile.surprises == (
        "1 × copy (Memcpy DtoD (Device -> Device); 126 µs): a copy that no line of the code asks for",
    )
    assert len(profile.expected) == 5
    copy = findings["masked-fill-copy"]
    assert copy.saving_us == pytest.approx(126)
    assert "masked_fill_" in copy.remedy
    assert (copy.implementation, copy.workload, copy.direction) == ("naive", str(BLOG), "forward")
    assert set(findings) == {"masked-fill-copy", "occupancy-estimator"}


def test_in_place_is_five_and_surprises_nobody() -> None:
    profile, _, findings = explain(lambda b: built.naive(b, in_place=True), "naive_inplace")
    assert profile.kernels_per_call == 5
    assert profile.surprises == ()
    assert "masked-fill-copy" not in findings


def test_math_is_twenty_kernels_and_tells_the_whole_story() -> None:
    profile, kernels, findings = explain(built.sdpa_math, "sdpa_math")
    assert profile.kernels_per_call == 20
    roles = [k.role for k in kernels]
    assert {role: roles.count(role) for role in ("cast", "mask building", "safe softmax", "scale", "mask")} == {
        "cast": 5, "mask building": 5, "safe softmax": 4, "scale": 2, "mask": 1
    }  # fmt: skip
    assert list(findings)[:3] == ["matmul-off-tensor-cores", "safe-softmax", "upcast"]  # what costs most comes first
    assert findings["safe-softmax"].saving_us == pytest.approx(542)
    assert findings["upcast"].saving_us == pytest.approx(3 * 15 + 10 + 180)
    assert findings["mask-rebuilt-per-call"].saving_us == pytest.approx(17)
    off = findings["matmul-off-tensor-cores"]
    assert any("ffma" in line for line in off.evidence)
    # 268 MB of scores at 4,800 GB/s bind both products
    assert off.saving_us == pytest.approx(961 - 2 * BLOG.score_bytes() / 4800e3)
    assert "data sheet" in off.arithmetic
    assert any("cast" in s for s in profile.surprises) and any("safe softmax" in s for s in profile.surprises)
    assert "gqa-materialised" not in findings


@pytest.mark.parametrize("call", [built.sdpa_flash, built.sdpa_cudnn])
def test_a_fused_kernel_is_all_there_is(call: Call) -> None:
    profile, (kernel,), findings = explain(call, "sdpa_flash")
    assert (profile.kernels_per_call, kernel.role, kernel.unit) == (1, "fused attention", "tensor core")
    assert profile.surprises == ()
    assert findings["fused"].saving_us is None


def test_a_kernel_of_unknown_name_in_a_fused_op_is_fused_attention_on_an_unknown_unit() -> None:
    def call(b: TraceBuilder) -> None:
        with b.op("aten::_cudnn_attention_forward", built.Q):
            b.kernel("kernel_of_2031", 50)

    _, (kernel,), findings = explain(call, "sdpa_cudnn")
    assert (kernel.role, kernel.unit, kernel.family) == ("fused attention", "unknown", None)
    assert "fused" in findings


def test_what_enable_gqa_costs() -> None:
    grouped = BLOG.replace(H_kv=4)
    profile, kernels, findings = explain(lambda b: built.sdpa_math(b, group=4), "sdpa_math", workload=grouped)
    assert [k.role for k in kernels].count("KV repeat") == 2
    assert findings["gqa-materialised"].saving_us == pytest.approx(60)
    found = findings["gqa-materialised"]
    assert "4 times" in found.sentence and "math path writes the repeated keys and values out" in found.sentence
    assert "is_causal=True, enable_gqa=True" in found.remedy
    assert any("KV repeat" in s for s in profile.surprises)


# --- each rule: a look-alike that must stay silent --------------------------------------------------------------------


def test_a_copy_elsewhere_is_no_masked_fill_copy() -> None:
    def call(b: TraceBuilder) -> None:
        built.naive(b, in_place=True)
        with b.op("aten::contiguous", built.Q), b.op("aten::clone", built.Q), b.op("aten::copy_", built.Q, built.Q):
            b.memcpy(50)

    profile, kernels, findings = explain(call)
    assert "masked-fill-copy" not in findings
    assert [k.role for k in kernels if k.name.startswith("Memcpy")] == ["layout copy"]
    assert any("layout copy" in s for s in profile.surprises)


@pytest.mark.parametrize("gemm", [built.NVJET, built.S16816, built.TF32, "sm90_gemm_of_the_future_cublas"])
def test_products_on_tensor_cores_or_unknown_are_not_called_slow(gemm: str) -> None:
    assert "matmul-off-tensor-cores" not in explain(lambda b: built.naive(b, gemm=gemm))[2]


def test_a_slow_product_on_a_card_without_a_data_sheet_has_no_number() -> None:
    card = built.H200 | {"name": "NVIDIA Nameless"}
    found = explain(lambda b: built.naive(b, gemm=built.SGEMM), device=card)[2]["matmul-off-tensor-cores"]
    assert found.saving_us is None and "NVIDIA Nameless" in found.arithmetic


def test_a_mask_made_outside_the_call_is_not_rebuilt() -> None:
    b = TraceBuilder()
    with b.op("aten::ones"), b.op("aten::fill_", built.HIDDEN):
        b.kernel(built.FILL, 3)
    with b.op("aten::triu", built.HIDDEN):
        b.kernel(built.TRIL, 3)
    with b.step("attnscope/naive/forward"):
        built.naive(b)
    _, _, findings = explain_profile(b.trace(), workload=BLOG, implementation="naive", direction="forward")
    assert "mask-rebuilt-per-call" not in {f.id for f in findings}


def test_where_on_the_scores_masks_and_builds_no_mask() -> None:
    def call(b: TraceBuilder) -> None:
        built.naive(b, in_place=True)
        with b.op("aten::where", built.HIDDEN, built.SCORES, ("fp32", [])):
            b.kernel(built.WHERE, 100)

    _, kernels, findings = explain(call)
    assert [k.role for k in kernels if k.name == built.WHERE] == ["mask"]
    assert "mask-rebuilt-per-call" not in findings


def test_a_given_bool_mask_is_converted_in_every_call() -> None:
    def call(b: TraceBuilder) -> None:
        with b.op("aten::scaled_dot_product_attention", built.Q):
            with b.op("aten::where", built.HIDDEN, ("bf16", []), ("bf16", [])):
                b.kernel(built.WHERE, 7)
            with b.op("aten::_scaled_dot_product_efficient_attention", built.Q):
                b.kernel(built.EFFICIENT, 200)

    found = explain(call, "sdpa_efficient", workload=Workload.parse("B8,H16,L1024,D64,bf16,mask=bool"))[2]
    assert "additive" in found["mask-rebuilt-per-call"].sentence
    assert "mask-rebuilt-per-call" not in explain(built.sdpa_flash)[2]


def test_all_outside_a_safe_softmax_is_no_guard() -> None:
    def call(b: TraceBuilder) -> None:
        with b.op("aten::all", built.HIDDEN):
            b.kernel(built.ALL, 9)
        built.naive(b)

    _, kernels, findings = explain(call)
    assert "safe-softmax" not in findings
    assert [k.role for k in kernels if k.name == built.ALL] == ["reduction"]


def test_a_grouped_call_on_a_kernel_that_knows_groups_repeats_nothing() -> None:
    assert "gqa-materialised" not in explain(built.sdpa_flash, "sdpa_flash", workload=BLOG.replace(H_kv=4))[2]


def test_a_copy_without_a_change_of_dtype_is_no_upcast() -> None:
    def call(b: TraceBuilder) -> None:
        built.naive(b)
        built.cast(b, "bf16", "bf16", [8, 16, 1024, 64], 30)

    assert "upcast" not in explain(call)[2]
    assert "upcast" not in explain(lambda b: built.cast(b, "bf16", "fp32", [64], 3))[2]  # down only


def test_a_fused_kernel_beside_much_else_is_not_the_whole_attention() -> None:
    def call(b: TraceBuilder) -> None:
        built.sdpa_flash(b)
        built.cast(b, "fp32", "bf16", [8, 16, 1024, 64], 40)

    assert "fused" not in explain(call)[2]


def test_inductor_puts_a_fused_kernel_in_naives_place() -> None:
    def call(b: TraceBuilder) -> None:
        region, graph = b.op("Torch-Compiled Region: 0/0"), b.annotation("## Call CompiledFxGraph fabc ##")
        with region, graph, b.op("aten::_scaled_dot_product_flash_attention", built.Q):
            b.kernel(built.FLASH, 92)

    profile, _, findings = explain(call, "naive_compiled")
    assert "inductor-became-sdpa" in findings
    assert any("separate steps" in s for s in profile.surprises)
    assert "inductor-became-sdpa" not in explain(call, "sdpa_flash")[2]
    assert "inductor-became-sdpa" not in explain(built.sdpa_flash, "naive_compiled")[2]


def test_compiled_naive_with_generated_kernels_stays_naive() -> None:
    def call(b: TraceBuilder) -> None:
        with b.annotation("## Call CompiledFxGraph fabc ##"):
            built.matmul(b, built.NVJET, 84)
            with b.op("triton_per_fused__softmax_masked_fill_mul_0"):
                b.kernel("triton_per_fused__softmax_masked_fill_mul_0", 130, launch="cuLaunchKernel")
            built.matmul(b, built.NVJET, 83)

    profile, kernels, findings = explain(call, "naive_compiled")
    roles = [k.role for k in kernels if k.family != "memset"]
    assert roles == ["scores matmul", "softmax", "values matmul"]
    assert profile.surprises == () and "inductor-became-sdpa" not in findings


def test_zero_occupancy_of_a_tiny_grid_is_no_artefact() -> None:
    def call(b: TraceBuilder) -> None:
        b.kernel(built.FLASH, 9, grid=(1, 1, 1), shared=49152, registers=255, occupancy=0)

    assert "occupancy-estimator" not in explain(call)[2]


def test_launch_bound_only_where_the_measured_host_time_is_longer() -> None:
    found = explain(built.sdpa_flash, "sdpa_flash", host_us=130)[2]["launch-bound"]
    assert found.saving_us == pytest.approx(130 - 92.6)
    assert "130 µs - 92.6 µs" in found.arithmetic and "measured without the profiler" in found.evidence[0]
    assert "launch-bound" not in explain(built.sdpa_flash, "sdpa_flash", host_us=92.7)[2]
    assert "launch-bound" not in explain(built.naive, host_us=400)[2]


def test_the_profilers_host_time_makes_nothing_launch_bound() -> None:
    for measured in (None, 40):
        assert "launch-bound" not in explain(built.sdpa_flash, "sdpa_flash", wait_us=4000, host_us=measured)[2]


def flash_backward(b: TraceBuilder, shape: list[int], copies: int = 2) -> None:
    with b.op("aten::_flash_attention_backward", ("bf16", shape)):
        for _ in range(copies):
            outer, inner = b.op("aten::contiguous", ("bf16", shape)), b.op("aten::clone", ("bf16", shape))
            with outer, inner, b.op("aten::copy_", ("bf16", shape), ("bf16", shape)):
                b.kernel(built.COPY, 25)
        b.kernel(built.FLASH_BACKWARD[1], 500)


def test_a_fused_kernel_beside_copies_is_nearly_all_and_the_copies_are_told() -> None:
    findings = explain(lambda b: flash_backward(b, [8, 1024, 16, 64]), "sdpa_flash", "backward")[2]
    assert "nearly the whole attention (90.9 % of its time)" in findings["fused"].sentence
    copies = findings["layout-copies"]
    assert copies.saving_us == pytest.approx(50)
    assert "(B, L, H, D)" in copies.remedy and "transpose(1, 2)" in copies.remedy


def test_layout_copies_need_an_operand_and_a_fused_kernel() -> None:
    row_sums = explain(lambda b: flash_backward(b, [8, 16, 1024]), "sdpa_flash", "backward")[2]
    none = explain(lambda b: flash_backward(b, [8, 1024, 16, 64], 0), "sdpa_flash", "backward")[2]
    assert "layout-copies" not in row_sums and "layout-copies" not in none
    assert "does the whole attention;" in none["fused"].sentence

    def call(b: TraceBuilder) -> None:
        built.naive(b)
        with b.op("aten::contiguous", built.Q), b.op("aten::clone", built.Q), b.op("aten::copy_", built.Q, built.Q):
            b.memcpy(50)

    assert "layout-copies" not in explain(call)[2]


# --- remedies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "options"),
    [
        ("B1,H8,L64,D64,bf16", ""),
        ("B1,H8,L64,D64,bf16,causal", ", is_causal=True"),
        ("B1,H8/2,L64,D64,bf16,causal", ", is_causal=True, enable_gqa=True"),
        ("B1,H8,L64,S128,D64,bf16,causal=bottom_right", ", attn_mask=mask"),
        ("B1,H8,L64,D64,bf16,causal=bottom_right", ", is_causal=True"),
        ("B1,H8,L64,D64,bf16,causal,window=16", ", attn_mask=mask"),
        ("B1,H8,L64,D64,bf16,causal,mask=bool", ", attn_mask=mask"),
        ("B1,H8,L64,D64,bf16,causal,bias=bf16", ", attn_mask=mask"),
        ("B2,H8,L64,D64,bf16,lengths=32/64", ", attn_mask=mask"),
        ("B1,H8,L64,D64,bf16,causal,scale=0.5", ", is_causal=True, scale=0.5"),
    ],
)
def test_the_line_computes_the_same_attention(spelling: str, options: str) -> None:
    line = f"torch.nn.functional.scaled_dot_product_attention(q, k, v{options})"
    assert sdpa_line(Workload.parse(spelling)) == line


@pytest.mark.parametrize("feature", ["softcap=30", "sinks", "alibi"])
def test_what_sdpa_cannot_say_is_left_to_flex_attention(feature: str) -> None:
    line = sdpa_line(Workload.parse(f"B1,H8,L64,D64,bf16,causal,{feature}"))
    assert "flex_attention" in line and "scaled_dot_product_attention" not in line


def test_grouped_heads_in_fp32_are_repeated_before_a_fused_kernel() -> None:
    grouped = Workload.parse("B1,H8/2,L64,D64,fp32,causal")
    assert "repeat_interleave(4, dim=1)" in fused_line(grouped) and "enable_gqa" not in fused_line(grouped)
    assert fused_line(grouped, on_gpu=False) == sdpa_line(grouped)
    assert grouped_line(grouped).startswith("in bf16 or fp16")
    assert "fp64" in fused_line(grouped.replace(dtype="fp64"))
    findings = explain(lambda b: built.sdpa_math(b, group=4), "sdpa_math", workload=BLOG.replace(H_kv=4, dtype="fp32"))[
        2
    ]
    assert "repeat_interleave" in findings["safe-softmax"].remedy
    assert "repeat_interleave" in findings["mask-rebuilt-per-call"].remedy


def test_a_strangers_problem_keeps_its_mask_and_its_groups() -> None:
    problem = Problem(B=1, H=8, H_kv=2, L=64, S=64, D=64, dtype="bf16", causal=True)
    assert sdpa_line(problem).endswith("(q, k, v, is_causal=True, enable_gqa=True)")
    masked = replace(problem, H_kv=8, causal=False, mask="bool:64x64")
    assert sdpa_line(masked).endswith("(q, k, v, attn_mask=mask)")
    assert "(q, k, v, attn_mask=mask, enable_gqa=True)" in grouped_line(masked)  # repeated heads hide the groups
    assert grouped_line(replace(masked, dtype="fp32")).startswith("in bf16 or fp16")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_who_pins_the_math_path_is_told_to_keep_16_bit_or_unpin_it(direction: str) -> None:
    def products(b: TraceBuilder) -> None:
        for _ in range(4):
            built.matmul(b, built.FFMA, 400, "fp32")

    found = explain(products, "sdpa_math", direction)[2]["matmul-off-tensor-cores"]
    assert "allow_fp16_bf16_reduction_math_sdp(True)" in found.remedy and "SDPBackend.MATH" in found.remedy
    other = explain(products, "naive", direction)[2]["matmul-off-tensor-cores"]
    assert other.remedy == sdpa_line(BLOG)


# --- backward ---------------------------------------------------------------------------------------------------------


def test_backward_on_another_thread_belongs_to_the_step() -> None:
    def call(b: TraceBuilder) -> None:
        b.thread = 99
        node = b.op("autograd::engine::evaluate_function: FlashAttentionBackward0")
        with node, b.op("aten::_flash_attention_backward", built.Q):
            for kernel, us in zip(built.FLASH_BACKWARD, (10, 250, 12), strict=True):
                b.kernel(kernel, us)
        b.thread = 77

    profile, kernels, findings = explain(call, "sdpa_flash", "backward")
    assert [k.role for k in kernels] == ["fused attention backward"] * 3
    assert [k.unit for k in kernels] == ["memory", "tensor core", "memory"]
    assert {k.op for k in kernels} == {"aten::_flash_attention_backward"}
    assert profile.surprises == () and "3 fused kernels" in findings["fused"].sentence.lower()


def test_naive_backward_makes_gradients_and_copies_for_its_mask_too() -> None:
    def call(b: TraceBuilder) -> None:
        built.matmul(b, built.NVJET, 80)
        built.matmul(b, built.NVJET, 80)
        with b.op("aten::_softmax_backward_data", built.SCORES, built.SCORES):
            b.kernel(built.SOFTMAX.replace("forward", "backward"), 300)
        with b.op("aten::masked_fill", built.SCORES, built.HIDDEN):
            with b.op("aten::clone", built.SCORES), b.op("aten::copy_", built.SCORES, built.SCORES):
                b.memcpy(126)
            with b.op("aten::masked_fill_", built.SCORES, built.HIDDEN):
                b.kernel(built.MASK, 359)
        with b.op("aten::mul", built.SCORES, ("fp32", [])):
            b.kernel(built.MUL, 128)
        built.matmul(b, built.NVJET, 80)
        built.matmul(b, built.NVJET, 80)

    profile, kernels, findings = explain(call, "naive", "backward")
    assert [k.role for k in kernels].count("gradient matmul") == 4
    assert "softmax backward" in [k.role for k in kernels]
    assert findings["masked-fill-copy"].saving_us == pytest.approx(126)
    assert len(profile.surprises) == 1


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_middle_step_is_shown_and_spill_is_counted_apart() -> None:
    b = TraceBuilder()
    b.kernel("warm-up kernel", 500, launch=None)
    for us in (100, 300, 200):
        with b.step("attnscope/x/forward"), b.op("aten::mm"):
            b.kernel(built.NVJET, us)
    profile, (kernel,), _ = explain_profile(b.trace(), workload=BLOG, implementation="x", direction="forward")
    assert kernel.duration_us == pytest.approx(200)
    assert profile.gpu_us_per_call == pytest.approx(200) and profile.self_gpu_us_total == pytest.approx(600)
    assert (profile.steps, profile.spilled_kernels, profile.kernels_per_call) == (3, 1, 1)
    assert profile.expected == () and profile.surprises == ()  # nothing is known of x


def test_the_table_counts_nested_ops_once_and_sorts_by_gpu_time() -> None:
    def call(b: TraceBuilder) -> None:
        with b.op("aten::div_", built.SCORES), b.op("aten::div_", built.SCORES):
            b.kernel(built.MUL, 50)
        with b.op("aten::bmm", built.Q, built.KT):
            b.kernel(built.NVJET, 80)

    table = explain(call, "x")[0].table
    rows = {row.name: row for row in table}
    assert [row.gpu_us for row in table] == sorted((row.gpu_us for row in table), reverse=True)
    assert (rows["aten::div_"].calls, rows["aten::div_"].gpu_us) == (6, pytest.approx(150))
    assert rows["aten::div_"].cpu_us == pytest.approx(3 * 8)  # the outer one only: 1 + (1 + 4 + 1) + 1 µs
    assert rows["aten::bmm"].self_gpu_us == rows[built.NVJET].gpu_us == pytest.approx(240)
    assert len(table) <= 15


def test_records_survive_their_json() -> None:
    for call in (built.naive, built.sdpa_math, built.sdpa_flash):
        profile, kernels, findings = explain(call)
        for record in (profile, *kernels, *findings.values()):
            assert msgspec.convert(msgspec.to_builtins(record), type(record)) == record


def test_a_trace_without_our_steps_is_refused_by_sentence() -> None:
    b = TraceBuilder()
    with b.annotation("training step"), b.op("aten::mm"):
        b.kernel(built.NVJET, 3)
    for label, says in ((None, "a step of attnscope"), ("mine", "a step named 'mine'")):
        with pytest.raises(TraceError, match=says) as caught:
            explain_profile(b.trace(), workload=BLOG, implementation="x", direction="forward", label=label)
        assert "training step" in str(caught.value)


# --- occupancy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "registers", "threads", "shared", "percent"),
    [
        (built.H200, 168, 384, 0, 18.75),  # peers.md 6.1, with NVIDIA's own cuda_occupancy.h
        (built.H200, 168, 384, 50176, 18.75),
        (built.H200, 168, 384, 231424, 18.75),
        (built.A100, 255, 128, 49152, 12.5),  # the article's FlashAttention-2 kernel: 2 blocks
        (built.A100, 240, 256, 100000, 12.5),  # its cuDNN kernel: 1 block
        (built.H200, 30, 128, 0, 100),
        (built.H200, 32, 1024, 0, 100),
    ],
)
def test_occupancy_with_the_opt_in_limit(
    card: dict[str, object], registers: int, threads: int, shared: int, percent: float
) -> None:
    event = DeviceEvent(
        name="k", start_ns=0, duration_ns=1, thread=("0", "7"), kind="kernel", grid=(100_000, 1, 1),
        block=(threads, 1, 1), registers=registers, shared_memory_bytes=shared,
    )  # fmt: skip
    device = msgspec.convert(card, DeviceProperties)
    assert occupancy_percent(event, device) == pytest.approx(percent)
    # one writer of torch 2.13 puts the number of multiprocessors where the threads belong
    device.max_threads_per_multiprocessor = 132
    assert occupancy_percent(event, device) == pytest.approx(percent)
    device.shared_mem_per_multiprocessor = None
    assert occupancy_percent(event, device) is None


def test_a_small_grid_leaves_the_card_empty() -> None:
    event = DeviceEvent(
        name="k", start_ns=0, duration_ns=1, thread=("0", "7"), kind="kernel", grid=(2, 1, 8), block=(128, 1, 1),
        registers=255, shared_memory_bytes=49152,
    )  # fmt: skip
    assert occupancy_percent(event, msgspec.convert(built.H200, DeviceProperties)) == pytest.approx(
        100 * 16 / 132 * 4 / 64
    )


# --- words ------------------------------------------------------------------------------------------------------------


def test_every_rule_says_its_docstring_and_every_name_its_steps() -> None:
    assert all(rule.__doc__ for rule in RULES)
    assert all(steps.keys() == {"forward", "backward"} for steps in EXPECTED.values())


def test_findings_are_whole_sentences() -> None:
    for call in (built.naive, built.sdpa_math, built.sdpa_flash, built.sdpa_cudnn):
        for finding in explain(call, host_us=50_000)[2].values():
            assert finding.sentence[0].isupper() and finding.sentence.endswith(".")
            assert finding.evidence
            assert finding.saving_us is None or (finding.arithmetic and finding.remedy)


def test_names_are_cut_to_a_line() -> None:
    assert short_name(built.FLASH) == "pytorch_flash::flash_fwd_kernel"
    assert short_name("k") == "k"
    assert len(short_name("x" * 500)) == 60


def test_rates_are_found_by_the_cards_name() -> None:
    assert find_peaks("NVIDIA H200") != find_peaks("NVIDIA H100 80GB HBM3")
    assert find_peaks("NVIDIA GeForce RTX 2060") is None and find_peaks(None) is None


def test_findings_come_sorted_by_what_they_save() -> None:
    savings = [finding.saving_us or 0 for finding in explain(built.sdpa_math, "sdpa_math")[2].values()]
    assert savings == sorted(savings, reverse=True) and savings[0] > 0
