"""Stage 6: what the rules on a whole trace read, and how they word evidence and savings.

Reads a Trace, its work and its call sites; writes nothing. Pure; imports neither torch nor an implementation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from attnscope.explaining.expected import short_name
from attnscope.explaining.explanation import Window
from attnscope.explaining.fused_times import Card, Estimate, fused_estimate
from attnscope.explaining.peaks import Peaks
from attnscope.explaining.shapes import Problem, count, first_shape, operand_sizes, tensor_dtypes
from attnscope.explaining.sites import AttentionCall, Site
from attnscope.explaining.works import Sequence, Work
from attnscope.records import Finding
from attnscope.trace.events import DeviceProperties, Trace
from attnscope.trace.names import readable_name
from attnscope.units import format_us, significant

MASKING_OPS = (
    "aten::masked_fill", "aten::masked_fill_", "aten::where", "aten::add", "aten::add_", "aten::baddbmm",
)  # fmt: skip
GENERATED_MASKING = re.compile(r"triton_\w*(masked_fill|where)")
CAUSAL_SOFTMAX = "upper_triang_masked_softmax"  # Megatron's and Apex's, which masks what lies above the diagonal
NEAR = 8  # works before a call in which its operands are made
NEAR_AFTER = 2  # works behind a call in which its output is copied
CAST_NEAR = 6  # works before and after a call in which its operands and results are cast
EVIDENCE_LINES = 5
USUAL_MULTIPROCESSORS = 108  # where the trace does not say
USUAL_CAPABILITY = 8
BACKWARD = re.compile(r"[bB]ackward|autograd::engine")
AMD_KEYS = ("hip_runtime_version", "roctracer_version", "rocprofiler-sdk_version")


@dataclass
class TraceFacts:
    """The trace, its work in sequences, its call sites, its window, and the card's rates where known."""

    trace: Trace
    sequences: list[Sequence]
    sites: list[Site]
    window: Window
    peaks: Peaks | None

    @cached_property
    def works(self) -> list[Work]:
        """All work."""
        return [work for sequence in self.sequences for work in sequence]

    @cached_property
    def attention(self) -> list[Work]:
        """The work that is attention."""
        return [work for site in self.sites for work in site.works]

    @cached_property
    def has_backward(self) -> bool:
        """Whether gradients were computed in the trace."""
        return any(BACKWARD.search(name) for name in {op.name for op in self.trace.ops})

    @cached_property
    def device(self) -> DeviceProperties | None:
        """The card that worked."""
        index = next((e.device for e in self.trace.device_events if e.device is not None), None)
        return self.trace.device(index)

    @cached_property
    def is_amd(self) -> bool:
        """Whether the trace comes from an AMD card."""
        named = any("AMD" in device.name or device.warp_size == 64 for device in self.trace.devices)
        called = any(
            event.launch is not None and event.launch.name.startswith("hip") for event in self.trace.device_events
        )
        return named or called or any(key in self.trace.meta for key in AMD_KEYS)

    @cached_property
    def _places(self) -> dict[int, tuple[Sequence, int]]:
        """Where each work of attention stands."""
        return {
            id(work): (sequence, at)
            for sequence in self.sequences
            for at, work in enumerate(sequence)
            if work.in_attention
        }

    def before(self, call: AttentionCall, reach: int) -> list[Work]:
        """What the same thread launched just before a call, the nearest first, up to the next attention."""
        sequence, at = self._places[id(call.works[0])]
        found = []
        for work in reversed(sequence[max(at - reach, 0) : at]):
            if work.in_attention:
                break
            found.append(work)
        return found

    def after(self, call: AttentionCall, reach: int) -> list[Work]:
        """What the same thread launched just after a call, up to the next attention."""
        sequence, at = self._places[id(call.works[-1])]
        found = []
        for work in sequence[at + 1 : at + 1 + reach]:
            if work.in_attention:
                break
            found.append(work)
        return found

    @cached_property
    def operand_copies(self) -> list[Work]:
        """Copies in attention calls, and those near them that are as large as an operand or the output."""
        found: dict[Work, None] = {}
        for site in self.sites:
            sizes = operand_sizes(site.first.problem) if site.first.direction == "forward" else set()
            for call in site.calls:
                for work in call.works:
                    if work.role == "copy":
                        found[work] = None
                for work in (*self.before(call, NEAR), *self.after(call, NEAR_AFTER)):
                    if work.role == "matmul":
                        break
                    if work.role == "copy" and work.attributed and count(first_shape(work.op) or []) in sizes:
                        found[work] = None
        return list(found)

    @cached_property
    def card(self) -> Card | None:
        """The card, where its rates are known."""
        device = self.device
        if self.peaks is None:
            return None
        multiprocessors = device.num_sms if device is not None else None
        capability = device.compute_major if device is not None else None
        sizes = (multiprocessors or USUAL_MULTIPROCESSORS, capability or USUAL_CAPABILITY)
        return Card(self.window.card or "", self.peaks, *sizes, self.is_amd)

    def fused(
        self, problem: Problem, direction: str, window: int | None = None, *, masked: bool = False
    ) -> Estimate | None:
        """The fused kernel that PyTorch would take for a problem, and about its time."""
        return None if self.card is None else fused_estimate(problem, direction, self.card, window, masked=masked)

    def fused_saving(self, sites: Iterable[Site]) -> tuple[float | None, str]:
        """What fusing these sites would save, with its arithmetic."""
        sites = list(sites)
        meant = {site: self.problem_meant(site) for site in sites}
        saving, arithmetic = self.saving_by(
            sites,
            lambda site: self.fused(
                meant[site], site.first.direction, masked=not meant[site].causal and adds_mask(site.first)
            ),
        )
        if saving is not None and any(
            problem.causal and not site.first.problem.causal for site, problem in meant.items()
        ):
            arithmetic += "; one mask of queries × keys for all heads is taken as causal"
        return saving, arithmetic

    def problem_meant(self, site: Site) -> Problem:
        """What an unfused site would ask of a fused kernel: a backward is of the problem of its forward, whose dtype
        the math path hides; and one square mask for all batch entries and heads is most likely causal."""
        first = site.first
        if first.how != "unfused" or not first.problem.shaped:
            return first.problem
        if first.direction == "backward":
            same = (one for one in self.sites if one.first.direction == "forward" and one.first.problem.shaped)
            forward = next((one for one in same if one.first.problem.folded == first.problem.folded), None)
            if forward is not None:
                return self.problem_meant(forward)
            half = self._dtype_outside(first)
            if half is not None:
                return replace(first.problem, dtype=half, causal=first.problem.causal or masks_alike(first))
        triangle = any(CAUSAL_SOFTMAX in work.name for work in first.works)
        return replace(first.problem, causal=True) if triangle or masks_alike(first) else first.problem

    def saving_by(self, sites: Iterable[Site], estimate: Callable[[Site], Estimate | None]) -> tuple[float | None, str]:
        """What the estimated kernels would save at these sites, with its arithmetic; a site that would gain nothing
        keeps its time."""
        saving, parts, kernels = 0.0, [], []
        for site in sites:
            each = estimate(site)
            if each is None:
                continue
            after = each.us * len(site.calls)
            saving += max(site.us - after, 0.0)
            parts.append(f"{format_us(site.us)} - {len(site.calls)} × {format_us(each.us)}")
            kernels.append(each.kernel)
        if not parts:
            missing = "the shapes are not known, or no fused kernel takes them" if self.peaks else (
                "this card's rates are not known"
            )  # fmt: skip
            return None, f"not estimated: {missing}"
        if not saving:
            return None, "none: a fused call is reckoned to take as long"
        return saving, (
            f"{'; '.join(parts[:3])}{'; …' if len(parts) > 3 else ''}: what the "
            f"{' or '.join(dict.fromkeys(kernels))} kernel takes for its tiles, at least its traffic, at the share of "
            f"the data sheet's rate that such kernels reach ({self.peaks.source if self.peaks else ''})"
        )

    def _dtype_outside(self, call: AttentionCall) -> str | None:
        """The 16-bit dtype from which casts around a call in fp32 come and to which they go."""
        if call.problem.dtype != "fp32":
            return None
        around = (*self.before(call, CAST_NEAR), *call.works, *self.after(call, CAST_NEAR))
        found = (kind for work in around for kind in is_cast(work) or () if kind in ("bf16", "fp16"))
        return next(found, None)


def masks_alike(call: AttentionCall) -> bool:
    """Whether the scores are masked by one square mask, the same for all batch entries and heads."""
    problem = call.problem
    if not problem.shaped or problem.L != problem.S or problem.L == 1:
        return False
    pairs = (problem.L or 1) * (problem.S or 1)
    scores = (problem.B or 1) * (problem.H or 1) * pairs
    for work in call.works:
        for op in work.ops if not work.replayed else ():
            if op.name not in MASKING_OPS and not GENERATED_MASKING.match(op.name):
                continue
            counts = [math.prod(shape) for shape in op.shapes or [] if shape[-2:] == [problem.L, problem.S]]
            if scores > pairs and scores in counts and pairs in counts:
                return True
    return False


def adds_mask(call: AttentionCall) -> bool:
    """Whether unfused attention puts a mask or a bias of queries × keys on its scores."""
    problem = call.problem
    if call.how != "unfused" or not problem.shaped:
        return False
    for work in call.works:
        op = work.op if not work.replayed else None
        if op is None or op.name not in MASKING_OPS:
            continue
        if op.name == "aten::baddbmm" and (op.values[3:4] or ["0"])[0] in ("0", "0."):
            continue  # its first operand is a place only
        tensors = [shape for shape in op.shapes or [] if shape]
        if sum(shape[-1] == problem.S for shape in tensors) >= 2:
            return True
    return False


TraceRule = Callable[[TraceFacts], Finding | None]


def total(works: Iterable[Work]) -> float:
    """Time of the works together, in microseconds."""
    return sum(work.us for work in works)


def evidence(works: Iterable[Work]) -> tuple[str, ...]:
    """Name by name, the longest first: how often, how long, launched by which op."""
    groups: dict[tuple[str, str | None], list[Work]] = {}
    for work in works:
        groups.setdefault((work.name, work.ops[0].name if work.ops and not work.replayed else None), []).append(work)
    ordered = sorted(groups.items(), key=lambda item: -total(item[1]))
    lines = [
        f"{len(ones)} × {short_name(readable_name(name))}: {format_us(total(ones))}"
        + (f" in {op}" if op and op != name else "")
        for (name, op), ones in ordered[:EVIDENCE_LINES]
    ]
    rest = [work for _, ones in ordered[EVIDENCE_LINES:] for work in ones]
    return (*lines, f"{len(rest)} × others: {format_us(total(rest))}") if rest else tuple(lines)


def site_evidence(sites: Iterable[Site]) -> tuple[str, ...]:
    """Site by site: what, how often, how long."""
    lines = []
    for site in sites:
        first = site.first
        place = f" in {first.module}" if first.module else ""
        lines.append(f"{len(site.calls)} × {first.name} [{first.problem}]{place}: {format_us(site.us)}")
    more = len(lines) - EVIDENCE_LINES
    return (*lines[:EVIDENCE_LINES], f"and {more} call sites more") if more > 0 else tuple(lines)


def sum_text(works: list[Work], what: str) -> str:
    """The arithmetic of a saving that is a plain sum."""
    return f"{len(works)} × on average {format_us(total(works) / len(works))} = {format_us(total(works))}, {what}"


def is_cast(work: Work) -> tuple[str, str] | None:
    """(from, to) where a work copies one floating point dtype into another."""
    if work.role != "copy" or work.replayed:
        return None
    op = next((one for one in work.ops if one.name == "aten::copy_"), None)
    dtypes = tensor_dtypes(op)
    return (dtypes[1], dtypes[0]) if len(dtypes) == 2 and dtypes[0] != dtypes[1] else None


def percent(part: float, whole: float) -> str:
    """A share, for people."""
    return f"{significant(100 * part / whole, 2)} %" if whole > 0 else "0 %"
