"""The place of a pool: the name that a user gives, read once, by one parser, wherever it is given.

``Place.parse`` reads it at the boundary: the argument of a ``Checkpointer`` or an adapter,
``$PORTUS_POOL``, an option of the command, a line of YAML. From there on a place is a value. Its
path is absolute, whatever becomes of the working directory, and no other code parses the text
again.
"""

from __future__ import annotations

import enum
import importlib
import os
import re
import stat
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from portus.errors import UsageError, mask
from portus.reach.media.dax import is_device
from portus.reach.media.names import fitting
from portus.reach.protocol.address import Address, is_address, parse

SUFFIX: Final = ".portus"
DEFAULT_DIRECTORY: Final = ".portus"
DIRECTORY_VARIABLE: Final = "PORTUS_POOL"

_URL: Final = re.compile(r"portus(?:\+\w+)?(?=:/)|[A-Za-z][A-Za-z0-9+.-]+(?=://|::)")
"""Two letters at least: ``C:`` is a drive."""

_USER: Final = re.compile(r"[^/@\s]+:[^/@]+@[^/@]+")
"""User information without a scheme."""


PlaceName: TypeAlias = str | os.PathLike[str] | Sequence[str]
"""The types by which a user may name a place; several names are addresses of storage hosts."""

_PART: Final = re.compile(r"(.+)(/rank-[0-9]+-of-[0-9]+)", re.DOTALL)
_QUOTED_MAX: Final = 220
"""Bytes of a model's name within a file name, which continues after it, up to 255."""

_COMMA: Final = re.compile(r"\s*,\s*(?=portus(?:\+\w+)?:)")
"""A comma between two addresses; the path of a socket may contain others."""


class PlaceKind(enum.Enum):
    """The kind of place that exists, or will be made."""

    FILE = "pool file"
    DIRECTORY = "pool directory"
    DEVICE = "device"
    HOST = "storage host"
    HOSTS = "several storage hosts"
    MIRROR = "mirror"
    """A mirror of models, at the address ``path``. Commands read it, and no run saves to it."""


@dataclass(frozen=True, slots=True)
class PlaceClasses:
    """The classes for a kind of place, as "module:class". They are imported when needed, since they
    are on a floor above. ``opened``: the ``OpenPlace``; None for several places, each of which has
    one. ``steps``: those of a ``Checkpointer`` there; None if nothing is saved there. ``home``: the
    versions of a training, as it sees them; None if there are none. ``is_local``: whether the place
    is on this machine's file systems."""

    opened: str | None
    steps: str | None
    home: str | None
    is_local: bool


def load_class(name: str | None) -> Any:
    """Import and return the class that a field of ``PlaceClasses`` names."""
    assert name is not None, "asked only where there is one"
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


_DIRECTORIES: Final = "portus.engine.paths.directory_steps:DirectorySteps"
_POOLS: Final = "portus.reach.pools.checkpointer:PoolSteps"
_HOMES: Final = "portus.reach.files.home"
_POOL: Final = PlaceClasses(
    "portus.reach.places.pool:PoolPlace", _POOLS, f"{_HOMES}:FileHome", True
)

PLACES: Final = {
    PlaceKind.DIRECTORY: PlaceClasses(
        "portus.reach.places.directory:DirectoryPlace", _DIRECTORIES, None, True
    ),
    PlaceKind.FILE: _POOL,
    PlaceKind.DEVICE: _POOL,
    PlaceKind.HOST: PlaceClasses(
        "portus.reach.places.pool:HostPlace", _POOLS, f"{_HOMES}:HostHome", False
    ),
    PlaceKind.HOSTS: PlaceClasses(None, _POOLS, None, False),
    PlaceKind.MIRROR: PlaceClasses("portus.reach.places.mirror:MirrorPlace", None, None, False),
}
"""Every kind of place. To add one: a line here, its module, and its test class."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a pool, or of several. ``path``: absolute; for a host, its address; for several
    hosts, all addresses, separated by commas."""

    kind: PlaceKind
    path: str

    @classmethod
    def parse(cls, pool: PlaceName | None, what: str = "pool") -> Place:
        """Return the place that a user names.

        That is a pool file (it exists, or ends in ``.portus``), a DAX device, the address of a
        storage host, or of several (a list, or with commas between), else a pool directory, made
        later. None: ``$PORTUS_POOL``, else ``.portus`` in the working directory.

        what: where the name was given, for errors. ``~`` is the home directory, as in a shell.
        Raises ``UsageError`` for an empty name, and for a URL of another kind.
        """
        if isinstance(pool, Place):
            return pool
        if pool is None:
            return cls.by_variable() or cls._at(os.path.abspath(DEFAULT_DIRECTORY))
        if isinstance(pool, Sequence) and not isinstance(pool, str | bytes):
            return cls._of_hosts(pool, what)
        if not isinstance(pool, str | os.PathLike):
            raise UsageError(
                f"{what}: expected a path, the address of a storage host, or a list of addresses, "
                f"found {pool!r:.80}"
            )
        text = os.fspath(pool)
        if not text:
            raise UsageError(
                f"{what}: expected a path or the address of a storage host, found {pool!r}; "
                f"omit it to use ${DIRECTORY_VARIABLE} or {DEFAULT_DIRECTORY}"
            )
        if is_address(text):
            return cls._of_hosts(_COMMA.split(text.strip()), what)
        return cls._at(local_path(text, what, hosts=True))

    @classmethod
    def of_files(cls, path: str) -> Place:
        """Return the place of the files in a directory, or of the one file, at an absolute path."""
        return cls(PlaceKind.DIRECTORY, path)

    @classmethod
    def by_variable(cls) -> Place | None:
        """Return the place that ``$PORTUS_POOL`` names, or None if it is not set, or empty."""
        text = os.environ.get(DIRECTORY_VARIABLE)
        return cls.parse(text, f"${DIRECTORY_VARIABLE}") if text else None

    @classmethod
    def of_pool(cls, said: Place | None) -> Place | None:
        """Return the pool that a user named: ``said``, else ``$PORTUS_POOL`` unless that names a
        directory. None if there is none."""
        named = cls.by_variable() if said is None else None
        return said if named is None or named.is_directory else named

    @classmethod
    def _of_hosts(cls, addresses: Sequence[str], what: str) -> Place:
        others = [each for each in addresses if not is_address(each)]
        if others or not addresses:
            raise UsageError(
                f"{what} {list(addresses)!r}: several pools are on storage hosts, as "
                f"portus://a,portus://b; found {repr(others[0]) if others else 'none'}"
            )
        hosts = dict.fromkeys(str(parse(each)) for each in addresses)
        return cls(PlaceKind.HOST if len(hosts) == 1 else PlaceKind.HOSTS, ",".join(hosts))

    @classmethod
    def _at(cls, path: str) -> Place:
        try:
            mode = os.stat(path).st_mode
        except OSError:  # not there yet, or the error is raised when it is opened
            is_file = path.endswith(SUFFIX) and os.path.basename(path) != SUFFIX
            return cls(PlaceKind.FILE if is_file else PlaceKind.DIRECTORY, path)
        if stat.S_ISCHR(mode) and is_device(path):
            return cls(PlaceKind.DEVICE, path)
        return cls(PlaceKind.DIRECTORY if stat.S_ISDIR(mode) else PlaceKind.FILE, path)

    @property
    def classes(self) -> PlaceClasses:
        """The classes for this kind of place."""
        return PLACES[self.kind]

    @property
    def local_path(self) -> str | None:
        """The path on this machine's file systems; None if the place is elsewhere."""
        return self.path if self.classes.is_local else None

    @property
    def local_pool(self) -> str | None:
        """The path of the place if it is one pool on this machine; else None."""
        return self.local_path if self.kind in (PlaceKind.FILE, PlaceKind.DEVICE) else None

    @property
    def is_shared(self) -> bool:
        """True if several processes may save there at the same time: on storage hosts."""
        return self.kind in (PlaceKind.HOST, PlaceKind.HOSTS)

    @property
    def hosts(self) -> list[Place]:
        """Each of the storage hosts; none if the place is on this machine's file systems."""
        if self.kind is PlaceKind.HOSTS:
            return [Place(PlaceKind.HOST, each) for each in _COMMA.split(self.path)]
        return [self] if self.is_shared else []

    @property
    def readable(self) -> list[Place]:
        """Places that may have versions: each of the ``hosts``, and each replica."""
        return [
            Place(PlaceKind.HOST, str(each)) for host in self.hosts for each in host.address.each
        ]

    def of_rank(self, rank: int) -> Place:
        """Return the place for one of several writers that save together: they spread over all
        storage hosts."""
        return self.hosts[rank % len(self.hosts)] if self.is_shared else self

    @property
    def is_directory(self) -> bool:
        """True if each writer gets a pool file of its own."""
        return self.kind is PlaceKind.DIRECTORY

    @property
    def address(self) -> Address:
        """The address of the host. Only a place that is one host has it."""
        assert self.kind is PlaceKind.HOST
        return parse(self.path)

    def pool_of(self, name: str) -> Place:
        """Return the one pool of the writer called ``name``."""
        return self.pool_in(quote(name) + SUFFIX) if self.is_directory else self

    def pool_in(self, name: str) -> Place:
        """Return the pool file of a name in the directory."""
        return Place(PlaceKind.FILE, os.path.join(self.path, name))

    def __str__(self) -> str:
        return self.path

    def __fspath__(self) -> str:
        return self.path


def local_path(path: str | os.PathLike[str], what: str, *, hosts: bool = False) -> str:
    """Return the absolute path on this machine's file systems that a user names; ``~`` as in a
    shell.

    what: where the name was given. hosts: whether a storage host would do as well. Raises
    ``UsageError`` for a URL, which would name a directory ``s3:`` here.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or "\0" in text:
        raise UsageError(f"{what}: expected a path, found {text!r:.80}")
    url = _URL.match(text)
    if url is None and _USER.match(text) and not os.path.lexists(text):
        raise UsageError(
            f"{what} {mask(text, is_address=True)!r}: expected a path, found what looks like an "
            "address with a password. Write ./ before it if it is a path; an address begins with "
            "its scheme, as portus://host"
        )
    if url is None:
        return os.path.abspath(os.path.expanduser(text))
    expected = "a path"
    if hosts:
        expected += ", or a storage host as portus://, portus+tls:// or portus+unix://"
    shown = mask(text, is_address=True)
    raise UsageError(
        f"{what} {shown!r}: expected {expected}, found a URL. {_advice(url[0], shown)}"
    )


def _advice(scheme: str, text: str) -> str:
    if scheme.lower() in ("file", "local"):
        return f"Leave {scheme}:// out: {text.partition('://')[2]}"
    if scheme.lower().startswith("portus"):
        return "The scheme of a storage host is written in small letters, on its own"
    return (
        "Portus does not save to object stores or other file systems by URL: name a path on "
        "this machine, and upload what `portus export` writes"
    )


def quote(name: str) -> str:
    """Return a model's name as it is in file names. The name of a part of a sharded model begins
    with that of the model. A very long one is cut, see ``names.fitting``."""
    found = _PART.fullmatch(name)
    model, part = (found[1], found[2]) if found else (name, "")
    start = fitting(urllib.parse.quote(model, safe=""), _QUOTED_MAX)
    return start + urllib.parse.quote(part, safe="")


def hosts_of(place: PlaceName | None) -> Place | None:
    """Return the storage hosts that ``place``, or else ``$PORTUS_POOL``, names, or None if it names
    another kind of place."""
    found = Place.by_variable() if place is None else Place.parse(place)
    return found if found is not None and found.is_shared else None
