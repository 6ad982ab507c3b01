"""``portus serve POOL``: serve pools to other machines."""

from __future__ import annotations

from typer import Exit

from portus.cli.options import Text, argument, option
from portus.reach.daemon.events import log_to_stderr
from portus.reach.daemon.main import serve
from portus.reach.daemon.options import ServeOptions


def command(
    place: str = argument("POOL", "a pool directory, a pool file, a DAX device, or memory:SIZE"),
    listen: list[str] = option(
        "--listen -l HOST[:PORT]|unix:PATH", "an address to listen on; default: 127.0.0.1:7117", ()
    ),
    secret_path: Text = option(
        "--secret-file PATH", "a file with one secret, or lines TENANT SECRET"
    ),
    cert_path: Text = option("--tls-cert PEM", "use TLS on TCP addresses (portus+tls://)"),
    key_path: Text = option("--tls-key PEM", "the key of that certificate"),
    quota: Text = option("--quota SIZE", "the most that each tenant may store, such as 500G"),
    quota_path: Text = option(
        "--quota-file PATH", "a file of lines TENANT SIZE, instead of --quota"
    ),
    metrics: Text = option("--metrics [HOST:]PORT", "serve Prometheus metrics and /healthz here"),
    admin_path: Text = option("--admin PATH", "the socket for `portus admin`"),
    scrub: Text = option("--scrub SIZE/s", "reread the pools for bit rot at this rate"),
    memory: Text = option(
        "--memory SIZE", "the most memory that all clients together may take; default: 1G"
    ),
    connections: int | None = option(
        "--connections COUNT", "the most connections of all clients together; default: 1024"
    ),
    mirror: Text = option("--mirror URL", "mirror committed versions to this URL, per tenant"),
    mirror_keep: int = option(
        "--mirror-keep COUNT", "how many versions of a model stay there once they are removed", 0
    ),
    replica: Text = option("--replica ADDRESS", "the host that takes over if this one is lost"),
    mirror_wait: float = option(
        "--mirror-wait SECONDS", "how long shutdown waits for the mirror or the replica", 60.0
    ),
    transport: str = option(
        "--transport auto|tcp|verbs", "verbs: refuse to start without RDMA", "auto"
    ),
) -> None:
    """Serve pools to trainers on other machines, until SIGTERM.

    On SIGHUP it rereads the files of secrets, quotas and certificates. Exit code 3 of this command:
    a connection hung at shutdown and was abandoned.
    """
    options = ServeOptions(**locals())
    log_to_stderr()
    if not serve(options):
        raise Exit(3)
