"""Addresses of storage hosts: ``portus://host:7117``, ``portus+unix:///run/portus.sock``.

portus://[tenant@]host[:port]          tcp
portus+tls://[tenant@]host[:port]      tcp with TLS
portus+unix://[tenant@]/path/of/socket a unix socket of this machine

A host and its replica are two hosts with a plus between: ``portus://[tenant@]a[:port]+b[:port]``.
No name of a host has a plus, no shell reads it, and commas are for hosts side by side.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from typing import Final

from portus.errors import UsageError, mask
from portus.reach.protocol.messages import TENANT_SIZE_MAX

PORT: Final = 7117
TENANT: Final = "default"
"""The tenant of an address that names none."""

_TENANT: Final = re.compile(rf"[A-Za-z0-9_.-]{{1,{TENANT_SIZE_MAX}}}")


class Scheme(enum.Enum):
    """The way to reach a host."""

    TCP = "portus"
    TLS = "portus+tls"
    UNIX = "portus+unix"


class Transport(enum.Enum):
    """The way of tensors' bytes. AUTO: by verbs if both ends can, else over the socket."""

    AUTO = "auto"
    TCP = "tcp"
    VERBS = "verbs"

    @classmethod
    def of(cls, text: str, what: str) -> Transport:
        """Return the transport that ``text`` names; "": AUTO. Raise ``UsageError`` for any other
        text. what: where it was given."""
        try:
            return cls(text or cls.AUTO.value)
        except ValueError as error:
            raise UsageError(f"{what}={text!r:.40}: expected auto, tcp or verbs") from error


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a host. ``host`` and ``port`` of a tcp socket, or ``path`` of a unix socket.
    ``second``: host and port of the replica, reached like the first one; None if there is none."""

    scheme: Scheme
    tenant: str = TENANT
    host: str = ""
    port: int = PORT
    path: str = ""
    second: tuple[str, int] | None = None

    def __str__(self) -> str:
        who = "" if self.tenant == TENANT else f"{self.tenant}@"
        if self.scheme is Scheme.UNIX:
            return f"{self.scheme.value}://{who}{self.path}"
        hosts = [(self.host, self.port), *([self.second] if self.second else [])]
        return f"{self.scheme.value}://{who}{'+'.join(_place(*each) for each in hosts)}"

    @property
    def each(self) -> list[Address]:
        """An address for each host alone, the first host first."""
        if self.second is None:
            return [self]
        host, port = self.second
        first = replace(self, second=None)
        return [first, replace(first, host=host, port=port)]


def is_address(pool: object) -> bool:
    """Return whether ``pool`` names a storage host, not a file."""
    return isinstance(pool, str) and re.match(r"portus(\+\w+)?:/", pool) is not None


def parse(text: str) -> Address:
    """Return the address in ``text``. Raise ``UsageError`` if it is none."""
    scheme_text, _, rest = text.partition("://")
    if scheme_text not in {each.value for each in Scheme}:
        raise UsageError(f"{_printable(text)}: {_EXPECTED}")
    scheme = Scheme(scheme_text)
    who, at, place = rest.rpartition("@")
    tenant = check_tenant(who) if at else TENANT
    if scheme is Scheme.UNIX:
        if not place.startswith("/") or "\0" in place:
            raise UsageError(f"{_printable(text)}: {_EXPECTED}")
        return Address(scheme, tenant, path=place)
    hosts = [_parse(each, text) for each in place.removesuffix("/").split("+")]
    if len(hosts) > 2 or len(set(hosts)) != len(hosts):
        raise UsageError(
            f"{_printable(text)}: expected a host and its replica, as portus://a:7117+b:7117"
        )
    return Address(scheme, tenant, *hosts[0], second=hosts[1] if len(hosts) > 1 else None)


def _printable(text: str) -> str:
    return mask(text, is_address=True)


def _parse(place: str, text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]@]+)(?::(\d{1,5}))?", place)
    port = int(found[2]) if found and found[2] else PORT
    if found is None or not 0 <= port < 1 << 16:
        raise UsageError(f"{_printable(text)}: {_EXPECTED}")
    return found[1].strip("[]"), port


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_tenant(name: str) -> bool:
    """Return whether ``name`` is valid for a tenant."""
    return _TENANT.fullmatch(name) is not None and not name.startswith(".")


def check_tenant(name: str) -> str:
    """Return ``name`` if it is valid for a tenant. Raise ``UsageError`` if not."""
    if not is_tenant(name):
        # The text may be "user:password", which must not reach a log.
        shown = name.partition(":")[0] + (":***" if ":" in name else "")
        raise UsageError(
            f"tenant {shown!r:.80}: expected 1 to {TENANT_SIZE_MAX} letters, digits, '_', '-' "
            "or '.', no leading '.'"
        )
    return name


_EXPECTED: Final = (
    "expected portus://[tenant@]host[:port], portus+tls://[tenant@]host[:port] or "
    "portus+unix://[tenant@]/path/of/socket; with a replica portus://host:port+host:port"
)
