"""What a snippet of PTX computes, elementwise on numpy arrays: the few instructions that the kernels write themselves.

A snippet is what ``inline_asm_elementwise`` takes: ``$0`` and on are its results, then its arguments, each 32 bits.
An instruction that is not known here is refused, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Words = Any  # an array of uint32
DECLARATION = re.compile(r"\.reg \.(b32|pred) \w+$")


def _shift(left: bool) -> Callable[[Words, Words], Words]:
    """PTX ISA, shl and shr: amounts above 32 count as 32, which leaves nothing."""

    def shift(a: Words, amount: Words) -> Words:
        kept = np.minimum(amount, 31)
        return np.where(amount > 31, np.uint32(0), a << kept if left else a >> kept).astype(np.uint32)

    return shift


def _tanh(a: Words) -> Words:
    return np.tanh(a.view(np.float32)).view(np.uint32)


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "shl.b32": _shift(left=True),
    "shr.u32": _shift(left=False),
    "and.b32": np.bitwise_and,
    "popc.b32": lambda a: np.bitwise_count(a).astype(np.uint32),
    "setp.ne.s32": np.not_equal,
    "selp.f32": lambda a, b, p: np.where(p, a, b),
    "tanh.approx.f32": _tanh,
}


def compute(snippet: str, results: int, arguments: Sequence[Words]) -> list[Words]:
    """The results of ``snippet`` for arguments of one shape, as uint32.

    Raises:
        NotImplementedError: an instruction or an operand that is not known here.
    """
    registers = {f"${results + i}": np.asarray(argument, np.uint32) for i, argument in enumerate(arguments)}
    shape = np.broadcast_shapes(*(value.shape for value in registers.values()))
    for line in filter(None, (line.strip() for line in snippet.strip().strip("{}").split(";"))):
        if DECLARATION.match(line):
            continue
        name, _, operands = line.partition(" ")
        if name not in INSTRUCTIONS:
            raise NotImplementedError(line)
        written, *read = (operand.strip() for operand in operands.split(","))
        registers[written] = INSTRUCTIONS[name](*(_operand(text, registers) for text in read))
    return [np.broadcast_to(registers[f"${i}"], shape) for i in range(results)]


def _operand(text: str, registers: dict[str, Words]) -> Words:
    if text in registers:
        return registers[text]
    if text.startswith("0f"):
        return np.uint32(int(text[2:], 16))
    if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", text):
        return np.uint32(int(text, 0) % 2**32)
    raise NotImplementedError(text)
