"""`mscomm run` with other constants, or with a clock that the ranks advance. So a test of a grace period need not wait.

    command = patched_run(STALLED_S=0.3, clock=tmp_path / "clock")

A constant keeps its name, and may be in any module of mscomm.launching, or in the hub's judge. Shorten a constant only
if nothing else has to happen in that time, because a busy machine may be slow; otherwise use the clock. For the
launcher, it is JUMP_S seconds later for each byte in the file `clock`. The launcher looks at its clock when a rank
prints or ends, and every 0.2 s after a failure.
"""

from __future__ import annotations

import sys
from pathlib import Path

JUMP_S = 100.0

_PROGRAM = """
import os, time, types
from mscomm.cli import main
from mscomm.cluster import judge
from mscomm.launching import output, parts, processes, tracebacks

modules = (output, parts, processes, tracebacks)
constants, clock, jump_s = {!r}, {!r}, {!r}
for name, value in constants.items():
    having = [module for module in (*modules, judge) if hasattr(module, name)]
    assert having, name
    for module in having:
        setattr(module, name, value)

def monotonic():
    return time.monotonic() + jump_s * (os.path.getsize(clock) if os.path.exists(clock) else 0)

if clock:
    for module in modules:
        module.time = types.SimpleNamespace(monotonic=monotonic, strftime=time.strftime)
main(prog_name="mscomm")
"""


def patched_run(*, clock: Path | None = None, **constants: float) -> list[str]:
    """Return the beginning of the command line, up to and including the word `run`."""
    return [sys.executable, "-c", _PROGRAM.format(constants, str(clock or ""), JUMP_S), "run"]
