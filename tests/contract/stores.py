"""Tests that every ``Store`` of a mirror must pass.

Subclass ``StoreContract`` and implement its abstract methods: how to open your store, and how to
read and write its objects without it. pytest then runs the suite. No test is skipped because of
what a store can do.
"""

from __future__ import annotations

import abc
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

from portus.errors import CorruptionError, StaleError, UsageError
from portus.reach.mirror.store import MissingError, Store

RACERS: Final = 8
CLOCK_S_MAX: Final = 60.0
"""Between two moments of one test."""

_REFUSED_NAMES: Final = (
    *("", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/.b", ".a", "a b", "a%20b"),
    *("a\\b", "a\nb", "ä", "a?b", "a#b", "a~b", "x" * 2000),
)


class StoreContract(abc.ABC):
    """Tests of a ``Store``. Each test gets its own instance of the subclass, and an empty place of
    its own.

    rounds: how often the tests of races repeat them.
    many: how many objects the test of long lists makes.
    """

    rounds = 20
    many = 2100

    @abc.abstractmethod
    def open(self) -> Store:
        """Open the place of this test, which is empty at first. Each call opens it once more. The
        contract closes what it opened."""

    @abc.abstractmethod
    def read_behind(self, name: str) -> bytes | None:
        """Return the bytes of an object without using the store; None if there is no such
        object."""

    @abc.abstractmethod
    def write_behind(self, name: str, data: bytes) -> None:
        """Create or replace an object without using the store."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """The store of this test."""
        store = self.open()
        yield store
        store.close()

    def test_what_was_put_is_there_whole_and_nothing_else(self, store: Store) -> None:
        data = random.Random(1).randbytes(300_000)
        store.put("a/b/c", data)
        assert self.read_behind("a/b/c") == data
        assert store.get("a/b/c") == data
        assert [each.name for each in store.list("")] == ["a/b/c"]

    def test_nothing_may_be_put_and_got(self, store: Store) -> None:
        store.put("empty", b"")
        assert self.read_behind("empty") == store.get("empty") == b""
        assert bytes(store.get_range("empty", 0, 0)) == b""
        assert [each.size for each in store.list("")] == [0]

    def test_a_put_replaces_all_of_an_object(self, store: Store) -> None:
        store.put("a", b"long " * 100)
        store.put("a", b"short")
        assert self.read_behind("a") == store.get("a") == b"short"

    def test_many_bytes_are_put_and_got_as_they_are(self, store: Store) -> None:
        data = random.Random(2).randbytes((18 << 20) + 1)
        store.put("big", data)
        assert self.read_behind("big") == data
        assert store.get("big") == data
        assert bytes(store.get_range("big", 0, len(data))) == data

    def test_what_changed_behind_is_seen(self, store: Store) -> None:
        store.put("a", b"before")
        self.write_behind("a", b"behind")
        self.write_behind("b/c", b"new")
        assert (store.get("a"), store.get("b/c")) == (b"behind", b"new")
        assert [(each.name, each.size) for each in store.list("")] == [("a", 6), ("b/c", 3)]

    def test_ranges_are_exact(self, store: Store) -> None:
        data = random.Random(3).randbytes(100_000)
        store.put("a", data)
        edges = (0, 1, 4095, 4096, 65_536, 99_999, 100_000)
        for start in edges:
            for end in edges:
                if start <= end:
                    assert bytes(store.get_range("a", start, end - start)) == data[start:end]

    def test_an_object_that_ends_too_soon_is_an_error_with_its_name(self, store: Store) -> None:
        store.put("short", b"0123456789")
        for start, length in ((0, 11), (9, 2), (10, 1), (100, 5)):
            with pytest.raises(CorruptionError, match="short"):
                store.get_range("short", start, length)

    def test_what_is_not_there_is_missing(self, store: Store) -> None:
        store.put("a/b", b"x")
        for name in ("b", "a", "a/c", "a/b/c"):
            with pytest.raises(MissingError, match=name):
                store.get(name)
            with pytest.raises(MissingError, match=name):
                store.get_range(name, 0, 1)

    def test_what_is_created_once_stays(self, store: Store) -> None:
        assert store.create("log/1", b"first") is True
        assert store.create("log/1", b"second") is False
        assert store.create("log/1", b"first") is False
        assert self.read_behind("log/1") == store.get("log/1") == b"first"
        store.put("log/2", b"put")
        assert store.create("log/2", b"created") is False
        store.delete(["log/1"])
        assert store.create("log/1", b"again") is True
        assert self.read_behind("log/1") == b"again"

    def test_of_those_who_create_one_name_at_once_one_wins(self) -> None:
        stores = [self.open() for _ in range(RACERS)]
        with ThreadPoolExecutor(RACERS) as racers:
            for round_ in range(self.rounds):
                start = threading.Barrier(RACERS)

                def race(number: int, name: str, start: threading.Barrier = start) -> bool:
                    start.wait()
                    return stores[number].create(name, bytes([number]) * 100)

                name = f"race/{round_}"
                told = list(racers.map(race, range(RACERS), [name] * RACERS))
                assert told.count(True) == 1
                assert self.read_behind(name) == bytes([told.index(True)]) * 100
        for each in stores:
            each.close()

    def test_a_reader_never_gets_a_part_or_a_mixture(self, store: Store) -> None:
        size, other = 1 << 20, self.open()
        store.put("a", b"0" * size)
        ended = threading.Event()

        def replace() -> None:
            for number in range(1, 9):
                other.put("a", bytes([48 + number]) * size)
            ended.set()

        with ThreadPoolExecutor(1) as pool:
            replaced = pool.submit(replace)
            seen = 0
            while not ended.is_set() or not seen:
                data = store.get("a")
                assert data == data[:1] * size
                seen += 1
            replaced.result()
        other.close()

    def test_lists_are_whole_and_in_the_order_of_names(self, store: Store) -> None:
        names = ["a-b/1", "a.b/1", "a/1", "a/b/1", "a/b/2", "a=b/1", "ab/1", "b/1", "A/1", "_/1"]
        for size, name in enumerate(names):
            self.write_behind(name, b"x" * size)
        listed = list(store.list(""))
        assert [each.name for each in listed] == sorted(names)
        assert {each.name: each.size for each in listed} == {
            name: size for size, name in enumerate(names)
        }
        assert [each.name for each in store.list("a/")] == ["a/1", "a/b/1", "a/b/2"]
        assert [each.name for each in store.list("a/b/")] == ["a/b/1", "a/b/2"]
        assert list(store.list("c/")) == list(store.list("a/b/1/")) == []
        for after in [*names, "0", "a", "a/", "a/b", "a/b/", "zz"]:
            expected = sorted(name for name in names if name > after)
            assert [each.name for each in store.list("", after)] == expected, after
        assert [each.name for each in store.list("a/", "a/1")] == ["a/b/1", "a/b/2"]

    def test_whole_segments_alone_are_listed(self, store: Store) -> None:
        for prefix in ("a", "/", "a//", "../"):
            with pytest.raises(UsageError):
                list(store.list(prefix))

    def test_times_are_those_of_one_clock(self, store: Store) -> None:
        store.put("a", b"1")
        store.put("b", b"2")
        first, second = (each.modified for each in store.list(""))
        assert 0 <= second - first + 1 < CLOCK_S_MAX  # to the second, with some
        assert first > 1.7e9

    def test_long_lists_come_in_pages_and_whole(self, store: Store) -> None:
        names = [f"many/{number:06}" for number in range(self.many)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: self.write_behind(name, b""), names))
        assert [each.name for each in store.list("many/")] == names
        assert [each.name for each in store.list("many/", names[1001])] == names[1002:]
        assert next(store.list("many/")).name == names[0]
        store.delete(names[1:])
        assert [each.name for each in store.list("many/")] == names[:1]

    def test_what_is_deleted_is_gone_and_nothing_else(self, store: Store) -> None:
        for name in ("a", "b/1", "b/2", "c"):
            store.put(name, b"x")
        store.delete(["b/1", "missing", "c", "b/none", "b/1"])
        store.delete(["missing"])
        store.delete([])
        assert [each.name for each in store.list("")] == ["a", "b/2"]
        assert self.read_behind("b/1") is None

    def test_names_that_not_every_store_takes_are_refused(self, store: Store) -> None:
        for name in _REFUSED_NAMES:
            with pytest.raises(UsageError):
                store.put(name, b"x")
            with pytest.raises(UsageError):
                store.create(name, b"x")
            with pytest.raises(UsageError):
                store.get(name)
            with pytest.raises(UsageError):
                store.get_range(name, 0, 1)
            with pytest.raises(UsageError):
                store.delete([name])
        assert list(store.list("")) == []

    def test_several_threads_put_and_get_side_by_side(self, store: Store) -> None:
        def there_and_back(number: int) -> bool:
            data = random.Random(number).randbytes(100_000 + number)
            store.put(f"side/{number}", data)
            return store.get(f"side/{number}") == data

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(there_and_back, range(24)))

    def test_a_closed_store_says_so_and_is_closed_again(self) -> None:
        store = self.open()
        store.put("a", b"x")
        store.close()
        store.close()
        with pytest.raises(UsageError, match="closed"):
            store.get("a")
        with pytest.raises(UsageError, match="closed"):
            store.put("a", b"y")
        assert self.read_behind("a") == b"x"

    @pytest.mark.parametrize("size", [0, 1, 16 << 20, (35 << 20) + 7])
    def test_a_stream_becomes_one_object_however_it_is_cut(self, store: Store, size: int) -> None:
        data = random.Random(3).randbytes(size)
        cuts = [data[at : at + (3 << 20)] for at in range(0, size, 3 << 20)]
        store.put_stream("a/big=1.ckpt", iter(cuts), size)
        assert self.read_behind("a/big=1.ckpt") == data
        assert [(each.name, each.size) for each in store.list("")] == [("a/big=1.ckpt", size)]

    @pytest.mark.parametrize("before", [0, 1, (20 << 20)])
    def test_a_stream_that_raises_changes_nothing(self, store: Store, before: int) -> None:
        store.put("a", b"as it was")

        def parts() -> Iterator[bytes]:
            yield bytes(before)
            raise StaleError("it was written to")

        for name in ("a", "b"):
            with pytest.raises(StaleError, match="it was written to"):
                store.put_stream(name, parts(), 1 << 30)
        assert self.read_behind("a") == b"as it was"
        assert self.read_behind("b") is None
        assert [each.name for each in store.list("")] == ["a"]

    @pytest.mark.parametrize("size", [0, 1, (20 << 20) + 7])
    def test_a_stream_changes_nothing_if_another_object_came_meanwhile(
        self, store: Store, size: int
    ) -> None:
        store.put("a", b"as it was")

        def parts() -> Iterator[bytes]:
            yield bytes(size)
            self.write_behind("log/9", b"another's")

        with pytest.raises(StaleError, match="log/9"):
            store.put_stream("a", parts(), size, unless="log/9")
        assert self.read_behind("a") == b"as it was"
        store.put_stream("a", [b"new"], 3, unless="log/8")
        assert self.read_behind("a") == b"new"

    @pytest.mark.parametrize("size", [0, 1, (20 << 20) + 7])
    def test_a_copy_is_an_object_of_its_own(self, store: Store, size: int) -> None:
        data = random.Random(4).randbytes(size)
        store.put_stream("a/last.ckpt", [data], size)
        assert store.copy("a/last.ckpt", "b/before/last.ckpt", size)
        assert self.read_behind("b/before/last.ckpt") == data
        store.put("a/last.ckpt", b"another")
        assert self.read_behind("b/before/last.ckpt") == store.get("b/before/last.ckpt") == data
        store.delete(["a/last.ckpt"])
        assert self.read_behind("b/before/last.ckpt") == data

    def test_nothing_is_copied_of_what_is_not_there(self, store: Store) -> None:
        with pytest.raises(MissingError, match="never"):
            store.copy("never", "b", 1)
        assert list(store.list("")) == []

    def test_a_stream_replaces_all_of_an_object(self, store: Store) -> None:
        store.put_stream("a", [bytes(17 << 20), b"long"], 0)
        store.put_stream("a", [b"short"], 1 << 40)
        assert self.read_behind("a") == store.get("a") == b"short"
