"""``CheckpointFiles``: checkpoint directories as stock writes them, in the background.

Each process publishes its own files: the main one all but the random states of the others. What is
in a directory appears in one step, and its random states with it; so a directory without those of
the main process was never complete.

With a pool the files of the main process are pointers to it: files of torch, which ``torch.load``
follows. Weights in safetensors become files of torch for that; or they stay files, and are there
before the pointers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import portus
from portus_accelerate import place, sharded
from portus_accelerate.capture import Capture, capturing, torch_name
from portus_accelerate.engine_files import led
from portus_accelerate.newest import NUMBERED, RANDOM, TELLING, why_incomplete
from portus_accelerate.origin import note
from portus_accelerate.settings import Settings

if TYPE_CHECKING:
    from portus.dcp import PortusStorageWriter


class CheckpointFiles:
    """The checkpoint files of one ``Accelerator``. Its methods are called on every process."""

    def __init__(
        self, settings: Settings, run_of: Callable[[str], portus.Run], *, is_writer: bool
    ) -> None:
        """is_writer: false in a process that saves its random states alone."""
        self._settings: Final = settings if is_writer else _alone(settings)
        self._of_all: Final = settings
        self._plain: portus.TrainingFiles | None = None
        self._run_of: Final = run_of
        self._is_writer: Final = is_writer
        self._made: portus.TrainingFiles | None = None
        self._shards: PortusStorageWriter | None = None
        self._has_begun = False

    def prepare(self, roots: list[str]) -> None:
        """Put in order what a killed process left below ``roots``, and learn which optimizer steps
        what, so that the first save too is copied in the background. Raises nothing: what makes no
        sense is said by the first save."""
        with contextlib.suppress(portus.PortusError):
            for root in roots:
                self._files.recover(root)
                if self._is_writer:
                    self._remove_cut_off(os.path.join(root, "checkpoints"))
            self._files.open()

    def _remove_cut_off(self, above: str) -> None:
        """Remove directories of automatic naming whose save was cut off, and that nobody else wrote
        into: scripts go on from the highest number, or begin anew where there is none."""
        for directory in place.numbered(above) if os.path.isdir(above) else ():
            if not NUMBERED.fullmatch(os.path.basename(directory)):
                continue
            if not why_incomplete(directory) or _others_in(directory):
                continue
            self._files.wait_for(directory)  # another process may be at it
            if why_incomplete(directory) and not _others_in(directory):
                with contextlib.suppress(OSError):
                    shutil.rmtree(directory)

    def fetch(self, directory: str) -> None:
        """Fetch what the mirror has of the run that saves ``directory``, if this machine has
        nothing of it. On the process that leads. Raises as ``portus.TrainingFiles.fetch``."""
        if self._is_writer:
            run = self._run_of(directory)
            self._files.fetch(run.name, run.links, os.path.dirname(directory))

    @contextlib.contextmanager
    def saving(
        self,
        directory: str,
        step: int,
        add: Callable[[Capture], object],
        surplus: Callable[[], list[str]],
        *,
        now: bool,
        is_sharded: bool = False,
        is_pooled: Callable[[str], bool] | None = None,
    ) -> Iterator[list[portus.SaveHandle]]:
        """Begin to save what this thread would write into ``directory`` inside of a ``with``; the
        handles, once that ended. add: puts what is ours into the capture. surplus: the directories
        that are to be removed then. now: the ``with`` ends when it is there. is_sharded: torch
        saves shards below it. is_pooled: with a pool, which files go there as they are; None: all,
        as files of torch."""
        self._begin(directory)
        handles: list[portus.SaveHandle] = []

        def save(*, now: bool) -> None:
            add(capture)
            parts, removed = dict(capture.parts), list(capture.removed)
            capture.parts.clear()
            capture.removed.clear()
            said = note(self._run_of(directory).name, step)
            if self._pool is not None and self._is_writer:
                parts, files = _for_pool(parts, is_pooled)
                if files:
                    shards.append(self._plain_files.save_directory(directory, files, step, said))
            if parts:
                all_committed = partial(_all_committed, directory, shards)
                handles.append(
                    self._files.save_directory(directory, parts, step, said, all_committed)
                )
            for old in (*_twins(directory, parts), *removed, *surplus()):
                self._files.remove(old)
            if now and handles:
                handles[-1].wait()

        now = now or self._settings.blocking or _is_temporary(directory)
        if is_sharded:
            parts_of_ranks = sharded.saving(self._opened_shards(directory), step, now=now)
        else:
            parts_of_ranks = led(os.path.dirname(self._run_of(directory).links), now=now)
        with capturing(directory) as capture, parts_of_ranks as shards:
            capture.flush = lambda: save(now=True)
            yield handles
        save(now=now)

    def wait_for(self, directory: str) -> None:
        """Block until the saves to ``directory`` of any process are over."""
        self._files.wait_for(directory)

    def wait(self) -> None:
        """Block until all saves are over; raises as ``on_error`` says."""
        for each in (self._shards, self._made):
            if each is not None:
                each.wait()

    def close(self) -> None:
        """Finish the saves in flight. Later ones open it again."""
        self._has_begun = False
        with contextlib.ExitStack() as closing:
            for each in (self._made, self._plain, self._shards):
                if each is not None:
                    closing.callback(each.close)
            self._plain = self._shards = None

    @cached_property
    def _pool(self) -> portus.Place | None:
        """The pool that the user had named at the first use. Raises ``UsageError``."""
        return self._of_all.pool_at

    @property
    def _files(self) -> portus.TrainingFiles:
        """Raises ``UsageError`` for settings that only pools have."""
        if self._made is None:
            self._made = portus.TrainingFiles(
                self._settings,
                of_directories=True,
                telling=TELLING,
                pool=self._pool if self._is_writer else None,
                is_named=self._settings.model is not None,
            )
        return self._made

    @property
    def _plain_files(self) -> portus.TrainingFiles:
        """Return what saves files that stay files, though there is a pool."""
        if self._plain is None:
            self._plain = portus.TrainingFiles(
                _alone(self._settings), of_directories=True, telling=TELLING
            )
        return self._plain

    def _opened_shards(self, directory: str) -> PortusStorageWriter:
        if self._shards is None:
            from portus.dcp import PortusStorageWriter

            run, names = self._run_of(directory), [each.name for each in fields(portus.Settings)]
            own: Any = {name: getattr(self._settings, name) for name in names}
            own |= {"journal": False, "mirror": "none"}  # the files of the checkpoint have these
            self._shards = PortusStorageWriter(
                model=run.name, links=run.links, pool=self._pool, **own
            )
        return self._shards

    def _begin(self, directory: str) -> None:
        if not self._has_begun:
            run = self._run_of(directory)
            self._files.begin(run.name, run.links, os.path.dirname(directory))
            self._has_begun = True


def _alone(settings: Settings) -> Settings:
    """Return the settings of files whose checkpoint has others that see to all, and the pool."""
    return replace(settings, pool=None, max_bytes=None, durable=1, journal=False, mirror="none")


def _others_in(directory: str) -> list[str]:
    """The names in ``directory`` but for random states, and shards that Portus saved."""
    head, tail = RANDOM.split("{}")
    return [
        name
        for name in os.listdir(directory)
        if not (name.startswith(head) and name.endswith(tail))
        and not _has_shards(os.path.join(directory, name))
    ]


def _has_shards(directory: str) -> bool:
    """True for a directory of shards, whose save may have been cut off, also at its begin."""
    from portus.dcp import has_digests

    return os.path.isdir(directory) and (has_digests(directory) or not os.listdir(directory))


def _for_pool(
    parts: Mapping[str, Any], is_pooled: Callable[[str], bool] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The files of a checkpoint that go to the pool, all of them of torch, and those that stay
    files."""
    if is_pooled is not None:
        pooled = {name: part for name, part in parts.items() if is_pooled(name)}
        return pooled, {name: part for name, part in parts.items() if name not in pooled}
    return {
        torch_name(name): part.tensors if isinstance(part, portus.Safetensors) else part
        for name, part in parts.items()
    }, {}


def _all_committed(directory: str, shards: Sequence[portus.SaveHandle]) -> None:
    """Raises ``AbandonedError`` if other files of this checkpoint could not be saved: on the
    worker, after these saves."""
    if not all(each.committed for each in shards):
        raise portus.AbandonedError(
            f"{directory}: save given up: other files of it could not be saved"
        )


def _twins(directory: str, names: Iterable[str]) -> list[str]:
    """Older weights in ``directory`` as safetensors, which a load would prefer."""
    twins = [
        name.replace("pytorch_model", "model").replace(".bin", ".safetensors")
        for name in names
        if name.startswith("pytorch_model") and name.endswith(".bin")
    ]
    paths = [os.path.join(directory, name) for name in twins]
    return [path for path in paths if os.path.exists(path)]


def _is_temporary(directory: str) -> bool:
    """True for a directory made by ``tempfile``: whoever made it will upload or move it soon."""
    top = os.path.realpath(tempfile.gettempdir())
    below = os.path.relpath(os.path.realpath(directory), top).split(os.sep)
    return below[0].startswith(tempfile.gettempprefix())
