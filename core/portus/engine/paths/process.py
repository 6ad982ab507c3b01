"""``portus.save`` and ``portus.load``: real files, by their paths."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import re
import sys
import threading
import weakref
from typing import Any, Final, Protocol

from portus.engine.directory.recovery import recover_directory
from portus.engine.directory.waiting import wait_for_drafts
from portus.engine.extensions import MIRRORED, extension
from portus.engine.files.pending import PENDING
from portus.engine.job.settings import Settings
from portus.engine.loading.checkpoint_file import load_file
from portus.engine.loading.patterns import Patterns
from portus.engine.media import calls
from portus.engine.paths.saver import FileSaver, SharedWriter
from portus.engine.pipeline.handle import SaveHandle
from portus.errors import MediumError, PortusError, UsageError

_log: Final = logging.getLogger("portus")

BLOCKING: Final = "PORTUS_BLOCKING"
"""A variable: if it is set, and not to 0, each ``save`` returns when its file is durable."""

_SHARE: Final = 4
"""The part of the machine's memory that may be staged: one in this many bytes."""


class Closable(Protocol):
    """A saver that has to be closed before the process ends."""

    def close(self) -> None: ...


_making = threading.RLock()
_writers: Final[list[SharedWriter]] = []
"""The writer of this process, once it saved."""
_savers: Final[list[FileSaver]] = []
"""The saver of ``portus.save``."""
_open: Final[weakref.WeakSet[Closable]] = weakref.WeakSet()
_finalizers: Final[list[multiprocessing.util.Finalize]] = []


@calls.mark
def join(owner: Closable) -> SharedWriter:
    """Return the writer that all savers of this process share, until ``leave``. The exit of the
    process closes ``owner``, if it still exists. Raises ``UsageError`` off Linux."""
    with _making:
        shared = _writer()
        _open.add(owner)
        return shared


@calls.mark
def saver() -> FileSaver:
    """Return the saver of ``portus.save``."""
    if not _savers:
        with _making:
            if not _savers:  # another thread may have made it
                made = FileSaver(_writer(), Settings(), raises_wrong_path=True)
                _open.add(made)
                _savers.append(made)
    return _savers[0]


@calls.mark
def leave(owner: Closable) -> None:
    """End the use by ``owner``. Neither spare nor hold outlasts it, and the last owner ends the
    thread."""
    _open.discard(owner)
    # Closing joins the worker, which cannot join itself.
    if not any(each.queue.on_worker() for each in list(_writers)):
        with _making:
            _close_unused()
    # The garbage collector may end an owner on the worker, while another thread holds the lock and
    # waits for the worker to end: that thread closes the writer.
    elif _making.acquire(blocking=False):
        try:
            _close_unused()
        finally:
            _making.release()


def _close_unused() -> None:
    for each in _writers:
        each.publisher.close()
    if _writers and not _open:
        try:
            _writers[0].close()
        finally:
            _writers.clear()  # not before: ``leave`` looks there for its thread


def _writer() -> SharedWriter:
    if sys.platform != "linux":
        raise UsageError(
            f"portus.save: files are written on Linux only; on {sys.platform} use torch.save"
        )
    if not _writers:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        _writers.append(SharedWriter(memory // _SHARE))
        atexit.unregister(_finish)
        atexit.register(_finish)
        # Handlers that run after this one may save, and children of ``multiprocessing`` run none.
        if not any(each.still_active() for each in _finalizers):
            _finalizers[:] = [multiprocessing.util.Finalize(None, _finish, exitpriority=0)]
    return _writers[0]


def is_blocking() -> bool:
    """Return whether each save is to return only when its file is durable."""
    # Late in an exit nothing else waits for it.
    return multiprocessing.util.is_exiting() or os.environ.get(BLOCKING, "0") not in ("", "0")


@calls.mark
def recover_left(directory: str) -> None:
    """Restore files that a killed process had removed too early."""
    with contextlib.suppress(MediumError):  # a load reports what is missing
        recover_directory(directory)


@calls.mark
def _finish() -> None:
    """Finish the saves in flight, at the exit."""
    with PENDING.exempt():
        # Owners first: they wait for their saves, and report what failed.
        for owner in list(_open):
            try:
                owner.close()
            except PortusError as error:
                _log.error("portus: a save failed: %s", error)
        _open.clear()
        _savers.clear()
        while _writers:
            _writers.pop().close()


def _forget_in_child() -> None:
    """Forget the saves in flight and the lock, which belong to the parent."""
    global _making
    _making = threading.RLock()
    _savers.clear()
    _writers.clear()
    _open.clear()
    _finalizers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


_STORE: Final = re.compile(r"(?:s3|gs|az|file)://|memory:")
"""The beginning of a store's address, see ``portus.reach.mirror.address``."""


def save(obj: object, path: str | os.PathLike[str], *, wait: bool = False) -> SaveHandle:
    """Save ``obj`` to ``path`` in the background, as ``torch.save`` would, and return at once.

    Everything that ``torch.save`` accepts is accepted, and the file is the one that it writes, with
    a record of digests besides. It appears at ``path`` when it is whole and durable; until then
    there is what was there before. Tensors stay the caller's. Those that only an optimizer's step
    writes are copied after this returns, and that step waits for the copy; all others are copied
    before. Saves become visible in the order of the calls.

    path: of a file in an existing directory. Links are followed; the mode of a file that is there
        is kept. While the save is in flight, Python code of this process that lists, opens, copies
        or removes the file waits for it; so do ``portus.load`` in any process, and subprocesses.
    wait: return when the file is there; raise what kept it from there. ``$PORTUS_BLOCKING=1``
        makes that the default of a process.

    Returns a handle: ``handle.wait()`` blocks until the file is durable, and raises the error of a
    save that failed. A failure without a waiter is logged by the next call, or raised while
    no save of this process has succeeded.

    Raises ``UsageError`` for what cannot be pickled or written, with its place in ``obj``, and
    ``MediumError`` if the file cannot be begun. At the exit of the process saves in flight are
    finished. In a signal handler that interrupted a call of Portus the file is written at once.
    """
    return handle_of(saver().save(obj, path), wait)


def handle_of(handle: SaveHandle, wait: bool) -> SaveHandle:
    """Return the handle of a save, after its end if ``wait`` or ``$PORTUS_BLOCKING`` says so."""
    if wait or is_blocking():
        handle.wait()
    return handle


def load(path: str | os.PathLike[str], names: Patterns = None, **settings: Any) -> Any:
    """Load what is at ``path``, verified, and return it.

    As ``torch.load``, with its rules, and each byte is compared with the digests in the file. A
    file of stock ``torch.save`` loads too, unverified; and so does a safetensors file, as a dict of
    its tensors, verified if Portus saved it. Waits for a save to ``path`` that is in flight, in
    this process or another.

    path: of a file; or the address of a version in a mirror: ``s3://bucket/prefix/model@step``, or
        without ``@step`` for the newest version; also ``gs://``, ``az://``, ``file:///``. If the
        mirror is sealed with a key, set ``$PORTUS_MIRROR_KEY``.
    names: shell patterns of key paths (``"model.*"``): read only that part of the state.
    settings: those of ``torch.load``: ``map_location``, ``weights_only``, ``mmap`` and others.

    Raises ``CorruptionError``, which names the tensor and its place in the file; ``UsageError`` if
    nothing matches a pattern; ``MediumError``; ``TransportError`` if a store does not answer; and
    what ``torch.load`` raises.
    """
    if isinstance(path, str) and _STORE.match(path):
        return extension(MIRRORED)(path, names, **settings)
    where = os.path.realpath(os.fspath(path))
    PENDING.wait_for(where)
    with PENDING.exempt():
        wait_for_drafts(*os.path.split(where))
        if not os.path.lexists(where):
            recover_left(os.path.dirname(where))
        return load_file(where, names, **settings)
