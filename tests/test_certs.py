"""`mscomm certs make`: its files work as they are, and nobody else can read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_tls import connected, shake

from mscomm.cli import certs
from mscomm.cluster.credentials import SCHEDULER, WORKER, configured
from mscomm.errors import AuthenticationError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(*words, code=0, **options):
    done = CliRunner().invoke(certs.command, ["make", *words], **options)
    assert done.exit_code == code, done.output
    return done.output


def variables(folder, own_password=None):
    env = {"MSCOMM_SSL_CONFIG_FILE": f"{folder}/config.json"}
    for side in ("SERVER", "CLIENT"):
        if own_password:
            env[f"MSCOMM_SSL_{side}_PASSWORD"] = own_password
        else:
            env[f"MSCOMM_SSL_{side}_PASSWORD_FILE"] = f"{folder}/{side.lower()}.password"
    return env


def exchanged(found, job=""):
    """Do a handshake, and check the roles on both ends."""
    server, client = connected(found.server(), found.client())
    shake(server, client)
    try:
        found.check_peer(server, WORKER, job)
        found.check_peer(client, SCHEDULER, job)
    finally:
        server.close()
        client.close()


def test_the_files_work_as_they_are():
    output = make()
    told = []
    exchanged(configured(variables("certs"), warn=told.append))
    assert told == []
    for path in ("config.json", "server.password", "client.password"):
        assert os.path.abspath(f"certs/{path}") in output


def test_the_two_keys_have_different_passwords_that_are_not_printed():
    output = make()
    passwords = {Path(f"certs/{side}.password").read_text().strip() for side in ("server", "client")}
    assert len(passwords) == 2 and not any(password in output for password in passwords)


def test_nobody_else_can_read_the_files():
    old = os.umask(0)
    try:
        make()
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat("certs").st_mode) == 0o700
    assert {stat.S_IMODE(os.stat(f"certs/{name}").st_mode) for name in os.listdir("certs")} == {0o600}
    assert set(os.listdir("certs")) == {
        *("ca.crt", "crl.pem", "config.json", "server.p12", "client.p12", "server.password", "client.password")
    }


def test_the_private_key_of_the_ca_is_not_kept():
    make()
    for name in os.listdir("certs"):
        assert b"PRIVATE KEY" not in Path(f"certs/{name}").read_bytes()


def test_nothing_is_overwritten():
    make()
    before = {name: Path(f"certs/{name}").read_bytes() for name in os.listdir("certs")}
    assert "certs exists already; name another folder" in make(code=1)
    assert {name: Path(f"certs/{name}").read_bytes() for name in os.listdir("certs")} == before
    assert os.listdir(".") == ["certs"]


def test_a_failure_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(certs, "_make", lambda *arguments: os.listdir("/nowhere"))
    assert "No such file" in make(code=1)
    assert os.listdir(".") == []


def test_a_folder_that_cannot_be_made_is_named():
    assert "deep/certs: No such file or directory" in make("--dir", "deep/certs", code=1)


def test_certificates_may_be_for_one_job(monkeypatch):
    make("--job", "night run")
    with pytest.raises(AuthenticationError, match="not for a scheduler of this job"):
        configured(variables("certs")).server()
    monkeypatch.setenv("MSCOMM_JOB_ID", "night run")
    found = configured(variables("certs"))
    exchanged(found, "night run")
    with pytest.raises(AuthenticationError, match="not for a worker of this job"):
        exchanged(found, "day")


# Two keys in each file have this number of rounds, in DER: the one for the certificate and the one for the private key.
@pytest.mark.parametrize(("words", "rounds"), [([], bytes.fromhex("02020800")), (["--ask"], bytes.fromhex("02024e20"))])
def test_only_a_password_that_a_person_chose_has_a_slow_derivation(words, rounds):
    make(*words, input="secret-7\nsecret-7\n")
    for side in ("server", "client"):
        assert Path(f"certs/{side}.p12").read_bytes().count(rounds) >= 2


def test_the_password_may_come_from_a_file():
    with open("password", "w") as file:
        file.write("from a file\n")
    os.chmod("password", 0o644)
    assert "chmod 600" in make("--password-file", "password", code=1)
    os.chmod("password", 0o600)
    assert "PASSWORD" not in make("--password-file", "password").replace("_CONFIG_FILE", "")
    exchanged(configured(variables("certs", "from a file")))
    assert not os.path.exists("certs/server.password")


def test_the_password_may_be_typed():
    output = make("--ask", input="secret-7\nsecret-7\n")
    assert "secret-7" not in output
    exchanged(configured(variables("certs", "secret-7")))
    assert "give either --ask or --password-file" in make("--ask", "--password-file", "x", code=2)


def test_few_days_do_not_cause_a_warning_at_once():
    make("--days", "20")
    told = []
    exchanged(configured(variables("certs"), warn=told.append))
    assert told == []
