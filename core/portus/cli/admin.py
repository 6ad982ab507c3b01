"""``portus admin``: looking after a storage host of this machine. No torch."""

from __future__ import annotations

import msgspec

from portus.cli.output import BUSY, Output, count_text, size_text
from portus.daemon.admin import (
    Answer,
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
from portus.errors import TransportError


def show(host: str, output: Output) -> int:
    """How the host is; the exit code."""
    found = ask(host, Look())
    if not isinstance(found, HostStatus):
        raise _other(host, found)
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
    return 0


def kick(host: str, who: str, output: Output) -> int:
    """End connections; the exit code."""
    done = _done(host, Kick(who))
    output.document({"ended": done.count})
    output.line(f"{count_text(done.count, 'connection')} ended")
    return 0


def read_only(host: str, tenant: str, *, off: bool, output: Output) -> int:
    """Begin no save of a tenant, or do again; the exit code."""
    _done(host, ReadOnly(tenant, not off))
    output.document({"tenant": tenant, "read_only": not off})
    output.line(f"{tenant}: {'saves may begin again' if off else 'read-only until --off'}")
    return 0


def drain(host: str, *, off: bool, wait_s: float, output: Output) -> int:
    """Begin no save of anybody and wait for those under way, or do again; the exit code."""
    left = _done(host, Drain(not off, wait_s), wait_s + 60).count
    output.document({"draining": not off, "saves": left})
    if off:
        output.line("saves may begin again")
    else:
        output.line(f"no new saves; {count_text(left, 'save')} in flight")
    return BUSY if left else 0


def reopen(host: str, tenant: str, output: Output) -> int:
    """Open a pool again that accepts no more writes; the exit code."""
    size = _done(host, Reopen(tenant), None).count
    output.document({"tenant": tenant, "size": size})
    output.line(f"{tenant}: every byte is intact, and the pool is open again: {size_text(size)}")
    return 0


def reload(host: str, output: Output) -> int:
    """Have it read its files again; the exit code."""
    _done(host, Reload())
    output.document({"reloaded": True})
    output.line("secrets, quotas and certificates were read again")
    return 0


def _done(host: str, asked: Asked, wait_s: float | None = 60.0) -> RequestDone:
    answer = ask(host, asked, wait_s)
    if not isinstance(answer, RequestDone):
        raise _other(host, answer)
    return answer


def _other(host: str, answer: Answer) -> TransportError:
    return TransportError(f"{host}: {answer.__struct_config__.tag} was not expected")


def _row(tenant: Tenant) -> tuple[str, ...]:
    state = "accepts no writes: portus admin reopen" if tenant.poisoned else ""
    if tenant.read_only and not state:
        state = "read-only"
    if tenant.mirror_missing:
        lag = f"mirror {tenant.mirror_lag_s:.0f} s behind"
        state = f"{state}; {lag}" if state else lag
    return (
        tenant.tenant,
        size_text(tenant.size),
        size_text(tenant.free),
        "-" if tenant.quota is None else size_text(tenant.quota),
        str(tenant.versions),
        str(tenant.saves),
        str(tenant.pins),
        ", ".join(tenant.claims),
        state,
    )
