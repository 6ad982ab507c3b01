"""Paths of files that are not there yet, and code of this process that touches them.

``PENDING`` has the paths of saves in flight. While there are any, an audit hook of Python makes
code that lists, opens, copies, renames, links or removes such a file wait for it, and code that
starts a program wait for all of them: so it finds the same as after ``torch.save``. The hook cannot
be removed again; while no save is in flight it costs one look at a tuple.

Not seen: ``os.stat`` and functions over it (``os.path.exists``, ``getsize``), for which Python has
no event, and readers in other languages.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from portus.engine.media import calls, process
from portus.engine.pipeline.handle import SavePending


class Ticket(NamedTuple):
    """One path of a save in flight."""

    path: str
    save: SavePending


class _Thread(threading.local):
    is_exempt = False


class PendingPaths:
    """The paths of saves in flight in this process. Threads may share it. No lock is held during a
    wait, and a signal handler that interrupted a call of Portus does not wait."""

    def __init__(self) -> None:
        self._tickets: tuple[Ticket, ...] = ()  # replaced, never changed: readers need no lock
        self._lock = threading.RLock()
        self._thread: Final = _Thread()
        self._is_hooked = False

    def add(self, path: str, save: SavePending) -> None:
        """Note that a save to ``path``, absolute and without links, is in flight."""
        with self._lock:
            self._tickets = (*self._tickets, Ticket(path, save))
            if not self._is_hooked:
                self._is_hooked = True
                # With the first save, since a hook cannot be removed again. Not by replacing
                # `os.rename` and others: modules that imported them keep theirs (decision 0205).
                sys.addaudithook(self._audit)

    def remove(self, save: SavePending) -> None:
        """Remove the paths of a save that has ended. A second call does nothing."""
        with self._lock:
            self._tickets = tuple(each for each in self._tickets if each.save is not save)

    def wait_for(self, path: str) -> None:
        """Wait until no save of this process to ``path``, or below it, is in flight."""
        for ticket in self._tickets:
            if _is_within(ticket.path, path):
                ticket.save.join()

    @contextlib.contextmanager
    def exempt(self) -> Iterator[None]:
        """Exempt this thread from waits inside the block: it runs Portus itself."""
        before, self._thread.is_exempt = self._thread.is_exempt, True
        try:
            yield
        finally:
            self._thread.is_exempt = before

    def forget(self) -> None:
        """Forget all saves, in a forked child: they are the parent's."""
        self._lock = threading.RLock()
        self._tickets = ()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Wait for the saves that an audit event concerns. This is the hook of ``sys``."""
        tickets = self._tickets
        if not tickets:
            return
        matches = _TOUCHED.get(event)
        # When the interpreter is ending, no thread would finish the save.
        if matches is None or self._thread.is_exempt or sys.is_finalizing():
            return
        if process.is_opening():
            return  # this call has waited
        try:
            awaited = matches(tickets, arguments)
        except (OSError, ValueError, TypeError, IndexError):
            return  # the call itself reports what is wrong with it
        if not awaited or calls.is_nested():
            return
        # No lock is held here: ``remove``, which takes it, is what ends the wait.
        for ticket in awaited:
            with contextlib.suppress(Exception):  # the save's own error is reported elsewhere
                ticket.save.join()


Touched = Callable[[tuple[Ticket, ...], tuple[Any, ...]], list[Ticket]]
"""Returns the saves in flight that an event, with its arguments, has to wait for."""


def _real(path: Any, directory: Any = None) -> str:
    """Return the path of ``path``, or of an open file, without links: from ``directory``, a
    descriptor, if there is one (an event has -1 or None for none) and the path is relative."""
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    text = os.fsdecode(path)
    if isinstance(directory, int) and directory >= 0 and not os.path.isabs(text):
        text = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), text)
    return os.path.realpath(text)


def _is_within(path: str, above: str) -> bool:
    return path == above or path.startswith(above.rstrip(os.sep) + os.sep)


def _on_open(tickets: tuple[Ticket, ...], arguments: tuple[Any, ...]) -> list[Ticket]:
    """Return the saves that an open waits for. Opens are many: most names show there are none."""
    path = arguments[0]
    if isinstance(path, int) or path is None:
        return []
    text = os.fsdecode(path)
    name = os.path.basename(text)
    # ``realpath`` makes a call for each directory of a path, too much for each open of an import.
    # The name of a link says nothing of where it leads.
    if not any(ticket.path.endswith(name) for ticket in tickets) and not os.path.islink(text):
        return []
    real = os.path.realpath(text)
    return [ticket for ticket in tickets if ticket.path == real]


def _on_list(tickets: tuple[Ticket, ...], arguments: tuple[Any, ...]) -> list[Ticket]:
    path = arguments[0] if arguments else None
    real = _real("." if path is None else path)
    return [ticket for ticket in tickets if os.path.dirname(ticket.path) == real]


def _on_change(*places: tuple[int, int | None]) -> Touched:
    """Return a function for calls that change, or copy, everything at some paths. places: for each
    path the number of its argument, and of that of its directory."""

    def match(tickets: tuple[Ticket, ...], arguments: tuple[Any, ...]) -> list[Ticket]:
        found = []
        for at, directory in places:
            if at >= len(arguments) or arguments[at] is None:
                continue
            there = None if directory is None else arguments[directory]
            # A change of a link to the file waits, and so does one of the file itself.
            ways = {_real(arguments[at], there), _path_of_name(arguments[at], there)}
            found += [
                ticket
                for ticket in tickets
                if ticket not in found and any(_is_within(ticket.path, way) for way in ways)
            ]
        return found

    return match


def _path_of_name(path: Any, directory: Any) -> str:
    """Return the path of the name itself, which may be a link."""
    if isinstance(path, int):
        return _real(path)
    where, name = os.path.split(os.fsdecode(path))
    return os.path.join(_real(where or ".", directory), name)


def _on_link(tickets: tuple[Ticket, ...], arguments: tuple[Any, ...]) -> list[Ticket]:
    """Return the saves to the target of a symbolic link, so that the link never dangles."""
    source, target, directory = arguments
    own = _path_of_name(target, directory)
    leads = os.path.realpath(os.path.join(os.path.dirname(own), os.fsdecode(source)))
    ways = {leads, own}
    return [ticket for ticket in tickets if ticket.path in ways]


def _all(tickets: tuple[Ticket, ...], arguments: tuple[Any, ...]) -> list[Ticket]:
    """Return all saves: the paths that another program will touch are unknown."""
    return list(tickets)


_TOUCHED: Final[dict[str, Touched]] = {
    "open": _on_open,
    "os.listdir": _on_list,
    "os.scandir": _on_list,
    "os.rename": _on_change((0, 2), (1, 3)),
    "os.link": _on_change((0, 2), (1, 3)),
    "os.symlink": _on_link,
    "os.remove": _on_change((0, 1)),
    "os.rmdir": _on_change((0, 1)),
    "os.truncate": _on_change((0, None)),
    "os.chmod": _on_change((0, 2)),
    "os.chown": _on_change((0, 3)),
    "os.utime": _on_change((0, 3)),
    "shutil.copyfile": _on_change((0, None), (1, None)),
    "shutil.copytree": _on_change((0, None), (1, None)),
    "shutil.make_archive": _on_change((2, None), (3, None)),
    "shutil.move": _on_change((0, None), (1, None)),
    "shutil.rmtree": _on_change((0, 1)),
    "shutil.unpack_archive": _on_change((0, None)),
    "subprocess.Popen": _all,
    "os.exec": _all,
    "os.posix_spawn": _all,
    "os.spawn": _all,
    "os.system": _all,
}
"""Source: https://docs.python.org/3/library/audit_events.html"""


PENDING: Final = PendingPaths()
"""The pending paths of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PENDING.forget)
