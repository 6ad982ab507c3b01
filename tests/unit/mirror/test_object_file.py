"""Files in a store, read by ranges of their objects."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from portus.engine.copying.segments import Sources, Stop
from portus.engine.format.checksum import UNIT, digest
from portus.engine.pipeline.draft import Labels
from portus.errors import CorruptionError, TransportError
from portus.reach.index.file_table import PackedFile
from portus.reach.mirror import object_file
from portus.reach.mirror.folder import Folder
from portus.reach.mirror.mirror import Mirror, NotMirroredError
from portus.reach.mirror.object_file import ObjectFile
from portus.reach.mirror.objects import Added, FileObject
from portus.reach.mirror.store import Part
from portus.reach.pools import restore
from portus.reach.pools.mirror_versions import load_version
from portus.reach.versions.parallel import NAME
from portus.reach.versions.pool_draft import PoolDraft
from tests.simulation.model_store import ModelStore
from tests.unit.mirror.test_mirror import MODEL, Run, new_pool, same

MIB = 1 << 20
TAIL = 64 << 10


class Watched(Folder):
    """Keeps which bytes were asked for. A large request waits until so many are under way."""

    def __init__(self, root: Path, together: int = 1) -> None:
        super().__init__(str(root))
        self.asked: list[tuple[int, int]] = []
        self.fails_after = 1 << 62
        self._guard = threading.Lock()
        self._together = together
        self._under_way = 0
        self._met = threading.Event()

    def get_range(self, name: str, start: int, length: int) -> Part:
        with self._guard:
            self.asked.append((start, length))
            self._under_way += length >= MIB
            if self._under_way >= self._together:
                self._met.set()
            if len(self.asked) > self.fails_after:
                raise TransportError("the line is dead")
        assert length < MIB or self._met.wait(60), "one is asked for after another"
        found = super().get_range(name, start, length)
        with self._guard:
            self._under_way -= length >= MIB
        return found

    def assert_asked_once(self, size: int) -> None:
        """All ranges together are the ``size`` bytes of the file; begin and end come twice."""
        self.asked.remove((0, 9))
        self.asked.remove((size - TAIL, TAIL))
        end = 0
        for start, length in sorted(self.asked):
            assert start == end, "asked for twice, or not at all"
            end = start + length
        assert end == size


def copied(path: Path, state: dict[str, object]) -> Added:
    """Mirror a state to the folder ``bucket``, as one file."""
    run = Run(path, [state])
    with contextlib.closing(run.reader):
        mirror = Mirror(Folder(str(path / "bucket")), MODEL)
        mirror.claim("a test", bytes(16), 0)
        return mirror.copy(run.reader, run.entries[0].info.id, Stop())


@pytest.mark.parametrize("together", [2, 4])
def test_a_load_asks_for_each_byte_once_and_for_several_storages_together(
    tmp_path: Path, together: int
) -> None:
    state: dict[str, object] = {f"{n}": torch.rand(MIB) for n in range(12)}
    state["long"] = torch.rand(UNIT // 2)
    state["small"] = [torch.rand(n) for n in range(30)]
    added = copied(tmp_path, state)
    store = Watched(tmp_path / "bucket", together)
    assert same(load_version(Mirror(store, MODEL), added), state)
    store.assert_asked_once(added.size)


@pytest.mark.long
def test_thousands_of_small_tensors_are_asked_for_once_by_few_requests(tmp_path: Path) -> None:
    state: dict[str, object] = {f"{n}": torch.full((9,), float(n)) for n in range(3000)}
    added = copied(tmp_path, state)
    store = Watched(tmp_path / "bucket")
    assert same(load_version(Mirror(store, MODEL), added), state)
    assert store.asked == [(0, added.size)]
    store.asked.clear()
    writer = new_pool()
    Mirror(store, MODEL).fetch(added, writer)
    assert (0, added.size) in store.asked
    assert len(store.asked) <= 5, "begin, end and directory, which is long here, come twice"
    [entry] = writer.catalogue().entries()
    assert same(restore.load(writer, entry), state)
    writer.close()


def test_of_what_is_not_wanted_no_large_storage_is_read(tmp_path: Path) -> None:
    state: dict[str, object] = {f"{n}": torch.rand(MIB) for n in range(8)}
    added = copied(tmp_path, state)
    store = Watched(tmp_path / "bucket")
    found = load_version(Mirror(store, MODEL), added, ["3", "5"])
    assert same(found, {"3": state["3"], "5": state["5"]})
    assert sum(length for _, length in store.asked) < 2 * 4 * MIB + TAIL + 50_000


@pytest.mark.parametrize("after", [2, 5, 12])
def test_a_request_that_fails_ends_a_load_and_leaves_no_thread(tmp_path: Path, after: int) -> None:
    added = copied(tmp_path, {f"{n}": torch.rand(MIB) for n in range(12)})
    store = Watched(tmp_path / "bucket")
    store.fails_after = after
    with pytest.raises(TransportError, match="the line is dead"):
        load_version(Mirror(store, MODEL), added)
    beside = [each for each in threading.enumerate() if each.name.startswith(NAME)]
    assert not any(each.is_alive() for each in beside)  # their last lines may still run


def made(chance: random.Random) -> tuple[bytes, PackedFile]:
    """A file with storages and gaps of all sizes, that has no format."""
    offset, length, at = [], [], 0
    for _ in range(chance.randrange(1, 8)):
        at += chance.choice([0, 0, 1, 64, 5000, 300_000])
        size = chance.choice([0, 1, 100, 100, 400_000, 400_000, 500_000, UNIT + 9])
        offset.append(at)
        length.append(size)
        at += size
    data = chance.randbytes(at + chance.choice([0, 10, 400_000]))
    order = chance.sample(range(len(offset)), len(offset))
    columns = np.array([[each[n] for n in order] for each in (offset, length)], np.int64)
    return data, PackedFile("a", len(data), *columns)


def opened(data: bytes, file: PackedFile, saved: bytes | None = None) -> ObjectFile:
    """saved: what ``data`` was before it was damaged."""
    stored = FileObject("a", len(data), digest(data if saved is None else saved))
    found = ObjectFile("a store", "a", stored, lambda _, start, size: data[start : start + size])
    found.__dict__["_ranges_around"] = found._around(file)  # as if its directory said so
    return found


def test_in_whatever_order_ranges_are_announced_and_loaded_they_are_those_of_the_file(
    seed: int, tmp_path: Path
) -> None:
    chance, loads = random.Random(seed), 0
    for _ in range(6):
        data, file = made(chance)
        with contextlib.closing(opened(data, file)) as found:
            for _ in range(8):
                some = chance.sample(range(len(file.length)), len(file.length))
                some = [n for n in some if file.length[n]]
                if chance.random() < 0.4:
                    found.announce(file.offset[some], file.length[some])
                for n in [*some, *chance.sample(some, len(some) // 2)]:
                    start = int(file.offset[n]) + chance.choice([0, 0, -1, 1])
                    start = min(max(0, start), len(data) - 1)
                    size = min(int(file.length[n]) + chance.choice([0, 0, 30]), len(data) - start)
                    target = bytearray(size)
                    found.load(start, memoryview(target))
                    assert target == data[start : start + size]
                    loads += 1
        path = tmp_path / "whole"
        with open(path, "w+b") as out:
            found.write(out.fileno(), "whole", lambda _: None)
        assert path.read_bytes() == data
    assert loads > 50


def test_fetch_and_check_give_the_digests_of_what_is_there(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(6):
        data, file = made(chance)
        room = np.zeros(max(1, int(file.length.sum())), np.uint8)
        place = room.ctypes.data + np.cumsum(file.length) - file.length
        targets = Sources(
            address=place, length=file.length, extent_offset=file.offset, extent_length=file.length
        )
        expected = [
            digest(data[start + at : start + at + min(UNIT, length - at)])
            for start, length in zip(file.offset.tolist(), file.length.tolist(), strict=True)
            for at in range(0, max(1, length), UNIT)
        ]
        with contextlib.closing(opened(data, file)) as found:
            for call in (found.fetch, found.check):
                assert [row.tobytes() for row in call(targets, Stop())] == expected
        storages = zip(file.offset.tolist(), file.length.tolist(), strict=True)
        whole = b"".join(data[start : start + length] for start, length in storages)
        assert room[: len(whole)].tobytes() == whole


def test_a_file_that_was_damaged_or_cut_is_not_written_without_an_error(tmp_path: Path) -> None:
    data, file = made(random.Random(3))
    for at in (0, len(data) // 2, len(data) - 1):
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with open(tmp_path / "whole", "w+b") as out, pytest.raises(CorruptionError, match="digest"):
            opened(damaged, file, data).write(out.fileno(), "whole", lambda _: None)


@pytest.mark.parametrize("at", [0, UNIT])
def test_a_write_that_failed_silently_is_found(tmp_path: Path, at: int) -> None:
    data = random.Random(4).randbytes(2 * UNIT + 9)
    stored = FileObject("a", len(data), digest(data))
    store = ModelStore()
    store.put("a", data)
    told: list[int] = []
    with open(tmp_path / "whole", "w+b") as out:

        def lose(size: int) -> None:
            told.append(size)
            if sum(told) > at:
                os.pwrite(out.fileno(), bytes(9), at)

        whole = ObjectFile("a store", "a", stored, store.get_range)
        with pytest.raises(CorruptionError, match="digest"):
            whole.write(out.fileno(), "whole", lose)
    assert sum(told) == len(data)


def test_a_version_without_files_is_not_mirrored() -> None:
    writer, mirror = new_pool(), Mirror(ModelStore(), MODEL)
    draft = PoolDraft(writer, np.array([8], np.int64))
    table = np.arange(1)
    draft.copy(np.arange(1), np.array([table.ctypes.data]), Stop())
    labels = Labels(model=MODEL, step=7, token=b"t" * 16, contents=b"some tables")
    record = draft.commit(labels)
    mirror.claim("a test", bytes(16), 0)
    with pytest.raises(NotMirroredError, match=r"step 7 .*: a version without files"):
        mirror.copy(writer, record.info.id, Stop())
    assert mirror.read().added == ()
    writer.close()


def test_a_slow_request_of_a_whole_file_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_file, "UNIT", MIB)
    data, asked, many = random.Random(5).randbytes(9 * MIB), [0], threading.Event()

    def load(name: str, start: int, length: int) -> bytes:
        asked.append(start)
        if len(asked) > 9:
            many.set()
        assert start or many.wait(60), "the others wait for the first one"
        return data[start : start + length]

    whole = ObjectFile("a store", "a", FileObject("a", len(data), digest(data)), load)
    with open(tmp_path / "whole", "w+b") as out:
        whole.write(out.fileno(), "whole", lambda _: None)
    assert (tmp_path / "whole").read_bytes() == data
