"""flash-attn 2.8.3's two functions in float64: signatures, layouts, and what they do with lse."""

import torch
from attention64 import attend64, band, by_sequence, must_be_readable


def _attend(q, k, v, scale, causal, window_size, softcap, slopes, longest_key, dropout):
    left, right = window_size
    left = -1 if left >= longest_key else left
    right = 0 if causal else right
    is_causal = left < 0 and right == 0
    rows, keys = q.shape[1], k.shape[1]
    added = None
    if slopes is not None:
        own = torch.arange(rows)[:, None] + keys - rows
        others = torch.arange(keys)[None]
        # a causal kernel adds the same to all rows: softmax does not see it, lse does
        added = slopes.double()[:, None, None] * (others if is_causal else -(own - others).abs())
    out, lse = attend64(q, k, v, scale, band(rows, keys, left, right, q.device), added, softcap, dropout=dropout)
    return out, torch.where(torch.isneginf(lse), torch.inf, lse).float()


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    must_be_readable(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _attend(q, k, v, scale, causal, window_size, softcap, alibi_slopes, k.shape[1], dropout_p)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    must_be_readable(q, k, v)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q and int(cu_seqlens_k.diff().max()) == max_seqlen_k
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

    def one(q, k, v):
        return _attend(q, k, v, scale, causal, window_size, softcap, alibi_slopes, max_seqlen_k, dropout_p)

    out, lse = by_sequence(one, q, k, v, cu_seqlens_q, cu_seqlens_k)
    return (out, lse, None) if return_attn_probs else out
