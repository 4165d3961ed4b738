"""Tables of configurations: what is refused, which table counts, and that two writers lose nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from attnscope.device import Device
from attnscope.errors import RecordError, UsageError
from attnscope.tables import Settings, Table, read_table, table_text
from attnscope.tunable import Tables

CARD = Device("cuda", "NVIDIA H200", capability=(9, 0))
OTHER = Device("cuda", "NVIDIA H100 80GB HBM3", capability=(9, 0))


@dataclass(frozen=True)
class Tile(Settings, owner="fake"):
    rows: int
    keys: int = 64
    turns: bool = False
    order: str = "plain"


def tables(folder: Path | None = None) -> Tables[Tile]:
    return Tables("fake", Tile.from_dict, folder)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ATTNSCOPE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(path: Path, device: Device, **classes: Tile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table_text(Table("fake", device.name, classes)))


def test_a_table_reads_what_it_writes() -> None:
    facts = {"workloads": ["B1,H2,L3,D8,bf16"], "ratio": 0.93, "is_shipped_choice": False, "torch": 'odd "one" \\ ü'}
    table = Table("fake", 'a "card"', {"D64,full": Tile(64), "b": Tile(3, 1, True, "x")}, {"D64,full": facts})
    assert read_table(table_text(table), "here", "fake", Tile.from_dict) == table


PLAIN = """
@dataclass(frozen=True)
class Plain(Settings, owner="plain"):
    rows: int
    fast: bool = False
"""


def test_a_configuration_of_a_module_without_postponed_annotations() -> None:
    scope = {"dataclass": dataclass, "Settings": Settings, "__name__": __name__}
    exec(compile(PLAIN, "plain", "exec", dont_inherit=True), scope)
    plain: Any = scope["Plain"]
    assert plain.from_dict({"rows": 3}).as_dict() == {"rows": 3, "fast": False}
    with pytest.raises(RecordError, match="got rows = True"):
        plain.from_dict({"rows": True})


def test_a_configuration_shows_what_is_not_as_usual() -> None:
    assert str(Tile(64)) == "rows 64"
    assert str(Tile(64, 32, True)) == "rows 64, keys 32, turns true"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("format = ", "is broken"),
        ("", "must be of format 1, got None"),
        ("format = 2", "must be of format 1, got 2"),
        ('format = 1\nimplementation = "hopper"', "belongs to another implementation, 'hopper'"),
        ('format = 1\nimplementation = "fake"', "must name its device, and hold a table for each class"),
        ('format = 1\nimplementation = "fake"\ndevice = "x"\nclasses = 3', "must name its device, and hold a table"),
        ('format = 1\nimplementation = "fake"\ndevice = "x"\n[classes]\na = 3', "must name its device, and hold"),
        ('format = 1\nimplementation = "fake"\ndevice = "x"\n[tiles]\na = 3', "must hold format, .*, got tiles"),
        ('format = 1\nimplementation = "fake"\ndevice = "x"\n[classes]\na = { rows = 1, colour = 2 }',
         "here, class a: a configuration of fake takes rows, keys, turns, order, got colour = 2"),
        ('format = 1\nimplementation = "fake"\ndevice = "x"\n[classes]\na = { keys = 1 }', "must say rows, got keys"),
        ('format = 1\nimplementation = "fake"\ndevice = "x"\n[classes]\na = { rows = true }', "got rows = True"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_a_sentence(text: str, said: str) -> None:
    with pytest.raises(RecordError, match=f"(?s){said}.*\nhint: "):
        read_table(text, "here", "fake", Tile.from_dict)


def test_the_users_table_of_the_card_comes_first_then_the_cards_then_the_common_one(tmp_path: Path) -> None:
    own = tables(tmp_path)
    assert own.choose("a", CARD) is None and tables().choose("a", CARD) is None
    put(tmp_path / "configurations.toml", CARD, a=Tile(1), b=Tile(1))
    own = tables(tmp_path)  # what ships is read once
    put(tmp_path / "configurations-nvidia-h100-80gb-hbm3.toml", OTHER, a=Tile(2))
    assert (own.choose("a", CARD), own.choose("a", OTHER), own.choose("b", OTHER)) == (Tile(1), Tile(2), Tile(1))
    put(own.user_path(OTHER), OTHER, a=Tile(3))
    assert (own.choose("a", CARD), own.choose("a", OTHER), own.shipped("a", OTHER)) == (Tile(1), Tile(3), Tile(2))
    put(own.user_path(OTHER), OTHER, a=Tile(44))
    assert own.choose("a", OTHER) == Tile(44), "a file that changed is read again"
    assert own.shipped_path(CARD).name == "configurations.toml"
    assert own.shipped_path(OTHER).name == "configurations-nvidia-h100-80gb-hbm3.toml"
    with pytest.raises(UsageError, match="fake ships no table"):
        tables().shipped_path(CARD)


def test_a_table_of_another_card_is_refused_and_left_alone() -> None:
    own = tables()
    put(own.user_path(CARD), OTHER, a=Tile(1))
    before = own.user_path(CARD).read_text()
    for action in (lambda: own.choose("a", CARD), lambda: own.change(own.user_path(CARD), CARD, lambda table: table)):
        with pytest.raises(RecordError, match="was measured on another card, NVIDIA H100 80GB HBM3, not NVIDIA H200"):
            action()
    assert own.user_path(CARD).read_text() == before


def test_a_broken_table_is_refused_and_left_alone() -> None:
    own = tables()
    own.user_path(CARD).parent.mkdir(parents=True)
    own.user_path(CARD).write_bytes(b"\xff\xfe")
    with pytest.raises(RecordError, match=r"cannot be read: .*\nhint: remove it; attnscope tune fake writes it anew"):
        own.change(own.user_path(CARD), CARD, lambda table: table)
    assert own.user_path(CARD).read_bytes() == b"\xff\xfe"


def test_a_write_that_fails_leaves_the_old_table(monkeypatch: pytest.MonkeyPatch) -> None:
    own = tables()
    put(own.user_path(CARD), CARD, a=Tile(1))

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RecordError, match=r"cannot write .*: No space left on device\nhint: "):
        own.change(own.user_path(CARD), CARD, lambda table: replace(table, classes={}))
    assert own.choose("a", CARD) == Tile(1)
    assert not list(own.user_path(CARD).parent.glob("*.tmp"))


WRITES = """
import sys
from dataclasses import replace
from pathlib import Path
from attnscope.tables import change_table
from test_tables import CARD, Tile
path, first = Path(sys.argv[1]), int(sys.argv[2])
for number in range(first, first + 20):
    added = {f"c{number}": Tile(number)}
    change_table(path, "fake", CARD.name, Tile.from_dict, lambda table: replace(table, classes=table.classes | added))
"""


def test_two_processes_that_write_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [subprocess.Popen([sys.executable, "-c", WRITES, path, str(n)], env=environment) for n in (0, 100)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    found = read_table(path.read_text(), "here", "fake", Tile.from_dict).classes
    assert found == {f"c{number}": Tile(number) for first in (0, 100) for number in range(first, first + 20)}
