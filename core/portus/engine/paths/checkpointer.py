"""``Checkpointer``: Portus for a training loop, at any place."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from portus.engine.extensions import STEPS_OF, extension
from portus.engine.fence.fence import before_write
from portus.engine.job.settings import Settings, SettingsDict
from portus.engine.loading.checkpoint_file import StepSource, use_newest
from portus.engine.loading.patterns import Patterns
from portus.engine.loading.restore_over import Rename, RestoreOptions, RestoreReport
from portus.engine.media import calls
from portus.engine.paths.process import is_blocking, leave
from portus.engine.paths.saver import FileSaver
from portus.engine.pipeline.handle import SaveHandle, SaveStats
from portus.engine.pipeline.request import Companion, SaveRequest
from portus.engine.pipeline.run import Save
from portus.engine.settings.keep import Keep, check_metrics
from portus.engine.spec import VersionInfo, check_step
from portus.errors import PortusError, UsageError, printable

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_log: Final = logging.getLogger("portus")


class Steps(Protocol):
    """The checkpoints of one run, at one place: in a directory, or in a pool."""

    @property
    def path(self) -> str:
        """See ``Checkpointer.path``."""

    @property
    def saver(self) -> FileSaver:
        """The saver of the checkpoints, which the ``Checkpointer`` closes."""

    @property
    def companions(self) -> Sequence[Companion]:
        """The companions of the saves."""

    def open(self) -> None:
        """Open existing checkpoints, or fetch them. Raises ``PortusError``."""

    def save(self, state: object, request: StepRequest) -> SaveHandle:
        """Begin a save. Raises as ``Checkpointer.save``."""

    def note_commit(self, request: StepRequest) -> None:
        """Note that a save was committed, and remove files that ``keep`` drops."""

    def make_room(self, request: StepRequest) -> bool:
        """Remove, from a full disk, the oldest file that ``keep`` drops after that save, while a
        newer one stays. Return whether that was done."""

    def versions(self) -> list[VersionInfo]:
        """See ``Checkpointer.versions``."""

    def choose(self, step: int | None) -> Sequence[StepSource]:
        """Wait for the saves in flight, and return the checkpoints of a step, or all, newest last.
        Raise ``NoCheckpointError`` if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest(SaveRequest):
    """The request of one step. It keeps ``owner`` alive, so that it is not closed before the save
    has ended. path: of the file, absolute; empty for a version in a pool."""

    owner: Checkpointer
    path: str = ""

    def make_room(self) -> bool:
        # Both, in this order: an upload may hold the space of the file that was just removed.
        has_removed = self.owner._steps.make_room(self)
        return any(each.yield_space() for each in self.owner._steps.companions) or has_removed

    def note_start(self, save: Save) -> None:
        for each in self.owner._steps.companions:
            each.note_start(self.path, save)

    def note_commit(self, save: Save) -> None:
        for each in self.owner._steps.companions:
            each.note_commit(self.path, save)
        self.owner._steps.note_commit(self)

    def over(self, save: Save) -> None:
        for each in self.owner._steps.companions:
            each.over(save)


class Checkpointer:
    """Saves the state of a training run in the background, and loads it back.

    In a directory each checkpoint is a real torch file, ``step-00000100.pt``, which plain
    ``torch.load`` reads. It appears under its name when it is whole and durable. On a device or a
    storage host a checkpoint is a version in a pool.

    ``save`` returns at once. A thread then copies the bytes straight from the tensors while
    training continues, and an optimizer's step waits until the tensors that it writes have been
    copied. Use it as a context manager, or close it.

    In place of a directory ``directory`` may be a DAX device (``/dev/dax0.0``), a pool file
    (``/mnt/pmem/gpt.portus``), or the address of a storage host (``portus://host:7117``,
    ``portus+tls://...``, ``portus+unix:///path.sock``).

    directory: None is ``$PORTUS_POOL``, else ``checkpoints`` in the current directory.
    model: a name for the run in a pool; a directory has one run, and takes none.
    keep: which checkpoints to keep: a number (the newest ones), or a ``portus.Keep``; None keeps
        all. The commit of a newer one removes the others.
    settings: how to save, and what to do about failures: see ``portus.Settings``.

    Raises ``UsageError``, and ``BusyError``, ``MediumError`` or ``CorruptionError`` if a pool
    cannot be opened. Threads may share a ``Checkpointer``; a forked child may not use it.
    """

    _STEPS: ClassVar[str] = STEPS_OF
    """Makes the ``Steps``, by name: see ``portus.engine.extensions``."""

    @calls.mark
    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        model: str = "default",
        *,
        keep: int | Keep | None = 2,
        **settings: Unpack[SettingsDict],
    ) -> None:
        self._is_closed = True  # until it is made
        self.settings: Final = Settings(**settings)
        """The settings of its saves and loads."""
        self._steps: Steps = extension(self._STEPS)(
            directory, model, Keep.of(keep), self.settings, self
        )
        self._saver: Final[FileSaver] = self._steps.saver
        self._last: SaveHandle | None = None
        self._process: Final = os.getpid()
        self._is_closed = False
        try:
            self._steps.open()
        except BaseException:
            self.close()
            raise

    def save(
        self,
        state: object,
        step: int,
        *,
        synchronous: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Save ``state`` as it is now, and return at once.

        Tensors stay the caller's. Those that only an optimizer's step writes are copied after this
        returns; do not write them by hand before ``fence()`` or the next step. All others are
        copied before it returns. Everything that ``torch.save`` accepts is accepted.

        step: the training step of this state, from 0 on. A checkpoint of the same step is replaced.
        synchronous: return when the checkpoint is durable, or has failed.
        metrics: named numbers, stored with it, for ``Keep(best=)``.

        Blocks while earlier saves are unfinished, for at most ``fence_timeout`` seconds. Raises
        ``UsageError`` for what cannot be saved, with its key path. Later failures are on the
        handle, and reported at the next call (see ``on_error``).
        """
        self._check_usable()
        request = StepRequest(step=check_step(step), metrics=check_metrics(metrics), owner=self)
        for each in self._steps.companions:
            each.begin()
        self._last = handle = self._steps.save(state, request)
        if synchronous or is_blocking():
            handle.join()
        return handle

    def load(self, step: int | None = None, names: Patterns = None, **settings: Any) -> Any:
        """Load a step, or the newest checkpoint, and return its verified state.

        If the newest does not verify, the newest one that does is taken, with an error in the log.

        step: which one; None loads the newest.
        names: shell patterns of key paths (``"model.*"``): load only that part of the state.
        settings: those of ``torch.load``: ``map_location``, ``weights_only``, and with a directory
            others.

        Blocks until the saves in flight end. Raises ``NoCheckpointError`` if there is no such
        checkpoint, ``UsageError`` if nothing in it matches a pattern, ``CorruptionError`` if it
        does not verify, or none does, ``MediumError``, and what ``torch.load`` raises.
        """
        self._check_usable()
        pick = partial(self._steps.choose, step)
        return use_newest(pick, lambda it: it.load(names, verify=self.settings.verify, **settings))

    @calls.entry
    def restore_into(
        self,
        state: object,
        step: int | None = None,
        *,
        strict: bool = True,
        names: Patterns = None,
        rename: Rename = None,
        weights_only: bool | None = None,
    ) -> RestoreReport:
        """Copy a checkpoint into the tensors of ``state``, in place, and set its other leaves.

        Shapes must match the saved ones. Values of another dtype are converted, and rounded at
        most: no fraction, imaginary part or high byte is dropped. The tensors stay the caller's, on
        their device.

        step: which one; None restores the newest.
        strict: raise ``UsageError``, which lists them, if tensors are missing or unexpected.
        names: restore only key paths that match these shell patterns.
        rename: a dict or function from key paths of the checkpoint to those of ``state``.
        weights_only: as for ``torch.load``.

        Values other than tensors that ``state`` lacks are added only if the whole checkpoint is
        requested: ``strict``, no ``names``, no ``rename``. Everything is verified before anything
        is copied, so after an error ``state`` is untouched. Blocks and raises as ``load`` does.

        Tables of ``portus.embedding.protect`` are in a pool of their own, and are not restored:
        raises ``UsageError`` if one is in what is requested, or in its place in ``state``. Call
        ``load``, and ``load_state_dict``; or leave the tables out with ``names``.
        """
        before_write()  # a save of this process may be reading these tensors
        options = RestoreOptions(
            strict=strict,
            names=names,
            rename=rename,
            weights_only=weights_only,
            verify=self.settings.verify,
        )
        self._check_usable()
        choose = partial(self._steps.choose, step)
        report: RestoreReport = use_newest(choose, lambda it: it.restore_into(state, options))
        return report

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, oldest commit first."""
        return [info.step for info in self.versions()]

    def versions(self) -> list[VersionInfo]:
        """Return the committed checkpoints, oldest commit first."""
        self._check_usable()
        return self._steps.versions()

    @calls.entry
    def fence(self) -> None:
        """Block until no save in flight reads the caller's tensors, for at most ``fence_timeout``
        seconds: then those saves are given up. Raises nothing."""
        if self._process == os.getpid():
            self._saver.fence()

    @calls.entry
    def wait(self, timeout: float | None = None) -> None:
        """Block until every save so far has ended; failures are reported as ``on_error`` says.

        timeout: seconds; None waits for ever. Raises ``TimeoutError`` when it runs out.
        """
        self._check_process()
        self._saver.wait(timeout)

    @calls.entry
    def close(self) -> None:
        """Finish the saves in flight, and release everything. A second call does nothing.
        Failures that were not reported yet are reported as ``on_error`` says."""
        if self._is_closed or self._process != os.getpid():
            return
        try:
            self._saver.close()
        except Exception:
            self._end()
            raise
        self._end()  # not behind Ctrl-C: a second call closes the rest

    def _end(self) -> None:
        self._is_closed = True
        leave(self)
        for each in self._steps.companions:
            each.close()

    @property
    def path(self) -> str:
        """The directory, the pool file, or the address of the storage host."""
        return self._steps.path

    @property
    def last_stats(self) -> SaveStats | None:
        """The cost of the newest save so far; None before the first one."""
        return None if self._last is None else self._last.stats

    @property
    def has_committed(self) -> bool:
        """True once a save of this object was committed."""
        return self._saver.reports.has_committed

    def _check_usable(self) -> None:
        self._check_process()
        if self._is_closed:
            raise UsageError("this Checkpointer is closed")

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise UsageError(
                f"{printable(self.path)}: another process opened this Checkpointer; open one here"
            )

    def __del__(self) -> None:
        try:  # at the end of an interpreter there may be no contextlib, nor errors to catch
            # Once it ends, the worker is gone, and a wait for it would not end.
            getattr(self, "_is_closed", True) or sys.is_finalizing() or self.close()
        except (PortusError, AttributeError):
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except PortusError as late:
            if error is None:
                raise
            _log.error("portus: a save failed: %s", late)  # what ended the block matters more
