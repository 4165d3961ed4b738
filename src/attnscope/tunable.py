"""Stage 2: implementations with several configurations to choose from, and which table says which one counts.

Reads tables, writes a configuration; imports no torch, no implementation and no later stage. Measuring and writing
tables is ``attnscope tune``'s. The user's own table for this card comes first, then the one that ships for it, then the
one that ships for all; where none of them has the class, the first candidate counts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, runtime_checkable

from attnscope.cuda import cache_directory
from attnscope.device import Device
from attnscope.errors import UsageError
from attnscope.implementation import Implementation, Prepared, SheetImplementation
from attnscope.tables import TUNED, C, Configuration, Table, change_table, file_name, load_table, read_table
from attnscope.workload import Workload

SHIPPED = "configurations.toml"


class Tables(Generic[C]):
    """The tables of one implementation.

    ``read`` makes a configuration of its ``as_dict`` and raises RecordError. ``folder`` holds what ships:
    ``configurations.toml``, which counts on every card, and ``configurations-CARD.toml``; None where nothing ships.
    """

    def __init__(self, name: str, read: Callable[[Mapping[str, Any]], C], folder: Path | None = None) -> None:
        self.name, self.read, self.folder = name, read, folder

    def user_path(self, device: Device) -> Path:
        """Where the user's own table for the card lies, in attnscope's cache folder."""
        return cache_directory().parent / TUNED / file_name(self.name) / f"{file_name(device.name)}.toml"

    def user_table(self, device: Device) -> Table[C] | None:
        """The user's own table for the card, where there is one. Raises RecordError."""
        path = self.user_path(device)
        try:
            stamp = path.stat()
        except OSError:
            return None
        return _kept(self, path, device.name, (stamp.st_mtime_ns, stamp.st_size, stamp.st_ino))

    def shipped_path(self, device: Device) -> Path:
        """The file in which what is measured on the card ships; it may not be there. Raises UsageError."""
        if self.folder is None:
            raise UsageError(f"{self.name} ships no table\nhint: leave out --shipped")
        common = _packaged(self, self.folder / SHIPPED)
        return self.folder / SHIPPED if common is None or common.device == device.name else self._own(device)

    def _own(self, device: Device) -> Path:
        assert self.folder is not None
        return self.folder / f"configurations-{file_name(device.name)}.toml"

    def shipped(self, key: str, device: Device) -> C | None:
        """What ships for the class: the card's own table, else the one for all. Raises RecordError."""
        if self.folder is None:
            return None
        tables = (_packaged(self, path) for path in (self._own(device), self.folder / SHIPPED))
        return next((table.classes[key] for table in tables if table is not None and key in table.classes), None)

    def choose(self, key: str, device: Device) -> C | None:
        """The user's configuration for the class on this card, else what ships; None where no table has it.

        Raises:
            RecordError: a table is not one.
        """
        own = self.user_table(device)
        return own.classes[key] if own is not None and key in own.classes else self.shipped(key, device)

    def load(self, path: Path, device: Device) -> Table[C] | None:
        """The table in a file, None where there is no file. Raises RecordError where it is none of this card's."""
        return load_table(path, self.name, device.name, self.read)

    def change(self, path: Path, device: Device, change: Callable[[Table[C]], Table[C]]) -> None:
        """Put ``change`` of the table at ``path`` in its place. Raises RecordError."""
        change_table(path, self.name, device.name, self.read, change)
        _packaged.cache_clear()


@functools.lru_cache(64)
def _kept(tables: Tables[C], path: Path, device: str, stamp: tuple[int, ...]) -> Table[C] | None:
    """A table read once for each state of its file, since every ``prepare`` asks."""
    del stamp
    return load_table(path, tables.name, device, tables.read)


@functools.lru_cache(64)
def _packaged(tables: Tables[C], path: Path) -> Table[C] | None:
    """A table that ships, None where there is no such file; read once, since only ``Tables.change`` changes it."""
    if not path.is_file():
        return None
    return read_table(path.read_text(encoding="utf-8"), os.fspath(path), tables.name, tables.read)


@runtime_checkable
class Tunable(Implementation, Protocol):
    """An implementation that ``attnscope tune`` can tune. All but ``prepare_as`` is cheap and needs no torch."""

    tables: Tables[Any]

    def tuning_class(self, workload: Workload) -> str:
        """The class of workloads that share a configuration, a word such as ``D128,causal,bf16,long``."""

    def tuning_workloads(self) -> Sequence[Workload]:
        """Workloads of every class, by which a class is tuned where the user names none."""

    def reason_untuned(self, workload: Workload) -> str | None:
        """Why there is nothing to tune for a workload that it runs; None where there is."""

    def candidates(self, workload: Workload, device: Device) -> Sequence[Configuration]:
        """Configurations worth timing, each valid for the whole class, the one that counts without a table first."""

    def prepare_as(self, workload: Workload, device: Device, configuration: Any) -> Prepared:
        """``prepare`` with that configuration. Raises PrepareFailed, or UsageError where it does not fit."""

    def settled(self, best_first: Sequence[Any]) -> Configuration:
        """What the class's entry is to be, given the candidates that are right, the fastest first."""


class TunableImplementation(SheetImplementation):
    """Base for most of them: prepares what the tables say, else the first candidate; the fastest becomes the entry."""

    tables: Tables[Any]

    def tuning_class(self, workload: Workload) -> str:
        """The class of workloads that share a configuration."""
        raise NotImplementedError

    def candidates(self, workload: Workload, device: Device) -> Sequence[Configuration]:
        """Configurations worth timing, the one that counts without a table first."""
        raise NotImplementedError

    def prepare_as(self, workload: Workload, device: Device, configuration: Any) -> Prepared:
        """``prepare`` with that configuration."""
        raise NotImplementedError

    def reason_untuned(self, workload: Workload) -> str | None:
        """None: all that it runs is tuned."""
        del workload
        return None

    def settled(self, best_first: Sequence[Any]) -> Configuration:
        """The fastest."""
        found: Configuration = best_first[0]
        return found

    def chosen(self, workload: Workload, device: Device) -> Any:
        """What the tables say of the workload's class, else the first candidate. Raises RecordError."""
        found = self.tables.choose(self.tuning_class(workload), device)
        return self.candidates(workload, device)[0] if found is None else found

    def prepare(self, workload: Workload, device: Device) -> Prepared:
        """Makes ready what the tables say. Raises PrepareFailed, or RecordError where a table is not one."""
        return self.prepare_as(workload, device, self.chosen(workload, device))
