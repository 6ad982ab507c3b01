"""``portus admin``: administration of a storage host on this machine. No torch."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
import typer
from typer.core import TyperGroup

from portus.cli import words
from portus.cli.options import argument, flag, group, option
from portus.cli.output import BUSY, Output, Row
from portus.errors import TransportError
from portus.reach.daemon.admin import (
    Asked,
    Drain,
    HostStatus,
    Kick,
    Look,
    ReadOnly,
    Reload,
    RequestDone,
    Tenant,
    ask,
)

Kind = TypeVar("Kind", HostStatus, RequestDone)


class _ShowFirst(TyperGroup):
    """A group in which ``portus admin ADDRESS`` means ``portus admin show ADDRESS``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["show", *args]
        return super().parse_args(ctx, args)


_HEADS: Final = ("TENANT", ">SIZE", ">FREE", ">QUOTA", ">VERSIONS", ">SAVES", ">PINS", "CLAIMS", "")

_HOST: Final = argument(
    "ADDRESS", "the host's address, also as HOST:PORT, or the PATH given to serve --admin"
)
_TENANT: Final = argument("TENANT", "the tenant's name")
_OFF: Final = flag("--off", "allow saves again")


def show(output: Output, host: str = _HOST) -> None:
    """List tenants with bytes and quotas, and connections.

    Of each connection it lists claims and pins.
    """
    found = _ask(host, Look(), HostStatus)
    output.document(msgspec.to_builtins(found, builtin_types=()))
    draining = ", draining: no new saves" if found.draining else ""
    output.line(f"{found.place} at {', '.join(found.addresses)}{draining}")
    if found.tenants:
        output.line()
        output.table(_HEADS, [_row(each) for each in found.tenants])
    rows: list[Row] = []
    for each in found.connections:
        claims, seconds = ", ".join(each.claims), f"{each.seconds:.0f} s"
        tenant = each.tenant or "(greeting)"
        rows.append((each.peer, tenant, seconds, each.pins, claims, each.saving))
    if rows:
        output.line()
        output.table(("PEER", "TENANT", ">FOR", ">PINS", "CLAIMS", "SAVING"), rows)


def kick(
    output: Output,
    host: str = _HOST,
    who: str = argument("TENANT|PEER", "as `portus admin show` lists them"),
) -> None:
    """Close one connection, or all of a tenant. Saves in flight fail; clients may reconnect."""
    count = _ask(host, Kick(who), RequestDone).count
    output.document({"ended": count})
    output.line(f"{words.count(count, 'connection')} ended")


def read_only(
    output: Output,
    host: str = _HOST,
    tenant: str = _TENANT,
    off: bool = _OFF,
) -> None:
    """Refuse a tenant's saves and removals, until --off or a restart."""
    _ask(host, ReadOnly(tenant, not off), RequestDone)
    output.document({"tenant": tenant, "read_only": not off})
    output.line(f"{tenant}: {'saves may begin again' if off else 'read-only until --off'}")


def drain(
    output: Output,
    host: str = _HOST,
    off: bool = _OFF,
    wait_s: float = option("--wait SECONDS", "how long to wait for saves in flight", 60.0, min=0),
) -> None:
    """Accept no new saves, and wait for those in flight. Then the host can be stopped.

    Loads continue. Exit code 75 if saves are still in flight when the time is up.
    """
    # The host answers only after its own wait.
    left = _ask(host, Drain(not off, wait_s), RequestDone, wait_s + 60).count
    output.document({"draining": not off, "saves": left})
    in_flight = f"no new saves; {words.count(left, 'save')} in flight"
    output.line("saves may begin again" if off else in_flight)
    output.code = BUSY if left else 0


def reload(output: Output, host: str = _HOST) -> None:
    """Make the host reread secrets, quotas and certificates.

    SIGHUP does the same.
    """
    _ask(host, Reload(), RequestDone)
    output.document({"reloaded": True})
    output.line("secrets, quotas and certificates were read again")


def _ask(host: str, asked: Asked, kind: type[Kind], wait_s: float | None = 60.0) -> Kind:
    answer = ask(host, asked, wait_s)
    if not isinstance(answer, kind):
        raise TransportError(f"{host}: {answer.__struct_config__.tag} was not expected")
    return answer


def _row(tenant: Tenant) -> Row:
    state = []
    if tenant.poisoned:
        state = ["accepts no writes: portus verify --rate, then start the host again"]
    elif tenant.read_only:
        state = ["read-only"]
    if tenant.mirror_missing:
        state.append(f"mirror {tenant.mirror_lag_s:.0f} s behind")
    size, free = words.size(tenant.size), words.size(tenant.free)
    quota = "-" if tenant.quota is None else words.size(tenant.quota)
    counts = tenant.versions, tenant.saves, tenant.pins
    return tenant.tenant, size, free, quota, *counts, ", ".join(tenant.claims), "; ".join(state)


commands: Final = group(
    "Administer a storage host on this machine, as its user or as root. "
    "`portus admin ADDRESS` is short for `portus admin show ADDRESS`.",
    *(show, kick, read_only, drain, reload),
    kind=_ShowFirst,
)
