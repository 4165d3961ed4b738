"""What a terminal that cannot show every character gets instead. May be imported by the command line only."""

from __future__ import annotations

import codecs
import sys

PLAIN = {
    "µ": "u", "×": "x", "±": "+-", "·": "-", "–": "-", "—": "-", "…": "...", "≥": ">=", "≤": "<=", "→": "->",
    "─": "-", "│": "|", "┆": "|", "◇": "o", "²": "^2", "Σ": "sum",
}  # fmt: skip
HANDLER = "attnscope.plain"


def spell_plainly(error: UnicodeError) -> tuple[str, int]:
    """A codec error handler: characters that the encoding lacks by their likeness in ASCII, others as ``?``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(PLAIN.get(character, "?") for character in lacking), error.end


def never_fail_to_encode() -> None:
    """Let stdout and stderr write any text whatever their encoding is."""
    codecs.register_error(HANDLER, spell_plainly)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=HANDLER)
