"""Tests that every place for checkpoints must pass.

Subclass ``PlaceContract`` and implement its abstract methods: how to open your place, and how to
damage its bytes without it, because a test of damage must not rely on the place. pytest then runs
the suite. No test is skipped because of what a place can do.
"""

from __future__ import annotations

import abc
import contextlib
import os
import random
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import xxhash

from portus.engine.format.checksum import UNIT
from portus.engine.loading.open_file import OpenFile
from portus.engine.pipeline.draft import Labels
from portus.errors import CorruptionError, UsageError
from portus.reach.formats.safetensors import NamedTensor, safetensors_image
from portus.reach.index.check import Severity
from portus.reach.index.place import Place
from portus.reach.places.base import (
    Abilities,
    CheckPace,
    CheckpointFile,
    CopyOptions,
    OpenPlace,
    StoredCheckpoint,
    Verdict,
)
from portus.reach.places.opening import open_place

MODEL: Final = "net"

_LENGTHS: Final = (8200, 4096, 0, 13)
"""Bytes of the storages of a file: some pages, a page, nothing, and a few."""

_BIG: Final = "big-"
"""The prefix of the name of a file whose first storage has more than a unit."""

_TICK_S: Final = 0.02
"""The clock of a file system ticks at least once meanwhile, so later files have later times."""

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
        save(place, 1)
        assert place.abilities == self.abilities

    def test_a_draft_is_nowhere_before_its_commit(self, place: OpenPlace) -> None:
        assert list(place.models()) == []
        with self.open() as other, draft(place, 1) as commit:
            assert other.list() == []
            commit()
            assert [each.info.step for each in other.list()] == [1]
        assert [each.info.step for each in place.list()] == [1]

    def test_a_draft_that_is_not_committed_leaves_nothing(self, place: OpenPlace) -> None:
        with draft(place, 1):
            pass
        with pytest.raises(UsageError, match="not this one"), draft(place, 1):
            raise UsageError("not this one")
        assert place.list() == []
        save(place, 1)
        assert len(place.list()) == 1

    def test_a_draft_of_a_damaged_file_leaves_nothing_of_the_others(
        self, place: OpenPlace, tmp_path: Path
    ) -> None:
        names = [file_name(3, part) for part in ("a", "b")]
        with open_files(names, tmp_path) as files:
            with (tmp_path / names[1]).open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))
            with pytest.raises(CorruptionError), place.draft(labels(3), files, CopyOptions()):
                pass
        assert place.list() == []

    def test_a_file_is_read_as_its_image_says_byte_for_byte(
        self, place: OpenPlace, tmp_path: Path
    ) -> None:
        told: list[int] = []
        [(name, expected)] = save(place, 7, file_name(7, _BIG), advance=told.append).items()
        assert sum(told) == len(expected)
        [found] = place.list()
        assert found.info.step == 7
        assert len(expected) - 4096 <= found.info.size <= len(expected), "perhaps of storages alone"
        with place.open(found.name) as checkpoint:
            assert list(checkpoint.files) == [name]
            file = checkpoint.files[name]
            assert file.size == len(expected)
            for start, end in ((0, file.size), (5, 6), (4000, UNIT + 8000), (file.size, file.size)):
                data = bytearray(end - start)
                file.load(start, memoryview(data))
                assert data == expected[start:end], (start, end)
            written: list[int] = []
            with (tmp_path / "written").open("w+b") as out:
                file.write(out.fileno(), name, written.append)
            assert (tmp_path / "written").read_bytes() == expected
            assert sum(written) == len(expected)

    def test_files_of_one_draft_are_all_there_or_none(self, place: OpenPlace) -> None:
        names = [file_name(3, part) for part in ("a", "b")]
        expected = save(place, 3, *names)
        seen: dict[str, bytes] = {}
        for each in place.list():
            with each.open() as checkpoint:
                seen |= {name: read(file) for name, file in checkpoint.files.items()}
        assert seen == expected

    def test_a_checkpoint_is_copied_from_the_place(self, place: OpenPlace) -> None:
        expected = save(place, 1)
        [found] = place.list()
        with found.open() as checkpoint:
            files = {f"2-{name}": file for name, file in checkpoint.files.items()}
            with place.draft(labels(2), files, CopyOptions()) as commit:
                commit()
        both = place.list()
        assert len(both) == 2
        for each in both:
            with each.open() as checkpoint:
                assert [read(file) for file in checkpoint.files.values()] == [*expected.values()]

    def test_the_newest_comes_last_and_others_see_the_same(self, place: OpenPlace) -> None:
        for step in (1, 3, 2):
            save(place, step)
        assert [each.info.step for each in place.list()] == [1, 3, 2]
        with self.open() as other:
            names = [each.name for each in other.list()]
        assert names == [each.name for each in place.list()]
        assert len(set(names)) == 3

    def test_models_are_told_apart_where_there_are_any(self, place: OpenPlace) -> None:
        save(place, 1)
        for model in place.models():
            assert model == MODEL
            assert [each.info.step for each in place.list(model)] == [1]
        assert place.list("another") == []

    def test_what_is_removed_is_gone_for_everybody_and_nothing_else(self, place: OpenPlace) -> None:
        expected = {step: save(place, step) for step in (1, 2, 3)}
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
        save(place, 1)
        with place.removal(place.list()):
            pass
        assert len(place.list()) == 1

    def test_a_check_reads_every_byte(self, place: OpenPlace) -> None:
        for step in (1, 2):
            save(place, step)
        assert check_place(place, None) == []
        size = sum(each.size for each in verdicts(place, None))
        assert size >= 2 * sum(_LENGTHS)

    def test_a_flipped_bit_is_found_where_it_is(self, place: OpenPlace, tmp_path: Path) -> None:
        for step in (1, 2):
            save(place, step)
        assert self.flip_behind(tensors_of(file_name(2))["t0"].tobytes()[:4096]) == 1
        whole, damaged = place.list()
        assert check_place(place, [whole]) == []
        assert check_place(place, [damaged]) != []
        assert check_place(place, None) != []
        for each, expected in (
            (whole, contextlib.nullcontext()),
            (damaged, pytest.raises(CorruptionError)),
        ):
            with each.open() as checkpoint, (tmp_path / "copy").open("w+b") as out:
                [(name, file)] = checkpoint.files.items()
                with expected:
                    file.write(out.fileno(), name, lambda size: None)

    def test_a_place_that_is_closed_can_be_opened_again(self, place: OpenPlace) -> None:
        save(place, 1)
        place.close()
        place.close()
        with self.open() as other:
            assert len(other.list()) == 1
            save(other, 2)
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


def labels(step: int) -> Labels:
    """Return the labels of a checkpoint."""
    return Labels(model=MODEL, step=step, token=os.urandom(16))


@contextlib.contextmanager
def open_files(names: Sequence[str], directory: Path) -> Iterator[Mapping[str, CheckpointFile]]:
    """Make files in a directory, and yield them, open."""
    with contextlib.ExitStack() as stack:
        files: dict[str, CheckpointFile] = {}
        for name in names:
            (directory / name).write_bytes(assemble(tensors_of(name)))
            source = stack.enter_context(open_place(Place.of_files(str(directory))))
            files |= stack.enter_context(source.open(str(directory / name))).files
        yield files


@contextlib.contextmanager
def draft(
    place: OpenPlace, step: int, *names: str, advance: Callable[[int], None] = lambda size: None
) -> Iterator[Callable[[], None]]:
    """Begin a checkpoint of some files, and yield its commit."""
    with (
        tempfile.TemporaryDirectory() as directory,
        open_files(names or [file_name(step)], Path(directory)) as files,
        place.draft(labels(step), files, CopyOptions(advance=advance)) as commit,
    ):
        yield commit


def save(
    place: OpenPlace, step: int, *names: str, advance: Callable[[int], None] = lambda size: None
) -> Mapping[str, bytes]:
    """Make a checkpoint of some files; return the bytes that these have."""
    time.sleep(_TICK_S)
    with draft(place, step, *names, advance=advance) as commit:
        commit()
    return {name: assemble(tensors_of(name)) for name in names or [file_name(step)]}


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
