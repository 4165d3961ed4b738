"""Stage 6, reading: a Chrome trace, ours or a stranger's, becomes tidy events; kernel names become meanings.

Imports neither torch nor an implementation.
"""

from __future__ import annotations

from attnscope.trace.events import DeviceEvent, Op, RuntimeCall, Step, Trace
from attnscope.trace.names import Meaning, explain_name
from attnscope.trace.reader import parse_trace, read_trace

__all__ = ["DeviceEvent", "Meaning", "Op", "RuntimeCall", "Step", "Trace", "explain_name", "parse_trace", "read_trace"]
