"""Rows about loads, and about opening a big pool."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from portus.engine.pipeline.draft import Labels
from portus.reach.format.layout import DATA_START, EXTENT, STORAGE, UNIT_DIGEST
from portus.reach.index.commit_records import new_version
from portus.reach.index.directory import create_pool, open_writer
from portus.reach.media.local import LocalFiles
from tests.bench.measure import Row, Run, hog, timed
from tests.bench.saving import MIB, memcpy_of, pool_at
from tests.bench.states import tensors
from tests.contents import table


class Holder(torch.nn.Module):
    """A module with the tensors as parameters."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_parameter(
                name.replace(".", "_"), torch.nn.Parameter(torch.zeros_like(tensor))
            )


def restore_rows(memory: Path, disk: Path, rounds: int) -> Iterator[Row]:
    """Weights into a model that exists, verified, against one memcpy, and against torch.load +
    load_state_dict of a file in the same place. What is on the disk is in the page cache. From
    memory also beside a process that keeps a core busy."""
    with hog():
        time.sleep(1)  # until it is at work
        yield _restored("tmpfs, beside a busy process", memory, rounds, 2.0)
    places = (("tmpfs", memory, 1.4, 7.0, 1.3), ("page cache of a disk", disk, 2.0, None, None))
    for name, place, over_memcpy, over_load, over_mapped in places:
        row = _restored(name, place, rounds, over_memcpy)
        yield row
        others = (
            ("torch.load + load_state_dict", "torch.load", over_load),
            ("torch.load(mmap=True) + load_state_dict", "mmap=True", over_mapped),
        )
        for what, this, bar in others:
            yield Row(
                name=f"{what} over restore_into, {name}, 1 GiB",
                bar=bar,
                at_most=False,
                this=this,
                that="portus",
                figures=row.figures,
            )


def _restored(name: str, place: Path, rounds: int, bar: float) -> Row:
    source = Holder(tensors(200, 1024 * MIB))
    target = Holder(dict(source.state_dict()))
    state = source.state_dict()
    file = place / "bench.pt"
    torch.save(state, file)

    def stock(mmap: bool) -> Run:
        return timed(lambda: target.load_state_dict(torch.load(file, mmap=mmap)))

    with pool_at(place / "pool") as checkpointer:
        checkpointer.save(state, 0).wait()
        costs: list[_Cost] = []

        def ours() -> float:
            before, start = _Cost.now(), time.perf_counter()
            checkpointer.restore_into(target.state_dict())
            seconds = time.perf_counter() - start
            costs.append(_Cost.now() - before)
            return seconds

        row = Row(name=f"restore_into, {name}, 1 GiB, over memcpy", bar=bar, that="memcpy").run(
            {
                "portus": ours,
                "memcpy": memcpy_of(state),
                "torch.load": stock(False),
                "mmap=True": stock(True),
            },
            rounds,
            warmups=2,
        )
    file.unlink()
    row.note = f"a restore: {_Cost.median(costs[-rounds:])}; {_huge_pages()}"
    return row


@dataclass(frozen=True, slots=True)
class _Cost:
    """What this process used: seconds of processors, page faults, bytes read from a disk."""

    cpu_s: float
    faults: int
    read_bytes: int

    @classmethod
    def now(cls) -> _Cost:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        read = int(_field("/proc/self/io", "read_bytes").split()[0])
        return cls(usage.ru_utime + usage.ru_stime, usage.ru_minflt + usage.ru_majflt, read)

    def __sub__(self, other: _Cost) -> _Cost:
        return _Cost(
            self.cpu_s - other.cpu_s,
            self.faults - other.faults,
            self.read_bytes - other.read_bytes,
        )

    @staticmethod
    def median(costs: list[_Cost]) -> str:
        """Of each of them, in words."""
        cpu_s = statistics.median(cost.cpu_s for cost in costs)
        faults = statistics.median(cost.faults for cost in costs)
        read = statistics.median(cost.read_bytes for cost in costs)
        return f"{cpu_s:.3g} s of processors, {faults:.0f} page faults, {read:.0f} bytes from disks"


def _huge_pages() -> str:
    """Whether this process has huge pages, in words."""
    told = [int(_field("/proc/self/smaps_rollup", name).split()[0]) for name in
            ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")]  # fmt: skip
    return f"{sum(told) // 1024} MiB in huge pages"


def _field(path: str, name: str) -> str:
    with open(path, encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return fields[name]


def open_row(memory: Path, rounds: int) -> Row:
    """Opening, for writing, a pool whose one version has a million extents."""
    path = str(memory / "million.portus")
    _make_pool_of(path, 1_000_000)

    def run() -> float:
        start = time.perf_counter()
        writer = open_writer(path, LocalFiles())
        seconds = time.perf_counter() - start
        writer.close()
        return seconds

    row = Row(name="open a pool of 1,000,000 extents", bar=1.0).run({"portus": run}, rounds)
    os.unlink(path)
    return row


def _make_pool_of(path: str, count: int) -> None:
    """A pool with one version of ``count`` storages of 64 bytes; their bytes are never read."""
    if os.path.exists(path):
        os.unlink(path)
    create_pool(path, LocalFiles())
    writer = open_writer(path, LocalFiles())
    room = writer.reserve(count * 128)
    extents = np.zeros(count, EXTENT.dtype)
    extents["offset"] = room[0].offset + 128 * np.arange(count)  # gaps: no two can be joined
    extents["length"] = 64
    storages = np.zeros(count, STORAGE.dtype)
    storages["length"], storages["extents"] = 64, 1
    writer.commit(
        new_version(
            Labels(model="million", step=0, token=bytes(16), contents=table([64] * count)),
            (storages, extents, np.zeros(count, UNIT_DIGEST.dtype)),
        ),
        room,
    )
    assert room[0].offset >= DATA_START
    writer.close()
