"""hopper_cuda with four groups a block, and with groups that change places every tile of rows, without a GPU."""

from __future__ import annotations

import dataclasses

import pytest

from attnscope.device import find_device
from attnscope.implementations import hopper_cuda
from attnscope.implementations.hopper_cuda import configurations
from attnscope.implementations.hopper_cuda.configurations import CHOICES, FEW, REGISTERS, Configuration
from attnscope.tables import Table, read_table, table_text
from attnscope.workload import Workload

torch = pytest.importorskip("torch")

from attnscope.inputs import make_inputs  # noqa: E402
from test_hopper_cuda import HOPPER, PAIR, change_source, check, check_candidates, emulated  # noqa: E402, F401

FOUR = Configuration(4, 64, 10, False, query_slots=2, alternate=True)
SMALL = dataclasses.replace(FOUR, keys=16, stages=3, schedule="table")  # tiles of keys are many, stages few
HEADS = "B1,H{},L256,D16,bf16,causal"  # of FOUR's tiles of rows, in which groups see one to four tiles of keys
MASKS = ("", ",causal", ",causal=bottom_right", ",window=40", ",causal,window=40")


def test_four_groups_are_right_on_the_emulator(emulated):  # noqa: F811
    for text in (
        "B1,H3,L300,S333,D16,bf16,causal=bottom_right,layout=blhd",  # three groups of the last tile have no rows
        "B1,H3,L130,S40,D16,bf16,causal=bottom_right",  # the first rows see nothing
    ):
        assert SMALL.alternates(Workload.parse(text))
        check(emulated, text, SMALL)


CASES = [
    ("B1,H3,L256,D64,bf16,causal", FOUR),
    ("B1,H3,L256,D64,fp16,causal", dataclasses.replace(FOUR, early=True)),
    ("B2,H2/1,L400,D16,bf16,causal", dataclasses.replace(SMALL, early=True)),
    ("B1,H3,L300,D16,fp16,causal", dataclasses.replace(SMALL, ping_pong=True)),
    ("B1,H3,L300,D16,bf16,causal", dataclasses.replace(SMALL, ping_pong=True, early=True)),
    ("B1,H3,L300,D16,bf16,causal", dataclasses.replace(SMALL, schedule="arithmetic", slack=8, query_slots=1)),
    ("B1,H3,L256,D16,bf16,causal", dataclasses.replace(SMALL, persistent=False)),
    ("B1,H3,L400,D64,bf16,causal", Configuration(3, 64, 3, False, query_slots=2, alternate=True)),
    ("B1,H3,L400,D64,bf16,causal", Configuration(2, 64, 3, schedule="table", early=True, alternate=True)),
    ("B1,H3,L300,D128,bf16,causal", Configuration(2, 64, 5, False, query_slots=2, alternate=True)),
    ("B1,H3,L600,D64,bf16,causal", dataclasses.replace(PAIR, ping_pong=False, alternate=True)),
    ("B2,H8/2,L300,D64,bf16,causal", dataclasses.replace(PAIR, alternate=True)),
    *((f"B2,H2,L300,S280,D16,bf16{mask}", SMALL) for mask in MASKS),
    ("B1,H1,L600,S2000,D16,bf16", Configuration(4, 16, 4, False, split=True)),
]


@pytest.mark.long
@pytest.mark.parametrize(("text", "configuration"), CASES)
def test_every_variant_with_four_groups_is_right_on_the_emulator(emulated, text, configuration):  # noqa: F811
    check(emulated, text, configuration, 2 * configuration.cluster)


@pytest.mark.long
def test_places_and_groups_change_no_bit(emulated):  # noqa: F811
    two = dataclasses.replace(SMALL, groups=2)
    first, *others = (
        check(emulated, "B1,H3,L300,D16,bf16,causal", one)
        for one in (SMALL, dataclasses.replace(SMALL, alternate=False), two, dataclasses.replace(two, alternate=False))
    )
    assert all(torch.equal(first.out, one.out) and torch.equal(first.lse, one.lse) for one in others)


@pytest.mark.long
@pytest.mark.parametrize(
    ("stands", "instead"),
    [
        ("    if (ALTERNATE) q += place * (64 * ROW_BYTES >> 4);\n", ""),
        ("queries + (ALTERNATE ? 0 : own", "queries + (ALTERNATE ? own.index : own"),
        ("    place = place_in(work);\n    begin_rows", "    begin_rows"),
        ("int row = first_row(work)", "int row = work.first + 64 * index"),
        ("int first = first_row(work);", "int first = work.first + 64 * index;"),
        ("GROUPS - 1 - index : index", "GROUPS - 1 : index"),
        ("work.backwards = ALTERNATE && turn % 2;", "work.backwards = turn % 2 && threadIdx.x < 512;"),
        # what groups may not lack that run ahead of one another
        ("    wait_for(&barriers->k_full[keys.stage], keys.phase);\n    take_turn();\n    end_turn", "    end_turn"),
        ("    keys.next();\n    await_values();\n", "    keys.next();\n"),
        ("make_barrier(&barriers->q_empty[slot], 4 * GROUPS);", "make_barrier(&barriers->q_empty[slot], 8);"),
        ("make_barrier(&barriers->k_empty[stage], 4 * GROUPS", "make_barrier(&barriers->k_empty[stage], 4"),
    ],
)
def test_the_emulator_sees_what_four_groups_may_lack(emulated, tmp_path, monkeypatch, stands, instead):  # noqa: F811
    change_source(tmp_path, monkeypatch, stands, instead)
    with pytest.raises(AssertionError):
        for slots in (1, 2):
            check(emulated, "B1,H5,L256,D16,bf16,causal", dataclasses.replace(SMALL, query_slots=slots))


@pytest.mark.long
@pytest.mark.parametrize(
    ("stands", "instead"),
    [
        ("    place = place_in(next);\n", ""),
        ("    work = next;\n    place = place_in(work);\n", "    work = next;\n"),
        ("end = end_of(first_row(next), next", "end = end_of(first_row(work), next"),
    ],
)
def test_the_emulator_sees_what_four_with_early_may_lack(emulated, tmp_path, monkeypatch, stands, instead):  # noqa: F811
    change_source(tmp_path, monkeypatch, stands, instead)
    with pytest.raises(AssertionError):
        check(emulated, "B1,H5,L256,D16,bf16,causal", dataclasses.replace(SMALL, early=True))


def run_once(emulator, configuration: Configuration, text: str):
    """On one block, threads in order."""
    workload, device = Workload.parse(text), dataclasses.replace(emulator.DEVICE, multiprocessors=1)
    inputs = make_inputs(workload, find_device("cpu"), 1)
    return hopper_cuda.HopperCuda().prepare_as(workload, device, configuration).forward(inputs)


@pytest.mark.long
def test_groups_change_places_so_that_two_heads_are_as_much_for_each(emulated, tmp_path, monkeypatch):  # noqa: F811
    sums = "total[r] > 0.0f ? add_log(rows.top[r] * results.scale, total[r]) : negative_infinity()"
    change_source(tmp_path, monkeypatch, sums, "index")
    groups = run_once(emulated, dataclasses.replace(FOUR, keys=16), HEADS.format(2)).lse[0].long()
    seen = torch.zeros(2, 4, dtype=torch.long).scatter_add_(1, groups, torch.arange(1, 257).expand(2, -1))
    assert sorted(seen[0].tolist()) == seen[0].tolist() == seen[1].flip(0).tolist()
    assert len(set(seen.sum(0).tolist())) == 1 and seen[0, 0] < seen[0, 3]


@pytest.mark.long
def test_a_group_runs_on_to_the_next_head_while_another_has_not_begun_one(emulated, tmp_path, monkeypatch):  # noqa: F811
    walk = "    walk<Again>(work, shape);\n"
    held = "        if (index == 3 && turns.turn == 1) emulator_wait_until([] { return runs_on; });\n"
    free = "        if (index == 0 && turns.turn == 2) runs_on = true;\n"
    change_source(tmp_path, monkeypatch, walk, f"{held}{walk}{free}")
    change_source(tmp_path, monkeypatch, "struct Results {", "static bool runs_on = false;\nstruct Results {")
    run_once(emulated, FOUR, HEADS.format(3))
    for less in ({"stages": 7}, {"query_slots": 1}, {"ping_pong": True}):
        with pytest.raises(AssertionError, match="deadlock"):
            run_once(emulated, dataclasses.replace(FOUR, **less), HEADS.format(3))


@pytest.mark.parametrize("groups", REGISTERS)
def test_groups_take_no_more_registers_than_the_launch_gives(groups):
    copying, multiplying = REGISTERS[groups]
    threads = Configuration(groups, 64, 2).threads
    given = min(65536 // threads // 8 * 8, 248)
    assert copying % 8 == multiplying % 8 == 0
    assert 128 * (copying + groups * multiplying) <= threads * given


def test_groups_change_places_only_under_a_causal_mask():
    workload = Workload.parse("B1,H4,L256,S300,D64,bf16,causal=bottom_right")
    assert FOUR.alternates(workload) and FOUR.defines(workload)["ALTERNATE"] == 1
    for other in (workload.replace(causal=None), workload.replace(causal=None, window=9)):
        assert FOUR.defines(other) == dataclasses.replace(FOUR, alternate=False).defines(other)
    assert not dataclasses.replace(FOUR, groups=1).alternates(workload)


def test_four_groups_are_offered_at_64_columns_and_never_change_places_where_nobody_tuned():
    for entries in (*CHOICES.values(), *FEW.values()):
        assert not entries[0].alternate
    for text, offered in (
        ("B64,H16,L256,D64,bf16,causal", True), ("B32,H12,L512,D64,bf16", True), ("B32,H32,L512,D64,fp16,causal", True),
        ("B32,H16,L512,D128,bf16,causal", False), ("B8,H16,L2048,D64,bf16,causal", True),
        ("B2,H32,L8192,D64,fp16", True),
    ):  # fmt: skip
        workload = Workload.parse(text)
        found = configurations.candidates(workload, HOPPER)
        assert any(one.groups == 4 for one in found) == offered, text
        assert all(one.alternate <= one.alternates(workload) for one in found), text


def test_a_table_holds_it():
    text = table_text(Table("hopper_cuda", "card", {"a": FOUR}))
    assert read_table(text, "x", "hopper_cuda", Configuration.from_dict).classes == {"a": FOUR}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "text", ["B64,H16,L256,D64,{},causal", "B32,H12,L512,D64,{}", "B32,H16,L512,D128,{},causal", "B2,H32,L8192,D64,{}"]
)
def test_no_candidate_of_four_groups_spills_or_serialises(text, dtype):
    workload = Workload.parse(text.format(dtype))
    check_candidates(workload, lambda one: one.groups == 4 or one.alternate)
