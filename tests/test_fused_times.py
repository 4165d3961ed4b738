"""What a fused kernel is reckoned to take: tiles, traffic, the kernel PyTorch would take, the fit to the records."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from attnscope.explaining.fused_times import (
    CUDNN,
    EFFICIENT,
    FLASH,
    LAUNCH_US,
    Card,
    fused_estimate,
    kernel_us,
    kernels_for,
    load_rates,
    tiles_of_blocks,
)  # fmt: skip
from attnscope.explaining.peaks import find_peaks, link_gb_per_s, product_us
from attnscope.explaining.shapes import Problem

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PROBLEM = Problem(8, 16, 16, 1024, 1024, 64, 64, dtype="bf16", causal=False)


def card(name: str = "NVIDIA H200", capability: int = 9, *, is_amd: bool = False) -> Card:
    peaks = find_peaks(name)
    assert peaks is not None
    return Card(name, peaks, 132, capability, is_amd)


@pytest.fixture(scope="module")
def fused_rates() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fused_rates", BENCHMARKS / "fused_rates.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fused_rates"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("options", "tiles"),
    [
        ({"L": 512, "S": 512}, [4, 4, 4, 4]),
        ({"L": 512, "S": 512, "causal": True}, [1, 2, 3, 4]),
        ({"L": 512, "S": 512, "window": 128}, [1, 2, 2, 2]),
        ({"L": 512, "S": 512, "window": 129}, [1, 2, 2, 2]),
        ({"L": 512, "S": 512, "window": 130}, [1, 2, 3, 3]),
        ({"L": 1, "S": 300}, [3]),
        ({"L": 129, "S": 64, "causal": True}, [1, 1]),
        ({"L": 0, "S": 64}, []),
    ],
)  # fmt: skip
def test_tiles_that_a_mask_hides_whole_are_skipped(options: dict[str, int], tiles: list[int]) -> None:
    assert tiles_of_blocks(**options) == tiles


def test_the_kernel_that_pytorch_would_take() -> None:
    assert kernels_for(PROBLEM, "forward", card()) == (CUDNN, FLASH, EFFICIENT)
    assert kernels_for(PROBLEM, "forward", card("NVIDIA A100-SXM4-80GB", 8)) == (FLASH, EFFICIENT)
    assert kernels_for(PROBLEM, "forward", card("Tesla V100-SXM2-16GB", 7)) == (EFFICIENT,)
    assert kernels_for(replace(PROBLEM, D=256), "forward", card()) == (FLASH, EFFICIENT)
    assert kernels_for(replace(PROBLEM, dtype="fp32"), "forward", card()) == (EFFICIENT,)
    assert kernels_for(replace(PROBLEM, dtype="fp32", H_kv=4), "forward", card()) == ()
    assert kernels_for(replace(PROBLEM, dtype="fp64"), "forward", card()) == ()
    assert kernels_for(PROBLEM, "forward", card("AMD Instinct MI300X", 9, is_amd=True)) == (FLASH, EFFICIENT)


def test_more_to_do_takes_longer() -> None:
    def us(problem: Problem = PROBLEM, direction: str = "forward", window: int | None = None) -> float:
        estimate = fused_estimate(problem, direction, card(), window)
        assert estimate is not None
        return estimate.us

    whole = us()
    causal = us(replace(PROBLEM, causal=True))
    assert whole > causal > us(window=128) > LAUNCH_US
    assert 0.5 < causal / whole < 0.65  # 36 of 64 tiles and the blocks' ramps
    assert us(direction="backward") > 2 * whole
    assert us(replace(PROBLEM, B=16)) == pytest.approx(2 * whole - LAUNCH_US)
    assert us(replace(PROBLEM, dtype="fp32")) > 5 * whole
    one_block = us(replace(PROBLEM, B=1, H=1, H_kv=1, L=128))
    assert one_block == pytest.approx(us(replace(PROBLEM, B=1, H=8, H_kv=8, L=128)))  # it has the card to itself


def test_what_is_not_known_is_not_estimated() -> None:
    assert fused_estimate(Problem(dtype="bf16"), "forward", card()) is None
    assert fused_estimate(replace(PROBLEM, dtype="fp64"), "forward", card()) is None
    assert kernel_us(replace(PROBLEM, L=None), "forward", card(), FLASH) is None


def test_cards_of_one_chip_share_their_rates_and_others_take_the_usual() -> None:
    def per_peak(one: Card) -> float:
        us = kernel_us(replace(PROBLEM, L=4096, S=4096), "forward", one, FLASH)
        assert us is not None
        return (us - LAUNCH_US) * one.peaks.half_tflop_per_s

    assert per_peak(card()) == pytest.approx(per_peak(card("NVIDIA H100 80GB HBM3")))
    assert per_peak(card("NVIDIA A100-SXM4-80GB", 8)) < per_peak(card())  # FlashAttention-2 was made for it


def test_a_product_is_bound_by_its_flops_or_its_traffic() -> None:
    peaks = find_peaks("NVIDIA H200")
    assert peaks is not None
    square, thin = (1, 8192, 8192, 8192), (96, 3137, 64, 3137)
    assert product_us(square, 2, peaks.half_tflop_per_s, peaks) == pytest.approx(2 * 8192**3 / 0.73 / 989e6)
    moved = 2 * 96 * (2 * 3137 * 64 + 3137**2)
    assert product_us(thin, 2, peaks.half_tflop_per_s, peaks) == pytest.approx(moved / 0.89 / 4800e3)


def test_the_link_to_the_host_goes_by_the_card() -> None:
    links = [link_gb_per_s(name) for name in ("NVIDIA H200", "Tesla V100-SXM2", "NVIDIA A100", None, "NVIDIA GB200")]
    assert [link and link[1] for link in links] == ["PCIe 5", "PCIe 3", "PCIe 4", "PCIe 4, assumed", None]


def test_the_rates_are_those_of_the_records(fused_rates: ModuleType) -> None:
    assert fused_rates.main(["--check"]) == 0
    rates = load_rates()
    assert {(rate.kernel, rate.direction) for rate in rates if rate.dtype == "half"} == {
        (kernel, direction) for kernel in (CUDNN, FLASH, EFFICIENT) for direction in ("forward", "backward")
    }
    assert all(0 < rate.share < 1 and rate.largest_error <= 0.25 for rate in rates)


def test_a_fit_finds_the_rate_that_made_its_points(fused_rates: ModuleType) -> None:
    true = next(rate for rate in load_rates() if rate.kernel == CUDNN)
    points = []
    for B, L in ((8, 1024), (64, 256), (2, 4096), (128, 128)):
        problem = replace(PROBLEM, B=B, L=L, S=L)
        us = kernel_us(problem, true.direction, card(), CUDNN, rate=true)
        points.append(fused_rates.Point(card(), CUDNN, true.direction, problem, us))
    (found,) = fused_rates.fit(points)
    assert (found.share, found.ramp_tiles, found.largest_error) == (true.share, true.ramp_tiles, 0.0)


def test_out_of_date_rates_are_told(
    fused_rates: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "src" / "attnscope" / "explaining" / "fused_rates.json"
    path.parent.mkdir(parents=True)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    assert fused_rates.main(["--check"], tmp_path) == 1 and not path.exists()
    assert "out of date" in capsys.readouterr().out
    assert fused_rates.main([], tmp_path) == 0 and fused_rates.main(["--check"], tmp_path) == 0
