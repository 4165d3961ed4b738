"""The command line as a user meets it.

``attnscope`` starts it in a process of its own, ``here`` runs the same entry point in this process, which saves the
seconds that each new one takes to import torch: for what depends on the arguments alone.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnscope import cli, demo
from attnscope.listing import list_implementations

TINY = "B1,H2,L32,D16,fp32,causal"


def attnscope(*arguments, cwd=None, env=None, timeout=240, **options):
    return subprocess.run(
        [sys.executable, "-m", "attnscope", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1"} | (env or {}),
        **options,
    )


@pytest.fixture
def here(tmp_path, monkeypatch, capfd, forked_workers):
    """Runs the command line in this process and in ``tmp_path``; answers as :func:`attnscope` does."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["attnscope", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, error = capfd.readouterr()
        return SimpleNamespace(returncode=ended.value.code, stdout=out, stderr=error)

    for name, value in (("COLUMNS", "80"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.mark.serial
def test_help_is_quick():
    """By processor time, which others stretch only where they share a core's caches and units: so alone."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = attnscope("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0
    assert "compare" in done.stdout
    assert min(times) < 0.3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compare", "B1,H2,L8,D8,colour=red"], "unknown workload field"),
        (["compare", "B1,H3/2,L8,D8"], "H must be a multiple of H_kv"),
        (["compare", "B1,H2,L8,D8,bias=bf16:1x3xLxS"], "must broadcast"),
        (["compare", TINY, "--implementations", "sdpa_flahs"], "did you mean sdpa_flash"),
        (["compare", TINY, "--device", "cuda"], "device cuda is not available"),
        (["compare", TINY, "--device", "tpu"], "device must be cpu or cuda"),
        (["compare", TINY, "--mode", "up"], "mode must be"),
        (["compare", "B4096,H128,L65536,D128,fp32", "--device", "cpu", "--implementations", "sdpa_math"], "needs"),
        (["compare", TINY, "--nonsense"], "No such option"),
        (["profile", TINY, "--active", "0"], "active must be a whole number from 1"),
        (["report", "no-such-file.jsonl"], "cannot read no-such-file.jsonl"),
        (["frobnicate"], "No such command"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_2(arguments, sentence, here):
    if "cuda" in arguments and _cuda():
        pytest.skip("there is a CUDA device here")
    done = here(*arguments)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stdout == ""


def test_unwritable_out_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    done = attnscope("compare", TINY, "--out", str(tmp_path / "file" / "x"))
    assert done.returncode == 2
    assert "--out must be a folder that can be written" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_json_is_one_document_of_the_promised_form(tmp_path, here):
    chosen = "reference_cpu,naive,naive_inplace,sdpa_math,sdpa_flash,sdpa_cudnn,cudnn_graph"  # compiling none
    done = here("compare", TINY, "--device", "cpu", "--implementations", chosen, "--json", "--quick", "--out", "out")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert document["device"]["kind"] == "cpu"
    (entry,) = document["workloads"]
    assert entry["workload"] == TINY
    rows = {row["implementation"]: row for row in entry["results"]}
    assert {row["status"] for row in rows.values()} <= {"ok", "approximate", "skipped", "check_failed", "failed"}
    flash = rows["sdpa_flash"]
    assert flash["status"] == "ok"
    check = flash["check"]
    assert check["passed"] is True
    assert check["grade"] in ("tight", "loose")
    assert 0 <= check["row_rel_error_max"] <= check["error_budget"]
    assert {t["tensor"] for t in check["tensors"]} >= {"out", "dq", "dk", "dv"}
    assert flash["forward"]["time_ms_median"] > 0
    assert flash["backward"]["time_ms_median"] > 0
    assert flash["ops"]
    assert (tmp_path / "out" / flash["trace"]["forward"]).exists()
    assert rows["sdpa_cudnn"]["status"] == "skipped"
    assert rows["sdpa_cudnn"]["reasons"]["forward"]
    for name in ("run.jsonl", "report.html"):
        assert (tmp_path / "out" / name).stat().st_size > 0


@pytest.mark.slow
def test_a_failed_check_exits_1_and_names_it(tmp_path):
    done = attnscope(
        "check", TINY, "--device", "cpu", "--quick", "--implementations", "bad_implementations:Wrong",
        cwd=tmp_path, env={"PYTHONPATH": os.path.dirname(__file__)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "wrong" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("number", "command"), [(signal.SIGINT, "compare"), (signal.SIGTERM, "check")])
def test_ctrl_c_and_a_polite_kill_keep_rows_and_exit_130(tmp_path, number, command):
    names, marker = "sdpa_math,bad_implementations:HangsInCheck", tmp_path / "hangs now"
    process = subprocess.Popen(
        [sys.executable, "-m", "attnscope", command, TINY, "--device", "cpu", "--quick", "--out", "out",
         "--implementations", names],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__), "ATTNSCOPE_TEST_MARKER": str(marker)},
    )  # fmt: skip
    while not marker.exists() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "sdpa_math" in out
    assert "Traceback" not in err
    assert (tmp_path / "out" / "run.jsonl").exists()


def test_a_full_disk_is_a_sentence(here, monkeypatch):
    from attnscope import records

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", full)
    options = ["--device", "cpu", "--quick", "--no-profile", "--mode", "forward", "--implementations", "sdpa_math"]
    done = here("compare", TINY, *options)
    assert done.returncode != 0
    assert "sdpa_math" in done.stdout, "what was measured is shown before it is written"
    assert "No space left on device" in done.stderr
    assert "hint:" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_results_that_cannot_be_written_are_a_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "attnscope", "demo"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert "cannot go on: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_several_runs_are_one_json_document(tmp_path, here):
    twice = tmp_path / "run.jsonl"
    twice.write_bytes(2 * (demo.FOLDER / "run.jsonl").read_bytes())
    done = here("report", str(twice), "--json", "--html", str(tmp_path / "report.html"))
    documents = json.loads(done.stdout)
    assert [document["schema_version"] for document in documents] == [1, 1]


def test_a_terminal_of_few_characters_gets_others_instead():
    done = attnscope("demo", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "sdpa_cudnn" in done.stdout and "us" in done.stdout and "?" not in done.stdout.partition("findings")[0]


def test_list_works_and_fits_80_columns(here):
    done = here("list")
    assert done.returncode == 0, done.stderr
    assert "sdpa_flash" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_list_json(here):
    rows = json.loads(here("list", "--json").stdout)
    assert rows[0]["name"] == "reference_cpu"
    assert {"features", "dtypes", "unavailable"} <= set(rows[0])


def test_list_and_its_page_say_the_same_of_each_implementation():
    """Cell by cell: what the page's tables hold is what the command prints."""
    page = (Path(__file__).parents[1] / "docs" / "reference" / "implementations.md").read_text()
    told: dict[str, dict[str, str]] = {}
    for block in page.split("\n\n"):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines() if line[:1] == "|"]
        for name, *cells in lines[2:]:
            told.setdefault(name.split("`")[1], {}).update(zip(lines[0][1:], cells, strict=True))
    rows = list_implementations()
    assert {row["name"] for row in rows} == told.keys()
    for row in rows:
        cells = told[row["name"]]
        for word, cell in row["table"].items():
            assert cells.get(word, "") == cell, (row["name"], word)
        assert cells["devices"] == row["hardware"] and cells["head dims"] == row["head_dims"]
        for column, key in (("directions", "directions"), ("dtypes", "dtypes"), ("layouts", "layouts")):
            assert cells[column] == ", ".join(row[key]), (row["name"], column)
        for column, key in (("lse", "lse"), ("same result twice", "deterministic"), ("CUDA graph", "cuda_graph")):
            assert (cells[column] == "yes") == row[key], (row["name"], column)
        assert cells["in torch.compile"] == row["torch_compile"]


def _cuda():
    import torch

    return torch.cuda.is_available()
