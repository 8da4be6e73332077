"""`mscomm run --hosts`: this host runs the hub, and ssh starts a launcher on every other host.

This host sends everything that such a launcher needs through ssh's stdin. So the job's key is never on a command line
or in an environment. After that, each byte on stdin is the number of a signal for the launcher's ranks. When stdin is
closed, the launcher ends its ranks and itself. ssh also returns the launcher's output: the lines of its ranks, each
with the rank in front.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import click
import msgpack

from mscomm import environment
from mscomm.bootstrap import rendezvous
from mscomm.bootstrap.rendezvous import is_loopback_name
from mscomm.cluster import links, security
from mscomm.cluster.protection import OF_SCHEDULER, Protection
from mscomm.errors import BackendUnavailable, Error
from mscomm.launching.output import Stream
from mscomm.launching.parts import Node0, Say
from mscomm.launching.processes import DRAIN_S
from mscomm.writing import Output

# Variables with one of these prefixes are passed from this host to the ranks on the other hosts.
HANDED_OVER = ("MSCOMM_", "MS_", "OMP_", "NCCL_", "HCCL_", "GLOO_", "PYTHON")
_OF_ONE_HOST = ("MSCOMM_HOST_ID", "MSCOMM_SSH", "MSCOMM_JOB_KEY_FILE")  # not passed, because they apply to one host
_ENDS_S = 10.0  # how long a launcher may take to end after its stdin is closed, in addition to --grace
LENGTH = struct.Struct("<I")  # the first bytes on a launcher's stdin: the length of what follows
MOST_BYTES = 1 << 20


class Share(NamedTuple):
    """One host of the list, and the ranks that it gets. `name`: the host as given to ssh."""

    name: str
    ranks: range

    @property
    def address(self) -> str:
        """The host's name or address, without the user and without the brackets of an IPv6 address."""
        return self.name.rpartition("@")[2].strip("[]")


# -- the hosts of the job and their ranks


def listed(text: str) -> list[tuple[str, int | None]]:
    """Parse the text of --hosts, such as a:4,b:4. For each host, return its name and its number of ranks.

    If the text does not give a host's number of ranks, return None for it. Raise ClickException for an invalid host.
    """
    return [_host(item.strip(), f"--hosts {text}") for item in text.split(",")]


def read_hostfile(path: Path) -> list[tuple[str, int | None]]:
    """Return the hosts of a file in the format of Open MPI (host slots=4) or MPICH (host:4); # begins a comment."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--hostfile {path}: {error}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--hostfile {path}, line {number}"
        name, slots = _host(words[0], where)
        for word in words[1:]:
            option, equals, value = word.partition("=")
            if option == "slots" and value.isdecimal() and int(value) > 0:
                slots = int(value)
            elif option != "max_slots" or not equals:
                raise click.ClickException(f"{where}: {word!r}: expected slots=N, or host:N")
        hosts.append((name, slots))
    if not hosts:
        raise click.ClickException(f"--hostfile {path} names no host")
    return hosts


def _host(text: str, where: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"((?:[\w.-]+@)?(?:\[[0-9a-fA-F:.%\w]+\]|[\w.-]+))(?::(\d{1,5}))?", text, re.ASCII)
    if not found or text.startswith("-") or found[2] == "0":
        raise click.ClickException(f"{where}: {text!r} is not a host; write name or name:ranks, an IPv6 address in [ ]")
    return found[1], int(found[2]) if found[2] else None


def shares(hosts: Sequence[tuple[str, int | None]], each: int | None) -> list[Share]:
    """Return the ranks of each host, in the order of the list.

    each: the value of -n, the number of ranks on a host for which the list gives no number.
    """
    slots: dict[str, int] = {}
    for name, number in hosts:
        if number is None and each is None:
            raise click.ClickException(f"how many ranks on {name}? Write {name}:4, or give -n for each host")
        slots[name] = slots.get(name, 0) + (number or each or 0)
    result: list[Share] = []
    for name, number in slots.items():
        first = result[-1].ranks.stop if result else 0
        result.append(Share(name, range(first, first + number)))
    return result


def own_place(hosts: Sequence[Share]) -> int:
    """Return the index of this host in the list: the first entry whose name or address belongs to this host."""
    for place, host in enumerate(hosts):
        if host.address == socket.gethostname() or _is_here(host.address):
            return place
    names = ", ".join(host.name for host in hosts)
    raise click.ClickException(f"none of the hosts {names} is this one; start the job on one of them")


def _is_here(name: str) -> bool:
    try:
        rendezvous.bind(name, 0).close()
        return True
    except OSError:  # another host has the address, or the name is unknown; ssh will report an unknown name
        return False


# -- what `mscomm run --hosts` does on this host


class Hosts(Node0):
    """Runs this host's ranks and the hub, as node 0 does. Also runs one ssh process for every other host."""

    def __init__(
        self,
        hosts: Sequence[Share],
        own: int,
        port: int | None,
        protection: Protection,
        topo_timeout_s: float,
        restarts: bool,
        task: Mapping[str, Any],
    ) -> None:
        """task: the script, and the options that are the same on every host."""
        size, here = hosts[-1].ranks.stop, (hosts[own].address, port or 0)
        super().__init__(1, size, *here, protection, topo_timeout_s, restarts, "")
        self.first = hosts[own].ranks.start
        self._layout = "--hosts"
        self._others = {f"host {host.name}": host.ranks for host in hosts if host is not hosts[own]}
        self._shares = [host for host in hosts if host is not hosts[own]]
        self._ends_s = _ENDS_S + task["grace"]
        self._task = {**task, "size": self.size, "timeout": topo_timeout_s, "rank_0": hosts[0].address}
        self._agents: list[_Agent] = []

    def open(self, stack: ExitStack, log: Say, tell: Say) -> None:
        name = self.host
        if is_loopback_name(name) and not all(is_loopback_name(other.address) for other in self._shares):
            raise Error(
                f"this host is in the list as {name}, a name that the other hosts cannot reach; use its address"
            )
        ssh = environment.read("MSCOMM_SSH", os.environ)
        try:
            self._ssh = shlex.split(ssh)
        except ValueError as error:
            raise Error(f"MSCOMM_SSH={ssh}: {error}") from error
        try:
            listener = stack.enter_context(self._listener())
        except OSError as error:
            why = rendezvous.words(error)
            raise BackendUnavailable(f"cannot listen at {name}, this host's name in the list: {why}") from error
        self._key = security.new_key()
        self._listens_at = listener.getsockname()[:2]
        self._serve_at(listener, log, tell)
        self.torch_store = self._task["rank_0"], self.torch_store[1]
        self._tell = tell

    def _listener(self) -> socket.socket:
        """Return a listener at the address that the list of hosts contains for this host.

        If the user gave no port, it listens at any free port.
        """
        host = rendezvous.own_address(self.host, os.environ)
        if self.port == 0:
            return links.listen(host, socket.SOMAXCONN, os.environ)
        listener = rendezvous.bind(host, self.port)
        listener.listen(socket.SOMAXCONN)
        return listener

    def serve(self, stack: ExitStack) -> None:
        super().serve(stack)
        stack.callback(self._close)
        host, port = self._listens_at
        for share in self._shares:
            ranks = {"name": f"host {share.name}", "first": share.ranks.start, "end": share.ranks.stop}
            hub = {"key": self._key, "host": host, "port": port}
            agent = _Agent(self._ssh, share, {**self._task, **ranks, **hub})
            self._agents.append(agent)

    def _close(self) -> None:
        """End the launchers of all other hosts at the same time."""
        for agent in self._agents:
            agent.hang_up()
        until = time.monotonic() + self._ends_s
        for agent in self._agents:
            agent.close(max(0.0, until - time.monotonic()))

    def streams(self, stdout: Output, stderr: Output) -> list[Stream]:
        return [
            _Passed(pipe, agent.share.name, output)
            for agent in self._agents
            for pipe, output in zip(agent.pipes, (stdout, stderr), strict=True)
        ]

    def children(self) -> set[int]:
        return {agent.process.pid for agent in self._agents}

    def forward(self, number: int) -> None:
        for agent in self._agents:
            agent.write(bytes([number]))

    def over(self) -> Error | None:
        for agent in self._agents:
            if not agent.told and (status := agent.process.poll()) is not None:
                agent.told = True
                self._ended(agent, status)
        return super().over()

    def _ended(self, agent: _Agent, status: int) -> None:
        """Handle the end of an ssh process.

        If the launcher on the other host never reached the hub, report its ranks to the hub as ended. Otherwise, that
        launcher has reported them itself.
        """
        if not self._hub.attended.issuperset(agent.share.ranks):
            why = f"no rank could be started on host {agent.share.name}: ssh ended with status {status}"
            if status == 255:  # ssh itself failed
                advice = f"Does this work without a question: {shlex.join(agent.command[:-1])} true"
            else:
                advice = f"Every host needs mscomm for the same Python, {sys.executable}"
            self._tell(f"{why}. {advice}")
            for rank in agent.share.ranks:
                self._hub.process_ended(rank, why, badly=True)

    def needed(self, well: bool) -> bool:
        """Return whether to wait for the launchers on other hosts, or for their output.

        After a failure, wait at most _ends_s, unless the other ranks continue without the lost ranks.
        """
        self.over()
        if self.goes_on() or (well and not super().over()):
            self._heard_at = float("inf")
        else:
            self._heard_at = min(self._heard_at, time.monotonic() + self._ends_s)
        # When every ssh process has ended, wait only briefly for the rest of the output. A process that ssh has started
        # may still hold the pipes open.
        if all(agent.told for agent in self._agents):
            self._until = min(self._until, time.monotonic() + DRAIN_S)
        busy = any(not agent.told or not agent.read for agent in self._agents)
        return busy and time.monotonic() < min(self._until, self._heard_at)


class _Agent:
    """The ssh process for one of the other hosts. told: whether the end of this process was noticed and handled."""

    def __init__(self, ssh: Sequence[str], share: Share, task: Mapping[str, Any]) -> None:
        body = msgpack.packb(dict(task), unicode_errors="surrogateescape")  # names may be other bytes than UTF-8
        if len(body) > MOST_BYTES:
            raise Error(f"arguments and variables are {len(body)} bytes; {share.name} takes at most {MOST_BYTES}")
        self.share = share
        self.told = False
        remote = shlex.join([sys.executable, "-m", "mscomm.cli.started_by_ssh"])
        if path := os.environ.get("PYTHONPATH"):
            remote = f"env PYTHONPATH={shlex.quote(path)} {remote}"  # in csh, a word before the command is no variable
        target = share.name.replace("[", "").replace("]", "")
        self.command = [*ssh, "-oBatchMode=yes", "-oConnectTimeout=10", target, remote]
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # so Ctrl-C does not reach ssh; `mscomm run` passes the signal on through stdin
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._stdin, self.pipes = self.process.stdin, (self.process.stdout, self.process.stderr)
        self.write(LENGTH.pack(len(body)) + body)

    @property
    def read(self) -> bool:
        """Whether all output of the ssh process has been read."""
        return all(pipe.closed for pipe in self.pipes)

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        with contextlib.suppress(OSError, ValueError):  # ssh has ended; over() handles that
            while rest:
                rest = rest[self._stdin.write(rest) :]

    def hang_up(self) -> None:
        """Close the stdin of the ssh process. The launcher on the other host then ends its ranks and exits."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def close(self, within_s: float) -> None:
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:  # the host does not answer
            self.process.kill()
            self.process.wait()


class _Passed(Stream):
    """The output of another host's launcher. Lines without a rank prefix are prefixed with the host's name."""

    def __init__(self, pipe: IO[bytes], name: str, output: Output) -> None:
        super().__init__(pipe, -1, output, None, hold=lambda lines: lines, prompts=False)
        self._name = name.encode()

    def named(self, line: bytes) -> bytes:
        return line if re.match(rb"\[\d[\d,-]*\] ", line) else self._name + b": " + line


# -- what the other hosts get


def handed_over(env: Mapping[str, str], named: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of `env`, this host's environment, that are passed to the ranks on the other hosts.

    named: the names that the user has given with --env.
    """
    kept = (*_OF_ONE_HOST, *OF_SCHEDULER)
    usual = {name: text for name, text in env.items() if name.startswith(HANDED_OVER) and name not in kept}
    return usual | {name: env[name] for name in named}
