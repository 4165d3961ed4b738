"""Forward V10 and V11: where the published ladder ends, with cuDNN's fused kernel instead of one of ours.

Reads Inputs, writes Output. Imports torch and the cuDNN frontend only inside functions, and no other implementation.

The published V10 times a graph on 16-bit tensors that lie ready, V11 the same between conversions from and to fp32.
Both read the packed (B, T, 3, H, D) tensor in place through its strides and compute no statistics.
"""

from __future__ import annotations

from attnscope import cudnn, cudnn_plans
from attnscope.device import Device
from attnscope.implementation import Output, Sheet
from attnscope.implementations.common import FUSED_NAMES, empty_like_inputs, empty_out
from attnscope.implementations.cuda_ladder.common import (
    CAUSAL_FEATURES,
    OWN_BLOCK_SIZE,
    Geometry,
    LadderImplementation,
    PreparedForward,
    Step,
)
from attnscope.implementations.cuda_ladder.forward import FORWARD, inner_dtype
from attnscope.inputs import Inputs, Tensor, torch_dtype
from attnscope.workload import Workload

PACKAGES = ("torch", f"{cudnn.PACKAGE}>={cudnn.MIN_FRONTEND}")


class LibraryLadder(LadderImplementation):
    """Base of the rungs that are cuDNN's: it chooses its own blocks."""

    source = "library.py"
    block_sizes = (OWN_BLOCK_SIZE,)
    default_block_size = OWN_BLOCK_SIZE

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """Also: empty problems, a scale of 0 or less, an installation that does not work."""
        found = super().more_reasons(workload, device, direction)
        if 0 in (workload.B, workload.L):
            found.append("takes no empty batch and no empty sequences")
        if workload.effective_scale <= 0:
            found.append("needs a scale above 0")
        if found or self.sheet.reasons(workload, device, direction):
            return found
        broken = cudnn.broken_install()
        return [broken] if broken else []

    @property
    def max_length(self) -> int:
        """cuDNN sets no limit that a card's memory does not."""
        return 2**24

    def kernel_sources(self, head_dim: int, block: int) -> list[tuple[str, dict[str, str | int]]]:
        """None: the kernels are cuDNN's."""
        del head_dim, block
        return []


class ForwardV10(LibraryLadder):
    """cuDNN on 16-bit tensors."""

    name = "forward_v10"
    rung = "v10"
    summary = "ladder, forward V10: cuDNN's fused kernel on 16-bit tensors, no conversions"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16"}),
        features=CAUSAL_FEATURES,
        devices=frozenset({"cuda"}),
        directions=FORWARD,
        head_dim_multiple=8,
        min_capability=(8, 0),
        packages=PACKAGES,
        kernels={"cuda": (FUSED_NAMES["sdpa_cudnn"],)},
    )

    def make(self, workload: Workload, device: Device, geometry: Geometry) -> PreparedForwardV10:
        """Plans."""
        return PreparedForwardV10(workload, device, geometry, workload.dtype)


class PreparedForwardV10(PreparedForward):
    """One graph, on the tensors as they lie."""

    def __init__(self, workload: Workload, device: Device, geometry: Geometry, inner: str) -> None:
        super().__init__(geometry)
        self.runner, self.index = cudnn_plans.Runner(), device.index
        self.options = cudnn.Options(scale=geometry.scale, right=0, stats=False)
        dtype = torch_dtype(inner)
        q, k, v = empty_like_inputs(workload, dtype, "meta")
        plan = self.plan({"q": q, "k": k, "v": v, "o": empty_out(workload, dtype, "meta")})
        self.workspace_bytes = plan.workspace_bytes
        self.runner.reserve(plan)

    def plan(self, tensors: dict[str, Tensor]) -> cudnn_plans.Plan:
        """The plan for tensors of these strides."""
        return cudnn_plans.PLANS.get(cudnn.spec_of("forward", tensors, self.options, self.index))

    def attention_step(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Step:
        """The fused kernel."""

        def run() -> None:
            tensors = {"q": cudnn.readable(q), "k": cudnn.readable(k), "v": cudnn.readable(v), "o": out}
            self.runner.run(self.plan(tensors), tensors)

        return Step("cuDNN", run)

    def steps(self, inputs: Inputs, output: Output) -> list[Step]:
        """See the base."""
        return [self.attention_step(inputs.q, inputs.k, inputs.v, output.out)]


class ForwardV11(LibraryLadder):
    """cuDNN between conversions."""

    name = "forward_v11"
    rung = "v11"
    summary = "ladder, forward V11: V10 on fp32 tensors, rounded to 16 bits before and widened after, in the timed call"
    sheet = Sheet(
        dtypes=frozenset({"fp32"}),
        features=CAUSAL_FEATURES,
        devices=frozenset({"cuda"}),
        directions=FORWARD,
        compute={"fp32": "bf16"},
        head_dim_multiple=8,
        min_capability=(8, 0),
        packages=PACKAGES,
        kernels={"cuda": (FUSED_NAMES["sdpa_cudnn"],)},
        approximate=True,  # inputs are rounded to 16 bits
    )

    def make(self, workload: Workload, device: Device, geometry: Geometry) -> PreparedForwardV11:
        """Plans; allocates the 16-bit tensors."""
        return PreparedForwardV11(workload, device, geometry, inner_dtype(workload.dtype, device))


class PreparedForwardV11(PreparedForwardV10):
    """Round, attend, widen."""

    def __init__(self, workload: Workload, device: Device, geometry: Geometry, inner: str) -> None:
        super().__init__(workload, device, geometry, inner)
        dtype, place = torch_dtype(inner), device.torch_name
        self.rounded, self.out = empty_like_inputs(workload, dtype, place), empty_out(workload, dtype, place)

    def steps(self, inputs: Inputs, output: Output) -> list[Step]:
        """See the base."""

        def round_inputs() -> None:
            for target, source in zip(self.rounded, (inputs.q, inputs.k, inputs.v), strict=True):
                target.copy_(source)

        return [
            Step("round", round_inputs),
            self.attention_step(*self.rounded, self.out),
            Step("widen", lambda: output.out.copy_(self.out)),
        ]
