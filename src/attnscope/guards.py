"""Stage 3: what a check does around a call, so that no call can pass by luck or by cheating.

Fresh memory is poisoned with NaN, inputs are compared bit by bit before and after, and a GPU call is made behind a spin
kernel, on inputs that are filled only after it. Must not import an implementation or a later stage.
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnscope.inputs import Inputs, Tensor
from attnscope.strides import own_memory

# glibc's mallopt(M_PERTURB, value) fills what malloc hands out with the complement of value's low byte, and what free
# takes back with that byte (mallopt(3)). 0x100 is not 0, which would switch it off, and its low byte is 0: fresh memory
# is all ones, which is NaN in every floating type.
M_PERTURB = -6
ALL_ONES = 0x100
POISON_COPIES = 2
SMALL_BLOCK = 2**20  # bytes; kSmallSize of torch's CUDACachingAllocator
SPIN_CYCLES = 20_000_000  # about 10 ms: longer than the host needs to launch a call
FLOATS_FILLED = ("q", "k", "v", "grad_out", "bias", "sinks")


@contextmanager
def poisoned_memory(inputs: Inputs) -> Iterator[None]:
    """While it lasts, memory that an implementation allocates holds NaN until it is written.

    On a CPU glibc does it for every allocation, native ones too. On a GPU every free block of torch's caching allocator
    is filled with NaN, and new ones of the results' sizes are added, from which the next allocations are served.
    Nothing intercepts torch's functions, so what runs is what is timed.
    """
    if inputs.q.device.type == "cuda":
        _poison_cached_blocks(inputs)
        yield
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library: freed blocks are all there is
        _poison_cached_blocks(inputs)
        yield
        return
    mallopt(M_PERTURB, ALL_ONES)
    try:
        yield
    finally:
        mallopt(M_PERTURB, 0)


def _poison_cached_blocks(inputs: Inputs) -> None:
    import torch

    w, tensors = inputs.workload, inputs.tensors()
    like = [tensors[name] for name in ("grad_out", "q", "k", "v", "bias", "sinks") if name in tensors]
    sizes = [t.numel() * t.element_size() for t in like] + [4 * w.B * w.H * w.L]
    sizes = sizes * POISON_COPIES
    device = inputs.q.device
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
        free = free_block_sizes(torch.cuda.memory_snapshot(), device.index, stream)
        sizes = free + not_served(free, sizes)
    blocks = [torch.empty(size, dtype=torch.uint8, device=device).fill_(255) for size in sizes]
    del blocks


def free_block_sizes(snapshot: list[dict[str, Any]], device: int, stream: int) -> list[int]:
    """Sizes of the free blocks that an allocation of that size on this stream gets, the largest first.

    ``snapshot`` is what torch.cuda.memory_snapshot returns. Requests up to 1 MiB are served from small segments, others
    from large ones; a graph's private pool serves its graph alone.
    """
    found = []
    for segment in snapshot:
        if (segment["device"], segment["stream"]) != (device, stream) or any(segment.get("segment_pool_id", (0, 0))):
            continue
        small = segment["segment_type"] == "small"
        sizes = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        found += [size for size in sizes if (size <= SMALL_BLOCK) == small]
    return sorted(found, reverse=True)


def not_served(free: list[int], sizes: list[int]) -> list[int]:
    """Those of ``sizes`` that need a new block, where each takes the smallest free one that holds it.

    What is free already must not be asked for again: each check would leave a larger pool behind, until none is left.
    """
    left, new = sorted(free), []
    for size in sorted(sizes, reverse=True):
        place = bisect.bisect_left(left, size)
        if place < len(left) and (left[place] <= SMALL_BLOCK) == (size <= SMALL_BLOCK):
            left.pop(place)
        else:
            new.append(size)
    return new


def count_poison(tensor: Tensor) -> int:
    """How many elements still hold the poison: all bits one."""
    import torch

    return int((bits(tensor) == -1).sum()) if tensor.dtype in _integers(torch) else 0


def bits(tensor: Tensor) -> Tensor:
    """A floating tensor's bits as integers of the same size; other tensors as they are."""
    import torch

    kind = _integers(torch).get(tensor.dtype)
    return tensor if kind is None else tensor.detach().view(kind)


def _integers(torch: Any) -> dict[Any, Any]:
    return {
        torch.float64: torch.int64,
        torch.float32: torch.int32,
        torch.bfloat16: torch.int16,
        torch.float16: torch.int16,
    }


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree bit by bit, NaN included."""
    import torch

    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(bits(a), bits(b)))


def changed_inputs(inputs: Inputs, pristine: Inputs) -> list[str]:
    """Names of the tensors that are no longer what they were."""
    import torch

    before, tensors = pristine.tensors(), inputs.tensors()
    alike = [name for name, t in tensors.items() if (t.shape, t.dtype) == (before[name].shape, before[name].dtype)]
    if not alike:
        return list(tensors)
    # all in one go, since a GPU is waited for each time
    changed = torch.stack([(bits(tensors[name]) != bits(before[name])).any() for name in alike]).tolist()
    same = {name for name, was_changed in zip(alike, changed, strict=True) if not was_changed}
    return [name for name in tensors if name not in same]


def fill(inputs: Inputs, pristine: Inputs, spin_cycles: int = SPIN_CYCLES) -> Inputs:
    """Copies ``pristine``'s values into the memory of ``inputs``; returns them as a new Inputs object.

    So every kind of inputs lies at the same addresses, and a result kept by address is found out. On a GPU the call
    that follows is queued behind a spin kernel and the copy, both on the current stream: until then the inputs hold
    NaN, and whoever reads them, or writes results, on another stream without waiting is found out.
    """
    import torch

    with torch.no_grad():
        if inputs.q.device.type == "cuda":
            for name in FLOATS_FILLED:
                if getattr(inputs, name) is not None:
                    own_memory(getattr(inputs, name)).fill_(torch.nan)
            torch.cuda.synchronize(inputs.q.device)
            torch.cuda._sleep(spin_cycles)
        values = pristine.tensors()
        for name, tensor in inputs.tensors().items():
            if name != "qkv":
                own_memory(tensor.detach()).copy_(own_memory(values[name]))
    return dataclasses.replace(inputs, kind=pristine.kind, seed=pristine.seed, visible_pairs=pristine.visible_pairs)


class Disturbance:
    """A second stream that occupies a varying number of a GPU's multiprocessors; on a CPU, nothing."""

    def __init__(self, device: Any, seed: int) -> None:
        import torch

        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.random = random.Random(seed)
        if self.stream is not None:
            self.left = torch.randn(4096, 512, device=device)
            self.right = torch.randn(512, 512, device=device)
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def start(self) -> None:
        """Queues a few products of random height on the second stream."""
        import torch

        if self.stream is None:
            return
        with torch.cuda.stream(self.stream):
            for _ in range(4):
                self.left[: 64 * self.random.randint(1, 64)] @ self.right
