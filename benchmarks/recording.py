"""Record a small trace of any call, for savings.py and record_fixtures.py: scrubbed, gzipped, warm.

Imports torch inside its functions.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnscope.scrubbing import scrub

Call = Callable[[], object]


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def record(
    call: Call, device: str, *, steps: int, warm_calls: int = 3, ops: bool = True, modules: bool = False
) -> bytes:
    """A trace of ``steps`` calls after ``warm_calls`` and one step that the profiler throws away, as JSON.

    Nothing synchronises between the steps, so that the host may run ahead as it does without a profiler. ``ops`` False
    leaves CPU ops out, which slows the host far less; ``modules`` keeps the
    forwards of nn.Modules, and of the Python stacks that must be recorded for it nothing else.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    for _ in range(warm_calls):
        call()
    synchronise(device)
    activities = [ProfilerActivity.CPU] if ops or device == "cpu" else []
    activities += [ProfilerActivity.CUDA] if device == "cuda" else []
    plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
    with profile(
        activities=activities, schedule=plan, record_shapes=ops, with_stack=modules, acc_events=True
    ) as profiler:
        for step in range(steps + 1):
            call()
            if step in (0, steps):
                synchronise(device)  # nothing is in flight when recording starts or ends
            profiler.step()
    return export(profiler)


def export(profiler: Any) -> bytes:
    """The profiler's trace as JSON without host name, file name, environment and paths."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = scrub(json.loads(path.read_text(encoding="utf-8")))
    trace["traceEvents"] = [event for event in trace["traceEvents"] if not _is_python(event)]
    used = {e["args"].get("device") for e in trace["traceEvents"] if isinstance(e.get("args"), dict)}
    cards = trace.get("deviceProperties", [])
    if any(card.get("id") in used for card in cards):
        trace["deviceProperties"] = [card for card in cards if card.get("id") in used]
    return json.dumps(trace, separators=(",", ":")).encode()


def _is_python(event: Any) -> bool:
    """Whether it is a Python function other than a module's forward."""
    return event.get("cat") == "python_function" and not str(event.get("name")).startswith("nn.Module: ")


def packed(trace: bytes) -> bytes:
    """The trace gzipped, the same bytes each time."""
    return gzip.compress(trace, 9, mtime=0)
