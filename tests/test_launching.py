"""mscomm.launch runs a function in n processes: results, failures, and nothing left behind."""

from __future__ import annotations

import io
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import types

import launched
import numpy as np
import pytest
from test_run import appears, ends

import mscomm
from mscomm import interpreter
from mscomm.launching import function, parts, processes, tracebacks


def test_results_come_in_the_order_of_the_ranks_and_output_with_the_rank(capsys):
    results = mscomm.launch(launched.total, 3, 10)
    assert [one.rank for one in results] == [0, 1, 2]
    assert all((one.total == 33).all() and type(one) is launched.Answer for one in results)
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{rank}] hello from {rank}" for rank in range(3)]


def test_large_arguments_and_results_travel():
    x = np.arange(1 << 20)
    for rank, (y, rest) in enumerate(mscomm.launch(launched.big, 2, x)):
        assert (x == y).all() and rest == [str(rank), ""]


def test_the_first_failure_is_raised_with_its_rank_and_the_tracebacks(capsys, monkeypatch):
    monkeypatch.setattr(tracebacks, "HOLD_S", 60.0)
    with pytest.raises(KeyError, match="price") as raised:
        mscomm.launch(launched.fails, 3, 1, KeyError("price"))
    cause = raised.value.__cause__
    assert isinstance(cause, function.RankTraceback) and cause.rank == 1
    assert "[0,2] mscomm.errors.Aborted: rank 1: KeyError: 'price' (launched.py:" in cause.text
    assert "in fails" in cause.text and "mscomm/launching" not in cause.text
    assert capsys.readouterr().err == ""
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__ == ["in rank 1 of 3"]


def test_a_traceback_that_was_shown_before_the_rank_ended_is_in_the_cause_too(monkeypatch):
    monkeypatch.setattr(tracebacks, "HOLD_S", 0.01)
    with pytest.raises(KeyError, match="price") as raised:
        mscomm.launch(launched.fails_and_ends_slowly, 1)
    assert "KeyError: 'price'" in raised.value.__cause__.text


def test_an_exception_that_cannot_travel_becomes_an_error_with_its_text():
    with pytest.raises(mscomm.Error, match=r"rank 0: Unusual: a and b"):
        mscomm.launch(launched.raises_unusual, 1)


def test_a_result_that_cannot_be_unpickled_is_an_error():
    with pytest.raises(mscomm.Error, match=r"what rank 0 returned or raised cannot be unpickled here: .*'two'"):
        mscomm.launch(launched.returns_what_is_not_made_again, 1)


def test_ranks_have_the_flags_and_the_path_of_the_process_that_starts_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path += {sys.path[1:]!r}\nimport mscomm\n"
        "def seen():\n    return sys.flags.no_site, sys.flags.optimize\n"
        "if __name__ == '__main__':\n    print(mscomm.launch(seen, 2))"
    )
    done = subprocess.run([sys.executable, "-S", "-O", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[(1, 1), (1, 1)]\n", done.stderr


@pytest.mark.parametrize("executable", ["", "/bin/true", "/nowhere/python3"])
def test_the_interpreter_is_found_in_a_program_that_embeds_python(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    assert mscomm.launch(launched.greets, 1, 0) == [None]


def test_a_frozen_program_is_not_started_again(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert interpreter.python_executable("the hub") != sys.executable
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    with pytest.raises(mscomm.BackendUnavailable, match=r"it needs .* this frozen program, .*set_executable"):
        interpreter.python_executable("the hub")
    with pytest.raises(mscomm.BackendUnavailable, match="cannot import the modules of a frozen program"):
        mscomm.launch(launched.greets, 1, 0)
    named = tmp_path / "python"
    named.symlink_to(sys.executable)
    monkeypatch.setattr("multiprocessing.spawn._python_exe", os.fsencode(named))
    assert interpreter.python_executable("the hub") == str(named)


def test_a_program_that_is_started_instead_of_the_interpreter_starts_nothing(monkeypatch):
    for name, text in interpreter.child_environment({}).items():
        monkeypatch.setenv(name, text)
    with pytest.raises(mscomm.BackendUnavailable, match=rf"process {os.getpid()} started this process as a Python"):
        mscomm.launch(launched.greets, 1, 0)
    interpreter.own_child()
    assert mscomm.launch(launched.launches, 1) == [[1]]  # a rank may call launch()


def test_a_result_that_was_not_written_to_its_end_is_none():
    file = os.memfd_create("call")
    os.write(file, pickle.dumps(function._Outcome(b"x" * 100))[:-10])
    assert function._outcome(0, file, 0) is None  # no outcome: launch() raises an error for this rank
    os.close(file)


def test_errors_of_mscomm_keep_their_kind_and_ranks():
    with pytest.raises(mscomm.Mismatch, match="different calls"):
        mscomm.launch(launched.differs, 2)
    with pytest.raises(mscomm.PeerLost, match="killed by SIGKILL") as raised:
        mscomm.launch(launched.dies, 3)
    assert raised.value.ranks == (1,)
    with pytest.raises(mscomm.PeerLost, match="rank 0 did not end well: it ended the process itself"):
        mscomm.launch(launched.leaves, 1)


def test_the_timeout_names_those_that_have_not_returned(monkeypatch, tmp_path):
    """The launcher's clock passes the timeout as soon as rank 0 has ended."""
    passed = []
    ended = parts.WholeJob.ended
    monkeypatch.setattr(parts.WholeJob, "ended", lambda *args: (ended(*args), passed.append(1000.0)))
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + sum(passed))
    monkeypatch.setattr(processes, "time", clock)
    with pytest.raises(mscomm.CollectiveTimeout, match="sleeps did not return within 900 s on ranks 1,2") as raised:
        mscomm.launch(launched.sleeps, 3, tmp_path, timeout=900)
    assert raised.value.waiting_for == (1, 2)
    for rank in range(3):
        ends(int((tmp_path / f"pid{rank}").read_text()))


def test_a_failure_before_the_timeout_is_what_is_raised(monkeypatch):
    monkeypatch.setattr(processes, "REPORT_S", 0.2)
    with pytest.raises(ValueError, match="early"):
        mscomm.launch(launched.fails_early, 2, timeout=600)


def test_what_cannot_be_launched_is_an_error_here(monkeypatch):
    with pytest.raises(ValueError, match="n is 0"):
        mscomm.launch(launched.total, 0)
    with pytest.raises(TypeError, match="arguments cannot be pickled"):
        mscomm.launch(launched.total, 1, threading.Lock())
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(TypeError, match="put it into a module, or install cloudpickle"):
        mscomm.launch(lambda: 1, 1)


def test_functions_inside_functions_go_by_cloudpickle():
    pytest.importorskip("cloudpickle")
    factor = 3
    assert mscomm.launch(lambda x: x * factor, 2, 7) == [21, 21]


def test_a_breakpoint_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"breakpoint\(\) in rank 0, which has no terminal"):
        mscomm.launch(launched.stops, 1)


def test_output_goes_to_whatever_sys_stdout_is(monkeypatch):
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    closed = io.StringIO()
    closed.close()
    for stream in (ascii_only, None):
        monkeypatch.setattr(sys, "stdout", stream)
        assert mscomm.launch(launched.greets, 1, 0) == [None]
    assert ascii_only.buffer.getvalue() == b"[0] h\\xe9\n"
    for unusable in (closed, object()):
        monkeypatch.setattr(sys, "stdout", unusable)
        with pytest.raises(BrokenPipeError, match="greets: the ranks were ended"):
            mscomm.launch(launched.greets, 1, 1000)


def test_it_works_beside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(mscomm.launch(launched.big, 2, 1)))
    thread.start()
    thread.join(60)
    assert len(found) == 2


def test_it_works_beside_the_main_thread_of_a_process_that_ignores_sigchld(tmp_path):
    """The kernel then reaps the ranks itself, and does not tell how they ended."""
    body = """
def ends(how): return 7 if how else sys.exit(1)
def work():
    print(mscomm.launch(ends, 2, True))
    try:
        mscomm.launch(ends, 2, False)
    except mscomm.PeerLost as error:
        print(error)
if __name__ == '__main__':
    import signal, threading
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
"""
    out, err = start(tmp_path, body).communicate(timeout=60)
    assert re.fullmatch(r"\[7, 7\]\nlaunch: ends: rank [01] did not end well: exit code 1\n", out), err


def test_nothing_of_it_stays_in_this_process():
    mscomm.launch(launched.greets, 1, 0)
    before = set(os.listdir("/proc/self/fd")), threading.active_count(), signal.getsignal(signal.SIGINT)
    for _ in range(2):
        mscomm.launch(launched.greets, 1, 0)
    assert before == (set(os.listdir("/proc/self/fd")), threading.active_count(), signal.getsignal(signal.SIGINT))


SCRIPT = """
import os, sys, time
import mscomm

class Pair:
    def __init__(self, rank): self.rank = rank

def train(x):
    mscomm.init()
    return Pair(mscomm.get_rank() + x)

def waits(folder):
    mscomm.init()
    rank = mscomm.get_rank()
    open(os.path.join(folder, f"pid{rank}"), "w").write(str(os.getpid()))
    if rank == 0: time.sleep(1000)
    mscomm.barrier()

"""


def start(tmp_path, body, *args):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + body)
    command = ["env", "--default-signal=INT", sys.executable, script, *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)


def test_functions_and_classes_of_a_script_are_found(tmp_path):
    main = "if __name__ == '__main__':\n    print([type(p) is Pair and p.rank for p in mscomm.launch(train, 2, 5)])\n"
    process = start(tmp_path, main)
    assert process.communicate(timeout=60) == ("[5, 6]\n", "")


def test_a_script_without_the_guard_is_told(tmp_path):
    process = start(tmp_path, "mscomm.launch(train, 2, 5)\n")
    assert 'under `if __name__ == "__main__":`' in process.communicate(timeout=60)[1]
    assert process.returncode == 1


def test_functions_of_an_interactive_session_go_by_cloudpickle():
    pytest.importorskip("cloudpickle")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + "print([p.rank for p in mscomm.launch(train, 2, 5)])"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[5, 6]\n", "")


def test_ctrl_c_ends_the_ranks_and_is_raised(tmp_path):
    process = start(tmp_path, "if __name__ == '__main__':\n    mscomm.launch(waits, 2, sys.argv[1])\n", tmp_path)
    pids = [int(appears(tmp_path / f"pid{rank}")) for rank in range(2)]
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1].endswith("\nKeyboardInterrupt\n")
    for pid in pids:
        ends(pid)


def test_an_error_of_mscomm_survives_pickling():
    error = pickle.loads(pickle.dumps(mscomm.PeerLost("gone", [2], [3])))  # noqa: S301
    assert (type(error), str(error), error.ranks, error.waiting_for) == (mscomm.PeerLost, "gone", (2,), (3,))
