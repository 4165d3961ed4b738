"""The wheel: what is in it, and that it works in an empty environment without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "src" / "attnscope" / "demo"
UNREACHABLE = re.compile(
    r"No matching distribution|Could not find a version|Connection|Max retries|Temporary failure|timed out|SSLError"
)
pytestmark = pytest.mark.slow


def run(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    clean |= {"COLUMNS": "80", "NO_COLOR": "1", "BROWSER": "true"} | environment
    return subprocess.run(list(map(str, arguments)), cwd=cwd, capture_output=True, text=True, timeout=280, env=clean)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a registry: hatchling is among the development requirements."""
    folder = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an empty environment into which only the wheel was installed."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    done = run(programs / "python", "-m", "pip", "install", "-q", wheel, cwd=folder)
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip(f"pip reaches no registry here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-3000:]
    return programs


def metadata(wheel: Path) -> dict[str, list[str]]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        message = Parser().parsestr(archive.read(name).decode())
    return {key: message.get_all(key) or [] for key in ("Requires-Dist", "Requires-Python", "License-Expression")}


def test_it_holds_what_the_package_reads(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {"attnscope/py.typed", "attnscope/known_faults.toml"}
    package = ROOT / "src" / "attnscope"
    for folder in (package / "reporting" / "templates", package / "implementations", DEMO):
        files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        wanted |= {f"attnscope/{path.relative_to(package).as_posix()}" for path in files}
    assert not wanted - names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    strangers = {name.partition("/")[0] for name in names} - {"attnscope"}
    assert all(name.endswith(".dist-info") for name in strangers), "nothing else lands in site-packages"


def test_the_base_install_never_asks_for_torch(wheel: Path):
    found = metadata(wheel)
    base = [line for line in found["Requires-Dist"] if "extra ==" not in line]
    assert {re.split(r"[<>= ;\[]", line)[0] for line in base} == {"typer", "rich", "msgspec", "jinja2"}
    assert any(line.startswith("torch>=2.10") and "extra == 'torch'" in line for line in found["Requires-Dist"])
    assert not any("==" in line.partition(";")[0] for line in found["Requires-Dist"]), "the package pins nothing"
    assert found["Requires-Python"] == [">=3.11"] and found["License-Expression"] == ["Apache-2.0"]


def test_help_list_and_import_work_without_torch(installed: Path, tmp_path: Path):
    shown = run(installed / "attnscope", "--help", cwd=tmp_path)
    assert shown.returncode == 0 and "compare" in shown.stdout
    listed = run(installed / "attnscope", "list", cwd=tmp_path)
    assert listed.returncode == 0 and "sdpa_flash" in listed.stdout and "torch is not installed" in listed.stdout
    asked = run(
        installed / "python", "-c", "import attnscope; print(attnscope.Workload.parse('H2,L8,D8'))", cwd=tmp_path
    )
    assert asked.stdout.strip() == "B1,H2,L8,D8,bf16", asked.stderr


def test_the_demo_is_read_without_torch(installed: Path, tmp_path: Path):
    done = run(installed / "attnscope", "demo", "--no-open", cwd=tmp_path)
    assert "Traceback" not in done.stderr
    if not (DEMO / "run.jsonl").is_file():
        assert done.returncode == 2 and "cannot read" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "H200" in done.stdout and "sdpa_cudnn" in done.stdout
    report, traces = (Path(line.partition(": ")[2]) for line in done.stderr.strip().splitlines()[-2:])
    assert tmp_path not in report.parents and report.is_file() and any(traces.rglob("*.json.gz"))


def test_running_attention_without_torch_is_a_sentence(installed: Path, tmp_path: Path):
    done = run(installed / "attnscope", "compare", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert "needs torch" in done.stderr and "hint:" in done.stderr and "Traceback" not in done.stderr


def test_an_installed_torch_stays_as_it_is(wheel: Path, installed: Path, tmp_path: Path):
    """pip is asked what it would do in an environment whose torch is new enough, however old within that."""
    (site,) = installed.parent.rglob("site-packages")
    faked = site / "torch-2.10.0.dist-info"
    faked.mkdir()
    try:
        (faked / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0\n")
        (faked / "RECORD").write_text("")
        (faked / "INSTALLER").write_text("pip\n")
        command = [installed / "python", "-m", "pip", "install", "--dry-run", f"{wheel}[torch]"]
        done = run(*command, cwd=tmp_path, PIP_CONSTRAINT=os.devnull)
    finally:
        for file in faked.iterdir():
            file.unlink()
        faked.rmdir()
    assert done.returncode == 0, done.stderr[-2000:]
    would = re.search(r"Would install (.*)", done.stdout)
    assert would is not None and "nvidia-ml-py" in would[1] and not re.search(r"\btorch-", would[1])
