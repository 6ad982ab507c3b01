"""Addresses of mirrors: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///path``,
``memory:``.

A URL names only a place. The environment has the credentials, as for every other program: URLs are
written into logs, scripts and histories of shells.
"""

from __future__ import annotations

import enum
import os
import re
from dataclasses import dataclass
from typing import Final

from portus.errors import UsageError, mask, printable
from portus.reach.protocol.address import is_address

MIRROR_VARIABLE: Final = "PORTUS_MIRROR"
"""The variable that names the mirror of all runs that name none."""

UNMIRRORED: Final = "none"
"""The setting of a run without a mirror, whatever the environment says."""

EXPECTED: Final = (
    "expected s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///path"
)

_FORM: Final = re.compile(r"(s3|gs|az)://([^/]*)(?:/(.*))?|(file)://(/.*)|(memory):(.*)", re.DOTALL)
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


class StoreKind(enum.Enum):
    """The kinds of stores, by their schemes."""

    S3 = "s3"
    GOOGLE = "gs"
    AZURE = "az"
    FOLDER = "file"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A place for objects. ``bucket`` (Azure: container); ``prefix``: the beginning of all names,
    without slashes at its ends; of a folder, its absolute path; of memory, its name."""

    kind: StoreKind
    bucket: str
    prefix: str

    def __str__(self) -> str:
        if self.kind is StoreKind.MEMORY:
            return f"memory:{self.prefix}"
        if self.kind is StoreKind.FOLDER:
            return f"file://{self.prefix}"
        return f"{self.kind.value}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def is_store(text: str) -> bool:
    """Return whether ``text`` has the form of a store's address, right or wrong."""
    return re.match(r"(?:s3|gs|az|file)://|memory:", text) is not None


def parse(text: str, what: str = "mirror") -> StoreAddress:
    """Return the address in ``text``. what: its source, for messages. Raises ``UsageError``,
    without the text if that may hold a secret."""
    if is_address(text):
        shown = mask(text, is_address=True)
        raise UsageError(
            f"{what} {shown!r}: a storage host is no mirror: {EXPECTED}. Save to a host "
            "with pool=; `portus serve --replica` copies one host to another"
        )
    _refuse_secrets(text, what)
    found = _FORM.fullmatch(text)
    if found is None or not text.isprintable():
        shown = printable(mask(text, is_address=True))
        raise UsageError(f"{what} {shown!r:.200}: {EXPECTED}")
    if found[6]:
        return StoreAddress(StoreKind.MEMORY, "", found[7])
    if found[4]:
        return StoreAddress(StoreKind.FOLDER, "", _segments(text, found[5], what, "/"))
    if not _BUCKET.fullmatch(found[2]):
        raise UsageError(
            f"{what} {mask(text, is_address=True)!r}: that is not the name of a bucket; {EXPECTED}"
        )
    return StoreAddress(StoreKind(found[1]), found[2], _segments(text, found[3] or "", what, ""))


def mirror_of(said: str | None) -> StoreAddress | None:
    """Return the mirror of a setting, else of ``$PORTUS_MIRROR``; None without one. Raises
    ``UsageError`` for text that is not an address."""
    text = said if said is not None else os.environ.get(MIRROR_VARIABLE) or UNMIRRORED
    if text == UNMIRRORED:
        return None
    return parse(text, "mirror" if said is not None else f"${MIRROR_VARIABLE}")


def _refuse_secrets(text: str, what: str) -> None:
    """Raise ``UsageError``, without the text, for a URL with parts that are mostly secrets."""
    scheme, there, rest = text.partition("://")
    if not there or scheme == StoreKind.FOLDER.value:
        return
    authority = rest.partition("/")[0]
    for mark, name in (("@", "a user or a password"), ("?", "a query"), ("#", "a fragment")):
        if mark in (authority if mark == "@" else rest):
            raise UsageError(
                f"{what}: a {scheme[:10]}:// URL with {name}; expected only bucket and prefix. "
                "Credentials are taken from the environment (AWS_ACCESS_KEY_ID and others)"
            )


def _segments(text: str, path: str, what: str, root: str) -> str:
    """Return ``path`` without empty segments. Raise ``UsageError`` if it climbs."""
    segments = [each for each in path.split("/") if each]
    if any(each in (".", "..") for each in segments):
        raise UsageError(f"{what} {text!r}: expected a path without '.' and '..'")
    return root + "/".join(segments)
