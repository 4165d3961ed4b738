"""Builds Chrome traces by hand, with the field names and kernel names of real ones: the tests' GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnscope.trace import Trace, parse_trace

H200 = {
    "id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150109880320, "computeMajor": 9, "computeMinor": 0,
    "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048, "regsPerBlock": 65536, "warpSize": 32,
    "sharedMemPerBlock": 49152, "numSms": 132, "regsPerMultiprocessor": 65536, "sharedMemPerBlockOptin": 232448,
    "sharedMemPerMultiprocessor": 233472,
}  # fmt: skip
A100 = H200 | {"name": "NVIDIA A100-SXM4-80GB", "computeMajor": 8, "numSms": 108, "sharedMemPerBlockOptin": 166912,
               "sharedMemPerMultiprocessor": 167936}  # fmt: skip
TORCH_DTYPES = {"bf16": "c10::BFloat16", "fp16": "c10::Half", "fp32": "float", "bool": "bool",
                "fp64": "double", "int64": "long int"}  # fmt: skip

NVJET = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT"
S16816 = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
FFMA = ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_"
        "kernel__5x_cublas")  # fmt: skip
SGEMM = "ampere_sgemm_128x64_tn"
TF32 = "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_kernel__5x_cublas"
FLASH = ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
         "cutlass::bfloat16_t, pytorch_flash::Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, false, "
         "true, false, false, false, true, false, false>(pytorch_flash::Flash_fwd_params)")  # fmt: skip
FLASH_BACKWARD = (
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, pytorch_flash::Flash_bwd_kernel_traits<64, 128, 128, 8> >",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel_traits<64, 128, "
    "128, 8, 4, 4, 4, false, false, cutlass::bfloat16_t> >",
    "void pytorch_flash::flash_bwd_convert_dq_kernel<pytorch_flash::Flash_bwd_kernel_traits<64, 128, 128, 8> >",
)
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0"
EFFICIENT = (
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)"
)
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::{}, std::array<char*, 2ul> >(int)"
MUL = ELEMENTWISE.format("AUnaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, MulFunctor<float> >")
ADD = ELEMENTWISE.format("CUDAFunctor_add<float>")
FILL = ELEMENTWISE.format("FillFunctor<bool>")
MASK = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<masked_fill_kernel> >(int)"
WHERE = "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<where_kernel_impl> >(int)"
TRIL = "void at::native::triu_tril_kernel<bool, int, false, 16, false>(at::cuda::detail::TensorInfo<bool, int>)"
SOFTMAX = (
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*, float const*)"
)
ISNEGINF = ELEMENTWISE.format("isneginf_kernel_impl(at::TensorIteratorBase&)")
ALL = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<bool, and_kernel_cuda> >(at::native::ReduceOp<bool>)"
CAST = ELEMENTWISE.format("bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}")
COPY = "void at::native::elementwise_kernel<128, 4, gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda> >(int)"


class TraceBuilder:
    """Events in the order of the calls. Host and device clocks run by themselves; times are whole nanoseconds."""

    def __init__(self, device: dict[str, Any] | None = H200, base_ns: int = 5_132_283_180_949_797) -> None:
        self.device = device
        self.events: list[dict[str, Any]] = []
        self.now_ns = base_ns
        self.device_free_ns = base_ns
        self.correlation = 1000
        self.steps = 0
        self.thread = 77

    @contextmanager
    def annotation(self, name: str) -> Iterator[None]:
        with self._scope(name, "user_annotation", {"External id": 1}):
            yield

    @contextmanager
    def step(self, label: str) -> Iterator[None]:
        """One recorded step of ours."""
        with self.annotation(f"ProfilerStep#{self.steps + 2}"), self.annotation(label):
            yield
        self.steps += 1
        self.now_ns += 5_000

    @contextmanager
    def op(self, name: str, *tensors: tuple[str, list[int]], strides: list[list[int]] | None = None,
           values: list[str] | None = None) -> Iterator[None]:  # fmt: skip
        """A CPU op on tensors given as (dtype, shape), and then on numbers given as text."""
        args = {
            "Input type": [TORCH_DTYPES[dtype] for dtype, _ in tensors],
            "Input Dims": [shape for _, shape in tensors],
            "Input Strides": strides or [_contiguous(shape) for _, shape in tensors],
        }
        if values is not None:
            args["Concrete Inputs"] = [""] * len(tensors) + values
            args["Input Dims"] = args["Input Dims"] + [[] for _ in values]
            args["Input type"] = args["Input type"] + ["Scalar"] * len(values)
        with self._scope(name, "cpu_op", args):
            yield

    def kernel(self, name: str, us: float, *, cat: str = "kernel", launch: str | None = "cudaLaunchKernel",
               grid: tuple[int, ...] = (1024, 1, 1), block: tuple[int, ...] = (128, 1, 1), registers: int = 64,
               shared: int = 0, occupancy: float = 50) -> None:  # fmt: skip
        """A launch here and its kernel on stream 7 as soon as it is free; ``launch=None`` leaves the launch out."""
        self.correlation += 1
        ids = {"External id": self.correlation, "correlation": self.correlation}  # wrong on purpose, as in many traces
        if launch is not None:
            self._add(launch, "cuda_runtime", self.now_ns, 4_000, self.thread, ids)
            self.now_ns += 4_000
        start = max(self.device_free_ns, self.now_ns + 1_500)
        args: dict[str, Any] = {**ids, "device": 0, "context": 1, "stream": 7}
        if cat == "kernel":
            args |= {"registers per thread": registers, "shared memory": shared, "blocks per SM": 1.0,
                     "warps per SM": 4.0, "grid": list(grid), "block": list(block),
                     "est. achieved occupancy %": occupancy}  # fmt: skip
        else:
            args |= {"bytes": 1 << 20, "memory bandwidth (GB/s)": 1.0}
        self._add(name, cat, start, round(us * 1000), 7, args, pid=0)
        self.device_free_ns = start + round(us * 1000) + 500

    def memcpy(self, us: float) -> None:
        self.kernel("Memcpy DtoD (Device -> Device)", us, cat="gpu_memcpy", launch="cudaMemcpyAsync")

    def memset(self, us: float) -> None:
        self.kernel("Memset (Device)", us, cat="gpu_memset", launch="cudaMemsetAsync")

    def wait(self, us: float) -> None:
        """The host does something else."""
        self.now_ns += round(us * 1000)

    def document(self) -> dict[str, Any]:
        return {
            "schemaVersion": 1,
            "deviceProperties": [self.device] if self.device else [],
            "traceEvents": self.events,
            "baseTimeNanoseconds": 1790857026000000000,
        }

    def bytes(self) -> bytes:
        return json.dumps(self.document()).encode()

    def trace(self) -> Trace:
        return parse_trace(self.bytes())

    @contextmanager
    def _scope(self, name: str, cat: str, args: dict[str, Any]) -> Iterator[None]:
        start = self.now_ns
        self.now_ns += 1_000
        event = self._add(name, cat, start, 0, self.thread, args)
        yield
        self.now_ns += 1_000
        event["dur"] = (self.now_ns - start) / 1000

    def _add(
        self, name: str, cat: str, start: int, duration: int, tid: int, args: Any, pid: int = 77
    ) -> dict[str, Any]:
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start / 1000,
                 "dur": duration / 1000, "args": args}  # fmt: skip
        self.events.append(event)
        return event


def _contiguous(shape: list[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return strides


# --- calls as PyTorch makes them, on the profiling article's shape ---------------------------------------------------

Q = ("bf16", [8, 16, 1024, 64])
KT = ("bf16", [128, 64, 1024])
SCORES = ("bf16", [8, 16, 1024, 1024])
SCORES32 = ("fp32", [8, 16, 1024, 1024])
HIDDEN = ("bool", [1024, 1024])


def matmul(b: TraceBuilder, kernel: str, us: float, dtype: str = "bf16", *, values: bool = False) -> None:
    first, second = ([128, 1024, 1024], [128, 1024, 64]) if values else ([128, 1024, 64], KT[1])
    with b.op("aten::matmul", (dtype, Q[1])), b.op("aten::bmm", (dtype, first), (dtype, second)):
        b.memset(0.7)
        b.kernel(kernel, us, registers=168, shared=231424 if kernel == NVJET else 49152, occupancy=0, block=(384, 1, 1))


def cast(b: TraceBuilder, target: str, source: str, shape: list[int], us: float) -> None:
    outer = (source, shape)
    with b.op("aten::to", outer), b.op("aten::_to_copy", outer), b.op("aten::copy_", (target, shape), outer):
        b.kernel(CAST, us)


def naive(b: TraceBuilder, *, in_place: bool = False, gemm: str = NVJET) -> None:
    """matmul, mul, masked_fill (out of place or in place), softmax, matmul."""
    matmul(b, gemm, 84)
    with b.op("aten::mul", SCORES, ("fp32", [])):
        b.kernel(MUL, 128)
    if in_place:
        with b.op("aten::masked_fill_", SCORES, HIDDEN):
            b.kernel(MASK, 359)
    else:
        with b.op("aten::masked_fill", SCORES, HIDDEN):
            with b.op("aten::clone", SCORES), b.op("aten::copy_", SCORES, SCORES):
                b.memcpy(126)
            with b.op("aten::masked_fill_", SCORES, HIDDEN):
                b.kernel(MASK, 359)
    with b.op("aten::softmax", SCORES), b.op("aten::_softmax", SCORES):
        b.kernel(SOFTMAX, 283)
    matmul(b, gemm, 83, values=True)


def sdpa_math(b: TraceBuilder, *, group: int = 1) -> None:
    """PyTorch's math path on bf16 with is_causal: 20 kernels."""
    small = [8, 16, 1024, 64]
    with b.op("aten::scaled_dot_product_attention", Q), b.op("aten::_scaled_dot_product_attention_math", Q):
        for _ in range(3):
            cast(b, "fp32", "bf16", small, 15)
        with b.op("aten::mul", ("fp32", small), ("fp32", [])):
            b.kernel(MUL, 20)
        with b.op("aten::ones"), b.op("aten::fill_", HIDDEN):
            b.kernel(FILL, 3)
        with b.op("aten::tril", HIDDEN):
            b.kernel(TRIL, 4)
        for _ in range(2):
            with b.op("aten::scalar_tensor"), b.op("aten::fill_", ("fp32", [])):
                b.kernel(FILL, 2)
        with b.op("aten::where", HIDDEN, ("fp32", []), ("fp32", [])):
            b.kernel(WHERE, 6)
        if group > 1:
            for _ in range(2):
                repeat = [[8, 16 // group, group, 1024, 64], [8, 16 // group, group, 1024, 64]]
                strides = [_contiguous(repeat[0]), [1048576, 65536, 0, 64, 1]]
                heads, five = ("fp32", [8, 16 // group, 1024, 64]), ("fp32", repeat[0])
                copied = [("fp32", shape) for shape in repeat]
                copy = b.op("aten::copy_", *copied, strides=strides)
                with b.op("aten::repeat_interleave", heads), b.op("aten::clone", five), copy:
                    b.kernel(COPY, 30)
        with b.op("aten::mul", ("fp32", small), ("fp32", [])):
            b.kernel(MUL, 20)
        matmul(b, FFMA, 544, "fp32")
        with b.op("aten::add_", SCORES32, ("fp32", [1024, 1024])):
            b.kernel(ADD, 250)
        with b.op("aten::_safe_softmax", SCORES32):
            with b.op("aten::softmax", SCORES32), b.op("aten::_softmax", SCORES32):
                b.kernel(SOFTMAX, 290)
            with b.op("aten::isneginf", SCORES32):
                b.kernel(ISNEGINF, 150)
            with b.op("aten::all", ("bool", SCORES[1])):
                b.kernel(ALL, 90)
            with b.op("aten::scalar_tensor"), b.op("aten::fill_", ("fp32", [])):
                b.kernel(FILL, 2)
            with b.op("aten::where", ("bool", [8, 16, 1024, 1]), SCORES32, SCORES32):
                b.kernel(WHERE, 300)
        matmul(b, FFMA, 417, "fp32", values=True)
        cast(b, "bf16", "fp32", small, 10)
        cast(b, "bf16", "fp32", SCORES[1], 180)


def fused(
    b: TraceBuilder, kernel: str, us: float, *, shared: int, registers: int, block: int, occupancy: float
) -> None:
    """One SDPA call that one kernel answers."""
    with b.op("aten::scaled_dot_product_attention", Q), b.op("aten::_scaled_dot_product_flash_attention", Q):
        b.kernel(kernel, us, grid=(8, 8, 16), block=(block, 1, 1), registers=registers, shared=shared,
                 occupancy=occupancy)  # fmt: skip


def sdpa_flash(b: TraceBuilder) -> None:
    fused(b, FLASH, 92.6, shared=49152, registers=255, block=128, occupancy=13)


def sdpa_cudnn(b: TraceBuilder) -> None:
    fused(b, CUDNN, 58.9, shared=165888, registers=168, block=384, occupancy=0)
