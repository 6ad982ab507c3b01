"""What files do beside the contract: no space, cut files, failing syncs, forks, small limits."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from portus.engine.media.base import PLAIN_FILE, Medium
from portus.engine.media.file_calls import FileSystemTraits
from portus.engine.media.process import Descriptor
from portus.engine.spec import PAGE, Extent
from portus.errors import MediumError, UsageError
from portus.reach.media.file import (
    MAPPED_FILE,
    UNCACHED,
    WRITEBACK_MIN,
    MappedFile,
    PlainFile,
    UncachedFile,
)
from portus.reach.media.local import LocalFiles
from portus.reach.media.space import Memory
from tests.contract.media import assert_raises, load
from tests.page_cache import forget, in_memory
from tests.unit.conftest import SMALL_BYTES, Mount

MIB = 1 << 20
TREE_BYTES = 16 << 10
"""A file system may keep some blocks of the tree that lists the blocks of a file."""


def make(path: Path, size: int, *, mapped: bool = True) -> PlainFile:
    return LocalFiles(mapped=mapped).create(str(path), size)


def free_bytes(directory: Path) -> int:
    os.sync()
    status = os.statvfs(directory)
    return status.f_bfree * status.f_frsize


def fill(directory: Path) -> None:
    """Take what is free there."""
    with open(directory / "filler", "wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(MIB)):
            pass


def run(script: str, *arguments: str) -> str:
    """Run a script in a process of its own; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "ext2"])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_full_file_system_refuses_growth_and_nothing_changes(
    mount: Mount, kind: str, mapped: bool
) -> None:
    directory = mount(kind)
    medium = make(directory / "pool", 5 * MIB + 1, mapped=mapped)
    assert medium.info.kind is (MAPPED_FILE if mapped else PLAIN_FILE)
    medium.store(5 * MIB - 4, b"older")
    medium.persist([Extent(0, 5 * MIB + 1)])
    free, allocated = free_bytes(directory), os.stat(medium.path).st_blocks * 512
    # Far too much; then as much as is said to be free, which on a disk leaves nothing for the
    # blocks that list the blocks, so that the system finds out half-way.
    for size in (SMALL_BYTES * 100, 5 * MIB + 1 + free):
        size += 4096 if kind == "tmpfs" else 0
        with pytest.raises(MediumError) as caught:
            medium.grow(size)
        assert caught.value.errno == errno.ENOSPC
        for part in (medium.path, f"needed {size - 5 * MIB - 1},", "free ", "elsewhere"):
            assert part in str(caught.value)
        assert medium.size == 5 * MIB + 1
        assert os.stat(medium.path).st_size == 5 * MIB + 1
        assert os.stat(medium.path).st_blocks * 512 <= allocated + TREE_BYTES
        assert free_bytes(directory) >= free - TREE_BYTES
        assert load(medium, 5 * MIB - 4, 5) == b"older"
    medium.store(5 * MIB - 4, b"newer")
    medium.grow(6 * MIB)
    assert load(medium, 5 * MIB - 4, 6) == b"newer\0"
    medium.persist([Extent(0, 6 * MIB)])
    medium.close()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "ext2"])
def test_every_granted_byte_can_be_stored_when_others_fill_the_rest(
    mount: Mount, kind: str
) -> None:
    directory = mount(kind)
    medium = make(directory / "pool", 8 * MIB)
    fill(directory)
    assert isinstance(medium, MappedFile)
    ctypes.memset(medium.address(Extent(0, 8 * MIB)), 1, 8 * MIB)
    medium.persist([Extent(0, 8 * MIB)])
    assert Path(medium.path).read_bytes() == b"\1" * 8 * MIB
    medium.close()


def test_what_cannot_fit_is_refused_before_anything_is_written(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(*_: object) -> int:
        raise AssertionError("zeros were written")

    medium = make(mount("ext2") / "pool", MIB)  # ext2 has no fallocate.
    monkeypatch.setattr(os, "pwrite", written)
    with pytest.raises(MediumError, match="No space"):
        medium.grow(2 * SMALL_BYTES)
    with pytest.raises(AssertionError, match="zeros"):
        medium.grow(2 * MIB)
    medium.close()


def test_a_file_that_does_not_fit_leaves_no_name(mount: Mount) -> None:
    directory = mount("tmpfs")
    with pytest.raises(MediumError):
        make(directory / "pool", 2 * SMALL_BYTES)
    assert os.listdir(directory) == []


@pytest.mark.parametrize("mapped", [True, False])
def test_growth_reserves_its_space(directory: Path, mapped: bool) -> None:
    medium = make(directory / "pool", 1, mapped=mapped)
    medium.grow(3 * MIB + 1)
    assert os.stat(medium.path).st_blocks * 512 >= 3 * MIB + 1
    medium.close()


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_cut_by_others_is_an_error_and_no_signal(directory: Path, mapped: bool) -> None:
    medium = make(directory / "pool", 3 * MIB, mapped=mapped)
    reader = LocalFiles().open(medium.path, writable=False)
    medium.store(0, b"left")
    os.truncate(medium.path, MIB)
    text = f"{medium.path}.*up to {3 * MIB}, found the end at {MIB}.*truncated"
    for each in (medium, reader):
        with pytest.raises(MediumError, match=text):
            each.load(2 * MIB, memoryview(bytearray(MIB)))
        with pytest.raises(MediumError, match=text):
            each.load(0, memoryview(bytearray(3 * MIB)))
        assert load(each, 0, 4) == b"left"
    with pytest.raises(MediumError, match="truncated"):
        medium.store(2 * MIB, b"x")
    if isinstance(medium, MappedFile):
        with pytest.raises(MediumError, match="truncated"):
            medium.address(Extent(2 * MIB, 1))
    assert os.stat(medium.path).st_size == MIB
    medium.close()
    reader.close()


def test_a_failed_sync_of_a_growth_poisons(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    medium = make(directory / "pool", 100)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(MediumError, match="growth"):
            medium.grow(200)
    assert medium.size >= 100
    with pytest.raises(MediumError, match=medium.path):
        medium.grow(200)
    assert load(medium, 0, 100) == bytes(100)
    medium.close()


def test_a_failed_persist_keeps_its_errno(directory: Path) -> None:
    def fail(number: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    medium = LocalFiles(sync=fail).create(str(directory / "pool"), 100)
    with pytest.raises(MediumError, match="raise the quota") as caught:
        medium.persist([Extent(0, 1)])
    assert caught.value.errno == errno.EDQUOT
    assert isinstance(caught.value.__cause__, OSError)
    medium.close()


def test_short_reads_and_writes_are_carried_on(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, preadv = os.pwrite, os.preadv

    def short_write(number: int, data: memoryview, offset: int) -> int:
        return pwrite(number, data[:1000], offset)

    def short_read(number: int, targets: Sequence[memoryview], offset: int) -> int:
        return preadv(number, [targets[0][:999]], offset)

    monkeypatch.setattr(os, "pwrite", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    medium, data = make(directory / "pool", 10_000, mapped=False), os.urandom(9000)
    medium.store(7, data)
    assert load(medium, 7, 9000) == data
    medium.close()


def test_a_reader_works_where_there_is_no_preadv(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "pool").write_bytes(b"0123456789")
    monkeypatch.delattr(os, "preadv")
    medium = LocalFiles().open(str(directory / "pool"), writable=False)
    assert load(medium, 3, 5) == b"34567"
    with pytest.raises(UsageError):
        load(medium, 9, 2)
    medium.close()


def test_much_is_reserved_too(tmp_path: Path) -> None:
    medium = make(tmp_path / "pool", 600 * MIB + 1)  # More than one fallocate.
    assert os.stat(medium.path).st_size == medium.size == 600 * MIB + 1
    assert os.stat(medium.path).st_blocks * 512 > 600 * MIB
    medium.close()


def test_an_allocation_ends_though_signals_keep_coming(directory: Path) -> None:
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        medium = make(directory / "pool", 64 * MIB)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert os.stat(medium.path).st_blocks * 512 >= 64 * MIB
    medium.close()


IN_A_FORKED_CHILD = """
import os, sys
from portus.errors import UsageError
from portus.reach.media.local import LocalFiles
from portus.reach.media.space import Memory
from portus.engine.media.process import Descriptor
from portus.engine.spec import Extent

files, path = LocalFiles(mapped=sys.argv[2] == "True"), sys.argv[1]
media = [files.create(path, 5000), files.open(path, writable=False), Memory(5000)]
closed = files.open(path, writable=False)
closed.close()
opened = lambda: {os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
assert path in opened() and (path in open("/proc/self/maps").read()) == files._mapped
if os.fork() == 0:
    assert path not in opened()
    assert path not in open("/proc/self/maps").read()
    for medium in media:
        calls = [
            lambda: medium.store(0, b"x"),
            lambda: medium.load(0, memoryview(bytearray(1))),
            lambda: medium.grow(9000),
            lambda: medium.persist([Extent(0, 1)]),
        ]
        if hasattr(medium, "address"):
            calls.append(lambda: medium.address(Extent(0, 1)))
        for call in calls:
            try:
                call()
            except UsageError as error:
                assert f"opened in process {os.getppid()}" in str(error), error
            else:
                raise AssertionError(medium)
        medium.close()
        medium.close()
    own = files.open(path, writable=True)
    own.store(0, b"child")
    own.close()
    os._exit(0)
assert os.wait()[1] == 0
found = bytearray(5)
for medium in media[:2]:
    medium.load(0, memoryview(found))
    assert found == b"child"
media[0].store(0, b"x")
media[2].store(0, b"x")
"""


@pytest.mark.parametrize("mapped", [True, False])
def test_a_forked_child_has_neither_descriptor_nor_mapping(directory: Path, mapped: bool) -> None:
    run(IN_A_FORKED_CHILD, str(directory / "pool"), str(mapped))


FORKS_WHILE_THREADS_OPEN = """
import os, sys, threading
from portus.reach.media.local import LocalFiles

files, path = LocalFiles(), sys.argv[1]
files.create(path, 5000).close()
stop = threading.Event()

def work():
    while not stop.is_set():
        medium = files.open(path, writable=True)
        medium.grow(medium.size + 1)
        medium.close()

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
bad = 0
for _ in range(150):
    child = os.fork()
    if child == 0:
        opened = {os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
        os._exit(path in opened or path in open("/proc/self/maps").read())
    bad += os.waitpid(child, 0)[1] != 0
stop.set()
for thread in threads:
    thread.join()
print(bad)
"""


@pytest.mark.long
def test_no_fork_falls_between_open_and_registration(directory: Path) -> None:
    assert run(FORKS_WHILE_THREADS_OPEN, str(directory / "pool")) == "0\n"


UNDER_A_LIMIT = """
import logging, os, resource, sys
from portus.errors import MediumError
from portus.reach.media.local import LocalFiles
from portus.engine.spec import Extent

logging.basicConfig(stream=sys.stdout, format="%(message)s")
used = lambda: int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before, given = used(), int(sys.argv[2])
limit = before + given
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
medium = LocalFiles().create(sys.argv[1], 64 << 20)
print(medium.info.kind.name)
assert used() - before < max(limit // 8, 64 << 20) + (32 << 20)
medium.store((64 << 20) - 4, b"kept")
try:
    medium.grow(320 << 20)
except MediumError as error:
    assert "ulimit -v" in str(error)
    assert medium.size == os.stat(sys.argv[1]).st_size == 64 << 20
    print("not grown")
medium.store(0, b"works")
found = bytearray(4)
medium.load((64 << 20) - 4, memoryview(found))
assert found == b"kept"
medium.persist([Extent(0, 10)])
"""


def test_addresses_are_taken_sparingly_under_a_limit(directory: Path) -> None:
    path = directory / "pool"
    assert run(UNDER_A_LIMIT, str(path), str(8 << 30)) == "file, mapped\n"
    path.unlink()
    assert run(UNDER_A_LIMIT, str(path), str(128 * MIB)) == "file, mapped\nnot grown\n"


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_that_was_deleted_persists_nothing_any_more(directory: Path, mapped: bool) -> None:
    path = directory / "pool"
    medium = make(path, 10, mapped=mapped)
    medium.store(0, b"kept")
    medium.persist([Extent(0, 4)])
    path.rename(directory / "moved")
    medium.persist([Extent(0, 4)])
    (directory / "moved").rename(path)
    path.unlink()
    path.write_bytes(b"another one")
    with pytest.raises(MediumError, match="the file was deleted"):
        medium.persist([Extent(0, 4)])
    with pytest.raises(MediumError, match="accepts no more writes"):
        medium.store(0, b"lost")
    assert load(medium, 0, 4) == b"kept"
    medium.close()


def test_memory_that_the_system_refuses_is_an_error() -> None:
    medium = Memory(10)
    medium.store(0, b"kept")
    with pytest.raises(MediumError):
        medium.grow(1 << 60)
    assert medium.size == 10
    assert load(medium, 0, 4) == b"kept"
    medium.store(4, b"more")
    medium.close()


def test_addresses_of_a_closed_medium_are_given_back(directory: Path) -> None:
    for _ in range(100):  # 100 of the largest ranges are more than a process can have.
        medium: Medium = make(directory / "pool", 10)
        medium.close()
        os.unlink(directory / "pool")
        medium = Memory(10)
        medium.close()


def test_many_media_at_once_share_the_addresses(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "portus"):
        media = [Memory(10) for _ in range(60)]
    for medium in media:
        medium.grow(MIB)
        medium.close()


def test_concurrent_growths_end_with_the_largest(directory: Path) -> None:
    for round_ in range(20):
        medium = make(directory / f"pool {round_}", 10)
        assert isinstance(medium, MappedFile)
        begin = threading.Barrier(8)

        def grow(index: int, medium: PlainFile = medium, begin: threading.Barrier = begin) -> None:
            begin.wait()
            medium.grow(index * MIB // 8)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(grow, range(1, 9)))
        assert medium.size == os.stat(medium.path).st_size == MIB
        ctypes.memset(medium.address(Extent(0, MIB)), round_, MIB)
        assert Path(medium.path).read_bytes() == bytes([round_]) * MIB
        medium.close()


def _resident(address: int, length: int) -> int:
    """Bytes of pages that this process has mapped there. The system may take some at any time."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = np.frombuffer(pagemap.read(length // PAGE * 8), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(63))) * PAGE


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="no pagemap")
def test_write_back_lets_go_of_the_pages_and_who_expects_them_has_them_at_once(
    directory: Path,
) -> None:
    size, rounds = 2 * WRITEBACK_MIN, 3
    medium = MappedFile(
        Descriptor(str(directory / "pool"), os.O_RDWR | os.O_CREAT),
        FileSystemTraits(volatile=False, early=True),
    )
    try:
        medium.grow(size)
        address = medium.address(Extent(0, size))
        for value in range(1, rounds + 1):
            half = size // 2
            for start in (0, half):
                ctypes.memset(address + start, value, half)
                assert _resident(address + start, half)
                medium.wrote(Extent(start, half))
                assert not _resident(address + start, half)
            medium.expect(Extent(1, half))
            assert _resident(address, size) >= half + PAGE  # a system may map more around it
            assert ctypes.string_at(address, size) == bytes([value]) * size
            assert load(medium, 0, size) == bytes([value]) * size
        medium.persist([Extent(0, size)])
    finally:
        medium.close()
    assert (directory / "pool").read_bytes() == bytes([rounds]) * size


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="no pagemap")
def test_who_expects_what_was_discarded_has_it_at_once(directory: Path) -> None:
    size = 4 * MIB
    medium = MappedFile(
        Descriptor(str(directory / "pool"), os.O_RDWR | os.O_CREAT),
        FileSystemTraits(volatile=False, early=False),
    )
    with closing(medium):
        medium.grow(size)
        whole = Extent(0, size)
        for _ in range(2):
            medium.expect(whole)
            assert _resident(medium.address(whole), size) == size
            if not medium.discard([whole]):
                pytest.skip("this file system has no holes")
            medium.fill([whole])
            assert _resident(medium.address(whole), size) == 0


def test_a_closed_file_says_so(directory: Path) -> None:
    medium = make(directory / "pool", 10)
    medium.close()
    assert_raises(UsageError, lambda: medium.size, match=f"{medium.path}: used after it was closed")


@pytest.mark.parametrize("mapped", [False, True])
def test_what_is_discarded_takes_no_space_and_all_else_stays(mount: Mount, mapped: bool) -> None:
    path = mount("ext4") / "pool"
    files = LocalFiles(mapped=mapped)
    with closing(files.create(str(path), 4 * MIB)) as medium:
        medium.store(0, b"\1" * (4 * MIB))
        medium.persist([Extent(0, 4 * MIB)])
        taken = path.stat().st_blocks
        assert medium.discard([Extent(MIB, MIB), Extent(3 * MIB, MIB)]) == 2 * MIB
        assert path.stat().st_blocks == taken - 2 * MIB // 512
        assert path.stat().st_size == 4 * MIB
        with pytest.raises(UsageError, match="outside"):
            medium.discard([Extent(4 * MIB, 4096)])
    assert path.read_bytes() == (b"\1" * MIB + bytes(MIB)) * 2
    with closing(files.open(str(path), writable=True)) as medium:
        medium.store(MIB, b"\2" * MIB)
        medium.persist([Extent(MIB, MIB)])
    assert path.read_bytes() == b"\1" * MIB + b"\2" * MIB + b"\1" * MIB + bytes(MIB)


# Past the pages that the system keeps.


@pytest.fixture
def uncached(tmp_path: Path) -> Iterator[tuple[UncachedFile, bytes]]:
    """A file that is read so, and what is in it."""
    data = os.urandom(3 * UNCACHED + 4096)
    path = tmp_path / "file"
    path.write_bytes(data)
    opened = LocalFiles().open_uncached(str(path))
    try:
        if not isinstance(opened, UncachedFile):
            pytest.skip("this file system has no O_DIRECT")
        yield opened, data
    finally:
        opened.close()


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, UNCACHED - 1, UNCACHED + 100])
@pytest.mark.parametrize("length", [0, 1, 4096, 4097, UNCACHED, UNCACHED + 1, 2 * UNCACHED])
def test_what_is_read_past_the_pages_is_what_is_there(
    uncached: tuple[UncachedFile, bytes], offset: int, length: int
) -> None:
    medium, data = uncached
    assert load(medium, offset, length) == data[offset : offset + length]
    end = len(data) - length
    assert load(medium, end, length) == data[end:]


def test_what_is_read_past_the_pages_comes_from_the_disk(
    uncached: tuple[UncachedFile, bytes],
) -> None:
    medium, data = uncached
    with open(medium.path, "rb", buffering=0) as file:
        forget(file)
        assert load(medium, 0, len(data)) == data
        assert not in_memory(file)[0], "nor does it take the room of what others keep there"
        with closing(LocalFiles().open(medium.path, writable=False)) as plain:
            assert load(plain, 0, len(data)) == data
        assert in_memory(file)[UNCACHED // mmap.PAGESIZE]


def test_what_was_stored_just_before_is_read_past_the_pages(
    uncached: tuple[UncachedFile, bytes],
) -> None:
    medium, data = uncached
    with closing(LocalFiles().open(medium.path, writable=True)) as writer:
        writer.store(5000, b"new")
        assert load(medium, 4999, 5) == data[4999:5000] + b"new" + data[5003:5004]


def test_a_file_in_memory_is_opened_as_any() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = os.path.join(directory, "file")
        Path(path).write_bytes(b"x" * 5000)
        with closing(LocalFiles().open_uncached(path)) as opened:
            assert load(opened, 4000, 1000) == b"x" * 1000


def test_what_is_no_file_is_refused_as_ever(tmp_path: Path) -> None:
    with pytest.raises(MediumError):
        LocalFiles().open_uncached(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="a directory"):
        LocalFiles().open_uncached(str(tmp_path))


CLOSED_STREAMS = """
import os, sys
from portus.reach.media.local import LocalFiles

medium = LocalFiles(mapped=sys.argv[2] == "mapped").create(sys.argv[1], 1 << 16)
medium.store(0, b"kept")
for number in (1, 2):
    try:
        os.write(number, b"what a library in C prints")
    except OSError:
        pass
medium.close()
"""


@pytest.mark.parametrize("how", ["mapped", "plain"])
def test_no_pool_has_the_number_of_a_standard_stream(tmp_path: Path, how: str) -> None:
    pool = tmp_path / "pool"
    script = '"$0" -c "$1" "$2" "$3" <&- >&- 2>&-'
    subprocess.run(
        ["/bin/sh", "-c", script, sys.executable, CLOSED_STREAMS, pool, how], timeout=60, check=True
    )
    assert pool.read_bytes()[:26] == b"kept" + bytes(22)
