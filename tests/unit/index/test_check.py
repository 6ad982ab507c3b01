"""A check names exactly what is broken, and nothing in a healthy pool."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from portus.companions.shelf import Shelf
from portus.engine.format.checksum import UNIT, digest
from portus.engine.format.record import Record
from portus.engine.spec import PAGE, Extent
from portus.engine.state.pickling import pickle_state
from portus.errors import CorruptionError, MediumError, PortusError, UsageError
from portus.reach.format.layout import (
    DATA_START,
    EXTENT,
    HEADER,
    HOLDER_OFFSET,
    SLOT,
    SLOT_OFFSETS,
    STORAGE,
    RecordKind,
)
from portus.reach.index.check import RULES, Finding, Severity, check
from portus.reach.index.check_contents import check_contents
from portus.reach.index.directory import create_pool, open_reader, open_writer
from portus.reach.index.findings import Findings
from portus.reach.index.log import Bunch, LogWriter, read_log
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionRecord
from portus.reach.media.local import LocalFiles
from portus.reach.media.lock import ProcessLocks
from portus.reach.media.space import Memory
from tests.contents import table
from tests.unit.index.pools import OPENED, Edit, Forger, HeaderEdit, Pool, close_all, save


def found(pool: Pool, *, data: bool = True) -> list[Finding]:
    reader = PoolReader(pool.medium, pool.locks)
    return check(reader, data=data)


def rules(findings: list[Finding]) -> list[str]:
    return [finding.invariant for finding in findings]


@pytest.fixture(autouse=True)
def pools_closed() -> Iterator[None]:
    """Each sets much address space aside."""
    yield
    close_all()


@pytest.fixture
def pool() -> Pool:
    """Two models; the first has two versions, which share a storage."""
    pool = Pool()
    first = pool.save("a", 1, [b"x" * 5000, b"y" * 10, b""])
    pool.save("b", 7, [b"z" * 9000])
    pool.save("a", 2, [b"x" * 5000, b"w" * 10, b""], share=first)
    return pool


def flip(medium: Memory, offset: int, mask: int = 1) -> None:
    data = bytearray(1)
    medium.load(offset, memoryview(data))
    medium.store(offset, bytes([data[0] ^ mask]))


# --- healthy pools ---------------------------------------------------------------------------


def test_a_pool_just_made_is_healthy(tmp_path: Path) -> None:
    path = str(tmp_path / "new.portus")
    create_pool(path, LocalFiles())
    assert check(path) == []


def test_a_pool_with_versions_is_healthy(pool: Pool) -> None:
    assert found(pool) == []
    pool.reopen()
    assert found(pool) == []


def test_a_pool_is_healthy_after_every_one_of_many_commits(seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool()
    last: dict[str, list[bytes]] = {}
    newest_of: dict[str, VersionRecord] = {}
    for step in range(120):
        model = rng.choice(["a", "b", "ä ø"])
        storages = last.get(model)
        if storages is None or rng.random() < 0.1:
            storages = [rng.randbytes(rng.choice([0, 9, 4096, 70000])) for _ in range(4)]
            share = None
        else:
            changed = rng.randrange(4)
            storages = [
                rng.randbytes(len(each)) if index == changed else each
                for index, each in enumerate(storages)
            ]
            newest = newest_of.get(model)
            share = newest if newest and newest.info.id in pool.writer.catalogue().ids() else None
        ids = sorted(pool.writer.catalogue().ids())
        retire = rng.sample(ids, min(len(ids), rng.choice([0, 1, 3])))
        newest_of[model] = pool.save(model, step, storages, share=share, retire=retire)
        last[model] = storages
        if rng.random() < 0.1:
            pool.writer.retire(sorted(pool.writer.catalogue().ids())[:1])
        if rng.random() < 0.1:
            pool.reopen()
        assert found(pool, data=step % 10 == 9) == []


def test_the_size_in_a_root_covers_records_for_which_the_pool_grew() -> None:
    pool = Pool()
    pool.save("a", 1, [b"x"])
    pool.save("a", 2, [b"x" * pool.writer.free_bytes()])
    assert found(pool) == []


def test_every_page_of_a_version_of_several_units_and_extents_is_read() -> None:
    pool = Pool()
    pool.writer.release(pool.writer.reserve(3 * UNIT))  # so large is it now
    held = [pool.writer.reserve(UNIT // 2) for _ in range(5)]
    for each in held[::2]:
        pool.writer.release(each)
    pool.writer.medium.store(pool.medium.size - 1, b"\1")
    left = pool.writer.reserve(pool.writer.free_bytes() - 3 * (UNIT // 2))
    data = os.urandom(UNIT + 12345)
    pool.writer.release(left)
    record = pool.save("a", 1, [b"1", data, b"2"])
    assert found(pool) == []
    extents = record.storage_extents(1)
    for extent in extents:
        flip(pool.medium, extent.end - 1)
    findings = found(pool)
    assert set(rules(findings)) == {"V4"}
    assert "storage 1 (t1)" in findings[0].where


# --- damage ----------------------------------------------------------------------------------


def at(place: int, value: bytes) -> HeaderEdit:
    """An edit that puts ``value`` over the bytes at ``place``."""

    def edit(payload: bytearray) -> None:
        payload[place : place + len(value)] = value

    return edit


def put(name: str, value: bytes, table: Record) -> HeaderEdit:
    """An edit that puts ``value`` over the field ``name`` of a row."""
    names = [field.name for field in table.fields]
    return at(sum(field.size for field in table.fields[: names.index(name)]), value)


def row(table: Record, number: int, name: str, value: bytes) -> Edit:
    """An edit of one row of a version record."""
    column = {STORAGE.name: 2, EXTENT.name: 3}[table.name]

    def edit(version: list[Any]) -> None:
        rows = bytearray(version[column])
        own = rows[number * table.size : (number + 1) * table.size]
        put(name, value, table)(own)
        rows[number * table.size : (number + 1) * table.size] = own
        version[column] = bytes(rows)

    return edit


def fact(number: int, value: object, entry: int | None = None) -> Edit:
    """An edit of one fact of a version, in its record or, with ``entry``, in the catalogue."""

    def edit(rows: list[Any]) -> None:
        (rows if entry is None else rows[entry])[0][number] = value

    return edit


def replaced(old: bytes, new: bytes) -> HeaderEdit:
    def edit(payload: bytearray) -> None:
        assert payload.count(old) >= 1
        payload[:] = payload.replace(old, new, 1)

    return edit


def number(value: int) -> bytes:
    return value.to_bytes(8, "little")


ID, COMMIT, STEP, TOKEN, SIZE = 1, 2, 3, 4, 6
"""Where the facts of a version are in its row. The first model has two, the second one."""


def twice_in_catalogue(entries: list[Any]) -> None:
    entries[1][0][TOKEN] = entries[0][0][TOKEN]


def cut_rows(version: list[Any]) -> None:
    version[2] = version[2][:-1]


def an_empty_extent(version: list[Any]) -> None:
    row(STORAGE, 2, "extents", number(1))(version)
    version[3] += number(DATA_START) + number(0)


def first_extent_again(version: list[Any]) -> None:
    """The second storage is at the first one's bytes: as many of them."""
    row(EXTENT, 1, "offset", version[3][:8])(version)


FORGERIES: dict[str, tuple[str, RecordKind, Edit]] = {
    "versions out of order": ("F7", RecordKind.CATALOGUE, lambda rows: rows.reverse()),
    "a catalogue of numbers": ("F7", RecordKind.CATALOGUE, lambda rows: rows.append(1)),
    "a model that is none": ("F7", RecordKind.CATALOGUE, fact(0, 7, 0)),
    "a name that is too long": ("F7", RecordKind.CATALOGUE, fact(0, "q" * 5000, 0)),
    "another model": ("F10", RecordKind.CATALOGUE, fact(0, "q", 0)),
    "a token twice": ("F9 F10", RecordKind.CATALOGUE, twice_in_catalogue),
    "an impossible id": ("F9", RecordKind.CATALOGUE, fact(ID, (1 << 63) - 1, 1)),
    "a commit to come": ("F9 F10", RecordKind.CATALOGUE, fact(COMMIT, 99, 1)),
    "another step": ("F10", RecordKind.VERSION, fact(STEP, 9)),
    "another size": ("F11", RecordKind.VERSION, fact(SIZE, 9)),
    "contents of numbers": ("F11", RecordKind.VERSION, lambda version: version.__setitem__(1, 7)),
    "a row that is cut": ("F11", RecordKind.VERSION, cut_rows),
    "fewer storages": ("F11", RecordKind.VERSION, lambda version: version.__setitem__(2, b"")),
    "an empty extent": ("F11", RecordKind.VERSION, an_empty_extent),
    "a wild number of extents": (
        "F11",
        RecordKind.VERSION,
        row(STORAGE, 0, "extents", number((1 << 64) - 1)),
    ),
    "a wild length": ("F11", RecordKind.VERSION, row(STORAGE, 0, "length", number(1 << 63))),
    "born after its commit": ("F11", RecordKind.VERSION, row(STORAGE, 0, "born", number(9))),
    "an extent outside": ("F5", RecordKind.VERSION, row(EXTENT, 0, "offset", number(1 << 40))),
    "an extent in the fixed pages": (
        "F5",
        RecordKind.VERSION,
        row(EXTENT, 0, "offset", number(PAGE)),
    ),
    "an extent that wraps around": (
        "F5",
        RecordKind.VERSION,
        row(EXTENT, 0, "offset", number((1 << 64) - 8)),
    ),
}

FORGED_CONTENTS: dict[str, tuple[str, HeaderEdit]] = {
    "contents that are no JSON": ("F14", at(0, b"q")),
    "contents out of UTF-8": ("F14", replaced(b'"t1"', b'"\xff1"')),
    "an unknown tag": ("F14", replaced(b"$tensor", b"$sensor")),
    "a size that is none": ("F14", replaced(b"[5000]", b"[-500]")),
    "a pickle that is none": ("F14", at(0, b"\x80")),
    "a table that is none": ("F14", replaced(b"{", b'{"$files"')),
    "an array beyond its storage": ("F14", replaced(b"[5000]", b"[5001]")),
    "an array short of its storage": ("F14", replaced(b"[5000]", b"[4999]")),
    "an array in no storage": ("F14", replaced(b"[2,", b"[3,")),
    "a storage without an array": ("F14", replaced(b"[2,", b"[0,")),
    "a storage twice": ("F14", replaced(b"{", b'{"q":{"$tensor":[0,"uint8",[5000]]},')),
}


def forged(pool: Pool, what: str) -> str:
    """Forge a record of ``pool``, and return the rules that it breaks."""
    if what in FORGED_CONTENTS:
        expected, change = FORGED_CONTENTS[what]

        def changed(version: list[Any]) -> None:
            contents = bytearray(version[1])
            change(contents)
            version[1] = bytes(contents)

        Forger(pool.medium).forge(RecordKind.VERSION, changed)
        return expected
    expected, kind, edit = FORGERIES[what]
    Forger(pool.medium).forge(kind, edit)
    return expected


@pytest.mark.parametrize("what", [*FORGERIES, *FORGED_CONTENTS])
def test_a_forged_record_is_named(pool: Pool, what: str) -> None:
    expected = forged(pool, what)
    assert sorted(rules(found(pool))) == sorted(expected.split())


@pytest.mark.parametrize("what", [*FORGERIES, *FORGED_CONTENTS])
def test_a_reader_of_a_forged_record_sees_it_or_says_that_it_is_wrong(
    pool: Pool, what: str
) -> None:
    forged(pool, what)
    assert isinstance(listing(pool), list) or listing(pool) is CorruptionError


TENSORS = {
    "a": torch.zeros(3),
    "b": [torch.ones(4, 2).t()[1:], {"c": torch.nn.Buffer(torch.ones(2))}],
}


@pytest.mark.parametrize(
    ("lengths", "change", "expected"),
    [
        ([12, 32, 8], lambda data: data, ""),
        ([12, 32, 8, 1], lambda data: data, "F14"),
        ([12, 32], lambda data: data, "F14"),
        ([12, 31, 8], lambda data: data, "F14"),
        ([12, 32, 7], lambda data: data, "F14"),
        ([12, 32, 8], lambda data: data.replace(b"\1\0\0\x002", b"\1\0\0\0q"), "F14"),
        ([12, 32, 8], lambda data: data[:-20], "F14"),
        ([12, 32, 8], lambda data: data.replace(b"FloatStorage", b"DoubleStorage"), "F14"),
        (
            [12, 32, 8],
            lambda data: data.replace(b"\1\0\0\x002", b"\x88\x13\0\0" + b"2" * 5000),
            "F14",
        ),
    ],
)
def test_a_pickle_is_followed_to_the_ends_of_its_tensors(
    lengths: list[int], change: Callable[[bytes], bytes], expected: str
) -> None:
    assert sorted(set(said_of(change(pickle_state(TENSORS).pickle), lengths))) == expected.split()


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (table([7, 0, 8]), ""),
        (table([7, 0, 9]), "F14"),
        (table([7, 0]), "F14"),
        (table([7, 0, 8]).replace(b'"a"', b'"a/b"'), "F14"),
        (b'{"$files":[]}', "F14"),
        (b'{"$files":[],"directory":""}', "F14"),
    ],
)
def test_a_table_of_files_has_the_storages_of_its_version(contents: bytes, expected: str) -> None:
    assert said_of(contents, [7, 0, 8]) == expected.split()


def test_numbers_that_are_too_long_to_print_are_named() -> None:
    sizes = b",".join([b"9223372036854775807"] * 400)
    assert said_of(b'{"a":{"$tensor":[0,"uint8",[%s]]}}' % sizes, [1]) == ["F14"]
    pickled = pickle_state({"a": torch.zeros(3)}).pickle
    size = (1 << 40_000).to_bytes(5001, "little")
    longest = pickled.replace(b"K\x03\x85", b"\x8b%s%s\x85" % (number(5001)[:4], size))
    assert longest != pickled
    assert said_of(longest, [12]) == ["F14"]


def test_a_pickle_of_tensors_at_places_without_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portus.engine.image.key_paths._TENSORS_MAX", 1000)
    nested = b"\x80\x02ctorch._utils\n_rebuild_parameter\nq\0N"
    for number in range(1, 41):  # each is made of the one before, twice
        nested += b"q%c0h\0h%ch%c\x86R" % (number, number, number)
    assert said_of(nested + b".", []) == ["F14"]


def test_a_check_runs_nothing_of_a_pickle(tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert said_of(b"\x80\x02cos\nmkdir\n(V%s\ntR." % bytes(made), [1]) == ["F14"]
    assert not made.exists()


def said_of(contents: bytes, lengths: list[int]) -> list[str]:
    """The rules that contents break, of a version with storages of these lengths."""
    findings = Findings()
    with findings.note("F14", "contents", "those of its storages"):
        check_contents(contents, lengths)
    return [each.invariant for each in findings.all]


HEADERS: dict[str, tuple[str, HeaderEdit]] = {
    "magic": ("F6", put("magic", b"X", HEADER)),
    "kind": ("F6", put("kind", b"\7", HEADER)),
    "kind version": ("F6", put("kind_version", b"\7", HEADER)),
    "reserved": ("F6", put("reserved", b"\7", HEADER)),
    "length": ("F6", put("length", b"\7", HEADER)),
    "uuid": ("F6", put("uuid", b"another pool....", HEADER)),
    "commit": ("F6 V1", put("commit", number(99), HEADER)),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_forged_header_is_named(pool: Pool, what: str) -> None:
    expected, edit = HEADERS[what]
    Forger(pool.medium).forge(RecordKind.CATALOGUE, raw=edit, header=True)
    # Alone on its page, a record of another commit meets nobody.
    assert rules(found(pool)) == expected.replace(" V1", "").split()


def test_a_version_record_of_another_commit_than_its_version_is_named(pool: Pool) -> None:
    Forger(pool.medium).forge(RecordKind.VERSION, raw=put("commit", number(1), HEADER), header=True)
    assert rules(found(pool)) == ["F10"]


def test_bytes_that_changed_are_named_with_tensor_and_place(pool: Pool) -> None:
    record = pool.writer.record(pool.entry("a"))
    [place] = record.storage_extents(1)
    flip(pool.medium, place.offset + 3)
    [finding] = found(pool)
    assert finding.invariant == "V4"
    assert finding.severity is Severity.ERROR
    assert f"storage 1 (t1), its bytes 0 to 10, at byte {place.offset}" in finding.where
    assert "version 3 of 'a' (step 2)" in finding.where
    assert found(pool, data=False) == []


def test_bytes_that_versions_share_are_read_once(pool: Pool) -> None:
    told: list[tuple[int, int]] = []
    check(
        PoolReader(pool.medium, pool.locks),
        progress=lambda done, total: told.append((done, total)),
    )
    total = 5000 + 10 + 10 + 9000
    assert told[0] == (0, total)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_log_that_makes_no_sense_is_named() -> None:
    pool = Pool()
    Shelf.on(pool.writer).x = np.zeros(3)
    assert found(pool) == []
    record = pool.writer.record(pool.entry("shelf"))
    assert record.log is not None
    outside = Bunch(np.array([1 << 40]), np.zeros((1, 8), np.uint8))
    LogWriter(pool.medium, record.log).append([outside], b"", record.info.commit)
    assert rules(found(pool)) == ["F8"]
    with pytest.raises(CorruptionError, match="expected patches within"):
        read_log(pool.medium, record)

    def born_later(version: list[Any]) -> None:
        version[5]["born"] = 9

    Forger(pool.medium).forge(RecordKind.VERSION, born_later)
    assert rules(found(pool, data=False)) == ["F11"]


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ([b'{"y":{"$array":[0,"<f8",[3]]}}'], ""),
        ([b'{"y":{"$array":[0,"<f8",[2]]}}'], "F14"),
        ([b'{"y":{"$array":[1,"<f8",[3]]}}'], "F14"),
        ([b'{"y":{"$array":[0,"<f8"]}}'], "F14"),
        ([b"{", b'{"y":{"$array":[0,"<f8",[3]]}}', b""], ""),  # the last ones are the version's
    ],
)
def test_contents_in_a_log_are_looked_at_as_those_of_the_version(
    contents: list[bytes], expected: str
) -> None:
    pool = Pool()
    Shelf.on(pool.writer).x = np.zeros(3)
    record = pool.writer.record(pool.entry("shelf"))
    assert record.log is not None
    log = LogWriter(pool.medium, record.log)
    for each in contents:
        log.append([], each, record.info.commit)
    assert rules(found(pool)) == expected.split()


def test_an_extent_of_two_storages_is_named() -> None:
    pool = Pool()
    pool.save("a", 1, [b"x" * 10, b"x" * 10, b""])
    Forger(pool.medium).forge(RecordKind.VERSION, first_extent_again)
    assert rules(found(pool)) == ["F13"]


def test_extents_that_overlap_are_named() -> None:
    pool = Pool()
    pool.save("a", 1, [b"x" * 10, b"x" * 10, b""])

    def shifted(version: list[Any]) -> None:
        offset = int.from_bytes(version[3][:8], "little")
        row(EXTENT, 1, "offset", number(offset + 5))(version)

    Forger(pool.medium).forge(RecordKind.VERSION, shifted)
    findings = found(pool, data=False)
    assert rules(findings) == ["F13"]
    assert "it overlaps storage 0" in findings[0].found


def test_every_extent_inside_of_another_is_named() -> None:
    pool = Pool()
    pool.save("a", 1, [b"x" * 3000, b"x" * 10, b"x" * 10])

    def inside(version: list[Any]) -> None:
        offset = int.from_bytes(version[3][:8], "little")
        row(EXTENT, 1, "offset", number(offset + 100))(version)
        row(EXTENT, 2, "offset", number(offset + 200))(version)

    Forger(pool.medium).forge(RecordKind.VERSION, inside)
    findings = found(pool, data=False)
    assert rules(findings) == ["F13", "F13"]
    assert all("it overlaps storage 0" in finding.found for finding in findings)


def test_a_page_of_two_commits_is_named(pool: Pool) -> None:
    """The newest version of a has its second storage beside bytes of b, in their page."""
    place = pool.writer.record(pool.entry("b")).storage_extents(0)[0]
    pool.medium.store(place.end + 64, b"w" * 10)
    edit = row(EXTENT, 1, "offset", number(place.end + 64))
    Forger(pool.medium).forge(RecordKind.VERSION, edit)
    [finding] = found(pool)
    assert finding.invariant == "V1"
    assert finding.where == f"page {place.end // PAGE} (byte {place.end // PAGE * PAGE})"
    assert "commit 3" in finding.found
    assert "commit 4" in finding.found


def test_shared_bytes_said_to_be_of_another_commit_are_named(pool: Pool) -> None:
    edit = row(STORAGE, 0, "born", number(3))
    Forger(pool.medium).forge(RecordKind.VERSION, edit)
    assert rules(found(pool)) == ["V1", "V1"]  # the first page of them, and the last


# --- the fixed pages -------------------------------------------------------------------------


def test_pools_without_a_root_slot_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    create_pool(str(path), LocalFiles())
    data = bytearray(path.read_bytes())
    for offset in SLOT_OFFSETS:
        data[offset + 20] ^= 1
    path.write_bytes(data)
    assert rules(check(path)) == ["F1"] * 4


def test_what_is_no_pool_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    path.write_bytes(b"no pool")
    assert rules(check(path)) == ["F1"]


def test_a_pool_of_a_newer_format_is_refused(pool: Pool) -> None:
    for offset in SLOT_OFFSETS:
        data = bytearray(SLOT.size)
        pool.medium.load(offset, memoryview(data))
        data[16] = 2
        data[-16:] = digest(bytes(data[:-16]))
        pool.medium.store(offset, bytes(data))
    with pytest.raises(UsageError, match="newer Portus"):
        found(pool)


@pytest.mark.parametrize(
    "offset",
    [
        SLOT_OFFSETS[0] + SLOT.size,
        SLOT_OFFSETS[1] + PAGE - 1,
        HOLDER_OFFSET + 511,
        HOLDER_OFFSET + PAGE - 1,
        HOLDER_OFFSET + PAGE,
        SLOT_OFFSETS[3] + SLOT.size,
        SLOT_OFFSETS[3] + PAGE - 1,
        SLOT_OFFSETS[3] + PAGE,
        DATA_START - 1,
    ],
)
def test_padding_that_is_not_zero_is_named(pool: Pool, offset: int) -> None:
    flip(pool.medium, offset)
    assert rules(found(pool)) == ["F2"]


def test_padding_behind_a_record_that_is_not_zero_is_named(pool: Pool) -> None:
    [extent, copy] = pool.entry("b").pointer.extents
    assert extent.end % 8
    for each in (extent, copy):
        flip(pool.medium, each.end)
        assert rules(found(pool)) == ["F2"]
        flip(pool.medium, each.end)


def test_a_copy_that_is_none_is_named(pool: Pool) -> None:
    forger = Forger(pool.medium)
    catalogue = forger.root.catalogue
    assert catalogue.copy
    for copy, rule in ((catalogue.copy + 8, "F6"), (1 << 40, "F5"), (PAGE, "F5")):
        forger.root_to(structs.replace(catalogue, copy=copy))
        assert set(rules(found(pool))) == {rule}


# --- root slots ------------------------------------------------------------------------------


def test_one_torn_place_of_a_slot_is_to_be_mended(pool: Pool) -> None:
    for offset in SLOT_OFFSETS:
        flip(pool.medium, offset + 70)
        [finding] = found(pool)
        assert (finding.invariant, finding.severity) == ("F1", Severity.MEND)
        assert f"byte {offset}" in finding.where
        flip(pool.medium, offset + 70)


def test_a_slot_torn_in_both_places_is_a_warning(pool: Pool) -> None:
    for slot in (0, 1):
        for offset in SLOT_OFFSETS[slot::2]:
            flip(pool.medium, offset + 70)
        findings = found(pool)
        assert rules(findings) == ["F1", "F1"]
        assert {finding.severity for finding in findings} == {Severity.WARNING}
        assert all(f"slot {slot}" in finding.where for finding in findings)
        for offset in SLOT_OFFSETS[slot::2]:
            flip(pool.medium, offset + 70)


def test_a_slot_of_another_pool_is_named(pool: Pool) -> None:
    forger = Forger(pool.medium)
    forger.uuid = bytes(16)
    forger.store(pool.writer._roots[forger.root.slot == 1].root)
    assert "F3" in rules(found(pool))


def test_a_slot_of_the_wrong_parity_is_named(pool: Pool) -> None:
    data = bytearray(SLOT.size)
    pool.medium.load(SLOT_OFFSETS[1], memoryview(data))
    pool.medium.store(SLOT_OFFSETS[0], bytes(data))
    assert rules(found(pool)) == ["F3", "F1"]


def test_roots_that_do_not_follow_each_other_are_named(pool: Pool) -> None:
    forger = Forger(pool.medium)
    forger.root_to(forger.root.catalogue)
    last = forger.root.sequence + 1
    forger.root_to(forger.root.catalogue, sequence=last + 2)
    forger.root_to(forger.root.catalogue, sequence=forger.root.sequence)
    root = forger.root
    forger.store(
        *(
            type(root)(sequence, root.next_version, forger.medium.size, root.catalogue)
            for sequence in (last, last + 3)
        )
    )
    assert rules(found(pool)) == ["F4"]


def test_a_newer_root_that_knows_fewer_versions_is_named(pool: Pool) -> None:
    forger = Forger(pool.medium)
    root = forger.root
    older = type(root)(root.sequence, root.next_version + 1, root.size, root.catalogue)
    newer = type(root)(root.sequence + 1, root.next_version, root.size, root.catalogue)
    forger.store(older, newer)
    assert rules(found(pool)) == ["F4"]


def test_a_root_larger_than_its_medium_is_named(pool: Pool) -> None:
    forger = Forger(pool.medium)
    root = forger.root
    forger.store(
        *(
            type(root)(sequence, root.next_version, root.size + PAGE, root.catalogue)
            for sequence in (root.sequence, root.sequence + 1)
        )
    )
    assert set(rules(found(pool))) == {"F5"}


def test_records_beyond_the_size_of_their_root_are_named(pool: Pool) -> None:
    forger = Forger(pool.medium)
    root = forger.root
    forger.store(
        *(
            type(root)(sequence, root.next_version, DATA_START, root.catalogue)
            for sequence in (root.sequence, root.sequence + 1)
        )
    )
    assert rules(found(pool)) == ["F5", "F5"]  # its copy too


def test_a_pool_file_that_was_truncated_is_damaged_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "x.portus"
    with Shelf(path, log_bytes=1 << 16) as shelf:
        for step in range(6):  # records come to lie before the bytes and the log that they lead to
            shelf[f"x{step % 2}"] = np.full(3000 + step, step)
            shelf[f"x{step % 2}"][0] = 1.0
            shelf.sync()
    assert check(path) == []
    for size in range(path.stat().st_size - PAGE, -1, -PAGE):
        os.truncate(path, size)
        for data in (True, False):
            assert Severity.ERROR in {each.severity for each in check(path, data=data)}, size


def test_a_damaged_record_of_the_older_root_alone_is_named(pool: Pool) -> None:
    older = pool.writer._roots[1].root
    flip(pool.medium, older.catalogue.offset + 70)
    [finding] = found(pool)
    assert finding.invariant == "F6"
    assert f"byte {older.catalogue.offset}" in finding.where


def test_versions_that_differ_between_the_roots_are_named(pool: Pool) -> None:
    forger = Forger(pool.medium)
    before = forger.root
    forger.forge(RecordKind.VERSION, lambda payload: None)  # the same record, elsewhere
    forged = Forger(pool.medium).root
    forger.store(before, forged)
    assert set(rules(found(pool))) >= {"F10"}


# --- every byte ------------------------------------------------------------------------------


def small() -> Pool:
    pool = Pool()
    pool.save("abc", 1, [b"x" * 100, b"y" * 10])
    pool.save("abc", 2, [b"x" * 100, b"z" * 10], share=pool.writer.record(pool.entry("abc")))
    return pool


def listing(pool: Pool) -> object:
    """All that a reader sees, bytes included; or the error that it gets."""
    try:
        reader = PoolReader(pool.medium, pool.locks)
        seen: list[object] = []
        for entry in reader.catalogue().entries():
            record = reader.record(entry)
            seen += [entry.info, record.contents]
            for extent in record.extents:
                data = bytearray(int(extent["length"]))
                reader.medium.load(int(extent["offset"]), memoryview(data))
                seen.append(bytes(data))
    except PortusError as error:
        return type(error)
    return seen


def places(pool: Pool) -> tuple[list[int], list[int]]:
    """The bytes of a pool that mean something, padding included, and the rest of it."""
    ranges = [(offset, SLOT.size) for offset in SLOT_OFFSETS]
    for catalogue in pool.writer._roots:
        pointers = [catalogue.root.catalogue]
        for entry in catalogue.entries():
            record = pool.writer.record(entry)
            pointers.append(entry.pointer)
            ranges += [(int(row["offset"]), int(row["length"])) for row in record.extents]
        extents = [each for pointer in pointers for each in pointer.extents]
        ranges += [(each.offset, each.length + -each.length % 8) for each in extents]
    meant = {place for offset, length in ranges for place in range(offset, offset + length)}
    return sorted(meant), sorted(set(range(DATA_START + 64 * PAGE)) - meant)


def harmless(pool: Pool, offsets: list[int], masks: tuple[int, ...]) -> int:
    """Flip bytes, one at a time; how many flips were not found, and did no harm."""
    healthy, unseen = listing(pool), 0
    for offset in offsets:
        for mask in masks:
            flip(pool.medium, offset, mask)
            if not found(pool):
                assert listing(pool) == healthy, f"byte {offset} ^ {mask:#x} does harm unseen"
                unseen += 1
            flip(pool.medium, offset, mask)
    assert found(pool) == []
    return unseen


def test_a_flipped_byte_is_found_or_does_no_harm(seed: int) -> None:
    rng = random.Random(seed)
    pool = small()
    meant, rest = places(pool)
    tried = rng.sample(meant, 400)
    assert harmless(pool, tried, (0x01,)) == 0
    harmless(pool, rng.sample(rest, 40), (0xFF,))
    print(f"{len(tried)} of {len(meant)} bytes that mean something were flipped")


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_flip_of_every_byte_is_found_or_does_no_harm(seed: int) -> None:
    pool = small()
    meant, rest = places(pool)
    assert len(meant) > 2000
    mask = 1 << random.Random(seed).randrange(8)
    assert harmless(pool, meant, (mask,)) == 0
    harmless(pool, rest[::101], (0xFF,))
    print(f"{len(meant)} flips of bytes that mean something, {len(rest[::101])} of others")


# --- while somebody writes -------------------------------------------------------------------


def test_a_version_retired_while_it_is_checked_is_passed_over(pool: Pool) -> None:
    """Its pages are written over between the look at its record and the look at its bytes."""
    pool.save("a", 3, [os.urandom(50_000)])
    victim = pool.entry("a", 0).info.id
    place = pool.writer.record(pool.entry("a", 0)).storage_extents(1)[0]
    told: list[int] = []

    def overwrite(done: int, total: int) -> None:
        if not told:
            pool.save("b", 8, [b"1"], retire=[victim])
            pool.save("b", 9, [b"2"])
            pool.save("b", 10, [b"3"])
            assert victim not in pool.writer._space._reach
            pool.medium.store(place.offset, b"somebody else's")
        told.append(done)

    reader = PoolReader(pool.medium, pool.locks)
    assert check(reader, progress=overwrite) == []
    assert told[-1] > 0


def test_what_a_version_shared_with_one_that_was_retired_meanwhile_is_read(pool: Pool) -> None:
    first, second = (pool.entry("a", place) for place in (0, 1))
    shared = pool.writer.record(first).storage_extents(0)[0]
    told: list[int] = []

    def retire(done: int, total: int) -> None:
        if not told:
            pool.save("b", 8, [b"1"], retire=[first.info.id])
            pool.save("b", 9, [b"2"])
            flip(pool.medium, shared.offset)
        told.append(done)

    [finding] = check(PoolReader(pool.medium, pool.locks), progress=retire)
    assert finding.invariant == "V4"
    assert f"version {second.info.id} of 'a'" in finding.where


def test_a_version_that_is_checked_keeps_its_pages(pool: Pool) -> None:
    """Retired while its bytes are read: the writer sees the pin."""
    told: list[int] = []
    big = pool.save("c", 1, [os.urandom(80 << 20)])

    def retire(done: int, total: int) -> None:
        if len(told) == 1:
            pool.save("b", 8, [b"1"], retire=[big.info.id])
            pool.save("b", 9, [b"2"])
            free = pool.writer.free_bytes()
            room = pool.writer.reserve(free)
            for each in room:
                pool.medium.store(each.offset, b"\xff" * min(each.length, 1 << 20))
            pool.writer.release(room)
        told.append(done)

    def only_big(info: object) -> bool:
        return info == big.info

    reader = PoolReader(pool.medium, pool.locks)
    assert check(reader, progress=retire, only=only_big) == []
    assert len(told) > 2


class Interrupted:
    """A medium that does something just before its n-th load."""

    def __init__(self, medium: Memory, place: int, act: Callable[[], None]) -> None:
        self.info, self.is_poisoned = medium.info, False
        self.loads = 0
        self._medium, self._place, self._act = medium, place, act

    @property
    def size(self) -> int:
        return self._medium.size

    def load(self, offset: int, target: memoryview) -> None:
        self.loads += 1
        if self.loads == self._place:
            self._act()
        self._medium.load(offset, target)

    def grow(self, size: int) -> None: ...

    def store(self, offset: int, data: bytes | memoryview) -> None: ...

    def persist(self, ranges: Sequence[Extent]) -> None: ...

    def close(self) -> None: ...

    def poison(self, reason: str) -> None: ...


def test_commits_between_any_two_loads_are_not_mistaken_for_damage() -> None:
    """All that was there is retired, and every free byte is written over."""
    place, loads = 0, 1
    while place < loads:
        place += 1
        pool = Pool()
        pool.save("a", 1, [b"x" * 5000, b"y"])
        pool.save("b", 2, [b"z"])

        def replace_all(pool: Pool = pool) -> None:
            for step in range(3):
                pool.save("c", step, [b"w"], retire=sorted(pool.writer.catalogue().ids()))
            room = pool.writer.reserve(pool.writer.free_bytes())
            for each in room:
                pool.medium.store(each.offset, b"\xff" * each.length)
            pool.writer.release(room)

        medium = Interrupted(pool.medium, place, replace_all)
        assert check(PoolReader(medium, pool.locks)) == [], f"load {place}"
        loads = medium.loads
        close_all()
    assert place > 25


def test_nothing_is_found_while_a_writer_commits(tmp_path: Path, seed: int) -> None:
    path = str(tmp_path / "a.portus")
    create_pool(path, LocalFiles())
    stop = threading.Event()
    commits = 0

    def work() -> None:
        nonlocal commits
        rng = random.Random(seed)
        writer = open_writer(path, LocalFiles())
        try:
            while not stop.is_set():
                ids = sorted(writer.catalogue().ids())
                storages = [rng.randbytes(rng.randrange(200_000)) for _ in range(3)]
                save(writer, rng.choice("abc"), commits, storages, retire=ids[:-4])
                commits += 1
        finally:
            writer.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        checks = 0
        while thread.is_alive() and (checks < 20 or commits < 100):
            assert check(path) == []
            checks += 1
    finally:
        stop.set()
        thread.join()
    print(f"{checks} checks during {commits} commits")
    assert check(path) == []


# --- what it is given ------------------------------------------------------------------------


def test_only_the_versions_asked_for_are_looked_at(pool: Pool) -> None:
    for place in (0, 1):
        record = pool.writer.record(pool.entry("a", place))
        flip(pool.medium, record.storage_extents(1)[0].offset)
    reader = PoolReader(pool.medium, pool.locks)
    findings = check(reader, only=lambda info: info.step == 1)
    assert len(findings) == 1
    assert "step 1" in findings[0].where
    assert check(reader, only=lambda info: info.model == "b") == []


def test_a_path_that_cannot_be_opened_raises(tmp_path: Path) -> None:
    with pytest.raises(MediumError):
        check(tmp_path / "nothing.portus")


def test_a_check_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    create_pool(str(path), LocalFiles())
    writer = open_writer(str(path), LocalFiles())
    save(writer, "a", 1, [b"x" * 10000])
    writer.close()
    before = path.read_bytes()
    os.chmod(path, 0o400)
    assert check(path) == []
    assert path.read_bytes() == before
    reader = open_reader(str(path))
    try:
        assert check(reader) == []
    finally:
        reader.close()


def test_a_bad_sector_is_named_and_the_rest_is_read(pool: Pool) -> None:
    record = pool.writer.record(pool.entry("a", 0))
    place = record.storage_extents(1)[0]

    class Bad(Memory):
        def load(self, offset: int, target: memoryview) -> None:
            if offset < place.end and offset + target.nbytes > place.offset:
                raise MediumError(5, "bad sector")
            super().load(offset, target)

        def address(self, extent: Extent) -> int:
            raise MediumError(5, "bad sector: not to be read through an address")

    bad = Bad(pool.medium.size)
    OPENED.append(bad)
    data = bytearray(pool.medium.size)
    pool.medium.load(0, memoryview(data))
    bad.store(0, bytes(data))
    flip(bad, pool.writer.record(pool.entry("b")).storage_extents(0)[0].offset)
    findings = check(PoolReader(bad, ProcessLocks()))
    assert rules(findings) == ["V4", "V4"]
    assert "bad sector" in findings[0].found
    assert "storage 1 (t1)" in findings[0].where


def test_every_rule_has_a_test() -> None:
    text = Path(__file__).read_text()
    assert [rule for rule in RULES if f'"{rule}' not in text and f" {rule}" not in text] == []
