"""Stage 6: matrix rates and bandwidth of known cards, for estimates of what a slower unit costs.

Dense rates from the makers' data sheets. They only enter estimates, and a finding that uses them says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Peaks:
    """Dense rates of one card: CUDA cores in fp32, tensor cores in TF32 and 16 bit; memory bandwidth."""

    fp32_tflop_per_s: float
    tf32_tflop_per_s: float
    half_tflop_per_s: float
    gb_per_s: float
    source: str


_HOPPER = (67, 495, 989)
_AMPERE = (19.5, 156, 312)
_CDNA3 = (163.4, 653.7, 1307.4)
# A pattern of the card's name -> its rates; the first match wins. A variant whose rates differ stands before its
# family, and a name that only begins like one (A1000, H20-3e) matches none.
PEAKS: tuple[tuple[str, Peaks], ...] = (
    (r"\bGH200 480GB", Peaks(67, 494, 990, 4000, "NVIDIA GH200 data sheet, HBM3, dense")),
    (r"\bGH200\b", Peaks(67, 494, 990, 4900, "NVIDIA GH200 data sheet, HBM3e, dense")),
    (r"\bH200 NVL", Peaks(60, 418, 836, 4800, "NVIDIA H200 data sheet, NVL, dense")),
    (r"\bH200\b", Peaks(*_HOPPER, 4800, "NVIDIA H200 data sheet, SXM, dense")),
    (r"\bH[18]00 PCIe", Peaks(51, 378, 756, 2000, "NVIDIA H100 data sheet, PCIe, dense")),
    (r"\bH100 NVL", Peaks(60, 418, 836, 3938, "NVIDIA H100 data sheet, NVL, dense")),
    (r"\bH[18]00\b", Peaks(*_HOPPER, 3350, "NVIDIA H100 data sheet, SXM, dense")),
    (r"\bH20\b(?!-)", Peaks(44, 74, 148, 4000, "NVIDIA H20 data sheet, dense")),
    (r"\bGB200\b", Peaks(80, 1250, 2500, 8000, "NVIDIA GB200 data sheet, dense")),
    (r"\bB200\b", Peaks(75, 1125, 2250, 8000, "NVIDIA HGX B200 data sheet, dense")),
    (r"\bA[18]00-SXM4-80GB", Peaks(*_AMPERE, 2039, "NVIDIA A100 80 GB data sheet, SXM, dense")),
    (r"\bA[18]00 80GB PCIe", Peaks(*_AMPERE, 1935, "NVIDIA A100 80 GB data sheet, PCIe, dense")),
    (r"\bA[18]00-PCIE-40GB", Peaks(*_AMPERE, 1555, "NVIDIA A100 40 GB data sheet, PCIe, dense")),
    (r"\bA[18]00\b", Peaks(*_AMPERE, 1555, "NVIDIA A100 40 GB data sheet, dense")),
    (r"\bA30\b", Peaks(10.3, 82, 165, 933, "NVIDIA A30 data sheet, dense")),
    (r"\bA40\b", Peaks(37.4, 74.8, 149.7, 696, "NVIDIA A40 data sheet, dense")),
    (r"\bA10\b", Peaks(31.2, 62.5, 125, 600, "NVIDIA A10 data sheet, dense")),
    (r"\bL40S\b", Peaks(91.6, 183, 362, 864, "NVIDIA L40S data sheet, dense")),
    (r"\bL40\b", Peaks(90.5, 90.5, 181, 864, "NVIDIA L40 data sheet, dense")),
    (r"\bL4\b", Peaks(30.3, 60, 121, 300, "NVIDIA L4 data sheet, dense")),
    (r"\bRTX A6000$", Peaks(38.7, 77.4, 154.8, 768, "NVIDIA RTX A6000 data sheet, dense")),
    (r"\bRTX 4090$", Peaks(82.6, 82.6, 165.2, 1008, "NVIDIA Ada white paper, RTX 4090, fp32 sums, dense")),
    (r"\bRTX 3090$", Peaks(35.6, 35.6, 71, 936, "NVIDIA GA102 white paper, RTX 3090, fp32 sums, dense")),
    (r"\bV100S-PCI", Peaks(16.4, 16.4, 130, 1134, "NVIDIA V100S data sheet, PCIe; it has no TF32")),
    (r"\bV100-PCI", Peaks(14, 14, 112, 900, "NVIDIA V100 data sheet, PCIe; it has no TF32")),
    (r"\bV100\b", Peaks(15.7, 15.7, 125, 900, "NVIDIA V100 data sheet, SXM2; it has no TF32")),
    (r"\bT4\b", Peaks(8.1, 8.1, 65, 320, "NVIDIA T4 data sheet; it has no TF32")),
    (r"\bMI300X\b", Peaks(*_CDNA3, 5300, "AMD Instinct MI300X data sheet, dense")),
    (r"\bMI325X\b", Peaks(*_CDNA3, 6000, "AMD Instinct MI325X data sheet, dense")),
    (r"\bMI300A\b", Peaks(122.6, 490.3, 980.6, 5300, "AMD Instinct MI300A data sheet, dense")),
    (r"\bMI350X\b", Peaks(144.2, 144.2, 2306.9, 8000, "AMD Instinct MI350X data sheet, dense; it has no TF32")),
    (r"\bMI355X\b", Peaks(157.3, 157.3, 2516.6, 8000, "AMD Instinct MI355X data sheet, dense; it has no TF32")),
)
PART_OF_A_CARD = re.compile(r"\bMIG\b|\bGRID\b|\bvGPU\b|-\d+[QC]\b")  # a slice, of which no data sheet speaks
LINKS = (
    (re.compile(r"\bG[HB][1-3]00\b"), None),
    (re.compile(r"\b(H100|H200|H800|H20|B200|B300|MI3\d\d[XA])\b|\bRTX 50\d\d"), (50.0, "PCIe 5")),
    (re.compile(r"\b(V100S?|T4|P100)\b"), (12.0, "PCIe 3")),
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


def link_gb_per_s(name: str | None) -> tuple[float, str] | None:
    """About what a copy from pinned memory reaches on the card's link to the host, in GB/s, and the link's name; None
    for a card that shares a module with its host, where the link is another."""
    usual = (22.0, "PCIe 4" if name and not name.startswith("unnamed") else "PCIe 4, assumed")
    return next((link for pattern, link in LINKS if pattern.search(name or "")), usual)


def find_peaks(name: str | None) -> Peaks | None:
    """The rates of the card of that name; None where the table does not hold it, or where it is a slice of a card."""
    if not name or PART_OF_A_CARD.search(name):
        return None
    return next((peaks for pattern, peaks in PEAKS if re.search(pattern, name)), None)
