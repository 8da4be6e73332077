"""`mscomm ranktable`: writes and checks Ascend's rank tables, and prints the ranks of this host."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mscomm.bootstrap.rank_table_file import (
    MOST_DEVICES,
    MOST_PROBLEMS,
    InvalidTable,
    Seat,
    Server,
    Table,
    is_address,
    load,
    make,
    unfit_for_910,
)
from mscomm.cluster import interfaces

if TYPE_CHECKING:
    from rich.console import Console

HCCN = Path("/etc/hccn.conf")  # the file in which Ascend's driver keeps the IP addresses of this host's devices


def _devices(ctx: click.Context, param: click.Parameter, text: str) -> list[int]:
    """Return the device numbers that --devices gives: 8 means 0 to 7; 4-7 means 4 to 7; 0,2 means 0 and 2."""
    if not re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", text, re.ASCII):
        raise click.BadParameter(f"{text!r}: give the number of devices, such as 8, or a list, such as 4-7 or 0,2")
    if text.isdecimal():
        found = list(range(int(text)))
    else:
        bounds = [part.partition("-") for part in text.split(",")]
        found = [device for first, _, last in bounds for device in range(int(first), int(last or first) + 1)]
    if not found or max(found) >= MOST_DEVICES:
        raise click.BadParameter(f"{text!r}: expected 1 to {MOST_DEVICES} devices, 0 to {MOST_DEVICES - 1}")
    return found


@click.group("ranktable", help="Write and check rank tables, the Ascend files that map ranks to devices.")
def command() -> None:
    pass


# -- mscomm ranktable make ---------------------------------------------------------------------------------------------


@command.command("make")
@click.option("--server", "servers", multiple=True, required=True, metavar="ID", help="A server; repeatable.")
@click.option(
    "--devices",
    callback=_devices,
    metavar="DEVICES",
    default="8",
    show_default=True,
    help="The devices of each server: how many (8), or which (4-7 or 0,2).",
)
@click.option(
    "--device-ip",
    "device_ips",
    multiple=True,
    metavar="IP",
    help="A device's address, for each device of all servers in order; repeatable.",
)
@click.option(
    "--hccn",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help=f"A copy of {HCCN}, which has the devices' addresses, from each server. With one server, the default is this "
    "host's file.",
)
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Default: stdout.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
def make_command(
    servers: tuple[str, ...],
    devices: list[int],
    device_ips: tuple[str, ...],
    hccn: tuple[Path, ...],
    output: Path | None,
    force: bool,
) -> None:
    """Write a rank table for these servers, each with the same devices.

    Ranks are numbered in the alphabetical order of the servers, as HCCL requires: 10.0.0.10 comes before 10.0.0.9.

    \b
    mscomm ranktable make --server 10.0.0.1 --server 10.0.0.2 --devices 8 -o rank_table_16pcs.json
    """
    if device_ips and hccn:
        raise click.UsageError("give the addresses with either --device-ip or --hccn")
    if device_ips:
        tables = _dealt(device_ips, len(servers), devices)
    else:
        tables = [_hccn(path, devices) for path in _hccn_files(hccn, len(servers))]
    listed = [Server(name, devices, ips) for name, ips in zip(servers, tables, strict=True)]
    try:
        text = make(listed)
    except InvalidTable as error:
        raise click.ClickException("\n".join(str(problem) for problem in error.problems)) from error
    if output is None:
        click.echo(text, nl=False)
    else:
        _write(output, text, force)
        click.echo(f"{output}: {len(servers)} server(s), {len(servers) * len(devices)} ranks")
    if list(servers) != sorted(servers):
        click.echo(f"rank 0 is on {min(servers)}: HCCL requires the servers in alphabetical order", err=True)


def _dealt(device_ips: Sequence[str], servers: int, devices: list[int]) -> list[dict[int, str]]:
    """For each server, return a dict from device number to address.

    device_ips: the addresses of all devices, first on the first server, then on the second server, and so on.
    """
    per = len(devices)
    if len(device_ips) != servers * per:
        raise click.UsageError(
            f"--device-ip was given {len(device_ips)} times; give it once for each of the {servers * per} devices"
        )
    return [dict(zip(devices, device_ips[i * per : (i + 1) * per], strict=True)) for i in range(servers)]


def _hccn_files(given: Sequence[Path], servers: int) -> Sequence[Path | None]:
    if given and len(given) != servers:
        raise click.UsageError(
            f"--hccn was given {len(given)} times; give it once for each of the {servers} servers, in their order"
        )
    if servers == 1 and not given and HCCN.exists():
        return [HCCN]
    return given or [None] * servers


def _hccn(path: Path | None, devices: list[int]) -> dict[int, str]:
    """Read the IP addresses of these devices from lines such as address_0=192.1.27.6; return {} if `path` is None."""
    if path is None:
        return {}
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
    found = {int(n): ip for n, ip in re.findall(r"^\s*address_(\d{1,4})\s*=\s*(\S+)", text, re.M | re.A)}
    for device in devices:
        if not is_address(found.get(device, "")):
            there = f"address_{device}={found[device]}" if device in found else f"no address_{device}"
            raise click.ClickException(f"{path} has {there}; expected the address of device {device}")
    return {device: found[device] for device in devices}


def _write(path: Path, text: str, force: bool) -> None:
    """Write the file completely or not at all. An existing file is replaced only with `force`."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(partial, "x") as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                if force:
                    os.replace(partial, path)
                else:
                    os.link(partial, path)
            finally:
                partial.unlink(missing_ok=True)
    except FileExistsError as error:
        raise click.ClickException(f"{path} exists already; --force replaces it") from error
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error


# -- mscomm ranktable check --------------------------------------------------------------------------------------------


@command.command("check")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--product",
    type=click.Choice(["910"]),
    help="Also report as errors what HCCL refuses and what Atlas 910 servers cannot run, such as devices 2 and 5.",
)
def check_command(files: tuple[str, ...], product: str | None) -> None:
    """Show the ranks of each table, or everything that is wrong with it. The exit status is 1 if anything is wrong.

    Without --product, what HCCL would refuse but the CPU core of mscomm accepts is only a warning.
    """
    from rich.console import Console

    console = Console(soft_wrap=True)
    wrong = [name for name in files if not _check(console, name, product)]
    if wrong:
        raise click.ClickException(f"{len(wrong)} of {len(files)} rank table(s) cannot be used: {', '.join(wrong)}")


def _check(console: Console, name: str, product: str | None) -> bool:
    """Show the table or its errors. Return whether the table is valid."""
    try:
        table = load(name)
    except InvalidTable as error:
        for problem in error.problems:
            click.echo(f"{name}: {problem}")
        if len(error.problems) == MOST_PROBLEMS:
            click.echo(f"{name}: there may be more errors")
        return False
    refused = [*table.remarks, *unfit_for_910(table.seats)] if product else []
    if not refused:
        _show(console, name, table)
    for problem in refused:
        click.echo(f"{name}: {problem}")
    for problem in [] if product else table.remarks:
        click.echo(f"{name}: WARNING: {problem}")
    return not refused


def _show(console: Console, name: str, table: Table) -> None:
    """Print the ranks: as a table on a terminal, otherwise as one line per rank."""
    from rich.markup import escape
    from rich.table import Table as Grid

    title = f"{name}: version {table.version}, {len(table.servers)} server(s), {len(table.seats)} ranks"
    if not console.is_terminal:
        click.echo(title)
        for seat in table.seats:
            click.echo(f"rank {seat.rank}: server {seat.server}, device {seat.device} {seat.device_ip}".rstrip())
        return
    grid = Grid("rank", "server", "device", "device_ip", title=escape(title), title_justify="left")
    for seat in table.seats:
        grid.add_row(str(seat.rank), escape(seat.server), str(seat.device), escape(seat.device_ip))
    console.print(grid)


# -- mscomm ranktable ranks --------------------------------------------------------------------------------------------


@command.command("ranks")
@click.argument("file")
@click.option("--server", metavar="ID", help="This host's server_id. Default: matched by its address or name.")
@click.option("--size", type=int, metavar="N", help="The number of ranks that the table must have (RANK_SIZE).")
def ranks_command(file: str, server: str | None, size: int | None) -> None:
    """Print RANK_ID and DEVICE_ID of each rank that this host must start, one rank per line, for use in a script.

    \b
    mscomm ranktable ranks rank_table.json | while read -r RANK_ID DEVICE_ID; do ...; done
    """
    try:
        table = load(file)
    except InvalidTable as error:
        raise click.ClickException(str(error)) from error
    if size not in (None, len(table.seats)):
        raise click.ClickException(f"{file} has {len(table.seats)} devices, not {size}; name the table of this job")
    for seat in here(table, file, server):
        click.echo(f"{seat.rank} {seat.device}")


def here(table: Table, file: str, server: str | None = None) -> list[Seat]:
    """Return the ranks of `server`.

    If `server` is None, return the ranks of the only server, or of the server with this host's address or name.
    """
    found = [server] if server else table.servers
    if not server and len(found) > 1:
        own = {interface.address for interface in interfaces.interfaces()}
        found = [name for name in found if name in own or name in (socket.gethostname(), socket.getfqdn())]
    seats = [seat for seat in table.seats if seat.server in found]
    if len(found) != 1 or not seats:
        which = f"no server has the server_id {server}" if server else "no server_id is an address or name of this host"
        which = f"several server_ids are addresses of this host, {', '.join(found)}" if len(found) > 1 else which
        raise click.ClickException(f"{file}: {which}; say which with --server: {', '.join(table.servers[:8])}")
    return seats
