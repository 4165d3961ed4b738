"""Stage 2: how the kernel of ``hopper`` is compiled for which workload, as data.

Reads the table that ships and the user's own, which ``attnscope tune hopper`` writes; writes a Configuration. Imports
no torch. Must not import another implementation or a later stage.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope.cuda import cache_directory
from attnscope.errors import RecordError
from attnscope.workload import Workload

GROUP_ROWS = 64  # query rows of a group of 128 threads
LEAST_KEYS = 64  # keys of a tile, at the least
SHARED_LIMIT_BYTES = 232_448  # a block's largest on compute capability 9.0
GEOMETRY = frozenset({"causal_top_left", "causal_bottom_right", "window", "lengths", "packed"})
LENGTHS = (("short", 1024), ("middle", 4096), ("long", None))  # classes of S, each up to a number of keys


@dataclass(frozen=True)
class Configuration:
    """What the kernel is compiled with; each switch is an idea of docs/concepts/hopper.md.

    ``keys`` a tile; ``slots`` of the ring that K and V share; ``q_slots`` of Q, 2 load the next tile's Q early and let
    the output drain late; ``groups`` of 64 rows; registers of a thread of the loading warp and of the groups;
    ``persistent``: one block a multiprocessor, else one a tile; ``balanced``: where tiles differ in length, a table
    gives each block of a persistent grid as much to do (``schedules.py``); ``pingpong``: groups take turns at the
    tensor cores (without ``overlap``: at the exponentials); ``overlap``: P V beside the next tile's scores;
    ``lazy_sum``: a row's four lanes add up their sums after the last tile; ``bias_slots``: tiles of a bias that each
    group has in shared memory.
    """

    keys: int = 128
    slots: int = 5
    q_slots: int = 1
    groups: int = 2
    producer_registers: int = 24
    consumer_registers: int = 240
    persistent: bool = True
    balanced: bool = True
    pingpong: bool = True
    overlap: bool = True
    lazy_sum: bool = True
    bias_slots: int = 1

    def as_dict(self) -> dict[str, int | bool]:
        """Plain JSON values; :meth:`from_dict` reads them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Configuration:
        """The configuration of ``as_dict``.

        Raises:
            RecordError: a name is unknown, or a value is of another type.
        """
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in kinds or type(value) is not kinds[name]:
                raise RecordError(
                    f"a configuration of hopper takes {', '.join(kinds)}, got {name} = {value!r}\n"
                    "hint: attnscope tune hopper writes them"
                )
        return cls(**values)

    def __str__(self) -> str:
        words = [f"{self.groups}x{GROUP_ROWS}", f"keys {self.keys}", f"slots {self.slots}/{self.q_slots}"]
        words += [f"regs {self.producer_registers}/{self.consumer_registers}"]
        names = ("persistent", "balanced", "pingpong", "overlap", "lazy_sum")
        return " ".join(words + [name for name in names if getattr(self, name)])

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return self.groups * GROUP_ROWS


def block_of(workload: Workload) -> int:
    """Columns in which the kernel holds both head dims: 64, 128 or 256."""
    return next(size for size in (64, 128, 256) if max(workload.D, workload.D_v) <= size)


def tuning_class(workload: Workload) -> str:
    """Workloads that share a configuration: ``D128,causal,bf16,long``."""
    w = workload
    length = next(name for name, most in LENGTHS if most is None or w.S <= most)
    return f"D{block_of(w)},{_mask_of(w)},{w.dtype},{length}"


def _mask_of(w: Workload) -> str:
    """The word of a class: a bias's size, a bool mask, one of them beside what needs registers too, or geometry."""
    more = w.alibi or w.sinks or w.softcap is not None
    if w.bias is not None:
        alone = w.mask is None and not more and not w.features & GEOMETRY
        return "mixed" if not alone else "bias32" if w.bias == "fp32" else "bias16"
    if w.mask is not None:
        return "mixed" if more else "mask"
    return "window" if w.window is not None else "causal" if w.causal is not None else "full"


def user_table_path() -> Path:
    """Where the user's own table lies, in attnscope's cache folder."""
    return cache_directory().parent / "hopper" / "configurations.toml"


def read_table(text: str, name: str) -> dict[str, Configuration]:
    """Class -> Configuration of a table's text.

    Raises:
        RecordError: it is no such table.
    """
    try:
        entries = tomllib.loads(text)
        return {key: Configuration.from_dict(values) for key, values in entries.items()}
    except (tomllib.TOMLDecodeError, TypeError, AttributeError) as error:
        raise RecordError(
            f"{name} is no table of configurations: {error}\nhint: attnscope tune hopper writes one"
        ) from None


def write_table(entries: Mapping[str, Configuration]) -> str:
    """The text that :func:`read_table` reads, classes in order."""

    def lines() -> Iterator[str]:
        for key, configuration in sorted(entries.items()):
            yield f'["{key}"]'
            for name, value in configuration.as_dict().items():
                yield f"{name} = {str(value).lower()}"
            yield ""

    return "\n".join(lines())


@functools.cache
def shipped() -> dict[str, Configuration]:
    """The table that comes with attnscope: measured on an H200."""
    file = importlib.resources.files("attnscope.implementations.hopper") / "configurations.toml"
    return read_table(file.read_text(), file.name)


def users() -> dict[str, Configuration]:
    """The user's own table; empty where there is none."""
    path = user_table_path()
    return read_table(path.read_text(), os.fspath(path)) if path.is_file() else {}


def choose(workload: Workload) -> Configuration:
    """The user's configuration for the workload's class, else the one that ships."""
    key = tuning_class(workload)
    found = users().get(key) or shipped().get(key)
    if found is None:
        raise RecordError(f"no table has a configuration for {key}\nhint: attnscope tune hopper")
    return found


def candidates(workload: Workload) -> list[Configuration]:
    """What is worth measuring for the workload, most promising first; all of it compiles without spills."""
    mask = _mask_of(workload)
    mask = "uneven" if mask in ("window", "causal") else mask
    return [Configuration(**values) for values in _CANDIDATES[mask][block_of(workload)]]


_THREE = {"slots": 8, "q_slots": 2, "groups": 3, "producer_registers": 32, "consumer_registers": 160}
_TWO = {"slots": 8, "q_slots": 2}
_USUAL = {"slots": 5, "q_slots": 2}
_WIDE = {"slots": 5, "keys": 64, "pingpong": False}
_ALONE = {"persistent": False, "balanced": False}  # the card deals tiles: nobody knows what a bool mask leaves of one
_CANDIDATES: dict[str, dict[int, list[dict[str, Any]]]] = {
    "full": {
        64: [_THREE, _TWO, _THREE | {"pingpong": False}, _THREE | {"pingpong": False, "overlap": False}],
        128: [_USUAL, {"slots": 6}, _USUAL | {"pingpong": False}],
        256: [_WIDE, _WIDE | {"pingpong": True}],
    },
    "uneven": {
        64: [
            _TWO,
            _THREE,
            _TWO | {"balanced": False},
            _THREE | {"balanced": False},
            _TWO | {"pingpong": False},
            _THREE | {"pingpong": False},
        ],
        128: [
            _USUAL,
            _USUAL | {"pingpong": False},
            _USUAL | {"balanced": False},
            {"slots": 6, "persistent": False, "balanced": False},
            {"slots": 6},
        ],
        256: [
            _WIDE,
            _WIDE | {"pingpong": True},
            _WIDE | {"balanced": False},
            _WIDE | {"persistent": False, "balanced": False},
        ],
    },
    "mask": {
        64: [_THREE | _ALONE | {"q_slots": 1}, _TWO | _ALONE | {"q_slots": 1}, _THREE, _TWO],
        128: [_ALONE | {"slots": 6}, _ALONE | {"slots": 6, "pingpong": False}, _USUAL],
        256: [_WIDE | _ALONE, _WIDE],
    },
    "mixed": {
        64: [_TWO | {"slots": 6}, _TWO | {"slots": 6, "pingpong": False}],
        128: [{"slots": 4}, {"slots": 4, "pingpong": False}],
        256: [_WIDE | {"slots": 4}],
    },
    "bias16": {
        64: [
            _THREE | {"slots": 6, "q_slots": 1},
            _THREE | {"slots": 6, "q_slots": 1, "pingpong": False},
            _THREE | {"q_slots": 1, "keys": 64, "bias_slots": 2},
            _TWO | {"slots": 6, "bias_slots": 2},
        ],
        128: [
            {"slots": 4, "bias_slots": 2},
            _USUAL | {"slots": 4},
            {"slots": 4, "bias_slots": 2, "pingpong": False},
        ],
        256: [_WIDE | {"slots": 4, "bias_slots": 2}, _WIDE | {"slots": 4}],
    },
    "bias32": {
        64: [_THREE | {"keys": 64, "bias_slots": 2}, _TWO | {"keys": 64, "bias_slots": 2}],
        128: [_USUAL | {"keys": 64, "slots": 6, "bias_slots": 2}, {"slots": 4}],
        256: [_WIDE | {"slots": 4}],
    },
}
