"""The mscomm.dataset modules import little, and the examples in their docstrings are correct."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import sys

import numpy as np
import pytest
from images import write
from pipelines import SEED
from sessions import run

import mscomm.dataset as ds
from mscomm.dataset import vision


def test_import_mscomm_imports_no_dataset_and_import_dataset_no_library():
    program = """
import sys, mscomm
assert not [name for name in sys.modules if name.startswith(("mscomm.dataset", "PIL", "mscomm.dtype"))]
assert mscomm.dataset.vision and mscomm.common.dtype
heavy = ("PIL", "sklearn", "torch", "pickle", "multiprocessing", "mscomm.cli")
print([name for name in sys.modules if name.split(".")[0] in heavy and name not in before])
"""
    done = run([sys.executable, "-c", "import sys, numpy; before = set(sys.modules)" + program])
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


MODULES = [module.name for module in pkgutil.walk_packages(ds.__path__, "mscomm.dataset.")]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_are_true(name, full, tmp_path, monkeypatch):
    monkeypatch.chdir(full.parent)
    module = importlib.import_module(name)
    small = write(tmp_path / "data")
    names = {**vars(module), "np": np, "vision": vision, "data": ds.Cifar10Dataset(small)}
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=names):
        report: list[str] = []
        doctest.DocTestRunner(verbose=False).run(test, out=report.append)
        assert report == []
        ds.config.set_seed(SEED)


@pytest.mark.parametrize("name", ["Cifar10Dataset", "GeneratorDataset", "DistributedSampler"])
def test_every_public_class_has_an_example(name):
    assert ">>>" in inspect.getdoc(getattr(ds, name))
