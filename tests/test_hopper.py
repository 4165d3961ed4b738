"""hopper without a card: reasons, configurations, schedules, and its kernel's own source run on a stand-in for Gluon.

Slow: that every shipped configuration and every feature compiles for sm_90 without spills and without products that
ptxas serialises, and on every release of Triton that is claimed. What runs on a card is tested in tests/gpu.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from attnscope.device import Device, find_device
from attnscope.errors import PrepareFailed, RecordError
from attnscope.implementation import find
from attnscope.implementations.hopper import Hopper, Plan, configurations, entries, kernels, schedules
from attnscope.implementations.hopper.configurations import Configuration, tuning_class
from attnscope.implementations.hopper.entries import Entry
from attnscope.inputs import make_inputs
from attnscope.reference import compute_attention
from attnscope.suites import SUITES
from attnscope.tables import Table, read_table, table_text
from attnscope.trace import explain_name
from attnscope.workload import Workload
from gluon_stand_in import device_function, run_plan

CPU = find_device("cpu")
H200 = Device("cuda", "NVIDIA H200", capability=(9, 0), multiprocessors=132)
B200 = Device("cuda", "NVIDIA B200", capability=(10, 0))
SMALL = Configuration(keys=64, slots=5, q_slots=2)
OPTIONS = {
    "mask": ",mask=bool:1x1xLxS", "bias16": ",bias=bf16:1xHxLxS", "bias32": ",bias=fp32:1x1xLxS",
    "mixed": ",mask=bool:1x1xLxS,bias=fp32:1x1xLxS,alibi,softcap=9,sinks,causal",
}  # fmt: skip
CONFIGURATIONS = [
    SMALL,
    Configuration(keys=128, slots=4, groups=3, pingpong=False, lazy_sum=False),
    Configuration(keys=64, slots=3, overlap=False, persistent=False),
    Configuration(keys=64, slots=3, q_slots=2, groups=3, balanced=False),
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if triton was there."""
    monkeypatch.setattr("attnscope.implementation.missing_package", lambda requirement: None)


@pytest.fixture(autouse=True)
def no_table_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNSCOPE_CACHE_DIR", str(tmp_path))


# --- reasons and configurations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "device", "reason"),
    [
        ("B1,H2,L64,D64,bf16", B200, "is built for compute capability 9.0, NVIDIA B200 has 10.0"),
        ("B1,H2,L64,D64,fp32", H200, "takes bf16 or fp16, not fp32"),
        ("B1,H2,L64,D264,bf16", H200, "takes D up to 256, not 264"),
        ("B1,H2,L64,D60,bf16", H200, "needs D to be a multiple of 8, not 60"),
        ("B1,H2,L64,D64,bf16,dropout=0.1", H200, "does not support a given dropout mask"),
        ("B1,H1,L1,S1073741823,D64,bf16", H200,
         "counts positions in 32 bits: L + S must stay below 2**30, not 1073741824"),
        ("B70000,H70000,L1,D16,bf16", H200, "counts tiles in 32 bits: it takes less than 2**30, not 4900000000"),
    ],
)  # fmt: skip
def test_reasons(text: str, device: Device, reason: str, installed: None) -> None:
    assert find("hopper").reasons_unsupported(Workload.parse(text), device) == [reason]


def test_it_has_no_backward(installed: None) -> None:
    workload = Workload.parse("B1,H2,L64,D64,bf16")
    assert find("hopper").reasons_unsupported(workload, H200, "backward") == ["has no backward"]


def choose(workload: Workload) -> Configuration:
    """What the Gluon kernel is compiled with where nobody tuned."""
    return chosen(workload).gluon


def chosen(workload: Workload, device: Device = H200) -> Entry:
    """The entry of the workload's class, as if it had too many rows for decoding."""
    found = Hopper.tables.choose(tuning_class(workload), device)
    return Entry(configurations.candidates(workload)[0]) if found is None else found


def shipped() -> Table[Entry]:
    table = Hopper.tables.load(Hopper.tables.shipped_path(H200), H200)
    assert table is not None
    return table


@pytest.mark.parametrize("suite", ["grid", "decode", "short", "ragged"])
def test_every_workload_of_the_suites_runs_and_has_a_configuration(suite: str, installed: None) -> None:
    for workload in SUITES[suite]:
        assert find("hopper").reasons_unsupported(workload, H200) == []
        assert chosen(workload) == shipped().classes[tuning_class(workload)]


def test_every_class_has_a_workload_by_which_it_is_tuned_and_ships_candidates(installed: None) -> None:
    tuned = {tuning_class(workload): workload for workload in Hopper().tuning_workloads()}
    for dim in ("8", "64", "80", "128", "192", "200", "256", "192,Dv128", "64,Dv128"):
        for mask in ("", ",causal", ",window=9", ",causal=bottom_right,window=9", *OPTIONS.values()):
            for dtype in ("bf16", "fp16"):
                for length in (
                    "H1,L1",
                    "H2,L4160",
                    "H9,L1024",
                    "H33,L1024",
                    "H99,L256",
                    "H265,L256",
                    "H99,L1024",
                    "H99,L1025",
                    "H99,L4096",
                    "H99,L4097",
                    "L100000,H9",
                ):
                    assert tuning_class(Workload.parse(f"{length},D{dim},{dtype}{mask}")) in tuned
    for key, entry in shipped().classes.items():
        offered = entries.candidates(tuned[key], H200)
        assert entry.gluon in [one.gluon for one in offered]
        assert entry.cuda in [None, *(one.cuda for one in offered)]


@pytest.mark.parametrize(
    ("shape", "length"),
    [
        ("B2,H33,L128", "few"), ("B2,H33,L128,S9999", "few"), ("B2,H33,L129", "some"), ("B4,H33,L256", "some"),
        ("B4,H33,L256,S1024", "some"), ("B4,H33,L256,S1025", "middle"), ("B4,H33,L257,S256", "tiny"),
        ("B4,H33,L257", "short"), ("B4,H33,L1024", "short"), ("B4,H33,L4096", "middle"), ("B4,H33,L4097", "long"),
    ],
)  # fmt: skip
def test_a_class_counts_keys_and_rounds_of_tiles(shape: str, length: str) -> None:
    assert tuning_class(Workload.parse(f"{shape},D128,bf16")) == f"D128,full,bf16,{length}"


def test_few_rows_are_not_tuned_by_name(installed: None) -> None:
    decoding, other = Workload.parse("B8,H32/8,L1,S8192,D128,bf16"), Workload.parse("B1,H1,L65,D128,bf16")
    assert Hopper().tuning_class(decoding) == "decode"
    assert "class decode has no configuration" in str(Hopper().reason_untuned(decoding))
    assert Hopper().reason_untuned(other) is None
    assert Hopper().tuning_class(decoding.replace(B=0)) == "D128,full,bf16,few"


def test_candidates_of_both_engines_are_offered(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload.parse("B2,H1,L9000,D72,bf16,causal")
    found = Hopper().candidates(workload, H200)
    assert {one.engine for one in found} == {"gluon", "cuda"}
    assert found[0] == Entry(configurations.candidates(workload)[0])
    assert [one.cuda for one in found if one.cuda] == find("hopper_cuda").candidates(  # type: ignore[attr-defined]
        workload.replace(D=128), H200
    )
    assert {one.engine for one in Hopper().candidates(workload.replace(softcap=9.0), H200)} == {"gluon"}


def engines_that_run(text: str, entry: Entry, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What hopper prepares of an entry, by stand-ins for both engines."""
    ran: list[Any] = []
    monkeypatch.setattr(
        "attnscope.implementations.hopper.PreparedHopper", lambda workload, device, one: ran.append(one)
    )
    monkeypatch.setattr(
        "attnscope.implementations.hopper_cuda.PreparedHopperCuda", lambda workload, device, one: ran.append(one)
    )
    Hopper().prepare_as(Workload.parse(text), H200, entry)
    return ran


def test_the_other_engine_runs_where_it_is_named_and_takes_the_workload(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gluon = Configuration(keys=64)
    cuda = find("hopper_cuda").candidates(Workload.parse("B1,H1,L9,D128,bf16"), H200)[0]  # type: ignore[attr-defined]
    for text, entry, expected in (
        ("B1,H1,L99,D128,bf16", Entry(gluon, cuda), cuda),
        ("B1,H1,L99,D128,bf16", Entry(gluon), gluon),
        ("B1,H1,L99,D128,bf16,softcap=9", Entry(gluon, cuda), gluon),
        ("B1,H1,L99,D128,bf16,lengths=9", Entry(gluon, cuda), gluon),
    ):
        assert engines_that_run(text, entry, monkeypatch) == [expected]


def test_what_ran_is_told_by_the_kernels_names() -> None:
    for names, told in (
        (["hopper_cuda_forward"], "hopper_cuda"),
        (["hopper_cuda_forward", "hopper_cuda_combine"], "hopper_cuda"),
        (["Memset", "hopper_attention_forward"], "hopper"),
        (["hopper_attention_decode", "hopper_attention_decode_combine"], "hopper's decoding"),
        (["nothing"], None),
    ):
        assert Hopper().ran(names) == told
        pattern = Hopper.sheet.kernels["cuda"][0]
        assert any(re.search(pattern, name) for name in names) == (told is not None)


def test_the_users_table_goes_before_the_shipped_one() -> None:
    workload, own = Workload.parse("B1,H1,L64,D64,bf16"), Entry(Configuration(groups=2, slots=3))
    path = Hopper.tables.user_path(H200)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table_text(Table("hopper", "NVIDIA H200", {tuning_class(workload): own})))
    assert chosen(workload) == own
    assert chosen(workload, dataclasses.replace(H200, name="NVIDIA H100")) != own
    assert chosen(workload.replace(dtype="fp16")) == shipped().classes["D64,full,fp16,few"]


def test_an_entry_reads_what_it_writes(installed: None) -> None:
    offered = Hopper().candidates(Workload.parse("B1,H1,L100,D128,bf16,causal"), H200)
    assert offered
    for entry in offered:
        assert Entry.from_dict(entry.as_dict()) == entry
        text = table_text(Table("hopper", "NVIDIA H200", {"x": entry}))
        assert read_table(text, "a", "hopper", Entry.from_dict).classes == {"x": entry}
        assert len(str(entry)) < 120


def test_the_fallback_of_the_other_engine_is_the_fastest_of_its_own(installed: None) -> None:
    offered = Hopper().candidates(Workload.parse("B1,H1,L100,D128,bf16"), H200)
    cuda, gluon = [one for one in offered if one.cuda], [one for one in offered if not one.cuda]
    assert Hopper().settled([cuda[1], cuda[0], gluon[2], gluon[0]]) == Entry(gluon[2].gluon, cuda[1].cuda)
    assert Hopper().settled([gluon[2], cuda[0]]) == gluon[2]
    assert Hopper().settled([cuda[0]]) == cuda[0]


@pytest.mark.parametrize("values", [{"keys": "64"}, {"pingpong": 1}, {"rows": 64}, {"keys": True}])
def test_a_wrong_configuration_is_a_sentence(values: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match=r"a configuration of hopper takes keys, .* got .*\nhint: attnscope tune"):
        Entry.from_dict(values)


@pytest.mark.parametrize(
    "values",
    [{"engine": "cutlass"}, {"engine": "cuda"}, {"cuda": {"groups": 2, "keys": 64, "stages": 2}}, {"engine": 3}],
)
def test_an_engine_without_its_configuration_is_a_sentence(values: dict[str, Any]) -> None:
    with pytest.raises(
        RecordError, match=r"engine must be gluon, or cuda beside a table cuda .*\nhint: attnscope tune"
    ):
        Entry.from_dict(values)


def test_a_wrong_configuration_of_the_other_engine_is_a_sentence() -> None:
    with pytest.raises(RecordError, match=r"a configuration of hopper_cuda takes groups, .* got tiles = 3"):
        Entry.from_dict({"engine": "cuda", "cuda": {"groups": 2, "keys": 64, "stages": 2, "tiles": 3}})
    with pytest.raises(RecordError, match="a configuration of hopper_cuda must say keys, stages, got groups"):
        Entry.from_dict({"engine": "cuda", "cuda": {"groups": 2}})


def test_a_broken_triton_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise ImportError("libtriton.so: undefined symbol\nmore")

    monkeypatch.setattr(kernels, "load", broken)
    monkeypatch.setattr("attnscope.implementations.hopper.Plan.signature", lambda self: {})
    with pytest.raises(PrepareFailed, match=r"hopper: Triton failed with ImportError\nlibtriton.so: undefined"):
        find("hopper").prepare(Workload.parse("B1,H1,L100,D8,bf16,softcap=9"), H200)


def test_explain_knows_its_kernel() -> None:
    meaning = explain_name("hopper_attention_forward")
    assert (meaning.family, meaning.role, meaning.unit) == ("attnscope hopper", "fused attention", "tensor core")


def test_asking_for_reasons_does_not_import_triton() -> None:
    code = (
        "import sys; from attnscope.device import find_device; from attnscope.implementation import find;"
        "from attnscope.workload import Workload;"
        "find('hopper').reasons_unsupported(Workload.parse('B1,H1,L8,D8,bf16'), find_device('cpu'));"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "row_tiles", "section"), [(1, 1, 1, 1), (2, 3, 5, 4), (7, 1, 3, 2), (1, 5, 4, 5), (3, 3, 1, 4)]
)
def test_every_tile_is_some_number_once(
    batch: int, heads: int, row_tiles: int, section: int, longest_first: bool, batch_first: bool
) -> None:
    place, tiles = device_function("_place_of_tile"), batch * heads * row_tiles
    places = [place(i, heads, row_tiles, tiles, section, longest_first, batch_first) for i in range(tiles)]
    assert sorted(places) == [(head, tile) for head in range(batch * heads) for tile in range(row_tiles)]
    order = list(dict.fromkeys(head for head, _ in places))  # as they first come
    if batch_first:  # a head of each batch entry before the next head
        assert order == [b * heads + h for h in range(heads) for b in range(batch)]
    if longest_first:  # within a section the tiles of later rows, which see more keys, come first
        for start in range(0, len(order), section):
            inside = [tile for head, tile in places if head in order[start : start + section]]
            assert inside == sorted(inside, reverse=True)


@pytest.mark.parametrize(("tiles", "blocks"), [(1, 1), (7, 3), (12, 4), (13, 4), (264, 132), (300, 132)])
def test_every_number_is_some_blocks_once(tiles: int, blocks: int) -> None:
    numbers = [number for own in read_by_the_kernel(tiles, blocks, None) for number in own]
    assert sorted(numbers) == list(range(tiles))


def read_by_the_kernel(tiles: int, blocks: int, table: list[int] | None) -> list[list[int]]:
    """Tiles of each block as the kernel finds them."""
    from gluon_stand_in import Tile

    order = None if table is None else Tile(0, None, torch.tensor(table, dtype=torch.int32).numpy())
    found = []
    for block in range(blocks):
        count, number = (device_function(name, block, blocks) for name in ("_tiles_of_block", "_tile_number"))
        turns = count(tiles, order)
        own = [int(number(turn, order)) for turn in range(turns + 1)]  # it looks one turn ahead
        assert table is None or own.pop() == -1
        found.append(own[:turns])
    return found


SCHEDULED = [
    "B2,H16,L8192,D128,bf16,causal", "B2,H8,L8192,D256,bf16,causal", "B32,H8,L512,D64,bf16,causal",
    "B1,H3,L100,D64,bf16,causal", "B2,H4/2,L300,S2000,D64,bf16,causal=bottom_right,window=300",
    "B4,H2,L1000,S4000,D64,bf16,lengths=4000/0/130/2222", "H4,D128,bf16,causal,packed=3000/0/100/1/2000",
]  # fmt: skip


@pytest.mark.parametrize("text", SCHEDULED)
@pytest.mark.parametrize("blocks", [1, 7, 132])
def test_a_schedule_holds_each_tile_once_and_blocks_end_within_one_tile(text: str, blocks: int) -> None:
    workload = Workload.parse(text)
    plan = Plan(workload, configurations.candidates(workload)[0])
    assert plan.tiles == 0 or Plan(workload, Configuration()).scheduled
    blocks = min(blocks, plan.tiles)
    costs = schedules.tile_costs(workload, plan.configuration.rows, plan.configuration.keys)
    tiles = schedules.balance(costs, workload.H, plan.section, blocks)
    assert sorted(number for own in tiles for number in own) == list(range(plan.tiles))
    cost = [one for own in costs for _ in range(workload.H) for one in own]
    loads = [sum(cost[number] for number in own) for own in tiles]
    assert max(loads) - min(loads) <= max(cost)
    for own in tiles:  # sections one after the other, the longest first within one
        places = [(number // plan.row_tiles // plan.section, -cost[number]) for number in own]
        assert places == sorted(places)
    assert read_by_the_kernel(plan.tiles, blocks, schedules.as_table(tiles)) == tiles


def test_a_causal_grid_is_within_a_percent_of_even() -> None:
    workload = Workload.parse("B2,H16,L8192,D128,bf16,causal")
    plan = Plan(workload, Configuration())
    costs = schedules.tile_costs(workload, plan.configuration.rows, plan.configuration.keys)
    tiles = schedules.balance(costs, workload.H, plan.section, 132)
    loads = [sum(costs[0][number % plan.row_tiles] for number in own) for own in tiles]
    assert max(loads) * 132 < 1.01 * sum(loads)


@pytest.mark.parametrize("text", SCHEDULED)
def test_a_tiles_cost_is_what_the_kernel_walks(text: str) -> None:
    w = Workload.parse(text)
    for b, own in enumerate(schedules.tile_costs(w, 128, 64)):
        for tile, cost in enumerate(own):
            rows = [w.row_interval(b, i) for i in range(tile * 128, min(tile * 128 + 128, w.L))]
            tiles = {key for low, high in rows if low < high for key in range(low // 64, -(-high // 64))}
            span = max(tiles) + 1 - min(tiles) if tiles else 1
            assert cost == 2 * span + schedules.HALF_TILES_AROUND


@pytest.mark.parametrize(
    ("text", "values", "scheduled"),
    [
        ("B2,H4,L512,D64,bf16,causal", {}, True),
        ("B2,H4,L512,D64,bf16", {}, False),
        ("B2,H4,L512,D64,bf16,lengths=5/500", {}, True),
        ("B2,H4,L512,D64,bf16,causal", {"balanced": False}, False),
        ("B2,H4,L512,D64,bf16,causal", {"persistent": False}, False),
        ("B70000,H16,L64,D64,bf16,causal", {}, False),
        ("B0,H16,L64,D64,bf16,causal", {}, False),
    ],
)
def test_when_there_is_a_schedule(text: str, values: dict[str, Any], scheduled: bool) -> None:
    plan = Plan(Workload.parse(text), Configuration(**values))
    constants = plan.constants()
    assert plan.scheduled == scheduled == ("order" not in constants)
    assert constants["LONGEST_FIRST"] == (plan.workload.causal is not None and not scheduled)
    assert not constants["BATCH_FIRST"]


@pytest.mark.parametrize(
    ("options", "in_sections", "batch_first"),
    [
        ("bias=bf16:1xHxLxS", True, True), ("bias=fp32:1x1xLxS", True, False), ("bias=bf16:BxHxLxS", True, False),
        ("bias=bf16:1xHx1xS", False, False), ("bias=bf16:1xHxLxS,causal", False, False),
        ("bias=bf16:1xHxLxS,mask=bool:1x1xLxS", True, True), ("mask=bool:1xHxLxS", True, False),
    ],
)  # fmt: skip
def test_who_shares_a_bias_is_walked_together(options: str, in_sections: bool, batch_first: bool) -> None:
    """Heads or batch entries that read the same tiles of a bias: they meet in the L2 cache. A table has its own."""
    constants = Plan(Workload.parse(f"B2,H4,L512,D64,bf16,{options}"), Configuration()).constants()
    assert (constants["LONGEST_FIRST"], constants["BATCH_FIRST"]) == (in_sections, batch_first)


def test_blocks_of_one_tile_need_no_schedule() -> None:
    workload = Workload.parse("B2,H4,L512,D64,bf16,causal")
    tiles = Plan(workload, Configuration()).tiles
    assert not Plan(workload, Configuration(), tiles).scheduled and Plan(workload, Configuration(), tiles - 1).scheduled


WALKED = [
    "B1,H1,L200,S300,D64,bf16,causal", "B1,H1,L300,S200,D64,bf16,causal=bottom_right", "B1,H1,L200,S333,D64,bf16",
    "B1,H1,L500,D64,bf16,window=70", "B1,H1,L500,D64,bf16,window=70,causal", "B2,H1,L200,S500,D64,bf16,lengths=500/0",
    "H1,D64,bf16,packed=200/0/64/1/300", "H1,D64,bf16,causal,packed=200/0/64/1/300,window=33",
    "B1,H1,L100,S20,D64,bf16,window=5", "B1,H1,L20,S500,D64,bf16,causal=bottom_right,window=129",
]  # fmt: skip


@pytest.mark.parametrize("text", WALKED)
@pytest.mark.parametrize(("rows", "keys"), [(128, 128), (192, 64)])
def test_a_walk_visits_each_tile_of_keys_once_and_masks_what_it_must(text: str, rows: int, keys: int) -> None:
    from gluon_stand_in import Tile

    w = Workload.parse(text)
    walk, key_tile, geometry = (device_function(f"_{name}") for name in ("walk", "key_tile", "batch_geometry"))
    starts = ends = lengths = None
    if w.packed is not None:
        plain = w.replace(causal=None, window=None)
        intervals = [plain.row_interval(0, i) for i in range(w.L)]
        starts, ends = (Tile(0, None, torch.tensor(side).numpy()) for side in zip(*intervals, strict=True))
    if w.lengths is not None:
        lengths = Tile(0, None, torch.tensor(w.lengths).numpy())
    for b in range(w.B):
        length, offset = geometry(b, lengths, w.L, w.S, w.causal == "bottom_right")
        for row in range(0, w.L, rows):
            count, masked, *ends_of_walk = walk(
                row, length, offset, starts, ends, w.L, w.S, w.window or 0, rows, keys,
                w.causal is not None, w.window is not None, True,
            )  # fmt: skip
            visited = [key_tile(j, masked, *ends_of_walk) for j in range(count)]
            assert len(set(visited)) == count >= 1
            needed: dict[int, bool] = {}
            for tile in range(-(-w.S // keys)):
                seen = [_seen(w, b, i, tile, keys) for i in range(row, min(row + rows, w.L))]
                if any(seen):
                    needed[tile] = all(one == keys for one in seen)
            assert set(needed) <= set(visited)
            assert count <= max(1, len(needed)) or w.packed is not None  # sequences of no rows leave gaps
            assert all(needed.get(tile, False) for tile in visited[masked:])


def _seen(w: Workload, b: int, i: int, tile: int, keys: int) -> int:
    """How many keys of a tile row i sees."""
    low, high = w.row_interval(b, i)
    return max(0, min(high, (tile + 1) * keys) - max(low, tile * keys))


# --- the kernel's source on a stand-in --------------------------------------------------------------------------------

FEATURES = [
    "B1,H3,L300,D64,bf16",
    "B1,H3,L300,D64,bf16,causal",
    "B2,H4/2,L65,S200,D64,bf16,causal=bottom_right",
    "B2,H2,L200,S65,D64,bf16,causal=bottom_right,layout=blhd",
    "B2,H2,L100,D80,Dv40,fp16,softcap=20",
    "B1,H2,L170,D128,bf16,causal,layout=qkv",
    "B2,H4/2,L233,D96,bf16,window=50,causal,layout=blhd,sinks",
    "B3,H2,L200,S190,D64,bf16,lengths=190/7/0,causal=bottom_right,sinks",
    "H2,D64,bf16,causal,packed=100/65/0/1/130",
    "B2,H2,L150,S180,D64,bf16,alibi,causal=bottom_right,softcap=5",
    "B1,H2,L150,D64,bf16,scale=-0.2",
    "B1,H2,L150,D64,bf16,scale=0",
    "B1,H2,L1,S65,D64,bf16",
    "B1,H2,L65,S1,D256,bf16",
    "B1,H2,L400,S300,D64,bf16,window=20,causal=bottom_right",
]


@pytest.mark.parametrize("text", FEATURES)
def test_the_kernels_source_computes_attention_and_its_barriers_agree(text: str) -> None:
    workload = Workload.parse(text)
    inputs = make_inputs(workload, CPU)
    truth = compute_attention(inputs, backward=False)
    for number, configuration in enumerate(CONFIGURATIONS):
        plan = Plan(workload, configuration)
        out, lse = run_plan(plan, inputs, blocks=2, seed=number)
        assert torch.equal(lse.isfinite(), truth.lse.isfinite()), configuration
        assert torch.allclose(out.double(), truth.out, atol=1e-5, rtol=0), configuration
        seen = truth.lse.isfinite()
        assert torch.allclose(lse[seen].double(), truth.lse[seen], atol=1e-5, rtol=0), configuration


@pytest.mark.parametrize("lost", ["arrive", "turn"])
def test_the_stand_in_sees_a_lost_arrival(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import gluon_stand_in

    monkeypatch.setattr(gluon_stand_in, "TIMEOUT_S", 0.3)
    if lost == "arrive":
        monkeypatch.setattr(gluon_stand_in.MBarrier, "arrive", lambda self, barrier, count: None)
    else:
        monkeypatch.setitem(kernels._DEVICE_FUNCTIONS, "_give_turn", lambda W: None)
    workload = Workload.parse("B1,H1,L128,S512,D64,bf16")
    with pytest.raises(gluon_stand_in.Deadlock):
        run_plan(Plan(workload, SMALL), make_inputs(workload, CPU), blocks=1, seed=0)


@pytest.mark.parametrize("text", ["B2,H2,L3,S0,D64,bf16", "B2,H2,L3,S0,D64,bf16,sinks", "B0,H2,L3,D64,fp16",
                                  "B2,H2,L0,S3,D64,bf16,layout=blhd"])  # fmt: skip
def test_without_rows_or_keys_nothing_is_launched(text: str) -> None:
    workload = Workload.parse(text)
    inputs = make_inputs(workload, CPU)
    output, truth = find("hopper").prepare(workload, H200).forward(inputs), compute_attention(inputs, backward=False)
    assert output.out.shape == truth.out.shape and torch.equal(output.out.double(), truth.out)
    assert torch.equal(output.lse, truth.lse.float())


# --- slow: compiling for a card that is not here ----------------------------------------------------------------------

SHIPPED = sorted(shipped().classes)
VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
REPORT = """
import json, subprocess, sys, tempfile
from pathlib import Path
import triton
from attnscope.implementations.hopper import Plan, configurations
from attnscope.implementations.hopper.masked import MaskPlan
from attnscope.workload import Workload

folder = Path(triton.__file__).parent / "backends/nvidia/bin"
ptxas = folder / "ptxas"
for text, values in json.load(sys.stdin):
    plan = Plan(Workload.parse(text), configurations.Configuration.from_dict(values))
    machine = plan.compile()
    said = ""
    in_front = [] if plan.workload.mask is None else MaskPlan(plan).compile()
    for one in [machine, *in_front] if ptxas.is_file() else []:
        with tempfile.TemporaryDirectory() as place:
            source = Path(place) / "kernel.ptx"
            source.write_text(one.ptx)
            ran = subprocess.run(
                [ptxas, "-v", "-arch=sm_90a", "-o", Path(place) / "kernel.cubin", source],
                capture_output=True,
                text=True,
            )
            said += ran.stderr
    print(json.dumps([text, values, machine.shared_bytes, machine.threads, said]), flush=True)
"""


def triton_folder(version: str) -> Path | None:
    """Where a Triton is unpacked, alone: found, or fetched once, or None where it cannot be had."""
    import zipfile

    folder = Path(tempfile.gettempdir()) / f"attnscope-triton-{version}-{sys.version_info.minor}"
    if (folder / "triton").is_dir():
        return folder
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", place]
        ran = subprocess.run([*command, f"triton=={version}"], capture_output=True, timeout=280)
        wheels = list(Path(place).glob("triton-*.whl"))
        if ran.returncode or not wheels:
            return None
        aside = folder.with_name(f"{folder.name}.{os.getpid()}")
        zipfile.ZipFile(wheels[0]).extractall(aside)
        for tool in (aside / "triton/backends/nvidia/bin").glob("*"):
            tool.chmod(0o755)
        try:
            aside.rename(folder)
        except OSError:
            return folder if (folder / "triton").is_dir() else None
    return folder


def compile_apart(
    version: str, jobs: list[tuple[str, Configuration]], tmp_path: Path, report: str = REPORT
) -> list[Any]:
    """(text, values, shared bytes, threads, what ptxas said) of each, or what another program reports, compiled in a
    process with that Triton."""
    import json

    folder = triton_folder(version)
    if folder is None:
        pytest.skip(f"triton {version} cannot be had here")
    source = Path(configurations.__file__).parents[3]
    ran = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True,
        input=json.dumps([(text, configuration.as_dict()) for text, configuration in jobs]),
        env=os.environ | {"PYTHONPATH": f"{folder}:{source}", "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    assert len(found) == len(jobs), ran.stderr[-3000:]
    return found


def assert_clean(found: list[Any]) -> None:
    """No spills, no serialised products, and no more shared memory than there is."""
    for text, values, shared_bytes, _, said in found:
        where = f"{text} {values}"
        assert shared_bytes <= configurations.SHARED_LIMIT_BYTES, where
        assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}, where + said
        assert not re.search(r"C75\d\d", said), where + said


def text_of(key: str) -> str:
    """A workload of a tuning class."""
    dim, mask, dtype, length = key.split(",")
    size = {"short": 1000, "middle": 2000, "long": 5000}[length]
    masks = {"full": "", "causal": ",causal", "window": ",causal=bottom_right,window=64"} | OPTIONS
    return f"B1,H2,L{size},{dim},{dtype}{masks[mask]}"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dim", ["D64", "D128", "D256"])
def test_all_that_may_be_chosen_compiles_cleanly(dim: str, tmp_path: Path) -> None:
    jobs = {}
    for key in (key for key in SHIPPED if key.startswith(f"{dim},") and "bf16,long" in key):
        workload = Workload.parse(text_of(key))
        for candidate in configurations.candidates(workload):
            jobs[(text_of(key), dataclasses.replace(candidate, persistent=True))] = None
    assert_clean(compile_apart("3.6.0", list(jobs), tmp_path))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_feature_compiles_cleanly(tmp_path: Path) -> None:
    texts = [
        *FEATURES,
        "B1,H2,L300,D256,fp16,lengths=7,sinks,softcap=3,causal=bottom_right",
        "B1,H2,L99,D192,Dv128,bf16",
        "B2,H2,L300,D64,bf16,mask=bool:BxHxLxS,alibi,causal=bottom_right,lengths=300/7",
        "B1,H2,L300,D128,bf16,mask=bool:1x1xLxS,bias=bf16:1xHxLxS,sinks",
        "B1,H2,L300,D256,fp16,bias=fp16:1x1xLxS,causal,softcap=9",
        "B1,H2,L300,D128,fp16,bias=fp16:1x1xLxS,causal=bottom_right,softcap=9,sinks,alibi",
        "B1,H2,L300,D64,bf16,mask=bool:1x1xLxS,causal=bottom_right,window=9,lengths=7",
        "B1,H2,L300,D64,bf16,bias=bf16:1xHx1xS,alibi",
        "B1,H2,L300,D128,bf16,bias=fp32:1xHx1xS,window=64",
        "B1,H2,L300,D256,bf16,bias=fp32:Bx1xLx1,mask=bool:1x1x1xS",
    ]
    assert_clean(compile_apart("3.6.0", [(text, choose(Workload.parse(text))) for text in texts], tmp_path))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", VERSIONS)
def test_each_claimed_release_of_triton_compiles_it(version: str, tmp_path: Path) -> None:
    texts = ["B1,H2,L2048,D128,bf16", "B1,H2,L2000,D64,fp16,causal,sinks", "B1,H2,L300,D256,bf16,window=64,softcap=9"]
    texts += [f"B1,H2,L2048,D{dim},bf16,mask=bool:1x1xLxS" for dim in (64, 128, 256)]
    texts += ["B1,H2,L2048,D128,bf16,bias=bf16:1xHxLxS"]
    jobs = [(text, choose(Workload.parse(text))) for text in texts]
    jobs += [(text, one) for text in texts for one in configurations.candidates(Workload.parse(text)) if one.queued]
    found = compile_apart(version, jobs, tmp_path)
    assert [threads for *_, threads, _ in found] == [128 * (1 + one.groups) for _, one in jobs]
