from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from portus.engine.format.checksum import UNIT
from portus.engine.media import write_watch
from portus.engine.pipeline.audit import WATCHED_MIN, AuditMethod
from portus.engine.pipeline.run import Save
from portus.engine.settings.keep import Keep
from portus.engine.spec import PAGE, Extent
from portus.errors import AbandonedError, MediumError
from portus.reach.format.layout import DATA_START
from portus.reach.media.space import Memory
from portus.reach.versions.pool_draft import pack, place
from tests.unit.pipeline.bench import WAYS, Bench, Gate, needs_kernel, places


def _arrays(seed: int, sizes: Sequence[int] = (100, 0, 70_000, 5 << 20)) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, np.uint8) for size in sizes]


@pytest.mark.parametrize("late", [True, False])
def test_a_version_holds_the_bytes_of_its_sources(late: bool) -> None:
    bench, arrays = Bench(), _arrays(1)
    save = bench.run(arrays, late=late)
    assert bench.holds(save) == [array.tobytes() for array in arrays]
    assert save.stats.copied_bytes == save.stats.state_bytes == sum(a.nbytes for a in arrays)


def test_the_owner_is_told_once_that_a_save_has_ended() -> None:
    bench, arrays = Bench(), _arrays(1)
    save = bench.run(arrays)
    save.fail(ValueError())
    assert bench.ended == [save]
    assert save.error is None
    failed = bench.save(arrays)
    failed.fail(MediumError("full"))
    failed.run()
    failed.fail(ValueError())
    assert bench.ended == [save, failed]
    assert isinstance(failed.error, MediumError)


def test_the_owner_is_told_of_a_save_whose_draft_cannot_be_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else whoever waits for it, and all behind it, would wait for ever."""
    bench = Bench()
    save = bench.save(_arrays(1))

    def release() -> None:
        raise MediumError("gone")

    monkeypatch.setattr(save.draft, "release", release)
    with pytest.raises(MediumError, match="gone"):
        save.run()
    save.fail(ValueError())  # as its queue does
    assert bench.ended == [save]
    assert isinstance(save.error, MediumError)
    save.join()


def test_what_is_not_late_is_copied_before_the_call_returns() -> None:
    bench, arrays = Bench(), _arrays(1)
    save = bench.save(arrays, late=False)
    save.copy_now()
    expected = [array.tobytes() for array in arrays]
    for array in arrays:
        array[:] = 0
    save.run()
    assert bench.holds(save) == expected


def test_storages_go_round_what_is_taken_in_fragments() -> None:
    bench = Bench(Memory(DATA_START + 256 * PAGE))
    taken = [bench.pool.reserve(PAGE, contiguous=True) for _ in range(256)]
    for index in range(0, 200, 2):
        bench.pool.release(taken[index])
    arrays = _arrays(1, (PAGE * 30, 100, PAGE * 20 + 5, 70_001))
    save = bench.run(arrays)
    assert bench.holds(save) == [array.tobytes() for array in arrays]
    record = bench.pool.record(next(bench.pool.catalogue().entries()))
    assert len(record.extents) > len(arrays), "some storage has several extents"


def test_unchanged_storages_are_shared_and_not_copied() -> None:
    bench, arrays = Bench(), _arrays(1)
    bench.run(arrays, late=False)
    arrays[0][:] = 7
    second = bench.run(arrays, 1, late=False)
    assert bench.holds(second) == [array.tobytes() for array in arrays]
    assert second.stats.copied_bytes == arrays[0].nbytes
    assert second.stats.shared_bytes == second.stats.state_bytes - arrays[0].nbytes


def test_a_late_storage_is_shared_once_it_was_found_unchanged() -> None:
    bench, arrays = Bench(), _arrays(1)
    shared = [bench.run(arrays, step).stats.shared_bytes for step in range(3)]
    assert shared == [0, 0, sum(array.nbytes for array in arrays)]


def test_shared_bytes_outlive_the_version_that_copied_them() -> None:
    bench, arrays = Bench(), _arrays(1)
    bench.keep = Keep(last=1)
    first = bench.run(arrays, late=False)
    for step in range(1, 8):
        arrays[0][:] = step
        newest = bench.run(arrays, step, late=False)
    assert first.result(0).id not in bench.pool.catalogue().ids()
    assert bench.holds(newest) == [array.tobytes() for array in arrays]


def test_shared_bytes_that_rotted_are_not_shared_again() -> None:
    bench, arrays = Bench(), _arrays(1)
    first = bench.run(arrays, late=False)
    record = bench.pool.record(bench.pool.catalogue().entries().__next__())
    extent = record.storage_extents(3)[0]
    bench.medium.store(extent.offset + 1000, b"rot")
    second = bench.run(arrays, 1, late=False)
    assert bench.holds(second) == [array.tobytes() for array in arrays]
    assert bench.holds(first) != bench.holds(second)


def test_a_shared_storage_is_copied_afresh_in_the_end() -> None:
    bench, arrays = Bench(), _arrays(1)
    copied = [bench.run(arrays, step, late=False).stats.copied_bytes for step in range(70)]
    assert copied[0] > 0
    assert sum(each > 0 for each in copied) == 2, "once at first, once refreshed"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", [0, 1 << 20, (5 << 20) - 1])
def test_the_audit_voids_a_version_whose_source_changed_before_it_was_copied(
    where: int, way: AuditMethod
) -> None:
    bench, arrays = Bench(), _arrays(1)
    bench.run(arrays)
    save = bench.save(arrays, 1, audit=way)
    save.copy_now()
    arrays[3][where] ^= 1
    save.run()
    with pytest.raises(AbandonedError, match="changed while being saved"):
        save.result(0)
    assert bench.guilty == [arrays[3].ctypes.data]
    assert [entry.info.step for entry in bench.pool.catalogue().entries()] == [0]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_and_written_back_around_the_copy_is_found(way: AuditMethod) -> None:
    """Averaged weights that are swapped in for validation: the source looks as it did."""
    medium = Gate(DATA_START)
    bench, arrays = Bench(medium), _arrays(1, [5 << 20, 5 << 20])
    save = bench.save(arrays, 1, audit=way)
    save.copy_now()
    own = arrays[0].copy()
    stores = itertools.count()

    def put_back_behind_the_copy() -> None:
        if next(stores) == 10:  # the second array is being stored
            arrays[0][:] = own

    medium.on_store = put_back_behind_the_copy
    arrays[0][:] += 1
    save.run()
    with pytest.raises(AbandonedError):
        save.result(0)
    assert bench.guilty == [arrays[0].ctypes.data]


@pytest.mark.parametrize("way", WAYS[:2])
def test_one_byte_anywhere_is_found_by_an_exact_audit(way: AuditMethod, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bench, arrays = Bench(), _arrays(1, [100, 5000, 3 << 20])
    for step in range(40):
        save = bench.save(arrays, step, audit=way)
        save.copy_now()
        array = arrays[step % 3]
        array[rng.integers(len(array))] ^= 1 << int(rng.integers(8))
        save.run()
        with pytest.raises(AbandonedError):
            save.result(0)
    assert len(bench.guilty) == 40


@pytest.mark.parametrize("way", WAYS)
def test_neighbours_in_the_same_pages_may_be_written(way: AuditMethod, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bench = Bench(Memory(DATA_START + (32 << 20)))
    for step in range(20):
        around = rng.integers(0, 256, 5 << 20, np.uint8)
        start, length = int(rng.integers(1, 5000)), int(rng.integers(2 << 20, 4 << 20))
        inside = around[start : start + length]
        save = bench.save([inside], step, audit=way)
        save.copy_now()
        around[:start] += 1
        around[start + length :] += 1
        save.run()
        assert bench.holds(save) == [inside.tobytes()]


@pytest.mark.long
@needs_kernel
def test_the_kernel_is_asked_about_big_storages_and_hashes_tell_of_the_others() -> None:
    sizes = [*[1000] * 50, UNIT + 5000, WATCHED_MIN, 2 * UNIT + 1, 0, 7]
    bench, arrays = Bench(Memory(DATA_START + 8 * UNIT)), _arrays(1, sizes)
    save = bench.run(arrays, audit=AuditMethod.KERNEL)
    assert bench.holds(save) == [array.tobytes() for array in arrays]
    for index in range(len(sizes)):
        if sizes[index]:
            save = bench.save(arrays, 1, audit=AuditMethod.KERNEL)
            save.copy_now()
            arrays[index][sizes[index] // 2] ^= 1
            save.run()
            assert bench.guilty.pop() == arrays[index].ctypes.data
            assert not bench.guilty


@needs_kernel
def test_a_save_that_failed_watches_nothing_any_more() -> None:
    bench, arrays = Bench(), _arrays(1)
    ends: list[Callable[[Save], object]] = [
        lambda save: save.fail(KeyboardInterrupt()),
        lambda save: save.release(0),
    ]
    for end in ends:
        save = bench.save(arrays, 0, audit=AuditMethod.KERNEL)
        save.copy_now()
        assert write_watch.watch(*places(arrays[3:])) is None, "one at a time"
        end(save)
        save.run()
        again = write_watch.watch(*places(arrays[3:]))
        assert again is not None
        again.close()


@pytest.mark.long
def test_a_save_given_up_after_its_last_byte_was_copied_never_commits() -> None:
    medium = Gate(DATA_START)
    bench, arrays = Bench(medium), _arrays(1, [100])
    save = bench.save(arrays)
    save.copy_now()
    released: list[bool] = []
    medium.on_store = lambda: released.append(save.release(0))
    save.run()
    assert released == [False], "one store has all"
    with pytest.raises(AbandonedError, match="fence_timeout"):
        save.result(0)
    assert not list(bench.pool.catalogue().entries())


def test_without_an_audit_such_a_change_is_not_found() -> None:
    bench, arrays = Bench(), _arrays(1)
    save = bench.save(arrays)
    save.copy_now()
    arrays[3][:] += 1
    save.run()
    save.result(0)


def test_release_waits_for_the_copy_and_not_for_the_commit() -> None:
    medium = Gate(DATA_START)
    bench = Bench(medium)
    save = bench.save(_arrays(1))
    save.copy_now()
    medium.opened.clear()
    worker = threading.Thread(target=save.run)
    worker.start()
    assert not save.over
    threading.Timer(0.1, medium.opened.set).start()
    assert save.release(10)
    worker.join()
    save.result(0)


@pytest.mark.long
def test_a_save_that_ran_out_of_time_never_commits() -> None:
    medium = Gate(DATA_START)
    bench, arrays = Bench(medium), _arrays(1)
    first = bench.run(arrays)
    save = bench.save(arrays, 1)
    save.copy_now()
    medium.opened.clear()
    worker = threading.Thread(target=save.run)
    worker.start()
    assert not save.release(0.05)
    medium.opened.set()
    worker.join()
    with pytest.raises(AbandonedError, match=r"fence_timeout of 0\.05 s"):
        save.result(0)
    assert [entry.info for entry in bench.pool.catalogue().entries()] == [first.result(0)]
    free = bench.pool.free_bytes()
    bench.pool.release(bench.pool.reserve(free))


def test_a_failed_save_gives_its_space_back() -> None:
    bench, arrays = Bench(), _arrays(1)
    bench.run(arrays)
    bench.run(arrays, 1)
    free = bench.pool.free_bytes()
    save = bench.save(arrays, 2)
    save.copy_now()
    save.fail(KeyboardInterrupt())
    assert bench.pool.free_bytes() == free


def test_no_space_fails_the_save_and_no_other() -> None:
    bench, arrays = Bench(), _arrays(1)
    first = bench.run(arrays)
    bench.pool.max_bytes = bench.medium.size
    save = bench.save(_arrays(2, (64 << 20,)), 1)
    save.copy_now()
    save.run()
    with pytest.raises(MediumError, match="max_bytes"):
        save.result(0)
    assert bench.holds(first) == [array.tobytes() for array in arrays]


def test_wait_with_a_time_out_says_so_and_goes_on() -> None:
    bench = Bench()
    save = bench.save(_arrays(1))
    with pytest.raises(TimeoutError):
        save.result(0.01)
    save.copy_now()
    save.run()
    save.result(0)


def test_packed_storages_do_not_overlap_and_big_ones_start_pages() -> None:
    lengths = np.array([5, 0, 64 << 10, 64, 100_000, 65], np.int64)
    offsets, size = pack(lengths)
    spans = sorted((int(o), int(o + n)) for o, n in zip(offsets, lengths, strict=True) if n)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= size
    assert offsets[2] % PAGE == offsets[4] % PAGE == 0
    assert all(offset % 64 == 0 for offset in offsets.tolist())


def test_places_in_split_room_add_up() -> None:
    lengths = np.array([PAGE * 2, 100, 0], np.int64)
    offsets, size = pack(lengths)
    room = [Extent(10 * PAGE, PAGE), Extent(50 * PAGE, size)]
    rows, counts = place(offsets, lengths, room)
    assert counts.tolist() == [2, 1, 0], "the first does not fit in the first run"
    lengths = np.array([PAGE * 20], np.int64)
    rows, counts = place(*pack(lengths)[:1], lengths, [Extent(PAGE * 8, PAGE * 5),
                          Extent(PAGE * 40, PAGE * 15)])  # fmt: skip
    assert counts.tolist() == [2]
    assert rows["length"].tolist() == [PAGE * 5, PAGE * 15]


def test_the_sources_are_let_go_as_soon_as_they_are_copied() -> None:
    bench = Bench()
    for late in (True, False):
        arrays = _arrays(1)
        watched = weakref.ref(arrays[3])
        save = bench.run(arrays, late=late)
        del arrays
        assert watched() is None
        save.result(0)


def test_the_sources_of_a_failed_save_are_let_go() -> None:
    bench, arrays = Bench(), _arrays(1)
    watched = weakref.ref(arrays[3])
    save = bench.save(arrays)
    save.copy_now()
    save.fail(RuntimeError("broken"))
    del arrays
    assert watched() is None
    assert save.over
