"""Stage 2, with torch: a call of ``scaled_dot_product_attention`` looked at: is it possible, and what are its facts.

Reads tensors and options, writes an Asked (what PyTorch's selection is asked with) and an SdpaCall (what the rules
read). Computes nothing but whether a bool mask hides whole rows. Must not import a later stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from attnscope.device import Device, find_device
from attnscope.errors import UsageError
from attnscope.sdpa_call import FAMILY, SdpaCall, TensorFacts

Tensor = Any
SIGNATURE = "as torch.nn.functional.scaled_dot_product_attention takes it"
EVERYBODY = frozenset(FAMILY)


@dataclass(frozen=True)
class Asked:
    """The call as PyTorch's selection sees it: after autocast, and after a CausalBias took itself apart.

    ``bias_first`` are the implementations that a CausalBias asks by itself before any selection; ``sees_mask`` those
    that see ``mask`` (a CausalBias shows it to the others only). ``notes`` say what was changed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    notes: tuple[str, ...] = ()
    bias_first: tuple[str, ...] | None = None
    sees_mask: frozenset[str] = EVERYBODY

    def options(self) -> dict[str, str]:
        """The options that are not at their default, in words."""
        named = {
            "dropout_p": f"{self.dropout_p:g}" if self.dropout_p else "",
            "is_causal": "True" if self.is_causal else "",
            "scale": "" if self.scale is None else repr(self.scale),
            "enable_gqa": "True" if self.enable_gqa else "",
        }
        return {name: value for name, value in named.items() if value}


# --- is it possible ---------------------------------------------------------------------------------------------------


def validated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Asked:
    """The call, where PyTorch would run it.

    Raises:
        UsageError: which argument is not what it must be.
    """
    find_device("cpu")  # says it in a sentence where there is no torch
    tensors = {"q": q, "k": k, "v": v} | ({} if attn_mask is None else {"attn_mask": attn_mask})
    _check_tensors(tensors)
    _check_options(dropout_p, is_causal, scale, enable_gqa)
    q, k, v, mask, notes = _after_autocast(q, k, v, attn_mask)
    notes += _subclass_notes(tensors)
    bias_first: tuple[str, ...] | None = None
    sees_mask = EVERYBODY
    if _is_causal_bias(mask):
        mask, is_causal, bias_first, more = _take_apart(mask, q, is_causal)
        sees_mask = EVERYBODY if bias_first is None else EVERYBODY - set(bias_first)
        notes += more
    _check_dtypes(q, k, v, mask)
    _check_shapes(q, k, v, mask, enable_gqa)
    return Asked(
        q, k, v, mask, float(dropout_p), is_causal, scale, enable_gqa, tuple(notes), bias_first, sees_mask
    )  # fmt: skip


def _check_tensors(tensors: dict[str, Tensor]) -> None:
    import torch

    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}\nhint: {SIGNATURE}")
        if tensor.is_nested or tensor.layout != torch.strided:
            raise UsageError(
                f"{name} must be a dense tensor, got a nested or sparse one\n"
                "hint: nested tensors have a selection of their own, in torch/nested/_internal/sdpa.py"
            )
        if tensor.dim() < 2:
            raise UsageError(
                f"{name} must have two dims or more, (..., L, D), got shape {tuple(tensor.shape)}\n"
                "hint: q (B, H, L, D), k (B, H_kv, S, D), v (B, H_kv, S, D_v), attn_mask (L, S) or (B, H, L, S)"
            )
    where = {name: tensor.device for name, tensor in tensors.items() if not _is_causal_bias(tensor)}
    if len(set(where.values())) > 1:
        told = ", ".join(f"{name} on {device}" for name, device in where.items())
        raise UsageError(f"q, k, v and attn_mask must lie on one device, got {told}\nhint: t.to(q.device)")
    if tensors["q"].device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"q, k and v must lie on cpu or cuda, got {tensors['q'].device}\n"
            "hint: other devices choose by rules that attnscope does not know"
        )


def _check_options(dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool) -> None:
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise UsageError(f"{name} must be True or False, got {flag!r}\nhint: {SIGNATURE}")
    for name, number in (("dropout_p", dropout_p), ("scale", scale)):
        if number is None and name == "scale":
            continue
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise UsageError(f"{name} must be a finite number, got {number!r}\nhint: {SIGNATURE}")
    if not 0 <= dropout_p <= 1:
        raise UsageError(f"dropout_p must lie in [0, 1], got {dropout_p!r}\nhint: it is the probability of dropping")


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    import torch

    found = {name: dtype_word(t.dtype) for name, t in (("q", q), ("k", k), ("v", v))}
    if len(set(found.values())) > 1 or not q.dtype.is_floating_point:
        told = ", ".join(f"{name} {word}" for name, word in found.items())
        raise UsageError(f"q, k and v must have one floating dtype, got {told}\nhint: t.to(q.dtype), or torch.autocast")
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, q.dtype):
        raise UsageError(
            f"attn_mask must be bool, fp32 or {found['q']} as q is, got {dtype_word(mask.dtype)}\n"
            "hint: bool is True where a key may be seen; others are added to the scores"
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, enable_gqa: bool) -> None:
    import torch

    def refuse(sentence: str, hint: str) -> None:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in (("q", q), ("k", k), ("v", v)))
        raise UsageError(f"{sentence}, got {shapes}\nhint: {hint}")

    if q.shape[-1] != k.shape[-1]:
        refuse("q and k must have the same last dim, D", "q (B, H, L, D), k (B, H_kv, S, D)")
    if k.shape[-2] != v.shape[-2]:
        refuse("k and v must have the same number of keys, S", "k (B, H_kv, S, D), v (B, H_kv, S, D_v)")
    heads = [t.shape[-3] if t.dim() > 2 else 1 for t in (q, k, v)]
    if enable_gqa and (0 in heads or heads[0] % heads[1] or heads[0] % heads[2]):
        refuse("with enable_gqa the heads of k and v must divide those of q", "heads are dim -3: t.transpose(1, 2)")
    outer = [
        (*t.shape[:-3], heads[0]) if enable_gqa and t.dim() > 2 else tuple(t.shape[:-2]) for t in (q, k, v)
    ]  # fmt: skip
    try:
        scores = (*torch.broadcast_shapes(*outer), q.shape[-2], k.shape[-2])
    except RuntimeError:
        shared = not enable_gqa and all(n and heads[0] % n == 0 for n in heads[1:])
        hint = "enable_gqa=True shares key/value heads" if shared else "dims before the last two are batch and heads"
        refuse("q, k and v must agree, or broadcast, in all dims before the last two", hint)
    if mask is None:
        return
    try:
        torch.broadcast_shapes(tuple(mask.shape), scores)
    except RuntimeError:
        raise UsageError(
            f"attn_mask must broadcast to the scores' shape {scores}, got {tuple(mask.shape)}\n"
            "hint: (L, S), (B, 1, 1, S) and (B, H, L, S) are usual"
        ) from None


# --- what PyTorch makes of it first -----------------------------------------------------------------------------------


def _after_autocast(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[str]]:
    """The tensors as autocast hands them on: floating ones but fp64 in its dtype. Values are not copied."""
    import torch

    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return q, k, v, mask, []
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: Tensor | None) -> Tensor | None:
        if t is None or _is_causal_bias(t) or not t.dtype.is_floating_point or t.dtype in (torch.float64, dtype):
            return t
        return torch.empty_like(t, dtype=dtype).requires_grad_(t.requires_grad and torch.is_grad_enabled())

    changed = (cast(q), cast(k), cast(v), cast(mask))
    if all(new is old for new, old in zip(changed, (q, k, v, mask), strict=True)):
        return q, k, v, mask, []
    return *changed, [f"autocast is on: PyTorch casts to {dtype_word(dtype)} first, and chooses for that"]


def _is_causal_bias(mask: Tensor | None) -> bool:
    if mask is None:
        return False
    from torch.nn.attention.bias import CausalBias

    return isinstance(mask, CausalBias)


def _take_apart(bias: Any, q: Tensor, is_causal: bool) -> tuple[Tensor | None, bool, tuple[str, ...] | None, list[str]]:
    """What CausalBias makes of itself: is_causal, or a question to two kernels and then a dense mask."""
    import torch
    from torch.nn.attention.bias import CausalVariant

    if is_causal:
        raise UsageError("is_causal must be False with a CausalBias as attn_mask, got True\nhint: leave it out")
    if bias.seq_len_q == bias.seq_len_kv or bias.variant == CausalVariant.UPPER_LEFT:
        return None, True, None, ["the CausalBias becomes is_causal=True, without a mask tensor"]
    mask = torch.ones(bias.seq_len_kv, dtype=torch.bool, device=q.device).expand(bias.seq_len_q, bias.seq_len_kv)
    if q.device.type != "cuda":
        return mask, False, None, ["the CausalBias, aligned to the bottom right, becomes a dense bool mask on a CPU"]
    told = "the CausalBias, aligned to the bottom right, asks flash and efficient itself, without a mask tensor; only "
    return mask, False, ("sdpa_flash", "sdpa_efficient"), [f"{told}if both refuse it becomes a dense bool mask"]


def _subclass_notes(tensors: dict[str, Tensor]) -> list[str]:
    odd = {name: type(t).__name__ for name, t in tensors.items() if not _is_plain(t) and not _is_causal_bias(t)}
    if not odd:
        return []
    told = ", ".join(f"{name} is a {word}" for name, word in odd.items())
    return [f"{told}: what that class does in place of PyTorch's selection is not seen here, only a plain tensor's"]


def _is_plain(t: Tensor) -> bool:
    import torch

    return type(t) in (torch.Tensor, torch.nn.Parameter)


# --- its facts --------------------------------------------------------------------------------------------------------


def facts_of_call(asked: Asked, device: Device) -> SdpaCall:
    """What the rules look at: the tensors' facts, and the state that torch is in now."""
    import torch

    switches = {
        "sdpa_flash": torch.backends.cuda.flash_sdp_enabled(),
        "sdpa_efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "sdpa_cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "sdpa_math": torch.backends.cuda.math_sdp_enabled(),
    }
    built = {
        "sdpa_flash": torch.backends.cuda.is_flash_attention_available(),
        "sdpa_efficient": torch.backends.cuda.is_built(),
        "sdpa_cudnn": torch.backends.cudnn.is_available(),
    }
    strict = torch.are_deterministic_algorithms_enabled()
    return SdpaCall(
        q=tensor_facts(asked.q), k=tensor_facts(asked.k), v=tensor_facts(asked.v),
        mask=None if asked.mask is None else tensor_facts(asked.mask),
        hides_rows=_hides_rows(asked.mask),
        device=device, torch=str(torch.__version__),
        dropout_p=asked.dropout_p, is_causal=asked.is_causal, scale=asked.scale, enable_gqa=asked.enable_gqa,
        grad_enabled=torch.is_grad_enabled(),
        deterministic=strict and not torch.is_deterministic_algorithms_warn_only_enabled(),
        fp8_flash=getattr(torch._C, "_get_fa3_sdp_enabled", bool)(),
        cudnn=_cudnn(),
        rocm=torch.version.hip is not None,
        enabled=frozenset(name for name, on in switches.items() if on),
        available=frozenset(name for name in FAMILY if built.get(name, True)),
        order=_order(asked, device),
    )  # fmt: skip


def _cudnn() -> int | None:
    """The version of the cuDNN that answers, as torch counts it; None without one, or where torch refuses it as odd."""
    import torch

    try:
        return torch.backends.cudnn.version()
    except RuntimeError:  # compiled against another than the one that is loaded
        return None


def tensor_facts(t: Tensor) -> TensorFacts:
    """Shape, strides, dtype, offset, gradient."""
    offset = t.storage_offset() * t.element_size()
    return TensorFacts(tuple(t.shape), tuple(t.stride()), dtype_word(t.dtype), offset, t.requires_grad)


def dtype_word(dtype: Any) -> str:
    """bf16, fp16, fp32, fp64, bool; of others torch's own word."""
    words = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
    name = str(dtype).removeprefix("torch.")
    return words.get(name, name)


def _order(asked: Asked, device: Device) -> tuple[str, ...]:
    """The order in which PyTorch asks; on a CPU it is fixed (select_sdp_backend_cpp), elsewhere a setting."""
    import torch

    if device.kind == "cpu":
        return ("sdpa_flash", "sdpa_math")
    numbers = {1: "sdpa_flash", 2: "sdpa_efficient", 3: "sdpa_cudnn", 0: "sdpa_math"}
    found = [numbers[number] for number in torch._C._get_sdp_priority_order() if number in numbers]
    first = asked.bias_first or ()
    return (*first, *(name for name in found if name not in first))


def _hides_rows(mask: Tensor | None) -> bool:
    """Whether a bool mask leaves a row without a key; only asked on a GPU, and never while a graph is captured."""
    import torch

    if mask is None or mask.dtype != torch.bool or mask.device.type != "cuda" or not _is_plain(mask):
        return False
    if torch.cuda.is_current_stream_capturing() or 0 in mask.shape:
        return False
    return not bool(mask.any(-1).all())
