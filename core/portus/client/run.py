"""``Run``: a training run that saves, as adapters and sharded saves see it.

What every one of them has to know is here: where it saves, what it is called there, where the links
of its files are, with which settings; and what to do where another run has that pool file already.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import torch

from portus.client.job.settings import UNMIRRORED, Settings, as_arguments
from portus.client.leaving.materialize import give_back
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.errors import BusyError, MediumError
from portus.index.directory import generations
from portus.index.keep import Keep
from portus.index.place import DEFAULT_DIRECTORY, Place, PlaceKind

Result = TypeVar("Result")

_FILES_MAX: Final = 64
"""Runs that save beside each other at once; each has its own pool file."""

_NAME_MAX: Final = 120

_QUOTED_MAX: Final = 200
"""Bytes of a name in that of a pool file."""


class Run:
    """Where a run saves, as what, and how; and its ``Checkpointer``, open when it is needed.

    place: where. name: of the run there. settings: how. links: the directory of this machine that
        tells living reference files from deleted ones, see ``Checkpointer``.
    keep: which versions stay without a file; see ``Checkpointer``.
    is_named: True if a user gave the name: then the run has no other. Else, where another process
        has the pool file (or the name, on a storage host), the next one is taken: ``name~2``.

    Nothing is opened before it is used. A forked child has no part in what its parent opened.
    """

    def __init__(
        self,
        place: Place,
        name: str,
        settings: Settings | None = None,
        *,
        links: str | None = None,
        is_named: bool = True,
        keep: int | Keep | None = 1,
    ) -> None:
        self.place: Final = place
        self.settings: Final = settings or Settings()
        self.links: Final = links
        self.keep: Final = Keep.of(keep)
        self._name: Final = name
        self._may_be_next: Final = not is_named and place.is_for_many
        self._number = 1
        self._guard: Final = threading.RLock()
        self._opened: Final[dict[int, PoolCheckpointer]] = {}
        """What is open, by the process that opened it: one at most, in which this is."""

    @classmethod
    def beside(
        cls,
        checkpoints: str,
        settings: Settings | None = None,
        *,
        roots: Iterable[str],
        otherwise: str,
        pool: Place | None = None,
        name: str | None = None,
        keep: int | Keep | None = 1,
    ) -> Run:
        """The run whose checkpoints are in the directory ``checkpoints``; the same one after a
        restart.

        pool, name: what a user said. By default the place is ``$PORTUS_POOL``, else ``.portus`` in
            the first of ``roots`` that is on the file system of ``checkpoints``, else in
            ``otherwise``. In that ``.portus`` the links are, wherever the pool is.
        keep: which versions stay without a file; see ``Checkpointer``.

        All paths are absolute. Raises ``MediumError`` where a file system cannot be asked, and
        ``UsageError`` for what ``$PORTUS_POOL`` says.
        """
        home = _device(checkpoints)
        root = next((each for each in roots if _device(each) == home), otherwise)
        shared = pool or Place.by_variable()
        links = os.path.join(root, DEFAULT_DIRECTORY)
        return cls(
            shared or Place.named(links),
            name or _name_of(checkpoints, root, is_shared=shared is not None),
            settings,
            links=links,
            is_named=name is not None,
            keep=keep,
        )

    @property
    def name(self) -> str:
        """What it is called in the pool; another one once the first was found taken."""
        return self._name if self._number == 1 else f"{self._name}~{self._number}"

    @property
    def checkpointer(self) -> PoolCheckpointer | None:
        """What is open in this process, if it is."""
        return self._opened.get(os.getpid())

    def use(self, act: Callable[[PoolCheckpointer], Result]) -> Result:
        """What ``act`` gives for the ``Checkpointer`` of the run; for that of the next pool file,
        where it raises ``BusyError``. Raises what ``act`` raises, and what opening does."""
        while True:
            try:
                return act(self._open())
            except BusyError:
                if not self._may_be_next or self._number >= _FILES_MAX:
                    raise
                self.close()
                self._number += 1

    def part(self, name: str, place: Place, keep: Keep | None = None) -> PoolCheckpointer:
        """A ``Checkpointer`` of its own for a part of the run, such as a rank's, with the same
        settings; at the run's place, or one of its hosts. The caller closes it, and says what its
        commits retire (``part.surplus``), or it keeps all versions, or what ``keep`` says. It has
        no mirror."""
        settings = as_arguments(self.settings)
        settings["mirror"] = UNMIRRORED
        return PoolCheckpointer(place, name, keep=keep, links=self.links, **settings)

    def close(self) -> None:
        """Finish what is in flight and let go of the pool; it may be used again. Raises as
        ``Checkpointer.close``."""
        with self._guard:
            checkpointer = self._opened.pop(os.getpid(), None)
            if checkpointer is not None:
                checkpointer.close()

    def give_back(self) -> None:
        """Training has ended: let the pool file of the run on this machine let go of what nothing
        leads to any more; if it is empty then, it goes. A process may have made the last file real
        and died before it did this. Not while somebody saves there, nor where the run went on in a
        successor."""
        pool = self.place.pool_of(self.name)
        with contextlib.suppress(MediumError):
            is_file = self.checkpointer is None and pool.kind is PlaceKind.FILE
            if is_file and list(generations(pool.path)) == [1]:
                give_back(pool.path)

    def _open(self) -> PoolCheckpointer:
        with self._guard:
            checkpointer = self.checkpointer
            if checkpointer is None:
                made = self._made(self.name, self.place, keep=self.keep)
                # In one go: a signal handler that saves, until here, has opened one itself.
                checkpointer = self._opened.setdefault(os.getpid(), made)
                if checkpointer is not made:
                    made.close()
            return checkpointer

    def _made(self, name: str, place: Place, keep: Keep | None) -> PoolCheckpointer:
        settings = as_arguments(self.settings)
        return PoolCheckpointer(place, name, keep=keep, links=self.links, **settings)


def expected_bytes(modules: Iterable[torch.nn.Module], optimizers: Iterable[Any]) -> int:
    """About how many bytes a checkpoint of a training will have, before its first step: weights,
    and of each that is trained two moments. Of what is sharded, this process's part."""
    tensors = [each for module in modules for each in (*module.parameters(), *module.buffers())]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trained = {
        id(parameter): _bytes_here(parameter)
        for group in groups
        for parameter in group["params"]
        if parameter.requires_grad
    }
    return sum(map(_bytes_here, tensors)) + 2 * sum(trained.values())


def _bytes_here(tensor: torch.Tensor) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).nbytes)


def _device(path: str) -> int:
    """The file system of ``path``, or of what is to hold it. Raises ``MediumError``."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        return os.stat(path).st_dev
    except OSError as error:
        raise MediumError(
            error.errno, f"{path}: cannot ask for its file system: {error.strerror}"
        ) from error


def _name_of(directory: str, root: str, *, is_shared: bool) -> str:
    """A name for the run that saves to ``directory``: the same after a restart.

    Where several projects share a pool directory, and where not all of the path can be said, a
    part of a digest keeps them apart.
    """
    below = os.path.relpath(directory, root)
    if below.startswith(os.pardir):  # one of them may be spelled through a symbolic link
        below = os.path.relpath(os.path.realpath(directory), os.path.realpath(root))
    below = below.replace(os.sep, "/")
    name = "/".join(part for part in below.split("/") if part not in (".", ".."))
    name = name.removesuffix("/checkpoints") or os.path.basename(root) or "run"
    text = os.fsencode(name).decode(errors="backslashreplace")
    if is_shared or text != name or not _is_short(name):
        mark = hashlib.sha256(os.fsencode(directory)).hexdigest()[:8]
        while not _is_short(text):
            text = text[1:]
        text = f"{text}-{mark}"
    return text


def _is_short(name: str) -> bool:
    return len(name) <= _NAME_MAX and len(urllib.parse.quote(name, safe="")) <= _QUOTED_MAX
