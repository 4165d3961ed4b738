"""hopper's decode kernels without a card: what they take, tiles, splits; slow: that all they ship compiles and fits.

What they compute is tested in test_hopper_decode_interpreted.py (``make triton``) and, on a card, in tests/gpu.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import driver_stand_in
from attnscope.device import Device
from attnscope.implementations.hopper import decode, decode_kernels
from attnscope.implementations.hopper.decode import SPLITS, TILES, Tile, choose, fits, predicted_us, tiles_for
from attnscope.implementations.triton_fused import interpreting
from attnscope.suites import SUITES
from attnscope.trace import explain_name
from attnscope.workload import Workload
from test_triton_fused import Driver, spilled_bytes
from triton_interpreter import mutated

H200 = Device("cuda", "NVIDIA H200", capability=(9, 0), multiprocessors=132)
L4 = Device("cuda", "NVIDIA L4", capability=(8, 9), multiprocessors=58)
B200 = Device("cuda", "NVIDIA B200", capability=(10, 0), multiprocessors=148)
SHARED_BYTES = 228 * 1024  # of a multiprocessor of 9.0; each program takes 1 KiB beside its own (CUDA C++ Prog. Guide)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("B8,H32/8,L1,S8192,D128,bf16", True),
        ("B1,H64/1,L1,S100,D64,fp16", True),
        ("B2,H32/8,L16,S100,D80,Dv256,bf16,causal=bottom_right,window=7,softcap=3,alibi,sinks,lengths=3/9", True),
        ("B1,H32/8,L17,S100,D128,bf16", False),  # 68 rows
        ("B1,H128/1,L1,S100,D128,bf16", False),
        ("B1,H8,L1,S100,D128,fp32", False),
        ("B1,H8,L1,S100,D132,bf16", False),
        ("B1,H8,L1,S100,D64,Dv264,bf16", False),
        ("B1,H8,L1,S100,D64,bf16,mask=bool:1x1x1xS", False),
        ("B1,H8,L1,S100,D64,bf16,bias=bf16:1x1x1xS", False),
        ("H8,D64,bf16,packed=1/1", False),
        ("B1,H8,L1,S100,D64,bf16,dropout=0.1", False),
        ("B1,H8,L1,S1073741823,D64,bf16", False),
        ("B65536,H8,L1,S8,D64,bf16", False),
        ("B1,H65536,L1,S8,D64,bf16", False),
    ],
)
def test_what_it_takes(text: str, taken: bool) -> None:
    assert fits(Workload.parse(text), H200) is taken


def test_it_takes_the_decode_suite_on_cards_of_9_0_alone() -> None:
    for workload in SUITES["decode"]:
        assert fits(workload, H200)
        assert not fits(workload, L4) and not fits(workload, B200) and not fits(workload, Device("cpu", "CPU"))


@pytest.mark.parametrize("dims", ["D8", "D64,Dv200", "D72", "D128,Dv64", "D256"])
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 33, 64])
def test_one_tile_holds_all_rows_that_are_taken(dims: str, rows: int) -> None:
    workload = Workload.parse(f"B1,H1,L{rows},S9,{dims},bf16")
    assert fits(workload, H200)
    for tile in tiles_for(workload, H200):
        assert tile.rows >= rows and tile.ahead & (tile.ahead - 1) == 0


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("B3,H1,L1,S100,D8,bf16", 100),
        ("B3,H1,L4,S100,D8,bf16,causal", 4),
        ("B3,H1,L4,S100,D8,bf16,causal=bottom_right", 100),
        ("B3,H1,L4,S100,D8,bf16,causal=bottom_right,window=10", 13),
        ("B2,H1,L1,S100,D8,bf16,lengths=7/60", 60),
        ("B2,H1,L4,S100,D8,bf16,lengths=2/3,causal=bottom_right", 3),
        ("B0,H1,L1,S100,D8,bf16", 0),
        ("B1,H1,L0,S100,D8,bf16", 0),
        ("B1,H1,L1,S0,D8,bf16", 0),
    ],
)
def test_keys_that_are_there_to_be_split(text: str, keys: int) -> None:
    assert decode.keys_to_read(Workload.parse(text)) == keys


NARROW, WIDE = TILES[16, 128]


@pytest.mark.parametrize(
    ("text", "tile", "splits"),
    [
        ("B8,H32/8,L1,S8192,D128,bf16", NARROW, 4),  # the fastest that was measured, as are the next four
        ("B64,H32/8,L1,S4096,D128,bf16", WIDE, 1),
        ("B1,H32/8,L1,S32768,D128,bf16", NARROW, 32),
        ("B1,H32/8,L1,S4096,D128,bf16", NARROW, 16),
        ("B256,H32/8,L1,S2048,D128,bf16", NARROW, 1),
        ("B0,H1,L1,S100,D128,bf16", NARROW, 1),
        ("B1,H1,L1,S0,D128,bf16", NARROW, 1),
        ("B1,H1,L1,S64,D128,bf16", NARROW, 1),
    ],
)
def test_what_is_chosen(text: str, tile: Tile, splits: int) -> None:
    workload = Workload.parse(text)
    assert choose(workload, H200, tiles_for(workload, H200)) == (tile, splits)


def test_rows_of_several_tiles_are_not_split() -> None:
    workload = Workload.parse("B1,H1,L33,S9000,D128,bf16")
    assert choose(workload, H200, (NARROW,)) == (NARROW, 1)


@given(st.integers(1, 600), st.integers(1, 20000), st.sampled_from(sorted(TILES)))
def test_the_choice_is_the_cheapest_and_each_split_has_a_tile(batch: int, keys: int, kind: tuple[int, int]) -> None:
    workload = Workload.parse(f"B{batch},H{kind[0]}/1,L1,S{keys},D{kind[1]},bf16")
    tile, splits = choose(workload, H200, TILES[kind])
    assert splits == 1 or (splits - 1) * tile.keys < keys
    least = min(
        predicted_us(workload, one, n, 132) for one in TILES[kind] for n in SPLITS if n * one.keys <= keys or n == 1
    )
    assert predicted_us(workload, tile, splits, 132) <= least + 0.01


@given(st.integers(1, 600), st.integers(1, 20000), st.sampled_from(SPLITS))
def test_no_prediction_is_below_what_must_be_read(batch: int, keys: int, splits: int) -> None:
    workload = Workload.parse(f"B{batch},H32/8,L1,S{keys},D128,bf16")
    assert predicted_us(workload, NARROW, splits, 132) >= batch * 8 * keys * 512 / decode.BYTES_PER_US


def test_what_can_be_read_in_place() -> None:
    buffer = torch.zeros(2, 4, 64, 80, dtype=torch.float16)
    assert decode.is_readable(buffer, 64) and decode.is_readable(buffer[..., 8:72].transpose(1, 2), 64)
    assert decode.is_readable(buffer[:1, :1, :1, :64].as_strided((1, 1, 1, 64), (7, 5, 3, 1)), 64)
    assert decode.is_readable(buffer[:, :1].expand(2, 4, 64, 80), 64)
    assert not decode.is_readable(buffer[..., 1:65], 64)  # begins 2 bytes in
    assert not decode.is_readable(buffer[..., ::2], 64)
    assert not decode.is_readable(torch.zeros(2, 4, 64, 84, dtype=torch.float16)[..., :80], 64)  # rows 168 bytes apart
    far = torch.empty(2**6, dtype=torch.float16).as_strided((1, 1, 1, 64), (0, 0, 2**25, 1))
    assert not decode.is_readable(far, 64) and decode.is_readable(far, 63)


def test_explain_knows_its_kernels() -> None:
    for name, unit in (("hopper_attention_decode", "tensor core"), ("hopper_attention_decode_combine", "memory")):
        meaning = explain_name(name)
        assert (meaning.family, meaning.role, meaning.unit) == ("attnscope hopper", "fused attention", unit)


# --- slow: compiling for a card that is not here ----------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A function that compiles what a workload needs for 9.0, and returns the kernels, none loaded."""
    if importlib.util.find_spec("triton") is None or interpreting():
        pytest.skip("needs triton, not as an interpreter")
    from triton.runtime import driver

    kernels: list[Any] = []

    def load(kernel: Any, values: list[Any], grid: tuple[int, int, int], index: int) -> None:
        decode.machine_of(kernel, values)  # its parameters are as they will be passed
        kernels.append(kernel)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decode, "load_machine", load)
    driver_stand_in.stand_in(monkeypatch)
    monkeypatch.setattr(driver, "_active", Driver(90))

    def compile_for(text: str, **given: Any) -> list[Any]:
        kernels.clear()
        decode.DecodeKernel(Workload.parse(text), H200, **given).compile()
        return list(kernels)

    yield compile_for


@pytest.mark.long
@pytest.mark.parametrize(("rows", "dim", "tile"), [(*kind, tile) for kind, tiles in TILES.items() for tile in tiles])
def test_what_is_shipped_compiles_spills_nothing_and_fits(
    rows: int, dim: int, tile: Tile, compiled: Any, tmp_path: Path
) -> None:
    """As many rows as the tile holds, and one and four where no smaller tile takes them."""
    for options in ("", ",causal=bottom_right,window=100,softcap=20,alibi,sinks,lengths=4096/7"):
        for few in (rows, 1, 4) if rows == 16 else (rows,):
            (kernel,) = compiled(f"B2,H{few}/1,L1,S4096,D{dim},bf16{options}", tile=tile, splits=64, joined=True)
            assert kernel.name == "hopper_attention_decode" and spilled_bytes(kernel, tmp_path) == 0
            assert tile.resident * (kernel.metadata.shared + 1024) <= SHARED_BYTES
            assert kernel.metadata.maxnreg * tile.resident * 32 * tile.warps <= decode.REGISTERS


@pytest.mark.long
@pytest.mark.parametrize("dim", [64, 256])
def test_two_kernels_compile_and_spill_nothing(dim: int, compiled: Any, tmp_path: Path) -> None:
    kernels = compiled(f"B2,H64/1,L1,S4096,D{dim},bf16,sinks", splits=64, joined=False)
    assert [kernel.name.removeprefix("hopper_attention_decode") for kernel in kernels] == ["", "_combine"]
    assert [spilled_bytes(kernel, tmp_path) for kernel in kernels] == [0, 0]


@pytest.mark.long
def test_copies_are_16_bytes_wide_and_asynchronous(compiled: Any) -> None:
    for text in (
        "B2,H8/2,L1,S4096,D128,bf16",
        "B2,H8/2,L3,S4096,D72,Dv40,fp16,layout=blhd",
        "B1,H2,L9,D8,bf16,layout=qkv",
    ):
        ptx = compiled(text)[0].asm["ptx"]
        copies = [line for line in ptx.splitlines() if "cp.async" in line and "shared" in line]
        assert copies and all("cp.async.cg.shared.global" in line and ", 0x10" in line for line in copies), text


@pytest.mark.long
def test_without_splits_one_kernel_is_compiled(compiled: Any) -> None:
    assert [k.name for k in compiled("B256,H32/8,L1,S2048,D128,bf16,sinks")] == ["hopper_attention_decode"]


@pytest.mark.long
def test_no_caller_s_alignment_is_assumed(compiled: Any) -> None:
    first, combine = compiled("B2,H8/2,L1,S4096,D128,bf16,sinks,alibi,lengths=4096/7", splits=4, joined=False)
    aligned = {name for name in ("q", "k", "v", "lengths", "slopes", "sinks") if _is_aligned(first, name)}
    assert aligned == {"q", "k", "v"} and not _is_aligned(combine, "sinks")


def _is_aligned(kernel: Any, argument: str) -> bool:
    """Whether the kernel was compiled for an argument that begins at a multiple of 16 bytes."""
    return bool(kernel.src.attrs.get((kernel.src.fn.arg_names.index(argument),)))


def order_faults(kernel: Any) -> list[str]:
    """What may let the last program read a part before another program has written it, in a joined kernel.

    In PTX there may be a barrier by luck, for the sake of shared memory: that one is meant, Triton's own code says.
    """
    ptx, meant = kernel.asm["ptx"], kernel.asm["ttgir"].partition("tt.atomic_rmw")[0].rpartition("tt.store")[2]
    found = list(re.finditer(r"\batom\.\S*", ptx))
    if len(found) != 1:
        return [f"{len(found)} atomic instructions"]
    before, after = ptx[: found[0].start()].rpartition("st.global")[2], ptx[found[0].end() :]
    faults = [] if found[0].group().startswith("atom.global.gpu.acq_rel.add") else [f"it is {found[0].group()}"]
    if "bar.sync" not in before or not re.search(r"^\s*(gpu\.barrier|ttg\.barrier all)", meant, re.MULTILINE):
        faults.append("no barrier between the parts and the count")
    if "bar.sync" not in after.partition("ld.global")[0]:
        faults.append("no barrier between the count and the parts")
    loads = set(re.findall(r"\bld\.global\S*", after))
    return faults + [f"{load} may find a line of the first-level cache" for load in loads if ".cg" not in load]


JOINED = "B2,H8/2,L1,S4096,D128,bf16"
# What is replaced, by what, and what must be said then.
REORDERED = {
    "nothing": ("", "", []),
    "no barrier": ("tl.debug_barrier()", "pass", ["no barrier between the parts and the count"]),
    "a relaxed count": ('sem="acq_rel"', 'sem="relaxed"', ["it is atom.global.gpu.relaxed.add.u32"]),
    "a block's scope": ('scope="gpu"', 'scope="cta"', ["it is atom.global.cta.acq_rel.add.u32"]),
    "plain loads": (', cache_modifier=".cg"', "", ["ld.global.b32 may find", "ld.global.v4.b32 may find"]),
}


@pytest.mark.long
@pytest.mark.parametrize("change", REORDERED)
def test_the_last_program_reads_what_the_others_wrote(
    change: str, compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order of the instructions: no interpreter runs threads side by side."""
    old, new, wanted = REORDERED[change]
    module = mutated(decode_kernels, old, new, tmp_path) if old else decode_kernels
    monkeypatch.setattr(decode, "load_kernels", module.load)
    (kernel,) = compiled(JOINED, splits=4)
    faults = sorted(order_faults(kernel))
    assert len(faults) == len(wanted) and all(f.startswith(w) for f, w in zip(faults, wanted, strict=True)), faults
