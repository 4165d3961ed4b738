"""triton_fused without a card: reasons, tiles, names; slow: that all it ships compiles, fits and hardly spills.

Compiling needs triton but no GPU: a stand-in for Triton's driver names the card. What the kernels compute is tested in
test_triton_fused_interpreted.py and, on a card, in tests/gpu.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attnscope.device import Device, find_device
from attnscope.errors import PrepareFailed
from attnscope.implementation import find
from attnscope.implementations import triton_fused
from attnscope.implementations.triton_fused import TILES, Tiles, choose_tiles, interpreting
from attnscope.inputs import make_inputs
from attnscope.trace import explain_name
from attnscope.workload import Workload

CPU = find_device("cpu")
H200 = Device("cuda", "NVIDIA H200", capability=(9, 0))
L4 = Device("cuda", "NVIDIA L4", capability=(8, 9))
T4 = Device("cuda", "Tesla T4", capability=(7, 5))
SHARED_KIB = {80: 99, 89: 99, 90: 227}  # of a block (CUDA C++ Programming Guide); 8.0 shares its tiles with 8.9
FEW_BYTES = 32  # of a thread's stack: eight of its 255 registers. More shows in the time.
SPILLS = {(256, 4): 1024}  # fp32 at 256, whose operands are twice as many registers as any tile leaves
# 8.9 runs the code of 8.0 in the same tiles, so two of them are enough
SHIPPED = [(*key, capability) for capability in (80, 90) for key in TILES["wgmma"]] + [(64, 2, 89), (128, 2, 89)]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if triton and a C compiler were there, and nothing was interpreted."""
    monkeypatch.setattr("attnscope.implementation.missing_package", lambda requirement: None)
    monkeypatch.setattr(triton_fused, "interpreting", lambda: False)
    monkeypatch.setattr(triton_fused.shutil, "which", lambda name: f"/{name}")


def reasons(text: str, device: Device = H200, direction: str = "backward") -> list[str]:
    return find("triton_fused").reasons_unsupported(Workload.parse(text), device, direction)


@pytest.mark.parametrize(
    ("text", "device", "reason"),
    [
        ("B1,H2,L64,D64,bf16", T4, "needs compute capability 8.0 or newer, Tesla T4 has 7.5"),
        ("B1,H2,L64,D257,bf16", H200, "takes D up to 256, not 257"),
        ("B1,H2,L64,D64,fp64", H200, "takes bf16 or fp16 or fp32, not fp64"),
        ("B1,H2,L64,D64,bf16,bias=fp64:1xHxLxS", H200, "takes a bias in bf16, fp16 or fp32, not fp64"),
        ("B1,H1,L1,S1073741823,D64,bf16", H200,
         "counts positions in 32 bits: L + S must stay below 2**30, not 1073741824"),
        ("B70000,H70000,L1,D16,bf16", H200,
         "may need 4900000000 programs in a launch, a CUDA grid takes 2**31 - 1"),
    ],
)  # fmt: skip
def test_reasons(text: str, device: Device, reason: str, installed: None) -> None:
    assert reasons(text, device) == [reason]


def test_many_heads_are_no_reason(installed: None) -> None:
    assert reasons("B1024,H128,L1,S4096,D128,bf16") == reasons("B70000,H2,L64,D16,Dv256,fp16,causal,sinks") == []


def test_what_triton_needs_is_a_reason(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "B1,H2,L64,D64,fp16"
    assert "runs on a CPU in Triton's interpreter only: set TRITON_INTERPRET=1" in reasons(text, CPU)[0]
    monkeypatch.setattr(triton_fused, "interpreting", lambda: True)
    assert reasons(text, CPU) == []
    assert reasons(text.replace("fp16", "bf16"), CPU) == [
        "takes no bf16 on a CPU: Triton's interpreter multiplies its bits as whole numbers, and truncates to it"
    ]
    assert reasons(text) == ["TRITON_INTERPRET is set, so its kernels would be interpreted and not run on the card"]
    monkeypatch.setattr(triton_fused, "interpreting", lambda: False)
    monkeypatch.setattr(triton_fused.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert reasons(text) == [
        "Triton needs a C compiler to build its launchers, and there is no gcc, no clang and no CC"
    ]


@pytest.mark.parametrize(("value", "interprets"), [("1", True), ("0", False), (None, False)])
def test_the_interpreter_is_asked_for_by_the_environment(
    value: str | None, interprets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "triton.language", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert interpreting() == interprets


def test_a_broken_triton_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise ImportError("libtriton.so: undefined symbol\nmore")

    monkeypatch.setattr(triton_fused, "load_kernels", broken)
    with pytest.raises(PrepareFailed, match=r"triton_fused: Triton failed with ImportError\nlibtriton.so: undefined"):
        find("triton_fused").prepare(Workload.parse("B1,H1,L8,D8,fp32"), CPU)


@pytest.mark.parametrize("device", [H200, L4])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("dims", ["D1", "D64,Dv200", "D65", "D128,Dv64", "D256"])
def test_every_head_dim_has_tiles(device: Device, dtype: str, dims: str) -> None:
    assert isinstance(choose_tiles(Workload.parse(f"B1,H1,L64,{dims},{dtype}"), device), Tiles)


@pytest.mark.parametrize(
    "text", ["B2,H4/2,L5,S7,D8,Dv4,fp16,layout=blhd,bias=fp32:Bx1xLx1,mask=bool:1x1x1xS,sinks,alibi,dropout=0.1",
             "B1,H2,L6,D8,fp32,layout=qkv", "B2,H2,L5,D8,fp32,lengths=5/3"],
)  # fmt: skip
def test_what_is_compiled_for_has_the_shapes_strides_and_dtypes_of_real_inputs(text: str) -> None:
    workload = Workload.parse(text)
    real, stand_ins = make_inputs(workload, CPU).tensors(), triton_fused._stand_ins(workload).tensors()
    described = [
        {n: (t.shape, t.stride(), t.dtype) for n, t in tensors.items() if n not in ("qkv", "cu_seqlens")}
        for tensors in (real, stand_ins)
    ]
    assert described[0] == described[1]


def test_gradients_of_sinks_are_minus_their_probability_times_delta() -> None:
    lse = torch.tensor([[[0.0, -torch.inf]], [[1.0, 2.0]]])
    delta = torch.tensor([[[2.0, 5.0]], [[3.0, 4.0]]])
    found = triton_fused._grad_sinks(torch.tensor([0.5]), lse, delta)
    wanted = -(torch.tensor([0.5, -0.5, -1.5]).exp() * torch.tensor([2.0, 3.0, 4.0])).sum()
    assert found.shape == (1,) and found.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_explain_knows_its_kernels() -> None:
    source = Path(triton_fused.__file__).with_name("kernels.py").read_text()
    names = re.findall(r"^def (triton_fused_attention_\w+)", source, re.MULTILINE)
    assert len(names) == 5
    for name in names:
        role = "fused attention backward" if "backward" in name else "fused attention"
        meaning = explain_name(name)
        assert (meaning.family, meaning.role) == ("attnscope triton_fused", role)
        assert meaning.unit == ("memory" if "delta" in name else "tensor core")


def test_asking_for_reasons_does_not_import_triton() -> None:
    code = (
        "import sys; from attnscope.device import find_device; from attnscope.implementation import find;"
        "from attnscope.workload import Workload;"
        "find('triton_fused').reasons_unsupported(Workload.parse('B1,H1,L8,D8,fp32'), find_device('cpu'));"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- slow: compiling for cards that are not here ----------------------------------------------------------------------


class Driver:
    """What Triton's compiler asks of a driver: the card."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A function that compiles all of a workload for a compute capability, and returns the kernels, none loaded."""
    if importlib.util.find_spec("triton") is None or interpreting():
        pytest.skip("needs triton, not as an interpreter")
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime import driver

    kernels: list[Any] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CompiledKernel, "run", property(kernels.append))
    bounds = triton_fused.row_bounds
    monkeypatch.setattr(triton_fused, "row_bounds", lambda workload, device: bounds(workload, "cpu"))

    def compile_for(text: str, capability: int) -> list[Any]:
        monkeypatch.setattr(driver, "_active", Driver(capability))
        device = Device("cuda", f"sm_{capability}", capability=divmod(capability, 10))
        kernels.clear()
        prepared = triton_fused.PreparedTritonFused(Workload.parse(text), device, triton_fused.load_kernels())
        prepared.compile()
        return list(kernels)

    yield compile_for


def spilled_bytes(kernel: Any, folder: Path) -> int:
    """Bytes of a thread's stack, which holds what did not fit in registers: nothing else here needs one."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", said)
    assert found is not None, said
    return int(found.group(1))


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "bytes_", "capability"), SHIPPED)
def test_what_is_shipped_compiles_spills_next_to_nothing_and_fits(
    dim: int, bytes_: int, capability: int, compiled: Any, tmp_path: Path
) -> None:
    text = f"B2,H4,L4096,D{dim},{'bf16' if bytes_ == 2 else 'fp32'},causal"
    kernels = compiled(text, capability)
    assert [kernel.name.rpartition("_")[2] for kernel in kernels] == ["forward", "delta", "dq", "dkdv"]
    allowed = SPILLS.get((dim, bytes_), FEW_BYTES)
    spilled = {kernel.name: spilled_bytes(kernel, tmp_path) for kernel in kernels}
    assert all(stack <= allowed for stack in spilled.values()), spilled
    shared = {kernel.name: kernel.metadata.shared for kernel in kernels}
    assert all(size <= SHARED_KIB[capability] * 1024 for size in shared.values()), shared


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "B2,H4/2,L33,S65,D80,Dv24,bf16,causal=bottom_right,window=9,softcap=3,alibi,sinks,mask=bool:Bx1x1xS,"
        "bias=fp16:1xHx1xS,dropout=0.2,lengths=65/7,layout=blhd",
        "H2,D16,fp16,packed=3/0/5,bias=bf16:1x1xLx1",
        "B1,H1,L1,D1,fp32,bias=fp32:1x1x1x1",
    ],
)  # fmt: skip
def test_every_option_compiles(text: str, compiled: Any) -> None:
    assert [kernel.name.rpartition("_")[2] for kernel in compiled(text, 90)][-1] == "dbias"
