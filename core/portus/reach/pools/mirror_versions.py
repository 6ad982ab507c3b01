"""Versions straight from a mirror, without a pool: ``portus.load``."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple

from portus.engine.loading.checkpoint_file import use_newest
from portus.engine.loading.patterns import Patterns
from portus.errors import NoCheckpointError, UsageError
from portus.reach.mirror.address import EXPECTED, is_store
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.mirrors import Mirrors, resolve
from portus.reach.mirror.objects import Added
from portus.reach.pools import restore

_SHOWN: Final = 20
"""Steps that an error lists."""


def load(url: str, names: Patterns = None, **settings: Any) -> object:
    """Load a version from a mirror, and return its verified state, on the CPU by default.

    This needs no pool and leaves nothing on this machine. The tensors are new, with the saved
    shapes and dtypes, and belong to the caller. Blocks while it downloads.

    url: ``s3://bucket/prefix/model@step``, or without ``@step`` for the newest version; also
    ``gs://``, ``az://``, ``file:///``. If the mirror is sealed with a key, set
    ``$PORTUS_MIRROR_KEY``.
    names: shell patterns of key paths (``"model.*"``): read only that part of the state.
    settings: those of ``torch.load``.

    If the newest version does not verify, it returns the newest one that does, and logs an error.
    Raises ``NoCheckpointError`` if there is no such version, ``UsageError`` if nothing in it
    matches a pattern, and for wrong credentials or a wrong key; ``CorruptionError`` if no version
    verifies; ``TransportError`` if the store does not answer.
    """
    if not isinstance(url, str) or not is_store(url):
        raise UsageError(
            f"portus.load {url!r:.200}: {EXPECTED}, and the model behind it. portus.open reads a "
            "pool"
        )
    found = resolve(url, "portus.load")
    with Mirrors(found.address) as mirrors:
        if not mirrors.has(found.model):
            raise NoCheckpointError(f"{mirrors.address}: there is no model {found.model!r}")
        mirror = mirrors.of(found.model)
        return use_newest(
            partial(_choose, mirror, found.step),
            lambda each: load_version(mirror, each.added, names, **settings),
        )


class MirrorStep(NamedTuple):
    """A version of a mirror."""

    mirror: Mirror
    added: Added

    def __str__(self) -> str:
        return f"step {self.added.step} (commit {self.added.commit}) of {self.mirror.name}"


def _choose(mirror: Mirror, step: int | None) -> list[MirrorStep]:
    # What was removed, and the mirror keeps, is there for those who ask for its step.
    versions = [e for e in mirror.read().checkpoints if step is not None or not e.retired]
    chosen = [MirrorStep(mirror, each) for each in versions if step in (None, each.step)]
    if not chosen:
        steps = [each.step for each in versions[-_SHOWN:]]
        raise NoCheckpointError(
            f"{mirror.name}: model {mirror.model!r} has no step {step}, but {steps}"
        )
    return chosen


def load_version(mirror: Mirror, added: Added, names: Patterns = None, **settings: Any) -> object:
    """Return the state of a version of a mirror: of several files a dict, by their names. settings:
    those of ``restore.load_files``. Raises as that and ``Mirror.open``."""
    with mirror.open(added) as files:
        info = added.info(mirror.model, 0)
        found = restore.load_files(files, info, names, **settings)
    return found if len(found) > 1 else next(iter(found.values()))
