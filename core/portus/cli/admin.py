"""``portus admin``: looking after a storage host of this machine. No torch."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from portus.cli.output import BUSY, Output, Row, count_text, size_text
from portus.errors import TransportError
from portus.reach.daemon.admin import (
    Asked,
    Drain,
    HostStatus,
    Kick,
    Look,
    ReadOnly,
    Reload,
    Reopen,
    RequestDone,
    Tenant,
    ask,
)

Kind = TypeVar("Kind", HostStatus, RequestDone)


def show(host: str, output: Output) -> None:
    """Show tenants and connections."""
    found = _ask(host, Look(), HostStatus)
    output.document(msgspec.to_builtins(found, builtin_types=()))
    draining = ", draining: no new saves" if found.draining else ""
    output.line(f"{found.place} at {', '.join(found.addresses)}{draining}")
    if found.tenants:
        output.line()
        heads = ("TENANT", ">SIZE", ">FREE", ">QUOTA", ">VERSIONS", ">SAVES", ">PINS", "CLAIMS", "")
        output.table(heads, [_row(each) for each in found.tenants])
    if found.connections:
        output.line()
        rows = [
            (
                each.peer,
                each.tenant or "(greeting)",
                f"{each.seconds:.0f} s",
                str(each.pins),
                ", ".join(each.claims),
                each.saving,
            )
            for each in found.connections
        ]
        output.table(("PEER", "TENANT", ">FOR", ">PINS", "CLAIMS", "SAVING"), rows)


def kick(host: str, who: str, output: Output) -> None:
    """End connections."""
    count = _ask(host, Kick(who), RequestDone).count
    output.document({"ended": count})
    output.line(f"{count_text(count, 'connection')} ended")


def read_only(host: str, tenant: str, *, off: bool, output: Output) -> None:
    """Refuse a tenant's saves, or allow them again."""
    _ask(host, ReadOnly(tenant, not off), RequestDone)
    output.document({"tenant": tenant, "read_only": not off})
    output.line(f"{tenant}: {'saves may begin again' if off else 'read-only until --off'}")


def drain(host: str, *, off: bool, wait_s: float, output: Output) -> None:
    """Refuse all saves and wait for those in flight, or allow them again."""
    left = _ask(host, Drain(not off, wait_s), RequestDone, wait_s + 60).count
    output.document({"draining": not off, "saves": left})
    in_flight = f"no new saves; {count_text(left, 'save')} in flight"
    output.line("saves may begin again" if off else in_flight)
    output.code = BUSY if left else 0


def reopen(host: str, tenant: str, output: Output) -> None:
    """Open a pool again that accepts no more writes."""
    size = _ask(host, Reopen(tenant), RequestDone, None).count
    output.document({"tenant": tenant, "size": size})
    output.line(f"{tenant}: every byte is intact, and the pool is open again: {size_text(size)}")


def reload(host: str, output: Output) -> None:
    """Make the host read its files again."""
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
        state = ["accepts no writes: portus admin reopen"]
    elif tenant.read_only:
        state = ["read-only"]
    if tenant.mirror_missing:
        state.append(f"mirror {tenant.mirror_lag_s:.0f} s behind")
    return (
        tenant.tenant,
        size_text(tenant.size),
        size_text(tenant.free),
        "-" if tenant.quota is None else size_text(tenant.quota),
        str(tenant.versions),
        str(tenant.saves),
        str(tenant.pins),
        ", ".join(tenant.claims),
        "; ".join(state),
    )
