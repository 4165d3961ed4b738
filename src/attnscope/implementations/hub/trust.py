"""Stage 2: which files a ``hub:`` name stands for, pinned and verified before any of their code runs.

Reads a spelling and the lock file, writes a Pin. Imports neither torch nor ``kernels`` nor another implementation.

A kernel of the hub is someone's code. So a revision is 40 digits of a commit, or a word that the lock file resolves.
That file also keeps a hash of every file, and what does not match is refused. ``attnscope kernels lock`` writes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnscope.errors import UsageError
from attnscope.secrecy import SECRET_NAME, SECRET_VALUE

PREFIX = "hub:"
LOCK_FILE = "attnscope-kernels.lock"
LOCK_VERSION = 1
SPELLING = "hub:OWNER/NAME@REVISION or hub:./FOLDER"
_BYTE_CODE = re.compile(r"\.pyc$|(^|/)__pycache__/")  # the library never fetches it
_COMMIT = re.compile(r"[0-9a-f]{40}")
_VERSION = re.compile(r"v?(\d{1,9})")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.A)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]*", re.A)


@dataclass(frozen=True)
class Spec:
    """What a ``hub:`` name says: a repository and a revision, or a folder."""

    repo: str = ""
    revision: str = ""
    folder: Path | None = None
    spelled: str = ""

    @property
    def name(self) -> str:
        """The implementation's name in records; of a folder elsewhere only its last part, which tells of no home."""
        if self.folder is None:
            return f"{PREFIX}{self.repo}@{self.revision}"
        below_here = self.spelled.startswith("./") and ".." not in self.spelled
        return f"{PREFIX}{self.spelled.rstrip('/')}" if below_here else f"{PREFIX}./{self.folder.name}"


@dataclass(frozen=True)
class Pin:
    """Where a kernel's files come from: a ``folder``, or ``repo`` at ``commit``.

    ``files`` are the lock file's hashes by path inside the repository; None where no lock file was needed. ``trust``
    says that the lock was written with ``--trust-remote-code``.
    """

    repo: str = ""
    commit: str = ""
    folder: Path | None = None
    files: dict[str, str] | None = field(default=None)
    trust: bool = False


def parse_spec(text: str) -> Spec:
    """Spelling -> Spec. A version may be written ``v3`` or ``3``.

    Raises:
        UsageError: it is neither a folder nor a repository with a revision.
    """
    body = text.removeprefix(PREFIX)
    if body.startswith((".", "/", "~")):
        folder = Path(body).expanduser()
        if not folder.is_dir():
            raise UsageError(f"{PREFIX} must name a folder that is there, got {body}\nhint: {SPELLING}")
        return Spec(folder=folder.resolve(), spelled=body)
    repo, at, revision = body.partition("@")
    if not _REPO.fullmatch(repo) or ".." in body:
        raise UsageError(f"a hub kernel must be spelled {SPELLING}, got {text!r:.120}")
    if not at or not _REVISION.fullmatch(revision):
        raise UsageError(
            f"a hub kernel must name its revision, {text!r:.120} does not\n"
            f"hint: {PREFIX}{repo}@ with a 40-digit commit, or a version that `attnscope kernels lock` resolved"
        )
    version = _VERSION.fullmatch(revision)
    commit = revision.lower() if _COMMIT.fullmatch(revision.lower()) else revision
    return Spec(repo, f"v{version[1]}" if version else commit)


def find_pin(spec: Spec) -> Pin:
    """What ``spec`` stands for. ``LOCAL_KERNELS`` comes before the hub, as it does in the library.

    Raises:
        UsageError: the revision may move and no lock file says which commit is meant.
    """
    if spec.folder is not None:
        return Pin(folder=spec.folder)
    local = local_override(spec.repo)
    if local is not None:
        return Pin(repo=spec.repo, folder=local)
    entry = read_lock().get(f"{spec.repo}@{spec.revision}")
    if entry is not None:
        return Pin(spec.repo, entry["commit"], files=entry["files"], trust=entry["trust_remote_code"])
    if _COMMIT.fullmatch(spec.revision):
        return Pin(spec.repo, spec.revision)
    raise UsageError(
        f"revision {spec.revision!r} of {spec.repo} may mean other code tomorrow, and {lock_path()} does not pin it\n"
        f"hint: attnscope kernels lock {spec.repo}@{spec.revision}, or name a 40-digit commit"
    )


def local_override(repo: str) -> Path | None:
    """The folder that ``LOCAL_KERNELS`` (``repo=path:repo2=path2``) names for ``repo``.

    Raises:
        UsageError: it is set and not of that form, or names no folder.
    """
    text = os.environ.get("LOCAL_KERNELS")
    if text is None:
        return None
    for entry in text.split(":"):
        name, equals, path = entry.partition("=")
        if not equals:
            raise UsageError(f"LOCAL_KERNELS must be repo=path:repo2=path2, got {entry!r:.120}")
        if name == repo:
            if not Path(path).is_dir():
                raise UsageError(f"LOCAL_KERNELS must name a folder for {repo}, {path} is none")
            return Path(path).resolve()
    return None


def lock_path() -> Path:
    """``ATTNSCOPE_KERNELS_LOCK``, else ``attnscope-kernels.lock`` in the current folder."""
    return Path(os.environ.get("ATTNSCOPE_KERNELS_LOCK") or LOCK_FILE)


def read_lock() -> dict[str, dict[str, Any]]:
    """``repo@revision`` -> its entry; empty where there is no lock file.

    Raises:
        UsageError: the file is there and not a lock file.
    """
    path = lock_path()
    try:
        body = json.loads(path.read_bytes())
        entries: dict[str, dict[str, Any]] = body["kernels"]
        fits = body["lock_version"] == LOCK_VERSION and all(map(_is_entry, entries.values()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        fits = False
    if not fits:
        raise UsageError(
            f"{path} must be a lock file of version {LOCK_VERSION}\nhint: write it by attnscope kernels lock"
        )
    return entries


def _is_entry(entry: Any) -> bool:
    return (
        bool(_COMMIT.fullmatch(entry["commit"]))
        and isinstance(entry["trust_remote_code"], bool)
        and bool(entry["files"])
        and all(isinstance(path, str) and isinstance(value, str) for path, value in entry["files"].items())
    )


def write_lock(entries: dict[str, dict[str, Any]]) -> None:
    """Write the lock file, whole or not at all. Raises UsageError."""
    path = lock_path()
    body = {"lock_version": LOCK_VERSION, "kernels": dict(sorted(entries.items()))}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(body, indent=1) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def lock_kernel(text: str, *, moving: bool = False, trust_remote_code: bool = False) -> str:
    """Resolve ``repo@revision`` on the hub and keep commit and file hashes in the lock file; returns the commit.

    No file of the kernel is fetched: the hub's own listing has the hashes of all its builds.

    Raises:
        UsageError: a branch or tag without ``moving``, a repository or revision that is not there, or no network.
    """
    spec = parse_spec(text)
    if spec.folder is not None:
        raise UsageError(f"only a kernel of the hub can be locked, {text} is a folder")
    pinned = _VERSION.fullmatch(spec.revision) or _COMMIT.fullmatch(spec.revision)
    if not pinned and not moving:
        raise UsageError(
            f"{spec.revision!r} is neither a version nor a commit but a branch or tag, which can be moved\n"
            "hint: --moving locks what it stands for now"
        )
    commit, files = _hub_listing(spec)
    entry = {"commit": commit, "trust_remote_code": trust_remote_code, "files": files}
    write_lock(read_lock() | {f"{spec.repo}@{spec.revision}": entry})
    return commit


def _hub_listing(spec: Spec) -> tuple[str, dict[str, str]]:
    """(commit, hash by path) of what lies under ``build/``: SHA-256 of large files, git's own hash of small ones."""
    from attnscope.implementation import missing_package

    if reason := missing_package("huggingface-hub>=1.20"):
        raise UsageError(f"locking asks the hub: {reason}\nhint: pip install 'attnscope[hub]'")
    try:
        from huggingface_hub import HfApi, RepoFile
    except Exception as error:  # someone else's package, which may fail in any way when it is imported
        raise UsageError(
            f"locking asks the hub: huggingface-hub does not import: {type(error).__name__}: {first_line(error)}\n"
            "hint: pip install --force-reinstall huggingface-hub"
        ) from None
    api = HfApi()
    try:
        commit = spec.revision
        if not _COMMIT.fullmatch(commit):
            refs = api.list_repo_refs(spec.repo, repo_type="kernel")
            heads = {ref.name: ref.target_commit for ref in (*refs.branches, *refs.tags)}
            if commit not in heads:
                known = ", ".join(sorted(heads)) or "none"
                raise UsageError(f"{spec.repo} has no revision {commit!r}; it has: {known}")
            commit = heads[commit]
        tree = api.list_repo_tree(spec.repo, "build", repo_type="kernel", revision=commit, recursive=True)
        files = {
            item.path: f"sha256:{item.lfs.sha256}" if item.lfs else f"git-sha1:{item.blob_id}"
            for item in tree
            if isinstance(item, RepoFile) and not _BYTE_CODE.search(item.path)
        }
    except UsageError:
        raise
    except Exception as error:  # someone else's code: its transport's errors are no OSError
        raise UsageError(
            f"the hub did not list {spec.repo}: {type(error).__name__}: {first_line(error)}\n"
            "hint: is the name right, is there a network, is HF_HUB_OFFLINE set?"
        ) from None
    if not files:
        raise UsageError(f"{spec.repo}@{spec.revision} holds no build of a kernel")
    return commit, dict(sorted(files.items()))


def verify_files(folder: Path, pin: Pin) -> None:
    """Every file of a build's ``folder`` has the hash that the lock file keeps, and none is missing or more.

    Raises:
        UsageError: naming the file.
    """
    assert pin.files is not None
    prefix = f"build/{folder.name}/"
    expected = {path.removeprefix(prefix): value for path, value in pin.files.items() if path.startswith(prefix)}
    present = kernel_files(folder)
    for path in sorted(expected.keys() | present.keys()):
        why = None
        if path not in expected:
            why = "the lock file does not know it"
        elif path not in present:
            why = "it is missing"
        elif _hash_like(expected[path], present[path]) != expected[path]:
            why = "its hash is not the one in the lock file"
        if why is not None:
            raise UsageError(
                f"{pin.repo} is refused: build {folder.name}, file {path}: {why} ({lock_path()})\n"
                "hint: if you trust the change, attnscope kernels lock again; if you do not know of one, do not run it"
            )


def kernel_files(folder: Path) -> dict[str, Path]:
    """Files of a build by path inside it, links followed; Python's caches, which are never read, left out."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def digest(folder: Path) -> str:
    """One SHA-256 over names and contents of a build's files."""
    total = hashlib.sha256()
    for name, path in kernel_files(folder).items():
        total.update(f"{_file_hash(path, 'sha256')}  {name}\n".encode())
    return total.hexdigest()


def _hash_like(expected: str, path: Path) -> str:
    """``path``'s hash, of the kind that ``expected`` is."""
    kind = expected.partition(":")[0]
    if kind == "git-sha1":
        return f"{kind}:{_file_hash(path, 'sha1', f'blob {path.stat().st_size}'.encode() + bytes(1))}"
    return f"sha256:{_file_hash(path, 'sha256')}"


def _file_hash(path: Path, kind: str, start: bytes = b"") -> str:
    found = hashlib.new(kind, start)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def without_secrets(environment: dict[str, str]) -> dict[str, str]:
    """``environment`` without tokens, passwords and keys, and told to look for none and to stay off the network.

    The library's own home, where it keeps tokens in files, is nowhere; its cache of kernels stays where it is.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if not SECRET_NAME.search(name) and not SECRET_VALUE.search(value) and name != "SSH_AUTH_SOCK"
    }
    caches = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME", "~"), ".cache")
    home = environment.get("HF_HOME") or os.path.join(caches, "huggingface")
    named = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    kept |= {"HF_HUB_CACHE": named or os.path.join(home, "hub"), "HF_HOME": os.devnull, "HF_TOKEN_PATH": os.devnull}
    return kept | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}


def first_line(error: object) -> str:
    """The first line of a message that says something."""
    lines: Iterable[str] = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), "no message")
