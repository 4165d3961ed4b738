"""Where work runs: the device's facts, and the environment that a record must name.

Needed by every stage. Imports torch only inside functions, so that reading records never needs it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from attnscope.errors import DeviceError
from attnscope.units import GIB

NO_LIMIT = 2**63


@dataclass(frozen=True)
class Device:
    """One device and its facts. ``capability`` is CUDA's compute capability, e.g. (9, 0); None on a CPU."""

    kind: str
    name: str
    index: int = 0
    capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    memory_bytes: int = 0
    l2_bytes: int | None = None
    threads: int | None = None

    @property
    def torch_name(self) -> str:
        """What ``torch.device`` takes."""
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"

    def __str__(self) -> str:
        return f"{self.name} ({self.threads} threads)" if self.kind == "cpu" else self.name


@dataclass(frozen=True)
class Environment:
    """Everything a number depends on besides the code it times."""

    python: str
    platform: str
    packages: dict[str, str] = field(default_factory=dict)
    driver: str | None = None
    cuda: str | None = None
    cudnn_loaded: str | None = None
    cudnn_path: str | None = None
    cpu: str | None = None
    threads: int | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None


PACKAGES_NAMED = (
    "attnscope", "torch", "triton", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-frontend", "flash-attn",
    "flash-attn-4", "xformers", "sageattention", "kernels", "cuda-core", "cuda-bench", "transformers",
)  # fmt: skip


def find_device(kind: str | None = None, index: int = 0) -> Device:
    """The device of that kind (``"cpu"`` or ``"cuda"``); without one, the GPU if there is one, else the CPU.

    Raises:
        DeviceError: the kind is unknown, torch is missing, or there is no such device.
    """
    try:
        import torch
    except ImportError as error:
        raise DeviceError(
            f"running attention needs torch, which does not import here: {error}\n"
            "hint: pip install 'attnscope[torch]'; reading reports, records and traces works without it"
        ) from None
    if kind not in (None, "cpu", "cuda"):
        raise DeviceError(
            f"device must be cpu or cuda, got {kind!r}\nhint: leave it out to take the GPU if there is one"
        )
    if kind == "cpu" or (kind is None and not torch.cuda.is_available()):
        return Device(kind="cpu", name=cpu_name(), memory_bytes=_cpu_memory_bytes(), threads=torch.get_num_threads())
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "this torch is built without CUDA" if built is None else f"torch (CUDA {built}) sees no CUDA device"
        raise DeviceError(f"device cuda is not available: {why}\nhint: --device cpu runs what a CPU can")
    if not 0 <= index < torch.cuda.device_count():
        raise DeviceError(
            f"device index must lie in 0..{torch.cuda.device_count() - 1}, got {index}\n"
            "hint: CUDA_VISIBLE_DEVICES decides which cards are seen"
        )
    facts = torch.cuda.get_device_properties(index)
    return Device(
        kind="cuda",
        name=facts.name,
        index=index,
        capability=(facts.major, facts.minor),
        multiprocessors=facts.multi_processor_count,
        memory_bytes=facts.total_memory,
        l2_bytes=facts.L2_cache_size,
    )


@functools.cache
def read_environment() -> Environment:
    """Versions, driver, the cuDNN actually loaded and its path, CPU, threads, git commit of this checkout."""
    packages = {}
    for name in PACKAGES_NAMED:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit, dirty = _git_state()
    facts: dict[str, object] = {}
    try:
        import torch
    except ImportError:
        pass
    else:
        packages["torch"] = str(torch.__version__)
        facts = {"cuda": torch.version.cuda, "threads": torch.get_num_threads()}
        if torch.cuda.is_available():
            facts |= {
                "driver": _driver_version(),
                "cudnn_loaded": _cudnn_version(),
                "cudnn_path": loaded_library("libcudnn.so"),
            }
    from attnscope import __version__

    packages["attnscope"] = __version__
    return Environment(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages=packages,
        cpu=cpu_name(),
        git_commit=commit,
        git_dirty=dirty,
        **facts,  # type: ignore[arg-type]
    )


def loaded_library(prefix: str) -> str | None:
    """File name with its parent folder of the first mapped shared library whose name starts with ``prefix``.

    Only the last three parts of the path are kept, so that a record never carries a user's home folder.
    """
    path = loaded_library_path(prefix)
    return None if path is None else "/".join(path.split("/")[-3:])


def loaded_library_path(prefix: str, maps: Path = Path("/proc/self/maps")) -> str | None:
    """The whole path of the first shared library whose name starts with ``prefix`` that this process has mapped.

    It is read from what the kernel says is mapped, so that a library which shadows another (LD_LIBRARY_PATH) is named.
    None where there is none, and where the system has no /proc.
    """
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.split(maxsplit=5)[-1] if line.count(" ") >= 5 else ""
        if os.path.basename(path).startswith(prefix):
            return path
    return None


@functools.cache
def cpu_name() -> str:
    """The processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def available_memory_bytes(device: Device) -> int:
    """Memory that can be had now: on the GPU what is free, and what torch's allocator holds without using it; on the
    CPU what is available within its cgroup."""
    if device.kind == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device.index) - torch.cuda.memory_allocated(device.index)
        return int(torch.cuda.mem_get_info(device.index)[0]) + unused
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, _cgroup_limit())
    except OSError:
        pass
    return _cpu_memory_bytes()


def _cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int:
    """What this control group may still take: its limit less what it holds and cannot give back."""
    try:
        limit = (root / "memory.max").read_text().strip()
        if not limit.isdigit():
            return NO_LIMIT
        used = int((root / "memory.current").read_text())
        facts = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except OSError:
        return NO_LIMIT
    return max(int(limit) - used + int(facts.get("inactive_file", 0)), 0)


def _cpu_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 * GIB


def _driver_version() -> str | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:  # no driver, no permission: the record then says None
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def _cudnn_version() -> str | None:
    import torch

    number = torch.backends.cudnn.version()
    if number is None:
        return None
    major, minor, patch = (number // 10000, number % 10000 // 100, number % 100) if number >= 90000 else (
        number // 1000, number % 1000 // 100, number % 100)  # fmt: skip
    return f"{major}.{minor}.{patch}"


def _git_state() -> tuple[str | None, bool | None]:
    """Commit of the checkout this package runs from; None for an installed package.

    A copy without its history (on a lent machine, say) is told its commit by ATTNSCOPE_GIT_COMMIT.
    """
    here = Path(__file__).resolve().parent
    told = os.environ.get("ATTNSCOPE_GIT_COMMIT")
    if told or not (here.parents[1] / ".git").exists():
        return told, None
    try:
        ask = functools.partial(subprocess.run, cwd=here, capture_output=True, text=True, timeout=10)
        commit = ask(["git", "rev-parse", "--verify", "--quiet", "HEAD"]).stdout.strip() or None
        return commit, bool(ask(["git", "status", "--porcelain"]).stdout.strip())
    except (OSError, subprocess.TimeoutExpired):
        return None, None
