"""The table of faults in tests/planted fits the source code. The faults are planted by tests/planted/run.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import promises
import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def of_file(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"planted_{name}", TESTS / f"planted/{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAULTS = of_file("faults").FAULTS


def test_faults_have_names_of_their_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_place(fault: Any):
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert fault.new != fault.old


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_tests_of_a_fault_exist_and_belong_to_its_tier(fault: Any):
    quick = all(row.partition("::")[0] in promises.QUICK for row in fault.tests)
    assert quick == (fault.tier == "check")
    for row in fault.tests:
        file, _, test = row.partition("::")
        path = TESTS / f"core/{file}.cc" if fault.tier == "core" else TESTS / file
        assert path.is_file() and f"def {test}(" in path.read_text() if test else path.is_file(), row
