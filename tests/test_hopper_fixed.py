"""hopper's Gluon kernel where a row's maximum is that of its first tile of keys (fixed_max), without a GPU.

Under a bool mask tiles of keys are walked over from first to last, else from last to first: :func:`as_walked` turns
what makes an early maximum too low.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gluon_stand_in
from attnscope.device import find_device
from attnscope.implementations.hopper import Plan, configurations, kernels
from attnscope.implementations.hopper.configurations import Configuration
from attnscope.implementations.hopper.entries import Entry
from attnscope.inputs import Inputs, make_inputs
from attnscope.reference import compute_attention
from attnscope.tables import Table, read_table, table_text
from attnscope.workload import Workload
from gluon_stand_in import Tile, device_function, run_plan
from rising_scores import RISES, all_far_below, one_far_above, rising
from test_hopper import VERSIONS, assert_clean, compile_apart

CPU = find_device("cpu")
TWO = Configuration(keys=64, slots=5, q_slots=2, bias_slots=2, fixed_max=True)
THREE = Configuration(keys=64, slots=4, groups=3, pingpong=False, lazy_sum=False, persistent=False, fixed_max=True)
AHEAD = Configuration(keys=64, slots=3, overlap=False, fixed_max=True)
OPTIONS = ("mask=bool:1x1xLxS", "bias=bf16:1xHxLxS", "bias=fp32:1x1xLxS")
FEW = "B1,H3,L130,S192,D16,bf16,{}"
Change = Callable[[Inputs], None]


def as_walked(change: Change) -> Change:
    """``change``, of scores that are greater at the first keys, turned for masks, whose tiles are walked forwards."""

    def changed(inputs: Inputs) -> None:
        change(inputs)
        if inputs.mask is not None:
            inputs.k[:] = inputs.k.flip(2)

    return changed


def rise(heads: slice = slice(None), rows: int | None = None, by: float = RISES["bf16"]) -> Change:
    return as_walked(lambda inputs: rising(inputs, by, heads, rows))


def check(text: str, configuration: Configuration, change: Change | None = None, blocks: int = 2) -> None:
    """The kernel computes what the reference does, but for how float32 rounds products of some thousands."""
    inputs = make_inputs(Workload.parse(text), CPU, 3)
    if change is not None:
        change(inputs)
    plan, truth = Plan(inputs.workload, configuration), compute_attention(inputs, backward=False)
    assert plan.constants()["FIXED"]
    out, lse = run_plan(plan, inputs, blocks=blocks, seed=len(text))
    seen, size = truth.lse.isfinite(), max(1.0, float(inputs.v.abs().max()) / 4)
    assert torch.equal(lse.isfinite(), seen) and (lse[~seen] == -torch.inf).all() and not out[~seen].any()
    assert torch.allclose(out.double() / size, truth.out / size, atol=3e-4, rtol=0)
    assert torch.allclose(lse[seen].double(), truth.lse[seen], atol=3e-4, rtol=1e-6)


def tiles_computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Each (head, tile) that a loading warp loads from now on, in order."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(kernels, "loaded_tiles", found, raising=False)
    stands = "    b = head // H\n"
    change_source(monkeypatch, "_load_rows", stands, stands + "    loaded_tiles.append((head, tile))\n")
    return found


def change_source(monkeypatch: pytest.MonkeyPatch, name: str, stands: str, instead: str) -> None:
    """One of the kernel's functions, with other text in the place of what stands there once."""
    source = inspect.getsource(kernels._DEVICE_FUNCTIONS[name])
    assert source.count(stands) == 1, (name, stands)
    source = "from __future__ import annotations\n" + source.replace("@_device\n", "").replace(stands, instead)
    made: dict[str, Any] = {}
    exec(source, made)
    monkeypatch.setitem(kernels._DEVICE_FUNCTIONS, name, made[name])


@pytest.mark.parametrize("option", OPTIONS)
def test_tiles_whose_sums_leave_the_range_are_computed_again(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three heads on two blocks only one is in doubt, and there only in one group."""
    loaded = tiles_computed(monkeypatch)
    check(FEW.format(option), TWO, rise(slice(1), rows=64))
    assert {one for one in loaded if loaded.count(one) == 2} == {(0, 0)} and len(loaded) == 7


NO_KEY_AT_FIRST = "B1,H2,L140,S200,D16,bf16,mask=bool:1x1xLxS"


def hide_first_keys(inputs: Inputs) -> None:
    """Some rows see no key of the first tile, some none at all."""
    inputs.mask[..., 3:70, :64] = False  # type: ignore[index]
    inputs.mask[..., 69:75, :] = False  # type: ignore[index]


def test_what_is_fine_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also rows without a key in the first tile of several; one that sees no key at all cannot be told from doubt."""
    loaded = tiles_computed(monkeypatch)
    for option in OPTIONS:
        check(FEW.format(option), TWO)
    check(NO_KEY_AT_FIRST, TWO, lambda inputs: inputs.mask[..., 3:70, :64].fill_(False))  # type: ignore[index]
    assert len(loaded) == 3 * 6 + 4
    loaded.clear()
    check(NO_KEY_AT_FIRST, TWO, hide_first_keys)
    assert len(loaded) == 6
    loaded.clear()
    check("B1,H2,L140,S60,D16,bf16,mask=bool:1x1xLxS", TWO, lambda inputs: inputs.mask[..., 3:, :].fill_(False))  # type: ignore[index]
    assert len(loaded) == 4  # one tile of keys: online softmax


def test_a_sink_far_below_is_all_that_a_row_without_keys_has() -> None:
    def far_below(inputs: Inputs) -> None:
        inputs.mask[..., 3:70, :] = False  # type: ignore[index]
        inputs.sinks[:] = -200  # type: ignore[index]

    for keys in (60, 200):
        check(f"B1,H2,L140,S{keys},D16,bf16,mask=bool:1x1xLxS,sinks", TWO, far_below)


@pytest.mark.parametrize(
    ("half", "total", "acc", "doubt", "top"),
    [
        (True, 3.0, 1.0, 1, 0.0), (True, 5.0, 1.0, 0, 0.0), (False, 3.0, 1.0, 0, 0.0),  # 0 may have been put in
        *((*case, 2.0) for case in (
            (False, 1.0, 1.0, 0), (False, 1e-17, 1.0, 0), (False, 1e-19, 1.0, 1), (False, 1e17, 1.0, 0),
            (False, 1e19, 1.0, 1), (False, float("nan"), 1.0, 1), (False, 1.0, float("inf"), 1),
            (False, 1.0, float("nan"), 1), (False, 1.0, 3e38, 0), (True, 0.6, 1.0, 0), (True, 0.4, 1.0, 1),
        )),
    ],
)  # fmt: skip
def test_what_is_in_doubt(half: bool, total: float, acc: float, doubt: int, top: float) -> None:
    """A row's sum of weights of 32,768 keys, and its sums of values, of which one is looked at beside ordinary ones."""
    import numpy as np

    totals, sums, tops = np.ones(4, np.float32), np.ones((4, 8), np.float32), np.full(4, 2.0, np.float32)
    totals[2], sums[2, 5], tops[2] = total, acc, top
    with np.errstate(invalid="ignore"):
        found = device_function("_in_doubt")(Tile(sums, "o"), Tile(tops, "rows"), Tile(totals, "rows"), 32768, half)
    assert found.array.tolist() == [0, 0, doubt, 0]


def test_a_logarithm_of_what_is_no_number_is_none() -> None:
    import numpy as np

    totals = np.array([1.0, 3.0, 1e18, 2**-40, np.inf, np.nan, -np.nan], np.float32)
    found = device_function("_log2")(Tile(totals, "rows")).array
    assert np.allclose(found[:5], np.log2(totals[:5]), rtol=1e-6) and np.isnan(found[5:]).all()


@pytest.mark.parametrize("base", [0.0, -3.0, -1e4, -3e6, -1e8, -1e9, 1e30, -3.3e38])
def test_weights_beside_a_large_bias_are_relative_to_one_number(base: float) -> None:
    """Online, two tiles whose maxima differ: as softmax in float64 of the same fp32 scores."""
    import numpy as np

    step = float(np.spacing(np.float32(abs(base)))) or 1.0
    first, second = (np.full((64, 16), base, np.float32) for _ in range(2))
    first[:, 3], second[:, 5] = np.float32(base - step), np.float32(base + step)
    top, total, parts = Tile(np.full(64, -np.inf, np.float32), "rows"), 0.0, []
    for scores in (first, second):
        p, top, total, shrink = device_function("_softmax")(
            Tile(scores, "s"), top, total, 1.0, True, True, False, False
        )
        parts = [part * shrink.array[:, None] for part in parts] + [p.array]
    truth = np.exp(np.concatenate([first, second], 1).astype(np.float64) - float(second.max()))
    truth /= truth.sum(1, keepdims=True)
    assert np.abs(np.concatenate(parts, 1) / total.array[:, None] - truth).max() < 1e-5


def test_turns_share_bits() -> None:
    """A block of more tiles than bits does too much again, never too little."""
    marked, mark, shared = device_function("_marked"), device_function("_mark"), gluon_stand_in.Shared
    import numpy as np

    doubts = shared(np.zeros((2, 64), np.int32), np.int32)
    mark(doubts, 1, 63, Tile(np.arange(64, dtype=np.int32) == 9, "rows").to(np.int32))
    marks = device_function("_all_marks")(doubts, 2, 4)
    assert [turn for turn in range(70) if marked(marks, turn)] == [31, 63]


CASES = [
    ("B2,H4/2,L65,S200,D64,bf16,mask=bool:Bx1xLxS,bias=bf16:1xHxLxS,causal=bottom_right,sinks", TWO),
    ("B3,H2,L100,S190,D16,bf16,lengths=190/7/0,mask=bool:1x1xLxS,causal=bottom_right", TWO),
    ("B3,H2,L100,S192,D16,bf16,bias=fp32:1x1xLxS,sinks", THREE),
    ("H2,D16,bf16,causal,packed=100/65/0/1/30,mask=bool:1xHxLxS", AHEAD),
    ("B2,H2,L90,S200,D16,bf16,alibi,softcap=5,bias=bf16:Bx1xLxS,mask=bool:Bx1x1xS,window=90", THREE),
    ("B1,H2,L150,D16,bf16,scale=-0.2,mask=bool:1x1xLxS,bias=fp32:1x1xLx1", AHEAD),
    ("B1,H3,L330,S192,D64,bf16,bias=bf16:1x1x1xS", replace(AHEAD, pingpong=False)),
    ("B1,H3,L330,S256,D128,bf16,bias=bf16:1xHxLxS", replace(TWO, keys=128, slots=4, bias_slots=1)),
    ("B1,H3,L130,S300,D256,bf16,mask=bool:1x1xLxS", replace(TWO, q_slots=1)),
    ("B1,H3,L300,D16,bf16,causal", TWO),  # tables of a persistent grid
    ("B1,H3,L300,S500,D16,bf16", replace(TWO, lazy_sum=False)),
    ("B1,H9,L500,S130,D16,bf16,mask=bool:1x1xLxS", TWO),  # 36 turns of one block
]


@pytest.mark.long
@pytest.mark.parametrize(("text", "configuration"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_every_option_is_right_whatever_scores_do(text: str, configuration: Configuration) -> None:
    for change in (None, rise(slice(1), 64), rise(by=RISES["fp16"]), as_walked(one_far_above), all_far_below):
        check(text, configuration, change, blocks=1 if "H9" in text else 2)
    if "scale=-" not in text and "softcap" not in text:
        check(text, configuration, rise())


@pytest.mark.long
@pytest.mark.parametrize("value", [-torch.inf, -3.3e38, -1e30, -1e9, -1e4, 3e38])
def test_a_bias_as_large_as_numbers_go(value: float) -> None:
    """A row of the least finite number sees every key alike; -inf hides as a mask does."""

    def large(inputs: Inputs) -> None:
        inputs.q.zero_()
        for rows, keys in ((slice(5), slice(None)), (slice(5, 9), slice(129)), (slice(9, 12), slice(64, None))):
            inputs.bias[..., rows, keys] = value  # type: ignore[index]

    check("B1,H2,L70,S192,D16,bf16,bias=fp32:1x1xLxS", TWO, large)


SLOW_MARK = "    own = doubts.index(W)\n"
LATE = SLOW_MARK + "    __import__('time').sleep(0.03 * W)\n"
GROUP_WAITS = "        mbarrier.arrive(computed.index(0), count=1)\n        mbarrier.wait(computed.index(0), 0)\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "stands", "instead"),
    [
        ("_attend", "gl.where((rows < L) & several, doubt, 0)", "doubt * 0"),
        ("_attend", "_mark(doubts, W, turn,", "_mark(doubts, W, turn + 1,"),
        ("_in_doubt", " & (zero == 0.0)", ""),
        ("_in_doubt", "(total >= least)", "(total >= 0.0)"),
        ("_mark", "own.load(doubt.type.layout) | ", ""),
        ("_all_marks", "    for w in gl.static_range(1, GROUPS):", "    for w in ():"),
        ("_consumer", "        _written()\n", ""),
        ("_consumer", GROUP_WAITS, GROUP_WAITS.splitlines(keepends=True)[0]),
        ("_consumer", "head, tile, 1, slot,", "head, tile, 0, slot,"),
        ("_consumer", "            if _marked(marks, turn):", "            if True:"),
        ("_consumer", "LAZY_SUM, False, BLOCK_DV", "LAZY_SUM, True, BLOCK_DV"),
        ("_producer", "            mbarrier.wait(computed.index(0), 0)\n", ""),
        ("_producer", "                if _marked(marks, turn):", "                if True:"),
        ("hopper_attention_forward", "mbarrier.init(computed.index(0), count=GROUPS)",
         "mbarrier.init(computed.index(0), count=1)"),
        ("_consumer", "        doubts.index(W).store(", "        ("),
    ],
)  # fmt: skip
def test_the_stand_in_sees_what_fixed_maxima_may_lack(
    name: str, stands: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon_stand_in, "TIMEOUT_S", 0.3)
    if name != "_mark":  # a group may be late with its mark
        change_source(monkeypatch, "_mark", SLOW_MARK, LATE)
    loaded = tiles_computed(monkeypatch)
    change_source(monkeypatch, name, stands, instead)
    with pytest.raises((AssertionError, gluon_stand_in.Deadlock)):
        mutant_is_right(loaded)


def second_group_rises(inputs: Inputs) -> None:
    """Rows 64 to 127: who does not wait for that group's mark does not learn of it."""
    rising(inputs, RISES["bf16"], slice(1), rows=128)
    inputs.q[:, :, :64, 0] = 0


def falls_far(inputs: Inputs) -> None:
    hide_first_keys(inputs)
    all_far_below(inputs)


def overflows(inputs: Inputs) -> None:
    """Sums of weights are fine, those of values are not."""
    rising(inputs, RISES["fp16"], slice(1))
    inputs.v.mul_(1e30)


def mutant_is_right(loaded: list[Any]) -> None:
    """What all of the kernel stands."""
    mask, bias = (FEW.format(option) for option in OPTIONS[:2])
    check(mask, TWO, rise(slice(1, 3)), blocks=1)
    assert len(loaded) == 10
    check(bias, TWO, second_group_rises, blocks=6)
    check(mask, TWO, lambda inputs: rising(inputs, -RISES["bf16"], slice(1), rows=64), blocks=1)
    check(NO_KEY_AT_FIRST, TWO, falls_far)
    check(bias, TWO, overflows)


def test_the_kernel_is_right_where_mutants_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    change_source(monkeypatch, "_mark", SLOW_MARK, LATE)
    mutant_is_right(tiles_computed(monkeypatch))


# --- what the compiler makes of it ------------------------------------------------------------------------------------


def fixed_jobs(dtypes: tuple[str, ...], sizes: tuple[str, ...]) -> list[tuple[str, Configuration]]:
    """Every candidate with fixed maxima."""
    texts = [
        f"B1,H2,{size},D{dim},{dtype},{option}"
        for size in sizes
        for dim in (64, 128, 256)
        for dtype in dtypes
        for option in ("mask=bool:1x1xLxS", f"bias={dtype}:1xHxLxS", "bias=fp32:1x1xLxS")
    ]
    return [(text, one) for text in texts for one in configurations.candidates(Workload.parse(text)) if one.fixed_max]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_no_candidate_with_fixed_maxima_spills(dtype: str, tmp_path: Path) -> None:
    jobs = fixed_jobs((dtype,), ("L2048",))
    assert {configurations.mask_of(Workload.parse(text)) for text, _ in jobs} == {"mask", "bias16", "bias32"}
    assert_clean(compile_apart("3.6.0", jobs, tmp_path))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", VERSIONS[1:])
def test_each_claimed_release_of_triton_compiles_fixed_maxima(version: str, tmp_path: Path) -> None:
    jobs = fixed_jobs(("bf16",), ("L2048",))
    found = compile_apart(version, jobs, tmp_path)
    assert [threads for *_, threads, _ in found] == [128 * (1 + one.groups) for _, one in jobs]


def test_candidates_with_fixed_maxima_are_never_first() -> None:
    """Until a card says that they are faster: what has no table takes the first."""
    jobs = fixed_jobs(("bf16",), ("L2048",))
    assert jobs
    for text, _ in jobs:
        assert not configurations.candidates(Workload.parse(text))[0].fixed_max


def test_blocks_that_share_a_queue_do_not_fix_maxima() -> None:
    """Which tiles a block had is not known afterwards. Where a queue is not made, they do."""
    workload, one = Workload.parse("B1,H2,L200,D64,bf16,mask=bool:1x1xLxS"), replace(TWO, queued=True)
    assert not Plan(workload, one, 3).constants()["FIXED"] and Plan(workload, one, 4).constants()["FIXED"]
    assert Plan(workload, TWO, 3).constants()["FIXED"] and not Plan(workload, replace(TWO, fixed_max=False)).fixed


def test_a_bias_beside_masked_tiles_does_not_fix_maxima() -> None:
    """It would spill."""
    for text, fixed in (
        ("S192,{}", True),
        ("S200,{}", False),
        ("S192,{},causal", False),
        ("S200,{},mask=bool:1x1xLxS", True),
    ):
        assert Plan(Workload.parse(f"B1,H2,L200,D64,bf16,{text.format('bias=bf16:1xHxLxS')}"), TWO).fixed == fixed


def test_a_table_holds_it() -> None:
    text = table_text(Table("hopper", "card", {"a": Entry(TWO)}))
    assert read_table(text, "x", "hopper", Entry.from_dict).classes == {"a": Entry(TWO)}
    older = re.sub(", fixed_max = true", "", text)
    assert older != text and read_table(older, "x", "hopper", Entry.from_dict).classes["a"].gluon == replace(
        TWO, fixed_max=False
    )
    assert "fixed_max" in str(TWO) and "fixed_max" not in str(replace(TWO, fixed_max=False))
