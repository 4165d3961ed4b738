"""The pieces of hopper's kernel that are written in PTX, each by what it means, for every value that it may meet.

Here the snippets are interpreted (``ptx_snippets.py``); tests/gpu/test_hopper_masked_gpu.py asks a card the same.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnscope.implementations.hopper import kernels
from attnscope.workload import Workload
from gluon_stand_in import Tile, device_function
from hopper_probes import SIGNATURES
from ptx_snippets import compute
from test_hopper import VERSIONS, choose, compile_apart


def test_every_bf16_is_widened_to_the_same_number() -> None:
    """All 65,536, NaN by its bits: pairs of neighbours share a register."""
    bits = np.random.default_rng(0).permutation(2**16).astype(np.uint16)
    found = device_function("_widened")(Tile(bits.reshape(64, 1024))).array
    assert found.dtype == np.float32 and found.shape == (64, 1024)
    assert np.array_equal(found.view(np.uint32).ravel(), bits.astype(np.uint32) << 16)
    numbers = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(found.ravel(), numbers, equal_nan=True)


def decoded(words: Any, keys: int) -> np.ndarray[Any, Any]:
    """(64, keys) bits of the words of both halves of each warp's rows: bit 2 i + e is column 8 i + 2 lane + e."""
    made = np.stack([half.array for half in words], 1).reshape(64, 4, 1, 1)  # warp, half, row; lane
    i, e = np.arange(keys // 8).reshape(-1, 1), np.arange(2)
    return (made.view(np.uint32) >> (2 * i + e).astype(np.uint32) & 1).transpose(0, 2, 1, 3).reshape(64, keys)


LIMITS = [*range(-9, 140), -(2**30), -(2**29) - 1, 2**29, 2**30 - 1, 2**30]


@pytest.mark.parametrize("keys", [64, 128])
def test_words_hold_the_columns_below_a_limit(keys: int) -> None:
    zero = Tile(np.zeros((64, keys), np.float32))
    limits = np.resize(np.array(LIMITS, np.int32), 64 * -(-len(LIMITS) // 64)).reshape(-1, 64)
    for row in limits:
        found = decoded(device_function("_words_below")(Tile(row), zero), keys)
        assert np.array_equal(found, np.arange(keys) < row[:, None])
        low = np.roll(row, 5)
        found = decoded(device_function("_words_between")(Tile(low), Tile(row), zero), keys)
        assert np.array_equal(found, (np.arange(keys) < row[:, None]) & (np.arange(keys) >= low[:, None]))


@pytest.mark.parametrize("keys", [64, 128])
def test_what_is_seen_keeps_its_bits_and_what_is_hidden_is_minus_infinity(keys: int) -> None:
    """NaN and infinity too: a hidden score never counts, whatever it is."""
    generator = np.random.default_rng(keys)
    scores = generator.integers(0, 2**32, (64, keys), np.uint32)
    scores[generator.random((64, keys)) < 0.1] = 0x7FC00000  # NaN
    words = [Tile(generator.integers(-(2**31), 2**31, (4, 8, 4), np.int32)) for _ in range(2)]
    found = device_function("_hide_by_words")(Tile(scores.view(np.float32)), words).array.view(np.uint32)
    assert np.array_equal(found, np.where(decoded(words, keys), scores, 0xFF800000))


@pytest.mark.parametrize("snippet", ["add.s32 $0, $1, $1;", "shl.b32 $0, $1, t;", "{ cvt.f32.bf16 $0, $1; }"])
def test_the_interpreter_refuses_what_it_does_not_know(snippet: str) -> None:
    with pytest.raises(NotImplementedError):
        compute(snippet, 1, [np.zeros(4, np.uint32)])


def test_the_kernels_hold_no_snippet_that_no_test_runs() -> None:
    source = Path(kernels.__file__).read_text()
    found = set(re.findall(r'"((?:\{ )?(?:\.reg|[a-z]+\.)[^"]*;[^"]*)"', source))
    known = {
        text
        for text in found
        if text.startswith(("{ bar.", "{ cp.async.bulk.wait", "mov.b32 $0", "mov.b64 $0", "tanh.approx"))
    }
    assert len(found - known) == 3  # _widened, _hide_by_word, _word_below


# --- what the compiler makes of them ----------------------------------------------------------------------------------

PROBES = """
import json, sys
import hopper_probes

for text, values in json.load(sys.stdin):
    machine = hopper_probes.compile_probe(text)
    print(json.dumps([text, machine.ptx]), flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", VERSIONS)
def test_probes_compile_for_the_card(version: str, tmp_path: Path) -> None:
    from attnscope.implementations.hopper.configurations import Configuration

    in_a_thread = 8  # of a block's 1024 elements
    report = f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n" + PROBES
    found = dict(compile_apart(version, [(name, Configuration()) for name in SIGNATURES], tmp_path, report))
    assert found["widened"].count("0xffff0000") + found["widened"].count("-65536") == in_a_thread // 2
    assert "cvt.f32.f16" in found["widened_fp16"] and found["hidden"].count("selp.f32") == 64


SASS = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from attnscope.implementations.hopper import Plan, configurations
from attnscope.workload import Workload

tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
for text, values in json.load(sys.stdin):
    machine = Plan(Workload.parse(text), configurations.Configuration.from_dict(values)).compile()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine.cubin)
        file.flush()
        said = subprocess.run([tool, "-c", file.name], capture_output=True, text=True).stdout
    patterns = r" R2P ", r" FSEL R.*-INF", r" LOP3\\.LUT R.*0xffff0000"
    print(json.dumps([len(re.findall(pattern, said)) for pattern in patterns]), flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_compiler_makes_of_them_what_they_were_written_for(version: str, tmp_path: Path) -> None:
    """A select a score and eight predicates at a time; a mask by which each second bf16 is one instruction."""
    texts = ["B1,H2,L2048,D64,bf16,mask=bool:1x1xLxS", "B1,H2,L2048,D64,bf16,bias=bf16:1xHxLxS"]
    jobs = [(text, choose(Workload.parse(text))) for text in texts]
    masked, biased = compile_apart(version, jobs, tmp_path, SASS)
    tiles = 2 * jobs[0][1].groups  # the code of the first tile and of the others, for each group; 64 scores a thread
    assert 0 <= masked[1] - 64 * tiles <= 4 * jobs[0][1].groups  # beside them, an lse may be -inf
    assert masked[0] >= 64 // 8 * tiles
    assert biased[2] == 64 // 2 * tiles
