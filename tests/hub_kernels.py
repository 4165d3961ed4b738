"""Small kernel packages of our own, built as the hub lays them out: ``build/<variant>/`` with code and metadata."""

from __future__ import annotations

import json
from pathlib import Path

VARIANT = "torch-cpu"
ATTENTION = '''
"""A FlashAttention-like entry in float32 inside."""
import os
import torch

if os.environ.get("HUB_TEST_LOG"):
    with open(os.environ["HUB_TEST_LOG"], "a") as log:
        log.write(",".join(sorted(name for name in os.environ if "TOKEN" in name and "PATH" not in name)) + "\\n")

def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    dtype = q.dtype
    q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    L, S = scores.shape[-2:]
    distance = torch.arange(S, device=q.device) - torch.arange(L, device=q.device)[:, None] - (S - L)
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros(L, S, dtype=torch.bool, device=q.device)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return (weights @ v).transpose(1, 2).to(dtype)

'''


def files(code: str = ATTENTION, variant: str = VARIANT, **metadata: object) -> dict[str, bytes]:
    """Path -> content of a kernel repository."""
    facts: dict[str, object] = {
        "name": "small-attention", "id": "_small_attention_1", "version": 1, "license": "Apache-2.0",
        "python-depends": [], "backend": {"type": "cpu"},
    }  # fmt: skip
    return {
        f"build/{variant}/__init__.py": code.encode(),
        f"build/{variant}/metadata.json": json.dumps(facts | metadata).encode(),
        f"build/{variant}/table.bin": bytes(range(256)),
    }


def write(folder: Path, code: str = ATTENTION, variant: str = VARIANT, **metadata: object) -> Path:
    """The same in a folder."""
    for path, body in files(code, variant, **metadata).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(body)
    return folder
