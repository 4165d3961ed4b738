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
    """The row's maximum is taken before the scale, which a scale of 0 or less turns round."""
    if call.effective_scale > 0:
        return None
    return _scale_said(call)


@fault(EFFICIENT, verified=(), source="iterative_softmax in mem_eff_attention/kernel_forward.h")
def scale_sign_without_mask(call: SdpaCall, name: str) -> Said | None:
    """The same, unless a mask makes it scale first."""
    return None if call.mask is not None else scale_sign(call, name)


@fault(cpu=(FLASH,), verified=("2.13",), source="seen with torch 2.13: NaN")
def scale_sign_with_is_causal(call: SdpaCall, name: str) -> Said | None:
    """On a CPU where is_causal is given."""
    return scale_sign(call, name) if call.is_causal else None


@fault(EFFICIENT, verified=("2.14",), source="pytorch#162588, pytorch#187227")
def mask_index(call: SdpaCall, name: str) -> Said | None:
    """Offsets into the mask have 32 bits."""
    low, keys, _, _ = call.sizes
    if call.mask is None or low * keys < INDEX_LIMIT:
        return None
    return (
        f"indexes its mask with 32 bits: rows from {INDEX_LIMIT // keys} on are wrong, L * S = {low * keys}",
        "split the queries into calls of fewer rows",
    )


@fault(FLASH, EFFICIENT, verified=(), source="pytorch#142228, pytorch#146704")
def grid_limit(call: SdpaCall, name: str) -> Said | None:
    """Batch and heads are grid dims, which end at 65,535."""
    return _grid_said(call)


@fault(CUDNN, verified=(), source="pytorch#180718")
def grid_limit_of_cudnn(call: SdpaCall, name: str) -> Said | None:
    """The same with cuDNN, until PyTorch refuses it."""
    return _grid_said(call) if call.release < (2, 13) else None


@fault(*FUSED, verified=(), source="read in the launchers: a grid of 0 blocks is an error")
def empty_batch(call: SdpaCall, name: str) -> Said | None:
    """No batch, no heads."""
    if not call.is_4d or all(call.q.shape[:2]):
        return None
    return "may fail on an empty batch", "leave the call out: the output is empty"


@fault(EFFICIENT, verified=("2.11",), source="pytorch#183484")
def offset_before_2_13(call: SdpaCall, name: str) -> Said | None:
    """It loads 16 bytes at a time and nobody looks at the address."""
    if call.release >= (2, 13) or call.capability < (8, 0):
        return None
    said = misaligned(call)
    return said and (f"{said[0]}: the kernel then reads a misaligned address and the process loses the GPU", said[1])


@fault(CUDNN, verified=("2.11", "2.12", "2.13"), source="pytorch#196678")
def nan_gradient(call: SdpaCall, name: str) -> Said | None:
    """Hopper, a mask, and a last tile of 64 rows."""
    low = call.sizes[0]
    if call.mask is None or not call.wants_gradient or low % 128 != 64 or call.capability != (9, 0):
        return None
    return (
        f"can give NaN in dq for a mask and L % 128 = 64 (L = {low}), where all logits of a row are far below 0",
        "with torch.nn.attention.sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)",
    )


@fault(CUDNN, verified=(), source="convert_boolean_attn_mask_cudnn in attention.cpp; pytorch#103963")
def hidden_rows(call: SdpaCall, name: str) -> Said | None:
    """A bool mask becomes a finite number there."""
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


@fault(*FUSED, MATH, cpu=(FLASH, MATH), verified=("2.13",), source="the documentation of is_causal")
def mask_and_is_causal(call: SdpaCall, name: str) -> Said | None:
    """Documented as an error; some kernels apply both."""
    if call.mask is None or not call.is_causal:
        return None
    does = "raises" if name == MATH else "applies both" if not call.on_gpu else "is not documented to apply both"
    return (
        f"{does} where attn_mask (here {shape_of(call.mask)}) and is_causal are given",
        "fold both into one attn_mask",
    )


def _scale_said(call: SdpaCall) -> Said:
    return (
        f"takes the row's maximum before it scales, so it is wrong for a scale of 0 or less, {call.effective_scale:g}",
        "q = -q and scale=-scale; for 0 the output is the mean of the visible rows of v",
    )


def _grid_said(call: SdpaCall) -> Said | None:
    if not call.is_4d or max(call.q.shape[:2]) <= MAX_GRID:
        return None
    return f"fails or is wrong for B or H above {MAX_GRID}, here {max(call.q.shape[:2])}", "split the batch"
