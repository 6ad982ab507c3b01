"""Reads pointers on disk: see ``portus.reach.format.reference``."""

from __future__ import annotations

import os
import stat
from typing import Final

from portus.engine.format.pointer_marks import POINTER_MAX
from portus.engine.media.process import Descriptor
from portus.errors import CorruptionError, MediumError, UsageError
from portus.reach.format.reference import Reference, decode

_NO_WAIT: Final = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""A named pipe must not hold a reader up; Windows must not translate line ends."""


def read(path: str | os.PathLike[str]) -> Reference | None:
    """Return the contents of the pointer at ``path``; None if no pointer is there.

    Reads at most ``POINTER_MAX`` bytes, and nothing of a longer file. Raises ``CorruptionError``
    for a damaged pointer and ``UsageError`` for one that a newer Portus wrote, both naming it, and
    ``MediumError`` for a file that cannot be read.
    """
    data = _read_small(os.fspath(path))
    if data is None:
        return None
    try:
        return decode(data)
    except (CorruptionError, UsageError) as error:
        raise type(error)(f"{os.fspath(path)}: {error}") from error


def _read_small(path: str) -> bytes | None:
    """Return all bytes of a regular file of at most ``POINTER_MAX``; None for anything else."""
    try:
        descriptor = Descriptor(path, os.O_RDONLY | _NO_WAIT)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise MediumError(error.errno, f"cannot read {path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor.number)
        if not stat.S_ISREG(status.st_mode) or status.st_size > POINTER_MAX:
            return None
        return os.read(descriptor.number, POINTER_MAX)
    except OSError as error:
        raise MediumError(error.errno, f"cannot read {path}: {error.strerror}") from error
    finally:
        descriptor.close()
