"""The CUDA ladder: forward V1 to V6, backward V1 to V8, and further rungs. README.md beside this tells the story.

``RUNGS`` holds every rung in order, by direction; each is a registered implementation, one ``.cu`` a rung.
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
from attnscope.implementations.cuda_ladder.common import LadderImplementation
from attnscope.implementations.cuda_ladder.flash import BackwardV9Fused, ForwardV7Mma, ForwardV8Async
from attnscope.implementations.cuda_ladder.forward import (
    ForwardV1,
    ForwardV2,
    ForwardV3,
    ForwardV4,
    ForwardV5,
    ForwardV6,
)

RUNGS: dict[str, tuple[type[LadderImplementation], ...]] = {
    "forward": (ForwardV1, ForwardV2, ForwardV3, ForwardV4, ForwardV5, ForwardV6, ForwardV7Mma, ForwardV8Async),
    "backward": (
        BackwardV1, BackwardV1Fixed, BackwardV2, BackwardV3, BackwardV4, BackwardV5, BackwardV6, BackwardV7, BackwardV8,
        BackwardV9Fused,
    ),
}  # fmt: skip

__all__ = [
    "RUNGS", "BackwardV1", "BackwardV1Fixed", "BackwardV2", "BackwardV3", "BackwardV4", "BackwardV5", "BackwardV6",
    "BackwardV7", "BackwardV8", "BackwardV9Fused", "ForwardV1", "ForwardV2", "ForwardV3", "ForwardV4", "ForwardV5",
    "ForwardV6", "ForwardV7Mma", "ForwardV8Async", "LadderImplementation",
]  # fmt: skip
