"""The error tree and its sentences."""

from __future__ import annotations

import pytest

from attnscope import errors


def test_every_error_is_an_attnscope_error_with_an_exit_code():
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(kinds) >= 10
    assert all(issubclass(e, errors.AttnscopeError) and e.exit_code in (1, 2) for e in kinds)


@pytest.mark.parametrize("kind", [errors.WorkloadError, errors.DeviceError, errors.UnknownName])
def test_bad_arguments_are_value_errors_and_exit_2(kind):
    assert issubclass(kind, ValueError)
    assert kind.exit_code == 2


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sdpa_flsh", "hint: did you mean sdpa_flash or sdpa_cudnn?"),
        ("zzz", "hint: one of: naive, sdpa_flash, sdpa_cudnn"),
    ],
)
def test_an_unknown_name_gets_the_nearest_or_all(name, hint):
    message = str(errors.UnknownImplementation(name, iter(["naive", "sdpa_flash", "sdpa_cudnn"])))
    assert message.startswith(f"unknown implementation '{name}'")
    assert message.endswith(hint)


def test_errors_carry_what_a_program_needs():
    unsupported = errors.UnsupportedWorkload("naive", (r for r in ["takes fp32, not bf16", "has no backward"]))
    assert unsupported.reasons == ["takes fp32, not bf16", "has no backward"]
    assert str(unsupported) == "naive cannot run this workload: takes fp32, not bf16; has no backward"
    assert str(errors.PrepareFailed("ptxas failed", "line 3: error")) == "ptxas failed\nline 3: error"
    assert errors.PrepareFailed("ptxas failed").log == ""
    assert errors.CheckFailed("wrong", result=7).result == 7
