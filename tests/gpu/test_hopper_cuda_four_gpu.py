"""hopper_cuda on a Hopper card with four groups a block, and with groups that change places every tile of rows.

``pytest -m gpu tests/gpu/test_hopper_cuda_four_gpu.py``. A kernel that hangs is ended by pytest's timeout.
"""

from __future__ import annotations

import dataclasses

import pytest

from attnscope.device import Device
from attnscope.implementations.hopper_cuda import HopperCuda
from attnscope.implementations.hopper_cuda.configurations import Configuration
from attnscope.workload import Workload
from card_contract import gives_bit_for_bit, same_on_streams_and_in_a_graph

pytestmark = pytest.mark.gpu

FOUR = Configuration(4, 64, 10, False, schedule="table", query_slots=2, alternate=True)
EARLY, TURNS, PLAIN, TWO, WIDE = (
    dataclasses.replace(FOUR, early=True),
    dataclasses.replace(FOUR, ping_pong=True),
    dataclasses.replace(FOUR, schedule="arithmetic", alternate=False),
    Configuration(2, 64, 4, schedule="table", query_slots=2),
    Configuration(2, 64, 5, False, schedule="table", query_slots=2, alternate=True),
)
CASES = [
    ("B64,H16,L256,D64,bf16,causal", FOUR),
    ("B64,H16,L256,D64,bf16,causal", EARLY),
    ("B64,H16,L256,D64,bf16,causal", TURNS),
    ("B32,H32,L512,D64,bf16,causal", FOUR),
    ("B32,H12,L512,D64,bf16", PLAIN),
    ("B32,H12,L512,D64,bf16", dataclasses.replace(PLAIN, ping_pong=True)),
    ("B9,H16/4,L1000,D64,fp16,causal,layout=blhd", FOUR),
    ("B9,H16/4,L1000,D64,fp16,causal,layout=blhd", EARLY),
    ("B9,H16,L300,S333,D64,bf16,causal=bottom_right", FOUR),
    ("B9,H16,L300,S33,D64,bf16,causal=bottom_right", FOUR),  # many rows see nothing
    ("B16,H32,L257,D64,bf16,causal,layout=qkv", FOUR),
    ("B9,H16,L500,D64,bf16,causal,window=70", FOUR),
    ("B9,H16,L130,S777,D40,bf16", PLAIN),  # two groups have no rows
    ("B9,H16,L500,D64,bf16,causal", dataclasses.replace(FOUR, stages=3, query_slots=1, slack=8)),
    ("B9,H16,L500,D64,bf16,causal", dataclasses.replace(FOUR, persistent=False, schedule="arithmetic")),
    ("B1,H32,L512,D128,bf16,causal", WIDE),
    ("B9,H16/2,L1000,D128,fp16,causal,layout=blhd", WIDE),
]


@pytest.fixture(autouse=True)
def on_hopper(gpu: Device) -> None:
    if HopperCuda.sheet.device_reasons(gpu):
        pytest.skip("needs a Hopper card")


@pytest.mark.parametrize(("text", "configuration"), CASES)
def test_four_groups_give_what_two_give(text: str, configuration: Configuration, gpu: Device) -> None:
    """Bit for bit as two groups that keep their places, each time, and right."""
    workload = Workload.parse(text)
    two = dataclasses.replace(TWO, slack=configuration.slack, stages=2)
    expecting, prepared = (HopperCuda().prepare_as(workload, gpu, one) for one in (two, configuration))
    gives_bit_for_bit(prepared, expecting, workload, gpu)


def test_four_groups_on_two_streams_and_in_a_graph(gpu: Device) -> None:
    workload = Workload.parse(CASES[0][0])
    same_on_streams_and_in_a_graph(HopperCuda().prepare_as(workload, gpu, FOUR), workload, gpu)
