"""What the rungs share: geometry, layout kernels, cuBLAS products in TF32, block sizes, steps that can be timed apart.

Reads Workload and Inputs, writes what each rung fills in. Imports torch only inside functions, and no other
implementation.

A rung is a list of steps over buffers that ``prepare`` made; the whole operation runs all of them, and
``attnscope ladder`` times each alone. Score matrices have rows of ``row_stride`` numbers, a multiple of 16 bytes, so
that vector loads are aligned for any T; what lies between T and ``row_stride`` is loaded with its neighbours, but no
result depends on it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from attnscope import cuda
from attnscope.device import Device
from attnscope.errors import UsageError
from attnscope.implementation import Output, SheetImplementation
from attnscope.inputs import Inputs, Tensor, torch_dtype, unpack_qkv
from attnscope.workload import Workload

FOLDER = Path(__file__).parent
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024)
OWN_BLOCK_SIZE = 0  # a library's rung: it chooses its own
C_TYPES = {"fp32": "float", "bf16": "bf16", "fp16": "fp16"}
CAUSAL_FEATURES = frozenset({"causal_top_left", "causal_bottom_right", "scale"})
MAX_HEADS = 65535  # y of a grid


@dataclass(frozen=True)
class Step:
    """One part of a rung: what it does in a word or two, and the call that does it."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True)
class Geometry:
    """Sizes that all kernels of a rung are launched with; ``heads`` is B * H."""

    B: int
    H: int
    T: int
    D: int
    scale: float
    block: int

    @property
    def heads(self) -> int:
        """B * H."""
        return self.B * self.H

    def row_stride(self, dtype: str) -> int:
        """Numbers from one score row to the next: T rounded up to 16 bytes."""
        step = 4 if dtype == "fp32" else 8
        return (self.T + step - 1) // step * step


class LadderImplementation(SheetImplementation):
    """Base of all rungs: causal self-attention of equal head dims, without masks or options."""

    rung: ClassVar[str]
    source: ClassVar[str]
    block_sizes: ClassVar[tuple[int, ...]] = BLOCK_SIZES
    default_block_size: ClassVar[int] = 256

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """Reasons that no sheet can express."""
        del direction
        w, found = workload, []
        if w.causal is None:
            found.append("computes causal attention only")
        if w.B * w.H > MAX_HEADS:
            found.append(f"takes up to {MAX_HEADS} heads over the batch, not {w.B * w.H}")
        if w.L > self.max_length:
            found.append(f"takes L up to {self.max_length}, not {w.L}")
        if w.dtype == "bf16" and device.capability is not None and device.capability < (8, 0):
            found.append(f"needs compute capability 8.0 or newer for bf16, {device.name} is older")
        return found

    @property
    def max_length(self) -> int:
        """The longest sequence that its grids allow."""
        return 65535

    def prepare(self, workload: Workload, device: Device, *, block_size: int | None = None) -> Any:
        """Compile (or take from the cache) and allocate, for one block size; without one, the rung's usual.

        Raises:
            UsageError: the rung does not take that block size.
            PrepareFailed: a kernel does not compile.
        """
        block = self.default_block_size if block_size is None else block_size
        if block not in self.block_sizes:
            allowed = ", ".join(map(str, self.block_sizes))
            raise UsageError(
                f"{self.name}: block size must be one of {allowed}, got {block}\nhint: see docs/guide/ladder.md"
            )
        w = workload
        return self.make(workload, device, Geometry(w.B, w.H, w.L, w.D, w.effective_scale, block))

    def make(self, workload: Workload, device: Device, geometry: Geometry) -> Any:
        """The prepared rung."""
        raise NotImplementedError

    def kernel_sources(self, head_dim: int, block: int) -> list[tuple[str, dict[str, str | int]]]:
        """(file, defines) of everything that ``prepare`` would compile for fp32 (or, where it cannot, bf16)."""
        raise NotImplementedError


class PreparedForward:
    """A rung of the forward ladder: its steps, in order, over buffers that live as long as it does."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out (and lse where the rung has it), fresh each call."""
        del save
        output = self.new_output(inputs)
        if output.out.numel():
            for step in self.steps(inputs, output):
                step.run()
        return output

    def new_output(self, inputs: Inputs) -> Output:
        """Unwritten results."""
        return Output(empty_out(inputs))

    def steps(self, inputs: Inputs, output: Output) -> list[Step]:
        """What a call does, in order."""
        raise NotImplementedError

    def backward(self, inputs: Inputs, saved: Any) -> Any:
        """There is none: the sheet says so."""
        raise UsageError("this rung has no backward\nhint: the backward ladder is backward_v1 and on")


def kernel(
    device: Device, source: str, name: str, defines: Mapping[str, str | int] | None = None, *, specific: bool = False
) -> cuda.Kernel:
    """A kernel of this folder."""
    return cuda.load_kernel(FOLDER / source, name, device, defines, specific=specific)


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def empty_out(inputs: Inputs) -> Tensor:
    """Unwritten (B, H, L, D) in the workload's layout."""
    import torch

    w, q = inputs.workload, inputs.q
    if w.layout == "bhld":
        return torch.empty(w.B, w.H, w.L, w.D_v, dtype=q.dtype, device=q.device)
    return torch.empty(w.B, w.L, w.H, w.D_v, dtype=q.dtype, device=q.device).transpose(1, 2)


def empty_gradients(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Unwritten dq, dk, dv in the workload's layout; views of one (B, T, 3, H, D) buffer where that is packed."""
    import torch

    w, q = inputs.workload, inputs.q
    if w.layout == "qkv":
        return unpack_qkv(torch.empty(w.B, w.L, 3, w.H, w.D, dtype=q.dtype, device=q.device))
    dq, dk, dv = (empty_out(inputs) for _ in range(3))
    return dq, dk, dv


def strides(*tensors: Tensor) -> list[ctypes.c_longlong]:
    """b, h and t strides of each tensor, as kernel arguments."""
    return [ctypes.c_longlong(t.stride(axis)) for t in tensors for axis in (0, 1, 2)]


def unit_stride(tensor: Tensor) -> Tensor:
    """The tensor with neighbours in d side by side; a copy where they are not."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def vector_aligned(tensor: Tensor) -> Tensor:
    """The tensor such that each row of D can be read 16 bytes at a time; a copy where it cannot."""
    step = 16 // tensor.element_size()
    aligned = tensor.stride(3) == 1 and tensor.data_ptr() % 16 == 0
    aligned = aligned and all(tensor.stride(axis) % step == 0 for axis in (0, 1, 2) if tensor.shape[axis] > 1)
    if aligned:
        return tensor
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)  # contiguous() would leave a crooked address as it is


class Layout:
    """The permutes of a rung: model's order and number type to (B * H, T, D) in ``inner``, and back."""

    def __init__(self, device: Device, geometry: Geometry, outer: str, inner: str) -> None:
        self.geometry, self.inner, self.width = geometry, torch_dtype(inner), layout_width(geometry.D)
        self.gather_heads = kernel(device, "layout.cu", "gather_heads", layout_defines(geometry.D, outer, inner))
        self.scatter_heads = kernel(device, "layout.cu", "scatter_heads", layout_defines(geometry.D, inner, outer))

    def buffer(self, like: Tensor | str) -> Tensor:
        """An unwritten (B * H, T, D)."""
        import torch

        g = self.geometry
        place = like if isinstance(like, str) else like.device
        return torch.empty(g.heads, g.T, g.D, dtype=self.inner, device=place)

    def gather(self, tensors: list[Tensor], buffers: list[Tensor]) -> None:
        """Model's order -> heads' order, up to three tensors in one launch."""
        ready = vector_aligned if self.width > 1 else unit_stride
        self._launch(self.gather_heads, [ready(t) for t in tensors], buffers, True)

    def scatter(self, buffers: list[Tensor], tensors: list[Tensor]) -> None:
        """Heads' order -> model's order."""
        self._launch(self.scatter_heads, tensors, buffers, False)

    def _launch(self, layout_kernel: cuda.Kernel, model: list[Tensor], heads: list[Tensor], into_heads: bool) -> None:
        g, count = self.geometry, len(model)
        model, heads = (3 * model)[:3] if count == 1 else model, (3 * heads)[:3] if count == 1 else heads
        first, second = (model, heads) if into_heads else (heads, model)
        grid = (ceil_div(g.T * g.D // self.width, g.block), g.heads, count)
        layout_kernel.launch(grid, g.block, *first, *second, g.H, g.T, *strides(*model))


def layout_defines(head_dim: int, source: str, target: str) -> dict[str, str | int]:
    """What layout.cu is compiled with."""
    types = {"INPUT_T": C_TYPES[source], "OUTPUT_T": C_TYPES[target]}
    return {"HEAD_DIM": head_dim, "WIDTH": layout_width(head_dim), **types}


def layout_width(head_dim: int) -> int:
    """Neighbours in d that a thread of layout.cu carries: 4, or 1 where they do not divide D."""
    return 1 if head_dim % 4 else 4


def score_buffer(geometry: Geometry, dtype: str, place: Any) -> Tensor:
    """(B * H, T, row_stride) scores, zeroed: kernels write the visible triangle only, and vector loads reach past T."""
    import torch

    shape = (geometry.heads, geometry.T, geometry.row_stride(dtype))
    return torch.zeros(shape, dtype=torch_dtype(dtype), device=place)


@contextmanager
def tf32_products() -> Iterator[None]:
    """cuBLAS may use TF32 for fp32 products within, as the published programs do on compute capability 8 and newer.

    The setting is torch's own and global to the process: it is put back on the way out, but another thread that
    multiplies meanwhile sees it too.
    """
    import torch

    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b for each head, by cuBLAS; nothing is allocated."""
    import torch

    with torch.no_grad(), tf32_products():
        torch.bmm(a, b, out=out)


def zero_above_diagonal(workload: Workload, device: Device) -> Callable[[], None]:
    """A call that writes zeros above the diagonal of one float score matrix of the workload: what the rungs save by
    zeroing once, in prepare."""
    geometry = Geometry(workload.B, workload.H, workload.L, workload.D, workload.effective_scale, 256)
    zero = kernel(device, "layout.cu", "zero_above_diagonal", layout_defines(workload.D, "fp32", "fp32"))
    scores = score_buffer(geometry, "fp32", device.torch_name)
    grid = (ceil_div(geometry.T, 256), geometry.T, geometry.heads)
    return lambda: zero.launch(grid, 256, scores, geometry.T, geometry.row_stride("fp32"))
