"""`mscomm certs`: makes the certificates that a job with TLS needs."""

from __future__ import annotations

import datetime
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mscomm.cluster import credentials
from mscomm.errors import Error

if TYPE_CHECKING:
    from cryptography.x509 import Certificate, Name

_CLOCKS_DIFFER = datetime.timedelta(minutes=10)  # certificates are valid this long before they are made
_ROUNDS = 2048  # of the key derivation from a random password, which nobody can guess; OpenSSL's default


@click.group("certs", help="Make the certificates of a job with TLS.")
def command() -> None:
    pass


@command.command("make")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("certs"),
    show_default=True,
    help="The new folder for the files.",
)
@click.option(
    "--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="How long the files are valid."
)
@click.option("--job", default="", metavar="NAME", help="Make certificates only for jobs with this MSCOMM_JOB_ID.")
@click.option("--password-file", metavar="FILE", help="A file with the password for the private keys.")
@click.option("--ask", is_flag=True, help="Ask for the password.")
def make_command(folder: Path, days: int, job: str, password_file: str | None, ask: bool) -> None:
    """Make a CA, and a certificate each for the scheduler and for the workers, in a new folder.

    Without --ask and --password-file, make a password for each private key, and write it to a file beside the key. The
    CA's own private key is not kept, so nobody can make more certificates for it.

    \b
    mscomm certs make --dir certs
    """
    if ask and password_file:
        raise click.UsageError("give either --ask or --password-file")
    if os.path.lexists(folder):
        raise click.ClickException(f"{folder} exists already; name another folder, or remove it")
    draft = folder.with_name(f"{folder.name}.{secrets.token_hex(8)}")
    try:
        password = credentials.read_password(password_file) if password_file else ""
        if ask:
            password = click.prompt("Password for the private keys", hide_input=True, confirmation_prompt=True)
        draft.mkdir(0o700)
        try:
            _make(draft, days, job, password)
            draft.rename(folder)
        except BaseException:
            shutil.rmtree(draft)
            raise
    except Error as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{folder}: {error.strerror}") from error
    click.echo(_advice(folder, days, own_password=bool(password)))


def _advice(folder: Path, days: int, own_password: bool) -> str:
    lines = [
        f"{folder} has the certificates, valid for {days} days. Copy ca.crt, crl.pem and config.json to every host,",
        "server.* to the scheduler's host only, and client.* to the workers' hosts. Then, for every process:",
        f"    export MSCOMM_SSL_CONFIG_FILE={(folder / 'config.json').absolute()}",
    ]
    for side in () if own_password else ("server", "client"):
        who = "the scheduler" if side == "server" else "the workers"
        path = (folder / f"{side}.password").absolute()
        lines.append(f"    export MSCOMM_SSL_{side.upper()}_PASSWORD_FILE={path}   # {who} only")
    return "\n".join(lines)


def _make(folder: Path, days: int, job: str, password: str) -> None:
    """Write the files. password: for the private keys; if empty, make one for each key."""
    credentials.require_cryptography("make certificates")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat, pkcs12
    from cryptography.x509.oid import ExtendedKeyUsageOID

    now = datetime.datetime.now(datetime.timezone.utc)
    start, end = now - _CLOCKS_DIFFER, now + datetime.timedelta(days=days)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = _named("mscomm CA")

    def certificate(name: Name, key: Any, extensions: list[tuple[Any, bool]]) -> Certificate:
        builder = x509.CertificateBuilder(authority_name, name, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(start).not_valid_after(end)
        for extension, critical in [
            *extensions,
            (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False),
        ]:
            builder = builder.add_extension(extension, critical)
        return builder.sign(authority_key, hashes.SHA256())

    authority = certificate(
        authority_name,
        authority_key,
        [(x509.BasicConstraints(ca=True, path_length=0), True), (_key_usage("key_cert_sign", "crl_sign"), True)],
    )
    _write(folder / "ca.crt", authority.public_bytes(Encoding.PEM))
    revoked = x509.CertificateRevocationListBuilder(authority_name, start, end).sign(authority_key, hashes.SHA256())
    _write(folder / "crl.pem", revoked.public_bytes(Encoding.PEM))

    for role, side, usage in (
        (credentials.SCHEDULER, "server", ExtendedKeyUsageOID.SERVER_AUTH),
        (credentials.WORKER, "client", ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        extensions = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_key_usage("digital_signature"), True),
            (x509.ExtendedKeyUsage([usage]), False),
        ]
        if job:
            uri = x509.UniformResourceIdentifier(credentials.job_uri(job, role))
            extensions.append((x509.SubjectAlternativeName([uri]), False))
        key = ec.generate_private_key(ec.SECP256R1())
        own = certificate(_named(f"mscomm {role}"), key, extensions)
        secret = password or secrets.token_hex(16)
        if not password:
            _write(folder / f"{side}.password", f"{secret}\n".encode())
        # Many rounds protect a password that a person has chosen, and every rank needs time for them at init(). The
        # 20000 rounds that cryptography chooses take 8 ms, and _ROUNDS take 1 ms.
        form = PrivateFormat.PKCS12.encryption_builder().key_cert_algorithm(pkcs12.PBES.PBESv2SHA256AndAES256CBC)
        form = form.hmac_hash(hashes.SHA256())
        encryption = (form if password else form.kdf_rounds(_ROUNDS)).build(secret.encode())
        bundle = pkcs12.serialize_key_and_certificates(role.encode(), key, own, None, encryption)
        _write(folder / f"{side}.p12", bundle)
    settings = credentials.Config(
        ca_cert_path="ca.crt",
        server_cert_path="server.p12",
        client_cert_path="client.p12",
        crl_path="crl.pem",
        cert_expire_warning_time_in_day=90 if days > 90 else 7,
    )
    _write(folder / "config.json", (json.dumps(settings._asdict(), indent=2) + "\n").encode())


def _named(text: str) -> Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _key_usage(*purposes: str) -> Any:
    from cryptography import x509

    names = [
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    ]
    return x509.KeyUsage(**{name: name in purposes for name in names})


def _write(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
