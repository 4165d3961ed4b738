"""The ladder on a real card: every rung, block size and length against float64; streams, graphs, speed of preparing.

``pytest -m gpu tests/gpu/test_ladder_gpu.py``. Each rung is one test and tells all its failures at once, so that one
run on a borrowed card says everything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from attnscope.checking import check_implementation  # noqa: E402
from attnscope.device import find_device  # noqa: E402
from attnscope.implementations.cuda_ladder import LAST_RUNGS, RUNGS, common, empty_gradients  # noqa: E402
from attnscope.inputs import make_inputs  # noqa: E402
from attnscope.ladder import workload_for  # noqa: E402
from attnscope.reference import compute_attention  # noqa: E402
from attnscope.workload import Workload  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

LENGTHS = (1, 63, 64, 65, 500, 1024)
ALL = [(way, rung) for way, rungs in RUNGS.items() for rung in (*rungs, *LAST_RUNGS[way])]
IDS = [rung.name for _, rung in ALL]
# Largest error of an element over its condition scale, by what the rung computes in: fp32 a few roundings of 2**-24,
# TF32 of 2**-11 carried through the exponent, 16-bit of 2**-9 (and of the scores too, where they are stored).
LIMITS = {"fp32": 5e-6, "tf32": 2e-2, "16-bit": 3e-2, "16-bit scores": 2e-1}
LSE_LIMIT = 1e-4


@pytest.fixture(scope="module")
def device():
    return find_device("cuda")


@pytest.fixture(scope="module")
def truths():
    return {}


def spelled(length: int) -> str:
    heads = "B2,H3" if length <= 65 else "B1,H2"
    return f"{heads},L{length},D64,fp32,causal,layout=qkv"


def limit_for(rung, workload) -> float:
    compute = rung.sheet.compute_precision(workload.dtype)
    if compute in ("bf16", "fp16"):
        return LIMITS["16-bit scores"]
    if workload.dtype in ("bf16", "fp16"):
        return LIMITS["16-bit"]
    return LIMITS[compute]


def run(way, prepared, inputs):
    output = prepared.forward(inputs, save=way == "backward")
    tensors = {"out": output.out} | ({"lse": output.lse} if output.lse is not None else {})
    if way == "backward":
        tensors |= prepared.backward(inputs, output.saved).tensors()
    return tensors


def complaints(tensors, truth, limit) -> list[str]:
    found = []
    for name, tensor in tensors.items():
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            found.append(f"{name}: {bad} of {tensor.numel()} not finite")
            continue
        scale = truth.scales.get(name, torch.ones((), device=tensor.device))
        error = (tensor.double() - getattr(truth, name)).abs() / (scale + 1e-9)
        allowed = LSE_LIMIT if name == "lse" else limit
        worst = error.max().item()
        if worst > allowed:
            place = torch.unravel_index(error.argmax(), error.shape)
            wrong = int((error > allowed).sum())
            where = ", ".join(str(int(i)) for i in place)
            found.append(
                f"{name}: {wrong} of {error.numel()} off, worst {worst:.2e} at ({where}), allowed {allowed:.0e}"
            )
    return found


@pytest.mark.parametrize(("way", "rung"), ALL, ids=IDS)
def test_every_block_size_and_length(way, rung, device, truths):
    failures, started = [], time.perf_counter()
    probe = workload_for(rung(), Workload.parse(spelled(64)), device)
    if reasons := rung().reasons_unsupported(probe, device, way):
        pytest.skip("; ".join(reasons))
    for length in LENGTHS:
        workload = workload_for(rung(), Workload.parse(spelled(length)), device)
        inputs = make_inputs(workload, device, 3, "needles" if length <= 65 else "plain")
        key = str(workload)
        if key not in truths:
            truths[key] = compute_attention(inputs)
        for block in rung.block_sizes:
            prepared = rung().prepare(workload, device, block_size=block)
            first = {name: t.clone() for name, t in run(way, prepared, inputs).items()}
            again = run(way, prepared, inputs)
            torch.cuda.synchronize()
            said = complaints(again, truths[key], limit_for(rung(), workload))
            if rung.sheet.deterministic:
                said += [f"{n}: a second call differs" for n in first if not torch.equal(first[n], again[n])]
            failures += [f"{rung.name} block {block} T {length}: {sentence}" for sentence in said]
    seconds = time.perf_counter() - started
    print(f"{rung.name}: {len(LENGTHS) * len(rung.block_sizes)} cases in {seconds:.1f} s")
    assert not failures, f"{len(failures)} failures\n" + "\n".join(failures[:40])


@pytest.mark.parametrize("layout", ["bhld", "blhd", "qkv"])
@pytest.mark.parametrize(("way", "rung"), ALL, ids=IDS)
def test_the_projects_own_check(way, rung, layout, device):
    workload = Workload.parse(f"B2,H3,L129,D64,fp32,causal,layout={layout}")
    if layout not in rung.sheet.layouts:
        pytest.skip(f"takes layout {', '.join(rung.sheet.layouts)}")
    workload = workload_for(rung(), workload, device)
    result = check_implementation(rung(), workload, device, directions=(way,), quick=True)
    assert result.passed, result.message


@pytest.mark.parametrize(("way", "rung"), ALL, ids=IDS)
def test_expanded_strided_inputs(way, rung, device):
    """One head's tensors expanded to all, and d strided: what no layout of a workload makes."""
    workload = workload_for(rung(), Workload.parse("B2,H3,L70,D64,fp32,causal,layout=bhld"), device)
    inputs = make_inputs(workload, device, 4)
    inputs.k = inputs.k[:, :1].expand(2, 3, 70, 64)
    inputs.v = inputs.v.transpose(2, 3).contiguous().transpose(2, 3)
    tensors = run(way, rung().prepare(workload, device), inputs)
    said = complaints(tensors, compute_attention(inputs), limit_for(rung(), workload))
    assert not said, "\n".join(said)


@pytest.mark.parametrize(("way", "rung"), ALL, ids=IDS)
def test_another_stream_and_a_graph(way, rung, device):
    workload = workload_for(rung(), Workload.parse("B1,H2,L130,D64,fp32,causal,layout=qkv"), device)
    inputs = make_inputs(workload, device, 5)
    prepared = rung().prepare(workload, device)
    expected = {name: t.clone() for name, t in run(way, prepared, inputs).items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            beside = run(way, prepared, inputs)
        saved = prepared.forward(inputs, save=True).saved if way == "backward" else None
    torch.cuda.synchronize()
    for name, tensor in expected.items():
        torch.testing.assert_close(beside[name], tensor, msg=lambda m, name=name: f"{name} on another stream: {m}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = (
            {"out": prepared.forward(inputs).out} if way == "forward" else prepared.backward(inputs, saved).tensors()
        )
    for tensor in captured.values():
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for name, tensor in captured.items():
        torch.testing.assert_close(tensor, expected[name], msg=lambda m, name=name: f"{name} of a replay: {m}")


@pytest.mark.parametrize(("way", "rung"), ALL, ids=IDS)
def test_steps_together_are_the_operation(way, rung, device):
    workload = workload_for(rung(), Workload.parse("B1,H2,L96,D64,fp32,causal,layout=qkv"), device)
    inputs, prepared = make_inputs(workload, device, 6), rung().prepare(workload, device)
    whole = run(way, prepared, inputs)
    if way == "forward":
        output = prepared.new_output(inputs)
        steps, parts = prepared.steps(inputs, output), {"out": output.out}
    else:
        gradients = empty_gradients(inputs)
        saved = prepared.forward(inputs, save=True).saved
        steps, parts = prepared.steps(inputs, saved, gradients), dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    for tensor in parts.values():
        tensor.fill_(float("nan"))
    for step in steps:
        step.run()
    for name, tensor in parts.items():
        torch.testing.assert_close(tensor, whole[name])


def test_nothing_is_left_of_tf32(device):
    before = torch.backends.cuda.matmul.fp32_precision
    workload = Workload.parse("B1,H1,L64,D64,fp32,causal")
    RUNGS["forward"][2]().prepare(workload, device).forward(make_inputs(workload, device))
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_64_bit_offsets(device):
    """Scores of more than 2**31 numbers: the last head's rows are as right as the first's."""
    free = torch.cuda.mem_get_info()[0]
    heads, length = 40, 8192  # 2.7e9 numbers
    if free < 3.2 * heads * length * length * 4:
        pytest.skip("needs about 35 GB")
    workload = Workload.parse(f"B1,H{heads},L{length},D64,fp32,causal,layout=qkv")
    inputs = make_inputs(workload, device, 7)
    out = RUNGS["forward"][3]().prepare(workload, device).forward(inputs).out
    q, k, v = (t[:, -1:, :, :].contiguous() for t in (inputs.q, inputs.k, inputs.v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out[:, -1:], expected, rtol=2e-2, atol=2e-2)


PREPARE = """
import sys, time
from attnscope.device import find_device
from attnscope.implementation import load_reference
from attnscope.workload import Workload
import torch
device = find_device("cuda")
torch.zeros(1, device="cuda")
rung = load_reference(sys.argv[1])
workload = Workload.parse(sys.argv[2])
started = time.perf_counter()
rung.prepare(workload, device)
torch.cuda.synchronize()
print(time.perf_counter() - started)
"""


@pytest.mark.parametrize(("name", "dtype"), [("ForwardV4", "fp32"), ("BackwardV8", "fp32"), ("ForwardV8Async", "bf16")])
def test_preparing_is_quick(name, dtype, tmp_path):
    """First use under 5 s, compile included; in a later process under 0.3 s (the context is there already)."""
    environment = os.environ | {
        "ATTNSCOPE_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    arguments = [f"attnscope.implementations.cuda_ladder:{name}", f"B2,H2,L256,D64,{dtype},causal"]
    seconds = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PREPARE, *arguments], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr[-2000:]
        seconds.append(float(done.stdout))
    print(f"{name}: first {seconds[0]:.2f} s, later {seconds[1]:.3f} s")
    assert seconds[0] < 5 and seconds[1] < 0.3, f"{name}: first {seconds[0]:.2f} s, later {seconds[1]:.3f} s"


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_the_sanitizers_find_nothing(tool):
    script = Path(__file__).with_name("sanitize_ladder.py")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
    if tool == "memcheck":  # cuda-bindings asks the driver for functions that it lacks, which is no fault of a kernel
        command += ["--report-api-errors", "no"]
    done = subprocess.run(
        [*command, sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                          "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    print("\n".join(done.stdout.splitlines()[-3:]))
    lines = (done.stdout + done.stderr).splitlines()
    said = [at for at, line in enumerate(lines) if re.match(r"=+ \w", line) and "COMPUTE-SANITIZER" not in line]
    first = min(said, default=0)
    assert done.returncode == 0, "\n".join([*lines[first : first + 30], "...", *lines[-20:]])


def test_the_folder_holds_what_the_rungs_name():
    assert all((common.FOLDER / rung.source).exists() for _, rung in ALL)
