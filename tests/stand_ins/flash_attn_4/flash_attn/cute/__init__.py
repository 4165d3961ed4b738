"""flash-attn-4 4.0.0b36's two functions in float64. Like the real one it lies in a flash_attn without __init__.py."""

from attention64 import attend64, band, by_sequence


def _attend(q, k, v, scale, causal, window_size, softcap, sinks):
    left, right = window_size
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    assert all(side is None or side >= 0 for side in (left, right)), "a negative window is none of its words"
    hidden = band(q.shape[1], k.shape[1], left, 0 if causal else right, q.device)
    out, lse = attend64(q, k, v, scale, hidden, softcap=softcap, sinks=sinks)
    return out, lse.float()


def flash_attn_func(
    q,
    k,
    v,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    aux_tensors=None,
    aux_scalars=None,
    block_sparse_tensors=None,
    block_sparse_tensors_bwd=None,
    return_lse=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _attend(q, k, v, scale, causal, window_size, softcap, learnable_sink)


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

    def one(q, k, v):
        return _attend(q, k, v, scale, causal, window_size, softcap, learnable_sink)

    return by_sequence(one, q, k, v, cu_seqlens_q, cu_seqlens_k)
