"""Rows about storage hosts: what the way there costs, and where the time of a save goes."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch

import portus
from portus.engine.copying.local import hash_sources
from portus.engine.copying.segments import Sources, Stop
from portus.engine.format.checksum import UNIT
from portus.reach.index.pool import PoolWriter
from portus.reach.transport.stream import Link
from tests.bench.measure import Row, Run, timed
from tests.bench.saving import MIB, pool_at
from tests.bench.states import PAPER_MODELS, change, tensors
from tests.bench.wire import give_by_link, give_plain
from tests.hosts import ROOT, Host

SIZE = 512 * MIB
SHARES = ("copy", "hash", "wire", "flush", "index", "rest")


class Watched:
    """A ``portus serve`` on loopback and on a unix socket, whose metrics are read."""

    def __init__(self, place: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self._folder = tempfile.mkdtemp(prefix="portus-")  # a path that is short enough
        self._socket = f"{self._folder}/socket"
        self.host = Host(place, "--listen", f"unix:{self._socket}", "--metrics", str(self._port))

    @property
    def urls(self) -> dict[str, str]:
        return {"unix": f"portus+unix://{self._socket}", "tcp": self.host.url}

    def metrics(self) -> dict[str, float]:
        """Every number of the page, by its series; those of all tenants together."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        rows = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        found: dict[str, float] = {}
        for name, value in rows:
            plain = re.sub("{tenant=.*}", "", name)
            found[plain] = found.get(plain, 0) + float(value)
        return found

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.host.stop()
        shutil.rmtree(self._folder)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch's threads spin for a while after their work, and take the processor from the host."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def wire_rows(memory: Path, rounds: int) -> Iterator[Row]:
    """The pulled phase against a plain socket copy of the same bytes."""
    state = tensors(64, SIZE)
    with one_thread(), contextlib.ExitStack() as stack:
        watched = stack.enter_context(Watched(memory / "hosted"))
        contenders = {"portus file": _pulled(stack.enter_context(pool_at(memory / "pool")), state)}
        for way, url in watched.urls.items():
            checkpointer = stack.enter_context(
                contextlib.closing(portus.PoolCheckpointer(url, way, keep=1, on_error="raise"))
            )
            contenders[f"plain {way}"] = _plain(stack, memory, way, state)
            contenders[f"unhashed {way}"] = _unhashed(stack, memory, way, state)
            contenders[f"portus {way}"] = _pulled(checkpointer, state)
        row = Row(
            name=f"pulled to a local file, hashed, {SIZE // MIB} MiB: speed over a plain unix copy",
            bar=0.7,
            at_most=False,
            this="plain unix",
            that="portus file",
        ).run(contenders, rounds, warmups=4)
    yield row
    for way in ("unix", "tcp"):
        for that, bar in (("unhashed", 0.9), ("portus", 0.7)):
            hashed = "hashed" if that == "portus" else "without hashes"
            yield Row(
                name=f"pulled over {way}, {hashed}, {SIZE // MIB} MiB: speed over a plain copy",
                bar=bar,
                at_most=False,
                this=f"plain {way}",
                that=f"{that} {way}",
                figures=row.figures,
            )


def share_rows(memory: Path, disk: Path, rounds: int) -> Iterator[Row]:
    """Where the time of a save goes, as Table I and Figure 13 of the Portus paper ask: BERT."""
    count, size = PAPER_MODELS["BERT-large"]
    state = tensors(count, size * MIB)
    with one_thread():
        for name, place in (("tmpfs", memory), ("disk", disk)):
            with pool_at(place / "pool") as checkpointer:
                yield shares_row(
                    f"BERT-large, local file, {name}", _local_parts(checkpointer, state), rounds
                )
            with Watched(place / "hosted") as watched:
                for way, url in watched.urls.items():
                    checkpointer = portus.PoolCheckpointer(url, way, keep=1, on_error="raise")
                    with contextlib.closing(checkpointer):
                        parts = _hosted_parts(watched, checkpointer, state)
                        yield shares_row(f"BERT-large, {way}, {name}", parts, rounds)


Parts = Iterator[dict[str, float]]
"""For each save: seconds of each of ``SHARES``, and ``total``."""


def shares_row(name: str, parts: Parts, rounds: int, warmups: int = 3) -> Row:
    """Where the time of a save goes, in per cent; ``rounds`` saves count."""
    figures: dict[str, list[float]] = {share: [] for share in SHARES}
    totals = []
    for number in range(rounds + warmups):
        found = next(parts)
        if number >= warmups:
            totals.append(found["total"])
            for share in SHARES:
                figures[share].append(100 * found[share] / found["total"])
    largest = max(SHARES, key=lambda share: sorted(figures[share])[len(totals) // 2])
    return Row(
        name=f"where the time of a save goes, {name}; the largest share is {largest}",
        bar=None,
        this=largest,
        unit="%",
        figures=figures,
        note=f"of {sorted(totals)[len(totals) // 2]:.3g} s",
    )


def _local_parts(checkpointer: portus.PoolCheckpointer, state: dict[str, torch.Tensor]) -> Parts:
    """Copy and hash are one pass: ``hash`` is what hashing alone takes, ``copy`` the rest."""
    addresses = [each.data_ptr() for each in state.values()]
    sources = Sources.at(addresses, [each.nbytes for each in state.values()], [])
    step = 0
    while True:
        change(state)
        start = time.perf_counter()
        hash_sources(sources, Stop())
        hash_s = time.perf_counter() - start
        change(state)
        pool = checkpointer._steps.pool.open()
        assert isinstance(pool, PoolWriter)
        flushed_s = pool.persist_s
        handle = checkpointer.save(state, step := step + 1)
        handle.wait()
        stats = handle.stats
        parts = dict.fromkeys(SHARES, 0.0)
        parts["hash"] = min(hash_s, stats.copy_s)
        parts["copy"] = stats.copy_s - parts["hash"]
        parts["flush"] = pool.persist_s - flushed_s
        parts["index"] = max(0.0, stats.commit_s - parts["flush"])
        yield _with_rest(parts, stats.total_s)


def _hosted_parts(
    watched: Watched, checkpointer: portus.PoolCheckpointer, state: dict[str, torch.Tensor]
) -> Parts:
    """As the host tells. What the client hashes on the way out is in ``wire``: it goes on while
    the host receives. ``copy`` is nothing: bytes are received where they stay."""
    step = 0
    while True:
        change(state)
        before = watched.metrics()
        handle = checkpointer.save(state, step := step + 1)
        handle.wait()
        after = watched.metrics()
        took = {name: after[name] - before.get(name, 0) for name in after}
        parts = dict.fromkeys(SHARES, 0.0)
        parts["hash"] = took["portus_hash_seconds_total"]
        parts["wire"] = took["portus_pull_seconds_total"] - parts["hash"]
        parts["flush"] = took["portus_persist_seconds_total"]
        parts["index"] = took["portus_commit_seconds_total"] - parts["flush"]
        yield _with_rest(parts, handle.stats.total_s)


def _with_rest(parts: dict[str, float], total_s: float) -> dict[str, float]:
    parts["rest"] = max(0.0, total_s - sum(parts.values()))
    return {**parts, "total": total_s}


def _pulled(checkpointer: portus.PoolCheckpointer, state: dict[str, torch.Tensor]) -> Run:
    """Seconds until all bytes are in the pool, hashed, of a save of which every byte changed."""
    steps = iter(range(1 << 30))

    def run() -> float:
        change(state)
        handle = checkpointer.save(state, next(steps))
        handle.wait()
        assert handle.stats.copied_bytes == SIZE
        return handle.stats.copy_s

    return run


def _views(state: dict[str, torch.Tensor]) -> list[memoryview]:
    return [each.view(torch.uint8).numpy().data for each in state.values()]


def _plain(
    stack: contextlib.ExitStack, memory: Path, way: str, state: dict[str, torch.Tensor]
) -> Run:
    connected = stack.enter_context(_far_end(stack, "plain", memory, way))
    copy = timed(lambda: give_plain(connected, _views(state)))
    return _after_change(state, copy)


def _unhashed(
    stack: contextlib.ExitStack, memory: Path, way: str, state: dict[str, torch.Tensor]
) -> Run:
    connected = _far_end(stack, "link", memory, way)
    link = Link(connected, is_client=True, name="bench", silence_s=60)
    stack.callback(link.close)
    copy = timed(lambda: give_by_link(link, _views(state), UNIT))
    return _after_change(state, copy)


def _after_change(state: dict[str, torch.Tensor], copy: Run) -> Run:
    def run() -> float:
        change(state)
        return copy()

    return run


def _far_end(stack: contextlib.ExitStack, kind: str, memory: Path, way: str) -> socket.socket:
    """A connection to a process of ``wire``, which ends with it."""
    address = "0" if way == "tcp" else str(memory / f"{kind}.sock")
    command = [sys.executable, "-m", "tests.bench.wire", kind, str(SIZE)]
    process = subprocess.Popen(
        [*command, str(memory / f"{kind}-{way}"), address],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    stack.callback(process.wait, 30)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    word, place = process.stdout.readline().split()
    assert word == "ready"
    if way == "tcp":
        connected = socket.create_connection(("127.0.0.1", int(place)))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected
    plain = socket.socket(socket.AF_UNIX)
    plain.connect(place)
    return plain
