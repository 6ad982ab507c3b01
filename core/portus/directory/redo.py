"""The redo marker: several files get their names as one.

Each rename is atomic, and several are not. So before the first one, a marker in the hidden folder
says which hidden file is to have which name, by inodes; it is whole and durable, or not there. A
start that finds it, and all the files, does the renames that are missing. Where a name has another
file by then, that file is somebody else's, and stays.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from portus.directory.folder import MARK, REDO, HiddenFolder, LockedRecord, hidden_name
from portus.directory.system import File
from portus.errors import printable

_log: Final = logging.getLogger("portus")

REDO_MAX: Final = 64 << 20
"""Bytes of a marker that are read."""


class Move(NamedTuple):
    """``hidden``, with the inode ``inode``, is to be ``name``, which has ``replaced`` by now, or
    nothing (0)."""

    hidden: str
    inode: int
    name: str
    replaced: int


def write(folder: HiddenFolder[File], record: LockedRecord[File], moves: Sequence[Move]) -> None:
    """Make a marker, whole and durable. Raises ``MediumError``; then it may be there or not."""
    system, hidden = folder.system, folder.make()
    mark, redo = hidden_name(record.token, MARK), hidden_name(record.token, REDO)
    file = system.create(hidden, mark)
    try:
        system.write(file, json.dumps({"portus_redo": 1, "moves": moves}).encode())
        system.sync(file)
    finally:
        system.close(file)
    system.rename((hidden, mark), (hidden, redo))
    folder.sync_hidden()


def apply(folder: HiddenFolder[File], moves: Sequence[Move]) -> None:
    """Do what is missing of the moves, durably. Raises ``MediumError``."""
    system, hidden = folder.system, folder.make()
    for move in moves:
        source, target = system.look(hidden, move.hidden), system.look(folder.directory, move.name)
        is_free = target is None or target.identity[1] == move.replaced
        if source is not None and source.identity[1] == move.inode and is_free:
            system.rename((hidden, move.hidden), (folder.directory, move.name))
    folder.sync()


def finish(folder: HiddenFolder[File], names: Sequence[str]) -> bool:
    """Do what the marker among the ``names`` of a save that nobody has says; False if there is
    none. Raises ``MediumError``."""
    system = folder.system
    for name in names:
        if f".{REDO}" not in name:
            continue
        file = system.open(folder.make(), name, writable=False)
        if file is None:
            continue
        try:
            data = system.read(file, REDO_MAX)
        finally:
            system.close(file)
        try:
            moves = [Move(*each) for each in json.loads(data)["moves"]]
        except (ValueError, LookupError, TypeError) as error:
            where = printable(folder.describe())
            _log.error("portus: %s: the redo marker %s is damaged: %s", where, name, error)
            return False
        if all(_is_there(folder, move) for move in moves):
            apply(folder, moves)
            return True
    return False


def _is_there(folder: HiddenFolder[File], move: Move) -> bool:
    """Return whether a file is there, under either name. One that is not was never durable under
    its hidden name, and so the marker was not, and no rename was begun."""
    system = folder.system
    places = (folder.make(), move.hidden), (folder.directory, move.name)
    found = [system.look(*place) for place in places]
    return any(each is not None and each.identity[1] == move.inode for each in found)
