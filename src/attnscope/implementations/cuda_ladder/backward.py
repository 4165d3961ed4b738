"""Backward V1 to V8: five steps around cuBLAS products, of which only the softmax's backward changes from rung to rung.

Reads Inputs, writes Gradients. Imports torch only inside functions, and no other implementation.

With P the weights and dO the gradient of the output: dP = dO V^T, dV = P^T dO, dS = scale * P * (dP - rowsum(P * dP)),
dQ = dS K, dK = dS^T Q. The published programs add to what the gradients' buffers hold; here each call assigns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attnscope.cuda import Kernel
from attnscope.device import Device
from attnscope.implementation import Gradients, Output, Sheet
from attnscope.implementations.cuda_ladder.common import (
    CAUSAL_FEATURES,
    Geometry,
    LadderImplementation,
    Layout,
    Step,
    ceil_div,
    empty_gradients,
    empty_out,
    kernel,
    layout_defines,
    multiply,
    score_buffer,
)
from attnscope.implementations.cuda_ladder.forward import PACKAGES, OnlineSoftmax
from attnscope.inputs import Inputs, Tensor
from attnscope.workload import Workload

KEYS_A_WARP = 8  # of V4 and V5


@dataclass
class SavedForward:
    """What the backward needs: q, k, v as (B * H, T, D), weights as (B * H, T, row_stride), zero above the diagonal."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor


class BackwardLadder(LadderImplementation):
    """Base of backward V1 to V8: a softmax-backward kernel and its grid."""

    kernel_name: ClassVar[str]

    def defines(self, block: int) -> dict[str, str | int]:
        """What the kernel is compiled with."""
        del block
        return {}

    def softmax_grid(self, g: Geometry) -> tuple[int, ...]:
        """The kernel's grid."""
        raise NotImplementedError

    def softmax_arguments(self, g: Geometry) -> tuple[Any, ...]:
        """What the kernel takes between its three matrices and its row stride and scale."""
        return (g.T,)

    def make(self, workload: Workload, device: Device, geometry: Geometry) -> PreparedBackward:
        """Compiles; allocates, and zeroes the scores' gradient once."""
        del workload
        return PreparedBackward(self, device, geometry)

    def kernel_sources(self, head_dim: int, block: int) -> list[tuple[str, dict[str, str | int]]]:
        """See the base."""
        own = (self.source, self.defines(block))
        return [("layout.cu", layout_defines(head_dim, "fp32", "fp32")), ("forward_v4.cu", {}), own]


def backward_sheet(kernel_name: str, *, comparable: bool = True) -> Sheet:
    """The sheets of V1 to V8 differ in the kernel's name alone."""
    return Sheet(
        dtypes=frozenset({"fp32"}),
        features=CAUSAL_FEATURES,
        devices=frozenset({"cuda"}),
        directions=frozenset({"backward"}),
        compute={"fp32": "tf32"},
        packages=PACKAGES,
        kernels={"cuda": (kernel_name,)},
        materialises_scores=True,
        comparable=comparable,
        ours=True,
    )


class PreparedBackward:
    """Forward by V4, which keeps its weights; backward in the published order."""

    def __init__(self, rung: BackwardLadder, device: Device, geometry: Geometry) -> None:
        self.rung, self.geometry, place = rung, geometry, device.torch_name
        self.layout, self.softmax = Layout(device, geometry, "fp32", "fp32"), OnlineSoftmax(device, geometry, "fp32")
        self.softmax_backward: Kernel = kernel(device, rung.source, rung.kernel_name, rung.defines(geometry.block))
        self.row_stride = geometry.row_stride("fp32")
        self.grad_weights = score_buffer(geometry, "fp32", place)
        self.grad_scores = score_buffer(geometry, "fp32", place)  # the kernels write t3 <= t only
        self.grad_out, self.dq, self.dk, self.dv = (self.layout.buffer(place) for _ in range(4))

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out; with ``save`` also permuted inputs and weights."""
        g, T = self.geometry, self.geometry.T
        out = empty_out(inputs)
        if not out.numel():
            return Output(out)
        q, k, v, heads_out = (self.layout.buffer(inputs.q) for _ in range(4))
        weights = score_buffer(g, "fp32", inputs.q.device)
        scores = self.grad_weights  # free until a backward runs
        self.layout.gather([inputs.q, inputs.k, inputs.v], [q, k, v])
        multiply(q, k.transpose(1, 2), scores[:, :, :T])
        self.softmax.run(weights, scores)
        multiply(weights[:, :, :T], v, heads_out)
        self.layout.scatter([heads_out], [out])
        return Output(out, saved=SavedForward(q, k, v, weights) if save else None)

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """dq, dk, dv, fresh each call."""
        gradients = empty_gradients(inputs)
        if gradients[0].numel():
            for step in self.steps(inputs, saved, gradients):
                step.run()
        return Gradients(*gradients)

    def steps(self, inputs: Inputs, saved: SavedForward, gradients: tuple[Tensor, Tensor, Tensor]) -> list[Step]:
        """What a backward does, in order."""
        T = self.geometry.T
        q, k, v, weights = saved.q, saved.k, saved.v, saved.weights[:, :, :T]
        grad_scores, grad_weights = self.grad_scores[:, :, :T], self.grad_weights[:, :, :T]
        return [
            Step("permute dO", lambda: self.layout.gather([inputs.grad_out], [self.grad_out])),
            Step("product dP", lambda: multiply(self.grad_out, v.transpose(1, 2), grad_weights)),
            Step("product dV", lambda: multiply(weights.transpose(1, 2), self.grad_out, self.dv)),
            Step("softmax backward", lambda: self.run_softmax_backward(saved)),
            Step("product dQ", lambda: multiply(grad_scores, k, self.dq)),
            Step("product dK", lambda: multiply(grad_scores.transpose(1, 2), q, self.dk)),
            Step("permute back", lambda: self.layout.scatter([self.dq, self.dk, self.dv], list(gradients))),
        ]

    def run_softmax_backward(self, saved: SavedForward) -> None:
        """The rung's own kernel."""
        g = self.geometry
        self.softmax_backward.launch(
            self.rung.softmax_grid(g), g.block, self.grad_scores, saved.weights, self.grad_weights,
            *self.rung.softmax_arguments(g), self.row_stride, g.scale,
        )  # fmt: skip


class BackwardV1(BackwardLadder):
    """The published grid, whose second dimension the kernel never reads."""

    name = "backward_v1"
    rung = "v1"
    source = "backward_v1.cu"
    kernel_name = "softmax_backward_serial"
    summary = "ladder, backward V1: a thread a key, serial over batch, heads, rows; all of it B * H times over"
    sheet = backward_sheet(kernel_name)

    def softmax_grid(self, g: Geometry) -> tuple[int, ...]:
        """As published: B * H rows of blocks that all do the same."""
        return (ceil_div(g.T, g.block), g.heads)

    def softmax_arguments(self, g: Geometry) -> tuple[Any, ...]:
        """Heads, T."""
        return (g.heads, g.T)


class BackwardV1Fixed(BackwardV1):
    """V1 without the redundancy."""

    name = "backward_v1_fixed"
    rung = "v1_fixed"
    summary = "ladder, backward V1 with one row of blocks: the redundant work alone removed"

    def softmax_grid(self, g: Geometry) -> tuple[int, ...]:
        """One row of blocks."""
        return (ceil_div(g.T, g.block),)


class BackwardV2(BackwardLadder):
    """A thread a key and head."""

    name = "backward_v2"
    rung = "v2"
    source = "backward_v2.cu"
    kernel_name = "softmax_backward_thread_a_key"
    summary = "ladder, backward V2: batch and heads in the grid"
    sheet = backward_sheet(kernel_name)

    def softmax_grid(self, g: Geometry) -> tuple[int, ...]:
        """A thread a key."""
        return (ceil_div(g.T, g.block), g.heads)


class BackwardV3(BackwardLadder):
    """A warp a key."""

    name = "backward_v3"
    rung = "v3"
    source = "backward_v3.cu"
    kernel_name = "softmax_backward_warp_a_key"
    summary = "ladder, backward V3: one warp a key, coalesced reads"
    sheet = backward_sheet(kernel_name)
    cooperative_groups: ClassVar[int] = 0

    def defines(self, block: int) -> dict[str, str | int]:
        """Which reduction."""
        del block
        return {"COOPERATIVE_GROUPS": self.cooperative_groups}

    def softmax_grid(self, g: Geometry) -> tuple[int, ...]:
        """A warp a key."""
        return (ceil_div(32 * g.T, g.block), g.heads)


class BackwardV4(BackwardLadder):
    """A warp eight keys."""

    name = "backward_v4"
    rung = "v4"
    source = "backward_v4.cu"
    kernel_name = "softmax_backward_warp_eight_keys"
    summary = "ladder, backward V4: one warp eight keys, each load used eight times"
    sheet = backward_sheet(kernel_name)
    unroll: ClassVar[int] = KEYS_A_WARP

    def defines(self, block: int) -> dict[str, str | int]:
        """Keys a warp."""
        del block
        return {"UNROLL": self.unroll}

    def softmax_grid(self, g: Geometry) -> tuple[int, ...]:
        """A warp ``unroll`` keys."""
        return (ceil_div(32 * ceil_div(g.T, self.unroll), g.block), g.heads)


class BackwardV5(BackwardV4):
    """V4 without branches in the hot loop."""

    name = "backward_v5"
    rung = "v5"
    source = "backward_v5.cu"
    kernel_name = "softmax_backward_warp_no_branches"
    summary = "ladder, backward V5: the special cases out of the hot loop"
    sheet = backward_sheet(kernel_name)


class BackwardV6(BackwardLadder):
    """A block a row, tiles in shared memory."""

    name = "backward_v6"
    rung = "v6"
    source = "backward_v6.cu"
    kernel_name = "softmax_backward_block_a_row"
    summary = "ladder, backward V6: loops tiled through shared memory, one block a row"
    sheet = backward_sheet(kernel_name)
    default_block_size = 128

    def defines(self, block: int) -> dict[str, str | int]:
        """The tile."""
        return {"BLOCK_SIZE": block}

    def softmax_grid(self, g: Geometry) -> tuple[int, ...]:
        """A block a row."""
        return (g.T, g.heads)


class BackwardV7(BackwardLadder):
    """The closed form."""

    name = "backward_v7"
    rung = "v7"
    source = "backward_v7.cu"
    kernel_name = "softmax_backward_closed_form"
    summary = "ladder, backward V7: the closed form, one reduction and one pass a row"
    sheet = backward_sheet(kernel_name)
    default_block_size = 128

    def softmax_grid(self, g: Geometry) -> tuple[int, ...]:
        """A block a row."""
        return (g.T, g.heads)


class BackwardV8(BackwardLadder):
    """V7 with four rows a block and cache hints."""

    name = "backward_v8"
    rung = "v8"
    source = "backward_v8.cu"
    kernel_name = "softmax_backward_four_rows"
    summary = "ladder, backward V8: four rows a block from the longest on, each kept in registers"
    sheet = backward_sheet(kernel_name)
    default_block_size = 64

    def defines(self, block: int) -> dict[str, str | int]:
        """How many registers a row takes hangs on it."""
        return {"BLOCK_SIZE": block}

    def softmax_grid(self, g: Geometry) -> tuple[int, ...]:
        """A block four rows."""
        return (ceil_div(g.T, 4), g.heads)
