"""Stage 7: why PyTorch takes an implementation, as text of at most 80 columns and as an HTML fragment for a notebook.

Reads Why, writes text. Must import neither torch nor a stage with one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from html import escape

from attnscope.reporting.words import clean
from attnscope.why_record import Considered, Reason, Why

WIDTH = 80
LABEL = 14
STYLE = (
    ".attnscope-why { font-family: system-ui, sans-serif; font-size: 13px; line-height: 1.45; } "
    ".attnscope-why table { border-collapse: collapse; margin: 4px 0; } "
    ".attnscope-why th, .attnscope-why td { padding: 2px 10px; text-align: left; vertical-align: top; border: 0; "
    "border-bottom: 1px solid #8884; background: none; } "
    ".attnscope-why .attnscope-bad { color: #d9413a; font-weight: 600; } "
    ".attnscope-why .attnscope-quiet { opacity: .72; } .attnscope-why p { margin: 3px 0; }"
)
Block = tuple[list[str], Considered]  # names that share everything, and one of them


def render_why(why: Why, *, only: str | None = None) -> str:
    """The whole answer; with ``only`` that of one implementation beside what is taken."""
    lines = _row("call", clean(why.call))
    for name, facts in why.tensors.items():
        lines += _row("", f"{name} {clean(facts)}")
    lines += _row("", ", ".join(f"{name}={value}" for name, value in why.options.items())) if why.options else []
    lines += _row("device", f"{clean(why.device)} · torch {why.torch} · {_cudnn(why)}")
    lines += _row("PyTorch takes", f"{why.taken or 'nothing: the call raises'} ({why.direction})")
    lines += _row("its order", ", ".join(why.order))
    for note in why.notes:
        lines += _row("note", clean(note))
    for sentence in why.disagreements:
        lines += _row("DISAGREEMENT", f"{clean(sentence)}. PyTorch is right; please report it")
    for names, one in _blocks([why.of(only)] if only else why.implementations):
        lines += ["", *_wrapped(f"{', '.join(names)}: {clean(one.sentence)}", "", "  ")]
        for reason in one.reasons:
            lines += _wrapped(f"- {_reason(reason)}", "  ", "    ")
            lines += _wrapped(f"remedy: {clean(reason.remedy)}", "    ", "      ") if reason.remedy else []
        for fault in one.faults:
            lines += _wrapped(f"! careful: {_reason(fault)}", "  ", "    ")
            lines += _wrapped(f"remedy: {clean(fault.remedy)}", "    ", "      ") if fault.remedy else []
    lines += ["", *_wrapped(_footnote(why), "", "")]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def why_html(why: Why) -> str:
    """The same as a fragment without scripts, whose styles touch nothing outside it."""
    head = (
        f"<p><b>PyTorch takes {escape(why.taken or 'nothing: the call raises')}</b> for <code>{escape(why.call)}</code>"
    )
    head += (
        f"<br><span class='attnscope-quiet'>{escape(f'{why.device} · torch {why.torch} · {_cudnn(why)}')}</span></p>"
    )
    notes = [f"<p class='attnscope-quiet'>{escape(clean(note))}</p>" for note in why.notes]
    notes += [
        f"<p class='attnscope-bad'>Disagreement: {escape(clean(sentence))}. PyTorch is right.</p>"
        for sentence in why.disagreements
    ]
    rows = "".join(_html_row(names, one) for names, one in _blocks(why.implementations))
    columns = "".join(f"<th>{title}</th>" for title in ("implementation", "stands", "because"))
    table = f"<table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table>"
    foot = f"<p class='attnscope-quiet'>{escape(_footnote(why))}</p>"
    return f"<div class='attnscope-why'><style>{STYLE}</style>{head}{''.join(notes)}{table}{foot}</div>"


def _html_row(names: list[str], one: Considered) -> str:
    told = [clean(one.sentence)] if not one.reasons else []
    told += [f"{_reason(r)}{f' → {clean(r.remedy)}' if r.remedy else ''}" for r in one.reasons]
    told += [f"careful: {_reason(r)}{f' → {clean(r.remedy)}' if r.remedy else ''}" for r in one.faults]
    cells = (escape(", ".join(names)), escape(one.standing), "<br>".join(map(escape, told)))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _blocks(implementations: Iterable[Considered]) -> list[Block]:
    """Implementations that stand alike, for the same reasons, together; the rungs of a ladder mostly do."""
    found: dict[object, Block] = {}
    for one in implementations:
        key = (one.standing, one.sentence, one.reasons, one.faults)
        found.setdefault(key, ([], one))[0].append(clean(one.implementation))
    return list(found.values())


def _reason(reason: Reason) -> str:
    if reason.verified is None:
        return clean(reason.sentence)
    marks = [reason.rule, *([reason.source] if reason.source else [])]
    marks += [] if reason.verified else ["unverified with this torch"]
    return f"{clean(reason.sentence)} [{', '.join(marks)}]"


def _footnote(why: Why) -> str:
    verified = {r.verified_with: None for one in why.implementations for r in one.reasons if r.verified_with}
    told = "; ".join(", ".join(releases) for releases in verified)
    held = f"Rules shown were held against torch {told}. " if told else ""
    return f"{held}PyTorch's own selection decides; reasons are attnscope's rules, not PyTorch's warnings."


def _cudnn(why: Why) -> str:
    if why.cudnn is None:
        return "no cuDNN"
    return f"cuDNN {why.cudnn}, {clean(why.cudnn_path) if why.cudnn_path else 'its file is not to be seen here'}"


def _row(label: str, text: str) -> list[str]:
    return _wrapped(text, label.ljust(LABEL), " " * LABEL)


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False) or [first]
