"""``attnscope.watch``: what it sees of live code, what it refuses, and that it leaves no trace but its own."""

from __future__ import annotations

import gc
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

import attnscope
from attnscope.errors import TraceError, UsageError
from attnscope.explaining import explain_trace
from attnscope.explaining.captured import CAPTURE, REPLAY, REPLAY_FROM_BEFORE
from attnscope.trace import read_trace
from attnscope.watching import GraphLabels, Watch

torch = pytest.importorskip("torch")
functional = torch.nn.functional

B, H, L, D = 2, 4, 64, 16
PROBLEM = f"B{B},H{H},L{L},D{D},fp32,causal"


class Layer(torch.nn.Module):
    """A small Transformer layer; ``fused`` False writes its attention out."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(H * D, 3 * H * D), torch.nn.Linear(H * D, H * D)
        self.fused = fused

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).view(B, L, 3, H, D).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = (q @ k.transpose(-2, -1) * D**-0.5).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(B, L, H * D))


def model(layers: int = 2, fused: bool = True) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Layer(fused) for _ in range(layers)))


def inputs() -> Any:
    torch.manual_seed(1)
    return torch.randn(B, L, H * D)


def state() -> tuple[Any, ...]:
    """What of torch is global and must be as before."""
    return (
        torch.random.get_rng_state().tolist(), torch.is_grad_enabled(), torch.autograd._profiler_enabled(),
        torch.autograd.profiler._is_profiler_enabled, torch.overrides._get_current_function_mode_stack(),
        torch.get_default_dtype(), torch.cuda.CUDAGraph.replay, gc.isenabled(),
        dict(torch.autograd.profiler.KinetoStepTracker._step_dict),
    )  # fmt: skip


def attention_share(w: Watch, path: Path, op: str) -> float:
    """Attention time that the watch attributes, over the truth: the time of the attention op in the trace."""
    truth = sum(one.duration_us for one in read_trace(w.save(path)).ops if one.name == op)
    return sum(site.time_us for site in w.explanation.sites if not site.inferred) / truth


def test_an_eager_model_is_explained_and_left_as_it_was(tmp_path: Path) -> None:
    net, x = model(), inputs()
    expected, before = net(x), state()
    with attnscope.watch() as w:
        got = net(x)
    assert torch.equal(got, expected) and state() == before
    (site,) = w.explanation.sites
    assert (site.problem, site.calls, site.inferred) == (PROBLEM, 2, False)
    assert site.implementation == "SDPA flash on the CPU"
    assert attention_share(w, tmp_path / "t.json.gz", "aten::scaled_dot_product_attention") > 0.9
    assert w.explanation.window.attention_by == (("the op that launched it", pytest.approx(site.time_us)),)


def test_attention_written_out_and_its_backward() -> None:
    net, x = model(fused=False), inputs()
    with attnscope.watch() as w:
        net(x).sum().backward()
    found = {(site.direction, site.implementation) for site in w.explanation.sites}
    assert ("forward", "unfused") in found and ("backward", "unfused") in found
    assert all(site.problem == PROBLEM.removesuffix(",causal") for site in w.explanation.sites)


def test_text_notebook_and_saved_trace_say_the_same(tmp_path: Path) -> None:
    net, x = model(), inputs()
    with attnscope.watch() as w:
        net(x)
    assert PROBLEM in str(w) and "none: no kernel was recorded" in str(w)
    fragment = w._repr_html_() or ""
    assert PROBLEM in fragment and not {"<script", "<body", "<html"} & set(fragment.split(">"))
    style = fragment.split("<style>")[1].split("</style>")[0]
    assert all(line.startswith(".attnscope-explanation") for line in style.strip().splitlines())
    assert "1 attention call site, " in repr(w)
    for name in ("t.json", "t.json.gz"):
        again = explain_trace(read_trace(w.save(tmp_path / name)), "watch")
        assert again == w.explanation
    with pytest.raises(TraceError, match="cannot write trace"):
        w.save(tmp_path / "nowhere" / "t.json")


def test_modules_are_named_when_asked_for() -> None:
    net, x = model(1), inputs()
    with attnscope.watch(modules=True) as w:
        net(x)
    assert w.explanation.sites[0].module == "Sequential.Layer"


def test_an_exception_passes_through_and_what_ran_is_explained() -> None:
    net, x = model(), inputs()
    with pytest.raises(ZeroDivisionError), attnscope.watch() as w:
        net(x)
        1 / 0
    assert w.explanation.sites[0].calls == 2
    with attnscope.watch() as w:  # the profiler was closed
        net(x)
    assert w.explanation.sites[0].calls == 2


def test_nothing_watched_is_no_attention() -> None:
    with attnscope.watch() as w:
        torch.ones(3) + 1
    assert not w.explanation.sites and "none" in str(w)


def test_a_second_watch_is_refused_and_harms_nothing() -> None:
    net, x = model(), inputs()
    said: list[str] = []

    def elsewhere() -> None:
        try:
            with attnscope.watch():
                pass
        except TraceError as error:
            said.append(str(error))

    with attnscope.watch() as w:
        with pytest.raises(TraceError, match="another one is\nhint:"), attnscope.watch():
            pass
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        net(x)
    assert len(said) == 1 and "hint:" in said[0]
    assert w.explanation.sites[0].calls == 2
    with pytest.raises(UsageError, match="used before"), w:
        pass


def test_every_thread_is_seen() -> None:
    net, x = model(1), inputs()
    ready = threading.Event()
    earlier = threading.Thread(target=lambda: (ready.wait(), net(x)))  # started before the watch
    earlier.start()
    with attnscope.watch() as w:
        ready.set()
        earlier.join()
        later = threading.Thread(target=net, args=(x,))
        later.start()
        later.join()
        net(x)
    assert sum(site.calls for site in w.explanation.sites) == 3


def test_torch_s_profiler_is_refused_by_sentence() -> None:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as theirs:
        with pytest.raises(TraceError, match="another torch profiler is recording\nhint:"), attnscope.watch():
            pass
        torch.ones(3) + 1
    assert any(event.name == "aten::add" for event in theirs.events())
    plan = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(activities=cpu, schedule=plan, acc_events=True) as theirs:
        for _ in range(3):
            with pytest.raises(TraceError, match="hint:"), attnscope.watch():
                pass
            torch.ones(3) + 1
            theirs.step()
    assert any(event.name == "aten::add" for event in theirs.events())
    with attnscope.watch() as w:  # theirs ended; its results are still held
        model()(inputs())
    assert w.explanation.sites


@pytest.mark.parametrize("ends", [True, False])
def test_a_profiler_started_inside_is_told(ends: bool) -> None:
    theirs = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
    with pytest.raises(TraceError, match="started inside its block"), attnscope.watch() as w:
        theirs.start()
        torch.ones(3) + 1
        if ends:
            theirs.stop()
    if not ends:
        theirs.stop()
    assert any(event.name == "aten::add" for event in theirs.events())
    with pytest.raises(TraceError, match="started inside its block"):
        w.explanation
    assert "started inside its block" in str(w)
    with attnscope.watch() as again:
        model()(inputs())
    assert again.explanation.sites


def test_asking_too_early_is_a_sentence() -> None:
    w = attnscope.watch()
    assert str(w) == repr(w) == "<attnscope watch, new>" and w._repr_html_() is None
    with pytest.raises(UsageError, match="has not ended"):
        w.explanation
    with w, pytest.raises(UsageError, match="has not ended"):
        w.save("t.json")


@pytest.mark.parametrize("body_fails", [True, False])
def test_a_device_that_failed_never_hides_the_body_s_error(monkeypatch: pytest.MonkeyPatch, body_fails: bool) -> None:
    w = attnscope.watch()
    with pytest.raises(ZeroDivisionError if body_fails else RuntimeError), w:
        monkeypatch.setattr("attnscope.watching._synchronise", broken)
        if body_fails:
            1 / 0
    monkeypatch.undo()
    if not body_fails:
        with pytest.raises(TraceError, match="an illegal memory access"):
            w.explanation
    with attnscope.watch() as again:
        model()(inputs())
    assert again.explanation.sites


def broken(torch: Any) -> None:
    raise RuntimeError("an illegal memory access was encountered")


class Graph:
    """A stand-in for torch.cuda.CUDAGraph: what it is asked to do runs aten ops, so that scopes have an inside."""

    def capture_begin(self, *pool: object, capture_error_mode: str = "global") -> None:
        if capture_error_mode == "impossible":
            raise RuntimeError("cannot capture")

    def capture_end(self) -> None:
        torch.ones(3)

    def replay(self) -> str:
        torch.ones(3) + 1
        return "replayed"


class Inherits(Graph):
    pass


def test_captures_and_replays_carry_the_number_of_their_graph(tmp_path: Path) -> None:
    before = Inherits()
    labels = GraphLabels()
    with attnscope.watch() as w:
        labels.put_on(Inherits)
        first, second = Inherits(), Inherits()
        for graph in (first, second):
            graph.capture_begin("pool", capture_error_mode="thread_local")
            graph.capture_end()
        with pytest.raises(RuntimeError, match="cannot capture"):
            Inherits().capture_begin(capture_error_mode="impossible")
        assert second.replay() == first.replay() == before.replay() == "replayed"
        labels.remove()
        first.replay()
    assert not {"capture_begin", "capture_end", "replay"} & set(Inherits.__dict__)
    trace = read_trace(w.save(tmp_path / "t.json"))
    names = [op.name for op in trace.annotations]
    assert names == [f"{CAPTURE}1", f"{CAPTURE}2", f"{CAPTURE}3", f"{REPLAY}2", f"{REPLAY}1", REPLAY_FROM_BEFORE]
    adds = [op for op in trace.ops if op.name == "aten::add"]
    assert [op.parent.name if op.parent else None for op in adds] == [*names[3:], None]


@pytest.mark.slow
def test_a_compiled_model_is_explained(tmp_path: Path) -> None:
    net, x = model(), inputs()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = torch.compile(net)
        expected = compiled(x)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with attnscope.watch() as w:
            got = compiled(x)
    assert torch.equal(got, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0  # nothing was compiled again
    (site,) = w.explanation.sites
    assert (site.problem, site.calls, site.inferred) == (PROBLEM, 2, False)
    assert attention_share(w, tmp_path / "t.json.gz", "aten::_scaled_dot_product_flash_attention_for_cpu") > 0.9
