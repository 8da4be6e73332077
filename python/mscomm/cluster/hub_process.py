"""The hub as a separate process, which rank 0 starts under launchers that do not run a hub."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import msgpack

from mscomm.cluster.hello import UNKNOWN_JOB
from mscomm.cluster.hub import Hub
from mscomm.cluster.links import raise_descriptor_limit
from mscomm.cluster.protection import Protection
from mscomm.cluster.security import KEY_BYTES

_spawned: list[subprocess.Popen[bytes]] = []  # hubs that this process started; spawn() reaps hubs that have ended


class _Detached(subprocess.Popen[bytes]):
    """A child process that may outlive this process. Deleting this object must not cause a ResourceWarning."""

    def __del__(self, *_: object) -> None:
        self.poll()


def spawn(
    listener: socket.socket,
    size: int,
    key: bytes,
    topo_timeout_s: float,
    named: bytes = UNKNOWN_JOB,
    protection: Protection | None = None,
) -> subprocess.Popen[bytes]:
    """Start a hub that serves the listener. Rank 0 calls this. The hub process exits by itself when the job has ended.

    The secrets are passed through a pipe, so they are neither in argv nor in the environment. The caller need not wait
    for the process, because the next spawn() reaps it. The hub process inherits none of our standard streams. If it
    held them open, a launcher that reads them would wait until the hub ends. Raise what Protection.for_hub() raises.
    """
    # The folders in which this process found mscomm and msgpack.
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
        values = [",".join(map(str, fds)), str(size), str(topo_timeout_s), named.hex()]
        process = _Detached(
            [sys.executable, "-I", "-S", "-c", program, *values, *folders],
            env=dict(os.environ),  # a copy: another thread may change os.environ while the child starts
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,  # a signal to the ranks' process group must not kill the hub
        )
        with open(writer, "wb", closefd=False) as pipe:
            # After the start: the process reads, so the pipe may be smaller than the secrets. The process must not wait
            # for the end of the pipe, because another thread may just have forked a child that holds it open.
            pipe.write(len(secrets).to_bytes(8, "little") + secrets)
    _spawned.append(process)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a hub that spawn() started, and reap it."""
    process.kill()
    process.wait()


def main(fds: str, size: str, topo_timeout_s: str, named: str) -> None:
    """Run the hub in the spawned process."""
    listener_fd, key_fd, *starter = map(int, fds.split(","))
    raise_descriptor_limit()
    with open(key_fd, "rb") as pipe:
        secrets = pipe.read(int.from_bytes(pipe.read(8), "little"))
        key, passed = secrets[:KEY_BYTES], secrets[KEY_BYTES:]
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
