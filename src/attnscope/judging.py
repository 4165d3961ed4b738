"""Stage 3: one tensor against its truth and budget.

Reads tensors and an Expectation, writes TensorChecks. Must not import an implementation or a later stage. The order:
finiteness; places that must be exact; every row's error against its budget; then RMS and slope of the whole tensor.
"""

from __future__ import annotations

import math
from dataclasses import replace

from attnscope.budgets import Expectation, RowBudget, finite, mean_of, numbers, row_norms, slope_of, slope_sums
from attnscope.diagnosis import describe_non_finite, describe_wrong, index_of, place
from attnscope.inputs import Tensor
from attnscope.records import TensorCheck
from attnscope.units import significant

GROSS_COSINE = {"plain": 0.98}  # of every head, below which an approximate implementation is wrong
GROSS_COSINE_HARD = 0.90  # the same on the other kinds, which quantisation is bad at by nature
# A cosine does not see a result of the right direction and half the size, as of a softmax that counts padding.
GROSS_SLOPE = {"plain": 0.05}
GROSS_SLOPE_HARD = 0.20


def judge(tensors: dict[str, Tensor], expectation: Expectation, kind: str = "plain") -> list[TensorCheck]:
    """Each of ``tensors`` that has a truth against its budget. Pure; shapes must be the truth's."""
    return [
        judge_tensor(name, tensors[name], truth, expectation.budgets[name], kind)
        for name, truth in expectation.truth.items()
        if name in tensors
    ]


def judge_tensor(name: str, x: Tensor, truth: Tensor, budget: RowBudget, kind: str = "plain") -> TensorCheck:
    """One tensor: finiteness, exact places, rows, then RMS and slope."""
    import torch

    about = f"{name} on {kind} inputs: "
    wrong = ~(torch.isfinite(x) | (x == truth)) | (torch.isinf(truth) & (x != truth))
    error = row_norms(name, finite(x).double() - finite(truth))
    if error.numel() == 0:
        return TensorCheck(name, kind, True, 0.0, 0.0)
    ratio = (error / budget.allowed).nan_to_num(0.0, torch.inf, 0.0)  # 0 / 0: exact, as it must be
    worst = ratio.argmax()
    any_wrong, at, off, allowed, scale, factor, square, *slopes = numbers((
        wrong.any(), worst, *(t.flatten().take(worst) for t in (error, budget.allowed, budget.scale, ratio)),
        mean_of(ratio.square(), budget.scale > 0), *slope_sums(finite(x), finite(truth)),
    ))  # fmt: skip
    if any_wrong:
        dead = bool((torch.isinf(truth) & torch.isfinite(x)).any())
        what = "-inf is missing where a row sees no key" if dead else describe_non_finite(name, x, wrong)
        return TensorCheck(name, kind, False, None, None, message=about + what)
    unit = scale if scale > 0 else 1.0
    bad = ratio > 1
    rms, slope = math.sqrt(square), slope_of(*slopes)
    rms_ratio = rms / budget.expected_rms if budget.expected_rms else None
    where = place(name, index_of(error.shape, int(at)))
    found = TensorCheck(name, kind, True, off / unit, allowed / unit, slope, rms_ratio, where)
    if factor > 1:
        pattern = describe_wrong(name, x, truth, budget, bad)
        message = f"{where} is off by {significant(off / unit)}, " + (
            f"{significant(factor)} times its budget {significant(allowed / unit)}" if allowed else "and must be exact"
        )
        message += f"; {pattern}" if pattern else ""
    elif rms > budget.rms:
        message = (
            f"no row exceeds its budget, but their RMS error is {significant(rms_ratio or 0.0)} times the twin's, "
            f"{significant(budget.rms / budget.expected_rms)} times is allowed"
        )
    elif slope is not None and slope > budget.slope:
        message = f"all of it is off by a factor of 1 ± {significant(slope)}, {significant(budget.slope)} is allowed"
    else:
        return found
    return replace(found, passed=False, message=about + message)


def judge_grossly(check: TensorCheck, tensors: dict[str, Tensor], expected: Expectation) -> TensorCheck:
    """An approximate implementation keeps its error on record, and fails where a head has another direction or size.

    Size is the slope of each head against the truth: <x, r> / <r, r>, 1 where they agree.
    """
    import torch

    if check.row_rel_error_max is None:
        return check
    x, truth = finite(tensors[check.tensor]).double(), finite(expected.truth[check.tensor])
    if x.dim() < 4:
        x, truth = x[..., None], truth[..., None]
    x, truth = x.flatten(-2), truth.flatten(-2)
    cosine = torch.nn.functional.cosine_similarity(x, truth, dim=-1)
    lowest = cosine[truth.ne(0).any(-1)].amin().item() if bool(truth.ne(0).any()) else 1.0
    least = GROSS_COSINE.get(check.kind, GROSS_COSINE_HARD)
    steepest, most = _steepest(x, truth), GROSS_SLOPE.get(check.kind, GROSS_SLOPE_HARD)
    exact = check.error_budget != 0 or check.row_rel_error_max == 0
    about = f"{check.tensor} on {check.kind} inputs: a head"
    if not exact:
        return replace(check, passed=False)
    if lowest < least:
        return replace(check, passed=False, message=f"{about}'s cosine with the truth is {lowest:.3f}, below {least}")
    if steepest > most:
        off = f"{about} is off by a factor of 1 ± {significant(steepest)}, {significant(most)} is allowed"
        return replace(check, passed=False, message=off)
    return replace(check, passed=True, message="")


def _steepest(x: Tensor, truth: Tensor) -> float:
    """The largest |slope - 1| of any head, of (B, H, N) tensors; 0 where no head has a truth but 0."""
    norm = truth.square().sum(-1)
    some = norm > 0
    slopes = (x * truth).sum(-1)[some] / norm[some]
    return (slopes - 1).abs().amax().item() if slopes.numel() else 0.0


def factor_of(check: TensorCheck) -> float:
    """Error over budget; infinite where an exact place is off, 0 where nothing was compared."""
    if check.row_rel_error_max is None or check.error_budget is None:
        return 0.0
    if check.error_budget == 0:
        return float("inf") if check.row_rel_error_max > 0 else 0.0
    return check.row_rel_error_max / check.error_budget
