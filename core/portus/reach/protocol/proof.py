"""A challenge and two proofs, by which each end shows the other that it has the secret.

The secret itself is never sent. Nonces come from the caller: nothing here is random.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

SECRET_SIZE_MIN: Final = 16
"""Bytes of a secret, at least. A listener can try short secrets at leisure."""


def proof_of_client(secret: bytes, tenant: str, nonce_client: bytes, nonce_host: bytes) -> bytes:
    """Return the proof that the client sends in PROOF."""
    return _proof(b"portus 1 client", secret, tenant, nonce_client, nonce_host)


def proof_of_host(secret: bytes, tenant: str, nonce_client: bytes, nonce_host: bytes) -> bytes:
    """Return the proof that the host sends in WELCOME."""
    return _proof(b"portus 1 host", secret, tenant, nonce_client, nonce_host)


def equal(left: bytes, right: bytes) -> bool:
    """Return whether two values are equal, compared in constant time."""
    return hmac.compare_digest(left, right)


def _proof(
    label: bytes, secret: bytes, tenant: str, nonce_client: bytes, nonce_host: bytes
) -> bytes:
    said = b"\0".join(
        (label, tenant.encode(), nonce_client.hex().encode(), nonce_host.hex().encode())
    )
    # Both nonces and a label: neither an old proof nor the other end's own can be sent back.
    return hmac.new(secret, said, hashlib.sha256).digest()
