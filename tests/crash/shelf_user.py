"""A process with a shelf on a simulated disk or device, and what a crash may leave of it.

What a shelf shows is a ``State``: its names, and for each the bytes or the plain value. A fact is
the states that a crash may leave from now on; the last one counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from portus.companions.shelf import Shelf
from portus.engine.format.checksum import digest
from portus.engine.media.base import Medium
from portus.engine.spec import PAGE
from portus.errors import MediumError
from portus.reach.index.directory import open_writer
from portus.reach.index.reader import PoolReader
from portus.reach.media.lock import ProcessLocks
from tests.crash.logged import POOL, DeviceProcess, Process, Report, pool_file, require_unbroken
from tests.simulation.crash import CrashFiles

LOG: Final = 7 * PAGE
DEVICE: Final = 80 * PAGE

State = tuple[tuple[str, object], ...]

EMPTY: Final[State] = ()


def shown(shelf: Shelf) -> State:
    """What a shelf has, arrays by their digests."""
    return tuple((name, _plain(shelf[name])) for name in shelf)


def _plain(value: Any) -> object:
    if isinstance(value, np.ndarray):
        return value.shape, digest(value.tobytes())
    return value


class User(Process[State]):
    """One process. Wrong ones override a part of it."""

    log_bytes = LOG

    def __init__(self, files: CrashFiles, report: Report[State]) -> None:
        super().__init__(files, report, EMPTY)
        self.shelf = self.open()
        self.state = shown(self.shelf)
        self.report((self.state,))

    def open(self) -> Shelf:
        writer = open_writer(POOL, self.medium_files(), locks=ProcessLocks())
        return Shelf.on(writer, log_bytes=self.log_bytes)

    @contextlib.contextmanager
    def change(self) -> Iterator[Shelf]:
        """Inside, views and names change in memory, in a transaction."""
        with self.shelf.transaction():
            yield self.shelf
            after = shown(self.shelf)
            self.report((self.state, after))
        self.done(after)

    def sync(self) -> None:
        after = shown(self.shelf)
        self.report((self.state, after))
        self.shelf.sync()
        self.done(after)

    def done(self, after: State) -> None:
        self.state = after
        self.report((after,))

    def close(self) -> None:
        self.sync()
        self.shelf.close()


class Roomy(User):
    """One whose log is not folded in."""

    log_bytes = 6 * LOG


class OnDevice(DeviceProcess[State], User):
    """One whose shelf is on a DAX device."""


# --- what processes do ----------------------------------------------------------------------

Plan = Callable[[User], None]


def moment(user: User) -> int:
    """A number that no state before had."""
    return int(dict(user.state).get("step", 0)) + 1  # type: ignore[call-overload, no-any-return]


def begin(user: User) -> None:
    """Two arrays and a number, at once."""
    with user.change() as shelf:
        shelf.a = np.full(5 * PAGE + 100, 1, np.uint8)
        shelf.b = np.arange(300.0)
        shelf.step = 1


def transact(user: User) -> None:
    """Changes of one array or both, until the log is folded in, and once more."""
    if "a" not in user.shelf:
        begin(user)
    for _ in range(4):
        step = moment(user)
        with user.change() as shelf:
            shelf.a[step * 100 % len(shelf.a)] = step
            if step % 4 == 2:
                shelf.b[step % 300 :] = step
            shelf.step = step


def sync(user: User) -> None:
    """The same, outside of transactions."""
    if "a" not in user.shelf:
        begin(user)
    for _ in range(2):
        user.shelf.a[:PAGE] += 1
        user.shelf.a[3 * PAGE] += 1
        user.shelf.b[:3] += 1
        user.sync()


def rearrange(user: User) -> None:
    """Swap, resize, rename, delete, with bytes that change in the same transaction."""
    if "a" not in user.shelf:
        begin(user)
    step = moment(user)
    with user.change() as shelf:
        shelf.step = -step
    with user.change() as shelf:
        one, other = ("b", "a") if "b" in shelf else ("c", "a")
        shelf[other][-1] = step
        shelf.swap(one, other)
        shelf.step = step
    with user.change() as shelf:
        shelf.resize("a", len(shelf.a) // 2 + 10)
        shelf.a[0] = step
        shelf[one][step] = step
    with user.change() as shelf:
        shelf.rename(one, "b" if one == "c" else "c")
        shelf.new = np.full(10, step)
    with user.change() as shelf:
        del shelf.new
        shelf.a[1] += 1


def take_its_place(user: User) -> None:
    """An array that is in the log goes, and others come to where it was."""
    if "a" not in user.shelf:
        begin(user)
    with user.change() as shelf:
        shelf.b[7] = 7
    with user.change() as shelf:
        del shelf.b
    for name in ("c", "d", "e"):
        with user.change() as shelf:
            shelf[name] = np.full(300, 2.0)


def go_on(user: User) -> None:
    """What a process does that follows another."""
    if "a" not in user.shelf:
        begin(user)
    with user.change() as shelf:
        shelf.a[3] += 1
        shelf.step = moment(user)
    user.close()


def survive(user: User) -> None:
    """Transactions, one of which fails; the shelf is opened again in the same boot."""
    try:
        transact(user)
    except MediumError:
        go_on(type(user)(user.files, user.report))


# --- what a crash may leave -----------------------------------------------------------------


def verify(
    files: CrashFiles,
    facts: Sequence[tuple[State, ...]],
    find: Callable[[CrashFiles], Medium | None] = pool_file,
) -> None:
    """The shelf shows one of the states that the last fact allows, to a reader and to who opens it
    for writing, and no rule of the format is broken."""
    allowed = facts[-1] if facts else (EMPTY,)
    medium = find(files)
    if medium is None:
        assert EMPTY in allowed
        return
    reader = PoolReader(medium, ProcessLocks())
    found = shown(Shelf.on(reader))
    assert found in allowed, f"found {_said(found)}, expected {[_said(each) for each in allowed]}"
    require_unbroken(files, reader)


def _said(state: State) -> Mapping[str, object]:
    return {
        name: value if not isinstance(value, tuple) else value[1].hex()[:8] for name, value in state
    }
