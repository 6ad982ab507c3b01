"""The contents of a shelf, as a stranger may have written them."""

from __future__ import annotations

import contextlib
import random

import pytest

from portus.errors import CorruptionError, UsageError
from portus.reach.format.items import DEPTH_MAX, StoredArray, decode

CONTENTS = (
    b'{"a":{"$tensor":[0,"bfloat16",[4,0]]},"b":{"$array":[1,"<f8",[2,3]]},"c":{"$dict":[[3,'
    b'{"$bytes":["AAE="]}]]},"d":{"$tuple":[[1,{"$int":"0x400"},{"$float":"nan"}]]},"e":[null,2.5]}'
)


def made(array: StoredArray) -> object:
    return array.name, array.storage, array.size


def test_contents_are_read() -> None:
    found = decode(CONTENTS, made)
    assert (found["a"], found["b"], found["e"]) == (("a", 0, 0), ("b", 1, 48), [None, 2.5])
    assert found["c"] == {3: b"\0\1"}
    assert found["d"][:2] == (1, 1024)


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"[1]",
        b'{"a":{"$tensor":"x"}}',
        b'{"a":{"$tensor":["0","uint8",[1]]}}',
        b'{"a":{"$tensor":[0,"uint8",[-1]]}}',
        b'{"a":{"$tensor":[0,["uint8"],[1]]}}',
        b'{"a":{"$array":[1]}}',
        b'{"a":{"$array":[1,"O",[1]]}}',
        b'{"a":{"$bytes":["?"]}}',
        b'{"a":' + b"[" * (DEPTH_MAX + 2) + b"]" * (DEPTH_MAX + 2) + b"}",
        b"[" * 100_000,
    ],
)
def test_nonsense_is_corrupt(contents: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode(contents, made)


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(UsageError, match="a newer Portus wrote is not read"):
        decode(b'{"a":{"$new":1}}', made)
    with pytest.raises(UsageError, match="a newer Portus wrote it"):
        decode(b'{"a":{"$tensor":[0,"float9",[1]]}}', made)


def test_any_contents_are_an_error_or_a_shelf(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(3000):
        data = bytearray(CONTENTS)
        for _ in range(source.randrange(1, 4)):
            data[source.randrange(len(data))] = source.randrange(32, 127)
        with contextlib.suppress(CorruptionError, UsageError):
            decode(bytes(data), made)
