"""Tests that every ``FileSystem`` must pass: the real one, and the simulated one that crashes."""

from __future__ import annotations

import abc
import errno
from collections.abc import Callable

import pytest

from portus.engine.spec import PAGE, Extent
from portus.errors import MediumError, UsageError
from portus.reach.media.pool import FileStatus, FileSystem
from tests.contract.media import SIZE, assert_raises, load


class FilesContract(abc.ABC):
    """Tests of a ``FileSystem``: what it does to the names of files, without crashes."""

    @abc.abstractmethod
    def files(self) -> FileSystem:
        """Return the ``FileSystem`` under test; always the same object within one test."""

    @abc.abstractmethod
    def directory(self) -> str:
        """Return the path of an empty directory, without a slash at its end; always the same
        within one test."""

    @abc.abstractmethod
    def read_behind(self, path: str) -> bytes | None:
        """Return all bytes of the file at ``path`` without using ``files()``; None if there is no
        file."""

    @abc.abstractmethod
    def write_behind(self, path: str, data: bytes) -> None:
        """Write a new file with ``data`` at ``path`` without using ``files()``."""

    def path(self, name: str) -> str:
        """Return the path of ``name`` in the directory."""
        return f"{self.directory()}/{name}"

    def status(self, name: str) -> FileStatus:
        """Return what ``files()`` says of a file that is there."""
        found = self.files().status(self.path(name))
        assert found is not None
        return found

    def test_a_created_file_is_zero_and_there(self) -> None:
        medium = self.files().create(self.path("a"), SIZE + 1)
        assert medium.size == SIZE + 1
        assert medium.info.writable
        assert medium.info.name == self.path("a")
        medium.persist([Extent(0, SIZE + 1)])
        medium.close()
        self.files().sync(self.directory())
        assert self.read_behind(self.path("a")) == bytes(SIZE + 1)
        assert self.files().entries(self.directory()) == ["a"]

    def test_create_replaces_nothing(self) -> None:
        self.write_behind(self.path("a"), b"old")
        assert_errno(errno.EEXIST, lambda: self.files().create(self.path("a"), 10))
        assert self.read_behind(self.path("a")) == b"old"

    def test_an_opened_file_holds_what_was_there(self) -> None:
        self.write_behind(self.path("a"), b"0123456789")
        for writable in (False, True):
            medium = self.files().open(self.path("a"), writable=writable)
            assert medium.size == 10
            assert medium.info.writable == writable
            assert load(medium, 3, 4) == b"3456"
            medium.close()

    def test_what_a_writer_stored_stays_in_the_file(self) -> None:
        self.write_behind(self.path("a"), b"0123456789")
        medium = self.files().open(self.path("a"), writable=True)
        medium.store(3, b"abc")
        medium.grow(12)
        medium.persist([Extent(0, 12)])
        medium.close()
        assert self.read_behind(self.path("a")) == b"012abc6789\0\0"

    def test_a_reader_changes_nothing(self) -> None:
        self.write_behind(self.path("a"), b"0123456789")
        medium = self.files().open(self.path("a"), writable=False)
        assert_raises(
            UsageError,
            lambda: medium.store(0, b"x"),
            lambda: medium.grow(20),
            lambda: medium.persist([Extent(0, 1)]),
        )
        medium.close()
        assert self.read_behind(self.path("a")) == b"0123456789"

    def test_a_reader_sees_stores_and_growth(self) -> None:
        writer = self.files().create(self.path("a"), 10)
        reader = self.files().open(self.path("a"), writable=False)
        writer.store(0, b"new")
        assert load(reader, 0, 4) == b"new\0"
        writer.grow(PAGE * 2)
        writer.store(PAGE, b"newer")
        assert reader.size == PAGE * 2
        assert load(reader, PAGE, 5) == b"newer"
        reader.close()
        writer.close()

    def test_a_missing_file_is_an_error_with_its_errno(self) -> None:
        missing = self.path("missing")
        assert_errno(errno.ENOENT, lambda: self.files().open(missing, writable=False))
        assert_errno(errno.ENOENT, lambda: self.files().open(missing, writable=True))
        assert_errno(errno.ENOENT, lambda: self.files().link(missing, self.path("b")))
        assert_errno(errno.ENOENT, lambda: self.files().replace(missing, self.path("b")))
        assert self.files().entries(self.directory()) == []

    def test_a_linked_file_has_two_names(self) -> None:
        self.write_behind(self.path("a"), b"data")
        self.files().link(self.path("a"), self.path("b"))
        first, second = self.status("a"), self.status("b")
        assert first.identity == second.identity
        assert first.links == second.links == 2
        self.files().remove(self.path("a"))
        assert self.read_behind(self.path("b")) == b"data"
        assert self.status("b").links == 1

    def test_link_replaces_nothing(self) -> None:
        self.write_behind(self.path("a"), b"data")
        self.write_behind(self.path("b"), b"other")
        assert_errno(errno.EEXIST, lambda: self.files().link(self.path("a"), self.path("b")))
        assert self.read_behind(self.path("b")) == b"other"

    def test_replace_takes_the_place_of_what_was_there(self) -> None:
        self.write_behind(self.path("a"), b"new")
        self.write_behind(self.path("b"), b"old")
        identity = self.status("a").identity
        self.files().replace(self.path("a"), self.path("b"))
        assert self.read_behind(self.path("a")) is None
        assert self.read_behind(self.path("b")) == b"new"
        assert self.status("b").identity == identity

    def test_remove_takes_the_name_and_is_content_without(self) -> None:
        self.write_behind(self.path("a"), b"data")
        self.files().remove(self.path("a"))
        self.files().remove(self.path("a"))
        assert self.read_behind(self.path("a")) is None

    def test_an_open_file_outlives_its_name(self) -> None:
        medium = self.files().create(self.path("a"), 10)
        medium.store(0, b"data")
        self.files().replace(self.path("a"), self.path("b"))
        medium.store(4, b"more")
        assert self.read_behind(self.path("b")) == b"datamore\0\0"
        medium.persist([Extent(0, 10)])
        self.files().remove(self.path("b"))
        assert load(medium, 0, 8) == b"datamore"
        medium.close()

    def test_entries_are_sorted_and_none_without_a_directory(self) -> None:
        for name in ("b", ".hidden", "a"):
            self.write_behind(self.path(name), b"")
        assert self.files().entries(self.directory()) == [".hidden", "a", "b"]
        assert self.files().entries(self.path("missing")) == []

    def test_status_tells_size_and_time_or_that_nothing_is_there(self) -> None:
        assert self.files().status(self.path("a")) is None
        self.write_behind(self.path("a"), b"12345")
        self.write_behind(self.path("b"), b"")
        first, second = self.status("a"), self.status("b")
        assert (first.size, first.links) == (5, 1)
        assert first.identity != second.identity
        assert 0 < first.time_ns <= second.time_ns


def assert_errno(number: int, call: Callable[[], object]) -> None:
    """Assert that ``call`` raises a ``MediumError`` with this errno."""
    with pytest.raises(MediumError) as caught:
        call()
    assert caught.value.errno == number
