"""sageattention 1.0.6's two functions in float64, down to the keys that it changes for its caller."""

import torch
from attention64 import attend64, band, by_sequence, must_be_readable


def _attend(q, k, v, is_causal, scale):
    assert not is_causal or q.shape[1] == k.shape[1]
    hidden = band(q.shape[1], k.shape[1], -1, 0, q.device) if is_causal else None
    return attend64(q, k, v, scale, hidden)


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs):
    assert q.size(-1) in [64, 96, 128]
    must_be_readable(q, k, v)
    if smooth_k:
        k -= k.mean(dim=1 if tensor_layout == "NHD" else 2, keepdim=True)
    if tensor_layout == "HND":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, _ = _attend(q, k, v, is_causal, q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    return out.transpose(1, 2) if tensor_layout == "HND" else out


def sageattn_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    is_causal=False,
    sm_scale=None,
    smooth_k=True,
    **kwargs,
):
    assert q.size(-1) in [64, 128]
    assert cu_seqlens_q.dtype in (torch.int32, torch.int64)
    must_be_readable(q, k, v)
    if smooth_k:
        k -= k.mean(dim=0, keepdim=True)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    return by_sequence(lambda q, k, v: _attend(q, k, v, is_causal, scale), q, k, v, cu_seqlens_q, cu_seqlens_k)[0]
