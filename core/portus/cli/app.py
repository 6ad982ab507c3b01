"""The commands and their options. Each command is imported when it is run."""

# ruff: noqa: B008  # as typer takes options

from __future__ import annotations

from typing import Any, Final

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from portus import __version__
from portus.cli.output import EXIT_CODES, reported
from portus.errors import masked

_GROUPS: Final = {
    "Checkpoints": {
        "ls": "list the checkpoints of a directory, a pool or a mirror",
        "show": "show what is in one",
        "verify": "read every byte and compare the checksums",
        "export": "write one as the file that it is, or as another kind",
        "rm": "delete one",
        "gc": "remove what killed processes left",
        "scrub": "verify slowly, from the disk: for cron",
        "report": "where the time of a training went",
        "doctor": "what to change here, and how fast this machine is",
    },
    "Mirrors": {
        "pull": "fetch what a mirror has of a run",
        "mirror": "compare a mirror with its pool, or repair it",
    },
    "Pools on devices and storage hosts": {
        "rescue": "list or rebuild what a damaged pool holds",
        "format": "make an empty pool on a DAX device",
        "serve": "serve pools to other machines",
        "admin": "administer a storage host",
    },
}
"""What the help lists, in its order."""


class _Commands(TyperGroup):
    """Lists them by what they are for, and says what is wrong with a command line without the
    passwords in it."""

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        for title, lines in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(list(lines.items()))

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except Exception as error:
            said = getattr(error, "message", None)  # of any error of the parser
            if isinstance(said, str):
                error.message = masked(said)  # type: ignore[attr-defined]
            raise


app: Final = typer.Typer(
    name="portus",
    cls=_Commands,
    help="Inspect, verify, export and clean up checkpoints: files, and pools.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _option(names: str, text: str, default: object = None, **more: Any) -> Any:
    """Return an option; ``names`` are as in the usage, such as ``--pool -p PATH``."""
    *flags, value = names.split()
    return Option(default, *flags, metavar=value, help=text, **more)


def _flag(names: str, text: str) -> Any:
    return Option(False, *names.split(), help=text)


def _argument(name: str, text: str, default: object = ...) -> Any:
    return Argument(default, metavar=name, help=text)


_WHERE: Final = (
    "a pool file, a pool directory or a portus:// address; "
    "default: $PORTUS_POOL, then the nearest .portus"
)
_OR_MIRROR: Final = f"{_WHERE}; or a mirror, such as s3://bucket/prefix or file:///path"

Text = str | None
Texts = list[str] | None
_POOL = _option("--pool -p PATH", _WHERE)
_POOL_ARGUMENT = _argument("[POOL]", "the same as --pool; or a directory of files", None)
_POOL_OR_MIRROR = _option("--pool -p PATH|MIRROR", _OR_MIRROR)
_MIRROR_ARGUMENT = _argument("[MIRROR]", "the mirror; default: $PORTUS_MIRROR", None)
_AS_JSON = _flag("--json", "print one JSON document to stdout")
_TARGET = _argument("MODEL[@STEP]", "a version, a file, a pointer, or MIRROR/MODEL[@STEP]")
_TARGETS = _argument("MODEL[@STEP]...", "versions, files, pointers, or MIRROR/MODEL[@STEP]")
_OPTIONAL_TARGET = _argument(
    "[MODEL[@STEP]]", "a model, a version, a file or a directory; default: all", None
)


@app.callback(invoke_without_command=True)
def _portus(version: bool = _flag("--version", "print the version and exit")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command(epilog=EXIT_CODES)
def ls(
    place: Text = _POOL_ARGUMENT,
    pool: Text = _POOL_OR_MIRROR,
    every: bool = _flag("--all -a", "list all versions of each model"),
    as_json: bool = _AS_JSON,
) -> None:
    """List checkpoints: the torch files of a directory and those below it; or the models of a pool,
    their versions, and the directories of the pointers to them."""
    with reported(as_json) as output:
        from portus.cli import ls

        ls.run(place or pool, every, output)


@app.command(epilog=EXIT_CODES)
def show(target: str = _TARGET, pool: Text = _POOL_OR_MIRROR, as_json: bool = _AS_JSON) -> None:
    """Show what is in a torch file; or the versions of a model, or everything in one version."""
    with reported(as_json) as output:
        from portus.cli import show

        show.run(target, pool, output)


@app.command(epilog=EXIT_CODES)
def report(
    run: Text = _argument(
        "[RUN]", "the run's directory, its pool, one of its checkpoints, or its name", None
    ),
    pool: Text = _POOL,
    html: Text = _option("--html FILE", "also write an HTML page"),
    png: Text = _option("--png FILE", "also write a plot"),
    as_json: bool = _AS_JSON,
) -> None:
    """Show where the time of a run went, and which steps each restart lost.

    Reads the journal beside the pool. The run may be active, killed or finished. The HTML page is
    self-contained; the plot needs matplotlib.
    """
    with reported(as_json) as output:
        from portus.cli import report as command

        command.run(run, pool, output, page=html, picture=png)


@app.command(epilog=EXIT_CODES)
def verify(
    target: Text = _OPTIONAL_TARGET, pool: Text = _POOL_OR_MIRROR, as_json: bool = _AS_JSON
) -> None:
    """Read every byte of a torch file, of those below a directory, or of a pool, and check every
    rule of the format. Exit code 1 if damage was found."""
    with reported(as_json) as output:
        from portus.cli import verify

        verify.run(target, pool, output)


@app.command(epilog=EXIT_CODES)
def scrub(
    place: Text = _POOL_ARGUMENT,
    pool: Text = _POOL,
    rate: str = _option("--rate SIZE/s", "read at most this much per second", "50M/s"),
    as_json: bool = _AS_JSON,
) -> None:
    """Read every byte as verify does, but slowly, and from the disk rather than the page cache.
    Exit code 4 if damage was found."""
    with reported(as_json) as output:
        from portus.cli import verify

        verify.scrub(place or pool, rate, output)


@app.command(epilog=EXIT_CODES)
def rescue(
    place: str = _argument("POOL", "a pool file with any name, or a device"),
    into: Text = _option("--into NEW", "write the intact versions to a new pool file"),
    in_place: bool = _flag("--in-place", "repair the pool itself; copy it first"),
    as_json: bool = _AS_JSON,
) -> None:
    """List the versions that a damaged pool still holds, or rebuild a pool from them.

    For a pool that does not open (both root slots or both superblocks are lost), or that lost its
    name. Reads the whole pool. Also finds deleted versions that were not overwritten. Pointers
    lead to the new pool once it takes the place of the old one; `portus export` extracts
    single versions from it. Exit code 1 if nothing is intact, or if a version that the pool lists
    is damaged.
    """
    with reported(as_json) as output:
        from portus.cli import rescue as command

        command.run(place, into, in_place, output)


@app.command(epilog=EXIT_CODES)
def export(
    target: str = _TARGET,
    out: str = _argument("OUT", "a .safetensors or .pt file, or a directory"),
    pool: Text = _POOL_OR_MIRROR,
    file: Text = _option("--file NAME", "the one file to take, if it has several"),
    names: Texts = _option("--names -n PATTERN", "only matching names, such as 'model.*'"),
    strip: str = _option("--strip PREFIX", "remove this prefix from names", ""),
    force: bool = _flag("--force -f", "replace OUT if it exists"),
    shard_size: str = _option(
        "--shard-size SIZE", "the most bytes of each file, if OUT is a directory", "5GB"
    ),
    as_json: bool = _AS_JSON,
) -> None:
    """Write a version, verified, as the file that it is, byte for byte; or a version or a file as
    safetensors or as a torch file.

    MODEL may be a pointer, or a directory of pointers: OUT gets what they lead to. Without a step:
    the newest version of the model. Of several files OUT is a directory that gets all of them.

    What --names say, or an OUT of another kind, is converted, and no code that the file names is
    run. Safetensors hold contiguous tensors only: other values are left out, and tensors that share
    memory are written separately. The numpy arrays of a shelf become tensors. A directory gets the
    weights as model.safetensors, or as files of at most --shard-size and an index.
    """
    with reported(as_json) as output:
        from portus.cli import export

        options = export.ExportOptions(
            target=target,
            out=out,
            file=file,
            names=names or (),
            strip=strip,
            force=force,
            limit=export.size_of(shard_size),
        )
        export.run(options, pool, output)


@app.command(epilog=EXIT_CODES)
def pull(
    mirror: str = _argument("MIRROR[/MODEL]", "all models of a mirror, or one"),
    directory: Text = _argument(
        "[DIR]", "the run's directory, made if there is none; default: the current directory", None
    ),
    pool: Text = _option("--pool -p PATH", "where the pools go; default: .portus in DIR"),
    as_json: bool = _AS_JSON,
) -> None:
    """Fetch what a run on a machine with an empty disk would fetch.

    Of a run that saves files: all files that are not in DIR. Of a pool: all versions; portus export
    writes their files. Started again after an interruption, it resumes.
    """
    with reported(as_json) as output:
        from portus.cli import pull as command

        command.run(mirror, directory, pool, output)


@app.command(epilog=EXIT_CODES)
def rm(
    targets: list[str] = _TARGETS,
    pool: Text = _POOL_OR_MIRROR,
    yes: bool = _flag("--yes -y", "delete a whole model without asking"),
    force: bool = _flag(
        "--force -f", "also delete marks of protected tables, and files that a link leads to"
    ),
    keep: Text = _option(
        "--keep N|KEEP",
        "keep only the newest N of a directory, or of a model, or what a policy keeps, "
        "such as last=2,every=1000,within=24h,best=val_loss:min:3",
    ),
    as_json: bool = _AS_JSON,
) -> None:
    """Delete a torch file; or versions, and the pointers to them; or a pointer, and its version if
    no other one leads there.

    A torch file that a link beside it leads to takes --force.
    """
    with reported(as_json) as output:
        from portus.cli import rm

        rm.run(targets, pool, yes=yes, force=force, keep=keep, output=output)


@app.command(epilog=EXIT_CODES)
def doctor(
    places: Texts = _argument(
        "[PLACE...]",
        "pools, directories, DAX devices or addresses of storage hosts to look at; "
        "default: $PORTUS_POOL, else the nearest .portus, and /dev/shm",
        None,
    ),
    as_json: bool = _AS_JSON,
) -> None:
    """Say what to change here, and how fast this machine is: verdict first."""
    with reported(as_json) as output:
        from portus.cli import doctor as command

        command.run(places or (), output)


@app.command("format", epilog=EXIT_CODES)
def format_(
    device: str = _argument("DEVICE", "a DAX device, such as /dev/dax0.0"),
    force: bool = _flag("--force -f", "overwrite what the device holds"),
    as_json: bool = _AS_JSON,
) -> None:
    """Make an empty pool on a DAX device."""
    with reported(as_json) as output:
        from portus.cli import format as command

        command.run(device, force=force, output=output)


@app.command(epilog=EXIT_CODES)
def gc(
    place: Text = _POOL_ARGUMENT,
    pool: Text = _POOL_OR_MIRROR,
    missing: Texts = _option(
        "--missing DIR", "delete versions whose pointers were in DIR, or below, and are gone"
    ),
    yes: bool = _flag("--yes -y", "delete them without asking"),
    empty: bool = _flag("--empty", "also remove pool files that end up empty"),
    dry_run: bool = _flag("--dry-run", "only show what would be deleted and given back"),
    as_json: bool = _AS_JSON,
) -> None:
    """Remove what processes that were killed left in a directory of files; of a pool, return free
    space to the disk.

    With --missing, first delete versions whose pointers somebody removed. It looks at the files of
    this machine: run it where DIR is mounted.
    """
    with reported(as_json) as output:
        from portus.cli import gc

        gc.run(place or pool, output, missing=missing or (), yes=yes, empty=empty, dry_run=dry_run)


@app.command(epilog=EXIT_CODES)
def serve(
    place: str = _argument("POOL", "a pool directory, a pool file, a DAX device, or memory:SIZE"),
    listen: Texts = _option(
        "--listen -l HOST[:PORT]|unix:PATH", "an address to listen on; default: 127.0.0.1:7117"
    ),
    secret_file: Text = _option(
        "--secret-file PATH", "a file with one secret, or lines TENANT SECRET"
    ),
    tls_cert: Text = _option("--tls-cert PEM", "use TLS on TCP addresses (portus+tls://)"),
    tls_key: Text = _option("--tls-key PEM", "the key of that certificate"),
    quota: Text = _option("--quota SIZE", "the most that each tenant may store, such as 500G"),
    quota_file: Text = _option(
        "--quota-file PATH", "a file of lines TENANT SIZE, instead of --quota"
    ),
    metrics: Text = _option("--metrics [HOST:]PORT", "serve Prometheus metrics and /healthz here"),
    admin_path: Text = _option("--admin PATH", "the socket for `portus admin`"),
    scrub: Text = _option("--scrub SIZE/s", "reread the pools for bit rot at this rate"),
    memory: Text = _option(
        "--memory SIZE", "the most memory that all clients together may take; default: 1G"
    ),
    connections: int | None = _option(
        "--connections COUNT", "the most connections of all clients together; default: 1024"
    ),
    mirror: Text = _option("--mirror URL", "mirror committed versions to this URL, per tenant"),
    replica: Text = _option("--replica ADDRESS", "the host that takes over if this one is lost"),
    mirror_wait: float = _option(
        "--mirror-wait SECONDS", "how long shutdown waits for the mirror or the replica", 60.0
    ),
    transport: str = _option(
        "--transport auto|tcp|verbs", "verbs: refuse to start without RDMA", "auto"
    ),
) -> None:
    """Serve pools to trainers on other machines, until SIGTERM.

    On SIGHUP it rereads the files of secrets, quotas and certificates. Exit code 3 of this command:
    a connection hung at shutdown and was abandoned.
    """
    with reported(False) as output:
        from portus.reach.daemon.events import log_to_stderr
        from portus.reach.daemon.main import ServeOptions
        from portus.reach.daemon.main import serve as run

        log_to_stderr()
        options = ServeOptions(
            place=place,
            listen=listen or (),
            secret_path=secret_file,
            cert_path=tls_cert,
            key_path=tls_key,
            quota=quota,
            quota_path=quota_file,
            admin_path=admin_path,
            metrics=metrics,
            transport=transport,
            scrub=scrub,
            memory=memory,
            connections=connections,
            mirror=mirror,
            replica=replica,
            mirror_wait=mirror_wait,
        )
        output.code = 0 if run(options) else 3


class _ShowFirst(TyperGroup):
    """``portus admin ADDRESS`` is ``portus admin show ADDRESS``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["show", *args]
        return super().parse_args(ctx, args)


_admin: Final = typer.Typer(
    cls=_ShowFirst,
    help="Administer a storage host on this machine, as its user or as root. "
    "`portus admin ADDRESS` is short for `portus admin show ADDRESS`.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(_admin, name="admin")

_HOST_ARGUMENT = _argument(
    "ADDRESS", "the host's address, also as HOST:PORT, or the PATH given to serve --admin"
)
_TENANT_ARGUMENT = _argument("TENANT", "the tenant's name")
_OFF = _flag("--off", "allow saves again")


@_admin.command("show", epilog=EXIT_CODES)
def admin_show(host: str = _HOST_ARGUMENT, as_json: bool = _AS_JSON) -> None:
    """List tenants with their bytes and quotas, and connections with their claims and pins."""
    with reported(as_json) as output:
        from portus.cli import admin

        admin.show(host, output)


@_admin.command("kick", epilog=EXIT_CODES)
def admin_kick(
    host: str = _HOST_ARGUMENT,
    who: str = _argument("TENANT|PEER", "as `portus admin show` lists them"),
    as_json: bool = _AS_JSON,
) -> None:
    """Close one connection, or all of a tenant. Saves in flight fail; clients may reconnect."""
    with reported(as_json) as output:
        from portus.cli import admin

        admin.kick(host, who, output)


@_admin.command("read-only", epilog=EXIT_CODES)
def admin_read_only(
    host: str = _HOST_ARGUMENT,
    tenant: str = _TENANT_ARGUMENT,
    off: bool = _OFF,
    as_json: bool = _AS_JSON,
) -> None:
    """Refuse a tenant's saves and removals, until --off or a restart."""
    with reported(as_json) as output:
        from portus.cli import admin

        admin.read_only(host, tenant, off=off, output=output)


@_admin.command("drain", epilog=EXIT_CODES)
def admin_drain(
    host: str = _HOST_ARGUMENT,
    off: bool = _OFF,
    wait_s: float = _option("--wait SECONDS", "how long to wait for saves in flight", 60.0, min=0),
    as_json: bool = _AS_JSON,
) -> None:
    """Accept no new saves, and wait for those in flight. Then the host can be stopped.

    Loads continue. Exit code 75 if saves are still in flight when the time is over.
    """
    with reported(as_json) as output:
        from portus.cli import admin

        admin.drain(host, off=off, wait_s=wait_s, output=output)


@_admin.command("reopen", epilog=EXIT_CODES)
def admin_reopen(
    host: str = _HOST_ARGUMENT, tenant: str = _TENANT_ARGUMENT, as_json: bool = _AS_JSON
) -> None:
    """Reopen a pool that refuses writes after a disk error, if every byte of it is intact.

    Reads the whole pool. Then the host closes the tenant's connections, and clients reconnect.
    """
    with reported(as_json) as output:
        from portus.cli import admin

        admin.reopen(host, tenant, output)


@_admin.command("reload", epilog=EXIT_CODES)
def admin_reload(host: str = _HOST_ARGUMENT, as_json: bool = _AS_JSON) -> None:
    """Make the host reread its secrets, quotas and certificates, as SIGHUP does."""
    with reported(as_json) as output:
        from portus.cli import admin

        admin.reload(host, output)


_mirror: Final = typer.Typer(
    help="Compare a mirror with its pool, or repair the mirror.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(_mirror, name="mirror")


@_mirror.command("status", epilog=EXIT_CODES)
def mirror_status(
    mirror: Text = _MIRROR_ARGUMENT, pool: Text = _POOL, as_json: bool = _AS_JSON
) -> None:
    """Show what is mirrored, which writer mirrors it, and what the mirror still lacks."""
    with reported(as_json) as output:
        from portus.cli import mirror as command

        command.status(mirror, pool, output)


@_mirror.command("repair", epilog=EXIT_CODES)
def mirror_repair(
    mirror: Text = _MIRROR_ARGUMENT,
    pool: Text = _POOL,
    files: Text = _option("--files DIR", "where the run saves its files; default: here"),
    as_json: bool = _AS_JSON,
) -> None:
    """Read every byte of a mirror, and replace what is damaged or missing.

    Versions are sent again from the pool, and files of runs from the directory that they were
    mirrored from, if they are intact there. Exit code 1 if something stays damaged.
    """
    with reported(as_json) as output:
        from portus.cli import mirror as command

        command.repair(mirror, pool, files, output)
