"""The connection of a client to a storage host: the socket, TLS, the greeting and the proofs."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import ssl
import stat
from dataclasses import dataclass, replace
from typing import Final

from portus.errors import TransportError, UsageError
from portus.reach.protocol.address import Address, Scheme
from portus.reach.protocol.messages import (
    MAGIC,
    NONCE_SIZE,
    VERSION,
    Challenge,
    ClientProof,
    Hello,
    Welcome,
    expect,
)
from portus.reach.protocol.proof import SECRET_SIZE_MIN, prove
from portus.reach.transport.stream import Link

SECRET_VARIABLE: Final = "PORTUS_SECRET_FILE"
AUTHORITY_VARIABLE: Final = "PORTUS_TLS_CA"
TRANSPORT_VARIABLE: Final = "PORTUS_TRANSPORT"
GREETING_S: Final = 5.0
"""The longest that connecting, and then each message of the greeting, may take."""

OPENING_S: Final = 30.0
"""The longest for the last message: the host may have to open the pool first."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """``secret``: shared with the host; None: none. ``authority_path``: certificates that TLS
    trusts (PEM); None: those of the system. ``secret_path``: the file of the secret; None: no
    file."""

    secret: bytes | None = None
    authority_path: str | None = None
    secret_path: str | None = None

    @classmethod
    def from_environment(cls) -> Credentials:
        """Return the credentials that ``$PORTUS_SECRET_FILE`` and ``$PORTUS_TLS_CA`` name. Raises
        ``UsageError``."""
        path = os.environ.get(SECRET_VARIABLE)
        secret = read_secret(path) if path else None
        return cls(secret, os.environ.get(AUTHORITY_VARIABLE) or None, path or None)

    def again(self) -> Credentials:
        """Return these credentials with the present secret of its file. Raises ``UsageError``."""
        return (
            self
            if self.secret_path is None
            else replace(self, secret=read_secret(self.secret_path))
        )


def read_secret(path: str) -> bytes:
    """Return the secret in a file, without space around it. Raises ``UsageError``."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read(64 << 10).strip()
    except OSError as error:
        raise UsageError(f"{path}: the secret cannot be read: {error.strerror}") from error
    return check_secret(secret, path, mode)


def check_secret(secret: bytes, path: str, mode: int) -> bytes:
    """Return ``secret``. Raise ``UsageError`` if it is too short, or if other users can read its
    file."""
    if mode & 0o077:
        raise UsageError(
            f"{path}: other users can read this secret (mode {mode:o}): chmod 600 {path}"
        )
    if len(secret) < SECRET_SIZE_MIN:
        raise UsageError(
            f"{path}: expected a secret of at least {SECRET_SIZE_MIN} bytes, found "
            f"{len(secret)}; make one: openssl rand -hex 32"
        )
    return secret


def dial(address: Address, credentials: Credentials, silence_s: float) -> tuple[Link, Welcome]:
    """Return a link that is ready, and the host's welcome, with the facts of the pool.

    silence_s: the longest wait for the host from then on. Raises ``TransportError`` if no host
    answers, and the host's refusal as an error.
    """
    with contextlib.ExitStack() as undo:
        link = Link(
            _connect(address, credentials),
            is_client=True,
            name=str(address),
            silence_s=GREETING_S,
        )
        undo.callback(link.close)
        welcome = _greet(link, address, credentials)
        link.silence_s = silence_s
        undo.pop_all()
        return link, welcome


def _greet(link: Link, address: Address, credentials: Credentials) -> Welcome:
    nonce = os.urandom(NONCE_SIZE)
    # A host whose replica refuses it passes the text on to its trainers, who must see which host it
    # was.
    at = f"{address}: "
    try:
        heard = link.ask(Hello(MAGIC, VERSION, address.tenant, nonce))
    except TransportError as error:
        raise TransportError(
            f"{error}, in answer to a greeting: is this the port of `portus serve`, of the "
            "same Portus, and does it accept more connections? If it has --tls-cert, use "
            f"{Scheme.TLS.value}://"
        ) from error
    answer = expect(heard, Challenge, at)
    secret = credentials.secret
    if answer.secret and secret is None:
        raise UsageError(
            f"{address} needs a secret: put it into a file and set {SECRET_VARIABLE} to its path"
        )
    said = address.tenant, nonce, answer.nonce
    proof = b"" if secret is None else prove("client", secret, *said)
    welcome = expect(link.ask(ClientProof(proof), OPENING_S), Welcome, at)
    # The host proves itself, too: any process could listen at this port.
    if secret is not None and not hmac.compare_digest(welcome.proof, prove("host", secret, *said)):
        raise UsageError(f"{address} does not know the secret: this is not the storage host")
    return welcome


def _connect(address: Address, credentials: Credentials) -> socket.socket:
    context = _trusting(credentials.authority_path) if address.scheme is Scheme.TLS else None
    try:
        if address.scheme is not Scheme.UNIX:
            plain = socket.create_connection((address.host, address.port), GREETING_S)
        else:
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if address.scheme is Scheme.UNIX:
                plain.settimeout(GREETING_S)
                plain.connect(address.path)
            if context is None:
                return plain
            return context.wrap_socket(plain, server_hostname=address.host)
        except BaseException:
            plain.close()
            raise
    except ssl.CertificateError as error:
        raise UsageError(
            f"{address}: TLS failed: {error}. {AUTHORITY_VARIABLE} names the certificates to trust"
        ) from error
    except ssl.SSLError as error:
        raise UsageError(
            f"{address}: TLS failed: {error}. For a storage host without --tls-cert, use "
            f"{Scheme.TCP.value}://"
        ) from error
    except OSError as error:
        raise TransportError(
            f"{address}: no storage host answers ({error.strerror or error}); is `portus serve` "
            f"running there?"
        ) from error


def _trusting(path: str | None) -> ssl.SSLContext:
    """Return a TLS context that trusts the certificates at ``path``, or those of the system if it
    is None. Raises ``UsageError``."""
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # also TLS's error for a file without a certificate
        raise UsageError(
            f"{path}: cannot read certificates: {error.strerror or error}; "
            f"{AUTHORITY_VARIABLE} must name a PEM file of certificates"
        ) from error
