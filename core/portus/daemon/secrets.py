"""Who may come in: the tenants and their secrets."""

from __future__ import annotations

import os
import stat
from typing import Final

from portus.errors import UsageError
from portus.protocol.address import TENANT, checked_tenant
from portus.protocol.proof import equal, proof_of_client
from portus.transport.dial import checked_secret


class Secrets:
    """The secrets of a host. None at all: anybody who reaches it may come in, as any tenant."""

    def __init__(self, of_tenants: dict[str, bytes] | None) -> None:
        self._of: Final = of_tenants
        self._nobody: Final = os.urandom(32)

    @property
    def wanted(self) -> bool:
        """True if a proof is asked for."""
        return self._of is not None

    def of(self, tenant: str) -> bytes | None:
        """The tenant's secret. That of nobody for a stranger: whoever guesses names learns
        nothing from the answer."""
        return None if self._of is None else self._of.get(tenant, self._nobody)

    def admits(self, tenant: str, proof: bytes, nonce_client: bytes, nonce_host: bytes) -> bool:
        """True if the proof is right, compared in constant time."""
        secret = self.of(tenant)
        if secret is None:
            return True
        return equal(proof, proof_of_client(secret, tenant, nonce_client, nonce_host))


def read_secrets(path: str | None) -> Secrets:
    """The secrets in a file: a line ``TENANT SECRET`` each, or one line that is the secret of the
    default tenant. None: no secrets. Raises ``UsageError``."""
    if path is None:
        return Secrets(None)
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            lines = [line.split() for line in file if line.strip() and not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the secrets cannot be read: {error}") from error
    found: dict[str, bytes] = {}
    for words in lines:
        if len(words) > 2:
            raise UsageError(f"{path}: expected lines TENANT SECRET, found {len(words)} words")
        tenant = checked_tenant(words[0]) if len(words) == 2 else TENANT
        if tenant in found:
            raise UsageError(f"{path}: tenant {tenant!r} has two secrets")
        found[tenant] = checked_secret(words[-1].encode(), path, mode)
    if not found:
        raise UsageError(f"{path}: there is no secret in it")
    return Secrets(found)
