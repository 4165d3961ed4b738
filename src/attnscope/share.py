"""Upload the traces of a folder to a bucket of the Hugging Face Hub, and say where Perfetto shows them.

Reads trace files, writes a bucket. Only traces are sent, from a folder of copies made for it; nothing in the bucket is
deleted unless ``mirror`` asks for it. Must not import torch; the libraries that upload are imported when they do.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from attnscope.errors import AttnscopeError, TraceError, UsageError
from attnscope.scrubbing import blocks_of, look_for_private, neutral_name, scrub

TRACES = (".json", ".json.gz", ".pftrace", ".pftrace.gz", ".perfetto-trace")
TRACE_UTIL = "trace-util>=0.2"
HUB = "huggingface-hub>=1.20"
PERFETTO = "https://ui.perfetto.dev/#!/?url="


@dataclass(frozen=True)
class Shared:
    """A link for each trace, who uploaded, whether the bucket can be read without a login, JSON that is no trace."""

    links: dict[str, str]
    through: str
    public: bool | None = None
    left_out: tuple[str, ...] = ()


def find_traces(folder: Path) -> tuple[dict[str, Path], tuple[str, ...]]:
    """The traces below ``folder`` by their path in it, and the files that only look like some by their name.

    Raises:
        UsageError: there is no such folder, or no trace in it.
    """
    if not folder.is_dir():
        raise UsageError(f"share must be given a folder, got {folder}\nhint: attnscope-out/<run>/traces")
    found = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.name.endswith(TRACES) and path.is_file() and not path.name.startswith(".")
    }
    left_out = tuple(name for name, path in found.items() if not _is_trace(path))
    traces = {name: path for name, path in found.items() if name not in left_out}
    if not traces:
        raise UsageError(f"{folder} must hold traces ({', '.join(TRACES)}), it holds none")
    return traces, left_out


def _is_trace(path: Path) -> bool:
    """Whether a JSON file is a Chrome trace; any other kind is believed its name. Raises TraceError."""
    if ".json" not in path.name:
        return True
    tail, first = b"", True
    for block in blocks_of(path):
        piece = tail + block
        if b'"traceEvents"' in piece or (first and piece.lstrip().startswith(b"[") and b'"ph"' in piece):
            return True
        tail, first = block[-16:], False
    return False


def scrubbed(path: Path, target: Path) -> None:
    """Write a copy of a Chrome trace without host, environment and folders, gzipped where ``path`` is.

    Raises:
        TraceError: it is not JSON, or still gives something away.
    """
    try:
        trace = json.loads(b"".join(blocks_of(path)))
    except ValueError as error:
        raise TraceError(
            f"{path} cannot be scrubbed, it is not JSON: {error}\nhint: leave it out of the folder"
        ) from None
    if not isinstance(trace, dict):
        trace = {"traceEvents": trace}
    body = json.dumps(scrub(trace), separators=(",", ":")).encode()
    target.write_bytes(gzip.compress(body, 6, mtime=0) if path.name.endswith(".gz") else body)
    if left := list(look_for_private(target).sentences()):
        raise TraceError(f"{path} cannot be scrubbed: what is left {left[0]}\nhint: leave it out of the folder")


def share_traces(
    folder: Path, bucket: str, *, scrub: bool = False, as_is: bool = False, mirror: bool = False
) -> Shared:
    """Upload the traces below ``folder`` to ``bucket``, which is made if it is not there.

    Args:
        folder: where the traces are, at any depth; nothing else in it is sent.
        bucket: ``USER/NAME``.
        scrub: send copies without environment, host, folders and secrets, under names without the host's.
        as_is: send traces although they hold such.
        mirror: delete in the bucket what is not in the folder.

    Raises:
        UsageError: an argument is not what it must be, a library is missing, or a trace gives something away.
        TraceError: a trace cannot be read or scrubbed.
        AttnscopeError: the library that uploads is broken, there is no network, or the hub refused.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", bucket):
        raise UsageError(f"--bucket must be USER/NAME, got {bucket!r:.120}")
    traces, left_out = find_traces(folder)
    if scrub:
        traces = _neutrally_named(traces)
    elif not as_is:
        _refuse_private(traces)
    through = _uploader()
    with tempfile.TemporaryDirectory(prefix="attnscope-share-") as place:
        staging = Path(place)
        for name, path in traces.items():
            target = staging / name
            target.parent.mkdir(parents=True, exist_ok=True)
            scrubbed(path, target) if scrub else shutil.copyfile(path, target)
            shutil.copystat(path, target)  # by their times a later upload knows what has not changed
        try:
            there = (
                _by_trace_util(staging, bucket, mirror) if through == "trace-util" else _by_hub(staging, bucket, mirror)
            )
            public = _is_public(bucket)
        except Exception as error:  # someone else's code, with a tree of errors of its own
            raise AttnscopeError(
                f"the upload to {bucket} failed: {type(error).__name__}: {_first_line(error)}\n"
                "hint: hf auth login; is the bucket yours, is there a network, is HF_HUB_OFFLINE set?"
            ) from None
    if missing := traces.keys() - there:
        raise AttnscopeError(f"{len(missing)} of {len(traces)} traces are not in the bucket, e.g. {min(missing)}")
    return Shared({name: perfetto_link(bucket, name) for name in traces}, through, public, left_out)


def perfetto_link(bucket: str, path: str) -> str:
    """The address at which Perfetto shows a file of a public bucket."""
    from huggingface_hub import constants

    return f"{PERFETTO}{constants.ENDPOINT}/buckets/{bucket}/resolve/{quote(path)}"


def _neutrally_named(traces: dict[str, Path]) -> dict[str, Path]:
    """The same under names that tell no machine's. Raises UsageError where two would be called alike."""
    renamed: dict[str, Path] = {}
    for name, path in traces.items():
        new = (PurePosixPath(name).parent / neutral_name(path.name)).as_posix()
        if new in renamed:
            raise UsageError(f"{name} and {renamed[new].name} would both be called {new}\nhint: rename one of them")
        renamed[new] = path
    return renamed


def _refuse_private(traces: dict[str, Path]) -> None:
    told = [f"{name} {sentence}" for name, path in traces.items() for sentence in look_for_private(path).sentences()]
    if told:
        more = f"\n... and {len(told) - 5} more" if len(told) > 5 else ""
        raise UsageError(
            "nothing was sent, since a bucket is read by others:\n" + "\n".join(told[:5]) + more + "\n"
            "hint: --scrub sends copies without it, --as-is sends them as they are"
        )


def _uploader() -> str:
    """trace-util where it is installed (it needs Python 3.12), else huggingface_hub. Raises UsageError."""
    from attnscope.implementation import missing_package

    if missing_package(TRACE_UTIL) is None:
        return "trace-util"
    if reason := missing_package(HUB):
        raise UsageError(f"share needs a library that uploads: {reason}\nhint: pip install 'attnscope[hub]'")
    return "huggingface_hub"


def _by_trace_util(folder: Path, bucket: str, mirror: bool) -> set[str]:
    """Its default deletes what is only in the bucket, so it is always told. Paths that are in the bucket then."""
    from trace_util import upload_traces

    with contextlib.redirect_stdout(sys.stderr):  # it prints its plan; stdout is for the links
        links = upload_traces(bucket, folder, delete=mirror, do_login=False)
    return {link.path for link in links}


def _by_hub(folder: Path, bucket: str, mirror: bool) -> set[str]:
    from huggingface_hub import BucketFile, HfApi

    api = HfApi()
    api.create_bucket(bucket, exist_ok=True)
    api.sync_bucket(str(folder), f"hf://buckets/{bucket}", delete=mirror, quiet=True)
    return {item.path for item in api.list_bucket_tree(bucket, recursive=True) if isinstance(item, BucketFile)}


def _is_public(bucket: str) -> bool | None:
    """Whether Perfetto can fetch from it; None where the hub does not say."""
    from huggingface_hub import HfApi

    private = getattr(HfApi().bucket_info(bucket), "private", None)
    return None if private is None else not private


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no message")
