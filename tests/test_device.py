"""Devices, free memory, and what a record says about its machine."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnscope import device as device_module
from attnscope.device import (
    NO_LIMIT,
    Device,
    available_memory_bytes,
    cpu_name,
    find_device,
    loaded_library,
    read_environment,
)
from attnscope.errors import DeviceError


def test_the_cpu_is_always_there(cpu):
    assert (cpu.kind, cpu.torch_name, cpu.capability) == ("cpu", "cpu", None)
    assert cpu.threads >= 1 and cpu.memory_bytes > 2**28
    assert str(cpu) == f"{cpu.name} ({cpu.threads} threads)"
    assert Device(kind="cuda", name="card", index=1).torch_name == "cuda:1"


@pytest.mark.parametrize("kind", ["tpu", "cuda:0", ""])
def test_an_unknown_kind_is_a_sentence(kind):
    with pytest.raises(DeviceError, match=rf"device must be cpu or cuda, got '{kind}'\nhint: "):
        find_device(kind)


def test_no_cuda_is_a_sentence(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"device cuda is not available: .*\nhint: --device cpu"):
        find_device("cuda")
    assert find_device().kind == "cpu"


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_beyond_the_cards_is_a_sentence(monkeypatch, index):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match=rf"device index must lie in 0..1, got {index}\nhint: "):
        find_device("cuda", index)


def test_no_torch_is_a_sentence(monkeypatch):
    real_import = builtins.__import__

    def without_torch(name, *args, **kwargs):
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(DeviceError, match=r"needs torch.*\nhint: pip install 'attnscope\[torch\]'"):
        find_device()


def test_available_memory_respects_the_control_group(cpu, monkeypatch):
    assert 0 < available_memory_bytes(cpu) <= cpu.memory_bytes
    monkeypatch.setattr(device_module, "_cgroup_limit", lambda: 12345)
    assert available_memory_bytes(cpu) == 12345


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, NO_LIMIT),
        ({"memory.max": "max\n"}, NO_LIMIT),
        ({"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 1\ninactive_file 200\n"}, 500),
        ({"memory.max": "1000\n", "memory.current": "1700\n", "memory.stat": "anon 1700\n"}, 0),
    ],
)
def test_a_control_group_s_limit_less_what_it_holds(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert device_module._cgroup_limit(tmp_path) == expected


def test_the_environment_names_versions_and_no_machine_path(cpu):
    import torch

    environment = read_environment()
    assert environment.packages["torch"] == str(torch.__version__)
    assert environment.packages["attnscope"]
    assert environment.threads == torch.get_num_threads()
    assert environment.cpu == cpu_name()
    assert environment.git_commit is None or len(environment.git_commit) == 40
    assert str(Path.home()) not in repr(environment) and os.getcwd() not in repr(environment)


def test_a_loaded_library_is_named_without_its_owner_s_folder():
    import torch  # noqa: F401  (it maps libtorch)

    found = loaded_library("libtorch_cpu")
    assert found is not None and found.split("/")[-1].startswith("libtorch_cpu") and found.count("/") <= 2
    assert loaded_library("libno_such_thing") is None


def test_importing_needs_no_torch():
    code = "import sys, attnscope.device, attnscope.records; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.gpu
def test_a_gpu_s_facts(gpu):
    assert gpu.capability >= (7, 0) and gpu.multiprocessors > 0 and gpu.l2_bytes > 0
    assert 0 < available_memory_bytes(gpu) <= gpu.memory_bytes
    environment = read_environment()
    assert environment.driver and environment.cuda and environment.cudnn_loaded
