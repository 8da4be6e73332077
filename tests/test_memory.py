"""How ranks share arrays: in shared memory of several kinds, and in private memory that a peer reads directly."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import everybody_is_here, ranks, when_inside
from rotated import rotated

import mscomm
from mscomm import _core
from mscomm.job import resolve

# In bytes: from the core's tiny_bytes to several of its chunks.
SIZES = [16 << 10, (64 << 10) + 3, 300_001, 1 << 20, (3 << 20) + 7]
OFFSETS = itertools.cycle((0, 8, 16, 24, 40))  # see near_a_page()


def may_read_each_other() -> bool:
    """Return whether a process may read the memory of a process that is not its child (see Yama's ptrace_scope)."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    said = scope.read_text().strip() if scope.exists() else "0"
    return said == "0" or (os.geteuid() == 0 and said != "3")


@functools.cache
def drawn_bytes(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def pieces(make, rank: int, n: int) -> None:
    """Make each collective call that only moves data, with pieces of all SIZES. Check the results."""

    def drawn(size: int, seed: int) -> np.ndarray:
        x = make(size, np.uint8)
        x[:] = drawn_bytes(size, seed)
        return x

    for size in SIZES:
        of_ranks = [drawn(size, seed) for seed in range(n)]
        mine, whole = of_ranks[rank], np.concatenate(of_ranks)
        np.testing.assert_array_equal(mscomm.all_gather(mine, out=make(n * size, np.uint8)), whole)
        for root in range(n):
            np.testing.assert_array_equal(mscomm.broadcast(drawn(size, rank), root), of_ranks[root])
            mine_is_root = rank == root
            got = mscomm.scatter(whole if mine_is_root else None, root, out=make(size, np.uint8))
            np.testing.assert_array_equal(got, mine)
            got = mscomm.gather(mine, root, out=make(n * size, np.uint8) if mine_is_root else None)
            if mine_is_root:
                np.testing.assert_array_equal(got, whole)
        sent = [drawn(n * size, n + seed).reshape(n, size) for seed in range(n)]
        got = mscomm.all_to_all(sent[rank], out=make(n * size, np.uint8).reshape(n, size))
        np.testing.assert_array_equal(got, np.stack([sent[source][rank] for source in range(n)]))


def near_a_page(size: int, dtype: type[np.uint8]) -> np.ndarray:
    """Return an array that begins 0 to 40 bytes above the beginning of a page.

    If two arrays come from this function, one often begins 1 to 31 bytes above the other, modulo the page size.
    `copies_slowly` in csrc/base says why mscomm copies between two arrays like these in short pieces.
    """
    around = np.empty(size + 2 * mmap.PAGESIZE, dtype)
    begin = -around.ctypes.data % mmap.PAGESIZE + next(OFFSETS)
    return around[begin : begin + size]


@pytest.mark.parametrize(
    ("memory", "n"),
    rotated(
        itertools.product(["private", "near a page", "shared", "mixed"], [2, 3]),
        few=1,
        always=[("private", 2), ("near a page", 3), ("shared", 2), ("mixed", 3)],
    ),
)
@ranks("n")
def test_pieces_of_all_sizes_arrive(rank, group, n, memory):
    shared = memory == "shared" or (memory == "mixed" and rank == 1)
    pieces(mscomm.empty if shared else near_a_page if memory == "near a page" else np.empty, rank, n)
    assert resolve(None).core.pulls() == (memory != "shared" and may_read_each_other())


@pytest.mark.parametrize("n", [2, 3])
@ranks("n")
def test_one_rank_in_place_and_the_others_not(rank, group, n):
    """One rank's call works in place, so it overwrites that rank's x. The peers know this only from what the rank posts
    in the arena. They must not read its x while it changes.
    """
    for in_place in (*range(n), 0, n - 1):
        sent = [np.random.default_rng(seed).integers(0, 256, (n, 200_001), np.uint8) for seed in range(n)]
        x = sent[rank].copy()
        got = mscomm.all_to_all(x, out=x if rank == in_place else None)
        np.testing.assert_array_equal(got, np.stack([sent[source][rank] for source in range(n)]))
    assert resolve(None).core.pulls() == may_read_each_other()


@pytest.mark.parametrize(
    ("memory", "in_place"),
    rotated(
        itertools.product(["private", "mixed"], [True, False]), few=0, always=[("private", True), ("mixed", False)]
    ),
)
@ranks(2)
def test_long_sums_of_two_ranks_have_the_same_bits(rank, group, memory, in_place):
    """From 2 MiB on, each of the two ranks reads the peer's array directly."""
    for count in (1 << 19, (5 << 18) + 1, 3_000_001):
        xs = [np.random.default_rng(seed).standard_normal(count, np.float32) for seed in range(2)]
        x = (mscomm.empty if memory == "mixed" and rank == 1 else np.empty)(count, np.float32)
        x[:] = xs[rank]
        out = x if in_place else np.empty_like(x)
        mscomm.all_reduce(x, out=out)
        np.testing.assert_array_equal(out.view(np.uint32), (xs[0] + xs[1]).view(np.uint32))
        assert in_place or (x == xs[rank]).all()
    assert resolve(None).core.pulls() == may_read_each_other()


def forbid_reading_me() -> None:
    """Let only processes that may trace every process read this process's memory from now on (PR_SET_DUMPABLE)."""
    set_dumpable = 4
    assert ctypes.CDLL(None, use_errno=True).prctl(set_dumpable, 0, 0, 0, 0) == 0


def give_up_tracing() -> None:
    """Drop CAP_SYS_PTRACE from this thread. Ordinary users do not have this capability (see capabilities(7))."""
    version, sys_ptrace = 0x20080522, 19
    header = (ctypes.c_uint32 * 2)(version, 0)
    # (effective, permitted, inheritable) for capabilities 0 to 31, then the same for capabilities 32 to 63.
    sets = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << sys_ptrace)
    assert libc.capset(header, sets) == 0


@ranks(3)
def test_where_one_rank_cannot_be_read_arrays_are_staged(rank, group):
    give_up_tracing()
    if rank == 1:
        forbid_reading_me()
    everybody_is_here()
    pieces(np.empty, rank, 3)
    assert not resolve(None).core.pulls()


@ranks(2, expect={1: -signal.SIGKILL})
def test_a_rank_that_is_killed_while_it_is_read_is_lost(rank, group):
    x, out = np.ones(64 << 20, np.uint8), np.empty(128 << 20, np.uint8)
    mscomm.all_gather(x, out=out)
    if rank == 1:
        when_inside(3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(mscomm.PeerLost) as lost:
        while True:
            mscomm.all_gather(x, out=out)
    assert lost.value.ranks == (1,)


def secret_memory(bytes_: int) -> mmap.mmap:
    """Return memory that no other process can read directly (memfd_secret(2)). The same can be true of memory that a
    driver maps.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(447, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.ftruncate(fd, bytes_)
    return mmap.mmap(fd, bytes_)


def has_secret_memory() -> bool:
    try:
        secret_memory(4 << 20)[0] = 1
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_secret_memory(), reason="the kernel has no memfd_secret")
@ranks(2)
def test_arrays_that_cannot_be_read_where_they_are_are_staged(rank, group):
    secret = np.frombuffer(secret_memory(4 << 20), np.uint8)
    ordinary = np.empty(4 << 20, np.uint8)
    for secret_ranks in ([], [0], [1], [0, 1], []):
        x = secret if rank in secret_ranks else ordinary
        x[:] = rank + 1
        assert (mscomm.all_gather(x).reshape(2, -1) == [[1], [2]]).all()
        assert (mscomm.all_to_all(x).reshape(2, -1) == [[1], [2]]).all()
        assert (mscomm.all_reduce(x) == 3).all()
        assert (mscomm.all_reduce(x, out=x) == 3).all()
    assert resolve(None).core.pulls() == may_read_each_other()


SUM = """
import numpy as np, mscomm
from mscomm import _core
x = mscomm.empty(1 << 20, np.float32)
mscomm.init()
x[:] = mscomm.get_rank() + 1
assert (mscomm.all_reduce(x) == 3).all()
assert (mscomm.all_gather(x).reshape(2, -1) == [[1], [2]]).all()
print(_core.describe_memory(True))
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed (util-linux)")
@pytest.mark.skipif(not _core.describe_memory(True).startswith("a tmpfs"), reason="memory is in memfds in any case")
def test_without_a_tmpfs_of_ones_own_it_is_a_memfd(tmp_path):
    """The job runs as root of a user namespace. This root user is not allowed to mount a tmpfs in the outer mount
    namespace, and the test keeps it from creating another user namespace. So the memory must be a memfd.
    """
    script = tmp_path / "sum.py"
    script.write_text(SUM)
    forbidden = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = [sys.executable, "-m", "mscomm", "run", "-n", "2", str(script)]
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", forbidden, "sh", *command],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stdout.count("memfd, small pages (shmem_enabled: never; a user namespace: No space left on device)") == 2
    )


@ranks(2)
def test_control_memory_of_an_interrupted_meeting_is_not_used_for_another_group(rank, group):
    """Before rank 0 gives up on create_group, the hub may have told rank 1 where the group's control memory is. So rank
    0 must not use that memory for another group.
    """
    if rank == 1:
        other = mscomm.create_group("pair", [0, 1])
        mscomm.barrier()
        with pytest.raises(mscomm.Aborted, match="rank 0: group pair: KeyboardInterrupt"):
            mscomm.barrier(group=other)
        return
    world = resolve(None)
    meet, offered = world.member.meet, []

    def interrupted(id, name, ranks, facts, *rest, **options):
        meet(id, name, ranks, facts, *rest, **options)
        offered.append(facts["control"])
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.member, "meet", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mscomm.create_group("pair", [0, 1])
    assert world.epoch.heap.reserve_control(2) not in offered
    mscomm.barrier()


@ranks(2)
def test_other_threads_run_while_a_large_array_is_released(rank, group):
    """The kernel takes a long time to free the array's pages, so the release must let other threads run."""
    sys.setswitchinterval(100)  # from now on, threads switch only when one of them releases the GIL
    steps, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            steps[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    for _ in range(100):
        x = mscomm.empty(80 << 20)  # 320 MiB: more than the heap keeps for reuse
        before = steps[0]
        del x
        meanwhile = steps[0] - before
        if meanwhile:
            break
    stop.set()
    thread.join()
    assert meanwhile > 0


@ranks(1)
def test_synchronous_calls_wake_no_thread(rank, group):
    """An asynchronous call and a message start worker threads. These threads must sleep during synchronous calls."""
    x = np.ones(2, np.float32)
    mscomm.all_reduce(x, async_op=True).wait()
    mscomm.send(x, 0, async_op=True)
    mscomm.recv(x, 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(5_000):
        mscomm.all_reduce(x, out=x)
        mscomm.send(x, 0)
        mscomm.recv(x, 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before < 1000


def _limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 20, resource.RLIM_INFINITY))


def test_a_limit_on_the_size_of_files_limits_the_heap(tmp_path):
    """`ulimit -f` holds for in-memory files, too. Batch systems set it."""
    body = "import mscomm, numpy; mscomm.init(); x = mscomm.zeros(1000); mscomm.all_reduce_(x); print(x.sum())"
    command = [sys.executable, "-m", "mscomm", "run", "-n", "2", "--", sys.executable, "-c", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=_limit_files)
    assert done.stdout.count("0.0") == 2, done.stdout + done.stderr


@ranks(2)
def test_heaps_are_left_out_of_core_dumps(rank, group):
    """The kernel would allocate all pages of the sparse heaps to dump them."""
    mscomm.all_reduce(np.ones(1))
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    heaps = [text for text in mappings if "mscomm-heap" in text.partition("\n")[0]]
    assert len(heaps) >= 2
    for text in heaps:
        assert " dd" in re.search(r"^VmFlags:(.*)$", text, re.MULTILINE)[1], text


def _anonymous_bytes():
    return int(re.search(r"^RssAnon:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) << 10


@ranks(3)
def test_the_copy_of_a_large_call_in_place_is_given_back(rank, group):
    """An uneven all_to_all in place copies x. Later calls may use the memory of the copy, unless it is large."""
    part = 22 << 20
    x = np.full(3 * part, rank, np.uint8)
    sent = [[0, 2, 1], [1, 0, 2], [2, 1, 0]]
    mscomm.barrier()
    before = _anonymous_bytes()
    mscomm.all_to_all_v(x, [count * part for count in sent[rank]], out=x)
    assert _anonymous_bytes() - before < x.nbytes // 2
    expected = np.repeat(np.arange(3), [row[rank] for row in sent])
    assert (x[::part] == expected).all() and (x[part - 1 :: part] == expected).all()


def _give_up_mounting():
    """Drop CAP_SYS_ADMIN for the program that this process will run. Ordinary users do not have this capability."""
    drop_from_bounding_set, sys_admin = 24, 21
    ctypes.CDLL(None).prctl(drop_from_bounding_set, sys_admin, 0, 0, 0)


def test_shared_memory_is_made_on_a_small_stack():
    """If this process may not mount a tmpfs, a child process does it. Its stack is no part of the caller's stack."""
    body = (
        "import threading; from mscomm import _core\n"
        "for kib in (64, 68, 72, 80):\n"
        "    threading.stack_size(kib << 10)\n"
        "    thread = threading.Thread(target=lambda: print(_core.describe_memory(True)))\n"
        "    thread.start(); thread.join()"
    )
    command = [sys.executable, "-c", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=_give_up_mounting)
    assert done.returncode == 0 and done.stdout.count("\n") == 4, (done.returncode, done.stdout, done.stderr)
