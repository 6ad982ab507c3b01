"""torch's metadata of shards in columns: whole, made only where it is asked for, and checked."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from portus.client.shards.cuts import ItemLocation, cuts, decode, encode
from portus.client.state.pack import pack, unpack
from portus.errors import CorruptionError, UsageError

Described = tuple[Metadata, dict[MetadataIndex, ItemLocation]]


def described(ranks: int, count: int) -> Described:
    """``count`` tensors, each with a piece on every rank; a scalar, one without elements, one of
    which a piece is lost, and two values that are no tensors."""
    entries: dict[str, Any] = {}
    placed: dict[MetadataIndex, ItemLocation] = {}
    for number in range(count):
        rows = [torch.Size([64 * rank, 0]) for rank in range(ranks)]
        chunks = [ChunkStorageMetadata(offset, torch.Size([64, 1 << 33])) for offset in rows]
        properties = TensorProperties(
            (torch.float32, torch.bfloat16)[number % 2], requires_grad=True
        )
        name = f"model.layer.{number}"
        entries[name] = TensorStorageMetadata(properties, torch.Size([64 * ranks, 1 << 33]), chunks)
        for rank, offset in enumerate(rows):
            placed[MetadataIndex(name, offset)] = ItemLocation(rank, f"i{number}")
    for name, shape, is_there in (
        ("step", (), True),
        ("none", (0, 3), True),
        ("lost", (4,), False),
    ):
        chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
        whole = TensorProperties(torch.float64)
        entries[name] = TensorStorageMetadata(whole, torch.Size(shape), [chunk])
        if is_there:
            placed[MetadataIndex(name, chunk.offsets)] = ItemLocation(ranks - 1, name)
    for name in ("lr", "groups"):
        entries[name] = BytesStorageMetadata()
        placed[MetadataIndex(name)] = ItemLocation(0, name)
    paths = {name: ("state", *name.split("."), 3) for name in entries}
    return Metadata(entries, paths), placed


def assert_same(found: tuple[Metadata, Any], expected: Described) -> None:
    metadata, placed = found
    assert dict(metadata.state_dict_metadata) == expected[0].state_dict_metadata
    assert list(metadata.state_dict_metadata) == list(expected[0].state_dict_metadata)
    assert metadata.planner_data == expected[0].planner_data
    assert dict(placed) == expected[1]
    assert len(placed) == len(expected[1])


def made(kind: type) -> int:
    return sum(type(each) is kind for each in gc.get_objects())


@pytest.mark.parametrize("ranks", [1, 3, 300])
def test_metadata_comes_back_as_it_was(ranks: int) -> None:
    expected = described(ranks, 3)
    found = decode(encode(*expected))
    assert_same(found, expected)
    for index, place in expected[1].items():
        for hint in (None, 0, ranks - 1, ranks + 5, -1):  # torch says which piece it may be
            assert found[1][MetadataIndex(index.fqn, index.offset, hint)] == place
    for name, offset in (("lost", (0,)), ("step", None), ("step", (1,)), ("lr", (0,)), ("no", ())):
        assert MetadataIndex(name, offset) not in found[1]


def test_what_was_saved_before_columns_is_read() -> None:
    metadata, placed = described(2, 2)
    entries = {
        name: None
        if isinstance(entry, BytesStorageMetadata)
        else {
            "dtype": entry.properties.dtype,
            "requires_grad": entry.properties.requires_grad,
            "size": list(entry.size),
            "chunks": [(list(each.offsets), list(each.sizes)) for each in entry.chunks],
        }
        for name, entry in metadata.state_dict_metadata.items()
    }
    places = [
        (index.fqn, None if index.offset is None else list(index.offset), at.rank, at.key)
        for index, at in placed.items()
    ]
    old = {"entries": entries, "planner": metadata.planner_data, "placed": places}
    assert_same(decode(old), (metadata, placed))  # format 1
    assert_same(decode(pack(old)), (metadata, placed))  # format 2


@pytest.mark.long
def test_a_rank_makes_only_what_it_asks_for() -> None:
    """64 ranks with 300 tensors: 19,200 pieces, of which a rank that loads ten makes 640."""
    saved = encode(*described(64, 300))
    gc.collect()
    before = made(ChunkStorageMetadata), made(ItemLocation)
    metadata, placed = decode(saved)
    assert set(metadata.state_dict_metadata) > {"model.layer.0", "lr"}  # as torch's planner asks
    for number in range(10):
        name = f"model.layer.{number}"
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        assert placed[MetadataIndex(name, entry.chunks[7].offsets, 7)] == ItemLocation(
            7, f"i{number}"
        )
        assert metadata.state_dict_metadata[name] is entry
    assert made(ChunkStorageMetadata) - before[0] == 640
    assert made(ItemLocation) - before[1] <= 10 + len(("step", "none", "lr", "groups"))
    assert len(saved) < 19_200 * 32


def test_stock_torch_reads_what_is_pickled_of_it() -> None:
    """``portus materialize`` has torch pickle it, for readers that have no Portus."""
    metadata, _ = decode(encode(*described(2, 2)))
    metadata.storage_data = None
    pickled = pickle.dumps(metadata)
    assert b"portus" not in pickled
    found = pickle.loads(pickled)
    assert type(found.state_dict_metadata) is dict
    assert found.state_dict_metadata == described(2, 2)[0].state_dict_metadata


def test_columns_that_do_not_fit_are_refused_at_once() -> None:
    good: Any = unpack(encode(*described(3, 2)))
    columns = [name for name in good if isinstance(good[name], np.ndarray)]
    assert len(columns) == 8
    bad: list[dict[str, Any]] = []
    for name in columns:
        wrong: list[Any] = [good[name][:-1], np.append(good[name], 1), None, []]
        bad += [{name: each} for each in wrong]
        bad += [{name: good[name].astype(np.int64)}, {name: good[name][None]}]
        bad += [{name: good[name].astype(float)}, {name: np.full(len(good[name]), 1 << 63, "<u8")}]
    for name in ("kinds", "keys", "dims", "counts"):
        bad += [{name: good[name] + 250}]
    bad += [{"names": each} for each in (good["names"][:-1], ["step"] * 7, [1] * 7, None)]
    bad += [{"key_names": []}, {"key_names": [None] * 9}, {"properties": []}]
    bad += [{"properties": [("float32", True)] * 3}, {"others": [("lr", None, 0)]}]
    for changed in bad:
        with pytest.raises(CorruptionError, match="metadata of a sharded checkpoint"):
            decode(pack({**good, **changed}))
    for name in good:
        with pytest.raises(CorruptionError):
            decode(pack({key: value for key, value in good.items() if key != name}))


def test_a_piece_nobody_has_is_said_where_all_are_needed() -> None:
    with pytest.raises(CorruptionError, match="lost: no rank has its piece"):
        cuts(encode(*described(2, 1)))


def test_a_piece_of_other_dimensions_than_its_tensor_is_refused() -> None:
    metadata, placed = described(2, 1)
    metadata.state_dict_metadata["model.layer.0"].size = torch.Size([128])  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"model.layer.0: it has shape"):
        encode(metadata, placed)
