"""cuDNN's graphs without a GPU: what a workload becomes, what is refused, what is kept; against a stand-in frontend."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from attnscope import cudnn, cudnn_plans, implementation
from attnscope.device import Device, find_device
from attnscope.errors import PrepareFailed, UsageError
from attnscope.implementations import cudnn_graph
from attnscope.implementations.cuda_ladder import LIBRARY_RUNGS, ForwardV10
from attnscope.implementations.cudnn_graph import CudnnGraph, Settings
from attnscope.inputs import make_inputs
from attnscope.ladder import workload_for
from attnscope.records import read_runs
from attnscope.workload import Workload
from cudnn_stand_in import Frontend, cudnnGraphNotSupportedError
from test_contract import every_other, problem, run_case

CPU = find_device("cpu")
HOPPER = Device("cuda", "a Hopper", capability=(9, 0))
AMPERE = Device("cuda", "an Ampere", capability=(8, 0))
TURING = Device("cuda", "a Turing", capability=(7, 5))


class HopperOfTheCpu(Device):
    """A Hopper by its facts, whose tensors lie where the stand-in computes."""

    torch_name = property(lambda self: "cpu")  # type: ignore[assignment]


HERE = HopperOfTheCpu("cuda", "a Hopper", capability=(9, 0))


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Frontend]:
    """The stand-in where ``import cudnn`` finds it, with an empty cache, and CUDA's streams and memory on the CPU."""
    made = Frontend()
    monkeypatch.setitem(sys.modules, "cudnn", made)
    monkeypatch.setattr(implementation, "missing_package", lambda requirement: None)
    monkeypatch.setattr(cudnn_plans, "PLANS", cudnn_plans.PlanCache())
    monkeypatch.setattr(cudnn_plans, "_free_handles", {})
    monkeypatch.setattr(cudnn_plans, "on_device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(cudnn_plans, "current_stream", lambda index: 7)
    monkeypatch.setattr(cudnn_plans, "capturing", lambda: False)
    monkeypatch.setattr(cudnn_plans, "scratch", lambda size, index: torch.empty(size, dtype=torch.uint8))
    yield made


# --- what a workload becomes ------------------------------------------------------------------------------------------

WORKLOADS = [
    "B2,H4,L65,D32,bf16",
    "B2,H4,L64,D64,fp16,causal",
    "B2,H4,L33,D16,bf16,causal,layout=blhd",
    "B2,H4,L33,D16,bf16,causal,layout=qkv",
    "B2,H8/2,L17,S40,D32,bf16,causal",
    "B1,H2,L40,S17,D32,bf16,causal",
    "B1,H2,L17,S40,D32,bf16,causal=bottom_right",
    "B1,H2,L40,D32,bf16,causal=bottom_right",
    "B2,H4/2,L17,S40,D32,Dv16,bf16,layout=blhd",
    "B1,H2,L40,D32,bf16,window=9",
    "B1,H2,L40,D32,bf16,window=1",
    "B1,H2,L40,D32,bf16,window=9,causal",
    "B1,H2,L17,S40,D32,bf16,window=9,causal=bottom_right",
    "B3,H2,L20,S33,D32,bf16,lengths=33/7/1",
    "B2,H4/2,L33,D32,bf16,causal,lengths=33/12",
    "B2,H2,L20,S40,D32,bf16,causal=bottom_right,lengths=40/25",
    "B2,H2,L20,S40,D32,bf16,causal=bottom_right,lengths=40/25,window=9",
    "B1,H12,L40,D32,bf16,alibi,causal",
    "B1,H2,L40,D32,bf16,alibi,causal=bottom_right",
    "B2,H4/2,L20,S33,D32,bf16,bias=bf16:BxHxLxS",
    "B2,H2,L20,D32,bf16,bias=bf16:1xHx1xS,causal",
    "B2,H2,L20,D32,bf16,bias=bf16:Bx1xLx1",
    "B1,H2,L20,D32,bf16,bias=fp32",
    "B1,H2,L20,D32,bf16,scale=0.3,causal",
    "B1,H2,L1,S40,D32,bf16",
]


@pytest.mark.parametrize("text", WORKLOADS)
def test_both_directions_are_right(frontend: Frontend, text: str) -> None:
    run_case(CudnnGraph(), *problem(Workload.parse(text), CPU), HERE)
    assert cudnn_plans.PLANS.statistics().hits > 0


@pytest.mark.parametrize("text", WORKLOADS)
def test_no_call_builds_a_plan(frontend: Frontend, text: str) -> None:
    workload = Workload.parse(text)
    prepared = CudnnGraph().prepare(workload, HERE)
    built, inputs = len(frontend.graphs), make_inputs(workload, CPU)
    prepared.forward(inputs)
    saved = prepared.forward(inputs, save=True).saved
    if not CudnnGraph().reasons_unsupported(workload, HERE, "backward"):
        prepared.backward(inputs, saved)
    assert len(frontend.graphs) == built


def test_gradients_of_a_packed_buffer_lie_in_one(frontend: Frontend) -> None:
    workload = Workload.parse("B2,H4,L33,D16,bf16,causal,layout=qkv")
    prepared, inputs = CudnnGraph().prepare(workload, HERE), make_inputs(workload, CPU)
    grads = prepared.backward(inputs, prepared.forward(inputs, save=True).saved)
    assert len({grad.untyped_storage().data_ptr() for grad in (grads.dq, grads.dk, grads.dv)}) == 1
    assert all(grad.stride() == source.stride() for grad, source in zip(
        (grads.dq, grads.dk, grads.dv), (inputs.q, inputs.k, inputs.v), strict=True))  # fmt: skip


def test_the_packed_buffer_is_read_in_place(frontend: Frontend) -> None:
    inputs = make_inputs(Workload.parse("B2,H4,L33,D16,bf16,layout=qkv"), CPU)
    for tensor in (inputs.q, inputs.k, inputs.v):
        assert cudnn.readable(tensor) is tensor


def test_what_cannot_be_loaded_is_copied() -> None:
    tensor = torch.zeros(2, 3, 5, 16, dtype=torch.bfloat16)
    assert cudnn.readable(tensor) is tensor
    odd = torch.zeros(2 * 3 * 5 * 16 + 1, dtype=torch.bfloat16)[1:].view(2, 3, 5, 16)
    rows = torch.zeros(2, 3, 5, 20, dtype=torch.bfloat16)[..., :16]
    for unreadable in (every_other(tensor), tensor[:, :1].expand(2, 3, 5, 16), tensor.transpose(2, 3), odd, rows):
        copy = cudnn.readable(unreadable)
        assert copy is not unreadable and copy.is_contiguous() and copy.data_ptr() % 16 == 0


def test_the_scale_may_be_a_tensor_and_serves_any_number(frontend: Frontend) -> None:
    settings = Settings(scale_as_tensor=True)
    for text in ("B1,H2,L20,D32,bf16,scale=0.3", "B1,H2,L20,D32,bf16"):
        inputs, truth = problem(Workload.parse(text), CPU)
        out = CudnnGraph().prepare(inputs.workload, HERE, settings).forward(inputs).out
        torch.testing.assert_close(out.double(), truth.out, atol=2e-2, rtol=2e-2)
    assert cudnn_plans.PLANS.statistics().misses == 2  # one forward and one backward for both scales


def test_inference_writes_no_statistics(frontend: Frontend) -> None:
    workload = Workload.parse("B1,H2,L20,D32,bf16,causal")
    prepared = CudnnGraph().prepare(workload, HERE, Settings(stats=False))
    inputs = make_inputs(workload, CPU)
    assert prepared.forward(inputs).lse is None
    saving = prepared.forward(inputs, save=True)
    assert saving.lse is not None
    assert prepared.backward(inputs, saving.saved).dq.shape == inputs.q.shape


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_is_deterministic_where_it_is_asked_for(frontend: Frontend, deterministic: bool) -> None:
    workload = Workload.parse("B1,H2,L20,D32,bf16,causal")
    CudnnGraph().prepare(workload, HERE, Settings(deterministic=deterministic))
    torch.use_deterministic_algorithms(deterministic)
    try:
        CudnnGraph().prepare(workload, HERE)
    finally:
        torch.use_deterministic_algorithms(False)
    asked = [g.options["use_deterministic_algorithm"] for g in frontend.graphs if "dO" in g.options]
    assert asked == [deterministic]  # the second prepare found the plan of the first


def test_dropout_goes_in_as_probability_seed_and_offset(frontend: Frontend) -> None:
    workload = Workload.parse("B1,H2,L20,D32,bf16")
    prepared = CudnnGraph().prepare(workload, HERE, Settings(dropout=0.25, seed=5, offset=6))
    for graph in frontend.graphs:
        probability, seed, offset = graph.options["dropout"]
        assert (probability, seed.name, offset.name) == (0.25, "seed", "offset")
    assert (int(prepared.seed), int(prepared.offset)) == (5, 6)
    CudnnGraph().prepare(workload, HERE, Settings(dropout=0.0))
    assert frontend.graphs[-1].options["dropout"] is None


@pytest.mark.parametrize("probability", [-0.5, 1.0, 1.5, 0.1, float("nan")])
def test_a_probability_that_cudnn_does_not_have_is_refused(probability: float) -> None:
    with pytest.raises(UsageError, match=r"dropout must be a multiple of 1/16 in \[0, 1\), got"):
        Settings(dropout=probability)


# --- the ladder's last rungs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhld", "blhd", "qkv"])
@pytest.mark.parametrize("rung", LIBRARY_RUNGS["forward"], ids=lambda rung: rung.name)
def test_the_ladders_last_rungs_are_right_step_by_step(frontend: Frontend, rung: type, layout: str) -> None:
    workload = workload_for(rung(), Workload.parse(f"B2,H3,L33,D16,fp32,causal,layout={layout}"), HERE)
    inputs, truth = problem(workload, CPU)
    prepared = rung().prepare(workload, HERE)
    built = len(frontend.graphs)
    output = prepared.new_output(inputs)
    for step in prepared.steps(inputs, output):
        step.run()
    for out in (output.out, prepared.forward(inputs).out):
        assert out.dtype == inputs.q.dtype and out.stride()[-1] == 1
        torch.testing.assert_close(out.double(), truth.out, atol=3e-2, rtol=3e-2)
    assert len(frontend.graphs) == built == 1
    assert "stats" not in [made.name for made in frontend.graphs[0].results if made is not None]


def test_conversions_are_in_v11_and_not_in_v10(frontend: Frontend) -> None:
    names = {}
    for rung in LIBRARY_RUNGS["forward"]:
        workload = workload_for(rung(), Workload.parse("B1,H2,L32,D16,fp32,causal,layout=qkv"), HERE)
        inputs, prepared = make_inputs(workload, CPU), rung().prepare(workload, HERE)
        names[rung.rung] = [step.name for step in prepared.steps(inputs, prepared.new_output(inputs))]
    assert names == {"v10": ["cuDNN"], "v11": ["round", "cuDNN", "widen"]}


def test_the_ladders_last_rungs_say_why_they_cannot_run(frontend: Frontend) -> None:
    for rung in LIBRARY_RUNGS["forward"]:
        reasons = "; ".join(rung().reasons_unsupported(Workload.parse("B0,H2,L8,D12,fp64,scale=-1"), TURING))
        for said in ("causal attention only", "no empty batch", "a scale above 0", "multiple of 8", "8.0 or newer"):
            assert said in reasons
        with pytest.raises(UsageError, match="block size must be one of 0, got 64"):
            rung().prepare(Workload.parse("H1,L8,D32,fp32,causal"), HERE, block_size=64)
    frontend.version = 90100
    assert ForwardV10().reasons_unsupported(Workload.parse("H1,L8,D32,bf16,causal"), HOPPER) == [
        "needs cuDNN 9.10.2 or newer, 9.1.0 is loaded"
    ]


# --- reasons ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "direction", "reason"),
    [
        ("B0,H2,L64,D64,bf16", "forward", "takes no empty batch"),
        ("B1,H2,L64,S0,D64,bf16", "forward", "takes no empty sequences, this workload has L = 64, S = 0"),
        ("B1,H2,L1,D64,bf16", "backward", "has no backward of one query and one key"),
        ("B1,H2,L64,D264,bf16", "backward", "takes D up to 256 in the backward on a Hopper, not 264"),
        ("B1,H2,L64,D36,bf16", "forward", "needs D to be a multiple of 8, not 36"),
        ("B1,H2,L64,D64,fp32", "forward", "takes bf16 or fp16, not fp32"),
        ("B1,H2,L64,D64,bf16,alibi", "forward", "takes ALiBi only with a causal mask aligned to the top left"),
        (
            "B1,H2,L64,S65,D64,bf16,alibi,causal=bottom_right",
            "forward",
            "takes ALiBi only with a causal mask aligned to the top left",
        ),
        (
            "B1,H2,L64,S65,D64,bf16,bias=bf16,causal=bottom_right",
            "forward",
            "takes no bias with a causal mask aligned to the bottom right",
        ),
        ("B1,H2,L65,S64,D64,bf16,window=9", "forward", "takes a sliding window only where L <= S, not L = 65, S = 64"),
        (
            "B2,H2,L64,D64,bf16,lengths=64/0",
            "forward",
            "does not promise 0 for a row that sees no key, which this workload may have",
        ),
        (
            "B1,H2,L64,D64,bf16,bias=fp32",
            "backward",
            "gives the gradient of a bias of the inputs' dtype only: bf16, not fp32",
        ),
        ("B1,H2,L64,D64,bf16,bias=fp16", "forward", "takes a bias in bf16 or fp32, not fp16"),
        (
            "B1,H2,L64,D64,bf16,scale=-1",
            "forward",
            "is claimed for a scale above 0 only, not -1: a kernel may take the maximum first",
        ),
        ("B1,H2,L64,D64,bf16,dropout=0.1", "forward", "does not support a given dropout mask"),
    ],
)
def test_reasons(frontend: Frontend, text: str, direction: str, reason: str) -> None:
    assert CudnnGraph().reasons_unsupported(Workload.parse(text), HOPPER, direction) == [reason]


def test_reasons_of_cards(frontend: Frontend) -> None:
    wide = Workload.parse("B1,H2,L64,D256,bf16")
    assert CudnnGraph().reasons_unsupported(wide, HOPPER, "backward") == []
    assert CudnnGraph().reasons_unsupported(wide, AMPERE, "backward") == [
        "takes D up to 128 in the backward on an Ampere, not 256"
    ]
    assert CudnnGraph().reasons_unsupported(wide, TURING) == ["needs compute capability 8.0 or newer, a Turing has 7.5"]
    assert CudnnGraph().reasons_unsupported(wide, CPU) == ["runs on cuda, not on cpu"]


def test_bottom_right_without_an_offset_is_top_left(frontend: Frontend) -> None:
    assert cudnn_graph.diagonal(Workload.parse("H1,L8,D8,causal=bottom_right")) == ("TOP_LEFT", None, 0)
    assert cudnn_graph.diagonal(Workload.parse("H1,L8,S9,D8,causal=bottom_right")) == ("BOTTOM_RIGHT", None, 0)
    assert cudnn_graph.diagonal(Workload.parse("H1,L8,D8,window=3")) == ("TOP_LEFT", 3, 2)


def test_without_the_package_it_is_one_reason_and_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "load_frontend", lambda: pytest.fail("imported before it was asked for"))
    monkeypatch.setattr(implementation, "missing_package", lambda name: f"no {name}" if cudnn.PACKAGE in name else None)
    reasons = CudnnGraph().reasons_unsupported(Workload.parse("B1,H2,L64,D64,bf16"), HOPPER)
    assert reasons == [f"no {cudnn.PACKAGE}>={cudnn.MIN_FRONTEND}"]


class _Broken(types.ModuleType):
    pass


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        ({}, "lacks pygraph, create_handle, set_stream, "),
        ({"version": 90100}, "needs cuDNN 9.10.2 or newer, 9.1.0 is loaded"),
        ({"backend_version": OSError("no libcudnn.so.9\nmore")}, "finds no cuDNN: OSError: no libcudnn.so.9"),
    ],
)  # fmt: skip
def test_a_broken_install_is_one_sentence(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, breaks: dict[str, object], reason: str
) -> None:
    if not breaks:
        monkeypatch.setitem(sys.modules, "cudnn", _Broken("cudnn"))
    elif "version" in breaks:
        frontend.version = 90100
    else:
        monkeypatch.setattr(frontend, "backend_version", lambda: (_ for _ in ()).throw(breaks["backend_version"]))
    (found,) = CudnnGraph().reasons_unsupported(Workload.parse("B1,H2,L64,D64,bf16"), HOPPER)
    assert reason in found and "\n" not in found


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcudart.so.12: cannot open shared object file\nand more"),
        AttributeError("undefined symbol: cudnnFoo"),
        SystemExit(3),
    ],
)
def test_an_import_that_fails_is_one_sentence(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    class Finder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "cudnn":
                raise error

    monkeypatch.delitem(sys.modules, "cudnn")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    (found,) = CudnnGraph().reasons_unsupported(Workload.parse("B1,H2,L64,D64,bf16"), HOPPER)
    assert found == f"{cudnn.PACKAGE} does not import: {type(error).__name__}: {str(error).splitlines()[0]}"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (cudnnGraphNotSupportedError("s_q = s_kv = 1 is not supported.\nmore"), "s_q = s_kv = 1 is not supported."),
        (
            cudnnGraphNotSupportedError(
                "no engine — python or backend — proposed a plan for this graph (the backend declined: head_dim is "
                "too large; python engines declined: sdpa_fwd: requires SM100)"
            ),
            "head_dim is too large",
        ),
        (
            RuntimeError(
                "No valid engine configs for ___\nWarning: CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING; "
                "Reason: this->libcuda == nullptr\nWarning: X; Reason: (CUDNN_STATUS::x)"
            ),
            "a library that it compiles with (NVRTC, the driver) is missing "
            "(its engines say: this->libcuda == nullptr)",
        ),
        (
            RuntimeError("detail::execute failed with code: CUDNN_STATUS_EXECUTION_FAILED"),
            "a kernel did not run (detail::execute failed with code: CUDNN_STATUS_EXECUTION_FAILED)",
        ),
        (ValueError(), "ValueError"),
    ],
)
def test_what_the_frontend_raises_becomes_a_sentence(error: Exception, sentence: str) -> None:
    assert cudnn.sentence_of(error) == sentence


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "it ran out of the card's memory"),
        ("INTERNAL_ERROR_UNEXPECTED_VALUE", "it failed inside"),
        ("NOT_SUPPORTED_ARCH_MISMATCH", "its kernels for this are for another architecture"),
        ("NOT_SUPPORTED_PADDING", "none of its engines takes this graph"),
        ("SERIALIZATION_VERSION_MISMATCH", "it reports serialization version mismatch"),  # of no entry
    ],
)
def test_every_status_becomes_words(status: str, words: str) -> None:
    said = f"execute failed with CUDNN_STATUS_{status}"
    assert cudnn.sentence_of(RuntimeError(said)) == f"{words} ({said})"
    assert cudnn.sentence_of(RuntimeError("CUDNN_STATUS_SUCCESS but odd")) == "CUDNN_STATUS_SUCCESS but odd"


def test_a_refused_plan_names_the_direction_and_is_not_kept(frontend: Frontend) -> None:
    workload = Workload.parse("B1,H2,L20,D32,bf16")
    frontend.refusal = cudnnGraphNotSupportedError("not today")
    with pytest.raises(PrepareFailed, match=r"^cuDNN 9\.19\.1 cannot plan this forward: not today$"):
        CudnnGraph().prepare(workload, HERE)
    frontend.refusal = None
    CudnnGraph().prepare(workload, HERE)


# --- the cache --------------------------------------------------------------------------------------------------------


def spec(number: int) -> cudnn.GraphSpec:
    q = torch.empty(1, number, 8, 8, dtype=torch.bfloat16, device="meta")
    return cudnn.spec_of("forward", {"q": q, "k": q, "v": q, "o": q}, cudnn.Options(scale=1.0, stats=False), 0)


def test_a_spec_tells_shapes_strides_types_and_options_apart() -> None:
    q = torch.empty(2, 8, 8, 8, dtype=torch.bfloat16, device="meta")
    options = cudnn.Options(scale=1.0)
    variants = [
        cudnn.spec_of("forward", {"q": q}, options, 0),
        cudnn.spec_of("forward", {"q": q.transpose(1, 2)}, options, 0),
        cudnn.spec_of("forward", {"q": q[:1]}, options, 0),
        cudnn.spec_of("forward", {"q": q.half()}, options, 0),
        cudnn.spec_of("forward", {"q": q}, options, 1),
        cudnn.spec_of("backward", {"q": q}, options, 0),
        cudnn.spec_of("forward", {"q": q}, cudnn.Options(scale=1.0, right=0), 0),
        cudnn.spec_of("forward", {"q": q, "bias": q}, options, 0),
    ]
    assert len(set(variants)) == len(variants)
    assert cudnn.spec_of("forward", {"q": torch.empty_like(q)}, options, 0) == variants[0]


def test_the_cache_is_bounded_and_drops_what_was_not_used() -> None:
    built: list[cudnn.GraphSpec] = []
    cache = cudnn_plans.PlanCache(lambda s: built.append(s) or cudnn_plans.Plan(None, s, 0, 0.0), capacity=2)  # type: ignore[func-returns-value]
    assert cache.statistics().hit_rate is None
    for number in (1, 2, 1, 3, 1, 2):
        assert cache.get(spec(number)).spec == spec(number)
    assert built == [spec(n) for n in (1, 2, 3, 2)]
    assert cache.statistics() == cudnn_plans.CacheStatistics(hits=2, misses=4, evictions=2, size=2, capacity=2)
    assert cache.statistics().hit_rate == pytest.approx(1 / 3)
    cache.clear()
    assert cache.statistics() == cudnn_plans.CacheStatistics(0, 0, 0, 0, 2)


def test_threads_share_plans_each_built_once(frontend: Frontend) -> None:
    """Eight threads, four shapes, forward and backward, each result against the truth; the stand-in asserts that no
    graph and no handle serves two calls at once, and that builds wait for each other."""
    frontend.build_s, frontend.workspace_bytes = 0.002, 64
    problems = [problem(Workload.parse(f"B1,H2,L{length},D16,bf16,causal"), CPU) for length in (8, 16, 24, 32)]
    start = threading.Barrier(8)

    def work(thread: int) -> int:
        start.wait()
        for turn in range(12):
            inputs, truth = problems[(thread + turn) % len(problems)]
            prepared = CudnnGraph().prepare(inputs.workload, HERE)
            output = prepared.forward(inputs, save=True)
            grads = prepared.backward(inputs, output.saved)
            torch.testing.assert_close(output.out.double(), truth.out, atol=3e-2, rtol=3e-2)
            torch.testing.assert_close(grads.dk.double(), truth.dk, atol=1e-1, rtol=5e-2)
        return thread

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(work, range(8))) == list(range(8))
    statistics = cudnn_plans.PLANS.statistics()
    assert (statistics.misses, statistics.size) == (8, 8) == (len(frontend.graphs), len(frontend.graphs))
    assert statistics.hit_rate is not None and statistics.hit_rate > 0.9
    assert len(frontend.handles) <= 8 + 1
    assert all(handle.stream == 7 for handle in frontend.handles if handle.stream is not None)


def test_a_build_does_not_hold_up_a_hit() -> None:
    building, release = threading.Event(), threading.Event()

    def build(wanted: cudnn.GraphSpec) -> cudnn_plans.Plan:
        if wanted == spec(2):
            building.set()
            assert release.wait(10)
        return cudnn_plans.Plan(None, wanted, 0, 0.0)

    cache = cudnn_plans.PlanCache(build)
    cache.get(spec(1))
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(cache.get, spec(2))
        assert building.wait(10)
        assert cache.get(spec(1)).spec == spec(1)
        release.set()
        assert slow.result(10).spec == spec(2)


# --- workspaces -------------------------------------------------------------------------------------------------------


def test_one_workspace_a_stream_grows_is_shared_and_goes_with_its_last_user(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = [7]
    monkeypatch.setattr(cudnn_plans, "current_stream", lambda index: stream[0])
    small, large = (Workload.parse(f"B1,H2,L{length},D16,bf16") for length in (8, 16))
    frontend.workspace_bytes = 64
    first = CudnnGraph().prepare(small, HERE)
    assert first.workspace_bytes == {"forward": 64, "backward": 64}
    assert cudnn_plans.workspace_sizes() == {(0, 7): 64}
    frontend.workspace_bytes = 128
    second = CudnnGraph().prepare(large, HERE)
    assert cudnn_plans.workspace_sizes() == {(0, 7): 128}
    stream[0] = 8
    second.forward(make_inputs(large, CPU))
    assert cudnn_plans.workspace_sizes() == {(0, 7): 128, (0, 8): 128}
    del second
    gc.collect()
    assert cudnn_plans.workspace_sizes() == {(0, 7): 128}
    del first
    gc.collect()
    assert cudnn_plans.workspace_sizes() == {}


def test_workspaces_on_record_are_what_the_guide_says() -> None:
    """docs/guide/cudnn.md, of each plain backward that was recorded: float32 dq, and dk and dv of grouped heads."""
    rows = [
        row
        for run in read_runs(Path(__file__).parents[1] / "benchmarks" / "results" / "nvidia-h200.jsonl")
        for row in run.results
        if row.implementation == "cudnn_graph" and row.forward is not None and Workload.parse(row.workload).bias is None
    ]
    assert {Workload.parse(row.workload).group for row in rows} > {1}
    for row in rows:
        w = Workload.parse(row.workload)
        assert row.forward.workspace_mib < 1, w
        if row.backward is not None:
            grouped = 2 * w.B * w.H * w.S * (w.D + w.D_v) if w.group > 1 else 0
            least = (4 * w.B * w.H * w.L * w.D + grouped) / 2**20
            assert least <= row.backward.workspace_mib < 1.05 * least + 0.1, w


def test_a_captured_call_does_not_use_the_shared_workspace(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload.parse("B1,H2,L8,D16,bf16")
    frontend.workspace_bytes = 64
    prepared, inputs = CudnnGraph().prepare(workload, HERE), make_inputs(workload, CPU)
    prepared.forward(inputs)
    prepared.forward(inputs)
    monkeypatch.setattr(cudnn_plans, "capturing", lambda: True)
    prepared.forward(inputs)
    shared, again, captured = frontend.workspaces
    assert shared == again != captured


def test_what_a_run_raises_becomes_a_sentence(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload.parse("B1,H2,L8,D16,bf16")
    prepared, inputs = CudnnGraph().prepare(workload, HERE), make_inputs(workload, CPU)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    for graph in frontend.graphs:
        monkeypatch.setattr(graph, "execute", fail)
    with pytest.raises(PrepareFailed, match="cuDNN did not run this forward: a kernel did not run"):
        prepared.forward(inputs)
