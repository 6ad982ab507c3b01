"""A shelf in a pool: its committed state, and how a change is committed.

Theory. A shelf is the one version of the model ``shelf`` in its pool, with a log. A change of
bytes, plain values or names is an entry of the log: one persist. Other arrays are a new version,
which keeps the unchanged storages, and the log: two persists. When the log is full, the next
version has new extents for all that the log changed, and a new log. So the cost of a commit is
proportional to the change, whatever the shelf holds.

A large array of which more than half changed gets new extents at once: otherwise it would be
written twice, to the log and then to extents.

The changes are copied from the views once: into the entry, or to the new extents. Only after the
commit does ``PrivateMapping.committed`` get them, from there. So it is never ahead of the pool, and
a failed commit leaves nothing to restore. If another thread writes to a view meanwhile, the
committed memory is still equal to the pool.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from portus.companions.media.private import Run
from portus.companions.model_log import ModelWithLog, Pieces
from portus.companions.shelf.items import Array, Item, encode
from portus.engine.copying.local import fetch
from portus.engine.copying.segments import Sources, Stop
from portus.engine.format.checksum import unit_counts
from portus.engine.spec import Extent
from portus.errors import CorruptionError, MediumError, PortusError
from portus.reach.format.items import StoredArray, decode
from portus.reach.index.log import Bunch, LogState, LogWriter, entry_size
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionLog, VersionRecord
from portus.reach.versions.parts import StorageRows, part, share, sources

MODEL: Final = "shelf"

_LARGE: Final = 1 << 20
"""Bytes of an array from which a change of more than half gives it new extents."""

Dirty = Mapping[Array, Sequence[Run]]
"""Runs of bytes that were changed, by array."""

Piece = tuple[int, Array, int]
"""A place in the pool, and the array and its first byte that are there."""

Changed = Mapping[int, Sequence[Piece]]
"""Pieces by their length."""


class ShelfStore(ModelWithLog[PoolReader]):
    """The shelf of one pool. ``items``: the committed ones."""

    model = MODEL
    _kind = "a shelf"
    _log_min = 8 << 20
    _log_share = 4

    def __init__(self, pool: PoolReader, log_bytes: int | None = None) -> None:
        """Read and verify the whole shelf.

        log_bytes: the size of its log; None: a sensible one.
        Raises ``CorruptionError``, ``StaleError`` if the shelf was replaced meanwhile (then try
        again), ``MediumError``; ``UsageError`` if the pool holds other data.
        """
        super().__init__(pool, log_bytes)
        self._arrays: list[Array] = []
        """Arrays in the order of the storages of the version."""
        self._extents: dict[Array, Sequence[Extent]] = {}
        """The extents of each array in the version."""
        self._logged: set[Array] = set()
        """Arrays that have patches in the log."""
        self.items: Mapping[str, Item] = {}
        self._open()

    def commit(self, items: Mapping[str, Item], changed: Collection[Array]) -> None:
        """Commit ``items``, and the contents of the views of their arrays ``changed``.

        Raises ``MediumError``, ``CorruptionError`` if another program changed the pool; then
        nothing changes, ``committed`` of arrays included. After an interrupt, or any other
        exception of a signal handler, the shelf can commit nothing until it is opened again.
        ``items`` belong to the store from now on.
        """
        is_known = items is self.items and self._record is not None
        contents, arrays = (self._contents, self._arrays) if is_known else encode(items)
        dirty = {each: runs for each in changed if (runs := each.changes())}
        same = arrays == self._arrays
        if same and not dirty and contents == self._contents:
            self.items = items
            return
        try:
            if not (same and self._append(items, dirty, contents)):
                self._replace(items, arrays, contents, dirty)
        except PortusError:
            raise
        except BaseException:
            # Ctrl-C, or an error of another signal handler, at any point: it is unknown here
            # whether, and where, the commit was made.
            self.pool.medium.poison("a commit of this shelf was interrupted; open it again")
            raise

    # --- a change of bytes and values -----------------------------------------------------------

    def _append(self, items: Mapping[str, Item], dirty: Dirty, contents: bytes) -> bool:
        """Commit by an entry of the log. Return False if an entry cannot do it."""
        if self._log is None or any(map(_mostly, dirty, dirty.values())):
            return False
        pieces = self._pieces(dirty)
        if _size(pieces) > self._log.room:
            return False  # before anything is copied
        bunches = _copy_views(pieces)
        if not self._append_entry(bunches, contents):
            return False
        self.items = items
        self._logged.update(dirty)
        _commit_bunches(pieces, bunches)
        return True

    def _pieces(self, dirty: Dirty) -> Changed:
        """Return the changed pieces of the version's arrays, cut at the ends of extents."""
        found: dict[int, list[Piece]] = {}
        for array, runs in dirty.items():
            for start, end in runs:
                for extent in part(self._extents[array], start, end):
                    found.setdefault(extent.length, []).append((extent.offset, array, start))
                    start += extent.length
        return found

    # --- a change of anything -------------------------------------------------------------------

    def _replace(
        self,
        items: Mapping[str, Item],
        arrays: list[Array],
        contents: bytes,
        dirty: Dirty,
    ) -> None:
        """Commit by a new version."""
        writer, log = self._writer(), self._log
        if log is not None:
            log.look()
        before = {each: index for index, each in enumerate(self._arrays)}
        afresh = {
            each for each in arrays if each not in before or _mostly(each, dirty.get(each, ()))
        }
        logged = {each: runs for each, runs in dirty.items() if each not in afresh}
        pieces = self._pieces(logged)
        fold = log is None or log.used_extent.length + _size(pieces) > log.log.extent.length // 2
        if fold:
            afresh |= {each for each in arrays if each in self._logged or each in dirty}
            pieces = {}
        bunches = _copy_views(pieces)
        lengths = np.array([each.size for each in arrays], np.int64)
        is_new = np.array([each in afresh for each in arrays], bool)
        data = [
            (each.memory.view if each in dirty else each.memory.committed)[: each.size]
            for each in arrays
            if each in afresh
        ]
        image = Pieces(writer, np.flatnonzero(is_new), data)
        groups, stored, held, entry = list[StorageRows](), list[Extent](), list[Extent](), None
        try:
            while not image.is_whole:
                stored += image.store(Stop())
            groups.append(image.rows())
            if not is_new.all():
                assert self._record is not None
                old = [before[each] for each in arrays if each not in afresh]
                group = share(self._record, np.array(old, np.int64))
                groups.append(replace(group, indices=np.flatnonzero(~is_new)))
            if fold:
                held = writer.reserve(self._log_length(int(lengths.sum())), contiguous=True)
                fresh = VersionLog(held[0], os.urandom(16), 0, 0)
                log = LogWriter(writer.medium, fresh, look=writer.glance)
            assert log is not None
            if bunches:
                entry = log.store(bunches, b"", writer.catalogue().root.sequence + 1)
                stored.append(entry)
            step = 0 if self._record is None else self._record.info.step + 1
            count = log.count + bool(bunches)
            self._commit_version(step, contents, groups, lengths, log, stored, count)
        except PortusError:
            if entry is not None and log is not None:
                # If it is poisoned, nothing is appended.
                with contextlib.suppress(MediumError, CorruptionError):
                    log.cut()  # or it would count for the next version
            raise
        finally:
            # Pages that the commit reaches stay: a reservation only keeps other saves off.
            image.release()
            writer.release(held)
        if entry is not None:
            log.advance(entry)
        self._logged = set() if fold else (self._logged | set(logged)) - afresh
        self._note_arrays(arrays)
        self.items = items
        try:
            _commit_bunches(pieces, bunches)
        finally:
            self._commit_afresh([each for each in dirty if each in afresh])

    def _note_arrays(self, arrays: list[Array]) -> None:
        """Note the arrays of the newest version, in the order of its storages."""
        assert self._record is not None
        extents = map(self._record.storage_extents, range(len(arrays)))
        self._arrays, self._extents = arrays, dict(zip(arrays, extents, strict=True))

    def _commit_afresh(self, arrays: Sequence[Array]) -> None:
        """Fill ``committed`` of arrays from the version, to which their views were stored."""
        try:
            for each in arrays:
                extents = part(self._extents[each], 0, each.size)
                address = each.memory.committed.ctypes.data
                # From the pool, not from the views: another thread may write to those (see the
                # module).
                fetch(self.pool.medium, Sources.at([address], [each.size], extents), Stop())
        except BaseException:  # the views have it too, except for writes since
            for each in arrays:
                np.copyto(each.memory.committed, each.memory.view)
            self.pool.medium.poison("the committed state could not be read back; open it again")
            raise

    def _writer(self) -> PoolWriter:
        assert isinstance(self.pool, PoolWriter), "a shelf for reading was committed"
        return self.pool

    # --- opening --------------------------------------------------------------------------------

    def _read_version(self, record: VersionRecord, logged: LogState) -> None:
        lengths, names = record.length.tolist(), dict[int, str]()
        found: dict[int, Array] = {}

        def make(said: StoredArray) -> Array:
            if said.storage in found:
                return found[said.storage]
            if not 0 <= said.storage < len(lengths):
                raise CorruptionError(f"{said.name}: there is no storage {said.storage}")
            length = lengths[said.storage]
            if said.size != length:
                raise CorruptionError(f"{said.name}: expected {said.size} bytes, found {length}")
            found[said.storage], names[said.storage] = Array(said.dtype, said.sizes), said.name
            return found[said.storage]

        self.items = decode(self._contents, make)
        if len(found) < len(lengths):
            raise CorruptionError("the contents of a shelf do not name each of its arrays")
        arrays = [found[index] for index in range(len(lengths))]
        self._fetch(record, arrays, names)
        for index, array in enumerate(arrays):
            logged.over(index, 0, array.memory.committed[: array.size].data)
            array.memory.refresh()
            array.is_read_only = not isinstance(self.pool, PoolWriter)
        self._logged = {arrays[index] for index in logged.changes}
        self._note_arrays(arrays)

    def _fetch(
        self, record: VersionRecord, arrays: Sequence[Array], names: Mapping[int, str]
    ) -> None:
        """Fill ``committed`` of arrays from a version. Raise ``CorruptionError`` for damage."""
        lengths, group = record.length, share(record, np.arange(len(arrays)))
        address = [each.memory.committed.ctypes.data if each.size else 0 for each in arrays]
        places = sources(np.array(address, np.int64), lengths, group.extents)
        found = fetch(self.pool.medium, places, Stop())
        bad = np.flatnonzero(np.any(found != group.digests, axis=1))
        if len(bad):
            owner = np.repeat(np.arange(len(arrays)), unit_counts(lengths))
            damaged = sorted({names[int(owner[unit])] for unit in bad})
            raise CorruptionError(
                f"{self.pool.medium.info.name}: damaged: {', '.join(damaged)[:200]}: expected "
                f"digest {group.digests[bad[0]].tobytes().hex()}, found "
                f"{found[bad[0]].tobytes().hex()}"
            )


def _mostly(array: Array, runs: Sequence[Run]) -> bool:
    """Return whether an array is large, and more than half of it changed."""
    return array.size >= _LARGE and 2 * sum(end - start for start, end in runs) > array.size


def _size(pieces: Changed) -> int:
    """Return the bytes of an entry with these pieces; 0 if there are none."""
    shapes = [(len(own), length) for length, own in pieces.items()]
    return entry_size(0, shapes) if shapes else 0


def _copy_views(pieces: Changed) -> list[Bunch]:
    """Return copies of the views' current bytes."""
    found = []
    for length, own in pieces.items():
        data = np.empty((len(own), length), np.uint8)
        for row, (_, array, start) in enumerate(own):
            data[row] = array.memory.view[start : start + length]
        found.append(Bunch(np.array([offset for offset, _, _ in own]), data))
    return found


def _commit_bunches(pieces: Changed, bunches: Sequence[Bunch]) -> None:
    """Copy committed pieces to ``committed`` of arrays, even if an interrupt comes."""
    try:
        _commit_once(pieces, bunches)
    except BaseException:
        _commit_once(pieces, bunches)
        raise


def _commit_once(pieces: Changed, bunches: Sequence[Bunch]) -> None:
    for (length, own), bunch in zip(pieces.items(), bunches, strict=True):
        for (_, array, start), data in zip(own, bunch.data, strict=True):
            array.memory.committed[start : start + length] = data
