"""Makes the golden pool of the format of the day: ``python -m tests.golden.make NAME``.

Run it once for each released format, or feature of one, never again for that one: with one of the
names in ``POOLS``. It writes, beside this file:

``NAME.portus.gz``    a pool file
``NAME.json``         what it lists, and what each version loads as (see ``describe``)
``reference-N.ckpt``  for a new format, a pointer; its fields are in the JSON file too
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import functools
import gzip
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pytest
import torch

from portus.companions.shelf import Shelf
from portus.embedding import protect
from portus.engine.format.checksum import UNIT
from portus.engine.pipeline.run import Save
from portus.engine.spec import PAGE
from portus.reach.format.layout import FORMAT_VERSION
from portus.reach.format.reference import FORMAT as REFERENCE_VERSION
from portus.reach.format.reference import Reference, encode
from portus.reach.index.check import check
from portus.reach.index.directory import WRITERS, open_reader
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry
from portus.reach.pools import restore
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.pools.view import PoolView
from tests.device import stand_in
from tests.golden import kinds
from tests.golden.describe import Describer
from tests.moments import at

HERE: Final = Path(__file__).resolve().parent

DTYPES: Final = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)

REFERENCE: Final = Reference(
    token="89abcdef01234567" * 2,
    pool="fedcba9876543210" * 2,
    pool_path="/data/runs/.portus/golden.portus",
    model="golden",
    step=12,
    written_path="/data/runs/checkpoints/last ä.ckpt",
    files=1,
)


def tensors(step: int) -> dict[str, Any]:
    """Tensors of every dtype and kind. Only ``weight`` depends on the step."""
    raw = torch.arange(48, dtype=torch.uint8)
    weight = torch.arange(40_000, dtype=torch.float32) % 7 + step  # packs well
    grid = torch.arange(120, dtype=torch.float32).reshape(2, 3, 4, 5)
    return {
        "dtypes": {name: (raw % 2 if name == "bool" else raw.clone()).view(getattr(torch, name))
                   for name in DTYPES},
        "weight": weight,
        "tied": weight,
        "view": weight[10:20],
        "columns": weight[:100].view(10, 10).t(),
        "channels_last": grid.contiguous(memory_format=torch.channels_last),
        "expanded": torch.tensor([1.5]).expand(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "frozen": torch.nn.Parameter(torch.full((30_000,), 0.5), requires_grad=False),
        "buffer": torch.nn.Buffer(torch.zeros(2)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "meta": torch.empty(2, 3, device="meta"),
    }  # fmt: skip


def containers() -> dict[str, Any]:
    """A container of every kind."""
    ordered = collections.OrderedDict(b=torch.ones(1), a=2)
    ordered._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    default = collections.defaultdict(list, {"a": [1]})
    attributes = kinds.Attributes(a=1)
    attributes.extra = "x"  # type: ignore[attr-defined]
    return {
        "list": [1, "two", 3.0, None, True, [torch.zeros(1)]],
        "tuple": (1, (2, torch.zeros(1))),
        "keys": {0: "int", (1, "a"): "tuple", None: "none", True: "bool", "$x": "dollar", 0.5: ""},
        "ordered": ordered,
        "default": default,
        "counter": collections.Counter("aab"),
        "deque": collections.deque([1, 2], maxlen=3),
        "namespace": types.SimpleNamespace(a=1, b=torch.zeros(1)),
        "arguments": argparse.Namespace(lr=0.1),
        "mapping": attributes,
        "point": kinds.Point(1.0, 2.0),
        "settings": kinds.Settings("a", 0.5, [1, 2]),
        "empties": [{}, [], (), set()],
    }


def leaves() -> dict[str, Any]:
    """A leaf of every kind."""
    zone = datetime.timezone(datetime.timedelta(hours=2), "two")
    return {
        "numbers": [1 << 80, -(1 << 70), 2**63, -1, math.inf, -math.inf, math.nan, -0.0, 1 + 2j],
        "texts": ["ä ∀", "\udcff", "$", ""],
        "bytes": [b"\0\1", bytearray(b"ab")],
        "long bytes": bytes(range(256)) * 20,
        "sets": [{1, 2}, frozenset({"a"})],
        "ranges": [range(1, 9, 2), slice(None, 3)],
        "torch": [torch.Size([2, 3]), torch.float16, torch.device("cuda", 1), torch.strided],
        "paths": [pathlib.Path("a/b"), pathlib.PurePosixPath("/a/b"),
                  pathlib.PureWindowsPath("c:/d")],
        "times": [
            datetime.timedelta(days=1, microseconds=3),
            zone,
            datetime.timezone.utc,
            datetime.datetime(2024, 2, 29, 12, 30, 1, 2, tzinfo=zone, fold=1),
            datetime.date(2024, 2, 29),
            datetime.time(1, 2, 3),
        ],
        "arrays": {
            "small": np.arange(6, dtype=np.int16).reshape(2, 3),
            "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "large": np.arange(2000, dtype=np.float64),
            "fields": np.zeros(2, [("a", "<i4"), ("b", "<f8", (2,))]),
            "texts": np.array(["a", "bc"]),
            "times": np.array(["2024-02-29"], "M8[D]"),
        },
        "scalars": [np.float32(1.5), np.int64(-1), np.str_("a\0"), np.dtype("<f4"), np.bool_(True)],
        "enums": [kinds.Color.GREEN, kinds.Style.BOLD | kinds.Style.WIDE],
        "names": [kinds.double, kinds.Settings, dict],
        "partial": functools.partial(torch.optim.SGD, lr=0.1),
    }  # fmt: skip


def loaded(pool: PoolReader, entry: VersionEntry) -> object:
    """The state of a version."""
    return restore.load(pool, entry, weights_only=False)


class Making:
    """A pool being made, and what each of its versions is."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.path = os.path.join(directory, "golden.portus")
        self.crashed = self.path + ".crashed"
        self.states: dict[str, object] = {}

    def save(
        self,
        run: PoolCheckpointer,
        step: int,
        state: object,
        metrics: dict[str, float] | None = None,
    ) -> None:
        info = run.save(state, step, metrics=metrics).wait()
        loaded_back = run.load(step, weights_only=False)
        self.states[info.token.hex()] = Describer().describe(loaded_back)

    def fill(self) -> None:
        with PoolCheckpointer(self.path, "all", keep=None) as run:
            for step in (1, 2, 3):  # a storage is shared once it was seen not to change
                self.save(run, step, {**tensors(step), **containers(), **leaves()})
            self.save(run, 4, torch.arange(3))
        with PoolCheckpointer(self.path, "units ä", keep=1) as run:
            marked = torch.zeros(UNIT + PAGE, dtype=torch.uint8)
            marked[0], marked[-1] = 1, 2
            self.save(run, 7, [marked, "seven"])
            self.save(run, 7, [marked, "seven again"])
        with PoolCheckpointer(self.path, "extents", keep=None) as run:
            self.save(run, 1, {"a": torch.arange(40_000) % 5})
            with scattered(self.path):
                self.save(run, 2, {"a": torch.arange(40_000) % 6})

    def fill_copies(self) -> None:
        """Models that share commits, one that stays as it is, and records of several commits."""
        frozen = torch.arange(3000) % 7
        with PoolCheckpointer(self.path, "idle", keep=None) as run:
            self.save(run, 1, {"a": torch.arange(5), "note": "idle"})
        with PoolCheckpointer(self.path, "busy", keep=None) as run:
            for step in (1, 2, 3):
                self.save(run, step, {"frozen": frozen, "step": torch.tensor(step)})
            self.save(run, 4, {"frozen": frozen, "step": torch.tensor(4), "more": [step]})

    def fill_marks(self) -> None:
        """A version that is marked inexact, and one after it that is not."""
        shared = torch.arange(3000).share_memory_()
        with PoolCheckpointer(self.path, "replay", keep=None) as run:
            with at("return", Save._copy_from_here, lambda: shared.add_(1)):
                info = run.save({"shared": shared}, 1).wait()
            self.states[info.token.hex()] = Describer().describe(run.load(1))
            self.save(run, 2, {"shared": shared})

    def fill_metrics(self) -> None:
        """A version with metrics, and one without."""
        with PoolCheckpointer(self.path, "scored", keep=None) as run:
            self.save(run, 1, torch.tensor(1), {"val_loss": 0.1, "ä": -1e-300})
            self.save(run, 2, torch.tensor(2))

    def fill_logs(self) -> None:
        """A shelf whose log has entries of its version and of the one before, which share storages;
        values that came with an entry; and one entry that came with a version."""
        with Shelf(self.path, log_bytes=64 * PAGE) as shelf:
            with shelf.transaction():
                shelf.a, shelf.b = np.ones(5000), torch.ones(3000)
                shelf.state = {"text": "ä", 3: [b"x", (None, 1 << 70)], "empty": np.empty((0, 2))}
            shelf.a[4000] = -1
            shelf.b[7] = 9
            shelf.sync()
            with shelf.transaction():
                shelf.b[3] = 7
                shelf.swap("a", "b")
                shelf.c = np.float32(2.5)
            shelf.step = 2
            shelf.step = 3
            shelf.b[:3] = 0.5
        with PoolView(self.path) as view:
            [info] = view.versions()
            self.states[info.token.hex()] = Describer().describe(view.load("shelf"))

    def fill_bunches(self) -> None:
        """Tables with a log of several batches, rows over the ends of pages, and two marks."""
        model = torch.nn.ModuleDict({"table": torch.nn.Embedding(200, 7, sparse=True)})
        weight = model["table"].weight
        assert isinstance(weight, torch.Tensor)
        with torch.no_grad():
            weight.copy_(torch.arange(1400.0).reshape(200, 7) % 9)
        optimizer = torch.optim.Adagrad([weight], lr=0.5)
        counted: list[int] = []
        with protect(
            model, optimizer, pool=self.path, extra=lambda: counted, log_bytes=16 * PAGE
        ) as tables:
            for batch in range(6):
                counted.append(batch)
                optimizer.zero_grad()
                model["table"](torch.tensor([batch, 199 - 2 * batch, batch])).sum().backward()
                optimizer.step()
                if batch in (1, 3):
                    model.state_dict()
            assert tables.batches == 6
        self._note_all()

    def fill_in_place(self) -> None:
        """Tables that are changed in place, on a file that stands for a device: batches, a mark,
        the log folded in, and a batch that was not committed, with rows of both."""
        Path(self.path).write_bytes(bytes(160 * PAGE))
        with pytest.MonkeyPatch.context() as patch:
            stand_in(self.path, self.path + ".facts", patch)
            self._train_in_place()
        self._note_all()

    def _note_all(self) -> None:
        """What each version loads as."""
        with PoolView(self.path) as view:
            for pool, entry in view.entries():
                state = Describer().describe(loaded(pool, entry))
                self.states[entry.info.token.hex()] = state

    def _train_in_place(self) -> None:
        model = torch.nn.ModuleDict({"table": torch.nn.Embedding(200, 8, sparse=True)})
        weight = cast(torch.nn.Parameter, model["table"].weight)
        with torch.no_grad():
            weight.copy_(torch.arange(1600.0).reshape(200, 8) % 9)
        optimizer = torch.optim.Adagrad([weight], lr=0.5)
        with protect(
            model, optimizer, pool=self.path, log_bytes=16 * PAGE, in_place=True
        ) as tables:
            for batch in range(6):
                optimizer.zero_grad()
                model["table"](torch.tensor([batch, 199 - 2 * batch, batch])).sum().backward()
                optimizer.step()
                if batch == 1:
                    model.state_dict()
            optimizer.register_step_post_hook(self._fail)  # before the batch is over
            with contextlib.suppress(KeyboardInterrupt), tables.batch():
                optimizer.step()
        os.replace(self.crashed, self.path)

    def _fail(self, *_: object) -> None:
        """Keep what a crash would leave; ``close`` commits what was updated."""
        shutil.copy(self.path, self.crashed)
        raise KeyboardInterrupt

    def listed(self) -> list[dict[str, object]]:
        """Every version in the pool, with its state."""
        reader = open_reader(self.path)
        try:
            infos = [entry.info for entry in reader.catalogue().entries()]
        finally:
            reader.close()
        infos.sort(key=lambda info: info.commit)
        return [
            {**asdict(info), "token": info.token.hex(), "state": self.states[info.token.hex()]}
            for info in infos
        ]


@contextlib.contextmanager
def scattered(path: str) -> Iterator[None]:
    """Leave only runs of about 64 KiB free, so that a storage gets several extents."""
    writer = WRITERS.open(path)
    held = []
    while writer.free_bytes() >= 72 << 10:  # less would make it grow
        held.append(writer.reserve(64 << 10))
    for each in held[::2]:
        writer.release(each)
    try:
        yield
    finally:
        for each in held[1::2]:
            writer.release(each)
        WRITERS.close(writer)


POOLS: Final[dict[str, Callable[[Making], None]]] = {
    f"format-{FORMAT_VERSION}": Making.fill,
    f"format-{FORMAT_VERSION}-copies": Making.fill_copies,
    f"format-{FORMAT_VERSION}-marks": Making.fill_marks,
    f"format-{FORMAT_VERSION}-metrics": Making.fill_metrics,
    f"format-{FORMAT_VERSION}-logs": Making.fill_logs,
    f"format-{FORMAT_VERSION}-bunches": Making.fill_bunches,
    f"format-{FORMAT_VERSION}-in-place": Making.fill_in_place,
}
"""What is in the golden pool of each format, and of each feature that came to it later."""


def main(stem: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        making = Making(directory)
        POOLS[stem](making)
        assert check(making.path) == []
        versions = ",\n".join(map(json.dumps, making.listed()))  # a line for each
        pool = Path(making.path).read_bytes()
    fields = asdict(REFERENCE)
    (HERE / f"{stem}.portus.gz").write_bytes(gzip.compress(pool, 9, mtime=0))
    (HERE / f"{stem}.json").write_text(
        f'{{"reference": {json.dumps(fields)},\n"versions": [\n{versions}\n]}}\n'
    )
    if stem == f"format-{FORMAT_VERSION}":
        (HERE / f"reference-{REFERENCE_VERSION}.ckpt").write_bytes(encode(REFERENCE))


if __name__ == "__main__":
    main(sys.argv[1])
