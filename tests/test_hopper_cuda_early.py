"""hopper_cuda where a tile's first scores are computed beside the last values of the tile before, without a GPU."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from attnscope.implementations.hopper_cuda import configurations
from attnscope.implementations.hopper_cuda.configurations import CHOICES, FEW, Configuration
from attnscope.tables import Table, read_table, table_text
from attnscope.workload import Workload

torch = pytest.importorskip("torch")

from test_hopper_cuda import HOPPER, PAIR, change_source, check, check_candidates, emulated  # noqa: E402, F401

EARLY = Configuration(2, 16, 3, slack=8, schedule="table", query_slots=2, early=True)
# Tiles of 128 rows and 16 keys: the group above skips keys first, the one below never does.
FAST = [
    "B1,H5,L128,D16,bf16,causal",
    "B1,H3,L300,D16,bf16,causal",  # the last group of the last tile has no rows
    "B1,H3,L200,S333,D16,bf16,causal=bottom_right,layout=blhd",
    "B2,H2/1,L64,D16,bf16,causal",
    "B1,H3,L70,S5,D16,bf16,causal",
]


def test_early_scores_are_right_on_the_emulator(emulated):  # noqa: F811
    for blocks, text in zip((2, 3, 2, 2, 3), FAST, strict=True):
        assert EARLY.starts_early(Workload.parse(text))
        check(emulated, text, EARLY, blocks)


CASES = [
    ("B1,H2,L300,S333,D64,bf16,causal=bottom_right,layout=blhd", Configuration(2, 64, 3, query_slots=2, early=True)),
    ("B1,H3,L400,D64,bf16,causal", Configuration(2, 64, 2, schedule="table", query_slots=2, early=True)),
    ("B1,H3,L400,D64,bf16,causal", Configuration(3, 64, 2, schedule="table", early=True)),  # groups above skip
    ("B1,H3,L450,D64,fp16,causal", Configuration(3, 48, 3, query_slots=2, early=True)),
    ("B1,H3,L400,D64,bf16", Configuration(3, 64, 2, query_slots=2, early=True)),
    ("B1,H2,L257,D96,bf16,causal", Configuration(2, 80, 2, False, slack=8, early=True)),
    ("B1,H3,L257,D128,bf16,causal", Configuration(2, 64, 2, schedule="table", query_slots=2, early=True)),
    ("B1,H3,L600,D64,bf16,causal", dataclasses.replace(PAIR, early=True)),
    ("B3,H4/2,L150,S210,D64,bf16", dataclasses.replace(PAIR, early=True)),
    ("B2,H2,L200,D192,Dv128,bf16,causal", Configuration(2, 64, 2, slack=8, schedule="table", early=True)),
    ("B1,H3,L150,D64,bf16,causal", Configuration(1, 64, 2, early=True)),
    ("B1,H2,L400,D64,bf16,causal", Configuration(2, 64, 2, persistent=False, early=True)),
]


@pytest.mark.long
@pytest.mark.parametrize(("text", "configuration"), CASES)
def test_every_variant_with_early_scores_is_right_on_the_emulator(emulated, text, configuration):  # noqa: F811
    assert configuration.starts_early(Workload.parse(text))
    check(emulated, text, configuration, 2 * configuration.cluster)


@pytest.mark.long
def test_early_scores_change_no_bit(emulated):  # noqa: F811
    early, late = (check(emulated, FAST[1], dataclasses.replace(EARLY, early=early)) for early in (True, False))
    assert torch.equal(early.out, late.out) and torch.equal(early.lse, late.lse)


@pytest.mark.long
@pytest.mark.parametrize(
    ("stands", "instead"),
    [
        ("      compute_first(true);\n", "      compute_first(false);\n"),
        ("    if (beside) end_values();\n", "    if (beside) wait_for_products<0>();\n"),
        ("begun = alike(more && any &&", "begun = alike(any &&"),
        (" && end == next.end);", ");"),
        ("    } else if (any) {\n      await_values();", "    } else if (false) {\n      await_values();"),
        ("    work = next;\n", ""),
        ("    else release(&barriers->q_empty[queries.stage]);\n    queries.next();", "    queries.next();"),
        ("    queries.next();\n    bool more", "    bool more"),
        ("    if (more) turns.look_ahead(shape);\n    end", "    end"),
        ("tile = (EARLY ? end : work.end) - 1;", "tile = work.end - 1;"),
        ("    if (begun) {\n      wait_for(&barriers->q_full[queries.stage], queries.phase);", "    if (begun) {"),
    ],
)
def test_the_emulator_sees_what_early_scores_may_lack(emulated, tmp_path, monkeypatch, stands, instead):  # noqa: F811
    change_source(tmp_path, monkeypatch, stands, instead)
    with pytest.raises(AssertionError):
        for text, slots in itertools.product(("B1,H3,L300,D16,bf16,causal", "B1,H5,L128,D16,bf16,causal"), (2, 1)):
            check(emulated, text, dataclasses.replace(EARLY, query_slots=slots), 2)


def test_scores_begin_early_only_where_each_row_sees_a_key():
    workload = Workload.parse("B1,H4,L256,S300,D64,bf16,causal=bottom_right")
    assert EARLY.starts_early(workload) and EARLY.defines(workload)["EARLY"] == 1
    assert EARLY.starts_early(workload.replace(causal=None)) and EARLY.starts_early(workload.replace(causal="top_left"))
    for other in (workload.replace(S=255), workload.replace(window=9)):
        assert not EARLY.starts_early(other)
        assert EARLY.defines(other) == dataclasses.replace(EARLY, early=False).defines(other)
    assert not dataclasses.replace(EARLY, split=True).starts_early(workload)


def test_early_scores_are_offered_for_short_causal_ones_and_never_first():
    for entries in (*CHOICES.values(), *FEW.values()):
        assert not entries[0].early
    for text, offered in (
        ("B32,H16,L512,D64,bf16,causal", True), ("B32,H16,L512,D128,bf16,causal", True),
        ("B32,H16,L512,D64,bf16", False), ("B8,H16,L2048,D64,bf16,causal", False),
        ("B32,H16,L512,D64,bf16,causal,window=9", False), ("B32,H16,L512,S500,D64,bf16,causal=bottom_right", False),
    ):  # fmt: skip
        found = configurations.candidates(Workload.parse(text), HOPPER)
        assert any(one.early for one in found) == offered and not found[0].early, text


def test_a_table_holds_it():
    text = table_text(Table("hopper_cuda", "card", {"a": EARLY}))
    assert read_table(text, "x", "hopper_cuda", Configuration.from_dict).classes == {"a": EARLY}


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_candidate_with_early_scores_spills_or_serialises(head_dim):
    workload = Workload.parse(f"B32,H16,L512,D{head_dim},bf16,causal")
    check_candidates(workload, lambda one: one.early)
