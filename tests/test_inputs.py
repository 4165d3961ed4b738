"""Stage 1 with torch: the tensors of a workload, what each kind of input promises, and what cannot be made."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from attnscope import inputs as inputs_module
from attnscope.device import find_device
from attnscope.errors import DeviceError, WorkloadError
from attnscope.inputs import (
    INPUT_KINDS,
    Inputs,
    alibi_slopes,
    make_inputs,
    non_finite_sentences,
    refuse_too_large,
    torch_dtype,
)
from attnscope.reference import compute_attention
from attnscope.workload import Workload
from strategies import workloads

CPU = find_device("cpu")


def made(text: str, seed: int = 0, kind: str = "plain") -> Inputs:
    return make_inputs(Workload.parse(text), CPU, seed=seed, kind=kind)


def same(one: Inputs, other: Inputs) -> bool:
    a, b = one.tensors(), other.tensors()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- numbers, shapes, strides -----------------------------------------------------------------------------------------

EVERYTHING = "B2,H4/2,L9,S7,D8,Dv6,fp32,causal=bottom_right,mask=bool,bias=bf16,lengths=7/2,alibi,sinks,dropout=0.2"


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_the_same_seed_gives_the_same_numbers(kind):
    assert same(made(EVERYTHING, 3, kind), made(EVERYTHING, 3, kind))
    assert not same(made(EVERYTHING, 3, kind), made(EVERYTHING, 4, kind))


@settings(max_examples=40)
@given(workloads(dtypes=("fp32", "bf16", "fp16", "fp64")))
def test_shapes_are_logical_and_strides_are_the_layout_s(w):
    for kind in INPUT_KINDS:
        x = make_inputs(w, CPU, seed=1, kind=kind)
        assert x.q.shape == (w.B, w.H, w.L, w.D)
        assert x.k.shape == (w.B, w.H_kv, w.S, w.D)
        assert x.v.shape == (w.B, w.H_kv, w.S, w.D_v)
        assert x.grad_out.shape == (w.B, w.H, w.L, w.D_v)
        assert {t.dtype for t in (x.q, x.k, x.v, x.grad_out)} == {torch_dtype(w.dtype)}
        assert all(t.isfinite().all() for t in (x.q, x.k, x.v, x.grad_out))
        assert non_finite_sentences(x) == []
    tokens_first = [t.transpose(1, 2) for t in (x.q, x.k, x.v, x.grad_out)]
    if w.layout == "bhld":
        assert all(t.is_contiguous() for t in (x.q, x.k, x.v, x.grad_out))
    elif w.layout == "blhd":
        assert all(t.is_contiguous() for t in tokens_first)
    else:
        assert x.qkv.shape == (w.B, w.L, 3, w.H, w.D) and x.qkv.is_contiguous() and tokens_first[3].is_contiguous()
        for n, t in enumerate((x.q, x.k, x.v)):
            assert torch.equal(t, x.qkv[:, :, n].transpose(1, 2))
            assert t.untyped_storage().data_ptr() == x.qkv.untyped_storage().data_ptr()
    for name in ("mask", "bias"):
        pattern = w.mask if name == "mask" else w.bias_shape
        assert (getattr(x, name) is None) == (pattern is None)
        assert pattern is None or getattr(x, name).shape == w.broadcast_shape(pattern)


def test_options_have_the_documented_types():
    x = made(EVERYTHING)
    assert (x.bias.dtype, x.mask.dtype, x.lengths.dtype) == (torch.bfloat16, torch.bool, torch.int32)
    assert x.lengths.tolist() == [7, 2]
    assert (x.sinks.shape, x.sinks.dtype, x.alibi_slopes.shape) == ((4,), torch.float32, (4,))
    assert (x.dropout_keep.shape, x.dropout_keep.dtype) == ((2, 4, 9, 7), torch.bool)
    packed = made("H2,D8,packed=3/0/4")
    assert packed.cu_seqlens.tolist() == [0, 3, 3, 7] and packed.cu_seqlens.dtype == torch.int32


def test_dropout_keeps_the_share_it_says():
    keep = made("B4,H8,L64,D8,dropout=0.3").dropout_keep
    assert keep.float().mean().item() == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (8, [2.0**-h for h in range(1, 9)]),
        (1, [2.0**-8]),
        (6, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]),
    ],
)
def test_alibi_slopes_are_the_paper_s(heads, slopes):
    assert alibi_slopes(heads) == slopes


@pytest.mark.parametrize("text", ["B2,H4,L5,D8", "B2,H4,L5,D8,layout=blhd", "B2,H4,L5,D8,layout=qkv", EVERYTHING])
def test_clone_is_deep_and_keeps_strides_and_views(text):
    x = made(text)
    copy = x.clone()
    assert same(x, copy)
    for name, t in x.tensors().items():
        other = copy.tensors()[name]
        assert (t.stride(), t.storage_offset()) == (other.stride(), other.storage_offset())
    if copy.qkv is not None:
        copy.q.fill_(7)
        assert (copy.qkv[:, :, 0] == 7).all()
    for t in copy.tensors().values():
        t.zero_()
    assert same(x, made(text))


def test_clone_keeps_strides_that_no_dense_tensor_has():
    x = made("B2,H4,L5,D8,fp32")
    x.grad_out = torch.ones(()).expand(x.grad_out.shape)
    x.q = torch.randn(2, 4, 5, 16)[..., ::2]
    copy = x.clone()
    assert copy.grad_out.stride() == (0, 0, 0, 0) and copy.q.stride() == x.q.stride()
    assert same(x, copy) and copy.q.data_ptr() != x.q.data_ptr()


# --- geometry ---------------------------------------------------------------------------------------------------------


@given(workloads())
def test_row_bounds_and_visible_are_row_interval(w):
    x = make_inputs(w.replace(mask=None), CPU)
    low, high = x.row_bounds()
    assert low.shape in ((w.B, w.L), (1, w.L)) and high.shape == (w.B, w.L)
    dense = torch.zeros(w.B, 1, w.L, w.S, dtype=torch.bool)
    for b in range(w.B):
        for i in range(w.L):
            interval = w.row_interval(b, i)
            assert (low.expand(w.B, w.L)[b, i].item(), high[b, i].item()) == interval
            dense[b, 0, i, slice(*interval)] = True
    visible = x.visible()
    assert dense.all() if visible is None else torch.equal(visible.expand(w.B, 1, w.L, w.S), dense)


@given(workloads())
def test_visible_pairs_count_what_mask_and_geometry_leave(w):
    x = make_inputs(w, CPU)
    visible = x.visible()
    dense = torch.ones(w.B, w.H, w.L, w.S) if visible is None else visible.expand(w.B, w.H, w.L, w.S)
    assert x.visible_pairs == round(dense.float().sum().item() / w.H)


@given(workloads())
def test_a_mask_kills_no_row_that_geometry_leaves_alive(w):
    if w.window is not None or w.packed is not None or w.mask is None:
        return
    x = make_inputs(w, CPU)
    alive = x.visible().expand(w.B, w.H, w.L, w.S).any(-1)
    for b in range(w.B):
        for i in range(w.L):
            low, high = w.row_interval(b, i)
            assert low == high or w.lengths or alive[b, :, i].all()


def test_own_positions_survive_a_full_mask_with_lengths():
    x = made("B3,H2,L40,S50,D8,causal=bottom_right,mask=bool,lengths=50/41/40")
    assert x.visible().any(-1).all()


# --- what each kind promises ------------------------------------------------------------------------------------------

HARD = [
    "B2,H4/2,L200,D64,fp32,causal",
    "H2,L130,S65,D32,fp32",
    "B4,H8/2,L1,S300,D64,fp32",
    "H4,L64,D16,fp32,alibi,causal",
]


def test_shifted_moves_every_lse_below_what_float32_can_exponentiate():
    for text in [*HARD, "H2,L100,D64,fp16", "H2,L100,D128,bf16,causal,sinks", "H2,L100,D8,fp32,bias=fp32"]:
        lse = compute_attention(made(text, kind="shifted"), backward=False).lse
        assert lse.max() < -88.7 and lse.min() > -300


def test_large_multiplies_the_logits_by_eight():
    plain, large = made(HARD[0]), made(HARD[0], kind="large")
    assert torch.equal(large.q, plain.q * 8) and torch.equal(large.k, plain.k)


@pytest.mark.parametrize("text", [HARD[0], HARD[2], "H2,L512,D64,bf16", "H2,L64,D64,fp32,layout=qkv"])
def test_peaky_rows_are_nearly_one_hot(text):
    def top_share(kind: str) -> float:
        x = made(text, kind=kind)
        exact = compute_attention(x, backward=False)
        w = x.workload
        keys = x.k.double().repeat_interleave(w.group, 1)
        scores = x.q.double() @ keys.mT * w.effective_scale
        visible = x.visible()
        scores = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
        return torch.exp(scores - exact.lse[..., None]).amax(-1).median().item()

    assert top_share("peaky") > 0.75
    assert top_share("peaky") > top_share("plain")


@pytest.mark.parametrize(
    "text",
    [
        *HARD,
        "H2,L300,D64,bf16",
        "B3,H2,L64,S200,D64,fp32,lengths=200/65/1,causal=bottom_right",
        "H2,D64,fp32,packed=70/0/130,causal",
        "H2,L128,D64,fp32,window=32,causal",
        "B2,H4/2,L100,D64,fp32,mask=bool",
        "H2,L128,D64,fp32,layout=qkv",
        "H2,L128,D64,fp32,scale=-0.3",
        "H2,L1100,D64,fp32,causal",
    ],
)
def test_losing_any_needle_is_loud(text):
    """Each planted key, hidden from everyone, moves some row of its head by more than a tenth of that row's norm."""
    plain, x = made(text, seed=5), made(text, seed=5, kind="needles")
    w = x.workload
    planted = (x.k != plain.k).any(-1).nonzero().tolist()
    assert len({key for _, _, key in planted}) >= min(w.S, 8 if w.L > 1 else 4)
    k, v = (t.double().repeat_interleave(w.group, 1) for t in (x.k, x.v))
    scores = x.q.double() @ k.mT * w.effective_scale
    if x.alibi_slopes is not None:
        scores += x.alibi_bias()
    visible = x.visible()
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    p = torch.softmax(scores, -1).nan_to_num()
    out = p @ v
    norm = out.norm(dim=-1)
    for b, kv, key in planted:
        heads = slice(kv * w.group, (kv + 1) * w.group)
        share = p[b, heads, :, key]
        rest = out[b, heads] - share[..., None] * v[b, heads, key][:, None]
        without = torch.where(share[..., None] < 1, rest / (1 - share[..., None]), 0.0)
        change = (without - out[b, heads]).norm(dim=-1)
        assert (change / norm[b, heads]).nan_to_num().max() > 0.1, (b, kv, key)


def test_needles_reach_the_edges_of_tiles():
    plain, x = made("H1,L512,D64,fp32"), made("H1,L512,D64,fp32", kind="needles")
    planted = set((x.k != plain.k).any(-1)[0, 0].nonzero().flatten().tolist())
    edges = {0, 15, 16, 63, 64, 65, 79, 80, 127, 128, 255, 256, 511, 510, 448, 447}
    assert edges <= planted and len(planted - edges) > 16


def test_decode_plants_other_keys_in_other_heads():
    plain, x = made("B4,H8/2,L1,S300,D64,fp32"), made("B4,H8/2,L1,S300,D64,fp32", kind="needles")
    planted = (x.k != plain.k).any(-1)
    assert (planted.sum(-1) == 4).all()
    assert planted.any(0).any(0).sum() >= 24


# --- what cannot be made ----------------------------------------------------------------------------------------------


def test_an_unknown_kind_is_a_sentence():
    with pytest.raises(WorkloadError, match=r"unknown input kind 'needle'\nhint: did you mean needles"):
        made("H1,L2,D4", kind="needle")


def test_more_memory_than_the_machine_has_is_a_sentence():
    with pytest.raises(DeviceError, match=r"needs .* GiB for its tensors, .* free\nhint: ") as caught:
        made("B64,H128,L2000000,D128,bf16")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["H1,L1000000,D8,mask=bool:1x1xLxS", "H1,L1000000,D8,dropout=0.1"])
def test_a_mask_counts_as_memory(text, monkeypatch):
    monkeypatch.setattr(inputs_module, "available_memory_bytes", lambda device: 2**38)
    with pytest.raises(DeviceError, match="GiB for its tensors"):
        made(text)


def test_factor_scales_what_is_asked_for(monkeypatch):
    w = Workload.parse("H4,L64,D32,fp32")
    monkeypatch.setattr(inputs_module, "available_memory_bytes", lambda device: w.min_bytes("backward") * 2)
    refuse_too_large(w, CPU, factor=2.0)
    with pytest.raises(DeviceError):
        refuse_too_large(w, CPU, factor=2.1)


# --- values that no implementation can be blamed for ------------------------------------------------------------------


def test_non_finite_values_are_named_with_where_they_lie():
    x = made("B2,H4/2,L5,S9,D8,fp32,lengths=9/4,bias=fp32")
    x.k[1, :, 4:] = torch.nan
    x.v[0, 1, 3, 2] = torch.inf
    x.bias[..., 0] = -torch.inf
    assert non_finite_sentences(x) == [
        f"k holds {2 * 5 * 8} non-finite values, {2 * 5 * 8} of them at keys that no query sees (padding)",
        "v holds 1 non-finite values, 0 of them at keys that no query sees (padding)",
    ]
    x.bias[..., 1] = torch.nan
    assert non_finite_sentences(x)[-1] == "bias holds 20 non-finite values"


def test_inputs_are_plain_data():
    x = made("B1,H2,L3,D4,fp32")
    assert dataclasses.replace(x, q=x.q * 2).k is x.k
    assert set(x.tensors()) == {"q", "k", "v", "grad_out"}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_the_same_seed_gives_the_same_numbers_on_a_gpu(gpu, kind):
    w = Workload.parse(EVERYTHING)
    one, other = (make_inputs(w, gpu, seed=3, kind=kind) for _ in range(2))
    assert same(one, other) and one.q.is_cuda


@pytest.mark.parametrize("name", ["q", "k", "v", "grad_out"])
def test_a_tensor_that_does_not_fit_its_workload_is_a_sentence(name):
    """k and v of different S, say."""
    inputs = made("B2,H4/2,L8,S12,D16,Dv8,fp32")
    short = getattr(inputs, name)[:, :, :-1]
    with pytest.raises(WorkloadError, match=rf"{name} must have shape .* got \(2, "):
        dataclasses.replace(inputs, **{name: short})
