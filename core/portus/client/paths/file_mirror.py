"""``DirectoryMirror``: the files of one run are copied to a store, behind training, newest first.

Each committed file is uploaded whole, under its own name. What the run removes is removed there
too, once nothing newer waits to be uploaded: so the store is never without the newest checkpoint
that it had. A machine that has nothing of the run fetches the files before it looks for the one to
go on from.

Beside the journal of the run a note says who this run on this machine is, and what it removed that
is in the store still: after a kill it is removed there, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from portus.client.files.pending import PENDING
from portus.client.loading.checkpoint_file import has_digests
from portus.client.paths.draft import make_directory, new_publisher
from portus.directory.links import replace_link
from portus.errors import (
    CorruptionError,
    MediumError,
    PortusError,
    TransportError,
    UsageError,
    printable,
)
from portus.media.local import LocalFiles
from portus.media.process import Descriptor
from portus.mirror.address import StoreAddress
from portus.mirror.behind import READ_ALONE, Behind, ElsewhereError, who
from portus.mirror.files import MirroredFiles
from portus.mirror.objects import Filed, State
from portus.mirror.opening import check_writable, open_file_store
from portus.mirror.store import UnwritableError
from portus.mirror.waiting import bar

_log: Final = logging.getLogger("portus")

_NOTE: Final = "mirror.json"


class _Note(msgspec.Struct):
    """``run``: 32 hex digits, of this run on this machine. ``gone``: paths of files that the run
    removed, and that the store may have still."""

    run: str
    gone: list[str] = []


@dataclass(frozen=True, slots=True)
class _Committed:
    """A file to be uploaded. ``identity``: what tells that it is the same still. ``term``: in which
    it was saved; None for this one."""

    path: str
    step: int
    identity: tuple[int, ...]
    time_ns: int
    size: int
    term: int | None = None


class DirectoryMirror(Behind):
    """See the module. Thread-safe but for ``fetch`` and ``begin``."""

    def __init__(
        self,
        address: StoreAddress,
        model: str,
        *,
        root: str,
        checkpoints: str,
        home: str,
        wait_s: float,
    ) -> None:
        """Asks nobody. root: the directory, absolute, that names in the store are relative to, and
        below which all is mirrored. checkpoints: a directory there, in which others may have left
        checkpoints. home: of the note, made when that is written. Raises ``UsageError``."""
        store = open_file_store(address)
        super().__init__(store, str(address), model, wait_s=wait_s)
        self._place: Final = address
        self._directory: Final = root
        self._checkpoints: Final = checkpoints
        self._note_path: Final = os.path.join(home, _NOTE)
        self._mirror: Final = MirroredFiles(store, model, str(address))
        self._guard: Final = threading.RLock()
        """Of the note, and of what is to be done."""
        self._note: Final = _read_note(self._note_path)
        self._waiting: Final[dict[str, _Committed]] = {}
        """What is not mirrored, by path."""
        self._links: Final[set[str]] = set()
        self._step_of: Final[dict[str, int]] = {}
        self._uploaded = ""
        self._newest_ns = 0
        self._has_begun = False
        self._is_behind = False
        """True if a file could not be read: what was to go before it stays in the store."""

    # Before the first save.

    def fetch(self) -> int:
        """If this machine has nothing of the run, fetch what the store has; how many files. Blocks.

        Raises ``UsageError`` if both have a history that the other one lacks, ``CorruptionError``
        if no file there is as it was uploaded, and what the store raises.
        """
        with PENDING.exempt():
            state = self._mirror.read()
            return self._fetch_all(state) if self._is_lost(state) else 0

    def pull(self) -> list[str]:
        """Fetch what the store has and is not here, whoever has a newer history; the paths. Blocks.
        Raises as ``fetch``."""
        before = self._missing(state := self._mirror.read())
        self._fetch_all(state)
        return [each.path for each in before if self._has(each)]

    def begin(self) -> None:
        """``fetch``, and from now on what the run commits is mirrored, and nobody else's: before
        the first save.

        Raises as ``fetch``, and ``UsageError`` if the store may be read, not written. If it does
        not answer and this machine has something, the thread tries again.
        """
        if self._has_begun:
            return
        check_writable(self._place)
        with PENDING.exempt():
            try:
                self.fetch()
                self._claim()
            except (TransportError, MediumError) as error:
                if not any(self._images()):
                    raise  # nobody knows whether there is something to go on from
                self._say(error)
            except UnwritableError as error:
                raise UnwritableError(
                    f"{self.address}: nothing can be mirrored there: {READ_ALONE}: {error}. "
                    "Expected a mirror that this process may write to: give it that right, name "
                    "another mirror, or say mirror='none'"
                ) from error
            self._has_begun = True
            self._look()
        self.wake()

    def wake(self) -> None:
        """As of ``Behind``; nothing before ``begin``: who only loads takes no mirror over."""
        if self._has_begun:
            super().wake()

    # While it saves. On the worker, as a rule.

    def committed(self, path: str, step: int) -> None:
        """The file at ``path``, absolute, was committed."""
        name = self._name_of(path)
        with PENDING.exempt(), self._guard:
            if name is None:
                return
            self._step_of[name] = step
            self._forget_removal(name)
            self._links.discard(name)
            found = _committed(path, name, step)
            if found is not None and found.time_ns <= self._newest_ns:
                with contextlib.suppress(OSError):  # a coarse clock, or one that was set back
                    os.utime(path, ns=(self._newest_ns + 1,) * 2)
                found = _committed(path, name, step)
            if found is not None:
                self._newest_ns = max(self._newest_ns, found.time_ns)
                self._waiting.pop(name, None)
                self._waiting[name] = found
        self.wake()

    def linked(self, link: str) -> None:
        """A link at ``link`` leads, or is about to lead, to a file of the run."""
        name = self._name_of(link)
        if name is not None:
            with self._guard:
                self._forget_removal(name)
                self._waiting.pop(name, None)
                self._links.add(name)
            self.wake()

    def removing(self, path: str) -> None:
        """The file at ``path`` is about to be removed by the run. Raises nothing."""
        name = self._name_of(path)
        if name is None:
            return
        with PENDING.exempt(), self._guard:
            self._waiting.pop(name, None)
            self._links.discard(name)
            is_there = self._mirror.state.file(name) is not None or name == self._uploaded
            if is_there and name not in self._note.gone:
                self._note.gone.append(name)
                self._write_note()
        self.wake()

    def yield_space(self) -> bool:
        """The disk is full: end the upload of a file that was removed meanwhile, whose space it
        holds. True if there was one."""
        with self._changed:
            path = os.path.join(self._directory, self._uploaded)
            if self._copying is None or os.path.lexists(path):
                return False
            self._copying.set()
            copies = self._copies
            self._changed.wait_for(lambda: self._copies != copies)
            return True

    def close(self) -> None:
        """As of ``Behind``."""
        if self._has_begun:
            with PENDING.exempt():
                self._look()  # a signal handler may have saved one
        super().close()

    def unmirrored(self) -> list[str]:
        """The paths of the files that are not mirrored."""
        with self._guard:
            return list(self._waiting)

    def _left(self) -> str:
        left = self.unmirrored()
        if not left:
            return ""
        return (
            f"{len(left)} files of {printable(self._directory)} are not in {self.address}, the "
            f"newest {printable(left[-1])}"
        )

    # The thread.

    def _catch_up(self) -> None:
        with PENDING.exempt():
            if not self._mirror.is_claimed:
                self._claim()
            while (file := self._next()) is not None:
                self._upload(file)
            self._say_links()
            self._remove_gone()

    def _next(self) -> _Committed | None:
        """The newest file that waits."""
        with self._guard:
            newest = max(self._waiting.values(), key=lambda each: each.time_ns, default=None)
            self._uploaded = newest.path if newest is not None else ""
            return newest

    def _upload(self, file: _Committed) -> None:
        path = os.path.join(self._directory, file.path)
        try:
            with contextlib.closing(Descriptor(path, os.O_RDONLY)) as opened:
                if _identity(os.fstat(opened.number)) == file.identity:
                    with self._uploading() as stop:
                        self._mirror.put(file.path, opened.number, file.step, stop, term=file.term)
                    self._has_copied, self._is_behind = True, False
                    self._mirrored_ns = max(self._mirrored_ns, file.time_ns)
        except OSError as error:
            if isinstance(error, PortusError):
                raise
            if not isinstance(error, FileNotFoundError):  # else it was removed, or moved away
                self._is_behind = True
                _log.warning(
                    "portus: %s is not mirrored: %s", printable(path), error.strerror or error
                )
        with self._guard:
            if self._waiting.get(file.path) == file:
                del self._waiting[file.path]

    def _say_links(self) -> None:
        with self._guard:
            links = list(self._links)
        for name in links:
            before = self._mirror.state.file(name)
            try:
                target = os.readlink(os.path.join(self._directory, name))
            except OSError:
                continue  # it is not there yet, or is a file now
            if before is None or before.link != target:
                self._mirror.link(name, target)

    def _remove_gone(self) -> None:
        with self._guard:
            gone = list(self._note.gone)
        if not gone or self._is_behind:
            return
        try:
            self._mirror.remove(gone)
        except UsageError as error:  # no right to delete; they do not count any more
            self._say(error)
        with self._guard:
            self._note.gone[:] = [each for each in self._note.gone if each not in gone]
            self._write_note()

    def _claim(self) -> None:
        state = self._mirror.read()
        if self._is_lost(state):
            assert state.newest_file is not None
            raise self._elsewhere(state.newest_file)
        state = self._mirror.claim(who(), bytes.fromhex(self._note.run))
        with self._guard:
            self._write_note()
        try:
            self._mirror.sweep()
        except UsageError as error:  # no right to delete
            self._say(error)
        if state.newest_file is not None:
            newest_ns = state.newest_file.time_ns
            self._mirrored_ns = max(self._mirrored_ns, newest_ns)
            self._newest_ns = max(self._newest_ns, newest_ns)

    def _look(self) -> None:
        """Note what is in the directory and not in the store: a process that was killed did not
        come to it."""
        newest = self._mirror.state.newest_file
        for path in self._images():
            name = os.path.relpath(path, self._directory)
            found = _committed(path, name, self._step_of.get(name, 0))
            with self._guard:
                if found is None or name in self._waiting:
                    continue
                if _is_same(found, self._mirror.state.file(name)):  # asked last: it was waiting
                    continue
                is_old = newest is not None and found.time_ns < newest.time_ns
                term = newest.term if newest is not None and is_old else None
                self._waiting[name] = replace(found, term=term)

    # What a machine that has nothing gets.

    def _is_lost(self, state: State) -> bool:
        """True if what the store has is to be fetched: this machine has nothing of it. Raises
        ``ElsewhereError`` if this machine has what the store has not, of another history."""
        newest = state.newest_file
        if newest is None or self._has(newest):
            return False
        own = [each.number for each in state.terms if each.pool.hex() == self._note.run]
        if max(own, default=-1) >= newest.term:
            return False  # this run had all of that, and what is missing here was removed here
        there = {each.path: each for each in state.files}
        for path in self._images():
            said = there.get(os.path.relpath(path, self._directory))
            if said is None or not self._has(said):
                raise self._elsewhere(newest)
        return True

    def _elsewhere(self, newest: Filed) -> ElsewhereError:
        return ElsewhereError(
            f"{printable(self._directory)}: run {self._model!r} went on elsewhere: the newest that "
            f"{self.address} has is {newest.path}, which is not here, and there are other files "
            "here. To resume from the mirror, move these files away; to resume from here, use "
            "another mirror, or mirror='none'"
        )

    def _has(self, said: Filed) -> bool:
        with contextlib.suppress(OSError):
            return os.stat(os.path.join(self._directory, said.path)).st_size == said.size
        return False

    def _missing(self, state: State) -> list[Filed]:
        """What is not here, oldest first."""
        files = [each for each in state.files if not each.link and not self._has(each)]
        return sorted(files, key=lambda each: (each.term, each.time_ns))

    def _fetch_all(self, state: State) -> int:
        """Oldest first: whoever is killed in it finds the newest missing, and goes on."""
        files = self._missing(state)
        if not files:
            return 0
        total = sum(each.size for each in files)
        _log.warning(
            "portus: %s: %d files of run %r, %d bytes, are fetched from %s",
            printable(self._directory),
            len(files),
            self._model,
            total,
            self.address,
        )
        done, failure = 0, None
        with bar("portus: fetch") as show:
            sent = [0]

            def advanced(count: int) -> None:
                sent[0] += count
                if show is not None:
                    show(sent[0] >> 20, max(1, total >> 20), " MiB")

            for each in files:
                try:
                    self._fetch(each, advanced)
                    done += 1
                except CorruptionError as error:
                    failure = error
                    _log.error("portus: a file is not fetched: %s", error)
        if failure is not None and not done:
            raise failure
        for each in state.files:
            path = os.path.join(self._directory, each.path)
            if each.link and not os.path.lexists(path):
                with contextlib.suppress(OSError):
                    replace_link(path, os.path.join(os.path.dirname(path), each.link))
        return done

    def _fetch(self, said: Filed, advanced: Callable[[int], None]) -> None:
        path = os.path.realpath(os.path.join(self._directory, said.path))
        make_directory(os.path.dirname(path))
        publisher = new_publisher()
        try:
            draft = publisher.begin(path)
            try:
                number = draft.files[0].file.number
                self._mirror.fetch(said, number, advanced)
                with contextlib.suppress(OSError):
                    os.utime(number, ns=(said.time_ns, said.time_ns))
                _sync(number, path)
                draft.publish()
            finally:
                draft.abandon()
        finally:
            publisher.close()

    # The directory.

    def _images(self) -> Iterator[str]:
        """The checkpoint files of Portus where there may be some."""
        there = {os.path.dirname(each.path) for each in self._mirror.state.files}
        found = {os.path.normpath(os.path.join(self._directory, each)) for each in there}
        for directory in sorted({*found, os.path.normpath(self._checkpoints)}):
            with contextlib.suppress(OSError), os.scandir(directory) as entries:
                for each in entries:
                    if not each.is_file(follow_symlinks=False):
                        continue
                    with contextlib.suppress(PortusError):
                        if has_digests(each.path):
                            yield each.path

    def _name_of(self, path: str) -> str | None:
        """What a file is called in the store; None for one elsewhere, or whose name is no text."""
        name = os.path.relpath(path, self._directory)
        if name.startswith(os.pardir) or name != name.encode(errors="replace").decode():
            return None
        return name.replace(os.sep, "/")

    def _forget_removal(self, name: str) -> None:
        if name in self._note.gone:
            self._note.gone.remove(name)
            self._write_note()

    def _write_note(self) -> None:
        """Durably. What fails is logged: then a kill may leave in the store what was removed."""
        directory = os.path.dirname(self._note_path)
        fresh = f"{self._note_path}.new"
        try:
            os.makedirs(directory, exist_ok=True)
            with open(fresh, "wb") as file:
                file.write(msgspec.json.encode(self._note))
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, self._note_path)
            LocalFiles().sync(directory)
        except OSError as error:
            _log.warning("portus: %s: %s", printable(self._note_path), error.strerror or error)


def _read_note(path: str) -> _Note:
    with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError):
        with open(path, "rb") as file:
            note = msgspec.json.decode(file.read(), type=_Note)
        if len(bytes.fromhex(note.run)) == 16:
            return note
    return _Note(os.urandom(16).hex())


def _committed(path: str, name: str, step: int) -> _Committed | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None  # it was removed again
    if not stat.S_ISREG(status.st_mode):
        return None
    return _Committed(name, step, _identity(status), status.st_mtime_ns, status.st_size)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_same(file: _Committed, said: Filed | None) -> bool:
    return said is not None and (said.size, said.time_ns) == (file.size, file.time_ns)


def _sync(number: int, path: str) -> None:
    try:
        os.fsync(number)
    except OSError as error:
        raise MediumError(
            error.errno, f"{printable(path)}: cannot be written: {error.strerror}"
        ) from error
