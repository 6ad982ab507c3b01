"""Files of ``torch.save``, loaded as torch loads them, and verified."""

from __future__ import annotations

import errno
import os
import pickle
import random
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from portus.engine.image.integrity import is_whole
from portus.engine.image.torch_reader import read_torch
from portus.engine.loading import open_file, torch_file
from portus.engine.loading.checkpoint_file import load_file, verify_file
from portus.errors import CorruptionError, MediumError, PortusError, UsageError
from tests.same import assert_same
from tests.unit.state.image_bytes import saved

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")


class Custom:
    def __init__(self) -> None:
        self.tensor = torch.arange(5)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and torch.equal(self.tensor, other.tensor)

    __hash__ = None  # type: ignore[assignment]


def state() -> dict[str, Any]:
    base = torch.arange(12.0).view(3, 4)
    return {
        "model": OrderedDict(
            weight=torch.nn.Parameter(torch.randn(70, 900)),
            bias=torch.zeros(3),
            empty=torch.empty(0),
        ),
        "views": [base, base.t(), base[1:]],
        "optimizer": {"state": {0: {"exp_avg": torch.ones(70, 900)}}, "groups": [{"lr": 0.1}]},
        "half": torch.randn(10).to(torch.bfloat16),
        "complex": torch.randn(4, dtype=torch.complex64),
        "step": 7,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with digests."""
    torch.manual_seed(0)
    made = tmp_path / "run.pt"
    made.write_bytes(saved(state(), str(made))[0])
    return made


@pytest.mark.parametrize(
    "settings",
    [{}, {"weights_only": False}, {"mmap": True}, {"map_location": "cpu"}],
    ids=str,
)
def test_it_returns_what_torch_load_returns(path: Path, settings: dict[str, Any]) -> None:
    assert_same(load_file(path, **settings), torch.load(path, **settings))


def test_views_stay_views_of_one_storage(path: Path) -> None:
    base, turned, rows = load_file(path)["views"]
    base[1, 2] = 99
    assert turned[2, 1] == 99
    assert rows[0, 2] == 99


def test_devices_and_fake_tensors_are_torch_s_own_affair(path: Path) -> None:
    assert load_file(path, map_location="meta")["model"]["weight"].is_meta
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert load_file(path)["model"]["weight"].shape == (70, 900)


def test_objects_load_as_torch_allows_it(tmp_path: Path) -> None:
    path = tmp_path / "object.pt"
    path.write_bytes(saved({"object": Custom()}, str(path))[0])
    with pytest.raises(Exception, match="weights_only"):
        load_file(path)
    assert load_file(path, weights_only=False) == {"object": Custom()}
    with torch.serialization.safe_globals([Custom]):
        assert load_file(path) == {"object": Custom()}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["sparse", "csr", "quantized", "nested", "subnormal"])
def test_other_layouts_load_like_with_torch(tmp_path: Path, kind: str) -> None:
    made = {
        "sparse": lambda: torch.eye(5).to_sparse(),
        "csr": lambda: torch.eye(5).to_sparse_csr(),
        "quantized": lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "subnormal": lambda: torch.tensor([1e-45, float("nan"), -0.0]),
    }[kind]()
    path = tmp_path / "x.pt"
    path.write_bytes(saved({"x": made}, str(path))[0])
    ours, stock = load_file(path)["x"], torch.load(path)["x"]
    assert type(ours) is type(stock)
    assert str(ours) == str(stock)


def test_stock_files_and_old_ones_load_unverified(tmp_path: Path) -> None:
    for number, settings in enumerate(({}, {"_use_new_zipfile_serialization": False})):
        path = tmp_path / f"{number}.pt"
        torch.save(state(), path, **settings)
        assert load_file(path)["step"] == 7
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(CorruptionError, match="found 13 bytes that begin"):
        load_file(tmp_path / "text.pt")
    with pytest.raises(FileNotFoundError):
        load_file(tmp_path / "none.pt")


def test_every_flipped_byte_is_found_or_changes_nothing(path: Path, seed: int) -> None:
    source, data = random.Random(seed), path.read_bytes()
    expected = torch.load(path)
    places = [source.randrange(len(data)) for _ in range(150)]
    places += [*range(0, 400, 3), *range(len(data) - 600, len(data), 5)]
    found = 0
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << source.randrange(8)
        path.write_bytes(damaged)
        try:
            state = load_file(path)
        except Exception:
            found += 1
        else:
            assert_same(state, expected)
    assert found > len(places) // 2


@pytest.mark.parametrize("mmap", [False, True])
def test_damage_names_file_tensor_and_place(path: Path, mmap: bool) -> None:
    data = bytearray(path.read_bytes())
    place = data.index(torch.ones(70, 900).numpy().tobytes())
    data[place + 1000] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptionError) as raised:
        load_file(path, mmap=mmap)
    text = str(raised.value)
    assert str(path) in text
    assert "['optimizer']['state'][0]['exp_avg']" in text
    assert f"252000 bytes at {place}" in text
    with pytest.raises(CorruptionError):
        verify_file(path)
    with path.open("rb") as file:
        assert not is_whole(file.fileno(), "run.pt")


def test_a_file_that_is_cut_off_anywhere_is_an_error(path: Path, seed: int) -> None:
    data, source = path.read_bytes(), random.Random(seed)
    for length in [*range(0, 200, 20), *(source.randrange(len(data)) for _ in range(30))]:
        path.write_bytes(data[:length])
        with pytest.raises((PortusError, EOFError, RuntimeError, pickle.UnpicklingError)):
            load_file(path)


def test_a_whole_file_verifies_and_so_does_a_stock_one(path: Path, tmp_path: Path) -> None:
    assert verify_file(path) == path.stat().st_size
    with path.open("rb") as file:
        assert is_whole(file.fileno(), "run.pt")
    torch.save(state(), tmp_path / "stock.pt")
    assert verify_file(tmp_path / "stock.pt") == (tmp_path / "stock.pt").stat().st_size
    with pytest.raises(MediumError):
        verify_file(tmp_path / "none.pt")


class Counted(open_file.DiskFile):
    read = calls = 0

    def load(self, offset: int, target: memoryview) -> None:
        Counted.read += len(target)
        Counted.calls += 1
        super().load(offset, target)


@pytest.mark.parametrize("order", ["keys", "backwards", "random"])
def test_small_storages_are_read_together_whatever_torch_asks_for_first(
    tmp_path: Path, seed: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [random.Random(seed).choice([1, 9, 700, 70_000]) for _ in range(400)]
    tensors = [torch.full((size,), float(number)) for number, size in enumerate(sizes)]
    path = tmp_path / "many.pt"
    path.write_bytes(saved(tensors, str(path))[0])
    monkeypatch.setattr(open_file, "DiskFile", Counted)
    with open_file.open_file(str(path)) as file:
        found = read_torch(open_file.reads(file), file.size, str(path))
        asked = list(range(len(tensors)))
        if order != "keys":
            asked = asked[::-1] if order == "backwards" else random.Random(seed).sample(asked, 400)
        reader = torch_file._VerifiedFile(file, found, None)
        Counted.read = Counted.calls = 0
        for index in asked:
            here = torch.empty(sizes[index])
            reader.seek(int(found.offset[index]))
            assert reader.readinto(here.numpy().data) == here.nbytes
            assert torch.equal(here, tensors[index])
        assert Counted.read < 2 * file.size
    large = sum(size == 70_000 for size in sizes)
    assert order != "keys" or Counted.calls < 2 * large + 20


def test_damage_is_that_of_the_small_storage_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "many.pt"
    data = bytearray(saved({f"w{n}": torch.full((9,), float(n)) for n in range(50)}, str(path))[0])
    data[data.index(torch.full((9,), 31.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"\['w31'\]: 36 bytes"):
        load_file(path)
    assert len(load_file(path, [f"w{n}" for n in range(50) if n != 31])) == 49


@pytest.mark.parametrize("names", ["model.*", "model", ["model.bias", "model.weight", "step"]])
def test_a_part_is_what_matches_and_no_other_tensor_is_read(
    path: Path, names: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_file, "DiskFile", Counted)
    Counted.read = 0
    part = load_file(path, names)
    whole = torch.load(path)
    assert type(part["model"]) is OrderedDict
    assert torch.equal(part["model"]["weight"], whole["model"]["weight"])
    assert set(part) == ({"model", "step"} if isinstance(names, list) else {"model"})
    assert 0 < Counted.read < 70 * 900 * 4 + 30_000


def test_lists_have_none_for_what_does_not_match(path: Path) -> None:
    part = load_file(path, ["views.1", "optimizer.groups.*"])
    assert part["views"][0] is None
    assert torch.equal(part["views"][1], torch.load(path)["views"][1])
    assert part["optimizer"] == {"groups": [{"lr": 0.1}]}


def test_a_pattern_that_matches_nothing_is_an_error_that_says_what_is_near(path: Path) -> None:
    with pytest.raises(UsageError, match=r"no key path matches 'modle\.\*'; near it are model"):
        load_file(path, "modle.*")


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = torch.load(path)
    real = read_torch

    def replace(*arguments: Any) -> Any:
        found = real(*arguments)
        other = path.with_name("other.pt")
        other.write_bytes(b"another file")
        os.replace(other, path)
        return found

    monkeypatch.setattr(torch_file, "read_torch", replace)
    assert_same(load_file(path), expected)


def test_no_descriptor_is_left_open(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    load_file(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PortusError):
        load_file(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_copy_that_the_disk_does_not_return_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "a.pt")

    def fail(*_: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with (
        open_file.open_file(os.fspath(tmp_path / "a.pt")) as file,
        open(tmp_path / "b.pt", "w+b") as copy,
    ):
        monkeypatch.setattr(os, "pread", fail)
        with pytest.raises(MediumError, match="cannot read"):
            file.write(copy.fileno(), "b.pt", lambda size: None)
