"""Checks the types that editors see.

_core.pyi must match the compiled module. A program that imports the installed package must see the types of the public
names. `make lint` checks that the package passes mypy --strict.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mscomm
from mscomm import _core

ROOT = Path(__file__).parent.parent
STUB = ROOT / "python/mscomm/_core.pyi"

# Differences that stubtest must accept: what pybind11 adds to every class, and classes without a constructor
# (make_heap() makes a Heap, and so on).
PYBIND11 = """
mscomm\\._core\\.(Array|Call|CallNumbers|Completions|Failure|Group|Heap|Layout|Peers|Runtime|Tls|Vendor|Work)
mscomm\\._core\\.(Array|Call|CallNumbers|Failure|Heap|Runtime|Vendor)\\.__init__
"""

needs_mypy = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")


def functions() -> dict[str, ast.FunctionDef]:
    """Map the name of each function and method in the stub to its definition."""
    tree = ast.parse(STUB.read_text())
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        methods = (node for node in kind.body if isinstance(node, ast.FunctionDef) and not node.decorator_list)
        found |= {f"{kind.name}.{node.name}": node for node in methods}
    return found


def parameters(signature: str) -> tuple[int, list[str]]:
    """Return the number of positional parameters, and the names of the keyword parameters. The signature is in
    pybind11's form.
    """
    inside = signature[signature.index("(") + 1 : signature.rindex(") ->")]
    while re.search(r"\[[^\[\]]*\]", inside):
        inside = re.sub(r"\[[^\[\]]*\]", "", inside)
    names = [part.partition(":")[0].strip() for part in inside.split(",") if part.strip()]
    star = names.index("*") if "*" in names else len(names)
    return star, names[star + 1 :]


@needs_mypy
def test_the_stub_has_what_the_core_has_and_nothing_else(tmp_path):
    package = tmp_path / "mscomm"
    package.mkdir()
    (package / "__init__.pyi").touch()  # empty, because errors in the package's own __init__.pyi must not matter
    shutil.copy(STUB, package)
    # An empty stub of NumPy, because the types of arrays do not matter here, and NumPy's own stubs take 10 s to read.
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy/__init__.pyi").write_text("from typing import Any\ndef __getattr__(name: str) -> Any: ...\n")
    (tmp_path / "allowed").write_text(PYBIND11)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "mscomm._core", "--allowlist", "allowed"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", functions())
def test_the_stub_has_the_parameters_of_the_core(name):
    value = _core
    for part in name.split("."):
        value = getattr(value, part)
    arguments = functions()[name].args
    stub = len(arguments.posonlyargs + arguments.args), [argument.arg for argument in arguments.kwonlyargs]
    # stubtest cannot read the parameters of a compiled function. So this test reads the first line of the function's
    # docstring, where pybind11 lists them.
    assert parameters(value.__doc__.splitlines()[0]) == stub


def typed_names() -> set[str]:
    """Return the names in mscomm/__init__.pyi, except those of modules."""
    tree = ast.parse((ROOT / "python/mscomm/__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != "mscomm"]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_type_checkers_see_the_public_names_and_no_others():
    assert typed_names() | {"__version__"} == set(mscomm.__all__) | mscomm._NEEDS_TORCH


def test_every_public_name_is_there():
    assert [name for name in mscomm.__all__ if not hasattr(mscomm, name)] == []


@needs_mypy
def test_a_strict_program_knows_the_type_of_every_public_name(tmp_path):
    lines = ["import mscomm", *(f"reveal_type(mscomm.{name})" for name in mscomm.__all__), "mscomm.no_such_name"]
    (tmp_path / "program.py").write_text("\n".join(lines))
    # What `make lint` has found out about NumPy need not be found out again.
    with contextlib.suppress(FileNotFoundError):
        shutil.copytree(ROOT / ".mypy_cache", tmp_path / "cache")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", "cache", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    shown = dict(re.findall(r"^program\.py:(\d+): note: Revealed type is \"(.*)\"$", checked.stdout, flags=re.M))
    types = {name: shown.get(str(number), "") for number, name in enumerate(mscomm.__all__, start=2)}
    assert {name: kind for name, kind in types.items() if kind in ("", "Any")} == {}, checked.stdout + checked.stderr
    errors = [line for line in checked.stdout.splitlines() if " error: " in line]
    assert errors == [f'program.py:{len(lines)}: error: Module has no attribute "no_such_name"  [attr-defined]']
