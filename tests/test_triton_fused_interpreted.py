"""triton_fused in Triton's interpreter, against the project's float64 reference and its budgets.

Needs TRITON_INTERPRET=1 in the environment before triton is imported: ``make test`` runs the random workloads in
processes of their own, ``make triton`` all of this file and the contract's tests of triton_fused. The interpreter runs
a tile in milliseconds, so shapes are tiny (a tile is 16 x 16, see ``choose_tiles``) and most workloads are judged on
one forward and backward.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attnscope.budgets import expect
from attnscope.checking import check_implementation
from attnscope.device import Device
from attnscope.guards import poisoned_memory
from attnscope.implementation import find
from attnscope.implementations import triton_fused
from attnscope.implementations.triton_fused import kernels as triton_fused_kernels
from attnscope.inputs import INPUT_KINDS, Inputs, make_inputs
from attnscope.judging import judge
from attnscope.random_workloads import Space, draw_workload
from attnscope.records import TensorCheck
from attnscope.workload import Workload
from triton_interpreter import mutated, needs_interpreter

pytestmark = needs_interpreter
WORKLOADS, CHUNK = 200, 10


def failures(prepared: triton_fused.PreparedTritonFused, inputs: Inputs) -> list[TensorCheck]:
    """What the project's judge says against out, lse and every gradient of one forward and backward."""
    with poisoned_memory(inputs):
        output = prepared.forward(inputs, save=True)
        gradients = prepared.backward(inputs, output.saved).tensors()
    tensors = {"out": output.out, "lse": output.lse} | gradients
    expected = expect(inputs, "fp32")
    assert tensors.keys() == expected.truth.keys()
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    assert shapes == {name: tensor.shape for name, tensor in expected.truth.items()}
    return [check for check in judge(tensors, expected, inputs.kind) if not check.passed]


# Sizes on both sides of a tile's edge, few heads.
SPACE = Space(
    lengths=(1, 2, 7, 15, 16, 16, 17, 20, 33),
    longest=33,
    dims=(1, 3, 8, 16, 20),
    dtypes=("fp32", "fp32", "fp16"),
    bias_dtypes=("fp32", "fp16"),
    heads=(1, 1, 1, 1, 2),
    groups=(2,),
    batches=(1, 1, 1, 1, 2),
    max_pairs=33**2,  # a third tile for one head only
)


def random_workload(seed: int) -> Workload:
    return draw_workload(random.Random(seed), SPACE)


@pytest.mark.parametrize("first", range(0, WORKLOADS, CHUNK))
def test_random_workloads(first: int, cpu: Device) -> None:
    implementation = find("triton_fused")
    for seed in range(first, first + CHUNK):
        workload = random_workload(seed)
        assert implementation.reasons_unsupported(workload, cpu, "backward") == []
        inputs = make_inputs(workload, cpu, seed, INPUT_KINDS[seed % len(INPUT_KINDS)])
        found = failures(implementation.prepare(workload, cpu), inputs)
        assert not found, f"{workload} (seed {seed}): " + "; ".join(check.message for check in found)


def test_the_random_workloads_cover_every_feature_alone_and_in_company() -> None:
    drawn = [random_workload(seed) for seed in range(WORKLOADS)]
    for feature in triton_fused.FEATURES:
        assert sum(feature in w.features for w in drawn) >= 10, feature
    assert {w.layout for w in drawn} == {"bhld", "blhd", "qkv"}
    assert sum(max(w.L, w.S) > 16 for w in drawn) >= 80
    assert any(w.L == 0 for w in drawn) and any(w.S == 0 for w in drawn)


@pytest.mark.parametrize(
    "text",
    [
        "B1,H2,L20,D16,fp32,causal",
        "B2,H2/1,L17,S20,D8,Dv16,fp16,causal=bottom_right,window=9,sinks,lengths=20/0,bias=fp32:1xHx1xS",
    ],
)
def test_the_whole_check_passes(text: str, cpu: Device) -> None:
    result = check_implementation(find("triton_fused"), Workload.parse(text), cpu, kinds=("needles",), quick=True)
    assert result.grade == "tight", result.message
    assert result.deterministic == {"forward": True, "backward": True}


# --- the kernels, each wrong in one place -----------------------------------------------------------------------------

CAUSAL, WINDOW, WIDER = "B1,H1,L20,D8,fp32,causal", "B1,H1,L20,D8,fp32,window=9", "B1,H1,L40,D8,fp32,window=17"
LONG, DOCUMENTS = "B1,H1,L8,S40,D8,fp32", "H1,D8,fp32,packed=9/11"
FULL = "B2,H4/2,L7,S15,D8,fp32,causal=bottom_right,alibi,softcap=1,sinks,dropout=0.3,lengths=15/12,bias=fp32:1x1xLxS"
# What is replaced, by what, and a workload on which the judge must see it.
MUTANTS = {
    "the diagonal is hidden": ("rows + offset + 1)", "rows + offset)", CAUSAL),
    "one key too many": ("rows + offset + 1)", "rows + offset + 2)", CAUSAL),
    "dk's diagonal is hidden": ("tl.maximum(low, keys - offset)", "tl.maximum(low, keys - offset + 1)", CAUSAL),
    "the window is a key short": ("rows + offset - window + 1)", "rows + offset - window + 2)", WINDOW),
    "the window is a key long": ("rows + offset + window)", "rows + offset + window + 1)", WINDOW),
    "dk's window is a row short": ("keys - offset - window + 1)", "keys - offset - window + 2)", WINDOW),
    "a boundary tile is taken as whole": (
        "(tl.maximum(tl.max(low, 0), 0) + TILE - 1) // TILE", "tl.maximum(tl.min(low, 0), 0) // TILE", WIDER
    ),
    "documents see each other": ("tl.minimum(high, tl.load(ends + rows))", "high", DOCUMENTS),
    "the last tile is lost": ("tl.minimum(tl.max(high, 0), limit)", "tl.max(high, 0) // TILE * TILE", LONG),
    "out is not rescaled": ("v_tile, acc * rescale[:, None]", "v_tile, acc", LONG),
    "the sum is not rescaled": ("total * rescale +", "total +", LONG),
    "dq lacks the scale": ("acc * scale, ROWS", "acc, ROWS", LONG),
    "lse is of base 2": ("* 0.6931471805599453", "* 1.0", LONG),
    "bottom right is top left": ("offset = length - L", "offset = 0", FULL),
    "padding is seen": ("length = tl.load(lengths + b)", "length = S", FULL),
    "a group's heads are interleaved": ("b, h // GROUP", "b, h % (H // GROUP)", FULL),
    "dk takes one head of its group": ("kv * GROUP + GROUP)", "kv * GROUP + 1)", FULL),
    "dk lacks delta": ("(grad_p - delta_row[None, :])", "grad_p", FULL),
    "softcap is not differentiated": ("(grad_p - delta[:, None]) * slope_of_cap", "(grad_p - delta[:, None])", FULL),
    "dropout is not made up for": ("sums * keep_scale", "sums * 1.0", FULL),
    "ALiBi forgets the offset": ("tl.abs(rows + offset - keys)", "tl.abs(rows - keys)", FULL),
    "a sink is forgotten": ('tl.where(top > -float("inf"), 1.0, total)', "total + 0.0", FULL),
    "dbias takes one batch entry": ("B // B_OUT)", "1)", FULL),
    "dbias takes one head": ("h_out + H // H_OUT", "h_out + 1", FULL),
}  # fmt: skip


@pytest.fixture
def mutant(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """The kernels with one text replaced, as a module of its own."""
    old, new, _ = MUTANTS[request.param]
    module = mutated(triton_fused_kernels, old, new, tmp_path)
    yield request.param, module.load()
    del sys.modules[module.__name__]


@pytest.mark.parametrize("mutant", MUTANTS, indirect=True)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a wrong kernel may overflow
def test_a_wrong_kernel_is_found_out(mutant: tuple[str, Any], cpu: Device) -> None:
    name, kernels = mutant
    workload = Workload.parse(MUTANTS[name][2])
    prepared = triton_fused.PreparedTritonFused(workload, cpu, kernels)
    assert failures(prepared, make_inputs(workload, cpu, 0, "needles"))


def test_the_mutants_workloads_pass_unharmed(cpu: Device) -> None:
    for text in dict.fromkeys(text for *_, text in MUTANTS.values()):
        workload = Workload.parse(text)
        prepared = find("triton_fused").prepare(workload, cpu)
        assert not failures(prepared, make_inputs(workload, cpu, 0, "needles")), text


# --- what only a whole call can show ----------------------------------------------------------------------------------


def test_tiles_beyond_32_bits_are_addressed_with_64(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not triton_fused.is_wide([(0, 0, 2**24, 1)], 64, 128)
    assert triton_fused.is_wide([(0, 0, 64, 1), (0, 0, 2**25, 1)], 64, 128)
    monkeypatch.setattr(triton_fused, "is_wide", lambda *_: True)
    workload = Workload.parse("B1,H2,L20,D8,Dv16,fp32,causal,bias=fp32:1xHxLxS,layout=blhd")
    assert not failures(find("triton_fused").prepare(workload, cpu), make_inputs(workload, cpu))


def test_rows_that_see_no_key_are_0_and_minus_infinity(cpu: Device) -> None:
    workload = Workload.parse("B2,H1,L17,S16,D8,fp32,lengths=16/0,causal=bottom_right")
    inputs = make_inputs(workload, cpu)
    output = find("triton_fused").prepare(workload, cpu).forward(inputs)
    assert (output.out[1] == 0).all() and (output.lse[1] == -torch.inf).all()
    assert (output.out[0, :, 0] == 0).all() and torch.isfinite(output.lse[0, :, 1:]).all()
