"""hopper_cuda on a Hopper card where tiles without a mask keep the maximum of the keys before (fixed_max).

``pytest -m gpu tests/gpu/test_hopper_cuda_fixed_gpu.py``. A kernel that hangs is ended by pytest's timeout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from attnscope.device import Device
from attnscope.implementations.hopper_cuda import HopperCuda
from attnscope.implementations.hopper_cuda.configurations import Configuration
from attnscope.inputs import Inputs, make_inputs
from attnscope.workload import Workload
from card_contract import differing, gives_bit_for_bit, misjudged, same_on_streams_and_in_a_graph
from rising_scores import RISES, all_far_below, one_far_above, rising, rising_in_range

pytestmark = pytest.mark.gpu

FOUR = Configuration(4, 64, 10, False, query_slots=2, fixed_max=True)
THREE, TURNS, WIDE, LATENT, LARGE, CUT = (
    Configuration(3, 128, 4, query_slots=2, fixed_max=True),
    Configuration(2, 128, 2, query_slots=2, fixed_max=True),
    Configuration(2, 176, 2, False, slack=8, fixed_max=True),
    Configuration(3, 80, 3, slack=8, fixed_max=True),
    Configuration(2, 80, 2, False, slack=8, fixed_max=True),
    Configuration(1, 64, 3, split=True, fixed_max=True),
)
CASES = [
    ("B8,H16,L1024,D64,bf16", FOUR),
    ("B8,H16,L1024,D64,fp16,causal", dataclasses.replace(FOUR, schedule="table", alternate=True)),
    ("B3,H16/4,L1000,S777,D64,bf16,causal=bottom_right,layout=blhd", THREE),
    ("B3,H16,L1000,S999,D64,bf16,causal=bottom_right", THREE),  # rows whose first keys are in a tile without a mask
    ("B3,H16,L1000,D64,bf16,causal,window=300", FOUR),
    ("B4,H16,L1500,D128,fp16", TURNS),
    ("B4,H16,L1500,D128,bf16,causal", dataclasses.replace(TURNS, schedule="table")),
    ("B4,H16,L1500,D128,bf16", dataclasses.replace(WIDE, split=True)),
    ("B2,H16,L1000,D192,Dv128,bf16,causal", dataclasses.replace(LATENT, schedule="table")),
    ("B2,H16,L1000,D256,bf16", LARGE),
    ("B1,H3,L100,S9000,D64,fp16", CUT),
]


def nothing(inputs: Inputs) -> None:
    """As they are."""


def some_heads_rise(inputs: Inputs) -> None:
    rising(inputs, RISES[inputs.workload.dtype], slice(2), rows=300)


def all_rise(inputs: Inputs) -> None:
    rising(inputs, RISES[inputs.workload.dtype], slice(None))


@pytest.fixture(autouse=True)
def on_hopper(gpu: Device) -> None:
    if HopperCuda.sheet.device_reasons(gpu):
        pytest.skip("needs a Hopper card")


@pytest.mark.parametrize("change", [nothing, rising_in_range, some_heads_rise, all_rise, one_far_above, all_far_below])
@pytest.mark.parametrize(("text", "configuration"), CASES)
def test_it_is_right_whatever_scores_do(
    text: str, configuration: Configuration, change: Callable[[Inputs], None], gpu: Device
) -> None:
    """On poisoned memory, as tightly as online softmax; and the same bits each time."""
    workload = Workload.parse(text)
    assert configuration.keeps_maxima(workload)
    inputs = make_inputs(workload, gpu, 3)
    change(inputs)
    prepared = HopperCuda().prepare_as(workload, gpu, configuration)
    assert not misjudged(HopperCuda(), prepared, inputs, gpu)
    first = prepared.forward(inputs)
    assert all(differing(prepared.forward(inputs), first) == [] for _ in range(20))


def test_what_is_in_doubt_everywhere_is_online_softmax_bit_for_bit(gpu: Device) -> None:
    """Each tile of rows is computed again with every maximum, so nothing is left of what was computed first."""
    workload = Workload.parse("B4,H16,L1024,D64,bf16")
    online = dataclasses.replace(THREE, fixed_max=False)
    fixed, expecting = (HopperCuda().prepare_as(workload, gpu, one) for one in (THREE, online))
    inputs = make_inputs(workload, gpu, 1)
    all_rise(inputs)
    assert differing(fixed.forward(inputs), expecting.forward(inputs)) == []


def test_fixed_maxima_on_two_streams_and_in_a_graph(gpu: Device) -> None:
    workload = Workload.parse("B4,H16,L1024,D64,bf16")
    prepared = HopperCuda().prepare_as(workload, gpu, FOUR)
    same_on_streams_and_in_a_graph(prepared, workload, gpu)
    gives_bit_for_bit(prepared, prepared, workload, gpu)
