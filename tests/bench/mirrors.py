"""Rows about mirrors: a real S3 server on loopback, beside the clients that are measured.

Clients are processes of their own (``python -m tests.bench.mirrors WHAT FOLDER``); those that put
are on one processor, as a trainer that has no more, and the server has the rest. What a client
imports, and the first touch of memory that a virtual machine does not have yet, is not measured.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import obstore
import obstore.fsspec
import torch
from obstore.store import S3Store

import portus
from portus.reach.versions.parallel import Rooms, in_any_order
from tests.bench.measure import Row, Spread, timed
from tests.bench.saving import MIB, anonymous
from tests.bench.states import Trained, tensors
from tests.hosts import ROOT
from tests.s3 import needs
from tests.s3.needs import ServerError
from tests.s3.server import Server

SIZE = 256 * MIB
UNIT = 16 * MIB
ABREAST = 4
"""Requests of a plain client at once: as many as a mirror makes."""

BUCKET = "portus"
STEPS, EVERY = 12, 4
LAYERS, WIDTH, TOKENS = 16, 1024, 512
"""A state of about 200 MB, as that of a small GPT, and a step of four short sequences: about a
second on one processor."""
FROZEN = 0.95
TOUCHED = 1 << 30
"""Bytes that a client touches and gives back first, about as many as it needs then."""

Told = dict[str, float]


def mirror_rows(memory: Path, disk: Path, rounds: int) -> Iterator[Row]:
    """None where there is no such server; it says why."""
    try:
        needs.check()
    except ServerError as error:
        print(f"no rows about a mirror in a bucket: {error}", file=sys.stderr)
        return
    with (
        tempfile.TemporaryDirectory(prefix="portus-bench-s3-", dir=disk) as folder,
        Server(Path(folder) / "server", tls=True) as server,
    ):
        server.make_bucket(BUCKET)
        secure = _Clients(memory, server.secure())
        yield from _put_rows(secure, rounds, "over TLS", 0.8, 1.2)
        yield from _put_rows(_Clients(memory, server.environment()), rounds, "without TLS")
        yield from _get_rows(secure, rounds)
        yield from _training_rows(secure, rounds)


class _Clients:
    """Starts clients, and has a name for each that nobody had."""

    _numbers = itertools.count()

    def __init__(
        self, memory: Path, environment: dict[str, str], root: str = f"s3://{BUCKET}"
    ) -> None:
        self._memory = memory
        self._environment = os.environ | environment
        self._root = root

    def run(self, what: str, prefix: str = "") -> Told:
        """What the client ``what`` tells. prefix: of what it finds in the bucket."""
        with tempfile.TemporaryDirectory(prefix="client-", dir=self._memory) as folder:
            url = f"{self._root}/{prefix or next(self._numbers)}"
            done = subprocess.run(
                [sys.executable, "-m", "tests.bench.mirrors", what, folder, url],
                cwd=ROOT,
                env=self._environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        told: Told = json.loads(done.stdout.splitlines()[-1])
        return told


def _put_rows(
    clients: _Clients, rounds: int, how: str, speed: float | None = None, cpu: float | None = None
) -> Iterator[Row]:
    """Rows of ``put`` and ``mirrored``. how: they reach the server. speed, cpu: the bars."""
    figures = _turns(clients, rounds, {"put": "", "mirrored": ""})
    yield Row(
        name=f"{SIZE // MIB} MiB mirrored {how}: speed over a plain put, on one processor",
        bar=speed,
        at_most=False,
        this="put, s",
        that="mirrored, s",
        figures={each: figures[each] for each in ("put, s", "mirrored, s")},
    )
    yield Row(
        name=f"{SIZE // MIB} MiB mirrored {how}: processor time over a plain put's",
        bar=cpu,
        this="mirrored, cpu_s",
        that="put, cpu_s",
        figures={each: figures[each] for each in ("mirrored, cpu_s", "put, cpu_s")},
    )


def _get_rows(clients: _Clients, rounds: int) -> Iterator[Row]:
    clients.run("put", "plain"), clients.run("mirrored", "filled")
    figures = _turns(clients, rounds, {"get": "plain", "fresh": "filled"})
    yield Row(
        name=f"{SIZE // MIB} MiB to an empty pool, and loaded: speed over a plain get",
        bar=0.8,
        at_most=False,
        this="get, s",
        that="fresh, s",
        figures={each: figures[each] for each in ("get, s", "fresh, s")},
    )
    yield Row(
        name=f"{SIZE // MIB} MiB to an empty pool, and loaded: processor time over a plain get's",
        bar=None,
        this="fresh, cpu_s",
        that="get, cpu_s",
        figures={each: figures[each] for each in ("fresh, cpu_s", "get, cpu_s")},
    )


def _turns(clients: _Clients, rounds: int, turns: dict[str, str]) -> dict[str, list[float]]:
    """What clients tell, in turns: ``CLIENT, FIGURE``. turns: what each finds in the bucket."""
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        for what, prefix in turns.items():
            for each, figure in clients.run(what, prefix).items():
                figures.setdefault(f"{what}, {each}", []).append(figure)
    return figures


def _training_rows(clients: _Clients, rounds: int) -> Iterator[Row]:
    turns: dict[str, list[Told]] = {}
    for _ in range(rounds):
        for what in ("unsaved training", "unmirrored training", "mirrored training", "lightning"):
            turns.setdefault(what, []).append(clients.run(what))

    def of(each: str) -> dict[str, list[float]]:
        return {
            what: [told[each] for told in found if each in told] for what, found in turns.items()
        }

    rates = of("steps_s")
    yield Row(
        name=f"steps/s with a mirror over those without, a save each {EVERY} steps",
        bar=None,
        this="mirrored training",
        that="unmirrored training",
        unit="steps/s",
        figures={each: rates[each] for each in ("mirrored training", "unmirrored training")},
    )
    memory = of("anonymous_mib")
    added = zip(memory["mirrored training"], memory["unmirrored training"], strict=True)
    yield Row(
        name="memory that a mirror adds to a training, at its highest",
        bar=128,
        unit="MiB",
        figures={"portus": [mirrored - plain for mirrored, plain in added]},
    )
    blocked = of("blocked_s")
    yield Row(
        name="blocked by Lightning's own write to s3:// over a save with a mirror",
        bar=50,
        at_most=False,
        this="lightning",
        that="mirrored training",
        figures={each: blocked[each] for each in ("lightning", "mirrored training")},
        note="blocked: in save, and at the fence of the next optimizer step",
    )
    took = of("took_s")
    for what in ("unmirrored", "mirrored"):
        pairs = zip(took[f"{what} training"], took["unsaved training"], strict=True)
        yield Row(
            name=f"seconds that all of a training takes longer for each save, {what}",
            bar=None,
            figures={
                "portus": [(saved - unsaved) / (STEPS // EVERY) for saved, unsaved in pairs],
                "lightning": blocked["lightning"],
            },
            note="on one processor, with all that is done in the background",
        )


def directory_row(memory: Path, disk: Path, rounds: int) -> Row:
    """A training on one processor, with a mirror in a directory on a disk and without."""
    turns = ("unmirrored training", "mirrored training")
    with tempfile.TemporaryDirectory(prefix="mirror-", dir=disk.resolve()) as folder:
        clients = _Clients(memory, {}, Path(folder).as_uri())
        figures = _turns(clients, rounds, dict.fromkeys(turns, ""))
    return Row(
        name=f"steps/s with a mirror in a directory over those without, a save each {EVERY} steps",
        bar=None,
        this="mirrored",
        that="unmirrored",
        unit="steps/s",
        figures={what.split()[0]: figures[f"{what}, steps_s"] for what in turns},
    )


# The clients.


def _told(act: Callable[[], object]) -> Told:
    start, cpu = time.perf_counter(), time.process_time()
    act()
    return {"s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}


def _touch() -> None:
    np.ones(TOUCHED, np.uint8)


def _plain(url: str) -> S3Store:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return S3Store(
        bucket,
        prefix=prefix,
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        client_options={"allow_http": True},
    )


def _put(folder: str, url: str) -> Told:
    """The same bytes from where a pool would have them: a file, read unit by unit, into memory that
    is used again."""
    store, path, rooms = _plain(url), Path(folder) / "state", Rooms(UNIT)
    with open(path, "wb") as file:
        for tensor in tensors(64, SIZE).values():
            file.write(tensor.numpy().data)

    def put(number: int) -> None:
        room = rooms.give(UNIT)
        with open(path, "rb", buffering=0) as file:
            file.seek(number * UNIT)
            assert file.readinto(room) == UNIT
        obstore.put(store, f"unit-{number}", room, use_multipart=False)

    _touch()
    return _told(lambda: in_any_order(put, range(SIZE // UNIT), ABREAST))


def _get(_: str, url: str) -> Told:
    store = _plain(url)

    def get(number: int) -> None:
        assert len(obstore.get(store, f"unit-{number}").bytes()) == UNIT

    _touch()
    return _told(lambda: in_any_order(get, range(SIZE // UNIT), ABREAST))


def _mirrored(folder: str, url: str) -> Told:
    """From the commit on, less what the end of a run without a mirror takes. What claims the mirror
    is in it."""
    state = tensors(64, SIZE)
    unmirrored = portus.Checkpointer(f"{folder}/other", keep=1, mirror="none", on_error="raise")
    saver = portus.Checkpointer(f"{folder}/run", keep=1, mirror=url, on_error="raise")
    unmirrored.save(state, 1).wait()
    end = _told(unmirrored.close)
    _touch()
    saver.save(state, 1).wait()
    all_of_it = _told(saver.close)
    return {each: all_of_it[each] - end[each] for each in end}


def _fresh(folder: str, url: str) -> Told:
    """Until the state is in memory, and in the directory."""
    portus.Checkpointer(f"{folder}/other", mirror="none").close()  # what it imports late
    _touch()
    savers: list[portus.Checkpointer] = []

    def load() -> None:
        savers.append(portus.Checkpointer(f"{folder}/run", keep=1, mirror=url))
        savers[0].load()

    told = _told(load)
    savers[0].close()
    return told


def _training(folder: str, mirror: str | None, *, every: int = EVERY) -> Told:
    """every: steps from one save to the next."""
    trained = Trained(LAYERS, WIDTH, TOKENS)
    highest, over = 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.wait(0.005):
            highest = max(highest, anonymous())

    watcher = threading.Thread(target=watch)
    mirror = mirror or "none"
    with portus.Checkpointer(f"{folder}/run", keep=2, mirror=mirror, on_error="raise") as saver:
        saver.save(trained.state(), 0).wait()
        watcher.start()
        handles = []
        start = time.perf_counter()
        for step in range(1, STEPS + 1):
            trained.step()
            if step % every == 0:
                handles.append(saver.save(trained.state(), step))
        took = time.perf_counter() - start
        for handle in handles:
            handle.wait()
        blocked = [handle.stats.blocked_s for handle in handles]
    over.set()
    watcher.join()
    return {
        "took_s": took,
        "steps_s": STEPS / took,
        "anonymous_mib": highest / MIB,
        "blocked_s": Spread.of(blocked or [0.0]).median,
    }


def _lightning(_: str, url: str) -> Told:
    """What ``trainer.save_checkpoint`` does with such a path, with obstore's file system."""
    from lightning.fabric.utilities.cloud_io import _atomic_save

    obstore.fsspec.register("s3")
    trained = Trained(LAYERS, WIDTH)
    took = []
    for number in range(3):
        trained.step()
        path = f"{url}/{number}"
        took.append(timed(partial(_atomic_save, trained.state(), path))())
    return {"blocked_s": Spread.of(took).median}


CLIENTS: dict[str, Callable[[str, str], Told]] = {
    "put": _put,
    "get": _get,
    "mirrored": _mirrored,
    "fresh": _fresh,
    "unsaved training": lambda folder, url: _training(folder, None, every=STEPS + 1),
    "unmirrored training": lambda folder, url: _training(folder, None),
    "mirrored training": _training,
    "lightning": _lightning,
}


ON_ONE: Final = CLIENTS.keys() - {"get", "fresh"}
"""Those that have one processor: whoever restores has nothing else to do."""

if __name__ == "__main__":
    if sys.argv[1] in ON_ONE:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        torch.set_num_threads(1)  # more would wait for each other on the one processor
    print(json.dumps(CLIENTS[sys.argv[1]](sys.argv[2], sys.argv[3])))
