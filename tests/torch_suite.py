"""PyTorch's own tests of torch.distributed, over mscomm: `python tests/torch_suite.py -n 2 [NAME...]`.

The tests are those in PyTorch's wheel (torch.testing._internal.distributed.distributed_test). Their decorators and some
bodies ask whether the backend is one that PyTorch knows. So this script imports them as for gloo, and then replaces
their constant BACKEND by the name "mscomm" (or that of --backend), which also equals "gloo": mscomm runs all tests that
gloo runs. Each test forks its ranks from this process, so the ranks need not import torch again.

`make test-torch VERSION=2.15` runs it with any version of PyTorch.

It needs `pip install expecttest`. It prints a line for each test that is not skipped, and ends with status 1 if one has
failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("-n", type=int, default=2, help="the number of ranks")
parser.add_argument("--backend", default="mscomm", help="the backend that runs the tests")
parser.add_argument("names", nargs="*", help="the tests to run; by default, all")


class Name(str):
    """The name of a backend that runs the tests of gloo, and equals "gloo", too."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def suite(size: int, backend: str) -> type[unittest.TestCase]:
    """Return PyTorch's test case for `size` ranks of the backend."""
    os.environ |= {"WORLD_SIZE": str(size), "BACKEND": "gloo", "OMP_NUM_THREADS": "1"}
    os.environ["TEMP_DIR"] = tempfile.mkdtemp()
    for folder in ("barrier", "test_dir", "init_dir"):
        Path(os.environ["TEMP_DIR"], folder).mkdir()
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.testing._internal.distributed import distributed_test as theirs

    import mscomm.torch  # noqa: F401 - registers the backend

    class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def _spawn_processes(self) -> None:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

        @classmethod
        def _run(cls, *args: Any, **options: Any) -> None:
            theirs.BACKEND = Name(backend)
            known = dist.get_backend
            distributed_c10d.get_backend = lambda group=None: Name(known(group))  # monitored_barrier() asks for gloo
            torch.set_num_threads(1)
            super()._run(*args, **options)

    return Suite


class Result(unittest.TextTestResult):
    """Prints a line for each test that has run."""

    began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.began = time.monotonic()

    def _tell(self, what: str, test: unittest.TestCase) -> None:
        print(f"{what} {test.id().rpartition('.')[2]} ({time.monotonic() - self.began:.1f} s)", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._tell("passed", test)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._tell("FAILED", test)

    addError = addFailure


def main() -> int:
    asked = parser.parse_args()
    case = suite(asked.n, asked.backend)
    names = asked.names or unittest.defaultTestLoader.getTestCaseNames(case)
    tests = unittest.TestSuite(map(case, names))
    result = Result(unittest.runner._WritelnDecorator(sys.stderr), descriptions=False, verbosity=0)  # type: ignore
    tests.run(result)
    result.printErrors()
    skipped, failed = len(result.skipped), len(result.failures) + len(result.errors)
    ran = result.testsRun - skipped
    print(f"{asked.backend}, {asked.n} ranks: {ran} ran, {failed} failed, {skipped} skipped")
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
