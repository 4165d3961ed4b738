"""The check on a GPU: what only a GPU can get wrong, and that real implementations pass."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from attnscope import guards
from attnscope.checking import ReferenceCache, check_implementation
from attnscope.device import find_device
from attnscope.implementation import find, names
from attnscope.implementations.sdpa import SdpaFlash
from attnscope.inputs import make_inputs
from attnscope.workload import Workload
from card_contract import told_of_each
from saboteurs import FULL, GROUPED, HALF, PLAIN, STYLES, Tiled, all_mutants

pytestmark = [
    pytest.mark.gpu,
    # autograd's thread makes its own context on first use, and torch says so
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]
BLOG = "B8,H16,L1024,D64,bf16,causal"


class OnAnotherStream(SdpaFlash):
    """Flash on a stream that waits for nobody (``waits_first``: only at its start), and nobody waits for it."""

    name = "another_stream"

    def __init__(self, waits_first: bool) -> None:
        self.waits_first = waits_first

    def prepare(self, workload, device):
        inner, stream, waits_first = super().prepare(workload, device), torch.cuda.Stream(), self.waits_first

        class Prepared:
            def elsewhere(self, call):
                if waits_first:
                    stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    return call()

            def forward(self, inputs, *, save=False):
                return self.elsewhere(lambda: inner.forward(inputs, save=save))

            def backward(self, inputs, saved):
                return self.elsewhere(lambda: inner.backward(inputs, saved))

        return Prepared()


@pytest.mark.parametrize("waits_first", [False, True])
def test_another_stream_is_found_out(gpu, waits_first):
    # quick to launch: all of it is queued before the spin of the first stream ends
    result = check_implementation(OnAnotherStream(waits_first), Workload.parse(BLOG), gpu)
    assert not result.passed


def test_fresh_memory_is_nan(gpu):
    inputs = make_inputs(Workload.parse(BLOG), gpu)
    freed = [torch.zeros_like(inputs.q) for _ in range(2)]
    del freed
    with guards.poisoned_memory(inputs):
        fresh = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:3], device=inputs.q.device)
    assert all(tensor.isnan().all() for tensor in fresh)


def test_poisoning_again_and_again_takes_no_more_memory(gpu):
    inputs = make_inputs(Workload.parse(BLOG), gpu)

    def reserved() -> int:
        with guards.poisoned_memory(inputs):
            torch.empty_like(inputs.q)
        return torch.cuda.memory_reserved(gpu.index)

    first = reserved()
    assert [reserved() for _ in range(20)] == [first] * 20


@pytest.mark.parametrize("row", [0, 63, -1])
def test_an_unwritten_row_is_found_out(gpu, row):
    def hook(result, **_):
        fresh = torch.empty_like(result.out)
        keep = [i for i in range(result.out.shape[2]) if i != row % result.out.shape[2]]
        fresh[:, :, keep] = result.out[:, :, keep]
        return dataclasses.replace(result, out=fresh)

    result = check_implementation(Tiled(hooks={"output": hook}), Workload.parse("B2,H8,L256,D64,bf16,causal"), gpu)
    assert not result.passed  # what lies there may be NaN, or what an earlier step of the same call left


@pytest.mark.parametrize("text", [PLAIN, FULL, HALF, GROUPED])
def test_right_kernels_pass(gpu, text):
    cache = ReferenceCache()
    for name, style in STYLES.items():
        result = check_implementation(Tiled(style, deterministic=False), Workload.parse(text), gpu, cache=cache)
        assert result.grade == "tight", f"{name}: {result.message}"


def test_a_sample_of_the_saboteurs_is_killed(gpu):
    mutants = [m for m in all_mutants() if m.workload in (PLAIN, FULL, HALF, GROUPED) and "seed" not in m.name][::5]
    cache = ReferenceCache()
    left = []
    for mutant in sorted(mutants, key=lambda m: m.workload):
        workload = Workload.parse(mutant.workload)
        if check_implementation(mutant.implementation(), workload, gpu, cache=cache, quick=True).passed:
            left.append(str(mutant))
    assert len(left) <= 0.01 * len(mutants), left


@pytest.mark.parametrize(
    "text",
    [
        BLOG, "B2,H8,L1000,D128,fp16,causal", "B2,H8/2,L129,S500,D64,bf16", "B1,H4,L512,D64,fp32",
        "B2,H4,L65,D64,bf16", "B8,H32/8,L1,S4096,D128,bf16", "B2,H4,L300,D64,bf16,bias=bf16:1xHxLxS",
    ],
)  # fmt: skip
def test_real_implementations_pass(gpu, text):
    chosen = [find(name) for name in names("all") if "compiled" not in name]
    passed, failed = told_of_each(chosen, Workload.parse(text), gpu)
    assert len(passed) >= 3 and not failed, "\n".join(["", "FAILED", *failed, "passed", *passed])


@pytest.mark.serial
def test_checking_the_article_s_workload_takes_less_than_a_second(gpu):
    workload, cache = Workload.parse(BLOG), ReferenceCache()
    flash = find("sdpa_flash")
    prepared = flash.prepare(workload, gpu)
    check_implementation(flash, workload, gpu, prepared=prepared, cache=cache)
    started = time.perf_counter()
    assert check_implementation(flash, workload, gpu, prepared=prepared, cache=cache).passed
    assert time.perf_counter() - started < 1.0


def test_the_same_seed_gives_the_same_verdict(gpu):
    workload = Workload.parse("B2,H4,L200,D64,bf16,causal")
    first, second = (check_implementation(find("sdpa_math"), workload, find_device("cuda")) for _ in range(2))
    assert first.factor == pytest.approx(second.factor, rel=0.5) and first.passed and second.passed
