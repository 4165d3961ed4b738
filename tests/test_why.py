"""``why``: against what really ran on a CPU; that all reasons are told; bad input ends in a sentence; the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner, Result

import attnscope
from attnscope import selecting
from attnscope.cli import app
from attnscope.device import loaded_library_path
from attnscope.errors import UnknownImplementation, UsageError
from attnscope.implementation import names
from attnscope.rulebook import Rulebook
from attnscope.sdpa_call import workload_of
from attnscope.sdpa_facts import facts_of_call, validated
from attnscope.selecting import why_workload
from attnscope.workload import Workload
from random_calls import RandomCall, implementation_of, random_call

CALLS = 100


class Seen(TorchDispatchMode):
    """The ops that reach a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def ran(call: RandomCall) -> str:
    with call.state(), Seen() as seen:
        scaled_dot_product_attention(*call.tensors, **call.options)
    return implementation_of(seen.names)


def plain(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.zeros(shape or (1, 2, 8, 16), dtype=dtype)


def test_why_says_what_really_runs_and_agrees_with_itself_on_a_hundred_random_calls() -> None:
    wrong, taken = [], set()
    for seed in range(CALLS):
        call = random_call(seed, "cpu")
        with call.state():
            why = attnscope.why(*call.tensors, **call.options)
        taken.add(why.taken)
        real = ran(call)
        if why.taken != real or why.disagreements:
            wrong.append(f"{call}: why says {why.taken}, {real} ran; {why.disagreements}")
    assert not wrong, "\n".join(wrong)
    assert taken == {"sdpa_flash", "sdpa_math"}


def test_all_reasons_are_told_not_only_the_first() -> None:
    q = plain(1, 3, 8, 16)
    why = attnscope.why(q, plain(1, 1, 8, 16), plain(1, 1, 8, 24), torch.zeros(3, 8, 8), dropout_p=0.1)
    told = {reason.rule for reason in why.of("sdpa_flash").reasons}
    assert told == {"heads", "head-dims-differ", "mask-shape", "dropout-on-cpu"}
    assert why.taken == "sdpa_math" and all(reason.remedy for reason in why.of("sdpa_flash").reasons)


def test_what_is_for_gpus_alone_is_told_on_a_cpu_what_any_gpu_would_refuse() -> None:
    why = attnscope.why(plain(1, 4, 8, 12, dtype=torch.float64), *[plain(1, 2, 8, 12, dtype=torch.float64)] * 2,
                        enable_gqa=True)  # fmt: skip
    assert {"device", "dtype", "grouped-heads"} <= {reason.rule for reason in why.of("sdpa_efficient").reasons}
    assert {"device", "dtype", "head-dim-multiple"} <= {reason.rule for reason in why.of("sdpa_cudnn").reasons}
    assert not why.disagreements


def test_every_registered_implementation_is_told_about() -> None:
    why = attnscope.why(plain(), plain(), plain())
    expected = {name for name in (*names("all"), *names("ladder")) if name != "sdpa_auto"}
    assert {one.implementation for one in why.implementations} == expected
    assert [one.implementation for one in why.implementations if one.standing == "taken"] == [why.taken]
    assert all(one.reasons for one in why.implementations if one.standing == "refused")
    assert "does not support" in " ".join(r.sentence for r in attnscope.why(
        plain(), plain(), plain(), torch.ones(8, 8, dtype=torch.bool)).of("forward_v1").reasons)  # fmt: skip


def test_a_remedy_of_another_implementation_takes_its_reason_away() -> None:
    why = attnscope.why(plain(), plain(), plain(), is_causal=True)
    reason = next(r for r in why.of("forward_v6").reasons if "fp32" in r.sentence)
    assert reason.remedy == "q, k, v = (t.to(torch.bfloat16) for t in (q, k, v))"
    half = attnscope.why(*[plain(dtype=torch.bfloat16)] * 3, is_causal=True)
    assert not any("bf16" in r.sentence for r in half.of("forward_v6").reasons)


def test_switches_count_and_nothing_left_is_told() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        why = attnscope.why(plain(), plain(), plain())
    assert why.taken == "sdpa_math" and why.of("sdpa_flash").standing == "refused"
    assert [reason.rule for reason in why.of("sdpa_flash").reasons] == ["switched-off"]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        why = attnscope.why(plain(), plain(), plain(), dropout_p=0.5)
    assert why.taken is None and any("PyTorch raises" in note for note in why.notes)
    assert {r.rule for r in why.of("sdpa_flash").reasons} == {"dropout-on-cpu"}
    assert not why.disagreements


def test_a_mask_that_wants_a_gradient_is_seen_even_without_recording() -> None:
    mask = torch.zeros(8, 8, requires_grad=True)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            why = attnscope.why(plain(), plain(), plain(), mask)
        assert why.taken == "sdpa_math" and not why.disagreements
        assert why.direction == ("backward" if grad else "forward")


def test_autocast_is_seen() -> None:
    tensors = [plain(), plain(dtype=torch.bfloat16), plain()]
    with torch.autocast("cpu"), Seen() as seen:
        why = attnscope.why(*tensors)
        scaled_dot_product_attention(*tensors)
    assert why.taken == implementation_of(seen.names) and "bf16" in why.tensors["q"]
    assert any("autocast" in note for note in why.notes)


def test_what_is_said_of_a_mask_with_is_causal_is_true() -> None:
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    mask = torch.rand(8, 8) < 0.5
    mask[:, 0] = True
    why = attnscope.why(q, k, v, mask, is_causal=True)
    said = {name: [fault.sentence for fault in why.of(name).faults] for name in ("sdpa_flash", "sdpa_math")}
    assert said["sdpa_flash"][0].startswith("applies both") and said["sdpa_math"][0].startswith("raises")
    both = scaled_dot_product_attention(q, k, v, mask & torch.ones(8, 8, dtype=torch.bool).tril())
    assert torch.allclose(scaled_dot_product_attention(q, k, v, mask, is_causal=True), both, atol=1e-6)
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match="is_causal"):
        scaled_dot_product_attention(q, k, v, mask, is_causal=True)


@pytest.mark.parametrize(("make", "lengths"), [(causal_upper_left, (4, 8)), (causal_lower_right, (4, 8))])
def test_a_causal_bias_is_taken_apart(make: Any, lengths: tuple[int, int]) -> None:
    low, keys = lengths
    q, k = plain(1, 2, low, 16), plain(1, 2, keys, 16)
    bias = make(low, keys)
    with Seen() as seen:
        scaled_dot_product_attention(q, k, k, bias)
    why = attnscope.why(q, k, k, bias)
    assert why.taken == implementation_of(seen.names) and any("CausalBias" in note for note in why.notes)
    with pytest.raises(UsageError, match="is_causal must be False"):
        attnscope.why(q, k, k, bias, is_causal=True)


def test_a_subclass_is_named() -> None:
    class Mine(torch.Tensor):
        pass

    why = attnscope.why(plain().as_subclass(Mine), plain(), torch.nn.Parameter(plain()))
    assert why.taken == "sdpa_flash" and any("q is a Mine" in note for note in why.notes)
    assert not any("Parameter" in note for note in why.notes)


def test_a_disagreement_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    invented = Rulebook()

    @invented.rule(cpu=("sdpa_flash",))
    def moon(call: Any, name: str) -> tuple[str, None]:
        return "waits for the moon", None

    monkeypatch.setattr(selecting, "REFUSALS", invented)
    why = attnscope.why(plain(), plain(), plain(), dropout_p=0.0)
    assert why.taken == "sdpa_flash"  # PyTorch is the truth
    assert "PyTorch accepts sdpa_flash, and our rules say that it waits for the moon (moon)" in why.disagreements
    assert any("refuses sdpa_cudnn, and our rules know no reason" in line for line in why.disagreements)
    assert any(line.startswith("DISAGREEMENT") for line in str(why).splitlines())
    assert "Disagreement" in why._repr_html_()


def test_rules_on_another_torch_are_marked_unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    why = attnscope.why(plain(), plain(), plain(), dropout_p=0.5)
    reason = why.of("sdpa_flash").reasons[0]
    assert reason.verified is False and "2.13" in reason.verified_with
    assert "unverified with this torch" in " ".join(str(why).split())
    monkeypatch.undo()
    assert "unverified" not in str(attnscope.why(plain(), plain(), plain(), dropout_p=0.5))


# --- bad input --------------------------------------------------------------------------------------------------------

Q = torch.zeros(1, 2, 8, 16)
BAD = [
    ((Q, Q.to("meta"), Q), {}, "one device, got q on cpu, k on meta"),
    ((Q, Q, Q, torch.zeros(8, 8, device="meta")), {}, "one device"),
    ((Q.to("meta"),) * 3, {}, "must lie on cpu or cuda, got meta"),
    ((Q[0, 0, 0], Q, Q), {}, "q must have two dims or more"),
    ((Q, Q, Q, torch.zeros(8)), {}, "attn_mask must have two dims or more"),
    (([1.0], Q, Q), {}, "q must be a torch.Tensor, got list"),
    ((Q, Q.double(), Q), {}, "one floating dtype, got q fp32, k fp64, v fp32"),
    ((Q.int(),) * 3, {}, "one floating dtype"),
    ((Q, Q, Q, torch.zeros(8, 8).double()), {}, "attn_mask must be bool, fp32 or fp32 as q is, got fp64"),
    ((Q, Q[..., :8], Q), {}, "same last dim"),
    ((Q, Q, Q[..., :4, :]), {}, "same number of keys"),
    ((Q.expand(1, 2, 8, 16).repeat(1, 2, 1, 1), Q, Q), {}, "enable_gqa=True"),
    ((Q.repeat(1, 2, 1, 1)[:, :3], Q, Q), {"enable_gqa": True}, "must divide"),
    ((Q.repeat(3, 1, 1, 1), Q.repeat(2, 1, 1, 1), Q), {}, "broadcast"),
    ((Q, Q, Q, torch.zeros(8, 9)), {}, "attn_mask must broadcast to the scores' shape"),
    ((Q, Q, Q), {"dropout_p": 1.5}, r"dropout_p must lie in \[0, 1\]"),
    ((Q, Q, Q), {"scale": float("nan")}, "scale must be a finite number"),
    ((Q, Q, Q), {"is_causal": 1}, "is_causal must be True or False"),
    ((torch.zeros(2, 2).to_sparse(), Q, Q), {}, "dense tensor"),
]


# What PyTorch lets pass: its CPU kernel looks neither at the mask's device nor at whether v has as many keys as k.
ATTNSCOPE_ALONE = (
    "cpu or cuda", "dense", "lie in", "finite number", "True or False", "one device", "same number of keys",
)  # fmt: skip


@pytest.mark.parametrize(("tensors", "options", "sentence"), BAD, ids=range(len(BAD)))
def test_bad_input_ends_in_a_sentence_with_a_hint(tensors: Any, options: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        attnscope.why(*tensors, **options)
    assert "\nhint: " in str(caught.value) or "hint" in str(caught.value)


@pytest.mark.parametrize("number", range(len(BAD)))
def test_what_is_refused_pytorch_refuses_too(number: int) -> None:
    tensors, options, sentence = BAD[number]
    if any(word in sentence for word in ATTNSCOPE_ALONE):
        pytest.skip("PyTorch runs or ignores it")
    with pytest.raises((RuntimeError, IndexError, TypeError)):
        scaled_dot_product_attention(*tensors, **options)


def test_a_nested_tensor_is_refused_by_sentence() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 8, 16)], layout=torch.jagged)
    with pytest.raises(UsageError, match="nested"):
        attnscope.why(nested, nested, nested)


# --- what is made of a call -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "B2,H4/2,L8,S16,D16,Dv8,bf16",
        "H4,L8,D16,fp32,causal,scale=0.5",
        "B2,H4,L8,D16,fp32,layout=blhd",
        "B2,H4,L8,D16,fp16,layout=qkv",
        "B2,H4,L8,D16,fp32,mask=bool:Bx1xLxS",
        "B2,H4,L8,D16,fp32,bias=fp32:1xHxLxS",
        "H2,L8,D16,fp32,dropout=0.25",
    ],
)
def test_a_call_is_the_workload_it_was_made_from(text: str, cpu: Any) -> None:
    from attnscope.sdpa_stand_ins import stand_in_call

    with stand_in_call(Workload.parse(text), cpu, "backward") as (tensors, options, _):
        call = facts_of_call(validated(*tensors, **options), cpu)
    assert workload_of(call) == Workload.parse(text) and call.direction == "backward"


def test_a_workload_is_asked_with_the_mask_that_it_needs(cpu: Any) -> None:
    one = why_workload("B2,H2,L8,D16,fp32,window=3", "cpu")[0]
    assert "mask" in one.tensors and one.call == "B2,H2,L8,D16,fp32,window=3"
    biased = why_workload("B2,H2,L8,D16,fp32,bias=fp32", "cpu", "backward")[0]
    assert biased.taken == "sdpa_math"
    assert {r.rule for r in biased.of("sdpa_flash").reasons} == {"mask-gradient"}
    capped = why_workload("H2,L8,D16,fp32,softcap=30", "cpu")[0]
    assert any("softcap" in note for note in capped.notes)
    assert any("softcap" in r.sentence for r in capped.of("naive_inplace").reasons) or (
        capped.of("naive_inplace").standing == "could run"
    )


def test_the_mapped_cudnn_is_named_by_its_whole_path(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libc.so.6\n"
        "7f02-7f03 r-xp 00000000 08:01 13 /opt/my libs/nvidia/cudnn/lib/libcudnn.so.9\n"
        "7f04-7f05 r-xp 00000000 08:01 14 /other/libcudnn.so.9\n"
        "7f06-7f07 rw-p 00000000 00:00 0 \n"
    )
    assert loaded_library_path("libcudnn.so", maps) == "/opt/my libs/nvidia/cudnn/lib/libcudnn.so.9"
    assert loaded_library_path("libcudnn.so", tmp_path / "none") is None
    assert loaded_library_path("libtorch_cpu") is not None


def test_the_home_folder_stays_out_of_the_record(monkeypatch: pytest.MonkeyPatch, cpu: Any) -> None:
    monkeypatch.setattr(selecting, "loaded_library_path", lambda prefix: f"{Path.home()}/venv/lib/{prefix}.9")
    call = facts_of_call(validated(Q, Q, Q, None, 0.0, False, None, False), cpu)
    assert selecting._cudnn_path(replace(call, cudnn=91900)) == "~/venv/lib/libcudnn.so.9"
    assert selecting._cudnn_path(replace(call, cudnn=None)) is None


# --- the command ------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["why", *arguments])


def test_the_command_fits_eighty_columns_and_names_all() -> None:
    result = command("B2,H8/2,L64,D64,fp32,mask=bool", "--device", "cpu")
    assert result.exit_code == 0 and max(map(len, result.stdout.splitlines())) <= 80
    for wanted in ("PyTorch takes sdpa_flash (forward)", "no cuDNN", "remedy:", "reference_cpu", "forward_v1"):
        assert wanted in result.stdout


def test_json_is_one_document() -> None:
    document = json.loads(command("H2,L8,D16,fp64", "--device", "cpu", "--json").stdout)
    assert document["schema_version"] and len(document["calls"]) == 1
    call = document["calls"][0]
    assert call["taken"] == "sdpa_flash" and call["call"] == "B1,H2,L8,D16,fp64" and call["cudnn"] is None
    reason = next(one for one in call["implementations"] if one["implementation"] == "sdpa_cudnn")["reasons"][0]
    assert set(reason) == {"rule", "sentence", "remedy", "verified_with", "verified", "source"}
    only = json.loads(command("H2,L8,D16,fp64", "--device", "cpu", "--json", "--for", "sdpa_math").stdout)
    assert [one["implementation"] for one in only["calls"][0]["implementations"]] == ["sdpa_math"]


def test_for_shows_one_and_knows_a_misspelling() -> None:
    shown = command("H2,L8,D16,fp32", "--device", "cpu", "--for", "sdpa_flash").stdout
    assert "sdpa_flash: PyTorch takes it" in shown and "naive" not in shown
    result = command("--for", "sdpa_flsh")
    assert isinstance(result.exception, UnknownImplementation) and "did you mean sdpa_flash" in str(result.exception)
    with pytest.raises(UnknownImplementation, match="did you mean sdpa_math"):
        attnscope.why(Q, Q, Q).of("spda_math")


def test_without_a_workload_the_default_ones_are_asked() -> None:
    assert len(json.loads(command("--device", "cpu", "--json").stdout)["calls"]) == 2
    assert isinstance(command("--mode", "sideways", "--device", "cpu").exception, UsageError)


def test_help_needs_no_torch() -> None:
    code = "import sys; from attnscope.cli import app; import attnscope.why_cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
