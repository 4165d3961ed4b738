"""Implementations that call another library: what they pass it is right, and what is missing or broken is a sentence.

No such library is installed here. Stand-ins with its signatures, layouts and quirks compute in float64
(tests/stand_ins), so that everything around the call goes through the project's own check.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from attnscope.checking import ReferenceCache, check_implementation
from attnscope.device import Device, find_device
from attnscope.errors import PrepareFailed, first_line
from attnscope.implementation import FEATURE_SENTENCES, FEATURES, Implementation, find, module_is_there
from attnscope.implementations.heads_last import addressable, anchor_reason
from attnscope.implementations.library import Library
from attnscope.inputs import make_inputs
from attnscope.workload import DIRECTIONS, Workload
from test_contract import FEATURE_CASES

STAND_INS = Path(__file__).parent / "stand_ins"
CPU = find_device("cpu")
H200 = Device("cuda", "NVIDIA H200", capability=(9, 0))
B200 = Device("cuda", "NVIDIA B200", capability=(10, 0))
A100 = Device("cuda", "NVIDIA A100", capability=(8, 0))
FOLDERS = {
    "flash_attn_2": ("flash_attn", "flash_attn_2"),
    "flash_attn_3": ("flash_attn_interface", "flash_attn_3"),
    "flash_attn_4": ("flash_attn", "flash_attn_4"),
    "xformers": ("xformers", "xformers"),
    "sage": ("sageattention", "sageattention"),
}
FLASH = [
    "B2,H4,L65,D32,bf16,causal",
    "B2,H4/2,L33,S70,D32,fp16,causal=bottom_right,layout=blhd",
    "B1,H2,L70,S33,D32,bf16,causal=bottom_right",
    "B2,H4,L64,D32,bf16,layout=qkv,scale=0.3",
    "B1,H2,L65,D32,bf16,window=9,causal",
    "B1,H2,L65,D32,bf16,window=9",
    "B1,H2,L65,S70,D32,bf16,window=9,causal=bottom_right",
    "H4/2,D32,bf16,causal,packed=30/21/0/51",
    "H2,D32,bf16,packed=30/21,window=7",
    "B3,H2,L33,S64,D32,bf16,lengths=64/7/0",
    "B2,H4/2,L33,S64,D32,bf16,causal=bottom_right,lengths=64/12",
]
SOFTCAP = ["B2,H2,L65,D32,bf16,causal,softcap=2.5", "H2,D32,fp16,packed=30/21,softcap=2.5,scale=0.5"]
CASES = {
    "flash_attn_2": [
        *FLASH,
        *SOFTCAP,
        "B1,H3,L33,D20,bf16",
        "B2,H4/2,L65,D32,bf16,causal,dropout=0.2",
        "H2,D32,fp16,packed=40/25,dropout=0.5",
        "B2,H6,L65,D32,bf16,alibi",
        "B2,H6,L65,D32,bf16,alibi,causal",
        "B2,H6/2,L33,S65,D32,bf16,alibi,causal=bottom_right",
        "B2,H4,L65,D32,bf16,alibi,causal,window=9",
        "B2,H4,L65,D32,bf16,alibi,causal,window=900",
        "H4,D32,bf16,packed=30/21/14,alibi,causal",
        "B2,H4,L33,S65,D32,bf16,alibi,causal=bottom_right,lengths=65/40",
    ],
    "flash_attn_3": [*FLASH[::2], *SOFTCAP],
    "flash_attn_4": [
        *FLASH,
        *SOFTCAP,
        "B2,H4,L65,D32,Dv16,bf16,causal",
        "B2,H4/2,L65,D32,bf16,sinks,causal",
        "H4/2,D32,bf16,packed=30/21,sinks",
        "B2,H2,L33,S65,D32,bf16,sinks,lengths=65/0,causal=bottom_right",
    ],
    "varlen": FLASH,
    "xformers": [
        *(text for text in FLASH if text not in ("H2,D32,bf16,packed=30/21,window=7", FLASH[-1])),
        "B2,H4/2,L12,S64,D32,bf16,causal=bottom_right,lengths=64/12",
        "B2,H2,L33,S65,D32,bf16,causal",
        "B2,H2,L33,S65,D32,Dv16,fp32,causal",
        "H2,D32,bf16,causal,packed=30/21,window=7",
        "B2,H2,L12,S64,D32,bf16,causal=bottom_right,lengths=64/12,window=5",
        "B2,H2,L33,S65,D32,bf16,mask=bool",
        "B2,H2,L65,D32,bf16,bias=bf16,dropout=0.2",
        "B2,H2,L33,S65,D32,bf16,bias=bf16:BxHxLxS",
        "B2,H2,L33,S65,D32,fp32,bias=fp32:1xHx1xS,mask=bool,causal",
        "B2,H2,L33,D32,bf16,bias=fp32:Bx1xLx1,causal,lengths=33/20",
        "B2,H2,L33,D32,bf16,mask=bool:Bx1x1xS,window=9,causal",
    ],
    "sage": [
        "B2,H4,L128,D64,bf16,causal",
        "B2,H4/2,L65,D64,fp16,causal,layout=blhd",
        "B1,H2,L1,S128,D128,bf16,scale=0.2",
        "B1,H2,L33,S64,D96,fp32",
        "H4/2,D64,bf16,causal,packed=65/128",
        "H2,D128,bf16,packed=64/128",
    ],
}
ALL_CASES = [  # half of them in a bare pytest, all in make test
    pytest.param(name, text, marks=pytest.mark.slow if number % 2 else ())
    for name, texts in CASES.items()
    for number, text in enumerate(texts)
]
FLEX_CASES = [
    "B2,H6,L33,S64,D32,fp32,causal=bottom_right,lengths=64/20,alibi,softcap=2.5",
    "B2,H4,L65,D32,fp32,causal",
    "B2,H4/2,L65,S129,D32,Dv16,bf16,causal=bottom_right",
    "B1,H2,L129,S65,D32,fp32,causal=bottom_right,window=9",
    "B1,H2,L65,S129,D32,fp32,window=9",
    "B3,H2,L65,S64,D32,fp32,lengths=64/7/0,causal",
    "H2,D32,fp32,causal,packed=30/21/0/51,alibi",
    "B1,H3,L33,D7,fp16,scale=0.3,layout=qkv",
    "B2,H4,L33,D32,fp32,layout=blhd,softcap=2.5,alibi",
]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    """Puts a stand-in where its library would be; all of it is gone afterwards."""
    tops = {"attention64", *(top for top, _ in FOLDERS.values())}

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] in tops]:
            del sys.modules[name]

    def put(*names: str) -> None:
        forget()
        monkeypatch.syspath_prepend(STAND_INS / "common")
        for name in names:
            if name == "varlen":
                monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
            else:
                monkeypatch.syspath_prepend(STAND_INS / FOLDERS[name][1])

    yield put
    forget()
    importlib.invalidate_caches()


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """torch 2.13's, in float64; a row that sees no key has lse +inf, as FlashAttention-2 has it."""
    from attention64 import attend64, band, by_sequence, must_be_readable

    must_be_readable(query, key, value)
    assert query.dim() == key.dim() == value.dim() == 3
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max())) == (max_q, max_k)

    def one(q, k, v):
        return attend64(q, k, v, scale, band(q.shape[1], k.shape[1], *window_size, q.device))

    out, lse = by_sequence(one, query, key, value, cu_seq_q, cu_seq_k)
    return out, torch.where(torch.isneginf(lse), torch.inf, lse).float()


def reasons(name: str, text: str, direction: str = "forward", device: Device = H200) -> list[str]:
    return find(name).reasons_unsupported(Workload.parse(text), device, direction)


def checked(implementation: Implementation, text: str, directions: tuple[str, ...]):
    workload = Workload.parse(text)
    prepared = implementation.prepare(workload, CPU)
    return check_implementation(
        implementation, workload, CPU, directions=directions, kinds=("needles",), prepared=prepared,
        cache=ReferenceCache(),
    )  # fmt: skip


@pytest.mark.parametrize(("name", "text"), ALL_CASES)
def test_what_is_passed_to_the_library_gives_the_truth(name, text, stand_in):
    stand_in(name)
    directions = tuple(d for d in DIRECTIONS if not reasons(name, text, d))
    assert "forward" in directions, reasons(name, text)
    result = checked(find(name), text, directions)
    assert result.passed, result.message
    assert result.grade == ("approximate" if name == "sage" else "tight"), result.message


@pytest.mark.parametrize("name", [*FOLDERS, "varlen"])
def test_strided_and_expanded_tensors_arrive_readable(name, stand_in):
    stand_in(name)
    workload = Workload.parse("B2,H4,L128,D64,bf16,causal")
    inputs = make_inputs(workload, CPU)
    expected = find("sdpa_math").prepare(workload, CPU).forward(inputs).out
    wide = [torch.stack([t, t], -1)[..., 0] for t in (inputs.q, inputs.k, inputs.v)]
    inputs.q, inputs.k, inputs.v = wide
    inputs.grad_out = inputs.grad_out[..., :1, :1].expand_as(inputs.grad_out)
    keys = inputs.k.clone()
    prepared = find(name).prepare(workload, CPU)
    output = prepared.forward(inputs, save=name != "sage")
    torch.testing.assert_close(output.out, expected, atol=2e-2, rtol=2e-2)
    assert torch.equal(inputs.k, keys)
    if name != "sage":
        assert prepared.backward(inputs, output.saved).dq.shape == inputs.q.shape


def test_addressable_copies_only_what_must_be_copied():
    tensor = torch.zeros(2, 3, 4)
    assert addressable(tensor.transpose(0, 1)).data_ptr() == tensor.data_ptr()
    assert addressable(tensor.transpose(1, 2)).stride(-1) == 1
    assert addressable(tensor[:, :1].expand(2, 3, 4)).is_contiguous()


# --- reasons ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("flash_attn_2", "flash-attn"),
        ("flash_attn_3", "flash-attn-3"),
        ("flash_attn_4", "flash-attn-4"),
        ("xformers", "xformers"),
        ("sage", "sageattention"),
    ],
)
def test_what_is_not_installed_is_a_reason(name, package):
    found = reasons(name, "B2,H4,L128,D64,bf16,causal")
    assert f"package {package} is not installed (pip install {package})" in found


CAUSAL_CROSS = "B1,H4,L64,S128,D64,bf16,causal"


@pytest.mark.parametrize(
    ("name", "text", "direction", "device", "reason"),
    [
        *(
            (name, CAUSAL_CROSS, "forward", H200, "and a causal mask aligned to the top left from the first")
            for name in ("flash_attn_2", "flash_attn_3", "flash_attn_4", "varlen")
        ),
        ("flash_attn_2", "B1,H4,L64,S128,D64,bf16,alibi", "forward", H200, "and ALiBi aligned to the top left"),
        ("flash_attn_4", "B2,H4,L64,D64,bf16,window=8,lengths=64/9", "forward", H200, "not 64 rows and 9/64 keys"),
        ("flash_attn_2", "B0,H4,L64,D64,bf16", "forward", H200, "takes no empty batch or sequences"),
        ("flash_attn_3", "B1,H4,L64,D64,bf16,scale=-1", "forward", H200, "needs a scale above 0, not -1"),
        ("flash_attn_3", "B1,H4,L64,D64,bf16", "forward", B200, "is built for compute capability 9.0"),
        ("flash_attn_3", "B1,H4,L64,D64,bf16", "forward", A100, "needs compute capability 9.0 or newer"),
        ("flash_attn_3", "B1,H4,L64,D64,bf16,alibi", "forward", H200, "does not support ALiBi"),
        ("flash_attn_4", "B1,H4,L64,D64,bf16", "backward", A100, "has a backward from compute capability 9.0 on"),
        ("flash_attn_4", "B1,H4,L64,D192,bf16", "forward", B200, "takes D and D_v up to 128, or 192 and 128"),
        ("flash_attn_4", "B1,H4/2,L64,D64,Dv32,bf16", "backward", H200, "has no backward for grouped-query heads"),
        ("flash_attn_4", "B1,H4,L64,D36,bf16", "forward", H200, "needs D to be a multiple of 8, not 36"),
        ("varlen", "B1,H4,L64,D64,bf16,softcap=2.0", "forward", H200, "does not support a softcap"),
        ("xformers", "B1,H4/2,L64,D64,bf16", "backward", H200, "has no backward with grouped-query heads"),
        ("xformers", "B1,H4/2,L64,D64,fp32", "forward", H200, "which do not take fp32"),
        ("xformers", "B1,H4,L64,D36,bf16", "forward", H200, "needs D to be a multiple of 8 for bf16, not 36"),
        ("xformers", "H4,D64,bf16,packed=9/8,window=3", "forward", H200, "has no window to both sides for sequences"),
        (
            "xformers",
            "B1,H4,L64,S70,D64,bf16,window=3,causal",
            "forward",
            H200,
            "so it needs L = S, not L = 64, S = 70",
        ),
        (
            "xformers",
            "B1,H4,L64,D64,fp32,window=3",
            "forward",
            H200,
            "in its FlashAttention kernels, which do not take",
        ),
        ("xformers", "B1,H4,L64,D64,fp32,window=3,causal", "backward", H200, "no backward of a causal window"),
        ("xformers", "B1,H4,L64,S9,D64,fp32,causal=bottom_right", "forward", H200, "not known to be 0 on rows"),
        ("xformers", "B2,H4,L64,D64,bf16,causal=bottom_right,lengths=64/9", "forward", H200, "key lengths, not 9"),
        ("xformers", "B2,H4,L64,D64,bf16,causal,lengths=64/9,window=5", "forward", H200, "aligned to the top left for"),
        ("xformers", "B1,H4,L64,D64,fp32", "forward", B200, "computes fp32 by CUTLASS, up to compute capability 9.0"),
        ("sage", "B1,H4,L64,D80,bf16", "forward", H200, "takes D of 64, 96, 128, not 80"),
        ("sage", "H4,D96,bf16,packed=64/64", "forward", H200, "takes D of 64, 128 for packed sequences, not 96"),
        ("sage", CAUSAL_CROSS, "forward", H200, "takes a causal mask only where L = S"),
        ("sage", "B1,H4,L65,D64,bf16", "forward", H200, "counts keys past the end"),
        ("sage", "B1,H4,L64,D64,bf16,causal", "forward", H200, "reads past its quantisation scales"),
        ("sage", "B1,H4,L128,D64,bf16,scale=0.0", "forward", H200, "divides by its scale"),
        ("sage", "B1,H4,L128,D64,bf16", "backward", H200, "has no backward"),
        ("flex", "B1,H4,L64,D8,bf16", "forward", H200, "takes D from 16 on, not 8"),
        ("flex", "B1,H6/2,L64,D64,bf16", "forward", H200, "takes a power of 2 query heads a key/value head below 128"),
        ("flex", "B1,H4,L64,D64,fp32", "backward", CPU, "has no backward on a CPU"),
        ("flex", "B1,H4,L0,D64,fp32", "forward", CPU, "takes no empty batch or sequences"),
    ],
)
def test_reasons(name, text, direction, device, reason):
    found = reasons(name, text, direction, device)
    assert any(reason in sentence for sentence in found), found


def test_where_both_alignments_are_one_there_is_no_reason():
    for text in (
        "B2,H2,L8,D8,causal",
        "B2,H2,L8,S9,D8,causal=bottom_right,window=2",
        "H2,D8,packed=3/5,window=2,alibi",
    ):
        assert anchor_reason(Workload.parse(text)) is None
    assert anchor_reason(Workload.parse("B2,H2,L8,S9,D8,window=2")) is not None


@pytest.mark.parametrize("parameter", ["enable_gqa", "scale"])
def test_an_older_varlen_attn_is_a_reason(parameter, monkeypatch):
    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, window_size=(-1, -1)):
        raise AssertionError

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    text = {"enable_gqa": "B1,H4/2,L64,D64,bf16", "scale": "B1,H4,L64,D64,bf16,scale=0.5"}[parameter]
    assert any(f"whose varlen_attn has no {parameter}" in sentence for sentence in reasons("varlen", text))
    assert reasons("varlen", "B1,H4,L64,D64,bf16,causal") == []


# --- libraries that are broken ----------------------------------------------------------------------------------------


MODULES = {  # implementation -> (file that is imported, a text that imports and lacks what is called)
    "flash_attn_2": ("flash_attn/flash_attn_interface.py", "flash_attn_func = None"),
    "flash_attn_3": ("flash_attn_interface.py", "flash_attn_func = None"),
    "flash_attn_4": ("flash_attn/cute.py", "flash_attn_func = None"),
    "xformers": ("xformers/ops/fmha.py", ""),
    "sage": ("sageattention/__init__.py", "sageattn = None"),
}
BROKEN = {
    "import error": (
        "raise ImportError('libc10.so: no such file\\nsecond line')",
        "ImportError: libc10.so: no such file",
    ),
    "wrong CUDA": (
        "raise OSError('libcudart.so.12: cannot open\\n  second line')",
        "OSError: libcudart.so.12: cannot open",
    ),
    "missing symbol": ("raise ImportError('undefined symbol: _ZN3c10')", "ImportError: undefined symbol: _ZN3c10"),
    "it ends the process": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "it is another's": (None, " has no "),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("name", MODULES)
def test_a_broken_install_is_the_first_line_of_its_cause(name, how, tmp_path, stand_in, monkeypatch):
    stand_in()
    file, lacking = MODULES[name]
    text, cause = BROKEN[how]
    target = tmp_path / file
    target.parent.mkdir(parents=True, exist_ok=True)
    for folder in target.parents:
        if folder in (tmp_path, *tmp_path.parents):
            break
        (folder / "__init__.py").touch()
    target.write_text(text or lacking)
    monkeypatch.syspath_prepend(tmp_path)
    workload = "B2,H4,L128,D64,bf16,causal"
    assert reasons(name, workload) == [], "a reason imports nothing"
    with pytest.raises(PrepareFailed) as caught:
        find(name).prepare(Workload.parse(workload), CPU)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"{name}: package ") and cause in first and "second line" not in first


def test_an_extension_of_xformers_that_does_not_load_is_said(stand_in, monkeypatch):
    stand_in("xformers")
    broken = RuntimeError("xFormers can't load C++/CUDA extensions.")
    broken.__cause__ = OSError("libcudart.so.12: cannot open shared object file: No such file or directory")
    cpp_lib = importlib.import_module("xformers._cpp_lib")
    monkeypatch.setattr(cpp_lib, "_cpp_library_load_exception", broken)
    with pytest.raises(PrepareFailed, match=r"its extension does not load: OSError: libcudart\.so\.12"):
        find("xformers").prepare(Workload.parse("B2,H4,L128,D64,bf16,causal"), CPU)


def test_xformers_is_not_misled_by_the_flash_attn_of_version_4(stand_in):
    stand_in("xformers", "flash_attn_4")
    four = importlib.import_module("flash_attn.cute")
    assert checked(find("xformers"), "B2,H4,L65,D32,bf16,causal", ("forward",)).passed
    assert sys.modules["flash_attn.cute"] is four, "what was imported before is as it was"
    assert find("flash_attn_4").prepare(Workload.parse("B2,H4,L65,D32,bf16"), CPU).library is four


def test_flash_attn_4_alone_is_not_taken_for_flash_attn_2(stand_in):
    stand_in("flash_attn_4")
    assert module_is_there("flash_attn.cute") and not module_is_there("flash_attn.flash_attn_interface")
    assert any("package flash-attn is not installed" in reason for reason in reasons("flash_attn_2", CAUSAL_CROSS))
    assert "flash_attn" not in sys.modules, "asking imports nothing"


def test_a_flash_attn_3_that_gives_no_lse_is_too_old(stand_in, monkeypatch):
    stand_in("flash_attn_3")
    module = importlib.import_module("flash_attn_interface")
    monkeypatch.setattr(module, "flash_attn_func", lambda q, k, v, softmax_scale=None, causal=False: None)
    with pytest.raises(PrepareFailed, match="is too old"):
        find("flash_attn_3").prepare(Workload.parse("B2,H4,L65,D32,bf16"), CPU)


def test_the_first_line_of_an_error_without_words_is_its_name():
    assert first_line(RuntimeError()) == "RuntimeError"
    assert Library("no-such-thing", "no_such_thing", ()).version() is None


# --- flex -------------------------------------------------------------------------------------------------------------


def compiled_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo traces as ever; what it found runs op by op, so that nothing is built by a C++ compiler."""
    from torch._dynamo import lookup_backend

    from attnscope.implementations import flex

    monkeypatch.setattr("torch._dynamo.lookup_backend", lambda name: lookup_backend("eager"))
    flex._compiled.cache_clear()


@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=pytest.mark.slow if text != FLEX_CASES[0] else ()) for text in FLEX_CASES]
)
def test_flex_masks_and_scores_are_the_workloads(text, monkeypatch):
    compiled_eagerly(monkeypatch)
    result = checked(find("flex"), text, ("forward",))
    assert result.passed and result.grade == "tight", result.message


@pytest.mark.parametrize("feature", [word for word in FEATURES if word not in find("flex").sheet.features])
def test_flex_refuses_what_it_does_not_claim(feature):
    for direction in DIRECTIONS:
        found = reasons("flex", FEATURE_CASES[feature], direction)
        assert any(FEATURE_SENTENCES[feature] in reason for reason in found)


def test_flex_builds_its_block_mask_in_prepare_and_compiles_once(monkeypatch):
    compiled_eagerly(monkeypatch)
    workload = Workload.parse("B2,H4,L65,D32,fp32,causal")
    prepared = find("flex").prepare(workload, CPU)
    assert prepared.block_mask is not None and prepared.block_mask_s > 0
    assert (prepared.compilations, prepared.recompiles) == (1, 0)
    for seed in range(3):
        prepared.forward(make_inputs(workload, CPU, seed))
    assert prepared.recompiles == 0
    inputs = make_inputs(workload, CPU)
    inputs.q = torch.stack([inputs.q, inputs.q], -1)[..., 0]
    prepared.forward(inputs)
    assert prepared.recompiles == 1, "other strides are another kernel, and that is counted"
    built, again = prepared.remarks()
    assert re.fullmatch(r"its BlockMask took [\d.e+]+ ms to build, in prepare, not in the call", built), built
    assert again == "was compiled again after prepare (1 times): a call may have waited for it"
    assert find("flex").prepare(Workload.parse("B2,H4,L65,D32,fp32"), CPU).block_mask is None


@pytest.mark.long
def test_flex_compiled_for_the_cpu_is_right():
    result = checked(find("flex"), "B2,H4/2,L65,D32,bf16,causal,softcap=2.5", ("forward",))
    assert result.passed and result.grade == "tight", result.message
