"""Pins of an operator: ``portus pin``. A version stays until somebody takes its pin back.

A pin is a reference without a file (``Reference.is_pin``). It lies where the links of the pool's
reference files are, and on a storage host on its record: so it survives restarts, goes along with a
run that is copied, and every Portus holds what it leads to. A trainer that is at work looks for new
ones before each commit (``Keeper.held``); a host retires nothing that is pinned, whoever asks.
"""

from __future__ import annotations

import os
import time
from typing import Final

from portus.client.files import reference as files_of
from portus.client.files.fate import Fate, FileLink, links
from portus.client.files.host import HostPool
from portus.errors import StaleError, UsageError
from portus.format.reference import Reference, pin_of
from portus.index.directory import links_directory, make_directory
from portus.index.place import Place
from portus.index.reader import PoolReader
from portus.media.local import LocalFiles
from portus.spec import VersionInfo

_FILES: Final = LocalFiles()

_DECIDED_S: Final = 1.0
"""The longest that a writer has decided what a commit retires before that is there."""

_POLL_S: Final = 0.02


def pins_of(pool: Place, reader: PoolReader) -> list[FileLink]:
    """The pins in a pool. Raises ``MediumError``, ``TransportError``."""
    if isinstance(reader, HostPool):
        return [FileLink(each, Fate.PINNED) for each in reader.holds() if each.is_pin]
    found = links(links_directory(pool.path), _FILES, adopt=False)
    return [each for each in found if each.state is Fate.PINNED]


def pin(pool: Place, reader: PoolReader, info: VersionInfo) -> bool:
    """Pin a version; False if it was pinned. Durable when this returns. Raises ``StaleError`` if
    it was retired just now, ``UsageError`` for a shelf, ``MediumError`` and ``TransportError``."""
    if any(each.reference.token == info.token.hex() for each in pins_of(pool, reader)):
        return False
    name = os.urandom(16).hex()
    made = pin_of(info, reader.superblock.uuid, pool.path, name, time.time_ns())
    with reader.pinned(info.id) as entry:  # its space stays while this is not decided
        if reader.record(entry).log is not None:
            raise UsageError(
                f"{info.model}@{info.step} changes in place, as shelves and tables do: a pin "
                f"would not keep its contents; portus export {info.model}@{info.step} does"
            )
        _place(pool, reader, made)
        before = reader.catalogue().root.sequence
        until_s = time.monotonic() + _DECIDED_S
        while reader.locks.has_writer() and time.monotonic() < until_s:
            if reader.catalogue().root.sequence != before:
                break  # what it retires next, it decides with the pin
            time.sleep(_POLL_S)
        if reader.catalogue().find(info.id) is None:
            _take_back(pool, reader, made)
            raise StaleError(f"{info.model}@{info.step} was retired just now, and is not pinned")
    return True


def unpin(pool: Place, reader: PoolReader, info: VersionInfo) -> bool:
    """Take the pin of a version back; False if there is none. Raises as ``pin``."""
    found = [each for each in pins_of(pool, reader) if each.reference.token == info.token.hex()]
    for each in found:
        _take_back(pool, reader, each.reference)
    return bool(found)


def check_unpinned(pool: Place, reader: PoolReader, infos: list[VersionInfo]) -> None:
    """Raise ``UsageError`` if one of these versions is pinned."""
    pinned = {each.reference.token for each in pins_of(pool, reader)}
    for info in infos:
        if info.token.hex() in pinned:
            raise UsageError(
                f"{info.model}@{info.step} is pinned: portus unpin {info.model}@{info.step} first"
            )


def _place(pool: Place, reader: PoolReader, made: Reference) -> None:
    if isinstance(reader, HostPool):
        reader.hold(made)
        return
    directory = links_directory(pool.path)
    make_directory(directory)
    files_of.place_copy(made, directory, _FILES)


def _take_back(pool: Place, reader: PoolReader, made: Reference) -> None:
    if isinstance(reader, HostPool):
        reader.let_go(made)
        return
    directory = links_directory(pool.path)
    files_of.forget(made, directory, _FILES)
    _FILES.sync(directory)
