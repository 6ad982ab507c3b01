"""Pools and pointers of every released format open and load bit-identically, for ever."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from portus.cli.output import FOUND, MEND
from portus.companions.embedding.store import MARKS, MODEL
from portus.errors import CorruptionError
from portus.reach.format.layout import FORMAT_VERSION, RecordKind
from portus.reach.format.reference import FORMAT as REFERENCE_VERSION
from portus.reach.format.reference import Reference, encode
from portus.reach.format.reference import decode as decode_reference
from portus.reach.index.check import check
from portus.reach.index.directory import open_reader, open_writer
from portus.reach.index.log import entries, read_log
from portus.reach.index.records import VersionRecord, read_whole
from portus.reach.index.rescue import find_versions
from portus.reach.media.local import LocalFiles
from portus.reach.pools.view import PoolView
from portus.reach.versions.open_version import OpenVersion
from tests.golden import kinds, make  # noqa: F401 - its classes are in the pools
from tests.golden.describe import Describer
from tests.unit.cli.scene import portus

HERE = Path(__file__).resolve().parent
POOLS = sorted(HERE.glob("format-*.portus.gz"))


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return found


def unpacked(packed: Path, directory: Path) -> Path:
    path = directory / packed.name.removesuffix(".gz")
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    return path


@pytest.fixture(params=POOLS, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A golden pool, unpacked, and what is in it."""
    packed: Path = request.param
    path = unpacked(packed, tmp_path)
    return path, expected(packed.name.removesuffix(".portus.gz"))


Golden = tuple[Path, dict[str, Any]]


def test_the_format_of_the_day_has_a_golden_pool() -> None:
    assert {HERE / f"{name}.portus.gz" for name in make.POOLS} <= set(POOLS)
    assert (HERE / f"reference-{REFERENCE_VERSION}.ckpt").is_file()


def test_golden_files_are_small() -> None:
    made = [path for path in HERE.iterdir() if path.is_file() and path.suffix != ".py"]
    assert sum(path.stat().st_size for path in made) < 200_000


def test_a_golden_pool_lists_what_was_saved(golden: Golden) -> None:
    path, content = golden
    with PoolView(path) as view:
        found = sorted(view.versions(), key=lambda info: info.commit)
    listed = [
        (info.model, info.id, info.commit, info.step, info.token.hex(), info.time_ns, info.size)
        for info in found
    ]
    names = ("model", "id", "commit", "step", "token", "time_ns", "size")
    assert listed == [tuple(each[name] for name in names) for each in content["versions"]]
    marks = [each.get("inexact", False) for each in content["versions"]]
    assert [info.inexact for info in found] == marks
    metrics = [each.get("metrics", {}) for each in content["versions"]]
    assert [info.metrics for info in found] == metrics


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_version_of_a_golden_pool_loads_bit_identically(golden: Golden) -> None:
    path, content = golden
    if path.name == "format-1.portus" and np.lib.NumpyVersion(np.__version__) < "2.0.0":
        pytest.skip("numpy 1 does not load what numpy 2 pickled, with stock torch neither")
    with PoolView(path) as view:
        for pool, entry in view.entries():
            state = make.loaded(pool, entry)
            [known] = [v for v in content["versions"] if v["token"] == entry.info.token.hex()]
            assert json.loads(json.dumps(Describer().describe(state))) == known["state"]


def test_a_check_of_a_golden_pool_finds_nothing(golden: Golden) -> None:
    assert check(golden[0]) == []


def test_a_golden_pool_can_be_written_and_is_healthy_then(golden: Golden) -> None:
    path, content = golden
    writer = open_writer(str(path), LocalFiles())
    try:
        writer.retire([content["versions"][0]["id"]])
    finally:
        writer.close()
    assert check(path) == []


def test_a_golden_pool_gives_its_versions_without_roots(golden: Golden) -> None:
    medium = LocalFiles().open(str(golden[0]), writable=False)
    try:
        found = {each.record.info.token.hex() for each in find_versions(medium)}
    finally:
        medium.close()
    assert found >= {version["token"] for version in golden[1]["versions"]}


def test_golden_copies_are_of_all_records(tmp_path: Path) -> None:
    path = unpacked(HERE / f"format-{FORMAT_VERSION}-copies.portus.gz", tmp_path)
    with contextlib.closing(open_reader(str(path))) as reader:
        catalogue = reader.catalogue()
        kinds = {entry.pointer: RecordKind.VERSION for entry in catalogue.entries()}
        kinds[catalogue.root.catalogue] = RecordKind.CATALOGUE
        for pointer, kind in kinds.items():
            assert len(pointer.extents) == 2
            for place in pointer.extents:
                read_whole(reader.medium, pointer, kind, place.offset)


def test_a_golden_pool_has_one_of_everything(tmp_path: Path) -> None:
    path = unpacked(HERE / f"format-{FORMAT_VERSION}.portus.gz", tmp_path)
    reader = open_reader(str(path))
    try:
        entries = list(reader.catalogue().entries())
        records = [reader.record(entry) for entry in entries]
        tables = [OpenVersion(reader, record).table for record in records]
    finally:
        reader.close()
    assert any(_units(record) > 1 for record in records), "a storage of several units"
    assert any((record.storages["extents"] > 1).any() for record in records), "several extents"
    assert any((r.storages["born"] < r.info.commit).any() for r in records), "a shared storage"
    assert any((record.storages["length"] == 0).any() for record in records), "an empty storage"
    assert len({entry.info.model for entry in entries}) > 1
    assert all(table is not None and len(table.files) == 1 for table in tables), "files"


def test_a_golden_pool_has_metrics(tmp_path: Path) -> None:
    path = unpacked(HERE / f"format-{FORMAT_VERSION}-metrics.portus.gz", tmp_path)
    with contextlib.closing(open_reader(str(path))) as reader:
        scored = {bool(entry.info.metrics) for entry in reader.catalogue().entries()}
    assert scored == {True, False}


def test_a_golden_shelf_has_entries_of_all_kinds(tmp_path: Path) -> None:
    path = unpacked(HERE / f"format-{FORMAT_VERSION}-logs.portus.gz", tmp_path)
    with contextlib.closing(open_reader(str(path))) as reader:
        [entry] = reader.catalogue().entries()
        record = reader.record(entry)
        found = list(entries(reader.medium, record))
    assert record.log is not None
    assert {each.number <= record.log.entries for each in found} == {True, False}
    assert {each.commit == record.info.commit for each in found} == {True, False}
    assert {bool(each.contents) for each in found} == {True, False}
    assert {bool(each.bunches) for each in found} == {True, False}


def test_golden_tables_have_batches_behind_marks(tmp_path: Path) -> None:
    path = unpacked(HERE / f"format-{FORMAT_VERSION}-bunches.portus.gz", tmp_path)
    with contextlib.closing(open_reader(str(path))) as reader:
        versions = [(each, reader.record(each)) for each in reader.catalogue().entries()]
        counts = {
            entry.info.step: [len(each.bunches) for each in entries(reader.medium, record)]
            for entry, record in versions
            if entry.info.model == MARKS
        }
        [record] = [record for entry, record in versions if entry.info.model != MARKS]
        found = list(entries(reader.medium, record))
    assert [len(counts[step]) for step in (2, 4)] == [1, 3]
    assert {bool(each.bunches) for each in found} == {True, False}
    assert {len(bunch.offset) for each in found for bunch in each.bunches} > {1}
    assert {bool(each.contents) for each in found} == {True, False}


def test_golden_tables_in_place_have_undo_of_a_batch_that_was_not_committed(tmp_path: Path) -> None:
    path = unpacked(HERE / f"format-{FORMAT_VERSION}-in-place.portus.gz", tmp_path)
    with contextlib.closing(open_reader(str(path))) as reader:
        records = [reader.record(each) for each in reader.catalogue().entries()]
        [log] = [each.log for each in records if each.log is not None]
        assert len(log.in_place) == 2
        assert sum(len(read_log(reader.medium, each).undo) for each in records) == 1


@pytest.mark.parametrize("count", [12, pytest.param(250, marks=pytest.mark.long)])
def test_a_flipped_byte_of_golden_tables_in_place_is_found_or_does_no_harm(
    tmp_path: Path, count: int, seed: int
) -> None:
    """In the tables, in the log with its undo, and anywhere: by who loads, and by the check."""
    path = unpacked(HERE / f"format-{FORMAT_VERSION}-in-place.portus.gz", tmp_path)
    whole = path.read_bytes()
    with contextlib.closing(open_reader(str(path))) as reader:
        model = reader.catalogue().models[MODEL]
        record = reader.record(model[-1])
        assert record.log is not None
        tables = [record.storage_extents(each.storage)[0] for each in record.log.in_place]
        logged = [each.extent for each in entries(reader.medium, record)]
    used = [
        np.concatenate([np.arange(each.offset, each.end) for each in tables]),
        np.concatenate([np.arange(each.offset, each.end) for each in logged]),
        np.flatnonzero(np.frombuffer(whole, np.uint8)),  # most of a small pool is empty
    ]
    before, found = _loaded(path), 0
    source = np.random.default_rng(seed)
    with open(path, "r+b", buffering=0) as file:
        for number in range(count):
            place = int(source.choice(used[number % 3]))
            file.seek(place)
            file.write(bytes([whole[place] ^ 1 << int(source.integers(8))]))
            loaded = _loaded(path)
            said = portus("verify", "--pool", path)
            assert said.code in ((0, FOUND, MEND) if loaded == before else (FOUND,)), (place, said)
            lost = [each for each, kept in zip(loaded, before, strict=True) if each != kept]
            assert lost == [None] * len(lost), f"byte {place} changed what is loaded"
            found += bool(lost)
            file.seek(place)
            file.write(whole[place : place + 1])
    assert found > count // 3
    assert _loaded(path) == before


def _loaded(path: Path) -> list[object]:
    """What the tables are described as, and their mark; None for what is damaged."""
    loaded: list[object] = []
    for model in (MODEL, MARKS):
        try:
            with PoolView(path) as view:
                loaded.append(Describer().describe(view.load(model)))
        except CorruptionError:
            loaded.append(None)
    return loaded


def _units(record: VersionRecord) -> int:
    return int(np.diff(record.first_unit, append=len(record.units)).max())


@pytest.mark.parametrize("path", sorted(HERE.glob("reference-*.ckpt")), ids=lambda path: path.name)
def test_a_golden_pointer_says_what_it_said(path: Path) -> None:
    fields = expected(f"format-{FORMAT_VERSION}")["reference"]
    reference = decode_reference(path.read_bytes())
    assert reference == Reference(**fields)
    assert encode(reference) == path.read_bytes()


def test_the_description_of_a_state_sees_every_bit() -> None:
    zeros = torch.zeros(100)
    other = torch.zeros(100)
    other[99] = -0.0
    assert Describer().describe(zeros) != Describer().describe(other)
    assert Describer().describe([zeros, zeros]) != Describer().describe([zeros, zeros.clone()])
    assert Describer().describe(0.0) != Describer().describe(-0.0)
    assert Describer().describe((1,)) != Describer().describe([1])
