"""``Run``: what a training is called, and where its journal is."""

from __future__ import annotations

import hashlib
import os
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from portus.errors import MediumError
from portus.reach.index.place import DEFAULT_DIRECTORY, Place

_NAME_MAX: Final = 120

_QUOTED_MAX: Final = 200
"""Bytes of a name in that of a file."""


@dataclass(frozen=True, slots=True)
class Run:
    """A training from its start, across all restarts. ``name``: in the journal, in a pool and in a
    mirror. ``links``: the ``.portus`` directory that has its journal."""

    name: str
    links: str

    @classmethod
    def beside(
        cls,
        checkpoints: str,
        *,
        roots: Iterable[str],
        otherwise: str,
        pool: Place | None = None,
        name: str | None = None,
    ) -> Run:
        """The run whose checkpoints are in the directory ``checkpoints``; the same one after a
        restart.

        pool, name: what a user said. The ``.portus`` is in the first of ``roots`` that is on the
        file system of ``checkpoints``, else in ``otherwise``.

        All paths are absolute. Raises ``MediumError`` where a file system cannot be asked, and
        ``UsageError`` for what ``$PORTUS_POOL`` says.
        """
        home = _device(checkpoints)
        root = next((each for each in roots if _device(each) == home), otherwise)
        is_shared = (pool or Place.by_variable()) is not None
        return cls(
            name or _name_of(checkpoints, root, is_shared=is_shared),
            os.path.join(root, DEFAULT_DIRECTORY),
        )


def _device(path: str) -> int:
    """The file system of ``path``, or of what is to hold it. Raises ``MediumError``."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        return os.stat(path).st_dev
    except OSError as error:
        raise MediumError(
            error.errno, f"{path}: cannot ask for its file system: {error.strerror}"
        ) from error


def _name_of(directory: str, root: str, *, is_shared: bool) -> str:
    """A name for the run that saves to ``directory``: the same after a restart.

    Where several projects share a pool directory, and where not all of the path can be said, a
    part of a digest keeps them apart.
    """
    below = os.path.relpath(directory, root)
    if below.startswith(os.pardir):  # one of them may be spelled through a symbolic link
        below = os.path.relpath(os.path.realpath(directory), os.path.realpath(root))
    below = below.replace(os.sep, "/")
    name = "/".join(part for part in below.split("/") if part not in (".", ".."))
    name = name.removesuffix("/checkpoints") or os.path.basename(root) or "run"
    text = os.fsencode(name).decode(errors="backslashreplace")
    if is_shared or text != name or not _is_short(name):
        mark = hashlib.sha256(os.fsencode(directory)).hexdigest()[:8]
        while not _is_short(text):
            text = text[1:]
        text = f"{text}-{mark}"
    return text


def _is_short(name: str) -> bool:
    return len(name) <= _NAME_MAX and len(urllib.parse.quote(name, safe="")) <= _QUOTED_MAX
