"""The CUDA ladder: forward V1 to V6, backward V1 to V8, further rungs, cuDNN. README.md beside this tells the story.

``RUNGS`` holds every rung whose kernel stands here in order, by direction, one ``.cu`` a rung; ``LIBRARY_RUNGS`` those
that end the published ladder with a library's kernel; ``LAST_RUNGS`` those of ours whose kernel is an implementation
of its own. ``all_rungs`` is the whole ladder. Each is a registered implementation.
"""

from __future__ import annotations

from attnscope.implementations.cuda_ladder.backward import (
    BackwardV1,
    BackwardV1Fixed,
    BackwardV2,
    BackwardV3,
    BackwardV4,
    BackwardV5,
    BackwardV6,
    BackwardV7,
    BackwardV8,
)
from attnscope.implementations.cuda_ladder.common import (
    BLOCK_SIZES,
    FOLDER,
    OWN_BLOCK_SIZE,
    LadderImplementation,
    empty_gradients,
    zero_above_diagonal,
)
from attnscope.implementations.cuda_ladder.flash import (
    BackwardV9Fused,
    ForwardV7Mma,
    ForwardV8Async,
    ForwardV9Wgmma,
)
from attnscope.implementations.cuda_ladder.forward import (
    ForwardV1,
    ForwardV2,
    ForwardV3,
    ForwardV4,
    ForwardV5,
    ForwardV6,
)
from attnscope.implementations.cuda_ladder.hopper import ForwardV12Hopper
from attnscope.implementations.cuda_ladder.library import ForwardV10, ForwardV11

RUNGS: dict[str, tuple[type[LadderImplementation], ...]] = {
    "forward": (
        ForwardV1, ForwardV2, ForwardV3, ForwardV4, ForwardV5, ForwardV6, ForwardV7Mma, ForwardV8Async,
        ForwardV9Wgmma,
    ),
    "backward": (
        BackwardV1, BackwardV1Fixed, BackwardV2, BackwardV3, BackwardV4, BackwardV5, BackwardV6, BackwardV7, BackwardV8,
        BackwardV9Fused,
    ),
}  # fmt: skip


LIBRARY_RUNGS: dict[str, tuple[type[LadderImplementation], ...]] = {
    "forward": (ForwardV10, ForwardV11),
    "backward": (),
}

LAST_RUNGS: dict[str, tuple[type[LadderImplementation], ...]] = {
    "forward": (ForwardV12Hopper,),
    "backward": (),
}


def all_rungs(direction: str) -> tuple[type[LadderImplementation], ...]:
    """Every registered rung of a direction, in the ladder's order."""
    return (*RUNGS[direction], *LIBRARY_RUNGS[direction], *LAST_RUNGS[direction])


def claim_variants() -> list[LadderImplementation]:
    """V3 and V4 compiled otherwise, which settle what the article credits their gains to. Not registered."""
    variants: list[LadderImplementation] = [_variant(BackwardV3, "cooperative_groups", 1, "v3_cooperative_groups")]
    return variants + [_variant(BackwardV4, "unroll", n, f"v4_unroll_{n}") for n in (1, 2, 4, 16)]


def _variant(base: type[LadderImplementation], attribute: str, value: int, rung: str) -> LadderImplementation:
    made = type(rung, (base,), {attribute: value, "rung": rung, "name": f"backward_{rung}", "__doc__": base.__doc__})
    return made()


__all__ = [
    "BLOCK_SIZES", "FOLDER", "LAST_RUNGS", "LIBRARY_RUNGS", "OWN_BLOCK_SIZE", "RUNGS", "BackwardV1", "BackwardV1Fixed",
    "BackwardV2", "BackwardV3", "BackwardV4", "BackwardV5", "BackwardV6", "BackwardV7", "BackwardV8",
    "BackwardV9Fused", "ForwardV1", "ForwardV2", "ForwardV3", "ForwardV4", "ForwardV5", "ForwardV6", "ForwardV7Mma",
    "ForwardV8Async", "ForwardV9Wgmma", "ForwardV10", "ForwardV11", "ForwardV12Hopper", "LadderImplementation",
    "all_rungs", "claim_variants", "empty_gradients", "zero_above_diagonal",
]  # fmt: skip
