"""The check: what passes, what fails and with which words, what its numbers mean, and that it is fair."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

import checking_numbers
from attnscope import budgets, checking, guards
from attnscope.budgets import ErrorModel, Roundoff, expect, row_norms
from attnscope.checking import ReferenceCache, check_implementation
from attnscope.device import Device, find_device
from attnscope.errors import UsageError
from attnscope.implementation import Gradients, Output, Sheet, SheetImplementation, find
from attnscope.inputs import INPUT_KINDS, make_inputs, torch_dtype
from attnscope.judging import judge
from attnscope.reference import compute_attention, twin_precision
from attnscope.workload import Workload
from saboteurs import Style, Tiled, blind_to, keep_bits

CPU = find_device("cpu")
TINY = "B1,H2,L70,D32,bf16,causal"


def check(implementation, workload=TINY, **options):
    return check_implementation(implementation, Workload.parse(workload), CPU, **{"quick": True} | options)


def expectation(workload=TINY, kind="plain", compute="fp32", seed=0):
    inputs = make_inputs(Workload.parse(workload), CPU, seed, kind)
    return inputs, expect(inputs, compute)


def rms_of(ratios):
    return ratios.square().mean().sqrt().item()


def slope_of(x, truth):
    return budgets.slope_of(*budgets.numbers(budgets.slope_sums(x, truth)))


def rounded_truth(inputs, expected):
    """The best result that the dtype can hold."""
    dtype = torch_dtype(inputs.workload.dtype)
    return {name: t.float() if name == "lse" else t.to(dtype) for name, t in expected.truth.items()}


# --- records --------------------------------------------------------------------------------------------------------


def test_a_right_implementation_is_tight_and_its_record_complete():
    result = check(Tiled())
    assert (result.passed, result.grade, result.directions) == (True, "tight", ("forward", "backward"))
    assert {(t.tensor, t.kind) for t in result.tensors} == set(
        itertools.product(("out", "lse", "dq", "dk", "dv"), INPUT_KINDS)
    )
    assert result.factor == pytest.approx(result.row_rel_error_max / result.error_budget)
    assert 0.05 < result.factor < 1
    assert (result.heads_checked, result.heads_total, result.deterministic) == (
        2,
        2,
        {"forward": True, "backward": True},
    )
    assert "comes nearest its budget" in result.message and "row" in result.message + "row"
    for tensor in result.tensors:
        assert tensor.passed and tensor.worst and tensor.row_rel_error_max <= tensor.error_budget
        assert tensor.rms_ratio is not None and tensor.slope is not None


def test_one_direction_checks_that_direction():
    forward = check(Tiled(), directions=("forward",))
    assert forward.directions == ("forward",) and {t.tensor for t in forward.tensors} == {"out", "lse"}
    backward = check(Tiled(), directions=("backward",))
    assert backward.passed and {"dq", "dk", "dv"} < {t.tensor for t in backward.tensors}


def test_bias_and_sinks_have_gradients_to_check():
    result = check(Tiled(), "B2,H2,L40,D32,bf16,bias=bf16:1xHxLxS,sinks")
    assert result.passed and {"dbias", "dsinks"} < {t.tensor for t in result.tensors}


def test_prepared_is_used_and_not_made_again():
    class Unpreparable(Tiled):
        def prepare(self, workload, device):
            raise AssertionError("prepared twice")

    prepared = Tiled().prepare(Workload.parse(TINY), CPU)
    assert check(Unpreparable(), prepared=prepared).passed


@pytest.mark.parametrize("workload", ["B0,H2,L9,D32,bf16", "B1,H2,L0,S5,D32,bf16", "B1,H2,L5,S0,D32,bf16"])
def test_empty_problems_pass(workload):
    class Truth(SheetImplementation):
        name, summary = "truth", "float64, rounded"
        sheet = Sheet(dtypes=frozenset({"bf16"}), features=frozenset({"cross"}), lse=True)

        def prepare(self, workload, device):
            return self

        def forward(self, inputs, *, save=False):
            truth = compute_attention(inputs)
            return Output(truth.out.bfloat16(), truth.lse.float(), truth)

        def backward(self, inputs, saved):
            return Gradients(saved.dq.bfloat16(), saved.dk.bfloat16(), saved.dv.bfloat16())

    result = check(Truth(), workload)
    assert result.passed and result.tensors


# --- the budget is computed, and fair -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_the_model_predicts_the_error_that_a_twin_makes(dtype, kind):
    inputs = make_inputs(Workload.parse(f"B1,H2,L150,D64,{dtype},causal"), CPU, 3, kind)
    model = ErrorModel(inputs, Roundoff.of(inputs, "fp32"), True)
    truth = model.run().tensors()
    twin = compute_attention(inputs, precision=twin_precision(dtype, "fp32")).tensors()
    for name in ("out", "dq", "dk", "dv"):
        deviation = row_norms(name, model.variance[name].sqrt())
        error = row_norms(name, twin[name].double() - truth[name])
        # for dS the model allows two roundings more than this twin makes
        least = 0.5 if name in ("dq", "dk") else 0.75
        assert least < rms_of((error / deviation)[deviation > 0]) < 1.25, name


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_model_predicts_what_rounded_scores_cost(dtype):
    inputs = make_inputs(Workload.parse(f"B1,H2,L150,D80,{dtype}"), CPU, 3, "large")
    model = ErrorModel(inputs, Roundoff.of(inputs, "fp32", frozenset({"scores"})), True)
    truth = model.run().tensors()
    twin = compute_attention(inputs, precision=twin_precision(dtype, dtype)).tensors()
    for name in ("out", "lse", "dq", "dk", "dv"):
        deviation = row_norms(name, model.variance[name].sqrt())
        error = row_norms(name, twin[name].double() - truth[name])
        assert 0.5 < rms_of((error / deviation)[deviation > 0]) < 1.5, name


def test_float32_is_given_the_worst_order_of_summation():
    inputs = make_inputs(Workload.parse("B1,H2,L150,D64,fp32"), CPU, 3, "shifted")
    model = ErrorModel(inputs, Roundoff.of(inputs, "fp32"), True)
    truth = model.run().tensors()
    twin = compute_attention(inputs, precision=twin_precision("fp32", "fp32")).tensors()
    for name in ("out", "dq", "dk", "dv"):
        deviation = row_norms(name, model.variance[name].sqrt())
        error = row_norms(name, twin[name].double() - truth[name])
        assert rms_of((error / deviation)[deviation > 0]) < 1, name


def head_by_head(inputs, rounded):
    """What each head of a group gives to dk and dv, (B, G, S, .), rounded to the inputs' type if ``rounded``."""
    w = inputs.workload
    repeated = dataclasses.replace(
        inputs, workload=w.replace(H_kv=w.H), k=inputs.k.expand(-1, w.H, -1, -1), v=inputs.v.expand(-1, w.H, -1, -1)
    )
    truth = compute_attention(repeated)
    kept = inputs.k.dtype if rounded else torch.float64
    return {name: getattr(truth, name).to(kept).double() for name in ("dk", "dv")}


@pytest.mark.parametrize("rounds", [frozenset(), frozenset({"sums"})], ids=["repeated keys", "one stored sum"])
def test_the_model_knows_that_a_group_s_heads_are_rounded_before_they_are_added(rounds):
    """On shifted inputs the heads' shares are large and cancel: what rounding them costs does not show in their sum."""
    inputs = make_inputs(Workload.parse("B1,H16/1,L7,S160,D56,bf16"), CPU, 3, "shifted")
    model = ErrorModel(inputs, Roundoff.of(inputs, "fp32", rounds), True)
    truth = model.run().tensors()
    for name, heads in head_by_head(inputs, rounded=not rounds).items():
        total = heads.sum(1, keepdim=True)
        if rounds:  # added one after the other
            total = torch.zeros_like(total)
            for head in heads.split(1, 1):
                total = (total + head).to(inputs.k.dtype).double()
        ratio = row_norms(name, total - truth[name]) / row_norms(name, model.variance[name].sqrt())
        assert 0.3 < rms_of(ratio) < 1 and ratio.max() < budgets.MODEL_FACTOR, name


def test_the_model_knows_that_a_bias_of_one_number_a_row_has_a_rounded_gradient_for_each_key():
    """A row's bias as an ``attn_mask`` in the inputs' type; where all rows have the same dO, a key's sum is large."""
    inputs = make_inputs(Workload.parse("B1,H8/1,L128,S96,D64,fp16,bias=fp32:BxHx1x1"), CPU, 3)
    inputs.grad_out = inputs.grad_out[:, :, :1].expand_as(inputs.grad_out)
    truth = compute_attention(inputs.__class__(**vars(inputs) | {"bias": inputs.bias.expand(-1, -1, -1, 96)}))
    rounded = truth.dbias.to(inputs.q.dtype).double().sum(-1, keepdim=True)
    for rounds, fits in ((frozenset({"bias"}), True), (frozenset(), False)):
        model = ErrorModel(inputs, Roundoff.of(inputs, "fp32", rounds), True)
        exact = model.run().dbias
        assert (rms_of((rounded - exact).abs() / model.variance["dbias"].sqrt()) < 1.5) == fits


def test_a_slope_is_known_better_than_one_is():
    """A float64 result is off by less on average than 2**-53, beside which 1 has no neighbours."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(4001, generator=generator, dtype=torch.float64)
    x = truth.clone()
    x[7] = truth[7] * (1 + 2.0**-40)
    exact = (x[7] - truth[7]).item() * truth[7].item() / truth.square().sum().item()
    assert slope_of(x, truth) == pytest.approx(exact, rel=1e-12)
    x[7] = torch.nextafter(truth[7], x[7])
    assert 0 < slope_of(x, truth) < 2.0**-60


def test_one_key_in_float64_has_a_truth_of_rounding_errors():
    """dq and dk are 0; the truth's are not, and a kernel that gives 0 is no worse than one that errs otherwise."""
    _, expected = expectation("B16384,H1,L1,D8,fp64", compute="fp64")
    zeros = {name: torch.zeros_like(expected.truth[name]) for name in ("dq", "dk")}
    assert expected.truth["dq"].any() and all(found.passed for found in judge(zeros, expected))


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_a_scale_may_be_rounded(dtype):
    """The root of 1/8 is rounded up: where q and k are each multiplied by it, all of dq and dk is too large."""
    inputs, expected = expectation(f"B16384,H1,L2,D8,{dtype}", compute=dtype)
    unit = torch.finfo(inputs.q.dtype).eps / 2
    for factor, passes in ((1 + 2 * unit, True), (1 + 5 * unit, False)):
        scaled = {name: expected.truth[name] * factor for name in ("dq", "dk")}
        assert all(found.passed == passes for found in judge(scaled, expected)), factor


def test_rounding_to_nearest_errs_by_the_rms_that_the_model_assumes():
    numbers = torch.exp(torch.linspace(0, 20, 200_001, dtype=torch.float64))
    relative = (numbers.bfloat16().double() - numbers) / numbers
    assert relative.square().mean().sqrt().item() == pytest.approx(budgets.NEAREST_RMS * 2**-8, rel=0.01)


def test_a_lucky_twin_is_no_trap():
    """Rows in which the twin happens to be exact still have a budget."""
    inputs, expected = expectation()
    budget = expected.budgets["out"]
    twin = compute_attention(inputs, precision=twin_precision("bf16", "fp32"), backward=False)
    error = row_norms("out", twin.out.double() - expected.truth["out"])
    assert (budget.allowed >= budgets.TWIN_FACTOR * error).all()
    assert (budget.allowed[budget.scale > 0] / budget.scale[budget.scale > 0]).min() > 1e-4


def test_the_truth_rounded_once_passes_every_budget():
    for kind, compute in itertools.product(INPUT_KINDS, ("fp32",)):
        inputs, expected = expectation("B1,H4/2,L65,S90,D48,fp16,causal=bottom_right", kind, compute)
        assert all(c.passed for c in judge(rounded_truth(inputs, expected), expected, kind))


def test_a_budget_leaves_the_matmul_precision_as_it_was():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        expectation()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_row_that_sees_no_key_must_be_exact():
    inputs, expected = expectation("B1,H1,L20,S12,D16,bf16,causal=bottom_right")
    budget = expected.budgets["out"]
    assert (budget.allowed[0, 0, :8] == 0).all() and (budget.allowed[0, 0, 8:] > 0).all()
    wrong = rounded_truth(inputs, expected)
    wrong["out"][0, 0, 3, 0] = 1e-30
    found = {c.tensor: c for c in judge(wrong, expected)}
    assert not found["out"].passed and "b 0, h 0, row 3 is off by" in found["out"].message
    assert "must be exact" in found["out"].message
    wrong = rounded_truth(inputs, expected)
    wrong["lse"][0, 0, 3] = -1e30
    assert "-inf is missing" in next(c for c in judge(wrong, expected) if c.tensor == "lse").message


def test_fixed_tolerances_are_blind_where_the_check_is_not():
    numbers = checking_numbers.blindness(1024)
    assert numbers["key_lost_absolute"] < 2e-2 and numbers["scale_absolute"] < 2e-2
    assert numbers["key_lost_factor"] > 2 and numbers["scale_rms_ratio"] > 3


def test_the_documentation_shows_numbers_of_this_code():
    checking_numbers.assert_current()


# --- grades ---------------------------------------------------------------------------------------------------------


def rounded_scores(**sheet):
    return Tiled(hooks={"scores": lambda s, **_: s.bfloat16().float()}, **sheet)


def test_rounded_scores_are_loose_where_the_sheet_says_so_and_wrong_where_not():
    honest, lying = check(rounded_scores(compute={"bf16": "bf16"}, lse=False)), check(rounded_scores())
    assert honest.passed and honest.grade == "loose" and honest.factor > 1 and "scores" in honest.message
    assert not lying.passed and lying.grade == "failed" and lying.factor > 1


def test_what_rounds_less_than_it_may_is_tight():
    assert check(Tiled(compute={"bf16": "bf16"})).grade == "tight"


def test_sums_rounded_tile_by_tile_are_loose_where_the_sheet_says_so():
    workload = "B1,H1,L600,D32,bf16"
    hooks, options = (
        {"sum": lambda total, **_: total.bfloat16().float()},
        {"kinds": ("plain",), "cache": ReferenceCache()},
    )
    assert not check(Tiled(hooks=hooks), workload, **options).passed
    declared = check(Tiled(hooks=hooks, rounds={"cpu": frozenset({"sums"})}), workload, **options)
    assert declared.passed and declared.grade == "loose"
    elsewhere = check(Tiled(hooks=hooks, rounds={"cuda": frozenset({"sums"})}), workload, **options)
    assert not elsewhere.passed


def test_a_loose_sheet_excuses_no_lost_key():
    hooks = {"visible": blind_to(slice(17, 18)), "scores": lambda s, **_: s.bfloat16().float()}
    result = check(Tiled(hooks=hooks, compute={"bf16": "bf16"}, rounds={"cpu": frozenset({"sums", "bias"})}))
    assert not result.passed


def test_a_sheet_names_only_known_roundings():
    with pytest.raises(UsageError, match="rounds must be among scores, bias, sums, got prayers"):
        Tiled(rounds={"cpu": frozenset({"prayers"})})


def test_an_approximate_implementation_keeps_its_error_and_is_never_tight():
    hooks = {"p": lambda p, **_: keep_bits(p, 4), "ds": lambda d, **_: keep_bits(d, 4)}
    result = check(Tiled(hooks=hooks, approximate=True))
    assert result.passed and result.grade == "approximate" and result.factor > 1 and "farthest off" in result.message


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"key_tiles": lambda tiles, **_: tiles[1:]}, "not finite|cosine|-inf"),
        ({"exact_out": lambda out, **_: out.roll(1, 1)}, "a head's cosine with the truth is"),
        ({"exact_out": lambda out, **_: out * 0.85}, "a head is off by a factor of 1 ± 0.150, 0.0500 is allowed"),
        ({"output": lambda o, **_: dataclasses.replace(o, out=o.out * math.nan)}, "are NaN"),
    ],
)
def test_an_approximate_implementation_may_not_be_grossly_wrong(hooks, message):
    result = check(Tiled(hooks=hooks, approximate=True, lse=False))
    assert not result.passed and result.grade == "failed"
    assert any(word in result.message for word in message.split("|")), result.message


# --- sentences ------------------------------------------------------------------------------------------------------

SENTENCES = [
    ({"exact_out": lambda o, **_: o * 1.05}, "all of it looks scaled by 1.05"),
    ({"exact_out": lambda o, **_: torch.zeros_like(o)}, "all of it is zero"),
    ({"dk": lambda g, **_: torch.cat([g[:, :1] * 1.5, g[:, 1:]], 1)}, "only in head 0"),
    ({"dq": lambda g, **_: torch.cat([g[:, :, :40], g[:, :, 40:] * 1.5], 2)}, "rows from 40 on"),
    ({"dv": lambda g, **_: torch.cat([g[:, :, :9], g[:, :, 9:20] * 2, g[:, :, 20:]], 2)}, "keys 9 to 19"),
    ({"dk": lambda g, **_: g.index_fill(2, torch.tensor([5]), 9.0)}, "key 5 wherever it is"),
    ({"output": lambda o, **_: dataclasses.replace(o, lse=None)}, "lse is missing"),
    ({"output": lambda o, **_: dataclasses.replace(o, out=[])}, "out must be a tensor, got list"),
    ({"output": lambda o, **_: dataclasses.replace(o, out=o.out[..., :3])}, "out must have shape (1, 2, 70, 32), got"),
    ({"output": lambda o, **_: dataclasses.replace(o, lse=o.lse.half())}, "lse must have dtype torch.float32, got"),
    ({"gradients": lambda g, **_: dataclasses.replace(g, dq=g.dq.float())}, "dq must have dtype torch.bfloat16"),
]


@pytest.mark.parametrize(("hooks", "words"), SENTENCES, ids=[words for _, words in SENTENCES])
def test_the_message_says_what_kind_of_wrong_it_is(hooks, words):
    result = check(Tiled(hooks=hooks), kinds=("plain",))
    assert not result.passed and words in result.message, result.message


def test_a_failure_names_tensor_kind_row_error_and_budget():
    result = check(Tiled(hooks={"exact_out": lambda o, **_: o.index_fill(2, torch.tensor([33]), 0.0)}))
    assert result.message.startswith("out on plain inputs: b 0, h ")
    assert ", row 33 is off by " in result.message and " times its budget " in result.message


# --- guards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_fresh_memory_is_nan_while_poisoned_and_not_after(dtype):
    inputs = make_inputs(Workload.parse(TINY), CPU)
    for size in (1, 100, 5000, 300_000, 3_000_000):
        with guards.poisoned_memory(inputs):
            fresh = [torch.empty(size, dtype=dtype) for _ in range(3)]
        assert all(t.isnan().all() for t in fresh)
        assert guards.count_poison(fresh[0]) == size
        del fresh
    assert not torch.zeros(1000, dtype=dtype).any()


def test_freed_blocks_that_an_allocation_gets():
    segment = {
        "device": 0, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "blocks": [{"size": 4 << 20, "state": "inactive"}, {"size": 8 << 20, "state": "active_allocated"},
                   {"size": 512, "state": "inactive"}],
    }  # fmt: skip
    small = segment | {"segment_type": "small", "blocks": [{"size": 2048, "state": "inactive"}]}
    elsewhere = [segment | {"stream": 7}, segment | {"device": 1}, segment | {"segment_pool_id": (0, 1)}]
    assert guards.free_block_sizes([small, segment, *elsewhere], device=0, stream=0) == [4 << 20, 2048]


@pytest.mark.parametrize(
    ("free", "sizes", "new"),
    [
        ([], [3, 5], [5, 3]),
        ([8, 4], [3, 5], []),
        ([8], [3, 5], [3]),
        ([4], [3, 5], [5]),
        ([4 << 20], [2048, 3 << 20], [2048]),  # small requests never come from large blocks
        ([2048, 512], [2 << 20, 600, 100], [2 << 20]),
    ],
)
def test_poison_asks_for_new_memory_only_where_none_is_free(free, sizes, new):
    assert guards.not_served(free, sizes) == new


def test_inputs_are_compared_bit_by_bit():
    pristine = make_inputs(Workload.parse("B1,H1,L8,D8,fp32,mask=bool,sinks"), CPU)
    inputs = pristine.clone()
    assert guards.changed_inputs(inputs, pristine) == []
    pristine.q[0, 0, 0, 0], inputs.q[0, 0, 0, 0] = 0.0, -0.0
    inputs.mask[0, 0, 3, 3] = ~inputs.mask[0, 0, 3, 3]
    assert set(guards.changed_inputs(inputs, pristine)) == {"q", "mask"}


@pytest.mark.parametrize("layout", ["bhld", "blhd", "qkv"])
def test_filling_keeps_addresses_and_strides(layout):
    w = Workload.parse(f"B2,H2,L8,D8,fp32,layout={layout}")
    working, other = make_inputs(w, CPU, 1), make_inputs(w, CPU, 2, "large")
    filled = guards.fill(working, other)
    assert filled is not working and filled.kind == "large"
    assert guards.changed_inputs(filled, other) == []
    for name in ("q", "k", "v"):
        assert getattr(filled, name).data_ptr() == getattr(working, name).data_ptr()
        assert getattr(filled, name).stride() == getattr(other, name).stride()


def test_determinism_is_checked_only_where_claimed():
    def shaky(deterministic):
        calls = itertools.count()

        def hook(result, **_):
            out = result.out.clone()
            out[0, 0, 0, 0] *= 1 + (next(calls) % 2) * torch.finfo(out.dtype).eps
            return dataclasses.replace(result, out=out)

        return Tiled(hooks={"output": hook}, deterministic=deterministic)

    claimed, modest = check(shaky(True), directions=("forward",)), check(shaky(False), directions=("forward",))
    assert (
        claimed.deterministic == {"forward": False}
        and not claimed.passed
        and "differs between equal" in claimed.message
    )
    assert modest.deterministic == {} and modest.passed


def test_an_lse_that_is_not_claimed_is_not_judged():
    hooks = {"output": lambda o, **_: dataclasses.replace(o, lse=o.lse * 2)}
    result = check(Tiled(hooks=hooks, lse=False), directions=("forward",))
    assert result.passed and {t.tensor for t in result.tensors} == {"out"}


# --- sampling and sharing -------------------------------------------------------------------------------------------


@pytest.fixture
def two_heads_of_twelve(monkeypatch):
    monkeypatch.setattr(checking, "MAX_PAIRS", {"cpu": 8 * 70 * 70})  # a quick check takes a quarter
    return "B3,H4,L70,S60,D32,bf16,causal=bottom_right"


def sabotage_elsewhere(sample, value, row):
    """Writes ``value`` into a row of a head that is not in the sample."""
    b, head = next((b, h) for b in range(3) for h in range(4) if b not in sample.batches or h not in sample.kv_heads)

    def hook(result, **_):
        out = result.out.clone()
        out[b, head, row] = value
        return dataclasses.replace(result, out=out)

    return {"output": hook}


def test_large_workloads_are_sampled_and_the_rest_looked_at(two_heads_of_twelve):
    w = Workload.parse(two_heads_of_twelve)
    sample = checking.kind_samples(w, "cpu", 0, ("plain",), quick=True)["plain"]
    result = check(Tiled(), two_heads_of_twelve, kinds=("plain",))
    assert result.passed and (result.heads_checked, result.heads_total) == (2, 12)
    nan = check(Tiled(hooks=sabotage_elsewhere(sample, math.nan, 30)), two_heads_of_twelve, kinds=("plain",))
    assert not nan.passed and "32 of 26880 values are not finite, first at b " in nan.message
    alive = check(Tiled(hooks=sabotage_elsewhere(sample, 1.0, 3)), two_heads_of_twelve, kinds=("plain",))
    assert not alive.passed and "not 0 where a row sees no key" in alive.message


def test_each_kind_of_inputs_is_compared_on_heads_of_its_own(two_heads_of_twelve):
    w = Workload.parse(two_heads_of_twelve)
    samples = checking.kind_samples(w, "cpu", 0, INPUT_KINDS, quick=True)
    met = set().union(*(sample.pairs() for sample in samples.values()))
    assert len(samples["plain"].pairs()) == 2 < len(met)
    assert check(Tiled(), two_heads_of_twelve).heads_checked == len(met)
    for b in range(w.B):
        for head in range(w.H):

            def hook(result, b=b, head=head, **_):
                out = result.out.clone()
                out[b, head, 60] *= 1.5
                return dataclasses.replace(result, out=out)

            wrong = check(Tiled(hooks={"output": hook}), two_heads_of_twelve)
            kinds = {kind for kind, sample in samples.items() if (b, head) in sample.pairs()}
            assert {t.kind for t in wrong.tensors if t.tensor == "out" and not t.passed} == kinds


def test_implementations_share_truth_and_another_workload_drops_it(monkeypatch):
    calls = []
    monkeypatch.setattr(checking, "expect", lambda *a, **k: calls.append(1) or expect(*a, **k))
    cache = ReferenceCache()
    assert check(Tiled(), cache=cache).passed and len(calls) == len(INPUT_KINDS)
    assert check(Tiled(Style(keys=16)), cache=cache).passed and len(calls) == len(INPUT_KINDS)
    check(Tiled(), "B1,H1,L20,D32,bf16", cache=cache, kinds=("plain",))
    assert len(cache._kept) == 1
    check(Tiled(), cache=cache, seed=1, kinds=("plain",))
    assert len(calls) == len(INPUT_KINDS) + 2 and len(cache._kept) == 1


def test_a_truth_without_gradients_is_made_anew_when_they_are_needed():
    cache = ReferenceCache()
    assert check(Tiled(), cache=cache, directions=("forward",)).passed
    assert {"dq", "dk", "dv"} < {t.tensor for t in check(Tiled(), cache=cache).tensors}


# --- what runs on this CPU ------------------------------------------------------------------------------------------

REAL = ("sdpa_flash", "sdpa_math", "naive", "reference_cpu")
SIZES = (1, 63, 64, 65, 127, 129, 500, 1024)


def test_inputs_are_made_once_for_all_and_anew_where_somebody_wrote_into_them(monkeypatch):
    w, cache = Workload.parse(TINY), ReferenceCache()
    first = cache.inputs(w, CPU, 0, "needles", "plain")
    assert cache.inputs(w, CPU, 0, "needles", "plain") is first
    assert cache.inputs(w, CPU, 0, "plain", "plain") is not first
    before = first.k.clone()
    first.k[0, 0, 3] += 1
    again = cache.inputs(w, CPU, 0, "needles", "plain")
    assert again is not first and guards.same_bits(again.k, before)
    assert cache.inputs(w, CPU, 0, "needles", "wide") is not again, "other strides, other inputs"
    monkeypatch.setattr(checking, "KEPT_INPUTS", 0.0)
    assert cache.inputs(w, CPU, 1, "plain", "plain") is not cache.inputs(w, CPU, 1, "plain", "plain")


def check_real(name: str, workload: str, device: Device, seed: int, cache: ReferenceCache) -> None:
    implementation, w = find(name), Workload.parse(workload)
    directions = [d for d in ("forward", "backward") if not implementation.reasons_unsupported(w, device, d)]
    if not directions:
        return
    result = check_implementation(implementation, w, device, seed=seed, directions=directions, cache=cache, quick=True)
    assert result.passed, f"{name} on {workload}, seed {seed}: {result.message}"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_real_implementations_never_fail_by_budget(dtype):
    for workload in (f"B1,H2,L65,D64,{dtype},causal", f"B1,H2/1,L33,S129,D64,{dtype}"):
        cache = ReferenceCache()
        for name in REAL:
            check_real(name, workload, CPU, 0, cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dtype"),
    [(size, "bf16") for size in SIZES[:-1]]
    + [(63, "fp16"), (129, "fp16"), (63, "fp32"), (129, "fp32"), (1024, "fp32")],
)
def test_real_implementations_never_fail_by_budget_at_any_size(size, dtype):
    for seed, rest in enumerate(("", ",causal") if size > 300 else ("", ",causal", ",causal=bottom_right,S65")):
        cache = ReferenceCache()
        for name in REAL:
            if name != "reference_cpu" or size < 300:
                check_real(name, f"B1,H{1 if size > 300 else 2},L{size},D64,{dtype}{rest}", CPU, seed, cache)
