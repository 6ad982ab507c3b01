"""A note of the checkpoint directory that is being made, until there is something in it.

Accelerate makes the directory first, and other processes are waited for. A process killed in
between would leave an empty directory that looks like the newest checkpoint. The next run finds
the note, and removes the directory if it is still empty.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Final

_SUFFIX: Final = ".saving"


@contextlib.contextmanager
def noted(pool_directory: str, directory: str) -> Iterator[None]:
    """Inside, it is on record that this process makes ``directory``. Errors are passed over: the
    note is a help, not a promise."""
    note = os.path.join(pool_directory, f"{socket.gethostname()}-{os.getpid()}{_SUFFIX}")
    written = os.path.isdir(pool_directory) and not os.path.exists(directory)
    if written:
        with contextlib.suppress(OSError), open(note, "w", encoding="utf-8") as file:
            file.write(directory)
    yield
    if written:
        with contextlib.suppress(OSError):
            os.unlink(note)


def forget_empty(pool_directory: str) -> list[str]:
    """Remove the empty directories that processes of this machine left when they died."""
    removed = []
    for name in _entries(pool_directory):
        note = os.path.join(pool_directory, name)
        if name.endswith(_SUFFIX) and _is_dead(name):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                with open(note, encoding="utf-8") as file:
                    directory = file.read()
                os.unlink(note)
                os.rmdir(directory)  # refuses one that is not empty
                removed.append(directory)
    return removed


def _entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _is_dead(name: str) -> bool:
    """True if the process that wrote the note is gone: a process that has its number and begins
    only now is this one, started again in a container."""
    host, _, number = name.removesuffix(_SUFFIX).rpartition("-")
    if host != socket.gethostname() or not number.isdigit():
        return False
    if int(number) == os.getpid():
        return True
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
