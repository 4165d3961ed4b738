"""Stage 6: the findings. Each rule is one pure function from a Call to at most one Finding with a stable id.

Imports neither torch nor an implementation. A rule stays silent unless the trace itself shows what it says. Times are
those of the one call shown in detail, in microseconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from attnscope.device import Device
from attnscope.explaining.bounds import bounded, without_profiler
from attnscope.explaining.call import Call, Seen, short_dtype
from attnscope.explaining.expected import short_name
from attnscope.explaining.occupancy import DEFAULT_SHARED_LIMIT_BYTES
from attnscope.explaining.peaks import find_peaks
from attnscope.explaining.remedies import KEEP_16_BIT, UNPIN, fused_line, grouped_line
from attnscope.explaining.roles import FUSED, FUSED_BACKWARD, LAYOUT_COPY, MATMUL_ROLES, operands
from attnscope.records import Finding
from attnscope.trace.names import CUDA_CORE
from attnscope.units import format_us, significant

Rule = Callable[[Call, Device | None], Finding | None]
FUSED_SHARE = 0.9  # of a call's time, from which a fused kernel is nearly all of it
WHOLE_SHARE = 0.99
LAUNCH_BOUND_RATIO = 1.05  # both times vary by some per cent
ATTENTION_OP = re.compile(
    r"^aten::_(flash|efficient|cudnn)_attention|^aten::_scaled_dot_product_(flash|efficient|cudnn)"
)
MATH_OP = "aten::_scaled_dot_product_attention_math"
LONGEST_SUM = 6


def find_all(call: Call, device: Device | None) -> tuple[Finding, ...]:
    """Every finding on this call, those that could save most first."""
    found = [_within_call(finding, call) for rule in RULES if (finding := rule(call, device)) is not None]
    found.sort(key=lambda f: -(f.saving_us or 0.0))
    workload = str(call.workload)
    return tuple(
        replace(f, implementation=call.implementation, workload=workload, direction=call.direction) for f in found
    )


def _within_call(finding: Finding, call: Call) -> Finding:
    """A saving is at most the call's own time: on a GPU its device events', on a CPU its time without the profiler."""
    host_us = call.measured_host_us
    if finding.id == "launch-bound":
        return finding if host_us is None else bounded(finding, host_us, "the call takes")
    if call.on_gpu:
        return bounded(finding, call.step.device_us, "the call takes on the GPU")
    traced_us = call.step.duration_us
    finding = bounded(finding, traced_us, "the call takes under the profiler")
    return finding if host_us is None else without_profiler(finding, traced_us, host_us)


def masked_fill_copy(call: Call, device: Device | None) -> Finding | None:
    """An out-of-place masked_fill first copies all scores."""
    del device
    keys = call.workload.S
    copies = call.where(
        lambda seen: seen.role == "copy" and seen.inside("aten::masked_fill") and _last_size(seen) in (None, keys)
    )
    if not copies:
        return None
    forward = call.direction == "forward"
    return Finding(
        id="masked-fill-copy",
        sentence="An out-of-place masked_fill copies the whole score matrix before it writes the mask.",
        evidence=_evidence(copies),
        saving_us=_total(copies),
        arithmetic=_sum_text(copies) + ", which the in-place form does not need",
        remedy='scores.masked_fill_(mask, float("-inf"))  # only where autograd does not need the old scores'
        if forward
        else _fused_line(call) + "  # a fused backward fills no scores",
    )


def matmul_off_tensor_cores(call: Call, device: Device | None) -> Finding | None:
    """A matrix product runs on CUDA cores."""
    slow = call.where(lambda seen: seen.role in MATMUL_ROLES and seen.event.unit == CUDA_CORE)
    if not slow:
        return None
    name = device.name if device is not None and device.kind == "cuda" else _trace_device_name(call)
    rules = dict.fromkeys(f"{short_name(seen.event.name)}: {seen.event.unit_rule}" for seen in slow)
    saving, arithmetic = _tensor_core_saving(call, slow, name)
    remedy = 'torch.set_float32_matmul_precision("high")  # TF32 on tensor cores'
    if call.workload.dtype in ("bf16", "fp16"):
        by_math = _pinned(call) or any(seen.inside(MATH_OP) for seen in slow)
        keep = f"{KEEP_16_BIT} before the forward keeps 16-bit products on tensor cores; or "
        remedy = (keep if by_math else "") + _fused_line(call)
    return Finding(
        id="matmul-off-tensor-cores",
        sentence="Matrix products run on CUDA cores; the tensor cores, several times faster, stay idle.",
        evidence=(*_evidence(slow), *rules),
        saving_us=saving,
        arithmetic=arithmetic,
        remedy=remedy,
        confidence="medium",
    )


def _tensor_core_saving(call: Call, slow: list[Seen], name: str | None) -> tuple[float | None, str]:
    """Each product at the tensor cores' rate, but no faster than its scores can be written."""
    peaks = find_peaks(name)
    if peaks is None:
        return None, f"not estimated: the rates of {name or 'this card'} are not in our table"
    half = call.workload.dtype in ("bf16", "fp16")
    rate = peaks.half_tflop_per_s if half else peaks.tf32_tflop_per_s
    floor_us = call.workload.score_bytes() / peaks.gb_per_s / 1e3
    after = sum(max(seen.us * peaks.fp32_tflop_per_s / rate, floor_us) for seen in slow)
    return max(_total(slow) - after, 0.0), (
        f"{format_us(_total(slow))} - {format_us(after)}: each product × {significant(peaks.fp32_tflop_per_s)} / "
        f"{significant(rate)} (fp32 on CUDA cores over {'16-bit' if half else 'TF32'} on tensor cores, TFLOP/s), at "
        f"least the {format_us(floor_us)} that one score matrix takes at {significant(peaks.gb_per_s, 4)} GB/s "
        f"({peaks.source})"
    )


def mask_rebuilt_per_call(call: Call, device: Device | None) -> Finding | None:
    """The same mask is made in every call."""
    del device
    building = call.with_role("mask building")
    converted = any(_converts_bool_mask(seen) for seen in building)
    makers = ("aten::ones", "aten::tril", "aten::triu", "aten::arange", "aten::where", "aten::full")
    if len(building) < (1 if converted else 2) or not any(seen.inside(*makers) for seen in building):
        return None
    sentence = "The mask depends on the shape only, yet every call builds it anew."
    remedy = "build the mask once and pass it, or let a fused kernel apply it: " + _fused_line(call)
    if converted:
        sentence = "The bool mask is turned into an additive one in every call."
        remedy = 'attn_mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))  # once'
    return Finding(
        id="mask-rebuilt-per-call",
        sentence=sentence,
        evidence=_evidence(building),
        saving_us=_total(building),
        arithmetic=_sum_text(building) + ", once instead of in each call",
        remedy=remedy,
    )


def _converts_bool_mask(seen: Seen) -> bool:
    """SDPA turns a bool mask into an additive one before it chooses a kernel."""
    around = next((op.name for op in seen.ops if not op.is_annotation and op.name != "aten::where"), "")
    return seen.event.op == "aten::where" and around == "aten::scaled_dot_product_attention"


def safe_softmax(call: Call, device: Device | None) -> Finding | None:
    """The math path guards the softmax against rows that see no key."""
    del device
    guard = call.with_role("safe softmax")
    if not guard:
        return None
    return Finding(
        id="safe-softmax",
        sentence="The softmax is guarded against rows that see no key (0/0 would be NaN); the guard reads and writes "
        "the whole score matrix again.",
        evidence=_evidence(guard),
        saving_us=_total(guard),
        arithmetic=_sum_text(guard) + ", the softmax itself left out",
        remedy=_fused_line(call) + "  # a fused kernel guards its rows in registers",
    )


def gqa_materialised(call: Call, device: Device | None) -> Finding | None:
    """Grouped key/value heads are written out in full."""
    del device
    repeats = call.with_role("KV repeat")
    if not repeats:
        return None
    w = call.workload
    by_math = any(seen.inside(MATH_OP) for seen in call.seen)
    return Finding(
        id="gqa-materialised",
        sentence=f"Each of {w.H_kv} key/value heads is written to memory {w.group} times, once for every query head of "
        "its group, before the attention starts."
        + (" The math path writes the repeated keys and values out." if by_math else ""),
        evidence=_evidence(repeats),
        saving_us=_total(repeats),
        arithmetic=_sum_text(repeats) + "; a kernel that knows groups reads each head where it lies",
        remedy=(f"{UNPIN}; " if _pinned(call) else "") + grouped_line(w, on_gpu=call.on_gpu),
    )


def upcast(call: Call, device: Device | None) -> Finding | None:
    """16-bit inputs are turned into fp32 first."""
    del device
    casts = call.with_role("cast")
    ups = [seen for seen in casts if _cast_dtypes(seen) in (("bf16", "fp32"), ("fp16", "fp32"))]
    if not ups or call.workload.dtype not in ("bf16", "fp16"):
        return None
    return Finding(
        id="upcast",
        sentence=f"Tensors in {call.workload.dtype} are turned into fp32 and back: {len(casts)} extra passes over "
        "memory, and everything between them moves twice the bytes.",
        evidence=_evidence(casts),
        saving_us=_total(casts),
        arithmetic=_sum_text(casts) + "; the traffic between them comes on top",
        remedy=(f"{KEEP_16_BIT}, or " if call.on_gpu else "")
        + _fused_line(call)
        + "  # a fused kernel keeps its fp32 sums in registers",
    )


def fused(call: Call, device: Device | None) -> Finding | None:
    """One fused kernel does (nearly) all of it."""
    del device
    kernels = call.with_role(FUSED, FUSED_BACKWARD)
    everything = _total(call.seen)
    if not kernels or _total(kernels) < FUSED_SHARE * everything:
        return None
    what = "one fused kernel" if len(kernels) == 1 else f"{len(kernels)} fused kernels"
    verb = "does" if len(kernels) == 1 else "do"
    share = _total(kernels) / everything
    whole = (
        "the whole attention"
        if share >= WHOLE_SHARE
        else f"nearly the whole attention ({100 * share:.1f} % of its time)"
    )
    families = ", ".join(dict.fromkeys(seen.event.family or "unknown" for seen in kernels))
    return Finding(
        id="fused",
        sentence=f"{what[0].upper()}{what[1:]} ({families}) {verb} {whole}; the scores never reach memory.",
        evidence=_evidence(kernels),
        arithmetic=f"{format_us(_total(kernels))} of {format_us(everything)}",
    )


def layout_copies(call: Call, device: Device | None) -> Finding | None:
    """Tensors are copied around a fused kernel, only to lie differently in memory."""
    del device
    copies = [seen for seen in call.with_role(LAYOUT_COPY) if _holds_operand(seen, call)]
    if not copies or not call.with_role(FUSED, FUSED_BACKWARD):
        return None
    own = any(ATTENTION_OP.search(op.name) for seen in copies for op in seen.ops)
    remedy = "drop .contiguous() and reshape around the call: fused kernels read any strides whose last dim is dense"
    if own:
        remedy = (
            "make q, k, v and the gradient contiguous as (B, L, H, D), and pass them as t.transpose(1, 2): the kernel "
            "takes that layout as it lies, and the output keeps those strides"
        )
    return Finding(
        id="layout-copies",
        sentence="Tensors are copied before the fused kernel only to lie differently in memory"
        + (": the op wants (B, L, H, D) and was given (B, H, L, D)." if own else "."),
        evidence=_evidence(copies),
        saving_us=_total(copies),
        arithmetic=_sum_text(copies) + ", which tensors in the kernel's own layout do not need",
        remedy=remedy,
        confidence="medium",
    )


def _holds_operand(seen: Seen, call: Call) -> bool:
    """Whether it copies q, k, v, the output or their gradients; row sums are the op's own."""
    op = next((op for op in seen.ops if op.shapes is not None), None)
    shape = next((shape for _, shape, _ in operands(op) if shape), None) if op is not None else None
    if shape is None:
        return True
    w = call.workload
    sizes = {w.B * heads * rows * dims for heads, rows in ((w.H, w.L), (w.H_kv, w.S), (w.H, w.S))
             for dims in (w.D, w.D_v)}  # fmt: skip
    return math.prod(shape) in sizes


def inductor_became_sdpa(call: Call, device: Device | None) -> Finding | None:
    """The compiler recognised attention and put a fused kernel in its place."""
    del device
    compiled = any("CompiledFxGraph" in op.name or "Torch-Compiled" in op.name for s in call.seen for op in s.ops)
    kernels = call.with_role(FUSED, FUSED_BACKWARD)
    if not kernels or not compiled or any(seen.inside("aten::scaled_dot_product_attention") for seen in kernels):
        return None
    if not call.implementation.startswith("naive"):
        return None
    return Finding(
        id="inductor-became-sdpa",
        sentence="torch.compile recognised the attention pattern and replaced it by PyTorch's fused attention; what "
        "ran is not the code as written.",
        evidence=_evidence(kernels),
    )


def occupancy_estimator(call: Call, device: Device | None) -> Finding | None:
    """The profiler shows 0 % occupancy where it only applies the wrong limit."""
    del device
    wrong = call.where(
        lambda seen: (
            seen.event.occupancy_shown == 0
            and (seen.event.shared_memory_bytes or 0) > DEFAULT_SHARED_LIMIT_BYTES
            and (seen.event.occupancy or 0) > 0
        )
    )
    if not wrong:
        return None
    return Finding(
        id="occupancy-estimator",
        sentence="The trace shows 0 % occupancy for kernels with more than 48 KiB of shared memory per block; that is "
        "the profiler's estimate with the default limit, not what the card does.",
        evidence=tuple(
            dict.fromkeys(
                f"{short_name(seen.event.name)}: {(seen.event.shared_memory_bytes or 0) / 1024:.0f} KiB, "
                f"{significant(seen.event.occupancy or 0)} % recomputed with the opt-in limit"
                for seen in wrong
            )
        ),
    )


def launch_bound(call: Call, device: Device | None) -> Finding | None:
    """The host takes longer to launch a call, measured without the profiler, than the GPU to run it."""
    del device
    host_us, gpu_us = call.measured_host_us, call.gpu_us
    if host_us is None or not gpu_us or host_us < LAUNCH_BOUND_RATIO * gpu_us:
        return None
    return Finding(
        id="launch-bound",
        sentence="The GPU finishes before the CPU has launched the next call: it waits for Python and PyTorch.",
        evidence=(
            f"host {format_us(host_us)} a call, measured without the profiler",
            f"GPU {format_us(gpu_us)} a call",
        ),
        saving_us=host_us - gpu_us,
        arithmetic=f"{format_us(host_us)} - {format_us(gpu_us)} a call",
        remedy='torch.compile(f, mode="reduce-overhead"), a torch.cuda.CUDAGraph, or more work in each call',
        confidence="medium",
    )


RULES: tuple[Rule, ...] = (
    masked_fill_copy,
    matmul_off_tensor_cores,
    mask_rebuilt_per_call,
    safe_softmax,
    gqa_materialised,
    upcast,
    fused,
    layout_copies,
    inductor_became_sdpa,
    occupancy_estimator,
    launch_bound,
)


def _pinned(call: Call) -> bool:
    """Whether SDPA was told to take its math path: who calls SDPA already needs no advice to call it."""
    return call.implementation == "sdpa_math"


def _fused_line(call: Call) -> str:
    """The same attention by a fused kernel."""
    return (f"{UNPIN}: " if _pinned(call) else "") + fused_line(call.workload, on_gpu=call.on_gpu)


def _total(seen: Iterable[Seen]) -> float:
    return sum(one.us for one in seen)


def _sum_text(seen: list[Seen]) -> str:
    if len(seen) == 1:
        return format_us(seen[0].us)
    if len(seen) > LONGEST_SUM:
        return f"{len(seen)} events, {format_us(_total(seen))} together"
    return f"{' + '.join(significant(one.us) for one in seen)} µs = {format_us(_total(seen))}"


def _evidence(seen: list[Seen]) -> tuple[str, ...]:
    """Name by name: how often, how long, launched by which op."""
    groups: dict[tuple[str, str | None], list[Seen]] = {}
    for one in seen:
        groups.setdefault((one.event.name, one.event.op), []).append(one)
    return tuple(
        f"{len(ones)} × {short_name(name)}: {format_us(_total(ones))}" + (f" in {op}" if op and op != name else "")
        for (name, op), ones in groups.items()
    )


def _last_size(seen: Seen) -> int | None:
    """Size of the last dimension of what its op takes first; None where the trace recorded no shapes."""
    op = next((op for op in seen.ops if op.shapes is not None), None)
    shape = next((shape for _, shape, _ in operands(op) if shape), None) if op is not None else None
    return shape[-1] if shape else None


def _cast_dtypes(seen: Seen) -> tuple[str | None, str | None]:
    """(from, to) of a cast: copy_ takes the destination first."""
    op = next((op for op in seen.ops if op.name == "aten::copy_"), None)
    dtypes = [short_dtype(dtype) for dtype, _, _ in operands(op)] if op is not None else []
    return (dtypes[1], dtypes[0]) if len(dtypes) >= 2 else (None, None)


def _trace_device_name(call: Call) -> str | None:
    event = next((e for step in call.steps for e in step.device_events), None)
    properties = call.trace.device(event.device) if event is not None else None
    return properties.name if properties is not None else None
