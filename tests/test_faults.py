"""Fault probes see what is there, say what they skip, and known_faults.toml keeps it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnscope import faults_cli
from attnscope.device import Device, Environment, read_environment
from attnscope.errors import RecordError, UsageError
from attnscope.fault_probes import FAULTS, find_fault
from attnscope.faults import (
    KNOWN_FAULTS,
    FaultRecord,
    known_faults_for,
    read_known_faults,
    run_probes,
    write_known_faults,
)
from attnscope.implementation import Sheet, SheetImplementation, find, names
from attnscope.implementations.naive import Naive
from attnscope.inputs import make_inputs
from attnscope.probing import Fault, Seen
from attnscope.worker import InProcess, RemoteError, WorkerFailed
from attnscope.workload import Workload
from strategies import workloads

RECORD = FaultRecord("W1", "naive", "cpu", "2.13.0+cpu", None, "observed", "range", "wrong", "https://x.org/1", "NaN")


def outcome(fault_id: str, implementation: str, device: Device) -> Seen:
    fault = find_fault(fault_id)
    assert fault is not None
    return fault.try_on(find(implementation), device)


# --- probes -----------------------------------------------------------------------------------------------------------


def test_each_fault_is_told_apart_and_names_its_source():
    assert len({fault.id for fault in FAULTS}) == len(FAULTS) >= 14
    for fault in FAULTS:
        assert fault.range and fault.wrong and all(url.startswith("https://") for url in fault.source.split())
        assert set(fault.devices) <= {"cpu", "cuda"} and set(fault.implementations or ()) <= set(names())
    assert find_fault("W99") is None


@given(workloads())
def test_ranges_decide_on_any_workload(w):
    assert all(fault.applies(w) in (True, False) for fault in FAULTS)


@pytest.mark.parametrize(
    ("fault_id", "inside", "outside"),
    [
        ("W1", "H2,L8,D16,mask=bool", "H2,L8,D16"),
        ("W3", "H2,L2,S5,D16,causal", "H2,L5,D16,causal"),
        ("W4", "H1,L704,D64,bf16,mask=bool", "H1,L768,D64,bf16,mask=bool"),
        ("W6", "H1,L8,D64,fp16,bias=fp32", "H1,L8,D64,fp16,bias=fp16"),
        ("W7", "H1,L73728,D64,bf16,mask=bool", "H1,L65535,D64,bf16,mask=bool"),
        ("W8", "B70000,H1,L8,D64", "B65535,H1,L8,D64"),
        ("W14", "H1,D64,packed=3/0/4", "H1,D64,packed=3/4"),
        ("W23", "H1,L8,D64,mask=bool,causal", "H1,L8,D64,mask=bool"),
        ("W27", "H1,L8,D36", "H1,L8,D40"),
        ("W28", "H8/2,L8,D64", "H8,L8,D64"),
        ("W30", "H1,L8,D64,bias=bf16", "H1,L8,D64"),
        ("S1", "H8/2,L8,D64,fp32", "H8/2,L8,D64,bf16"),
        ("A2", "H1,L8,D64,dropout=0.1", "H1,L8,D64"),
        ("A1", "H1,L8,D64,causal,scale=-1", "H1,L8,D64,causal,scale=1"),
        ("A3", "H1,L65,S704,D64,bf16", "H1,L704,D64,bf16"),
        ("A4", "H1,L1,S4096,D64,bf16", "H1,L2,S4096,D64,bf16"),
        ("A5", "H1,L127,S704,D64,bf16", "H1,L704,D64,bf16"),
        ("A6", "H1,L8,D80,bf16", "H1,L8,D96,bf16"),
        ("A6", "H1,L8,D72,bf16", "H1,L8,D64,bf16"),
    ],
)
def test_ranges_hold_the_report_s_workload(fault_id, inside, outside):
    fault = find_fault(fault_id)
    assert fault.applies(Workload.parse(inside)) and not fault.applies(Workload.parse(outside))


@pytest.mark.parametrize("name", ["naive", "naive_inplace"])
def test_w1_is_observed_on_a_plain_softmax(cpu, name):
    seen = outcome("W1", name, cpu)
    assert seen.outcome == "observed" and "not finite" in seen.detail and "row 3" in seen.detail


@pytest.mark.parametrize("name", ["reference_cpu", "sdpa_math", "sdpa_flash", "sdpa_auto"])
def test_w1_is_absent_where_a_row_that_sees_no_key_is_zero(cpu, name):
    assert outcome("W1", name, cpu).outcome == "absent"


CPU_FAULTS = [fault for fault in FAULTS if "cpu" in fault.devices and fault.id not in ("W1", "W22")]


@pytest.mark.parametrize("fault", CPU_FAULTS, ids=lambda fault: fault.id)
def test_the_readable_reference_has_no_reported_fault(cpu, fault):
    seen = fault.try_on(find("reference_cpu"), cpu)
    assert seen.outcome == "absent", seen.detail


@pytest.mark.parametrize("fault_id", ["W3", "W11", "W14", "W23", "W27", "W28", "W29"])
def test_sdpa_on_a_cpu_has_none_of_these_through_the_contract(cpu, fault_id):
    seen = outcome(fault_id, "sdpa_auto", cpu)
    assert seen.outcome == "absent", seen.detail


def test_equal_runs_of_a_cpu_backward(cpu):
    assert outcome("W22", "sdpa_math", cpu) == Seen(
        "absent", "B1,H2,L128,D32,fp32,causal: 30 equal runs gave equal bits"
    )


def test_a_fault_behind_a_reason_is_tried_on_a_cpu_all_the_same(cpu):
    w = Workload.parse("B1,H2,L33,D16,fp32,bias=fp32:1xHxLxS")
    assert find("sdpa_flash").reasons_unsupported(w, cpu, "backward")
    assert "W30" in [fault.id for fault in FAULTS if fault.applies(w)]
    seen = outcome("W30", "sdpa_flash", cpu)
    assert seen.outcome in ("observed", "absent")  # whether torch's CPU kernel takes such a mask is its own affair


def test_what_cannot_run_is_skipped_with_its_reason(cpu):
    assert outcome("W4", "sdpa_cudnn", cpu) == Seen("skipped", "its recipe needs cuda, this is cpu")
    seen = outcome("W1", "sdpa_cudnn", cpu)
    assert seen.outcome == "skipped" and "runs on cuda, not on cpu" in seen.detail


OF_BACKWARD = [fault for fault in FAULTS if "backward" in fault.range]


@pytest.mark.parametrize("fault", [f for f in OF_BACKWARD if "cpu" in f.devices], ids=lambda fault: fault.id)
def test_a_fault_of_the_backward_is_not_absent_where_there_is_none(cpu, fault):
    seen = fault.try_on(find("naive_inplace"), cpu)
    assert seen.outcome == "skipped" and "has no backward" in seen.detail, seen


class Broken(SheetImplementation):
    """Naive with one fault, put in by ``twist``."""

    name = "broken"
    summary = "for a test"
    sheet = Sheet(dtypes=frozenset({"fp32"}), features=Naive.sheet.features, directions=frozenset({"forward"}))

    def __init__(self, twist):
        self.twist = twist

    def prepare(self, workload, device):
        twist = self.twist

        class Prepared:
            def forward(self, inputs, *, save=False):
                twisted = twist(inputs)
                return find("reference_cpu").prepare(twisted.workload, device).forward(twisted, save=save)

        return Prepared()


def other_corner(inputs):
    w = inputs.workload
    turned = {"top_left": "bottom_right", "bottom_right": "top_left"}.get(w.causal)
    return replace(inputs, workload=w.replace(causal=turned))


def repeated(inputs):
    w = inputs.workload
    k, v = (t.repeat(1, w.group, 1, 1) for t in (inputs.k, inputs.v))
    return replace(inputs, workload=w.replace(H_kv=w.H), k=k, v=v)


def scaled_as_padded(inputs):
    w = inputs.workload
    return replace(inputs, workload=w.replace(scale=(-(-w.D // 8) * 8) ** -0.5))


def without_mask(inputs):
    w = inputs.workload.replace(mask=None, bias=None)
    return replace(inputs, workload=w, mask=None, bias=None)


def read_as_contiguous(inputs):
    def misread(t):
        return t.as_strided(t.shape, t.contiguous().stride())

    return replace(inputs, q=misread(inputs.q), k=misread(inputs.k))


def raising(inputs):
    raise RuntimeError("CUDA error: invalid configuration argument\nmore lines")


@pytest.mark.parametrize(
    ("fault_id", "twist"),
    [
        ("W3", other_corner), ("W11", read_as_contiguous), ("W14", raising), ("W23", without_mask),
        ("W27", scaled_as_padded), ("W28", repeated),
    ],
)  # fmt: skip
def test_a_probe_sees_the_fault_that_it_is_for(cpu, fault_id, twist):
    seen = find_fault(fault_id).try_on(Broken(twist), cpu)
    assert seen.outcome == "observed", seen.detail
    assert "\n" not in seen.detail


def test_a_probe_sees_a_gradient_that_reads_d_o_wrongly(cpu):
    class BadBackward(SheetImplementation):
        name, summary, sheet = "bad", "for a test", find("reference_cpu").sheet

        def prepare(self, workload, device):
            inner = find("reference_cpu").prepare(workload, device)

            class Prepared:
                forward = inner.forward

                def backward(self, inputs, saved):
                    return inner.backward(replace(inputs, grad_out=inputs.grad_out.contiguous() * 0.5), saved)

            return Prepared()

    assert find_fault("W29").try_on(BadBackward(), cpu).outcome == "observed"


# --- the file ---------------------------------------------------------------------------------------------------------


def test_run_probes_makes_a_record_of_each_pair(cpu):
    records = run_probes(cpu, ["naive", "sdpa_cudnn"], [find_fault("W1"), find_fault("W4")])
    assert [(r.id, r.implementation, r.outcome) for r in records] == [
        ("W1", "naive", "observed"), ("W1", "sdpa_cudnn", "skipped"), ("W4", "sdpa_cudnn", "skipped"),
    ]  # fmt: skip
    assert {(r.device, r.torch, r.cudnn) for r in records} == {("cpu", read_environment().packages["torch"], None)}


class Failing:
    """A worker whose every call ends in one way."""

    def __init__(self, error):
        self.error = error

    def call(self, *args, **options):
        raise self.error


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (WorkerFailed("its process was killed by SIGSEGV\nlog"), Seen("observed", "its process was killed by SIGSEGV")),
        (WorkerFailed("took longer than its limit of 90 s and was stopped"),
         Seen("skipped", "took longer than its limit of 90 s and was stopped")),
        (RemoteError("OutOfMemoryError", "full", ""), Seen("skipped", "could not be tried: OutOfMemoryError: full")),
    ],
)  # fmt: skip
def test_a_probe_that_ends_its_process_costs_its_own_row(cpu, error, seen):
    records = run_probes(cpu, ["naive"], [find_fault("W1")], seen_by=faults_cli.in_a_child(Failing(error)))
    assert [(r.outcome, r.detail) for r in records] == [(seen.outcome, seen.detail)]


def test_a_child_sees_what_this_process_sees(cpu):
    tried = faults_cli.in_a_child(InProcess())
    assert tried(find_fault("W1"), "naive", cpu) == outcome("W1", "naive", cpu)


def test_what_was_written_must_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr("attnscope.faults._spelled", lambda record: "")
    with pytest.raises(RecordError, match="does not read back"):
        write_known_faults([RECORD], tmp_path / "known_faults.toml")


text = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=30)


@given(st.lists(st.builds(FaultRecord, text, text, text, text, st.none() | text.filter(bool),
                          st.sampled_from(["observed", "absent"]), text, text, text, text), max_size=5))  # fmt: skip
def test_records_round_trip_through_the_file(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("faults") / "known.toml"
    write_known_faults(records, path)
    assert {r.key: r for r in read_known_faults(path)} == {r.key: r for r in records}


def test_writing_is_deterministic_and_keeps_other_devices_and_versions(tmp_path):
    path = tmp_path / "known_faults.toml"
    on_gpu = replace(RECORD, id="W4", implementation="sdpa_cudnn", device="NVIDIA H200", cudnn="9.19.0")
    older = replace(RECORD, torch="2.11.0+cpu")
    write_known_faults([RECORD, on_gpu, older], path)
    first = path.read_bytes()
    write_known_faults([on_gpu], path)
    assert path.read_bytes() == first
    write_known_faults([replace(RECORD, outcome="absent", detail="gone"), replace(on_gpu, outcome="skipped")], path)
    found = {r.key: r for r in read_known_faults(path)}
    assert found == {on_gpu.key: on_gpu, older.key: older, RECORD.key: replace(RECORD, outcome="absent", detail="gone")}
    assert os.listdir(tmp_path) == ["known_faults.toml"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("not toml", "cannot read"),
        ("schema_version = 7", "schema_version must be 1, got 7"),
        ("", "schema_version must be 1, got None"),
        ('schema_version = 1\n[[fault]]\nid = "W1"\n', "fault 1 must have the texts"),
        ("schema_version = 1\nfault = [3]\n", "fault 1 must have the texts"),
    ],
)
def test_a_broken_file_is_a_sentence(tmp_path, content, sentence):
    path = tmp_path / "known_faults.toml"
    path.write_text(content)
    with pytest.raises(RecordError, match=r"\nhint: ") as caught:
        read_known_faults(path)
    assert sentence in str(caught.value)
    assert read_known_faults(tmp_path / "none.toml") == []


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path):
    with pytest.raises(RecordError, match=r"cannot write .*\nhint: "):
        write_known_faults([RECORD], tmp_path / "no" / "known_faults.toml")


def test_an_outcome_has_three_words():
    with pytest.raises(RecordError, match="outcome must be one of observed, absent, skipped, got 'maybe'"):
        replace(RECORD, outcome="maybe")


def test_known_faults_are_those_of_device_versions_and_range():
    cpu, gpu = Device("cpu", "any cpu"), Device("cuda", "NVIDIA H200")
    environment = Environment("3.12", "Linux", {"torch": "2.13.0+cpu"}, cudnn_loaded="9.19.0")
    masked, plain = Workload.parse("H2,L8,D16,mask=bool"), Workload.parse("H2,L8,D16")
    records = [RECORD, replace(RECORD, implementation="sdpa_math", outcome="absent"), replace(RECORD, id="W99")]
    assert known_faults_for("naive", masked, cpu, environment, records) == [RECORD]
    assert known_faults_for("naive", plain, cpu, environment, records) == []
    assert known_faults_for("sdpa_math", masked, cpu, environment, records) == []
    assert known_faults_for("naive", masked, gpu, environment, records) == []
    newer = replace(environment, packages={"torch": "2.14.0+cpu"})
    assert known_faults_for("naive", masked, cpu, newer, records) == []
    on_gpu = replace(RECORD, device="NVIDIA H200", cudnn="9.19.0")
    assert known_faults_for("naive", masked, gpu, environment, [on_gpu]) == [on_gpu]


def test_the_command_prints_what_it_saw_and_writes_only_when_asked(tmp_path, monkeypatch):
    path = tmp_path / "known_faults.toml"
    found = [RECORD, replace(RECORD, id="W4", outcome="skipped")]
    tried: list[list[str]] = []

    def run_probes(device, *, faults, seen_by):
        tried.append([fault.id for fault in faults])
        return found

    monkeypatch.setattr(faults_cli, "run_probes", run_probes)
    monkeypatch.setattr(faults_cli, "KNOWN_FAULTS", path)
    monkeypatch.setattr(write_known_faults, "__defaults__", (path,))
    printed = faults_cli.faults_table("cpu", False)
    assert "observed (1)" in printed and "W1   naive" in printed and "skipped (1)" in printed and not path.exists()
    assert "1 entries" in faults_cli.faults_table("cpu", True, ["A3", "W4"])
    assert tried == [[fault.id for fault in FAULTS], ["W4", "A3"]]
    with pytest.raises(UsageError, match=r"unknown fault 'A33'\nhint: did you mean A3"):
        faults_cli.faults_table("cpu", True, ["A33"])
    assert read_known_faults(path) == [RECORD]


def test_the_file_that_ships_is_what_the_command_wrote():
    records = read_known_faults()
    assert records and all(find_fault(r.id) for r in records)
    assert {r.implementation for r in records} <= set(names())
    for record in records:  # words come from the probes; nobody edits them
        fault = find_fault(record.id)
        assert (record.range, record.wrong, record.source) == (fault.range, fault.wrong, fault.source)
    of_backward = {fault.id for fault in OF_BACKWARD}
    for record in records:
        assert record.id not in of_backward or "backward" in find(record.implementation).sheet.directions, record
    observed = {(r.id, r.implementation) for r in records if r.outcome == "observed" and r.device == "cpu"}
    assert {("W1", "naive"), ("W1", "naive_inplace")} <= observed
    text = KNOWN_FAULTS.read_text()
    assert text.startswith("# ") and "/root" not in text and "/home" not in text


def test_the_shipped_cpu_entries_hold_for_this_torch(cpu):
    """Where the file was written with the torch that runs here, the cheap probes must see the same again."""
    torch = read_environment().packages["torch"]
    shipped = {r.key: r.outcome for r in read_known_faults() if (r.device, r.torch) == ("cpu", torch)}
    fault_ids = ("W1", "W28", "A1")
    probed: list[Fault] = [fault for fault in FAULTS if fault.id in fault_ids]
    for record in run_probes(cpu, ["naive", "sdpa_math", "sdpa_flash", "sdpa_auto"], probed):
        assert shipped.get(record.key, record.outcome) == record.outcome, record


@pytest.mark.gpu
def test_probes_run_on_a_gpu(gpu):
    records = run_probes(gpu, ["sdpa_cudnn", "sdpa_flash", "sdpa_efficient"])
    assert {r.outcome for r in records} >= {"absent"}
    assert all(r.cudnn for r in records)


def test_inputs_of_a_recipe_are_the_report_s(cpu):
    from attnscope import fault_probes

    inputs = make_inputs(Workload.parse("B2,H2,L5,D16,fp32,mask=bool,bias=fp32"), cpu)
    before = inputs.clone()
    fault_probes._stride_two(inputs)
    assert all(t.stride(-1) == 2 for t in (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.mask))
    assert all(inputs.tensors()[name].equal(t) for name, t in before.tensors().items())
    fault_probes._expand_grad_out(inputs)
    assert inputs.grad_out.stride() == (0, 0, 0, 0) and inputs.grad_out.shape == before.grad_out.shape
