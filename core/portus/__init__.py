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
    from portus.client.checkpointer import Checkpointer as Checkpointer
    from portus.client.job.cadence import Cadence as Cadence
    from portus.client.job.cadence import checked_cadence as checked_cadence
    from portus.client.job.preemption import Preemption as Preemption
    from portus.client.job.preemption import times_preempted as times_preempted
    from portus.client.job.settings import Settings as Settings
    from portus.client.job.settings import SettingsDict as SettingsDict
    from portus.client.job.stock import Framework as Framework
    from portus.client.job.stock import is_disabled as is_disabled
    from portus.client.loaders.cursor import DataCursor as DataCursor
    from portus.client.loaders.randomness import RANDOMNESS_BYTES as RANDOMNESS_BYTES
    from portus.client.loaders.randomness import capture_randomness as capture_randomness
    from portus.client.loaders.randomness import restore_randomness as restore_randomness
    from portus.client.loaders.seeded import SeededDataset as SeededDataset
    from portus.client.loading.checkpoint_file import read_note as read_note
    from portus.client.paths.face import load as load
    from portus.client.paths.face import save as save
    from portus.client.pools.checkpointer import PoolCheckpointer as PoolCheckpointer
    from portus.client.pools.resolve import allow as allow
    from portus.client.pools.resolve import is_reference as is_reference
    from portus.client.pools.resolve import read_reference as read_reference
    from portus.client.pools.view import PoolView as PoolView
    from portus.client.run import Run as Run
    from portus.client.training.links import replace_link as replace_link
    from portus.client.training.pack import pack as pack
    from portus.client.training.pack import unpack as unpack
    from portus.client.training.safetensors import Safetensors as Safetensors
    from portus.client.training.safetensors import save_safetensors as save_safetensors
    from portus.client.training.training_files import TrainingFiles as TrainingFiles
    from portus.errors import AbandonedError as AbandonedError
    from portus.errors import BusyError as BusyError
    from portus.errors import CorruptionError as CorruptionError
    from portus.errors import MediumError as MediumError
    from portus.errors import NoCheckpointError as NoCheckpointError
    from portus.errors import PortusError as PortusError
    from portus.errors import StaleError as StaleError
    from portus.errors import TransportError as TransportError
    from portus.errors import UsageError as UsageError
    from portus.index.check import check as check
    from portus.index.findings import Finding as Finding
    from portus.index.place import Place as Place
    from portus.index.place import local_path as local_path
    from portus.media.calls import is_nested as is_nested
    from portus.pipeline.handle import SaveHandle as SaveHandle
    from portus.pipeline.handle import SaveStats as SaveStats
    from portus.settings.keep import Keep as Keep
    from portus.shelf.shelf import Shelf as Shelf
    from portus.spec import VersionInfo as VersionInfo

    open = PoolView  # noqa: A001

__version__ = "0.2.0"

# The public names and where each lives; after a colon, what it is called there if not the same.
# The TYPE_CHECKING block above says it to type checkers; tests/unit/test_face.py compares the two.
_MODULE_OF: Final = {
    "AbandonedError": "portus.errors",
    "BusyError": "portus.errors",
    "Cadence": "portus.client.job.cadence",
    "Checkpointer": "portus.client.checkpointer",
    "CorruptionError": "portus.errors",
    "DataCursor": "portus.client.loaders.cursor",
    "Finding": "portus.index.findings",
    "Framework": "portus.client.job.stock",
    "Keep": "portus.settings.keep",
    "MediumError": "portus.errors",
    "NoCheckpointError": "portus.errors",
    "Place": "portus.index.place",
    "PoolCheckpointer": "portus.client.pools.checkpointer",
    "PoolView": "portus.client.pools.view",
    "PortusError": "portus.errors",
    "RANDOMNESS_BYTES": "portus.client.loaders.randomness",
    "Preemption": "portus.client.job.preemption",
    "Run": "portus.client.run",
    "SaveHandle": "portus.pipeline.handle",
    "SaveStats": "portus.pipeline.handle",
    "SeededDataset": "portus.client.loaders.seeded",
    "Settings": "portus.client.job.settings",
    "SettingsDict": "portus.client.job.settings",
    "Shelf": "portus.shelf.shelf",
    "StaleError": "portus.errors",
    "Safetensors": "portus.client.training.safetensors",
    "TrainingFiles": "portus.client.training.training_files",
    "TransportError": "portus.errors",
    "UsageError": "portus.errors",
    "VersionInfo": "portus.spec",
    "allow": "portus.client.pools.resolve",
    "capture_randomness": "portus.client.loaders.randomness",
    "check": "portus.index.check",
    "checked_cadence": "portus.client.job.cadence",
    "is_disabled": "portus.client.job.stock",
    "is_nested": "portus.media.calls",
    "is_reference": "portus.client.pools.resolve",
    "load": "portus.client.paths.face",
    "local_path": "portus.index.place",
    "open": "portus.client.pools.view:PoolView",
    "pack": "portus.client.training.pack",
    "read_reference": "portus.client.pools.resolve",
    "register_reference_loader": "portus._autoload",
    "replace_link": "portus.client.training.links",
    "restore_randomness": "portus.client.loaders.randomness",
    "read_note": "portus.client.loading.checkpoint_file",
    "save": "portus.client.paths.face",
    "save_safetensors": "portus.client.training.safetensors",
    "this_is_a_pointer_run_portus_export": "portus._autoload",
    "times_preempted": "portus.client.job.preemption",
    "unpack": "portus.client.training.pack",
}


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
