"""Kernels of the hub: what a name may mean, what is refused, and our own small kernel through the real library."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import hub_kernels
from attnscope import implementation as registry
from attnscope.device import Device
from attnscope.errors import UsageError
from attnscope.implementation import _registered, safe_reasons
from attnscope.implementations import hub
from attnscope.implementations.hub import child, trust
from attnscope.sweeping import _without_folder
from attnscope.workload import Workload
from hub_stand_in import COMMIT, Hub, Repository

needs_kernels = pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="needs the kernels package")
CPU = Device("cpu", "a CPU")
HF_TOKEN = "hf_" + "a" * 20


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """A folder, a lock file, a cache and a registry of its own."""
    before = dict(_registered)
    monkeypatch.chdir(tmp_path)
    for name in ("LOCAL_KERNELS", "HF_HUB_OFFLINE", "ATTNSCOPE_KERNELS_LOCK", "KERNELS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    yield
    _registered.clear()
    _registered.update(before)


def lock_file(files: dict[str, bytes], repo: str = "org/small", revision: str = "v1", **more: object) -> dict:
    """A lock file for ``files``, by the plain definition of its hashes."""
    hashes = {path: "sha256:" + hashlib.sha256(body).hexdigest() for path, body in files.items()}
    for path in list(hashes)[:1]:
        body = files[path]
        hashes[path] = "git-sha1:" + hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
    entry = {"commit": COMMIT, "trust_remote_code": False, "files": hashes} | more
    trust.write_lock({f"{repo}@{revision}": entry})
    return entry


# --- names and pins ---


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"hub:org/small@{COMMIT}", f"hub:org/small@{COMMIT}"),
        (f"hub:org/small@{'aB' * 20}", f"hub:org/small@{'ab' * 20}"),
        ("hub:org/small@3", "hub:org/small@v3"),
        ("hub:org/small@v3", "hub:org/small@v3"),
        ("hub:./here", "hub:./here"),
        ("hub:./here/../here", "hub:./here"),
    ],
)
def test_a_name_says_what_ran_and_not_where_it_lies(tmp_path, text, name):
    (tmp_path / "here").mkdir()
    assert trust.parse_spec(text).name == name
    absolute = trust.parse_spec(f"hub:{tmp_path}/here")
    assert (absolute.name, absolute.folder) == ("hub:./here", tmp_path / "here")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hub:org/small", "must name its revision"),
        ("hub:org/small@", "must name its revision"),
        ("hub:small@v1", "must be spelled hub:OWNER/NAME@REVISION"),
        ("hub:org/../x@v1", "must be spelled"),
        ("hub:org/x@../../x", "must be spelled"),
        ("hub:./nowhere", "must name a folder that is there"),
        ("hub:org/small@v1", "may mean other code tomorrow.*\nhint: attnscope kernels lock org/small@v1"),
        ("hub:org/small@main", "may mean other code tomorrow"),
        (f"hub:org/small@{COMMIT[:39]}", "may mean other code tomorrow"),
    ],
)
def test_what_is_not_pinned_is_refused_before_anything_is_fetched(monkeypatch, text, sentence):
    monkeypatch.setattr(hub, "_ask_child", lambda *_: pytest.fail("a child was started"))
    with pytest.raises(UsageError, match=sentence):
        registry.select(f"naive,{text}")


def test_a_commit_needs_no_lock_file_and_a_version_takes_its_own():
    assert trust.find_pin(trust.parse_spec(f"hub:org/small@{COMMIT}")) == trust.Pin("org/small", COMMIT)
    entry = lock_file(hub_kernels.files())
    pin = trust.find_pin(trust.parse_spec("hub:org/small@1"))
    assert (pin.commit, pin.files, pin.trust) == (COMMIT, entry["files"], False)
    with pytest.raises(UsageError, match="may mean other code tomorrow"):
        trust.find_pin(trust.parse_spec("hub:org/small@2"))


def test_local_kernels_comes_before_the_hub(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("LOCAL_KERNELS", f"a/b=/nowhere:org/small={tmp_path}/mine")
    pin = trust.find_pin(trust.parse_spec("hub:org/small@v7"))
    assert (pin.folder, pin.commit) == (tmp_path / "mine", "")
    for text, sentence in (("org/small", "LOCAL_KERNELS must be"), ("org/small=/nowhere", "must name a folder")):
        monkeypatch.setenv("LOCAL_KERNELS", text)
        with pytest.raises(UsageError, match=sentence):
            trust.find_pin(trust.parse_spec("hub:org/small@v7"))


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"lock_version": 2, "kernels": {}}', '{"lock_version": 1, "kernels": {"a/b@v1": {"commit": 1}}}'],
)
def test_a_lock_file_that_is_none_is_refused(tmp_path, text):
    (tmp_path / trust.LOCK_FILE).write_text(text)
    with pytest.raises(UsageError, match="must be a lock file of version 1"):
        trust.read_lock()


def changed(path):
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda build: changed(build / "__init__.py"), "__init__.py: its hash is not the one"),
        (lambda build: changed(build / "table.bin"), "table.bin: its hash is not the one"),
        (lambda build: (build / "table.bin").unlink(), "table.bin: it is missing"),
        (lambda build: (build / "more.pyc").write_bytes(b""), "more.pyc: the lock file does not know it"),
    ],
)
def test_files_other_than_the_locked_ones_are_refused(tmp_path, spoil, why):
    entry = lock_file(hub_kernels.files())
    pin = trust.Pin("org/small", COMMIT, files=entry["files"])
    build = hub_kernels.write(tmp_path / "kernel") / "build" / hub_kernels.VARIANT
    trust.verify_files(build, pin)
    before = trust.digest(build)
    spoil(build)
    with pytest.raises(UsageError, match=f"org/small is refused: build torch-cpu, file {why}"):
        trust.verify_files(build, pin)
    assert trust.digest(build) != before


def test_a_child_gets_no_secret_and_stays_off_the_hub():
    environment = {
        "PATH": "/bin", "HOME": "/x", "KEYBOARD": "us", "HF_TOKEN": "t", "HUGGING_FACE_HUB_TOKEN": "t",
        "AWS_SECRET_ACCESS_KEY": "s", "OPENAI_API_KEY": "k", "PIP_PASSWORD": "p", "SSH_AUTH_SOCK": "/s",
        "HTTPS_PROXY": "http://me:pw@proxy:3128", "HTTP_PROXY": "http://proxy:3128", "MONKEYS": "1", "OLDPWD": "/y",
        "KAGGLE_KEY": "k", "MYSQL_PWD": "p", "SESSION_COOKIE": "c", "HF_OIDC_ID_TOKEN": "t", "HF_TOKEN_PATH": "/t",
        "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "t", "OAUTH_CLIENT_SECRET": "s", "WEBHOOK_SECRET": "s", "LOGIN_AS": HF_TOKEN,
    }  # fmt: skip
    kept = trust.without_secrets(environment)
    passed_on = {name for name in kept if kept[name] == environment.get(name)}
    assert passed_on == {"PATH", "HOME", "KEYBOARD", "HTTP_PROXY", "MONKEYS", "OLDPWD"}
    assert not any(name in kept for name in environment.keys() - passed_on - {"HF_TOKEN_PATH"})
    assert (kept["HF_HUB_OFFLINE"], kept["HF_TOKEN_PATH"], kept["HF_HOME"]) == ("1", os.devnull, os.devnull)


@pytest.mark.parametrize(
    ("environment", "cache"),
    [
        ({"HOME": "/x"}, "/x/.cache/huggingface/hub"),
        ({"HOME": "/x", "XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HOME": "/x", "HF_HOME": "/h"}, "/h/hub"),
        ({"HOME": "/x", "HF_HOME": "/h", "HF_HUB_CACHE": "/elsewhere"}, "/elsewhere"),
        ({"HOME": "/x", "HUGGINGFACE_HUB_CACHE": "/old"}, "/old"),
    ],
)
def test_a_child_finds_the_kernels_that_were_fetched(environment, cache):
    assert trust.without_secrets(environment)["HF_HUB_CACHE"] == cache


@needs_kernels
def test_the_library_itself_finds_no_token_in_a_child(tmp_path):
    """By every way that it knows: variables, the token file, the stored tokens."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text(HF_TOKEN)
    (home / "stored_tokens").write_text(f"[mine]\nhf_token = {HF_TOKEN}\n")
    code = (
        "from huggingface_hub import get_token; from huggingface_hub.utils import _auth as a\n"
        "print(get_token(), a._get_token_from_file(), a.get_stored_tokens())"
    )
    for names, environment in (
        (("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), {"HF_HOME": str(home)}),
        (("HF_TOKEN_PATH",), {"HF_TOKEN_PATH": str(home / "token"), "HF_HOME": str(tmp_path / "empty")}),
    ):
        mine = dict(os.environ) | dict.fromkeys(names[:2] if "PATH" not in names[0] else (), HF_TOKEN) | environment
        said = [
            subprocess.run([sys.executable, "-c", code], env=one, capture_output=True, text=True, check=True).stdout
            for one in (mine, trust.without_secrets(mine))
        ]
        assert HF_TOKEN in said[0], "the test itself"
        assert said[1] == "None None {}\n"


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("hub:org/small@v1", "hub:org/small@v1"),
        ("naive,hub:/home/jane/mine,hub:org/x@v1", "naive,hub:./mine,hub:org/x@v1"),
        ("hub:~/mine", "hub:./mine"),
        ("B1,H4/2,L8,D8", "B1,H4/2,L8,D8"),
    ],
)
def test_a_recorded_command_names_the_kernel_and_no_home(word, kept):
    assert _without_folder(word) == kept


# --- the sheet ---

FLASH = hub.Facts(
    "hub:./x", folder="/x/build/torch-cpu", digest="d", entry="flash_attn_func", backend="cuda", backward=True,
    parameters=("q", "k", "v", "softmax_scale", "causal", "window_size"), archs=("8.0", "9.0a"),
)  # fmt: skip


def reasons(facts, text, capability=(9, 0), direction="forward", monkeypatch=None):
    device = Device("cuda", "a card", capability=capability)
    found = safe_reasons(hub.HubKernel(facts), Workload.parse(text), device, direction)
    return [reason for reason in found if not reason.startswith(("package kernels", "needs kernels"))]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("B1,H4/2,L64,S128,D64,bf16,causal=bottom_right,window=9,scale=0.3", None),
        ("B1,H2,L64,D64,bf16,softcap=3", "does not support a softcap"),
        ("B1,H2,L64,D64,fp32", "takes bf16 or fp16, not fp32"),
        ("B1,H2,L64,D320,bf16", "takes D up to 256, not 320"),
        ("B1,H2,L64,S128,D64,bf16,causal", "aligns causal to the bottom right where L != S"),
        ("B1,H2,L64,S128,D64,bf16,window=9", "aligns window to the bottom right where L != S"),
    ],
)
def test_the_sheet_follows_the_parameters_of_the_entry(text, reason):
    assert reasons(FLASH, text) == ([reason] if reason else [])


def test_a_sage_kernel_is_approximate_and_forward_only():
    kernel = hub.HubKernel(hub.replace(FLASH, entry="sageattn", backward=False))
    assert (kernel.sheet.approximate, kernel.sheet.directions) == (True, {"forward"})
    text = "B1,H2,L64,S128,D64,bf16,causal=bottom_right"
    assert reasons(kernel.facts, text) == ["takes a causal mask only where L = S"]


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (("8.0",), (8, 9), True), (("8.9",), (8, 0), False), (("9.0a",), (9, 0), True), (("9.0a",), (10, 0), False),
        (("8.0+PTX",), (12, 0), True), (("10.0f",), (10, 3), True), (("8.0", "9.0"), (7, 5), False),
        (None, (7, 5), True),
    ],
)  # fmt: skip
def test_the_card_must_be_one_that_it_is_built_for(archs, capability, runs):
    found = reasons(hub.replace(FLASH, archs=archs), "B1,H2,L64,D64,bf16", capability)
    assert bool(found) is not runs and all("is built for compute capability" in reason for reason in found)


def test_a_kernel_that_cannot_be_loaded_is_one_row_with_the_cause():
    facts = hub.replace(FLASH, problem="cannot be loaded: OSError: libcudart.so.12: no such file")
    assert facts.problem in reasons(facts, "B1,H2,L64,D64,bf16")


def test_the_reference_makes_the_same_kernel_elsewhere():
    registry.register(hub.HubKernel(FLASH))
    reference = registry.reference_of("hub:./x")
    assert registry.load_reference(reference).facts == FLASH


# --- through the real library ---


@needs_kernels
def test_locking_keeps_what_the_hub_lists_and_fetches_no_file(monkeypatch):
    files = hub_kernels.files()
    byte_code = {f"build/torch-cpu/{path}": b"" for path in ("stray.pyc", "__pycache__/x.txt")}
    with Hub({"org/small": Repository(files | byte_code)}) as endpoint:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint.endpoint)
        for text, sentence in (
            ("org/small@main", "--moving locks what it stands for now"),
            ("org/small@v9", "has no revision 'v9'; it has: main, v1"),
            ("org/none@v1", "the hub did not list org/none"),
        ):
            with pytest.raises(UsageError, match=sentence):
                trust.lock_kernel(text)
        assert trust.read_lock() == {}
        assert trust.lock_kernel("org/small@1") == COMMIT
        assert trust.lock_kernel("org/small@main", moving=True, trust_remote_code=True) == COMMIT
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UsageError, match="the hub did not list org/small: ConnectError"):
        trust.lock_kernel("org/small@1")
    assert not [path for _, path, _ in endpoint.requests if "/resolve/" in path]
    entries = trust.read_lock()
    assert {name: entry["trust_remote_code"] for name, entry in entries.items()} == {
        "org/small@v1": False, "org/small@main": True,
    }  # fmt: skip
    assert entries["org/small@v1"]["files"].keys() == files.keys()
    assert {value.partition(":")[0] for value in entries["org/small@v1"]["files"].values()} == {"sha256", "git-sha1"}


@pytest.mark.parametrize("name", ["my kernel", "x" * 101])
def test_a_name_that_no_record_takes_is_refused_before_any_code_runs(name, monkeypatch):
    hub_kernels.write(Path(name))
    monkeypatch.setattr(hub, "_ask_child", lambda *_: pytest.fail("it went on to load it"))
    with pytest.raises(UsageError, match="name must be at most 100 letters"):
        registry.select(f"hub:./{name}")


def test_locking_with_a_broken_huggingface_hub_is_one_sentence(monkeypatch):
    broken = types.ModuleType("huggingface_hub")
    broken.__getattr__ = lambda name: (_ for _ in ()).throw(AttributeError(f"no {name}\nsecond line"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", broken)
    monkeypatch.setattr("attnscope.implementation.missing_package", lambda package: None)
    with pytest.raises(UsageError, match=r"huggingface-hub does not import: ImportError: .*\nhint: pip install"):
        trust.lock_kernel("org/small@v1")


WORKLOAD = "B1,H4/2,L17,S33,D16,bf16,causal=bottom_right,window=9,softcap=5"


@needs_kernels
@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_locked_kernel_runs_over_the_network_and_a_changed_one_is_refused(tmp_path, monkeypatch, stub_torch):
    """Whole: locked, fetched with the token, verified, loaded twice without any, checked, on record."""
    from attnscope import check

    ask = hub._ask_child

    def quickly(work, *arguments):
        with stub_torch() if work == "fetch" else contextlib.nullcontext():
            return ask(work, *arguments)

    monkeypatch.setattr(hub, "_ask_child", quickly)
    log = tmp_path / "log"
    monkeypatch.setenv("HUB_TEST_LOG", str(log))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    files = hub_kernels.files()
    lock_file(files)
    with Hub({"org/small": Repository(files)}, trusted={"org"}) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint.endpoint)
        run = check(WORKLOAD, implementations="hub:org/small@1", device="cpu", quick=True)
        assert {headers.get("authorization") for _, _, headers in endpoint.requests} >= {"Bearer hf_secret"}
    (row,) = run.results
    assert (row.status, row.implementation) == ("ok", "hub:org/small@v1"), row
    assert row.check.directions == ("forward", "backward")
    assert f"org/small at {COMMIT}, build torch-cpu, sha256 " in row.note
    assert set(log.read_text().splitlines()) == {"HF_HUB_DISABLE_IMPLICIT_TOKEN"}  # in the child, and in the worker
    assert len(log.read_text().splitlines()) == 2

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # what was fetched is there without the hub; what became of it is seen
    code = next((tmp_path / "home").rglob("snapshots/*/build/*/__init__.py"))
    text = code.read_bytes()
    code.unlink()
    code.write_bytes(text + b"\n")
    with pytest.raises(UsageError, match=r"org/small is refused.*__init__.py: its hash is not the one"):
        hub.open_kernel("hub:org/small@v1")
    assert len(log.read_text().splitlines()) == 2  # it was not loaded to find out


@needs_kernels
@pytest.mark.slow
def test_a_publisher_that_the_library_does_not_trust_is_refused(monkeypatch, stub_torch):
    with Hub({"org/small": Repository(hub_kernels.files())}) as endpoint, stub_torch():
        monkeypatch.setenv("HF_ENDPOINT", endpoint.endpoint)
        with pytest.raises(UsageError, match=r"not from a trusted publisher.*\nhint: .*--trust-remote-code"):
            hub.open_kernel(f"hub:org/small@{COMMIT}")
    assert not [path for _, path, _ in endpoint.requests if "/resolve/" in path]


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import no_such_library", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_library'"),
        (
            "def other(): ...",
            "cannot be loaded: AttributeError: has neither flash_attn_func nor sageattn; it offers: other",
        ),
        ("import os; os.abort()", "cannot be loaded: exit code -6"),
    ],
)
def test_a_broken_kernel_is_a_reason(tmp_path, monkeypatch, stub_torch, code, cause):
    monkeypatch.setenv("LOCAL_KERNELS", f"org/small={hub_kernels.write(tmp_path / 'k', code)}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with stub_torch():
        kernel = hub.open_kernel("hub:org/small@v1")
    assert kernel.facts.problem.startswith(cause)
    assert kernel.origin == "org/small at local"


@needs_kernels
@pytest.mark.slow
def test_offline_what_was_never_fetched_is_a_reason_and_nothing_is_asked(monkeypatch, stub_torch):
    with Hub({"org/small": Repository(hub_kernels.files())}, trusted={"org"}) as endpoint, stub_torch():
        monkeypatch.setenv("HF_ENDPOINT", endpoint.endpoint)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        kernel = hub.open_kernel(f"hub:org/small@{COMMIT}")
    assert kernel.facts.problem.startswith("cannot be fetched: ") and "\n" not in kernel.facts.problem
    assert endpoint.requests == []
    assert kernel.origin == f"org/small at {COMMIT}"


@pytest.mark.slow
def test_a_kernels_library_that_does_not_import_is_a_reason(tmp_path, monkeypatch):
    place = tmp_path / "broken" / "kernels"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open\\nsecond line')")
    monkeypatch.syspath_prepend(tmp_path / "broken")
    monkeypatch.setattr("attnscope.implementation.missing_package", lambda package: None)
    hub_kernels.write(tmp_path / "mine")
    for name in ("hub:./mine", f"hub:org/small@{COMMIT}"):
        kernel = hub.open_kernel(name)
        assert kernel.facts.problem.endswith(": ImportError: libcudart.so.12: cannot open"), kernel.facts.problem


def test_one_kernel_may_load_another_only_by_its_commit_at_any_depth(tmp_path, monkeypatch):
    def build(name, **depends):
        folder = hub_kernels.write(tmp_path / name, **{"kernel-depends": [{"repo-id": "org/x"} | depends]})
        return folder / "build" / hub_kernels.VARIANT

    library = types.ModuleType("kernels")
    library.install_kernel = lambda repo, **_: build("below", version=7)
    monkeypatch.setitem(sys.modules, "kernels", library)
    assert child.loose_dependencies(build("a", version=1), False) == ["org/x at 1"]
    assert child.loose_dependencies(build("b", revision="main"), False) == ["org/x at main"]
    assert child.loose_dependencies(build("c", revision=COMMIT), False) == ["org/x at 7"]


def test_a_kernel_with_a_loose_dependency_is_refused_before_it_is_loaded(monkeypatch):
    def answer(work, *_):
        assert work == "fetch"
        return {"folder": ".", "loose": ["org/x at 1"]}

    monkeypatch.setattr(hub, "_ask_child", answer)
    monkeypatch.setattr("attnscope.implementation.missing_package", lambda package: None)
    with pytest.raises(UsageError, match="it loads org/x at 1, which is not a 40-digit commit"):
        hub.open_kernel(f"hub:org/small@{COMMIT}")


@pytest.fixture
def stub_torch(tmp_path, monkeypatch):
    """In a child that only fetches or fails, a torch that takes no seconds to import: what the library asks of it."""
    place = tmp_path / "stub" / "torch"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(
        "from types import SimpleNamespace as N\n__version__ = '2.13.0'\n_C = N(_GLIBCXX_USE_CXX11_ABI=True)\n"
        "version = N(cuda=None, hip=None, xpu=None)\n"
        "backends = N(mps=N(is_available=lambda: False))\ncompiled_with_cxx11_abi = lambda: True\n"
    )

    def context():
        patch = pytest.MonkeyPatch()
        patch.syspath_prepend(str(tmp_path / "stub"))
        return contextlib.closing(type("Undo", (), {"close": staticmethod(patch.undo)}))

    return context
