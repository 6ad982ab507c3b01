"""The recovery of saves that were in flight in a process that ended, by the next start.

It carries out a redo marker. Without one, it restores a held file only if its save was not finished
(its draft exists), nothing is at its path, and its bytes verify. It removes everything else that
such a process left.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from typing import Final

from portus.engine.directory import redo
from portus.engine.directory.folder import DRAFT, FOLDER, HOLD, HiddenFolder, path_name
from portus.engine.directory.system import Linux
from portus.engine.directory.waiting import bases_of
from portus.engine.media.process import Descriptor
from portus.errors import MediumError, printable

_log: Final = logging.getLogger("portus")


def recover_directory(directory: str) -> None:
    """Restore files of a directory, absolute, that processes that ended had removed too early, and
    remove the rest of what they left. Raises ``MediumError``."""
    for base in bases_of(directory):
        folder = HiddenFolder(Linux(), base)
        try:
            recover(folder)
        finally:
            folder.close()


def recover(folder: HiddenFolder) -> None:
    """Restore files at their paths, and remove the rest of what processes that ended left. Raises
    ``MediumError``; another user's files stay."""
    system = folder.system
    for names in folder.abandoned_saves():
        hidden = folder.make()
        # First: if there is a marker, the save counts, and its apparent drafts are its files.
        is_published = redo.finish(folder, names)
        # A draft that is left was never renamed, so it replaced no held file. Without one the save
        # had ended, or hardly begun: a missing file was removed on purpose.
        is_unfinished = not is_published and any(f".{DRAFT}" in name for name in names)
        for name in names if is_unfinished else ():
            path = system.read_link(hidden, path_name(name)) if f".{HOLD}" in name else None
            here = folder.path()
            if path is not None and here is not None:
                there = os.path.normpath(os.path.join(here, FOLDER, os.fsdecode(path)))
                restore(folder, name, there)
        for name in names:
            with contextlib.suppress(MediumError):
                system.unlink(hidden, name)


def restore(folder: HiddenFolder, held: str, path: str) -> bool:
    """Restore the held file at ``path`` if nothing is there and its bytes verify. A directory that
    was removed is made again, but not the one above it. Raises ``MediumError``."""
    system = folder.system
    where, name = os.path.split(path)
    directory = _open_directory(system, where)
    try:
        if directory is not None and system.look(directory, name) is not None:
            return False
        if not _is_whole(folder, held, path):
            return False
        if directory is None:
            directory = _make_directory(system, where)
        if directory is None:
            return False  # the directory is gone
        try:
            # A link, not a rename: it fails if a file was put there meanwhile.
            system.link((folder.make(), held), (directory, name))
        except MediumError as error:
            if error.errno == errno.EEXIST:
                return False
            raise
        system.sync(directory)
    finally:
        if directory is not None:
            system.close(directory)
    _log.warning(
        "portus: put %s back: it was removed before the checkpoint that was to replace it was "
        "complete, and that one never was. Remove it again if you do not want it",
        printable(path),
    )
    return True


def _open_directory(system: Linux, path: str) -> Descriptor | None:
    """Open a directory; return None if it does not exist."""
    try:
        return system.open_directory(path)
    except MediumError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def _make_directory(system: Linux, path: str) -> Descriptor | None:
    """Make a directory, durably; return None if the one above it does not exist."""
    above = _open_directory(system, os.path.dirname(path))
    if above is None:
        return None
    try:
        made = system.open_folder(above, os.path.basename(path), create=True)
        system.sync(above)
        return made
    finally:
        system.close(above)


def _is_whole(folder: HiddenFolder, held: str, path: str) -> bool:
    file = folder.system.open(folder.make(), held, writable=False)
    if file is None:
        return False
    try:
        return folder.system.is_whole(file, path)
    finally:
        folder.system.close(file)
