"""Stage 2, with torch: which implementation PyTorch's SDPA takes for one call, and why not the others.

Reads the tensors of a call, or a Workload; writes a Why. PyTorch's own selection decides (``torch._fused_sdp_choice``
and the ``can_use_*`` functions, asked without their warnings); the reasons are those of :mod:`attnscope.sdpa_rules`,
:mod:`attnscope.sdpa_faults` and of every other implementation's contract. Must not import a later stage.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnscope.device import Device, find_device, loaded_library_path
from attnscope.errors import UsageError
from attnscope.sdpa_call import FAMILY, FUSED, SdpaCall
from attnscope.sdpa_facts import Asked, facts_of_call, validated
from attnscope.sdpa_faults import FAULTS
from attnscope.sdpa_rules import REFUSALS
from attnscope.sdpa_stand_ins import stand_in_call
from attnscope.sdpa_words import cudnn_name
from attnscope.selecting_others import considered_others
from attnscope.suites import CPU_DEFAULT, GPU_DEFAULT, find_workloads
from attnscope.why_record import Considered, Reason, Why
from attnscope.workload import DIRECTIONS, Workload

Tensor = Any


def why(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Why:
    """Which implementation ``scaled_dot_product_attention`` takes for this very call, and all reasons against others.

    The arguments are those of ``torch.nn.functional.scaled_dot_product_attention``: ``q (B, H, L, D)``,
    ``k (B, H_kv, S, D)``, ``v (B, H_kv, S, D_v)``. Nothing is computed. What the selection depends on besides them is
    taken as it is now: gradients, autocast, ``sdpa_kernel`` contexts, deterministic algorithms, the current versions.

    Raises:
        UsageError: the call is one that PyTorch itself would refuse, or its tensors are nested or on another device.
    """
    return _why(validated(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa))


def why_workload(text: str | None = None, device: str | None = None, direction: str = "forward") -> list[Why]:
    """:func:`why` for what ``text`` (a workload's spelling, or a suite) stands for; for the default suite without.

    Forward is asked without gradients, backward with.

    Raises:
        UsageError: the workload, device or direction is not one.
    """
    if direction not in DIRECTIONS:
        raise UsageError(f"mode must be {' or '.join(DIRECTIONS)}, got {direction!r}\nhint: --mode backward")
    here = find_device(device)
    found = []
    for workload in find_workloads([text] if text else list(GPU_DEFAULT if here.kind == "cuda" else CPU_DEFAULT)):
        with stand_in_call(workload, here, direction) as (tensors, options, notes):
            one = _why(validated(*tensors, **options), workload)
        found.append(replace(one, notes=(*notes, *one.notes)))
    return found


def _why(asked: Asked, workload: Workload | None = None) -> Why:
    device = find_device(asked.q.device.type, asked.q.device.index or 0)
    with _on(asked.q.device):
        return _answer(asked, device, workload)


def _answer(asked: Asked, device: Device, workload: Workload | None) -> Why:
    import torch

    taken, told = _taken(asked)
    accepts = _accepts(asked, device, taken)
    call = facts_of_call(asked, device)
    calls = {name: call if name in asked.sees_mask else replace(call, mask=None) for name in FAMILY}
    refusals = {name: tuple(REFUSALS.reasons(calls[name], name)) for name in FAMILY}
    order = tuple(name for name in call.order if name in FAMILY)
    family = [_considered(name, calls[name], taken, accepts[name], refusals[name], order) for name in FAMILY]
    workload, others = considered_others(call, workload)
    return Why(
        call=str(workload) if workload is not None else "no workload spells it",
        tensors={name: str(getattr(call, name)) for name in ("q", "k", "v", "mask") if getattr(call, name) is not None},
        options=asked.options(),
        device=str(device),
        direction=call.direction,
        torch=str(torch.__version__),
        taken=taken,
        order=order,
        cudnn=None if call.cudnn is None else cudnn_name(call.cudnn),
        cudnn_path=_cudnn_path(call),
        notes=(*asked.notes, *told),
        disagreements=tuple(_disagreements(call, taken, accepts, refusals)),
        implementations=(*family, *others),
    )


# --- PyTorch's own answers --------------------------------------------------------------------------------------------


def _taken(asked: Asked) -> tuple[str | None, list[str]]:
    """What PyTorch takes; None with what it said where it takes nothing."""
    import torch

    names = {int(number): name for name, number in _backends().items()}
    try:
        with _quiet():
            number = torch._fused_sdp_choice(
                asked.q, asked.k, asked.v, asked.mask, asked.dropout_p, asked.is_causal,
                scale=asked.scale, enable_gqa=asked.enable_gqa,
            )  # fmt: skip
    except RuntimeError as error:
        number, told = None, [f"PyTorch raises: {str(error).splitlines()[0]}"]
    else:
        told = []
    # A CausalBias asks two kernels by itself, before any selection.
    for name in asked.bias_first or ():
        if _can_use(name, asked):
            return name, []
    if number is None:
        return None, told
    if int(number) in names:
        return names[int(number)], []
    return None, [f"PyTorch's selection answers {int(number)}, which is none of {', '.join(FAMILY)}"]


def _accepts(asked: Asked, device: Device, taken: str | None) -> dict[str, bool | None]:
    """PyTorch's answer on each, in the state that it is in: switches count."""
    import torch

    answers: dict[str, bool | None] = {"sdpa_math": torch.backends.cuda.math_sdp_enabled()}
    if device.kind == "cuda":
        return answers | {name: _can_use(name, asked) for name in FUSED}
    # can_use_* answer for CUDA alone. On a CPU flash is asked first, so it may run exactly where it is taken.
    return answers | {"sdpa_flash": taken == "sdpa_flash", "sdpa_efficient": False, "sdpa_cudnn": False}


def _can_use(name: str, asked: Asked) -> bool:
    import torch

    ask = {
        "sdpa_flash": torch.backends.cuda.can_use_flash_attention,
        "sdpa_efficient": torch.backends.cuda.can_use_efficient_attention,
        "sdpa_cudnn": torch.backends.cuda.can_use_cudnn_attention,
    }[name]
    mask = asked.mask if name in asked.sees_mask else None
    with _quiet():
        params = torch.backends.cuda.SDPAParams(
            asked.q, asked.k, asked.v, mask, asked.dropout_p, asked.is_causal, asked.enable_gqa
        )
        return bool(ask(params, False))


def _backends() -> dict[str, Any]:
    from torch.nn.attention import SDPBackend

    return {
        "sdpa_flash": SDPBackend.FLASH_ATTENTION,
        "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
        "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
        "sdpa_math": SDPBackend.MATH,
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings, and no subclass of Tensor that answers in PyTorch's place."""
    import torch

    with warnings.catch_warnings(), torch._C.DisableTorchFunctionSubclass():
        warnings.simplefilter("ignore")
        yield


def _on(device: Any) -> contextlib.AbstractContextManager[Any]:
    """The tensors' card as the current one: can_use_* look at the current one."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


# --- what is made of them ---------------------------------------------------------------------------------------------


def _considered(
    name: str,
    call: SdpaCall,
    taken: str | None,
    accepts: bool | None,
    refusals: tuple[Reason, ...],
    order: tuple[str, ...],
) -> Considered:
    faults = tuple(FAULTS.reasons(call, name))
    if name == taken:
        return Considered(name, "taken", "PyTorch takes it", refusals, faults, accepts)
    if accepts is False or (accepts is None and refusals):
        return Considered(name, "refused", "PyTorch refuses it", refusals, (), accepts)
    pin = f"torch.nn.attention.sdpa_kernel(SDPBackend.{_backends()[name].name})"
    if taken is None:
        return Considered(name, "could run", "nothing speaks against it", refusals, faults, accepts)
    first = f"{taken} comes before it in PyTorch's order, {', '.join(order)}"
    return Considered(name, "could run", f"{first}; with {pin} it is taken", refusals, faults, accepts)


def _disagreements(
    call: SdpaCall, taken: str | None, accepts: dict[str, bool | None], refusals: dict[str, tuple[Reason, ...]]
) -> Iterator[str]:
    """Where our rules and PyTorch's answers differ, a sentence each; PyTorch's count."""
    for name in FAMILY:
        said = "; ".join(f"{one.sentence} ({one.rule})" for one in refusals[name])
        if accepts[name] and refusals[name]:
            yield f"PyTorch accepts {name}, and our rules say that it {said}"
        elif accepts[name] is False and not refusals[name]:
            yield f"PyTorch refuses {name}, and our rules know no reason with torch {call.torch}"
    if taken is not None and accepts[taken] is False:
        yield f"PyTorch takes {taken}, and says by itself that it cannot be used"
    first = next((name for name in call.order if accepts.get(name)), None)
    if call.on_gpu and taken != first:
        yield f"PyTorch takes {taken or 'none'}, and the first in its order that it accepts is {first or 'none'}"


def _cudnn_path(call: SdpaCall) -> str | None:
    """The mapped library, with ~ for the home folder, so that a record that is handed on names nobody."""
    path = None if call.cudnn is None else loaded_library_path("libcudnn.so")
    home = str(Path.home()).rstrip("/")
    return path.replace(home, "~", 1) if path and home and path.startswith(f"{home}/") else path
