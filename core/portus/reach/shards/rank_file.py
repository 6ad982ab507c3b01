"""The file of one rank in a directory of ``torch.distributed.checkpoint``: items end to end, each
at a multiple of 64 bytes, followed by a table that stock torch ignores.

A tensor is a file of ``torch.save`` of its own (``torch_zip``), with its own digests. Other items
are bytes from torch's planner, whose digests are in the table. Bytes between items are 0.

``.metadata`` of the directory is such a file of one item, torch's pickle: ``pickle.load`` ignores
what follows.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from portus.engine.format.checksum import DIGEST_SIZE, digest, unit_counts
from portus.engine.image.image import Crcs, Digests, Image, Literal, Read, exactly
from portus.engine.image.integrity import ShardFile
from portus.engine.image.torch_reader import read_torch
from portus.errors import CorruptionError, UsageError, printable

METADATA: Final = ".metadata"

DISTCP: Final = ".distcp"

RANK_FILE: Final = re.compile(r"__(\d+)_(\d{16,})\.distcp")
"""Rank and number of the save: a time in nanoseconds. Stock torch counts from 0."""

ALIGNMENT: Final = 64

MAGIC: Final = b"PORTUSRK"
FORMAT: Final = 1

END: Final = struct.Struct("<8sQQQQ")
"""After the rows: magic, format, the number of the save (as in the name of the file), the number of
items, and the size of the whole file. The xxh3_128 of both follows and ends the file."""

_ROW: Final = np.dtype(
    [("offset", "<u8"), ("length", "<u8"), ("kind", "<u8"), ("digest", f"V{DIGEST_SIZE}")]
)

BYTES: Final = 0
TENSOR: Final = 1
BLOCK: Final = 2
"""The kind of a tensor that is one block of memory, in order, and nothing else."""


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor as the file of ``torch.save`` that ``image`` lays out."""

    image: Image
    is_block: bool

    def __len__(self) -> int:
        return self.image.size


Item = TensorItem | bytes
"""An item, whose ``len`` is that of its bytes in the file."""


def offsets_of(items: Sequence[Item]) -> list[int]:
    """Return the offset of each item in the file."""
    found, end = [], 0
    for item in items:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        found.append(begin)
        end = begin + len(item)
    return found


def rank_image(items: Sequence[Item], save: int) -> Image:
    """Return the image of the file with ``items``; its storages are theirs, one item after another.
    save: the number of the save."""
    offsets = offsets_of(items)
    behind = offsets[-1] + len(items[-1]) if items else 0
    tensors = [
        (at, each.image)
        for at, each in zip(offsets, items, strict=True)
        if isinstance(each, TensorItem)
    ]
    none = [np.zeros(0, np.int64)]
    size = behind + len(items) * _ROW.itemsize + END.size + DIGEST_SIZE

    def literals(digests: Digests, crcs: Crcs) -> Sequence[Literal]:
        found, unit, storage = [], 0, 0
        rows = np.zeros(len(items), _ROW)
        for row, item, at in zip(rows, items, offsets, strict=True):
            row["offset"], row["length"] = at, len(item)
            if isinstance(item, bytes):
                row["kind"] = BYTES
                row["digest"] = np.void(digest(item))
                found.append(Literal(at, item))
                continue
            row["kind"] = BLOCK if item.is_block else TENSOR
            units, storages = int(unit_counts(item.image.length).sum()), len(item.image.length)
            own = item.image.literals(
                digests[unit : unit + units], crcs[storage : storage + storages]
            )
            found += [Literal(at + each.offset, each.data) for each in own]
            unit, storage = unit + units, storage + storages
        table = rows.tobytes() + END.pack(MAGIC, FORMAT, save, len(items), size)
        return [*found, Literal(behind, table + digest(table))]

    return Image(
        size=size,
        offset=np.concatenate([*none, *(at + image.offset for at, image in tensors)]),
        length=np.concatenate([*none, *(image.length for _, image in tensors)]),
        literals=literals,
    )


class ItemRow(NamedTuple):
    """The row of one item in the table. ``digest``: of an item of ``BYTES``."""

    offset: int
    length: int
    kind: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class RankFile:
    """The contents of the file ``name`` of ``size`` bytes. ``save``: the number of its save."""

    name: str
    size: int
    save: int
    rows: Sequence[ItemRow]
    by_place: Mapping[tuple[int, int], ItemRow]

    def at(self, offset: int, length: int) -> ItemRow:
        """Return the item at this place. Raise ``CorruptionError`` if there is none."""
        row = self.by_place.get((offset, length))
        if row is None:
            raise CorruptionError(
                f"{self.name}: expected an item of {length} bytes at {offset}, found none: the "
                "file is that of another save"
            )
        return row

    def verify(self, read: Read) -> None:
        """Read and check every byte. Raises ``CorruptionError``."""
        end = 0
        for row in self.rows:
            gap = exactly(read, end, row.offset - end, self.name) if row.offset > end else b""
            if any(gap) or row.offset < end:
                raise CorruptionError(f"{self.name}: byte {end}: expected zeros between items")
            if row.kind == BYTES:
                bytes_of(row, read, self.name)
            else:
                part = slice_of(read, row)
                read_torch(part, row.length, f"{self.name}: item at {row.offset}").verify(part)
            end = row.offset + row.length
        if end != self.size - len(self.rows) * _ROW.itemsize - END.size - DIGEST_SIZE:
            raise CorruptionError(f"{self.name}: byte {end}: expected the table, found other bytes")


def bytes_of(row: ItemRow, read: Read, name: str) -> bytes:
    """Return an item of ``BYTES``. Raises ``CorruptionError``."""
    data = exactly(read, row.offset, row.length, name)
    if digest(data) != row.digest:
        raise CorruptionError(
            f"{name}: {row.length} bytes at {row.offset} do not match their digest"
        )
    return data


def slice_of(read: Read, row: ItemRow) -> Read:
    """Return a function that reads one item as a file of its own."""

    def part(offset: int, length: int) -> bytes:
        return read(row.offset + offset, max(0, min(length, row.length - offset)))

    return part


def is_rank_file(read: Read, size: int) -> bool:
    """Return whether a file ends like one with a table, even with one damaged byte in the end."""
    at = size - END.size - DIGEST_SIZE
    if at < 0:
        return False
    magic, *_, noted = END.unpack(exactly(read, at, END.size, ""))
    return bool(magic == MAGIC or noted == size)


def read_rank_file(read: Read, size: int, name: str) -> RankFile:
    """Return the contents of the file ``name`` of ``size`` bytes. Raise ``CorruptionError`` if the
    table is damaged or missing, and ``UsageError`` for a file of a later Portus."""
    if not is_rank_file(read, size):
        raise CorruptionError(
            f"{name}: expected the file of a rank with its table, found {size} bytes without one: "
            "it was cut off, or damaged"
        )
    at = size - END.size - DIGEST_SIZE
    end = exactly(read, at, END.size + DIGEST_SIZE, name)
    magic, known, save, count, noted = END.unpack(end[: END.size])
    begin = at - count * _ROW.itemsize
    if begin < 0 or noted != size or magic != MAGIC:
        raise CorruptionError(f"{name}: the table is damaged, or that of another file")
    rows = exactly(read, begin, at - begin, name)
    if digest(rows + end[: END.size]) != end[END.size :]:
        raise CorruptionError(f"{name}: the table does not match its digest")
    # After the digest: in a damaged table no number means anything.
    if known != FORMAT:
        raise UsageError(
            f"{name}: expected a table of format {FORMAT}, found {known}; a later version of "
            "Portus wrote this file: upgrade Portus"
        )
    found = [ItemRow(*each) for each in np.frombuffer(rows, _ROW).tolist()]
    if any(row.offset + row.length > begin or row.kind > BLOCK for row in found):
        raise CorruptionError(f"{name}: the table has an item outside of the file")
    return RankFile(name, size, save, found, {(row.offset, row.length): row for row in found})


def read_pickle(read: Read, size: int, name: str) -> tuple[bytes, bool]:
    """Return the pickle in the file ``name`` of ``size`` bytes, and whether it was verified: stock
    torch's has no digest. Raises ``CorruptionError``."""
    if is_rank_file(read, size):
        row, *_ = read_rank_file(read, size, name).rows
        return bytes_of(row, read, name), True
    data = exactly(read, 0, size, name)
    if not data.endswith(b"."):
        raise CorruptionError(f"{name}: {size} bytes, no whole pickle: cut off, or damaged")
    return data, False


def shard_of(read: Read, size: int, path: str) -> ShardFile | None:
    """Return the known facts of the file at ``path``; None if its name is not a shard's. Raises
    ``CorruptionError``."""
    name = os.path.basename(path)
    if name != METADATA and not name.endswith(DISTCP):
        return None
    if is_rank_file(read, size) or RANK_FILE.fullmatch(name):
        return ShardFile(True, read_rank_file(read, size, printable(path)).verify)
    if name == METADATA:
        read_pickle(read, size, printable(path))
    return ShardFile(False, lambda _: None)
