"""Reads pointers on disk: see ``portus.reach.format.reference``."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Final

from portus.engine.format.pointer_marks import POINTER_MAX
from portus.engine.media.process import Descriptor
from portus.errors import CorruptionError, MediumError, UsageError
from portus.reach.format.reference import Reference, decode

_NO_WAIT: Final = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""A named pipe must not hold a reader up; Windows must not translate line ends."""


def is_reference(path: str | os.PathLike[str]) -> bool:
    """Return True if a pointer is at ``path``. Reads nothing of a large file.

    Raises ``CorruptionError`` for a damaged pointer.
    """
    return read_reference(path) is not None


def read_reference(path: str | os.PathLike[str]) -> Reference | None:
    """Return the pointer at ``path``: its model and step, and its version, by its ``token``. Return
    None for another file. Opens no pool.

    Reads at most ``POINTER_MAX`` bytes, and nothing of a longer file. Raises ``CorruptionError``
    for a damaged pointer and ``UsageError`` for one that a newer Portus wrote, both naming it, and
    ``MediumError`` for a file that cannot be read.
    """
    where = os.fspath(path)
    try:
        with contextlib.closing(Descriptor(where, os.O_RDONLY | _NO_WAIT)) as descriptor:
            status = os.fstat(descriptor.number)
            if not stat.S_ISREG(status.st_mode) or status.st_size > POINTER_MAX:
                return None
            data = os.read(descriptor.number, POINTER_MAX)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise MediumError(error.errno, f"cannot read {where}: {error.strerror}") from error
    try:
        return decode(data)
    except (CorruptionError, UsageError) as error:
        raise type(error)(f"{where}: {error}") from error
