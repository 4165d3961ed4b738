"""CUDA graphs: a replay is explained by its capture where scopes name both, and by kernel names alone elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import trace_builder as tb
from attnscope.explaining import explain_trace
from attnscope.explaining.captured import CAPTURE, REPLAY, REPLAY_FROM_BEFORE
from attnscope.explaining.explanation import Explanation
from attnscope.explaining.works import BY_CAPTURE, BY_COMPILER, BY_NAME, BY_OP
from attnscope.reporting.explanation_text import render_explanation
from trace_builder import TraceBuilder

TRITON = "triton_poi_fused_add_0"
BACKWARD = tb.FLASH_BACKWARD[1]


def launch(b: TraceBuilder, name: str = "cudaLaunchKernel") -> None:
    """A launch that is captured: no kernel answers it."""
    b.correlation += 1
    b._add(name, "cuda_runtime", b.now_ns, 4_000, b.thread, {"correlation": b.correlation})
    b.now_ns += 5_000


def capture(b: TraceBuilder, number: int, length: int = 1024, scope: str = CAPTURE) -> None:
    """A layer: a product, a flash attention of that length with a fill before it, generated elementwise work."""
    q = ("bf16", [8, 16, length, 64])
    with b.annotation(f"{scope}{number}"):
        launch(b, "cudaStreamBeginCapture")
        with b.op("aten::linear"), b.op("aten::addmm"):
            launch(b, "cudaLaunchKernelExC")
        with b.op("aten::scaled_dot_product_attention", q, q, q):
            launch(b, "cudaMemsetAsync")
            with b.op("aten::_scaled_dot_product_flash_attention", q, q, q):
                launch(b)
        with b.op(TRITON):
            launch(b, "cuLaunchKernel")
        launch(b, "cudaStreamEndCapture")


LAYER = (
    ("kernel", tb.NVJET, 20),
    ("gpu_memset", "Memset (Device)", 1),
    ("kernel", tb.FLASH, 100),
    ("kernel", TRITON, 9),
)


def replay(
    b: TraceBuilder,
    scope: str | None,
    kernels: tuple[tuple[str, str, int], ...] = LAYER,
    streams: tuple[int, ...] = (7,),
) -> None:
    """One graph launch that all kernels share, as CUPTI records it."""

    def go() -> None:
        launch(b, "cudaGraphLaunch")
        start = max(b.device_free_ns, b.now_ns)
        for index, (cat, name, us) in enumerate(kernels):
            stream = streams[index % len(streams)]
            args: dict[str, Any] = {"correlation": b.correlation, "device": 0, "stream": stream, "graph id": 5}
            b._add(name, cat, start, us * 1000, stream, args, pid=0)
            start += us * 1000 + 500
        b.device_free_ns = start

    if scope is None:
        go()
    else:
        with b.annotation(scope):
            go()


def explained(*builds: Callable[[TraceBuilder], None]) -> Explanation:
    b = TraceBuilder()
    for build in builds:
        build(b)
    return explain_trace(b.trace(), "t")


def test_a_captured_graph_s_replays_have_ops_and_shapes() -> None:
    told = explained(
        lambda b: capture(b, 1), *[lambda b: replay(b, f"{REPLAY}1")] * 3, lambda b: tb.sdpa_flash(b)
    )  # fmt: skip
    eager, site = sorted(told.sites, key=lambda one: one.calls)
    assert (site.problem, site.calls, site.inferred) == ("B8,H16,L1024,D64,bf16", 3, False)
    assert site.name == "aten::scaled_dot_product_attention" and eager.calls == 1
    assert site.time_us == pytest.approx(303) and site.kernels_per_call == 1
    assert dict(told.window.attention_by) == {BY_OP: pytest.approx(92.6), BY_CAPTURE: pytest.approx(303)}
    assert told.window.inferred_us == told.window.unattributed_us == 0
    assert not any("lost" in one for one in told.window.lost)
    assert not {"graph-replay", "graph-capture"} & {finding.id for finding in told.findings}
    text = render_explanation(told)
    assert "77 % by the op at graph capture" in " ".join(text.split()) and max(map(len, text.splitlines())) <= 80


def test_two_graphs_that_differ_only_in_sizes_are_told_apart() -> None:
    told = explained(
        lambda b: capture(b, 1, 1024), lambda b: capture(b, 2, 512),
        lambda b: replay(b, f"{REPLAY}2"), lambda b: replay(b, f"{REPLAY}2"), lambda b: replay(b, f"{REPLAY}1"),
    )  # fmt: skip
    assert {site.problem: site.calls for site in told.sites} == {"B8,H16,L1024,D64,bf16": 1, "B8,H16,L512,D64,bf16": 2}


def test_a_graph_captured_before_is_known_by_names_and_said() -> None:
    told = explained(lambda b: replay(b, REPLAY_FROM_BEFORE), lambda b: replay(b, REPLAY_FROM_BEFORE))
    (site,) = told.sites
    assert site.inferred and site.problem == "shapes not recorded" and site.calls == 2
    assert told.window.attention_by == ((BY_NAME, 200.0),)
    assert any("2 of the graph launches replayed a CUDA graph that was captured before" in s for s in told.window.lost)
    assert "graph-replay" in {finding.id for finding in told.findings}


def doubtful(case: str) -> list[Callable[[TraceBuilder], None]]:
    """Captures and replays that must not be linked."""
    other = (*LAYER, ("kernel", tb.NVJET, 5))
    swapped = (LAYER[2], LAYER[1], LAYER[0], LAYER[3])
    renamed = (*LAYER[:3], ("kernel", "triton_poi_fused_mul_1", 9))
    return {
        "another number": [lambda b: capture(b, 1), lambda b: replay(b, f"{REPLAY}2")],
        "no scope around the replay": [lambda b: capture(b, 1), lambda b: replay(b, None)],
        "no scope around the capture": [lambda b: capture(b, 1, scope="mine "), lambda b: replay(b, f"{REPLAY}1")],
        "one kernel more": [lambda b: capture(b, 1), lambda b: replay(b, f"{REPLAY}1", other)],
        "attention where a product was captured": [lambda b: capture(b, 1), lambda b: replay(b, f"{REPLAY}1", swapped)],
        "another generated kernel": [lambda b: capture(b, 1), lambda b: replay(b, f"{REPLAY}1", renamed)],
        "two streams": [lambda b: capture(b, 1), lambda b: replay(b, f"{REPLAY}1", streams=(7, 8))],
    }[case]


@pytest.mark.parametrize(
    "case",
    [
        "another number", "no scope around the replay", "no scope around the capture", "one kernel more",
        "attention where a product was captured", "another generated kernel", "two streams",
    ],
)  # fmt: skip
def test_what_does_not_agree_is_not_linked(case: str) -> None:
    told = explained(*doubtful(case))
    assert [site.inferred for site in told.sites] == [True]
    assert told.window.attention_by == ((BY_NAME, 100.0),)
    assert any("is lost" in one for one in told.window.lost)


def test_work_of_the_capturing_thread_that_ran_at_once_is_not_captured() -> None:
    def build(b: TraceBuilder) -> None:
        with b.annotation(f"{CAPTURE}1"):
            with b.op("aten::fill_", ("bf16", [8])):
                b.kernel(tb.FILL, 2)
            with b.op("aten::scaled_dot_product_attention", tb.Q, tb.Q, tb.Q):
                launch(b)
        replay(b, f"{REPLAY}1", LAYER[2:3])

    (site,) = explained(build).sites
    assert not site.inferred and site.time_us == pytest.approx(100)


def test_fills_that_a_replay_lacks_do_not_shift_its_kernels() -> None:
    told = explained(lambda b: capture(b, 1), lambda b: replay(b, f"{REPLAY}1", (LAYER[0], *LAYER[2:])))
    assert [site.inferred for site in told.sites] == [False]


def test_generated_kernels_are_known_by_the_compiler_s_names() -> None:
    def unfused(b: TraceBuilder) -> None:
        for name, us in (
            ("triton_tem_fused_bmm_0", 80),
            ("triton_per_fused__softmax_1", 50),
            ("triton_tem_fused_bmm_2", 80),
        ):
            with b.op(name):
                b.kernel(name, us, launch="cuLaunchKernel")

    def flex(b: TraceBuilder) -> None:
        with b.op("triton_tem_fused_flex_attention_0"):
            b.kernel("triton_tem_fused_flex_attention_0", 70, launch="cuLaunchKernel")

    told = explained(unfused, flex)
    assert {site.implementation for site in told.sites} == {"unfused, compiled", "inductor flex attention"}
    assert told.window.attention_by == ((BY_COMPILER, pytest.approx(280)),)
    assert "100 % by the name that torch.compile gave" in " ".join(render_explanation(told).split())


DELTA, GRADIENTS = "triton_per_fused_flex_attention_backward_0", "triton_tem_fused_flex_attention_backward_1"
OVER_GROUPS = "triton_red_fused_flex_attention_backward_2"
OTHER_SUM = "triton_per_fused_mul_sum_3"


def generated(*names: str, graph: str = "## Call CompiledFxGraph a ##") -> Callable[[TraceBuilder], None]:
    def build(b: TraceBuilder) -> None:
        with b.annotation(graph):
            for name in names:
                with b.op(name):
                    b.kernel(name, 10, launch="cuLaunchKernel")

    return build


@pytest.mark.parametrize(
    ("names", "kernels"),
    [
        ((DELTA, GRADIENTS), 2), ((DELTA, GRADIENTS, OVER_GROUPS), 3), ((GRADIENTS,), 1),
        ((DELTA, OTHER_SUM, GRADIENTS), 2), ((OTHER_SUM, GRADIENTS, OTHER_SUM), 1),
    ],
)  # fmt: skip
def test_a_call_of_flex_attention_s_backward_is_one_site(names: tuple[str, ...], kernels: int) -> None:
    """Its helpers belong to it, and what else was generated does not."""
    (site,) = explained(generated(*names), generated(*names)).sites
    assert (site.name, site.direction, site.implementation) == (GRADIENTS, "backward", "inductor flex attention")
    assert (site.calls, site.kernels_per_call, site.time_us) == (2, kernels, pytest.approx(20 * kernels))


def test_helpers_go_to_the_layer_they_stand_with() -> None:
    products = "triton_tem_fused_mm_4"
    layers = generated(DELTA, GRADIENTS, OVER_GROUPS, products, DELTA, GRADIENTS, OVER_GROUPS)
    (site,) = explained(layers).sites
    assert (site.calls, site.kernels_per_call) == (2, 3)


def test_a_helper_of_another_graph_stays_by_itself() -> None:
    told = explained(generated(DELTA), generated(GRADIENTS, graph="## Call CompiledFxGraph b ##"))
    assert {site.name: site.calls for site in told.sites} == {DELTA: 1, GRADIENTS: 1}
    assert {site.implementation for site in told.sites} == {"inductor flex attention"}


def test_flex_attention_s_forward_takes_no_helper() -> None:
    told = explained(generated(DELTA, "triton_tem_fused_flex_attention_0"))
    assert sorted(site.direction for site in told.sites) == ["backward", "forward"]
