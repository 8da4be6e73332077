"""The replacement for breakpoint() in a rank that has no terminal."""

from __future__ import annotations

import os
from typing import Any, NoReturn

HOOK = f"{__name__}.no_terminal"  # the value of PYTHONBREAKPOINT in a rank that has no terminal


def no_terminal(*_: Any, **__: Any) -> NoReturn:
    """Raise an error that says how to debug a rank. Without input, a debugger would fail at once with BdbQuit."""
    rank = os.environ.get("MSCOMM_RANK", "0")
    raise RuntimeError(
        f"breakpoint() in rank {rank}, which has no terminal: start the job with `mscomm run --stdin {rank}` to debug "
        "this rank; the others then run on"
    )
