"""Tests that every place for checkpoints must pass.

Subclass ``PlaceContract`` and implement its abstract methods: how a training saves to your place,
how to open it, and how to damage its bytes without it, because a test of damage must not rely on
the place. pytest then runs the suite. No test is skipped because of what a place can do.
"""

from __future__ import annotations

import abc
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import xxhash

from portus.engine.format.checksum import UNIT
from portus.engine.loading.open_file import OpenFile
from portus.errors import CorruptionError, UsageError
from portus.reach.formats.safetensors import NamedTensor, safetensors_image
from portus.reach.index.check import Severity
from portus.reach.places.base import Abilities, CheckPace, OpenPlace, StoredCheckpoint, Verdict

MODEL: Final = "net"

_LENGTHS: Final = (8200, 4096, 0, 13)
"""Bytes of the storages of a file: some pages, a page, nothing, and a few."""

_BIG: Final = "big-"
"""The prefix of the name of a file whose first storage has more than a unit."""

Storage = np.ndarray[tuple[int], np.dtype[np.uint8]]
Tensors = Mapping[str, Storage]
"""Tensors of a file, in its order, by their names."""


class PlaceContract(abc.ABC):
    """Tests of an ``OpenPlace``. Each test gets its own instance of the subclass, and a place of
    its own where nothing was saved.

    abilities: those that the place must report.
    """

    abilities: Abilities

    @abc.abstractmethod
    def save(self, files: Mapping[str, Tensors], step: int, ready: Callable[[], None]) -> None:
        """Save safetensors files to the place of this test, as one checkpoint of ``MODEL``, and
        return when they are there. files: by their names. ready: called before they become visible;
        an error that it raises prevents that, and is raised."""

    @abc.abstractmethod
    def open(self) -> OpenPlace:
        """Open the place of this test. Each call opens it once more. The contract closes what it
        opened."""

    @abc.abstractmethod
    def flip_behind(self, wanted: bytes) -> int:
        """Flip a bit of these bytes wherever the place has them, without the place; return how
        often it has them."""

    @pytest.fixture
    def place(self) -> Iterator[OpenPlace]:
        """The place of this test."""
        with self.open() as place:
            yield place

    def test_it_says_what_it_can_do(self, place: OpenPlace) -> None:
        save(self, 1)
        assert place.abilities == self.abilities

    def test_a_draft_is_nowhere_before_its_commit(self, place: OpenPlace) -> None:
        seen = []
        assert list(place.models()) == []
        with self.open() as other:
            save(self, 1, ready=lambda: seen.append(other.list()))
            assert seen == [[]]
            assert [each.info.step for each in other.list()] == [1]

    def test_a_draft_that_is_not_committed_leaves_nothing(self, place: OpenPlace) -> None:
        def forbid() -> None:
            raise UsageError("not this one")

        with pytest.raises(UsageError, match="not this one"):
            save(self, 1, ready=forbid)
        assert place.list() == []
        save(self, 1)
        assert len(place.list()) == 1

    def test_a_file_is_read_as_its_image_says_byte_for_byte(
        self, place: OpenPlace, tmp_path: Path
    ) -> None:
        [(name, expected)] = save(self, 7, file_name(7, _BIG)).items()
        [found] = place.list()
        assert found.info.step == 7
        assert len(expected) - 4096 <= found.info.size <= len(expected), "perhaps of storages alone"
        with place.open(found.name) as opened:
            assert list(opened.files) == [name]
            file = opened.files[name]
            assert file.size == len(expected)
            for start, end in ((0, file.size), (5, 6), (4000, UNIT + 8000), (file.size, file.size)):
                data = bytearray(end - start)
                file.load(start, memoryview(data))
                assert data == expected[start:end], (start, end)
            written: list[int] = []
            opened.write(name, str(tmp_path / "written"), written.append)
            assert (tmp_path / "written").read_bytes() == expected
            assert sum(written) == len(expected)
            with pytest.raises(UsageError, match="no file 'other'"):
                opened.write("other", str(tmp_path / "other"), written.append)

    def test_files_of_one_draft_are_all_there_or_none(self, place: OpenPlace) -> None:
        names = [file_name(3, part) for part in ("a", "b")]
        expected = save(self, 3, *names)
        found = place.list()
        seen: dict[str, bytes] = {}
        for each in found:
            with each.open() as opened:
                seen |= {name: read(file) for name, file in opened.files.items()}
        assert seen == expected

    def test_the_newest_comes_last_and_others_see_the_same(self, place: OpenPlace) -> None:
        for step in (1, 3, 2):
            save(self, step)
        assert [each.info.step for each in place.list()] == [1, 3, 2]
        with self.open() as other:
            names = [each.name for each in other.list()]
        assert names == [each.name for each in place.list()]
        assert len(set(names)) == 3

    def test_models_are_told_apart_where_there_are_any(self, place: OpenPlace) -> None:
        save(self, 1)
        for model in place.models():
            assert model == MODEL
            assert [each.info.step for each in place.list(model)] == [1]
        assert place.list("another") == []

    def test_what_is_removed_is_gone_for_everybody_and_nothing_else(self, place: OpenPlace) -> None:
        expected = {step: save(self, step) for step in (1, 2, 3)}
        with self.open() as other:
            middle = other.list()[1]
            other.remove(middle.name)
            assert [each.info.step for each in other.list()] == [1, 3]
            with pytest.raises(UsageError, match="no checkpoint"):
                other.remove(middle.name)
        assert [each.info.step for each in place.list()] == [1, 3]
        for each in place.list():
            with each.open() as opened:
                [file] = opened.files.values()
                assert {*expected[each.info.step].values()} == {read(file)}

    def test_nothing_is_removed_before_all_of_it_is_asked_for(self, place: OpenPlace) -> None:
        save(self, 1)
        with place.removal(place.list()):
            pass
        assert len(place.list()) == 1

    def test_a_check_reads_every_byte(self, place: OpenPlace) -> None:
        for step in (1, 2):
            save(self, step)
        assert check_place(place, None) == []
        size = sum(each.size for each in verdicts(place, None))
        assert size >= 2 * sum(_LENGTHS)

    def test_a_flipped_bit_is_found_where_it_is(self, place: OpenPlace, tmp_path: Path) -> None:
        for step in (1, 2):
            save(self, step)
        assert self.flip_behind(tensors_of(file_name(2))["t0"].tobytes()[:4096]) == 1
        whole, damaged = place.list()
        assert check_place(place, [whole]) == []
        assert check_place(place, [damaged]) != []
        assert check_place(place, None) != []
        with damaged.open() as opened:
            [name] = opened.files
            with pytest.raises(CorruptionError):
                opened.write(name, str(tmp_path / "damaged"), lambda size: None)
        with whole.open() as opened:
            [name] = opened.files
            opened.write(name, str(tmp_path / "whole"), lambda size: None)

    def test_a_place_that_is_closed_can_be_opened_again(self, place: OpenPlace) -> None:
        save(self, 1)
        place.close()
        place.close()
        with self.open() as other:
            assert len(other.list()) == 1
            save(self, 2)
            assert len(other.list()) == 2


def file_name(step: int, part: str = "") -> str:
    """Return the name of a file of a step."""
    return f"{part}step-{step}.safetensors"


def tensors_of(name: str) -> Tensors:
    """Return the tensors of a file, whose bytes are like those of no other file."""
    source, more = random.Random(name), UNIT if name.startswith(_BIG) else 0
    lengths = (_LENGTHS[0] + more, *_LENGTHS[1:])
    return {
        f"t{number}": np.frombuffer(bytearray(source.randbytes(length)), np.uint8)
        for number, length in enumerate(lengths)
    }


def assemble(tensors: Tensors) -> bytes:
    """Return the bytes of a file, assembled here."""
    named = [NamedTensor(name, "U8", (len(each),), len(each)) for name, each in tensors.items()]
    image = safetensors_image(named, {})
    data = bytearray(image.size)
    digests, crcs = [], []
    for offset, storage in zip(image.offset.tolist(), tensors.values(), strict=True):
        whole = storage.tobytes()
        data[offset : offset + len(whole)] = whole
        units = [whole[start : start + UNIT] for start in range(0, max(1, len(whole)), UNIT)]
        digests += [xxhash.xxh3_128(each).digest() for each in units]
        crcs.append(zlib.crc32(whole))
    rows = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)
    for literal in image.literals(rows, np.array(crcs, np.uint32)):
        data[literal.offset : literal.end] = literal.data
    return bytes(data)


def save(
    contract: PlaceContract, step: int, *names: str, ready: Callable[[], None] = lambda: None
) -> Mapping[str, bytes]:
    """Save a checkpoint; return the bytes that its files are to have."""
    files = {name: tensors_of(name) for name in names or [file_name(step)]}
    contract.save(files, step, ready)
    return {name: assemble(tensors) for name, tensors in files.items()}


def read(file: OpenFile) -> bytes:
    """Return all bytes of a file."""
    data = bytearray(file.size)
    file.load(0, memoryview(data))
    return bytes(data)


def verdicts(place: OpenPlace, chosen: Sequence[StoredCheckpoint] | None) -> list[Verdict]:
    """Return what the checks find. Raises what they raise."""
    found = []
    for check in place.checks(chosen, CheckPace()):
        verdict = Verdict(check.path)

        def progress(done: int, total: int, verdict: Verdict = verdict) -> None:
            verdict.size = done

        check.run(verdict, progress)
        found.append(verdict)
    return found


def check_place(place: OpenPlace, chosen: Sequence[StoredCheckpoint] | None) -> list[str]:
    """Return the errors that checks find, in words."""
    try:
        found = [each for verdict in verdicts(place, chosen) for each in verdict.findings]
    except CorruptionError as error:
        return [str(error)]
    return [str(each) for each in found if each.severity is Severity.ERROR]
