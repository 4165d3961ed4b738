"""hopper_cuda where tiles without a mask keep the maximum of the keys before (fixed_max), without a GPU.

Keys are walked over from last to first, so what makes an early maximum too low is a key near the beginning.
"""

from __future__ import annotations

import dataclasses

import pytest

from attnscope.implementations.hopper_cuda import configurations
from attnscope.implementations.hopper_cuda.configurations import Configuration
from attnscope.tables import Table, read_table, table_text
from attnscope.workload import Workload

torch = pytest.importorskip("torch")

from attnscope.inputs import Inputs  # noqa: E402
from rising_scores import RISES, all_far_below, one_far_above, rising  # noqa: E402
from test_hopper_cuda import HOPPER, SMALL, change_source, check, check_candidates, emulated  # noqa: E402, F401

FIXED = dataclasses.replace(SMALL, fixed_max=True)
TINY = Configuration(2, 16, 3, query_slots=2, fixed_max=True)  # tiles of keys are many
FEW = "B1,H3,L130,S200,D16,{}"
NO_KEY_IN_THE_FIRST_TILE = "B1,H2,L193,S192,D16,{},causal=bottom_right"  # row 64 sees keys 0 to 63


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sums_that_leave_the_range_are_computed_again(emulated, dtype):  # noqa: F811
    """Of three heads on two blocks only some are in doubt, and only in some groups."""

    def one_head(inputs: Inputs) -> None:
        rising(inputs, RISES[dtype], slice(1), rows=64)

    check(emulated, FEW.format(dtype), TINY, kind="plain", change=one_head)


CASES = [
    ("B2,H2/1,L150,S410,D64,bf16,causal=bottom_right,layout=blhd", FIXED),
    ("B1,H3,L330,S66,D64,bf16,causal=bottom_right", FIXED),  # many rows see nothing
    ("B1,H2,L129,S333,D64,fp16", FIXED),
    ("B1,H2,L300,D64,fp16,causal,window=150", FIXED),
    ("B1,H2,L300,D64,bf16,causal,window=150", dataclasses.replace(FIXED, keys=32, stages=3)),
    ("B1,H2,L300,S450,D16,bf16,window=170", TINY),
    ("B1,H2,L300,D64,bf16,causal", Configuration(3, 64, 2, query_slots=2, fixed_max=True)),
    ("B1,H3,L256,D64,bf16,causal", Configuration(4, 64, 10, False, query_slots=2, alternate=True, fixed_max=True)),
    ("B1,H1,L130,S500,D128,bf16", Configuration(2, 176, 2, False, slack=8, fixed_max=True)),
    ("B2,H1,L130,S300,D192,Dv128,fp16,causal", Configuration(3, 80, 3, slack=8, schedule="table", fixed_max=True)),
    ("B1,H1,L130,S300,D256,bf16", Configuration(2, 80, 2, False, slack=8, fixed_max=True)),
    ("B1,H1,L600,S2000,D16,bf16", Configuration(2, 16, 4, False, split=True, fixed_max=True)),
    ("B1,H2,L70,S900,D64,fp16", Configuration(1, 64, 3, split=True, fixed_max=True)),
    ("B1,H3,L300,D16,bf16,causal", dataclasses.replace(TINY, persistent=False)),
    (NO_KEY_IN_THE_FIRST_TILE.format("bf16"), TINY),
]


@pytest.mark.long
@pytest.mark.parametrize(("text", "configuration"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_every_variant_with_fixed_maxima_is_right_on_the_emulator(emulated, text, configuration):  # noqa: F811
    workload = Workload.parse(text)
    assert configuration.keeps_maxima(workload)
    check(emulated, text, configuration)
    check(emulated, text, configuration, kind="large")
    for rows in (64, None):
        check(
            emulated, text, configuration, kind="plain",
            change=lambda inputs, rows=rows: rising(inputs, RISES[workload.dtype], slice(1), rows=rows),
        )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_row_whose_first_keys_are_far_below_what_stands_for_them_is_right(emulated, dtype):  # noqa: F811
    """Without a key in the tile with a mask a row has no maximum: 0 stands for it, and all its weights are 0."""
    check(emulated, NO_KEY_IN_THE_FIRST_TILE.format(dtype), TINY, kind="plain", change=all_far_below)
    check(emulated, FEW.format(dtype), TINY, kind="plain", change=one_far_above)


@pytest.mark.long
def test_numbers_that_are_none_stay_none_and_others_are_right(emulated):  # noqa: F811
    def spoil(inputs: Inputs) -> None:
        inputs.v[:, 0, 5, 3] = float("inf")

    with pytest.raises(AssertionError, match="off by"):  # the reference says inf, too
        check(emulated, "B1,H3,L130,S200,D16,bf16", TINY, kind="plain", change=spoil)
    check(emulated, "B1,H3,L130,S200,D16,bf16", TINY, kind="plain", change=lambda inputs: inputs.v.mul_(1e30))


@pytest.mark.long
@pytest.mark.parametrize(
    ("stands", "instead"),
    [
        ("barriers->doubt(turns.turn - 1);", ";"),
        ("barriers->doubt(turns.turn - 1);", "barriers->doubt(turns.turn);"),
        ("    online = alike(any_of<128>(FIRST_REVIEW + index, !fine));\n", ""),
        ("        if (alike(barriers->doubtful(turns.turn - 1))) {", "        {"),
        ("          if (barriers->doubtful(turns.turn - 1)) copies", "          copies"),
        ("    wait_for(&barriers->all_computed, 0);\n    if (alike", "    if (alike"),
        ("      wait_for(&barriers->all_computed, 0);\n      if (barriers", "      if (barriers"),
        ("make_barrier(&barriers->all_computed, GROUPS);", "make_barrier(&barriers->all_computed, 1);"),
        ("    bool fine = zero == 0.0f;\n", "    bool fine = true;\n"),
        ("total[r] >= least_sum(T16(), rows.top[r], shape.S)", "total[r] >= 0.0f"),
    ],
)
def test_the_emulator_sees_what_fixed_maxima_may_lack(emulated, tmp_path, monkeypatch, stands, instead):  # noqa: F811
    change_source(tmp_path, monkeypatch, stands, instead)
    with pytest.raises(AssertionError):
        for dtype in ("bf16", "fp16"):
            for heads in (slice(1), slice(2, 3)):  # what is done first, and what is done last
                check(
                    emulated, FEW.format(dtype), TINY, kind="plain",
                    change=lambda inputs, heads=heads, dtype=dtype: rising(inputs, RISES[dtype], heads),
                )  # fmt: skip
        check(emulated, NO_KEY_IN_THE_FIRST_TILE.format("bf16"), TINY, kind="plain", change=all_far_below)
        check(emulated, FEW.format("bf16"), TINY, kind="plain", change=lambda inputs: inputs.v.mul_(1e30))


def test_maxima_are_kept_only_where_a_block_alone_decides_what_is_done_again():
    workload = Workload.parse("B9,H16,L512,D64,bf16,causal")
    assert FIXED.keeps_maxima(workload) and FIXED.defines(workload)["FIXED_MAX"] == 1
    for other in (dataclasses.replace(FIXED, cluster=2), dataclasses.replace(FIXED, early=True)):
        assert other.defines(workload) == dataclasses.replace(other, fixed_max=False).defines(workload)
    assert FIXED.shared_bytes(64, 64) > dataclasses.replace(FIXED, fixed_max=False).shared_bytes(64, 64)


def test_a_table_holds_it():
    text = table_text(Table("hopper_cuda", "card", {"a": FIXED}))
    assert read_table(text, "x", "hopper_cuda", Configuration.from_dict).classes == {"a": FIXED}


def test_the_usual_kernel_keeps_maxima_of_long_rows_at_64_and_128():
    for text in ("B8,H32,L2048,D64,bf16", "B8,H32,L2048,D64,bf16,causal", "B8,H16,L2048,D128,fp16"):
        assert configurations.usual(Workload.parse(text)).fixed_max, text


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mask", ["", ",causal", ",causal,window=700"])
@pytest.mark.parametrize("head_dim", ["64", "128", "192", "192,Dv128", "256"])
def test_no_candidate_with_fixed_maxima_spills_or_serialises(head_dim, mask, dtype):
    for sizes in ("B9,H32,L2048", "B32,H16,L512", "B1,H4,L700,S9000"):
        workload = Workload.parse(f"{sizes},D{head_dim},{dtype}{mask}")
        if any(one.fixed_max for one in configurations.candidates(workload, HOPPER)):
            check_candidates(workload, lambda one: one.fixed_max)
