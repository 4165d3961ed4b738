"""Stage 6: what is said of a whole trace. Frozen, plain data, ready for JSON and for a page.

Written by ``whole``, read by reporting. Imports neither torch nor an implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnscope.records import Finding


@dataclass(frozen=True)
class Window:
    """What was profiled. Times in microseconds; ``busy_us`` is the union of intervals, ``sum_us`` their plain sum.

    ``lost`` are sentences on what the trace lacks or cannot show. ``unattributed_us`` is GPU time of which the trace
    does not say which op it was for, ``attention_us`` what attention took (some of it known by kernel names alone:
    ``inferred_us``); the rest is other work. ``attention_by`` splits ``attention_us`` by what it is known by, the
    surest first. ``gpus`` is over how many cards ``busy_us`` is summed. On a CPU trace the same figures are the ops'
    own times.
    """

    card: str | None
    versions: tuple[str, ...]
    span_us: float
    busy_us: float
    sum_us: float
    on_gpu: bool
    kernels: int
    copies: int
    fills: int
    launches: int
    ops: int
    steps: int
    attention_us: float
    inferred_us: float
    unattributed_us: float
    lost: tuple[str, ...] = ()
    attention_by: tuple[tuple[str, float], ...] = ()
    gpus: int = 1


@dataclass(frozen=True)
class CallSite:
    """Attention calls that are alike. ``name`` is the op, or what stands for it; ``module`` the path of nn.Modules.

    ``tflop_per_s`` counts useful FLOPs (causal: visible pairs; backward with the recomputation), ``peak_fraction`` is
    its share of the card's data sheet (``peak_source``). ``inferred``: known by kernel names alone. ``sizes`` are
    (B·H, L, S, D), the same however heads are folded. ``workload`` spells it for ``attnscope compare``, with what was
    ``assumed``; where the trace says too little for that, ``no_workload`` is the reason.
    """

    name: str
    module: str | None
    direction: str
    implementation: str
    problem: str
    calls: int
    kernels_per_call: float
    time_us: float
    slowest_us: float
    median_us: float
    tflop_per_s: float | None
    peak_fraction: float | None
    peak_source: str | None
    inferred: bool
    sizes: tuple[int, int, int, int] | None = None
    kernels: tuple[str, ...] = ()
    workload: str | None = None
    assumed: tuple[str, ...] = ()
    no_workload: str | None = None


@dataclass(frozen=True)
class Explanation:
    """Everything said of one trace: its window, its attention call sites, its findings."""

    trace: str
    window: Window
    sites: tuple[CallSite, ...]
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class SiteChange:
    """One call site in two traces; a missing side is None. Times are per call, and over all calls, in microseconds."""

    site: str
    problem: str
    before: CallSite | None
    after: CallSite | None

    @property
    def ratio(self) -> float | None:
        """Time of a call after over before."""
        if self.before is None or self.after is None or self.before.median_us <= 0:
            return None
        return self.after.median_us / self.before.median_us


@dataclass(frozen=True)
class Difference:
    """Two traces: before and after."""

    before: Explanation
    after: Explanation
    changes: tuple[SiteChange, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]
