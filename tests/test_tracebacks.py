"""The output of a failed job shows each traceback once, without mscomm's own frames, and the cause in the last line."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patched_run import patched_run
from sessions import mscomm_run, run
from test_run import appears

from mscomm.launching.tracebacks import Tracebacks, last_words, numbers

PREAMBLE = "import os, signal, sys, time\nimport numpy as np\nimport mscomm\n"


@pytest.fixture
def script(tmp_path):
    def write(body: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(f"{PREAMBLE}mscomm.init()\nrank = mscomm.get_rank()\n{body}\n")
        return path

    return write


def test_a_mismatch_is_shown_once_and_in_the_last_line(script):
    done = mscomm_run("-n", 4, script("mscomm.all_reduce(np.ones(10 + (rank == 1), np.float32))"))
    assert done.returncode == 1
    head, file, code, *arrows, error, last = done.stderr.splitlines()
    assert head == "[0-3] Traceback (most recent call last):"
    assert file.endswith('train.py", line 6, in <module>') and code.startswith("[0-3]     mscomm.all_reduce(")
    assert all(set(line) <= set("[0-3] ^~") for line in arrows)
    assert error.startswith(
        "[0-3] mscomm.errors.Mismatch: the ranks of group world made different calls: ranks 0, 2, 3"
    )
    assert re.match(r"mscomm run: Mismatch after \S+ s: the ranks of group world made different calls", last)


def test_all_frames_are_shown_when_asked_for(script):
    path = script("mscomm.all_reduce(np.ones(10 + (rank == 1), np.float32))")
    done = mscomm_run("-n", 2, path, env={"MSCOMM_TRACEBACK": "full"})
    assert "group.py" in done.stderr
    wrong = mscomm_run("-n", 2, path, env={"MSCOMM_TRACEBACK": "yes"})
    assert wrong.returncode == 1 and "MSCOMM_TRACEBACK='yes': expected one of SHORT, FULL" in wrong.stderr


def test_the_rank_that_raised_is_shown_last_and_named_with_its_line(script):
    done = mscomm_run(
        "-n", 4, script("def load():\n    raise ValueError('no price')\nif rank == 3: load()\nmscomm.barrier()")
    )
    assert "[0-2] mscomm.errors.Aborted: rank 3: ValueError: no price (train.py:7)" in done.stderr
    assert done.stderr.splitlines()[-2:] == [
        "[3] ValueError: no price",
        "mscomm run: rank 3 failed first: ValueError: no price (train.py:7). The others failed because of it",
    ]


def test_an_exception_of_all_ranks_before_mscomm_is_imported_is_shown_once(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("x = 1\nimport no_such_module\n")
    done = mscomm_run("-n", 4, path)
    assert done.stderr.count("ModuleNotFoundError") == 2
    last = "mscomm run: ranks 0-3 failed: ModuleNotFoundError: No module named 'no_such_module' (train.py:2)"
    assert done.stderr.splitlines()[-1].startswith(f"{last}. Install it for ")


def test_a_script_that_cannot_be_compiled_is_shown_once(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("x = (1,\n\nif x\n")
    done = mscomm_run("-n", 3, path)
    assert done.stderr.count("SyntaxError") == 2 and '[0-2]   File "' in done.stderr
    assert done.stderr.splitlines()[-1].startswith("mscomm run: ranks 0-2 failed: SyntaxError: ")


def test_a_failure_that_was_caught_is_not_the_cause(script, tmp_path):
    body = (
        "pair = mscomm.split(color=rank // 2)\n"
        "if rank != 1:\n    try: mscomm.barrier(group=pair, timeout=0.5 if rank == 0 else 60)\n"
        f"    except mscomm.CollectiveTimeout: open('{tmp_path}/caught', 'w').close()\n"
        f"while not os.path.exists('{tmp_path}/caught'): time.sleep(0.01)\n"
        "if rank == 2: raise ValueError('later')\nmscomm.barrier()"
    )
    done = mscomm_run("-n", 3, script(body))
    assert "mscomm run: rank 2 failed first: ValueError: later (train.py:11)" in done.stderr.splitlines()[-1], (
        done.stderr
    )


def test_after_a_time_limit_the_rank_that_was_waited_for_is_named(script):
    path = script("if rank == 1: time.sleep(1000)\nmscomm.all_reduce(np.ones(1), timeout=1)")
    done = run([*patched_run(REPORT_S=0.5), "-n", "3", path])
    last = done.stderr.splitlines()[-1]
    assert re.match(r"mscomm run: CollectiveTimeout after .* Waiting for: rank 1 \(.*has made no call yet", last), last
    assert done.stderr.count("CollectiveTimeout") == 2


def test_frames_of_the_user_inside_those_of_mscomm_stay(script):
    body = (
        "from mscomm import dataset\ndef source(i):\n    raise KeyError('lost')\n"
        "class Images:\n    def __len__(self): return 4\n    def __getitem__(self, i): return source(i)\n"
        "for _ in dataset.GeneratorDataset(Images(), ['x']).create_dict_iterator(): pass"
    )
    done = mscomm_run("-n", 1, script(body))
    assert "in source" in done.stderr and "__getitem__" in done.stderr, done.stderr
    assert f"{os.sep}mscomm{os.sep}dataset" not in done.stderr
    assert re.search(r"of the source: KeyError: 'lost' \(train.py:12\)$", done.stderr)


def test_what_a_rank_shows_and_goes_on_is_not_lost_or_taken_for_its_end(script):
    body = (
        "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\n"
        "print('after', rank, file=sys.stderr)\nmscomm.barrier()\ntime.sleep(0.5)\n"
        "print('later', rank, file=sys.stderr)\nif rank == 1: sys.exit(7)"
    )
    done = run([*patched_run(HOLD_S=0.1), "-n", "2", script(body)])
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("mscomm run: rank 1 failed first: exit code 7")
    # The ranks' outputs differ, so both are shown in full: first the traceback, then what the rank prints later.
    for rank in range(2):
        mine = [line.removeprefix(f"[{rank}] ") for line in lines if line.startswith(f"[{rank}] ")]
        assert mine[0] == "Traceback (most recent call last):"
        assert mine[-3:] == ["ZeroDivisionError: division by zero", f"after {rank}", f"later {rank}"]


def test_a_log_has_what_its_rank_wrote(script, tmp_path):
    path = script("raise ValueError('bad')")
    mscomm_run("-n", 2, "--log_dir", tmp_path / "logs", path)
    for rank in range(2):
        text = (tmp_path / f"logs/worker_{rank}.log").read_text()
        assert text.startswith("Traceback") and text.endswith("\nValueError: bad\n")


def test_a_traceback_is_shown_though_its_rank_is_killed_at_once(script):
    text = 'Traceback (most recent call last):\n  File "a.py", line 3\nValue'
    body = f"sys.stderr.write({text!r})\nos.kill(os.getpid(), 9)"
    done = mscomm_run("-n", 1, script(body))
    assert done.stderr.splitlines()[:3] == [
        "[0] Traceback (most recent call last):",
        '[0]   File "a.py", line 3',
        "[0] Value",
    ]
    assert "rank 0 failed first: killed by SIGKILL" in done.stderr.splitlines()[-1]


def test_a_hook_of_the_users_is_called_with_the_short_traceback(script):
    body = (
        "import traceback\ndef hook(kind, error, trace):\n"
        "    print('hook', [f.name for f in traceback.extract_tb(trace)], error.__cause__)\n"
        "sys.excepthook = hook\nmscomm.all_reduce(np.array(['a']))"
    )
    # In the first run, the user's hook is set after init(), and so replaces mscomm's hook. In the second run, the
    # user's hook is set before init(), and mscomm's hook calls it.
    after = mscomm_run("-n", 1, script(body))
    assert "[0] hook ['<module>', 'checked_code'" in after.stdout
    path = script("")
    path.write_text(PREAMBLE + body.replace("mscomm.all_reduce", "mscomm.init()\nmscomm.all_reduce"))
    assert "[0] hook ['<module>'] None" in mscomm_run("-n", 1, path).stdout


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_is_one_line_that_tells_where_the_ranks_were(script, tmp_path, times):
    body = f"open(f'{tmp_path}/up{{rank}}', 'w').write('up')\nif rank == 1:\n    time.sleep(1000)\nmscomm.barrier()"
    command = ["env", "--default-signal=INT", *patched_run(REPORT_S=60.0), "-n", "3", script(body)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    for rank in range(3):
        appears(tmp_path / f"up{rank}")
    time.sleep(0.3)  # by then, the ranks are probably in their calls
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    places = "ranks 0,2 at train.py:9; rank 1 at train.py:8"
    assert re.fullmatch(rf"mscomm run: ended by Ctrl-C after \S+ s: {places}\n", said), said
    assert process.returncode == 128 + signal.SIGINT


def test_what_a_rank_writes_after_ctrl_c_is_shown(script, tmp_path):
    body = (
        "import traceback\ntry:\n    try: 1 / 0\n    except ZeroDivisionError: traceback.print_exc()\n"
        f"    open('{tmp_path}/up', 'w').write('up')\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    traceback.print_exc()\n    print('saved', file=sys.stderr)\n    sys.exit(3)"
    )
    command = ["env", "--default-signal=INT", *patched_run(REPORT_S=60.0), "-n", "1", script(body)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    appears(tmp_path / "up")
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1].splitlines()
    assert said[-3:-1] == ["[0] ZeroDivisionError: division by zero", "[0] saved"], said
    assert "KeyboardInterrupt" not in "".join(said) and said[-1].startswith("mscomm run: ended by Ctrl-C"), said


def test_under_other_launchers_too_the_frames_are_the_users(script, port):
    path = script("mscomm.all_reduce(np.ones(10 + (rank == 1), np.float32))")
    env = {**os.environ, "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port)}
    roles = ["MS_SCHED", "MS_WORKER", "MS_WORKER"]
    processes = [
        subprocess.Popen([sys.executable, path], stderr=subprocess.PIPE, text=True, env={**env, "MS_ROLE": role})
        for role in roles
    ]
    said = [process.communicate(timeout=60)[1] for process in processes]
    for text in said[1:]:
        assert "Mismatch" in text and 'train.py", line 6' in text
        assert "direct cause" not in text and f"{os.sep}mscomm{os.sep}group" not in text


def test_the_last_exception_of_a_chain_counts():
    text = (
        "Traceback (most recent call last):\n"
        '  File "/a/train.py", line 3, in f\n    g()\n'
        "KeyError: 'x'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/a/train.py", line 5, in <module>\n    f()\n'
        '  File "/usr/lib/python3/dist-packages/torch/nn.py", line 9, in f\n    raise\n'
        "RuntimeError: several\nlines\n"
    )
    assert str(last_words(text.encode().split(b"\n"))) == "RuntimeError: several (train.py:5)"


@pytest.mark.parametrize(
    "first",
    [
        "Exception ignored in atexit callback: <function f>",
        "Exception ignored in: <module 'threading'>",
        "Error in sys.excepthook:",
    ],
)
def test_an_exception_that_did_not_end_the_program_does_not_count(first):
    """If a second Ctrl-C arrives while the rank is still ending because of the first, Python prints a second traceback.
    Only the traceback of the first Ctrl-C must count.
    """
    end = ["Traceback (most recent call last):", '  File "/a/train.py", line 9, in <module>', "KeyboardInterrupt"]
    other = [first, end[0], '  File "/a/other.py", line 1, in f', "    wait()", "KeyboardInterrupt: ", ""]
    between = ["Original exception was:"] if first.startswith("Error") else []
    for lines in (other + between + end, end + other):
        raw = [line.encode() for line in lines]
        assert last_words(raw).interrupted_at == "train.py:9"
        tracebacks = Tracebacks(io.BytesIO(), full=False)
        tracebacks.interrupt()
        assert tracebacks.take(0, raw) == [] and tracebacks.release() == b""


def test_a_second_ctrl_c_that_python_ignores_is_not_shown():
    """The second Ctrl-C arrives in an atexit callback, after the output about the first one was printed. If the
    callback raises a different exception, Python's output about it must be shown.
    """
    ignored = [
        "Exception ignored in atexit callback: <function f>",
        "Traceback (most recent call last):",
        '  File "/a/other.py", line 1, in f',
        "    wait()",
        "{}",
        "",
    ]
    tracebacks = Tracebacks(io.BytesIO(), full=False)
    tracebacks.interrupt()
    tracebacks.take(0, "\n".join(ignored).format("KeyboardInterrupt: ").encode().split(b"\n"))
    assert tracebacks.release() == b""
    tracebacks.take(0, "\n".join(ignored).format("OSError: disk full").encode().split(b"\n"))
    assert tracebacks.release().count(b"\n") == len(ignored)


def test_what_is_held_when_a_second_ctrl_c_comes_stays_held():
    traceback = [b"Traceback (most recent call last):", b'  File "/a/train.py", line 9, in <module>']
    shown = io.BytesIO()
    tracebacks = Tracebacks(shown, full=False)
    tracebacks.interrupt()
    tracebacks.take(0, traceback)
    tracebacks.interrupt()
    tracebacks.take(0, [b"KeyboardInterrupt"])
    assert tracebacks.release() == b"" and shown.getvalue() == b""


def test_not_more_than_a_part_is_held_be_it_of_empty_lines():
    class Shown:
        data = b""

        def write(self, data):
            self.data += data

    shown = Shown()
    held = Tracebacks(shown, full=False).take(0, [b"Traceback (most recent call last):", *[b""] * (1 << 18)])
    assert held == [] and shown.data.count(b"\n") == (1 << 18) + 1


def test_ranks_in_a_row_are_written_as_a_range():
    assert numbers([3, 0, 2, 5, 6, 7, 9]) == "0,2,3,5-7,9"
