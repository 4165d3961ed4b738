"""Stage 1: the float64 truth against a dense one by autograd, its condition scales, its twins, its samples."""

from __future__ import annotations

import math
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscope import reference
from attnscope.device import find_device
from attnscope.inputs import Inputs, make_inputs, torch_dtype
from attnscope.random_workloads import PATTERNS
from attnscope.reference import (
    EXACT,
    compute_attention,
    round_tf32,
    sample_heads,
    select,
    twin_precision,
)
from attnscope.suites import SUITES
from attnscope.workload import Workload
from strategies import workloads

CPU = find_device("cpu")
NOTHING = -1e300  # a score that no exponential survives


def made(text: str, seed: int = 0, kind: str = "plain") -> Inputs:
    return make_inputs(Workload.parse(text), CPU, seed=seed, kind=kind)


class Dense:
    """The workload's definition in float64 on whole matrices, gradients by autograd; none of the package's code."""

    def __init__(self, x: Inputs) -> None:
        w = x.workload
        q, k, v = (t.double().clone().requires_grad_() for t in (x.q, x.k, x.v))
        bias = None if x.bias is None else x.bias.double().clone().requires_grad_()
        sinks = None if x.sinks is None else x.sinks.double().clone().requires_grad_()
        keys, values = k.repeat_interleave(w.group, 1), v.repeat_interleave(w.group, 1)
        scale = w.D**-0.5 if w.scale is None else w.scale
        raw = q @ keys.mT * scale
        scores = raw if w.softcap is None else w.softcap * torch.tanh(raw / w.softcap)
        if bias is not None:
            scores = scores + bias
        if x.alibi_slopes is not None:
            scores = scores - x.alibi_slopes.double()[None, :, None, None] * self.distance(w)[:, None]
        visible = torch.ones(w.B, w.H, w.L, w.S, dtype=torch.bool)
        for b in range(w.B):
            for i in range(w.L):
                low, high = w.row_interval(b, i)
                visible[b, :, i, :low] = False
                visible[b, :, i, high:] = False
        if x.mask is not None:
            visible = visible & x.mask
        column = torch.full((w.H,), NOTHING, dtype=torch.float64) if sinks is None else sinks
        scores = torch.cat(
            [scores.masked_fill(~visible, NOTHING), column[None, :, None, None].expand(w.B, w.H, w.L, 1)], -1
        )
        lse = torch.logsumexp(scores, -1)
        shares = torch.softmax(scores, -1)
        p, self.sink_share = shares[..., :-1] * visible, shares[..., -1]
        factor = 1.0 if x.dropout_keep is None else x.dropout_keep.double() / (1 - w.dropout)
        weights = p * factor
        out = weights @ values
        self.tensors = {"out": out.detach(), "lse": torch.where(lse < NOTHING / 10, -torch.inf, lse).detach()}
        leaves = {"dq": q, "dk": k, "dv": v, "dbias": bias, "dsinks": sinks}
        leaves = {name: t for name, t in leaves.items() if t is not None}
        grads = torch.autograd.grad(out, list(leaves.values()), x.grad_out.double(), allow_unused=True)
        self.tensors |= {
            n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), grads, strict=True)
        }
        self.scales = self._scales(x, q, keys, values, bias, p, weights, factor, out, raw, scale)

    def _scales(self, x, q, keys, values, bias, p, weights, factor, out, raw, scale) -> dict[str, torch.Tensor]:
        w, grad = x.workload, x.grad_out.double()
        with torch.no_grad():
            delta = (grad * out).abs().sum(-1, keepdim=True)
            a = p * (grad.abs() @ values.abs().mT * factor + delta)
            a_raw = a if w.softcap is None else a * (1 - torch.tanh(raw / w.softcap) ** 2)

            def by_kv(t: torch.Tensor) -> torch.Tensor:
                return t.unflatten(1, (w.H_kv, w.group)).sum(2)

            found = {
                "out": weights @ values.abs(),
                "dq": a_raw @ keys.abs() * abs(scale),
                "dk": by_kv(a_raw.mT @ q.abs()) * abs(scale),
                "dv": by_kv(weights.mT @ grad.abs()),
            }
            if bias is not None:
                found["dbias"] = a.sum_to_size(bias.shape)
            if x.sinks is not None:
                found["dsinks"] = (self.sink_share * delta[..., 0]).sum((0, 2))
        return found

    @staticmethod
    def distance(w: Workload) -> torch.Tensor:
        rows, columns = torch.arange(w.L)[:, None], torch.arange(w.S)[None]
        shifts = [(w.lengths[b] if w.lengths else w.S) - w.L if w.causal == "bottom_right" else 0 for b in range(w.B)]
        return torch.stack([(rows + n - columns).abs() for n in shifts]) if shifts else torch.zeros(0, w.L, w.S)


def assert_close(found: torch.Tensor, expected: torch.Tensor, name: str, tolerance: float = 1e-10) -> None:
    assert found.shape == expected.shape, name
    assert torch.equal(found == -torch.inf, expected == -torch.inf), name
    error = (found - expected).nan_to_num(nan=0.0).abs()
    assert (error <= tolerance * (1 + expected.abs().nan_to_num(neginf=0.0))).all(), (name, error.max().item())
    assert not found.isnan().any(), name


def assert_is_dense(x: Inputs) -> None:
    exact, dense = compute_attention(x), Dense(x)
    assert exact.tensors().keys() == dense.tensors.keys()
    for name, tensor in exact.tensors().items():
        assert_close(tensor, dense.tensors[name], name)
    assert exact.scales.keys() == dense.scales.keys()
    for name, scale in exact.scales.items():
        assert_close(scale, dense.scales[name], f"scale of {name}")


# --- the truth --------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(workloads(), st.sampled_from([4, 64, 2**18]), st.sampled_from(["plain", "large", "shifted", "needles"]))
def test_reference_is_the_dense_definition(w, chunk, kind):
    with patch.dict(reference.CHUNK_ELEMENTS, cpu=chunk):
        assert_is_dense(make_inputs(w, CPU, seed=3, kind=kind))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_dbias_of_every_broadcast_shape(pattern):
    with patch.dict(reference.CHUNK_ELEMENTS, cpu=40):
        assert_is_dense(made(f"B2,H4/2,L5,S7,D8,fp32,causal=bottom_right,bias=fp32:{pattern},sinks"))


EVERYTHING = (
    "B2,H4/2,L5,S7,D16,Dv8,fp32,causal=bottom_right,window=3,lengths=7/0,mask=bool,bias=fp32:1x1xLxS,alibi,sinks,"
    "dropout=0.1,layout=blhd,softcap=2"
)


@pytest.mark.parametrize("chunk", [1, 7, 35, 2**18])
@pytest.mark.parametrize(
    "text", [EVERYTHING, "H2,D8,packed=3/0/4,causal,window=2,fp32", "B1,H2,L65,D8,bf16,layout=qkv"]
)
def test_chunks_change_nothing(text, chunk):
    with patch.dict(reference.CHUNK_ELEMENTS, cpu=chunk):
        assert_is_dense(made(text))


@pytest.mark.parametrize(
    "text", ["B0,H4/2,L5,S7,D8", "B2,H4/2,L0,S7,D8", "B2,H4/2,L5,S0,D8", "H2,D8,packed=0/0", "B0,H2,L0,D8"]
)
@pytest.mark.parametrize("options", ["", ",sinks", ",causal,bias=fp32", ",mask=bool,dropout=0.5"])
def test_empty_sizes_give_zeros_and_empty_tensors(text, options):
    x = made(text + ",fp32" + options)
    assert_is_dense(x)
    exact = compute_attention(x)
    assert exact.out.shape == (x.workload.B, x.workload.H, x.workload.L, 8)
    assert all(not t.any() for name, t in exact.tensors().items() if name not in ("lse", "dsinks"))
    assert "sinks" in options or (exact.lse == -torch.inf).all()


def test_a_row_that_sees_no_key_is_zero_and_has_no_gradient():
    x = made("B2,H4/2,L9,S5,D8,fp32,causal=bottom_right,bias=fp32:BxHxLxS")
    exact = compute_attention(x)
    dead = torch.tensor([w0 == w1 for w0, w1 in (x.workload.row_interval(0, i) for i in range(9))])
    assert dead.tolist() == [True] * 4 + [False] * 5
    assert (exact.out[:, :, dead] == 0).all() and (exact.lse[:, :, dead] == -torch.inf).all()
    assert (exact.dq[:, :, dead] == 0).all() and (exact.dbias[:, :, dead] == 0).all()
    assert exact.lse[:, :, ~dead].isfinite().all()
    assert (
        exact.dq[:, :, 5:].any(-1).all() and not exact.dq[:, :, 4].round(decimals=12).any()
    )  # row 4 sees one key only
    alone = compute_attention(made("B2,H4/2,L9,S5,D8,fp32,causal=bottom_right,sinks"))
    assert (alone.out[:, :, dead] == 0).all() and alone.lse.isfinite().all()  # the sink is all it sees


def test_a_mask_row_of_false_is_a_row_that_sees_no_key():
    x = made("B1,H2,L8,D16,fp32,mask=bool:1x1xLxS")
    x.mask[0, 0, 3] = False
    exact = compute_attention(x)
    assert (
        (exact.out[:, :, 3] == 0).all() and (exact.lse[:, :, 3] == -torch.inf).all() and (exact.dq[:, :, 3] == 0).all()
    )
    assert all(t.isfinite().all() for name, t in exact.tensors().items() if name != "lse")


def test_scores_that_underflow_without_the_maximum_are_exact():
    x = made("B1,H2,L64,D32,fp32", kind="shifted")
    assert_is_dense(x)
    assert compute_attention(x).lse.max() < -88.7


def test_forward_alone_is_the_same_forward():
    x = made(EVERYTHING)
    both, forward = compute_attention(x), compute_attention(x, backward=False)
    assert set(forward.tensors()) == {"out", "lse"} and set(forward.scales) == {"out"}
    assert torch.equal(both.out, forward.out) and torch.equal(both.lse, forward.lse)


def test_inputs_are_left_as_they_were():
    x = made(EVERYTHING)
    before = x.clone()
    compute_attention(x)
    assert all(torch.equal(t, before.tensors()[name]) for name, t in x.tensors().items())


def test_odd_strides_change_nothing():
    x = made("B2,H4/2,L5,S7,D8,fp32,bias=fp32:BxHxLxS,mask=bool")
    expected = compute_attention(x).tensors()
    for name in ("q", "k", "v", "grad_out", "bias", "mask"):
        tensor = getattr(x, name)
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] * 2, dtype=tensor.dtype)
        wide[..., ::2] = tensor
        setattr(x, name, wide[..., ::2])
    assert all(torch.equal(t, expected[name]) for name, t in compute_attention(x).tensors().items())


@pytest.mark.parametrize(
    "text", [EVERYTHING, "B2,H2,L6,D4,causal,scale=-0.7", "B1,H4/1,L3,S9,D4,bias=fp64:1xHx1xS,sinks"]
)
def test_gradients_are_finite_differences_of_the_forward(text):
    x = make_inputs(Workload.parse(text).replace(dtype="fp64", bias="fp64" if "bias" in text else None), CPU, seed=1)
    exact = compute_attention(x)
    generator = torch.Generator().manual_seed(2)

    def loss() -> float:
        return (compute_attention(x, backward=False).out * x.grad_out).sum().item()

    for name in ("q", "k", "v", "bias", "sinks"):
        tensor = getattr(x, name)
        if tensor is None:
            continue
        # sinks are float32: a step that float32 holds exactly
        direction = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor.dtype)
        step, original = 2.0**-10 if name == "sinks" else 1e-5, tensor.clone()
        losses = []
        for sign in (1, -1):
            tensor.copy_((original + sign * step * direction).to(tensor.dtype))
            losses.append(loss())
        moved = [(original + sign * step * direction).to(tensor.dtype).double() for sign in (1, -1)]
        tensor.copy_(original)
        expected = (getattr(exact, f"d{name}") * (moved[0] - moved[1])).sum().item()
        assert losses[0] - losses[1] == pytest.approx(expected, rel=1e-5, abs=1e-9), name


def test_condition_scales_bound_the_values():
    exact = compute_attention(made(EVERYTHING.replace("lengths=7/0", "lengths=7/4")))
    for name, scale in exact.scales.items():
        assert (exact.tensors()[name].abs() <= scale * (1 + 1e-9) + 1e-30).all(), name


# --- twins ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "compute", "least", "most"),
    [
        ("fp32", "fp32", 1e-9, 2e-6),
        ("fp32", "tf32", 5e-5, 3e-3),
        ("fp16", "fp32", 5e-5, 3e-3),
        ("bf16", "fp32", 4e-4, 2e-2),
    ],
)
def test_a_twin_errs_as_its_precision_does(dtype, compute, least, most):
    x = made(f"B2,H4/2,L65,D32,{dtype},causal")
    exact, twin = compute_attention(x), compute_attention(x, precision=twin_precision(dtype, compute))
    assert twin.scales == {} and twin.out.dtype == torch.float32
    for name in ("out", "dq", "dk", "dv"):
        error = (twin.tensors()[name].double() - exact.tensors()[name]).abs() / exact.scales[name].clamp_min(1e-30)
        assert least < error.max().item() < most, name
    # what it returns is what a kernel could have stored, but for the log-sum-exp, which stays in float32
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(twin.tensors()[name], twin.tensors()[name].to(torch_dtype(dtype)).float()), name
    assert (twin.lse.double() - exact.lse).abs().max() < (1e-2 if compute == "tf32" else 1e-5)


def test_a_twin_keeps_dead_rows_and_empty_sizes_exact():
    for text in ("B2,H2,L9,S5,D8,bf16,causal=bottom_right", "B2,H2,L5,S0,D8,bf16", "B0,H2,L5,D8,bf16"):
        twin = compute_attention(made(text), precision=twin_precision("bf16", "fp32"))
        dead = twin.lse == -torch.inf
        assert (twin.out[dead] == 0).all() and (twin.dq[dead] == 0).all()
        assert all(t.isfinite().all() for name, t in twin.tensors().items() if name != "lse")


def test_fp64_is_its_own_twin():
    assert twin_precision("fp64", "fp64") == EXACT


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False))
def test_tf32_is_the_nearest_with_ten_bits_ties_away(x):
    rounded = round_tf32(torch.tensor([x])).item()
    if x == 0 or math.isinf(rounded):
        assert rounded == x or abs(x) > 3.4e38
        return
    step = 2.0 ** (math.frexp(x)[1] - 11)
    assert rounded == math.copysign(math.floor(abs(x) / step + 0.5) * step, x)


def test_tf32_leaves_nan_and_infinity_alone():
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert torch.equal(round_tf32(odd)[:2], odd[:2]) and round_tf32(odd)[2].isnan()
    # a NaN with every bit set must not carry over into another number
    assert round_tf32(torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)).isnan().all()


# --- samples ----------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(workloads(), st.integers(0, 5), st.integers(1, 400))
def test_a_sample_s_attention_is_the_whole_s(w, seed, max_pairs):
    x = make_inputs(w, CPU, seed=1)
    sample = sample_heads(w, seed, max_pairs)
    assert sample == sample_heads(w, seed, max_pairs)
    part = select(x, sample)
    whole, found = compute_attention(x), compute_attention(part)
    batches, kv, heads = list(sample.batches), list(sample.kv_heads), sample.heads(w.group)
    assert (part.workload.B, part.workload.H, part.workload.H_kv) == (len(batches), len(heads), len(kv))

    def cut(name: str, t: torch.Tensor) -> torch.Tensor:
        if name == "dsinks":
            return t[heads]
        t = t if name == "dbias" and t.shape[0] == 1 else t[batches]
        return t if name == "dbias" and t.shape[1] == 1 else t[:, kv if name in ("dk", "dv") else heads]

    for name, t in found.tensors().items():
        assert_close(t, cut(name, whole.tensors()[name]), name)
    for name, t in found.scales.items():
        assert_close(t, cut(name, whole.scales[name]), f"scale of {name}")
    if w.mask is None:
        assert part.visible_pairs == part.workload.visible_pairs()


@pytest.mark.parametrize("name", ["blog", "gpt2-forward", "grid", "decode", "short"])
def test_samples_of_the_suites_are_small_but_never_empty(name):
    for w in SUITES[name]:
        sample = sample_heads(w, seed=0, max_pairs=2**24)
        pairs = len(sample.batches) * len(sample.heads(w.group)) * w.L * w.S
        assert 0 < pairs <= max(2**24, w.L * w.S * w.group)
        assert sample_heads(w, seed=0, max_pairs=2**50).heads(w.group) == list(range(w.H))
        few = sample_heads(w, 0, 2**50, max_elements=2**22)
        elements = (w.L * w.group + w.S) * (w.D + w.D_v)
        assert 0 < len(few.pairs()) * elements <= max(2**22, elements)


def test_samples_move_with_the_seed():
    w = SUITES["blog"][0]
    assert len({sample_heads(w, seed, w.L * w.S) for seed in range(20)}) > 10


def test_a_sum_over_batch_or_heads_takes_them_all():
    whole = sample_heads(Workload.parse("B4,H8,L9,D8,bias=fp32:1x1xLxS"), 0, 1)
    assert len(whole.batches) == 4 and len(whole.kv_heads) == 8
    assert len(sample_heads(Workload.parse("B4,H8,L9,D8,bias=fp32:BxHxLxS"), 0, 1).batches) == 1
    assert len(sample_heads(Workload.parse("B4,H8,L9,D8,sinks"), 0, 1).batches) == 4


# --- size -------------------------------------------------------------------------------------------------------------

MEASURE = """
import sys
from attnscope.device import find_device
from attnscope.inputs import make_inputs
from attnscope.reference import compute_attention
from attnscope.workload import Workload
compute_attention(make_inputs(Workload.parse(sys.argv[1]), find_device("cpu")), backward=sys.argv[2] == "backward")
status = open("/proc/self/status").read()  # ru_maxrss would count what the parent held when it forked
print(int(status.partition("VmHWM:")[2].split()[0]) * 1024)
"""


@pytest.mark.parametrize(
    ("text", "direction"),
    [
        pytest.param("H1,L16384,D16,bf16", "forward", marks=pytest.mark.long),
        pytest.param("H1,L512,S16384,D16,bf16", "backward", marks=pytest.mark.slow),
    ],
)
def test_sixteen_thousand_squared_stays_under_2_gib(text, direction):
    """In a process of its own, torch included; chunks of rows are alike, so 512 rows show the backward."""
    run = subprocess.run([sys.executable, "-c", MEASURE, text, direction], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 2 * 2**30


@pytest.mark.gpu
def test_sixteen_thousand_squared_stays_under_2_gib_on_a_gpu(gpu):
    x = make_inputs(Workload.parse("H1,L16384,D128,bf16,causal"), gpu)
    torch.cuda.reset_peak_memory_stats()
    compute_attention(x)
    assert torch.cuda.max_memory_allocated() < 2 * 2**30


@pytest.mark.gpu
@pytest.mark.parametrize("text", [EVERYTHING, "H2,D8,packed=3/0/4,causal,fp32", "B2,H4/2,L129,D64,bf16,causal"])
def test_the_gpu_computes_the_same_truth(gpu, text):
    x = make_inputs(Workload.parse(text), CPU)
    moved = x.clone()
    for name, t in x.tensors().items():
        setattr(moved, name, t.cuda())
    on_cpu, on_gpu = compute_attention(x), compute_attention(moved)
    for name, t in on_gpu.tensors().items():
        assert_close(t.cpu(), on_cpu.tensors()[name], name)
