"""attnscope: which attention is running, is it right, how close is it to the card's limit, what should run instead.

The public names, loaded when first used (PEP 562), so that importing attnscope imports neither torch nor a stage.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Workload": "attnscope.workload",
    "register": "attnscope.implementation",
    "compare": "attnscope.comparing",
    "check": "attnscope.comparing",
    "measure": "attnscope.comparing",
    "profile": "attnscope.comparing",
    "read_runs": "attnscope.records",
    "watch": "attnscope.watching",
    "why": "attnscope.selecting",
}
__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from attnscope.comparing import check, compare, measure, profile  # noqa: F401
    from attnscope.implementation import register  # noqa: F401
    from attnscope.records import read_runs  # noqa: F401
    from attnscope.selecting import why  # noqa: F401
    from attnscope.watching import watch  # noqa: F401
    from attnscope.workload import Workload  # noqa: F401


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'attnscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
