"""Portus: asynchronous, zero-copy, crash-consistent, verified checkpoints.

This module is the whole public face. Each name is imported from its module on first use, so
that a storage host, and every ``import portus``, does without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from portus._autoload import register_reference_loader as register_reference_loader
    from portus._autoload import (
        this_is_a_pointer_run_portus_export as this_is_a_pointer_run_portus_export,
    )
    from portus.companions.job.cadence import Cadence as Cadence
    from portus.companions.job.cadence import parse_cadence as parse_cadence
    from portus.companions.job.preemption import Preemption as Preemption
    from portus.companions.job.preemption import times_preempted as times_preempted
    from portus.companions.job.stock import Framework as Framework
    from portus.companions.job.stock import around as around
    from portus.companions.job.stock import is_disabled as is_disabled
    from portus.companions.loaders.cursor import DataCursor as DataCursor
    from portus.companions.loaders.randomness import capture_randomness as capture_randomness
    from portus.companions.loaders.randomness import restore_randomness as restore_randomness
    from portus.companions.loaders.seeds import SeededDataset as SeededDataset
    from portus.companions.run import Run as Run
    from portus.companions.shelf.shelf import Shelf as Shelf
    from portus.engine.job.settings import Settings as Settings
    from portus.engine.job.settings import SettingsDict as SettingsDict
    from portus.engine.loading.checkpoint_file import read_note as read_note
    from portus.engine.media.calls import is_nested as is_nested
    from portus.engine.paths.checkpointer import Checkpointer as Checkpointer
    from portus.engine.paths.process import load as load
    from portus.engine.paths.process import save as save
    from portus.engine.pipeline.handle import SaveHandle as SaveHandle
    from portus.engine.pipeline.handle import SaveStats as SaveStats
    from portus.engine.settings.keep import Keep as Keep
    from portus.engine.spec import VersionInfo as VersionInfo
    from portus.errors import AbandonedError as AbandonedError
    from portus.errors import BusyError as BusyError
    from portus.errors import CorruptionError as CorruptionError
    from portus.errors import MediumError as MediumError
    from portus.errors import NoCheckpointError as NoCheckpointError
    from portus.errors import PortusError as PortusError
    from portus.errors import StaleError as StaleError
    from portus.errors import TransportError as TransportError
    from portus.errors import UsageError as UsageError
    from portus.reach.files.reference import is_reference as is_reference
    from portus.reach.files.reference import read_reference as read_reference
    from portus.reach.index.check import check as check
    from portus.reach.index.findings import Finding as Finding
    from portus.reach.index.place import Place as Place
    from portus.reach.index.place import local_path as local_path
    from portus.reach.pools.checkpointer import PoolCheckpointer as PoolCheckpointer
    from portus.reach.pools.resolve import allow as allow
    from portus.reach.pools.view import PoolView as PoolView
    from portus.reach.training.safetensors import Safetensors as Safetensors
    from portus.reach.training.safetensors import save_safetensors as save_safetensors
    from portus.reach.training.training_files import TrainingFiles as TrainingFiles

    open = PoolView  # noqa: A001

__version__ = "0.2.0"

# The public names of each module; after a colon, the name there if that differs. The TYPE_CHECKING
# block above is for type checkers; tests/unit/test_face.py compares the two.
_NAMES_OF: Final = {
    "portus._autoload": "register_reference_loader this_is_a_pointer_run_portus_export",
    "portus.companions.job.cadence": "Cadence parse_cadence",
    "portus.companions.job.preemption": "Preemption times_preempted",
    "portus.companions.job.stock": "Framework around is_disabled",
    "portus.companions.loaders.cursor": "DataCursor",
    "portus.companions.loaders.randomness": "capture_randomness restore_randomness",
    "portus.companions.loaders.seeds": "SeededDataset",
    "portus.companions.run": "Run",
    "portus.companions.shelf.shelf": "Shelf",
    "portus.engine.job.settings": "Settings SettingsDict",
    "portus.engine.loading.checkpoint_file": "read_note",
    "portus.engine.media.calls": "is_nested",
    "portus.engine.paths.checkpointer": "Checkpointer",
    "portus.engine.paths.process": "load save",
    "portus.engine.pipeline.handle": "SaveHandle SaveStats",
    "portus.engine.settings.keep": "Keep",
    "portus.engine.spec": "VersionInfo",
    "portus.errors": (
        "AbandonedError BusyError CorruptionError MediumError NoCheckpointError PortusError "
        "StaleError TransportError UsageError"
    ),
    "portus.reach.files.reference": "is_reference read_reference",
    "portus.reach.index.check": "check",
    "portus.reach.index.findings": "Finding",
    "portus.reach.index.place": "Place local_path",
    "portus.reach.pools.checkpointer": "PoolCheckpointer",
    "portus.reach.pools.resolve": "allow",
    "portus.reach.pools.view": "PoolView",
    "portus.reach.pools.view:PoolView": "open",
    "portus.reach.training.safetensors": "Safetensors save_safetensors",
    "portus.reach.training.training_files": "TrainingFiles",
}

_MODULE_OF: Final = {name: module for module, names in _NAMES_OF.items() for name in names.split()}


def __getattr__(name: str) -> object:
    place = _MODULE_OF.get(name)
    if place is None:
        raise AttributeError(f"module 'portus' has no attribute {name!r}")
    module, _, name_there = place.partition(":")
    value: object = getattr(importlib.import_module(module), name_there or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
