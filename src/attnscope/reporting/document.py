"""Stage 7: a run as one JSON document, what ``--json`` prints. Reads a Run; imports no torch."""

from __future__ import annotations

from typing import Any

import msgspec

from attnscope.records import SCHEMA_VERSION, Result, Run, to_builtins


def run_document(run: Run) -> dict[str, Any]:
    """``schema_version``, ``device``, ``environment``, ``limits`` and ``workloads``, each with its ``results``.

    A result carries ``implementation``, ``status``, ``reasons`` by direction, ``check``, ``forward`` and ``backward``
    (measurements or null), ``kernels`` (on a CPU ``ops``), and ``trace``: direction -> path within the run's folder.
    """
    document = {"schema_version": SCHEMA_VERSION} | {
        name: to_builtins(getattr(run, name))
        for name in ("device", "environment", "created", "command", "seed", "modes", "quick", "interrupted", "limits")
    }
    document["workloads"] = [
        {"workload": workload, "results": [_result(result, run.device.kind) for result in run.for_workload(workload)]}
        for workload in run.workloads
    ]
    return document


def run_json(run: Run) -> str:
    """The document as indented JSON text."""
    return msgspec.json.format(msgspec.json.encode(run_document(run)), indent=2).decode()


def _result(result: Result, device_kind: str) -> dict[str, Any]:
    body = to_builtins(result)
    body.pop("workload")
    body["ops" if device_kind == "cpu" else "kernels"] = body.pop("kernels")
    body["trace"] = {profile.direction: profile.trace for profile in result.profiles if profile.trace} or None
    return body
