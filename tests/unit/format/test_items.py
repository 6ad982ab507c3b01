"""The tree of a shelf, as a stranger may have written it."""

from __future__ import annotations

import contextlib
import random

import pytest

from portus.errors import CorruptionError, UsageError
from portus.reach.format.arrays import ArrayShape
from portus.reach.format.items import DEPTH_MAX, decode

TREE = (
    b'{"a":{"$tensor":0},"b":{"$array":[{"$tensor":1},"<f8",[2,3],false]},"c":{"$dict":[[3,'
    b'{"$bytes":["AAE="]}]]},"d":{"$tuple":[[1,{"$int":"0x400"},{"$float":"nan"}]]},"e":[null,2.5]}'
)


def made(index: int, shape: ArrayShape | None) -> object:
    return index, None if shape is None else shape.shape


def test_a_tree_is_read() -> None:
    found = decode(TREE, made)
    assert (found["a"], found["b"], found["e"]) == ((0, None), (1, (2, 3)), [None, 2.5])
    assert found["c"] == {3: b"\0\1"}
    assert found["d"][:2] == (1, 1024)


@pytest.mark.parametrize(
    "tree",
    [
        b"",
        b"[1]",
        b'{"a":{"$tensor":"x"}}',
        b'{"a":{"$array":[1]}}',
        b'{"a":{"$bytes":["?"]}}',
        b'{"a":' + b"[" * (DEPTH_MAX + 2) + b"]" * (DEPTH_MAX + 2) + b"}",
        b"[" * 100_000,
    ],
)
def test_nonsense_is_corrupt(tree: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode(tree, made)


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(UsageError, match="a newer Portus wrote, are not read"):
        decode(b'{"a":{"$new":1}}', made)


def test_any_tree_is_an_error_or_a_shelf(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(3000):
        data = bytearray(TREE)
        for _ in range(source.randrange(1, 4)):
            data[source.randrange(len(data))] = source.randrange(32, 127)
        with contextlib.suppress(CorruptionError, UsageError):
            decode(bytes(data), made)
