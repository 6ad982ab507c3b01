"""Sharded checkpoints of Lightning's strategies: ``ModelParallelStrategy`` and ``FSDPStrategy``.

These save with ``torch.distributed.checkpoint`` themselves, and never ask the plugin. So if the
plugin is a ``PortusIO``, the companion replaces ``save_checkpoint`` and ``load_checkpoint`` of the
Trainer's strategy, on the instance. States, their names and paths stay the same, whether Portus or
stock Lightning saves.

At a checkpoint's path is the directory that stock Lightning would write: torch's, and ``meta.pt``
with the values that are not sharded. On a storage host the shards are a group, and the directory
has a small reference for each rank. Stock Lightning's own code loads the directories it wrote.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any, Final

from torch.distributed.checkpoint import state_dict as of_torch

import portus
from portus.dcp import has_digests, load, load_newest
from portus_lightning import stock
from portus_lightning.io import RunFiles
from portus_lightning.patch import saves_shards

_log: Final = logging.getLogger("portus_lightning")

META: Final = "meta.pt"
"""The file in which Lightning keeps the values that are not sharded, and for which it looks."""


def attach(strategy: Any, run: RunFiles) -> None:
    """Let ``strategy`` load sharded checkpoints of Portus, and save them, if ``run`` can.

    A second call replaces the first one's methods: a Trainer may be used again.
    """
    is_fsdp2 = hasattr(strategy, "_save_distributed_checkpoint")
    own = _ShardMethods(strategy, "state_dict" if is_fsdp2 else "model", run)
    # Also if saves stay Lightning's: an earlier run may have saved with Portus.
    strategy.load_checkpoint = own.load_checkpoint
    if stock.is_on() and saves_shards(strategy) and not run.why_no_shards():
        strategy.save_checkpoint = own.save_checkpoint
        if is_fsdp2:  # the live shards, instead of copies of them on the CPU
            strategy.lightning_module_state_dict = own.model_state
            strategy.optimizer_state = own.optimizer_state


class _ShardMethods:
    """The methods that replace those of a strategy."""

    def __init__(self, strategy: Any, key: str, run: RunFiles) -> None:
        self._strategy: Final = strategy
        self._key: Final = key
        self._run: Final = run

    def _stock(self, name: str, *given: Any, **named: Any) -> Any:
        return getattr(type(self._strategy), name)(self._strategy, *given, **named)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint, in place of the strategy's own method, which saves what Portus
        cannot."""
        path = stock.local_path(self._strategy.broadcast(filepath))
        if path is None or storage_options is not None or not stock.is_on():
            self._stock("save_checkpoint", checkpoint, filepath, storage_options)
            return
        states = checkpoint.get("optimizer_states", [])
        shards = {self._key: checkpoint["state_dict"]}
        shards.update({f"optimizer_{index}": state for index, state in enumerate(states)})
        sharded = ("state_dict", "optimizer_states")
        rest = {key: value for key, value in checkpoint.items() if key not in sharded}
        if self._strategy.global_rank == 0:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(path)  # as Lightning does: a directory replaces the file
        try:
            self._run.save_shards(shards, path, rest, is_first=self._strategy.global_rank == 0)
        except portus.UsageError as error:
            # On all ranks, so their collectives meet in stock's save.
            stock.LIGHTNING.say_it_saves(error)
            self._stock("save_checkpoint", checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, *more: Any, **named: Any) -> Any:
        """Load a checkpoint, in place of the strategy's own method."""
        path = stock.local_path(self._strategy.broadcast(checkpoint_path))
        is_chosen = path is not None and self._strategy.broadcast(self._run.is_chosen(path))
        if path is not None and (is_chosen or has_digests(path)):
            return self._load_directory(path, is_chosen=is_chosen)
        return self._stock("load_checkpoint", checkpoint_path, *more, **named)

    def _load_directory(self, path: str, *, is_chosen: bool) -> Any:
        """Load from torch's own directory, and return the values that are not sharded. If Lightning
        chose a damaged or incomplete directory, load the newest complete one beside it."""
        found = path
        try:
            with self._fill() as state:
                load(state, path)
        except (portus.CorruptionError, portus.NoCheckpointError) as error:
            if not is_chosen:
                raise
            with self._fill() as state:
                newest = load_newest(state, os.path.dirname(path))
            if newest is None:
                raise
            found = newest
            if self._strategy.global_rank == 0:
                _log.error("Portus: %s; FALLING BACK to %s", error, found)
        return portus.load(os.path.join(found, META), map_location="cpu", weights_only=False)

    @contextlib.contextmanager
    def _fill(self) -> Iterator[dict[str, Any]]:
        """Yield a state to fill; then give it to the model and its optimizers."""
        model, module = self._strategy.model, self._strategy.lightning_module
        is_fitting = module.trainer.state.fn == "fit"
        optimizers = list(self._strategy.optimizers) if is_fitting else []
        state: dict[str, Any] = {self._key: self.model_state()}
        for index, optimizer in enumerate(optimizers):
            name = f"optimizer_{index}"
            state[name] = of_torch.get_optimizer_state_dict(model, optimizer)
        yield state
        options = of_torch.StateDictOptions(strict=module.strict_loading)
        of_torch.set_model_state_dict(model, state[self._key], options=options)
        for index, optimizer in enumerate(optimizers):
            of_torch.set_optimizer_state_dict(
                model, optimizer, optim_state_dict=state[f"optimizer_{index}"]
            )

    def model_state(self) -> Any:
        """Return the model's state, with its live shards."""
        return of_torch.get_model_state_dict(self._strategy.model)

    def optimizer_state(self, optimizer: Any) -> Any:
        """Return an optimizer's state, with its live shards, in place of the strategy's own
        method."""
        inner = getattr(optimizer, "_optimizer", optimizer)  # Lightning wraps it
        return dict(of_torch.get_optimizer_state_dict(self._strategy.model, inner))
