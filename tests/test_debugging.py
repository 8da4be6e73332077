"""breakpoint() in a rank, with a real terminal and without a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from sessions import MSCOMM, clean_environment, mscomm_run, run


class Terminal:
    """A pseudo-terminal whose other end is a command's stdin, stdout and stderr."""

    def __init__(self, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        os.close(theirs)
        self.all = self.seen = ""  # all output so far, and the part that until() has not returned yet

    def type(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())

    def until(self, text: str, timeout_s: float = 60) -> str:
        """Wait for the text. Return the output up to and including it."""
        end = time.monotonic() + timeout_s
        while text not in self.seen:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} did not come: {self.seen!r}"
            assert self._read(), f"{text!r} did not come: {self.seen!r}"
        before, self.seen = self.seen.split(text, 1)
        return before + text

    def rest(self) -> str:
        while self._read():
            continue
        return self.seen

    def _read(self) -> bool:
        try:
            data = os.read(self._ours, 4096).decode().replace("\r\n", "\n")
        except OSError:  # the other end is closed in all processes
            return False
        self.all, self.seen = self.all + data, self.seen + data
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal():
    opened = []

    def start(*command: str) -> Terminal:
        opened.append(Terminal(*command))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_one_rank_has_the_terminal_and_its_debugger_works(terminal, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import mscomm\nmscomm.init()\nrank = mscomm.get_rank()\nx = 6 * 7\nbreakpoint()\nprint('went on', rank)\n"
        "mscomm.barrier()\nif rank == 1: print('name?', input('who: '))\n"
    )
    one = terminal(*MSCOMM, "run", "-n", "3", "--stdin", "1", str(script))
    shown = one.until("[1] (Pdb) ")
    assert "[1] > " in shown and "train.py(" in shown, shown
    one.type("p x")
    assert one.until("[1] (Pdb) ").endswith("p x\n[1] 42\n[1] (Pdb) ")
    one.type("c")
    one.until("[1] who: ")
    one.type("Anna")
    assert "[1] name? Anna\n" in one.rest()
    assert sorted(re.findall(r"\[(\d)\] went on \1", one.all)) == ["0", "1", "2"]
    assert one.process.wait(60) == 0


def test_a_breakpoint_without_a_terminal_says_what_to_do(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os\nif os.environ['MSCOMM_RANK'] == '1': breakpoint()\n")
    done = mscomm_run("-n", 2, script)
    assert done.returncode == 1
    assert (
        "RuntimeError: breakpoint() in rank 1, which has no terminal: start the job with `mscomm run --stdin 1`"
        in (done.stderr.splitlines()[-1])
    )
    assert "BdbQuit" not in done.stderr
    assert mscomm_run("-n", 2, script, env={"PYTHONBREAKPOINT": "0"}).returncode == 0


def test_stdin_of_one_rank_can_be_a_file(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(repr(sys.stdin.read()))\n")
    (tmp_path / "input").write_text("two\nlines\n")
    with open(tmp_path / "input") as file:
        done = mscomm_run("-n", 2, "--stdin", 1, script, stdin=file)
    assert sorted(done.stdout.splitlines()) == ["[0] ''", "[1] 'two\\nlines\\n'"]


FAILING = """
import pytest
from ranks import ranks

@pytest.mark.parametrize("k", [3])
@ranks(2, env={"WORDS": "a b", "MINE": "{rank}"})
def test_sum(rank, group, k):
    breakpoint()  # fails under pytest, because the ranks have no terminal
"""


def test_a_failed_test_of_ranks_prints_the_command_that_debugs_it(terminal, tmp_path):
    test = tmp_path / "test_sum.py"
    test.write_text(FAILING)
    ours = os.path.dirname(__file__)
    done = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ours, test],
        env=clean_environment(PYTHONPATH=ours),
    )
    assert done.returncode == 1, done.stdout
    advice, command = re.findall(r"^E +(To debug the test, .*)\n^E +(.*)$", done.stdout, flags=re.M)[0]
    assert advice.endswith("It leaves out MINE: the values differ between the ranks.")
    one = terminal("sh", "-c", f"PYTHONPATH={ours} {command}")
    one.until("[0] (Pdb) ")
    one.type("p rank, k, __import__('os').environ['WORDS']")
    one.until("[0] (0, 3, 'a b')\n[0] (Pdb) ")
    one.type("c")
    one.rest()
    assert one.process.wait(60) == 0
