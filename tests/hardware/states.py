"""States without torch, saved to a storage host and read back.

``python -m tests.hardware.states URL MIB`` saves one of so many MiB after another, for ever, and
says ``saving N`` and ``saved N``.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from portus.engine.copying.local import fetch
from portus.engine.copying.segments import Stop
from portus.engine.pipeline.handle import SaveStats
from portus.engine.pipeline.plan import Snapshot
from portus.engine.pipeline.run import Save, SaveOwner
from portus.reach.index.reader import PoolReader
from portus.reach.versions.host import HostPool
from portus.reach.versions.parts import share, sources
from tests.contents import tabled

Bytes = NDArray[np.uint8]


def state_of(size: int, count: int, step: int = 0) -> list[Bytes]:
    """``count`` arrays of ``size`` bytes in all; others at each step."""
    ends = [size * number // count for number in range(count + 1)]
    chance = np.random.default_rng(step)
    return [chance.integers(0, 255, b - a, np.uint8) for a, b in itertools.pairwise(ends)]


def snapshot_of(
    state: Sequence[Bytes], step: int, model: str = "run", owners: Sequence[object] | None = None
) -> Snapshot:
    """All of it is late. owners: of the memory; by default the arrays."""
    lengths = np.array([each.nbytes for each in state], np.int64)
    return Snapshot(
        model=model,
        step=step,
        token=os.urandom(16),
        address=np.array([each.ctypes.data if each.nbytes else 0 for each in state], np.int64),
        length=lengths,
        late=np.ones(len(state), np.bool_),
        steady=np.zeros(len(state), np.bool_),
        owners=state if owners is None else owners,
    )


def begun(pool: HostPool, snapshot: Snapshot) -> Save:
    """A save that may run."""
    draft = tabled(pool.draft(snapshot), snapshot.length.tolist())
    save = Save(snapshot, draft, SaveOwner())
    save.copy_now()
    return save


def saved(pool: HostPool, snapshot: Snapshot) -> SaveStats:
    """What it cost. Raises what made it fail."""
    save = begun(pool, snapshot)
    save.run()
    save.result(0)
    return save.stats


def steps(pool: PoolReader) -> list[int]:
    return [entry.info.step for entry in pool.catalogue().entries()]


def loaded(pool: PoolReader, targets: Sequence[Bytes], step: int) -> bool:
    """Fill ``targets`` with that step; True if all digests are those of the save."""
    entry = next(each for each in pool.catalogue().entries() if each.info.step == step)
    with pool.pin(entry.info.id) as current:
        record = pool.record(current)
        lengths = record.length
        assert lengths.tolist() == [each.nbytes for each in targets]
        group = share(record, np.arange(len(lengths)))
        address = np.array([each.ctypes.data for each in targets], np.int64)
        found = fetch(pool.medium, sources(address, lengths, group.extents), Stop())
    return bool(np.array_equal(found, group.digests))


def holds(pool: PoolReader, state: Sequence[Bytes], step: int) -> bool:
    """True if that step is ``state``, byte for byte."""
    targets = [np.zeros_like(each) for each in state]
    same = loaded(pool, targets, step)
    return same and all(np.array_equal(*pair) for pair in zip(state, targets, strict=True))


def main(url: str, size: int) -> None:
    pool = HostPool(url, "killed")
    state = state_of(size, 8)
    for step in itertools.count(1):
        print(f"saving {step}", flush=True)
        saved(pool, snapshot_of(state, step, "killed"))
        print(f"saved {step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) << 20)
