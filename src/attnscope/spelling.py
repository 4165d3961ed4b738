"""Stage 1: how a workload is spelled on the command line, in Python and in records.

``B8,H32/8,L1024,S2048,D64,Dv128,bf16,causal=bottom_right,window=512,softcap=30,scale=0.1,alibi,sinks,mask=bool,
bias=bf16:1xHxLxS,lengths=7/5/0,packed=300/212/0/512,dropout=0.1,layout=blhd``. Reads text, writes the fields of a
Workload, which alone knows whether they fit together. Must not import torch or a later stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attnscope.errors import UnknownName, WorkloadError
from attnscope.units import DTYPE_BYTES

if TYPE_CHECKING:
    from attnscope.workload import Workload

_SIZE = re.compile(r"(B|H|L|S|Dv|D)([0-9]{1,4000})(?:/([0-9]{1,4000}))?")  # int() takes no more digits than that
_WORDS = (
    "causal",
    "window",
    "softcap",
    "scale",
    "alibi",
    "sinks",
    "mask",
    "bias",
    "lengths",
    "packed",
    "dropout",
    "layout",
)


def parse_fields(text: str) -> dict[str, object]:
    """The fields of Workload that ``text`` names. Raises WorkloadError with what was wrong and a hint."""
    fields: dict[str, object] = {}
    for token in (part.strip() for part in text.split(",")):
        if not token:
            raise WorkloadError(f"workload has an empty part: {text!r}\nhint: parts are separated by single commas")
        for name, value in _parse_token(token, text):
            if name in fields:
                raise WorkloadError(f"workload names {name} twice: {text!r}\nhint: drop one of them")
            fields[name] = value
    if isinstance(fields.get("packed"), tuple):
        total = sum(fields["packed"])  # type: ignore[call-overload]
        fields = {"B": 1, "L": total, "S": total} | fields
    if "lengths" in fields and "B" not in fields:
        fields["B"] = len(fields["lengths"])  # type: ignore[arg-type]
    for name in ("H", "L", "D"):
        if name not in fields:
            raise WorkloadError(f"workload must name {name}, got {text!r}\nhint: e.g. B8,H16,L1024,D64,bf16,causal")
    return fields


def _parse_token(token: str, text: str) -> Iterator[tuple[str, object]]:
    if size := _SIZE.fullmatch(token):
        letter, number, kv = size.groups()
        if kv is not None and letter != "H":
            raise WorkloadError(f"only H takes a second number, got {token!r}\nhint: e.g. H32/8 for grouped heads")
        yield ("D_v" if letter == "Dv" else letter), int(number)
        if kv is not None:
            yield "H_kv", int(kv)
        return
    if token in DTYPE_BYTES:
        yield "dtype", token
        return
    word, _, value = token.partition("=")
    if word not in _WORDS:
        raise WorkloadError(
            str(UnknownName("workload field", token, (*_WORDS, *DTYPE_BYTES, "B8", "H16", "L1024", "D64")))
        )
    yield from _parse_word(word, value, token)


def _parse_word(word: str, value: str, token: str) -> Iterator[tuple[str, object]]:
    bare = {"causal": "top_left", "alibi": True, "sinks": True, "mask": "Bx1xLxS"}
    if not value:
        if word not in bare or "=" in token:
            raise WorkloadError(f"{word} needs a value, got {token!r}\nhint: e.g. {EXAMPLES[word]}")
        yield word, bare[word]
    elif word in ("alibi", "sinks"):
        raise WorkloadError(f"{word} takes no value, got {token!r}\nhint: write {word} alone")
    elif word == "bias":
        dtype, _, shape = value.partition(":")
        yield "bias", dtype
        yield "bias_shape", shape or "1xHxLxS"
    elif word == "mask":
        kind, _, shape = value.partition(":")
        if kind != "bool":
            raise WorkloadError(f"mask must be bool (a float mask is a bias), got {token!r}\nhint: bias=bf16:1xHxLxS")
        yield "mask", shape or "Bx1xLxS"
    else:
        yield word, _convert(word, value, token)


EXAMPLES = {
    "window": "window=512", "softcap": "softcap=30", "scale": "scale=0.1", "bias": "bias=bf16:1xHxLxS",
    "lengths": "lengths=7/5/0", "packed": "packed=300/212/512", "dropout": "dropout=0.1", "layout": "layout=blhd",
    "mask": "mask=bool", "causal": "causal=bottom_right", "alibi": "alibi", "sinks": "sinks",
}  # fmt: skip


def _convert(word: str, value: str, token: str) -> object:
    try:
        if word == "window":
            return int(value)
        if word in ("softcap", "scale", "dropout"):
            return float(value)
        if word in ("lengths", "packed"):
            return tuple(int(part) for part in value.split("/"))
    except ValueError:
        raise WorkloadError(f"{token!r} does not read as a value of {word}\nhint: e.g. {EXAMPLES[word]}") from None
    return value


def spell(workload: Workload) -> str:
    """The canonical spelling of a workload."""
    return ",".join(_parts(workload))


def _parts(w: Workload) -> Iterator[str]:
    yield f"B{w.B}"
    yield f"H{w.H}" + (f"/{w.H_kv}" if w.H_kv != w.H else "")
    yield f"L{w.L}"
    if w.S != w.L:
        yield f"S{w.S}"
    yield f"D{w.D}"
    if w.D_v != w.D:
        yield f"Dv{w.D_v}"
    yield w.dtype
    if w.causal:
        yield "causal" if w.causal == "top_left" else f"causal={w.causal}"
    for name in ("window", "softcap", "scale"):
        if getattr(w, name) is not None:
            yield f"{name}={getattr(w, name)!r}"
    yield from (name for name in ("alibi", "sinks") if getattr(w, name))
    if w.mask:
        yield "mask=bool" if w.mask == "Bx1xLxS" else f"mask=bool:{w.mask}"
    if w.bias:
        yield f"bias={w.bias}:{w.bias_shape}"
    for name in ("lengths", "packed"):
        if getattr(w, name) is not None:
            yield f"{name}={'/'.join(map(str, getattr(w, name)))}"
    if w.dropout:
        yield f"dropout={w.dropout!r}"
    if w.layout != "bhld":
        yield f"layout={w.layout}"
