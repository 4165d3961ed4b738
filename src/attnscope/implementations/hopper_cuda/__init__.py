"""Stage 2: our own attention forward for Hopper in CUDA C++, with the copy engine and warpgroup products.

Reads Inputs, writes Output. Must not import another implementation or a later stage; imports torch only inside
functions. The kernel stands in ``forward.cu``, what puts rows together whose keys it cut in ``combine.cu``, what they
may be compiled with in ``configurations.py``, which block computes what in ``scheduling.py``;
docs/concepts/hopper_cuda.md tells why it is built this way.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from attnscope import cuda, driver
from attnscope.device import Device
from attnscope.errors import UsageError
from attnscope.implementation import Output, Sheet
from attnscope.implementations.common import nothing_seen, output_forms
from attnscope.implementations.hopper_cuda import configurations, scheduling
from attnscope.implementations.hopper_cuda.configurations import Configuration, ceil_div
from attnscope.inputs import Inputs, Tensor
from attnscope.tunable import Tables, TunableImplementation
from attnscope.workload import Workload

SOURCE, COMBINE_SOURCE = (Path(__file__).parent / name for name in ("forward.cu", "combine.cu"))
KERNEL, COMBINE_KERNEL = "hopper_cuda_forward", "hopper_cuda_combine"
COMBINE_ROWS, COMBINE_THREADS = 16, 128  # of a block
MAX_LENGTH = 2**30  # positions and offsets are 32 bits wide
MAX_TILES = 2**30
LEAST_SCALE = 2.0**-100  # the kernel multiplies by scale * log2(e), in floats that have no subnormals
RECIPROCAL_OF_1 = 2**62  # exact for what is below 2**30, as tiles and heads are
NO_TABLE = ctypes.c_void_p(None)
NOTHING_BETWEEN = NO_TABLE, NO_TABLE, 0  # where no keys are cut


class HopperCuda(TunableImplementation):
    """Forward only, causal both ways, windows, grouped heads; head dims up to 256, those of values of their own."""

    name = "hopper_cuda"
    summary = "our forward for Hopper in CUDA C++: copy engine, warpgroup products, persistent blocks; forward only"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16"}),
        features=frozenset(
            {"gqa", "cross", "unequal_head_dims", "causal_top_left", "causal_bottom_right", "window", "scale"}
        ),
        devices=frozenset({"cuda"}),
        directions=frozenset({"forward"}),
        max_head_dim=256,
        head_dim_multiple=8,
        min_capability=(9, 0),
        below_capability=(9, 1),
        packages=("torch", *cuda.PACKAGES),
        kernels={"cuda": (f"^({KERNEL}|{COMBINE_KERNEL})$",)},
        lse=True,
        deterministic=True,
        kept_on_disk=True,
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
        if not configuration.fits(workload.D, workload.D_v):
            raise UsageError(
                f"{self.name}: a configuration must fit registers and shared memory at D = {workload.D}, D_v = "
                f"{workload.D_v}, got {configuration}\nhint: fewer keys or stages"
            )
        return PreparedHopperCuda(workload, device, configuration)


class PreparedHopperCuda:
    """One kernel, and where it cuts keys a second one, straight from and to the caller's layout. Calls share a cache of
    launches and nothing else that they change."""

    def __init__(self, workload: Workload, device: Device, configuration: Configuration) -> None:
        self.workload, self.configuration = workload, configuration
        self.empty = 0 in (workload.B, workload.L, workload.S)
        if self.empty:
            return
        multiprocessors = device.multiprocessors or configurations.MULTIPROCESSORS
        defines = configuration.defines(workload, multiprocessors)
        kernel = cuda.load_kernel(SOURCE, KERNEL, device, defines, specific=True)
        shared_bytes = configuration.shared_bytes(workload.D, workload.D_v)
        kernel.allow_shared_bytes(shared_bytes, device.index)
        section = max(1, scheduling.section_heads(workload, device) // configuration.cluster_heads(workload))
        self.sizes = kernel_sizes(workload, configuration, section)
        clusters = configuration.clusters(workload, multiprocessors)
        self.split = Split(workload, device, configuration, clusters) if defines["SPLIT"] else None
        self.order = self.table(device, section, clusters) if defines["TABLE"] else NO_TABLE
        if self.split:
            self.order = self.split.order
        grid = clusters * configuration.cluster, 1, 1
        self.function = driver.Function(KERNEL, int(kernel.handle), grid, configuration.threads, shared_bytes)
        forms = [*output_forms(workload), *([self.split.form] if self.split else [])]
        self.launches, self.fresh = driver.Launches(device.index), driver.Fresh(device.index, *forms)

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out and lse, fresh each call. Inputs that the copy engine cannot read where they lie are copied first."""
        del save
        q, k, v = inputs.q, inputs.k, inputs.v
        if self.empty:
            return nothing_seen(self.workload, q)
        out, lse, *parts = self.fresh()
        if not self.launches.replay(driver.launch_key(q, k, v, out, lse, parts)):
            self.start(q, k, v, out, lse, *parts)
        return Output(out, lse)

    def start(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *parts: Tensor) -> None:
        """Queue a call that was not seen before, and keep it."""
        q, k, v = (driver.as_readable(tensor) for tensor in (q, k, v))
        calls = [(self.function, self.arguments(q, k, v, out, lse, *parts))]
        if self.split:
            calls.append((self.split.function, self.split.arguments(out, lse, *parts)))
        self.launches.start(driver.launch_key(q, k, v, out, lse, parts), *calls)

    def table(self, device: Device, section: int, clusters: int) -> Tensor:
        """The order of tiles, in device memory."""
        import torch

        lengths, heads = scheduling.key_tiles(self.workload, self.configuration), self.sizes[0]
        order = scheduling.balanced_order(lengths, heads, section, clusters)
        return torch.tensor(order, dtype=torch.int32, device=device.torch_name)

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *parts: Tensor) -> list[Any]:
        """What the kernel takes, in its order, as ctypes."""
        c, w = self.configuration, self.workload
        columns, share = configurations.PANEL_COLUMNS, c.keys // c.cluster
        maps = [
            driver.tensor_map(tensor, w.dtype, (rows, columns))
            for tensor, rows in ((q, c.rows), (k, share), (v, share))
        ]
        between = self.split.between(*parts) if self.split else NOTHING_BETWEEN
        given = (out, lse, self.order, *strides_of(out), w.effective_scale, *self.sizes, *between)
        return [*maps, *packed(*given)]

    def backward(self, inputs: Inputs, saved: Any) -> Any:
        """There is none: the sheet says so."""
        raise UsageError("hopper_cuda has no backward\nhint: triton_fused has one")


class Split:
    """Pieces of keys that are dealt to all clusters, and the kernel that puts their results together.

    ``form``: of what is between the two kernels, float32: sums of each piece's rows, then their maxima and weights.
    """

    def __init__(self, workload: Workload, device: Device, configuration: Configuration, clusters: int) -> None:
        import torch

        w, c = self.workload, self.configuration = workload, configuration
        self.dealt = scheduling.deal_pieces(c.tiles(w), ceil_div(w.S, c.keys), clusters)
        self.order, self.tiles, self.pieces = (
            torch.tensor(numbers, dtype=torch.int32, device=device.torch_name)
            for numbers in (self.dealt.order, self.dealt.tiles, self.dealt.pieces)
        )
        rows = self.dealt.turns * clusters * c.cluster * c.rows
        self.sums = rows * configurations.padded_head_dim(w.D_v)
        self.form = (self.sums + 2 * rows,), (1,), torch.float32
        defines = c.combine_defines(w)
        kernel = cuda.load_kernel(COMBINE_SOURCE, COMBINE_KERNEL, device, defines)
        grid = len(self.dealt.tiles) // 3 * c.cluster * (c.rows // COMBINE_ROWS), 1, 1
        self.function = driver.Function(COMBINE_KERNEL, int(kernel.handle), grid, COMBINE_THREADS, 0)

    def between(self, parts: Tensor) -> tuple[Tensor, Tensor, int]:
        """What the first kernel takes of it: sums, maxima and weights, and after how many turns they begin."""
        return parts, parts[self.sums :], self.dealt.whole_turns

    def arguments(self, out: Tensor, lse: Tensor, parts: Tensor) -> list[Any]:
        """What the second kernel takes, in its order, as ctypes."""
        w, (sums, rows, _) = self.workload, self.between(parts)
        sizes = w.H, w.L, ceil_div(w.L, self.configuration.cluster_rows(w))
        return packed(
            sums, rows, self.tiles, self.pieces, out, lse, *strides_of(out), w.effective_scale, *sizes
        )  # fmt: skip


def strides_of(out: Tensor) -> list[Any]:
    """Of batch entry, head and row, as the kernels take them."""
    return [ctypes.c_longlong(stride) for stride in out.stride()[:3]]


def packed(*given: Any) -> list[Any]:
    """Arguments of a kernel as ctypes."""
    values, kinds = cuda.pack_arguments(given)
    return [kind(value) for value, kind in zip(values, kinds, strict=True)]


def kernel_sizes(workload: Workload, configuration: Configuration, section: int) -> tuple[Any, ...]:
    """heads (those of a cluster counted once), H, L, S, row_tiles, section, reach, lag, and reciprocals of H, group,
    row_tiles, section, section * row_tiles, as the kernel takes them."""
    w = workload
    heads = w.B * w.H // configuration.cluster_heads(w)
    row_tiles = ceil_div(w.L, configuration.cluster_rows(w))
    divisors = w.H, w.group, row_tiles, section, section * row_tiles
    reciprocals = (ctypes.c_longlong(ceil_div(RECIPROCAL_OF_1, divisor)) for divisor in divisors)
    return heads, w.H, w.L, w.S, row_tiles, section, *scheduling.visible_from(w), *reciprocals
