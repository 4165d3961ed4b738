"""Calls as whole traces hold them, and their explanation: what the tests of findings are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trace_builder as tb
from attnscope.explaining import explain_trace
from attnscope.explaining.explanation import Explanation
from trace_builder import TraceBuilder

Build = Callable[[TraceBuilder], None]
SGEMV = "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>(int)"
ALIGN1 = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1>(cutlass_75::Params)"
ALIGN8 = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_nn_align8>(cutlass_80::Params)"
LOG_SOFTMAX = (
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, LogSoftMaxForwardEpilogue>(int)"
)
ATTN_FWD = "attn_fwd.kd"
CIJK = "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1"


def explained(*builds: Build, device: dict[str, Any] | None = tb.H200) -> Explanation:
    b = TraceBuilder(device)
    for build in builds:
        build(b)
    return explain_trace(b.trace(), "t")


def ids(explanation: Explanation) -> set[str]:
    return {finding.id for finding in explanation.findings}


def finding(explanation: Explanation, wanted: str) -> Any:
    return next(one for one in explanation.findings if one.id == wanted)


def linear(b: TraceBuilder, kernel: str = tb.NVJET, us: float = 50, dtype: str = "bf16") -> None:
    with b.op("aten::linear", (dtype, [8192, 1024])), b.op("aten::mm", (dtype, [8192, 1024]), (dtype, [1024, 1024])):
        b.kernel(kernel, us)


def bmm(b: TraceBuilder, first: list[int], second: list[int], kernel: str = tb.S16816, us: float = 80) -> None:
    with b.op("aten::bmm", ("bf16", first), ("bf16", second)):
        b.kernel(kernel, us)


def softmax(b: TraceBuilder, shape: list[int], us: float = 280) -> None:
    with b.op("aten::softmax", ("bf16", shape)), b.op("aten::_softmax", ("bf16", shape)):
        b.kernel(tb.SOFTMAX, us)


def copy(b: TraceBuilder, shape: list[int], around: str = "aten::contiguous", us: float = 30) -> None:
    one = ("bf16", shape)
    with b.op(around, one), b.op("aten::clone", one), b.op("aten::copy_", one, one):
        b.kernel(tb.COPY, us)


def sdpa(b: TraceBuilder, inner: str, kernel: str, us: float = 100, mask: list[int] | None = None, dropout: str = "0.",
         grid: tuple[int, int, int] = (1024, 1, 1)) -> None:  # fmt: skip
    """An SDPA call with the arguments that a trace with shapes holds."""
    q, masked = tb.Q[1], mask or []
    values = ["", "", "", "", dropout, "False", "", "False"]
    args = {"Input Dims": [q, q, q, masked, [], [], [], []], "Concrete Inputs": values,
            "Input type": ["c10::BFloat16"] * 3 + ["bool" if mask else "", *["Scalar"] * 4]}  # fmt: skip
    with b._scope("aten::scaled_dot_product_attention", "cpu_op", args), b.op(inner, tb.Q, tb.Q, tb.Q):
        b.kernel(kernel, us, grid=grid)


def flash(b: TraceBuilder) -> None:
    sdpa(b, "aten::_scaled_dot_product_flash_attention", tb.FLASH)


def efficient(b: TraceBuilder, mask: list[int] | None = None, **more: Any) -> None:
    sdpa(b, "aten::_scaled_dot_product_efficient_attention", tb.EFFICIENT, mask=mask, **more)
