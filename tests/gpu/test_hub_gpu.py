"""A kernel package of our own on a card, through the real ``kernels`` library and the workers."""

from __future__ import annotations

import importlib.util

import pytest

import hub_kernels
from attnscope import check
from attnscope.implementation import _registered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="needs the kernels package"),
]


@pytest.mark.parametrize(("archs", "status"), [(["8.0+PTX"], "ok"), (["1.0"], "skipped")])
def test_a_local_kernel_for_cuda_is_tried_and_checked_on_the_card(tmp_path, monkeypatch, archs, status):
    before = dict(_registered)
    backend = {"type": "cuda", "archs": archs}
    hub_kernels.write(tmp_path / "mine", variant="torch-cuda", backend=backend)
    monkeypatch.chdir(tmp_path)
    try:
        run = check(
            "B2,H4/2,L65,S129,D64,bf16,causal=bottom_right,window=33",
            implementations="hub:./mine", device="cuda", quick=True,
        )  # fmt: skip
    finally:
        _registered.clear()
        _registered.update(before)
    (row,) = run.results
    assert row.status == status, row
    if status == "ok":
        assert row.check.directions == ("forward", "backward")
        assert "folder at local, build torch-cuda, sha256 " in row.note
    else:
        assert "is built for compute capability 1.0" in row.reasons["forward"][0]
