"""Files and directories that are written beside their destination, and replace it when they are
complete and durable."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Collection, Iterator

from portus.cli import words
from portus.errors import MediumError, UsageError
from portus.reach.media.local import LocalFiles
from portus.reach.media.names import hidden_name


@contextlib.contextmanager
def file_in_place(out: str, *, force: bool, size: int = 0) -> Iterator[str]:
    """Yield a path beside ``out``; the caller writes and syncs a file there, which then becomes
    ``out``.

    size: bytes to come. Raises ``MediumError``, and ``UsageError`` if ``out`` exists, without
    ``force``; then ``out`` does not change.
    """
    _refuse_there(out, force)
    check_room(out, size)
    with _beside(out) as temporary:
        yield temporary
        os.replace(temporary, out)
        # The rename is durable only after this.
        sync_directory(os.path.dirname(temporary))


@contextlib.contextmanager
def directory_in_place(
    out: str, *, force: bool, names: Collection[str] | None = None, size: int = 0
) -> Iterator[str]:
    """Yield a directory beside ``out`` to fill; at the end it is synced and becomes ``out``.

    names: of the files to come; None: ``model*.safetensors``, and an index. size: bytes to come.
    Raises ``MediumError``, and ``UsageError`` if ``out`` has other files, or exists, without
    ``force``; then ``out`` does not change.
    """
    out = os.path.abspath(out)
    there = os.path.lexists(out)
    _refuse_there(out, force or (os.path.isdir(out) and not os.listdir(out)))
    if there and not _is_export(out, names):
        raise UsageError(f"{out} holds more than an export of Portus; remove it yourself")
    check_room(out, size)
    with _beside(out) as temporary:
        old = f"{temporary}.old"
        try:
            os.mkdir(temporary)
            yield temporary
            sync_directory(temporary)
            if there:
                # A rename cannot replace a directory with files in it. So `out` is absent for a
                # moment, and `finally` restores the old one if this ends here.
                os.rename(out, old)
            os.rename(temporary, out)
            sync_directory(os.path.dirname(out))  # before the old directory is removed
        finally:
            if os.path.isdir(old) and not os.path.lexists(out):
                os.rename(old, out)
            shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _beside(out: str) -> Iterator[str]:
    """Yield a path beside ``out``, and remove at the end whatever is left there."""
    directory, name = os.path.split(os.path.abspath(out))
    temporary = os.path.join(directory, hidden_name(name, f".{os.getpid()}.portus"))
    try:
        yield temporary
    except MediumError:
        raise
    except OSError as error:
        raise MediumError(error.errno, f"cannot write {out}: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _refuse_there(out: str, force: bool) -> None:
    if os.path.lexists(out) and not force:
        raise UsageError(f"{out} already exists; --force replaces it")


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    if os.name == "posix":
        LocalFiles().sync(path)


def check_room(out: str, size: int) -> None:
    """Raise ``MediumError`` if there is no space for ``size`` bytes at ``out``, and ``UsageError``
    if there is no such directory."""
    directory = os.path.dirname(os.path.abspath(out))
    if not os.path.isdir(directory):
        raise UsageError(f"{directory}: there is no such directory")
    free = shutil.disk_usage(directory).free
    if size > free:
        text = f"{words.size(size)} are needed, but {directory} has {words.size(free)} free"
        raise MediumError(errno.ENOSPC, f"{out}: {text}")


def _is_export(path: str, names: Collection[str] | None) -> bool:
    """Return whether a directory has only files that an export makes."""
    if not os.path.isdir(path) or os.path.islink(path):
        return False
    if names is not None:
        return set(os.listdir(path)) <= set(names)
    made = (".safetensors", ".safetensors.index.json")
    return all(name.startswith("model") and name.endswith(made) for name in os.listdir(path))
