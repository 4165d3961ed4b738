"""Tensor maps for the copy engine and launches that are prepared once: what hopper_cuda asks of the driver.

Imports ``cuda.bindings`` and torch only inside functions. A tensor map is 128 opaque bytes, aligned to 64, that
``cuTensorMapEncodeTiled`` writes; the driver's library is called directly, since the bindings' object for it is not
aligned.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from attnscope import cuda
from attnscope.errors import PrepareFailed
from attnscope.inputs import Tensor

MAP_BYTES, MAP_ALIGNMENT = 128, 64
RANK = 4
# Of CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill.
DATA_TYPES = {"fp16": 6, "bf16": 9}
NO_INTERLEAVE, SWIZZLE_128_BYTES, PROMOTE_TO_128_BYTES, FILL_WITH_ZEROS = 0, 3, 2, 0
MAX_STRIDE_BYTES = 2**40


class TensorMap:
    """A tensor map; ``address`` is where it lies as long as this lives."""

    def __init__(self) -> None:
        self._memory = (ctypes.c_char * (MAP_BYTES + MAP_ALIGNMENT))()
        start = ctypes.addressof(self._memory)
        self.address = -(-start // MAP_ALIGNMENT) * MAP_ALIGNMENT


def copyable(tensor: Tensor) -> Tensor:
    """The tensor such that the copy engine can read it in place; a copy where it cannot.

    It can where d has stride 1, addresses and strides are multiples of 16 bytes, and no axis is expanded.
    """
    size = tensor.element_size()
    good = tensor.stride(3) == 1 and tensor.data_ptr() % 16 == 0
    for axis in (0, 1, 2):
        if good and tensor.shape[axis] > 1:
            step = tensor.stride(axis) * size
            good = 0 < step < MAX_STRIDE_BYTES and step % 16 == 0
    if good:
        return tensor
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)


def map_sizes(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, strides in bytes) from the innermost axis on; an axis of one gets a stride that the driver takes."""
    size = tensor.element_size()
    sizes = tuple(tensor.shape[axis] for axis in (3, 2, 1, 0))
    strides = tuple(tensor.stride(axis) * size if tensor.shape[axis] > 1 else 16 for axis in (2, 1, 0))
    return sizes, strides


def encode(tensor: Tensor, dtype: str, rows: int, columns: int) -> Any:
    """The map of a copyable (B, H, L, D) tensor, read in boxes of ``rows`` of one head by ``columns``, swizzled.

    Raises:
        PrepareFailed: the driver does not take it.
    """
    sizes, strides = map_sizes(tensor)
    found = TensorMap()
    status = _encoder()(
        found.address, DATA_TYPES[dtype], RANK, tensor.data_ptr(), (ctypes.c_uint64 * RANK)(*sizes),
        (ctypes.c_uint64 * (RANK - 1))(*strides), (ctypes.c_uint32 * RANK)(columns, rows, 1, 1),
        (ctypes.c_uint32 * RANK)(1, 1, 1, 1), NO_INTERLEAVE, SWIZZLE_128_BYTES, PROMOTE_TO_128_BYTES, FILL_WITH_ZEROS,
    )  # fmt: skip
    if status != 0:
        raise PrepareFailed(
            f"the driver does not describe a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} to "
            f"the copy engine: CUresult {status}"
        )
    return found


@functools.cache
def _encoder() -> Any:
    try:
        function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise PrepareFailed(f"the driver has no tensor maps: {error}\nhint: a driver for CUDA 12 or newer") from None
    number, place = ctypes.c_int, ctypes.c_void_p
    function.argtypes = [place, number, ctypes.c_uint32, place, place, place, place, place, *[number] * 4]
    function.restype = ctypes.c_int
    return function


@functools.cache
def _launcher() -> Any:
    """cuLaunchKernel of the driver's library: through the bindings a call costs the host several times as much."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    except (OSError, AttributeError) as error:
        raise PrepareFailed(f"the driver's library does not load: {error}\nhint: install NVIDIA's driver") from None
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


def bind(
    kernel: cuda.Kernel, device_index: int, grid: int, block: int, shared_bytes: int, args: tuple[Any, ...]
) -> Callable[[], None]:
    """A call that queues the kernel on torch's current stream of the device, with its arguments packed now. Args as of
    ``Kernel.launch``, and tensor maps. It changes nothing, so threads may share it."""
    import torch

    kept: list[Any] = []
    addresses = []
    for arg in args:
        if isinstance(arg, TensorMap):
            kept.append(arg)
            addresses.append(arg.address)
            continue
        (value,), (kind,) = cuda.pack_arguments((arg,))
        kept.append(kind(value))
        addresses.append(ctypes.addressof(kept[-1]))
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    number = ctypes.c_uint
    sizes = (number(grid), number(1), number(1), number(block), number(1), number(1), number(shared_bytes))
    where, handle = ctypes.c_void_p(ctypes.addressof(pointers)), ctypes.c_void_p(int(kernel.handle))
    launch, stream_of = _launcher(), torch._C._cuda_getCurrentRawStream

    def run(_kept: tuple[Any, ...] = (kept, pointers)) -> None:
        status = launch(handle, *sizes, stream_of(device_index), where, None)
        if status != 0:
            raise PrepareFailed(f"launching {kernel.name} failed: CUresult {status}, grid {grid}, block {block}")

    return run
