"""Runs the soaks in turn, for so many minutes: `python tests/soaks.py MINUTES`. `make soak` does so.

Each turn has a new seed. When a soak fails, its output says how to repeat the failed job. The others go on.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
# One turn of each soak takes a minute or two.
TURNS = [["soak.py", "--faults", "20"], ["soak_recovery.py", "--trials", "5"]]
if importlib.util.find_spec("torch"):
    TURNS.append(["soak_torch.py", "--ddp", "5", "--fsdp", "2"])


def main(minutes: str) -> int:
    until = time.monotonic() + float(minutes) * 60
    failed = []
    for number, (program, *options) in enumerate(itertools.cycle(TURNS)):
        if number >= len(TURNS) and time.monotonic() > until:  # every soak has at least one turn
            break
        command = [str(HERE / program), *options, "--seed", str(random.SystemRandom().randrange(1 << 24))]
        print(f"--- {program} {' '.join(command[1:])}", flush=True)
        if subprocess.run([sys.executable, *command]).returncode:
            failed.append(" ".join(command))
    print("\n".join(["soak: failed:", *failed]) if failed else f"soak: {number} turns, none failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
