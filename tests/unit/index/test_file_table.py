"""Files as a pool holds them: each byte is in one storage, and is found there again."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from portus.engine.image.image import Column, Literal, bytes_image
from portus.errors import CorruptionError
from portus.reach.index.file_table import (
    FileTable,
    PackedFile,
    decode_table,
    encode_table,
)
from portus.reach.index.records import overlaps

EDGES: list[tuple[int, list[int], list[int]]] = [
    (0, [], []),
    (10, [], []),
    (10, [0], [10]),
    (10, [0, 5], [5, 5]),  # adjacent, and nothing around them
    (10, [7], [3]),  # at the end
    (10, [0], [3]),
    (10, [2, 6, 4], [2, 2, 2]),  # adjacent, out of order
    (10, [4, 4, 4], [0, 3, 0]),  # empty ones where another one begins
    (10, [10, 0, 3], [0, 0, 4]),  # empty ones at both ends
    (0, [0, 0], [0, 0]),
]


def columns(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[Column, Column]:
    return np.array(offsets, np.int64), np.array(lengths, np.int64)


def packed(size: int, offsets: Sequence[int], lengths: Sequence[int]) -> PackedFile:
    return PackedFile("x.pt", size, *columns(offsets, lengths))


def any_file(chance: random.Random) -> PackedFile:
    """Storages in any order, with gaps between some of them, and empty ones."""
    offsets, lengths, at = [], [], 0
    for _ in range(chance.randrange(8)):
        at += chance.choice((0, 0, 1, chance.randrange(40)))
        length = chance.choice((0, 1, chance.randrange(60)))
        offsets.append(at)
        lengths.append(length)
        at += length
    order = chance.sample(range(len(offsets)), len(offsets))
    size = at + chance.choice((0, 0, 1, 30))
    return packed(size, [offsets[each] for each in order], [lengths[each] for each in order])


def files(seed: int) -> list[PackedFile]:
    chance = random.Random(seed)
    return [*(packed(*each) for each in EDGES), *(any_file(chance) for _ in range(300))]


def held(file: PackedFile, data: bytes) -> list[bytes]:
    """The bytes of each storage, and last those around them."""
    inside = bytearray(file.size)
    found = []
    for offset, length in zip(file.offset.tolist(), file.length.tolist(), strict=True):
        found.append(data[offset : offset + length])
        inside[offset : offset + length] = b"\1" * length
    return [*found, bytes(byte for byte, used in zip(data, inside, strict=True) if not used)]


def test_spans_have_every_byte_of_a_file_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    for file in files(seed):
        data = chance.randbytes(file.size)
        storages, spans, at, made = held(file, data), file.spans(), 0, b""
        assert len(storages[-1]) == file.around
        rows = (spans.begin, spans.length, spans.storage, spans.inside)
        for begin, length, storage, inside in zip(*(each.tolist() for each in rows), strict=True):
            assert begin == at
            part = storages[storage][inside : inside + length]
            assert len(part) == length
            made += part
            at += length
        assert at == file.size
        assert made == data


def test_a_range_of_a_file_is_the_slice_of_the_whole(seed: int) -> None:
    chance = random.Random(seed)
    for file in files(seed):
        data = chance.randbytes(file.size)
        storages, spans = held(file, data), file.spans()
        for _ in range(30):
            start = chance.randrange(file.size + 1)
            length = chance.randrange(file.size - start + 1)
            parts = spans.within(start, length)
            assert all(size > 0 for _, _, size in parts)
            found = b"".join(storages[each][at : at + size] for each, at, size in parts)
            assert found == data[start : start + length]


def test_what_is_around_the_storages_is_what_the_literals_say(seed: int) -> None:
    chance = random.Random(seed)
    for file in files(seed):
        data = chance.randbytes(file.size)
        spans = file.spans()
        literals = [
            Literal(begin, data[begin : begin + length])
            for begin, length in zip(
                spans.begin[::2].tolist(), spans.length[::2].tolist(), strict=True
            )
            if length
        ]
        assert file.bytes_around(literals) == held(file, data)[-1]
        chance.shuffle(literals)
        assert file.bytes_around(literals) == held(file, data)[-1]
        assert file.bytes_around([]) == bytes(file.around)


def test_a_file_without_storages_is_all_around_them() -> None:
    file = PackedFile.of("note.txt", bytes_image(b"a text"))
    assert (file.size, file.around, len(file.length)) == (6, 6, 0)
    assert file.spans().within(2, 3) == [(0, 2, 3)]


def test_a_table_comes_back(seed: int) -> None:
    for directory in ("", "/runs/\udcff näme"):
        named = [replace(file, name=f"{n} \udcff ü") for n, file in enumerate(files(seed))]
        for some in ([], named):
            said = encode_table(FileTable(some, directory))
            for data in (said, memoryview(said)):
                found = decode_table(data)
                assert found is not None
                assert found.directory == directory
                assert encode_table(found) == said
                for one, other in zip(found.files, some, strict=True):
                    assert (one.name, one.size) == (other.name, other.size)
                    assert one.offset.tolist() == other.offset.tolist()
                    assert one.length.tolist() == other.length.tolist()


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"a":1}', b'{"$fil', b"\0\xff" * 20])
def test_what_is_no_table_is_none(data: bytes) -> None:
    assert decode_table(data) is None


def said(**changes: object) -> bytes:
    """A table whose one file has these fields."""
    [file] = json.loads(encode_table(FileTable([packed(10, [2], [4])])))["$files"]
    fields = {key: value for key, value in (file | changes).items() if value is not ...}
    return json.dumps({"$files": [fields], "directory": ""}, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "data",
    [
        b'{"$files"',
        b'{"$files":7,"directory":""}',
        b'{"$files":[7],"directory":""}',
        b'{"$files":[]}',
        b'{"$files":' + b"[" * 100_000,
        b'{"$files":[],"directory":"\xff"}',
        said(name=...),
        said(size="x"),
        said(size=None),
        said(size=True),
        said(size=10.0),
        said(size=float("inf")),
        said(size=1 << 63),
        said(size=10**4000),
        said(name=7),
        *(said(name=name) for name in ("", ".", "..", "../x", "/x", "a/b", "a\0b", "\ud800")),
        b'{"$files":[],"directory":7}',
        b'{"$files":[],"directory":"runs"}',
        b'{"$files":[],"directory":"/a\\u0000"}',
        b'{"$files":[],"directory":"/\\ud800"}',
        said(offset="not base64!"),
        said(offset="AAAA"),  # three bytes are no number
        said(length=7),
    ],
)
def test_a_table_that_is_none_is_told(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="table of files"):
        decode_table(data)


def test_two_files_of_one_name_are_told() -> None:
    with pytest.raises(CorruptionError, match="two files of one name"):
        decode_table(encode_table(FileTable([packed(10, [], []), packed(9, [], [])])))


@pytest.mark.parametrize(
    ("size", "offsets", "lengths"),
    [
        (10, [0], [4, 4]),
        (10, [0, 4], [4]),
        (-1, [], []),
        (10, [-1], [4]),
        (10, [4], [-1]),
        (10, [8], [4]),
        (10, [0, 2], [4, 4]),
        (10, [1 << 62, 0], [1 << 62, 4]),
    ],
)
def test_a_table_of_storages_that_no_file_can_have_is_damaged(
    size: int, offsets: Sequence[int], lengths: Sequence[int]
) -> None:
    table = FileTable([packed(size, offsets, lengths)])
    with pytest.raises(CorruptionError, match="table of files"):
        decode_table(encode_table(table))


def test_ranges_are_found_together_as_they_are_one_by_one() -> None:
    chance = random.Random(5)
    for file in files(5):
        edges = sorted(chance.randrange(file.size + 1) for _ in range(8))
        offset, length = columns(edges[:-1], np.diff(edges).tolist())
        spans = file.spans()

        piece, inside, size = overlaps(np.append(spans.begin, file.size), offset, length)

        found = zip(spans.storage[piece], spans.inside[piece] + inside, size, strict=True)
        pairs = zip(offset.tolist(), length.tolist(), strict=True)
        assert [*found] == [part for each in pairs for part in spans.within(*each)]
