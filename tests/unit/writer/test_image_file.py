"""The files of images: every byte, whichever way it goes, and what becomes of errors."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from portus.engine.copying import local
from portus.engine.copying.segments import Stop, StoppedError
from portus.engine.format.checksum import UNIT, digest
from portus.engine.image.torch_reader import read_torch
from portus.engine.media import linux
from portus.engine.media.file_calls import file_system_of, write_all
from portus.engine.state.pickling import PickledState, pickle_state
from portus.engine.writer import image_file, staged_way
from portus.engine.writer.cached_way import CachedWay
from portus.engine.writer.image_file import ImageFile, join_crcs
from portus.engine.writer.ring import FEW, SLOT, StagingRing
from portus.engine.writer.staged_way import StagedWay
from portus.engine.writer.ways import Ways
from portus.errors import MediumError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")

SIZES = (
    *(0, 1, 63, 64, 65, 511, 512, 4095, 4096, 4097, 65_536, 70_001, 69_632, 200_003),
    *(UNIT, UNIT + 12_345),
)


@pytest.fixture
def ring() -> Iterator[StagingRing]:
    made = StagingRing(1 << 30)
    yield made
    made.close()


def state(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> PickledState:
    source = np.random.default_rng(seed)
    tensors = [torch.from_numpy(source.integers(0, 255, size, np.uint8)) for size in sizes]
    return pickle_state(tensors)


def addresses(of: PickledState) -> NDArray[np.int64]:
    return np.array([storage.data_ptr() for storage in of.storages], np.int64)


def content(of: PickledState, index: int) -> bytes:
    storage = of.storages[index]
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


@pytest.fixture(
    params=["fresh", "spare", "spare by writes", "alike spare", "alike spare by writes", "refused"]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Past the cache; into a spare, by addresses and by writes, of other bytes and of almost the
    same; and where the file system takes the flag and no write."""
    if request.param.endswith("by writes"):
        asked = file_system_of
        monkeypatch.setattr(image_file, "file_system_of", lambda *file: (asked(*file)[0], False))
    if request.param == "refused":
        real = write_all

        def refuse(number: int, data: memoryview, offset: int) -> None:
            import fcntl

            if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no")
            real(number, data, offset)

        monkeypatch.setattr(staged_way, "write_all", refuse)
    return str(request.param)


def opened(path: Path, way: str, of: PickledState, ring: StagingRing) -> tuple[int, ImageFile]:
    number = os.open(path, os.O_RDWR | os.O_CREAT)
    image = of.image("run.pt")
    is_spare = "spare" in way
    if way.startswith("alike"):
        fill(number, of, ring)
        for offset, length in zip(image.offset.tolist(), image.length.tolist(), strict=True):
            for at in {0, length // 2, length - 1} if length and offset % 3 else ():
                flip(number, offset + at)
    elif is_spare:
        os.pwrite(number, b"\xff" * (image.size + 5000), 0)
    return number, ImageFile(number, str(path), image, is_spare=is_spare, ring=ring, ways=Ways())


def fill(number: int, of: PickledState, ring: StagingRing) -> None:
    """Write the file of a state."""
    file = ImageFile(number, "", of.image("run.pt"), is_spare=False, ring=ring, ways=Ways())
    written(file, addresses(of))
    file.close()


def flip(number: int, offset: int) -> None:
    """Change one byte of a file."""
    os.pwrite(number, bytes([os.pread(number, 1, offset)[0] ^ 1]), offset)


def written(file: ImageFile, address: NDArray[np.int64]) -> None:
    """Copy all, and finish."""
    file.copy(np.arange(len(address)), address, Stop())
    file.finish()


@pytest.fixture(params=["helper", "pure python"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pure python":
        monkeypatch.setattr(image_file, "best_engine", local.PurePython)


def test_every_byte_is_in_its_place_whatever_the_order(
    tmp_path: Path, way: str, ring: StagingRing, engine: None, seed: int
) -> None:
    of = state(seed=seed)
    number, file = opened(tmp_path / "file", way, of, ring)
    shuffled = np.random.default_rng(seed).permutation(len(SIZES))
    address = addresses(of)
    for part in np.array_split(shuffled, 3):
        digests = file.copy(part, address[part], Stop())
        data = [content(of, index) for index in part]
        units = [x[at : at + UNIT] for x in data for at in range(0, max(1, len(x)), UNIT)]
        assert digests.tobytes() == b"".join(map(digest, units))
    file.finish()
    file.close()

    def read(offset: int, length: int) -> bytes:
        return os.pread(number, length, offset)

    found = read_torch(read, os.fstat(number).st_size, "file")
    assert found.digests is not None
    found.verify(read)
    assert found.size == of.image("run.pt").size
    for index in range(len(SIZES)):
        assert read(int(found.offset[index]), SIZES[index]) == content(of, index)
    with zipfile.ZipFile(tmp_path / "file") as archive:
        assert archive.testzip() is None
    os.close(number)


def test_a_storage_that_comes_by_units_is_stored_like_any_other(
    tmp_path: Path, way: str, ring: StagingRing
) -> None:
    of = state((100, UNIT + 70_000, 100))
    number, file = opened(tmp_path / "file", way, of, ring)
    data = content(of, 1)
    buffer = ctypes.create_string_buffer(UNIT)

    def units() -> Iterator[tuple[int, int]]:
        for at in range(0, len(data), UNIT):
            piece = data[at : at + UNIT]
            ctypes.memmove(buffer, piece, len(piece))
            yield ctypes.addressof(buffer), len(piece)
            ctypes.memset(buffer, 0, UNIT)  # the next one is asked for

    address = addresses(of)
    file.copy(np.array([0, 2]), address[[0, 2]], Stop())
    file.copy_units(1, units(), Stop())
    file.finish()
    file.close()
    os.close(number)
    assert torch.equal(
        torch.load(tmp_path / "file")[1], torch.frombuffer(bytearray(data), dtype=torch.uint8)
    )


def test_what_an_audit_asks_for_is_what_was_stored(
    tmp_path: Path, way: str, ring: StagingRing
) -> None:
    of = state((3, 70_000, UNIT + 70_001))
    number, file = opened(tmp_path / "file", way, of, ring)
    file.copy(np.arange(3), addresses(of), Stop())
    expected, places = b"", []
    for index in range(3):
        data = content(of, index)
        for at in [*range(0, len(data), 64 << 10), (len(data) - 1) // 64 * 64]:
            places.append((index, at, len(data[at : at + 64])))
            expected += data[at : at + 64]
    storage, offset, length = (np.array(column, np.int64) for column in zip(*places, strict=True))
    for each in of.storages:  # the source is not what is asked for
        ctypes.memset(each.data_ptr(), 0, each.nbytes())
    found = file.read_back(storage, offset, length)
    assert found is not None
    assert found.tobytes() == expected
    file.close()
    os.close(number)


def test_a_source_that_changes_has_the_digest_and_the_crc_of_what_was_stored(
    tmp_path: Path, way: str, ring: StagingRing
) -> None:
    of = state((UNIT + 5,))
    over = threading.Event()

    def scribble() -> None:
        value = 0
        while not over.is_set():
            value = (value + 1) % 256
            ctypes.memset(of.storages[0].data_ptr(), value, of.storages[0].nbytes())

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for turn in range(5):
            number, file = opened(tmp_path / f"{turn}", way, of, ring)
            written(file, addresses(of))
            file.close()
            os.close(number)
    finally:
        over.set()
        thread.join()
    for turn in range(5):
        data = (tmp_path / f"{turn}").read_bytes()

        def read(offset: int, length: int, data: bytes = data) -> bytes:
            return data[offset : offset + length]

        read_torch(read, len(data), "file").verify(read)
        with zipfile.ZipFile(tmp_path / f"{turn}") as archive:
            assert archive.testzip() is None


def test_a_write_that_fails_is_an_error_with_the_path_and_the_ring_is_whole(
    tmp_path: Path, way: str, ring: StagingRing
) -> None:
    of = state((4 * UNIT,))
    number, file = opened(tmp_path / "file", way, of, ring)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (UNIT, hard))
    try:
        with pytest.raises(MediumError, match="file: cannot be written") as raised:
            written(file, addresses(of))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert raised.value.errno == errno.EFBIG
    file.close()
    os.close(number)
    assert len(ring._free) * SLOT == ring._made * SLOT


@pytest.mark.parametrize("end", ["finish", "close"])
def test_nobody_goes_on_while_a_write_is_in_flight(
    tmp_path: Path, ring: StagingRing, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, here = state((UNIT,)), threading.current_thread()
    released, written = threading.Event(), threading.Event()

    def late(number: int, data: memoryview, offset: int) -> None:
        if threading.current_thread() is not here:
            assert released.wait(30)
        write_all(number, data, offset)
        written.set()

    monkeypatch.setattr(staged_way, "write_all", late)
    number, file = opened(tmp_path / "file", "fresh", of, ring)
    if not isinstance(file._open_way(), StagedWay):
        pytest.skip("no direct writes here")
    file.copy(np.array([0]), addresses(of), Stop())
    assert not written.is_set()
    threading.Timer(0.3, released.set).start()
    getattr(file, end)()
    assert released.is_set()
    assert written.is_set()
    file.close()
    os.close(number)


def test_direct_writes_that_are_refused_at_the_same_time_are_all_written_another_way(
    tmp_path: Path, ring: StagingRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, real, both = state((UNIT, UNIT)), write_all, threading.Barrier(2)

    def refuse(number: int, data: memoryview, offset: int) -> None:
        import fcntl

        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT:
            both.wait(30)
            raise OSError(errno.EINVAL, "no")
        real(number, data, offset)

    monkeypatch.setattr(staged_way, "write_all", refuse)
    number, file = opened(tmp_path / "file", "fresh", of, ring)
    written(file, addresses(of))
    file.close()
    os.close(number)
    for index, found in enumerate(torch.load(tmp_path / "file")):
        assert found.numpy().tobytes() == content(of, index)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_in_flight_that_fails_is_told_by_the_next_call(
    tmp_path: Path, ring: StagingRing, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: int, data: memoryview, offset: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(staged_way, "write_all", fail)
    of = state((UNIT,))
    descriptor, file = opened(tmp_path / "file", "fresh", of, ring)
    if not isinstance(file._open_way(), StagedWay):
        pytest.skip("no direct writes here")
    file.copy(np.array([0]), addresses(of), Stop())
    with pytest.raises(MediumError, match=os.strerror(number)):
        file.finish()
    file.close()
    os.close(descriptor)


def test_a_save_that_is_given_up_ends_and_leaves_no_write_in_flight(
    tmp_path: Path, way: str, ring: StagingRing
) -> None:
    of = state((3 * UNIT,))
    number, file = opened(tmp_path / "file", way, of, ring)
    stop = Stop()
    stop.set()
    with pytest.raises(StoppedError):
        file.copy(np.array([0]), addresses(of), stop)
    file.close()
    file.close()
    os.close(number)
    assert len(ring._free) * SLOT == ring._made * SLOT


@pytest.mark.parametrize("by", ["addresses", "writes"])
def test_what_a_spare_has_is_not_written_again_and_every_other_byte_is(
    tmp_path: Path,
    ring: StagingRing,
    engine: None,
    by: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if by == "writes":
        asked = file_system_of
        monkeypatch.setattr(image_file, "file_system_of", lambda *file: (asked(*file)[0], False))
    of, source = state((3 * UNIT, 5 << 20, 1000), seed), np.random.default_rng(seed)
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    fill(number, of, ring)
    ways = Ways()

    def kept() -> int:
        file = ImageFile(number, "", of.image("run.pt"), is_spare=True, ring=ring, ways=ways)
        written(file, addresses(of))
        file.close()
        for index, tensor in enumerate(torch.load(tmp_path / "file")):
            assert tensor.numpy().tobytes() == content(of, index)
        with zipfile.ZipFile(tmp_path / "file") as archive:
            assert archive.testzip() is None
        return file.kept_bytes

    every = (3 * UNIT) + (5 << 20)
    assert [kept() for _ in range(4)] == [every] * 4, "the other way is not tried"
    for _ in range(8):  # wherever it differs: in the spare, or in the state
        place = int(source.integers(0, 3 * UNIT))
        if place % 2:
            flip(number, int(of.image("run.pt").offset[0]) + place)
        else:
            of.storages[0][place] ^= 1
        assert every - UNIT <= kept() < every


def test_what_cannot_be_read_of_a_spare_is_written(
    tmp_path: Path, ring: StagingRing, engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = state((UNIT,))
    number = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    fill(number, of, ring)
    way = CachedWay(number, of.image("run.pt"), ring, volatile=False, is_spare=True)
    monkeypatch.setattr(ImageFile, "_choose_way", lambda _: way)
    fill(number, of, ring)
    os.close(number)
    assert way.kept_bytes == 0
    assert bytes(torch.load(tmp_path / "file")[0].numpy()) == content(of, 0)


def test_a_spare_that_is_smaller_than_the_file_and_has_holes_becomes_the_file(
    tmp_path: Path, ring: StagingRing
) -> None:
    of = state((1000, UNIT + 5, 70_000))
    with (tmp_path / "file").open("wb") as spare:
        spare.write(b"\xff" * 100_000)
        spare.truncate(3 << 20)
    number = os.open(tmp_path / "file", os.O_RDWR)
    image = of.image("run.pt")
    file = ImageFile(number, "file", image, is_spare=True, ring=ring, ways=Ways())
    written(file, addresses(of))
    file.close()
    os.close(number)
    with zipfile.ZipFile(tmp_path / "file") as archive:
        assert archive.testzip() is None
    for index, tensor in enumerate(torch.load(tmp_path / "file")):
        assert tensor.numpy().tobytes() == content(of, index)


@pytest.mark.parametrize("reason", ["no blocks ahead", "no addresses"])
def test_a_spare_that_cannot_be_mapped_is_written_all_the_same(
    tmp_path: Path, ring: StagingRing, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    number = errno.EOPNOTSUPP if reason == "no blocks ahead" else errno.ENOMEM

    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(linux, "allocate" if number == errno.EOPNOTSUPP else "map_pages", refuse)
    of = state((1000, UNIT + 5))
    descriptor, file = opened(tmp_path / "file", "spare", of, ring)
    os.ftruncate(descriptor, 5000)
    written(file, addresses(of))
    assert type(file._way) is CachedWay
    file.close()
    os.close(descriptor)
    assert torch.load(tmp_path / "file")[1].numpy().tobytes() == content(of, 1)


def test_a_spare_for_which_there_is_no_room_is_an_error_and_no_signal(
    tmp_path: Path, ring: StagingRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(linux, "allocate", full)
    of = state((UNIT,))
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    image = of.image("run.pt")
    file = ImageFile(number, "file", image, is_spare=True, ring=ring, ways=Ways())
    if not file_system_of(number, "file")[1]:
        pytest.skip("nothing is mapped on this file system")
    with pytest.raises(MediumError, match="No space left"):
        written(file, addresses(of))
    file.close()
    os.close(number)


def test_a_file_system_in_memory_is_written_through_the_cache(ring: StagingRing) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no file system in memory at /dev/shm")
    path = Path(f"/dev/shm/portus-image-{os.getpid()}")
    of = state((1000, UNIT))
    try:
        number, file = opened(path, "fresh", of, ring)
        assert isinstance(file._open_way(), CachedWay)
        file.copy(np.arange(2), addresses(of), Stop())
        file.finish()
        file.close()
        os.close(number)
        assert bytes(torch.load(path)[1].numpy()) == content(of, 1)
    finally:
        path.unlink()


def test_the_ring_grows_while_somebody_waits_and_gives_that_back(ring: StagingRing) -> None:
    slots = [ring.take(Stop()) for _ in range(FEW + 3)]
    assert ring._made * SLOT == (FEW + 3) * SLOT
    for slot in slots:
        ring.give(slot)
    assert ring._made * SLOT == FEW * SLOT


def test_nobody_waits_for_a_buffer_for_ever(ring: StagingRing) -> None:
    slots = [ring.take(Stop(awaited=False)) for _ in range(FEW)]
    stop = Stop(awaited=False)
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(StoppedError):
        ring.take(stop)
    for slot in slots:
        ring.give(slot)


def test_the_crc_of_parts_is_that_of_the_whole(seed: int) -> None:
    source = np.random.default_rng(seed)
    wholes = [source.bytes(size) for size in (0, 1, UNIT - 1, UNIT, UNIT + 1, 2 * UNIT + 77, 5)]
    units = [whole[at : at + UNIT] for whole in wholes for at in range(0, max(1, len(whole)), UNIT)]
    crcs = np.array([zlib.crc32(unit) for unit in units], np.uint32)
    joined = join_crcs(crcs, np.array([len(whole) for whole in wholes]))
    assert joined.tolist() == [zlib.crc32(whole) for whole in wholes]
