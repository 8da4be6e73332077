"""The launcher that ssh starts on another host for `mscomm run --hosts`. Everything it needs comes through stdin."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import msgpack

from mscomm.cli import run
from mscomm.cli.remote import LENGTH, MOST_BYTES
from mscomm.cluster.protection import of_command
from mscomm.errors import Error
from mscomm.launching.parts import OtherNode
from mscomm.launching.processes import FORWARDED, Launch
from mscomm.threads import start_thread


def main() -> None:
    """Run this host's ranks, and exit with their status."""
    task = _read_task()
    start_thread(threading.Thread(target=_obey, name="mscomm-stdin", daemon=True))
    try:
        sys.exit(_run(task))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _run(task: Mapping[str, Any]) -> int:
    os.environ.update(task["env"])
    ranks = range(task["first"], task["end"])
    log_dir = Path(task["log_dir"]) if task["log_dir"] else None
    try:
        where = task["host"], task["port"], of_command(os.environ, False, ""), task["timeout"]
        part = OtherNode(task["size"], ranks, task["name"], "--hosts", *where, task["key"], task["rank_0"])
        try:
            os.chdir(task["cwd"])
            line, env = run.prepare(task["script"], tuple(task["args"]), task["module"], len(ranks), log_dir)
            cpus = run.cpus_of_ranks(task["bind_to"], len(ranks))
        except (click.ClickException, OSError):
            # Tell node 0 about the error: open() connects to node 0, and the end of the `with` block sends the error.
            with ExitStack() as stack:
                part.open(stack, lambda text: None, lambda text: None)
                raise
        limits = {"timeout_s": task["limit"], "grace_s": task["grace"]}
        return Launch(line, len(ranks), env, part, log_dir, task["max_restarts"], cpus=cpus, **limits).run()
    except (Error, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _read_task() -> dict[str, Any]:
    (length,) = LENGTH.unpack(_read(LENGTH.size))
    if length > MOST_BYTES:
        raise SystemExit("mscomm run: what stdin contains was not sent by `mscomm run --hosts`")
    task: dict[str, Any] = msgpack.unpackb(_read(length), unicode_errors="surrogateescape")
    return task


def _read(count: int) -> bytes:
    data = b""
    while len(data) < count:
        received = os.read(0, count - len(data))
        if not received:
            raise SystemExit("mscomm run: the host that started this one closed the connection")
        data += received
    return data


def _obey() -> None:
    """Read signal numbers from stdin, and send these signals to this process.

    When stdin is closed, send SIGTERM, unless the ranks have been told to end already: then SIGTERM and SIGKILL follow
    in time, and one more signal could kill a rank that saves its state.
    """
    numbers = []
    while data := os.read(0, 1):
        numbers.append(data[0])
        # Until Launch handles the other signals, no rank is running, and such a signal would end this process.
        if data[0] in FORWARDED or signal.getsignal(data[0]) != signal.SIG_DFL:
            os.kill(os.getpid(), data[0])
    if not set(numbers) & set(FORWARDED):
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
