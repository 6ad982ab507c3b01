"""What the engine calls of the other rings, by name. Each is imported when it is first called.

The engine imports neither reach nor companions (docs/architecture.md), so this table is the one
place where it names them.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

PLACING: Final = "portus.client.job.placing:Placing"
"""Makes a ``CopyChoice`` that chooses by what was measured."""


def extension(name: str) -> Any:
    """Return what has one of the names above."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
