"""Stage 3: faults that were reported in public, as probes that show whether they are there.

Reads an Implementation and a Device, writes what was seen; :mod:`attnscope.faults` keeps it. Must not import a later
stage, nor torch at import time. A probe runs the report's recipe through the contract and judges what comes back as
a check does; what a report says about other software is not repeated here, only what to try.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnscope import card_probes
from attnscope.inputs import Inputs
from attnscope.probing import Case, Fault, equal_runs, judged
from attnscope.workload import Workload

FUSED = ("sdpa_efficient", "sdpa_flash", "sdpa_cudnn", "sdpa_auto")
CUDNN = ("sdpa_cudnn", "sdpa_auto", "cudnn_graph")


# --- what the reports do to inputs ------------------------------------------------------------------------------------


def _hide_a_row(inputs: Inputs) -> None:
    inputs.mask[..., 3, :] = False  # type: ignore[index]


def _stride_two(inputs: Inputs) -> None:
    """q, k, v (and bias, mask) with a last dim that is not contiguous."""
    import torch

    for name in ("q", "k", "v", "bias", "mask"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            setattr(inputs, name, torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2])


def _expand_grad_out(inputs: Inputs) -> None:
    """What ``out.sum().backward()`` hands over: one number for all."""
    inputs.grad_out = inputs.grad_out.new_ones(()).expand(inputs.grad_out.shape)


def _transpose_grad_out(inputs: Inputs) -> None:
    inputs.grad_out = inputs.grad_out.transpose(1, 2).contiguous().transpose(1, 2)


def _same_row_grad_out(inputs: Inputs) -> None:
    """Stride 0 over the rows."""
    inputs.grad_out = inputs.grad_out[:, :, :1].expand(inputs.grad_out.shape)


def _has_mask_tensor(w: Workload) -> bool:
    return bool(w.features & {"mask", "bias", "alibi", "window", "lengths", "packed"})


def _pytorch(*numbers: int) -> str:
    return " ".join(f"https://github.com/pytorch/pytorch/issues/{number}" for number in numbers)


def _of_flash_attention(*numbers: int) -> str:
    return " ".join(f"https://github.com/Dao-AILab/flash-attention/issues/{number}" for number in numbers)


def _alignments() -> Iterator[Case]:
    for L, S in ((1, 16), (2, 5), (5, 2)):
        for alignment in ("top_left", "bottom_right"):
            yield Case(f"B1,H2,L{L},S{S},D16,fp32,causal={alignment}")


FAULTS: tuple[Fault, ...] = (
    Fault(
        id="W1",
        source=_pytorch(103963, 41508),
        range="a mask that hides every key from some row",
        wrong="the row and its gradients are NaN; right are zeros",
        applies=lambda w: w.mask is not None,
        probe=judged(Case("B1,H2,L8,D16,fp32,mask=bool:1x1xLxS", _hide_a_row)),
    ),
    Fault(
        id="W3",
        source=f"{_pytorch(108108)} {_of_flash_attention(1778)}",
        range="a causal mask with L != S",
        wrong="the mask is aligned to the other corner",
        applies=lambda w: w.causal is not None and w.L != w.S,
        probe=judged(*_alignments()),
    ),
    Fault(
        id="W4",
        source=_pytorch(196678),
        range="backward, an explicit mask, L % 128 = 64, logits far below 0",
        wrong="NaN in dq",
        applies=lambda w: _has_mask_tensor(w) and w.L % 128 == 64 and w.dtype in ("bf16", "fp16"),
        probe=judged(Case("B1,H1,L704,D64,bf16,mask=bool:1x1xLxS", kind="shifted"), of_backward=True),
        implementations=("sdpa_cudnn", "sdpa_auto"),
        devices=("cuda",),
    ),
    Fault(
        id="W6",
        source="https://github.com/pytorch/pytorch/pull/191612",
        range="an additive float32 bias with 16-bit q, k, v",
        wrong="most of the output is NaN",
        applies=lambda w: w.bias == "fp32" and w.dtype in ("bf16", "fp16"),
        probe=judged(Case("B1,H2,L128,D64,fp16,bias=fp32:1x1xLxS")),
        implementations=FUSED,
        devices=("cuda",),
    ),
    Fault(
        id="W7",
        source=_pytorch(162588, 187227),
        range="an explicit mask with L * S of 2**32 or more",
        wrong="rows from 2**32 // S on are wrong: their place in the mask is a 32-bit product",
        applies=lambda w: _has_mask_tensor(w) and w.L * w.S >= 2**32,
        probe=card_probes.wide_mask,
        implementations=("sdpa_efficient",),
        devices=("cuda",),
    ),
    Fault(
        id="W8",
        source=_pytorch(142228, 146704),
        range="B or H above 65535",
        wrong="the launch fails, or part of the output is wrong",
        applies=lambda w: max(w.B, w.H) > 65535,
        probe=judged(Case("B65536,H1,L8,D64,fp16"), Case("B1,H65536,L8,D64,fp16"), despite_reasons="everywhere"),
        implementations=FUSED,
        devices=("cuda",),
    ),
    Fault(
        id="W11",
        source="https://github.com/pytorch/pytorch/pull/187506",
        range="q, k, v, bias or mask whose last dim is not contiguous",
        wrong="another result than with .contiguous()",
        applies=lambda w: True,
        probe=judged(
            Case("B1,H2,L33,D16,fp32,causal", _stride_two),
            Case("B1,H2,L33,D16,fp32,mask=bool", _stride_two),
            Case("B1,H2,L33,D16,fp32,bias=fp32", _stride_two),
        ),
    ),
    Fault(
        id="W14",
        source=_of_flash_attention(1537),
        range="S = 0, L = 0, B = 0, or an empty sequence of a packed batch",
        wrong="an error, or anything but zeros of the right shape",
        applies=lambda w: 0 in (w.B, w.L, w.S, *(w.packed or ())),
        probe=judged(
            Case("B2,H2,L8,S0,D16,fp32"),
            Case("B2,H2,L0,S8,D16,fp32"),
            Case("B0,H2,L8,D16,fp32"),
            Case("H2,D16,fp32,packed=3/0/5"),
        ),
    ),
    Fault(
        id="W22",
        source=_of_flash_attention(2244, 414),
        range="any backward",
        wrong="gradients of equal calls differ in their last bits: not deterministic, which is not wrong",
        applies=lambda w: True,
        probe=equal_runs,
    ),
    Fault(
        id="W23",
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
        range="a mask and causal both",
        wrong="one of them is dropped, or an error; both must apply",
        applies=lambda w: w.mask is not None and w.causal is not None,
        probe=judged(Case("B1,H2,L33,D16,fp32,causal,mask=bool"), Case("B1,H2,L33,D16,fp32,causal,bias=fp32")),
    ),
    Fault(
        id="W27",
        source="https://github.com/huggingface/transformers/pull/35984",
        range="a head dim that is padded to a multiple of 8",
        wrong="the scale is taken from the padded head dim",
        applies=lambda w: w.scale is None and w.D % 8 != 0,
        probe=judged(Case("B1,H2,L64,D36,fp32,causal"), Case("B1,H2,L64,D36,fp32")),
    ),
    Fault(
        id="W28",
        source="https://github.com/onnx/onnx/pull/7274",
        range="grouped-query heads",
        wrong="key/value heads are mapped as by repeat, not as by repeat_interleave",
        applies=lambda w: w.H != w.H_kv,
        probe=judged(Case("B1,H8/2,L33,D16,fp32,causal")),
    ),
    Fault(
        id="W29",
        source=_pytorch(133671, 138340),
        range="backward with dO expanded, transposed or of stride 0",
        wrong="another gradient than with a contiguous dO",
        applies=lambda w: True,
        probe=judged(
            Case("B2,H2,L33,D16,fp32,causal", _expand_grad_out),
            Case("B2,H2,L33,D16,fp32,causal", _transpose_grad_out),
            Case("B2,H2,L33,D16,fp32,causal", _same_row_grad_out),
            of_backward=True,
        ),
    ),
    Fault(
        id="W30",
        source="https://github.com/pytorch/pytorch/pull/188302",
        range="backward with a bias that wants a gradient",
        wrong="the bias gets no gradient",
        applies=lambda w: w.bias is not None,
        probe=judged(Case("B1,H2,L33,D16,fp32,bias=fp32:1xHxLxS"), despite_reasons=True, of_backward=True),
    ),
    Fault(
        id="S1",
        source=f"{_pytorch(154363)} https://github.com/pytorch/pytorch/pull/181528",
        range="grouped-query heads through enable_gqa with fp32, or with D above 256",
        wrong="PyTorch takes math and says nothing: slow, not wrong",
        applies=lambda w: w.group > 1 and (w.dtype == "fp32" or w.D > 256),
        probe=card_probes.grouped_heads_take_math,
        implementations=("sdpa_auto",),
        devices=("cuda",),
    ),
    Fault(
        id="S3",
        source="https://github.com/modelscope/FunASR/issues/3704 https://github.com/pytorch/torchtune/issues/1652",
        range="each shape that was not run before",
        wrong="a plan is built for it: the first call is slow, not wrong",
        applies=lambda w: True,
        probe=card_probes.plans_by_shape,
        implementations=("sdpa_cudnn", "cudnn_graph"),
        devices=("cuda",),
    ),
    Fault(
        id="S4",
        source=f"{_pytorch(142132)} https://github.com/huggingface/transformers/pull/48163",
        range="any call that pins no implementation",
        wrong="the default follows the cuDNN that is loaded, which need not be the one that torch was installed with",
        applies=lambda w: True,
        probe=card_probes.default_and_its_cudnn,
        implementations=("sdpa_auto",),
        devices=("cuda",),
    ),
    Fault(
        id="A2",
        source="https://docs.nvidia.com/cudnn/operations/Attention.md",
        range="dropout that the implementation draws itself",
        wrong="what one call drops is not independent: means over it spread further, around the right rate",
        applies=lambda w: w.dropout > 0,
        probe=card_probes.related_masks,
        implementations=("cudnn_graph", *FUSED, "sdpa_math"),
        devices=("cuda",),
    ),
    Fault(
        id="A1",
        source="https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cpu/FlashAttentionKernel.cpp",
        range="a scale of 0 or below, with a causal mask",
        wrong="NaN: scores are masked before they are scaled, so -inf becomes inf",
        applies=lambda w: w.effective_scale <= 0 and w.causal is not None,
        probe=judged(Case("B1,H2,L33,D16,fp32,causal,scale=-0.2"), despite_reasons=True),
    ),
    Fault(
        id="A3",
        source=f"{_pytorch(196678)} https://github.com/NVIDIA/cudnn-frontend/issues/160",
        range="backward, no mask tensor, S % 128 = 64 and L no multiple of 64, logits far below 0",
        wrong="NaN in dq",
        applies=lambda w: not _has_mask_tensor(w) and w.S % 128 == 64 and w.L % 64 != 0 and w.dtype in ("bf16", "fp16"),
        probe=judged(
            Case("B2,H16,L65,S704,D64,bf16", kind="shifted"),
            Case("B2,H16,L127,S704,D64,bf16,causal=bottom_right", kind="shifted"),
            of_backward=True,
        ),
        implementations=CUDNN,
        devices=("cuda",),
    ),
    Fault(
        id="A4",
        source="https://github.com/NVIDIA/cudnn-frontend/issues/1072",
        range="backward with L = 1, logits far below 0",
        wrong="NaN in dk and dv",
        applies=lambda w: w.L == 1 and w.dtype in ("bf16", "fp16"),
        probe=judged(Case("B1,H32/8,L1,S4096,D128,bf16", kind="shifted"), of_backward=True),
        implementations=CUDNN,
        devices=("cuda",),
    ),
    Fault(
        id="A5",
        source=_pytorch(153799),
        range="backward, L no multiple of 64",
        wrong="NaN in the first rows of dq",
        applies=lambda w: w.L % 64 != 0,
        probe=judged(
            Case("B2,H16,L65,S704,D64,bf16"), Case("B2,H16,L127,S704,D64,bf16,causal=bottom_right"), of_backward=True
        ),
        implementations=("flex",),
        devices=("cuda",),
    ),
    Fault(
        id="A6",
        source="https://github.com/Dao-AILab/flash-attention/pull/2896",
        range="backward, a head dim whose next multiple of 16 is none of 32",
        wrong="dq is wrong, all else right",
        applies=lambda w: -(-w.D // 16) % 2 == 1,
        probe=judged(Case("B2,H16,L1024,D80,bf16,causal"), Case("B2,H4,L512,D72,bf16"), of_backward=True),
        implementations=("flash_attn_4",),
        devices=("cuda",),
    ),
)


def find_fault(fault_id: str) -> Fault | None:
    """The fault of that id."""
    return next((fault for fault in FAULTS if fault.id == fault_id), None)
