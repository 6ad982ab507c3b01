"""``PortusIO``: the checkpoint plugin."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import portus
from portus_lightning import stock
from portus_lightning.run_files import RunFiles

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from typing_extensions import Unpack
else:
    CheckpointIO = object  # stock.adopt makes it one, in whichever copy of Lightning is loaded

_log: Final = logging.getLogger("portus_lightning")

_GONE: Final = {
    "materialize": "checkpoints are real files; leave it out",
    "materialize_within": "checkpoints are real files; leave it out",
    "prepare": "files need no room ahead; leave it out",
    "keep": "ModelCheckpoint(save_top_k=...) says which checkpoints stay; leave it out",
    "copy_to": "name a mirror: PortusIO(mirror='file:///path')",
    "copy_every_minutes": "name a mirror: PortusIO(mirror='file:///path')",
}
"""Arguments of the time when checkpoints were references, and what replaced them."""


class PortusIO(CheckpointIO):
    """Saves checkpoints in the background, while training continues.

    Pass it as ``Trainer(plugins=[PortusIO()])``. The checkpoints of ``ModelCheckpoint`` appear at
    their paths when they are whole and durable; all other saves return when the file is there.
    Nothing else in the script changes.

    Args:
        pool: A device for persistent memory (``/dev/dax0.0``), a pool file on it, or the address of
            a storage host (``portus://host:7117``): checkpoints go there, and at their paths are
            pointers, small files that loads follow. For strategies that save in shards, a list of
            hosts is possible too. Default: ``$PORTUS_POOL``, or none.
        model: The name of this run in the pool and for ``portus report``. Default: derived from
            the checkpoint directory.
        preempt_within: Seconds, or a text like "90s", in which a job that receives SIGTERM or
            SIGUSR1 saves and exits; then it is ended. None leaves these signals to Lightning.
        fixed_batch: What stays the same when a run resumes in the middle of an epoch with another
            number of ranks: "local", the batch of each rank, or "global", the number of samples in
            a step of all ranks, whatever batch the script names.
        settings: How to save, and what to do about failures: see ``portus.Settings``.
    """

    def __init__(
        self,
        pool: str | os.PathLike[str] | Sequence[str] | None = None,
        *,
        model: str | None = None,
        preempt_within: float | str | None = 60.0,
        fixed_batch: Literal["local", "global"] = "local",
        **settings: Unpack[portus.SettingsDict],
    ) -> None:
        for name in settings:
            if name in _GONE:
                raise portus.UsageError(f"{name}: {_GONE[name]}")
        self.preempt_within: Final = preempt_within
        if preempt_within is not None:
            portus.Preemption(preempt_within)  # says what makes no sense, now
        if fixed_batch not in ("local", "global"):
            raise portus.UsageError(
                f"fixed_batch: expected 'local' or 'global', found {fixed_batch!r}"
            )
        self.fixed_batch: Literal["local", "global"] = fixed_batch
        place = None if pool is None else portus.Place.named(pool)
        self.run: Final = RunFiles(portus.Settings(**settings), place, model)
        """What the companion callback uses."""
        self.__setstate__({})

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        stock.adopt(type(self), load=True)
        portus.register_reference_loader()
        INSTANCES.append(True)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: object | None = None,
    ) -> None:
        """Save ``checkpoint`` to ``path``: in the background if a ``ModelCheckpoint`` of Lightning
        asks for it, else until the file is there.

        Lightning's own code saves what goes to a URL. In a signal handler that interrupted Portus,
        such as Lightning's for SLURM, this writes the file at once. Raises ``UsageError`` for what
        cannot be pickled, with its place in the checkpoint; ``MediumError`` and others if the save
        cannot be begun, or, where it is waited for, failed.
        """
        local = stock.local_path(path)
        if local is None or storage_options is not None or not stock.is_on():
            stock.torch_io().save_checkpoint(checkpoint, path, storage_options=storage_options)
        else:
            self.run.save(checkpoint, local)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return the checkpoint at ``path``, verified if Portus saved it. Waits for a save to it.

        If Lightning chose the path, and the file there is damaged, returns the newest one beside it
        that is not, and says so. The tensors are new, and on the CPU unless ``map_location`` names
        a device. Raises ``CorruptionError`` and what ``torch.load`` raises.
        """
        local = stock.local_path(path)
        # Lightning before 2.6 does not know the word.
        more = {} if weights_only is None else {"weights_only": weights_only}
        if local is not None and not os.path.isdir(local):
            place = map_location if map_location is not None else _on_cpu
            try:
                return self.run.load(local, map_location=place, **more)
            except FileNotFoundError:  # in Lightning's own words
                pass
        found: dict[str, Any] = stock.torch_io().load_checkpoint(path, map_location, **more)
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at ``path`` once the newest save requested before, or a later one,
        is committed. If none is, the checkpoint stays."""
        local = stock.local_path(path)
        if local is None or not self.run.remove(local):
            stock.torch_io().remove_checkpoint(path)

    def teardown(self) -> None:
        """Finish the saves in flight. Later saves return when they are durable.

        Raises the errors of failed saves, as ``on_error`` says, unless another error is being
        raised already.
        """
        ends_with_error = sys.exc_info()[0] is not None
        try:
            self.run.end()
        except portus.PortusError as error:
            if not ends_with_error:
                raise
            _log.error("Portus: a save failed: %s", error)

    def wait(self) -> None:
        """Block until all saves are committed or failed; raises as ``Checkpointer.wait`` does."""
        self.run.wait()


# For LightningCLI, which asks about the class before it makes one.
stock.adopt(PortusIO, load=False)

INSTANCES: Final[deque[bool]] = deque(maxlen=1)
"""Not empty once a ``PortusIO`` was made in this process."""


def _on_cpu(storage: Any, location: str) -> Any:
    """Return ``storage`` on the CPU, where Lightning loads by default."""
    return storage
