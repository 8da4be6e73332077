"""An interpreter that has imported a test file and forks the ranks of its tests.

A forked rank takes 20 ms of CPU time to join a job of two ranks and to end; a new interpreter that imports NumPy and
mscomm takes 180 ms. A forked rank is a process of its own, which joins and fails like any other. It also ends like any
other if the order says so, or if it fails. Otherwise it ends without finalizing Python (see leave()).

    python interpreter.py serve FILE DESCRIPTOR    # forks a rank for each order from the socket DESCRIPTOR
    python interpreter.py be ORDER                 # becomes one rank itself
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

from mscomm.bootstrap.launcher import CONTROL_FD

# The number of interpreters for a test file. Ranks that are forked from one interpreter hash strings alike, so they
# iterate over sets in the same order. Ranks of different interpreters hash strings differently, as in a real job. So
# with two interpreters, tests can find code that works only if all ranks have the same order.
ALIKE = 2
# The prefixes of variables that a process reads only when it starts.
AT_START = ("PYTHON", "LD_", "OMP_", "MALLOC_", "JAX_", "XLA_")
# What a rank imports while it joins. The interpreter has imported these modules before it forks the rank.
_JOINING = (
    *("accelerators.hccl", "accelerators.nccl", "arrays.described", "arrays.device", "bootstrap.again"),
    *("bootstrap.ms_cluster", "cluster.assemble", "cluster.member", "cluster.group_links", "notices", "works"),
)
_MOST_BYTES = 200_000  # the largest size of an order, in bytes
_ANSWERS_S = 120.0  # the longest wait for an answer: long enough to import PyTorch on a busy machine

Order = dict[str, Any]


class Interpreter:
    """Starts an interpreter process, and sends it orders from the tests."""

    def __init__(self, file: str, env: dict[str, str]) -> None:
        self._env = env
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}  # for each rank that has ended, its process id and its exit code
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", __file__, "serve", file, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._socket.settimeout(_ANSWERS_S)
        self._can_fork = self._socket.recv(1) == b"y"

    def suits(self, env: dict[str, str]) -> bool:
        """Return whether a forked rank with this environment would behave like a newly started process."""
        names = [name for name in {**env, **self._env} if name.startswith(AT_START)]
        return self._can_fork and all(env.get(name) == self._env.get(name) for name in names)

    def start(self, test: Order, env: dict[str, str], log: Path, control: socket.socket) -> Forked:
        order = {"test": test, "env": env, "log": str(log), "folder": os.getcwd()}
        with self._lock:
            self._socket.settimeout(_ANSWERS_S)
            socket.send_fds(self._socket, [json.dumps(order).encode()], [control.fileno()])
            while not (pid := self._take(self._socket.recv(100))):
                pass
        return Forked(self, pid)

    def code(self, pid: int, wait: bool) -> int | None:
        """Return a rank's exit code. If the rank is still running, wait, or return None if `wait` is false."""
        with self._lock:
            self._socket.settimeout(_ANSWERS_S if wait else 0.0)
            while pid not in self._codes:
                try:
                    self._take(self._socket.recv(100))
                except BlockingIOError:
                    return None
        return self._codes[pid]

    def _take(self, answer: bytes) -> int:
        """Handle an answer from the interpreter. If the answer says that a rank has started, return the rank's process
        id. If it says that a rank has ended, return 0.
        """
        if not answer:
            raise RuntimeError(f"the interpreter that forks ranks has ended: {self._process.wait()}")
        pid, code = json.loads(answer)
        if code is None:
            self._codes.pop(pid, None)  # forget the code of an earlier process with this id
            return int(pid)
        self._codes[pid] = code
        return 0

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


class Forked:
    """A forked rank, with the methods of subprocess.Popen that the tests use."""

    def __init__(self, interpreter: Interpreter, pid: int) -> None:
        self._interpreter = interpreter
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._interpreter.code(self.pid, wait=False)
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._interpreter.code(self.pid, wait=True)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # raised if the rank has ended, but its code is not here yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_of_file: tuple[str, dict[int, Interpreter]] = ("", {})
_making = threading.Lock()  # some tests start jobs in several threads


def of(file: str, rank: int, env: dict[str, str]) -> Interpreter:
    """Return the interpreter that forks this rank for the tests in the file. End the interpreters of other files."""
    global _of_file
    with _making:
        if _of_file[0] != file:
            close()
            _of_file = (file, {})
        if (which := rank % ALIKE) not in _of_file[1]:
            _of_file[1][which] = Interpreter(file, env)
        return _of_file[1][which]


@atexit.register
def close() -> None:
    """End the interpreters of the last file, and wait for them."""
    global _of_file
    for one in _of_file[1].values():
        one.close()
    _of_file = ("", {})


# -- code that runs in the interpreter process


def import_tests(file: str) -> None:
    spec = importlib.util.spec_from_file_location("under_test", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["under_test"] = module
    spec.loader.exec_module(module)


def _serve(orders: socket.socket) -> Order | None:
    """Fork a rank for each order. In each forked rank, return the rank's order. In the interpreter itself, return None
    when the tests are over.
    """
    orders.send(b"y" if len(os.listdir("/proc/self/task")) == 1 else b"n")
    with selectors.DefaultSelector() as selector, orders:
        selector.register(orders, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is orders:
                    message, descriptors, _, _ = socket.recv_fds(orders, _MOST_BYTES, 1)
                    if not message:
                        return None
                    pid = os.fork()
                    if pid == 0:
                        for other in [key.fd for key in selector.get_map().values() if key.data]:
                            os.close(other)
                        # Make the process group before answering, because the tests may kill the group as soon as they
                        # have the answer.
                        os.setsid()
                        orders.send(json.dumps([os.getpid(), None]).encode())
                        return {**json.loads(message), "descriptor": descriptors[0]}
                    os.close(descriptors[0])
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                else:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    status = os.waitpid(key.data, 0)[1]
                    orders.send(json.dumps([key.data, os.waitstatus_to_exitcode(status)]).encode())


def prepare(file: str) -> None:
    """Import what ranks need, and leave little for each of them to do."""
    import_tests(file)
    for name in _JOINING:
        importlib.import_module(f"mscomm.{name}")
    sysconfig.get_config_vars()  # reads a file; later calls do not
    gc.collect()
    gc.freeze()  # otherwise a rank's garbage collector would write to all objects, and so copy all their pages


def leave(code: int = 0) -> None:
    """End this process as the end of a program does, but without finalizing Python, which takes 30 ms.

    code: the exit code, or the negative number of the signal by which the process ends.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _become(order: Order) -> None:
    """Set what a newly started process would have: its folder, environment and control link, and the log as output."""
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["env"])
    os.environ[CONTROL_FD] = str(order["descriptor"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _main(what: str, *arguments: str) -> None:
    if what == "serve":
        file, descriptor = arguments
        prepare(file)
        order = _serve(socket.socket(fileno=int(descriptor)))
        if order is None:
            return
        _become(order)
        test = order["test"]
    else:
        test = json.loads(arguments[0])
        import_tests(test["file"])
    from ranks import be_a_rank

    be_a_rank(test)
    if what == "serve" and not test.get("finalizes", True):
        leave()


if __name__ == "__main__":
    _main(*sys.argv[1:])
