"""Safetensors images: what the package reads, and what tells that a byte is wrong."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.torch
import torch

from portus.engine.image.digests import MAGIC
from portus.engine.spec import PAGE
from portus.errors import CorruptionError, UsageError
from portus.reach.formats import safetensors as ours
from portus.reach.formats.safetensors import (
    SafetensorsFile,
    is_safetensors,
    read_safetensors,
)
from portus.reach.formats.safetensors_file import NamedTensors
from tests.unit.state.image_bytes import filled, stored


def saved(state: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The whole file, as whoever writes images makes it."""
    contents = NamedTensors(state, metadata)
    return bytes(filled(contents.image("x"), [stored(each) for each in contents.storages]))


def read(data: bytes) -> SafetensorsFile:
    """What is in it, all of it verified."""
    found = read_safetensors(lambda at, length: data[at : at + length], len(data), "x.safetensors")
    found.verify(lambda at, length: data[at : at + length])
    return found


def header_of(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


def with_header(header: str, body: bytes = b"") -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + body


def some() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "weight": torch.randn(5, 7),
        "bias": torch.randn(3).to(torch.bfloat16),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "ünïcode": torch.arange(3, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
    }


KNOWN = [name for name in ours.DTYPES if name != "float8_e8m0fnu"]
"""Those that the oldest packages know, too."""


@hypothesis.given(
    shapes=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        st.tuples(st.sampled_from(KNOWN), st.lists(st.integers(0, 4), max_size=3)),
        max_size=8,
    ),
    metadata=st.dictionaries(st.text(max_size=3).filter(str.isascii), st.just("tëxt"), max_size=3),
)
def test_the_package_reads_what_it_would_have_written(
    shapes: dict[str, tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    hypothesis.assume("__metadata__" not in shapes)
    state = {}
    for name, (dtype, shape) in shapes.items():
        raw = torch.randint(0, 2, (*shape, getattr(torch, dtype).itemsize), dtype=torch.uint8)
        state[name] = raw.view(getattr(torch, dtype)).reshape(shape)
    stock = safetensors.torch.save(state, metadata=metadata or None)
    data = saved(state, metadata)
    loaded = safetensors.torch.load(data)
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert stored(loaded[name].untyped_storage()) == stored(tensor.untyped_storage())
    own, other = header_of(data), header_of(stock)
    assert own.pop("__metadata__").items() >= metadata.items()
    other.pop("__metadata__", None)
    assert (own, list(own)) == (other, list(other)), "the same places, in the same order"
    assert (
        data[8 + int.from_bytes(data[:8], "little") :]
        == stock[8 + int.from_bytes(stock[:8], "little") :]
    )
    assert (8 + int.from_bytes(data[:8], "little")) % PAGE == 0
    found = read(data)
    assert found.digests is not None
    assert found.metadata == metadata
    assert read(stock).digests is None


def test_a_flip_of_any_bit_and_a_cut_at_any_byte_are_found() -> None:
    data = saved(some(), {"format": "pt"})
    begin = 8 + int.from_bytes(data[:8], "little")
    last = len(json.dumps(header_of(data), separators=(",", ":"), ensure_ascii=False).encode()) + 8
    places = [*range(last + 1), begin - 1, *range(begin, len(data))]
    for place in places:
        for bit in range(8):
            wrong = bytearray(data)
            wrong[place] ^= 1 << bit
            with pytest.raises((CorruptionError, UsageError)):
                read(bytes(wrong))
    for size in [*range(last + 1), *range(begin - 1, len(data))]:
        with pytest.raises(CorruptionError):
            read(data[:size])
    with pytest.raises(CorruptionError, match=f"expected {len(data)} bytes, found {len(data) + 1}"):
        read(data + b"\0")


def test_the_error_of_damaged_bytes_names_the_tensor() -> None:
    data = bytearray(saved(some()))
    data[data.index(some()["weight"].numpy().tobytes())] ^= 1
    with pytest.raises(CorruptionError, match=r"x\.safetensors: storage weight: 140 bytes"):
        read(bytes(data))


def test_units_of_a_large_tensor_have_digests_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.zeros(17 << 20, dtype=torch.uint8), "b": torch.ones(3)}
    found = read(saved(state))
    assert found.digests is not None
    assert found.digests.shape == (3, 16)


def test_digests_that_another_tool_copied_into_its_own_file_are_not_taken_for_its() -> None:
    data = saved(some(), {"format": "pt"})
    copied = header_of(data)["__metadata__"]
    for metadata in (copied, dict(reversed(copied.items()))):
        for state in (some(), {"other": torch.zeros(2)}):
            found = read(safetensors.torch.save(state, metadata))
            assert found.digests is None
            assert list(found.keys) == [each.name for each in NamedTensors(state).named]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("[]", "expected an object"),
        ("{]", "expected JSON"),
        ('{"a":1}', "a: expected the name"),
        ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"more":1}}', "a: expected the name"),
        ('{"a":{"dtype":1,"shape":[2],"data_offsets":[0,2]}}', "a: expected the name"),
        ('{"a":{"dtype":"U8","shape":[-2],"data_offsets":[0,2]}}', "a: expected the name"),
        ('{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', "a: expected the name"),
        ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}', "expected 2 bytes for U8"),
        ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1,2]}}', "a: expected the name"),
        ('{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}', "expected 3 bytes for U8"),
        ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', "expected its bytes at 0"),
        (
            '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
            '"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
            "b: expected its bytes at 2, found 0",
        ),
        (
            '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            '"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            "two entries have one name",
        ),
        ('{"__metadata__":{"a":1}}', "expected texts in __metadata__"),
        ('{"__metadata__":[]}', "expected texts in __metadata__"),
        ("{" * 100_000, "expected JSON"),
        ('{"a":{"dtype":"U8","shape":[1' + "0" * 30 + '],"data_offsets":[0,2]}}', "expected 10"),
    ],
)
def test_a_header_that_is_none_is_an_error_that_says_what_is_wrong(header: str, said: str) -> None:
    with pytest.raises(CorruptionError, match=r"x\.safetensors") as raised:
        read(with_header(header, b"ab"))
    assert said in str(raised.value)


def test_a_length_of_the_header_beyond_the_file_makes_no_large_read() -> None:
    asked: list[int] = []

    def recorded(at: int, length: int) -> bytes:
        asked.append(length)
        return (b"\xff" * 7 + b"\0" + b"{}")[at : at + length]

    with pytest.raises(CorruptionError, match="expected 2 to 2 bytes"):
        read_safetensors(recorded, 10, "x")
    assert max(asked) == 8


def test_a_dtype_that_nobody_here_knows_has_a_place_all_the_same() -> None:
    found = read(with_header('{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}', b"ab"))
    assert (found.tensors[0].dtype, found.length.tolist()) == ("F4", [2])


def test_a_header_that_readers_would_refuse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "HEADER_MAX", 3000)
    with pytest.raises(UsageError, match="too many for one safetensors file: its header would"):
        saved({str(number): torch.zeros(1) for number in range(60)})


def test_a_digest_record_of_a_later_version_says_so() -> None:
    data = bytearray(saved(some()))
    at = 8 + len(ours.BEGIN)
    text = bytes(data[at : data.index(b'"', at)]).decode()
    record = bytearray(bytes.fromhex(text))
    assert record.startswith(MAGIC)
    from portus.engine.format.checksum import digest

    record[len(MAGIC)] += 1
    record[-16:] = digest(bytes(record[:-16]))
    data[at : at + len(text)] = record.hex().encode()
    with pytest.raises(UsageError, match="upgrade Portus"):
        read(bytes(data))


@pytest.mark.parametrize(
    ("begin", "expected"),
    [
        (saved({"a": torch.zeros(1)})[:9], True),
        (b"PK\x03\x04\0\0\0\0{", False),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9", False),
        (b"", False),
        ((2).to_bytes(8, "little"), False),
        ((2).to_bytes(8, "little") + b"{", True),
    ],
)
def test_a_file_is_known_by_its_first_bytes(begin: bytes, expected: bool) -> None:
    assert is_safetensors(begin) is expected


def test_columns_are_those_of_an_image() -> None:
    image = NamedTensors(some()).image("x")
    assert image.offset.dtype == image.length.dtype == np.int64
    assert image.size == int((image.offset + image.length).max())
