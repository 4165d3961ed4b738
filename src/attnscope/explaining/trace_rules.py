"""Stage 6: every finding on a whole trace, those that could save most first.

Reads TraceFacts, writes Finding. Imports neither torch nor an implementation.
"""

from __future__ import annotations

from attnscope.explaining import attention_rules, card_rules, choice_rules, mask_rules, window_rules
from attnscope.explaining.bounds import bounded
from attnscope.explaining.trace_facts import TraceFacts, TraceRule
from attnscope.records import Finding

__all__ = ["FINDING_IDS", "TraceFacts", "find_in_trace"]

RULES: tuple[TraceRule, ...] = (
    *attention_rules.RULES, *mask_rules.RULES, *choice_rules.RULES, *card_rules.RULES, *window_rules.RULES,
)  # fmt: skip
HOST_FINDINGS = ("launch-bound", "built-in-window")  # what they save is the host's time, or idle time
FINDING_IDS = (
    "better-implementation",
    "built-in-window",
    "deterministic-backward",
    "dropout-at-inference",
    "dtype-casts",
    "gqa-materialised",
    "graph-capture",
    "graph-replay",
    "launch-bound",
    "launched-before-window",
    "layout-copies",
    "lost-kernels",
    "mask-keeps-flash-away",
    "mask-rebuilt-per-call",
    "masked-fill-copy",
    "math-path",
    "matmul-off-tensor-cores",
    "misaligned-gemm",
    "occupancy-estimator",
    "occupancy-low",
    "pageable-copies",
    "safe-softmax",
    "tf32-off",
    "too-few-blocks",
    "uneven-calls",
    "unfused-attention",
)


def find_in_trace(facts: TraceFacts) -> tuple[Finding, ...]:
    """Every finding on this trace."""
    found = [_within_window(finding, facts) for rule in RULES if (finding := rule(facts)) is not None]
    return tuple(sorted(found, key=lambda finding: -(finding.saving_us or 0.0)))


def _within_window(finding: Finding, facts: TraceFacts) -> Finding:
    """A saving of GPU work is at most the time in which the GPU was busy, any other at most the window's span."""
    window = facts.window
    if finding.id in HOST_FINDINGS or not window.on_gpu:
        return bounded(finding, window.span_us, "the window lasts")
    return bounded(finding, min(window.busy_us, window.span_us), "the GPU is busy")
