"""Runs the ladder's CUDA kernels on a CPU, compiled by g++, thread by thread.

A stand-in for :func:`attnscope.cuda.load_kernel` that needs no GPU: the kernels' own text is compiled against
``runtime.hpp``, and only the files that hold PTX (:data:`REPLACED`) are replaced.
It finds wrong indices, missing barriers (run both orders and compare), barriers that not all threads reach, misaligned
vector accesses of the tensor-core rungs, products and copies that are not waited for, and shared memory read before it
was written. It says nothing of speed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope import cuda
from attnscope.device import Device
from driver_stand_in import Driver, HopperOnACpu, Launched, TensorMap

HERE = Path(__file__).parent
REPLACED = ("device.cuh", "tensor_core.cuh", "warpgroup.cuh", "copy_engine.cuh")
HEADERS = Path(cuda.__file__).parent / "implementations" / "cuda_headers"


DEVICE = HopperOnACpu("cuda", "emulated", capability=(9, 0), multiprocessors=1)
HANDLES: dict[int, EmulatedKernel] = {}


@dataclass
class EmulatedKernel:
    """A kernel as :class:`attnscope.cuda.Kernel` looks from outside. ``order`` 0 or 1: first or last thread first;
    2 as 0, but copies land at once."""

    name: str
    function: Any
    types: list[Any]
    launches: int = 0
    order: int = 0

    def launch(self, grid: tuple[int, ...], block: int, *args: Any, shared_bytes: int = 0) -> None:
        values, _ = cuda.pack_arguments(args)
        assert len(values) == len(self.types), f"{self.name} takes {len(self.types)} arguments, got {len(values)}"
        for value, kind, arg in zip(values, self.types, args, strict=True):
            if kind is ctypes.c_void_p:
                assert hasattr(arg, "data_ptr"), f"{self.name}: a pointer is missing, got {value}"
            elif kind is ctypes.c_longlong:
                assert isinstance(arg, ctypes.c_longlong), f"{self.name}: a 64-bit argument is missing, got {arg!r}"
            else:
                assert not hasattr(arg, "data_ptr"), f"{self.name}: a number is missing, got a tensor"
                assert isinstance(arg, float) == (kind is ctypes.c_float), f"{self.name}: {arg!r} for a {kind.__name__}"
        self.run(grid, block, shared_bytes, values)

    @property
    def handle(self) -> int:
        """What the stand-in for the driver knows it by."""
        HANDLES[id(self)] = self
        return id(self)

    def run(self, grid: tuple[int, ...], block: int, shared_bytes: int, values: Any) -> None:
        gx, gy, gz = (*grid, 1, 1)[:3]
        self.launches += 1
        error = self.function(gx, gy, gz, block, shared_bytes, ORDER["value"], *values)
        assert error is None, f"{self.name}, grid {grid}, block {block}: {error.decode()}"

    def allow_shared_bytes(self, shared_bytes: int, device_index: int) -> None:
        assert shared_bytes <= 227 * 1024


ORDER = {"value": 0}


def load_kernel(
    path: Path, name: str, device: Device, defines: dict[str, Any] | None = None, *, specific: bool = False
) -> EmulatedKernel:
    """What the rungs call in place of :func:`attnscope.cuda.load_kernel`."""
    del device, specific
    library, types = _build(path, tuple(sorted((defines or {}).items())))
    function = library[f"emulate_{name}"]
    function.restype = ctypes.c_char_p
    function.argtypes = [ctypes.c_uint] * 4 + [ctypes.c_size_t, ctypes.c_int, *types[name]]
    return EmulatedKernel(name, function, types[name])


@functools.cache
def _build(path: Path, defines: tuple[tuple[str, Any], ...]) -> tuple[ctypes.CDLL, dict[str, list[Any]]]:
    text = _expand(path)
    text = re.sub(r"extern __shared__ (\w+) (\w+)\[\];", r"\1* \2 = (\1*)emulator_dynamic_shared();", text)
    wrappers, types = [], {}
    attributes = r"(?:CLUSTERED\s+)?(?:__launch_bounds__\([^)]*\)\s+)?"
    for match in re.finditer(rf'extern "C" __global__ void\s+{attributes}(\w+)\(([^)]*)\)', text):
        name, parameters = match[1], [" ".join(p.split()) for p in match[2].split(",")]
        names = [re.search(r"(\w+)$", p)[1] for p in parameters]
        types[name] = [ctype_of(p) for p in parameters]
        wrappers.append(
            f'extern "C" const char* emulate_{name}(unsigned gx, unsigned gy, unsigned gz, unsigned threads, '
            f"size_t shared_bytes, int order, {', '.join(parameters)}) {{ return emulator_launch(gx, gy, gz, threads, "
            f"shared_bytes, order, {dict(defines).get('CLUSTER', 1)}, [&] {{ {name}({', '.join(names)}); }}); }}"
        )
    source = "\n".join(['#include "runtime.hpp"', text, *wrappers])
    flags = [f"-D{name}={value}" for name, value in defines]
    key = hashlib.sha256("\0".join([source, (HERE / "runtime.hpp").read_text(), *flags]).encode()).hexdigest()[:24]
    library = Path(tempfile.gettempdir()) / f"attnscope-emulator-{key}.so"
    if not library.exists():
        made = library.with_suffix(f".{id(text)}.tmp")
        _compile("-shared", "-x", "c++", "-", f"-I{_runtime()}", *flags, "-o", str(made), text=source)
        made.replace(library)
    return ctypes.CDLL(str(library)), types


@functools.cache
def _runtime() -> Path:
    """The folder of ``runtime.hpp`` and its precompiled form, which saves g++ most of its time for each kernel."""
    header = (HERE / "runtime.hpp").read_text()
    folder = Path(tempfile.gettempdir()) / f"attnscope-emulator-{hashlib.sha256(header.encode()).hexdigest()[:24]}"
    if not folder.exists():
        made = Path(tempfile.mkdtemp(prefix="attnscope-emulator-"))
        (made / "runtime.hpp").write_text(header)
        _compile("-x", "c++-header", str(made / "runtime.hpp"), "-o", str(made / "runtime.hpp.gch"))
        try:
            made.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(made)
    return folder


def _compile(*arguments: str, text: str = "") -> None:
    command = ["g++", "-std=c++17", "-O1", "-w", "-fPIC", *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


def ctype_of(parameter: str) -> Any:
    """The type of a kernel's parameter, by its declaration."""
    if "*" in parameter:
        return ctypes.c_void_p
    kind = re.sub(r"\bconst\b|\b__grid_constant__\b", "", parameter).split()[0]
    kinds = {"i64": ctypes.c_longlong, "int": ctypes.c_int, "float": ctypes.c_float, "TensorMap": TensorMap}
    return kinds[kind]


def _expand(path: Path) -> str:
    """As :func:`attnscope.cuda.expand_includes`, with the files that hold PTX replaced by this folder's."""
    seen: set[str] = set()

    def lines(file: Path) -> list[str]:
        if file.name in seen:
            return []
        seen.add(file.name)
        found = []
        for line in file.read_text().splitlines():
            included = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if included is None:
                found.append("" if line.strip() == "#pragma once" else line)
            elif Path(included[1]).name in REPLACED:
                found += lines(HERE / Path(included[1]).name)
            else:
                found += lines(
                    file.parent / included[1]
                    if (file.parent / included[1]).exists()
                    else HEADERS / Path(included[1]).name
                )
        return found

    real = (HEADERS / "device.cuh").read_text()
    reductions = "\n".join(
        real[real.index(f"__device__ __forceinline__ float {name}") :].partition("\n}\n")[0] + "\n}"
        for name in ("block_sum", "block_max")
    )
    return "\n".join(lines(path)).replace("BLOCK_REDUCTIONS", reductions)


class Kernels(dict[int, tuple[list[Any], Any]]):
    """The emulated kernels by handle, as the stand-in for the driver looks them up."""

    def __missing__(self, handle: int) -> tuple[list[Any], Any]:
        kernel = HANDLES[handle]

        def run(launch: Launched) -> None:
            kernel.run(launch.grid, launch.threads, launch.shared_bytes, launch.values)

        return kernel.types, run


def attach(driver: Driver) -> None:
    """Let launches of the driver's stand-in run emulated kernels."""
    driver.kernels = Kernels()
