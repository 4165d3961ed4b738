"""Forward V12: the ladder's last step of our own, hopper_cuda's kernel as it is, whole and alone.

Reads Inputs, writes Output. Imports torch only inside functions, and no other implementation: the kernel is found by
its name in the registry. docs/concepts/hopper_cuda.md tells how it is built, docs/guide/ladder.md what it adds to V9.
"""

from __future__ import annotations

from typing import Any

from attnscope import cuda, driver, implementation
from attnscope.device import Device
from attnscope.implementation import Output, Sheet
from attnscope.implementations.cuda_ladder.common import (
    CAUSAL_FEATURES,
    OWN_BLOCK_SIZE,
    Geometry,
    LadderImplementation,
    PreparedForward,
    Step,
)
from attnscope.implementations.cuda_ladder.forward import FORWARD
from attnscope.inputs import Inputs
from attnscope.workload import Workload

KERNEL_OF = "hopper_cuda"


class ForwardV12Hopper(LadderImplementation):
    """The copy engine brings tiles, other warps multiply, blocks stay where they are and walk over the rows."""

    name = "forward_v12_hopper"
    rung = "v12_hopper"
    source = "hopper.py"
    summary = f"ladder, forward V12: {KERNEL_OF}'s kernel, copy engine and persistent blocks of specialised warps"
    block_sizes = (OWN_BLOCK_SIZE,)
    default_block_size = OWN_BLOCK_SIZE
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16"}),
        features=CAUSAL_FEATURES,
        devices=frozenset({"cuda"}),
        directions=FORWARD,
        max_head_dim=256,
        head_dim_multiple=8,
        min_capability=(9, 0),
        below_capability=(9, 1),
        packages=("torch", *cuda.PACKAGES),
        kernels={"cuda": (f"^({KERNEL_OF}_forward|{KERNEL_OF}_combine)$",)},
        lse=True,
        deterministic=True,
        ours=True,
        kept_on_disk=True,
    )

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """Also those of the kernel's own implementation."""
        return super().more_reasons(workload, device, direction) + _kernel_s().more_reasons(workload, device, direction)

    @property
    def max_length(self) -> int:
        """The kernel's own reasons set the limit."""
        return 2**30

    def make(self, workload: Workload, device: Device, geometry: Geometry) -> PreparedForwardV12:
        """Compiles, or takes from the cache."""
        return PreparedForwardV12(workload, device, geometry)

    def kernel_sources(self, head_dim: int, block: int) -> list[tuple[str, dict[str, str | int]]]:
        """None of the ladder's own."""
        del head_dim, block
        return []


class PreparedForwardV12(PreparedForward):
    """One kernel, on the tensors as they lie."""

    def __init__(self, workload: Workload, device: Device, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.prepared = _kernel_s().prepare(workload, device)

    def new_output(self, inputs: Inputs) -> Output:
        """Unwritten out, and lse (B, H, L) float32."""
        import torch

        output = super().new_output(inputs)
        output.lse = torch.empty(output.out.shape[:3], dtype=torch.float32, device=output.out.device)
        return output

    def steps(self, inputs: Inputs, output: Output) -> list[Step]:
        """One; none where there is nothing to compute, for which the kernel is not even compiled."""
        if not output.out.numel():
            return []
        tensors = (inputs.q, inputs.k, inputs.v, output.out, output.lse)

        def launch() -> None:
            if not self.prepared.launches.replay(driver.launch_key(*tensors)):
                self.prepared.start(*tensors)

        return [Step(KERNEL_OF, launch)]


def _kernel_s() -> Any:
    return implementation.find(KERNEL_OF)
