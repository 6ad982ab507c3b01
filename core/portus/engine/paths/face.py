"""``portus.save`` and ``portus.load``: real files, by their paths."""

from __future__ import annotations

import os
import re
from typing import Any, Final

from portus.engine.directory.waiting import wait_for_drafts
from portus.engine.extensions import MIRRORED, extension
from portus.engine.files.pending import PENDING
from portus.engine.loading.checkpoint_file import load_file
from portus.engine.loading.patterns import Patterns
from portus.engine.paths.process import is_blocking, recover_left, saver
from portus.engine.pipeline.handle import SaveHandle

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
        return extension(MIRRORED)(path, names)
    where = os.path.realpath(os.fspath(path))
    PENDING.wait_for(where)
    with PENDING.exempt():
        wait_for_drafts(*os.path.split(where))
        if not os.path.lexists(where):
            recover_left(os.path.dirname(where))
        return load_file(where, names, **settings)
