from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import trace_builder as built
from attnscope.trace import explain_name, read_trace
from attnscope.trace.names import CUDA_CORE, FAMILY_RULES, MEMORY, TENSOR_CORE, UNIT_RULES, UNKNOWN, readable_name

FOREIGN = Path(__file__).parents[2] / "shared" / "traces"

# name -> family, role, dtype, tile, architecture, unit
KNOWN = {
    built.NVJET: ("cublas (nvjet)", "matmul", "bf16", "128x256x64", "sm_90", TENSOR_CORE),
    "nvjet_sm90_hsh_64x32_64x16_1x4_v_bz_TNN": ("cublas (nvjet)", "matmul", "fp16", "64x32x64", "sm_90", TENSOR_CORE),
    built.S16816: ("cublas", "matmul", "bf16", "128x128", "sm_80", TENSOR_CORE),
    "ampere_fp16_s1688gemm_fp16_128x128_ldg8_f2f_stages_32x1_tn": (
        "cublas", "matmul", "fp16", "128x128", "sm_80", TENSOR_CORE),
    built.FFMA: ("cublas", "matmul", "fp32", "128x128x8", "sm_80", CUDA_CORE),
    built.SGEMM: ("cublas", "matmul", "fp32", "128x64", "sm_80", CUDA_CORE),
    "volta_sgemm_128x64_nt": ("cublas", "matmul", "fp32", "128x64", "sm_70", CUDA_CORE),
    "ampere_fp16_sgemm_fp16_32x128_tn": ("cublas", "matmul", "fp16", "32x128", "sm_80", CUDA_CORE),
    built.TF32: ("cublas", "matmul", "tf32", "128x128x32", "sm_90", TENSOR_CORE),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas":
        ("cublas", "matmul", "bf16", "64x64x64", "sm_90", TENSOR_CORE),
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_execute_kernel__5x_cublas": (
        "cublas", "matmul", "fp32", "64x64x8", "sm_80", CUDA_CORE),
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>(X::Params)": (
        "cutlass", "matmul", "bf16", "32x32x128", "sm_80", TENSOR_CORE),
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(X::Params)": (
        "cutlass", "matmul", "fp32", "128x32x8", "sm_80", CUDA_CORE),
    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x64_16x6_tn_align4>(X::Params)": (
        "cutlass", "matmul", "tf32", "128x64x16", "sm_80", TENSOR_CORE),
    "void gemmSN_NN_kernel<float, 128, 2, 4, 8, 4, 4, false>(X)": (
        "cublas (small or matrix-vector)", "matmul", "fp32", None, None, CUDA_CORE),
    built.FLASH: ("flash-attention 2", "fused attention", "bf16", "128x128", None, TENSOR_CORE),
    built.FLASH_BACKWARD[0]: ("flash-attention 2", "fused attention backward", None, "128x128", None, MEMORY),
    built.FLASH_BACKWARD[1]: ("flash-attention 2", "fused attention backward", "bf16", "128x128", None, TENSOR_CORE),
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::MainloopFwdSm90<2>>>>(X)": (
        "flash-attention 3", "fused attention", None, None, "sm_90", TENSOR_CORE),
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at_": (
        "flash-attention 4", "fused attention", None, None, "sm_90", TENSOR_CORE),
    built.EFFICIENT: ("memory-efficient", "fused attention", "bf16", "64x64", "sm_80", TENSOR_CORE),
    "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(X)": (
        "memory-efficient", "fused attention backward", "bf16", "64x64", "sm_80", TENSOR_CORE),
    "fmha_cutlassF_f32_aligned_64x64_rf_sm75(X)": (
        "memory-efficient", "fused attention", "fp32", "64x64", "sm_75", CUDA_CORE),
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(X)": (
        "memory-efficient", "fused attention", "fp32", "64x64", "sm_80", TENSOR_CORE),
    built.CUDNN: ("cudnn", "fused attention", "16-bit", "64x128x64", "sm_90", TENSOR_CORE),
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64_1x1x1_cga1x1x1_kernel0_0": (
        "cudnn", "fused attention backward", "16-bit", "64x128x64", "sm_90", TENSOR_CORE),
    "triton_per_fused__softmax_masked_fill_mul_0": ("inductor triton", "softmax", None, None, None, MEMORY),
    "triton_poi_fused_masked_fill_mul_1": ("inductor triton", "fused elementwise", None, None, None, MEMORY),
    "triton_tem_fused_flex_attention_0": (
        "inductor flex attention", "fused attention", None, None, None, UNKNOWN),
    built.SOFTMAX: ("ATen softmax", "softmax", "fp32", None, None, MEMORY),
    "void at::native::(anonymous namespace)::cunn_SoftMaxBackward<8, c10::BFloat16, float>(X)": (
        "ATen softmax", "softmax backward", "bf16", None, None, MEMORY),
    built.TRIL: ("ATen triu_tril", "mask building", "bool", None, None, MEMORY),
    built.MASK: ("ATen masked_fill", "mask", None, None, None, MEMORY),
    built.CAST: ("ATen copy", "copy", "bf16", None, None, MEMORY),
    built.MUL: ("ATen elementwise", "scale", "bf16", None, None, MEMORY),
    built.FILL: ("ATen fill", "fill", "bool", None, None, MEMORY),
    "Memcpy DtoD (Device -> Device)": ("memcpy", "copy", None, None, None, MEMORY),
    "Memset (Device)": ("memset", "fill", None, None, None, MEMORY),
    "attn_fwd.kd": ("aotriton", "fused attention", None, None, None, UNKNOWN),
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT32x32x256_MI16x16x1_SN_ISA942_": (
        "hipblaslt", "matmul", "bf16", "32x32x256", "gfx942", TENSOR_CORE),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_name_is_taken_apart(name: str) -> None:
    m = explain_name(name)
    assert (m.family, m.role, m.dtype, m.tile, m.architecture, m.unit) == KNOWN[name]
    assert m.unit_rule


def test_an_unknown_name_stays_unknown() -> None:
    m = explain_name("my_very_own_kernel")
    assert (m.family, m.role, m.unit) == (None, None, UNKNOWN)
    assert "no rule" in m.unit_rule


@pytest.mark.parametrize(
    "name", ["sm90_xmma_gemm_weird_formats_cublas", "commander_gemm_thing", "nvjet_sm100_zzz_1x1_1x1"]
)
def test_a_product_whose_name_tells_no_unit_is_not_called_off_tensor_cores(name: str) -> None:
    assert explain_name(name).unit == UNKNOWN


def test_a_rule_is_shown_with_what_it_matched() -> None:
    assert "s16816gemm" in explain_name(built.S16816).unit_rule
    assert "ffma" in explain_name(built.FFMA).unit_rule


def test_every_rule_has_its_words() -> None:
    assert all(rule.unit is None or rule.why for rule in FAMILY_RULES)
    assert all(rule.why for rule in UNIT_RULES)


@pytest.mark.skipif(not FOREIGN.is_dir(), reason="the foreign traces are not beside this checkout")
@pytest.mark.parametrize("path", sorted(FOREIGN.glob("[ahv]*.json.gz")), ids=lambda p: p.name)
def test_names_cover_the_gpu_time_of_foreign_nvidia_traces(path: Path) -> None:
    time: Counter[bool] = Counter()
    for event in read_trace(path).device_events:
        time[explain_name(event.name).family is not None] += event.duration_ns
    assert time[True] >= 0.9 * time.total()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOnePass", "ck_tile::kentry<Rmsnorm2dFwd…>"),
        ("_Z7softmaxPf", "softmax"),
        ("_ZN999x", "_ZN999x"),
        ("_Z", "_Z"),
        ("attn_fwd", "attn_fwd"),
    ],
)
def test_mangled_names_read(name: str, shown: str) -> None:
    assert readable_name(name) == shown


@pytest.mark.parametrize(
    ("name", "family", "role"),
    [
        ("void aiter::fmha_fwd_hd128_bf16_causal", "aiter", "fused attention"),
        ("_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelINS", "composable kernel", "fused attention"),
        ("void vllm::paged_attention_v1_kernel<float>", "serving attention", "fused attention"),
        ("triton_fused_attention_forward", "attnscope triton_fused", "fused attention"),
        ("hopper_attention_forward", "attnscope hopper", "fused attention"),
        ("hopper_attention_decode_combine", "attnscope hopper", "fused attention"),
        ("hopper_attention_mask_words", "attnscope hopper", "fused attention"),
        ("hopper_cuda_forward", "attnscope hopper_cuda", "fused attention"),
        ("hopper_cuda_combine", "attnscope hopper_cuda", "fused attention"),
        ("_attn_fwd", "triton attention", "fused attention"),
        ("_attn_bwd_dkdv", "triton attention", "fused attention backward"),
        ("void flash::compute_attn_ws<Ktraits>", "flash-attention 3", "fused attention"),
        ("qk_int_sv_f16_accum_f32_attn_kernel", "sage attention", "fused attention"),
    ],
)
def test_attention_kernels_of_serving_stacks(name: str, family: str, role: str) -> None:
    meaning = explain_name(name)
    assert (meaning.family, meaning.role) == (family, role)
