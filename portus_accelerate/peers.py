"""What the other processes contribute to a checkpoint: a few kilobytes each, sent to the writer.

Each process has random number generators and positions in data of its own. Stock Accelerate has
each write a file; here they are part of the one version that the main process commits, so that a
checkpoint is never of two moments. They go through the store of the process group, which is not a
collective: many scripts call ``save_state`` on the main process alone, and must not hang.

So at the first save nobody knows whether the others will come. The writer waits for them for
``FIRST_S``; whoever did not come is not waited for again until it does, for that save or a later
one. To a ``best`` the main process may come alone, and to ``step_100`` all of them: so this is
known of each name of a directory, without its numbers.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Collection
from typing import Any, Final

from torch.distributed import distributed_c10d

import portus

_log: Final = logging.getLogger("portus_accelerate")

FIRST_S: Final = 5.0
LATER_S: Final = 60.0
_POLL_S: Final = 0.001


class Peers:
    """One process's place among those of its job.

    rank: its own. writer: the rank of the process that saves for it. others: those that the
    writer saves for besides itself.
    """

    def __init__(self, rank: int, writer: int, others: Collection[int]) -> None:
        self.rank: Final = rank
        self.writer: Final = writer
        self._others: Final = frozenset(others)
        self._last: dict[int, str] = {}
        """Who did not come to the last save, and what of it was waited for."""
        self._silent: Final[dict[str, dict[int, str]]] = {}
        """The same of the last save by each name."""
        self._saves: Final[dict[str, int]] = {}

    @property
    def is_writer(self) -> bool:
        """True in the process that saves."""
        return self.rank == self.writer

    def exchange(self, directory: str, own: dict[str, Any], *, all_come: bool) -> dict[str, Any]:
        """Send ``own`` to the writer of the checkpoint ``directory``; what the writer got, by file
        name. all_come: it is known that every process calls this.

        Raises ``UsageError`` for what cannot be sent.
        """
        if not self._others and self.is_writer:
            return {}
        key = self._key(directory)
        store = _store()
        if not self.is_writer:
            store.set(f"{key}/{self.rank}", portus.pack(own))
            return {}
        return self._gather(store, key, re.sub(r"\d+", "", directory), all_come=all_come)

    def _gather(self, store: Any, key: str, name: str, *, all_come: bool) -> dict[str, Any]:
        patience_s = LATER_S if all_come or name in self._silent else FIRST_S
        silent = self._silent.get(name, self._last)
        late = {rank: each for rank, each in silent.items() if store.check([each])}
        for each in late.values():
            store.delete_key(each)
        expected = self._others if all_come else self._others - (silent.keys() - late.keys())
        names = {f"{key}/{rank}": rank for rank in sorted(self._others)}
        came = _wait(store, [each for each, rank in names.items() if rank in expected], patience_s)
        came += [n for n, rank in names.items() if rank not in expected and store.check([n])]
        found: dict[str, Any] = {}
        for each in came:
            parts = portus.unpack(bytes(store.get(each)))
            assert isinstance(parts, dict)
            found.update(parts)
            store.delete_key(each)
        now = {rank: each for each, rank in names.items() if each not in came}
        if now.keys() - silent.keys():
            _log.warning(
                "Portus: ranks %s did not call save_state with the main process: their random "
                "states are not in the checkpoint. Call it on every rank",
                sorted(now),
            )
        self._silent[name] = self._last = now
        return found

    def _key(self, directory: str) -> str:
        """The same in every process that saves the same checkpoint."""
        count = self._saves[directory] = self._saves.get(directory, 0) + 1
        name = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
        return f"portus/{name}/{count}"


def _wait(store: Any, names: list[str], patience_s: float) -> list[str]:
    """Return those of ``names`` that came in time. The store is polled, never waited on: while one
    thread waits there, no other can use it."""
    end = time.monotonic() + patience_s
    came = [name for name in names if store.check([name])]
    while len(came) < len(names) and time.monotonic() < end:
        time.sleep(_POLL_S)
        came = [name for name in names if store.check([name])]
    return came


_store: Final[Callable[[], Any]] = distributed_c10d._get_default_store
