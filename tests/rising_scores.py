"""Inputs on which the maximum of a row's last keys says little about the row's: for kernels that go from last to first
and keep a maximum (hopper_cuda's fixed_max). Tests with and without a card share them."""

from __future__ import annotations

from attnscope.inputs import Inputs

# By how much scores rise (natural units) over a row, so that sums of weights leave what the dtype holds: fp32's range
# by far, and fp16's 2^16.
RISES = {"bf16": 200.0, "fp16": 30.0}


def rising(inputs: Inputs, rise: float, heads: slice, rows: int | None = None) -> None:
    """The first ``rows`` queries of ``heads`` see scores that rise by ``rise`` from the last key to the first; to the
    others that column of q is 0. In place; where heads are grouped, all of k rises."""
    q, k = inputs.q, inputs.k
    last = max(k.shape[2] - 1, 1)
    ramp = rise * (0.5 - k.new_tensor(range(k.shape[2])).float() / last)  # from rise / 2 to -rise / 2
    q[..., 0] = 0
    q[:, heads, :rows, 0] = 4
    k[:, heads if k.shape[1] == q.shape[1] else slice(None), :, 0] = (ramp / (4 * inputs.workload.effective_scale)).to(
        k.dtype
    )


def rising_in_range(inputs: Inputs) -> None:
    """Scores of all rows rise as far as sums of weights may grow, which then are large, but not in doubt. In place."""
    rising(inputs, 40.0 if inputs.workload.dtype == "bf16" else 9.0, slice(None))


def one_far_above(inputs: Inputs) -> None:
    """The first key's score is about 88, all others are 0: its weight is in fp32's range, the reciprocal is not where
    such small numbers are flushed to 0. In place."""
    inputs.q[..., :], inputs.k[..., :] = 0, 0
    inputs.q[..., 0], inputs.k[:, :, 0, 0] = 16, 88 / 16 / inputs.workload.effective_scale


def all_far_below(inputs: Inputs) -> None:
    """All scores are about -300: weights by themselves would be 0 in any dtype, softmax does not mind. In place."""
    inputs.q[..., 0], inputs.k[..., 0] = 16, -300 / 16 / inputs.workload.effective_scale
