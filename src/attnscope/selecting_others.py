"""Stage 2: how implementations that PyTorch never takes by itself stand to a call, through the contract alone.

Reads an SdpaCall, asks each registered implementation's reasons; writes Considered. A remedy is found by asking again:
a change after which the reason is gone and none has come is one. Needs no torch itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from attnscope import implementation as registry
from attnscope.errors import WorkloadError
from attnscope.implementation import Implementation, safe_reasons
from attnscope.sdpa_call import FAMILY, SdpaCall, workload_of
from attnscope.why_record import Considered, Reason
from attnscope.workload import Workload

PLAIN = {"mask": None, "bias": None, "window": None, "lengths": None, "packed": None, "alibi": False}
Change = tuple[str, Callable[[Workload], Workload]]
CHANGES: tuple[Change, ...] = (
    ("q, k, v = (t.to(torch.bfloat16) for t in (q, k, v))", lambda w: w.replace(dtype="bf16")),
    ("q, k, v = (t.to(torch.float16) for t in (q, k, v))", lambda w: w.replace(dtype="fp16")),
    ("q, k, v = (t.to(torch.float32) for t in (q, k, v))", lambda w: w.replace(dtype="fp32")),
    ("dropout_p=0.0", lambda w: w.replace(dropout=0.0)),
    ("k, v = (t.repeat_interleave(H // H_kv, dim=1) for t in (k, v))", lambda w: w.replace(H_kv=w.H)),
    ("t.contiguous() for q, k and v", lambda w: w.replace(layout="bhld")),
    ("leave the mask out, where it hides nothing", lambda w: w.replace(**PLAIN)),
    ("is_causal=True, where the attention is causal", lambda w: w.replace(causal="top_left")),
    ("leave is_causal out, where the attention is not causal", lambda w: w.replace(causal=None)),
    ("leave scale out, where it is D**-0.5", lambda w: w.replace(scale=None)),
    ("as many queries as keys, L = S", lambda w: w.replace(L=w.S)),
    ("a value head dim like the query's", lambda w: w.replace(D_v=w.D)),
    ("a head dim of 64", lambda w: w.replace(D=64, D_v=64)),
)


def considered_others(call: SdpaCall, workload: Workload | None = None) -> tuple[Workload | None, list[Considered]]:
    """(the workload that the call is, how each implementation outside PyTorch's SDPA stands to it)."""
    workload = workload or workload_of(call)
    names = [*registry.names("all"), *registry.names("ladder")]
    others = [name for name in names if name not in FAMILY and name != "sdpa_auto"]
    if workload is None:
        why_not = Reason("sheet", "is asked with workloads only, and no workload spells this call")
        return None, [Considered(name, "refused", "cannot be asked", (why_not,)) for name in others]
    changed = _changed(workload)
    return workload, [_considered(registry.find(name), workload, changed, call) for name in others]


def _changed(workload: Workload) -> dict[str, Workload]:
    """What the workload becomes by each change that is possible and changes something."""
    found: dict[str, Workload] = {}
    for line, change in CHANGES:
        with contextlib.suppress(WorkloadError):
            new = change(workload)
            if new != workload:
                found[line] = new
    return found


def _considered(one: Implementation, workload: Workload, changed: dict[str, Workload], call: SdpaCall) -> Considered:
    def said_of(w: Workload) -> list[str]:
        return safe_reasons(one, w, call.device, call.direction)

    said = said_of(workload)
    if not said:
        return Considered(one.name, "could run", "could run; PyTorch never takes it by itself")
    left = {line: said_of(new) for line, new in changed.items()}

    def remedy(text: str) -> str | None:
        return next((line for line, after in left.items() if text not in after and len(after) < len(said)), None)

    return Considered(
        one.name, "refused", "cannot run this", tuple(Reason("sheet", text, remedy(text)) for text in said)
    )  # fmt: skip
