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


def test_importing_mscomm_costs_less_than_importing_numpy():
    line = (
        "import time; begin = time.process_time(); import numpy; numpy_s = time.process_time() - begin\n"
        "import mscomm; mscomm.init; print((time.process_time() - begin - numpy_s) / numpy_s)"
    )
    ratios = [float(subprocess.check_output([sys.executable, "-c", line])) for _ in range(3)]
    assert min(ratios) < 1, ratios  # of CPU times in one process, so that the machine's speed does not matter


def test_importing_mscomm_imports_no_slow_modules():
    slow = {"click", "rich", "psutil", "ml_dtypes", "torch", "mpi4py"}
    line = f"import sys, mscomm; mscomm.init(); mscomm.barrier(); print(sorted({slow} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", line], text=True) == "[]\n"


def test_a_star_import_needs_no_pytorch():
    line = "import sys; sys.modules['torch'] = None; from mscomm import *; all_reduce"
    assert subprocess.run([sys.executable, "-c", line]).returncode == 0
