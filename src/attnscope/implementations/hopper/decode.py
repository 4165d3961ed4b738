"""Stage 2: attention of few query rows (decoding), a part of ``hopper``: what is launched, with how many splits.

Reads Inputs, writes Output. Must not import another implementation or a later stage. The kernels stand in
``decode_kernels.py``, the ideas in docs/concepts/hopper_decode.md.

All that a workload, a card and the tensors' strides fix is kept as a plan: compiled kernels, grid, arguments. A call
takes its plan, allocates out, lse and, where keys are split, the parts from torch's caching allocator, and launches. No
memory outlives a call, so calls on any streams and replays of any graphs may overlap. On a CPU the kernels run in
Triton's interpreter, for tests alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnscope.device import Device
from attnscope.errors import UsageError
from attnscope.implementation import FEATURES, Gradients, Output
from attnscope.implementations.common import empty_like_inputs
from attnscope.inputs import Inputs, Tensor, torch_dtype
from attnscope.workload import Workload

MAX_ROWS = 64  # query rows times heads of a group: one tile of them, so that K and V are read once
MAX_HEAD_DIM = 256
MAX_POSITIONS = 2**30  # L + S: positions are 32 bits wide
MAX_GRID = 65535  # largest y and z of a CUDA grid: key/value heads and batch entries
MAX_SPLITS = 256
REFUSED = frozenset({"mask", "bias", "packed", "dropout"})
ALIGNMENT = 16  # bytes that are copied at a time
VECTOR = 8  # elements of 16 bits in them
COMBINE_ELEMENTS = 8192  # of parts that the second kernel has in its registers at a time
LOG2_E = 1.4426950408889634


Launch = Callable[..., None]


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
    ahead: int = 2


# By (packed rows, larger head dim as held), the first that is large enough. A tile of K and V is 32 KiB at most; two
# or three are on their way while one is multiplied. ``resident`` follows from shared memory (227 KiB) and registers.
TILES: dict[tuple[int, int], Tile] = {
    (16, 64): Tile(16, 128, 4, 3, 3),
    (16, 128): Tile(16, 64, 4, 3, 3),
    (16, 256): Tile(16, 32, 4, 3, 3),
    (32, 64): Tile(32, 128, 4, 3, 2),
    (32, 128): Tile(32, 64, 4, 3, 2),
    (32, 256): Tile(32, 16, 4, 4, 3),
    (64, 64): Tile(64, 64, 4, 3, 2),
    (64, 128): Tile(64, 64, 4, 3, 2),
    (64, 256): Tile(64, 32, 4, 3, 1),
}


def fits(workload: Workload, device: Device) -> bool:
    """Whether this kernel takes the workload on the device: few rows, no option that it lacks, a card of 9.0."""
    w = workload
    return (
        device.kind == "cuda"
        and device.capability == (9, 0)
        and w.dtype in ("bf16", "fp16")
        and w.L * w.group <= MAX_ROWS
        and not w.features & REFUSED
        and all(dim <= MAX_HEAD_DIM and dim % VECTOR == 0 for dim in (w.D, w.D_v))
        and w.L + w.S < MAX_POSITIONS
        and max(w.H_kv, w.B) <= MAX_GRID
    )


def taken_features() -> frozenset[str]:
    """The words of a sheet that the kernel claims."""
    return frozenset(FEATURES) - REFUSED


def choose_tile(workload: Workload, device: Device) -> Tile:
    """The entry of ``TILES`` for the packed rows and head dims; the interpreter's own on a CPU."""
    rows = workload.L * workload.group
    if device.kind == "cpu":
        return Tile(next(most for most in (16, 32, 64) if most >= min(rows, MAX_ROWS)), 16, 4, 1, 1)
    dim = max(_block(workload.D), _block(workload.D_v))
    return next(tile for (most, dims), tile in TILES.items() if most >= min(rows, MAX_ROWS) and dims >= dim)


def keys_to_read(workload: Workload) -> int:
    """The most keys that the rows of any batch entry see together: what is there to be split."""
    w = workload
    if w.B == 0 or w.L == 0:
        return 0
    entries = range(w.B) if w.lengths is not None else (0,)
    return max(0, *(w.row_interval(b, w.L - 1)[1] - max(w.row_interval(b, 0)[0], 0) for b in entries))


@dataclass(frozen=True)
class Card:
    """What the number of splits depends on, besides the workload.

    ``slots``: programs that run at once. ``saturating``: programs that together draw the whole read bandwidth, fewer
    draw their share of it. ``combine``: what the second kernel costs, in tiles that the whole card could read instead.
    """

    slots: int
    saturating: int
    combine: int


def card_of(device: Device, tile: Tile) -> Card:
    """Assumed, not measured: one and a half programs a multiprocessor saturate, the second kernel takes 2 us."""
    multiprocessors = device.multiprocessors or 132
    return Card(multiprocessors * tile.resident, multiprocessors * 3 // 2, 270)


def predicted_cost(programs: int, tiles: int, splits: int, card: Card) -> int:
    """Time of ``programs`` x ``splits`` programs, in tiles that the whole card could read meanwhile.

    Programs of one size run in rounds of ``slots``; the last round, being smaller, may draw less than all bandwidth.
    A part is taken for an eighth of a tile, which it is with 4 rows of 128.
    """
    each = -(-tiles // splits)
    rounds, rest = divmod(programs * splits, card.slots)
    width = rounds * max(card.slots, card.saturating) + (max(rest, card.saturating) if rest else 0)
    return width * each + (card.combine + programs * splits // 8 if splits > 1 else 0)


def choose_splits(programs: int, tiles: int, card: Card) -> int:
    """How many programs share the keys of one: the smallest number of the least predicted cost.

    1 where that costs at most a twentieth more, which is what the prediction is worth: a second kernel surely costs.
    """
    if programs == 0:
        return 1
    costs = {n: predicted_cost(programs, tiles, n, card) for n in range(1, max(1, min(tiles, MAX_SPLITS)) + 1)}
    best = min(costs, key=costs.__getitem__)
    return 1 if costs[1] <= costs[best] * 1.05 else best


def load_kernels() -> Any:
    """The module of the kernels, made by ``triton.jit``."""
    from attnscope.implementations.hopper import decode_kernels

    return decode_kernels.load()


@dataclass(frozen=True)
class _Plan:
    """What calls of one set of strides share: the launches, each a function of its tensors."""

    decode: Launch
    combine: Launch | None


class DecodeKernel:
    """Attention of few rows for one workload on one device. Thread-safe; on any stream, in any graph."""

    def __init__(
        self, workload: Workload, device: Device, *, tile: Tile | None = None, splits: int | None = None
    ) -> None:
        """``tile`` and ``splits`` are chosen where not given. Raises what importing triton raises."""
        w = self.workload = workload
        self.device = device
        self.tile = tile or choose_tile(w, device)
        row_tiles, key_tiles = -(-w.L * w.group // self.tile.rows), -(-keys_to_read(w) // self.tile.keys)
        if row_tiles > 1:
            splits = 1  # rows of several tiles give programs enough
        self.splits = splits or choose_splits(w.B * w.H_kv, key_tiles, card_of(device, self.tile))
        self.grid = max(row_tiles, self.splits if row_tiles else 0), w.H_kv, w.B
        self._kernels = load_kernels()
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._on_cuda = device.kind == "cuda"
        rows = w.B * w.H * w.L
        self._parts = rows * self.splits * (w.D_v + 1) if self.splits > 1 else 0
        self._turned, self._lse_shape = w.layout != "bhld", (w.B, w.H, w.L)
        self._memory_shape = (w.B, w.L, w.H, w.D_v) if self._turned else (*self._lse_shape, w.D_v)
        row, head = (w.H * w.D_v, w.D_v) if self._turned else (w.D_v, w.L * w.D_v)
        self._out_strides = w.L * w.H * w.D_v, head, row

    def compile(self) -> None:
        """Compiles and loads what tensors of the workload's own layout need."""
        q, k, v = empty_like_inputs(self.workload, torch_dtype(self.workload.dtype), "meta")
        self._plan_for(q.stride(), k.stride(), v.stride())

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out ``(B, H, L, D_v)`` in the workload's layout and lse ``(B, H, L)``, natural, float32; saves nothing.

        q, k and v are read in place where their rows lie whole and begin at multiples of 16 bytes, as they do in every
        layout of a workload; an odd view is copied first.
        """
        import torch

        del save
        q, k, v = inputs.q, inputs.k, inputs.v
        out, lse = q.new_empty(self._memory_shape), q.new_empty(self._lse_shape, dtype=torch.float32)
        if self._turned:
            out = out.transpose(1, 2)
        if 0 in self.grid:
            return Output(out, lse)
        strides = q.stride(), k.stride(), v.stride()
        plan = self._plans.get(strides)
        if plan is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
            q, k, v = (tensor if is_readable(tensor, self.tile.keys) else _copied(tensor) for tensor in (q, k, v))
            plan = self._plan_for(q.stride(), k.stride(), v.stride())
        sinks, options = inputs.sinks, (inputs.lengths, inputs.alibi_slopes)
        if plan.combine is None:
            plan.decode(q, k, v, out, lse, lse, *options, sinks)
        else:
            parts = q.new_empty(self._parts, dtype=torch.float32)
            plan.decode(q, k, v, out, lse, parts, *options, sinks)
            plan.combine(parts, out, lse, sinks)
        return Output(out, lse)

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """There is none, as the sheet says."""
        raise UsageError("hopper has no backward\nhint: triton_fused has one")

    def _plan_for(self, *strides: tuple[int, ...]) -> _Plan:
        """The plan of these strides of q, k and v, made where there is none; compiles."""
        plan = self._plans.get(strides)
        if plan is None:
            plan = _Plan(self._decode_launch(strides), self._combine_launch() if self.splits > 1 else None)
            self._plans[strides] = plan
        return plan

    def _decode_launch(self, strides: tuple[tuple[int, ...], ...]) -> Launch:
        w, tile = self.workload, self.tile
        plain = w.softcap is None and not w.alibi
        window = min(w.window or 0, w.L + w.S)  # a wider one hides nothing, and might not fit in 32 bits
        numbers = [
            w.L, w.S, window, self.splits, w.effective_scale * (LOG2_E if plain else 1.0), w.softcap,
            *(stride // VECTOR for tensor in (*strides, self._out_strides) for stride in tensor[:3]),
        ]  # fmt: skip
        constants = {
            "GROUP": w.group, "D": w.D, "D_V": w.D_v, "BLOCK_D": _block(w.D), "BLOCK_DV": _block(w.D_v),
            "ROWS": tile.rows, "KEYS": tile.keys, "CAUSAL": w.causal is not None,
            "BOTTOM_RIGHT": w.causal == "bottom_right", "WINDOWED": w.window is not None,
            "SPLIT": self.splits > 1, "EARLY": self._on_cuda and self.splits > 1,
            "AHEAD": tile.keys * tile.ahead if self._on_cuda else 0,
        }  # fmt: skip
        pointers = ["data", "data", "data", "data", "float32", "float32"]
        pointers += [
            "int32" if w.lengths is not None else "", "float32" if w.alibi else "", "float32" if w.sinks else ""
        ]  # fmt: skip
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        return self._launch("hopper_attention_decode", self.grid, pointers, numbers, constants, options)

    def _combine_launch(self) -> Launch:
        w, block = self.workload, _block(self.workload.D_v)
        splits = _power_of_2(self.splits)
        numbers = [w.L, self.splits, *(stride // VECTOR for stride in self._out_strides[:3])]
        constants = {
            "GROUP": w.group, "D_V": w.D_v, "BLOCK_DV": block, "SPLITS": splits,
            "CHUNK": min(splits, COMBINE_ELEMENTS // block), "EARLY": self._on_cuda,
        }  # fmt: skip
        pointers = ["float32", "data", "float32", "float32" if w.sinks else ""]
        options = {"num_warps": 4, "num_stages": 1} | ({"launch_pdl": True} if self._on_cuda else {})
        grid = w.L * w.group, w.H_kv, w.B
        return self._launch("hopper_attention_decode_combine", grid, pointers, numbers, constants, options)

    def _launch(
        self, name: str, grid: tuple[int, int, int], pointers: list[str], numbers: list[Any],
        constants: dict[str, Any], options: dict[str, Any],
    ) -> Launch:  # fmt: skip
        """A function of the kernel's tensors that launches it with all else; compiles and loads it on a card.

        The compiled kernel is called past ``triton.jit``, which would look at each argument again, and is given
        addresses, which it would otherwise ask the driver about.
        """
        kernel = getattr(self._kernels, name)
        if not self._on_cuda:
            return lambda *tensors: kernel[grid](*tensors, *numbers, **constants)
        dtypes = [self._torch_dtype(pointer) for pointer in pointers]
        compiled = kernel.warmup(*dtypes, *numbers, grid=grid, **constants, **options)
        run, rest = compiled[grid], (*numbers, *constants.values())

        def launch(*tensors: Tensor | None) -> None:
            run(*[None if tensor is None else tensor.data_ptr() for tensor in tensors], *rest)

        return launch

    def _torch_dtype(self, pointer: str) -> Any:
        import torch

        return (
            None if not pointer else torch_dtype(self.workload.dtype) if pointer == "data" else getattr(torch, pointer)
        )


def is_readable(tensor: Tensor, keys: int) -> bool:
    """Whether 16 bytes at a time can be copied from it, and offsets within ``keys`` of its rows fit in 32 bits."""
    strides = [stride for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False) if size > 1]
    return (
        tensor.data_ptr() % ALIGNMENT == 0
        and (tensor.stride(3) == 1 or tensor.shape[3] == 1)
        and all(stride % VECTOR == 0 for stride in strides)
        and tensor.stride(2) * keys < 2**31
    )


def _copied(tensor: Tensor) -> Tensor:
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)


def _block(dim: int) -> int:
    """The head dim as the kernels hold it: a power of 2, at least the 16 of a tensor core product."""
    return max(16, _power_of_2(dim))


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()
