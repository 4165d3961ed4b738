"""Stage 2: our own rules on what each kernel behind ``scaled_dot_product_attention`` refuses. Pure, without torch.

Reads an SdpaCall, writes Reasons. Each rule looks at the call alone, so that all that speak are heard, where PyTorch's
own selection stops at its first. They say what PyTorch's selection says (``sdp_utils.cpp``, ``sdp_utils_cpp.h``); where
the two differ, PyTorch is right and the difference is told. What goes wrong in a kernel that PyTorch does take stands
in :mod:`attnscope.sdpa_faults`.
"""

from __future__ import annotations

from attnscope.rulebook import Rulebook, Said
from attnscope.sdpa_call import FAMILY, FUSED, SdpaCall
from attnscope.sdpa_words import (
    CUDNN,
    EFFICIENT,
    FLASH,
    MATH,
    by_name,
    cudnn_name,
    dims_of,
    dotted,
    dtypes_taken,
    efficient_step,
    grouped,
    misaligned,
    padded,
    repeated,
    shape_of,
)  # fmt: skip

SWITCHES = {FLASH: "flash", EFFICIENT: "mem_efficient", CUDNN: "cudnn", MATH: "math"}
NEWEST_SM = (12, 1)
OLDEST_SM = {FLASH: (8, 0), EFFICIENT: (5, 0), CUDNN: (8, 0)}
FLASH_MAX_D = 256
CUDNN_MAX_GRID = 65535

REFUSALS = Rulebook()
rule = REFUSALS.rule


# --- whether it is there at all ---------------------------------------------------------------------------------------


@rule(*FAMILY, cpu=(FLASH, MATH))
def switched_off(call: SdpaCall, name: str) -> Said | None:
    """An implementation that a sdpa_kernel context or an enable_*_sdp leaves out."""
    if name in call.enabled:
        return None
    switch = SWITCHES[name]
    return (
        "is switched off in this process",
        f"leave the sdpa_kernel context that leaves it out, or torch.backends.cuda.enable_{switch}_sdp(True)",
    )


@rule(cpu=(EFFICIENT, CUDNN))
def device(call: SdpaCall, name: str) -> Said | None:
    """Tensors on a CPU."""
    return f"runs on a GPU, and q, k and v lie on the {call.device.kind}", "t.to('cuda') for q, k, v and the mask"


@rule(*FUSED)
def not_built(call: SdpaCall, name: str) -> Said | None:
    """A torch that was compiled without it."""
    if name in call.available:
        return None
    return f"is not compiled into this torch {call.torch}", "install a torch from pytorch.org, whose wheels have it"


@rule(*FUSED)
def capability(call: SdpaCall, name: str) -> Said | None:
    """A card that is too old, or newer than this torch knows."""
    oldest = OLDEST_SM[name]
    if call.device.capability is None or call.rocm or oldest <= call.capability <= NEWEST_SM:
        return None
    range_, have = (" to ".join(map(dotted, (oldest, NEWEST_SM))), dotted(call.capability))
    return f"runs on compute capability {range_}, and {call.device.name} has {have}", None


@rule(CUDNN)
def deterministic(call: SdpaCall, name: str) -> Said | None:
    """torch.use_deterministic_algorithms, unless it only warns."""
    if not call.deterministic:
        return None
    return (
        "is not deterministic, and torch.use_deterministic_algorithms is on",
        "torch.use_deterministic_algorithms(True, warn_only=True), or let sdpa_flash do it",
    )


# --- shapes -----------------------------------------------------------------------------------------------------------


@rule(*FUSED, cpu=(FLASH,))
def rank(call: SdpaCall, name: str) -> Said | None:
    """q, k or v of other than four dims."""
    if call.is_4d:
        return None
    dims = ", ".join(str(t.ndim) for t in (call.q, call.k, call.v))
    return (
        f"takes q, k and v of four dims (B, H, L, D), not of {dims}",
        "add the missing dims, t.unsqueeze(0), and out.squeeze(0) after",
    )


@rule(*FUSED, cpu=(FLASH,))
def batch(call: SdpaCall, name: str) -> Said | None:
    """Batch sizes that differ: nothing is broadcast."""
    sizes = [t.shape[0] for t in (call.q, call.k, call.v)]
    if not call.is_4d or len(set(sizes)) == 1:
        return None
    return (
        f"takes q, k and v of one batch size, not of {', '.join(map(str, sizes))}",
        f"t.expand({max(sizes)}, -1, -1, -1) for each that has 1, which copies nothing",
    )


@rule(FLASH, CUDNN, cpu=(FLASH,))
def heads(call: SdpaCall, name: str) -> Said | None:
    """Fewer key than query heads without enable_gqa, or heads that do not divide the query's."""
    h, h_k, h_v = call.heads
    if not call.is_4d or h == h_k == h_v:
        return None
    counts = f"H = {h}, and {h_k} heads of k, {h_v} of v"
    if not call.enable_gqa:
        return f"takes fewer key heads only with enable_gqa, here {counts}", grouped(h, h_k, h_v)
    if h_k != h_v and name == FLASH:
        return f"takes as many heads of k as of v, here {counts}", repeated(h, h_k, h_v)
    if not h_k or not h_v or h % h_k or h % h_v:
        return f"takes heads of k and v that divide the query's, here {counts}", None
    return None


@rule(EFFICIENT)
def grouped_heads(call: SdpaCall, name: str) -> Said | None:
    """Fewer key than query heads, with enable_gqa too."""
    h, h_k, h_v = call.heads
    if not call.is_4d or h == h_k == h_v:
        return None
    return f"takes as many key as query heads, here H = {h}, and {h_k} heads of k, {h_v} of v", repeated(h, h_k, h_v)


@rule(*FUSED, cpu=(FLASH,))
def empty(call: SdpaCall, name: str) -> Said | None:
    """No queries or no keys."""
    low, keys, _, _ = call.sizes
    if low and keys:
        return None
    return f"takes no empty sequences, here L = {low}, S = {keys}", "leave the call out: the output is empty or 0"


@rule(FLASH, cpu=(FLASH,))
def head_dims_differ(call: SdpaCall, name: str) -> Said | None:
    """A head dim of v that is not that of q and k."""
    _, _, dim, dim_v = call.sizes
    if dim == dim_v:
        return None
    if dim_v < dim:
        remedy = f"v = torch.nn.functional.pad(v, (0, {dim - dim_v})), and out[..., :{dim_v}] after"
    else:
        remedy = f"pad q and k with zeros to {dim_v} and pass scale={call.effective_scale!r}"
    return f"takes one head dim for q, k and v, here D = {dim}, D_v = {dim_v}", remedy


@rule(FLASH)
def head_dim(call: SdpaCall, name: str) -> Said | None:
    """D above 256, the most that FlashAttention-2 has."""
    most = max(call.sizes[2:])
    if most <= FLASH_MAX_D:
        return None
    return f"takes D up to {FLASH_MAX_D} on a GPU, not {most}", "sdpa_efficient takes larger ones"


@rule(EFFICIENT, CUDNN)
def head_dim_multiple(call: SdpaCall, name: str) -> Said | None:
    """Head dims that are no multiple of what is loaded at once."""
    step = 8 if name == CUDNN else efficient_step(call)
    _, _, dim, dim_v = call.sizes
    empty_dim = name == EFFICIENT and not (dim and dim_v)
    if not empty_dim and not dim % step and not dim_v % step:
        return None
    return f"takes head dims that are multiples of {step} for {call.q.dtype} here, not {dims_of(call)}", padded(
        call, step
    )


@rule(CUDNN)
def head_dim_of_cudnn(call: SdpaCall, name: str) -> Said | None:
    """D above 256 on compute capability 9.0 with cuDNN 9.10, else above 128 (on 10.x not 192 with values of 128)."""
    _, _, dim, dim_v = call.sizes
    most = 128
    if call.capability == (9, 0) and (call.cudnn or 0) >= 91000:
        most = 256
    large_keys = call.release >= (2, 11) and call.capability[0] == 10 and (call.cudnn or 0) >= 91100
    if large_keys and (dim, dim_v) == (192, 128):
        most = 192
    if max(dim, dim_v) <= most or call.device.capability is None:
        return None
    return (
        f"takes head dims up to {most} with cuDNN {cudnn_name(call.cudnn)} on compute capability "
        f"{dotted(call.capability)}, not {dims_of(call)}",
        "sdpa_flash goes to 256, sdpa_efficient beyond",
    )


@rule(CUDNN)
def one_key(call: SdpaCall, name: str) -> Said | None:
    """A single key, S = 1."""
    if call.sizes[1] != 1:
        return None
    return "takes S of 2 or more, not 1", "with one key the output is v: v.expand(...) says it"


@rule(CUDNN, since=(2, 13), verified=("2.13",))
def grid(call: SdpaCall, name: str) -> Said | None:
    """More than 65,535 batch entries or heads, which are dims of a CUDA grid."""
    if not call.is_4d or max(call.q.shape[:2]) <= CUDNN_MAX_GRID:
        return None
    return f"takes B and H up to {CUDNN_MAX_GRID}, not {max(call.q.shape[:2])}", "split the batch"


@rule(FLASH)
def large_head_backward(call: SdpaCall, name: str) -> Said | None:
    """Gradients for the largest heads on cards with less shared memory."""
    small = (8, 6) <= call.capability <= (8, 9) or (12, 0) <= call.capability <= (12, 1)
    dim = call.sizes[2]
    if not small or not call.wants_gradient or not (192 < dim <= 224 or (dim > 224 and call.dropout_p > 0)):
        return None
    with_dropout = " with dropout" if dim > 224 else ""
    return (
        f"has no backward for D = {dim}{with_dropout} on compute capability {dotted(call.capability)}",
        "torch.no_grad() where no gradient is wanted; else sdpa_efficient",
    )


# --- dtypes, strides, addresses ---------------------------------------------------------------------------------------


@rule(*FUSED, cpu=(FLASH,))
def dtype(call: SdpaCall, name: str) -> Said | None:
    """Dtypes that it does not compute in."""
    taken = dtypes_taken(call, name)
    if call.q.dtype in taken:
        return None
    nearest = "float32" if call.q.dtype == "fp64" and "fp32" in taken else f"{'b' * ('bf16' in taken)}float16"
    where = " on a GPU" if name == FLASH and call.on_gpu else ""
    return (
        f"takes {' or '.join(taken)}{where}, not {call.q.dtype}",
        f"q, k, v = (t.to(torch.{nearest}) for t in (q, k, v)){', or torch.autocast' * (call.q.dtype == 'fp32')}",
    )


@rule(*FUSED, cpu=(FLASH,))
def last_stride(call: SdpaCall, name: str) -> Said | None:
    """Gaps between the numbers of a row of q, k or v; on a GPU of a row of the mask too."""
    single = call.on_gpu and name != EFFICIENT and call.sizes[2] == 1
    tensors = {} if single else by_name(call)
    if call.on_gpu and call.mask is not None:
        tensors = tensors | {"attn_mask": call.mask}
    odd = {word: t.stride[-1] for word, t in tensors.items() if t.stride[-1] != 1}
    if not odd:
        return None
    told = ", ".join(f"that of {word} is {stride}" for word, stride in odd.items())
    return f"takes a last dim of stride 1, and {told}", "; ".join(f"{word} = {word}.contiguous()" for word in odd)


@rule(EFFICIENT, since=(2, 13), verified=("2.13",), source="pytorch#184258")
def offset(call: SdpaCall, name: str) -> Said | None:
    """Tensors that do not begin at a multiple of the 16 bytes that are loaded at once."""
    return misaligned(call) if call.capability >= (8, 0) else None


# --- masks, causal, dropout -------------------------------------------------------------------------------------------


@rule(FLASH)
def mask(call: SdpaCall, name: str) -> Said | None:
    """Any mask tensor, as PyTorch calls FlashAttention-2."""
    if call.mask is None:
        return None
    return (
        f"takes no attn_mask on a GPU, and one of shape {shape_of(call.mask)} is given",
        "a mask that is all True: leave it out; a causal one: is_causal=True; one of padding: "
        "torch.nn.attention.varlen.varlen_attn; any other: torch.nn.attention.flex_attention, compiled",
    )


@rule(CUDNN, cpu=(FLASH,))
def mask_gradient(call: SdpaCall, name: str) -> Said | None:
    """A mask that wants a gradient, recorded or not."""
    if call.mask is None or not call.mask.requires_grad:
        return None
    return "gives no gradient for attn_mask, which requires one", "attn_mask.detach() where it is no parameter"


@rule(CUDNN, cpu=(FLASH,))
def mask_shape(call: SdpaCall, name: str) -> Said | None:
    """Masks of other than two dims (L, S) or four (B, H, L, S), or with a dim that is neither full nor 1."""
    m = call.mask
    if m is None or not call.is_4d:
        return None
    low, keys, _, _ = call.sizes
    full = (call.q.shape[0], call.q.shape[1], low, keys)
    if m.ndim in (2, 4) and all(size in (1, whole) for size, whole in zip(m.shape[::-1], full[::-1], strict=False)):
        return None
    return (
        f"takes an attn_mask of two or four dims, (L, S) or (B, H, L, S), each full or 1, not {shape_of(m)}",
        "attn_mask.unsqueeze(0)" if m.ndim == 3 else None,
    )


@rule(FLASH)
def causal_lengths(call: SdpaCall, name: str) -> Said | None:
    """is_causal with L != S: FlashAttention-2 aligns to the bottom right, PyTorch to the top left."""
    low, keys, _, _ = call.sizes
    if not call.is_causal or low == keys:
        return None
    return (
        f"takes is_causal on a GPU only where L = S, here L = {low}, S = {keys}",
        "for a mask aligned to the bottom right: torch.nn.attention.bias.causal_lower_right(L, S) as attn_mask; "
        "for one aligned to the top left sdpa_efficient takes it",
    )


@rule(cpu=(FLASH,))
def dropout_on_cpu(call: SdpaCall, name: str) -> Said | None:
    """Dropout."""
    if not call.dropout_p > 0:
        return None
    return f"takes no dropout on a CPU, not {call.dropout_p:g}", "dropout_p=0.0 where nothing is trained"


@rule(CUDNN, since=(2, 12), verified=("2.12", "2.13"), source="pytorch#174245")
def dropout_sixteenths(call: SdpaCall, name: str) -> Said | None:
    """Dropout in other than sixteenths, in which cuDNN draws it."""
    if (call.dropout_p * 16).is_integer():
        return None
    near = round(call.dropout_p * 16) / 16
    return f"takes dropout_p in sixteenths, not {call.dropout_p:g}", f"dropout_p={near:g}"


@rule(CUDNN, source="pytorch#163903")
def dropout_of_old_cudnn(call: SdpaCall, name: str) -> Said | None:
    """Dropout with cuDNN 9.11 to 9.13."""
    if not call.dropout_p > 0 or not 91100 < (call.cudnn or 0) < 91400:
        return None
    return (
        f"takes no dropout with cuDNN {cudnn_name(call.cudnn)}",
        "pip install -U nvidia-cudnn-cu13 (cu12) to 9.14 or newer",
    )


@rule(CUDNN)
def one_query_with_dropout(call: SdpaCall, name: str) -> Said | None:
    """Dropout with a single query, L = 1."""
    if not call.dropout_p > 0 or call.sizes[0] != 1:
        return None
    return "takes no dropout where L = 1", "dropout_p=0.0: a step of decoding trains nothing"
