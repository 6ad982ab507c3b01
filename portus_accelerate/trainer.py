"""``transformers.Trainer``: it does not use ``save_state``, and writes its checkpoints by itself.

With the flag on, optimizer, scheduler, scaler and generators go through the pool, in the
background; they are most of a checkpoint. The weights stay real safetensors at every save:
``load_best_model_at_end``, hub pushes and whoever calls ``from_pretrained`` read them at once.
Everything is loaded by Trainer's own code, which follows the references.

A checkpoint that was cut off holds weights of one step and nothing that was committed. It is put
out of the way when training starts, before Trainer looks for the newest one. Old checkpoints are
rotated away once the newer one is committed: at the next save, or at the end.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from portus_accelerate import capture
from portus_accelerate.saver import Saver

_log: Final = logging.getLogger("portus_accelerate")

OLDEST: Final = 5
_FILES: Final = ("optimizer.pt", "scheduler.pt", "scaler.pt")


def install() -> None:
    """Change the loaded ``transformers.trainer``, if it is one that this was made for."""
    module: Any = sys.modules["transformers.trainer"]
    version = getattr(sys.modules["transformers"], "__version__", "?")
    names = ("_save_checkpoint", "train")
    known = hasattr(module, "rotate_checkpoints") and all(hasattr(module.Trainer, n) for n in names)
    if not version.split(".")[0].isdigit() or int(version.split(".")[0]) < OLDEST or not known:
        _log.warning(
            "Portus: transformers %s is not one that this Portus knows: its Trainer saves "
            "checkpoints by itself",
            version,
        )
        return
    if isinstance(module.torch, capture.Torch):
        return
    changes = [
        (module, "torch", capture.Torch(module.torch)),
        (module, "rotate_checkpoints", _rotate(module.rotate_checkpoints)),
        (module.Trainer, "_save_checkpoint", _save_checkpoint(module.Trainer._save_checkpoint)),
        (module.Trainer, "train", _train(module.Trainer.train)),
    ]
    for owner, name, value in changes:
        setattr(owner, name, value)


def is_stored(name: str) -> bool:
    """True for a file of a checkpoint that goes through the pool."""
    return name in _FILES or name.startswith("rng_state")


def _save_checkpoint(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def save(self: Any, model: Any, trial: Any) -> None:
        saver = _saver_of(self)
        if saver is None or self.args.save_only_model:
            stock(self, model, trial)
            return
        saver.run_deferred()
        folder = f"checkpoint-{self.state.global_step}"
        directory = os.path.join(self._get_output_dir(trial=trial), folder)
        saver.save_files(lambda: stock(self, model, trial), directory, is_stored)

    return save


def _rotate(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def rotate(*positional: Any, **named: Any) -> None:
        current = capture.current()
        if current is None:
            stock(*positional, **named)
        else:
            current.deferred.append(lambda: stock(*positional, **named))

    return rotate


def _train(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def train(self: Any, *positional: Any, **named: Any) -> Any:
        saver = _saver_of(self)
        if saver is None:
            return stock(self, *positional, **named)
        saver.begin(os.path.join(self.args.output_dir, "checkpoint-0"))
        result = stock(self, *positional, **named)
        saver.finish()
        return result

    return train


def _saver_of(trainer: Any) -> Saver | None:
    found = getattr(trainer.accelerator, "_portus_saver", None)
    return found if isinstance(found, Saver) and found.is_on() else None
