"""Stage 3: the faults that are known: implementation x range x versions x what goes wrong, written by a command.

Reads :mod:`attnscope.fault_probes`, writes FaultRecords and ``known_faults.toml``, which the documentation is written
from. Must not import a later stage, nor torch at import time.
"""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from attnscope.device import Device, Environment, read_environment
from attnscope.errors import RecordError
from attnscope.fault_probes import FAULTS, find_fault
from attnscope.implementation import find, names
from attnscope.probing import OUTCOMES, Fault, Seen
from attnscope.workload import Workload

SCHEMA_VERSION = 1
KNOWN_FAULTS = Path(__file__).with_name("known_faults.toml")
HEADER = "# Faults that probes looked for, and whether they were there. `attnscope faults --write` writes this file.\n"
# Compiling takes longer than all other probes together: what is compiled is probed for few faults only.
SLOW = {
    "naive_compiled": ("W1",), "flex": ("W1", "A5"), "triton_fused": ("W1", "W22"), "flash_attn_4": ("W22", "A6"),
}  # fmt: skip


@dataclass(frozen=True)
class FaultRecord:
    """One fault on one implementation, one device and one set of versions.

    ``device`` is ``cpu`` or the GPU's name. ``range`` says in words for which workloads, ``wrong`` what goes wrong,
    ``outcome`` whether it was observed, absent or skipped, ``detail`` what was seen.
    """

    id: str
    implementation: str
    device: str
    torch: str
    cudnn: str | None
    outcome: str
    range: str
    wrong: str
    source: str
    detail: str

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise RecordError(f"outcome must be one of {', '.join(OUTCOMES)}, got {self.outcome!r}")

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What a newer record of the same replaces: fault, implementation, device, torch, cuDNN."""
        return self.id, self.implementation, self.device, self.torch, self.cudnn or ""


def run_probes(
    device: Device,
    implementations: Sequence[str] | None = None,
    faults: Sequence[Fault] = FAULTS,
    *,
    seen_by: Callable[[Fault, str, Device], Seen] = lambda fault, name, device: fault.try_on(find(name), device),
) -> list[FaultRecord]:
    """Try every fault on every implementation (default: the registry) on ``device``.

    ``seen_by`` tries one of them; by default in this process.

    Raises:
        UnknownImplementation: a name is not registered.
    """
    chosen = names() if implementations is None else list(implementations)
    versions = _versions(device, read_environment())
    found = []
    for fault in faults:
        for name in chosen:
            if fault.implementations is not None and name not in fault.implementations:
                continue
            if implementations is None and fault.id not in SLOW.get(name, (fault.id,)):
                continue
            seen = seen_by(fault, name, device)
            found.append(
                FaultRecord(
                    fault.id,
                    name,
                    *versions,
                    seen.outcome,
                    fault.range,
                    fault.wrong,
                    fault.source,
                    _one_line(seen.detail),
                )
            )
    return found


def known_faults_for(
    implementation: str,
    workload: Workload,
    device: Device,
    environment: Environment | None = None,
    records: Iterable[FaultRecord] | None = None,
) -> list[FaultRecord]:
    """Faults that were observed on this implementation, device and versions, and whose range holds ``workload``."""
    versions = _versions(device, read_environment() if environment is None else environment)
    found = []
    for record in read_known_faults() if records is None else records:
        fault = find_fault(record.id)
        same = record.implementation == implementation and (record.device, record.torch, record.cudnn) == versions
        if same and record.outcome == "observed" and fault is not None and fault.applies(workload):
            found.append(record)
    return found


def read_known_faults(path: Path = KNOWN_FAULTS) -> list[FaultRecord]:
    """The records of a ``known_faults.toml``; none where there is no such file.

    Raises:
        RecordError: the file is not what the command writes.
    """
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise RecordError(f"cannot read {path}: {error}\nhint: attnscope faults --write makes it anew") from None
    if body.get("schema_version") != SCHEMA_VERSION:
        raise RecordError(
            f"{path}: schema_version must be {SCHEMA_VERSION}, got {body.get('schema_version')!r}\n"
            "hint: update attnscope"
        )
    return [_record(entry, f"{path}: fault {number}") for number, entry in enumerate(body.get("fault", []), 1)]


def write_known_faults(records: Iterable[FaultRecord], path: Path = KNOWN_FAULTS) -> None:
    """Put ``records`` into the file, in a fixed order; entries of other devices and versions stay as they are.

    What was skipped says nothing and is not kept.

    Raises:
        RecordError: the file that is there cannot be read, or the new one cannot be written.
    """
    kept = {record.key: record for record in read_known_faults(path)}
    kept |= {record.key: record for record in records if record.outcome != "skipped"}
    order = {fault.id: number for number, fault in enumerate(FAULTS)}
    rows = sorted(kept.values(), key=lambda record: (order.get(record.id, len(order)), record.key))
    text = HEADER + f"schema_version = {SCHEMA_VERSION}\n" + "".join(map(_spelled, rows))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror or error}\nhint: run it in a checkout that you may write to"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    if read_known_faults(path) != rows:
        raise RecordError(f"{path} does not read back as it was written\nhint: report this as a fault of attnscope")


def _versions(device: Device, environment: Environment) -> tuple[str, str, str | None]:
    """(device, torch, cuDNN) as records name them."""
    on_gpu = device.kind == "cuda"
    torch = environment.packages.get("torch", "none")
    return device.name if on_gpu else device.kind, torch, environment.cudnn_loaded if on_gpu else None


def _one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _spelled(record: FaultRecord) -> str:
    """One ``[[fault]]`` table; a JSON string of printable text is a TOML string."""
    pairs = ((name, value) for name, value in asdict(record).items() if value is not None)
    return "\n[[fault]]\n" + "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in pairs)


def _record(entry: Any, where: str) -> FaultRecord:
    known = [field.name for field in fields(FaultRecord)]
    entry = {"cudnn": None} | entry if isinstance(entry, dict) else {}
    if sorted(entry) != sorted(known) or any(not isinstance(v, str) for k, v in entry.items() if k != "cudnn"):
        raise RecordError(
            f"{where} must have the texts {', '.join(known)}, got {', '.join(map(str, entry)) or 'nothing'}\n"
            "hint: attnscope faults --write makes the file anew"
        )
    return FaultRecord(**entry)
