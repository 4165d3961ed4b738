"""Stage 2: the second article's attention module, its in-place variant, and the same compiled.

Reads Inputs, writes Output and Gradients. Must not import another implementation or a later stage.

Plain causal attention is six kernels: matmul, mul, the copy that an out-of-place ``masked_fill`` makes, the fill,
softmax, matmul. In place it is five. Everything is computed in the inputs' dtype. Masks and ALiBi are made once,
outside the call that is timed, as the article makes its mask.
"""

from __future__ import annotations

import functools
import itertools
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from attnscope.device import Device
from attnscope.errors import PrepareFailed
from attnscope.implementation import FEATURES, Gradients, Output, Sheet, SheetImplementation
from attnscope.implementations.common import (
    ANY_FUSED,
    PerInputs,
    Saved,
    autograd_backward,
    both_visible,
    compiler_reasons,
    differentiable,
    fused_implementation,
    leaves_of,
    may_hide_whole_rows,
)
from attnscope.inputs import Inputs, Tensor, make_inputs, torch_dtype, visible_by_geometry
from attnscope.workload import Workload

DTYPES = frozenset({"bf16", "fp16", "fp32", "fp64"})
OWN_PRECISION = {"bf16": "bf16", "fp16": "fp16"}
SOFTMAX_RAN = {"cpu": (r"(?i)softmax",), "cuda": (r"(?i)softmax",)}
NOTHING_FUSED_RAN = {"cpu": (ANY_FUSED,), "cuda": (ANY_FUSED,)}

Attend = Callable[..., Any]


class _NaiveBase(SheetImplementation):
    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        del device, direction
        if workload.S > 0 and not workload.sinks and may_hide_whole_rows(workload):
            return ["its softmax divides 0 by 0 on rows that see no key, which this workload may have"]
        return []


class Naive(_NaiveBase):
    """matmul, mul, masked_fill, softmax, matmul."""

    name = "naive"
    summary = "the article's module: matmul, mul, masked_fill, softmax, matmul, all in the inputs' dtype"
    sheet = Sheet(
        dtypes=DTYPES,
        features=frozenset(FEATURES),
        compute=OWN_PRECISION,
        kernels=SOFTMAX_RAN,
        kernels_absent=NOTHING_FUSED_RAN,
        materialises_scores=True,
        traceable=True,
    )

    def prepare(self, workload: Workload, device: Device) -> PreparedNaive:
        """Builds the mask."""
        return PreparedNaive(workload, device)


class NaiveInplace(_NaiveBase):
    """The same with ``masked_fill_``, which saves the copy; without a mask it is the same."""

    name = "naive_inplace"
    summary = "naive with masked_fill_ in place: one kernel and one score matrix less; forward only"
    sheet = Sheet(
        dtypes=DTYPES,
        features=frozenset(FEATURES),
        directions=frozenset({"forward"}),
        compute=OWN_PRECISION,
        kernels=SOFTMAX_RAN,
        kernels_absent=NOTHING_FUSED_RAN,
        materialises_scores=True,
        traceable=True,
    )

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """Why there is no backward."""
        found = super().more_reasons(workload, device, direction)
        if direction == "backward":
            found.append(
                "it runs under no_grad, as in the article: autograd would refuse once an op before the fill had saved "
                "the scores that it overwrites (a product with a number saves none, tanh does)"
            )
        return found

    def prepare(self, workload: Workload, device: Device) -> PreparedNaive:
        """Builds the mask."""
        return PreparedNaive(workload, device, in_place=True)


class NaiveCompiled(_NaiveBase):
    """``torch.compile`` of naive. Inductor may recognise attention and call a fused kernel: ``ran`` then names it."""

    name = "naive_compiled"
    summary = "torch.compile of naive: Inductor fuses what lies between the matmuls, or finds attention in it"
    sheet = Sheet(
        dtypes=DTYPES,
        features=frozenset(FEATURES),
        compute=OWN_PRECISION,
        materialises_scores=True,
        compiled=True,
        kept_on_disk=True,
    )

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """Naive's, and what the compiler lacks."""
        return super().more_reasons(workload, device, direction) + compiler_reasons(device)

    def ran(self, names: Iterable[str]) -> str | None:
        """The fused implementation that Inductor put in naive's place, by the kernels and ops that ran; else None."""
        return fused_implementation(names)

    def prepare(self, workload: Workload, device: Device) -> PreparedNaive:
        """Compiles, by running once on random inputs: the forward, and the backward where it can run.

        Raises:
            PrepareFailed: the compiler did not succeed.
        """
        from torch._dynamo.exc import TorchDynamoException
        from torch._functorch import config as functorch_config

        backward = not self.reasons_unsupported(workload, device, "backward")
        prepared = PreparedNaive(workload, device)
        prepared.attend_no_grad = _compiled(workload, device, grad=False)
        prepared.attend_grad = _compiled(workload, device, grad=True)
        inputs = make_inputs(workload, device)
        try:
            with warnings.catch_warnings(), functorch_config.patch(donated_buffer=False):
                # Inductor's advice is for the caller of torch.compile; a buffer given away cannot serve backward twice.
                warnings.simplefilter("ignore")
                prepared.forward(inputs)
                if backward:
                    prepared.backward(inputs, prepared.forward(inputs, save=True).saved)
        except TorchDynamoException as error:
            lines = str(error).strip().splitlines()
            raise PrepareFailed(f"{self.name}: torch.compile failed", "\n".join(lines[-12:])) from error
        return prepared


class PreparedNaive:
    """The module with its mask. ``attend_*`` are ``_attend`` or its compiled forms, with and without autograd."""

    def __init__(self, workload: Workload, device: Device, *, in_place: bool = False) -> None:
        self.visible_by_geometry = visible_by_geometry(workload, device.torch_name)
        self.hidden_by_geometry = _negated(self.visible_by_geometry)
        self.operands = PerInputs(self._operands)
        self.attend_no_grad: Attend = _attend
        self.attend_grad: Attend = _attend
        self.constants: dict[str, Any] = {
            "scale": workload.effective_scale,
            "group": workload.group,
            "softcap": workload.softcap,
            "dropout": workload.dropout,
            "in_place": in_place,
        }
        self.dtype = torch_dtype(workload.dtype)

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out; no lse."""
        import torch

        operands = self.operands(inputs)
        if not save:
            with torch.no_grad():
                return Output(self.attend_no_grad(**differentiable(inputs), **operands, **self.constants))
        leaves = leaves_of(inputs)
        with torch.enable_grad():
            out = self.attend_grad(**(differentiable(inputs) | leaves), **operands, **self.constants)
        return Output(out.detach(), saved=Saved(out, leaves))

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """Through autograd."""
        return autograd_backward(inputs, saved)

    def _operands(self, inputs: Inputs) -> dict[str, Tensor | None]:
        """What is no input of the module but made of one: the mask (True hides), ALiBi and dropout in its dtype."""
        hidden = self.hidden_by_geometry
        if inputs.mask is not None:
            hidden = _negated(both_visible(self.visible_by_geometry, inputs.mask))
        alibi = inputs.alibi_bias()
        return {
            "hidden": hidden,
            "alibi": None if alibi is None else alibi.to(self.dtype),
            "keep": inputs.dropout_keep,
        }


def _negated(visible: Tensor | None) -> Tensor | None:
    return None if visible is None else ~visible


def _attend(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    hidden: Tensor | None,
    alibi: Tensor | None,
    keep: Tensor | None,
    scale: float,
    group: int,
    softcap: float | None,
    dropout: float,
    in_place: bool,
) -> Tensor:
    import torch

    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.mul(torch.matmul(q, k.transpose(-2, -1)), scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if alibi is not None:
        scores = scores + alibi
    if hidden is not None:
        scores = scores.masked_fill_(hidden, -torch.inf) if in_place else scores.masked_fill(hidden, -torch.inf)
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    if keep is not None:
        weights = weights * keep * (1 / (1 - dropout))
    return torch.matmul(weights, v)


# --- torch.compile ----------------------------------------------------------------------------------------------------

_serial = itertools.count()


@functools.cache
def _compiled(workload: Workload, device: Device, *, grad: bool) -> Attend:
    """``_attend`` compiled under a code object of its own, once per workload and process.

    Dynamo keeps what it compiled by code object, tries one after the other at each call, and gives up after eight: many
    workloads under one code object would slow each other down.
    """
    import torch

    del workload, device, grad
    code = _attend.__code__.replace(co_name=f"_attend_{next(_serial)}")
    own = types.FunctionType(code, _attend.__globals__, code.co_name)
    own.__kwdefaults__ = _attend.__kwdefaults__
    return torch.compile(own, fullgraph=True, dynamic=False)
