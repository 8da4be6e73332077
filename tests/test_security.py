"""Keys: which files can hold a key, which jobs share one, and when a job needs one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from control import KEY, key_file

from mscomm import errors
from mscomm.bootstrap import rendezvous
from mscomm.cluster import security
from mscomm.cluster.protection import Protection


def fails():
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")


@pytest.mark.parametrize("address", [("127.0.0.1", 1), "\0name"])
def test_a_key_file_of_the_user_needs_no_temporary_folder(address, tmp_path, monkeypatch):
    env = {"MSCOMM_JOB_KEY_FILE": key_file(tmp_path / "k")}
    monkeypatch.setattr("tempfile.gettempdir", fails)
    keys = [rendezvous._key(rendezvous.Spot("job"), address, env, Protection(), new=new) for new in (True, False)]
    assert keys[0] == keys[1] and keys[0][1] is None


@pytest.mark.parametrize("lacks", ["folder", "file"])
def test_a_key_that_cannot_be_written_is_no_trouble_of_a_port(lacks, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    path, words = str(tmp_path / "file/folder/k"), "cannot write the job's key to .*: Not a directory"
    if lacks == "folder":
        monkeypatch.setattr("tempfile.gettempdir", fails)
        security.remove_stale()  # called by a rank that leaves
        path, words = "", "no folder for the job's key: No usable"
    with pytest.raises(errors.BackendUnavailable, match=rf"{words}.*set TMPDIR .*MSCOMM_JOB_KEY_FILE"):
        security.KeyFile(path or security.key_path("k"))


def test_a_key_is_32_bytes_or_64_hex_digits_or_more_bytes(tmp_path):
    assert security.read_key(key_file(tmp_path / "a")) == KEY
    assert security.read_key(key_file(tmp_path / "b", KEY.hex().encode() + b"\n")) == KEY
    assert len(security.read_key(key_file(tmp_path / "c", bytes(range(100))))) == 32


def test_unsafe_key_files_are_refused_with_advice(tmp_path):
    good = key_file(tmp_path / "good")
    (tmp_path / "link").symlink_to(good)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, text in (
        (key_file(tmp_path / "short", b"abc"), "holds 3 bytes"),
        (
            key_file(tmp_path / "text", b"correct horse battery staple, my favourite"),
            "holds text, which can be guessed",
        ),
        (key_file(tmp_path / "zeros", bytes(32)), "it has only 1 different bytes"),
        (key_file(tmp_path / "hex of zeros", b"0" * 64), "it has only 1 different bytes"),
        (key_file(tmp_path / "open", mode=0o640), "chmod 600"),
        (str(tmp_path / "link"), "not a symbolic link"),
        (str(tmp_path / "pipe"), "not a regular file"),
        (str(tmp_path / "absent"), "no such file"),
        (str(tmp_path), "not a regular file"),
    ):
        with pytest.raises(errors.AuthenticationError, match=text):
            security.read_key(path)


def test_a_key_file_of_somebody_else_is_refused(tmp_path, monkeypatch):
    path = key_file(tmp_path / "key")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(errors.AuthenticationError, match="belongs to uid"):
        security.read_key(path)


def test_a_loopback_scheduler_shares_its_key_in_a_private_file(tmpdir_env):
    key, file = security.scheduler_key({}, "127.0.0.1", 8117, Protection())
    assert Path(file.path).stat().st_mode & 0o777 == 0o600
    assert Path(file.path).parent.stat().st_mode & 0o777 == 0o700
    assert security.job_key({}, "127.0.0.1", 8117, Protection()) == key
    file.remove()
    assert not Path(file.path).exists()
    with pytest.raises(errors.AuthenticationError, match=r"the scheduler at 127.0.0.1:8117"):
        security.job_key({}, "127.0.0.1", 8117, Protection())


def test_a_prepared_folder_is_not_trusted(tmpdir_env):
    folder = tmpdir_env / f"mscomm-{os.getuid()}"
    folder.mkdir()
    for mode in (0o777, 0o770, 0o720, 0o710, 0o701):
        folder.chmod(mode)
        with pytest.raises(errors.AuthenticationError, match="chmod 700"):
            security.scheduler_key({}, "127.0.0.1", 8117, Protection())
    folder.rmdir()
    folder.symlink_to(tmpdir_env)
    with pytest.raises(errors.AuthenticationError, match="symbolic link"):
        security.scheduler_key({}, "127.0.0.1", 8117, Protection())


def test_a_later_schedulers_key_is_not_removed(tmpdir_env):
    _, first = security.scheduler_key({}, "127.0.0.1", 8117, Protection())
    key, _ = security.scheduler_key({}, "127.0.0.1", 8117, Protection())
    first.remove()
    assert security.job_key({}, "127.0.0.1", 8117, Protection()) == key


def test_off_loopback_a_job_needs_a_key_or_permission(capfd, tmp_path):
    for ask in (security.job_key, security.scheduler_key):
        with pytest.raises(errors.AuthenticationError, match=r"MSCOMM_JOB_KEY_FILE=(.|\n)*enable_ssl=False"):
            ask({}, "10.0.0.7", 8117, Protection())
    assert capfd.readouterr().err == ""
    key = security.job_key({}, "10.0.0.7", 8117, Protection(permit_plain=True))
    assert "anybody who can reach 10.0.0.7:8117 can join" in capfd.readouterr().err
    assert security.scheduler_key({}, "10.0.0.7", 8117, Protection(permit_plain=True)) == (key, None)
    env = {"MSCOMM_JOB_KEY_FILE": key_file(tmp_path / "key")}
    assert security.job_key(env, "10.0.0.7", 8117, Protection()) == KEY
