"""Write docs/reference/*.md: command line, implementations, workloads and suites, the report's words, the records.

Everything comes from the code: signatures of the commands, sheets, docstrings. ``--check`` writes nothing and exits 1
where a page is not what this would write. Needs no torch and no GPU, and no page depends on the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attnscope import cli, fault_probes, faults, implementation, pacing, records, why_record
from attnscope.device import Device, Environment
from attnscope.explaining.rules import RULES
from attnscope.implementation import FEATURE_SENTENCES, FEATURES, Implementation, Sheet
from attnscope.reporting.words import COLUMNS, TERM_PHRASES
from attnscope.rulebook import VERIFIED, Rulebook
from attnscope.sdpa_faults import FAULTS
from attnscope.sdpa_rules import REFUSALS
from attnscope.spelling import EXAMPLES
from attnscope.suites import CPU_DEFAULT, GPU_DEFAULT, SUITES
from attnscope.units import DTYPE_BYTES

ROOT = Path(__file__).resolve().parents[1]
WRITTEN_BY = "<!-- written by benchmarks/reference.py from the code: change the code, then run it -->"
RECORDS = (
    records.Run, records.Limits, records.Result, records.CheckResult, records.TensorCheck, records.Measurement,
    records.Verdict, records.Profile, records.OpTime, records.KernelEvent, records.Finding, Device, Environment,
)  # fmt: skip
WORDS = {
    "causal": "rows see keys up to their own place: `causal` or `causal=top_left` counts places from the first key, "
    "`causal=bottom_right` lets the last row see the last key",
    "window": "only keys nearer than this",
    "softcap": "scores become `softcap · tanh(score / softcap)`",
    "scale": "what the products are scaled by; D^-0.5 without it",
    "alibi": "a slope a head times the distance is taken from the scores",
    "sinks": "one more score a head, without a value",
    "mask": "a bool mask, `mask=bool:Bx1xLxS` names its shape",
    "bias": "an additive bias of a dtype and a shape, which gets a gradient",
    "lengths": "how many keys of each batch entry are real",
    "packed": "sequences laid end to end; B, L and S follow",
    "dropout": "dropout of this probability, by a given mask or drawn by the implementation",
    "layout": "strides in memory: `bhld`, `blhd`, or `qkv` (three views of one packed buffer)",
}


# --- pages ------------------------------------------------------------------------------------------------------------


def cli_page() -> Iterator[str]:
    """Every command with its arguments and options, from the signatures."""
    yield "# Command line\n\n" + WRITTEN_BY
    yield (
        "stdout carries results only, messages and progress go to stderr. Exit codes: 0 ok, 1 an implementation failed "
        "or was wrong, 2 usage, 130 interrupted."
    )
    for name, callback in commands():
        yield f"## attnscope {name}"
        yield first_paragraph(callback)
        rows = [parameter_row(parameter, hint) for parameter, hint in parameters(callback)]
        yield table(("argument or option", "default", "what it does"), rows) if rows else "No options."


def implementations_page() -> Iterator[str]:
    """The sheets: what each implementation takes."""
    ladder = set(implementation.names("ladder"))
    known = list(implementation.builtin_references())
    yield "# Implementations\n\n" + WRITTEN_BY
    yield (
        "What each sheet claims; every claim is tested. What a sheet does not claim is refused with a reason, and "
        "PyTorch, a library or the card may refuse more: `attnscope list` says what runs on this machine. A feature "
        "that has no backward says `forward`; dropout that an implementation draws itself says `drawn`, `yes` follows "
        "a given mask; `bias_gradient` is a gradient of the bias. Under `in torch.compile`, "
        "`compiled` means that it compiles itself, `traceable` that `torch.compile(fullgraph=True)` may run through it."
    )
    for title, names in (("all", [n for n in known if n not in ladder]), ("ladder", [n for n in known if n in ladder])):
        chosen = [implementation.find(name) for name in names]
        if chosen:
            yield f"## `{title}`"
            yield table(("implementation", "what it is"), [(shown(one), one.summary) for one in chosen])
            yield table(("implementation", *SHEET_COLUMNS), [sheet_row(one.name, one.sheet) for one in chosen])
            yield feature_table(chosen)


SHEET_COLUMNS = (
    "directions", "dtypes", "scores in", "head dims", "devices", "packages", "layouts", "lse", "same result twice",
    "in torch.compile", "CUDA graph",
)  # fmt: skip


def sheet_row(name: str, sheet: Sheet) -> Sequence[str]:
    by_precision: dict[str, list[str]] = {}
    for dtype in sorted(sheet.dtypes):
        by_precision.setdefault(sheet.compute_precision(dtype), []).append(dtype)
    scores = "; ".join(f"{precision} for {', '.join(dtypes)}" for precision, dtypes in by_precision.items())
    if all(dtypes == [precision] for precision, dtypes in by_precision.items()):
        scores = "the inputs' dtype"
    elif len(by_precision) == 1:
        scores = next(iter(by_precision))
    return (
        f"`{name}`", ", ".join(sorted(sheet.directions, reverse=True)), ", ".join(sorted(sheet.dtypes)), scores,
        sheet.head_dims(), sheet.hardware(), ", ".join(map(shown_package, sheet.packages)),
        ", ".join(sorted(sheet.layouts)), yes(sheet.lse), yes(sheet.deterministic), sheet.torch_compile(),
        yes(sheet.cuda_graph and "cuda" in sheet.devices),
    )  # fmt: skip


def shown_package(requirement: str) -> str:
    return f"`{requirement.partition(' as ')[0]}`"


def feature_table(chosen: Sequence[Implementation]) -> str:
    """Implementations down, features across; a feature that none has is told below."""
    words = [word for word in FEATURES if any(word in one.sheet.features for one in chosen)]
    if "bias" in words:
        words.insert(words.index("bias") + 1, "bias_gradient")
    body = [(f"`{one.name}`", *(one.sheet.feature(word) for word in words)) for one in chosen]
    missing = [FEATURE_SENTENCES[word] for word in FEATURES if word not in words]
    told = f"\n\nNone takes {', '.join(missing)}." if missing else ""
    return table(("implementation", *words), body) + told


def workloads_page() -> Iterator[str]:
    """The spelling's words, and the suites."""
    yield "# Workloads and suites\n\n" + WRITTEN_BY
    yield (
        "A workload is one line of parts separated by commas, the same on the command line, in Python "
        "(`attnscope.Workload.parse`) and in records: `B8,H32/8,L1024,S2048,D64,Dv128,bf16,causal=bottom_right`."
    )
    sizes = [
        ("`B8`", "batch entries; 1 without it"),
        ("`H32`, `H32/8`", "query heads, and key/value heads where they are fewer"),
        ("`L1024`", "query rows"),
        ("`S2048`", "keys; as many as rows without it"),
        ("`D64`", "head dim of q and k"),
        ("`Dv128`", "head dim of v; that of q and k without it"),
        (", ".join(f"`{dtype}`" for dtype in DTYPE_BYTES), "dtype; bf16 without it"),
    ]
    options = [(f"`{EXAMPLES[word]}`", WORDS[word]) for word in WORDS]
    yield table(("part", "meaning"), [*sizes, *options])
    yield "## Suites"
    yield (
        "A suite's name stands for its workloads. Without any name `compare` takes "
        f"{listed(GPU_DEFAULT)} on a GPU, {listed(CPU_DEFAULT)} on a CPU."
    )
    for name, found in SUITES.items():
        yield f"`{name}`, {len(found)}:\n\n" + "\n".join(f"- `{workload}`" for workload in found)


def report_page() -> Iterator[str]:
    """The columns, words and findings of a report, and how much is measured."""
    yield "# What a report says\n\n" + WRITTEN_BY
    yield "## Columns\n\nThose of `--wide` and the page; the default table shows the first few."
    yield table(("column", "what it is"), [(column.title, column.meaning) for column in COLUMNS])
    yield "## Words"
    rows = [
        ("status of a row", records.STATUSES, "`Result.status`"),
        ("grade of a check", records.GRADES, "`CheckResult.grade`"),
        ("verdict on two rivals", records.VERDICT_WORDS, "`Verdict.word`"),
        ("what binds the limit", tuple(f"{term}: {said}" for term, said in TERM_PHRASES.items()),
         "`Measurement.limit_term`"),
    ]  # fmt: skip
    yield table(("word for", "words", "field"), [(what, "; ".join(words), where) for what, words, where in rows])
    yield "## Findings\n\nEach rule is silent unless the trace itself shows what it says."
    yield table(
        ("id", "what it says"), [(f"`{rule.__name__.replace('_', '-')}`", first_paragraph(rule)) for rule in RULES]
    )
    yield "## How much is measured"
    yield paragraphs(inspect.getdoc(pacing.Plan) or "")
    plans = {f"{kind}{', --quick' if quick else ''}": plan for (kind, quick), plan in pacing.PLANS.items()}
    names = [field.name for field in dataclasses.fields(pacing.Plan)]
    body = [(f"`{name}`", *(f"{getattr(plan, name):g}" for plan in plans.values())) for name in names]
    yield table(("", *plans), body)


def records_page() -> Iterator[str]:
    """Every record with its fields."""
    yield "# Records\n\n" + WRITTEN_BY
    yield (
        f"`run.jsonl` is JSON Lines, schema version {records.SCHEMA_VERSION}: one `run` line, then one line for its "
        "`limits` and for each `result`. Each line carries `record` and `schema_version`; a field that is missing is "
        "null, never 0. Units are the suffixes of the names."
    )
    for record in RECORDS:
        yield f"## {record.__name__}"
        yield paragraphs(inspect.getdoc(record) or "")
        yield table(("field", "type", "default"), [field_row(field) for field in dataclasses.fields(record)])


def why_page() -> Iterator[str]:
    """The rules that ``attnscope why`` reads, and its record."""
    yield "# Why: rules and record\n\n" + WRITTEN_BY
    yield (
        "`attnscope why` and `attnscope.why` ask PyTorch which implementation it takes, and tell these rules' reasons "
        "against the others ([how to use it](../guide/why.md)). A rule was held against the wheels of the torch "
        f"releases it names, {', '.join(VERIFIED)} unless it says otherwise; with another torch, or on ROCm, what it "
        "says is marked unverified."
    )
    yield "## What is refused"
    yield rule_table(REFUSALS)
    yield "## What goes wrong where it is taken\n\nTold as `careful`, beside an implementation that PyTorch accepts."
    yield rule_table(FAULTS)
    yield "## Record"
    yield (
        f"`--json` prints one document with `schema_version` {records.SCHEMA_VERSION} and `calls`, each a `Why`; "
        "`attnscope.why` returns the same record."
    )
    for record in (why_record.Why, why_record.Considered, why_record.Reason):
        yield f"### {record.__name__}"
        yield paragraphs(inspect.getdoc(record) or "")
        yield table(("field", "type", "default"), [field_row(field) for field in dataclasses.fields(record)])


def known_faults_page() -> Iterator[str]:
    """Every fault that is tried, and what was seen of it where."""
    yield "# Known faults\n\n<!-- written by benchmarks/reference.py from what attnscope faults --write wrote -->"
    yield (
        "What `attnscope faults --write` saw of publicly reported faults, by machine and versions. `absent`: the "
        "report's recipe ran there and was right. What could not be tried on a machine has no row."
    )
    seen = faults.read_known_faults()
    for fault in fault_probes.FAULTS:
        yield f"## {fault.id}: {fault.range}"
        yield f"Goes wrong: {fault.wrong}. Reported: {', '.join(f'<{url}>' for url in fault.source.split())}"
        rows = [
            (r.implementation, r.outcome, ", ".join((r.device, f"torch {r.torch}", *cudnn_of(r))), r.detail)
            for r in seen
            if r.id == fault.id
        ]
        yield table(("implementation", "outcome", "where", "what was seen"), rows) if rows else "Not tried yet."


def cudnn_of(record: faults.FaultRecord) -> tuple[str, ...]:
    return () if record.cudnn is None else (f"cuDNN {record.cudnn}",)


def rule_table(book: Rulebook) -> str:
    """One line a rule."""
    rows = []
    for rule in book.rules:
        where = [
            f"{', '.join(names)} on a {place}" for place, names in (("GPU", rule.cuda), ("CPU", rule.cpu)) if names
        ]
        since = f"; since torch {'.'.join(map(str, rule.since))}" if rule.since > (2, 10) else ""
        verified = "" if rule.verified == VERIFIED else ", ".join(rule.verified) or "none: read, not seen"
        rows.append((f"`{rule.id}`", "; ".join(where) + since, first_paragraph(rule.find), verified, rule.source or ""))
    return table(("rule", "looks at", "what it says", "verified with", "source"), rows)


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "cli.md": cli_page,
    "implementations.md": implementations_page,
    "workloads.md": workloads_page,
    "report.md": report_page,
    "records.md": records_page,
    "why.md": why_page,
    "known_faults.md": known_faults_page,
}


# --- their parts ------------------------------------------------------------------------------------------------------


def commands(app: Any = cli.app, prefix: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, function) of every command, groups taken apart."""
    for info in app.registered_commands:
        name = info.name or info.callback.__name__.replace("_", "-")
        yield f"{prefix}{name}", info.callback
    for group in app.registered_groups:
        yield from commands(group.typer_instance, f"{prefix}{group.name or group.typer_instance.info.name} ")


def parameters(callback: Callable[..., Any]) -> Iterator[tuple[inspect.Parameter, Any]]:
    hints = typing.get_type_hints(callback, include_extras=True)
    for parameter in inspect.signature(callback).parameters.values():
        yield parameter, hints[parameter.name]


def parameter_row(parameter: inspect.Parameter, hint: Any) -> tuple[str, str, str]:
    info = next((extra for extra in getattr(hint, "__metadata__", ())), None)
    kind = type(info).__name__
    bare = hint.__origin__ if hasattr(hint, "__metadata__") else hint
    default = parameter.default
    if kind == "ArgumentInfo":
        return f"`{info.metavar or parameter.name.upper()}`", "", info.help or ""
    spelled = (info.default, *(info.param_decls or ()))  # in Annotated the first name stands where a default would
    flag = next((d for d in spelled if isinstance(d, str) and d.startswith("--")), None)
    flag = flag or f"--{parameter.name.replace('_', '-')}"
    value = type_word(bare)
    shown_default = "" if default in (None, False, inspect.Parameter.empty) else f"`{default}`"
    return f"`{flag}{f' {value}' if value else ''}`", shown_default, info.help or ""


def type_word(hint: Any) -> str:
    """The placeholder of an option's value; empty for a flag."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in hint.__args__ if part is not types.NoneType)
    return {bool: "", str: "TEXT", int: "N", float: "X", Path: "PATH"}.get(hint, "VALUE")


def field_row(field: dataclasses.Field[Any]) -> tuple[str, str, str]:
    if field.default is not dataclasses.MISSING:
        default = "null" if field.default is None else f"`{field.default!r}`"
    elif field.default_factory is not dataclasses.MISSING:
        default = "empty"
    else:
        default = "required"
    kind, _, maybe = str(field.type).partition(" | ")
    return f"`{field.name}`", f"`{kind}`" + (" or null" if maybe else ""), default


def first_paragraph(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def paragraphs(doc: str) -> str:
    """A docstring as Markdown: double backticks are single there, lines of a paragraph are one."""
    parts = [" ".join(part.split()) for part in doc.split("\n\n")]
    return re.sub(r"``([^`]+)``", r"`\1`", "\n\n".join(parts))


def shown(one: Implementation) -> str:
    return f"`{one.name}`" + (" (ours)" if one.sheet.ours else "")


def yes(value: bool) -> str:
    return "yes" if value else ""


def listed(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)


def make_page(name: str) -> str:
    """The whole text of a page."""
    return "\n\n".join(PAGES[name]()) + "\n"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Exit status: 0 done or up to date, 1 with ``--check`` where a page is not."""
    parser = argparse.ArgumentParser(description="Write docs/reference/*.md from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is out of date")
    check = parser.parse_args(arguments).check
    stale = 0
    for name in PAGES:
        path = root / "docs" / "reference" / name
        text = make_page(name)
        if path.is_file() and path.read_text() == text:
            continue
        stale += 1
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        print(f"docs/reference/{name} is out of date, run python benchmarks/reference.py" if check else f"wrote {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
