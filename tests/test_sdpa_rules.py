"""Each rule on the kernels behind SDPA: a call that it speaks of, and one that looks alike and keeps it silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attnscope.device import Device
from attnscope.sdpa_call import FAMILY, FUSED, SdpaCall, TensorFacts
from attnscope.sdpa_faults import FAULTS
from attnscope.sdpa_rules import REFUSALS

H200 = Device("cuda", "NVIDIA H200", capability=(9, 0))
A100, L40 = (Device("cuda", name, capability=c) for name, c in (("NVIDIA A100", (8, 0)), ("NVIDIA L40", (8, 9))))
B200, T4 = (Device("cuda", name, capability=c) for name, c in (("NVIDIA B200", (10, 0)), ("Tesla T4", (7, 5))))
CPU = Device("cpu", "a processor")


def facts(*shape: int, dtype: str = "bf16", **changes: Any) -> TensorFacts:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * size)
    return replace(TensorFacts(shape, tuple(reversed(stride)), dtype), **changes)


def call(
    q: TensorFacts | tuple[int, ...] = (2, 4, 128, 64),
    k: TensorFacts | tuple[int, ...] | None = None,
    v: TensorFacts | tuple[int, ...] | None = None,
    dtype: str = "bf16",
    device: Device = H200,
    torch: str = "2.11.0+cu130",
    cudnn: int | None = 91900,
    **changes: Any,
) -> SdpaCall:
    """A plain call on an H200 unless changed; k follows q, v follows k."""

    def made(t: TensorFacts | tuple[int, ...]) -> TensorFacts:
        return t if isinstance(t, TensorFacts) else facts(*t, dtype=dtype)

    q = made(q)
    k = q if k is None else made(k)
    return SdpaCall(q, k, k if v is None else made(v), device, torch, cudnn=cudnn, **changes)


MASK = facts(128, 128, dtype="bool")
GAPS = facts(2, 4, 128, 64, stride=(65536, 16384, 128, 2))
SHORT = {"q": (2, 4, 64, 64), "k": (2, 4, 128, 64)}
D = {size: (2, 4, 128, size) for size in (36, 64, 72, 76, 80, 128, 192, 200, 240, 256, 264)}
LEARNT = {size: facts(*shape, requires_grad=True) for size, shape in D.items()}
ODD_START = facts(2, 4, 128, 64, offset_bytes=2)
EVEN_START = facts(2, 4, 128, 64, offset_bytes=16)

# rule, implementation, a call it speaks of, a look-alike
REFUSED = [
    ("switched-off", "sdpa_math", {"enabled": frozenset(FUSED)}, {"enabled": frozenset({"sdpa_math"})}),
    ("switched-off", "sdpa_flash", {"enabled": frozenset()}, {"enabled": frozenset({"sdpa_flash"})}),
    ("device", "sdpa_cudnn", {"device": CPU}, {}),
    ("not-built", "sdpa_flash", {"available": frozenset({"sdpa_math"})}, {"available": frozenset({"sdpa_flash"})}),
    ("capability", "sdpa_flash", {"device": T4, "dtype": "fp16"}, {"device": A100}),
    ("capability", "sdpa_efficient", {"device": replace(T4, capability=(13, 0))}, {"device": T4, "dtype": "fp16"}),
    ("deterministic", "sdpa_cudnn", {"deterministic": True}, {"deterministic": False}),
    ("rank", "sdpa_flash", {"q": (4, 128, 64)}, {"q": (1, 4, 128, 64)}),
    ("rank", "sdpa_flash", {"q": (4, 128, 64), "device": CPU}, {"device": CPU}),
    ("batch", "sdpa_efficient", {"k": (1, 4, 128, 64)}, {"q": (1, 4, 128, 64)}),
    ("heads", "sdpa_flash", {"k": (2, 2, 128, 64)}, {"k": (2, 2, 128, 64), "enable_gqa": True}),
    ("heads", "sdpa_flash", {"k": (2, 2, 128, 64), "v": (2, 1, 128, 64), "enable_gqa": True}, {"enable_gqa": True}),
    (
        "heads", "sdpa_cudnn", {"k": (2, 3, 128, 64), "enable_gqa": True},
        {"k": (2, 2, 128, 64), "v": (2, 1, 128, 64), "enable_gqa": True},
    ),
    ("grouped-heads", "sdpa_efficient", {"k": (2, 2, 128, 64), "enable_gqa": True}, {"enable_gqa": True}),
    ("empty", "sdpa_cudnn", {"k": (2, 4, 0, 64)}, {"k": (2, 4, 2, 64)}),
    ("empty", "sdpa_flash", {"q": (2, 4, 0, 64), "device": CPU}, {"q": (2, 4, 1, 64), "device": CPU}),
    ("head-dims-differ", "sdpa_flash", {"v": D[128]}, {"q": D[128]}),
    ("head-dim", "sdpa_flash", {"q": D[264]}, {"q": D[256]}),
    ("head-dim-multiple", "sdpa_efficient", {"q": D[76]}, {"q": D[76], "dtype": "fp32"}),
    ("head-dim-multiple", "sdpa_efficient", {"q": D[36], "dtype": "fp16", "device": T4}, {"q": D[264]}),
    ("head-dim-multiple", "sdpa_cudnn", {"v": D[36]}, {"v": D[72]}),
    ("head-dim-of-cudnn", "sdpa_cudnn", {"q": D[264]}, {"q": D[256]}),
    ("head-dim-of-cudnn", "sdpa_cudnn", {"q": D[192], "device": A100}, {"q": D[128], "device": A100}),
    ("head-dim-of-cudnn", "sdpa_cudnn", {"q": D[192], "cudnn": 90900}, {"q": D[192], "cudnn": 91000}),
    (
        "head-dim-of-cudnn", "sdpa_cudnn", {"q": D[192], "v": D[192], "device": B200},
        {"q": D[192], "v": D[128], "device": B200},
    ),
    ("one-key", "sdpa_cudnn", {"k": (2, 4, 1, 64)}, {"q": (2, 4, 1, 64), "k": (2, 4, 128, 64)}),
    ("grid", "sdpa_cudnn", {"q": (65536, 4, 8, 64), "torch": "2.13.0"}, {"q": (65535, 4, 8, 64), "torch": "2.13.0"}),
    ("large-head-backward", "sdpa_flash", {"q": LEARNT[200], "device": L40}, {"q": D[200], "device": L40}),
    (
        "large-head-backward", "sdpa_flash", {"q": LEARNT[240], "device": L40, "dropout_p": 0.5},
        {"q": LEARNT[240], "device": L40},
    ),
    ("dtype", "sdpa_flash", {"dtype": "fp32"}, {"dtype": "fp16"}),
    ("dtype", "sdpa_cudnn", {"device": T4}, {"device": T4, "dtype": "fp16"}),
    ("dtype", "sdpa_efficient", {"dtype": "fp64"}, {"dtype": "fp32"}),
    ("dtype", "sdpa_flash", {"dtype": "float8_e4m3fn"}, {"dtype": "float8_e4m3fn", "fp8_flash": True}),
    ("dtype", "sdpa_flash", {"dtype": "float8_e4m3fn", "device": CPU}, {"dtype": "fp64", "device": CPU}),
    ("last-stride", "sdpa_flash", {"q": GAPS}, {"q": facts(2, 4, 128, 64, stride=(65536, 64, 256, 1))}),
    ("last-stride", "sdpa_efficient", {"mask": replace(MASK, stride=(256, 2))}, {"mask": MASK}),
    ("last-stride", "sdpa_efficient", {"q": facts(2, 4, 8, 1, stride=(64, 16, 2, 2))}, {"q": facts(2, 4, 8, 1)}),
    ("last-stride", "sdpa_flash", {"q": GAPS, "device": CPU}, {"mask": replace(MASK, stride=(256, 2)), "device": CPU}),
    ("offset", "sdpa_efficient", {"v": ODD_START, "torch": "2.13.0"}, {"v": EVEN_START, "torch": "2.13.0"}),
    ("mask", "sdpa_flash", {"mask": MASK}, {"is_causal": True}),
    ("mask-gradient", "sdpa_cudnn", {"mask": facts(128, 128, requires_grad=True)}, {"mask": facts(128, 128)}),
    ("mask-shape", "sdpa_cudnn", {"mask": facts(4, 128, 128, dtype="bool")}, {"mask": facts(2, 1, 1, 128)}),
    ("mask-shape", "sdpa_flash", {"mask": facts(4, 128, 128), "device": CPU}, {"mask": facts(1, 128), "device": CPU}),
    ("causal-lengths", "sdpa_flash", {**SHORT, "is_causal": True}, {"is_causal": True}),
    ("dropout-on-cpu", "sdpa_flash", {"dropout_p": 0.1, "device": CPU}, {"dropout_p": 0.1}),
    (
        "dropout-sixteenths", "sdpa_cudnn", {"dropout_p": 0.1, "torch": "2.12.0"},
        {"dropout_p": 0.125, "torch": "2.12.0"},
    ),
    ("dropout-of-old-cudnn", "sdpa_cudnn", {"dropout_p": 0.5, "cudnn": 91200}, {"dropout_p": 0.5, "cudnn": 91400}),
    (
        "one-query-with-dropout", "sdpa_cudnn", {"q": (2, 4, 1, 64), "k": (2, 4, 128, 64), "dropout_p": 0.5},
        {"q": (2, 4, 1, 64), "k": (2, 4, 128, 64)},
    ),
]  # fmt: skip
FAULTY = [
    ("scale-sign", "sdpa_flash", {"scale": -1.0}, {"scale": 1.0}),
    ("scale-sign-without-mask", "sdpa_efficient", {"scale": 0.0}, {"scale": 0.0, "mask": MASK}),
    (
        "scale-sign-with-is-causal", "sdpa_flash", {"scale": -1.0, "device": CPU, "is_causal": True},
        {"scale": -1.0, "device": CPU},
    ),
    (
        "mask-index", "sdpa_efficient", {"q": (1, 1, 65536, 64), "mask": facts(65536, 65536)},
        {"q": (1, 1, 65536, 64)},
    ),
    ("grid-limit", "sdpa_flash", {"q": (65536, 1, 8, 64)}, {"q": (65535, 1, 8, 64)}),
    ("grid-limit-of-cudnn", "sdpa_cudnn", {"q": (65536, 1, 8, 64)}, {"q": (65536, 1, 8, 64), "torch": "2.13.0"}),
    ("empty-batch", "sdpa_cudnn", {"q": (0, 4, 8, 64)}, {"q": (1, 4, 8, 64)}),
    ("offset-before-2-13", "sdpa_efficient", {"q": ODD_START}, {"q": EVEN_START}),
    (
        "nan-gradient", "sdpa_cudnn", {"q": facts(2, 4, 704, 64, requires_grad=True), "mask": MASK},
        {"q": facts(2, 4, 640, 64, requires_grad=True), "mask": MASK},
    ),
    ("hidden-rows", "sdpa_cudnn", {"mask": MASK, "hides_rows": True}, {"mask": MASK}),
    ("mask-dtype", "sdpa_cudnn", {"mask": facts(128, 128, dtype="fp32")}, {"mask": facts(128, 128)}),
    ("mask-and-is-causal", "sdpa_math", {"mask": MASK, "is_causal": True}, {"mask": MASK}),
    ("mask-and-is-causal-on-gpu", "sdpa_cudnn", {"mask": MASK, "is_causal": True}, {"is_causal": True}),
]  # fmt: skip


def rules_that_speak(book: Any, implementation: str, changes: dict[str, Any]) -> list[str]:
    return [reason.rule for reason in book.reasons(call(**changes), implementation)]


@pytest.mark.parametrize(("rule", "implementation", "spoken_of", "alike"), REFUSED)
def test_a_refusal_speaks_of_its_case_and_not_of_the_look_alike(
    rule: str, implementation: str, spoken_of: dict[str, Any], alike: dict[str, Any]
) -> None:
    assert rule in rules_that_speak(REFUSALS, implementation, spoken_of)
    assert rule not in rules_that_speak(REFUSALS, implementation, alike)


@pytest.mark.parametrize(("rule", "implementation", "spoken_of", "alike"), FAULTY)
def test_a_fault_speaks_of_its_case_and_not_of_the_look_alike(
    rule: str, implementation: str, spoken_of: dict[str, Any], alike: dict[str, Any]
) -> None:
    assert rule in rules_that_speak(FAULTS, implementation, spoken_of)
    assert rule not in rules_that_speak(FAULTS, implementation, alike)


def test_every_rule_has_its_two_cases() -> None:
    assert {rule.id for rule in REFUSALS.rules} == {case[0] for case in REFUSED}
    assert {rule.id for rule in FAULTS.rules} == {case[0] for case in FAULTY}


@pytest.mark.parametrize("implementation", FAMILY)
def test_nothing_speaks_against_a_plain_call(implementation: str) -> None:
    assert not REFUSALS.reasons(call(), implementation) and not FAULTS.reasons(call(), implementation)


def test_every_reason_is_heard_at_once() -> None:
    all_at_once = call(q=facts(3, 320, 320, dtype="fp32"), mask=facts(320, 320, stride=(640, 2)), device=T4)
    told = {reason.rule for reason in REFUSALS.reasons(all_at_once, "sdpa_flash")}
    assert told == {"capability", "rank", "head-dim", "dtype", "last-stride", "mask"}


def test_rules_of_later_releases_are_silent_before_them() -> None:
    tenth = {"dropout_p": 0.1}
    assert rules_that_speak(REFUSALS, "sdpa_cudnn", tenth) == []
    assert rules_that_speak(REFUSALS, "sdpa_cudnn", tenth | {"torch": "2.13.1+cu130"}) == ["dropout-sixteenths"]


@pytest.mark.parametrize(
    ("torch", "rocm", "verified"),
    [("2.11.0+cu130", False, True), ("2.14.0.dev20260612", False, False), ("2.11.0+rocm6.4", True, False)],
)
def test_only_releases_that_were_held_against_are_verified(torch: str, rocm: bool, verified: bool) -> None:
    reason = REFUSALS.reasons(call(dtype="fp32", torch=torch, rocm=rocm), "sdpa_flash")[0]
    assert reason.verified is verified and "2.11" in reason.verified_with


def test_remedies_name_the_numbers_of_the_call() -> None:
    def remedy(implementation: str, rule: str, **changes: Any) -> str | None:
        return next(r.remedy for r in REFUSALS.reasons(call(**changes), implementation) if r.rule == rule)

    grouped = {"q": (2, 8, 128, 64), "k": (2, 2, 128, 64)}
    assert remedy("sdpa_flash", "heads", **grouped) == "enable_gqa=True"
    repeated = remedy("sdpa_efficient", "grouped-heads", **grouped, enable_gqa=True)
    assert repeated == "k = k.repeat_interleave(4, dim=1); v = v.repeat_interleave(4, dim=1)"
    assert "(0, 4)" in str(remedy("sdpa_efficient", "head-dim-multiple", q=D[76]))
    assert remedy("sdpa_cudnn", "dropout-sixteenths", dropout_p=0.1, torch="2.12.0") == "dropout_p=0.125"
    assert remedy("sdpa_efficient", "dtype", dtype="fp64").startswith("q, k, v = (t.to(torch.float32)")


def test_padding_as_the_remedy_says_changes_nothing() -> None:
    torch = pytest.importorskip("torch")
    sdpa, pad = torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.pad
    q, k, v = (torch.randn(1, 2, 9, 36, dtype=torch.float64) for _ in range(3))
    padded = [pad(t, (0, 4)) for t in (q, k, v)]
    assert torch.allclose(sdpa(*padded, scale=36**-0.5)[..., :36], sdpa(q, k, v))
