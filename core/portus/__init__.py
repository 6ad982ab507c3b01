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
        this_is_a_reference_run_portus_materialize as this_is_a_reference_run_portus_materialize,
    )
    from portus.client.cadence import Cadence as Cadence
    from portus.client.checkpointer import Checkpointer as Checkpointer
    from portus.client.in_turn import Remaining as Remaining
    from portus.client.in_turn import checked_within as checked_within
    from portus.client.in_turn import materialize_at_end as materialize_at_end
    from portus.client.in_turn import materialize_in_turn as materialize_in_turn
    from portus.client.in_turn import remaining_references as remaining_references
    from portus.client.in_turn import saved_in as saved_in
    from portus.client.in_turn import say_remaining as say_remaining
    from portus.client.materialize import materialize as materialize
    from portus.client.mend import lead_back as lead_back
    from portus.client.mend import mend as mend
    from portus.client.nested import note_written as note_written
    from portus.client.nested import write_file as write_file
    from portus.client.pack import pack as pack
    from portus.client.pack import unpack as unpack
    from portus.client.resolve import allow as allow
    from portus.client.resolve import is_reference as is_reference
    from portus.client.resolve import load_reference as load_reference
    from portus.client.resolve import read_reference as read_reference
    from portus.client.run import Run as Run
    from portus.client.run import expected_bytes as expected_bytes
    from portus.client.settings import Settings as Settings
    from portus.client.settings import SettingsDict as SettingsDict
    from portus.client.stock import Framework as Framework
    from portus.client.stock import is_disabled as is_disabled
    from portus.client.view import PoolView as PoolView
    from portus.errors import AbandonedError as AbandonedError
    from portus.errors import BusyError as BusyError
    from portus.errors import CorruptionError as CorruptionError
    from portus.errors import MediumError as MediumError
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
    from portus.spec import VersionInfo as VersionInfo

    open = PoolView  # noqa: A001

__version__ = "0.1.0"

# The public names and where each lives; after a colon, what it is called there if not the same.
# The TYPE_CHECKING block above says it to type checkers; tests/unit/test_face.py compares the two.
_MODULE_OF: Final = {
    "AbandonedError": "portus.errors",
    "BusyError": "portus.errors",
    "Cadence": "portus.client.cadence",
    "Checkpointer": "portus.client.checkpointer",
    "CorruptionError": "portus.errors",
    "Finding": "portus.index.findings",
    "Framework": "portus.client.stock",
    "MediumError": "portus.errors",
    "Place": "portus.index.place",
    "PoolView": "portus.client.view",
    "PortusError": "portus.errors",
    "Remaining": "portus.client.in_turn",
    "Run": "portus.client.run",
    "SaveHandle": "portus.pipeline.handle",
    "SaveStats": "portus.pipeline.handle",
    "Settings": "portus.client.settings",
    "SettingsDict": "portus.client.settings",
    "StaleError": "portus.errors",
    "TransportError": "portus.errors",
    "UsageError": "portus.errors",
    "VersionInfo": "portus.spec",
    "allow": "portus.client.resolve",
    "check": "portus.index.check",
    "checked_within": "portus.client.in_turn",
    "expected_bytes": "portus.client.run",
    "is_disabled": "portus.client.stock",
    "is_nested": "portus.media.calls",
    "is_reference": "portus.client.resolve",
    "load_reference": "portus.client.resolve",
    "local_path": "portus.index.place",
    "materialize": "portus.client.materialize",
    "materialize_at_end": "portus.client.in_turn",
    "materialize_in_turn": "portus.client.in_turn",
    "lead_back": "portus.client.mend",
    "mend": "portus.client.mend",
    "note_written": "portus.client.nested",
    "open": "portus.client.view:PoolView",
    "pack": "portus.client.pack",
    "read_reference": "portus.client.resolve",
    "register_reference_loader": "portus._autoload",
    "remaining_references": "portus.client.in_turn",
    "saved_in": "portus.client.in_turn",
    "say_remaining": "portus.client.in_turn",
    "this_is_a_reference_run_portus_materialize": "portus._autoload",
    "unpack": "portus.client.pack",
    "write_file": "portus.client.nested",
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
