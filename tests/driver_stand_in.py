"""CUDA's driver and torch's streams on a CPU: what ``attnscope.driver`` asks for is noted, and held to the rules.

A launch reads its parameters at their addresses, as the real one does, and may run a function in the kernel's place.
"""

# ruff: noqa: N802

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attnscope import driver
from attnscope.device import Device

OK, INVALID_VALUE = 0, 1


class HopperOnACpu(Device):
    """Claims to be a Hopper card; its tensors live on the CPU."""

    @property
    def torch_name(self) -> str:
        return "cpu"


DEVICE = HopperOnACpu("cuda", "stand-in", capability=(9, 0), multiprocessors=132, l2_bytes=50 * 2**20)


class TensorMap(ctypes.Structure):
    """What stands in the 128 bytes of a tensor map here; sizes and strides from the innermost axis on."""

    _fields_ = (
        ("address", ctypes.c_void_p), ("sizes", ctypes.c_ulonglong * 4), ("strides", ctypes.c_ulonglong * 3),
        ("box", ctypes.c_uint * 4),
    )  # fmt: skip


@dataclass
class Launched:
    """One launch as the driver saw it. ``addresses`` of its parameters are read at once: later they may be gone."""

    handle: int
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    stream: int
    values: list[Any]


@dataclass
class Driver:
    """``kernels`` maps a handle to the types of its parameters and to what runs in its place, where anything does."""

    kernels: dict[int, tuple[Sequence[Any], Callable[[Launched], None] | None]] = field(default_factory=dict)
    launched: list[Launched] = field(default_factory=list)
    described: int = 0
    made: int = 0  # tensors
    same: dict[Any, Any] | None = None  # where given: tensors of a form are one tensor, at one address
    stream: int = 7
    device: int = 0
    without_context: set[int] = field(default_factory=set)  # threads that have not used CUDA yet
    contexts_given: int = 0
    refuses: int = OK
    capture: int | None = None  # the number of the one that takes in all streams now

    def cuTensorMapEncodeTiled(
        self, place: Any, kind: int, rank: int, address: Any, sizes: Any, strides: Any, box: Any, steps: Any,
        interleave: int, swizzle: int, promotion: int, fill: int,
    ) -> int:  # fmt: skip
        assert (rank, interleave, swizzle, fill) == (4, 0, 3, 0) and list(steps) == [1, 1, 1, 1]
        if threading.get_ident() in self.without_context:
            return driver.INVALID_CONTEXT
        start, width = ctypes.addressof(place._obj), {9: 2, 6: 2, 0: 1, 7: 4}[kind]
        assert start % 64 == 0 and ctypes.sizeof(place._obj) == 128
        rules = address.value % 16 == 0 and all(0 < step < 2**40 and step % 16 == 0 for step in strides)
        rules &= all(0 < size <= 2**32 for size in sizes) and all(0 < size <= 256 for size in box)
        if not rules or box[0] * width > 128:
            return INVALID_VALUE
        found = TensorMap.from_address(start)
        found.address, found.sizes[:], found.strides[:], found.box[:] = address.value, sizes[:], strides[:], box[:]
        self.described += 1
        return OK

    def cuLaunchKernelEx(self, shape: Any, handle: Any, parameters: Any, extra: None) -> int:
        if threading.get_ident() in self.without_context:
            return driver.INVALID_CONTEXT
        if self.refuses:
            return self.refuses
        s, (types, run) = shape._obj, self.kernels[handle.value]
        assert len(parameters._obj) == len(types), f"{len(types)} parameters, got {len(parameters._obj)}"
        values = [
            kind.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(kind)))
            for kind, at in zip(types, parameters._obj, strict=True)
        ]
        assert list(s.block)[1:] == [1, 1] and (s.attributes, s.attribute_count, extra) == (None, 0, None)
        launch = Launched(handle.value, tuple(s.grid), s.block[0], s.shared_bytes, s.stream or 0, values)
        self.launched.append(launch)
        if run is not None:
            run(launch)
        return OK

    def cuStreamGetCaptureInfo_v2(self, stream: Any, status: Any, number: Any, *others: None) -> int:
        assert stream.value and others == (None, None, None)
        status._obj.value, number._obj.value = int(self.capture is not None), self.capture or 0
        return OK

    def cuDeviceGet(self, place: Any, index: int) -> int:
        place._obj.value = index
        return OK

    def cuDevicePrimaryCtxRetain(self, place: Any, device: Any) -> int:
        place._obj.value = 100 + device.value
        return OK

    def cuCtxSetCurrent(self, context: Any) -> int:
        assert context.value == 100 + self.device
        self.contexts_given += 1
        self.without_context.discard(threading.get_ident())
        return OK

    def empty_strided(self, *form: Any) -> Any:
        """``torch._C._dynamo.guards._empty_strided_cuda``."""
        self.made += 1
        found = torch._C._dynamo.guards._empty_strided_cpu(*form)
        return found if self.same is None else self.same.setdefault(form, found)

    @contextlib.contextmanager
    def on_device(self, index: int) -> Iterator[None]:
        """``torch.cuda.device``."""
        before, self.device = self.device, index
        try:
            yield
        finally:
            self.device = before


def stand_in(monkeypatch: Any) -> Driver:
    """A driver in place of CUDA's, and its stream and device in place of torch's."""
    made = Driver()
    monkeypatch.setattr(driver, "library", lambda: made)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: made.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: made.stream + index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: made.capture is not None, raising=False)
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", made.empty_strided)
    monkeypatch.setattr(torch.cuda, "device", made.on_device)
    return made
