"""The ``attnscope faults`` command: each probe in a child process, so that a fault costs its own row only.

Reads what :mod:`attnscope.faults` tries, writes ``known_faults.toml`` and a table. Imports no torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnscope.device import Device, find_device
from attnscope.errors import UnknownName
from attnscope.fault_probes import FAULTS, find_fault
from attnscope.faults import KNOWN_FAULTS, FaultRecord, run_probes, write_known_faults
from attnscope.implementation import find
from attnscope.probing import OUTCOMES, Fault, Seen
from attnscope.worker import Caller, RemoteError, Worker, WorkerFailed

PROBE_LIMIT_S = 90.0


def faults_table(device: str | None, write: bool, ids: Sequence[str] = ()) -> str:
    """Probe ``device`` (``cpu``, ``cuda``; None: the GPU if there is one), with ``write`` keep the result; a table.

    ``ids`` are the faults to try; none: all.

    Raises:
        UnknownName: there is no such fault.
        DeviceError: there is no such device.
        RecordError: what was seen cannot be written, or does not read back as it was.
    """
    for name in ids:
        if find_fault(name) is None:
            raise UnknownName("fault", name, (fault.id for fault in FAULTS))
    chosen = [fault for fault in FAULTS if not ids or fault.id in ids]
    worker = Worker(warm_up=("attnscope.jobs:start", device))
    try:
        found = run_probes(find_device(device), faults=chosen, seen_by=in_a_child(worker))
    finally:
        worker.close()
    if write:
        write_known_faults(found)
    return render(found, written=write)


def in_a_child(worker: Caller) -> Callable[[Fault, str, Device], Seen]:
    """Tries a fault through ``worker``, whose process is a new one after anything that ended the last."""

    def try_it(fault: Fault, name: str, device: Device) -> Seen:
        try:
            seen: Seen = worker.call("attnscope.faults_cli:probe", fault.id, name, device, timeout_s=PROBE_LIMIT_S)
        except WorkerFailed as error:
            said = str(error).splitlines()[0]
            return Seen("skipped" if said.startswith("took longer") else "observed", said)
        except RemoteError as error:
            return Seen("skipped", f"could not be tried: {error}")
        return seen

    return try_it


def probe(fault_id: str, name: str, device: Device, *, report: object) -> Seen:
    """What a child does; memory that a recipe took goes back to the card."""
    import gc

    import torch

    from attnscope.jobs import global_state_kept

    del report
    fault = find_fault(fault_id)
    assert fault is not None
    with global_state_kept():
        seen = fault.try_on(find(name), device)
    gc.collect()
    if device.kind == "cuda":
        torch.cuda.synchronize(device.index)  # so that what the recipe broke shows here, not in the next one
        torch.cuda.empty_cache()
    return seen


def render(found: list[FaultRecord], *, written: bool) -> str:
    """What was seen, by outcome."""
    lines = [f"Public faults on {found[0].device}, torch {found[0].torch}:"] if found else []
    for outcome in OUTCOMES:
        rows = [record for record in found if record.outcome == outcome]
        lines += [f"\n{outcome} ({len(rows)})", *(f"  {r.id:4} {r.implementation:15} {r.detail}" for r in rows)]
    if written:
        lines.append(
            f"\nwritten: {KNOWN_FAULTS.name}, {sum(r.outcome != 'skipped' for r in found)} entries of this device"
        )
    return "\n".join(lines)
