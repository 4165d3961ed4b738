"""The contract's own code: sheets, reasons, registry. No attention is computed here."""

import subprocess
import sys
from pathlib import Path

import pytest

from attnscope import implementation as registry
from attnscope.device import Device
from attnscope.errors import UnknownImplementation, UnsupportedWorkload, UsageError
from attnscope.implementation import (
    FEATURE_SENTENCES,
    FEATURES,
    Gradients,
    Implementation,
    Sheet,
    SheetImplementation,
    builtin_references,
    find,
    load_reference,
    missing_package,
    names,
    reference_of,
    register,
    require_supported,
    safe_reasons,
    select,
)
from attnscope.workload import DIRECTIONS, Workload

CPU = Device("cpu", "a processor", threads=2)
H100 = Device("cuda", "NVIDIA H100", capability=(9, 0))
T4 = Device("cuda", "Tesla T4", capability=(7, 5))
PLAIN = Workload.parse("B1,H2,L8,D16,fp32")


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


class Mine(SheetImplementation):
    """An outside implementation."""

    name, summary = "mine", "for the tests"
    sheet = Sheet(dtypes=frozenset({"fp32"}), features=frozenset({"gqa"}), devices=frozenset({"cpu"}))

    def prepare(self, workload: Workload, device: Device) -> object:
        raise NotImplementedError


class Raising(Mine):
    name = "raising"

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        raise ZeroDivisionError("of its own")


# --- the sheet --------------------------------------------------------------------------------------------------------


def sheet(**changes: object) -> Sheet:
    return Sheet(**({"dtypes": frozenset({"fp32"}), "features": frozenset(FEATURES)} | changes))  # type: ignore[arg-type]


def test_a_sheet_takes_known_features_only() -> None:
    with pytest.raises(UsageError, match=r"among gqa.*got flying"):
        sheet(features=frozenset({"flying"}))


def test_every_feature_has_its_sentence() -> None:
    assert set(FEATURE_SENTENCES) == set(FEATURES)
    assert len(set(FEATURE_SENTENCES.values())) == len(FEATURES)


@pytest.mark.parametrize(
    ("changes", "text", "device", "direction", "reason"),
    [
        ({"devices": frozenset({"cuda"})}, "B1,H2,L8,D16,fp32", CPU, "forward", "runs on cuda, not on cpu"),
        (
            {"min_capability": (8, 0)}, "B1,H2,L8,D16,fp32", T4, "forward",
            "needs compute capability 8.0 or newer, Tesla T4 has 7.5",
        ),
        (
            {"min_capability": (6, 0), "below_capability": (7, 5)}, "B1,H2,L8,D16,fp32", T4, "forward",
            "is built for compute capability 6.0, Tesla T4 has 7.5",
        ),
        ({"directions": frozenset({"forward"})}, "B1,H2,L8,D16,fp32", CPU, "backward", "has no backward"),
        ({}, "B1,H2,L8,D16,bf16", CPU, "forward", "takes fp32, not bf16"),
        (
            {"layouts": frozenset({"bhld"})}, "B1,H2,L8,D16,fp32,layout=qkv", CPU, "forward",
            "takes layout bhld, not qkv",
        ),
        (
            {"features": frozenset()}, "B1,H4/2,L8,D16,fp32", CPU, "forward",
            "does not support grouped-query heads (H != H_kv)",
        ),
        ({"min_head_dim": {"cpu": 16}}, "B1,H2,L8,D8,Dv16,fp32", CPU, "forward", "takes D from 16 on, not 8"),
        ({"min_head_dim": {"cpu": 16}}, "B1,H2,L8,D16,Dv8,fp32", CPU, "forward", "takes D_v from 16 on, not 8"),
        ({"max_head_dim": 64}, "B1,H2,L8,D80,fp32", CPU, "forward", "takes D up to 64, not 80"),
        ({"max_head_dim": 64}, "B1,H2,L8,D64,Dv80,fp32", CPU, "forward", "takes D_v up to 64, not 80"),
        ({"head_dim_multiple": 8}, "B1,H2,L8,D12,fp32", CPU, "forward", "needs D to be a multiple of 8, not 12"),
        ({"packages": ("nosuch-package",)}, "B1,H2,L8,D16,fp32", CPU, "forward",
         "package nosuch-package is not installed (pip install nosuch-package)"),
    ],
)  # fmt: skip
def test_a_sheet_says_why_not(
    changes: dict[str, object], text: str, device: Device, direction: str, reason: str
) -> None:
    made = sheet(**({"packages": ()} | changes))
    assert made.reasons(Workload.parse(text), device, direction) == [reason]


def test_a_sheet_gives_every_reason_at_once() -> None:
    made = sheet(features=frozenset(), devices=frozenset({"cuda"}), packages=())
    reasons = made.reasons(Workload.parse("B1,H2,L8,D16,bf16,causal,sinks"), CPU, "forward")
    assert len(reasons) == 4


def test_a_sheet_without_obstacles_gives_no_reason() -> None:
    assert (
        sheet(packages=(), min_head_dim={"cpu": 32}).reasons(
            Workload.parse("B1,H4/2,L8,S9,D16,fp32,causal,alibi"), H100, "backward"
        )
        == []
    )


def test_versions_of_packages_are_compared_as_numbers() -> None:
    assert missing_package("pytest>=1.9") is None
    assert missing_package("pytest>=1000.1").startswith("needs pytest 1000.1 or newer, ")


def test_compute_precision_is_fp32_unless_the_sheet_says_otherwise() -> None:
    made = sheet(compute={"bf16": "bf16"})
    assert [made.compute_precision(d) for d in ("bf16", "fp16", "fp32", "fp64")] == ["bf16", "fp32", "fp32", "fp64"]


def test_gradients_name_what_is_there() -> None:
    assert set(Gradients(1, 2, 3, dsinks=4).tensors()) == {"dq", "dk", "dv", "dsinks"}


# --- the registry -----------------------------------------------------------------------------------------------------


def test_every_builtin_loads_under_its_name_and_fulfils_the_contract() -> None:
    for name, reference in builtin_references().items():
        found = find(name)
        assert isinstance(found, Implementation)
        assert found.name == name
        assert reference_of(name) == reference
        assert found.summary and "\n" not in found.summary and len(found.summary) < 110


def test_all_is_the_registry_in_order_without_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    register(Mine())
    listed = {"naive": "m:A", "rung": "attnscope.implementations.cuda_ladder.rung:B", "sdpa_math": "m:C"}
    monkeypatch.setattr(registry, "builtin_references", lambda: listed)
    assert names() == ["naive", "sdpa_math", "mine"]
    assert names("ladder") == ["rung"]
    assert select("ladder, naive,all") == ["rung", "naive", "sdpa_math", "mine"]


def test_select_keeps_the_order_asked_for_and_names_each_once() -> None:
    assert select("sdpa_math,naive, sdpa_math") == ["sdpa_math", "naive"]


def test_select_registers_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "outside_of_attnscope"
    (tmp_path / f"{module}.py").write_text(
        "from attnscope.implementations.naive import Naive\nclass Theirs(Naive):\n    name = 'theirs'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert select(f"naive,{module}:Theirs") == ["naive", "theirs"]
    assert find("theirs").name == "theirs"
    assert reference_of("theirs") == f"{module}:Theirs"
    assert "theirs" in names()


@pytest.mark.parametrize("ask", [find, select])
def test_an_unknown_name_is_met_with_a_did_you_mean(ask: object) -> None:
    with pytest.raises(
        UnknownImplementation, match=r"unknown implementation 'sdpa_flsh'\nhint: did you mean sdpa_flash"
    ):
        ask("sdpa_flsh")  # type: ignore[operator]


def test_register_an_object() -> None:
    mine = Mine()
    register(mine)
    assert find("mine") is mine
    assert reference_of("mine") == f"{__name__}:Mine"


def test_an_object_of_a_local_class_has_no_reference() -> None:
    class Local(Mine):
        name = "local"

    register(Local())
    assert reference_of("local") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "naive"}, "the name 'naive' is taken"),
        ({"name": "with space"}, "letters, digits"),
        ({"prepare": None}, "an implementation must have prepare"),
    ],
)
def test_register_refuses_what_breaks_the_contract(change: dict[str, object], message: str) -> None:
    mine: object = Mine()
    if "prepare" in change:
        mine = type("Lacking", (), {part: getattr(Mine, part) for part in ("name", "summary", "sheet")})()
        mine.reasons_unsupported = lambda *a: []  # type: ignore[attr-defined]
    else:
        mine.name = change["name"]  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=message):
        register(mine)  # type: ignore[arg-type]


@pytest.mark.parametrize("reference", ["nosuch_module:Class", "attnscope.implementations.naive:Nosuch"])
def test_a_reference_that_does_not_load_says_so(reference: str) -> None:
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_reference(reference)


def test_forcing_an_unsupported_workload_raises_with_every_reason() -> None:
    register(Mine())
    assert require_supported("mine", PLAIN, CPU, "forward").name == "mine"
    with pytest.raises(UnsupportedWorkload) as caught:
        require_supported("mine", PLAIN.replace(dtype="bf16", causal="top_left"), H100, "forward")
    assert len(caught.value.reasons) == 3
    assert all(reason in str(caught.value) for reason in caught.value.reasons)


def test_reasons_that_raise_become_a_reason() -> None:
    assert safe_reasons(Raising(), PLAIN, CPU, "forward") == [
        "reasons_unsupported raised ZeroDivisionError: of its own"
    ]


# --- what must work everywhere ----------------------------------------------------------------------------------------


STRANGE = (
    "B2,H4/2,L8,S9,D17,Dv5,fp64,causal=bottom_right,window=2,softcap=3,scale=-1,alibi,sinks,mask=bool,bias=fp32,"
    "lengths=9/0,dropout=0.5",
    "B0,H2,L0,D8,bf16",
    "H2,D8,fp16,packed=0/3,causal",
    "B1,H70000,L1,S70000,D512,fp32",
)


@pytest.mark.parametrize("device", [CPU, H100, T4], ids=lambda device: device.name)
@pytest.mark.parametrize("name", builtin_references())
def test_reasons_are_sentences_and_never_raise(name: str, device: Device) -> None:
    for text in STRANGE:
        for direction in DIRECTIONS:
            reasons = find(name).reasons_unsupported(Workload.parse(text), device, direction)
            assert all(reason and "\n" not in reason and len(reason) < 260 for reason in reasons)
            assert len(set(reasons)) == len(reasons)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # what an import of a missing package does
from attnscope.device import Device
from attnscope.implementation import find, names
from attnscope.workload import Workload
devices = Device("cpu", "a processor"), Device("cuda", "NVIDIA H100", capability=(9, 0))
for name in (*names("all"), *names("ladder")):
    implementation = find(name)
    for device in devices:
        for direction in ("forward", "backward"):
            for text in ("B1,H4/2,L8,D64,bf16,causal", "B1,H2,L8,S4,D64,fp32,causal=bottom_right,bias=fp32"):
                reasons = implementation.reasons_unsupported(Workload.parse(text), device, direction)
    print(name, sorted(implementation.sheet.dtypes), implementation.summary)
"""


def test_sheets_and_reasons_are_read_without_torch() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [line.split()[0] for line in ran.stdout.splitlines()] == list(builtin_references())


BROKEN = {
    "raises": "raise RuntimeError('boom at import')",
    "exits": "import sys; sys.exit(0)",
    "syntax": "def (",
    "wants": "class X:\n    def __init__(self, needed): pass",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_module_that_breaks_when_it_is_loaded_is_a_sentence(kind, tmp_path, monkeypatch):
    (tmp_path / f"broken_{kind}.py").write_text(BROKEN[kind])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"cannot be loaded: \w+: .*\nhint: module:Class"):
        load_reference(f"broken_{kind}:X")


@pytest.mark.parametrize("name", [3, "all", "ladder", "../../etc/x", "x" * 101, "<script>"])
def test_names_that_would_mislead_are_refused(name):
    class Named(Mine):
        pass

    Named.name = name
    with pytest.raises(UsageError, match="name"):
        register(Named())


def test_reasons_of_another_kind_are_reasons():
    class Talkative(Mine):
        name = "talkative"

        def reasons_unsupported(self, workload, device, direction="forward"):
            return "no way"

    found = safe_reasons(Talkative(), Workload.parse("H1,L4,D8"), Device("cpu", "x"), "forward")
    assert found == ["reasons_unsupported must return a list of sentences, got 'no way'"]
