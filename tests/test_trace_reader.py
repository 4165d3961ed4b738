from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from attnscope.errors import TraceError
from attnscope.trace import parse_trace, read_trace
from trace_builder import NVJET, TraceBuilder, naive

FOREIGN = Path(__file__).parents[2] / "shared" / "traces"


def event(
    cat: str, name: str, ts: object, dur: object, tid: object = 1, pid: object = 1, **args: object
) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": pid, "args": args}


def parse(*events: dict[str, object]):
    return parse_trace(json.dumps({"traceEvents": list(events)}).encode())


def test_a_kernel_finds_its_launch_by_correlation_and_its_op_by_nesting() -> None:
    b = TraceBuilder()
    with b.step("attnscope/naive/forward"):
        naive(b)
    trace = b.trace()
    gemm = next(e for e in trace.device_events if e.name == NVJET)
    assert gemm.launch is not None and gemm.launch.name == "cudaLaunchKernel"
    assert gemm.op is not None
    assert [op.name for op in gemm.op.ancestors()] == [
        "aten::bmm", "aten::matmul", "attnscope/naive/forward", "ProfilerStep#2"
    ]  # fmt: skip
    assert (gemm.grid, gemm.block, gemm.registers, gemm.shared_memory_bytes) == ((1024, 1, 1), (384, 1, 1), 168, 231424)
    assert trace.devices[0].shared_mem_per_block_optin == 232448
    assert trace.problems == []


def test_external_id_is_not_believed() -> None:
    """kineto#1001: it may equal the correlation, and then names another op."""
    trace = parse(
        event("cpu_op", "aten::wrong", 0, 10, **{"External id": 5}),
        event("cpu_op", "aten::right", 20, 10, **{"External id": 9}),
        event("cuda_runtime", "cudaLaunchKernel", 22, 2, correlation=5, **{"External id": 5}),
        event("kernel", "k", 40, 3, tid=7, pid=0, correlation=5, **{"External id": 5}),
    )
    (kernel,) = trace.device_events
    assert kernel.op is not None and kernel.op.name == "aten::right"


def arrow(ph: str, number: object, ts: object, tid: object = 1, pid: object = 1) -> dict[str, object]:
    return {"ph": ph, "id": number, "ts": ts, "tid": tid, "pid": pid, "cat": "ac2g", "name": "ac2g", "bp": "e"}


def launched(*more: dict[str, object], correlation: bool = False) -> list[str | None]:
    """Which op launched each of two kernels, the second of which was called first."""
    ids = [{"correlation": n} if correlation else {} for n in (0, 5, 6)]
    trace = parse(
        event("cpu_op", "aten::first", -7.5, 10), event("cuda_runtime", "cudaLaunchKernel", -5.25, 2, **ids[1]),
        event("cpu_op", "aten::second", 20, 10), event("cuda_runtime", "cudaLaunchKernel", 22, 2, **ids[2]),
        event("kernel", "k", 40, 3, tid=7, pid=0, **ids[2]), event("kernel", "k", 50, 3, tid=7, pid=0, **ids[1]),
        *more,
    )  # fmt: skip
    return [e.op.name if e.op else None for e in trace.device_events]


def test_flows_stand_in_for_correlations_that_are_missing() -> None:
    flows = [arrow("s", 5, -5.25), arrow("s", 6, 22), arrow("f", 6, 40, 7, 0), arrow("f", 5, 50, "7", 0)]
    assert launched() == [None, None]
    assert launched(*flows) == ["aten::second", "aten::first"]
    assert launched(*flows[:3]) == ["aten::second", None]
    assert launched(*(one | {"ts": str(one["ts"])} for one in flows)) == ["aten::second", "aten::first"]


def test_flows_are_not_asked_where_correlations_say_it() -> None:
    crossed = [arrow("s", 5, 22), arrow("s", 6, -5.25), arrow("f", 6, 40, 7, 0), arrow("f", 5, 50, 7, 0)]
    assert launched(*crossed, correlation=True) == ["aten::second", "aten::first"]


@pytest.mark.parametrize("number", [None, "5", 5.5, [5], True])
def test_odd_flows_lead_nowhere(number: object) -> None:
    odd = [arrow("s", number, -5.25), arrow("f", number, 50, 7, 0), arrow("s", 5, None), arrow("f", 5, "soon", 7, 0)]
    assert launched(*odd) == [None, None]


def test_a_flow_into_the_past_is_not_followed() -> None:
    assert launched(arrow("s", 5, 22), arrow("f", 5, 40, 7, 0)) == ["aten::second", None]
    trace = parse(
        event("kernel", "k", 1, 3, tid=7, pid=0), event("cuda_runtime", "cudaLaunchKernel", 22, 2),
        arrow("s", 5, 22), arrow("f", 5, 1, 7, 0),
    )  # fmt: skip
    assert trace.device_events[0].launch is None


@pytest.mark.skipif(not FOREIGN.is_dir(), reason="the foreign traces are not beside this checkout")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("v100-resnet50-2021", marks=pytest.mark.slow),
        "a100-particle-transformer-b256",
        "mi300-qwen1.5-0.5b",
    ],
)
def test_flows_of_foreign_traces_say_what_correlations_say(name: str) -> None:
    data = json.loads(gzip.decompress((FOREIGN / f"{name}.json.gz").read_bytes()))
    by_correlation = read_trace(FOREIGN / f"{name}.json.gz")
    for one in data["traceEvents"]:
        one.get("args", {}).pop("correlation", None)
    by_flow = parse_trace(json.dumps(data).encode())
    pairs = [
        (a.launch, b.launch)
        for a, b in zip(by_correlation.device_events, by_flow.device_events, strict=True)
        if b.launch
    ]
    assert len(pairs) > 100 and len(pairs) > 0.9 * sum(e.launch is not None for e in by_correlation.device_events)
    assert all(a is not None and (a.name, a.start_ns) == (b.name, b.start_ns) for a, b in pairs)


@pytest.mark.parametrize(
    "launch", ["cuLaunchKernelEx", "cudaLaunchKernelExC", "hipModuleLaunchKernel", "cudaGraphLaunch"]
)
def test_a_launch_of_any_name_is_a_launch(launch: str) -> None:
    trace = parse(
        event("cuda_driver", launch, 1, 2, correlation=5), event("kernel", "k", 9, 1, tid=7, pid=0, correlation=5)
    )
    assert trace.device_events[0].launch is trace.runtime_calls[0]
    assert trace.runtime_calls[0].launches


def test_threads_do_not_nest_into_each_other() -> None:
    trace = parse(
        event("cpu_op", "outer", 0, 100, tid=1), event("cpu_op", "other thread", 10, 20, tid=2),
        event("cpu_op", "inner", 10, 20, tid="-1"),
    )  # fmt: skip
    parents = {op.name: op.parent.name if op.parent else None for op in trace.ops}
    assert parents == {"outer": None, "other thread": None, "inner": "outer"}
    assert next(op for op in trace.ops if op.name == "outer").self_ns == 80_000


def test_neighbours_that_touch_do_not_nest() -> None:
    trace = parse(event("cpu_op", "a", 0, 10), event("cpu_op", "b", 10, 10), event("cpu_op", "c", 20, 0))
    assert [op.parent for op in trace.ops] == [None, None, None]


def test_times_are_the_very_nanoseconds_that_were_written() -> None:
    """Doubles of five thousand million microseconds, as kineto writes them, lose nothing."""
    generator = random.Random(0)
    base = 7_889_237_000_000_000
    starts = sorted(base + generator.randrange(10**10) for _ in range(2000))
    trace = parse(*(event("cpu_op", str(ns), ns / 1000, 0.001, tid=ns) for ns in starts))
    origin = int(trace.ops[0].name) - trace.ops[0].start_ns
    assert all(int(op.name) - op.start_ns == origin for op in trace.ops)
    assert {op.duration_ns for op in trace.ops} == {1}


def test_both_roots_and_gzip_by_its_magic_bytes(tmp_path: Path) -> None:
    events = [event("cpu_op", "aten::mm", 1, 2)]
    for number, data in enumerate((events, {"traceEvents": events}, {"traceEvents": events, "deviceProperties": None})):
        raw = json.dumps(data).encode()
        for packed in (raw, gzip.compress(raw)):
            path = tmp_path / f"{number}.whatever"
            path.write_bytes(packed)
            assert [op.name for op in read_trace(path).ops] == ["aten::mm"]


def test_the_schema_of_2021_reads() -> None:
    trace = parse(
        event("Operator", "aten::mm", 100, 50, tid="1890023232", **{"Input dims": [[2, 3]]}),
        event("Runtime", "cudaLaunchKernel", 110, 5, tid="1890023232", correlation=3),
        event("Kernel", "k", 130, 9, tid="stream 7", pid=0, correlation=3),
        event("Memcpy", "Memcpy HtoD (Pageable -> Device)", 140, 9, tid="stream 7", pid=0, correlation=4),
    )
    assert [e.kind for e in trace.device_events] == ["kernel", "memcpy"]
    assert trace.device_events[0].op is not None and trace.device_events[0].op.shapes == [[2, 3]]


def test_times_as_text_and_unusable_times() -> None:
    trace = parse(
        event("cpu_op", "a", "12.5", "2"), event("cpu_op", "b", 13, -4), event("cpu_op", "c", "soon", 1),
        event("cpu_op", "d", None, 1), event("cpu_op", "e", 14, "inf"),
    )  # fmt: skip
    assert [op.name for op in trace.ops] == ["a"]
    assert trace.ops[0].duration_ns == 2000
    assert trace.problems == ["4 events without a usable time or duration are left out"]


def test_what_is_no_work_is_left_out() -> None:
    trace = parse(
        event("gpu_user_annotation", "ProfilerStep#2", 0, 9, tid=7, pid=0), event("python_function", "f", 0, 9),
        {"ph": "M", "name": "process_name", "pid": "Spans", "args": {"name": "python"}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 3, "ts": 1, "pid": 1, "tid": 1},
        {"ph": "C", "cat": "x", "name": "Power (W)", "ts": 1, "args": {"W": 3}},
    )  # fmt: skip
    assert not trace.ops and not trace.device_events and not trace.runtime_calls


def test_kernels_without_a_launch_are_counted_and_belong_to_no_step() -> None:
    b = TraceBuilder()
    b.kernel("spilled", 30, launch=None)
    b.kernel("launched before the step", 30)
    with b.step("attnscope/naive/forward"), b.op("aten::mm"):
        b.kernel("mine", 5)
    trace = b.trace()
    (step,) = trace.steps("attnscope/naive/forward")
    assert [e.name for e in step.device_events] == ["mine"]
    assert [e.name for e in trace.spilled()] == ["spilled", "launched before the step"]
    assert trace.problems == ["1 of 3 device events were launched before the trace"]
    assert [len(s.device_events) for s in trace.steps("ProfilerStep#")] == [1]


def test_a_step_counts_what_it_launched_however_late_it_ran() -> None:
    b = TraceBuilder()
    for _ in range(2):
        with b.step("attnscope/x/forward"), b.op("aten::mm"):
            b.kernel("long", 5000)
    steps = b.trace().steps("attnscope/x/forward")
    assert steps[0].device_events[0].end_ns > steps[1].start_ns
    assert [len(step.device_events) for step in steps] == [1, 1]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is no Chrome trace"),
        (b'{"traceEvents": [{"ph": "X", "name": "cut', "is no Chrome trace"),
        (b'{"traceEvents": [{"ph": "X", "ts": NaN}]}', "is no Chrome trace"),
        (b'{"traceEvents": 3}', "is no Chrome trace"),
        (b'{"schema": "speedscope"}', "must be a Chrome trace with a list traceEvents"),
        (b"\x1f\x8b not really", "damaged gzip"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "damaged gzip"),
        (b"\xff\xfe\x00", "is no Chrome trace"),
        (b"[" * 100_000, "is no Chrome trace"),
    ],
)
def test_a_file_that_is_no_trace_is_a_sentence(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=says) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read trace .*No such file"):
        read_trace(tmp_path / "none.json")


@pytest.mark.skipif(not FOREIGN.is_dir(), reason="the foreign traces are not beside this checkout")
@pytest.mark.parametrize("path", sorted(FOREIGN.glob("*.json.gz")), ids=lambda p: p.name)
def test_every_foreign_trace_reads(path: Path) -> None:
    trace = read_trace(path)
    assert trace.device_events
    assert all(e.duration_ns >= 0 and e.start_ns >= 0 for e in trace.device_events)
    launched = [e for e in trace.device_events if e.launch is not None]
    assert all(e.launch.start_ns <= e.end_ns for e in launched if e.launch is not None)
    assert len(launched) > 0.6 * len(trace.device_events)


@pytest.mark.skipif(not FOREIGN.is_dir(), reason="the foreign traces are not beside this checkout")
def test_foreign_facts() -> None:
    """shared/traces/README.md: 436 of 1,465 kernels were launched before the window."""
    kernels = [e for e in read_trace(FOREIGN / "h100-qwen1.5-0.5b.json.gz").device_events if e.kind == "kernel"]
    assert (sum(e.launch is None for e in kernels), len(kernels)) == (436, 1465)
    graph = read_trace(FOREIGN / "mi300-vllm-decode-graph.json.gz")
    assert max(sum(e.launch is call for e in graph.device_events) for call in graph.runtime_calls) > 300
