"""Measures how fast a killed rank is replaced: `python bench/rejoin.py -n 4 --times 100`.

The job runs under `mscomm run --max-restarts`. In a loop, its ranks make all_reduce calls on all ranks and on a group
of two. SIGKILL kills one rank after another at random moments. Two durations are measured each time: from the new
rank's call of init() to the end of its first all_reduce, and from the survivors' PeerLost to the end of their next
all_reduce. The second duration includes the start of a new Python process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=4, help="ranks")
    parser.add_argument("--times", type=int, default=100, help="how many are lost")
    options = parser.parse_args()
    launcher = "from mscomm.launching import processes; processes.SHORT_S = 0.0\nfrom mscomm.cli import main; main()"
    command = [sys.executable, "-c", launcher, "run", "-n", str(options.n), "--max-restarts", str(options.times)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "REJOIN_TIMES": str(options.times)}
    done = subprocess.run([*command, __file__], env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"the job failed with status {done.returncode}", file=sys.stderr)
        return 1
    words = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines()]
    for name in ("new", "survivor"):
        took = [word["took"] for word in words if word["who"] == name]
        text = f"median {statistics.median(took):.3f} s, longest {max(took):.3f} s"
        print(f"{name}: {len(took)} times back in the group, {text}")
    return int(sum(word["who"] == "new" for word in words) < options.times)


def be_a_rank(times: int) -> None:
    import numpy as np

    import mscomm

    def say(who: str, since: float) -> None:
        print(json.dumps({"who": who, "took": time.monotonic() - since}))

    rank, life = int(os.environ["MSCOMM_RANK"]), int(os.environ["MSCOMM_RESTART_COUNT"])
    who, since, epoch = "new" if life else "", time.monotonic(), 0
    mscomm.init()
    pair = mscomm.create_group("pair", [0, 1])
    size = mscomm.get_group_size()
    while True:
        try:
            epoch = int(mscomm.all_reduce(np.array([epoch]), "max")[0])  # tells a new rank the epoch
            if who:
                say(who, since)
            who = ""
            mscomm.barrier()  # every rank prints before the next rank is killed
            if epoch == times:
                return
            if rank == epoch % size:
                threading.Timer(random.random() * 0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            shared = mscomm.empty(100_000, np.float32)
            while True:
                shared[:] = rank
                assert (mscomm.all_reduce(shared) == size * (size - 1) / 2).all()
                if pair:
                    assert mscomm.all_reduce(np.ones(1), group=pair)[0] == 2
        except mscomm.PeerLost:
            who, since = "survivor", time.monotonic()
            epoch = mscomm.rejoin(60)


if __name__ == "__main__":
    if "REJOIN_TIMES" in os.environ:
        be_a_rank(int(os.environ["REJOIN_TIMES"]))
    else:
        sys.exit(main())
