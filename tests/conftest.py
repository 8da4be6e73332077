"""Fixtures that several test files use."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import fallbacks
import interpreter
import numpy as np
import pytest
import rotated
from sessions import free_port

import mscomm
from mscomm.cluster import judge
from mscomm.dataset import config
from mscomm.job import resolve

_used_s = [0.0]  # the CPU time of this process and its children when the last test file ended


def pytest_configure():
    rotated.seed()  # chosen before pytest-xdist starts its workers, so that all of them collect the same tests


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{rotated.SEED}={rotated.seed()}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Write the CPU time of the whole file into the JUnit report, as a property of the file's last test.

    The time of single tests is not known: an interpreter that forks ranks is waited for only when its file ends.
    """
    result = yield
    if nextitem is None or nextitem.path != item.path:
        interpreter.close()
        both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        used_s = sum(one.ru_utime + one.ru_stime for one in both)
        item.user_properties.append(("cpu_s_of_file", round(used_s - _used_s[0], 2)))
        _used_s[0] = used_s
    return result


@pytest.fixture(scope="module", autouse=True)
def no_driver():
    """Check that no test has opened the stand-in of a driver in pytest's own process. It would stay there, and init()
    of another test would use it.
    """
    yield
    opened = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/mscomm-fakes-" in line}
    drivers = [path for path in opened if Path(path).name.startswith(("libcuda.", "libascendcl."))]
    assert not drivers, f"a test of this file, or of one before it, has opened {drivers}: use a new process"


@pytest.fixture(scope="session")
def mpirun_folder(tmp_path_factory):
    """The folder in which every mpirun of Open MPI makes its own folder, ompi.PID."""
    folder = tmp_path_factory.mktemp("mpirun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRTE_MCA_prte_tmpdir_base", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def no_folder_of_a_killed_mpirun(mpirun_folder):
    """Remove the folders of killed mpiruns: a later mpirun with the same process id would refuse to start."""
    yield
    for folder in mpirun_folder.glob("ompi.*"):
        if not Path("/proc", folder.suffix[1:]).exists():
            shutil.rmtree(folder, ignore_errors=True)  # an mpirun that has just ended may be removing it


@pytest.fixture(autouse=True)
def settings_as_at_the_start():
    """Undo the settings of a test for the next test in this process, whichever test that is."""
    yield
    config.set_seed(5489)
    config.set_prefetch_size(2)


@pytest.fixture
def tmpdir_env(tmp_path, monkeypatch):
    """Make tmp_path the folder for temporary files in this process and its children."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def no_fallbacks(monkeypatch):
    """Let the ranks of @ranks, and their hub, learn of a failure only by events (fallbacks.py)."""
    for name, value in {**fallbacks.IN_ENV, fallbacks.ASKED_FOR: "1"}.items():
        monkeypatch.setenv(name, value)
    for name, seconds in fallbacks.IN_HUB.items():
        monkeypatch.setattr(judge, name, seconds)


@pytest.fixture
def judge_decides(no_fallbacks, monkeypatch):
    """Let the judge decide after its usual times what no event decides."""
    for name, seconds in fallbacks.USUAL_IN_HUB.items():
        monkeypatch.setattr(judge, name, seconds)


@pytest.fixture
def alone():
    """Join a job with one rank. Yield its world group."""
    mscomm.init()
    yield resolve(None)
    mscomm.release()


@pytest.fixture
def unharmed(alone):
    """Join a job with one rank. Yield its world group. After the test, check that the test used up no call number and
    that a call still works.
    """
    before = alone.core.where()
    yield alone
    assert alone.core.where() == before
    assert mscomm.all_reduce(np.float32([3])) == 3
    assert alone.core.where()[0] == before[0] + 1
