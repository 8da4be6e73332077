"""Tells the user which hosts and ranks a job is waiting for before it begins, and which connections were refused."""

from __future__ import annotations

import time
from collections.abc import Callable

from mscomm.cluster.launchers import Launchers
from mscomm.cluster.plan import named
from mscomm.cluster.roster import Roster

_TELL_AFTER_S, _TELL_EVERY_S = 10.0, 60.0  # when to tell the user which ranks are missing, and how often after that
_UNPROVEN_EVERY_S = 10.0


class WaitNotices:
    """Writes the lines that a user sees while a job is waiting for its hosts and ranks. `tell` writes one line."""

    def __init__(self, roster: Roster, launchers: Launchers, tell: Callable[[str], None]) -> None:
        self._roster = roster
        self._launchers = launchers
        self._tell = tell
        self._turned_away = ""  # the most recent refused connection, as text; "" if the user has been told
        self._unproven = 0  # how many peers with a wrong key have come since the user was last told about such peers
        self._unproven_at = 0.0  # when the user may next be told about such peers
        self.due: float | None = None  # when look() has something to say; None if it has nothing to say

    def begin(self) -> None:
        """Begin to wait. Until this is called, the user is told only about connections with a wrong key."""
        self.due = time.monotonic() + _TELL_AFTER_S

    def end(self) -> None:
        """Stop waiting, because the job has begun or is over."""
        self.due = None

    def look(self, now: float) -> None:
        """Say which hosts or ranks are missing, if it is time to do so."""
        if self.due is None or now < self.due:
            return
        self.due = now + _TELL_EVERY_S
        nodes = [f"{name} ({named(ranks)})" for name, ranks in self._launchers.missing()]
        absent = [rank for rank in range(self._roster.size) if self._roster.at(rank) is None]
        last = f"; {self._turned_away}" if self._turned_away else ""
        if nodes:
            self._tell(f"waiting for {', '.join(nodes)}: nothing there has connected to {self._roster.address}{last}")
        elif len(self._roster) and absent:
            self._tell(f"waiting for {named(absent)} to call mscomm.init(){last}")
        self._turned_away = ""

    def turned_away(self, address: str, why: str, unproven: bool) -> None:
        """Note a refused connection.

        unproven: whether the peer has another key, or a certificate that does not fit. If so, tell the user now instead
        of in look(), but at most once in _UNPROVEN_EVERY_S.
        """
        self._turned_away = f"a connection from {address} was turned away: {why}"
        if not unproven:
            return
        self._unproven += 1
        if time.monotonic() >= self._unproven_at:
            self._tell(
                f"a connection from {address} was refused: {why}"
                f"{f' ({self._unproven} such connections)' if self._unproven > 1 else ''}; give every host the same "
                "files in MSCOMM_JOB_KEY_FILE and MSCOMM_SSL_CONFIG_FILE"
            )
            self._unproven, self._unproven_at = 0, time.monotonic() + _UNPROVEN_EVERY_S
