"""Joins under torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. torch_env.py uses join() too.

MASTER_PORT is the port of torch's own store. torchrun's agent or the script's init_process_group() binds it, before us
or after us. So in a job on several hosts, the hub listens at one of the ports from ports_instead(), which avoids
MASTER_PORT if possible. A job on several hosts without a key file gets its key through this store (torch_store.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from mscomm import log
from mscomm.bootstrap import kvs
from mscomm.bootstrap.invitation import Invitation, Seat, turn
from mscomm.bootstrap.rendezvous import Meeting, Spot, is_loopback_name, number, port_range, ports_instead
from mscomm.bootstrap.torch_store import TorchStore, connected
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.protection import Protection

NAME = "torchrun"
PLACE = (("RANK",), ("WORLD_SIZE",))
DEFAULT_PORT = 29500


def detect(env: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in env


def accept(env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
    return join(NAME, env, deadline, protection)


def join(launcher: str, env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
    size = number(launcher, env, "WORLD_SIZE", 1)
    rank = number(launcher, env, "RANK", 0, size - 1)
    local_rank = number(launcher, env, "LOCAL_RANK", 0, size - 1) if "LOCAL_RANK" in env else None
    host = env.get("MASTER_ADDR", "") or "127.0.0.1"
    port = number(launcher, env, "MASTER_PORT", 1, 65535) if env.get("MASTER_PORT") else DEFAULT_PORT
    one_agent = size == 1 or env.get("LOCAL_WORLD_SIZE") == str(size)
    number_of_join = turn(NAME)
    life = f"{env.get('TORCHELASTIC_RUN_ID', '')} {number_of_join}"
    if one_agent:  # with several agents, leave out the restart count, because it may differ between ranks
        life += f" {env.get('TORCHELASTIC_RESTART_COUNT', '')}"
    ports = ports_instead(port, env)
    advice = (
        f"Rank 0 must run on the host of MASTER_ADDR={host}, and the others must reach its {port_range(ports)} "
        f"(MASTER_PORT={port} itself is torch's)"
    )
    if port in ports:
        advice += ". MSCOMM_PORTS has no port but that one. If torch's store uses it, give mscomm one more port"
    one_host = one_agent or is_loopback_name(host)
    if one_host:
        advice = "Has rank 0 ended, or does it never call init()?"
    seat, spot = Seat(rank, size, local_rank, one_host), Spot(f"torch {host} {port} {life}", host, ports)
    has_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and importlib.util.find_spec("torch") is not None
    if has_store and not one_host and kvs.lacks_key(env, protection):
        store = TorchStore(launcher, connected(launcher, host, port, deadline), f"mscomm/{number_of_join}", seat)
        invitation = kvs.Join(launcher, seat, store, env, deadline, protection).invitation()
        if rank == 0:
            log.warn(
                "this job has no key file, so its key passed encrypted through torch's store. Anybody who can write to "
                f"{host}:{port} can join this job. MSCOMM_JOB_KEY_FILE=/path/to/key prevents that."
            )
        return invitation
    return Meeting(launcher, seat, spot, env, deadline, protection, advice).invitation()
