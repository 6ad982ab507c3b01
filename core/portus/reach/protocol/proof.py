"""A challenge and two proofs, by which each end shows the other that it has the secret.

The secret itself is never sent. Nonces come from the caller: nothing here is random.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, Literal

SECRET_SIZE_MIN: Final = 16
"""Bytes of a secret, at least. A listener can try short secrets at leisure."""


def prove(
    end: Literal["client", "host"],
    secret: bytes,
    tenant: str,
    nonce_client: bytes,
    nonce_host: bytes,
) -> bytes:
    """Return the proof that one end sends: the client in PROOF, the host in WELCOME. Compare it in
    constant time."""
    # Both nonces and a label: neither an old proof nor the other end's own can be sent back.
    words = (f"portus 1 {end}", tenant, nonce_client.hex(), nonce_host.hex())
    return hmac.new(secret, "\0".join(words).encode(), hashlib.sha256).digest()
