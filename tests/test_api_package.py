"""The package: its public names, and what importing it costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import mscomm


@pytest.mark.parametrize("name", mscomm.__all__)
def test_a_public_name_is_there_and_listed(name):
    assert getattr(mscomm, name) is not None
    assert name in dir(mscomm)


def is_ours(name: str) -> bool:
    value = getattr(mscomm, name)
    return callable(value) and str(value.__module__).startswith("mscomm")


@pytest.mark.parametrize("name", [name for name in mscomm.__all__ if is_ours(name)])
def test_a_public_function_or_class_says_what_it_is(name):
    first = (inspect.getdoc(getattr(mscomm, name)) or "").splitlines()[:1]
    assert first and first[0].endswith((".", ":")) and len(first[0].split()) > 3, f"{name}: {first}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="all_redcue"):
        _ = mscomm.all_redcue


def test_the_module_knows_where_every_name_lives():
    stub = ast.parse(Path(mscomm.__file__).with_suffix(".pyi").read_text())
    named = [alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert {*mscomm._MODULES, *mscomm._MODULE_OF} == {name for name in named if not name.startswith("_")}
    for name in mscomm._MODULE_OF.keys() - mscomm._NEEDS_TORCH:
        assert name in vars(importlib.import_module(mscomm._MODULE_OF[name]))


def test_importing_mscomm_costs_little_over_numpy(capsys):
    line = "import time, numpy; t = time.process_time(); import mscomm; mscomm.init; print(time.process_time() - t)"
    seconds = [float(subprocess.check_output([sys.executable, "-c", line])) for _ in range(7)]
    with capsys.disabled():
        print(f"\nimport mscomm over numpy: {1000 * min(seconds):.0f} ms of CPU time (least of 7)")
    assert min(seconds) < 0.150  # a generous bound: the import takes 0.050 s on a quiet machine


@pytest.mark.parametrize("module", ["click", "rich", "psutil", "ml_dtypes", "torch", "mpi4py"])
def test_importing_mscomm_does_not_import(module):
    line = f"import sys, mscomm; mscomm.init(); mscomm.barrier(); sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", line]).returncode == 0


def test_a_star_import_needs_no_pytorch():
    line = "import sys; sys.modules['torch'] = None; from mscomm import *; all_reduce"
    assert subprocess.run([sys.executable, "-c", line]).returncode == 0
