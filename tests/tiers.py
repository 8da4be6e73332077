"""Runs a tier of checks: `python tests/tiers.py check`, `test` or `test-all`. The Makefile has a target for each.

A tier is a list of steps, each a target of the Makefile. At the end, the program prints why tests were skipped, the 30
slowest tests, and what each step took. The tier fails if a step fails, or if all steps together need a third more CPU
time than the tier's budget. The budget is CPU time, because wall time depends on what else the machine does. It is
stated for the machine on which REFERENCE_S was measured; on a faster or slower machine, pace() scales it.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
TIMES = ROOT / "build/times"  # pytest and ctest write the duration of each test here, as JUnit XML
SLOWEST = 30
# The targets of the Makefile that a tier runs. `make test` fuzzes only for seconds: `make fuzz` is longer.
TIERS = {
    "check": ("lint", "core-address", "test-quick"),
    "test": ("lint", "test-core", "fuzz SECONDS=30", "test-python"),
    "test-all": ("lint", "test-core", "fuzz SECONDS=30", "test-python MARKS=not huge", "test-mindspore"),
}
# In CPU seconds, with all that the steps build in a fresh clone. make builds the environments and the package before it
# runs this program, so they do not count.
BUDGETS_S = {"check": 300, "test": 1400, "test-all": 5000}
# The CPU seconds that pace()'s work took on the machine for which the budgets are stated: 2 virtual CPUs of an Intel
# Sapphire Rapids at 2.6 GHz, CPython 3.11.
REFERENCE_S = 0.16


def pace() -> float:
    """Return how many CPU seconds of this machine do the work of one CPU second of the reference machine."""
    shortest = float("inf")
    for _ in range(3):
        begin = time.process_time()
        words: dict[str, int] = {}
        for number in range(1_000_000):
            word = str(number % 10_007)
            words[word] = words.get(word, 0) + number
        shortest = min(shortest, time.process_time() - begin)
    return shortest / REFERENCE_S


def cpu_seconds() -> float:
    """Return the CPU time of all processes that this process and its descendants have started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def results() -> tuple[list[tuple[float, str]], Counter[str]]:
    """Return the seconds and the name of each test that the steps ran, the longest first, and how many tests were
    skipped for each reason.
    """
    ran, skipped = [], Counter[str]()
    for report in sorted(TIMES.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            if (skip := case.find("skipped")) is not None:
                skipped[skip.get("message", "")] += 1
                continue
            name = f"{case.get('classname', '')}.{case.get('name')}".removeprefix("tests.")
            ran.append((float(case.get("time", 0)), f"{report.stem}: {name}"))
    return sorted(ran, reverse=True), skipped


def main(tier: str) -> int:
    for report in TIMES.glob("*.xml"):
        report.unlink()
    TIMES.mkdir(parents=True, exist_ok=True)
    speed, before_s = pace(), cpu_seconds()
    lines = []
    failed = ""
    for step in TIERS[tier]:
        began, began_s = time.monotonic(), cpu_seconds()
        print(f"--- make {step}", flush=True)
        target, _, setting = step.partition(" ")
        command = ["make", "--no-print-directory", target, *([setting] if setting else [])]
        code = subprocess.run(command, cwd=ROOT).returncode
        lines.append(f"{target:>15} {time.monotonic() - began:7.0f} s, CPU {cpu_seconds() - began_s:6.0f} s")
        if code:
            failed = f"make {target} failed"
            break
    every, skipped = results()
    print(f"--- {skipped.total()} tests were skipped", *(f"{n:8}  {why}" for why, n in skipped.most_common()), sep="\n")
    total = sum(seconds for seconds, _ in every)
    slowest = every[:SLOWEST]
    print(f"--- the {len(slowest)} slowest of {len(every)} tests")
    for seconds, name in slowest:
        print(f"{seconds:8.1f} s  {name}")
    share = sum(seconds for seconds, _ in slowest) / total if total else 0
    print(f"They took {share:.0%} of the {total:.0f} s of all tests, which run several at once.")
    limit_s = BUDGETS_S[tier] * 4 / 3 * max(speed, pace())
    used = cpu_seconds() - before_s
    print(f"--- make {tier}", *lines, sep="\n")
    print(f"{'all':>15} {'':7}    CPU {used:6.0f} s; the budget allows {limit_s:.0f} s on this machine")
    if not failed and used > limit_s:
        failed = f"the steps took {used:.0f} s of CPU time, more than {limit_s:.0f} s"
    print(f"make {tier}: {failed or 'all passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
