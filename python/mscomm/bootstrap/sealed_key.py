"""Encrypts the job's key for each rank, so that the key can pass through a launcher's store that others may read.

Each rank makes a throw-away X25519 key pair and puts the public key into the store. For each other rank, rank 0 puts
the job's key into the store, encrypted with a key that only rank 0 and this rank can compute. Somebody who only reads
the store learns nothing. Somebody who can write to the store could pose as a rank, but the launcher starts the ranks,
so the job trusts it anyway.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from mscomm.errors import AuthenticationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

# A nonce may be used once with a key. Each key encrypts one text here, because both key pairs are new in each job.
_NONCE = bytes(12)


def possible() -> bool:
    """Return whether this process can seal and open a key. This needs the package `cryptography`, 42 or later."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm

        # An older package lacks functions, and OpenSSL in FIPS mode lacks algorithms.
        with contextlib.suppress(AttributeError, UnsupportedAlgorithm):
            one, other = KeyPair(), KeyPair()
            return other.open(one.seal(bytes(32), other.public, 1, ""), one.public, 1, "") == bytes(32)
    except ImportError:
        pass
    return False


class KeyPair:
    """This rank's throw-away key pair. public: the public key, in hex.

    In seal() and open(), `public` is the public key of the rank at the other end, and `address` is the hub's address.
    """

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw().hex()

    def seal(self, key: bytes, public: str, rank: int, address: str) -> str:
        """On rank 0, return the job's key in a text that only `rank` can open.

        Raise AuthenticationError if `public` is not a public key.
        """
        cipher = self._cipher(public, f"rank {rank}", f"{self.public} {public} {rank}")
        return cipher.encrypt(_NONCE, key, address.encode()).hex()

    def open(self, sealed: str, public: str, rank: int, address: str) -> bytes:
        """On `rank`, return the job's key from rank 0's text.

        Raise AuthenticationError if rank 0 has not made this text for this rank and this address.
        """
        from cryptography.exceptions import InvalidTag

        cipher = self._cipher(public, "rank 0", f"{public} {self.public} {rank}")
        try:
            return cipher.decrypt(_NONCE, bytes.fromhex(sealed), address.encode())
        except (InvalidTag, ValueError):
            raise AuthenticationError(
                f"rank {rank} cannot decrypt the job's key in the launcher's store: an entry is of an earlier program "
                "of the same mpirun, or somebody has changed it. With MSCOMM_JOB_KEY_FILE, none is needed"
            ) from None

    def _cipher(self, public: str, whose: str, use: str) -> ChaCha20Poly1305:
        """Return the cipher that only this rank and the owner of `public` can make. use: for what it is used."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
        except ValueError as error:  # no hex digits, another length, or a point for which the secret is always 0
            raise AuthenticationError(
                f"the public key of {whose} in the launcher's store is not an X25519 key ({error}). Do all ranks run "
                "the same mscomm?"
            ) from error
        return ChaCha20Poly1305(HKDF(SHA256(), 32, salt=None, info=b"mscomm job key " + use.encode()).derive(shared))
