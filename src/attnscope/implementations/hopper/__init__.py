"""Stage 2: our own attention forward for compute capability 9.0, in Gluon: TMA, wgmma, specialised warps.

Reads Inputs, writes Output. Must not import another implementation or a later stage. The kernel stands in
``kernels.py``, what changed between releases of Triton in ``gluon_shim.py``, bool masks and biases in ``masked.py``,
what may be compiled in ``configurations.py``, which of it is in ``entries.py``; docs/concepts/hopper.md says how it
works and which ideas won.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from attnscope import driver
from attnscope.device import Device
from attnscope.errors import PrepareFailed, UsageError
from attnscope.implementation import Gradients, Output, Prepared, Sheet
from attnscope.implementations.common import nothing_seen, output_forms
from attnscope.implementations.hopper import configurations, decode, entries, gluon_shim, schedules
from attnscope.implementations.hopper.configurations import Configuration, block_of
from attnscope.implementations.hopper.entries import Entry
from attnscope.inputs import Inputs, Tensor, row_bounds
from attnscope.tunable import TunableImplementation
from attnscope.units import DTYPE_BYTES
from attnscope.workload import Workload

MAX_TILES = 2**30
MAX_POSITIONS = 2**30  # L + S: positions, offsets and windows are 32 bits wide
SECTION_BYTES = 32 * 2**20  # K and V of the heads that are walked together: they stay in the L2 cache
LOG2_E = 1.4426950408889634
WARPS = 4  # of a group
MULTIPROCESSORS = 132  # where the device does not say
OPTIONS = {"lengths": "lengths", "slopes": "alibi_slopes", "sinks": "sinks"}  # pointers that a call brings: in Inputs
NO_BIAS, BIAS_TILE, BIAS_ROW, BIAS_COLUMN = range(4)  # kernels.py: how a bias is read
DECODE = "decode"
RAN = {  # whose kernel ran, by the kernels' names
    r"^hopper_cuda_forward$": "hopper_cuda",
    r"^hopper_attention_decode": "hopper's decoding",
    r"^hopper_attention_": "hopper",
}


class Hopper(TunableImplementation):
    """Forward with every mask and an additive bias, head dims up to 256 that are multiples of 8. Two engines: its own
    kernels in Gluon and Triton, and hopper_cuda's where a table says that it is faster."""

    name = "hopper"
    summary = "our own forward for compute capability 9.0: TMA, wgmma, warp groups that take turns"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16"}),
        features=frozenset(
            {
                "gqa", "cross", "unequal_head_dims", "causal_top_left", "causal_bottom_right", "window", "softcap",
                "scale", "alibi", "sinks", "mask", "bias", "lengths", "packed",
            }
        ),
        devices=frozenset({"cuda"}),
        directions=frozenset({"forward"}),
        min_capability=(9, 0),
        below_capability=(10, 0),
        max_head_dim=256,
        head_dim_multiple=8,
        packages=("torch", "triton>=3.6"),
        kernels={"cuda": (r"^hopper_attention_|^hopper_cuda_(forward|combine)$",)},
        coarse_tanh=True,
        lse=True,
        deterministic=True,
        kept_on_disk=True,
        ours=True,
    )  # fmt: skip

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """What 32-bit positions rule out, and a bias in float64."""
        del device, direction
        return list(_size_reasons(workload))

    tables = entries.TABLES

    def tuning_class(self, workload: Workload) -> str:
        """Workloads of one class share an entry of the tables; those of few rows are all ``decode``."""
        return DECODE if _decodes(workload) else configurations.tuning_class(workload)

    def tuning_workloads(self) -> list[Workload]:
        """One workload for each class that is tuned."""
        return configurations.tuning_workloads()

    def reason_untuned(self, workload: Workload) -> str | None:
        """Decoding computes its choice from a workload's own sizes."""
        if not _decodes(workload):
            return None
        return f"class {DECODE} has no configuration: its tile and splits follow from each workload's sizes"

    def candidates(self, workload: Workload, device: Device) -> list[Entry]:
        """Entries worth measuring, the most promising of its own first, then those of hopper_cuda."""
        return entries.candidates(workload, device)

    def settled(self, best_first: Sequence[Entry]) -> Entry:
        """The fastest, and beside hopper_cuda's the fastest of its own, for what hopper_cuda refuses."""
        return entries.settled(best_first)

    def ran(self, names: Iterable[str]) -> str | None:
        """Whose kernel ran, by the kernels' names; None where they do not tell."""
        names = list(names)
        for pattern, told in RAN.items():
            if any(re.search(pattern, name) for name in names):
                return told
        return None

    def prepare(self, workload: Workload, device: Device) -> Prepared:
        """Compiles what the tables say of the workload's class: the user's, else the one that ships.

        Raises:
            PrepareFailed: triton does not import, or the kernel does not compile or load.
            RecordError: a table is not one.
        """
        if _decodes(workload) and decode.fits(workload, device):
            return self._made(lambda: _decoding(workload, device))
        return self.prepare_as(workload, device, self.chosen(workload, device))

    def prepare_as(self, workload: Workload, device: Device, configuration: Entry) -> Prepared:
        """Compiles that entry: hopper_cuda's kernel where it has one and hopper_cuda takes the workload, else the
        Gluon kernel. Raises PrepareFailed."""
        from attnscope.implementations.hopper.masked import PreparedMasked

        if configuration.cuda is not None:
            other = entries.cuda_engine()
            if not other.reasons_unsupported(workload, device):
                return other.prepare_as(workload, device, configuration.cuda)
        made = PreparedHopper if workload.mask is None and workload.bias is None else PreparedMasked
        return self._made(lambda: made(workload, device, configuration.gluon))

    def _made(self, make: Callable[[], Prepared]) -> Prepared:
        try:
            return make()
        except PrepareFailed:
            raise
        except Exception as error:  # Triton's import, its compiler and ptxas raise all kinds
            lines = str(error).strip().splitlines() or [""]
            message = f"{self.name}: Triton failed with {type(error).__name__}"
            raise PrepareFailed(message, "\n".join(lines[:1] + lines[1:][-11:])) from error


def _decodes(workload: Workload) -> bool:
    """Whether the kernels for few rows take the workload."""
    return decode.takes(workload) and 0 not in (workload.B, workload.L, workload.S)


def _decoding(workload: Workload, device: Device) -> Prepared:
    kernel = decode.DecodeKernel(workload, device)
    kernel.compile()
    return kernel


def _size_reasons(w: Workload) -> Iterator[str]:
    if w.L + w.S >= MAX_POSITIONS:
        yield f"counts positions in 32 bits: L + S must stay below 2**30, not {w.L + w.S}"
    tiles = w.B * w.H * -(-w.L // (2 * configurations.GROUP_ROWS))
    mask_tiles = tiles * _count(w.S, configurations.LEAST_KEYS) if w.mask is not None else 0
    if max(tiles, mask_tiles) >= MAX_TILES:
        yield f"counts tiles in 32 bits: it takes less than 2**30, not {max(tiles, mask_tiles)}"
    if w.bias == "fp64":
        yield "takes a bias in bf16, fp16 or fp32, not fp64"


def _count(length: int, tile: int) -> int:
    return -(-length // tile)


def _bias_kind(w: Workload) -> int:
    """Tiles of a bias come by TMA; one without rows, or without columns, is read where it is added."""
    _, _, rows, columns = w.broadcast_shape(w.bias_shape)
    return NO_BIAS if w.bias is None else BIAS_COLUMN if columns == 1 else BIAS_ROW if rows == 1 else BIAS_TILE


class Plan:
    """What a workload and a configuration fix of a launch: the kernel's constants, the types and order of its
    arguments. ``multiprocessors``: so many blocks run at once (0: not known)."""

    def __init__(self, workload: Workload, configuration: Configuration, multiprocessors: int = 0) -> None:
        w, c, self.multiprocessors = workload, configuration, multiprocessors
        self.workload, self.configuration, self.block = w, c, block_of(w)
        self.row_tiles = _count(w.L, c.rows)
        self.tiles = w.B * w.H * self.row_tiles
        heads = max(1, SECTION_BYTES // max(1, w.S * (w.D + w.D_v) * 2)) * w.group
        self.section = max(1, min(heads, w.B * w.H))
        self.prescaled = w.alibi or (w.softcap is None and w.effective_scale <= 0)  # its maximum is not scaled after
        self.bias_kind = _bias_kind(w)
        listed = w.mask is not None
        bounded = w.packed is not None and not listed
        self.pointers = {
            "lengths": w.lengths is not None, "starts": bounded, "ends": bounded,
            "slopes": w.alibi, "sinks": w.sinks, "order": self.scheduled,
            "words": listed, "lists": listed, "queue": self.queued, "bias": self.bias_kind in (BIAS_ROW, BIAS_COLUMN),
        }  # fmt: skip

    @property
    def scheduled(self) -> bool:
        """Whether a table says which block works on which tiles: not where each has one at most, nor of a queue."""
        c = self.configuration
        helps = self.multiprocessors < self.tiles <= schedules.MAX_TILES and not self.queued
        return c.persistent and c.balanced and helps and schedules.is_uneven(self.workload)

    @property
    def queued(self) -> bool:
        """Whether blocks take their tiles, after the first, from a queue; the kernels in front of a mask make one."""
        c, masked = self.configuration, self.workload.mask is not None
        return masked and c.persistent and c.queued and self.multiprocessors < self.tiles

    @property
    def fixed(self) -> bool:
        """Whether maxima are fixed: not where blocks take tiles from a queue, for which ones they had is forgotten; nor
        where that spills: of packed sequences, and beside a bias where tiles need a mask of their rows."""
        spills = self.workload.packed is not None or (self.bias_kind != NO_BIAS and self.masked)
        return self.configuration.fixed_max and not self.queued and not spills

    def schedule(self, blocks: int) -> list[int]:
        """The table for a grid of ``blocks``."""
        costs = schedules.tile_costs(self.workload, self.configuration.rows, self.configuration.keys)
        return schedules.as_table(schedules.balance(costs, self.workload.H, self.section, blocks))

    @property
    def in_sections(self) -> bool:
        """Whether a tile of rows of all heads of a section is walked before the next, the last tile first: where tiles
        may differ in length and no table deals them, and where heads may share tiles of a bias in the L2 cache."""
        w = self.workload
        return (w.causal is not None or w.mask is not None or self.bias_kind == BIAS_TILE) and not self.scheduled

    @property
    def batch_shares_bias(self) -> bool:
        """Whether batch entries read the same tiles of a bias, and heads read others."""
        batch, heads, _, _ = self.workload.broadcast_shape(self.workload.bias_shape)
        return self.bias_kind == BIAS_TILE and batch == 1 < min(heads, self.workload.B)

    @property
    def masked(self) -> bool:
        """Whether some tile of keys needs a mask that follows from its rows; a bool mask's bits hold geometry too."""
        w = self.workload
        return w.mask is None and (schedules.is_uneven(w) or w.S % self.configuration.keys != 0)

    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled with."""
        w, c = self.workload, self.configuration
        absent = [name for name, there in self.pointers.items() if not there]
        absent += [name for name in self.all_scalars() if name not in self.scalar_types()]
        absent += [] if self.bias_kind == BIAS_TILE else ["bias_desc"]
        return dict.fromkeys(absent) | {
            "GROUPS": c.groups,
            "SLOTS": c.slots,
            "Q_SLOTS": c.q_slots,
            "BIAS": self.bias_kind,
            "BIAS_SLOTS": c.bias_slots,
            "CAUSAL": w.causal is not None,
            "BOTTOM_RIGHT": w.causal == "bottom_right",
            "WINDOWED": w.window is not None,
            "MASKED": self.masked,
            "GUARDED": self.masked or w.mask is not None or w.bias is not None,  # a row may see no key of a tile
            "CAPPED": w.softcap is not None,
            "PRESCALED": self.prescaled,
            "LONGEST_FIRST": self.in_sections,
            "BATCH_FIRST": self.in_sections and self.batch_shares_bias,
            "PINGPONG": c.pingpong,
            "OVERLAP": c.overlap,
            "LAZY_SUM": c.lazy_sum,
            "FIXED": self.fixed,
            "PRODUCER_REGISTERS": c.producer_registers,
            "CONSUMER_REGISTERS": c.consumer_registers,
        }

    def boxes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns that each descriptor moves at a time."""
        rows, keys = configurations.GROUP_ROWS, self.configuration.keys
        found = {name: (size, self.block) for name, size in (("q", rows), ("k", keys), ("v", keys), ("o", rows))}
        return found | ({"bias": (rows, keys)} if self.bias_kind == BIAS_TILE else {})

    def dtype_of(self, name: str) -> str:
        """Of a tensor that a descriptor moves."""
        return str(self.workload.bias) if name == "bias" else self.workload.dtype

    def all_scalars(self) -> tuple[str, ...]:
        """The kernel's scalars, in its order, those of no use to the workload too."""
        from attnscope.implementations.hopper import kernels

        return kernels.SCALARS + kernels.MASK_SCALARS + kernels.BIAS_SCALARS

    def scalar_types(self) -> dict[str, str]:
        """Scalars that the workload uses, in the kernel's order, with their types."""
        from attnscope.implementations.hopper import kernels

        types = {name: "fp32" if name in ("scale", "cap") else "i32" for name in kernels.SCALARS}
        if self.workload.mask is not None:
            types |= {name: "i64" if name.endswith("step") else "i32" for name in kernels.MASK_SCALARS}
        if self.bias_kind == BIAS_TILE:
            types |= dict.fromkeys(kernels.BIAS_SCALARS[:2], "i32")
        elif self.bias_kind != NO_BIAS:
            types |= dict.fromkeys(kernels.BIAS_SCALARS, "i64")
        return types

    def signature(self) -> dict[str, str]:
        """The type of each argument that is no constant, in the kernel's order."""
        types = {
            f"{name}_desc": gluon_shim.descriptor_type(
                self.dtype_of(name), (1, 1, *box), 8 * DTYPE_BYTES[self.dtype_of(name)]
            )
            for name, box in self.boxes().items()
        }
        types["lse"] = "*fp32"
        of_pointer = {"slopes": "*fp32", "sinks": "*fp32", "bias": f"*{self.workload.bias}"}
        types |= {name: of_pointer.get(name, "*i32") for name, there in self.pointers.items() if there}
        return types | self.scalar_types()

    def compile(self) -> Any:
        """Machine code; no GPU is asked. Raises what Triton raises."""
        from attnscope.implementations.hopper import kernels

        kernel = kernels.load().hopper_attention_forward
        machine = gluon_shim.compile_kernel(kernel, self.signature(), self.constants(), WARPS)
        wanted = gluon_shim.descriptor_parameters() * len(self.boxes()) + [8] * (1 + sum(self.pointers.values()))
        wanted += [8 if kind == "i64" else 4 for kind in self.scalar_types().values()]
        wanted += [ctypes.sizeof(value) for value in gluon_shim.scratch_values()]
        machine.require(wanted)
        return machine

    def tables(self, device: Device, blocks: int) -> dict[str, Tensor]:
        """What the workload alone fixes, in device memory: each row's sequence, and who works on which tiles."""
        import torch

        w, found = self.workload, {}
        if w.packed is not None:  # apart from causal and window
            bounds = row_bounds(w.replace(causal=None, window=None), device.torch_name)
            found["starts"], found["ends"] = (bound[0].to(torch.int32).contiguous() for bound in bounds)
        if self.scheduled:
            found["order"] = torch.tensor(self.schedule(blocks), dtype=torch.int32, device=device.torch_name)
        return found

    def scalars(self) -> list[Any]:
        """Values of the kernel's scalars, in its order, but a mask's and a bias's."""
        w = self.workload
        unit = LOG2_E if w.bias is None else 1.0
        scale = w.effective_scale * unit
        cap = 1.0
        if w.softcap is not None:
            scale, cap = w.softcap * unit, w.effective_scale / w.softcap
        whole = (w.H, w.group, w.L, w.S, self.row_tiles, self.tiles, self.section, min(w.window or 0, w.L + w.S))
        return [*(ctypes.c_int32(value) for value in whole), ctypes.c_float(scale), ctypes.c_float(cap)]


class PreparedHopper:
    """The kernel with all that a workload fixes. It keeps nothing for a backward: there is none."""

    def __init__(self, workload: Workload, device: Device, configuration: Configuration) -> None:
        w = self.workload = workload
        self.configuration = configuration
        self.plan = Plan(workload, configuration, device.multiprocessors or 0)
        self.empty = self.plan.tiles == 0 or w.S == 0
        if self.empty:
            return
        tiles = self.plan.tiles
        blocks = min(tiles, device.multiprocessors or MULTIPROCESSORS) if configuration.persistent else tiles
        machine = self.plan.compile()
        handle = driver.load(machine.cubin, machine.name, machine.shared_bytes, device.index)
        self.function = driver.Function(machine.name, handle, (blocks, 1, 1), machine.threads, machine.shared_bytes)
        self.launches, self.fresh = driver.Launches(device.index), driver.Fresh(device.index, *output_forms(w))
        self.options = [name for name in OPTIONS if self.plan.pointers[name]]
        self.attributes = [OPTIONS[name] for name in self.options]
        self.tables = self.plan.tables(device, blocks)

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out and lse, fresh each call. Inputs that TMA cannot read where they lie are copied first."""
        del save
        q, k, v = inputs.q, inputs.k, inputs.v
        if self.empty:
            return nothing_seen(self.workload, q, inputs.sinks)
        out, lse, *between = self.fresh()
        others = [*between, *[getattr(inputs, name) for name in self.attributes]]
        if not self.launches.replay(driver.launch_key(q, k, v, out, lse, others)):
            self._start(q, k, v, out, lse, others)
        return Output(out, lse)

    def _start(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, others: list[Tensor]) -> None:
        """Queue the kernel of a call that was not seen before. ``others``: the options."""
        q, k, v = (driver.as_readable(tensor) for tensor in (q, k, v))
        options = [option.contiguous() for option in others]
        found = dict(zip(self.options, options, strict=True)) | self.tables
        places = {name: tensor.data_ptr() for name, tensor in ({"lse": lse} | found).items()}
        arguments = self._arguments({"q": q, "k": k, "v": v, "o": out}, places, self.plan.scalars())
        self.launches.start(driver.launch_key(q, k, v, out, lse, options), (self.function, arguments))

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """There is none, as the sheet says."""
        raise UsageError("hopper has no backward\nhint: triton_fused has one")

    def _arguments(self, tensors: dict[str, Tensor], places: dict[str, int], scalars: list[Any]) -> list[Any]:
        """What the kernel takes, in its order, as ctypes: ``tensors`` by descriptor, ``places`` of all else."""
        values: list[Any] = []
        for name, (rows, columns) in self.plan.boxes().items():
            box = (rows, min(columns, 128 // tensors[name].element_size()))  # the most that one swizzled box holds
            values += gluon_shim.descriptor_values(driver.tensor_map(tensors[name], self.plan.dtype_of(name), box))
        names = ["lse", *(name for name, there in self.plan.pointers.items() if there)]
        return kernel_arguments([places[name] for name in names], scalars, values)


def kernel_arguments(places: Sequence[int], scalars: Sequence[Any], descriptors: Sequence[Any] = ()) -> list[Any]:
    """What a kernel that Triton compiled takes, as ctypes: descriptors, addresses, scalars, and Triton's own two."""
    return [*descriptors, *(ctypes.c_uint64(place) for place in places), *scalars, *gluon_shim.scratch_values()]
