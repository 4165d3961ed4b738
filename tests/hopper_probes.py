# mypy: disable-error-code="no-untyped-def"
"""Small Gluon kernels that run one function of hopper's kernels alone: does it mean on a card what it means here?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from attnscope.implementations.hopper import gluon_shim, kernels

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl

    from attnscope.implementations.hopper.kernels import _hide_by_words, _widened, _words_between

ROWS, KEYS = 64, 128
WARPS = 4
ELEMENTS = 1024  # of one block of ``widened``


def widened(source, target):
    """``target[i] = _widened(source[i])``, 1024 elements a block."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    place = gl.program_id(0) * 1024 + gl.arange(0, 1024, layout)
    gl.store(target + place, _widened(gl.load(source + place)))


def hidden(scores, low, high, target):
    """A tile of 64 x 128 scores, -inf before ``low`` and from ``high`` of its row on; a tile a block."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 128, gl.SliceLayout(0, layout))
    first = gl.program_id(0) * 64
    place = (first + gl.expand_dims(rows, 1)) * 128 + gl.expand_dims(columns, 0)
    s = gl.load(scores + place)
    words = _words_between(gl.load(low + first + rows), gl.load(high + first + rows), s)
    gl.store(target + place, _hide_by_words(s, words))


SIGNATURES = {
    "widened": {"source": "*bf16", "target": "*fp32"},
    "widened_fp16": {"source": "*fp16", "target": "*fp32"},
    "hidden": {"scores": "*fp32", "low": "*i32", "high": "*i32", "target": "*fp32"},
}


def compile_probe(name: str) -> Any:
    """Machine code of one of ``SIGNATURES``. Raises what Triton raises."""
    module = sys.modules[__name__]
    main = kernels.load()
    shared = {name: getattr(main, name) for name in ("_widened", "_hide_by_words", "_words_between")}
    vars(module).update(shared, **gluon_shim.names())
    function = gluon_shim.jit({"hidden": hidden}.get(name, widened), ())
    return gluon_shim.compile_kernel(function, SIGNATURES[name], {}, WARPS)
