"""Rows about files of images: until the sources are free, and until the file is durable."""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import xxhash

import portus
from portus.engine.copying.segments import Stop
from portus.engine.state.pickling import pickle_state
from portus.engine.writer.image_file import ImageFile
from portus.engine.writer.ring import StagingRing
from portus.engine.writer.ways import Ways
from tests.bench.measure import Row, Run, timed
from tests.bench.saving import MIB, memcpy_of, torch_save_of
from tests.bench.states import Trained, change, tensors

_COUNT = 64
_STEPS = 8


def writer_rows(memory: Path, disk: Path, rounds: int) -> Iterator[Row]:
    """A spare and a fresh file on a disk, and a spare on tmpfs."""
    for size in (288 * MIB, 1024 * MIB):
        yield from _disk_rows(disk, tensors(_COUNT, size), f"{size // MIB} MiB", rounds)
    state = tensors(_COUNT, 288 * MIB)
    written = _Written(memory / "spare", state)
    contenders: dict[str, Run] = {
        "memcpy": memcpy_of(state),
        "portus": functools.partial(written.run, "whole", is_spare=True),
        "copy": functools.partial(written.run, "copy", is_spare=True),
    }
    row = Row(name="writer: spare, tmpfs, 288 MiB", bar=1.2, that="memcpy")
    yield row.run(contenders, rounds, warmups=2)
    for layers, bar, name in ((125, 5.0, "1,000"), (1250, 60.0, "10,000")):
        yield _call_row(disk / "called", layers, bar, name, rounds)
    yield from _load_rows(disk / "load.pt", tensors(_COUNT, 288 * MIB), rounds)
    yield from _beside_training(disk, 2 * rounds)


def _call_row(place: Path, layers: int, bar: float, name: str, rounds: int) -> Row:
    """How long ``save`` itself takes for a file, of tensors that it has seen before."""
    trained = Trained(layers, 64)
    with portus.Checkpointer(place, keep=1, journal=False) as checkpointer:
        steps = itertools.count()

        def call() -> float:
            trained.step()
            handle = checkpointer.save(trained.state(), next(steps))
            handle.wait()
            return handle.stats.call_s * 1e3

        row = Row(name=f"writer: save() returns, {name} known tensors", bar=bar, unit="ms")
        row.run({"portus": call}, 2 * rounds, warmups=4)
    shutil.rmtree(place)
    return row


def _load_rows(path: Path, state: dict[str, torch.Tensor], rounds: int) -> Iterator[Row]:
    """Verified loads, of a file in the page cache and of one that is not."""
    portus.save(state, path, wait=True)
    contenders: dict[str, Run] = {
        "copy to fresh memory": timed(lambda: [each.clone() for each in state.values()]),
        "portus.load": timed(lambda: portus.load(path)),
        "torch.load": timed(lambda: torch.load(path)),
        "read past the cache": lambda: _read_directly(path),
        "portus.load, cold": lambda: _cold(path, lambda: portus.load(path)),
        "torch.load, cold": lambda: _cold(path, lambda: torch.load(path)),
    }
    cached = Row(name="writer: verified load, page cache, 288 MiB", bar=1.4, this="portus.load",
                 that="copy to fresh memory")  # fmt: skip
    yield cached.run(contenders, rounds, warmups=2)
    yield Row(name="writer: verified load, cold, 288 MiB", bar=1.2, this="portus.load, cold",
              that="read past the cache", figures=cached.figures)  # fmt: skip
    path.unlink()


def _cold(path: Path, load: Callable[[], object]) -> float:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    load()
    return time.perf_counter() - start


def _read_directly(path: Path) -> float:
    """Seconds to read the file past the page cache, 4 MiB at a time, into memory that is warm."""
    buffer = mmap.mmap(-1, 4 * MIB)
    buffer.write(bytes(len(buffer)))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        start, at = time.perf_counter(), 0
        while (count := os.preadv(descriptor, [buffer], at)) == len(buffer):
            at += count
        return time.perf_counter() - start
    finally:
        os.close(descriptor)


def _beside_training(disk: Path, rounds: int) -> Iterator[Row]:
    """What one save costs a training that fills the processors, over ``torch.save``, unsynced."""
    trained, numbers = Trained(24, 1024, rows=192), itertools.count()

    def extra_of(save: Callable[[], object]) -> Run:
        def extra() -> float:
            plain = _seconds_of_steps(trained)
            start = time.perf_counter()
            handle = save()
            took = time.perf_counter() - start + _seconds_of_steps(trained)
            if isinstance(handle, portus.SaveHandle):
                handle.wait()
            for path in disk.glob("fresh-*"):
                path.unlink()
            return took - plain

        return extra

    def anew() -> Path:
        return disk / f"fresh-{next(numbers)}.pt"

    contenders = {
        "torch.save": extra_of(lambda: torch.save(trained.state(), anew())),
        "portus, fresh": extra_of(lambda: portus.save(trained.state(), anew())),
        "portus, spare": extra_of(lambda: portus.save(trained.state(), disk / "over.pt")),
    }
    fresh = Row(name="writer: beside a training, fresh files, 288 MiB", bar=0.4,
                this="portus, fresh", that="torch.save")  # fmt: skip
    # Each way gets its first files here.
    yield fresh.run(contenders, rounds, warmups=5)
    yield Row(name="writer: beside a training, spares, 288 MiB", bar=0.25, this="portus, spare",
              that="torch.save", figures=fresh.figures)  # fmt: skip
    (disk / "over.pt").unlink()


def _seconds_of_steps(trained: Trained) -> float:
    start = time.perf_counter()
    for _ in range(_STEPS):
        trained.step()
    return time.perf_counter() - start


def _disk_rows(disk: Path, state: dict[str, torch.Tensor], name: str, rounds: int) -> Iterator[Row]:
    spare, fresh = _Written(disk / "spare", state), _Written(disk / "fresh", state)
    torch_save = torch_save_of(disk / "bench.pt", state, sync=True)

    def saved_anew() -> float:
        (disk / "bench.pt").unlink(missing_ok=True)
        return torch_save()

    contenders: dict[str, Run] = {
        "memcpy": memcpy_of(state),
        "copy": functools.partial(spare.run, "copy", is_spare=True),
        "portus, spare": functools.partial(spare.run, "whole", is_spare=True),
        "rewrite + fdatasync": _rewrite_of(disk / "raw", state),
        "portus, fresh": functools.partial(fresh.run, "whole", is_spare=False),
        "torch.save + fsync": saved_anew,
        "memcpy + xxh3, processor": _memcpy_and_hash_of(state),
        "portus, fresh, processor": functools.partial(fresh.run, "processor", is_spare=False),
        "portus, spare, processor": functools.partial(spare.run, "processor", is_spare=True),
    }
    opens = Row(name=f"writer: sources free, spare, {name}", bar=1.1, this="copy", that="memcpy")
    opens.run(contenders, rounds, warmups=2)
    figures = opens.figures
    yield opens
    for title, bar, at_most, this, that in (
        ("durable spare over a rewrite", 1.1, True, "portus, spare", "rewrite + fdatasync"),
        ("torch.save + fsync over a fresh file", 1.2 if len(name) == 7 else 1.9, False,
         "torch.save + fsync", "portus, fresh"),
        ("processor time, fresh", 3.5, True, "portus, fresh, processor",
         "memcpy + xxh3, processor"),
        ("processor time, spare", 2.2, True, "portus, spare, processor",
         "memcpy + xxh3, processor"),
    ):  # fmt: skip
        yield Row(name=f"writer: {title}, {name}", bar=bar, at_most=at_most, this=this, that=that,
                  figures=figures)  # fmt: skip
    for left in ("spare", "fresh", "raw", "bench.pt"):
        (disk / left).unlink(missing_ok=True)


class _Written:
    """One state, written again and again."""

    def __init__(self, path: Path, state: dict[str, torch.Tensor]) -> None:
        self._path = path
        self._state = state
        self._ring = StagingRing(64 * MIB)
        self._image = pickle_state(state).image(str(path))
        self._address = np.array([each.data_ptr() for each in state.values()], np.int64)

    def run(self, what: str, *, is_spare: bool) -> float:
        """Seconds until the sources are free (``copy``), until the file is durable (``whole``), or
        of the processor until then."""
        change(self._state)
        if not is_spare:
            self._path.unlink(missing_ok=True)
        number = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        os.fsync(number)
        start, used = time.perf_counter(), time.process_time()
        file = ImageFile(number, str(self._path), self._image, is_spare=is_spare, ring=self._ring,
                         ways=Ways())  # fmt: skip
        file.copy(np.arange(len(self._address)), self._address, Stop())
        copied = time.perf_counter() - start
        file.finish()
        whole, used = time.perf_counter() - start, time.process_time() - used
        file.close()
        os.close(number)
        return {"copy": copied, "whole": whole, "processor": used}[what]


def _rewrite_of(path: Path, state: dict[str, torch.Tensor]) -> Run:
    """The same bytes over a warm file, which is made durable."""
    data = [each.view(torch.uint8).numpy().data for each in state.values()]

    def rewrite() -> None:
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        for each in data:
            os.write(number, each)
        os.fdatasync(number)
        os.close(number)

    return timed(rewrite)


def _memcpy_and_hash_of(state: dict[str, torch.Tensor]) -> Run:
    """Seconds of a processor for one copy and one digest."""
    copy = memcpy_of(state)
    data = [each.view(torch.uint8).numpy().data for each in state.values()]

    def run() -> float:
        start = time.process_time()
        copy()
        for each in data:
            xxhash.xxh3_128_digest(each)
        return time.process_time() - start

    return run
