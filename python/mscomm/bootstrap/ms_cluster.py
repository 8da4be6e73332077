"""A scheduler and workers with MS_* variables, as MindSpore's dynamic cluster starts them.

The process with MS_ROLE=MS_SCHED is the scheduler (`serve`); workers connect to it. They may start in any order.
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
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import NamedTuple, NoReturn

from mscomm import environment
from mscomm.bootstrap import rendezvous
from mscomm.bootstrap.invitation import Invitation
from mscomm.cluster import interfaces, links, security
from mscomm.cluster.deadline import Deadline, join_timeout_s
from mscomm.cluster.hub import Hub
from mscomm.errors import BackendUnavailable

NAME = "MS_* cluster"
PLACE = ((), ("MS_WORKER_NUM",))  # no variable gives the rank: the scheduler assigns it


class Settings(NamedTuple):
    """The checked values of the MS_* variables."""

    host: str
    port: int
    size: int
    node_id: str | None
    worker_ip: str | None
    topo_timeout_s: float
    recovery: bool


def detect(env: Mapping[str, str]) -> bool:
    return "MS_ROLE" in env


def accept(env: Mapping[str, str], deadline: Deadline, permit_plain: bool) -> Invitation:
    """Connect a worker to the scheduler. In the scheduler's process, serve the job and never return."""
    role = env["MS_ROLE"]
    if role == "MS_SCHED":
        serve(env, permit_plain=permit_plain)
    if role != "MS_WORKER":
        raise ValueError(
            f"MS_ROLE={role!r}: expected MS_WORKER or MS_SCHED"
            + ("; mscomm has no parameter servers, leave this process out" if role == "MS_PSERVER" else "")
        )
    settings = read(env)
    deadline = deadline.within(settings.topo_timeout_s)
    where = f"the scheduler at {interfaces.endpoint(settings.host, settings.port)}"
    key = b""

    def admit(sock: socket.socket) -> None:
        nonlocal key
        host, port = sock.getpeername()[:2]
        key = security.worker_key(env, host, port, permit_plain)
        links.greet(sock, key, links.CONTROL, links.newcomer(env), deadline)

    if settings.worker_ip:
        _require_own(settings.worker_ip)
    sock = rendezvous.reach(
        [(settings.host, settings.port)],
        deadline,
        admit,
        f"no scheduler at {interfaces.endpoint(settings.host, settings.port)} (MS_SCHED_HOST, MS_SCHED_PORT)",
        "Start one with MS_ROLE=MS_SCHED and the same variables, or with `mscomm sched`",
        source=settings.worker_ip,
    )
    return Invitation(sock, key, True, None, settings.size, None, settings.node_id, NAME, where=where)


def _require_own(worker_ip: str) -> None:
    """ValueError unless this host has the address of MS_WORKER_IP."""
    with socket.socket(socket.AF_INET6 if ":" in worker_ip else socket.AF_INET) as probe:
        try:
            probe.bind((worker_ip, 0))
        except OSError as error:
            raise ValueError(f"MS_WORKER_IP={worker_ip!r}: this host does not have that address ({error})") from error


def read(env: Mapping[str, str]) -> Settings:
    """Read and check every variable. A ValueError names the variable, its value, and what is expected."""
    host = (environment.read("MS_SCHED_HOST", env) or "").strip("[]")  # IPv6 addresses may have brackets, as in URLs
    if not host:
        raise _missing(env, "MS_SCHED_HOST", "the scheduler's address or host name, e.g. 127.0.0.1")
    port = environment.read("MS_SCHED_PORT", env)
    if port is None:
        raise _missing(env, "MS_SCHED_PORT", "a port from 1 to 65535, the same for the scheduler and all workers")
    size = environment.read("MS_WORKER_NUM", env)
    if size is None:
        raise _missing(env, "MS_WORKER_NUM", "the number of workers, 1 or more, the same in every process")
    environment.read("MS_SERVER_NUM", env)
    node_id, worker_ip = (environment.read(name, env) for name in ("MS_NODE_ID", "MS_WORKER_IP"))
    recovery = environment.read("MS_ENABLE_RECOVERY", env) == 1
    return Settings(host, port, size, node_id, worker_ip, join_timeout_s(env), recovery)


def _missing(env: Mapping[str, str], name: str, expected: str) -> ValueError:
    value = f"{name}={env[name]!r}" if env.get(name) else f"{name} is not set"
    return ValueError(f"{value}: expected {expected}")


# -- the scheduler


def serve(env: Mapping[str, str], *, permit_plain: bool = False) -> NoReturn:
    """Serve as the scheduler until the job has ended, then end the process with status 0, or 1 if the job failed.

    If the scheduler cannot start (a wrong variable, a port that is taken), this raises an exception instead.
    """
    settings = read(env)
    with ExitStack() as stack:
        claim = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener = stack.enter_context(_bind(settings, env, permit_plain))
        host, port = listener.getsockname()[:2]
        try:
            # Several schedulers could bind the port before one of them listens, and each would write its key file. An
            # abstract unix name can be bound only once. Like the port, it belongs to the network namespace. It is
            # free again when the process ends.
            claim.bind(f"\0mscomm-sched-{host}-{port}")
        except OSError as error:
            raise _cannot_listen(settings, error, env, permit_plain) from error
        key, file = security.scheduler_key(env, host, port, permit_plain)
        if file:
            stack.callback(file.remove)
        try:
            listener.listen(socket.SOMAXCONN)  # after the key file is written: a worker that can connect can read it
        except OSError as error:
            raise _cannot_listen(settings, error, env, permit_plain) from error
        hub = Hub(
            settings.size,
            key=key,
            topo_timeout_s=settings.topo_timeout_s,
            ranks_known=False,
            restarts=settings.recovery,
            named=links.job_of(env),
            log=_log,
        )
        hub.listen(listener)
        _stop_on_sigterm(hub.stop)
        _log(f"waiting at {interfaces.endpoint(host, port)} for {settings.size} workers")
        outcome = hub.serve()
    _leave(0 if outcome.ok else 1)


def _bind(settings: Settings, env: Mapping[str, str], permit_plain: bool) -> socket.socket:
    """A socket bound to exactly MS_SCHED_HOST:MS_SCHED_PORT."""
    try:
        return rendezvous.bind(settings.host, settings.port)
    except socket.gaierror as error:
        raise BackendUnavailable(f"{_where(settings)}: the name cannot be resolved ({error.strerror})") from error
    except OSError as error:
        raise _cannot_listen(settings, error, env, permit_plain) from error


def _cannot_listen(
    settings: Settings, error: OSError, env: Mapping[str, str], permit_plain: bool
) -> BackendUnavailable:
    taken = ""
    if error.errno == errno.EADDRINUSE:
        address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][4][:2]
        host, port = str(address[0]), settings.port
        taken = rendezvous.contend(host, port, lambda: security.worker_key(env, host, port, permit_plain), env)
    what = {
        errno.EADDRINUSE: f"the port is taken{taken}, perhaps by the scheduler of another job"
        + ("" if taken else f" (see: ss -ltnp 'sport = :{settings.port}')")
        + "; end that, or give this job another MS_SCHED_PORT, in its workers too",
        errno.EADDRNOTAVAIL: "this host does not have that address; start the scheduler on the host that has it",
        errno.EACCES: "ports below 1024 need privileges; choose a higher MS_SCHED_PORT",
    }.get(error.errno or 0, error.strerror or str(error))
    return BackendUnavailable(f"cannot listen at {_where(settings)}: {what}")


def _where(settings: Settings) -> str:
    return f"MS_SCHED_HOST={settings.host}, MS_SCHED_PORT={settings.port}"


def _log(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # if nobody reads our output any more, the job must still go on
        print(f"mscomm scheduler: {text}", flush=True)


def _stop_on_sigterm(stop: Callable[[], None]) -> None:
    """Make the scheduler stop as usual at SIGTERM, so that it removes its key file before it ends."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: stop())


def _leave(status: int) -> NoReturn:
    """End the process like sys.exit(). This also works under pytest, where SystemExit would only fail a test."""
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # nobody reads the stream any more
            stream.flush()
    os._exit(status)
