"""hopper's decode kernels without a card: what they take, tiles, splits; slow: that all they ship compiles and fits.

What they compute is tested in test_hopper_decode_interpreted.py (``make triton``) and, on a card, in tests/gpu.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import driver_stand_in
from attnscope.device import Device
from attnscope.implementations.hopper import decode
from attnscope.implementations.hopper.decode import SPLITS, TILES, Tile, choose, fits, predicted_us, tiles_for
from attnscope.implementations.triton_fused import interpreting
from attnscope.suites import SUITES
from attnscope.trace import explain_name
from attnscope.workload import Workload
from test_triton_fused import Driver, spilled_bytes

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
    for options in ("", ",causal=bottom_right,window=100,softcap=20,alibi,lengths=4096/7"):
        first, *combine = compiled(f"B2,H{rows}/1,L1,S4096,D{dim},bf16{options}", tile=tile, splits=4)
        assert first.name == "hopper_attention_decode" and [k.name for k in combine] == [f"{first.name}_combine"]
        assert [spilled_bytes(kernel, tmp_path) for kernel in (first, *combine)] == [0, 0]
        assert tile.resident * (first.metadata.shared + 1024) <= SHARED_BYTES


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
    first, combine = compiled("B2,H8/2,L1,S4096,D128,bf16,sinks,alibi,lengths=4096/7", splits=4)
    aligned = {name for name in ("q", "k", "v", "lengths", "slopes", "sinks") if _is_aligned(first, name)}
    assert aligned == {"q", "k", "v"} and not _is_aligned(combine, "sinks")


def _is_aligned(kernel: Any, argument: str) -> bool:
    """Whether the kernel was compiled for an argument that begins at a multiple of 16 bytes."""
    return bool(kernel.src.attrs.get((kernel.src.fn.arg_names.index(argument),)))
