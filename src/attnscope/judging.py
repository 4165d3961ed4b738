"""Stage 3: one tensor against its truth and budget.

Reads tensors and an Expectation, writes TensorChecks. Must not import an implementation or a later stage. The order:
finiteness; places that must be exact; every row's error against its budget; then RMS and slope of the whole tensor.
"""

from __future__ import annotations

from dataclasses import replace

from attnscope.budgets import Expectation, RowBudget, finite, rms_of, row_norms, slope_of
from attnscope.diagnosis import describe_non_finite, describe_wrong, index_of, place
from attnscope.inputs import Tensor
from attnscope.records import TensorCheck
from attnscope.units import significant

GROSS_COSINE = {"plain": 0.98}  # of every head, below which an approximate implementation is wrong
GROSS_COSINE_HARD = 0.90  # the same on the other kinds, which quantisation is bad at by nature


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
    if bool(wrong.any()):
        dead = bool((torch.isinf(truth) & torch.isfinite(x)).any())
        what = "-inf is missing where a row sees no key" if dead else describe_non_finite(name, x, wrong)
        return TensorCheck(name, kind, False, None, None, message=about + what)
    error = row_norms(name, finite(x).double() - finite(truth))
    if error.numel() == 0:
        return TensorCheck(name, kind, True, 0.0, 0.0)
    ratio = (error / budget.allowed).nan_to_num(0.0, torch.inf, 0.0)  # 0 / 0: exact, as it must be
    worst = int(ratio.argmax())
    off, allowed, scale, factor = torch.stack(
        [t.flatten()[worst].double() for t in (error, budget.allowed, budget.scale, ratio)]
    ).tolist()
    unit = scale if scale > 0 else 1.0
    bad = ratio > 1
    rms = rms_of(ratio[budget.scale > 0])
    slope = slope_of(finite(x), finite(truth))
    rms_ratio = rms / budget.expected_rms if budget.expected_rms else None
    where = place(name, index_of(error.shape, worst))
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
    """An approximate implementation keeps its error on record and fails only where a head points elsewhere."""
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
    exact = check.error_budget != 0 or check.row_rel_error_max == 0
    message = f"{check.tensor} on {check.kind} inputs: a head's cosine with the truth is {lowest:.3f}, below {least}"
    passed = lowest >= least and exact
    return replace(check, passed=passed, message="" if passed else message if exact else check.message)


def factor_of(check: TensorCheck) -> float:
    """Error over budget; infinite where an exact place is off, 0 where nothing was compared."""
    if check.row_rel_error_max is None or check.error_budget is None:
        return 0.0
    if check.error_budget == 0:
        return float("inf") if check.row_rel_error_max > 0 else 0.0
    return check.row_rel_error_max / check.error_budget
