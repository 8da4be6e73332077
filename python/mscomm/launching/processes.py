"""Starts the processes of this host's ranks, watches them, and ends them so that nothing is left behind."""

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
from pathlib import Path

from mscomm import environment
from mscomm.bootstrap.launcher import CONTROL_FD, KEY_FD, SCHED
from mscomm.errors import Error
from mscomm.launching import ending
from mscomm.launching.breakpoints import HOOK
from mscomm.launching.ending import End
from mscomm.launching.output import Log, Output, Stream, Streams
from mscomm.launching.parts import LOOK_S, OtherNode, Part
from mscomm.launching.tracebacks import PYTHONS_STATUS, LastWords, Tracebacks

REPORT_S = 5.0  # after the first failure, the other ranks have this long to report before SIGTERM
TERM_S = 2.0  # the time from SIGTERM to SIGKILL
DRAIN_S = 1.0  # how long to read output that is still in the pipes when all ranks have ended
STOPPED_S = 10.0  # when all other ranks have ended, ranks that have been stopped for so long are killed
STALLED_S = 10.0  # at the end, drop the output if its reader takes nothing for this long
FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
PIPE_CLOSED = 128 + signal.SIGPIPE  # our exit status when nobody reads our output any more
_LOOK_S = 0.05  # how often to look for ranks that ended, if this process cannot handle SIGCHLD
_NOBODY_READ = f"nobody read {{}} for {STALLED_S:g} s"
KILL_AT_SIGNAL = 3  # this signal and all later ones, for example the third Ctrl-C, kill the ranks at once


_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # looked up here, because between fork and exec very little is safe


class CannotStart(Exception):
    """The program cannot be executed; the text says why."""


def standard_streams(wake: Callable[[], None]) -> tuple[Output, Output]:
    return Output(1, wake), Output(2, wake)


class Launch:
    """One run of `command` as `size` ranks on this host. If it runs in the main thread, it also handles the signals.

    max_restarts: the number of restarts of failed processes, for all ranks together. stdin_rank: the local rank that
    inherits our stdin. outputs: a function that makes our stdout and stderr; its argument is a function that wakes the
    launcher. call_fds: by local rank, descriptors that the ranks inherit; their numbers are appended to the commands.
    timeout_s: the ranks are ended after this time.
    """

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        env: Mapping[str, str],
        part: Part,
        log_dir: Path | None = None,
        max_restarts: int = 0,
        stdin_rank: int | None = None,
        outputs: Callable[[Callable[[], None]], tuple[Output, Output]] = standard_streams,
        call_fds: Sequence[int] = (),
        timeout_s: float = float("inf"),
    ) -> None:
        self._command = list(command)
        self._size = size
        self._env = {name: value for name, value in env.items() if name not in (SCHED, KEY_FD, CONTROL_FD)}
        self._part = part
        self._log_dir = log_dir
        self._scheduler_log: Log | None = None
        self._logs: list[Log] = []
        self._started = time.monotonic()
        # By local rank. A process is reaped only at the end or before its successor starts, so its pid is not reused.
        self._processes: list[subprocess.Popen[bytes]] = []
        self._worker_logs: list[Log | None] = []  # by local rank
        self._max_restarts = max_restarts
        self._restarts: list[int] = []  # the local rank of each restart, in order
        self._ends: dict[int, End] = {}  # by local rank
        self._stdin_rank = stdin_rank
        self._call_fds = call_fds
        self._until = time.monotonic() + timeout_s
        self.late: list[int] = []  # ranks that were ended at the timeout
        self._stopped_at = float("inf")  # since when only stopped ranks are left, in time.monotonic() seconds
        self._stopped: list[int] = []  # ranks that were killed because of that
        self.signals: list[int] = []  # the signals that this process received and passed on
        self._failed = False  # whether a rank has failed, here or on another host, and is not restarted
        self._must_end = False  # whether something else than a failure ends the ranks
        self._ending = False
        self._steps: list[tuple[float, signal.Signals]] = []  # when to send which signal to ranks that still run
        self._sent_s = float("inf")  # when we first sent a signal, which may be why ranks ended after that
        self._look_s = part.look_s
        self._selector = selectors.DefaultSelector()
        self._streams = Streams(self._selector)
        self._stdout, self._stderr = outputs(self._streams.wake)
        full = environment.read("MSCOMM_TRACEBACK", env) == "FULL"
        self._tracebacks = Tracebacks(self._stderr, full)

    def run(self) -> int:
        """Start the ranks and wait until they have ended. Returns the exit status."""
        try:
            return self._run()
        finally:
            # A writing thread that has not ended may still call wake(), and then the descriptor of wake() must be open.
            if self._stdout.close(DRAIN_S) and self._stderr.close(DRAIN_S):
                self._streams.release()

    def _run(self) -> int:
        with ExitStack() as logs:
            if not isinstance(self._part, OtherNode):
                self._scheduler_log = self._open_log("scheduler.log", logs)
            with ExitStack() as stack:
                stack.callback(self._selector.close)
                self._part.open(stack, self._note, self._say)  # this may wait; during the wait, Ctrl-C ends us
                self._take_signals(stack)
                stack.callback(self._end_all)
                self._start_ranks(stack, logs)
                try:
                    self._watch()
                except BrokenPipeError:  # e.g. `mscomm run ... | head`: nobody reads any more
                    self._tracebacks.show()
                    return PIPE_CLOSED
            return self._summary(self._part.verdict(), self._elsewhere())

    # -- starting the ranks

    def _take_signals(self, stack: ExitStack) -> None:
        """Turn signals into bytes that the selector sees: each byte is a signal's number."""
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
        if self._scheduler_log:
            self._scheduler_log.write(f"{time.strftime('%H:%M:%S')} {text}\n".encode())

    def _open_log(self, name: str, stack: ExitStack) -> Log | None:
        if self._log_dir is None:
            return None
        log = Log(self._log_dir / name)
        stack.callback(log.close)
        self._logs.append(log)
        return log

    def _start_ranks(self, stack: ExitStack, logs: ExitStack) -> None:
        for local_rank in range(self._size):
            self._worker_logs.append(self._open_log(f"worker_{self._part.first + local_rank}.log", logs))
            self._processes.append(self._start_rank(local_rank))
        self._part.serve(stack)
        for stream in self._part.streams(self._stdout, self._stderr):
            self._streams.add(stream)

    def _start_rank(self, local_rank: int) -> subprocess.Popen[bytes]:
        """Start the rank's process, and pass its output on to ours."""
        rank = self._part.first + local_rank
        inherited, variables = self._part.entrance(rank)
        with inherited:
            stdin = None if local_rank == self._stdin_rank else subprocess.DEVNULL
            inherits = [inherited.fileno(), *self._call_fds[local_rank : local_rank + 1]]
            process = self._execute(inherits, stdin, {**self._identity(local_rank), **variables})
        assert process.stdout and process.stderr
        log, prompts = self._worker_logs[local_rank], local_rank == self._stdin_rank and os.isatty(0)
        held = functools.partial(self._tracebacks.take, rank)
        self._streams.add(Stream(process.stdout, rank, self._stdout, log, lambda lines: lines, prompts))
        self._streams.add(Stream(process.stderr, rank, self._stderr, log, held, prompts))
        return process

    def _execute(
        self, inherits: Sequence[int], stdin: int | None, identity: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        launcher = os.getpid()

        def end_with_launcher() -> None:
            _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
            if os.getppid() != launcher:  # the launcher ended before prctl took effect
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            return subprocess.Popen(
                [*self._command, *map(str, inherits[1:])],
                env={**self._env, **identity},
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=inherits,
                start_new_session=True,  # a process group of its own, which can be killed as a whole
                preexec_fn=end_with_launcher,  # safe: it takes no lock, which another thread could hold at the fork
            )
        except OSError as error:
            raise CannotStart(f"cannot start {' '.join(self._command)}: {error.strerror}") from error

    def _identity(self, local_rank: int) -> dict[str, str]:
        at_breakpoint = {}
        if local_rank != self._stdin_rank and not self._env.get("PYTHONBREAKPOINT"):
            at_breakpoint = {"PYTHONBREAKPOINT": HOOK if self._stdin_rank is None else "0"}
        return {
            **at_breakpoint,
            "MSCOMM_RANK": str(self._part.first + local_rank),
            "MSCOMM_WORLD_SIZE": str(self._part.size),
            "MSCOMM_LOCAL_RANK": str(local_rank),
            "MSCOMM_LOCAL_WORLD_SIZE": str(self._size),
            "MSCOMM_RESTART_COUNT": str(self._restarts.count(local_rank)),
        }

    # -- watching the ranks

    def _watch(self) -> None:
        while len(self._ends) < self._size:
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
        while self._part.needed(all(end.code == 0 for end in self._ends.values())) and len(self.signals) == signals:
            self._turn(self._part.look_s)

    def _show_last(self, tracebacks: bytes) -> None:
        """Show the tracebacks that were still held back when the last rank ended."""
        self._stderr.write(tracebacks)

    def _sleep_s(self) -> float | None:
        """The seconds until something is due or `part` must be asked again; None to wait only for events."""
        at_s = [self._streams.prompt_at_s, self._until, *(step[0] for step in self._steps[:1])]
        at_s += [self._stopped_at + STOPPED_S]
        at_s += [] if self._ending else [self._tracebacks.due]
        waits = [max(0.0, min(at_s) - time.monotonic())] if min(at_s) < float("inf") else []
        waits += [self._look_s] if self._look_s is not None else []
        waits += [LOOK_S] if self._failed else []  # nothing wakes this process when ranks begin or cease to go on
        return min(waits) if waits else None

    def _lost_elsewhere(self) -> bool:
        """Whether a rank of another host was lost for good, which ends the job on this host too."""
        over = self._part.over() if self._part.look_s is not None else None
        return over is not None and not self._has_one_of(over.ranks)

    def _end_unless_ranks_go_on(self) -> None:
        """After a failure, end the ranks that are left, unless they go on without those that failed (shrink)."""
        self._failed = self._failed or self._lost_elsewhere()
        if not self._failed:
            return
        if self._part.goes_on() and not self._must_end and self._sent_s == float("inf"):
            self._ending, self._steps = False, []
        else:
            self._end_soon()

    def _elsewhere(self) -> Error | None:
        """The first failure, if it was on another host."""
        over, verdict = self._part.over(), self._part.verdict()
        if over is not None and self._size < self._part.size and not self._has_one_of(over.ranks):
            return over
        return verdict if verdict and verdict.ranks and not self._has_one_of(verdict.ranks[:1]) else None

    def _has_one_of(self, ranks: Sequence[int]) -> bool:
        return any(self._part.first <= rank < self._part.first + self._size for rank in ranks)

    def _turn(self, wait_s: float | None) -> None:
        for ready, _ in self._selector.select(wait_s):
            ready.data()

    def _look_for_ends(self) -> None:
        """Note which ranks have ended. Do not reap them, so that their process ids are not reused."""
        now = time.monotonic() - self._started
        for local_rank, process in enumerate(self._processes):
            if local_rank in self._ends:
                continue
            info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
                end = End(self._part.first + local_rank, code, now)
                again = code != 0 and self._may_restart()
                self._part.ended(end.rank, end.how, code != 0, again)
                if again:
                    self._restart(local_rank, end)
                    continue
                self._ends[local_rank] = end
                self._failed = self._failed or code != 0

    def _may_restart(self) -> bool:
        return len(self._restarts) < self._max_restarts and not self._ending and self._part.can_restart()

    def _restart(self, local_rank: int, end: End) -> None:
        """Restart a rank that failed. The other ranks go on."""
        self._restarts.append(local_rank)
        self._tracebacks.show()
        count = f"restart {len(self._restarts)} of {self._max_restarts}"
        self._say(f"rank {end.rank} is started again ({count}): {end.how} after {end.after_s:.1f} s")
        process = self._processes[local_rank]
        os.killpg(process.pid, signal.SIGKILL)  # also ends what the rank started; no pid is reused before wait()
        process.wait()
        self._processes[local_rank] = self._start_rank(local_rank)

    def _end_soon(self) -> None:
        """End all ranks, but give them REPORT_S to end by themselves."""
        if not self._ending:
            self._ending = True
            until = time.monotonic() + REPORT_S
            self._steps = [(until, signal.SIGTERM), (until + TERM_S, signal.SIGKILL)]

    def _end_late(self) -> None:
        """The timeout has passed: end all ranks."""
        now, self._until = time.monotonic(), float("inf")
        if not self._ending:  # otherwise the ranks are late because one of them failed
            self.late = [self._part.first + local for local in range(self._size) if local not in self._ends]
        self._ending = self._must_end = True
        self._steps = [(now, signal.SIGTERM), (now + TERM_S, signal.SIGKILL)]

    def _look_for_stopped(self) -> None:
        """Kill ranks that are stopped (SIGSTOP) if all other ranks of the job have ended: nothing else ends them."""
        left = [local for local in range(self._size) if local not in self._ends]
        alone = self._ends and self._size == self._part.size and not self._ending
        if not alone or not all(map(self._is_stopped, left)):
            self._stopped_at = float("inf")
            return
        now = time.monotonic()
        self._stopped_at = min(self._stopped_at, now)
        if left and now >= self._stopped_at + STOPPED_S:
            self._stopped_at, self._stopped = float("inf"), [self._part.first + local for local in left]
            self._ending = self._must_end = True
            self._steps = [(now, signal.SIGKILL)]

    def _is_stopped(self, local_rank: int) -> bool:
        """Whether the rank's process is stopped. The state is left for later calls (WNOWAIT)."""
        flags = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT  # WEXITED: without it, an ended process is an error
        info = os.waitid(os.P_PID, self._processes[local_rank].pid, flags)
        return info is not None and info.si_code == os.CLD_STOPPED

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number in FORWARDED:
                self.signals.append(number)
                if number == signal.SIGINT:
                    self._tracebacks.interrupt()
                self._must_end = True
                self._part.forward(number)
                self._send(signal.SIGKILL if len(self.signals) >= KILL_AT_SIGNAL else signal.Signals(number))
                self._end_soon()

    def _send(self, number: signal.Signals) -> None:
        """Send the signal to the process groups of the ranks that still run."""
        self._sent_s = min(self._sent_s, time.monotonic() - self._started)
        for local_rank, process in enumerate(self._processes):
            if local_rank not in self._ends:
                os.killpg(process.pid, number)

    # -- ending the ranks, and the summary

    def _kill_groups(self) -> None:
        """Kill everything that the ranks started. The ranks are not reaped yet, so no other process has their ids."""
        for process in self._processes:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)

    def _end_all(self) -> None:
        self._kill_groups()
        for process in self._processes:
            process.wait()
        self._streams.close()

    def _first(self) -> End | None:
        """The failed rank to report: the one that the verdict names, else the first that failed."""
        verdict = self._part.verdict()
        named = verdict.ranks[:1] if verdict else ()
        failed = [end for end in self._ends.values() if end.code != 0]
        return min(failed, key=lambda end: self._order(end, named), default=None)

    def _words(self) -> dict[int, LastWords]:
        """By rank, the exception that ended the rank. Ranks that ended in another way are left out."""
        by_exception = [end for end in self._ends.values() if end.code in (PYTHONS_STATUS, -signal.SIGINT)]
        found = {end.rank: self._tracebacks.of(end.rank, self._started + end.after_s) for end in by_exception}
        return {rank: words for rank, words in found.items() if words}

    def _cause(self, first: End, verdict: Error | None) -> str:
        if self.signals and first.after_s >= self._sent_s:
            return ending.interrupted(self.signals[0], first.after_s, self._words())
        if first.rank in self._stopped:
            return ending.stopped(self._stopped)
        others = [end for end in self._ends.values() if end.code != 0 and end is not first]
        here = " on this host" if self._size < self._part.size else ""
        text = ending.failed(first, others, self._words(), verdict, here)
        if self._log_dir is None:
            return text
        rank = next((rank for rank in (verdict.waiting_for if verdict else ()) if self._has_one_of([rank])), first.rank)
        return f"{text}; the log of rank {rank}: {self._log_dir / f'worker_{rank}.log'}"

    def _summary(self, verdict: Error | None, elsewhere: Error | None) -> int:
        """Say how the job ended, if it failed. Returns the exit status."""
        first = self._first()
        if elsewhere:
            self._say(f"the job failed on another host: {elsewhere.kind}: {elsewhere}")
        elif first:
            self._say(self._cause(first, verdict))
        for log in self._logs:
            if log.complaint:
                self._say(log.complaint)
        dropped = self._flush()
        return first.status if first else int(bool(elsewhere or dropped))

    def _flush(self) -> bool:
        """Write all output that is left, and say how much is dropped if nobody reads it. Returns whether any is."""
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
        """A sort key by which the rank that likely caused the failure comes first. If several ends were seen at once, a
        killed rank comes before one that exited.
        """
        return end.after_s >= self._sent_s, end.rank not in named, end.after_s, end.code > 0
