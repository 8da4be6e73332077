"""Which address a host uses: the syntax of the variables, the choice without them, and the errors if nothing fits."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from mscomm.cluster import interfaces
from mscomm.cluster.interfaces import Interface
from mscomm.errors import BackendUnavailable

HERE = [
    Interface("lo", "127.0.0.1", True),
    Interface("lo", "::1", True),
    Interface("eth0", "10.0.0.5", False),
    Interface("eth0", "fe80::5%eth0", False),
    Interface("eth1", "192.168.7.5", False),
    Interface("eth10", "fe80::7%eth10", False),
    Interface("eth10", "fd00::7", False),
    Interface("docker0", "172.17.0.1", False),
]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "interfaces", lambda: list(HERE))


class Control:
    """Stands in for a control link. It has only a local address."""

    def __init__(self, own: str) -> None:
        self.family = socket.AF_INET6 if ":" in own else socket.AF_INET if own else socket.AF_UNIX
        self._own = own

    def getsockname(self) -> tuple[str, int] | str:
        return (self._own, 40000) if self._own else ""


def chosen(own: str, **env: str) -> str:
    return interfaces.listen_address(Control(own), env)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eth1", "192.168.7.5"),  # an interface is named eth1, so "eth1" does not match eth10
        ("eth", "10.0.0.5"),  # no interface is named eth, so "eth" matches eth0 and the like
        ("ib0,eth1", "192.168.7.5"),  # the first name that exists is used
        ("eth1,eth0", "192.168.7.5"),  # the order of the names decides, not that of the interfaces
        ("192.168.0.0/16", "192.168.7.5"),
        ("172.16.0.0/12, 192.168.0.0/16", "172.17.0.1"),
        ("^172.16.0.0/12,^eth1,^eth0", "fd00::7"),  # not fe80::, because link-local comes last
        ("^docker", "10.0.0.5"),
        ("eth,^eth0", "192.168.7.5"),
        ("fd00::/8", "fd00::7"),
        ("lo", "127.0.0.1"),
    ],
)
def test_our_variable_takes_names_prefixes_exclusions_and_networks(text: str, expected: str) -> None:
    assert chosen("10.0.0.9", MSCOMM_SOCKET_IFNAME=text) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("NCCL_SOCKET_IFNAME", "eth1", "192.168.7.5"),
        ("NCCL_SOCKET_IFNAME", "=eth10", "fd00::7"),
        ("NCCL_SOCKET_IFNAME", "^eth,lo", "172.17.0.1"),
        ("NCCL_SOCKET_IFNAME", "^=eth0,lo,docker0", "192.168.7.5"),
        ("GLOO_SOCKET_IFNAME", "eth1", "192.168.7.5"),
    ],
)
def test_the_peers_variables_are_read_in_their_own_syntax(name: str, text: str, expected: str) -> None:
    assert chosen("10.0.0.9", **{name: text}) == expected


def test_gloo_takes_whole_names_only() -> None:
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME='eth' matches no interface"):
        chosen("10.0.0.9", GLOO_SOCKET_IFNAME="eth")


def test_our_variable_counts_before_the_peers() -> None:
    assert chosen("10.0.0.9", MSCOMM_SOCKET_IFNAME="eth1", NCCL_SOCKET_IFNAME="eth0") == "192.168.7.5"


def test_the_address_that_reaches_the_scheduler_counts_without_variables_and_among_equals() -> None:
    assert chosen("192.168.7.5") == "192.168.7.5"
    assert chosen("192.168.7.5", MSCOMM_SOCKET_IFNAME="eth") == "192.168.7.5"
    assert chosen("fe80::5%eth0", MSCOMM_SOCKET_IFNAME="^docker0") == "fe80::5%eth0"


@pytest.mark.parametrize(("own", "expected"), [("", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")])
def test_a_job_on_one_host_stays_on_loopback_unless_our_variable_says_otherwise(own: str, expected: str) -> None:
    assert chosen(own) == expected
    assert chosen(own, NCCL_SOCKET_IFNAME="ib0", GLOO_SOCKET_IFNAME="ib0") == expected
    assert chosen(own, MSCOMM_SOCKET_IFNAME="^docker0") == expected
    assert chosen(own, MSCOMM_SOCKET_IFNAME="eth1") == "192.168.7.5"


@pytest.mark.parametrize("text", ["ib0", "^eth,^docker0,^lo", "11.0.0.0/8"])
def test_what_matches_nothing_is_refused_naming_what_there_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"it has lo \(127.0.0.1, ::1\), eth0 \(10.0.0.5, fe80"):
        chosen("10.0.0.9", MSCOMM_SOCKET_IFNAME=text)


def test_a_network_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"MSCOMM_SOCKET_IFNAME: '10\.0\.0/33' is not a network"):
        chosen("10.0.0.9", MSCOMM_SOCKET_IFNAME="10.0.0/33")


def test_a_link_local_address_is_dialled_by_our_own_interface() -> None:
    assert interfaces.dial_address("fe80::9%enp3", own="fe80::5%eth0", env={}) == "fe80::9%eth0"
    assert interfaces.dial_address("fe80::9", env={"MSCOMM_SOCKET_IFNAME": "eth10"}) == "fe80::9%eth10"
    assert interfaces.dial_address("fd00::9", env={}) == "fd00::9"
    with pytest.raises(BackendUnavailable, match="not clear which interface leads there"):
        interfaces.dial_address("fe80::9", env={})


class Unconnected:
    """A socket on a host without a route to other networks."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> Unconnected:
        return self

    def __exit__(self, *_: object) -> None: ...

    def connect(self, address: object) -> None:
        raise OSError("Network is unreachable")


def test_without_a_default_route_the_only_interface_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces.socket, "socket", Unconnected)
    monkeypatch.setattr(interfaces, "interfaces", lambda: HERE[:4])
    assert interfaces.host_address({}) == "10.0.0.5"
    monkeypatch.setattr(interfaces, "interfaces", lambda: HERE)
    with pytest.raises(BackendUnavailable, match=r"no default route; it has lo .*eth1.*Set MSCOMM_SOCKET_IFNAME"):
        interfaces.host_address({})


def test_the_real_interfaces_have_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert any(interface.loopback and interface.address == "127.0.0.1" for interface in interfaces.interfaces())


@pytest.fixture
def connected() -> Iterator[socket.socket]:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        yield stack.enter_context(socket.create_connection(listener.getsockname()))


def test_a_real_control_link_needs_no_look_at_the_interfaces(
    connected: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "interfaces", lambda: pytest.fail("looked"))
    assert interfaces.listen_address(connected, {}) == "127.0.0.1"
