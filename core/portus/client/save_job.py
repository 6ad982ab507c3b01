"""One save in the queue of its run, and the files that it placed, if it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from portus.client.files import order
from portus.client.files.keeper import Keeper
from portus.client.job.ledger import Ledger
from portus.errors import TransportError
from portus.format.reference import Reference
from portus.pipeline.queue import Chore, Queue
from portus.pipeline.run import Save


class SaveJob:
    """A save in the queue, from before it is planned."""

    def __init__(
        self, queue: Queue, ledger: Ledger, after: Callable[[SaveJob, Save], None]
    ) -> None:
        """Create a job. after: called on the worker when the save has ended and its waiters run."""
        self._queue: Final = queue
        self._ledger: Final = ledger
        self._after: Final = after
        self.asked: Final = order.asked()
        self.save: Save | None = None
        self.keeper: Keeper | None = None
        self.paths: Collection[str] = ()
        """Those of its reference files."""
        self.placed: Mapping[str, Reference] = {}
        """Those that are there before the commit."""

    def run(self) -> None:
        assert self.save is not None
        self.save.run()
        time.sleep(0)  # whoever waited for it goes on first
        self._after(self, self.save)

    def fail(self, error: BaseException) -> None:
        if self.save is not None and not self.save.over:
            self.save.fail(error)
            self._ledger.failed(self.save, self.save.step)
            self._queue.put(_Withdrawal(self))

    def withdraw(self) -> None:
        """Withdraw the placed files, which look like checkpoints, after a failure. They stay if a
        storage host never answered whether it committed. Call it on the worker."""
        save, keeper = self.save, self.keeper
        if save is None or keeper is None:
            return
        keeper.settle(save.token)
        if save.is_in_doubt and isinstance(save.error, TransportError):
            return
        for path, reference in self.placed.items():
            keeper.withdraw(path, reference, self.asked, is_in_doubt=save.is_in_doubt)

    def hurry(self) -> None:
        if self.save is not None:
            self.save.hurry()

    def give_up(self, error: BaseException) -> None:
        """Leave no reservation and no fence behind; the caller gets the error at once."""
        if self.save is not None:
            self.save.fail(error)
            self._queue.put(_Withdrawal(self))


class _Withdrawal(Chore):
    """The files of a save that failed outside of the worker."""

    def __init__(self, job: SaveJob) -> None:
        self._job: Final = job

    def run(self) -> None:
        self._job.withdraw()
