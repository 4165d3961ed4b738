"""Stage 2: a library that may be missing or broken: found without importing it, imported when it is to run.

Writes modules and, where there are none, sentences. Must not import an implementation or a later stage, nor torch or
any such library at import. ``attnscope.implementation.missing_package`` says why a library that is not installed cannot
run; an installed one that does not import, or lacks what is called, is one PrepareFailed with the first line of why.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from attnscope.device import Device
from attnscope.errors import PrepareFailed, first_line
from attnscope.implementation import Implementation, Prepared
from attnscope.inputs import make_inputs
from attnscope.workload import Workload

LOG_LINES = 8


@dataclass(frozen=True)
class Library:
    """A package of a registry, the module of it that is called, and the functions that must be there."""

    package: str
    module: str
    functions: tuple[str, ...]
    hidden: str | None = None  # a top-level module that must not be seen while this one is imported

    @property
    def requirement(self) -> str:
        """As a sheet's ``packages`` spells it."""
        return f"{self.package} as {self.module}"

    def version(self) -> str | None:
        """The installed version; None where no package of that name is installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def load(self, implementation: str) -> ModuleType:
        """The module, imported now if it was not before; what importing it prints goes to stderr.

        Raises:
            PrepareFailed: it does not import, or lacks one of ``functions``; the first line says why.
        """
        installed = f"{implementation}: package {self.package} {self.version() or 'of no known version'} is installed"
        try:
            with (
                warnings.catch_warnings(),
                contextlib.redirect_stdout(sys.stderr),
                _hidden(self.hidden) if self.hidden else contextlib.nullcontext(),
            ):
                warnings.simplefilter("ignore")  # advice to those who wrote the library
                module = importlib.import_module(self.module)
        except (Exception, SystemExit) as error:  # someone else's code, which may do anything when it is imported
            log = traceback.format_exception(error)[-LOG_LINES:]
            raise PrepareFailed(f"{installed} but does not import: {first_line(error)}", "".join(log)) from error
        lacking = [name for name in self.functions if not hasattr(module, name)]
        if lacking:
            raise PrepareFailed(f"{installed}, but {self.module} has no {', '.join(lacking)}")
        return module


def compile_by_running(implementation: Implementation, prepared: Prepared, workload: Workload, device: Device) -> None:
    """Both directions once on random inputs, where they run: for libraries that compile at their first call."""
    inputs = make_inputs(workload, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a compiler's advice is for those who wrote the library
        prepared.forward(inputs)
        if not implementation.reasons_unsupported(workload, device, "backward"):
            prepared.backward(inputs, prepared.forward(inputs, save=True).saved)


def root_cause(error: BaseException) -> BaseException:
    """What was raised first of all, which says more than what was made of it."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


@contextlib.contextmanager
def _hidden(name: str) -> Iterator[None]:
    """``find_spec(name)`` finds nothing inside; what was imported of it before is as it was afterwards."""
    inside = {key: sys.modules.pop(key) for key in list(sys.modules) if key == name or key.startswith(f"{name}.")}
    sys.modules[name] = None  # type: ignore[assignment]  # Python's own sign for a module that is not to be found
    try:
        yield
    finally:
        del sys.modules[name]
        sys.modules.update(inside)
