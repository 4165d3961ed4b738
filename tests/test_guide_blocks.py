"""The guide's blocks: what they show, and that the sentences which judge follow the numbers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import factories
from attnscope.errors import UsageError
from attnscope.limits import limit_of
from attnscope.records import KernelEvent, Result, Run
from attnscope.units import format_ms
from attnscope.workload import Workload

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def figures():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import figures as module
    finally:
        sys.path.remove(str(BENCHMARKS))
    yield module
    for name in ("figures", "guide_blocks"):
        sys.modules.pop(name, None)


def block(figures: ModuleType, name: str, run: Run) -> str | None:
    return figures.make_block(name, [run], figures.load_article(BENCHMARKS.parent), Path("/nowhere"))


def with_result(run: Run, name: str, **changes) -> Run:
    rows = tuple(r.with_changes(**changes) if r.implementation == name else r for r in run.results)
    return replace(run, results=rows)


def result_of(run: Run, name: str) -> Result:
    return next(r for r in run.results if r.implementation == name)


def kernel(name: str, shared: int, shown: float, recomputed: float) -> KernelEvent:
    return factories.kernel_event(
        name, block=(128, 1, 1), grid=(999, 1, 1), registers=255, shared_memory_bytes=shared, occupancy_shown=shown,
        occupancy=recomputed,
    )  # fmt: skip


def occupancy_run(*events: KernelEvent) -> Run:
    bare = tuple(r.with_changes(kernels=()) for r in factories.blog_run().results)
    return with_result(factories.blog_run(results=bare), "sdpa_flash", kernels=events)


def test_kernels_stand_in_order_with_what_surprised(figures):
    text = block(figures, "kernels naive forward", factories.blog_run())
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[1] for row in rows] == [
        "scores matmul", "scale", "copy", "mask", "softmax", "values matmul",
    ]  # fmt: skip
    assert "6 kernels a call, 1.06 ms together" in text and "Beyond the guess:" in text
    assert "1 kernel a call" in block(figures, "kernels sdpa_flash forward", factories.blog_run())
    assert block(figures, "kernels nobody forward", factories.blog_run()) is None


def test_shared_memory_decides_only_where_it_does(figures):
    above, below = kernel("large", 131072, 0.0, 18.8), kernel("small", 49152, 13.0, 12.5)
    tiny_grid = kernel("fill", 0, 0.0, 0.05)  # rightly shown as 0 %
    said = block(figures, "occupancy", occupancy_run(above, below, tiny_grid))
    assert "Kernels with more than 48 KiB of shared memory a block: 1, of which 1 show 0 %" in said
    assert said.endswith("With 48 KiB or less: 2, of which 0. The shared memory decides.")
    assert "| 128 KiB | 0 % | 18.8 % |" in said and "`fill`" not in said
    for exception in (kernel("odd", 4096, 0.0, 50.0), kernel("shown", 65536, 25.0, 25.0)):
        said = block(figures, "occupancy", occupancy_run(above, below, exception))
        assert said.endswith("So shared memory alone does not decide here.")
    assert block(figures, "occupancy", factories.blog_run()) is None, "a run without shared memory on record"


def test_a_plan_per_call_is_refuted_by_the_first_call_only(figures):
    run = factories.blog_run()
    cudnn = result_of(run, "sdpa_cudnn")
    searched = with_result(run, "sdpa_cudnn", forward=replace(cudnn.forward, first_call_ms=900.0))
    said = block(figures, "first-call", searched)
    assert "cuDNN's first call took 900 ms, the host's part of a later one 77.0 µs, about 12,000 times less" in said
    assert "no search fits into that" in said and "`sdpa_auto` came after it" in said
    quick = with_result(run, "sdpa_cudnn", forward=replace(cudnn.forward, first_call_ms=0.3))
    assert "that does not settle it" in block(figures, "first-call", quick)


def test_ratios_say_by_what(figures):
    text = block(figures, "ratios", factories.blog_run())
    assert "| the article, CUDA time average (NVIDIA A100-SXM4-80GB) | 1.96 ms | 7.24 ms | 3.70 |" in text
    assert "| the article, self CUDA total (NVIDIA A100-SXM4-80GB) | 7.19 ms | 27.3 ms | 3.79 |" in text
    assert "| here, without the profiler, cold cache | 927 µs | 2.58 ms | 2.78 |" in text
    assert "| the article | 3.68 | 3.77 | 3 |" in text and "| here | 3.00 | 3.00 | 3 |" in text


def test_host_times_are_told_with_and_without_the_profiler(figures):
    run = factories.blog_run()
    slow = factories.profile("sdpa_flash", cpu_us_per_call=219.0)
    text = block(figures, "host", with_result(run, "sdpa_flash", profiles=(slow,)))
    assert "| `sdpa_flash` | 73.0 µs | 219 µs | 3.0 |" in text and text.count("| 138 µs |") == 1
    assert "cuDNN's host time over flash's: 1.05 here, 1.55 in the article." in text
    assert "needs 77.0 µs on the host instead of 43.0 µs" in text


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_largest_term_is_the_limit(figures, direction):
    run, workload = factories.blog_run(), Workload.parse(factories.BLOG)
    text = block(figures, f"limit-terms {direction}", run)
    limit_ms, term = limit_of(workload, direction, run.limits, workload.visible_pairs())
    (bold,) = [line for line in text.splitlines() if "**" in line]
    assert bold.startswith(f"| {term} |") and f"**{format_ms(limit_ms)}**" in bold


def test_the_terminal_shows_the_command_and_its_output(figures):
    whole, head = (block(figures, name, factories.blog_run()) for name in ("terminal blog", "terminal blog head"))
    assert whole.startswith("```text\n$ attnscope compare blog\nNVIDIA H200") and "skipped" in whole
    assert whole.startswith(head.removesuffix("…\n```")) and "fastest" in head and "findings" not in head
    assert max(map(len, whole.splitlines())) <= 80
    assert block(figures, "terminal short", factories.blog_run()) is None


def test_findings_come_with_evidence_arithmetic_and_remedy(figures):
    text = block(figures, "finding out-of-place-mask naive", factories.blog_run())
    assert text.startswith("**naive forward: masked_fill without") and "(saves 126 µs a call).**" in text
    assert (
        "- `Memcpy DtoD, 126 µs" in text and "- arithmetic: 2 × 256 MiB" in text and "- remedy: `masked_fill_" in text
    )
    assert block(figures, "finding out-of-place-mask naive backward", factories.blog_run()) is None
    assert "Arithmetic: 2 × 256 MiB" in block(figures, "findings blog", factories.blog_run())


def test_the_rest_names_what_it_is_about(figures):
    run = factories.blog_run()
    assert block(figures, "ran", run).endswith("`sdpa_auto` ran `sdpa_cudnn`.")
    assert block(figures, "matmuls", run).count("CUDA core") >= 2
    text = block(figures, "measured backward", run)
    assert "`naive_inplace`" not in text and "| `sdpa_cudnn` | 1 | 181 µs |" in text


@pytest.mark.parametrize("name", ["measured sideways", "kernels naive", "kernels naive up", "ratios blog", "finding x"])
def test_a_block_with_wrong_arguments_is_refused(figures, name):
    with pytest.raises(UsageError, match=r"a block must read|direction must be"):
        block(figures, name, factories.blog_run())


def test_blocks_of_other_commands_are_left_alone(figures):
    text = "<!-- generated: checking blind -->\nkept\n<!-- end generated -->\n"
    missing: list[str] = []
    assert figures.rewrite(text, lambda name: "overwritten", missing) == text and not missing
