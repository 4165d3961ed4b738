"""hopper's decode kernels in Triton's interpreter, against the project's float64 reference and its budgets.

Needs TRITON_INTERPRET=1 in the environment before triton is imported (``make triton``). Tiles are 16 x 16 there.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attnscope import driver
from attnscope.budgets import expect
from attnscope.device import Device
from attnscope.guards import poisoned_memory
from attnscope.implementations.hopper import decode, decode_kernels
from attnscope.implementations.hopper.decode import DecodeKernel
from attnscope.implementations.hopper.workspace import Workspaces
from attnscope.inputs import INPUT_KINDS, Inputs, make_inputs
from attnscope.judging import judge
from attnscope.random_workloads import Space, draw_workload
from attnscope.records import TensorCheck
from attnscope.workload import Workload
from triton_interpreter import mutated, needs_interpreter

pytestmark = needs_interpreter
WORKLOADS, CHUNK = 160, 40


def failures(kernel: DecodeKernel, inputs: Inputs) -> list[TensorCheck]:
    """What the project's judge says against out and lse of one forward, whose parts are NaN until they are written."""
    for workspace in kernel.workspaces._eager.values():
        workspace.parts.fill_(torch.nan)
    with poisoned_memory(inputs):
        output = kernel.forward(inputs)
    tensors = {"out": output.out, "lse": output.lse}
    expected = expect(inputs, "fp32")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: expected.truth[name].shape for name in tensors
    }
    return [check for check in judge(tensors, expected, inputs.kind) if not check.passed]


def counters(kernel: DecodeKernel) -> bool:
    """Whether a counter is not 0 after the calls so far."""
    return any(workspace.arrived.any() for workspace in kernel.workspaces._eager.values())


# Few rows against keys on both sides of tiles' and splits' edges, every option that the kernel takes.
SPACE = Space(
    lengths=(1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 90),
    longest=90,
    rows=(1, 1, 1, 2, 3, 5, 9),
    dims=(8, 16, 24, 40),
    dtypes=("fp16",),
    layouts=("bhld", "blhd"),
    features=decode.taken_features(),
    heads=(1, 1, 2),
    groups=(2, 3, 4),
    batches=(1, 1, 2),
)


def random_workload(seed: int) -> Workload:
    """The first that is drawn with a batch: an empty one is not for these kernels."""
    chance = random.Random(seed)
    return next(w for w in (draw_workload(chance, SPACE) for _ in range(100)) if w.B)


@pytest.mark.parametrize("first", range(0, WORKLOADS, CHUNK))
def test_random_workloads(first: int, cpu: Device) -> None:
    for seed in range(first, first + CHUNK):
        workload, splits = random_workload(seed), (1, 2, 3, 5)[seed % 4]
        inputs = make_inputs(workload, cpu, seed, INPUT_KINDS[seed // 4 % len(INPUT_KINDS)])
        kernel = DecodeKernel(workload, cpu, splits=splits, joined=seed % 8 < 6)
        found = failures(kernel, inputs)
        assert not counters(kernel)
        assert not found, f"{workload} (seed {seed}, {splits} splits): " + "; ".join(c.message for c in found)


def test_the_random_workloads_cover_every_feature_that_is_taken() -> None:
    drawn = [random_workload(seed) for seed in range(WORKLOADS)]
    for feature in decode.taken_features():
        assert sum(feature in w.features for w in drawn) >= 10, feature
    assert any(w.S == 0 for w in drawn) and any(w.L * w.group > 16 for w in drawn)


def test_a_packed_buffer_is_read_in_place(cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "copied", lambda tensor: pytest.fail("copied"))
    for text in ("B2,H2,L5,D16,fp16,causal,layout=qkv", "B1,H4/2,L2,S40,D24,fp16,layout=blhd"):
        workload = Workload.parse(text)
        assert not failures(DecodeKernel(workload, cpu, splits=2), make_inputs(workload, cpu))


def test_odd_views_are_copied_and_right(cpu: Device) -> None:
    workload = Workload.parse("B1,H2,L2,S40,D16,fp16")
    inputs = make_inputs(workload, cpu)
    buffers = {name: torch.zeros(1, 2, getattr(inputs, name).shape[2], 40, dtype=torch.float16) for name in "qkv"}
    for name, tensor in (("q", buffers["q"][..., 1:17]), ("k", buffers["k"][..., ::2][..., :16]),
                         ("v", buffers["v"][..., 8:24])):  # fmt: skip
        tensor.copy_(getattr(inputs, name))
        setattr(inputs, name, tensor)
    assert [decode.is_readable(t, 16) for t in (inputs.q, inputs.k, inputs.v)] == [False, False, True]
    kernel = DecodeKernel(workload, cpu, splits=2)
    assert not failures(kernel, inputs) and not failures(kernel, inputs)  # with and without a plan of such strides


def test_what_lies_beyond_the_real_keys_does_not_matter(cpu: Device) -> None:
    workload = Workload.parse("B2,H2,L1,S40,D16,fp16,lengths=21/0")
    inputs = make_inputs(workload, cpu)
    kernel = DecodeKernel(workload, cpu, splits=3)
    expected = kernel.forward(inputs)
    for tensor in (inputs.k, inputs.v):
        tensor[0, :, 21:] = torch.nan
        tensor[1] = torch.nan
    found = kernel.forward(inputs)
    assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)
    assert (found.out[1] == 0).all() and (found.lse[1] == -torch.inf).all()


# --- programs that end in any order ---------------------------------------------------------------------------------


def run_in_order(monkeypatch: pytest.MonkeyPatch, programs: list[tuple[int, int, int]]) -> None:
    """The next launch's programs run in this order, one after the other."""
    from triton.runtime.interpreter import interpreter_builder

    plain, turn = type(interpreter_builder).set_grid_idx.__get__(interpreter_builder), iter(programs)
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda *_: plain(*next(turn)))


@pytest.mark.parametrize("text", ["B1,H1,L1,S70,D16,fp16", "B1,H4/2,L3,S70,D16,fp16,sinks,causal=bottom_right"])
def test_whichever_program_is_last_the_bits_are_the_same(
    text: str, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload.parse(text)
    kernel, inputs = DecodeKernel(workload, cpu, splits=4), make_inputs(workload, cpu)
    programs = list(itertools.product(*map(range, kernel.grid)))
    orders = list(itertools.permutations(programs)) if workload.H == 1 else [
        random.Random(seed).sample(programs, len(programs)) for seed in range(12)
    ]  # fmt: skip
    first = kernel.forward(inputs)
    assert kernel.joined and len(orders) in (12, 24)
    for order in orders:
        run_in_order(monkeypatch, list(order))
        assert not failures(kernel, inputs) and not counters(kernel)
        run_in_order(monkeypatch, list(order))
        output = kernel.forward(inputs)
        assert torch.equal(output.out, first.out) and torch.equal(output.lse, first.lse), order


def test_one_kernel_and_two_agree(cpu: Device) -> None:
    """Also where more rows and more parts are added up than at a time."""
    workload = Workload.parse("B1,H30/2,L2,S170,D256,fp16,sinks,causal=bottom_right")
    inputs = make_inputs(workload, cpu)
    one, two = (DecodeKernel(workload, cpu, splits=11, joined=joined) for joined in (True, False))
    assert not failures(one, inputs) and not failures(two, inputs)
    at_once = one._at_once(decode.COMBINE_ROWS)
    assert at_once["ROWS_AT_ONCE"] < workload.L * workload.group and at_once["PARTS_AT_ONCE"] < one.splits


def test_workloads_share_a_workspace(cpu: Device) -> None:
    """Calls of different shapes in turn, the larger of which makes it grow."""
    texts = ("B1,H2,L1,S40,D16,fp16", "B3,H8/4,L2,S70,D24,fp16", "B1,H4/1,L1,S90,D40,fp16,sinks")
    kernels = [DecodeKernel(Workload.parse(text), cpu, splits=2 + number) for number, text in enumerate(texts)]
    for kernel in (*kernels, *reversed(kernels), *kernels):
        assert not failures(kernel, make_inputs(kernel.workload, cpu)) and not counters(kernel)


# --- the kernels, each wrong in one place -----------------------------------------------------------------------------

PLAIN, CAUSAL = "B1,H2/1,L1,S70,D16,fp16", "B1,H2/1,L5,S70,D16,fp16,causal=bottom_right"
SPREAD, MANY = "B2,H4/2,L1,S70,D16,fp16", "B1,H20/1,L1,S70,D16,fp16"
WINDOW, FULL = f"{CAUSAL},window=9", "B2,H4/2,L3,S70,D16,fp16,alibi,sinks,softcap=2,lengths=70/33"
# What is replaced, by what, and a workload on which the judge must see it.
MUTANTS = {
    "the diagonal is hidden": ("position + 1)", "position)", CAUSAL),
    "bottom right is top left": ("position += length - L", "position += 0", CAUSAL),
    "the window is a key short": ("position - window + 1)", "position - window + 2)", WINDOW),
    "the window is a key long": ("position - window + 1)", "position - window)", WINDOW),
    "padding is seen": ("length = tl.load(lengths + b)", "length = S", FULL),
    "a split loses its longer run": ("each + (split < longer).to(tl.int32)", "each", PLAIN),
    "splits overlap": ("tl.minimum(split, longer)) * KEYS", "tl.minimum(split, longer)) * KEYS - split", CAUSAL),
    "the last tile is lost": ("tiles = tl.cdiv(last - first, KEYS)", "tiles = (last - first) // KEYS", PLAIN),
    "heads of a group are swapped": ("kv * GROUP + row % GROUP", "kv * GROUP + (row + 1) % GROUP", PLAIN),
    "the sum is not rescaled": ("total * rescale + tl.sum(weights, 1)", "total + tl.sum(weights, 1)", CAUSAL),
    "out is not rescaled": ("v_tile, acc * rescale[:, None]", "v_tile, acc", CAUSAL),
    "a part is not normalised": ("acc = acc / tl.where(seen, total, 1.0)[:, None]\n        sum2", "sum2", PLAIN),
    "parts are not weighted": ("part * weights[:, :, None]", "part", PLAIN),
    "a part is forgotten": ("(split < splits)[None, :]", "(split < splits - 1)[None, :]", CAUSAL),
    "lse is of base 2": ("* 0.6931471805599453  # ln 2; -inf", "* 1.0  # ln 2; -inf", PLAIN),
    "a sink is forgotten": ("total = (top > -float(\"inf\")).to(tl.float32)", "total = total * 0", FULL),
    "the last program but one adds up": ("== splits - 1:", "== splits - 2:", PLAIN),
    "none adds up": ("== splits - 1:", "== splits:", PLAIN),
    "a counter is not reset": ("tl.store(arrived + head, 0)", "pass", PLAIN),
    "another counter is reset": ("tl.store(arrived + head, 0)", "tl.store(arrived, 0)", SPREAD),
    "heads share a counter": ("tl.atomic_add(arrived + head,", "tl.atomic_add(arrived,", SPREAD),
    "heads share parts": ("(head * splits + split) * rows", "(head * 0 + split) * rows", SPREAD),
    "rows beyond those at once are lost": ("range(0, rows, ROWS_AT_ONCE)", "range(0, 1)", MANY),
    "ALiBi is upside down": ("scores -= slope", "scores += slope", FULL),
    "ALiBi takes another head": ("tl.load(slopes + h,", "tl.load(slopes + h * 0,", FULL),
    "softcap is no cap": ("_tanh(scores / softcap)", "(scores / softcap)", FULL),
}  # fmt: skip


@pytest.fixture
def mutant(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """The kernels with one text replaced, as a module of its own."""
    old, new, _ = MUTANTS[request.param]
    module = mutated(decode_kernels, old, new, tmp_path)
    yield request.param, module
    del sys.modules[module.__name__]


@pytest.mark.parametrize("mutant", MUTANTS, indirect=True)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a wrong kernel may overflow
def test_a_wrong_kernel_is_found_out(mutant: tuple[str, Any], cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    name, module = mutant
    monkeypatch.setattr(decode, "load_kernels", module.load)
    monkeypatch.setattr(decode, "of_device", Workspaces)  # what it leaves there is no other test's
    workload = Workload.parse(MUTANTS[name][2])
    kernel, inputs = DecodeKernel(workload, cpu, splits=3, joined=True), make_inputs(workload, cpu, 0, "needles")
    assert failures(kernel, inputs) or failures(kernel, inputs)


def test_the_mutants_workloads_pass_unharmed(cpu: Device) -> None:
    for text in dict.fromkeys(text for *_, text in MUTANTS.values()):
        workload = Workload.parse(text)
        kernel, inputs = DecodeKernel(workload, cpu, splits=3, joined=True), make_inputs(workload, cpu, 0, "needles")
        assert not failures(kernel, inputs) and not failures(kernel, inputs), text
