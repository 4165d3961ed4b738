"""Computes the numbers of docs/concepts/checking.md. ``python tests/checking_numbers.py`` writes them there.

``assert_current`` says whether the page still shows what this code computes; other processors round a little otherwise,
so numbers may differ by a third.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from attnscope.budgets import MODEL_FACTOR, NEAREST_RMS, SPREAD_FACTOR, TWIN_FACTOR, expect
from attnscope.device import find_device
from attnscope.inputs import make_inputs
from attnscope.judging import judge
from attnscope.reference import compute_attention, twin_precision
from attnscope.workload import Workload

PAGE = Path(__file__).resolve().parents[1] / "docs" / "concepts" / "checking.md"
BLOCK = re.compile(r"(<!-- generated: checking (\w+) -->\n)(.*?)(<!-- end generated -->)", re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
LENGTHS = (256, 1024, 4096)


def blindness(length: int) -> dict[str, float]:
    """What a lost key and a scale of 1.01 do to plain bf16 inputs: absolute error, and what the check makes of it."""
    device = find_device("cpu")
    w = Workload.parse(f"B1,H1,L64,S{length},D64,bf16")
    inputs = make_inputs(w, device, 0)
    expected = expect(inputs, "fp32", backward=False)
    lost = make_inputs(w, device, 0)
    lost.k, lost.v = (t[:, :, 1:].contiguous() for t in (lost.k, lost.v))
    lost.workload = w.replace(S=length - 1)
    scaled = make_inputs(w.replace(scale=1.01 * w.effective_scale), device, 0)
    twin = twin_precision("bf16", "fp32")
    numbers = {}
    for name, changed in (("right", inputs), ("key_lost", lost), ("scale", scaled)):
        out = compute_attention(changed, precision=twin, backward=False).out
        found = judge({"out": out}, expected)[0]
        numbers[f"{name}_absolute"] = (out.double() - expected.truth["out"]).abs().max().item()
        numbers[f"{name}_factor"] = found.row_rel_error_max / found.error_budget
        numbers[f"{name}_rms_ratio"] = found.rms_ratio
    return numbers


def blind_table() -> str:
    """The table of what fixed tolerances do not see."""
    lines = [
        "| S | | largest absolute error | row error / budget | RMS error / twin's |",
        "| --- | --- | --- | --- | --- |",
    ]
    words = {"right": "a right kernel", "key_lost": "key 0 lost", "scale": "scale × 1.01"}
    for length in LENGTHS:
        numbers = blindness(length)
        lines += [
            f"| {length} | {word} | {numbers[f'{name}_absolute']:.1e} | {numbers[f'{name}_factor']:.2f} "
            f"| {numbers[f'{name}_rms_ratio']:.2f} |"
            for name, word in words.items()
        ]
    return "\n".join(lines) + "\n"


def constants_table() -> str:
    """The constants of the budget."""
    rows = {
        "times the twin's error of the row": TWIN_FACTOR,
        "times the model's standard deviation of the row": MODEL_FACTOR,
        "times the twin's RMS, and its slope": SPREAD_FACTOR,
        "RMS of rounding to nearest, in units of the largest relative error": round(NEAREST_RMS, 3),
    }
    return "| | |\n| --- | --- |\n" + "".join(f"| {word} | {number} |\n" for word, number in rows.items())


TABLES = {"blind": blind_table, "constants": constants_table}


def write() -> None:
    """Writes every table into the page."""
    PAGE.write_text(BLOCK.sub(lambda m: m[1] + TABLES[m[2]]() + m[4], PAGE.read_text()))


def assert_current() -> None:
    """Raises AssertionError where the page shows other words, or numbers off by more than a third."""
    blocks = {name: body for _, name, body, _ in BLOCK.findall(PAGE.read_text())}
    assert set(blocks) == set(TABLES), f"{PAGE.name} must hold the tables {', '.join(TABLES)}"
    for name, body in blocks.items():
        now = TABLES[name]()
        assert NUMBER.sub("0", body) == NUMBER.sub("0", now), f"run python tests/checking_numbers.py ({name})"
        for old, new in zip(NUMBER.findall(body), NUMBER.findall(now), strict=True):
            assert abs(float(old) - float(new)) <= 0.34 * max(float(new), 1e-9), (name, old, new)


if __name__ == "__main__":
    sys.exit(write())
