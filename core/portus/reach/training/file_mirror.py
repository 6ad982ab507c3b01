"""``DirectoryMirror``: copies the files of one run to a store, in the background, newest first.

Each committed file is uploaded whole, under its own name, even if the run removes it meanwhile. A
checkpoint that is a directory counts once all its files are there, by one entry of the log. A file
that the run removes is removed there too, once the checkpoint that was newest by then is there, or
a newer one: so the store never lacks the newest checkpoint that it had. A machine without files of
the run fetches them before it looks for the one to resume from.

Beside the journal of the run is a note. It has the identity of this run on this machine, and the
removed files that the store may still have: after a kill they are removed there, too.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import posixpath
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from portus.engine.directory.folder import FOLDER
from portus.engine.directory.waiting import wait_for_drafts
from portus.engine.files.pending import PENDING
from portus.engine.format.pointer_marks import POINTER_MAX
from portus.engine.job.settings import Settings
from portus.engine.loading.checkpoint_file import has_digests, use_file
from portus.engine.loading.open_file import OpenFile
from portus.engine.pipeline.draft import Labels
from portus.engine.pipeline.request import Companion
from portus.engine.pipeline.run import Save
from portus.errors import (
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
    printable,
)
from portus.reach.index.directory import make_directory
from portus.reach.index.place import Place
from portus.reach.media.local import write_whole
from portus.reach.mirror.address import StoreAddress, StoreKind
from portus.reach.mirror.background_copier import SAY_S, BackgroundCopier, ElsewhereError, who
from portus.reach.mirror.files import MirroredFiles
from portus.reach.mirror.objects import (
    OWN,
    Added,
    FileObject,
    State,
    is_in,
    prefix_of,
    step_in,
)
from portus.reach.mirror.opening import open_store
from portus.reach.places.base import CopyOptions
from portus.reach.places.opening import open_place
from portus.reach.training.links import replace_link

_log: Final = logging.getLogger("portus")

_HELD_MAX: Final = 256
"""Files of a directory that are open at once: a process may have 1,024."""

_DRAFTS_S: Final = 60.0
"""The longest that an upload waits for files of other processes in the same directory."""


_Missing = tuple[Added, Mapping[str, FileObject]]
"""A checkpoint of the store, and its files that are not here, by their paths."""


class _Note(msgspec.Struct):
    """``run``: 32 hex digits, of this run on this machine. ``gone``: paths of files that the run
    removed, and that the store may still have."""

    run: str
    gone: list[str] = []


@dataclass(frozen=True, slots=True)
class _File:
    """A file to upload. ``identity``: differs if the file was changed or replaced."""

    path: str
    identity: tuple[int, ...]
    time_ns: int
    size: int


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A checkpoint to upload: a file, or a directory. ``files``: all of its files now."""

    path: str
    step: int
    files: tuple[_File, ...]
    is_directory: bool

    @property
    def newest(self) -> _File:
        """The file that was written last."""
        return max(self.files, key=lambda each: each.time_ns)

    @property
    def time_ns(self) -> int:
        """The time at which it was written."""
        return self.newest.time_ns


class DirectoryMirror(BackgroundCopier, Companion):
    """Copies the files of a run to its mirror. Thread-safe but for ``fetch`` and ``begin``."""

    def __init__(
        self,
        address: StoreAddress,
        model: str,
        settings: Settings,
        *,
        root: str,
        checkpoints: str,
        home: str,
        of_directories: bool = False,
    ) -> None:
        """Make no request. root: the directory, absolute, that names in the store are relative to,
        and below which all is mirrored. checkpoints: a directory there, in which others may have
        left checkpoints: files, or else ``of_directories``. home: the directory of the note, made
        when that is written. Raises ``UsageError``, also if the mirror has its files in ``root``
        itself."""
        own = os.path.join(address.prefix, prefix_of(model))
        if address.kind is StoreKind.FOLDER and os.path.realpath(own) == os.path.realpath(root):
            raise UsageError(
                f"mirror {address}: run {model!r} has its files in {printable(root)}, and so would "
                "its mirror; expected another directory, best on another disk"
            )
        store = open_store(address)
        super().__init__(store, str(address), model, wait_s=settings.mirror_wait)
        self._directory: Final = root
        self._checkpoints: Final = checkpoints
        self._keep: Final = settings.mirror_keep
        self._of_directories: Final = of_directories
        self._home: Final = home
        self._note_name: Final = f"{prefix_of(model)[:-1]}.mirror"
        self._mirror: Final = MirroredFiles(store, model, str(address))
        self._guard: Final = threading.RLock()
        """Guards the note, and the work to do."""
        note = self._read_note()
        self._own_run: Final = note.run
        self._gone: Final = dict.fromkeys(note.gone, 0)
        """The paths that the run removed and the store may still have, and the time at which the
        newest checkpoint that was committed by then was written."""
        self._waiting: Final[dict[str, _Checkpoint]] = {}
        """The checkpoints that are not mirrored, by path."""
        self._links: Final[set[str]] = set()
        self._damaged: Final[set[bytes]] = set()
        """The tokens of checkpoints that could not be fetched: the run continues without them."""
        self._uploaded = ""
        self._newest_ns = 0
        self._has_begun = False

    # Before the first save.

    def fetch(self) -> None:
        """Fetch the store's files, if this machine lacks the newest of them, and did not remove it.
        Blocks.

        Raises ``UsageError`` if both have a history that the other one lacks, ``CorruptionError``
        if no file there is as it was uploaded, and what the store raises.
        """
        with PENDING.exempt():
            if self._is_lost(state := self._mirror.read()):
                self._fetch_all(state, self._missing(state))

    def pull(self) -> tuple[list[str], bool]:
        """Fetch the store's files that this machine lacks, regardless of their history; return the
        paths, and whether all are fetched. Blocks. Raises as ``fetch``."""
        missing = self._missing(state := self._mirror.read())
        self._fetch_all(state, missing)
        wanted = [each for _, lacking in missing for each in lacking.items()]
        found = [path for path, each in wanted if self._has(path, each)]
        return found, not (self._damaged or self._mirror.damage)

    def begin(self) -> None:
        """Call ``fetch``, and mirror the commits of this run from now on, and of no other run. Call
        it before the first save.

        Raises as ``fetch``, and ``UsageError`` if this process may read the store but not write it.
        If the store does not answer and this machine has checkpoints, the thread tries again.
        """
        if self._has_begun:
            return
        with PENDING.exempt():
            try:
                with self._first_write():
                    self.fetch()
                    self._claim()
            except (TransportError, MediumError) as error:
                if not any(self._images()):
                    raise  # there may be a checkpoint to resume from
                self._say(error)
            self._has_begun = True
            self._look()
            with self._guard:
                times = [each.time_ns for each in self._waiting.values()]
                self._gone.update(dict.fromkeys(self._gone, max(times, default=0)))
        self.wake()

    def wake(self) -> None:
        """Wake the thread as ``BackgroundCopier`` does, but not before ``begin``: a process that
        only loads does not take the mirror over."""
        if self._has_begun:
            super().wake()

    # While it saves. On the worker, as a rule.

    def note_commit(self, path: str, save: Save) -> None:
        """Mirror the checkpoint at ``path``, absolute: a file or a directory."""
        save.stats.mirror_lag_s = self.lag_s
        name, step = self._name_of(path), save.step
        with PENDING.exempt(), self._guard:
            if name is None:
                return
            self._forget_removal(name)
            self._links.discard(name)
            found = self._read(name, step)
            # A fetch gives files their times back, and Lightning chooses by them
            # (decision 0208).
            if found is not None and found.time_ns <= self._newest_ns:
                newest = os.path.join(self._directory, found.newest.path)
                with contextlib.suppress(OSError):  # a coarse clock, or one that was set back
                    os.utime(newest, ns=(self._newest_ns + 1,) * 2)
                found = self._read(name, step)
            if found is not None:
                self._newest_ns = max(self._newest_ns, found.time_ns)
                self._waiting.pop(name, None)  # messages name the last one as the newest
                self._waiting[name] = found
        self.wake()

    def note_link(self, link: str) -> None:
        """Note that the link at ``link`` refers, or is about to refer, to a file of the run."""
        name = self._name_of(link)
        if name is not None:
            with self._guard:
                self._forget_removal(name)
                self._waiting.pop(name, None)
                self._links.add(name)
            self.wake()

    def over(self, save: Save) -> None:
        self.wake()  # links have new targets now

    def removing(self, path: str) -> None:
        """Note that the run is about to remove ``path``. Raises nothing."""
        name = self._name_of(path)
        if name is None:
            return
        with PENDING.exempt(), self._guard:
            self._waiting.pop(name, None)
            self._links.discard(name)
            if name not in self._gone:
                # Noted durably before the removal here: after a kill only the note knows of it.
                # Even if it is not there: an entry that has no answer yet may count later.
                self._gone[name] = self._newest_ns
                self._write_note()
        self.wake()

    def _may_yield(self) -> bool:
        """Return whether the uploaded file was removed meanwhile: the upload holds its space."""
        return not os.path.lexists(os.path.join(self._directory, self._uploaded))

    def close(self) -> None:
        """Look for new checkpoints once more, and close as ``BackgroundCopier`` does."""
        if self._has_begun:
            with PENDING.exempt():
                self._look()  # a signal handler may have saved one
        super().close()

    def backlog(self) -> list[str]:
        """Return the paths of the checkpoints that are not mirrored."""
        with self._guard:
            return list(self._waiting)

    def _describe_backlog(self) -> str:
        left, where = self.backlog(), printable(self._directory)
        said = f"{len(left)} checkpoints of {where} are not in {self.address}, the newest "
        return said + printable(left[-1]) if left else ""

    # The thread.

    def _catch_up(self) -> None:
        with PENDING.exempt():
            if not self._mirror.is_claimed:
                self._claim()
            while True:
                links, found = self._links_now(), self._next()
                try:
                    if found is not None:
                        self._upload(found)
                except MediumError:  # the store may be full
                    self._remove_gone(for_space=True)
                    raise
                # Not only at the end: if saves come faster than uploads, it never comes.
                self._say_links(links)
                self._remove_gone()
                if found is None:
                    return

    def _next(self) -> _Checkpoint | None:
        """Return the newest checkpoint that waits; None if none does."""
        with self._guard:
            newest = max(self._waiting.values(), key=lambda each: each.time_ns, default=None)
            self._uploaded = newest.path if newest is not None else ""
            return newest

    def _upload(self, committed: _Checkpoint) -> None:
        found: _Checkpoint | None = committed
        if committed.is_directory:  # others may have put files there meanwhile
            # Other ranks publish their own files; later ones are in no entry.
            wait_for_drafts(os.path.realpath(self._path_of(committed.path)), timeout_s=_DRAFTS_S)
            found = self._read(committed.path, committed.step)
        sent = None if found is None else self._send(found)
        if found is None or sent is None:
            self._mirror.count([])
        else:
            # One entry for all files of a directory, or half of it would count (decision 0208).
            self._mirror.count([self._mirror.checkpoint(found.path, sent, found.step)])
            self._has_copied = True
            self._mirrored_ns = max(self._mirrored_ns, found.time_ns)
        with self._guard:
            if self._waiting.get(committed.path) == committed:
                del self._waiting[committed.path]

    def _send(self, found: _Checkpoint) -> dict[str, FileObject] | None:
        """Upload the files that the store lacks, and return all; None if one has changed, or cannot
        be read."""
        before, there = self._mirror.state.at(found.path), dict[str, FileObject]()
        if found.is_directory and before is not None:
            known = before.paths
            there = {e.path: known[e.path] for e in found.files if _is_same(e, before)}
        files = [each for each in found.files if each.path not in there]
        with contextlib.ExitStack() as held:
            # All before the first is sent: the run may remove the directory meanwhile, and does so
            # each time if saves come faster than uploads.
            opened = [self._hold(each, held) for each in files[:_HELD_MAX]]
            for file, where in itertools.zip_longest(files, opened):
                sent = self._send_file(file, where or self._path_of(file.path))
                if sent is None:
                    return None
                there[file.path] = sent
        return there

    def _hold(self, file: _File, held: contextlib.ExitStack) -> str:
        """Return a path that a file has while ``held`` is open, even if it is removed meanwhile."""
        path = self._path_of(file.path)
        try:
            number = os.open(path, os.O_RDONLY)
        except OSError:
            return path  # the next open there raises the cause
        held.callback(os.close, number)
        return f"/proc/self/fd/{number}"

    def _send_file(self, file: _File, where: str) -> FileObject | None:
        """Upload a file that is open at ``where``; return None as ``_send`` does."""
        path = self._path_of(file.path)
        try:
            return use_file(where, partial(self._upload_from, file))
        except (UsageError, StaleError, OSError) as error:
            if isinstance(error, MediumError | TransportError) or _is_there(path):
                raise  # of the store; or the file is readable, so the store refuses it
            if not isinstance(error, FileNotFoundError):  # else it was removed, or moved away
                _log.warning("portus: %s is not mirrored: %s", printable(path), error)
        return None

    def _upload_from(self, file: _File, opened: OpenFile) -> FileObject | None:
        """Upload an open file; return None if it has changed."""
        path = self._path_of(file.path)

        def is_same() -> bool:
            # By the descriptor: the name may be another file's by now.
            status = os.stat(path) if opened.number is None else os.fstat(opened.number)
            return _identity(status) == file.identity

        if not is_same():
            return None
        with self._uploading() as stop:
            sent = self._mirror.upload(file.path, opened, stop, time_ns=file.time_ns)
        # After a write meanwhile the sent bytes are of no single moment. No write changes a version
        # in a pool.
        if opened.number is not None and not is_same():
            raise StaleError(f"{printable(path)}: it was written to while it was mirrored")
        return sent

    def _links_now(self) -> dict[str, str]:
        """Return the targets of the run's links."""
        with self._guard:
            links = list(self._links)
        found = {}
        for name in links:
            with contextlib.suppress(OSError):  # it is not there yet, or is a file now
                found[name] = os.readlink(self._path_of(name))
        return found

    def _say_links(self, links: Mapping[str, str]) -> None:
        for name, target in links.items():
            state = self._mirror.state
            leads_to = _target_of(name, target)
            is_there = any(e.is_in(leads_to) and not e.retired for e in state.added)
            if is_there and state.links.get(name) != target:
                self._mirror.link(name, target)

    def _remove_gone(self, *, for_space: bool = False) -> None:
        """Remove there what the run removed, once what was newest then is there, or a newer one: so
        the mirror never loses its newest checkpoint. for_space: all but the newest one there."""
        state = self._mirror.state
        newest = state.newest
        links = {_target_of(path, target) for path, target in state.links.items()}
        with self._guard:
            # Read together: the checkpoints that wait now replace those that go.
            kept = links if self._waiting else set()
            gone = [
                name
                for name, since in self._gone.items()
                if name not in kept
                and (
                    since <= self._mirrored_ns
                    or (for_space and newest is not None and not newest.is_in(name))
                )
            ]
        if not gone:
            return
        try:
            removed = [each.token for name in gone for each in self._mirror.below(name)]
            self._mirror.retire(removed, self._keep)
        except UsageError as error:  # no right to delete; they do not count any more
            self._say(error)
        with self._guard:
            for name in gone:
                self._gone.pop(name, None)
            self._write_note()

    def _claim(self) -> None:
        state = self._mirror.read()
        if self._is_lost(state):
            assert state.newest is not None
            raise self._elsewhere(state.newest)
        has_lost = bool(self._mirror.damage) or not state.number
        state = self._mirror.claim(who(), bytes.fromhex(self._own_run))
        with self._guard:
            self._write_note()
        # Before the sweep, which deletes what no entry names.
        if has_lost and (lost := self._mirror.find_lost()):
            _log.error(
                "portus: %s: entries of the log of run %r were lost: %d files count again by the "
                "digests beside them; portus mirror repair reads them",
                self.address,
                self._model,
                sum(len(each.files) for each in lost),
            )
            self._mirror.restore(lost)
            state = self._mirror.state
        try:
            self._mirror.sweep()
        except UsageError as error:  # no right to delete
            self._say(error)
        if state.newest is not None:
            if not any(self._images()):
                _log.warning(
                    "portus: %s: run %r starts without its files: they were removed here, and are "
                    "not fetched; portus pull %s gets them",
                    printable(self._directory),
                    self._model,
                    self.address,
                )
            newest_ns = state.newest.time_ns
            self._mirrored_ns = max(self._mirrored_ns, newest_ns)
            self._newest_ns = max(self._newest_ns, newest_ns)

    def _look(self) -> None:
        """Note the checkpoints in the directory that the store lacks: a killed process may have
        left some."""
        here = set(self._images())
        if self._of_directories:
            here = {os.path.dirname(path) for path in here} - {os.path.normpath(self._checkpoints)}
        for path in sorted(here):
            name = os.path.relpath(path, self._directory)
            found = self._read(name, step_in(name) or 0)
            with self._guard:
                if found is None or name in self._waiting:
                    continue
                # After ``_waiting``: a checkpoint leaves that only once the state has it.
                there = self._mirror.state.at(name)
                if all(_is_same(each, there) for each in found.files):
                    continue
                self._waiting[name] = found

    # Fetches of a machine without files.

    def _is_lost(self, state: State) -> bool:
        """Return whether to fetch the store's files: this machine has none of them. Raise
        ``ElsewhereError`` if it has files that the store lacks, of another history."""
        usable = tuple(each for each in state.added if each.token not in self._damaged)
        newest = msgspec.structs.replace(state, added=usable).newest
        if not state.number and not any(self._images()):
            self._mirror.require_no_files()
        if newest is None or not self._lacks(newest):
            return False
        own = [each.number for each in state.terms if each.pool.hex() == self._own_run]
        if max(own, default=-1) >= newest.term:
            return False  # this run had all of them, and removed the missing ones here
        there = {path: file for each in state.added for path, file in each.paths.items()}
        for path in self._images():
            name = os.path.relpath(path, self._directory)
            if name not in there or not self._has(name, there[name]):
                raise self._elsewhere(newest)
        return True

    def _elsewhere(self, newest: Added) -> ElsewhereError:
        return ElsewhereError(
            f"{printable(self._directory)}: run {self._model!r} continued elsewhere: the newest "
            f"that {self.address} has is {newest.path}, which is not here, and there are other "
            "files here. To resume from the mirror, move these files away; to resume from here, "
            "use another mirror, or mirror='none'"
        )

    def _has(self, name: str, there: FileObject) -> bool:
        path = self._path_of(name)
        with contextlib.suppress(OSError):
            return _size_of(path, os.stat(path)) == there.size
        return False

    def _lacks(self, added: Added) -> dict[str, FileObject]:
        """Return the files of a checkpoint of the store that are not here, by their paths."""
        return {path: each for path, each in added.paths.items() if not self._has(path, each)}

    def _missing(self, state: State) -> list[_Missing]:
        """Return the store's checkpoints that are not here, or not whole, oldest first."""
        return [
            (each, lacking)
            for each in state.checkpoints
            if not each.retired
            and each.token not in self._damaged
            and (lacking := self._lacks(each))
        ]

    def _fetch_all(self, state: State, missing: Sequence[_Missing]) -> None:
        """Fetch missing files, oldest first: after a kill the newest is still missing."""
        if not missing:
            return
        files = [each for _, lacking in missing for each in lacking.values()]
        total = sum(each.size for each in files)
        _log.warning(
            "portus: %s: %d files of run %r, %d bytes, are fetched from %s",
            printable(self._directory),
            len(files),
            self._model,
            total,
            self.address,
        )
        arrived, failure, said_s = 0, None, time.monotonic()

        def advance(size: int) -> None:
            nonlocal arrived, said_s
            arrived += size
            if time.monotonic() > said_s + SAY_S:
                said_s = time.monotonic()
                _log.warning("portus: fetched %d of %d MiB", arrived >> 20, total >> 20)

        for added, lacking in missing:
            try:
                self._fetch(added, lacking, advance)
            except CorruptionError as error:
                failure = error
                self._damaged.add(added.token)
                _log.error("portus: a checkpoint is not fetched: %s", error)
        if failure is not None and not any(self._images()):
            raise failure
        for name, target in state.links.items():
            path = self._path_of(name)
            is_outside = _target_of(name, target).split("/")[0] in ("", os.pardir)
            if not is_outside and not os.path.lexists(path):
                with contextlib.suppress(OSError):
                    # Last: Lightning takes a `last` without its target for no checkpoint, and
                    # begins anew.
                    replace_link(path, os.path.join(os.path.dirname(path), target))

    def _fetch(
        self, added: Added, lacking: Mapping[str, FileObject], advance: Callable[[int], None]
    ) -> None:
        """Fetch the files of a checkpoint that are lacking here, or none of them."""
        labels = Labels(model=self._model, step=added.step, token=added.token)
        # With their times: a Lightning that starts chooses by these (decision 0208).
        times = {path: each.time_ns for path, each in lacking.items()}
        options = CopyOptions(times=times, advance=advance)
        with self._mirror.open(added) as opened, contextlib.ExitStack() as stack:
            files = dict(zip(added.paths, opened.values(), strict=True))
            files = {path: files[path] for path in lacking}
            place = stack.enter_context(open_place(Place.of_files(self._directory)))
            commit = stack.enter_context(place.draft(labels, files, options))
            commit()

    # The directory.

    def _images(self) -> Iterator[str]:
        """Yield the files of Portus in the directories that may have some."""
        there = {os.path.dirname(path) for e in self._mirror.state.added for path in e.paths}
        found = {os.path.normpath(self._path_of(each)) for each in there}
        found.add(os.path.normpath(self._checkpoints))
        if self._of_directories:
            with contextlib.suppress(OSError), os.scandir(self._checkpoints) as entries:
                found |= {
                    each.path
                    for each in entries
                    if each.name != FOLDER and each.is_dir(follow_symlinks=False)
                }
        for directory in sorted(found):
            with contextlib.suppress(OSError), os.scandir(directory) as entries:
                for each in entries:
                    if not each.is_file(follow_symlinks=False):
                        continue
                    with contextlib.suppress(PortusError):
                        if has_digests(each.path):
                            yield each.path

    def _path_of(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _read(self, name: str, step: int) -> _Checkpoint | None:
        """Return a checkpoint with its present files; None if it was removed again."""
        path, is_directory = self._path_of(name), False
        found = [(name, path)]
        if os.path.isdir(path) and not os.path.islink(path):
            is_directory, found = True, []
            for where, folders, names in os.walk(path):
                # Not a mirror either: each copy would be copied again.
                folders[:] = [
                    each
                    for each in folders
                    if each != FOLDER and not os.path.isdir(os.path.join(where, each, OWN))
                ]
                for each in names:
                    whole = os.path.join(where, each)
                    said = self._name_of(whole)
                    if said is not None:
                        found.append((said, whole))
        files = []
        for said, whole in found:
            with contextlib.suppress(OSError):  # it was removed again
                status = os.stat(whole, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    size, time_ns = _size_of(whole, status), status.st_mtime_ns
                    files.append(_File(said, _identity(status), time_ns, size))
        return _Checkpoint(name, step, tuple(files), is_directory) if files else None

    def _name_of(self, path: str) -> str | None:
        """Return a file's name in the store; None for one elsewhere, or whose name is no text."""
        name = os.path.relpath(path, self._directory)
        if name.split(os.sep)[0] == os.pardir or name != name.encode(errors="replace").decode():
            return None
        return name.replace(os.sep, "/")

    def _forget_removal(self, name: str) -> None:
        back = [each for each in self._gone if is_in(each, name)]
        for each in back:
            del self._gone[each]
        if back:
            self._write_note()

    def _read_note(self) -> _Note:
        path = Path(self._home, self._note_name)
        with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError):
            note = msgspec.json.decode(path.read_bytes(), type=_Note)
            if len(bytes.fromhex(note.run)) == 16:
                return note
        return _Note(os.urandom(16).hex())

    def _write_note(self) -> None:
        """Write the note durably. Log a failure: then a kill may leave removed files there."""
        path, note = os.path.join(self._home, self._note_name), _Note(self._own_run, [*self._gone])
        try:
            # Once it saves, not the directory of the run: its user may have moved that away.
            if make_directory(self._home, is_inside=self._has_begun):
                write_whole(path, msgspec.json.encode(note))
        except PortusError as error:
            _log.warning("portus: the removals of run %r are not noted: %s", self._model, error)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_there(path: str) -> bool:
    """Return whether a file can be read; False also for a pointer whose version was removed."""
    with contextlib.suppress(PortusError, OSError):
        return use_file(path, lambda file: True)
    return False


def _size_of(path: str, status: os.stat_result) -> int:
    """Return the size of a file; for a pointer, the size of the file that it refers to."""
    if status.st_size <= POINTER_MAX:
        with contextlib.suppress(PortusError, OSError):
            return use_file(path, lambda file: file.size)
    return status.st_size


def _target_of(link: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(link), target))


def _is_same(file: _File, added: Added | None) -> bool:
    """Return whether the mirror has a file in a checkpoint, and it is the run's: one that the run
    removed, and that another process put back, is mirrored anew."""
    said = None if added is None or added.retired else added.paths.get(file.path)
    return said is not None and (said.size, said.time_ns) == (file.size, file.time_ns)
