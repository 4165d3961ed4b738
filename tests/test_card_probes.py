"""What the probes of a card look for, on a CPU: right tensors, wrong ones, masks with and without a bond."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnscope import card_probes
from attnscope.card_probes import SEEDS, default_and_its_cudnn, repeat_heads, variance_ratios, wrong_rows
from attnscope.device import Device, read_environment
from attnscope.fault_probes import FAULTS
from attnscope.faults import run_probes
from attnscope.implementation import find
from attnscope.inputs import make_inputs
from attnscope.reference import compute_attention
from attnscope.workload import Workload


def test_rows_with_another_row_s_mask_are_told(cpu: Device) -> None:
    inputs = make_inputs(Workload.parse("B1,H1,L64,D16,bf16,mask=bool:1x1xLxS"), cpu)
    out = compute_attention(inputs, backward=False).out.to(torch.bfloat16)
    assert wrong_rows(out, inputs, list(range(64))) == []
    shifted = replace(inputs, mask=inputs.mask.roll(1, 2))  # type: ignore[union-attr]
    out[0, 0, 40:] = compute_attention(shifted, backward=False).out.to(torch.bfloat16)[0, 0, 40:]
    assert wrong_rows(out, inputs, [0, 39, 50, 63]) == [50, 63]


def test_repeated_heads_are_the_same_attention(cpu: Device) -> None:
    inputs = make_inputs(Workload.parse("B2,H6/2,L9,D8,fp32,causal"), cpu)
    repeated = repeat_heads(inputs)
    assert repeated.workload.group == 1
    outs = [compute_attention(x, backward=False).out for x in (inputs, repeated)]
    assert torch.allclose(*outs)


@pytest.mark.parametrize(
    ("shared", "related"),
    [((), set()), ((1, 2), {"heads"}), ((3,), {"rows"}), ((4,), {"keys"}), ((0,), {"seeds"})],
)  # fmt: skip
def test_masks_that_are_one_mask_show_where(shared: tuple[int, ...], related: set[str]) -> None:
    shape = [1 if dim in shared else n for dim, n in enumerate((SEEDS, 2, 4, 64, 64))]
    kept = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) >= 0.25).expand(SEEDS, 2, 4, 64, 64)
    ratios = variance_ratios(kept, 0.25)
    off = {name for name, ratio in ratios.items() if abs(ratio - 1) > card_probes.RELATED}
    assert off >= related and bool(off) == bool(related)
    for name in related:  # all of n alike: n times the variance
        assert ratios[name] == max(ratios.values()) and ratios[name] == pytest.approx(
            {"heads": 8, "rows": 64, "keys": 64, "seeds": SEEDS}[name], rel=0.05
        )


@pytest.mark.parametrize(
    ("wheel", "loaded", "outcome"),
    [
        (("nvidia-cudnn-cu13", "9.19.0.56"), "9.19.0", "absent"),
        (("nvidia-cudnn-cu13", "9.19.0.56"), "9.1.0", "observed"),
        (None, None, "absent"),
    ],
)
def test_another_cudnn_than_the_wheel_s_is_observed(
    wheel: tuple[str, str] | None, loaded: str | None, outcome: str, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_probes, "cudnn_wheel", lambda: wheel)
    here = replace(read_environment(), cudnn_loaded=loaded)
    monkeypatch.setattr(card_probes, "read_environment", lambda: here)
    seen = default_and_its_cudnn(find("sdpa_auto"), cpu)
    assert seen.outcome == outcome and "takes sdpa_" in seen.detail and str(loaded or "none") in seen.detail


def test_what_only_a_card_can_show_is_skipped_on_a_cpu(cpu: Device) -> None:
    for fault in FAULTS:
        if fault.devices == ("cuda",):
            assert fault.try_on(find("sdpa_auto"), cpu).outcome == "skipped"


@pytest.mark.gpu
@pytest.mark.parametrize("fault_id", ["W4", "W6", "W7", "W8", "W22", "S1", "S3", "S4", "A2", "A3", "A4", "A5", "A6"])
def test_each_fault_of_a_card_has_an_outcome_there(gpu: Device, fault_id: str) -> None:
    records = run_probes(gpu, faults=[fault for fault in FAULTS if fault.id == fault_id])
    told = [record for record in records if record.outcome != "skipped"]
    assert told, [record.detail for record in records]
    print(*(f"{r.id} {r.implementation} {r.outcome}: {r.detail}" for r in told), sep="\n")
