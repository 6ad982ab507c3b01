"""Nothing unverified is handed out, and a state that cannot be restored is left as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import portus
from portus.engine.loading import restore_over
from portus.engine.loading.checkpoint_file import use_newest
from portus.engine.loading.patterns import Patterns
from portus.engine.loading.restore_over import Rename, RestoreOptions, RestoreReport, overlapping
from portus.errors import CorruptionError, UsageError
from portus.reach.index.directory import open_reader
from portus.reach.index.records import VersionEntry
from portus.reach.pools import restore
from portus.reach.pools.view import PoolStep


def state(step: int) -> dict[str, Any]:
    """Each tensor in a storage of its own, but for the two that are tied."""
    tied = torch.full((50,), float(step))
    return {
        "model": {"w": torch.full((40, 30), float(step)), "b": torch.arange(30.0) + step},
        "head": {"w": tied, "tied": tied},
        "moments": torch.arange(5000) + step,
        "step": step,
    }


NAMES = ("model.w", "model.b", "head.w", "moments")
"""The tensors of a state, in the order of their storages."""


def same(left: Any, right: Any) -> bool:
    if isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in right)
    if isinstance(right, torch.Tensor):
        return bool(torch.equal(left, right))
    return bool(np.array_equal(left, right))


class Saved:
    """A pool of versions of steps 1, 2 and 3, open for reading."""

    def __init__(self, root: Path) -> None:
        self.path = root / "net.portus"
        with portus.PoolCheckpointer(self.path, "net", keep=None, journal=False) as run:
            for step in (1, 2, 3):
                run.save(state(step), step).wait()
        self.pool = open_reader(str(self.path))

    def entry(self, step: int) -> VersionEntry:
        [found] = [e for e in self.pool.catalogue().entries() if e.info.step == step]
        return found

    def newest(self) -> object:
        """Return the state of the newest version that verifies."""
        found = [PoolStep(self.pool, self.entry(step)) for step in (1, 2, 3)]
        return use_newest(lambda: found, lambda each: each.load(None, verify=True))

    def damage(self, step: int, name: str) -> None:
        """Flip a bit of a tensor or array."""
        record = self.pool.record(self.entry(step))
        at = record.storage_extents(NAMES.index(name))[0].offset + 5
        with open(self.path, "r+b") as file:
            file.seek(at)
            [byte] = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    def restored(
        self, into: object, step: int = 3, *, strict: bool = True,
        names: Patterns = None, rename: Rename = None,
    ) -> RestoreReport:  # fmt: skip
        options = RestoreOptions(strict=strict, names=names, rename=rename)
        return restore.restore_into(self.pool, self.entry(step), into, options)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Saved]:
    made = Saved(tmp_path)
    with closing(made.pool):
        yield made


# Loads.


def test_a_version_comes_back_as_it_was_and_ties_stay_tied(saved: Saved) -> None:
    loaded: Any = restore.load(saved.pool, saved.entry(2))
    assert same(loaded, state(2))
    assert loaded["head"]["w"].data_ptr() == loaded["head"]["tied"].data_ptr()


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_a_load_is_in_memory_whatever_the_default_device_is(saved: Saved, device: str) -> None:
    before = torch.get_default_device()
    torch.set_default_device(device)
    try:
        loaded: Any = restore.load(saved.pool, saved.entry(3))
    finally:
        torch.set_default_device(before)
    assert loaded["model"]["w"].device.type == "cpu"
    assert same(loaded, state(3))


def test_damage_is_told_with_model_step_tensors_and_where(saved: Saved) -> None:
    saved.damage(2, "head.w")
    with pytest.raises(CorruptionError, match=r"step 2.*\['head'\]\['w'\]"):
        restore.load(saved.pool, saved.entry(2))


def test_only_who_gives_up_checksums_is_handed_damaged_bytes(saved: Saved) -> None:
    saved.damage(2, "model.w")
    with pytest.raises(CorruptionError, match=r"\['model'\]\['w'\]"):
        restore.load(saved.pool, saved.entry(2))
    found = restore.load(saved.pool, saved.entry(2), verify=False)
    assert not same(found, state(2))


def test_of_a_part_no_more_is_read(saved: Saved) -> None:
    saved.damage(3, "model.w")
    found = restore.load(saved.pool, saved.entry(3), ["head", "step"])
    assert same(found, {"head": state(3)["head"], "step": 3})


def test_a_file_that_is_not_there_is_a_damaged_pointer(saved: Saved) -> None:
    with pytest.raises(CorruptionError, match="expected a file 'optimizer'"):
        restore.load(saved.pool, saved.entry(3), file="optimizer")
    name = "step-00000003.pt"
    assert same(restore.load(saved.pool, saved.entry(3), file=name), state(3))


def test_verify_counts_each_byte_once_and_sees_each_storage(saved: Saved) -> None:
    told: list[int] = []
    size = restore.verify(saved.pool, saved.entry(3), told.append)
    assert size == sum(told) == saved.entry(3).info.size
    for name in NAMES:
        saved.damage(3, name)
        with pytest.raises(CorruptionError):
            restore.verify(saved.pool, saved.entry(3))
        saved.damage(3, name)  # and back
    assert restore.verify(saved.pool, saved.entry(3)) == size


def test_a_pattern_that_matches_nothing_is_told_with_what_is_near(saved: Saved) -> None:
    with pytest.raises(UsageError, match=r"'modle\.\*'; near it are model"):
        restore.load(saved.pool, saved.entry(3), ["head.*", "modle.*"])


@pytest.mark.parametrize("names", [5, ["model", 5], [b"model"], b"model"])
def test_what_is_no_pattern_is_refused(saved: Saved, names: Any) -> None:
    with pytest.raises(UsageError, match="names: expected a pattern"):
        saved.restored(state(7), names=names)


# Which version.


def test_the_newest_that_verifies_is_taken_and_it_is_said(
    saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 2):
        saved.damage(step, "model.w")
    assert same(saved.newest(), state(1))
    assert [line for line in (2, 1) if f"FALLING BACK to step {line}" in caplog.text] == [2, 1]
    saved.damage(1, "model.w")
    with pytest.raises(CorruptionError, match="step 3"):
        saved.newest()


# In place.


@pytest.mark.parametrize("name", ["moments", "head.w", "model.b", "model.w"])
def test_a_state_is_untouched_whichever_storage_is_damaged(saved: Saved, name: str) -> None:
    saved.damage(3, name)
    into = state(7)
    with pytest.raises(CorruptionError):
        saved.restored(into)
    assert same(into, state(7))


def test_tensors_are_filled_where_they_are(saved: Saved) -> None:
    into = state(7)
    places = {key: into["model"][key].data_ptr() for key in "wb"}
    before = into["model"]["w"]._version
    saved.restored(into)
    assert same(into, state(3))
    assert {key: into["model"][key].data_ptr() for key in "wb"} == places
    assert into["head"]["w"].data_ptr() == into["head"]["tied"].data_ptr()
    assert before <= into["model"]["w"]._version


def wrong_shape(into: dict[str, Any]) -> None:
    into["model"]["w"] = torch.zeros(30, 40)


def one_missing(into: dict[str, Any]) -> None:
    into["model"]["extra"] = torch.zeros(3)


def one_unexpected(into: dict[str, Any]) -> None:
    del into["model"]["b"]


def expanded(into: dict[str, Any]) -> None:
    into["model"]["b"] = torch.zeros(1).expand(30)


def integers(into: dict[str, Any]) -> None:
    into["model"]["b"] = torch.zeros(30, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (integers, r"dtype mismatch for model\.b: the version has float32.* int64"),
        (wrong_shape, r"size mismatch for model\.w: the version has \[40, 30\]"),
        (one_missing, r"missing in the version: model\.extra"),
        (one_unexpected, r"unexpected, not in the state: model\.b"),
        (expanded, r"model\.b is expanded in the state"),
    ],
)
def test_a_state_that_does_not_fit_is_told_why_and_left_as_it_was(
    saved: Saved, change: Callable[[dict[str, Any]], None], told: str
) -> None:
    into = state(7)
    change(into)
    before = {name: tensor.clone() for name, tensor in into["model"].items()}
    with pytest.raises(UsageError, match=told):
        saved.restored(into)
    assert same(into["model"], before)
    assert into["step"] == 7


@pytest.mark.parametrize(
    ("target", "of", "taken"),
    [
        ("bfloat16", "float64", True),
        ("float32", "int64", True),
        ("int64", "uint8", True),
        ("uint8", "int64", False),
        ("int64", "uint64", False),
        ("float32", "complex64", False),
        ("bool", "float32", False),
        ("bool", "uint8", False),
    ],
)
def test_a_dtype_that_would_drop_a_part_is_refused(target: str, of: str, taken: bool) -> None:
    assert restore_over._takes(target, of) is taken


def test_what_is_missing_or_unexpected_is_listed_where_that_is_allowed(saved: Saved) -> None:
    into = state(7)
    one_missing(into)
    one_unexpected(into)
    found = saved.restored(into, strict=False)
    assert (found.missing, found.unexpected) == (("model.extra",), ("model.b",))
    assert torch.equal(into["model"]["w"], state(3)["model"]["w"])
    assert not into["model"]["extra"].any()


@pytest.mark.parametrize("rename", [{"head.w": "neck.w"}, lambda name: f"neck.{name[5:]}"])
def test_a_tensor_goes_where_it_is_renamed_to(saved: Saved, rename: Rename) -> None:
    into = {"neck": {"w": torch.zeros(50)}}
    saved.restored(into, strict=False, names="head.w", rename=rename)
    assert torch.equal(into["neck"]["w"], state(3)["head"]["w"])


def test_targets_of_any_layout_get_the_values(saved: Saved) -> None:
    whole = torch.zeros(31)
    into = {
        "model": {
            "w": torch.zeros(30, 40).t(),
            "b": whole[1:].to(torch.float32),
        }
    }
    saved.restored(into, strict=False, names="model")
    assert torch.equal(into["model"]["w"], state(3)["model"]["w"])
    assert torch.equal(whole, torch.cat([torch.zeros(1), state(3)["model"]["b"]]))


def test_lazy_bits_of_a_target_are_written_through(tmp_path: Path) -> None:
    numbers = torch.randn(9, dtype=torch.complex64)
    pool = tmp_path / "c.portus"
    with portus.PoolCheckpointer(pool, "net", journal=False) as run:
        run.save({"plain": numbers, "lazy": numbers.clone().conj()}, 1).wait()
    with closing(open_reader(str(pool))) as reader:
        [entry] = reader.catalogue().entries()
        for conjugate in (False, True):
            into = {name: torch.zeros(9, dtype=torch.complex64) for name in ("plain", "lazy")}
            if conjugate:
                into = {name: each.conj() for name, each in into.items()}
            restore.restore_into(reader, entry, into, RestoreOptions())
            assert torch.equal(into["plain"].resolve_conj(), numbers)
            assert torch.equal(into["lazy"].resolve_conj(), numbers.conj().resolve_conj())


@pytest.mark.parametrize("least", [0, 1])
def test_blocks_overlap_as_their_bytes_do(least: int) -> None:
    """An empty one, inside of another, may make that count as one that overlaps."""
    chance = random.Random(3)
    for _ in range(300):
        count = chance.randrange(1, 7)
        address = np.array([chance.randrange(12) for _ in range(count)], np.int64)
        length = np.array([chance.randrange(least, 5) for _ in range(count)], np.int64)
        blocks = zip(address.tolist(), length.tolist(), strict=True)
        held = [set(range(start, start + size)) for start, size in blocks]
        shared = [
            any(mine & other for at, other in enumerate(held) if at != index)
            for index, mine in enumerate(held)
        ]
        found = overlapping(address, length).tolist()
        assert found == shared or not least
        assert all(seen or not real for seen, real in zip(found, shared, strict=True))
