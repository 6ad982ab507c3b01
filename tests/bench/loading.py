"""Rows about loads, and about opening a big pool."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import torch

from portus.format.layout import DATA_START, EXTENT, STORAGE, UNIT_DIGEST
from portus.index.directory import create_pool, open_writer
from portus.index.pool import NewVersion
from portus.media.local import LocalFiles
from tests.bench.measure import Row, Run
from tests.bench.saving import MIB, pool_at
from tests.bench.states import tensors


class Holder(torch.nn.Module):
    """A module with the tensors as parameters."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_parameter(
                name.replace(".", "_"), torch.nn.Parameter(torch.zeros_like(tensor))
            )


def restore_rows(memory: Path, rounds: int) -> list[Row]:
    """Weights into a model that exists, verified, against torch.load + load_state_dict."""
    source = Holder(tensors(200, 1024 * MIB))
    target = Holder(dict(source.state_dict()))
    state = source.state_dict()
    file = memory / "bench.pt"
    torch.save(state, file)

    def stock(mmap: bool) -> Run:
        def run() -> float:
            start = time.perf_counter()
            target.load_state_dict(torch.load(file, mmap=mmap))
            return time.perf_counter() - start

        return run

    with pool_at(memory / "pool") as checkpointer:
        checkpointer.save(state, 0).wait()

        def ours() -> float:
            start = time.perf_counter()
            checkpointer.restore_into(target.state_dict())
            return time.perf_counter() - start

        row = Row(
            name="torch.load + load_state_dict over restore_into, 1 GiB",
            bar=7.0,
            at_most=False,
            this="torch.load",
            that="portus",
        ).run({"portus": ours, "torch.load": stock(False), "mmap=True": stock(True)}, rounds)
    file.unlink()
    mapped = Row(
        name="torch.load(mmap=True) + load_state_dict over restore_into, 1 GiB",
        bar=1.3,
        at_most=False,
        this="mmap=True",
        that="portus",
        figures=row.figures,
    )
    return [row, mapped]


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
    storages["first_extent"] = storages["first_unit"] = np.arange(count)
    writer.commit(
        NewVersion(
            model="million",
            step=0,
            token=bytes(16),
            layout=b"[]",
            tree=b"{}",
            storages=storages,
            extents=extents,
            units=np.zeros(count, UNIT_DIGEST.dtype),
        ),
        room,
    )
    assert room[0].offset >= DATA_START
    writer.close()
