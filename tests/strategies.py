"""Hypothesis strategies that several test files use."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from attnscope.workload import Workload

PATTERNS = [f"{b}x{h}x{rows}x{columns}" for b in "B1" for h in "H1" for rows in "L1" for columns in "S1"]


def _maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def workloads(
    draw: st.DrawFn, *, max_length: int = 9, max_dim: int = 8, dtypes: tuple[str, ...] = ("fp32",)
) -> Workload:
    """Small workloads over every field: ragged or not, every mask, every option, empty sizes included."""
    fields: dict[str, Any] = {
        "D": draw(st.integers(1, max_dim)),
        "dtype": draw(st.sampled_from(dtypes)),
        "causal": draw(st.sampled_from([None, "top_left", "bottom_right"])),
        "window": draw(_maybe(st.integers(1, max_length + 2))),
        "softcap": draw(_maybe(st.floats(0.5, 50.0))),
        "scale": draw(_maybe(st.floats(-2.0, 2.0))),
        "alibi": draw(st.booleans()),
        "sinks": draw(st.booleans()),
        "mask": draw(_maybe(st.sampled_from(PATTERNS))),
        "dropout": draw(st.sampled_from([0.0, 0.1, 0.5])),
    }
    if draw(st.booleans()):
        fields |= {"bias": draw(st.sampled_from(["fp32", "bf16"])), "bias_shape": draw(st.sampled_from(PATTERNS))}
    kv = draw(st.integers(1, 3))
    qkv = draw(st.integers(0, 3)) == 0
    group = 1 if qkv else draw(st.integers(1, 3))
    fields |= {"H": kv * group, "H_kv": kv, "D_v": fields["D"] if qkv else draw(st.integers(1, max_dim))}
    fields["layout"] = "qkv" if qkv else draw(st.sampled_from(["bhld", "blhd"]))
    if draw(st.integers(0, 2)) == 0:
        packed = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
        return Workload(**fields, packed=packed, L=sum(packed), S=sum(packed))
    L = draw(st.integers(0, max_length))
    S = L if qkv else draw(st.integers(0, max_length))
    B = draw(st.integers(0, 3))
    if B and draw(st.booleans()):
        fields["lengths"] = tuple(draw(st.lists(st.integers(0, S), min_size=B, max_size=B)))
    return Workload(**fields, B=B, L=L, S=S)
