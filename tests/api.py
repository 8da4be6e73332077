"""Helpers for the test_api_*.py files: tables of mscomm's functions, and a function to run code in a forked child."""

from __future__ import annotations

import os
from typing import Any

import pytest

import mscomm


def many(x: Any, *, out: Any = None, **options: Any) -> Any:
    """Call all_reduce_many with the list [x]. Return the result for x."""
    return mscomm.all_reduce_many([x], out=None if out is None else [out], **options)[0]


REDUCTIONS = {"all_reduce": mscomm.all_reduce, "all_reduce_many": many, "scan": mscomm.scan}
WITH_ARRAY = {**REDUCTIONS, "all_gather": mscomm.all_gather, "broadcast": mscomm.broadcast}
COLLECTIVES = {**WITH_ARRAY, "barrier": lambda _, **options: mscomm.barrier(**options)}


def each(table: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("function", table.values(), ids=table)


def in_a_forked_child(body: Any) -> str:
    """Run body in a forked child. Return the type and text of the error that body raises, or "nothing was raised"."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            body()
            text = "nothing was raised"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writable, text.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text
