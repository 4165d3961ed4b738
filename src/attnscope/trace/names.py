"""Stage 6: what a GPU kernel's name says: family, role, dtype, tile, architecture, and the unit that does the work.

Pure data and pure functions. Each verdict carries the rule that decided it, in words; a name that no rule knows stays
unknown. The rules are ordered, the first match wins. Imports neither torch nor an implementation.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

MOST_LOOKED_AT = 1024  # characters of a name; what it says stands at its beginning
TENSOR_CORE, CUDA_CORE, MEMORY, UNKNOWN = "tensor core", "CUDA core", "memory", "unknown"
FLEX = "inductor flex attention"
UNKNOWN_RULE = "no rule knows this name; Nsight Compute (ncu) can tell"


@dataclass(frozen=True)
class Meaning:
    """What a kernel's name says. ``None`` and ``unknown`` mean that it does not say."""

    family: str | None
    role: str | None
    dtype: str | None
    tile: str | None
    architecture: str | None
    unit: str
    unit_rule: str


@dataclass(frozen=True)
class FamilyRule:
    """Names that match ``pattern`` are of ``family`` and do ``role``; ``unit`` None leaves it to the unit rules.

    ``own``: the kernel's own name must match, without what it is a template of and what it takes.
    """

    pattern: str
    family: str
    role: str | None
    unit: str | None = None
    why: str = ""
    own: bool = False


@dataclass(frozen=True)
class UnitRule:
    """Names that match ``pattern`` run on ``unit``, because ``why``."""

    pattern: str
    unit: str
    why: str


_FLASH_2 = "FlashAttention-2 multiplies with tensor core instructions (mma.sync)"
_FLASH_1 = "it multiplies 16-bit operands with tensor core instructions (mma.sync)"
_FLASH_3_SM80 = "FlashAttention-3's kernels for sm_80 to sm_89 multiply with tensor core instructions (mma.sync)"
_HELPER = "a helper of the fused kernel that only reads, sums and writes"
_COMBINES = "it only combines partial results"
OWN_PART = re.compile(r"(?:[^<(]|\(anonymous namespace\))*")
_ONE_PASS = "each element is read and written once: memory bandwidth decides"

FAMILY_RULES: tuple[FamilyRule, ...] = (
    FamilyRule(r"^Memcpy", "memcpy", "copy", MEMORY, "a copy made by the runtime"),
    FamilyRule(r"^Memset", "memset", "fill", MEMORY, "a fill made by the runtime"),
    # what only sounds like attention, or holds a softmax that is none of attention's
    FamilyRule(r"reshape_and_cache|(concat|cat)_and_cache|set_(mla_)?kv|AppendPaged(KV|MLAKV)|concat_and_cast_mha|"
               r"kv_cache_update|store_kv", "KV cache", "KV cache write", MEMORY, _ONE_PASS, own=True),
    FamilyRule(r"[rR]otary|RoPE|_rope|rope_", "rotary embedding", "rotary embedding", MEMORY, _ONE_PASS, own=True),
    FamilyRule(r"[tT]op_?[kK]\w{0,40}[sS]oft[mM]ax|[mM]oe_?[sS]oft[mM]ax|[gG]ating|routing|moe_?align|[mM]oe_?[sS]ort|"
               r"grouped_topk|moe_fused_gate", "mixture of experts", "routing", MEMORY, _ONE_PASS, own=True),
    FamilyRule(r"[fF]used_?[mM]oe|moe\w{0,40}gemm|Moe\w{0,40}(Flatmm|Gemm)|kernel_moe|marlin_moe", "mixture of experts",
               "expert matmul", own=True),
    FamilyRule(r"sampling|OnlineSoftmax|top_?[kp]_sampl", "sampling", "sampling", MEMORY, _ONE_PASS, own=True),
    FamilyRule(r"[cC]ross_?[eE]ntropy|nll_loss", "loss", "loss", MEMORY, _ONE_PASS, own=True),
    FamilyRule(r"LogSoft[mM]ax|log_softmax|triton_\w*logsumexp|softmax_warp_(forward|backward)<[\w:, ]*?\d+, true\b",
               "log softmax", "log softmax", MEMORY, _ONE_PASS),
    FamilyRule(r"gated_delta_rule|chunk_(fwd|bwd|scan|state|delta|gla|kda)|fused_recurrent|linear_attn|lightning_attn|"
               r"_fwd_kv_parallel|_fwd_diag_kernel|selective_scan|causal_conv1d|mamba|fused_gdn|wkv\d",
               "linear attention or state space", "linear attention", own=True),
    # fused attention
    FamilyRule(r"fmha_bwd_dot_do_o_kernel", "flash-attention 1", "fused attention backward", MEMORY, _HELPER),
    FamilyRule(r"fmha_bwd\w*loop_kernel", "flash-attention 1", "fused attention backward", TENSOR_CORE, _FLASH_1),
    FamilyRule(r"fmha_fwd\w*loop_kernel", "flash-attention 1", "fused attention", TENSOR_CORE, _FLASH_1),
    FamilyRule(r"^(void )?fmha_dgrad_", "fmha of Apex and cuDNN", "fused attention backward", TENSOR_CORE, _FLASH_1),
    FamilyRule(r"^(void )?fmha_fprop_", "fmha of Apex and cuDNN", "fused attention", TENSOR_CORE, _FLASH_1),
    FamilyRule(r"flash_\w*mla\w*combine", "FlashMLA", "fused attention", MEMORY, _COMBINES),
    FamilyRule(r"flash_fwd\w*_mla|sparse_attn_fwd_kernel", "FlashMLA", "fused attention", TENSOR_CORE,
               "FlashMLA multiplies on tensor cores"),
    FamilyRule(r"flash_bwd_(dot_do_o|clear|convert)|FlashAttnBwd(Pre|Post)", "flash-attention 2",
               "fused attention backward", MEMORY, _HELPER),
    FamilyRule(r"FlashAttnFwdCombine", "flash-attention 3", "fused attention", MEMORY, _COMBINES),
    FamilyRule(r"FlashAttnFwdSm90|flash::enable_sm90.*Fwd", "flash-attention 3", "fused attention",
               TENSOR_CORE, "FlashAttention-3 multiplies with wgmma"),
    FamilyRule(r"FlashAttnBwdSm90|flash::enable_sm90.*Bwd", "flash-attention 3", "fused attention backward",
               TENSOR_CORE, "FlashAttention-3 multiplies with wgmma"),
    FamilyRule(r"FlashAttnFwdSm8\d", "flash-attention 3", "fused attention", TENSOR_CORE, _FLASH_3_SM80),
    FamilyRule(r"FlashAttnBwdSm8\d", "flash-attention 3", "fused attention backward", TENSOR_CORE, _FLASH_3_SM80),
    FamilyRule(r"flash_attncute.*(bwd|backward)_(pre|post)", "flash-attention 4", "fused attention backward", MEMORY,
               _HELPER),
    FamilyRule(r"flash_attncute.*(bwd|backward)", "flash-attention 4", "fused attention backward", TENSOR_CORE,
               "FlashAttention's CuTe kernels multiply on tensor cores"),
    FamilyRule(r"flash_attncute.*combine", "flash-attention 4", "fused attention", MEMORY, _COMBINES),
    FamilyRule(r"flash_attncute", "flash-attention 4", "fused attention", TENSOR_CORE,
               "FlashAttention's CuTe kernels multiply on tensor cores"),
    FamilyRule(r"flash_fwd(_splitkv)?_combine", "flash-attention 2", "fused attention", MEMORY, _COMBINES),
    FamilyRule(r"flash_bwd", "flash-attention 2", "fused attention backward", TENSOR_CORE, _FLASH_2),
    FamilyRule(r"flash_fwd|Flash_fwd", "flash-attention 2", "fused attention", TENSOR_CORE, _FLASH_2),
    FamilyRule(r"fmha::kernel::\w*Reduction", "CUTLASS fmha", "fused attention", MEMORY, _COMBINES),
    FamilyRule(r"fmha::kernel::\w*(SumOdO|Convert)", "CUTLASS fmha", "fused attention backward", MEMORY, _HELPER),
    FamilyRule(r"fmha::kernel::\w*Bwd", "CUTLASS fmha", "fused attention backward"),
    FamilyRule(r"fmha::kernel::\w+", "CUTLASS fmha", "fused attention"),
    FamilyRule(r"fmha_cutlassB|(^|[^A-Za-z])AttentionBackwardKernel", "memory-efficient", "fused attention backward"),
    FamilyRule(r"fmha_cutlassF|(^|[^A-Za-z])AttentionKernel<", "memory-efficient", "fused attention"),
    FamilyRule(r"cudnn.*(sdpa|flash|attention|mha).*bprop|cudnn.*bprop.*(sdpa|flash)", "cudnn",
               "fused attention backward"),
    FamilyRule(r"cudnn.*(compute_dot_do_o|convert_dq)", "cudnn", "fused attention backward", MEMORY, _HELPER),
    FamilyRule(r"cudnn.*(sdpa|flash|attention|mha)", "cudnn", "fused attention"),
    FamilyRule(r"^(attn_bwd|bwd_kernel_dk_dv|bwd_kernel_dq|bwd_preprocess|bwd_kernel_fuse)", "aotriton",
               "fused attention backward"),
    FamilyRule(r"^attn_fwd", "aotriton", "fused attention"),
    FamilyRule(r"ck_tile.{0,200}[Ff]mha\w{0,40}[Bb]wd", "composable kernel", "fused attention backward"),
    FamilyRule(r"ck_tile.{0,200}[Ff]mha\w{0,40}Combine", "composable kernel", "fused attention", MEMORY, _COMBINES),
    FamilyRule(r"ck_tile.{0,200}[Ff]mha", "composable kernel", "fused attention"),
    FamilyRule(r"multihead_?attention_backward", "composable kernel", "fused attention backward"),
    FamilyRule(r"gemm_softmax_gemm", "composable kernel", "fused attention"),
    FamilyRule(r"triton_tem_fused.*flex_attention_backward", FLEX, "fused attention backward"),
    FamilyRule(r"triton_tem_fused.*flex_attention", FLEX, "fused attention"),
    FamilyRule(r"triton_(poi|red|per)_fused\w*flex_attention_backward", FLEX, "fused attention backward", MEMORY,
               "a helper of the fused backward that only reads, sums and writes"),
    FamilyRule(r"paged_attention\w*reduce|merge_attn_states|^reduce_segments", "serving attention", "fused attention",
               MEMORY, _COMBINES),
    FamilyRule(r"MergeStates?Kernel", "FlashInfer", "fused attention", MEMORY, _COMBINES),
    FamilyRule(r"(Batch|Single)(Prefill|Decode)With|BatchMLAPage|\bPrefillWithKVCacheKernel|PODWithKVCache",
               "FlashInfer", "fused attention"),
    FamilyRule(r"unified_attention|paged_attention|mla_decode", "serving attention", "fused attention"),
    FamilyRule(r"^_fwd_kernel_stage2", "serving attention", "fused attention", MEMORY, _COMBINES),
    FamilyRule(r"^_fwd_(grouped_)?kernel_stage1", "serving attention", "fused attention"),
    FamilyRule(r"aiter\S{0,40}fmha_bwd|^_?fmha_bwd", "aiter", "fused attention backward"),
    FamilyRule(r"^(void )?kn_mla_reduce", "aiter", "fused attention", MEMORY, _COMBINES),
    FamilyRule(r"aiter\S{0,40}(fmha_fwd|mla_|pa_fwd)|^_?fmha_fwd|^mla_(a8w8|a16w16|a16w8|dec_|pfl_)", "aiter",
               "fused attention"),
    FamilyRule(r"compute_attn_ws", "flash-attention 3", "fused attention", TENSOR_CORE,
               "FlashAttention-3 multiplies with wgmma"),
    FamilyRule(r"fmhaSm\d+|fmha_sm\d+|fmha_v2_\w*attention|masked_multihead_attention|^(void )?kernel_mha\b",
               "TensorRT-LLM attention", "fused attention"),
    FamilyRule(r"^(void )?qk_int\d*_sv_", "sage attention", "fused attention"),
    FamilyRule(r"natten|NeighborhoodAttention", "NATTEN", "fused attention"),
    FamilyRule(r"^micro_sdpa", "oneDNN", "fused attention"),
    FamilyRule(r"^triton_fused_attention_backward_delta", "attnscope triton_fused", "fused attention backward", MEMORY,
               _HELPER),
    FamilyRule(r"^triton_fused_attention_backward", "attnscope triton_fused", "fused attention backward", TENSOR_CORE,
               "its products are Triton's dot, on tensor cores for 16-bit operands and, as three TF32 products, fp32"),
    FamilyRule(r"^triton_fused_attention_forward", "attnscope triton_fused", "fused attention", TENSOR_CORE,
               "its products are Triton's dot, on tensor cores for 16-bit operands and, as three TF32 products, fp32"),
    FamilyRule(r"^hopper_attention_decode_combine", "attnscope hopper", "fused attention", MEMORY, _COMBINES),
    FamilyRule(r"^hopper_attention_mask_", "attnscope hopper", "fused attention", MEMORY, _HELPER),
    FamilyRule(r"^hopper_attention_", "attnscope hopper", "fused attention", TENSOR_CORE,
               "its products are wgmma or, for few query rows, mma: both run on tensor cores"),
    FamilyRule(r"^hopper_cuda_combine$", "attnscope hopper_cuda", "fused attention", MEMORY, _COMBINES),
    FamilyRule(r"^hopper_cuda_forward$", "attnscope hopper_cuda", "fused attention", TENSOR_CORE,
               "its products are wgmma, on tensor cores"),
    FamilyRule(r"^_attn_bwd|^parallel_attn_bwd|^_?bwd_kernel_(dkdv|causal|noncausal)|^_bwd_preprocess_do_o_dot",
               "triton attention", "fused attention backward"),
    FamilyRule(r"^_attn_fwd|^parallel_attn_fwd", "triton attention", "fused attention"),
    # matrix products
    FamilyRule(r"^nvjet", "cublas (nvjet)", "matmul"),
    FamilyRule(r"splitKreduce", "cublas", "reduction", MEMORY, "it only adds up partial results"),
    FamilyRule(r"rocblas_\w*gemv", "rocblas (matrix-vector)", "matmul", CUDA_CORE,
               "rocBLAS's matrix-vector kernels multiply on the vector units"),
    FamilyRule(r"gemv|gemmSN|dot_kernel|reduce_1Block", "cublas (small or matrix-vector)", "matmul", CUDA_CORE,
               "cuBLAS's matrix-vector and small kernels multiply on CUDA cores"),
    FamilyRule(r"scudnn|implicit_convolve|explicit_convolve|winograd|(dgrad|wgrad|fprop).*(engine|optimized|nhwc)|"
               r"cask_\w*cudnn|[sh]\d+cudnn|im2col|conv2d_grouped|conv2d_c1|implicit_gemm|cudnn_generated\w*conv",
               "cudnn", "convolution"),
    FamilyRule(r"^miopen|^igemm_(fwd|bwd|wrw)|grouped_conv(_|nd)|^naive_conv", "miopen", "convolution"),
    FamilyRule(r"xmma_gemm|_cublas$|(ampere|turing|volta|hopper|maxwell|pascal|blackwell)_\w*gemm|^\w*sgemm",
               "cublas", "matmul"),
    FamilyRule(r"cutlass.*gemm", "cutlass", "matmul"),
    FamilyRule(r"^Cijk_", "hipblaslt", "matmul"),
    FamilyRule(r"triton_tem_fused_.*mm", "inductor triton template", "matmul"),
    FamilyRule(r"triton_tem_fused", "inductor triton template", None),
    FamilyRule(r"_matmul_ogs|^matmul_kernel|_gemm_kernel", "triton", "matmul"),
    # what Inductor generates
    FamilyRule(r"triton_\w*softmax\w*backward", "inductor triton", "softmax backward", MEMORY, _ONE_PASS),
    FamilyRule(r"triton_\w*softmax", "inductor triton", "softmax", MEMORY, _ONE_PASS),
    FamilyRule(r"triton_(red|per)_fused(?=\w*_exp(_|$))(?=\w*_sum(_|$))(?!\w*_log(_|$))", "inductor triton", "softmax",
               MEMORY, _ONE_PASS),
    FamilyRule(r"triton_(poi|red|per|for)_fused", "inductor triton", "fused elementwise", MEMORY, _ONE_PASS),
    # ATen
    FamilyRule(r"softmax_warp_backward|cunn_SoftMaxBackward|softmax_backward", "ATen softmax", "softmax backward",
               MEMORY, _ONE_PASS),
    FamilyRule(r"softmax_warp_forward|cunn_SoftMaxForward|[sS]oft[mM]ax", "ATen softmax", "softmax", MEMORY, _ONE_PASS),
    FamilyRule(r"triu_tril", "ATen triu_tril", "mask building", MEMORY, _ONE_PASS),
    FamilyRule(r"masked_fill|masked_scale", "ATen masked_fill", "mask", MEMORY, _ONE_PASS),
    FamilyRule(r"where_kernel|where_cuda", "ATen where", "select", MEMORY, _ONE_PASS),
    FamilyRule(r"FillFunctor", "ATen fill", "fill", MEMORY, _ONE_PASS),
    FamilyRule(r"copy_kernel_cuda|copy_device_to_device|CatArrayBatchedCopy", "ATen copy", "copy", MEMORY, _ONE_PASS),
    FamilyRule(r"arange_cuda|elementwise_kernel_with_index|range_cuda", "ATen fill", "fill", MEMORY, _ONE_PASS),
    FamilyRule(r"isneginf|isinf", "ATen elementwise", "comparison", MEMORY, _ONE_PASS),
    FamilyRule(r"reduce_kernel|RowwiseMoments|segment_reduce", "ATen reduce", "reduction", MEMORY, _ONE_PASS),
    FamilyRule(r"Functor_add|AddFunctor|add_kernel", "ATen elementwise", "add", MEMORY, _ONE_PASS),
    FamilyRule(r"MulFunctor|MulScalarFunctor|mul_kernel", "ATen elementwise", "scale", MEMORY, _ONE_PASS),
    FamilyRule(r"DivFunctor|div_true_kernel", "ATen elementwise", "scale", MEMORY, _ONE_PASS),
    FamilyRule(r"index(_elementwise|Select|_select|FuncLarge)|gather_kernel|scatter", "ATen index", "copy", MEMORY,
               _ONE_PASS),
    FamilyRule(r"fused_dropout|dropout_kernel|distribution_(elementwise|nullary)", "ATen random", "dropout", MEMORY,
               _ONE_PASS),
    FamilyRule(r"layer_norm|LayerNorm|[Rr](ms|MS)_?[Nn]orm|GroupNorm|batch_norm|bn_(fw|bw)", "normalisation",
               "normalisation", MEMORY, _ONE_PASS),
    FamilyRule(r"transform_bias_rescale_qkv", "ATen elementwise", "scale", MEMORY, _ONE_PASS),
    FamilyRule(r"elementwise_kernel", "ATen elementwise", "elementwise", MEMORY, _ONE_PASS),
    FamilyRule(r"nchwToNhwc|nhwcToNchw", "cudnn", "layout copy", MEMORY, _ONE_PASS),
    FamilyRule(r"max_pool|avg_pool|upsample", "ATen pooling", "elementwise", MEMORY, _ONE_PASS),
    FamilyRule(r"^fused_(?!\w*kernel)|nvfuser", "TorchScript fuser", "fused elementwise", MEMORY, _ONE_PASS),
    FamilyRule(r"^void cudnn::|^cudnn", "cudnn", None),
    FamilyRule(r"^void at::native|\bat::native", "ATen", None),
    FamilyRule(r"ncclDevKernel|ncclKernel", "nccl", "communication", MEMORY, "it moves data between GPUs"),
)  # fmt: skip

# For matrix products and fused kernels: what multiplies. Ordered; the first match wins.
UNIT_RULES: tuple[UnitRule, ...] = (
    UnitRule(r"ffma|simt", CUDA_CORE, "its name says {0}: plain fused multiply-adds on CUDA cores"),
    UnitRule(r"tensorop", TENSOR_CORE, "its name says tensorop"),
    UnitRule(r"cudnn_generated\w*sdpa_sm\d+_flash_[fb]prop_\w*f16", TENSOR_CORE,
             "16-bit operands: cuDNN's flash kernels multiply on tensor cores"),
    UnitRule(r"fmha::kernel::\w*(Sm\d+Fmha|TmaWarp[sS]pecialized)", TENSOR_CORE,
             "CUTLASS's kernels with warp specialisation multiply on tensor cores"),
    UnitRule(r"(?<![a-z])[hiqw]?g?mma(?![a-z])", TENSOR_CORE, "its name says {0}, matrix multiply-accumulate"),
    UnitRule(r"[_a-z](?:16816|1688|161616|884|16832|8816|64\d{1,3}16)gemm", TENSOR_CORE,
             "its name holds the shape of a tensor core instruction: {0}"),
    UnitRule(r"fmha_cutlass[FB]_f(?:16|32)?_?\w*sm(?:50)\b|fmha_cutlass[FB]_f32\w*_sm(?:50|60|70|75)\b", CUDA_CORE,
             "tensor cores of that age take no such operands, so CUTLASS multiplies on CUDA cores"),
    UnitRule(r"fmha_cutlass[FB]_(?:f16|bf16)\w*_sm(?:70|75|80)", TENSOR_CORE,
             "16-bit operands on sm70 or newer: CUTLASS multiplies on tensor cores"),
    UnitRule(r"fmha_cutlass[FB]_f32\w*_sm80", TENSOR_CORE,
             "fp32 operands on sm80: CUTLASS splits them into TF32 products on tensor cores"),
    UnitRule(r"^nvjet_(?:sm\d+_)?(?:t|h|q)", TENSOR_CORE,
             "nvjet kernels with 16-bit or 8-bit operands multiply on tensor cores"),
    UnitRule(r"sgemm|dgemm(?!_tensor)", CUDA_CORE, "{0} is the single or double precision product on CUDA cores"),
    UnitRule(r"scudnn|convolve_sgemm", CUDA_CORE, "a single precision convolution on CUDA cores"),
    UnitRule(r"xmma_gemm_\w*(?:tf32|bf16bf16|f16f16|e4m3|e5m2|i8i8)", TENSOR_CORE,
             "xmma with operands that tensor cores take ({0})"),
    UnitRule(r"xmma_gemm_f32f32_f32f32", CUDA_CORE, "both operands are fp32, which no tensor core takes as such"),
    UnitRule(r"MI\d+x\d+", TENSOR_CORE, "its name holds a matrix instruction ({0}), AMD's tensor core"),
    UnitRule(r"MT\d+x\d+.*_MI_?0", CUDA_CORE, "its name holds no matrix instruction"),
)  # fmt: skip

_DTYPES = (
    ("bf16", r"bf16|bfloat16|BFloat16|nv_bfloat16|^nvjet_(?:sm\d+_)?tst|_BBS_|_BB_|_B_BS_|DF16b"),
    ("fp16", r"(?<!b)f16|fp16|c10::Half|__half|half_t|h1688|h16816|h884|^nvjet_(?:sm\d+_)?hsh|_HHS_"),
    ("tf32", r"tf32|tensorop_s1688gemm"),
    ("fp8", r"e4m3|e5m2|fp8"),
    ("fp64", r"double|dgemm|f64"),
    ("fp32", r"float|f32|sgemm|_ffma|_S_B"),
    ("bool", r"\bbool\b"),
)
_GENERATIONS = {"volta": "sm_70", "turing": "sm_75", "ampere": "sm_80", "hopper": "sm_90", "blackwell": "sm_100"}
_TILES = (
    r"Flash_\w+_kernel_traits<\d+,\s*(\d+),\s*(\d+)",
    r"tilesize(\d+)x(\d+)x(\d+)",
    r"sdpa_\w*knob_\d+_(\d+)x(\d+)x(\d+)",
    r"aligned_(\d+)x(\d+)",
    r"^nvjet_(?:sm\d+_)?[a-z]+_(\d+)x(\d+)_(\d+)x",
    r"_MT(\d+)x(\d+)x(\d+)",
    r"gemm\w*?_(\d+)x(\d+)(?:_(\d+)x\d+)?",
    r"sgemm_(\d+)x(\d+)",
)


@functools.lru_cache(maxsize=4096)
def explain_name(name: str) -> Meaning:
    """What a kernel's name says, with the rule that decided its unit."""
    name = name[:MOST_LOOKED_AT]
    found = OWN_PART.match(name)
    own = found.group() if found else name
    rule = next((rule for search, rule in _families() if search(own if rule.own else name)), None)
    if rule is None:
        return Meaning(None, None, None, None, None, UNKNOWN, UNKNOWN_RULE)
    unit, why = (rule.unit, rule.why) if rule.unit is not None else _unit(name)
    return Meaning(rule.family, rule.role, _dtype(name), _tile(name), _architecture(name), unit, why)


@functools.cache
def _families() -> list[tuple[Callable[[str], object], FamilyRule]]:
    """The rules with their patterns compiled: looking each one up again costs more than most of them do."""
    return [(re.compile(rule.pattern).search, rule) for rule in FAMILY_RULES]


def _unit(name: str) -> tuple[str, str]:
    for rule in UNIT_RULES:
        match = re.search(rule.pattern, name)
        if match:
            return rule.unit, rule.why.format(match.group().strip("_"))
    return UNKNOWN, UNKNOWN_RULE


def _dtype(name: str) -> str | None:
    """The operand type: among those the name mentions, the one mentioned first (later ones are accumulators)."""
    if re.search(r"xmma_gemm_f32f32_tf32|tensorop_s1688gemm", name):
        return "tf32"
    if re.match(r"cudnn_generated\w*_f16_", name):
        return "16-bit"  # cuDNN writes f16 for bf16 too
    found = [(m.start(), dtype) for dtype, pattern in _DTYPES if (m := re.search(pattern, name))]
    return min(found)[1] if found else None


def _tile(name: str) -> str | None:
    for pattern in _TILES:
        match = re.search(pattern, name)
        if match:
            return "x".join(part for part in match.groups() if part)
    return None


def _architecture(name: str) -> str | None:
    match = re.search(r"(?:^|[_:<])sm_?(\d{2,3})a?(?![0-9])", name) or re.search(r"cutlass(?:3x)?_(\d{2,3})_", name)
    if match:
        return f"sm_{match.group(1)}"
    match = re.search(r"Sm(\d{2,3})\b", name)
    if match:
        return f"sm_{match.group(1)}"
    match = re.search(r"ISA(9\d\d|1[12]\d\d)", name)
    if match:
        return f"gfx{match.group(1)}"
    match = re.match(r"_?(?:5x_cudnn_)?(volta|turing|ampere|hopper|blackwell)_", name)
    return _GENERATIONS[match.group(1)] if match else None


def readable_name(name: str) -> str:
    """What a person wants to see of a name; one of no such kind is itself.

    Of a mangled C++ name namespaces and function, with the first named template argument; of a CUTLASS wrapper the
    kernel that it wraps.
    """
    wrapped = re.match(r"(?:void )?cutlass\w*::Kernel2?<(\w+)>", name)
    if wrapped is not None:
        return wrapped.group(1)
    start = re.match(r"_ZN?[KVr]*", name)
    if start is None or not name.startswith("_Z"):
        return name
    parts, position = [], start.end()
    while (part := _length_prefixed(name, position)) is not None:
        parts.append(part[0])
        position = part[1]
    if not parts:
        return name
    argument = ""
    if name[position : position + 1] == "I":
        found = re.search(r"(?<=[A-Z_])\d{1,3}(?=[A-Za-z_]{3})", name[position : position + MOST_LOOKED_AT])
        inner = _length_prefixed(name, position + found.start()) if found else None
        argument = f"<{inner[0]}…>" if inner else "<…>"
    return "::".join(parts) + argument


def _length_prefixed(name: str, position: int) -> tuple[str, int] | None:
    """The identifier that stands there behind its length, and where it ends."""
    digits = re.compile(r"\d{1,3}").match(name, position)
    if digits is None or not 0 < int(digits.group()) <= len(name) - digits.end():
        return None
    end = digits.end() + int(digits.group())
    return name[digits.end() : end], end
