"""The reader on what strangers bring: damaged files, other tools' files, odd values, hostile files."""

from __future__ import annotations

import gzip
import io
import json
import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import trace_builder as tb
from attnscope.errors import TraceError
from attnscope.explaining import explain_trace
from attnscope.reporting.explanation_html import explanations_page
from attnscope.reporting.explanation_json import explanations_json
from attnscope.reporting.explanation_text import render_explanation
from attnscope.trace import Op, Trace, parse_trace, read_trace
from attnscope.trace import blocks as blocks_module
from attnscope.trace import container as container_module
from attnscope.trace import halves as halves_module
from attnscope.trace.collector import Collector
from attnscope.trace.container import Outcome
from trace_builder import TraceBuilder


def sample() -> dict[str, Any]:
    b = TraceBuilder()
    for build in (tb.naive, tb.sdpa_flash, tb.sdpa_math):
        with b.step("train"):
            build(b)
    return b.document()


def written(document: object, indent: int | None = 1) -> bytes:
    return json.dumps(document, indent=indent).encode()


def names(trace: Trace) -> list[str]:
    return [op.name for op in trace.ops]


def parse_events(*events: dict[str, Any], **root: Any) -> Trace:
    return parse_trace(json.dumps({"traceEvents": list(events), **root}).encode())


def op(name: object = "aten::mm", ts: object = 1, dur: object = 2, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, **more}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("block_bytes", [97, 4096, 1 << 20])
def test_pieces_make_the_same_trace_as_the_whole(
    monkeypatch: pytest.MonkeyPatch, indent: int | None, block_bytes: int
) -> None:
    document = sample()
    whole = parse_trace(written(document, indent))
    data = written(document, indent)
    blocks = [data[at : at + block_bytes] for at in range(0, len(data), block_bytes)]
    monkeypatch.setattr("attnscope.trace.reader.Slices", lambda _: blocks)
    pieces = parse_trace(data)
    assert names(pieces) == names(whole) and pieces.problems == whole.problems == []
    assert [e.start_ns for e in pieces.device_events] == [e.start_ns for e in whole.device_events]
    assert pieces.devices[0].name == whole.devices[0].name == "NVIDIA H200"


def test_many_pieces(tmp_path: Path) -> None:
    """A document of more than one piece, its root's keys behind the events."""
    events = [op(f"aten::op{n}", n, 1, args={"note": "x" * 900}) for n in range(12_000)]
    path = tmp_path / "t.json"
    path.write_bytes(written({"traceEvents": events, "deviceProperties": [tb.H200], "trace_id": "}, {"}, None))
    trace = read_trace(path)
    assert len(trace.ops) == 12_000 and trace.devices[0].num_sms == 132 and trace.problems == []


def flat(trace: Trace) -> list[tuple[object, ...]]:
    """Everything that a trace holds, links as places in its lists."""
    ops = {id(one): at for at, one in enumerate([*trace.ops, *trace.modules])}
    calls = {id(one): at for at, one in enumerate(trace.runtime_calls)}
    return [
        *((o.name, o.start_ns, o.duration_ns, o.thread, o.args, ops.get(id(o.parent))) for o in trace.ops),
        *((o.name, o.start_ns, o.duration_ns, o.thread) for o in trace.modules),
        *((c.name, c.start_ns, c.thread, c.correlation, ops.get(id(c.op))) for c in trace.runtime_calls),
        *((e.name, e.start_ns, e.stream, e.grid, e.graph_id, calls.get(id(e.launch))) for e in trace.device_events),
    ]


def change(data: bytes, how: str) -> bytes:
    """The same document with something that the second half tells of."""
    late = b'"ts": 5132283187'
    return {
        "whole": data,
        "cut": data[:-3000],
        "damaged": data.replace(b'"aten::softmax"', b'"aten::"softmax"'),
        "late environment": data.replace(b'"baseTime', b'"env": {"PATH": "/bin", "HOME": "/"}, "baseTime'),
        "from the middle earlier": data.replace(late, b'"ts": 5132273187'),
    }[how]


@pytest.mark.parametrize("how", ["whole", "cut", "damaged", "late environment", "from the middle earlier"])
@pytest.mark.parametrize("events_first", [False, True])
def test_two_processes_read_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, events_first: bool
) -> None:
    document = sample()
    if events_first:
        document = {"traceEvents": document.pop("traceEvents"), **document}
    path = tmp_path / "t.json"
    path.write_bytes(change(written(document), how))
    alone = read_trace(path)
    monkeypatch.setattr(halves_module, "SMALLEST_BYTES", 1000)
    monkeypatch.setattr(halves_module, "_cores", lambda: 2)
    read = halves_module.read_in_halves(path)
    assert read is not None and read[1].whole > 100
    together = read_trace(path)
    assert flat(together) == flat(alone) and together.problems == alone.problems
    assert [d.name for d in together.devices] == [d.name for d in alone.devices]
    assert together.has_environment == alone.has_environment == (how == "late environment")


SMALL_READS = "import attnscope.trace.blocks as blocks; blocks.PACKED_BLOCK_BYTES = 256; blocks.BLOCK_BYTES = 4096; "


def small_archives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Archives of some kilobytes are read by two processes."""
    monkeypatch.setattr(halves_module, "SMALLEST_PACKED_BYTES", 1000)
    monkeypatch.setattr(halves_module, "_cores", lambda: 2)
    monkeypatch.setattr(halves_module, "SECOND", SMALL_READS + halves_module.SECOND)
    monkeypatch.setattr(blocks_module, "PACKED_BLOCK_BYTES", 256)
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", 4096)


@pytest.mark.parametrize("how", ["whole", "cut", "damaged", "late environment", "from the middle earlier"])
def test_two_processes_read_an_archive_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(change(written(sample()), how)))
    alone = read_trace(path)
    small_archives(monkeypatch)
    read = halves_module.read_in_halves(path)
    assert read is not None and read[1].whole > 100
    together = read_trace(path)
    assert flat(together) == flat(alone) and together.problems == alone.problems
    assert together.has_environment == alone.has_environment == (how == "late environment")


@pytest.mark.parametrize("kept", [0.4, 0.9])
def test_a_damaged_archive_is_read_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: float) -> None:
    whole = gzip.compress(written(sample()))
    path = tmp_path / "t.json.gz"
    path.write_bytes(whole[: int(kept * len(whole))])
    alone = read_trace(path)
    small_archives(monkeypatch)
    assert halves_module.read_in_halves(path) is None
    together = read_trace(path)
    assert flat(together) == flat(alone) and together.problems == alone.problems
    assert "damaged" in together.problems[0]


def test_names_and_args_without_end_are_not_kept_by_the_second_process() -> None:
    """It starts its tables anew, and the first follows."""
    collector, answer, wanted = Collector(), io.BytesIO(), []
    sender = halves_module._Sender(collector, answer)
    for n in range(3):
        ops = [Op(f"op {i}", 1, 2, ("1", "2"), raw_args=b'{"n": %d}' % i) for i in range(n * 60_000, (n + 1) * 60_000)]
        wanted += [(op.name, op.raw_args) for op in ops]
        collector.trace.ops += ops
        sender.send(Outcome() if n == 2 else None)
    assert len(sender._names) == len(sender._args) == 60_000
    answer.seek(0)
    read = Collector()
    halves_module._joined(read, Outcome(), answer)
    assert [(op.name, op.raw_args) for op in read.trace.ops] == wanted


@pytest.mark.parametrize(
    "data",
    [
        b'{"traceEvents": [' + json.dumps(op()).encode() + b'], "deviceProperties": [' + b'{"id": 0}, ' * 400 + b"{}]}",
        b'{"devices": [' + b'{"id": 0}, ' * 400 + b'{}], "traceEvents": ' + json.dumps([op()] * 9).encode() + b"}",
        b"nonsense" * 1000,
    ],
    ids=["events end early", "events begin late", "no trace"],
)
def test_what_has_no_two_halves_is_read_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(halves_module, "SMALLEST_BYTES", 1000)
    monkeypatch.setattr(halves_module, "_cores", lambda: 2)
    path = tmp_path / "t.json"
    path.write_bytes(data)
    assert halves_module.read_in_halves(path) is None
    if b"traceEvents" in data:
        assert names(read_trace(path))[0] == "aten::mm" and read_trace(path).problems == []
    else:
        with pytest.raises(TraceError, match="is no Chrome trace"):
            read_trace(path)


def test_a_second_process_that_fails_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(written(sample()))
    alone = read_trace(path)
    monkeypatch.setattr(halves_module, "SMALLEST_BYTES", 1000)
    monkeypatch.setattr(halves_module, "_cores", lambda: 2)
    monkeypatch.setattr(halves_module, "SECOND", "raise SystemExit(3)")
    assert halves_module.read_in_halves(path) is None
    assert flat(read_trace(path)) == flat(alone)


def test_blocks_made_ahead_are_the_same_and_their_errors_arrive() -> None:
    def broken() -> Iterator[bytes]:
        yield b"a"
        raise TraceError("gone\nhint: none")

    assert list(blocks_module.ahead(iter([b"%d" % n for n in range(50)]))) == [b"%d" % n for n in range(50)]
    ahead = blocks_module.ahead(broken())
    assert next(ahead) == b"a"
    with pytest.raises(TraceError, match="gone"):
        next(ahead)


def test_ops_with_the_same_inputs_share_what_is_kept_of_them() -> None:
    inputs = {"Input type": ["float"], "Input Dims": [[2, 3]], "Concrete Inputs": ["a}"]}
    trace = parse_events(
        *(op("aten::mm", n, args={"External id": n, "Record function id": 0, **inputs, "Ev Idx": n}) for n in range(9)),
        op("aten::odd", 20, args={"Ev Idx": 1, "Input Dims": [[4]], "note": {"Input type": 1}}),
    )
    assert len({id(one.raw_args) for one in trace.ops[:9]}) == 1
    assert trace.ops[0].args == inputs and trace.ops[9].shapes == [[4]]


def test_a_cut_file_is_read_to_its_last_whole_event() -> None:
    data = written(sample())
    whole = parse_trace(data)
    for fraction in (0.3, 0.5, 0.8, 0.97):
        cut = data[: int(len(data) * fraction)]
        trace = parse_trace(cut)
        assert 0 < len(trace.ops) <= len(whole.ops)
        (problem,) = [p for p in trace.problems if p.startswith("the file is cut off")]
        assert f"line {cut.count(chr(10).encode()) + 1}" in problem
        assert explain_trace(trace).sites


def test_a_cut_gzip_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(written(sample()))[:-2000])
    trace = read_trace(path)
    assert trace.ops and any("gzip file is damaged" in problem for problem in trace.problems)


def test_an_unescaped_quote_costs_its_own_event_only() -> None:
    lines = [json.dumps(op(f"aten::op{n}", n)) for n in range(9)]
    lines[4] = lines[4].replace("aten::op4", 'aten::"op4')
    trace = parse_trace(('{"traceEvents": [\n' + ",\n".join(lines) + '\n], "deviceProperties": []}').encode())
    assert names(trace) == [f"aten::op{n}" for n in range(9) if n != 4]
    assert trace.problems == ["1 event is no valid JSON and left out, the first at line 6"]


LISTS = {"structs": [{"id": 1, "a": 2}, {"name": "x"}, {"ts": 3}]}


@pytest.mark.parametrize("block_bytes", [97, 1000, 1 << 20])
def test_objects_in_a_list_of_an_event_are_no_events(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """Between two of them a piece may be cut, which must cost nothing."""
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", block_bytes)
    events = [op(f"aten::op{n}", n, args=LISTS) for n in range(400)]
    trace = parse_events(*events, deviceProperties=[tb.H200, tb.A100 | {"id": 1}])
    assert names(trace) == [f"aten::op{n}" for n in range(400)] and trace.problems == []
    assert [device.name for device in trace.devices] == ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"]


@pytest.mark.parametrize("damaged", [0, 7, 19])
def test_a_damaged_event_with_lists_costs_itself_only(damaged: int) -> None:
    events = [op(f"aten::op{n}.", n, args=LISTS) for n in range(20)]
    data = written({"traceEvents": events, "deviceProperties": [tb.H200]}).replace(
        f"aten::op{damaged}.".encode(), f'aten::"op{damaged}.'.encode()
    )
    trace = parse_trace(data)
    assert names(trace) == [f"aten::op{n}." for n in range(20) if n != damaged]
    assert trace.devices[0].name == "NVIDIA H200" and len(trace.problems) == 1


def test_what_json_forbids_and_writers_write() -> None:
    good, odd = json.dumps(op(args={"bandwidth": float("nan")})), json.dumps(op("aten::bmm", float("inf")))
    tab = json.dumps(op("aten::add", 5)).replace("aten::add", "aten::\tadd")
    trace = parse_trace(f'{{"traceEvents": [{good}, {odd}, {tab}, ]}}'.encode())
    assert names(trace) == ["aten::mm", "aten::\tadd"]
    assert trace.problems == ["1 events without a usable time or duration are left out"]


def test_odd_types_of_values() -> None:
    trace = parse_events(
        op(7, 1), op(None, 2), op("a", "3", "1.5", pid="Spans", tid=-4), op("b", 4, args=[1, 2]),
        op("c", 5, args={"Input Dims": "no", "Input type": 3, "Concrete Inputs": {}}), op("d", 1e300),
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 9, "dur": 1, "pid": 0, "tid": 7,
         "args": {"grid": [1, "x", 2], "correlation": "5", "shared memory": None, "stream": 7.5}},
    )  # fmt: skip
    assert names(trace) == ["7", "unnamed", "a", "b", "c"]
    assert trace.ops[2].thread == ("Spans", "4") and trace.ops[4].shapes is None and trace.ops[4].dtypes == []
    assert trace.device_events[0].grid is None and trace.device_events[0].correlation is None
    assert explain_trace(trace).window.kernels == 1


@pytest.mark.parametrize("value", [10**400, -(10**400), 2**63, 2**70, -1], ids=["huge", "low", "2**63", "2**70", "-1"])
@pytest.mark.parametrize("key", ["est. achieved occupancy %", "correlation", "stream", "device", "bytes", "graph id"])
def test_whole_numbers_of_any_size(key: str, value: int) -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2, "pid": 0, "tid": 7, "args": {key: value}}
    trace = parse_events(kernel, op())
    assert len(trace.device_events) == 1
    assert explain_trace(trace).window.kernels == 1
    assert msgspec.msgpack.encode(trace.device_events)  # as the second process sends them


def test_broken_text_in_args_costs_itself_only() -> None:
    """Bytes that are no UTF-8 and control characters, in an event of a piece that is otherwise whole."""
    data = written({"traceEvents": [
        op(args={"Input Dims": [[2, 3]], "Input type": ["BAD"]}),
        {"ph": "X", "cat": "memcpy", "name": "Memcpy", "ts": 9, "dur": 1,
         "args": {"src kind": "BAD", "dst kind": "Device", "correlation": 5}},
    ]})  # fmt: skip
    for bad in (b"\xff", b"\x01", b"\\ud800"):
        trace = parse_trace(data.replace(b"BAD", bad))
        assert trace.ops[0].shapes == [[2, 3]] and len(trace.ops[0].dtypes) == 1
        assert trace.device_events[0].correlation == 5
        assert render_explanation(explain_trace(trace)).encode()


def test_meta_of_a_root_is_kept_by_name_and_an_environment_is_not_echoed() -> None:
    secret = "hf_verysecret"
    root = {"host_environ": {"HF_TOKEN": secret, "PATH": "/bin", "HOME": "/root"}, "cuda_runtime_version": 12040}
    trace = parse_events(op(), **root)
    explanation = explain_trace(trace)
    assert trace.has_environment and trace.meta == {"cuda_runtime_version": 12040}
    assert "environment variables" in explanation.warnings[0]
    assert secret not in render_explanation(explanation) + explanations_page([explanation])
    assert not parse_events(op(), cuda_runtime_version=12040).has_environment


@pytest.mark.parametrize(
    "root",
    [
        {"host": {"deeper": {"env": {"PATH": "/bin", "HOME": "/root", "TOKEN": "hf_verysecret"}}}},
        {"env": ["PATH=/bin", "HOME=/root", "TOKEN=hf_verysecret"]},
        {"os.environ": {"TOKEN": "hf_verysecret"}},
    ],
)
def test_an_environment_is_found_wherever_the_root_holds_it(root: dict[str, Any]) -> None:
    for trace in (parse_events(op(), **root), parse_trace(json.dumps({**root, "traceEvents": [op()]}).encode())):
        assert trace.has_environment
        assert "hf_verysecret" not in json.dumps(explanation_json(trace)) + repr(trace.meta)


def test_an_environment_in_an_event_is_found() -> None:
    dump = {"ph": "M", "name": "environment", "pid": 0, "args": {"SHELL": "sh", "HOME": "/root", "TOKEN": "secret"}}
    assert parse_events(op(), dump, op()).has_environment
    assert not parse_events(op("HOME"), {"ph": "M", "name": "process_name", "args": {"name": "PATH"}}).has_environment


def explanation_json(trace: Trace) -> Any:
    return json.loads(explanations_json([explain_trace(trace)]))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x0a\x9f\x01\x08\x01", "Perfetto trace"),
        (b'{"$schema": "https://www.speedscope.app/file-format-schema.json", "profiles": []}', "speedscope"),
        (b'{"schema": "1.1.1-chakra.0.0.4", "pid": 3, "nodes": []}', "execution trace"),
        (b"SQLite format 3\x00....", "SQLite"),
        (b"\x80\x04\x95", "pickle"),
        (b"<!doctype html><html>", "HTML"),
        (b'{"nbformat": 4, "cells": []}', "notebook"),
        (b"[1, 2, 3]", "its list must hold events"),
        (b'{"traceEvents": [{"hello": 1}]}', "none of its events"),
        (b'{"traceEvents": [{"ph": "X", "args": ' + b"[" * 200_000, "is no Chrome trace"),
        (b"nonsense", "is no Chrome trace"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=says) as caught:
        read_trace(path)
    assert str(path) in str(caught.value) and "\nhint: " in str(caught.value)


def test_a_gzip_bomb_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb") as file:
        file.write(b'{"traceEvents": [')
        for _ in range(160):
            file.write(b" " * (1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TraceError, match="400 times its size"):
        read_trace(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def test_deep_nesting_of_ops_is_cut_at_a_depth() -> None:
    deep = 20_000
    trace = parse_events(*(op(f"n{n}", n, 2 * (deep - n)) for n in range(deep)))
    assert max(sum(1 for _ in one.ancestors()) for one in trace.ops[:: deep // 50]) <= 201
    explain_trace(trace)


def test_deep_json_costs_its_own_event_only() -> None:
    deep = '{"ph": "X", "cat": "cpu_op", "name": "deep", "ts": 3, "dur": 1, "args": ' + "[" * 100_000 + "]" * 100_000
    trace = parse_trace(f'{{"traceEvents": [{json.dumps(op())}, {deep}}}, {json.dumps(op("last", 9))}]}}'.encode())
    assert "last" in names(trace) and "aten::mm" in names(trace)


def test_many_distinct_names_take_bounded_time() -> None:
    kernels = [
        {"ph": "X", "cat": "kernel", "name": f"kernel_{n}", "ts": n, "dur": 1, "pid": 0, "tid": 7,
         "args": {"correlation": n}} for n in range(30_000)
    ]  # fmt: skip
    start = time.process_time()
    explanation = explain_trace(parse_events(*kernels))
    assert time.process_time() - start < 30 and explanation.window.kernels == 30_000


def test_a_lone_surrogate_in_a_name_can_be_shown() -> None:
    lone = json.dumps({"ph": "X", "cat": "kernel", "name": "flash_fwd_\ud800", "ts": 1, "dur": 9, "pid": 0, "tid": 7})
    explanation = explain_trace(
        parse_trace(f'{{"deviceProperties": [{{"name": "\\ud800"}}], "traceEvents": [{lone}]}}'.encode())
    )
    assert explanation.sites and explanations_json([explanation]).encode() and explanations_page([explanation]).encode()


def test_html_in_names_stays_text() -> None:
    evil = "<script>alert(1)</script>\x1b[31m\u202e"
    b = TraceBuilder(tb.H200 | {"name": evil})
    with b._scope(f"nn.Module: {evil}", "python_function", {}):
        tb.naive(b)
        with b.op("aten::scaled_dot_product_attention"):
            b.kernel(f"flash_fwd_{evil}", 10)
    explanation = explain_trace(b.trace(), evil)
    page, text = explanations_page([explanation]), render_explanation(explanation)
    assert "<script" not in page and "&lt;script&gt;" in page and "default-src 'none'" in page
    assert "\x1b" not in text + page and "\u202e" not in text + page


# --- a thousand mutated traces ----------------------------------------------------------------------------------------

ODD = [None, -1, 0, 1e308, -(2**70), "", "NaN", "x" * 5000, [], {}, [[]], True, "\ud800", 2**63, -0.0, "<b>", ["a", 3]]


def mutate_document(document: dict[str, Any], chance: random.Random) -> bytes:
    """Change some values of some events to odd ones, or drop, double, swap events."""
    events = document["traceEvents"]
    for _ in range(chance.randrange(1, 12)):
        event = chance.choice(events)
        where = event if chance.random() < 0.6 else event.get("args", {})
        if isinstance(where, dict) and where:
            key = chance.choice(list(where))
            if chance.random() < 0.2:
                del where[key]
            else:
                where[key] = chance.choice(ODD)
    if chance.random() < 0.3:
        chance.shuffle(events)
    if chance.random() < 0.2:
        document[chance.choice(list(document))] = chance.choice(ODD)
    return json.dumps(document).encode()


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Cut, insert, overwrite, repeat bytes."""
    raw = bytearray(data)
    for _ in range(chance.randrange(1, 6)):
        at, kind = chance.randrange(len(raw)), chance.randrange(5)
        if kind == 0:
            raw[at : at + chance.randrange(1, 40)] = b""
        elif kind == 1:
            raw[at:at] = chance.choice([b'"', b"}", b"]", b"{", b"\\", b"\x00", b"\xff", b"NaN", b"\n", b'{"ph":'])
        elif kind == 2:
            raw[at] = chance.randrange(256)
        elif kind == 3:
            raw[at:at] = raw[at : at + 300]
        else:
            del raw[at:]
            if not raw:
                raw = bytearray(b" ")
    return bytes(raw)


def survive(data: bytes) -> None:
    """A sentence or an explanation, and nothing else."""
    try:
        trace = parse_trace(data)
    except TraceError as error:
        assert "\nhint: " in str(error)
        return
    explanation = explain_trace(trace)
    window = explanation.window
    assert 0 <= window.busy_us <= window.sum_us * (1 + 1e-9) + 1e-6
    assert window.attention_us + window.unattributed_us <= window.sum_us * (1 + 1e-9) + 1e-6
    assert render_explanation(explanation).encode() and explanations_page([explanation]).encode()
    assert json.loads(explanations_json([explanation]))


def fuzz(seeds: range) -> None:
    original = sample()
    raw = written(original)
    mutations: tuple[Callable[[random.Random], bytes], ...] = (
        lambda chance: mutate_document(json.loads(raw), chance),
        lambda chance: mutate_bytes(raw, chance),
    )
    for seed in seeds:
        chance = random.Random(seed)
        data = chance.choice(mutations)(chance)
        try:
            survive(data)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_mutated_traces_end_in_a_sentence_or_an_explanation() -> None:
    fuzz(range(60))


@pytest.mark.slow
def test_hundreds_of_mutated_traces() -> None:
    fuzz(range(60, 360))


@pytest.mark.long
def test_a_thousand_mutated_traces() -> None:
    fuzz(range(360, 1360))


def test_the_place_between_two_events_cannot_be_inside_a_string() -> None:
    tricky = op('},{"ph":1', 1, args={"text": '}, {"name": "x"}, {"ph": "X"'})
    data = written({"traceEvents": [tricky, op("second", 5)]})
    assert len(container_module.BOUNDARY.findall(data)) == 1
    assert names(parse_trace(data)) == ['},{"ph":1', "second"]
