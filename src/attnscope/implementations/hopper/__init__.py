"""Stage 2: our own attention forward for compute capability 9.0, in Gluon: TMA, wgmma, specialised warps.

Reads Inputs, writes Output. Must not import another implementation or a later stage. The kernel stands in
``kernels.py``, what changed between releases of Triton in ``gluon_shim.py``, how it is launched in ``launching.py``,
what may be compiled in ``configurations.py``, which of it is in ``entries.py``; docs/concepts/hopper.md says how it
works and which ideas won.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from attnscope.device import Device
from attnscope.errors import PrepareFailed, UsageError
from attnscope.implementation import Gradients, Output, Prepared, Sheet
from attnscope.implementations.hopper import configurations, decode, entries, launching, schedules
from attnscope.implementations.hopper.configurations import Configuration, block_of
from attnscope.implementations.hopper.entries import Entry
from attnscope.inputs import Inputs, Tensor, row_bounds
from attnscope.tunable import TunableImplementation
from attnscope.workload import Workload

MAX_TILES = 2**30
MAX_POSITIONS = 2**30  # L + S: positions, offsets and windows are 32 bits wide
SECTION_BYTES = 32 * 2**20  # K and V of the heads that are walked together: they stay in the L2 cache
LOG2_E = 1.4426950408889634
WARPS = 4  # of a group
DECODE = "decode"
RAN = {  # whose kernel ran, by the kernels' names
    r"^hopper_cuda_forward$": "hopper_cuda",
    r"^hopper_attention_decode": "hopper's decoding",
    r"^hopper_attention_": "hopper",
}


class Hopper(TunableImplementation):
    """Forward with every geometric mask, head dims up to 256 that are multiples of 8. Two engines: its own kernels in
    Gluon and Triton, and hopper_cuda's where a table says that it is faster."""

    name = "hopper"
    summary = "our own forward for compute capability 9.0: TMA, wgmma, warp groups that take turns"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16"}),
        features=frozenset(
            {
                "gqa", "cross", "unequal_head_dims", "causal_top_left", "causal_bottom_right", "window", "softcap",
                "scale", "alibi", "sinks", "lengths", "packed",
            }
        ),
        devices=frozenset({"cuda"}),
        directions=frozenset({"forward"}),
        min_capability=(9, 0),
        below_capability=(10, 0),
        max_head_dim=256,
        head_dim_multiple=8,
        packages=("torch", "triton>=3.6"),
        kernels={"cuda": (r"^hopper_attention_|^hopper_cuda_forward$",)},
        coarse_tanh=True,
        lse=True,
        deterministic=True,
        ours=True,
    )  # fmt: skip

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """What 32-bit positions rule out."""
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
        if configuration.cuda is not None:
            other = entries.cuda_engine()
            if not other.reasons_unsupported(workload, device):
                return other.prepare_as(workload, device, configuration.cuda)
        return self._made(lambda: PreparedHopper(workload, device, configuration.gluon))

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
    if tiles >= MAX_TILES:
        yield f"counts tiles in 32 bits: it takes less than 2**30, not {tiles}"


def _count(length: int, tile: int) -> int:
    return -(-length // tile)


class Plan:
    """What a workload and a configuration fix of a launch: the kernel's constants, the types and order of its
    arguments."""

    def __init__(self, workload: Workload, configuration: Configuration) -> None:
        w, c = workload, configuration
        self.workload, self.configuration, self.block = w, c, block_of(w)
        self.row_tiles = _count(w.L, c.rows)
        self.tiles = w.B * w.H * self.row_tiles
        heads = max(1, SECTION_BYTES // max(1, w.S * (w.D + w.D_v) * 2)) * w.group
        self.section = max(1, min(heads, w.B * w.H))
        self.prescaled = w.alibi or (w.softcap is None and w.effective_scale <= 0)  # its maximum is not scaled after
        self.pointers = {
            "lengths": w.lengths is not None, "starts": w.packed is not None, "ends": w.packed is not None,
            "slopes": w.alibi, "sinks": w.sinks, "order": self.scheduled,
        }  # fmt: skip

    @property
    def scheduled(self) -> bool:
        """Whether a table says which block works on which tiles."""
        c = self.configuration
        return (
            c.persistent and c.balanced and 0 < self.tiles <= schedules.MAX_TILES and schedules.is_uneven(self.workload)
        )

    def schedule(self, blocks: int) -> list[int]:
        """The table for a grid of ``blocks``."""
        costs = schedules.tile_costs(self.workload, self.configuration.rows, self.configuration.keys)
        return schedules.as_table(schedules.balance(costs, self.workload.H, self.section, blocks))

    @property
    def masked(self) -> bool:
        """Whether some tile of keys needs a mask."""
        w = self.workload
        return schedules.is_uneven(w) or w.S % self.configuration.keys != 0

    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled with."""
        w, c = self.workload, self.configuration
        return {name: None for name, there in self.pointers.items() if not there} | {
            "GROUPS": c.groups,
            "SLOTS": c.slots,
            "Q_SLOTS": c.q_slots,
            "CAUSAL": w.causal is not None,
            "BOTTOM_RIGHT": w.causal == "bottom_right",
            "WINDOWED": w.window is not None,
            "MASKED": self.masked,
            "CAPPED": w.softcap is not None,
            "PRESCALED": self.prescaled,
            "LONGEST_FIRST": w.causal is not None and not self.scheduled,
            "PINGPONG": c.pingpong,
            "OVERLAP": c.overlap,
            "LAZY_SUM": c.lazy_sum,
            "PRODUCER_REGISTERS": c.producer_registers,
            "CONSUMER_REGISTERS": c.consumer_registers,
        }

    def boxes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns that each descriptor moves at a time."""
        rows, keys = configurations.GROUP_ROWS, self.configuration.keys
        return {name: (size, self.block) for name, size in (("q", rows), ("k", keys), ("v", keys), ("o", rows))}

    def signature(self) -> dict[str, str]:
        """The type of each argument that is no constant, in the kernel's order."""
        from attnscope.implementations.hopper import gluon_shim, kernels

        types = {
            f"{name}_desc": gluon_shim.descriptor_type(self.workload.dtype, (1, 1, *box))
            for name, box in self.boxes().items()
        }
        types["lse"] = "*fp32"
        of_pointer = {"slopes": "*fp32", "sinks": "*fp32"}
        types |= {name: of_pointer.get(name, "*i32") for name, there in self.pointers.items() if there}
        return types | {name: "fp32" if name in ("scale", "cap") else "i32" for name in kernels.SCALARS}

    def compile(self) -> Any:
        """Machine code; no GPU is asked. Raises what Triton raises."""
        from attnscope.implementations.hopper import gluon_shim, kernels

        kernel = kernels.load().hopper_attention_forward
        machine = gluon_shim.compile_kernel(kernel, self.signature(), self.constants(), WARPS)
        wanted = launching.descriptor_parameters() * 4 + [8] * (1 + sum(self.pointers.values()))
        wanted += [4] * len(kernels.SCALARS) + [8, 8]  # Triton's own two last: scratch, which the kernel does not use
        if machine.parameters() != wanted:
            raise PrepareFailed(
                "this release of Triton passes arguments in another way than hopper does\n"
                "hint: install a release that attnscope names as tested, 3.6.0"
            )
        return machine

    def scalars(self) -> list[Any]:
        """Values of the kernel's scalars, in its order."""
        w = self.workload
        scale = w.effective_scale * LOG2_E
        cap = 1.0
        if w.softcap is not None:
            scale, cap = w.softcap * LOG2_E, w.effective_scale / w.softcap
        whole = (w.H, w.group, w.L, w.S, self.row_tiles, self.tiles, self.section, min(w.window or 0, w.L + w.S))
        return [*(ctypes.c_int32(value) for value in whole), ctypes.c_float(scale), ctypes.c_float(cap)]


class PreparedHopper:
    """The kernel with all that a workload fixes. It keeps nothing for a backward: there is none."""

    def __init__(self, workload: Workload, device: Device, configuration: Configuration) -> None:
        import torch

        w = self.workload = workload
        self.configuration, self.plan, self.index = configuration, Plan(workload, configuration), device.index
        self.launcher: launching.Launcher | None = None
        self.bounds: list[Tensor] = []
        if self.plan.tiles == 0 or w.S == 0:
            return
        self.launcher = launching.Launcher(self.plan.compile(), device.index)
        properties = torch.cuda.get_device_properties(device.index)
        tiles = self.plan.tiles
        self.blocks = min(tiles, properties.multi_processor_count) if configuration.persistent else tiles
        if w.packed is not None:  # each row's sequence, apart from causal and window
            bounds = row_bounds(w.replace(causal=None, window=None), device.torch_name)
            self.bounds = [bound[0].to(torch.int32).contiguous() for bound in bounds]
        self.order: list[Tensor] = []
        if self.plan.scheduled:
            self.order = [torch.tensor(self.plan.schedule(self.blocks), dtype=torch.int32, device=device.torch_name)]

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out and lse. Inputs that TMA cannot read where they lie are copied first."""
        import torch

        del save
        w, q, k, v = self.workload, inputs.q, inputs.k, inputs.v
        if w.layout == "bhld":
            out = q.new_empty((w.B, w.H, w.L, w.D_v))
        else:
            out = q.new_empty((w.B, w.L, w.H, w.D_v)).transpose(1, 2)
        lse = q.new_empty((w.B, w.H, w.L), dtype=torch.float32)
        launcher = self.launcher
        if launcher is None:
            return _without_keys(out, lse, inputs.sinks)
        pointers = self._pointers(inputs)
        key = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(),
            q.stride(), k.stride(), v.stride(), *pointers,
        )  # fmt: skip
        arguments = launcher.kept.get(key)
        if arguments is None:
            q, k, v = (
                t if launching.readable(t) else t.clone(memory_format=torch.contiguous_format) for t in (q, k, v)
            )
            arguments = self._arguments(q, k, v, out, lse, pointers)
            if q is inputs.q and k is inputs.k and v is inputs.v:
                launcher.keep(key, arguments)
        if torch._C._cuda_getDevice() == self.index:
            launcher.launch(self.blocks, torch._C._cuda_getCurrentRawStream(self.index), arguments)
        else:
            with torch.cuda.device(self.index):
                launcher.launch(self.blocks, torch._C._cuda_getCurrentRawStream(self.index), arguments)
        return Output(out, lse)

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """There is none, as the sheet says."""
        raise UsageError("hopper has no backward\nhint: triton_fused has one")

    def _pointers(self, inputs: Inputs) -> list[int]:
        """Addresses of the options that the workload has, in the kernel's order."""
        found = []
        if self.workload.lengths is not None:
            found.append(inputs.lengths)
        found += self.bounds
        found += [option for option in (inputs.alibi_slopes, inputs.sinks) if option is not None]
        return [option.data_ptr() for option in [*found, *self.order]]

    def _arguments(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pointers: list[int]
    ) -> launching.Arguments:
        assert self.launcher is not None
        boxes, dtype = self.plan.boxes(), self.workload.dtype
        values: list[Any] = []
        for name, tensor in (("q", q), ("k", k), ("v", v), ("o", out)):
            rows, columns = boxes[name]
            box = (rows, min(columns, 64))  # a row of 128 bytes is the most that one swizzled box holds
            values += launching.described(self.launcher.descriptor(tensor, dtype, box))
        values += [ctypes.c_uint64(address) for address in (lse.data_ptr(), *pointers)]
        return launching.Arguments([*values, *self.plan.scalars(), ctypes.c_uint64(0), ctypes.c_uint64(0)])


def _without_keys(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Output:
    """Where there are no keys (or no rows): zeros, and an lse of -inf or of the sink alone."""
    lse.fill_(float("-inf"))
    if sinks is not None:
        lse.copy_(sinks[None, :, None].expand(lse.shape))
    return Output(out.zero_(), lse)
