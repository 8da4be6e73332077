"""Ascend NPUs: HCCL and AscendCL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from mscomm.errors import BackendUnavailable


def load(env: Mapping[str, str]) -> NoReturn:
    raise BackendUnavailable('the hccl backend is not in this release of mscomm; use init("gloo"), the CPU core')


def shares_devices(env: Mapping[str, str]) -> str:
    return ""
