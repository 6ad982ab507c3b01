"""A tree to its state. It reads what a stranger may have written: see tree.py and classes.py."""

from __future__ import annotations

import argparse
import io
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from portus.client.state import classes, codecs, leaves
from portus.client.state.leaves import unpack
from portus.client.state.tensors import rebuild
from portus.client.state.tree import (
    OBJECT,
    UNKNOWN,
    WRAPPERS,
    below,
    check_depth,
    children,
    is_tensor,
    key_text,
    said_at,
    wrapper,
)
from portus.client.state.tree_writer import FACTORIES
from portus.errors import CorruptionError, UsageError
from portus.format import arrays
from portus.spec import TensorSpec

DROPPED: Final = object()
"""What a leaf becomes that is not kept, and a container of nothing but those."""


class TreeReader:
    """Makes values of nodes, over the memory of ``storages``.

    ``paths`` are the key paths of the leaves, in order; None while inside of a leaf, where
    nothing has a path. ``keep`` decides by them; None keeps all. ``hole`` is in the place of what
    is dropped from a list. ``stand_ins``: make those of objects of codecs, and not the objects.
    ``unknown``: the leaves that the tree could not hold.
    """

    __slots__ = (
        *("_drops", "_hole", "_keep", "_made", "_paths", "_specs", "_stand_ins", "_storages"),
        "_unknown",
    )

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        storages: Sequence[torch.UntypedStorage | None],
        paths: Iterator[str] | None,
        keep: Callable[[str], bool] | None,
        hole: object = None,
        *,
        stand_ins: bool = False,
        unknown: Sequence[object] = (),
    ) -> None:
        self._unknown = unknown
        self._hole = hole
        self._stand_ins = stand_ins
        self._drops = 0
        self._specs = specs
        self._storages = storages
        self._paths = paths
        self._keep = keep
        self._made: dict[int, torch.Tensor] = {}

    def value(self, node: object, path: str, depth: int, *, holes: bool = False) -> Any:
        """The value of a node, or ``DROPPED``. ``holes``: what is dropped in it leaves a hole.

        ``path`` is for messages. Raises ``CorruptionError``, or ``UsageError`` for a class that
        is not there.
        """
        check_depth(path, depth)
        if is_tensor(node):
            return self._leaf(node)
        wrapped = wrapper(node)
        if wrapped is not None:
            return self._wrapped(*wrapped, path, depth)
        found = children(node)
        if found is None:
            return self._leaf(node)
        start = below(path)
        read = [(key, self.value(child, start + key_text(key), depth + 1)) for key, child in found]
        if all(value is DROPPED for _, value in read):
            return DROPPED
        if holes or isinstance(node, list):
            read = [(key, self._hole if value is DROPPED else value) for key, value in read]
        if isinstance(node, list):
            return [value for _, value in read]
        with said_at(path):
            return {self._key(key): value for key, value in read if value is not DROPPED}

    def _key(self, node: object) -> object:
        return node if isinstance(node, str) else self._inside(node)

    def _inside(self, node: object) -> Any:
        return TreeReader((), (), None, None).value(node, "", 0)

    def _wrapped(self, tag: str, payload: list[object], path: str, depth: int) -> object:
        if tag == OBJECT:
            return self._object(payload, path, depth)
        inner = self.value(payload[0], path, depth + 1, holes=tag in _FIELDS)
        if inner is DROPPED:
            return DROPPED
        with said_at(path):
            return _BUILD[tag](inner, *map(self._inside, payload[1:]))

    def _object(self, payload: list[object], path: str, depth: int) -> object:
        """An object of a codec, whole or not at all."""
        before = self._drops
        inner = self.value(payload[0], path, depth + 1)
        if inner is DROPPED:
            return DROPPED
        with said_at(path):
            name = leaves.text(unpack(payload, 2)[1])
            if self._paths is None:
                raise CorruptionError(f"an object of {name!r:.80} in a value that can hold none")
            if self._stand_ins:
                return codecs.stand_in(name, inner)
            if self._drops > before:
                raise UsageError(
                    f"an object of {name!r:.80} is loaded whole or not at all: ask for "
                    f"{path or 'all of the state'}"
                )
            return codecs.codec_named(name).decoded(inner)

    def _leaf(self, node: object) -> object:
        path = "" if self._paths is None else next(self._paths)
        if self._keep is not None and not self._keep(path):
            self._drops += 1
            return DROPPED
        if not isinstance(node, (dict, list)):
            return node
        with said_at(path):
            return self._leaf_value(node)

    def _leaf_value(self, node: dict[str, object] | list[object]) -> object:
        if isinstance(node, list):
            return [self._inside(item) if isinstance(item, dict) else item for item in node]
        if not node:
            return {}
        [(tag, payload)] = node.items()
        if tag == "$tensor":
            return self._tensor(payload)
        if tag == UNKNOWN:
            return self._unknown[_place(payload, self._unknown, "unknown leaf")]
        if tag == "$array":
            return self._array(payload)
        if tag in ("$bytes", "$bytearray"):
            data = self._data(*unpack(payload, 1))
            return bytes(data) if tag == "$bytes" else bytearray(data)
        if tag == "$bytes_io":
            return self._stream(payload)
        if tag not in leaves.KINDS:
            raise UsageError(
                f"unknown tag {tag!r:.40}: written by a newer Portus; upgrade this one"
            )
        return leaves.KINDS[tag].read(payload, self._inside)

    def _tensor(self, payload: object) -> torch.Tensor:
        if not isinstance(payload, list):
            return self._made_once(payload, payload)
        return self._made_once(*unpack(payload, 2))

    def _made_once(self, index: object, first: object) -> torch.Tensor:
        """Tensor ``index``, which is the same object as tensor ``first``."""
        spec = self._specs[_place(index, self._specs, "tensor")]
        key = _place(first, self._specs, "tensor")
        if key not in self._made:
            self._made[key] = self._rebuild(spec)
        return self._made[key]

    def _rebuild(self, spec: TensorSpec) -> torch.Tensor:
        if spec.storage == -1:
            return rebuild(spec, None)
        storage = self._storages[_place(spec.storage, self._storages, "storage")]
        if storage is None:
            raise UsageError(f"storage {spec.storage} was not loaded")
        return rebuild(spec, storage)

    def _data(self, node: object) -> bytes | memoryview:
        """The bytes of an array or bytes object; big ones are the memory of their storage."""
        if not isinstance(node, dict) or [*node] != ["$tensor"]:
            return leaves.base64_bytes(node)
        tensor = self._tensor(node["$tensor"])
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise CorruptionError(f"not a row of bytes: {tensor.dtype}, {tuple(tensor.shape)}")
        return tensor.detach().numpy().data

    def _stream(self, payload: object) -> io.BytesIO:
        if not isinstance(payload, list) or not 2 <= len(payload) <= 3:
            raise CorruptionError(f"not a stream: {payload!r:.80}")
        data, position, *more = payload
        if type(position) is not int or not 0 <= position <= leaves.INT_MAX >> 1:
            raise CorruptionError(f"not a position in a stream: {position!r:.40}")
        made = io.BytesIO(self._data(data))
        made.seek(position)
        _with_attributes(made, *map(self._inside, more or [None]))
        return made

    def _array(self, payload: object) -> np.ndarray[Any, Any]:
        data, dtype, sizes, fortran = unpack(payload, 4)
        found = self._data(data)
        shape = arrays.read_shape(dtype, sizes, fortran)
        # Small ones are copied, since bytes cannot be written to.
        return arrays.array_over(shape, bytearray(found) if isinstance(found, bytes) else found)


def _place(node: object, places: Sequence[object], what: str) -> int:
    if type(node) is not int or not 0 <= node < len(places):
        raise CorruptionError(f"no {what} {node!r:.40}; there are {len(places)}")
    return node


def _build_ordered(items: Any, attributes: Any = None) -> object:
    made: OrderedDict[object, object] = OrderedDict(items)
    return _with_attributes(made, attributes)


def _build_default(items: Any, factory: Any) -> object:
    return defaultdict(None if factory is None else FACTORIES[factory], items)


def _build_counter(items: Any) -> object:
    made: Counter[object] = Counter()
    dict.update(made, items)
    return made


def _build_mapping(items: Any, owner: object, attributes: Any = None) -> object:
    made = classes.new_mapping(classes.find(leaves.name(owner)), items)
    return _with_attributes(made, attributes)


def _with_attributes(made: object, attributes: Any) -> object:
    """``made`` after its attributes were set, in its ``__dict__``: no code of its class runs."""
    if attributes is not None:
        vars(made).update(leaves.named_values(attributes))
    return made


_BUILD: Final[Mapping[str, Callable[..., object]]] = {
    "$tuple": lambda items: tuple(_list(items)),
    "$deque": lambda items, longest: deque(_list(items), longest),
    "$ordered": _build_ordered,
    "$defaultdict": _build_default,
    "$counter": _build_counter,
    "$mapping": _build_mapping,
    "$namedtuple": lambda items, owner: classes.new_namedtuple(
        classes.find(leaves.name(owner)), items
    ),
    "$dataclass": lambda items, owner: classes.new_dataclass(
        classes.find(leaves.name(owner)), items
    ),
    "$namespace": lambda items: _with_attributes(types.SimpleNamespace(), items),
    "$arguments": lambda items: _with_attributes(argparse.Namespace(), items),
}
"""How to make a wrapper of what was in it, and the rest."""

assert {*_BUILD, OBJECT} == WRAPPERS

_FIELDS: Final = frozenset({"$namedtuple", "$dataclass"})


def _list(items: object) -> list[object]:
    if not isinstance(items, list):
        raise CorruptionError(f"expected a list, found {type(items).__name__}")
    return items
