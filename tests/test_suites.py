"""The named suites against the tables and sentences that define them."""

from __future__ import annotations

import re

import pytest

from attnscope.errors import WorkloadError
from attnscope.suites import CPU_DEFAULT, GPU_DEFAULT, SUITES, find_workloads
from attnscope.workload import Workload


def test_blog_and_gpt2():
    assert SUITES["blog"] == (Workload(B=8, H=16, L=1024, D=64, causal="top_left"),)
    gpt2 = Workload(B=8, H=12, L=1024, D=768 // 12, dtype="fp32", causal="top_left", layout="qkv")
    assert SUITES["gpt2-forward"] == (gpt2,)
    assert SUITES["gpt2-backward"] == (gpt2.replace(B=4),)


def test_grid_is_24_plain_shapes_and_8_grouped_ones():
    grid = SUITES["grid"]
    assert len(set(grid)) == len(grid) == 32
    assert all(w.B * w.L == 16384 and w.S == w.L and w.dtype == "bf16" for w in grid)
    plain = [w for w in grid if w.H == w.H_kv and w.D == w.D_v]
    assert len(plain) == 24
    assert {(w.D, w.H) for w in plain} == {(64, 32), (128, 16), (256, 8)}
    grouped = [w for w in grid if w.H != w.H_kv]
    assert {(w.H, w.H_kv, w.D, w.D_v) for w in grouped} == {(32, 8, 128, 128)}
    mla = [w for w in grid if w.D != w.D_v]
    assert {(w.D, w.D_v) for w in mla} == {(192, 128)}
    assert len(grouped) == len(mla) == 4


def test_grid_is_the_prototype_s_table(shared):
    """Rows of "The rivals over the grid": D, H | mask | lengths."""
    text = (shared / "reference" / "hopper_prototype.md").read_text()
    table = text.split("## The rivals over the grid")[1].split("##")[0]
    expected, lengths = set(), ()
    for D, H, mask, cell in re.findall(r"^\| (\d+), (\d+) \| (full|causal) \| ([^|]+) \|", table, re.M):
        lengths = lengths if "same" in cell else tuple(map(int, cell.split("/")))
        expected |= {(int(D), int(H), mask == "causal", L) for L in lengths}
    plain = {(w.D, w.H, w.causal is not None, w.L) for w in SUITES["grid"] if w.H == w.H_kv and w.D == w.D_v}
    assert len(expected) == 24
    assert plain == expected


def test_masks_stand_beside_their_plain_shapes_of_the_grid():
    masks = SUITES["masks"]
    plain = [w for w in masks if not w.mask and not w.bias]
    assert {(w.D, w.L) for w in plain} == {(64, 2048), (64, 4096), (128, 2048), (128, 4096)}
    assert set(plain) <= set(SUITES["grid"]) and len(masks) == 4 * len(plain)
    biases = [{"bias": "bf16", "bias_shape": shape} for shape in ("Bx1xLxS", "1xHxLxS")]
    for option in ({"mask": "Bx1xLxS"}, *biases):
        assert {w.replace(**option) for w in plain} <= set(masks)


def test_fp16_stands_beside_bf16():
    fp16 = SUITES["fp16"]
    half = {w for w in fp16 if w.dtype == "fp16"}
    assert {w.replace(dtype="bf16") for w in half} == set(fp16) - half <= set(SUITES["grid"])
    assert {w.D for w in half} == {64, 128, 256} and {w.causal for w in half} == {None, "top_left"}


def test_decode_is_one_query_against_many_keys():
    assert len(SUITES["decode"]) == 5
    assert all(w.L == 1 and w.S > 1 for w in SUITES["decode"])
    assert {(w.B, w.H, w.H_kv, w.S) for w in SUITES["decode"]} >= {
        (8, 32, 8, 8192),
        (64, 32, 8, 4096),
        (1, 32, 8, 32768),
    }
    assert {w.B for w in SUITES["decode"]} >= {1, 256}


def test_short_is_short():
    assert SUITES["short"] and all(w.L <= 512 and w.S <= 512 for w in SUITES["short"])


def test_ragged_has_every_kind_of_edge():
    ragged = SUITES["ragged"]
    assert {w.L for w in ragged} | {w.S for w in ragged} >= {1, 65, 127, 704}
    assert {w.D for w in ragged} >= {80, 96}
    assert any(w.lengths for w in ragged) and any(w.packed for w in ragged)
    assert any(w.L > w.S for w in ragged) and any(w.L < w.S for w in ragged)
    assert any(0 in (w.lengths or ()) for w in ragged) and any(0 in (w.packed or ()) for w in ragged)
    assert {w.causal for w in ragged} == {None, "top_left", "bottom_right"}


def test_the_cpu_s_suites_are_small():
    for name in CPU_DEFAULT:
        assert all(w.flops("backward") < 2e9 for w in SUITES[name])
    assert set(CPU_DEFAULT) | set(GPU_DEFAULT) <= set(SUITES)


def test_find_workloads_takes_suites_and_spellings_in_order_each_once():
    found = find_workloads(["blog-small", "H2,L7,D8", "blog-small", "gpt2-small"])
    assert found == [*SUITES["blog-small"], Workload(H=2, L=7, D=8), *SUITES["gpt2-small"]]
    assert find_workloads([]) == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("blogg", "did you mean blog"),
        ("gpt2-forwrd", "did you mean gpt2-forward"),
        ("B8", "a workload reads like B8,"),
        ("", "unknown suite ''"),
        ("H2,L7", "must name D"),
    ],
)
def test_an_unknown_name_is_a_sentence_with_a_hint(name, sentence):
    with pytest.raises(WorkloadError) as caught:
        find_workloads([name])
    assert sentence in str(caught.value)
    assert str(caught.value).count("\nhint: ") == 1
