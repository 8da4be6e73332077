"""Measures what a scheduler with many workers costs: its CPU time and its memory.

    python bench/workers.py -n 1000

The scheduler is a real `mscomm sched` process on one CPU. The workers are simulated in this process: each has a TCP
connection, a real hello, and sends the control frames of a job that joins, sets up the world, makes one more group of
all ranks, and leaves. The script prints a Markdown table with the scheduler's CPU seconds up to the end of each phase,
and its peak memory.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psutil

from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.frames import FROM_HUB_BYTES, FROM_MEMBER_BYTES, Frame, Parser, encode
from mscomm.cluster.hello import CONTROL, UNKNOWN_RANK, Hello, Identity, package_version
from mscomm.cluster.plan import world_id
from mscomm.cluster.security import admission_key

_AT_ONCE = 32  # how many hellos are in progress at once; the scheduler drops the oldest of more than 64
PHASES = ("hello", "join", "world", "ready", "group", "leave")


class Worker:
    """One simulated worker."""

    def __init__(self, address: tuple[str, int], key: bytes, number: int, size: int, selector: Any) -> None:
        self.number, self.size, self.selector = number, size, selector
        self.stream = ByteStream(socket.create_connection(address))
        me = Identity(version=package_version(), rank=UNKNOWN_RANK)
        self.hello = Hello.connector(admission_key(key, CONTROL), CONTROL, me)
        self.parser = Parser(FROM_HUB_BYTES)
        self.stream.send(self.hello.feed(b""))
        selector.register(self.stream, selectors.EVENT_READ, self)

    def say(self, frame: Frame) -> None:
        data = encode(frame, FROM_MEMBER_BYTES)
        assert self.stream.send(data) == len(data), "the scheduler does not read"

    def start(self, phase: str) -> None:
        """Send what begins the phase."""
        if phase == "join":
            facts = {
                "version": package_version(),
                "backend": "auto",
                "size": self.size,
                "algo": "",
                "host": f"{self.number // 8:036d} net:[4026531840] pid:[4026531836] ipc:[4026531839]",
                "hostname": f"node{self.number // 8}",
                "pid": 1000 + self.number,
                "cpus": list(range(8)),
                "quota": None,
                "memory": b"\0mscomm-" + secrets.token_hex(16).encode(),
                "link": "10.0.0.1",
            }
            self.say({"t": "join", "rank": None, "node_id": None, "facts": facts})
        elif phase in ("world", "group"):
            key = world_id(0) if phase == "world" else "0:everybody"
            words = {"key": key, "name": phase, "ranks": list(range(self.size))}
            facts = {"layout": "0" * 16, "data": [["10.0.0.1", 40000 + self.number]]}
            self.say({"t": "meet", "founds": True, "survivors": False, "facts": facts, **words})
        elif phase == "ready":
            self.say({"t": "ready", "epoch": 0})
        elif phase == "leave":
            self.say({"t": "bye", "number": 1, "numbers": {}})
            self.stream.close_for_writing()

    def ready_to_read(self) -> bool:
        """Read what has arrived. Return whether it completes the current phase."""
        if not self.hello.done:
            received = self.stream.receive(self.hello.needs)
            assert received != b"", "the scheduler dropped a connection"
            self.stream.send(self.hello.feed(received or b""))
            return self.hello.done
        received = self.stream.receive(1 << 20)
        if received == b"":
            self.selector.unregister(self.stream)
            self.stream.close()
            return True
        done = False
        for frame in self.parser.feed(received or b""):
            assert frame["t"] in ("welcome", "facts", "met", "go", "left"), frame
            if frame["t"] in ("met", "facts"):
                assert len(frame["facts"]) == self.size
            done = done or frame["t"] in ("welcome", "met", "go")
        return done


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def peak_mib(process: psutil.Process) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@contextlib.contextmanager
def scheduler(size: int) -> Iterator[tuple[tuple[str, int], bytes, subprocess.Popen[bytes]]]:
    """Start a scheduler on one CPU. Yield its address, the job's key and the process."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    key = secrets.token_bytes(32)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = Path(folder, "key")
        file.touch(0o600)
        file.write_bytes(key)
        variables = {"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port), "MS_WORKER_NUM": str(size)}
        env = {**os.environ, **variables, "MS_ROLE": "MS_SCHED", "MSCOMM_JOB_KEY_FILE": str(file)}
        log = stack.enter_context(open(Path(folder, "log"), "wb"))  # gets a line for each worker
        cpus = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cpus)})  # the scheduler inherits this
        process = subprocess.Popen([sys.executable, "-m", "mscomm", "sched"], env=env, stdout=log, stderr=log)
        os.sched_setaffinity(0, cpus)
        try:
            yield ("127.0.0.1", port), key, process
        finally:
            process.kill()
            process.wait()


def run(size: int) -> tuple[dict[str, float], float, float]:
    """Run one job. Return the scheduler's CPU seconds up to the end of each phase, its peak MiB, and the seconds."""
    with scheduler(size) as (address, key, process), selectors.DefaultSelector() as selector:
        until = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(address).close()
                break
            assert time.monotonic() < until and process.poll() is None, "the scheduler does not listen"
            time.sleep(0.02)
        watched = psutil.Process(process.pid)
        began, before = time.monotonic(), cpu_s(watched)
        spent: dict[str, float] = {}
        workers: list[Worker] = []
        peak = 0.0
        for phase in PHASES:
            if phase == "hello":
                waiting: set[Worker] = set()
                while len(workers) < size or waiting:
                    while len(workers) < size and len(waiting) < _AT_ONCE:
                        workers.append(Worker(address, key, len(workers), size, selector))
                        waiting.add(workers[-1])
                    waiting -= turn(selector)
            else:
                for worker in workers:
                    worker.start(phase)
                waiting = set(workers)
                while waiting:
                    waiting -= turn(selector)
            peak = peak_mib(watched) if phase != "leave" else peak
            spent[phase] = (cpu_s(watched) if phase != "leave" else spent_by(process)) - before
        return spent, peak, time.monotonic() - began


def spent_by(process: subprocess.Popen[bytes]) -> float:
    """Wait for the end of the scheduler. Return its CPU seconds, which the kernel adds to those of ended children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.wait(30) == 0, "the job did not end well"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def turn(selector: selectors.BaseSelector) -> set[Worker]:
    """Let the workers read. Return those that have completed their phase."""
    ready = selector.select(60)
    assert ready, "nothing happened for a minute"
    return {key.data for key, _ in ready if key.data.ready_to_read()}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-n", "sizes", default="250,500,1000", show_default=True, help="Numbers of workers.")
def main(sizes: str) -> None:
    print("| workers | " + " | ".join(PHASES) + " | peak MiB | seconds |")
    print("|---" * (len(PHASES) + 3) + "|")
    for size in map(int, sizes.split(",")):
        spent, peak, seconds = run(size)
        times = " | ".join(f"{spent[phase]:.2f}" for phase in PHASES)
        print(f"| {size} | {times} | {peak:.0f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
