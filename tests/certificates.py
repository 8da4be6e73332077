"""Makes certificates for the tests: good ones, and ones that must be refused."""

from __future__ import annotations

import datetime
import json

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    pkcs12,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

PASSWORD = "correct horse"
SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


def day(number):
    """Return the moment this many days from now."""
    return datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=number)


def named(text):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """A CA, and the certificates and the revocation list that it signs."""

    def __init__(self, name="test CA", days=(-2, 400), ca=True, parent=None):
        self.name, self.key = named(name), ec.generate_private_key(ec.SECP256R1())
        signer = parent or self
        builder = x509.CertificateBuilder(signer.name, self.name, self.key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(day(days[0])).not_valid_after(day(days[1]))
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        self.certificate = builder.sign(signer.key, hashes.SHA256())

    def write(self, path):
        path.write_bytes(self.certificate.public_bytes(Encoding.PEM))
        return str(path)

    def issue(self, name="test", usage=None, days=(-1, 200), uri=None):
        """Return a key and a certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = x509.CertificateBuilder(self.name, named(name), key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(day(days[0])).not_valid_after(day(days[1]))
        if usage:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if uri:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False
            )
        return key, builder.sign(self.key, hashes.SHA256())

    def revoke(self, path, *certificates, days=(-1, 30)):
        builder = x509.CertificateRevocationListBuilder(self.name, day(days[0]), day(days[1]))
        for certificate in certificates:
            entry = x509.RevokedCertificateBuilder(certificate.serial_number, day(-1)).build()
            builder = builder.add_revoked_certificate(entry)
        path.write_bytes(builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM))
        return str(path)


def write_p12(path, key, certificate, password=PASSWORD, between=()):
    encryption = BestAvailableEncryption(password.encode()) if password else NoEncryption()
    chain = [authority.certificate for authority in between] or None
    path.write_bytes(pkcs12.serialize_key_and_certificates(b"test", key, certificate, chain, encryption))
    return str(path)


def write_pem(path, key, certificate, password=PASSWORD):
    encryption = BestAvailableEncryption(password.encode()) if password else NoEncryption()
    pem = certificate.public_bytes(Encoding.PEM)
    path.touch(0o600)
    path.write_bytes(pem + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    return str(path)


def write_config(folder, authority=None, server=None, client=None, **settings):
    """Write config.json. authority, server and client: what it names; by default, valid ones from a new CA."""
    authority = authority or Authority()
    authority.write(folder / "ca.crt")
    write_p12(folder / "server.p12", *(server or authority.issue("server", SERVER)))
    write_p12(folder / "client.p12", *(client or authority.issue("client", CLIENT)))
    names = {"ca_cert_path": "ca.crt", "server_cert_path": "server.p12", "client_cert_path": "client.p12"}
    path = folder / "config.json"
    path.write_text(json.dumps({**names, **settings}))
    return str(path)
