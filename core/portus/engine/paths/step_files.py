"""The checkpoints of a directory: one real torch file for each step, ``step-00000100.pt``.

Each has a note with the time of its save and its metrics. The time says which is the newest, also
after a run went back to an earlier step, and in a copy of the directory, where files have other
times. A file without a note, such as one by stock ``torch.save``, has the time of its file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from portus.engine.directory.system import medium_error
from portus.engine.loading.checkpoint_file import read_note
from portus.engine.settings.keep import Keep
from portus.engine.spec import VersionInfo, check_step
from portus.errors import CorruptionError, MediumError

_NAME: Final = re.compile(r"step-(\d{8,19})\.pt")


class _Note(msgspec.Struct, frozen=True):
    """The note of a save in its file."""

    time_ns: int
    metrics: Mapping[str, float]


class StepFiles:
    """The files of the steps in one directory, which may not exist yet. Threads may share it."""

    def __init__(self, directory: str) -> None:
        self.directory: Final = directory
        self._known: dict[tuple[int, ...], VersionInfo | None] = {}
        """The notes of files, by the mark of each; None for a file that is cut off."""

    def path_of(self, step: int) -> str:
        """Return the path of the file of a step. Raise ``UsageError`` if it is not a step."""
        number = check_step(step)
        return os.path.join(self.directory, f"step-{number:08d}.pt")

    def note(self, time_ns: int, metrics: Mapping[str, float]) -> bytes:
        """Return the note of a save for its file."""
        return msgspec.json.encode(_Note(time_ns, metrics))

    def note_commit(self, step: int, note: bytes) -> None:
        """Remember the ``note`` of a file that was just written, so that it need not be read."""
        with contextlib.suppress(OSError):
            status = os.stat(self.path_of(step))
            self._known[_mark(step, status)] = self.describe(step, note, status.st_size)

    def describe(self, step: int, note: bytes, size: int = 0) -> VersionInfo:
        """Return the facts in the ``note`` of a step's file."""
        return self._info(step, msgspec.json.decode(note, type=_Note), size)

    def versions(self) -> list[VersionInfo]:
        """Return the checkpoints, oldest save first; files that are cut off too, by the times of
        the files. Raises ``MediumError``."""
        return [info for info, _ in self._list_files()]

    def surplus(self, keep: Keep, *coming: VersionInfo) -> list[str]:
        """Return the files that ``keep`` drops, oldest first, once ``coming`` is there too; never
        the newest file. Files that are cut off do not count, and stay. Raises ``MediumError``."""
        # A file that is cut off must not push a good one out, and it is evidence (decision 0206).
        sound = [info for info, is_sound in self._list_files() if is_sound]
        known = [info for info in sound if all(info.step != each.step for each in coming)]
        staying = {info.step for info in keep.staying([*known, *coming])}
        return [self.path_of(info.step) for info in sound[:-1] if info.step not in staying]

    def _list_files(self) -> list[tuple[VersionInfo, bool]]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise medium_error(error, self.directory) from error
        known: dict[tuple[int, ...], VersionInfo | None] = {}
        found = []
        for name in names:
            match = _NAME.fullmatch(name)
            # With another number of zeros, one step could have two files.
            if match is None or name != os.path.basename(self.path_of(int(match[1]))):
                continue
            path = os.path.join(self.directory, name)
            try:
                status, step = os.stat(path), int(match[1])
                mark = _mark(step, status)
                known[mark] = (
                    self._known[mark] if mark in self._known else self._read(path, step, status)
                )
            except FileNotFoundError:
                continue  # it was removed meanwhile
            except OSError as error:
                raise medium_error(error, path) from error
            # A file that is cut off is listed, so that a load reports it before it falls back.
            outside = self._info(step, _Note(status.st_mtime_ns, {}), status.st_size)
            found.append((known[mark] or outside, known[mark] is not None))
        self._known = known
        return sorted(found, key=lambda each: (each[0].time_ns, each[0].step))

    def _read(self, path: str, step: int, status: os.stat_result) -> VersionInfo | None:
        """Return the facts in a file's note; None if it is cut off or cannot be read."""
        try:
            note = read_note(path)
            if note is not None:
                return self.describe(step, note, status.st_size)
        except (CorruptionError, MediumError, PermissionError, msgspec.DecodeError):
            return None
        return self._info(step, _Note(status.st_mtime_ns, {}), status.st_size)

    def _info(self, step: int, note: _Note, size: int) -> VersionInfo:
        return VersionInfo(
            model=os.path.basename(self.directory),
            id=0,
            commit=0,
            step=step,
            token=b"",
            time_ns=note.time_ns,
            size=size,
            metrics=note.metrics,
        )


def _mark(step: int, status: os.stat_result) -> tuple[int, ...]:
    """Return a mark that changes when another file replaces a file."""
    return step, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
