"""The oracle is ``torch.save``: the same bytes through the last storage, whatever it accepts."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from portus.engine.image.torch_reader import read_torch
from portus.engine.state import pickling
from portus.engine.state.pickling import pickle_state
from portus.errors import CorruptionError, UsageError
from tests.unit.state.image_bytes import saved

# torch warns about quantized, nested and sparse tensors.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Point = collections.namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Record:
    weight: torch.Tensor
    colour: Colour = Colour.RED


class Reduced:
    """Pickled by a function, with a tensor among its arguments."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return Reduced, (self.tensor,)


class Named(torch.Tensor):
    """A subclass with an attribute."""


def named() -> torch.Tensor:
    tensor = torch.ones(3).as_subclass(Named)
    tensor.label = "a"  # type: ignore[attr-defined]
    return tensor


def with_attribute() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.label = "a"  # type: ignore[attr-defined]
    return tensor


def views() -> Any:
    base = torch.arange(24.0).reshape(4, 6)
    return [base, base.t(), base[1:, ::2], base, base[0].expand(3, 6)]


def trained() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def quantized() -> Any:
    per_tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8)
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
    return [
        per_tensor,
        torch.quantize_per_channel(torch.ones(2, 3), scales, zeros, 0, torch.quint8),
    ]


STATES: dict[str, Any] = {
    "nothing": lambda: None,
    "plain": lambda: {"a": 1, "b": [2.5, "x", b"y", None, True], "c": {3, 4}, "big": 1 << 80},
    "trained": trained,
    "views": views,
    "many": lambda: [torch.full((3,), float(i)) for i in range(25)],
    "empty": lambda: [torch.empty(0), torch.ones(2), torch.empty(0, 3), torch.empty(0)],
    "dtypes": lambda: [
        torch.zeros(5, dtype=dtype)
        for dtype in (torch.bool, torch.bfloat16, torch.float16, torch.int8, torch.complex64)
    ],
    "new dtypes": lambda: [
        torch.zeros(5, dtype=torch.uint16),
        torch.zeros(5).to(torch.float8_e5m2),
    ],
    "scalars": lambda: [torch.tensor(1), torch.tensor(2.0)],
    "conjugate": lambda: [torch.ones(2, dtype=torch.complex64).conj(), torch.zeros(2)],
    "negative": lambda: [torch.ones(2, dtype=torch.complex64).conj().imag],
    "gradient": lambda: [torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))],
    "sparse": lambda: [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()],
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": quantized,
    "subclass": named,
    "attribute": with_attribute,
    "meta": lambda: [torch.ones(3, device="meta"), torch.ones(3)],
    "module": lambda: torch.nn.Linear(2, 3),
    "buffer": lambda: torch.nn.Buffer(torch.ones(3)),
    "objects": lambda: [Point(1, torch.ones(2)), Colour.RED, Record(torch.ones(2))],
    "reduced": lambda: [Reduced(torch.ones(2)), Reduced(torch.ones(3))],
    "ordered": lambda: collections.OrderedDict(a=torch.ones(2), b=collections.defaultdict(list)),
    "storages": lambda: [torch.ones(3).untyped_storage(), torch.ones(3)._typed_storage()],
    "generator": lambda: torch.random.get_rng_state(),
    "torch things": lambda: [torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.strided],
}


@pytest.mark.parametrize("what", STATES)
def test_a_file_equals_that_of_torch_through_its_last_storage(what: str, tmp_path: Path) -> None:
    state = STATES[what]()
    path = str(tmp_path / "step.1.ckpt")
    torch.save(state, path)

    ours, end = saved(state, path)

    stock = Path(path).read_bytes()
    assert ours[:end] == stock[:end]
    assert pickle_state(state).pickle == zipfile.ZipFile(path).read("step.1/data.pkl")
    with zipfile.ZipFile(io.BytesIO(ours)) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("what", STATES)
def test_torch_loads_it(what: str, tmp_path: Path) -> None:
    state = STATES[what]()
    path = tmp_path / "a.pt"
    ours, _ = saved(state, str(path))
    path.write_bytes(ours)

    loaded = torch.load(path, weights_only=False)
    mapped = torch.load(path, weights_only=False, mmap=True)

    assert type(loaded) is type(mapped) is type(state)
    # The loaded state has the pickle of the saved one, so it is the same in every part of it.
    if what not in ("attribute", "plain"):
        assert len(pickle_state(loaded).storages) == len(pickle_state(state).storages)


def test_readers_that_compute_offsets_find_every_storage(tmp_path: Path) -> None:
    state = {"a": torch.arange(10), "empty": torch.empty(0), "b": torch.arange(7.0)}
    path = tmp_path / "a.pt"
    ours, _ = saved(state, str(path))
    path.write_bytes(ours)

    with FakeTensorMode():
        fake = torch.load(path)
    offsets = [fake[key].untyped_storage()._checkpoint_offset for key in state]

    data = path.read_bytes()
    for key, offset in zip(state, offsets, strict=True):
        expected = state[key].numpy().tobytes()
        assert data[offset : offset + len(expected)] == expected
    assert torch.equal(torch.load(path, weights_only=True)["b"], state["b"])
    assert torch.load(path, map_location="meta")["a"].device.type == "meta"
    assert torch.equal(torch.load(io.BytesIO(ours))["a"], state["a"])


@pytest.mark.parametrize("name", ["a.pt", "a.b.ckpt", ".a.b", "noext", "a.", "é.pt", "..x"])
def test_the_archive_has_the_name_that_torch_gives_it(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / name)
    torch.save([torch.ones(2)], path)
    ours, end = saved([torch.ones(2)], path)
    assert ours[:end] == Path(path).read_bytes()[:end]


@pytest.mark.parametrize(
    "odd",
    [
        pickling._SIGN,
        pickling._SIGNED,
        pickling._SIGNED.decode("latin-1"),
        torch.storage.TypedStorage(
            wrap_storage=torch.ones(3).untyped_storage(), dtype=torch.float32, _internal=True
        ),
        torch.ones(3).untyped_storage(),
        torch.nn.Parameter(torch.ones(3)),
        torch.nn.Linear(2, 2),
        torch.ones(3).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
    ],
    ids=lambda odd: type(odd).__name__,
)
def test_what_the_shortcut_does_not_know_is_pickled_as_torch_does(odd: Any, tmp_path: Path) -> None:
    state = {"before": torch.zeros(2), "odd": odd, "after": [torch.ones(1), odd]}
    path = str(tmp_path / "a.pt")
    torch.save(state, path)
    ours, end = saved(state, path)
    assert ours[:end] == Path(path).read_bytes()[:end]


def test_a_configured_alignment_is_followed(tmp_path: Path) -> None:
    config: Any = pytest.importorskip("torch.utils.serialization").config  # torch 2.7
    path = str(tmp_path / "a.pt")
    with config.patch({"save.storage_alignment": 4096}):
        torch.save([torch.ones(2)], path)
        ours, end = saved([torch.ones(2)], path)
    assert ours[:end] == Path(path).read_bytes()[:end]
    with (
        config.patch({"save.storage_alignment": 0}),
        pytest.raises(UsageError, match="storage_alignment"),
    ):
        saved([torch.ones(2)], path)


def test_what_torch_refuses_is_refused_in_its_words_with_the_path_to_it() -> None:
    with pytest.raises(UsageError, match=r"state\['a'\]\[1\]: torch cannot save it: .*lock"):
        pickle_state({"a": [1, threading.Lock()]})
    holder = Record(torch.ones(1))
    vars(holder)["function"] = lambda: None
    with pytest.raises(UsageError, match=r"state\['a'\]\.function: .*pickle"):
        pickle_state({"b": torch.ones(1), "a": holder})
    shared = torch.ones(4)
    with pytest.raises(UsageError, match="different types"):
        pickle_state([shared, shared.view(torch.int32)])
    with torch.serialization.skip_data(), pytest.raises(UsageError, match="skip_data"):
        pickle_state([shared])


def test_how_a_user_pickles_tensors_is_respected(monkeypatch: Any, tmp_path: Path) -> None:
    stock: Any = torch.Tensor.__reduce_ex__

    def reduce_ex(self: torch.Tensor, protocol: int) -> Any:
        return stock(self + 1, protocol)

    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", reduce_ex)
    path = str(tmp_path / "a.pt")
    torch.save([torch.ones(2)], path)
    ours, end = saved([torch.ones(2)], path)
    assert ours[:end] == Path(path).read_bytes()[:end]


def test_storages_are_not_copied_and_have_readable_paths() -> None:
    weight, tail = torch.ones(3), torch.ones(2)
    pickled = pickle_state({"model": {"layer.weight": torch.nn.Parameter(weight)}, "n": [tail]})
    assert [each.data_ptr() for each in pickled.storages] == [weight.data_ptr(), tail.data_ptr()]
    assert pickled.describer()(0) == "['model']['layer.weight']"
    assert pickled.describer()(1) == "['n'][0]"


@pytest.mark.parametrize("stock", [False, True])
def test_no_damage_of_a_file_goes_unseen(stock: bool, tmp_path: Path) -> None:
    state = {"a": torch.arange(40), "empty": torch.empty(0), "b": torch.ones(3)}
    path = str(tmp_path / "a.pt")
    torch.save(state, path)
    whole = Path(path).read_bytes() if stock else bytes(saved(state, path)[0])

    def contents(data: bytes) -> list[bytes]:
        def read(offset: int, length: int) -> bytes:
            assert offset >= 0
            assert length <= len(data)
            return data[offset : offset + length]

        file = read_torch(read, len(data), "a.pt")
        file.verify(read)
        pieces = zip(file.offset.tolist(), file.length.tolist(), strict=True)
        return [file.pickle, *(read(*piece) for piece in pieces)]

    good = contents(whole)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        if stock:
            try:
                contents(bytes(damaged))
            except CorruptionError:
                continue
        else:
            with pytest.raises(CorruptionError):
                contents(bytes(damaged))
    for length in range(len(whole)):
        with pytest.raises(CorruptionError):
            contents(whole[:length])
    assert contents(whole) == good
