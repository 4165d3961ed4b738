"""Stage 2: what is known to go wrong in a kernel that PyTorch's selection does take. Pure, without torch.

Reads an SdpaCall, writes Reasons. Each fault was reported in public or read in the kernel's source, which ``source``
names; ``verified`` holds the releases in which somebody saw it happen, and is empty where it was only read.
"""

from __future__ import annotations

from attnscope.rulebook import Rulebook, Said
from attnscope.sdpa_call import FUSED, SdpaCall
from attnscope.sdpa_words import CUDNN, EFFICIENT, FLASH, MATH, misaligned, shape_of

MAX_GRID = 65535  # largest y and z of a CUDA grid, where flash and efficient put heads and batch
INDEX_LIMIT = 2**32

FAULTS = Rulebook()
fault = FAULTS.rule


@fault(FLASH, verified=(), source="scale_apply_exp2 in FlashAttention-2's softmax.h")
def scale_sign(call: SdpaCall, name: str) -> Said | None:
    """A scale of 0 or less: the row's maximum is taken before the scale, which turns the order round."""
    if call.effective_scale > 0:
        return None
    return _scale_said(call)


@fault(EFFICIENT, verified=(), source="iterative_softmax in mem_eff_attention/kernel_forward.h")
def scale_sign_without_mask(call: SdpaCall, name: str) -> Said | None:
    """A scale of 0 or less without a mask tensor, which would make it scale first."""
    return None if call.mask is not None else scale_sign(call, name)


@fault(cpu=(FLASH,), verified=("2.13",), source="seen with torch 2.13: NaN")
def scale_sign_with_is_causal(call: SdpaCall, name: str) -> Said | None:
    """A scale of 0 or less with is_causal: NaN."""
    return scale_sign(call, name) if call.is_causal else None


@fault(EFFICIENT, verified=("2.14",), source="pytorch#162588, pytorch#187227")
def mask_index(call: SdpaCall, name: str) -> Said | None:
    """L * S of 2**32 and more with a mask, whose offsets have 32 bits: later rows are wrong."""
    low, keys, _, _ = call.sizes
    if call.mask is None or low * keys < INDEX_LIMIT:
        return None
    return (
        f"indexes its mask with 32 bits: rows from {INDEX_LIMIT // keys} on are wrong, L * S = {low * keys}",
        "split the queries into calls of fewer rows",
    )


@fault(FLASH, EFFICIENT, verified=(), source="pytorch#142228, pytorch#146704")
def grid_limit(call: SdpaCall, name: str) -> Said | None:
    """More than 65,535 batch entries or heads."""
    return _grid_said(call)


@fault(CUDNN, verified=(), source="pytorch#180718")
def grid_limit_of_cudnn(call: SdpaCall, name: str) -> Said | None:
    """More than 65,535 batch entries or heads, until torch 2.13 refuses them."""
    return _grid_said(call) if call.release < (2, 13) else None


@fault(*FUSED, verified=(), source="implementations/sdpa.py, which refuses it")
def empty_batch(call: SdpaCall, name: str) -> Said | None:
    """An empty batch, or no heads."""
    if not call.is_4d or all(call.q.shape[:2]):
        return None
    return "may fail on an empty batch", "leave the call out: the output is empty"


@fault(EFFICIENT, verified=("2.11",), source="pytorch#183484")
def offset_before_2_13(call: SdpaCall, name: str) -> Said | None:
    """Tensors that do not begin at a multiple of 16 bytes, before torch 2.13 refuses them."""
    if call.release >= (2, 13) or call.capability < (8, 0):
        return None
    said = misaligned(call)
    return said and (f"{said[0]}: the kernel then reads a misaligned address and the process loses the GPU", said[1])


@fault(CUDNN, verified=("2.11", "2.12", "2.13"), source="pytorch#196678")
def nan_gradient(call: SdpaCall, name: str) -> Said | None:
    """A mask, L % 128 = 64 and gradients on compute capability 9.0: NaN in dq."""
    low = call.sizes[0]
    if call.mask is None or not call.wants_gradient or low % 128 != 64 or call.capability != (9, 0):
        return None
    return (
        f"can give NaN in dq for a mask and L % 128 = 64 (L = {low}), where all logits of a row are far below 0",
        "with torch.nn.attention.sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)",
    )


@fault(CUDNN, verified=(), source="convert_boolean_attn_mask_cudnn in attention.cpp; pytorch#103963")
def hidden_rows(call: SdpaCall, name: str) -> Said | None:
    """A bool mask that hides whole rows: a finite number stands for minus infinity."""
    if not call.hides_rows:
        return None
    return (
        "masks with a finite number, so that a row that sees no key is a mean of v, not 0; this mask has such rows",
        "let such rows see one key and drop them after, or take sdpa_efficient",
    )


@fault(CUDNN, verified=(), source="pytorch#191612")
def mask_dtype(call: SdpaCall, name: str) -> Said | None:
    """An additive fp32 mask with 16-bit tensors."""
    if call.mask is None or call.mask.dtype in ("bool", call.q.dtype):
        return None
    return (
        f"may give NaN for an additive mask of {call.mask.dtype} with {call.q.dtype} tensors in some versions",
        "attn_mask.to(q.dtype)",
    )


@fault(MATH, cpu=(FLASH, MATH), verified=("2.13",), source="the documentation of is_causal")
def mask_and_is_causal(call: SdpaCall, name: str) -> Said | None:
    """attn_mask and is_causal together, which is documented as an error: math raises, the CPU's flash applies both."""
    if call.mask is None or not call.is_causal:
        return None
    does = "raises" if name == MATH else "applies both"
    return (
        f"{does} where attn_mask (here {shape_of(call.mask)}) and is_causal are given",
        "fold both into one attn_mask",
    )


@fault(*FUSED, verified=(), source="the documentation of is_causal")
def mask_and_is_causal_on_gpu(call: SdpaCall, name: str) -> Said | None:
    """attn_mask and is_causal together, which is documented as an error."""
    if call.mask is None or not call.is_causal:
        return None
    return "is not documented to apply attn_mask and is_causal together", "fold both into one attn_mask"


def _scale_said(call: SdpaCall) -> Said:
    return (
        f"takes the row's maximum before it scales, so it is wrong for a scale of 0 or less, {call.effective_scale:g}",
        "q = -q and scale=-scale; for 0 the output is the mean of the visible rows of v",
    )


def _grid_said(call: SdpaCall) -> Said | None:
    if not call.is_4d or max(call.q.shape[:2]) <= MAX_GRID:
        return None
    return f"fails or is wrong for B or H above {MAX_GRID}, here {max(call.q.shape[:2])}", "split the batch"
