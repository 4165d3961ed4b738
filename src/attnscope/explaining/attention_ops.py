"""Stage 6: which ops are attention, which way they go, and what PyTorch's own are called.

Pure data and pure functions over op names. Imports neither torch nor an implementation.
"""

from __future__ import annotations

import functools
import re

ATTENTION_OP = re.compile(
    r"scaled_dot_product_|_flash_attention_|_efficient_attention_|_cudnn_attention_|efficient_attention_(forward|"
    r"backward)|flex_attention|flash_attn|FlashAttn|flash_attention|flash_?mla|fwd_kvcache_mla|unified_\w*attention|"
    r"xformers\S*(attention|flash)|\b_fMHA|aiter\S*(mha|attn|attention|mla_(decode|prefill)|pa_fwd)|fusion_attention|"
    r"FusedAttn|AttnFuncWithCP|fused_attn_|EvoformerAttention|_native_multi_head_attention|natten|"
    r"[nN]eighborhood_?[aA]ttention|_vllm_fa\d_C|sgl_kernel::(fwd\b|\w*mla_decode)|"
    r"flashinfer\S*(prefill|decode|attention|mla|fmha|paged_run|ragged_run)|paged_attention|sageattn"
)
# What the libraries of attention offer besides, and what only sounds like it.
NOT_ATTENTION_OP = re.compile(
    r"_fused_sdp_choice|[rR]otary|rope|[nN]orm\b|rms_?norm|layer_?norm|and_cache|kv_cache_update|append_paged|metadata|"
    r"moe|gemm|sampl|quant|[cC]ross_?[eE]ntropy|linear_attention|gated_delta|gdn|kda|mamba",
)
BACKWARD_OP = re.compile(r"[bB]ackward|(?<![a-z])bwd(?![a-z])")
OWN_NAMES = (
    ("_scaled_dot_product_flash_attention_for_cpu", "SDPA flash on the CPU"),
    ("_scaled_dot_product_flash", "SDPA flash"),
    ("_scaled_dot_product_efficient", "SDPA efficient"),
    ("_scaled_dot_product_cudnn", "SDPA cuDNN"),
    ("_scaled_dot_product_attention_math_for_mps", "SDPA of MPS"),
    ("_scaled_dot_product_attention_math", "SDPA math"),
    ("_scaled_dot_product_fused_attention_overrideable", "SDPA of another device"),
    ("_flash_attention_", "flash (FlashAttention op)"),
    ("_efficient_attention_", "efficient (op)"),
)


@functools.lru_cache(maxsize=4096)
def names_attention(name: str) -> bool:
    """Whether an op of this name computes attention and little else."""
    return ATTENTION_OP.search(name) is not None and NOT_ATTENTION_OP.search(name) is None


@functools.lru_cache(maxsize=4096)
def is_backward(name: str) -> bool:
    """Whether an op of this name computes gradients."""
    return BACKWARD_OP.search(name) is not None


@functools.lru_cache(maxsize=4096)
def own_name(names: tuple[str, ...]) -> str | None:
    """What PyTorch's implementation among these ops is called; None where none of them is one."""
    return next((said for part, said in OWN_NAMES if any(part in name for name in names)), None)
