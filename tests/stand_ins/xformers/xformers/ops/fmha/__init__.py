"""xformers 0.0.35's memory_efficient_attention in float64, with what it demands of tensors and biases."""

import importlib.util

import torch
from attention64 import attend64, must_be_readable

from . import attn_bias as attn_bias
from .attn_bias import BlockDiagonalMask as BlockDiagonalMask
from .attn_bias import LowerTriangularMask as LowerTriangularMask

if importlib.util.find_spec("flash_attn"):  # so does the real one, whoever that package belongs to
    import flash_attn.flash_attn_interface  # noqa: F401


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    must_be_readable(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    shape = query.shape
    if query.ndim == 5:
        assert key.shape[:1] + key.shape[2:4] == query.shape[:1] + query.shape[2:4], "expand keys and values yourself"
        if key.requires_grad:
            raise NotImplementedError("operator does not support BMGHK format")
        query, key, value = (t.flatten(2, 3) for t in (query, key, value))
    if isinstance(attn_bias, torch.Tensor):
        assert attn_bias.shape == (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        assert attn_bias.dtype == query.dtype and attn_bias.stride(-1) <= 1
        assert all(stride % (16 // attn_bias.element_size()) == 0 for stride in attn_bias.stride()[:-1])
        out, _ = attend64(query, key, value, scale, added=attn_bias.double(), dropout=p)
    else:
        hidden = None if attn_bias is None else attn_bias.hidden(query.shape[1], key.shape[1], query.device)
        if isinstance(attn_bias, BlockDiagonalMask):
            assert query.shape[0] == 1
        out, _ = attend64(query, key, value, scale, hidden, dropout=p)
    return out.reshape(*shape[:-1], value.shape[-1])
