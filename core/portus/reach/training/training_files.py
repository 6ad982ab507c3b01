"""``TrainingFiles``: the checkpoints of one training, at paths that its framework chooses."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from portus.companions.job.journal import JOURNALS, Journal
from portus.engine.directory.waiting import wait_for_drafts
from portus.engine.files.pending import PENDING
from portus.engine.image.image import Image, bytes_image
from portus.engine.job.settings import Settings
from portus.engine.loading.checkpoint_file import load_file, note_loaded
from portus.engine.media import calls
from portus.engine.media.process import Descriptor
from portus.engine.paths.process import join, leave, recover_left
from portus.engine.paths.request import FileToSave, make_directory
from portus.engine.paths.saver import FileSaver
from portus.engine.pipeline.handle import SaveHandle
from portus.engine.pipeline.request import Companion, SaveRequest
from portus.engine.pipeline.run import Save
from portus.engine.spec import VersionInfo
from portus.engine.state.contents import FileContents
from portus.errors import MediumError, PortusError, UsageError, printable
from portus.reach.index.place import DEFAULT_DIRECTORY, Place
from portus.reach.mirror.address import mirror_of
from portus.reach.pools.elsewhere import fill
from portus.reach.pools.training_pool import TrainingPool
from portus.reach.training.after_commit import AfterCommit
from portus.reach.training.companions import refuse_settings_of_pools
from portus.reach.training.file_mirror import DirectoryMirror

_log: Final = logging.getLogger("portus")


class TrainingFiles:
    """Saves, removals and links of one training, in the order of the calls; see ``AfterCommit``.

    A forked child has savers of its own, and leaves its parent's saves in flight alone.

    settings: of the saves. of_directories: checkpoints are directories. telling: the names of files
    that each checkpoint has, and that are removed first: without them it is no checkpoint. pool: a
    device or a storage host for the states; then pointers are at the paths, and a version goes with
    its last pointer. is_named: a user gave the name of the training, see ``TrainingPool``. rank: of
    this process, if each of a job saves files of its own there.

    Raises ``UsageError`` for settings that make no sense there.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        of_directories: bool = False,
        telling: str = "",
        pool: Place | None = None,
        is_named: bool = True,
        rank: int | None = None,
    ) -> None:
        if pool is None:
            refuse_settings_of_pools(settings, "checkpoints are files")
        elif pool.is_directory:
            raise UsageError(
                f"pool: expected a device, a pool file (*.portus) or a storage host, found {pool}, "
                "a directory; checkpoints are files in the directories that they are saved to, so "
                "leave it out"
            )
        mirror_of(settings.mirror)  # raises now, not at the first save
        self.leads = True
        """False if another process of the job has the journal and the mirror, and removes
        checkpoints. Set it before ``begin``."""
        self._pool_at: Final = pool
        self._is_named: Final = is_named
        self._rank: Final = rank
        self._name = "default"
        self._settings: Final = settings
        self._of_directories: Final = of_directories
        self._telling: Final = re.compile(telling)
        self._base: str | None = None
        self.has_begun = False
        """True if ``begin`` was called since it was closed."""
        self._journal_at: tuple[str, str] | None = None
        self._journal: Journal | None = None
        self._mirror: DirectoryMirror | None = None
        self._saver: FileSaver | None = None
        self._after: AfterCommit | None = None
        self._process = os.getpid()

    @calls.mark
    def fetch(self, name: str | None, place: str | None, checkpoints: str) -> None:
        """Fetch the mirrored files of the training ``name``, if the settings name a mirror and this
        machine lacks the newest. Blocks. checkpoints: the directory of its checkpoints; place: that
        of its notes and journal; both absolute. None: a name and a place by ``checkpoints``.

        Raises ``UsageError`` if both have files that the other one lacks, ``CorruptionError`` if no
        file of the mirror is as it was uploaded, and ``TransportError``.
        """
        self._forget_parent()
        mirror = self._mirror_at(*_name_and_place(name, place, checkpoints), checkpoints)
        if mirror is not None:
            mirror.fetch()

    @calls.mark
    def begin(
        self,
        name: str | None,
        place: str | None,
        checkpoints: str,
        resumed_step: int | None = None,
    ) -> None:
        """Begin the training ``name``: from now on its saves are in the journal, and in the mirror,
        if the settings name one. resumed_step: of the checkpoint that the training resumes from, if
        it does. Other parameters and errors: as of ``fetch``; and ``UsageError`` for a mirror that
        this process may not write."""
        self._forget_parent()
        name, place = _name_and_place(name, place, checkpoints)
        self._name = name
        if resumed_step is not None:
            note_loaded(VersionInfo(name, 0, 0, resumed_step, b"", time.time_ns(), 0))
        self._journal_at = name, os.path.join(place, JOURNALS)
        self._base = os.path.dirname(place)  # not among the checkpoints, which frameworks list
        if self._pool_at is not None:
            self._open()[0].destination.open()
        mirror = self._mirror_at(name, place, checkpoints)
        if mirror is not None:
            mirror.begin()
        if self._settings.journal and self.leads:
            with contextlib.suppress(PortusError):  # a journal ends no training
                make_directory(os.path.dirname(place))
        self._begin_journal()  # it listens to steps, so no later line may raise
        self.has_begun = True

    @calls.mark
    def open(self) -> None:
        """Track from now on which optimizer steps which tensors, so that the first save too is
        copied in the background."""
        self._open()

    def save(self, state: object, path: str, step: int) -> SaveHandle:
        """Begin to save ``state`` to ``path``, absolute; make its directory, and replace a link
        there. See ``portus.save``."""
        return self._save_as(path, os.path.dirname(path), {os.path.basename(path): state}, step)

    def save_directory(
        self,
        directory: str,
        files: Mapping[str, object],
        step: int,
        note: bytes = b"",
        ready: Callable[[], None] = lambda: None,
        *,
        fenced: Sequence[torch.Tensor] = (),
    ) -> SaveHandle:
        """Begin to save ``files``, by their names, into ``directory``, absolute, which is made.
        They become visible together, once the other files there are durable too. Other files stay.
        See ``portus.save``.

        files: a state for each torch file, and a ``Safetensors`` for each safetensors file. note: a
        text in UTF-8, which ``portus.read_note`` returns of each file. ready: called on the worker
        before the files become visible; blocks as long as they have to wait, and raises
        ``PortusError`` to forbid it. fenced: tensors that are not written before a call of
        ``fence``, beside those that an optimizer steps.
        """
        if not files:
            raise UsageError(f"{printable(directory)}: expected a file to save, found none")

        def all_ready() -> None:
            ready()
            _sync_below(directory)

        return self._save_as(directory, directory, files, step, note, all_ready, fenced)

    @calls.mark
    def save_text(self, path: str, text: str, ready: Callable[[], None]) -> SaveHandle:
        """Begin to save a text file, in UTF-8, to ``path``, absolute, after the saves so far.
        ready: as of ``save_directory``."""
        saver, _ = self._open()
        contents = LiteralContents(bytes_image(text.encode()))
        request = _TextRequest(follows_links=False, base=self._base, training=self, gate=ready)
        return saver.save_files([FileToSave(path, contents)], request)

    @calls.mark
    def fence(self) -> None:
        """Block until no save in flight reads a tensor."""
        if self._is_open():
            self._open()[0].fence()

    @calls.mark
    def _save_as(
        self,
        path: str,
        directory: str,
        files: Mapping[str, object],
        step: int,
        note: bytes = b"",
        ready: Callable[[], None] = lambda: None,
        fenced: Sequence[torch.Tensor] = (),
    ) -> SaveHandle:
        """Begin a save. path: to remove later, or to link to. ready: see ``SaveRequest``."""
        saver, after = self._open()
        try:
            make_directory(directory)
        except MediumError as error:
            return saver.refuse(error)
        # A removal of a single file of the directory may still wait.
        paths = [os.path.join(directory, name) for name in files]
        number = after.begin_save(path, paths)
        request = _CheckpointRequest(
            step=step,
            note=note,
            follows_links=False,
            base=self._base,
            # Removed files of this process are kept by links, to reuse their space.
            removed_elsewhere=not self.leads and self._pool_at is None,
            training=self,
            gate=ready,
            number=number,
            path=path,
        )
        handle = None
        try:
            handle = saver.save_files(
                list(map(FileToSave, paths, files.values())),
                request,
                fenced,
            )
        finally:
            if not request.begun_as:  # refused, or written at once in a signal handler
                is_there = handle is not None and handle.committed
                after.over(number, path, is_committed=is_there, may_remove=not calls.is_nested())
        return handle

    @calls.mark
    def remove(self, path: str) -> None:
        """Remove the file or the directory at ``path``, absolute, once the newest save so far, or a
        later one, is committed; at once, if none is in flight."""
        self._open()[1].remove(path)

    @calls.mark
    def link(self, link: str, target: str) -> None:
        """Have ``link`` refer to ``target``, both absolute, in one step, once that exists. Raises
        ``OSError`` if no link can be made at once."""
        self._open()[1].link(link, target)
        if self._mirror is not None:
            self._mirror.note_link(link)

    @calls.mark
    def is_there(self, path: str) -> bool:
        """Return whether there is, or will be, a file at ``path``."""
        return os.path.exists(path) if self._after is None else self._after.is_there(path)

    def fill_tables(self, path: str) -> None:
        """Put the protected tables into the file at ``path``, which this training saved, in place
        of their references to a pool. Blocks. Raises ``StaleError`` if they are not there any more,
        ``CorruptionError``, ``MediumError``."""
        state = load_file(path, weights_only=False)
        filled = fill(state)
        if filled is not state:
            self.save(filled, path, 0).wait()

    def recover(self, directory: str) -> None:
        """Put back the files that a killed process had removed too early from ``directory``."""
        recover_left(os.path.realpath(directory))

    def wait_for(self, directory: str) -> None:
        """Block until the saves to ``directory`` of all processes have ended, and put back the
        files that a killed process had removed too early."""
        where = os.path.realpath(directory)
        PENDING.wait_for(where)
        with PENDING.exempt():
            wait_for_drafts(where)
        recover_left(where)

    @calls.mark
    def wait(self) -> None:
        """Block until all saves have ended. Raises unreported errors, as ``on_error`` says."""
        if self._is_open():
            self._open()[0].wait()

    @calls.mark
    def close(self) -> None:
        """Finish the saves in flight. The object may be used again. Raises as ``wait``."""
        self.has_begun = False
        if self._process != os.getpid():
            return
        saver, after = self._saver, self._after
        try:
            if saver is not None and after is not None:
                try:
                    # Saves that end now remove and link, so the log names remaining files only
                    # after that.
                    saver.close()
                finally:
                    self._saver = self._after = self._journal_at = None
                    leave(self)
                for path in after.leftovers():
                    _log.warning(
                        "portus: %s stays: the save that was to replace it failed, or a link "
                        "points to it",
                        printable(path),
                    )
        finally:
            companions, self._journal = self._companions, None
            try:
                with contextlib.ExitStack() as closing:  # each, whatever another one raises
                    for each in reversed(companions):
                        closing.callback(each.close)
            finally:
                self._mirror = None

    def __del__(self) -> None:
        if getattr(self, "_saver", None) is None:  # or it was never made
            return
        try:
            self.close()
        # As the interpreter ends, modules and their contents may be gone.
        except (PortusError, AttributeError):
            return

    def _is_open(self) -> bool:
        return self._saver is not None and self._process == os.getpid()

    @property
    def _companions(self) -> list[Companion]:
        return [each for each in (self._journal, self._mirror) if each is not None]

    def _forget_parent(self) -> None:
        """Forget, in a forked child, the savers that its parent has open."""
        if self._process != os.getpid():
            self._process = os.getpid()
            # Not closed: the saves in flight, and the locks, are the parent's.
            self._saver = self._after = self._journal = self._mirror = None

    def _open(self) -> tuple[FileSaver, AfterCommit]:
        self._forget_parent()
        if self._saver is None or self._after is None:
            pool, rank = None, self._rank
            if self._pool_at is not None:
                pool = TrainingPool(
                    self._pool_at,
                    lambda: self._name if rank is None else f"{self._name}/rank-{rank}",
                    self._settings,
                    is_named=self._is_named,
                    rank=rank or 0,
                )
            saver = FileSaver(join(self), self._settings, destination=pool)
            self._saver, self._after = saver, AfterCommit(saver, self._telling, self._mirror)
        return self._saver, self._after

    def _mirror_at(self, name: str, place: str, checkpoints: str) -> DirectoryMirror | None:
        address = mirror_of(self._settings.mirror) if self.leads else None
        if self._mirror is None and address is not None:
            root = os.path.dirname(place)
            is_below = os.path.commonpath([root, checkpoints]) == root
            self._mirror = DirectoryMirror(
                address,
                name,
                self._settings,
                root=root if is_below else checkpoints,
                checkpoints=checkpoints,
                home=os.path.join(place, JOURNALS),
                of_directories=self._of_directories,
            )
            if self._after is not None:
                self._after.mirror = self._mirror
        return self._mirror

    def _begin_journal(self) -> None:
        wants_journal = self._settings.journal and self.leads
        if wants_journal and self._journal is None and self._journal_at is not None:
            name, place = self._journal_at
            self._journal = Journal(name, lambda: place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextRequest(SaveRequest):
    """The request of a file of ``training`` that becomes visible after ``gate``."""

    training: TrainingFiles
    gate: Callable[[], None]

    def make_room(self) -> bool:
        after = self.training._after
        # Both, in this order: an upload may hold the space of the file that was just removed.
        has_removed = after is not None and after.make_room()
        return any(each.yield_space() for each in self.training._companions) or has_removed

    def ready(self) -> None:
        self.gate()


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckpointRequest(_TextRequest):
    """The request of a checkpoint, save ``number`` of its training, at ``path``. begun_as: the
    token of the save once it has begun; then the save itself reports its end, even if Ctrl-C ended
    its call."""

    number: int
    path: str
    begun_as: list[bytes] = field(default_factory=list)

    def note_start(self, save: Save) -> None:
        self.begun_as.append(save.token)
        self.training._begin_journal()
        for each in self.training._companions:
            each.note_start(self.path, save)

    def note_commit(self, save: Save) -> None:
        """Tell the mirror of a commit before anything else: later removals come later there too."""
        for each in self.training._companions:
            each.note_commit(self.path, save)

    def over(self, save: Save) -> None:
        if self.training._after is not None:
            self.training._after.over(self.number, self.path, is_committed=save.error is None)
        for each in self.training._companions:
            each.over(save)


def _name_and_place(name: str | None, place: str | None, checkpoints: str) -> tuple[str, str]:
    return (
        name or os.path.basename(checkpoints) or "checkpoints",
        place or os.path.join(checkpoints, DEFAULT_DIRECTORY),
    )


def _sync_below(directory: str) -> None:
    """Sync the files in ``directory`` and below, and their names: then they survive power loss.
    Raises ``MediumError``."""
    for where, _, names in os.walk(directory):
        for path in (*(os.path.join(where, name) for name in names), where):
            try:
                # Only files: opening a pipe that a hook left there would block.
                if path == where or stat.S_ISREG(os.lstat(path).st_mode):
                    with contextlib.closing(Descriptor(path, os.O_RDONLY)) as file:
                        os.fsync(file.number)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise MediumError(
                    error.errno, f"{printable(path)}: cannot sync: {error.strerror}"
                ) from error


class LiteralContents(FileContents):
    """A file without storages: the call knows all of its bytes."""

    storages = tensors = ()
    lengths = np.zeros(0, np.int64)
    has_devices = False

    def __init__(self, image: Image) -> None:
        self._image: Final = image

    def image(self, path: str, note: bytes = b"") -> Image:
        return self._image

    def describer(self) -> Callable[[int], str]:
        return str
