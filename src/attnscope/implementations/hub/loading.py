"""Stage 2: load a kernel through the ``kernels`` library, and find in it what computes attention.

Must not import torch or ``kernels`` at import.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ENTRIES = ("flash_attn_func", "sageattn")
TINY = (1, 16, 16, 64)  # B, L, H, D (for sageattn: B, H, L, D) of the call that shows whether it runs at all


def load(folder: Path) -> ModuleType:
    """The kernel's module, through the library; byte code that lies beside it is neither read nor written."""
    import kernels
    import torch  # noqa: F401  with its own byte code: compiling it anew takes many seconds

    with _own_byte_code():
        return kernels.get_local_kernel(folder)


def build_folder(module: ModuleType) -> Path:
    """The build's folder of a loaded kernel: the nearest that holds ``metadata.json``."""
    file = module.__file__
    assert file is not None
    return next(parent for parent in Path(file).parents if (parent / "metadata.json").exists())


def entry_of(module: ModuleType) -> tuple[str, Callable[..., Any]]:
    """(name, function) of the attention that a kernel offers. Raises AttributeError where it offers none we know."""
    for name in ENTRIES:
        if callable(function := getattr(module, name, None)):
            return name, function
    offers = ", ".join(sorted(name for name in vars(module) if not name.startswith("_"))[:12])
    raise AttributeError(f"has neither {' nor '.join(ENTRIES)}; it offers: {offers or 'nothing'}")


def out_of(result: Any) -> Any:
    """The output of an entry: some return it alone, some with the lse behind it."""
    return result[0] if isinstance(result, tuple | list) else result


def has_gradients(function: Callable[..., Any], backend: str) -> bool:
    """Call it on a tiny problem and back. What the forward raises is the answer; a backward that raises is none."""
    import torch

    q, k, v = (torch.randn(TINY, dtype=torch.bfloat16, device=backend).requires_grad_() for _ in range(3))
    out = out_of(function(q, k, v))
    if not isinstance(out, torch.Tensor) or tuple(out.shape) != TINY:
        raise TypeError(f"must return a tensor of shape {TINY}, got {getattr(out, 'shape', type(out).__name__)}")
    try:
        torch.autograd.grad(out.float().sum(), (q, k, v))
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


@contextlib.contextmanager
def _own_byte_code() -> Iterator[None]:
    before = sys.pycache_prefix, sys.dont_write_bytecode
    with tempfile.TemporaryDirectory(prefix="attnscope-hub-") as empty:
        sys.pycache_prefix, sys.dont_write_bytecode = empty, True
        try:
            yield
        finally:
            sys.pycache_prefix, sys.dont_write_bytecode = before
