"""Orders of rivals and the plan of a measurement."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice, pairwise

import pytest

from attnscope.device import Device
from attnscope.pacing import MeasureOptions, estimated_seconds, mirrored_blocks, rival_orders, williams_square

CPU = Device("cpu", "cpu", threads=2)
GPU = Device("cuda", "H200", l2_bytes=50 * 2**20)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 10])
def test_each_rival_stands_in_each_place_and_behind_each_other_equally_often(n):
    square = williams_square(n)
    repeats = 1 if n % 2 == 0 else 2
    assert len(square) == repeats * n
    assert all(sorted(order) == list(range(n)) for order in square)
    places = Counter((place, rival) for order in square for place, rival in enumerate(order))
    assert set(places.values()) == {repeats} and len(places) == n * n
    behind = Counter(pair for order in square for pair in pairwise(order))
    assert set(behind.values()) == {repeats} and len(behind) == n * (n - 1)


def test_a_lone_rival_and_none_have_an_order_too():
    assert williams_square(1) == [[0]]
    assert williams_square(0) == [[]]


def test_orders_are_shuffled_by_the_seed_and_stay_balanced():
    first, again, other = (list(islice(rival_orders(4, random.Random(seed)), 12)) for seed in (1, 1, 2))
    assert first == again != other
    assert first[:4] != first[4:8]
    for square in (first[:4], first[4:8], first[8:]):
        behind = Counter(pair for order in square for pair in pairwise(order))
        assert set(behind.values()) == {1}


def test_sustained_blocks_go_there_and_back():
    assert [name for _, name in mirrored_blocks(["a", "b"], 2)] == ["a", "b", "b", "a"]
    assert list(mirrored_blocks(["a", "b", "c"], 1)) == [(0, "a"), (0, "b"), (0, "c")]
    assert list(mirrored_blocks(["a"], 0)) == []


def test_options_override_the_plan():
    plan = MeasureOptions(sustained_s=2.0, isolated_s=7.0, graphs=False).plan(GPU)
    assert (plan.block_s, plan.block_drop_s, plan.blocks, plan.isolated_s, plan.graph_replays) == (2.0, 0.5, 2, 7.0, 0)
    assert MeasureOptions(sustained_s=0.4).plan(CPU).block_drop_s == 0.2
    assert MeasureOptions(sustained_s=0.0).plan(GPU).blocks == 0


def test_by_default_a_gpu_block_is_a_second_of_which_half_is_dropped_and_quick_has_none():
    plan = MeasureOptions().plan(GPU)
    assert plan.block_s >= 1.0 and plan.block_drop_s == 0.5
    assert MeasureOptions(quick=True).plan(GPU).blocks == MeasureOptions(quick=True).plan(CPU).blocks == 0


def test_six_rivals_on_a_cpu_fit_in_eight_seconds_for_both_directions():
    assert 2 * estimated_seconds(6, CPU, MeasureOptions(), call_ms=10) < 8
    assert 2 * estimated_seconds(6, CPU, MeasureOptions(quick=True), call_ms=10) < 2
    assert estimated_seconds(6, GPU, MeasureOptions()) > estimated_seconds(6, GPU, MeasureOptions(sustained_s=0.0))
