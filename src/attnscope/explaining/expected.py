"""Stage 6: what one would expect to see run, before looking: one step for each line of the code.

Reads a Workload and an implementation's name; what was seen beyond it is a surprise, with a sentence for each role.
Pure data and pure functions; imports neither torch nor an implementation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from attnscope.explaining.call import Call, Seen
from attnscope.explaining.roles import FUSED, FUSED_BACKWARD
from attnscope.units import format_us
from attnscope.workload import Workload

Applies = Callable[[Workload], bool]


def _always(_: Workload) -> bool:
    return True


def _masked(w: Workload) -> bool:
    geometry = w.causal or w.window is not None or w.lengths is not None or w.packed is not None
    return bool(geometry or w.mask is not None or w.bias is not None or w.alibi)


def _grouped(w: Workload) -> bool:
    return w.group > 1


def _capped(w: Workload) -> bool:
    return w.softcap is not None


def _not_capped(w: Workload) -> bool:
    return w.softcap is None


def _sinks(w: Workload) -> bool:
    return w.sinks


def _reshapes_weights(w: Workload) -> bool:
    return w.softcap is not None or w.dropout > 0


@dataclass(frozen=True)
class ExpectedStep:
    """A kernel that a line of the code asks for, ``least`` to ``most`` times."""

    role: str
    sentence: str
    least: int = 1
    most: int = 1
    applies: Applies = _always


_SCORES = ExpectedStep("scores matmul", "scores = Q·Kᵀ: one matrix product")
_SCALE = ExpectedStep("scale", "scores · scale: one elementwise product", least=0, applies=_not_capped)
_CAP = ExpectedStep("scale", "scores · scale, and the softcap's quotient and product", least=0, most=3, applies=_capped)
_OTHER = ExpectedStep("elementwise", "softcap or dropout on the scores", least=0, most=4, applies=_reshapes_weights)
_REPEAT = ExpectedStep("KV repeat", "each key/value head repeated for its group", least=0, most=2, applies=_grouped)
_SINKS = ExpectedStep("copy", "the sinks as one more column of the scores", least=0, most=2, applies=_sinks)
_SUMS = ExpectedStep("reduction", "dK and dV summed over each group", least=0, most=4, applies=_grouped)
_MASK = ExpectedStep("mask", "mask: one fill or addition of the hidden scores", most=4, applies=_masked)
_SOFTMAX = ExpectedStep("softmax", "softmax over the keys")
_VALUES = ExpectedStep("values matmul", "out = P·V: one matrix product")
_GRADIENTS = ExpectedStep("gradient matmul", "dV, dP, dQ, dK: four matrix products", least=4, most=4)
_SOFTMAX_BACKWARD = ExpectedStep("softmax backward", "the softmax's gradient")
_MASK_BACKWARD = ExpectedStep("mask", "the masked scores' gradient: one fill", least=0, most=4, applies=_masked)
_SCALE_BACKWARD = ExpectedStep("scale", "the scale's gradient: one elementwise product", least=0, most=3)
_ONE = ExpectedStep(FUSED, "one fused kernel that never writes the scores to memory")
_FEW = ExpectedStep(
    FUSED_BACKWARD, "one to three fused kernels: row sums of dO·O, the gradients, dQ's conversion", most=3
)
_ANY = ExpectedStep(
    "fused elementwise", "scale, mask and softmax fused into one or two generated kernels", least=0, most=4
)

UNFUSED = {
    "forward": (_SCORES, _SCALE, _CAP, _OTHER, _MASK, _SOFTMAX, _VALUES),
    "backward": (_GRADIENTS, _SOFTMAX_BACKWARD, _MASK_BACKWARD, _SCALE_BACKWARD, _OTHER),
}
NAIVE = {
    "forward": (_REPEAT, *UNFUSED["forward"], _SINKS),
    "backward": (*UNFUSED["backward"], _SUMS),
}
FUSED_STEPS: dict[str, tuple[ExpectedStep, ...]] = {"forward": (_ONE,), "backward": (_FEW,)}
COMPILED = {
    "forward": (_SCORES, _ANY, ExpectedStep("softmax", _SOFTMAX.sentence, least=0, most=2), _VALUES),
    "backward": (_GRADIENTS, ExpectedStep("fused elementwise", "everything between the products in generated kernels",
                                          least=0, most=4),
                 ExpectedStep("softmax backward", _SOFTMAX_BACKWARD.sentence, least=0, most=2),
                 ExpectedStep("softmax", "the softmax, recomputed", least=0, most=2),
                 ExpectedStep("scores matmul", "Q·Kᵀ, recomputed", least=0)),
}  # fmt: skip
# Implementation name -> its steps by direction. A name that is not here promises nothing that could surprise.
EXPECTED: dict[str, dict[str, tuple[ExpectedStep, ...]]] = {
    "naive": NAIVE,
    "naive_inplace": NAIVE,
    "naive_compiled": COMPILED,
    "sdpa_math": UNFUSED,
    "sdpa_efficient": FUSED_STEPS,
    "sdpa_flash": FUSED_STEPS,
    "sdpa_cudnn": FUSED_STEPS,
    "sdpa_auto": FUSED_STEPS,
}
SURPRISES = {
    "copy": "a copy that no line of the code asks for",
    "layout copy": "the tensor is rewritten in another memory layout",
    "cast": "a change of dtype that no line of the code asks for",
    "mask building": "the mask is built anew in each call",
    "safe softmax": "a guard for rows that see no key, around the softmax",
    "KV repeat": "each key/value head is written out once per query head of its group",
    "fill": "a buffer is zeroed first",
    FUSED: "a fused attention kernel, where separate steps were written",
    FUSED_BACKWARD: "a fused attention kernel, where separate steps were written",
}


def expected_steps(workload: Workload, implementation: str, direction: str) -> tuple[ExpectedStep, ...]:
    """What one would expect of that implementation; empty where nothing is known of it."""
    steps = EXPECTED.get(implementation, {}).get(direction, ())
    return tuple(step for step in steps if step.applies(workload))


def expected_sentences(steps: tuple[ExpectedStep, ...]) -> tuple[str, ...]:
    """The steps in words."""
    return tuple(f"{step.role}: {step.sentence}" for step in steps)


def surprises(call: Call, steps: tuple[ExpectedStep, ...]) -> tuple[str, ...]:
    """What was seen beyond ``steps``, and what of them was not seen, one sentence each; empty without steps.

    A Memset is no surprise where a GPU library adds it to its own kernel.
    """
    if not steps:
        return ()
    counted = Counter(one.role for one in call.seen if one.kind != "memset")
    allowed = {step.role: step.most for step in steps}
    found = [_surprise(call, role, count, allowed.get(role, 0)) for role, count in counted.items()]
    missing = [
        f"no {step.role} was seen: it happens inside another kernel"
        for step in steps
        if counted[step.role] < step.least
    ]
    return tuple(sentence for sentence in found if sentence) + tuple(missing)


def _surprise(call: Call, role: str, count: int, allowed: int) -> str | None:
    if count <= allowed:
        return None
    events = [one for one in call.seen if one.role == role and one.kind != "memset"]
    time = format_us(sum(one.us for one in events))
    names = ", ".join(dict.fromkeys(_told(one) for one in events))
    why = SURPRISES.get(role, "more than the code asks for")
    beyond = f"{count - allowed} more {role} than expected" if allowed else f"{count} × {role}"
    return f"{beyond} ({names}; {time}): {why}"


def _told(seen: Seen) -> str:
    """An elementwise kernel's op says more than its template's name."""
    return short_name(seen.event.name) if seen.kind == "memcpy" or seen.event.op is None else seen.event.op


def short_name(name: str, width: int = 60) -> str:
    """A kernel's name cut to what a line can hold: the template's name without its arguments where it is long."""
    if len(name) <= width:
        return name
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "").split("<")[0].split("(")[0]
    return bare if 0 < len(bare) <= width else name[: width - 1] + "…"
