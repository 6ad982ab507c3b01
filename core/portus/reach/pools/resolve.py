"""Resolution of a pointer to its file.

V6: a pointer may come from a stranger, so it does not choose what is opened. A pool is opened only
if it is

1. configured: by ``$PORTUS_POOL``, or allowed by the program. A configured place that has the
   version is enough: it may have been filled from a mirror.
2. at the place in the pointer, on this machine: a regular file called ``*.portus``, or a DAX
device.
   It is read only, and must have the identity in the pointer.

A storage host is asked only if its address is configured: the hosts in a pointer are for people to
read. The loaded bytes are verified.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
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
from portus.reach.files.reference import read_reference
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
"""The most times that a load starts again because its pointer was replaced before its version was
pinned."""


ALLOWED: Final[list[Place]] = []
"""The places that this process allows."""


def allow(pool: PlaceName) -> None:
    """Let pointers refer to ``pool``: a pool file, a device, or storage hosts.

    A process that saves there, or for which ``$PORTUS_POOL`` names it, need not call this.
    """
    place = Place.parse(pool)
    if place not in ALLOWED:
        ALLOWED.append(place)


def load_text(text: str) -> object:
    """Return the state for the string in a pointer, which ``torch.load`` then returns. Raises as
    ``use_reference``."""
    from portus.reach.pools.restore import load  # it is heavy, and most programs load files

    reference = decode_text(text)
    # torch passes only the string, so its other arguments are read from the stack.
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


def use_reference(
    path: str | os.PathLike[str], use: Callable[[PoolReader, VersionEntry, Reference], Result]
) -> Result:
    """Return the result of ``use`` for the version of the pointer at ``path``, and for the pointer.
    ``use`` is called again if the pointer is replaced meanwhile.

    Raises ``UsageError`` if there is no pointer, if its pool may not be opened (the message says
    what allows it) or does not have its version; ``CorruptionError``, ``MediumError``,
    ``TransportError``.
    """
    absolute = os.path.abspath(os.fspath(path))
    reference = read_reference(absolute)
    if reference is None:
        raise UsageError(f"{printable(absolute)}: there is no pointer")
    return _use(reference, absolute, use)


def use_pointer(path: str, act: Callable[[OpenFile], Result]) -> Result:
    """Return the result of ``act`` for the file in a pool that the pointer at ``path`` refers
    to."""
    from portus.reach.versions.open_version import open_version  # it is heavy

    def use(reader: PoolReader, entry: VersionEntry, reference: Reference) -> Result:
        with open_version(reader, entry) as version:
            return act(version.file(reference.part))

    return use_reference(path, use)


def is_pointer_good(data: bytes, path: str) -> bool:
    """Return whether the pointer with the bytes ``data``, at ``path``, is intact and not known to
    refer to a removed version. Raises ``CorruptionError`` for a damaged one."""
    pointer = decode(data)
    try:
        if pointer is not None:
            _use(pointer, path, lambda *_: None)
    except _RemovedError:
        return False
    except PortusError:
        return True  # the pool cannot be opened
    return True


class _RemovedError(UsageError):
    """A pool no longer has a version."""


def _use(
    reference: Reference,
    path: str | None,
    use: Callable[[PoolReader, VersionEntry, Reference], Result],
) -> Result:
    from portus.reach.files.home import open_place  # it is heavy

    for _ in range(_TRIES):
        failure: PortusError | None = None
        was_found = False
        token = bytes.fromhex(reference.token)
        for place, is_allowed in _candidates(reference, path):
            try:
                with contextlib.closing(open_place(place)) as reader:
                    is_it = reader.uuid.hex() == reference.pool
                    was_found = was_found or is_it
                    entry = reader.catalogue().of_token(token) if is_it or is_allowed else None
                    if entry is not None:
                        return use(reader, entry, reference)
            except StaleError:
                was_found = True
            except (TransportError, BusyError, UsageError, MediumError) as error:
                if not is_allowed:
                    raise
                failure = failure or error
        # A training may have replaced the pointer since it was read, and released its version.
        newer = read_reference(path) if path else None
        if newer is None or newer.token == reference.token:
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
    """Yield the places where the version may be, and whether each is configured."""
    seen, variable = set(), Place.by_variable()
    for place in [*([variable] if variable else []), *ALLOWED]:
        pools = place.readable
        with contextlib.suppress(UsageError):  # it may have been moved
            pools = pools or pools_at(place)
        for each in pools:
            seen.add(each.path)
            yield each, True
    named = [reference.pool_path]
    # Also by the relative path from the pointer to the pool: a run may have been moved as a whole.
    if path is not None and os.path.isabs(reference.pool_path):
        before = os.path.dirname(reference.written_path)
        relative = os.path.relpath(reference.pool_path, before)
        where = os.path.dirname(os.path.realpath(path))
        named.append(os.path.normpath(os.path.join(where, relative)))
    for each_path in dict.fromkeys(named):
        place_here = _here(each_path)
        if place_here is not None and each_path not in seen:
            yield place_here, False


def _here(path: str) -> Place | None:
    """Return the pool at a path of this machine in a pointer; None for a path that it may not
    choose."""
    if not os.path.isabs(path) or path.startswith("//"):
        return None
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return None
    is_file = stat.S_ISREG(mode) and path.endswith(SUFFIX)
    is_pool = is_file or (stat.S_ISCHR(mode) and is_device(path))
    return Place.parse(path) if is_pool else None


def _arguments_of_torch_load(frame: FrameType | None) -> dict[str, object]:
    """Return the arguments of ``torch.load`` on the stack; none if it was not called."""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name == "torch.serialization" and frame.f_code.co_name == "load":
            return frame.f_locals
        frame = frame.f_back
    return {}


def _path_of(source: object) -> str | None:
    """Return the path of the argument of ``torch.load``: a path, or a file that knows its own."""
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
