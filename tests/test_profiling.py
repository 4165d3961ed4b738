"""Real profiles on this CPU: torch.profiler really runs, the trace is really read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attnscope.device import Device, find_device  # noqa: E402
from attnscope.errors import TraceError, UsageError  # noqa: E402
from attnscope.explaining import explain_profile  # noqa: E402
from attnscope.implementation import Gradients, Output, find  # noqa: E402
from attnscope.inputs import Inputs, make_inputs  # noqa: E402
from attnscope.profiling import kernel_names, profile_call, step_label  # noqa: E402
from attnscope.records import Finding, KernelEvent, Profile  # noqa: E402
from attnscope.scrubbing import scrub  # noqa: E402
from attnscope.trace import read_trace  # noqa: E402
from attnscope.workload import Workload  # noqa: E402

SMALL = Workload.parse("B1,H2,L48,D16,fp32,causal")


class Attention:
    """softmax(QKᵀ)V with the mask made in each call; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        self.calls += 1
        assert torch.is_grad_enabled() is save
        leaves = [t.detach().requires_grad_(save) for t in (inputs.q, inputs.k, inputs.v)]
        q, k, v = leaves
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        out = torch.softmax((q @ k.transpose(-1, -2) * 0.25).masked_fill(hidden, -torch.inf), -1) @ v
        return Output(out.detach(), saved=(out, leaves) if save else None)

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        self.calls += 1
        return Gradients(*torch.autograd.grad(saved[0], saved[1], inputs.grad_out, retain_graph=True))


@pytest.fixture(scope="module")
def cpu() -> Device:
    return find_device("cpu")


def profiled(
    prepared: Any, inputs: Inputs, name: str, direction: str, path: Path, **options: Any
) -> tuple[Profile, tuple[KernelEvent, ...], dict[str, Finding]]:
    profile_call(prepared, inputs, direction, label=step_label(name, direction), trace_path=path, **options)
    profile, ops, findings = explain_profile(
        read_trace(path), workload=inputs.workload, implementation=name, direction=direction
    )
    return profile, ops, {f.id: f for f in findings}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_direction_is_profiled_alone(direction: str, cpu: Device, tmp_path: Path) -> None:
    prepared, inputs = Attention(), make_inputs(SMALL, cpu)
    profile, ops, findings = profiled(prepared, inputs, "naive", direction, tmp_path / "deep" / "t.json.gz")
    assert prepared.calls == 3 + 5 + (direction == "backward")
    assert (profile.steps, profile.label) == (3, f"attnscope/naive/{direction}")
    assert profile.spilled_kernels == 0 and profile.gpu_us_per_call is None and profile.self_gpu_us_total is None
    roles = [op.role for op in ops]
    if direction == "forward":
        assert [r for r in roles if r != "mask building"] == [
            "scores matmul", "scale", "copy", "mask", "softmax", "values matmul"
        ]  # fmt: skip
        assert "mask-rebuilt-per-call" in findings
    else:
        assert roles.count("gradient matmul") == 4 and "softmax backward" in roles and "softmax" not in roles
    assert "masked-fill-copy" in findings
    assert profile.kernels_per_call == len(ops)
    assert profile.cpu_ops_per_call > len(ops)
    assert sum(op.duration_us for op in ops) <= 1.5 * max(profile.cpu_us_per_call, profile.self_cpu_us_total)
    assert profile.table[0].self_cpu_us == max(row.self_cpu_us for row in profile.table)


def test_steps_are_settable(cpu: Device, tmp_path: Path) -> None:
    prepared, inputs = Attention(), make_inputs(SMALL, cpu)
    profile, _, _ = profiled(
        prepared, inputs, "x", "forward", tmp_path / "t.json.gz", wait=0, warmup=2, active=5, warm_calls=1
    )
    assert (profile.steps, prepared.calls) == (5, 8)


def test_the_trace_says_nothing_of_the_machine(cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSCOPE_SECRET", "do-not-write-me")
    path = profile_call(
        Attention(), make_inputs(SMALL, cpu), "forward", label="attnscope/x/forward", trace_path=tmp_path / "t.json.gz"
    )
    text = gzip.decompress(path.read_bytes()).decode()
    document = json.loads(text)
    assert "traceEvents" in document and "baseTimeNanoseconds" in document
    assert not {"traceName", "host_name", "trace_id", "distributedInfo"} & document.keys()
    assert str(tmp_path) not in text and "do-not-write-me" not in text
    assert [p.name for p in tmp_path.iterdir()] == ["t.json.gz"]  # no leftovers


def test_paths_in_events_are_cut_to_file_names() -> None:
    event = {
        "name": "attnscope/naive/forward",
        "args": {"kernel_file": "/tmp/torchinductor_me/ab/cabc.py", "list": ["in C:\\Users\\me\\f.py now", 3]},
    }
    found = scrub({"traceEvents": [event], "traceName": "/home/me/t.json", "env": {"HOME": "/home/me"}})
    assert found == {
        "traceEvents": [
            {"name": "attnscope/naive/forward", "args": {"kernel_file": "cabc.py", "list": ["in f.py now", 3]}}
        ]
    }


def test_names_of_what_really_ran(cpu: Device) -> None:
    inputs = make_inputs(SMALL, cpu)
    forward = kernel_names(Attention(), inputs, "forward")
    assert {"aten::bmm", "aten::masked_fill_", "aten::_softmax"} <= set(forward)
    assert len(set(forward)) == len(forward)
    backward = kernel_names(Attention(), inputs, "backward")
    assert "aten::_softmax_backward_data" in backward and "aten::_softmax" not in backward

    class Sdpa(Attention):
        def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
            return Output(torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v))

    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in kernel_names(Sdpa(), inputs, "forward")


def test_a_second_profiler_is_refused_by_sentence(cpu: Device, tmp_path: Path) -> None:
    inputs = make_inputs(SMALL, cpu)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        with pytest.raises(TraceError, match="another torch profiler is recording"):
            kernel_names(Attention(), inputs, "forward")
        with pytest.raises(TraceError, match="another torch profiler is recording"):
            profile_call(Attention(), inputs, "forward", label="attnscope/x/forward", trace_path=tmp_path / "t.json.gz")
    assert kernel_names(Attention(), inputs, "forward")  # and afterwards all is well


def test_a_call_that_raises_leaves_the_profiler_usable(cpu: Device, tmp_path: Path) -> None:
    inputs = make_inputs(SMALL, cpu)

    class Failing(Attention):
        def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
            if self.calls == 4:
                raise ValueError("on purpose")
            return super().forward(inputs, save=save)

    with pytest.raises(ValueError, match="on purpose"):
        profile_call(Failing(), inputs, "forward", label="attnscope/x/forward", trace_path=tmp_path / "t.json.gz")
    assert not list(tmp_path.iterdir())
    assert kernel_names(Attention(), inputs, "forward")


def test_a_place_that_cannot_be_written_is_a_sentence(cpu: Device, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="cannot write trace"):
        profile_call(
            Attention(), make_inputs(SMALL, cpu), "forward", label="attnscope/x/forward",
            trace_path=tmp_path / "file" / "t.json.gz",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"direction": "sideways"}, "direction must be forward or backward"),
        ({"label": "mine"}, "label must start with"),
        ({"active": 0}, "active must be 1 or more, got 0"),
        ({"wait": -1}, "wait must be 0 or more, got -1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], says: str, cpu: Device, tmp_path: Path) -> None:
    arguments = {"direction": "forward", "label": "attnscope/x/forward"} | options
    with pytest.raises(UsageError, match=says):
        profile_call(Attention(), make_inputs(SMALL, cpu), trace_path=tmp_path / "t.json.gz", **arguments)


# --- our implementations on a CPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "workload", "kernels", "findings"),
    [
        ("naive", "B1,H2,L64,D16,bf16,causal", 6, {"masked-fill-copy"}),
        ("naive_inplace", "B1,H2,L64,D16,bf16,causal", 5, set()),
        ("naive", "B1,H2,L64,D16,bf16", 4, set()),
        ("naive", "B1,H4/2,L64,D16,bf16", 6, {"gqa-materialised"}),
        ("sdpa_math", "B1,H2,L64,D16,bf16,causal", None, {"safe-softmax", "upcast", "mask-rebuilt-per-call"}),
        ("sdpa_math", "B1,H2,L64,D16,fp32", None, {"safe-softmax"}),
        ("sdpa_math", "B1,H4/2,L64,D16,fp32", None, {"gqa-materialised"}),
        ("sdpa_flash", "B1,H2,L64,D16,bf16,causal", 1, {"fused"}),
        ("sdpa_flash", "B1,H4/2,L64,D16,bf16,causal", 1, {"fused"}),
        ("sdpa_flash", "B2,H2,L256,D64,fp32,mask=bool", None, {"mask-rebuilt-per-call"}),
    ],
)
def test_the_article_on_a_cpu(
    name: str, workload: str, kernels: int | None, findings: set[str], cpu: Device, tmp_path: Path
) -> None:
    w = Workload.parse(workload)
    prepared = find(name).prepare(w, cpu)
    profile, ops, found = profiled(prepared, make_inputs(w, cpu), name, "forward", tmp_path / "t.json.gz")
    if kernels is not None:
        assert len(ops) == kernels, [(op.name, op.role) for op in ops]
        assert findings == set(found)
    assert findings <= set(found)
    assert "unknown" not in {op.role for op in ops}
    assert all(op.unit_rule for op in ops)
    assert ("masked-fill-copy" in found) == any("× copy" in s for s in profile.surprises)


def test_a_fused_backward_on_a_cpu(cpu: Device, tmp_path: Path) -> None:
    w = Workload.parse("B1,H2,L64,D16,fp32,causal")
    prepared = find("sdpa_flash").prepare(w, cpu)
    profile, ops, found = profiled(prepared, make_inputs(w, cpu), "sdpa_flash", "backward", tmp_path / "t.json.gz")
    assert [op.role for op in ops] == ["fused attention backward"]
    assert profile.surprises == () and set(found) == {"fused"}


@pytest.mark.slow
def test_the_compiled_call(cpu: Device, tmp_path: Path) -> None:
    inputs = make_inputs(SMALL, cpu)

    def forward(inputs: Inputs, *, save: bool = False) -> Output:
        del save
        return Output(torch.softmax(inputs.q @ inputs.k.transpose(-1, -2) * 0.25, -1) @ inputs.v)

    call = SimpleNamespace(forward=forward, backward=None)
    profile, ops, _ = profiled(call, inputs, "naive_compiled", "forward", tmp_path / "t.json.gz", compile=True)
    assert any("CompiledFxGraph" in (op.op or "") for op in ops) or any("fused attention" in op.role for op in ops)
    assert profile.steps == 3


@pytest.mark.gpu
def test_kernels_of_one_call_on_a_gpu(tmp_path: Path) -> None:
    device = find_device("cuda")
    w = Workload.parse("B8,H16,L1024,D64,bf16,causal")
    inputs = make_inputs(w, device)
    for name, count, finding in (
        ("naive", 6, "masked-fill-copy"),
        ("naive_inplace", 5, None),
        ("sdpa_flash", 1, "fused"),
    ):
        prepared = find(name).prepare(w, device)
        profile, _, found = profiled(prepared, inputs, name, "forward", tmp_path / f"{name}.json.gz")
        assert profile.kernels_per_call == count
        assert profile.spilled_kernels == 0
        assert finding is None or finding in found
        assert all("aten::" not in kernel for kernel in kernel_names(prepared, inputs, "forward"))
