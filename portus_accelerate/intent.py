"""Notes of the checkpoint directories that are being made, until what is in them is whole.

Accelerate makes the directory first, Trainer writes weights and its own state into it, and only
then come the references. A process killed before leaves a directory that looks like the newest
checkpoint, and is none: empty, with half of the weights, or with weights alone. So whoever saves
notes the directory before it is made, each process by itself, since any of them may make it. The
next run finds the notes of processes that are gone, and what they name is taken out of the way.

A note is locked as long as its process lives. So it is known to be left over on another machine
and in another container too, where process numbers say nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import portus

if sys.platform == "linux":
    import fcntl

_SUFFIX: Final = ".saving"
_NEW: Final = ".new"
"""Behind the name of a note that is not locked yet."""

_NEW_S: Final = 60.0
"""A note is locked long before it is as old as that, or its process is gone."""

_WRITER: Final = "writer"
_OTHER: Final = "other"

_own: Final[dict[str, str]] = {}
"""The notes of this process, which would be let in by its own locks; and what each is of."""


@dataclass(frozen=True, slots=True)
class Intent:
    """A record, until it is dropped, that this process makes a checkpoint directory."""

    path: str
    descriptor: int

    def drop(self) -> None:
        """What is in the directory is whole, or leads to a version that tells."""
        _own.pop(self.path, None)
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            os.close(self.descriptor)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.path))  # refuses one with a pool in it


def note(home: str, directory: str, *, is_writer: bool) -> Intent | None:
    """Note in the directory ``home`` that ``directory`` is being made. None if it cannot be: the
    note is a help, not a promise. is_writer: false where this process may make the directory,
    and another one fills it."""
    path = os.path.join(home, f"{os.getpid()}-{os.urandom(8).hex()}{_SUFFIX}")
    unlocked = f"{path}{_NEW}"  # another run that sees a note before it is locked takes it for old
    kind = _WRITER if is_writer else _OTHER
    try:
        os.makedirs(home, exist_ok=True)
        descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError:
        return None
    _own[path] = directory
    made = Intent(path, descriptor)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, os.fsencode(f"{kind} {time.time_ns()} {directory}"))
        os.rename(unlocked, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unlocked)
        made.drop()
        return None
    return made


def take_back(directory: str) -> None:
    """All in ``directory`` is whole: no note of this process says that it is being made."""
    for path, noted in list(_own.items()):
        if noted == directory:
            with contextlib.suppress(OSError):
                os.unlink(path)


def cut_off(home: str) -> Iterator[str]:
    """Directories that processes began to make and did not end, since they died. Each is to be
    taken out of the way before the next one is asked for: then its note goes."""
    for name in _entries(home):
        path = os.path.join(home, name)
        if name.endswith(f"{_SUFFIX}{_NEW}"):
            _remove_left(path)
        if not name.endswith(_SUFFIX) or path in _own:
            continue
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its writer lives
            kind, since_ns, directory = [*os.fsdecode(file.read()).split(" ", 2), "", ""][:3]
            if since_ns.isdigit() and os.path.isdir(directory):
                whole = _is_whole(directory, int(since_ns)) or (
                    kind == _OTHER and bool(os.listdir(directory))
                )
                if not whole:
                    yield directory
            os.unlink(path)


def _remove_left(path: str) -> None:
    """Remove a note that was never locked, if its process died before it could be."""
    with contextlib.suppress(OSError):
        if abs(time.time() - os.stat(path).st_mtime) > _NEW_S:
            os.unlink(path)


def _is_whole(directory: str, since_ns: int) -> bool:
    """True if there is a reference in ``directory`` that was written after the note: references
    come last, and those of saves that were never committed have been removed. Raises ``OSError``:
    what cannot be read is not known to be half-made."""
    for name in os.listdir(directory):
        try:
            found = portus.read_reference(os.path.join(directory, name))
        except portus.CorruptionError:
            continue
        if found is not None and found.written_ns >= since_ns:
            return True
    return False


def _entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
