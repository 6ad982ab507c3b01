"""Resolution of a reference file to the state that it stands for.

V6: a reference may come from a stranger, so it does not choose what is opened. A pool is opened
only if it is

1. open in this process already, or configured (``$PORTUS_POOL``, or allowed by the program);
2. beside the reference: in a ``.portus`` directory of its own directory or of one above it;
3. at the path that the reference names, if the links directory there holds a hard link to this
   very file. That is seen from names alone, on the file systems of ``/`` and of the reference,
   through no symbolic link;
4. where this user noted that the pool of that identity is (``notes``): the user's own word.

A storage host is asked only if its address is configured (1): what a reference says of hosts is
for people to read.

Then its identity must be the one that the reference names; of a storage host (1) it is enough that
it has the version, by its model, its step and its 16 random bytes: it may have been filled from a
mirror.
What is loaded is verified, and nothing in it is executed.

V11: a load waits for a save of that file that this process has under way. It also waits, for a
limited time, for a new version that another process is about to commit: another rank of the same
job, or a program that watches for checkpoints.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, runtime_checkable

from portus.client.files.notes import places
from portus.client.files.reference import is_linked, read
from portus.client.loading.stock import say_once
from portus.errors import (
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
)
from portus.format.reference import Reference, decode_text
from portus.index.directory import generations, links_directory
from portus.index.place import DEFAULT_DIRECTORY, Place, PlaceKind, PlaceName
from portus.index.roots import read_superblock
from portus.media.calls import is_nested, refused
from portus.media.local import LocalFiles
from portus.mirror.address import MIRROR_VARIABLE, UNMIRRORED, StoreAddress, parse
from portus.spec import VersionInfo

if TYPE_CHECKING:
    from portus.index.reader import PoolReader
    from portus.index.records import VersionEntry

Result = TypeVar("Result")

_log: Final = logging.getLogger("portus")

FILES_MAX: Final = 1024
"""Files looked at in one pool directory."""

AWAITED_S_MAX: Final = 60.0
"""Age of a reference after which nobody waits any more for another process to commit."""

_POLL_S: Final = 0.02

_TRIES: Final = 100
"""A load starts again when its file was replaced before its version was pinned, this often."""


class ReadablePool(Protocol):
    """A pool that versions can be loaded from."""

    @property
    def uuid(self) -> bytes:
        """The pool's identity, 16 bytes."""

    def load_version(self, token: bytes, part: str | None = None) -> object:
        """The verified state of a version, or the value of its key ``part``; ``StaleError`` if
        the pool does not hold it."""

    def use_version(
        self, token: bytes, use: Callable[[PoolReader, VersionEntry], Result]
    ) -> Result:
        """What ``use`` gives for a version; ``StaleError`` if the pool does not hold it. ``use``
        may be called twice, if the version is about to be there."""


class OpenPool(ReadablePool, Protocol):
    """A pool that this process has open for saving."""

    def await_saves(self, path: str | None, token: bytes) -> bool:
        """Wait for saves under way that make the version ``token`` or write the file ``path``.

        ``path`` is absolute, without symbolic links. True if there was one. A failed save raises
        nothing here: it is reported where it was asked for.
        """


@runtime_checkable
class View(ReadablePool, Protocol):
    """A pool opened only for this load."""

    def versions(self) -> list[VersionInfo]:
        """What is committed now."""

    def has_writer(self) -> bool:
        """True while somebody has the pool open for saving."""

    def close(self) -> None:
        """Let go of the pool."""


class KnownPools:
    """The pools of this process: those it has open, and those it may open. Thread-safe.

    ``opener`` opens the pool file at a path for reading.
    """

    def __init__(self, opener: Callable[[Place], View]) -> None:
        self.opener = opener
        self._guard = threading.RLock()
        self._open: list[OpenPool] = []
        self._allowed: list[Place] = []
        self._mirrors: list[StoreAddress] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_open)

    def opened(self, pool: OpenPool) -> None:
        """Say that ``pool`` is open; it is held until ``closed``."""
        with self._guard:
            self._open.append(pool)

    def closed(self, pool: OpenPool) -> None:
        """Say that ``pool`` is not open any more. A second call does nothing."""
        with self._guard:
            self._open = [each for each in self._open if each is not pool]

    def allow(self, place: Place) -> None:
        """Let references lead to the pool, or the pools, at ``place``."""
        with self._guard:
            if place not in self._allowed:
                self._allowed.append(place)

    def allow_mirror(self, address: StoreAddress) -> None:
        """Let what is damaged or missing be taken from the mirrors at ``address``."""
        with self._guard:
            if address not in self._mirrors:
                self._mirrors.append(address)

    def mirrors(self) -> list[StoreAddress]:
        """What is configured: ``$PORTUS_MIRROR`` last. Raises ``UsageError`` for what that says."""
        said = os.environ.get(MIRROR_VARIABLE)
        by_variable = [] if not said or said == UNMIRRORED else [parse(said, f"${MIRROR_VARIABLE}")]
        with self._guard:
            return list(dict.fromkeys([*self._mirrors, *by_variable]))

    def open_ones(self) -> list[OpenPool]:
        """A snapshot, newest first. None in a signal handler that interrupted a call of theirs:
        pools are opened anew then, for reading."""
        if is_nested():
            return []
        with self._guard:
            return self._open[::-1]

    def allowed(self) -> list[Place]:
        """What is configured: ``$PORTUS_POOL`` first."""
        variable = Place.by_variable()
        with self._guard:
            return ([variable] if variable else []) + self._allowed

    def _forget_open(self) -> None:
        # In a forked child the pools belong to the parent, and its lock may be taken for ever.
        self._guard, self._open = threading.RLock(), []


def _open_view(pool: Place) -> View:
    from portus.client.loading.view import open_pool  # it is heavy, and most programs load nothing

    return open_pool(pool)


POOLS: Final = KnownPools(_open_view)
"""Those of this process."""


def allow(pool: PlaceName) -> None:
    """Let reference files lead to ``pool``: a pool file, a pool directory, or storage hosts.

    A process that saves there, or for which ``$PORTUS_POOL`` names it, need not say so.
    """
    POOLS.allow(Place.named(pool))


def load_text(text: str, pools: KnownPools = POOLS) -> object:
    """What ``torch.load`` gets for the string in a reference file. Raises as ``load_reference``."""
    reference = decode_text(text)
    asked = _asked_of_torch(sys._getframe(1))
    path = _path_of(asked.get("f"))
    if asked.get("mmap"):
        say_once(
            _log,
            f"{path or 'what is loaded'} is a reference: mmap=True has no effect, all of its "
            "state is read into memory. portus materialize makes a file that can be mapped",
        )
    if str(asked.get("map_location")) == "meta":
        return _use(reference, path, pools, _load_on_meta)
    weights_only = asked.get("weights_only")
    if not isinstance(weights_only, bool):
        return _load(reference, path, pools)

    def load_safely(pool: ReadablePool, token: bytes, found: Reference) -> object:
        from portus.client.loading.restore import load_part

        return pool.use_version(
            token,
            lambda reader, entry: load_part(reader, entry, found.part, weights_only=weights_only),
        )

    return _use(reference, path, pools, load_safely)


def _load_on_meta(pool: ReadablePool, token: bytes, found: Reference) -> object:
    from portus.client.loading.restore import load_on_meta

    return pool.use_version(token, lambda reader, entry: load_on_meta(reader, entry, found.part))


def is_reference(path: str | os.PathLike[str]) -> bool:
    """True if a Portus reference file is at ``path``. Reads nothing of a large file.

    Raises ``CorruptionError`` for a damaged reference.
    """
    return read(path) is not None


def read_reference(path: str | os.PathLike[str]) -> Reference | None:
    """What the file at ``path`` says, if it is a reference: of which model and step it is, and
    which version, by its ``token``. None if it is none. Opens no pool. Raises ``CorruptionError``
    for a damaged one, ``MediumError``."""
    return read(path)


def load_reference(path: str | os.PathLike[str], pools: KnownPools = POOLS) -> object:
    """The verified state that the reference file at ``path`` leads to, on the CPU.

    Raises ``UsageError`` if there is no reference file, if its pool may not be opened (the message
    says what allows it) or holds neither its version nor the one to fall back to;
    ``CorruptionError`` and ``MediumError`` as loads do.
    """
    absolute = os.path.abspath(os.fspath(path))
    reference = read(absolute)
    if reference is None:
        raise UsageError(f"{absolute}: there is no Portus reference file")
    return _load(reference, absolute, pools)


def use_reference(
    path: str | os.PathLike[str],
    use: Callable[[PoolReader, VersionEntry, Reference], Result],
    pools: KnownPools = POOLS,
    *,
    falls_back: bool = True,
) -> Result:
    """What ``use`` gives for the version that the reference file at ``path`` leads to, and for what
    that file says. Called again if the file is replaced meanwhile. Raises as ``load_reference``.

    falls_back: False raises ``UsageError`` where a load would give the version before.
    """
    absolute = os.path.abspath(os.fspath(path))
    reference = read(absolute)
    if reference is None:
        raise UsageError(f"{absolute}: there is no Portus reference file")

    def from_pool(pool: ReadablePool, token: bytes, found: Reference) -> Result:
        return pool.use_version(token, lambda reader, entry: use(reader, entry, found))

    return _use(reference, absolute, pools, from_pool, falls_back=falls_back)


def pool_of(path: str | os.PathLike[str], pools: KnownPools = POOLS) -> Place:
    """The pool file that the reference file at ``path`` leads to, if it may be opened; or the
    address of the storage host.

    Raises ``UsageError`` if there is no reference file, or if its pool may not be opened.
    """
    absolute = os.path.abspath(os.fspath(path))
    reference = read(absolute)
    if reference is None:
        raise UsageError(f"{absolute}: there is no Portus reference file")
    uuid = bytes.fromhex(reference.pool)
    others = []
    for candidate in _candidates(reference, absolute, pools):
        if candidate.is_host:
            view = _opened(candidate, pools)
            if view is not None:
                with contextlib.closing(view):
                    if view.uuid == uuid:
                        return candidate
                    others.append(candidate)
        elif _uuid(candidate.path) == uuid:
            return candidate
    raise _not_allowed(reference, absolute, pools, others)


def hosts_of(uuids: Collection[bytes], pools: KnownPools = POOLS) -> list[Place]:
    """The storage hosts that may be asked and have one of these pools, and those that were
    configured together with one."""

    def has_one(host: Place) -> bool:
        view = _opened(host, pools)
        if view is None:
            return False
        with contextlib.closing(view):
            return view.uuid in uuids

    places = [place for place in pools.allowed() if any(map(has_one, place.hosts))]
    return list(dict.fromkeys(host for place in places for host in place.hosts))


def _load(reference: Reference, path: str | None, pools: KnownPools) -> object:
    return _use(
        reference,
        path,
        pools,
        lambda pool, token, found: pool.load_version(token, found.part),
    )


def _use(
    reference: Reference,
    path: str | None,
    pools: KnownPools,
    use: Callable[[ReadablePool, bytes, Reference], Result],
    *,
    falls_back: bool = True,
) -> Result:
    for _ in range(_TRIES):
        reference = _settled(reference, path, pools)
        with contextlib.ExitStack() as stack:
            found: list[ReadablePool] = []
            others: list[Place] = []
            strangers: list[View] = []
            for pool in _pools_of(reference, path, pools, stack, others, strangers):
                found.append(pool)
                with contextlib.suppress(StaleError):
                    return _sound(pool, reference, pools, use)
            for stranger in strangers:
                if _was_filled_with(stranger, reference):
                    with contextlib.suppress(StaleError):
                        return _sound(stranger, reference, pools, use)
            if not found:
                return _mirrored(
                    reference, pools, use, _not_allowed(reference, path, pools, others)
                )
            # Of a pool that this process saves to all saves are over: there is nobody to wait for.
            is_own = any(not isinstance(pool, View) for pool in found)
            for pool in () if is_own else found:
                with contextlib.suppress(StaleError):
                    if _await(pool, reference, path):
                        return _sound(pool, reference, pools, use)
            newer = read(path) if path else None  # replaced since it was read?
            if newer is None or newer.id == reference.id:
                missing = StaleError(
                    f"{path or 'this reference'}: its pool has no version of step {reference.step}"
                )
                try:
                    return _mirrored(reference, pools, use, missing)
                except StaleError as error:
                    if error is not missing:
                        raise
                return _fall_back(reference, path, found if falls_back else [], use)
        reference = newer
    raise StaleError(f"{path} was replaced {_TRIES} times while it was loaded; load again")


def _was_filled_with(stranger: View, reference: Reference) -> bool:
    """True if a host has the version of ``reference`` in a pool of another identity: from a
    mirror."""
    wanted = (reference.model, reference.step, bytes.fromhex(reference.token))
    return any((each.model, each.step, each.token) == wanted for each in stranger.versions())


def _sound(
    pool: ReadablePool,
    reference: Reference,
    pools: KnownPools,
    use: Callable[[ReadablePool, bytes, Reference], Result],
) -> Result:
    """What ``use`` gives for the version of a reference in ``pool``; of a mirror's copy, if it is
    damaged there."""
    try:
        return use(pool, bytes.fromhex(reference.token), reference)
    except CorruptionError as error:
        return _mirrored(reference, pools, use, error)


def _mirrored(
    reference: Reference,
    pools: KnownPools,
    use: Callable[[ReadablePool, bytes, Reference], Result],
    why: PortusError,
) -> Result:
    """What ``use`` gives for the version as a mirror has it. Raises ``why`` if none has."""
    mirrors = pools.mirrors()
    if not mirrors or is_nested():
        raise why
    from portus.client.loading import fallback  # heavy, as a view is
    from portus.client.loading.view import PoolFile

    token = bytes.fromhex(reference.token)

    def use_there(reader: PoolReader, entry: VersionEntry) -> Result:
        there = Place(PlaceKind.MIRROR, reader.medium.info.name)
        return use(PoolFile(there, reader), token, reference)

    return fallback.of_token(mirrors, reference.model, token, use_there, why)


def _settled(reference: Reference, path: str | None, pools: KnownPools) -> Reference:
    """Wait for saves of the file or the version; the reference that is at ``path`` then."""
    real = os.path.realpath(path) if path else None
    token = bytes.fromhex(reference.token)
    waited = [pool.await_saves(real, token) for pool in pools.open_ones()]
    if path and any(waited):
        return read(path) or reference
    return reference


def _fall_back(
    reference: Reference,
    path: str | None,
    pools: list[ReadablePool],
    use: Callable[[ReadablePool, bytes, Reference], Result],
) -> Result:
    """pools: to look for the version before in; with none, that is not wanted."""
    what = f"{path or 'this reference'}: step {reference.step} of model {reference.model!r}"
    if is_nested():
        raise refused(f"{what} is not there; it may still be in a save")
    if not reference.instead:
        raise UsageError(
            f"{what} was never committed (its save failed or was cut off), or was retired since; "
            f"there is no earlier version to fall back to. `portus ls {reference.pool_path}` "
            f"lists what the pool holds"
        )
    if not pools:
        raise UsageError(
            f"{what} was never committed (its save failed or was cut off), or was retired since; "
            f"no file is made of step {reference.instead[0][1]}, the one before it. `portus ls "
            f"{reference.pool_path}` lists what the pool holds"
        )
    # Twice: a commit between the first two retires the second.
    for (token, step), pool in itertools.product(2 * reference.instead, pools):
        try:
            result = use(pool, bytes.fromhex(token), reference)
        except StaleError:
            continue
        _log.warning(
            "%s was never committed (its save failed or was cut off): loaded step %s, "
            "the newest one committed before it, INSTEAD",
            what,
            step,
        )
        return result
    raise UsageError(
        f"{what} was never committed, or was retired since, and so was step "
        f"{reference.instead[-1][1]}, the one before it. `portus ls {reference.pool_path}` "
        f"lists what the pool holds"
    )


def _pools_of(
    reference: Reference,
    path: str | None,
    pools: KnownPools,
    stack: contextlib.ExitStack,
    others: list[Place],
    strangers: list[View],
) -> Iterator[ReadablePool]:
    """The pools of that identity that may be opened, those first that this process has open. There
    are several where a run was copied, and each has versions of its own. others: gets the hosts
    that have another pool, strangers those pools."""
    uuid = bytes.fromhex(reference.pool)
    for pool in pools.open_ones():
        if pool.uuid == uuid:
            yield pool
    for candidate in dict.fromkeys(_candidates(reference, path, pools)):
        if candidate.is_host or _uuid(candidate.path) == uuid:
            view = _opened(candidate, pools)
            if view is None:
                continue
            stack.enter_context(contextlib.closing(view))
            if view.uuid == uuid:
                yield view
            else:
                others.append(candidate)
                strangers.append(view)


def _not_allowed(
    reference: Reference, path: str | None, pools: KnownPools, others: list[Place]
) -> PortusError:
    """others: storage hosts that may be asked, and have another pool."""
    if reference.pool_path in map(str, others):
        return UsageError(
            f"{path or 'this reference'} leads to pool {reference.pool}, written at "
            f"{reference.pool_path}, and that storage host serves another pool now. Start "
            "`portus serve` with the pool that it served then; a pool in memory is lost"
        )
    if path is not None and _is_denied(reference, path):
        return UsageError(
            f"{path} leads to pool {reference.pool}, written at {reference.pool_path}, which "
            "may not be read by this user: permission denied. The user who saved it must let "
            "you read the pool and its directories (umask, chmod)"
        )
    unreadable = _unreadable(reference, path, pools)
    if unreadable is not None:
        return unreadable
    return UsageError(
        f"{path or 'this reference'} leads to pool {reference.pool}, written at "
        f"{reference.pool_path}. That pool is not beside the reference, and a reference alone "
        f"may not choose what is opened. If you trust it, set PORTUS_POOL={reference.pool_path} "
        f"(or wherever the pool is now) and load again"
    )


def _unreadable(reference: Reference, path: str | None, pools: KnownPools) -> PortusError | None:
    """What is wrong with the pool file that may be opened and is called as the pool was, or was
    configured, if nobody can tell which pool it is."""
    name, allowed = os.path.basename(reference.pool_path), pools.allowed()
    for candidate in dict.fromkeys(_candidates(reference, path, pools)):
        is_meant = candidate in allowed or os.path.basename(candidate.path) == name
        if candidate.is_host or not is_meant or not os.path.isfile(candidate.path):
            continue
        what = f"{path or 'this reference'} leads to pool {reference.pool}, written at "
        what += f"{reference.pool_path}, and the pool cannot be read: "
        try:
            _read_uuid(candidate.path)
        except CorruptionError as error:
            return CorruptionError(
                f"{what}{error}. `portus rescue {candidate.path}` lists what is intact in that file"
            )
        except MediumError as error:
            return MediumError(error.errno, f"{what}{error.strerror}")
        except UsageError as error:
            return UsageError(f"{what}{error}")
    return None


def _is_denied(reference: Reference, path: str) -> bool:
    """True if the pool is where the reference says, as far as may be looked, and not to be read."""
    place = reference.pool_path
    if not _is_near(place, path):
        return False
    try:
        os.lstat(place)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return not os.access(place, os.R_OK)


def _opened(candidate: Place, pools: KnownPools) -> View | None:
    """None for a host that does not answer, or refuses us: another may have the pool."""
    try:
        return pools.opener(candidate)
    except (TransportError, UsageError) as error:
        if not candidate.is_host:
            raise
        _log.warning("%s", error)
        return None


def _await(pool: ReadablePool, reference: Reference, path: str | None) -> bool:
    """Wait while another process may still commit the version of a young reference, and that is
    what ``path`` leads to. True if it is there now."""
    if not isinstance(pool, View):
        return False
    token = bytes.fromhex(reference.token)
    while all(info.token != token for info in pool.versions()):
        age_s = time.time() - reference.written_ns / 1e9
        is_young = 0 <= age_s < AWAITED_S_MAX
        if not is_young or not pool.has_writer() or is_nested():
            return False
        now = read(path) if path else reference
        if now is None or now.id != reference.id:
            return False
        time.sleep(_POLL_S)
    return True


def _candidates(reference: Reference, path: str | None, pools: KnownPools) -> Iterator[Place]:
    name = os.path.basename(reference.pool_path)
    allowed = pools.allowed()
    for place in allowed:
        if not place.is_host:
            yield from _pool_files(place.path, name)
    if path is not None:
        yield from _beside(reference, path, name)
        yield from map(_pool, places(bytes.fromhex(reference.pool)))
    for place in allowed:
        yield from place.readable


def _beside(reference: Reference, path: str, name: str) -> Iterator[Place]:
    names = dict.fromkeys((os.path.abspath(path), os.path.realpath(path)))
    for place in names:
        for directory in _upwards(os.path.dirname(place)):
            yield from _pool_files(os.path.join(directory, DEFAULT_DIRECTORY), name)
    for place in names:
        relative = os.path.join(os.path.dirname(place), *reference.pool_relative.split("/"))
        for named in (os.path.normpath(relative), reference.pool_path):
            if _is_near(named, place) and _is_linked_by(named, place, reference):
                yield _pool(named)


def _is_linked_by(pool: str, path: str, reference: Reference) -> bool:
    try:
        return is_linked(path, reference, links_directory(pool))
    except MediumError:  # it may not be looked at
        return False


def _upwards(directory: str) -> Iterator[str]:
    while True:
        yield directory
        above = os.path.dirname(directory)
        if above == directory:
            return
        directory = above


def _pool(path: str) -> Place:
    return Place(PlaceKind.FILE, os.path.abspath(path))


def _pool_files(place: str, name: str) -> Iterator[Place]:
    """``place`` if it is a file, and its successors; the files in it, one called ``name`` first,
    if a directory."""
    if not os.path.isdir(place):
        yield from map(_pool, generations(place).values())
        return
    yield _pool(os.path.join(place, name))
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in itertools.islice(entries, FILES_MAX):
            if entry.name != name:
                yield _pool(entry.path)


def _uuid(path: str) -> bytes | None:
    """The identity of the pool file at ``path``; None if there is no pool file."""
    try:
        return _read_uuid(path)
    except (CorruptionError, MediumError, UsageError, ValueError):
        return None


def _read_uuid(path: str) -> bytes:
    medium = LocalFiles().open(path, writable=False)
    with contextlib.closing(medium):
        return read_superblock(medium).uuid


def _is_near(target: str, path: str) -> bool:
    """True if looking at ``target`` leads through real directories on the file system of ``path``
    or of the root alone."""
    if not os.path.isabs(target) or target.startswith(("//", "\\\\")):
        return False
    parts = os.path.normpath(target).split(os.sep)
    place = parts[0] + os.sep
    try:
        devices = {os.lstat(place).st_dev, os.stat(path).st_dev}
        for part in parts[1:-1]:
            place = os.path.join(place, part)
            status = os.lstat(place)
            if not stat.S_ISDIR(status.st_mode) or status.st_dev not in devices:
                return False
    except (OSError, ValueError):
        return False
    return True


def _asked_of_torch(frame: FrameType | None) -> dict[str, object]:
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
