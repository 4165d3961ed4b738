"""Stage 6: findings on how kernels use the card: tensor cores, alignment, blocks, occupancy, copies from the host.

Each rule is a pure function from TraceFacts to at most one Finding. Imports neither torch nor an implementation.
"""

from __future__ import annotations

import math
import re

from attnscope.explaining.expected import short_name
from attnscope.explaining.occupancy import DEFAULT_SHARED_LIMIT_BYTES, occupancy_percent, resident_blocks
from attnscope.explaining.peaks import SUSTAINED_MATRIX, link_gb_per_s, product_us
from attnscope.explaining.roles import FUSED, FUSED_BACKWARD
from attnscope.explaining.shapes import product_sizes, tensor_dtypes
from attnscope.explaining.trace_facts import TraceFacts, evidence, total
from attnscope.explaining.works import MATMUL_OPS, Work
from attnscope.records import Finding
from attnscope.trace.events import DeviceEvent
from attnscope.trace.names import CUDA_CORE, MEMORY, TENSOR_CORE, readable_name
from attnscope.units import format_us, significant

MISALIGNED = re.compile(r"_align[12]\b|_align[12]>")
LEAST_COPY_US = 50.0
FEW_BLOCKS = 0.5  # blocks for each multiprocessor
LOW_OCCUPANCY = 25.0  # percent
LEAST_SHARE = 0.005  # of the GPU's time, below which a product is not worth a word


def _products(facts: TraceFacts, unit: str) -> list[Work]:
    found = [work for work in facts.works if work.role == "matmul" and work.meaning.unit == unit and work.event]
    return found if total(found) > LEAST_SHARE * facts.window.sum_us else []


def _dtype(work: Work) -> str | None:
    """The operands' dtype, by the product's op, else by the kernel's name."""
    op = next((one for one in work.ops if one.name in MATMUL_OPS), None) if not work.replayed else None
    return next(iter(tensor_dtypes(op)), None) or work.meaning.dtype


def _is_single(work: Work) -> bool:
    return _dtype(work) == "fp32"


def _takes_tf32(facts: TraceFacts, work: Work) -> bool:
    """Whether the card has TF32: NVIDIA's from sm_80 on, by the device or by the kernel's name."""
    if facts.is_amd:
        return False
    if facts.device is not None and facts.device.compute_major is not None:
        return facts.device.compute_major >= 8
    architecture = (work.meaning.architecture or "").removeprefix("sm_")
    return architecture.isdigit() and int(architecture) >= 80


def _is_vector_product(work: Work) -> bool:
    return "matrix-vector" in (work.meaning.family or "")


def _sizes_of(work: Work) -> tuple[int, int, int, int] | None:
    op = next((one for one in work.ops if product_sizes(one)), None) if not work.replayed else None
    return product_sizes(op) if op is not None else None


def _product_saving(facts: TraceFacts, slow: list[Work], unit: str) -> tuple[float | None, str]:
    """What these products would save on tensor cores in ``tf32`` or ``half``: each at what large products reach of the
    data sheet's rate, at least its traffic. Without its sizes a product is left out."""
    peaks = facts.peaks
    if peaks is None:
        return None, f"not estimated: this card's rates are not known; the time at stake is {format_us(total(slow))}"
    rate = peaks.tf32_tflop_per_s if unit == "tf32" else peaks.half_tflop_per_s
    item_bytes = 4 if unit == "tf32" else 2
    sized = {work: found for work in slow if (found := _sizes_of(work)) is not None}
    if not sized:
        return None, f"not estimated: the shapes are not known; the time at stake is {format_us(total(slow))}"
    after = {work: product_us(found, item_bytes, rate, peaks) for work, found in sized.items()}
    saving = sum(max(work.us - us, 0.0) for work, us in after.items())
    return saving or None, (
        f"{format_us(total(sized))} - {format_us(sum(after.values()))}: each at {100 * SUSTAINED_MATRIX:.0f} % of "
        f"{significant(rate)} TFLOP/s, at least its traffic ({peaks.source})"
    )


def tf32_off(facts: TraceFacts) -> Finding | None:
    """Products in fp32 on CUDA cores, on a card that could take TF32."""
    device = facts.device
    if facts.is_amd or device is None or (device.compute_major or 0) < 8:
        return None
    slow = [w for w in _products(facts, CUDA_CORE) if _is_single(w) and not _is_vector_product(w)]
    if not slow:
        return None
    saving, arithmetic = _product_saving(facts, slow, "tf32")
    return Finding(
        id="tf32-off",
        sentence="Products of fp32 matrices run on CUDA cores, since TF32 is off; the tensor cores stay idle.",
        evidence=(*evidence(slow), f"{short_name(readable_name(slow[0].name))}: {slow[0].meaning.unit_rule}"),
        saving_us=saving,
        arithmetic=arithmetic,
        remedy='torch.set_float32_matmul_precision("high")  # TF32: about three decimal digits in the products',
        confidence="medium",
    )


def matmul_off_tensor_cores(facts: TraceFacts) -> Finding | None:
    """Products that tensor cores could take run on CUDA cores."""
    slow = [
        work
        for work in _products(facts, CUDA_CORE)
        if not _is_vector_product(work)
        and _dtype(work) != "fp64"
        and not (_is_single(work) and _takes_tf32(facts, work))
    ]
    if not slow:
        return None
    single = all(_is_single(work) for work in slow)
    remedy = "multiply bf16 or fp16 matrices whose sizes are multiples of 8"
    sentence = "Matrix products run on CUDA cores; the tensor cores, several times faster, stay idle."
    if facts.is_amd:
        sentence = "Matrix products run on the vector units; the matrix cores, several times faster, stay idle."
    if single:
        remedy = 'with torch.autocast("cuda", dtype=torch.float16): ...'
        remedy += "" if facts.is_amd else "  # the card has no TF32"
    saving, arithmetic = _product_saving(facts, slow, "half")
    return Finding(
        id="matmul-off-tensor-cores",
        sentence=sentence,
        evidence=(*evidence(slow), f"{short_name(readable_name(slow[0].name))}: {slow[0].meaning.unit_rule}"),
        saving_us=saving,
        arithmetic=arithmetic,
        remedy=remedy,
        confidence="medium",
    )


def misaligned_gemm(facts: TraceFacts) -> Finding | None:
    """Products whose operands are aligned to one or two elements only."""
    slow = [
        work
        for work in _products(facts, TENSOR_CORE)
        if MISALIGNED.search(work.name) and _dtype(work) in ("bf16", "fp16")
    ]
    if not slow:
        return None
    saving, arithmetic = _product_saving(facts, slow, "half")
    sizes = [found for work in slow if (found := _sizes_of(work)) is not None]
    odd = sorted({n for found in sizes for n in found[1:] if n % 8})
    return Finding(
        id="misaligned-gemm",
        sentence="Matrix products load their operands one or two elements at a time, since a size is no multiple of 8.",
        evidence=(
            *evidence(slow),
            *([f"sizes that are no multiple of 8: {', '.join(map(str, odd[:6]))}"] if odd else []),
        ),
        saving_us=saving,
        arithmetic=arithmetic,
        remedy="pad that size to a multiple of 8 (the sequence, the vocabulary), or let a fused kernel mask the rest",
        confidence="medium",
    )


def too_few_blocks(facts: TraceFacts) -> Finding | None:
    """Attention kernels with fewer blocks than half of the card's multiprocessors."""
    device = facts.device
    if device is None or not device.num_sms:
        return None
    few = [
        work
        for work in facts.attention
        if work.role in (FUSED, FUSED_BACKWARD, "matmul", "softmax")
        and work.event is not None
        and work.event.grid is not None
        and math.prod(work.event.grid) < FEW_BLOCKS * device.num_sms
    ]
    if not few or total(few) < 0.3 * total(facts.attention):
        return None
    blocks = sorted({math.prod(work.event.grid) for work in few if work.event and work.event.grid})
    count = str(blocks[0]) if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
    return Finding(
        id="too-few-blocks",
        sentence=f"Attention kernels start {count} blocks on a card of {device.num_sms} multiprocessors: most of the "
        "card idles while they run.",
        evidence=evidence(few),
        arithmetic=f"not estimated; the time at stake is {format_us(total(few))}",
        remedy="more sequences or heads at once; for decoding a kernel that splits the keys (flash-decoding)",
    )


def occupancy_estimator(facts: TraceFacts) -> Finding | None:
    """The profiler shows 0 % occupancy where it only applies the wrong limit."""
    lines: dict[str, float] = {}
    for work in facts.works:
        event = work.event
        if (
            event is None
            or event.occupancy_shown != 0
            or (event.shared_memory_bytes or 0) <= DEFAULT_SHARED_LIMIT_BYTES
        ):
            continue
        real = occupancy_percent(event, facts.trace.device(event.device))
        if real:
            shared = (event.shared_memory_bytes or 0) / 1024
            name = short_name(readable_name(work.name))
            line = f"{name}: {shared:.0f} KiB, {significant(real)} % recomputed with the opt-in limit"
            lines[line] = lines.get(line, 0.0) + work.us
    if not lines:
        return None
    ordered = sorted(lines, key=lambda line: -lines[line])
    more = (f"and {len(ordered) - 4} more",) if len(ordered) > 4 else ()
    return Finding(
        id="occupancy-estimator",
        sentence="The trace shows 0 % occupancy for kernels with more than 48 KiB of shared memory per block; that is "
        "the profiler's estimate with the default limit, not what the card does.",
        evidence=(*ordered[:4], *more),
        remedy="nothing to change; fused kernels want few warps with much on-chip memory",
    )


def occupancy_low(facts: TraceFacts) -> Finding | None:
    """A fused kernel's occupancy is low, and that is how it is meant."""
    lines: dict[str, float] = {}
    known: dict[tuple[object, ...], str | None] = {}  # calls of a kernel are alike
    for work in facts.attention:
        event = work.event
        if event is None or work.role not in (FUSED, FUSED_BACKWARD) or not event.occupancy_shown:
            continue
        if work.meaning.unit == MEMORY:
            continue  # a helper's grid is small; it keeps no tiles
        alike = (work.name, event.grid, event.block, event.registers, event.shared_memory_bytes, event.occupancy_shown,
                 event.device)  # fmt: skip
        if alike not in known:
            known[alike] = _low_occupancy(facts, work.name, event)
        line = known[alike]
        if line is not None:
            lines[line] = lines.get(line, 0.0) + work.us
    if not lines:
        return None
    return Finding(
        id="occupancy-low",
        sentence="Fused attention kernels show a low occupancy; it is real and no fault: they keep tiles in registers "
        "and shared memory and hide waiting by working ahead, not by many warps.",
        evidence=tuple(sorted(lines, key=lambda line: -lines[line])[:4]),
        remedy="nothing to change; judge the kernel by its TFLOP/s",
    )


def _low_occupancy(facts: TraceFacts, name: str, event: DeviceEvent) -> str | None:
    """Why few warps of a kernel fit on a multiprocessor; None where many do, or where the trace does not say."""
    properties = facts.trace.device(event.device)
    blocks = resident_blocks(event, properties) if properties is not None else None
    real = occupancy_percent(event, properties)
    if not real or not blocks or event.block is None or max(event.occupancy_shown or 0.0, real) > LOW_OCCUPANCY:
        return None
    shared = (event.shared_memory_bytes or 0) / 1024
    return (
        f"{short_name(readable_name(name))}: {event.registers} registers × {math.prod(event.block)} threads "
        f"and {shared:.0f} KiB a block leave room for {blocks} a multiprocessor: {significant(real)} %"
    )


def pageable_copies(facts: TraceFacts) -> Finding | None:
    """Copies between host and card through pageable memory."""
    copies = [work for work in facts.works if "ageable" in work.name and work.event and work.event.kind == "memcpy"]
    if total(copies) < LEAST_COPY_US:
        return None
    moved = sum(work.event.bytes_moved or 0 for work in copies if work.event)
    link = link_gb_per_s(facts.window.card)
    after = moved / link[0] / 1e3 if link else 0.0
    known = 0 < after < total(copies)
    arithmetic = "not estimated: the trace does not say how much was moved"
    if link is None:
        arithmetic = "not estimated: how fast the card's link to its host is depends on the module"
    elif known:
        arithmetic = f"{format_us(total(copies))} - {moved / 1e6:,.1f} MB at {link[0]:g} GB/s (pinned, {link[1]})"
    return Finding(
        id="pageable-copies",
        sentence="Data moves between host and card through pageable memory: slower than pinned, and the host waits.",
        evidence=(*evidence(copies), *([f"{moved / 1e6:,.1f} MB"] if moved else [])),
        saving_us=total(copies) - after if known else None,
        arithmetic=arithmetic,
        remedy="tensor.pin_memory() and .to(device, non_blocking=True); DataLoader(pin_memory=True)",
        confidence="medium",
    )


RULES = (
    tf32_off, matmul_off_tensor_cores, misaligned_gemm, too_few_blocks, occupancy_estimator, occupancy_low,
    pageable_copies,
)  # fmt: skip
