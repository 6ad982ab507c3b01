"""The places in Lightning that Portus changes, for Trainers whose plugin is a ``PortusIO``.

name of the class                          what changes
``_CheckpointConnector._select_ckpt_path`` repairs a directory before Lightning looks for
                                           the last one; tells the plugin its choice
``ModelCheckpoint._save_checkpoint``       saves in the background, if no code looks at its files
``ModelCheckpoint.file_exists``            counts files whose save is in flight
``ModelCheckpoint._link_checkpoint``       ``last`` refers to a file once that exists
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import os
from collections.abc import Callable
from typing import Any, Final

import portus
from portus_lightning import stock
from portus_lightning.io import PortusIO, RunFiles

_PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
"""Copies of Lightning, whose callbacks and loggers are known."""

_SHARDING: Final = frozenset(
    f"{copy}.strategies.{name}" for copy in _PACKAGES for name in ("fsdp", "model_parallel")
)
"""Modules whose strategies save in shards; strategies that a user derived and changed are not in
them."""

_SAVING: Final = ("on_", "_save", "_update", "_remove", "_link", "teardown")
"""The prefixes of methods that are called around a save."""


def install(copy: str) -> None:
    """Change this copy of Lightning. Leave a class alone that lacks one of the methods: it works in
    another way there."""
    connectors = importlib.import_module(f"{copy}.trainer.connectors.checkpoint_connector")
    callbacks = importlib.import_module(f"{copy}.callbacks.model_checkpoint")
    changes: list[tuple[Any, dict[str, Callable[..., Any]]]] = [
        (getattr(connectors, "_CheckpointConnector", None), {"_select_ckpt_path": _select}),
        (
            callbacks.ModelCheckpoint,
            {"_save_checkpoint": _save, "file_exists": _file_exists, "_link_checkpoint": _link},
        ),
    ]
    for owner, functions in changes:
        for name in functions if all(hasattr(owner, each) for each in functions) else ():
            *_, changed = portus.around(owner, name, functions[name])
            # `_link_checkpoint` is one; as a plain function it would be given the callback first.
            is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            setattr(owner, name, staticmethod(changed) if is_static else changed)


def plugin_of(trainer: Any) -> PortusIO | None:
    """Return the Trainer's ``PortusIO``, also inside of wrappers; None if it has another plugin."""
    io = trainer.strategy.checkpoint_io
    for _ in range(8):
        if isinstance(io, PortusIO):
            return io
        io = getattr(io, "checkpoint_io", None)
    return None


def run_of(trainer: Any) -> RunFiles | None:
    """Return the files of the Trainer's ``PortusIO``; None if it leaves saves to Lightning."""
    io = plugin_of(trainer)
    return io.run if io is not None and stock.is_on() else None


def knows_shards(strategy: Any) -> bool:
    """Return True for the strategies that write their own files and that ``shards`` knows."""
    return owner_of_save(strategy).__module__ in _SHARDING


def saves_shards(strategy: Any) -> bool:
    """Return True if the strategy, one of these, saves shards, and not one whole state."""
    if not knows_shards(strategy):
        return False
    if hasattr(strategy, "_save_distributed_checkpoint"):
        return bool(strategy._save_distributed_checkpoint)
    return getattr(strategy, "_state_dict_type", "full") == "sharded"


def owner_of_save(strategy: Any) -> type:
    """Return the class that defines the strategy's ``save_checkpoint``."""
    return next(each for each in type(strategy).__mro__ if "save_checkpoint" in vars(each))


def directories_of(trainer: Any) -> list[str]:
    """Return the directories on this machine that callbacks save to."""
    found = (getattr(each, "dirpath", None) for each in trainer.checkpoint_callbacks)
    return [*filter(None, (stock.local_path(each) for each in found if each))]


def uploads_each(logger: Any, trainer: Any) -> bool:
    """Return True for a logger that gets each checkpoint's path, and may read its file then."""
    kinds = (b for b in type(logger).__mro__ if "after_save_checkpoint" in vars(b))
    owner = next(kinds, None)
    if owner is None or owner.__name__ == "Logger":  # the base class does nothing with them
        return False
    if owner.__module__.partition(".loggers.")[0] not in _PACKAGES:
        return True  # an unknown logger: it may read them
    # Compared with values: Lightning's DummyLogger (lr_find uses it) has a method of every name.
    wish = getattr(logger, "_log_model", False)
    each = getattr(logger, "_log_model_checkpoints", False) is True or wish == "all"
    keeps = (getattr(callback, "save_top_k", None) for callback in trainer.checkpoint_callbacks)
    return each or (wish is True and -1 in keeps)


def _save(stock_save: Callable[..., None], callback: Any, trainer: Any, filepath: str) -> None:
    """Save in the background, if no code looks at the file before Portus can wait for it."""
    run = run_of(trainer)
    is_late = run is not None and may_be_late(trainer, callback)
    with run.saving(is_late=is_late) if run is not None else contextlib.nullcontext():
        stock_save(callback, trainer, filepath)


def may_be_late(trainer: Any, callback: Any) -> bool:
    """Return True if only stock code acts on the save: no subclass that does more, no logger that
    looks at the file, and no module that has a hook of its own right after it."""
    module = trainer.lightning_module
    # The module's hook comes right after those of callbacks, and may open the file (decision 0207).
    if getattr(module, "_current_fx_name", None) == "on_validation_end":
        owner = next(each for each in type(module).__mro__ if "on_validation_end" in vars(each))
        if not owner.__module__.startswith(_PACKAGES):
            return False
    # All that save, not this one alone: another may look at its files (decision 0207).
    is_stock = all(map(_is_stock, (callback, *trainer.checkpoint_callbacks)))
    return is_stock and not any(uploads_each(each, trainer) for each in trainer.loggers)


def _is_stock(callback: Any) -> bool:
    """Return True for Lightning's own callbacks that save, and for classes derived from them that
    only add arguments and names."""
    kinds = itertools.takewhile(
        lambda each: not each.__module__.startswith(_PACKAGES), type(callback).__mro__
    )
    own = (each for each in kinds if not each.__module__.startswith("portus_lightning."))
    return not any(name.startswith(_SAVING) for each in own for name in vars(each))


def _file_exists(exists: Callable[..., bool], callback: Any, filepath: Any, trainer: Any) -> bool:
    run, local = run_of(trainer), stock.local_path(filepath)
    if run is None or local is None:
        return exists(callback, filepath, trainer)
    # A file in flight counts, or the next save would take its name, where stock adds `-v1`. Rank 0
    # decides, which alone knows the saves in flight.
    return bool(trainer.strategy.broadcast(run.is_there(local)))


def _link(make: Callable[..., None], trainer: Any, filepath: str, linkpath: str) -> None:
    """Make the ``last`` link refer to a file, in one step, once that exists; Lightning removes the
    link before it makes a new one."""
    target, link = os.path.abspath(filepath), os.path.abspath(linkpath)
    is_made, run = target == link, run_of(trainer)
    if not is_made and trainer.is_global_zero and run is not None:
        with contextlib.suppress(OSError):  # it is a directory, or links cannot be made here
            # With stock's order a kill in between leaves no `last`. A run that looks for it then
            # restarts at step 0, with only a warning.
            run.link(link, target)
            is_made = True
    if is_made:
        trainer.strategy.barrier()
    else:
        make(trainer, filepath, linkpath)


def _select(
    select: Callable[..., Any],
    connector: Any,
    state_fn: Any,
    ckpt_path: Any,
    *more: Any,
    **named: Any,
) -> Any:
    """Choose the checkpoint to continue from. For the last one, or a missing path, first restore
    what a killed process removed too early, and fetch a lost run from its mirror. Tell the plugin
    which one Lightning found, unless the user named it."""
    trainer = connector.trainer
    run = run_of(trainer)
    if run is not None and (ckpt_path == "last" or _is_missing(ckpt_path)):
        # Lightning chooses from the files in the directory, so this must come first.
        for directory in directories_of(trainer) if trainer.is_global_zero else ():
            run.files.recover(directory)
        if run.settings.has_mirror:
            _fetch(trainer, run)
    found = select(connector, state_fn, ckpt_path, *more, **named)
    local = stock.local_path(found) if found is not None else None
    # A checkpoint that the user named is loaded or refused: another one would be a surprise.
    if run is not None and local is not None and ckpt_path in (None, "last", "hpc"):
        run.chosen = local
    return found


def _fetch(trainer: Any, run: RunFiles) -> None:
    """Fetch a lost run from its mirror; call it on every rank. No rank looks for a checkpoint
    before rank 0 has fetched, or it would restart."""
    if trainer.world_size > 1:
        trainer.strategy.setup_environment()  # Lightning calls it again, and then uses what exists
    try:
        directories = directories_of(trainer)
        if directories and trainer.is_global_zero:
            root = stock.local_path(trainer.default_root_dir)
            in_shards = saves_shards(trainer.strategy) and not run.why_no_shards()
            run.fetch(root, directories[0], in_shards=in_shards)
    finally:
        # Also if it failed: the other ranks are waiting.
        trainer.strategy.barrier()


def _is_missing(path: Any) -> bool:
    """Return True if nothing exists at the path."""
    is_path = isinstance(path, os.PathLike) or (
        isinstance(path, str) and os.path.basename(path) != path
    )
    local = stock.local_path(path) if is_path else None
    return local is not None and not os.path.exists(local)
