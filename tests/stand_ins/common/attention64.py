"""Attention in float64 for the stand-ins: (B, L, H, D) tensors, positions counted from the last key."""

import torch


def attend64(q, k, v, scale, hidden=None, added=None, softcap=0.0, sinks=None, dropout=0.0):
    """out (B, L, H, D_v) in q's dtype, lse (B, H, L) float64 with -inf for rows that see nothing.

    ``hidden`` is bool (B or 1, L, S), ``added`` broadcasts to (B, H, L, S), ``sinks`` is (H,).
    """
    q64, k64, v64 = (t.double().transpose(1, 2) for t in (q, k, v))
    group = q64.shape[1] // k64.shape[1]
    k64, v64 = k64.repeat_interleave(group, 1), v64.repeat_interleave(group, 1)
    scores = q64 @ k64.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if added is not None:
        scores = scores + added
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(
        torch.isneginf(lse)[..., None], 0.0, torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    )
    if sinks is not None:
        weights = weights[..., :-1]
    if dropout:
        weights = weights * (torch.rand(weights.shape) >= dropout) / (1 - dropout)
    return (weights @ v64).transpose(1, 2).to(q.dtype), lse


def band(rows, keys, left, right, device):
    """Bool (1, L, S), True where hidden: a row sees ``left`` keys before and ``right`` after its own; below 0: all."""
    own = torch.arange(rows, device=device)[:, None] + keys - rows
    others = torch.arange(keys, device=device)[None]
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device=device)
    if left is not None and left >= 0:
        hidden |= others < own - left
    if right is not None and right >= 0:
        hidden |= others > own + right
    return hidden[None]


def by_sequence(call, q, k, v, cu_q, cu_k):
    """``call(q, k, v)`` on each sequence of (T, H, D) tensors -> out (T, H, D_v), lse (H, T)."""
    outs, lses = [], []
    for i in range(len(cu_q) - 1):
        rows, keys = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        out, lse = call(q[None, rows], k[None, keys], v[None, keys])
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, -1)


def must_be_readable(*tensors):
    for tensor in tensors:
        if tensor.stride(-1) != 1:
            raise RuntimeError("Input tensor must have contiguous last dimension")
