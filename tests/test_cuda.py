"""Compiling, the cache, arguments: what attnscope.cuda does without a GPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import types

import pytest

from attnscope import cuda
from attnscope.device import Device
from attnscope.errors import PrepareFailed, UsageError

SOURCE = 'extern "C" __global__ void twice(float* x, int n) { int i = threadIdx.x; if (i < n) x[i] *= FACTOR; }\n'
LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'g' for 'sm_90'
ptxas info    : Function properties for g
ptxas         .     8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compiling entry function 'f' for 'sm_90'
ptxas info    : Function properties for f
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(cuda.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "cubins"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "twice.cu"
    path.write_text(SOURCE)
    return path


def test_resources_are_read_from_the_assemblers_log():
    f, g = cuda.parse_resources(LOG)
    assert f == cuda.KernelResources("f", 16, 0, 0, 0, 0)
    assert g == cuda.KernelResources("g", 10, 12, 16, 8, 128)


def test_includes_are_pasted_once_with_their_lines(tmp_path):
    (tmp_path / "common.cuh").write_text("int common;\n")
    (tmp_path / "more.cuh").write_text('#include "common.cuh"\nint more;\n')
    (tmp_path / "main.cu").write_text('#include "common.cuh"\n#include "more.cuh"\nint main_;\n')
    text = cuda.expand_includes(tmp_path / "main.cu")
    assert text.count("int common;") == 1
    assert text.index("int common;") < text.index("int more;") < text.index("int main_;")
    assert text.splitlines()[text.splitlines().index("int main_;") - 1] == '#line 3 "main.cu"'


def test_a_missing_include_is_named(tmp_path):
    (tmp_path / "main.cu").write_text('#include "gone.cuh"\n')
    with pytest.raises(PrepareFailed, match=r"gone\.cuh"):
        cuda.expand_includes(tmp_path / "main.cu")


def test_arguments_are_typed():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3)
    values, types = cuda.pack_arguments((tensor, 3, 0.5, ctypes.c_longlong(2**40)))
    assert values == (tensor.data_ptr(), 3, 0.5, 2**40)
    assert types == (ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_longlong)


@pytest.mark.parametrize("argument", [True, 2**31, "x"])
def test_arguments_that_no_kernel_takes_are_refused(argument):
    with pytest.raises(UsageError):
        cuda.pack_arguments((argument,))


def test_an_architecture_must_be_spelled(source):
    with pytest.raises(UsageError, match="sm_90"):
        cuda.compile_source(source, "90")


def test_a_cpu_has_no_kernels(source):
    with pytest.raises(PrepareFailed, match="needs a CUDA device"):
        cuda.load_kernel(source, "twice", Device("cpu", "a cpu", threads=1))


def test_a_cache_that_was_cut_or_changed_is_not_read(tmp_path):
    file = tmp_path / "x.cubin"
    made = cuda.Cubin(b"machine\ncode", "sm_90", (cuda.KernelResources("f", 1, 0, 0, 0, 0),))
    cuda._write_cache(file, made)
    assert cuda._read_cache(file, "sm_90") == made
    file.write_bytes(file.read_bytes()[:-1])
    assert cuda._read_cache(file, "sm_90") is None
    file.write_bytes(b"")
    assert cuda._read_cache(file, "sm_90") is None
    assert not [left for left in tmp_path.iterdir() if left.name.startswith(".")]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    cuda._write_cache(tmp_path / "file" / "x.cubin", cuda.Cubin(b"", "sm_90", ()))


@pytest.mark.parametrize(
    "error", [ImportError("libnvrtc.so.13: cannot open\nmore"), RuntimeError("libnvrtc.so.13: cannot open"), OSError()]
)
def test_an_nvrtc_that_does_not_load_is_one_sentence(monkeypatch, error):
    class Broken(types.ModuleType):
        def __getattr__(self, name):
            raise error if name == "nvrtc" else AttributeError(name)

    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", Broken("cuda.bindings"))
    cuda.compiler_version.cache_clear()
    with pytest.raises(PrepareFailed) as caught:
        cuda.compiler_version()
    cuda.compiler_version.cache_clear()
    first = str(caught.value).splitlines()[0]
    assert first.startswith("compiling CUDA needs NVRTC, which does not load here: ")
    assert first.endswith("OSError" if not error.args else "libnvrtc.so.13: cannot open")


def test_kernel_names_are_told():
    cubin = cuda.Cubin(b"", "sm_90", (cuda.KernelResources("f", 1, 0, 0, 0, 0),))
    assert cubin.resources_of("f").registers == 1
    with pytest.raises(UsageError, match="must be one of f, got 'g'"):
        cubin.resources_of("g")


class TestCompiling:
    """With NVRTC, without a GPU."""

    @pytest.fixture(autouse=True)
    def _needs_nvrtc(self):
        pytest.importorskip("cuda.core")
        pytest.importorskip("cuda.bindings")

    def test_twice_the_second_time_from_the_cache(self, source, cache):
        first = cuda.compile_source(source, "sm_90", {"FACTOR": 2})
        second = cuda.compile_source(source, "sm_90", {"FACTOR": 2})
        assert first.compile_s > 0 and second.compile_s == 0
        assert first.code == second.code and first.resources == second.resources
        assert [r.name for r in first.resources] == ["twice"] and first.resources[0].registers > 0
        assert len(list(cache.iterdir())) == 1

    def test_what_the_key_covers(self, source, cache):
        cuda.compile_source(source, "sm_90", {"FACTOR": 2})
        cuda.compile_source(source, "sm_90", {"FACTOR": 3})
        cuda.compile_source(source, "sm_80", {"FACTOR": 2})
        source.write_text(SOURCE + "// changed\n")
        cuda.compile_source(source, "sm_90", {"FACTOR": 2})
        assert len(list(cache.iterdir())) == 4

    def test_a_damaged_cubin_is_made_anew(self, source, cache):
        whole = cuda.compile_source(source, "sm_90", {"FACTOR": 2})
        (file,) = cache.iterdir()
        file.write_bytes(file.read_bytes()[:-9])
        assert cuda.compile_source(source, "sm_90", {"FACTOR": 2}).code == whole.code

    def test_an_error_names_the_file_and_line(self, source, cache):
        source.write_text(SOURCE.replace("x[i]", "y[i]"))
        with pytest.raises(PrepareFailed, match=r"twice\.cu does not compile for sm_90") as caught:
            cuda.compile_source(source, "sm_90", {"FACTOR": 2})
        assert 'twice.cu(1): error: identifier "y" is undefined' in str(caught.value)
        assert not cache.exists()

    @pytest.mark.slow
    def test_processes_at_the_same_time(self, source, cache):
        code = (
            "import sys; from pathlib import Path; from attnscope import cuda\n"
            "print(len(cuda.compile_source(Path(sys.argv[1]), 'sm_90', {'FACTOR': 2}).code))"
        )
        started = [
            subprocess.Popen([sys.executable, "-c", code, str(source)], stdout=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        sizes = [process.communicate(timeout=120)[0].strip() for process in started]
        assert all(process.returncode == 0 for process in started) and len(set(sizes)) == 1 and int(sizes[0]) > 0
        assert len(list(cache.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_every_rung_compiles_without_spills(architecture):
    """In the user's own cache, so that a second run is quick. No rung may be launched with more than the registers of
    a multiprocessor (64 Ki on all of these)."""
    pytest.importorskip("cuda.core")
    from attnscope.implementations.cuda_ladder import RUNGS
    from attnscope.ladder import compile_ladder

    kernels = compile_ladder(architecture)
    assert {k.source for k in kernels} >= {"forward_v1.cu", "forward_v5.cu", "backward_v8.cu", "layout.cu"}
    assert ("forward_v8_async.cu" in {k.source for k in kernels}) == (architecture != "sm_75")
    largest = {rung.name: max(rung.block_sizes) for way in RUNGS.values() for rung in way}
    for k in kernels:
        assert k.spill_bytes == 0, f"{k.kernel} of {k.source} spills {k.spill_bytes} bytes on {architecture}"
        assert k.stack_bytes == 0, f"{k.kernel} of {k.source} has a stack of {k.stack_bytes} bytes on {architecture}"
        compiled_for = re.search(r"BLOCK_SIZE=(\d+)", k.defines)  # else it may be launched with any
        block = 32 if k.kernel == "flash_one_warp_a_head" else int(compiled_for[1]) if compiled_for else largest[k.rung]
        assert k.registers * block <= 65536, f"{k.kernel} of {k.source}: {k.registers} registers"
