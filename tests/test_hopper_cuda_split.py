"""hopper_cuda where it cuts the keys of the last round's tiles: pieces, both kernels on the CPU emulator, their code.

``COSTS_A_SPLIT`` and ``LEAST_PIECE`` are lowered where a problem is to be small enough for the emulator.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from attnscope.device import find_device
from attnscope.implementations import hopper_cuda
from attnscope.implementations.common import NO_TILE
from attnscope.implementations.hopper_cuda import configurations, scheduling
from attnscope.implementations.hopper_cuda.configurations import CHOICES, FEW, Configuration
from attnscope.tables import Table, read_table, table_text
from attnscope.workload import Workload

torch = pytest.importorskip("torch")

import driver_stand_in  # noqa: E402
from attnscope.inputs import make_inputs  # noqa: E402
from test_hopper_cuda import HOPPER, change_source, check, check_candidates, compiled_source, emulated  # noqa: E402, F401

CPU = find_device("cpu")
SMALL = Configuration(1, 16, 2, split=True)


@pytest.fixture
def cheap(monkeypatch):
    """Keys are cut wherever the last round is not full, in pieces down to one tile of keys."""
    for name, value in (("COSTS_A_SPLIT", 0), ("LEAST_PIECE", 1), ("LEAST_GAIN", 0.0)):
        monkeypatch.setattr(configurations, name, value)


@pytest.fixture
def poisoned(monkeypatch):
    """What a call makes holds NaN until it is written."""
    make = driver_stand_in.Driver.empty_strided
    monkeypatch.setattr(driver_stand_in.Driver, "empty_strided", lambda self, *form: make(self, *form).fill_(math.nan))


# --- how keys are cut and dealt ---------------------------------------------------------------------------------------

DEALT = [(2048, 94, 132), (1024, 205, 132), (512, 103, 66), (32, 256, 132), (165, 40, 66), (5, 33, 4), (131, 13, 132)]


def rows_of(pieces: scheduling.Pieces, clusters: int) -> list[list[tuple[int, ...]]]:
    """The rows of ``order``."""
    entries = [tuple(pieces.order[at : at + 3]) for at in range(0, len(pieces.order), 3)]
    return [entries[at : at + clusters] for at in range(0, len(entries), clusters)]


def check_pieces(tiles: int, key_tiles: int, clusters: int) -> list[int]:
    """Each tile of keys of each tile left is in one piece; returns what each cluster has."""
    pieces = scheduling.deal_pieces(tiles, key_tiles, clusters)
    whole, *rows, last = rows_of(pieces, clusters)
    assert set(whole) == {(NO_TILE, 0, key_tiles)} and set(last) == {(NO_TILE, 0, 0)} and len(rows) == pieces.turns
    left = range(pieces.whole_turns * clusters, tiles)
    seen = [(tile, key) for row in rows for tile, begin, end in row for key in range(begin, end)]
    assert len(left) < clusters and sorted(seen) == list(itertools.product(left, range(key_tiles)))
    for column in zip(*rows, strict=True):  # nobody stops before its last piece
        empty = [begin >= end for _, begin, end in column]
        assert empty == sorted(empty)
    found = [pieces.tiles[at : at + 3] for at in range(0, len(pieces.tiles), 3)]
    assert [tile for tile, _, _ in found] == list(left)
    for tile, start, count in found:
        own = [rows[number // clusters][number % clusters] for number in pieces.pieces[start : start + count]]
        assert {one for one, _, _ in own} == {tile} and sum(end - begin for _, begin, end in own) == key_tiles
    assert sum(count for _, _, count in found) == len(pieces.pieces) == len(set(pieces.pieces))
    return [sum(end - begin for _, begin, end in column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize(("tiles", "key_tiles", "clusters"), DEALT)
def test_pieces_are_even_and_not_too_short(tiles, key_tiles, clusters):
    loads = check_pieces(tiles, key_tiles, clusters)
    assert max(loads) - min(loads) <= configurations.LEAST_PIECE
    *rows, _ = rows_of(scheduling.deal_pieces(tiles, key_tiles, clusters), clusters)[1:]
    lengths = [end - begin for row in rows for _, begin, end in row if begin < end]
    assert min(lengths) >= configurations.LEAST_PIECE // 2


def test_pieces_hold_every_tile_of_keys_once(monkeypatch):
    for least in (1, 4):
        monkeypatch.setattr(configurations, "LEAST_PIECE", least)
        for tiles, key_tiles, clusters in itertools.product(range(1, 12), range(1, 12), range(1, 7)):
            if tiles % clusters:
                check_pieces(tiles, key_tiles, clusters)


def test_keys_are_cut_where_that_pays():
    long, configuration = Workload.parse("B1,H16,L16384,D128,bf16"), Configuration(2, 176, 2, split=True)
    pairs = dataclasses.replace(configuration, cluster=2)
    assert configuration.splits(long, 132) and configuration.clusters(long, 132) == 132
    assert pairs.splits(long, 132) and pairs.clusters(long, 132) == 66
    nearly_full = long.replace(H=33, L=512)  # 132 tiles
    for other in (long.replace(causal="top_left"), long.replace(window=9), long.replace(S=1024), nearly_full):
        assert not configuration.splits(other, 132)
        assert configuration.defines(other) == dataclasses.replace(configuration, split=False).defines(other)
    assert not dataclasses.replace(configuration, split=False).splits(long, 132)
    assert not dataclasses.replace(configuration, persistent=False).splits(long, 132)
    few = Workload.parse("B1,H4,L64,S65536,D128,bf16")
    assert configuration.splits(few, 132) and configuration.clusters(few, 132) == 132


def test_candidates_that_cut_keys_are_offered_where_they_do_and_never_first():
    for entries in (*CHOICES.values(), *FEW.values()):
        assert not entries[0].split
    for text, offered in (
        ("B1,H16,L16384,D128,bf16", True), ("B1,H8,L16384,D256,bf16", True), ("B1,H16,L2048,D128,bf16", False),
        ("B1,H16,L16384,D128,bf16,causal", False), ("B2,H10,L8192,D192,Dv128,bf16", True),
    ):  # fmt: skip
        found = configurations.candidates(Workload.parse(text), HOPPER)
        assert any(one.split for one in found) == offered and not found[0].split, text


def test_a_table_of_before_reads_and_one_that_cuts_keys_too():
    old = {"groups": 2, "keys": 176, "stages": 2}
    assert Configuration.from_dict(old) == Configuration(2, 176, 2)
    one = Configuration(2, 176, 2, split=True)
    text = table_text(Table("hopper_cuda", "card", {"a": one}))
    assert "split = true" in text
    assert read_table(text, "x", "hopper_cuda", Configuration.from_dict).classes == {"a": one}


# --- both kernels on a CPU --------------------------------------------------------------------------------------------


def test_pieces_are_right_on_the_emulator(emulated, cheap, poisoned):  # noqa: F811
    """Tiles of 64 rows and 16 keys: whole and cut tiles of rows and keys, up to a tile of keys a piece."""
    cut = 0
    for (heads, length), keys, blocks in itertools.product(((1, 5), (3, 64), (5, 70)), (16, 17, 50, 112), (2, 4, 7)):
        text = f"B1,H{heads},L{length},S{keys},D16,bf16"
        if SMALL.splits(Workload.parse(text), blocks):
            check(emulated, text, SMALL, blocks)
            cut += 1
    assert cut > 15


CASES = [
    ("B1,H3,L128,S265,D64,bf16", Configuration(2, 16, 2, split=True), 2),
    ("B1,H2,L200,S250,D64,fp16,layout=blhd", Configuration(2, 16, 2, query_slots=2, slack=8, split=True), 3),
    ("B2,H2/1,L1,S250,D64,bf16", Configuration(1, 16, 2, split=True), 10),
    ("B1,H3,L200,S265,D64,bf16", Configuration(2, 16, 2, split=True, cluster=2), 4),  # rows of a head
    ("B1,H3/1,L100,S265,D72,bf16", Configuration(2, 16, 2, split=True, cluster=2), 4),
    ("B1,H6/3,L100,S265,D72,fp16,layout=blhd", Configuration(2, 16, 2, split=True, cluster=2), 4),  # heads of a group
    ("B1,H1,L500,D64,bf16,layout=qkv", Configuration(3, 16, 3, split=True), 2),
    ("B1,H1,L700,D64,bf16", Configuration(4, 16, 3, False, query_slots=2, split=True), 2),
    ("B1,H5,L150,S265,D192,Dv128,bf16", Configuration(3, 16, 3, slack=8, split=True), 4),
    ("B1,H3,L100,S260,D256,bf16,scale=0.5", Configuration(2, 16, 2, False, slack=8, split=True), 2),
    ("B1,H3/1,L70,S300,D128,Dv40,fp16,layout=blhd", Configuration(1, 16, 2, split=True), 4),
]


@pytest.mark.long
@pytest.mark.parametrize(("text", "configuration", "blocks"), CASES)
def test_every_variant_that_cuts_keys_is_right_on_the_emulator(emulated, poisoned, text, configuration, blocks):  # noqa: F811
    assert configuration.splits(Workload.parse(text), blocks)
    check(emulated, text, configuration, blocks)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["large", "shifted", "peaky"])
def test_hard_inputs_are_right_in_pieces(emulated, cheap, kind):  # noqa: F811
    for slack in (0, 8):
        one = dataclasses.replace(SMALL, slack=slack)
        for dtype in ("bf16", "fp16"):
            check(emulated, f"B1,H3,L70,S210,D16,{dtype}", one, 4, kind)


def add_up(emulator, parts, part_rows, scale: float):
    """combine.cu on the emulator: (out, lse) of 64 rows whose pieces, (n, 64, 16) and (n, 64, 2), count in turn."""
    defines = {"T16": "fp16", "DIMS": 16, "VALUE_DIM": 16, "CLUSTER": 1, "CLUSTER_HEADS": 1, "QUERIES": 64}
    kernel = emulator.load_kernel(hopper_cuda.COMBINE_SOURCE, hopper_cuda.COMBINE_KERNEL, HOPPER, defines)
    count = parts.shape[0]
    tiles, pieces = torch.tensor([0, 0, count], dtype=torch.int32), torch.arange(count, dtype=torch.int32)
    out, lse = torch.full((1, 1, 64, 16), math.nan).half(), torch.full((1, 1, 64), math.nan)
    strides = hopper_cuda.strides_of(out)
    kernel.launch((4,), 128, parts, part_rows, tiles, pieces, out, lse, *strides, scale, 1, 64, 1)
    return out[0, 0].double(), lse[0, 0].double()


def test_pieces_that_saw_nothing_and_far_maxima_add_up(emulated):  # noqa: F811
    generator = torch.Generator().manual_seed(3)
    parts, tops = torch.randn(5, 64, 16, generator=generator), 3000 * torch.randn(5, 64, generator=generator)
    sums = torch.rand(5, 64, generator=generator) * 100 + 1
    tops[:, :8] = tops[:1, :8]  # rows whose pieces weigh alike
    for piece, rows in ((0, slice(0, 20)), (4, slice(10, 40)), (slice(None), slice(60, 64))):  # some rows saw nothing
        tops[piece, rows], sums[piece, rows], parts[piece, rows] = -math.inf, 0.0, 0.0
    scale = 0.01
    out, lse = add_up(emulated, parts, torch.stack([tops, sums], -1).contiguous(), scale)
    top = tops.double().amax(0)
    worth = torch.exp((tops.double() - top.clamp_min(-1e30)) * scale)
    total = (worth * sums).sum(0)
    expected = (worth[..., None] * parts).sum(0) / total.clamp_min(1e-30)[:, None]
    assert (out - expected).abs().max() < 1e-3
    assert ((lse - (top * scale + total.log()))[:60].abs() < 1e-5).all()
    assert torch.isneginf(lse[60:]).all() and not out[60:].any() and torch.isfinite(lse[:60]).all()


def test_what_is_not_a_number_stays_so(emulated):  # noqa: F811
    parts, rows = torch.ones(2, 64, 16), torch.ones(2, 64, 2)
    parts[1, 5, 3], parts[0, 7], rows[0, 7, 1] = (math.nan,) * 3  # a weight that is none spoils its row
    out, _ = add_up(emulated, parts, rows, 1.0)
    assert out.isnan().nonzero().tolist() == [[5, 3], *([7, column] for column in range(16))]


def test_a_call_queues_two_kernels_and_shares_no_parts_with_another(emulated, cheap, monkeypatch):  # noqa: F811
    stand_in = driver_stand_in.stand_in(monkeypatch)
    emulated.attach(stand_in)
    workload = Workload.parse("B1,H3,L64,S100,D16,bf16")
    device = dataclasses.replace(emulated.DEVICE, multiprocessors=2)
    prepared, inputs = hopper_cuda.HopperCuda().prepare_as(workload, device, SMALL), make_inputs(workload, CPU)
    kept: list[object] = []
    monkeypatch.setattr(prepared, "fresh", lambda fresh=prepared.fresh: kept.append(fresh()) or kept[-1])
    for _ in range(2):
        prepared.forward(inputs)
    assert stand_in.made == 6 and len({tensor.data_ptr() for made in kept for tensor in made}) == 6
    handles = [prepared.function.handle, prepared.split.function.handle]
    assert [launch.handle for launch in stand_in.launched] == handles * 2
    monkeypatch.setattr(prepared, "fresh", lambda: kept[0])
    prepared.forward(inputs)  # seen before: nothing is described again
    assert [launch.handle for launch in stand_in.launched] == handles * 3 and len(prepared.launches) == 2


# --- what they may lack is noticed ------------------------------------------------------------------------------------


def fails(emulator, text: str = "B1,H3,L64,S210,D16,bf16", configuration: Configuration = SMALL, blocks: int = 4):
    with pytest.raises(AssertionError):
        check(emulator, text, configuration, blocks)


def _drop_a_piece(dealt: scheduling.Pieces) -> scheduling.Pieces:
    return dataclasses.replace(dealt, tiles=[*dealt.tiles[:2], dealt.tiles[2] - 1, *dealt.tiles[3:]])


def _change_order(dealt: scheduling.Pieces, place: int, by: int, blocks: int = 4) -> scheduling.Pieces:
    order = list(dealt.order)
    order[3 * blocks + place] += by
    return dataclasses.replace(dealt, order=order)


@pytest.mark.parametrize(
    "spoil",
    [
        _drop_a_piece,
        lambda dealt: _change_order(dealt, 4, 1),  # begins a tile of keys late
        lambda dealt: _change_order(dealt, 4, -1),  # and early
        lambda dealt: _change_order(dealt, 2, -1),  # ends a tile early
        lambda dealt: dataclasses.replace(dealt, pieces=[*dealt.pieces[1:], dealt.pieces[0]]),  # another tile's piece
        lambda dealt: dataclasses.replace(dealt, pieces=[dealt.pieces[1], *dealt.pieces[1:]]),  # one twice
    ],
)
def test_pieces_that_are_dealt_wrongly_are_noticed(emulated, cheap, monkeypatch, spoil):  # noqa: F811
    deal = scheduling.deal_pieces
    monkeypatch.setattr(scheduling, "deal_pieces", lambda *sizes: spoil(deal(*sizes)))
    fails(emulated)


@pytest.mark.parametrize(
    ("stands", "instead"),
    [
        ("float weight = factor * worth(part_rows[part], top, scale2);", "float weight = factor;"),
        ("total += part_row.y * worth(part_row, top, scale2);", "total = part_row.y * worth(part_row, top, scale2);"),
        *(
            pytest.param(*change, marks=pytest.mark.long)
            for change in (
                ("float weight = factor * worth(", "float weight = worth("),
                ("total += part_row.y * worth(part_row, top, scale2);", "total += part_row.y;"),
                ("exp2_fast((part_row.x - top) * scale2)", "exp2_fast((part_row.x - top) * scale)"),
                ("add_log(top * scale, total)", "add_log(top * scale2, total)"),
                ("row_tiles - 1 - tile % row_tiles", "tile % row_tiles"),
                ("int part = pieces[i] * piece_rows + in_piece;", "int part = i * piece_rows + in_piece;"),
            )
        ),
    ],
)
def test_the_emulator_sees_what_the_sum_may_lack(emulated, cheap, tmp_path, monkeypatch, stands, instead):  # noqa: F811
    change_source(tmp_path, monkeypatch, stands, instead, "COMBINE_SOURCE")
    fails(emulated, "B1,H3,L70,S210,D16,bf16")


@pytest.mark.long
@pytest.mark.parametrize(
    ("stands", "instead"),
    [
        ("turns.clusters() + turns.cluster();", "turns.clusters() + turns.clusters() - 1 - turns.cluster();"),
        ("turns.turn > shape.whole_turns)", "turns.turn > shape.whole_turns + 1)"),
        ("make_float2(rows.top[r], total[r])", "make_float2(rows.top[r] * results.scale, total[r])"),
        ("make_float2(rows.top[r], total[r])", "make_float2(rows.top[r], rows.sum[r])"),
        ("work.end = SPLIT ? end :", "work.end = SPLIT ? tiles_of(shape.S) :"),
        ("work.begin = SPLIT ? begin :", "work.begin = SPLIT ? 0 :"),
        ("if (SPLIT && ahead >= 0) tile = ahead;", ""),
        ("        *(float2*)(to + 8 * r * VALUE_DIM", "        *(float2*)(to + 8 * r * DIMS"),
    ],
)
def test_the_emulator_sees_what_pieces_may_lack(emulated, cheap, tmp_path, monkeypatch, stands, instead):  # noqa: F811
    change_source(tmp_path, monkeypatch, stands, instead)
    fails(emulated, "B1,H5,L70,S210,D24,bf16")


@pytest.mark.long
@pytest.mark.parametrize(
    ("stands", "instead", "text"),
    [
        ("CLUSTER_HEADS > 1 ? blockIdx.x % CLUSTER : work", "CLUSTER_HEADS > 1 ? 0 : work", "H6/3,L60"),
        (": work.first / QUERIES % CLUSTER;", ": blockIdx.x % CLUSTER;", "H3,L120"),
        ("(piece * CLUSTER + in_cluster) * QUERIES", "(piece + in_cluster) * QUERIES", "H3,L120"),
    ],
)
def test_the_emulator_sees_what_pieces_of_a_cluster_may_lack(
    emulated, cheap, tmp_path, monkeypatch, stands, instead, text  # noqa: F811
):  # fmt: skip
    pair, text = dataclasses.replace(SMALL, cluster=2), f"B1,{text},S210,D16,bf16"
    check(emulated, text, pair, 4)
    change_source(tmp_path, monkeypatch, stands, instead)
    fails(emulated, text, pair, 4)


# --- their machine code -----------------------------------------------------------------------------------------------


def test_what_adds_pieces_up_does_not_spill():
    defines = Configuration(2, 176, 2).combine_defines(Workload.parse("B1,H16,L16384,D128,bf16"))
    (kernel,) = compiled_source(hopper_cuda.COMBINE_SOURCE, "sm_90", defines).resources
    assert (kernel.spill_store_bytes, kernel.spill_load_bytes, kernel.stack_bytes) == (0, 0, 0)


@pytest.mark.long
@pytest.mark.parametrize("sizes", ["L16384,D128", "L16384,D256", "L16384,D192", "L8192,D192,Dv128", "L64,S65536,D128"])
def test_no_candidate_that_cuts_keys_spills_or_serialises(sizes):
    workload = Workload.parse(f"B1,H{16 if 'S' not in sizes else 4},{sizes},bf16")
    check_candidates(workload, lambda one: one.split)
