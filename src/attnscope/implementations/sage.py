"""Stage 2: SageAttention, package ``sageattention``: Q and K quantised to int8 block by block. Approximate.

Reads Inputs, writes Output. Must not import another implementation or a later stage. What the sheet and the reasons say
was read in sageattention 1.0.6 (core.py and its Triton kernels), the version that the registry holds.

It subtracts the mean of the keys from the caller's own tensor, so it gets a copy, made in the call. Its kernel without
a causal mask reads keys in blocks of 64 and gives those past the end a score of 0 instead of hiding them; the causal
one reads keys in pairs of such blocks and the second one's quantisation scale whether it is there or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnscope.device import Device
from attnscope.implementation import Gradients, Output, Sheet, SheetImplementation
from attnscope.implementations.heads_last import Packing, addressable, needs_packing
from attnscope.implementations.library import Library, compile_by_running
from attnscope.inputs import Inputs, Tensor
from attnscope.workload import Workload

LIBRARY = Library("sageattention", "sageattention", ("sageattn", "sageattn_varlen"))
KEY_BLOCK = 64
HEAD_DIMS = (64, 96, 128)
HEAD_DIMS_PACKED = (64, 128)
DTYPES = frozenset({"bf16", "fp16", "fp32"})


class Sage(SheetImplementation):
    """``sageattn``, and ``sageattn_varlen`` for packed sequences."""

    name = "sage"
    summary = "SageAttention: int8 products of Q and K, so approximate by nature; forward only"
    sheet = Sheet(
        dtypes=DTYPES,
        features=frozenset({"gqa", "cross", "causal_top_left", "causal_bottom_right", "scale", "packed"}),
        directions=frozenset({"forward"}),
        compute=dict.fromkeys(DTYPES, "int8"),
        devices=frozenset({"cuda"}),
        head_dim_choices=HEAD_DIMS,
        min_capability=(8, 0),
        packages=("torch", "sageattention"),
        kernels={"cuda": (r"_attn_fwd|qk_int8|sage",)},
        approximate=True,
        kept_on_disk=True,
    )

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """Its head dims, and the lengths at which it is wrong."""
        del device, direction
        return list(_reasons(workload))

    def prepare(self, workload: Workload, device: Device) -> PreparedSage:
        """Imports the library and compiles its Triton kernels, by running once."""
        prepared = PreparedSage(LIBRARY.load(self.name), workload, device)
        compile_by_running(self, prepared, workload, device)
        return prepared


def _reasons(w: Workload) -> Iterator[str]:
    if w.B == 0 or w.L == 0 or w.S == 0:
        yield f"takes no empty batch or sequences, this workload has B = {w.B}, L = {w.L}, S = {w.S}"
    if w.effective_scale == 0:
        yield "divides by its scale, which must not be 0"
    if needs_packing(w) and w.D in HEAD_DIMS and w.D not in HEAD_DIMS_PACKED:
        yield f"takes D of {', '.join(map(str, HEAD_DIMS_PACKED))} for packed sequences, not {w.D}"
    if w.causal and w.L != w.S:
        yield f"takes a causal mask only where L = S, not L = {w.L}, S = {w.S}"
        return
    lengths = sorted(set(w.packed)) if w.packed is not None else [w.S]
    if w.causal:
        odd = [n for n in lengths if -(-n // KEY_BLOCK) % 2]
        if odd:
            yield (
                f"reads past its quantisation scales under a causal mask where keys fill an odd number of blocks of "
                f"{KEY_BLOCK}, as {odd[0]} do"
            )
        return
    ragged = [n for n in lengths if n % KEY_BLOCK]
    if ragged:
        yield (
            f"counts keys past the end where no causal mask hides them, unless they fill blocks of {KEY_BLOCK}, "
            f"as {ragged[0]} do not"
        )


class PreparedSage:
    """The library's calls on (B, H, L, D) tensors of any strides, or on packed ones."""

    def __init__(self, library: Any, workload: Workload, device: Device) -> None:
        self.library, self.workload = library, workload
        self.options = {"is_causal": workload.causal is not None, "sm_scale": workload.effective_scale}
        self.packing = Packing.of(workload, device) if needs_packing(workload) else None

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out; it gives no lse with it."""
        import torch

        del save
        with torch.no_grad():
            q, v = addressable(inputs.q), addressable(inputs.v)
            k = inputs.k.clone(memory_format=torch.contiguous_format)  # it subtracts their mean in place
            return Output(self._packed(q, k, v, self.packing) if self.packing else self._dense(q, k, v))

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """There is none, as the sheet says."""
        raise NotImplementedError("sage has no backward")

    def _dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.library.sageattn(q, k, v, tensor_layout="HND", **self.options)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
        q, k, v = (addressable(t[0].transpose(0, 1)) for t in (q, k, v))
        ends = packing.cu_queries, packing.cu_keys, packing.longest_query, packing.longest_key
        return self.library.sageattn_varlen(q, k, v, *ends, **self.options).transpose(0, 1)[None]
