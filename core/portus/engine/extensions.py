"""The names of the other rings that the engine calls. Each is imported when it is first called.

The engine imports neither reach nor companions (docs/architecture.md), so this table is the one
place where it names them.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

PLACING: Final = "portus.companions.job.clock:Placing"
"""Makes a ``CopyChoice`` that chooses by measurements."""

USE_POINTER: Final = "portus.reach.pools.resolve:use_pointer"
"""Passes the file of a pointer, open, to a function."""

IS_POINTER_GOOD: Final = "portus.reach.pools.resolve:is_pointer_good"
"""Returns whether a pointer is intact and not known to refer to a removed version."""

OTHER_FORMAT: Final = "portus.reach.formats.safetensors_file:other_format"
"""Recognizes a file that is no zip."""

SHARD_OF: Final = "portus.reach.shards.rank_file:shard_of"
"""Recognizes a file of a sharded checkpoint."""

STEPS_OF: Final = "portus.reach.pools.checkpointer:steps_of"
"""Makes the ``Steps`` of a ``Checkpointer`` at the place that a user names."""

COMPANIONS: Final = "portus.reach.training.companions:companions_of"
"""Makes the companions of saves to a directory: a journal, a mirror."""

MIRROR_OF: Final = "portus.reach.mirror.address:mirror_of"
"""Returns the address of the mirror of a setting, or of the environment; None without one."""

MIRRORED: Final = "portus.reach.pools.mirror_versions:load"
"""Loads a version from a mirror."""


def extension(name: str) -> Any:
    """Return the object with one of the names above."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
