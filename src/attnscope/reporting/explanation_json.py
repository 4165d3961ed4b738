"""Stage 7: the explanation of traces as one JSON document, what ``attnscope explain --json`` prints.

Reads Explanation, Difference and Trial, writes text. Must import neither torch nor a stage before explaining.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from attnscope.explaining.explanation import Difference, Explanation
from attnscope.explaining.trial import Trial
from attnscope.records import SCHEMA_VERSION, to_builtins


def explanations_json(
    explanations: Sequence[Explanation], difference: Difference | None = None, trial: Trial | None = None
) -> str:
    """``schema_version`` and ``traces``, each with ``window``, ``sites``, ``findings``.

    With two also ``changes``; with ``--try`` also ``trial``.
    """
    document: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "traces": [to_builtins(explanation) for explanation in explanations],
    }
    if difference is not None:
        document |= {
            "changes": [to_builtins(change) | {"ratio": change.ratio} for change in difference.changes],
            "findings_gone": list(difference.gone),
            "findings_new": list(difference.new),
        }
    if trial is not None:
        document["trial"] = to_builtins(trial)
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
