"""The calls whose small traces record_fixtures.py records. Imports torch inside functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from saving_scenarios import deterministic, only, qkv, sdpa, unfused

from attnscope import implementation
from attnscope.device import Device
from attnscope.inputs import make_inputs
from attnscope.workload import Workload

STEPS = 2
HALF = Workload.parse("B2,H8,L256,D64,bf16,causal")
GROUPED = Workload.parse("B2,H8/2,L256,D64,bf16,causal")
SINGLE = Workload.parse("B1,H4,L256,D64,fp32,causal,layout=qkv")
Call = Callable[[], object]


@dataclass(frozen=True)
class Fixture:
    """A trace to record. ``make`` returns its call, or raises Skipped; ``modules`` keeps the names of nn.Modules."""

    name: str
    make: Callable[[Device], Call]
    steps: int = STEPS
    modules: bool = False


class Skipped(Exception):
    """Why a fixture cannot be recorded on this machine."""


def fixtures() -> Iterator[Fixture]:
    """All of them, those that must be compiled last: where time runs out, they are what is left."""
    known = [name for name in implementation.names() if name != "reference_cpu"]
    compiled = [name for name in known if "compiled" in name]
    yield from _both_directions([name for name in known if name not in compiled])
    for name in ("naive", "sdpa_math", "sdpa_auto"):
        yield Fixture(f"{name}-grouped-forward", of_implementation(name, GROUPED, "forward"))
    for name in ("naive", "sdpa_math", "sdpa_efficient"):
        for direction in ("forward", "backward"):
            yield Fixture(f"{name}-fp32-{direction}", of_implementation(name, SINGLE, direction))
    for backend in ("cudnn", "efficient", "math"):
        yield Fixture(f"mask-causal-{backend}", masked(backend, causal=True))
        yield Fixture(f"mask-padding-{backend}", masked(backend, causal=False))
    yield Fixture("mask-window-efficient", window_mask)
    yield Fixture("graph-replay", replayed)
    yield Fixture("graph-capture", captured, steps=1)
    yield Fixture("deterministic-backward", deterministic_step)
    yield Fixture("autocast", autocast)
    yield Fixture("training-step", training_step)
    yield Fixture("inference-modules", inference, modules=True)
    yield from _both_directions(compiled)
    yield Fixture("compiled-sdpa", compiled_sdpa)
    yield Fixture("compiled-training-step", compiled_training_step)
    for name in implementation.names("ladder"):
        direction = "backward" if name.startswith("backward") else "forward"
        yield Fixture(f"ladder-{name}", of_implementation(name, SINGLE, direction))


def _both_directions(names: list[str]) -> Iterator[Fixture]:
    for name in names:
        for direction in ("forward", "backward"):
            yield Fixture(f"{name}-{direction}", of_implementation(name, HALF, direction))


def of_implementation(name: str, workload: Workload, direction: str) -> Callable[[Device], Call]:
    """One of attnscope's implementations, as the profiles of a run call it."""

    def make(device: Device) -> Call:
        import torch

        if reasons := implementation.safe_reasons(implementation.find(name), workload, device, direction):
            raise Skipped("; ".join(reasons))
        prepared = implementation.find(name).prepare(workload, device)
        inputs = make_inputs(workload, device)
        if direction == "backward":
            saved = prepared.forward(inputs, save=True).saved
            return lambda: prepared.backward(inputs, saved)

        def forward() -> object:
            with torch.no_grad():
                return prepared.forward(inputs)

        return forward

    return make


def masked(backend: str, *, causal: bool) -> Callable[[Device], Call]:
    """A bool mask tensor made before the call: a triangle, or lengths."""

    def make(device: Device) -> Call:
        import torch

        q, k, v = qkv(device.kind, 2, 8, 256, 64)
        lengths = torch.tensor([100, 256], device=device.kind)

        def call() -> object:
            mask = (
                torch.ones(256, 256, dtype=torch.bool, device=device.kind).tril()
                if causal
                else (torch.arange(256, device=device.kind) < lengths[:, None])[:, None, None, :]
            )
            with torch.no_grad(), only(f"{backend.upper()}{'' if backend == 'math' else '_ATTENTION'}"):
                return sdpa(q, k, v, attn_mask=mask)

        try:
            call()
        except RuntimeError as error:
            raise Skipped(str(error).strip().partition("\n")[0]) from error
        return call

    return make


def window_mask(device: Device) -> Call:
    import torch

    q, k, v = qkv(device.kind, 2, 8, 256, 64)

    def call() -> object:
        mask = torch.ones(256, 256, dtype=torch.bool, device=device.kind).tril().triu(-63)
        with torch.no_grad(), only("EFFICIENT_ATTENTION"):
            return sdpa(q, k, v, attn_mask=mask)

    return call


def _capture(device: Device) -> Any:
    import torch

    if device.kind != "cuda":
        raise Skipped("a CPU has no CUDA graphs")
    q, k, v = qkv(device.kind, 2, 8, 256, 64)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            sdpa(unfused(q, k, v), k, v)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sdpa(unfused(q, k, v), k, v)
    return graph, (q, k, v)


def replayed(device: Device) -> Call:
    graph, kept = _capture(device)
    return lambda: (graph.replay(), kept)


def captured(device: Device) -> Call:
    """A capture inside the window, with the warm-up before it, then its replay."""

    def call() -> object:
        import torch

        graph, kept = _capture(device)
        graph.replay()
        torch.cuda.synchronize()  # before the graph and its memory go
        return kept

    return call


def deterministic_step(device: Device) -> Call:
    import torch

    if device.kind != "cuda":
        raise Skipped("FlashAttention-2's backward needs a GPU")
    inputs = qkv(device.kind, 2, 8, 256, 64, grad=True)
    gradient = torch.randn_like(inputs[0])

    def call() -> object:
        with deterministic(), only("FLASH_ATTENTION"):
            return torch.autograd.grad(sdpa(*inputs, is_causal=True), inputs, gradient)

    return call


def small_model(device: Device, layers: int) -> tuple[Any, Any]:
    import torch

    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device.kind)
    return model, torch.randn(4, 128, 256, device=device.kind)


def autocast(device: Device) -> Call:
    """fp32 weights, bf16 products: an attention of its own, product by product."""
    import torch

    q, k, v = qkv(device.kind, 2, 8, 256, 64, dtype="float32")

    def call() -> object:
        with torch.no_grad(), torch.autocast(device.kind, torch.bfloat16):
            return unfused(q, k, v, in_place=False)

    return call


def training_step(device: Device) -> Call:
    import torch

    model, x = small_model(device, 1)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def call() -> object:
        optimizer.zero_grad()
        with torch.autocast(device.kind, torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return call


def inference(device: Device) -> Call:
    import torch

    model, x = small_model(device, 1)
    model.eval().to(torch.bfloat16)

    def call() -> object:
        with torch.no_grad():
            return model(x.to(torch.bfloat16))

    return call


def compiled_sdpa(device: Device) -> Call:
    import torch

    q, k, v = qkv(device.kind, 2, 8, 256, 64)

    def attention(q: Any, k: Any, v: Any) -> Any:
        return sdpa(q * 0.5, k, v, is_causal=True) + 1

    compiled = torch.compile(attention, dynamic=False)

    def call() -> object:
        with torch.no_grad():
            return compiled(q, k, v)

    return call


def compiled_training_step(device: Device) -> Call:
    import torch

    inputs = qkv(device.kind, 2, 8, 256, 64, grad=True)
    gradient = torch.randn_like(inputs[0])
    compiled = torch.compile(lambda q, k, v: unfused(q, k, v) * 2, dynamic=False)
    return lambda: torch.autograd.grad(compiled(*inputs), inputs, gradient)
