"""Stage 2: the two child processes of a ``hub:`` kernel: ``fetch`` downloads and runs none of it, ``probe`` loads it.

Run as ``python -m attnscope.implementations.hub.child WORK ANSWER.json``, the question on stdin; writes the answer, or
``{"error": kind, "message": ...}``. Must not import torch or ``kernels`` at import.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from attnscope.implementations.hub.loading import build_folder, entry_of, has_gradients, load

_FOLDERS = re.compile(r"(?<![\w:/.-])/(?:[^/\s'\"`]+/)+")  # of a path; those of an address stay


def fetch(repo: str, commit: str, trust: bool) -> dict[str, Any]:
    """Download the build for this machine, and what it depends on, by the library's rules (trust, cache, offline).

    Returns its ``folder``, and the ``loose`` ones among the kernels that it would load: those not named by a commit.
    """
    import kernels
    from huggingface_hub import constants

    folder = kernels.install_kernel(
        repo, revision=commit, trust_remote_code=trust, local_files_only=constants.HF_HUB_OFFLINE
    )
    return {"folder": str(folder), "loose": loose_dependencies(folder, trust)}


def loose_dependencies(folder: Path, trust: bool) -> list[str]:
    """``repo at revision`` of every kernel, at any depth, that a build loads by a version or a branch."""
    import kernels

    found = []
    for other in json.loads((folder / "metadata.json").read_text()).get("kernel-depends") or ():
        repo, revision = other["repo-id"], other.get("revision") or other.get("version")
        if not re.fullmatch(r"[0-9a-f]{40}", str(revision)):
            found.append(f"{repo} at {revision}")
            continue
        below = kernels.install_kernel(repo, revision=revision, trust_remote_code=trust, local_files_only=True)
        found += loose_dependencies(below, trust)
    return found


def probe(folder: str) -> dict[str, Any]:
    """Load a kernel and call it once on a tiny problem: where its files lie, its entry, whether it has gradients."""
    module = load(Path(folder))
    name, function = entry_of(module)
    variant = build_folder(module)
    metadata = json.loads((variant / "metadata.json").read_text())
    answer = {
        "folder": str(variant),
        "entry": name,
        "parameters": list(inspect.signature(function).parameters),
        "backend": metadata["backend"]["type"],
        "archs": metadata["backend"].get("archs"),
    }
    return answer | {"backward": has_gradients(function, answer["backend"])}


def main(work: str, answer: str) -> None:
    """Answer the question on stdin."""
    question = json.load(sys.stdin)
    try:
        found = fetch(**question) if work == "fetch" else probe(**question)
    except (Exception, SystemExit) as error:  # someone else's code, and a library that raises many kinds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = _FOLDERS.sub("", "\n".join(lines[:2])) or "no message"
        found = {"error": type(error).__name__, "message": message}
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
