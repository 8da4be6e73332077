"""How the user wants the links of a job to be protected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from mscomm import environment

if TYPE_CHECKING:
    from mscomm.cluster.credentials import Credentials

# The variables that only a scheduler needs, and no rank.
OF_SCHEDULER = ("MSCOMM_SSL_SERVER_PASSWORD", "MSCOMM_SSL_SERVER_PASSWORD_FILE")


class Protection(NamedTuple):
    """How the user wants the links of a job to be protected.

    credentials: the certificates for TLS, or None if the job does not use TLS. permit_plain: whether a job may have
    neither a key nor certificates, although other hosts can reach its ports. permits: what the user writes to permit
    that, for messages.
    """

    credentials: Credentials | None = None
    permit_plain: bool = False
    permits: str = "mscomm.set_ps_context(enable_ssl=False)   # before init()"

    @property
    def uses_keys(self) -> bool:
        """Whether links between hosts use TLS with the keys of their hellos, if both ends can."""
        return not (self.credentials or self.permit_plain)

    def for_hub(self) -> bytes:
        """Return what in_hub() needs in the hub process. Raise what Credentials.for_hub() raises."""
        return self.credentials.for_hub() if self.credentials else b"plain" if self.permit_plain else b""

    @classmethod
    def in_hub(cls, passed: bytes) -> Protection:
        if passed in (b"", b"plain"):
            return cls(permit_plain=passed == b"plain")
        from mscomm.cluster.credentials import Credentials  # slow to import: ssl

        return cls(Credentials.in_hub(passed))


def of_command(env: Mapping[str, str], permit_plain: bool, permits: str) -> Protection:
    """Return the protection for a command, whose option --permit-plain is `permit_plain`. permits: see Protection.

    The passwords stay in `env`, because the command's ranks need them too. Raise what credentials.configured() raises,
    and ValueError if the user asks for both TLS and plain links.
    """
    credentials = None
    if environment.read("MSCOMM_SSL_CONFIG_FILE", env):
        from mscomm.cluster.credentials import configured  # slow to import: ssl

        credentials = configured(dict(env))
        if permit_plain:
            raise ValueError("--permit-plain: MSCOMM_SSL_CONFIG_FILE asks for TLS; leave out one of the two")
    return Protection(credentials, permit_plain, permits)
