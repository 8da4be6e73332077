"""The hub as a separate process, which rank 0 starts under launchers that do not run a hub."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgpack

from mscomm.cluster.hello import UNKNOWN_JOB
from mscomm.cluster.hub import Hub
from mscomm.cluster.links import raise_descriptor_limit
from mscomm.cluster.protection import Protection
from mscomm.cluster.security import KEY_BYTES
from mscomm.errors import BackendUnavailable, Error
from mscomm.interpreter import child_environment, file_for_errors, is_frozen, own_child, python_executable

_ENDS_S = 1.0  # how long a process may take to end after its sockets were closed

_spawned: list[subprocess.Popen[bytes]] = []  # hubs that this process started; spawn() reaps hubs that have ended


class Process(subprocess.Popen[bytes]):
    """A child process that may outlive this process. Deleting this object must not cause a ResourceWarning.

    python: the interpreter that runs it. errors: the descriptor of a memory file to which the process writes its
    errors; -1 when it is closed.
    """

    python = ""
    errors = -1

    def __del__(self, *_: object) -> None:
        self.close_errors()
        self.poll()

    def close_errors(self) -> None:
        fd, self.errors = self.errors, -1
        if fd >= 0:
            os.close(fd)


def spawn(
    listener: socket.socket,
    size: int,
    key: bytes,
    topo_timeout_s: float,
    named: bytes = UNKNOWN_JOB,
    protection: Protection | None = None,
) -> Process:
    """Start a hub that serves the listener. Rank 0 calls this. The hub process exits by itself when the job has ended.

    The secrets are passed through a pipe, so they are neither in argv nor in the environment. The caller need not wait
    for the process, because the next spawn() reaps it. The hub process inherits none of our standard streams. If it
    held them open, a launcher that reads them would wait until the hub ends. Connect to the hub in connecting(). Raise
    what python_executable() and Protection.for_hub() raise.
    """
    python = python_executable("the hub")
    if is_frozen():  # it has no modules that another interpreter could import
        flags, folders = ["-I"], []
    else:  # the folders in which this process found mscomm and msgpack
        flags = ["-I", "-S"]
        folders = [str(Path(__file__).absolute().parents[2]), str(Path(str(msgpack.__file__)).absolute().parents[1])]
    program = "import sys; sys.path += sys.argv[5:]; from mscomm.cluster.hub_process import main; main(*sys.argv[1:5])"
    _spawned[:] = [process for process in _spawned if process.poll() is None]
    with ExitStack() as stack:
        reader, writer = os.pipe()
        stack.callback(os.close, reader)
        stack.callback(os.close, writer)
        secrets = key + (protection or Protection(permit_plain=True)).for_hub()
        passed = [listener.fileno(), reader]
        with contextlib.suppress(OSError, AttributeError):  # the kernel, Python or a sandbox may not offer pidfds
            passed.append(os.pidfd_open(os.getpid()))
            stack.callback(os.close, passed[-1])
        # If our standard streams are closed, these descriptors may have the numbers 0 to 2. The child needs these
        # numbers for its own standard streams, so pass copies of the descriptors with higher numbers.
        fds = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in passed]
        for fd in fds:
            stack.callback(os.close, fd)
        errors = file_for_errors("mscomm-hub")
        closing_errors = stack.enter_context(ExitStack())
        closing_errors.callback(os.close, errors)
        values = [",".join(map(str, fds)), str(size), str(topo_timeout_s), named.hex()]
        process = Process(
            [python, *flags, "-c", program, *values, *folders],
            env=child_environment(os.environ),  # a copy: another thread may change os.environ while the child starts
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=fds,
            start_new_session=True,  # a signal to the ranks' process group must not kill the hub
        )
        closing_errors.pop_all()
        process.python, process.errors = python, errors
        with open(writer, "wb", closefd=False) as pipe, contextlib.suppress(BrokenPipeError):
            # After the start: the process reads, so the pipe may be smaller than the secrets. The process must not wait
            # for the end of the pipe, because another thread may just have forked a child that holds it open. If the
            # process has ended already (BrokenPipeError), connecting() says how.
            pipe.write(len(secrets).to_bytes(8, "little") + secrets)
    _spawned.append(process)
    return process


@contextlib.contextmanager
def connecting(process: Process) -> Iterator[None]:
    """A context in which rank 0 connects to the hub that it has started. On an error, kill the hub.

    If the hub process had ended by itself, raise BackendUnavailable, which says how, in place of the error.
    """
    try:
        yield
    except (Error, OSError) as error:
        if how := _how_it_ended(process):
            raise BackendUnavailable(f"the process of the hub, which rank 0 has started, {how}") from error
        end(process)
        raise
    except BaseException:
        end(process)
        raise
    finally:
        process.close_errors()


def _how_it_ended(process: Process) -> str:
    """Return how the process has ended, with the last line that it wrote; "" if it is running."""
    try:
        status = process.wait(_ENDS_S)
    except subprocess.TimeoutExpired:
        return ""
    names = {number.value: number.name for number in signal.Signals}
    how = f"was killed by {names.get(-status, f'signal {-status}')}" if status < 0 else f"ended with exit code {status}"
    lines = os.pread(process.errors, 1 << 20, 0).decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote no error")
    return f"{how}: {last} ({process.python})"


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a hub that spawn() started, and reap it."""
    process.kill()
    process.wait()


def main(fds: str, size: str, topo_timeout_s: str, named: str) -> None:
    """Run the hub in the spawned process."""
    own_child()
    listener_fd, key_fd, *starter = map(int, fds.split(","))
    raise_descriptor_limit()
    with open(key_fd, "rb") as pipe:
        size_of_secrets = int.from_bytes(pipe.read(8), "little")
        secrets = pipe.read(size_of_secrets)
        key, passed = secrets[:KEY_BYTES], secrets[KEY_BYTES:]
    if len(secrets) < max(size_of_secrets, KEY_BYTES):
        sys.exit("rank 0 ended before it had passed on the key")  # without the key, anybody could join
    with socket.socket(fileno=listener_fd) as listener:
        listener.set_inheritable(False)
        hub = Hub(
            int(size),
            key=key,
            topo_timeout_s=float(topo_timeout_s),
            ranks_known=True,
            named=bytes.fromhex(named),
            protection=Protection.in_hub(passed),
        )
        hub.listen(listener)
        for pidfd in starter:
            hub.started_by(0, pidfd)
        hub.serve()
