"""Locks between real processes, some of which are killed or fork."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from portus.engine.copying import native
from portus.errors import BusyError, MediumError, UsageError
from portus.reach.media.lock import PIN_BASE, WRITER_BYTE, FileLocks

TIMEOUT_S = 60


@pytest.fixture
def pool(directory: Path) -> str:
    path = directory / "pool"
    path.write_bytes(b"")
    return str(path)


class HeldLocks(FileLocks):
    def describe_holder(self) -> str:
        return "pid 7 on host h"


@pytest.fixture
def locks(pool: str) -> Iterator[FileLocks]:
    with_writer = HeldLocks(pool, writable=True)
    yield with_writer
    with_writer.close()


@contextmanager
def process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``script``; it has said a line when this begins, and is gone after."""
    started = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdin is not None
    try:
        started.said = started.stdout.readline().strip()  # type: ignore[attr-defined]
        assert started.poll() is None
        yield started
    finally:
        started.stdin.close()  # Whoever of its family still lives ends now.
        started.kill()
        started.wait()
        started.stdout.close()


HOLDER = """
import sys
from portus.reach.media.lock import FileLocks

locks = FileLocks(sys.argv[1], writable=sys.argv[2] == "writer")
if sys.argv[2] == "writer":
    locks.acquire_writer(0)
for version in sys.argv[3:]:
    locks.pin(int(version))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_writer_lets_go(pool: str, locks: FileLocks) -> None:
    with process(HOLDER, pool, "writer") as holder:
        with pytest.raises(BusyError, match=f"{pool}.*pid 7 on host h"):
            locks.acquire_writer(0)
        holder.kill()
        holder.wait()
        locks.acquire_writer(0)


def test_a_writer_that_ends_lets_the_waiting_one_in(pool: str, locks: FileLocks) -> None:
    with process(HOLDER, pool, "writer") as holder:
        assert holder.stdin is not None
        holder.stdin.close()
        locks.acquire_writer(TIMEOUT_S)


def test_pins_of_another_process_are_seen_until_it_is_killed(pool: str, locks: FileLocks) -> None:
    locks.acquire_writer(0)
    os.chmod(pool, 0o444)
    with process(HOLDER, pool, "reader", "3", "1000000", "3") as holder:
        seen = [version for version in (2, 3, 4, 1_000_000) if version in locks.pins()]
        assert seen == [3, 1_000_000]
        locks.pin(3)
        locks.unpin(3)
        assert 3 in locks.pins()
        holder.kill()
        holder.wait()
        assert 3 not in locks.pins()


def test_another_process_sees_the_pins_of_this_one(pool: str, locks: FileLocks) -> None:
    script = """
import sys
from portus.reach.media.lock import FileLocks
locks = FileLocks(sys.argv[1], writable=True)
print([version for version in range(9) if version in locks.pins()], flush=True)
sys.stdin.read()
"""
    locks.pin(2)
    locks.pin(5)
    with process(script, pool) as other:
        assert other.said == "[2, 5]"  # type: ignore[attr-defined]


FORKS_THEN_WAITS = """
import ctypes, multiprocessing, os, sys
from portus.errors import UsageError
from portus.reach.media.lock import FileLocks
from portus.engine.media.process import NUMBERS
from portus.engine.copying import native

def live_on():
    for call in (lambda: locks.acquire_writer(0), lambda: locks.pin(4), locks.pins):
        try:
            call()
        except UsageError as error:
            assert f"opened in process {os.getppid()}" in str(error)
        else:
            print("the child could use the locks", flush=True)
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]  # of the same numbers now
    locks.close()
    for other in others:
        os.fstat(other)
    print(os.getpid(), flush=True)
    os.read(0, 1)
    os._exit(0)

locks = FileLocks(sys.argv[1], writable=True)
locks.acquire_writer(0)
locks.pin(4)
if sys.argv[2] == "fork":
    if os.fork() == 0:
        live_on()
elif sys.argv[2] == "fork of C":
    native.helper().close_in_children(NUMBERS)
    if ctypes.PyDLL(None).fork() == 0:
        live_on()
else:
    worker = multiprocessing.get_context("fork").Process(target=live_on)
    stdin, sys.stdin = sys.stdin, None  # Or multiprocessing would close it in the child.
    worker.start()
os.waitpid(-1, 0)
"""


OF_C = pytest.param(
    "fork of C", marks=pytest.mark.skipif(native.helper() is None, reason="no helper in C")
)


@pytest.mark.parametrize("way", ["fork", OF_C, "multiprocessing"])
def test_a_child_that_outlives_its_killed_parent_holds_nothing(
    pool: str, locks: FileLocks, way: str
) -> None:
    with process(FORKS_THEN_WAITS, pool, way) as parent:
        child = int(parent.said)  # type: ignore[attr-defined]
        with pytest.raises(BusyError):
            locks.acquire_writer(0)  # The child's close() took nothing from its parent.
        assert 4 in locks.pins()
        parent.kill()
        parent.wait()
        os.kill(child, 0)  # It lives.
        locks.acquire_writer(0)
        assert 4 not in locks.pins()
        os.kill(child, 0)


def test_a_reader_does_not_become_the_writer(pool: str) -> None:
    reader = FileLocks(pool, writable=False)
    with pytest.raises(UsageError, match="for reading"):
        reader.acquire_writer(0)
    reader.pin(1)
    assert 1 in reader.pins()
    reader.close()


def test_the_wait_is_said_once(
    pool: str, locks: FileLocks, caplog: pytest.LogCaptureFixture
) -> None:
    other = FileLocks(pool, writable=True)
    other.acquire_writer(0)
    with caplog.at_level(logging.INFO, "portus"), pytest.raises(BusyError):
        locks.acquire_writer(0.8)
    assert [record.name for record in caplog.records] == ["portus"]
    assert "pid 7 on host h" in caplog.text
    assert pool in caplog.text
    other.close()


def test_a_wait_for_a_moment_is_not_said(
    pool: str,
    locks: FileLocks,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("portus.reach.media.lock._QUIET_S", 20.0)
    other = FileLocks(pool, writable=True)
    other.acquire_writer(0)
    release = threading.Timer(0.05, other.close)
    release.start()
    with caplog.at_level(logging.INFO, "portus"):
        locks.acquire_writer(30)
    release.join()
    assert caplog.records == []


def test_no_wait_is_not_said(pool: str, locks: FileLocks, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "portus"):
        locks.acquire_writer(10)
    assert caplog.records == []


def test_the_bytes_are_those_of_the_format(pool: str, locks: FileLocks) -> None:
    assert (WRITER_BYTE, PIN_BASE) == (2**62 - 1, 2**62)
    locks.acquire_writer(0)
    locks.pin(7)
    inode = os.stat(pool).st_ino
    held = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    mine = sorted(
        (kind, access, int(first), int(last))
        for _, kind, _, access, _, place, first, last in (line for line in held if len(line) == 8)
        if place.endswith(f":{inode}")
    )
    assert mine == [
        ("OFDLCK", "READ", 2**62 + 7, 2**62 + 7),
        ("OFDLCK", "WRITE", 2**62 - 1, 2**62 - 1),
    ]


def test_a_stranger_who_holds_a_byte_is_an_error(pool: str, locks: FileLocks) -> None:
    with open(pool, "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, PIN_BASE + 7)
        with pytest.raises(BusyError, match="version 7"):
            locks.pin(7)
        assert 7 in locks.pins()
        with pytest.raises(UsageError):
            locks.unpin(7)


def test_a_missing_file_has_no_locks(directory: Path) -> None:
    with pytest.raises(MediumError, match="none"):
        FileLocks(str(directory / "none"), writable=False)


def test_where_such_locks_are_missing_only_reading_works(
    pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(fcntl, "F_OFD_SETLK")
    locks = FileLocks(pool, writable=True)
    with pytest.raises(UsageError, match="Linux only"):
        locks.acquire_writer(0)
    locks.pin(1)
    assert 1 in locks.pins()
    locks.unpin(1)
    assert 1 not in locks.pins()
    locks.close()
