"""Which medium a file gets, what is no file, and what errors leave behind."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from portus.engine.media import linux
from portus.engine.media.addresses import AddressRange
from portus.engine.media.base import PLAIN_FILE, MappedMedium
from portus.engine.spec import Extent
from portus.errors import MediumError, UsageError
from portus.reach.media.file import MAPPED_FILE
from portus.reach.media.local import LocalFiles
from tests.contract.files import assert_errno
from tests.contract.media import load
from tests.unit.conftest import SMALL_BYTES, Mount

F_TYPES = {"ext2": 0xEF53, "ext4": 0xEF53, "tmpfs": 0x01021994, "overlay": 0x794C7630}


def opened() -> list[str]:
    """The descriptors of this process."""
    return sorted(os.listdir("/proc/self/fd"))


@contextmanager
def addresses_left(length: int) -> Iterator[None]:
    """This process can map so many bytes more, for now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + length, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    ("file_system", "mapped", "volatile"),
    [
        ("tmpfs", True, True),
        ("ext2", True, False),
        ("ext4", True, False),
        ("xfs", True, False),
        ("xfs with reflink", False, False),
        ("btrfs", False, False),
        ("overlay", False, False),
    ],
)
def test_the_file_system_chooses_the_medium(
    mount: Mount, file_system: str, mapped: bool, volatile: bool
) -> None:
    directory = mount(file_system)
    for round_ in range(2):
        path = str(directory / "pool")
        medium = (
            LocalFiles().open(path, writable=True) if round_ else LocalFiles().create(path, 5000)
        )
        kind = MAPPED_FILE if mapped else PLAIN_FILE
        assert (medium.info.kind, medium.info.volatile) == (kind, volatile)
        assert isinstance(medium, MappedMedium) == mapped
        medium.store(1, b"stored")
        medium.grow(medium.size + 100_000)
        medium.persist([Extent(0, medium.size)])
        assert load(medium, 0, 8) == b"\0stored\0"
        medium.close()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_holes_are_filled_before_a_file_is_mapped(mount: Mount, kind: str) -> None:
    path = mount(kind) / "pool"
    path.write_bytes(b"data")
    os.truncate(path, 4 << 20)
    medium = LocalFiles().open(str(path), writable=True)
    assert medium.info.kind is MAPPED_FILE
    assert os.stat(path).st_blocks * 512 >= 4 << 20
    assert load(medium, 0, 5) == b"data\0"
    assert medium.size == 4 << 20
    medium.close()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "ext2"])
def test_a_file_whose_holes_cannot_be_filled_is_not_mapped(
    mount: Mount, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = mount(kind) / "pool"
    path.write_bytes(b"data")
    os.truncate(path, SMALL_BYTES * 2)
    medium = LocalFiles().open(str(path), writable=True)
    assert medium.info.kind is PLAIN_FILE
    assert f"{path}: cannot fill holes" in caplog.text
    medium.store(0, b"new ")
    assert_errno(errno.ENOSPC, lambda: medium.store(4096, bytes(SMALL_BYTES * 2 - 4096)))
    assert load(medium, 0, 5) == b"new \0"
    medium.close()


def test_the_type_of_a_file_system_is_that_of_the_kernel(mount: Mount) -> None:
    for kind, expected in F_TYPES.items():
        number = os.open(mount(kind), os.O_RDONLY)
        try:
            assert linux.file_system_type(number) == expected
        finally:
            os.close(number)


def test_a_reader_is_plain_and_knows_that_memory_is_volatile(directory: Path) -> None:
    path = str(directory / "pool")
    with_writer = LocalFiles().create(path, 10)
    reader = LocalFiles().open(path, writable=False)
    assert reader.info.kind is PLAIN_FILE
    assert reader.info.volatile == with_writer.info.volatile
    reader.close()
    with_writer.close()


def test_what_cannot_be_mapped_is_written_to_without(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(directory / "pool")
    LocalFiles().create(path, 64 << 20).close()
    with addresses_left(32 << 20):
        medium = LocalFiles().open(path, writable=True)
    assert medium.info.kind is PLAIN_FILE
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert path in caplog.text
    assert "ulimit -v" in caplog.text
    medium.store(0, b"x")
    medium.close()


def test_only_regular_files_are_opened(directory: Path) -> None:
    os.mkfifo(directory / "pipe")
    (directory / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "socket"))
        before = opened()
        for name, found in (
            (directory / "pipe", "a pipe"),
            (directory / "folder", "a directory"),
            (directory / "socket", "a socket"),
            (Path("/dev/null"), "a character device"),
        ):
            for writable in (False, True):
                with pytest.raises(UsageError, match=f"{name}.*expected a regular.*{found}"):
                    LocalFiles().open(str(name), writable=writable)
    assert len(opened()) <= len(before)


def test_a_link_in_a_circle_is_nothing_and_what_is_behind_one_is_not_known(directory: Path) -> None:
    files, circle = LocalFiles(), directory / "circle"
    circle.symlink_to("circle")
    assert files.status(str(circle)) is None
    assert files.status(str(directory / "absent")) is None
    with pytest.raises(MediumError, match="cannot look at"):
        files.status(str(circle / "file"))


def test_errors_leave_no_descriptor_open(directory: Path) -> None:
    path, before = str(directory / "pool"), opened()
    files = LocalFiles()
    free = os.statvfs(directory).f_bfree * os.statvfs(directory).f_frsize
    for call in (
        lambda: files.open(path, writable=True),
        lambda: files.create(str(directory / "none" / "pool"), 10),
        lambda: files.create(path, 2 * free),
        lambda: files.sync(path),
    ):
        with pytest.raises(MediumError):
            call()
    files.create(path, 10).close()
    files.sync(str(directory))
    assert opened() == before


def test_an_error_says_where_what_and_what_to_do(directory: Path) -> None:
    path = directory / "none" / "pool"
    with pytest.raises(MediumError, match=f"{path}: cannot open: No such file.*check the path"):
        LocalFiles().open(str(path), writable=False)
    with pytest.raises(MediumError, match=f"{path}: cannot rename {directory} to"):
        LocalFiles().replace(str(directory), str(path))
    (directory / "file").write_bytes(b"")
    below = str(directory / "file" / "below")
    assert_errno(errno.ENOTDIR, lambda: LocalFiles().entries(str(directory / "file")))
    assert_errno(errno.ENOTDIR, lambda: LocalFiles().remove(below))
    assert_errno(errno.ENOENT, lambda: LocalFiles().sync(str(directory / "none")))
    assert LocalFiles().status(below) is None


def test_links_are_followed_when_looking(directory: Path) -> None:
    (directory / "file").write_bytes(b"12345")
    (directory / "link").symlink_to("file")
    (directory / "dangling").symlink_to("nowhere")
    (directory / "loop").symlink_to("loop")
    found = LocalFiles().status(str(directory / "link"))
    assert found == LocalFiles().status(str(directory / "file"))
    assert found is not None
    assert found.identity == (os.stat(directory).st_dev, os.stat(directory / "file").st_ino)
    assert LocalFiles().status(str(directory / "dangling")) is None
    assert LocalFiles().status(str(directory / "loop")) is None, "it leads nowhere either"
    assert LocalFiles().entries(str(directory)) == ["dangling", "file", "link", "loop"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_mode_of_a_new_file_follows_the_umask(directory: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        LocalFiles().create(str(directory / "pool"), 10).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(directory / "pool").st_mode) == 0o666 & ~umask


def test_programs_started_by_the_trainer_inherit_nothing(directory: Path) -> None:
    medium = LocalFiles().create(str(directory / "pool"), 10)
    assert not os.get_inheritable(medium._descriptor.number)
    medium.close()


ON_ANOTHER_PLATFORM = """
import ctypes, os, sys
import numpy

sys.platform = "win32"
for name in ("fcntl", "resource"):
    sys.modules[name] = None  # An import of it fails.
for name in (
    "register_at_fork", "preadv", "pread", "pwrite", "fdatasync", "fstatvfs", "posix_fallocate",
    "getuid", "geteuid", "fork",
):
    delattr(os, name)

def refused(*arguments, **more):
    raise OSError("there is no libc")

ctypes.CDLL = refused

import portus.reach.media.space
from portus.reach.media.local import LocalFiles
from portus.reach.media.lock import FileLocks

files = LocalFiles()
medium = files.open(sys.argv[1], writable=False)
locks = FileLocks(sys.argv[1], writable=False)
locks.pin(1)
found = bytearray(4)
medium.load(2, memoryview(found))
print(found.decode(), medium.size, 1 in locks.pins(), files.status(sys.argv[1]).size)
locks.unpin(1)
locks.close()
medium.close()
"""


def test_a_reader_works_on_other_platforms(tmp_path: Path) -> None:
    (tmp_path / "pool").write_bytes(b"0123456789")
    done = subprocess.run(
        [sys.executable, "-c", ON_ANOTHER_PLATFORM, str(tmp_path / "pool")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("2345 10 True 10\n", "")


A_LARGE_RANGE = """
from portus.engine.media.addresses import RANGE_MAX, AddressRange

found = AddressRange("test", 2 * RANGE_MAX)
print(found._length >= 2 * RANGE_MAX)
found.close()
"""


def test_a_range_is_as_large_as_its_medium_needs() -> None:
    done = subprocess.run(  # other tests of this process may have left too little
        [sys.executable, "-c", A_LARGE_RANGE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_addresses_behind_the_range_are_never_touched() -> None:
    with addresses_left(8 << 20):
        found = AddressRange("test", 1)
    found.map(4096)
    with pytest.raises(MediumError, match="ulimit -v"):
        found.map(found._length + 1)
    assert found.mapped == 4096
    found.map(found._length)
    found.close()
