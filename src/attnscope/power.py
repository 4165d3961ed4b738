"""Stage 4: clocks, temperature, throttle reasons and energy, sampled through NVML while something runs.

Writes Conditions. A missing library, an old driver or a machine that refuses gives None, never an exception.
Imports no later stage; torch only to find out which card is meant.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from attnscope.device import Device
from attnscope.units import median

PERIOD_S = 0.01

# NVML's bits (nvml.h, nvmlClocksEventReason*); idle and "none" are no throttling.
THROTTLE_WORDS = {
    0x002: "application clocks setting",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clocks setting",
}


@dataclass(frozen=True)
class Reading:
    """One look at the card, at ``at_s`` of the host's performance counter."""

    at_s: float
    energy_mj: int | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle_bits: int | None = None


@dataclass(frozen=True)
class Conditions:
    """What held over some windows of time. ``power_from_energy`` tells a counter's slope from NVML's own average."""

    power_w: float | None = None
    power_from_energy: bool = False
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] = ()


Reader = Callable[[], Reading]


def conditions_in(readings: Sequence[Reading], windows: Sequence[tuple[float, float]]) -> Conditions:
    """Medians over the readings inside ``windows`` (begin_s, end_s); the reasons are all that were ever seen.

    Power is the slope of the energy counter between its first and last step inside a window, because the counter
    moves only every 20 to 100 ms; the mean over windows, each weighed by its time. Without a counter it is the last
    reading of NVML's power, which on Ampere and newer is itself the average of a second.
    """
    inside = [[r for r in readings if begin <= r.at_s <= end] for begin, end in windows]
    everything = [reading for window in inside for reading in window]
    slopes = [slope for window in inside if (slope := _energy_slope(window)) is not None]
    seconds = sum(duration for _, duration in slopes)
    power = sum(joules for joules, _ in slopes) / seconds if seconds else None
    last = [window[-1].power_w for window in inside if window and window[-1].power_w is not None]
    clocks = [r.sm_clock_mhz for r in everything if r.sm_clock_mhz is not None]
    heat = [r.temperature_c for r in everything if r.temperature_c is not None]
    bits = 0
    for reading in everything:
        bits |= reading.throttle_bits or 0
    return Conditions(
        power_w=power if power is not None else (sum(last) / len(last) if last else None),
        power_from_energy=power is not None,
        sm_clock_mhz=median(clocks) if clocks else None,
        temperature_c=median(heat) if heat else None,
        throttle_reasons=tuple(word for bit, word in THROTTLE_WORDS.items() if bits & bit),
    )


def _energy_slope(window: Sequence[Reading]) -> tuple[float, float] | None:
    """(joules, seconds) between the first and the last step of the energy counter; None below two steps."""
    known = [(r.at_s, r.energy_mj) for r in window if r.energy_mj is not None]
    steps = [later for earlier, later in itertools.pairwise(known) if later[1] > earlier[1]]
    if len(steps) < 2:
        return None
    (begin_s, begin_mj), (end_s, end_mj) = steps[0], steps[-1]
    return (end_mj - begin_mj) / 1e3, end_s - begin_s


class Sampler:
    """Reads the card every 10 ms in a thread while it is entered; without a reader it yields no readings."""

    def __init__(self, reader: Reader | None, period_s: float = PERIOD_S) -> None:
        self._reader = reader
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.readings: list[Reading] = []

    def __enter__(self) -> Sampler:
        if self._reader is not None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="attnscope-power", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None

    def conditions(self, windows: Sequence[tuple[float, float]]) -> Conditions:
        """What held over ``windows`` of the host's performance counter, (begin_s, end_s) each."""
        return conditions_in(list(self.readings), windows)

    def _run(self) -> None:
        assert self._reader is not None
        while not self._stop.wait(self._period_s):
            self.readings.append(self._reader())


def nvml_reader(device: Device) -> Reader | None:
    """A reader of the card that torch calls ``device``; None where NVML cannot be had."""
    if device.kind != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    handle = _handle(pynvml, device)
    if handle is None:
        return None
    reasons = getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    reasons = reasons or getattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
    asks: dict[str, Callable[[], Any]] = {
        "energy_mj": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle),
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "sm_clock_mhz": lambda: float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        "temperature_c": lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
    }
    if reasons is not None:
        asks["throttle_bits"] = lambda: int(reasons(handle))

    def read() -> Reading:
        # one refused question must not cost the others, nor be asked again at each look
        answers: dict[str, Any] = {}
        at_s = time.perf_counter()
        for name, ask in list(asks.items()):
            try:
                answers[name] = ask()
            except pynvml.NVMLError:
                del asks[name]
            if name == "energy_mj":  # the slope needs this one's time; the others take milliseconds
                at_s = time.perf_counter()
        return Reading(at_s, **answers)

    return read


def _handle(pynvml: Any, device: Device) -> Any:
    """NVML's handle by the UUID that torch sees, since CUDA_VISIBLE_DEVICES renumbers; by index for an older torch."""
    import torch

    identity = getattr(torch.cuda.get_device_properties(device.index), "uuid", None)
    try:
        pynvml.nvmlInit()
        if identity is None:
            return pynvml.nvmlDeviceGetHandleByIndex(device.index)
        text = str(identity)
        return pynvml.nvmlDeviceGetHandleByUUID(text if text.startswith("GPU-") else f"GPU-{text}")
    except (pynvml.NVMLError, OSError):
        return None
