"""Ends the processes of the ranks when their launcher was killed. A program of its own, without the package.

    python watcher.py LAUNCHER GRACE_S

The kernel sends SIGTERM to a rank's own process when the launcher ends (PR_SET_PDEATHSIG). But that process may be a
wrapper (a shell script, `uv run`), and the program itself its child. So this program sends SIGTERM to the other
processes in the ranks' process groups, and after GRACE_S seconds SIGKILL to all processes in the groups. The launcher
writes the process ids of its ranks to stdin, one in each line, with a minus sign when the rank has been reaped.
"""

from __future__ import annotations

# Every job starts this program, so it imports only what starts fast: contextlib would take 6 ms of its 20.
import os
import select
import signal
import sys
import time

LOOK_S = 0.1


def main(launcher: int, grace_s: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # batch systems send these to all processes of a job
    groups = _groups_at_the_end_of(launcher)
    for pid, group in _processes():
        if group in groups and pid != group:
            _kill(pid, signal.SIGTERM)
    until = time.monotonic() + grace_s
    # A group without processes has ended, and its number may be that of another group later.
    while (groups := groups & {group for _, group in _processes()}) and time.monotonic() < until:
        time.sleep(LOOK_S)
    for group in groups:
        _kill(-group, signal.SIGKILL)


def _groups_at_the_end_of(launcher: int) -> set[int]:
    """Wait until the launcher has ended, and return the process groups of its ranks.

    A child that the launcher has forked may hold the other end of stdin open, so the launcher's pidfd counts, too.
    """
    groups: set[int] = set()
    poll = select.poll()
    poll.register(0, select.POLLIN)
    try:  # noqa: SIM105
        poll.register(os.pidfd_open(launcher), select.POLLIN)
    except (OSError, AttributeError):  # the kernel, Python or a sandbox may not offer pidfds
        pass
    rest, data = b"", b"more"
    while data:
        gone = os.getppid() != launcher
        if any(fd == 0 for fd, _ in poll.poll(0 if gone else None)):
            data = os.read(0, 65536)
            *lines, rest = (rest + data).split(b"\n")
            for number in map(int, lines):
                groups.add(number) if number > 0 else groups.discard(-number)
        elif gone:
            break
    return groups


def _processes() -> list[tuple[int, int]]:
    """Return the process id and the process group of each process that has not ended."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _, group = file.read().rpartition(b")")[2].split()[:3]
        except OSError:  # it has ended meanwhile
            continue
        if state != b"Z":
            found.append((int(name), int(group)))
    return found


def _kill(pid: int, number: signal.Signals) -> None:
    try:  # noqa: SIM105
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
