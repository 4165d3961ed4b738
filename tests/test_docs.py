"""The documentation: its commands run, its links resolve, its numbers were written by commands.

Blocks of README and guides run page by page, in order, in a folder of the page's own:

* ``console``: lines that start with ``$`` are commands, the lines below one must appear in what it prints (``…`` stands
  for anything); a command succeeds unless an ``error:`` is shown below it. ``bash``: every line is a command.
* ``python``: a script; where its last line is an expression, that is shown as a notebook would show it.

A comment ``<!-- docs-test: WORD -->`` right above a block says more: ``slow`` (needs torch: left to the slow tests),
``gpu``, ``file NAME`` (the block is saved under that name, not run). ``make X`` is run as ``make -n X``, and
``pip install`` is left to tests/test_wheel.py.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from attnscope.suites import SUITES
from attnscope.workload import Workload

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNNABLE = [page for page in PAGES if "reference" not in page.parts and page.name != "design.md"]
HAND_WRITTEN = [page for page in PAGES if "reference" not in page.parts]
MARK = re.compile(r"<!-- docs-test: (slow|gpu|file \S+) -->")
GENERATED = re.compile(
    r"<!-- (generated: [^>]+|ladder \w+ begin) -->\n(.*?)<!-- (end generated|ladder \w+ end) -->", re.S
)
WITHOUT_RECORDS = ("generated: rivals ", "generated: twins ")  # show nothing until a run of theirs is recorded
ON_A_GPU = re.compile(r"attnscope ladder (?!.*--compile-only)|--implementations (forward|backward)_v")
MEASURED = re.compile(r"(?<![\w.])\d[\d.,]* ?(ms|µs|us|TFLOP|GB/s|×)(?!\w)")
SOURCED = re.compile(r"article|A100|data sheet")
NOTEBOOK = """
import ast, sys
body = ast.parse(sys.stdin.read()).body
scope = {"__name__": "__main__"}
last = body.pop() if isinstance(body[-1], ast.Expr) else None
exec(compile(ast.Module(body, []), "page", "exec"), scope)
shown = eval(compile(ast.Expression(last.value), "page", "eval"), scope) if last else None
print(shown._repr_html_() if hasattr(shown, "_repr_html_") else "" if shown is None else repr(shown))
"""


@dataclass
class Block:
    """A fenced block: where it begins, its language, its lines, and the word of its mark."""

    page: Path
    line: int
    language: str
    mark: str
    lines: list[str] = field(default_factory=list)

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """(command, lines that must appear in its output)."""
        found: list[tuple[str, list[str]]] = []
        for line in self.lines:
            if self.language == "bash" or line.startswith("$ "):
                command = line.removeprefix("$ ").partition("  #")[0].strip()
                found += [(command, [])] if command and not command.startswith("#") else []
            elif found and line.strip() not in ("", "…"):
                found[-1][1].append(line.strip())
        return iter(found)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, those between generated markers left out."""
    found: list[Block] = []
    inside: Block | None = None
    before = ""
    text = GENERATED.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())
    for number, line in enumerate(text.splitlines(), 1):
        if inside is None and line.startswith("```"):
            mark = MARK.fullmatch(before)
            inside = Block(page, number, line[3:].strip(), mark[1] if mark else "")
        elif inside is not None and line.startswith("```"):
            found.append(inside)
            inside = None
        elif inside is not None:
            inside.lines.append(line)
        before = line
    assert inside is None, f"{page.name}:{inside.line}: the block does not end" if inside else ""
    return found


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run(arguments: list[str], folder: Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "BROWSER": "true"}
    return subprocess.run(
        arguments, cwd=folder, input=text, capture_output=True, text=True, timeout=600, env=environment
    )


def run_block(block: Block, folder: Path, wanted: set[str]) -> int:
    """Run what is asked for of a block; how many commands that was. ``wanted`` holds "", slow and gpu."""
    where = f"{name(block.page)}:{block.line}"
    if block.mark.startswith("file "):
        (folder / block.mark.split()[1]).write_text("\n".join(block.lines) + "\n")
        return 0
    if block.language == "python":
        if block.mark not in wanted:
            return 0
        done = run([sys.executable, "-c", NOTEBOOK], folder, "\n".join(block.lines))
        assert done.returncode == 0, f"{where}: {done.stderr[-2000:]}"
        return 1
    if block.language not in ("console", "bash"):
        return 0
    return sum(run_command(command, shown, where, block.mark, folder, wanted) for command, shown in block.commands())


def run_command(command: str, shown: list[str], where: str, mark: str, folder: Path, wanted: set[str]) -> bool:
    words = shlex.split(command)
    if words[:2] == ["pip", "install"]:
        assert_extras_exist(words[2:], where)
        return False
    if words[0] == "make":
        done = run(["make", "-n", *words[1:]], ROOT)
        assert done.returncode == 0, f"{where}: {command}: {done.stderr}"
        return True
    assert words[0] == "attnscope" or words[:3] == ["python", "-m", "attnscope"], f"{where}: who runs {command!r}?"
    needs = "gpu" if ON_A_GPU.search(command) else "slow" if "--compile-only" in words else mark
    if needs not in wanted:
        return False
    if "--compile-only" in words and importlib.util.find_spec("cuda") is None:
        return False
    done = run([sys.executable, "-m", "attnscope", *words[1 if words[0] == "attnscope" else 3 :]], folder)
    printed = done.stdout + done.stderr
    expected = 2 if any(line.startswith("error:") for line in shown) else 0
    assert done.returncode == expected, f"{where}: {command}: exit {done.returncode}\n{printed[-3000:]}"
    assert "Traceback" not in printed
    for line in shown:
        assert line in printed, f"{where}: {command} did not print {line!r} but\n{printed[-2000:]}"
    return True


def assert_extras_exist(words: list[str], where: str) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert set(named.split(",")) <= set(known), f"{where}: no such extra: {named}"


@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_quick_commands_run(page: Path, tmp_path: Path):
    for block in blocks(page):
        run_block(block, tmp_path, {""})


# whose quick blocks run in make test
LONG = ("why.md", "explain.md", "tuning.md", "getting_started.md", "profiling_attention.md", "fuzz.md")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page.name in LONG else pytest.mark.slow)
        for page in RUNNABLE
        if any(block.mark == "slow" for block in blocks(page))
    ],
    ids=name,
)
def test_all_commands_run_on_a_cpu(page: Path, tmp_path: Path):
    assert sum(run_block(block, tmp_path, {"", "slow"}) for block in blocks(page)) > 2


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_gpu_commands_run(page: Path, tmp_path: Path):
    for block in blocks(page):
        run_block(block, tmp_path, {"gpu"})


def test_every_block_says_what_it_is():
    known = ("console", "bash", "python", "text", "json", "toml", "make", "")
    for page in RUNNABLE:
        for block in blocks(page):
            assert block.language in known, f"{name(page)}:{block.line}: {block.language}"
            if block.language == "python":
                ast.parse("\n".join(block.lines))
    marks = sum(page.read_text().count("<!-- docs-test:") for page in RUNNABLE)
    assert marks == sum(bool(b.mark) for page in RUNNABLE for b in blocks(page)), "a mark that stands above no block"


def test_readme_names_the_two_commands_first():
    commands = [command for b in blocks(ROOT / "README.md") for command, _ in b.commands()]
    assert commands[:2] == ["make compare", "make test"]
    written = GENERATED.sub("", (ROOT / "README.md").read_text())
    assert len(written.splitlines()) <= 115, "a newcomer reads it all; the tables that commands write come on top"


def prose(page: Path) -> str:
    """The page without what commands wrote and without blocks of code; every line stays where it was."""
    blank = re.compile(r"^```.*?^```$", re.S | re.M)
    text = GENERATED.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())
    return blank.sub(lambda match: "\n" * match[0].count("\n"), text)


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=name)
def test_no_measured_number_is_typed_by_hand(page: Path):
    generated_out = GENERATED.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())
    for number, line in enumerate(generated_out.splitlines(), 1):
        if MEASURED.search(line) and not SOURCED.search(line):
            pytest.fail(
                f"{name(page)}:{number} holds what looks like a measured number outside a generated block: {line}"
            )


def test_the_search_for_typed_numbers_finds_them():
    typed = ("flash takes 96.9 µs here", "about 1,054us", "2.79× slower", "4,339 GB/s", "284 TFLOP/s", "12 ms")
    assert all(MEASURED.search(line) for line in typed)
    innocent = ("48 KiB a block", "Python ≥ 3.11", "H32/8", "`loose ×N`", "5 million", "0.3 s")
    assert not any(MEASURED.search(line) for line in innocent)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path):
    for target in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "", prose(page))):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name(page)}: {target} does not exist"
        assert not anchor or anchor in anchors(found), f"{name(page)}: {target}: no such heading"


def anchors(page: Path) -> set[str]:
    """The names by which GitHub finds a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_can_be_found_from_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    missing = [p for p in (ROOT / "docs").rglob("*.md") if p.name != "index.md" and p.name not in index]
    assert not missing


@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_workloads_that_are_named_exist(page: Path):
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        if re.fullmatch(r"[BHL]\d[^ ]*,[^ ]*", code):
            assert Workload.parse(code)
    for suite in re.findall(r"attnscope (?:compare|check|measure) ([a-z][a-z0-9-]*)", page.read_text()):
        assert suite in SUITES, f"{name(page)}: no suite {suite}"


def test_generated_blocks_hold_something():
    if not any((ROOT / "benchmarks" / "results").glob("*.jsonl")):
        pytest.skip("benchmarks/results holds no records yet")
    for page in PAGES:
        for match in GENERATED.finditer(page.read_text()):
            if match[1].startswith(WITHOUT_RECORDS):  # test_figures holds them to be what the records give
                continue
            assert match[2].strip(), f"{name(page)}: the block {match[1]!r} is empty, run python benchmarks/figures.py"


def test_the_reference_is_up_to_date():
    done = run([sys.executable, "benchmarks/reference.py", "--check"], ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_reference_is_written_anew_where_it_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    spec = importlib.util.spec_from_file_location("reference", ROOT / "benchmarks" / "reference.py")
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert reference.main(["--check"], tmp_path) == 1 and not list(tmp_path.iterdir())
    assert "cli.md is out of date" in capsys.readouterr().out
    assert reference.main([], tmp_path) == 0 and reference.main(["--check"], tmp_path) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "docs" / "reference").iterdir()}
    assert "| `--out PATH` |" in written["cli.md"] and "## attnscope records add" in written["cli.md"]
    assert "| `time_ms_median` | `float` | required |" in written["records.md"]
    assert all(word in written["implementations.md"] for word in ("`sdpa_flash`", "unequal_head_dims"))
    assert all(f"`{suite}`" in written["workloads.md"] for suite in SUITES)
    (tmp_path / "docs" / "reference" / "cli.md").write_text("old")
    assert reference.main(["--check"], tmp_path) == 1
