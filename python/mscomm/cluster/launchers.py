"""The hub's links to the launchers of other hosts (`mscomm run --nnodes` and `--hosts`).

A launcher says which ranks it starts and how each of them ended. The hub tells it whether the job can continue.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.frames import FROM_HUB_BYTES, Frame, encode
from mscomm.cluster.handlers import handlers
from mscomm.cluster.roster import Roster
from mscomm.cluster.switchboard import Line, Switchboard
from mscomm.errors import Error

_DISMISS_S = 1.0


class State(NamedTuple):
    """What every launcher of a job must know.

    `over`: the reason why the job cannot continue, or None if it can. If it cannot, launchers must end their ranks.
    `goes_on`: whether ranks continue without the lost ranks (mscomm.shrink), or wait to do so. `only_stopped`: whether
    some ranks have ended and all others are stopped (SIGSTOP). `complete`: how often all ranks have joined: once at
    first, and once more for each later epoch.
    """

    over: Error | None = None
    goes_on: bool = False
    only_stopped: bool = False
    complete: int = 0


class _Launcher(Line):
    """The link to another host's launcher, and the ranks that this launcher watches."""

    ranks = range(0)
    name = "another launcher"
    stopped: Sequence[int] = ()  # the ranks on its host that have not ended, if all of them are stopped


class Launchers:
    """The launchers of other hosts, and what each of them reports.

    `nodes`: maps the name of each other host, as shown in messages, to the ranks of the host. `layout`: the options
    that determine each launcher's ranks, as text; the options must be the same on all hosts.

    The hub passes these functions. Three of them handle an event. `process_ended(rank, how, badly, again)`: a launcher
    says how a rank's process ended and whether it restarts the rank. `lost(ranks, why)`: a launcher no longer starts or
    restarts these ranks. `contested(who, seconds)`: a process that was started `seconds` ago wanted to serve another
    job at the hub's port. `log` writes a line to the log, and `tell` writes a line for the user.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        roster: Roster,
        nodes: Mapping[str, range],
        layout: str,
        *,
        process_ended: Callable[[int, str, bool, bool], None],
        lost: Callable[[Sequence[int], str], None],
        contested: Callable[[str, float], None],
        log: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self.attended: set[int] = set()  # the ranks whose launcher has connected; any thread may read this
        self._state = State()
        self._selector = selector
        self._roster = roster
        self._nodes = nodes
        self._layout = layout
        self._process_ended = process_ended
        self._lost = lost
        self._contested = contested
        self._log = log
        self._tell_user = tell
        self._board: Switchboard[_Launcher] = Switchboard(selector, self._handle, self._ended, log)

    def add(self, stream: ByteStream) -> None:
        """Serve a connection whose hello says that it comes from a launcher."""
        self._board.add(_Launcher(stream))

    def announce(self, state: State) -> None:
        """Tell every launcher the state of the job, if it has changed. Launchers that connect later are told too."""
        if state != self._state:
            self._state = state
            for launcher in list(self._board.lines):
                self._tell(launcher)

    def missing(self) -> list[tuple[str, range]]:
        """Return the name and the ranks of each host whose launcher has not connected."""
        return [(name, ranks) for name, ranks in self._nodes.items() if ranks[0] not in self.attended]

    def stopped(self) -> set[int]:
        """Return the stopped ranks of the other hosts. Skip each host on which a rank is still running."""
        return {rank for launcher in self._board.lines for rank in launcher.stopped}

    def dismiss(self) -> None:
        """Tell the launchers that the job is over, and wait until they have closed their links.

        If the hub closed a link first, with unread data in it, the kernel could reset the link, and the launcher would
        miss the message.
        """
        for launcher in list(self._board.lines):
            self._board.write(launcher, encode({"t": "end"}, FROM_HUB_BYTES))
        until = time.monotonic() + _DISMISS_S
        while self._board.lines and time.monotonic() < until:
            for ready, _ in self._selector.select(max(0.0, until - time.monotonic())):
                ready.data()
        for launcher in list(self._board.lines):
            self._board.drop(launcher)

    # -- control frames from the launchers

    def _handle(self, launcher: _Launcher, frame: Frame) -> None:
        """Handle one control frame from a launcher. If this raises Error, the caller ends the launcher's link."""
        if frame["t"] not in FROM_LAUNCHERS:
            raise Error(f"{frame['t']!r} is not a message that a launcher may send, or not for these ranks")
        FROM_LAUNCHERS[frame["t"]](self, launcher, frame)

    def _on_attend(self, launcher: _Launcher, first: int, end: int, name: str, layout: str) -> None:
        launcher.name = name
        objection = None if self._state.over else self._objection(range(first, end), layout)
        if objection:
            self._log(f"refused {name}: {objection}")
            self._tell_user(f"{name} was refused: {objection}")
            self._board.write(launcher, encode({"t": "refused", "why": objection}, FROM_HUB_BYTES))
            self._board.drop(launcher)
            return
        # Register the launcher even if the job is over. _tell() then says so.
        launcher.ranks = range(max(first, 0), min(end, self._roster.size))
        self.attended.update(launcher.ranks)
        self._tell(launcher)

    def _on_ended(self, launcher: _Launcher, rank: int, how: str, badly: bool, again: bool) -> None:
        if rank not in launcher.ranks:
            raise Error("'ended' is not a message that a launcher may send, or not for these ranks")
        self._process_ended(rank, how, badly, again)

    def _on_stopped(self, launcher: _Launcher, ranks: list[Any]) -> None:
        launcher.stopped = [rank for rank in self._roster.known(ranks) if rank in launcher.ranks]

    def _on_gave_up(self, launcher: _Launcher, name: str, why: str) -> None:
        text = f"{name} cannot start its ranks: {why}"
        self._log(text)
        self._tell_user(text)
        self._lost(launcher.ranks, text)

    def _on_rival(self, launcher: _Launcher, who: str, seconds: float) -> None:
        self._contested(who, seconds)

    def _ended(self, launcher: _Launcher, how: str) -> None:
        """A launcher has ended, so its ranks are no longer started or restarted. Ranks that have joined continue."""
        self._lost(launcher.ranks, f"the launcher of {launcher.name} has ended")

    def _objection(self, ranks: range, layout: str) -> str | None:
        """Return why the requesting launcher may not start these ranks, or None if it may."""
        if layout != self._layout:
            return f"it was started with {layout}, and node 0 with {self._layout}; give every node the same"
        if ranks not in self._nodes.values():
            its = f"{ranks.start} to {ranks.stop - 1}"
            return f"it has the ranks {its}, and this job has no other host with these ranks"
        for other in self._board.lines:
            if set(other.ranks).intersection(ranks):
                return f"{other.name} has rank {ranks.start} already; give each node a --node-rank of its own"
        return None

    def _tell(self, launcher: _Launcher) -> None:
        over = self._state.over.fields() if self._state.over else None
        self._board.write(launcher, encode({"t": "state", **self._state._asdict(), "over": over}, FROM_HUB_BYTES))


FROM_LAUNCHERS = handlers(Launchers)
