"""Makes the golden mirrors of the format of the day: ``python -m tests.golden.mirrors``.

Run it once for each released format of mirrors. It writes ``mirror-N.json.xz`` beside this file:
the objects of a mirror without a key, of one with a key, and what both say.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import tempfile
from pathlib import Path
from typing import Final

import torch

from portus.engine.copying.segments import Stop
from portus.reach.index.directory import open_reader
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.objects import FORMAT_VERSION, STRIDE
from portus.reach.pools.checkpointer import PoolCheckpointer
from tests.golden.describe import Describer
from tests.simulation.model_store import ModelStore

HERE: Final = Path(__file__).resolve().parent
MODEL: Final = "golden/rank-0-of-1"
KEY: Final = b"a key of golden mirrors"
STEPS: Final = 2


def state_of(step: int) -> dict[str, object]:
    """Small, with an empty storage, views and ties; a part of it stays as it is."""
    table = torch.arange(600, dtype=torch.float32)
    fresh = torch.arange(step, step + 300, dtype=torch.int64)
    return {"table": table, "view": table[10:20], "fresh": fresh, "none": fresh[:0], "step": step}


def mirrored(path: Path, key: bytes | None) -> ModelStore:
    """Two versions; the first one is removed. With more entries than a state is apart, or few."""
    bucket = ModelStore()
    mirror = Mirror(bucket, MODEL, key=key)
    with contextlib.closing(open_reader(str(path))) as reader:
        pool = reader.uuid
        mirror.claim("golden", pool, 0)
        added = [
            mirror.copy(reader, entry.info.id, Stop()) for entry in reader.catalogue().entries()
        ]
    mirror.remove([added[0].token])
    while mirror.state.number < (STRIDE + 2 if key is None else 5):
        mirror.claim("golden", pool, 0)
    return bucket


def make() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as directory:
        pool = Path(directory) / "golden.portus"
        with PoolCheckpointer(pool, model=MODEL, keep=None) as saver:
            for step in range(1, STEPS + 1):
                saver.save(state_of(step), step=step, metrics={"loss": 1.0 / step}).wait()
        buckets = {"plain": mirrored(pool, None), "keyed": mirrored(pool, KEY)}
    content = {
        "states": {s: Describer().describe(state_of(s)) for s in range(2, STEPS + 1)},
        "objects": {
            name: {each: data.hex() for each, (data, _) in sorted(bucket.objects.items())}
            for name, bucket in buckets.items()
        },
    }
    packed = lzma.compress(json.dumps(content).encode(), preset=9)
    (HERE / f"mirror-{FORMAT_VERSION}.json.xz").write_bytes(packed)


if __name__ == "__main__":
    make()
