"""Stage 2: the record of ``attnscope why``: what PyTorch takes for one call, and what stands against the others.

Everyone later may read it; imports neither torch nor a stage. Missing is None.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnscope.errors import UnknownImplementation

STANDINGS = ("taken", "could run", "refused")


@dataclass(frozen=True)
class Reason:
    """One reason against an implementation, and what to change.

    ``rule`` is its stable id (``sheet`` where it follows from an implementation's own sheet). ``verified_with`` names
    the torch releases with which the rule was held against torch itself (empty: none); ``verified`` says whether the
    torch of this call is one of them, and is null where torch has no say. ``remedy`` is null where none is known.
    """

    rule: str
    sentence: str
    remedy: str | None = None
    verified_with: tuple[str, ...] = ()
    verified: bool | None = None
    source: str | None = None


@dataclass(frozen=True)
class Considered:
    """One implementation and how it stands to the call.

    ``standing`` is ``taken`` (PyTorch takes it), ``could run`` (nothing speaks against it) or ``refused``. ``reasons``
    are all that keep it from running; ``faults`` are what is known to go wrong where it runs all the same.
    ``torch_accepts`` is PyTorch's own answer, null where it cannot be asked; ``sentence`` says the standing in words.
    """

    implementation: str
    standing: str
    sentence: str
    reasons: tuple[Reason, ...] = ()
    faults: tuple[Reason, ...] = ()
    torch_accepts: bool | None = None


@dataclass(frozen=True)
class Why:
    """Which implementation PyTorch's SDPA takes for one call, and all reasons against every other one.

    ``taken`` is null where PyTorch takes none and raises. ``order`` is the order in which PyTorch asks.
    ``disagreements`` tell where our rules and PyTorch's own selection differ; PyTorch's is the truth. ``cudnn_path`` is
    the shared library mapped into this process, with ``~`` for the home folder.
    """

    call: str
    tensors: dict[str, str]
    options: dict[str, str]
    device: str
    direction: str
    torch: str
    taken: str | None
    order: tuple[str, ...]
    cudnn: str | None = None
    cudnn_path: str | None = None
    notes: tuple[str, ...] = ()
    disagreements: tuple[str, ...] = ()
    implementations: tuple[Considered, ...] = ()

    def of(self, implementation: str) -> Considered:
        """How ``implementation`` stands to this call. Raises UnknownImplementation with a did-you-mean."""
        for considered in self.implementations:
            if considered.implementation == implementation:
                return considered
        raise UnknownImplementation(implementation, [one.implementation for one in self.implementations])

    def _repr_html_(self) -> str:
        from attnscope.reporting.why_views import why_html

        return why_html(self)

    def __str__(self) -> str:
        from attnscope.reporting.why_views import render_why

        return render_why(self)
