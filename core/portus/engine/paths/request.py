"""The files of one save."""

from __future__ import annotations

import abc
import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from portus.engine.directory.folder import FOLDER
from portus.engine.directory.publisher import Publisher
from portus.engine.image.image import Image
from portus.engine.media.base import PLAIN_FILE
from portus.engine.pipeline.draft import CommittedVersion, Draft
from portus.engine.pipeline.plan import Flags, Previous, Snapshot
from portus.engine.pipeline.request import SaveRequest
from portus.engine.pipeline.run import Save
from portus.engine.state.contents import FileContents
from portus.engine.writer.image_file import FileDraft
from portus.errors import MediumError, UsageError, printable


class FileToSave(NamedTuple):
    """A file to save: its path, and its state."""

    path: str | os.PathLike[str]
    state: object


class OwnFormat(abc.ABC):
    """A state to save as a file in a format of its own."""

    @abc.abstractmethod
    def file_contents(self) -> FileContents:
        """Return the contents of the file. Raises ``UsageError``."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """One file. ``said``: its path as the caller has it. ``real``: the path with links resolved;
    empty for a version in a pool that has no pointer."""

    said: str
    real: str
    contents: FileContents


def targets_of(files: Sequence[FileToSave], *, follows_links: bool) -> list[tuple[str, str]]:
    """Return the paths of files of one directory, each as the caller said it, and with links
    resolved. Links to directories are followed, and the last one if ``follows_links``. Raises
    ``UsageError`` for a path where no file can be, and for files of several directories,
    ``MediumError`` if that cannot be known."""
    found = [_target_of(each.path, follows_links=follows_links) for each in files]
    reals = {real for _, real in found}
    if len({os.path.dirname(real) for real in reals}) > 1 or len(reals) < len(found):
        raise UsageError(
            "files that are saved together: expected different files of one directory, found "
            + ", ".join(printable(said) for said, _ in found)
        )
    return found


def make_directory(path: str) -> bool:
    """Make a directory, and those above it. Return whether it is new. Raises ``MediumError``."""
    if os.path.isdir(path):
        return False
    refuse_hidden(path)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise MediumError(
            error.errno, f"{printable(path)}: cannot make the directory: {error.strerror}"
        ) from error
    return True


def refuse_hidden(path: str) -> None:
    """Raise ``UsageError`` if ``path`` is the hidden folder of Portus, or in one."""
    if FOLDER in os.path.realpath(path).split(os.sep):
        raise UsageError(f"{printable(path)}: {FOLDER} is the folder of Portus; name another path")


def name_of(files: Sequence[NewFile]) -> str:
    """Return the name of all the files together, for messages."""
    return files[0].said if len(files) == 1 else os.path.dirname(files[0].said)


def _target_of(path: str | os.PathLike[str], *, follows_links: bool) -> tuple[str, str]:
    said = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(said, str) or not said or "\0" in said:
        raise UsageError(
            f"path: expected the path of a file, as text, found {path!r:.200}. torch.save "
            "writes to file objects"
        )
    real = os.path.realpath(said)
    if not follows_links:
        # The last link stays unresolved: the new file replaces it.
        where, name = os.path.split(said)
        real = os.path.join(os.path.realpath(where or "."), name)
    refuse_hidden(said)
    directory = os.path.dirname(real)
    if not _is_directory(directory, is_made=not follows_links):
        raise UsageError(
            f"{printable(said)}: there is no directory {printable(directory)}; create it first"
        )
    try:
        mode = os.stat(real, follow_symlinks=follows_links).st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:  # a rename would replace the link
            raise MediumError(error.errno, f"{printable(said)}: {error.strerror}") from error
        mode = stat.S_IFREG  # no file there; the open reports other errors
    if said.endswith("/"):
        mode = stat.S_IFDIR
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise UsageError(
            f"{printable(said)}: expected the path of a file to write, found {kind}; name another"
        )
    return said, real


def _is_directory(path: str, *, is_made: bool) -> bool:
    # is_made: by us, just now; so if it is not there, the file system is to blame.
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and not is_made:
            return False
        raise MediumError(error.errno, f"{printable(path)}: {error.strerror}") from error


class Destination:
    """The place that one ``FileSaver`` saves to; each has its own. Here the files have their
    storages, and share none; subclasses differ."""

    @property
    def kind(self) -> str:
        """The kind of medium, once the destination is open."""
        return PLAIN_FILE.name

    def open(self) -> object:
        """Open the destination, if it is not open. Raises ``PortusError``."""

    def steady(self, late: Flags, *, unchanged: bool) -> Flags:
        """Return which storages to hash before anything is copied. late: those that are copied
        late. unchanged: no optimizer stepped since the last save."""
        return np.zeros(len(late), np.bool_)

    def before(self, files: int) -> Previous | None:
        """Return the newest version, with that many files, to share storages with."""
        return None

    def at_paths(
        self, new: Sequence[NewFile], images: Sequence[Image], snapshot: Snapshot
    ) -> Sequence[Image]:
        """Return the images of the files at the paths; none if there are to be no files."""
        return images

    def draft(
        self,
        new: Sequence[NewFile],
        images: Sequence[Image],
        snapshot: Snapshot,
        files: FileDraft | None,
        request: SaveRequest,
    ) -> Draft:
        """Begin one save. files: the draft of what ``at_paths`` returned; if this raises, the
        caller keeps it. request: makes room when space runs out. Raises ``PortusError``."""
        assert files is not None, "there are files at the paths"
        return files

    def note_commit(self, draft: Draft, version: CommittedVersion, steady: Flags) -> None:
        """Note that ``draft`` was committed. steady: which storages equalled those before."""

    def remove(self, path: str, publisher: Publisher) -> None:
        """Remove the file at ``path``, and data that only it refers to."""
        publisher.remove(path)

    def note_failure(self, save: Save) -> None:
        """Note that a save failed. Raises nothing."""

    def close(self) -> None:
        """Release everything. A later save opens the destination again."""
