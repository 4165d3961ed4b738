"""Stage 2: ``hub:OWNER/NAME@REVISION`` and ``hub:./FOLDER``: kernels of the Hugging Face Hub, through ``kernels``.

Reads Inputs, writes Output and Gradients. Must not import another implementation or a later stage, nor torch or
``kernels`` at import.

The kernel is pinned (:mod:`.trust`), downloaded by one child process, verified against the lock file, and loaded first
in another child whose environment holds no tokens. What that child saw (:class:`Facts`) decides the sheet, and travels
in ``reference`` to the workers that check and measure it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from attnscope.device import Device
from attnscope.errors import PrepareFailed, UsageError
from attnscope.implementation import Gradients, Output, Sheet, SheetImplementation
from attnscope.implementations.common import Saved, autograd_backward, leaves_of
from attnscope.implementations.hub.loading import load, out_of
from attnscope.implementations.hub.trust import (
    PREFIX,
    Pin,
    digest,
    find_pin,
    first_line,
    parse_spec,
    verify_files,
    without_secrets,
)
from attnscope.inputs import Inputs, Tensor
from attnscope.workload import Workload

PROBE_LIMIT_S = 300.0
REQUIREMENT = "kernels>=0.17"
# What a GPU kernel of these is called, so that a row can be told from a fallback.
KERNELS = {
    "kernels-community/flash-attn2": r"flash",
    "kernels-community/flash-attn3": r"flash",
    "kernels-community/vllm-flash-attn3": r"flash",
    "kernels-community/sage-attention": r"(?i)attn",
}
FLASH_OPTIONS = {"softcap": "softcap", "window_size": "window", "alibi_slopes": "alibi"}  # parameter -> feature


@dataclass(frozen=True)
class Facts:
    """What was found of one hub kernel; ``problem`` says why it cannot run here at all.

    ``revision`` is the commit, or ``local``. ``digest`` is one SHA-256 over the files of its build.
    """

    name: str
    repo: str = ""
    revision: str = "local"
    folder: str = ""
    digest: str = ""
    entry: str = ""
    parameters: tuple[str, ...] = ()
    backend: str = ""
    archs: tuple[str, ...] | None = None
    backward: bool = False
    problem: str | None = None


class HubKernel(SheetImplementation):
    """One kernel of the hub behind the contract; made by :func:`open_kernel`."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.name = facts, facts.name
        self.sheet = _sheet(facts)
        self.summary = f"{facts.entry or 'a kernel'} of {facts.repo or 'a local folder'}, loaded by the kernels library"

    @property
    def reference(self) -> str:
        """What :func:`reopen` makes the same kernel of in another process."""
        return PREFIX + json.dumps(asdict(self.facts))

    @property
    def origin(self) -> str | None:
        """Which files ran, for the record."""
        f = self.facts
        if not f.digest:
            return f"{f.repo or 'folder'} at {f.revision}"
        return f"{f.repo or 'folder'} at {f.revision}, build {Path(f.folder).name}, sha256 {f.digest}"

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """What was found when it was loaded, and what an entry's parameters cannot express."""
        del direction
        if self.facts.problem is not None:
            return [self.facts.problem]
        found = [_arch_reason(self.facts.archs, device)]
        if workload.L != workload.S and workload.causal != "bottom_right":
            words = {"causal_top_left", "window", "alibi"} & workload.features
            found += [f"aligns {word.split('_')[0]} to the bottom right where L != S" for word in sorted(words)]
        if self.facts.entry == "sageattn" and workload.L != workload.S and workload.causal:
            found.append("takes a causal mask only where L = S")
        return [reason for reason in found if reason]

    def prepare(self, workload: Workload, device: Device) -> PreparedHub:
        """Load it: the very files that were verified and tried. Raises PrepareFailed."""
        del device
        return PreparedHub(_loaded(self.facts.folder, self.facts.digest, self.facts.entry), self.facts, workload)


class PreparedHub:
    """One call of a kernel's entry; its layout, ``(B, L, H, D)`` for a FlashAttention, is a view of the inputs."""

    def __init__(self, function: Callable[..., Any], facts: Facts, workload: Workload) -> None:
        self.function, self.workload = function, workload
        self.is_flash = facts.entry != "sageattn"
        self.options = _flash_options(workload, facts.parameters) if self.is_flash else _sage_options(workload)

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """out; its lse is not asked for."""
        import torch

        if not save:
            with torch.no_grad():
                return Output(self._call(inputs, inputs.q, inputs.k, inputs.v))
        leaves = leaves_of(inputs)
        with torch.enable_grad():
            out = self._call(inputs, leaves["q"], leaves["k"], leaves["v"])
        return Output(out.detach(), saved=Saved(out, leaves))

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """Through autograd."""
        return autograd_backward(inputs, saved)

    def _call(self, inputs: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        if not self.is_flash:
            return out_of(self.function(q, k, v, **self.options))
        more = {"alibi_slopes": inputs.alibi_slopes} if self.workload.alibi else {}
        out = out_of(self.function(*(t.transpose(1, 2) for t in (q, k, v)), **self.options, **more))
        return out.transpose(1, 2)


def open_kernel(text: str) -> HubKernel:
    """Pin, download, verify and try the kernel that a ``hub:`` name stands for.

    Raises:
        UsageError: the name, the pin, the trust or a file's hash is not what it must be. What else goes wrong is
            the reason of its row.
    """
    from attnscope.implementation import missing_package

    spec = parse_spec(text)
    pin = find_pin(spec)
    facts = Facts(spec.name, repo=spec.repo, revision=pin.commit or "local")
    if missing := missing_package(REQUIREMENT) or missing_package("torch"):
        return HubKernel(replace(facts, problem=missing))
    folder = pin.folder
    if folder is None:
        answer = _ask_child("fetch", {"repo": pin.repo, "commit": pin.commit, "trust": pin.trust}, dict(os.environ))
        if "error" in answer:
            return HubKernel(replace(facts, problem=_fetch_problem(answer, pin, spec.revision)))
        folder = Path(answer["folder"])
        if pin.files is not None:
            verify_files(folder, pin)
        if answer["loose"]:
            raise UsageError(f"{pin.repo} is refused: it loads {answer['loose'][0]}, which is not a 40-digit commit")
    answer = _ask_child("probe", {"folder": str(folder)}, without_secrets(dict(os.environ)), PROBE_LIMIT_S)
    if "error" in answer:
        return HubKernel(
            replace(facts, problem=f"cannot be loaded: {answer['error']}: {first_line(answer['message'])}")
        )
    return HubKernel(replace(facts, **_tuples(answer), digest=digest(Path(answer["folder"]))))


def reopen(reference: str) -> HubKernel:
    """The kernel that another process opened; nothing of it runs before ``prepare``."""
    return HubKernel(Facts(**_tuples(json.loads(reference.removeprefix(PREFIX)))))


def _tuples(body: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with its lists as the tuples that they were."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in body.items()}


def _fetch_problem(answer: dict[str, str], pin: Pin, revision: str) -> str:
    """The library's refusal for want of trust is the user's to decide; anything else is a reason.

    Raises:
        UsageError: the publisher is not one that the library trusts.
    """
    said = " ".join(answer["message"].splitlines())
    if "trust_remote_code" in said:
        asked = "is there a network? " if "could not verify" in said else ""
        raise UsageError(
            f"{pin.repo} is refused by the kernels library: {said.partition('. Set ')[0]}\n"
            f"hint: {asked}if you trust its code, attnscope kernels lock {pin.repo}@{revision} --trust-remote-code"
        )
    return f"cannot be fetched: {answer['error']}: {first_line(answer['message'])}"


def _ask_child(
    work: str, question: dict[str, Any], environment: dict[str, str], limit_s: float | None = None
) -> dict[str, Any]:
    """Run one child of :mod:`.child`; its answer, or an error that says how it ended."""
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    with tempfile.TemporaryDirectory(prefix="attnscope-hub-") as place:
        answer = Path(place) / "answer.json"
        command = [sys.executable, "-m", "attnscope.implementations.hub.child", work, str(answer)]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(question),
                stdout=subprocess.PIPE,
                stderr=None if work == "fetch" else subprocess.PIPE,  # a download shows how far it is
                text=True,
                errors="replace",
                env=environment | {"PYTHONPATH": path},
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return {"error": "Timeout", "message": f"took longer than {limit_s:g} s"}
        if answer.exists():
            found: dict[str, Any] = json.loads(answer.read_text())
            return found
        said = [line for line in (done.stderr or "").splitlines() if line.strip()]
        return {"error": f"exit code {done.returncode}", "message": first_line(said[-1] if said else "it said nothing")}


@functools.cache
def _loaded(folder: str, expected: str, entry: str) -> Callable[..., Any]:
    """The entry of a kernel whose files are still those that were verified."""
    if digest(Path(folder)) != expected:
        raise PrepareFailed("the files of this kernel are no longer those that were verified")
    try:
        return getattr(load(Path(folder)), entry)
    except Exception as error:  # someone else's code
        raise PrepareFailed(f"cannot be loaded: {type(error).__name__}: {first_line(error)}") from error


def _sheet(facts: Facts) -> Sheet:
    devices = frozenset({facts.backend} if facts.backend else {"cpu", "cuda"})
    common: dict[str, Any] = {
        "dtypes": frozenset({"bf16", "fp16"}),
        "devices": devices,
        "directions": frozenset({"forward", "backward"} if facts.backward else {"forward"}),
        "packages": ("torch", REQUIREMENT),
        "kernels": {"cuda": (KERNELS[facts.repo],)} if facts.repo in KERNELS else {},
    }
    if facts.problem is not None:  # whatever the workload: the one reason is that it is not there
        return Sheet(**common | {"directions": frozenset({"forward", "backward"})}, features=frozenset())
    if facts.entry == "sageattn":
        features = frozenset({"gqa", "cross", "scale", "causal_top_left", "causal_bottom_right"})
        return Sheet(**common, features=features, max_head_dim=128, approximate=True, compute={
            "bf16": "int8", "fp16": "int8"})  # fmt: skip
    words = {"gqa", "cross"} | {word for name, word in FLASH_OPTIONS.items() if name in facts.parameters}
    words |= {"scale"} if "softmax_scale" in facts.parameters else set()
    words |= {"causal_top_left", "causal_bottom_right"} if "causal" in facts.parameters else set()
    return Sheet(**common, features=frozenset(words), max_head_dim=256, head_dim_multiple=8)


def _flash_options(w: Workload, parameters: tuple[str, ...]) -> dict[str, Any]:
    """Keyword arguments of a ``flash_attn_func``; the rest is left at the kernel's defaults."""
    options: dict[str, Any] = {"causal": True} if w.causal else {}
    if "softmax_scale" in parameters:
        options["softmax_scale"] = w.effective_scale
    if w.window is not None:
        options["window_size"] = (w.window - 1, 0 if w.causal else w.window - 1)
    if w.softcap is not None:
        options["softcap"] = w.softcap
    return options


def _sage_options(w: Workload) -> dict[str, Any]:
    return {"tensor_layout": "HND", "is_causal": w.causal is not None, "sm_scale": w.effective_scale}


def _arch_reason(archs: tuple[str, ...] | None, device: Device) -> str | None:
    """A reason where no architecture of the build runs on this card: ``9.0``, ``9.0a``, ``10.0f``, ``9.0+PTX``."""
    if not archs or device.kind != "cuda" or device.capability is None:
        return None
    if any(_runs_on(arch, device.capability) for arch in archs):
        return None
    have = ".".join(map(str, device.capability))
    return f"is built for compute capability {', '.join(archs)}, {device.name} has {have}"


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Binary code runs on its major version from its minor on, with ``a`` nowhere else; PTX on all that is newer."""
    match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch)
    if match is None:
        return True  # a spelling we do not know: the kernel itself will say
    built = (int(match[1]), int(match[2]))
    if match[3] == "a":
        return capability == built
    return (built[0] == capability[0] and built <= capability) or (match[4] is not None and built <= capability)
