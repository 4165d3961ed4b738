"""hopper, its decoding and hopper_cuda prepared without a card and without a compiler: all of them but the kernels."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace
from typing import Any

from attnscope import cuda
from attnscope.implementations.hopper import Hopper, Plan, PreparedHopper, decode, gluon_shim, masked
from attnscope.implementations.hopper.configurations import Configuration
from attnscope.implementations.hopper_cuda import KERNEL, SOURCE, HopperCuda
from attnscope.workload import Workload
from cuda_emulator import ctype_of
from driver_stand_in import DEVICE, Driver, TensorMap

NAMES = ("hopper", "decode", "hopper_cuda")


def prepare(name: str, driver: Driver, monkeypatch: Any, workload: Workload) -> Any:
    """The prepared implementation; its kernels do nothing, and have the parameters of the real ones."""
    made = {"hopper": prepare_hopper, "decode": _decode, "hopper_cuda": _hopper_cuda}
    return made[name](driver, monkeypatch, workload)


def prepare_hopper(driver: Driver, monkeypatch: Any, workload: Workload, one: Configuration | None = None) -> Any:
    """The Gluon kernel, in a configuration, or in that of the workload's class."""
    plans: list[Plan] = []

    def compiled(plan: Plan) -> gluon_shim.Machine:
        plans.append(plan)
        return gluon_shim.Machine("hopper_attention_forward", b"", 384, 200_000, "")

    def load(cubin: bytes, name: str, shared_bytes: int, device_index: int) -> int:
        del cubin, shared_bytes, device_index
        handle = len(driver.kernels) + 1
        driver.kernels[handle] = _parameters(name, plans[-1]), None
        return handle

    in_front = [gluon_shim.Machine(f"hopper_attention_mask_{name}", b"", 128, 0, "") for name in ("words", "lists")]
    monkeypatch.setattr(Plan, "compile", compiled)
    monkeypatch.setattr(masked.MaskPlan, "compile", lambda self: in_front)
    monkeypatch.setattr("attnscope.driver.load", load)
    kind = PreparedHopper if workload.mask is None and workload.bias is None else masked.PreparedMasked
    return kind(workload, DEVICE, one or Hopper().chosen(workload, DEVICE).gluon)


def _parameters(name: str, plan: Plan) -> list[Any]:
    """Types of what the kernel of that name takes."""
    scratch = [ctypes.c_uint64] * 2
    if name == "hopper_attention_mask_lists":
        return [*[ctypes.c_void_p] * (2 + plan.queued), ctypes.c_int32, *scratch]
    if name == "hopper_attention_mask_words":
        pointers = [ctypes.c_void_p] * (3 + sum(masked.MaskPlan(plan).pointers.values()))
        return [*pointers, *[ctypes.c_int64] * 3, *[ctypes.c_int32] * 6, *scratch]
    described = [TensorMap, *[ctypes.c_uint64] * 8] * len(plan.boxes())
    pointers = [ctypes.c_void_p] * (1 + sum(plan.pointers.values()))
    types = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
    return [*described, *pointers, *(types[kind] for kind in plan.scalar_types().values()), *scratch]


def _decode(driver: Driver, monkeypatch: Any, workload: Workload) -> Any:
    def warmup(*given: Any, grid: Any, **constants: Any) -> Any:
        del grid, constants
        kinds = ["constexpr" if one is None else _kind(one) for one in given]
        return SimpleNamespace(src=SimpleNamespace(signature={str(at): kind for at, kind in enumerate(kinds)}))

    def load(compiled: Any, values: list[Any], grid: tuple[int, int, int], device_index: int) -> Any:
        from attnscope.driver import Function

        del compiled, device_index
        handle = len(driver.kernels) + 1
        driver.kernels[handle] = [*map(type, values), ctypes.c_uint64, ctypes.c_uint64], None
        return Function("hopper_attention_decode", handle, grid, 128, 1000)

    kernel = SimpleNamespace(warmup=warmup)
    loaded = SimpleNamespace(hopper_attention_decode=kernel, hopper_attention_decode_combine=kernel)
    monkeypatch.setattr(decode, "load_kernels", lambda: loaded)
    monkeypatch.setattr(decode, "load_machine", load)
    made = decode.DecodeKernel(workload, DEVICE, splits=2)
    made.compile()
    return made


def _kind(value: Any) -> str:
    return {int: "i32", float: "fp32"}.get(type(value), "*data")


def _hopper_cuda(driver: Driver, monkeypatch: Any, workload: Workload) -> Any:
    declared = re.search(rf"\b{KERNEL}\(([^)]*)\)", SOURCE.read_text())
    assert declared is not None
    driver.kernels[1] = [ctype_of(" ".join(parameter.split())) for parameter in declared[1].split(",")], None
    kernel = SimpleNamespace(handle=1, allow_shared_bytes=lambda shared_bytes, device_index: None)
    monkeypatch.setattr(cuda, "load_kernel", lambda *_, **__: kernel)
    return HopperCuda().prepare(workload, DEVICE)
