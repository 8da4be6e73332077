"""Chooses the address of this host for a job: this host listens at the address, and other hosts connect to it.

The user can choose the address with MSCOMM_SOCKET_IFNAME, NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME. If several of these
variables are set, the first one counts. Each variable has its own syntax. If no variable is set, this host uses the
address from which it reaches the scheduler, and does not need to list its interfaces.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from mscomm import environment
from mscomm.errors import BackendUnavailable

VARIABLES = ("MSCOMM_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_OURS, _NCCL, _GLOO = VARIABLES
# Addresses reserved for documentation (RFC 5737, RFC 3849). We only look up the route to them and send nothing.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


class Interface(NamedTuple):
    """One address of one network interface that is up."""

    name: str
    address: str  # numeric; a link-local IPv6 address includes its scope: fe80::1%eth0
    loopback: bool


class _Rule(NamedTuple):
    """One item of the list in a variable such as MSCOMM_SOCKET_IFNAME."""

    excludes: bool
    matches: Callable[[Interface], bool]


def listen_address(control: socket.socket, env: Mapping[str, str] = os.environ) -> str:
    """Return the address at which this rank listens for data.

    If one of VARIABLES is set, it chooses the address. Otherwise, the result is the address of this rank's end of the
    link to the hub. If the hub is at a loopback address or a unix socket, all ranks are on this host. The result is
    then a loopback address, unless MSCOMM_SOCKET_IFNAME chooses another address. Raise ValueError if the variable
    matches no interface.
    """
    own = "127.0.0.1"
    if control.family in (socket.AF_INET, socket.AF_INET6):
        own = str(control.getsockname()[0])
    variables = (_OURS,) if _ip(own).is_loopback else VARIABLES
    return _chosen(env, variables, own) or own


def host_address(env: Mapping[str, str] = os.environ) -> str:
    """Return the address at which other hosts reach this host.

    Call this if the scheduler's address, and therefore the route to it, is not known yet. If one of VARIABLES is set,
    it chooses the address. Otherwise, the result is the source address of packets to other networks. If there is no
    route to other networks, the result is the address of the only interface that is not loopback.
    """
    if chosen := _chosen(env, VARIABLES, "0.0.0.0"):
        return chosen
    for family, elsewhere in _ELSEWHERE:
        # An error means that there is no route: the network is isolated, or this host lacks the address family.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # this sends nothing
            host = str(probe.getsockname()[0])
            if not _ip(host).is_loopback:
                return host
    here = interfaces()
    outside = [interface for interface in here if not interface.loopback]
    if len({interface.name for interface in outside}) == 1:
        return _preferred(outside, "0.0.0.0")
    raise BackendUnavailable(
        f"cannot tell by which address other hosts reach this one: there is no default route; it has {_listed(here)}. "
        f"Set {_OURS} to the interface of the job's network"
    )


def name_of(address: str) -> str | None:
    """Return the name of the interface that has the address; None if no interface has it, for example behind NAT."""
    return next((one.name for one in interfaces() if one.address.partition("%")[0] == address.partition("%")[0]), None)


def dial_address(published: str, own: str = "", env: Mapping[str, str] = os.environ) -> str:
    """Return the address that another host published, in a form to which this host can connect.

    Raise ValueError if `published` is not an address. A link-local IPv6 address needs a scope, which is an interface of
    this host, not of the other host. If `own` has a scope, use this scope. Otherwise, use the interface that one of
    VARIABLES chooses or, if none is set, the only interface with a link-local address.
    """
    address = published.partition("%")[0]
    if not _ip(address).is_link_local or _ip(address).version == 4:
        return address
    candidates = _matching(env, VARIABLES, own) or interfaces()
    scopes = [own.partition("%")[2]] if "%" in own else [i.name for i in candidates if "%" in i.address]
    if len(set(scopes)) == 1:
        return f"{address}%{scopes[0]}"
    raise BackendUnavailable(
        f"{address} is a link-local address, and it is not clear which interface leads there; this host has "
        f"{_listed(interfaces())}. Set {_OURS}, or give the hosts global addresses"
    )


def endpoint(host: str, port: int) -> str:
    """Return the endpoint as text for messages and URLs: 10.0.0.1:8118, [fe80::1%eth0]:8118."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def interfaces() -> list[Interface]:
    """Return the addresses of all interfaces that are up, grouped by interface."""
    import psutil  # imported here because it takes 12 ms, and most jobs do not need it

    states = psutil.net_if_stats()
    return [
        Interface(name, entry.address, "loopback" in states[name].flags)
        for name, entries in psutil.net_if_addrs().items()
        if name in states and states[name].isup
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _chosen(env: Mapping[str, str], variables: Iterable[str], own: str) -> str | None:
    """Return the address chosen by the first of `variables` that is set; None if none of them is set."""
    matching = _matching(env, variables, own)
    return None if matching is None else _preferred(matching, own)


def _matching(env: Mapping[str, str], variables: Iterable[str], own: str) -> list[Interface] | None:
    """Return the interfaces chosen by the first of `variables` that is set.

    This variable holds a list of items, which are tried in order. Only the first item that matches any interface
    counts. Interfaces that an item excludes never match. Return None if no variable is set. Raise ValueError if no item
    matches any interface.
    """
    variable = next((name for name in variables if environment.read(name, env)), None)
    if variable is None:
        return None
    here = interfaces()
    rules = list(_rules(variable, environment.read(variable, env), {interface.name for interface in here}))
    excluding = [rule for rule in rules if rule.excludes]
    left = [interface for interface in here if not any(rule.matches(interface) for rule in excluding)]
    if len(excluding) == len(rules):  # only exclusions: all other interfaces match, but loopback only if it is `own`
        rules = [_Rule(False, lambda interface: not interface.loopback or interface.address == own)]
    for rule in rules:
        matching = [interface for interface in left if not rule.excludes and rule.matches(interface)]
        if matching:
            return matching
    raise ValueError(
        f"{variable}={env[variable]!r} matches no interface of this host that is up: it has {_listed(here)}"
    )


def _rules(variable: str, text: str, names: set[str]) -> Iterable[_Rule]:
    """Return the items of the variable's list, in order.

    MSCOMM_SOCKET_IFNAME: each item is a network, the name of an interface, or a prefix of such names; ^ before an item
    excludes what it matches. NCCL_SOCKET_IFNAME: each item is a prefix; = before the list makes every item a whole
    name, and ^ at the very front excludes what the list matches. GLOO_SOCKET_IFNAME: each item is a whole name.
    """
    all_excluded, all_exact = False, variable == _GLOO
    if variable == _NCCL:
        all_excluded, text = text.startswith("^"), text.removeprefix("^")
        all_exact, text = text.startswith("="), text.removeprefix("=")
    for item in filter(None, (part.strip() for part in text.split(","))):
        excludes, what = all_excluded, item
        if variable == _OURS:
            excludes, what = item.startswith("^"), item.removeprefix("^").strip()
        if variable == _OURS and "/" in what:
            yield _Rule(excludes, _in_network(variable, what))
        elif all_exact or (variable == _OURS and what in names):
            yield _Rule(excludes, lambda interface, what=what: interface.name == what)  # type: ignore[misc]
        else:
            yield _Rule(excludes, lambda interface, what=what: interface.name.startswith(what))  # type: ignore[misc]


def _in_network(variable: str, text: str) -> Callable[[Interface], bool]:
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{variable}: {text!r} is not a network; write it as 10.0.0.0/8 or fd00::/8") from None
    return lambda interface: _ip(interface.address) in network


def _preferred(matching: list[Interface], own: str) -> str:
    """Return the best of the matching addresses: our own address if it is one of them.

    Otherwise, prefer an address that is not link-local, and then an address of the same family as our own.
    """
    addresses = [interface.address for interface in matching]
    if own in addresses:
        return own
    version = _ip(own).version
    return min(addresses, key=lambda address: (_ip(address).is_link_local, _ip(address).version != version))


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])


def _listed(here: list[Interface]) -> str:
    names = dict.fromkeys(interface.name for interface in here)
    listed = [f"{name} ({', '.join(one.address for one in here if one.name == name)})" for name in names]
    return ", ".join(listed) or "none"
