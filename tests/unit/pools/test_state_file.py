"""The state of a version without files is read as a file of torch: verified, also in part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from portus.engine.copying.segments import Stop
from portus.engine.format.checksum import UNIT
from portus.engine.loading.restore_over import RestoreOptions
from portus.engine.pipeline.draft import Labels
from portus.errors import CorruptionError, UsageError
from portus.reach.index.directory import create_pool, open_reader, open_writer
from portus.reach.index.reader import PoolReader
from portus.reach.media.local import LocalFiles
from portus.reach.pools import restore
from portus.reach.pools.state_file import StateFile
from portus.reach.pools.weights_only import pickle_for_pool
from portus.reach.versions.open_version import open_version
from portus.reach.versions.pool_draft import PoolDraft
from tests.same import assert_same


def state() -> dict[str, Any]:
    whole = torch.arange(100.0)
    return {
        "large": torch.zeros(2 * UNIT + 8, dtype=torch.uint8),
        "part": {"a": whole[10:20], "b": whole},
        "empty": torch.zeros(0),
        "array": np.arange(6).reshape(2, 3),
        "step": 3,
    }


class Saved:
    """A pool with one version, whose contents are the pickle of ``state``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        create_pool(str(path), LocalFiles())
        found = pickle_for_pool(state())
        with closing(open_writer(str(path), LocalFiles())) as writer:
            draft = PoolDraft(writer, found.lengths)
            address = np.array([each.data_ptr() for each in found.storages], np.int64)
            draft.copy(np.arange(len(address)), address, Stop())
            draft.commit(Labels(model="t", step=3, token=bytes(16), contents=found.pickle))
        self.pool: PoolReader = open_reader(str(path))
        [self.entry] = self.pool.catalogue().entries()

    def flip(self, storage: int, at: int) -> None:
        place = self.pool.record(self.entry).storage_extents(storage)[0].offset + at
        with open(self.path, "r+b") as file:
            file.seek(place)
            [byte] = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Saved]:
    made = Saved(tmp_path / "t.portus")
    with closing(made.pool):
        yield made


def test_it_comes_back_and_shared_memory_stays_shared(saved: Saved) -> None:
    found: Any = restore.load(saved.pool, saved.entry)
    assert_same(found, state())
    assert found["part"]["a"].data_ptr() == found["part"]["b"].data_ptr() + 40


@pytest.mark.parametrize(("at", "unit"), [(0, 0), (UNIT + 7, UNIT), (2 * UNIT + 7, 2 * UNIT)])
def test_damage_is_named_by_key_and_unit_whoever_reads_it(saved: Saved, at: int, unit: int) -> None:
    saved.flip(0, at)
    told = rf"step 3 .*\['large'\] is damaged within 16 MiB from byte {unit} of its storage"
    with pytest.raises(CorruptionError, match=told):
        restore.load(saved.pool, saved.entry)
    with pytest.raises(CorruptionError, match=told):
        restore.verify(saved.pool, saved.entry)
    with open_version(saved.pool, saved.entry) as version:
        row, start = np.array([0]), np.array([unit])
        length = np.minimum(UNIT, version.lengths[:1] - unit)
        with pytest.raises(CorruptionError, match=told):
            version.read(row, start, length, None)
    part: Any = restore.load(saved.pool, saved.entry, ["part", "array"])
    assert torch.equal(part["part"]["b"], torch.arange(100.0))
    found: Any = restore.load(saved.pool, saved.entry, verify=False)
    assert int(found["large"][at]) == 1


def test_a_state_is_untouched_if_any_of_it_is_damaged(saved: Saved) -> None:
    saved.flip(1, 399)
    into: Any = {**state(), "large": torch.ones(2 * UNIT + 8, dtype=torch.uint8)}
    with pytest.raises(CorruptionError, match=r"\['part'\]"):
        restore.restore_into(saved.pool, saved.entry, into, RestoreOptions())
    assert bool(into["large"].all())
    saved.flip(1, 399)
    restore.restore_into(saved.pool, saved.entry, into, RestoreOptions())
    assert_same(into, state())


def test_classes_that_torch_refuses_are_refused(saved: Saved, tmp_path: Path) -> None:
    torch.save({"a": Path("a")}, tmp_path / "x.pt")
    with (
        open_version(saved.pool, saved.entry) as version,
        pytest.raises(UsageError, match=r"step 3 .*weights_only"),
        StateFile(version).naming() as settings,
    ):
        torch.load(tmp_path / "x.pt", **settings)
