"""The errors that Portus raises on purpose, by who has to act.

A message says what, where, expected, found, and what to do. Foreign errors (``OSError``) become one
of these at the seam where they arise (``media``, ``transport``), with ``from``. Text from outside
goes through ``printable`` first. No message has the user information of an address: messages quote
refused addresses, which may hold a password.
"""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "***"
"""The text in place of a secret."""

_SCHEME: Final = r"[A-Za-z][A-Za-z0-9+.\-]*:/{1,3}"
_QUOTED: Final = re.compile(
    rf"(?P<quote>['\"])(?P<start>{_SCHEME})(?P<rest>(?:\\.|(?!(?P=quote)).)*)", re.S
)
_BARE: Final = re.compile(
    rf"(?P<start>{_SCHEME})"
    r"(?P<rest>[^\s/@:]*:(?![\d\s])(?:(?!://|: )[^\n])*?@[^\s'\"<>]*|[^\s'\"<>]*)"
)
_USER: Final = re.compile(r"(^|[\s/'\"(\[,])[^\s/@:'\"(\[,]+:[^\s/@'\"]+@(?=[A-Za-z\[])")
"""User information without a scheme. The text after the @ of a step is a number."""

_WHOLE: Final = re.compile(rf"(?P<start>{_SCHEME}|)(?P<rest>.*)", re.S)
_AUTHORITY: Final = re.compile(r"[^/?#]*")
_TENANT: Final = re.compile(r"[\[A-Za-z0-9_.-]*")  # with a bracket in what explains the form
_CUT_MIN: Final = 100
"""Characters of an authority without an @ from which it may have been cut off."""
_HOSTS: Final = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d{0,5})?(\+.*)?", re.S)


def mask(text: str, *, is_address: bool = False) -> str:
    """Return ``text`` with ``***`` for possible secrets in its addresses: users and passwords,
    queries and fragments. A tenant of a storage host is not a secret.

    is_address: the whole text is one address, valid or not; it may lack the scheme.
    """
    if is_address:
        return _WHOLE.sub(_mask_address, text, count=1)
    if "@" not in text and ":/" not in text:
        return text
    text = _BARE.sub(_mask_address, _QUOTED.sub(_mask_address, text))
    return _USER.sub(rf"\1{HIDDEN}@", text)


def _mask_address(found: re.Match[str]) -> str:
    start, rest = found["start"], re.sub("%40", "@", found["rest"], flags=re.I)
    quote = found.groupdict().get("quote") or ""
    authority = _AUTHORITY.match(rest)[0]  # type: ignore[index]  # it may be empty
    user, at, host = authority.rpartition("@")
    if at:
        is_tenant = start.lower().startswith("portus") and _TENANT.fullmatch(user)
        rest = (user if is_tenant else HIDDEN) + at + host + rest[len(authority) :]
    elif start and not _HOSTS.fullmatch(authority):  # a slash in a password, or it is cut off
        user, at, host = rest.rpartition("@")
        if at:
            rest = f"{HIDDEN}@{host}"
        elif len(authority) >= _CUT_MIN:
            rest = f"{authority.partition(':')[0]}:{HIDDEN}"
    elif not start and "@" in rest and ":" in rest.partition("@")[0]:
        rest = f"{HIDDEN}@{rest.rpartition('@')[2]}"
    if start:
        rest = re.sub(r"([?#]).*", rf"\1{HIDDEN}", rest, count=1, flags=re.S)
    return quote + start + rest


def printable(text: str) -> str:
    """Return ``text`` with escapes for characters that are not seen as they are: those that move a
    terminal's cursor or end a line, that change the direction of text, and surrogates."""
    if text.isprintable():
        return text
    escaped = (each if each.isprintable() else ascii(each)[1:-1] for each in text)
    return "".join(escaped)


class PortusError(Exception):
    """The root of all errors. Never raised itself."""

    def __new__(cls, *arguments: object, **_: object) -> PortusError:
        return super().__new__(cls, *map(_safe, arguments))  # OSError takes its own from here

    def __init__(self, *arguments: object) -> None:
        super().__init__(*map(_safe, arguments))


def _safe(argument: object) -> object:
    return mask(argument) if isinstance(argument, str) else argument


class UsageError(PortusError, ValueError):
    """The caller must change the call (or the version of Portus, or the configuration)."""


class NoCheckpointError(UsageError):
    """The error of a load that found no checkpoint: the job may start fresh."""


class MediumError(PortusError, OSError):
    """The operator must look at the machine: no space, no permission, a failing disk."""


class BusyError(MediumError):
    """Another process, which the message names, holds the pool for writing. Try again later."""


class StaleError(PortusError):
    """The version was retired during the read. Ask for the newest again."""


class AbandonedError(PortusError):
    """The error of a save that was given up (fence time-out, audit, shutdown). Older versions are
    untouched."""


class TransportError(PortusError, ConnectionError):
    """Nothing took effect; the same call may be tried again."""


class CorruptionError(PortusError):
    """Bytes break the format or fail their checksum. Never retried or repaired in silence."""
