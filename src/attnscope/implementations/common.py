"""Stage 2: what implementations share: autograd, dense masks, tensors in the workload's layout, tiles for blocks.

Reads Workload and Inputs, writes Gradients. Must not import an implementation or a later stage, nor torch at import.
"""

from __future__ import annotations

import heapq
import importlib
import math
import os
import re
import shutil
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from attnscope.device import Device
from attnscope.driver import Form
from attnscope.implementation import Gradients, Output
from attnscope.inputs import Inputs, Tensor, torch_dtype, unpack_qkv
from attnscope.workload import Workload

T = TypeVar("T")

# What the fused kernels of torch are called in a trace, GPU kernels and ops: implementation -> regular expression.
FUSED_NAMES = {
    "sdpa_cudnn": r"cudnn.*(sdpa|flash|fort|mha)|_cudnn_attention",
    "sdpa_efficient": r"fmha_cutlass|_efficient_attention",
    "sdpa_flash": r"pytorch_flash|flash_(fwd|bwd)|_flash_attention",
}
ANY_FUSED = "|".join(FUSED_NAMES.values())


def fused_implementation(names: Iterable[str]) -> str | None:
    """The implementation whose fused kernel or op is among ``names``; None where there is none."""
    names = list(names)
    for implementation, pattern in FUSED_NAMES.items():
        if any(re.search(pattern, name) for name in names):
            return implementation
    return None


class PerInputs(Generic[T]):
    """A value made once per Inputs object, at its first call, and let go with it.

    So a mask is made where a careful user makes it, outside the loop, and the calls that are timed only pass it.
    """

    def __init__(self, make: Callable[[Inputs], T]) -> None:
        self._make = make
        self._kept: dict[int, tuple[weakref.ref[Inputs], T]] = {}

    def __call__(self, inputs: Inputs) -> T:
        """The value for these inputs."""
        key = id(inputs)
        kept = self._kept.get(key)
        if kept is not None and kept[0]() is inputs:
            return kept[1]
        value = self._make(inputs)
        self._kept[key] = (weakref.ref(inputs, lambda _: self._kept.pop(key, None)), value)
        return value


def both_visible(by_geometry: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Bool, True where geometry and mask both let a key be seen; None where neither hides any."""
    if by_geometry is None or mask is None:
        return mask if by_geometry is None else by_geometry
    return by_geometry & mask


@dataclass
class Saved:
    """A forward that autograd recorded: its output and the leaves that want a gradient, by name."""

    out: Tensor
    leaves: dict[str, Tensor]


def differentiable(inputs: Inputs) -> dict[str, Tensor | None]:
    """The tensors that a gradient may be asked for, by name; None where the workload has none."""
    return {name: getattr(inputs, name) for name in ("q", "k", "v", "bias", "sinks")}


def leaves_of(inputs: Inputs) -> dict[str, Tensor]:
    """The differentiable tensors that are there, sharing memory with ``inputs`` but requiring gradients."""
    return {name: t.detach().requires_grad_() for name, t in differentiable(inputs).items() if t is not None}


def autograd_backward(inputs: Inputs, saved: Saved, grad_out: Tensor | None = None) -> Gradients:
    """Gradients of ``sum(out * grad_out)``; the graph is kept, so that it may be called again.

    ``grad_out`` is that of ``inputs``, or a copy of it that a library can read. What the forward did not look at, as a
    bias where there is no query, has a gradient of 0.
    """
    import torch

    grad_out = inputs.grad_out if grad_out is None else grad_out
    leaves = list(saved.leaves.values())
    grads = torch.autograd.grad(saved.out, leaves, grad_out, retain_graph=True, materialize_grads=True)
    return Gradients(**{f"d{name}": grad for name, grad in zip(saved.leaves, grads, strict=True)})


def may_hide_whole_rows(workload: Workload) -> bool:
    """Whether some row of ``workload`` may see no key, sinks aside.

    By geometry: the positions that see a key form one interval, so the first and the last row decide. A bool mask keeps
    a key of each row (see ``make_inputs``), which key lengths, a window or packing may then hide.
    """
    w = workload
    if w.mask is not None and (w.lengths is not None or w.window is not None or w.packed is not None):
        return True
    if w.L == 0 or w.B == 0 or w.packed is not None:
        return False
    batches = {w.key_length(b): b for b in range(w.B)} if w.lengths is not None else {w.S: 0}

    def empty(interval: tuple[int, int]) -> bool:
        return interval[0] >= interval[1]

    return any(empty(w.row_interval(b, i)) for b in batches.values() for i in (0, w.L - 1))


def empty_like_inputs(w: Workload, dtype: Any, place: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Unwritten tensors of the shapes of q, k, v in the workload's layout; views of one buffer where that is packed."""
    import torch

    if w.layout == "qkv":
        return unpack_qkv(torch.empty(w.B, w.L, 3, w.H, w.D, dtype=dtype, device=place))
    shapes = ((w.H, w.L, w.D), (w.H_kv, w.S, w.D), (w.H_kv, w.S, w.D_v))
    q, k, v = (_empty(w, heads, length, dim, dtype, place) for heads, length, dim in shapes)
    return q, k, v


def power_of_2(least: int) -> int:
    """The smallest power of 2 that is no less than a number from 1 on."""
    return 1 << (least - 1).bit_length()


def head_dim_block(dim: int) -> int:
    """A head dim as a Triton kernel holds it: a power of 2, at least the 16 of a tensor core product."""
    return max(16, power_of_2(dim))


def output_forms(w: Workload) -> tuple[Form, Form]:
    """(shape, strides, dtype) of out ``(B, H, L, D_v)`` in the workload's layout and of lse ``(B, H, L)``, dense."""
    import torch

    row, head = (w.D_v, w.L * w.D_v) if w.layout == "bhld" else (w.H * w.D_v, w.D_v)
    out = (w.B, w.H, w.L, w.D_v), (w.L * w.H * w.D_v, head, row, 1), torch_dtype(w.dtype)
    return out, ((w.B, w.H, w.L), (w.H * w.L, w.L, 1), torch.float32)


def empty_out(w: Workload, dtype: Any, place: Any) -> Tensor:
    """Unwritten (B, H, L, D_v) in the workload's layout."""
    return _empty(w, w.H, w.L, w.D_v, dtype, place)


def _empty(w: Workload, heads: int, length: int, dim: int, dtype: Any, place: Any) -> Tensor:
    import torch

    if w.layout == "bhld":
        return torch.empty(w.B, heads, length, dim, dtype=dtype, device=place)
    return torch.empty(w.B, length, heads, dim, dtype=dtype, device=place).transpose(1, 2)


def nothing_seen(w: Workload, q: Tensor, sinks: Tensor | None = None) -> Output:
    """What a forward without rows or without keys returns: zeros, and an lse of -inf or of the sinks alone."""
    out = empty_out(w, q.dtype, q.device).zero_()
    lse = out.new_full((w.B, w.H, w.L), -math.inf, dtype=output_forms(w)[1][2])
    return Output(out, lse if sinks is None else lse.copy_(sinks[None, :, None].expand(lse.shape)))


def compiler_reasons(device: Device) -> list[str]:
    """What torch.compile would miss here, found without compiling."""
    found = []
    if device.kind == "cuda":
        if find_spec("triton") is None:
            found.append("torch.compile needs Triton on a GPU, and package triton is not installed")
        language, compilers = "C", [os.environ.get("CC", "cc"), "gcc", "clang"]
    else:
        language, compilers = "C++", [os.environ.get("CXX", "g++")]
    if not any(map(shutil.which, compilers)):
        found.append(f"torch.compile needs a {language} compiler, and there is no {' or '.join(compilers)} here")
    elif not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        found.append("torch.compile needs Python's C headers, and Python.h is not installed")
    return found


def jit_module(name: str, functions: Mapping[str, Callable[..., Any]], unspecialized: Sequence[str]) -> Any:
    """The imported module ``name`` with its ``functions`` made by ``triton.jit`` and ``tl`` beside them, once.

    ``unspecialized`` are arguments whose values shall not make Triton compile anew. Raises what importing triton does.
    """
    module = sys.modules[name]
    if "tl" not in vars(module):
        triton = importlib.import_module("triton")
        language = importlib.import_module("triton.language")
        made = {name: triton.jit(f, do_not_specialize=unspecialized) for name, f in functions.items()}
        vars(module).update(made, tl=language)
    return module


NO_TILE = -1  # where a block has nothing more to do


def deal_tiles(sections: Iterable[Iterable[tuple[int, int]]], blocks: int) -> list[list[int]]:
    """Tiles of each of ``blocks``, in the order in which it works on them.

    ``sections`` follow one another; each gives (cost, number) of its tiles, the longest first. A tile goes to the block
    with the least to do so far, all earlier sections counted, so blocks end within one tile of each other.
    """
    dealt: list[list[int]] = [[] for _ in range(blocks)]
    loads = list(range(blocks))  # load * blocks + block, as one number: a heap of them is quick
    for section in sections:
        for cost, number in section:
            least = loads[0]
            dealt[least % blocks].append(number)
            heapq.heapreplace(loads, least + cost * blocks)
    return dealt


def turns_of(dealt: Sequence[Sequence[int]]) -> list[int]:
    """What blocks do turn by turn, side by side, ``NO_TILE`` where one is through.

    One turn more than there are, since a block looks up a tile while it works on the one before.
    """
    blocks = len(dealt)
    table = [NO_TILE] * (blocks * (1 + max(map(len, dealt))))
    for block, tiles in enumerate(dealt):
        table[block : block + blocks * len(tiles) : blocks] = tiles
    return table
