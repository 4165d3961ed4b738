"""Stage 3: reported faults that only a card can show, each as a probe of its own.

Reads an Implementation and a Device, writes what was seen; :mod:`attnscope.fault_probes` says what each is for. Must
not import a later stage, nor torch at import time.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable

from attnscope.device import Device, read_environment
from attnscope.errors import AttnscopeError
from attnscope.implementation import Implementation, Prepared, safe_reasons
from attnscope.inputs import Inputs, Tensor, make_inputs
from attnscope.probing import Seen
from attnscope.workload import Workload

WIDE = 73728  # the report's length: its square exceeds 2**32
WRONG_ROW = 0.05  # of a row's norm: far above what bf16 rounds, far below another mask's average
SLOWER_FIRST = 10.0  # how many times as long as its second a first call takes that builds a plan
TIMED_CALLS = 10
SEEDS = 16
RELATED = 0.15  # how far off 1 a variance ratio must be; by chance it is off by less than a tenth of this


# --- W7 ---------------------------------------------------------------------------------------------------------------


def wide_mask(implementation: Implementation, device: Device) -> Seen:
    """Rows on both sides of the 2**32nd place of a bool mask, against float64. Needs some 30 GB of the card."""
    workload = Workload.parse(f"B1,H1,L{WIDE},D64,bf16,mask=bool:1x1xLxS")
    if reasons := implementation.sheet.reasons(workload, device, "forward"):  # its own reason is this fault
        return Seen("skipped", "; ".join(reasons))
    inputs = make_inputs(workload, device)
    out = implementation.prepare(workload, device).forward(inputs).out
    first = 2**32 // WIDE
    looked_at = [*range(0, WIDE, 4096), *range(first - 8, first + 8), *range(WIDE - 8, WIDE)]
    wrong = wrong_rows(out, inputs, looked_at)
    after = sum(row >= first for row in looked_at)
    if wrong:
        told = f"{len(wrong)} of {len(looked_at)} rows looked at are wrong, from {wrong[0]} on"
        return Seen("observed", f"{workload}: {told}")
    return Seen("absent", f"{workload}: {len(looked_at)} rows looked at are right, {after} of them from {first} on")


def wrong_rows(out: Tensor, inputs: Inputs, rows: list[int]) -> list[int]:
    """Which of ``rows`` of the first head differ from float64 by more than rounding can explain."""
    q, k, v = (tensor[0, 0].double() for tensor in (inputs.q, inputs.k, inputs.v))
    scores = (q[rows] @ k.T) * inputs.workload.effective_scale
    mask = inputs.mask
    assert mask is not None
    truth = scores.masked_fill(~mask[0, 0, rows], float("-inf")).softmax(-1) @ v
    off = (out[0, 0, rows].double() - truth).norm(dim=-1) > WRONG_ROW * truth.norm(dim=-1)
    return sorted(row for row, is_wrong in zip(rows, off.tolist(), strict=True) if is_wrong)


# --- S1 ---------------------------------------------------------------------------------------------------------------


def grouped_heads_take_math(implementation: Implementation, device: Device) -> Seen:
    """What PyTorch takes with enable_gqa, and what with the same heads repeated, and how long both take."""
    told = []
    for text in ("B4,H16/4,L2048,D64,fp32,causal", "B4,H16/4,L2048,D288,bf16,causal"):
        workload = Workload.parse(text)
        if reasons := safe_reasons(implementation, workload, device, "forward"):
            return Seen("skipped", "; ".join(reasons))
        inputs = make_inputs(workload, device)
        repeated = repeat_heads(inputs)
        taken = [_taken(x) for x in (inputs, repeated)]
        ms = [_milliseconds(implementation.prepare(x.workload, device), x) for x in (inputs, repeated)]
        sentence = f"{workload}: {taken[0]}, {ms[0]:.3g} ms; the same heads repeated: {taken[1]}, {ms[1]:.3g} ms"
        if taken[0] == "sdpa_math" != taken[1]:
            return Seen("observed", sentence)
        told.append(sentence)
    return Seen("absent", "; ".join(told))


def repeat_heads(inputs: Inputs) -> Inputs:
    """The same attention with a key/value head for each query head."""
    w = inputs.workload
    k, v = (tensor.repeat_interleave(w.group, 1) for tensor in (inputs.k, inputs.v))
    return dataclasses.replace(inputs, workload=w.replace(H_kv=w.H), k=k, v=v)


def _taken(inputs: Inputs) -> str:
    import torch

    from attnscope.selecting import why

    with torch.no_grad():
        w = inputs.workload
        return str(why(inputs.q, inputs.k, inputs.v, is_causal=w.causal is not None, enable_gqa=w.group > 1).taken)


# --- S3 ---------------------------------------------------------------------------------------------------------------


def plans_by_shape(implementation: Implementation, device: Device) -> Seen:
    """Twenty lengths, each prepared and called once, then once more."""
    workloads = [Workload.parse(f"B2,H4,L{length},D64,bf16,causal") for length in range(96, 96 + 21 * 24, 24)]
    if reasons := safe_reasons(implementation, workloads[0], device, "forward"):
        return Seen("skipped", "; ".join(reasons))
    times: list[tuple[float, float]] = []
    for workload in workloads:
        inputs = make_inputs(workload, device)
        begin = _now_ms()
        prepared = implementation.prepare(workload, device)
        prepared.forward(inputs)
        times.append((_now_ms() - begin, _wall_ms(prepared, inputs)))
    once, again = (statistics.median(column) for column in zip(*times[1:], strict=True))  # the first loads libraries
    detail = f"{len(times) - 1} lengths: prepare and first call take {once:.3g} ms, the second call {again:.3g} ms"
    return Seen("observed" if once > SLOWER_FIRST * again else "absent", detail)


# --- S4 ---------------------------------------------------------------------------------------------------------------


def default_and_its_cudnn(implementation: Implementation, device: Device) -> Seen:
    """What PyTorch takes by itself, and whether the cuDNN that is loaded is its wheel's."""
    workload = Workload.parse("B8,H16,L1024,D64,bf16,causal")
    if reasons := safe_reasons(implementation, workload, device, "forward"):
        return Seen("skipped", "; ".join(reasons))
    taken, environment = _taken(make_inputs(workload, device)), read_environment()
    loaded, wheel = environment.cudnn_loaded or "none", cudnn_wheel()
    detail = (
        f"torch {environment.packages.get('torch', 'none')} takes {taken} for {workload}; cuDNN {loaded} is loaded, "
        f"{wheel[0] + ' is ' + wheel[1] if wheel else 'no wheel of it is installed'}"
    )
    same = wheel is None or wheel[1].split(".")[:3] == loaded.split(".")[:3]
    return Seen("absent" if same else "observed", detail)


def cudnn_wheel() -> tuple[str, str] | None:
    """(package, version) of the cuDNN that torch's wheel names as its own, where it is installed."""
    for package in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            return package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


# --- A2 ---------------------------------------------------------------------------------------------------------------


def related_masks(implementation: Implementation, device: Device) -> Seen:
    """Reads off what is kept over many seeds: equal weights, and values that tell the keys apart."""
    import torch

    workload = Workload.parse("B2,H4,L64,S64,D64,bf16,dropout=0.25")
    try:
        forward = drawing_forward(implementation, workload, device)
    except AttnscopeError as error:
        return Seen("skipped", str(error).splitlines()[0])
    inputs = make_inputs(workload, device)
    inputs.q.zero_()
    inputs.v.copy_(torch.eye(workload.S, device=device.torch_name).to(inputs.v.dtype).expand_as(inputs.v))
    kept = torch.stack([forward(inputs, seed) > 0 for seed in range(SEEDS)])
    ratios = variance_ratios(kept, workload.dropout)
    told = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    related = any(abs(ratio - 1) > RELATED for ratio in ratios.values())
    detail = f"{workload}: variance of means over what is kept, 1 where independent: {told}"
    return Seen("observed" if related else "absent", detail)


def drawing_forward(implementation: Implementation, w: Workload, device: Device) -> Callable[[Inputs, int], Tensor]:
    """A call of (inputs, seed) that draws its own dropout and returns out. Raises AttnscopeError with the reason."""
    import torch

    if implementation.name == "cudnn_graph":  # its dropout is a setting, not a workload's
        from attnscope.implementations.cudnn_graph import Settings

        plain = w.replace(dropout=0.0)
        if reasons := safe_reasons(implementation, plain, device, "forward"):
            raise AttnscopeError("; ".join(reasons))
        prepared = implementation.prepare(plain, device, Settings(dropout=w.dropout))  # type: ignore[call-arg]

        def seeded(inputs: Inputs, seed: int) -> Tensor:
            prepared.seed.fill_(seed)  # type: ignore[attr-defined]
            return prepared.forward(inputs).out

        return seeded
    reasons = safe_reasons(implementation, w, device, "forward")
    if reasons or not implementation.sheet.draws_dropout:
        raise AttnscopeError("; ".join(reasons) or "draws no dropout of its own")
    drawing = implementation.prepare(w, device)

    def drawn(inputs: Inputs, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return drawing.forward(inputs).out

    return drawn


def variance_ratios(kept: Tensor, dropout: float) -> dict[str, float]:
    """Of bool (seeds, B, H, L, S): the variance of the mean over some dims, in parts of what independent draws have."""
    centred, fair = kept.double() - (1 - dropout), dropout * (1 - dropout)
    ratios = {}
    for name, over in {"heads": (1, 2), "rows": (3,), "keys": (4,), "seeds": (0,)}.items():
        count = math.prod(kept.shape[dim] for dim in over)
        ratios[name] = centred.mean(over).square().mean().item() * count / fair
    return ratios


# --- clocks -----------------------------------------------------------------------------------------------------------


def _now_ms() -> float:
    """The host's clock when the card is idle."""
    import torch

    torch.cuda.synchronize()
    return time.perf_counter() * 1e3


def _wall_ms(prepared: Prepared, inputs: Inputs) -> float:
    """Host time of a forward and what it queued."""
    begin = _now_ms()
    prepared.forward(inputs)
    return _now_ms() - begin


def _milliseconds(prepared: Prepared, inputs: Inputs) -> float:
    """Median of some forwards, warm: enough to say slow, not a measurement."""
    prepared.forward(inputs)
    return statistics.median(_wall_ms(prepared, inputs) for _ in range(TIMED_CALLS))
