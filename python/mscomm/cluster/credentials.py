"""The certificates and keys of TLS, and the settings that say where they are. The settings have MindSpore's names.

The scheduler is TLS's server and a worker its client. Each proves with its certificate that the CA in ca_cert_path has
admitted it. No other CA counts. Host names are not compared, because the addresses of a job's hosts change.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import secrets
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

from mscomm import environment, log
from mscomm.cluster.key_stream import lacking
from mscomm.cluster.private_files import read_private
from mscomm.cluster.tls import TlsStream
from mscomm.errors import AuthenticationError, BackendUnavailable

if TYPE_CHECKING:
    from cryptography.x509 import Certificate, CertificateRevocationList

    Passwords = Mapping[str, str]

_CONFIG_BYTES = 64 << 10
_FILE_BYTES = 1 << 20
_LONGEST_CHAIN = 8
_CERTIFICATE_AUTH = ("auth-rsa", "auth-ecdsa", "auth-any")  # how suites authenticate the server: without PSK and DSS
SCHEDULER, WORKER = "scheduler", "worker"


class _Role(NamedTuple):
    side: str  # TLS's name of the role, which is also MindSpore's
    usage: str  # the name of the extended key usage that a certificate for the role needs
    password: str  # the variable with the password of its key
    password_file: str  # the variable with the path of a file that has this password


_ROLES = {
    SCHEDULER: _Role("server", "SERVER_AUTH", "MSCOMM_SSL_SERVER_PASSWORD", "MSCOMM_SSL_SERVER_PASSWORD_FILE"),
    WORKER: _Role("client", "CLIENT_AUTH", "MSCOMM_SSL_CLIENT_PASSWORD", "MSCOMM_SSL_CLIENT_PASSWORD_FILE"),
}


class Config(NamedTuple):
    """The contents of config.json. Its relative paths are relative to its own folder."""

    ca_cert_path: str
    server_cert_path: str = ""
    client_cert_path: str = ""
    crl_path: str = ""
    cipher_list: str = ""
    cert_expire_warning_time_in_day: int = 90


_OF_RECOVERY = {"recovery"}  # MindSpore keeps other settings in the same file


def read_config(path: str) -> Config:
    """Return the settings in the file. Raise ValueError, which names the file, if they are not valid."""
    try:
        with open(path, "rb") as file:
            text = file.read(_CONFIG_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; `mscomm certs make` writes such a file") from error
    if len(text) > _CONFIG_BYTES:
        raise ValueError(f"{path}: has more than {_CONFIG_BYTES >> 10} KiB, so it is not the settings of TLS")
    return parse_config(text, path)


def parse_config(text: bytes, path: str) -> Config:
    """Return the settings in the text of the file `path`. Raise ValueError, which names it, if they are invalid."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object with {', '.join(Config._fields)}")
    if unknown := sorted(found.keys() - set(Config._fields) - _OF_RECOVERY):
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; expected {', '.join(Config._fields)}")
    folder = os.path.dirname(os.path.abspath(path))
    for name in Config._fields[:-1]:
        value = found.get(name, "")
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"{path}: {name} is {value!r:.80}; expected a text")
        if name.endswith("_path") and value:
            found[name] = os.path.join(folder, value)
    days = found.get("cert_expire_warning_time_in_day", 90)
    if isinstance(days, bool) or not isinstance(days, int) or not 7 <= days <= 180:
        raise ValueError(f"{path}: cert_expire_warning_time_in_day is {days!r:.80}; expected 7 to 180")
    if not found.get("ca_cert_path"):
        raise ValueError(f"{path}: ca_cert_path is missing; it names the file of the CA that the job trusts")
    return Config(**{name: found[name] for name in Config._fields if name in found})


def configured(
    env: MutableMapping[str, str],
    config_path: str = "",
    passwords: Passwords | None = None,
    warn: Callable[[str], None] = log.warn,
) -> Credentials | None:
    """Return the credentials that the arguments give, else those that the variables in `env` give, else None.

    passwords: by role. The passwords in `env` are removed from it, so that child processes do not inherit them. Pass a
    copy if they should. Raise what Credentials and read_private() raise.
    """
    path = config_path or environment.read("MSCOMM_SSL_CONFIG_FILE", env)
    if not path:
        return None
    passwords = passwords or {}
    found = {role: passwords.get(role) or env.get(_ROLES[role].password, "") for role in _ROLES}
    files = {role: environment.read(_ROLES[role].password_file, env) or "" for role in _ROLES}
    made = Credentials(path, found, warn, files)
    for role in _ROLES.values():
        env.pop(role.password, None)
    return made


def read_password(path: str) -> str:
    """Return the password in the file. Raise AuthenticationError if others may read the file, or it has no password."""
    content = read_private("password file", path, f"make one with: (umask 077; openssl rand -hex 16 > {path})")
    try:
        text = content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise AuthenticationError(f"password file {path}: it is not text in UTF-8") from None
    if not text:
        raise AuthenticationError(f"password file {path}: it is empty")
    return text


class Credentials:
    """What this process needs for TLS. The files are read when server() or client() needs them.

    config_path: config.json, see read_config(). passwords: the passwords of the keys, by role; a key without a password
    needs none. password_files: files for the roles that have none in `passwords`; a process reads only the file of its
    own role. warn: called with a line about a certificate that will soon expire or ciphers that do not exist.

    Raise ValueError if config.json is not valid.
    """

    def __init__(
        self,
        config_path: str,
        passwords: Passwords | None = None,
        warn: Callable[[str], None] = log.warn,
        password_files: Passwords | None = None,
    ) -> None:
        self.config_path = config_path
        self.config = read_config(config_path)
        self._passwords = {role: bytearray(text.encode()) for role, text in (passwords or {}).items() if text}
        self._password_files = password_files or {}
        self._warn = warn
        self._for_hub = b""
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._lock = threading.Lock()  # a context is made only once, because this wipes its password

    def __repr__(self) -> str:
        return f"Credentials({self.config_path!r})"

    def server(self) -> ssl.SSLContext:
        """Return the context of the scheduler's end of a link. It has server_cert_path.

        Raise ValueError if config.json has no such file. Raise AuthenticationError if a file or its password is not
        usable: its text names the file and says what is wrong. Raise BackendUnavailable if this needs the package
        `cryptography`, and it is missing. The same holds for client().
        """
        return self._context(SCHEDULER)

    def client(self) -> ssl.SSLContext:
        """Return the context of a worker's end of a link. It has client_cert_path."""
        return self._context(WORKER)

    def for_hub(self) -> bytes:
        """Return what in_hub() needs in the hub process that this process starts. Raise what server() raises."""
        self._read_password(SCHEDULER)
        password = self._passwords.get(SCHEDULER, b"").decode()
        self.server()  # raises the error of a wrong file or password here, where the user sees it
        if not self._for_hub:
            self._for_hub = json.dumps([os.path.abspath(self.config_path), password]).encode()
        return self._for_hub

    @classmethod
    def in_hub(cls, passed: bytes) -> Credentials:
        path, password = json.loads(passed)
        return cls(path, {SCHEDULER: password}, lambda text: None)  # the process that starts the hub warns

    def check_peer(self, stream: TlsStream, role: str, job: str) -> None:
        """Raise AuthenticationError if the certificate at the other end is not for this role or job.

        Call this after the handshake, which has checked the rest. role: SCHEDULER or WORKER. job: MSCOMM_JOB_ID.
        A certificate without a URI of the form mscomm://job/role fits every job.
        """
        names = [text for kind, text in stream.peer_certificate().get("subjectAltName", ()) if kind == "URI"]
        bound = [text for text in names if text.startswith("mscomm://")]
        if bound and job_uri(job, role) not in bound:
            here = f"MSCOMM_JOB_ID={job}" if job else "no MSCOMM_JOB_ID"
            raise AuthenticationError(
                f"TLS: the other end's certificate is for {bound[0]:.200}, not for a {role} of this job ({here})"
            )

    # -- making a context

    def _context(self, role: str) -> ssl.SSLContext:
        with self._lock:
            if role not in self._contexts:
                self._read_password(role)
                self._contexts[role] = self._make(role)
                self._wipe(role)
            return self._contexts[role]

    def _read_password(self, role: str) -> None:
        file = self._password_files.get(role)
        if file and role not in self._passwords:
            self._passwords[role] = bytearray(read_password(file).encode())

    def _wipe(self, role: str) -> None:
        password = self._passwords.pop(role, bytearray())
        password[:] = bytes(len(password))

    def _make(self, role: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if role == SCHEDULER else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the CA may itself be signed by another one
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
        if role == SCHEDULER:
            context.num_tickets = 0
        context.minimum_version = ssl.TLSVersion.TLSv1_2 if self._suites else ssl.TLSVersion.TLSv1_3
        if self._suites:
            context.set_ciphers("@SECLEVEL=2:" + ":".join(self._suites))
        if not self._load_in_core(context, role):
            require_cryptography(f"read the certificates of {self.config_path}, or to say what is wrong with them")
            self._load(context, role)
        return context

    def _load_in_core(self, context: ssl.SSLContext, role: str) -> bool:
        """Check the files of the role, and give them to the context. Return False if the core does not accept them.

        The core says no reason, and reads only the forms that `mscomm certs make` writes. In return, this process need
        not import cryptography, which takes 35 ms of CPU time.
        """
        path = self._own_path(role)
        authorities = _content(self.config.ca_cert_path)
        revoked = _content(self.config.crl_path) if self.config.crl_path else None
        bundle = _content(path)
        if lacking():
            return False
        from mscomm import _core  # not imported before, like in key_stream.py

        throw_away = secrets.token_hex(16).encode()
        checked = _core.check_certificates(
            bundle=bundle,
            password=self._passwords.get(role, b""),
            authorities=authorities,
            revoked=revoked,
            server=role == SCHEDULER,
            uri=job_uri(_job(), role),
            key_password=throw_away,
        )
        if checked is None:
            return False
        own, trusted, expires = checked
        self._warn_of_end(path, datetime.datetime.fromtimestamp(expires, datetime.timezone.utc))
        _give(context, own, throw_away, trusted, revoked is not None)
        return True

    def _own_path(self, role: str) -> str:
        side = _ROLES[role].side
        path = str(getattr(self.config, f"{side}_cert_path"))
        if not path:
            raise ValueError(f"{self.config_path}: {side}_cert_path is missing; it names the {role}'s certificate")
        return path

    def _warn_of_end(self, path: str, end: datetime.datetime) -> None:
        left = (end - _now()).days
        if left < self.config.cert_expire_warning_time_in_day:
            self._warn(f"{path}: the certificate expires on {_date(end)}, in {left} days")

    @functools.cached_property
    def _suites(self) -> list[str]:
        """The suites of TLS 1.2 in cipher_list. TLS 1.3 has suites of its own, which are always permitted."""
        wanted = [name for name in self.config.cipher_list.replace(" ", ":").split(":") if name]
        known = {suite["name"]: suite for suite in _known_suites()} if wanted else {}
        if unknown := [name for name in wanted if name not in known]:
            self._warn(f"{self.config_path}: cipher_list has names that OpenSSL does not know: {', '.join(unknown)}")
        # Suites that need no certificate (PSK), or one that nobody has (DSS), can never be chosen.
        usable = [name for name in wanted if name in known and known[name]["auth"] in _CERTIFICATE_AUTH]
        if wanted and not usable:
            raise ValueError(
                f"{self.config_path}: cipher_list has no suite that can be used; give one such as"
                ' ECDHE-ECDSA-AES256-GCM-SHA384, or "" for TLS 1.3 only'
            )
        return [name for name in usable if known[name]["protocol"] != "TLSv1.3"]

    def _authorities(self) -> list[Certificate]:
        from cryptography import x509

        path = self.config.ca_cert_path
        with _reading(path, "is not a certificate in PEM form"):
            found = x509.load_pem_x509_certificates(_content(path))
        for certificate in found:
            if not _is_authority(certificate):
                lacks = "it has no basicConstraints CA:TRUE"
                raise AuthenticationError(f"{path}: {_name(certificate)} is not a CA: {lacks}")
            _require_valid(path, certificate)
        return found

    def _revocation_list(self, authorities: list[Certificate]) -> CertificateRevocationList | None:
        from cryptography import x509

        path = self.config.crl_path
        if not path:
            return None
        with _reading(path, "is not a revocation list in PEM or DER form"):
            content = _content(path)
            is_pem = content.lstrip().startswith(b"-----")
            if content.count(b"-----BEGIN ") > 1:  # only the first one would count
                raise AuthenticationError(f"{path}: has several revocation lists; give one, of the CA")
            found = (x509.load_pem_x509_crl if is_pem else x509.load_der_x509_crl)(content)
            signed = any(
                found.issuer == authority.subject and found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
                for authority in authorities
            )
        if not signed:
            trusted = self.config.ca_cert_path
            raise AuthenticationError(f"{path}: the revocation list is not signed by the CA in {trusted}")
        now = _now()
        if found.last_update_utc > now:
            raise AuthenticationError(f"{path}: the revocation list is not valid before {_date(found.last_update_utc)}")
        if found.next_update_utc and found.next_update_utc < now:
            raise AuthenticationError(
                f"{path}: the revocation list has expired on {_date(found.next_update_utc)}; get a new one from your CA"
            )
        return found

    def _load(self, context: ssl.SSLContext, role: str) -> None:
        """Do the same as _load_in_core(), for more forms of the files. Raise AuthenticationError if one is wrong."""
        path = self._own_path(role)
        authorities = self._authorities()
        revoked = self._revocation_list(authorities)
        key, chain = self._bundle(path, role)
        own = chain[0]
        if _public_bytes(key.public_key()) != _public_bytes(own.public_key()):
            raise AuthenticationError(f"{path}: the private key does not belong to the certificate {_name(own)}")
        _require_valid(path, own)
        _require_usage(path, own, role)
        job = _job()
        bound = [uri for uri in _uris(own) if uri.startswith("mscomm://")]
        if bound and job_uri(job, role) not in bound:
            here = f"MSCOMM_JOB_ID={job}" if job else "no MSCOMM_JOB_ID"
            raise AuthenticationError(
                f"{path}: {_name(own)} is for {bound[0]:.200}, not for a {role} of this job ({here})"
            )
        if not _leads_to(chain, authorities):
            raise AuthenticationError(f"{path}: {_name(own)} is not signed by the CA in {self.config.ca_cert_path}")
        if revoked is not None and revoked.get_revoked_certificate_by_serial_number(own.serial_number):
            raise AuthenticationError(f"{path}: {_name(own)} is revoked, says {self.config.crl_path}")
        self._warn_of_end(path, own.not_valid_after_utc)
        throw_away = secrets.token_hex(16).encode()
        pem, trusted = _own_pem(key, chain, throw_away), _trusted_pem(authorities, revoked)
        _give(context, pem, throw_away, trusted, revoked is not None)

    def _bundle(self, path: str, role: str) -> tuple[Any, list[Certificate]]:
        """Return the private key, its certificate, and the certificates between this one and the CA."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.serialization import pkcs12

        side = _ROLES[role].side
        password: Any = self._passwords.get(role)  # a bytearray, which cryptography accepts, though its types do not
        with _reading(path, f"is neither PKCS#12 nor PEM, or the {side} password is wrong or missing"):
            content = _content(path)
            if b"-----BEGIN" in content:
                if b"ENCRYPTED" not in content and os.stat(path).st_mode & 0o077:
                    raise AuthenticationError(
                        f"{path}: the private key has no password, and others can read it; run: chmod 600 {path}"
                    )
                key = serialization.load_pem_private_key(content, password)
                return key, x509.load_pem_x509_certificates(content)
            found_key, own, others = pkcs12.load_key_and_certificates(content, password)
        if found_key is None or own is None:
            raise AuthenticationError(f"{path}: holds no {'private key' if own else 'certificate'}")
        return found_key, [own, *others]


def job_uri(job: str, role: str) -> str:
    """Return the URI in a certificate that only this role of this job may use."""
    return f"mscomm://{urllib.parse.quote(os.fsencode(job), safe='')}/{role}"


def _job() -> str:
    return environment.read("MSCOMM_JOB_ID", os.environ) or ""


def require_cryptography(purpose: str) -> None:
    """Raise BackendUnavailable if the package `cryptography` is missing. purpose: what it is needed for."""
    try:
        import cryptography.x509  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable(
            f"TLS needs the package cryptography to {purpose} ({error}); run: pip install 'cryptography>=42'"
        ) from error


@functools.cache
def _known_suites() -> list[Any]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("@SECLEVEL=2:ALL")
    return context.get_ciphers()


@contextlib.contextmanager
def _reading(path: str, what: str) -> Iterator[None]:
    """Turn the errors of reading a file of certificates into AuthenticationError. They never contain a password."""
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        yield
    except AuthenticationError:
        raise
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise AuthenticationError(f"{path}: {what} ({error})") from error


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(_FILE_BYTES + 1)
    except OSError as error:
        raise AuthenticationError(f"{path}: {error.strerror}") from error
    if len(content) > _FILE_BYTES:
        raise AuthenticationError(f"{path}: has more than {_FILE_BYTES >> 20} MiB, so it holds no certificates")
    return content


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _date(moment: datetime.datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _name(certificate: Certificate) -> str:
    return f"the certificate {certificate.subject.rfc4514_string():.200}"


def _require_valid(path: str, certificate: Certificate) -> None:
    now, start, end = _now(), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < start:
        when = f"before {_date(start)}; is this host's clock right?"
        raise AuthenticationError(f"{path}: {_name(certificate)} is not valid {when}")
    if now > end:
        raise AuthenticationError(f"{path}: {_name(certificate)} has expired on {_date(end)}; make a new one")


def _is_authority(certificate: Certificate) -> bool:
    from cryptography import x509

    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _require_usage(path: str, certificate: Certificate, role: str) -> None:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        permitted = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:  # without the extension, a certificate may be used for everything
        return
    if getattr(ExtendedKeyUsageOID, _ROLES[role].usage) not in permitted:
        lacks = f"extendedKeyUsage has no {_ROLES[role].side}Auth"
        raise AuthenticationError(f"{path}: {_name(certificate)} is not for a {role}: {lacks}")


def _uris(certificate: Certificate) -> list[str]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def _leads_to(chain: list[Certificate], authorities: list[Certificate]) -> bool:
    """Return whether one of the authorities has signed the first certificate, perhaps through others in the chain."""
    current = chain[0]
    for _ in range(_LONGEST_CHAIN):
        if any(_signed(current, authority) for authority in authorities):
            return True
        between = [issuer for issuer in chain[1:] if _is_authority(issuer) and _signed(current, issuer)]
        if not between:
            return False
        current = between[0]
    return False


def _signed(certificate: Certificate, issuer: Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _public_bytes(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def _own_pem(key: Any, chain: list[Certificate], password: bytes) -> bytes:
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

    pem = bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password)))
    return pem + b"".join(certificate.public_bytes(Encoding.PEM) for certificate in chain)


def _trusted_pem(authorities: list[Certificate], revoked: CertificateRevocationList | None) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    pem = b"".join(authority.public_bytes(Encoding.PEM) for authority in authorities)
    return pem + (revoked.public_bytes(Encoding.PEM) if revoked is not None else b"")


def _give(context: ssl.SSLContext, own: bytes, password: bytes, trusted: bytes, checks_revocation: bool) -> None:
    """Give the context both texts in PEM form. It only reads files: these are in memory, and the key is encrypted."""
    with _in_memory(own) as path:
        try:
            context.load_cert_chain(path, password=password)
        except ssl.SSLError as error:
            raise AuthenticationError(f"OpenSSL refuses the certificate of this process: {error.reason}") from error
    if checks_revocation:
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    with _in_memory(trusted) as path:
        context.load_verify_locations(path)


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Yield the path of a file that is only in this process's memory."""
    fd = os.memfd_create("mscomm-tls", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
