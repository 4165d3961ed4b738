"""``attnscope.watch`` on a card: eager, compiled and graphed, held against kernels known to be attention."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import attnscope
from attnscope.explaining.works import BY_CAPTURE, BY_OP
from attnscope.trace import read_trace
from attnscope.watching import Watch

pytestmark = pytest.mark.gpu

B, H, L, D, LAYERS = 4, 8, 1024, 64, 3
PROBLEM = f"B{B},H{H},L{L},D{D},bf16,causal"
# Flash is forced, so these kernels are attention and nothing else is.
FLASH = re.compile(r"flash_fwd|flash_bwd|Flash_fwd|Flash_bwd")


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA card")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield torch


def model(torch: Any) -> Any:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(H * D, 3 * H * D), torch.nn.Linear(H * D, H * D)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(x).view(B, L, 3, H, D).permute(2, 0, 3, 1, 4)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(mixed.transpose(1, 2).reshape(B, L, H * D))

    torch.manual_seed(0)
    return torch.nn.Sequential(*(Layer() for _ in range(LAYERS))).to("cuda", torch.bfloat16)


def inputs(torch: Any) -> Any:
    torch.manual_seed(1)
    return torch.randn(B, L, H * D, device="cuda", dtype=torch.bfloat16)


def shares(w: Watch, folder: Path, calls: int, kernels: int = 1) -> tuple[float, float]:
    """(attributed with their op, known at all): attention time of the explanation over that of the known kernels."""
    trace = read_trace(w.save(folder / "trace.json.gz"))
    print(w)
    for event in trace.device_events[:60]:  # shown where a test fails
        print(event.kind, event.stream, event.graph_id, event.launch.name if event.launch else None, event.name[:60])
    known = [event for event in trace.device_events if FLASH.search(event.name)]
    assert len(known) == calls * kernels, [event.name for event in trace.device_events]
    truth = sum(event.duration_us for event in known)
    sites = w.explanation.sites
    by_op = sum(site.time_us for site in sites if not site.inferred)
    return by_op / truth, sum(site.time_us for site in sites) / truth


def test_an_eager_model(torch, tmp_path):
    net, x = model(torch), inputs(torch)
    with torch.no_grad():
        expected = net(x)
        cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state()
        with attnscope.watch() as w:
            got = net(x)
    assert torch.equal(got, expected)
    assert torch.equal(torch.get_rng_state(), cpu) and torch.equal(torch.cuda.get_rng_state(), cuda)
    by_op, known = shares(w, tmp_path, LAYERS)
    assert 0.9 <= by_op <= 1.1 and known == by_op
    (site,) = w.explanation.sites
    assert (site.problem, site.calls, site.implementation) == (PROBLEM, LAYERS, "SDPA flash")
    assert site.tflop_per_s is not None and w.explanation.window.unattributed_us == 0
    assert [word for word, _ in w.explanation.window.attention_by] == [BY_OP]


def test_an_eager_training_step(torch, tmp_path):
    net, x = model(torch), inputs(torch)
    net(x).sum().backward()
    with attnscope.watch() as w:
        net(x).sum().backward()
    trace = read_trace(w.save(tmp_path / "t.json"))
    truth = sum(event.duration_us for event in trace.device_events if FLASH.search(event.name))
    sites = [site for site in w.explanation.sites if not site.inferred]
    assert {site.direction for site in sites} == {"forward", "backward"}
    assert sum(site.time_us for site in sites) >= 0.9 * truth


def test_a_compiled_model(torch, tmp_path):
    torch._dynamo.reset()
    net, x = model(torch), inputs(torch)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = torch.compile(net)
        for _ in range(3):
            expected = compiled(x)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with attnscope.watch() as w:
            got = compiled(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert torch.equal(got, expected)
    by_op, known = shares(w, tmp_path, LAYERS)
    assert 0.9 <= by_op <= 1.1 and known == by_op
    assert {site.problem for site in w.explanation.sites} == {PROBLEM}


def graphed(torch: Any, net: Any, x: Any) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = net(x)
    return graph, out


def test_a_graph_captured_in_the_watch_has_its_ops(torch, tmp_path):
    net, x = model(torch), inputs(torch)
    replay = torch.cuda.CUDAGraph.replay
    with torch.no_grad():
        for _ in range(3):
            expected = net(x).clone()
        with attnscope.watch() as w:
            graph, out = graphed(torch, net, x)
            for _ in range(4):
                graph.replay()
    torch.testing.assert_close(out, expected)
    assert torch.cuda.CUDAGraph.replay is replay
    by_op, known = shares(w, tmp_path, 4 * LAYERS)
    assert 0.9 <= by_op <= 1.1 and known == by_op
    (site,) = w.explanation.sites
    assert (site.problem, site.calls, site.implementation) == (PROBLEM, 4 * LAYERS, "SDPA flash")
    assert [word for word, _ in w.explanation.window.attention_by] == [BY_CAPTURE]
    graph.replay()  # it lives on without its scopes
    torch.cuda.synchronize()
    torch.testing.assert_close(out, expected)


def test_two_captured_graphs_of_other_sizes_are_told_apart(torch, tmp_path):
    net, x = model(torch), inputs(torch)
    small = torch.nn.functional.scaled_dot_product_attention
    q, r = (torch.randn(B, H, length, D, device="cuda", dtype=torch.bfloat16) for length in (512, 2048))
    with torch.no_grad():
        small(q, q, q), small(r, r, r)
        torch.cuda.synchronize()
        with attnscope.watch() as w:
            first, _ = graphed(torch, lambda one: small(one, one, one), q)
            second, _ = graphed(torch, lambda one: small(one, one, one), r)
            for graph in (second, first, second):
                graph.replay()
    del net, x
    found = {site.problem: site.calls for site in w.explanation.sites}
    assert found == {f"B{B},H{H},L512,D{D},bf16": 1, f"B{B},H{H},L2048,D{D},bf16": 2}
    assert not any(site.inferred for site in w.explanation.sites)


def test_a_graph_captured_before_is_known_by_names_and_said(torch, tmp_path):
    net, x = model(torch), inputs(torch)
    with torch.no_grad():
        for _ in range(3):
            net(x)
        graph, _ = graphed(torch, net, x)
        graph.replay()
        with attnscope.watch() as w:
            for _ in range(2):
                graph.replay()
    by_op, known = shares(w, tmp_path, 2 * LAYERS)
    assert by_op == 0 and 0.9 <= known <= 1.1
    assert all(site.inferred for site in w.explanation.sites)
    assert any("captured before the watch began" in sentence for sentence in w.explanation.window.lost)


@pytest.mark.parametrize("warm", [True, False], ids=["captured before", "captured in the watch"])
def test_a_model_compiled_with_graphs(torch, tmp_path, warm):
    torch._dynamo.reset()
    net, x = model(torch), inputs(torch)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = torch.compile(net, mode="reduce-overhead")
        for _ in range(4 if warm else 1):  # the first call compiles, the second captures
            expected = compiled(x).clone()
        with attnscope.watch() as w:
            for _ in range(4):
                got = compiled(x).clone()
    torch.testing.assert_close(got, expected)
    trace = read_trace(w.save(tmp_path / "t.json.gz"))
    truth = sum(event.duration_us for event in trace.device_events if FLASH.search(event.name))
    sites = w.explanation.sites
    assert truth > 0 and 0.9 <= sum(site.time_us for site in sites) / truth <= 1.1
    assert [site.inferred for site in sites] == ([True] if warm else [False])
    before = any("captured before the watch began" in sentence for sentence in w.explanation.window.lost)
    assert before == warm


def test_an_error_of_the_body_passes_and_leaves_no_profiler(torch):
    net, x = model(torch), inputs(torch)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), attnscope.watch():
        net(x)
        net(x[..., :7])
    with pytest.raises(ValueError, match="mine"), attnscope.watch(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.ones(3, device="cuda") + 1
        raise ValueError("mine")
    with torch.no_grad(), attnscope.watch() as w:
        net(x)
    assert w.explanation.sites[0].calls == LAYERS


def test_a_watch_does_not_begin_during_a_capture(torch):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="while a CUDA graph is being captured"), attnscope.watch():
            pass
        torch.ones(3, device="cuda") + 1
