"""A state to its tree: one walk, which leaves the tensors where they are. See tree.py."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import math
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch

from portus.client.state import classes, codecs, leaves
from portus.client.state.tensors import PLAIN_TENSORS, check_kind
from portus.client.state.tree import (
    DEPTH_MAX,
    OBJECT,
    UNKNOWN,
    SaidUsageError,
    below,
    key_text,
    said_at,
)
from portus.errors import UsageError
from portus.format import arrays
from portus.format.text import is_text

INLINE_MAX: Final = 4096
"""Bytes of an array or bytes object that are kept in the tree; more get a storage."""

FACTORIES: Final[Mapping[str, Callable[[], object]]] = {
    factory.__name__: factory
    for factory in (
        *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple),
        *(Counter, OrderedDict, deque),
    )
}
"""What a defaultdict may call, since looking into one calls it."""


class TensorNode(msgspec.Struct, gc=False):
    """The node of a tensor. A struct that the garbage collector ignores: there are many."""

    index: int | tuple[int, int] = msgspec.field(name="$tensor")


class TreeWriter:
    """One walk over a state.

    After it, ``tensors`` are those met, ``names`` their key paths (not yet distinct), ``nodes``
    their nodes, ``others`` the key paths of all other leaves, ``owned`` the indices of the
    tensors that are private copies, and ``has_objects`` whether a codec was asked for.
    ``unknown``: takes the leaves that no tree can hold, which are refused if it is None.
    """

    __slots__ = ("_stack", "has_objects", "names", "nodes", "others", "owned", "tensors", "unknown")

    def __init__(self, stack: list[int], unknown: list[object] | None = None) -> None:
        self.unknown = unknown
        self.names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.nodes: list[TensorNode] = []
        self.others: list[str] = []
        self.owned: list[int] = []
        self.has_objects = False
        self._stack = stack  # the ids of the containers that the walk is in

    def node(self, value: object, path: str) -> object:
        """The node of ``value``, which is at ``path``. Raises ``UsageError``."""
        kind = type(value)
        if kind in PLAIN_TENSORS and self._takes(value):
            return self._tensor(value, path)  # type: ignore[arg-type]
        if kind in leaves.PLAIN:
            self.others.append(path)
            return leaves.plain_node(value)
        write = _CONTAINERS.get(kind) or _family(value, kind)
        if write is None:
            return self._leaf(value, path)
        self._stack.append(id(value))
        if len(self._stack) > DEPTH_MAX:
            self._refuse_depth(path)
        node = write(self, value, path)
        self._stack.pop()
        return node

    def tie(self) -> None:
        """Mark in the nodes which tensors are the same object as one before. Call it once, last."""
        ids = list(map(id, self.tensors))
        if len(set(ids)) == len(ids):
            return
        first: dict[int, int] = {}
        for index, (node, key) in enumerate(zip(self.nodes, ids, strict=True)):
            if first.setdefault(key, index) != index:
                node.index = (index, first[key])

    def inside(self, value: object, path: str) -> object:
        """The node of a value that has no key path of its own; it may hold no tensor."""
        if type(value) in leaves.PLAIN:
            return leaves.plain_node(value)
        walk = TreeWriter(self._stack)
        node = walk.node(value, path)
        if walk.tensors or walk.has_objects:
            raise SaidUsageError(
                f"{path}: tensors, big arrays, big bytes and objects of registered classes cannot "
                "be saved in sets, in keys and in attributes; put them into a dict"
            )
        return node

    def entries(self, value: Mapping[Any, object], path: str) -> object:
        """The node of the items of a mapping."""
        if not value:
            self.others.append(path)
            return {}
        # Plain from here on, whatever the class overrides.
        items = value if type(value) is dict else dict(value)
        start = below(path)
        if not _are_plain_keys(items):
            return {"$dict": [self._pair(key, item, path, start) for key, item in items.items()]}
        nodes: dict[str, object] = {}
        for key, item in items.items():
            # Without a call: most of what is saved comes here.
            if type(item) in PLAIN_TENSORS and (self.unknown is None or self._takes(item)):
                nodes[key] = node = TensorNode(len(self.nodes))
                self.nodes.append(node)
                self.names.append(start + key)
                self.tensors.append(item)
            else:
                nodes[key] = self.node(item, start + key)
        return nodes

    def row(self, value: Sequence[object], path: str) -> list[object]:
        """The nodes of the items of a list or tuple."""
        kinds = set(map(type, value))
        if not kinds <= leaves.PLAIN:
            start = below(path)
            return [self.node(item, f"{start}{place}") for place, item in enumerate(value)]
        self.others.append(path)
        return list(value) if _is_json(value, kinds) else list(map(leaves.plain_node, value))

    def attributes(self, value: object, path: str) -> list[object]:
        """The instance attributes of a mapping as nodes: none, or one."""
        found = classes.fields_of(value)
        return [self.inside(found, path)] if found else []

    def data(self, size: int, path: str, copy: Callable[[np.ndarray[Any, Any]], object]) -> object:
        """Bytes, kept in the tree or in a storage of ours. ``copy`` fills an array of them."""
        held = torch.zeros(size, dtype=torch.uint8, device="cpu")
        copy(held.numpy())
        if size <= INLINE_MAX:
            self.others.append(path)
            return leaves.base64_text(held.numpy().tobytes())
        self.owned.append(len(self.tensors))
        return self._tensor(held, path)

    def registered(self, value: Any, path: str) -> object:
        """The node of an object of a registered class: what its codec gives."""
        codec = codecs.codec_of(type(value))
        assert codec is not None
        if self._stack.count(id(value)) > 1:
            self._refuse_loop(path)
        self.has_objects = True
        with said_at(path):
            state = codec.encoded(value)
        return {OBJECT: [self.node(state, path), codec.name]}

    def _refuse_loop(self, path: str) -> None:
        where = path or "the state"
        raise SaidUsageError(f"{where:.200}: the state contains itself; save one without loops")

    def _refuse_depth(self, path: str) -> None:
        if len(set(self._stack)) < len(self._stack):
            self._refuse_loop(path)
        raise SaidUsageError(f"{path:.200}: nested deeper than {DEPTH_MAX}; make the state flatter")

    def _tensor(self, tensor: torch.Tensor, path: str) -> TensorNode:
        node = TensorNode(len(self.nodes))
        self.nodes.append(node)
        self.names.append(path)
        self.tensors.append(tensor)
        return node

    def _pair(self, key: object, item: object, path: str, start: str) -> list[object]:
        node = leaves.plain_node(key) if type(key) in leaves.PLAIN else self.inside(key, path)
        name = str(node) if type(node) is int else key_text(_as_json(node))
        return [node, self.node(item, start + name)]

    def _leaf(self, value: object, path: str) -> object:
        try:
            return self._known_leaf(value, path)
        except UsageError:
            if self.unknown is None:
                raise
        self.others.append(path)
        self.unknown.append(value)
        return {UNKNOWN: len(self.unknown) - 1}

    def _takes(self, tensor: Any) -> bool:
        """False for a tensor that is to be kept beside the tree."""
        if self.unknown is None:
            return True
        try:
            check_kind("", tensor)
        except UsageError:
            return False
        return True

    def _known_leaf(self, value: object, path: str) -> object:
        if isinstance(value, torch.Tensor):
            check_kind(path or "the state", value)
        with said_at(path):
            kind = leaves.kind_of(value)
            if kind is None:
                raise UsageError(_refusal(value))
            node = kind.node(value, functools.partial(self.inside, path=path))
            self.others.append(path)
            return node


def _as_json(node: object) -> object:
    """A key node as a reader will see it: leaves may hold tuples where JSON has lists."""
    return msgspec.json.decode(msgspec.json.encode(node)) if isinstance(node, dict) else node


def _are_plain_keys(items: dict[Any, object]) -> bool:
    """True if the keys can be those of a JSON object."""
    if set(map(type, items)) != {str}:
        return False
    joined = "\0".join(items)
    return is_text(joined) and "\0$" not in joined and not joined.startswith("$")


def _is_json(values: Sequence[Any], kinds: set[type]) -> bool:
    """True if plain ``values`` of one kind are their own nodes. May say False without need."""
    if kinds == {int}:
        return bool(min(values) >= leaves.INT_MIN and max(values) <= leaves.INT_MAX)
    return kinds == {float} and all(map(math.isfinite, values))


def _write_default(walk: TreeWriter, value: defaultdict[object, object], path: str) -> object:
    factory = value.default_factory
    name = getattr(factory, "__name__", None)
    if factory is not None and FACTORIES.get(str(name)) is not factory:
        raise SaidUsageError(
            f"{path}: a defaultdict of {factory!r:.80} cannot be saved, only of "
            f"{', '.join(FACTORIES)}; save dict(value)"
        )
    return {"$defaultdict": [walk.entries(value, path), name]}


def _write_array(walk: TreeWriter, value: np.ndarray[Any, Any], path: str) -> object:
    with said_at(path):
        shape = arrays.shape_of(value)
    data = walk.data(shape.size, path, functools.partial(arrays.copy_bytes, value))
    return {"$array": [data, arrays.dtype_node(value.dtype), list(value.shape), shape.fortran]}


def _write_bytes(walk: TreeWriter, value: bytes | bytearray, path: str) -> object:
    def copy(target: np.ndarray[Any, Any]) -> None:
        target[:] = np.frombuffer(value, np.uint8)

    return {f"${type(value).__name__}": [walk.data(len(value), path, copy)]}


def _write_stream(walk: TreeWriter, value: io.BytesIO, path: str) -> object:
    with said_at(path):
        if value.closed:
            raise UsageError("an io.BytesIO that was closed, and holds nothing any more")
    held = value.getvalue()

    def copy(target: np.ndarray[Any, Any]) -> None:
        target[:] = np.frombuffer(held, np.uint8)

    data = walk.data(len(held), path, copy)
    return {"$bytes_io": [data, value.tell(), *walk.attributes(value, path)]}


def _write_ordered(walk: TreeWriter, value: OrderedDict[object, object], path: str) -> object:
    return {"$ordered": [walk.entries(value, path), *walk.attributes(value, path)]}


def _write_mapping(walk: TreeWriter, value: dict[object, object], path: str) -> object:
    name = _remade(path, value, lambda: classes.new_mapping(type(value), {}))
    return {"$mapping": [walk.entries(value, path), name, *walk.attributes(value, path)]}


def _write_namedtuple(walk: TreeWriter, value: Any, path: str) -> object:
    fields = dict(zip(value._fields, value, strict=True))
    name = _remade(path, value, lambda: classes.new_namedtuple(type(value), fields))
    return {"$namedtuple": [walk.entries(fields, path), name]}


def _write_dataclass(walk: TreeWriter, value: object, path: str) -> object:
    fields = classes.fields_of(value)
    name = _remade(path, value, lambda: classes.new_dataclass(type(value), fields))
    return {"$dataclass": [walk.entries(fields, path), name]}


def _remade(path: str, value: object, make: Callable[[], object]) -> list[str]:
    """The name of the class of ``value``, after a look whether one like it can be made again."""
    with said_at(path):
        try:
            make()
        except TypeError as error:
            raise UsageError(f"{type(value).__qualname__} cannot be made again: {error}") from error
        return leaves.name_node(classes.name_of(type(value)))


_Write = Callable[[TreeWriter, Any, str], object]

_CONTAINERS: Final[Mapping[type, _Write]] = {
    dict: TreeWriter.entries,
    list: TreeWriter.row,
    tuple: lambda walk, value, path: {"$tuple": [walk.row(value, path)]},
    deque: lambda walk, value, path: {"$deque": [walk.row(value, path), value.maxlen]},
    OrderedDict: _write_ordered,
    defaultdict: _write_default,
    Counter: lambda walk, value, path: {"$counter": [walk.entries(value, path)]},
    argparse.Namespace: lambda walk, value, path: {"$arguments": [walk.entries(vars(value), path)]},
    types.SimpleNamespace: lambda walk, value, path: {
        "$namespace": [walk.entries(vars(value), path)]
    },
    np.ndarray: _write_array,
    bytes: _write_bytes,
    bytearray: _write_bytes,
    io.BytesIO: _write_stream,
}

assert _CONTAINERS.keys() == leaves.CONTAINERS


def _family(value: object, kind: type) -> _Write | None:
    """How to write a container that only its base classes, or a user, tell to be one."""
    if codecs.codec_of(kind) is not None:
        return TreeWriter.registered
    if leaves.kind_of(value) is not None or hasattr(value, "state_dict"):
        return None
    if isinstance(value, dict) and not isinstance(value, (defaultdict, Counter)):
        return _write_mapping
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _write_namedtuple
    if dataclasses.is_dataclass(value):
        return _write_dataclass
    return None


_HINTS: Final = (
    ("state_dict", "pass .state_dict()"),
    ("bit_generator", "save generator.bit_generator.state"),
    ("get_state", "save its .get_state()"),
    ("getstate", "save its .getstate()"),
    ("untyped", "save a tensor over it"),
    ("_get_node", "save OmegaConf.to_container(value)"),
    ("tzname", "use a fixed offset, such as datetime.timezone.utc"),
    ("__array_interface__", "save numpy.asarray(value)"),
    ("tobytes", "save value.tobytes()"),
    ("n_sequence_fields", "save tuple(value)"),
    ("items", "save dict(value)"),
    ("append", "save list(value)"),
    ("fileno", "save the path of the file"),
)
"""An attribute that gives a kind away, and what to do. The first that fits."""


def _refusal(value: object) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    above = codecs.codec_above(type(value))
    if above is not None:
        return (
            f"{kind} cannot be saved; {above.name} is registered, and this is a class derived from "
            "it: call portus.register_codec for it too"
        )
    hint = next((hint for mark, hint in _HINTS if hasattr(value, mark)), "leave it out")
    return f"{kind} cannot be saved; {hint}, or register a codec: portus.register_codec"
