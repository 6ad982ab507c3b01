"""Addresses of storage hosts: ``portus://host:7117``, ``portus+unix:///run/portus.sock``.

portus://[tenant@]host[:port]          tcp
portus+tls://[tenant@]host[:port]      tcp with TLS
portus+unix://[tenant@]/path/of/socket a unix socket of this machine
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from portus.errors import UsageError
from portus.protocol.messages import TENANT_SIZE_MAX

PORT: Final = 7117
TENANT: Final = "default"
"""Who says no tenant."""

_TENANT: Final = re.compile(rf"[A-Za-z0-9_.-]{{1,{TENANT_SIZE_MAX}}}")


class Scheme(enum.Enum):
    """How a host is reached."""

    TCP = "portus"
    TLS = "portus+tls"
    UNIX = "portus+unix"


class Transport(enum.Enum):
    """How bytes of tensors travel. AUTO: by verbs where both ends can, else over the socket."""

    AUTO = "auto"
    TCP = "tcp"
    VERBS = "verbs"

    @classmethod
    def of(cls, text: str, what: str) -> Transport:
        """The one that ``text`` names; "": AUTO. Raises ``UsageError``. what: where it was said."""
        try:
            return cls(text or cls.AUTO.value)
        except ValueError as error:
            raise UsageError(f"{what}={text!r:.40}: expected auto, tcp or verbs") from error


@dataclass(frozen=True, slots=True)
class Address:
    """``host`` and ``port`` of a tcp socket, or ``path`` of a unix socket."""

    scheme: Scheme
    tenant: str = TENANT
    host: str = ""
    port: int = PORT
    path: str = ""

    def __str__(self) -> str:
        who = "" if self.tenant == TENANT else f"{self.tenant}@"
        if self.scheme is Scheme.UNIX:
            return f"{self.scheme.value}://{who}{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme.value}://{who}{host}:{self.port}"


def is_address(pool: object) -> bool:
    """True if ``pool`` names a storage host, not a file."""
    return isinstance(pool, str) and re.match(r"portus(\+\w+)?:/", pool) is not None


def parse(text: str) -> Address:
    """The address that ``text`` says. Raises ``UsageError``."""
    scheme_text, _, rest = text.partition("://")
    try:
        scheme = Scheme(scheme_text)
    except ValueError as error:
        raise UsageError(f"{text}: {_EXPECTED}") from error
    who, at, place = rest.rpartition("@")
    tenant = checked_tenant(who) if at else TENANT
    if scheme is Scheme.UNIX:
        if not place.startswith("/") or "\0" in place:
            raise UsageError(f"{text}: {_EXPECTED}")
        return Address(scheme, tenant, path=place)
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]@]+)(?::(\d{1,5}))?/?", place)
    port = int(found[2]) if found and found[2] else PORT
    if found is None or not 0 <= port < 1 << 16:
        raise UsageError(f"{text}: {_EXPECTED}")
    return Address(scheme, tenant, found[1].strip("[]"), port)


def checked_tenant(name: str) -> str:
    """``name``, if a tenant may be called so. Raises ``UsageError``."""
    if not _TENANT.fullmatch(name) or name.startswith("."):
        raise UsageError(
            f"tenant {name!r:.80}: expected 1 to {TENANT_SIZE_MAX} letters, digits, '_', '-' "
            "or '.', no '.' in front"
        )
    return name


_EXPECTED: Final = (
    "expected portus://[tenant@]host[:port], portus+tls://[tenant@]host[:port] or "
    "portus+unix://[tenant@]/path/of/socket"
)
