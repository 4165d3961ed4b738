"""Stage 2: CUDA's driver, called directly: tensors described to the copy engine, launches packed once and kept.

Reads machine code, tensors and ctypes values, writes launches on torch's current stream. What a launch passes depends
on addresses, strides and the stream, and is kept by them: a call that was seen before asks for nothing but the launch.
Nothing is allocated, nothing waits, a CUDA graph may be capturing, and threads may share all of it. Where launches
pass memory that is the stream's or the graph's, a capture keeps none and gets none that were kept. The driver's
library is called through ctypes: its Python bindings cost the host several times as much a call. Imports torch only
inside functions. Must not import an implementation or a later stage.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from attnscope.errors import PrepareFailed
from attnscope.inputs import Tensor

KEPT = 256  # calls of one prepared workload whose launches are kept; beyond, the oldest goes
RANK = 4
MAP_BYTES, MAP_ALIGNMENT = 128, 64
MAX_STRIDE_BYTES = 2**40
# Of CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill.
DATA_TYPES = {"bf16": 9, "fp16": 6, "u8": 0, "fp32": 7}
NO_INTERLEAVE, SWIZZLE_128_BYTES, PROMOTE_TO_128_BYTES, FILL_WITH_ZEROS = 0, 3, 2, 0
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
LEGACY_STREAM = 0  # the default stream, which no capture takes
PER_THREAD_STREAM = 2  # one number for another stream in each thread (CU_STREAM_PER_THREAD)
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@functools.cache
def library() -> Any:
    """CUDA's driver. Raises PrepareFailed where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PrepareFailed(
            f"CUDA's driver does not load: {error}\nhint: run on a machine with an NVIDIA card"
        ) from None


def _ask(subject: str, name: str, *arguments: Any, device_index: int | None = None) -> None:
    """Call the driver; for that device, where it needs the thread's context. Raises PrepareFailed where it lacks the
    function or refuses."""
    try:
        function = getattr(library(), name)
    except AttributeError:
        raise PrepareFailed(f"CUDA's driver has no {name}\nhint: a driver for CUDA 12 or newer") from None
    status = function(*arguments)
    if status == INVALID_CONTEXT and device_index is not None:
        _take_context(subject, device_index)
        status = function(*arguments)
    if status:
        raise PrepareFailed(f"{subject}: {name} of CUDA's driver failed with error {status}")


def _take_context(subject: str, device_index: int) -> None:
    """A thread that has not used CUDA yet has no context: it gets the device's, which is torch's."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _ask(subject, "cuDeviceGet", ctypes.byref(device), device_index)
    _ask(subject, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _ask(subject, "cuCtxSetCurrent", context)


def capture_of(stream: int, device_index: int) -> int | None:
    """The number of the capture that a stream of the device belongs to, None outside of one. Raises PrepareFailed."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    _ask(
        "a stream", "cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number),
        None, None, None, device_index=device_index,
    )  # fmt: skip
    return number.value if status.value == CAPTURING else None


# --- tensors for the copy engine (TMA) --------------------------------------------------------------------------------


def map_sizes(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> tuple[list[int], list[int]]:
    """(sizes, byte strides) of a tensor as a tensor map has them, innermost first; the innermost stride is left out.

    An axis of one is never walked along: it gets a stride that the driver takes.
    """
    sizes = list(reversed(shape))
    dense = -(-sizes[0] * item_bytes // 16) * 16
    steps = []
    for size, stride in zip(sizes[1:], reversed(strides[:-1]), strict=True):
        steps.append(dense if size == 1 else stride * item_bytes)
        dense = steps[-1] * size
    return sizes, steps


def readable(tensor: Tensor) -> bool:
    """Whether the copy engine can read the tensor where it lies: last stride 1, all else multiples of 16 bytes, no axis
    expanded."""
    if tensor.data_ptr() % 16 or (tensor.stride(-1) != 1 and tensor.shape[-1] != 1):
        return False
    _, steps = map_sizes(tensor.shape, tensor.stride(), tensor.element_size())
    return all(step % 16 == 0 and 0 < step < MAX_STRIDE_BYTES for step in steps)


def copied(tensor: Tensor) -> Tensor:
    """A dense copy, made on the current stream."""
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)


def as_readable(tensor: Tensor) -> Tensor:
    """The tensor itself where the copy engine can read it in place, else a copy."""
    return tensor if readable(tensor) else copied(tensor)


def tensor_map(tensor: Tensor, dtype: str, box: tuple[int, int]) -> Any:
    """The tensor map of a readable tensor of rank 4, of which ``box`` rows and columns of one head move at a time.

    128 opaque bytes, aligned to 64: a kernel's parameter. Boxes lie swizzled over 128 bytes, and hold zeros outside.

    Raises:
        PrepareFailed: the driver does not take it.
    """
    room = (ctypes.c_uint8 * (MAP_BYTES + MAP_ALIGNMENT))()
    made = (ctypes.c_uint8 * MAP_BYTES).from_buffer(room, -ctypes.addressof(room) % MAP_ALIGNMENT)
    sizes, steps = map_sizes(tensor.shape, tensor.stride(), tensor.element_size())
    _ask(
        f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}", "cuTensorMapEncodeTiled",
        ctypes.byref(made), DATA_TYPES[dtype], RANK, ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * RANK)(*sizes), (ctypes.c_uint64 * (RANK - 1))(*steps),
        (ctypes.c_uint32 * RANK)(*reversed(box), 1, 1), (ctypes.c_uint32 * RANK)(*[1] * RANK),
        NO_INTERLEAVE, SWIZZLE_128_BYTES, PROMOTE_TO_128_BYTES, FILL_WITH_ZEROS,
        device_index=tensor.device.index or 0,
    )  # fmt: skip
    return made


# --- kernels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """A loaded kernel, and the shape of its launches."""

    name: str
    handle: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int


def load(cubin: bytes, name: str, shared_bytes: int, device_index: int) -> int:
    """The handle of kernel ``name``, loaded on the device, to be launched with that much dynamic shared memory.

    Raises:
        PrepareFailed: the driver does not take it.
    """
    import torch

    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    torch.cuda.synchronize(device_index)  # makes torch's context, into which the kernel is loaded
    with torch.cuda.device(device_index):
        torch.empty(1, device=f"cuda:{device_index}")
        _ask(name, "cuModuleLoadData", ctypes.byref(module), cubin)
        _ask(name, "cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
        _ask(name, "cuFuncSetAttribute", handle, MAX_DYNAMIC_SHARED, shared_bytes)
    assert handle.value is not None
    return handle.value


class _Shape(ctypes.Structure):
    """CUlaunchConfig, without attributes; a cluster's size stands in the kernel's own source."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class Launch:
    """A kernel with its arguments on one stream, packed. ``start`` queues it and returns CUDA's status; it changes
    nothing here."""

    __slots__ = ("function", "start", "values")

    def __init__(self, function: Function, values: Sequence[Any], stream: int) -> None:
        """``values`` are ctypes objects in the order of the kernel's parameters."""
        self.function, self.values = function, tuple(values)  # kept: the driver reads them at their addresses
        addresses = (ctypes.c_void_p * len(self.values))(*map(ctypes.addressof, self.values))
        shape = _Shape(function.grid, (function.threads, 1, 1), function.shared_bytes, stream)
        self.start = functools.partial(
            library().cuLaunchKernelEx, ctypes.byref(shape), ctypes.c_void_p(function.handle),
            ctypes.byref(addresses), None,
        )  # fmt: skip


Form = tuple[tuple[int, ...], tuple[int, ...], Any]  # shape, strides, dtype


class Fresh:
    """Makes the tensors that every call makes anew, unwritten, by torch's caching allocator on the device."""

    def __init__(self, device_index: int, *forms: Form) -> None:
        import torch

        self._index, self._forms, self._device = device_index, forms, torch._C._cuda_getDevice
        # What torch.compile's own code calls: past the dispatcher, in less than half of torch.empty's time.
        self._empty = torch._C._dynamo.guards._empty_strided_cuda

    def __call__(self) -> list[Tensor]:
        """One tensor of each form."""
        if self._device() != self._index:
            import torch

            with torch.cuda.device(self._index):
                return self()
        empty = self._empty
        return [empty(shape, strides, dtype) for shape, strides, dtype in self._forms]


def launch_key(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, others: Sequence[Tensor] = ()) -> Hashable:
    """What the arguments of a launch depend on within one prepared workload, which fixes shapes and dtypes, and the
    strides of its own ``out`` and ``lse``."""
    key = (
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), q.stride(), k.stride(), v.stride(),
    )  # fmt: skip
    return (*key, *[(other.data_ptr(), other.stride()) for other in others]) if others else key


class Launches:
    """What calls of one prepared workload queue on its device, kept by key and stream."""

    def __init__(self, device_index: int, *, with_workspace: bool = False) -> None:
        """``with_workspace``: launches pass memory of their stream, or of the graph that captures them."""
        import torch

        self._index, self._lock = device_index, threading.Lock()
        self._kept: dict[Hashable, tuple[Launch, ...]] = {}
        self._with_workspace = with_workspace
        # Private, but what Triton's own launches have called for years; the public ones build objects.
        self._device, self._stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
        self._capturing = torch._C._cuda_isCurrentStreamCapturing

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def stream_and_capture(self) -> tuple[int, int | None]:
        """torch's current stream on the device, and the number of the capture that it belongs to, if any.

        Raises:
            PrepareFailed: the driver does not say.
        """
        stream = self._stream(self._index)
        return stream, None if stream == LEGACY_STREAM else capture_of(stream, self._index)

    def replay(self, key: Hashable) -> bool:
        """Queue again what was queued for ``key`` on this stream; False where nothing was, or is no longer kept, or
        the workspace is another one since a graph is capturing."""
        if self._device() != self._index:
            import torch

            with torch.cuda.device(self._index):
                return self.replay(key)
        launches = self._kept.get((self._stream(self._index), key))
        if launches is None or (self._with_workspace and self._capturing()):
            return False
        self._queue(launches)
        return True

    def start(self, key: Hashable, *calls: tuple[Function, Sequence[Any]]) -> None:
        """Queue kernels with their arguments (see ``Launch``), one after the other, and keep them for ``key``.

        Raises:
            PrepareFailed: the driver refuses a launch.
        """
        if self._device() != self._index:
            import torch

            with torch.cuda.device(self._index):
                self.start(key, *calls)
            return
        stream = self._stream(self._index)
        launches = tuple(Launch(function, values, stream) for function, values in calls)
        passing = stream == PER_THREAD_STREAM or self._capturing()  # the workspace is not the next call's
        if not (self._with_workspace and passing):
            self._keep((stream, key), launches)
        self._queue(launches)

    def _keep(self, place: Hashable, launches: tuple[Launch, ...]) -> None:
        with self._lock:
            if len(self._kept) >= KEPT and place not in self._kept:
                del self._kept[next(iter(self._kept))]
            self._kept[place] = launches

    def _queue(self, launches: tuple[Launch, ...]) -> None:
        for launch in launches:
            status = launch.start()
            if status:
                self._start_again(launch, status)

    def _start_again(self, launch: Launch, status: int) -> None:
        name = launch.function.name
        if status == INVALID_CONTEXT:
            _take_context(name, self._index)
            status = launch.start()
        if status:
            raise PrepareFailed(f"launching {name} failed with CUDA's error {status}: {launch.function}")
