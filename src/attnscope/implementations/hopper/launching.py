"""Stage 2: launches machine code with TMA descriptors at a few microseconds a call, through CUDA's driver alone.

Reads a ``Machine`` and tensors, writes a launch on torch's current stream. Nothing is allocated, nothing waits, and a
CUDA graph may be capturing. Triton's own launcher encodes every descriptor in every call; here what depends on
addresses and strides is kept. Imports torch only inside functions. Must not import another implementation or a later
stage.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from typing import Any

from attnscope.errors import PrepareFailed
from attnscope.implementations.hopper.gluon_shim import Machine

KEPT = 256  # launches whose arguments are kept; beyond, the oldest goes
RANK = 4
DESCRIPTOR_BYTES = 128
INVALID_CONTEXT = 201
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
DATA_TYPES = {"bf16": 9, "fp16": 6, "u8": 0, "fp32": 7}  # CUtensorMapDataType
SWIZZLE_128, PROMOTE_128 = 3, 2
LARGEST_STRIDE = 2**40


class Arguments:
    """What one launch passes: descriptors and scalars in memory that stays where it is, and their addresses."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)  # ctypes objects, kept alive
        self.addresses = (ctypes.c_void_p * len(self.values))(*(ctypes.addressof(v) for v in self.values))


class Descriptor(ctypes.Structure):
    """Room for a CUtensorMap, which the driver wants at a multiple of 64 bytes."""

    _fields_ = (("room", ctypes.c_uint8 * (DESCRIPTOR_BYTES + 64)),)


def library() -> Any:
    """CUDA's driver. Raises PrepareFailed where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PrepareFailed(
            f"CUDA's driver does not load: {error}\nhint: run on a machine with an NVIDIA card"
        ) from None


def tensor_map(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> tuple[list[int], list[int]]:
    """(sizes, byte strides) of a tensor as a descriptor has them, innermost first; the innermost stride is left out.

    A dim of one is never walked along: its stride is set to something that TMA takes.
    """
    sizes = list(reversed(shape))
    dense = -(-sizes[0] * item_bytes // 16) * 16
    steps = []
    for size, stride in zip(sizes[1:], reversed(strides[:-1]), strict=True):
        steps.append(dense if size == 1 else stride * item_bytes)
        dense = steps[-1] * size
    return sizes, steps


def readable(tensor: Any) -> bool:
    """Whether TMA can read the tensor where it lies: last stride 1, else multiples of 16 bytes, above 0."""
    if tensor.data_ptr() % 16 or (tensor.stride(-1) != 1 and tensor.shape[-1] != 1):
        return False
    _, steps = tensor_map(tensor.shape, tensor.stride(), tensor.element_size())
    return all(step % 16 == 0 and 0 < step < LARGEST_STRIDE for step in steps)


class Launcher:
    """One kernel, loaded on one device."""

    def __init__(self, machine: Machine, device_index: int) -> None:
        import torch

        torch.cuda.synchronize(device_index)  # makes torch's context, into which the kernel is loaded
        self.machine, self.driver = machine, library()
        self.context = ctypes.c_void_p()
        self.function = ctypes.c_void_p()
        module = ctypes.c_void_p()
        with torch.cuda.device(device_index):
            torch.empty(1, device=f"cuda:{device_index}")
            self._check("cuCtxGetCurrent", ctypes.byref(self.context))
            self._check("cuModuleLoadData", ctypes.byref(module), machine.cubin)
            self._check("cuModuleGetFunction", ctypes.byref(self.function), module, machine.name.encode())
            self._check("cuFuncSetAttribute", self.function, MAX_DYNAMIC_SHARED, machine.shared_bytes)
        self.threads, self.shared_bytes = ctypes.c_uint(machine.threads), ctypes.c_uint(machine.shared_bytes)
        self.one, self.start = ctypes.c_uint(1), self.driver.cuLaunchKernel
        self.kept: dict[Hashable, Arguments] = {}

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self.driver, name)(*arguments)
        if status:
            raise PrepareFailed(f"{self.machine.name}: {name} of CUDA's driver failed with error {status}")

    def descriptor(self, tensor: Any, dtype: str, box: Sequence[int]) -> Any:
        """A TMA descriptor of a tensor of rank 4 that reads, or writes, ``box`` rows and columns of one head."""
        holder = Descriptor()
        base = ctypes.addressof(holder)
        aligned = -(-base // 64) * 64
        sizes, steps = tensor_map(tensor.shape, tensor.stride(), tensor.element_size())
        made = (ctypes.c_uint8 * DESCRIPTOR_BYTES).from_address(aligned)
        self._check(
            "cuTensorMapEncodeTiled", ctypes.c_void_p(aligned), DATA_TYPES[dtype], RANK,
            ctypes.c_void_p(tensor.data_ptr()), (ctypes.c_uint64 * RANK)(*sizes),
            (ctypes.c_uint64 * (RANK - 1))(*steps), (ctypes.c_uint32 * RANK)(*reversed(box), 1, 1),
            (ctypes.c_uint32 * RANK)(*[1] * RANK), 0, SWIZZLE_128, PROMOTE_128, 0,
        )  # fmt: skip
        made.holder = holder  # type: ignore[attr-defined]
        return made

    def keep(self, key: Hashable, arguments: Arguments) -> Arguments:
        """Keep the arguments of a launch; another thread may do the same at the same time."""
        if len(self.kept) >= KEPT:
            self.kept.pop(next(iter(self.kept), None), None)
        self.kept[key] = arguments
        return arguments

    def launch(self, blocks: int, stream: int, arguments: Arguments, rows: int = 1, layers: int = 1) -> None:
        """Queue the kernel on a grid of ``blocks`` x ``rows`` x ``layers``. Raises PrepareFailed where refused."""
        one = self.one
        status = self.start(
            self.function, blocks, rows, layers, self.threads, one, one, self.shared_bytes,
            ctypes.c_void_p(stream), arguments.addresses, None,
        )  # fmt: skip
        if status == INVALID_CONTEXT:  # a thread that has not used CUDA yet
            self._check("cuCtxSetCurrent", self.context)
            status = self.start(
                self.function, blocks, rows, layers, self.threads, one, one, self.shared_bytes,
                ctypes.c_void_p(stream), arguments.addresses, None,
            )  # fmt: skip
        if status:
            raise PrepareFailed(f"launching {self.machine.name} failed with CUDA's error {status}")


def descriptor_parameters() -> list[int]:
    """Bytes of the parameters that one descriptor is to the compiler: the map, then sizes, then strides."""
    return [DESCRIPTOR_BYTES] + [4] * RANK + [8] * RANK


def described(descriptor: Any) -> list[Any]:
    """A descriptor as parameters; the kernels read sizes and strides from the map alone."""
    zero = ctypes.c_uint64(0)
    return [descriptor] + [zero] * (2 * RANK)
