"""Stage 2: what a table of ``hopper`` holds for a class: the Gluon kernel's configuration, and which engine is faster.

Reads tables and the registry, writes an Entry. Where the class's engine is ``cuda``, the kernel of ``hopper_cuda`` runs
behind hopper's sheet for every workload that hopper_cuda does not refuse, and the Gluon kernel for the others. The
registry knows it: implementations do not import one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from attnscope.device import Device
from attnscope.errors import RecordError
from attnscope.implementation import find
from attnscope.implementations.hopper import configurations
from attnscope.implementations.hopper.configurations import Configuration, tuning_class
from attnscope.tables import Configuration as AnyConfiguration
from attnscope.tunable import Tables, Tunable
from attnscope.workload import Workload

OTHER = "hopper_cuda"


@dataclass(frozen=True)
class Entry:
    """``gluon`` is the class's configuration of the Gluon kernel, ``cuda`` that of hopper_cuda's where it is faster."""

    gluon: Configuration
    cuda: AnyConfiguration | None = None

    @property
    def engine(self) -> str:
        """``gluon`` or ``cuda``: whose kernel runs where both can."""
        return "gluon" if self.cuda is None else "cuda"

    def as_dict(self) -> dict[str, Any]:
        """Plain values; :meth:`from_dict` reads them."""
        other = {} if self.cuda is None else {"cuda": self.cuda.as_dict()}
        return {"engine": self.engine, **self.gluon.as_dict(), **other}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Entry:
        """The entry of ``as_dict``.

        Raises:
            RecordError: the engine is neither, its configuration is not there, or a configuration is not valid.
        """
        rest = dict(values)
        engine, cuda = rest.pop("engine", "gluon"), rest.pop("cuda", None)
        if engine not in ("gluon", "cuda") or isinstance(cuda, Mapping) != (engine == "cuda"):
            raise RecordError(
                f"engine must be gluon, or cuda beside a table cuda with the configuration of {OTHER}, got "
                f"{engine!r} and {'no such table' if cuda is None else f'cuda = {cuda!r}'}\n"
                "hint: attnscope tune hopper writes them"
            )
        other = None if cuda is None else cuda_engine().tables.read(cuda)
        return cls(Configuration.from_dict(rest), other)

    def __str__(self) -> str:
        return f"{self.engine}: {self.gluon if self.cuda is None else self.cuda}"


def cuda_engine() -> Tunable:
    """The implementation whose kernel is the other engine."""
    return cast(Tunable, find(OTHER))


TABLES: Tables[Entry] = Tables("hopper", Entry.from_dict, Path(__file__).parent)


def candidates(workload: Workload, device: Device) -> list[Entry]:
    """The Gluon kernel's candidates, then those of hopper_cuda, where it runs the workload.

    The latter are those for the widest head dims of the class, so that they fit all of its workloads.
    """
    own = [Entry(one) for one in configurations.candidates(workload)]
    other = cuda_engine()
    if other.reasons_unsupported(workload, device):
        return own
    dim, value_dim = configurations.widest(workload)
    wide = workload.replace(D=dim, D_v=value_dim)
    beside = TABLES.shipped(tuning_class(workload), device) or own[0]
    return own + [Entry(beside.gluon, one) for one in other.candidates(wide, device)]


def settled(best_first: Sequence[Entry]) -> Entry:
    """The fastest; where that is of hopper_cuda, beside the fastest configuration of the Gluon kernel."""
    best = best_first[0]
    own = next((one.gluon for one in best_first if one.cuda is None), best.gluon)
    return best if best.cuda is None else Entry(own, best.cuda)
