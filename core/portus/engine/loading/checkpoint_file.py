"""The checkpoint file at a path, or the one in a pool that a pointer there refers to; recognized by
its first bytes or its name, loaded and verified. And the newest one that verifies, while a training
may be removing some."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from portus.engine.extensions import OTHER_FORMAT, USE_POINTER, extension
from portus.engine.format.pointer_marks import POINTER_MAX, is_pointer
from portus.engine.image.image import Read, StoredFile
from portus.engine.image.integrity import shard_of
from portus.engine.image.torch_reader import read_torch
from portus.engine.image.torch_zip import DIGESTS, NOTE, ZIP
from portus.engine.loading.open_file import OpenFile, StoredBytes, open_file, reads
from portus.engine.loading.patterns import Patterns
from portus.engine.loading.restore_over import RestoreOptions, RestoreReport
from portus.engine.loading.torch_file import load_torch, record_of_torch, restore_torch
from portus.engine.media.read_file import Pace
from portus.engine.spec import VersionInfo
from portus.errors import (
    CorruptionError,
    MediumError,
    StaleError,
    TransportError,
    UsageError,
    printable,
)

Result = TypeVar("Result")


class FileFormat(NamedTuple):
    """A format of checkpoint files. Each function takes the path of a file for messages.

    load: see ``load_opened``. outline: returns the places of everything in a file. record: returns
    the bytes of our record ``NOTE``, or ``DIGESTS``, in an open file; None if it has none.
    """

    load: Callable[..., Any]
    outline: Callable[[Read, int, str], StoredFile]
    record: Callable[[OpenFile, str, str], bytes | None]


_TORCH: Final = FileFormat(load_torch, read_torch, record_of_torch)


def load_file(
    path: str | os.PathLike[str],
    names: Patterns = None,
    *,
    verify: bool = True,
    **settings: Any,
) -> Any:
    """Return the state in the file at ``path``, verified if the file has digests: of a safetensors
    file the tensors by their names, else the result of ``torch.load``.

    names: shell patterns of key paths: only matching storages are read, and only matching parts of
        dicts, lists and tuples returned, with None for what a list or tuple lacks.
    verify: False compares no digests of storages.
    settings: those of ``torch.load``. With ``mmap`` the whole file is read and verified first.

    Blocks. Raises ``CorruptionError``, ``MediumError``, ``UsageError`` for a pattern that matches
    nothing, and the errors of ``torch.load``.
    """
    where = os.fspath(path)
    if os.path.isdir(where):
        raise UsageError(
            f"{printable(where)}: expected a file of torch.save, found a directory; portus.open "
            "reads a pool"
        )
    return use_file(
        where, lambda file: load_opened(file, where, names, verify=verify, settings=dict(settings))
    )


def restore_file(
    path: str | os.PathLike[str], state: object, options: RestoreOptions
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy the file of torch at ``path`` over the tensors of ``state``, and set its other leaves;
    see ``over.restore_over``, also for the result and the errors.

    Storages are read straight into tensors that are plain blocks of memory.
    """
    where = os.fspath(path)
    return use_file(where, lambda file: restore_torch(file, where, state, options))


def read_note(path: str | os.PathLike[str]) -> bytes | None:
    """Return the note in a file, by its saver; None if there is none. Reads little of the file.
    Raises ``CorruptionError`` for one that is cut off, ``MediumError``."""
    where = os.fspath(path)
    return use_file(where, lambda file: note_of(file, where))


def has_digests(path: str | os.PathLike[str]) -> bool:
    """Return whether a file has digests of its storages, as one that Portus saved. Reads little of
    it. Raises ``CorruptionError`` for one that is cut off, ``MediumError``."""
    where = os.fspath(path)

    def has_some(file: OpenFile) -> bool:
        shard = shard_of(reads(file), file.size, where)
        if shard is not None:
            return shard.has_digests
        return format_of(reads(file), where).record(file, where, DIGESTS) is not None

    return use_file(where, has_some, as_torch=False)


def verify_file(path: str | os.PathLike[str], pace: Pace | None = None) -> int:
    """Read every byte of a file and compare it with the digests in it; return their number. A stock
    file of torch is compared with the CRCs of its zip, and one of safetensors with nothing.

    pace: a limit of the rate; cached bytes of the file are read from the disk then. Raises
    ``CorruptionError``, ``MediumError``.
    """
    where = os.fspath(path)

    def verify(file: OpenFile) -> int:
        read = reads(file)
        shard = shard_of(read, file.size, where)
        found = None if shard else outline_file(read, file.size, printable(where))
        if pace is not None:
            if file.number is not None and hasattr(os, "posix_fadvise"):
                # Rot on the disk does not show in cached pages.
                with contextlib.suppress(OSError):
                    os.posix_fadvise(file.number, 0, 0, os.POSIX_FADV_DONTNEED)
            read = _pace(read, pace)
        if shard is not None:
            shard.verify(read)
        elif found is not None and (pace is not None or found.digests is None):
            found.verify(read)
        elif found is not None:
            StoredBytes(file, found).check_all()
        return file.size

    return use_file(where, verify, as_torch=False)


def use_file(where: str, act: Callable[[OpenFile], Result], *, as_torch: bool = True) -> Result:
    """Return the result of ``act`` for the file at a path, or for the file in a pool that a pointer
    there refers to. as_torch: see ``open_file``."""
    with open_file(where, as_torch=as_torch) as file:
        if file.size > POINTER_MAX or not is_pointer(reads(file)(0, file.size)):
            return act(file)
    found: Result = extension(USE_POINTER)(where, act)
    return found


def load_opened(
    file: OpenFile, where: str, names: Patterns, *, verify: bool, settings: dict[str, Any]
) -> Any:
    """Return the state in an open file; see ``load_file``. where: its path, for messages."""
    return format_of(reads(file), where).load(file, where, names, verify=verify, settings=settings)


def note_of(file: OpenFile, where: str) -> bytes | None:
    """Return the note of an open file; see ``read_note``."""
    return format_of(reads(file), where).record(file, where, NOTE)


def format_of(read: Read, name: str) -> FileFormat:
    """Return the format of a file, by its first bytes, or its name if those do not tell."""
    found: FileFormat | None = None
    if read(0, len(ZIP)) != ZIP:
        found = extension(OTHER_FORMAT)(read, name)
    return found or _TORCH


def outline_file(read: Read, size: int, name: str) -> StoredFile:
    """Return the places of everything in the file that ``read`` reads."""
    return format_of(read, name).outline(read, size, name)


def _pace(read: Read, pace: Pace) -> Read:
    def read_slowly(offset: int, length: int) -> bytes:
        data = read(offset, length)
        pace.take(len(data))
        return data

    return read_slowly


_log: Final = logging.getLogger("portus")

_TRIES: Final = 5
"""The most times that a load starts again because its checkpoint was removed meanwhile."""

Found = TypeVar("Found")


class StepSource(Protocol):
    """A committed checkpoint. As text: its name in the log."""

    def load(self, names: Patterns, *, verify: bool, **settings: Any) -> Any:
        """Return the state, or its matching part; see ``Checkpointer.load``. Raises ``StaleError``
        if it was removed meanwhile."""

    def restore_into(self, state: object, options: RestoreOptions) -> RestoreReport:
        """Copy it over ``state``; see ``Checkpointer.restore_into``. Raises as ``load``."""


def use_newest(choose: Callable[[], Sequence[Found]], use: Callable[[Found], Result]) -> Result:
    """Return the result of ``use`` for the last checkpoint of ``choose`` that verifies. Older ones
    are used only with an error in the log (V4). Raises the error of the newest damaged one if none
    verifies, and ``StaleError`` if the chosen one was removed meanwhile each time."""
    for _ in range(_TRIES - 1):
        # Chosen anew each time: a training removes checkpoints while this loads them.
        with contextlib.suppress(StaleError, TransportError):
            return _use_last(choose(), use)
    return _use_last(choose(), use)


def _use_last(found: Sequence[Found], use: Callable[[Found], Result]) -> Result:
    failures: list[CorruptionError | MediumError] = []
    for each in reversed(found):
        if failures:
            _log.error("%s; FALLING BACK to %s", failures[-1], each)
        try:
            return use(each)
        except (CorruptionError, MediumError) as error:
            failures.append(error)
    # Damage is raised rather than an error of the disk, which may pass.
    raise next((each for each in failures if isinstance(each, CorruptionError)), failures[-1])


_loaded: Final[dict[str, VersionInfo]] = {}
"""The versions that this process has loaded, so that its journal can say what it resumes from."""


def note_loaded(info: VersionInfo) -> None:
    """Note that a version was loaded; the newest load of each model counts."""
    _loaded[info.model] = info


def take_loaded(model: str) -> tuple[bytes, int] | None:
    """Return token and step of the version that was loaded, or None, and forget it."""
    info = _loaded.pop(model, None)
    return None if info is None else (info.token, info.step)
