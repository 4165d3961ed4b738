"""The terminal's table: fits, says what matters, survives hostile and missing values."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

import factories
from attnscope.records import OpTime
from attnscope.reporting import facts, html, words
from attnscope.reporting.text import print_profiles, print_run, render_profile, render_run

HOSTILE = "evil\x1b[2J\x07</script>[bold red]x[/]\r\nname"


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(name))


def table_lines(text: str) -> list[str]:
    """The lines of the first table: its head, then its rows."""
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("──"))
    end = next(i for i, line in enumerate(lines) if i > rule and line.startswith(("limit", "fastest", "wrong")))
    return [lines[rule - 1], *lines[rule + 1 : end]]


@pytest.mark.parametrize("run", [factories.blog_run(), factories.cpu_run()], ids=["gpu", "cpu"])
def test_default_table_fits_eighty_columns_and_six_columns(run):
    text = render_run(run)
    assert max(map(len, text.splitlines())) <= 80
    head, *rows = table_lines(text)
    assert 4 <= len(re.split(r"\s{2,}", head.strip())) <= 6
    assert len(rows) == sum(r.status != "skipped" for r in run.results), "a row was wrapped or lost"


def test_key_lines():
    text = render_run(factories.blog_run())
    assert "NVIDIA H200 · torch 2.11.0+cu130" in text
    assert re.fullmatch(r"sdpa_cudnn +ok +58\.9 µs ±1% +181 µs ±1% +0\.71/0\.53 +1/1", row(text, "sdpa_cudnn").rstrip())
    assert re.fullmatch(r"naive_inplace +loose ×2\.3 +927 µs ±1% +– +0\.05/– +5/–", row(text, "naive_inplace"))
    assert re.fullmatch(r"broken +wrong +– +– +– +–", row(text, "broken"))
    assert row(text, "hopper (ours)")
    joined = re.sub(r"\s+", " ", text)
    assert "limit forward 42.1 µs, bound by exponentials; backward 96.7 µs" in joined
    assert (
        "fastest forward: sdpa_cudnn, 58.9 µs; the same as sdpa_auto (59.1 µs); faster than hopper (ours) ×1.13; "
        "0.71 of the limit"
    ) in joined
    assert "backward: sdpa_cudnn, 181 µs; too close to call against sdpa_auto (182 µs)" in joined
    assert "broken: out on needles: error 0.24 where 0.004 is allowed" in joined
    assert "failed naive_compiled: ran past its limit of 120 s" in joined
    assert "note sdpa_auto: ran sdpa_cudnn" in joined
    assert "reference_cpu, flex_cpu: runs on cpu, not on cuda" in joined, "same reasons stand in one line"
    assert "naive_inplace (backward): has no backward" in joined
    assert "naive forward: masked_fill without the underscore copies the scores" in joined
    assert "(saves 126 µs a call). Remedy: masked_fill_ where no gradient needs the scores" in joined


def test_only_directions_that_were_asked_for():
    results = tuple(r.with_changes(backward=None, reasons={}) for r in factories.blog_run().results[:4])
    text = render_run(factories.blog_run(modes=("forward",), results=results))
    assert "backward" not in table_lines(text)[0]
    assert "0.71" not in text and "/" not in row(text, "naive")


def test_wide_shows_every_figure():
    text = render_run(factories.blog_run(), wide=True)
    for title in ("p20 – p80", "sustained", "TFLOP/s", "GB/s", "energy", "host", "graph", "memory", "first call",
                  "prepare", "SM clock", "throttled"):  # fmt: skip
        assert text.count(title) >= 2, title
    line = next(x for x in text.splitlines() if x.startswith("sdpa_cudnn"))
    for cell in ("62.4 µs", "77.0 µs", "58.0 µs", "16.5 MiB", "1,755 MHz", "35.9 mJ"):
        assert cell in line, cell


def test_missing_is_a_dash_and_never_zero():
    text = render_run(factories.cpu_run(), wide=True)
    assert "energy" not in text and "graph" not in text, "columns without a figure are left out"
    measured = factories.measurement(joules_per_call=None)
    rows = (factories.result("sdpa_flash"), factories.result("sdpa_cudnn").with_changes(forward=measured))
    line = row(render_run(factories.blog_run(results=rows), wide=True), "sdpa_cudnn")
    assert "–" in line and " 0 mJ" not in line


def test_plain_without_a_terminal_and_coloured_on_one():
    assert "\x1b" not in render_run(factories.blog_run())
    assert "\x1b[" in render_run(factories.blog_run(), color=True)
    plain = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"NO_COLOR": "1", "TERM": "xterm"})
    print_run(factories.blog_run(), plain)
    assert "\x1b[3" not in plain.file.getvalue()


@pytest.mark.parametrize("wide", [False, True])
def test_print_run_says_what_render_run_says(wide):
    console = Console(file=io.StringIO(), width=80)
    print_run(factories.blog_run(), console, wide=wide)
    assert console.file.getvalue() == render_run(factories.blog_run(), wide=wide)


def test_hostile_names_stay_text():
    result = factories.result("sdpa_cudnn").with_changes(implementation=HOSTILE, note=HOSTILE)
    failed = factories.failed(HOSTILE + "2", error=HOSTILE)
    run = factories.blog_run(results=(result, failed, factories.skipped(HOSTILE + "3", HOSTILE)))
    text = render_run(run) + render_run(run, wide=True)
    assert "\x1b" not in text and "\x07" not in text and "\r" not in text
    assert "[bold red]x[/]" in text.replace("\n", "")


def test_nothing_ran():
    text = render_run(factories.blog_run(results=(factories.skipped(),)))
    assert "nothing ran on this workload" in text and "flash_attn: package flash-attn" in text


def test_a_check_alone_shows_its_errors():
    results = tuple(r.with_changes(forward=None, backward=None, verdicts=()) for r in factories.blog_run().results)
    text = render_run(factories.blog_run(results=results))
    assert re.search(r"sdpa_cudnn +ok +1\.6e-03 +4\.0e-03 +out, hard +128 of 128", text)
    assert max(map(len, text.splitlines())) <= 80


def test_interrupted_and_quick_are_said():
    text = render_run(factories.blog_run(quick=True, interrupted=True))
    assert "quick" in text and "interrupted" in text


def test_profile_shows_table_kernels_and_surprise():
    result = factories.result("naive")
    text = render_profile(result.profiles[0], result.kernels)
    assert "kernels per call 6" in text and "self GPU total 3.19 ms" in text and "GPU time average 1.06 ms" in text
    first = next(line for line in text.splitlines() if "masked_fill_kernel" in line)
    assert "1.08 ms" in first and "359 µs" in first, "sorted by GPU time"
    assert re.search(r"3 +126 µs +12 % +copy +memory +aten::clone: Memcpy DtoD", text)
    assert re.search(r"^! +copy +126 µs$", text, re.MULTILINE)
    assert re.search(r"^ +softmax: softmax over the keys +softmax +283 µs$", text, re.MULTILINE)
    assert "! 1 × copy (Memcpy DtoD" in text
    narrow = render_profile(result.profiles[0], result.kernels, width=80)
    assert max(map(len, narrow.splitlines())) <= 80


def test_profile_table_has_fifteen_rows_by_gpu_time_and_dashes_on_a_cpu():
    table = tuple(OpTime(f"op{i:02d}", 3, 10.0 + i, 20.0, 0.0, 0.0) for i in range(20))
    profile = factories.profile("naive", table=table, gpu_us_per_call=None, self_gpu_us_total=None, expected=())
    text = render_profile(profile, ())
    shown = re.findall(r"^op(\d\d)", text, re.MULTILINE)
    assert shown == [f"{i:02d}" for i in range(19, 4, -1)]
    assert re.search(r"^op19 +29\.0 µs +6\.67 µs +– +– +3$", text, re.MULTILINE)
    assert "self GPU total" not in text


def test_print_profiles_prints_each():
    console = Console(file=io.StringIO(), width=100)
    print_profiles(factories.blog_run(), console)
    assert console.file.getvalue().count("kernels per call") == 13


def test_expected_stands_beside_what_was_seen_of_its_role():
    rows = facts.beside(factories.profile("naive"), factories.kernel_events("naive"))
    assert [(row.expected.split(":")[0], row.seen, row.us, row.differs) for row in rows] == [
        ("scores matmul", "scores matmul", 84.0, False),
        ("scale", "scale", 128.0, False),
        ("mask", "mask", 359.0, False),
        ("softmax", "softmax", 283.0, False),
        ("values matmul", "values matmul", 83.0, False),
        ("", "copy", 126.0, True),
    ]
    math = {
        row.seen: row.differs
        for row in facts.beside(factories.profile("sdpa_math"), factories.kernel_events("sdpa_math"))
    }
    assert math["5 × cast"] and not math["softmax"]


def test_only_surprises_are_marked():
    expected = ("scale: may stay out", "mask: one fill", "softmax: one")
    said = ("no mask was seen: it happens inside another kernel", "3 × safe softmax (a; 1 µs): a guard")
    kernels = (factories.kernel_event(role="softmax", duration_us=5.0),)
    rows = facts.beside(factories.profile("naive", expected=expected, surprises=said), kernels)
    assert [(row.seen, row.differs) for row in rows] == [("", False), ("", True), ("softmax", False)]
    assert facts.beside(factories.profile("naive", expected=(), surprises=()), kernels) == []


def test_fastest_needs_a_right_and_comparable_row():
    rows = list(factories.blog_run().results)
    faster = factories.result("sdpa_cudnn").with_changes(
        implementation="sage", status="approximate", forward=factories.measurement(us=20.0)
    )
    assert words.ranked([*rows, faster], "forward")[0].implementation == "sdpa_cudnn"
    other = faster.with_changes(implementation="half", status="ok", comparable=False)
    assert words.ranked([*rows, other], "forward")[0].implementation == "sdpa_cudnn"
    assert words.status_word(faster) == "approx. ×0.41"
    assert words.fastest_sentence([], "forward") is None


def test_many_ties_are_said_once():
    rows = list(factories.blog_run().results)
    close = tuple(factories.verdict("sdpa_cudnn", r.implementation, "too close to call", 0.9) for r in rows[:7])
    rows[5] = rows[5].with_changes(verdicts=close)
    said = words.fastest_sentence(rows[:7], "forward")
    assert said is not None and said.count("too close to call") == 1
    assert "sdpa_auto (59.1 µs), sdpa_flash (92.6 µs), sdpa_efficient (179 µs) and 3 more; 0.71" in said


def test_verdict_is_turned_round():
    verdict = factories.verdict("slow", "fast", "slower", 2.0)
    result = factories.result("sdpa_flash").with_changes(verdicts=(verdict,))
    turned = words.verdict_between([result], "forward", "fast", "slow")
    assert turned is not None and (turned.word, turned.ratio) == ("faster", 0.5)
    assert turned.ratio_low < 0.5 < turned.ratio_high
    assert words.verdict_between([result], "backward", "fast", "slow") is None


def test_findings_are_ordered_by_saving_and_varied():
    one = factories.finding(id="a", saving_us=10.0, sentence="one")
    two = factories.finding(id="a", saving_us=9.0, sentence="two")
    other = factories.finding(id="b", saving_us=1.0, sentence="other")
    unknown = replace(other, id="c", saving_us=None, sentence="unknown")
    results = [factories.result("naive").with_changes(findings=(unknown, two, other, one, one))]
    assert [f.sentence for f in words.findings_of(results)] == ["one", "two", "other", "unknown"]
    assert [f.sentence for f in words.top_findings(results, 3)] == ["one", "other", "unknown"]


def test_two_savings_must_not_be_added():
    pytest.importorskip("plotly")
    one, two = (factories.finding(id=name, saving_us=9.0, sentence=name) for name in "ab")
    none = factories.finding(id="c", saving_us=None, sentence="c")
    for findings, said in (((one, two), True), ((one, none), False)):
        run = factories.blog_run(results=(factories.result("naive").with_changes(findings=findings),))
        assert ("must not be added" in render_run(run)) == ("must not be added" in html.render_report([run])) == said


def test_the_widest_names_checks_times_and_counts_fit_eighty_columns():
    times = {d: factories.measurement(d, us=1063.0, noise_fraction=0.0092) for d in ("forward", "backward")}
    loose = factories.check(65.0, grade="loose")
    profiles = tuple(factories.profile("sdpa_math", d, kernels_per_call=20.0) for d in ("forward", "backward"))
    row_of = factories.result("naive", check=loose, profiles=profiles, **times)
    results = (replace(row_of, implementation="naive_compiled"),)
    text = render_run(factories.blog_run(results=results), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"naive_compiled +loose ×65 +1\.06 ms ±1\.0% .* 20/20", text)


@pytest.mark.parametrize(("fraction", "shown"), [(0.00084, "±0.1%"), (0.0092, "±1.0%"), (0.012, "±1%"), (0.3, "±30%")])
def test_noise_is_short_and_never_none(fraction, shown):
    assert words.format_noise(fraction) == shown
