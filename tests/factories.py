"""Builders of realistic records for tests: the article's workload on one H200, by the figures of articles.md §7.4.

Backward times, errors, energies and the two made-up rows (``hopper``, ours; ``broken``) are invented but plausible.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attnscope.device import Device, Environment
from attnscope.records import (
    CheckResult,
    Finding,
    KernelEvent,
    Limits,
    Measurement,
    OpTime,
    Profile,
    Result,
    Run,
    TensorCheck,
    Verdict,
)

BLOG = "B8,H16,L1024,D64,bf16,causal"
GPT2 = "B8,H12,L1024,D64,fp32,causal,layout=qkv"
USEFUL_FLOPS = 8 * 16 * 4 * 64 * 1024 * 1025 / 2  # visible pairs only
UNIQUE_BYTES = 4 * 8 * 16 * 1024 * 64 * 2
LIMIT_MS = {"forward": 0.0421, "backward": 0.0967}
FORWARD_TENSORS = ("out", "lse")
BACKWARD_TENSORS = ("dq", "dk", "dv")
KINDS = ("plain", "needles", "hard")

# name: (GPU us, host us, kernels) forward, from articles.md §7.4
FORWARD = {
    "naive": (1054.0, 287.0, 6),
    "naive_inplace": (927.0, 139.0, 5),
    "sdpa_math": (2576.0, 1946.0, 20),
    "sdpa_efficient": (179.0, 61.0, 1),
    "sdpa_flash": (92.6, 73.0, 1),
    "sdpa_cudnn": (58.9, 77.0, 1),
    "sdpa_auto": (59.1, 43.0, 1),
}
BACKWARD_US = {
    "naive": 3120.0, "sdpa_math": 7410.0, "sdpa_efficient": 690.0, "sdpa_flash": 331.0, "sdpa_cudnn": 181.0,
    "sdpa_auto": 181.6,
}  # fmt: skip

GEMM = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN"
SGEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::{0}, std::array<char*, 3ul> >(int)"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >(...)"
EFFICIENT = "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)"
NO_TENSOR_CORE = "the name says ffma: fp32 multiply-adds on the CUDA cores"

_NAIVE = [
    (GEMM, 84, "scores matmul", "aten::bmm", "tensor core"),
    (ELEMENTWISE.format("MulFunctor<float>"), 128, "scale", "aten::mul", "memory"),
    ("Memcpy DtoD (Device -> Device)", 126, "copy", "aten::clone", "memory"),
    (ELEMENTWISE.format("masked_fill_kernel"), 359, "mask", "aten::masked_fill_", "memory"),
    ("void (anonymous namespace)::softmax_warp_forward<float, 10, false>(...)", 283, "softmax", "aten::_softmax",
     "memory"),
    (GEMM, 83, "values matmul", "aten::bmm", "tensor core"),
]  # fmt: skip
_MATH = [
    *[(ELEMENTWISE.format(f"bfloat16_copy_kernel_{x}"), 25, "cast", "aten::_to_copy", "memory") for x in "qkv"],
    (ELEMENTWISE.format("MulFunctor<float>"), 22, "scale", "aten::mul", "memory"),
    (ELEMENTWISE.format("FillFunctor<bool>"), 3, "mask", "aten::ones", "memory"),
    ("void at::native::triu_tril_kernel<bool, int, false, 8, false>(...)", 4, "mask", "aten::tril", "memory"),
    *[(ELEMENTWISE.format("FillFunctor<float>"), 2, "mask", "aten::fill_", "memory")] * 2,
    (ELEMENTWISE.format("where_kernel"), 9, "mask", "aten::where", "memory"),
    (ELEMENTWISE.format("MulFunctor<float>"), 22, "scale", "aten::mul", "memory"),
    (SGEMM, 544, "scores matmul", "aten::bmm", "CUDA core"),
    (ELEMENTWISE.format("CUDAFunctor_add<float>"), 330, "mask", "aten::add_", "memory"),
    ("void softmax_warp_forward<float, float, float, 10, false>(...)", 310, "softmax", "aten::_softmax", "memory"),
    (ELEMENTWISE.format("isneginf_kernel"), 160, "mask", "aten::isneginf", "memory"),
    ("void at::native::reduce_kernel<512, 1, at::native::and_kernel>(...)", 70, "reduction", "aten::all", "memory"),
    (ELEMENTWISE.format("FillFunctor<float>"), 2, "mask", "aten::fill_", "memory"),
    (ELEMENTWISE.format("where_kernel"), 330, "mask", "aten::where", "memory"),
    (SGEMM, 417, "values matmul", "aten::bmm", "CUDA core"),
    (ELEMENTWISE.format("bfloat16_copy_kernel"), 24, "cast", "aten::_to_copy", "memory"),
    (ELEMENTWISE.format("bfloat16_copy_kernel"), 250, "cast", "aten::_to_copy", "memory"),
]  # fmt: skip
KERNELS: dict[str, list[tuple[str, float, str, str, str]]] = {
    "naive": _NAIVE,
    "naive_inplace": [k for k in _NAIVE if k[2] != "copy"],
    "sdpa_math": _MATH,
    "sdpa_efficient": [(EFFICIENT, 179, "fused attention", "aten::_efficient_attention_forward", "tensor core")],
    "sdpa_flash": [(FLASH, 92.6, "fused attention", "aten::_flash_attention_forward", "tensor core")],
    "sdpa_cudnn": [(CUDNN, 58.9, "fused attention", "aten::_cudnn_attention_forward", "tensor core")],
    "sdpa_auto": [(CUDNN, 59.1, "fused attention", "aten::_cudnn_attention_forward", "tensor core")],
}
EXPECTED = (
    "scores matmul: scores = Q·Kᵀ: one matrix product", "scale: scores · scale: one elementwise product",
    "mask: one fill or addition of the hidden scores", "softmax: softmax over the keys",
    "values matmul: out = P·V: one matrix product",
)  # fmt: skip
SURPRISES = {
    ("naive", "forward"): (
        "1 × copy (Memcpy DtoD (Device -> Device); 126 µs): a copy that no line of the code asks for",
    ),
    ("sdpa_math", "forward"): (
        "5 × cast (aten::_to_copy; 349 µs): a change of dtype that no line of the code asks for",
        "9 more mask than expected (aten::ones, aten::tril, aten::where; 514 µs): the mask is built anew in each call",
    ),
}
_BACKWARD_ROLES = (
    ("softmax", 0.22), ("values matmul", 0.13), ("scores matmul", 0.15), ("mask", 0.18), ("scale", 0.08),
    ("copy", 0.10), ("matmul", 0.14),
)  # fmt: skip


def h200(**changes: Any) -> Device:
    return replace(
        Device("cuda", "NVIDIA H200", 0, (9, 0), 132, memory_bytes=150_000_000_000, l2_bytes=60 * 2**20), **changes
    )


def cpu(**changes: Any) -> Device:
    return replace(Device("cpu", "Intel Xeon Platinum 8480C", memory_bytes=16 * 2**30, threads=2), **changes)


def environment(**changes: Any) -> Environment:
    packages = {"attnscope": "0.1.0", "torch": "2.11.0+cu130", "triton": "3.6.0", "flash-attn-4": "4.0.0b36"}
    made = Environment(
        python="3.12.3", platform="Linux x86_64", packages=packages, driver="580.95.05", cuda="13.0",
        cudnn_loaded="9.19.0", cudnn_path="cudnn/lib/libcudnn.so.9", cpu="Intel Xeon Platinum 8480C", threads=16,
        git_commit="ffca45e0c0ffee", git_dirty=False,
    )  # fmt: skip
    return replace(made, **changes)


def limits(**changes: Any) -> Limits:
    made = Limits(
        device="NVIDIA H200", matrix_tflop_per_s={"bf16": 672.0, "fp16": 668.0, "tf32": 341.0, "fp32": 51.2},
        read_gb_per_s=4020.0, copy_gb_per_s=3870.0, exponentials_t_per_s=3.86, launch_floor_us=2.1,
    )  # fmt: skip
    return replace(made, **changes)


def tensor_check(tensor: str = "out", kind: str = "plain", factor: float = 0.41, **changes: Any) -> TensorCheck:
    budget = 4.0e-3 if tensor != "lse" else 1.2e-6
    made = TensorCheck(
        tensor, kind, factor <= 1, factor * budget, budget, slope=factor * 1e-4, rms_ratio=1.02, worst="b0 h3 row 17"
    )
    return replace(made, **changes)


def check(factor: float = 0.41, *, backward: bool = True, grade: str | None = None, **changes: Any) -> CheckResult:
    """A check whose nearest tensor stands at ``factor`` of its budget; loose above 1, unless ``grade`` says failed."""
    names = FORWARD_TENSORS + (BACKWARD_TENSORS if backward else ())
    grade = grade or ("tight" if factor <= 1 else "loose")
    tensors = tuple(
        tensor_check(name, kind, factor * (1 - 0.09 * i) * (0.7 + 0.15 * j), passed=grade != "failed")
        for i, name in enumerate(names)
        for j, kind in enumerate(KINDS)
    )
    worst = max(tensors, key=lambda t: (t.row_rel_error_max or 0) / (t.error_budget or 1))
    made = CheckResult(
        grade != "failed", grade, worst.row_rel_error_max, worst.error_budget, factor, tensors,
        ("forward", "backward") if backward else ("forward",), seed=0, heads_checked=128, heads_total=128,
    )  # fmt: skip
    return replace(made, **changes)


def measurement(direction: str = "forward", us: float = 58.9, host_us: float | None = 77.0, **changes: Any):
    """A measurement of ``us`` microseconds on the H200, ±1 %, with every figure a GPU run gives."""
    ms = us / 1e3
    flops = USEFUL_FLOPS * (1.0 if direction == "forward" else 2.5)
    made = Measurement(
        direction, ms, ms * 0.991, ms * 1.012, 0.0105, samples=200,
        sustained_ms_median=ms * 1.06, sustained_samples=6, joules_per_call=ms * 0.61, power_w=610.0,
        sm_clock_mhz=1755.0, temperature_c=54.0, throttle_reasons=("power cap",) if ms > 2 else (),
        wall_us_median=host_us, graph_ms_median=ms * 0.985, graph_is_warm=False, first_call_ms=ms + 41.0,
        prepare_s=0.002, peak_memory_mib=16.5 if us < 200 else 1040.0, tflop_per_s=flops / ms / 1e9,
        gb_per_s=UNIQUE_BYTES / ms / 1e6, limit_ms=LIMIT_MS[direction], limit_term="exponentials",
        vs_limit=LIMIT_MS[direction] / ms,
    )  # fmt: skip
    return replace(made, **changes)


def cpu_measurement(direction: str = "forward", ms: float = 6.2, **changes: Any) -> Measurement:
    """A wall time on a CPU: no energy, clock, graph or sustained figure."""
    made = Measurement(
        direction, ms, ms * 0.96, ms * 1.08, 0.06, samples=30, first_call_ms=ms * 4, prepare_s=0.0, threads=2,
        tflop_per_s=0.134 / ms, limit_ms=2.2, limit_term="matrix", vs_limit=2.2 / ms,
    )  # fmt: skip
    return replace(made, **changes)


def kernel_event(name: str = CUDNN, start_us: float = 0.0, duration_us: float = 58.9, **changes: Any) -> KernelEvent:
    made = KernelEvent("forward", name, start_us, duration_us, "fused attention", op="aten::op", unit="tensor core")
    return replace(made, **changes)


def kernel_events(implementation: str, direction: str = "forward") -> tuple[KernelEvent, ...]:
    """The ordered kernels of a call of one of the H200 variants."""
    rows = KERNELS[implementation]
    if direction == "backward":
        us = BACKWARD_US[implementation]
        if len(rows) == 1:
            rows = [(rows[0][0].replace("fprop", "bprop").replace("fwd", "bwd"), us, *rows[0][2:])]
        else:
            rows = [
                (f"backward_{role}_kernel", us * part, role, "aten::op", "memory") for role, part in _BACKWARD_ROLES
            ]
    events, start = [], 0.0
    for name, duration, role, op, unit in rows:
        rule = NO_TENSOR_CORE if unit == "CUDA core" else f"its role is {role}"
        events.append(
            KernelEvent(direction, name, start, float(duration), role, op=op, unit=unit, unit_rule=rule, dtype="bf16")
        )
        start += duration + 1.4
    return tuple(events)


def profile(implementation: str, direction: str = "forward", **changes: Any) -> Profile:
    """The profile that belongs to ``kernel_events(implementation, direction)``, over three steps."""
    events = kernel_events(implementation, direction)
    gpu = sum(e.duration_us for e in events)
    host = FORWARD[implementation][1]
    rows: dict[str, OpTime] = {}
    for event in events:
        for name, own in ((event.name, True), (event.op or "", False)):
            old = rows.get(name, OpTime(name, 0, 0.0, 0.0, 0.0, 0.0))
            rows[name] = OpTime(
                name, old.calls + 3, old.self_cpu_us + (0 if own else 45.0), old.cpu_us + (0 if own else 72.0),
                old.self_gpu_us + (3 * event.duration_us if own else 0), old.gpu_us + 3 * event.duration_us,
            )  # fmt: skip
    made = Profile(
        direction, f"{implementation}-{direction}", 3, float(len(events)), 3.0 * len(events) + 4, gpu, host,
        3 * gpu, 3 * host, spilled_kernels=0, table=tuple(sorted(rows.values(), key=lambda r: -r.gpu_us))[:15],
        expected=EXPECTED if len(events) > 1 else ("fused attention: one fused kernel",),
        surprises=SURPRISES.get((implementation, direction), ()),
        trace=f"traces/B8-H16-L1024-D64-bf16-causal/{implementation}-{direction}.json.gz",
    )  # fmt: skip
    return replace(made, **changes)


def finding(**changes: Any) -> Finding:
    made = Finding(
        "out-of-place-mask",
        "masked_fill without the underscore copies the scores before it masks them",
        evidence=("Memcpy DtoD, 126 µs, launched by aten::clone under aten::masked_fill",),
        saving_us=126.0,
        arithmetic="2 × 256 MiB / 126 µs = 4.26 TB/s, so the copy runs at the memory's rate: 126 µs go with it",
        remedy="masked_fill_ where no gradient needs the scores",
        implementation="naive",
        direction="forward",
    )
    return replace(made, **changes)


FINDINGS = {
    "naive": (finding(),),
    "sdpa_math": (
        finding(
            id="gemm-off-tensor-cores", sentence="both matrix products run in fp32 on the CUDA cores", saving_us=794.0,
            evidence=("scores matmul 544 µs", "values matmul 417 µs"), implementation="sdpa_math",
            arithmetic="961 µs - 167 µs (the same products in bf16, as naive runs them)",
            remedy="torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)",
        ),
        finding(
            id="mask-rebuilt", sentence="the causal mask is built anew in every call", saving_us=20.0, evidence=(),
            implementation="sdpa_math", arithmetic="", remedy="", confidence="medium",
        ),
    ),
}  # fmt: skip


def result(implementation: str = "sdpa_cudnn", workload: str = BLOG, **changes: Any) -> Result:
    """A complete ok result of one of the H200 variants."""
    us, host_us, _ = FORWARD[implementation]
    backward_us = BACKWARD_US.get(implementation)
    directions = ["forward"] + (["backward"] if backward_us else [])
    made = Result(
        workload, implementation, "ok",
        reasons={} if backward_us else {"backward": ("has no backward: it overwrites what backward needs",)},
        check=check(2.3 if implementation.startswith("naive") else 0.41, backward=backward_us is not None),
        forward=measurement("forward", us, host_us),
        backward=measurement("backward", backward_us, host_us * 1.9) if backward_us else None,
        kernels=tuple(e for d in directions for e in kernel_events(implementation, d)),
        profiles=tuple(profile(implementation, d) for d in directions),
        findings=FINDINGS.get(implementation, ()),
        ran="sdpa_cudnn" if implementation == "sdpa_auto" else None,
    )  # fmt: skip
    return replace(made, **changes)


def ours(**changes: Any) -> Result:
    """A made-up kernel of our own, a little slower than cuDNN."""
    made = result("sdpa_cudnn")
    return replace(
        made, implementation="hopper", ours=True, forward=measurement("forward", 66.4, 31.0),
        backward=measurement("backward", 214.0, 35.0), kernels=(kernel_event("attnscope_hopper_forward", 0, 66.4),),
        profiles=(), findings=(), **changes,
    )  # fmt: skip


def skipped(implementation: str = "flash_attn", why: str = "package flash-attn is not installed", **changes: Any):
    reasons = {"forward": (why,), "backward": (why,)}
    return replace(Result(BLOG, implementation, "skipped", reasons=reasons), **changes)


def wrong(implementation: str = "broken", **changes: Any) -> Result:
    made = Result(
        BLOG, implementation, "check_failed",
        check=check(61.0, grade="failed", message="out on needles: error 0.24 where 0.004 is allowed, at b0 h3 row 17"),
    )  # fmt: skip
    return replace(made, **changes)


def failed(implementation: str = "naive_compiled", **changes: Any) -> Result:
    error = "ran past its limit of 120 s and was stopped"
    return replace(Result(BLOG, implementation, "failed", error=error), **changes)


def verdict(implementation: str, rival: str, word: str, ratio: float, **changes: Any) -> Verdict:
    return replace(Verdict("forward", implementation, rival, word, ratio, ratio * 0.995, ratio * 1.005), **changes)


def blog_run(**changes: Any) -> Run:
    """The article's workload on the H200: seven variants, one of ours, one wrong, one failed, two skipped."""
    rows = [result(name) for name in FORWARD]
    cudnn = next(i for i, r in enumerate(rows) if r.implementation == "sdpa_cudnn")
    rows[cudnn] = rows[cudnn].with_changes(
        verdicts=(
            verdict("sdpa_cudnn", "sdpa_auto", "same", 58.9 / 59.1),
            verdict("sdpa_cudnn", "hopper", "faster", 58.9 / 66.4),
            verdict("sdpa_cudnn", "sdpa_auto", "too close to call", 181.0 / 181.6, direction="backward"),
            verdict("sdpa_cudnn", "hopper", "faster", 181.0 / 214.0, direction="backward"),
        )
    )
    missing = "package {0} is not installed (pip install {0})"
    rows += [
        ours(), wrong(), failed(), skipped("flash_attn", missing.format("flash-attn")),
        skipped("sage", missing.format("sageattention")),
        skipped("reference_cpu", "runs on cpu, not on cuda"), skipped("flex_cpu", "runs on cpu, not on cuda"),
    ]  # fmt: skip
    made = Run(
        h200(), environment(), "2026-11-29T21:50:00+00:00", "attnscope compare blog", 0, (BLOG,), limits=limits(),
        results=tuple(rows),
    )  # fmt: skip
    return replace(made, **changes)


def cpu_run(**changes: Any) -> Run:
    """A small CPU run without GPU figures, profiles or limits of a GPU."""
    workload = "B1,H4,L512,D64,fp32,causal,layout=qkv"
    rows = tuple(
        Result(workload, name, "ok", check=check(0.2), forward=cpu_measurement("forward", ms),
               backward=cpu_measurement("backward", ms * 2.4))
        for name, ms in (("reference_cpu", 31.0), ("naive", 9.4), ("sdpa_math", 8.8), ("sdpa_flash", 6.2))
    )  # fmt: skip
    env = environment(driver=None, cuda=None, cudnn_loaded=None, cudnn_path=None, packages={"torch": "2.13.0+cpu"})
    made = Run(
        cpu(), env, "2026-11-29T21:50:00+00:00", "attnscope compare gpt2-small", 0, (workload,), quick=True,
        limits=Limits("cpu", {"fp32": 0.11}, read_gb_per_s=21.0), results=rows,
    )  # fmt: skip
    return replace(made, **changes)
