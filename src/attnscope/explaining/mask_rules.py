"""Stage 6: findings on masks: built again and again, converted in each call, or given where none is needed.

Each rule is a pure function from TraceFacts to at most one Finding. Imports neither torch nor an implementation.
"""

from __future__ import annotations

from dataclasses import replace

from attnscope.explaining.fused_times import Estimate
from attnscope.explaining.masks import ALL_TRUE, CAUSAL, MASK_NEAR, PADDING, WINDOW, MaskKind, kind_of_mask, made_masks
from attnscope.explaining.sites import Site
from attnscope.explaining.trace_facts import TraceFacts, evidence, site_evidence, sum_text, total
from attnscope.explaining.works import Work
from attnscope.records import Finding
from attnscope.units import format_us

MOST_FLASH_D = 256
SLOWER_PATHS = ("SDPA efficient", "SDPA math")
CUDNN = "SDPA cuDNN"
SDPA_OP = "aten::scaled_dot_product_attention"
INNER_OPS = ("aten::_scaled_dot_product_attention_math",)
REMEDIES = {
    ALL_TRUE: "leave attn_mask out: it hides nothing",
    CAUSAL: "is_causal=True and no attn_mask; with fewer queries than keys torch.nn.attention.bias.causal_lower_right",
    PADDING: "varlen attention on packed sequences (nested tensors with layout=torch.jagged, or cu_seqlens)",
    WINDOW: "torch.nn.attention.flex_attention, compiled, with a sliding window block mask; or flash_attn_func(…, "
    "window_size=(width - 1, 0))",
}
NO_MASK_NEEDED = (
    "pass is_causal=True for a causal mask, varlen (packed) attention for padding, nothing for an all-True mask"
)


def mask_rebuilt(facts: TraceFacts) -> Finding | None:
    """The same mask is made, or turned into an additive one, for each call."""
    building: dict[Work, None] = {}
    calls = 0
    for site in facts.sites:
        for call in site.calls:
            within = [w for w in call.works if w.role == "mask building"]
            made = [*made_masks(facts.before(call, MASK_NEAR), call.problem), *within]
            calls += bool(made)
            building |= dict.fromkeys(made)
    converted = [work for site in facts.sites for work in site.works if _converts(work)]
    works = list(building) if calls >= 2 else []
    sentence = "The mask depends on the shape only, yet it is built anew again and again."
    remedy = "build the mask once and keep it (register_buffer), or is_causal=True and no mask at all"
    if not works and converted:
        sentence = "The bool mask is turned into an additive one in every call."
        remedy = 'attn_mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))  # once'
    works += [work for work in converted if work not in building]
    if not works:
        return None
    return Finding(
        id="mask-rebuilt-per-call",
        sentence=sentence,
        evidence=evidence(works),
        saving_us=total(works),
        arithmetic=sum_text(works, "before the first call instead of in each"),
        remedy=remedy,
    )


def _converts(work: Work) -> bool:
    """SDPA turns a bool mask into an additive one before it chooses a kernel: a where right inside it, within whose
    form for numbers the form for tensors works."""
    if not work.ops or work.replayed or work.ops[0].name != "aten::where" or work.inside(*INNER_OPS):
        return False
    return next((op.name for op in work.ops if op.name != "aten::where"), None) == SDPA_OP


def mask_keeps_flash_away(facts: TraceFacts) -> Finding | None:
    """A mask tensor was passed that keeps the fastest kernels, or their skipping of hidden tiles, away."""
    kinds: dict[Site, MaskKind] = {}
    for site in facts.sites:
        problem = site.first.problem
        if not problem.mask or problem.dtype not in ("bf16", "fp16") or (problem.D or 0) > MOST_FLASH_D:
            continue
        kind = kind_of_mask(facts, site.calls)
        slower = site.first.implementation in SLOWER_PATHS
        if slower or (site.first.implementation == CUDNN and kind.word in (ALL_TRUE, CAUSAL, WINDOW)):
            kinds[site] = kind
    if not kinds:
        return None
    by_cudnn = all(site.first.implementation == CUDNN for site in kinds)
    sentence = "An attn_mask tensor was passed, and flash attention takes none: a slower path ran."
    if by_cudnn:
        sentence = "An attn_mask tensor was passed: it is read whole, and no tile that it hides is skipped."
    lines = dict.fromkeys(f"mask {site.first.problem.mask}: {kind.why}" for site, kind in kinds.items())
    saving, arithmetic = _saving(facts, kinds)
    remedies = dict.fromkeys(REMEDIES[kind.word] for kind in kinds.values() if kind.word in REMEDIES)
    return Finding(
        id="mask-keeps-flash-away",
        sentence=sentence,
        evidence=(*site_evidence(kinds), *lines),
        saving_us=saving,
        arithmetic=arithmetic,
        remedy="; ".join(remedies) or NO_MASK_NEEDED,
        confidence="medium",
    )


def _saving(facts: TraceFacts, kinds: dict[Site, MaskKind]) -> tuple[float | None, str]:
    """What the same problem takes by a kernel that knows the mask; not estimated where the trace does not tell it."""
    told = {site: kind for site, kind in kinds.items() if kind.word in (ALL_TRUE, CAUSAL) or kind.keys}

    def without_mask(site: Site) -> Estimate | None:
        kind = told[site]
        given = site.first.problem  # with fewer queries than keys the last ones may be meant, which see nearly all
        problem = replace(given, mask=None, causal=kind.word == CAUSAL and given.L == given.S)
        return facts.fused(problem, site.first.direction, kind.keys)

    saving, arithmetic = facts.saving_by(told, without_mask) if told else (None, "")
    if saving is not None:
        return saving, arithmetic
    stake = format_us(sum(site.us for site in kinds))
    return None, f"not estimated: it depends on what the mask hides; the time at stake is {stake}"


RULES = (mask_rebuilt, mask_keeps_flash_away)
