"""Facts of the file system that holds an open file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from portus.engine.media import linux
from portus.engine.media.file_calls import file_error

_VOLATILE: Final = (linux.TMPFS_TYPE, linux.RAMFS_TYPE)
_IN_PLACE: Final = (linux.EXT_TYPE, linux.TMPFS_TYPE)


@dataclass(frozen=True, slots=True)
class FileSystemTraits:
    """The relevant facts of the file system that holds a file.

    ``volatile``: in memory, lost at power loss. ``early``: write-back is worth starting before the
    sync.
    """

    volatile: bool
    early: bool


def file_system_of(number: int, path: str) -> tuple[FileSystemTraits, bool]:
    """Return the facts of the file system of the open file ``number``, and whether it overwrites
    the file's blocks in place. Raises ``MediumError``. path: for messages."""
    try:
        found = linux.file_system_type(number)
    except OSError as error:
        raise file_error("ask for the file system of", path, error) from error
    in_place = found in _IN_PLACE or (
        # With reflink, xfs copies a shared block when it is written, and may find no space for it.
        found == linux.XFS_TYPE and not linux.may_share_blocks(number)
    )
    early = found in (linux.EXT_TYPE, linux.XFS_TYPE)
    return FileSystemTraits(volatile=found in _VOLATILE, early=early), in_place
