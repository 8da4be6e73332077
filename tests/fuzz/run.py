"""Runs the fuzz targets, two at a time: `python tests/fuzz/run.py SECONDS [TARGET...]`. They share the SECONDS.

A target is a file *_fuzz.py in this folder, or a program that `make core-fuzzer` has built from a file *_fuzz.cc. The
folder build/fuzz/TARGET keeps its corpus, its log, and the inputs on which it failed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
KEPT = ROOT / "build/fuzz"
AT_ONCE = 2
# An input is a finding if it takes longer or needs more memory than this. -malloc_limit_mb works only in C++.
# In Python, fuzzing.py limits the address space instead.
LIMITS = ("-timeout=10", "-rss_limit_mb=1024", "-malloc_limit_mb=64", "-max_len=4096")


def targets() -> dict[str, list[str]]:
    """Return the command of each target that can run here."""
    found = {path.name: [str(path)] for path in sorted((ROOT / "build/core-fuzzer").glob("*_fuzz"))}
    if importlib.util.find_spec("atheris"):
        found |= {path.stem: [sys.executable, str(path)] for path in sorted(HERE.glob("*_fuzz.py"))}
    else:
        version = platform.python_version()
        print(f"fuzz: the Python targets are skipped: no atheris for Python {version} on {platform.machine()}")
    return {name.removesuffix("_fuzz"): command for name, command in found.items()}


def fuzz(name: str, command: list[str], seconds: int) -> bool:
    """Run one target, and print the result. Return whether there was no finding."""
    folder = KEPT / name
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    options = [*LIMITS, f"-max_total_time={seconds}", f"-artifact_prefix={folder}/", "-print_final_stats=1"]
    env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    with open(folder / "log", "wb") as log:
        done = subprocess.run([*command, str(folder / "corpus"), *options], stdout=log, stderr=log, env=env, cwd=ROOT)
    text = (folder / "log").read_text(errors="replace")
    inputs = int(found[1]) if (found := re.search(r"number_of_executed_units: (\d+)", text)) else 0
    covered = re.findall(r"cov: (\d+)", text)
    line = f"{name}: {inputs} inputs, {covered[-1] if covered else 0} branches"
    if done.returncode == 0 and inputs > 0:
        print(f"{line}, no finding", flush=True)
        return True
    kept = re.search(r"Test unit written to (\S+)", text)
    why = [part for part in text.splitlines() if not part.startswith("#")][-40:]
    again = shlex.join(["PYTHONPATH=tests", *command, kept[1] if kept else str(folder / "corpus")])
    print("\n".join([*why, f"{line}, A FINDING, see {folder / 'log'}. To run this input again: {again}"]), flush=True)
    return False


def main(seconds: str, *names: str) -> int:
    every = targets()
    if unknown := set(names) - set(every):
        print(f"fuzz: there is no target {', '.join(sorted(unknown))} here, only: {', '.join(every)}")
        return 2
    found = {name: command for name, command in every.items() if not names or name in names}
    if not found:  # targets() has said why
        return 0
    each = max(1, int(seconds) * min(AT_ONCE, len(found)) // len(found))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        good = list(pool.map(lambda one: fuzz(*one, each), found.items()))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
