"""Stage 6: every finding on a whole trace, those that could save most first.

Reads TraceFacts, writes Finding. Imports neither torch nor an implementation.
"""

from __future__ import annotations

from attnscope.explaining import attention_rules, card_rules, window_rules
from attnscope.explaining.trace_facts import TraceFacts, TraceRule
from attnscope.records import Finding

__all__ = ["FINDING_IDS", "TraceFacts", "find_in_trace"]

RULES: tuple[TraceRule, ...] = (*attention_rules.RULES, *card_rules.RULES, *window_rules.RULES)
FINDING_IDS = (
    "built-in-window",
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
    "pageable-copies",
    "safe-softmax",
    "tf32-off",
    "too-few-blocks",
    "uneven-calls",
    "unfused-attention",
)


def find_in_trace(facts: TraceFacts) -> tuple[Finding, ...]:
    """Every finding on this trace."""
    found = [finding for rule in RULES if (finding := rule(facts)) is not None]
    return tuple(sorted(found, key=lambda finding: -(finding.saving_us or 0.0)))
