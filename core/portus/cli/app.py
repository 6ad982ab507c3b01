"""The commands and their options. Each command is imported when it is run."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from typer.core import TyperGroup

from portus import __version__
from portus.cli.output import EXIT_CODES, reported

app: Final = typer.Typer(
    name="portus",
    help="Look at, verify, export and tidy up pools of checkpoints.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_WHERE: Final = (
    "a pool file, pool directory or portus:// address; else $PORTUS_POOL, else .portus nearby"
)

Pool = Annotated[str | None, typer.Option("--pool", "-p", metavar="PATH", help=_WHERE)]
PoolArgument = Annotated[str | None, typer.Argument(metavar="[POOL]", help="the same as --pool")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON document on stdout")]
Target = Annotated[
    str, typer.Argument(metavar="MODEL[@STEP]", help="or the path of a reference file")
]
OptionalTarget = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL[@STEP]]", help="all versions, one, or a reference file's"),
]


@app.callback(invoke_without_command=True)
def _portus(
    version: Annotated[bool, typer.Option("--version", help="say the version, and exit")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command(epilog=EXIT_CODES)
def ls(
    place: PoolArgument = None,
    pool: Pool = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="all versions of a model")] = False,
    as_json: AsJson = False,
) -> None:
    """List models, their versions, and the reference files that hold them."""
    with reported(as_json) as output:
        from portus.cli import ls

        output.code = ls.run(place or pool, every, output)


@app.command(epilog=EXIT_CODES)
def show(target: Target, pool: Pool = None, as_json: AsJson = False) -> None:
    """Show the versions of a model, or all that is in one version."""
    with reported(as_json) as output:
        from portus.cli import show

        output.code = show.run(target, pool, output)


@app.command(epilog=EXIT_CODES)
def verify(target: OptionalTarget = None, pool: Pool = None, as_json: AsJson = False) -> None:
    """Read every byte, and check every rule of the format. Exit code 1 if damage was found."""
    with reported(as_json) as output:
        from portus.cli import verify

        output.code = verify.run(target, pool, output)


@app.command(epilog=EXIT_CODES)
def scrub(
    place: PoolArgument = None,
    pool: Pool = None,
    rate: Annotated[
        str, typer.Option("--rate", metavar="SIZE/s", help="read that many bytes a second, at most")
    ] = "50M/s",
    as_json: AsJson = False,
) -> None:
    """Read every byte as verify does, slowly, and from the disk itself. Exit code 4 for damage."""
    with reported(as_json) as output:
        from portus.cli import scrub

        output.code = scrub.run(place or pool, rate, output)


@app.command(epilog=EXIT_CODES)
def rescue(
    place: Annotated[
        str, typer.Argument(metavar="POOL", help="a pool file, whatever its name is, or a device")
    ],
    into: Annotated[
        str | None,
        typer.Option("--into", metavar="NEW", help="make a new pool file of what is whole"),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="make the pool whole where it is; copy it first")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the versions that a damaged pool still holds, or make a pool of them again.

    For a pool that does not open (both root slots or both superblocks are lost), or that lost its
    name. All of it is read. Versions that were let go of are found too, if nothing was written over
    them. Reference files lead to the new pool once it has the old one's place; `portus export` gets
    single versions out of it. Exit code 1 if nothing is whole, or if a version is damaged that the
    pool lists.
    """
    with reported(as_json) as output:
        from portus.cli import rescue as command

        output.code = command.run(place, command.Wish(into=into, in_place=in_place), output)


@app.command(epilog=EXIT_CODES)
def export(
    target: Target,
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="a .safetensors or .pt file, or a directory")
    ],
    pool: Pool = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--names", "-n", metavar="PATTERN", help="only these, such as 'model.*'"),
    ] = None,
    strip: Annotated[
        str, typer.Option("--strip", metavar="PREFIX", help="take this off the front of names")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", "-f", help="replace OUT if it is there")
    ] = False,
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="of each file, in a directory")
    ] = "5GB",
    as_json: AsJson = False,
) -> None:
    """Write a version, verified, as safetensors (streamed) or a torch file.

    The newest version of a model if no step is given. Safetensors have tensors alone, each
    contiguous; other values are left out, and tensors that share memory are written one by one.

    A model that was saved in shards is made whole, from the pools of all its ranks. A directory
    gets the weights as model.safetensors, or files of --shard-size each and an index.
    """
    with reported(as_json) as output:
        from portus.cli import export

        wish = export.Wish(
            target=target,
            out=out,
            names=names or (),
            strip=strip,
            force=force,
            limit=export.size_of(shard_size),
        )
        output.code = export.run(wish, pool, output)


@app.command(epilog=EXIT_CODES)
def materialize(
    path: Annotated[str, typer.Argument(metavar="PATH", help="a reference file, or a directory")],
    pool: Pool = None,
    as_json: AsJson = False,
) -> None:
    """Put real torch files in place of reference files: the way out of Portus."""
    with reported(as_json) as output:
        from portus.cli import materialize

        output.code = materialize.run(path, pool, output)


@app.command(epilog=EXIT_CODES)
def rm(
    target: Target,
    pool: Pool = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="a whole model, unasked")] = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="also what reference files lead to")
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="of a model: all but the newest N, and what is held"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let go of versions, or remove a reference file and the version that it alone led to."""
    with reported(as_json) as output:
        from portus.cli import rm

        output.code = rm.run(target, pool, yes=yes, force=force, keep=keep, output=output)


@app.command(epilog=EXIT_CODES)
def doctor(
    places: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PLACE...]", help="directories or DAX devices to measure"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what media, RDMA and GPUs this machine has, how fast places are, and what to do."""
    with reported(as_json) as output:
        from portus.cli import doctor as command

        output.code = command.run(places or (), output)


@app.command("format", epilog=EXIT_CODES)
def format_(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="such as /dev/dax0.0")],
    force: Annotated[
        bool, typer.Option("--force", "-f", help="whatever it holds, which is lost")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make an empty pool on a DAX device."""
    with reported(as_json) as output:
        from portus.cli import format as command

        output.code = command.run(device, force=force, output=output)


@app.command(epilog=EXIT_CODES)
def gc(
    place: PoolArgument = None,
    pool: Pool = None,
    missing: Annotated[
        bool,
        typer.Option("--missing", help="also where a file is gone, and may have been moved"),
    ] = False,
    empty: Annotated[
        bool, typer.Option("--empty", help="remove pool files that hold no version then")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    links: Annotated[
        str | None,
        typer.Option("--links", metavar="DIR", help="of a storage host's trainers on this machine"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let go of versions whose reference files were deleted."""
    with reported(as_json) as output:
        from portus.cli import gc

        wish = gc.Wish(missing=missing, empty=empty, dry_run=dry_run, links=links)
        output.code = gc.run(place or pool, wish, output)


@app.command(epilog=EXIT_CODES)
def serve(
    place: Annotated[
        str,
        typer.Argument(
            metavar="POOL", help="a pool directory, a pool file, a DAX device, or memory:SIZE"
        ),
    ],
    listen: Annotated[
        list[str] | None,
        typer.Option(
            "--listen", "-l", metavar="HOST[:PORT]|unix:PATH", help="127.0.0.1:7117 if not given"
        ),
    ] = None,
    secret_file: Annotated[
        str | None,
        typer.Option("--secret-file", metavar="PATH", help="a secret, or lines TENANT SECRET"),
    ] = None,
    tls_cert: Annotated[
        str | None,
        typer.Option("--tls-cert", metavar="PEM", help="tcp addresses speak TLS (portus+tls://)"),
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option("--tls-key", metavar="PEM", help="of that certificate")
    ] = None,
    quota: Annotated[
        str | None, typer.Option("--quota", metavar="SIZE", help="of each tenant, such as 500G")
    ] = None,
    quota_file: Annotated[
        str | None,
        typer.Option("--quota-file", metavar="PATH", help="lines TENANT SIZE, instead of --quota"),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", metavar="[HOST:]PORT", help="for prometheus; also /healthz"),
    ] = None,
    admin_path: Annotated[
        str | None,
        typer.Option("--admin", metavar="PATH", help="of the socket for `portus admin`"),
    ] = None,
    scrub: Annotated[
        str | None,
        typer.Option(
            "--scrub", metavar="SIZE/s", help="read all again for rot, so many bytes a second"
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="that all clients may take of this host, 1G"),
    ] = None,
    connections: Annotated[
        int | None,
        typer.Option("--connections", metavar="COUNT", help="of all clients, at most; 1024"),
    ] = None,
    transport: Annotated[
        str,
        typer.Option(
            "--transport", metavar="auto|tcp|verbs", help="verbs: do not start without RDMA"
        ),
    ] = "auto",
) -> None:
    """Serve pools to trainers on other machines, until SIGTERM. SIGHUP: read the files of secrets,
    quotas and certificates again. Exit code 3, of this command: a connection hung at the end, and
    was not waited for."""
    with reported(False) as output:
        from portus.cli import serve
        from portus.daemon.main import Wish

        wish = Wish(
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
        )
        output.code = serve.run(wish, output)


class _ShowFirst(TyperGroup):
    """``portus admin ADDRESS`` is ``portus admin show ADDRESS``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["show", *args]
        return super().parse_args(ctx, args)


_admin: Final = typer.Typer(
    cls=_ShowFirst,
    help="Look after a storage host of this machine, as its user or as root.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(_admin, name="admin")

HostArgument = Annotated[
    str, typer.Argument(metavar="ADDRESS", help="of the host, or the PATH of serve --admin PATH")
]
TenantArgument = Annotated[str, typer.Argument(metavar="TENANT")]
Off = Annotated[bool, typer.Option("--off", help="let saves begin again")]


@_admin.command("show", epilog=EXIT_CODES)
def admin_show(host: HostArgument, as_json: AsJson = False) -> None:
    """List tenants with their bytes and quotas, and connections with their claims and pins."""
    with reported(as_json) as output:
        from portus.cli import admin

        output.code = admin.show(host, output)


@_admin.command("kick", epilog=EXIT_CODES)
def admin_kick(
    host: HostArgument,
    who: Annotated[str, typer.Argument(metavar="TENANT|PEER", help="as show lists them")],
    as_json: AsJson = False,
) -> None:
    """End the connections of a tenant, or one. A save under way fails; they may come again."""
    with reported(as_json) as output:
        from portus.cli import admin

        output.code = admin.kick(host, who, output)


@_admin.command("read-only", epilog=EXIT_CODES)
def admin_read_only(
    host: HostArgument, tenant: TenantArgument, off: Off = False, as_json: AsJson = False
) -> None:
    """Begin no save of a tenant, and remove nothing of it, until --off or a restart."""
    with reported(as_json) as output:
        from portus.cli import admin

        output.code = admin.read_only(host, tenant, off=off, output=output)


@_admin.command("drain", epilog=EXIT_CODES)
def admin_drain(
    host: HostArgument,
    off: Off = False,
    wait_s: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="for saves under way")
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Begin no save of anybody, and wait for those under way: then the host may be stopped. Loads
    go on. Exit code 75 if saves are under way when the time is over."""
    with reported(as_json) as output:
        from portus.cli import admin

        output.code = admin.drain(host, off=off, wait_s=wait_s, output=output)


@_admin.command("reopen", epilog=EXIT_CODES)
def admin_reopen(host: HostArgument, tenant: TenantArgument, as_json: AsJson = False) -> None:
    """Open a pool again that takes no stores any more after an error of its disk, if every byte of
    it is there. Reads all of it; then its connections end, and come again."""
    with reported(as_json) as output:
        from portus.cli import admin

        output.code = admin.reopen(host, tenant, output)


@_admin.command("reload", epilog=EXIT_CODES)
def admin_reload(host: HostArgument, as_json: AsJson = False) -> None:
    """Have the host read its secrets, quotas and certificates again, as SIGHUP does."""
    with reported(as_json) as output:
        from portus.cli import admin

        output.code = admin.reload(host, output)
