"""Implementations with configurations to choose from, for tests of ``attnscope tune``: right but for planted faults."""

from __future__ import annotations

import dataclasses
import os
import signal
from dataclasses import dataclass

from attnscope.errors import PrepareFailed
from attnscope.tables import Settings
from attnscope.tunable import Tables
from attnscope.workload import Workload
from bad_implementations import SHEET, Good, GoodPrepared

LAST: list[Choice] = []  # what ran last


@dataclass(frozen=True)
class Choice(Settings, owner="fake"):
    """``fault``: wrong, raises, crashes, or late: right until it is called more often than a check does."""

    number: int
    fault: str = ""


class PreparedChoice(GoodPrepared):
    def __init__(self, choice: Choice):
        self.choice, self.calls = choice, 0

    def forward(self, inputs, *, save=False):
        output = super().forward(inputs, save=save)
        LAST[:] = [self.choice]
        self.calls += 1
        if self.choice.fault == "late" and self.calls > 8:
            raise RuntimeError("out of breath")
        return dataclasses.replace(output, out=output.out * 1.05) if self.choice.fault == "wrong" else output


class Fake(Good):
    """Classes by head dim; ``offered`` are the candidates of each."""

    name, summary, sheet = "fake", "float64, rounded once, in several ways", SHEET
    tables: Tables[Choice] = Tables("fake", Choice.from_dict)
    offered: tuple[Choice, ...] = (Choice(0), Choice(1), Choice(2))

    def tuning_class(self, workload):
        return f"D{workload.D}"

    def tuning_workloads(self):
        return [Workload.parse(f"B1,H1,L9,D{dim},fp32") for dim in (8, 16)]

    def reason_untuned(self, workload):
        return "a single row has nothing to choose" if workload.L == 1 else None

    def candidates(self, workload, device):
        return self.offered

    def settled(self, best_first):
        return best_first[0]

    def prepare(self, workload, device):
        return self.prepare_as(workload, device, self.tables.choose(self.tuning_class(workload), device) or Choice(0))

    def prepare_as(self, workload, device, configuration):
        if configuration.fault == "raises":
            raise PrepareFailed("it does not compile", "line 3: too many registers")
        if configuration.fault == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        return PreparedChoice(configuration)


class Crashing(Fake):
    name = "crashing"
    offered = (Choice(0), Choice(1, "crashes"), Choice(2, "wrong"))
