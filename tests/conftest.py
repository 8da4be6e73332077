"""Fixtures that several files use."""

from __future__ import annotations

import pytest


@pytest.fixture
def tmpdir_env(tmp_path, monkeypatch):
    """tempfile.gettempdir() is this folder, here and in child processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path
