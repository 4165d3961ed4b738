"""Stage 2: the facts of one call of ``scaled_dot_product_attention`` on which a selection hangs. Pure, without torch.

Read by the rules (:mod:`attnscope.sdpa_rules`), filled by :mod:`attnscope.selecting`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from attnscope.device import Device
from attnscope.units import DTYPE_BYTES
from attnscope.workload import Workload

FUSED = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
FAMILY = (*FUSED, "sdpa_math")
GPU_ONLY = ("sdpa_cudnn", "sdpa_efficient")


@dataclass(frozen=True)
class TensorFacts:
    """Shape, strides in elements, dtype (``bf16``, ``fp16``, ``fp32``, ``fp64``, ``bool``, else torch's word),
    storage offset in bytes, and whether it wants a gradient."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    offset_bytes: int = 0
    requires_grad: bool = False

    @property
    def ndim(self) -> int:
        """How many dims it has."""
        return len(self.shape)

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"({shape}) {self.dtype}, strides ({', '.join(map(str, self.stride))})"


@dataclass(frozen=True)
class SdpaCall:
    """One call: tensors of shape ``(..., H, L, D)``, its options, and the state of torch it is made in.

    ``enabled`` are the implementations that torch's switches leave on, ``available`` those this torch is built with,
    ``order`` the order in which torch asks them. ``cudnn`` is the loaded version as torch counts it, e.g. 91900.
    ``hides_rows`` says of a bool mask whether some row sees no key. ``rocm``: torch is built for AMD.
    """

    q: TensorFacts
    k: TensorFacts
    v: TensorFacts
    device: Device
    torch: str
    mask: TensorFacts | None = None
    hides_rows: bool = False
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    grad_enabled: bool = True
    deterministic: bool = False
    fp8_flash: bool = False
    cudnn: int | None = None
    rocm: bool = False
    enabled: frozenset[str] = frozenset(FAMILY)
    available: frozenset[str] = frozenset(FAMILY)
    order: tuple[str, ...] = field(default=("sdpa_flash", "sdpa_efficient", "sdpa_math", "sdpa_cudnn"))

    @property
    def on_gpu(self) -> bool:
        """Whether the tensors lie on a GPU."""
        return self.device.kind == "cuda"

    @property
    def release(self) -> tuple[int, int]:
        """torch's release as two numbers, e.g. (2, 11)."""
        found = re.match(r"(\d+)\.(\d+)", self.torch)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability; (0, 0) where it is not known."""
        return self.device.capability or (0, 0)

    @property
    def is_4d(self) -> bool:
        """Whether q, k and v all have four dims."""
        return self.q.ndim == self.k.ndim == self.v.ndim == 4

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """L, S, D, D_v."""
        return self.q.shape[-2], self.k.shape[-2], self.q.shape[-1], self.v.shape[-1]

    @property
    def heads(self) -> tuple[int, int, int]:
        """Heads of q, k and v; 1 where a tensor has no such dim."""
        h, h_k, h_v = (t.shape[-3] if t.ndim > 2 else 1 for t in (self.q, self.k, self.v))
        return h, h_k, h_v

    @property
    def wants_gradient(self) -> bool:
        """Whether autograd will record the call for q, k or v."""
        return self.grad_enabled and any(t.requires_grad for t in (self.q, self.k, self.v))

    @property
    def direction(self) -> str:
        """``backward`` where autograd records the call, a mask's gradient included; else ``forward``."""
        mask = self.mask is not None and self.mask.requires_grad and self.grad_enabled
        return "backward" if self.wants_gradient or mask else "forward"

    @property
    def effective_scale(self) -> float:
        """``scale``, or D**-0.5 where none is given."""
        size = self.sizes[2]
        return self.scale if self.scale is not None else size**-0.5 if size else 0.0


def workload_of(call: SdpaCall) -> Workload | None:
    """The workload that the call is; None where no workload spells it (three dims, other dtypes, broadcast keys)."""
    h, h_k, h_v = call.heads
    low, keys, dim, dim_v = call.sizes
    spelled = call.is_4d and call.q.dtype in DTYPE_BYTES and min(h, h_k, dim, dim_v) > 0 and call.dropout_p < 1
    if not spelled or h_k != h_v or h % h_k or len({t.shape[0] for t in (call.q, call.k, call.v)}) > 1:
        return None
    mask = call.mask
    if mask is not None and mask.dtype != "bool" and mask.dtype not in DTYPE_BYTES:
        return None
    pattern = None if mask is None else _pattern(mask.shape, (call.q.shape[0], h, low, keys))
    return Workload(
        B=call.q.shape[0], H=h, H_kv=h_k, L=low, S=keys, D=dim, D_v=dim_v,
        dtype=call.q.dtype,
        causal="top_left" if call.is_causal else None,
        scale=call.scale,
        mask=pattern if mask is not None and mask.dtype == "bool" else None,
        bias=mask.dtype if mask is not None and mask.dtype != "bool" else None,
        bias_shape=pattern if mask is not None and mask.dtype != "bool" else None,
        dropout=call.dropout_p,
        layout=_layout(call),
    )  # fmt: skip


def _pattern(shape: tuple[int, ...], sizes: tuple[int, int, int, int]) -> str:
    padded = (1,) * (4 - len(shape)) + shape
    letters = zip("BHLS", padded, sizes, strict=True)
    return "x".join(letter if size == full and size != 1 else "1" for letter, size, full in letters)


def _layout(call: SdpaCall) -> str:
    """``qkv`` and ``blhd`` where the strides are exactly theirs, else ``bhld``."""

    def strided_as(t: TensorFacts, tensors: int) -> bool:
        b, h, rows, dim = t.shape
        row = tensors * h * dim
        return t.stride == (rows * row, dim, row, 1) and b * h * rows * dim > 0

    tensors = (call.q, call.k, call.v)
    if len({t.shape for t in tensors}) == 1 and all(strided_as(t, 3) for t in tensors):
        return "qkv"
    return "blhd" if all(strided_as(t, 1) and t.shape[1] > 1 for t in tensors) else "bhld"
