"""Stage 6: findings on what was chosen: an implementation where a faster one fits, and the price of determinism.

Each rule is a pure function from TraceFacts to at most one Finding. Imports neither torch nor an implementation.
"""

from __future__ import annotations

import math
import re

from attnscope.explaining.fused_times import CUDNN, EFFICIENT, FLASH, Estimate, kernel_us, kernels_for
from attnscope.explaining.sites import AttentionCall, Site
from attnscope.explaining.trace_facts import TraceFacts, evidence, site_evidence, total
from attnscope.records import Finding
from attnscope.trace.names import readable_name
from attnscope.units import format_us

KERNEL_OF = {"SDPA cuDNN": CUDNN, "SDPA flash": FLASH, "SDPA efficient": EFFICIENT}
BACKENDS = {CUDNN: "CUDNN_ATTENTION", FLASH: "FLASH_ATTENTION", EFFICIENT: "EFFICIENT_ATTENTION"}
LEAST_GAIN = 1.2  # the estimate's own error is smaller
# FlashAttention-2's row sums clear dQ's accumulator unless the backward is deterministic: then a fill of one
# accumulator for each split does, the splits walk over the keys in order, and the conversion adds them up.
DETERMINISTIC = re.compile(r"flash_bwd_dot_do_o_kernel<false\b")
MAIN_KERNEL = re.compile(r"flash_bwd_dq_dk_dv_loop\w*<[\w:]*Flash_bwd_kernel_traits<\d+, \d+, (\d+)")
ORDERED = (
    "Attention's backward runs deterministically: each split of the keys sums dQ into a copy of its own, and the "
    "copies are added in order."
)
FILLED = "Uninitialised memory is filled in and around attention, since deterministic algorithms are on."
EMPTY_OPS = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")


def better_implementation(facts: TraceFacts) -> Finding | None:
    """A fused kernel ran where PyTorch has a faster one that takes the same call."""
    better: dict[Site, Estimate] = {}
    for site in facts.sites:
        estimate = _faster(facts, site)
        if estimate is not None:
            better[site] = estimate
    if not better:
        return None
    saving, arithmetic = facts.saving_by(better, lambda site: better[site])
    ran = dict.fromkeys(KERNEL_OF[site.first.implementation] for site in better)
    fits = dict.fromkeys(estimate.kernel for estimate in better.values())
    backends = ", ".join(f"SDPBackend.{BACKENDS[kernel]}" for kernel in fits)
    return Finding(
        id="better-implementation",
        sentence=f"The {' and the '.join(ran)} kernel ran where the {' or '.join(fits)} kernel takes the same call and "
        "is faster on this card.",
        evidence=site_evidence(better),
        saving_us=saving,
        arithmetic=arithmetic,
        remedy=f"with torch.nn.attention.sdpa_kernel([{backends}]): ...  # or leave PyTorch its choice",
        confidence="medium",
    )


def _faster(facts: TraceFacts, site: Site) -> Estimate | None:
    """The fastest of the kernels that PyTorch prefers to the one that ran; none where the gain is within the error."""
    first = site.first
    ran = KERNEL_OF.get(first.implementation)
    problem = first.problem
    if (
        ran is None
        or facts.card is None
        or problem.mask
        or problem.bottom_right
        or problem.window
        or not problem.shaped
        or is_deterministic(first)
    ):
        return None
    found = []
    order = kernels_for(problem, first.direction, facts.card)
    for kernel in order[: order.index(ran)] if ran in order else ():
        us = kernel_us(problem, first.direction, facts.card, kernel)
        if us is not None:
            found.append(Estimate(us, kernel))
    fastest = min(found, key=lambda one: one.us, default=None)
    gains = fastest is not None and site.us / len(site.calls) > LEAST_GAIN * fastest.us
    return fastest if gains else None


def is_deterministic(call: AttentionCall) -> bool:
    """Whether the backward adds up in a fixed order."""
    return any(DETERMINISTIC.search(readable_name(work.name)) for work in call.works)


def deterministic_backward(facts: TraceFacts) -> Finding | None:
    """The backward adds up in a fixed order, or uninitialised memory is filled: both come with determinism."""
    calls = [call for site in facts.sites for call in site.calls if is_deterministic(call)]
    fills = [w for w in facts.attention if w.role == "fill" and w.attributed and w.inside(*EMPTY_OPS)]
    if not calls and not fills:
        return None
    known = [us for call in calls if (us := _extra_us(facts, call)) is not None]
    saving = sum(known) + total(fills)
    parts = []
    if known:
        why = "fill and sum of the splits beyond one, and blocks that do not divide evenly"
        parts.append(f"{len(known)} backward calls: {format_us(sum(known))} ({why})")
    if fills:
        parts.append(f"{len(fills)} fills of uninitialised memory: {format_us(total(fills))}")
    remedy = "torch.use_deterministic_algorithms(False) where runs need not repeat bit by bit"
    if fills:
        remedy = "torch.utils.deterministic.fill_uninitialized_memory = False; or " + remedy
    works = [work for call in calls for work in call.works]
    return Finding(
        id="deterministic-backward",
        sentence=ORDERED if calls else FILLED,
        evidence=evidence([*works, *(fill for fill in fills if fill not in works)]),
        saving_us=saving or None,
        arithmetic="; ".join(parts) if saving else "not estimated: the trace lacks the kernels' grids",
        remedy=remedy,
        confidence="medium",
    )


def _extra_us(facts: TraceFacts, call: AttentionCall) -> float | None:
    """What the fixed order costs a call: all but one split's fill and sum, and the main kernel's uneven last wave."""
    main = next((work for work in call.works if MAIN_KERNEL.search(readable_name(work.name))), None)
    multiprocessors = facts.device.num_sms if facts.device is not None else None
    if main is None or main.event is None or main.event.grid is None or not multiprocessors or not call.problem.S:
        return None
    match = MAIN_KERNEL.search(readable_name(main.name))
    splits, heads = main.event.grid[0], math.prod(main.event.grid[1:])
    if match is None or not splits or not heads:
        return None
    tiles = math.ceil(call.problem.S / int(match[1]))
    beyond_one = 1 - 1 / splits
    accumulators = [work for work in call.works if work.role == "fill" and not work.inside(*EMPTY_OPS)]
    sums = [work for work in call.works if "convert_dq" in work.name]
    plain = max(tiles * heads / multiprocessors, 1.0)
    ordered = math.ceil(splits * heads / multiprocessors) * math.ceil(tiles / splits)
    return beyond_one * (total(accumulators) + total(sums)) + main.us * max(1 - plain / ordered, 0.0)


RULES = (better_implementation, deterministic_backward)
