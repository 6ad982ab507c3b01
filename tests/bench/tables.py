"""Rows about embedding tables that are durable after each batch: W9 of the TrainingCXL paper.

RM1 and RM2 have many lookups and small MLPs, RM3 and RM4 the other way round, as in the paper,
which does not say their sizes; these are scaled to a machine of two cores.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import torch

import portus
from portus.embedding import ProtectedTables, RowwiseAdagrad, protect
from tests.bench.measure import Row
from tests.device import stand_in

MIB: Final = 1 << 20
SIZES: Final = [
    int(each) * MIB
    for each in os.environ.get("PORTUS_BENCH_TABLES_MIB", "400,1600,4000").split(",")
]
"""Of all tables, of RM1; the others have the first."""

BATCHES: Final = 24
"""Of each contender, a round, at least. Those that are protected go on until their log was folded
in; those that save all of it each batch make one."""

CYCLE_S_MAX: Final = 60.0
"""What a cycle may take until its log is folded in."""

BIG: Final = 1 << 30
"""Bytes of tables from which on there is one round, and undo in relaxed mode only."""

DEVICE_LOG: Final = 192 << 20
DEVICE_MORE: Final = 3 * DEVICE_LOG
"""What a device has besides the tables and what their optimizer keeps."""

GAP: Final = 50


@dataclass(frozen=True)
class Shape:
    """tables: how many; lookups of a sample in each; width of a row; of each hidden layer."""

    tables: int
    lookups: int
    width: int
    hidden: int
    batch: int = 512


SHAPES: Final = {
    "RM1": Shape(8, 20, 32, 128),
    "RM2": Shape(16, 20, 64, 128),
    "RM3": Shape(8, 2, 32, 1024),
    "RM4": Shape(4, 1, 32, 2048),
}


class Model(torch.nn.Module):
    """Tables of so many bytes in all, and MLPs."""

    def __init__(self, shape: Shape, size: int) -> None:
        super().__init__()
        self.rows = size // (4 * shape.width * shape.tables)
        self.tables = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(
                self.rows, shape.width, mode="sum", sparse=True,
                _weight=torch.empty(self.rows, shape.width).uniform_(-0.1, 0.1),
            )
            for _ in range(shape.tables)
        )  # fmt: skip
        self.bottom = torch.nn.Sequential(
            torch.nn.Linear(13, shape.hidden), torch.nn.ReLU(),
            torch.nn.Linear(shape.hidden, shape.width),
        )  # fmt: skip
        self.top = torch.nn.Sequential(
            torch.nn.Linear(shape.width * (shape.tables + 1), shape.hidden), torch.nn.ReLU(),
            torch.nn.Linear(shape.hidden, 1),
        )  # fmt: skip

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        found = [table(ids[each]) for each, table in enumerate(self.tables)]
        out: torch.Tensor = self.top(torch.cat([self.bottom(dense), *found], 1))
        return out


class Training:
    """A model that trains on batches which are made before."""

    def __init__(self, shape: Shape, size: int) -> None:
        torch.manual_seed(0)
        self.model = Model(shape, size)
        rest = [*self.model.bottom.parameters(), *self.model.top.parameters()]
        self.optimizers: list[Any] = [
            RowwiseAdagrad(self.model.tables.parameters(), lr=0.01),
            torch.optim.Adam(rest),
        ]
        rank = torch.rand(24, shape.tables, shape.batch, shape.lookups, dtype=torch.float64)
        ids = torch.exp(rank * torch.log(torch.tensor(float(self.model.rows)))).long() - 1
        self.batches: Iterator[Any] = itertools.cycle(
            [(torch.randn(shape.batch, 13), each * 7919 % self.model.rows) for each in ids]
        )

    def step(self) -> None:
        dense, ids = next(self.batches)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(dense, ids).pow(2).mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
        }

    @property
    def dense_bytes(self) -> int:
        parts = [*self.model.bottom.parameters(), *self.model.top.parameters()]
        return 3 * sum(each.nbytes for each in parts)


Mode = Literal["relaxed", "strict"]
MODES: Final[tuple[Mode, ...]] = ("relaxed", "strict")


EARLY: Final = "relaxed, looked up early"


def ids_of(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What each table of a batch will look up."""
    return {f"tables.{place}": ids for place, ids in enumerate(batch[1])}


def table_rows(memory: Path, disk: Path, rounds: int) -> Iterator[Row]:
    """RM1 with tables of each size, at which relaxed is to cost the same; the other shapes with the
    first size. Training has one thread, and leaves the other core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _all_rows(memory, disk, rounds)
    finally:
        torch.set_num_threads(threads)


def _all_rows(memory: Path, disk: Path, rounds: int) -> Iterator[Row]:
    ratios: dict[str, list[float]] = {}
    for size in SIZES:
        for row in _rows(f"RM1, {size // MIB} MiB", SHAPES["RM1"], size, memory, disk, rounds):
            if row.this == "relaxed":
                ratios[f"{size // MIB} MiB"] = [row.value.median]
            yield row
    if len(ratios) > 1:
        smallest, *_, largest = ratios
        yield Row(
            name=f"DLRM RM1: a batch, relaxed, with {largest} of tables, over {smallest}",
            this=largest,
            that=smallest,
            unit="x",
            bar=1.1,
            figures=ratios,
            note="a batch with its tables relaxed, over one that nobody saves, at each size",
        )
    for name in ("RM2", "RM3", "RM4"):
        title = f"{name}, {SIZES[0] // MIB} MiB"
        yield from _rows(title, SHAPES[name], SIZES[0], memory, disk, rounds)


def _rows(
    name: str, shape: Shape, size: int, memory: Path, disk: Path, rounds: int
) -> Iterator[Row]:
    """One training, whose batches are saved in one way after another: it is in memory once."""
    rounds = rounds if size < BIG else 1
    training, kept = Training(shape, size), disk / "tables-kept.portus"
    notes: dict[str, str] = {}
    figures: dict[str, list[float]] = {}
    _each(training.step, 4)
    for mode in MODES:
        cycles = _cycles(training, kept, mode, rounds, figures, mode)
        notes[mode] = f"dense part {training.dense_bytes / MIB:.1f} MiB; {cycles}"
        if mode == "relaxed" and size < BIG:
            notes[EARLY] = str(_cycles(training, kept, mode, rounds, figures, EARLY))
    for way, begin in (("portus save", _saved), ("torch.save", _torch_saved)):
        with _fresh(disk / "tables.portus") as place, begin(place, training) as step:
            step()
            before = _written()
            figures[way] = [_each(step, 1) for _ in range(rounds)]
            notes[way] = f"{(_written() - before) / rounds / MIB:.0f} MiB for each batch"
    del training  # it would be in memory twice
    gc.collect()
    start = time.perf_counter()
    with portus.open(kept) as view:
        view.load("embedding")
    notes["strict"] += f"; loaded again in {time.perf_counter() - start:.2f} s"
    kept.unlink()
    for mode in MODES if size < BIG else MODES[:1]:
        undo, training = f"undo {mode}", Training(shape, size)
        _each(training.step, 4)
        with _device(memory, size + size // 8 + DEVICE_MORE) as device:
            cycles = _cycles(training, device, mode, 1, figures, undo)
            del training  # it would be in memory twice
            gc.collect()
            loaded_s = _loaded_in_place(Training(shape, size), device, mode)
        notes[undo] = (
            f"in place, a file in memory stands in for the device; {cycles}; loaded again in "
            f"{loaded_s:.2f} s"
        )
        gc.collect()
    for way, note in notes.items():
        is_log = way.endswith(MODES)
        that = f"nothing, beside {way}" if is_log else "relaxed" if way == EARLY else "strict"
        over = "one that nobody saves" if is_log else that
        yield Row(
            name=f"DLRM {name}: a batch, {way}, over {over}",
            this=way,
            that=that,
            bar=1.1 if way == "relaxed" else None,
            figures={each: figures[each] for each in (way, that)},
            note=note,
        )


def _cycles(
    training: Training, place: Path, mode: Mode, rounds: int, figures: dict[str, list[float]],
    name: str,
) -> _Cycle:  # fmt: skip
    """Fill in the figures of protected batches, and of those beside that nobody saves; the last
    cycle."""
    mine, nothing = [], []
    in_place = name.startswith("undo")
    for _ in range(rounds):
        before = _each(training.step, BATCHES)
        if not in_place:
            place.unlink(missing_ok=True)
        cycle = _Cycle(training, place, mode, in_place=in_place, is_early=name == EARLY)
        mine.append(cycle.mean_s)
        # After a cycle in place there are no tables any more.
        nothing.append(before if in_place else (before + _each(training.step, BATCHES)) / 2)
    figures[name], figures[f"nothing, beside {name}"] = mine, nothing
    return cycle


def _loaded_in_place(training: Training, device: Path, mode: Mode) -> float:
    """Seconds until a new process could go on: tables mapped and verified, dense part loaded."""
    start = time.perf_counter()
    with protect(
        training.model, training.optimizers, pool=device, mode=mode, gap=GAP, in_place=True
    ) as tables:
        tables.load()
        return time.perf_counter() - start


@contextlib.contextmanager
def _fresh(place: Path) -> Iterator[Path]:
    place.unlink(missing_ok=True)
    yield place
    place.unlink(missing_ok=True)


@contextlib.contextmanager
def _device(memory: Path, size: int) -> Iterator[Path]:
    """A file that stands in for a DAX device: nothing is flushed."""
    with (
        _fresh(memory / "dax") as device,
        tempfile.TemporaryDirectory(dir=memory) as facts,
        pytest.MonkeyPatch.context() as patch,
    ):
        with open(device, "wb") as file:
            file.truncate(size + -size % MIB)
        stand_in(str(device), facts, patch)
        yield device


class _Cycle:
    """Batches from the first image of a pool until its log was folded in, with all that takes."""

    def __init__(
        self, training: Training, place: Path, mode: Mode, *, in_place: bool, is_early: bool
    ) -> None:
        took: list[float] = []
        sizes: list[int] = []
        with protect(
            training.model,
            training.optimizers,
            pool=place,
            mode=mode,
            gap=GAP,
            in_place=in_place,
            log_bytes=DEVICE_LOG if in_place else None,
            ids_of=ids_of if is_early else None,
            early_lookup=is_early,
        ) as tables:
            batches = training.batches
            if is_early:
                training.batches = tables.ahead(batches)
            training.step()
            tables.wait()
            # Slices make new versions too; a fold begins another log, and so does, in place, the
            # last slice.
            first, begun, written = _log_of(tables), time.perf_counter(), _written()
            while len(took) < BATCHES or (
                _log_of(tables) == first and time.perf_counter() - begun < CYCLE_S_MAX
            ):
                before, start = _used(tables), time.perf_counter()
                training.step()
                took.append(time.perf_counter() - start)
                sizes.append(_used(tables) - before)
            start = time.perf_counter()
            tables.wait()
            self.mean_s = (sum(took) + time.perf_counter() - start) / len(took)
            self._written = (_written() - written) / len(took)
            self._is_folded = _log_of(tables) != first
            training.batches = batches
        self._took = took
        self._entry = statistics.median([each for each in sizes if each > 0] or [0])

    def __str__(self) -> str:
        folded = "its log folded in once" if self._is_folded else "its log not folded in"
        written = f", {self._written / MIB:.1f} MiB written in all" if self._written else ""
        return (
            f"{self._entry / MIB:.2f} MiB of log for each batch{written}; {len(self._took)} "
            f"batches, {folded}; half of them took up to {statistics.median(self._took) * 1e3:.0f} "
            f"ms, the longest {max(self._took) * 1e3:.0f}"
        )


def _log_of(tables: ProtectedTables) -> bytes:
    log = tables._store._log
    return b"" if log is None else log.log.name


def _used(tables: ProtectedTables) -> int:
    log = tables._store._log
    return 0 if log is None else log.used_extent.length


def _written() -> int:
    """Bytes that this process had to write to disks so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["write_bytes"])


@contextlib.contextmanager
def _saved(place: Path, training: Training) -> Iterator[Callable[[], None]]:
    with portus.PoolCheckpointer(place, keep=1, journal=False) as run:

        def step() -> None:
            training.step()
            run.save(training.state(), 0).wait()

        yield step


@contextlib.contextmanager
def _torch_saved(place: Path, training: Training) -> Iterator[Callable[[], None]]:
    def step() -> None:
        training.step()
        torch.save(training.state(), place)
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    yield step


def _each(step: Callable[[], None], count: int) -> float:
    """Seconds of one."""
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count
