"""Journals as files: where they are, and how they are read. No torch.

In the directory of a pool's journals (``directory.journal_directory``) each model has one file of
lines, and one page, its heartbeat, for each session that runs or was killed. If the file system
beside the pool cannot map pages, they are in memory, in a private directory of this user.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import logging
import os
import stat
import time
import urllib.parse
from dataclasses import dataclass
from typing import Final

from portus.companions.journal.lines import (
    FORMAT,
    Head,
    JournalContents,
    Line,
    SessionBegun,
    SessionEnded,
    decode,
    read_beat,
)
from portus.engine.spec import PAGE
from portus.errors import MediumError, PortusError
from portus.reach.index.place import quote
from portus.reach.media.names import fitting

_log: Final = logging.getLogger("portus")

LINES: Final = ".lines"
BEAT: Final = ".heartbeat"

READ_MAX: Final = 64 << 20
"""Bytes of a journal that are read, at most."""

# The names of heartbeats continue with a session and a suffix, up to 255.
_NAME_MAX: Final = 160

_MEMORY: Final = "/dev/shm"

_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


@dataclass(frozen=True, slots=True)
class FoundJournal:
    """A journal, with the facts of the heartbeats beside it. ``running``: sessions that run on this
    machine now; ``read_s``: when it was read, by this machine's clock."""

    path: str
    model: str
    lines: tuple[Line, ...]
    running: frozenset[str]
    damaged: int
    read_s: float


def journals_in(directory: str) -> list[str]:
    """Return the journals in a pool's journal directory, those without a line included; none if
    there is no such directory."""
    there = names_in(directory)
    names = {each for each in there if each.endswith(LINES)}
    beats = [each for each in there if each.endswith(BEAT)]
    names |= {each.removesuffix(BEAT).rpartition(".")[0] + LINES for each in beats}
    return [os.path.join(directory, name) for name in sorted(names)]


def names_in(directory: str) -> list[str]:
    """Return the sorted names in a directory; none if it is no directory. Raise ``MediumError``."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise MediumError(error.errno, f"{directory}: cannot list it: {error.strerror}") from error


def read(path: str) -> FoundJournal:
    """Return the journal at ``path``. Raise ``MediumError`` if it cannot be read, ``UsageError`` if
    its format is newer, ``CorruptionError`` if it is no journal."""
    try:
        with open(path, "rb") as file:
            data = file.read(READ_MAX)
    except FileNotFoundError:
        data = b""
    except OSError as error:
        raise MediumError(error.errno, f"{path}: cannot read it: {error.strerror}") from error
    if b"\n" in data:
        journal = decode(data, path)
    else:  # before the end of its first commit: there are only heartbeats
        model = urllib.parse.unquote(os.path.basename(path).removesuffix(LINES))
        journal = JournalContents(Head(format=FORMAT, model=model), ())
    lines, running = list(journal.lines), set()
    known = {each.session for each in lines if isinstance(each, SessionBegun)}
    for each in pages(path):
        page = read_page(each)
        if page is None:
            continue
        begun, ended = page
        if begun.session not in known:
            lines.append(begun)
        lines.append(ended)
        if is_alive(begun, each):
            running.add(begun.session)
    return FoundJournal(
        path, journal.head.model, tuple(lines), frozenset(running), journal.damaged, now_ns() / 1e9
    )


def lines_path(directory: str, model: str) -> str:
    """Return the path of a model's journal."""
    return os.path.join(directory, fitting(quote(model), _NAME_MAX) + LINES)


def pages(lines: str) -> list[str]:
    """Return the paths of the heartbeats of the journal at ``lines``, beside it and in memory."""
    stem = lines.removesuffix(LINES)
    stems = [stem, *in_memory(stem)]
    return [path for each in stems for path in sorted(glob.glob(f"{glob.escape(each)}.*{BEAT}"))]


def read_page(path: str) -> tuple[SessionBegun, SessionEnded] | None:
    """Return begin and end of a session by its heartbeat, or None if there is none."""
    try:
        with open(path, "rb") as file:
            return read_beat(file.read(PAGE + 1), path)
    except (OSError, PortusError) as error:
        _log.debug("%s: no heartbeat: %s", path, error)
        return None


def is_alive(begun: SessionBegun, path: str) -> bool:
    """Return whether the session whose heartbeat is at ``path`` runs on this machine."""
    # After a boot the numbers of processes start again.
    if begun.boot != boot():
        return False
    try:
        found = os.stat(path)
        with open(f"/proc/{begun.process}/maps", "rb") as file:
            # By its mapping of the page: the number may be another process's by now.
            return any(line.split(None, 5)[4] == b"%d" % found.st_ino for line in file)
    except PermissionError:
        return True  # another user's
    except OSError:
        return False


def in_memory(stem: str) -> list[str]:
    """Return the stem of pages in memory, for a pool whose file system cannot map them; it is in a
    private directory of this user. Return none if there is no such directory."""
    if not os.path.isdir(_MEMORY):
        return []
    directory = os.path.join(_MEMORY, f"portus-{os.getuid()}")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        # Any user may create names in /dev/shm: it may be another user's, or a link.
        found = os.lstat(directory)
    except OSError:
        return []
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return []
    mark = hashlib.sha256(os.fsencode(os.path.realpath(stem))).hexdigest()[:16]
    return [os.path.join(directory, mark)]


def now_ns() -> int:
    """Return the nanoseconds since the boot of this machine."""
    return time.clock_gettime_ns(_CLOCK)


@functools.cache
def boot() -> str:
    """Return the id of this boot of this machine, or "" if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read(64).strip()
    except OSError:
        return ""
