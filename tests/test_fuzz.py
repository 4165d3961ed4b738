"""``attnscope fuzz``: what it draws, that it finds planted faults, makes them simple, and outlives a crash.

Most runs stay in this process, since a worker takes seconds to start: an object of a class that is defined in a
function cannot be found by another process.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attnscope import implementation as registry
from attnscope.cli import app
from attnscope.device import Device, find_device
from attnscope.errors import AttnscopeError, UnsupportedWorkload, UsageError
from attnscope.fuzz_cases import Case, FuzzReport, Outcome
from attnscope.fuzz_jobs import (
    RECIPES,
    SIZES_A_RECIPE,
    FuzzAsk,
    claimed_space,
    draw_case,
    run_cases,
    try_case,
)
from attnscope.fuzzing import execute_fuzz, make_fuzz_plan
from attnscope.guards import fill
from attnscope.implementation import Sheet, SheetImplementation
from attnscope.inputs import INPUT_KINDS, make_inputs
from attnscope.random_workloads import FEATURES, PATTERNS, draw_workload, space_of_device
from attnscope.reporting.fuzz_text import render_fuzz
from attnscope.shrinking import shrink, simpler_cases
from attnscope.strides import STRIDES, restride
from attnscope.workload import DIRECTIONS, LAYOUTS, Workload
from bad_implementations import SHEET, Good, GoodPrepared
from saboteurs import PreparedTiled, Tiled

BAD = "bad_implementations"


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fuzz an implementation of this process, which no other could find."""
    monkeypatch.setattr(registry, "_registered", {})

    def run(implementation: Any, **options: Any) -> FuzzReport:
        registry.register(implementation)
        monkeypatch.setattr(registry, "reference_of", lambda name: None)
        return execute_fuzz(make_fuzz_plan(implementation.name, device="cpu", **options))

    return run


def cases(count: int, device: Device, implementation: Any = None) -> list[Case]:
    drawn = [draw_case(implementation or Tiled(), device, 0, index)[0] for index in range(count)]
    return [case for case in drawn if case is not None]


# --- what is drawn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_random_workloads_cover_everything_and_stay_small(kind: str) -> None:
    space = space_of_device(kind)
    drawn = [draw_workload(random.Random(seed), space) for seed in range(1500)]
    assert drawn == [draw_workload(random.Random(seed), space) for seed in range(1500)]
    for feature in FEATURES:
        assert sum(feature in w.features for w in drawn) > 50, feature
    assert sum(w.features <= {"causal_top_left", "causal_bottom_right", "cross", "gqa"} for w in drawn) > 300
    assert {w.layout for w in drawn} == set(LAYOUTS) and {w.dtype for w in drawn} == set(space.dtypes)
    assert {w.mask for w in drawn} >= set(PATTERNS) and {w.bias_shape for w in drawn} >= set(PATTERNS)
    assert all(any(getattr(w, name) == 0 for w in drawn) for name in ("B", "L", "S"))
    few = [w for w in drawn if w.B * w.H < 65_536]
    assert max(w.B * w.H * w.L * w.S for w in few) <= space.max_pairs
    assert max(w.H * w.L * w.B * max(w.D, w.D_v) for w in few) <= space.max_elements
    assert {63, 64, 65, 127, 128, 129} <= {w.L for w in drawn}


def test_more_heads_than_a_grid_holds_are_drawn_on_a_gpu() -> None:
    space = space_of_device("cuda")
    drawn = (draw_workload(random.Random(seed), space) for seed in range(1500))
    many = [w for w in drawn if w.B * w.H > 65_535]
    assert {w.B == 1 for w in many} == {True, False} and len(many) < 30 and all(w.L in (1, 2) for w in many)


def test_a_case_depends_on_seed_and_number_alone(cpu: Device) -> None:
    assert cases(12, cpu) == cases(12, cpu)
    assert cases(12, cpu) != [draw_case(Tiled(), cpu, 1, index)[0] for index in range(12)]
    drawn = cases(400, cpu)
    assert {case.kind for case in drawn} == set(INPUT_KINDS) and {case.strides for case in drawn} == set(STRIDES)
    assert 5 < sum(case.repeat for case in drawn) < 60
    first, second = (Workload.parse(case.workload) for case in drawn[:2])  # one recipe, other sizes
    assert first.features - {"cross"} == second.features - {"cross"} and (first.B, first.L) != (second.B, second.L)


def test_only_what_is_not_refused_is_drawn_and_refusals_are_counted(cpu: Device) -> None:
    good = Good()
    for index in range(40):
        case, refusals = draw_case(good, cpu, 3, index)
        assert case is not None and not good.reasons_unsupported(Workload.parse(case.workload), cpu)
        assert (refusals.count > 0) == bool(refusals.reasons)
    space = claimed_space(space_of_device("cpu"), Sheet(frozenset({"fp32"}), frozenset({"gqa"}), head_dim_multiple=8))
    assert set(space.dtypes) == {"fp32"} and space.features == {"gqa"} and all(size % 8 == 0 for size in space.dims)


def test_a_case_reads_back_as_it_is_spelled(cpu: Device) -> None:
    for case in cases(60, cpu):
        again = Case.parse(str(case))
        assert again == Case(case.workload, case.seed, case.kind, case.strides, case.repeat)
    with pytest.raises(UsageError, match="did you mean needles"):
        Case.parse("B1,H1,L1,D8 needle")
    with pytest.raises(AttnscopeError, match="status"):
        Outcome("fine")


# --- strides ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["B2,H4/2,L5,S7,D8,fp32", "B2,H4/2,L5,S7,D8,Dv16,bf16,layout=blhd"])
@pytest.mark.parametrize("way", STRIDES)
def test_other_strides_hold_the_same_numbers(way: str, text: str, cpu: Device) -> None:
    plain = make_inputs(Workload.parse(text), cpu)
    moved = restride(plain, way)
    for name in ("q", "k", "v", "grad_out"):
        before, after = getattr(plain, name), getattr(moved, name)
        if way == "expanded":
            before = before[:, :1].expand_as(before) if name in "kv" else before if name == "q" else before[..., :1, :]
        assert torch.equal(after, before.expand_as(after)), name
        assert after.stride(-1) == 1 or way == "expanded"
        assert way in ("plain", "expanded") or after.stride() != before.stride() or after.storage_offset() > 0
    other = restride(make_inputs(Workload.parse(text), cpu, 1), way)
    assert all(torch.equal(t, moved.tensors()[name]) for name, t in fill(other, moved).tensors().items())


def test_a_row_that_does_not_begin_at_16_bytes_stays_where_it_is(cpu: Device) -> None:
    plain = make_inputs(Workload.parse("B1,H2,L3,D5,fp32"), cpu)
    assert restride(plain, "wide").q is plain.q
    with pytest.raises(UsageError, match="wide"):
        restride(plain, "wid")


# --- making it simple -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fails", "simplest"),
    [
        (lambda w: w.L > 16 and w.causal, "B1,H1,L17,D1,fp32,causal"),
        (lambda w: w.S > 64, "B1,H1,L65,D1,fp32"),
        (lambda w: w.group > 2 and w.alibi, "B1,H3/1,L1,D1,fp32,alibi"),
        (lambda w: w.D >= 16, "B1,H1,L1,D16,fp32"),
        (lambda w: w.lengths is not None and 0 in w.lengths, "B1,H1,L1,D1,fp32,lengths=0"),
        (lambda w: True, "B1,H1,L1,D1,fp32"),
    ],
)
def test_a_case_shrinks_to_what_its_failure_needs(fails: Any, simplest: str) -> None:
    text = (
        "B3,H6/2,L70,S90,D24,Dv40,fp32,causal=bottom_right,window=9,softcap=3.5,scale=0.2,alibi,sinks,mask=bool,"
        "bias=fp32:1xHxLxS,lengths=90/0/7,dropout=0.1,layout=blhd"
    )
    found = shrink(Case(text, 7, "needles", "rows", True), lambda case: bool(fails(Workload.parse(case.workload))), 500)
    assert (found.workload, found.seed, str(found).count(" ")) == (simplest, 7, 1)


def test_packed_sequences_are_shortened_and_dropped() -> None:
    case = Case("H4/2,L200,D8,bf16,packed=64/0/65/71".replace("L200,", ""))
    found = shrink(case, lambda c: 65 in (Workload.parse(c.workload).packed or ()), 300)
    assert found.workload == "B1,H1,L65,D1,bf16,packed=65"


def test_tries_are_bounded_and_no_simpler_case_is_impossible(cpu: Device) -> None:
    asked: list[Case] = []
    shrink(Case("B8,H16,L128,D64,bf16"), lambda case: bool(asked.append(case)), 5)
    assert len(asked) == 5
    for case in cases(80, cpu):
        for simpler in simpler_cases(case):
            assert str(Workload.parse(simpler.workload)) == simpler.workload


# --- what it finds ----------------------------------------------------------------------------------------------------


def test_right_kernels_pass_what_is_drawn(fuzz: Any) -> None:
    report = fuzz(Tiled(name="right"), cases=24, seed=5)
    assert report.is_green and (report.cases, report.passed) == (24, 24), report.failures
    assert report.coverage["backward"] == 24 and report.coverage["inputs needles"] > 2
    assert report.drawn == report.cases + report.refused and report.refused > 0
    text = render_fuzz(report)
    assert "24 cases, 0 failed" in text and "refused: " in text and "not fp64" in text


@pytest.mark.parametrize(
    ("hooks", "seed", "simplest"),
    [
        ({"key_tiles": lambda tiles: tiles[:-1] or tiles}, 0, ("L65",)),
        pytest.param(
            {"geometry": lambda w: w.replace(window=w.window and w.window + 1)},
            3,
            ("window=1",),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_planted_fault_is_found_and_made_simple(hooks: Any, seed: int, simplest: tuple[str, ...], fuzz: Any) -> None:
    report = fuzz(Tiled(hooks=hooks, name="planted"), cases=8, seed=seed)
    assert report.failed and report.passed and not report.is_green
    failure = report.failures[0]
    assert failure.outcome.status == failure.shrunk_outcome.status == "wrong"
    parts = failure.shrunk.workload.split(",")
    assert set(simplest) < set(parts) and len(parts) <= 7, failure.shrunk
    assert failure.command.startswith("attnscope check ") and f"--seed {failure.shrunk.seed}" in failure.command
    assert failure.command in render_fuzz(report)


def test_a_fault_that_only_some_strides_show_is_told_by_its_case(fuzz: Any) -> None:
    class AssumesWholeTensors(Good):
        name = "assumes_whole_tensors"

        def prepare(self, workload: Workload, device: Device) -> Any:
            class Prepared(GoodPrepared):
                def forward(self, inputs: Any, *, save: bool = False) -> Any:
                    output = super().forward(inputs, save=save)
                    if inputs.q.numel() and inputs.q.stride(-2) % inputs.q.shape[-1]:
                        output.out = output.out * 2
                    return output

            return Prepared()

    report = fuzz(AssumesWholeTensors(), cases=8, seed=3)
    assert {failure.shrunk.strides for failure in report.failures} == {"wide"}
    command = report.failures[0].command
    spelled = command.split("'")[1]
    assert command.startswith("attnscope fuzz assumes_whole_tensors --case '") and " wide " in spelled
    again = fuzz(AssumesWholeTensors(), case=spelled)
    assert (again.cases, again.failed, again.failures[0].command) == (1, 1, command)


def test_what_raises_is_told_with_its_sentence(fuzz: Any) -> None:
    class Picky(Good):
        name = "picky"

        def prepare(self, workload: Workload, device: Device) -> Any:
            if workload.L % 2:
                raise RuntimeError(f"no kernel for {workload.L} rows")
            return GoodPrepared()

    report = fuzz(Picky(), cases=12)
    assert report.failures[0].shrunk_outcome == Outcome(
        "raised", "RuntimeError: no kernel for 1 rows", report.failures[0].shrunk_outcome.directions
    )
    assert len(report.failures) == 1 and 1 + len(report.failures[0].alike) == report.failed > 2


def test_a_failure_that_needs_the_cases_before_it_says_so(fuzz: Any) -> None:
    prepared: list[Workload] = []

    class Forgetful(Good):
        name = "forgetful"

        def prepare(self, workload: Workload, device: Device) -> Any:
            prepared.append(workload)
            if len(prepared) == 4:
                raise RuntimeError("tired")
            return GoodPrepared()

    report = fuzz(Forgetful(), cases=6)
    (failure,) = report.failures
    assert failure.note.startswith("passes alone, and did not fail again") and failure.shrunk == failure.case
    assert failure.command == "attnscope fuzz forgetful --seed 0 --case 0..3 --device cpu"


def test_a_spelled_case_that_fails_once_and_then_passes_says_so(fuzz: Any) -> None:
    prepared: list[Workload] = []

    class Moody(Good):
        name = "moody"

        def prepare(self, workload: Workload, device: Device) -> Any:
            prepared.append(workload)
            if len(prepared) == 1:
                raise RuntimeError("not today")
            return GoodPrepared()

    report = fuzz(Moody(), case="B1,H1,L2,D8,fp32 seed=3")
    (failure,) = report.failures
    assert failure.note.startswith("did not fail again in a fresh process: it depends on chance")
    assert failure.command == "attnscope fuzz moody --seed 0 --case 'B1,H1,L2,D8,fp32 seed=3' --device cpu"
    prepared.clear()
    (first,) = fuzz(Moody(), cases=2).failures  # nothing in its batch ran before it
    assert first.note == failure.note and first.case.index == 0


def test_a_sheet_that_refuses_everything_is_not_green(fuzz: Any) -> None:
    class Refuses(SheetImplementation):
        name, summary, sheet = "refuses", "refuses all", SHEET

        def prepare(self, workload: Workload, device: Device) -> Any:
            raise AssertionError("it refused this")

        def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
            return [f"does not like {workload.L} rows"]

    report = fuzz(Refuses(), cases=2)
    assert (report.cases, report.without_workload, report.is_green) == (0, 2, False)
    assert report.reasons["does not like # rows"] == report.refused
    assert "nothing ran, so nothing is shown" in render_fuzz(report)


def test_what_cannot_run_here_at_all_is_a_sentence(fuzz: Any) -> None:
    class Elsewhere(Good):
        name = "elsewhere"
        sheet = Sheet(SHEET.dtypes, SHEET.features, devices=frozenset({"cuda"}))

    with pytest.raises(UnsupportedWorkload, match="runs on cuda, not on cpu"):
        fuzz(Elsewhere())


def test_only_directions_that_are_not_refused_are_judged(cpu: Device) -> None:
    ask = FuzzAsk("forward_only", f"{BAD}:ForwardOnly", cpu, 0)
    told: list[Any] = []
    run_cases(ask, range(3), None, report=told.append)
    assert [message[0] for message in told] == [0, 0, 1, 1, 2, 2]
    assert all(message[1].directions == DIRECTIONS[:1] for message in told[1::2])
    assert try_case(ask, Case("B1,H1,L2,D8,fp64"), report=told.append).status == "refused"


def test_time_is_kept_and_numbers_can_be_chosen(fuzz: Any) -> None:
    assert fuzz(Tiled(name="right"), cases=10**6, minutes=0.003).cases < 1000
    whole, part = fuzz(Tiled(name="right"), cases=6), fuzz(Tiled(name="right"), case="4..5")
    assert part.cases == 2 and whole.cases == 6


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"selection": "naive,flex"}, "one implementation"),
        ({"selection": "naiv"}, "did you mean naive"),
        ({"selection": "naive", "cases": 0}, "--cases must be"),
        ({"selection": "naive", "minutes": 0.0}, "--minutes must be"),
        ({"selection": "naive", "device": "tpu"}, "cpu or cuda"),
        ({"selection": "naive", "case": "9..3"}, "smaller number first"),
        ({"selection": "naive", "case": "B1,H1"}, "must name L"),
        ({"selection": "naive", "case": "3", "cases": 5}, "exclude each other"),
    ],
)
def test_wrong_arguments_are_sentences(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make_fuzz_plan(options.pop("selection"), **options)


def test_the_command_prints_json_and_fails_where_a_case_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "reference_of", lambda name: None)
    arguments = ["fuzz", f"{BAD}:Wrong", "--case", "B1,H1,L2,D8,fp32 seed=3", "--device", "cpu", "--json"]
    done = CliRunner().invoke(app, arguments)
    body = json.loads(done.stdout)
    assert done.exit_code == 1 and body["failed"] == body["cases"] == 1
    assert body["failures"][0]["command"] == (
        f"attnscope check B1,H1,L2,D8,fp32 --implementations {BAD}:Wrong --seed 3 --device cpu"
    )


@pytest.mark.long
@pytest.mark.parametrize(("name", "status"), [("Crashes", "crashed"), ("Hangs", "hung")])
def test_a_crash_or_a_hang_costs_its_own_case_and_the_rest_goes_on(name: str, status: str) -> None:
    report = execute_fuzz(make_fuzz_plan(f"{BAD}:{name}", cases=2, device="cpu", time_limit_s=3))
    assert (report.cases, report.failed) == (2, 2)
    assert report.failures[0].outcome.status == report.failures[0].shrunk_outcome.status == status
    assert report.failures[0].alike == (1,) and "attnscope check" in report.failures[0].command


@pytest.mark.long
def test_two_workers_find_what_one_finds() -> None:
    one, two = (execute_fuzz(make_fuzz_plan(f"{BAD}:Good", cases=64, device="cpu", workers=count)) for count in (1, 2))
    assert (one.workers, two.workers) == (1, 2) and one.coverage == two.coverage and one.cases == two.cases == 64


def test_prepared_tiled_is_what_the_hooks_change() -> None:
    """The planted faults sit in the stand-in that the saboteurs use."""
    assert isinstance(Tiled().prepare(Workload.parse("B1,H1,L1,D1,fp32"), find_device("cpu")), PreparedTiled)


def test_options_come_again_with_other_sizes_and_another_seed_draws_others(cpu: Device) -> None:
    period = SIZES_A_RECIPE * RECIPES
    first, again, other = (
        [Workload.parse(case.workload) for case, _ in drawn if case]
        for drawn in (
            [draw_case(Tiled(), cpu, 0, index) for index in range(8)],
            [draw_case(Tiled(), cpu, 0, index) for index in range(period, period + 8)],
            [draw_case(Tiled(), cpu, 1, index) for index in range(8)],
        )
    )
    options = [[(w.features - {"cross"}, w.D, w.dtype, w.layout) for w in drawn] for drawn in (first, again, other)]
    assert options[0] == options[1] != options[2]
    assert [(w.B, w.L, w.S) for w in first] != [(w.B, w.L, w.S) for w in again]
