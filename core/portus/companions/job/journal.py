"""The journal of a run: the history of its saves and restarts, written beside its pool.

A directory ``<pool>.journal`` has one file of lines for each model
(``portus.companions.journal.lines``), and one page for each session that runs, or was killed: its
heartbeat. A session begins with its first step. The worker of its ``Checkpointer`` makes its page
and adds its lines, so training only stores one line into the page after each step. No line is
synced: all of it survives a kill, but after a power cut the newest lines may be missing.

It is beside the pool, since a record in the pool would cost a commit, and be lost with the pool.

The next session copies the page of a killed one into the journal, and removes the page. A journal
is only a message: nothing here raises, or ends a save.

The page is mapped where stores cannot raise SIGBUS (see ``reach.media.local``); elsewhere it is in
``/dev/shm``, where it survives a kill, but no reboot.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
from torch.optim.optimizer import Optimizer

from portus.companions.cadence.bound import Decision
from portus.companions.job.clock import FOREIGN, FOREIGN_S, Clock
from portus.companions.journal.lines import (
    FILE_MAX,
    FORMAT,
    REQUESTED,
    STATS,
    TEXT_MAX,
    Failed,
    Head,
    IntervalDecided,
    Line,
    Saved,
    SessionBegun,
    SessionEnded,
    beat,
    decode,
    encode,
    first_page,
    shorten,
)
from portus.engine.fence import fence
from portus.engine.loading.checkpoint_file import take_loaded
from portus.engine.media.calls import mark
from portus.engine.pipeline.handle import SaveStats
from portus.engine.pipeline.request import Companion
from portus.engine.pipeline.run import Save
from portus.engine.spec import PAGE
from portus.errors import CorruptionError, PortusError, UsageError
from portus.reach.index.directory import make_directory
from portus.reach.index.journals import (
    BEAT,
    LINES,
    boot,
    in_memory,
    is_alive,
    lines_path,
    now_ns,
    pages,
    read_page,
)
from portus.reach.media.file import MappedFile
from portus.reach.media.local import LocalFiles, write_whole

_log: Final = logging.getLogger("portus")

JOURNALS: Final = "checkpoints.journal"
"""In ``.portus``: the journals of all trainings that save files there, each in its own file."""

SIZE_MAX: Final = 1 << 20
"""The most bytes of a journal; a longer one is shortened to half of that, where one line stands for
several old saves."""

_WAITING_MAX: Final = 256
"""The most decisions that wait for the next line."""


_LOOK_AT: Final = 32
"""The steps between two looks at the duration of a step."""


class Journal(Companion, fence.Listener):
    """The journal of one training, called ``model`` there. place: returns the directory of the
    journal, or None while there is none. It is called at each step and save."""

    def __init__(self, model: str, place: Callable[[], str | None]) -> None:
        self._model: Final = model
        self._place: Final = place
        self._session: Final = os.urandom(8).hex()
        self._time_ns: Final = time.time_ns()
        self._at_ns: Final = now_ns()
        self._clock: Final = Clock()
        self._beginning: Final = threading.Lock()
        self._directory: str | None = None
        self._page: mmap.mmap | None = None
        self._page_path = ""
        self._begun: SessionBegun | None = None
        self._is_refused = False
        self._is_told = False
        """True once the journal has the line of this session."""
        self._steps = 0
        self._last_ns = 0
        self._work_ns = 0
        """The time of the steps without saves."""
        self._typical_ns = 0
        """The recent duration of a step that no save touched; 0 if unknown."""
        self._is_touched = False
        self._requested: Final[deque[tuple[str, int]]] = deque(maxlen=REQUESTED)
        self._beats = 0
        self._asked: dict[str, Saved] = {}
        """The lines of saves that have not ended, by token; ``file`` is still the whole path."""
        self._number = 0
        self._cost_s: float | None = None
        """The cost of the newest version in the journal, if it is known by now."""
        self._written: tuple[Saved, SaveStats] | None = None
        self._waiting: Final[deque[Line]] = deque(maxlen=_WAITING_MAX)
        self._has_warned = False
        self._closed = False
        self._process: Final = os.getpid()
        global _open
        _open = (*_open, self)
        fence.listen(self)

    # The training thread.

    def after_step(self, optimizer: Optimizer) -> None:
        """Count the step, and write its duration."""
        steps = self._clock.steps
        if steps == self._steps:
            return  # one of several that make a step together
        self._steps = steps
        at_ns = now_ns()
        took_ns, self._last_ns = at_ns - (self._last_ns or self._at_ns), at_ns
        if not steps % _LOOK_AT or not self._typical_ns:
            self._typical_ns = round(1e9 * (self._clock.step_s or 0.0))
        most_ns = self._typical_ns
        if steps == 1:
            took_ns = 0  # its start is unknown
        elif most_ns and (
            self._is_touched or self._asked or took_ns > FOREIGN * most_ns + 1e9 * FOREIGN_S
        ):
            # Time that a save, or something else, added to the step is no work.
            took_ns = min(took_ns, most_ns)
        self._is_touched = False
        self._work_ns += took_ns
        self._begin()
        self._beat(at_ns)

    def _beat(self, at_ns: int) -> None:
        into = self._page
        if into is not None:
            self._beats += 1
            with contextlib.suppress(ValueError):  # closed meanwhile
                beat(into, self._beats, self._end(at_ns))

    def _end(self, at_ns: int) -> SessionEnded:
        return SessionEnded(
            session=self._session,
            closed=self._closed,
            steps=self._steps,
            at_s=at_ns / 1e9,
            work_s=self._work_ns / 1e9,
            asked=dict(self._requested),
        )

    def note_start(self, path: str, save: Save) -> None:
        self._take_costs()
        self._number += 1
        self._is_touched = True
        at_ns = now_ns()
        asked = Saved(
            session=self._session,
            number=self._number,
            step=save.step,
            steps=self._steps,
            at_s=at_ns / 1e9,
            token=save.token.hex(),
            work_s=self._work_ns / 1e9,
            file=path,
        )
        self._asked[asked.token] = asked
        self._requested.append((asked.token, self._steps))
        self._beat(at_ns)

    def _take_costs(self) -> None:
        costs = self._clock.take()
        if costs is not None:
            self._cost_s = (self._cost_s or 0.0) + costs.cost_s

    def note_decision(self, decision: Decision) -> None:
        """Record an interval for the steps to come."""
        at_s = now_ns() / 1e9
        self._waiting.append(
            IntervalDecided(session=self._session, steps=self._steps, at_s=at_s, decision=decision)
        )

    def _begin(self) -> None:
        """Begin the session, with its page in the directory, unless it has begun, or there is no
        directory yet. Also on the worker, if a save comes before all steps."""
        if self._begun is None and not self._closed:
            directory = self._place()
            if directory is not None:
                self._begin_in(directory)

    @mark
    def _begin_in(self, directory: str) -> None:
        with self._beginning:
            if self._begun is not None or self._closed:
                return
            is_there = True
            with self._report_errors():
                # Not the directory of the run: its user may have moved it since the commit.
                is_there = make_directory(directory, is_inside=True)
            if not is_there:
                return  # until it is there again
            self._directory = directory
            resumed = take_loaded(self._model)
            begun = SessionBegun(
                session=self._session,
                at_s=self._at_ns / 1e9,
                time_ns=self._time_ns,
                boot=boot(),
                process=self._process,
                resumed=None if resumed is None else resumed[0].hex(),
                resumed_step=None if resumed is None else resumed[1],
            )
            self._make_page(begun)
            self._begun = begun

    # The worker.

    def over(self, save: Save) -> None:
        self._begin()
        asked = self._asked.pop(save.token.hex(), None)
        if self._begun is None:
            return
        at_s = now_ns() / 1e9
        if save.error is not None:
            steps = self._steps if asked is None else asked.steps
            why = _short(str(save.error))
            failed = Failed(session=self._session, step=save.step, steps=steps, at_s=at_s, why=why)
            self._write(failed)
        elif asked is not None:
            file = self._relative_path(asked.file)
            line = _price(msgspec.structs.replace(asked, at_s=at_s, file=file), save.stats, None)
            self._write(*self._take_lines(), line)
            self._written, self._cost_s = (line, save.stats), None

    # The end.

    def close(self) -> None:
        """Record that the session closed. A second call does nothing."""
        if self._closed:
            return
        self._take_costs()
        self._closed = True
        self._leave_hooks()
        page, self._page = self._page, None
        if self._process != os.getpid():  # a forked child: the page is the parent's
            return
        if self._begun is not None and (self._is_told or self._steps):
            self._write(*self._take_lines(), self._end(now_ns()))
        if page is not None:
            page.close()
        if self._page_path:
            with contextlib.suppress(OSError):
                os.unlink(self._page_path)

    def leave(self) -> None:
        """Close this journal in a forked child, without writing: the page is the parent's."""
        self._closed, self._page = True, None
        self._leave_hooks()

    def _leave_hooks(self) -> None:
        global _open
        _open = tuple(each for each in _open if each is not self)
        fence.unlisten(self)
        self._clock.close()

    # Files.

    @property
    def _path(self) -> str:
        assert self._directory is not None
        return lines_path(self._directory, self._model)

    def _relative_path(self, file: str) -> str:
        if not file or self._directory is None:
            return ""
        seen = os.path.relpath(file, self._directory)
        data = seen.encode("utf-8", "replace")
        return seen if data == os.fsencode(seen) and len(data) <= FILE_MAX else ""

    def _take_lines(self) -> Iterator[Line]:
        """Yield the newest version's line again, if its cost is known; then the waiting ones."""
        if self._written is not None:
            line, stats = self._written
            now = _price(line, stats, self._cost_s)
            if now != line:
                yield now
            self._written = None
        while self._waiting:
            yield self._waiting.popleft()

    def _write(self, *lines: Line) -> None:
        """Add lines; before the first ones of this session, the line that identifies it."""
        if self._is_refused:
            return
        assert self._begun is not None
        assert self._directory is not None
        with self._report_errors():
            if not make_directory(self._directory, is_inside=True):
                return  # moved away: the lines that come then are lost
            if self._is_told and os.path.exists(self._path):
                self._append(lines)
                return
            known = self._known_sessions()
            head = Head(format=FORMAT, model=_short(self._model))
            self._append((head, self._begun, *lines))
            self._is_told = True
            self._fold(known)

    def _append(self, lines: Sequence[Head | Line]) -> None:
        """Add lines in one write to the existing file: other processes may add too."""
        data = b"".join(map(encode, lines))
        with open(self._path, "a+b", buffering=len(data) + 2) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read(1) not in (b"", b"\n"):
                data = b"\n" + data  # a torn line stays a line of its own
            file.write(data)
        if size + len(data) > SIZE_MAX:
            self._shorten()

    def _shorten(self) -> None:
        with open(self._path, "rb") as file:
            found = decode(file.read(), self._path)
        write_whole(self._path, shorten(found.head, found.lines, SIZE_MAX // 2))

    def _make_page(self, begun: SessionBegun) -> None:
        stem = self._path.removesuffix(LINES)
        self._page, self._page_path = _map_new_file(stem, self._session, first_page(begun))
        if self._steps or self._requested:  # from before there was a directory for the page
            self._beat(self._last_ns or self._at_ns)

    def _fold(self, known: set[str]) -> None:
        """Put the contents of killed sessions' pages into the journal, and remove these pages."""
        for path in pages(self._path):
            page = read_page(path)
            if page is None or is_alive(page[0], path):
                continue
            begun, ended = page
            if begun.session in known:
                self._append((ended,))
            elif ended.steps:
                self._append((begun, ended))
            # Removed last: a kill in between repeats the line, and loses nothing.
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _known_sessions(self) -> set[str]:
        """Return the sessions of the journal. Raises ``UsageError`` for one of a newer format."""
        try:
            with open(self._path, "rb") as file:
                found = decode(file.read(), self._path)
        except (FileNotFoundError, CorruptionError):
            return set()
        return {each.session for each in found.lines if isinstance(each, SessionBegun)}

    @contextlib.contextmanager
    def _report_errors(self) -> Iterator[None]:
        """Log an error once, and let training continue."""
        try:
            yield
        except (OSError, PortusError) as error:
            # A newer format: this Portus must not write to it.
            self._is_refused = self._is_refused or isinstance(error, UsageError)
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "portus: cannot write the journal of %s (saves continue; portus report lacks "
                    "them until it can be written): %s",
                    self._model,
                    error,
                )


_open: tuple[Journal, ...] = ()


def note_decision(decision: Decision) -> None:
    """Record an interval that a cadence of this process chose."""
    for journal in _open:
        journal.note_decision(decision)


def _leave_in_child() -> None:
    # After the hooks of imported modules, which renew locks that others held at the fork.
    for journal in _open:
        journal.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)


def _price(line: Saved, stats: SaveStats, cost_s: float | None) -> Saved:
    """Return ``line`` with the cost of the save so far."""
    now = {name: getattr(stats, name) for name in STATS}
    return msgspec.structs.replace(
        line, cost_s=cost_s if line.cost_s is None else line.cost_s, **now
    )


def _map_new_file(stem: str, session: str, data: bytes) -> tuple[mmap.mmap | None, str]:
    """Return a new mapped file that holds ``data``, and its path; None, and no file, on failure."""
    for place in (stem, *in_memory(stem)):
        path = f"{place}.{session}{BEAT}"
        fresh = f"{path}.new"
        try:
            with open(fresh, "x+b", buffering=0) as file:
                file.write(data)
                medium = LocalFiles().open(fresh, writable=True)
                medium.close()
                # Only if a store into the mapping cannot raise SIGBUS, as on a full sparse file.
                if isinstance(medium, MappedFile):
                    page = mmap.mmap(file.fileno(), PAGE)
                    # Renamed when it is whole: readers of pages find no incomplete one.
                    os.replace(fresh, path)
                    return page, path
        except (OSError, ValueError) as error:
            _log.debug("%s: no heartbeat there: %s", path, error)
        with contextlib.suppress(OSError):
            os.unlink(fresh)
    return None, ""


def _short(text: str) -> str:
    return text.encode("utf-8", "replace").decode()[:TEXT_MAX]
