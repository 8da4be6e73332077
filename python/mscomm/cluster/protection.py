"""How the user wants the links of a job to be protected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from mscomm import environment

if TYPE_CHECKING:
    from mscomm.cluster.credentials import Credentials


class Protection(NamedTuple):
    """How the user wants the links of a job to be protected.

    credentials: the certificates for TLS, or None if the job does not use TLS. permit_plain: whether a job may have
    neither a key nor certificates, although other hosts can reach its ports. permits: what the user writes to permit
    that, for messages.
    """

    credentials: Credentials | None = None
    permit_plain: bool = False
    permits: str = "mscomm.set_ps_context(enable_ssl=False)   # before init()"


def of_command(env: Mapping[str, str], permit_plain: bool, permits: str) -> Protection:
    """Return the protection for a command, whose option --permit-plain is `permit_plain`. permits: see Protection.

    The passwords stay in `env`, because the command's ranks need them too. Raise what credentials.configured() raises.
    """
    credentials = None
    if environment.read("MSCOMM_SSL_CONFIG_FILE", env):
        from mscomm.cluster.credentials import configured  # slow to import: ssl

        credentials = configured(dict(env))
    return Protection(credentials, permit_plain, permits)
