"""Any state comes back; any tree and specs, however damaged, do no worse than an error of ours."""

from __future__ import annotations

import copy
import datetime
import io
import math
import pathlib
import random
import resource
import time
from collections import OrderedDict, deque
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn

from portus.client.state.state import Flattener, flatten, unflatten
from portus.client.state.tensors import DTYPES
from portus.client.state.tree import WRAPPERS
from portus.errors import CorruptionError, UsageError
from portus.spec import TensorKind, TensorSpec
from tests.unit.client import kinds
from tests.unit.client.same import assert_same, copies, key_paths, round_trip

# --- states ---

NUMBERS = st.one_of(
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.floats(width=32),
    st.complex_numbers(),
    st.booleans(),
    st.none(),
)
TEXT = st.one_of(
    st.text(max_size=8),
    st.text(st.characters(categories=["Cs", "Ll"]), max_size=4),
    st.sampled_from(["$tensor", "$dict", "", ".", "a.b", "0", "#2", "True"]),
)
HASHABLE = st.recursive(
    st.one_of(NUMBERS, TEXT, st.binary(max_size=8), st.sampled_from([*kinds.Color, torch.int8])),
    lambda inner: st.one_of(
        st.tuples(inner), st.tuples(inner, inner), st.frozensets(inner, max_size=3)
    ),
    max_leaves=4,
)
TIMES = st.one_of(
    st.datetimes(),
    st.datetimes(timezones=st.just(datetime.timezone.utc)),
    st.dates(),
    st.times(),
    st.timedeltas(),
)
OTHERS = st.one_of(
    TIMES,
    st.sets(HASHABLE, max_size=3),
    st.binary(max_size=20).map(bytearray),
    st.binary(max_size=20).map(io.BytesIO),
    st.text(alphabet="ab/.", max_size=6).map(pathlib.Path),
    st.lists(st.integers(0, 2**62), max_size=3).map(torch.Size),
    st.sampled_from([torch.device("cuda", 1), torch.bfloat16, nn.ReLU, range(3), slice(1, None)]),
    st.sampled_from([np.float32(1.5), np.bool_(True), np.datetime64("2020-01-01")]),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A view of any kind over fresh random bytes."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES.keys() - {"complex32", "bool"})))]
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    gap = draw(st.integers(0, 3))
    count = gap + math.prod(shape)
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    base = torch.empty(0, dtype=dtype)
    storage = torch.UntypedStorage(len(data))
    for place, byte in enumerate(data):
        storage[place] = byte
    strides = torch.empty(shape, device="meta").stride()
    base.set_(storage, gap if count else 0, shape, strides)
    tensor = base.permute(draw(st.permutations(range(len(shape)))))
    gaps = draw(st.integers(1, 3))
    if tensor.dim():
        tensor = tensor[::gaps]
    return draw(st.sampled_from(dresses(tensor)))


def dresses(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [tensor, nn.Parameter(tensor, requires_grad=False), nn.Buffer(tensor)]
    if tensor.is_floating_point() or tensor.is_complex():
        found += [tensor.detach().requires_grad_(), nn.Parameter(tensor)]
    if tensor.is_complex():
        found += [tensor.conj(), tensor.conj().imag]
    return [*found, torch._neg_view(tensor), tensor.expand(2, *tensor.shape)]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(["?", "i1", ">u2", "f2", "f8", "c16", "S3", "M8[ms]"])))
    shape = draw(st.lists(st.integers(0, 20), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    filled = np.resize(np.frombuffer(draw(st.binary(min_size=1, max_size=9)), np.uint8), size)
    fortran, gaps = draw(st.booleans()), draw(st.integers(1, 2))
    array: np.ndarray[Any, Any] = np.ndarray(
        shape, dtype, filled.tobytes(), order="F" if fortran else "C"
    )
    found: np.ndarray[Any, Any] = array.copy("K")
    return found[::gaps] if shape else found


ARRAYS_WITH_BIG_ONES = st.one_of(arrays(), st.binary(min_size=4090, max_size=4100))

STATES = st.recursive(
    st.one_of(tensors(), NUMBERS, TEXT, OTHERS, ARRAYS_WITH_BIG_ONES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=2).map(deque),
        st.dictionaries(TEXT, inner, max_size=4),
        st.dictionaries(HASHABLE, inner, max_size=3),
        st.dictionaries(TEXT, inner, max_size=3).map(OrderedDict),
        st.builds(kinds.Config, inner, inner),
        st.builds(kinds.Point, inner, inner),
        st.builds(kinds.Replay, inner, inner),
    ),
    max_leaves=12,
)


@given(STATES)
def test_any_state_comes_back(state: object) -> None:
    assert_same(state, round_trip(state))


@given(STATES, STATES)
def test_a_warm_flattener_does_as_a_cold_one(before: object, after: object) -> None:
    flattener = Flattener()
    flattener.flatten(before)
    for state in (after, before, before):
        warm, cold = flattener.flatten(state), flatten(state)
        assert (warm.tree, warm.tensors, warm.owned) == (cold.tree, cold.tensors, cold.owned)
        where = [[storage.data_ptr() for storage in flat.storages] for flat in (warm, cold)]
        of_others = [i for i in range(len(where[0])) if i not in warm.owned]
        assert [where[0][i] for i in of_others] == [where[1][i] for i in of_others]


@given(STATES, st.randoms(use_true_random=False))
def test_key_paths_are_distinct_and_asked_for_once_each_in_order(
    state: object, luck: random.Random
) -> None:
    flat = flatten(state)
    paths = key_paths(flat.tree)
    assert len(set(paths)) == len(paths)
    names = [spec.name for spec in flat.tensors]
    assert names == [path for path in paths if path in set(names)]
    wanted = {path for path in paths if luck.random() < 0.5}
    asked = []

    def keep(path: str) -> bool:
        asked.append(path)
        return path in wanted

    used = {spec.storage for spec in flat.tensors if spec.name in wanted}
    storages = [s if i in used else None for i, s in enumerate(copies(flat))]
    # Objects of codecs are loaded whole or not at all; what stands for them is not.
    unflatten(flat.tree, flat.tensors, storages, keep, stand_ins=True)
    assert asked == paths


WORDS = st.text("abc", min_size=1, max_size=2)
PLAIN_DICTS = st.recursive(
    st.one_of(st.integers(), st.builds(torch.ones, st.just(2))),
    lambda inner: st.dictionaries(WORDS, inner, min_size=1, max_size=4),
    max_leaves=12,
).filter(lambda state: isinstance(state, dict))


@given(PLAIN_DICTS, st.randoms(use_true_random=False))
def test_what_is_kept_of_dicts_has_just_the_kept_paths(state: object, luck: random.Random) -> None:
    flat = flatten(state)
    wanted = [path for path in key_paths(flat.tree) if luck.random() < 0.5]
    kept = unflatten(flat.tree, flat.tensors, copies(flat), lambda path: path in set(wanted))
    assert key_paths(flatten(kept).tree) == (wanted or [""])


# --- damage ---

NASTY: tuple[Any, ...] = (
    *(0, 1, -1, 2, 5, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 1.5),
    *(
        None,
        True,
        "",
        "a",
        "$tensor",
        "x" * 50,
        [],
        {},
        [[]],
        [0],
        [0, 1],
        {"a": 1},
        {"$tensor": 0},
    ),
    *(
        {"$tensor": [1, 0]},
        {"$tuple": [[1]]},
        {"$dict": [[1, 2]]},
        {"$float": "nan"},
        ["os", "system"],
    ),
)


def rich_state() -> dict[str, Any]:
    """One of everything."""
    weight = nn.Parameter(torch.randn(4, 6))
    return {
        "model": OrderedDict(w=weight, tie=weight, view=weight.data[1:, ::2], e=torch.empty(0, 3)),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "meta": torch.empty(4, device="meta"),
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "groups": [{"lr": 0.1, "p": [0]}]},
        "array": np.arange(2000.0).reshape(40, 50),
        "small": np.array([(1, b"a")], [("n", "<i4"), ("s", "S2")]),
        "scalars": [np.float32(2), np.str_("x"), 1 + 2j, math.nan, 2**80, "\ud800", b"abc"],
        "times": [datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc), datetime.date.max],
        "things": [torch.Size([1, 2]), torch.float16, torch.device("cpu"), pathlib.Path("a")],
        "names": [kinds.Color.RED, kinds.Rights.READ | kinds.Rights.RUN, nn.ReLU, torch.relu],
        "made": [kinds.Config(1, weight), kinds.Point(1, 2), kinds.Slotted(1, "a")],
        "kept": (deque([1, [2]], 3), {1, 2}, frozenset({(1, "a")}), {(1, 2): {True: None}}),
        "mapping": kinds.Attributes(a=1),
        "rng": random.Random(1).getstate(),
        "big": bytes(5000),
        "streams": [io.BytesIO(b"abc"), io.BytesIO(bytes(5000))],
        "objects": [kinds.Replay(weight, [kinds.Replay(1)])],
    }


class Vandal:
    """Damages one thing at a time, with luck from a seed."""

    def __init__(self, seed: int) -> None:
        self.luck = random.Random(seed)
        self.flat = flatten(rich_state())
        self.root: Any = msgspec.json.decode(self.flat.tree)
        self.tags = sorted({*WRAPPERS, *find_tags(self.root)})

    def tree(self) -> bytes:
        if self.luck.random() < 0.4:
            return self.with_broken_bytes()
        root = copy.deepcopy(self.root)
        for _ in range(self.luck.randint(1, 3)):
            self.change(root)
        return msgspec.json.encode(root)

    def with_broken_bytes(self) -> bytes:
        tree = bytearray(self.flat.tree)
        for _ in range(self.luck.randint(1, 4)):
            place = self.luck.randrange(len(tree))
            match self.luck.randrange(4):
                case 0:
                    tree[place] = self.luck.randrange(256)
                case 1:
                    tree[place] ^= 1 << self.luck.randrange(8)
                case 2:
                    del tree[place : place + self.luck.randint(1, 20)]
                case 3:
                    tree[place:place] = tree[: self.luck.randint(1, 50)]
        return bytes(tree)

    def change(self, root: Any) -> None:
        """Change one node below ``root``."""
        node = root
        while True:
            keys = [*node] if isinstance(node, dict) else [*range(len(node))]
            if not keys:
                return
            key = self.luck.choice(keys)
            child = node[key]
            if not isinstance(child, (dict, list)) or self.luck.random() < 0.15:
                break
            node = child
        match self.luck.randrange(5):
            case 0:
                del node[key]
            case 1 if isinstance(node, dict):
                node[self.luck.choice(self.tags)] = node.pop(key)
            case 2:
                node[key] = {self.luck.choice(self.tags): child}
            case 3:
                node[key] = {self.luck.choice(self.tags): [child, self.luck.choice(NASTY)]}
            case _:
                node[key] = copy.deepcopy(self.luck.choice(NASTY))

    def specs(self) -> list[TensorSpec]:
        specs = list(self.flat.tensors)
        for _ in range(self.luck.randint(1, 3)):
            place = self.luck.randrange(len(specs))
            specs[place] = self.spec(specs[place])
        match self.luck.randrange(10):
            case 0:
                specs.pop()
            case 1:
                self.luck.shuffle(specs)
        return specs

    def spec(self, spec: TensorSpec) -> TensorSpec:
        number: Any = self.luck.choice(NASTY[:15])
        numbers = [self.luck.choice([*NASTY[:15], 1, 2, 3]) for _ in spec.shape]
        changes: list[dict[str, Any]] = [
            {"dtype": self.luck.choice([*DTYPES, "nothing", ""])},
            {"shape": tuple(numbers)},
            {"strides": tuple(numbers)},
            {"shape": (*spec.shape, number), "strides": (*spec.strides, 0)},
            {"offset": number},
            {"storage": number},
            {"storage": self.luck.randrange(-1, len(self.flat.storages))},
            {"kind": self.luck.choice([*TensorKind]), "requires_grad": True},
            {"conjugate": True},
            {"negative": True},
        ]
        return msgspec.structs.replace(spec, **self.luck.choice(changes))


def find_tags(node: object) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(find_tags, node)) if node else set()
    if not isinstance(node, dict):
        return set()
    own = {key for key in node if key.startswith("$")}
    return own.union(*map(find_tags, node.values())) if node else own


OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def touch(value: object) -> int:
    """Read every byte that can be read of all tensors and arrays in ``value``; their number."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta and value.numel() < 1 << 20:
            plain = torch.empty(0, dtype=OF_SIZE[value.dtype.itemsize])  # all can be read in it
            where = (value.storage_offset(), value.shape, value.stride())
            last = sum((n - 1) * step for n, step in zip(*where[1:], strict=True)) + where[0]
            size = value.untyped_storage().nbytes()
            assert not value.numel() or (last + 1) * value.dtype.itemsize <= size
            plain.set_(value.untyped_storage(), *where).contiguous().clone()
        return 1
    if isinstance(value, np.ndarray):
        value.tobytes()
        return 1
    if isinstance(value, dict):
        return sum(map(touch, value.values()))
    if isinstance(value, (list, tuple, deque)):
        return sum(map(touch, value))
    return 0


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_damage_gives_an_error_of_ours_or_a_state_that_can_be_read(seed: int) -> None:
    vandal = Vandal(seed)
    assert touch(unflatten(vandal.flat.tree, vandal.flat.tensors, copies(vandal.flat))) == 9
    outcomes = dict.fromkeys(("read", "corrupt", "usage"), 0)
    touched = 0
    memory_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest_s = 0.0
    for index in range(3000):
        tree = vandal.flat.tree if index % 3 == 0 else vandal.tree()
        specs = vandal.flat.tensors if index % 3 == 1 else vandal.specs()
        started = time.thread_time()
        try:
            state = unflatten(tree, specs, copies(vandal.flat))
        except CorruptionError:
            outcomes["corrupt"] += 1
        except UsageError:
            outcomes["usage"] += 1
        else:
            outcomes["read"] += 1
            touched += touch(state)
        slowest_s = max(slowest_s, time.thread_time() - started)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kib) / 1024
    print(f"{outcomes}, {touched} tensors read, slowest {slowest_s:.3f} s, {grown_mib:.0f} MiB")
    assert sum(outcomes.values()) == 3000
    assert outcomes["read"] > 100
    assert outcomes["corrupt"] > 1000
    assert touched > 1000
    assert slowest_s < 2
    assert grown_mib < 200


@given(st.binary(max_size=200))
def test_any_bytes_are_corrupt_or_a_state(tree: bytes) -> None:
    try:
        unflatten(tree, (), ())
        key_paths(tree)
    except (CorruptionError, UsageError):
        pass


JSON = st.recursive(
    st.sampled_from([node for node in NASTY if not isinstance(node, (dict, list))]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["a", "b", *sorted(WRAPPERS), "$tensor"]), inner, max_size=2
        ),
    ),
    max_leaves=10,
)


@given(JSON, st.sampled_from(sorted({*WRAPPERS, "$tensor", "$array", "$bytes", "$set", "$enum"})))
def test_any_tree_is_corrupt_or_a_state(node: object, tag: str) -> None:
    storage = torch.ones(4).untyped_storage()
    specs = flatten(torch.ones(4)).tensors
    for root in (node, {tag: node}, {tag: [node]}):
        try:
            unflatten(msgspec.json.encode(root), specs, [storage])
        except (CorruptionError, UsageError):
            pass
