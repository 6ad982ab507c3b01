"""Loads of committed versions back into tensors, verified (V4).

A load fills fresh memory, hashes what arrived there and compares; no unverified byte is returned.
``restore_into`` first verifies the pool's bytes, then copies them over the caller's tensors,
hashing again: if no version verifies, the tensors are untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from portus.engine.loading.checkpoint_file import load_opened, note_loaded
from portus.engine.loading.open_file import OpenFile
from portus.engine.loading.patterns import Patterns
from portus.engine.loading.restore_over import RestoreOptions, RestoreReport, restore_over
from portus.engine.loading.torch_file import load_torch, open_state, restore_torch
from portus.engine.spec import VersionInfo
from portus.errors import UsageError
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry
from portus.reach.pools.state_file import StateFile
from portus.reach.pools.weights_only import unpickle
from portus.reach.versions.open_version import describe, open_version

_BATCH: Final = 256 << 20
"""Bytes of storages to verify in one call, about."""


def load(
    pool: PoolReader,
    entry: VersionEntry,
    names: Patterns = None,
    *,
    verify: bool = True,
    file: str | None = None,
    **settings: Any,
) -> object:
    """Return the state of one version, on the CPU, in memory of its own; or the part that matches.

    verify: False returns bytes without comparing their checksums. file: load only that file of the
    version; ``CorruptionError`` if there is none of that name.

    Raises ``CorruptionError`` naming model, step, tensor and offset, ``StaleError`` if the version
    was retired meanwhile, ``MediumError``; ``UsageError`` for a pattern that matches nothing.
    """
    with open_version(pool, entry) as version:
        files = version.files if file is None else {file: version.file(file)}
        if files:
            found = load_files(files, entry.info, names, verify=verify, **settings)
            return found if len(files) > 1 else next(iter(found.values()))
        stored = StateFile(version, verify=verify)
        with stored.naming() as settings:
            state = load_torch(stored, version.where, names, verify=True, settings=settings)
    note_loaded(entry.info)
    return state


def load_over(
    pool: PoolReader, entry: VersionEntry, there: Mapping[int, torch.UntypedStorage]
) -> object:
    """Return the state of one version of tables, with some storages, by their indices, in the
    memory ``there``: that is the pool's own, which is read and verified, and not filled. Raises as
    ``load``."""
    with open_version(pool, entry) as version:
        # Compared where it is: the tables are the pool's own memory, and nothing is copied.
        version.check(np.array(sorted(there), np.int64))
        storages = [
            there[index] if index in there else torch.UntypedStorage(length, device="cpu")
            for index, length in enumerate(version.lengths.tolist())
        ]
        rest = np.array([each for each in range(len(storages)) if each not in there], np.int64)
        address = np.array([storages[each].data_ptr() for each in rest], np.int64)
        version.read(rest, np.zeros_like(rest), version.lengths[rest], address)
        with StateFile(version).naming():
            return unpickle(version.contents, storages)


def verify(
    pool: PoolReader, entry: VersionEntry, advance: Callable[[int], None] | None = None
) -> int:
    """Read and check every byte of one version; return their number. ``advance`` receives bytes
    done.

    Raises as ``load``.
    """
    with open_version(pool, entry) as version:
        lengths = version.lengths
        runs = np.flatnonzero(np.diff((np.cumsum(lengths) - lengths) // _BATCH)) + 1
        for batch in np.split(np.arange(len(lengths)), runs):
            version.check(batch)
            if advance is not None:
                advance(int(lengths[batch].sum()))
    return int(lengths.sum())


def restore_into(
    pool: PoolReader, entry: VersionEntry, state: object, options: RestoreOptions
) -> RestoreReport:
    """Copy one version over the tensors of ``state``, and set its other leaves.

    Raises ``UsageError`` listing tensors that are missing, unexpected or of another shape
    (``strict``; shapes always), for tensors that share memory and have different values in the
    version, for a table that is in another pool (``Elsewhere``), in the version or in ``state``,
    for a pattern that matches nothing, and as ``load``; then ``state`` is untouched.
    """
    where = describe(entry.info)
    with open_version(pool, entry) as version:
        if len(version.files) > 1:
            raise UsageError(
                f"{where} has several files, {sorted(version.files)!r:.200}, and is restored by "
                "the framework that saved it"
            )
        for file in version.files.values():
            restored = restore_torch(file, where, state, options)
        if not version.files:
            stored = StateFile(version, verify=options.verify)
            with stored.naming() as settings:
                opened = open_state(stored, version.where, **settings)
            restored = restore_over(opened, state, options)
    note_loaded(entry.info)
    return RestoreReport(entry.info, *restored)


def load_files(
    files: Mapping[str, OpenFile],
    info: VersionInfo,
    names: Patterns,
    *,
    verify: bool = True,
    **settings: Any,
) -> dict[str, object]:
    """Return the contents of the files of a version, by their names. settings: of ``torch.load``,
    but for None. Raises as ``load``."""
    given = {"map_location": "cpu", **{k: v for k, v in settings.items() if v is not None}}
    found = {
        name: load_opened(file, describe(info), names, verify=verify, settings=dict(given))
        for name, file in files.items()
    }
    note_loaded(info)
    return found
