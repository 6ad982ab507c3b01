"""The options of a host, and the files that it can read again while it serves."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from portus.errors import UsageError
from portus.reach.daemon.events import tell
from portus.reach.daemon.pools import WAIT_S, Quotas, read_quotas
from portus.reach.daemon.secrets import Secrets, read_secrets
from portus.reach.daemon.server import Server, tls_context


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of a host. ``listen``: HOST[:PORT], unix:PATH, or addresses. ``metrics``:
    [HOST:]PORT. ``quota``: a size; ``quota_path``: a file of sizes. ``transport``: auto, tcp or
    verbs. ``scrub``: bytes to read again in a second. ``memory``: bytes that clients may make the
    host hold. ``connections``: how many there may be. ``admin_path``: the operator's socket.
    ``mirror``: the URL of a mirror. ``mirror_keep``: versions of each model that stay there after
    they were removed here. ``replica``: the address of the host that takes over if this
    one is lost. ``mirror_wait``: seconds that the end of the host waits for either, at most."""

    place: str
    listen: Sequence[str] = ()
    secret_path: str | None = None
    cert_path: str | None = None
    key_path: str | None = None
    quota: str | None = None
    quota_path: str | None = None
    admin_path: str | None = None
    metrics: str | None = None
    transport: str = ""
    scrub: str | None = None
    memory: str | None = None
    connections: int | None = None
    mirror: str | None = None
    mirror_keep: int = 0
    replica: str | None = None
    mirror_wait: float = WAIT_S


@dataclass(frozen=True, slots=True)
class HostFiles:
    """The contents of the files that a host reads when it starts and when it reloads."""

    secrets: Secrets
    quotas: Quotas
    context: ssl.SSLContext | None

    @classmethod
    def of(cls, options: ServeOptions) -> HostFiles:
        """Read the files that ``options`` names. Raise ``UsageError`` if one is wrong."""
        if (options.cert_path is None) != (options.key_path is None):
            raise UsageError("--tls-cert and --tls-key go together")
        context = None
        if options.cert_path is not None and options.key_path is not None:
            context = tls_context(options.cert_path, options.key_path)
        quotas = read_quotas(options.quota, options.quota_path)
        secrets = read_secrets(options.secret_path)
        secrets.refuse_unknown(quotas.of, f"--quota-file {options.quota_path}")
        return cls(secrets, quotas, context)


def reload(options: ServeOptions, server: Server) -> None:
    """Read secrets, quotas and certificates again.

    Secrets and certificates apply to new connections, quotas to all. Connections stay, and saves
    continue. Raises ``UsageError`` if a file cannot be read; then nothing changes.
    """
    try:
        read = HostFiles.of(options)
        # By now all files were read: a wrong one leaves everything as it was.
        server.house.pools.limit(read.quotas)
    except UsageError as error:
        text = f"cannot reread secrets, quotas and certificates, so the old ones stay: {error}"
        tell(logging.ERROR, "not_reloaded", text, why=str(error))
        raise
    server.house.secrets.become(read.secrets)
    for listener in server.listeners:
        if listener.context is not None:
            # For new connections only: ending the others would fail the saves under way.
            listener.context = read.context
    tell(logging.INFO, "reloaded", "secrets, quotas and certificates were read again")
