"""Files and directories that are written beside their destination, and replace it when they are
complete and durable."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator

from portus.cli import words
from portus.errors import MediumError, UsageError
from portus.reach.media.local import LocalFiles, naming_call
from portus.reach.media.names import hidden_name


@contextlib.contextmanager
def in_place(
    out: str, *, force: bool, made: Callable[[str], object] | None = None, size: int = 0
) -> Iterator[str]:
    """Yield a path beside ``out``; the caller writes a file there, or fills the directory there. At
    the end it is synced and becomes ``out``.

    made: only for a directory; tells which names an earlier export made. size: bytes to come.
    Raises ``MediumError``, and ``UsageError`` if ``out`` exists, without ``force``, or has other
    files; then ``out`` does not change.
    """
    target = os.path.abspath(out)
    there = os.path.lexists(target)
    is_directory = os.path.isdir(target) and not os.path.islink(target)
    own = os.listdir(target) if made is not None and is_directory else None
    if there and own != [] and not force:
        raise UsageError(f"{out} already exists; --force replaces it")
    if there and made is not None and (own is None or not all(map(made, own))):
        raise UsageError(f"{out} holds more than an export of Portus; remove it yourself")
    check_room(out, size)
    directory, name = os.path.split(target)
    temporary = os.path.join(directory, hidden_name(name, f".{os.getpid()}.portus"))
    old = f"{temporary}.old"
    try:
        with naming_call("write", out):
            if made is not None:
                os.mkdir(temporary)
            yield temporary
            below = [os.path.join(at, n) for at, d, f in os.walk(temporary) for n in (*d, *f)]
            _sync(*below, temporary)
            if there and made is not None:
                # A rename cannot replace a directory with files in it. So `out` is absent for a
                # moment, and `finally` restores the old one if this ends here.
                os.rename(target, old)
            os.replace(temporary, target)
            # The rename is durable only after this; the old directory is removed later.
            _sync(directory)
    finally:
        if os.path.isdir(old) and not os.path.lexists(target):
            os.rename(old, target)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _sync(*paths: str) -> None:
    """Make files, and the names in directories, durable."""
    for each in paths if os.name == "posix" else ():
        LocalFiles().sync(each)


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
