"""Hypothesis strategies that several test files use."""

from __future__ import annotations

from hypothesis import strategies as st

from attnscope.random_workloads import Space, draw_workload
from attnscope.workload import Workload


def workloads(
    *, max_length: int = 9, max_dim: int = 8, dtypes: tuple[str, ...] = ("fp32",)
) -> st.SearchStrategy[Workload]:
    """Small workloads over every field: ragged or not, every mask, every option, empty sizes included."""
    space = Space(
        lengths=tuple(range(max_length + 1)),
        longest=max_length,
        dims=tuple(range(1, max_dim + 1)),
        dtypes=dtypes,
        bias_dtypes=("fp32", "bf16"),
        heads=(1, 2, 3),
        groups=(2, 3),
        batches=(0, 1, 2, 3),
    )
    return st.randoms(use_true_random=False).map(lambda chance: draw_workload(chance, space))
