"""hopper's bool masks and biases without a card: the kernels' own source on a stand-in for Gluon; what they are told.

That they compile for sm_90 without spills is tested in test_hopper.py, what runs on a card in tests/gpu.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import gluon_stand_in
from attnscope import driver
from attnscope.device import Device, find_device
from attnscope.implementation import find
from attnscope.implementations.hopper import Hopper, Plan, kernels
from attnscope.implementations.hopper.configurations import Configuration, tuning_class
from attnscope.implementations.hopper.masked import MaskPlan, bias_arguments
from attnscope.inputs import Inputs, make_inputs
from attnscope.reference import compute_attention
from attnscope.workload import Workload
from driver_stand_in import TensorMap, stand_in
from gluon_stand_in import TOUCHED, in_memory, run_masks, run_plan
from prepared_on_stand_in import prepare, prepare_hopper
from test_hopper import VERSIONS, compile_apart

CPU = find_device("cpu")
H200 = Device("cuda", "NVIDIA H200", capability=(9, 0), multiprocessors=132)
PATTERNS = ["x".join(letters) for letters in itertools.product("B1", "H1", "L1", "S1")]
CONFIGURATIONS = [
    Configuration(keys=64, slots=5, q_slots=2, bias_slots=2),
    Configuration(keys=128, slots=4, groups=3, pingpong=False, lazy_sum=False, persistent=False),
    Configuration(keys=64, slots=3, overlap=False, bias_slots=1),
    Configuration(keys=128, slots=4, q_slots=2, bias_slots=1, balanced=False),
]
QUEUED = [
    Configuration(keys=64, slots=5, q_slots=2, queued=True, balanced=False),
    Configuration(keys=64, slots=8, groups=3, queued=True, pingpong=False, lazy_sum=False),
    Configuration(keys=128, slots=3, q_slots=2, queued=True, overlap=False),
]


@pytest.fixture(autouse=True)
def no_table_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("ATTNSCOPE_CACHE_DIR", str(tmp_path))


def agrees(inputs: Inputs, configuration: Configuration, seed: int = 0, blocks: int = 2) -> None:
    """The kernels compute what the reference does; a row that sees no key gives 0 and -inf."""
    truth = compute_attention(inputs, backward=False)
    out, lse = run_plan(Plan(inputs.workload, configuration), inputs, blocks=blocks, seed=seed)
    where = f"{inputs.workload} {configuration}"
    seen = truth.lse.isfinite()
    assert torch.equal(lse.isfinite(), seen), where
    assert torch.allclose(out.double(), truth.out, atol=1e-5, rtol=0), where
    assert torch.allclose(lse[seen].double(), truth.lse[seen], atol=1e-5, rtol=1e-6), where
    assert not (out.double()[~seen]).any() and (lse[~seen] == -torch.inf).all(), where


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("option", ["mask=bool", "bias=bf16", "bias=fp16", "bias=fp32"])
def test_every_broadcast_shape(option: str, pattern: str) -> None:
    number = PATTERNS.index(pattern) + len(option)
    geometry = ("", ",causal", ",causal=bottom_right,layout=blhd")[number % 3]
    inputs = make_inputs(Workload.parse(f"B2,H2,L70,S136,D16,bf16,{option}:{pattern}{geometry}"), CPU, number)
    agrees(inputs, CONFIGURATIONS[number % 4], number)


@pytest.mark.parametrize(
    "text",
    [
        "B2,H4/2,L65,S200,D64,bf16,mask=bool:Bx1xLxS,bias=bf16:1xHxLxS,causal=bottom_right,sinks",
        "B3,H2,L100,S190,D16,bf16,lengths=190/7/0,mask=bool:1x1xLxS,causal=bottom_right",
        "B3,H2,L100,S190,D16,bf16,lengths=190/7/0,bias=fp32:1x1xLxS,sinks",
        "H2,D16,bf16,causal,packed=100/65/0/1/30,mask=bool:1xHxLxS",
        "H2,D16,bf16,packed=100/65/0/1/30,bias=fp16:1xHx1xS",
        "B2,H2,L90,S100,D16,fp16,alibi,softcap=5,bias=bf16:Bx1xLxS,mask=bool:Bx1x1xS,window=40",
        "B2,H2,L90,D16,fp16,alibi,mask=bool:1x1xLxS,causal=bottom_right,lengths=90/50",
        "B1,H2,L150,D16,bf16,scale=-0.2,mask=bool:1x1xLxS,bias=fp32:1x1xLx1",
        "B1,H2,L150,D16,bf16,scale=0,bias=fp32:1x1xLxS",
        "B1,H2,L1,S65,D16,bf16,bias=bf16:1x1xLxS",
        "B1,H2,L65,S1,D16,bf16,bias=bf16:1x1xLxS,mask=bool:1x1xLxS",
        "B1,H2,L1,S300,D256,bf16,mask=bool:1x1x1xS",
        "B3,H4/2,L260,S136,D16,bf16,bias=bf16:1xHxLxS",
        "B3,H2/1,L140,S136,D16,bf16,bias=bf16:1xHxLxS,mask=bool:1xHxLxS,causal=bottom_right,softcap=5",
    ],
)
def test_with_every_other_option(text: str) -> None:
    inputs = make_inputs(Workload.parse(text), CPU)
    for number in (0, 1):
        agrees(inputs, CONFIGURATIONS[(len(text) + number) % 4], number)


@pytest.mark.parametrize("value", [-torch.inf, "least", -1e30, 3e38])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_bias_as_large_as_numbers_go(dtype: str, value: float | str) -> None:
    """-inf hides as a mask does; a row of the least finite number sees every key alike, as the reference says."""
    inputs = make_inputs(Workload.parse(f"B1,H2,L70,S130,D16,bf16,bias={dtype}:1x1xLxS,sinks"), CPU)
    assert inputs.bias is not None and inputs.sinks is not None
    number = torch.finfo(inputs.bias.dtype).min if isinstance(value, str) else value
    inputs.bias[..., :5, :] = number
    inputs.bias[..., 5:9, :129] = number
    inputs.bias[..., 9:12, 64:] = number
    inputs.sinks[0] = -torch.inf
    truth = compute_attention(inputs, backward=False)
    out, lse = run_plan(Plan(inputs.workload, CONFIGURATIONS[0]), inputs, blocks=1, seed=0)
    # Two scores that a double tells apart and a float does not weigh the same: the scores' own rounding.
    rounded = make_rounded(inputs)
    assert torch.allclose(out.double(), rounded if abs(number) > 1e4 and number != -torch.inf else truth.out, atol=1e-5)
    seen = truth.lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert torch.allclose(lse.double()[seen], truth.lse[seen], rtol=1e-6, atol=1e-5)


def make_rounded(inputs: Inputs) -> torch.Tensor:
    """Attention in float64 whose biased scores were rounded to float32 once."""
    scores = inputs.q.double() @ inputs.k.double().transpose(-1, -2) * inputs.workload.effective_scale
    scores = (scores.float() + inputs.bias).double()  # type: ignore[operator]
    sinks = inputs.sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)  # type: ignore[union-attr]
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].nan_to_num()
    return weights @ inputs.v.double()


@pytest.mark.parametrize("step", ["fence", "barrier"])
def test_a_bias_is_not_overwritten_before_it_is_read(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA writes a slot again only after each thread's fence, and after all four warps of the group; else it shows."""
    inputs = make_inputs(Workload.parse("B1,H1,L60,S200,D16,bf16,bias=fp32:1x1xLxS"), CPU)
    agrees(inputs, CONFIGURATIONS[2])
    monkeypatch.setattr(TOUCHED, step, lambda: None)
    with pytest.raises(AssertionError, match="TMA is not ordered after a group"):
        agrees(inputs, CONFIGURATIONS[2])


def test_rows_that_a_mask_empties() -> None:
    inputs = make_inputs(Workload.parse("B1,H2,L200,S300,D16,bf16,mask=bool:1x1xLxS"), CPU)
    inputs.mask[..., 3:150, :] = False  # type: ignore[index]
    for configuration in CONFIGURATIONS:
        agrees(inputs, configuration)
    inputs.mask[:] = False  # type: ignore[index]
    agrees(inputs, CONFIGURATIONS[0])


# --- a queue of tiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("B2,H3,L200,S70,D16,bf16,mask=bool:BxHxLxS", 1),
        ("B2,H3,L200,S136,D16,bf16,mask=bool:BxHxLxS", 3),
        ("B2,H3,L200,S70,D16,bf16,mask=bool:BxHxLxS", 100),
        ("B1,H4/2,L330,S200,D16,bf16,mask=bool:1xHxLxS,causal,sinks", 3),
        ("B1,H4/2,L330,S200,D16,bf16,mask=bool:1xHxLxS,causal,sinks", 7),
        ("B2,H2,L270,S100,D16,bf16,mask=bool:Bx1x1xS,lengths=100/3", 1),
        ("H2,D16,bf16,packed=100/65/0/1/130,mask=bool:1x1xLxS", 3),
        ("B3,H2/1,L140,S136,D16,bf16,bias=bf16:1xHxLxS,mask=bool:1xHxLxS,softcap=5", 2),
        ("B2,H3,L200,S1,D16,bf16,mask=bool:1x1xLxS", 5),
        ("B2,H8,L100,S1,D16,bf16,mask=bool:1x1xLxS", 2),
    ],
)
def test_blocks_that_share_a_queue_compute_each_tile(text: str, blocks: int) -> None:
    """Blocks run at once; more tiles than blocks, and fewer; tiles of no key and of all keys."""
    inputs = make_inputs(Workload.parse(text), CPU)
    assert inputs.mask is not None
    inputs.mask[..., inputs.mask.shape[2] // 2 :, :] = False
    inputs.mask[:1, :1] = True
    agrees(inputs, QUEUED[(len(text) + blocks) % 3], blocks, blocks)


def tell_in_one_slot(slots: Any, turn: int, words: Any) -> None:
    slots.index(0).store(words)


def hear_late_in_one_slot(slots: Any, turn: int, PLACE: int) -> Any:
    import time

    time.sleep(2e-3)
    return gl.sum(slots.index(0).slice(PLACE, 1).load(None), 0)  # type: ignore[name-defined]  # noqa: F821  the kernel's


def test_what_the_loading_warp_tells_needs_its_two_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a whole tile ahead of a group that has not read yet: with one slot the group reads what comes later."""
    inputs = make_inputs(Workload.parse("B2,H4,L128,S64,D16,bf16,mask=bool:BxHxLxS"), CPU)
    agrees(inputs, QUEUED[0], blocks=1)
    monkeypatch.setattr(gluon_stand_in, "TIMEOUT_S", 0.3)
    monkeypatch.setitem(kernels._DEVICE_FUNCTIONS, "_tell", tell_in_one_slot)
    monkeypatch.setitem(kernels._DEVICE_FUNCTIONS, "_heard", hear_late_in_one_slot)
    with pytest.raises((AssertionError, gluon_stand_in.Deadlock)):
        agrees(inputs, QUEUED[0], blocks=1)


@pytest.mark.parametrize(
    ("option", "values", "multiprocessors", "queued"),
    [
        ("mask=bool:1x1xLxS", {}, 3, True), ("mask=bool:1x1xLxS,causal", {}, 3, True),
        ("mask=bool:1x1xLxS,bias=bf16:1xHxLxS", {}, 3, True), ("bias=bf16:1xHxLxS", {}, 3, False),
        ("causal", {}, 3, False), ("mask=bool:1x1xLxS", {}, 4, False),
        ("mask=bool:1x1xLxS", {"persistent": False}, 3, False), ("mask=bool:1x1xLxS", {"queued": False}, 3, False),
    ],
)  # fmt: skip
def test_when_there_is_a_queue(option: str, values: dict[str, Any], multiprocessors: int, queued: bool) -> None:
    """Under a bool mask, where there are more tiles than blocks; and then no table."""
    workload, configuration = Workload.parse(f"B1,H2,L200,D64,bf16,{option}"), Configuration(queued=True)
    plan = Plan(workload, replace(configuration, **values), multiprocessors)
    assert plan.tiles == 4 and plan.queued == queued == ("queue" not in plan.constants())
    assert plan.scheduled == (option == "causal") and plan.pointers["order"] == plan.scheduled


def test_a_queue_lies_in_the_calls_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One address more for the kernel that lists tiles and for attention; three launches a call, no memset."""
    cuda, workload = stand_in(monkeypatch), Workload.parse("B2,H80,L70,S128,D64,bf16,mask=bool:Bx1xLxS")
    alone = prepare_hopper(cuda, monkeypatch, workload, Configuration(slots=8, persistent=False))
    prepared = prepare_hopper(cuda, monkeypatch, workload, Configuration(slots=8, q_slots=2, queued=True))
    assert prepared.plan.queued and prepared.workspace_bytes == alone.workspace_bytes + 4
    inputs, cuda.same = make_inputs(workload, CPU), {}
    for _ in range(2):
        cuda.launched.clear()
        prepared.forward(inputs)
        words, listing, attention = [_addresses(launch) for launch in cuda.launched]
        lists, queue = sorted(listing & attention)
        assert lists not in words and queue not in words
        assert queue - lists == 4 * (prepared.masks.offsets[2] - prepared.masks.offsets[0])


def test_any_byte_but_0_is_true() -> None:
    inputs = make_inputs(Workload.parse("B1,H1,L70,S140,D16,bf16,mask=bool:1x1xLxS"), CPU)
    values = torch.randint(0, 256, (1, 1, 70, 140), dtype=torch.uint8) * (torch.rand(1, 1, 70, 140) < 0.6)
    odd = replace(inputs, mask=values.view(torch.bool))
    even = replace(inputs, mask=values != 0)
    plan = Plan(inputs.workload, CONFIGURATIONS[0])
    for found, expected in zip(run_plan(plan, odd, 1, 0), run_plan(plan, even, 1, 0), strict=True):
        assert torch.equal(found, expected)


SPARSE = [
    "B1,H1,L200,S520,D16,bf16,mask=bool:1x1xLxS",
    "B2,H2,L200,S520,D16,bf16,mask=bool:BxHxLxS,causal=bottom_right",
    "B2,H2,L130,S200,D16,bf16,mask=bool:1xHxLxS,lengths=200/70,window=90",
    "H1,D16,bf16,packed=100/65/0/1/130,mask=bool:1x1xLxS",
]  # fmt: skip


@pytest.mark.parametrize("text", SPARSE)
@pytest.mark.parametrize("configuration", CONFIGURATIONS[:2])
def test_lists_hold_what_is_not_empty_and_words_say_who_is_seen(text: str, configuration: Configuration) -> None:
    w = Workload.parse(text)
    inputs = make_inputs(w, CPU)
    assert inputs.mask is not None
    inputs.mask[..., :, 64:256] = False  # whole tiles of both sizes
    inputs.mask[..., :192, 384:512] = True
    plan = Plan(w, configuration)
    masks = MaskPlan(plan)
    pointers = {} if inputs.lengths is None else {"lengths": in_memory(inputs.lengths)}
    if w.packed is not None:
        plain = w.replace(causal=None, window=None)
        bounds = torch.tensor([plain.row_interval(0, i) for i in range(w.L)], dtype=torch.int32)
        pointers |= {"starts": in_memory(bounds[:, 0].clone()), "ends": in_memory(bounds[:, 1].clone())}
    found = run_masks(masks, inputs.mask, pointers)
    keys, rows = configuration.keys, configuration.rows
    dense = inputs.visible().expand(w.B, w.H, w.L, w.S)[: masks.batch, : masks.heads]
    padded = torch.zeros(masks.batch, masks.heads, plan.row_tiles * rows, masks.key_tiles * keys, dtype=torch.bool)
    padded[:, :, : w.L, : w.S] = dense
    words = torch.from_numpy(found["words"].memory)
    bits = words.view(masks.batch, masks.heads, plan.row_tiles * configuration.groups, masks.key_tiles, 64, 4)
    bit = torch.arange(keys // 4)
    spread = (bits[..., None] >> bit & 1).bool().unflatten(-1, (keys // 8, 2))  # (..., 64, 4 lanes, i, e)
    decoded = spread.permute(0, 1, 2, 4, 3, 6, 5, 7).reshape(padded.shape)
    assert torch.equal(decoded, padded)
    tiles = padded.unflatten(2, (plan.row_tiles, rows)).unflatten(4, (masks.key_tiles, keys)).permute(0, 1, 2, 4, 3, 5)
    lists = torch.from_numpy(found["lists"].memory).view(masks.batch, masks.heads, plan.row_tiles, -1)
    for b, h, tile in itertools.product(range(masks.batch), range(masks.heads), range(plan.row_tiles)):
        count, *entries = lists[b, h, tile].tolist()
        real = min(rows, w.L - tile * rows)
        kinds = tiles[b, h, tile]
        expected = [2 * key + (not kinds[key, :real].all()) for key in range(masks.key_tiles) if kinds[key].any()]
        assert entries[:count] == (expected or [1])


def test_a_bias_is_read_in_place_where_it_can_be() -> None:
    plan = Plan(Workload.parse("B2,H3,L70,S128,D16,bf16,bias=bf16:BxHxLxS"), CONFIGURATIONS[0])
    whole = torch.randn(2, 3, 70, 136).bfloat16()
    for bias, flags, copied in (
        (whole[..., :128], [1, 1], False),
        (whole[:1, :1, :, :128].expand(2, 3, 70, 128), [0, 0], False),
        (whole[:, :1, :, 8:].expand(2, 3, 70, 128), [1, 0], False),
        (whole[..., 1:129], [1, 1], True),
        (whole[:, :, :1, :128].expand(2, 3, 70, 128), [1, 1], True),
        (whole.mT.contiguous().mT[..., :128], [1, 1], True),
    ):
        read, told = bias_arguments(bias, plan)
        assert driver.readable(read) and [value.value for value in told] == flags
        assert (read.data_ptr() != bias.data_ptr()) == copied
        assert torch.equal(read.expand(2, 3, 70, 128), bias)


@pytest.mark.parametrize("number", range(6))
def test_strided_and_expanded_options(number: int) -> None:
    text = "B2,H2,L70,S130,D16,bf16," + ("mask=bool:BxHxLxS" if number % 2 else "bias=bf16:BxHxLxS")
    inputs = make_inputs(Workload.parse(text), CPU, number)
    given = inputs.mask if number % 2 else inputs.bias
    assert given is not None
    turned = given.transpose(0, 3).contiguous().transpose(0, 3)
    made = (given[:1, :1].expand_as(given), turned, given[:, :, :1].expand_as(given))
    changed = replace(inputs, **{"mask" if number % 2 else "bias": made[number // 2]})
    agrees(changed, CONFIGURATIONS[number % 4], number)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("B1,H2,L64,D64,bf16,bias=fp64:1xHxLxS", "takes a bias in bf16, fp16 or fp32, not fp64"),
        ("B100,H100,L1000000,S64000000,D64,bf16,mask=bool:1x1xLxS",
         "counts tiles in 32 bits: it takes less than 2**30, not 78130000000000"),
    ],
)  # fmt: skip
def test_reasons(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscope.implementation.missing_package", lambda requirement: None)
    assert find("hopper").reasons_unsupported(Workload.parse(text), H200) == [reason]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ("mask=bool:1x1xLxS", "mask"), ("mask=bool:1x1xLxS,causal", "mask"), ("bias=bf16:1x1xLxS", "bias16"),
        ("bias=fp16:1x1xLxS,causal", "mixed"), ("bias=fp32:1x1xLxS,mask=bool:1x1xLxS", "mixed"),
        ("bias=fp32:1x1xLxS", "bias32"), ("mask=bool:1x1xLxS,alibi", "mixed"), ("alibi,causal", "causal"),
    ],
)  # fmt: skip
def test_classes(options: str, word: str) -> None:
    workload = Workload.parse(f"B8,H32,L2000,D80,fp16,{options}")
    assert tuning_class(workload) == f"D128,{word},fp16,middle"
    assert Hopper().chosen(workload, H200).gluon in [one.gluon for one in Hopper().candidates(workload, H200)]


# --- what a call launches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", ["", ",bias=bf16:BxHxLxS", ",bias=fp32:1xHx1xS", ",bias=bf16:BxHxLx1"])
@pytest.mark.parametrize("mask", ["", ",mask=bool:Bx1xLxS"])
def test_a_call_launches_what_stands_in_front_then_attention(
    mask: str, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not mask + bias:
        pytest.skip("neither")
    cuda, workload = (
        stand_in(monkeypatch),
        Workload.parse(f"B2,H4/2,L70,S128,D64,bf16,lengths=128/70,sinks{mask}{bias}"),
    )
    prepared, inputs = prepare("hopper", cuda, monkeypatch, workload), make_inputs(workload, CPU)
    cuda.same = {}
    for turn in range(3):
        cuda.launched.clear()
        output, described = prepared.forward(inputs), cuda.described
        assert cuda.made == (turn + 1) * (3 if mask else 2)
        assert [launch.threads for launch in cuda.launched] == ([128, 128] if mask else []) + [384]
        *front, attention = [_addresses(launch) for launch in cuda.launched]
        wanted = [inputs.q, inputs.k, inputs.v, output.out, output.lse, inputs.sinks, inputs.lengths]
        assert {t.data_ptr() for t in [*wanted, *([inputs.bias] if bias else [])]} <= attention
        if mask:
            words, lists = front
            assert inputs.mask.data_ptr() in words and len(words & attention) >= 2 and len(words & lists) == 1
        if turn:
            assert described == cuda.described


def test_a_bias_that_is_copied_is_copied_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, workload = stand_in(monkeypatch), Workload.parse("B1,H2,L70,S128,D64,bf16,bias=bf16:BxHxLxS")
    prepared, inputs = prepare("hopper", cuda, monkeypatch, workload), make_inputs(workload, CPU)
    inputs.bias = torch.randn(1, 2, 70, 129).bfloat16()[..., 1:]
    for _ in range(3):
        prepared.forward(inputs)
        assert inputs.bias.data_ptr() not in _addresses(cuda.launched[-1])


def _addresses(launch: Any) -> set[int]:
    """What a launch passes of the size of an address."""
    values = [v.address if isinstance(v, TensorMap) else v.value for v in launch.values]
    return {value for value in values if value and value > 2**32}


# --- what the compiler makes of it ------------------------------------------------------------------------------------

ORDER = r"""
import json, re, sys
from attnscope.implementations.hopper import Plan, configurations
from attnscope.workload import Workload

words = r"\b(ld\.shared(?!\.b8\b)|ldmatrix|fence\.proxy\.async|bar\.sync|mbarrier\.arrive)"
for text, values in json.load(sys.stdin):
    plan = Plan(Workload.parse(text), configurations.Configuration.from_dict(values))
    print(json.dumps(re.findall(words, plan.compile().ptx)), flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", VERSIONS)
def test_between_a_biass_last_read_and_its_release_stand_a_fence_and_a_barrier(version: str, tmp_path: Any) -> None:
    texts = ["B1,H2,L300,S304,D256,bf16,bias=fp32:1x1xLxS", "B1,H2,L2000,D64,bf16,bias=bf16:1xHxLxS"]
    jobs = [(text, Hopper().chosen(Workload.parse(text), H200).gluon) for text in texts]
    for (text, one), words in zip(jobs, compile_apart(version, jobs, tmp_path, ORDER), strict=True):
        reads = [word.startswith("ld") for word in words] + [False]
        last = [i for i in range(len(words)) if reads[i] and not reads[i + 1]]
        assert len(last) == 2 * one.groups, text  # the first tile's, and the other tiles'
        for i in last:
            between = words[i + 1 : words.index("mbarrier.arrive", i)]
            assert between[0] == "fence.proxy.async" and set(between[1:]) == {"bar.sync"}, text
