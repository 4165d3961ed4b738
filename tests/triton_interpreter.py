"""Triton's interpreter for tests of triton_fused: whether it is on, and less of the time it takes."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest

from attnscope.implementations.triton_fused import interpreting

needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not interpreting(),
    reason="needs triton and TRITON_INTERPRET=1 from the start, as make test sets it",
)


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
