"""Triton's interpreter for tests: whether it is on, less of the time it takes, kernels with a fault planted."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attnscope.implementations.triton_fused import interpreting

needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not interpreting(),
    reason="needs triton and TRITON_INTERPRET=1 from the start, as make test sets it",
)


def mutated(original: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """A module of its own with a text of the original's source replaced; the caller removes it from sys.modules."""
    assert original.__file__ is not None
    source = Path(original.__file__).read_text()
    assert old in source, f"the kernels hold no {old!r} any more"
    path = folder / f"mutant_{original.__name__.rpartition('.')[2]}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quicken() -> None:
    """Leaves out what Triton 3.7's interpreter does over and over, which is most of its time.

    A call of a device function patches triton.language anew, though the kernel's launch has done it and what the
    standard library's own patch leaves stays; whole numbers are also computed in 64 bits to find an overflow.
    """
    from triton.runtime import interpreter

    patched: set[int] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = self.fn.__globals__
        if "tl" not in known and id(known) not in patched:  # the standard library's own modules
            patched.add(id(known))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
