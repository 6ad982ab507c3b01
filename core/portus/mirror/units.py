"""A version cut into units, and units into packs: which are there already, which have to be put.

A version may be kept as the files that it is: then its units are where they lie in these, and only
what is in no storage of a file, the layout and the tree are in packs.

Units are those of the format: 16 MiB of a storage, the last one shorter, each with its digest; a
layout and a tree are two storages more. A unit of at least ``ALONE`` bytes is a pack; smaller ones
share packs. What a manifest before has is left where it is; but of a pack that is used for less
than half, the small units that are needed are put once more, so that no mirror takes more than
twice what its versions do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from portus.copying.segments import Column, Digests, owners
from portus.errors import CorruptionError
from portus.format.checksum import DIGEST_SIZE, UNIT, digest, unit_counts
from portus.mirror.objects import (
    VERSIONS,
    FileObject,
    Manifest,
    content_length,
    content_name,
    object_of,
)
from portus.versions.packed import PackedFile

ALONE: Final = 4 << 20
"""Bytes. Smaller units share packs, of up to ``UNIT`` bytes."""

Key = tuple[bytes, int]
"""Digest and length of a unit: what it is, wherever it is."""


@dataclass(frozen=True, slots=True)
class UnitLocation:
    """Where a unit is: in which pack, from which byte."""

    pack: str
    offset: int


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack to be put: ``units`` (indices of units of the version) end to end. ``length``: bytes.
    ``digests``: of each."""

    name: str
    units: tuple[int, ...]
    lengths: tuple[int, ...]
    digests: tuple[bytes, ...]

    @property
    def length(self) -> int:
        """Bytes."""
        return sum(self.lengths)


@dataclass(slots=True)
class WholeFile:
    """A file of a version, by its number there, that is an object. ``there``: what is known of it
    once it was put; until then None."""

    name: str
    number: int
    size: int
    there: FileObject | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Where all units of a version are, by their keys, once ``packs`` and those of ``files`` are
    put that are not there."""

    keys: tuple[Key, ...]
    places: Mapping[Key, UnitLocation]
    packs: tuple[Pack, ...]
    files: tuple[WholeFile, ...] = ()

    def columns(self) -> tuple[Column, Column, tuple[str, ...]]:
        """Return each unit's pack index, or -1, and offset there; and the names of the packs."""
        names: dict[str, int] = {}
        pack = np.full(len(self.keys), -1, np.int64)
        offset = np.zeros(len(self.keys), np.int64)
        for index, key in enumerate(self.keys):
            if key[1]:
                place = self.places[key]
                pack[index] = names.setdefault(place.pack, len(names))
                offset[index] = place.offset
        return pack, offset, tuple(names)


def unit_lengths(lengths: Column) -> Column:
    """Bytes of each unit of storages of these lengths."""
    counts, owner = unit_counts(lengths), owners(lengths)
    rank = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    found: Column = np.clip(lengths[owner] - rank * UNIT, 0, UNIT)
    return found


def keys_of(lengths: Column, digests: Digests) -> tuple[Key, ...]:
    """The keys of all units of storages of these lengths."""
    raw = digests.tobytes()
    cut = (raw[start : start + DIGEST_SIZE] for start in range(0, len(raw), DIGEST_SIZE))
    return tuple(zip(cut, unit_lengths(lengths).tolist(), strict=True))


def planned(
    keys: Sequence[Key], known: Mapping[Key, UnitLocation], writer: bytes, epoch: int
) -> Plan:
    """Where units go. known: what may be relied on to be there."""
    wanted = {key: index for index, key in enumerate(keys) if key[1]}
    places = {key: known[key] for key in wanted if key in known and not is_in_file(known[key])}
    _leave_sparse(places)
    packs = []
    for group in _grouped([key for key in wanted if key not in places]):
        digests, lengths = zip(*group, strict=True)
        content = digests[0] if len(group) == 1 else digest(b"".join(digests))
        name = content_name(content, sum(lengths), writer, epoch)
        packs.append(Pack(name, tuple(wanted[key] for key in group), lengths, digests))
        ends = np.cumsum(lengths)
        for key, end in zip(group, ends.tolist(), strict=True):
            places[key] = UnitLocation(name, end - key[1])
    return Plan(tuple(keys), places, tuple(packs))


def planned_files(
    keys: Sequence[Key],
    lengths: Column,
    packed: Sequence[PackedFile],
    files: Sequence[WholeFile],
    known: Mapping[Key, UnitLocation],
    writer: bytes,
    epoch: int,
) -> Plan:
    """Where units go of a version that is kept as ``files``; ``packed``: where its storages, of
    these lengths, lie in them. The rest: as of ``planned``."""
    counts, places, unit, storage = unit_counts(lengths).tolist(), {}, 0, 0
    for each, file in zip(packed, files, strict=True):
        for start in each.offset.tolist():
            for offset in range(start, start + counts[storage] * UNIT, UNIT):
                if keys[unit][1]:
                    places[keys[unit]] = UnitLocation(file.name, offset)
                unit += 1
            storage += 1
    plan = planned([*[_NOTHING] * unit, *keys[unit:]], known, writer, epoch)
    return Plan(tuple(keys), {**plan.places, **places}, plan.packs, tuple(files))


def is_in_file(place: UnitLocation) -> bool:
    """Return whether a unit lies in a file of a version."""
    return place.pack.startswith(VERSIONS)


_NOTHING: Final[Key] = b"", 0
"""For a unit that no pack has."""


def _leave_sparse(places: dict[Key, UnitLocation]) -> None:
    """Take what is in packs of which less than half is needed out of ``places``."""
    used: dict[str, int] = {}
    for key, place in places.items():
        used[place.pack] = used.get(place.pack, 0) + key[1]
    sparse = {name for name, length in used.items() if 2 * length < content_length(name)}
    for key in [key for key, place in places.items() if place.pack in sparse]:
        del places[key]


def _grouped(keys: Sequence[Key]) -> Iterator[list[Key]]:
    """The units of each new pack."""
    group: list[Key] = []
    size = 0
    for key in keys:
        if key[1] >= ALONE:
            yield [key]
            continue
        if size + key[1] > UNIT:
            yield group
            group, size = [], 0
        group.append(key)
        size += key[1]
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class Mirrored:
    """A manifest, read and checked: columns, one row for each storage, or for each unit."""

    manifest: Manifest
    lengths: Column
    keys: tuple[Key, ...]
    pack: Column
    offset: Column

    @classmethod
    def of(cls, manifest: Manifest) -> Mirrored:
        """Raises ``CorruptionError`` where its columns do not fit together."""
        where = f"the manifest of step {manifest.step} of model {manifest.model!r}"
        lengths = _column(manifest.lengths, where)
        if (
            len(lengths) < 2
            or int(lengths.min()) < 0
            or float(lengths.sum(dtype=np.float64)) > _SUM_MAX
        ):
            raise CorruptionError(f"{where}: lengths of storages are out of range")
        count = int(unit_counts(lengths).sum())
        if len(manifest.digests) != count * DIGEST_SIZE:
            raise CorruptionError(
                f"{where}: expected digests of {count} units, found {len(manifest.digests)} bytes"
            )
        digests = np.frombuffer(manifest.digests, np.uint8).reshape(-1, DIGEST_SIZE)
        pack, offset = _column(manifest.pack, where), _column(manifest.offset, where)
        _check_places(manifest, unit_lengths(lengths), pack, offset, where)
        return cls(manifest, lengths, keys_of(lengths, digests), pack, offset)

    def without(self, damaged: Collection[str]) -> dict[Key, UnitLocation]:
        """Where its units are that lie in none of the objects ``damaged``."""
        places = self.places().items()
        return {key: place for key, place in places if object_of(place.pack) not in damaged}

    def files(self) -> dict[tuple[bytes, int], FileObject]:
        """Return the files, by the token of the version and their number."""
        token = self.manifest.token
        return {(token, number): each for number, each in enumerate(self.manifest.files)}

    def places(self) -> dict[Key, UnitLocation]:
        """Where its units are."""
        names = self.manifest.packs
        rows = zip(self.keys, self.pack.tolist(), self.offset.tolist(), strict=True)
        return {key: UnitLocation(names[pack], offset) for key, pack, offset in rows if key[1]}


def _check_places(
    manifest: Manifest, lengths: Column, pack: Column, offset: Column, where: str
) -> None:
    room = np.array([*manifest.pack_sizes(), 0], np.int64)
    if len(pack) != len(lengths) or len(offset) != len(lengths):
        raise CorruptionError(f"{where}: places of {len(pack)} of {len(lengths)} units")
    if len(lengths) and not (int(pack.min()) >= -1 and int(pack.max()) < len(manifest.packs)):
        raise CorruptionError(f"{where}: a unit is in a pack that it does not name")
    outside = (offset < 0) | (offset > room[pack] - lengths)
    if bool(np.any(outside)):
        raise CorruptionError(f"{where}: a unit lies outside of its pack")


def _column(data: bytes, where: str) -> Column:
    if len(data) % 8:
        raise CorruptionError(f"{where}: a column of {len(data)} bytes")
    return np.frombuffer(data, "<i8").astype(np.int64)


_SUM_MAX: Final = float(1 << 62)
