"""Stage 2: PyTorch's FlexAttention, compiled: masks and score changes as Python functions that become one kernel.

Reads Inputs, writes Output and Gradients. Must not import another implementation or a later stage. What the sheet says
was read in torch 2.11 and 2.13: torch/nn/attention/flex_attention.py and torch/_inductor/kernel/flex/.

A mask is a ``mask_mod`` and the BlockMask built of it, which says what tiles are seen at all; softcap and ALiBi are one
``score_mod``. The BlockMask is built in ``prepare`` and timed there (``block_mask_s``), apart from the call.
``compilations`` counts what was compiled; ``recompiles`` what of it came after ``prepare``, in calls that are timed.
"""

from __future__ import annotations

import functools
import itertools
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from attnscope.device import Device
from attnscope.errors import PrepareFailed
from attnscope.implementation import Gradients, Output, Sheet, SheetImplementation
from attnscope.implementations.common import Saved, autograd_backward, compiler_reasons, leaves_of
from attnscope.implementations.library import compile_by_running
from attnscope.inputs import Inputs, Tensor
from attnscope.workload import Workload

DECODING_ROWS = 128  # fewer rows than this may go to its decoding kernel, whose groups are powers of 2

Mod = Callable[..., Any]


class Flex(SheetImplementation):
    """``torch.compile`` of a function that calls ``flex_attention``, one a workload."""

    name = "flex"
    summary = "PyTorch's FlexAttention, compiled: mask_mod with its BlockMask, score_mod for softcap and ALiBi"
    sheet = Sheet(
        dtypes=frozenset({"bf16", "fp16", "fp32"}),
        features=frozenset(
            {
                "gqa", "cross", "unequal_head_dims", "causal_top_left", "causal_bottom_right", "window", "softcap",
                "scale", "alibi", "lengths", "packed",
            }
        ),
        min_head_dim={"cuda": 16},  # of tl.dot, says flex_attention.py of Inductor
        min_capability=(7, 5),
        packages=("torch>=2.10",),
        kernels={"cuda": (r"flex_(attention|decoding)",)},
        compiled=True,
        kept_on_disk=True,
        by_name=frozenset({"cpu"}),
    )  # fmt: skip

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """What its kernels lack, and the compiler."""
        return [*_reasons(workload, device, direction), *compiler_reasons(device)]

    def prepare(self, workload: Workload, device: Device) -> PreparedFlex:
        """Builds the BlockMask, then compiles, by running once on random inputs.

        Raises:
            PrepareFailed: the compiler did not succeed.
        """
        from torch._dynamo.exc import TorchDynamoException
        from torch._functorch import config as functorch_config

        prepared = PreparedFlex(workload, device)
        try:
            with functorch_config.patch(donated_buffer=False):  # a buffer given away cannot serve backward twice
                compile_by_running(self, prepared, workload, device)
        except (TorchDynamoException, NotImplementedError) as error:
            lines = str(error).strip().splitlines()
            raise PrepareFailed(f"{self.name}: torch.compile failed", "\n".join(lines[-12:])) from error
        prepared.compiled_in_prepare = prepared.compilations
        return prepared


def _reasons(w: Workload, device: Device, direction: str) -> Iterator[str]:
    if w.B == 0 or w.L == 0 or w.S == 0:
        yield f"takes no empty batch or sequences, this workload has B = {w.B}, L = {w.L}, S = {w.S}"
    if device.kind == "cpu":
        if direction == "backward":
            yield "has no backward on a CPU"
        return
    if w.L < DECODING_ROWS and w.group & (w.group - 1):
        yield f"takes a power of 2 query heads a key/value head below {DECODING_ROWS} rows, not {w.group}"


class PreparedFlex:
    """The compiled function with its BlockMask."""

    def __init__(self, workload: Workload, device: Device) -> None:
        self.workload = workload
        self.compiled_in_prepare = 0
        self.geometry = _Geometry(workload, device)
        started = time.perf_counter()
        self.block_mask = self.geometry.block_mask()
        if device.kind == "cuda":
            _synchronise()
        self.block_mask_s = time.perf_counter() - started
        self.attend, self._counted = _compiled(workload, device)

    @property
    def compilations(self) -> int:
        """Graphs compiled for this workload in this process."""
        return self._counted[0]

    @property
    def recompiles(self) -> int:
        """Graphs compiled since ``prepare`` ended; 0 unless what a call passes changes its kind."""
        return self.compilations - self.compiled_in_prepare

    def remarks(self) -> list[str]:
        """What a reader of its times must know: what its BlockMask took, and whether anything was compiled again."""
        found = []
        if self.block_mask is not None:
            found.append(f"its BlockMask took {self.block_mask_s * 1e3:.3g} ms to build, in prepare, not in the call")
        if self.recompiles:
            found.append(f"was compiled again after prepare ({self.recompiles} times): a call may have waited for it")
        return found

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out; it is not asked for lse, which its CPU kernel does not give."""
        import torch

        leaves = leaves_of(inputs) if save else {"q": inputs.q, "k": inputs.k, "v": inputs.v}
        with torch.set_grad_enabled(save):
            out = self.attend(
                leaves["q"], leaves["k"], leaves["v"], self.block_mask, inputs.alibi_slopes, self.geometry.offsets
            )
        return Output(out.detach(), saved=Saved(out, leaves) if save else None)

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """Through autograd: the compiled backward."""
        return autograd_backward(inputs, saved)


class _Geometry:
    """The mask_mod of a workload, with the small tensors it reads."""

    def __init__(self, workload: Workload, device: Device) -> None:
        import torch

        self.workload, self.device = workload, device.torch_name
        w = workload

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        self.offsets = tensor([w.query_offset(b) for b in range(w.B)])
        self.lengths = tensor(list(w.lengths)) if w.lengths is not None else None
        self.documents = None
        if w.packed is not None:
            numbers = torch.arange(len(w.packed), dtype=torch.int32)
            self.documents = numbers.repeat_interleave(torch.tensor(w.packed)).to(self.device)

    def mods(self) -> list[Mod]:
        """One mask_mod for each thing that hides keys."""
        w, found = self.workload, []
        shift, lengths, documents = self._shift(), self.lengths, self.documents
        if w.causal:
            found.append(lambda b, h, i, j: j <= i + shift(b))
        if w.window is not None:
            reach = w.window
            found.append(lambda b, h, i, j: (i + shift(b) - j < reach) & (j - i - shift(b) < reach))
        if lengths is not None:
            found.append(lambda b, h, i, j: j < lengths[b])
        if documents is not None:
            found.append(lambda b, h, i, j: documents[i] == documents[j])
        return found

    def block_mask(self) -> Any:
        """The BlockMask of all of them; None where no key is hidden."""
        from torch.nn.attention.flex_attention import and_masks, create_block_mask

        w, mods = self.workload, self.mods()
        if not mods:
            return None
        batches = w.B if w.lengths is not None else None
        return create_block_mask(and_masks(*mods), batches, None, w.L, w.S, device=self.device)

    def _shift(self) -> Callable[[Any], Any]:
        """Batch entry -> where its query 0 stands: a number where all agree, else read from a tensor."""
        w, offsets = self.workload, self.offsets
        if w.lengths is not None and w.causal == "bottom_right":
            return lambda b: offsets[b]
        offset = w.query_offset(0)
        return lambda b: offset


def _attend(
    q: Tensor, k: Tensor, v: Tensor, block_mask: Any, slopes: Tensor | None, offsets: Tensor, **fixed: Any
) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(
        q,
        k,
        v,
        score_mod=_score_mod(fixed["softcap"], slopes, offsets),
        block_mask=block_mask,
        scale=fixed["scale"],
        enable_gqa=fixed["enable_gqa"],
    )


def _score_mod(softcap: float | None, slopes: Tensor | None, offsets: Tensor) -> Mod | None:
    """Softcap, then ALiBi; None where there is neither."""
    import torch

    if softcap is None and slopes is None:
        return None

    def changed(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[h] * (i + offsets[b] - j).abs()
        return score

    return changed


# --- torch.compile ----------------------------------------------------------------------------------------------------

_serial = itertools.count()


@functools.cache
def _compiled(workload: Workload, device: Device) -> tuple[Callable[..., Any], list[int]]:
    """``_attend`` compiled under a code object of its own, and how often it was, once per workload and process.

    Dynamo keeps what it compiled by code object and gives up after eight: workloads must not share one.
    """
    import torch
    from torch._dynamo import lookup_backend

    del device
    inductor, counted = lookup_backend("inductor"), [0]

    def counting(graph: Any, inputs: Any, **options: Any) -> Any:
        counted[0] += 1
        return inductor(graph, inputs, **options)

    code = _attend.__code__.replace(co_name=f"_attend_flex_{next(_serial)}")
    own = types.FunctionType(code, _attend.__globals__, code.co_name)
    fixed = {
        "softcap": workload.softcap,
        "scale": workload.effective_scale,
        "enable_gqa": workload.group > 1,
    }
    compiled = torch.compile(own, backend=counting, fullgraph=True, dynamic=False)
    return functools.partial(compiled, **fixed), counted


def _synchronise() -> None:
    import torch

    torch.cuda.synchronize()
