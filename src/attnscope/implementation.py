"""Stage 2: the contract that every way to compute attention fulfils, its sheet, its reasons, and the registry.

Reads a Workload and a Device, writes what ``prepare`` returned. Imports neither torch nor a later stage at import time,
so that ``attnscope list`` works without torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import pathlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attnscope.device import Device
from attnscope.errors import AttnscopeError, UnknownImplementation, UnsupportedWorkload, UsageError
from attnscope.workload import DIRECTIONS, Workload

if TYPE_CHECKING:
    from attnscope.inputs import Inputs

FEATURES = (
    "gqa", "cross", "unequal_head_dims", "causal_top_left", "causal_bottom_right", "window", "softcap", "scale",
    "alibi", "sinks", "mask", "bias", "lengths", "packed", "dropout",
)  # fmt: skip

# What an implementation may round to the inputs' dtype besides P, dS and its results: each step of its scores; the bias
# or ALiBi that it adds to them; gradients, each time a tile is added.
ROUNDINGS = ("scores", "bias", "sums")

FEATURE_SENTENCES = {
    "gqa": "grouped-query heads (H != H_kv)",
    "cross": "a query length that differs from the key length",
    "unequal_head_dims": "a value head dim that differs from the query's",
    "causal_top_left": "a causal mask aligned to the top left",
    "causal_bottom_right": "a causal mask aligned to the bottom right",
    "window": "a sliding window",
    "softcap": "a softcap",
    "scale": "a scale of its own",
    "alibi": "ALiBi",
    "sinks": "attention sinks",
    "mask": "a bool mask",
    "bias": "an additive bias",
    "lengths": "key lengths",
    "packed": "packed sequences",
    "dropout": "a given dropout mask",
}
NO_GRADIENT = {"bias": "gives no gradient for the bias"}  # the reason of a feature that ``forward_only`` names


@dataclass(frozen=True)
class Sheet:
    """What an implementation claims. Every claim is tested; a sheet that lies fails the suite.

    ``compute`` is the precision of scores and sums by input dtype, where it is not fp32: ``fp64``, ``tf32``, ``bf16``,
    ``fp16``, ``int8``. ``features`` are words of :data:`FEATURES`. ``kernels`` maps a device kind to regular
    expressions: each must match a kernel (on a CPU: an op) that really ran, or the row fails as not what it claims to
    be; ``kernels_absent`` maps it to expressions that must match none.
    ``rounds`` maps a device kind to words of :data:`ROUNDINGS`: where such an implementation errs more than a good
    kernel does, it is graded ``loose``. That ``compute`` is bf16 or fp16 implies ``scores``.
    ``coarse_tanh`` says that its softcap takes the card's approximate tanh (``tanh.approx``, off by up to 2**-11),
    which is as coarse as rounding scores: with a softcap it may err as much. ``forward_only`` are features that have
    no backward: their reason then is of the backward alone. ``compiled`` says that ``prepare`` runs torch.compile,
    ``traceable`` that a caller's own ``torch.compile(fullgraph=True)`` may run through a forward, ``cuda_graph`` that a
    forward can be captured.
    ``draws_dropout`` says that it drops with the workload's probability by random numbers of its own, from torch's
    generator; the feature ``dropout`` is that it follows the given mask.
    ``min_head_dim`` maps a device kind to the least head dim there.
    ``min_capability`` is the least compute capability; ``below_capability``, for what uses instructions of one
    architecture alone, the first that lacks them.
    ``kept_on_disk`` says that what it compiles is kept on disk by its compiler, so that another process need not.
    ``by_name`` are device kinds on which preparing it takes so long that ``all`` leaves it out: named, it runs.
    ``comparable`` is False where the work is not the workload's (say, a layout change left out on purpose).
    """

    dtypes: frozenset[str]
    features: frozenset[str]
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    directions: frozenset[str] = frozenset(DIRECTIONS)
    compute: Mapping[str, str] = field(default_factory=dict)
    layouts: frozenset[str] = frozenset({"bhld", "blhd", "qkv"})
    min_head_dim: Mapping[str, int] = field(default_factory=dict)
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    head_dim_choices: tuple[int, ...] = ()
    min_capability: tuple[int, int] | None = None
    below_capability: tuple[int, int] | None = None
    packages: tuple[str, ...] = ("torch",)
    rounds: Mapping[str, frozenset[str]] = field(default_factory=dict)
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kernels_absent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    coarse_tanh: bool = False
    forward_only: frozenset[str] = frozenset()
    draws_dropout: bool = False
    compiled: bool = False
    kept_on_disk: bool = False
    traceable: bool = False
    lse: bool = False
    deterministic: bool = False
    materialises_scores: bool = False
    cuda_graph: bool = True
    approximate: bool = False
    by_name: frozenset[str] = frozenset()
    comparable: bool = True
    ours: bool = False

    def __post_init__(self) -> None:
        unknown = (self.features | self.forward_only) - set(FEATURES)
        if unknown:
            raise UsageError(
                f"a sheet's features must be among {', '.join(FEATURES)}, got {', '.join(sorted(unknown))}"
            )
        unknown = frozenset().union(*self.rounds.values()) - set(ROUNDINGS)
        if unknown:
            raise UsageError(f"a sheet's rounds must be among {', '.join(ROUNDINGS)}, got {', '.join(sorted(unknown))}")

    def compute_precision(self, dtype: str) -> str:
        """Precision of scores and sums for inputs of ``dtype``."""
        return self.compute.get(dtype, "fp64" if dtype == "fp64" else "fp32")

    def rounded_too(self, workload: Workload, device: Device) -> frozenset[str]:
        """Words of :data:`ROUNDINGS` that apply to ``workload`` on ``device``."""
        coarse = self.coarse_tanh and workload.softcap is not None
        scores = {"scores"} if coarse or self.compute_precision(workload.dtype) in ("bf16", "fp16") else set()
        return self.rounds.get(device.kind, frozenset()) | scores

    def head_dims(self) -> str:
        """``up to 256, multiples of 8``, ``from 16 on (cuda)``, in words."""
        if self.head_dim_choices:
            return ", ".join(map(str, self.head_dim_choices))
        multiples = f"multiples of {self.head_dim_multiple}" if self.head_dim_multiple > 1 else ""
        most = f"up to {self.max_head_dim}" if self.max_head_dim is not None else ""
        least = [f"from {size} on ({kind})" for kind, size in sorted(self.min_head_dim.items())]
        return ", ".join(part for part in (*least, most, multiples) if part) or "any"

    def hardware(self) -> str:
        """``cuda from compute capability 9.0 to below 10.0``, in words."""
        devices = ", ".join(sorted(self.devices))
        if self.min_capability is None:
            return devices
        least, below = (".".join(map(str, c)) for c in (self.min_capability, self.below_capability or ()))
        return f"{devices} from compute capability {least} " + (f"to below {below}" if below else "on")

    def feature(self, word: str) -> str:
        """``yes``; ``forward`` where there is no backward with it; ``drawn`` for dropout of its own; else empty.

        ``word`` is one of :data:`FEATURES`, or ``bias_gradient``.
        """
        if word == "bias_gradient":
            return "yes" if "bias" in self.features - self.forward_only and "backward" in self.directions else ""
        if word == "dropout" and self.draws_dropout:
            return "drawn"
        if word not in self.features:
            return ""
        return "forward" if word in self.forward_only else "yes"

    def torch_compile(self) -> str:
        """``compiled`` where it compiles itself, ``traceable`` where a caller may, else empty: not promised."""
        return "compiled" if self.compiled else "traceable" if self.traceable else ""

    def reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """Every reason, one sentence each, that follows from the sheet alone."""
        found = [reason for reason in map(missing_package, self.packages) if reason]
        found += self.device_reasons(device)
        if direction not in self.directions:
            found.append(f"has no {direction}")
        if workload.dtype not in self.dtypes:
            found.append(f"takes {_either(self.dtypes)}, not {workload.dtype}")
        if workload.layout not in self.layouts:
            found.append(f"takes layout {_either(self.layouts)}, not {workload.layout}")
        found += [
            f"does not support {FEATURE_SENTENCES[word]}"
            for word in FEATURES
            if word in workload.features - self.features - ({"dropout"} if self.draws_dropout else set())
        ]
        found += [
            NO_GRADIENT.get(word, f"has no backward with {FEATURE_SENTENCES[word]}")
            for word in FEATURES
            if direction == "backward" and word in workload.features & self.forward_only
        ]
        return found + self._head_dim_reasons(workload, self.min_head_dim.get(device.kind, 0))

    def device_reasons(self, device: Device) -> list[str]:
        """Reasons that hold on ``device`` for every workload."""
        if device.kind not in self.devices:
            return [f"runs on {_either(self.devices)}, not on {device.kind}"]
        if device.kind != "cuda" or self.min_capability is None or device.capability is None:
            return []
        need, have = (".".join(map(str, c)) for c in (self.min_capability, device.capability))
        if device.capability < self.min_capability:
            return [f"needs compute capability {need} or newer, {device.name} has {have}"]
        if self.below_capability is not None and device.capability >= self.below_capability:
            return [f"is built for compute capability {need}, {device.name} has {have}"]
        return []

    def _head_dim_reasons(self, w: Workload, least: int) -> list[str]:
        found = []
        for name, size in (("D", w.D), ("D_v", w.D_v)) if w.D != w.D_v else (("D", w.D),):
            if self.head_dim_choices and size not in self.head_dim_choices:
                found.append(f"takes {name} of {', '.join(map(str, self.head_dim_choices))}, not {size}")
            if size < least:
                found.append(f"takes {name} from {least} on, not {size}")
            if self.max_head_dim is not None and size > self.max_head_dim:
                found.append(f"takes {name} up to {self.max_head_dim}, not {size}")
            if size % self.head_dim_multiple:
                found.append(f"needs {name} to be a multiple of {self.head_dim_multiple}, not {size}")
        return found


@dataclass
class Output:
    """What a forward returns: ``out (B, H, L, D_v)``, ``lse (B, H, L)`` float32 or None, and what backward needs."""

    out: Any
    lse: Any = None
    saved: Any = None


@dataclass
class Gradients:
    """What a backward returns, in the inputs' shapes: dq, dk, dv, and dbias, dsinks where the workload has them."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None

    def tensors(self) -> dict[str, Any]:
        """The gradients that are there, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Prepared(Protocol):
    """An implementation made ready for one workload on one device: exactly what is timed.

    One that holds scratch memory between calls may say how much in ``workspace_bytes``: a number, or one by direction.
    One with something to say of its times has a method ``remarks`` that returns sentences. Both go on record.
    """

    def forward(self, inputs: Inputs, *, save: bool = False) -> Output:
        """Compute attention; with ``save``, also keep what ``backward`` needs in ``Output.saved``."""

    def backward(self, inputs: Inputs, saved: Any) -> Gradients:
        """Gradients of ``sum(out * inputs.grad_out)``; may be called several times for one ``saved``."""


@runtime_checkable
class Implementation(Protocol):
    """One way to compute attention.

    ``reasons_unsupported`` is cheap, never compiles, never raises. ``prepare`` compiles, plans, tunes and allocates;
    layout conversions and casts belong into what it returns.
    """

    name: str
    summary: str
    sheet: Sheet

    def reasons_unsupported(self, workload: Workload, device: Device, direction: str = "forward") -> list[str]:
        """Why this workload cannot run on this device in this direction; empty where it can."""

    def prepare(self, workload: Workload, device: Device) -> Prepared:
        """Make ready. Raises PrepareFailed with the log's last lines."""


class SheetImplementation:
    """Base for most implementations: reasons follow from the sheet; override ``more_reasons`` for the rest."""

    name: str
    summary: str
    sheet: Sheet

    def reasons_unsupported(self, workload: Workload, device: Device, direction: str = "forward") -> list[str]:
        """The sheet's reasons, then this implementation's own."""
        found = self.sheet.reasons(workload, device, direction)
        return found + self.more_reasons(workload, device, direction)

    def more_reasons(self, workload: Workload, device: Device, direction: str) -> list[str]:
        """Reasons that no sheet can express; must not raise."""
        del workload, device, direction
        return []


def missing_package(requirement: str) -> str | None:
    """A reason where a package is not installed or too old, else None. Never imports it.

    ``requirement`` is ``name``, ``name>=version``, or either followed by `` as module.path``, where the module is not
    called like the package.
    """
    spelled, _, module = requirement.partition(" as ")
    name, _, least = spelled.partition(">=")
    try:
        version = _installed_version(name)
    except importlib.metadata.PackageNotFoundError:
        if not least and module_is_there(module or name.replace("-", "_")):
            return None
        return f"package {name} is not installed (pip install {name})"
    if least and _version_key(version) < _version_key(least):
        return f"needs {name} {least} or newer, {version} is installed"
    return None


@functools.cache
def _installed_version(name: str) -> str:
    """The version that is installed; asked hundreds of times, and each time a file would be read and parsed."""
    return importlib.metadata.version(name)


def module_is_there(name: str) -> bool:
    """Whether ``package.module`` could be imported as far as its files tell; imports not even the package."""
    if name in sys.modules:
        return sys.modules[name] is not None
    top, *inner = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not inner:
        return spec is not None
    path = pathlib.PurePath(*inner)
    places = [pathlib.Path(place) / path for place in spec.submodule_search_locations or ()]
    return any(place.is_dir() or any(place.parent.glob(f"{place.name}.*")) for place in places)


def _version_key(version: str) -> tuple[int, ...]:
    release = re.match(r"[0-9.]+", version)
    return tuple(int(part) for part in (release.group() if release else "0").strip(".").split("."))


def _either(words: frozenset[str]) -> str:
    return " or ".join(sorted(words)) or "nothing"


# --- registry ---------------------------------------------------------------------------------------------------------

MAX_NAME = 100
_registered: dict[str, Implementation | str] = {}


def register(implementation: Implementation | str) -> None:
    """Add an implementation of your own: an object that fulfils the contract, or ``"module:Class"``.

    A ``"module:Class"`` (or an object whose class can be imported) is checked in a child process like any other; an
    object of a class defined in ``__main__`` or a notebook runs in this process and its row says so.

    Raises:
        UsageError: it lacks a part of the contract, or its name is taken by another.
    """
    found = load_reference(implementation) if isinstance(implementation, str) else implementation
    lacking = [
        part for part in ("name", "summary", "sheet", "reasons_unsupported", "prepare") if not hasattr(found, part)
    ]
    if lacking:
        raise UsageError(
            f"an implementation must have {', '.join(lacking)}, {found!r} has not\nhint: see CONTRIBUTING.md"
        )
    _check_name(found.name)
    if not isinstance(found.sheet, Sheet):
        raise UsageError(f"the sheet of {found.name} must be an attnscope Sheet, got {found.sheet!r}")
    _registered[found.name] = implementation if isinstance(implementation, str) else found


def _open_hub_kernel(text: str) -> str:
    """Open a kernel of the hub and register it; its name. Raises UsageError."""
    from attnscope.implementations.hub import HubKernel, open_kernel
    from attnscope.implementations.hub.trust import parse_spec

    _check_name(parse_spec(text).name)  # before any of its code runs
    found = open_kernel(text)
    other = _registered.get(found.name)
    if isinstance(other, HubKernel) and other.facts.folder != found.facts.folder:
        raise UsageError(
            f"two folders would be called {found.name}\nhint: spell them from where both differ: hub:./a/x"
        )
    register(found)
    return found.name


def _check_name(name: object) -> None:
    fits = isinstance(name, str) and len(name) <= MAX_NAME and ".." not in name
    if not fits or not re.fullmatch(r"[A-Za-z0-9_.:@/-]+", str(name)):
        raise UsageError(
            f"an implementation's name must be at most {MAX_NAME} letters, digits and _.:@/- without '..', "
            f"got {name!r:.120}"
        )
    if name in builtin_references() or name in ("all", "ladder"):
        raise UsageError(f"the name {name!r} is taken by attnscope\nhint: choose another")


def builtin_references() -> dict[str, str]:
    """Name -> ``"module:Class"`` of every implementation that comes with attnscope, in listing order."""
    from attnscope.implementations import IMPLEMENTATIONS

    return dict(IMPLEMENTATIONS)


def names(selection: str = "all") -> list[str]:
    """Names in listing order. ``all`` is the registry without the ladder, ``ladder`` the ladder alone."""
    ladder = [name for name, reference in builtin_references().items() if ".cuda_ladder" in reference]
    if selection == "ladder":
        return ladder
    return [name for name in (*builtin_references(), *_registered) if name not in ladder]


def select(selection: str) -> list[str]:
    """The names of ``select_named``."""
    return select_named(selection)[0]


def select_named(selection: str) -> tuple[list[str], frozenset[str]]:
    """Names that a comma-separated selection stands for, and which of them it holds by name, not in a group.

    Parts are names, ``all``, ``ladder``, ``module:Class`` or ``hub:...``.

    Raises:
        UnknownImplementation: a name is not registered.
        UsageError: a kernel of the hub is not pinned, not trusted, or not what it was.
    """
    found: dict[str, None] = {}
    named = set()
    for part in (piece.strip() for piece in selection.split(",")):
        if part in ("all", "ladder"):
            if not names(part):
                raise UsageError(f"there is no implementation in {part!r} here\nhint: attnscope list")
            found.update(dict.fromkeys(names(part)))
            continue
        if part in builtin_references() or part in _registered:
            name = part
        elif part.startswith("hub:"):
            name = _open_hub_kernel(part)
        elif re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", part):
            register(part)
            name = load_reference(part).name
        else:
            raise UnknownImplementation(part, [*builtin_references(), *_registered, "all", "ladder"])
        found[name] = None
        named.add(name)
    return list(found), frozenset(named)


def reference_of(name: str) -> str | None:
    """``"module:Class"`` by which another process finds this implementation; None where it cannot."""
    if name in builtin_references():
        return builtin_references()[name]
    entry = _registered.get(name)
    if isinstance(entry, str):
        return entry
    if isinstance(own := getattr(entry, "reference", None), str):
        return own
    module = type(entry).__module__
    spec = f"{module}:{type(entry).__qualname__}"
    return None if module in ("__main__", "__mp_main__") or "<locals>" in spec or not _loads(spec, name) else spec


def find(name: str) -> Implementation:
    """The implementation of that name. Raises UnknownImplementation with a did-you-mean."""
    builtin = builtin_references()
    if name in builtin:
        return load_reference(builtin[name])
    if name not in _registered and name.startswith("hub:"):
        name = _open_hub_kernel(name)
    if name not in _registered:
        raise UnknownImplementation(name, [*builtin, *_registered])
    entry = _registered[name]
    return load_reference(entry) if isinstance(entry, str) else entry


def load_reference(reference: str) -> Implementation:
    """The implementation that ``"module:Class"`` names, constructed without arguments; or a kernel of the hub.

    Raises:
        UsageError: the module does not import or has no such class.
    """
    if reference.startswith("hub:"):
        from attnscope.implementations.hub import reopen

        return reopen(reference)
    module_name, _, attribute = reference.partition(":")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # results alone belong on stdout
            made = getattr(importlib.import_module(module_name), attribute)
            return made() if isinstance(made, type) else made
    except (Exception, SystemExit) as error:  # someone else's code, which may do anything when it is imported
        raise UsageError(
            f"implementation {reference!r} cannot be loaded: {type(error).__name__}: {error}\n"
            "hint: module:Class, where the module imports and the class is constructed without arguments"
        ) from error


def require_supported(name: str, workload: Workload, device: Device, direction: str) -> Implementation:
    """The implementation, or UnsupportedWorkload with every reason."""
    implementation = find(name)
    if reasons := implementation.reasons_unsupported(workload, device, direction):
        raise UnsupportedWorkload(name, reasons)
    return implementation


def safe_reasons(implementation: Implementation, workload: Workload, device: Device, direction: str) -> list[str]:
    """``reasons_unsupported`` of an implementation that may break the contract by raising."""
    try:
        reasons = implementation.reasons_unsupported(workload, device, direction)
        if isinstance(reasons, str) or not all(isinstance(reason, str) for reason in reasons):
            return [f"reasons_unsupported must return a list of sentences, got {reasons!r:.120}"]
        return list(reasons)
    except AttnscopeError as error:
        return [str(error)]
    except Exception as error:  # someone else's code; its fault is its reason
        return [f"reasons_unsupported raised {type(error).__name__}: {error}"]


def _loads(reference: str, name: str) -> bool:
    try:
        return load_reference(reference).name == name
    except Exception:
        return False
