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


def find_peaks(name: str | None) -> Peaks | None:
    """The rates of the card of that name; None where the table does not hold it."""
    return next((peaks for part, peaks in PEAKS if name and part in name), None)
