"""DeepSpeed: ``engine.save_checkpoint`` saves the same files as stock, in the background.

For an engine that Portus does not save for, these methods stay stock's.

name of ``DeepSpeedEngine``      what changes
``save_checkpoint``              ``EngineFiles`` saves its files; ``latest`` comes last
``load_checkpoint``              waits for saves in flight; verifies files
``_take_model_step``             waits until no save reads the tensors that it writes
``destroy``                      finishes saves first

Stock hands each file to ``engine.checkpoint_engine``, of which there is none for outsiders: others
stand in for its methods for as long as a call runs.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import portus
from portus_accelerate.engine_files import EngineFiles, why_not
from portus_accelerate.install_status import is_known, spell
from portus_accelerate.settings import from_environment, from_mapping

_log: Final = logging.getLogger("portus_accelerate")

OLDEST: Final = (0, 16)
NEWEST: Final = (0, 19)
"""The first and last versions of DeepSpeed that this was made for."""

_FRAMEWORKS: Final = frozenset({"accelerate", "lightning", "pytorch_lightning", "transformers"})
"""Callers that remove older checkpoints as soon as a newer one was saved."""

_FILES: Final = "_portus_files"
_PATCHED: Final = "_portus_is_here"


def install() -> None:
    """Have Portus save for every engine that is made from now on. Leave a version outside the range
    alone, and report it."""
    _patch(is_for_all=True)


def enable(engine: Any, **settings: object) -> None:
    """Have Portus save for one engine. settings: see ``Settings``. Raises ``UsageError`` for an
    engine that Portus cannot save, with the reason."""
    chosen = from_mapping(settings, "enable()") if settings else from_environment()
    reason = why_not(engine, chosen)
    if reason is not None:
        raise portus.UsageError(f"Portus does not save for this engine: {reason}")
    if not _patch(is_for_all=False):
        raise portus.UsageError(_range_of(_version()))
    setattr(engine, _FILES, EngineFiles(engine, chosen))


def files_of(engine: Any) -> EngineFiles | None:
    """Return the files of an engine; None if stock saves it, or nothing was saved."""
    found: EngineFiles | None = getattr(engine, "__dict__", {}).get(_FILES)
    return found


def _patch(*, is_for_all: bool) -> bool:
    """Patch DeepSpeed. Return False for a version that is left alone."""
    version = _version()
    if not is_known(version, OLDEST, NEWEST):
        _log.warning("%s; it saves as it always did", _range_of(version))
        return False
    engine = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    setattr(engine, _PATCHED, is_for_all or getattr(engine, _PATCHED, False))
    if getattr(engine.save_checkpoint, _PATCHED, False):
        return True
    for name, function in (
        ("save_checkpoint", _save),
        ("load_checkpoint", _load),
        # The fence: torch's own hooks of an optimizer fire once for each group here, and show one.
        ("_take_model_step", _step),
        ("destroy", _destroy),
    ):
        change = portus.around(engine, name, function)
        setattr(change[2], _PATCHED, True)
        setattr(*change)
    return True


def _version() -> str:
    """Return the version of the loaded DeepSpeed, whose ``__init__`` may not have ended yet."""
    return str(getattr(sys.modules.get("deepspeed.git_version_info"), "version", "?"))


def _range_of(version: str) -> str:
    return f"Portus was made for DeepSpeed {spell(OLDEST, NEWEST)}, and this is {version}"


def _files_of(engine: Any) -> EngineFiles | None:
    """Return the files of an engine; None if stock saves it, and the reason was reported."""
    if _FILES not in engine.__dict__:
        files = None
        if getattr(engine, _PATCHED) and not portus.is_disabled():
            settings = from_environment()
            reason = why_not(engine, settings)
            if reason is None:
                files = EngineFiles(engine, settings, may_give_up=True)
            else:
                _say_stock_saves(engine, reason)
        setattr(engine, _FILES, files)
    return files_of(engine)


def _say_stock_saves(engine: Any, reason: str) -> None:
    if engine.global_rank == 0:
        _log.warning("portus: DeepSpeed saves this engine as it always did: %s", reason)


def _save(
    stock: Callable[..., Any],
    self: Any,
    save_dir: str,
    tag: object = None,
    *given: Any,
    **named: Any,
) -> Any:
    files = _files_of(self) if save_dir else None
    if files is None:
        return stock(self, save_dir, tag, *given, **named)
    caller = str(sys._getframe(2).f_globals.get("__name__"))  # behind the frames of ``around``
    try:
        return files.save(
            functools.partial(stock, self),
            os.fspath(save_dir),
            tag,
            *given,
            is_of_framework=caller.split(".")[0] in _FRAMEWORKS,
            **named,
        )
    except portus.UsageError as error:  # the same on all ranks
        if not files.may_give_up:
            raise
        _say_stock_saves(self, str(error))
        setattr(self, _FILES, None)
        files.files.close()
        return stock(self, save_dir, tag, *given, **named)


def _load(
    stock: Callable[..., Any],
    self: Any,
    load_dir: str,
    tag: str | None = None,
    *given: Any,
    **named: Any,
) -> Any:
    files = _files_of(self)
    # DeepSpeed's own tool wrote those files: they have no digests.
    if files is None or self.load_universal_checkpoint():
        return stock(self, load_dir, tag, *given, **named)
    return files.load(functools.partial(stock, self), os.fspath(load_dir), tag, *given, **named)


def _step(stock: Callable[..., Any], self: Any, *given: Any, **named: Any) -> Any:
    files = files_of(self)
    if files is not None:
        files.files.fence()
    return stock(self, *given, **named)


def _destroy(stock: Callable[..., Any], self: Any, *given: Any, **named: Any) -> Any:
    files = files_of(self)
    if files is not None:
        files.files.close()
    return stock(self, *given, **named)
