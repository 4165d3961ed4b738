"""Stage 6: findings on how attention is computed: fused or not, its mask, its copies, its dtype.

Each rule is a pure function from TraceFacts to at most one Finding. Imports neither torch nor an implementation.
"""

from __future__ import annotations

from attnscope.explaining.expected import short_name
from attnscope.explaining.remedies import KEEP_16_BIT, fused_line, grouped_line
from attnscope.explaining.shapes import SIGNATURES, Problem, count, first_shape
from attnscope.explaining.sites import FAST_PATH, AttentionCall
from attnscope.explaining.trace_facts import (
    NEAR,
    TraceFacts,
    evidence,
    is_cast,
    site_evidence,
    sum_text,
    total,
)
from attnscope.explaining.works import Work
from attnscope.records import Finding
from attnscope.units import format_us

MOST_FLASH_D = 256
MATH = "SDPA math"
SLOW_PATH_COPIES = (
    "off its fast path MultiheadAttention copies the projections and the output, and adds the bias apart: what that "
    "costs is not in the trace and not taken off"
)


def unfused_attention(facts: TraceFacts) -> Finding | None:
    """Product, softmax and product as kernels of their own."""
    sites = [site for site in facts.sites if site.first.how == "unfused"]
    if not sites or not facts.window.on_gpu:
        return None
    saving, arithmetic = facts.fused_saving(sites)
    calls = sum(len(site.calls) for site in sites)
    sure = not any(site.first.inferred for site in sites)
    remedy = fused_line(sites[0].first.problem) + "  # for the two products and the softmax; pass their mask and scale"
    if any(site.first.name == FAST_PATH for site in sites):
        remedy = (
            "torch.backends.mha.set_fastpath_enabled(False)  # MultiheadAttention then calls SDPA (need_weights=False)"
        )
        if saving is not None:
            sure, arithmetic = False, f"{arithmetic}; {SLOW_PATH_COPIES}"
    return Finding(
        id="unfused-attention",
        sentence=f"{calls} attention call{'s run' if calls != 1 else ' runs'} as separate kernels (product, softmax, "
        "product): the whole score matrix is written to memory and read again between them.",
        evidence=site_evidence(sites),
        saving_us=saving,
        arithmetic=arithmetic,
        remedy=remedy,
        confidence="medium" if sure else "low",
    )


def math_path(facts: TraceFacts) -> Finding | None:
    """SDPA fell back to its slowest path."""
    sites = [site for site in facts.sites if site.first.implementation == MATH]
    if not sites or not facts.window.on_gpu:
        return None
    saving, arithmetic = facts.fused_saving(sites)
    reasons = dict.fromkeys(reason for site in sites for reason in _why_math(site.first))
    return Finding(
        id="math-path",
        sentence="scaled_dot_product_attention took its math path, which fits everything and fuses nothing.",
        evidence=(*site_evidence(sites), *reasons),
        saving_us=saving,
        arithmetic=arithmetic,
        remedy="with torch.nn.attention.sdpa_kernel([FLASH_ATTENTION, EFFICIENT_ATTENTION]): ...  # warns why each "
        "cannot run; bf16 or fp16, head dim a multiple of 8 up to 256",
        confidence="medium",
    )


def _why_math(call: AttentionCall) -> list[str]:
    problem, said = call.problem, []
    if problem.dtype in ("fp32", "fp64"):
        said.append(f"{problem.dtype} inputs: flash and cuDNN take bf16 and fp16 only")
    if problem.D is not None and problem.D > MOST_FLASH_D:
        said.append(f"head dim {problem.D} is above the {MOST_FLASH_D} that flash takes")
    if problem.H_kv not in (None, problem.H):
        said.append("grouped key/value heads (enable_gqa) with a dtype or head dim that no fused kernel takes")
    return said


def safe_softmax(facts: TraceFacts) -> Finding | None:
    """The math path guards the softmax against rows that see no key."""
    guard = [w for w in facts.attention if w.inside("aten::_safe_softmax") and w.role not in ("softmax",)]
    if not guard:
        return None
    problem = next((site.first.problem for site in facts.sites if site.first.implementation == MATH), Problem())
    return Finding(
        id="safe-softmax",
        sentence="The softmax is guarded against rows that see no key (0/0 would be NaN); the guard reads and writes "
        "the whole score matrix again.",
        evidence=evidence(guard),
        saving_us=total(guard),
        arithmetic=sum_text(guard, "the softmax itself left out"),
        remedy=fused_line(problem) + "  # a fused kernel guards its rows in registers",
    )


def masked_fill_copy(facts: TraceFacts) -> Finding | None:
    """An out-of-place masked_fill first copies all scores."""
    copies = [
        work for site in facts.sites if site.first.how == "unfused" and site.first.direction == "forward"
        for work in site.works if work.role == "copy" and work.inside("aten::masked_fill")
    ]  # fmt: skip
    if not copies:
        return None
    return Finding(
        id="masked-fill-copy",
        sentence="An out-of-place masked_fill copies the whole score matrix before it writes the mask.",
        evidence=evidence(copies),
        saving_us=total(copies),
        arithmetic=sum_text(copies, "which the in-place form does not need"),
        remedy='scores.masked_fill_(mask, float("-inf"))  # only where autograd does not need the old scores',
    )


def layout_copies(facts: TraceFacts) -> Finding | None:
    """Tensors are copied only to lie differently."""
    copies = [work for work in facts.operand_copies if is_cast(work) is None and not _repeats(work)]
    copies = [w for w in copies if not w.inside("aten::masked_fill") and _changes_layout(w) and not _own(w)]
    if not copies:
        return None
    return Finding(
        id="layout-copies",
        sentence="Queries, keys, values or outputs are copied around attention only to lie differently in memory.",
        evidence=evidence(copies),
        saving_us=total(copies),
        arithmetic=sum_text(copies, "if every one can be left out"),
        remedy="drop .contiguous() before scaled_dot_product_attention: fused kernels read any strides whose last "
        "dimension is dense; keep (B, L, H, D) behind a transpose",
        confidence="medium",
    )


def _own(work: Work) -> bool:
    """Whether an attention op makes the copy itself, where no line of the user's code can leave it out."""
    return work.in_attention and work.inside(*SIGNATURES)


def _changes_layout(work: Work) -> bool:
    return work.inside("aten::contiguous", "aten::clone", "aten::reshape", "aten::flatten")


def kv_repeated(facts: TraceFacts) -> Finding | None:
    """Grouped key/value heads are written out in full."""
    repeats: dict[Work, Problem] = {}
    for site in facts.sites:
        for call in site.calls:
            for work in (*facts.before(call, NEAR), *call.works):
                if _repeats(work) and _is_repeated(work, call.problem):
                    repeats.setdefault(work, call.problem)
    if not repeats:
        return None
    works, problem = list(repeats), next(iter(repeats.values()))
    return Finding(
        id="gqa-materialised",
        sentence="Key/value heads are written to memory once for every query head of their group before the attention "
        "starts.",
        evidence=evidence(works),
        saving_us=total(works),
        arithmetic=sum_text(works, "which a kernel that knows groups does not need"),
        remedy=grouped_line(problem, on_gpu=facts.window.on_gpu),
    )


def _is_repeated(work: Work, problem: Problem) -> bool:
    """Whether what it writes is as large as keys or values for all query heads; True where sizes are unknown."""
    written = first_shape(work.op)
    if written is None or not problem.shaped:
        return True
    rows = (problem.B or 0) * (problem.H or 0) * (problem.S or 0)
    return count(written) in (rows * (problem.D or 0), rows * (problem.D_v or 0))


def _repeats(work: Work) -> bool:
    """A copy that writes the same heads several times: a repeat_interleave, or one that reads along stride 0."""
    if work.role != "copy" or not work.attributed:
        return False
    if work.inside("aten::repeat_interleave"):
        return True
    op = work.op
    if op is None or op.name != "aten::copy_" or len(op.shapes or []) < 2 or len(op.strides) < 2:
        return False
    shape, strides = (op.shapes or [])[1], op.strides[1]
    return len(shape) == 5 == len(strides) and shape[2] > 1 and strides[2] == 0


def dtype_casts(facts: TraceFacts) -> Finding | None:
    """Tensors change their dtype in or around attention."""
    casts = [work for work in facts.operand_copies if is_cast(work)]
    if not casts:
        return None
    pairs = dict.fromkeys(f"{a} to {b}" for a, b in (is_cast(work) or ("", "") for work in casts))
    math = any(work.inside("aten::_scaled_dot_product_attention_math") for work in casts)
    remedy = (
        f"{KEEP_16_BIT}, or a fused path"
        if math
        else "keep mask, scores and probabilities in the dtype of q and k; under autocast cast once, outside the layer"
    )
    return Finding(
        id="dtype-casts",
        sentence=f"Tensors are turned from {', from '.join(pairs)} in and around attention: each cast is a pass over "
        "memory that computes nothing.",
        evidence=evidence(casts),
        saving_us=total(casts),
        arithmetic=sum_text(casts, "if the tensors keep one dtype"),
        remedy=remedy,
        confidence="medium",
    )


def dropout_at_inference(facts: TraceFacts) -> Finding | None:
    """Dropout works although no gradient is computed."""
    if facts.has_backward:
        return None
    works = [work for work in facts.attention if work.role == "dropout"]
    sites = [site for site in facts.sites if site.first.problem.dropout]
    if not works and not sites:
        return None
    return Finding(
        id="dropout-at-inference",
        sentence="Attention drops probabilities at random, yet the trace computes no gradient: results are noisy and "
        "the random numbers cost time.",
        evidence=(*site_evidence(sites), *evidence(works)),
        saving_us=total(works) or None,
        arithmetic=sum_text(works, "in kernels of their own") if works else "not estimated: it is inside the kernel",
        remedy="model.eval(), and dropout_p=self.dropout if self.training else 0.0",
        confidence="medium",
    )


def uneven_calls(facts: TraceFacts) -> Finding | None:
    """Calls of one problem take very different times."""
    lines, excess = [], 0.0
    for site in facts.sites:
        times = sorted(call.us for call in site.calls)
        middle = times[len(times) // 2]
        slow = [one for one in times if one > 1.5 * middle and one - middle > 50]
        if len(times) >= 5 and slow and site.first.problem.shaped:
            excess += sum(slow) - middle * len(slow)
            lines.append(
                f"{len(slow)} of {len(times)} × {short_name(site.first.name)} [{site.first.problem}]: up to "
                f"{format_us(times[-1])}, the median is {format_us(middle)}"
            )
    if not lines:
        return None
    return Finding(
        id="uneven-calls",
        sentence="Calls of the same attention problem take very different times.",
        evidence=tuple(lines),
        saving_us=excess,
        arithmetic=f"{format_us(excess)} above the median of each site",
        remedy="look at the clock and at what else ran on the card; leave the first calls out of a measurement",
        confidence="low",
    )


RULES = (
    unfused_attention, math_path, safe_softmax, masked_fill_copy, layout_copies,
    kv_repeated, dtype_casts, dropout_at_inference, uneven_calls,
)  # fmt: skip
