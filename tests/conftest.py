"""Fixtures for resources only: devices, the shared folder. Problems are parametrised where they are tested."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from attnscope import worker
from attnscope.device import Device, find_device
from forked_workers import Nursery

hypothesis.settings.register_profile("attnscope", deadline=None, derandomize=True, database=None, max_examples=60)
hypothesis.settings.load_profile("attnscope")


def pytest_configure() -> None:
    """Where Triton interprets (make test's last part, make triton), it shall not take more time than it must."""
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        from triton_interpreter import quicken

        quicken()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a card are skipped where there is none, even when asked for with ``-m gpu``."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or _has_cuda():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def cpu() -> Device:
    return find_device("cpu")


@pytest.fixture(scope="session")
def gpu() -> Device:
    """The CUDA device; tests that use it are marked ``gpu``."""
    return find_device("cuda")


@pytest.fixture(scope="session")
def device() -> Device:
    """The GPU where there is one, else the CPU."""
    return find_device()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """The process that has imported torch, from which ``forked_workers`` come."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="module")
def forked_workers(nursery: Nursery) -> Iterator[None]:
    """Every worker process of the module's sweeps is forked, which takes milliseconds where a new one takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "start_child", nursery.start_child)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared material beside the checkout (real traces, reference texts); skips where it is absent."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip("needs the shared folder beside the checkout")
    return path
