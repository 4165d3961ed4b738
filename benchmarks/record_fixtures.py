"""Record the small traces that the tests explain, on a GPU; and write down what must be said of each.

    python benchmarks/record_fixtures.py --out FOLDER      # on a GPU, under a minute: FOLDER/traces-DEVICE.tar
    python benchmarks/record_fixtures.py --unpack FILE.tar # into tests/data/traces/DEVICE
    python benchmarks/record_fixtures.py --write           # expected.json beside them, to be read by a human
    python benchmarks/record_fixtures.py --list

Recorded are every implementation forward and backward (eager), compiled calls, a replayed and a captured CUDA graph,
autocast, masks, a small training step. Environment, host names and paths are left out. What cannot be recorded here (an
implementation's reasons, a failure, time that ran out) is told, and the others go on.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import tarfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # a test loads this file by its path
from fixture_calls import Fixture, Skipped, fixtures
from recording import packed, record

from attnscope.device import Device, find_device
from attnscope.errors import AttnscopeError
from attnscope.explaining import explain_trace
from attnscope.trace import parse_trace, read_trace

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = Path("tests") / "data" / "traces"
EXPECTED = "expected.json"
LARGEST_BYTES = 60_000
SECONDS = 55.0
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*\.json\.gz")


# --- recording --------------------------------------------------------------------------------------------------------


def record_fixture(fixture: Fixture, device: Device) -> bytes:
    """Its trace, gzipped. Raises Skipped where it cannot be recorded or would be too large."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice on what a fixture does on purpose
        call = fixture.make(device)
        for steps in range(fixture.steps, 0, -1):
            trace = record(call, device.kind, steps=steps, modules=fixture.modules)
            data = packed(trace)
            if len(data) <= LARGEST_BYTES:
                break
    if len(data) > LARGEST_BYTES:
        raise Skipped(f"its trace would be {len(data):,} bytes, at most {LARGEST_BYTES:,} are kept")
    parse_trace(trace)  # a trace that cannot be read is no fixture
    return data


def record_all(chosen: Sequence[Fixture], device: Device, seconds: float) -> dict[str, bytes]:
    """File name -> trace, of all that could be recorded."""
    end = time.perf_counter() + seconds
    found: dict[str, bytes] = {}
    for fixture in chosen:
        if time.perf_counter() > end:
            print(f"{fixture.name}: not recorded: {seconds:.0f} s are over", flush=True)
            continue
        try:
            data = record_fixture(fixture, device)
        except Skipped as reason:
            print(f"{fixture.name}: not recorded: {reason}", flush=True)
            continue
        except Exception as error:  # a fixture's own failure costs that fixture only
            said = str(error).strip().partition("\n")[0]
            print(f"{fixture.name}: failed: {type(error).__name__}: {said[:200]}", flush=True)
            continue
        found[f"{fixture.name}.json.gz"] = data
        print(f"{fixture.name}: {len(data):,} bytes", flush=True)
    return found


def pack(traces: dict[str, bytes]) -> bytes:
    """One tar of them, without owners and times."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in sorted(traces.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def unpack(tar_path: Path, folder: Path) -> list[str]:
    """The traces of a tar into a folder; anything in it that is no trace of ours is refused."""
    with tarfile.open(tar_path) as tar:
        entries = tar.getmembers()
        odd = [entry.name for entry in entries if not entry.isfile() or not NAME.fullmatch(entry.name)]
        if odd:
            raise AttnscopeError(f"{tar_path} must hold traces only, and holds {odd[0]!r}")
        folder.mkdir(parents=True, exist_ok=True)
        for entry in entries:
            file = tar.extractfile(entry)
            assert file is not None
            (folder / entry.name).write_bytes(file.read())
    return [entry.name for entry in entries]


# --- what must be said of them ----------------------------------------------------------------------------------------


def expectation(path: Path) -> dict[str, list[str]]:
    """Finding ids in their order, and each call site: how often, direction, implementation, problem."""
    explanation = explain_trace(read_trace(path), path.name)
    sites = [f"{s.calls} × {s.direction} {s.implementation} [{s.problem}]" for s in explanation.sites]
    return {"findings": sorted(finding.id for finding in explanation.findings), "sites": sorted(sites)}


def expectations(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Of every trace in a folder."""
    return {path.name: expectation(path) for path in sorted(folder.glob("*.json.gz"))}


def write_expectations(root: Path) -> int:
    """Write each folder's expectations anew; 1 where there is no folder."""
    folders = [path for path in sorted((root / FIXTURES).glob("*")) if path.is_dir()]
    for folder in folders:
        text = json.dumps(expectations(folder), indent=1, ensure_ascii=False) + "\n"
        (folder / EXPECTED).write_text(text)
        print(f"wrote {folder.relative_to(root) / EXPECTED}: read what changed before you commit it")
    if not folders:
        print(f"{FIXTURES} holds no traces\nhint: record them on a GPU, then --unpack", file=sys.stderr)
    return int(not folders)


# --- the command ------------------------------------------------------------------------------------------------------


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Exit status: 0 done, 1 nothing was recorded or found, 2 usage."""
    parser = argparse.ArgumentParser(description="Record the small traces that the tests explain.")
    parser.add_argument("--list", action="store_true", help="name the traces and end")
    parser.add_argument("--only", metavar="NAMES", help="only these, with commas between them")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one, else the CPU")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the tar (default: this one)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="start no recording after so many")
    parser.add_argument("--unpack", type=Path, metavar="TAR", help="put a tar's traces where the tests look, and end")
    parser.add_argument("--write", action="store_true", help="write what must be said of the traces, and end")
    options = parser.parse_args(arguments)
    if options.unpack is not None:
        folder = root / FIXTURES / options.unpack.name.removeprefix("traces-").removesuffix(".tar")
        print(f"{len(unpack(options.unpack, folder))} traces in {folder.relative_to(root)}")
        return 0
    if options.write:
        return write_expectations(root)
    chosen = list(fixtures())
    if options.list:
        print("\n".join(fixture.name for fixture in chosen))
        return 0
    try:
        device = find_device(options.device)
    except AttnscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    wanted = set(options.only.split(",")) if options.only else None
    chosen = [fixture for fixture in chosen if wanted is None or fixture.name in wanted]
    traces = record_all(chosen, device, options.seconds)
    if not traces:
        print("error: nothing was recorded\nhint: --list names what --only takes", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"traces-{slug(device.name)}.tar"
    path.write_bytes(pack(traces))
    print(f"wrote {path}: {len(traces)} traces, {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
