"""``explain --try``: which workload a site is, what is not tried and why, and the arithmetic of what is measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import attnscope
import factories
import trace_builder as tb
from attnscope.cli import app
from attnscope.explaining import explain_trace
from attnscope.explaining.explanation import Explanation
from attnscope.explaining.trial import Trial
from attnscope.explaining.workloads import BY_NAME_ONLY, FOLDED, NO_CAUSAL, NO_LAYOUT, RANDOM_BIAS, RANDOM_MASK
from attnscope.records import Run, Verdict
from attnscope.reporting.explanation_html import explanations_page
from attnscope.reporting.trial_text import render_trial
from attnscope.trying import MOST_TRIED, NAIVE_STANDS_IN, TOO_MANY, grouped, judge
from attnscope.workload import Workload
from trace_builder import TraceBuilder

Build = Callable[[TraceBuilder], None]
BLOG = "B8,H16,L1024,D64,bf16"
BLHD = [1048576, 64, 1024, 1]
QKV = [3145728, 64, 3072, 1]


def sdpa(
    b: TraceBuilder, *, us: float = 92.6, q: list[int] | None = None, kv: list[int] | None = None,
    causal: str = "False", mask: tuple[str, list[int]] = ("", []), dropout: str = "0.", dtype: str = "c10::BFloat16",
    strides: list[int] | None = None, kernel: str = tb.FLASH, inner: str = "_scaled_dot_product_flash_attention",
    values: bool = True, name: str = "aten::scaled_dot_product_attention",
) -> None:  # fmt: skip
    """One SDPA call with the arguments that a trace with shapes holds."""
    q = q or tb.Q[1]
    kv = kv or q
    args: dict[str, Any] = {
        "Input Dims": [q, kv, kv, mask[1], [], [], [], []],
        "Input type": [dtype] * 3 + [mask[0], *["Scalar"] * 4],
        "Concrete Inputs": ["", "", "", "", dropout, causal, "", "False"] if values else [],
    }
    if strides is not None:
        args["Input Strides"] = [strides, strides, strides, [], [], [], [], []]
    with b._scope(name, "cpu_op", args), b.op(f"aten::{inner}"):
        b.kernel(kernel, us)


def explained(*builds: Build, device: dict[str, Any] = tb.H200, steps: int = 0) -> Explanation:
    b = TraceBuilder(device)
    for build in builds:
        build(b)
    for number in range(steps):
        with b.annotation(f"ProfilerStep#{number}"):
            for build in builds:
                build(b)
    return explain_trace(b.trace(), "t")


def asked(*builds: Build) -> tuple[str | None, tuple[str, ...], str | None]:
    """Workload, assumptions and reason of the longest forward site."""
    site = next(site for site in explained(*builds).sites if site.direction == "forward")
    if site.workload is not None:
        assert str(Workload.parse(site.workload)) == site.workload
    return site.workload, site.assumed, site.no_workload


# --- which workload a site is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "workload"),
    [
        ({}, BLOG),
        ({"causal": "True"}, f"{BLOG},causal"),
        ({"strides": BLHD}, f"{BLOG},layout=blhd"),
        ({"strides": QKV}, f"{BLOG},layout=qkv"),
        ({"kv": [8, 4, 512, 64]}, "B8,H16/4,L1024,S512,D64,bf16"),
        ({"dtype": "float"}, "B8,H16,L1024,D64,fp32"),
    ],
)
def test_an_sdpa_call_is_its_workload(how: dict[str, Any], workload: str) -> None:
    strides = {"strides": [1048576, 65536, 64, 1]} | how
    assert asked(lambda b: sdpa(b, **strides)) == (workload, (), None)


def test_what_is_filled_in_is_said() -> None:
    assert asked(lambda b: sdpa(b, values=False)) == (BLOG, (NO_CAUSAL, NO_LAYOUT), None)
    padding = ("bool", [8, 1, 1, 1024])
    assert asked(lambda b: sdpa(b, mask=padding, strides=BLHD)) == (
        f"{BLOG},mask=bool:Bx1x1xS,layout=blhd", (RANDOM_MASK,), None,
    )  # fmt: skip
    additive = ("c10::BFloat16", [1024, 1024])
    assert asked(lambda b: sdpa(b, mask=additive, strides=BLHD)) == (
        f"{BLOG},bias=bf16:1x1xLxS,layout=blhd", (RANDOM_BIAS,), None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"dropout": "0.1"}, "dropout=0.1 draws random numbers"),
        ({"dtype": "c10::Float8_e4m3fn"}, "its dtype is not in the trace"),
        ({"mask": ("bool", [3, 1024])}, "does not broadcast"),
        ({"mask": ("int", [1024, 1024])}, "its mask is of int"),
        ({"q": [0, 16, 1024, 64]}, "it is empty"),
        ({"kv": [8, 3, 1024, 64]}, "H must be a multiple of H_kv"),
        ({"name": "flash_attn::_flash_attn_forward", "inner": "x"}, "not flash_attn::_flash_attn_forward"),
    ],
)  # fmt: skip
def test_what_cannot_be_tried_has_its_reason(how: dict[str, Any], why: str) -> None:
    workload, assumed, reason = asked(lambda b: sdpa(b, **how))
    assert workload is None and assumed == () and why in (reason or "")


def test_a_replayed_kernel_is_no_workload() -> None:
    assert asked(lambda b: b.kernel(tb.FLASH, 90, launch="cudaGraphLaunch")) == (None, (), BY_NAME_ONLY)


def between(op: str, *tensors: tuple[str, list[int]], kernel: str = tb.MUL) -> Build:
    """Attention written out, with one op between its first product and its softmax."""

    def build(b: TraceBuilder) -> None:
        tb.matmul(b, tb.NVJET, 84)
        with b.op(op, *tensors):
            b.kernel(kernel, 100)
        with b.op("aten::softmax", tb.SCORES), b.op("aten::_softmax", tb.SCORES):
            b.kernel(tb.SOFTMAX, 283)
        tb.matmul(b, tb.NVJET, 83, values=True)

    return build


def test_attention_that_is_written_out() -> None:
    assert asked(tb.naive) == (f"{BLOG},mask=bool:1x1xLxS", (RANDOM_MASK,), None)
    assert asked(lambda b: tb.naive(b, in_place=True))[0] == f"{BLOG},mask=bool:1x1xLxS"
    assert asked(between("aten::mul", tb.SCORES, ("fp32", []))) == (BLOG, (), None)
    alibi = ("bf16", [1, 16, 1, 1024])
    assert asked(between("aten::add", tb.SCORES, alibi, kernel=tb.ADD))[0] == f"{BLOG},bias=bf16:1xHx1xS"
    capped = asked(between("aten::tanh", tb.SCORES))
    assert capped[0] is None and "aten::tanh" in (capped[2] or "")
    dropped = asked(between("aten::native_dropout", tb.SCORES))
    assert dropped[0] is None and "random numbers" in (dropped[2] or "")


def test_folded_heads_are_said() -> None:
    def build(b: TraceBuilder) -> None:
        scores = [128, 256, 256]
        with b.op("aten::baddbmm", ("bf16", scores), ("bf16", [128, 256, 64]), ("bf16", [128, 64, 256])):
            b.kernel(tb.S16816, 80)
        with b.op("aten::_softmax", ("bf16", scores)):
            b.kernel(tb.SOFTMAX, 80)
        with b.op("aten::bmm", ("bf16", scores), ("bf16", [128, 256, 64])):
            b.kernel(tb.S16816, 80)

    assert asked(build) == ("B128,H1,L256,D64,bf16,bias=bf16:Bx1xLxS", (FOLDED, RANDOM_BIAS), None)


def backward(b: TraceBuilder, us: float = 331.0) -> None:
    args = {"Input Dims": [tb.Q[1]] * 7, "Input type": ["c10::BFloat16"] * 7, "Concrete Inputs": []}
    with b._scope("aten::_scaled_dot_product_flash_attention_backward", "cpu_op", args):
        b.kernel(tb.FLASH_BACKWARD[1], us)


def test_a_backward_is_the_workload_of_its_forward() -> None:
    told = explained(lambda b: sdpa(b, causal="True", strides=BLHD), backward)
    assert {site.workload for site in told.sites} == {f"{BLOG},causal,layout=blhd"}
    (alone,) = explained(backward).sites
    assert alone.workload == BLOG and alone.assumed == (NO_CAUSAL, NO_LAYOUT)
    both = explained(lambda b: sdpa(b, causal="True"), sdpa, backward)
    why = next(site.no_workload for site in both.sites if site.direction == "backward")
    assert "several forward problems" in (why or "")


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def measured(times: dict[str, Any], workload: str = BLOG, **changes: Any) -> Run:
    """A run of the H200 with these isolated times in µs: a number, or forward and backward."""
    results = []
    for name, us in times.items():
        pair = us if isinstance(us, tuple) else (us, None)
        made = factories.result("sdpa_flash").with_changes(
            implementation=name, workload=workload, verdicts=(), profiles=(), kernels=(), findings=(), reasons={},
            check=factories.check(), forward=factories.measurement("forward", pair[0]),
            backward=factories.measurement("backward", pair[1]) if pair[1] else None,
        )  # fmt: skip
        results.append(made)
    return replace(factories.blog_run(), **{"workloads": (workload,), "results": tuple(results)} | changes)


def tried(told: Explanation, run: Run) -> Trial:
    groups, left = grouped(told.sites)
    return judge(told, groups, left, [run])


def linear(b: TraceBuilder) -> None:
    with b.op("aten::linear"), b.op("aten::mm"):
        b.kernel(tb.NVJET, 500)


def test_the_step_by_the_ratio_of_what_ran_and_what_is_fastest() -> None:
    told = explained(lambda b: sdpa(b, strides=BLHD), linear, steps=3)  # four rounds, three of them steps
    run = measured({"sdpa_flash": 100.0, "sdpa_cudnn": 60.0, "naive": 900.0}, f"{BLOG},layout=blhd")
    trial = tried(told, run)
    (one,) = trial.tried
    assert (one.ran, one.fastest, one.same_here) == ("SDPA flash", "sdpa_cudnn", "sdpa_flash")
    assert one.calls == {"forward": 4} and one.trace_us == pytest.approx(4 * 92.6)
    assert one.ratio == pytest.approx(0.6) and one.after_us == pytest.approx(4 * 92.6 * 0.6)
    assert trial.same_card and trial.steps == 3
    assert trial.before_us == pytest.approx(4 * (92.6 + 500))
    assert trial.after_us == pytest.approx(4 * (92.6 * 0.6 + 500))
    text = render_trial(trial)
    assert "these 3 steps would take 2.37 ms → 2.22 ms" in text
    assert (
        "370 µs × (4 × 60.0 µs) / (4 × 100 µs) = 222 µs" in text
        and "2.37 ms - 370 µs of the calls tried + 222 µs" in text
    )
    assert max(map(len, text.splitlines())) <= 80


def test_a_tie_is_no_gain() -> None:
    told = explained(lambda b: sdpa(b, strides=BLHD))
    run = measured({"sdpa_flash": 61.0, "sdpa_cudnn": 60.0}, f"{BLOG},layout=blhd")
    verdict = Verdict("forward", "sdpa_flash", "sdpa_cudnn", "too close to call", 1.017, 0.99, 1.04)
    results = tuple(
        r.with_changes(verdicts=(verdict,)) if r.implementation == "sdpa_flash" else r for r in run.results
    )  # fmt: skip
    trial = tried(told, replace(run, results=results))
    assert trial.tried[0].fastest == "sdpa_flash" and trial.after_us == trial.before_us
    assert "nothing is faster here" in render_trial(trial)


def test_forward_and_backward_are_of_one_implementation() -> None:
    told = explained(lambda b: sdpa(b, strides=BLHD), backward)
    times = {"sdpa_flash": (100.0, 300.0), "sdpa_cudnn": (60.0, 500.0), "sdpa_efficient": (90.0, 200.0), "naive": 10.0}
    trial = tried(told, measured(times, f"{BLOG},layout=blhd"))
    (one,) = trial.tried
    assert one.fastest == "sdpa_efficient" and one.calls == {"forward": 1, "backward": 1}
    assert one.ratio == pytest.approx(290 / 400) and one.after_us == pytest.approx((92.6 + 331) * 290 / 400)


def test_code_that_cannot_be_run_here_is_set_against_times_on_its_card_and_a_stand_in_elsewhere() -> None:
    workload = f"{BLOG},mask=bool:1x1xLxS"
    told = explained(tb.naive)
    run = measured({"naive": 1000.0, "sdpa_efficient": 200.0}, workload)
    (one,) = tried(told, run).tried
    assert one.same_here is None and one.after_us == pytest.approx(200) and one.ratio is None
    assert "1 × 200 µs = 200 µs" in one.arithmetic
    elsewhere = tried(explained(tb.naive, device=tb.A100), run)
    (one,) = elsewhere.tried
    assert one.same_here == "naive" and one.after_us is None and one.ratio == pytest.approx(0.2)
    assert NAIVE_STANDS_IN in one.assumed and elsewhere.before_us is elsewhere.after_us is None
    text = render_trial(elsewhere)
    assert "from another card (NVIDIA A100-SXM4-80GB)" in " ".join(text.split())
    assert "the attention tried would take × 0.200 of its time, here" in text and "→" not in text


def test_what_ran_stays_where_nothing_beats_it() -> None:
    trial = tried(explained(tb.naive), measured({"naive": 5000.0}, f"{BLOG},mask=bool:1x1xLxS"))
    assert trial.tried[0].fastest is None and trial.after_us == trial.before_us
    assert "what ran stays" in render_trial(trial)


def test_wrong_and_incomparable_ones_never_win() -> None:
    told = explained(lambda b: sdpa(b, strides=BLHD))
    run = measured({"sdpa_flash": 100.0, "quantised": 10.0, "apart": 20.0}, f"{BLOG},layout=blhd")
    flash, quantised, apart = run.results
    wrong = factories.wrong(workload=flash.workload)
    assert wrong.status == "check_failed"
    changed = (
        flash, quantised.with_changes(status="approximate"), apart.with_changes(comparable=False), wrong,
    )  # fmt: skip
    (one,) = tried(told, replace(run, results=changed)).tried
    assert one.fastest == "sdpa_flash" and one.left_out == ("broken: failed its check",)
    nothing = tried(told, replace(run, results=(wrong,)))
    assert not nothing.tried and "broken: failed its check" in nothing.not_tried[0].reason
    assert "nothing was tried" in render_trial(nothing)


def test_a_cpu_says_nothing_of_a_card() -> None:
    told = explained(lambda b: sdpa(b, strides=BLHD))
    run = measured({"sdpa_flash": 100.0, "sdpa_math": 60.0}, f"{BLOG},layout=blhd", device=factories.cpu())
    trial = tried(told, run)
    assert not trial.same_card and trial.after_us is trial.ratio is None
    assert "says nothing of that card" in trial.card_sentence and trial.tried[0].fastest == "sdpa_math"
    assert "so there is no ratio" in " ".join(render_trial(trial).split())


def test_only_the_longest_are_tried_and_the_others_named() -> None:
    lengths = range(1, MOST_TRIED + 3)
    told = explained(*[lambda b, n=n: sdpa(b, q=[1, 1, 64 * n, 64], us=10.0 * n) for n in lengths])
    groups, left = grouped(told.sites)
    assert len(groups) == MOST_TRIED and [one.reason for one in left] == [TOO_MANY, TOO_MANY]
    assert {one.problem for one in left} == {"B1,H1,L64,D64,bf16", "B1,H1,L128,D64,bf16"}


def test_the_page_holds_the_trial_and_escapes_it() -> None:
    told = explained(lambda b: sdpa(b, strides=BLHD))
    run = measured({"sdpa_flash": 100.0, "<script>x": 60.0}, f"{BLOG},layout=blhd")
    page = explanations_page([told], None, tried(told, run))
    assert "what was traced would take" in page and "<script" not in page


# --- the command ------------------------------------------------------------------------------------------------------


def explain(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def saved(path: Path, build: Build) -> Path:
    b = TraceBuilder()
    build(b)
    path.write_bytes(b.bytes())
    return path


def test_usage_is_refused_by_sentence(tmp_path: Path) -> None:
    one = saved(tmp_path / "t.json", sdpa)
    for arguments in ((one, one, "--try"), (one, one, "--try", "--diff"), (one, "--device", "cpu")):
        error = explain(*arguments).exception
        assert error is not None and "hint:" in str(error)
    assert "device must be cpu or cuda" in str(explain(one, "--try", "--device", "tpu").exception)


def test_a_trace_without_workloads_needs_no_torch(tmp_path: Path) -> None:
    trace = saved(tmp_path / "t.json", lambda b: b.kernel(tb.FLASH, 90, launch="cudaGraphLaunch"))
    result = explain(trace, "--try")
    assert (
        result.exit_code == 0
        and "nothing was tried" in result.stdout
        and BY_NAME_ONLY in " ".join(result.stdout.split())
    )


@pytest.mark.long
def test_what_was_watched_here_is_tried_here(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 64, 2, 16).transpose(1, 2)
    with attnscope.watch() as w:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    trace = w.save(tmp_path / "t.json.gz")
    result = explain(trace, "--try", "--device", "cpu", "--implementations", "sdpa_flash,sdpa_math", "--json")
    assert result.exit_code == 0, result.exception
    trial = json.loads(result.stdout)["trial"]
    (one,) = trial["tried"]
    assert one["workload"] == "B1,H2,L64,D16,fp32,causal,layout=blhd" and one["same_here"] == "sdpa_flash"
    assert one["fastest"] in ("sdpa_flash", "sdpa_math") and 0 < one["ratio"] <= 1
    assert "dropout" in trial["not_tried"][0]["reason"] and trial["after_us"] is None
