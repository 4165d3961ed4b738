"""Stage 2: a fused attention of our own in plain Triton, for any NVIDIA card from compute capability 8.0 on.

Reads Inputs, writes Output and Gradients. Must not import another implementation or a later stage. The kernels and how
they walk a mask stand in ``kernels.py``; here are the sheet, the tiles, and what is launched with what.

Forward: one kernel. Backward: delta = rowsum(dO * O); dq, a program a tile of rows; dk and dv, a program a tile of
keys, which sums over its group of query heads; dbias, where there is a bias, in a pass of its own that recomputes the
scores, so that a bias shared by heads or batch entries needs neither atomics nor a score matrix. Nothing is tuned when
it is called: ``TILES`` says what is compiled. On a CPU the kernels run in Triton's interpreter, for tests alone: it is
thousands of times slower than a card.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attnscope.device import Device
from attnscope.errors import PrepareFailed
from attnscope.implementation import FEATURES, Gradients, Output, Sheet, SheetImplementation
from attnscope.implementations.common import ANY_FUSED, head_dim_block
from attnscope.inputs import Inputs, Tensor, row_bounds, torch_dtype
from attnscope.workload import Workload

MAX_GRID = 2**31 - 1  # programs of a launch: largest x of a CUDA grid
MAX_POSITIONS = 2**30  # L + S: positions, offsets and windows are 32 bits wide


@dataclass(frozen=True)
class Tile:
    """What a kernel works on at a time, and how Triton shall compile it."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of one configuration. dbias keeps no sums over keys or rows, so it takes dq's."""

    forward: Tile
    dq: Tile
    dkdv: Tile


# By what multiplies, then by (largest head dim, bytes of an element): the first entry that holds both head dims is
# taken. Sized to spill next to no registers (tests/test_triton_fused.py compiles them all) and to fit the shared
# memory of the smallest card. fp32 takes three TF32 products of operands split in two each, hence its small tiles; at
# 256 it spills nevertheless.
TILES: dict[str, dict[tuple[int, int], Tiles]] = {
    "wgmma": {  # 9.0 to 10.3: warp groups multiply 64 rows at a time, 227 KiB of shared memory
        (64, 2): Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
        (128, 2): Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
        (256, 2): Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
        (64, 4): Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
        (128, 4): Tiles(Tile(32, 32, 8, 2), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
        (256, 4): Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    },
    "mma": {  # 8.x and 12.x: a warp multiplies 16 rows at a time, 99 KiB of shared memory at the least
        (64, 2): Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
        (128, 2): Tiles(Tile(128, 32, 8, 3), Tile(64, 64, 4, 2), Tile(32, 64, 8, 2)),
        (256, 2): Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 2)),
        (64, 4): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
        (128, 4): Tiles(Tile(32, 32, 8, 2), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
        (256, 4): Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    },
}


class TritonFused(SheetImplementation):
    """Forward and backward, every mask and option of a workload, head dims up to 256."""

    name = "triton_fused"
    summary = "our fused attention in plain Triton: every mask and option, deterministic; CPU in Triton's interpreter"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16", "fp32"}),
        features=frozenset(FEATURES),
        min_capability=(8, 0),
        max_head_dim=256,
        packages=("torch", "triton>=3.6"),
        kernels={"cuda": (r"^triton_fused_attention_",)},
        kernels_absent={"cpu": (ANY_FUSED,), "cuda": (ANY_FUSED,)},
        lse=True,
        deterministic=True,
        kept_on_disk=True,
        ours=True,
    )

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """What Triton needs to run here, and what 32-bit positions and a bias in float64 rule out."""
        del direction
        return [*_triton_reasons(workload, device), *_size_reasons(workload)]

    def prepare(self, workload: Workload, device: Device) -> PreparedTritonFused:
        """Compiles every kernel of the workload, both directions, for its own layout.

        Raises:
            PrepareFailed: triton does not import, or a kernel does not compile.
        """
        try:
            kernels = load_kernels()
            prepared = PreparedTritonFused(workload, device, kernels)
            if device.kind == "cuda":
                prepared.compile()
        except Exception as error:  # Triton's import, its compiler and ptxas raise all kinds
            lines = str(error).strip().splitlines() or [""]
            message = f"{self.name}: Triton failed with {type(error).__name__}"
            raise PrepareFailed(message, "\n".join(lines[:1] + lines[1:][-11:])) from error
        return prepared


def load_kernels() -> Any:
    """The module of the kernels, made by ``triton.jit``."""
    from attnscope.implementations.triton_fused import kernels

    return kernels.load()


def interpreting() -> bool:
    """Whether Triton interprets in this process: what TRITON_INTERPRET said when triton was imported, else says now."""
    language = sys.modules.get("triton.language")
    if language is not None:
        return type(language.sum).__name__ == "InterpretedFunction"
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def _triton_reasons(w: Workload, device: Device) -> Iterator[str]:
    if device.kind == "cpu" and not interpreting():
        when = " before triton is imported" if "triton.language" in sys.modules else ""
        yield f"runs on a CPU in Triton's interpreter only: set TRITON_INTERPRET=1{when}"
    if device.kind == "cpu" and "bf16" in (w.dtype, w.bias):  # seen with 3.6.0 and 3.7.1
        yield "takes no bf16 on a CPU: Triton's interpreter multiplies its bits as whole numbers, and truncates to it"
    if device.kind == "cuda" and interpreting():
        yield "TRITON_INTERPRET is set, so its kernels would be interpreted and not run on the card"
    if device.kind == "cuda" and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        yield "Triton needs a C compiler to build its launchers, and there is no gcc, no clang and no CC"


def _size_reasons(w: Workload) -> Iterator[str]:
    if w.bias == "fp64":
        yield "takes a bias in bf16, fp16 or fp32, not fp64"
    if w.L + w.S >= MAX_POSITIONS:
        yield f"counts positions in 32 bits: L + S must stay below 2**30, not {w.L + w.S}"
    programs = max(w.B * w.H * -(-w.L // 16), w.B * w.H_kv * -(-w.S // 16))
    if w.bias is not None:
        b, h, _, _ = w.broadcast_shape(w.bias_shape)
        programs = max(programs, b * h * -(-w.L // 16) * -(-w.S // 16))
    if programs > MAX_GRID:
        yield f"may need {programs} programs in a launch, a CUDA grid takes 2**31 - 1"


def choose_tiles(w: Workload, device: Device) -> Tiles:
    """The entry of ``TILES`` for the workload's head dims, dtype and card; the interpreter's own on a CPU."""
    if device.kind == "cpu":
        side = 16 if max(w.L, w.S) <= 40 else 128  # small, to have tiles of every kind; large, to end at all
        tile = Tile(side, side, 4, 1)
        return Tiles(tile, tile, tile)
    size, dim = 4 if w.dtype == "fp32" else 2, max(w.D, w.D_v)
    multiplies = "wgmma" if device.capability is not None and (9, 0) <= device.capability < (12, 0) else "mma"
    return next(tiles for (most, bytes_), tiles in TILES[multiplies].items() if most >= dim and bytes_ == size)


class PreparedTritonFused:
    """The kernels with all that a workload fixes. ``saved`` is (out, lse)."""

    def __init__(self, workload: Workload, device: Device, kernels: Any) -> None:
        import torch

        w = self.workload = workload
        self.kernels, self.tiles = kernels, choose_tiles(w, device)
        self.compile_only = False
        self.dims = {"D": w.D, "D_V": w.D_v, "BLOCK_D": head_dim_block(w.D), "BLOCK_DV": head_dim_block(w.D_v)}
        self.flags = {
            "CAUSAL": w.causal is not None,
            "BOTTOM_RIGHT": w.causal == "bottom_right",
            "WINDOWED": w.window is not None,
            "PRECISION": "tf32x3" if w.dtype == "fp32" else "ieee",
        }
        self.window = min(w.window or 0, w.L + w.S)  # a wider one hides nothing, and might not fit in 32 bits
        self.starts = self.ends = None
        if w.packed is not None:  # each row's sequence, apart from causal and window
            bounds = row_bounds(w.replace(causal=None, window=None), device.torch_name)
            self.starts, self.ends = (bound[0].to(torch.int32).contiguous() for bound in bounds)

    def compile(self) -> None:
        """Compiles and loads all that will be launched, by going through both directions without memory."""
        inputs = _stand_ins(self.workload)
        self.compile_only = True
        try:
            self.backward(inputs, self.forward(inputs, save=True).saved)
        finally:
            self.compile_only = False

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out and lse."""
        import torch

        w, tile = self.workload, self.tiles.forward
        out = self._empty(inputs, w.H, w.L, w.D_v)
        lse = inputs.q.new_empty((w.B, w.H, w.L), dtype=torch.float32)
        self._launch(
            "forward", w.B * w.H * _count(w.L, tile.rows), tile, (inputs.q, inputs.k, inputs.v, out),
            (lse, inputs.sinks, *self._options(inputs)), **self.dims, **self.flags, KEYS=tile.keys,
        )  # fmt: skip
        return Output(out, lse, (out, lse) if save else None)

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """delta, then dq, then dk and dv, then what else the workload has."""
        w, (out, lse), tiles = self.workload, saved, self.tiles
        q, k, v, grad, options = inputs.q, inputs.k, inputs.v, inputs.grad_out, self._options(inputs)
        common = self.dims | self.flags
        delta = lse.new_empty(lse.shape)
        dims = {name: self.dims[name] for name in ("D_V", "BLOCK_DV")}
        programs = w.B * w.H * _count(w.L, tiles.dq.rows)
        self._launch("backward_delta", programs, tiles.dq, (out, grad), (delta, w.L, w.H), **dims)

        dq = self._empty(inputs, w.H, w.L, w.D)
        self._launch(
            "backward_dq", programs, tiles.dq, (q, k, v, grad, (lse, delta), dq), options, **common, KEYS=tiles.dq.keys
        )
        dk, dv = self._empty(inputs, w.H_kv, w.S, w.D), self._empty(inputs, w.H_kv, w.S, w.D_v)
        programs = w.B * w.H_kv * _count(w.S, tiles.dkdv.keys)
        self._launch(
            "backward_dkdv", programs, tiles.dkdv, (q, k, v, grad, (lse, delta), dk, dv), options,
            **common, KEYS=tiles.dkdv.keys,
        )  # fmt: skip
        dbias = None if inputs.bias is None else self._grad_bias(inputs, lse, delta, options)
        return Gradients(dq, dk, dv, dbias, None if inputs.sinks is None else _grad_sinks(inputs.sinks, lse, delta))

    def _grad_bias(self, inputs: Inputs, lse: Tensor, delta: Tensor, options: tuple[Any, ...]) -> Tensor:
        """dbias in the bias's shape and dtype; where it has one row or column, tiles give sums that are added here."""
        import torch

        w, tile, bias = self.workload, self.tiles.dq, inputs.bias
        assert bias is not None
        b, h, rows, columns = bias.shape
        sum_rows, sum_keys = rows != w.L, columns != w.S
        row_tiles, key_tiles = _count(w.L, tile.rows), _count(w.S, tile.keys)
        shape = (b, h, row_tiles if sum_rows else w.L, key_tiles if sum_keys else w.S)
        if w.B == 0:
            return bias.new_zeros(bias.shape)
        parts = bias.new_empty(shape, dtype=torch.float32 if sum_rows or sum_keys else bias.dtype)
        self._launch(
            "backward_dbias", b * h * row_tiles * key_tiles, tile,
            (inputs.q, inputs.k, inputs.v, inputs.grad_out, (lse, delta), parts), (*options, w.B, b, h),
            **self.dims, **self.flags, KEYS=tile.keys, SUM_ROWS=sum_rows, SUM_KEYS=sum_keys,
        )  # fmt: skip
        dims = [axis for axis, summed in ((2, sum_rows), (3, sum_keys)) if summed]
        return parts.sum(dims, keepdim=True).to(bias.dtype) if dims else parts

    def _empty(self, inputs: Inputs, heads: int, length: int, dim: int) -> Tensor:
        """A result of shape (B, heads, length, dim) that lies in memory as the workload's layout has it."""
        if self.workload.layout == "bhld":
            return inputs.q.new_empty(self.workload.B, heads, length, dim)
        return inputs.q.new_empty(self.workload.B, length, heads, dim).transpose(1, 2)

    def _options(self, inputs: Inputs) -> tuple[Any, ...]:
        """The kernels' arguments for geometry and scores, in their order."""
        import torch

        w = self.workload
        mask, keep = (None if t is None else t.view(torch.uint8) for t in (inputs.mask, inputs.dropout_keep))
        dense = [part for tensor in (inputs.bias, mask, keep) for part in (tensor, _broadcast_strides(tensor))]
        lengths = inputs.lengths if w.lengths is not None else None
        return (
            lengths, self.starts, self.ends, w.L, w.S, self.window, w.effective_scale, w.softcap,
            inputs.alibi_slopes, *dense, 1 / (1 - w.dropout), w.H, w.group,
        )  # fmt: skip

    def _launch(
        self, name: str, programs: int, tile: Tile, tensors: tuple[Any, ...], rest: tuple[Any, ...], **constants: Any
    ) -> None:
        """Launches ``programs`` of a kernel. ``tensors`` get their strides behind them, a tuple goes as it is."""
        if programs == 0:
            return
        arguments: list[Any] = []
        for tensor in tensors:
            arguments += list(tensor) if isinstance(tensor, tuple) else [tensor, tensor.stride()]
        strides = [tensor.stride() for tensor in tensors if not isinstance(tensor, tuple)]
        sides = max(tile.rows, tile.keys), max(self.dims["BLOCK_D"], self.dims["BLOCK_DV"])
        constants |= {
            "WIDE": is_wide(strides, *sides),
            "ROWS": tile.rows,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        kernel = getattr(self.kernels, f"triton_fused_attention_{name}")
        if self.compile_only:
            _ = kernel.warmup(*arguments, *rest, grid=(programs,), **constants).run  # this loads it, and its launcher
        else:
            kernel[(programs,)](*arguments, *rest, **constants)


def is_wide(strides: list[tuple[int, ...]], rows: int, columns: int) -> bool:
    """Whether offsets within a tile need 64 bits, as they do in odd views only; where it begins always has them."""
    return any(rows * of_row + columns * of_column >= 2**31 for *_, of_row, of_column in strides)


def _grad_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(H,): minus each row's probability of its sink times delta. A sink of -inf in a row that sees nothing gives 0."""
    import torch

    probability = torch.exp(sinks[None, :, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    return -(probability * delta).sum((0, 2))


def _stand_ins(w: Workload) -> Inputs:
    """Inputs of the workload's shapes and strides that hold no memory."""
    import torch

    options: dict[str, Any] = {"dtype": torch_dtype(w.dtype), "device": "meta"}

    def empty(*shape: int, dtype: Any) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def laid_out(heads: int, length: int, dim: int) -> Tensor:
        if w.layout == "bhld":
            return torch.empty(w.B, heads, length, dim, **options)
        return torch.empty(w.B, length, heads, dim, **options).transpose(1, 2)

    q, k, v = laid_out(w.H, w.L, w.D), laid_out(w.H_kv, w.S, w.D), laid_out(w.H_kv, w.S, w.D_v)
    if w.layout == "qkv":
        q, k, v = torch.empty(w.B, w.L, 3, w.H, w.D, **options).permute(2, 0, 3, 1, 4).unbind(0)
    inputs = Inputs(w, q, k, v, laid_out(w.H, w.L, w.D_v))
    dense = (w.B, w.H, w.L, w.S)
    inputs.bias = empty(*w.broadcast_shape(w.bias_shape), dtype=torch_dtype(w.bias)) if w.bias else None
    inputs.mask = empty(*w.broadcast_shape(w.mask), dtype=torch.bool) if w.mask else None
    inputs.dropout_keep = empty(*dense, dtype=torch.bool) if w.dropout else None
    inputs.lengths = empty(w.B, dtype=torch.int32) if w.lengths is not None else None
    inputs.alibi_slopes = empty(w.H, dtype=torch.float32) if w.alibi else None
    inputs.sinks = empty(w.H, dtype=torch.float32) if w.sinks else None
    return inputs


def _broadcast_strides(tensor: Tensor | None) -> tuple[int, ...] | None:
    """Strides with 0 for dims of one, so that any index may be used there."""
    if tensor is None:
        return None
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _count(length: int, tile: int) -> int:
    return -(-length // tile)
