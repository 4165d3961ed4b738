"""The ladder without a GPU: every rung's kernels on the CPU emulator, its arguments, its views."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from attnscope import cuda, ladder, ladder_views
from attnscope.device import Device, Environment
from attnscope.errors import RecordError, UnknownName, UsageError
from attnscope.implementation import FEATURE_SENTENCES, find, names
from attnscope.ladder import LadderRow, LadderRun, Timing
from attnscope.records import Limits
from attnscope.workload import DIRECTIONS, Workload

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import ladder_figures

import driver_stand_in

torch = pytest.importorskip("torch")

from attnscope.device import find_device  # noqa: E402
from attnscope.implementations import cuda_ladder  # noqa: E402
from attnscope.implementations.cuda_ladder import RUNGS, common, flash  # noqa: E402
from attnscope.inputs import make_inputs  # noqa: E402
from attnscope.reference import compute_attention  # noqa: E402
from test_contract import FEATURE_CASES  # noqa: E402

ALL_RUNGS = [rung for way in RUNGS.values() for rung in way]
HOPPER = Device("cuda", "a Hopper", capability=(9, 0), multiprocessors=132)
TURING = Device("cuda", "a Turing", capability=(7, 5), multiprocessors=40)
# Largest error of an element over its condition scale. fp32: a few roundings of 2**-24; 16-bit: of 2**-9.
TOLERANCE = {"fp32": 2e-6, "bf16": 2e-2, "fp16": 3e-3}


@pytest.fixture
def emulated(monkeypatch):
    import shutil

    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    import cuda_emulator

    monkeypatch.setattr(cuda, "load_kernel", cuda_emulator.load_kernel)
    monkeypatch.setitem(cuda_emulator.ORDER, "value", 0)
    return cuda_emulator


def run_rung(emulator, rung, workload, block):
    """Errors over the condition scale by tensor, on both orders of threads, which must agree bit for bit."""
    way = "forward" if rung in RUNGS["forward"] else "backward"
    inputs = make_inputs(workload, find_device("cpu"), 1, "needles")
    truth = compute_attention(inputs)
    found = []
    for order in (0, 1):
        emulator.ORDER["value"] = order
        prepared = rung().prepare(workload, emulator.DEVICE, block_size=block)
        output = prepared.forward(inputs, save=way == "backward")
        tensors = {"out": output.out} | ({"lse": output.lse} if output.lse is not None else {})
        if way == "backward":
            first = prepared.backward(inputs, output.saved).tensors()
            again = prepared.backward(inputs, output.saved).tensors()
            assert all(torch.equal(first[name], again[name]) for name in first), "a second backward differs"
            tensors |= again
        found.append(tensors)
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), f"{name} hangs on the order of threads: a barrier is missing"
    errors = {}
    for name, tensor in found[0].items():
        scale = truth.scales.get(name, torch.ones(()))
        tiny = 1e-4 if workload.dtype == "fp16" else 1e-12  # fp16 has few bits left for weights below 6e-5
        errors[name] = ((tensor.double() - getattr(truth, name)).abs() / (scale + tiny)).max().item()
    return errors


def check_rung(emulator, rung, spelled, block):
    workload = ladder.workload_for(rung(), Workload.parse(spelled), HOPPER)
    inner = "bf16" if rung().sheet.compute_precision(workload.dtype) == "bf16" else workload.dtype
    errors = run_rung(emulator, rung, workload, block)
    for name, error in errors.items():
        limit = TOLERANCE["bf16"] * 2 if inner == "bf16" and workload.dtype == "fp32" else TOLERANCE[inner]
        limit = 1e-5 if name == "lse" else limit * (4 if rung().sheet.materialises_scores and inner != "fp32" else 1)
        assert error < limit, f"{rung.name}, {workload}, block size {block}: {name} is off by {error:.1e}, over {limit}"


def head_dim(rung, wanted: int) -> int:
    """``wanted``, or the next that the rung takes."""
    multiple = rung.sheet.head_dim_multiple
    return -(-wanted // multiple) * multiple


def test_a_rung_is_right_on_the_emulator(emulated):
    check_rung(emulated, cuda_ladder.ForwardV4, "B2,H2,L33,D32,fp32,causal,layout=qkv", 64)


@pytest.mark.long
@pytest.mark.parametrize("rung", ALL_RUNGS, ids=lambda r: r.name)
def test_what_every_rung_claims_beside_the_plain_causal_mask(emulated, rung):
    """A scale of its own, a mask aligned to the bottom right, the same here, and a head dim that is no power of
    2 where it takes one."""
    assert rung.sheet.features == {"causal_top_left", "causal_bottom_right", "scale"}
    spelled = f"B1,H2,L19,D{head_dim(rung, 20)},fp32,causal=bottom_right,scale=0.3,layout=qkv"
    check_rung(emulated, rung, spelled, rung.block_sizes[0])


@pytest.mark.parametrize("name", names("ladder"))
def test_every_rung_refuses_each_feature_that_it_does_not_claim(name):
    rung = find(name)
    for feature in sorted(FEATURE_CASES.keys() - rung.sheet.features):
        for direction in DIRECTIONS:
            reasons = rung.reasons_unsupported(Workload.parse(FEATURE_CASES[feature]), HOPPER, direction)
            assert any(FEATURE_SENTENCES[feature] in reason for reason in reasons), (feature, reasons)
    for dtype in sorted({"bf16", "fp16", "fp32", "fp64"} - rung.sheet.dtypes):
        reasons = rung.reasons_unsupported(Workload.parse(f"H1,L8,D64,{dtype},causal"), HOPPER)
        assert any(f"not {dtype}" in reason for reason in reasons), (dtype, reasons)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 65])
@pytest.mark.parametrize("rung", ALL_RUNGS, ids=lambda r: r.name)
def test_every_rung_is_right_on_the_emulator(emulated, rung, length):
    check_rung(emulated, rung, f"B1,H2,L{length},D{head_dim(rung, 32)},fp32,causal,layout=qkv", rung.block_sizes[1])


@pytest.mark.slow
@pytest.mark.parametrize("rung", ALL_RUNGS, ids=lambda r: r.name)
def test_every_block_size_is_right_on_the_emulator(emulated, rung):
    for block in rung.block_sizes:
        check_rung(emulated, rung, f"B1,H1,L19,D{head_dim(rung, 16)},fp32,causal,layout=qkv", block)


@pytest.mark.slow
@pytest.mark.parametrize("rung", [r for r in ALL_RUNGS if issubclass(r, flash.FlashLadder)], ids=lambda r: r.name)
def test_tensor_core_rungs_take_wide_heads_fp16_and_other_scales(emulated, rung):
    narrow = f"B1,H2,L66,D{head_dim(rung, 48)},bf16,causal,scale=0"
    for spelled in ("B1,H1,L70,D128,fp16,causal", narrow, "B1,H1,L130,D64,fp16,causal"):
        check_rung(emulated, rung, spelled, rung.block_sizes[0])


@pytest.mark.slow
@pytest.mark.parametrize("block", cuda_ladder.ForwardV9Wgmma.block_sizes)
def test_tiles_go_round_the_buffers(emulated, block):
    check_rung(emulated, cuda_ladder.ForwardV9Wgmma, "B1,H1,L391,D64,bf16,causal", block)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stands", "instead"),
    [
        ("publish_to_products();", ""),
        ("      wait_for_products<0>();", ""),
        ("#define STAGES 3", "#define STAGES 2"),
        ("    __syncthreads();\n    if (tile + 1", "    if (tile + 1"),
    ],
)
def test_the_emulator_sees_what_a_warpgroup_kernel_may_lack(emulated, tmp_path, monkeypatch, stands, instead):
    for file in common.FOLDER.glob("*.cu*"):
        text = file.read_text()
        if file.name == cuda_ladder.ForwardV9Wgmma.source:
            assert stands in text
            text = text.replace(stands, instead)
        (tmp_path / file.name).write_text(text)
    monkeypatch.setattr(common, "FOLDER", tmp_path)
    with pytest.raises(AssertionError):
        check_rung(emulated, cuda_ladder.ForwardV9Wgmma, "B1,H1,L256,D64,bf16,causal", 128)


def test_a_negative_scale_is_right_where_it_is_taken(emulated):
    check_rung(emulated, cuda_ladder.ForwardV4, "B1,H1,L33,D32,fp32,causal,scale=-0.3", 64)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_the_emulator_sees_a_missing_barrier(emulated, tmp_path, lost):
    parts = (common.FOLDER / "backward_v6.cu").read_text().split("__syncthreads();")
    assert len(parts) == 3
    parts[lost] += ";"
    (tmp_path / "race.cu").write_text(parts[0] + ("" if lost == 0 else "__syncthreads();") + parts[1]
                                      + ("" if lost == 1 else "__syncthreads();") + parts[2])  # fmt: skip
    kernel = emulated.load_kernel(tmp_path / "race.cu", "softmax_backward_block_a_row", HOPPER, {"BLOCK_SIZE": 32})
    p, dp = torch.rand(1, 64, 64), torch.rand(1, 64, 64)
    results = []
    for order in (0, 1):
        emulated.ORDER["value"] = order
        results.append(torch.zeros(1, 64, 64))
        kernel.launch((64, 1), 32, results[-1], p, dp, 64, 64, 1.0)
    assert not torch.equal(results[0], results[1])


# --- what needs no kernel ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", ALL_RUNGS, ids=lambda r: r.name)
def test_every_kernel_file_opens_with_its_story(rung):
    head = (common.FOLDER / rung.source).read_text().partition("#include")[0]
    for word in ("Idea", "Grid", "Memory", "Bound", "Against the previous rung"):
        assert re.search(rf"^// {word}: ", head, re.MULTILINE), f"{rung.source} does not say its {word}"


@pytest.mark.parametrize("rung", ALL_RUNGS, ids=lambda r: r.name)
def test_every_kernel_that_a_sheet_names_is_in_its_file(rung):
    text = (common.FOLDER / rung.source).read_text()
    for name in rung.sheet.kernels["cuda"]:
        assert f"{name}(" in text


@pytest.mark.parametrize("rung", ALL_RUNGS, ids=lambda r: r.name)
def test_block_sizes_are_validated(rung):
    with pytest.raises(UsageError, match=r"block size must be one of .*, got 96"):
        rung().prepare(Workload.parse("H1,L8,D32,fp32,causal"), HOPPER, block_size=96)


@pytest.mark.parametrize("rung", ALL_RUNGS, ids=lambda r: r.name)
def test_reasons_are_sentences_of_what_is_wrong(rung):
    reasons = rung().reasons_unsupported(Workload.parse("H4/2,L8,S9,D32,fp64"), find_device("cpu"))
    text = "; ".join(reasons)
    assert "runs on cuda, not on cpu" in text and "computes causal attention only" in text
    assert "grouped-query heads" in text and "not fp64" in text


def test_tensor_core_rungs_say_that_a_t4_is_too_old():
    reasons = cuda_ladder.ForwardV8Async().reasons_unsupported(Workload.parse("H1,L8,D64,fp16,causal"), TURING)
    assert any("needs compute capability 8.0 or newer" in reason for reason in reasons)


def test_old_cards_get_fp16():
    workload = Workload.parse("H1,L8,D64,fp32,causal,layout=qkv")
    assert ladder.workload_for(cuda_ladder.ForwardV6(), workload, TURING) == workload.replace(
        dtype="fp16", layout="bhld"
    )
    assert ladder.workload_for(cuda_ladder.ForwardV6(), workload, HOPPER) == workload.replace(
        dtype="bf16", layout="bhld"
    )
    assert ladder.workload_for(cuda_ladder.ForwardV3(), workload, HOPPER) == workload


def test_tf32_is_put_back():
    settings = torch.backends.cuda.matmul
    for before in ("ieee", "none", "tf32"):
        settings.fp32_precision = before
        with pytest.raises(ZeroDivisionError), common.tf32_products():
            assert settings.fp32_precision == "tf32"
            1 / 0
        assert settings.fp32_precision == before
    settings.fp32_precision = "none"


def test_rungs_are_selected_in_order():
    assert [rung.rung for rung in ladder.find_rungs("backward", "v8,v1,backward_v2")] == ["v1", "v2", "v8"]
    last = ["v10", "v11", "v12_hopper"]
    assert [rung.rung for rung in ladder.find_rungs("forward", None)] == [*(r.rung for r in RUNGS["forward"]), *last]
    assert {way: [type(rung) for rung in ladder.find_rungs(way, None)] for way in RUNGS} == {
        way: list(cuda_ladder.all_rungs(way)) for way in RUNGS
    }
    with pytest.raises(UnknownName, match="did you mean"):
        ladder.find_rungs("forward", "v7_mmma")
    with pytest.raises(UsageError, match="forward or backward"):
        ladder.find_rungs("sideways", None)


# --- the last rung of the forward, whose kernel is hopper_cuda's ------------------------------------------------------


@pytest.fixture
def last_rung(emulated, monkeypatch):
    """V12 on the emulator, with a configuration that is quick to compile for a CPU."""
    from attnscope.implementations.hopper_cuda import HopperCuda, configurations

    emulated.attach(driver_stand_in.stand_in(monkeypatch))
    small = configurations.Configuration(2, 64, 2, slack=8, schedule="table", query_slots=2)
    monkeypatch.setattr(HopperCuda, "chosen", lambda self, workload, device: small)
    return cuda_ladder.ForwardV12Hopper()


def test_the_last_rung_is_the_kernel_of_hopper_cuda_alone(emulated, last_rung):
    workload = ladder.workload_for(last_rung, Workload.parse("B1,H2,L97,D64,fp32,causal,layout=qkv"), HOPPER)
    assert str(workload) == "B1,H2,L97,D64,bf16,causal,layout=qkv"
    inputs = make_inputs(workload, find_device("cpu"), 1, "needles")
    truth, prepared = compute_attention(inputs), last_rung.prepare(workload, emulated.DEVICE)
    output = prepared.new_output(inputs)
    (step,) = prepared.steps(inputs, output)
    step.run()
    whole = prepared.forward(inputs)
    for found in (output, whole):
        assert ((found.out.double() - truth.out).abs() / (truth.scales["out"] + 1e-12)).max() < 1e-2
        assert (found.lse.double() - truth.lse).abs().max() < 1e-4 and found.lse.dtype == torch.float32
    assert step.name == "hopper_cuda" and torch.equal(output.out, whole.out) and output.out is not whole.out


@pytest.mark.parametrize("text", ["B0,H2,L8,D64,bf16,causal", "B1,H2,L0,D64,bf16,causal"])
def test_the_last_rung_computes_nothing_of_nothing(text, last_rung):
    workload = Workload.parse(text)
    prepared = last_rung.prepare(workload, HOPPER)
    inputs = make_inputs(workload, find_device("cpu"))
    output = prepared.forward(inputs)
    assert output.out.shape == (workload.B, 2, workload.L, 64) and output.lse.shape == output.out.shape[:3]
    assert prepared.steps(inputs, output) == []


def test_the_last_rung_claims_what_its_kernel_s_implementation_claims():
    from attnscope import implementation

    mine, its = cuda_ladder.ForwardV12Hopper(), implementation.find("hopper_cuda")
    ladder_s = {"features": mine.sheet.features}
    assert mine.sheet.features < its.sheet.features
    assert vars(mine.sheet) == vars(its.sheet) | ladder_s
    for text in ("H1,L8,D64,bf16,causal,scale=-1", f"H1,L{2**29 + 1},D64,bf16,causal"):
        workload = Workload.parse(text)
        assert mine.reasons_unsupported(workload, HOPPER) == its.reasons_unsupported(workload, HOPPER) != []
    assert mine.reasons_unsupported(Workload.parse("H1,L8,D64,bf16"), HOPPER) == ["computes causal attention only"]
    assert any("older than" in r or "newer" in r for r in mine.sheet.device_reasons(TURING))
    with pytest.raises(UsageError, match="block size must be one of 0, got 64"):
        mine.prepare(Workload.parse("H1,L8,D64,bf16,causal"), HOPPER, block_size=64)


def test_a_rung_that_no_record_has_is_shown_as_not_recorded(run):
    whole = ladder_figures.with_every_rung(run)
    assert [row.rung for row in whole.rows][:4] == ["v1", "v7", "v7", "v8"]
    assert {row.rung for row in whole.rows} == {rung.rung for rung in cuda_ladder.all_rungs("backward")}
    text = ladder_views.markdown_table(whole)
    assert "| v9_fused | – | – |" in text and "`v9_fused`: not recorded." in text
    assert "`v8`@64: its check failed: dq." in text


def test_claims_bring_variants():
    names = [rung.rung for rung in ladder.find_rungs("backward", None, claims=True)]
    assert {"v3_cooperative_groups", "v4_unroll_1", "v4_unroll_16"} <= set(names)
    (unrolled,) = ladder.find_rungs("backward", "v4_unroll_2", claims=True)
    assert unrolled.kernel_sources(64, 128)[-1] == ("backward_v4.cu", {"UNROLL": 2})


@pytest.mark.parametrize("text", ["", "48", "x", "64;128"])
def test_block_sizes_must_be_powers_of_two(text):
    with pytest.raises(UsageError, match="block sizes must be among"):
        ladder.parse_block_sizes(text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_vectors_cannot_read_is_copied(dtype):
    fits = torch.zeros(2, 3, 4, 8, dtype=dtype)
    assert common.vector_aligned(fits) is fits
    buffer = torch.arange(2 * 3 * 4 * 8 + 1, dtype=torch.float32).to(dtype)
    crooked = buffer[1:].view(2, 3, 4, 8)  # contiguous, at an address that is no multiple of 16
    padded = torch.zeros(2, 3, 4, 9, dtype=dtype)[..., :8]
    for tensor in (crooked, padded, fits.transpose(2, 3)[..., :4]):
        ready = common.vector_aligned(tensor)
        assert ready.data_ptr() % 16 == 0 and ready.is_contiguous() and torch.equal(ready, tensor)


def test_softmax_bytes_count_the_visible_triangle():
    w = Workload.parse("B2,H3,L4,D8,fp32,causal")
    assert ladder.softmax_bytes(w, "forward", "tf32") == 2 * 4 * 3 * 2 * 10
    assert ladder.softmax_bytes(w, "backward", "tf32") == 3 * 4 * 3 * 2 * 10
    assert ladder.softmax_bytes(w, "forward", "bf16") == 2 * 2 * 3 * 2 * 10


# --- views ------------------------------------------------------------------------------------------------------------


def row(rung, block, ms, **changes):
    timing = Timing(ms, ms, ms, 5)
    return LadderRow(rung, f"backward_{rung}", block, "w", passed=True, timing=timing, **changes)


@pytest.fixture
def run():
    rows = (
        row("v1", 256, 8000.0),
        row("v7", 64, 0.5, parts={"softmax backward": Timing(0.08, 0.08, 0.08, 5)}, vs_limit=0.2, limit_term="matrix"),
        row("v7", 128, 0.6),
        LadderRow("v8", "backward_v8", 64, "w", reasons=("its check failed: dq",)),
    )
    return LadderRun("backward", "w", HOPPER, Environment("3.12", "Linux"), Limits("x"), rows, 0.05)


def test_the_table_shows_best_sizes_steps_and_other_cards(run):
    text = ladder_views.render_ladder(run, 250)
    assert re.search(r"v7\s+│\s+64\s+│\s+500 µs\s+│\s+16,000 ×", text)
    assert "GeForce RTX 4090" in text and "1.76 ms" in text
    assert "v8@64: its check failed: dq" in text
    assert "v7 over v1: 16,000 ×" in text and "softmax backward 80.0 µs" in text


def test_the_readme_table_goes_between_its_markers(run, tmp_path):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- ladder backward begin -->\nold\n<!-- ladder backward end -->\nafter\n")
    ladder_views.write_table(run, path)
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- ladder backward end -->\nafter\n")
    assert "| v7 | 64 | 500 µs |" in text and "old" not in text
    (tmp_path / "empty.md").write_text("")
    with pytest.raises(UsageError, match="must hold"):
        ladder_views.write_table(run, tmp_path / "empty.md")


def test_json_holds_rows_and_others(run):
    document = ladder_views.to_json(run)
    assert document["rows"][1]["timing"]["time_ms_median"] == 0.5
    assert {other["card"] for other in document["others"]} >= {"NVIDIA H200"}


@pytest.mark.slow
def test_the_picture_is_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    ladder_views.draw([run], tmp_path / "ladder.svg")
    assert b"<svg" in (tmp_path / "ladder.svg").read_bytes()


def test_article_figures_name_their_card():
    for direction, best in (("forward", {"v4": 1.042}), ("backward", {"v7": 1.758925})):
        articles = ladder_views.read_article(direction)
        assert all(article.card for article in articles)
        assert any(best.items() <= article.best_ms.items() for article in articles)


def test_a_run_is_read_back(run, tmp_path):
    import json

    path = tmp_path / "ladder.json"
    path.write_text(json.dumps(ladder_views.to_json(run)))
    assert ladder_views.read_run(path) == run
    path.write_text("{")
    with pytest.raises(RecordError, match="attnscope ladder --out"):
        ladder_views.read_run(path)


@pytest.fixture
def checkout(tmp_path):
    """A checkout with records of both directions, in which v8 is half as slow as v7."""
    import json

    def timed(way, rung, ms, softmax_ms):
        name = "softmax" if way == "forward" else "softmax backward"
        parts = {name: Timing(softmax_ms, softmax_ms, softmax_ms, 5)}
        return row(rung, 64, ms, parts=parts, softmax_vs_copy=0.9)

    steps = {"v1": (8000.0, 7900.0), "v1_fixed": (2000.0, 1900.0), "v2": (100.0, 90.0), "v3": (10.0, 9.0),
             "v3_cooperative_groups": (10.0, 18.0), "v4": (8.0, 7.0), "v7": (0.5, 0.08),
             "v8": (0.25, 0.04)}  # fmt: skip
    steps |= {f"v4_unroll_{n}": (9.0, 30.0 / n) for n in (1, 2, 4, 16)}
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for way in ("forward", "backward"):
        rows = tuple(timed(way, rung, *ms) for rung, ms in steps.items())
        run = LadderRun(way, "w", HOPPER, Environment("3.12", "Linux"), Limits("x"), rows, 0.05)
        file = tmp_path / "benchmarks" / "results" / f"ladder-{way}-x.json"
        file.write_text(json.dumps(ladder_views.to_json(run)))
    for page in (ladder_figures.TABLES, ladder_figures.GUIDE):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
    markers = [f"<!-- ladder {way} begin --><!-- ladder {way} end -->" for way in ("forward", "backward")]
    (tmp_path / ladder_figures.TABLES).write_text("\n".join(markers))
    (tmp_path / ladder_figures.GUIDE).write_text("<!-- generated: ladder claims -->\n<!-- end generated -->\n")
    (tmp_path / ladder_figures.PICTURE).parent.mkdir(parents=True)
    (tmp_path / ladder_figures.PICTURE).touch()
    return tmp_path


def test_the_claims_are_settled_by_the_record(checkout):
    text = ladder_figures.texts(ladder_figures.load(checkout), checkout)[ladder_figures.GUIDE]
    assert "redundancy costs 4.00 ×, the serial loop 20.0 ×" in text
    assert "takes 2.00 of the time without; who reads what brings 10.0 ×" in text
    assert "the fastest is `v4_unroll_16`" in text
    assert "`v8`, whole: 32,000 × over `v1`, 8,000 × over `v1_fixed`, 400 × over `v2`" in text
    assert "softmax alone: `v7` 80.0 µs, `v8` 40.0 µs" in text


def test_tables_hold_the_rungs_and_not_the_variants(checkout):
    text = ladder_figures.texts(ladder_figures.load(checkout), checkout)[ladder_figures.TABLES]
    assert "| v8 | 64 | 250 µs | 2.00 × |" in text and "unroll" not in text and "cooperative" not in text


def test_what_is_out_of_date_is_told_and_then_written(checkout, monkeypatch):
    assert ladder_figures.main(["--check"], checkout) == 1
    monkeypatch.setattr(ladder_views, "draw", lambda runs, path: path.write_text(str(len(runs))))
    assert ladder_figures.main([], checkout) == 0 and (checkout / ladder_figures.PICTURE).read_text() == "2"
    assert ladder_figures.main(["--check"], checkout) == 0
    (checkout / ladder_figures.PICTURE).unlink()
    assert ladder_figures.main(["--check"], checkout) == 1


def test_the_ladder_pages_of_this_checkout_are_up_to_date():
    assert ladder_figures.main(["--check"]) == 0


class TestCommand:
    @pytest.fixture
    def invoke(self):
        import typer
        from typer.testing import CliRunner

        from attnscope.ladder_cli import ladder as command

        app = typer.Typer()
        app.command()(command)
        return lambda *arguments: CliRunner().invoke(app, list(arguments))

    def test_no_direction_is_a_usage_error(self, invoke):
        assert isinstance(invoke().exception, UsageError)

    def test_compiling_needs_a_known_architecture(self, invoke):
        assert isinstance(invoke("--compile-only", "--arch", "hopper").exception, UsageError)

    def test_a_run_is_shown_and_written(self, invoke, run, monkeypatch, tmp_path):
        monkeypatch.setattr(ladder, "run_ladder", lambda direction, **options: run)
        readme, out = tmp_path / "README.md", tmp_path / "run.json"
        readme.write_text("<!-- ladder backward begin --><!-- ladder backward end -->")
        done = invoke("backward", "--readme", str(readme), "--out", str(out))
        assert done.exit_code == 0 and "v7" in done.stdout
        assert "| v7 |" in readme.read_text() and ladder_views.read_run(out) == run

    @pytest.mark.slow
    def test_compiling_needs_no_gpu(self, invoke):
        pytest.importorskip("cuda.core")
        done = invoke("forward", "--compile-only", "--arch", "sm_90")
        assert done.exit_code == 0 and re.search(r"forward_v4\s+softmax_one_warp_a_row\s+\d+\s+0 B", done.stdout)

    def test_compiling_takes_the_rungs_that_are_named(self, invoke):
        pytest.importorskip("cuda.core")
        done = invoke("forward", "--compile-only", "--rungs", "v4", "--json")
        assert done.exit_code == 0 and {one["rung"] for one in json.loads(done.stdout)} == {"forward_v4"}
        assert isinstance(invoke("--compile-only", "--rungs", "v4").exception, UsageError)


@pytest.fixture
def emulated_card(emulated, monkeypatch):
    """``run_ladder`` takes the emulator for a card; only the numbers mean nothing."""
    from attnscope import checking, implementation, inputs, limits, timers

    card = Limits("emulated", {"tf32": 1.0, "fp32": 1.0, "bf16": 1.0}, read_gb_per_s=10.0, copy_gb_per_s=10.0)
    monkeypatch.setattr(ladder, "find_device", lambda kind: emulated.DEVICE)
    for module in (inputs, checking):
        monkeypatch.setattr(module, "available_memory_bytes", lambda device: 2**33)
    monkeypatch.setattr(implementation, "missing_package", lambda requirement: None)
    monkeypatch.setattr(limits, "measure_limits", lambda device, options: card)
    monkeypatch.setattr(timers, "make_timer", lambda device: timers.CpuTimer(2**20))


@pytest.mark.slow
def test_a_slow_rung_is_called_few_times(emulated_card, monkeypatch):
    monkeypatch.setattr(ladder, "SLOW_MS", 0.0)
    monkeypatch.setattr(ladder, "VERY_SLOW_S", 0.0)
    calls = []
    real = cuda_ladder.ForwardV4.prepare

    def prepare(self, *arguments, **options):
        prepared = real(self, *arguments, **options)
        forward = prepared.forward
        prepared.forward = lambda *a, **o: calls.append(1) or forward(*a, **o)
        return prepared

    monkeypatch.setattr(cuda_ladder.ForwardV4, "prepare", prepare)
    (row,) = ladder.run_ladder("forward", rungs="v4", workload="B1,H1,L9,D16,fp32,causal,layout=qkv", quick=True).rows
    assert row.passed and row.timing.samples == ladder.SLOW_SAMPLES and "slow" in row.note
    assert len(calls) <= 6, "the article's first rung takes seconds a call"


@pytest.mark.slow
@pytest.mark.parametrize(("direction", "rungs"), [("forward", "v4,v8_async"), ("backward", "v7,v9_fused")])
def test_a_whole_run_on_the_emulator(emulated_card, direction, rungs):
    """Checks, times and parts come together."""
    run = ladder.run_ladder(
        direction, rungs=rungs, block_sizes="64,128", workload="B1,H2,L17,D32,fp32,causal,layout=qkv", quick=True
    )
    assert [(row.rung, row.block_size) for row in run.rows] == [(r, b) for r in rungs.split(",") for b in (64, 128)]
    for row in run.rows:
        assert row.passed and row.timing is not None, (row.rung, row.check, row.reasons)
        assert row.parts and row.vs_limit is not None and row.limit_term is not None
    first, last = run.best().values()
    assert "softmax" in " ".join(first.parts) and first.softmax_vs_copy is not None
    assert last.softmax_vs_copy is None and "bf16" in last.workload
    assert run.upper_triangle_ms is not None
    assert rungs.split(",")[1] in ladder_views.render_ladder(run, 250)


@pytest.mark.slow
def test_queries_that_are_read_again_are_the_same(emulated, monkeypatch):
    original = cuda_ladder.ForwardV8Async.defines
    monkeypatch.setattr(
        cuda_ladder.ForwardV8Async, "defines", lambda *arguments: {**original(*arguments), "QUERIES_STAY": 0}
    )
    check_rung(emulated, cuda_ladder.ForwardV8Async, "B1,H1,L130,D64,bf16,causal", 64)
