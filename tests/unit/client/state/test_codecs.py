"""Objects of classes that a user registered, and streams: in states, in files, in shards."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import portus
import portus.dcp
from portus.client.leaving.nested import write_file
from portus.client.loading.restore import check_where
from portus.client.shards import group_reader
from portus.client.state import codecs
from portus.client.state.state import unflatten
from portus.index.check import check
from tests.unit.client import kinds
from tests.unit.client.kinds import Replay
from tests.unit.client.same import assert_same, round_trip

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

NAME = "tests.Replay"


def replay(fill: float = 1.0) -> Replay:
    """With a tensor, another object and a stream in it."""
    stream = io.BytesIO(b"words" * 1000)
    stream.seek(3)
    return Replay(torch.full((5,), fill), {"inner": Replay([1, 2]), "stream": stream})


@pytest.fixture
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it: from then on no codec is known, until the test is over."""

    def forget() -> None:
        monkeypatch.setattr(codecs, "_by_kind", {})
        monkeypatch.setattr(codecs, "_by_name", {})

    return forget


# --- saving ---


class Slow:
    """An object that takes its time to become plain values."""

    TOOK_S = 0.05

    def encoded(self) -> dict[str, int]:
        end = time.perf_counter() + self.TOOK_S
        while time.perf_counter() < end:
            pass
        return {}


def test_the_total_of_a_save_counts_from_the_beginning_of_its_call(tmp_path: Path) -> None:
    portus.register_codec(Slow, Slow.encoded, lambda state: Slow(), name="tests.Slow")
    with portus.PoolCheckpointer(tmp_path / "run.portus") as run:
        handle = run.save({"object": Slow(), "x": torch.zeros(3)}, 1)
        handle.wait()
        assert handle.stats.total_s >= Slow.TOOK_S
        assert handle.stats.metrics()["portus/total_ms"] >= Slow.TOOK_S * 1e3


def test_an_object_is_saved_as_it_is_at_the_call_whatever_is_written_after(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scratch, rows = torch.zeros(1000), [1, 2]
    state = {"buffer": Replay(model.weight, {"scratch": scratch, "rows": rows})}
    before = model.weight.detach().clone()
    with portus.PoolCheckpointer(tmp_path / "run.portus") as run:
        optimizer.step()  # the fence learns which tensors are its
        handle = run.save(state, 1)
        scratch.add_(1)
        rows.append(3)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        handle.wait()
        loaded: Any = run.load()
    assert type(loaded["buffer"]) is Replay
    assert torch.equal(loaded["buffer"].rows, before)
    assert loaded["buffer"].note["rows"] == [1, 2]
    assert not loaded["buffer"].note["scratch"].any()
    assert check(tmp_path / "run.portus") == []


class Broken(Replay):
    """Its codec fails as it is told to."""


def broken(encode: Callable[[Any], object], decode: Any = Replay.decoded) -> str:
    name = f"tests.Broken{len(codecs._by_name)}"
    codecs._by_kind = {**codecs._by_kind, Broken: codecs.Codec(Broken, name, encode, decode)}
    codecs._by_name = {**codecs._by_name, name: codecs._by_kind[Broken]}
    return name


def fail(value: object) -> Any:
    raise OSError("no such thing")


def endless(value: object) -> object:
    return [Broken(1)]


@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (fail, r"a\.0\.b: encode of NAME raised OSError: no such thing"),
        (lambda value: None, r"a\.0\.b: encode of NAME gave None"),
        (lambda value: value, r"a\.0\.b: the state contains itself"),
        (lambda value: {"me": [value]}, r"a\.0\.b\.me\.0: the state contains itself"),
        (lambda value: {"x": object()}, r"a\.0\.b\.x: builtins\.object cannot be saved"),
        (endless, r"a\.0\.b\.0.*: nested deeper than 100"),
    ],
)
def test_what_cannot_be_encoded_is_refused_with_its_place(
    encode: Callable[[Any], object], message: str, nothing_registered: Callable[[], None],
    tmp_path: Path,
) -> None:  # fmt: skip
    nothing_registered()  # and put back
    name = broken(encode)
    with portus.PoolCheckpointer(tmp_path / "run.portus") as run:
        run.save({"a": 1}, 1).wait()
        with pytest.raises(portus.UsageError, match=message.replace("NAME", re.escape(name))):
            run.save({"a": [{"b": Broken(1)}]}, 2)
        assert run.load() == {"a": 1}


class Key(Replay):
    __hash__ = object.__hash__  # type: ignore[assignment]


def test_an_object_where_it_has_no_path_is_refused() -> None:
    portus.register_codec(Key, Key.encoded, Key.decoded)
    for odd in ({Key(1): 1}, {"a": {Key(1)}}, {"a": [slice(Key(1), None)]}):
        with pytest.raises(portus.UsageError, match="objects of registered classes cannot be"):
            round_trip(odd)


def test_a_closed_stream_is_refused() -> None:
    closed = io.BytesIO(b"a")
    closed.close()
    with pytest.raises(portus.UsageError, match=r"a: an io\.BytesIO that was closed"):
        round_trip({"a": closed})


# --- registering ---


def test_a_class_is_registered_once(nothing_registered: Callable[[], None]) -> None:
    nothing_registered()

    class Local(Replay):
        pass

    def again(name: str | None = "tests.Local", decode: Any = Local.decoded) -> None:
        portus.register_codec(Local, Local.encoded, decode, name=name)

    with pytest.raises(portus.UsageError, match="a class in a function; give it a name="):
        again(None)
    for name in ("", "a\nb", "x" * 1000):
        with pytest.raises(portus.UsageError, match="a name has 1 to"):
            again(name)
    again()
    again()
    for name, decode in (("tests.Other", Local.decoded), ("tests.Local", fail)):
        with pytest.raises(portus.UsageError, match=r"was registered as 'tests\.Local' before"):
            again(name, decode)
    with pytest.raises(portus.UsageError, match=r"was registered as 'tests\.Local' before"):
        portus.register_codec(Replay, Replay.encoded, Replay.decoded, name="tests.Local")
    for kind in (dict, torch.Tensor, int, io.BytesIO, set, torch.nn.Parameter):
        with pytest.raises(portus.UsageError, match="Portus stores these as they are"):
            portus.register_codec(kind, repr, eval, name="tests.Own")
    for odd in ("Replay", Replay(1)):
        with pytest.raises(portus.UsageError, match="expected a class"):
            portus.register_codec(odd, repr, eval)  # type: ignore[arg-type]


def test_the_name_is_that_of_the_class_unless_another_is_given(
    nothing_registered: Callable[[], None],
) -> None:
    nothing_registered()
    portus.register_codec(Broken, Broken.encoded, Broken.decoded)
    assert list(codecs._by_name) == [f"{__name__}.Broken"]


def test_it_holds_for_the_class_itself_alone(nothing_registered: Callable[[], None]) -> None:
    with pytest.raises(portus.UsageError, match=r"Broken cannot be saved; tests\.Replay is regist"):
        round_trip({"a": Broken(1)})
    nothing_registered()
    with pytest.raises(portus.UsageError, match=r"or register a codec: portus\.register_codec"):
        round_trip({"a": Broken(1)})


def test_a_registered_class_comes_before_the_families_that_are_stored_anyway(
    nothing_registered: Callable[[], None],
) -> None:
    nothing_registered()
    assert round_trip(kinds.Config(3)) == kinds.Config(3)
    portus.register_codec(kinds.Config, lambda c: [c.width], lambda s: kinds.Config(s[0] + 1))
    assert round_trip([kinds.Config(3)]) == [kinds.Config(4)]


def test_of_threads_that_register_at_once_one_gets_the_name(
    nothing_registered: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_registered()
    refused: list[str] = []

    def register() -> None:
        try:
            portus.register_codec(Replay, Replay.encoded, Replay.decoded, name="tests.Same")
        except portus.UsageError as error:
            refused.append(str(error))

    other = threading.Thread(target=register)

    class Asked(dict[str, Any]):
        """Another thread comes while one looks whether the name is free."""

        def get(self, name: str, default: Any = None) -> Any:
            found = super().get(name, default)
            other.start()
            other.join(0.05)  # it waits for its turn, so this runs out
            return found

    monkeypatch.setattr(codecs, "_by_name", Asked())
    portus.register_codec(Broken, Broken.encoded, Broken.decoded, name="tests.Same")
    other.join()
    assert codecs._by_kind.keys() == {Broken}
    assert len(refused) == 1


# --- loading ---


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A reference to a state with an object in it, of ``tmp_path / "run.portus"``."""
    with portus.PoolCheckpointer(tmp_path / "run.portus") as run:
        path = tmp_path / "1.ckpt"
        run.save({"n": {"buffer": replay()}, "w": torch.ones(2)}, 1, reference=path).wait()
    return path


def test_a_name_that_nobody_registered_is_said_with_its_place_and_what_to_call(
    saved: Path, nothing_registered: Callable[[], None]
) -> None:
    nothing_registered()
    message = (
        r"n\.buffer: an object of 'tests\.Replay', for which no codec is registered.*"
        r"portus\.register_codec\(CLASS, encode, decode, name='tests\.Replay'\)"
    )
    with portus.open(saved.parent / "run.portus") as pool:
        with pytest.raises(portus.UsageError, match=message):
            pool.load()
        assert pool.load(names="w") == {"w": pytest.approx(torch.ones(2))}
    with pytest.raises(portus.UsageError, match=message):
        torch.load(saved)


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (fail, "b: decode of NAME raised OSError: no such thing"),
        (lambda state: None, "b: decode of NAME gave a NoneType; return a Broken"),
    ],
)
def test_what_cannot_be_decoded_is_said_and_nothing_else_is_loaded(
    decode: Any, message: str, nothing_registered: Callable[[], None], tmp_path: Path
) -> None:
    nothing_registered()
    name = broken(Broken.encoded, decode)
    with portus.PoolCheckpointer(tmp_path / "run.portus") as run:
        run.save({"a": 1}, 1).wait()
        run.save({"b": Broken(1)}, 2).wait()
        with pytest.raises(portus.UsageError, match=message.replace("NAME", re.escape(name))):
            run.load()


def test_an_object_is_loaded_whole_or_not_at_all(saved: Path) -> None:
    with portus.open(saved.parent / "run.portus") as pool:
        found: Any = pool.load(names="n.buffer")
        assert_same(replay(), found["n"]["buffer"])
        with pytest.raises(portus.UsageError, match=r"n\.buffer: .* ask for n\.buffer"):
            pool.load(names="n.buffer.rows")


def test_an_object_is_replaced_when_a_version_is_restored_into_a_state(saved: Path) -> None:
    weight, old = torch.zeros(2), replay(7)
    rows = old.rows
    state: dict[str, Any] = {"n": {"buffer": old}, "w": weight}
    with portus.open(saved.parent / "run.portus") as pool:
        pool.restore_into(state)
        assert_same(replay(), state["n"]["buffer"])
        assert state["w"] is weight
        assert torch.equal(weight, torch.ones(2))
        assert torch.equal(rows, torch.full((5,), 7.0))
        # Another shape, or none: it is not copied over.
        state["n"]["buffer"] = Replay(0)
        pool.restore_into(state)
        assert_same(replay(), state["n"]["buffer"])
        state["n"]["buffer"] = Replay(0)
        pool.restore_into(state, names="w")
        assert state["n"]["buffer"] == Replay(0)
        odds: list[dict[str, Any]] = [{"n": {"buffer": {"rows": torch.zeros(5)}}}, {"n": {}}]
        for odd in odds:
            with pytest.raises(portus.UsageError, match=r"unexpected.*n\.buffer\.rows"):
                pool.restore_into({**odd, "w": weight})
        kept = {"n": {"more": Replay(torch.zeros(1))}, "w": weight}
        with pytest.raises(portus.UsageError, match=r"missing in the version: n\.more\.rows"):
            pool.restore_into(kept)
        found = pool.restore_into(kept, strict=False)
        assert kept["n"].keys() == {"more"}
        assert found.missing == ("n.more.rows",)


def test_a_registered_dataclass_is_replaced_and_not_merged(
    nothing_registered: Callable[[], None], tmp_path: Path
) -> None:
    nothing_registered()
    portus.register_codec(kinds.Config, lambda c: [c.width], lambda s: kinds.Config(s[0]))
    state = {"config": kinds.Config(1)}
    with portus.PoolCheckpointer(tmp_path / "run.portus") as run:
        run.save(state, 1).wait()
        old = state["config"] = kinds.Config(2, extra={"mine": 1})
        run.restore_into(state)
    assert state["config"] == kinds.Config(1)
    assert old == kinds.Config(2, extra={"mine": 1})


def test_an_object_where_the_version_has_none_does_not_fit(tmp_path: Path) -> None:
    with portus.PoolCheckpointer(tmp_path / "run.portus") as run:
        run.save({"buffer": {"rows": torch.ones(2), "note": None}}, 1).wait()
        rows = torch.zeros(2)
        with pytest.raises(portus.UsageError, match=r"missing.*buffer\.rows; unexpected"):
            run.restore_into({"buffer": Replay(rows)})
    assert not rows.any()


def test_a_crafted_tree_makes_no_object_where_none_is_saved() -> None:
    for tree in (b'{"$set":[{"$object":[1,"tests.Replay"]}]}', b'[{"$object":[1]}]'):
        with pytest.raises(portus.CorruptionError):
            unflatten(tree, (), ())
    for tree in (b'[{"$bytes_io":["",-1]}]', b'{"$bytes_io":[""]}', b'[{"$bytes_io":["",1.5]}]'):
        with pytest.raises(portus.CorruptionError, match=r"not a (position in a )?stream"):
            unflatten(tree, (), ())


# --- files of torch ---


def test_a_reference_leads_to_the_object(saved: Path) -> None:
    assert_same(replay(), torch.load(saved)["n"]["buffer"])
    assert_same(replay(), portus.load_reference(saved)["n"]["buffer"])  # type: ignore[index]
    outline = torch.load(saved, map_location="meta", weights_only=False)
    assert outline["n"]["buffer"][codecs.MARK] == NAME


def test_a_torch_file_has_stand_ins_that_load_anywhere(
    saved: Path, nothing_registered: Callable[[], None]
) -> None:
    with portus.open(saved.parent / "run.portus") as pool:
        stock: Any = pool.load()
    portus.materialize(saved)
    found = torch.load(saved, weights_only=False)
    stand_in = found["n"]["buffer"]
    assert type(stand_in) is dict
    assert stand_in.keys() == {"__portus_codec__", "state"}
    assert torch.equal(stand_in["state"]["rows"], torch.ones(5))
    assert_same(stock, portus.decode_stand_ins(found))
    nothing_registered()
    found = torch.load(saved, weights_only=False)
    with pytest.raises(portus.UsageError, match=r"n\.buffer(\.note\.inner)?: an object of 'tests"):
        portus.decode_stand_ins(found)


def test_stand_ins_are_read_with_weights_only(tmp_path: Path) -> None:
    state = {"buffer": Replay(torch.ones(3), [Replay(2)]), "tuple": (Replay(3),)}
    with portus.PoolCheckpointer(tmp_path / "run.portus") as run:
        run.save(state, 1, reference=tmp_path / "pool.ckpt").wait()
    portus.materialize(tmp_path / "pool.ckpt")
    write_file(state, tmp_path / "written.ckpt")  # as in a signal handler
    for name in ("pool.ckpt", "written.ckpt"):
        found = torch.load(tmp_path / name, weights_only=True)
        assert_same(state, portus.decode_stand_ins(found))


def test_what_contains_itself_is_walked_once() -> None:
    one: list[Any] = [codecs.stand_in(NAME, {"rows": 1, "note": None})]
    one += [one[0], one]
    found = portus.decode_stand_ins({"a": one, "b": {codecs.MARK: 3, codecs.STATE: 4}})
    assert found["a"] is one
    assert one[0] == Replay(1)
    assert one[1] is one[0]
    assert one[2] is one
    assert found["b"] == {codecs.MARK: 3, codecs.STATE: 4}


# --- shards ---


def sharded(fill: float) -> dict[str, Any]:
    return {
        "w": torch.full((4,), fill),
        "buffer": replay(fill),
        "more": [{"stream": io.BytesIO(b"%d" % fill)}, (Replay(fill),)],
    }


def test_shards_hold_objects_and_streams(
    host_pool: str, tmp_path: Path, nothing_registered: Callable[[], None]
) -> None:
    writer = portus.dcp.GroupWriter(host_pool)
    for step in (1, 2):  # the second one is planned by a look
        writer.save(sharded(step), step=step)
    writer.save_directory(sharded(3), tmp_path / "ckpt", step=3)
    writer.close()
    reader = portus.dcp.GroupReader(host_pool)
    state = sharded(0)
    portus.dcp.load(state, reader)
    assert_same(sharded(3), state)
    assert not group_reader._handed
    portus.materialize(tmp_path / "ckpt")
    state = sharded(0)
    dcp.load(state, checkpoint_id=tmp_path / "ckpt")
    assert state["buffer"][codecs.MARK] == NAME
    assert state["more"][0]["stream"].getvalue() == b"3"
    assert_same(sharded(3), portus.decode_stand_ins(state))
    nothing_registered()
    state = {"w": torch.zeros(4), "buffer": None}
    for load in (portus.dcp.load, lambda state, reader: dcp.load(state, storage_reader=reader)):
        with pytest.raises((portus.UsageError, CheckpointException), match=r"buffer.*'tests\.Repl"):
            load(state, portus.dcp.GroupReader(host_pool))
        assert not state["w"].any()
    with portus.open(host_pool) as pool:
        file, entry = next(pool.entries())
        with pytest.raises(portus.UsageError, match=r"'tests\.Replay', for which no codec"):
            check_where(file.reader, entry, lambda path: True)  # when a load is planned
    state = {"w": torch.zeros(4)}
    portus.dcp.load(state, reader)
    assert state["w"].all()


def test_an_object_that_cannot_be_encoded_is_told_by_the_sharded_save(
    host_pool: str, nothing_registered: Callable[[], None]
) -> None:
    nothing_registered()
    broken(fail)
    writer = portus.dcp.GroupWriter(host_pool)
    writer.save({"a": 1}, step=1)
    with pytest.raises((portus.UsageError, CheckpointException), match="raised OSError"):
        writer.save({"a": Broken(1)}, step=2)
    writer.close()
    state = {"a": 0}
    assert portus.dcp.load(state, portus.dcp.GroupReader(host_pool)).step == 1
