"""Stage 3: one random problem that an implementation is checked on, what came of it, and the report of many.

Reads nothing, writes Cases, Outcomes and a FuzzReport; imports no torch and no later stage. A case is spelled in words
that the command line reads back: ``'B1,H2,L17,D8,fp32 needles rows seed=7'``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from attnscope.device import Device, Environment
from attnscope.errors import RecordError, UnknownName, UsageError
from attnscope.inputs import INPUT_KINDS
from attnscope.strides import STRIDES
from attnscope.workload import Workload

STATUSES = ("passed", "wrong", "raised", "crashed", "hung", "refused")
FAILURES = ("wrong", "raised", "crashed", "hung")


@dataclass(frozen=True)
class Case:
    """A workload's spelling, and the inputs it is checked on: their seed, kind (``INPUT_KINDS``) and strides
    (``STRIDES``). ``repeat``: a claim of determinism is held against equal runs. ``index``: its number in the run."""

    workload: str
    seed: int = 0
    kind: str = "plain"
    strides: str = "plain"
    repeat: bool = False
    index: int | None = None

    def __str__(self) -> str:
        words = [word for word in (self.kind, self.strides) if word != "plain"]
        return " ".join([self.workload, *words, *(["repeat"] if self.repeat else []), f"seed={self.seed}"])

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that ``text`` spells.

        Raises:
            WorkloadError: its first word is no workload.
            UsageError: another word is neither a kind of inputs nor a way to lay them out, ``repeat`` or ``seed=N``.
        """
        spelled, *words = text.split()
        fields: dict[str, object] = {"workload": str(Workload.parse(spelled))}
        for word in words:
            if word in INPUT_KINDS:
                fields["kind"] = word
            elif word in STRIDES:
                fields["strides"] = word
            elif word == "repeat":
                fields["repeat"] = True
            elif word.startswith("seed=") and word[5:].isdigit():
                fields["seed"] = int(word[5:])
            else:
                known = dict.fromkeys((*INPUT_KINDS, *STRIDES, "repeat", "seed=0"))
                raise UsageError(str(UnknownName("word of a case", word, known)))
        return cls(**fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Outcome:
    """What came of a case: ``passed``, ``wrong`` (the check's sentence says how), ``raised``, ``crashed``, ``hung``, or
    ``refused``: the implementation has reasons against it in both directions."""

    status: str
    message: str = ""
    directions: tuple[str, ...] = ()
    factor: float | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise RecordError(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}")

    @property
    def failed(self) -> bool:
        """Whether the implementation is to blame."""
        return self.status in FAILURES


@dataclass(frozen=True)
class Refusals:
    """Workloads that were drawn for one case and refused: how many, and how often for which reason (numbers as #)."""

    count: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A case that failed, the simplest one found that fails alike, and a line that shows it again.

    ``command`` was run and failed, unless ``note`` says otherwise. ``alike`` are numbers of cases that failed with the
    same words and were not made simpler.
    """

    case: Case
    outcome: Outcome
    shrunk: Case
    shrunk_outcome: Outcome
    command: str
    note: str = ""
    alike: tuple[int, ...] = ()


@dataclass(frozen=True)
class FuzzReport:
    """What a run of random cases found.

    ``cases`` ran; ``refused`` of ``drawn`` workloads were refused, and ``without_workload`` cases ran nothing because
    all that were drawn for them were refused. ``failed`` counts cases, ``failures`` tells them, alike ones as one.
    ``coverage`` counts, for each feature, direction, dtype and so on, the cases that ran with it.
    """

    implementation: str
    device: Device
    environment: Environment
    seed: int
    cases: int
    passed: int
    failed: int
    drawn: int
    refused: int
    without_workload: int
    seconds: float
    workers: int
    coverage: dict[str, int]
    reasons: dict[str, int]
    failures: tuple[Failure, ...] = ()
    interrupted: bool = False

    @property
    def is_green(self) -> bool:
        """Something ran, and nothing failed."""
        return self.cases > 0 and not self.failed


def coverage_of(case: Case, directions: tuple[str, ...]) -> list[str]:
    """The words that a case counts for in ``FuzzReport.coverage``."""
    w = Workload.parse(case.workload)
    words = [*directions, *sorted(w.features), w.dtype, f"layout {w.layout}", f"inputs {case.kind}"]
    words += [f"strides {case.strides}", f"head dim {w.D}" if w.D in (64, 128, 256) else "other head dim"]
    sizes = {
        "no query": w.L == 0, "no key": w.S == 0, "no batch": w.B == 0, "one query": w.L == 1,
        "a row without a key": _has_unseen_row(w), "equal runs": case.repeat, "no feature": not w.features,
        "many heads": w.B * w.H > 65_535,
    }  # fmt: skip
    return words + [word for word, there in sizes.items() if there]


def _has_unseen_row(w: Workload) -> bool:
    """Whether geometry leaves a row without a key; the first and the last row of each batch entry decide."""
    rows = {0, w.L - 1} if w.L else set()
    ends = [w.row_interval(b, i) for b in range(w.B if w.lengths else min(w.B, 1)) for i in rows]
    return any(low >= high for low, high in ends)


def tally(words: list[str]) -> dict[str, int]:
    """How often each word stands there, the most frequent first."""
    return dict(sorted(Counter(words).items(), key=lambda pair: (-pair[1], pair[0])))
