"""``python -m tests.hardware.saver POOL...``: verifies what each pool holds, then saves for ever.

Says ``found N STEP`` for the newest version of pool N, all of whose versions verified, and
``saved N STEP`` when that save was reported. All in a version follows from its step. No torch.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass
from typing import Final

import numpy as np

from portus.engine.format.checksum import digest
from portus.engine.pipeline.draft import CommittedVersion
from portus.engine.pipeline.plan import Snapshot
from portus.engine.pipeline.run import Save, SaveOwner
from portus.engine.settings.keep import Keep
from portus.reach.index.check import check
from portus.reach.index.directory import WRITERS, create_pool, has_pool
from portus.reach.index.findings import Severity
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry, VersionRecord
from portus.reach.media.local import LocalFiles
from portus.reach.versions.pool_draft import PoolDraft
from tests.contents import tabled

LENGTHS: Final = (300_000, 5_000, 200_000, 64, 100_000)
FROZEN: Final = 2
"""This one is the same at every step, so versions share it."""

KEEP: Final = Keep(last=2)
MODEL: Final = "run"


def content(step: int, index: int) -> bytes:
    return np.random.default_rng([0 if index == FROZEN else step, index]).bytes(LENGTHS[index])


class Pool:
    """A pool that this process saves to."""

    def __init__(self, path: str) -> None:
        if not has_pool(path):
            create_pool(path, LocalFiles())
        self.writer: Final[PoolWriter] = WRITERS.open(path)
        self.before: VersionRecord | None = None

    def verified(self) -> int:
        """The newest step, 0 if there is none. Every byte and every rule is looked at."""
        errors = [each for each in check(self.writer) if each.severity is Severity.ERROR]
        assert not errors, "; ".join(map(str, errors))
        newest = 0
        for entry in self.writer.catalogue().entries():
            self._verify(self.writer, entry)
            newest = max(newest, entry.info.step)
        return newest

    def save(self, step: int) -> None:
        """Return when it is reported."""
        snapshot = _snapshot(step)
        draft = tabled(PoolDraft(self.writer, snapshot.length), LENGTHS)
        save = Save(snapshot, draft, _Owner(self))
        save.copy_now()
        save.run()
        save.result(0)

    @staticmethod
    def _verify(pool: PoolReader, entry: VersionEntry) -> None:
        record = pool.record(entry)
        for index, length in enumerate(LENGTHS):
            data, start = bytearray(length), 0
            for extent in record.storage_extents(index):
                pool.medium.load(extent.offset, memoryview(data)[start : start + extent.length])
                start += extent.length
            step = entry.info.step
            assert data == content(step, index), f"storage {index} of step {step} is not its own"
            assert bytes(record.units[index]["digest"]) == digest(data)


@dataclass(frozen=True)
class _Owner(SaveOwner):
    saver: Pool

    def before(self) -> VersionRecord | None:
        return self.saver.before

    def note_commit(self, save: Save, version: CommittedVersion, steady: object) -> None:
        assert isinstance(version, VersionRecord)
        self.saver.before = version


def _snapshot(step: int) -> Snapshot:
    arrays = [np.frombuffer(content(step, index), np.uint8) for index in range(len(LENGTHS))]
    return Snapshot(
        model=MODEL,
        step=step,
        token=os.urandom(16),
        address=np.array([each.ctypes.data for each in arrays], np.int64),
        length=np.array(LENGTHS, np.int64),
        late=np.array([index % 2 == 0 for index in range(len(LENGTHS))]),
        steady=np.array([index == FROZEN for index in range(len(LENGTHS))]),
        owners=arrays,
        keep=KEEP,
    )


def main(paths: list[str]) -> None:
    pools = [Pool(path) for path in paths]
    newest = [pool.verified() for pool in pools]
    for number, step in enumerate(newest):
        print(f"found {number} {step}", flush=True)
    for added in itertools.count(1):
        for number, pool in enumerate(pools):
            pool.save(newest[number] + added)
            print(f"saved {number} {newest[number] + added}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
