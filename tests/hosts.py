"""Several hosts on this machine: network namespaces joined by a bridge, each with its own host name and addresses.

    with Hosts(2, tmp_path) as hosts:
        hosts[0].start(["python", "train.py"]).wait()

As a program, this file makes N hosts and runs a command on all of them at once. {host} stands for the host's number,
and {agent} for a program that replaces ssh (see Hosts.agent):

    sudo python tests/hosts.py 2 --rate 1gbit -- mscomm run --nnodes 2 --node-rank {host} --master-addr host-0 ...

On network j, host i has the address 10.77.j.(i+1) on its interface net<j>, or fd77:j::(i+1) if `version` is 6. By
default, the hosts know each other as host-0, host-1, ... The namespaces share this machine's files and memory;
MSCOMM_HOST_ID and the namespace tell mscomm that they are different hosts. A rate such as 1gbit limits what each host's
interfaces send and receive.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pytest

_serial = itertools.count()
# Host.start() passes on only these variables of this process. Others could come from a launcher that runs this test.
_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "PRTE_MCA_prte_tmpdir_base")


def _ip(*words: str, program: str = "ip") -> str:
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{program} {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _shape(space: str, device: str, rate: str) -> None:
    """Limit the rate at which the device sends, except for the first 256 KiB after a pause."""
    bucket = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
    _ip("-n", space, "qdisc", "add", "dev", device, "root", *bucket, program="tc")


class Host:
    """One host, with its host name and its address on each network."""

    def __init__(self, space: str, name: str, addresses: list[str]) -> None:
        self.space = space
        self.name = name
        self.addresses = addresses
        self.address = addresses[0]

    def command(self, words: Sequence[str | Path]) -> list[str]:
        """Return the command line that runs the command `words` on this host."""
        enter = ["ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']
        return [*enter, self.name, *map(str, words)]

    def start(self, words: Sequence[str | Path], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the command `words` on this host, with its output in pipes."""
        own = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        return subprocess.Popen(
            self.command(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**own, "MSCOMM_HOST_ID": self.name, "OMP_NUM_THREADS": "1", **(env or {})},
        )

    def run(
        self, words: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        with self.start(words, env) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def unplug(self) -> None:
        """Take the host off its networks, so that the other hosts no longer hear from it."""
        for network in range(len(self.addresses)):
            _ip("-n", self.space, "link", "set", f"net{network}", "down")

    def plug_in(self) -> None:
        """Connect the host to its networks again."""
        for network in range(len(self.addresses)):
            _ip("-n", self.space, "link", "set", f"net{network}", "up")

    def lose(self, other: Host) -> None:
        """Drop all that this host sends to the other on network 0: send it to a MAC address that no interface has."""
        nowhere = ["lladdr", "02:00:00:00:00:99", "dev", "net0", "nud", "permanent"]
        _ip("-n", self.space, "neigh", "replace", other.addresses[0], *nowhere)

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.space).split()]


class Hosts:
    """Creates the hosts. On exit, it removes everything, including processes that are still running on the hosts."""

    def __init__(
        self,
        count: int,
        folder: Path,
        *,
        networks: int = 1,
        version: int = 4,
        names: Sequence[str] | None = None,
        rate: str = "",
    ) -> None:
        if os.getuid() != 0:
            pytest.skip("network namespaces need root")
        if shutil.which("ip") is None:
            pytest.skip("ip is not installed: install iproute2")
        self._folder = folder
        self._networks = networks
        self._version = version
        self._rate = rate
        prefix = f"mscomm-{os.getpid()}-{next(_serial)}"
        self._switch = f"{prefix}-switch"
        self._names = list(names or [f"host-{i}" for i in range(count)])
        self._hosts = [
            Host(f"{prefix}-{i}", name, [self._address(i, j) for j in range(networks)])
            for i, name in enumerate(self._names)
        ]

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def _address(self, host: int, network: int) -> str:
        return f"10.77.{network}.{host + 1}" if self._version == 4 else f"fd77:{network}::{host + 1}"

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        for j in range(self._networks):
            _ip("-n", self._switch, "link", "add", f"bridge{j}", "type", "bridge")
            _ip("-n", self._switch, "link", "set", f"bridge{j}", "up")
        for i, host in enumerate(self._hosts):
            _ip("netns", "add", host.space)
            _ip("-n", host.space, "link", "set", "lo", "up")
            for j in range(self._networks):
                port = f"port{j}-{i}"
                peer = ["peer", "name", port, "netns", self._switch]
                _ip("link", "add", f"net{j}", "netns", host.space, "type", "veth", *peer)
                _ip("-n", self._switch, "link", "set", port, "master", f"bridge{j}", "up")
                _ip("-n", host.space, "link", "set", f"net{j}", "up")
                plain = ["nodad"] if self._version == 6 else []
                length = 24 if self._version == 4 else 64
                _ip("-n", host.space, "addr", "add", f"{host.addresses[j]}/{length}", "dev", f"net{j}", *plain)
                if self._rate:  # limit what the host sends, and what is sent to it
                    _shape(host.space, f"net{j}", self._rate)
                    _shape(self._switch, port, self._rate)
            # `ip netns exec` shows this file as /etc/hosts inside the namespace.
            etc = Path("/etc/netns", host.space)
            etc.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", "::1 localhost"]
            lines += [f"{other.address} {other.name} {other.name.partition('.')[0]}" for other in self._hosts]
            (etc / "hosts").write_text("\n".join(lines) + "\n")

    def kill(self) -> None:
        """Kill all processes that are still running on the hosts."""
        for host in self._hosts:
            for pid in host.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _remove(self) -> None:
        with contextlib.suppress(RuntimeError):  # if creating a namespace failed, it does not exist
            self.kill()
        for host in self._hosts:
            shutil.rmtree(f"/etc/netns/{host.space}", ignore_errors=True)  # others may be using /etc/netns
        for space in [*(host.space for host in self._hosts), self._switch]:
            with contextlib.suppress(RuntimeError):
                _ip("netns", "del", space)

    def agent(self) -> Path:
        """Return the path of a new program that replaces ssh. `agent [options] ADDRESS COMMAND...` runs COMMAND on the
        host that has this address or name.
        """
        cases = "\n".join(
            f"  {'|'.join([*host.addresses, host.name])}) space={host.space} name={host.name};;" for host in self._hosts
        )
        path = self._folder / "agent.sh"
        path.write_text(
            "#!/bin/sh\n"
            'while [ "${1#-}" != "$1" ]; do shift; done\n'
            f'case "$1" in\n{cases}\n  *) echo "agent: no host $1" >&2; exit 1;;\nesac\nshift\n'
            'exec ip netns exec "$space" unshare --uts '
            'sh -c "hostname $name; export MSCOMM_HOST_ID=$name; $*"\n'
        )
        path.chmod(0o755)
        return path


def run_on_each(hosts: Hosts, words: Sequence[str]) -> list[int]:
    """Run the command `words` on all hosts at once. Each command has the environment and output of this process. Return
    the exit codes.
    """
    processes = []
    agent = str(hosts.agent()) if "{agent}" in words else ""
    for number, host in enumerate(hosts):
        command = host.command([word.replace("{host}", str(number)).replace("{agent}", agent) for word in words])
        env = {**os.environ, "MSCOMM_HOST_ID": host.name}
        processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env))
    return [process.wait() for process in processes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="how many hosts")
    parser.add_argument("--rate", default="", help="of each host's interface, in tc's notation: 1gbit")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    # SIGTERM raises KeyboardInterrupt, so that the hosts are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory() as folder, Hosts(given.count, Path(folder), rate=given.rate) as hosts:
            codes = run_on_each(hosts, given.command)
    except pytest.skip.Exception as error:
        sys.exit(f"no hosts: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
    for host, code in zip(hosts, codes, strict=True):
        if code:
            print(f"{host.name} ended with {code}", file=sys.stderr)
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
