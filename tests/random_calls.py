"""Random calls of ``scaled_dot_product_attention``: shapes, strides, masks, dtypes, gradients, heads, switches.

The same number gives the same call. On a GPU only calls are made that kernels survive (a misaligned address costs the
process its GPU): ``hazards`` adds those that may be asked about and must not be run.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnscope.implementations.common import fused_implementation

LENGTHS = (1, 2, 7, 16, 64, 77, 128, 200)
DIMS = {"cpu": (8, 16, 33, 36, 64), "cuda": (8, 16, 36, 40, 64, 64, 72, 80, 128, 128, 160, 256, 264, 320)}
DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "cuda": (*(torch.bfloat16, torch.float16) * 4, torch.float32, torch.float32, torch.float64),
}
PINNED = (
    [SDPBackend.MATH],
    [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
)


@dataclass
class RandomCall:
    """One call: its tensors, its options, which switches are on, whether gradients are recorded."""

    seed: int
    tensors: tuple[Any, Any, Any, Any]
    options: dict[str, Any]
    pinned: list[SDPBackend] | None
    grad: bool

    @contextlib.contextmanager
    def state(self) -> Iterator[None]:
        """The state of torch in which the call is made."""
        pin = contextlib.nullcontext() if self.pinned is None else sdpa_kernel(self.pinned)
        with torch.set_grad_enabled(self.grad), pin:
            yield

    def __str__(self) -> str:
        told = [f"{tuple(t.shape)}/{t.stride()}+{t.storage_offset()} {t.dtype}" for t in self.tensors if t is not None]
        wants = any(t is not None and t.requires_grad for t in self.tensors)
        return f"call {self.seed}: {'; '.join(told)}; {self.options}; {self.pinned}; grad {self.grad and wants}"


def random_call(seed: int, device: str, *, hazards: bool = False) -> RandomCall:
    """The call of that number on ``cpu`` or ``cuda``."""
    rng = random.Random(seed)
    dtype = rng.choice(DTYPES[device])
    b, low = rng.choice((1, 2, 3)), rng.choice(LENGTHS)
    keys = low if rng.random() < 0.6 else rng.choice(LENGTHS)
    h, group = rng.choice(((1, 1), (2, 1), (4, 1), (4, 2), (8, 8), (8, 1)))
    dim = rng.choice(DIMS[device])
    dim_v = dim if dim > 128 or rng.random() < 0.85 else rng.choice([d for d in DIMS[device] if d <= 128])
    layout = rng.choice((*("bhld", "blhd", "rows") * 3, "gaps", "three dims", "offset" if hazards else "blhd"))

    def tensor(heads: int, rows: int, size: int) -> Any:
        made = _laid_out(layout, b, heads, rows, size, dtype, device)
        return made[0] if layout == "three dims" else made

    q, k, v = tensor(h, low, dim), tensor(h // group, keys, dim), tensor(h // group, keys, dim_v)
    wants = rng.random() < 0.4
    for t in (q, k, v):
        t.requires_grad_(wants)
    mask = _mask(rng, b, h, low, keys, dtype, device, layout) if rng.random() < 0.3 else None
    shared = h // group == 1 and rng.random() < 0.3  # one key head, which broadcasts unsaid
    options = {
        "dropout_p": rng.choice((0.0, 0.0, 0.0, 0.25, 0.1)),
        "is_causal": mask is None and rng.random() < 0.4,
        "scale": rng.choice((None, None, 0.3)),
        "enable_gqa": (group > 1 and not shared) or rng.random() < 0.1,
    }
    pinned = list(rng.choice(PINNED)) if rng.random() < 0.2 else None
    return RandomCall(seed, (q, k, v, mask), options, pinned, rng.random() < 0.8)


def _laid_out(layout: str, b: int, h: int, rows: int, size: int, dtype: Any, device: str) -> Any:
    def normal(*shape: int) -> Any:
        return torch.randn(shape, device=device).to(dtype)

    if layout == "blhd":
        return normal(b, rows, h, size).transpose(1, 2)
    if layout == "gaps":  # every second number of a row
        return normal(b, h, rows, 2 * size)[..., ::2]
    if layout == "rows":  # every second row, and heads of a wider buffer
        return normal(b, h + 1, 2 * rows, size)[:, 1:, ::2]
    if layout == "offset":  # begins one number into its buffer
        return normal(b * h * rows * size + 1)[1:].view(b, h, rows, size)
    return normal(b, h, rows, size)


def _mask(rng: random.Random, b: int, h: int, low: int, keys: int, dtype: Any, device: str, layout: str) -> Any:
    whole = layout == "three dims"
    shapes = [(low, keys)] if whole else [(low, keys), (1, 1, low, keys), (b, 1, low, keys), (b, h, low, keys)]
    shapes += [(h, low, keys)] if h > 1 else []
    shapes += [] if whole else [(b, 1, 1, keys)]
    shape = rng.choice(shapes)
    kind = rng.choice(("bool", "bool", "bool", "same", "same", "gradient", "gaps"))
    if kind == "bool":
        made = torch.rand(shape, device=device) < 0.7
        made[..., 0] = True
        return made
    if kind == "gaps" and keys > 1:
        return torch.zeros(*shape[:-1], 2 * keys, device=device, dtype=dtype)[..., ::2]
    return torch.zeros(shape, device=device, dtype=dtype).requires_grad_(kind == "gradient")


def implementation_of(names: list[str]) -> str:
    """The implementation that these kernels or ops are of; those of math are the ones that hold a softmax."""
    fused = fused_implementation(names)
    if fused is not None:
        return fused
    return "sdpa_math" if any("softmax" in name.lower() for name in names) else f"unknown: {sorted(set(names))}"
