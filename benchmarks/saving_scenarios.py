"""The calls whose findings savings.py lets come true: each before and after its remedy.

A scenario's ``make`` returns the two calls. What a remedy needs is prepared outside of them, as a reader of the finding
would. On a CPU the sizes are small and only findings that do not need a GPU are there. Imports torch inside functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

Call = Callable[[], object]
Pair = tuple[Call, Call]


@dataclass(frozen=True)
class Scenario:
    """A finding, the call that shows it, and its remedy.

    ``clock`` is ``gpu`` (events around a queued call) or ``wall``. ``steps`` calls are recorded, ``ops`` False without
    CPU ops. ``each_once`` marks a call that does new work each time: it is repeated no more than it must be. ``same``:
    both calls compute the same, which is looked at before they are timed.
    """

    name: str
    finding: str
    change: str
    make: Callable[[str], Pair]
    cpu: bool = False
    clock: str = "gpu"
    steps: int = 5
    ops: bool = True
    each_once: bool = False
    same: bool = True


def tensors(device: str, *shapes: tuple[int, ...], dtype: str = "bfloat16", grad: bool = False) -> list[Any]:
    import torch

    generator = torch.Generator(device).manual_seed(0)
    made = [torch.randn(shape, generator=generator, device=device, dtype=torch.float32) for shape in shapes]
    return [one.to(getattr(torch, dtype)).requires_grad_(grad) for one in made]


def qkv(device: str, B: int, H: int, L: int, D: int, **more: Any) -> list[Any]:
    return tensors(device, *[(B, H, L, D)] * 3, **more)


def sdpa(*args: Any, **options: Any) -> Any:
    import torch

    return torch.nn.functional.scaled_dot_product_attention(*args, **options)


def only(backend: str) -> AbstractContextManager[Any]:
    """SDPA by one of its paths."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, backend))


def unfused(q: Any, k: Any, v: Any, hidden: Any = None, *, in_place: bool = True, drop: float = 0.0) -> Any:
    """Product, scale, mask, softmax, dropout, product."""
    import torch

    scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]))
    if hidden is not None:
        fill = scores.masked_fill_ if in_place else scores.masked_fill
        scores = fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(torch.nn.functional.dropout(weights, drop, training=drop > 0), v)


def hidden_mask(device: str, L: int) -> Any:
    import torch

    return torch.ones(L, L, dtype=torch.bool, device=device).triu(1)


def without_grad(call: Call) -> Call:
    import torch

    def wrapped() -> object:
        with torch.no_grad():
            return call()

    return wrapped


def forwards(before: Call, after: Call) -> Pair:
    return without_grad(before), without_grad(after)


def with_backward(forward: Callable[[], Any], inputs: list[Any]) -> Call:
    """Forward and all gradients, of the same gradient for each forward."""
    import torch

    (gradient,) = tensors(inputs[0].device.type, tuple(inputs[0].shape), dtype=str(inputs[0].dtype).split(".")[1])
    return lambda: torch.autograd.grad(forward(), inputs, gradient)


# --- unfused and the math path ----------------------------------------------------------------------------------------


def unfused_forward(device: str) -> Pair:
    q, k, v = qkv(device, 4, 16, 2048, 128)
    return forwards(lambda: unfused(q, k, v), lambda: sdpa(q, k, v))


def unfused_fp32(device: str) -> Pair:
    q, k, v = qkv(device, 4, 12, 1024, 64, dtype="float32")
    return forwards(lambda: unfused(q, k, v), lambda: sdpa(q, k, v))


def unfused_training(device: str) -> Pair:
    inputs = qkv(device, 8, 16, 1024, 64, grad=True)
    return with_backward(lambda: unfused(*inputs), inputs), with_backward(lambda: sdpa(*inputs), inputs)


def multihead_attention(device: str) -> Pair:
    import torch

    module = torch.nn.MultiheadAttention(1024, 16, batch_first=True, device=device, dtype=torch.bfloat16).eval()
    (x,) = tensors(device, (16, 1024, 1024))

    def after() -> object:
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return module(x, x, x, need_weights=False)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)

    return forwards(lambda: module(x, x, x, average_attn_weights=False), after)


def math_path(device: str) -> Pair:
    q, k, v = qkv(device, 4, 16, 2048, 64)

    def before() -> object:
        with only("MATH"):
            return sdpa(q, k, v, is_causal=True)

    return forwards(before, lambda: sdpa(q, k, v, is_causal=True))


# --- masks ------------------------------------------------------------------------------------------------------------


def masked_fill_copy(device: str) -> Pair:
    B, L = (8, 1024) if device == "cuda" else (1, 128)
    q, k, v = qkv(device, B, 16, L, 64)
    hidden = hidden_mask(device, L)
    return forwards(lambda: unfused(q, k, v, hidden, in_place=False), lambda: unfused(q, k, v, hidden))


def mask_rebuilt(device: str) -> Pair:
    import torch

    L = 8192 if device == "cuda" else 256
    q, k, v = qkv(device, 1, 4, L, 64)

    def bias() -> Any:
        places = torch.arange(L, device=device)
        hidden = places > places[:, None]
        return torch.zeros(L, L, device=device, dtype=q.dtype).masked_fill(hidden, float("-inf"))

    kept = bias()
    return forwards(lambda: sdpa(q, k, v, attn_mask=bias()), lambda: sdpa(q, k, v, attn_mask=kept))


def mask_converted(device: str) -> Pair:
    import torch

    q, k, v = qkv(device, 8, 16, 1024, 64)
    seen = torch.rand(8, 16, 1024, 1024, device=device) < 0.9
    bias = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, float("-inf"))

    def with_mask(mask: Any) -> Call:
        def call() -> object:
            with only("EFFICIENT_ATTENTION"):
                return sdpa(q, k, v, attn_mask=mask)

        return call

    return forwards(with_mask(seen), with_mask(bias))


def causal_tensor(device: str) -> Pair:
    import torch

    q, k, v = qkv(device, 8, 16, 2048, 64)

    def before() -> object:
        mask = torch.ones(2048, 2048, dtype=torch.bool, device=device).tril()
        with only("EFFICIENT_ATTENTION"):
            return sdpa(q, k, v, attn_mask=mask)

    return forwards(before, lambda: sdpa(q, k, v, is_causal=True))


def all_true_tensor(device: str) -> Pair:
    import torch

    q, k, v = qkv(device, 8, 16, 2048, 64)

    def before() -> object:
        mask = torch.ones(8, 1, 2048, 2048, dtype=torch.bool, device=device)
        with only("EFFICIENT_ATTENTION"):
            return sdpa(q, k, v, attn_mask=mask)

    return forwards(before, lambda: sdpa(q, k, v))


# --- copies and casts -------------------------------------------------------------------------------------------------


def layout_copies(device: str) -> Pair:
    B, L = (8, 2048) if device == "cuda" else (1, 128)
    made = tensors(device, *[(B, L, 16, 64)] * 3)
    q, k, v = (one.transpose(1, 2) for one in made)
    return forwards(
        lambda: sdpa(q.contiguous(), k.contiguous(), v.contiguous(), is_causal=True),
        lambda: sdpa(q, k, v, is_causal=True),
    )


def grouped_heads(device: str) -> Pair:
    B, L = (32, 512) if device == "cuda" else (1, 128)
    q, k, v = tensors(device, (B, 32, L, 128), *[(B, 8, L, 128)] * 2)
    return forwards(
        lambda: sdpa(q, k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=1), is_causal=True),
        lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True),
    )


def casts(device: str) -> Pair:
    import torch

    B, L = (8, 2048) if device == "cuda" else (1, 128)
    wide = qkv(device, B, 16, L, 64, dtype="float32")
    narrow = [one.to(torch.bfloat16) for one in wide]
    return forwards(
        lambda: sdpa(*(one.to(torch.bfloat16) for one in wide), is_causal=True), lambda: sdpa(*narrow, is_causal=True)
    )


def dropout(device: str) -> Pair:
    B, L = (8, 1024) if device == "cuda" else (1, 128)
    q, k, v = qkv(device, B, 16, L, 64)
    return forwards(lambda: unfused(q, k, v, drop=0.1), lambda: unfused(q, k, v))


def pageable(device: str) -> Pair:
    import torch

    tensor = torch.rand(16 << 20)
    pinned = tensor.pin_memory()
    return lambda: tensor.to(device), lambda: pinned.to(device, non_blocking=True)


# --- products ---------------------------------------------------------------------------------------------------------


def tf32(device: str) -> Pair:
    import torch

    a, b = tensors(device, (4096, 4096), (4096, 4096), dtype="float32")

    def product(precision: str) -> Call:
        def call() -> object:
            torch.set_float32_matmul_precision(precision)
            try:
                return a @ b
            finally:
                torch.set_float32_matmul_precision("highest")

        return call

    return forwards(product("highest"), product("high"))


def misaligned(device: str) -> Pair:
    a, b = tensors(device, (8192, 4095), (4095, 4095))
    wide_a, wide_b = tensors(device, (8192, 4096), (4096, 4096))
    return forwards(lambda: a @ b, lambda: wide_a @ wide_b)


# --- choices ----------------------------------------------------------------------------------------------------------


def chosen(backend: str, *, backward: bool, B: int = 4, L: int = 2048, D: int = 128) -> Callable[[str], Pair]:
    """A path of SDPA that was forced, against PyTorch's choice."""

    def make(device: str) -> Pair:
        inputs = qkv(device, B, 16, L, D, grad=backward)

        def forced() -> Any:
            with only(backend):
                return sdpa(*inputs, is_causal=True)

        def free() -> Any:
            return sdpa(*inputs, is_causal=True)

        if backward:
            return with_backward(forced, inputs), with_backward(free, inputs)
        return forwards(forced, free)

    return make


@contextmanager
def deterministic() -> Iterator[None]:
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def deterministic_backward(device: str) -> Pair:
    inputs = qkv(device, 8, 16, 2048, 64, grad=True)

    def forward() -> Any:
        with only("FLASH_ATTENTION"):
            return sdpa(*inputs, is_causal=True)

    plain = with_backward(forward, inputs)

    def before() -> object:
        with deterministic():
            return plain()

    return before, plain


# --- host -------------------------------------------------------------------------------------------------------------


def small_steps(device: str) -> Pair:
    """Many small layers, eager and as a CUDA graph."""
    import torch

    x, *weights = tensors(device, (4, 64, 256), *[(256, 256)] * 16)
    static = x.clone()

    def layers(value: Any) -> Any:
        for weight in weights:
            q = (value @ weight).view(4, 64, 4, 64).transpose(1, 2)
            value = torch.nn.functional.layer_norm(value + sdpa(q, q, q).transpose(1, 2).reshape(4, 64, 256), (256,))
        return value

    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                layers(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers(static)
    return without_grad(lambda: layers(x)), graph.replay


def new_plans(device: str) -> Pair:
    """A new length each time, so that cuDNN plans anew; and one length again and again."""
    longest = qkv(device, 2, 8, 4096, 64)
    lengths = iter(range(1032, 4096, 8))

    def call(length: int) -> object:
        with only("CUDNN_ATTENTION"):
            return sdpa(*(one[:, :, :length] for one in longest))

    return forwards(lambda: call(next(lengths)), lambda: call(1024))


SCENARIOS = (
    Scenario("unfused", "unfused-attention", "product, softmax, product → SDPA", unfused_forward),
    Scenario("unfused-fp32", "unfused-attention", "the same in fp32", unfused_fp32),
    Scenario("unfused-training", "unfused-attention", "the same with its backward", unfused_training),
    Scenario("multihead-attention", "unfused-attention", "MultiheadAttention: need_weights=False", multihead_attention),
    Scenario("math-path", "math-path", "the math path → PyTorch's choice", math_path),
    Scenario("masked-fill-copy", "masked-fill-copy", "masked_fill → masked_fill_", masked_fill_copy, cpu=True),
    Scenario("mask-rebuilt", "mask-rebuilt-per-call", "the mask built once", mask_rebuilt, cpu=True),
    Scenario("mask-converted", "mask-rebuilt-per-call", "a bool mask → an additive one, once", mask_converted),
    Scenario("mask-causal", "mask-keeps-flash-away", "a triangle as attn_mask → is_causal", causal_tensor),
    Scenario("mask-all-true", "mask-keeps-flash-away", "an all-True attn_mask → none", all_true_tensor),
    Scenario("layout-copies", "layout-copies", "without .contiguous()", layout_copies, cpu=True),
    Scenario("grouped-heads", "gqa-materialised", "repeat_interleave → enable_gqa", grouped_heads, cpu=True),
    Scenario("casts", "dtype-casts", "cast once, outside the call", casts, cpu=True),
    Scenario("dropout", "dropout-at-inference", "dropout off", dropout, cpu=True, same=False),
    Scenario("tf32", "tf32-off", 'set_float32_matmul_precision("high")', tf32),
    Scenario("misaligned", "misaligned-gemm", "sizes padded from 4095 to 4096", misaligned, same=False),
    Scenario("efficient-to-choice", "better-implementation", "efficient → PyTorch's choice",
             chosen("EFFICIENT_ATTENTION", backward=False)),
    Scenario("flash-to-choice", "better-implementation", "flash → PyTorch's choice",
             chosen("FLASH_ATTENTION", backward=False)),
    Scenario("flash-to-choice-training", "better-implementation", "the same with its backward",
             chosen("FLASH_ATTENTION", backward=True, D=64)),
    Scenario("deterministic", "deterministic-backward", "deterministic algorithms off", deterministic_backward),
    Scenario("pageable", "pageable-copies", "pageable → pinned memory", pageable, clock="wall"),
    Scenario("launch-bound", "launch-bound", "eager → a CUDA graph", small_steps, clock="wall"),
    Scenario("launch-bound-no-ops", "launch-bound", "the same, recorded without CPU ops", small_steps, clock="wall",
             ops=False),
    Scenario("new-plans", "built-in-window", "cuDNN's plans built before", new_plans, clock="wall", steps=3,
             each_once=True, same=False),
)  # fmt: skip
