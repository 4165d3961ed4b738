"""NVML's readings into watts, joules and reasons; and what happens where there is no NVML."""

from __future__ import annotations

import sys
import time
import types

import pytest

from attnscope.device import Device
from attnscope.power import Conditions, Reading, Sampler, conditions_in, nvml_reader

GPU = Device("cuda", "H200")


def stepping_counter(watts: float, period_s: float = 0.1, until_s: float = 2.0) -> list[Reading]:
    """Readings every 10 ms of a counter that moves only every ``period_s``."""
    return [
        Reading(step / 100, energy_mj=int(int(step / 100 / period_s + 1e-9) * period_s * watts * 1e3), power_w=111.0)
        for step in range(int(until_s * 100))
    ]


def test_power_is_the_counters_slope_between_its_steps():
    seen = conditions_in(stepping_counter(500.0), [(0.53, 1.58)])
    assert seen.power_w == pytest.approx(500.0, rel=1e-6)
    assert seen.power_from_energy


def test_two_windows_are_weighed_by_their_time():
    low = stepping_counter(100.0, until_s=1.0)
    high = [Reading(1.0 + r.at_s, energy_mj=100_000 + (r.energy_mj or 0)) for r in stepping_counter(400.0, until_s=2.0)]
    seen = conditions_in([*low, *high], [(0.05, 0.95), (1.05, 2.95)])
    assert seen.power_w == pytest.approx((100 * 0.8 + 400 * 1.8) / 2.6)


def test_a_counter_that_hardly_moved_gives_no_energy_but_the_last_power_reading():
    readings = [Reading(t / 10, energy_mj=5 if t < 3 else 9, power_w=100.0 + t) for t in range(6)]
    seen = conditions_in(readings, [(0.0, 0.5)])
    assert seen == Conditions(power_w=105.0, power_from_energy=False)


def test_clocks_temperature_and_reasons_come_from_inside_the_windows_only():
    readings = [
        Reading(0.0, sm_clock_mhz=100.0, throttle_bits=0x20),
        Reading(1.0, sm_clock_mhz=1700.0, temperature_c=60.0, throttle_bits=0x4),
        Reading(1.1, sm_clock_mhz=1800.0, temperature_c=62.0, throttle_bits=0x1),
        Reading(1.2, sm_clock_mhz=1750.0, temperature_c=64.0, throttle_bits=0x80),
    ]
    seen = conditions_in(readings, [(0.9, 1.3)])
    assert (seen.sm_clock_mhz, seen.temperature_c) == (1750.0, 62.0)
    assert seen.throttle_reasons == ("power cap", "hardware power brake")


def test_nothing_read_is_nothing_known():
    assert conditions_in([], [(0, 1)]) == Conditions()
    with Sampler(None) as sampler:
        pass
    assert sampler.conditions([(0, 1e9)]) == Conditions()


def test_the_sampler_reads_while_entered_and_stops():
    count = iter(range(1_000_000))
    sampler = Sampler(lambda: Reading(float(next(count)), sm_clock_mhz=1000.0), period_s=0.001)
    with sampler:
        while len(sampler.readings) < 3:
            time.sleep(0.001)
    seen = len(sampler.readings)
    assert sampler.conditions([(0, 1e9)]).sm_clock_mhz == 1000.0
    assert len(sampler.readings) == seen


def test_a_cpu_has_no_reader():
    assert nvml_reader(Device("cpu", "cpu")) is None


class FakeNvml(types.ModuleType):
    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self, refuse: tuple[str, ...] = ()) -> None:
        super().__init__("pynvml")
        self.refuse, self.asked = refuse, []

    def _answer(self, name, value):
        self.asked.append(name)
        if name in self.refuse:
            raise self.NVMLError(name)
        return value

    def nvmlInit(self):  # noqa: N802
        self._answer("init", None)

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return self._answer("handle", uuid)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        assert handle == "GPU-1234"
        return self._answer("energy", 7)

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        return self._answer("power", 650_000)

    def nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        return self._answer("clock", 1980)

    def nvmlDeviceGetTemperature(self, handle, kind):  # noqa: N802
        return self._answer("temperature", 55)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):  # noqa: N802
        return self._answer("reasons", 4)


@pytest.fixture
def install(monkeypatch):
    def put(module):
        import torch

        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid="1234"))
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return put


def test_a_reader_asks_for_the_card_by_its_uuid(install):
    install(FakeNvml())
    read = nvml_reader(GPU)
    assert read is not None
    reading = read()
    assert (reading.energy_mj, reading.power_w, reading.sm_clock_mhz, reading.temperature_c) == (7, 650.0, 1980.0, 55.0)
    assert reading.throttle_bits == 4


def test_a_refused_question_is_asked_once_and_costs_no_other(install):
    nvml = install(FakeNvml(refuse=("energy", "reasons")))
    read = nvml_reader(GPU)
    assert read is not None
    first, second = read(), read()
    assert first.energy_mj is None and first.throttle_bits is None and second.power_w == 650.0
    assert nvml.asked.count("energy") == nvml.asked.count("reasons") == 1


@pytest.mark.parametrize("refused", ["init", "handle"])
def test_a_machine_that_refuses_nvml_has_no_reader(install, refused):
    install(FakeNvml(refuse=(refused,)))
    assert nvml_reader(GPU) is None


def test_a_machine_without_the_library_has_no_reader(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_reader(GPU) is None
