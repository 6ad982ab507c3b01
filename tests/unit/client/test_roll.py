"""What a load takes with a roll is what it takes without one, for fewer opens."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import portus
from portus.client.files import reference
from portus.client.loading.view import PoolFile
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.client.shards import grouped
from portus.client.shards.cuts import FORMAT, FORMAT_KEY, ITEMS, METADATA, ItemLocation, encode
from portus.client.shards.grouped import census, glance
from portus.dcp import GroupReader, groups, load
from portus.index import roll
from portus.index.directory import WRITERS
from portus.index.groups import new_id, part_model, part_token
from portus.index.place import Place

SIZE = 8

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized"),
]


def described(count: int) -> bytes:
    """Metadata of a state of which each rank has a tensor of its own."""
    entries: dict[str, Any] = {}
    placed = {}
    for rank in range(count):
        whole = torch.Size([SIZE])
        chunk = ChunkStorageMetadata(torch.Size([0]), whole)
        entries[f"t{rank}"] = TensorStorageMetadata(TensorProperties(), whole, [chunk])
        placed[MetadataIndex(f"t{rank}", chunk.offsets)] = ItemLocation(rank, "i0")
    return encode(Metadata(entries), placed)


def save(
    place: Path, count: int, step: int, ranks: Any = None, shards: Path | None = None
) -> bytes:
    """A save of ``count`` ranks, of which these commit; its id."""
    group = new_id()
    for rank in range(count) if ranks is None else ranks:
        content: dict[str, Any] = {FORMAT_KEY: FORMAT, ITEMS: {"i0": torch.full((SIZE,), step)}}
        if rank == 0:
            content[METADATA] = described(count)
        names = [f"rank-{rank}-of-{count}.shard", *([".metadata"] if rank == 0 else [])]
        references = {str(shards / name): FORMAT_KEY for name in names} if shards else None
        with PoolCheckpointer(place, part_model("run", rank, count), keep=None) as part:
            part.part.surplus = (
                lambda own: []
            )  # only what is known to be complete elsewhere lets go
            token = part_token(group, rank)
            part.save(content, step, token=token, reference=references).wait()
    return group


def subsets(count: int) -> list[tuple[int, ...]]:
    return [each for n in range(count + 1) for each in itertools.combinations(range(count), n)]


def state_of(count: int) -> dict[str, torch.Tensor]:
    return {f"t{rank}": torch.zeros(SIZE, dtype=torch.int64) for rank in range(count)}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pool files and references that are looked at."""
    found: list[str] = []
    read = reference.read

    def noted(path: str) -> Any:
        found.append(Path(path).name)
        return read(path)

    class Noted(PoolFile):
        def __init__(self, pool: Place, *args: Any) -> None:
            found.append(Path(pool.path).name)
            super().__init__(pool, *args)

    monkeypatch.setattr(grouped, "PoolFile", Noted)
    monkeypatch.setattr(reference, "read", noted)
    return found


def test_whatever_was_committed_and_whatever_the_roll_says_the_newest_complete_group_loads(
    tmp_path: Path,
) -> None:
    count = 2
    place, old, new = (tmp_path / name for name in ("pools", "old", "new"))
    ids = [save(place, count, step) for step in (1, 2)]
    shutil.copytree(place, old)
    ids.append(save(place, count, 3))
    place.rename(new)
    names = [f"run%2Frank-{rank}-of-{count}.portus" for rank in range(count)]
    glanced = 0
    for have in subsets(count):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for rank, name in enumerate(names):
            shutil.copy((new if rank in have else old) / name, place)
        for told in subsets(3):
            roll.remove(str(place), "run")
            roll.add(str(place), "run", [ids[number] for number in told])
            newest = 3 if len(have) == count else 2
            for step in (None, 2):
                glanced += glance(Place.named(place), "run") is not None
                state = state_of(count)
                found = load(state, GroupReader(place, "run", step=step))
                assert found.step == (step or newest), (have, told)
                assert found.is_complete
                assert all(value.eq(found.step).all() for value in state.values())
    assert glanced == 2 * (4 * 7 - 2), "a roll that names nothing that the first rank has is none"


@pytest.mark.parametrize("since", [0, 1])
def test_a_look_takes_as_many_opens_with_any_number_of_ranks(
    tmp_path: Path, opened: list[str], since: int
) -> None:
    looks = []
    for count in (2, 6):
        place = tmp_path / str(count)
        save(place, count, 1)
        roll.add(str(place), "run", [save(place, count, 2)])
        if since:
            save(place, count, 3, ranks=[0])  # the others were killed
        opened.clear()
        reader = GroupReader(place, "run")
        reader.read_metadata()
        assert reader.group is not None
        assert (reader.group.step, reader.group.is_complete) == (2, True)
        looks.append(len(opened))
        first = f"run%2Frank-0-of-{count}.portus"
        assert set(opened) - {first} == (
            {f"run%2Frank-{count - 1}-of-{count}.portus"} if since else set()
        )
        opened.clear()
        load({"t1": torch.zeros(SIZE, dtype=torch.int64)}, GroupReader(place, "run"))
        looks.append(len(opened))
    assert looks[:2] == looks[2:]


def test_a_directory_takes_as_many_looks_with_any_number_of_ranks(
    tmp_path: Path, opened: list[str]
) -> None:
    looks = []
    for count in (2, 6):
        place, directories = (
            tmp_path / f"{count}/.portus",
            [tmp_path / f"{count}/{n}" for n in "12"],
        )
        ids = []
        for step, directory in enumerate(directories, 1):
            directory.mkdir(parents=True)
            ids.append(save(place, count, step, shards=directory))
        roll.add(str(place), "run", ids)
        for step, directory in enumerate(directories, 1):
            opened.clear()
            reader = GroupReader.at(directory)
            assert reader is not None
            assert load({"t0": torch.zeros(SIZE, dtype=torch.int64)}, reader).step == step
            looks.append(sorted(each.replace(f"of-{count}", "of-N") for each in opened))
    assert looks[:2] == looks[2:]


def test_a_directory_leads_to_what_any_rank_s_reference_leads_to(tmp_path: Path) -> None:
    place, last = tmp_path / ".portus", tmp_path / "last"
    last.mkdir()
    roll.add(str(place), "run", [save(place, 2, 1, shards=last)])
    firsts = [last / "rank-0-of-2.shard", last / ".metadata"]
    before = [each.read_bytes() for each in firsts]
    save(place, 2, 2, shards=last)
    for path, content in zip(firsts, before, strict=True):
        path.unlink()
        path.write_bytes(content)  # the first rank was killed before it replaced them
    reader = GroupReader.at(last)
    assert reader is not None
    assert load(state_of(2), reader).step == 2
    pool = place / "run%2Frank-0-of-2.portus"
    writer = WRITERS.open(str(pool))
    writer.retire([list(writer.catalogue().entries())[-1].info.id])
    WRITERS.close(writer)
    reader = GroupReader.at(last)
    assert reader is not None
    assert load(state_of(2), reader).step == 1


def test_a_step_that_was_saved_again_is_the_newer_one_though_the_roll_lacks_it(
    tmp_path: Path,
) -> None:
    first, again, last = (save(tmp_path, 2, step) for step in (1, 1, 2))
    roll.add(str(tmp_path), "run", [first, last])
    assert load(state_of(2), GroupReader(tmp_path, "run", step=1)).id == again


def test_groups_of_other_numbers_of_ranks_are_seen_whatever_the_roll_says(tmp_path: Path) -> None:
    place = tmp_path / "pools"
    roll.add(str(place), "run", [save(place, 3, 1)])
    save(place, 2, 2)
    assert load(state_of(2), GroupReader(place, "run")).count == 2
    save(place, 4, 3, ranks=[0, 1, 2])
    assert load(state_of(2), GroupReader(place, "run")).step == 2
    save(place, 1, 4)
    assert load(state_of(1), GroupReader(place, "run")).step == 4


def test_where_a_part_is_gone_plain_loads_say_so_once_and_then_take_what_is_there(
    tmp_path: Path,
) -> None:
    place = tmp_path / "pools"
    pool = place / "run%2Frank-1-of-2.portus"
    ids = [save(place, 2, 1)]
    before = pool.read_bytes()
    ids.append(save(place, 2, 2))
    roll.add(str(place), "run", ids)
    pool.write_bytes(before)  # somebody stored a backup over it
    with pytest.raises(CheckpointException, match=r"no part of rank 1 \(any more\).*load again"):
        dcp.load(state_of(2), storage_reader=GroupReader(place, "run"))
    state = state_of(2)
    dcp.load(state, storage_reader=GroupReader(place, "run"))
    assert all(value.eq(1).all() for value in state.values())
    roll.add(str(place), "run", ids)
    pool.write_bytes(before[: 1 << 14])
    with pytest.raises(CheckpointException, match=r"step 2 .*rank 1: its pool cannot be read"):
        dcp.load(state_of(2), storage_reader=GroupReader(place, "run"))
    roll.add(str(place), "run", ids)
    pool.unlink()
    with pytest.raises(portus.UsageError, match=r"rank 1: its pool file .* is not there"):
        load(state_of(2), GroupReader(place, "run"))


def test_a_copy_of_the_pools_has_its_own_roll_and_the_last_pool_takes_it_along(
    tmp_path: Path,
) -> None:
    place = tmp_path / ".portus"
    roll.add(str(place), "run", [save(place, 2, 1)])
    copy = shutil.copytree(place, tmp_path / "copy" / ".portus")
    for rank in range(2):
        with PoolCheckpointer(place, part_model("run", rank, 2)) as part:
            part.prepare(0)
            part.part.let_go([info.id for info in part.versions()])
    left = sorted(place.iterdir()) if place.exists() else []
    assert not [each for each in left if each.suffix in (".portus", ".groups")]
    assert glance(Place.named(copy), "run") is not None
    assert load(state_of(2), GroupReader(copy, "run")).step == 1
    assert [group.step for group in groups(copy)] == [1]
    assert census(Place.named(copy)).groups[0].is_complete
