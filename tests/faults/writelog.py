"""A disk that logs what is written to it and when it was flushed, below a real file system.

It is one file of a FUSE file system, under a loop device: the file system above (ext4, xfs) thinks
that it has a disk with a volatile cache. So what a power cut leaves can be made afterwards: all
that was written before the last flush, and any part of what came later, in sectors.

The disk is served by a process of its own, without torch and without threads: a page fault of
Portus waits for it, and must not hold what it needs. It speaks the protocol of the kernel's
``fuse.h`` by itself, as far as a single file needs it. Device mapper (dm-log-writes) and nbd could
do the same, where the kernel has them; often it does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import select
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECTOR = {"ext4": 512, "xfs": 4096}
"""The bytes that a cut leaves whole. A block of metadata of xfs says in its first sector up to
where in the log it is written, and recovery believes it: torn in sectors of 512 bytes, it stays
torn, and xfs does not mount (``XFS: Metadata CRC error``). So its sectors are as large as a block.
"""

DISK_BYTES = {"ext4": 48 << 20, "xfs": 320 << 20}
"""xfs makes no smaller ones."""

_MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0", "-J", "size=4"],
    "xfs": ["mkfs.xfs", "-q", "-f", "-m", "reflink=0", "-s", f"size={SECTOR['xfs']}"],
}

_JOURNAL_SUPERBLOCKS = (b"\xc0\x3b\x39\x98\0\0\0\3", b"\xc0\x3b\x39\x98\0\0\0\4")

WRITE, FLUSH, MARK = range(3)
_ENTRY = struct.Struct("<Bqq")
"""Kind; offset and length of a write, whose bytes follow, or the number of a mark."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the log."""

    kind: int
    at: int
    data: bytes = b""


def why_not(kind: str) -> str:
    """Why there can be no such disk here; nothing if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root can mount a file system"
    for needed in ("/dev/fuse", "/dev/loop-control"):
        if not os.path.exists(needed):
            return f"no {needed} here"
    if shutil.which(_MAKE[kind][0]) is None:
        return f"no {_MAKE[kind][0]} here"
    return ""


class LoggedDisk:
    """A disk with a file system of ``kind``, mounted at ``place``, whose writes are logged."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.place = folder / "disk"
        self.image = folder / "before.img"
        self._log = folder / "log"
        self._file = folder / "served"
        for each in (self.image, self._file):
            each.touch()
        os.truncate(self.image, DISK_BYTES[kind])
        run(*_MAKE[kind], str(self.image))
        self.place.mkdir()
        self._control, theirs = socket.socketpair()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.writelog", str(self._file), str(self.image),
             str(self._log), str(theirs.fileno())],
            cwd=Path(__file__).resolve().parents[2], pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        self._control.settimeout(30)
        assert self._control.recv(1), "the disk's server ended"
        run("mount", "-o", "loop", str(self._file), str(self.place))

    def mark(self, number: int) -> None:
        """Say in the log that what was flushed so far counts as told."""
        self._control.send(struct.pack("<q", number))
        assert self._control.recv(1)

    def log(self) -> list[Entry]:
        """Take the disk away, and give all that was written to it."""
        self.close()
        found, data, at = [], self._log.read_bytes(), 0
        while at < len(data):
            kind, place, length = _ENTRY.unpack_from(data, at)
            at += _ENTRY.size
            found.append(Entry(kind, place, data[at : at + length]))
            at += length
        return found

    def close(self) -> None:
        """A second call does nothing."""
        if self._server.returncode is None:
            for place in (self.place, self._file):
                subprocess.run(["umount", "--lazy", str(place)], check=False, capture_output=True)
            self._control.close()
            self._server.wait(30)


@contextlib.contextmanager
def logged_disk(kind: str) -> Iterator[LoggedDisk]:
    """A disk in memory, if there is room for it there."""
    inside = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=inside, prefix="portus-power-") as folder:
        disk = LoggedDisk(kind, Path(folder))
        try:
            yield disk
        finally:
            disk.close()


class Cut:
    """What a power cut leaves of a logged disk: image after image, one at a time."""

    def __init__(self, disk: LoggedDisk, entries: list[Entry], source: random.Random) -> None:
        self._entries = entries
        self._source = source
        self._sector = SECTOR[disk.kind]
        self._flushed = disk.image
        self._done = 0
        self.image = disk.image.with_name("after.img")
        self.place = disk.image.with_name("found")
        self.place.mkdir()

    def at(self, end: int) -> str:
        """Make the image of a cut before entry ``end``, not smaller than the last one; says how."""
        flushes = [i for i in range(self._done, end) if self._entries[i].kind == FLUSH]
        if flushes:
            with open(self._flushed, "r+b") as file:
                for each in self._entries[self._done : flushes[-1]]:
                    _write(file.fileno(), each)
            self._done = flushes[-1]
        loose = [each for each in self._entries[self._done : end] if each.kind == WRITE]
        run("cp", "--sparse=always", str(self._flushed), str(self.image))
        how = self._source.choice(("all", "prefix", "subset", "torn"))
        with open(self.image, "r+b") as file:
            for each in self._lost(how, loose):
                _write(file.fileno(), each)
        return f"{how} of {len(loose)} writes since the last flush"

    def _lost(self, how: str, loose: list[Entry]) -> Iterator[Entry]:
        """What of the writes since the last flush is on the disk all the same."""
        if how == "prefix":
            loose = loose[: self._source.randrange(len(loose) + 1)]
        share = self._source.random()
        for each in loose:
            if how in ("all", "prefix"):
                yield each
            elif how == "subset":
                if self._source.random() < share:
                    yield each
            else:
                parts = _parts(each, self._sector)
                yield from (part for part in parts if self._source.random() < share)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        """The image, after the file system has recovered what it can."""
        run("mount", "-o", "loop", str(self.image), str(self.place))
        try:
            yield self.place
        finally:
            run("umount", str(self.place))


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


def _parts(entry: Entry, sector: int) -> Iterator[Entry]:
    """The sectors of a write; but the superblocks of ext4 and of its journal as one. Each has one
    checksum over two sectors and is written in place: torn, it needs e2fsck before a mount."""
    start = 0
    while start < len(entry.data):
        is_ext4 = entry.data[start + 56 : start + 58] == b"\x53\xef"
        is_whole = is_ext4 or entry.data[start : start + 8] in _JOURNAL_SUPERBLOCKS
        end = start + max(sector, 1024 if is_whole else 0)
        yield Entry(WRITE, entry.at + start, entry.data[start:end])
        start = end


def _write(number: int, entry: Entry) -> None:
    if entry.kind == WRITE:
        os.pwrite(number, entry.data, entry.at)


# The server. Numbers and layouts: include/uapi/linux/fuse.h, protocol 7.31.

_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _RELEASE, _FSYNC = 3, 4, 14, 15, 16, 18, 20
_FORGET, _FLUSH, _INIT, _INTERRUPT, _DESTROY, _BATCH_FORGET = 2, 25, 26, 36, 38, 42
_SILENT = (_FORGET, _INTERRUPT, _BATCH_FORGET)
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
_PAYLOAD_MAX = 1 << 20


class _Server:
    """One file, in memory; each write and each flush goes into the log."""

    def __init__(self, place: str, image: str, log: str) -> None:
        self._content = bytearray(Path(image).read_bytes())
        self._log = open(log, "wb", buffering=0)  # noqa: SIM115 - open until the process ends
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode={stat.S_IFREG:o},user_id=0,group_id=0"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"portus-log", place.encode(), b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), f"cannot mount {place}")

    def serve(self, control: socket.socket) -> None:
        """Until the file system is taken away. ``control``: whoever wants marks in the log."""
        poll = select.poll()
        poll.register(self._device, select.POLLIN)
        poll.register(control, select.POLLIN)
        control.send(b"!")
        while True:
            for number, _ in poll.poll():
                if number == control.fileno():
                    asked = control.recv(8)
                    if not asked:
                        return
                    self._note(MARK, *struct.unpack("<q", asked))
                    control.send(b"!")
                    continue
                try:
                    request = os.read(self._device, _PAYLOAD_MAX + 4096)
                except OSError as error:
                    if error.errno == errno.ENODEV:  # it was unmounted
                        return
                    if error.errno in (errno.ENOENT, errno.EAGAIN):
                        continue
                    raise
                self._answer(request)

    def _note(self, kind: int, at: int, data: bytes = b"") -> None:
        self._log.write(_ENTRY.pack(kind, at, len(data)) + data)

    def _answer(self, request: bytes) -> None:
        _, operation, unique, *_ = _IN.unpack_from(request)
        if operation in _SILENT:
            return
        found = self._do(operation, request[_IN.size :])
        code, payload = (-found, b"") if isinstance(found, int) else (0, found)
        os.write(self._device, _OUT.pack(_OUT.size + len(payload), code, unique) + payload)

    def _do(self, operation: int, body: bytes) -> bytes | int:
        """The answer, or an errno."""
        if operation == _INIT:
            flags, pages = _BIG_WRITES | _MAX_PAGES, _PAYLOAD_MAX // 4096
            sizes = struct.pack("<IIIIHHIIHH", 7, 31, 0, flags, 16, 12, _PAYLOAD_MAX, 1, pages, 0)
            return sizes.ljust(64, b"\0")
        if operation in (_GETATTR, _SETATTR):
            size = len(self._content)
            attributes = struct.pack("<6Q", 1, size, size // 512, 0, 0, 0)
            numbers = struct.pack("<10I", 0, 0, 0, stat.S_IFREG | 0o600, 1, 0, 0, 0, 4096, 0)
            return struct.pack("<QII", 3600, 0, 0) + attributes + numbers
        if operation == _OPEN:
            return struct.pack("<QII", 1, 0, 0)
        if operation == _READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            return bytes(self._content[offset : offset + size])
        if operation == _WRITE:
            _, offset, size = struct.unpack_from("<QQI", body)
            data = body[40 : 40 + size]
            self._content[offset : offset + size] = data
            self._note(WRITE, offset, data)
            return struct.pack("<II", size, 0)
        if operation == _FSYNC:
            self._note(FLUSH, 0)
            return b""
        if operation in (_FLUSH, _RELEASE, _DESTROY):
            return b""
        return errno.ENOSYS


if __name__ == "__main__":
    _Server(*sys.argv[1:4]).serve(socket.socket(fileno=int(sys.argv[4])))
