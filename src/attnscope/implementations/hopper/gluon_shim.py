# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Stage 2: every call of Gluon that changed between releases of Triton, under one name each.

Reads an installed Triton (3.6.0 to 3.9.0 are tested), writes the names that ``kernels.py`` is written in and the
machine code and parameters that ``attnscope.driver`` launches. Imports triton only inside functions. Must not import
another implementation or a later stage.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import warnings
from dataclasses import dataclass
from typing import Any

from attnscope.driver import MAP_BYTES, RANK
from attnscope.errors import PrepareFailed

TARGET = 90  # compute capability 9.0: what the kernels are written for
GLUON = "triton.experimental.gluon"
POINTERS = {"fp32": "*fp32", "i32": "*i32", "u8": "*u8", "bf16": "*bf16", "fp16": "*fp16"}


@dataclass(frozen=True)
class Machine:
    """Machine code of one kernel: the cubin, its entry, threads and dynamic shared bytes of a block, and its PTX."""

    name: str
    cubin: bytes
    threads: int
    shared_bytes: int
    ptx: str

    def parameters(self) -> list[int]:
        """Bytes of each parameter of the entry, in order, as the PTX declares them."""
        entry = re.search(rf"\.entry\s+{re.escape(self.name)}\s*\((.*?)\)", self.ptx, re.DOTALL)
        assert entry is not None
        sizes = []
        for line in re.findall(r"\.param\s+([^,]+)", entry[1]):
            array = re.search(r"\.b8\s+\S+\[(\d+)\]", line)
            scalar = re.search(r"\.[bufs](\d+)\s", line)
            assert array is not None or scalar is not None, line
            sizes.append(int(array[1]) if array is not None else int(scalar[1]) // 8)  # type: ignore[index]
        return sizes

    def require(self, wanted: list[int]) -> None:
        """Raises PrepareFailed where the entry's parameters are not of ``wanted`` bytes each."""
        if self.parameters() != wanted:
            raise PrepareFailed(
                "this release of Triton passes arguments in another way than hopper does\n"
                "hint: install a release that attnscope names as tested, 3.6.0"
            )


def names() -> dict[str, Any]:
    """The names that the kernels use, as this Triton calls them."""
    gl = importlib.import_module(f"{GLUON}.language")
    hopper = importlib.import_module(f"{GLUON}.language.nvidia.hopper")
    tma, mbarrier = hopper.tma, hopper.mbarrier
    return {
        "gl": gl,
        "mbarrier": mbarrier,
        "multiply": hopper.warpgroup_mma,
        "multiplied": hopper.warpgroup_mma_wait,
        "fence_async_shared": hopper.fence_async_shared,
        "load_tile": getattr(tma, "async_load", None) or tma.async_copy_global_to_shared,
        "store_tile": getattr(tma, "async_store", None) or tma.async_copy_shared_to_global,
        "stored": tma.store_wait,
        "thread_barrier": getattr(gl, "barrier", None) or gl.thread_barrier,
    }


def jit(function: Any, scalars: tuple[str, ...]) -> Any:
    """``function`` as a Gluon function; no value of ``scalars`` makes it compile anew."""
    return importlib.import_module(GLUON).jit(function, do_not_specialize=list(scalars))


def tile_layout(bits: int, rank: int) -> Any:
    """Shared memory as TMA writes it and wgmma reads it: rows of 128 bytes, swizzled."""
    layouts = importlib.import_module(f"{GLUON}.language._layouts")
    return layouts.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=rank)


def descriptor_type(dtype: str, block: tuple[int, ...], bits: int = 16) -> str:
    """How a signature spells a TMA descriptor of tiles of ``block``."""
    return f"tensordesc<{dtype}[{','.join(map(str, block))}],{tile_layout(bits, len(block))!r}>"


def descriptor_parameters() -> list[int]:
    """Bytes of the parameters that one descriptor is to the compiler: the tensor map, then sizes, then strides."""
    return [MAP_BYTES] + [4] * RANK + [8] * RANK


def descriptor_values(tensor_map: Any) -> list[Any]:
    """A tensor map as these parameters; the kernels read sizes and strides from the map alone."""
    zero = ctypes.c_uint64(0)
    return [tensor_map] + [zero] * (2 * RANK)


def scratch_values() -> list[Any]:
    """Triton's own two last parameters, global and profile scratch, which no kernel here uses."""
    return [ctypes.c_uint64(0), ctypes.c_uint64(0)]


def compile_kernel(function: Any, signature: dict[str, str], constants: dict[str, Any], warps: int) -> Machine:
    """Compiles for sm_90a; no GPU is asked. ``signature`` says the type of each argument that is no constant."""
    compiler = importlib.import_module("triton.compiler.compiler")
    backends = importlib.import_module("triton.backends.compiler")
    runtime = importlib.import_module(f"{GLUON}._runtime")
    whole = {name: signature.get(name, "constexpr") for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 3.9.0 warns of what 3.10 will change: it is set below
        source = runtime.GluonASTSource(function, whole, places)
        made = compiler.compile(
            source,
            target=backends.GPUTarget("cuda", TARGET, 32),
            options={"num_warps": warps, "enable_fp_fusion": True},
        )
    found = made.metadata
    return Machine(found.name, made.asm["cubin"], 32 * found.num_warps, found.shared, made.asm["ptx"])
