"""The settings of TLS: config.json, certificates, revocation lists, ciphers and passwords."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import re
import ssl
import traceback

import pytest
from certificates import CLIENT, PASSWORD, SERVER, Authority, write_config, write_p12, write_pem
from control import raised

from mscomm import context, environment, notices
from mscomm.cluster import credentials
from mscomm.cluster.credentials import SCHEDULER, WORKER, Config, Credentials, configured, read_config
from mscomm.errors import AuthenticationError, BackendUnavailable

PASSWORDS = {SCHEDULER: PASSWORD, WORKER: PASSWORD}
# The sample in MindSpore's tutorial. Its first name has a blank in it.
SAMPLE = (
    "ECDHE-R SA-AES128-GCM-SHA256:ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES256-GCM-SHA384:ECDHE-ECDSA-AES256-GCM-SHA"
    "384:DHE-RSA-AES128-GCM-SHA256:DHE-DSS-AES128-GCM-SHA256:DHE-RSA-AES256-GCM-SHA384:DHE-DSS-AES256-GCM-SHA384:DHE-P"
    "SK-AES128-GCM-SHA256:DHE-PSK-AES256-GCM-SHA384:DHE-PSK-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305:ECDHE-PSK-CH"
    "ACHA20-POLY1305:DHE-RSA-AES128-CCM:DHE-RSA-AES256-CCM:DHE-RSA-CHACHA20-POLY1305:DHE-PSK-AES128-CCM:DHE-PSK-AES256"
    "-CCM:ECDHE-ECDSA-AES128-CCM:ECDHE-ECDSA-AES256-CCM:ECDHE-ECDSA-CHACHA20-POLY1305"
)


def made(folder, *arguments, passwords=PASSWORDS, warn=None, **settings):
    told = [] if warn is None else warn
    return Credentials(write_config(folder, *arguments, **settings), passwords, told.append)


# -- config.json


def test_paths_are_relative_to_the_file_and_other_keys_have_defaults(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep/config.json").write_text(json.dumps({"ca_cert_path": "ca.crt", "crl_path": "/etc/crl.pem"}))
    assert read_config("deep/config.json") == Config(f"{tmp_path}/deep/ca.crt", crl_path="/etc/crl.pem")
    assert read_config("deep/config.json").cert_expire_warning_time_in_day == 90


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[" * 60000, "not JSON|expected a JSON object"),
        ("[]", "expected a JSON object with ca_cert_path"),
        ("x" * (1 << 17), "more than 64 KiB"),
        ('{"crl_pth": ""}', "unknown key 'crl_pth'; expected ca_cert_path"),
        ('{"recovery": {}}', "ca_cert_path is missing"),
        ('{"ca_cert_path": 1}', "ca_cert_path is 1; expected a text"),
        ('{"ca_cert_path": "a", "cipher_list": null}', "cipher_list is None; expected a text"),
        ('{"ca_cert_path": "a\\u0000"}', "expected a text"),
        ('{"ca_cert_path": "a", "cert_expire_warning_time_in_day": 6}', "is 6; expected 7 to 180"),
        ('{"ca_cert_path": "a", "cert_expire_warning_time_in_day": 181}', "is 181; expected 7 to 180"),
        ('{"ca_cert_path": "a", "cert_expire_warning_time_in_day": true}', "is True; expected 7 to 180"),
    ],
)
def test_a_wrong_config_is_refused_by_name(tmp_path, text, said):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert re.search(said, str(raised(ValueError, read_config, str(path))))
    assert str(path) in str(raised(ValueError, Credentials, str(path)))


def test_an_absent_config_says_how_to_get_one(tmp_path):
    assert "mscomm certs make" in str(raised(ValueError, read_config, str(tmp_path / "config.json")))


@pytest.mark.parametrize("days", [7, 180])
def test_both_limits_of_the_days_are_accepted(tmp_path, days):
    assert made(tmp_path, cert_expire_warning_time_in_day=days).config.cert_expire_warning_time_in_day == days


# -- ciphers


def test_the_sample_of_the_tutorial_works_with_one_warning(tmp_path):
    told = []
    both = made(tmp_path, cipher_list=SAMPLE, warn=told)
    found = both.server()
    assert both.client() and len(told) == 1
    assert told[0].endswith("cipher_list has names that OpenSSL does not know: ECDHE-R, SA-AES128-GCM-SHA256")
    names = {suite["name"] for suite in found.get_ciphers() if suite["protocol"] == "TLSv1.2"}
    assert "ECDHE-ECDSA-AES128-GCM-SHA256" in names and names < set(SAMPLE.split(":"))
    assert not any("PSK" in name or "DSS" in name for name in names)
    assert found.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("cipher_list", ["", "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384"])
def test_without_suites_of_tls_1_2_only_tls_1_3_is_used(tmp_path, cipher_list):
    assert made(tmp_path, cipher_list=cipher_list).client().minimum_version == ssl.TLSVersion.TLSv1_3


# aNULL and ADH have no authentication; ALL, ! and @ are commands of OpenSSL, not suites.
@pytest.mark.parametrize(
    "cipher_list", ["x", "DHE-PSK-AES128-CCM", "ADH-AES128-SHA", "ALL", "aNULL", "@SECLEVEL=0", "NULL-SHA256"]
)
def test_a_list_without_a_usable_suite_is_refused(tmp_path, cipher_list):
    with pytest.raises(ValueError, match="cipher_list has no suite that can be used"):
        made(tmp_path, cipher_list=cipher_list).server()


# -- certificates


def test_a_context_is_made_once_and_needs_only_its_own_bundle(tmp_path):
    found = made(tmp_path)
    (tmp_path / "server.p12").unlink()
    assert found.client() is found.client()
    assert "server.p12: No such file" in str(raised(AuthenticationError, found.server))


def test_the_contexts_trust_only_the_given_ca_and_check_the_other_end(tmp_path):
    found = made(tmp_path)
    for one in (found.server(), found.client()):
        assert [ca["subject"] for ca in one.get_ca_certs()] == [((("commonName", "test CA"),),)]
        assert one.verify_mode == ssl.CERT_REQUIRED and not one.check_hostname
        assert one.options & (ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION)


def test_a_bundle_may_have_the_certificates_between_it_and_the_ca(tmp_path):
    root = Authority("root")
    between = Authority("between", parent=root)
    found = made(tmp_path, root)
    key, certificate = between.issue("server", SERVER)
    write_p12(tmp_path / "server.p12", key, certificate, between=[between])
    assert found.server()
    not_an_authority = Authority("between", parent=root, ca=False)
    write_p12(tmp_path / "client.p12", *not_an_authority.issue("client", CLIENT), between=[not_an_authority])
    assert "is not signed by the CA" in str(raised(AuthenticationError, found.client))


@pytest.mark.parametrize("password", [PASSWORD, ""])
def test_pem_files_work_too(tmp_path, password):
    authority = Authority()
    path = write_config(tmp_path, authority, server_cert_path="server.pem")
    write_pem(tmp_path / "server.pem", *authority.issue("server", SERVER), password)
    assert Credentials(path, {SCHEDULER: password}).server()


def test_a_bundle_without_a_password_works(tmp_path):
    authority = Authority()
    path = write_config(tmp_path, authority)
    write_p12(tmp_path / "server.p12", *authority.issue("server", SERVER), password="")
    assert Credentials(path).server()


AUTHORITY = Authority()
REFUSED = {
    "expired": ({"server": AUTHORITY.issue("s", SERVER, (-9, -2))}, r"server\.p12: .* CN=s has expired on \d{4}-"),
    "early": ({"server": AUTHORITY.issue("s", SERVER, (2, 9))}, r"server\.p12: .* is not valid before \d{4}-.* clock"),
    "unknown": ({"server": Authority("test CA").issue("s", SERVER)}, "is not signed by the CA in .*ca.crt"),
    "usage": ({"server": AUTHORITY.issue("s", CLIENT)}, "is not for a scheduler: extendedKeyUsage has no serverAuth"),
    "ca expired": ({"authority": Authority(days=(-9, -1))}, r"ca\.crt: .* has expired on"),
    "no ca": ({"authority": Authority(ca=False)}, r"ca\.crt: .* is not a CA"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unusable_certificate_is_refused_when_it_is_loaded(tmp_path, case):
    arguments, said = REFUSED[case]
    path = write_config(tmp_path, **({"authority": AUTHORITY} | arguments))
    assert re.search(said, str(raised(AuthenticationError, Credentials(path, PASSWORDS).server)))


def test_a_key_of_another_certificate_is_refused(tmp_path):
    found = made(tmp_path, AUTHORITY, server_cert_path="server.pem")
    write_pem(tmp_path / "server.pem", AUTHORITY.key, AUTHORITY.issue("s")[1])
    assert "the private key does not belong to" in str(raised(AuthenticationError, found.server))


@pytest.mark.parametrize("name", ["ca.crt", "server.p12", "crl.pem"])
@pytest.mark.parametrize("content", [b"", b"garbage", os.urandom(300), bytes((1 << 20) + 1)])
def test_a_file_with_something_else_is_refused_by_name(tmp_path, name, content):
    path = write_config(tmp_path, AUTHORITY, crl_path="crl.pem")
    AUTHORITY.revoke(tmp_path / "crl.pem")
    (tmp_path / name).write_bytes(content)
    assert str(tmp_path / name) in str(raised(AuthenticationError, Credentials(path, PASSWORDS).server))


def test_a_certificate_that_expires_soon_causes_one_warning(tmp_path):
    told = []
    found = made(tmp_path, AUTHORITY, AUTHORITY.issue("s", SERVER, (-1, 30.5)), warn=told)
    found.server()
    found.server()
    found.client()
    assert len(told) == 1
    assert re.fullmatch(
        r".*/server\.p12: the certificate expires on \d{4}-\d\d-\d\d \d\d:\d\d UTC, in 30 days", told[0]
    )


def test_a_certificate_that_lasts_long_enough_causes_no_warning(tmp_path):
    told = []
    made(tmp_path, AUTHORITY, AUTHORITY.issue("s", SERVER, (-1, 30.5)), warn=told, cert_expire_warning_time_in_day=30)
    assert told == []


# -- revocation lists


def test_an_own_certificate_that_is_revoked_is_refused(tmp_path):
    revoked = AUTHORITY.issue("s", SERVER)
    AUTHORITY.revoke(tmp_path / "crl.pem", revoked[1])
    found = made(tmp_path, AUTHORITY, revoked, crl_path="crl.pem")
    assert re.search(r"is revoked, says .*crl\.pem", str(raised(AuthenticationError, found.server)))
    assert found.client()


@pytest.mark.parametrize(
    ("authority", "days", "said"),
    [
        (AUTHORITY, (-9, -1), r"crl\.pem: the revocation list has expired on \d{4}-"),
        (AUTHORITY, (1, 9), r"crl\.pem: the revocation list is not valid before \d{4}-"),
        (Authority("test CA"), (-1, 9), r"crl\.pem: the revocation list is not signed by the CA in .*ca\.crt"),
        (Authority("other"), (-1, 9), "the revocation list is not signed by the CA"),
    ],
)
def test_a_revocation_list_that_cannot_be_trusted_is_refused(tmp_path, authority, days, said):
    authority.revoke(tmp_path / "crl.pem", days=days)
    found = made(tmp_path, AUTHORITY, crl_path="crl.pem")
    assert re.search(said, str(raised(AuthenticationError, found.client)))


def test_a_file_with_two_revocation_lists_is_refused_because_only_one_would_count(tmp_path):
    AUTHORITY.revoke(tmp_path / "crl.pem")
    with open(tmp_path / "crl.pem", "r+b") as file:
        file.write(file.read())
    found = made(tmp_path, AUTHORITY, crl_path="crl.pem")
    assert re.search(r"crl\.pem: has several revocation lists", str(raised(AuthenticationError, found.client)))


def test_a_revocation_list_may_be_in_der_form(tmp_path):
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    AUTHORITY.revoke(tmp_path / "crl.pem")
    listed = x509.load_pem_x509_crl((tmp_path / "crl.pem").read_bytes())
    (tmp_path / "crl.der").write_bytes(listed.public_bytes(Encoding.DER))
    assert made(tmp_path, AUTHORITY, crl_path="crl.der").client().verify_flags & ssl.VERIFY_CRL_CHECK_LEAF


# -- passwords


@pytest.mark.parametrize("wrong", ["Not It 77", ""])
def test_a_wrong_password_is_named_and_not_shown(tmp_path, wrong):
    found = made(tmp_path, passwords={SCHEDULER: wrong, WORKER: PASSWORD})
    error = raised(AuthenticationError, found.server)
    shown = "".join(traceback.format_exception(error)) + repr(found) + str(vars(error))
    assert re.search(r"server\.p12: .* or the server password is wrong or missing", str(error))
    assert PASSWORD not in shown and (not wrong or wrong not in shown)


def test_a_password_is_wiped_when_it_has_been_used(tmp_path):
    found = made(tmp_path)
    password = found._passwords[SCHEDULER]
    found.server()
    assert SCHEDULER not in found._passwords and password == bytes(len(PASSWORD))
    assert found._passwords.keys() == {WORKER}


def test_no_private_key_is_written_in_the_clear(tmp_path, monkeypatch):
    """The only files that are written are in memory, and the private key in them is encrypted."""
    written = []
    real = credentials._in_memory
    monkeypatch.setattr(credentials, "_in_memory", lambda content: written.append(content) or real(content))
    opened = []
    real_open = builtins.open
    monkeypatch.setattr(
        builtins, "open", lambda file, mode="r", **kw: opened.append((file, mode)) or real_open(file, mode, **kw)
    )
    made(tmp_path).server()
    keys = [content for content in written if b"PRIVATE KEY" in content]
    assert len(keys) == 1 and b"BEGIN ENCRYPTED PRIVATE KEY" in keys[0] and b"BEGIN PRIVATE KEY" not in keys[0]
    assert all(
        mode == "rb" or isinstance(file, int) for file, mode in opened if not str(file).startswith(str(tmp_path))
    )


def test_credentials_cannot_be_pickled(tmp_path):
    with pytest.raises(TypeError):
        pickle.dumps(made(tmp_path))


def test_variables_give_the_settings_and_lose_the_passwords(tmp_path):
    path = write_config(tmp_path, AUTHORITY)
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    file.chmod(0o600)
    env = {
        "MSCOMM_SSL_CONFIG_FILE": path,
        "MSCOMM_SSL_SERVER_PASSWORD": PASSWORD,
        "MSCOMM_SSL_CLIENT_PASSWORD_FILE": str(file),
    }
    assert PASSWORD not in str(environment.given(env)) + str(environment.read_by("cluster.credentials", env))
    found = configured(env)
    assert found.server() and found.client()
    assert env == {"MSCOMM_SSL_CONFIG_FILE": path, "MSCOMM_SSL_CLIENT_PASSWORD_FILE": str(file)}


def test_arguments_have_priority_over_variables(tmp_path):
    path = write_config(tmp_path, AUTHORITY)
    env = {"MSCOMM_SSL_CONFIG_FILE": "/nowhere", "MSCOMM_SSL_SERVER_PASSWORD": "wrong"}
    assert configured(env, path, {SCHEDULER: PASSWORD}).server()


def test_without_settings_there_are_no_credentials():
    env = {"MSCOMM_SSL_SERVER_PASSWORD": "kept"}
    assert configured(env) is None and env == {"MSCOMM_SSL_SERVER_PASSWORD": "kept"}


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [(b"secret\n", 0o644, "chmod 600"), (b"\n", 0o600, "it is empty"), (b"\xff\xfe", 0o600, "not text in UTF-8")],
)
def test_an_unsafe_password_file_is_refused(tmp_path, content, mode, said):
    path = tmp_path / "password"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(AuthenticationError, match=f"password file {path}: .*{said}"):
        credentials.read_password(str(path))


def forget_cryptography(monkeypatch):
    """From now on, behave as if the package were not installed."""
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("cryptography"):
            raise ImportError("No module named 'cryptography'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)


def test_good_certificates_in_the_usual_form_need_no_cryptography(tmp_path, monkeypatch):
    AUTHORITY.revoke(tmp_path / "crl.pem")
    found = made(tmp_path, AUTHORITY, crl_path="crl.pem")
    forget_cryptography(monkeypatch)
    assert found.server() and found.client().verify_flags & ssl.VERIFY_CRL_CHECK_LEAF


def test_a_ca_that_another_one_has_signed_needs_no_cryptography(tmp_path, monkeypatch):
    found = made(tmp_path, Authority("below", parent=AUTHORITY))
    forget_cryptography(monkeypatch)
    assert found.server()


@pytest.mark.parametrize(
    ("uri", "fits"),
    [
        ("mscomm://a/scheduler", True),
        ("https://example.com", True),
        ("mscomm://a/worker", False),
        ("mscomm://b/scheduler", False),
        ("mscomm://a/scheduler\0", False),
    ],
)
def test_the_core_accepts_only_the_uri_of_this_job_and_role(tmp_path, monkeypatch, uri, fits):
    monkeypatch.setenv("MSCOMM_JOB_ID", "a")
    found = made(tmp_path, AUTHORITY, AUTHORITY.issue("s", SERVER, uri=uri))
    forget_cryptography(monkeypatch)
    assert found.server() if fits else raised(BackendUnavailable, found.server)


@pytest.mark.parametrize(
    "more", [b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", b"-----BEGIN X-----"]
)
def test_the_core_refuses_an_authority_file_that_it_cannot_read_to_the_end(tmp_path, monkeypatch, more):
    found = made(tmp_path, AUTHORITY)
    with open(tmp_path / "ca.crt", "ab") as file:
        file.write(more)
    forget_cryptography(monkeypatch)
    assert raised(BackendUnavailable, found.server)


def test_without_cryptography_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write_config(tmp_path, AUTHORITY, AUTHORITY.issue("s", CLIENT))
    forget_cryptography(monkeypatch)
    said = str(raised(BackendUnavailable, Credentials(path, PASSWORDS).server))
    assert f"needs the package cryptography to read the certificates of {path}, or to say what is wrong" in said
    assert "pip install 'cryptography>=42'" in said


# -- set_ps_context


@pytest.fixture
def ps_context(monkeypatch):
    for row in environment.VARIABLES:
        if row.name.startswith("MSCOMM_SSL"):
            monkeypatch.delenv(row.name, raising=False)
    monkeypatch.setattr(notices, "_said", set())
    context.reset_ps_context()
    yield context
    context.reset_ps_context()


def test_the_settings_can_be_read_back_but_the_passwords_cannot(ps_context, tmp_path):
    assert (context.get_ps_context("config_file_path"), context.get_ps_context("enable_ssl")) == ("", False)
    path = tmp_path / "config.json"
    context.set_ps_context(config_file_path=path, enable_ssl=True, client_password="a", server_password="b")
    assert (context.get_ps_context("config_file_path"), context.get_ps_context("enable_ssl")) == (str(path), True)
    for name in ("client_password", "server_password", "x"):
        with pytest.raises(ValueError, match=f"get_ps_context: '{name}' is not one of config_file_path, enable_ssl"):
            context.get_ps_context(name)
    context.reset_ps_context()
    assert context.get_ps_context("enable_ssl") is False


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"enable_ssl": True}, ValueError, "say where the certificates are, with config_file_path="),
        ({"colour": 1}, ValueError, "set_ps_context: unknown option 'colour'"),
        ({"enable_ssl": "yes"}, TypeError, "enable_ssl is a str; expected True or False"),
        ({"client_password": b"hidden"}, TypeError, "client_password is a bytes; expected a str$"),
    ],
)
def test_a_wrong_setting_is_refused_and_nothing_is_set(ps_context, options, kind, said):
    with pytest.raises(kind, match=said):
        context.set_ps_context(**{"config_file_path": "", **options})
    assert context._ps == context._PsContext()


def test_the_settings_make_credentials_once(ps_context, tmp_path):
    path = write_config(tmp_path, AUTHORITY)
    context.set_ps_context(config_file_path=path, server_password=PASSWORD)
    context.set_ps_context(enable_ssl=True, client_password=PASSWORD)
    found = context.protection().credentials
    assert found.server() and found.client() and context.protection().credentials is found
    assert PASSWORD not in str(context._ps)


def test_a_variable_turns_tls_on_and_an_explicit_false_turns_it_off(ps_context, tmp_path, monkeypatch):
    monkeypatch.setenv("MSCOMM_SSL_CONFIG_FILE", write_config(tmp_path, AUTHORITY))
    monkeypatch.setenv("MSCOMM_SSL_SERVER_PASSWORD", PASSWORD)
    assert context.protection().credentials.server()
    assert "MSCOMM_SSL_SERVER_PASSWORD" not in os.environ
    context.reset_ps_context()
    context.set_ps_context(enable_ssl=False)
    assert context.protection().credentials is None and context.protection().permit_plain


def test_settings_cannot_change_after_they_have_been_read(ps_context):
    context.set_ps_context(enable_ssl=False)
    assert context.protection().credentials is None
    context.set_ps_context(enable_ssl=False)  # changes nothing
    with pytest.raises(RuntimeError, match="set them before init"):
        context.set_ps_context(client_password="x")
    context.reset_ps_context()
    context.set_ps_context(client_password="x")


def test_settings_that_failed_can_be_corrected(ps_context, tmp_path):
    context.set_ps_context(enable_ssl=True, config_file_path=tmp_path / "absent.json")
    with pytest.raises(ValueError, match=r"absent\.json"):
        context.protection()
    context.set_ps_context(config_file_path=write_config(tmp_path, AUTHORITY))
    assert context.protection().credentials


def test_a_config_file_without_enable_ssl_is_told(ps_context, capfd):
    context.set_ps_context(config_file_path="config.json")
    assert context.protection().credentials is None
    assert "config_file_path has no effect without enable_ssl=True" in capfd.readouterr().err
