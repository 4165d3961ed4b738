"""Stage 2: attention of few query rows (decoding), a part of ``hopper``: what is launched, with how many splits.

Reads Inputs, writes Output. Must not import another implementation or a later stage. The kernels stand in
``decode_kernels.py``, the ideas in docs/concepts/hopper_decode.md.

All that a workload, a card and the tensors' strides fix is kept as a plan: compiled kernels, grid, arguments. A call
takes its plan, allocates out and lse from torch's caching allocator, and launches. Where keys are split, parts and
counters lie in the stream's workspace, or in the capturing graph's (``workspace.py``), and the last program of a head
adds the parts up; many rows are added up by a second kernel, from memory of the call's own. So calls on any streams and
replays of any graphs may overlap. On a CPU the kernels run in Triton's interpreter, for tests alone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from attnscope import driver
from attnscope.device import Device
from attnscope.errors import UsageError
from attnscope.implementation import FEATURES, Gradients, Output
from attnscope.implementations.common import (
    empty_like_inputs,
    head_dim_block,
    nothing_seen,
    output_forms,
    power_of_2,
)  # fmt: skip
from attnscope.implementations.hopper.gluon_shim import Machine, scratch_values
from attnscope.implementations.hopper.workspace import of_device
from attnscope.inputs import Inputs, Tensor, torch_dtype
from attnscope.workload import Workload

MAX_ROWS = 64  # query rows times heads of a group: one tile of them, so that K and V are read once
MAX_HEAD_DIM = 256
MAX_POSITIONS = 2**30  # L + S: positions are 32 bits wide
MAX_GRID = 65535  # largest y and z of a CUDA grid: key/value heads and batch entries
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # 5, 20 and 40 lost to both neighbours
REFUSED = frozenset({"mask", "bias", "packed", "dropout"})
ALIGNMENT = 16  # bytes that are copied at a time
VECTOR = 8  # elements of 16 bits in them
COMBINE_ELEMENTS = 8192  # of parts that a program has in its registers at a time
COMBINE_ROWS = 4  # and rows
REGISTERS = 65536  # of a multiprocessor; threads get them by eights, 255 at most
LOG2_E = 1.4426950408889634


Bound = Callable[..., tuple[Any, Sequence[Any]]]


@dataclass(frozen=True)
class Tile:
    """What a program works on at a time, how Triton shall compile it, how many programs a multiprocessor holds.

    ``ahead`` tiles (0 or a power of 2) are announced to the L2 cache before the query tile is waited for.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int
    ahead: int = 0


# By (packed rows, larger head dim as held), the first that is large enough; of several the least predicted time wins.
# ``resident`` follows from shared memory (227 KiB) and registers. Those of (16, 128) were measured, the others follow.
TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (16, 64): (Tile(16, 128, 4, 3, 3),),
    (16, 128): (Tile(16, 64, 4, 3, 3), Tile(16, 128, 4, 2, 2, ahead=1)),
    (16, 256): (Tile(16, 32, 4, 3, 3),),
    (32, 64): (Tile(32, 128, 4, 3, 2),),
    (32, 128): (Tile(32, 64, 4, 3, 2),),
    (32, 256): (Tile(32, 16, 4, 4, 3),),
    (64, 64): (Tile(64, 64, 4, 3, 2),),
    (64, 128): (Tile(64, 64, 4, 3, 2),),
    (64, 256): (Tile(64, 32, 4, 3, 1),),
}


def fits(workload: Workload, device: Device) -> bool:
    """Whether this kernel takes the workload on the device: a card of 9.0."""
    return device.kind == "cuda" and device.capability == (9, 0) and takes(workload)


def takes(workload: Workload) -> bool:
    """Whether this kernel takes the workload: few rows, and no option that it lacks."""
    w = workload
    return (
        w.dtype in ("bf16", "fp16")
        and w.L * w.group <= MAX_ROWS
        and not w.features & REFUSED
        and all(dim <= MAX_HEAD_DIM and dim % VECTOR == 0 for dim in (w.D, w.D_v))
        and w.L + w.S < MAX_POSITIONS
        and max(w.H_kv, w.B) <= MAX_GRID
    )


def taken_features() -> frozenset[str]:
    """The words of a sheet that the kernel claims."""
    return frozenset(FEATURES) - REFUSED


def tiles_for(workload: Workload, device: Device) -> tuple[Tile, ...]:
    """The entry of ``TILES`` for the packed rows and head dims; the interpreter's own on a CPU."""
    rows = workload.L * workload.group
    if device.kind == "cpu":
        return (Tile(next(most for most in (16, 32, 64) if most >= min(rows, MAX_ROWS)), 16, 4, 1, 1),)
    dim = max(head_dim_block(workload.D), head_dim_block(workload.D_v))
    return next(tiles for (most, dims), tiles in TILES.items() if most >= min(rows, MAX_ROWS) and dims >= dim)


def keys_to_read(workload: Workload) -> int:
    """The most keys that the rows of any batch entry see together: what is there to be split."""
    w = workload
    if w.B == 0 or w.L == 0:
        return 0
    entries = range(w.B) if w.lengths is not None else (0,)
    return max(0, *(w.row_interval(b, w.L - 1)[1] - max(w.row_interval(b, 0)[0], 0) for b in entries))


# Fitted to the decode suite on one H200 (docs/concepts/hopper_decode.md).
BYTES_PER_US = 4.578e6  # read bandwidth
ALONE = 1.0  # programs a multiprocessor that draw it all, where all programs run at once
LAST = 1.5  # and in a last round, whose programs begin where the first ones ended, several on one multiprocessor
DRIFT = 4  # rounds after which programs no longer end together, so that there is no last round
START_US = 3.0  # from launch to first and from last byte to end
COMBINE_US, COMBINE_ROW_US, COMBINE_PART_US = 3.0, 0.001, 0.004  # second kernel: itself, each row, each program's part
# Not fitted yet: a store, a count and a load one after the other, then what one program draws from the L2 cache.
JOIN_US, JOIN_BYTES_PER_US = 1.8, 5e4


def predicted_us(workload: Workload, tile: Tile, splits: int, multiprocessors: int) -> float:
    """Time on the card, where each key/value head of each batch entry is read by ``splits`` programs of one tile."""
    w, programs = workload, workload.B * workload.H_kv * splits
    each = -(-keys_to_read(w) // (tile.keys * splits))
    tile_us = tile.keys * (w.D + w.D_v) * 2 / BYTES_PER_US
    slots = multiprocessors * tile.resident
    rounds, rest = divmod(programs, slots)
    if rest and rounds < DRIFT:
        rest = max(rest, round(multiprocessors * (LAST if rounds else ALONE)))
    added = min(joined_us(w, splits), combined_us(w, splits)) if splits > 1 else 0.0
    return (rounds * slots + rest) * each * tile_us + START_US + added


def combined_us(workload: Workload, splits: int) -> float:
    """What a second kernel takes to add up the parts."""
    w = workload
    return COMBINE_US + COMBINE_ROW_US * w.B * w.H * w.L + COMBINE_PART_US * w.B * w.H_kv * splits


def joined_us(workload: Workload, splits: int) -> float:
    """What the last program of a head takes to add up its parts."""
    w = workload
    return JOIN_US + 4 * splits * w.L * w.group * (w.D_v + 1) / JOIN_BYTES_PER_US


def choose(workload: Workload, device: Device, tiles: tuple[Tile, ...]) -> tuple[Tile, int]:
    """Which of ``tiles``, and how many programs share the keys of one: the first of the least predicted time.

    One split where one tile does not hold all rows (then there are programs enough) or there is nothing to read.
    """
    keys, rows = keys_to_read(workload), workload.L * workload.group
    options = [
        (tile, splits)
        for tile in tiles
        for splits in SPLITS
        if splits == 1 or (rows <= tile.rows and splits * tile.keys < keys + tile.keys)
    ]
    multiprocessors = device.multiprocessors or 132
    return min(options, key=lambda option: round(predicted_us(workload, option[0], option[1], multiprocessors), 2))


def load_kernels() -> Any:
    """The module of the kernels, made by ``triton.jit``."""
    from attnscope.implementations.hopper import decode_kernels

    return decode_kernels.load()


@dataclass(frozen=True)
class _Plan:
    """What calls of one set of strides share: each kernel as a function of its tensors, that says what to launch with
    which arguments."""

    decode: Bound
    combine: Bound | None


class DecodeKernel:
    """Attention of few rows for one workload on one device. Thread-safe; on any stream, in any graph."""

    def __init__(
        self, workload: Workload, device: Device, *, tile: Tile | None = None, splits: int | None = None,
        joined: bool | None = None,
    ) -> None:  # fmt: skip
        """``tile``, ``splits`` and whether the last program of a head adds up (``joined``) are chosen where not given.

        Raises what importing triton raises.
        """
        w = self.workload = workload
        self.device = device
        tiles = (tile,) if tile else tiles_for(w, device)
        self.tile, chosen = (tiles[0], splits) if splits else choose(w, device, tiles)
        row_tiles = -(-w.L * w.group // self.tile.rows)
        self.splits = chosen if row_tiles <= 1 else 1
        self.grid = max(row_tiles, self.splits if row_tiles else 0), w.H_kv, w.B
        self._kernels = load_kernels()
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._on_cuda = device.kind == "cuda"
        split = self.splits > 1
        self.joined = split and (joined_us(w, self.splits) <= combined_us(w, self.splits) if joined is None else joined)
        self._combines = split and not self.joined  # a second kernel adds the parts up
        out, lse = output_forms(w)
        elements = w.B * w.H * w.L * self.splits * (w.D_v + 1) if split else 0
        forms, self._out_strides = [out, lse], out[1]
        if self._combines:
            forms.append(((elements,), (1,), lse[2]))
        self._takes, self.workspace_bytes = (w.B * w.H_kv, elements), 4 * elements
        self.workspaces = of_device(device.torch_name)
        self.launches = driver.Launches(device.index, with_workspace=self.joined) if self._on_cuda else _Interpreted()
        self.fresh = driver.Fresh(device.index, *forms) if self._on_cuda else _interpreted_fresh(forms)
        options = {"lengths": w.lengths is not None, "alibi_slopes": w.alibi, "sinks": w.sinks}
        self._options = [name for name, there in options.items() if there]

    def compile(self) -> None:
        """Compiles and loads what tensors of the workload's own layout need."""
        q, k, v = empty_like_inputs(self.workload, torch_dtype(self.workload.dtype), "meta")
        self._plan_for(q.stride(), k.stride(), v.stride())

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out ``(B, H, L, D_v)`` in the workload's layout and lse ``(B, H, L)``, natural, float32; saves nothing.

        q, k and v are read in place where their rows lie whole and begin at multiples of 16 bytes, as they do in every
        layout of a workload; an odd view is copied first.
        """
        del save
        q, k, v = inputs.q, inputs.k, inputs.v
        if 0 in self.grid:
            return nothing_seen(self.workload, q, inputs.sinks)
        out, lse, *parts = self.fresh()
        others = [*parts, *[getattr(inputs, name) for name in self._options]]
        if not self.launches.replay(driver.launch_key(q, k, v, out, lse, others)):
            self._start(q, k, v, out, lse, others)
        return Output(out, lse)

    def _start(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, others: list[Tensor]) -> None:
        """Queue the kernels of a call that was not seen before. ``others``: parts for a second kernel, then options."""
        q, k, v = (t if is_readable(t, self.tile.keys) else driver.copied(t) for t in (q, k, v))
        others = [other.contiguous() for other in others]
        given = dict(zip([*["parts"] * self._combines, *self._options], others, strict=True))
        lengths, slopes, sinks = (given.get(name) for name in ("lengths", "alibi_slopes", "sinks"))
        parts, arrived = given.get("parts"), None
        if self.joined:
            workspace = self.workspaces.take(*self.launches.stream_and_capture(), *self._takes)
            parts, arrived = workspace.parts, workspace.arrived
        plan = self._plan_for(q.stride(), k.stride(), v.stride())
        calls = [plan.decode(q, k, v, out, lse, parts, arrived, lengths, slopes, sinks)]
        if plan.combine is not None:
            calls.append(plan.combine(parts, out, lse, sinks))
        self.launches.start(driver.launch_key(q, k, v, out, lse, others), *calls)

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """There is none, as the sheet says."""
        raise UsageError("hopper has no backward\nhint: triton_fused has one")

    def _plan_for(self, *strides: tuple[int, ...]) -> _Plan:
        """The plan of these strides of q, k and v, made where there is none; compiles."""
        plan = self._plans.get(strides)
        if plan is None:
            plan = _Plan(self._decode_bound(strides), self._combine_bound() if self._combines else None)
            self._plans[strides] = plan
        return plan

    def _decode_bound(self, strides: tuple[tuple[int, ...], ...]) -> Bound:
        w, tile = self.workload, self.tile
        plain = w.softcap is None and not w.alibi
        window = min(w.window or 0, w.L + w.S)  # a wider one hides nothing, and might not fit in 32 bits
        numbers = [
            w.L, w.S, window, self.splits, w.effective_scale * (LOG2_E if plain else 1.0), w.softcap,
            *(stride // VECTOR for tensor in (*strides, self._out_strides) for stride in tensor[:3]),
        ]  # fmt: skip
        constants = {
            "GROUP": w.group, "D": w.D, "D_V": w.D_v, "BLOCK_D": head_dim_block(w.D), "BLOCK_DV": head_dim_block(w.D_v),
            "ROWS": tile.rows, "KEYS": tile.keys, "CAUSAL": w.causal is not None,
            "BOTTOM_RIGHT": w.causal == "bottom_right", "WINDOWED": w.window is not None,
            "SPLIT": self.splits > 1, "JOINED": self.joined,
            "AHEAD": tile.keys * tile.ahead if self._on_cuda else 0,
            **self._at_once(min(power_of_2(w.L * w.group), COMBINE_ROWS) if self.joined else 1),
        }  # fmt: skip
        pointers = ["data", "data", "data", "data", "float32"]
        pointers += ["float32" if self.splits > 1 else "", "int32" if self.joined else ""]
        pointers += [
            "int32" if w.lengths is not None else "", "float32" if w.alibi else "", "float32" if w.sinks else ""
        ]  # fmt: skip
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        if self.joined:  # ptxas would take more than lets ``resident`` programs run, or fewer and spill
            options["maxnreg"] = min(255, REGISTERS // (tile.resident * 32 * tile.warps) // 8 * 8)
        return self._bound("hopper_attention_decode", self.grid, pointers, numbers, constants, options)

    def _at_once(self, rows: int) -> dict[str, int]:
        """What a program that adds up has in its registers at a time."""
        parts = COMBINE_ELEMENTS // (rows * head_dim_block(self.workload.D_v))
        return {"ROWS_AT_ONCE": rows, "PARTS_AT_ONCE": min(power_of_2(self.splits), parts)}

    def _combine_bound(self) -> Bound:
        w = self.workload
        numbers = [w.L, self.splits, *(stride // VECTOR for stride in self._out_strides[:3])]
        constants = {"GROUP": w.group, "D_V": w.D_v, "BLOCK_DV": head_dim_block(w.D_v), **self._at_once(1)}
        pointers = ["float32", "data", "float32", "float32" if w.sinks else ""]
        options = {"num_warps": 4, "num_stages": 1}
        grid = w.L * w.group, w.H_kv, w.B
        return self._bound("hopper_attention_decode_combine", grid, pointers, numbers, constants, options)

    def _bound(
        self, name: str, grid: tuple[int, int, int], pointers: list[str], numbers: list[Any],
        constants: dict[str, Any], options: dict[str, Any],
    ) -> Bound:  # fmt: skip
        """The kernel as a function of its tensors; compiles and loads it on a card.

        The machine code is launched past Triton, which would look at each of some forty arguments in each call.
        """
        kernel = getattr(self._kernels, name)
        if not self._on_cuda:
            return lambda *tensors: (functools.partial(kernel[grid], **constants), [*tensors, *numbers])
        dtypes = [self._torch_dtype(pointer) for pointer in pointers]
        compiled = kernel.warmup(*dtypes, *numbers, grid=grid, **constants, **options, enable_fp_fusion=True)
        given = zip(compiled.src.signature.items(), [*pointers, *numbers], strict=False)
        values = [_argument(kind, value) for (_, kind), value in given if kind != "constexpr"]
        function = load_machine(compiled, values, grid, self.device.index)
        return lambda *tensors: (function, _arguments(tensors, values))

    def _torch_dtype(self, pointer: str) -> Any:
        import torch

        return (
            None if not pointer else torch_dtype(self.workload.dtype) if pointer == "data" else getattr(torch, pointer)
        )


def machine_of(compiled: Any, values: list[Any]) -> Machine:
    """What Triton compiled. Raises PrepareFailed where its parameters are not ``values`` and two of scratch."""
    found = compiled.metadata
    machine = Machine(found.name, compiled.asm["cubin"], 32 * found.num_warps, found.shared, compiled.asm["ptx"])
    machine.require([ctypes.sizeof(value) for value in [*values, *scratch_values()]])
    return machine


def load_machine(compiled: Any, values: list[Any], grid: tuple[int, int, int], device_index: int) -> driver.Function:
    """The machine code on the card of that index, to be launched on ``grid``. Raises PrepareFailed."""
    machine = machine_of(compiled, values)
    handle = driver.load(machine.cubin, machine.name, machine.shared_bytes, device_index)
    return driver.Function(machine.name, handle, grid, machine.threads, machine.shared_bytes)


_SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


def _argument(kind: str, value: Any) -> Any:
    """A parameter of one of Triton's types; a pointer (``*fp32``) is put in later."""
    return ctypes.c_uint64(0) if kind.startswith("*") else _SCALARS[kind](value)


def _arguments(tensors: Sequence[Tensor | None], values: list[Any]) -> list[Any]:
    """What one launch passes: pointers come first in both kernels, then numbers, then Triton's own."""
    pointers = [ctypes.c_uint64(tensor.data_ptr()) for tensor in tensors if tensor is not None]
    return [*pointers, *values[len(pointers) :], *scratch_values()]


class _Interpreted:
    """Stands where ``driver.Launches`` does, in Triton's interpreter: nothing is kept."""

    def stream_and_capture(self) -> tuple[int, int | None]:
        """There is one stream, and nothing captures it."""
        return driver.LEGACY_STREAM, None

    def replay(self, key: Hashable) -> bool:
        """There is nothing to be queued again."""
        del key
        return False

    def start(self, key: Hashable, *calls: tuple[Callable[..., Any], Sequence[Any]]) -> None:
        """Run kernels with their arguments, one after the other."""
        del key
        for kernel, arguments in calls:
            kernel(*arguments)


def _interpreted_fresh(forms: Sequence[driver.Form]) -> Callable[[], list[Tensor]]:
    """Stands where ``driver.Fresh`` does, in Triton's interpreter."""
    import torch

    return lambda: [torch.empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in forms]


def is_readable(tensor: Tensor, keys: int) -> bool:
    """Whether 16 bytes at a time can be copied from it, and offsets within ``keys`` of its rows fit in 32 bits."""
    strides = [stride for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False) if size > 1]
    return (
        tensor.data_ptr() % ALIGNMENT == 0
        and (tensor.stride(3) == 1 or tensor.shape[3] == 1)
        and all(stride % VECTOR == 0 for stride in strides)
        and tensor.stride(2) * keys < 2**31
    )
