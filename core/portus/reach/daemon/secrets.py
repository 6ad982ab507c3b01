"""The tenants of a host, and the secrets that let their clients in."""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from portus.errors import UsageError
from portus.reach.protocol.address import TENANT, check_tenant
from portus.reach.protocol.proof import prove
from portus.reach.transport.dial import check_secret

SECRETS_MAX: Final = 2
"""Secrets of one tenant, at most: the old and the new one, while they are changed. Both are
valid."""

_NAMED_MAX: Final = 8
"""Tenants that an error names."""


class Secrets:
    """The secrets of a host. Without any, every client may come in, as any tenant."""

    def __init__(self, of_tenants: Mapping[str, Sequence[bytes]] | None) -> None:
        """of_tenants: at most ``SECRETS_MAX`` for each; None: no secret is required."""
        self._of = of_tenants
        # Compared in place of missing secrets, so that the answer takes the same time.
        self._nobodys: Final = [os.urandom(32) for _ in range(SECRETS_MAX)]

    @property
    def is_required(self) -> bool:
        """True if clients must prove a secret."""
        return self._of is not None

    def become(self, others: Secrets) -> None:
        """Replace the secrets by those of ``others``. Clients that are in stay in."""
        # Ending connections here would fail the saves under way, and all trainers would reconnect
        # at once.
        self._of = others._of

    def first_of(self, tenant: str) -> bytes | None:
        """Return the secret that proves this host to its replica as ``tenant``, or None."""
        of = self._of
        return None if of is None else next(iter(of.get(tenant, ())), None)

    def tenants(self) -> list[str]:
        """Return the tenants that have a secret, sorted."""
        return sorted(self._of or ())

    def refuse_unknown(self, tenants: Iterable[str], where: str) -> None:
        """Raise ``UsageError`` for one of ``tenants``, named at ``where``, that has no secret:
        nobody comes in as that one. Without secrets there is none such."""
        unknown = [each for each in tenants if self._of is not None and each not in self._of]
        if unknown:
            named = ", ".join(self.tenants()[:_NAMED_MAX])
            raise UsageError(
                f"{where}: expected a tenant that has a secret, such as {named}, found "
                f"{unknown[0]!r}, which has none"
            )

    def match_proof(
        self, tenant: str, proof: bytes, nonce_client: bytes, nonce_host: bytes
    ) -> bytes | None:
        """Return the secret that a proof proves; empty if none is required; None if the proof is
        wrong.

        Compares in constant time, with the same number of secrets for every tenant, known or not:
        the answer tells nothing to a client that guesses names.
        """
        of = self._of
        if of is None:
            return b""
        known = [*of.get(tenant, ()), *self._nobodys][:SECRETS_MAX]
        proofs = [prove("client", each, tenant, nonce_client, nonce_host) for each in known]
        found = [hmac.compare_digest(proof, each) for each in proofs]
        return next((each for each, right in zip(known, found, strict=True) if right), None)


def read_words(path: str, what: str) -> tuple[list[list[str]], int]:
    """Return the words of each line of a file, comments left out, and the mode of the file. Raise
    ``UsageError`` if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            return [line.split() for line in file if line.strip() and line[0] != "#"], mode
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the {what} cannot be read: {error}") from error


def read_secrets(path: str | None) -> Secrets:
    """Return the secrets in a file: lines ``TENANT SECRET``, or lines of one word, a secret of the
    default tenant. path: None: no secrets. Raise ``UsageError`` if the file is wrong."""
    if path is None:
        return Secrets(None)
    lines, mode = read_words(path, "secrets")
    found: dict[str, list[bytes]] = {}
    for words in lines:
        if len(words) > 2:
            raise UsageError(f"{path}: expected lines TENANT SECRET, found {len(words)} words")
        tenant = check_tenant(words[0]) if len(words) == 2 else TENANT
        secrets = found.setdefault(tenant, [])
        secrets.append(check_secret(words[-1].encode(), path, mode))
        if len(secrets) > SECRETS_MAX:
            raise UsageError(
                f"{path}: tenant {tenant!r} has more than {SECRETS_MAX} secrets, "
                "the old one and the new one"
            )
    if not found:
        raise UsageError(f"{path}: there is no secret in it")
    return Secrets(found)
