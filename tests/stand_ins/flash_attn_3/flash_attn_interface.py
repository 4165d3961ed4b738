"""FlashAttention-3's two functions (hopper/flash_attn_interface.py) in float64."""

from attention64 import attend64, band, by_sequence, must_be_readable


def _attend(q, k, v, scale, causal, window_size, softcap):
    left, right = window_size
    out, lse = attend64(
        q, k, v, scale, band(q.shape[1], k.shape[1], left, 0 if causal else right, q.device), softcap=softcap
    )
    return out, lse.float()


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    must_be_readable(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _attend(q, k, v, scale, causal, window_size, softcap)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    must_be_readable(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

    def one(q, k, v):
        return _attend(q, k, v, scale, causal, window_size, softcap)

    out, lse = by_sequence(one, q, k, v, cu_seqlens_q, cu_seqlens_k)
    return (out, lse) if return_attn_probs else out
