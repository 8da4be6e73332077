"""Starts the processes of this host's ranks, watches them, and terminates them without leaving anything behind."""

from __future__ import annotations

import ctypes
import functools
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mscomm import environment
from mscomm.bootstrap.launcher import CONTROL_FD, KEY_FD, SCHED
from mscomm.errors import Error
from mscomm.launching import ending
from mscomm.launching.breakpoints import HOOK
from mscomm.launching.ending import End
from mscomm.launching.output import Log, Stream, Streams
from mscomm.launching.parts import LOOK_S, OtherNode, Part
from mscomm.launching.tracebacks import PYTHONS_STATUS, LastWords, Tracebacks
from mscomm.writing import Output

REPORT_S = 5.0  # after the first failure, the other ranks have this long to report before SIGTERM
TERM_S = 2.0  # the time from SIGTERM to SIGKILL
DRAIN_S = 1.0  # how long to read output that is still in the pipes when all ranks have ended
STOPPED_S = 10.0  # if only ranks that are stopped (SIGSTOP) are left, they are killed after this time
STALLED_S = 10.0  # at the end, drop the output if its reader takes nothing for this long
FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
PIPE_CLOSED = 128 + signal.SIGPIPE  # our exit status when nobody reads our output any more
_LOOK_S = 0.05  # how often to look for ranks that ended, if this process cannot handle SIGCHLD
_NOBODY_READ = f"nobody read {{}} for {STALLED_S:g} s"
KILL_AT_SIGNAL = 3  # the third signal, such as a third Ctrl-C, and all later signals kill the ranks at once


_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # looked up now, because few operations are safe between fork and exec


@dataclass(eq=False, repr=False)
class Launch:
    """One run of `command` as `size` ranks on this host. In the main thread, run() also handles signals.

    max_restarts: the maximum number of restarts, in total for all ranks. stdin_rank: the local rank that inherits our
    stdin. call_fds: for each local rank, a descriptor that the rank inherits, and whose number is appended to the
    rank's command. timeout_s: the time after which the ranks are terminated.
    """

    command: Sequence[str]
    size: int
    env: Mapping[str, str]
    part: Part
    log_dir: Path | None = None
    max_restarts: int = 0
    stdin_rank: int | None = None
    call_fds: Sequence[int] = ()
    timeout_s: float = float("inf")

    def __post_init__(self) -> None:
        self._logs: dict[str, Log] = {}  # the log for each file name
        self._started = time.monotonic()
        # The process of each local rank. It is reaped only at the end, or when its rank is restarted. Until then, its
        # pid is not reused.
        self._processes: list[subprocess.Popen[bytes]] = []
        self._restarts: list[int] = []  # the local rank of each restart, in order
        self._ends: dict[int, End] = {}  # how each local rank ended, if it has ended
        self._until = self._started + self.timeout_s
        self.late: list[int] = []  # ranks that were ended at the timeout
        # Since when all remaining ranks of the job are stopped, in time.monotonic() seconds.
        self._stopped_at = float("inf")
        self._stopped: list[int] = []  # ranks that were killed because they were stopped (SIGSTOP)
        self.signals: list[int] = []  # the signals that this process received and passed on
        self._failed = False  # whether a rank of this or another host has failed, and is not restarted
        self._must_end = False  # whether something other than a failure ends the ranks
        self._ending = False
        self._steps: list[tuple[float, signal.Signals]] = []  # when to send which signal to the running ranks
        # The seconds from the start to our first signal. If a rank ends later, the signal may be the reason.
        self._sent_s = float("inf")
        self._look_s = self.part.look_s
        self._selector = selectors.DefaultSelector()
        self._streams = Streams(self._selector)
        self._stdout, self._stderr = self._outputs(self._streams.wake)
        full = environment.read("MSCOMM_TRACEBACK", self.env) == "FULL"
        self._tracebacks = Tracebacks(self._stderr, full)

    def _outputs(self, wake: Callable[[], None]) -> tuple[Output, Output]:
        """Return our stdout and stderr. wake: a function that wakes the launcher."""
        return Output(1, wake), Output(2, wake)

    def run(self) -> int:
        """Start the ranks and wait until they have ended. Return the exit status."""
        try:
            return self._run()
        finally:
            # A writing thread that has not ended may still call wake(), so the descriptor of wake() must stay open.
            if self._stdout.close(DRAIN_S) and self._stderr.close(DRAIN_S):
                self._streams.release()

    def _run(self) -> int:
        with ExitStack() as logs:
            if not isinstance(self.part, OtherNode):
                self._open_log("scheduler.log", logs)
            with ExitStack() as stack:
                stack.callback(self._selector.close)
                self.part.open(stack, self._note, self._say)  # this may wait; until it returns, Ctrl-C ends us
                self._take_signals(stack)
                stack.callback(self._end_all)
                self._start_ranks(stack, logs)
                try:
                    self._watch()
                except BrokenPipeError:  # e.g. `mscomm run ... | head`: nobody reads any more
                    self._tracebacks.show()
                    return PIPE_CLOSED
            return self._summary(self.part.verdict(), self._elsewhere())

    # -- starting the ranks

    def _take_signals(self, stack: ExitStack) -> None:
        """Turn signals into bytes that the selector sees. Each byte is the number of a signal."""
        if threading.current_thread() is not threading.main_thread():
            self._look_s = _LOOK_S  # look for ended ranks, because only the main thread can handle SIGCHLD
            return
        reader, writer = socket.socketpair()
        for sock in (reader, writer):
            sock.setblocking(False)
            stack.callback(sock.close)
        old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, old_fd)
        for number in (signal.SIGCHLD, *FORWARDED):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # the launcher runs under nohup: keep ignoring SIGHUP
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._signalled(reader.recv(4096)))

    def _note(self, text: str) -> None:
        """Write a line to the scheduler's log. Any thread may call this."""
        if log := self._logs.get("scheduler.log"):
            log.write(f"{time.strftime('%H:%M:%S')} {text}\n".encode())

    def _open_log(self, name: str, stack: ExitStack) -> None:
        if self.log_dir is not None:
            self._logs[name] = Log(self.log_dir / name)
            stack.callback(self._logs[name].close)

    def _start_ranks(self, stack: ExitStack, logs: ExitStack) -> None:
        for local_rank in range(self.size):
            self._open_log(f"worker_{self.part.first + local_rank}.log", logs)
            self._processes.append(self._start_rank(local_rank))
        self.part.serve(stack)
        for stream in self.part.streams(self._stdout, self._stderr):
            self._streams.add(stream)

    def _start_rank(self, local_rank: int) -> subprocess.Popen[bytes]:
        """Start the rank's process, and pass its output on to ours."""
        rank = self.part.first + local_rank
        inherited, variables = self.part.entrance(rank)
        with inherited:
            stdin = None if local_rank == self.stdin_rank else subprocess.DEVNULL
            inherits = [inherited.fileno(), *self.call_fds[local_rank : local_rank + 1]]
            process = self._execute(inherits, stdin, {**self._environment(local_rank), **variables})
        assert process.stdout and process.stderr
        log, prompts = self._logs.get(f"worker_{rank}.log"), local_rank == self.stdin_rank and os.isatty(0)
        held = functools.partial(self._tracebacks.take, rank)
        self._streams.add(Stream(process.stdout, rank, self._stdout, log, lambda lines: lines, prompts))
        self._streams.add(Stream(process.stderr, rank, self._stderr, log, held, prompts))
        return process

    def _execute(self, inherits: Sequence[int], stdin: int | None, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        launcher = os.getpid()

        def end_with_launcher() -> None:
            _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
            if os.getppid() != launcher:  # the launcher ended before prctl took effect
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            return subprocess.Popen(
                [*self.command, *map(str, inherits[1:])],
                env=env,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=inherits,
                start_new_session=True,  # a process group of its own, which can be killed as a whole
                preexec_fn=end_with_launcher,  # safe: it takes no lock that another thread could hold
            )
        except OSError as error:
            raise Error(f"cannot start {' '.join(self.command)}: {error.strerror}") from error

    def _environment(self, local_rank: int) -> dict[str, str]:
        """Return the environment of the rank, without the variables that come from part.entrance()."""
        env = {name: value for name, value in self.env.items() if name not in (SCHED, KEY_FD, CONTROL_FD)}
        if local_rank != self.stdin_rank and not self.env.get("PYTHONBREAKPOINT"):
            env["PYTHONBREAKPOINT"] = HOOK if self.stdin_rank is None else "0"
        return env | {
            "MSCOMM_RANK": str(self.part.first + local_rank),
            "MSCOMM_WORLD_SIZE": str(self.part.size),
            "MSCOMM_LOCAL_RANK": str(local_rank),
            "MSCOMM_LOCAL_WORLD_SIZE": str(self.size),
            "MSCOMM_RESTART_COUNT": str(self._restarts.count(local_rank)),
        }

    # -- watching the ranks

    def _watch(self) -> None:
        while len(self._ends) < self.size:
            self._turn(self._sleep_s())
            self._look_for_ends()
            self._end_unless_ranks_go_on()
            if self._until <= time.monotonic():
                self._end_late()
            self._look_for_stopped()
            self._streams.prompt()
            if self._tracebacks.due <= time.monotonic() and not self._ending:
                self._tracebacks.show()
            while self._steps and self._steps[0][0] <= time.monotonic():
                self._tracebacks.show()
                self._send(self._steps.pop(0)[1])
        self._kill_groups()
        self._streams.take_all()
        until = time.monotonic() + DRAIN_S
        while self._streams and time.monotonic() < until:
            self._turn(max(0.0, until - time.monotonic()))
        self._show_last(self._tracebacks.release(first.rank if (first := self._first()) else None))
        signals = len(self.signals)
        while self.part.needed(all(end.code == 0 for end in self._ends.values())) and len(self.signals) == signals:
            self._turn(self.part.look_s)

    def _show_last(self, tracebacks: bytes) -> None:
        """Show the tracebacks that were still held back when the last rank ended."""
        self._stderr.write(tracebacks)

    def _sleep_s(self) -> float | None:
        """Return the seconds until something is due or `part` must be asked again; None to wait only for events."""
        at_s = [self._streams.prompt_at_s, self._until, *(step[0] for step in self._steps[:1])]
        at_s += [self._stopped_at + STOPPED_S]
        at_s += [] if self._ending else [self._tracebacks.due]
        waits = [max(0.0, min(at_s) - time.monotonic())] if min(at_s) < float("inf") else []
        waits += [self._look_s] if self._look_s is not None else []
        waits += [LOOK_S] if self._failed else []  # no event says whether the other ranks continue
        return min(waits) if waits else None

    def _end_unless_ranks_go_on(self) -> None:
        """After a failure, end the remaining ranks, unless they continue without the failed ranks (shrink)."""
        if not self._failed and self.part.look_s is not None:
            over = self.part.over()  # a rank that was lost for good on another host ends the job on this host too
            self._failed = over is not None and not self._has_one_of(over.ranks)
        if not self._failed:
            return
        if self.part.goes_on() and not self._must_end and self._sent_s == float("inf"):
            self._ending, self._steps = False, []
        else:
            self._end_soon()

    def _elsewhere(self) -> Error | None:
        """Return the first failure if it was on another host."""
        over, verdict = self.part.over(), self.part.verdict()
        if over is not None and self.size < self.part.size and not self._has_one_of(over.ranks):
            return over
        return verdict if verdict and verdict.ranks and not self._has_one_of(verdict.ranks[:1]) else None

    def _has_one_of(self, ranks: Sequence[int]) -> bool:
        return any(self.part.first <= rank < self.part.first + self.size for rank in ranks)

    def _turn(self, wait_s: float | None) -> None:
        for ready, _ in self._selector.select(wait_s):
            ready.data()

    def _look_for_ends(self) -> None:
        """Note which ranks have ended. Do not reap them, so that their process ids are not reused."""
        now = time.monotonic() - self._started
        for local_rank in self._running():
            info = os.waitid(os.P_PID, self._processes[local_rank].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
                end = End(self.part.first + local_rank, code, now)
                may_restart = len(self._restarts) < self.max_restarts and not self._ending
                again = code != 0 and may_restart and self.part.can_restart()
                self.part.ended(end.rank, end.how, code != 0, again)
                if again:
                    self._restart(local_rank, end)
                    continue
                self._ends[local_rank] = end
                self._failed = self._failed or code != 0

    def _restart(self, local_rank: int, end: End) -> None:
        """Restart a rank that failed. The other ranks continue."""
        self._restarts.append(local_rank)
        self._tracebacks.show()
        count = f"restart {len(self._restarts)} of {self.max_restarts}"
        self._say(f"rank {end.rank} is started again ({count}): {end.how} after {end.after_s:.1f} s")
        process = self._processes[local_rank]
        os.killpg(process.pid, signal.SIGKILL)  # also kills the rank's children; the pid is not reused before wait()
        process.wait()
        self._processes[local_rank] = self._start_rank(local_rank)

    def _end_soon(self) -> None:
        """End all ranks, but give them REPORT_S to end by themselves."""
        if not self._ending:
            self._ending = True
            until = time.monotonic() + REPORT_S
            self._steps = [(until, signal.SIGTERM), (until + TERM_S, signal.SIGKILL)]

    def _end_late(self) -> None:
        """End all ranks because the timeout has passed."""
        now, self._until = time.monotonic(), float("inf")
        if not self._ending:  # otherwise the ranks are late because one of them failed
            self.late = [self.part.first + local for local in self._running()]
        self._ending = self._must_end = True
        self._steps = [(now, signal.SIGTERM), (now + TERM_S, signal.SIGKILL)]

    def _running(self) -> list[int]:
        """Return the local ranks that have not ended."""
        return [local for local in range(self.size) if local not in self._ends]

    def _look_for_stopped(self) -> None:
        """Kill ranks that are stopped (SIGSTOP) if all other ranks have ended, because nothing else would end them."""
        left, now = self._running(), time.monotonic()
        stopped = [self.part.first + local for local in left] if all(map(self._is_stopped, left)) else []
        self.part.stopped(stopped)
        if self._ending or not stopped or not self.part.only_stopped():
            self._stopped_at = float("inf")
            return
        self._stopped_at = min(self._stopped_at, now)
        if now >= self._stopped_at + STOPPED_S:
            self._stopped_at, self._stopped = float("inf"), stopped
            self._ending = self._must_end = True
            self._steps = [(now, signal.SIGKILL)]

    def _is_stopped(self, local_rank: int) -> bool:
        """Return whether the rank's process is stopped. WNOWAIT keeps the state for later calls."""
        flags = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT  # without WEXITED, waitid fails for an ended process
        info = os.waitid(os.P_PID, self._processes[local_rank].pid, flags)
        return info is not None and info.si_code == os.CLD_STOPPED

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number in FORWARDED:
                self.signals.append(number)
                if number == signal.SIGINT:
                    self._tracebacks.interrupt()
                self._must_end = True
                self.part.forward(number)
                self._send(signal.SIGKILL if len(self.signals) >= KILL_AT_SIGNAL else signal.Signals(number))
                self._end_soon()

    def _send(self, number: signal.Signals) -> None:
        """Send the signal to the process groups of the ranks that are still running."""
        self._sent_s = min(self._sent_s, time.monotonic() - self._started)
        for local_rank in self._running():
            os.killpg(self._processes[local_rank].pid, number)

    # -- ending the ranks, and the summary

    def _kill_groups(self) -> None:
        """Kill the ranks' process groups. The ranks are not reaped yet, so no other process can have their ids."""
        for process in self._processes:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)

    def _end_all(self) -> None:
        self._kill_groups()
        for process in self._processes:
            process.wait()
        self._streams.close()

    def _first(self) -> End | None:
        """Return the failed rank to report.

        Prefer ranks that ended before our first signal. Among them, prefer the rank that the verdict names, and then
        the rank that failed first.
        """
        verdict = self.part.verdict()
        named = verdict.ranks[:1] if verdict else ()
        failed = [end for end in self._ends.values() if end.code != 0]
        return min(failed, key=lambda end: self._order(end, named), default=None)

    def _words(self) -> dict[int, LastWords]:
        """Return the exceptions that ended ranks, keyed by rank."""
        by_exception = [end for end in self._ends.values() if end.code in (PYTHONS_STATUS, -signal.SIGINT)]
        found = {end.rank: self._tracebacks.of(end.rank, self._started + end.after_s) for end in by_exception}
        return {rank: words for rank, words in found.items() if words}

    def _cause(self, first: End, verdict: Error | None) -> str:
        if self.signals and first.after_s >= self._sent_s:
            return ending.interrupted(self.signals[0], first.after_s, self._words())
        if first.rank in self._stopped:
            return ending.stopped(self._stopped)
        others = [end for end in self._ends.values() if end.code != 0 and end is not first]
        here = " on this host" if self.size < self.part.size else ""
        text = ending.failed(first, others, self._words(), verdict, here)
        if self.log_dir is None:
            return text
        rank = next((rank for rank in (verdict.waiting_for if verdict else ()) if self._has_one_of([rank])), first.rank)
        return f"{text}; the log of rank {rank}: {self.log_dir / f'worker_{rank}.log'}"

    def _summary(self, verdict: Error | None, elsewhere: Error | None) -> int:
        """If the job failed, print how it ended. Return the exit status."""
        first = self._first()
        if elsewhere:
            self._say(f"the job failed on another host: {elsewhere.kind}: {elsewhere}")
        elif first:
            self._say(self._cause(first, verdict))
        for log in self._logs.values():
            if log.complaint:
                self._say(log.complaint)
        dropped = self._flush()
        return first.status if first else int(bool(elsewhere or dropped))

    def _flush(self) -> bool:
        """Write all remaining output. If nobody reads it, say how much was dropped. Return whether any was dropped."""
        dropped = self._stdout.flush(STALLED_S)
        if dropped:
            self._say(f"{dropped} bytes of the ranks' output were dropped: {_NOBODY_READ.format('stdout')}")
        dropped_errors = self._stderr.flush(STALLED_S)
        for count, name in ((dropped, "stdout"), (dropped_errors, "stderr")):
            if count:
                self._note(f"{count} bytes of output were dropped: {_NOBODY_READ.format(name)}")
        return bool(dropped or dropped_errors)

    def _say(self, text: str) -> None:
        self._stderr.write(f"mscomm run: {text}\n".encode())

    def _order(self, end: End, named: tuple[int, ...]) -> tuple[bool, bool, float, bool]:
        """Return a sort key that puts the rank that probably caused the failure first.

        If several ranks were found to have ended at the same time, a killed rank comes before a rank that exited.
        """
        return end.after_s >= self._sent_s, end.rank not in named, end.after_s, end.code > 0
