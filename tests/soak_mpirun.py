"""For soak.py: a job whose ranks mpirun starts. SIGKILL ends mpirun at a random moment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import interpreter
from sessions import MARK, marked

ENDS_WITHIN_S = 60  # a generous bound, even on a busy machine; on an idle machine, the processes end within a second
MPIRUN = Path(sys.prefix, "bin", "mpirun")
_FLAGS = [*(["--allow-run-as-root"] if os.getuid() == 0 else []), "--oversubscribe"]
_IN_A_SCRIPT = ["sh", "-c", '"$@"; exit $?', "sh"]


class UnderMpirun:
    """The running job, with the methods of soak.Running."""

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        self.folder = folder
        self.faults: list[str] = []
        self._size = job["size"]
        self._after_s = job["after_s"]
        folder.mkdir()
        order = {"file": str(Path(__file__).with_name("soak.py")), "name": "one_rank", "init": {}}
        order["parameters"] = {"job": {**job, "folder": str(folder)}}
        command = [sys.executable, interpreter.__file__, "be", json.dumps(order)]
        if job["in_a_script"]:
            command = [*_IN_A_SCRIPT, *command]
        with (folder / "log.mpirun").open("wb") as log:
            self._mpirun = subprocess.Popen(
                [MPIRUN, *_FLAGS, "-n", str(self._size), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, MARK: str(folder), "OMP_NUM_THREADS": "1", "MSCOMM_ALGO": job["algo"]},
                start_new_session=True,
            )
        self._until = time.monotonic() + ENDS_WITHIN_S
        self._killed = False

    def look(self) -> bool:
        """Kill mpirun when all ranks have begun. Return whether processes of the job are left."""
        if not self._killed and len(list(self.folder.glob("up.*"))) == self._size:
            time.sleep(self._after_s)
            self._mpirun.kill()
            self._killed = True
            self._until = time.monotonic() + ENDS_WITHIN_S
        code = self._mpirun.poll()
        if code is not None and not self._killed:
            self.faults.append(f"mpirun ended by itself with status {code}")
            self._killed = True
        left = list(marked(self.folder)) if self._killed else [self._mpirun.pid]
        if left and time.monotonic() > self._until:
            self.faults.append(f"processes {left} did not end within {ENDS_WITHIN_S} s")
            self.kill()
            return False
        return bool(left)

    def wrong(self) -> list[str]:
        return self.faults

    def kill(self) -> None:
        self._mpirun.kill()
        self._mpirun.wait()
        for pid in marked(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
