"""The redo marker: several files get their names as one.

Each rename is atomic, and several are not. So before the first one, a marker in the hidden folder
says which hidden file is to have which name, by inodes; it is either complete and durable, or
absent. A start that finds it, and all the files, does the renames that are missing. If a name has
another file by then, that file belongs to another program, and stays.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from portus.engine.directory.folder import (
    MARK,
    REDO,
    HiddenFolder,
    OpenDirectory,
    hidden_name,
)
from portus.engine.format.nesting import refuse_deep
from portus.errors import MediumError, printable

_log: Final = logging.getLogger("portus")

REDO_MAX: Final = 64 << 20
"""The most bytes of a marker to read."""


class Move(NamedTuple):
    """``hidden``, with the inode ``inode``, is to be ``name``, which now has the inode
    ``replaced``, or no file (0)."""

    hidden: str
    inode: int
    name: str
    replaced: int


def write(directory: OpenDirectory, token: str, moves: Sequence[Move]) -> None:
    """Write a marker for moves to ``directory``, complete and durable. Raises ``MediumError``; then
    it may exist or not."""
    folder, system = directory.folder, directory.system
    hidden, here, there = folder.make(), folder.path(), directory.path()
    if here is None or there is None:
        raise MediumError(errno.ENOENT, "the directory of the files was deleted")
    said = {
        "portus_redo": 1,
        "directory": os.path.relpath(there, here),
        "inode": system.status(directory.file).identity[1],
        "moves": moves,
    }
    mark, redo = hidden_name(token, MARK), hidden_name(token, REDO)
    file = system.create(hidden, mark)
    try:
        # Synced before it gets its name, so a marker that a start finds is whole.
        system.write(file, json.dumps(said).encode())
        system.sync(file)
    finally:
        system.close(file)
    system.rename((hidden, mark), (hidden, redo))
    folder.sync_hidden()


def apply(directory: OpenDirectory, moves: Sequence[Move]) -> None:
    """Do the missing moves, durably. Raises ``MediumError``."""
    system, hidden = directory.system, directory.folder.make()
    for move in moves:
        source, target = system.look(hidden, move.hidden), system.look(directory.file, move.name)
        is_free = target is None or target.identity[1] == move.replaced
        # By inode: an earlier start may have been killed after some of the moves.
        if source is not None and source.identity[1] == move.inode and is_free:
            system.rename((hidden, move.hidden), (directory.file, move.name))
    directory.sync()
    system.sync(hidden)


def finish(folder: HiddenFolder, names: Sequence[str]) -> bool:
    """Carry out the marker among the ``names`` of an abandoned save; return False if there is none.
    Raises ``MediumError``."""
    system, here = folder.system, folder.path()
    name = next((name for name in names if f".{REDO}" in name), None)
    file = None if name is None else system.open(folder.make(), name, writable=False)
    if file is None or here is None:
        return False
    try:
        data = system.read(file, REDO_MAX)
    finally:
        system.close(file)
    try:
        refuse_deep(data)
        said = json.loads(data)
        path, inode = os.path.normpath(os.path.join(here, said["directory"])), int(said["inode"])
        moves = [Move(*each) for each in said["moves"]]
    except (ValueError, LookupError, TypeError) as error:
        where = printable(here)
        _log.error("portus: %s: the redo marker %s is damaged: %s", where, name, error)
        return False
    try:
        directory = OpenDirectory(folder, path)
    except MediumError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return False  # the directory was removed
        raise
    try:
        # Another directory may be at that path now.
        is_it = system.status(directory.file).identity[1] == inode
        is_all = is_it and all(_is_there(directory, move) for move in moves)
        if is_all:
            apply(directory, moves)
        return is_all
    finally:
        directory.close()


def _is_there(directory: OpenDirectory, move: Move) -> bool:
    """Return whether a file exists, under either name. If not, it was never durable under its
    hidden name, and so neither was the marker, and no rename was begun."""
    places = (directory.folder.make(), move.hidden), (directory.file, move.name)
    found = [directory.system.look(*place) for place in places]
    return any(each is not None and each.identity[1] == move.inode for each in found)
