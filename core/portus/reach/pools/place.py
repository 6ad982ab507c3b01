"""The place that a user of ``Checkpointer`` names."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Final

from portus.errors import UsageError, printable
from portus.reach.format.layout import MAGIC
from portus.reach.index.place import SUFFIX, Place, load_class

DEFAULT: Final = "checkpoints"
"""The directory for a user who names none."""


def place_of(directory: str | os.PathLike[str] | None) -> Place:
    """Return the place that a user names. Raises ``UsageError``."""
    if directory is None:
        return Place.by_variable() or Place.parse(os.path.abspath(DEFAULT))
    place = Place.parse(directory, "directory")
    if os.path.isfile(place.path) and not place.path.endswith(SUFFIX):  # no device or host
        with contextlib.suppress(OSError), open(place.path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise UsageError(
                    f"{printable(place.path)}: expected a directory for checkpoints, found a file; "
                    "name a directory"
                )
    return place


def steps_of(directory: str | os.PathLike[str] | None, *others: Any) -> Any:
    """Return the ``Steps`` of a ``Checkpointer`` at the place that a user names. others: further
    arguments of their constructor. Raises ``UsageError``."""
    place = place_of(directory)
    return load_class(place.classes.steps)(place, *others)
