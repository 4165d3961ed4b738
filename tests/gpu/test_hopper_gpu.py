"""hopper on a Hopper card: every claim of its sheet in 16 bits, what a call costs, streams, threads, graphs, sizes.

``pytest -m gpu -n 4 tests/gpu/test_hopper_gpu.py``. Nearly all of the time goes into compiling, some seconds for each
combination of options: tests are cut so that each combination belongs to one of them, and each tells all its failures
at once. What hopper_cuda and the decoding kernel share with it is asked of them, too; their own files ask the rest.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sanitize_hopper
import torch

from attnscope.device import Device
from attnscope.faults import run_probes
from attnscope.guards import SPIN_CYCLES
from attnscope.implementation import find
from attnscope.implementations.hopper import PreparedHopper
from attnscope.implementations.hopper.decode import DecodeKernel
from attnscope.inputs import make_inputs
from attnscope.reference import compute_attention
from attnscope.strides import restride
from attnscope.workload import Workload
from card_contract import (
    SPOILS,
    Spoilt,
    allocated_by,
    checked,
    complaints,
    differing,
    filled,
    is_claimed,
    last_rows,
    misjudged,
    no_synchronising,
    output_bytes,
    refill,
    run_in_threads,
    unmasked_attention,
)
from racecheck import disassemble, switch_of, unexplained
from test_contract import every_other, names_that_ran

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),  # torch's, of what it cannot see
]
OURS = ("hopper", "hopper_cuda")
DECODING = "B2,H32/8,L1,S5000,D128,bf16"
PREFILL = "B2,H8/2,L300,D128,bf16,causal"
CALLS = {"hopper": (PREFILL, DECODING), "hopper_cuda": (PREFILL,)}
CASES = [(name, text) for name, texts in CALLS.items() for text in texts]
GIB = 2**30


@pytest.fixture(autouse=True)
def on_hopper(gpu: Device) -> None:
    if reasons := find("hopper").reasons_unsupported(Workload.parse(PREFILL), gpu):
        pytest.skip("; ".join(reasons))


def parsed(texts: str) -> list[Workload]:
    """Workloads with spaces between; read when tests are collected, so that a wrong spelling shows without a card."""
    return [Workload.parse(text) for text in texts.split()]


def passes(name: str, workloads: Sequence[Workload], gpu: Device, **options: Any) -> None:
    found = complaints(find(name), workloads, gpu, **options)
    assert not found, "\n".join(found)


# --- compute-sanitizer (first, so that it runs beside the rest) -------------------------------------------------------


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.timeout(600)
def test_the_sanitizers_find_nothing(gpu: Device) -> None:
    """memcheck, racecheck, initcheck and synccheck at once, after a run without them that fills the caches.

    Nothing but what racecheck says of the bytes by which Triton tells warps their part; see racecheck.py.
    """
    script = [sys.executable, str(Path(__file__).with_name("sanitize_hopper.py"))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }  # fmt: skip
    plain = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=200)
    assert plain.returncode == 0, plain.stderr[-3000:]
    switches = {}
    for text in sanitize_hopper.PREFILL["hopper"]:
        prepared = find("hopper").prepare(Workload.parse(text), gpu)
        if isinstance(prepared, PreparedHopper):
            switches[f"hopper {text} ran"] = switch_of(disassemble(prepared.plan.compile().cubin))
    running = {}
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        limit = "1000" if tool == "racecheck" else "5"  # all races are read
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", limit]
        if tool == "memcheck":  # cuda-bindings asks the driver for functions that it lacks, no fault of a kernel
            command += ["--report-api-errors", "no"]
        running[tool] = subprocess.Popen(
            [*command, *script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    said = {}
    try:
        for tool, process in running.items():
            output = process.communicate(timeout=250)[0]
            wrong = [first_words(output)] if process.returncode else []
            if tool == "racecheck" and process.returncode == 9:  # it found some
                wrong = unexplained(output, switches)
            if output.count(" ran\n") != plain.stdout.count(" ran\n"):
                wrong.append(first_words(output))
            if wrong:
                said[tool] = "\n".join(wrong)
    finally:
        for process in running.values():
            process.kill()
    assert not said, "\n\n".join(f"{tool}:\n{words}" for tool, words in said.items())


def first_words(output: str) -> str:
    """The first error that a sanitizer printed, and its last lines."""
    lines = output.splitlines()
    errors = [at for at, line in enumerate(lines) if re.match(r"=+ \w", line) and "COMPUTE-SANITIZER" not in line]
    first = min(errors, default=0)
    return "\n".join([*lines[first : first + 25], "...", *lines[-8:]])


# --- the grid: a test for each combination that is compiled -----------------------------------------------------------

HEADS = ("B2,H4", "B1,H8/2", "B2,H6/1")
DIMS = {"D64": ("D64",), "D128": ("D80", "D96", "D128"), "D256": ("D192,Dv128", "D256")}
SIZES = ("L300", "L200,S333", "L333,S130")
MASKS = ("", ",causal", ",causal=bottom_right")
HALF = [("D64", ",causal"), ("D128", ""), ("D256", ",causal=bottom_right")]  # in fp16, too
GRID = [(block, "bf16", mask) for block in DIMS for mask in MASKS] + [(block, "fp16", mask) for block, mask in HALF]


def of_the_grid(block: str, dtype: str, mask: str) -> list[Workload]:
    shapes = zip(HEADS, SIZES, strict=True)
    return parsed(" ".join(f"{heads},{size},{dims},{dtype}{mask}" for heads, size in shapes for dims in DIMS[block]))


@pytest.mark.parametrize(("block", "dtype", "mask"), GRID)
def test_head_dims_heads_and_causal_masks(block: str, dtype: str, mask: str, gpu: Device) -> None:
    passes("hopper", of_the_grid(block, dtype, mask), gpu)


@pytest.mark.parametrize("block", DIMS)
def test_whole_tiles_without_a_mask(block: str, gpu: Device) -> None:
    dims = DIMS[block][0]
    passes("hopper", parsed(f"B1,H4/2,L512,{dims},bf16 B1,H4/2,L256,S1024,{dims},bf16"), gpu)


@pytest.mark.parametrize("mask", ["", ",causal"])
def test_hopper_cuda_with_unequal_head_dims(mask: str, gpu: Device) -> None:
    passes("hopper_cuda", parsed(" ".join(f"{heads},L300,D192,Dv128,bf16{mask}" for heads in HEADS)), gpu)


# Options: as few combinations as name each alone and all that touch each other.
OPTIONS = {
    "window": parsed("B2,H4/2,L333,D96,bf16,window=50 B1,H2,L500,S100,D80,bf16,window=5"),
    "causal window": parsed("B2,H4,L400,D64,bf16,window=100,causal B1,H4/1,L300,D64,bf16,window=1,causal,layout=blhd"),
    "causal window, bottom right": parsed("B1,H2,L400,S300,D64,bf16,window=20,causal=bottom_right"),
    "softcap": parsed("B2,H4,L300,D128,fp16,softcap=2 B1,H4/2,L200,S333,D96,fp16,softcap=30,scale=0.3"),
    "alibi": parsed("B1,H12,L300,D64,bf16,alibi B2,H4/2,L200,S333,D64,bf16,alibi"),
    "causal alibi": parsed("B2,H8,L300,S333,D128,bf16,alibi,causal=bottom_right"),
    "sinks": parsed("B2,H4/2,L300,D64,bf16,sinks,causal B1,H3,L129,D64,bf16,sinks,causal,layout=qkv"),
    "packed": parsed("H4/2,D128,bf16,packed=100/65/0/1/130/64 H2,D80,bf16,packed=333"),
    "causal packed": parsed("H4,D64,fp16,causal,packed=100/65/0/1/130 H4/1,D64,fp16,causal,packed=1/1/200,layout=blhd"),
    "lengths": parsed("B4,H4/2,L200,S190,D128,bf16,lengths=190/7/0/64 B2,H2,L100,S333,D96,bf16,lengths=333/1"),
    "causal lengths": parsed("B4,H2,L200,S190,D64,bf16,lengths=190/7/0/64,causal=bottom_right,sinks"),
    "scale": parsed("B1,H2,L150,D64,bf16,scale=-0.2 B1,H2,L150,S99,D64,bf16,scale=0"),
    "all": parsed("B2,H6/3,L333,S300,D192,Dv128,fp16,window=70,causal=bottom_right,softcap=9,alibi,sinks,lengths=65/0"),
    "mask": parsed("B2,H4/2,L300,S333,D64,bf16,mask=bool B2,H4,L200,D64,bf16,mask=bool:1x1xLxS"),
    "causal mask": parsed("B2,H4,L300,D128,bf16,mask=bool:BxHxLxS,causal"),
    "padding mask": parsed("B3,H4/2,L300,D128,bf16,mask=bool:Bx1x1xS"),
    "bias": parsed("B2,H4/2,L300,S333,D64,bf16,bias=bf16:BxHxLxS B2,H4,L300,D64,bf16,bias=bf16:1xHxLxS"),
    "causal bias": parsed("B2,H4,L300,D128,bf16,bias=bf16:Bx1xLxS,causal"),
    "fp32 bias": parsed("B2,H4,L300,S200,D64,bf16,bias=fp32:1xHxLxS"),
    "bias of one row, column": parsed("B2,H4,L300,D64,bf16,bias=bf16:1xHx1xS B2,H4,L300,D64,bf16,bias=bf16:Bx1xLx1"),
    "mask and bias": parsed("B2,H4/2,L200,S333,D128,fp16,bias=fp16:1xHxLxS,mask=bool,causal=bottom_right"),
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str, gpu: Device) -> None:
    passes("hopper", OPTIONS[option], gpu)


EDGES = parsed(
    "B2,H4/2,L0,S65,D64,bf16 B2,H4,L65,S0,D64,bf16 B2,H4,L65,S0,D64,bf16,sinks B0,H2,L65,D64,bf16 "
    "B1,H2,L0,S0,D64,bf16 B2,H4/2,L1,S1,D64,bf16 B2,H4/2,L1,S0,D64,bf16 B2,H2,L1,S333,D64,bf16 "
    "B1,H2,L333,S1,D64,bf16 B1,H2,L65,S64,D64,bf16 B1,H2,L127,S129,D64,bf16 B1,H2,L64,S1000,D64,bf16 "
    "B1,H2,L1000,S63,D64,bf16"
)


def test_no_row_one_row_no_key_one_key(gpu: Device) -> None:
    passes("hopper", EDGES, gpu)


UNSEEN = {
    "above": parsed("B2,H4,L300,S100,D64,bf16,causal=bottom_right B1,H4/2,L129,S1,D64,bf16,causal=bottom_right"),
    "lengths": parsed("B4,H4/2,L200,S190,D128,bf16,lengths=0/190/0/1 B2,H8/2,L1,S190,D128,bf16,lengths=0/190"),
    "window": parsed("B1,H2,L500,S100,D80,bf16,window=5"),
}


@pytest.mark.parametrize("way", UNSEEN)
def test_rows_that_see_no_key(way: str, gpu: Device) -> None:
    """out is 0 and lse -inf exactly, as the check has it; on every kind of inputs, since 0 * large is where NaN is."""
    passes("hopper", UNSEEN[way], gpu, kinds=("plain", "large", "shifted", "peaky"))


@pytest.mark.parametrize("text", ["B2,H4,L300,D64,bf16,mask=bool", "B2,H4/2,L200,S333,D128,bf16,mask=bool,causal"])
def test_rows_and_tiles_that_a_mask_hides(text: str, gpu: Device) -> None:
    implementation, workload = find("hopper"), Workload.parse(text)
    if not is_claimed(implementation, workload, gpu):
        pytest.skip("claims no mask")
    inputs = make_inputs(workload, gpu)
    inputs.mask[..., 3, :] = False
    inputs.mask[..., 64:192, :] = False  # a whole tile of rows
    inputs.mask[..., :, 0:130] = False  # the first tile of keys, of every row
    assert not (found := misjudged(implementation, implementation.prepare(workload, gpu), inputs, gpu)), found


# --- tensors where they lie -------------------------------------------------------------------------------------------

PLACES = [
    ("B2,H8/2,L300,D128,bf16,causal", ("plain", "wide", "rows", "heads")),
    ("B2,H8/2,L300,D128,bf16,causal,layout=blhd", ("plain", "wide", "rows", "heads")),
    ("B2,H8,L300,D128,bf16,causal,layout=qkv", ("plain",)),
    ("B2,H8/2,L3,S700,D128,bf16", ("plain", "wide", "rows", "heads")),
    ("B2,H8/2,L3,S700,D128,bf16,layout=blhd", ("plain", "wide", "rows", "heads")),
]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("text", "ways"), PLACES)
def test_inputs_are_read_in_place_and_outputs_have_the_callers_layout(
    name: str, text: str, ways: Sequence[str], gpu: Device
) -> None:
    """No copy: only kernels of the sheet's family run, and nothing but outputs (and a second kernel's parts) is
    allocated."""
    implementation, workload = find(name), Workload.parse(text)
    prepared, family = implementation.prepare(workload, gpu), implementation.sheet.kernels["cuda"]
    for way in ways:
        assert (result := checked(implementation, workload, gpu, strides=way)).passed, f"{way}: {result.message}"
        inputs = restride(make_inputs(workload, gpu), way)
        out = prepared.forward(inputs).out
        assert out.transpose(1, 2).is_contiguous() == (workload.layout != "bhld"), way
        seen = names_that_ran(prepared, inputs, "forward", gpu)
        strangers = [kernel for kernel in seen if not any(re.search(pattern, kernel) for pattern in family)]
        assert seen and not strangers, (way, strangers)
        made = allocated_by(lambda inputs=inputs: prepared.forward(inputs))[0]
        assert made == 2 + bool(bytes_of_parts(prepared, workload)), way


def bytes_of_parts(prepared: Any, workload: Workload) -> int:
    """What decoding allocates in a call where a second kernel adds up."""
    if not isinstance(prepared, DecodeKernel) or prepared.splits == 1 or prepared.joined:
        return 0
    return 4 * workload.B * workload.H * workload.L * prepared.splits * (workload.D_v + 1)


@pytest.mark.parametrize(("name", "text"), CASES)
def test_tensors_that_cannot_be_read_in_place_are_right_all_the_same(name: str, text: str, gpu: Device) -> None:
    implementation, workload = find(name), Workload.parse(text)
    prepared = implementation.prepare(workload, gpu)
    assert (result := checked(implementation, workload, gpu, strides="expanded")).passed, result.message

    def off_by_8_bytes(tensor):
        wide = tensor.new_full((*tensor.shape[:3], tensor.shape[3] + 8), float("nan"))
        wide[..., 4:-4] = tensor
        return wide[..., 4:-4]

    for change in (every_other, off_by_8_bytes, lambda t: t.mT.contiguous().mT):
        inputs = make_inputs(workload, gpu)
        inputs.q, inputs.k, inputs.v = (change(t) for t in (inputs.q, inputs.k, inputs.v))
        assert not (found := misjudged(implementation, prepared, inputs, gpu)), found


# --- what a call does besides -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_call_allocates_its_outputs_and_nothing_else(name: str, text: str, gpu: Device) -> None:
    workload = Workload.parse(text)
    prepared, inputs = find(name).prepare(workload, gpu), make_inputs(workload, gpu)
    for _ in range(3):
        prepared.forward(inputs)
    count, asked, segments = allocated_by(lambda: prepared.forward(inputs))
    parts = bytes_of_parts(prepared, workload)
    assert (count, asked, segments) == (2 + bool(parts), output_bytes(workload) + parts, 0)


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_call_waits_for_nothing(name: str, text: str, gpu: Device) -> None:
    """Queued behind a spin it returns while the spin runs, at addresses that it knows and at new ones."""
    workload = Workload.parse(text)
    prepared, inputs = find(name).prepare(workload, gpu), [make_inputs(workload, gpu, seed) for seed in range(4)]
    spare = [prepared.forward(inputs[0]) for _ in range(8)]  # blocks for what follows: cudaMalloc may wait
    del spare
    torch.cuda.synchronize()
    ended = torch.cuda.Event()
    with no_synchronising():
        torch.cuda._sleep(600_000_000)  # about 0.3 s
        ended.record()
        kept = [prepared.forward(one) for one in (*inputs, *inputs)]
        assert not ended.query(), "the calls waited for what was queued before them"
    torch.cuda.synchronize()
    assert all(not differing(again, first) for again, first in zip(kept[4:], kept[:4], strict=True))


@pytest.mark.parametrize(
    ("name", "text"), [*CASES, ("hopper", "B4,H16,L1000,D64,bf16"), ("hopper", "B1,H4,L900,D256,bf16,causal"),
                       ("hopper", "H8,D64,bf16,causal,packed=300/212/0/512")],
)  # fmt: skip
def test_twenty_calls_give_equal_bits_beside_a_busy_stream(name: str, text: str, gpu: Device) -> None:
    result = checked(find(name), Workload.parse(text), gpu, kinds=("plain",), repeat=True)
    assert result.passed and result.deterministic == {"forward": True}, result.message


@pytest.mark.parametrize(("name", "text"), [*CASES, ("hopper", "B3,H4/2,L200,D64,bf16,sinks,causal")])
def test_a_graph_replays_with_new_contents(name: str, text: str, gpu: Device) -> None:
    workload = Workload.parse(text)
    prepared = find(name).prepare(workload, gpu)
    contents = [make_inputs(workload, gpu, seed) for seed in range(3)]
    expected = [prepared.forward(one) for one in contents]
    inputs = contents[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = prepared.forward(inputs)
    for number in (1, 2, 0, 2):
        refill(inputs, contents[number])
        captured.out.fill_(float("nan"))
        captured.lse.fill_(float("nan"))
        graph.replay()
        assert not differing(captured, expected[number]), f"contents {number}"


@pytest.mark.parametrize(("name", "text"), CASES)
def test_two_threads_on_two_streams(name: str, text: str, gpu: Device) -> None:
    workload = Workload.parse(text)
    prepared = find(name).prepare(workload, gpu)
    inputs = [make_inputs(workload, gpu, seed) for seed in range(2)]
    expected = [prepared.forward(one) for one in inputs]
    torch.cuda.synchronize()

    def work(number: int) -> list[str]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            outputs = [prepared.forward(inputs[(number + call) % 2]) for call in range(60)]
        stream.synchronize()
        return [
            f"thread {number}, call {call}: {name}"
            for call, output in enumerate(outputs)
            for name in differing(output, expected[(number + call) % 2])
        ]

    assert run_in_threads(2, work) == [[], []]


# --- sizes ------------------------------------------------------------------------------------------------------------


HEADS_FIRST, ROWS_FIRST = "B4,H33,L262144,D64,bf16", "B1,H33,L1048576,D64,bf16,layout=blhd"


@pytest.mark.parametrize(
    ("name", "shape"), [("hopper", HEADS_FIRST), ("hopper", ROWS_FIRST), ("hopper_cuda", ROWS_FIRST)]
)
def test_offsets_beyond_32_bits(name: str, shape: str, gpu: Device) -> None:
    """The last head's last rows lie more than 2**31 numbers in."""
    if torch.cuda.mem_get_info()[0] < 30 * GIB:
        pytest.skip("needs 30 GiB free")
    workload = Workload.parse(f"{shape},window=8,causal")
    assert workload.B * workload.H * workload.L * workload.D > 2**31
    inputs = filled(workload, gpu)
    output = find(name).prepare(workload, gpu).forward(inputs)
    truth = compute_attention(last_rows(inputs, 256), backward=False)
    error = (output.out[-1:, -1:, -256:].double() - truth.out).abs() / truth.scales["out"]
    lse_error = (output.lse[-1:, -1:, -256:].double() - truth.lse).abs()
    # the first rows of the cut miss keys before it
    assert error[:, :, 8:].max() < 1e-2 and lse_error[:, :, 8:].max() < 1e-4
    assert torch.isfinite(output.lse).all()
    del inputs, output
    torch.cuda.empty_cache()  # other processes of this run share the card


@pytest.mark.parametrize(
    "text",
    ["B700,H400/100,L17,S9,D16,bf16", "B70000,H1,L65,S3,D8,bf16", "B1,H70000,L65,S3,D8,bf16",
     "B70000,H2,L1,S3,D16,bf16", "B40000,H2/1,L1,S3,D16,bf16"],
)  # fmt: skip
def test_more_heads_than_a_grids_y(text: str, gpu: Device) -> None:
    """B * H beyond 65,535, and each of B and H; the last is the decoding kernel's."""
    workload = Workload.parse(text)
    inputs = make_inputs(workload, gpu)
    output, (out, lse) = find("hopper").prepare(workload, gpu).forward(inputs), unmasked_attention(inputs)
    assert (output.out.float() - out).abs().max() < 0.04  # values of up to 5, rounded to 8 bits
    assert (output.lse - lse).abs().max() < 1e-3


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_no_reported_fault_is_there(name: str, gpu: Device) -> None:
    records = run_probes(gpu, [name])
    assert any(record.outcome == "absent" for record in records)
    seen = [f"{record.id}: {record.detail}" for record in records if record.outcome == "observed"]
    assert not seen, "\n".join(seen)


@pytest.mark.parametrize("text", [PREFILL.replace(",causal", ""), DECODING])
@pytest.mark.parametrize("way", SPOILS)
def test_what_is_spoilt_does_not_pass(way: str, text: str, gpu: Device) -> None:
    """The check of all tests above, on the same kernels with one thing wrong."""
    spoilt = Spoilt(find("hopper"), way)
    result = checked(spoilt, Workload.parse(text), gpu, repeat=way == "not deterministic", spin_cycles=SPIN_CYCLES)
    assert not result.passed
