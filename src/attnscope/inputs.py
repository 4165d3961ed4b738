"""Stage 1, with torch: the tensors of a workload.

Reads a Workload, writes Inputs. Every tensor has the canonical logical shape, ``q (B, H, L, D)``,
``k (B, H_kv, S, D)``, ``v (B, H_kv, S, D_v)``, ``grad_out (B, H, L, D_v)``; the workload's layout decides only their
strides. Must not import an implementation or a later stage.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from attnscope.device import Device, available_memory_bytes
from attnscope.errors import DeviceError, UnknownName, WorkloadError
from attnscope.units import format_bytes
from attnscope.workload import Workload

Tensor = Any  # a torch.Tensor; torch itself is imported only where it runs

# What a check feeds an implementation; "plain" is also what is timed.
INPUT_KINDS = ("plain", "needles", "large", "shifted", "peaky")
NEEDLE_MARGIN = 4.0  # e**4 = 55 times the weight of an average row's other keys
VALUE_LIMIT = 1000.0  # no feature and no factor is made larger, so that fp16 holds it
SHIFTED_LOGIT = -120.0  # below -88.7, where exp underflows in float32 unless the maximum is subtracted


@dataclass
class Inputs:
    """The tensors of one workload.

    ``bias`` has the workload's broadcast shape; ``mask`` is bool, True where a key may be seen; ``lengths`` (B,) and
    ``cu_seqlens`` (n + 1,) are int32; ``alibi_slopes`` and ``sinks`` (H,) float32; ``dropout_keep`` (B, H, L, S) bool.
    ``qkv`` is the (B, T, 3, H, D) buffer that q, k, v are views of where the layout is qkv.
    ``visible_pairs`` counts the (query, key) pairs of one head that geometry and mask leave, over the batch
    (a mask that differs by head counts their mean).
    """

    workload: Workload
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    kind: str = "plain"
    seed: int = 0
    bias: Tensor | None = None
    mask: Tensor | None = None
    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_keep: Tensor | None = None
    qkv: Tensor | None = None
    visible_pairs: int = 0

    def __post_init__(self) -> None:
        w = self.workload
        for name, letters, shape in (
            ("q", "(B, H, L, D)", (w.B, w.H, w.L, w.D)),
            ("k", "(B, H_kv, S, D)", (w.B, w.H_kv, w.S, w.D)),
            ("v", "(B, H_kv, S, D_v)", (w.B, w.H_kv, w.S, w.D_v)),
            ("grad_out", "(B, H, L, D_v)", (w.B, w.H, w.L, w.D_v)),
        ):
            got = tuple(getattr(self, name).shape)
            if got != shape:
                raise WorkloadError(f"{name} must have shape {letters} = {shape}, got {got}\nhint: the workload is {w}")

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is there, by name."""
        import torch

        pairs = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in pairs if isinstance(value, torch.Tensor)}

    def clone(self) -> Inputs:
        """A deep copy with the same strides, expanded ones too; views of one buffer stay views of one buffer."""
        buffers: dict[int, Any] = {}

        def copy(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in buffers:
                buffers[storage.data_ptr()] = storage.clone()
            made = tensor.detach().new_empty(0)
            buffer = buffers[storage.data_ptr()]
            return made.set_(buffer, tensor.storage_offset(), tensor.size(), tensor.stride())

        return dataclasses.replace(self, **{name: copy(tensor) for name, tensor in self.tensors().items()})

    def row_bounds(self) -> tuple[Tensor, Tensor]:
        """(low, high), int64 of shape (B, L): row i of batch b sees keys low <= j < high by geometry."""
        return row_bounds(self.workload, str(self.q.device))

    def visible(self) -> Tensor | None:
        """Bool, True where a key is seen, of a shape that broadcasts to (B, H, L, S); None where all keys are."""
        by_geometry = visible_by_geometry(self.workload, str(self.q.device))
        if by_geometry is None or self.mask is None:
            return self.mask if by_geometry is None else by_geometry
        return by_geometry & self.mask

    def alibi_bias(self) -> Tensor | None:
        """(B or 1, H, L, S): ``-slope * |p - j|``, float32, of an fp64 workload float64; None without alibi."""
        import torch

        if self.alibi_slopes is None:
            return None
        w = self.workload
        offsets = [w.query_offset(b) for b in range(w.B if w.lengths is not None else 1)]
        rows = torch.arange(w.L, device=self.q.device)[None] + torch.tensor(offsets, device=self.q.device)[:, None]
        distance = (rows[..., None] - torch.arange(w.S, device=self.q.device)).abs()
        slopes = self.alibi_slopes.double() if w.dtype == "fp64" else self.alibi_slopes
        return -slopes[None, :, None, None] * distance[:, None]


def make_inputs(workload: Workload, device: Device, seed: int = 0, kind: str = "plain") -> Inputs:
    """Random tensors for ``workload`` on ``device``; the same arguments give the same numbers on the same device.

    Kinds: ``plain`` standard normal; ``needles`` plants keys (at random and at tile-edge positions) that one random
    query each points to, so that losing any one is loud; ``large`` multiplies q by 8; ``shifted`` moves all logits by
    about -120; ``peaky`` lets single keys win whole rows.

    Raises:
        DeviceError: the tensors alone would not fit in the device's memory.
    """
    import torch

    if kind not in INPUT_KINDS:
        raise WorkloadError(str(UnknownName("input kind", kind, INPUT_KINDS)))
    refuse_too_large(workload, device, factor=1.0)
    generator = torch.Generator(device.torch_name).manual_seed(seed)
    dtype = torch_dtype(workload.dtype)

    def normal(*shape: int, dtype: Any = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device.torch_name, dtype=torch.float32).to(dtype)

    q, k, v, qkv = _laid_out(workload, normal, dtype)
    inputs = Inputs(workload, q, k, v, _grad_out(workload, normal, dtype), kind=kind, seed=seed, qkv=qkv)
    _add_options(inputs, normal, generator)
    _SHAPERS[kind](inputs, generator)
    return inputs


def refuse_too_large(workload: Workload, device: Device, factor: float) -> None:
    """Raise DeviceError where ``factor`` times the workload's tensors exceed what the device has free."""
    need = factor * (workload.min_bytes("backward") + _option_bytes(workload))
    free = available_memory_bytes(device)
    if need > free:
        raise DeviceError(
            f"workload {workload} needs {format_bytes(need)} for its tensors, {device} has {format_bytes(free)} free\n"
            "hint: a smaller B, L or S"
        )


def torch_dtype(name: str) -> Any:
    """torch's dtype for ``bf16``, ``fp16``, ``fp32``, ``fp64``."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[name]


def row_bounds(workload: Workload, device: str) -> tuple[Tensor, Tensor]:
    """The torch form of ``Workload.row_interval`` for all rows: (low, high), int64 of shape (B, L)."""
    import torch

    w = workload
    rows = torch.arange(w.L, device=device)[None]
    real = torch.tensor([w.key_length(b) for b in range(w.B)], device=device, dtype=torch.int64)[:, None]
    offset = torch.tensor([w.query_offset(b) for b in range(w.B)], device=device, dtype=torch.int64)[:, None]
    low = torch.zeros(w.B, w.L, dtype=torch.int64, device=device)
    high = real.expand(w.B, w.L)
    position = rows + offset
    if w.packed is not None:
        lengths = torch.tensor(w.packed, device=device, dtype=torch.int64)
        ends = lengths.cumsum(0)
        low = (ends - lengths).repeat_interleave(lengths)[None]
        high = torch.minimum(high, ends.repeat_interleave(lengths)[None])
    if w.causal:
        high = torch.minimum(high, position + 1)
    if w.window is not None:
        low, high = torch.maximum(low, position - w.window + 1), torch.minimum(high, position + w.window)
    return low, torch.maximum(high, low)


def visible_by_geometry(workload: Workload, device: str) -> Tensor | None:
    """Bool (B or 1, 1, L, S), True where a key is seen by geometry alone; None where geometry hides nothing."""
    import torch

    w = workload
    if not w.causal and w.window is None and w.lengths is None and w.packed is None:
        return None
    low, high = row_bounds(w, device)
    if w.lengths is None:
        low, high = low[:1], high[:1]
    keys = torch.arange(w.S, device=device)
    return ((keys >= low[..., None]) & (keys < high[..., None]))[:, None]


def count_visible_pairs(inputs: Inputs) -> int:
    """(query, key) pairs of one head that geometry and mask leave, over the batch; the mean where heads differ."""
    w = inputs.workload
    if inputs.mask is None:
        return w.visible_pairs()
    visible: Tensor = inputs.visible()
    if visible.numel() == 0:
        return 0
    repeats = w.B * w.L * w.S / (visible.shape[0] * visible.shape[2] * visible.shape[3])
    return round(visible.sum().item() / visible.shape[1] * repeats)


def non_finite_sentences(inputs: Inputs) -> list[str]:
    """One sentence a tensor that holds NaN or infinity (a bias may hold -inf, which masks); empty where all is well.

    0 * NaN is NaN, so what lies in masked or padded keys may reach any output: no implementation is to blame for it.
    """
    import torch

    found = []
    for name in ("q", "k", "v", "grad_out", "bias", "sinks"):
        tensor = getattr(inputs, name)
        if tensor is None:
            continue
        bad = ~torch.isfinite(tensor)
        if name == "bias":
            bad &= tensor != -torch.inf
        count = int(bad.sum())
        if count and name in ("k", "v"):
            hidden = int((bad & ~_seen_keys(inputs)[..., None]).sum())
            found.append(
                f"{name} holds {count} non-finite values, {hidden} of them at keys that no query sees (padding)"
            )
        elif count:
            found.append(f"{name} holds {count} non-finite values")
    return found


def _seen_keys(inputs: Inputs) -> Tensor:
    """Bool (B, H_kv, S): whether any query of its group sees the key."""
    import torch

    w = inputs.workload
    visible = inputs.visible()
    if visible is None:
        return torch.full((w.B, w.H_kv, w.S), w.L > 0, device=inputs.q.device)
    by_head = visible.any(2).expand(w.B, w.H, w.S)
    return by_head.unflatten(1, (w.H_kv, w.group)).any(2)


def alibi_slopes(heads: int) -> list[float]:
    """Slopes 2**(-8h/n), interleaved where H is no power of 2 (ALiBi, Press et al. 2021, arXiv:2108.12409)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    extra = [2.0 ** (-8.0 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return (slopes + extra)[:heads]


def unpack_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of shape (B, H, T, D) as views of a packed (B, T, 3, H, D) buffer."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _laid_out(w: Workload, normal: Any, dtype: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if w.layout == "qkv":
        qkv = normal(w.B, w.L, 3, w.H, w.D, dtype=dtype)
        return *unpack_qkv(qkv), qkv
    shapes = ((w.H, w.L, w.D), (w.H_kv, w.S, w.D), (w.H_kv, w.S, w.D_v))
    if w.layout == "blhd":
        q, k, v = (normal(w.B, n, h, d, dtype=dtype).transpose(1, 2) for h, n, d in shapes)
    else:
        q, k, v = (normal(w.B, h, n, d, dtype=dtype) for h, n, d in shapes)
    return q, k, v, None


def _grad_out(w: Workload, normal: Any, dtype: Any) -> Tensor:
    if w.layout == "bhld":
        return normal(w.B, w.H, w.L, w.D_v, dtype=dtype)
    return normal(w.B, w.L, w.H, w.D_v, dtype=dtype).transpose(1, 2)


def _add_options(inputs: Inputs, normal: Any, generator: Any) -> None:
    import torch

    w, device = inputs.workload, inputs.q.device
    if w.bias is not None:
        inputs.bias = normal(*w.broadcast_shape(w.bias_shape), dtype=torch_dtype(w.bias))
    if w.mask is not None:
        inputs.mask = _random_mask(w, generator, str(device))
    if w.lengths is not None:
        inputs.lengths = torch.tensor(w.lengths, dtype=torch.int32, device=device)
    if w.packed is not None:
        inputs.cu_seqlens = torch.tensor((0, *w.packed), device=device).cumsum(0).to(torch.int32)
    if w.alibi:
        inputs.alibi_slopes = torch.tensor(alibi_slopes(w.H), dtype=torch.float32, device=device)
    if w.sinks:
        inputs.sinks = normal(w.H)
    if w.dropout:
        keep = torch.rand(w.B, w.H, w.L, w.S, generator=generator, device=device, dtype=torch.float32)
        inputs.dropout_keep = keep >= w.dropout
    inputs.visible_pairs = count_visible_pairs(inputs)


def _random_mask(w: Workload, generator: Any, device: str) -> Tensor:
    """About 70 % True; each row keeps its own position where it can, so that no row dies of chance."""
    import torch

    shape = w.broadcast_shape(w.mask)
    mask = torch.rand(shape, generator=generator, device=device, dtype=torch.float32) < 0.7
    if shape[2] == w.L and shape[3] == w.S and w.S > 0:
        rows = torch.arange(w.L, device=device)
        for b in range(w.B if w.lengths is not None else min(w.B, 1)):
            own = (rows + w.query_offset(b)).clamp(0, max(w.key_length(b) - 1, 0))
            mask[b if w.lengths is not None and shape[0] > 1 else slice(None), :, rows, own] = True
    elif shape[3] == w.S and w.S > 0:
        mask[..., 0] = True
    else:
        mask.fill_(True)
    return mask


TILE_EDGES = (
    0, 1, 15, 16, 31, 32, 63, 64, 65, 79, 80, 95, 96, 111, 112, 127, 128, 129, 175, 176, 191, 192, 255, 256, 257
)  # fmt: skip


def _plain(inputs: Inputs, generator: Any) -> None:
    del inputs, generator


def _needles(inputs: Inputs, generator: Any) -> None:
    """Each planted key is a multiple of one query that sees it, so that this row's output hangs on that key.

    Its logit exceeds by NEEDLE_MARGIN what all other keys together have on standard normal inputs, log S.
    """
    import torch

    w, device = inputs.workload, inputs.q.device
    planted = _plan_needles(inputs, generator).to(device)
    if len(planted) == 0:
        return
    b, kv, key, head, row, distance = planted.unbind(-1)
    query = inputs.q[b, head, row].float()
    target = torch.full((len(planted),), math.log(max(w.S, 1)) + NEEDLE_MARGIN, device=device)
    if inputs.alibi_slopes is not None:
        target += inputs.alibi_slopes[head] * distance
    strength = target / (w.effective_scale * query.square().sum(-1)).nan_to_num()
    inputs.k[b, kv, key] = (query * strength.clamp(-VALUE_LIMIT, VALUE_LIMIT)[:, None]).to(inputs.k.dtype)


def _plan_needles(inputs: Inputs, generator: Any) -> Tensor:
    """int64 (n, 6) on the CPU: b, kv head, key, query head, row, distance of row and key.

    Each key and each (head, row) at most once. Heads with the same geometry share a plan, so that thousands are quick.
    """
    import torch

    w = inputs.workload
    edges = sorted({e for e in (*TILE_EDGES, *(w.S - 1 - e for e in TILE_EDGES)) if 0 <= e < w.S})
    count = (min(w.S, 16),)
    random = torch.randint(0, max(w.S, 1), count, generator=generator, device=inputs.q.device).tolist()
    keys = list(dict.fromkeys(edges + random))
    low, high = row_bounds(w, "cpu")
    mask = None if inputs.mask is None else inputs.mask.cpu().expand(w.B, w.H, w.L, w.S)
    plans: dict[Any, Tensor] = {}
    found = [torch.empty(0, 6, dtype=torch.int64)]
    for b in range(w.B if w.L else 0):
        for kv in range(w.H_kv):
            turn = (b * w.H_kv + kv) * 7 % max(len(keys), 1)  # where rows are few, each head tries other keys
            alike = (turn, w.key_length(b), None if mask is None else (b, kv))
            if alike not in plans:
                heads = slice(kv * w.group, (kv + 1) * w.group)
                rows = _FreeRows(w, b, low[b].tolist(), high[b].tolist(), None if mask is None else mask[b, heads])
                plans[alike] = rows.plan(keys[turn:] + keys[:turn])
            plan = plans[alike] + torch.tensor([b, kv, 0, kv * w.group, 0, 0])
            found.append(plan)
    return torch.cat(found)


class _FreeRows:
    """The (query head of the group, row) pairs of one key/value head that no needle uses yet."""

    def __init__(self, w: Workload, b: int, low: list[int], high: list[int], mask: Tensor | None) -> None:
        self.w, self.low, self.high, self.mask = w, low, high, mask
        self.offset = w.query_offset(b)
        self.used: set[tuple[int, int]] = set()

    def plan(self, keys: list[int]) -> Tensor:
        """Rows (0, 0, key, head of the group, row, distance) for those keys that still find a row."""
        import torch

        slots = ((key, self.take(key, salt)) for salt, key in enumerate(keys))
        found = [(0, 0, key, *slot, abs(slot[1] + self.offset - key)) for key, slot in slots if slot is not None]
        return torch.tensor(found, dtype=torch.int64).view(-1, 6)

    def take(self, key: int, salt: int) -> tuple[int, int] | None:
        """A pair that sees ``key``: near it under ALiBi, which silences what is far, else spread by ``salt``."""
        # bounds never fall from row to row, so the rows that see a key are neighbours
        first, last = bisect.bisect_right(self.high, key), bisect.bisect_right(self.low, key)
        rows = last - first
        if rows <= 0:
            return None
        start = min(max(key - self.offset - first, 0), rows - 1) if self.w.alibi else key + salt * 37
        column = None if self.mask is None else self.mask[:, :, key].tolist()
        for step in range(rows):
            row = first + (start + step) % rows
            for turn in range(self.w.group):
                head = (salt + turn) % self.w.group
                if (head, row) not in self.used and (column is None or column[head][row]):
                    self.used.add((head, row))
                    return head, row
        return None


def _large(inputs: Inputs, generator: Any) -> None:
    del generator
    inputs.q.mul_(8)


def _shifted(inputs: Inputs, generator: Any) -> None:
    """Feature 0 of every q and k becomes a constant whose product moves every logit by the same amount."""
    del generator
    scale = inputs.workload.effective_scale
    if abs(scale) * 32.0 * VALUE_LIMIT < abs(SHIFTED_LOGIT):
        return  # a scale this small leaves no logit to shift
    inputs.q[..., 0] = 32.0
    inputs.k[..., 0] = SHIFTED_LOGIT / (32.0 * scale)
    if inputs.sinks is not None:
        inputs.sinks += SHIFTED_LOGIT


def _peaky(inputs: Inputs, generator: Any) -> None:
    """One key in sixteen, and at least one, is eight times as long: softmax rows become nearly one-hot."""
    import torch

    chance = torch.rand(inputs.workload.S, generator=generator, device=inputs.k.device, dtype=torch.float32)
    inputs.k[:, :, (chance < 1 / 16) | (chance == chance.amin(0) if len(chance) else False)] *= 8


_SHAPERS = {"plain": _plain, "needles": _needles, "large": _large, "shifted": _shifted, "peaky": _peaky}


def _option_bytes(w: Workload) -> int:
    return w.B * w.H * w.L * w.S * 5 if w.dropout else 0
