"""hopper's bool masks and biases on a card of 9.0: right for every shape and dtype, skipped tiles, strides, graphs.

``pytest -m gpu tests/gpu/test_hopper_masked_gpu.py``. Compiling takes some seconds for each combination of options,
once: Triton keeps kernels on disk. A kernel that hangs is ended by pytest's timeout.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from attnscope import driver
from attnscope.budgets import expect
from attnscope.device import Device
from attnscope.guards import poisoned_memory
from attnscope.implementation import Prepared, find
from attnscope.implementations.hopper import Hopper, kernel_arguments
from attnscope.implementations.hopper.entries import Entry
from attnscope.inputs import INPUT_KINDS, Inputs, make_inputs
from attnscope.judging import judge
from attnscope.reference import compute_attention
from attnscope.workload import Workload
from hopper_probes import ELEMENTS, KEYS, ROWS, compile_probe

pytestmark = pytest.mark.gpu
PATTERNS = ["x".join(letters) for letters in itertools.product("B1", "H1", "L1", "S1")]


@pytest.fixture(scope="module", autouse=True)
def hopper_card(gpu: Device) -> None:
    if gpu.capability != (9, 0):
        pytest.skip("needs compute capability 9.0")


def failures(prepared: Prepared, inputs: Inputs) -> list[str]:
    """What the project's judge says against out and lse of one forward, and of rows that see no key."""
    with poisoned_memory(inputs):
        output = prepared.forward(inputs)
    expected = expect(inputs, "fp32")
    found = [c.message for c in judge({"out": output.out, "lse": output.lse}, expected, inputs.kind) if not c.passed]
    dead = expected.truth["lse"] == -torch.inf
    if output.out[dead].any() or not torch.equal(dead, output.lse == -torch.inf):
        found.append("a row that sees no key must give 0 and -inf")
    return found


@pytest.mark.parametrize("option", ["mask=bool", "bias=bf16", "bias=fp16", "bias=fp32"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_broadcast_shape(option: str, dim: int, gpu: Device) -> None:
    found = []
    for number, pattern in enumerate(PATTERNS):
        size = ("L300,S333", "L300,S512")[number % 2]
        workload = Workload.parse(f"B2,H4/2,{size},D{dim},bf16,{option}:{pattern}")
        prepared = find("hopper").prepare(workload, gpu)
        for kind in INPUT_KINDS[number % 2 :: 2]:
            inputs = make_inputs(workload, gpu, number, kind)
            found += [f"{workload} {kind}: {message}" for message in failures(prepared, inputs)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "B2,H4/2,L165,S400,D64,bf16,mask=bool:Bx1xLxS,bias=bf16:1xHxLxS,causal=bottom_right,sinks",
        "B3,H2,L300,S490,D128,fp16,lengths=490/7/0,mask=bool:1x1xLxS,causal=bottom_right",
        "B3,H2,L300,S490,D64,bf16,lengths=490/7/0,bias=fp32:1x1xLxS,sinks",
        "H4/2,D64,bf16,causal,packed=300/165/0/1/130,mask=bool:1xHxLxS",
        "H2,D128,bf16,packed=300/165/0/1/130,bias=fp16:1xHxLxS",
        "B2,H2,L390,S400,D80,Dv40,fp16,alibi,softcap=5,bias=bf16:Bx1xLxS,mask=bool:Bx1x1xS,window=140",
        "B2,H2,L290,D256,fp16,alibi,mask=bool:1x1xLxS,causal=bottom_right,lengths=290/150,layout=blhd",
        "B1,H2,L350,D64,bf16,scale=-0.2,mask=bool:1x1xLxS,bias=fp32:1x1xLx1",
        "B1,H8/2,L1,S700,D128,bf16,mask=bool:1x1x1xS",
        "B1,H8,L2,S1300,D64,bf16,bias=bf16:1xHxLxS",
        "B3,H6/2,L1300,S1304,D64,bf16,bias=bf16:1xHxLxS",
        "B5,H4/1,L700,S800,D128,fp16,bias=fp16:1xHxLxS,softcap=9,layout=blhd",
        "B3,H4/2,L520,S900,D256,bf16,bias=bf16:1xHxLxS,mask=bool:1xHxLxS,causal=bottom_right",
        "B3,H5,L1000,D64,fp16,bias=fp16:Bx1xLxS",
        "B4,H12,L512,D64,bf16,layout=qkv,causal,bias=bf16:1xHxLxS",
    ],
)
def test_with_every_other_option(text: str, gpu: Device) -> None:
    workload = Workload.parse(text)
    prepared = find("hopper").prepare(workload, gpu)
    found = [message for kind in INPUT_KINDS for message in failures(prepared, make_inputs(workload, gpu, 1, kind))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("option", ["mask=bool:1x1xLxS", "bias=bf16:Bx1xLxS", "bias=fp32:1xHxLxS"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_candidate_agrees(head_dim: int, option: str, gpu: Device) -> None:
    workload = Workload.parse(f"B4,H8/2,L1104,D{head_dim},bf16,layout=blhd,{option}")
    inputs = make_inputs(workload, gpu, 2)
    found = []
    for configuration in Hopper().candidates(workload, gpu):
        prepared = Hopper().prepare_as(workload, gpu, configuration)
        found += [f"{configuration}: {message}" for message in failures(prepared, inputs)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("bias", ["bf16", "fp32"])
@pytest.mark.parametrize("dims", ["L300,S304,D256", "L2048,D256", "L2048,D128", "L2048,D64"])
def test_a_tile_of_a_bias_is_not_overwritten_before_it_is_read(dims: str, bias: str, gpu: Device) -> None:
    """One slot a group: the next tile arrives as soon as the slot is given back. Twenty calls agree to the bit."""
    workload = Workload.parse(f"B2,H8/2,{dims},bf16,bias={bias}:1x1xLxS")
    gluon = Hopper().candidates(workload, gpu)[0].gluon
    prepared = Hopper().prepare_as(workload, gpu, Entry(replace(gluon, bias_slots=1)))
    inputs = make_inputs(workload, gpu, 3)
    assert not failures(prepared, inputs)
    first = prepared.forward(inputs)
    again = [prepared.forward(inputs) for _ in range(20)]
    assert all(torch.equal(one.out, first.out) and torch.equal(one.lse, first.lse) for one in again)


def test_rows_that_a_mask_empties_and_tiles_that_it_skips(gpu: Device) -> None:
    workload = Workload.parse("B2,H3,L1000,S1500,D64,bf16,mask=bool:Bx1xLxS")
    prepared, inputs = find("hopper").prepare(workload, gpu), make_inputs(workload, gpu)
    assert inputs.mask is not None
    inputs.mask[0, :, :, 256:900] = False
    inputs.mask[1, :, 100:700] = False
    inputs.mask[0, :, :, 1024:1280] = True
    inputs.k[0, :, 256:896] = float("nan")  # tiles that nobody sees are not read
    inputs.v[0, :, 256:896] = float("nan")
    output = prepared.forward(inputs)
    inputs.k.nan_to_num_()
    inputs.v.nan_to_num_()
    truth = compute_attention(inputs, backward=False)
    assert (output.out.double() - truth.out).abs().max().item() < 2e-2
    assert torch.equal(output.lse == -torch.inf, truth.lse == -torch.inf)
    assert not output.out[1, :, 100:700].any()
    inputs.mask[:] = False
    output = prepared.forward(inputs)
    assert not output.out.any() and (output.lse == -torch.inf).all()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("hides", [True, False])
def test_a_bias_as_large_as_numbers_go(hides: bool, dtype: str, dim: int, gpu: Device) -> None:
    """-inf hides; a row of the least finite number sees every key alike."""
    workload = Workload.parse(f"B1,H2,L300,D{dim},bf16,bias={dtype}:1x1xLxS")
    prepared, inputs = find("hopper").prepare(workload, gpu), make_inputs(workload, gpu)
    assert inputs.bias is not None
    value = -torch.inf if hides else torch.finfo(inputs.bias.dtype).min
    inputs.bias[..., :70, :] = value
    inputs.bias[..., 70:90, 64:] = value
    output, truth = prepared.forward(inputs), compute_attention(inputs, backward=False)
    uniform = inputs.v.double().mean(-2, keepdim=True).expand(1, 2, 70, dim)
    expected = torch.zeros_like(uniform) if hides else uniform  # the scores are below one unit there
    assert (output.out[..., :70, :].double() - expected).abs().max().item() < 1e-2
    assert (output.out[..., 70:, :].double() - truth.out[..., 70:, :]).abs().max().item() < 2e-2
    assert output.lse.isfinite().all() == (not hides)


def run_probe(name: str, gpu: Device, blocks: int, *tensors: torch.Tensor) -> None:
    """One of the small kernels of ``hopper_probes.py`` on tensors, in its order."""
    machine = compile_probe(name)
    handle = driver.load(machine.cubin, machine.name, machine.shared_bytes, gpu.index)
    function = driver.Function(machine.name, handle, (blocks, 1, 1), machine.threads, machine.shared_bytes)
    arguments = kernel_arguments([tensor.data_ptr() for tensor in tensors], [])
    driver.Launches(gpu.index).start(name, (function, arguments))
    torch.cuda.synchronize()


@pytest.mark.parametrize(("probe", "dtype"), [("widened", torch.bfloat16), ("widened_fp16", torch.float16)])
def test_every_number_of_16_bits_is_widened_to_itself(probe: str, dtype: torch.dtype, gpu: Device) -> None:
    bits = torch.randperm(2**16, device=gpu.torch_name)
    given = bits.to(torch.int16).view(dtype)
    found = torch.full((2**16,), 7.0, device=gpu.torch_name)
    run_probe(probe, gpu, 2**16 // ELEMENTS, given, found)
    assert torch.equal(found.isnan(), given.isnan())
    assert torch.equal(found[~found.isnan()], given.float()[~given.isnan()])
    if dtype == torch.bfloat16:  # NaN by its bits too
        assert torch.equal(found.view(torch.int32), (bits << 16).to(torch.int32))


def test_bounds_hide_what_lies_beyond_them_and_change_nothing_else(gpu: Device) -> None:
    """Scores of any bits, NaN among them; limits far beyond the tile."""
    limits = torch.tensor([*range(-9, 140), -(2**30), -(2**29) - 1, 2**29, 2**30], dtype=torch.int32)
    tiles = 3 * -(-len(limits) // ROWS)
    high = limits.repeat(tiles * ROWS // len(limits) + 1)[: tiles * ROWS].to(gpu.torch_name)
    low = high.roll(5)
    scores = torch.randint(-(2**31), 2**31, (tiles * ROWS, KEYS), device=gpu.torch_name).to(torch.int32)
    found = torch.zeros_like(scores)
    run_probe("hidden", gpu, tiles, scores, low, high, found)
    column = torch.arange(KEYS, device=gpu.torch_name)
    seen = (column >= low[:, None]) & (column < high[:, None])
    assert torch.equal(found, torch.where(seen, scores, torch.tensor(-(2**23), dtype=torch.int32, device=seen.device)))


def test_strided_and_expanded_options(gpu: Device) -> None:
    found = []
    for option in ("mask=bool:BxHxLxS", "bias=bf16:BxHxLxS"):
        workload = Workload.parse(f"B2,H3,L270,S330,D64,bf16,{option}")
        inputs = make_inputs(workload, gpu, 4)
        prepared = find("hopper").prepare(workload, gpu)
        given = inputs.mask if inputs.mask is not None else inputs.bias
        assert given is not None
        turned = given.transpose(1, 3).contiguous().transpose(1, 3)
        for made in (given[:1, :1].expand_as(given), turned, given[:, :, :1].expand_as(given)):
            changed = replace(inputs, **{"mask" if inputs.mask is not None else "bias": made})
            for _ in range(2):  # the second from what was kept
                output, truth = prepared.forward(changed), compute_attention(changed, backward=False)
                worst = (output.out.double() - truth.out).abs().max().item()
                found += [f"{option} {made.stride()}: {worst}"] * (worst > 2e-2)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("option", ["mask=bool:Bx1xLxS", "bias=bf16:1xHxLxS", "bias=bf16:BxHxLxS,mask=bool:1x1xLxS"])
def test_streams_a_graph_and_a_mask_that_changes(option: str, gpu: Device) -> None:
    workload = Workload.parse(f"B2,H8,L520,D128,bf16,{option}")
    prepared, inputs = find("hopper").prepare(workload, gpu), make_inputs(workload, gpu, 5)
    expected = prepared.forward(inputs).out.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = [prepared.forward(inputs).out for _ in range(5)]
    here = [prepared.forward(inputs).out for _ in range(5)]
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in beside + here)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = prepared.forward(inputs).out
    captured.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    for option_tensor in (inputs.mask, inputs.bias):
        if option_tensor is not None:
            option_tensor.copy_(option_tensor.flip(3))
    graph.replay()
    again = prepared.forward(inputs).out
    torch.cuda.synchronize()
    assert torch.equal(captured, again) and not torch.equal(again, expected)


# --- a queue of tiles -------------------------------------------------------------------------------------------------


def queued(text: str, gpu: Device, blocks: int, number: int = 0) -> Prepared:
    """A candidate with a queue, prepared as if the card ran ``blocks`` blocks at once."""
    workload = Workload.parse(text)
    entries = [one for one in Hopper().candidates(workload, gpu) if one.gluon.queued]
    prepared = Hopper().prepare_as(workload, replace(gpu, multiprocessors=blocks), entries[number])
    assert prepared.plan.queued  # type: ignore[attr-defined]
    return prepared


@pytest.mark.parametrize("blocks", [1, 2, 5, 131])
@pytest.mark.parametrize(
    "text",
    [
        "B4,H12/4,L1000,S700,D64,bf16,mask=bool:BxHxLxS",
        "B2,H16,L2100,D64,fp16,mask=bool:1xHxLxS,causal",
        "B3,H8,L900,S70,D128,bf16,mask=bool:Bx1xLxS,lengths=70/3/40,layout=blhd",
        "H48,D128,bf16,causal,packed=300/165/0/1/130,mask=bool:1xHxLxS",
        "B2,H16,L700,S600,D256,fp16,mask=bool:BxHxLxS",
    ],
)
def test_blocks_that_share_a_queue_compute_each_tile(text: str, blocks: int, gpu: Device) -> None:
    """More tiles than blocks by far; tiles of no key, of all keys and of one tile of keys; calls agree to the bit."""
    for number in (0, 1) if blocks == 131 and "D256" not in text else (0,):
        prepared, inputs = queued(text, gpu, blocks, number), make_inputs(Workload.parse(text), gpu, blocks)
        assert inputs.mask is not None
        inputs.mask[:, :1] = True
        inputs.mask[..., inputs.mask.shape[2] // 2 :, 64:] = False
        inputs.mask[..., -200:, :] = False
        assert not failures(prepared, inputs)
        first = prepared.forward(inputs)
        again = [prepared.forward(inputs) for _ in range(10)]
        assert all(torch.equal(one.out, first.out) and torch.equal(one.lse, first.lse) for one in again)


@pytest.mark.parametrize("blocks", [3, 131])
def test_queues_of_calls_on_two_streams_and_of_a_graph_are_their_own(blocks: int, gpu: Device) -> None:
    text = "B4,H16,L1040,D64,bf16,mask=bool:BxHxLxS"
    prepared, inputs = queued(text, gpu, blocks), make_inputs(Workload.parse(text), gpu, 6)
    expected = prepared.forward(inputs).out.clone()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    found = []
    for _ in range(10):  # both streams have work at any time
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(prepared.forward(inputs).out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[0]):
        captured = [prepared.forward(inputs).out for _ in range(3)]
    for _ in range(3):
        for out in captured:
            out.fill_(float("nan"))
        graph.replay()
        beside = prepared.forward(inputs).out
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in [*captured, beside])


def test_its_kernels_run_in_order_and_say_their_memory(gpu: Device) -> None:
    prepared = find("hopper").prepare(Workload.parse("B2,H4,L256,S512,D64,bf16,mask=bool:1x1xLxS"), gpu)
    row_tiles, groups, key_tiles = 2, 3, 4  # 192 rows and 128 keys a tile
    words, lists, kinds = row_tiles * groups * key_tiles * 256, row_tiles * (key_tiles + 1), row_tiles * key_tiles // 4
    assert prepared.workspace_bytes == 4 * (words + lists + kinds)  # type: ignore[attr-defined]
