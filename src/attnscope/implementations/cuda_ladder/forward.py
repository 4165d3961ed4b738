"""Forward V1 to V6: from three naive kernels to 16-bit scores between cuBLAS products.

Reads Inputs, writes Output. Imports torch only inside functions, and no other implementation.
"""

from __future__ import annotations

import ctypes

from attnscope.device import Device
from attnscope.implementation import Output, Sheet
from attnscope.implementations.cuda_ladder.common import (
    C_TYPES,
    CAUSAL_FEATURES,
    Geometry,
    LadderImplementation,
    Layout,
    PreparedForward,
    Step,
    ceil_div,
    kernel,
    layout_defines,
    multiply,
    score_buffer,
    strides,
    unit_stride,
)
from attnscope.inputs import Inputs, Tensor
from attnscope.workload import Workload

PACKAGES = ("torch", "cuda-core", "cuda-bindings")
FORWARD = frozenset({"forward"})
V2_MAX_HEAD_DIM = 112  # three tiles of 32 rows and 32 x 32 scores within 48 KiB


class ForwardV1(LadderImplementation):
    """Three naive kernels."""

    name = "forward_v1"
    rung = "v1"
    source = "forward_v1.cu"
    summary = "ladder, forward V1: the CPU loops as three naive kernels"
    sheet = Sheet(
        dtypes=frozenset({"fp32"}),
        features=CAUSAL_FEATURES,
        devices=frozenset({"cuda"}),
        directions=FORWARD,
        packages=PACKAGES,
        kernels={"cuda": ("scores_one_thread_each", "softmax_one_thread_a_row", "values_one_thread_a_row")},
        deterministic=True,
        materialises_scores=True,
        ours=True,
    )

    def make(self, workload: Workload, device: Device, geometry: Geometry) -> PreparedForwardV1:
        """Compiles; allocates scores and weights."""
        del workload
        return PreparedForwardV1(device, geometry)

    def kernel_sources(self, head_dim: int, block: int) -> list[tuple[str, dict[str, str | int]]]:
        """See the base."""
        del block
        return [(self.source, {"HEAD_DIM": head_dim})]


class PreparedForwardV1(PreparedForward):
    """Scores, softmax, values; straight from and to the model's layout."""

    def __init__(self, device: Device, geometry: Geometry) -> None:
        super().__init__(geometry)
        names = ("scores_one_thread_each", "softmax_one_thread_a_row", "values_one_thread_a_row")
        self.kernels = [kernel(device, "forward_v1.cu", name, {"HEAD_DIM": geometry.D}) for name in names]
        self.scores = score_buffer(geometry, "fp32", device.torch_name)
        self.weights = score_buffer(geometry, "fp32", device.torch_name)

    def steps(self, inputs: Inputs, output: Output) -> list[Step]:
        """See the base."""
        g, out = self.geometry, output.out
        q, k, v = (unit_stride(t) for t in (inputs.q, inputs.k, inputs.v))
        scores, softmax, values = self.kernels
        pairs, rows = (ceil_div(g.T * g.T, g.block), g.heads), (ceil_div(g.heads * g.T, g.block),)
        row_stride = g.row_stride("fp32")

        def run_scores() -> None:
            scores.launch(pairs, g.block, self.scores, q, k, g.H, g.T, row_stride, g.scale, *strides(q, k))

        def run_softmax() -> None:
            softmax.launch(rows, g.block, self.weights, self.scores, g.B, g.H, g.T, row_stride)

        def run_values() -> None:
            values.launch(rows, g.block, out, self.weights, v, g.B, g.H, g.T, row_stride, *strides(v, out))

        return [Step("scores", run_scores), Step("softmax", run_softmax), Step("values", run_values)]


class ForwardV2(LadderImplementation):
    """The first flash attention."""

    name = "forward_v2"
    rung = "v2"
    source = "forward_v2.cu"
    summary = "ladder, forward V2: the first flash attention, one warp a head"
    sheet = Sheet(
        dtypes=frozenset({"fp32"}),
        features=CAUSAL_FEATURES,
        devices=frozenset({"cuda"}),
        directions=FORWARD,
        max_head_dim=V2_MAX_HEAD_DIM,
        packages=PACKAGES,
        kernels={"cuda": ("flash_one_warp_a_head",)},
        deterministic=True,
        ours=True,
    )

    def make(self, workload: Workload, device: Device, geometry: Geometry) -> PreparedForwardV2:
        """Compiles; allocates the permuted tensors and the running maxima and sums."""
        del workload
        return PreparedForwardV2(device, geometry)

    def kernel_sources(self, head_dim: int, block: int) -> list[tuple[str, dict[str, str | int]]]:
        """See the base."""
        del block
        return [("layout.cu", layout_defines(head_dim, "fp32", "fp32")), (self.source, {"HEAD_DIM": head_dim})]


class PreparedForwardV2(PreparedForward):
    """Permute, flash, permute back. The block size is that of the permutes: the flash kernel is one warp by design."""

    def __init__(self, device: Device, geometry: Geometry) -> None:
        import torch

        super().__init__(geometry)
        g, place = geometry, device.torch_name
        self.layout = Layout(device, g, "fp32", "fp32")
        self.flash = kernel(device, "forward_v2.cu", "flash_one_warp_a_head", {"HEAD_DIM": g.D})
        self.q, self.k, self.v, self.out = (self.layout.buffer(place) for _ in range(4))
        self.top, self.total = (torch.empty(g.heads, g.T, device=place) for _ in range(2))

    def steps(self, inputs: Inputs, output: Output) -> list[Step]:
        """See the base."""
        g = self.geometry
        shared_bytes = 4 * (3 * 32 * g.D + 32 * 32)

        def run_flash() -> None:
            self.flash.launch(
                (g.B, g.H), 32, self.out, self.top, self.total, self.q, self.k, self.v, g.T, g.scale,
                shared_bytes=shared_bytes,
            )  # fmt: skip

        return [
            Step("permute", lambda: self.layout.gather([inputs.q, inputs.k, inputs.v], [self.q, self.k, self.v])),
            Step("flash", run_flash),
            Step("permute back", lambda: self.layout.scatter([self.out], [output.out])),
        ]


class PreparedProducts(PreparedForward):
    """What V3, V4 and V5 share: permute, product, softmax in between, product, permute back."""

    def __init__(self, device: Device, geometry: Geometry, outer: str, inner: str) -> None:
        super().__init__(geometry)
        place = device.torch_name
        self.layout, self.row_stride = Layout(device, geometry, outer, inner), geometry.row_stride(inner)
        self.q, self.k, self.v, self.out = (self.layout.buffer(place) for _ in range(4))
        self.scores = score_buffer(geometry, inner, place)
        self.weights = score_buffer(geometry, inner, place)

    def steps(self, inputs: Inputs, output: Output) -> list[Step]:
        """See the base."""
        return [
            Step("permute", lambda: self.layout.gather([inputs.q, inputs.k, inputs.v], [self.q, self.k, self.v])),
            *self.attention_steps(self.q, self.k, self.v, self.out),
            Step("permute back", lambda: self.layout.scatter([self.out], [output.out])),
        ]

    def attention_steps(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Step]:
        """From (B * H, T, D) to (B * H, T, D)."""
        T = self.geometry.T
        return [
            Step("product QK", lambda: multiply(q, k.transpose(1, 2), self.scores[:, :, :T])),
            *self.softmax_steps(),
            Step("product PV", lambda: multiply(self.weights[:, :, :T], v, out)),
        ]

    def softmax_steps(self) -> list[Step]:
        """From ``scores`` to ``weights``."""
        raise NotImplementedError


class ForwardV3(LadderImplementation):
    """cuBLAS and a block softmax."""

    name = "forward_v3"
    rung = "v3"
    source = "forward_v3.cu"
    summary = "ladder, forward V3: cuBLAS products, a scale pass and one block a softmax row"
    sheet = Sheet(
        dtypes=frozenset({"fp32"}),
        features=CAUSAL_FEATURES,
        devices=frozenset({"cuda"}),
        directions=FORWARD,
        compute={"fp32": "tf32"},
        packages=PACKAGES,
        kernels={"cuda": ("scale_and_mask", "softmax_one_block_a_row")},
        materialises_scores=True,
        ours=True,
    )

    def make(self, workload: Workload, device: Device, geometry: Geometry) -> PreparedForwardV3:
        """Compiles; allocates."""
        del workload
        return PreparedForwardV3(device, geometry)

    def kernel_sources(self, head_dim: int, block: int) -> list[tuple[str, dict[str, str | int]]]:
        """See the base."""
        del block
        return [("layout.cu", layout_defines(head_dim, "fp32", "fp32")), (self.source, {})]


class PreparedForwardV3(PreparedProducts):
    """Scale and mask in a pass of their own, then a block a row."""

    def __init__(self, device: Device, geometry: Geometry) -> None:
        super().__init__(device, geometry, "fp32", "fp32")
        self.scale_and_mask = kernel(device, "forward_v3.cu", "scale_and_mask")
        self.softmax = kernel(device, "forward_v3.cu", "softmax_one_block_a_row")

    def softmax_steps(self) -> list[Step]:
        """See the base."""
        g, stride = self.geometry, self.row_stride

        def run_scale() -> None:
            self.scale_and_mask.launch(
                (ceil_div(g.T, g.block), g.T, g.heads), g.block, self.scores, g.T, stride, g.scale
            )

        def run_softmax() -> None:
            self.softmax.launch((g.T, g.heads), g.block, self.weights, self.scores, g.T, stride)

        return [Step("scale and mask", run_scale), Step("softmax", run_softmax)]


class ForwardV4(LadderImplementation):
    """A warp a row, online."""

    name = "forward_v4"
    rung = "v4"
    source = "forward_v4.cu"
    summary = "ladder, forward V4: one warp a row, online softmax, scale folded in, nothing above the diagonal"
    sheet = Sheet(
        dtypes=frozenset({"fp32"}),
        features=CAUSAL_FEATURES,
        devices=frozenset({"cuda"}),
        directions=FORWARD,
        compute={"fp32": "tf32"},
        packages=PACKAGES,
        kernels={"cuda": ("softmax_one_warp_a_row",)},
        materialises_scores=True,
        ours=True,
    )

    def make(self, workload: Workload, device: Device, geometry: Geometry) -> PreparedForwardV4:
        """Compiles; allocates, and zeroes the weights once."""
        del workload
        return PreparedForwardV4(device, geometry)

    def kernel_sources(self, head_dim: int, block: int) -> list[tuple[str, dict[str, str | int]]]:
        """See the base."""
        del block
        return [("layout.cu", layout_defines(head_dim, "fp32", "fp32")), (self.source, {})]


class PreparedForwardV4(PreparedProducts):
    """The weights' upper triangle was zeroed in prepare, and no kernel writes it."""

    def __init__(self, device: Device, geometry: Geometry) -> None:
        super().__init__(device, geometry, "fp32", "fp32")
        self.softmax = OnlineSoftmax(device, geometry, "fp32")

    def softmax_steps(self) -> list[Step]:
        """See the base."""
        return [Step("softmax", lambda: self.softmax.run(self.weights, self.scores))]


class OnlineSoftmax:
    """V4's kernel, or V5's for 16-bit scores: a warp a row."""

    def __init__(self, device: Device, geometry: Geometry, dtype: str) -> None:
        self.geometry, self.row_stride = geometry, geometry.row_stride(dtype)
        if dtype == "fp32":
            self.kernel = kernel(device, "forward_v4.cu", "softmax_one_warp_a_row")
        else:
            defines = {"SCORE_T": C_TYPES[dtype]}
            self.kernel = kernel(device, "forward_v5.cu", "softmax_one_warp_a_row_16bit", defines)

    def run(self, weights: Tensor, scores: Tensor) -> None:
        """weights = softmax(scale * scores) over the visible triangle; nothing above it is written."""
        g = self.geometry
        rows = g.heads * g.T
        grid = (ceil_div(rows, g.block // 32),)
        self.kernel.launch(grid, g.block, weights, scores, ctypes.c_longlong(rows), g.T, self.row_stride, g.scale)


class ForwardV5(LadderImplementation):
    """16-bit."""

    name = "forward_v5"
    rung = "v5"
    source = "forward_v5.cu"
    summary = "ladder, forward V5: V4 on 16-bit numbers; fp32 inputs are rounded on the way in"
    sheet = Sheet(
        dtypes=frozenset({"fp32", "bf16", "fp16"}),
        features=CAUSAL_FEATURES,
        devices=frozenset({"cuda"}),
        directions=FORWARD,
        compute={"fp32": "bf16", "bf16": "bf16", "fp16": "fp16"},
        packages=PACKAGES,
        kernels={"cuda": ("softmax_one_warp_a_row_16bit",)},
        materialises_scores=True,
        approximate=True,  # fp32 inputs are rounded to 16 bits
        ours=True,
    )

    def make(self, workload: Workload, device: Device, geometry: Geometry) -> PreparedForwardV5:
        """Compiles; allocates, and zeroes the weights once."""
        return PreparedForwardV5(device, geometry, workload.dtype, inner_dtype(workload.dtype, device))

    def kernel_sources(self, head_dim: int, block: int) -> list[tuple[str, dict[str, str | int]]]:
        """See the base."""
        del block
        return [("layout.cu", layout_defines(head_dim, "fp32", "bf16")), (self.source, {"SCORE_T": "bf16"})]


def inner_dtype(dtype: str, device: Device) -> str:
    """What V5 computes in: the workload's 16-bit type; for fp32 bf16, or fp16 where the card has no bf16 products."""
    if dtype != "fp32":
        return dtype
    return "fp16" if device.capability is not None and device.capability < (8, 0) else "bf16"


class PreparedForwardV5(PreparedProducts):
    """As V4, half the bytes."""

    def __init__(self, device: Device, geometry: Geometry, outer: str, inner: str) -> None:
        super().__init__(device, geometry, outer, inner)
        self.softmax = OnlineSoftmax(device, geometry, inner)

    def softmax_steps(self) -> list[Step]:
        """See the base."""
        return [Step("softmax", lambda: self.softmax.run(self.weights, self.scores))]


class ForwardV6(LadderImplementation):
    """V5 on inputs that lie in heads' order already: what the permutes cost, by leaving them out.

    Not comparable: a model's layout is not this one. The published program keeps its first call's permuted inputs and
    times the rest.
    """

    name = "forward_v6"
    rung = "v6"
    source = "forward_v5.cu"
    summary = "ladder, forward V6: V5 without the permutes, on inputs in heads' order; shows what they cost"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16"}),
        features=CAUSAL_FEATURES,
        devices=frozenset({"cuda"}),
        directions=FORWARD,
        compute={"bf16": "bf16", "fp16": "fp16"},
        layouts=frozenset({"bhld"}),
        packages=PACKAGES,
        kernels={"cuda": ("softmax_one_warp_a_row_16bit",)},
        materialises_scores=True,
        comparable=False,
        ours=True,
    )

    def make(self, workload: Workload, device: Device, geometry: Geometry) -> PreparedForwardV6:
        """Compiles; allocates, and zeroes the weights once."""
        return PreparedForwardV6(device, geometry, workload.dtype, workload.dtype)

    def kernel_sources(self, head_dim: int, block: int) -> list[tuple[str, dict[str, str | int]]]:
        """See the base."""
        del block
        return [("layout.cu", layout_defines(head_dim, "bf16", "bf16")), (self.source, {"SCORE_T": "bf16"})]


class PreparedForwardV6(PreparedForwardV5):
    """Inputs and output are in heads' order already."""

    def steps(self, inputs: Inputs, output: Output) -> list[Step]:
        """See the base."""
        g = self.geometry
        q, k, v, out = (t.reshape(g.heads, g.T, g.D) for t in (inputs.q, inputs.k, inputs.v, output.out))
        return self.attention_steps(q, k, v, out)
