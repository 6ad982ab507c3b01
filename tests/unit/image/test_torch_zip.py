"""Layouts that are too large to write, and files that no reader may trust."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from portus.engine.format.checksum import unit_counts
from portus.engine.image.image import Image, Literal, exactly
from portus.engine.image.torch_reader import read_torch
from portus.engine.image.torch_zip import DESCRIPTOR64, LOCAL, archive_name, torch_image
from portus.engine.loading.checkpoint_file import verify_file
from portus.engine.state.pickling import pickle_state, torch_format
from portus.errors import CorruptionError, UsageError


def large() -> Image:
    """A storage that exceeds 4 GiB, and storages behind it."""
    lengths = np.array([12, (1 << 32) + 100, 20, 0, 8], np.int64)
    state = [torch.empty(int(each), dtype=torch.uint8, device="cpu") for each in lengths]
    pickled = pickle_state(state)
    assert pickled.lengths.tolist() == lengths.tolist()
    return pickled.image("big.pt")


def literals(image: Image) -> list[Literal]:
    """For storages of zeros, with digests that are not theirs."""
    units = int(unit_counts(image.length).sum())
    crcs = np.zeros(len(image.length), np.uint32)
    return list(image.literals(np.zeros((units, 16), np.uint8), crcs))


def test_a_file_beyond_4_gib_has_the_headers_of_torch(tmp_path: Path) -> None:
    image = large()
    path = tmp_path / "big.pt"
    sizes = image.length.tolist()
    with torch.serialization.skip_data():  # leaves holes
        torch.save([torch.empty(each, dtype=torch.uint8) for each in sizes], path)

    with path.open("rb") as stock:
        # Descriptors have 64 bits behind the large one. torch noted no CRC32 here.
        *between, last = literals(image)
        for literal in between:
            stock.seek(literal.offset)
            assert stock.read(len(literal.data)) == literal.data
        stock.seek(last.offset)
        assert stock.read(DESCRIPTOR64.size) == last.data[: DESCRIPTOR64.size]


def test_python_and_torch_and_we_read_the_directory_of_a_file_beyond_4_gib(tmp_path: Path) -> None:
    image = large()
    path = tmp_path / "big.pt"
    with path.open("wb") as file:
        file.truncate(image.size)
        for literal in literals(image):
            file.seek(literal.offset)
            file.write(literal.data)

    with zipfile.ZipFile(path) as archive:
        sizes = [archive.getinfo(f"big/data/{each}").file_size for each in range(5)]
    loaded = torch.load(path, mmap=True)
    with path.open("rb") as written:

        def read(offset: int, length: int) -> bytes:
            written.seek(offset)
            return written.read(length)

        found = read_torch(read, image.size, "big.pt")

    assert sizes == image.length.tolist() == [len(each) for each in loaded]
    assert found.offset.tolist() == image.offset.tolist()
    assert found.length.tolist() == sizes
    assert found.keys == ("0", "1", "2", "3", "4")


def test_storages_are_aligned_and_literals_fill_every_gap() -> None:
    pickled = pickle_state([torch.full((3,), float(each)) for each in range(30)])
    image = pickled.image("a.pt")
    assert not (image.offset % 64).any()
    pieces = [(each.offset, each.end) for each in literals(image)]
    spans = zip(image.offset.tolist(), image.length.tolist(), strict=True)
    pieces += [(at, at + length) for at, length in spans]
    end = 0
    for begin, until in sorted(pieces):
        assert begin == end
        end = until
    assert end == image.size


def test_padding_that_a_header_has_no_number_for_is_refused() -> None:
    """Cut off without a word, it would have readers look for the data elsewhere."""
    wide = type(torch_format())(records=(), sorted_as_text=False, alignment=1 << 16, version=b"3\n")
    # So long that the header of the first storage begins 34 bytes behind a multiple.
    pickle = bytes((1 << 16) - 16 - LOCAL.size - len("a/data/0") - 3)
    image = torch_image(
        archive="a", pickle=pickle, lengths=np.array([1], np.int64), torch_format=wide
    )
    with pytest.raises(UsageError, match="storage_alignment"):
        literals(image)


def test_torch_2_6_has_its_storages_in_the_order_of_their_keys_as_text() -> None:
    old = torch_format()
    old = type(old)(
        records=(("byteorder", b"little"),), sorted_as_text=True, alignment=64, version=b"3\n"
    )
    lengths = np.full(12, 4, np.int64)
    image = torch_image(archive="a", pickle=b".", lengths=lengths, torch_format=old)
    assert np.argsort(image.offset).tolist() == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]
    data = bytearray(image.size)
    for literal in literals(image):
        data[literal.offset : literal.end] = literal.data

    found = read_torch(lambda offset, length: bytes(data[offset : offset + length]), len(data), "a")

    assert found.offset.tolist() == image.offset.tolist()


def test_a_hidden_name_without_a_stem_is_accepted_although_torch_refuses_it() -> None:
    assert archive_name("/x/.hidden") == "archive"


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_file_that_is_not_one_of_torch_is_refused(method: int) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("a/other", b"x" * 100)
    data = file.getvalue()
    with pytest.raises(CorruptionError, match=r"data\.pkl|compressed"):
        read_torch(lambda offset, length: data[offset : offset + length], len(data), "a.pt")


def test_digests_of_the_wrong_number_are_refused() -> None:
    image = pickle_state([torch.ones(3)]).image("a.pt")
    with pytest.raises(UsageError, match="expected 1 units"):
        image.literals(np.zeros((2, 16), np.uint8), np.zeros(1, np.uint32))
    with pytest.raises(UsageError, match="expected 1, found 2"):
        image.literals(np.zeros((1, 16), np.uint8), np.zeros(2, np.uint32))


def test_each_byte_that_says_what_a_record_is_must_be_that_of_the_directory(
    tmp_path: Path,
) -> None:
    """A stock file has no digests: what is before its records is compared with its directory."""
    path = tmp_path / "stock.pt"
    torch.save({"x": torch.arange(10.0)}, path)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        [record] = [each for each in archive.infolist() if each.filename.endswith("data/0")]
    header, name = record.header_offset, record.filename.encode()
    # The signature, the flags, the method, the length of the name, the name.
    telling = [*range(4), 6, 7, 8, 9, 26, 27, *range(30, 30 + len(name))]
    for at in telling:
        damaged = bytearray(data)
        damaged[header + at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(CorruptionError):
            verify_file(path)
    path.write_bytes(data)
    assert verify_file(path) == len(data)


def test_a_read_that_returns_less_than_asked_is_gone_on_with() -> None:
    data = bytes(range(200))

    def read(offset: int, length: int) -> bytes:
        return data[offset : offset + min(length, 7)]  # as Linux does, of more than 2 GiB

    assert exactly(read, 3, 100, "a.pt") == data[3:103]
    with pytest.raises(CorruptionError, match="expected 100 bytes, found 50"):
        exactly(read, 150, 100, "a.pt")
