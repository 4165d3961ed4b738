"""What compute-sanitizer's racecheck may say of ``hopper``: one order that it does not see, told by instruction.

``gl.warp_specialize`` keeps a byte for each warp that waits for a part of the program: the first four warps write all
of them, each other warp reads its own. Barrier 1, of all threads, stands between any two instructions that touch them:

    the first four warps             the others
    write: which part
    barrier                          barrier, read, jump to the part that was read
    barrier, their own part          barrier, that part, or none
    barrier, write: the end          barrier
    barrier                          barrier, read, leave

So a read is between the writes, never beside one: a warp that jumped has its byte, and only then comes to the next
barrier. Racecheck reports reads as racing with both writes. :func:`switch_of` finds the instructions in machine code
and holds them to this order; :func:`unexplained` lets through what racecheck says of them alone.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KERNEL = "hopper_attention_forward"
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
ALL_THREADS = re.compile(r"(@!?U?P\d )?BAR\.SYNC\.DEFER_BLOCKING 0x1$")  # without a number of threads
RACE = re.compile(r"(Read|Write) access at (\w+)\+0x([0-9a-f]+) in ")
FIRST_OTHER = 4  # the first warp that waits


@dataclass(frozen=True)
class Switch:
    """Offsets of the instructions of one kernel that touch the bytes."""

    read: int
    writes: tuple[int, int]


def disassemble(cubin: bytes) -> str:
    """Machine code as text, by the nvdisasm that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def switch_of(text: str) -> Switch:
    """The read and the two writes of the bytes, in disassembled code.

    Raises:
        AssertionError: there are others, or a barrier of all threads is not where it must be.
    """
    code = [(int(at, 16), words) for at, words in INSTRUCTION.findall(text)]
    reads = [i for i, (_, words) in enumerate(code) if words.startswith("LDS.U8 ")]
    assert len(reads) == 1, f"{len(reads)} reads of a byte"
    read = reads[0]
    first = int(code[read][1].split("+")[-1].rstrip("]"), 16) + FIRST_OTHER
    touching = [i for i, (_, words) in enumerate(code) if _touches(words, first)]
    assert len(touching) == 2, [code[i] for i in touching]
    start, end = touching
    assert all(code[i][1].startswith("STS.64 [") for i in touching)
    barriers = [i for i, (_, words) in enumerate(code) if "BAR.SYNC" in words]
    nearest = [max(i for i in barriers if i < read), min(i for i in barriers if i > read)]
    nearest += [min(i for i in barriers if i > start), max(i for i in barriers if i < end)]
    nearest += [min(i for i in barriers if i > end)]
    assert all(ALL_THREADS.fullmatch(code[i][1]) for i in nearest), [code[i] for i in nearest]
    assert sum(ALL_THREADS.fullmatch(code[i][1]) is not None for i in barriers if start < i < end) == 3
    return Switch(code[read][0], (code[start][0], code[end][0]))


def _touches(words: str, first: int) -> bool:
    """Whether an instruction names shared memory within the eight bytes from ``first`` on, as an offset."""
    match = re.search(r"^(?:@!?U?P\d )?(?:STS|STSM|LDS|LDSM|ATOMS|SYNCS)\S* .*\+(0x[0-9a-f]+)\]", words)
    return match is not None and first <= int(match[1], 16) < first + 8


def unexplained(output: str, switches: Mapping[str, Switch]) -> list[str]:
    """What racecheck reported, but for a switch's read beside its writes.

    ``switches`` are by the line that the script prints when a workload is over: races of its kernels stand before it.
    A summary that counts others than those that were read here is reported, too.
    """
    races: list[list[str]] = []
    found: list[str] = []
    judged = 0
    for line in output.splitlines():
        if "Race reported" in line:
            races.append([line])
        elif races and line.startswith("=") and RACE.search(line):
            races[-1].append(line)
        elif re.match(r"=+ (Error|Warning|Internal|Target)", line):
            found.append(line)
        elif line.endswith(" ran"):
            wrong = [race for race in races[judged:] if not _explained(race, switches.get(line))]
            found += [words for race in wrong for words in race]
            judged = len(races)
    found += [words for race in races[judged:] for words in race]
    counted = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, 0 warnings\)", output)
    if counted is None or not int(counted[1]) == int(counted[2]) == len(races):
        found.append(f"{len(races)} races were read, the summary says: {counted[0] if counted else 'nothing'}")
    return found


def _explained(race: list[str], switch: Switch | None) -> bool:
    told = {(match[1], match[2], int(match[3], 16)) for line in race for match in RACE.finditer(line)}
    if switch is None:
        return False
    return told <= {("Read", KERNEL, switch.read), *(("Write", KERNEL, at) for at in switch.writes)}
