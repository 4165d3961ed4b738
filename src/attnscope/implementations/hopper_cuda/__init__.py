"""Stage 2: our own attention forward for Hopper in CUDA C++, with the copy engine and warpgroup products.

Reads Inputs, writes Output. Must not import another implementation or a later stage; imports torch only inside
functions. The kernel stands in ``forward.cu``, what it may be compiled with in ``configurations.py``, which block
computes what in ``scheduling.py``, what the driver is asked for in ``launching.py``; docs/concepts/hopper_cuda.md
tells why it is built this way.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnscope import cuda
from attnscope.device import Device
from attnscope.errors import UsageError
from attnscope.implementation import Output, Sheet
from attnscope.implementations.common import empty_out
from attnscope.implementations.hopper_cuda import configurations, launching, scheduling
from attnscope.implementations.hopper_cuda.configurations import Configuration, ceil_div
from attnscope.inputs import Inputs, Tensor
from attnscope.tunable import Tables, TunableImplementation
from attnscope.workload import Workload

SOURCE = Path(__file__).parent / "forward.cu"
KERNEL = "hopper_cuda_forward"
MAX_LENGTH = 2**30  # positions and offsets are 32 bits wide
MAX_TILES = 2**30
LEAST_SCALE = 2.0**-100  # the kernel multiplies by scale * log2(e), in floats that have no subnormals
MULTIPROCESSORS = 132  # where the device does not say
KEPT_LAUNCHES = 64
NO_TABLE = ctypes.c_void_p(None)


class HopperCuda(TunableImplementation):
    """Forward only, causal both ways, windows, grouped heads; head dims up to 256."""

    name = "hopper_cuda"
    summary = "our forward for Hopper in CUDA C++: copy engine, warpgroup products, persistent blocks; forward only"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16"}),
        features=frozenset({"gqa", "cross", "causal_top_left", "causal_bottom_right", "window", "scale"}),
        devices=frozenset({"cuda"}),
        directions=frozenset({"forward"}),
        max_head_dim=256,
        head_dim_multiple=8,
        min_capability=(9, 0),
        below_capability=(9, 1),
        packages=("torch", *cuda.PACKAGES),
        kernels={"cuda": (f"^{KERNEL}$",)},
        lse=True,
        deterministic=True,
        ours=True,
    )

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """Scales that its maximum cannot stand, and sizes beyond 32-bit positions."""
        del device, direction
        w, found = workload, []
        if w.effective_scale < LEAST_SCALE:
            found.append(f"needs a scale of at least {LEAST_SCALE:.2g}")
        if w.L + w.S > MAX_LENGTH:
            found.append(f"takes L + S up to {MAX_LENGTH}, not {w.L + w.S}")
        tiles = w.B * w.H * ceil_div(w.L, configurations.GROUP_ROWS)
        if tiles > MAX_TILES:
            found.append(f"takes up to {MAX_TILES} tiles of rows over batch and heads, not {tiles}")
        return found

    def tuning_class(self, workload: Workload) -> str:
        """The class of workloads that share a tuned configuration."""
        return configurations.tuning_class(workload)

    tables: Tables[Configuration] = Tables(name, Configuration.from_dict, SOURCE.parent)

    def tuning_workloads(self) -> list[Workload]:
        """One workload for each class."""
        return configurations.tuning_workloads()

    def candidates(self, workload: Workload, device: Device) -> list[Configuration]:
        """Configurations worth timing, the usual one first."""
        return configurations.candidates(workload, device)

    def prepare_as(self, workload: Workload, device: Device, configuration: Configuration) -> PreparedHopperCuda:
        """Compiles a configuration, or takes it from the cache.

        Raises:
            UsageError: it does not fit the card.
            PrepareFailed: it does not compile.
        """
        if not configuration.fits(workload.D):
            raise UsageError(
                f"{self.name}: a configuration must fit registers and shared memory at D = {workload.D}, got "
                f"{configuration}\nhint: fewer keys or stages"
            )
        return PreparedHopperCuda(workload, device, configuration)


class PreparedHopperCuda:
    """One kernel, straight from and to the caller's layout. Calls share a cache of launches and nothing else that they
    change."""

    def __init__(self, workload: Workload, device: Device, configuration: Configuration) -> None:
        self.workload, self.configuration, self.index = workload, configuration, device.index
        self.empty = 0 in (workload.B, workload.L, workload.S)
        if self.empty:
            return
        defines = configuration.defines(workload)
        self.kernel = cuda.load_kernel(SOURCE, KERNEL, device, defines, specific=True)
        self.shared_bytes = configuration.shared_bytes(workload.D)
        self.kernel.allow_shared_bytes(self.shared_bytes, device.index)
        self.section = scheduling.section_heads(workload, device)
        self.sizes = kernel_sizes(workload, configuration, self.section)
        tiles = workload.B * workload.H * ceil_div(workload.L, configuration.rows)
        self.grid = min(tiles, device.multiprocessors or MULTIPROCESSORS) if configuration.persistent else tiles
        self.order = self.table(device) if configuration.by_table(workload) else NO_TABLE
        self.launches: dict[tuple[Any, ...], Callable[[], None]] = {}

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out and lse, fresh each call."""
        del save
        import torch

        w, q = self.workload, inputs.q
        out = empty_out(w, q.dtype, q.device)
        lse = torch.empty((w.B, w.H, w.L), dtype=torch.float32, device=q.device)
        if self.empty:
            return Output(out.zero_(), lse.fill_(-math.inf))
        self.launch(q, inputs.k, inputs.v, out, lse)
        return Output(out, lse)

    def launch(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Queue the kernel. The allocator gives the same addresses again and again, so what was packed is kept."""
        key = (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            q.stride(),
            k.stride(),
            v.stride(),
        )
        run = self.launches.get(key)
        if run is None:
            own_q, own_k, own_v = (launching.copyable(t) for t in (q, k, v))
            if own_q is not q or own_k is not k or own_v is not v:
                self.launch(own_q, own_k, own_v, out, lse)
                return
            if len(self.launches) >= KEPT_LAUNCHES:
                self.launches = {}
            run = self.launches[key] = self.pack(q, k, v, out, lse)
        run()

    def table(self, device: Device) -> Tensor:
        """The order of tiles, in device memory."""
        import torch

        w = self.workload
        lengths = scheduling.key_tiles(w, self.configuration)
        order = scheduling.balanced_order(lengths, w.B * w.H, self.section, self.grid)
        return torch.tensor(order, dtype=torch.int32, device=device.torch_name)

    def pack(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Callable[[], None]:
        """A launch for these addresses and strides."""
        c, w = self.configuration, self.workload
        columns = configurations.PANEL_COLUMNS
        maps = [launching.encode(t, w.dtype, rows, columns) for t, rows in ((q, c.rows), (k, c.keys), (v, c.keys))]
        strides = (ctypes.c_longlong(out.stride(axis)) for axis in (0, 1, 2))
        args = (*maps, out, lse, self.order, *strides, w.effective_scale, *self.sizes)
        return launching.bind(self.kernel, self.index, self.grid, c.threads, self.shared_bytes, args)

    def backward(self, inputs: Inputs, saved: Any) -> Any:
        """There is none: the sheet says so."""
        raise UsageError("hopper_cuda has no backward\nhint: triton_fused has one")


def kernel_sizes(workload: Workload, configuration: Configuration, section: int) -> tuple[int, ...]:
    """heads, H, group, L, S, row_tiles, section, reach, lag, as the kernel takes them."""
    w = workload
    row_tiles = ceil_div(w.L, configuration.rows)
    return w.B * w.H, w.H, w.group, w.L, w.S, row_tiles, section, *scheduling.visible_from(w)
