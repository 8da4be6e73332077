"""Ranks that die under `mscomm run --max-restarts`, are started again, and go on with the survivors in a new epoch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

# A loop of collective calls that outlives its ranks. What the ranks agree on after each rejoin is the step: all go on
# at the earliest that any of them has not done. `victims` in the environment: "step:rank" of those that die there.
LOOP = """
import json, os, random, signal, sys, time
import numpy as np
import mscomm
rank, life = int(os.environ["MSCOMM_RANK"]), int(os.environ["MSCOMM_RESTART_COUNT"])
victims = [tuple(map(int, one.split(":"))) for one in os.environ.get("VICTIMS", "").split()]
steps = int(os.environ.get("STEPS", 200))
chance = random.Random(int(os.environ.get("SEED", 0)) + 100 * life)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def say(**words):
    print(json.dumps({"rank": rank, "life": life, "pid": os.getpid(), **words}))

began = time.monotonic()
mscomm.init()
pair = mscomm.create_group("pair", [1, 3])  # None on the others
shared = mscomm.empty(50_000, np.float32)
step, epoch, first = 0, 0, True
while step < steps:
    try:
        if first or epoch:  # where do we go on?
            step = int(-mscomm.all_reduce(np.array([-(step if life == 0 or not first else steps)]), "max")[0])
            if life and first:
                say(back_after=time.monotonic() - began)
        first = epoch = 0
        while step < steps:
            if (step, rank) in victims and life == 0:
                # Anywhere in the next calls, on a thread of its own.
                import threading
                threading.Timer(chance.random() * 0.02, die).start()
            shared[:] = rank + step
            n = mscomm.get_group_size()
            assert (mscomm.all_reduce(shared) == sum(range(n)) + n * step).all()
            if pair is not None:
                assert (mscomm.all_reduce(np.full(3, rank), group=pair) == 4).all()
            step += 1
    except mscomm.PeerLost as lost:
        began_to = time.monotonic()
        epoch = mscomm.rejoin(60)
        say(epoch=epoch, lost=lost.ranks, took=time.monotonic() - began_to)
        shared = mscomm.empty(50_000, np.float32)
assert not mscomm.all_reduce(np.array([step != steps])).any()
say(done=step)
"""


def run(folder: Path, body: str, *options: object, ranks: int = 4, timeout_s: float = 120, **env: object):
    script = folder / "script.py"
    script.write_text(body)
    return subprocess.run(
        [sys.executable, "-m", "mscomm", "run", "-n", str(ranks), *map(str, options), script],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in env.items()}},
        check=False,
    )


def said(done) -> dict[int, list[dict]]:
    """What each rank said, in order."""
    words = defaultdict(list)
    for line in done.stdout.splitlines():
        prefix, _, text = line.partition(" ")
        if text.startswith("{"):
            import json

            words[int(prefix.strip("[]"))].append(json.loads(text))
    return words


def assert_went_on(done, lost: set[int]):
    """Everybody is through all steps; survivors are the processes that they were, the lost are new ones."""
    assert done.returncode == 0, done.stderr + done.stdout
    words = said(done)
    for rank in range(4):
        assert words[rank][-1]["done"], done.stdout
        lives = {word["life"] for word in words[rank]}
        assert (0 in lives) == (rank not in lost) or len(lives) > 1, done.stdout
        if rank not in lost:
            assert len({word["pid"] for word in words[rank]}) == 1
    for rank in lost:
        backs = [word["back_after"] for word in words[rank] if "back_after" in word]
        assert backs
        print(f"rank {rank} back in the group {max(backs):.3f} s after it called init")
        assert max(backs) < 5  # on an idle machine less than 1
    return words


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("victim", range(4))
def test_a_killed_rank_comes_back_and_the_others_stay(tmp_path, victim, seed):
    done = run(tmp_path, LOOP, "--max-restarts", 3, VICTIMS=f"{40 + 7 * seed}:{victim}", SEED=seed + 10 * victim)
    words = assert_went_on(done, {victim})
    assert f"rank {victim} is started again (restart 1 of 3): killed by SIGKILL" in done.stderr
    for rank in set(range(4)) - {victim}:
        assert [word["lost"] for word in words[rank] if "lost" in word] == [[victim]]
        assert [word["epoch"] for word in words[rank] if "epoch" in word] == [1]


def test_two_ranks_lost_at_once_come_back_together(tmp_path):
    done = run(tmp_path, LOOP, "--max-restarts", 3, VICTIMS="40:1 40:2")
    assert_went_on(done, {1, 2})
    assert "restart 2 of 3" in done.stderr and "restart 3" not in done.stderr
