"""Resolution of a pointer to the file that it leads to.

V6: a pointer may come from a stranger, so it does not choose what is opened. A pool is opened only
if it is

1. configured: by ``$PORTUS_POOL``, or allowed by the program. That a configured place has the
   version is enough: it may have been filled from a mirror.
2. where the pointer says, on this machine: a regular file called ``*.portus``, or a DAX device. It
   is read only, and must have the identity that the pointer names.

A storage host is asked only if its address is configured: what a pointer says of hosts is for
people to read. What is loaded is verified.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Final, TypeVar

from portus.companions.job.stock import say_once
from portus.errors import (
    BusyError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
    printable,
)
from portus.reach.files.reference import read
from portus.reach.format.reference import Reference, decode, decode_text
from portus.reach.index.directory import pools_at
from portus.reach.index.place import SUFFIX, Place, PlaceName
from portus.reach.media.dax import is_device

if TYPE_CHECKING:
    from portus.engine.loading.open_file import OpenFile
    from portus.reach.index.reader import PoolReader
    from portus.reach.index.records import VersionEntry

Result = TypeVar("Result")

_log: Final = logging.getLogger("portus")

_TRIES: Final = 100
"""A load starts again when its file was replaced before its version was pinned, this often."""


class KnownPools:
    """The places to which pointers may lead in this process. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._allowed: list[Place] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_lock)

    def allow(self, place: Place) -> None:
        """Let pointers lead to the pool, or the pools, at ``place``."""
        with self._guard:
            if place not in self._allowed:
                self._allowed.append(place)

    def allowed_places(self) -> list[Place]:
        """What is configured: ``$PORTUS_POOL`` first."""
        variable = Place.by_variable()
        with self._guard:
            return ([variable] if variable else []) + self._allowed

    def _forget_lock(self) -> None:
        self._guard = threading.RLock()


POOLS: Final = KnownPools()
"""The pools that this process knows."""


def allow(pool: PlaceName) -> None:
    """Let pointers lead to ``pool``: a pool file, a device, or storage hosts.

    A process that saves there, or for which ``$PORTUS_POOL`` names it, need not say so.
    """
    POOLS.allow(Place.parse(pool))


def load_text(text: str) -> object:
    """What ``torch.load`` gets for the string in a pointer. Raises as ``use_reference``."""
    from portus.reach.pools.restore import load  # it is heavy, and most programs load files

    reference = decode_text(text)
    # torch passes nothing but the string, so what else was asked for is on the stack.
    asked = _arguments_of_torch_load(sys._getframe(1))
    path = _path_of(asked.get("f"))
    if asked.get("mmap"):
        say_once(
            _log,
            f"{path or 'what is loaded'} is a pointer: mmap=True has no effect, all of its state "
            "is read into memory. portus export makes a file that can be mapped",
        )
    weights_only = asked.get("weights_only")
    asked_only = weights_only if isinstance(weights_only, bool) else None
    asked_meta = str(asked.get("map_location")) == "meta"
    return _use(
        reference,
        path,
        lambda reader, entry, found: load(
            reader,
            entry,
            file=found.part,
            weights_only=asked_only,
            map_location="meta" if asked_meta else "cpu",
        ),
    )


def is_reference(path: str | os.PathLike[str]) -> bool:
    """True if a pointer is at ``path``. Reads nothing of a large file.

    Raises ``CorruptionError`` for a damaged pointer.
    """
    return read(path) is not None


def read_reference(path: str | os.PathLike[str]) -> Reference | None:
    """What the file at ``path`` says, if it is a pointer: of which model and step it is, and which
    version, by its ``token``. None if it is none. Opens no pool. Raises ``CorruptionError`` for a
    damaged one, ``MediumError``."""
    return read(path)


def use_reference(
    path: str | os.PathLike[str], use: Callable[[PoolReader, VersionEntry, Reference], Result]
) -> Result:
    """What ``use`` gives for the version that the pointer at ``path`` leads to, and for what that
    says. Called again if the pointer is replaced meanwhile.

    Raises ``UsageError`` if there is no pointer, if its pool may not be opened (the message says
    what allows it) or does not have its version; ``CorruptionError``, ``MediumError``,
    ``TransportError``.
    """
    absolute = os.path.abspath(os.fspath(path))
    reference = read(absolute)
    if reference is None:
        raise UsageError(f"{printable(absolute)}: there is no pointer")
    return _use(reference, absolute, use)


def is_removed(reference: Reference, path: str) -> bool:
    """True if the pool that a pointer at ``path`` leads to is there, without its version; False
    also if it cannot be asked."""
    try:
        _use(reference, path, lambda *_: None)
    except _RemovedError:
        return True
    except PortusError:
        return False
    return False


def use_pointer(path: str, act: Callable[[OpenFile], Result]) -> Result:
    """Return what ``act`` gives for the file in a pool that the pointer at ``path`` leads to."""
    from portus.reach.pools.version_file import files_opened  # it is heavy

    def use(reader: PoolReader, entry: VersionEntry, reference: Reference) -> list[Result]:
        with files_opened(reader, entry, reference.part) as found:
            return [act(file) for file in found.values()][:1]

    for result in use_reference(path, use):
        return result
    raise UsageError(f"{printable(path)} refers to a version that has no files")


def is_pointer_good(data: bytes, path: str) -> bool:
    """Return whether the pointer with the bytes ``data`` is whole, and is not known to lead to
    nothing from ``path``. Raises ``CorruptionError`` for a damaged one."""
    pointer = decode(data)
    return pointer is None or not is_removed(pointer, path)


class _RemovedError(UsageError):
    """A pool does not have a version any more."""


def _use(
    reference: Reference,
    path: str | None,
    use: Callable[[PoolReader, VersionEntry, Reference], Result],
) -> Result:
    for _ in range(_TRIES):
        failure: PortusError | None = None
        was_found = False
        token = bytes.fromhex(reference.token)
        for place, is_allowed in _candidates(reference, path):
            has_replica = place.has_replica
            if has_replica and failure is None:
                continue  # both answered
            try:
                with contextlib.closing(_open(place, reference, has_replica)) as reader:
                    is_it = reader.superblock.uuid.hex() == reference.pool
                    was_found = was_found or is_it
                    for entry in reader.catalogue().entries() if is_it or is_allowed else ():
                        if entry.info.token == token:
                            return use(reader, entry, reference)
            except StaleError:
                was_found = True
            except (TransportError, BusyError, UsageError, MediumError) as error:
                if not is_allowed:
                    raise
                failure = failure or error
        # Since it was read, a training may have replaced it, and released its version.
        newer = read(path) if path else None  # replaced since it was read?
        if newer is None or newer.id == reference.id:
            raise failure or _missing(reference, path, was_found=was_found)
        reference = newer
    raise StaleError(f"{path} was replaced {_TRIES} times while it was loaded; load again")


def _missing(reference: Reference, path: str | None, *, was_found: bool) -> PortusError:
    what = f"{printable(path) if path else 'this pointer'}"
    if was_found:
        return _RemovedError(
            f"{what}: step {reference.step} of model {reference.model!r} is not in "
            f"{reference.pool_path} any more: it was removed there, or the pool is an older copy. "
            f"`portus ls {reference.pool_path}` lists what the pool holds"
        )
    return UsageError(
        f"{what} refers to pool {reference.pool}, at {reference.pool_path}, and a pointer alone "
        f"may not choose what is opened, or another pool is there. If you trust it, set "
        f"PORTUS_POOL={reference.pool_path} (or wherever the pool is now) and load again"
    )


def _candidates(reference: Reference, path: str | None) -> Iterator[tuple[Place, bool]]:
    """Where the version may be, and whether that is configured."""
    seen = set()
    for place in POOLS.allowed_places():
        pools = place.readable
        with contextlib.suppress(UsageError):  # it may have been moved
            pools = pools or pools_at(place)
        for each in pools:
            seen.add(each.path)
            yield each, True
    hosts = [host for place in POOLS.allowed_places() for host in place.hosts]
    yield from ((host, True) for host in hosts if host.has_replica)
    named = [reference.pool_path]
    # Also by the way from the pointer to the pool: a run may have been moved as a whole.
    if path is not None and not reference.pool_relative.startswith("portus"):
        where = os.path.dirname(os.path.realpath(path))
        named.append(os.path.normpath(os.path.join(where, *reference.pool_relative.split("/"))))
    for each_path in dict.fromkeys(named):
        place_here = _here(each_path)
        if place_here is not None and each_path not in seen:
            yield place_here, False


def _here(path: str) -> Place | None:
    """The pool at a path of this machine that a pointer names; None for what it may not choose."""
    if not os.path.isabs(path) or path.startswith("//"):
        return None
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return None
    is_file = stat.S_ISREG(mode) and path.endswith(SUFFIX)
    is_pool = is_file or (stat.S_ISCHR(mode) and is_device(path))
    return Place.parse(path) if is_pool else None


def _open(place: Place, reference: Reference, has_replica: bool) -> PoolReader:
    """The pool at a place; of a host that is gone, that of its replica, which leads from then on.
    Raises what opening raises."""
    from portus.reach.files.home import open_place  # they are heavy
    from portus.reach.files.host import HostPool

    if has_replica:
        return HostPool(place.path, reference.model, claim_s=0)
    return open_place(place)


def _arguments_of_torch_load(frame: FrameType | None) -> dict[str, object]:
    """What ``torch.load`` up the stack was called with; nothing if it was not called."""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name == "torch.serialization" and frame.f_code.co_name == "load":
            return frame.f_locals
        frame = frame.f_back
    return {}


def _path_of(source: object) -> str | None:
    """The path of what was given to ``torch.load``: a path, or a file that knows its own."""
    for _ in range(8):  # wrappers of wrappers
        if isinstance(source, str | os.PathLike):
            path = os.path.abspath(os.fsdecode(source))
            return path if os.path.isfile(path) else None
        if source is None:
            return None
        named = getattr(source, "path", None) or getattr(source, "name", None)
        inner = getattr(source, "f", None) or getattr(source, "raw", None)
        source = named if isinstance(named, str | os.PathLike) else inner
    return None
