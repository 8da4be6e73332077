"""Tells PyInstaller which files of mscomm a frozen program needs. The entry point is in pyproject.toml."""

from __future__ import annotations

import os


def hook_folders() -> list[str]:
    return [os.path.dirname(__file__)]
