"""Past the article's end: tensor-core tiles, asynchronous copies, a backward without the T x T matrix; 16-bit.

Reads Inputs, writes Output and Gradients. Imports torch only inside functions, and no other implementation.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from attnscope.device import Device
from attnscope.implementation import Gradients, Output, Sheet
from attnscope.implementations.cuda_ladder.common import (
    C_TYPES,
    CAUSAL_FEATURES,
    Geometry,
    LadderImplementation,
    PreparedForward,
    Step,
    ceil_div,
    empty_gradients,
    kernel,
    strides,
    vector_aligned,
)
from attnscope.implementations.cuda_ladder.forward import FORWARD, PACKAGES
from attnscope.inputs import Inputs, Tensor
from attnscope.workload import Workload

TILE_ROWS = 64  # keys of a tile of the forward kernels
PAD = 8  # numbers that a tile's row is longer than D
MAX_HEAD_DIM = 128


def flash_sheet(directions: frozenset[str], kernels: tuple[str, ...], *, lse: bool) -> Sheet:
    """What the tensor-core rungs claim."""
    return Sheet(
        dtypes=frozenset({"bf16", "fp16"}),
        features=CAUSAL_FEATURES,
        devices=frozenset({"cuda"}),
        directions=directions,
        max_head_dim=MAX_HEAD_DIM,
        head_dim_multiple=16,
        min_capability=(8, 0),
        packages=PACKAGES,
        kernels={"cuda": kernels},
        lse=lse,
        deterministic=True,
        ours=True,
    )


class FlashLadder(LadderImplementation):
    """Base of the tensor-core rungs."""

    block_sizes: ClassVar[tuple[int, ...]] = (64, 128, 256)
    default_block_size = 128
    kernel_name: ClassVar[str]

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """Also: a scale below 0 would turn the maximum into the minimum."""
        found = super().more_reasons(workload, device, direction)
        if workload.effective_scale < 0:
            found.append("needs a scale of at least 0")
        return found

    @property
    def max_length(self) -> int:
        """Tiles are in x of the grid."""
        return 2**24

    def defines(self, dtype: str, head_dim: int, block: int) -> dict[str, str | int]:
        """What the kernel is compiled with."""
        return {"T16": C_TYPES[dtype], "HEAD_DIM": head_dim, "BLOCK_SIZE": block}

    def rows_a_block(self, head_dim: int, block: int) -> int:
        """Query rows that a block owns: 16 a warp."""
        del head_dim
        return block // 2

    def shared_bytes(self, head_dim: int, block: int) -> int:
        """Dynamic shared memory of a block."""
        return 2 * (self.rows_a_block(head_dim, block) + 2 * TILE_ROWS) * (head_dim + PAD)

    def grid(self, geometry: Geometry, rows: int) -> tuple[int, int]:
        """Blocks of so many rows, by head."""
        return ceil_div(geometry.T, rows), geometry.heads

    def make(self, workload: Workload, device: Device, geometry: Geometry) -> Any:
        """Compiles."""
        return PreparedFlash(self, device, geometry, workload.dtype)

    def kernel_sources(self, head_dim: int, block: int) -> list[tuple[str, dict[str, str | int]]]:
        """See the base."""
        return [(self.source, self.defines("bf16", head_dim, block))]


class ForwardV7Mma(FlashLadder):
    """Tensor-core tiles with online softmax."""

    name = "forward_v7_mma"
    rung = "v7_mma"
    source = "forward_v7_mma.cu"
    kernel_name = "flash_tensor_cores"
    summary = "ladder, beyond: tensor-core tiles with online softmax, no T x T matrix, no permutes"
    sheet = flash_sheet(FORWARD, (kernel_name,), lse=True)


class ForwardV8Async(FlashLadder):
    """Asynchronous copies, two buffers."""

    name = "forward_v8_async"
    rung = "v8_async"
    source = "forward_v8_async.cu"
    kernel_name = "flash_async_copies"
    summary = "ladder, beyond: the next tile arrives by asynchronous copies while this one is computed on"
    sheet = flash_sheet(FORWARD, (kernel_name,), lse=True)
    wide_head_dim: ClassVar[int] = 64  # beyond it, two tiles of 16 rows a warp do not fit in registers

    def row_tiles(self, head_dim: int) -> int:
        """Tiles of 16 rows that a warp owns."""
        return 2 if head_dim <= self.wide_head_dim else 1

    def defines(self, dtype: str, head_dim: int, block: int) -> dict[str, str | int]:
        """Also the tiles a warp."""
        return {**super().defines(dtype, head_dim, block), "ROW_TILES": self.row_tiles(head_dim)}

    def rows_a_block(self, head_dim: int, block: int) -> int:
        """16 or 32 a warp."""
        return block // 2 * self.row_tiles(head_dim)

    def shared_bytes(self, head_dim: int, block: int) -> int:
        """Two buffers of keys and values."""
        return 2 * (self.rows_a_block(head_dim, block) + 4 * TILE_ROWS) * (head_dim + PAD)


class ForwardV9Wgmma(FlashLadder):
    """Hopper's warpgroup products."""

    name = "forward_v9_wgmma"
    rung = "v9_wgmma"
    source = "forward_v9_wgmma.cu"
    kernel_name = "flash_warpgroups"
    summary = "ladder, beyond: Hopper's asynchronous warpgroup products, softmax beside them"
    sheet = replace(
        flash_sheet(FORWARD, (kernel_name,), lse=True),
        head_dim_multiple=64, min_capability=(9, 0), below_capability=(10, 0),
    )  # fmt: skip
    block_sizes = (128, 256)
    default_block_size = 256
    keys: ClassVar[int] = 64  # of a tile
    stages: ClassVar[int] = 3  # as in the source

    def defines(self, dtype: str, head_dim: int, block: int) -> dict[str, str | int]:
        """Also the keys a tile, and how many blocks a multiprocessor's registers are to hold."""
        blocks = (4 if block == 128 else 2) if head_dim == 64 else (2 if block == 128 else 1)
        return {**super().defines(dtype, head_dim, block), "KEYS": self.keys, "BLOCKS_A_SM": blocks}

    def shared_bytes(self, head_dim: int, block: int) -> int:
        """Queries, three buffers of keys and values, and what aligning them takes."""
        return 1024 + 2 * (self.rows_a_block(head_dim, block) + 2 * self.stages * self.keys) * head_dim

    def grid(self, geometry: Geometry, rows: int) -> tuple[int, int]:
        """Heads beside one another, so that the longest rows of all heads come first."""
        return geometry.heads, ceil_div(geometry.T, rows)


class PreparedFlash(PreparedForward):
    """One kernel, straight from and to the model's layout."""

    def __init__(self, rung: FlashLadder, device: Device, geometry: Geometry, dtype: str) -> None:
        super().__init__(geometry)
        g = geometry
        specific = rung.sheet.below_capability is not None
        defines = rung.defines(dtype, g.D, g.block)
        self.flash = kernel(device, rung.source, rung.kernel_name, defines, specific=specific)
        self.shared_bytes = rung.shared_bytes(g.D, g.block)
        self.grid = rung.grid(g, rung.rows_a_block(g.D, g.block))
        self.flash.allow_shared_bytes(self.shared_bytes, device.index)

    def new_output(self, inputs: Inputs) -> Output:
        """out and lse."""
        import torch

        g, output = self.geometry, super().new_output(inputs)
        output.lse = torch.empty(g.B, g.H, g.T, dtype=torch.float32, device=inputs.q.device)
        return output

    def steps(self, inputs: Inputs, output: Output) -> list[Step]:
        """See the base."""
        g = self.geometry
        q, k, v = (vector_aligned(t) for t in (inputs.q, inputs.k, inputs.v))

        def run() -> None:
            self.flash.launch(
                self.grid, g.block, output.out, output.lse, q, k, v, g.H, g.T, g.scale, *strides(output.out, q, k, v),
                shared_bytes=self.shared_bytes,
            )  # fmt: skip

        return [Step("flash", run)]


@dataclass
class SavedFlash:
    """What the fused backward needs of the forward."""

    out: Tensor
    lse: Tensor


class BackwardV9Fused(FlashLadder):
    """No T x T matrix."""

    name = "backward_v9_fused"
    rung = "v9_fused"
    source = "backward_v9_fused.cu"
    kernel_name = "grad_keys_and_values"
    summary = "ladder, beyond: a fused backward that computes the weights again from lse, no T x T matrix"
    sheet = flash_sheet(
        frozenset({"backward"}), ("rowsum_of_out_and_grad", "grad_keys_and_values", "grad_queries"), lse=False
    )

    def columns(self, head_dim: int) -> int:
        """Rows of the tile that walks by."""
        return 64 if head_dim <= 64 else 32

    def defines(self, dtype: str, head_dim: int, block: int) -> dict[str, str | int]:
        """Also the walking tile."""
        return {**super().defines(dtype, head_dim, block), "COLUMNS": self.columns(head_dim)}

    def shared_bytes(self, head_dim: int, block: int) -> int:
        """Two tiles of its own, two that walk by, and their lse and delta."""
        columns = self.columns(head_dim)
        return 2 * (2 * self.rows_a_block(head_dim, block) + 2 * columns) * (head_dim + PAD) + 8 * columns

    def make(self, workload: Workload, device: Device, geometry: Geometry) -> Any:
        """Compiles, the forward too."""
        return PreparedFusedBackward(self, device, geometry, workload.dtype)

    def kernel_sources(self, head_dim: int, block: int) -> list[tuple[str, dict[str, str | int]]]:
        """The forward's too."""
        return [*super().kernel_sources(head_dim, block), *ForwardV8Async().kernel_sources(head_dim, block)]


class PreparedFusedBackward:
    """Forward by V8; three kernels back."""

    def __init__(self, rung: BackwardV9Fused, device: Device, geometry: Geometry, dtype: str) -> None:
        import torch

        self.geometry = g = geometry
        self.forward_rung = PreparedFlash(ForwardV8Async(), device, geometry, dtype)
        self.shared_bytes, self.rows = rung.shared_bytes(g.D, g.block), rung.rows_a_block(g.D, g.block)
        defines = rung.defines(dtype, g.D, g.block)
        self.row_sums, self.keys_and_values, self.queries = (
            kernel(device, rung.source, name, defines)
            for name in ("rowsum_of_out_and_grad", "grad_keys_and_values", "grad_queries")
        )
        for one in (self.keys_and_values, self.queries):
            one.allow_shared_bytes(self.shared_bytes, device.index)
        self.delta = torch.empty(g.heads, g.T, dtype=torch.float32, device=device.torch_name)

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out and lse by V8."""
        output = self.forward_rung.forward(inputs)
        output.saved = SavedFlash(output.out, output.lse) if save else None
        return output

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """dq, dk, dv, fresh each call."""
        gradients = empty_gradients(inputs)
        if gradients[0].numel():
            for step in self.steps(inputs, saved, gradients):
                step.run()
        return Gradients(*gradients)

    def steps(self, inputs: Inputs, saved: SavedFlash, gradients: tuple[Tensor, Tensor, Tensor]) -> list[Step]:
        """Row sums, then each side."""
        g, out, lse = self.geometry, saved.out, saved.lse
        q, k, v, grad_out = (vector_aligned(t) for t in (inputs.q, inputs.k, inputs.v, inputs.grad_out))
        dq, dk, dv = gradients
        grid = (ceil_div(g.T, self.rows), g.heads)
        tensors = (q, k, v, grad_out)
        sizes = (lse, self.delta, g.H, g.T, g.scale)
        rows = g.heads * g.T

        def run_row_sums() -> None:
            self.row_sums.launch(
                (ceil_div(rows, g.block // 32),), g.block, self.delta, out, grad_out, ctypes.c_longlong(rows), g.H, g.T,
                *strides(out, grad_out),
            )  # fmt: skip

        def run_keys_and_values() -> None:
            self.keys_and_values.launch(
                grid, g.block, dk, dv, *tensors, *sizes, *strides(dk, dv, *tensors), shared_bytes=self.shared_bytes
            )

        def run_queries() -> None:
            self.queries.launch(
                grid, g.block, dq, *tensors, *sizes, *strides(dq, *tensors), shared_bytes=self.shared_bytes
            )

        return [
            Step("row sums", run_row_sums),
            Step("dK and dV", run_keys_and_values),
            Step("dQ", run_queries),
        ]
