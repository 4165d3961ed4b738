"""hopper_cuda on a Hopper card where a tile's first scores begin beside the last values of the tile before.

``pytest -m gpu tests/gpu/test_hopper_cuda_early_gpu.py``. compute-sanitizer's part is in test_hopper_gpu.py.
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

THREE, TWO, WIDE = (
    Configuration(3, 128, 4, schedule="table", query_slots=2, early=True),
    Configuration(2, 128, 4, schedule="table", query_slots=2, early=True),
    Configuration(2, 128, 2, schedule="table", query_slots=2, early=True),
)
CASES = [
    ("B16,H32,L256,D64,bf16,causal", THREE),
    ("B16,H32,L256,D64,bf16,causal", TWO),
    ("B9,H16/4,L1000,D64,fp16,causal,layout=blhd", THREE),
    ("B9,H16,L300,S333,D64,bf16,causal=bottom_right", TWO),
    ("B16,H32,L257,D64,bf16,causal,layout=qkv", THREE),
    ("B16,H16,L256,D128,bf16,causal", WIDE),
    ("B9,H16/2,L1000,D128,fp16,causal,layout=blhd", WIDE),
    ("B9,H16,L70,S33,D128,bf16,causal", WIDE),
    ("B9,H16,L500,D96,bf16,causal", dataclasses.replace(WIDE, ping_pong=False, slack=8)),
    ("B9,H16,L500,D64,bf16,causal", dataclasses.replace(TWO, cluster=2)),
    ("B9,H16,L500,S777,D64,bf16", THREE),
    ("B9,H16,L500,D64,bf16,causal", dataclasses.replace(THREE, persistent=False, schedule="arithmetic")),
]


@pytest.fixture(autouse=True)
def on_hopper(gpu: Device) -> None:
    if HopperCuda.sheet.device_reasons(gpu):
        pytest.skip("needs a Hopper card")


@pytest.mark.parametrize(("text", "configuration"), CASES)
def test_early_scores_change_nothing(text: str, configuration: Configuration, gpu: Device) -> None:
    """Bit for bit as without, each time, and right."""
    workload = Workload.parse(text)
    assert configuration.starts_early(workload)
    late, early = (
        HopperCuda().prepare_as(workload, gpu, dataclasses.replace(configuration, early=early))
        for early in (False, True)
    )
    gives_bit_for_bit(early, late, workload, gpu)


def test_early_scores_on_two_streams_and_in_a_graph(gpu: Device) -> None:
    text, configuration = CASES[0]
    workload = Workload.parse(text)
    same_on_streams_and_in_a_graph(HopperCuda().prepare_as(workload, gpu, configuration), workload, gpu)
