from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import datetime
import enum
import functools
import gc
import io
import math
import pathlib
import random
import struct
import subprocess
import sys
import textwrap
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from portus.client.state import classes
from portus.client.state.state import Flattener, flatten, unflatten
from portus.client.state.tensors import DTYPES
from portus.client.state.tree import DEPTH_MAX
from portus.client.state.tree_writer import INLINE_MAX
from portus.errors import CorruptionError, UsageError
from portus.spec import TensorKind
from tests.unit.client import kinds
from tests.unit.client.same import assert_same, copies, key_paths, raw_bytes, round_trip


def stream(data: bytes, position: int = 0, **attributes: object) -> io.BytesIO:
    made = io.BytesIO(data)
    made.seek(position)
    vars(made).update(attributes)
    return made


def nan_with(bits: int) -> float:
    value: float = struct.unpack(">d", struct.pack(">Q", bits))[0]
    return value


SINGLE_VALUES: dict[str, object] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1],
    "big ints": [2**64, -(2**63) - 1, 3**500, -(3**500)],
    "huge int": 7**6000,
    "floats": [0.1, 1e22, 1e16, 5e-324, 1.7976931348623157e308, 1.0, 2.0**53],
    "zeros": [0.0, -0.0, 0],
    "infinities": [math.inf, -math.inf],
    "nan": math.nan,
    "nan with payload": nan_with(0x7FF8_0000_DEAD_BEEF),
    "negative nan": nan_with(0xFFF8_0000_0000_0000),
    "text": ["", "a.b", "ünïcode", "\0", "😀", "$tensor", "\u2028"],
    "surrogates": ["\ud800", "a\udcffb"],
    "complex": [1 + 2j, complex(-0.0, math.nan), complex(math.inf, 0)],
    "bytes": [b"", b"\0\xff", bytearray(b"ab")],
    "streams": [io.BytesIO(), stream(b"abc", 2), stream(b"a", 9, name="x"), stream(b"b" * 5000, 1)],
    "objects": [kinds.Replay(torch.ones(2), [1, "a"]), kinds.Replay({1: kinds.Replay((), b"x")})],
    "sets": [set(), {1, "a", 2.5, None}, frozenset({(1, 2), frozenset({3})}), {True, 2}],
    "ranges": [range(5), range(10, -4, -3), range(2**70)],
    "slices": [slice(None), slice(1, -1, 2), slice((1, 2), "a", None)],
    "sizes": [torch.Size([]), torch.Size([2, 0, 3])],
    "dtypes": [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.qint8, torch.bool],
    "devices": [torch.device("cpu"), torch.device("cuda:3"), torch.device("meta")],
    "layouts": [torch.strided, torch.sparse_coo, torch.channels_last, torch.preserve_format],
    "paths": [pathlib.Path("/tmp/a b"), pathlib.Path(), pathlib.Path("r\udcff")],
    "pure paths": [pathlib.PureWindowsPath("C:/x"), pathlib.PurePosixPath("a/../b")],
    "timedeltas": [datetime.timedelta(), datetime.timedelta(-1, 5, 7), datetime.timedelta.max],
    "dates": [datetime.date(1, 1, 1), datetime.date.max],
    "datetimes": [
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
        datetime.datetime(2024, 10, 27, 2, 30, fold=1),
        datetime.datetime(1999, 1, 1, tzinfo=datetime.timezone.utc),
        datetime.datetime(
            1999, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3, seconds=1), "here")
        ),
    ],
    "times": [datetime.time(23, 59, fold=1), datetime.time(1, tzinfo=datetime.timezone.utc)],
    "zones": [datetime.timezone.utc, datetime.timezone(datetime.timedelta(minutes=90))],
    "enums": [kinds.Color.RED, kinds.Color.GREEN, kinds.Level.HIGH, kinds.Mode.MIN],
    "flags": [kinds.Rights.READ, kinds.Rights.READ | kinds.Rights.RUN, kinds.Rights(0)],
    "classes": [nn.ReLU, int, kinds.Config, kinds.Outer.Block, np.float32, torch.optim.AdamW],
    "more classes": [collections.OrderedDict, pathlib.Path, datetime.datetime, dict, kinds.Color],
    "functions": [torch.relu, nn.functional.gelu, nn.functional.relu, nn.init.zeros_, math.cos],
    "more functions": [kinds.schedule, kinds.Outer.anneal, np.mean, np.tanh, torch.nn.init.ones_],
    "partials": [functools.partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95))],
    "dicts": [
        {},
        {"a": {}},
        {"$tensor": 3},
        {"$x": 1, "y": 2},
        {"y": 1, "$x": 2},
        {"": 0},
        {"\ud800": 1},
    ],
    "int keys": {1: "a", 0: "b", -5: "c", 2**70: "d"},
    "mixed keys": {1: "int", "1": "text", 2.5: "float", None: 0, (1, "a"): 1, True + 1: 2},
    "a true key": {True: 1, "True": 2, "1": 3},
    "a float key": {1.0: 1, "1.0": 2},
    "strange keys": {b"x": 1, frozenset({1}): 2, kinds.Color.RED: 3, torch.float32: 4, (): 5},
    "keys like text": [{kinds.Mode.MIN: 1}, {np.str_("a"): 1}],
    "order": {"b": 1, "a": 2, "c": 3},
    "tuples": [(), (1,), ((), [()]), (1, (2.5, "a", None))],
    "namedtuples": [kinds.Point(1, [2]), kinds.Batch(torch.ones(2), "x")],
    "dataclasses": [kinds.Config(3, torch.zeros(2), {"a": 1}), kinds.Slotted(1, "a")],
    "namespaces": [argparse.Namespace(a=1, b=[2]), types.SimpleNamespace(x=None)],
    "deques": [deque([1, [2]], 5), deque(), deque(["a"])],
    "counters": collections.Counter("hello"),
    "defaultdicts": [defaultdict(list, {"a": [1]}), defaultdict(None, {1: 2}), defaultdict(dict)],
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "mappings": [kinds.Attributes(a=1, b={"c": 2}), kinds.Ordered(z=1, a=2)],
    "rng": [random.Random(1).getstate(), random.Random(2).getstate()],
    "numpy rng": np.random.RandomState(3).get_state(),
    "numpy generator": np.random.default_rng(4).bit_generator.state,
    "torch rng": torch.Generator().manual_seed(5).get_state(),
    "numpy dtypes": [np.dtype("float32"), np.dtype("<M8[ns]"), np.dtype([("a", "<i4", (2,))])],
}


@pytest.mark.parametrize("value", SINGLE_VALUES.values(), ids=SINGLE_VALUES.keys())
def test_values_come_back_equal_in_value_and_type(value: object) -> None:
    kinds.RAN.clear()
    assert_same(value, round_trip(value))
    assert_same({"x": [value]}, round_trip({"x": [value]}))
    assert not kinds.RAN


ARRAYS: dict[str, Any] = {
    **{
        letter: np.arange(6).reshape(2, 3).astype(letter)
        for letter in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g")
    },
    "c8": np.array([1 + 2j, complex(math.nan, -0.0)], "c8"),
    "c16": np.array([[1j]], "c16"),
    "text": np.array(["a", "", "ünïc"]),
    "bytes": np.array([b"abc", b""]),
    "void": np.array([b"ab"], "V5"),
    "dates": np.array(["2024-01-01", "NaT"], "M8[ns]"),
    "spans": np.array([1, 2], "m8[25s]"),
    "big-endian": np.arange(3, dtype=">i4"),
    "nan": np.array([math.nan, nan_with(0x7FF8_0000_0000_1234), -0.0]),
    "records": np.array([(1, [2.0, 3.0], b"x")], [("a", "i4"), ("b", "f8", (2,)), ("c", "S3")]),
    "nested records": np.zeros(2, [("o", [("i", "<i2"), ("u", "<U4")])]),
    "aligned": np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(20).reshape(4, 5)[::2, 1::3],
    "backwards": np.arange(5)[::-1],
    "0-dim": np.array(3.5),
    "empty": np.zeros((0, 4), np.int16),
    "big": np.arange(INLINE_MAX, dtype=np.float64),
    "big fortran": np.asfortranarray(np.arange(INLINE_MAX * 2.0).reshape(2, -1)),
    "big strided": np.arange(INLINE_MAX * 4)[::3],
    "just inline": np.zeros(INLINE_MAX, np.uint8),
    "just not": np.zeros(INLINE_MAX + 1, np.uint8),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays_come_back_bit_for_bit(array: np.ndarray[Any, Any]) -> None:
    assert_same(array, round_trip({"x": array})["x"])


@pytest.mark.parametrize(
    "scalar",
    [
        *(kind(3) for kind in (np.int8, np.uint64, np.float16, np.float32, np.float64, np.bool_)),
        *(np.longdouble("0.1"), np.complex64(1 - 2j), np.float64("nan"), np.float32("-0.0")),
        *(np.str_("a\0"), np.str_(""), np.bytes_(b"a\0"), np.datetime64("2024-01-01", "us")),
        *(np.timedelta64(5, "h"), np.datetime64("NaT"), np.void(b"abc")),
        np.zeros(1, [("a", "i4")])[0],
    ],
    ids=repr,
)
def test_numpy_scalars_come_back(scalar: np.generic) -> None:
    assert_same(scalar, round_trip([scalar])[0])


def test_big_arrays_and_bytes_get_storages_of_their_own() -> None:
    big = np.arange(INLINE_MAX, dtype=np.float64)
    state = {"w": torch.ones(3), "a": big, "b": bytes(INLINE_MAX + 1), "c": b"small"}
    flat = flatten(state)
    assert flat.owned == {1, 2}
    assert [spec.name for spec in flat.tensors] == ["w", "a", "b"]
    big[:] = 0  # the copy is ours
    back: Any = unflatten(flat.tree, flat.tensors, copies(flat))
    assert back["a"][5] == 5
    assert back["b"] == state["b"]


def test_random_generators_go_on_where_they_were() -> None:
    generator, legacy, own = np.random.default_rng(1), np.random.RandomState(2), random.Random(3)
    generator.random(3), legacy.random(3), own.random()
    states = [generator.bit_generator.state, legacy.get_state(), own.getstate()]
    back = round_trip(states)
    expected = (generator.random(), legacy.random(), own.random())
    generator.bit_generator.state = back[0]
    legacy.set_state(back[1])
    own.setstate(back[2])
    assert (generator.random(), legacy.random(), own.random()) == expected


# --- tensors ---


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    data = torch.tensor([index % 2 for index in range(size)], dtype=torch.uint8)
    strides = torch.empty(shape, device="meta").stride()
    tensor: torch.Tensor = torch.empty(0, dtype=dtype)
    tensor.set_(data.untyped_storage(), 0, shape, strides)
    return tensor


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_comes_back(name: str) -> None:
    tensor = filled(DTYPES[name], 3, 2)
    assert_same([tensor, tensor[1:], tensor.t()], round_trip([tensor, tensor[1:], tensor.t()]))


def test_no_dtype_of_torch_is_forgotten() -> None:
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    left_out = every - set(DTYPES.values())
    assert {str(dtype).removeprefix("torch.")[:2] for dtype in left_out} <= {"qi", "qu"}
    assert len(DTYPES) > 20


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(48.0).reshape(2, 2, 3, 4)
    complex_one = torch.randn(3, dtype=torch.complex64)
    return {
        "0-dim": torch.tensor(1.5),
        "0-size": torch.empty(0, 3),
        "0-size with offset": torch.empty(3, 0)[2:],
        "0-size of much": torch.ones(10)[10:],
        "offset": base[1, :, 1],
        "transposed": base.permute(3, 1, 0, 2),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "expanded": torch.ones(1, 3).expand(1000, 3),
        "strided": base.flatten()[3:40:7],
        "overlapping": base.flatten().as_strided((4, 4), (1, 1), 2),
        "conjugate": complex_one.conj(),
        "negative": complex_one.conj().imag,
        "both": torch._neg_view(complex_one.conj()),
        "real part": complex_one.real,
        "needs grad": torch.ones(2, requires_grad=True),
        "not a leaf": torch.ones(2, requires_grad=True).exp(),
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "int parameter": nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False),
        "buffer": nn.Buffer(torch.ones(2)),
        "meta": torch.empty(3, 4, device="meta"),
        "meta view": torch.empty(5, 4, dtype=torch.float16, device="meta")[1:, ::2],
        "meta parameter": nn.Parameter(torch.empty(3, device="meta")),
        "nan bits": torch.tensor([0x7FC0_1234], dtype=torch.int32).view(torch.float32),
    }


@pytest.mark.parametrize("name", views())
def test_views_come_back_with_their_whole_storage(name: str) -> None:
    tensor = views()[name]
    assert_same(tensor, round_trip({"x": tensor})["x"])


def test_a_nan_in_a_tensor_keeps_its_bits() -> None:
    back = round_trip(views()["nan bits"])
    assert back.view(torch.int32).item() == 0x7FC0_1234


def test_ties_stay_tied() -> None:
    base = torch.arange(10.0)
    back = round_trip({"a": base[:5], "b": [base[3:]], "c": torch.zeros(1)})
    back["a"][3] = 99
    assert back["b"][0][0] == 99
    assert len(flatten({"a": base[:5], "b": [base[3:]]}).storages) == 1


def test_one_tensor_in_two_places_stays_one() -> None:
    weight = nn.Parameter(torch.ones(2))
    back = round_trip({"a": weight, "b": [weight], "c": weight.data})
    assert back["a"] is back["b"][0]
    assert back["c"] is not back["a"]
    assert back["c"].data_ptr() == back["a"].data_ptr()


def test_specs_say_how_a_tensor_looks() -> None:
    flat = flatten({"m": {"w": nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16).t())}})
    [spec] = flat.tensors
    assert (spec.name, spec.dtype, spec.shape, spec.strides) == ("m.w", "bfloat16", (3, 2), (1, 3))
    assert (spec.storage, spec.offset, spec.kind) == (0, 0, TensorKind.PARAMETER)
    assert (spec.requires_grad, spec.device) == (True, "cpu")
    assert type(spec.shape) is tuple
    assert flatten(torch.empty(1, device="meta")).tensors[0].storage == -1


def test_nothing_of_a_tensor_is_copied() -> None:
    tensor = torch.ones(5)
    flat = flatten({"x": tensor[2:]})
    assert flat.storages[0].data_ptr() == tensor.data_ptr()
    back: Any = unflatten(flat.tree, flat.tensors, flat.storages)
    assert back["x"].data_ptr() == tensor[2:].data_ptr()


def test_metadata_of_a_state_dict_comes_back() -> None:
    state = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)).state_dict()
    back = round_trip(state)
    assert_same(state, back)
    assert back._metadata["0"] == {"version": 2}


def test_a_warm_flattener_gives_the_same_specs_again() -> None:
    flattener = Flattener()
    model = nn.Linear(3, 3)
    first = flattener.flatten(model.state_dict())
    with torch.no_grad():
        model.weight += 1
    second = flattener.flatten(model.state_dict())
    assert second.tensors is first.tensors
    assert [s.data_ptr() for s in first.storages] == [s.data_ptr() for s in second.storages]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {"b": s["a"]},
        lambda s: {"a": s["a"].t()},
        lambda s: {"a": s["a"].double()},
        lambda s: {"a": s["a"].view(4, 1)},
        lambda s: {"a": nn.Parameter(s["a"])},
        lambda s: {"a": nn.Buffer(s["a"])},
        lambda s: {"a": s["a"].clone().requires_grad_()},
        lambda s: {"a": torch._neg_view(s["a"])},
        lambda s: {"a": s["a"].to("meta")},
        lambda s: {"a": s["a"], "c": s["a"][1:]},
        lambda s: {"a": torch.zeros(8)[4:].view(2, 2)},
        lambda s: {"a": [s["a"]]},
    ],
)
def test_a_warm_flattener_sees_every_change(
    change: Callable[[dict[str, torch.Tensor]], object],
) -> None:
    state = {"a": torch.ones(2, 2)}
    flattener = Flattener()
    flattener.flatten(state)
    changed = change(state)
    warm, cold = flattener.flatten(changed), flatten(changed)
    assert (warm.tree, warm.tensors) == (cold.tree, cold.tensors)
    assert warm.tensors != flatten(state).tensors


def test_a_flattener_keeps_no_tensor_alive() -> None:
    flattener = Flattener()
    storage = torch.ones(3).untyped_storage()
    before = sys.getrefcount(storage)
    flattener.flatten({"a": torch.empty(0).set_(storage)})
    gc.collect()
    assert sys.getrefcount(storage) <= before


def test_a_load_in_inference_mode_gives_tensors_that_can_be_trained() -> None:
    flat = flatten({"x": nn.Parameter(torch.ones(2)), "y": torch.ones(2)})
    with torch.inference_mode():
        back: Any = unflatten(flat.tree, flat.tensors, copies(flat))
    assert not back["y"].is_inference()
    (back["x"] * back["y"]).sum().backward()


@pytest.mark.parametrize("state", [{"a": 1}, {"a": object()}])
def test_garbage_collection_is_left_as_it_was(state: object) -> None:
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        try:
            flatten(state)
        except UsageError:
            pass
        try:
            assert gc.isenabled() is on
        finally:
            gc.enable()


# --- key paths ---


def test_key_paths_name_every_leaf() -> None:
    state = {
        "model": {"layer.weight": torch.ones(1), "empty": {}},
        "optimizer": [{"state": {0: {"step": 1}}, "params": [0, 1]}],
        "mix": (torch.ones(1), [1, 2], {(0, "a"): None, True: 1, None: 2, 0.5: 3}),
        "config": kinds.Config(3),
    }
    expected = [
        *("model.layer.weight", "model.empty", "optimizer.0.state.0.step", "optimizer.0.params"),
        *("mix.0", "mix.1", "mix.2.(0, a)", "mix.2.True", "mix.2.None", "mix.2.0.5"),
        *("config.width", "config.weight", "config.extra"),
    ]
    assert key_paths(flatten(state).tree) == expected
    assert key_paths(flatten(5).tree) == [""]


def test_a_row_of_plain_values_is_one_leaf_whatever_they_are() -> None:
    row = [1, 2**70, math.nan, -0.0, "a", "\ud800", True, None]
    flat = flatten({"x": row, "y": tuple(row), "z": [row, 1]})
    assert key_paths(flat.tree) == ["x", "y", "z.0", "z.1"]


def test_equal_sets_give_equal_trees() -> None:
    one, other = {0, 8}, {8, 0}
    assert [*one] != [*other]
    assert flatten([one]).tree == flatten([other]).tree


def test_key_paths_are_distinct_and_name_the_tensors() -> None:
    one = torch.ones(1)
    state = {
        "a": {"b": one, "b#2": 0},
        "a.b": one.clone(),
        "x": {1: one, "1": 2, 3: bytes(5000)},
        "x.1": one,
        "x.3": torch.zeros(1),
    }
    flat = flatten(state)
    paths = ["a.b", "a.b#2", "a.b#3", "x.1", "x.1#2", "x.3", "x.1#3", "x.3#2"]
    assert key_paths(flat.tree) == paths
    assert [spec.name for spec in flat.tensors] == ["a.b", "a.b#3", "x.1", "x.3", "x.1#3", "x.3#2"]
    assert_same(state, unflatten(flat.tree, flat.tensors, copies(flat)))
    only: Any = unflatten(flat.tree, flat.tensors, copies(flat), lambda path: path == "x.1#3")
    assert_same({"x.1": one}, only)


# --- partial loads ---


def kept(state: object, *paths: str) -> Any:
    flat = flatten(state)
    used = {spec.storage for spec in flat.tensors if spec.name in paths}
    storages = [s if i in used else None for i, s in enumerate(copies(flat))]
    return unflatten(flat.tree, flat.tensors, storages, lambda path: path in paths)


def test_what_is_not_kept_disappears_from_dicts_and_is_none_in_lists() -> None:
    state = {
        "a": {"x": torch.ones(1), "y": 2},
        "b": [torch.ones(1), {"z": torch.zeros(2)}, 3],
        "c": (torch.ones(3), torch.ones(4)),
        "d": kinds.Config(3, torch.ones(2)),
        "e": kinds.Point(torch.ones(1), 5),
        "f": OrderedDict(u=torch.ones(1), v=1),
        "g": argparse.Namespace(p=1, q=torch.ones(1)),
        "h": {1: {2: torch.ones(1)}, 3: 4},
    }
    assert kept(state) == {}
    assert kept(state, "a.y") == {"a": {"y": 2}}
    assert kept(state, "b.1.z")["b"][1]["z"].shape == (2,)
    assert kept(state, "b.2") == {"b": [None, None, 3]}
    assert kept(state, "c.0")["c"][1] is None
    assert kept(state, "d.width") == {"d": kinds.Config(3, None, None)}  # type: ignore[arg-type]
    assert kept(state, "e.y") == {"e": kinds.Point(None, 5)}
    assert_same(kept(state, "f.v"), {"f": OrderedDict(v=1)})
    assert kept(state, "g.p") == {"g": argparse.Namespace(p=1)}
    assert kept(state, "h.3") == {"h": {3: 4}}
    for other in ([1, [2]], (1, [2]), 5, torch.ones(1), math.nan):
        assert kept(other) is None
    for empty in ({1: 2}, OrderedDict(a=1), {"$a": 1}):
        assert kept(empty) == {}


def test_a_tensor_is_kept_under_any_of_its_paths() -> None:
    one = torch.ones(1)
    assert kept({"a": one, "b": one}, "b")["b"] == 1


def test_a_kept_tensor_without_its_storage_is_the_callers_mistake() -> None:
    flat = flatten({"a": torch.ones(1)})
    with pytest.raises(UsageError, match=r"^a: storage 0 was not loaded"):
        unflatten(flat.tree, flat.tensors, [None])


def test_a_class_that_is_not_needed_need_not_be_there() -> None:
    flat = flatten({"a": kinds.Color.RED, "b": kinds.Config(1), "c": 5})
    tree = flat.tree.replace(b"tests.unit.client.kinds", b"tests.unit.client.other")
    assert unflatten(tree, (), (), lambda path: path == "c") == {"c": 5}


# --- what cannot be saved ---


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def cyclic() -> object:
    state: dict[str, object] = {"a": [1]}
    state["b"] = [{"c": state}]
    return state


def deep(levels: int) -> object:
    state: object = 1
    for _ in range(levels):
        state = [state]
    return state


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def local_dataclass() -> object:
    @dataclasses.dataclass
    class Local:
        x: int

    return Local(1)


def local_enum() -> object:
    class Local(enum.Enum):
        A = 1

    return Local.A


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "sparse coo": (sparse, "to_dense"),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), "to_dense"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "int_repr",
    ),
    "nested": (nested, "values"),
    "old nested": (lambda: torch.nested.nested_tensor([torch.ones(2)]), "unbind"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), "to_dense"),
    "uninitialized": (lambda: nn.LazyLinear(3).weight, "run the module once"),
    "subclass": (lambda: torch.ones(2).as_subclass(kinds.CustomTensor), "plain tensors"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(2)), "compile"),
    "freed": (freed, "freed"),
    "module": (lambda: nn.Linear(1, 1), "state_dict"),
    "optimizer": (lambda: torch.optim.SGD([torch.ones(1)]), "state_dict"),
    "storage": (lambda: torch.ones(1).untyped_storage(), "a tensor over it"),
    "torch generator": (torch.Generator, "get_state"),
    "numpy generator": (np.random.default_rng, "bit_generator.state"),
    "python generator": (random.Random, "getstate"),
    "generator": (lambda: (x for x in [1]), "leave it out"),
    "file": (lambda: sys.__stderr__, "path of the file"),
    "lock": (threading.Lock, "leave it out"),
    "lambda": (lambda: lambda x: x, "import name"),
    "object": (object, "leave it out"),
    "module object": (lambda: math, "leave it out"),
    "objects in an array": (lambda: np.array([object()]), "objects"),
    "objects in a record": (lambda: np.zeros(1, [("a", "O")]), "objects"),
    "numpy matrix": (lambda: np.ma.masked_array([1, 2]), "numpy.asarray"),
    "dtype with metadata": (lambda: np.zeros(1, np.dtype("i4", metadata={"a": 1})), "plain"),
    "record dtype": (lambda: np.zeros(1, np.dtype((np.record, [("a", "i4")]))), "plain"),
    "titled dtype": (lambda: np.zeros(1, [(("title", "a"), "i4")]), "plain"),
    "subarray dtype": (lambda: np.dtype((np.int32, (2,))), "plain"),
    "local dataclass": (local_dataclass, "top level"),
    "local enum": (local_enum, "top level"),
    "a class with __del__": (lambda: kinds.Dangerous("x"), "__del__"),
    "function of the system": (lambda: subprocess.check_output, "standard library"),
    "class of the system": (lambda: subprocess.Popen, "standard library"),
    "partial": (lambda: functools.partial(print, "x"), "torch.optim"),
    "factory": (lambda: defaultdict(lambda: 1), "dict"),
    "zone": (lambda: datetime.datetime(2024, 1, 1, tzinfo=_Zone()), "utc"),
    "tensor in a set": (lambda: {torch.ones(1)}, "into a dict"),
    "tensor in a key": (lambda: {(1, torch.ones(1)): 1}, "into a dict"),
    "torch.max": (lambda: torch.ones(2, 2).max(0), "tuple(value)"),
    "subclass of list": (lambda: type("Mine", (list,), {})(), "list(value)"),
    "memoryview": (lambda: memoryview(b"a"), "tobytes"),
    "subclass of int": (lambda: type("Mine", (int,), {})(3), "leave it out"),
    "cycle": (cyclic, "contains itself"),
    "too deep": (lambda: deep(150), "nested deeper"),
}


class _Zone(datetime.tzinfo):
    def utcoffset(self, when: datetime.datetime | None) -> None:
        return None

    dst = utcoffset

    def tzname(self, when: datetime.datetime | None) -> None:
        return None


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*prototype.*", "ignore:.*beta state.*")
@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:.*quantiz.*", "ignore:.*metadata.*")
def test_what_cannot_be_saved_is_named_with_what_to_do(name: str) -> None:
    make, hint = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        flatten({"fine": torch.ones(1), "here": [{"it": make()}]})
    assert str(caught.value).startswith("here.0.it"), caught.value
    assert hint in str(caught.value)
    with pytest.raises(UsageError):
        flatten(make())


def test_a_tensor_inside_a_transform_is_refused() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UsageError, match=r"^here: .*torch\.func"):
            flatten({"here": x})
        return x.sum()

    torch.func.grad(inner)(torch.ones(3))
    torch.func.vmap(inner)(torch.ones(3, 2))


def test_the_deepest_state_that_is_saved_also_loads() -> None:
    makes: list[Callable[[Any], object]] = [
        lambda x: {(1, "a"): x},
        lambda x: OrderedDict({1: x}),
        lambda x: defaultdict(list, {1: x}),
        kinds.Config,
        lambda x: (x,),
    ]
    for make in makes:
        state: object = make(torch.ones(1))
        for _ in range(DEPTH_MAX - 2):  # the key of the first is one more
            state = make(state)
        assert_same(state, round_trip(state))
        state = make(make(state))
        with pytest.raises(UsageError, match="nested deeper"):
            flatten(state)


# --- safety ---


def resaved(state: object, change: Callable[[str], str]) -> Any:
    flat = flatten(state)
    tree = change(flat.tree.decode())
    assert tree.encode() != flat.tree
    return unflatten(tree.encode(), flat.tensors, copies(flat))


def test_nothing_is_imported_because_a_tree_says_so(tmp_path: pathlib.Path) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    sys.path.insert(0, str(tmp_path))
    try:
        for state in (kinds.Color.RED, kinds.Config(1), kinds.Point(1, 2), kinds.schedule):
            with pytest.raises(UsageError, match=r"^x: trap\.\w+ is needed.*import it"):
                resaved({"x": state}, lambda text: text.replace("tests.unit.client.kinds", "trap"))
    finally:
        sys.path.remove(str(tmp_path))
    assert "trap" not in sys.modules


def test_lazy_modules_are_not_woken() -> None:
    lazy = types.ModuleType("lazy_module")
    lazy.__getattr__ = lambda name: pytest.fail("woken")  # type: ignore[method-assign]
    sys.modules["lazy_module"] = lazy
    try:
        with pytest.raises(UsageError):
            classes.find(classes.Name("lazy_module", "Thing"))
    finally:
        del sys.modules["lazy_module"]


@pytest.mark.parametrize(
    ("module", "qualname"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("subprocess", "Popen"),
        ("builtins", "eval"),
        ("builtins", "exec"),
        ("builtins", "__import__"),
        ("importlib", "import_module"),
        ("torch", "os.system"),
        ("torch.serialization", "os.system"),
        ("pathlib", "os.system"),
        ("torch", "sys"),
        ("torch", "__version__"),
        ("torch", "float32"),
        ("torch", "_C"),
        ("collections", "abc"),
        ("pathlib", "Path.unlink"),
        ("torch", ""),
        ("", ""),
        ("torch", "."),
        ("torch", "nn.ReLU"),
    ],
)
def test_no_name_leads_out_of_what_may_be_called(module: str, qualname: str) -> None:
    tree = msgspec.json.encode({"$name": [module, qualname]})
    with pytest.raises((UsageError, CorruptionError)):
        unflatten(tree, (), ())
    partial = msgspec.json.encode(
        {"$partial": [[module, qualname], {"$tuple": [[]]}, {}]},
    )
    with pytest.raises((UsageError, CorruptionError)):
        unflatten(partial, (), ())


def test_a_partial_of_a_function_is_refused() -> None:
    name = ["torch.hub", "load"]
    assert callable(torch.hub.load)
    tree = msgspec.json.encode({"$partial": [name, {"$tuple": [["evil/repo"]]}, {}]})
    with pytest.raises(UsageError, match=r"torch\.hub\.load"):
        unflatten(tree, (), ())


def test_no_code_of_the_user_runs_while_loading() -> None:
    state = [kinds.Loud(1), kinds.Attributes(a=1), kinds.LoudPoint(1, 2)]
    flat = flatten(state)
    kinds.RAN.clear()
    back: Any = unflatten(flat.tree, flat.tensors, ())
    assert kinds.RAN == []
    assert vars(back[0]) == {"width": 1}
    assert_same(state, back)


def test_a_class_with_del_is_not_made() -> None:
    def change(text: str) -> str:
        return text.replace('"Config"', '"Dangerous"')

    kinds.RAN.clear()
    with pytest.raises(UsageError, match=r"^x: Dangerous has __del__"):
        resaved({"x": kinds.Config(1)}, change)
    assert not kinds.RAN


@pytest.mark.parametrize("other", ["Color", "Point", "schedule", "Attributes", "Block", "RAN"])
def test_a_name_of_another_kind_is_refused(other: str) -> None:
    for state, own in (
        (kinds.Config(1), "Config"),
        (kinds.Batch(torch.ones(1)), "Batch"),
        (kinds.Level.LOW, "Level"),
        (kinds.Ordered(a=1), "Ordered"),
    ):
        if (own, other) == ("Ordered", "Attributes"):
            continue  # another dict: it may
        with pytest.raises((UsageError, CorruptionError), match="x"):
            resaved({"x": state}, lambda text, own=own: text.replace(f'"{own}"', f'"{other}"'))  # type: ignore[misc]


def test_a_class_that_changed_says_so() -> None:
    with pytest.raises(UsageError, match=r"x: Color has no member 'BLUE'"):
        resaved({"x": kinds.Color.RED}, lambda text: text.replace('"RED"', '"BLUE"'))
    with pytest.raises(UsageError, match=r"x: Point has fields"):
        resaved({"x": kinds.Point(1, 2)}, lambda text: text.replace('"y"', '"z"'))
    with pytest.raises(UsageError, match=r"x: Slotted has no place for its field depth"):
        resaved({"x": kinds.Slotted(1, "a")}, lambda text: text.replace('"width"', '"depth"'))


@pytest.mark.long
def test_what_main_defined_is_asked_for_by_name() -> None:
    program = textwrap.dedent(
        """
        import enum
        from portus.client.state.state import flatten
        class Color(enum.Enum):
            RED = 1
        print(flatten({"x": Color.RED}).tree.decode())
        """
    )
    tree = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, timeout=100
    ).stdout
    with pytest.raises(UsageError, match=r"^x: Color was defined in the script that saved"):
        unflatten(tree, (), ())


def test_state_modules_know_no_pickle() -> None:
    import portus.client.state as package

    modules = ("state", "tree", "tree_reader", "tree_writer", "leaves", "tensors")
    for module in (*modules, "../../format/arrays", "../../shelf/items"):
        text = (pathlib.Path(package.__path__[0]) / f"{module}.py").read_text()
        assert "import pickle" not in text
        assert "torch.load" not in text


# --- bytes that no flatten made ---


SPEC = flatten({"x": torch.arange(12.0).view(3, 4)}).tensors[0]
TREE = b'{"x":{"$tensor":0}}'


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float33"},
        {"dtype": "qint8"},
        {"dtype": "float64"},
        {"dtype": ""},
        {"shape": (3, 5)},
        {"shape": (3,)},
        {"shape": (-3, 4)},
        {"shape": (2**63, 4)},
        {"shape": (2**62, 2**62), "strides": (0, 0)},
        {"shape": (2**40, 2**40), "strides": (0, 0)},
        {"shape": (0, 2**62, 2**62)},
        {"strides": (-4, 1)},
        {"strides": (2**62, 2**62)},
        {"strides": (2**64, 1)},
        {"strides": (5, 1)},
        {"offset": 1},
        {"offset": -1},
        {"offset": 2**62},
        {"offset": 2**70},
        {"offset": 2**62, "shape": (0,), "strides": (1,)},
        {"storage": 1},
        {"storage": -2},
        {"storage": -1, "shape": (2**61,), "strides": (8,)},
        {"conjugate": True},
        {"dtype": "int32", "requires_grad": True},
        {"dtype": "int32", "kind": TensorKind.PARAMETER, "requires_grad": True},
        {"dtype": None},
        {"shape": None},
        {"shape": ("3", 4)},
        {"storage": "0"},
    ],
    ids=str,
)
def test_a_spec_that_makes_no_sense_is_named(change: dict[str, Any]) -> None:
    spec = msgspec.structs.replace(SPEC, **change)
    storage = torch.arange(12.0).untyped_storage()
    with pytest.raises(CorruptionError, match=r"^x: "):
        unflatten(TREE, [spec], [storage])
    assert storage.nbytes() == 48  # no view may make it grow


def test_a_huge_meta_tensor_costs_nothing() -> None:
    tensor = torch.empty(2**30, 2**20, device="meta")
    assert round_trip(tensor).shape == tensor.shape


@pytest.mark.parametrize(
    "tree",
    [
        b"",
        b"{",
        b"\xff",
        b"nul",
        b'{"a":1',
        b'"\\ud800"',
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"[" * 300 + b"{}" + b"]" * 300,
        b'{"$tuple":[' * 150 + b"{}" + b"]}" * 150,
        b'{"$unknown":1}',
        b'{"$tensor":0,"a":1}',
        b'{"a":1,"$tensor":0}',
        b'{"$tensor":1}',
        b'{"$tensor":-1}',
        b'{"$tensor":true}',
        b'{"$tensor":0.0}',
        b'{"$tensor":[0]}',
        b'{"$tensor":[0,1]}',
        b'{"$tensor":{}}',
        b'{"$tuple":[]}',
        b'{"$tuple":[{}]}',
        b'{"$tuple":[5]}',
        b'{"$tuple":5}',
        b'{"$dict":[]}',
        b'{"$dict":[1]}',
        b'{"$dict":[[1]]}',
        b'{"$dict":[[[1],2]]}',
        b'{"$dict":[[{"$tensor":0},2]]}',
        b'{"$set":[[1]]}',
        b'{"$set":5}',
        b'{"$float":"x"}',
        b'{"$float":"00"}',
        b'{"$int":"0x"}',
        b'{"$int":5}',
        b'{"$str":"!!"}',
        b'{"$bytes":["a"]}',
        b'{"$bytes":[{"$tensor":0}]}',
        b'{"$bytes":[]}',
        b'{"$dtype":"float33"}',
        b'{"$dtype":["x"]}',
        b'{"$device":"nowhere:9"}',
        b'{"$Size":[1.5]}',
        b'{"$Size":[99999999999999999999]}',
        b'{"$Size":5}',
        b'{"$path":5}',
        b'{"$path":"a\\u0000b","b":1}',
        b'{"$timedelta":[9999999999,0,0]}',
        b'{"$datetime":[1,2,3,4,5,6,7,8,null]}',
        b'{"$datetime":[0,0,0,0,0,0,0,0,null]}',
        b'{"$timezone":[5]}',
        b'{"$timezone":[{"$timedelta":[5,0,0]}]}',
        b'{"$time":[1,2,3,4,0,"x"]}',
        b'{"$range":[0,5,0]}',
        b'{"$range":["a",5,1]}',
        b'{"$slice":[1]}',
        b'{"$enum":[]}',
        b'{"$enum":[["enum","Enum"],5]}',
        b'{"$deque":[[1],-1]}',
        b'{"$deque":[[1],"x"]}',
        b'{"$defaultdict":[{"a":1},"eval"]}',
        b'{"$defaultdict":[{"a":1},["list"]]}',
        b'{"$ordered":[[1,2]]}',
        b'{"$ordered":[{"a":1},5]}',
        b'{"$counter":[5]}',
        b'{"$namespace":[[1]]}',
        b'{"$namespace":[{"$dict":[[1,2]]}]}',
        b'{"$mapping":[{}]}',
        b'{"$complex":[1,2]}',
        b'{"$partial":[["torch.optim.adamw","AdamW"],5,{}]}',
        b'{"$partial":[["torch.optim.adamw","AdamW"],{"$tuple":[[]]},{"$dict":[[1,2]]}]}',
        b'{"$array":["","|O",[0],false]}',
        b'{"$array":["","O",[0],false]}',
        b'{"$array":["","<f8",[1],false]}',
        b'{"$array":["","<f8",[1000000000000],false]}',
        b'{"$array":["","|S0",[1000000000000],false]}',
        b'{"$array":["","|V0",[5],false]}',
        b'{"$array":["","|V9999999999",[0],false]}',
        b'{"$array":["","<f8",[-1],false]}',
        b'{"$array":["","<f8",[0],5]}',
        b'{"$array":["","f8,f8",[0],false]}',
        b'{"$array":["",[["a","<f8",[99999999999]]],[0],false]}',
        b'{"$array":["",[["a","<f8",[-1]]],[0],false]}',
        b'{"$array":["",[["a","<f8"],["a","<f8"]],[0],false]}',
        b'{"$array":["",[["a"]],[0],false]}',
        b'{"$array":["","<f8",[' + b"0," * 40 + b"0],false]}",
        b'{"$array":[{"$tensor":0},"<f4",[12],false]}',
        b'{"$numpy_scalar":["<f8","AAAA"]}',
        b'{"$numpy_scalar":["|V0",""]}',
        b'{"$numpy_scalar":["str_",5]}',
        b'{"$numpy_dtype":"|O"}',
        b'{"$numpy_dtype":"x"}',
    ],
    ids=lambda tree: tree[:60],
)
def test_a_tree_that_no_flatten_made_is_corrupt(tree: bytes) -> None:
    with pytest.raises((CorruptionError, UsageError)):
        unflatten(tree, [SPEC], [torch.arange(12.0).untyped_storage()])


def test_an_array_may_not_reach_beyond_its_storage() -> None:
    flat = flatten({"x": np.arange(INLINE_MAX, dtype=np.float64)})
    [storage] = copies(flat)
    tree = flat.tree.replace(b"[4096]", b"[4097]")
    assert tree != flat.tree
    with pytest.raises(CorruptionError, match=r"^x: array needs 32776 bytes, found 32768"):
        unflatten(tree, flat.tensors, [storage])


# --- real states ---


def trained(make: Callable[..., Any], **options: Any) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = make(model.parameters(), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.randn(5, 4)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return model, optimizer


OPTIMIZERS = [
    value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type)
    and issubclass(value, torch.optim.Optimizer)
    and name not in {"Optimizer", "SparseAdam", "Muon"}
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
def test_every_optimizer_of_torch_comes_back(make: Callable[..., Any]) -> None:
    model, optimizer = trained(make)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    back = round_trip(state)
    assert_same(state, back)
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    assert len(OPTIMIZERS) > 10


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, kinds.schedule),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.2, cycle_momentum=False),
    "multi step": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.1),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_schedulers_come_back(name: str) -> None:
    _, optimizer = trained(torch.optim.AdamW)
    scheduler = SCHEDULERS[name](optimizer)
    state = scheduler.state_dict()
    assert_same(state, round_trip(state))


def test_what_is_saved_is_what_ctypes_sees() -> None:
    tensor = torch.arange(5, dtype=torch.int16)
    assert raw_bytes(flatten(tensor).storages[0]) == ctypes.string_at(tensor.data_ptr(), 10)
