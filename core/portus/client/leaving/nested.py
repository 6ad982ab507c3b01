"""What a signal handler saves while a call of Portus that it interrupted is not over.

SLURM requeues a job when the handler returns, so the state has to be durable by then; and nothing
of ours may be waited for (see ``calls``). So it becomes what stock torch would have written: a real
torch file, under a hidden name first, synced, renamed, its directory synced. What was asked for
before it does not change its name any more (see ``order``).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Final

import torch

from portus.client.files import order
from portus.client.files.reference import read
from portus.client.leaving.materialize import sync_directory, temporary_file
from portus.client.state.codecs import codec_of, stand_in
from portus.errors import CorruptionError, MediumError, UsageError
from portus.format.reference import Reference
from portus.pipeline.handle import SaveStats
from portus.spec import VersionInfo

_displaced: Final[deque[Reference]] = deque()
"""Reference files that were where files were written, for the keepers of their pools."""


def write_file(state: object, path: str | os.PathLike[str]) -> None:
    """Put ``state`` at ``path`` as a real torch file, in place of what is there; durable on return.

    What this process was asked to save to, or to remove from, ``path`` before, and has not yet,
    leaves it alone. For adapters, where ``is_nested()``. Raises ``MediumError``; what was at
    ``path`` is untouched then.
    """
    target = os.path.abspath(os.fspath(path))
    directory = os.path.dirname(target)
    temporary = os.path.join(directory, f".{os.urandom(16).hex()}.portus")
    old = None
    try:
        _make_directory(directory)
        with temporary_file(temporary) as file:
            _dump(state, file)
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(CorruptionError):
                old = read(target)
            with order.turn:
                os.replace(temporary, target)
                order.note(target)
        sync_directory(directory)
    except MediumError:
        raise
    except OSError as error:
        raise MediumError(error.errno, f"cannot write {target}: {error.strerror}") from error
    if old is not None:
        _displaced.append(old)


class _StandingIn(pickle.Pickler):
    """What loads without a codec is in the place of objects that have one."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce an object of a codec to its stand-in, for ``pickle``: an OrderedDict, which
        ``weights_only`` reads."""
        codec = codec_of(type(value))
        if codec is None:
            return NotImplemented
        found = stand_in(codec.name, codec.encoded(value))
        return OrderedDict, (), None, None, iter(found.items())


_STANDING_IN: Final = types.ModuleType("standing_in")
_STANDING_IN.Pickler = _StandingIn  # type: ignore[attr-defined]


def _dump(state: object, file: BinaryIO) -> None:
    try:
        torch.save(state, file, pickle_module=_STANDING_IN)
    except RuntimeError as error:  # what torch makes of a write that failed
        raise error.__context__ if isinstance(error.__context__, OSError) else error from error


def take_displaced(is_ours: Callable[[Reference], bool]) -> list[Reference]:
    """The reference files of one pool that were replaced so; each is given once."""
    ours = [each for each in list(_displaced) if is_ours(each)]
    for each in ours:
        _displaced.remove(each)
    return ours


def note_written(directory: str | os.PathLike[str]) -> None:
    """Say that all in ``directory`` was written just now: what was asked for before, and waits,
    leaves it alone. For adapters, where ``is_nested()``."""
    order.note(os.path.abspath(os.fspath(directory)))


class WrittenSave:
    """A save that became files, and is in no pool: its version has id and commit 0."""

    over: Final = True
    error: Final = None

    def __init__(self, model: str, step: int, state: object, files: Mapping[str, str | None]):
        """Write ``state``, or its part, to each of ``files``. Raises ``UsageError`` where there is
        none, and ``MediumError``."""
        start = time.perf_counter()
        if not files:
            raise UsageError(
                f"save of step {step}: a signal handler interrupted a call of Portus in the "
                "same thread, which holds the pool until the handler returns. Give "
                "reference=PATH: the state is then saved as a real torch file there, durably"
            )
        for path, part in files.items():
            write_file(_part_of(state, part), path)
        size = sum(os.stat(path).st_size for path in files)
        took_s = time.perf_counter() - start
        self.stats: Final = SaveStats(
            call_s=took_s, total_s=took_s, state_bytes=size, copied_bytes=size
        )
        self._info: Final = VersionInfo(model, 0, 0, step, os.urandom(16), time.time_ns(), size)

    def join(self) -> None:
        """Return at once: the save has ended."""

    def result(self, timeout_s: float | None) -> VersionInfo:
        """Return the version that was saved, at once."""
        return self._info


def _part_of(state: object, part: str | None) -> object:
    if part is None:
        return state
    assert isinstance(state, dict)
    return state[part]


def _make_directory(path: str) -> None:
    """Make a directory and those that it is in, durably."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    _make_directory(above)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync_directory(above)


__all__ = ["WrittenSave", "note_written", "take_displaced", "write_file"]
