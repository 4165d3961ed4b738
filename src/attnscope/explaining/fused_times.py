"""Stage 6: about how long a fused kernel takes for a problem, from its tiles and what such kernels reach on a card.

Reads a Problem, Peaks and the rates that benchmarks/fused_rates.py fitted to recorded runs; writes microseconds. Pure;
imports neither torch nor an implementation.

A fused kernel works in blocks of 128 query rows over tiles of 128 keys. Tiles that a causal mask or a window hides
whole are skipped; a block also fills and drains its pipeline, which costs as much as ``ramp_tiles`` tiles. Time is the
tiles' FLOPs at ``share`` of the data sheet's rate, spread over the multiprocessors (at least the longest block's), at
least the tensors' traffic, and one launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from attnscope.explaining.peaks import SUSTAINED_BANDWIDTH, Peaks
from attnscope.explaining.shapes import Problem

TILE = 128
LAUNCH_US = 3.0  # of a kernel that does nothing, on recent cards
BACKWARD_PRODUCTS = 2.5  # times the forward's: five products of two
HALF = ("bf16", "fp16")
RATES_FILE = Path(__file__).with_name("fused_rates.json")
CUDNN, FLASH, EFFICIENT = "cuDNN", "flash", "efficient"


class Rate(msgspec.Struct, frozen=True):
    """What one kernel reaches for one direction, dtype class (``half`` or ``fp32``) and head dim on one card."""

    card: str
    kernel: str
    direction: str
    dtype: str
    head_dim: int
    share: float
    ramp_tiles: float
    largest_error: float


# Cards of one chip reach the same share of their data sheets.
SAME_CHIP = (("H200", "H100", "GH200"),)
# Where nothing was recorded: FlashAttention-2's on an A100, which the profiling article's time agrees with.
ELSEWHERE = {"forward": (0.5, 1.0), "backward": (0.42, 2.0)}
ELSEWHERE_EFFICIENT = 0.6  # of those: the efficient kernel is slower
ELSEWHERE_AMD = 0.7


@dataclass(frozen=True)
class Card:
    """What an estimate needs of a card."""

    name: str
    peaks: Peaks
    multiprocessors: int
    capability: int | None
    is_amd: bool = False


@dataclass(frozen=True)
class Estimate:
    """A time and the kernel that would take it."""

    us: float
    kernel: str


@cache
def load_rates() -> tuple[Rate, ...]:
    """The fitted rates that ship with the package."""
    return tuple(msgspec.json.decode(RATES_FILE.read_bytes(), type=list[Rate]))


def kernels_for(problem: Problem, direction: str, card: Card) -> tuple[str, ...]:
    """The fused kernels of PyTorch that take the problem without a mask tensor, the one it prefers first."""
    largest = max(problem.D or 0, problem.D_v or 0)
    if problem.dtype == "fp32":
        return () if problem.H_kv not in (None, problem.H) else (EFFICIENT,)
    if problem.dtype not in HALF:
        return ()
    capability = card.capability or 0
    found = []
    if capability in (9, 10) and not card.is_amd and largest <= TILE and largest % 8 == 0:
        found.append(CUDNN)
    if (capability >= 8 or card.is_amd) and largest <= 256:
        found.append(FLASH)
    if problem.H_kv in (None, problem.H):
        found.append(EFFICIENT)
    return tuple(found)


def fused_estimate(
    problem: Problem, direction: str, card: Card, window: int | None = None, *, masked: bool = False
) -> Estimate | None:
    """The time of the kernel that PyTorch would take; None where sizes are unknown or no fused kernel fits.

    ``masked``: a mask or bias tensor comes with it, which flash does not take. ``window`` limits each row to so many
    keys (a sliding window whose mask the problem no longer carries).
    """
    fitting = (kernel for kernel in kernels_for(problem, direction, card) if kernel != FLASH or not masked)
    kernel = next(fitting, None)
    us = None if kernel is None else kernel_us(problem, direction, card, kernel, window)
    return None if us is None or kernel is None else Estimate(us, kernel)


def kernel_us(
    problem: Problem, direction: str, card: Card, kernel: str, window: int | None = None, rate: Rate | None = None
) -> float | None:
    """The time of one kernel for a problem, in microseconds; None where sizes are unknown. ``rate`` is the one to use
    instead of the recorded one."""
    moved = problem.least_bytes()
    if not problem.shaped or moved is None:
        return None
    share, ramp = (rate.share, rate.ramp_tiles) if rate else _share(problem, direction, card, kernel)
    L, S, D = problem.L or 0, problem.S or 0, problem.D or 0
    per_block = tiles_of_blocks(L, S, causal=bool(problem.causal), window=window)
    heads = (problem.B or 0) * (problem.H or 0)
    half = problem.dtype in HALF
    peak = card.peaks.half_tflop_per_s if half else card.peaks.fp32_tflop_per_s
    backward = direction == "backward"
    flops_per_tile = 2 * TILE * min(TILE, S) * (D + (problem.D_v or D)) * (BACKWARD_PRODUCTS if backward else 1)
    multiprocessors = max(card.multiprocessors, 1)
    all_tiles = heads * sum(tiles + ramp for tiles in per_block)
    longest = max((tiles + ramp for tiles in per_block), default=0)
    busiest = max(all_tiles / multiprocessors, longest)
    compute = busiest * flops_per_tile * multiprocessors / (share * peak) / 1e6
    traffic = moved * (2 if backward else 1) / (SUSTAINED_BANDWIDTH * card.peaks.gb_per_s) / 1e3
    return LAUNCH_US + max(compute, traffic)


def tiles_of_blocks(L: int, S: int, *, causal: bool = False, window: int | None = None) -> list[int]:
    """How many tiles of keys each block of query rows visits. Causal is aligned to the top left."""
    found = []
    for first in range(0, L, TILE):
        last = min(first + TILE, L)
        end = min(S, last) if causal or window is not None else S
        begin = max(first - window + 1, 0) if window is not None else 0
        found.append(max(math.ceil(end / TILE) - begin // TILE, 0))
    return found


def _same_chip(recorded: str, name: str) -> bool:
    family = next((chips for chips in SAME_CHIP if any(chip in recorded for chip in chips)), (recorded,))
    return any(chip in name for chip in family)


def _share(problem: Problem, direction: str, card: Card, kernel: str) -> tuple[float, float]:
    """(share of the peak, ramp in tiles): recorded on this card where it was, else the usual."""
    kind = "half" if problem.dtype in HALF else "fp32"
    known = [
        rate for rate in load_rates()
        if _same_chip(rate.card, card.name) and (rate.kernel, rate.direction, rate.dtype) == (kernel, direction, kind)
    ]  # fmt: skip
    if known:
        nearest = min(known, key=lambda rate: abs(rate.head_dim - (problem.D or 0)))
        return nearest.share, nearest.ramp_tiles
    share, ramp = ELSEWHERE[direction]
    share *= ELSEWHERE_AMD if card.is_amd else 1
    return share * (ELSEWHERE_EFFICIENT if kernel == EFFICIENT and kind == "half" else 1), ramp
