"""When to save, by ``portus.Cadence``: for a script's own loop, and for ``transformers.Trainer``.

A flag cannot move a ``save_state`` that a script calls where it likes: such a script asks
``should_save``. What ``Trainer`` does is moved by a callback, which the flag adds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

_trainings: Final[list[bool]] = []
"""For each ``Trainer.train`` under way: whether Portus sees what it saves."""


@contextlib.contextmanager
def training(*, seen: bool) -> Iterator[None]:
    """A ``Trainer`` trains. seen: whether its saves go through Portus."""
    _trainings.append(seen)
    try:
        yield
    finally:
        _trainings.pop()


def is_seen() -> bool | None:
    """Whether saves of the ``Trainer`` that trains now go through Portus; None: the flag is off."""
    return _trainings[-1] if _trainings else None
