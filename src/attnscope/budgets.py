"""Stage 3: how much error a good kernel may make, row by row, computed from the inputs.

Reads Inputs, writes the truth and a Budget. Must not import an implementation or a later stage.

Two estimates of what rounding does are made, and the larger one counts. The *twin* (see :mod:`attnscope.reference`) is
attention computed in the sheet's precision, whose error is simply observed. One twin can be lucky in a row, and other
orders of summation round elsewhere, so an *error model* adds the standard deviation that first-order analysis predicts
for each element, in one pass beside the truth: every rounding is an independent random relative error, carried to the
result by the derivative of attention (Higham, Accuracy and Stability of Numerical Algorithms, chapters 2 and 3; the
random model: Higham and Mary 2019, doi:10.1137/18M1226312).

A row's allowed error is ``max(TWIN_FACTOR * twin's error, MODEL_FACTOR * model's standard deviation)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from attnscope.inputs import Inputs, Tensor, torch_dtype
from attnscope.reference import EXACT, Attention, Chunk, Work, compute_attention, twin_precision

TWIN_FACTOR = 3.0
MODEL_FACTOR = 5.0  # a Gaussian exceeds 5 standard deviations once in 1.7 million
SPREAD_FACTOR = 1.5  # of the whole tensor's RMS, and of its slope, over the twin's

# Rounding to nearest makes a relative error uniform in +-u/m for a mantissa m in [1, 2) that is log-uniform: its RMS is
# u * sqrt(E[1/m**2] / 3), E[1/m**2] = 3 / (8 ln 2) (Benford's law for mantissas).
NEAREST_RMS = math.sqrt(3 / (8 * math.log(2)) / 3)
# A tensor core cuts off what lies a bit or two below the last one of the sum that it adds to (Fasi, Higham, Mikaitis,
# Pranesh 2021, doi:10.7717/peerj-cs.330): for each term up to half of that last bit, on average half as much.
TRUNCATION = 2.0**-23 / 2 / 2
TF32_ROUNDOFF = 2.0**-11
TF32_RMS = 2 * NEAREST_RMS * TF32_ROUNDOFF  # tensor cores may truncate: twice the error of rounding to nearest
TANH_ERROR = 2.0**-10.987  # tanh.approx.f32's largest relative error (PTX ISA, tanh)
TINY_RESULT = 2.0**-110  # flushed to zero anywhere: below it no error counts
SUMMED_ROWS = 32  # an implementation that rounds its sums does so after this many rows, or more
ENOUGH_ROWS = 30  # to estimate from the twin how much a mean square varies by chance
TAIL = 16.0  # exp(-16) = 1e-7: the chance that a right tensor's RMS exceeds its bound


LOOSE_FIELDS = {"scores": "scores", "bias": "added", "sums": "sums"}  # a sheet's word, and Roundoff's field for it


@dataclass(frozen=True)
class Roundoff:
    """Relative error, RMS unless it says unit, of: what is stored; float32 arithmetic (unit); operands of products
    (TF32, else 0); dbias and dsinks (float32 or coarser) as they are stored; then what a loose kernel rounds too (else
    0): each step of the scores, what is added to them, gradients after each tile. ``tiny`` is the storage
    type's absolute error. ``truncation`` is what each term of a product may lose where a tensor core adds it up, always
    towards 0: nothing on a CPU."""

    storage: float
    tiny: float
    arithmetic: float
    half: bool
    operand: float
    grad_bias: float
    grad_sinks: float
    scores: float = 0.0
    added: float = 0.0
    sums: float = 0.0
    truncation: float = 0.0

    @classmethod
    def of(cls, inputs: Inputs, compute: str, rounds: frozenset[str] = frozenset()) -> Roundoff:
        """Of a kernel for ``inputs`` that computes in fp32, tf32 or fp64 and rounds more than it must: ``rounds``."""
        import torch

        dtype = inputs.workload.dtype
        info = torch.finfo(torch_dtype(dtype))
        storage = NEAREST_RMS * info.eps / 2
        truncates = inputs.q.device.type == "cuda" and dtype != "fp64"
        bias = 0.0 if inputs.bias is None else NEAREST_RMS * torch.finfo(inputs.bias.dtype).eps / 2
        return cls(
            storage=storage,
            tiny=info.smallest_normal * info.eps / 2,
            arithmetic=torch.finfo(torch.float64 if dtype == "fp64" else torch.float32).eps / 2,
            operand=TF32_RMS if compute == "tf32" else 0.0,
            half=dtype in ("bf16", "fp16"),
            grad_bias=max(bias, storage),
            grad_sinks=max(NEAREST_RMS * torch.finfo(torch.float32).eps / 2, storage),
            truncation=TRUNCATION if truncates else 0.0,
            **{field: storage for word, field in LOOSE_FIELDS.items() if word in rounds},
        )

    def stored(self, tensor: Tensor, unit: float = 1.0) -> Tensor:
        """Variance that rounding ``tensor`` to the storage type makes, if ``unit`` times it is what is stored."""
        variance = (self.storage**2 + 2 * self.operand**2) * tensor.square()
        return variance + tensor.abs().clamp(max=self.tiny / unit).square() if self.half else variance


@dataclass
class RowBudget:
    """What one tensor may be off by. ``allowed`` and ``scale`` hold one number a row: the largest allowed Euclidean
    error of the row, and the norm of its condition scale, against which errors are told. A row whose scale is 0 must be
    exact. ``expected_rms`` is the twin's RMS of (row error / allowed), never below what the model expects."""

    allowed: Tensor
    scale: Tensor
    expected_rms: float
    rms: float
    slope: float


@dataclass
class Expectation:
    """The truth (float64, by tensor) of some inputs, and the budget of each tensor at one compute precision."""

    truth: dict[str, Tensor]
    budgets: dict[str, RowBudget] = field(default_factory=dict)


def expect(inputs: Inputs, compute: str, rounds: frozenset[str] = frozenset(), *, backward: bool = True) -> Expectation:
    """Truth and budgets of ``inputs`` for a kernel that computes in ``compute`` and rounds more: ``rounds``."""
    dtype = inputs.workload.dtype
    model = ErrorModel(inputs, Roundoff.of(inputs, compute, rounds), backward)
    truth = model.run()
    precision = twin_precision(dtype, dtype if "scores" in rounds else compute)
    with _full_float32():
        twin = compute_attention(inputs, precision=precision, backward=backward)
    if twin.dbias is not None and inputs.bias is not None:
        twin.dbias = twin.dbias.to(inputs.bias.dtype)
    if twin.dsinks is not None and inputs.sinks is not None:
        twin.dsinks = twin.dsinks.to(inputs.sinks.dtype)
    scales = {**truth.scales, "lse": 1 + finite(truth.lse).abs()}
    budgets = {
        name: _row_budget(name, exact, twin.tensors()[name], scales[name], model)
        for name, exact in truth.tensors().items()
    }
    return Expectation(truth.tensors(), budgets)


def row_norms(name: str, tensor: Tensor) -> Tensor:
    """Euclidean norm of each row of a tensor of that name: over its last dim, or, where it has none, of each number."""
    import torch

    tensor = tensor.double()
    return tensor.abs() if name in ("lse", "dsinks") else torch.linalg.vector_norm(tensor, dim=-1)


def slope_sums(x: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """<x - r, r> and <r, r>, where they are computed: :func:`slope_of` is what a slope is made from.

    x - r is exact where the two are near each other: <x, r> / <r, r> - 1 would be known to 2**-53 only, which is more
    than a float64 result of thousands of rows may be off by on average.
    """
    truth = truth.double()
    return ((x.double() - truth) * truth).sum(), truth.square().sum()


def slope_of(off: float, square: float) -> float | None:
    """|<x, r> / <r, r> - 1| from <x - r, r> and <r, r>, or None where r is 0."""
    return None if square == 0 else abs(off / square)


def rms_bound(rows: int, mean: float, variance: float) -> float:
    """By which factor the RMS of a right tensor's rows may exceed the twin's by chance; the squares of those have that
    mean and variance.

    Of any Gaussian errors: Laurent and Massart 2000, lemma 1, one degree of freedom a row. Rows of many dims vary less,
    which enough of them show: 8 standard errors of their mean square.
    """
    rows = max(rows, 1)
    excess = 2 * math.sqrt(TAIL / rows) + 2 * TAIL / rows
    if rows >= ENOUGH_ROWS and mean:
        excess = min(excess, 8 * math.sqrt(variance) / mean / math.sqrt(rows))
    return math.sqrt(1 + excess)


def mean_of(values: Tensor, counted: Tensor) -> Tensor:
    """The mean of those values that are counted; 0 of none."""
    return values.masked_fill(~counted, 0.0).sum() / counted.sum().clamp_min(1)


def numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Tensors of one number each as numbers: all in one go, since a GPU is waited for each time."""
    import torch

    found: list[float] = torch.stack([scalar.double() for scalar in scalars]).tolist()
    return found


def finite(tensor: Tensor) -> Tensor:
    """``tensor`` with 0 in place of what is not finite (the lse of a row that sees no key)."""
    return tensor.nan_to_num(0.0, 0.0, 0.0)


def _row_budget(name: str, exact: Tensor, twin: Tensor, scale: Tensor, model: ErrorModel) -> RowBudget:
    import torch

    exact, twin = finite(exact), finite(twin)
    deviation = row_norms(name, model.variance[name].clamp_min(0).sqrt())
    error = row_norms(name, twin.double() - exact)
    scale = row_norms(name, scale)
    allowed = torch.maximum(TWIN_FACTOR * error, MODEL_FACTOR * deviation) + TINY_RESULT
    allowed = allowed.masked_fill(scale == 0, 0.0)
    counted = scale > 0
    squares = (error / allowed).square()
    mean = mean_of(squares, counted)
    rows, mean_square, sum_of_squares, of_model, *slopes = numbers((
        counted.sum(), mean, ((squares - mean).square()).masked_fill(~counted, 0.0).sum(),
        mean_of((deviation / allowed).square(), counted), *_slope_numbers(name, exact, twin, deviation),
        *model.cap_squares,
    ))  # fmt: skip
    expected = math.sqrt(max(mean_square, of_model))
    rms = SPREAD_FACTOR * expected * rms_bound(int(rows), mean_square, sum_of_squares / max(rows - 1, 1))
    return RowBudget(allowed, scale, expected, rms, _slope_budget(name, model, *slopes))


def _slope_numbers(name: str, exact: Tensor, twin: Tensor, deviation: Tensor) -> tuple[Tensor, ...]:
    """What :func:`_slope_budget` takes beside the model: <twin - r, r>, <r, r>, then over rows the sums of
    (deviation * norm)^2 and of deviation^2."""
    norms = row_norms(name, exact)
    return *slope_sums(twin, exact), (deviation * norms).square().sum(), deviation.square().sum()


def _slope_budget(
    name: str, model: ErrorModel, off: float, square: float, by_norms: float, deviations: float, before: float,
    after: float,
) -> float:  # fmt: skip
    """1.5 x the twin's, or chance, whichever is larger; and what a fair rounding in one direction may add.

    The scale is a rounded constant, which errs in all of dq and dk alike: once, or twice where q and k are each
    multiplied by its root. A truth whose own error e is no smaller than the kernel's is not independent of it:
    <x - r, r> holds -<e, e>, all there is where r is 0 but for rounding (one key, in float64).
    """
    roundoff, w = model.roundoff, model.w
    slope = slope_of(off, square)
    if slope is None:
        return 0.0
    chance = math.sqrt(by_norms) / square
    # a tensor core truncates each sum of 16 products; a rounding step of storage is biased by a part of its unit
    drift = roundoff.arithmetic * max(w.S, w.L) / 8 + roundoff.storage / 2 + roundoff.scores / 2 + 4 * roundoff.operand
    if w.dtype == "fp64":
        drift += deviations / square
    if name in ("dq", "dk"):
        drift += 2 * roundoff.arithmetic
        drift += model.cap_error * math.sqrt(before / max(after, TINY_RESULT)) if before else 0.0
    return max(SPREAD_FACTOR * slope, MODEL_FACTOR * chance) + drift


@contextmanager
def _full_float32() -> Iterator[None]:
    """float32 products in float32, whatever an implementation set."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class ErrorModel(Work):
    """The exact pass, which on its way sums the variance of every element in ``variance``.

    Notation: p probabilities, w after dropout, s scores with variance vs, T = sum_j p^2 vs what a row's scores bring to
    its lse. dS = p (dP - delta).
    """

    def __init__(self, inputs: Inputs, roundoff: Roundoff, backward: bool) -> None:
        super().__init__(inputs, EXACT, backward)
        self.roundoff = roundoff
        self.cap_error = 2 * (TANH_ERROR if roundoff.half else roundoff.arithmetic)
        self.cap_squares = self.result.out.new_zeros(2)  # of dS before and after softcap's derivative
        self.variance = {name: tensor.new_zeros(tensor.shape) for name, tensor in self.result.tensors().items()}
        self.by_key = self._empty_by_key()

    def _empty_by_key(self) -> Tensor | None:
        """Of what a bias of one number a row has as its gradient where it is added as the inputs' type is: it is
        expanded over keys, of which each has its sum rounded before all are added. None where nothing is summed before
        that rounding, or there is none."""
        bias = self.inputs.bias
        if bias is None or not self.roundoff.added or not self.backward or bias.shape[-1] != 1:
            return None
        summed = bias.shape[:-1] != (self.w.B, self.w.H, self.w.L)
        return bias.new_zeros((*bias.shape[:-1], self.w.S), dtype=self.options["dtype"]) if summed else None

    def load_units(self, units: list[tuple[int, int]]) -> None:
        """The units, and empty sums: of the variance of their dk and dv, and of what each head gives to those."""
        super().load_units(units)
        self.sums = {name: self.parts[name].clone() for name in ("dk", "dv")}
        self.heads = {
            name: part[:, None].repeat(1, self.w.group, 1, 1) for name, part in self.sums.items() if self.w.group > 1
        }

    def observe(self, rows: slice, columns: slice, chunk: Chunk) -> None:
        """Adds this chunk's variances."""
        r, q, k, v = self.roundoff, self.q[:, :, rows], self.k[:, None, columns], self.v[:, None, columns]
        p, weights = chunk.probabilities, chunk.weights
        spread = self._score_variance(chunk, q, k)
        common = (p.square() * spread).sum(-1, keepdim=True)
        if chunk.sink is not None:
            common = common + chunk.sink.square() * self._sink_variance()
        noise = (2 * r.arithmetic * (1 + finite(chunk.lse).abs()[..., None])).square()  # of lse itself
        noise = noise + r.arithmetic**2 * p.shape[-1] / 6  # of the sum of exponentials
        # one way in all scores of a row: it moves lse, and goes out of the probabilities again
        cut = (r.truncation * self.w.D * (p * chunk.raw.abs()).sum(-1, keepdim=True)).square() if r.truncation else 0.0
        self._add("lse", rows, (common + 4 * noise + cut).squeeze(-1))
        rounded = r.stored(weights) + (r.arithmetic**2 * p.shape[-1] / 6) * weights.square()
        moved = weights.square() * spread
        out = (rounded + moved) @ v.square() - 2 * chunk.out * ((p * weights * spread) @ v)
        out += chunk.out.square() * (common + noise) + self._result(chunk.out)
        self._add("out", rows, out)
        if self.backward:
            self._observe_backward(rows, columns, chunk, spread, rounded, common + noise)

    def _observe_backward(
        self, rows: slice, columns: slice, c: Chunk, spread: Tensor, rounded: Tensor, common: Tensor
    ) -> None:
        import torch

        r, scale2, p = self.roundoff, self.w.effective_scale**2, c.probabilities
        q, k, v, grad = self.q[:, :, rows], self.k[:, columns], self.v[:, columns], self.grad_out[:, :, rows]
        grad_p = c.grad_p if c.keep is None else c.grad_p * c.keep
        reach = c.reach if c.keep is None else c.reach * c.keep
        # variance of delta: P as it was rounded for O, O's own rounding, and the scores
        delta = (rounded * grad_p.square()).sum(-1, keepdim=True)
        delta += (grad.square() * self._result(c.out)).sum(-1, keepdim=True)
        delta += (c.grad_s.square() * spread).sum(-1, keepdim=True)
        delta += (2 * r.arithmetic * c.row_scale).square()
        pair = c.grad_s.square() * (spread + r.arithmetic**2 * max(p.shape[-2:]) / 6)
        pair += p.square() * (r.arithmetic**2 * self.w.D_v / 3 * reach.square() + r.scores**2 * grad_p.square())
        pair += r.stored(p) * (grad_p - c.delta).square()  # P may be read again as it was rounded for dV
        if r.operand:
            pair += p.square() * 2 * r.operand**2 * (grad.square() @ v[:, None].square().transpose(-1, -2))
        self._add_bias(self.variance.get("dbias"), *self._bias_variance(c, pair, delta, common), rows, columns)
        self._add_bias(self.by_key, c.grad_s, rows, columns)
        self._add_sinks(self.variance.get("dsinks"), *self._dsinks_variance(c, delta, common))
        cap = 1.0 if c.cap is None else c.cap
        raw = c.grad_s * cap
        for name, heads in self.heads.items():
            heads[:, :, columns] += getattr(c, name)
        # once more where sums are rounded, for each tile
        key_tiles, row_tiles = (n / SUMMED_ROWS if r.sums else 0.0 for n in (self.w.S, self.w.L))
        pair = pair * cap**2 + r.stored(raw)
        if c.cap is not None:  # 1 - tanh^2 cancels where tanh is near 1
            pair += (self.cap_error * c.grad_s).square()
            self.cap_squares += torch.stack([c.grad_s.square().sum(), raw.square().sum()])
        if self.w.effective_scale:  # dS * scale may be what is stored
            pair = pair + r.stored(raw, unit=abs(self.w.effective_scale))
        mean_key = (p * cap) @ k[:, None]
        dq = self._whole("dq", rows)
        in_tiles = pair + key_tiles * r.stored(raw)
        self._add("dq", rows, scale2 * (in_tiles @ k[:, None].square() + delta * mean_key.square()))
        self._add("dq", rows, dq.square() * common + (1 + key_tiles) * self._result(dq))
        pair = pair + (p * cap).square() * delta + raw.square() * common + row_tiles * r.stored(raw)
        self.sums["dk"][:, columns] += (pair.transpose(-1, -2) @ q.square()).sum(1) * scale2
        value = rounded + row_tiles * r.stored(c.weights) + c.weights.square() * (spread + common)
        self.sums["dv"][:, columns] += (value.transpose(-1, -2) @ grad.square()).sum(1)

    def _score_variance(self, c: Chunk, q: Tensor, k: Tensor) -> Tensor:
        """Of each score: float32 dot products in any order, rounded operands, scores rounded at each step."""
        import torch

        r, w = self.roundoff, self.w
        reach = (q.abs() @ k.abs().transpose(-1, -2)) * abs(w.effective_scale)
        variance = (r.arithmetic**2 * w.D / 3) * reach.square()
        if r.operand:
            variance += 2 * (r.operand * w.effective_scale) ** 2 * (q.square() @ k.square().transpose(-1, -2))
        if r.scores:
            variance += 2 * r.scores**2 * c.raw.square()
        if c.cap is not None:
            variance *= c.cap**2
            if r.half:
                variance += (TANH_ERROR * c.raw).square() * (1 - c.cap).clamp_min(0)
        scores = c.scores.masked_fill(c.scores == -torch.inf, 0.0)
        if r.added:
            raw = c.raw if w.softcap is None else w.softcap * torch.tanh(c.raw / w.softcap)
            variance += 2 * r.added**2 * (scores - raw).masked_fill(c.scores == -torch.inf, 0.0).square()
        return variance + ((2 * r.arithmetic) ** 2 + r.scores**2) * scores.square()

    def _result(self, tensor: Tensor) -> Tensor:
        """Variance of the rounding of a result; truncated TF32 operands shrink it on top."""
        return self.roundoff.stored(tensor) + (2 * self.roundoff.operand * tensor).square()

    def _bias_variance(self, c: Chunk, pair: Tensor, delta: Tensor, common: Tensor) -> tuple[Tensor]:
        """Of each pair's dS as it is added up in dbias; of each row's, where a row has one bias."""
        variance = pair + self.roundoff.stored(c.grad_s) + c.grad_s.square() * common
        if self.inputs.bias is not None and self.inputs.bias.shape[-1] == 1:
            # delta's error is the same along the row, so that it adds up
            return (variance.sum(-1, keepdim=True) + c.probabilities.sum(-1, keepdim=True).square() * delta,)
        return (variance + c.probabilities.square() * delta,)

    def _sink_variance(self) -> Tensor:
        """Of the sinks as scores, (n, G, 1, 1)."""
        sinks = self.inputs.sinks.to(**self.options).view(self.w.H_kv, self.w.group)[self.kv][:, :, None, None]  # type: ignore[union-attr]
        return (self.roundoff.scores * sinks).square()

    def _dsinks_variance(self, c: Chunk, delta: Tensor, common: Tensor) -> tuple[Any, Any]:
        """One of each row's share of dsinks, and a factor of 1, as ``_add_sinks`` takes them."""
        if c.sink is None:
            return None, None
        sums = self.roundoff.arithmetic**2 * self.w.B * self.w.L / 6
        variance = c.sink.square() * (delta + c.delta.square() * (common + sums + self._sink_variance()))
        if self.roundoff.scores:
            variance = variance + self.roundoff.stored(c.sink * c.delta)
            variance = variance + self.roundoff.stored(c.sink) * c.delta.square()
        return variance.new_ones(1), variance

    def _add(self, name: str, rows: slice, value: Tensor) -> None:
        self._grouped(self.variance[name])[self.b, self.kv, :, rows] += value

    def _whole(self, name: str, rows: slice) -> Tensor:
        return self._grouped(getattr(self.result, name))[self.b, self.kv, :, rows]

    def store_units(self) -> None:
        """Puts the sums of dk and dv into ``variance``, with the rounding of the result."""
        super().store_units()
        for name in ("dk", "dv") if self.backward else ():
            self.variance[name][self.b, self.kv] = self.sums[name] + self._summed(name)

    def _summed(self, name: str) -> Tensor:
        """Variance of the roundings of the sum dk or dv, (n, S, .).

        Keys may be repeated for a group of G heads: then each head's sum d is stored, and their sum F. Who rounds his
        sums adds head after head to one stored sum. The heads' order is his; over all orders the first m have a mean
        square of (m (G - m) sum(d^2) + m (m - 1) F^2) / (G (G - 1)), and m from 1 to G give (G + 1) (sum(d^2) / 6 +
        F^2 / 3). That many times over, if there are several tiles of rows.
        """
        total, G = self._result(self.parts[name]), self.w.group
        tiles = self.w.L / SUMMED_ROWS if self.roundoff.sums else 0.0
        if G == 1:
            return (1 + tiles) * total
        heads = self._result(self.heads[name]).sum(1)
        if not tiles:
            return heads + total
        return heads + total + (1 + tiles) * (G + 1) * (heads / 6 + total / 3)

    def finish(self) -> Attention:
        """The truth; adds the rounding of dbias and dsinks."""
        if self.by_key is not None:
            self.variance["dbias"] += self.roundoff.stored(self.by_key).sum(-1, keepdim=True)
        for name, unit in (("dbias", self.roundoff.grad_bias), ("dsinks", self.roundoff.grad_sinks)):
            if name in self.variance:
                self.variance[name] += (unit * getattr(self.result, name)).square()
        return super().finish()
