"""Stage 2: tables of configurations as TOML: what they hold, how they are read, refused and written.

Reads and writes files; imports no torch, no implementation and no later stage. A table belongs to one implementation
and one card. It holds a configuration for each class of workloads (``classes``), and for each class that was measured
what the choice rests on (``measured``). Which table counts is :mod:`attnscope.tunable`'s to say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, get_type_hints

from attnscope.cuda import cache_directory
from attnscope.errors import RecordError

FORMAT = 1
TUNED = "tuned"  # folder of attnscope's cache folder
PARTS = ("format", "implementation", "device", "classes", "measured")

C = TypeVar("C", bound="Configuration")


class Configuration(Protocol):
    """One of the ways in which an implementation can be prepared for a workload. Its str is one line for people."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, nested at most once, from which the implementation makes it again."""


class Settings:
    """Base of a frozen dataclass of whole numbers, flags and words: as_dict, from_dict, one line for people."""

    owner: ClassVar[str]

    def __init_subclass__(cls, owner: str) -> None:
        """``owner``: the implementation whose configurations these are."""
        cls.owner = owner

    def as_dict(self) -> dict[str, int | bool | str]:
        """Every setting by its name; :meth:`from_dict` reads them."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The configuration of ``as_dict``; what has a default may be left out.

        Raises:
            RecordError: a name is unknown or missing, or a value is of another type.
        """
        known = {one.name: one for one in dataclasses.fields(cls)}  # type: ignore[arg-type]
        kinds = get_type_hints(cls)
        for name, value in values.items():
            if name not in known or type(value) is not kinds[name]:
                raise RecordError(
                    f"a configuration of {cls.owner} takes {', '.join(known)}, got {name} = {value!r}\n"
                    f"hint: attnscope tune {cls.owner} writes them"
                )
        needed = [name for name, one in known.items() if one.default is dataclasses.MISSING and name not in values]
        if needed:
            raise RecordError(
                f"a configuration of {cls.owner} must say {', '.join(needed)}, got {', '.join(values) or 'nothing'}\n"
                f"hint: attnscope tune {cls.owner} writes them"
            )
        return cls(**values)

    def __str__(self) -> str:
        """What has no default, then what is not as usual."""
        words = []
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if value != one.default:
                words.append(f"{one.name} {str(value).lower()}")
        return ", ".join(words) or "as usual"


@dataclass(frozen=True)
class Table(Generic[C]):
    """``classes``: class -> configuration. ``measured``: class -> facts (numbers, words, lists of words)."""

    implementation: str
    device: str
    classes: dict[str, C] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_table(text: str, where: str, implementation: str, read: Callable[[Mapping[str, Any]], C]) -> Table[C]:
    """The table of a file's text; ``where`` names the file in errors, ``read`` makes a configuration of its values.

    Raises:
        RecordError: it is no such table, or another implementation's, or one of its configurations is not valid.
    """
    try:
        body = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _refused(where, implementation, f"is broken: {error}") from None
    if unknown := [name for name in body if name not in PARTS]:
        raise _refused(where, implementation, f"must hold {', '.join(PARTS)}, got {', '.join(unknown)}")
    if body.get("format") != FORMAT:
        raise _refused(where, implementation, f"must be of format {FORMAT}, got {body.get('format')!r}")
    if body.get("implementation") != implementation:
        raise _refused(where, implementation, f"belongs to another implementation, {body.get('implementation')!r}")
    classes, measured = body.get("classes", {}), body.get("measured", {})
    maps = [body] if not isinstance(body.get("device"), str) else []
    maps += [part for part in (classes, measured) if not isinstance(part, dict)]
    if maps or not all(isinstance(one, dict) for one in (*classes.values(), *measured.values())):
        raise _refused(where, implementation, "must name its device, and hold a table for each class")
    found = {}
    for name, values in classes.items():
        try:
            found[name] = read(values)
        except RecordError as error:
            raise RecordError(f"{where}, class {name}: {error}") from None
    return Table(implementation, body["device"], found, measured)


def _refused(where: str, implementation: str, why: str) -> RecordError:
    hint = f"hint: remove it; attnscope tune {implementation} writes it anew"
    return RecordError(f"{where}: a table of configurations of {implementation} {why}\n{hint}")


def table_text(table: Table[C]) -> str:
    """The text that :func:`read_table` reads: a line for each class, in order."""
    name = table.implementation
    lines = [
        f"# Configurations of {name}, a line for each class of workloads. attnscope tune {name} writes them.",
        f"format = {FORMAT}",
        f"implementation = {_value(name)}",
        f"device = {_value(table.device)}",
    ]
    for part, rows in (("classes", {k: c.as_dict() for k, c in table.classes.items()}), ("measured", table.measured)):
        lines += [f"\n[{part}]", *(f"{_value(key)} = {_value(rows[key])}" for key in sorted(rows))]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """TOML of a table on one line, or of what JSON spells alike: a number, a flag, a word, a list of words."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_value(one)}" for name, one in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def load_table(path: Path, implementation: str, device: str, read: Callable[[Mapping[str, Any]], C]) -> Table[C] | None:
    """The table in a file, None where there is no file.

    Raises:
        RecordError: it cannot be read, is no such table, or is another card's.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(os.fspath(path), implementation, f"cannot be read: {error}") from None
    table = read_table(text, os.fspath(path), implementation, read)
    if table.device != device:
        raise _refused(os.fspath(path), implementation, f"was measured on another card, {table.device}, not {device}")
    return table


def change_table(
    path: Path,
    implementation: str,
    device: str,
    read: Callable[[Mapping[str, Any]], C],
    change: Callable[[Table[C]], Table[C]],
) -> None:
    """Put ``change`` of the table in a file in its place; a file that is not there counts as an empty table.

    Atomic, and one process at a time: a reader sees the old table or the new one, and of two writers both are kept.

    Raises:
        RecordError: the file is refused as by :func:`load_table`, or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone():
            text = table_text(change(load_table(path, implementation, device, read) or Table(implementation, device)))
            read_table(text, os.fspath(path), implementation, read)
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror or error}\nhint: ATTNSCOPE_CACHE_DIR names another cache folder"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Holds a lock in the cache folder, which other processes wait for."""
    import fcntl

    folder = cache_directory().parent / TUNED
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def file_name(name: str) -> str:
    """A name of a card or implementation as part of a path: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-") or "unnamed"
