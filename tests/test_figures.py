"""The command that writes the README's tables and pictures: right, idempotent, and run on this checkout."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import factories
from attnscope.errors import AttnscopeError
from attnscope.records import run_lines
from attnscope.suites import SUITES
from rival_runs import rival_run

REPOSITORY = Path(__file__).resolve().parents[1]
README = """# Title
<!-- generated: article -->
old
<!-- end generated -->
between
<!-- generated: times blog backward -->
<!-- end generated -->
<!-- generated: limits -->
<!-- end generated -->
<!-- generated: times decode forward -->
kept
<!-- end generated -->
end
"""


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("figures", REPOSITORY / "benchmarks" / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["figures"]


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def checkout(folder: Path, *runs) -> Path:
    """A small checkout with a README, a guide page, the article's figures and these runs."""
    (folder / "benchmarks" / "results").mkdir(parents=True)
    shutil.copytree(REPOSITORY / "benchmarks" / "data", folder / "benchmarks" / "data")
    (folder / "README.md").write_text(README)
    (folder / "docs").mkdir()
    (folder / "docs" / "guide.md").write_text("<!-- generated: findings blog -->\n<!-- end generated -->\n")
    if runs:
        lines = [line for run in runs for line in run_lines(run)]
        (folder / "benchmarks" / "results" / "h200.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder


def test_tables_are_written_from_the_records(figures, tmp_path: Path):
    root = checkout(tmp_path, factories.blog_run(), factories.cpu_run())
    assert figures.main([], root) == 0
    text = (root / "README.md").read_text()
    assert "| `naive` | 6 | 1,054 | 287 | 16.3 | 0.04 | 6 | – | – |" in text
    assert "| `sdpa_flash` | 1 | 92.6 | 73.0 | 186 | 0.45 | 1 | 146.8 | 138 |" in text
    assert "| `hopper` (ours) | 1 | 66.4 |" in text
    assert "NVIDIA H200, torch 2.11.0+cu130, 2026-11-29." in text and "another card, NVIDIA A100-SXM4-80GB" in text
    backward = next(line for line in text.splitlines() if line.startswith("| `B8,H16,L1024,D64,bf16,causal`"))
    assert "| **181 µs** |" in backward and backward.endswith("| 96.7 µs, exponentials |")
    assert "| read bandwidth | 4,020 GB/s |" in text
    assert "broken" not in text and "old" not in text and "\nbetween\n" in text and text.endswith("end\n")
    assert "kept\n<!-- end generated -->" in text, "a block without a record stays as it is"
    assert "- naive forward: masked_fill without" in (root / "docs" / "guide.md").read_text()


def test_running_it_twice_changes_nothing(figures, tmp_path: Path, capsys):
    root = checkout(tmp_path, factories.blog_run())
    assert figures.main(["--check"], root) == 1
    assert "README.md is out of date, run python benchmarks/figures.py" in capsys.readouterr().out
    assert not (root / "docs" / "pictures").exists(), "--check writes nothing"
    assert figures.main([], root) == 0
    once = tree(root)
    assert figures.main([], root) == 0 and tree(root) == once
    assert figures.main(["--check"], root) == 0 and tree(root) == once


def test_pictures_are_drawn_and_follow_the_numbers(figures, tmp_path: Path):
    root = checkout(tmp_path, factories.blog_run())
    figures.main([], root)
    pictures = root / "docs" / "pictures"
    names = {path.name for path in pictures.iterdir()}
    assert names == {"article-forward.svg", "article-backward.svg", "timeline-forward.svg", "timeline-backward.svg"}
    for path in pictures.iterdir():
        assert len(list(ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}path"))) > 20
        assert not re.search(r"<dc:date>", path.read_text()), "a date would change the file on every run"
    run = factories.blog_run()
    slower = run.results[0].with_changes(forward=factories.measurement("forward", 1300.0))
    newer = factories.blog_run(created="2026-12-01T00:00:00+00:00", results=(slower, *run.results[1:]))
    (root / "benchmarks" / "results" / "later.jsonl").write_bytes(b"\n".join(run_lines(newer)))
    before = tree(pictures)
    assert figures.main([], root) == 0
    changed = {name for name, data in tree(pictures).items() if data != before[name]}
    assert changed == {"article-forward.svg"}, "only what the numbers changed is drawn anew"
    assert "| `naive` | 6 | 1,300 |" in (root / "README.md").read_text(), "the newest run counts"


def test_quick_interrupted_and_cpu_runs_are_never_published(figures, tmp_path: Path):
    runs = [factories.blog_run(quick=True), factories.blog_run(interrupted=True), factories.cpu_run()]
    assert figures.find_run(runs, factories.BLOG) is None
    root = checkout(tmp_path, *runs)
    assert figures.main([], root) == 0 and (root / "README.md").read_text() == README


def test_a_newer_run_without_profiles_does_not_take_the_place_of_one_with_them(figures):
    profiled = factories.blog_run()
    bare = tuple(result.with_changes(profiles=()) for result in profiled.results)
    newer = factories.blog_run(created="2026-12-01T00:00:00+00:00", results=bare)
    assert figures.find_run([newer, profiled], factories.BLOG) is profiled
    assert figures.find_run([newer], factories.BLOG) is newer, "times without kernels are better than none"


def test_without_records_it_says_so_and_changes_nothing(figures, tmp_path: Path, capsys):
    root = checkout(tmp_path)
    before = tree(root)
    for arguments in ([], ["--check"]):
        assert figures.main(arguments, root) == 0
        assert "holds no records yet" in capsys.readouterr().out
    assert tree(root) == before


def test_our_attention_beside_its_rivals_is_shown_from_its_records(figures, tmp_path: Path):
    run = rival_run(
        SUITES["grid"], {"hopper": 1.0, "sdpa_cudnn": 1.1, "flash_attn_4": lambda w: 1.05 if w.D < 256 else None}
    )
    root = checkout(tmp_path, run, rival_run(SUITES["masks"], {"hopper": lambda w: 1.2 if w.mask else 1.0}))
    blocks = (
        "rivals grid hopper forward head",
        "rivals grid hopper forward",
        "rivals decode hopper forward",
        "twins hopper forward",
    )
    (root / "README.md").write_text(
        "".join(f"<!-- generated: {block} -->\n<!-- end generated -->\n" for block in blocks)
    )
    assert figures.main([], root) == 0 and figures.main(["--check"], root) == 0
    text = (root / "README.md").read_text()
    assert "![useful TFLOP/s" in text and "(docs/pictures/hopper-grid.svg)" in text
    assert (
        "geometric means of the rival's figure over its own: 1.056 isolated (worst 1.050, against `flash_attn_4`"
        in text
    )
    assert "| 1.100 | 1.100 | 1.100 | faster | 12.0 µs | 0.50 |" in text and "32 of 32 shapes" in text
    assert "| isolated / sustained | 512 | 2k | 4k | 8k | 16k |" in text
    assert "| D 256, causal | – | 1.10 / 1.10 | – | 1.10 / 1.10 | – |" in text
    assert "- of the limit, bound by matrix products: geometric mean 0.50, lowest 0.50 of 32, B" in text
    assert "cuDNN 9.19.0, triton 3.6.0, flash-attn-4 4.0.0b36." in text
    assert "- without flash_attn_4: skipped: takes another head dim: 4 of 32: B8,H8,L2048,D256,bf16; " in text
    assert "- `mask=bool:Bx1xLxS`, NVIDIA H200: geometric mean 1.200 (sustained 1.200), at most 1.200" in text
    assert "<!-- generated: rivals decode hopper forward -->\n<!-- end generated -->" in text, (
        "no record, nothing shown"
    )
    picture = (root / "docs" / "pictures" / "hopper-grid.svg").read_text()
    assert all(f"<!-- {word} -->" in picture for word in ("hopper (ours)", "sdpa_cudnn", "limit", "D 192/128", "16k"))


def test_the_picture_takes_each_shape_from_the_newest_run_that_holds_a_ratio(figures):
    grid = SUITES["grid"]
    old = rival_run(grid, {"hopper": 2.0, "sdpa_cudnn": 1.1})
    new = rival_run(grid[:3], {"hopper": 1.0, "hopper_cuda": 0.5, "a": 1.3}, created="2026-12-01T00:00:00+00:00")
    alone = rival_run(grid, {"hopper": 0.1}, created="2026-12-02T00:00:00+00:00")
    quick = rival_run(grid, quick=True, created="2026-12-03T00:00:00+00:00")
    data = figures.rival_figures.picture_data([old, new, alone, quick])
    assert data["names"][0] == "hopper" and set(data["names"]) == {"hopper", "sdpa_cudnn", "a"}
    lines = data["panels"]["D 64"]["full"]
    rates = [rate for _, rate in lines["hopper"]]
    assert rates == pytest.approx([350.0] * 3 + [175.0] * 2) and len(lines["a"]) == 3 and len(lines["sdpa_cudnn"]) == 2
    assert [rate for _, rate in lines["limit"]] == pytest.approx([700.0] * 5)
    assert list(data["panels"]) == ["D 64", "D 128", "D 256", "D 128, 32/8 heads", "D 192/128"]
    assert figures.rival_figures.picture_data([alone, quick]) is None
    assert figures.make_block("rivals grid hopper forward", [quick], {}) is None


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        ("rivals gird hopper forward", "did you mean grid"),
        ("rivals grid hopper sideways", "direction must be forward or backward, got 'sideways'"),
        ("rivals grid hopper", "a generated block must be one of .*rivals SUITE IMPLEMENTATION DIRECTION"),
    ],
)
def test_a_block_of_rivals_that_cannot_be_is_a_sentence(figures, block, sentence):
    with pytest.raises(AttnscopeError, match=sentence):
        figures.make_block(block, [factories.blog_run()], {})


def test_an_unknown_block_is_told_with_what_is_known(figures, tmp_path: Path, capsys):
    root = checkout(tmp_path, factories.blog_run())
    (root / "README.md").write_text("<!-- generated: tmies blog -->\n<!-- end generated -->\n")
    assert figures.main([], root) == 2
    assert "a generated block must be one of article, times SUITE DIRECTION" in capsys.readouterr().err
    (root / "README.md").write_text("<!-- generated: times blgo forward -->\n<!-- end generated -->\n")
    assert figures.main([], root) == 2
    assert "did you mean blog" in capsys.readouterr().err


def test_article_figures_name_their_source(figures):
    article = figures.load_article(REPOSITORY)
    assert article["workload"] == factories.BLOG and "A100" in article["device"] and article["title"]
    assert set(article["implementations"]) <= set(factories.FORWARD)


def test_this_checkout_is_up_to_date(figures):
    assert figures.main(["--check"], REPOSITORY) == 0
