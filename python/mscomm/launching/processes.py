"""Starts the processes of this host's ranks, watches them, and terminates them without leaving anything behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mscomm import environment
from mscomm.bootstrap.launcher import CONTROL_FD, ENTRANCE, KEY_FD, SCHED
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.links import raise_descriptor_limit, require_same_user, send_fds, unix_listener
from mscomm.errors import BackendUnavailable, Error
from mscomm.interpreter import child_environment, python_executable
from mscomm.launching import ending
from mscomm.launching.binding import Cpus
from mscomm.launching.breakpoints import HOOK
from mscomm.launching.ending import End
from mscomm.launching.output import Log, Stream, Streams
from mscomm.launching.parts import LOOK_S, OtherNode, Part
from mscomm.launching.tracebacks import PYTHONS_STATUS, LastWords, Tracebacks
from mscomm.writing import Output

REPORT_S = 5.0  # after the first failure, the other ranks have this long to report before SIGTERM
GRACE_S = 30.0  # the time from SIGTERM to SIGKILL, as in torchrun, Slurm and Kubernetes
KILLED_S = 5.0  # a rank that is still there this long after SIGKILL cannot be killed, and is left behind
SHORT_S = 10.0  # a rank that fails this soon after its start is restarted later each time, after 1 s, 2 s, 4 s, ...
LATEST_S = 30.0  # ... but not later than this
DRAIN_S = 1.0  # how long to read output that is still in the pipes when all ranks have ended
STOPPED_S = 10.0  # if only ranks that are stopped (SIGSTOP) are left, they are killed after this time
STALLED_S = 600.0  # at the end, drop the output if its reader, such as a pager, takes nothing for this long
LATE = 124  # our exit status when the time limit has passed, as that of timeout(1)
FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)  # these end the job
JOB_CONTROL = (signal.SIGTSTP, signal.SIGCONT)
FOR_PROGRAMS = (signal.SIGUSR1, signal.SIGUSR2)  # passed on to the ranks, not to the processes that ranks have started
PIPE_CLOSED = 128 + signal.SIGPIPE  # our exit status when nobody reads our output any more
_LOOK_S = 0.05  # how often to look for ranks that ended, if this process cannot handle SIGCHLD
_NOBODY_READ = f"nobody read {{}} for {STALLED_S:g} s"
# Variables for this process from a launcher that started it. torchrun's would let torch look for torchrun's own store.
_OF_OUTER_LAUNCHER = re.compile(rf"{SCHED}|{KEY_FD}|{CONTROL_FD}|{ENTRANCE}|TORCHELASTIC_\w+")
KILL_AT_SIGNAL = 3  # the third signal, such as a third Ctrl-C, and all later signals kill the ranks at once


_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # looked up now, because few operations are safe between fork and exec


@dataclass(eq=False, repr=False)
class Launch:
    """One run of `command` as `size` ranks on this host. In the main thread, run() also handles signals.

    max_restarts: the maximum number of restarts, in total for all ranks. stdin_rank: the local rank that inherits our
    stdin. call_fds: for each local rank, a descriptor that the rank inherits, and whose number is appended to the
    rank's command. timeout_s: the time after which the ranks are terminated. grace_s: the time from SIGTERM to SIGKILL.
    cpus: for each local rank, the CPUs that it may use (binding.py); empty if the ranks are not bound.
    """

    program: ClassVar[str] = "mscomm run"  # the beginning of each line that the launcher prints
    # The signals that run() handles.
    taken: ClassVar[tuple[signal.Signals, ...]] = (*FORWARDED, *JOB_CONTROL, *FOR_PROGRAMS)

    command: Sequence[str]
    size: int
    env: Mapping[str, str]
    part: Part
    log_dir: Path | None = None
    max_restarts: int = 0
    stdin_rank: int | None = None
    call_fds: Sequence[int] = ()
    timeout_s: float = float("inf")
    grace_s: float = GRACE_S
    cpus: Sequence[Cpus] = ()

    def __post_init__(self) -> None:
        self._logs: dict[str, Log] = {}  # the log for each file name
        self._started = time.monotonic()
        # The process of each local rank. It is reaped only at the end, or when its rank is restarted. Until then, its
        # pid is not reused.
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watcher: subprocess.Popen[bytes] | None = None
        self._entrance = ""  # the name of the unix socket of _open_entrance()
        self._entered: set[int] = set()  # the local ranks that have joined there since their start
        self._restarts: list[int] = []  # the local rank of each restart, in order
        self._counted = 0  # restarts that count, because the rank did not fail because of another rank's failure
        self._restart_at: dict[int, float] = {}  # when to restart local ranks that have failed
        self._started_at: dict[int, float] = {}  # when each local rank was started, in time.monotonic() seconds
        self._short_lives: Counter[int] = Counter()  # how often in a row each local rank failed soon after its start
        # The latest failure that counted, how often the job had been complete then, and the local ranks that have
        # failed since then.
        self._lost: End | None = None
        self._lost_said: LastWords | None = None  # the exception that ended this rank, if it is known
        self._lost_at = 0
        self._lost_with: set[int] = set()
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
        # The next signal to the running ranks, and when to send it.
        self._next, self._next_at = signal.SIGTERM, float("inf")
        self._asked = False  # whether the ranks have got SIGTERM; they get it only once, unless the user sends more
        # The seconds from the start to our first signal. If a rank ends later, the signal may be the reason.
        self._sent_s = float("inf")
        self._killed_at = float("inf")  # when the ranks got SIGKILL
        self._look_s = self.part.look_s
        self._selector = selectors.DefaultSelector()
        self._streams = Streams(self._selector)
        self._stdout, self._stderr = self._outputs(self._streams.wake)
        full = environment.read("MSCOMM_TRACEBACK", self.env) == "FULL"
        self._tracebacks = Tracebacks(self._stderr, full)
        self._unwritten: set[str] = set()  # outputs about whose errors the user was told

    def _outputs(self, wake: Callable[[], None]) -> tuple[Output, Output]:
        """Return our stdout and stderr. wake: a function that wakes the launcher."""
        bar = threading.Event()
        return Output(1, wake, bar), Output(2, wake, bar)

    def run(self) -> int:
        """Start the ranks and wait until they have ended. Return the exit status."""
        try:
            return self._run()
        finally:
            # A writing thread that has not ended may still call wake(), so the descriptor of wake() must stay open.
            if self._stdout.close(DRAIN_S) and self._stderr.close(DRAIN_S):
                self._streams.release()

    def _run(self) -> int:
        raise_descriptor_limit()
        with ExitStack() as logs:
            if not isinstance(self.part, OtherNode):
                self._open_log("scheduler.log", logs)
            with ExitStack() as stack:
                stack.callback(self._selector.close)
                self.part.open(stack, self._note, self._say)  # this may wait; until it returns, Ctrl-C ends us
                self._take_signals(stack)
                self._start_watcher(stack)
                self._open_entrance(stack)
                stack.callback(self._end_all)
                self._start_ranks(stack, logs)
                try:
                    self._watch()
                except BrokenPipeError:  # e.g. `mscomm run ... | head`: nobody reads any more
                    self._tracebacks.show()
                    self._streams.close()  # so that the launchers of other hosts do not wait for a reader either
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
        for number in (signal.SIGCHLD, *self.taken):
            always = (signal.SIGCHLD, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
            if number not in always and signal.getsignal(number) == signal.SIG_IGN:
                continue  # e.g. SIGHUP under nohup: keep ignoring it
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._signalled(reader.recv(4096)))

    def _start_watcher(self, stack: ExitStack) -> None:
        """Start the process that ends the ranks' process groups if this process is killed (watcher.py)."""
        file = str(Path(__file__).with_name("watcher.py"))
        env = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with contextlib.suppress(BackendUnavailable, OSError):  # then only the ranks themselves end with this process
            words = [python_executable("the watcher"), "-I", "-S", file, str(os.getpid()), str(self.grace_s)]
            nowhere = subprocess.DEVNULL
            self._watcher = subprocess.Popen(
                words,
                env=child_environment(env),
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=nowhere,
                stderr=nowhere,
                bufsize=0,
                start_new_session=True,  # a signal to our process group must not end it
            )
            stack.callback(self._end_watcher)

    def _open_entrance(self, stack: ExitStack) -> None:
        """Listen for programs behind a wrapper that has closed the descriptor of the rank."""
        listener = stack.enter_context(unix_listener(self.size + 64))
        listener.setblocking(False)
        self._entrance = os.fsdecode(listener.getsockname()[1:])
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._let_in(listener))

    def _let_in(self, listener: socket.socket) -> None:
        """Give a descendant of a rank's process what the process inherited, once. Send nothing to anybody else."""
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_LOOK_S)  # the connection stays there, so the selector reports it again at once
            return
        with contextlib.suppress(Error, OSError), sock:
            local_rank = self._local_rank_of(require_same_user(sock))
            if local_rank is not None and local_rank not in self._entered:
                with self.part.entrance(self.part.first + local_rank)[0] as inherited:
                    send_fds(sock, [inherited.fileno()], Deadline(DRAIN_S))
                self._entered.add(local_rank)

    def _local_rank_of(self, pid: int) -> int | None:
        """Return the running rank whose process is this one, or an ancestor of it; None if there is none."""
        import psutil

        try:
            pids = {pid, *(parent.pid for parent in psutil.Process(pid).parents())}
        except psutil.Error:  # it has ended, or is in another pid namespace
            return None
        return next((local for local in self._running() if self._processes[local].pid in pids), None)

    def _end_watcher(self) -> None:
        if self._watcher and self._watcher.stdin:
            self._watcher.kill()
            self._watcher.wait()
            self._watcher.stdin.close()

    def _tell_watcher(self, number: int) -> None:
        """Tell the watcher that a rank's process was started, or with a minus sign, that it was reaped."""
        if self._watcher and self._watcher.stdin:
            with contextlib.suppress(OSError):  # somebody has killed the watcher
                self._watcher.stdin.write(b"%d\n" % number)

    def _note(self, text: str) -> None:
        """Write a line to the scheduler's log. Any thread may call this."""
        if log := self._logs.get("scheduler.log"):
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode("utf-8", "backslashreplace"))

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
        self._entered.discard(local_rank)
        with inherited:
            stdin = None if local_rank == self.stdin_rank else subprocess.DEVNULL
            inherits = [inherited.fileno(), *self.call_fds[local_rank : local_rank + 1]]
            variables = {**self._environment(local_rank), **variables, ENTRANCE: self._entrance}
            process = self._execute(local_rank, inherits, stdin, variables)
        self._tell_watcher(process.pid)
        self._started_at[local_rank] = time.monotonic()
        assert process.stdout and process.stderr
        log, prompts = self._logs.get(f"worker_{rank}.log"), local_rank == self.stdin_rank and os.isatty(0)
        held = functools.partial(self._tracebacks.take, rank)
        self._streams.add(Stream(process.stdout, rank, self._stdout, log, lambda lines: lines, prompts))
        self._streams.add(Stream(process.stderr, rank, self._stderr, log, held, prompts))
        return process

    def _execute(
        self, local_rank: int, inherits: Sequence[int], stdin: int | None, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        launcher = os.getpid()
        cpus = self.cpus[local_rank] if self.cpus else None

        def prepare() -> None:
            _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
            if os.getppid() != launcher:  # the launcher ended before prctl took effect
                os.kill(os.getpid(), signal.SIGKILL)
            if cpus:
                os.sched_setaffinity(0, cpus)

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
                preexec_fn=prepare,  # safe: it takes no lock that another thread could hold
            )
        except (OSError, subprocess.SubprocessError) as error:  # SubprocessError: an exception in prepare()
            why = error.strerror if isinstance(error, OSError) else f"cannot bind it to the CPUs {sorted(cpus or ())}"
            raise Error(f"cannot start {' '.join(self.command)}: {why}") from error

    def _environment(self, local_rank: int) -> dict[str, str]:
        """Return the environment of the rank, without the variables that come from part.entrance()."""
        env = {name: value for name, value in self.env.items() if not _OF_OUTER_LAUNCHER.fullmatch(name)}
        if local_rank != self.stdin_rank and not self.env.get("PYTHONBREAKPOINT"):
            env["PYTHONBREAKPOINT"] = HOOK if self.stdin_rank is None else "0"
        place = {
            "RANK": str(self.part.first + local_rank),
            "WORLD_SIZE": str(self.part.size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.size),
        }
        env |= {f"MSCOMM_{name}": text for name, text in place.items()}
        env["MSCOMM_RESTART_COUNT"] = str(self._restarts.count(local_rank))
        # With these variables, init_process_group() of torch.distributed finds the other ranks.
        host, port = self.part.torch_store
        return env | place | {"MASTER_ADDR": host, "MASTER_PORT": str(port)}

    # -- watching the ranks

    def _watch(self) -> None:
        while len(self._ends) < self.size:
            self._turn(self._sleep_s())
            self._look_for_ends()
            self._restart_due()
            self._end_unless_ranks_go_on()
            if self._until <= time.monotonic():
                self._end_late()
            self._look_for_stopped()
            self._streams.show_unfinished()
            self._tell_unwritten()
            if self._tracebacks.due <= time.monotonic() and not self._ending:
                self._tracebacks.show()
            if self._next_at <= time.monotonic():
                self._take_step()
            if self._killed_at + KILLED_S <= time.monotonic():
                self._leave_behind()
        self._kill_groups()
        self._streams.take_all()
        until = time.monotonic() + DRAIN_S
        while self._streams and time.monotonic() < until:
            self._turn(max(0.0, until - time.monotonic()))
        self._show_last(self._tracebacks.release(first.rank if (first := self._first()) else None))
        signals = len(self.signals)
        well = not self.late and all(end.code == 0 for end in self._ends.values())
        while self.part.needed(well) and len(self.signals) == signals:
            self._turn(self.part.look_s)

    def _show_last(self, tracebacks: bytes) -> None:
        """Show the tracebacks that were still held back when the last rank ended."""
        self._stderr.write(tracebacks)

    def _sleep_s(self) -> float | None:
        """Return the seconds until something is due or `part` must be asked again; None to wait only for events."""
        at_s = [self._streams.unfinished_at_s, self._until, self._next_at]
        at_s += [self._stopped_at + STOPPED_S, self._killed_at + KILLED_S, *self._restart_at.values()]
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
            self._ending, self._next_at = False, float("inf")
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
            if local_rank not in self._restart_at and (code := self._exit_code(local_rank)) is not None:
                self._ended(local_rank, End(self.part.first + local_rank, code, now))
        if os.getpid() == 1:
            self._reap_orphans()

    def _reap_orphans(self) -> None:
        """As the first process of a container, reap the processes whose parents have ended."""
        own = {process.pid for process in (*self._processes, self._watcher) if process} | self.part.children()
        for thread in os.listdir("/proc/self/task"):
            try:
                children = Path(f"/proc/self/task/{thread}/children").read_text().split()
            except OSError:  # the thread has ended
                continue
            for pid in map(int, children):
                with contextlib.suppress(ChildProcessError):
                    if pid not in own:
                        os.waitpid(pid, os.WNOHANG)

    def _exit_code(self, local_rank: int) -> int | None:
        """Return how the rank's process ended, as in subprocess; None if it is still running."""
        process = self._processes[local_rank]
        try:
            info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # this process ignores SIGCHLD, or another thread reaps all children
            self._kill_group(local_rank)  # soon after the end, so the process id is not reused yet
            process.returncode = self._unknown_code(local_rank)
            return process.returncode
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def _unknown_code(self, local_rank: int) -> int:
        """Return the exit code of a rank that somebody else has reaped."""
        return PYTHONS_STATUS

    def _ended(self, local_rank: int, end: End) -> None:
        counts = self._counts(end)
        may_restart = self._counted + counts <= self.max_restarts and not self._ending
        again = end.code != 0 and may_restart and self.part.can_restart()
        self.part.ended(end.rank, end.how, end.code != 0, again)
        if not again:
            self._ends[local_rank] = end
            self._failed = self._failed or end.code != 0
            return
        if counts:
            self._lost, self._lost_at, self._lost_with = end, self.part.complete(), set()
        self._lost_with.add(local_rank)
        self._counted += counts
        self._plan_restart(local_rank, end, counts)

    def _counts(self, end: End) -> bool:
        """Return whether a failure uses up a restart.

        It does not if another rank has failed before, and not all ranks have joined again since then: this rank has
        probably failed because of that rank, unless a signal killed it. But each rank may do so only once.
        """
        complete = self.part.complete()
        since = self._lost is not None and 0 < self._lost_at == complete
        return not since or end.code < 0 or end.rank - self.part.first in self._lost_with

    def _plan_restart(self, local_rank: int, end: End, counts: bool) -> None:
        """Restart a rank that failed, at once or after a pause. The other ranks continue."""
        self._kill_group(local_rank)  # also kills the rank's children
        self._restarts.append(local_rank)
        now = time.monotonic()
        lives_long = now - self._started_at[local_rank] >= SHORT_S
        self._short_lives[local_rank] = 0 if lives_long else self._short_lives[local_rank] + 1
        times = self._short_lives[local_rank]
        pause_s = min(2.0 ** (times - 2), LATEST_S) if times > 1 else 0.0
        self._restart_at[local_rank] = now + pause_s
        self._tracebacks.show()
        if counts:
            self._lost_said = self._tracebacks.of(end.rank, now) if end.code == PYTHONS_STATUS else None
        count = f"restart {self._counted} of {self.max_restarts}"
        if not counts and self._lost:
            count = f"not counted, because rank {self._lost.rank} had failed before"
        later = f" in {pause_s:g} s" if pause_s else ""
        self._say(f"rank {end.rank} is started again{later} ({count}): {end.how} after {end.after_s:.1f} s")

    def _restart_due(self) -> None:
        """Restart the ranks whose pause is over. If the job is ending, they have ended for good."""
        now = time.monotonic()
        for local_rank, at in list(self._restart_at.items()):
            if self._ending:
                del self._restart_at[local_rank]
                code = self._exit_code(local_rank)
                end = End(self.part.first + local_rank, PYTHONS_STATUS if code is None else code, now - self._started)
                self.part.ended(end.rank, end.how, True, False)
                self._ends[local_rank] = end
            elif at <= now:
                del self._restart_at[local_rank]
                self._processes[local_rank].wait()
                self._tell_watcher(-self._processes[local_rank].pid)
                self._processes[local_rank] = self._start_rank(local_rank)

    def _end_soon(self, within_s: float | None = None) -> None:
        """End all ranks, but give them some time to end by themselves. Then send SIGTERM, and SIGKILL after grace_s."""
        self._ending = True
        at = time.monotonic() + (REPORT_S if within_s is None else within_s)
        if not self._asked and at < self._next_at:
            self._next, self._next_at = signal.SIGTERM, at

    def _take_step(self) -> None:
        """Send the signal that is due, and say why."""
        self._tracebacks.show()
        still = [self.part.first + local for local in self._running()]
        if self._next == signal.SIGTERM:
            self._say(ending.asked(still, self.grace_s, self._why()))
        elif not self._stopped:
            self._say(ending.killed(still, self.grace_s))
        self._send(self._next)

    def _why(self) -> str:
        """Return why the ranks are ended."""
        if self.late:
            return f"the time limit of {self.timeout_s:g} s has passed"
        if self.signals:
            return f"{REPORT_S:g} s have passed since {ending.signal_name(self.signals[0])}"
        first = self._first()
        return f"rank {first.rank} has failed ({first.how})" if first else "the job has failed on another host"

    def _leave_behind(self) -> None:
        """Give up the ranks that have not ended after SIGKILL."""
        self._killed_at = float("inf")
        for local_rank in self._running():
            process = self._processes[local_rank]
            end = End(self.part.first + local_rank, -signal.SIGKILL, time.monotonic() - self._started)
            self._say(ending.left_behind(end.rank, process.pid))
            self.part.ended(end.rank, "cannot be killed", True, False)
            self._ends[local_rank] = end
            process.returncode = end.code  # nobody waits for it

    def _end_late(self) -> None:
        """End all ranks because the timeout has passed."""
        self._until = float("inf")
        if not self._ending:  # otherwise the ranks are late because one of them failed
            self.late = [self.part.first + local for local in self._running()]
        self._must_end = True
        self.part.forward(signal.SIGTERM)
        self._end_soon(0.0)

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
            self._next, self._next_at = signal.SIGKILL, now

    def _is_stopped(self, local_rank: int) -> bool:
        """Return whether the rank's process is stopped. WNOWAIT keeps the state for later calls."""
        flags = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT  # without WEXITED, waitid fails for an ended process
        try:
            info = os.waitid(os.P_PID, self._processes[local_rank].pid, flags)
        except ChildProcessError:  # see _exit_code()
            return False
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
            elif number in JOB_CONTROL:
                self.part.forward(number)
                # The ranks are in sessions without a terminal, in which the kernel ignores SIGTSTP.
                self._signal_groups(signal.SIGSTOP if number == signal.SIGTSTP else signal.SIGCONT)
                if number == signal.SIGTSTP and not self.part.remote:
                    os.kill(os.getpid(), signal.SIGSTOP)  # SIGCONT continues this process, and the ranks with it
            elif number in FOR_PROGRAMS:
                self.part.forward(number)
                for local_rank in self._running():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self._processes[local_rank].pid, number)

    def _send(self, number: signal.Signals) -> None:
        """End the ranks that are still running with this signal. SIGKILL follows grace_s after the first SIGTERM."""
        now = time.monotonic()
        self._sent_s = min(self._sent_s, now - self._started)
        if number == signal.SIGKILL:
            self._asked, self._next_at = True, float("inf")
            self._killed_at = min(self._killed_at, now)
        elif number == signal.SIGTERM and not self._asked:
            self._asked = True
            self._next, self._next_at = signal.SIGKILL, now + self.grace_s
        self._signal_groups(number)

    def _signal_groups(self, number: signal.Signals) -> None:
        """Send the signal to the process groups of the ranks that are still running."""
        for local_rank in self._running():
            with contextlib.suppress(ProcessLookupError):  # see _exit_code()
                os.killpg(self._processes[local_rank].pid, number)

    # -- ending the ranks, and the summary

    def _kill_groups(self) -> None:
        """Kill the ranks' process groups. The ranks are not reaped yet, so no other process can have their ids."""
        for local_rank, process in enumerate(self._processes):
            if process.returncode is None:
                self._kill_group(local_rank)

    def _kill_group(self, local_rank: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._processes[local_rank].pid, signal.SIGKILL)

    def _end_all(self) -> None:
        self._kill_groups()
        until = time.monotonic() + KILLED_S
        for local_rank, process in enumerate(self._processes):
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._say(ending.left_behind(self.part.first + local_rank, process.pid))
                process.returncode = -signal.SIGKILL
        self._streams.close()

    def _first(self) -> End | None:
        """Return the failed rank to report.

        Prefer ranks that ended before our first signal. Among them, prefer the rank that the verdict names, and then
        the rank that failed first.
        """
        verdict = self.part.verdict()
        named = verdict.ranks[:1] if verdict else ()
        failed = [end for end in self._ends.values() if end.code != 0]
        if failed and self._lost and 0 < self._lost_at == self.part.complete():
            failed.append(self._lost)  # it was restarted, but the job has not gone on since then
        return min(failed, key=lambda end: self._order(end, named), default=None)

    def _words(self, first: End | None) -> dict[int, LastWords]:
        """Return the exceptions that ended ranks, keyed by rank. first: what _first() returns."""
        by_exception = [end for end in self._ends.values() if end.code in (PYTHONS_STATUS, -signal.SIGINT)]
        found = {end.rank: self._tracebacks.of(end.rank, self._started + end.after_s) for end in by_exception}
        if first is self._lost and first:
            found[first.rank] = self._lost_said
        return {rank: words for rank, words in found.items() if words}

    def _cause(self, first: End, verdict: Error | None) -> str:
        if self.signals and first.after_s >= self._sent_s:
            return ending.interrupted(self.signals[0], first.after_s, self._words(first))
        if first.rank in self._stopped:
            return ending.stopped(self._stopped)
        others = [end for end in self._ends.values() if end.code != 0 and end is not first]
        here = " on this host" if self.size < self.part.size else ""
        text = ending.failed(first, others, self._words(first), verdict, here)
        if self.log_dir is None:
            return text
        rank = next((rank for rank in (verdict.waiting_for if verdict else ()) if self._has_one_of([rank])), first.rank)
        return f"{text}; the log of rank {rank}: {self.log_dir / f'worker_{rank}.log'}"

    def _summary(self, verdict: Error | None, elsewhere: Error | None) -> int:
        """If the job failed, print how it ended. Return the exit status."""
        first = self._first()
        if self.late:
            self._say(ending.late(self.late, self.timeout_s))
        elif elsewhere:
            self._say(f"the job failed on another host: {elsewhere.kind}: {elsewhere}")
        elif first:
            self._say(self._cause(first, verdict))
        for log in self._logs.values():
            if log.complaint:
                self._say(log.complaint)
        dropped = self._flush()
        if self.late:
            return LATE
        return first.status if first else int(bool(elsewhere or dropped))

    def _tell_unwritten(self) -> None:
        """Tell the user once if an output cannot be written."""
        for name, output in (("stdout", self._stdout), ("stderr", self._stderr)):
            if output.why and name not in self._unwritten:
                self._unwritten.add(name)
                self._say(f"{name} cannot be written, and is dropped until it can: {output.why}")
                self._note(f"{name} cannot be written: {output.why}")

    def _flush(self) -> bool:
        """Write all remaining output. Say how much was dropped, and why. Return whether any was dropped."""
        any_dropped = False
        for name, output in (("stdout", self._stdout), ("stderr", self._stderr)):
            unread = output.flush(STALLED_S)
            for count, why in ((unread, _NOBODY_READ.format(name)), (output.dropped, f"{name}: {output.why}")):
                if count:
                    any_dropped = True
                    self._note(f"{count} bytes of output were dropped: {why}")
                    if output is self._stdout:
                        self._say(f"{count} bytes of the ranks' output were dropped: {why}")
        return any_dropped

    def _say(self, text: str) -> None:
        self._stderr.write(f"{self.program}: {text}\n".encode("utf-8", "backslashreplace"))

    def _order(self, end: End, named: tuple[int, ...]) -> tuple[bool, bool, float, bool]:
        """Return a sort key that puts the rank that probably caused the failure first.

        If several ranks were found to have ended at the same time, a killed rank comes before a rank that exited.
        """
        return end.after_s >= self._sent_s, end.rank not in named, end.after_s, end.code > 0
