"""Joins a job whose processes are configured with MS_* variables, as in MindSpore's dynamic cluster.

The process with MS_ROLE=MS_SCHED is the scheduler (`serve`), and the workers connect to it. The processes may start in
any order.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, NoReturn

from mscomm import environment
from mscomm.bootstrap import rendezvous
from mscomm.bootstrap.invitation import Invitation, Seat
from mscomm.cluster import interfaces, links, recovery_file, security
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.deadline import Deadline, join_timeout_s
from mscomm.cluster.hello import CONTROL, UNKNOWN_RANK, UNKNOWN_RUN, package_version
from mscomm.cluster.hub import Hub
from mscomm.cluster.protection import Protection
from mscomm.errors import BackendUnavailable
from mscomm.writing import LogLines

NAME = "MS_* cluster"
PLACE = ((), ("MS_WORKER_NUM",))  # no variable gives the rank: the scheduler assigns it
_LAST_LINES_S = 1.0  # how long the scheduler waits at its end for the reader of its log


class Settings(NamedTuple):
    """The checked values of the MS_* variables."""

    host: str
    port: int
    size: int
    node_id: str | None
    worker_ip: str | None
    topo_timeout_s: float
    recovery: bool
    recovery_path: str | None


def detect(env: Mapping[str, str]) -> bool:
    return "MS_ROLE" in env


def accept(env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
    """In a worker, connect to the scheduler. In the scheduler, serve the job and then exit, without returning."""
    role = env["MS_ROLE"]
    if role == "MS_SCHED":
        serve(env, protection)
    if role != "MS_WORKER":
        raise ValueError(
            f"MS_ROLE={role!r}: expected MS_WORKER or MS_SCHED"
            + ("; mscomm has no parameter servers, so do not start this process" if role == "MS_PSERVER" else "")
        )
    settings = read(env)
    deadline = deadline.within(settings.topo_timeout_s)
    where = f"the scheduler at {interfaces.endpoint(settings.host, settings.port)}"
    if settings.worker_ip:
        _require_own(settings.worker_ip)

    at = rendezvous.connecting_address(settings.host, settings.port, env, protection)

    def reach(deadline: Deadline, run: bytes, key_at: Callable[[Any], bytes]) -> tuple[ByteStream, bytes]:
        return rendezvous.reach(
            [(at, settings.port)],
            deadline,
            key_at,
            links.newcomer(env, run=run),
            f"no scheduler at {interfaces.endpoint(settings.host, settings.port)} (MS_SCHED_HOST, MS_SCHED_PORT)",
            "Start one with MS_ROLE=MS_SCHED and the same variables, or with `mscomm sched`",
            source=settings.worker_ip,
            protection=protection,
        )

    def admission(address: Any) -> bytes:
        return security.admission_key(security.job_key(env, address[0], address[1], protection), CONTROL)

    stream, key = reach(deadline, UNKNOWN_RUN, admission)
    invitation = Invitation(NAME, Seat(UNKNOWN_RANK, settings.size, None, one_host=False), stream, key, where)
    invitation.node_id = settings.node_id
    if settings.recovery:
        invitation.dial_again = lambda run, deadline: reach(deadline, run, lambda _: key)[0]
    return invitation


def _require_own(worker_ip: str) -> None:
    """Raise ValueError unless this host has the address of MS_WORKER_IP."""
    with socket.socket(socket.AF_INET6 if ":" in worker_ip else socket.AF_INET) as probe:
        try:
            probe.bind((worker_ip, 0))
        except OSError as error:
            raise ValueError(f"MS_WORKER_IP={worker_ip!r}: this host does not have that address ({error})") from error


def read(env: Mapping[str, str]) -> Settings:
    """Read and check all MS_* variables.

    If one of them is invalid, raise ValueError, which names the variable, its value, and what is expected.
    """
    host = _required(env, "MS_SCHED_HOST", "the scheduler's address or host name, e.g. 127.0.0.1")
    port = _required(env, "MS_SCHED_PORT", "a port from 1 to 65535, the same for the scheduler and all workers")
    size = _required(env, "MS_WORKER_NUM", "the number of workers, 1 or more, the same in every process")
    environment.read("MS_SERVER_NUM", env)
    node_id, worker_ip = (environment.read(name, env) for name in ("MS_NODE_ID", "MS_WORKER_IP"))
    recovery = environment.read("MS_ENABLE_RECOVERY", env) == 1
    path = environment.read("MS_RECOVERY_PATH", env) if recovery else None
    return Settings(host, port, size, node_id, worker_ip, join_timeout_s(env), recovery, path)


def _required(env: Mapping[str, str], name: str, expected: str) -> Any:
    value = environment.read(name, env)
    if isinstance(value, str):
        value = value.strip("[]")  # IPv6 addresses may have brackets, as in URLs
    if value in (None, ""):
        raise ValueError(f"{f'{name}={env[name]!r}' if env.get(name) else f'{name} is not set'}: expected {expected}")
    return value


# -- the scheduler


def serve(env: Mapping[str, str], protection: Protection) -> NoReturn:
    """Serve as the scheduler until the job has ended. Then exit with status 0, or 1 if the job failed.

    If the scheduler cannot start, for example because a variable is invalid or a port is taken, raise an exception.
    """
    settings = read(env)
    links.raise_descriptor_limit()
    with ExitStack() as stack:
        # The hub's thread must not wait for a reader, who may not read at all.
        log = LogLines(sys.stdout, "mscomm scheduler: ")
        stack.callback(log.close, _LAST_LINES_S)
        claim = stack.enter_context(socket.socket(socket.AF_UNIX))
        with _listening(settings, env, protection):
            name, port = settings.host, settings.port
            at = rendezvous.listening_address(name, port, env, protection, log.add)
            listener = stack.enter_context(rendezvous.bind(at, port))
            host, port = listener.getsockname()[:2]
            # Several schedulers can bind the port until one of them listens, and each of them would replace the key
            # file. So also bind an abstract unix name, which only one process can bind. Like the port, the name belongs
            # to the network namespace. The kernel frees the name when the process ends.
            claim.bind(f"\0mscomm-sched-{host}-{port}")
        folder, kept_in = settings.recovery_path, ""
        if folder:
            stack.callback(os.close, recovery_file.lock(folder))
            kept_in = os.path.join(folder, recovery_file.KEY_NAME)
        key, file = security.scheduler_key(env, host, port, protection, kept_in)
        if file:
            stack.callback(file.remove)
        recovery = None
        if folder:
            job = {"port": port, "workers": settings.size, "id": environment.read("MSCOMM_JOB_ID", env)}
            job["mscomm"] = package_version()
            recovery = recovery_file.RecoveryFile(folder, job, key)
        with _listening(settings, env, protection):
            # The key file is written already, so a worker that can connect can also read the key.
            listener.listen(socket.SOMAXCONN)
        hub = Hub(
            settings.size,
            key=key,
            topo_timeout_s=settings.topo_timeout_s,
            ranks_known=False,
            restarts=settings.recovery,
            named=links.job_of(env),
            log=log.add,
            protection=protection,
            recovery=recovery,
        )
        hub.listen(listener)
        _stop_on_signals(hub.stop)
        log.add(f"waiting at {interfaces.endpoint(host, port)} for {settings.size} workers")
        outcome = hub.serve()
        if recovery and hub.is_over:
            try:
                recovery.remove()
            except OSError as error:
                log.add(f"cannot remove {recovery.path}: {error.strerror or error}")
    _leave(0 if outcome.ok else 1, flushes=log.flush(0) == 0)


@contextlib.contextmanager
def _listening(settings: Settings, env: Mapping[str, str], protection: Protection) -> Iterator[None]:
    """Turn an OSError into a BackendUnavailable that says why we cannot listen at MS_SCHED_HOST:MS_SCHED_PORT."""
    try:
        yield
    except socket.gaierror as error:
        raise BackendUnavailable(f"{_where(settings)}: the name cannot be resolved ({error.strerror})") from error
    except OSError as error:
        why = _why_not(settings, error, env, protection)
        raise BackendUnavailable(f"cannot listen at {_where(settings)}: {why}") from error


def _why_not(settings: Settings, error: OSError, env: Mapping[str, str], protection: Protection) -> str:
    taken = ""
    if error.errno == errno.EADDRINUSE:
        # Use the key of the address in MS_SCHED_HOST, not the key of the address that we connect to. If MS_SCHED_HOST
        # is a wildcard address such as 0.0.0.0, we connect to a loopback address, which can have another key.
        host = str(socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][4][0])

        def key(_: object) -> bytes:
            return security.job_key(env, host, settings.port, protection)

        taken = rendezvous.contend(host, settings.port, key, env, protection)
    return {
        errno.EADDRINUSE: f"the port is taken{taken}, perhaps by the scheduler of another job"
        + ("" if taken else f" (see: ss -atxnp | grep {settings.port})")
        + "; end that, or give this job another MS_SCHED_PORT, in its workers too",
        errno.EADDRNOTAVAIL: "this host does not have that address; start the scheduler on the host that has it",
        errno.EACCES: "ports below 1024 need privileges; choose a higher MS_SCHED_PORT",
    }.get(error.errno or 0, error.strerror or str(error))


def _where(settings: Settings) -> str:
    return f"MS_SCHED_HOST={settings.host}, MS_SCHED_PORT={settings.port}"


def _stop_on_signals(stop: Callable[[str], None]) -> None:
    """Make SIGTERM and Ctrl-C stop the hub, so that the workers learn why, and the key file is removed.

    A second signal ends this process at once.
    """
    before: dict[signal.Signals, Any] = {}  # the handlers that we have replaced

    def ended(number: int, _: object) -> None:
        for other, handler in before.items():
            signal.signal(other, handler)
        stop(f"ended by {signal.Signals(number).name}")

    if threading.current_thread() is threading.main_thread():
        for number, default in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            if signal.getsignal(number) == default:
                before[number] = signal.signal(number, ended)


def _leave(status: int, flushes: bool) -> NoReturn:
    """End the process, like sys.exit(). Do not raise SystemExit, which under pytest would only fail a test.

    flushes: whether to write what the program has printed; this never ends if nobody reads our output.
    """
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr) if flushes else ()):
        with contextlib.suppress(OSError, ValueError):  # in case nobody reads the stream any more
            stream.flush()
    os._exit(status)
