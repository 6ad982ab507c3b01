"""Where a pool is: what a user names, read once, by one parser, wherever it is said.

``Place.named`` reads it at the boundary: the argument of a ``Checkpointer`` or an adapter,
``$PORTUS_POOL``, an option of the command, a line of YAML. From there on a place is a value: it is
absolute, whatever becomes of the working directory, and nobody asks text again what it is.
"""

from __future__ import annotations

import enum
import os
import re
import stat
import urllib.parse
from dataclasses import dataclass
from typing import Final

from portus.errors import UsageError
from portus.media.dax import is_device
from portus.protocol.address import Address, is_address, parse

SUFFIX: Final = ".portus"
DEFAULT_DIRECTORY: Final = ".portus"
DIRECTORY_VARIABLE: Final = "PORTUS_POOL"

_URL: Final = re.compile(r"portus(?:\+\w+)?(?=:/)|[A-Za-z][A-Za-z0-9+.-]+(?=://|::)")
"""Two letters at least: ``C:`` is a drive."""


class PlaceKind(enum.Enum):
    """What is there, or will be made."""

    FILE = "pool file"
    DIRECTORY = "pool directory"
    DEVICE = "device"
    HOST = "storage host"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pool is, or several are. ``path`` is absolute; of a host, its whole address."""

    kind: PlaceKind
    path: str

    @classmethod
    def named(cls, pool: str | os.PathLike[str] | Place | None, what: str = "pool") -> Place:
        """The place that a user names: a pool file (it exists, or ends in ``.portus``), a DAX
        device, the address of a storage host, else a pool directory, made later. None:
        ``$PORTUS_POOL``, else ``.portus`` in the working directory.

        what: where it was said, for errors. ``~`` is the home directory, as in a shell. Raises
        ``UsageError`` for an empty name, and for a URL that is none of ours.
        """
        if isinstance(pool, Place):
            return pool
        if pool is None:
            return cls.by_variable() or cls._at(os.path.abspath(DEFAULT_DIRECTORY))
        text = os.fspath(pool)
        if not text:
            raise UsageError(
                f"{what}: expected a path or the address of a storage host, found {pool!r}; leave "
                f"it out, and it is ${DIRECTORY_VARIABLE} or {DEFAULT_DIRECTORY}"
            )
        if is_address(text):
            return cls(PlaceKind.HOST, str(parse(text)))
        return cls._at(local_path(text, what, hosts=True))

    @classmethod
    def by_variable(cls) -> Place | None:
        """The place that ``$PORTUS_POOL`` names; None if it is not set, or empty."""
        text = os.environ.get(DIRECTORY_VARIABLE)
        return cls.named(text, f"${DIRECTORY_VARIABLE}") if text else None

    @classmethod
    def _at(cls, path: str) -> Place:
        try:
            mode = os.stat(path).st_mode
        except OSError:  # not there yet, or whoever opens it says why not
            is_file = path.endswith(SUFFIX) and os.path.basename(path) != SUFFIX
            return cls(PlaceKind.FILE if is_file else PlaceKind.DIRECTORY, path)
        if stat.S_ISCHR(mode) and is_device(path):
            return cls(PlaceKind.DEVICE, path)
        return cls(PlaceKind.DIRECTORY if stat.S_ISDIR(mode) else PlaceKind.FILE, path)

    @property
    def is_host(self) -> bool:
        """True for a storage host: nothing of it lies on this machine's file systems."""
        return self.kind is PlaceKind.HOST

    @property
    def is_directory(self) -> bool:
        """True where each writer gets a pool file of its own."""
        return self.kind is PlaceKind.DIRECTORY

    @property
    def is_for_many(self) -> bool:
        """True where several writers save side by side, each to a pool or a model of its own."""
        return self.is_directory or self.is_host

    @property
    def address(self) -> Address:
        """Of a host."""
        assert self.is_host
        return parse(self.path)

    def pool_of(self, name: str) -> Place:
        """The one pool of the writer called ``name``."""
        if not self.is_directory:
            return self
        file = urllib.parse.quote(name, safe="") + SUFFIX
        return Place(PlaceKind.FILE, os.path.join(self.path, file))

    def __str__(self) -> str:
        return self.path

    def __fspath__(self) -> str:
        return self.path


def local_path(path: str | os.PathLike[str], what: str, *, hosts: bool = False) -> str:
    """The absolute path on this machine's file systems that a user names; ``~`` as in a shell.

    what: where it was said. hosts: whether a storage host would do as well. Raises ``UsageError``
    for a URL, which would name a directory ``s3:`` here.
    """
    text = os.fspath(path)
    url = _URL.match(text) if isinstance(text, str) else None
    if url is None:
        return os.path.abspath(os.path.expanduser(text))
    expected = "a path"
    if hosts:
        expected += ", or a storage host as portus://, portus+tls:// or portus+unix://"
    raise UsageError(f"{what} {text!r}: expected {expected}, found a URL. {_advice(url[0], text)}")


def _advice(scheme: str, text: str) -> str:
    if scheme.lower() in ("file", "local"):
        return f"Leave {scheme}:// out: {text.partition('://')[2]}"
    if scheme.lower().startswith("portus"):
        return "The scheme of a storage host is written in small letters, on its own"
    return (
        "Portus writes to no object store or other file system by URL: name a place of this "
        "machine, and upload what `portus materialize` makes of it"
    )
