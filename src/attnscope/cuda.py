"""Stage 2: CUDA C++ compiled at run time: source to cubin, kept on disk, launched on torch's current stream.

Reads ``.cu`` files, writes kernels that implementations launch. Must not import an implementation or a later stage;
imports torch, ``cuda.core`` and ``cuda.bindings`` only inside functions. Compiling needs no GPU and no CUDA toolkit:
NVRTC comes as a wheel. Quoted includes are pasted into the source before it is compiled, so that the cache key covers
them; angle-bracket includes (CUDA's own headers) are looked for where the wheels and the toolkit put them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from attnscope.device import Device
from attnscope.errors import PrepareFailed, UsageError

PACKAGES = ("cuda-core", "cuda-bindings")  # what a sheet names as needed
CACHE_VARIABLE = "ATTNSCOPE_CACHE_DIR"
CACHE_FORMAT = 2
STATIC_SHARED_LIMIT_BYTES = 48 * 1024  # more must be asked for, kernel by kernel
MAX_GRID_X, MAX_GRID_YZ, MAX_BLOCK = 2**31 - 1, 65535, 1024
LOG_LINES = 12
ALWAYS = ("--std=c++17", "--use_fast_math", "--ptxas-options=-v")  # the published programs were built with fast math


@dataclass(frozen=True)
class KernelResources:
    """What one kernel takes, by the assembler's own report. ``shared_bytes`` is the static part."""

    name: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """Machine code of one source for one architecture. ``compile_s`` is 0 where it came from the cache.

    ``remarks`` are the assembler's about performance, such as C7510: asynchronous products are done one by one.
    """

    code: bytes
    architecture: str
    resources: tuple[KernelResources, ...]
    compile_s: float = 0.0
    remarks: tuple[str, ...] = ()

    def resources_of(self, kernel: str) -> KernelResources:
        """The resources of the kernel of that name."""
        for found in self.resources:
            if found.name == kernel:
                return found
        names = ", ".join(r.name for r in self.resources)
        raise UsageError(f'kernel must be one of {names}, got {kernel!r}\nhint: see the source\'s extern "C" names')


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel. Arguments of ``launch``: tensors (their address), ``int`` (a C int), ``float`` (a C float), or
    ``ctypes`` values for anything else, in the order of the C parameters."""

    name: str
    resources: KernelResources
    handle: Any
    library_kernel: Any  # the CUkernel that ``handle`` is the launchable form of; its library is never unloaded

    def launch(self, grid: tuple[int, ...], block: int, *args: Any, shared_bytes: int = 0) -> None:
        """Queue the kernel on torch's current stream; nothing waits, and a CUDA graph may be capturing.

        Raises:
            UsageError: grid or block is out of CUDA's bounds.
            PrepareFailed: the driver refused the launch.
        """
        import torch
        from cuda.bindings import driver

        gx, gy, gz = (*grid, 1, 1)[:3]
        if not (
            1 <= gx <= MAX_GRID_X and 1 <= gy <= MAX_GRID_YZ and 1 <= gz <= MAX_GRID_YZ and 1 <= block <= MAX_BLOCK
        ):
            raise UsageError(
                f"{self.name}: grid must lie in 1..{MAX_GRID_X} x {MAX_GRID_YZ} x {MAX_GRID_YZ} and block in "
                f"1..{MAX_BLOCK}, got grid {grid}, block {block}\nhint: a smaller workload or another block size"
            )
        values, types = pack_arguments(args)
        stream = torch.cuda.current_stream().cuda_stream
        (status,) = driver.cuLaunchKernel(
            self.handle, gx, gy, gz, block, 1, 1, shared_bytes, stream, (values, types), 0
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise PrepareFailed(f"launching {self.name} failed: {status.name}, grid {grid}, block {block}")

    def allow_shared_bytes(self, shared_bytes: int, device_index: int) -> None:
        """Let the kernel be launched with that much dynamic shared memory. Raises PrepareFailed where it cannot."""
        from cuda.bindings import driver

        if shared_bytes + self.resources.shared_bytes <= STATIC_SHARED_LIMIT_BYTES:
            return
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(
            attribute, shared_bytes, self.library_kernel, driver.CUdevice(device_index)
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise PrepareFailed(f"{self.name} needs {shared_bytes} bytes of shared memory a block: {status.name}")


def pack_arguments(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(values, ctypes) of kernel arguments, as the driver's Python binding takes them. Raises UsageError."""
    values: list[Any] = []
    types: list[Any] = []
    value: Any
    kind: Any
    for arg in args:
        if isinstance(arg, bool):
            raise UsageError("a kernel argument must not be a bool\nhint: pass int(flag)")
        if isinstance(arg, int):
            value, kind = arg, ctypes.c_int
            if not -(2**31) <= arg < 2**31:
                raise UsageError(f"an int kernel argument must fit in 32 bits, got {arg}\nhint: pass ctypes.c_longlong")
        elif isinstance(arg, float):
            value, kind = arg, ctypes.c_float
        elif isinstance(arg, ctypes._SimpleCData):
            value, kind = arg.value, type(arg)
        elif hasattr(arg, "data_ptr"):
            value, kind = arg.data_ptr(), ctypes.c_void_p
        else:
            raise UsageError(
                f"a kernel argument must be a tensor, int, float or ctypes value, got {type(arg).__name__}"
            )
        values.append(value)
        types.append(kind)
    return tuple(values), tuple(types)


def load_kernel(
    path: Path, name: str, device: Device, defines: Mapping[str, str | int] | None = None, *, specific: bool = False
) -> Kernel:
    """The kernel ``name`` of ``path`` for ``device``: compiled, or from the cache, and loaded once a process.

    ``specific`` compiles for exactly that architecture (``sm_90a``), which wgmma needs.

    Raises:
        PrepareFailed: it does not compile, or the driver does not take it.
    """
    if device.capability is None:
        raise PrepareFailed(f"{path.name} needs a CUDA device, got {device}")
    import torch

    torch.cuda.synchronize(device.index)  # the context must be there before a kernel can be loaded into it
    major, minor = device.capability
    architecture = f"sm_{major}{minor}" + ("a" if specific else "")
    return _load(path, name, architecture, tuple(sorted((k, str(v)) for k, v in (defines or {}).items())))


def compile_source(path: Path, architecture: str, defines: Mapping[str, str | int] | None = None) -> Cubin:
    """Machine code of ``path`` for ``architecture`` (``sm_90``); no GPU needed, cached on disk.

    Raises:
        PrepareFailed: with the file and the log's last lines, where it does not compile.
        UsageError: the architecture is not spelled like ``sm_90``.
    """
    if not re.fullmatch(r"sm_\d{2,3}[af]?", architecture):
        raise UsageError(f"architecture must read like sm_90, got {architecture!r}\nhint: sm_75 is a T4, sm_90 an H100")
    text = expand_includes(path)
    options = _options(defines or {}, text)
    key = _cache_key(text, options, architecture)
    file = cache_directory() / f"{path.stem}-{architecture}-{key[:32]}.cubin"
    kept = _read_cache(file, architecture)
    if kept is not None:
        return kept
    made = _compile(text, path, architecture, options)
    _write_cache(file, made)
    return made


def cache_directory() -> Path:
    """Where cubins are kept: ``$ATTNSCOPE_CACHE_DIR``, else ``attnscope`` in the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named) / "cubins"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnscope" / "cubins"


def expand_includes(path: Path) -> str:
    """The source with each ``#include "file"`` replaced by that file, once, with lines that keep errors in place.

    Raises:
        PrepareFailed: a file is not there.
    """
    seen: set[Path] = set()

    def lines(file: Path) -> Iterator[str]:
        if file in seen:
            return
        seen.add(file)
        try:
            text = file.read_text()
        except OSError as error:
            raise PrepareFailed(f"cannot read {file.name}: {error.strerror or error}") from None
        yield f'#line 1 "{file.name}"'
        for number, line in enumerate(text.splitlines(), 1):
            included = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if included is None:
                yield line
                continue
            yield from lines((file.parent / included.group(1)).resolve())
            yield f'#line {number + 1} "{file.name}"'

    return "\n".join(lines(path.resolve())) + "\n"


def parse_resources(log: str) -> tuple[KernelResources, ...]:
    """Registers, spills, stack and static shared memory of each kernel, from what ``ptxas -v`` printed."""
    found = []
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part.partition("'")[0]
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        if frame is None or registers is None:
            continue
        stack, stores, loads = (int(number) for number in frame.groups())
        found.append(
            KernelResources(name, int(registers[1]), stores, loads, stack, int(shared[1]) if shared is not None else 0)
        )
    return tuple(sorted(found, key=lambda r: r.name))


def parse_remarks(log: str) -> tuple[str, ...]:
    """The assembler's numbered remarks, without repeats."""
    return tuple(dict.fromkeys(re.findall(r"\(C\d{4}\).*", log)))


@functools.cache
def header_directories() -> tuple[str, ...]:
    """Folders that hold CUDA's own headers: those of the wheels, then a toolkit's; only some kernels need them."""
    import importlib.util

    found: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in list(spec.submodule_search_locations or ()) if spec is not None else []:
        for include in sorted(Path(root).glob("*/include")):
            found += [include, include / "cccl"]
    toolkit = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda") / "include"
    found += [toolkit, toolkit / "cccl"]
    return tuple(str(folder) for folder in found if folder.is_dir())


# --- compiling --------------------------------------------------------------------------------------------------------


def _options(defines: Mapping[str, str | int], text: str) -> tuple[str, ...]:
    macros = tuple(f"--define-macro={name}={value}" for name, value in sorted(defines.items()))
    includes = tuple(f"--include-path={folder}" for folder in header_directories()) if "#include <" in text else ()
    return (*ALWAYS, *macros, *includes)


def _cache_key(text: str, options: tuple[str, ...], architecture: str) -> str:
    stable = [option for option in options if not option.startswith("--include-path")]
    whole = "\0".join((str(CACHE_FORMAT), compiler_version(), architecture, *stable, text))
    return hashlib.sha256(whole.encode()).hexdigest()


@functools.cache
def compiler_version() -> str:
    """The version of the NVRTC that would compile. Raises PrepareFailed where there is none."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise PrepareFailed(
            f"compiling CUDA needs NVRTC, which does not load here: {why}\nhint: pip install 'attnscope[cuda]'"
        ) from None
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise PrepareFailed(f"NVRTC does not tell its version: {status.name}")
    return f"nvrtc {major}.{minor}"


class _Log:
    """What ``Program.compile`` writes its log to."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


def _compile(text: str, path: Path, architecture: str, options: tuple[str, ...]) -> Cubin:
    from cuda.core import Program, ProgramOptions
    from cuda.core._utils.cuda_utils import CUDAError

    started, log = time.perf_counter(), _Log()
    given = ProgramOptions(
        name=path.name,
        arch=architecture,
        std="c++17",
        use_fast_math=True,
        ptxas_options=["-v"],
        no_cache=True,  # NVRTC's own cache would answer without ptxas's report; ours keeps both
        define_macro=[tuple(o.split("=", 2)[1:]) for o in options if o.startswith("--define-macro")] or None,
        include_path=[o.split("=", 1)[1] for o in options if o.startswith("--include-path")] or None,
    )
    try:
        code = bytes(Program(text, "c++", given).compile("cubin", logs=log).code)
    except CUDAError as error:
        said = (log.text.strip("\0 \n") or str(error)).splitlines()
        errors = [line for line in said if "error" in line]
        shown = said[-LOG_LINES:] if not errors else [*errors[:3], "...", *said[-LOG_LINES:]]
        raise PrepareFailed(f"{path.name} does not compile for {architecture}:", "\n".join(shown)) from None
    return Cubin(code, architecture, parse_resources(log.text), time.perf_counter() - started, parse_remarks(log.text))


# --- the cache --------------------------------------------------------------------------------------------------------


class _Header(msgspec.Struct):
    """First line of a cache file; the machine code follows."""

    sha256: str
    resources: list[KernelResources]
    remarks: list[str]


def _read_cache(file: Path, architecture: str) -> Cubin | None:
    """What another process left; None where there is nothing, or where it was cut or changed."""
    try:
        head, _, code = file.read_bytes().partition(b"\n")
        header = msgspec.json.decode(head, type=_Header)
    except (OSError, msgspec.MsgspecError):
        return None
    if hashlib.sha256(code).hexdigest() != header.sha256:
        return None
    return Cubin(code, architecture, tuple(header.resources), remarks=tuple(header.remarks))


def _write_cache(file: Path, cubin: Cubin) -> None:
    """Write aside and rename: other processes see nothing or the whole. A folder that cannot be written costs time
    only, so it is no error."""
    header = _Header(hashlib.sha256(cubin.code).hexdigest(), list(cubin.resources), list(cubin.remarks))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with os.fdopen(handle, "wb") as temporary:
            temporary.write(msgspec.json.encode(header) + b"\n" + cubin.code)
        os.replace(name, file)
    except OSError:
        return


@functools.cache
def _load(path: Path, name: str, architecture: str, defines: tuple[tuple[str, str], ...]) -> Kernel:
    """By the driver alone: importing ``cuda.core`` takes longer than all else where the cubin is in the cache."""
    from cuda.bindings import driver

    cubin = compile_source(path, architecture, dict(defines))
    status, library = driver.cuLibraryLoadData(cubin.code, [], [], 0, [], [], 0)
    if status == driver.CUresult.CUDA_SUCCESS:
        status, kernel = driver.cuLibraryGetKernel(library, name.encode())
    if (
        status == driver.CUresult.CUDA_SUCCESS
    ):  # loaded now, not at the first launch, which may be within a graph capture
        status, _ = driver.cuKernelGetFunction(kernel)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise PrepareFailed(f"the driver does not take {name} of {path.name}: {status.name}")
    handle = driver.CUfunction(int(kernel))  # a CUkernel may be launched wherever a CUfunction may
    return Kernel(name, cubin.resources_of(name), handle, kernel)
