"""Rows about saves: time to commit, on tmpfs and on a disk, and what is written."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import portus
from portus.engine.pipeline.audit import Guard
from tests.bench.measure import Row, Run, timed
from tests.bench.states import PAPER_MODELS, Trained, change, tensors

MIB = 1 << 20

SHORT = 256 * MIB
"""Bytes of a state whose times are so short that a moment's noise is most of them: more rounds."""


@contextmanager
def pool_at(place: Path, *, guard: Guard = "auto") -> Iterator[portus.PoolCheckpointer]:
    """A fresh pool, removed afterwards."""
    shutil.rmtree(place, ignore_errors=True)
    path = place / "bench.portus"
    checkpointer = portus.PoolCheckpointer(path, keep=1, on_error="raise", guard=guard)
    try:
        yield checkpointer
    finally:
        checkpointer.close()
        shutil.rmtree(place, ignore_errors=True)


def memcpy_of(state: dict[str, torch.Tensor]) -> Run:
    """One thread copying the same bytes into one warm buffer."""
    total = sum(tensor.nbytes for tensor in state.values())
    buffer = torch.zeros(total, dtype=torch.uint8).numpy()
    sources = [tensor.view(torch.uint8).numpy() for tensor in state.values()]

    def copy() -> None:
        start = 0
        for source in sources:
            buffer[start : start + len(source)] = source
            start += len(source)

    return timed(copy)


def commit_of(checkpointer: portus.PoolCheckpointer, state: dict[str, torch.Tensor]) -> Run:
    """Seconds from the call of save to the commit, of a state whose every byte changed."""
    steps = iter(range(1 << 30))

    def commit() -> float:
        change(state)
        start = time.perf_counter()
        checkpointer.save(state, next(steps)).wait()
        return time.perf_counter() - start

    return commit


def torch_save_of(path: Path, state: dict[str, torch.Tensor], *, sync: bool) -> Run:
    """``torch.save`` over the file of the last time; with ``sync``, made durable."""

    def save() -> None:
        torch.save(state, path)
        if sync:
            for place in (path, path.parent):
                descriptor = os.open(place, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

    return timed(save)


def commit_rows(memory: Path, rounds: int) -> Iterator[Row]:
    """Steady time to commit on tmpfs."""
    yield from gib_rows(memory, rounds)
    yield from paper_rows(memory, rounds, PAPER_MODELS)
    yield from _against_memcpy(
        memory, "10,000 tensors of 16 KiB", rounds, tensors_of(10_000, 16 << 10), 4.0
    )


def gib_rows(memory: Path, rounds: int) -> Iterator[Row]:
    """1 GiB, also against torch.save."""
    for count, size in ((64, 1024 * MIB), (400, 1024 * MIB)):
        yield from _against_memcpy(memory, f"{size // MIB} MiB in {count} tensors", rounds,
                                   tensors(count, size), 1.3, with_torch=True)  # fmt: skip


def paper_rows(memory: Path, rounds: int, names: Iterable[str]) -> Iterator[Row]:
    """Models of the Portus paper."""
    for name in names:
        count, mib = PAPER_MODELS[name]
        for kind, factor in (("weights", 1), ("with Adam state", 3)):
            state = tensors(count * factor, mib * factor * MIB)
            yield from _against_memcpy(memory, f"{name}, {kind}", rounds, state, 1.6)


def tensors_of(count: int, size: int) -> dict[str, torch.Tensor]:
    """``count`` tensors of ``size`` bytes each."""
    return {f"t{index}": torch.randn(size // 4) for index in range(count)}


def _against_memcpy(
    memory: Path,
    name: str,
    rounds: int,
    state: dict[str, torch.Tensor],
    bar: float | None,
    *,
    with_torch: bool = False,
) -> Iterator[Row]:
    file = memory / "bench.pt"
    with pool_at(memory / "pool") as checkpointer:
        contenders = {"memcpy": memcpy_of(state), "portus": commit_of(checkpointer, state)}
        if with_torch:
            contenders["torch.save"] = torch_save_of(file, state, sync=False)
        row = Row(name=f"commit, tmpfs, {name}", bar=bar, that="memcpy")
        short = sum(tensor.nbytes for tensor in state.values()) < SHORT
        yield row.run(contenders, rounds * 5 if short else rounds, warmups=4)
        if with_torch:
            yield Row(
                name=f"torch.save over commit, tmpfs, {name}",
                bar=7.0,
                at_most=False,
                this="torch.save",
                that="portus",
                figures=row.figures,
            )
    file.unlink(missing_ok=True)


def durable_rows(disk: Path, rounds: int) -> list[Row]:
    """Durable on a disk, against torch.save and fsync, and against what the disk itself takes."""
    size = 512 * MIB
    state = tensors(200, size)
    raw = bytes(8 * MIB)

    def write() -> None:
        descriptor = os.open(disk / "raw", os.O_WRONLY | os.O_CREAT)
        for _ in range(size // len(raw)):
            os.write(descriptor, raw)
        os.fdatasync(descriptor)
        os.close(descriptor)

    with pool_at(disk / "pool") as checkpointer:
        row = Row(
            name="torch.save + fsync over commit, disk, 512 MiB",
            bar=2.0,
            at_most=False,
            this="torch.save + fsync",
            that="portus",
        ).run(
            {
                "portus": commit_of(checkpointer, state),
                "torch.save + fsync": torch_save_of(disk / "bench.pt", state, sync=True),
                "rewrite + fdatasync": timed(write),
            },
            rounds,
            warmups=3,
        )
    for name in ("bench.pt", "raw"):
        (disk / name).unlink(missing_ok=True)
    rate = size / MIB / statistics.median(row.figures["rewrite + fdatasync"])
    row.note = f"the disk itself takes {rate:,.0f} MiB/s (rewriting a file, then fdatasync)"
    itself = Row(
        name="commit, disk, 512 MiB, over rewrite + fdatasync",
        bar=None,
        that="rewrite + fdatasync",
        figures=row.figures,
    )
    return [row, itself]


def call_row(memory: Path, rounds: int) -> Row:
    """How long save() itself takes, for 1,000 tensors it has seen before."""
    trained = Trained(125, 64)  # 250 parameters, 750 tensors of optimizer state
    with pool_at(memory / "pool") as checkpointer:

        def call() -> float:
            trained.step()
            handle = checkpointer.save(trained.state(), 0)
            handle.wait()
            return handle.stats.call_s * 1e3

        row = Row(name="save() returns, 1,000 known tensors", bar=10.0, unit="ms")
        return row.run({"portus": call}, 3 * rounds, warmups=5)


def fixed_row(memory: Path, rounds: int) -> Row:
    """What a commit takes however little is copied: of as many tensors as ResNet50 has weights."""
    count = PAPER_MODELS["ResNet50"][0]
    state = tensors_of(count, 4)
    whole: list[float] = []
    calls: list[float] = []
    with pool_at(memory / "pool") as checkpointer:
        for step in range(20 + 100 * rounds):
            change(state)
            time.sleep(0.005)  # what the worker does after a commit is over
            start = time.perf_counter()
            handle = checkpointer.save(state, step)
            called = time.perf_counter()
            handle.wait()
            whole.append((time.perf_counter() - start) * 1e3)
            calls.append((called - start) * 1e3)
    return Row(
        name=f"commit, tmpfs, {count} tensors of 4 bytes",
        bar=None,
        unit="ms",
        figures={"portus": whole[20:], "of it in the call": calls[20:]},
    )


def guard_row(memory: Path, rounds: int) -> Row:
    """What an exact audit costs: a save, and the step right after it, until the save is durable."""
    guards: tuple[Guard, ...] = ("exact", "probe")
    ways: dict[str, str] = {}

    def saved_beside_a_step(guard: Guard, checkpointer: portus.PoolCheckpointer) -> Run:
        trained = Trained(22, 1024)

        def run() -> float:
            trained.step()
            start = time.perf_counter()
            handle = checkpointer.save(trained.state(), 0)
            trained.step()
            handle.wait()
            took = time.perf_counter() - start
            ways[guard] = handle.stats.guard
            return took

        return run

    with contextlib.ExitStack() as stack:
        contenders: dict[str, Run] = {}
        for guard in guards:
            place = memory / f"pool-{guard}"
            checkpointer = stack.enter_context(pool_at(place, guard=guard))
            contenders[guard] = saved_beside_a_step(guard, checkpointer)
        row = Row(name="a save and a step, guard exact over probe, 264 MiB", bar=None, this="exact",
                  that="probe").run(contenders, 3 * rounds, warmups=3)  # fmt: skip
    row.note = ", ".join(f"{guard}: audited by {way}" for guard, way in ways.items())
    return row


def memory_row(memory: Path, rounds: int) -> Row:
    """Anonymous and pinned memory that a save adds, in MiB, at its highest."""
    trained = Trained(60, 1024)
    with pool_at(memory / "pool") as checkpointer:

        def added() -> float:
            trained.step()
            before, highest, over = anonymous(), 0, threading.Event()

            def watch() -> None:
                nonlocal highest
                while not over.wait(0.002):
                    highest = max(highest, anonymous())

            watcher = threading.Thread(target=watch)
            watcher.start()
            checkpointer.save(trained.state(), 0).wait()
            over.set()
            watcher.join()
            return max(0, highest - before) / MIB

        row = Row(name=f"memory added by a save of {trained.size // MIB} MiB", bar=64, unit="MiB")
        return row.run({"portus": added}, rounds, warmups=2)


def anonymous() -> int:
    """Bytes of anonymous memory and of locked memory of this process."""
    with open("/proc/self/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmLck", "VmPin"))


def frozen_row(memory: Path) -> Row:
    """Bytes written by the second save of a state of which 95 % are frozen, in percent."""
    frozen = tensors(95, 95 * MIB)
    head = torch.nn.Linear(1024, 1280)  # 5 MiB
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    with pool_at(memory / "pool") as checkpointer:
        stats = []
        for step in range(2):
            head(torch.randn(2, 1024)).sum().backward()
            optimizer.step()
            handle = checkpointer.save({"base": frozen, "head": head.state_dict()}, step)
            handle.wait()
            stats.append(handle.stats)
    share = 100 * stats[1].copied_bytes / stats[0].copied_bytes
    return Row(
        name="second save, 95 % frozen: bytes written",
        bar=6.0,
        unit="% of the first",
        figures={"portus": [share]},
    )


def growth_rows(memory: Path, rounds: int) -> Iterator[Row]:
    """Time to commit as the state grows, in bytes and in tensors. Plotted."""
    for size in (16, 64, 256, 1024, 4096):
        state = tensors(64, size * MIB)
        yield from _against_memcpy(memory, f"growth: {size} MiB", rounds, state, None)
    for count in (10, 100, 1000, 10_000):
        state = tensors(count, 256 * MIB)
        yield from _against_memcpy(memory, f"growth: {count} tensors", rounds, state, None)
