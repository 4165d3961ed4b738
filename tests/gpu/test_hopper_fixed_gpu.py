"""hopper's Gluon kernel on a card of 9.0 where a row's maximum is that of its first tile of keys (fixed_max).

``pytest -m gpu tests/gpu/test_hopper_fixed_gpu.py``. A kernel that hangs is ended by pytest's timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attnscope.device import Device
from attnscope.implementation import Prepared
from attnscope.implementations.hopper import Hopper, Plan, configurations
from attnscope.implementations.hopper.configurations import Configuration
from attnscope.implementations.hopper.entries import Entry
from attnscope.inputs import Inputs, make_inputs
from attnscope.workload import Workload
from card_contract import differing, gives_bit_for_bit, misjudged, same_on_streams_and_in_a_graph
from rising_scores import RISES, all_far_below, one_far_above, rising

pytestmark = pytest.mark.gpu

TEXTS = [
    f"{sizes},{dtype},{option}"
    for dtype in ("bf16", "fp16")
    for sizes, option in (
        ("B3,H8,L1000,S1100,D64", "mask=bool:Bx1xLxS"),
        ("B2,H8/2,L1000,S1100,D128", "mask=bool:1xHxLxS,causal=bottom_right"),
        ("B3,H8,L1000,S1024,D64", f"bias={dtype}:1xHxLxS"),
        ("B2,H8/2,L1000,S1024,D128", f"bias={dtype}:Bx1xLxS"),
        ("B2,H8,L1000,S1024,D64", "bias=fp32:1x1xLxS"),
        ("B2,H8,L1000,S1024,D128", "bias=fp32:1x1xLxS"),
    )
] + ["B2,H8,L700,S800,D256,bf16,mask=bool:1x1xLxS"]


def nothing(inputs: Inputs) -> None:
    """As they are."""


def as_walked(inputs: Inputs) -> None:
    """Under a mask tiles are walked from first to last: the great scores go to the last keys."""
    if inputs.mask is not None:
        inputs.k[:] = inputs.k.flip(2)


def some_heads_rise(inputs: Inputs) -> None:
    rising(inputs, RISES[inputs.workload.dtype], slice(2), rows=300)
    as_walked(inputs)


def all_rise(inputs: Inputs) -> None:
    rising(inputs, RISES[inputs.workload.dtype], slice(None))
    as_walked(inputs)


def last_far_above(inputs: Inputs) -> None:
    one_far_above(inputs)
    as_walked(inputs)


def no_key_at_first(inputs: Inputs) -> None:
    """All scores are far below 0, and some rows see none of the first keys, or no key at all."""
    all_far_below(inputs)
    if inputs.mask is not None:
        inputs.mask[..., 10:200, :128] = False
        inputs.mask[..., 190:220, :] = False


@pytest.fixture(autouse=True)
def on_hopper(gpu: Device) -> None:
    if gpu.capability != (9, 0):
        pytest.skip("needs compute capability 9.0")


def fixed_candidates(workload: Workload) -> list[Configuration]:
    return [one for one in configurations.candidates(workload) if one.fixed_max]


def prepare(workload: Workload, gpu: Device, one: Configuration) -> Prepared:
    assert Plan(workload, one, gpu.multiprocessors or 0).fixed == one.fixed_max
    return Hopper().prepare_as(workload, gpu, Entry(one))


@pytest.mark.parametrize("change", [nothing, some_heads_rise, all_rise, last_far_above, no_key_at_first])
@pytest.mark.parametrize("text", TEXTS)
def test_it_is_right_whatever_scores_do(text: str, change: Callable[[Inputs], None], gpu: Device) -> None:
    """On poisoned memory, as tightly as online softmax; and the same bits each time. Each candidate."""
    workload = Workload.parse(text)
    inputs = make_inputs(workload, gpu, 3)
    change(inputs)
    assert fixed_candidates(workload)
    for one in fixed_candidates(workload):
        prepared = prepare(workload, gpu, one)
        assert not misjudged(Hopper(), prepared, inputs, gpu), one
        first = prepared.forward(inputs)
        assert all(differing(prepared.forward(inputs), first) == [] for _ in range(10))


@pytest.mark.parametrize("option", ["mask=bool:1x1xLxS", "bias=bf16:1xHxLxS"])
def test_what_is_in_doubt_everywhere_is_online_softmax(option: str, gpu: Device) -> None:
    """Each tile of rows is computed again with every maximum, and nothing is left of what was computed first; by
    blocks of one tile, and by blocks of many, Q in one slot and in two."""
    workload = Workload.parse(f"B8,H16,L1024,D64,bf16,{option}")
    inputs = make_inputs(workload, gpu, 1)
    all_rise(inputs)
    one = fixed_candidates(workload)[0]
    for changed in (one, replace(one, persistent=True, balanced=False), replace(one, groups=2, q_slots=2, slots=5,
                    persistent=True, producer_registers=24, consumer_registers=240)):  # fmt: skip
        output = prepare(workload, gpu, changed).forward(inputs)
        expected = prepare(workload, gpu, replace(changed, fixed_max=False)).forward(inputs)
        assert torch.allclose(output.out, expected.out, rtol=2**-7, atol=1e-3), changed  # a last digit at most
        assert torch.allclose(output.lse, expected.lse, rtol=1e-6), changed


@pytest.mark.parametrize("value", [-1e4, -1e9, -1e30, 3e38, -3.3e38])
def test_a_bias_as_large_as_numbers_go(value: float, gpu: Device) -> None:
    """Rows of nothing else see every key alike; their first tile's maximum has no place in log2."""
    workload = Workload.parse("B1,H4,L256,S512,D64,bf16,bias=fp32:1xHxLxS")
    inputs = make_inputs(workload, gpu, 2)
    assert inputs.bias is not None
    inputs.q.zero_()
    inputs.bias[:, :, :40] = value
    inputs.bias[:, :, 40:90, 128:] = value
    found = fixed_candidates(workload)
    for one in [*found, *(replace(one, fixed_max=False) for one in found)]:
        output = prepare(workload, gpu, one).forward(inputs)
        weights = inputs.bias.double().softmax(-1).expand(1, 4, 256, 512)
        assert (output.out.double() - weights @ inputs.v.double()).abs().max() < 2e-2, one
        assert torch.allclose(
            output.lse.double(), inputs.bias.double().logsumexp(-1).expand(1, 4, 256), rtol=1e-6, atol=1e-4
        )


@pytest.mark.parametrize("option", ["mask=bool:1x1xLxS", "bias=bf16:1xHxLxS"])
def test_fixed_maxima_on_two_streams_and_in_a_graph(option: str, gpu: Device) -> None:
    workload = Workload.parse(f"B4,H16,L1024,D64,bf16,{option}")
    prepared = prepare(workload, gpu, fixed_candidates(workload)[0])
    same_on_streams_and_in_a_graph(prepared, workload, gpu)
    gives_bit_for_bit(prepared, prepared, workload, gpu)
