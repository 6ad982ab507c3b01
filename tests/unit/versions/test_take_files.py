"""Files that are open anywhere become a version of a pool."""

from __future__ import annotations

import io
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import portus
from portus.engine.format.checksum import UNIT, digest
from portus.engine.image.torch_reader import read_torch
from portus.engine.pipeline.draft import Labels
from portus.engine.spec import PAGE
from portus.errors import CorruptionError, TransportError
from portus.reach.format.layout import DATA_START
from portus.reach.formats.safetensors import read_safetensors
from portus.reach.index.directory import open_reader
from portus.reach.index.file_table import decode_table
from portus.reach.index.pool import PoolWriter
from portus.reach.index.roots import format_pool
from portus.reach.media.lock import ProcessLocks
from portus.reach.media.space import Memory
from portus.reach.training.safetensors import Safetensors
from portus.reach.versions.open_version import OpenVersion
from portus.reach.versions.pool_draft import ALIGNED_SIZE
from portus.reach.versions.take_files import FileToTake, pack_file, take_files
from tests.unit.mirror.test_mirror import new_pool
from tests.unit.pools.scene import written

LABELS = Labels(model="gpt", step=7, token=b"t" * 16, metrics={"loss": 0.5})


def reads(data: bytes) -> Callable[[int, int], bytes]:
    def read(offset: int, length: int) -> bytes:
        assert offset + length <= len(data), "asked for what the file does not have"
        return data[offset : offset + length]

    return read


def state(step: int) -> dict[str, Any]:
    noise = torch.Generator().manual_seed(step)
    return {
        "big": torch.rand(UNIT // 4 + 1000, generator=noise),
        "empty": torch.empty(0),
        "small": [torch.rand(n, generator=noise) for n in range(0, 9000, 700)],
        "text": "x" * 5000,
    }


def stock(made: object) -> bytes:
    out = io.BytesIO()
    torch.save(made, out)
    return out.getvalue()


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of all kinds."""
    below = tmp_path_factory.mktemp("files") / "one"
    return {
        "a.ckpt": written(below, "a.ckpt", state(1)),
        "b.safetensors": written(below, "b", Safetensors({"w": state(2)["big"]}, {"by": "us"})),
        "stock.pt": stock(state(3)),
        "größe +.pt": written(below, "c.pt", {"step": 3}),
        "empty": b"",
        "state.json": b'{"of": "a trainer"}',
        "noise.bin": random.Random(1).randbytes(UNIT + 77),
    }


def taken(files: dict[str, bytes], *, whole: bool) -> list[FileToTake]:
    """whole: with the digest of all of each file."""
    return [
        FileToTake(name, len(data), reads(data), digest(data) if whole else None)
        for name, data in files.items()
    ]


@pytest.mark.parametrize("whole", [True, False])
def test_a_version_has_the_bytes_of_its_files(contents: dict[str, bytes], whole: bool) -> None:
    writer, arrived = new_pool(), list[int]()
    files = taken({k: v for k, v in contents.items() if whole or k != "noise.bin"}, whole=whole)
    record = take_files(writer, files, LABELS, directory="/runs/gpt", advance=arrived.append)
    assert sum(arrived) == sum(each.size for each in files)
    assert portus.check(writer) == []
    [entry] = writer.catalogue().entries()
    assert (entry.info.token, entry.info.step, entry.info.metrics) == (b"t" * 16, 7, {"loss": 0.5})
    version = OpenVersion(writer, record)
    assert version.table is not None
    assert version.table.directory == "/runs/gpt"
    found = {name: b"".join(each.read(0, each.size)) for name, each in version.files.items()}
    assert found == {each.name: contents[each.name] for each in files}
    offset, length = record.extents["offset"], record.extents["length"]
    assert not (offset[length >= ALIGNED_SIZE] % PAGE).any(), "later versions share whole pages"
    writer.close()


def test_the_storages_are_those_that_a_save_would_have_placed(contents: dict[str, bytes]) -> None:
    for name, data in contents.items():
        found, read = pack_file(FileToTake(name, len(data), reads(data))), reads(data)
        if name.endswith(("ckpt", "pt")):
            expected: Any = read_torch(read, len(data), name)
        elif name == "b.safetensors":
            expected = read_safetensors(read, len(data), name)
        else:
            assert not len(found.length)
            continue
        assert found.offset.tolist() == expected.offset.tolist()
        assert found.length.tolist() == expected.length.tolist()


def test_a_save_and_the_same_files_have_the_same_table_and_digests(tmp_path: Path) -> None:
    with portus.PoolCheckpointer(tmp_path / "run.portus", "gpt") as saver:
        saver.save(state(1), step=1).wait()
    reader, writer = open_reader(str(tmp_path / "run.portus")), new_pool()
    [entry] = reader.catalogue().entries()
    record = reader.record(entry)
    version = OpenVersion(reader, record)
    assert version.table is not None
    files = {name: b"".join(each.read(0, each.size)) for name, each in version.files.items()}
    again = take_files(writer, taken(files, whole=True), LABELS, directory=version.table.directory)
    assert again.contents == record.contents
    assert again.length.tolist() == record.length.tolist()
    assert again.units.tobytes() == record.units.tobytes()
    reader.close()
    writer.close()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", ["a.ckpt", "b.safetensors", "stock.pt"])
def test_of_damaged_files_nothing_is_committed(
    contents: dict[str, bytes], name: str, whole: bool, seed: int
) -> None:
    chance, data = random.Random(seed), contents[name]
    storages = pack_file(FileToTake(name, len(data), reads(data)))
    middle = int(storages.offset[np.argmax(storages.length)]) + 5000
    places = [0, middle, len(data) - 1, *(chance.randrange(len(data)) for _ in range(3))]
    if name == "stock.pt" and not whole:
        places = [middle]  # its CRCs cover storages alone
    for at in places:
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        writer = new_pool()
        file = FileToTake(name, len(data), reads(damaged), digest(data) if whole else None)
        with pytest.raises(CorruptionError, match=name):
            take_files(writer, [file], LABELS)
        assert not list(writer.catalogue().entries())
        assert writer.free_bytes() == writer.medium.size - DATA_START, "room is still held"
        writer.close()


class Losing(Memory):
    """Loses a byte of the store of so many bytes or more."""

    lost = 0

    def store(self, offset: int, data: bytes | memoryview) -> None:
        if len(data) >= UNIT // 2 and not self.lost:
            self.lost = 1
            data = bytes(1) + bytes(data[1:])
        super().store(offset, data)


@pytest.mark.parametrize(
    ("name", "directory"), [("../a", ""), ("a/b", ""), ("..", ""), ("a", "here"), ("a", "/\0")]
)
def test_files_that_no_reader_would_find_are_no_version(name: str, directory: str) -> None:
    writer = new_pool()
    with pytest.raises(CorruptionError, match="table of files"):
        take_files(writer, [FileToTake(name, 3, reads(b"abc"))], LABELS, directory=directory)
    assert not writer.catalogue().ids()
    writer.close()


@pytest.mark.parametrize("whole", [True, False])
def test_a_write_that_failed_silently_is_found(contents: dict[str, bytes], whole: bool) -> None:
    medium = Losing(DATA_START)
    format_pool(medium)
    writer = PoolWriter(medium, ProcessLocks())
    files = taken({"a.ckpt": contents["a.ckpt"]}, whole=whole)
    with pytest.raises(CorruptionError, match=r"a\.ckpt"):
        take_files(writer, files, LABELS)
    assert medium.lost
    assert not list(writer.catalogue().entries())
    writer.close()


def test_a_read_that_fails_ends_it_and_leaves_the_pool_as_it_was(
    contents: dict[str, bytes],
) -> None:
    data = contents["a.ckpt"]

    def fail(offset: int, length: int) -> bytes:
        if length > 1 << 20:
            raise TransportError("the line is dead")
        return data[offset : offset + length]

    writer = new_pool()
    with pytest.raises(TransportError, match="the line is dead"):
        take_files(writer, [FileToTake("a.ckpt", len(data), fail)], LABELS)
    assert not list(writer.catalogue().entries())
    assert writer.free_bytes() == writer.medium.size - DATA_START
    writer.close()


def test_whatever_a_directory_says_the_storages_lie_in_the_file_side_by_side(
    contents: dict[str, bytes], seed: int
) -> None:
    chance, fewer = random.Random(seed), 0
    torch_file = stock({f"{n}": torch.rand(9) for n in range(5)})
    lengths = [at.start() + 20 for at in re.finditer(b"PK\x01\x02", torch_file)]
    for data in (torch_file, contents["b.safetensors"][:20_000]):
        for _ in range(500):
            hurt = bytearray(data)
            for _ in range(chance.randrange(1, 4)):
                hurt[chance.randrange(len(hurt))] = chance.randrange(256)
            if data is torch_file and chance.random() < 0.5:
                lie, at = chance.randrange(len(data)), chance.choice(lengths)
                hurt[at : at + 8] = 2 * lie.to_bytes(4, "little")
            if data is torch_file and chance.random() < 0.2:
                for at in lengths[chance.randrange(len(lengths)) :]:  # records behind the file
                    hurt[at + 22 : at + 26] = (1 << 31 | at).to_bytes(4, "little")
            found = pack_file(FileToTake("a", len(hurt), reads(bytes(hurt))))
            order = np.argsort(found.offset, kind="stable")
            begin, length = found.offset[order], found.length[order]
            some = length > 0
            begin, end = begin[some], (begin + length)[some]
            assert (found.length >= 0).all()
            assert (found.offset >= 0).all()
            assert not len(end) or end[-1] <= len(hurt)
            assert (begin[1:] >= end[:-1]).all()
            fewer += not len(found.length)
    assert 100 < fewer < 990


def test_a_host_without_torch_finds_the_storages_of_both_formats(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(written(tmp_path / "one", "a", Safetensors({"w": torch.rand(9)})))
    (tmp_path / "b").write_bytes(stock({"w": torch.rand(9)}))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from portus.reach.versions.take_files import FileToTake, pack_file\n"
        "for name in sys.argv[1:]:\n"
        "    data = open(name, 'rb').read()\n"
        "    file = FileToTake(name, len(data), lambda at, n: data[at:at + n])\n"
        "    print(pack_file(file).length.tolist())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a"), str(tmp_path / "b")]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "[36]\n[36]\n"


def test_a_table_of_what_was_taken_is_that_of_the_version(contents: dict[str, bytes]) -> None:
    writer = new_pool()
    record = take_files(writer, taken(contents, whole=True), LABELS)
    table = decode_table(record.contents)
    assert table is not None
    assert [each.name for each in table.files] == list(contents)
    assert table.lengths == record.length.tolist()
    writer.close()
