"""Stage 6: matrix rates and bandwidth of known cards, for estimates of what a slower unit costs.

Dense rates from the makers' data sheets. They only enter estimates, and a finding that uses them says so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peaks:
    """Dense rates of one card: CUDA cores in fp32, tensor cores in TF32 and 16 bit; memory bandwidth."""

    fp32_tflop_per_s: float
    tf32_tflop_per_s: float
    half_tflop_per_s: float
    gb_per_s: float
    source: str


# A part of the card's name -> its rates; the first match wins.
PEAKS: tuple[tuple[str, Peaks], ...] = (
    ("H200", Peaks(67, 495, 989, 4800, "NVIDIA H200 data sheet, SXM, dense")),
    ("H100 PCIe", Peaks(51, 378, 756, 2000, "NVIDIA H100 data sheet, PCIe, dense")),
    ("H100", Peaks(67, 495, 989, 3350, "NVIDIA H100 data sheet, SXM, dense")),
    ("A100-SXM4-80GB", Peaks(19.5, 156, 312, 2039, "NVIDIA A100 80 GB data sheet, SXM, dense")),
    ("A100-PCIE-40GB", Peaks(19.5, 156, 312, 1555, "NVIDIA A100 40 GB data sheet, PCIe, dense")),
    ("A100", Peaks(19.5, 156, 312, 1555, "NVIDIA A100 40 GB data sheet, dense")),
    ("V100", Peaks(15.7, 15.7, 125, 900, "NVIDIA V100 data sheet, SXM2; it has no TF32")),
    ("MI300X", Peaks(163.4, 653.7, 1307.4, 5300, "AMD Instinct MI300X data sheet, dense")),
)


# What well-shaped work reaches of a data sheet's rate, for estimates: large products and large copies on our cards.
SUSTAINED_MATRIX = 0.73
SUSTAINED_BANDWIDTH = 0.89


def product_us(sizes: tuple[int, int, int, int], item_bytes: int, tflop_per_s: float, peaks: Peaks) -> float:
    """About what a product of (batch, rows, inner, columns) takes on a unit of that data sheet rate, in microseconds:
    its FLOPs, at least the traffic of its three matrices."""
    n, rows, inner, columns = sizes
    flops = 2 * n * rows * inner * columns
    moved = item_bytes * n * (rows * inner + inner * columns + rows * columns)
    return max(flops / (SUSTAINED_MATRIX * tflop_per_s) / 1e6, moved / (SUSTAINED_BANDWIDTH * peaks.gb_per_s) / 1e3)


def link_gb_per_s(name: str | None) -> tuple[float, str]:
    """About what a copy from pinned memory reaches on the card's link to the host, in GB/s, and the link's name."""
    if any(part in (name or "") for part in ("H100", "H200", "B200", "MI300")):
        return 50.0, "PCIe 5"
    return (12.0, "PCIe 3") if "V100" in (name or "") else (22.0, "PCIe 4")


def find_peaks(name: str | None) -> Peaks | None:
    """The rates of the card of that name; None where the table does not hold it."""
    return next((peaks for part, peaks in PEAKS if name and part in name), None)
