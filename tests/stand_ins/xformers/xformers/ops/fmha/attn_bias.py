"""xformers 0.0.35's bias classes, as far as they are built here; each knows what it hides."""

from dataclasses import dataclass

import torch
from attention64 import band


class LowerTriangularMask:
    def hidden(self, rows, keys, device):
        return torch.arange(keys, device=device)[None, None] > torch.arange(rows, device=device)[None, :, None]


class LowerTriangularFromBottomRightMask:
    def hidden(self, rows, keys, device):
        return band(rows, keys, -1, 0, device)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    _window_size: int

    def hidden(self, rows, keys, device):
        return band(rows, keys, self._window_size - 1, 0, device)


@dataclass
class LocalAttentionFromBottomRightMask:
    window_left: int
    window_right: int

    def hidden(self, rows, keys, device):
        return band(rows, keys, self.window_left, self.window_right, device)


@dataclass
class BlockDiagonalMask:
    queries: list
    keys: list
    block: object = None

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
        assert device is not None, "the real one would take the GPU"
        return cls(list(q_seqlen), list(q_seqlen if kv_seqlen is None else kv_seqlen))

    def _with(self, block):
        return BlockDiagonalMask(self.queries, self.keys, block)

    def make_causal(self):
        return self._with(LowerTriangularMask().hidden)

    def make_causal_from_bottomright(self):
        if any(keys < queries for queries, keys in zip(self.queries, self.keys, strict=True)):
            raise ValueError("Expected `num_keys >= num_queries`")
        return self._with(LowerTriangularFromBottomRightMask().hidden)

    def make_local_attention(self, window_size):
        def block(rows, keys, device):
            apart = torch.arange(rows, device=device)[None, :, None] - torch.arange(keys, device=device)[None, None]
            return (apart < 0) | (apart >= window_size)

        return self._with(block)

    def make_local_attention_from_bottomright(self, window_size):
        self.make_causal_from_bottomright()
        return self._with(LowerTriangularFromBottomRightLocalAttentionMask(window_size).hidden)

    def hidden(self, rows, keys, device):
        assert (rows, keys) == (sum(self.queries), sum(self.keys))
        hidden = torch.ones(1, rows, keys, dtype=torch.bool, device=device)
        row = key = 0
        for queries, block_keys in zip(self.queries, self.keys, strict=True):
            inner = self.block(queries, block_keys, device) if self.block else False
            hidden[:, row : row + queries, key : key + block_keys] = inner
            row, key = row + queries, key + block_keys
        return hidden
