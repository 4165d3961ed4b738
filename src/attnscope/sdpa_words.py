"""Stage 2: the words, limits and remedies that rules on a call share. Pure, without torch.

Reads an SdpaCall, writes text. Imported by :mod:`attnscope.sdpa_rules` and :mod:`attnscope.sdpa_faults`.
"""

from __future__ import annotations

from attnscope.rulebook import Said
from attnscope.sdpa_call import SdpaCall, TensorFacts

FLASH, EFFICIENT, CUDNN, MATH = "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math"


def misaligned(call: SdpaCall) -> Said | None:
    """What is said of q, k or v that begin at an address sdpa_efficient cannot load from; None where all are fine."""
    size = {"bf16": 2, "fp16": 2, "fp32": 4}.get(call.q.dtype)
    if size is None or not call.is_4d:
        return None
    step = efficient_step(call) * size
    odd = [name for name, t in by_name(call).items() if t.offset_bytes % step and 0 not in t.shape]
    if not odd:
        return None
    return f"takes tensors that begin at a multiple of {step} bytes, and {', '.join(odd)} does not", "; ".join(
        f"{word} = {word}.clone()" for word in odd
    )


def by_name(call: SdpaCall) -> dict[str, TensorFacts]:
    """q, k and v by name."""
    return {"q": call.q, "k": call.k, "v": call.v}


def dims_of(call: SdpaCall) -> str:
    """D, and D_v where it differs."""
    _, _, dim, dim_v = call.sizes
    return f"D = {dim}" + (f", D_v = {dim_v}" if dim_v != dim else "")


def dtypes_taken(call: SdpaCall, name: str) -> list[str]:
    """The dtypes that a fused implementation takes on the call's device."""
    if not call.on_gpu:
        return ["bf16", "fp16", "fp32", "fp64"]
    taken = ["bf16"] if call.capability >= (8, 0) or call.device.capability is None else []
    taken += ["fp16"] + ["fp32"] * (name == EFFICIENT)
    return taken + ["float8_e4m3fn"] * (name == FLASH and call.fp8_flash and call.capability >= (9, 0))


def padded(call: SdpaCall, step: int) -> str | None:
    """Lines that pad head dims with zeros to multiples of ``step``, which changes no score."""
    _, _, dim, dim_v = call.sizes
    if not dim or not dim_v:
        return None
    more, more_v = (-size % step for size in (dim, dim_v))
    lines = [f"q, k = (F.pad(t, (0, {more})) for t in (q, k)) with scale={call.effective_scale!r}"] if more else []
    lines += [f"v = F.pad(v, (0, {more_v})), and out[..., :{dim_v}] after"] if more_v else []
    return "; ".join(lines)


def efficient_step(call: SdpaCall) -> int:
    """Elements of one load: 16 bytes where tensor cores are used (minimum_gemm_alignment in sdp_utils.cpp)."""
    half = call.q.dtype in ("bf16", "fp16")
    major = call.capability[0]
    tensor_cores = major >= 8 or (major == 7 and half)
    return max(4 if major >= 8 else 1, (8 if half else 4) if tensor_cores else 1)


def grouped(h: int, h_k: int, h_v: int) -> str | None:
    """``enable_gqa=True`` where that is all that is missing."""
    fits = h_k == h_v and h_k and h % h_k == 0
    return "enable_gqa=True" if fits else None


def repeated(h: int, h_k: int, h_v: int) -> str | None:
    """Lines that repeat key/value heads to as many as the query has."""
    if not h_k or not h_v or h % h_k or h % h_v:
        return None
    parts = [f"{t} = {t}.repeat_interleave({h // n}, dim=1)" for t, n in (("k", h_k), ("v", h_v)) if n != h]
    return "; ".join(parts)


def shape_of(t: TensorFacts) -> str:
    """A shape in parentheses."""
    return f"({', '.join(map(str, t.shape))})"


def dotted(version: tuple[int, int]) -> str:
    """Two numbers with a dot, e.g. 9.0."""
    return ".".join(map(str, version))


def cudnn_name(number: int | None) -> str:
    """cuDNN's version in words, e.g. 9.19.0; ``missing`` without one."""
    if number is None:
        return "missing"
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
