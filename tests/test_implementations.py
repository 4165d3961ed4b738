"""What single implementations promise beyond the contract."""

import functools
import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnscope.device import Device, find_device
from attnscope.errors import PrepareFailed
from attnscope.implementation import find
from attnscope.implementations import common, naive, sdpa
from attnscope.implementations.common import PerInputs, fused_implementation, may_hide_whole_rows
from attnscope.inputs import make_inputs
from attnscope.workload import Workload
from test_contract import names_that_ran, problem, run_case

CPU = find_device("cpu")
H100 = Device("cuda", "NVIDIA H100", capability=(9, 0))
T4 = Device("cuda", "Tesla T4", capability=(7, 5))
BLOG = Workload.parse("B1,H2,L64,D32,fp32,causal")


def reasons(name: str, text: str, device: Device = H100, direction: str = "forward") -> list[str]:
    return find(name).reasons_unsupported(Workload.parse(text), device, direction)


def ops(name: str, text: str, direction: str = "forward") -> list[str]:
    workload = Workload.parse(text)
    prepared = find(name).prepare(workload, CPU)
    inputs = make_inputs(workload, CPU)
    prepared.forward(inputs)
    return names_that_ran(prepared, inputs, direction, CPU)


# --- naive ------------------------------------------------------------------------------------------------------------


def test_naive_is_the_articles_six_steps_and_in_place_saves_the_copy() -> None:
    work = ("aten::bmm", "aten::mul", "aten::clone", "aten::masked_fill_", "aten::_softmax")
    text = "B1,H2,L64,D32,fp32,causal"
    counts = {name: [ops(name, text).count(op) for op in work] for name in ("naive", "naive_inplace")}
    assert counts == {"naive": [2, 1, 1, 1, 1], "naive_inplace": [2, 1, 0, 1, 1]}


def test_naive_builds_its_mask_once() -> None:
    seen = ops("naive", "B1,H2,L64,D32,fp32,causal,mask=bool")
    assert not {"aten::arange", "aten::bitwise_not", "aten::bitwise_and", "aten::bitwise_or"} & set(seen)


def test_naive_inplace_without_a_mask_fills_nothing() -> None:
    assert not any("fill" in op for op in ops("naive_inplace", "B1,H2,L64,D32,fp32"))


def test_what_the_reason_of_naive_inplace_says_of_autograd_is_true() -> None:
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    leaf = torch.randn(4, 4, requires_grad=True)
    torch.mul(leaf, 0.5).masked_fill_(hidden, -torch.inf).softmax(-1).square().sum().backward()
    assert torch.isfinite(leaf.grad).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.tanh(leaf).masked_fill_(hidden, -torch.inf).softmax(-1).square().sum().backward()
    assert any("autograd would refuse" in reason for reason in reasons("naive_inplace", str(BLOG), CPU, "backward"))


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("B1,H2,L8,D16,fp32,causal", False),
        ("B1,H2,L8,S4,D16,fp32,causal=bottom_right", True),
        ("B2,H2,L8,D16,fp32,lengths=8/0", True),
        ("B2,H2,L8,D16,fp32,lengths=8/1", False),
        ("B1,H2,L8,S4,D16,fp32,window=2", True),
        ("H2,D16,fp32,causal,packed=3/0/5", False),
        ("B2,H2,L8,D16,fp32,lengths=8/0,sinks", False),
    ],
)
def test_naive_refuses_rows_without_keys(text: str, may: bool) -> None:
    assert any("divides 0 by 0" in reason for reason in reasons("naive", text, CPU)) == may


sizes = st.integers(0, 7)


@given(
    L=sizes,
    S=sizes,
    causal=st.sampled_from([None, "top_left", "bottom_right"]),
    window=st.none() | st.integers(1, 5),
    length=st.none() | st.integers(0, 7),
    mask=st.sampled_from([None, "1x1xLxS", "1x1x1xS", "Bx1xLx1"]),
)
def test_rows_without_keys_are_foreseen(
    L: int, S: int, causal: str | None, window: int | None, length: int | None, mask: str | None
) -> None:
    lengths = None if length is None or length > S else (length,)
    w = Workload(H=1, L=L, S=S, D=4, dtype="fp32", causal=causal, window=window, lengths=lengths, mask=mask)
    visible = make_inputs(w, CPU).visible()
    dead = L > 0 and (S == 0 or (visible is not None and not visible.expand(1, 1, L, S).any(-1).all()))
    if mask is None:
        assert may_hide_whole_rows(w) == dead
    else:
        assert may_hide_whole_rows(w) or not dead


# --- naive_compiled ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "has", "reason"),
    [
        (CPU, {"which"}, "torch.compile needs a C++ compiler, and there is no "),
        (H100, {"which"}, "torch.compile needs a C compiler, and there is no "),
        (H100, {"find_spec"}, "torch.compile needs Triton on a GPU, and package triton is not installed"),
    ],
)
def test_a_missing_compiler_is_a_reason(
    device: Device, has: set[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common.shutil, "which", lambda name: None if "which" in has else f"/{name}")
    monkeypatch.setattr(common, "find_spec", lambda name: None if "find_spec" in has else object())
    assert any(found.startswith(reason) for found in reasons("naive_compiled", str(BLOG), device))


def test_a_compiler_that_fails_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> object:
        from torch._dynamo.exc import Unsupported

        raise Unsupported("first line\nlast line")

    monkeypatch.setattr(naive, "_compiled", lambda *args, **kwargs: broken)
    with pytest.raises(PrepareFailed, match=r"naive_compiled: torch.compile failed\n(?s:.)*last line"):
        find("naive_compiled").prepare(BLOG, CPU)


@pytest.mark.slow
def test_naive_compiled_says_when_inductor_finds_attention() -> None:
    workload = Workload.parse("B1,H4,L64,D32,fp32")
    prepared, (inputs, truth) = find("naive_compiled").prepare(workload, CPU), problem(workload, CPU)
    assert find("naive_compiled").ran(names_that_ran(prepared, inputs, "forward", CPU)) in (None, "sdpa_flash")
    run_case(find("naive_compiled"), inputs, truth, CPU)


def test_each_workload_is_compiled_under_a_code_object_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for L in range(2, 13):  # dynamo gives up on one code object after eight
        workload = Workload.parse(f"B1,H1,L{L},D8,fp32,causal")
        prepared = find("naive_compiled").prepare(workload, CPU)
        assert prepared.forward(make_inputs(workload, CPU)).out.shape == (1, 1, L, 8)
        assert find("naive_compiled").prepare(workload, CPU).attend_no_grad is prepared.attend_no_grad
    naive._compiled.cache_clear()


# --- SDPA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "is_causal", "mask"),
    [
        ("B1,H2,L8,D16,fp32", False, False),
        ("B1,H2,L8,S9,D16,fp32,causal", True, False),
        ("B1,H2,L8,D16,fp32,causal=bottom_right", True, False),
        ("B1,H2,L8,S9,D16,fp32,causal=bottom_right", False, True),
        ("B2,H2,L8,D16,fp32,causal=bottom_right,lengths=8/5", False, True),
        ("B1,H2,L8,D16,fp32,causal,mask=bool", False, True),
        ("B1,H2,L8,D16,fp32,window=2", False, True),
        ("H2,D16,fp32,packed=3/5", False, True),
    ],
)
def test_is_causal_is_passed_where_it_says_it_all(text: str, is_causal: bool, mask: bool) -> None:
    workload = Workload.parse(text)
    assert (sdpa.uses_is_causal(workload), sdpa.needs_mask(workload)) == (is_causal, mask)
    prepared = find("sdpa_math").prepare(workload, CPU)
    assert (prepared.attn_mask(make_inputs(workload, CPU)) is not None) == mask


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("mask=bool,causal", torch.bool), ("alibi", torch.bfloat16), ("bias=fp32,causal", torch.bfloat16)],
)
def test_a_mask_that_only_hides_is_bool_else_additive_in_the_inputs_dtype(text: str, dtype: torch.dtype) -> None:
    workload = Workload.parse(f"B1,H2,L8,D16,bf16,{text}")
    assert find("sdpa_math").prepare(workload, CPU).attn_mask(make_inputs(workload, CPU)).dtype == dtype


def test_a_mask_is_made_once_per_inputs_and_let_go_with_them() -> None:
    workload = Workload.parse("B1,H2,L8,D16,fp32,mask=bool,alibi")
    prepared, inputs, others = (
        find("sdpa_math").prepare(workload, CPU),
        make_inputs(workload, CPU),
        make_inputs(workload, CPU, 1),
    )
    mask = prepared.attn_mask(inputs)
    assert prepared.attn_mask(others) is not mask
    assert prepared.attn_mask(inputs) is mask
    gone = weakref.ref(inputs)
    del inputs
    gc.collect()
    assert gone() is None
    assert len(prepared.attn_mask._kept) == 1


def test_per_inputs_never_takes_one_inputs_for_another() -> None:
    made = PerInputs(lambda inputs: inputs.seed)
    for seed in range(50):  # each may get the address of the one before
        assert made(make_inputs(BLOG, CPU, seed)) == seed


@pytest.mark.parametrize(
    ("name", "text", "direction", "reason"),
    [
        ("sdpa_flash", "B1,H2,L64,D64,fp32", "forward", "takes bf16 or fp16 on a GPU, not fp32"),
        ("sdpa_flash", "B1,H2,L64,D512,bf16", "forward", "takes D up to 256 on a GPU, not 512"),
        (
            "sdpa_flash",
            "B1,H2,L64,D64,bf16,causal,window=8",
            "forward",
            "takes no attn_mask on a GPU, which a sliding window needs",
        ),
        (
            "sdpa_flash",
            "B1,H2,L64,S65,D64,bf16,causal",
            "forward",
            "takes is_causal on a GPU only where L = S, not L = 64, S = 65",
        ),
        (
            "sdpa_flash",
            "B1,H2,L64,S65,D64,bf16,causal=bottom_right",
            "forward",
            "takes no attn_mask on a GPU, which a causal mask aligned to the bottom right needs",
        ),
        (
            "sdpa_flash",
            "B1,H2,L64,D64,bf16,scale=-1",
            "forward",
            "masks and takes the row's maximum before it scales, so it needs a scale above 0, not -1",
        ),
        ("sdpa_flash", "B70000,H2,L64,D64,bf16", "forward", "takes B and H up to 65535, not 70000"),
        ("sdpa_flash", "B0,H2,L64,D64,bf16", "forward", "takes no empty batch"),
        ("sdpa_efficient", "B1,H2,L64,D36,bf16", "forward", "needs D to be a multiple of 8 for bf16, not 36"),
        ("sdpa_efficient", "B1,H2,L64,D36,Dv38,fp32", "forward", "needs D_v to be a multiple of 4 for fp32, not 38"),
        (
            "sdpa_efficient",
            "B1,H2,L73728,D64,bf16,mask=bool:1x1xLxS",
            "forward",
            "indexes its mask with 32 bits: L * S must stay below 2**32, not 5435817984",
        ),
        (
            "sdpa_efficient",
            "B1,H2,L0,S4,D64,bf16",
            "forward",
            "takes no empty sequences, this workload has L = 0, S = 4",
        ),
        ("sdpa_cudnn", "B1,H2,L64,D36,bf16", "forward", "needs D to be a multiple of 8, not 36"),
        ("sdpa_cudnn", "B1,H2,L64,S1,D64,bf16", "forward", "takes S of 2 or more, not 1"),
        (
            "sdpa_cudnn",
            "B2,H2,L64,D64,bf16,lengths=64/0",
            "forward",
            "masks with a finite number, so a row that sees no key (which this workload may have) is not 0",
        ),
        ("sdpa_cudnn", "B1,H2,L64,D64,bf16,bias=bf16", "backward", "gives no gradient for the bias"),
    ],
)
def test_reasons_on_a_gpu(name: str, text: str, direction: str, reason: str) -> None:
    assert reasons(name, text, direction=direction) == [reason]


def test_reasons_on_old_cards() -> None:
    assert reasons("sdpa_efficient", "B1,H2,L64,D64,bf16", T4) == [
        "takes bf16 from compute capability 8.0 on, which Tesla T4 is below"
    ]
    assert reasons("sdpa_flash", "B1,H2,L64,D64,fp16", T4) == [
        "needs compute capability 8.0 or newer, Tesla T4 has 7.5"
    ]


def test_dropout_is_drawn_where_the_kernel_draws_any() -> None:
    text = "B1,H2,L8,D16,fp32,dropout=0.5"
    assert reasons("sdpa_math", text, CPU) == reasons("sdpa_auto", text, CPU) == []
    (flash,) = reasons("sdpa_flash", text, CPU)
    assert flash.endswith("does not take dropout here")
    assert "does not support a given dropout mask" in reasons("sdpa_cudnn", text)


def test_cudnn_is_refused_where_only_deterministic_algorithms_may_run() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert "is not deterministic, and torch.use_deterministic_algorithms is on" in reasons(
            "sdpa_cudnn", "B1,H2,L64,D64,bf16"
        )
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("text", ["scale=-0.3,causal", "scale=0.0,causal"])
def test_the_causal_cpu_kernel_is_refused_where_it_makes_nan(text: str) -> None:
    assert reasons("sdpa_flash", f"B1,H2,L64,D16,fp32,{text}", CPU)
    assert not reasons("sdpa_math", f"B1,H2,L64,D16,fp32,{text}", CPU)


@pytest.mark.parametrize(
    ("hurdle", "text", "direction", "says"),
    [
        (
            lambda w, d: w.group == 1,
            "B1,H4/2,L64,D64,bf16",
            "forward",
            "does not take grouped-query heads (enable_gqa) here, H4/2",
        ),
        (lambda w, d: d == "forward", "B1,H4,L64,D256,bf16", "backward", "has no backward of this kernel here"),
        (lambda w, d: w.D <= 128, "B1,H4,L64,D192,Dv128,bf16", "forward", "does not take D = 192, D_v = 128 here"),
        (
            lambda w, d: w.mask is None,
            "B1,H4,L64,D64,bf16,mask=bool",
            "forward",
            "does not take the attn_mask here that a bool mask needs",
        ),
        (lambda w, d: False, "B1,H4,L64,D64,bf16", "forward", "PyTorch's own selection refuses these tensors"),
        (lambda w, d: True, "B1,H4,L64,D64,bf16", "forward", None),
    ],
)
def test_pytorchs_refusal_is_traced_to_its_cause(
    hurdle: object, text: str, direction: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "_selection", lambda backend, device: hurdle)
    found = reasons("sdpa_cudnn", text, direction=direction)
    assert (says is None) == (found == [])
    assert says is None or (len(found) == 1 and found[0].endswith(says))


def test_pytorch_is_asked_on_a_cpu() -> None:
    accepts = sdpa._selection("FLASH_ATTENTION", CPU)
    assert accepts is not None
    assert accepts(Workload.parse("B2,H4/2,L64,S65,D80,bf16,mask=bool:1x1x1xS"), "backward")
    assert not accepts(Workload.parse("B2,H4,L64,D64,Dv32,fp32"), "forward")
    assert not accepts(Workload.parse("B1,H2,L8,D16,fp32,bias=fp32"), "backward")


@pytest.mark.parametrize(
    ("names", "ran"),
    [
        (["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64"], "sdpa_cudnn"),
        (["void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>"], "sdpa_flash"),
        (["fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)"], "sdpa_efficient"),
        (["aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"], "sdpa_flash"),
        (["sgemm", "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10>"], "sdpa_math"),
        (["Memset (Device)"], None),
    ],
)
def test_sdpa_auto_says_what_pytorch_took(names: list[str], ran: str | None) -> None:
    assert find("sdpa_auto").ran(names) == ran
    assert fused_implementation(names) == (None if ran == "sdpa_math" else ran)


@pytest.mark.parametrize(
    ("text", "ran"), [("B1,H2,L64,D32,fp32,causal", "sdpa_flash"), ("B1,H2,L64,D32,Dv16,fp32", "sdpa_math")]
)
def test_sdpa_auto_on_a_cpu(text: str, ran: str) -> None:
    for direction in ("forward", "backward"):
        assert find("sdpa_auto").ran(ops("sdpa_auto", text, direction)) == ran


def test_the_pin_leaves_pytorchs_settings_as_they_were() -> None:
    ask = torch.backends.cuda
    before = (ask.flash_sdp_enabled(), ask.mem_efficient_sdp_enabled(), ask.math_sdp_enabled(), ask.cudnn_sdp_enabled())
    find("sdpa_flash").prepare(BLOG, CPU).forward(make_inputs(BLOG, CPU))
    reasons("sdpa_flash", str(BLOG), CPU)
    after = (ask.flash_sdp_enabled(), ask.mem_efficient_sdp_enabled(), ask.math_sdp_enabled(), ask.cudnn_sdp_enabled())
    assert before == after


@pytest.mark.gpu
@pytest.mark.parametrize(
    "text", ["B2,H4,L128,D64,bf16,causal", "B2,H4/2,L128,D64,bf16", "B2,H4,L128,D64,fp32", "B2,H4,L64,S128,D64,bf16"]
)
def test_sdpa_auto_takes_what_gives_no_reason(text: str, gpu: Device) -> None:
    workload = Workload.parse(text)
    prepared, inputs = find("sdpa_auto").prepare(workload, gpu), make_inputs(workload, gpu)
    ran = find("sdpa_auto").ran(names_that_ran(prepared, inputs, "forward", gpu))
    assert ran is not None
    assert find(ran).reasons_unsupported(workload, gpu) == []
