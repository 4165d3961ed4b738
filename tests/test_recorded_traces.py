"""Traces recorded on GPUs: exactly what was expected of each must be said; and the command that records them."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import re
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

import trace_builder as tb
from attnscope.device import Device
from attnscope.errors import AttnscopeError
from attnscope.trace import parse_trace
from trace_builder import TraceBuilder

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = sorted(path for path in (ROOT / "tests" / "data" / "traces").glob("*") if path.is_dir())
RECORDED = [path for folder in FOLDERS for path in sorted(folder.glob("*.json.gz"))]
NONE_YET = "no traces are recorded yet: run python benchmarks/record_fixtures.py on a GPU, then --unpack and --write"
# Paths of a machine, variables of an environment: nothing of where a trace was recorded.
PRIVATE = re.compile(
    rb'"/?(home|root|tmp|usr|opt|work|workspace|mnt|Users)/|[\\"]PATH[\\"]|LD_LIBRARY|hostname', re.IGNORECASE
)


@pytest.fixture(scope="module")
def fixtures() -> ModuleType:
    path = ROOT / "benchmarks" / "record_fixtures.py"
    spec = importlib.util.spec_from_file_location("record_fixtures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["record_fixtures"] = module
    spec.loader.exec_module(module)
    return module


def naive() -> bytes:
    b = TraceBuilder()
    tb.naive(b)
    return gzip.compress(b.bytes(), mtime=0)


# --- what was recorded ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not RECORDED, reason=NONE_YET)
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_is_said_of_a_recorded_trace(fixtures: ModuleType, path: Path) -> None:
    expected = json.loads((path.parent / fixtures.EXPECTED).read_text())
    assert fixtures.expectation(path) == expected[path.name]


@pytest.mark.skipif(not RECORDED, reason=NONE_YET)
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_recorded_trace_is_small_and_says_nothing_of_its_machine(fixtures: ModuleType, path: Path) -> None:
    assert path.stat().st_size <= fixtures.LARGEST_BYTES
    text = gzip.decompress(path.read_bytes())
    assert not PRIVATE.search(text) and not parse_trace(text).has_environment


@pytest.mark.skipif(not RECORDED, reason=NONE_YET)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_recorded_trace_has_its_expectation_and_none_is_left_over(fixtures: ModuleType, folder: Path) -> None:
    expected = json.loads((folder / fixtures.EXPECTED).read_text())
    assert set(expected) == {path.name for path in folder.glob("*.json.gz")}


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_tar_of_traces_becomes_expectations(
    fixtures: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tar = tmp_path / "traces-nvidia-h200.tar"
    tar.write_bytes(fixtures.pack({"b.json.gz": naive(), "a.json.gz": naive()}))
    assert fixtures.main(["--unpack", str(tar)], tmp_path) == 0 and fixtures.main(["--write"], tmp_path) == 0
    folder = tmp_path / "tests" / "data" / "traces" / "nvidia-h200"
    expected = json.loads((folder / "expected.json").read_text())
    assert list(expected) == ["a.json.gz", "b.json.gz"]
    assert expected["a.json.gz"] == {
        "findings": ["masked-fill-copy", "occupancy-estimator", "unfused-attention"],
        "sites": ["1 × forward unfused [B8,H16,L1024,D64,bf16]"],
    }
    assert tar.read_bytes() == fixtures.pack({"a.json.gz": naive(), "b.json.gz": naive()})  # the same each time
    assert "2 traces" in capsys.readouterr().out
    assert fixtures.main(["--write"], tmp_path / "empty") == 1


@pytest.mark.parametrize("name", ["../a.json.gz", "/a.json.gz", "a.json", "a/b.json.gz", ".json.gz"])
def test_what_is_no_trace_is_not_unpacked(fixtures: ModuleType, tmp_path: Path, name: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    path = tmp_path / "traces-x.tar"
    path.write_bytes(buffer.getvalue())
    with pytest.raises(AttnscopeError, match="traces only"):
        fixtures.unpack(path, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_what_cannot_be_recorded_is_told_and_the_others_go_on(
    fixtures: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(device: Device) -> None:
        raise RuntimeError("no kernel image\nis available")

    def skipped(device: Device) -> None:
        raise fixtures.Skipped("a CPU has no CUDA graphs")

    def unsaid(call: object, device: str, *, steps: int, modules: bool) -> bytes:
        return gzip.decompress(naive()) + b" " * (call() * steps)  # type: ignore[operator]

    monkeypatch.setattr(fixtures, "record", unsaid)
    monkeypatch.setattr(fixtures, "packed", lambda trace: trace)
    size = len(gzip.decompress(naive()))
    monkeypatch.setattr(fixtures, "LARGEST_BYTES", size + 15)
    chosen = [
        fixtures.Fixture("broken", broken), fixtures.Fixture("skipped", skipped),
        fixtures.Fixture("small", lambda device: lambda: 5), fixtures.Fixture("halved", lambda device: lambda: 10),
        fixtures.Fixture("large", lambda device: lambda: 20),
    ]  # fmt: skip
    found = fixtures.record_all(chosen, Device("cpu", "x"), 60.0)
    assert {name: len(data) - size for name, data in found.items()} == {"small.json.gz": 10, "halved.json.gz": 10}
    printed = capsys.readouterr().out
    assert "broken: failed: RuntimeError: no kernel image" in printed and "is available" not in printed
    assert "skipped: not recorded: a CPU has no CUDA graphs" in printed and "large: not recorded" in printed
    assert not fixtures.record_all(chosen[2:3], Device("cpu", "x"), -1.0)
    assert "small: not recorded: -1 s are over" in capsys.readouterr().out


def test_names_are_told_apart_and_can_be_unpacked(fixtures: ModuleType) -> None:
    names = [fixture.name for fixture in fixtures.fixtures()]
    assert len(set(names)) == len(names) > 30
    assert all(fixtures.NAME.fullmatch(f"{name}.json.gz") for name in names)


@pytest.mark.slow
def test_recording_on_a_cpu(fixtures: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = "sdpa_flash-forward,mask-causal-math,mask-padding-math,inference-modules,graph-replay"
    assert fixtures.main(["--device", "cpu", "--out", str(tmp_path), "--only", wanted, "--seconds", "200"]) == 0
    assert "graph-replay: not recorded" in capsys.readouterr().out
    (tar,) = tmp_path.glob("traces-*.tar")
    assert fixtures.unpack(tar, tmp_path / "t") == sorted(
        f"{name}.json.gz" for name in wanted.split(",") if name != "graph-replay"
    )
    said = fixtures.expectations(tmp_path / "t")
    assert said["sdpa_flash-forward.json.gz"]["sites"] == [
        "2 × forward SDPA flash on the CPU [B2,H8,L256,D64,bf16,causal]"
    ]
    for path in (tmp_path / "t").glob("*.gz"):
        text = gzip.decompress(path.read_bytes())
        assert len(path.read_bytes()) <= fixtures.LARGEST_BYTES and not PRIVATE.search(text)
    modules = parse_trace(gzip.decompress((tmp_path / "t" / "inference-modules.json.gz").read_bytes())).modules
    assert any("TransformerEncoderLayer" in module.name for module in modules)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_recording_on_a_gpu(fixtures: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fixtures.main(["--device", "cuda", "--out", str(tmp_path)]) == 0
    assert "failed" not in capsys.readouterr().out
