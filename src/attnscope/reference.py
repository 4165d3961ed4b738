"""Stage 1: the truth. Attention forward, lse and backward in float64, and its low-precision twins.

Reads Inputs, writes Attention. Must not import an implementation or a later stage. Works in chunks of rows, so that a
16k x 16k head needs well under 2 GiB, on a CPU or a GPU.

With S = scores (see :mod:`attnscope.workload`), P = softmax(S) over the visible keys and the sink, W = P after
dropout: O = W V; dV = W^T dO; dP = dO V^T (through dropout); dS = P * (dP - rowsum(dO * O)); dQ = scale dS K;
dK = scale dS^T Q; dbias = dS summed over its broadcast dims; dsink = -sum p_sink * rowsum(dO * O). Softcap multiplies
dS towards q and k by 1 - tanh^2. A row that sees nothing: O = 0, lse = -inf, no gradient. The
closed form of the backward is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691, section 3).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from attnscope.inputs import Inputs, Tensor, count_visible_pairs, row_bounds, torch_dtype
from attnscope.workload import Workload

# Scores a chunk holds; twenty float64 chunks live at once. 512 KiB stay in a CPU's cache, which measures 2.5 times as
# fast as 32 MiB; a GPU wants few launches.
CHUNK_ELEMENTS = {"cpu": 2**16, "cuda": 2**22}


@dataclass(frozen=True)
class Precision:
    """How numbers are kept. ``compute`` holds scores and sums, ``operand`` what matrix products read (``tf32`` or the
    same), ``storage`` what P, dS and the results are rounded to (None: not at all), ``scores`` what each step of the
    scores and dP are rounded to (None: not at all; an implementation that writes them out rounds them too)."""

    compute: str = "fp64"
    operand: str | None = None
    storage: str | None = None
    scores: str | None = None

    def load(self, tensor: Tensor) -> Tensor:
        """An input as a matrix product reads it."""
        return self.multiply(tensor.to(torch_dtype(self.compute)))

    def multiply(self, tensor: Tensor) -> Tensor:
        """An intermediate as a matrix product reads it."""
        return round_tf32(tensor) if self.operand == "tf32" else tensor

    def store(self, tensor: Tensor) -> Tensor:
        """Rounded to the storage type, kept in the compute type."""
        return tensor if self.storage is None else tensor.to(torch_dtype(self.storage)).to(tensor.dtype)

    def step(self, tensor: Tensor) -> Tensor:
        """A step of the scores, or dP, as it is kept."""
        return tensor if self.scores is None else tensor.to(torch_dtype(self.scores)).to(tensor.dtype)


EXACT = Precision()


def twin_precision(dtype: str, compute: str) -> Precision:
    """What a good kernel does with inputs of ``dtype`` and scores in ``compute``, and no more than that."""
    if dtype == "fp64":
        return EXACT
    scores = compute if compute in ("bf16", "fp16") else None
    return Precision(compute="fp32", operand="tf32" if compute == "tf32" else None, storage=dtype, scores=scores)


@dataclass
class Attention:
    """A whole attention: ``out (B, H, L, D_v)``, ``lse (B, H, L)``, and the gradients in their inputs' shapes.

    ``scales`` holds, for each tensor, the condition scale of each element: what its error is measured against.
    With A = P * (|dO| |V|^T + rowsum |dO * O|): out against P|V|, dq against A|K| scale, dk against A^T|Q| scale, dv
    against P^T|dO|, dbias against A summed over its broadcast dims, dsinks against p_sink rowsum |dO * O| summed.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dsinks: Tensor | None = None
    scales: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that was computed, by name."""
        names = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass
class Chunk:
    """The intermediates of one chunk of rows, float64, n units x G heads x R rows x C keys, for an error model.

    ``raw`` are the scores before softcap, bias and ALiBi, ``scores`` after them and masked; ``delta``, ``grad_p``,
    ``grad_s`` (before softcap), ``reach`` = |dO||V|^T and ``row_scale`` = rowsum |dO * O| belong to the backward, as do
    ``dk`` and ``dv``: what each head's rows of the chunk give to them, n x G x C x (D or D_v).
    """

    raw: Tensor
    scores: Tensor
    probabilities: Tensor
    weights: Tensor
    lse: Tensor
    out: Tensor
    keep: Any = None
    sink: Any = None
    cap: Any = None
    grad_p: Any = None
    grad_s: Any = None
    delta: Any = None
    reach: Any = None
    row_scale: Any = None
    dk: Any = None
    dv: Any = None


@dataclass(frozen=True)
class Sample:
    """The (batch, key/value head) pairs that are compared: each of ``batches`` with each of ``kv_heads``."""

    batches: tuple[int, ...]
    kv_heads: tuple[int, ...]

    def pairs(self) -> set[tuple[int, int]]:
        """Every (batch, key/value head)."""
        return {(b, kv) for b in self.batches for kv in self.kv_heads}

    def heads(self, group: int) -> list[int]:
        """The query heads that belong to the sampled key/value heads."""
        return [kv * group + g for kv in self.kv_heads for g in range(group)]


def sample_heads(workload: Workload, seed: int, max_pairs: int, max_elements: int | None = None) -> Sample:
    """A seeded sample of whole (b, h) problems with at most about ``max_pairs`` (query, key) pairs, at least one.

    Nor do their q, k, v and out together have more than about ``max_elements``: few queries of many heads meet few
    pairs, and yet what is kept of their keys fills a memory. Where a bias or sinks sum gradients over the batch (or
    over heads), all of the batch (or all heads) are taken.
    """
    w = workload
    pairs = max(w.L * w.S * w.group, 1)
    wanted = max(1, max_pairs // pairs)
    if max_elements is not None:
        elements = (w.L * w.group + w.S) * (w.D + w.D_v)
        wanted = max(1, min(wanted, max_elements // max(elements, 1)))
    bias = w.broadcast_shape(w.bias_shape) if w.bias else None
    whole_batch = w.sinks or (bias is not None and bias[0] == 1)
    whole_heads = bias is not None and bias[1] == 1
    generator = random.Random(seed)
    n_kv = w.H_kv if whole_heads else min(w.H_kv, max(1, wanted // max(w.B, 1) if whole_batch else round(wanted**0.5)))
    n_b = w.B if whole_batch else min(w.B, max(1, wanted // n_kv))
    n_kv = w.H_kv if whole_heads else min(w.H_kv, max(n_kv, wanted // max(n_b, 1)))
    return Sample(
        tuple(sorted(generator.sample(range(w.B), n_b))), tuple(sorted(generator.sample(range(w.H_kv), n_kv)))
    )


def select(inputs: Inputs, sample: Sample) -> Inputs:
    """The sampled part of ``inputs`` as inputs of a smaller workload (copies, contiguous)."""
    import torch

    w = inputs.workload
    batches, kv = list(sample.batches), list(sample.kv_heads)
    heads = sample.heads(w.group)
    lengths = tuple(w.lengths[b] for b in batches) if w.lengths is not None else None
    layout = "bhld" if w.layout == "qkv" else w.layout
    part = w.replace(B=len(batches), H=len(heads), H_kv=len(kv), lengths=lengths, layout=layout)

    def broadcast(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        rows = tensor if tensor.shape[0] == 1 else tensor[batches]
        return rows if rows.shape[1] == 1 else rows[:, heads]

    chosen = Inputs(
        part,
        q=inputs.q[batches][:, heads],
        k=inputs.k[batches][:, kv],
        v=inputs.v[batches][:, kv],
        grad_out=inputs.grad_out[batches][:, heads],
        kind=inputs.kind,
        seed=inputs.seed,
        bias=broadcast(inputs.bias),
        mask=broadcast(inputs.mask),
        cu_seqlens=inputs.cu_seqlens,
        dropout_keep=broadcast(inputs.dropout_keep),
        alibi_slopes=None if inputs.alibi_slopes is None else inputs.alibi_slopes[heads],
        sinks=None if inputs.sinks is None else inputs.sinks[heads],
    )
    if lengths is not None:
        chosen.lengths = torch.tensor(lengths, dtype=torch.int32, device=inputs.q.device)
    chosen.visible_pairs = count_visible_pairs(chosen)
    return chosen


def compute_attention(inputs: Inputs, *, precision: Precision = EXACT, backward: bool = True) -> Attention:
    """Attention of ``inputs``: in float64 (the truth, with condition scales), or as a twin of lower precision.

    Returns tensors in the precision's compute type, on the inputs' device, contiguous.
    """
    return Work(inputs, precision, backward).run()


def round_tf32(tensor: Tensor) -> Tensor:
    """float32 rounded to TF32's 10-bit mantissa, nearest, ties away (what cvt.rna.tf32 does; PTX ISA, cvt)."""
    import torch

    exact = tensor.float().contiguous()
    rounded = ((exact.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(exact.isfinite(), rounded, exact)


class Work:
    """One pass over (unit, row) chunks; a unit is one (batch, key/value head) with its group of query heads.

    A subclass may override :meth:`observe` to see the intermediates of the exact pass.
    """

    def __init__(self, inputs: Inputs, precision: Precision, backward: bool) -> None:
        import torch

        w = inputs.workload
        self.inputs, self.w, self.precision, self.backward = inputs, w, precision, backward
        self.exact = precision == EXACT
        self.options: dict[str, Any] = {"dtype": torch_dtype(precision.compute), "device": inputs.q.device}
        self.units = [(b, kv) for b in range(w.B) for kv in range(w.H_kv)]
        self.result = self._empty_result()
        self.low, self.high = row_bounds(w, "cpu")
        chunk = CHUNK_ELEMENTS[inputs.q.device.type]
        self.row_step = max(1, min(w.L, chunk // max(1, w.group * w.S)))
        self.unit_step = max(1, chunk // max(1, w.group * self.row_step * w.S))
        self.keys = torch.arange(w.S, device=inputs.q.device)

    def run(self) -> Attention:
        """The whole pass."""
        for units in self.unit_chunks():
            self.load_units(units)
            for rows in self.row_chunks():
                self.run_rows(rows)
            self.store_units()
        return self.finish()

    def observe(self, rows: slice, columns: slice, chunk: Chunk) -> None:
        """Called with each chunk of the exact pass."""

    def _empty_result(self) -> Attention:
        import torch

        w = self.w

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, **self.options)

        q, kv, out = (w.B, w.H, w.L, w.D), (w.B, w.H_kv, w.S), (w.B, w.H, w.L, w.D_v)
        result = Attention(out=zeros(*out), lse=torch.full(out[:3], -torch.inf, **self.options))
        shapes: dict[str, tuple[int, ...]] = {"out": out}
        if self.backward:
            shapes |= {"dq": q, "dk": (*kv, w.D), "dv": (*kv, w.D_v)}
            if self.inputs.bias is not None:
                shapes["dbias"] = tuple(self.inputs.bias.shape)
            if self.inputs.sinks is not None:
                shapes["dsinks"] = (w.H,)
        for name, shape in shapes.items():
            if name != "out":
                setattr(result, name, zeros(*shape))
            if self.exact:
                result.scales[name] = zeros(*shape)
        return result

    def unit_chunks(self) -> Iterator[list[tuple[int, int]]]:
        """Units that fit in memory together."""
        for start in range(0, len(self.units), self.unit_step):
            yield self.units[start : start + self.unit_step]

    def row_chunks(self) -> Iterator[slice]:
        """Rows that fit in memory together."""
        for start in range(0, self.w.L, self.row_step):
            yield slice(start, min(start + self.row_step, self.w.L))

    def load_units(self, units: list[tuple[int, int]]) -> None:
        """q, dO of shape (n, G, L, .), k, v of shape (n, S, .) for these units."""
        import torch

        # neighbours, counted where they are used: a copy to a GPU, or back, would wait for it
        first = units[0][0] * self.w.H_kv + units[0][1]
        numbers = torch.arange(first, first + len(units), device=self.keys.device)
        self.chosen, self.b, self.kv = units, numbers // self.w.H_kv, numbers % self.w.H_kv
        load = self.precision.load
        self.q = load(self._grouped(self.inputs.q)[self.b, self.kv])
        self.k, self.v = load(self.inputs.k[self.b, self.kv]), load(self.inputs.v[self.b, self.kv])
        self.grad_out = load(self._grouped(self.inputs.grad_out)[self.b, self.kv])
        self.parts: dict[str, Tensor] = {"dk": torch.zeros_like(self.k), "dv": torch.zeros_like(self.v)}
        if self.exact:
            self.parts |= {"dk_scale": torch.zeros_like(self.k), "dv_scale": torch.zeros_like(self.v)}

    def _grouped(self, tensor: Tensor) -> Tensor:
        """(B, H, ...) seen as (B, H_kv, G, ...)."""
        return tensor.unflatten(1, (self.w.H_kv, self.w.group))

    def run_rows(self, rows: slice) -> None:
        """Forward and backward of rows of the loaded units; adds into the result."""
        batches = [b for b, _ in self.chosen]
        low, high = self.low[batches][:, rows], self.high[batches][:, rows]
        columns = slice(int(low.min()), max(int(low.min()), int(high.max())))
        chunk = self._softmax(rows, columns, low, high)
        store, multiply = self.precision.store, self.precision.multiply
        chunk.out = store(multiply(store(chunk.weights)) @ self.v[:, None, columns])
        self._put("out", rows, chunk.out)
        self._put("lse", rows, chunk.lse)
        if self.exact:
            self._put_scale("out", rows, chunk.weights @ self.v[:, None, columns].abs())
        if self.backward:
            self._backward(rows, columns, chunk)
        if self.exact:
            self.observe(rows, columns, chunk)

    def _softmax(self, rows: slice, columns: slice, low: Tensor, high: Tensor) -> Chunk:
        """Everything up to the probabilities (n, G, R, C), the sink's share (n, G, R, 1) and lse (n, G, R)."""
        import torch

        w, inputs, step = self.w, self.inputs, self.precision.step
        raw = scores = step(step(self.q[:, :, rows] @ self.k[:, None, columns].transpose(-1, -2)) * w.effective_scale)
        cap = None
        if w.softcap is not None:
            squashed = step(torch.tanh(step(scores / w.softcap)))
            scores, cap = step(squashed * w.softcap), 1 - squashed**2
        if inputs.bias is not None:
            scores = step(scores + self._dense(inputs.bias, rows, columns))
        if inputs.alibi_slopes is not None:
            scores = step(scores + self._alibi(rows, columns))
        device = self.keys.device
        keys = self.keys[columns]
        visible = (keys >= low.to(device)[..., None]) & (keys < high.to(device)[..., None])
        hidden = ~visible[:, None]
        if inputs.mask is not None:
            hidden = hidden | ~self._dense(inputs.mask, rows, columns)
        scores = scores.masked_fill(hidden, -torch.inf)
        top = (
            scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
        )
        sinks = None
        if inputs.sinks is not None:
            sinks = step(inputs.sinks.to(**self.options)).view(w.H_kv, w.group)[self.kv][:, :, None, None]
            top = torch.maximum(top, sinks)
        shift = top.masked_fill(top == -torch.inf, 0)
        exponentials = torch.exp(scores - shift)
        sink = None if sinks is None else torch.exp(sinks - shift)
        total = exponentials.sum(-1, keepdim=True) + (0 if sink is None else sink)
        lse = (torch.log(total) + shift).squeeze(-1)
        total = total.masked_fill(total == 0, 1)
        probabilities, sink = exponentials / total, None if sink is None else sink / total
        weights, keep = self._dropped(probabilities, rows, columns)
        return Chunk(raw, scores, probabilities, weights, lse, out=lse, keep=keep, sink=sink, cap=cap)

    def _dropped(self, probabilities: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor | None]:
        """Probabilities after dropout, and what dropout multiplied them by."""
        if self.inputs.dropout_keep is None:
            return probabilities, None
        keep = self._dense(self.inputs.dropout_keep, rows, columns).to(probabilities.dtype) / (1 - self.w.dropout)
        return probabilities * keep, keep

    def _backward(self, rows: slice, columns: slice, chunk: Chunk) -> None:
        store, multiply, scale = self.precision.store, self.precision.multiply, self.w.effective_scale
        q, k, v, grad = self.q[:, :, rows], self.k[:, columns], self.v[:, columns], self.grad_out[:, :, rows]
        p, weights, keep, sink, cap, out = (
            chunk.probabilities, chunk.weights, chunk.keep, chunk.sink, chunk.cap, chunk.out
        )  # fmt: skip
        if self.precision.scores is not None:  # what is written out is read again as it was rounded
            p = store(p)
        delta = (grad * out).sum(-1, keepdim=True)
        grad_p = self.precision.step(grad @ v[:, None].transpose(-1, -2))
        grad_s = p * ((grad_p if keep is None else grad_p * keep) - delta)
        grad_raw = grad_s if cap is None else grad_s * cap
        rounded = multiply(store(grad_raw))
        self._put("dq", rows, store(rounded @ k[:, None] * scale))
        dk, dv = rounded.transpose(-1, -2) @ q * scale, multiply(store(weights)).transpose(-1, -2) @ grad
        self.parts["dk"][:, columns] += dk.sum(1)
        self.parts["dv"][:, columns] += dv.sum(1)
        self._add_bias(self.result.dbias, grad_s, rows, columns)
        self._add_sinks(self.result.dsinks, sink, -delta)
        if not self.exact:
            return
        row_scale = (grad * out).abs().sum(-1, keepdim=True)
        reach = grad.abs() @ v[:, None].abs().transpose(-1, -2)
        chunk.grad_p, chunk.grad_s, chunk.delta, chunk.reach, chunk.row_scale = grad_p, grad_s, delta, reach, row_scale
        chunk.dk, chunk.dv = dk, dv
        a = p * ((reach if keep is None else reach * keep) + row_scale)
        a_raw = a if cap is None else a * cap
        self._put_scale("dq", rows, a_raw @ k[:, None].abs() * abs(scale))
        self.parts["dk_scale"][:, columns] += (a_raw.transpose(-1, -2) @ q.abs()).sum(1) * abs(scale)
        self.parts["dv_scale"][:, columns] += (weights.transpose(-1, -2) @ grad.abs()).sum(1)
        self._add_bias(self.result.scales.get("dbias"), a, rows, columns)
        self._add_sinks(self.result.scales.get("dsinks"), sink, row_scale)

    def _dense(self, tensor: Tensor, rows: slice, columns: slice) -> Tensor:
        """A tensor that broadcasts to (B, H, L, S), cut to (n, G, R, C) of the loaded units."""
        w = self.w
        wide = tensor.expand(w.B, w.H, w.L, w.S).unflatten(1, (w.H_kv, w.group))
        cut = wide[:, :, :, rows, columns][self.b, self.kv]
        return cut if tensor.dtype.is_floating_point is False else cut.to(self.options["dtype"])

    def _alibi(self, rows: slice, columns: slice) -> Tensor:
        import torch

        device = self.keys.device
        slopes = self.inputs.alibi_slopes.to(**self.options).view(self.w.H_kv, self.w.group)[self.kv]  # type: ignore[union-attr]
        offset = torch.tensor([self.w.query_offset(b) for b, _ in self.chosen], device=device)[:, None, None]
        position = torch.arange(rows.start, rows.stop, device=device)[None, :, None] + offset
        return -slopes[..., None, None] * (position - self.keys[columns]).abs()[:, None]

    def _add_bias(self, target: Tensor | None, grad: Tensor, rows: slice, columns: slice) -> None:
        if target is None:
            return
        for n, (b, kv) in enumerate(self.chosen):
            part = grad[n]
            heads = slice(kv * self.w.group, (kv + 1) * self.w.group)
            where: list[Any] = [b, heads, rows, columns]
            for axis in range(1, 4):
                if target.shape[axis] == 1:
                    part, where[axis] = part.sum(axis - 1, keepdim=True), slice(0, 1)
            if target.shape[0] == 1:
                where[0] = 0
            target[tuple(where)] += part

    def _add_sinks(self, target: Tensor | None, sink: Tensor | None, per_row: Tensor) -> None:
        if target is None or sink is None:
            return
        heads = self.kv[:, None] * self.w.group + self.keys.new_tensor(range(self.w.group))
        target.index_add_(0, heads.flatten(), (sink * per_row).sum((-1, -2)).flatten())

    def _put(self, name: str, rows: slice, value: Tensor) -> None:
        self._grouped(getattr(self.result, name))[self.b, self.kv, :, rows] = value

    def _put_scale(self, name: str, rows: slice, value: Tensor) -> None:
        self._grouped(self.result.scales[name])[self.b, self.kv, :, rows] = value

    def store_units(self) -> None:
        """Puts what the rows of the loaded units summed up into the result."""
        if not self.backward:
            return
        for name in ("dk", "dv"):
            getattr(self.result, name)[self.b, self.kv] = self.precision.store(self.parts[name])
            if self.exact:
                self.result.scales[name][self.b, self.kv] = self.parts[f"{name}_scale"]

    def finish(self) -> Attention:
        """The result, once every chunk is done."""
        if self.result.dbias is not None:
            self.result.dbias = self.precision.store(self.result.dbias)
        return self.result
