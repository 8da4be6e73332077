"""Runs ten common failures on 4 ranks, and writes what they print into docs/errors.md and README.md.

    python docs/screens.py          # replaces the screens in both pages

Parts that differ from run to run (process ids, host, times, folders) are replaced by fixed text. tests/test_screens.py
runs the failures as well.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs/errors.md")
SCREEN_LINES, SCREEN_COLUMNS = 24, 80


class Failure(NamedTuple):
    """Describes a program that fails, how it is started, and what is done to it while it runs."""

    about: str
    program: str
    cause: str  # the part of the last line that names the cause
    remedy: str  # the part of the last line that tells or shows the user what to do
    options: str = "-n 4"
    script: str = "train.py"  # the name in the command
    until: str = ""  # a file that each rank creates. `then` is called after all ranks have created theirs
    then: Callable[[subprocess.Popen[str]], None] = lambda process: None


_START = "import os, signal, time\nimport numpy as np\nimport mscomm\n\nmscomm.init()\nrank = mscomm.get_rank()\n"

FAILURES = {
    "mismatch": Failure(
        "Rank 1 passes an array of a different size.",
        f"{_START}loss = np.ones(10 if rank != 1 else 100, np.float32)\nmscomm.all_reduce(loss)\n",
        cause="rank 1 called all_reduce #1 (float32[100], sum)",
        remedy="Every rank must make the same calls",
    ),
    "killed": Failure(
        "Rank 2 is killed while the other ranks are in a collective call.",
        f"{_START}for step in range(100):\n    if step == 7 and rank == 2:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n    mscomm.all_reduce(np.ones(10))\n",
        cause="rank 2 failed first: killed by SIGKILL",
        remedy="see dmesg",
    ),
    "exception": Failure(
        "Rank 3 raises an exception of its own.",
        f"{_START}if rank == 3:\n    raise ValueError('no such column: price')\nmscomm.barrier()\n",
        cause="rank 3 failed first: ValueError: no such column: price",
        remedy="(train.py:8)",
    ),
    "late": Failure(
        "Rank 1 does not reach a collective call in time.",
        f"{_START}if rank == 1:\n    time.sleep(600)\nmscomm.all_reduce(np.ones(10), timeout=2)\n",
        cause="rank 1 (pid 4101 on host node1): has made no call yet",
        remedy="larger timeout",
    ),
    "argument": Failure(
        "A call is passed an argument that it does not accept.",
        f"{_START}mscomm.all_reduce([1.0, 2.0])\n",
        cause="ranks 0-3 failed: TypeError: all_reduce: x is a list",
        remedy="give it as np.asarray(x)",
    ),
    "backend": Failure(
        "The machine has no GPU.",
        'import mscomm\n\nmscomm.init("nccl")\n',
        cause="cannot open libcuda.so.1, NVIDIA's driver",
        remedy="Without a GPU, use init(",
    ),
    "module": Failure(
        "A module is missing.",
        "import mscomm\nimport pandaz\n",
        cause="ModuleNotFoundError: No module named",
        remedy="Install it for",
    ),
    "script": Failure(
        "The name of the script is misspelt.",
        "",
        cause="there is no script trian.py",
        remedy="did you mean train.py?",
        script="trian.py",
    ),
    "port": Failure(
        "The port of a two-host job is already in use.",
        _START,
        cause="Address already in use",
        remedy="the port must be free",
        options="--nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port {taken} -n 4",
    ),
    "ctrl-c": Failure(
        "A job hangs, and the user presses Ctrl-C.",
        f"{_START}open(f'up{{rank}}', 'w').close()\nif rank == 1:\n    time.sleep(600)\nmscomm.barrier()\n",
        cause="ended by Ctrl-C",
        remedy="rank 1 at train.py:9",
        until="up{rank}",
        then=lambda process: process.send_signal(signal.SIGINT),
    ),
}


def shown(failure: Failure) -> str:
    """Run the failure. Return its command and its output, as a terminal shows them."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        Path(folder, "train.py").write_text(failure.program)
        words = ["run", *failure.options.format(taken=port).split(), failure.script]
        env = {name: text for name, text in os.environ.items() if not name.startswith(("MS_", "MSCOMM_", "PET_"))}
        process = subprocess.Popen(
            ["env", "--default-signal=INT", sys.executable, "-m", "mscomm", *words],
            cwd=folder,
            env={**env, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if failure.until:
            _wait_for([Path(folder, failure.until.format(rank=rank)) for rank in range(4)])
            time.sleep(0.5)  # lets all ranks reach the call that hangs
        failure.then(process)
        said = process.communicate(timeout=60)[0]
        replaced = {os.path.realpath(folder): "/home/ann", folder: "/home/ann", port: "8118", sys.executable: "python"}
        replaced[socket.gethostname()] = "node1"
        text = f"$ mscomm {' '.join(words)}\n{said}"
        for old, new in replaced.items():
            text = text.replace(old, new) if len(old) > 2 else re.sub(rf"\b{re.escape(old)}\b", new, text)
    pids = list(dict.fromkeys(re.findall(r"\bpid (\d+)", text)))
    text = re.sub(r"(by pid \d+ )\(.*\)\.", r"\1(python other.py).", text)  # this program holds the port
    text = re.sub(r"\bpid (\d+)", lambda found: f"pid {4101 + pids.index(found[1])}", text)
    text = re.sub(r"rank \d+ has failed", "rank 0 has failed", text)  # any of the ranks that wait
    return re.sub(r"after \d+\.\d s", "after 2.4 s", text)


def lines_of(screen: str) -> int:
    """Return how many lines of a terminal the screen fills."""
    return sum(max(1, len(textwrap.wrap(line, SCREEN_COLUMNS)) or 1) for line in screen.splitlines())


def _wait_for(files: list[Path], timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not all(file.exists() for file in files):
        if time.monotonic() > until:
            raise TimeoutError(f"no {', '.join(str(file) for file in files if not file.exists())}")
        time.sleep(0.05)


def main() -> None:
    screens = {name: shown(failure) for name, failure in FAILURES.items()}
    for page in PAGES:
        text = page.read_text()
        for name, failure in FAILURES.items():
            block = f"{failure.about}\n\n```console\n{screens[name]}```\n"
            marked = rf"(<!-- screen {name} -->\n).*?(<!-- end -->)"
            text = re.sub(marked, lambda found, block=block: found[1] + block + found[2], text, flags=re.S)
        page.write_text(text)


if __name__ == "__main__":
    main()
