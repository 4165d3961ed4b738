"""The import arrows of docs/design.md, read from the source of whatever modules exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import attnscope

ROOT = Path(attnscope.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
)
BASE = {"errors", "units", "device", "records"}  # everyone may import these
NEVER_TORCH = ("trace", "explaining", "reporting")
HEAVY = {"torch", "triton", "plotly", "pynvml", "cuda", "cudnn", "IPython", "numpy"}
SHARED = {"common", "library", "heads_last"}  # what implementations share
CONTRACT = {"attnscope.tunable", "attnscope.tables"}  # beside attnscope.implementation
# A record shows itself in a notebook and on a terminal; the views are imported when it does.
EXCEPTIONS = {
    ("attnscope.records", "attnscope.reporting.notebook"),
    ("attnscope.records", "attnscope.reporting.text"),
    ("attnscope.why_record", "attnscope.reporting.why_views"),
}


def path_of(module: str) -> Path:
    path = ROOT.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text())


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).removeprefix("typing.") == "TYPE_CHECKING"


def imports(module: str, *, at_import_only: bool = False) -> Iterator[str]:
    """Dotted names that ``module`` imports, those for the type checker left out."""

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module} imports relatively"
                # `from attnscope import x` imports a module where x is one
                inner = [f"{child.module}.{alias.name}" for alias in child.names]
                yield from (name if name in MODULES else str(child.module) for name in inner)
            elif not is_type_checking(child) and not (
                at_import_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            ):
                yield from walk(child)

    yield from walk(tree_of(module))


def ours(module: str) -> set[str]:
    """The modules of the package that ``module`` imports; the package itself, which is lazy, is not one."""
    return {name for name in imports(module) if name.startswith("attnscope.")}


def stage_of(module: str) -> int:
    """0 for what everyone may import, the stage that the docstring names, and 9 for what stands above all stages."""
    parts = module.split(".")[1:]
    if not parts or parts[0] in BASE:
        return 0 if parts else 9
    if parts[0] == "implementations":
        return 2
    docstring = ast.get_docstring(tree_of(module)) or ""
    named = re.search(r"\b[Ss]tage (\d)", docstring.split("\n\n")[0])
    return int(named.group(1)) if named else 9


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is(module):
    assert ast.get_docstring(tree_of(module)), f"{module} has no docstring"


@pytest.mark.parametrize("module", MODULES)
def test_no_stage_imports_a_later_one(module):
    stage = stage_of(module)
    later = {name for name in ours(module) if stage_of(name) > stage and (module, name) not in EXCEPTIONS}
    assert not later, f"{module} (stage {stage}) imports {later}"


@pytest.mark.parametrize("module", [m for m in MODULES if m.split(".")[1:2] and m.split(".")[1] in NEVER_TORCH])
def test_traces_explanations_and_reports_need_neither_torch_nor_an_implementation(module):
    found = set(imports(module))
    assert not {name for name in found if name.split(".")[0] in ("torch", "triton")}
    forbidden = ("attnscope.implementations", "attnscope.implementation", "attnscope.inputs", "attnscope.reference")
    assert not {name for name in found if name.startswith(forbidden)}


def implementation_family(module: str) -> str | None:
    """The file or folder under implementations/ that a module belongs to; None for what they share."""
    parts = module.split(".")
    if parts[1:2] != ["implementations"] or len(parts) < 3 or parts[2] in SHARED:
        return None
    return parts[2]


@pytest.mark.parametrize("module", [m for m in MODULES if implementation_family(m)])
def test_implementations_import_the_contract_and_nothing_from_each_other(module):
    family = implementation_family(module)
    others = {name for name in ours(module) if implementation_family(name) not in (None, family)}
    assert not others, f"{module} imports {others}"
    tools = {"attnscope.cuda", "attnscope.driver", "attnscope.cudnn", "attnscope.cudnn_plans"}
    allowed = {"attnscope.implementation", *tools, *(f"attnscope.implementations.{name}" for name in SHARED)}
    odd = (
        {name for name in ours(module) if stage_of(name) == 2 and not implementation_family(name)} - allowed - CONTRACT
    )
    assert not odd, f"{module} imports {odd}"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_heavy_is_imported_at_import_time(module):
    found = {name.split(".")[0] for name in imports(module, at_import_only=True)} & HEAVY
    assert not found, f"{module} imports {found} at import time"


def test_no_module_shares_its_name_with_a_public_function():
    top = {module.split(".")[1] for module in MODULES if module.count(".") >= 1}
    assert not top & set(attnscope.__all__)


def test_every_module_but_the_gpu_s_imports_without_torch():
    """Transitively, in a process in which torch does not exist."""
    code = """
import importlib, importlib.abc, sys
class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton", "numpy", "plotly", "pynvml", "cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
    names = [m for m in MODULES if not m.endswith("__main__")]
    run = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-1000:]


def test_no_import_goes_in_a_circle():
    graph = {m: {n for n in imports(m, at_import_only=True) if n in MODULES and n != "attnscope"} for m in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for name in graph[module]:
                visit(name, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_the_arrows_of_stages_are_seen_at_all():
    """The reader of imports finds what is there: this test's own eyes."""
    assert "attnscope.inputs" in ours("attnscope.reference")
    assert "torch" in set(imports("attnscope.reference")) and "torch" not in set(
        imports("attnscope.reference", at_import_only=True)
    )
    assert (stage_of("attnscope.workload"), stage_of("attnscope.checking"), stage_of("attnscope.cli")) == (1, 3, 9)
